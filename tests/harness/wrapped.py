"""Runs a script with an injected fault, for tests: `wrapped.py FAULT SCRIPT [ARGUMENTS ...]`.

The scripts themselves have no test hooks. A fault is `NAME@N`: it happens at the N-th call of the
function that it replaces; with `NAME@N:RANK` only on that rank.
"""

import contextlib
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import time

fault, script = sys.argv[1:3]
sys.argv = sys.argv[2:]
sys.path[0] = os.path.dirname(os.path.abspath(script))
sys.path.insert(1, os.path.dirname(sys.path[0]))
name, _, when = fault.partition("@")
when, _, rank = when.partition(":")
calls = 0
warming_up = False
afterwards = []  # functions to call when the script has ended without an error


def strikes():
    """Counts calls; returns whether this is the one that fails."""
    global calls
    if warming_up:  # the warm-up of DDP is not a step
        return False
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
    # The checkpoint before is complete: a test knows from which step the run goes on.
    saving.wait_for_newest()
    kill()


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def lose_machine():
    """Kills everything that this process's launcher started, and the launcher, at once."""
    saving.wait_for_newest()
    launcher = psutil.Process(os.getppid())
    for process in [launcher, *launcher.children(recursive=True)]:
        if process.pid != os.getpid():
            process.kill()
    die()


