"""What loops promise beyond their results: counting, signals at the end, sampling, averages, evaluation."""

import contextlib
import math
from types import SimpleNamespace

import pytest
import torch
from harness.data import Loader
from harness.launches import load_script, metrics, results, run, status
from torch import nn

from utils.data.text import Windows
from utils.ema import MovingAverage
from utils.run import checkpoint, cpu, manifest
from utils.run.failures import RunFailed, UserError
from utils.run.folder import RunFolder
from utils.run.saving import Writer

MINIMAL = "scripts/train_minimal.py"


# -------------------------------------------------------------------------------------- checkpoints


@pytest.fixture
def saving(tmp_path, monkeypatch):
    """A run of which each checkpoint is written or not, as `.outcomes` (an iterator) says."""
    args = SimpleNamespace(output_dir=str(tmp_path), resume="auto", keep_checkpoints=2)
    args.wait_for_checkpoints = True
    alone = dict(is_main_process=True, num_processes=1, device=torch.device("cpu"))
    alone["is_fsdp2"] = False
    run = RunFolder(args, SimpleNamespace(**alone))
    nothing = lambda *_, **__: None  # noqa: E731
    run.metrics = SimpleNamespace(sync=nothing, write=nothing, restart_clock=nothing)
    run._start_time, run._saved_at = 0.0, 0
    run._writer = Writer(run._accelerator)
    monkeypatch.setattr(checkpoint, "start", lambda *_: (tmp_path / ".writing", None))
    monkeypatch.setattr(checkpoint, "finish", lambda *_: next(run.outcomes))
    return run


def save(run, outcomes):
    run.outcomes = iter(outcomes)
    for step in range(1, len(outcomes) + 1):
        with run.checkpoint(step):
            pass


def test_only_failures_in_a_row_end_a_run(saving):
    save(saving, [False, False, True] * 5 + [False, False])
    with pytest.raises(RunFailed, match="3 checkpoints in a row could not be written") as error:
        save(saving, [False])
    assert "the last one is of step 15" in str(error.value)


def test_a_file_that_the_manifest_does_not_name_is_not_loaded(tmp_path):
    """Accelerate loads by name: a random state or an optimizer that was added would be used."""
    path = tmp_path / "step_00000001"
    path.mkdir()
    (path / "model.safetensors").write_bytes(b"weights")
    alone = SimpleNamespace(num_processes=1, process_index=0, is_local_main_process=True)
    files = manifest.hash_and_sync(alone, path)
    manifest.complete(path, tmp_path / "step_00000002", {"progress": {"step": 2}, "files": files})
    assert manifest.verify(tmp_path / "step_00000002")["progress"] == {"step": 2}
    (tmp_path / "step_00000002" / "random_states_1.pkl").write_bytes(b"added")
    with pytest.raises(UserError, match=r"random_states_1\.pkl"):
        manifest.verify(tmp_path / "step_00000002")


def test_a_signal_in_the_last_step_leaves_its_evaluation_to_the_restart(tmp_path):
    length = ["--max_train_steps", "8"]
    words = ["sigterm_in_step@8", MINIMAL, *length]
    assert run(
        "cpu", "tests/harness/wrapped.py", words, output_dir=tmp_path, check=False
    ).returncode
    assert status(tmp_path)["state"] == "preempted" and not metrics(tmp_path, "val")
    run("cpu", MINIMAL, length, output_dir=tmp_path)
    assert status(tmp_path)["state"] == "finished" and results(tmp_path)["global_step"] == 8
    (line,) = metrics(tmp_path, "val")
    assert line["step"] == 8 and line["accuracy"] == results(tmp_path)["val_accuracy"]
    assert results(tmp_path)["best_checkpoint"] == "step_00000008"


def test_a_dry_run_uploads_nothing(monkeypatch):
    words = ["train_cifar.py", "--dataset", "synthetic", "--push_to_hub", "ada/model", "--dry_run"]
    monkeypatch.setattr("sys.argv", words)
    args = load_script("train_cifar").parse_args()
    assert args.push_to_hub is None and args.max_train_steps == 2
    monkeypatch.setattr("sys.argv", words[:-1])
    assert load_script("train_cifar").parse_args().push_to_hub == "ada/model"


