"""Experiment trackers: which of Accelerate's to use, and records that reach each of them once."""

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

from utils.exits import UserError


def trackers(names):
    """Checks the value of `--track`.

    Args:
        names (str): comma-separated names of Accelerate's trackers, or `none`.

    Returns:
        list[str]: for `Accelerator(log_with=...)`.

    Raises:
        UserError: a name is unknown, or its package is not installed.
    """
    if names == "none":
        return []
    wanted = [name.strip() for name in names.split(",")]
    installed = [str(name) for name in get_available_trackers()]
    for name in wanted:
        if name not in LOGGER_TYPE_TO_CLASS:
            known = ", ".join(sorted(LOGGER_TYPE_TO_CLASS))
            raise UserError(f"--track {name}: unknown tracker; use none, or one or more of {known}, separated by commas")
        if name not in installed:
            raise UserError(f"--track {name}: its package is not installed: pip install {name}, or use another --track")
    return wanted


def start(accelerator, project, name, run_id, arguments, step):
    """Starts the trackers, or continues their runs: `accelerator.init_trackers` with what each of them needs.

    Args:
        project (str): groups the runs of one script.
        name (str): of this run.
        run_id (str): stays the same when the run is continued.
        arguments (dict): plain values, recorded as the configuration of the run.
        step (int): optimizer steps done. TensorBoard drops what was logged after it.
    """
    options = {
        "tensorboard": {"purge_step": step + 1},
        "wandb": {"name": name, "id": run_id, "resume": "allow"},
        "trackio": {"name": name, "resume": "allow"},
        "mlflow": {"run_name": name},
        "swanlab": {"experiment_name": name, "id": run_id, "resume": "allow"},
        "clearml": {"task_name": name},
        "aim": {"experiment": name},
    }
    accelerator.init_trackers(project, init_kwargs=options)
    for tracker in accelerator.trackers:
        if tracker.name == "tensorboard":
            # At the first step to come, so that a later restart purges it. TensorBoard's own table of hyperparameters
            # wants the final metrics as well: see `finish`.
            text = "\n".join(f"    {flag} {value}" for flag, value in arguments.items())
            tracker.log({"arguments": text}, step=step + 1)
        else:
            tracker.store_init_configuration(arguments)


def log(accelerator, values, step, sent_before=False):
    """Sends `values` (numbers and strings) to every tracker.

    Args:
        sent_before (bool): they were sent before an interruption, so that only TensorBoard, which has dropped them,
            gets them again.
    """
    for tracker in accelerator.trackers:
        if tracker.name == "tensorboard" or not sent_before:
            tracker.log(values, step=step)


def log_images(accelerator, images, step):
    """Sends pictures to the trackers that show them: TensorBoard and Weights & Biases.

    Args:
        images (dict): name -> uint8 [1, height, width, 3].
    """
    for tracker in accelerator.trackers:
        if tracker.name == "tensorboard":
            tracker.log_images(images, step=step, dataformats="NHWC")
        elif tracker.name == "wandb":
            tracker.log_images(images, step=step)


def finish(accelerator, arguments, metrics):
    """Writes TensorBoard's table of hyperparameters, with the final `metrics` beside the arguments."""
    for tracker in accelerator.trackers:
        if tracker.name == "tensorboard":
            given = {name: value for name, value in arguments.items() if value is not None}
            tracker.tracker.add_hparams(given, metrics, run_name=".")
