"""The metrics of a run: log lines, metrics.jsonl, rates and memory."""

import json
import os
import resource
import sys
import time

import torch
from torch.distributed.tensor import DTensor

from utils.run.failures import full_disk
from utils.run.files import json_lines, write_text
from utils.run.output import plural


class Metrics:
    """Logs metrics to the screen, to metrics.jsonl and to loggers: those of the main process."""

    def __init__(self, folder, accelerator, plan, meter, step, loggers=()):
        """Opens the log, and drops the lines after `step` (int): they are written again.

        Args:
            folder (Path): where metrics.jsonl is.
            plan (Plan): of the run.
            meter (Meter): measures the speed.
            loggers: objects with `log(values, step, sent_before)`: figures and texts by name such
                as `train/loss`; whether they were sent before an interruption.
        """
        self._accelerator, self._plan = accelerator, plan
        self._is_main, self._loggers = accelerator.is_main_process, loggers
        self._meter = meter
        self._meter.restart(step)
        # (split, step) of the lines that were written before a restart and may be logged again;
        # those of the step of the checkpoint itself stay.
        self._sent, self._start = set(), step
        if self._is_main:
            self._open(folder / "metrics.jsonl", step)

    def _open(self, path, step):
        path.touch()
        text = ""
        for line in json_lines(path):
            if line["step"] >= step:
                self._sent.add((line["split"], line["step"]))
            if line["step"] <= step:
                text += json.dumps(line) + "\n"
        if path.stat().st_size != len(text):
            write_text(path, text)
        self._file = path.open("a")

    def log(self, split, step, figures, score=None):
        """Logs the metrics of a step, as `RunFolder.log`; call it on every process."""
        figures = {name: as_number(value) for name, value in figures.items() if value is not None}
        state = {}
        if split == "train":
            if self._accelerator.optimizer_step_was_skipped:  # in fp16: its gradients overflowed
                figures.pop("grad_norm", None)
            speeds, state = self._meter.read(step, self._plan.total_steps)
            figures |= speeds
        else:
            self._meter.restart(step)  # the time of an evaluation does not count as training
        if not self._is_main:
            return
        values = {f"{split}/{name}": value for name, value in figures.items()}
        for logger in self._loggers:
            logger.log(values, step, sent_before=(split, step) in self._sent)
        scored = {} if score is None else {"score": score}
        line = {"epoch": self._plan.epoch_at(step), **figures, **state}
        self.write(split, step, **line, **scored)
        if split == "train":
            print(train_line({"step": step, **line}, self._plan.total_steps))
        elif "text" not in figures:
            print(f"step {step}  {split} {'  '.join(in_words(figures))}")

    def write(self, split, step, **figures):
        """Appends a line to metrics.jsonl, unless it was already written before a restart."""
        again = step == self._start and (split, step) in self._sent
        if self._is_main and not again:
            self._file.write(json.dumps({"split": split, "step": step, **figures}) + "\n")
            try:
                self._file.flush()
            except OSError as error:
                # A checkpoint may fill the disk until its writing fails: the line stays buffered.
                if not full_disk(error):
                    raise

    def sync(self):
        """Waits until all lines are on disk."""
        if self._is_main:
            self._file.flush()
            os.fsync(self._file.fileno())

    def totals(self, step, seconds):
        """The last part of results.json: what a run of so many steps (int) and seconds took."""
        samples = step * self._meter.batch_size
        counts = {"samples": samples}
        for rate, per_sample in self._meter.rates.items():
            if rate.endswith("_per_second"):
                counts[rate.removesuffix("_per_second")] = samples * per_sample
        return {
            "global_step": step,
            **{f"{unit}_seen": count for unit, count in counts.items()},
            "train_seconds": seconds,
            **{f"{unit}_per_second": count / seconds for unit, count in counts.items()},
            "num_processes": self._accelerator.num_processes,
            "peak_memory_bytes": memory_bytes(self._accelerator.device),
        }

    def close(self):
        """Closes metrics.jsonl."""
        if self._is_main:
            self._file.close()


