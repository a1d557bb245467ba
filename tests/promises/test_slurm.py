"""submit.sbatch on a real SLURM cluster: a controller and two node daemons on this machine."""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from harness.launches import (
    CIFAR,
    ENDLESS,
    LIMIT,
    ROOT,
    SMALL,
    final_weights,
    metrics,
    results,
    run,
    status,
)

pytestmark = pytest.mark.slow

CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthInfo=cred_expire=5
SlurmctldPort={ports[0]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdSpoolDir={folder}/spool.%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
ReturnToService=2
KillWait=10
SlurmdTimeout=10
SlurmdParameters=config_overrides
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports[1]},{ports[2]}] CPUs=2 SocketsPerBoard=1 CoresPerSocket=2 \
ThreadsPerCore=1 RealMemory=4000
PartitionName=debug Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP
"""


def free_ports(count):
    """Finds ports that no process listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return sorted(each.getsockname()[1] for each in sockets)


class Cluster:
    """A controller and the daemons of two nodes, all on this machine.

    Attributes:
        daemons (dict): their processes, by name.
    """

    def __init__(self, folder):
        self.folder, self.daemons = folder, {}
        for name in ("state", "log", "spool.n1", "spool.n2"):
            (folder / name).mkdir()
        (folder / "slurm.conf").write_text(
            CONF.format(host=socket.gethostname(), folder=folder, ports=free_ports(3))
        )
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        # Jobs use the same Python as the tests.
        self.environment["PATH"] = f"{Path(os.sys.executable).parent}:{os.environ['PATH']}"

    def open(self):
        self.start("slurmctld", "-D")
        for node in ("n1", "n2"):
            self.start_node(node)
        idle = ["idle", "idle"]
        self.until("both nodes are idle", lambda: self.command("sinfo -h -N -o %T").split() == idle)

    def start_node(self, node):
        # Each node gets its own cores; otherwise the processes of both nodes would use all of them.
        cores = sorted(os.sched_getaffinity(0))
        mine = cores[: len(cores) // 2 or 1] if node == "n1" else cores[len(cores) // 2 :]
        self.start("taskset", "--cpu-list", ",".join(map(str, mine)), "slurmd", "-D", "-N", node)

    def start(self, *command):
        log = (self.folder / "log" / f"{command[-1]}.out").open("a")
        options = dict(env=self.environment, stdout=log, stderr=log)
        self.daemons[command[-1]] = subprocess.Popen(command, **options)

    def command(self, words, **options):
        words = words.split() if isinstance(words, str) else words
        options |= dict(env=self.environment, capture_output=True, text=True, timeout=60)
        done = subprocess.run(words, **options)
        assert words[0] != "sbatch" or done.returncode == 0, done.stderr
        return done.stdout

    def until(self, what, happens):
        """Polls until `happens()`: a cluster executes commands with a delay."""
        deadline = time.monotonic() + LIMIT
        while not (answer := happens()):
            assert time.monotonic() < deadline, f"{what} never came true\n{self.all_logs()}"
            time.sleep(0.2)
        return answer

    def until_logged(self, words, job, node=None, times=1):
        """Waits until the log of the job contains `words`; fails if the job ends without them."""

        def happens():
            # Checked before the log is read.
            ended = self.state(job) in ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED")
            logged = self.log(job, node).count(words) >= times
            assert logged or not ended, f"job {job} ended without '{words}'\n{self.all_logs()}"
            return logged

        self.until(f"'{words}' is logged", happens)

    def all_logs(self):
        logs = [*self.folder.glob("log/*.log"), *self.folder.glob("job/*.out")]
        return "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in logs)

    def submit(self, options, arguments):
        """Submits submit.sbatch from a separate project folder; returns the job id."""
        project = self.folder / "job"
        if not project.exists():
            project.mkdir()
            for name in ("scripts", "utils", "accelerate_configs"):
                (project / name).symlink_to(ROOT / name)
        script = str(ROOT / "scripts" / "submit.sbatch")
        line = ["sbatch", "--parsable", *options.split(), script, *arguments.split()]
        return self.command(line, cwd=project).strip()

    def log(self, job, node=None):
        path = self.folder / "job" / f"slurm-{job}{'' if node is None else f'.node{node}'}.out"
        return path.read_text() if path.exists() else ""

    def state(self, job):
        return self.command(f"squeue -h -j {job} -t all -o %T").strip()

    def until_ended(self, job, state="COMPLETED"):
        ended = ("COMPLETED", "FAILED", "CANCELLED")
        self.until("the job ends", lambda: self.state(job) in ended)
        assert self.state(job) == state, self.all_logs()

    def close(self):
        self.command("scancel -u root")
        for daemon in self.daemons.values():
            for process in [*psutil.Process(daemon.pid).children(recursive=True), daemon]:
                process.kill()
            daemon.wait()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    needed = ("slurmctld", "slurmd", "sbatch", "munged")
    missing = ", ".join(name for name in needed if not shutil.which(name)) or "not root"
    if missing != "not root" or os.geteuid() != 0:
        packages = "Debian: slurmctld slurmd slurm-client munge"
        pytest.skip(f"no SLURM here: {missing} ({packages})")
    if not any(process.info["name"] == "munged" for process in psutil.process_iter(["name"])):
        Path("/run/munge").mkdir(exist_ok=True)
        shutil.chown("/run/munge", "munge")
        subprocess.run(["runuser", "-u", "munge", "--", "munged"], check=True, timeout=60)
    made = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        made.open()
        yield made
    finally:
        made.close()


def test_a_lost_node_and_a_time_limit_cost_nothing(cluster, tmp_path):
    """A job loses a node, reaches its time limit, and ends with the weights of an uninterrupted run.
    Its processes wait in a step until a signal reaches them.
    """
    run("2cpu", CIFAR, f"{SMALL} --max_train_steps 20", output_dir=tmp_path / "whole")
    folder, records = cluster.folder / "run", tmp_path / "records"
    records.mkdir()
    held = f"{ROOT}/tests/harness/wrapped.py record_steps@5:{records} {ROOT}/{CIFAR}"
    words = f"{held} {SMALL} --max_train_steps 20 --output_dir {folder}"
    # So that the signal may come up to 90 s before the time limit.
    job = cluster.submit("--nodes=2 --time=60 --signal=B:USR1@60", words)
    cluster.until_logged("step  4/20", job, node=0)
    for process in psutil.Process(cluster.daemons["n2"].pid).children(recursive=True):
        process.kill()
    cluster.daemons["n2"].kill()
    cluster.command("scontrol update nodename=n2 state=down reason=lost")
    cluster.daemons["n2"].wait()
    waiting = ("PENDING", "REQUEUED")
    cluster.until("the job waits for its node", lambda: cluster.state(job) in waiting)
    cluster.start_node("n2")
    cluster.command("scontrol update nodename=n2 state=resume")

    cluster.until_logged("step  4/20", job, node=0, times=2)
    cluster.command(f"scontrol update jobid={job} timelimit=1")
    cluster.until_logged("run preempted", job)
    assert "asking the run to save" in cluster.log(job)
    cluster.command(f"scontrol update jobid={job} timelimit=60")
    cluster.until_ended(job)
    assert results(folder)["resumed_from"] >= 5 and results(folder)["num_processes"] == 2
    assert final_weights(folder) == final_weights(tmp_path / "whole")
    assert metrics(folder, "train") == metrics(tmp_path / "whole", "train")
    assert "step 20/20" in cluster.log(job, node=0) and "step" not in cluster.log(job, node=1)


def test_one_process_saves_and_continues_unless_canceled(cluster):
    folder = cluster.folder / "ended"
    slowly = f"{ROOT}/tests/harness/wrapped.py slow_save {CIFAR} {ENDLESS} --output_dir {folder}"
    job = cluster.submit("--nodes=1", slowly)
    cluster.until_logged("step      1/", job, node=0)  # not "starting at step 0"
    cluster.command(f"scancel --batch --signal=USR1 {job}")
    cluster.until_logged("attempt 0 ended", job)
    assert "run preempted" in cluster.log(job), cluster.all_logs()
    cluster.until_logged("continuing from", job, node=0)
    cluster.command(f"scancel {job}")
    cluster.until_ended(job, "CANCELLED")
    assert status(folder)["state"] == "preempted" and "attempt 2" not in cluster.log(job)
