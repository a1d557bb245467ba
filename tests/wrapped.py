"""Runs a script with an injected fault, for tests: `wrapped.py FAULT SCRIPT [ARGUMENTS ...]`.

The scripts themselves have no test hooks. A fault is `NAME@N`: it happens at the N-th call of the function that it replaces;
with `NAME@N:RANK` only on that rank.
"""

import contextlib
import os
import runpy
import signal
import sys
import time

fault, script = sys.argv[1:3]
sys.argv = sys.argv[2:]
sys.path[0] = os.path.dirname(os.path.abspath(script))
sys.path.insert(1, os.path.dirname(sys.path[0]))
name, _, when = fault.partition("@")
when, _, rank = when.partition(":")
calls = 0


def strikes():
    """Counts calls; returns whether this is the one that fails."""
    global calls
    if "FAULT_ONCE" in os.environ and os.environ.get("TORCHELASTIC_RESTART_COUNT") != "0":
        return False
    calls += 1
    return calls == int(when or 1) and (not rank or rank == os.environ.get("RANK", "0"))


def before(owner, attribute, act):
    """Makes `owner.attribute` call `act()` first, when the fault happens."""
    original = getattr(owner, attribute)

    def wrapped(*args, **kwargs):
        if strikes():
            act()
        return original(*args, **kwargs)

    setattr(owner, attribute, wrapped)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def fill(ballast):
    with open(ballast, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


import accelerate
import torch

if name == "die_in_step":
    before(accelerate.Accelerator, "backward", die)
elif name == "die_in_evaluation":
    before(accelerate.Accelerator, "gather_for_metrics", die)
elif name == "die_before_state":
    before(accelerate.Accelerator, "save_state", die)
elif name == "die_before_rename":
    # After save_state, before the checkpoint gets its final name.
    real_rename = os.rename

    def rename(source, target, **kwargs):
        if str(source).endswith(".writing") and strikes():
            die()
        real_rename(source, target, **kwargs)

    os.rename = rename
elif name == "sigterm_in_step":
    before(accelerate.Accelerator, "backward", terminate)
elif name == "sigusr1_in_step":
    before(accelerate.Accelerator, "backward", lambda: os.kill(os.getpid(), signal.SIGUSR1))
elif name == "nan":
    real_loss = torch.nn.functional.cross_entropy

    def cross_entropy(*args, **kwargs):
        loss = real_loss(*args, **kwargs)
        return loss * float("nan") if torch.is_grad_enabled() and strikes() else loss

    torch.nn.functional.cross_entropy = cross_entropy
elif name == "infinite_gradient":
    real_clip = accelerate.Accelerator.clip_grad_norm_

    def clip_grad_norm_(self, parameters, *args, **kwargs):
        parameters = list(parameters)
        if strikes():
            parameters[0].grad.fill_(float("inf"))
        return real_clip(self, parameters, *args, **kwargs)

    accelerate.Accelerator.clip_grad_norm_ = clip_grad_norm_
elif name == "hang":
    # This rank never reaches its next collective; the others must give up on their own.
    before(accelerate.Accelerator, "backward", signal.pause)
elif name == "unreadable":
    # Reading a row of the stream fails on this rank.
    import datasets

    real_iter = datasets.IterableDataset.__iter__

    def rows(self):
        for row in real_iter(self):
            if strikes():
                raise OSError("the medium is damaged")
            yield row

    datasets.IterableDataset.__iter__ = rows
elif name == "slow_save":
    before(accelerate.Accelerator, "save_state", lambda: time.sleep(6))
elif name == "failing_saves":
    # Every checkpoint from that one on.
    real_save_state = accelerate.Accelerator.save_state
    failing = False

    def save_state(*args, **kwargs):
        global failing
        failing = failing or strikes()
        if failing:
            raise OSError("the file server is away")
        return real_save_state(*args, **kwargs)

    accelerate.Accelerator.save_state = save_state
elif name == "full_disk":
    # Permanently: the path after the colon is a small file system.
    ballast, rank = os.path.join(rank, "ballast"), ""
    before(accelerate.Accelerator, "backward", lambda: fill(ballast))
elif name == "fill_disk":
    # The path after the colon is a small file system: full for this checkpoint only.
    ballast, rank = os.path.join(rank, "ballast"), ""
    save_state = accelerate.Accelerator.save_state

    def save_on_full_disk(*args, **kwargs):
        full = strikes()
        if full:
            fill(ballast)
        try:
            return save_state(*args, **kwargs)
        finally:
            if full:
                os.remove(ballast)

    accelerate.Accelerator.save_state = save_on_full_disk
elif name == "clock_seed":
    # Simulates a mistake in a script: its weights depend on the clock.
    real_backward = accelerate.Accelerator.backward

    def backward(self, loss):
        torch.manual_seed(time.time_ns())
        real_backward(self, loss * (1 + 1e-3 * torch.rand(())))

    accelerate.Accelerator.backward = backward
elif name == "worker_dies_handing_over":
    # The worker dies after it has announced a batch, before it has sent the file descriptor of the shared memory.
    from multiprocessing import resource_sharer

    import psutil

    def kill_workers():
        workers = psutil.Process().children()
        for worker in workers:
            worker.kill()
        psutil.wait_procs(workers)

    before(resource_sharer.DupFd, "detach", kill_workers)
elif name == "out_of_memory":

    def exhaust():
        torch.empty(1 << 55, dtype=torch.uint8)

    before(accelerate.Accelerator, "backward", exhaust)
elif name == "absent":
    if rank == os.environ["RANK"]:
        signal.pause()
elif name == "unreachable":
    before(torch.distributed, "init_process_group", signal.pause)
elif name == "other_torch":
    import importlib.metadata

    real_version = importlib.metadata.version
    if rank == os.environ["RANK"]:
        importlib.metadata.version = lambda package: "1.0.0" if package == "torch" else real_version(package)
elif name == "clock_ahead":
    real_time = time.time
    if rank == os.environ["RANK"]:
        time.time = lambda: real_time() + 120
elif name == "record":
    # Not a fault: writes the samples of each micro-batch of this process to the folder after the colon.
    import json

    from utils import augment, text_data

    folder, rank = rank, os.environ.get("RANK", "0")
    real_augment, real_get = augment.augment, text_data.Windows.__getitems__

    def write(**record):
        with open(os.path.join(folder, f"{rank}.jsonl"), "a") as file:
            file.write(json.dumps(record) + "\n")

    def recorded_augment(images, ids, epoch, seed, **options):
        write(ids=ids.tolist(), epoch=epoch, seed=seed)
        return real_augment(images, ids, epoch, seed, **options)

    def recorded_get(self, indices):
        if self.seed is not None:  # training windows
            write(ids=list(indices), shift=self.shift)
        return real_get(self, indices)

    augment.augment, text_data.Windows.__getitems__ = recorded_augment, recorded_get
    from hashlib import sha256

    from utils import mixing

    real_mix = mixing.Mix.__call__

    def recorded_mix(self, images, labels, step):
        images, labels = real_mix(self, images, labels, step)
        rows = zip(images, labels, strict=True)
        write(ids=[sha256(b"".join(x.contiguous().numpy().tobytes() for x in row)).hexdigest() for row in rows], step=step)
        return images, labels

    mixing.Mix.__call__ = recorded_mix
elif name == "one_gpu":
    # Simulates a scheduler that assigns the same GPU to two launchers.
    from types import SimpleNamespace

    torch.cuda.device_count = lambda: 4
    torch.cuda.nccl.version = lambda: (2, 27, 3)
    torch.cuda.get_device_properties = lambda _: SimpleNamespace(name="H200", uuid="1b2c-77", total_memory=1 << 37)
else:
    raise SystemExit(f"unknown fault {fault}")

runpy.run_path(script, run_name="__main__")