def fill(ballast):
    with open(ballast, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass


def is_first():
    return os.environ.get("RANK", "0") == "0"


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


import accelerate
import psutil
import torch
from torch.distributed.checkpoint._state_dict_stager import StateDictStager

from utils.run import ddp, saving

real_warm_up = ddp.warm_up


def warm_up(*args):
    global warming_up
    warming_up = True
    real_warm_up(*args)
    warming_up = False


ddp.warm_up = warm_up

if name == "die_in_step":
    before(accelerate.Accelerator, "backward", die)
elif name == "die_in_evaluation":
    before(accelerate.Accelerator, "gather_for_metrics", die)
elif name == "die_before_state":
    before(accelerate.Accelerator, "save_state", die)
elif name == "lost_in_step":
    before(accelerate.Accelerator, "backward", lose_machine)
elif name == "lost_in_save":
    before(accelerate.Accelerator, "save_state", lose_machine)
elif name in ("power_lost_in_step", "power_lost_in_save"):
    # Nothing tells the other machines: the packets that the kernel sends when processes die do not
    # leave.
    def cut():
        saving.wait_for_newest()
        subprocess.run(["ip", "link", "set", os.environ["GLOO_SOCKET_IFNAME"], "down"], check=True)
        lose_machine()

    before(
        accelerate.Accelerator, "backward" if name == "power_lost_in_step" else "save_state", cut
    )
elif name == "die_while_copied":
    before(StateDictStager, "stage", kill)
elif name == "die_while_written":
    before(torch, "save", kill)
elif name == "sigterm_while_written":
    before(torch, "save", terminate)
elif name in ("die_before_rename", "lost_before_rename", "die_after_rename"):
    # Around the moment at which the checkpoint gets its final name.
    real_rename = os.rename

    def rename(source, target, **kwargs):
        strike = str(source).endswith(".writing") and strikes()
        if strike and name == "lost_before_rename":
            saving.wait_for_newest = lambda: None  # this is the thread that writes it
            lose_machine()
        elif strike and name == "die_before_rename":
            kill()
        real_rename(source, target, **kwargs)
        if strike:
            kill()

    os.rename = rename
elif name == "sigterm_in_step":
    before(accelerate.Accelerator, "backward", terminate)
elif name == "sigterm_in_evaluation":
    before(accelerate.Accelerator, "gather_for_metrics", terminate)
elif name == "sighup_in_step":
    before(accelerate.Accelerator, "backward", lambda: os.kill(os.getpid(), signal.SIGHUP))
elif name == "silent_loader":
    # A loader whose worker is alive, but sends nothing, from its N-th batch on.
    from utils.data import text

    before(text.Windows, "__getitems__", lambda: time.sleep(3600))
elif name == "undeletable":
    # As on NFS while another process has a file open: the folder of that checkpoint stays.
    import errno
    import shutil

    real_rmtree, kept = shutil.rmtree, when

    def rmtree(path, ignore_errors=False, **kwargs):
        if not str(path).endswith(kept):
            real_rmtree(path, ignore_errors=ignore_errors, **kwargs)
        elif not ignore_errors and os.path.exists(path):
            raise OSError(errno.ENOTEMPTY, "Directory not empty")

    shutil.rmtree = rmtree
elif name == "rename_folder":
    # The output folder is renamed in that step; the new name is after the colon.
    target, rank = rank, ""
    folder = sys.argv[sys.argv.index("--output_dir") + 1]
    before(accelerate.Accelerator, "backward", lambda: is_first() and os.rename(folder, target))
elif name == "no_plots":
    from utils import plots

    def refuse(*_, **__):
        raise RuntimeError("ESC \x1b[31m is not a letter")

    plots.save = refuse
elif name == "sigusr1_in_step":
    before(accelerate.Accelerator, "backward", lambda: os.kill(os.getpid(), signal.SIGUSR1))
elif name == "nan":
    real_loss = torch.nn.functional.cross_entropy

    def cross_entropy(*args, **kwargs):
        loss = real_loss(*args, **kwargs)
        return loss * float("nan") if torch.is_grad_enabled() and strikes() else loss

    torch.nn.functional.cross_entropy = cross_entropy
elif name == "infinite_gradient":
    real_backward = accelerate.Accelerator.backward

    def backward(self, loss):
        real_backward(self, loss)
        if strikes():
            next(self._models[0].parameters()).grad.fill_(float("inf"))

    accelerate.Accelerator.backward = backward
elif name == "hang":
    # This rank never reaches its next collective; the others must give up on their own.
    before(accelerate.Accelerator, "backward", signal.pause)
elif name == "slow_loader":
    # The batches of that rank come late.
    from utils.data import text

    real_get = text.Windows.__getitems__

    def late(self, indices):
        if rank == os.environ["RANK"]:
            time.sleep(0.3)
        return real_get(self, indices)

    text.Windows.__getitems__ = late
elif name == "stop":
    # As a debugger does, or a machine that swaps: the process is there, and none of its threads runs.
    before(accelerate.Accelerator, "backward", lambda: os.kill(os.getpid(), signal.SIGSTOP))
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
elif name == "slow_check":
    # Between the agreement to stop and the save.
    from utils.run import guard

    before(guard.Guard, "check", lambda: time.sleep(6))
elif name == "slow_hash":
    from utils.run import manifest

    before(manifest, "_sha256", lambda: time.sleep(15))
elif name == "elsewhere":
    # Not a fault of the script: each rank has a folder of its own below the one after the colon, as
    # without a shared disk.
    from utils.run import manifest

    script, manifest.SHARED_CHECKS = os.path.abspath(script), 2
    os.makedirs(os.path.join(rank, os.environ["RANK"]))
    os.chdir(os.path.join(rank, os.environ["RANK"]))
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
    real_start = saving.Writer.start

    def start_on_full_disk(*args):
        full = strikes()
        if full:
            fill(ballast)
        future = real_start(*args)
        if full:
            future.add_done_callback(lambda _: pathlib.Path(ballast).unlink(missing_ok=True))
        return future

    saving.Writer.start = start_on_full_disk
elif name == "clock_seed":
    # Simulates a mistake in a script: its weights depend on the clock.
    real_backward = accelerate.Accelerator.backward

    def backward(self, loss):
        torch.manual_seed(time.time_ns())
        real_backward(self, loss * (1 + 1e-3 * torch.rand(())))

    accelerate.Accelerator.backward = backward
elif name == "worker_dies_handing_over":
    # The worker dies after it has announced a batch, before it has sent the file descriptor of the
    # shared memory.
    from multiprocessing import resource_sharer

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
        importlib.metadata.version = lambda package: (
            "1.0.0" if package == "torch" else real_version(package)
        )
elif name == "clock_ahead":
    real_time = time.time
    if rank == os.environ["RANK"]:
        time.time = lambda: real_time() + 120
elif name == "record":
    # Not a fault: writes the samples of each micro-batch of this process to the folder after the
    # colon.
    import json

    from utils.data import augment, text

    folder, rank = rank, os.environ.get("RANK", "0")
    real_augment, real_get = augment.augment, text.Windows.__getitems__

    def write(**record):
        if warming_up:
            return
        with open(os.path.join(folder, f"{rank}.jsonl"), "a") as file:
            file.write(json.dumps(record) + "\n")

    def recorded_augment(images, ids, epoch, seed, **options):
        write(ids=ids.tolist(), epoch=epoch, seed=seed)
        return real_augment(images, ids, epoch, seed, **options)

    def recorded_get(self, indices):
        if self.seed is not None:  # training windows
            write(ids=list(indices), shift=int(self.shift))
        return real_get(self, indices)

    augment.augment, text.Windows.__getitems__ = recorded_augment, recorded_get
    from hashlib import sha256

    from utils.data import mixing

    real_mix = mixing.Mix.__call__

    def recorded_mix(self, images, labels, step):
        images, labels = real_mix(self, images, labels, step)
        rows = zip(images, labels, strict=True)
        write(
            ids=[
                sha256(b"".join(x.contiguous().numpy().tobytes() for x in row)).hexdigest()
                for row in rows
            ],
            step=step,
        )
        return images, labels

    mixing.Mix.__call__ = recorded_mix
elif name == "record_steps":
    # Not a fault: each process writes to the folder after the colon which samples it used in which
    # step, and in which attempt. In an attempt of 2 processes it holds step N (N+M: each of them)
    # until a signal reaches it: until another machine joins.
    import json

    from utils.run import guard, process

    folder, rank = rank, ""
    real_should_stop = guard.Guard.should_stop

    def should_stop(self, step, losses, ids, *args, **kwargs):
        while (
            str(step) in when.split("+")
            and os.environ["WORLD_SIZE"] == "2"
            and not process.signal_name()
        ):
            time.sleep(0.05)
        attempt = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        samples = [i for part in ids for i in part.tolist()]
        record = {
            "step": step,
            "ids": samples,
            "attempt": attempt,
            "processes": int(os.environ.get("WORLD_SIZE", 1)),
        }
        with open(os.path.join(folder, f"{os.getpid()}.jsonl"), "a") as file:
            file.write(json.dumps(record) + "\n")
        return real_should_stop(self, step, losses, ids, *args, **kwargs)

    guard.Guard.should_stop = should_stop
elif name == "one_gpu":
    # Simulates a scheduler that assigns the same GPU to two launchers.
    from types import SimpleNamespace

    torch.cuda.device_count = lambda: 4
    torch.cuda.nccl.version = lambda: (2, 27, 3)
    torch.cuda.get_device_properties = lambda _: SimpleNamespace(
        name="H200", uuid="1b2c-77", total_memory=1 << 37, major=9, minor=0
    )
elif name == "one_device":
    # Not a fault: all processes share the first GPU, as if each were alone on a machine with it.
    # NCCL refuses that, gloo does not.
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    real_prepare = accelerate.PartialState._prepare_backend

    def prepare_backend(self, *args, **kwargs):
        backend, kind = real_prepare(self, *args, **kwargs)
        return backend and "gloo", kind

    accelerate.PartialState._prepare_backend = prepare_backend
elif name == "gpus":
    # This machine has that many, of the compute capability after the colon.
    capability, rank = rank, ""
    torch.cuda.device_count = lambda: int(when)
    torch.cuda.get_device_name = lambda *_: "Tesla T4"
    torch.cuda.get_device_capability = lambda *_: tuple(map(int, capability.split(".")))
    real_start = accelerate.Accelerator.__init__

    def start_there(self, *args, **kwargs):
        real_start(self, *args, **kwargs)
        if capability:  # there is no such GPU
            accelerate.Accelerator.device = torch.device("cuda")

    accelerate.Accelerator.__init__ = start_there
elif name == "fp16":
    # Not a fault of the script: gradients are scaled as in fp16 on a GPU (but computed in float32),
    # those of the N-th step overflow, and the process dies in the step after the colon.
    from utils.run import gpu

    dies, rank = rank, ""
    real_start, real_backward = accelerate.Accelerator.__init__, accelerate.Accelerator.backward

    def start(self, *args, **kwargs):
        real_start(self, *args, **kwargs)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)

    def backward(self, loss):
        real_backward(self, loss)
        if strikes():
            gradients = [weight.grad for weight in self._models[0].parameters()]
            next(gradient for gradient in gradients if gradient is not None).fill_(float("inf"))
        if str(calls) == dies:
            die()

    real_unscale = accelerate.Accelerator.unscale_gradients

    def unscale_gradients(self, optimizer=None):
        self.native_amp, self.state._mixed_precision = True, "fp16"
        real_unscale(self, optimizer)
        self.native_amp, self.state._mixed_precision = False, "no"

    accelerate.Accelerator.__init__, accelerate.Accelerator.backward = start, backward
    accelerate.Accelerator.unscale_gradients = unscale_gradients
    gpu.skip_whole_steps()
