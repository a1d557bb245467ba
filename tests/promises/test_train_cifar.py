"""train_cifar.py with the real launcher: the same results with one process and with several."""

import json
import shutil

import pytest
import torch
import torch.nn.functional as F
from harness.data import SHARED_DATA, make_folder
from harness.launches import (
    CIFAR,
    SMALL,
    Started,
    final_weights,
    load_script,
    metrics,
    recorded,
    results,
    run,
    some_slow,
    status,
)
from PIL import Image
from safetensors.torch import load_file

from utils.data.arrays import load_arrays

datasets = pytest.importorskip("datasets")


def test_leaves_everything_it_promises(reference):
    done, folder = reference("cpu"), reference("cpu").folder
    for name in (
        "args.json",
        "metrics.jsonl",
        "results.json",
        "status.json",
        "model.safetensors",
        "tensorboard",
    ):
        assert (folder / name).exists(), name
    for picture in ("predictions.png", "confusion_matrix.png", "curves.png"):
        assert min(Image.open(folder / picture).size) > 300
    assert status(folder)["state"] == "finished"
    result = results(folder)
    assert (
        result["global_step"] == 14
        and result["samples_seen"] == 14 * 60
        and result["num_processes"] == 1
    )
    assert [line["step"] for line in metrics(folder, "train")] == list(range(1, 15))
    assert [line["step"] for line in metrics(folder, "test")] == [7, 14]
    # The two newest; the one with the best test accuracy may be one of them
    assert {"step_00000012", "step_00000014"} <= {
        path.name for path in (folder / "checkpoints").iterdir()
    }
    assert "global batch 60 = 1 process x 60 samples x 1 accumulation step" in done.stdout


def test_two_processes_compute_what_one_does(reference):
    one, two = reference("cpu").folder, reference("2cpu", 2).folder
    assert results(two)["num_processes"] == 2
    assert results(one)["global_step"] == results(two)["global_step"]
    for a, b in zip(metrics(one, "train"), metrics(two, "train"), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-4) and a["lr"] == b["lr"]
    first, second = load_file(one / "model.safetensors"), load_file(two / "model.safetensors")
    assert first.keys() == second.keys() and not any("module." in name for name in first)
    for name in first:
        assert torch.allclose(first[name], second[name], atol=1e-4), name


def test_the_learning_rate_rises_and_falls_as_documented(reference):
    """Rises for a fifth of the steps, then falls linearly to 0.

    A log line has the learning rate of the next step.
    """
    for line in metrics(reference("cpu").folder, "train"):
        progress = line["step"] / 14
        rising = (line["step"] + 1) / (0.2 * 14 + 1)
        share = rising if progress < 0.2 else (1 - progress) / 0.8
        assert line["lr"] == pytest.approx(0.04 * share, abs=1e-12)


def test_prints_one_loss_per_step_not_one_per_rank(reference):
    output = reference("2cpu", 2).stdout
    for step in range(1, 15):
        assert output.count(f"step {step:>2}/14 ") == 1
    assert output.count("global batch 60 = 2 processes x 30 samples") == 1


def test_accumulation_changes_nothing(reference, tmp_path):
    run("2cpu", CIFAR, f"{SMALL} --gradient_accumulation_steps 5", output_dir=tmp_path / "run")
    for a, b in zip(
        metrics(reference("cpu").folder, "train"), metrics(tmp_path / "run", "train"), strict=True
    ):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-4)


FEW = "--dataset {folder} --model net --max_train_steps 14 --log_every 1 --eval_every 100 --checkpoint_every 3"


def test_every_step_sees_the_same_samples_on_any_number_of_processes_and_after_a_kill(
    odd_folder, tmp_path
):
    """Records the samples that the script trains on: 120 images, almost three epochs of 5 steps,
    one process or three.
    """
    arguments = f"{FEW} --batch_size 24 --seed 5".format(folder=odd_folder)
    steps = recorded("cpu", CIFAR, arguments, tmp_path / "one")
    assert len(steps) == 14
    for number, step in enumerate(steps):
        assert step["epoch"] == number // 5 and step["seed"] == 5  # the seed of the augmentation
        assert len(step["ids"]) == 24
    epochs = [[step["ids"] for step in steps[first : first + 5]] for first in (0, 5)]
    for epoch in epochs:
        assert sorted(i for ids in epoch for i in ids) == list(range(120))
    assert epochs[0] != epochs[1]
    # Three processes with two micro-batches each, killed in step 9 (the 18th backward pass).
    accumulated = f"{arguments} --gradient_accumulation_steps 2"
    fault = ["die_in_step@18:2", CIFAR, *accumulated.split()]
    three = ("--num_processes", "3")
    run(
        "2cpu",
        "tests/harness/wrapped.py",
        fault,
        output_dir=tmp_path / "three",
        launcher=three,
        check=False,
    )
    rest = recorded("2cpu", CIFAR, accumulated, tmp_path / "three", processes=3, accumulation=2)
    assert results(tmp_path / "three")["resumed_from"] == 6  # one step into the second epoch
    assert rest == steps[6:]


