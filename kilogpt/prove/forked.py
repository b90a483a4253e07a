"""Run scripts in processes forked from one that has imported torch, which takes longer than a tiny run.

`run_forked` forks from the process that calls it. As a program, this file is a server for other processes,
such as the tests: each line of standard input is a run, the JSON of the arguments of `run_forked`; the answer
on standard output is a line with the exit codes of the run's processes.
"""
import contextlib
import gc
import json
import multiprocessing
import multiprocessing.connection
import os
import runpy
import signal
import socket
import sys

GRACE = 10  # seconds that the processes of a run have to end once one of them has failed


def prepare():
    """Import what the runs need, and make this process safe to fork from."""
    import torch
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.pipelining
    import torch.distributed.tensor.experimental
    import torch.distributed.tensor.parallel

    sys.dont_write_bytecode = False  # wherever it is set: each run would compile these modules again
    torch.set_num_threads(1)  # before the fork, which a pool of threads would not survive
    gc.disable()  # a tiny run leaves too little garbage to look for


def run_forked(nproc, ends_together=False, **request):
    """Run a script in nproc processes; returns their exit codes.

    ends_together: end all processes some seconds after one has failed, as torchrun does.
    request: the other arguments of `be_process`.
    """
    forking = multiprocessing.get_context('fork')
    processes = []
    for rank in range(nproc):
        processes.append(forking.Process(target=be_process, args=(rank, nproc), kwargs=request))
        processes[-1].start()
    running = {process.sentinel: process for process in processes}
    timeout = None
    while running:
        ended = multiprocessing.connection.wait(running, timeout)
        if not ended:
            for process in running.values():
                process.kill()
            timeout = None
        for sentinel in ended:
            process = running.pop(sentinel)
            process.join()
            if process.exitcode and ends_together:
                timeout = GRACE
    return [process.exitcode for process in processes]


def be_process(rank, nproc, script, arguments, env, cwd, timeout, folder, faults=(), before=lambda: None):
    """Be process `rank` of nproc that run a script; the folder has its stdin, stdout.RANK and stderr.RANK.

    script: a file, or the name of a module. timeout: seconds until the process is ended.
    faults: Python files to execute first. before: a function to call then.
    """
    for descriptor, name in enumerate(('stdin', f'stdout.{rank}', f'stderr.{rank}')):
        os.dup2(os.open(os.path.join(folder, name), os.O_RDWR | os.O_CREAT), descriptor)
    sys.stdin = open(0)
    signal.alarm(timeout)  # SIGALRM ends the process
    os.environ.clear()
    os.environ.update(env)
    if nproc > 1:  # as torchrun does
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        os.environ.update(WORLD_SIZE=str(nproc), LOCAL_WORLD_SIZE=str(nproc))
    os.chdir(cwd)
    sys.argv = [script, *arguments]
    is_file = script.endswith('.py')
    sys.path[0] = os.path.dirname(script) if is_file else cwd
    for path in faults:
        runpy.run_path(path)
    before()
    if is_file:
        runpy.run_path(script, run_name='__main__')
    else:
        runpy.run_module(script, run_name='__main__', alter_sys=True)


def free_ports(first, count=5_000):
    """Ports of this machine that nothing listens on. Those from 32,768 up are taken by gloo's connections."""
    for port in range(first + os.getpid() % count, first + count + 1_000):
        with contextlib.suppress(OSError):
            socket.create_server(('127.0.0.1', port)).close()
            yield str(port)


def serve():
    requests = os.fdopen(os.dup(0))  # descriptor 0 becomes the stdin of a run
    for line in requests:
        print(json.dumps(run_forked(**json.loads(line))), flush=True)


if __name__ == '__main__':
    sys.path[0] = ''  # this folder has modules of the names of Python's; each run puts its own folder here
    prepare()
    serve()
