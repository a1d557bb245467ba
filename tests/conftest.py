"""Shared by the tests: starts scripts as users do, and reads the files that they write."""

import contextlib
import fcntl
import importlib
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from hashlib import sha256
from pathlib import Path
from uuid import uuid4

import numpy as np
import psutil
import pytest
import torch
import warm

from scripts.chaos import CLOCK
from utils.run import stacks

ROOT = Path(__file__).resolve().parents[1]
CIFAR, GPT = "scripts/train_cifar.py", "scripts/train_gpt.py"
SHARED_DATA = ROOT.parent / "shared" / "data"
COLD = "PYTEST_COLD"  # the environment variable that tells pytest's own processes of --cold
LIMIT = 450  # seconds for one launch, so that a hang fails one test and does not block the suite

# A data set with 600 images to train on and 100 to test with. All test processes share it.
SMALL_DATA = Path(tempfile.gettempdir(), os.environ.setdefault("SMALL_DATA", f"{uuid4().hex}.npz"))
# A small run with evaluation and checkpoints mid-epoch, without batch norm (so that topologies
# compute the same).
SMALL = (
    f"--dataset {SMALL_DATA} --model net --batch_size 60 --max_train_steps 14 --log_every 1 "
    "--eval_every 7 --checkpoint_every 3"
)
# Saves only when it is stopped.
ENDLESS = f"{SMALL} --max_train_steps 100000 --eval_every 100000 --checkpoint_every 0"
# For train_gpt.py, the smallest of the scripts whose loader has workers.
GPT_WITH_A_WORKER = (
    "--dataset synthetic --n_layer 1 --n_head 1 --n_embd 16 --block_size 16 --batch_size 4 "
    "--num_workers 1 --max_train_steps 100000 --eval_every 100000 --checkpoint_every 0 "
    "--log_every 1"
)


def some_slow(names, *slow):
    """Parameters for a test, of which those in `slow` are marked so."""
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in slow)) for name in names]


def pytest_addoption(parser):
    parser.addoption(
        "--cold", action="store_true", help="start every process in a new interpreter, by exec"
    )


def pytest_configure(config):
    """Starts one server of warm processes for the whole test run, parallel test processes included,
    in a known environment.
    """
    # CI: there pytest would print the whole difference of what is not equal, thousands of log lines
    # included.
    for name in (
        "OMP_NUM_THREADS",
        "ACCELERATE_MIXED_PRECISION",
        "RANK",
        "WORLD_SIZE",
        "CI",
        "BUILD_NUMBER",
        "PYTHONDONTWRITEBYTECODE",  # every process would compile all modules of the project
    ):
        os.environ.pop(name, None)
    # What a shell starts in the background, and all that it starts in turn, ignores Ctrl-C, which
    # is tested here.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for signum in (signal.SIGQUIT, signal.SIGHUP):  # the second is ignored under nohup
        signal.signal(signum, signal.SIG_DFL)
    quick = "not slow" in config.option.markexpr
    if quick and "PYTEST_XDIST_WORKER" in os.environ and hasattr(os, "sched_setaffinity"):
        # Each of pytest's processes, and all that it starts, has its own cores. Two runs of two
        # threads each on two cores take several times as long: each thread waits for another that
        # does not run. Slow tests mostly wait, and keep all cores.
        number, count = (
            int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")),
            int(os.environ["PYTEST_XDIST_WORKER_COUNT"]),
        )
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[number::count] or cores[number % len(cores) :][:1])
    if config.option.cold:
        os.environ[COLD] = "1"
    if not SMALL_DATA.exists():
        config.add_cleanup(SMALL_DATA.unlink)
        write_small_data()
    if warm.ADDRESS not in os.environ and not config.option.collectonly:
        resources = contextlib.ExitStack()
        config.add_cleanup(resources.close)
        home = resources.enter_context(tempfile.TemporaryDirectory())
        os.environ.update(HF_HUB_OFFLINE="1", HF_HOME=home, TOKENIZERS_PARALLELISM="false")
        # Several runs share the cores. Threads that wait by spinning then take ten times as long.
        os.environ["OMP_WAIT_POLICY"] = "passive"
        os.environ[warm.ADDRESS] = resources.enter_context(warm.server(dict(os.environ)))
        resources.callback(os.environ.pop, warm.ADDRESS)


