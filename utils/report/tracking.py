"""Starts Accelerate's experiment trackers, and sends each record to each of them only once."""

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

from utils.run.failures import UserError, optional


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
            raise UserError(
                f"--track {name}: unknown tracker; use none, or one or more of {known}, separated "
                "by commas"
            )
        if name not in installed:
            raise UserError(
                f"--track {name}: its package is not installed: pip install {name}, or use "
                "another --track"
            )
    return wanted


def start(accelerator, project, name, run_id, arguments, step):
    """Starts the trackers, or continues their runs, with what each of them needs.

    Args:
        project (str): name of the project, which groups the runs of one script.
        name (str): name of this run.
        run_id (str): id of the run, the same after a restart.
        arguments (dict): name -> number, string or None, recorded as the configuration of the run.
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
    with optional("experiment tracking"):
        accelerator.init_trackers(project, init_kwargs=options)

    def record_arguments(tracker):
        if tracker.name == "tensorboard":
            # At the next step, so that a later restart purges it. TensorBoard's own table of
            # hyperparameters needs the final metrics: see `finish`.
            text = "\n".join(f"    {flag} {value}" for flag, value in arguments.items())
            tracker.log({"arguments": text}, step=step + 1)
        else:
            tracker.store_init_configuration(arguments)

    _for_each(accelerator, record_arguments)


def log(accelerator, values, step, sent_before=False):
    """Sends `values` (numbers and strings) to every tracker.

    Args:
        sent_before (bool): the values were sent before an interruption. Then only TensorBoard,
            which has dropped them, gets them again.
    """

    def send(tracker):
        if tracker.name == "tensorboard" or not sent_before:
            tracker.log(values, step=step)

    _for_each(accelerator, send)


def log_images(accelerator, images, step):
    """Sends images to the trackers that can show them: TensorBoard and Weights & Biases.

    Args:
        images (dict): name -> uint8 [1, height, width, 3].
    """

    def send(tracker):
        if tracker.name == "tensorboard":
            tracker.log_images(images, step=step, dataformats="NHWC")
        elif tracker.name == "wandb":
            tracker.log_images(images, step=step)

    _for_each(accelerator, send)


def finish(accelerator, arguments, metrics):
    """Writes TensorBoard's table of hyperparameters: arguments and final metrics."""
    final = {
        f"final/{name}": value
        for name, value in metrics.items()
        if name.startswith(("test_", "val_"))
    }

    def record_hyperparameters(tracker):
        if tracker.name == "tensorboard":
            hyperparameters = {
                name: value for name, value in arguments.items() if value is not None
            }
            tracker.tracker.add_hparams(hyperparameters, final, run_name=".")

    _for_each(accelerator, record_hyperparameters)


def _for_each(accelerator, function):
    """Calls `function(tracker)`; one that fails costs a warning, and is not called again."""
    failed = list(accelerator.trackers)
    for tracker in accelerator.trackers:
        with optional(f"what --track {tracker.name} would show from here on"):
            function(tracker)
            failed.remove(tracker)
    accelerator.trackers = [tracker for tracker in accelerator.trackers if tracker not in failed]
