"""Flags that several training scripts share, beyond those of every run.

`parser` is a `Parser`, and `group` a group of its flags.
"""

from pathlib import Path

from utils.compilation import MODES
from utils.run.arguments import Parser, number
from utils.run.failures import UserError
from utils.schedule import schedule

WORKERS = number(int, 0, most=256)  # more than a machine has cores
# The flags that may change when a run continues. They do not change results (gradient accumulation:
# up to rounding, and to the masks of dropout). `eval_samples` may not: scores of different samples
# cannot be compared.
MAY_CHANGE = {
    "wait_for_checkpoints",
    "patience",
    "num_workers",
    "profile",
    "track",
    "compile",
    "gradient_accumulation_steps",
}
# Each flag that `add` knows, as the options of `add_argument`.
FLAGS = {
    "weight_decay": dict(type=number(float, 0, most=100), help="weight decay of the optimizer"),
    "max_grad_norm": dict(
        type=number(float, 0), default=0.0, help="clip gradients to this norm; 0: do not clip"
    ),
    "gradient_accumulation_steps": dict(
        type=number(int, 1, most=10_000), default=1, help="micro-batches per optimizer step"
    ),
    "lr_schedule": dict(
        type=schedule,
        metavar="NAME[:LOWEST]",
        help="after warm-up: cosine, linear, constant, or wsd (constant, then linear over the "
        "last fifth); cosine:0.1 falls to a tenth of --lr instead of 0",
    ),
    "compile": dict(
        nargs="?",
        const="default",
        choices=MODES,
        metavar="MODE",
        help="torch.compile the model, in this mode (or never); reduce-overhead records CUDA "
        "graphs, for steps that wait for the host; default: never, except train_gpt.py on GPUs",
    ),
    "wait_for_checkpoints": dict(
        action="store_true",
        help="wait until each checkpoint is on disk, instead of writing a copy of the state in "
        "the background; saves the memory of the copy",
    ),
    "track": dict(
        default="tensorboard",
        help="experiment trackers of Accelerate, separated by commas (wandb, mlflow, ...), or none",
    ),
    "profile": dict(
        action="store_true",
        help="write a torch.profiler trace of three steps to output_dir/profile",
    ),
    "init_from": dict(
        metavar="PATH",
        help="start a new run with the weights, and only the weights, of a run's folder, a "
        "checkpoint or a file of the same model",
    ),
    "eval_samples": dict(
        type=number(int, 0),
        help="held-out samples per evaluation, the same each time (0: all; default: as many as "
        "cost about 10 %% of the training together, and up to 20 %% for the last evaluation)",
    ),
    "patience": dict(
        type=number(int, 1),
        help="end the run after this many evaluations without a better score",
    ),
    "num_workers": dict(type=WORKERS, default=0, help="data loader workers of each process"),
    # Of scripts that train on labeled images.
    "val_fraction": dict(
        type=number(float, 0, below=1),
        help="share of each class to hold out of the training images, if there is no val split; "
        "default: 0.1 if there is no test split either, else 0",
    ),
    "columns": dict(
        nargs=2,
        metavar=("IMAGE", "LABEL"),
        help="the columns of a table with the images and the classes; found automatically if only "
        "one of each qualifies",
    ),
}
OPTIMIZER = ("weight_decay", "max_grad_norm", "gradient_accumulation_steps")
EXTRAS = ("wait_for_checkpoints", "track", "profile")


def add(group, *names, **defaults):
    """Adds flags of `FLAGS`; `defaults` has other defaults for some of them."""
    for name in names:
        options = FLAGS[name] | ({"default": defaults[name]} if name in defaults else {})
        group.add_argument(f"--{name}", **options)


def choice(parser, flag):
    """The value of `--flag`, read before the full parse: other defaults depend on it."""
    return given(flag) or parser.get_default(flag)


def given(flag):
    """What the command line says of `--flag`, as text; None: nothing."""
    parser = Parser(add_help=False)
    parser.add_argument(f"--{flag}", nargs="?")
    return getattr(parser.parse_known_args()[0], flag)


def parse_with_checks(parser):
    """Parses the command line, with `--dry_run` and `--overfit_batch`, which change the arguments.

    Both write to a folder of their own next to that of the run, which is emptied each time.

    Returns:
        Arguments: not frozen yet.
    """
    checks = parser.add_argument_group("quick checks (in a separate folder next to output_dir)")
    checks.add_argument(
        "--dry_run",
        action="store_true",
        help="train two steps, with evaluation and checkpoints, then stop",
    )
    checks.add_argument(
        "--overfit_batch",
        action="store_true",
        help="train on one batch until the loss is about 0: can the model learn at all?",
    )
    args = parser.parse_args()
    if getattr(args, "init_from", None) and args.resume not in ("auto", "never"):
        raise UserError(
            "--init_from starts a new run and --resume PATH continues one: give only one of them"
        )
    if getattr(args, "patience", None) and args.checkpoint_every == 0:
        raise UserError(
            "--patience ends a run by an evaluation, which follows a checkpoint: leave out "
            "--checkpoint_every 0"
        )
    if args.dry_run or args.overfit_batch:
        args.patience = None
    folder = Path(args.output_dir)
    folder = folder if folder.name not in ("", "..") else folder.resolve()
    if args.dry_run:
        args.output_dir = f"{folder}_dry_run"
        args.max_train_steps = 2
        args.eval_every = args.checkpoint_every = args.log_every = 1
    elif args.overfit_batch:
        args.output_dir = f"{folder}_overfit_batch"
        args.max_train_steps = args.max_train_steps or 200
        # By default an epoch, which is one step.
        args.checkpoint_every = args.checkpoint_every or 0
        args.eval_every = args.eval_every or args.max_train_steps
    return args
