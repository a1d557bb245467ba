"""Shows how far a long evaluation is, and how much time is left."""

import sys
import time
from datetime import timedelta

from tqdm import tqdm

SECONDS = 5  # of an evaluation, until something is shown


class Progress:
    """Iterates over the batches of evaluations, in place of `guard.watch`.

    Of an evaluation that takes more than `SECONDS`, the main process shows a bar with the time
    left. Without a terminal it prints a line instead, and then one after each tenth.
    """

    def __init__(self, accelerator, watch=iter):
        """Args: watch: yields the batches of a loader, as `guard.watch` does."""
        self._watch, self._is_main = watch, accelerator.is_main_process
        self._speed = None  # samples per second of the last evaluation

    def __call__(self, loader):
        """Yields the batches of a prepared `DataLoader`."""
        start_time = time.monotonic()
        yield from with_progress(
            self._watch(loader), len(loader), "evaluation", "batch", self._is_main
        )
        self._speed = len(loader.dataset) / max(time.monotonic() - start_time, 1e-9)

    def announce(self, samples, held_out, folder):
        """Says that the last evaluation follows, and how long it will take: if it is known, long.

        Args:
            samples (int): so many of the `held_out` (int) are evaluated.
            folder (Path): that of the run, whose weights are written.

        Returns:
            dict: `evaluated_samples` and `held_out_samples`, for results.json.
        """
        seconds = samples / self._speed if self._speed else None
        scores = f"python scripts/evaluate.py {folder}"
        if self._is_main and samples < held_out:
            tqdm.write(
                f"the last evaluation takes {samples:,} of {held_out:,} held-out samples: {scores} "
                "takes all, and so does --eval_samples 0"
            )
        elif self._is_main and (seconds is None or seconds > SECONDS):
            about = "" if seconds is None else f", about {clock(seconds)}"
            tqdm.write(
                f"the last evaluation takes all {samples:,} held-out samples{about}. If it is "
                f"interrupted, rerun the same command, or run {scores}"
            )
        return {"evaluated_samples": samples, "held_out_samples": held_out}


def with_progress(items, total, what, unit, shown=True):
    """Yields items; if that takes more than `SECONDS`, shows a bar with the time left.

    Without a terminal it prints a line instead, and then one after each tenth.

    Args:
        total (int): the number of items.
        what, unit (str): of the bar.
        shown (bool): False: only yields.
    """
    start_time = said_at = time.monotonic()
    terminal, tenths = sys.stderr.isatty(), -1
    look = dict(desc=what, unit=unit, leave=False, dynamic_ncols=True)
    with tqdm(total=total, delay=SECONDS, disable=not (shown and terminal), **look) as bar:
        for done, item in enumerate(items, 1):
            yield item
            bar.update()
            now, tenth = time.monotonic(), 10 * done // total
            if shown and not terminal and tenths < tenth < 10 and now - said_at >= SECONDS:
                said_at, tenths = now, tenth
                left = clock((now - start_time) * (total - done) / done)
                tqdm.write(f"{what}: {done / total:.0%}, left {left}")


def clock(seconds):
    """A number of seconds as hours, minutes and seconds."""
    return str(timedelta(seconds=round(seconds)))