@pytest.mark.slow
def test_metrics_are_exact_on_an_odd_test_set(odd_folder, tmp_path):
    # fastnet, because its batch norm would change the results if evaluation used the statistics of
    # a batch.
    arguments = [
        "--dataset",
        str(odd_folder),
        *"--model fastnet --batch_size 20 --epochs 1 --lr 0.02 --tta".split(),
    ]
    run("2cpu", CIFAR, arguments, output_dir=tmp_path / "run", launcher=("--num_processes", "4"))
    accuracy, loss = (
        results(tmp_path / "run")["test_accuracy"],
        results(tmp_path / "run")["test_loss"],
    )
    assert accuracy * 101 == pytest.approx(round(accuracy * 101), abs=1e-9)
    # Evaluated again by one process, with the exported weights and with the last checkpoint: the
    # same accuracy.
    for weights in (tmp_path / "run", tmp_path / "run" / "checkpoints" / "step_00000006"):
        run(
            None,
            "scripts/evaluate.py",
            ["--checkpoint", str(weights)],
            output_dir=tmp_path / "evaluation",
        )
        assert results(tmp_path / "evaluation")["test_accuracy"] == accuracy
        assert results(tmp_path / "evaluation")["test_loss"] == pytest.approx(loss, rel=2e-6)
        assert (tmp_path / "evaluation" / "confusion_matrix.png").exists()


@pytest.mark.slow
def test_evaluation_changes_nothing_in_training(odd_folder, tmp_path):
    """It changes neither batch norm nor the random numbers."""
    arguments = f"--dataset {odd_folder} --model fastnet --batch_size 24 --lr 0.02 --max_train_steps 4 --checkpoint_every 0"
    for every in ("1", "4"):
        run("cpu", CIFAR, f"{arguments} --eval_every {every}", output_dir=tmp_path / every)
    assert final_weights(tmp_path / "1") == final_weights(tmp_path / "4")


def test_resumes_mid_epoch_as_if_never_stopped(reference, tmp_path):
    started = Started("2cpu", CIFAR, SMALL, output_dir=tmp_path / "run")
    started.wait_for("step  7/14")
    started.kill_all()
    again = run("2cpu", CIFAR, SMALL, output_dir=tmp_path / "run")
    assert "continuing from" in again.stdout
    assert 0 < results(tmp_path / "run")["resumed_from"] < 14
    assert final_weights(tmp_path / "run") == final_weights(reference("2cpu", 2).folder)
    for split in ("train", "test"):
        assert metrics(tmp_path / "run", split) == metrics(reference("2cpu", 2).folder, split)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler on a CPU")
def test_a_compiled_run_computes_the_same_and_saves_plain_names(reference, tmp_path):
    arguments = f"{SMALL} --compile"
    started = Started("cpu", CIFAR, arguments, output_dir=tmp_path / "run")
    started.wait_for("step  7/14")
    started.kill_all()
    run("2cpu", CIFAR, arguments, output_dir=tmp_path / "run")
    assert 0 < results(tmp_path / "run")["resumed_from"] < 14
    for a, b in zip(
        metrics(reference("cpu").folder, "train"), metrics(tmp_path / "run", "train"), strict=True
    ):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-4)
    assert not any(
        "_orig_mod" in name for name in load_file(tmp_path / "run" / "model.safetensors")
    )


@torch.no_grad()
def test_fastnet_classifies_by_the_maximum_of_each_filter():
    model, seen = load_script("train_cifar").build_model("fastnet", 10).eval(), []
    model.blocks.register_forward_hook(lambda module, inputs, output: seen.append(output))
    model.head.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    model(torch.randn(2, 3, 32, 32))
    features, pooled = seen
    assert features.shape == (2, 256, 3, 3) and torch.equal(pooled, features.amax((2, 3)))


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.parametrize("name", ["net", "resnet18", "fastnet"])
def test_compiled_gradients_in_bf16_are_as_near_to_those_in_float32(name):
    """A compiled backward pass computes some values of the forward pass again, in float32.

    If it looks for those that equal a maximum which was rounded to bf16, as the gradient of `amax`
    does, it finds none, and divides by zero.
    """
    torch.manual_seed(0)
    model = load_script("train_cifar").build_model(name, 10)
    images, labels = torch.randn(16, 3, 32, 32), torch.arange(16) % 10

    def gradients(half=True):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            F.cross_entropy(model(images).float(), labels).backward()
        found = [weight.grad for weight in model.parameters() if weight.requires_grad]
        return torch.cat([gradient.flatten() for gradient in found])

    exact, eager = gradients(half=False), gradients()
    model.compile(dynamic=False)
    assert (gradients() - exact).norm() < 1.5 * (eager - exact).norm()


