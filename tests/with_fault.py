"""Run train.py with a fault.

    torchrun --nproc_per_node=2 tests/with_fault.py tests/faults/NAME.py [train.py's arguments]
"""
import os
import runpy
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[0] = ROOT
_, fault, *arguments = sys.argv
sys.argv = ['train.py', *arguments]
runpy.run_path(fault)
runpy.run_path(os.path.join(ROOT, 'train.py'), run_name='__main__')
