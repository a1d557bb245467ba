"""A long evaluation shows how far it is. (Mean losses: tests/properties/test_score_properties.py.)"""

from types import SimpleNamespace

import pytest
from harness.fakes import accelerator

from utils import evaluation


class Loader(list):
    dataset = range(600)


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test moves, and what is printed, and drawn as a bar."""
    state = SimpleNamespace(now=100.0, lines=[], bars=[])

    class Bar:
        write = staticmethod(state.lines.append)

        def __init__(self, **options):
            state.bars.append(SimpleNamespace(**options, n=0))

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def update(self):
            state.bars[-1].n += 1

    monkeypatch.setattr(evaluation.time, "monotonic", lambda: state.now)
    monkeypatch.setattr(evaluation, "tqdm", Bar)
    return state


def test_a_long_evaluation_says_how_much_is_left(clock, monkeypatch):
    main, other = (evaluation.Progress(accelerator(2, rank)) for rank in (0, 1))

    def evaluate(progress, seconds):
        for _ in progress(Loader(range(60))):
            clock.now += seconds
        lines = clock.lines.copy()
        clock.lines.clear()
        return lines

    assert evaluate(main, 4.9 / 60) == evaluate(other, 2) == []
    assert all(bar.disable for bar in clock.bars)
    lines = evaluate(main, 2)  # after five seconds, then after each tenth
    assert lines[:2] == ["evaluation: 5%, left 0:01:54", "evaluation: 10%, left 0:01:48"]
    assert lines[-1] == "evaluation: 90%, left 0:00:12" and len(lines) == 10
    # Nearly seven seconds: one line.
    assert evaluate(main, 0.11) == ["evaluation: 77%, left 0:00:02"]
    monkeypatch.setattr(evaluation.sys, "stderr", SimpleNamespace(isatty=lambda: True))
    assert evaluate(main, 2) == evaluate(other, 2) == []  # on a terminal
    shown, hidden = clock.bars[-2:]
    assert not shown.disable and shown.delay == 5 and shown.total == shown.n == 60
    assert (shown.desc, shown.unit, shown.leave) == ("evaluation", "batch", False)
    assert hidden.disable


def test_an_evaluation_of_a_part_says_how_to_take_all(clock):
    main, other = (evaluation.Progress(accelerator(2, rank)) for rank in (0, 1))
    for samples in (5000, 4000):
        counts = {"evaluated_samples": samples, "held_out_samples": 5000}
        assert main.announce(samples, 5000, "runs/a") == counts
        assert other.announce(samples, 5000, "runs/a") == counts
    (line,) = clock.lines
    assert line.startswith("the last evaluation takes 4,000 of 5,000 held-out samples: ")
    assert "scripts/evaluate.py runs/a takes all" in line