@pytest.mark.slow
def test_each_image_size_is_compiled_once(tmp_path):
    """Three sizes in training, two in evaluations, and the shifted views of test-time augmentation,
    whose memory has another layout.
    """
    arguments = "--dataset synthetic --batch_size 20 --max_train_steps 10 --eval_every 5 --tta"
    words = [f"count_compilations@1:{tmp_path}/counts.json", CIFAR, *arguments.split(), "--compile"]
    run(None, "tests/harness/wrapped.py", words, output_dir=tmp_path / "run")
    counts = json.loads((tmp_path / "counts.json").read_text())
    assert counts["graph_breaks"] == 0 and counts["compiled_functions"] == 1, counts
    assert counts["recompilations"] == 5, counts


def test_a_dry_run_takes_two_steps_in_a_separate_folder_and_is_profiled(tmp_path):
    run(
        "cpu",
        CIFAR,
        "--dataset synthetic --model net --dry_run --profile",
        output_dir=tmp_path / "run",
    )
    dry = tmp_path / "run_dry_run"
    assert not (tmp_path / "run").exists() and results(dry)["global_step"] == 2
    assert (dry / "profile" / "operators.txt").exists() and (
        dry / "profile" / "trace.json"
    ).exists()


@pytest.mark.parametrize("model", some_slow(["fastnet", "resnet18", "net"], "fastnet", "resnet18"))
def test_overfits_one_batch(model, tmp_path):
    size = {"fastnet": 20, "resnet18": 10, "net": 40}[model]
    lr = {"fastnet": 0.05, "resnet18": 0.02, "net": 0.02}[model]
    arguments = (
        f"--dataset synthetic --model {model} --overfit_batch --batch_size {size} --lr {lr} "
        "--log_every 5 --max_train_steps 300 --eval_every 100 --checkpoint_every 0"
    )
    run(None, CIFAR, arguments, output_dir=tmp_path / "run")
    assert metrics(tmp_path / "run_overfit_batch", "train")[-1]["loss"] < 0.01


@pytest.mark.slow
def test_learns(tmp_path):
    """The first command of the README, with another seed."""
    run(
        "cpu",
        CIFAR,
        "--dataset synthetic --epochs 2 --batch_size 100 --lr 0.06 --seed 1",
        output_dir=tmp_path / "run",
    )
    assert results(tmp_path / "run")["test_accuracy"] > 0.95


@pytest.mark.slow
@pytest.mark.skipif(
    not (SHARED_DATA / "cifar10").exists(), reason="the real CIFAR-10 is not next to the repository"
)
def test_reads_the_real_cifar10(tmp_path):
    arguments = [
        "--dataset",
        str(SHARED_DATA / "cifar10"),
        *"--model net --batch_size 250 --lr 0.05 --max_train_steps 100".split(),
    ]
    run("cpu", CIFAR, arguments, output_dir=tmp_path / "run")
    assert results(tmp_path / "run")["test_accuracy"] > 0.25


# ---------------------------------------------------------------------------------------- bad input


def without_test_split(split, rows):
    return rows if split == "train" else None


@pytest.mark.parametrize("held_out", ["val", "valid", "validation"])
def test_a_split_for_validation_is_enough(held_out, tmp_path):
    make_folder(tmp_path, 40, 30)
    (tmp_path / "test-00000-of-00001.parquet").rename(tmp_path / f"{held_out}-0-of-1.parquet")
    splits = load_arrays(str(tmp_path)).splits
    assert {split: len(samples) for split, samples in splits.items()} == {"train": 40, "val": 30}


def without_labels(split, rows):
    return rows.remove_columns("label")


def with_a_corrupt_image(split, rows):
    raw = rows.cast_column("img", datasets.Image(decode=False))
    broken = [
        {"bytes": image["bytes"][:60], "path": None} if split == "train" and i == 17 else image
        for i, image in enumerate(raw["img"])
    ]
    features = raw.features
    return datasets.Dataset.from_dict({"img": broken, "label": raw["label"]}, features=features)


