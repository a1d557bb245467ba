"""benchmark.py: what it writes, not how fast anything is."""

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from harness.launches import Started, all_end, load_script, run
from PIL import Image

from utils.run import cpu
from utils.run.process import PREEMPTED

SCRIPT = "scripts/benchmark.py"
PRODUCTS = ["float32", "bf16"] if cpu.has_bf16() else ["float32"]
SCORES = ["accuracy", "macro_f1", "rare_recall"]
ACCURACIES = ["airbench", "airbench_flops", "hiverge", "hiverge_flops"]
ACCURACIES += [f"{way}{of}" for way in ("accuracy", "tta") for of in ("", "_airbench", "_hiverge")]
LIMITS = [*PRODUCTS, "copy", "sha256", "cifar_24px", "cifar_28px", "cifar_32px", "gpt"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("speed", "no benchmark is called speed: choose from loop_overhead,"),
        ("gpt", "the benchmark gpt needs data: --text"),
        ("peers", "the benchmark peers needs data: --peers"),
    ],
)
def test_bad_input_is_one_line(arguments, says, tmp_path):
    done = run(None, SCRIPT, arguments, output_dir=tmp_path / "out", check=False)
    assert done.returncode == 2 and says in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_the_table_has_every_figure():
    def figure(benchmark, median, unit):
        command = f"python scripts/benchmark.py {benchmark} --rounds 3"
        return dict(median=median, min=1.0, max=2.0, n=3, unit=unit, command=command)

    record = {
        "hardware": "2 cores of X",
        "versions": {"torch": "2.15.0"},
        "date": "2026-11-22",
        "figures": {
            "a/b": figure("a", 1.234, "time, ratio"),
            "a_c": figure("a", 1.234, "time, ratio"),
            "a/d": figure("a", 1.5, "ms"),
            "e": figure("e", 1.6, "ms"),
        },
    }
    table = load_script("benchmark").table(record)
    assert "2 cores of X, torch 2.15.0, 2026-11-22" in table
    assert "| `a` | b 1.23 (1 to 2), c 1.23 (1 to 2) | 3 | time, ratio |" in table
    assert "| `a` | d 1.5 (1 to 2) | 3 | ms |" in table
    assert "| `e` | 1.6 (1 to 2) | 3 | ms |" in table


def test_counts_the_operations_of_model_and_optimizer():
    """Those of the model as in the published formula, and of three iterations of Muon.

    It orthogonalizes 16 square matrices and 8 of the shape 4:1.
    """
    baselines = load_script("baselines")
    model, _ = baselines.small_gpt()
    product = 2 * 128**3  # of two square matrices
    # Square: three products in each iteration. 4:1: the Gram matrix and the result; three
    # polynomials, and two products for the next Gram matrix and one for the product of polynomials
    # after each but the last.
    muon = 16 * 3 * 3 * product + 8 * (2 * 4 + 3 + 2 * (2 + 1)) * product
    positions = baselines.GPT_BATCH * baselines.GPT["block_size"]
    assert baselines.gpt_flops() == positions * model.flops_per_token() + muon


@pytest.mark.parametrize(
    ("name", "lengths"), [("airbench", (25, 200, 75)), ("hiverge", (32, 243, 7))]
)
def test_the_records_take_the_published_steps(name, lengths):
    """Those of an epoch, of the training, and those in which the first layer's bias is trained."""
    baselines = load_script("baselines")
    assert baselines.record_steps(SimpleNamespace(**baselines.RECORDS[name]), 50_000) == lengths


def test_a_record_trains_its_first_bias_as_long_as_published(monkeypatch):
    baselines, changed = load_script("baselines"), []

    class Watched(baselines.MuonSGD):
        def step(self):
            (bias,) = self.param_groups[1]["params"]
            before = bias.tolist()
            super().step()
            changed.append(bias.tolist() != before)

    monkeypatch.setattr(baselines, "MuonSGD", Watched)
    # As the training scripts do, with which it is compared.
    monkeypatch.setattr(baselines.cpu, "keep_freed_memory", lambda: changed.append("memory"))
    short = dict(batch_size=50, epochs=0.06, whiten_epochs=0.02)
    monkeypatch.setitem(baselines.RECORDS, "hiverge", baselines.RECORDS["hiverge"] | short)
    assert len(list(baselines.record("hiverge", "synthetic", 0, False))) == 1 + 6 + 1
    assert changed == ["memory", True, True, False, False, False, False]


def test_a_steady_step_is_never_faster_than_the_fastest():
    assert load_script("benchmark").steady([2.0, 3.0]) >= 2.0


def test_imbalanced_data_keep_the_test_set(tmp_path):
    path, rarest = load_script("benchmark").write_imbalanced("synthetic", tmp_path)
    arrays = np.load(path)
    counts = np.bincount(arrays["train_labels"])
    assert counts[0] > 400 and counts[9] == round(counts[0] / 100)
    steps = np.log(counts[:-1] / counts[1:])
    assert np.allclose(steps, np.log(100) / 9, atol=0.1)  # they are rounded
    assert len(arrays["val_labels"]) == 1000 and list(arrays["class_names"][-3:]) == rarest


def test_a_recipe_that_is_measured_finds_the_library(tmp_path):
    script = Path(load_script("benchmark").write_recipe("rare_classes", tmp_path))
    assert "BalancedSampler(data" in script.read_text()
    assert (script.parent / "utils" / "run").is_dir()  # where a script looks for it


