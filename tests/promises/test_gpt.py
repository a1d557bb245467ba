"""train_gpt.py: the same losses on every topology, exact resume, sharding, streaming, and the files
that it writes.
"""

import copy
import itertools
import json
import math
import random
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from harness.data import SHARED_DATA
from harness.launches import (
    GPT,
    ROOT,
    Started,
    final_weights,
    load_script,
    metrics,
    recorded,
    results,
    run,
    run_once,
    status,
)
from PIL import Image
from safetensors.torch import load_file

from utils import scores
from utils.data import loaders
from utils.data.loaders import already_a_batch
from utils.data.text import Windows, load_text, synthetic_text
from utils.data.text_stream import TextStream, held_out, load_held_out
from utils.muon import MuonAdamW, MuonSGD, normalize_rows, orthogonalize
from utils.run import weights
from utils.run.failures import RunFailed, UserError

datasets = pytest.importorskip("datasets")

SHAKESPEARE = SHARED_DATA / "tinyshakespeare" / "input.txt"
EVALUATE = "scripts/evaluate.py"
MODEL = "--n_layer 2 --n_head 2 --n_embd 32 --block_size 32 --batch_size 12 --sample_length 40"
SMALL = f"{MODEL} --max_train_steps 40 --log_every 1 --eval_every 20 --checkpoint_every 10"


@pytest.fixture(scope="session")
def text(made_once):
    """A local text file: tinyshakespeare if it exists, otherwise a synthetic one."""

    def make(folder):
        (folder / "made_up.txt").write_bytes(synthetic_text(0)[:-200])
        return folder / "made_up.txt"

    return SHAKESPEARE if SHAKESPEARE.exists() else made_once("text", make)


@pytest.fixture(scope="session")
def gpt(text, made_once):
    """The uninterrupted run of SMALL for a configuration: `gpt("cpu")` has its output, and its
    folder as `.folder`.
    """
    return lambda config: run_once(
        made_once, f"gpt/{config}", config, GPT, f"--dataset {text} {SMALL}"
    )


def losses(folder, split="train"):
    return {line["step"]: line["loss"] for line in metrics(folder, split)}


def assert_same_losses(one, other):
    """Compares the loss of every step, with the tolerance of 1e-4 from the README."""
    assert losses(one).keys() == losses(other).keys() == set(range(1, 41))
    for step, loss in losses(one).items():
        assert losses(other)[step] == pytest.approx(loss, abs=1e-4), step


def samples(folder):
    return {line["step"]: line["text"] for line in metrics(folder, "sample")}


def test_leaves_everything_it_promises(gpt):
    done, folder = gpt("cpu"), gpt("cpu").folder
    for name in (
        "args.json",
        "metrics.jsonl",
        "status.json",
        "tensorboard",
        "checkpoints/step_00000040/manifest.json",
    ):
        assert (folder / name).exists(), name
    assert min(Image.open(folder / "curves.png").size) > 300
    assert status(folder)["state"] == "finished"
    result = results(folder)
    assert result["tokens_seen"] == 40 * 12 * 32 and result["samples_seen"] == 40 * 12
    assert result["val_bits_per_byte"] == pytest.approx(result["val_loss"] / math.log(2))
    assert result["val_loss"] == losses(folder, "val")[40]
    # 2 blocks with 12 width^2 + 5 width parameters each, embedding and head; the formula of PaLM
    # leaves out the embedding
    assert result["parameters"] == 2 * (12 * 32**2 + 5 * 32) + 2 * 256 * 32
    assert result["flops_per_token"] == 6 * (2 * 12 * 32**2 + 256 * 32) + 12 * 2 * 32 * 32
    # The peak of a CPU is not known.
    assert not any("mfu" in line for line in metrics(folder, "train"))
    assert (
        samples(folder).keys() == {40}
        and (folder / "sample.txt").read_bytes().decode() == samples(folder)[40]
    )
    assert "global batch 12 = 1 process x 12 samples" in done.stdout


@pytest.mark.slow
def test_learns(text, tmp_path):
    """The loss is below the entropy of the byte frequencies, which a model learns in its first
    steps.
    """
    arguments = f"--dataset {text} {MODEL} --max_train_steps 300 --eval_every 300"
    run("2cpu", GPT, arguments, output_dir=tmp_path / "run")
    counts = torch.bincount(
        torch.frombuffer(bytearray(text.read_bytes()), dtype=torch.uint8).long()
    ).double()
    share = counts[counts > 0] / counts.sum()
    assert results(tmp_path / "run")["val_loss"] < -(share * share.log()).sum() - 0.3


def test_two_processes_compute_what_one_does(gpt, text):
    windows = len(Windows(load_text(str(text), "text", 32)[1], 32))
    batch = loaders.evaluation_batch_size(SimpleNamespace(num_processes=2), windows, 512)
    assert windows % batch, "no evaluation batch is filled up with repeated windows"
    assert results(gpt("2cpu").folder)["num_processes"] == 2
    assert_same_losses(gpt("cpu").folder, gpt("2cpu").folder)
    assert results(gpt("cpu").folder)["val_loss"] == pytest.approx(
        results(gpt("2cpu").folder)["val_loss"], abs=1e-4
    )


