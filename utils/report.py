"""What a run says about itself while it goes: speed, memory, time left, a profile, a closing summary."""

import contextlib
import resource
import sys
import time

import torch


class Meter:
    """Counts samples and seconds between two log lines; evaluation and saving are left out.

    On a GPU the seconds are those of launching the work. Reading the loss at each log line waits for it to be done, so
    over the distance between two lines they are the true ones.
    """

    def __init__(self, accelerator, batch_size, total_steps, step):
        self._accelerator, self._batch_size, self._total_steps = accelerator, batch_size, total_steps
        self._waiting_since = time.perf_counter()
        self._rate = None
        self.restart(step)

    def restart(self, step):
        """Starts counting anew at `step`: what came since the last line is not training."""
        self._step, self._since, self._data_seconds = step, time.perf_counter(), 0.0
        self._waiting_since = self._since

    def data_wanted(self):
        """The loop turns to the loader for the next batch."""
        self._waiting_since = time.perf_counter()

    def data_arrived(self):
        """The batch is there."""
        self._data_seconds += time.perf_counter() - self._waiting_since

    def line(self, step, **figures):
        """The figures of a log line, as a dict of numbers, and a new start."""
        seconds = max(time.perf_counter() - self._since, 1e-9)
        steps = step - self._step
        line = {
            "step": step,
            **figures,
            "samples_per_second": steps * self._batch_size / seconds,
            "step_seconds": seconds / max(steps, 1),
            "data_share": self._data_seconds / seconds,
            "memory_bytes": memory_bytes(self._accelerator.device),
            "seconds_left": (self._total_steps - step) * seconds / max(steps, 1),
        }
        self.restart(step)
        return line

    def text(self, line):
        """`line` for people."""
        left = int(line["seconds_left"])
        return (
            f"step {line['step']:>{len(str(self._total_steps))}}/{self._total_steps}  epoch {line['epoch']:.2f}  "
            f"loss {line['loss']:.4f}  lr {line['lr']:.4f}  {line['samples_per_second']:,.0f} samples/s  "
            f"data {100 * line['data_share']:.0f} %  memory {line['memory_bytes'] / 2**30:.1f} GiB  "
            f"left {left // 3600}:{left // 60 % 60:02}:{left % 60:02}"
        )


def memory_bytes(device):
    """The most memory that was in use so far, in bytes: the GPU's tensors, or on a CPU this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


@contextlib.contextmanager
def profiler(accelerator, folder, wanted):
    """Profiles optimizer steps 3 to 5 of the main process; gives a function to call after each step.

    Writes `profile/trace.json` (open it at ui.perfetto.dev) and `profile/operators.txt` in `folder`.
    """
    if not wanted or not accelerator.is_main_process:
        yield lambda: None
        return

    def write(profile):
        target = folder / "profile"
        target.mkdir(exist_ok=True)
        profile.export_chrome_trace(str(target / "trace.json"))
        (target / "operators.txt").write_text(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=30))

    schedule = torch.profiler.schedule(wait=1, warmup=1, active=3, repeat=1)
    with torch.profiler.profile(schedule=schedule, on_trace_ready=write, record_shapes=True) as profile:
        yield profile.step


def summary(results, folder, headline):
    """The closing lines of a run, from its results."""
    parts = [f"{name.replace('_', ' ')} {value:.4f}" for name, value in results.items() if name.startswith(("test_", "val_"))]
    return (
        f"{headline}: {', '.join(parts)}\n"
        f"{results['global_step']} steps, {results['samples_seen']:,} samples in {results['train_seconds']:.0f} s "
        f"({results['samples_per_second']:,.0f} a second), {results['num_processes']} process"
        f"{'es' * (results['num_processes'] > 1)}, peak memory {results['peak_memory_bytes'] / 2**30:.1f} GiB; see {folder}"
    )