# Prints what a training script does, and writes its log. Its argument: the first word of its lines.
STUB = """
import json, pathlib, sys
folder = pathlib.Path(sys.argv[sys.argv.index("--output_dir") + 1])
folder.mkdir()
with open(folder / "metrics.jsonl", "w") as log:
    for step in range(4, 10):
        print(f"{sys.argv[1]}{step:4}/9 (100%)", flush=True)
        log.write(json.dumps({"split": "train", "step": step, "step_seconds": 1 + step}) + "\\n")
        if step > 7:
            save = {"split": "checkpoint", "step": step, "seconds": step}
            log.write(json.dumps(save) + "\\n")
"""


def test_what_a_run_costs(tmp_path):
    script = tmp_path / "stub.py"
    script.write_text(STUB)
    measure = load_script("benchmark").costs.__wrapped__
    found = measure(lambda _, size: (f"{script} step", size), 1)
    assert found["start"] > 0 and found["memory"] > 0 and found["end"] > 0
    assert found["checkpoint"] == 8  # the faster one
    # Milliseconds, without the first step (4), and close to the fastest of the others.
    assert 6000 <= found["step"] < 7000


@pytest.mark.parametrize(
    "begin",
    ["step ", "Train: 0 [", "Epoch: [0]  ["],
    ids=["ours", "timm", "torchvision"],
)
def test_the_first_steps_of_any_script(begin, tmp_path):
    script = tmp_path / "stub.py"
    script.write_text(STUB)
    benchmark = load_script("benchmark")
    words = [str(script), begin, "--output_dir", "{out}/run"]
    found = benchmark.first_steps.__wrapped__(words, False, 6)
    assert min(found.values()) > 0
    with pytest.raises(RuntimeError, match="ended after 6 of 7 steps"):
        benchmark.first_steps.__wrapped__(words, False, 7)


def test_growth_is_per_tenfold_size():
    benchmark = load_script("benchmark")
    assert benchmark.per_tenfold({1: [2.0, 3.0], 100: [8.0, 3.0]}) == [2.0, 1.0]
    measured = {
        ("images", "start"): {10: [3.0, 2.0], 100: [2.5, 4.0]},
        ("images", "end"): {10: [1.0, 1.0], 100: [1.0, 1.0]},
        ("restarts", "start"): {1: [1.0, 1.0], 1000: [8.0, 8.0]},
    }
    rows = benchmark.growth_table(measured).splitlines()
    assert rows[2:] == [
        "| images: 10, 100 | 2, 2.5 (x1.25) |  |  |  | 1, 1 (x1.00) |",
        "| restarts: 1, 1,000 | 1, 8 (x2.00) |  |  |  |  |",
    ]


def test_a_peer_that_is_not_there_is_skipped(tmp_path, capsys):
    assert load_script("benchmark").peers(SimpleNamespace(peers=tmp_path)) == {}
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["skipped", "timm:"],
        ["skipped", "torchvision:"],
    ]


@pytest.mark.slow
def test_a_signal_also_ends_the_processes_that_it_measures(tmp_path):
    started = Started(None, SCRIPT, "scaling_efficiency --quick --rounds 1", output_dir=tmp_path)
    started.wait_for("round 1 of 1")
    measured = []
    # torchrun and its two processes; their second thread watches torchrun.
    while len(measured) < 3 or any(process.num_threads() < 2 for process in measured):
        measured = psutil.Process(started.process.pid).children(recursive=True)
    os.kill(started.process.pid, signal.SIGTERM)
    assert all_end(measured)
    assert started.finish()[0] == PREEMPTED


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        [f"loop_overhead/{name}" for name in ("net", "default", "two_processes", "gpt")],
        ["pipeline_speedup", "memory"],
        ["startup_ratio/train_minimal", "startup_ratio/train_cifar", "startup_ratio/train_gpt"],
        ["image_loading/our", "image_loading/cached"],
        ["scoring/loader", "scoring/loader_and_model"],
        [f"imbalance/{name}_{way}" for name in SCORES for way in ("plain", "weights", "sampler")],
        [f"time_to_accuracy/{name}" for name in ACCURACIES],
        [f"machine_limit/{name}" for name in LIMITS],
    ],
    ids=lambda names: names[0].partition("/")[0],
)
def test_writes_figures_a_table_and_a_plot(names, tmp_path):
    benchmarks = list(dict.fromkeys(name.partition("/")[0] for name in names))
    words = ["--quick", "--rounds", "1", "--images", "synthetic", *benchmarks]
    done = run(None, SCRIPT, words, output_dir=tmp_path)
    table = (tmp_path / "benchmark.md").read_text()
    record = json.loads((tmp_path / "benchmark.json").read_text())
    assert list(record["figures"]) == names and {"hardware", "versions", "date"} <= record.keys()
    for name, figure in record["figures"].items():
        assert figure["n"] == 1 and figure["min"] == figure["median"] == figure["max"]
        # After four steps, rare classes may not be recognized; a difference may be negative.
        rare = figure["median"] == 0 and "rare_recall" in name
        assert figure["median"] > 0 or rare or figure["unit"].startswith("ms per step above")
        assert figure["command"].startswith(f"python scripts/benchmark.py {name.partition('/')[0]}")
        assert name in done.stdout and all(part in table for part in name.split("/"))
    picture = tmp_path / "benchmark.png"
    assert picture.exists() == any(f["unit"].endswith("ratio") for f in record["figures"].values())
    assert not picture.exists() or min(Image.open(picture).size) > 200