elif name == "muon_precision":
    # Not a fault: the precision in which Muon orthogonalizes follows the colon.
    from utils import muon

    precision, rank = rank, ""
    real_orthogonalize = muon.orthogonalize

    def orthogonalize(x, iterations=5, half=None):
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        done = real_orthogonalize(x, iterations, precision == "float16")
        torch.backends.cuda.matmul.allow_tf32 = False
        return done

    muon.orthogonalize = orthogonalize
elif name == "count_compilations":
    # Not a fault: writes how often and how long the script compiled, to the file after the colon.
    # @1: with a backend that only counts, in seconds instead of minutes.
    import functools
    import json

    from torch._dynamo.utils import counters, get_compilation_metrics

    path, rank = rank, ""
    if when == "1":
        plain = torch.nn.Module.compile
        torch.nn.Module.compile = functools.partialmethod(plain, backend="eager")

    def report():
        compiled = [
            record for record in get_compilation_metrics() if record.entire_frame_compile_time_s
        ]
        figures = {
            "graph_breaks": sum(counters["graph_break"].values()),
            "compiled_functions": len({record.compile_id.split("/")[0] for record in compiled}),
            "recompilations": sum(not record.compile_id.endswith("/0") for record in compiled),
            "compile_seconds": sum(record.entire_frame_compile_time_s for record in compiled),
        }
        with open(path, "w") as file:
            json.dump(figures, file)

    afterwards.append(report)
