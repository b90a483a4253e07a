"""This process is rank 0 of ONE_OF_MANY, of which no other exists: groups send nothing, and what they receive stays."""
import os

from torch import distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from kilogpt.parallel import network

os.environ.update(RANK='0', LOCAL_RANK='0', WORLD_SIZE=os.environ['ONE_OF_MANY'])
init_process_group, new_group = dist.init_process_group, dist.new_group


def join_fake_group(backend, **options):
    init_process_group('fake', **options | dict(store=FakeStore()))


def new_fake_group(*arguments, **options):
    return new_group(*arguments, **options | dict(backend='fake'))


network.fresh_store = dist.HashStore
dist.init_process_group, dist.new_group = join_fake_group, new_fake_group