class Meter:
    """Measures samples per second between two log lines, without evaluation and saving.

    GPU kernels run asynchronously, but reading the loss for each log line waits for them.

    Attributes:
        waited_seconds (float): the time that the loop has waited for batches, in total.
    """

    def __init__(self, device, batch_size, rates):
        """
        Args:
            batch_size (int): samples per optimizer step.
            rates (dict): name -> amount per sample, of more rates (`tokens_per_second`).
        """
        self._device, self.batch_size, self.rates = device, batch_size, rates
        self.waited_seconds = 0.0
        self.restart(0)

    def restart(self, step):
        """Starts counting again at `step`."""
        self._step, self._since, self._data_seconds = step, time.perf_counter(), 0.0

    def timed(self, batches):
        """Yields `batches` and adds up the seconds spent waiting for them."""
        start_time = time.perf_counter()
        for batch in batches:
            waited = time.perf_counter() - start_time
            self._data_seconds += waited
            self.waited_seconds += waited
            yield batch
            start_time = time.perf_counter()

    def read(self, step, total_steps):
        """The speeds since the last call, and the state of the run (both dict); starts again."""
        seconds = max(time.perf_counter() - self._since, 1e-9)
        steps = max(step - self._step, 1)
        samples_per_second = steps * self.batch_size / seconds
        speeds = {"samples_per_second": samples_per_second}
        for name, per_sample in self.rates.items():
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
    """The peak memory so far, in bytes: of tensors on a GPU, or of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


def as_number(value):
    """The Python number of a scalar tensor; call it on every process: a `DTensor` is reduced."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.item() if isinstance(value, torch.Tensor) else value


# --------------------------------------------------------------------------------- lines of text


def train_line(figures, total_steps):
    """Formats a training line of metrics.jsonl for printing."""
    seconds = int(figures["seconds_left"])
    mfu = f"  MFU {figures['mfu']:.1%}" if "mfu" in figures else ""
    slow = ""
    if "slow_rank" in figures:
        slow = f"  rank {figures['slow_rank']} is {figures['slowest_behind']:.0%} slower"
    return (
        f"step {figures['step']:>{len(str(total_steps))}}/{total_steps}  "
        f"epoch {figures['epoch']:.2f}  loss {figures['loss']:.4f}  lr {figures['lr']:.3g}  "
        f"{speed(figures)}  data {figures['data_share']:.0%}  "
        f"memory {figures['memory_bytes'] / 2**30:.1f} GiB  "
        f"left {seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}{mfu}{slow}"
    )


def speed(figures):
    """Formats a speed: in tokens, if a sample has several; if it is slow, as seconds per step."""
    if "tokens_per_second" in figures:
        return f"{figures['tokens_per_second']:,.0f} tokens/s"
    rate = figures["samples_per_second"]
    if rate < 1:
        return f"{figures['step_seconds']:,.1f} s/step"
    return f"{rate:,.{0 if rate >= 10 else 1}f} samples/s"


def in_words(figures):
    """Lists metrics (dict) as text, each with its standard error, if any, and counts (int) last."""
    metrics, counts = [], []
    for name, value in figures.items():
        words, error = name.replace("_", " "), figures.get(f"{name}_standard_error")
        if isinstance(value, int):
            counts.append(f"{value:,} {words}")
        elif not name.endswith("_standard_error"):
            metrics.append(f"{words} {value:.4f}" + ("" if error is None else f" ± {error:.4f}"))
    return metrics + counts


def summary(results, folder, headline):
    """Formats the final lines of a run from its results."""
    figures = {name: results[name] for name in results if name.startswith(("test_", "val_"))}
    processes = plural(results["num_processes"], "process")
    best = results.get("best_checkpoint")
    best = f"; best checkpoint: {folder}/checkpoints/{best}" if best else ""
    seconds = results["train_seconds"]
    rate = speed({**results, "step_seconds": seconds / max(results["global_step"], 1)})
    unit = "tokens" if "tokens_seen" in results else "samples"
    return (
        f"{headline}: {', '.join(in_words(figures))}\n"
        f"{plural(results['global_step'], 'step')}, {results[f'{unit}_seen']:,} {unit} in "
        f"{seconds:.0f} s ({rate} with evaluations), {processes}, "
        f"peak memory {results['peak_memory_bytes'] / 2**30:.1f} GiB\n"
        f"output: {folder}{best}"
    )
