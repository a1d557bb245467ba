"""utils/run/best.py: the best evaluation of a run, and its patience."""

from utils.run.best import Best


def scored(best, *scores):
    """Adds evaluations; returns after which of them the run is out of patience."""
    ended = []
    for step, score in enumerate(scores, 1):
        best.add(step, score, None)
        ended.append(best.out_of_patience())
    return ended


def test_the_best_is_the_highest_score_and_of_equal_ones_the_lowest_loss():
    best = Best(1)
    assert not best.improved_at(0) and not best.improved_at(None) and not best.out_of_patience()
    assert best.record(0) == dict(score=None, loss=None, best=None, best_loss=None, stale=0)
    best.add(4, 0.5, 1.0)
    assert best.improved_at(4) and not best.improved_at(5)
    best.add(6, 0.5, 1.5)
    assert not best.improved_at(6) and best.reason() == "no better score for 1 evaluation"
    assert best.record(6) == dict(score=0.5, loss=1.5, best=0.5, best_loss=1.0, stale=1)
    assert best.record(7) == dict(score=None, loss=None, best=0.5, best_loss=1.0, stale=1)
    best.add(8, 0.5, 0.9)
    assert best.improved_at(8) and best.record(8)["best_loss"] == 0.9 and best.stale == 0


def test_the_count_is_in_the_checkpoint():
    best = Best(3)
    best.add(1, 0.5, 2.0)
    scored(best, 0.4, 0.3)
    again, longer, old = Best(3), Best(3), Best(1)
    again.restore(best.record(3), longer=False)
    again.add(4, 0.45, None)
    assert again.out_of_patience() and again.reason() == "no better score for 3 evaluations"
    longer.restore(best.record(3), longer=True)
    assert scored(longer, 0.4, 0.4, 0.4) == [False, False, True]
    assert longer.record(9) == dict(score=None, loss=None, best=0.5, best_loss=2.0, stale=3)
    old.restore({"best": 0.5}, longer=False)  # a checkpoint without a count
    assert not old.out_of_patience() and old.reason() == "all steps done"
