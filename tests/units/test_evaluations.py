"""Evaluations cost a bounded share: the same held-out samples each time, all of them at the end."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader

from utils import scores
from utils.data import subset
from utils.data.images import Images
from utils.data.loaders import already_a_batch, evaluation_batch_size
from utils.data.packing import Documents, Stream, cut_text
from utils.data.text import Windows
from utils.run import progress
from utils.run.metrics import evaluation_line
from utils.run.plan import Plan

# ------------------------------------------------------------------------------------- how many


def count(held_out, wanted=None, steps=10_000, every=1000, saved=None, **text):
    """What `count_evaluated` returns, keeps for the checkpoints, and prints."""
    printed = []
    run = SimpleNamespace(progress=saved or {}, kept={}, print=printed.append)
    args = SimpleNamespace(batch_size=64, eval_samples=wanted, **text)
    plan = Plan(total_steps=steps, steps_per_epoch=100, evaluate_every=every)
    found = subset.count_evaluated(run, plan, args, held_out)
    assert run.kept == {"eval_samples": found}
    return found, *printed


def test_evaluations_take_a_tenth_of_the_training():
    """A forward pass is a third of a step: 19,200 samples cost as much as 6,400 of 64,000."""
    found, line = count(2_600_000)
    assert found == 19_200 and "19,200 of 2,600,000 held-out samples, always the same" in line
    assert "about 10% of the cost of training; the last one takes all" in line
    assert count(2_600_000, steps=500)[0] == 9600  # one evaluation, after all of the training
    assert count(19_200) == (19_200,)
    # Never so few that the score is not stable: of images, and of text.
    found, line = count(2_600_000, every=2)
    assert found == 2000 and "about 521% of the cost" in line
    assert count(2_600_000, every=2, block_size=64)[0] == 2048
    assert count(1900, every=2) == (1900,)


def test_a_number_of_samples_may_be_given():
    found, line = count(1000, 40)
    assert found == 40 and "40 of 1,000 held-out samples" in line
    assert count(1000, 0) == (1000,) and count(1000, 5000) == (1000,)


def test_a_run_keeps_its_samples_if_it_gets_longer_or_evaluates_more_often():
    saved = {"step": 10, "eval_samples": 19_200}
    assert count(2_600_000, every=5, steps=20_000, saved=saved)[0] == 19_200
    assert count(2_600_000, saved={"step": 10}) == (2_600_000,)  # of an earlier version
    assert count(2_600_000, 0, saved={"step": 10, "eval_samples": 2_600_000}) == (2_600_000,)


# ------------------------------------------------------------------------------------- which ones


def text(size=2000):
    return torch.randint(256, (size,), generator=torch.Generator().manual_seed(1)).byte()


def read(windows, processes):
    """The windows that each of some processes reads, in the order in which they are gathered."""
    batch = evaluation_batch_size(SimpleNamespace(num_processes=processes), len(windows), 4)
    shares = []
    for rank in range(processes):
        loader = DataLoader(windows, batch, collate_fn=already_a_batch)
        options = dict(num_processes=processes, process_index=rank, split_batches=True)
        loader = prepare_data_loader(loader, **options, put_on_device=False)
        shares.append([part["inputs"] for part in loader])
    rows = torch.cat([torch.cat(parts) for parts in zip(*shares, strict=True)])
    return rows[: len(windows)]


def test_the_samples_are_the_same_on_any_number_of_processes():
    whole = Windows(text(), 16)
    some = subset.choose(whole, 30, seed=3)
    assert len(whole) == 125 and len(some) == 30
    one, two, three = (read(some, processes) for processes in (1, 2, 3))
    assert torch.equal(one, two) and torch.equal(one, three)
    rows = [tuple(row) for row in read(whole, 1).tolist()]
    places = [rows.index(tuple(row)) for row in one.tolist()]
    assert places == sorted(set(places))  # in order, each once
    assert places[0] < 20 and places[-1] > 105  # over all of it


def test_another_seed_chooses_others_and_all_are_taken_as_they_are():
    whole = Windows(text(), 16)
    a, b, again = (subset.choose(whole, 30, seed).chosen.tolist() for seed in (3, 4, 3))
    assert a == again != b
    assert subset.choose(whole, 125, 3) is whole and subset.choose(whole, 126, 3) is whole
    # A larger number keeps those of a smaller one.
    assert set(a) < set(subset.choose(whole, 60, 3).chosen.tolist())


def test_windows_know_how_many_bytes_they_predict():
    whole = Windows(text(100), 16)  # six windows, and three bytes in the last
    assert whole.targets == 99
    for indices, targets in (([0, 2], 32), ([1, 6], 19), ([6], 3)):
        some = whole.select(np.array(indices))
        batch = some.__getitems__(list(range(len(some))))
        assert some.targets == targets == (batch["targets"] >= 0).sum()
        assert torch.equal(batch["inputs"], whole.__getitems__(indices)["inputs"])
        assert batch["ids"].tolist() == list(range(len(some)))
    assert Windows(text(97), 16).select(np.array([0, 5])).targets == 32  # all are full


def test_chosen_blocks_are_those_of_all():
    lengths = np.array([30, 7, 50, 23])
    starts = np.cumsum(lengths) - lengths
    documents = Documents(starts, lengths, np.full(4, -1), 2 * (lengths - 1))
    tokens = np.arange(lengths.sum(), dtype=np.int32)
    whole = cut_text(Stream([tokens]), documents, 8, pad_id=0)
    some, indices = whole.select(np.array([1, 4, 13])), [1, 4, 13]
    assert len(whole) == 14 and len(some) == 3
    batch, expected = some.__getitems__([0, 1, 2]), whole.__getitems__(indices)
    for name in ("input_ids", "targets", "position_ids"):
        assert torch.equal(batch[name], expected[name]), name
    assert some.block_targets.tolist() == whole.block_targets[indices].tolist() == [8, 8, 2]
    assert whole.bytes == 212 and some.bytes == pytest.approx(212 * 18 / 106)


def test_chosen_images_have_their_names_and_labels():
    source = SimpleNamespace(name=lambda row: f"{row}.png")
    whole = Images(source, np.arange(100, 140), np.arange(40))
    some = subset.choose(whole, 7, seed=0)
    assert [some.name(i) for i in range(7)] == [f"{100 + label}.png" for label in some.labels]


# --------------------------------------------------------------------------------------- progress


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test moves, and what is printed, and drawn as a bar."""
    state = SimpleNamespace(now=100.0, lines=[], bars=[])

    class Bar:
        def __init__(self, **options):
            state.bars.append(SimpleNamespace(**options, n=0))

        write = staticmethod(state.lines.append)

        def __enter__(self):
            return self

        def update(self):
            state.bars[-1].n += 1

        def __exit__(self, *_):
            state.bars[-1].closed = True

    monkeypatch.setattr(progress.time, "monotonic", lambda: state.now)
    monkeypatch.setattr(progress, "tqdm", Bar)
    monkeypatch.setattr(progress.sys, "stderr", SimpleNamespace(isatty=lambda: False))
    return state


