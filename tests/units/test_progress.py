"""A long evaluation shows how far it is, and the last one how long it will take."""

from types import SimpleNamespace

import pytest
from harness.fakes import accelerator

from utils.report import progress


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

    monkeypatch.setattr(progress.time, "monotonic", lambda: state.now)
    monkeypatch.setattr(progress, "tqdm", Bar)
    return state


class Loader(list):
    dataset = range(600)


def evaluate(watch, clock, seconds, batches=60):
    for _ in watch(Loader(range(batches))):
        clock.now += seconds


def test_a_long_evaluation_says_how_much_is_left(clock, monkeypatch):
    main, other = (progress.Progress(accelerator(2, rank)) for rank in (0, 1))
    evaluate(main, clock, 4.9 / 60)
    evaluate(other, clock, 2)
    assert clock.lines == [] and all(bar.disable for bar in clock.bars)
    evaluate(main, clock, 2)  # after five seconds, then after each tenth
    assert clock.lines[0] == "evaluation: 5%, left 0:01:54"
    assert clock.lines[1] == "evaluation: 10%, left 0:01:48" and len(clock.lines) == 10
    assert clock.lines[-1] == "evaluation: 90%, left 0:00:12"
    clock.lines.clear()
    evaluate(main, clock, 0.11)  # nearly seven seconds: one line
    assert clock.lines == ["evaluation: 77%, left 0:00:02"]
    monkeypatch.setattr(progress.sys, "stderr", SimpleNamespace(isatty=lambda: True))
    for each in (main, other):  # on a terminal
        evaluate(each, clock, 2)
    shown, hidden = clock.bars[-2:]
    assert not shown.disable and shown.delay == 5 and shown.total == shown.n == 60
    assert (shown.desc, shown.unit, shown.leave) == ("evaluation", "batch", False)
    assert hidden.disable and len(clock.lines) == 1


def test_the_last_evaluation_says_how_long_it_will_take(clock):
    main, many = progress.Progress(accelerator()), 9_000_000
    main.announce(many, many, "runs/a")
    evaluate(main, clock, 0.01)  # 1,000 samples per second
    counts = main.announce(many, many, "runs/a")
    assert counts == {"evaluated_samples": many, "held_out_samples": many}
    says = (
        "the last evaluation takes all 9,000,000 held-out samples{}. If it is interrupted, rerun "
        "the same command, or run python scripts/evaluate.py runs/a"
    ).format
    assert clock.lines == [says(""), says(", about 2:30:00")]
    main.announce(4000, 4000, "runs/a")
    progress.Progress(accelerator(2, rank=1)).announce(10**9, 10**9, "runs/a")
    assert len(clock.lines) == 2
    main.announce(4000, 5000, "runs/a")
    assert clock.lines[2].startswith("the last evaluation takes 4,000 of 5,000 held-out samples: ")