@pytest.mark.parametrize(("processes", "threads"), [("1", 8), ("2", 4), ("3", 2), ("16", 1)])
def test_processes_share_the_cores(processes, threads, monkeypatch):
    """Two processes with all cores each take several times as long."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    monkeypatch.setattr(cpu, "cores", lambda: 8)
    monkeypatch.setattr(cpu, "_wanted_threads", lambda: None)
    assert cpu.threads_per_process() == threads


# ------------------------------------------------------------------------------------------ the GPT


@pytest.fixture
def gpt():
    script = load_script("train_gpt")
    torch.manual_seed(0)
    model = script.GPT(n_layer=1, n_head=1, n_embd=8, block_size=8, dropout=0.5)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_()
    return script, model


@pytest.mark.parametrize("training", [True, False])
def test_sampling_changes_nothing_of_training(training, gpt):
    """Neither its random numbers nor whether dropout is on."""
    script, model = gpt
    model.train(training)
    before = torch.get_rng_state()
    args = SimpleNamespace(seed=3, sample_length=20, block_size=8)
    text = script.generate(model, args, "ab")
    assert torch.equal(torch.get_rng_state(), before) and model.training == training
    assert text.startswith("ab") and text == script.generate(model, args, "ab")
    assert text != script.generate(model, SimpleNamespace(**vars(args) | {"seed": 4}), "ab")


# ------------------------------------------------------------------------------- averages, evaluation


def test_weights_are_averaged_once_per_step_however_many_micro_batches(tmp_path):
    words = (
        "--dataset synthetic --model squeezenet1_1 --image_size 32 --batch_size 8 --num_workers 0"
    )
    words += " --gradient_accumulation_steps 2 --ema_decay 0.9 --max_train_steps 3 --eval_every 3"
    run("cpu", "scripts/train_images.py", words, output_dir=tmp_path)
    (newest,) = (tmp_path / "checkpoints").iterdir()
    saved = torch.load(newest / "custom_checkpoint_0.pkl", weights_only=True)
    assert saved["n_averaged"] == 3


class Alone:
    """Stands for an accelerator with one process, whose last batch was filled up with repeats."""

    num_processes, device, is_main_process = 1, torch.device("cpu"), True

    def __init__(self, samples):
        self._left = samples

    def autocast(self):
        return contextlib.nullcontext()

    def gather_for_metrics(self, values):
        values = values if isinstance(values, tuple) else (values,)
        count = min(self._left, len(values[0]))
        self._left -= count
        return tuple(value[:count] for value in values)


class Brightest(nn.Module):
    """Logits: the mean of each channel, three times; a buffer counts the passes in training mode."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(3, affine=True)
        self.passes = []

    def forward(self, x):
        self.passes.append((self.training, self.norm.training))
        return 3 * x.mean((2, 3))


class Whole:
    """A split whose loader yields the batches instead of ids."""

    def batch(self, batch):
        return batch

    def __len__(self):
        return len(LABELS)


def batches_of(labels, channels, size=4, batch=4, ids=True):
    """Images whose channel `channels[i]` is bright, in batches; the last one is filled up."""
    images = torch.zeros(len(labels), 3, size, size, dtype=torch.uint8)
    for image, channel in zip(images, channels, strict=True):
        image[channel] = 200
    found = []
    for start in range(0, len(labels), batch):
        take = [i % len(labels) for i in range(start, start + batch)]
        made = {"images": images[take], "labels": torch.tensor(labels)[take]}
        found.append(made | ({"ids": torch.tensor(take)} if ids else {}))
    return Loader(found, labels)


ZERO, ONE = torch.zeros(3), torch.full((3,), 100.0)
LABELS, CHANNELS = [0, 1, 2, 0, 1, 2], [0, 1, 2, 1, 1, 0]  # four of six are right
RIGHT, WRONG = -math.log(math.exp(6) / (math.exp(6) + 2)), -math.log(1 / (math.exp(6) + 2))
LOSS = (4 * RIGHT + 2 * WRONG) / 6


