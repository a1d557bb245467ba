"""What `utils.run.metrics` measures, logs and prints."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from harness import fakes

from utils.run import metrics
from utils.run.metrics import Meter, Metrics

ALONE = fakes.accelerator()
PLAN = SimpleNamespace(total_steps=100, epoch_at=lambda step: step / 40)


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(metrics, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


class Sent(list):
    """A logger: the list of what it receives, (values, step, sent_before)."""

    def log(self, values, step, sent_before):
        self.append((values, step, sent_before))


def opened(folder, step, *loggers):
    meter = Meter(ALONE.device, 10, {"tokens_per_second": 5})
    return Metrics(folder, ALONE, PLAN, meter, step, loggers)


@pytest.fixture
def printed(monkeypatch):
    lines = []
    monkeypatch.setattr(metrics, "print", lines.append, raising=False)
    monkeypatch.setattr(metrics, "memory_bytes", {ALONE.device: 3 << 29}.__getitem__)
    return lines


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_meter_counts_the_time_since_the_last_line(clock, monkeypatch):
    monkeypatch.setattr(metrics, "memory_bytes", {"the device": 7}.__getitem__)
    meter = Meter("the device", 10, {"tokens_per_second": 100})
    clock.now += 8
    speeds, state = meter.read(4, 24)
    assert speeds == {"samples_per_second": 5.0, "tokens_per_second": 500.0}
    assert state == dict(step_seconds=2.0, data_share=0.0, memory_bytes=7, seconds_left=40.0)
    clock.now += 3
    speeds, state = meter.read(10, 24)
    assert speeds["samples_per_second"] == 20.0 and state["seconds_left"] == 7.0
    clock.now += 100
    meter.restart(12)
    clock.now += 4
    assert meter.read(14, 24)[1]["step_seconds"] == 2.0
    clock.now += 5
    assert meter.read(14, 24)[1]["step_seconds"] == 5.0  # no step since
    assert meter.read(15, 24)[1]["step_seconds"] == 1e-9  # a clock that stands still

    def load():
        for seconds in (2, 1):
            clock.now += seconds
            yield seconds

    for _ in meter.timed(load()):
        clock.now += 3.5
    assert meter.read(2, 2)[1]["data_share"] == pytest.approx(0.3)
    clock.now += 1
    assert meter.read(3, 3)[1]["data_share"] == 0 and meter.waited_seconds == 3


def test_each_line_is_written_sent_and_printed(clock, printed, tmp_path, monkeypatch):
    """The time of an evaluation is no time of training."""
    sent = Sent()
    log = opened(tmp_path, 20, sent)
    clock.now += 4
    figures = {"loss": torch.tensor(0.5), "lr": 0.1, "grad_norm": None}
    log.log("train", 24, figures)
    state = dict(step_seconds=1.0, data_share=0.0, memory_bytes=3 << 29, seconds_left=76.0)
    speeds = {"samples_per_second": 10.0, "tokens_per_second": 50.0}
    line = {"split": "train", "step": 24, "epoch": 0.6, "loss": 0.5, "lr": 0.1, **speeds, **state}
    clock.now += 50
    log.log("val", 40, {"accuracy": 0.5, "top5": None}, score=0.5)
    log.log("test", 40, {"text": "a sample"})
    assert lines_of(tmp_path) == [
        line,
        {"split": "val", "step": 40, "epoch": 1.0, "accuracy": 0.5, "score": 0.5},
        {"split": "test", "step": 40, "epoch": 1.0, "text": "a sample"},
    ]
    values = {f"train/{name}": value for name, value in speeds.items()}
    assert sent == [
        ({"train/loss": 0.5, "train/lr": 0.1, **values}, 24, False),
        ({"val/accuracy": 0.5}, 40, False),
        ({"test/text": "a sample"}, 40, False),
    ]
    assert printed == [metrics.train_line(line, 100), "step 40  val accuracy 0.5000"]
    clock.now += 2
    for skipped in (False, True):  # in fp16, where it is infinite; JSON has no such number
        monkeypatch.setattr(ALONE, "optimizer_step_was_skipped", skipped)
        log.log("train", 42 + skipped, figures | {"grad_norm": torch.tensor(2.0)})
        assert ("grad_norm" in lines_of(tmp_path)[-1]) is not skipped
    assert lines_of(tmp_path)[-2]["step_seconds"] == 1.0
    assert log.totals(24, 60.0)["tokens_seen"] == 24 * 10 * 5
    log.close()
    with pytest.raises(ValueError, match="closed file"):
        log.sync()


@pytest.mark.parametrize("torn", [b"", b'{"split": "train", "st', bytes(500)])
def test_after_a_restart_each_line_is_written_and_sent_once(torn, printed, tmp_path):
    """TensorBoard drops what the checkpoint does not have; other trackers keep it.

    The line of a checkpoint is written beside the training, behind those of later steps: a restart
    drops these, and not that line; also one that was being written.
    """
    names = [("checkpoint", 3), ("val", 6), ("train", 7), ("checkpoint", 6), ("val", 9)]
    earlier = [{"split": split, "step": step, "loss": 1.0} for split, step in names]
    text = "".join(f"{json.dumps(line)}\n" for line in earlier)
    (tmp_path / "metrics.jsonl").write_bytes(text.encode() + torn)
    sent = Sent()
    log = opened(tmp_path, 6, sent)
    assert lines_of(tmp_path) == [earlier[0], earlier[1], earlier[3]]
    for step in (6, 9, 12):
        log.log("val", step, {"loss": 0.5})
    assert [call[1:] for call in sent] == [(6, True), (9, True), (12, False)]
    log.write("val", 6, loss=0.25)
    steps = [(line["step"], line["loss"]) for line in lines_of(tmp_path)]
    assert steps == [(3, 1.0), (6, 1.0), (6, 1.0), (9, 0.5), (12, 0.5)]


def test_memory_is_that_of_the_gpu_or_of_the_process(monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", {torch.device("cuda"): 5}.__getitem__)
    assert metrics.memory_bytes(torch.device("cuda")) == 5
    usage = {metrics.resource.RUSAGE_SELF: SimpleNamespace(ru_maxrss=300)}
    monkeypatch.setattr(metrics.resource, "getrusage", usage.__getitem__)
    for platform, peak in (("linux", 300 * 1024), ("darwin", 300)):
        monkeypatch.setattr(sys, "platform", platform)
        assert metrics.memory_bytes(torch.device("cpu")) == peak


def test_a_figure_is_a_number_or_a_text(monkeypatch):
    class Split(torch.Tensor):
        def full_tensor(self):
            return torch.tensor(6.0)

    monkeypatch.setattr(metrics, "DTensor", Split)
    assert metrics.as_number(torch.tensor(1.0).as_subclass(Split)) == 6.0
    assert metrics.as_number(torch.tensor([2])) == 2 and metrics.as_number("a text") == "a text"
    assert type(metrics.as_number(torch.tensor(2.0))) is float and metrics.as_number(3) == 3


def test_a_line_of_training():
    figures = dict(step=7, epoch=0.256, loss=1.23456, lr=0.00012345, samples_per_second=1234.5)
    figures |= dict(step_seconds=0.5, data_share=0.255, memory_bytes=3 << 29, seconds_left=11045.9)
    line = (
        "step    7/1000  epoch 0.26  loss 1.2346  lr 0.000123  1,234 samples/s  data 26%  "
        "memory 1.5 GiB  left 3:04:05"
    )
    assert metrics.train_line(figures, 1000) == line
    more = figures | {"mfu": 0.4567, "slow_rank": 3, "slowest_behind": 0.256}
    assert metrics.train_line(more, 1000) == f"{line}  MFU 45.7%  rank 3 is 26% slower"
    rates = {0.999: "2,000.0 s/step", 1: "1.0 samples/s", 9.94: "9.9 samples/s", 10: "10 samples/s"}
    slow = {"step_seconds": 2000.04}
    for rate, text in rates.items():  # as exact as they are large
        assert metrics.speed(slow | {"samples_per_second": rate}) == text
    several = slow | {"samples_per_second": 0.5, "tokens_per_second": 1234.5}
    assert metrics.speed(several) == "1,234 tokens/s"


def test_the_last_lines_of_a_run():
    results = dict(test_accuracy=0.5, val_top_loss=1.25, train_seconds=61.2, global_step=100)
    results |= dict(samples_per_second=0.5, samples_seen=12_345, num_processes=2)
    results |= dict(peak_memory_bytes=3 << 29, best_checkpoint="step_00000100")
    assert metrics.summary(results, "runs/a", "done") == (
        "done: test accuracy 0.5000, val top loss 1.2500\n"
        "100 steps, 12,345 samples in 61 s (0.6 s/step with evaluations), 2 processes, "
        "peak memory 1.5 GiB\noutput: runs/a; best checkpoint: runs/a/checkpoints/step_00000100"
    )
    tokens = dict(tokens_seen=9999, tokens_per_second=7, val_loss=1.5, val_loss_standard_error=0.25)
    text = metrics.summary(results | tokens | {"val_images": 2000}, "runs/a", "done")
    assert (
        "val loss 1.5000 ± 0.2500, 2,000 val images\n100 steps, 9,999 tokens in 61 s (7 to" in text
    )
    results |= dict(global_step=0, num_processes=1, best_checkpoint=None)
    text = metrics.summary(results, "runs/a", "stopped")
    assert "(61.2 s/step with evaluations), 1 process, peak" in text
    assert text.endswith("\noutput: runs/a")
