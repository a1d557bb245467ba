"""Profiles a few steps of a training run."""

from accelerate.utils import ProfileKwargs


def start_profiler(accelerator, folder, wanted):
    """Profiles optimizer steps 3 to 5 on the main process.

    Writes `profile/trace.json` (open it at ui.perfetto.dev) and `profile/operators.txt` in
    `folder`.

    Returns:
        an object on which to call `step()` after each optimizer step, and `stop()` after the last.
    """
    if not wanted or not accelerator.is_main_process:
        return _NoProfiler()

    def write(profile):
        target = folder / "profile"
        target.mkdir(exist_ok=True)
        profile.export_chrome_trace(str(target / "trace.json"))
        table = profile.key_averages().table(sort_by="self_cpu_time_total")
        (target / "operators.txt").write_text(table)

    schedule = dict(wait=1, warmup=1, active=3, repeat=1)
    options = ProfileKwargs(schedule_option=schedule, on_trace_ready=write, record_shapes=True)
    profile = options.build()
    profile.start()
    return profile


class _NoProfiler:
    def step(self):
        """Does nothing."""

    def stop(self):
        """Does nothing."""