@pytest.mark.parametrize("script", ["train_cifar", "train_model_parallel", "train_images"])
def test_an_evaluation_is_exact_and_leaves_the_model_in_training_mode(script):
    module, model = load_script(script), Brightest().train()
    more = (None,) if script == "train_images" else (Whole(),)
    metrics = module.evaluate(Alone(6), model, *more, batches_of(LABELS, CHANNELS), iter, ZERO, ONE, **(
        {"size": 4} if script == "train_cifar" else {}
    ))  # fmt: skip
    assert metrics["accuracy"] == pytest.approx(4 / 6) and metrics["loss"] == pytest.approx(LOSS)
    assert model.passes == [(False, False)] * 2 and model.training and model.norm.training
    if script != "train_model_parallel":
        predictions = metrics.get("predictions", metrics.get("samples", {}).get("predictions"))
        assert predictions.tolist() == CHANNELS
    with pytest.raises(RuntimeError, match="of 6"):  # a sample is missing
        module.evaluate(Alone(5), model, *more, batches_of(LABELS, CHANNELS), iter, ZERO, ONE)


def test_an_evaluation_of_averaged_weights_shows_the_trained_ones_too(monkeypatch):
    script, model, average = load_script("train_images"), Brightest().train(), Brightest()
    for parameter in model.norm.parameters():
        parameter.requires_grad_(False)  # frozen: it must not go on to collect statistics
    ema = MovingAverage(average, None)
    ema.module = average
    average.forward = lambda x: 3 * x.mean((2, 3)).roll(1, 1)  # always wrong
    loader = batches_of(LABELS, CHANNELS)
    gathering = Alone(6)

    def again(values):
        gathering._left = gathering._left or 6
        return Alone.gather_for_metrics(gathering, values)

    gathering.gather_for_metrics = again
    metrics = script.evaluate(gathering, model, ema, loader, iter, ZERO, ONE)
    assert metrics["trained_accuracy"] == pytest.approx(4 / 6)
    assert metrics["trained_loss"] == pytest.approx(LOSS) and metrics["accuracy"] == 0
    assert model.training and not model.norm.training and not average.training
    assert metrics["samples"]["losses"].shape == (6,)
    sent = []
    monkeypatch.setattr("utils.ema.broadcast", sent.append)
    gathering.num_processes, gathering._left = 2, 6
    script.evaluate(gathering, model, ema, loader, iter, ZERO, ONE)
    assert all(one is other for one, other in zip(sent, average.buffers(), strict=True))


def test_unreadable_images_do_not_count():
    script = load_script("train_images")
    loader = batches_of([0, -1, 2, 0], [0, 1, 2, 1])
    metrics = script.evaluate(Alone(4), Brightest(), None, loader, iter, ZERO, ONE)
    assert metrics["accuracy"] == pytest.approx(2 / 3) and "top5" not in metrics
    assert metrics["loss"] == pytest.approx((2 * RIGHT + WRONG) / 3)
    assert metrics["samples"]["labels"].tolist() == [0, -1, 2, 0]


def test_views_are_weighted_and_mirrored():
    """Half of the weight for the image, a quarter for each shift by a pixel, with its mirror image."""
    script, seen = load_script("train_cifar"), []

    def model(x):
        seen.append(x)
        return x.flatten(1)[:, :5]

    images = torch.arange(2 * 3 * 36).view(2, 3, 6, 6).float()
    outputs = script.predict_views(model, images)
    padded = nn.functional.pad(images, (1, 1, 1, 1), mode="reflect")
    up, down = padded[:, :, :6, :6], padded[:, :, 2:, 2:]
    views = [images, images.flip(3), up, up.flip(3), down, down.flip(3)]
    assert all(torch.equal(a, b) for a, b in zip(seen, views, strict=True))
    weights = (0.25, 0.25, 0.125, 0.125, 0.125, 0.125)
    expected = sum(w * view.flatten(1)[:, :5] for w, view in zip(weights, views, strict=True))
    assert torch.equal(outputs, expected)
    batches = batches_of(LABELS, CHANNELS, size=32)
    brightest = Brightest()
    metrics = script.evaluate(Alone(6), brightest, Whole(), batches, iter, ZERO, ONE, tta=True)
    assert metrics["accuracy"] == pytest.approx(4 / 6) and len(brightest.passes) == 2 * 6