def test_two_micro_batches_compute_what_one_batch_does(gpt, text, tmp_path):
    again = "--gradient_accumulation_steps 2 --activation_checkpointing"
    run("cpu", GPT, f"--dataset {text} {SMALL} {again}", output_dir=tmp_path / "run")
    assert_same_losses(gpt("cpu").folder, tmp_path / "run")


def test_after_a_kill_it_continues_exactly_also_on_another_topology(gpt, text, tmp_path):
    two, arguments = tmp_path / "two", f"--dataset {text} {SMALL}"
    started = Started("2cpu", GPT, arguments, output_dir=two)
    started.wait_for("step 25/40")
    started.kill_all()
    shutil.copytree(two, tmp_path / "one")
    assert "continuing from" in run("2cpu", GPT, arguments, output_dir=two).stdout
    # An earlier checkpoint, because a kill saves nothing.
    assert results(two)["resumed_from"] in (10, 20, 30)
    assert final_weights(two) == final_weights(gpt("2cpu").folder)
    for split in ("train", "val", "sample"):
        clock = {"tokens_per_second"}
        a, b = (
            [{k: v for k, v in line.items() if k not in clock} for line in metrics(f, split)]
            for f in (two, gpt("2cpu").folder)
        )
        assert a == b  # fmt: skip
    run("cpu", GPT, arguments, output_dir=tmp_path / "one")
    assert (
        results(tmp_path / "one")["num_processes"] == 1
        and results(tmp_path / "one")["resumed_from"] > 0
    )
    assert_same_losses(gpt("cpu").folder, tmp_path / "one")


@pytest.mark.slow
def test_after_a_kill_on_one_process_with_dropout_it_continues_exactly(text, tmp_path):
    arguments = f"--dataset {text} {SMALL} --dropout 0.1"
    run("cpu", GPT, arguments, output_dir=tmp_path / "whole")
    started = Started("cpu", GPT, arguments, output_dir=tmp_path / "killed")
    started.wait_for("step 25/40")
    started.kill_all()
    # More frequent evaluation must not change the weights either.
    run("cpu", GPT, f"{arguments} --eval_every 13", output_dir=tmp_path / "killed")
    assert results(tmp_path / "killed")["resumed_from"] > 0
    assert final_weights(tmp_path / "killed") == final_weights(tmp_path / "whole")


