"""Processes of mpirun, srun and other launchers of MPI programs: their variables, as torchrun's.

The rest of the code reads torchrun's variables alone: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR
and MASTER_PORT.
"""
import os
import re
import socket
import zlib

import torch

# The variables that stand for RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE. The first row that is there counts:
# mpirun within a job of Slurm starts its own helpers by srun, whose variables its processes inherit.
VARIABLES = {
    'mpirun': ('OMPI_COMM_WORLD_RANK', 'OMPI_COMM_WORLD_SIZE', 'OMPI_COMM_WORLD_LOCAL_RANK',
               'OMPI_COMM_WORLD_LOCAL_SIZE'),  # Open MPI
    'mpiexec': ('PMI_RANK', 'PMI_SIZE', 'MPI_LOCALRANKID', 'MPI_LOCALNRANKS'),  # MPICH and Intel MPI
    'PMI': ('PMI_RANK', 'PMI_SIZE', 'PMI_LOCAL_RANK', 'PMI_LOCAL_SIZE'),  # Cray
    # SLURM_NTASKS would not do: it is that of the job, also in the one shell that sbatch or salloc starts.
    'srun': ('SLURM_PROCID', 'SLURM_STEP_NUM_TASKS', 'SLURM_LOCALID', 'SLURM_STEP_TASKS_PER_NODE')}
# What tells jobs on one machine apart, which must not take the same port. MPICH's mpiexec has nothing like it.
JOB = ('PMIX_NAMESPACE', 'PMI_JOBID', 'SLURM_JOB_ID', 'SLURM_STEP_ID')


def adopt():
    """Set torchrun's variables, if a launcher of MPI programs has started this process beside others.

    Variables that are set already stay, and with RANK among them nothing is set. ValueError if the first node's
    address, or this process's place in its node, is not known.
    """
    environment = os.environ
    if 'RANK' in environment:
        return
    launcher = next((name for name, variables in VARIABLES.items() if environment.keys() >= {*variables}), None)
    if not launcher:
        count = environment.get('PMI_SIZE', '1')
        if count != '1' and 'PMI_RANK' in environment:
            raise ValueError(f'PMI_SIZE is {count}, but the rank of this process within its node is not known: '
                             'export LOCAL_RANK and LOCAL_WORLD_SIZE, with RANK and WORLD_SIZE, or use torchrun')
        return
    rank, count, local_rank, local_count = map(environment.get, VARIABLES[launcher])
    if count == '1':
        return
    if launcher == 'srun':
        if 'SLURM_PTY_PORT' in environment:
            raise ValueError(f'this is one of {count} tasks of srun --pty, of which only the first has a terminal: '
                             'start the run by srun without --pty, or by torchrun')
        local_count = tasks_of_node(local_count, int(environment['SLURM_NODEID']))
        if 'MASTER_ADDR' not in environment and str(local_count) != count:
            environment['MASTER_ADDR'] = address_of_first(environment['SLURM_STEP_NODELIST'])
    if str(local_count) == count:
        environment.setdefault('MASTER_ADDR', '127.0.0.1')
    if 'MASTER_ADDR' not in environment:
        raise ValueError(f'{launcher} has started {count} processes on several nodes and does not say where rank 0 '
                         'is: export MASTER_ADDR with the name or address of its node (Open MPI: mpirun -x '
                         'MASTER_ADDR=...; MPICH: mpiexec -genv MASTER_ADDR ...)')
    job = ' '.join(filter(None, map(environment.get, JOB)))
    environment.setdefault('MASTER_PORT', str(20000 + zlib.crc32(job.encode()) % 10000))
    environment.update(RANK=rank, WORLD_SIZE=count, LOCAL_RANK=local_rank, LOCAL_WORLD_SIZE=str(local_count))
    if 'OMP_NUM_THREADS' not in environment and local_count != '1':  # as torchrun does
        environment['OMP_NUM_THREADS'] = '1'
        torch.set_num_threads(1)


def tasks_of_node(text, node):
    """The number of tasks on a node, from 0, of Slurm's list: '2(x3),1' is 2, 2, 2 and 1."""
    counts = []
    for count, times in re.findall(r'(\d+)(?:\(x(\d+)\))?', text):
        counts += [int(count)] * int(times or 1)
    return counts[node]


def address_of_first(nodes):
    """The first name of Slurm's list of nodes. ValueError if it has no address here."""
    host = first_host(nodes)
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        raise ValueError(f"rank 0 is on Slurm's node {host}, a name that has no address here: export MASTER_ADDR "
                         'with one that the other nodes reach') from None
    return host


def first_host(text):
    """The first name of Slurm's list of nodes: 'gpu[03-04,7],login' begins with gpu03."""
    first = re.match(r'(\[[^]]*\]|[^,[])*', text)[0]
    return re.sub(r'\[(\w+)[^]]*\]', r'\1', first)