def test_the_image_size_grows():
    size = load_script("train_cifar").image_size_at
    fast = SimpleNamespace(model="fastnet", lr_schedule="linear")
    assert [size(p, fast) for p in (0.01, 0.6, 0.61, 0.8, 0.81, 1)] == [24, 24, 28, 28, 32, 32]
    assert size(0.1, SimpleNamespace(model="net", lr_schedule="linear")) == 32
    assert size(0.1, SimpleNamespace(model="fastnet", lr_schedule="constant")) == 32


class Bytes(nn.Module):
    """Logits of the next byte: 4 for the present one plus 1. Notes whether it is training."""

    def __init__(self):
        super().__init__()
        self.passes = []

    def forward(self, x, targets):
        self.passes.append(self.training)
        scores = 4.0 * nn.functional.one_hot((x + 1) % 256, 256).flatten(0, 1)
        losses = nn.functional.cross_entropy(scores, targets.flatten(), reduction="none")
        return losses.view_as(targets)


def test_every_held_out_byte_counts_once():
    script = load_script("train_gpt")
    text = Windows(torch.arange(8, dtype=torch.uint8), 4)  # seven bytes are predicted
    first = {"inputs": torch.tensor([[0, 1, 2, 3]]), "targets": torch.tensor([[1, 2, 3, 4]])}
    last = {"inputs": torch.tensor([[254, 255, 6, 0]])}
    last["targets"] = torch.tensor([[255, 0, 9, -100]])  # the last window is short
    loader, model = Loader([first, last], text), Bytes().train()
    metrics = script.evaluate(Alone(2), model, loader, iter)
    right, wrong = -math.log(math.exp(4) / (math.exp(4) + 255)), math.log(math.exp(4) + 255)
    assert metrics["loss"] == pytest.approx((6 * right + wrong) / 7, rel=1e-6)
    assert metrics["bits_per_byte"] == pytest.approx(metrics["loss"] / math.log(2))
    assert metrics["bytes"] == 7 and metrics["loss_standard_error"] > 0
    assert model.passes == [False, False] and model.training
    loader.dataset = Windows(torch.arange(9, dtype=torch.uint8), 4)
    with pytest.raises(RuntimeError, match="evaluated 7 of 8 held-out bytes"):
        script.evaluate(Alone(2), model, loader, iter)


# ------------------------------------------------------------------------------------ learning rates


def rates(script, total, per_epoch=10, **args):
    plan = SimpleNamespace(total_steps=total, steps_per_epoch=per_epoch)
    multiplier = load_script(script).lr_multiplier
    return [round(multiplier(step, plan, SimpleNamespace(**args)), 4) for step in range(total + 1)]


@pytest.mark.parametrize("script", ["train_gpt", "train_lm"])
def test_warm_up_takes_at_most_a_tenth_of_the_steps(script):
    linear = rates(script, 20, warmup_steps=50, lr_schedule="linear")
    assert linear[:4] == [0.3333, 0.6667, 1.0, 0.9444] and linear[11] == 0.5 and linear[20] == 0
    wsd = rates(script, 20, warmup_steps=1, lr_schedule="wsd")
    assert wsd == [0.5] + [1.0] * 16 + [0.75, 0.5, 0.25, 0]


def test_learning_rates_of_cifar():
    linear = rates("train_cifar", 10, warmup=0.4, lr_schedule="linear")
    assert linear == [0.2, 0.4, 0.6, 0.8, 1.0, 0.8333, 0.6667, 0.5, 0.3333, 0.1667, 0.0]
    assert rates("train_cifar", 10, warmup=0.0, lr_schedule="constant") == [1.0] * 11


def test_learning_rates_of_images():
    linear = rates("train_images", 20, warmup_epochs=0.2, lr_schedule="linear")
    assert linear[:3] == [0.3333, 0.6667, 1.0] and linear[11] == 0.5 and linear[20] == 0
    cosine = rates("train_images", 20, warmup_epochs=9, lr_schedule="cosine")  # at most a fifth
    assert cosine[:5] == [0.2, 0.4, 0.6, 0.8, 1.0] and cosine[12] == 0.5 and cosine[8] == 0.8536


def test_learning_rates_of_a_split_model():
    assert rates("train_model_parallel", 20) == [
        0.3333, 0.6667, 1.0, *(round((20 - step) / 18, 4) for step in range(3, 21))
    ]  # fmt: skip