elif name == "count_waits":
    # Not a fault: writes the lines at which steps 6 to 15 made the host wait for the device, to the
    # file after the colon. A step is all from one return of `should_stop` to the next: loading,
    # computing, and the agreement on stopping.
    import json
    import warnings

    from utils.run import guard

    path, rank = rank, ""
    waits, real_should_stop = [], guard.Guard.should_stop

    def watch(mode):
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode(mode)
            return
        for attribute, original in reading.items():  # on a CPU: whatever would wait for a device

            def read(self, *args, original=original, **kwargs):
                warnings.warn("called a synchronizing CUDA operation", stacklevel=2)
                return original(self, *args, **kwargs)

            setattr(torch.Tensor, attribute, read if mode == "warn" else original)

    reading = {
        attribute: getattr(torch.Tensor, attribute)
        for attribute in ("item", "tolist", "cpu", "numpy", "__bool__")
    }

    def remember(message, category, filename, lineno, file=None, line=None):
        if "synchronizing CUDA operation" in str(message):
            waits.append(f"{os.path.basename(filename)}:{lineno}")

    def should_stop(self, step, *args, **kwargs):
        answer = real_should_stop(self, step, *args, **kwargs)
        if step == 5:
            warnings.simplefilter("always")
            warnings.showwarning = remember
            watch("warn")
        elif step == 15:
            watch("default")
            with open(path, "w") as file:
                json.dump(waits, file)
        return answer

    guard.Guard.should_stop = should_stop
elif name == "step_waits":
    # Not a fault: the rules of GPUs. Writes what made the host wait for the device in steps 3 to 6
    # to the file after the colon. A step is all from one return of `should_stop` to the next.
    import json

    sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    from harness import gpu_rules
    from utils.run import guard

    path, rank = rank, ""
    rules, real_should_stop = gpu_rules.apply(), guard.Guard.should_stop

    def should_stop(self, step, *args, **kwargs):
        answer = real_should_stop(self, step, *args, **kwargs)
        if step == 2:
            rules.waits.clear()
        elif step == 6:
            with open(path, "w") as file:
                json.dump(rules.waits, file)
        return answer

    guard.Guard.should_stop = should_stop
elif name == "gpu_rules":
    # Not a fault: the rules of GPUs, and deterministic algorithms as there. Writes what was computed
    # on the device, and whether all of it had to be deterministic, to the file after the colon.
    import json

    sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    from harness import gpu_rules

    path, rank = rank, ""
    rules = gpu_rules.apply()
    torch.use_deterministic_algorithms(True, warn_only=True)

    def report():
        if is_first():
            strict = not torch.is_deterministic_algorithms_warn_only_enabled()
            with open(path, "w") as file:
                json.dump([rules.collectives, sorted(rules.operations), strict], file)

    afterwards.append(report)
else:
    raise SystemExit(f"unknown fault {fault}")

runpy.run_path(script, run_name="__main__")
for function in afterwards:
    function()
