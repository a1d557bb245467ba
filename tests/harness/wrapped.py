"""Runs a script with an injected fault, for tests: `wrapped.py NAME@N[:MORE] SCRIPT [ARGUMENTS ...]`.

The scripts themselves have no test hooks. A fault is a function below, looked up by its name, that
takes the place of another function. It strikes at the N-th call of that: with `NAME@N:RANK` only on
that rank. For the faults that have an argument, that is what follows the colon.

This is the one place of the tests that may reach into the product: into what the strings that begin
with "utils." name, and `manifest.SHARED_CHECKS`, `process.signal_name` and
`BackgroundWriter.wait_for_newest`. Of what is private in libraries, it uses `_models`, `_mixed_precision` and
`_prepare_backend` of Accelerate, and `StateDictStager` of torch.
"""

import contextlib
import functools
import hashlib
import json
import os
import pathlib
import pkgutil
import runpy
import signal
import sys
import threading
import time
import warnings
from types import SimpleNamespace

import psutil
import torch

fault, script = sys.argv[1:3]
sys.argv = sys.argv[2:]
sys.path[0] = os.path.dirname(os.path.abspath(script))
sys.path.insert(1, os.path.dirname(sys.path[0]))
sys.path.append(str(pathlib.Path(__file__).resolve().parents[2]))  # if the script is this one again

from utils.run.process import finish_writing, signal_name

name, _, when = fault.partition("@")
when, _, argument = when.partition(":")
own_rank = os.environ.get("RANK", "0")
calls = 0
warming_up = False
replacements, starts = {}, {}  # by the name of the fault

STEP, SAVE = "accelerate.Accelerator.backward", "accelerate.Accelerator.save_state"
EVALUATION = "accelerate.Accelerator.gather_for_metrics"
COPY = "torch.distributed.checkpoint._state_dict_stager.StateDictStager.stage"
WINDOW, SHOULD_STOP = (
    "utils.language.text.Windows.__getitems__",
    "utils.run.guard.Guard.should_stop",
)


def replaces(path, fault=None):
    """Registers a function to put in the place of the one at `path`, which it gets as its first
    argument; the fault has the name of the function, if it has no other.
    """

    def register(function):
        replacements.setdefault(fault or function.__name__, []).append((path, function))
        return function

    return register


def starts_with(function):
    """Registers a function that is called before the script; and what it returns, after it."""
    starts[function.__name__] = function
    return function


def put(path, function):
    """Puts a function in the place of the one at `path`."""
    owner, _, attribute = path.rpartition(".")
    owner = pkgutil.resolve_name(owner)
    original = getattr(owner, attribute)

    @functools.wraps(original)
    def replacement(*args, **kwargs):
        return function(original, *args, **kwargs)

    setattr(owner, attribute, replacement)


def strikes():
    """Counts calls; returns whether this is the one that fails."""
    global calls
    if warming_up:  # the warm-up of DDP is not a step
        return False
    calls += 1
    on_this_rank = argument in ("", own_rank) or name in WITH_ARGUMENT
    return calls == int(when or 1) and on_this_rank


def write_json(path, value, mode="w"):
    with open(path, mode) as file:
        file.write(json.dumps(value) + "\n")


# ------------------------------------------------- what happens just before a function is called


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def complete_checkpoint():
    """Waits for the checkpoint before: a test knows from which step the run continues."""
    if not threading.current_thread().name.startswith("checkpoint"):  # the thread that writes it
        finish_writing(None)


def die():
    complete_checkpoint()
    kill()


def lose_machine():
    """Kills everything that this process's launcher started, and the launcher, at once."""
    complete_checkpoint()
    launcher = psutil.Process(os.getppid())
    for process in [launcher, *launcher.children(recursive=True)]:
        if process.pid != os.getpid():
            process.kill()
    die()


def send(*numbers):
    """A function that sends signals to this process."""
    return lambda: [os.kill(os.getpid(), number) for number in numbers]


def exhaust_memory():
    torch.empty(1 << 55, dtype=torch.uint8)


