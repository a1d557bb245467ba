"""Functions of the benchmarks: what they count and write, not how fast anything is."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from harness.data import SMALL_DATA
from harness.launches import load_script

benchmark, gpt, images, measuring, peers, records, costs = map(
    load_script, ("benchmark", "gpt", "images", "measuring", "peers", "records", "costs")
)


def test_the_table_has_every_figure():
    def figure(benchmark, median, unit):
        command = f"python scripts/benchmarks/benchmark.py {benchmark} --rounds 3"
        return dict(median=median, min=1.0, max=2.0, n=3, unit=unit, command=command)

    record = dict(hardware="2 cores of X", versions={"torch": "2.15.0"}, date="2026-11-22")
    record["figures"] = {
        "a/b": figure("a", 1.234, "time, ratio"),
        "a_c": figure("a", 1.234, "time, ratio"),
        "a/d": figure("a", 1.5, "ms"),
        "e": figure("e", 1.6, "ms"),
    }
    first, *_, ratios, milliseconds, other = benchmark.table(record).splitlines()
    assert first == "2 cores of X, torch 2.15.0, 2026-11-22"
    assert ratios == "| `a` | b 1.23 (1 to 2), c 1.23 (1 to 2) | 3 | time, ratio |"
    assert milliseconds == "| `a` | d 1.5 (1 to 2) | 3 | ms |"
    assert other == "| `e` | 1.6 (1 to 2) | 3 | ms |"


def test_counts_the_operations_of_model_and_optimizer():
    """Those of the model as in the published formula, and of three iterations of Muon.

    It orthogonalizes 16 square matrices and 8 of the shape 4:1.
    """
    model, _ = gpt.small_gpt()
    product = 2 * 128**3  # of two square matrices
    # Square: three products in each iteration. 4:1: the Gram matrix and the result; three
    # polynomials, and two products for the next Gram matrix and one for the product of polynomials
    # after each but the last.
    muon = 16 * 3 * 3 * product + 8 * (2 * 4 + 3 + 2 * (2 + 1)) * product
    positions = gpt.GPT_BATCH * gpt.GPT["block_size"]
    assert gpt.gpt_flops() == positions * model.flops_per_token() + muon


def test_the_records_take_the_published_steps():
    """Those of an epoch, of the training, and those in which the first layer's bias is trained."""
    for name, lengths in (("airbench", (25, 200, 75)), ("hiverge", (32, 243, 7))):
        recipe = SimpleNamespace(**records.RECORDS[name])
        assert records.record_steps(recipe, 50_000) == lengths


def test_a_record_trains_its_first_bias_as_long_as_published(monkeypatch):
    changed = []

    class Watched(records.MuonSGD):
        def step(self):
            (bias,) = self.param_groups[1]["params"]
            before = bias.tolist()
            super().step()
            changed.append(bias.tolist() != before)

    monkeypatch.setattr(records, "MuonSGD", Watched)
    # As the training scripts do, with which it is compared.
    monkeypatch.setattr(records.devices, "keep_freed_memory", lambda: changed.append("memory"))
    short = dict(batch_size=10, epochs=0.1, whiten_epochs=0.03)  # of 600 images
    monkeypatch.setitem(records.RECORDS, "hiverge", records.RECORDS["hiverge"] | short)
    assert len(list(records.record("hiverge", str(SMALL_DATA), 0, False))) == 1 + 6 + 1
    assert changed == ["memory", True, True, False, False, False, False]


def test_imbalanced_data_keep_the_test_set(tmp_path):
    path, rarest = images.write_imbalanced("synthetic", tmp_path)
    arrays = np.load(path)
    counts = np.bincount(arrays["train_labels"])
    assert counts[0] > 400 and counts[9] == round(counts[0] / 100)
    steps = np.log(counts[:-1] / counts[1:])
    assert np.allclose(steps, np.log(100) / 9, atol=0.1)  # they are rounded
    assert len(arrays["val_labels"]) == 1000 and list(arrays["class_names"][-3:]) == rarest


def test_a_recipe_that_is_measured_finds_the_library(tmp_path):
    script = Path(images.write_recipe("rare_classes", tmp_path))
    assert "BalancedSampler(data" in script.read_text()
    assert (script.parent / "utils" / "run").is_dir()  # where a script looks for it


STUB = """
import json, pathlib, sys
folder = pathlib.Path(sys.argv[sys.argv.index("--output_dir") + 1])
folder.mkdir()
with open(folder / "metrics.jsonl", "w") as log:
    for step in range(4, 10):
        print(f"{sys.argv[1]}{step:4}/9 (100%)", flush=True)
        log.write(json.dumps({"split": "train", "step": step, "step_seconds": 1 + step}) + "\\n")
"""


@pytest.fixture
def stub(tmp_path):
    """A script that prints what a training script does, and writes its log.

    Its argument: the first word of its lines.
    """
    (tmp_path / "stub.py").write_text(STUB)
    return tmp_path / "stub.py"


def test_what_a_run_costs(stub):
    found = costs.costs.__wrapped__(lambda _, size: f"{stub} step", 1)
    assert found["start"] > 0 and found["memory"] > 0 and found["end"] > 0
    # Milliseconds, without the first step (4), and close to the fastest of the others.
    assert 6000 <= found["step"] < 7000
    assert measuring.steady([2.0, 3.0]) >= 2.0  # never faster than the fastest


@pytest.mark.parametrize(
    "begin", ["step ", "Train: 0 [", "Epoch: [0]  ["], ids=["ours", "timm", "torchvision"]
)
def test_the_first_steps_of_any_script(begin, stub):
    words = [str(stub), begin, "--output_dir", "{out}/run"]
    found = peers.first_steps.__wrapped__(words, False, 6)
    assert min(found.values()) > 0
    if begin == "step ":
        with pytest.raises(RuntimeError, match="ended after 6 of 7 steps"):
            peers.first_steps.__wrapped__(words, False, 7)


def test_growth_is_per_tenfold_size():
    assert costs.per_tenfold({1: [2.0, 3.0], 100: [8.0, 3.0]}) == [2.0, 1.0]
    measured = {
        ("images", "start"): {10: [3.0, 2.0], 100: [2.5, 4.0]},
        ("images", "end"): {10: [1.0, 1.0], 100: [1.0, 1.0]},
        ("restarts", "start"): {1: [1.0, 1.0], 1000: [8.0, 8.0]},
    }
    assert costs.growth_table(measured).splitlines()[2:] == [
        "| images: 10, 100 | 2, 2.5 (x1.25) |  |  | 1, 1 (x1.00) |",
        "| restarts: 1, 1,000 | 1, 8 (x2.00) |  |  |  |",
    ]


def test_a_peer_that_is_not_there_is_skipped(tmp_path, capsys):
    assert peers.peers(SimpleNamespace(peers=tmp_path), None) == {}
    lines = capsys.readouterr().out.splitlines()
    skipped = [["skipped", "timm:"], ["skipped", "torchvision:"]]
    assert [line.split()[:2] for line in lines] == skipped
