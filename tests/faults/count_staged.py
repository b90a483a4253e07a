"""Write to OUT_DIR.staged.RANK the bytes of host memory into which saves in the background copy tensors."""
import os
import sys

from torch.distributed.checkpoint.staging import DefaultStager

out_dir = next(argument for argument in sys.argv if argument.startswith('--out_dir=')).partition('=')[2]
stage = DefaultStager.stage
staged = 0


def counting_stage(self, tensor):
    global staged
    copy = stage(self, tensor)
    staged += copy.nbytes
    with open(f'{out_dir}.staged.{os.environ["RANK"]}', 'w') as file:
        print(staged, file=file)
    return copy


DefaultStager.stage = counting_stage
