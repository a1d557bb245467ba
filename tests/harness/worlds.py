"""Several processes in one test: threads that exchange values, or forked processes."""

import contextlib
import os
import pickle
import sys
import tempfile
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from harness.fakes import accelerator, change
from utils.run import guard
from utils.scale import watchdog


class World:
    """Stands for torch.distributed: `size` threads, each a process with an accelerator.

    Attributes:
        group: has `WORLD`, as `torch.distributed.group` does.
        groups (list): the options of the groups that were created.
        in_background (list): of each reduction, whether it was.
    """

    ReduceOp = SimpleNamespace(MAX="max")

    def __init__(self, size, machines=1):
        self.size, self.machines, self.group = size, machines, SimpleNamespace(WORLD=object())
        self.groups, self.in_background = [], []
        self.exchanged, self.barrier = [None] * size, threading.Barrier(size, timeout=20)
        self.own = threading.local()

    def rank(self):
        """The number of the process that this thread stands for."""
        return self.own.rank

    def get_world_size(self):
        return self.size

    def new_group(self, **options):
        self.groups.append(options)
        return "a group of the host"

    def all_gather_object(self, values, value, group):
        assert group == "a group of the host" and values == [None] * self.size
        self.exchanged[self.rank()] = value
        self.barrier.wait()
        values[:] = self.exchanged
        self.barrier.wait()

    def all_reduce(self, tensor, op, group, async_op=False):
        self.in_background.append(async_op)
        assert op == "max" and tensor.dtype == torch.int64

        def wait():
            values = [None] * self.size
            self.all_gather_object(values, tensor.clone(), group)
            tensor.copy_(torch.stack(values).max(0).values)

        if async_op:
            return SimpleNamespace(wait=wait)
        wait()

    def run(self, function):
        """Calls `function(accelerator)` on every rank; the results, or the errors, by rank."""
        results = [None] * self.size

        def process(rank):
            self.own.rank = rank
            first = rank % (self.size // self.machines) == 0
            try:
                results[rank] = function(accelerator(self.size, rank, is_local_main_process=first))
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=process, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return results


class Process(threading.local):
    """Stands for `utils.run.process`: each thread has signals of its own."""

    signaled = started = stopping = False

    class Interrupted(Exception):
        pass

    def training_starts(self):
        self.started = True

    def stopping_starts(self):
        self.stopping = True

    def signal_name(self):
        return "SIGTERM" if self.signaled else None


def run_guards(size, function, timeout=600, **facts):
    """Calls `function(guard, rank)` with a Guard on each of so many processes.

    The guard and the watchdog have a Process and the world there; `facts` are those of the accelerators.

    Returns:
        World: with what the functions returned, or the errors they raised, as `results`.
    """
    world = World(size)

    def each(mine):
        change(mine, **facts)
        return function(guard.Guard(mine, timeout), mine.process_index)

    with pytest.MonkeyPatch.context() as patch:
        for module in (guard, watchdog):
            patch.setattr(module, "dist", world)
        patch.setattr(guard, "process", Process())
        world.results = world.run(each)
    return world


def in_forks(function, count=1):
    """What `function(rank)` returns, or the error that it raises, in each of so many processes.

    They are forked from this one, which keeps its variables, modules and signals as they are.
    Whoever traces this process (mutation.py) is told what they call.
    """
    children, called, trace = [], set(), sys.gettrace()

    def note(frame, *_):
        called.add((frame.f_code.co_filename, frame.f_code.co_qualname))

    for rank in range(count):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                torch.set_num_threads(1)  # the threads of this process are not in its forks
                sys.settrace(note if trace else None)
                result = function(rank)
            except BaseException as error:
                result = error
            sys.settrace(None)
            try:
                answer = pickle.dumps((result, called))
            except Exception:  # such an error is told, without its type
                answer = pickle.dumps((RuntimeError(f"{type(result).__name__}: {result}"), called))
            with os.fdopen(writer, "wb") as file:
                file.write(answer)
            os._exit(0)
        os.close(writer)
        children.append((child, reader))
    results = []
    for child, reader in children:
        with os.fdopen(reader, "rb") as file:
            result, calls = pickle.loads(file.read())
        os.waitpid(child, 0)
        results.append(result)
        for name, function_name in calls:
            code = SimpleNamespace(co_filename=name, co_qualname=function_name)
            trace(SimpleNamespace(f_code=code), "call", None)
    return results


def in_group(function, count, sizes=None):
    """Calls `function(accelerator, mesh)` in so many processes; returns what it returned.

    Args: sizes (tuple[int]): of the mesh; by default it has one dimension.
    """
    with tempfile.TemporaryDirectory() as folder:

        def process(rank):
            store = dist.FileStore(f"{folder}/store", count)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
            mesh = dist.init_device_mesh(
                "cpu", sizes or (count,), mesh_dim_names=("copies", "parts")[-len(sizes or "1") :]
            )
            result = function(accelerator(count, rank, is_fsdp2=True), mesh)
            dist.barrier()
            return result

        results = in_forks(process, count)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


@contextlib.contextmanager
def group_of_one():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
