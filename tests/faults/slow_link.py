"""DDP's gradients are on their way for 60 ms, as over a thin link."""
import threading
import time

import torch
import torch.distributed as dist
import torch.nn.parallel


def average_later(state, bucket):
    future, gradients = torch.futures.Future(), bucket.buffer()

    def send():
        time.sleep(0.06)
        dist.all_reduce(gradients)
        future.set_result(gradients.div_(dist.get_world_size()))

    threading.Thread(target=send).start()
    return future


class SlowDDP(torch.nn.parallel.DistributedDataParallel):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.register_comm_hook(None, average_later)


torch.nn.parallel.DistributedDataParallel = SlowDDP