class Loader(list):
    dataset = range(600)


def evaluate(watch, clock, seconds, batches=60):
    for _ in watch(Loader(range(batches))):
        clock.now += seconds


def test_a_long_evaluation_says_how_much_is_left(clock):
    main = progress.Progress(SimpleNamespace(is_main_process=True))
    evaluate(main, clock, 4.9 / 60)
    assert clock.lines == [] and all(bar.disable for bar in clock.bars)
    evaluate(main, clock, 2)  # after five seconds, then after each tenth
    assert clock.lines[0] == "evaluation: 5%, left 0:01:54"
    assert clock.lines[1] == "evaluation: 10%, left 0:01:48" and len(clock.lines) == 10
    assert clock.lines[-1] == "evaluation: 90%, left 0:00:12"
    clock.lines.clear()
    evaluate(main, clock, 0.1)  # six seconds: one line
    assert clock.lines == ["evaluation: 85%, left 0:00:01"]
    evaluate(progress.Progress(SimpleNamespace(is_main_process=False)), clock, 2)
    assert len(clock.lines) == 1


def test_a_terminal_has_a_bar(clock, monkeypatch):
    monkeypatch.setattr(progress.sys, "stderr", SimpleNamespace(isatty=lambda: True))
    evaluate(progress.Progress(SimpleNamespace(is_main_process=True)), clock, 2)
    evaluate(progress.Progress(SimpleNamespace(is_main_process=False)), clock, 2)
    main, other = clock.bars
    assert not main.disable and main.delay == 5 and main.total == main.n == 60 and main.closed
    assert other.disable and not clock.lines


def test_the_last_evaluation_says_how_long_it_will_take(clock):
    main = progress.Progress(SimpleNamespace(is_main_process=True))
    main.announce(9_000_000, "runs/a")
    assert "all 9,000,000 held-out samples. If it is stopped" in clock.lines[0]
    evaluate(main, clock, 0.01)  # 1,000 samples per second
    main.announce(9_000_000, "runs/a")
    main.announce(9_000_000, "runs/a", passes=2)
    assert "samples, about 2:30:00. If" in clock.lines[1] and "about 5:00:00" in clock.lines[2]
    assert clock.lines[1].endswith("or python scripts/evaluate.py runs/a")
    main.announce(4000, "runs/a")
    progress.Progress(SimpleNamespace(is_main_process=False)).announce(10**9, "runs/a")
    assert len(clock.lines) == 3


def test_the_batches_are_those_that_the_guard_yields(clock):
    seen = []

    def watch(loader):
        for batch in loader:
            yield batch
            seen.append(batch)
            if batch == 2:
                raise InterruptedError

    main = progress.Progress(SimpleNamespace(is_main_process=True), watch)
    with pytest.raises(InterruptedError):
        evaluate(main, clock, 1)
    assert seen == [0, 1, 2] and clock.bars[0].closed


def test_results_have_the_accuracy_and_the_precision_of_each_class():
    found = scores.per_class(torch.tensor([0, 0, 1, -1]), torch.tensor([0, 1, 1, 1]), ["a", "b"])
    assert found == {"per_class": {"b": 1.0, "a": 0.5}, "per_class_precision": {"a": 1.0, "b": 0.5}}


def test_metrics_are_printed_with_their_error_and_number():
    figures = {"images": 2000, "loss": 1.25, "loss_standard_error": 0.01, "top5": 0.5}
    line = "step 3  val loss 1.2500 ± 0.0100  top5 0.5000  2,000 images"
    assert evaluation_line("val", 3, figures) == line
