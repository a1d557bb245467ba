"""Accelerate's experiment trackers, which get each record only once, and its profiler."""

import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from accelerate.utils import ProfileKwargs

from utils.report.plots import optional
from utils.run.failures import UserError


class Trackers:
    """Accelerate's experiment trackers as a logger of `RunFolder`."""

    def __init__(self, args):
        """Args: args: `track`, comma-separated names of trackers or `none`, and `output_dir`.

        Raises:
            UserError: a name is unknown, or its package is not installed.
        """
        names = [] if args.track == "none" else args.track.split(",")
        self._names, self._folder = [name.strip() for name in names], args.output_dir
        for name in self._names:
            if name not in map(str, get_available_trackers()):
                trackers = ", ".join(sorted(LOGGER_TYPE_TO_CLASS))
                raise UserError(
                    f"--track {name}: not known, or not installed (pip install {name}); use none, "
                    f"or one or more of {trackers}, separated by commas"
                )

    def options(self):
        """The arguments of `Accelerator(...)` for trackers, as a dict."""
        return {"log_with": self._names or None, "project_dir": f"{self._folder}/tensorboard"}

    def start(self, run):
        """Starts the trackers, or continues their runs, with what each of them needs.

        One that does not start costs a warning. What they write is in the run's folder. TensorBoard
        drops what was logged after the step of the checkpoint.

        Args: run (RunFolder): after `start`.
        """
        accelerator, arguments = run.accelerator, run.identity.arguments
        self._accelerator, folder = accelerator, run.path.resolve()
        step, name = run.progress.get("step", 0), folder.name
        options = {
            "tensorboard": {"purge_step": step + 1},
            "wandb": {"name": name, "id": run.run_id, "resume": "allow", "dir": str(folder)},
            "trackio": {"name": name, "resume": "allow"},
            "mlflow": {"run_name": name},
        }
        # If TensorBoard's thread cannot write, `log` raises its error, too.
        others, ours = threading.excepthook, "tensorboard."
        threading.excepthook = lambda error: (
            type(error.thread).__module__.startswith(ours) or others(error)
        )
        os.environ.setdefault("MLFLOW_TRACKING_URI", (folder / "mlruns").as_uri())
        trackers = []
        for tracker in self._names:  # one by one: `init_trackers` stops at the first error
            accelerator.log_with, accelerator.trackers = [tracker], []
            # TensorBoard's table of arguments needs the final metrics: see `finish`.
            config = None if tracker == "tensorboard" else arguments
            with optional(f"what --track {tracker} would show"):
                accelerator.init_trackers(Path(sys.argv[0]).stem, config, options)
                trackers += accelerator.trackers
        accelerator.trackers = trackers

    def log(self, values, step, sent_before=False):
        """Sends `values` (numbers and strings) to every tracker.

        Args:
            sent_before (bool): the values were sent before an interruption. Then only TensorBoard,
                which has dropped them, gets them again.
        """
        self._for_each(
            lambda tracker: tracker.log(values, step=step),
            ("tensorboard",) if sent_before else None,
        )

    def log_images(self, images, step):
        """Sends images to the trackers that can show them: TensorBoard and Weights & Biases.

        Args:
            images (dict): name -> uint8 [1, height, width, 3].
        """
        layout = {"tensorboard": {"dataformats": "NHWC"}, "wandb": {}}
        self._for_each(
            lambda tracker: tracker.log_images(images, step=step, **layout[tracker.name]), layout
        )

    def finish(self, run):
        """Writes TensorBoard's table of hyperparameters, arguments and final metrics; ends all."""
        hparams = {
            name: value for name, value in run.identity.arguments.items() if value is not None
        }
        final = {
            f"final/{name}": value
            for name, value in run.results.items()
            if name.startswith(("test_", "val_"))
        }
        options = dict(run_name=".", global_step=run.results["global_step"])
        self._for_each(
            lambda tracker: tracker.tracker.add_hparams(hparams, final, **options), ("tensorboard",)
        )
        # Here, because `end_training` would raise the error of one that cannot write.
        self._for_each(lambda tracker: tracker.finish())
        self._accelerator.trackers = []

    def _for_each(self, function, names=None):
        """Calls `function(tracker)` for all trackers, or those of these names.

        One that fails costs a warning, and is not called again.
        """
        for tracker in list(self._accelerator.trackers):
            if names is None or tracker.name in names:
                self._accelerator.trackers.remove(tracker)
                with optional(f"what --track {tracker.name} would show from here on"):
                    function(tracker)
                    self._accelerator.trackers.append(tracker)


def start_profiler(accelerator, folder, enabled):
    """Profiles optimizer steps 3 to 5 on the main process.

    Writes `profile/trace.json` (open it at ui.perfetto.dev) and `profile/operators.txt` in
    `folder`.

    Returns:
        an object on which to call `step()` after each optimizer step, and `stop()` after the last.
    """
    if not enabled or not accelerator.is_main_process:
        return SimpleNamespace(step=lambda: None, stop=lambda: None)

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
