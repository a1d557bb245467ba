"""Remembers the best evaluation of a run, and how many came after it."""

from utils.run import manifest


class Best:
    """The scores of a run, of which checkpoints keep a record.

    Attributes:
        stale (int): the evaluations since the one with the highest score.
    """

    def __init__(self, patience=None):
        """Args: patience (int | None): how many evaluations may be without a better score."""
        self._patience, self.stale = patience, 0
        self._newest, self._best = (None, None, None), (None, None)

    def restore(self, progress, longer):
        """Continues from the progress of a checkpoint.

        Args: longer (bool): the run has another length than before: it gets new patience.
        """
        self._best = (progress.get("best"), progress.get("best_loss"))
        self.stale = 0 if longer else progress.get("stale", 0)

    def add(self, step, score, loss):
        """An evaluation after `step`; higher scores are better, or of equal ones lower losses."""
        self._newest = (step, score, loss)
        improved = manifest.rank(score, loss) >= manifest.rank(*self._best)
        self._best = (score, loss) if improved else self._best
        self.stale = 0 if improved else self.stale + 1

    def out_of_patience(self):
        """Whether `--patience` evaluations in a row had no better score."""
        return self._patience is not None and self.stale >= self._patience

    def reason(self):
        """Why the run ends."""
        if not self.out_of_patience():
            return "all steps done"
        plural = "" if self.stale == 1 else "s"
        return f"no better score for {self.stale} evaluation{plural}"

    def record(self, step):
        """What a checkpoint of `step` records: its own score, the best one, and the patience."""
        evaluated_at, score, loss = self._newest
        if evaluated_at != step:
            score, loss = None, None
        best, best_loss = self._best
        scores = {"score": score, "loss": loss, "best": best, "best_loss": best_loss}
        return {**scores, "stale": self.stale}
