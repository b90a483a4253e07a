"""Run scripts in forked processes. The fork saves the import of torch, which takes longer than a tiny run.

`run_forked` forks the process that calls it. As a program, this file is a server for other processes, such
as the tests: each line of standard input requests a run, as JSON of the arguments of `run_forked`, and the
answer is a line on standard output with the exit codes of the run's processes.
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

GRACE = 10  # seconds until the other processes of a run are killed once one of them has failed


def prepare():
    """Import the modules that runs need, and make it safe to fork this process."""
    import torch
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.pipelining
    import torch.distributed.tensor.experimental
    import torch.distributed.tensor.parallel

    sys.dont_write_bytecode = False  # otherwise each run would compile this repository's modules again
    torch.set_num_threads(1)  # a pool of threads would not survive the fork
    gc.set_threshold(0)  # never: a tiny run leaves too little garbage to collect


def run_forked(nproc, ends_together=False, **request):
    """Run a script in nproc processes; returns their exit codes.

    ends_together: kill all processes some seconds after one has failed, as torchrun does.
    request: the other arguments of `run_process`.
    """
    forking = multiprocessing.get_context('fork')
    processes = []
    for rank in range(nproc):
        processes.append(forking.Process(target=run_process, args=(rank, nproc), kwargs=request))
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


def run_process(rank, nproc, script, arguments, env, cwd, timeout, folder, faults=(), before=lambda: None):
    """Run a script as process `rank` of nproc. Its files stdin, stdout.RANK and stderr.RANK are in `folder`.

    script: a file, or the name of a module. timeout: seconds after which the process is killed.
    faults: Python files to execute first. before: a function to call after them, just before the script.
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


def free_ports(first, last=32_000):
    """Yield ports that nothing listens on. gloo's connections take ports from 32,768 up."""
    for port in range(first, last):
        with contextlib.suppress(OSError):
            socket.create_server(('127.0.0.1', port)).close()
            yield str(port)


def serve():
    """Answer requests on standard input until it ends."""
    requests = os.fdopen(os.dup(0))  # a copy, since descriptor 0 becomes the stdin of a run
    for line in requests:
        print(json.dumps(run_forked(**json.loads(line))), flush=True)


if __name__ == '__main__':
    sys.path[0] = ''  # modules in this folder would hide Python's own; each run sets its own folder here
    for name in ('kilogpt', 'kilogpt.prove'):
        del sys.modules[name]  # a script in another copy of the repository imports the modules of that copy
    prepare()
    serve()
