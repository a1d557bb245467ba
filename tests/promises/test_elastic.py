"""torchrun with a range of machines: the run goes on with those that are left, and takes a machine
back when it returns.
"""

import json
import re
from collections import defaultdict
from signal import SIGKILL

import pytest
from harness.launches import CIFAR, ROOT, SMALL, Started, metrics, results, run, status

RUN = f"{SMALL} --max_train_steps 24 --eval_every 24 --checkpoint_every 5"
# The rendezvous store of the launchers, as the page starts it. It outlives the loss of any machine.
RENDEZVOUS_STORE = re.search(
    r'python -c "(.*TCPStore.*)"', (ROOT / "accelerate_configs" / "README.md").read_text()
)[1]


@pytest.fixture
def start(machines, tmp_path):
    """`start(machine, fault)`: an elastic launcher with two processes on a machine."""
    (tmp_path / "records").mkdir()
    store = Started(None, "", [], launcher=("-c", RENDEZVOUS_STORE), host=machines[0].enter)

    def launch(machine, fault=""):
        conf = "is_host=0,join_timeout=200,last_call_timeout=1,keep_alive_interval=1"
        torchrun = "-m torch.distributed.run --nnodes 1:2 --nproc_per_node 2 --max_restarts 5"
        torchrun += f" --rdzv_id {tmp_path.name} --rdzv_endpoint {machines[0].address}:29400"
        torchrun += f" --rdzv_backend c10d --rdzv_conf {conf} --local_addr {machine.address}"
        env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "ACCELERATE_MIXED_PRECISION": "no"}
        options = dict(faults=f"record_steps@3+12:{tmp_path}/records {fault}", env=env)
        return machine.started(CIFAR, RUN, tmp_path / "run", launcher=torchrun, **options)

    yield launch
    store.kill_all()


def attempts(records):
    """Whole steps in the order of time: a list of (processes, {step: sorted ids})."""
    parts = defaultdict(lambda: defaultdict(list))
    files = sorted(records.iterdir(), key=lambda file: file.stat().st_mtime)
    for line in (json.loads(line) for file in files for line in file.read_text().splitlines()):
        parts[line["attempt"], line["processes"]][line["step"]].append(line["ids"])
    found = []
    for (_, processes), steps in parts.items():
        whole = {step: ids for step, ids in steps.items() if len(ids) == processes}
        whole = {step: sorted(i for part in ids for i in part) for step, ids in whole.items()}
        found.append((processes, whole))
    return found


# The second machine joins while the first one, alone, holds step 3. A signal stops the run one step
# later, so 4 is saved.


@pytest.mark.slow
def test_a_machine_is_lost_in_a_step_comes_back_and_is_lost_while_saving(machines, start, tmp_path):
    """Every step of every attempt has the samples and the losses of an undisturbed run."""
    first = start(machines[0])
    first.wait_for("step  2/24")
    second = start(machines[1], "lost_in_step@5:2")  # in step 9, the fifth of this attempt
    first.wait_for("global batch 60 = 4 processes x 15 samples")
    assert second.finish()[0] == -SIGKILL
    first.wait_for("step 11/24")  # alone again, it holds step 12 until the other machine is back
    second = start(machines[1], "lost_in_save@1:2")  # of step 15
    assert second.finish()[0] == -SIGKILL
    code, printed = first.finish()
    assert code == 0, printed[-5000:]
    one, records, folder = tmp_path / "one", tmp_path / "one_records", tmp_path / "run"
    records.mkdir()
    run("cpu", CIFAR, RUN, output_dir=one, faults=f"record_steps@0:{records}")
    ((_, expected),) = attempts(records)
    assert expected.keys() == set(range(1, 25))
    found = attempts(tmp_path / "records")
    for _, steps in found:
        for step, ids in steps.items():
            assert ids == expected[step], step
    assert status(folder)["state"] == "finished" and results(folder)["global_step"] == 24
    for ours, theirs in zip(metrics(folder, "train"), metrics(one, "train"), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)
    # A lost machine costs the steps since the last checkpoint, and one that comes back costs
    # nothing.
    ranges = [(processes, min(steps), max(steps)) for processes, steps in found if steps]
    assert ranges == [(2, 1, 4), (4, 5, 8), (2, 6, 13), (4, 14, 15), (2, 14, 24)]
