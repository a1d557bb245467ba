"""What evaluations take, and show. (Mean losses: tests/properties/test_score_properties.py.)"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from harness.fakes import accelerator

from utils.data import evaluation
from utils.language.packing import DOCUMENT, Stream, cut_text
from utils.run.plan import Plan


def count(held_out, wanted=None, steps=10_000, every=1000, saved=None, **text):
    """What `count_evaluated` returns and prints."""
    printed = []
    run = SimpleNamespace(progress=saved or {}, print=printed.append)
    args = SimpleNamespace(batch_size=64, eval_samples=wanted, **text)
    plan = Plan(total_steps=steps, steps_per_epoch=100, evaluate_every=every)
    found = evaluation.count_evaluated(run, plan, args, held_out)
    return found, *printed


def test_evaluations_take_a_tenth_of_the_training():
    """A forward pass is a third of a step: 19,200 samples cost as much as 6,400 of 64,000."""
    found, line = count(2_600_000)
    assert found == 19_200 and line == (
        "evaluations: 19,200 of 2,600,000 held-out samples, always the same, about 10% of the cost "
        "of training (--eval_samples)"
    )
    assert count(2_600_000, steps=500)[0] == 9600  # one evaluation, after all of the training
    assert count(19_200) == (19_200,)
    # Never so few that the score is not stable: of images, and of text.
    found, line = count(2_600_000, every=2)
    assert found == 2000 and "about 521% of the cost" in line
    assert count(2_600_000, every=2, block_size=64)[0] == 2048
    assert count(2_600_000, every=1, block_size=2**18)[0] == 19
    assert count(1900, every=2) == (1900,)


def test_a_number_of_samples_may_be_given():
    found, line = count(1000, 40)
    assert found == 40 and "40 of 1,000 held-out samples" in line
    assert count(1000, 0) == (1000,) and count(1000, 5000) == (1000,)


def count_last(held_out, wanted=None, steps=10_000, **text):
    args = SimpleNamespace(batch_size=64, eval_samples=wanted, **text)
    return evaluation.count_last(Plan(total_steps=steps, steps_per_epoch=100), args, held_out)


def test_the_last_evaluation_costs_at_most_a_fifth_of_the_training():
    """Of three forward passes that cost a step; never less than a stable score needs."""
    assert count_last(384_001) == 384_000 == count_last(384_000) and count_last(7) == 7
    assert count_last(10**6, steps=20) == 2000
    assert count_last(10**6, steps=20, block_size=64) == 2048
    assert count_last(10**6, 0, steps=20) == 10**6 and count_last(10**6, 5, steps=20) == 2000


def test_a_run_keeps_its_samples_if_it_gets_longer_or_evaluates_more_often():
    saved = {"step": 10, "eval_samples": 19_200}
    assert count(2_600_000, every=5, steps=20_000, saved=saved)[0] == 19_200
    assert count(2_600_000, 0, saved={"step": 10, "eval_samples": 2_600_000}) == (2_600_000,)


def test_chosen_blocks_are_those_of_all():
    lengths = np.array([30, 7, 50, 23])
    documents = np.zeros(4, DOCUMENT)
    documents["start"], documents["length"] = np.cumsum(lengths) - lengths, lengths
    documents["bytes"] = 2 * (lengths - 1)
    tokens = np.arange(lengths.sum(), dtype=np.int32)
    whole = cut_text(Stream(tokens), documents, 8, pad_id=0)[0]
    some, indices = whole.select(np.array([1, 4, 13])), [1, 4, 13]
    assert len(whole) == 14 and len(some) == 3
    batch, expected = some.__getitems__([0, 1, 2]), whole.__getitems__(indices)
    for name in ("input_ids", "targets", "position_ids"):
        assert torch.equal(batch[name], expected[name]), name
    assert some.target_tokens == 18
    assert whole.bytes == 212 and some.bytes == pytest.approx(212 * 18 / 106)


class Loader(list):
    dataset = range(600)


@pytest.mark.parametrize("terminal", [True, False])
def test_the_main_process_shows_a_long_evaluation(terminal, monkeypatch):
    shown = []
    monkeypatch.setattr(evaluation, "tqdm", lambda items, **look: shown.append(look) or items)
    monkeypatch.setattr(evaluation.sys, "stderr", SimpleNamespace(isatty=lambda: terminal))
    for rank in (0, 1):
        progress = evaluation.Progress(accelerator(2, rank), reversed)
        assert list(progress(Loader("abc"))) == ["c", "b", "a"]
    main, other = shown
    look = {name: main[name] for name in ("total", "delay", "leave", "desc", "unit")}
    assert look == dict(total=3, delay=5, leave=False, desc="evaluation", unit="batch")
    assert not main["disable"] and other["disable"]
    assert (main["mininterval"] < 1) == terminal and main["maxinterval"] >= main["mininterval"]


def test_an_evaluation_of_a_part_says_how_to_take_all(monkeypatch):
    lines = []
    monkeypatch.setattr(evaluation.tqdm, "write", lines.append)
    for rank, samples in ((0, 5000), (1, 4000), (0, 4000)):
        counts = {"evaluated_samples": samples, "held_out_samples": 5000}
        progress = evaluation.Progress(accelerator(2, rank))
        assert progress.announce(samples, 5000, "runs/a") == counts
    (line,) = lines
    assert line.startswith("the last evaluation takes 4,000 of 5,000 held-out samples: ")
    assert "scripts/evaluate.py runs/a takes all" in line