def test_every_epoch_reads_the_text_in_another_order_and_from_another_place(tmp_path):
    """Records the samples that the script reads: 31 windows, three epochs with 3 steps of 10
    windows.
    """
    (tmp_path / "text.txt").write_bytes(synthetic_text(0)[: 32 * 32 * 10 // 9 + 10])
    small = SMALL.replace("--batch_size 12", "--batch_size 10").replace(
        "--max_train_steps 40", "--max_train_steps 9"
    )
    steps = recorded("cpu", GPT, f"--dataset {tmp_path / 'text.txt'} {small}", tmp_path / "run")[:9]
    epochs = [steps[first : first + 3] for first in (0, 3, 6)]
    for epoch in epochs:
        assert len({i for step in epoch for i in step["ids"]}) == 30
        assert len({step["shift"] for step in epoch}) == 1
    assert len({epoch[0]["shift"] for epoch in epochs}) == 3
    assert epochs[0][0]["ids"] != epochs[1][0]["ids"] != epochs[2][0]["ids"]


@pytest.mark.slow
def test_the_validation_loss_is_that_of_the_exported_weights_without_dropout(text, tmp_path):
    """Computes the loss again with plain PyTorch, over every byte of the last tenth except the
    first.
    """
    run(
        "2cpu",
        GPT,
        f"--dataset {text} {SMALL} --dropout 0.5 --max_train_steps 20",
        output_dir=tmp_path,
    )
    model = load_script("train_gpt").GPT(n_layer=2, n_head=2, n_embd=32, block_size=32).eval()
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    held_out, total = load_text(str(text), "text", 32)[1].long(), 0.0
    with torch.no_grad():
        for first in range(0, len(held_out) - 1, 32):
            window = held_out[first : first + 33]
            total += torch.nn.functional.cross_entropy(
                model(window[None, :-1])[0], window[1:], reduction="sum"
            ).item()
    assert results(tmp_path)["val_loss"] == pytest.approx(total / (len(held_out) - 1), rel=1e-5)


def test_evaluations_take_some_windows_always_the_same_and_the_last_one_all(gpt, text, tmp_path):
    """The weights do not change, so the same windows have the same loss: after a signal in the last
    evaluation, on two processes, in a longer run that evaluates at other steps.
    """
    first, folder = gpt("cpu").folder, tmp_path / "run"
    words = f"--dataset {text} {MODEL} --init_from {first} --lr 0 --weight_decay 0 --log_every 1"
    short = f"{words} --eval_samples 30 --max_train_steps 4 --eval_every 2"
    fault = ["sigterm_in_evaluation@3", GPT, *short.split()]
    done = run("cpu", "tests/harness/wrapped.py", fault, output_dir=folder, check=False)
    windows = math.ceil(results(first)["val_bytes"] / 32)
    assert f"evaluations: 30 of {windows:,} held-out samples, always the same" in done.stdout
    assert "after the last step, which is saved" in done.stderr
    assert status(folder)["state"] == "preempted" and (folder / "model.safetensors").exists()
    longer = short.replace("steps 4 --eval_every 2", "steps 7 --eval_every 3")
    done = run("2cpu", GPT, longer, output_dir=folder)
    lines, whole = metrics(folder, "val"), results(folder)
    assert [line["step"] for line in lines] == [2, 4, 6, 7]
    assert {line["bytes"] for line in lines} == {30 * 32}
    few = lines[0]["loss"]
    assert [line["loss"] for line in lines] == pytest.approx([few] * 4, rel=1e-6)
    assert whole["val_bytes"] == results(first)["val_bytes"]
    assert whole["val_loss"] == pytest.approx(results(first)["val_loss"], rel=1e-6)
    assert abs(whole["val_loss"] - few) > 1e-4
    assert whole["val_loss_standard_error"] < lines[0]["loss_standard_error"]
    # By the scores of the 30 windows, not by the metrics of all.
    assert whole["best_checkpoint"] == "step_00000007"
    best = json.loads((folder / "checkpoints/step_00000007/manifest.json").read_text())
    assert best["progress"]["score"] == pytest.approx(-few, rel=1e-6)
    assert best["progress"]["eval_samples"] == 30
    said = f"± {whole['val_loss_standard_error']:.4f}, val bits per byte"
    assert said in done.stdout and f"{whole['val_bytes']:,} val bytes" in done.stdout


@pytest.mark.parametrize("what", ["own", "moved", "another"])
def test_evaluate_finds_the_same_loss_and_scores_another_text(what, gpt, text, tmp_path):
    folder, config, words = gpt("cpu").folder, None, []
    if what == "own":
        config = "2cpu"
    elif what == "moved":
        words = ["--dataset", str(shutil.copy(text, tmp_path / "moved.txt"))]
    else:  # its test split, and not what it has to train on
        words = ["--dataset", str(tmp_path / "text")]
        for split, count in {"train": 20, "test": 3}.items():
            (tmp_path / "text" / split).mkdir(parents=True)
            (tmp_path / "text" / split / "a.txt").write_text("To be, or not. " * count)
    done = run(config, EVALUATE, [str(folder), *words], output_dir=tmp_path / "scores")
    found = results(tmp_path / "scores")
    if what == "another":
        assert found["test_bytes"] == 3 * 15 - 1 and found["test_loss"] > 0
        assert "train, not used: 1 file" in done.stdout
        return
    assert found["val_loss"] == pytest.approx(results(folder)["val_loss"], rel=1e-6)
    assert found["val_bits_per_byte"] == pytest.approx(found["val_loss"] / math.log(2))
    assert found["val_bytes"] == len(load_text(str(text), "text", 32).held_out) - 1
    last = done.stdout.splitlines()[-1]
    figure = f"loss {found['val_loss']:.4f} ± {found['val_loss_standard_error']:.4f} nats per byte"
    assert figure in last and last.endswith(f"results in {tmp_path / 'scores'}")


def test_the_standard_error_is_that_of_windows():
    """Of equal windows it is that of a mean; a short one counts less."""
    losses = torch.tensor([4.0, 8.0, 6.0, 2.0])
    of_four = scores.moments(losses, torch.full_like(losses, 4))
    mean, error, count = scores.mean_and_error(of_four)
    assert mean == pytest.approx(1.25) and count == 16
    assert error == pytest.approx((losses / 4).std().item() / math.sqrt(4))
    short = torch.tensor([4.0, 4.0, 4.0, 1.0])
    # In two parts, with a repeated window, which has no bytes left.
    parts = scores.moments(losses[:3], short[:3])
    parts += scores.moments(torch.tensor([2.0, 0.0]), torch.tensor([1, 0]))
    mean, error, count = scores.mean_and_error(parts)
    assert mean == pytest.approx(20 / 13) and count == 13
    terms = [(loss - mean * count) ** 2 for loss, count in zip(losses, short, strict=True)]
    assert error == pytest.approx(math.sqrt(sum(terms) * 4 / 3) / 13)
    assert scores.mean_and_error(scores.moments(losses[:1], short[:1])) == (1.0, None, 4)
    two = scores.moments(torch.tensor([1.0, 3.0]), torch.ones(2))
    assert scores.mean_and_error(two) == (2.0, pytest.approx(1.0), 2)
    assert scores.with_error("loss", 1.0, None) == {"loss": 1.0}
    assert scores.with_error("loss", 1.0, 0.5) == {"loss": 1.0, "loss_standard_error": 0.5}
    unknown = scores.moments(torch.full((2,), math.nan), short[:2])  # of a model with its own loss
    unknown[2] = 6.0
    assert scores.mean_and_error(unknown) == (0.75, None, 8)


# ------------------------------------------------------------------------------------------ sharded


@pytest.mark.slow
def test_a_sharded_run_computes_the_same_also_after_a_change_of_the_number_of_processes(
    gpt, text, tmp_path
):
    folder, arguments = tmp_path / "run", f"--dataset {text} {SMALL}"
    launcher = ("--mixed_precision", "no", "--num_processes")
    started = Started("4gpu_fsdp", GPT, arguments, output_dir=folder, launcher=(*launcher, "2"))
    started.wait_for("2 processes over gloo, the model sharded over them")
    started.wait_for("step 25/40")
    started.kill_all()
    # A file for each process.
    assert len(list(folder.glob("checkpoints/step_*/pytorch_model_fsdp_0/*.distcp"))) >= 2
    run("4gpu_fsdp", GPT, arguments, output_dir=folder, launcher=(*launcher, "3"))
    assert results(folder)["num_processes"] == 3 and results(folder)["resumed_from"] > 0
    assert_same_losses(gpt("cpu").folder, folder)
    # The weights that the script exported at the end, and those in the shards of the last
    # checkpoint
    whole = load_file(folder / "model.safetensors")
    state = weights.read(folder / "checkpoints" / "step_00000040").state
    assert state.keys() == whole.keys() == load_file(gpt("cpu").folder / "model.safetensors").keys()
    for name in whole:
        assert torch.equal(state[name], whole[name]), name
        assert torch.allclose(
            whole[name], load_file(gpt("cpu").folder / "model.safetensors")[name], atol=1e-3
        ), name


@pytest.mark.slow
def test_a_sharded_run_killed_continues_bit_for_bit_on_as_many_processes(text, tmp_path):
    """With the YAML as it is: 4 processes."""
    arguments, launcher = f"--dataset {text} {SMALL} --dropout 0.1", ("--mixed_precision", "no")
    run("4gpu_fsdp", GPT, arguments, output_dir=tmp_path / "whole", launcher=launcher)
    started = Started(
        "4gpu_fsdp", GPT, arguments, output_dir=tmp_path / "killed", launcher=launcher
    )
    started.wait_for("step 25/40")
    started.kill_all()
    run("4gpu_fsdp", GPT, arguments, output_dir=tmp_path / "killed", launcher=launcher)
    assert results(tmp_path / "killed")["resumed_from"] > 0
    assert final_weights(tmp_path / "killed") == final_weights(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler on a CPU")
def test_a_sharded_compiled_run_in_bf16_computes_nearly_the_same(gpt, text, tmp_path):
    # `use_cpu`: computes in bf16 even where the CPU only emulates it.
    config = (
        (ROOT / "accelerate_configs" / "4gpu_fsdp.yaml")
        .read_text()
        .replace("use_cpu: false", "use_cpu: true")
    )
    (tmp_path / "config.yaml").write_text(config)
    arguments, launcher = (
        f"--dataset {text} {SMALL} --compile --activation_checkpointing",
        ("--num_processes", "2"),
    )
    run(tmp_path / "config.yaml", GPT, arguments, output_dir=tmp_path / "run", launcher=launcher)
    assert (
        json.loads((tmp_path / "run" / "args.json").read_text())["topology"]["mixed_precision"]
        == "bf16"
    )
    exact = losses(gpt("cpu").folder)
    assert all(
        loss == pytest.approx(exact[step], abs=0.05)
        for step, loss in losses(tmp_path / "run").items()
    )
    # It was bf16.
    assert any(
        loss != pytest.approx(exact[step], abs=1e-4)
        for step, loss in losses(tmp_path / "run").items()
    )
    names = load_file(gpt("cpu").folder / "model.safetensors").keys()
    assert load_file(tmp_path / "run" / "model.safetensors").keys() == names


# ----------------------------------------------------------------------------------------- streamed


@pytest.fixture(scope="session")
def shards(tmp_path_factory):
    """Three Parquet files with documents of different lengths, some of them empty."""
    folder, chance = tmp_path_factory.mktemp("shards"), random.Random(0)
    lines = synthetic_text(0).decode().splitlines()
    for part in range(3):
        texts = [
            " ".join(lines[start : start + chance.randint(0, 4)])
            for start in range(part, len(lines), 5)
        ]
        datasets.Dataset.from_dict({"text": texts}).to_parquet(str(folder / f"part-{part}.parquet"))
    return folder


def batches(folder, processes, count, position=None):
    """The windows of `count` global batches, and the position after them as a checkpoint stores it."""
    options = dict(lanes=6, buffer=8, seed=0, position=position)
    readers = [
        iter(TextStream(str(folder), "text", 16, 12 // processes, share=(p, processes), **options))
        for p in range(processes)
    ]
    batches_read = []
    for _ in range(count):
        parts = [next(reader) for reader in readers]
        position = {lane: place for part in parts for lane, place in part["position"].items()}
        batches_read.append(sorted(window for part in parts for window in part["inputs"].tolist()))
    return batches_read, json.loads(json.dumps(position))


def test_any_number_of_processes_streams_the_same_batches_from_any_position(shards):
    whole, _ = batches(shards, 1, 120)
    assert batches(shards, 3, 120)[0] == whole
    for stop in (1, 3, 4, 5, 37, 110):  # a buffer lasts for 4 batches
        before, position = batches(shards, 2, stop)
        assert before + batches(shards, 6, 120 - stop, position)[0] == whole, stop
        # Resumed twice: `datasets` 5.0.0 started again from the beginning (datasets#8308).
        middle, position = batches(shards, 2, 5, position)
        assert before + middle + batches(shards, 2, 115 - stop, position)[0] == whole, stop
    windows = [tuple(window) for batch in whole for window in batch]
    assert len(set(windows)) > 0.9 * len(windows)


def test_a_position_in_a_long_row_takes_no_more_space(tmp_path):
    """It is a number, and not the rest of the row."""
    texts = [" ".join(map(str, range(count))) for count in (9, 40_000, 3, 12_000, 0)]
    data = tmp_path / "text.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts * 3))

    def stream(count, position=None):
        options = dict(lanes=2, buffer=30, seed=0, share=(0, 1), position=position)
        read = list(itertools.islice(TextStream(str(data), "text", 200, 20, **options), count))
        return [batch["inputs"].tolist() for batch in read], json.dumps(read[-1]["position"])

    whole, _ = stream(300)  # more than one pass
    for stop in (1, 2, 3, 40, 110, 111, 112, 113, 114, 250):
        before, position = stream(stop)
        middle, again = stream(7, json.loads(position))
        assert before + middle + stream(293 - stop, json.loads(again))[0] == whole, stop
        assert len(position) < 1000


def test_a_position_of_an_earlier_version_is_refused(tmp_path):
    args = SimpleNamespace(streaming=1)
    old = {"0": {"rows": None, "rest": "", "buffers": 0, "taken": 0}}
    with pytest.raises(UserError, match="was begun by an earlier version"):
        TextStream.from_args(args, SimpleNamespace(num_processes=1), old)


def test_a_stream_starts_again_at_its_end_and_never_shows_held_out_text(tmp_path):
    documents = [f"document {number:04d} is this one" for number in range(600)]
    (tmp_path / "text.jsonl").write_text(
        "".join(json.dumps({"text": document}) + "\n" for document in documents)
    )
    length = len(documents[0]) + 1
    stream = iter(
        TextStream(str(tmp_path), "text", length, 2, lanes=2, buffer=5, seed=0, share=(0, 1))
    )
    seen = [
        bytes(window).decode()[9:13]
        for _ in range(900)
        for window in next(stream)["inputs"].tolist()
    ]
    kept = {document[9:13] for document in documents if held_out(document.encode() + b"\n")}
    assert 2 <= len(kept) <= 30
    assert set(seen) == {document[9:13] for document in documents} - kept
    assert {seen.count(number) for number in set(seen)} <= {2, 3, 4}  # about three passes
    assert len(load_held_out(str(tmp_path), "text", length)) == len(kept) * length


@pytest.mark.slow
def test_streaming_killed_continues_exactly_also_on_another_topology(shards, tmp_path):
    # --num_workers 1: batches that the worker has prefetched must not be skipped.
    arguments = f"--dataset {shards} --streaming 6 --shuffle_buffer 20 --num_workers 1 {SMALL}"
    run("cpu", GPT, arguments, output_dir=tmp_path / "one")
    started = Started("2cpu", GPT, arguments, output_dir=tmp_path / "two")
    started.wait_for("step 25/40")
    started.kill_all()
    run("cpu", GPT, arguments, output_dir=tmp_path / "two")
    assert results(tmp_path / "two")["resumed_from"] > 0
    assert_same_losses(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_that_only_one_process_meets_is_printed_by_it(workers, shards, tmp_path):
    arguments = (
        f"--dataset {shards} --streaming 6 --shuffle_buffer 4 --num_workers {workers} {SMALL}"
    )
    wrapped = ["unreadable@40:1", GPT, *arguments.split()]
    done = run("2cpu", "tests/harness/wrapped.py", wrapped, output_dir=tmp_path, check=False)
    errors = [
        line
        for line in done.stderr.splitlines()
        if line.startswith("error: ") and "lost contact" not in line
    ]
    assert len(errors) == 1 and "the medium is damaged" in errors[0], done.stderr
    assert status(tmp_path)["state"] == "failed" and status(tmp_path)["reason"] in errors[0]


def test_data_in_two_formats_or_compressed_is_refused(tmp_path):
    (tmp_path / "README.txt").write_text("what this is")
    (tmp_path / "part.jsonl").write_text('{"text": "some words"}\n')
    with pytest.raises(UserError, match=r"README.txt and part.jsonl"):
        load_text(str(tmp_path), "text", 4, 0)
    (tmp_path / "part.jsonl.gz").write_bytes(b"")
    with pytest.raises(UserError, match="unpack it first"):
        load_text(str(tmp_path / "part.jsonl.gz"), "text", 4, 0)


def test_a_file_that_is_not_text_is_said(tmp_path, capsys):
    (tmp_path / "photo.jpg").write_bytes(bytes(100) + bytes(range(256)))
    load_text(str(tmp_path / "photo.jpg"), "text", 4, 0)
    assert "photo.jpg does not look like text" in capsys.readouterr().err
    (tmp_path / "plain.txt").write_text("words and words and words, and words " * 9)
    load_text(str(tmp_path / "plain.txt"), "text", 4, 0)
    assert not capsys.readouterr().err


# --------------------------------------------------------------------------------- samples, copying


def test_a_copied_script_overfits_and_samples(text, tmp_path):
    (tmp_path / "mine").mkdir()
    shutil.copy(ROOT / GPT, tmp_path / "mine")
    shutil.copytree(ROOT / "utils", tmp_path / "mine" / "utils")
    arguments = f"--dataset {text} {MODEL} --overfit_batch --batch_size 2 --profile"
    run("cpu", "train_gpt.py", arguments, output_dir=tmp_path / "run", root=tmp_path / "mine")
    made = tmp_path / "run_overfit_batch"
    assert metrics(made, "train")[-1]["loss"] < 0.01
    assert (made / "profile" / "trace.json").exists()
    # The model has memorized the beginning of the text
    memorized = text.read_bytes()[:60].decode()
    sample = [
        "--sample",
        str(made),
        "--prompt",
        memorized[:20],
        "--sample_length",
        "12",
        "--temperature",
    ]
    done = run(None, "train_gpt.py", [*sample, "0"], root=tmp_path / "mine")
    assert done.stdout.rstrip("\n") == memorized[:32]
    hot = run(None, "train_gpt.py", [*sample, "9"], root=tmp_path / "mine")
    assert hot.stdout != done.stdout


# --------------------------------------------------------------------------------------- mechanisms


def test_held_out_windows_predict_every_byte_once():
    data = torch.arange(101, dtype=torch.uint8)
    windows = Windows(data, 16)
    batch = windows.__getitems__(range(len(windows)))
    assert batch["targets"][batch["targets"] >= 0].tolist() == list(range(1, 101))
    assert torch.equal(batch["inputs"][:-1, 1:], batch["targets"][:-1, :-1])


def test_batches_are_contiguous(shards):
    """A pinned batch that is not would be copied to the GPU through pageable memory, with a wait."""
    windows = Windows(torch.arange(101, dtype=torch.uint8), 16, seed=0)
    options = dict(lanes=1, buffer=4, seed=0, share=(0, 1))
    streamed = next(iter(TextStream(str(shards), "text", 16, 4, **options)))
    for batch in (windows.__getitems__(range(4)), streamed):
        for name in ("inputs", "targets", "ids"):
            assert batch[name].is_contiguous(), name


def test_an_epoch_reads_every_byte_once_at_another_offset_than_the_one_before():
    data = torch.arange(250, dtype=torch.uint8)
    windows, cuts = Windows(data, 16, seed=3), set()
    for epoch in range(8):
        windows.set_offset(epoch)
        read = windows.__getitems__(range(len(windows)))["inputs"].flatten()
        assert len(read) >= 250 - 2 * 16 and torch.equal(
            read, data[read[0] : int(read[0]) + len(read)]
        )
        cuts.add(int(read[0]))
    assert len(cuts) >= 4


def test_no_prediction_depends_on_later_bytes():
    torch.manual_seed(0)
    model = load_script("train_gpt").GPT(n_layer=2, n_head=2, n_embd=16, block_size=12)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    text = torch.randint(256, (1, 12))
    other = text.clone()
    other[0, 6] = (text[0, 6] + 1) % 256
    with torch.no_grad():
        same = torch.isclose(model(text), model(other)).all(2)[0]
    assert same[:6].all() and not same[6:].any()


def test_attention_is_float32_on_a_cpu_in_bf16_too(monkeypatch):
    """Because the backward pass of PyTorch's attention is slower in bf16 there than all that bf16
    makes faster.
    """
    script, seen = load_script("train_gpt"), []

    def attention(*tensors, **options):
        seen.append((torch.is_autocast_enabled("cpu"), {tensor.dtype for tensor in tensors[:3]}))
        return original(*tensors, **options)

    original = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    with torch.autocast("cpu", torch.bfloat16):
        logits = script.GPT(n_layer=1, n_head=2, n_embd=16, block_size=12)(
            torch.zeros(1, 12, dtype=torch.int64)
        )
    assert seen == [(False, {torch.float32})] and logits.dtype == torch.bfloat16


def test_a_tall_matrix_is_updated_by_as_much_per_row_as_a_square_one():
    weight = torch.nn.Parameter(torch.zeros(96, 24))
    weight.grad = torch.randn(96, 24, generator=torch.Generator().manual_seed(0))
    MuonSGD(
        [dict(params=[weight], weight_decay=0.0, muon=True, momentum=0.6)], lr=0.1, momentum=0.9
    ).step()
    values = torch.linalg.svdvals(weight.detach()) / (0.1 * 2)  # sqrt(96 / 24)
    assert values.min() > 0.6 and values.max() < 1.3


def test_muon_raises_its_momentum_as_documented_also_after_a_restart():
    """With a gradient of ones the average is 1 - (the product of all momenta)."""
    weight = torch.nn.Parameter(torch.zeros(2, 2))

    def optimizer():
        return MuonAdamW([dict(params=[weight], lr=0.1, muon=True, momentum=(0.5, 0.9, 4))])

    muon = optimizer()
    for step in range(6):
        if step == 3:
            saved, muon = muon.state_dict(), optimizer()
            muon.load_state_dict(saved)
        weight.grad = torch.ones(2, 2)
        muon.step()
    expected = torch.full((2, 2), 1 - 0.5 * 0.6 * 0.7 * 0.8 * 0.9 * 0.9)
    assert torch.allclose(muon.state[weight]["momentum"], expected)


@pytest.mark.parametrize("shape", [(6, 10), (6, 2, 3, 3)])
def test_normalized_rows_have_the_same_size_over_time(shape):
    """After two steps: row i is divided by the root of 0.9 a + b, where a and b are its mean
    squares in the two steps.
    """
    generator, states = torch.Generator().manual_seed(0), [{}, {}]
    first, second = (torch.randn(2, *shape, generator=generator).double() for _ in range(2))
    for update, even in zip(first, normalize_rows(states, list(first), 0.9), strict=True):
        norms = even.flatten(1).norm(dim=1)
        assert torch.allclose(norms, norms.mean().expand(6)) and torch.allclose(
            even.norm(), update.norm()
        )
    for before, update, even in zip(
        first, second, normalize_rows(states, list(second), 0.9), strict=True
    ):
        scale = sum(
            share * x.flatten(1).square().mean(1) for share, x in ((0.9, before), (1.0, update))
        ).sqrt()
        expected = update.flatten(1) / scale[:, None]
        assert torch.allclose(even.flatten(1), expected * update.norm() / expected.norm())
    # As in the first step, behind a weight of zero.
    assert not normalize_rows([{}], [torch.zeros(shape)], 0.9)[0].any()


def test_muon_with_beta2_changes_all_rows_by_the_same_amount():
    generator = torch.Generator().manual_seed(0)
    wide, tall, plain = (
        torch.nn.Parameter(torch.zeros(shape)) for shape in ((4, 8), (8, 4), (8, 4))
    )
    for weight in (wide, tall, plain):
        weight.grad = torch.randn(weight.shape, generator=generator)
    common = dict(muon=True, weight_decay=0.0, momentum=0.9)
    MuonAdamW(
        [dict(params=[wide, tall], beta2=0.95, **common), dict(params=[plain], **common)], lr=0.1
    ).step()
    for weight, same in ((wide, True), (tall, True), (plain, False)):
        norms = weight.detach().norm(dim=1)
        assert torch.allclose(norms, norms[:1]) == same


def test_muon_leaves_weights_without_a_gradient_alone():
    frozen, used = (torch.nn.Parameter(torch.ones(4, 4)) for _ in range(2))
    used.grad = torch.eye(4)
    MuonSGD(
        [dict(params=[frozen, used], weight_decay=0.1, muon=True, momentum=0.6)],
        lr=0.1,
        momentum=0.9,
    ).step()
    assert (frozen == 1).all() and not (used == 1).any()


def test_persistent_workers_read_from_another_place_in_every_epoch():
    text = torch.arange(200, dtype=torch.uint8)
    windows = Windows(text, 10, seed=3)
    loader = torch.utils.data.DataLoader(
        windows, 18, num_workers=1, persistent_workers=True, collate_fn=already_a_batch
    )
    starts = []
    for epoch in range(3):
        windows.set_offset(epoch)
        starts.append(next(iter(loader))["inputs"][0, 0].item())
        assert starts[-1] == windows.shift.item()
    assert len(set(starts)) == 3


@pytest.mark.parametrize("shape", [(3, 24, 96), (3, 96, 24)])
def test_muon_updates_are_orthogonal(shape):
    orthogonal = orthogonalize(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    values = torch.linalg.svdvals(orthogonal)
    assert values.min() > 0.6 and values.max() < 1.3


def test_one_process_prints_a_sample_also_of_bytes_that_are_not_text(monkeypatch, tmp_path, capsys):
    script = load_script("train_gpt")
    sizes = dict(n_layer=1, n_head=1, n_embd=8, block_size=8)
    monkeypatch.setattr(script.weights, "read", lambda path: None)
    monkeypatch.setattr(script, "load_model", lambda saved: script.GPT(**sizes))
    args = SimpleNamespace(sample="run", prompt="a\udcff", temperature=0, sample_length=2, seed=0)
    for rank, printed in (("0", True), ("1", False)):
        monkeypatch.setenv("RANK", rank)
        script.sample(args)
        assert capsys.readouterr().out.startswith("a\ufffd") == printed


def test_samples_of_the_training_continue_the_prompt(tmp_path):
    run(
        "cpu",
        GPT,
        f"--dataset synthetic {MODEL} --max_train_steps 2 --prompt abc --temperature 0",
        output_dir=tmp_path,
    )
    assert (tmp_path / "sample.txt").read_text().startswith("abc")


def test_the_copy_of_a_compiled_model_computes_with_its_own_weights():
    model, tokens = load_script("train_gpt").GPT(1, 2, 16, 8), torch.arange(8)[None]
    model.compile(backend="eager")
    twin, before = copy.deepcopy(model), model(tokens, tokens).tolist()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_()
    assert twin(tokens, tokens).tolist() == before != model(tokens, tokens).tolist()
    torch.compiler.reset()  # other tests count what is compiled


@pytest.mark.parametrize("shape", [(3, 24, 96), (3, 96, 24), (3, 24, 24)])
def test_muon_iterations_change_only_the_singular_values_each_by_the_published_polynomial(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    x[0, :, 1] = x[0, :, 0]  # square and tall matrices then have a singular value of zero
    left, values, right = torch.linalg.svd(
        x.double() / x.double().norm(dim=(1, 2), keepdim=True), full_matrices=False
    )
    for iterations in range(1, 6):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
        expected = (left * values[:, None]) @ right
        assert torch.allclose(orthogonalize(x, iterations).double(), expected, atol=1e-4)


def test_muon_treats_filters_as_matrices_and_leaves_the_rest_to_the_other_optimizer():
    torch.manual_seed(0)
    layer = torch.nn.Conv2d(4, 8, 3)
    before, bias = layer.weight.detach().clone(), layer.bias.detach().clone()
    filters = dict(
        params=[layer.weight], weight_decay=0.0, muon=True, momentum=0.6, fixed_norm=True
    )
    optimizer = MuonSGD(
        [filters, dict(params=[layer.bias], lr=0.5, muon=False)], lr=0.1, momentum=0.9
    )
    layer(torch.randn(2, 4, 8, 8)).square().sum().backward()
    gradient = layer.bias.grad.clone()
    optimizer.step()
    step = layer.weight.detach() - before * 8**0.5 / before.norm()
    values = torch.linalg.svdvals(step.flatten(1)) / 0.1
    assert values.min() > 0.6 and values.max() < 1.3
    assert torch.allclose(layer.bias, bias - 0.5 * gradient)


# ---------------------------------------------------------------------------------------- bad input


def bad_data(folder):
    """Writes files that are not valid training text to `folder`; returns it."""
    (folder / "empty.txt").touch()
    (folder / "short.txt").write_text("To be")
    (folder / "pictures").mkdir()
    (folder / "pictures" / "a.png").write_bytes(b"\x89PNG")
    (folder / "columns.jsonl").write_text('{"title": "a", "body": "b"}\n')
    (folder / "numbers.jsonl").write_text('{"text": 3}\n{"text": 4}\n')
    (folder / "broken.parquet").write_bytes(b"PAR1 and nothing of the kind")
    (folder / "binary").mkdir()
    (folder / "binary" / "a.txt").write_bytes(b"fine so far\n" * 200)
    (folder / "binary" / "b.txt").write_bytes(b"\xff\xfe\xfd")
    return folder


@pytest.mark.parametrize(
    "name, says",
    [
        ("empty.txt", "is empty"),
        ("short.txt", "has 5 bytes, too few for --block_size 16"),
        ("missing.txt", "no such file"),
        ("pictures", "holds no file that ends in"),
        ("columns.jsonl", "no column text: give --text_column, one of title, body"),
        ("numbers.jsonl", "row 0 of --dataset"),
        ("broken.parquet", "cannot load"),
    ],
)
def test_bad_text_is_explained(name, says, tmp_path):
    with pytest.raises(UserError) as caught:
        load_text(str(bad_data(tmp_path) / name), "text", 16)
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name, says",
    [
        ("binary", "cannot be read after row"),
        ("empty.txt", "too small to stream"),
        ("columns.jsonl", "no column text"),
    ],
)
def test_bad_stream_is_explained(name, says, tmp_path):
    with pytest.raises(UserError) as caught:
        load_held_out(str(bad_data(tmp_path) / name), "text", 16)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_stream_that_fails_midway_ends_the_run(tmp_path):
    with pytest.raises(RunFailed, match="cannot be read after row"):
        list(
            TextStream(
                str(bad_data(tmp_path) / "binary"),
                "text",
                16,
                4,
                lanes=1,
                buffer=200,
                seed=0,
                share=(0, 1),
            )
        )


@pytest.mark.parametrize(
    "config, arguments, says",
    [
        ("2cpu", "--dataset ./nowhere.txt", "no such file or folder"),
        (
            "2cpu",
            "--dataset synthetic --streaming 3 --max_train_steps 9",
            "2 processes cannot share",
        ),
        (None, "--dataset synthetic --streaming", "needs --max_train_steps"),
        (
            None,
            "--dataset synthetic --n_embd 30 --n_head 4",
            "must be an even number times --n_head 4",
        ),
        (None, "--sample /nowhere", "cannot read weights"),
    ],
)
def test_mistakes_are_printed_once(config, arguments, says, tmp_path):
    done = run(config, GPT, arguments, output_dir=tmp_path / "run", check=False)
    lines = re.findall(r"^error: .*$", done.stderr, re.MULTILINE)
    assert len(lines) == 1 and says in lines[0], done.stderr[-3000:]
    if config is None:
        assert done.returncode == 2 and "Traceback" not in done.stderr


def test_an_optimizer_returns_the_value_of_its_closure():
    weight = torch.nn.Parameter(torch.ones(2, 2))
    groups = [dict(params=[weight], lr=0.1, weight_decay=0.0, momentum=0.9, muon=True)]
    for optimizer in (MuonSGD(groups, lr=0.1), MuonAdamW(groups, lr=0.1)):
        weight.grad = torch.ones(2, 2)
        assert optimizer.step(lambda: torch.tensor(7.0)) == 7