BAD = {
    "unknown_folder": ("--dataset ./nowhere", "no such file or folder"),
    "unknown_hub_id": ("--dataset nobody/nothing", "--dataset synthetic"),
    "no_test_split": ("--dataset {without_test_split} --val_fraction 0", "no test split"),
    "no_labels": ("--dataset {without_labels}", "no label column"),
    "corrupt_image": ("--dataset {with_a_corrupt_image}", "row 17"),
    "batch_does_not_divide": (
        "--dataset synthetic --batch_size 7 --gradient_accumulation_steps 2",
        "use 6 or 8",
    ),
    "batch_too_large": ("--dataset synthetic --batch_size 6000", "more than the 5000"),
    "zero": ("--dataset synthetic --epochs 0", "at least 1"),
    "negative": ("--dataset synthetic --lr -1", "at least 0"),
    "not_a_number": ("--dataset synthetic --lr nan", "at least 0 and at most 1000, not 'nan'"),
    "unknown_flag": ("--dataset synthetic --epoch 3", "unrecognized arguments"),
    "unwritable": ("--dataset synthetic --output_dir /proc/nowhere", "cannot write"),
    "no_such_checkpoint": ("--dataset synthetic --resume /nowhere/step_1", "does not exist"),
    "other_model": ("--dataset synthetic --resume {checkpoint}", "--model resnet18 (was net)"),
    "other_run": (
        SMALL + " --batch_size 30 --seed 9 --output_dir {run}",
        "--seed 9 (was 0)",
    ),
    "never_over_a_run": (SMALL + " --resume never --output_dir {run}", "already contains a run"),
    "not_a_run": ("--dataset synthetic --output_dir {foreign}", "not empty"),
}


@pytest.fixture(scope="session")
def bad_folders(tmp_path_factory):
    made = {}
    for change in (without_test_split, without_labels, with_a_corrupt_image):
        made[change.__name__] = make_folder(
            tmp_path_factory.mktemp(change.__name__), 40, 40, change
        )
    made["foreign"] = tmp_path_factory.mktemp("foreign")
    (made["foreign"] / "thesis.txt").write_text("precious")
    return made


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(name, bad_folders, reference, tmp_path):
    arguments, words = BAD[name]
    folder = reference("cpu").folder
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != ".lock"}
    places = {**bad_folders, "run": folder, "checkpoint": folder / "checkpoints" / "step_00000012"}
    # Ends soon if there is no error.
    arguments = f"--model net --max_train_steps 2 {arguments}".format(**places).split()
    if name == "other_model":
        arguments += ["--model", "resnet18"]
    out = None if "--output_dir" in arguments else tmp_path / "run"
    done = run(None, CIFAR, arguments, output_dir=out, check=False)
    assert done.returncode == 2, done.stderr
    errors = [line for line in done.stderr.splitlines() if not line.startswith("***")]
    assert len(errors) == 1 and errors[0].startswith("error: ") and words in errors[0], done.stderr
    assert not (tmp_path / "run" / "args.json").exists()
    assert before == {
        path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != ".lock"
    }
    assert (bad_folders["foreign"] / "thesis.txt").read_text() == "precious"


@pytest.mark.parametrize("config", ["cpu", "1gpu"])
def test_the_error_is_the_last_line_of_a_launch_of_one_process(config, tmp_path):
    done = run(config, CIFAR, "--batch_size 0", output_dir=tmp_path / "run", check=False)
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith(
        "error: argument --batch_size"
    ), done.stderr


@pytest.mark.parametrize("arguments", ["--dataset ./nowhere", "--dataset synthetic --batch_size 7"])
def test_bad_input_is_printed_once_by_several_processes(arguments, tmp_path):
    done = run("2cpu", CIFAR, arguments, output_dir=tmp_path / "run", check=False)
    assert done.returncode != 0
    assert done.stderr.count("error: ") == 1
    # Of rank 0, in the launcher's report; the launcher itself always exits with 1.
    assert "exitcode  : 2" in done.stderr


@pytest.mark.slow
def test_what_is_reported_is_measured_at_full_size_also_if_the_run_ends_early(tmp_path):
    """While the images are small, so are those of the evaluations; a restart evaluates anew."""
    words = (
        "--dataset synthetic --val_fraction 0.1 --patience 1 --lr 0 --batch_size 64 --eval_every 2"
    )
    run("cpu", CIFAR, f"{words} --max_train_steps 40", output_dir=tmp_path)
    last = metrics(tmp_path, "val")[-1]
    (tmp_path / "results.json").rename(tmp_path / "before.json")
    assert last["step"] < 24
    run("cpu", CIFAR, f"{words} --max_train_steps 40", output_dir=tmp_path)
    before = json.loads((tmp_path / "before.json").read_text())
    for name in ("val_loss", "val_accuracy", "test_loss"):
        assert before[name] == results(tmp_path)[name], name
    assert before["val_loss"] != last["loss"]