def fill(ballast):
    with open(ballast, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass


BEFORE = {
    "die_in_step": (STEP, die),
    "die_in_evaluation": (EVALUATION, die),
    "die_while_copied": (COPY, kill),
    "die_while_written": ("torch.save", kill),
    "lost_in_step": (STEP, lose_machine),
    "lost_in_save": (SAVE, lose_machine),
    "sigterm_in_step": (STEP, send(signal.SIGTERM)),
    "signals_in_step": (STEP, send(signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM)),
    "sigterm_in_evaluation": (EVALUATION, send(signal.SIGTERM)),
    "sigterm_while_written": ("torch.save", send(signal.SIGTERM)),
    "sighup_in_step": (STEP, send(signal.SIGHUP)),
    # This rank never reaches its next collective; the others must give up on their own.
    "hang": (STEP, signal.pause),
    "out_of_memory": (STEP, exhaust_memory),
    # The argument is a small file system, full from then on; that of `fill_disk`, once.
    "full_disk": (STEP, lambda: fill(os.path.join(argument, "ballast"))),
    # Its worker is alive, but sends nothing.
    "silent_loader": (WINDOW, lambda: time.sleep(3600)),
    "slow_export": ("utils.run.files.write_weights", lambda: time.sleep(10)),
    "slow_save": (SAVE, lambda: time.sleep(3)),
    "ctrl_c_twice_in_save": (SAVE, send(signal.SIGINT, signal.SIGINT)),
    # Between the agreement to stop and the save.
    "slow_check": ("utils.run.guard.Guard.check", lambda: time.sleep(5)),
}
WITH_ARGUMENT = {"fp16", "full_disk", "fill_disk"}  # of those that strike


def act_first(act, original, *args, **kwargs):
    if strikes():
        act()
    return original(*args, **kwargs)


for key, (path, act) in BEFORE.items():
    replaces(path, key)(functools.partial(act_first, act))


# ------------------------------------------------------------------------------ checkpoints and disks


@replaces("os.rename")
def die_after_rename(original, source, target, **kwargs):
    """Just after the moment at which the checkpoint gets its final name."""
    original(source, target, **kwargs)
    if str(source).endswith(".writing") and strikes():
        kill()


@replaces("utils.run.metrics.Metrics.log")
def die_before_sample(original, self, split, *args, **kwargs):
    if split == "sample" and strikes():
        die()
    return original(self, split, *args, **kwargs)


@replaces("utils.scale.saving.BackgroundWriter.start")
def fill_disk(original, self, writes, finish):
    full = bool(writes) and strikes()  # without writes, old checkpoints are deleted
    ballast = pathlib.Path(argument, "ballast")
    if full:
        fill(ballast)
    future = original(self, writes, finish)
    if full:
        future.add_done_callback(lambda _: ballast.unlink(missing_ok=True))
    return future


@starts_with
def elsewhere():
    """Not a fault of the script: each rank has a folder of its own, without a shared disk."""
    global script
    from utils.run import manifest

    script, manifest.SHARED_CHECKS = os.path.abspath(script), 2
    os.makedirs(os.path.join(argument, own_rank))
    os.chdir(os.path.join(argument, own_rank))


@replaces("utils.report.plots.save")
def no_plots(*_, **__):
    raise RuntimeError("ESC \x1b[31m is not a letter")


# --------------------------------------------------------------------- data, losses and gradients


@replaces(WINDOW)
def slow_loader(original, self, indices):
    if argument == own_rank:
        time.sleep(0.3)
    return original(self, indices)


@replaces("torch.nn.functional.cross_entropy")
def nan(original, *args, **kwargs):
    loss = original(*args, **kwargs)
    return loss * float("nan") if torch.is_grad_enabled() and strikes() else loss


@replaces(STEP)
def infinite_gradient(original, self, loss):
    original(self, loss)
    if strikes():
        gradients = [weight.grad for weight in self._models[0].parameters()]
        next(gradient for gradient in gradients if gradient is not None).fill_(float("inf"))


@replaces("accelerate.Accelerator.__init__", "fp16")
def scale(original, self, *args, **kwargs):
    """Not a fault of the script: gradients are scaled as in fp16 on a GPU (but computed in float32).

    Those of the N-th step overflow, and the process dies in the step after the colon.
    """
    original(self, *args, **kwargs)
    self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)


@replaces(STEP, "fp16")
def overflow_and_die(original, self, loss):
    infinite_gradient(original, self, loss)
    if str(calls) == argument:
        die()


@replaces("accelerate.Accelerator.unscale_gradients", "fp16")
def unscale(original, self, optimizer=None):
    self.native_amp, self.state._mixed_precision = True, "fp16"
    original(self, optimizer)
    self.native_amp, self.state._mixed_precision = False, "no"


# ---------------------------------------------------------------------------------- other machines


@starts_with
def absent():
    if argument == own_rank:
        signal.pause()


@replaces("importlib.metadata.version")
def other_torch(original, package):
    return "1.0.0" if package == "torch" and argument == own_rank else original(package)


@starts_with
def one_gpu():
    """Simulates a scheduler that assigns the same GPU to two launchers."""
    torch.cuda.device_count = lambda: 4
    torch.cuda.nccl.version = lambda: (2, 27, 3)
    torch.cuda.get_device_properties = lambda _: SimpleNamespace(
        name="H200", uuid="1b2c-77", total_memory=1 << 37, major=9, minor=0
    )


@starts_with
def one_device():
    """Not a fault: all processes share the first GPU, as if each were alone on a machine with it.

    NCCL refuses that, gloo does not.
    """

    def prepare_backend(original, self, *args, **kwargs):
        backend, kind = original(self, *args, **kwargs)
        return backend and "gloo", kind

    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    put("accelerate.PartialState._prepare_backend", prepare_backend)


