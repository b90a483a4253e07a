"""The CPUs that a process can use. Without torch, for scripts that prepare data too."""
import math
import os
import platform


def available_cpus(root='/sys/fs/cgroup', membership='/proc/self/cgroup'):
    """The CPUs that this process can use at a time: those of the machine, or the quota of its container.

    A container limited to 2 CPUs on a machine of 64 still sees all 64. With that many threads, it would be
    stopped for most of each scheduling period. A quota of 1.5 CPUs counts as 2.
    """
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
    for line in read_text(membership).splitlines():
        _, controllers, group = line.split(':', 2)
        folder = os.path.join(root, controllers)
        for name in ['', *filter(None, group.split('/'))]:  # the limit of a group holds for those within it
            folder = os.path.join(folder, name)
            quota, period, *_ = [*read_text(os.path.join(folder, 'cpu.max')).split(), '', '']
            if not quota:  # control groups of version 1
                quota = read_text(os.path.join(folder, 'cpu.cfs_quota_us')).strip()
                period = read_text(os.path.join(folder, 'cpu.cfs_period_us')).strip()
            if quota.isdigit() and period.isdigit():  # 'max' and -1 are no limit
                cpus = min(cpus, math.ceil(int(quota) / int(period)))
    return cpus


def read_text(path):
    """The content of a file, or '' if it cannot be read."""
    try:
        with open(path, encoding='utf-8') as file:
            return file.read()
    except OSError:
        return ''


def cpu_name():
    """The name of the processor, as Linux gives it, or as Python does elsewhere."""
    lines = read_text('/proc/cpuinfo').splitlines()
    return next((line.strip() for line in lines if line.startswith('model name')), platform.processor())
