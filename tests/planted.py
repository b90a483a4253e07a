"""Runs train.py with a fault in it: torchrun --nproc_per_node=2 tests/planted.py FAULT.py [train.py's arguments]"""
import os
import runpy
import sys

root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[0] = root
fault, *sys.argv[1:] = sys.argv[1:]
sys.argv[0] = 'train.py'
runpy.run_path(fault)
runpy.run_path(os.path.join(root, 'train.py'), run_name='__main__')