# ---------------------------------- not faults: what a run did, in a file or folder after the colon


trained = None  # the model
inputs = []  # for each micro-batch of this step, a checksum of each sample


@replaces("accelerate.Accelerator.prepare_model", "record")
def remember_model(original, *args, **kwargs):
    global trained
    trained = original(*args, **kwargs)
    return trained


@replaces("torch.nn.Module.__call__", "record")
def remember_inputs(original, self, *args, **kwargs):
    if self is trained and self.training and torch.is_grad_enabled() and not warming_up:
        tensors = [value for value in (*args, *kwargs.values()) if torch.is_tensor(value)]
        sums = []
        for row in zip(*tensors, strict=True):
            content = b"".join(value.contiguous().numpy().tobytes() for value in row)
            sums.append(hashlib.sha256(content).hexdigest()[:16])
        inputs.append(sums)
    return original(self, *args, **kwargs)


@replaces("torch.nn.functional.dropout", "record")
def leave_out_dropout(original, x, *args, **kwargs):
    return x if when == "1" else original(x, *args, **kwargs)


@replaces(SHOULD_STOP, "record")
def record(original, self, step, losses, ids, *args, **kwargs):
    """For each step and micro-batch of this process: the ids of the samples, each with a checksum of
    what the model was given; and the loss. @1: without dropout.
    """
    given = inputs[-len(ids) :]
    batches = []
    for part, sums in zip(ids, given, strict=True):
        batches.append(list(zip(part.tolist(), sums, strict=True)))
    inputs.clear()
    entry = {"step": step, "batches": batches, "losses": [loss.item() for loss in losses]}
    write_json(os.path.join(argument, f"{own_rank}.jsonl"), entry, "a")
    return original(self, step, losses, ids, *args, **kwargs)


@replaces(SHOULD_STOP)
def record_steps(original, self, step, losses, ids, *args, **kwargs):
    """Which samples each process used in which step, and in which attempt.

    In an attempt of 2 processes it holds step N (N+M: each of them) until a signal reaches it: until
    another machine joins.
    """
    held = str(step) in when.split("+") and os.environ["WORLD_SIZE"] == "2"
    while held and not signal_name():
        time.sleep(0.05)
    record = {
        "step": step,
        "ids": [i for part in ids for i in part.tolist()],
        "attempt": f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}",
        "processes": int(os.environ.get("WORLD_SIZE", 1)),
    }
    write_json(os.path.join(argument, f"{os.getpid()}.jsonl"), record, "a")
    return original(self, step, losses, ids, *args, **kwargs)


def after_steps(actions):
    """Calls functions after steps, by the number of the step.

    A step is all from one return of `should_stop` to the next: loading, computing, and the
    agreement on stopping.
    """

    def should_stop(original, self, step, *args, **kwargs):
        answer = original(self, step, *args, **kwargs)
        actions.get(step, lambda: None)()
        return answer

    put(SHOULD_STOP, should_stop)


@starts_with
def count_waits():
    """The lines at which steps 6 to 15 made the host wait for the device."""
    waits = []

    def watch(mode):
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode(mode)
        elif mode == "warn":  # on a CPU, one that must be seen
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)

    def remember(message, category, filename, lineno, file=None, line=None):
        if "synchronizing CUDA operation" in str(message):
            waits.append(f"{os.path.basename(filename)}:{lineno}")

    def start():
        warnings.simplefilter("always")
        warnings.showwarning = remember
        watch("warn")

    def end():
        watch("default")
        write_json(argument, waits)

    after_steps({5: start, 15: end})


@starts_with
def gpu_rules():
    """By the rules of GPUs, and with deterministic algorithms as there: what was computed on the
    device, whether all of it had to be deterministic, and what made the host wait for the device in
    steps 3 to 6.
    """
    sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    from harness import gpu_rules

    rules, waits = gpu_rules.apply(), []
    torch.use_deterministic_algorithms(True, warn_only=True)
    after_steps({2: rules.waits.clear, 6: lambda: waits.extend(rules.waits)})

    def report():
        if own_rank == "0":
            strict = not torch.is_deterministic_algorithms_warn_only_enabled()
            write_json(argument, [rules.collectives, sorted(rules.operations), strict, waits])

    return report


# ----------------------------------------------------------------------------------------- the run


def warm_up(original, *args):
    global warming_up
    warming_up = True
    original(*args)
    warming_up = False


if name not in replacements | starts:
    raise SystemExit(f"unknown fault {fault}")
put("utils.run.ddp.warm_up", warm_up)
for path, function in replacements.get(name, []):
    put(path, function)
report = starts.get(name, lambda: None)()
runpy.run_path(script, run_name="__main__")
if report:  # the script has ended without an error
    report()
