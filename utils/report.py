"""Measures speed and memory, profiles, and formats the lines that are printed."""

import contextlib
import resource
import sys
import time

import torch
from accelerate.utils import ProfileKwargs
from torch.distributed.tensor import DTensor


class Meter:
    """Measures samples per second between two log lines, without evaluation and saving.

    GPU kernels run asynchronously, but reading the loss for each log line waits for them. So the time between two log lines is
    correct.
    """

    def __init__(self, device, batch_size, rates):
        """Args: rates (dict): name -> amount per sample, of additional rates to report (such as `tokens_per_second`)."""
        self._device, self._batch_size, self._rates = device, batch_size, rates
        self.restart(0)

    def restart(self, step):
        """Starts counting again at `step`."""
        self._step, self._since, self._data_seconds = step, time.perf_counter(), 0.0

    def timed(self, batches):
        """Yields `batches` and adds up the seconds spent waiting for them."""
        batches = iter(batches)
        while True:
            start_time = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._data_seconds += time.perf_counter() - start_time
            yield batch

    def read(self, step, total_steps):
        """Returns the measurements since the last call, and starts again.

        Returns:
            tuple[dict, dict]: rates (`samples_per_second` and the additional ones); the state of the run (`step_seconds`,
            `data_share`, `memory_bytes`, `seconds_left`).
        """
        seconds = max(time.perf_counter() - self._since, 1e-9)
        steps = max(step - self._step, 1)
        samples_per_second = steps * self._batch_size / seconds
        speeds = {"samples_per_second": samples_per_second}
        for name, per_sample in self._rates.items():
            speeds[name] = samples_per_second * per_sample
        state = {
            "step_seconds": seconds / steps,
            "data_share": self._data_seconds / seconds,
            "memory_bytes": memory_bytes(self._device),
            "seconds_left": (total_steps - step) * seconds / steps,
        }
        self.restart(step)
        return speeds, state


def memory_bytes(device):
    """The peak memory so far, in bytes: allocated tensors on a GPU, or the memory of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


def as_number(value):
    """The Python number of a scalar tensor; one that is sharded must be reduced, so call this on every process."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.item() if isinstance(value, torch.Tensor) else value


@contextlib.contextmanager
def profiler(accelerator, folder, wanted):
    """Profiles optimizer steps 3 to 5 on the main process. Call `step()` on the yielded object after each optimizer step.

    Writes `profile/trace.json` (open it at ui.perfetto.dev) and `profile/operators.txt` in `folder`.
    """
    if not wanted or not accelerator.is_main_process:
        yield _NoProfiler()
        return

    def write(profile):
        target = folder / "profile"
        target.mkdir(exist_ok=True)
        profile.export_chrome_trace(str(target / "trace.json"))
        (target / "operators.txt").write_text(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=30))

    schedule = dict(wait=1, warmup=1, active=3, repeat=1)
    with accelerator.profile(ProfileKwargs(schedule_option=schedule, on_trace_ready=write, record_shapes=True)) as profile:
        yield profile


class _NoProfiler:
    def step(self):
        """Does nothing."""


def columns(rows):
    """Formats rows of strings as lines of text with aligned columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def train_line(figures, total_steps):
    """Formats a training line of metrics.jsonl for printing."""
    left = int(figures["seconds_left"])
    mfu = f"  MFU {figures['mfu']:.1%}" if "mfu" in figures else ""
    return (
        f"step {figures['step']:>{len(str(total_steps))}}/{total_steps}  epoch {figures['epoch']:.2f}  "
        f"loss {figures['loss']:.4f}  lr {figures['lr']:.3g}  {figures['samples_per_second']:,.0f} samples/s  "
        f"data {figures['data_share']:.0%}  memory {figures['memory_bytes'] / 2**30:.1f} GiB  "
        f"left {left // 3600}:{left // 60 % 60:02}:{left % 60:02}{mfu}"
    )


def train_summary(figures):
    """Formats the figures that stand beside a progress bar, which itself shows the step and the time left."""
    return f"loss {figures['loss']:.4f}, lr {figures['lr']:.3g}, {figures['samples_per_second']:,.0f} samples/s"


def evaluation_line(split, step, figures):
    """Formats the metrics of an evaluation for printing."""
    parts = [f"{name.replace('_', ' ')} {value:.4f}" for name, value in figures.items()]
    return f"step {step}  {split} {'  '.join(parts)}"


def summary(results, folder, headline):
    """Formats the final lines of a run from its results."""
    parts = [f"{name.replace('_', ' ')} {value:.4f}" for name, value in results.items() if name.startswith(("test_", "val_"))]
    processes = f"{results['num_processes']} process{'es' * (results['num_processes'] > 1)}"
    best = f"; best checkpoint: {folder}/checkpoints/{results['best_checkpoint']}" if results.get("best_checkpoint") else ""
    return (
        f"{headline}: {', '.join(parts)}\n"
        f"{results['global_step']} steps, {results['samples_seen']:,} samples in {results['train_seconds']:.0f} s "
        f"({results['samples_per_second']:,.0f} samples/s), {processes}, "
        f"peak memory {results['peak_memory_bytes'] / 2**30:.1f} GiB\n"
        f"output: {folder}{best}"
    )