def pytest_runtest_setup():
    """Skips what `.ci/run` has no time for on a slow machine. `BEGIN_UNTIL`: seconds since 1970."""
    if time.time() > float(os.environ.get("BEGIN_UNTIL", "inf")):
        pytest.skip("left out, because this machine is slow")


def pytest_collection_modifyitems(items):
    """SLURM first: its tests take minutes in which they mostly wait, and the other test process can
    have all else.
    """
    items.sort(key=lambda item: "test_slurm" not in item.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """Starts the report of a failure with the promise that is broken: the name of the test, and its
    docstring.
    """
    report = yield
    if report.failed and hasattr(report.longrepr, "reprtraceback"):
        name = item.name.removeprefix("test_").replace("_", " ")
        promise = f"{name}: {item.function.__doc__}" if item.function.__doc__ else name
        report.longrepr.reprtraceback.reprentries[0].lines.insert(0, f"BROKEN PROMISE: {promise}")
    return report


def command(config, script, arguments, *, output_dir=None, root=ROOT, launcher=(), host=()):
    """The command line for `script` (a path below `root`); without `config`, it starts Python and
    `launcher` (if any) directly.

    `host`: the words that start a command on another machine.
    """
    start = [*host, sys.executable, *(() if config else launcher)]
    if config:
        yaml = (
            Path(config)
            if str(config).endswith(".yaml") and "/" in str(config)
            else ROOT / "accelerate_configs" / f"{config}.yaml"
        )
        start += [
            "-m",
            "accelerate.commands.accelerate_cli",
            "launch",
            "--config_file",
            str(yaml),
            *launcher,
        ]
    arguments = arguments.split() if isinstance(arguments, str) else list(arguments)
    return [
        *start,
        str(root / script),
        *arguments,
        *(["--output_dir", str(output_dir)] if output_dir else []),
    ]


def run(config, script, arguments="", *, check=True, cold=None, **kwargs):
    """Runs a script to its end; returns the completed process with its output.

    Args:
        cold (bool | None): whether to start a new interpreter, by `exec`; None: as `--cold` says.
    """
    cold = COLD in os.environ if cold is None else cold
    environment, words = (
        {**os.environ, **kwargs.pop("env", {})},
        command(config, script, arguments, **kwargs),
    )
    if cold:
        done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT, env=environment)
    else:
        done = warm.run(words[1:], environment, LIMIT)
    if check and done.returncode:
        raise AssertionError(
            f"exit code {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        )
    return done


class Started:
    """A running launch, in its own process group.

    A test reads its output line by line and waits for words, not for a time.
    """

    def __init__(self, config, script, arguments, **kwargs):
        environment = {**os.environ, **kwargs.pop("env", {}), "PYTHONUNBUFFERED": "1"}
        words = command(config, script, arguments, **kwargs)
        reader, writer = os.pipe()
        self.output = os.fdopen(reader, errors="replace")
        with os.fdopen(writer, "w") as writer:
            if words[0] == sys.executable and COLD not in os.environ:
                self.process = warm.Program(
                    words[1:], environment, writer, writer, start_new_session=True
                )
            else:  # --cold, or on another machine, where there is no server to fork from
                self.process = subprocess.Popen(
                    words,
                    stdout=writer,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env=environment,
                )
        self.lines = []

    def wait_for(self, words):
        """Reads until a line contains `words`; ends the launch if none does."""
        killer = threading.Timer(LIMIT, self.process.kill)
        killer.start()
        for line in self.output:
            self.lines.append(line)
            if words in line:
                killer.cancel()
                return line
        raise AssertionError(f"'{words}' never came:\n{''.join(self.lines)[-6000:]}")

    def kill_all(self):
        """Sends SIGKILL to the launcher and all its descendants (each worker is in its own
        session).
        """
        for process in [
            psutil.Process(self.process.pid),
            *psutil.Process(self.process.pid).children(recursive=True),
        ]:
            process.kill()
        self.finish()

    def finish(self):
        """Reads the rest of the output; returns (exit code, complete output)."""
        killer = threading.Timer(LIMIT, self.process.kill)
        killer.start()
        self.lines += self.output  # until the last process that writes to it has exited
        killer.cancel()
        return self.process.wait(LIMIT), "".join(self.lines)

    def workers(self):
        """Process ids of the training processes, by rank."""
        found = {}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                environment = child.environ()
            except psutil.Error:
                continue
            if any(part.endswith(".py") and "scripts" in part for part in child.cmdline()):
                found.setdefault(int(environment.get("RANK", 0)), child.pid)
        return found


def recorded(config, script, arguments, folder, processes=1, accumulation=1):
    """Runs a script, and reads which samples it trained on.

    Returns:
        list: for each optimizer step of this launch, the record of `wrapped.py record`, with the
            sorted `ids` of all processes.
    """
    records = folder.with_name(f"{folder.name}_records")
    records.mkdir()
    launcher = ("--num_processes", str(processes))
    run(
        config,
        "tests/wrapped.py",
        [f"record@0:{records}", script, *arguments.split()],
        output_dir=folder,
        launcher=launcher,
    )
    ranks = []
    for rank in range(processes):
        lines = (records / f"{rank}.jsonl").read_text().splitlines()
        ranks.append([json.loads(line) for line in lines])
    assert len({len(lines) for lines in ranks}) == 1 and len(ranks[0]) % accumulation == 0
    steps = []
    for first in range(0, len(ranks[0]), accumulation):
        parts = [part for lines in ranks for part in lines[first : first + accumulation]]
        facts = [{name: value for name, value in part.items() if name != "ids"} for part in parts]
        assert all(fact == facts[0] for fact in facts)
        steps.append({"ids": sorted(i for part in parts for i in part["ids"]), **facts[0]})
    return steps


def all_end(processes, seconds=60):
    """Whether all of `processes` end long before their runs could; a zombie that its new parent did
    not collect counts.

    Kills those that do not, which would otherwise train on, and write to a folder that is being
    removed.
    """
    deadline = time.monotonic() + seconds
    while alive := [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]:
        if time.monotonic() > deadline:
            for process in alive:
                process.kill()
            all_end(alive)
            return False
        psutil.wait_procs(processes, timeout=0.1)
    return True


def load_script(name):
    """Imports a script as a module."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


def kinds_of_classifiers():
    """The name of one model of each module of torchvision that defines classifiers."""
    from torchvision import models  # here, because it takes a second

    kinds = {}
    for name in models.list_models(module=models):
        kinds.setdefault(models.get_model_builder(name).__module__, name)
    # The first of them is a hundred times as large.
    kinds[models.regnet.__name__] = "regnet_x_400mf"
    return list(kinds.values())


def results(folder):
    return json.loads((Path(folder) / "results.json").read_text())


def status(folder):
    return json.loads((Path(folder) / "status.json").read_text())


def metrics(folder, split):
    """The lines of one split in metrics.jsonl, without the values that depend on timing."""
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in line.items() if k not in CLOCK}
        for line in lines
        if line["split"] == split
    ]


def final_weights(folder):
    """The hash of the exported weights.

    (Of the bytes themselves a failing `==` would print a difference, for minutes.)
    """
    found = [Path(folder) / "model.safetensors", Path(folder) / "model" / "model.safetensors"]
    return sha256(next(path for path in found if path.exists()).read_bytes()).hexdigest()


@pytest.fixture(autouse=True)
def unwatched(monkeypatch):
    """A run that a test starts in its own process does not watch over the tests that follow."""
    monkeypatch.setattr(stacks.Watcher, "start", lambda watcher: None)


@pytest.fixture(autouse=True)
def seeded():
    """The random numbers of a test do not depend on the tests before it in the same process."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def made_once(tmp_path_factory):
    """`made_once(name, make)` returns the result of `make(folder)`; only the first of the parallel
    test processes calls it.
    """
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent

    def get(name, make):
        folder, answer = base / name, base / f"{name}.made"
        folder.parent.mkdir(parents=True, exist_ok=True)
        with (base / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not answer.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                answer.write_bytes(pickle.dumps(make(folder)))
        return pickle.loads(answer.read_bytes())

    return get


def run_once(made_once, name, *args, **kwargs):
    """A run that tests share and do not change: the completed process, with its folder as
    `.folder`.
    """

    def make(folder):
        done = run(*args, output_dir=folder, **kwargs)
        done.folder = folder
        return done

    return made_once(name, make)


@pytest.fixture(scope="session")
def reference(made_once):
    """The uninterrupted run of SMALL for a topology: `reference("cpu")` has its output, and its
    folder as `.folder`.
    """

    def get(config, processes=1):
        return run_once(
            made_once,
            f"reference/{config}",
            config,
            CIFAR,
            SMALL,
            launcher=("--num_processes", str(processes)),
        )

    return get


def write_small_data():
    """Writes `SMALL_DATA`: noise, whose brightness depends on the class."""
    generator, arrays = np.random.default_rng(0), {}
    for split, count in (("train", 600), ("test", 100)):
        labels = generator.integers(0, 10, count)
        noise = generator.integers(0, 100, (count, 32, 32, 3))
        images = (noise + 15 * labels[:, None, None, None]).astype(np.uint8)
        arrays |= {f"{split}_images": images, f"{split}_labels": labels}
    np.savez(SMALL_DATA, **arrays)


@pytest.fixture(scope="session")
def odd_folder(made_once):
    """A folder in the layout of CIFAR-10 whose test set has a prime number of images."""
    return made_once("odd", lambda folder: make_folder(folder, train=120, test=101))


def make_folder(folder, train, test, change=None):
    """Writes random images to `folder` in the layout of CIFAR-10; `change(split, dataset)` modifies
    them. Returns `folder`.
    """
    import datasets  # here, because it takes a second in every test process
    import numpy as np
    from PIL import Image

    generator = np.random.default_rng(0)
    for split, count in (("train", train), ("test", test)):
        rows = {
            "img": [
                Image.fromarray(generator.integers(0, 256, (32, 32, 3), dtype=np.uint8))
                for _ in range(count)
            ],
            "label": [i % 10 for i in range(count)],
        }
        features = datasets.Features(
            {
                "img": datasets.Image(),
                "label": datasets.ClassLabel(names=[f"c{i}" for i in range(10)]),
            }
        )
        made = datasets.Dataset.from_dict(rows, features=features)
        if change:
            made = change(split, made)
        if made is not None:
            made.to_parquet(str(folder / f"{split}-00000-of-00001.parquet"))
    return folder


class Machine:
    """A simulated host: a network namespace with one interface and its own host name."""

    def __init__(self, rank):
        self.rank, self.name, self.interface = rank, f"machine{rank}-{os.getpid()}", f"eth{rank}"
        self.address = f"10.77.0.{rank + 1}"
        named = ("unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', self.name)
        self.enter = ("ip", "netns", "exec", self.name, *named)

    def connect(self):
        """Plugs its network cable in, if a test has pulled it out."""
        self.execute(f"ip link set {self.interface} up")

    def execute(self, words):
        """Runs a command in its network."""
        subprocess.run(["ip", "netns", "exec", self.name, *words.split()], check=True)

    def started(
        self,
        script,
        arguments,
        output_dir,
        *,
        config="2node_4gpu",
        launcher=None,
        env=None,
        enter=(),
    ):
        """Starts a launcher on this host as a user would, with 2 x 2 processes instead of the 2 x 4
        of the YAML.
        """
        typed = (
            "--machine_rank",
            str(self.rank),
            "--main_process_ip",
            "10.77.0.1",
            "--num_processes",
            "4",
        )
        return Started(
            config,
            script,
            arguments,
            output_dir=output_dir,
            launcher=typed if launcher is None else launcher,
            host=(*self.enter, *enter),
            env={"GLOO_SOCKET_IFNAME": self.interface, "CUDA_VISIBLE_DEVICES": "", **(env or {})},
        )


@pytest.fixture(scope="session")
def machines():
    """Two machines on one virtual cable."""
    if not shutil.which("ip"):
        pytest.skip("needs iproute2")
    made = [Machine(0), Machine(1)]

    def ip(words):
        return subprocess.run(["ip", *words.split()], capture_output=True, text=True)

    refused = ip(f"netns add {made[0].name}")
    if refused.returncode:
        pytest.skip(f"may not make network namespaces here: {refused.stderr.strip()}")
    ip(f"netns add {made[1].name}")
    ip(f"link add eth0 netns {made[0].name} type veth peer name eth1 netns {made[1].name}")
    for machine in made:
        for words in (
            f"addr add {machine.address}/24 dev {machine.interface}",
            f"link set {machine.interface} up",
            "link set lo up",
        ):
            assert ip(f"-n {machine.name} {words}").returncode == 0
    yield made
    for machine in made:
        ip(f"netns delete {machine.name}")
