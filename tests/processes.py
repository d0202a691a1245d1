"""Processes for tests, forked from one server that has torch and the package loaded: 0.1 s instead of 3."""
import multiprocessing
import os
import pkgutil
import runpy
import socket
import subprocess
import sys
import tempfile
import time
import types
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch.distributed as dist

import gruckpt

# torch.optim loads _dynamo
LOADED = ['torch', 'torch.distributed', 'torch._dynamo', 'pandas', 'pyarrow.parquet', 'matplotlib.pyplot',
          'matplotlib.backends.backend_agg', 'typer', 'typer._adapters', 'pytest']


@cache
def server():
    "The context of the server. OMP_NUM_THREADS=1 while it starts: a pool of threads does not survive a fork."
    context = multiprocessing.get_context('forkserver')
    own = [o.name for o in pkgutil.walk_packages(gruckpt.__path__, 'gruckpt.')]
    context.set_forkserver_preload(LOADED + own)
    before = os.environ.get('OMP_NUM_THREADS')
    os.environ['OMP_NUM_THREADS'] = '1'
    try: multiprocessing.forkserver.ensure_running()
    finally:
        if before is None: del os.environ['OMP_NUM_THREADS']
        else: os.environ['OMP_NUM_THREADS'] = before
    return context


def interpret(args, cwd, env, out, err):
    "What `python *args` does, in this process: `-c code ...`, `-m module ...` or `file ...`."
    for fd, path in (1, out), (2, err): os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), fd)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    if int(env.get('OMP_NUM_THREADS', 1)) > 1:
        import torch
        torch.set_num_threads(int(env['OMP_NUM_THREADS']))
    first, *rest = args
    sys.argv = ['-c', *rest[1:]] if first == '-c' else rest if first == '-m' else [first, *rest]
    if first == '-m':
        sys.modules.pop(rest[0], None)
        runpy.run_module(rest[0], run_name='__main__', alter_sys=True)
    elif first == '-c':
        main = sys.modules['__main__'] = types.ModuleType('__main__')
        exec(compile(rest[0], '<string>', 'exec'), vars(main))
    else: runpy.run_path(first, run_name='__main__')


@contextmanager
def group_of_one(path):
    """A process group of this process alone, which meets in a file.

    It ends when gloo's thread has let go of the last sum: torch waits for that thread with the interpreter's
    lock in its hands, and the thread may still need the lock.
    """
    dist.init_process_group('gloo', f'file://{path}', rank=0, world_size=1)
    try: yield
    finally:
        time.sleep(.1)
        dist.destroy_process_group()


class Process:
    "A process of `python *args`: forked, or with `fresh` an interpreter of its own. Used like a Popen."
    def __init__(self, *args, cwd='.', env=None, fresh=False):
        args, env = [*map(str, args)], {**os.environ, **(env or {})}
        self.files = [tempfile.NamedTemporaryFile('w+', suffix=o) for o in ('.out', '.err')]
        paths = [o.name for o in self.files]
        self.fresh, target = fresh, (args, str(Path(cwd).resolve()), env, *paths)
        if fresh:
            out, err = self.files
            self.process = subprocess.Popen([sys.executable, *args], cwd=cwd, env=env, stdout=out, stderr=err)
        else:
            self.process = server().Process(target=interpret, args=target, daemon=True)
            self.process.start()
        self.pid = self.process.pid

    def poll(self):
        "The exit code, or None while it runs."
        return self.process.poll() if self.fresh else self.process.exitcode

    @property
    def returncode(self): return self.poll()

    def said(self):
        "What it printed so far, and what it said on stderr."
        return tuple(Path(o.name).read_text() for o in self.files)

    def communicate(self, timeout=None):
        "Wait; then what it said. TimeoutExpired when it does not end in time."
        if self.fresh: self.process.wait(timeout)
        else:
            self.process.join(timeout)
            if self.poll() is None: raise subprocess.TimeoutExpired('forked process', timeout)
        return self.said()

    def send_signal(self, number):
        "Send a signal, unless it has ended."
        if self.poll() is None: os.kill(self.pid, number)

    def kill(self): self.process.kill()


def python(*args, timeout=300, **kw):
    "Exit code, output and errors of `python *args`."
    p = Process(*args, **kw)
    try: out, err = p.communicate(timeout)
    finally: p.kill()
    return p.returncode, out, err


def ranks(size, *args, env=None, **kw):
    "The processes of a group, by rank of `python *args`: what torchrun starts, without torchrun."
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        env = {**(env or {}), 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(s.getsockname()[1]),
               'WORLD_SIZE': str(size), 'OMP_NUM_THREADS': '1'}
    return [Process(*args, env={**env, 'RANK': str(i), 'LOCAL_RANK': str(i)}, **kw) for i in range(size)]
