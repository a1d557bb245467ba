"""Options and fixtures of the whole suite."""

import contextlib
import fcntl
import importlib.util
import os
import pickle
import random
import shutil
import signal
import subprocess
import tempfile
import time

import numpy as np
import pytest
import torch
from harness import warm
from harness.data import SMALL_DATA, write_small_data
from harness.launches import CIFAR, COLD, SMALL, run_once
from harness.machines import Machine

if importlib.util.find_spec("hypothesis"):
    import hypothesis

    # The same examples in every run, nothing left behind, no verdict that depends on the clock. What
    # fails is not shrunk, which can take minutes, unless asked for: `--hypothesis-profile shrink`.
    options = dict(derandomize=True, deadline=None, database=None, max_examples=50)
    found_at_once = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile("tests", **options, phases=found_at_once)
    hypothesis.settings.register_profile("shrink", **options)
    hypothesis.settings.load_profile("tests")
else:  # on a machine for `-m gpu` only
    collect_ignore = ["properties"]


def pytest_addoption(parser):
    parser.addoption("--cold", action="store_true", help="start every process in a new interpreter")


def pytest_configure(config):
    """Starts one server of warm processes for the whole test run, parallel test processes included,
    in a known environment.
    """
    # CI: there pytest would print the whole difference of what is not equal, thousands of log lines
    # included. PYTHONDONTWRITEBYTECODE: every process would compile all modules of the project.
    unset = "OMP_NUM_THREADS ACCELERATE_MIXED_PRECISION RANK WORLD_SIZE CI BUILD_NUMBER"
    for name in [*unset.split(), "PYTHONDONTWRITEBYTECODE"]:
        os.environ.pop(name, None)
    # What a shell starts in the background, and all that it starts in turn, ignores Ctrl-C, which
    # is tested here; under nohup, also SIGHUP.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if "not slow" in config.option.markexpr and "PYTEST_XDIST_WORKER" in os.environ:
        _use_own_cores()
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


def _use_own_cores():
    """Gives each of pytest's processes, and all that it starts, its own cores.

    Two runs of two threads each on two cores take several times as long: each thread waits for
    another that does not run. Slow tests mostly wait, and keep all cores.
    """
    number = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    count, cores = int(os.environ["PYTEST_XDIST_WORKER_COUNT"]), sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[number::count] or [cores[number % len(cores)]])


def pytest_runtest_setup():
    """Skips what `.ci/run` has no time for on a slow machine. `BEGIN_UNTIL`: seconds since 1970."""
    if time.time() > float(os.environ.get("BEGIN_UNTIL", "inf")):
        pytest.skip("left out, because this machine is slow")


def pytest_collection_modifyitems(items):
    """SLURM first: its tests take minutes in which they mostly wait, and the other test process can
    have all else.
    """
    items.sort(key=lambda item: "test_slurm" not in item.nodeid)


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


@pytest.fixture(scope="session")
def reference(made_once):
    """The uninterrupted run of SMALL for a topology: `reference("cpu")` has its output, and its
    folder as `.folder`.
    """

    def get(config, processes=1):
        launcher, name = ("--num_processes", str(processes)), f"reference/{config}"
        return run_once(made_once, name, config, CIFAR, SMALL, launcher=launcher)

    return get


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
    one, two = (machine.name for machine in made)
    lines = [f"netns add {two}", f"link add eth0 netns {one} type veth peer name eth1 netns {two}"]
    for machine in made:
        place = f"-n {machine.name}"
        lines.append(f"{place} addr add {machine.address}/24 dev {machine.interface}")
        lines += [f"{place} link set {name} up" for name in (machine.interface, "lo")]
    assert not any(ip(line).returncode for line in lines)
    yield made
    for machine in made:
        ip(f"netns delete {machine.name}")
