"""Command-line flags that the training scripts share."""

import argparse
import sys
from pathlib import Path

from utils.run.argument_files import expand
from utils.run.domains import number, text
from utils.run.failures import UserError
from utils.run.process import is_main
from utils.schedule import schedule

# The rule for continuing a run: printed by --help and by the error message, and quoted in the
# README.
CONTINUE_RULE = (
    "To continue a run, keep its arguments. You may change --epochs, --max_train_steps, and the "
    "options for output, logging, checkpoints, workers, compilation, determinism and gradient "
    "accumulation."
)
FILES = (
    "An argument @FILE stands for the arguments in a file: one flag and its value per line, later "
    "ones win, # begins a comment."
)
# The options that may change, of all scripts. They do not change results (gradient accumulation: up
# to rounding, and to the masks of dropout). `eval_samples` may not: scores of other samples cannot
# be compared.
MAY_CHANGE = {
    "output_dir",
    "resume",
    "checkpoint_every",
    "keep_checkpoints",
    "wait_for_checkpoints",
    "log_every",
    "eval_every",
    "patience",
    "num_workers",
    "profile",
    "timeout",
    "track",
    "compile",
    "nondeterministic",
    "gradient_accumulation_steps",
    "push_to_hub",
}


# Of torch.compile. They choose among kernels that compute the same, up to rounding.
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "never")
SEED = number(int, 0, most=2**32 - 1)  # what NumPy takes
WORKERS = number(int, 0, most=256)  # more than a machine has cores
BATCH = number(int, 1, most=2**20)  # more than fits into memory, or into most data sets
SECONDS = number(int, 1, most=30 * 24 * 3600)  # more than a job may take; libraries overflow later


class Parser(argparse.ArgumentParser):
    """An ArgumentParser for processes that all parse the same command line.

    Prints --help, with defaults, on the main process only, and raises `UserError` for mistakes. A
    flag without a type takes `domains.text`; give `type=str` for one that takes any text.
    """

    def __init__(self, **kwargs):
        super().__init__(allow_abbrev=False, formatter_class=_HelpFormatter, **kwargs)
        self.register("type", None, text)

    def print_help(self, file=None):
        if is_main():
            super().print_help(file)

    def error(self, message):
        raise UserError(f"{message} (see --help)")

    def choice(self, flag):
        """The value of `--flag`, read before the full parse: other defaults depend on it."""
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        parser.add_argument(f"--{flag}", default=self.get_default(flag), nargs="?")
        words = expand(sys.argv[1:], self._option_string_actions)
        return getattr(parser.parse_known_args(words)[0], flag)

    def parse_known_args(self, args=None, namespace=None):
        """As in argparse, which `parse_args` calls; `@FILE` is replaced by what is in the file."""
        words = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args(expand(words, self._option_string_actions), namespace)

    def add_training_arguments(self, group, **defaults):
        """Adds the flags of every training loop; `defaults` are their defaults."""
        at_least_1 = number(int, 1)
        group.add_argument("--epochs", type=at_least_1, help="passes over the training set")
        group.add_argument(
            "--max_train_steps", type=at_least_1, help="optimizer steps; overrides --epochs"
        )
        group.add_argument(
            "--batch_size", type=BATCH, help="samples per optimizer step over all processes"
        )
        group.add_argument("--lr", type=number(float, 0, most=1000), help="peak learning rate")
        self.set_defaults(**defaults)

    def add_optimizer_arguments(self, group, **defaults):
        """Adds the flags for gradient accumulation, weight decay and clipping, with `defaults`."""
        group.add_argument(
            "--weight_decay", type=number(float, 0, most=100), help="weight decay of the optimizer"
        )
        group.add_argument(
            "--max_grad_norm",
            type=number(float, 0),
            default=0.0,
            help="clip gradients to this norm; 0: do not clip",
        )
        group.add_argument(
            "--gradient_accumulation_steps",
            type=number(int, 1, most=10_000),
            default=1,
            help="micro-batches per optimizer step",
        )
        self.set_defaults(**defaults)

    def add_schedule_argument(self, group, default):
        """Adds `--lr_schedule`, with this default."""
        group.add_argument(
            "--lr_schedule",
            type=schedule,
            default=default,
            metavar="NAME[:LOWEST]",
            help="after warm-up: cosine, linear, constant, or wsd (constant, then linear over the "
            "last fifth); cosine:0.1 falls to a tenth of --lr instead of 0",
        )

    def add_compile_argument(self, group, default):
        """Adds `--compile`; `default` (str) says what happens without it."""
        group.add_argument(
            "--compile",
            nargs="?",
            const="default",
            choices=COMPILE_MODES,
            metavar="MODE",
            help="torch.compile the model, in this mode; reduce-overhead records CUDA graphs, for "
            f"steps that wait for the host; without the flag: {default}",
        )

    def add_run_arguments(self, leave_out=()):
        """Adds the flags for the run, the same in every training script.

        A copy writes to a folder named after itself.

        Args:
            leave_out: of `init_from`, `patience`, `push_to_hub` and `eval_samples`, flags that a
                script lacks.
        """
        output_dir = f"runs/{Path(sys.argv[0]).stem}"
        self.epilog = f"{FILES} {CONTINUE_RULE}"
        at_least_0, at_least_1 = number(int, 0), number(int, 1)
        group = self.add_argument_group("run")
        group.add_argument(
            "--output_dir", default=output_dir, help="folder for everything that the run writes"
        )
        group.add_argument(
            "--resume",
            default="auto",
            metavar="auto|never|PATH",
            help="auto: continue the run in output_dir if there is one; never: stop with an "
            "error if there is one; "
            "PATH: continue from a checkpoint of another run, and write to output_dir",
        )
        if "init_from" not in leave_out:
            group.add_argument(
                "--init_from",
                metavar="PATH",
                help="start a new run with the weights, and only the weights, of a run's folder, "
                "a checkpoint, a .safetensors or a .pth file",
            )
        group.add_argument(
            "--checkpoint_every",
            type=at_least_0,
            help="optimizer steps between checkpoints; 0: only at the end and on preemption",
        )
        group.add_argument(
            "--keep_checkpoints",
            type=at_least_1,
            default=2,
            help="newest checkpoints to keep, besides the highest-scoring one",
        )
        group.add_argument(
            "--wait_for_checkpoints",
            action="store_true",
            help="wait until each checkpoint is on disk, instead of writing a copy of the state in "
            "the background; saves the memory of the copy",
        )
        if "push_to_hub" not in leave_out:
            group.add_argument(
                "--push_to_hub",
                metavar="REPO",
                help="upload the finished run to this model repository of the Hub",
            )
        group.add_argument(
            "--eval_every", type=at_least_1, help="optimizer steps between evaluations"
        )
        if "eval_samples" not in leave_out:
            group.add_argument(
                "--eval_samples",
                type=at_least_0,
                help="held-out samples that an evaluation takes, always the same; 0: all; default: "
                "so many that evaluations cost about 10 %% of the training. The last one takes all",
            )
        if "patience" not in leave_out:
            group.add_argument(
                "--patience",
                type=at_least_1,
                help="end the run after this many evaluations without a better score",
            )
        group.add_argument("--log_every", type=at_least_1, help="optimizer steps between log lines")
        group.add_argument(
            "--seed", type=SEED, default=0, help="seed of weights, order and augmentation"
        )
        group.add_argument(
            "--nondeterministic",
            action="store_true",
            help="on GPUs, use the fastest algorithms: the same samples, but not the same bytes "
            "after a restart",
        )
        group.add_argument(
            "--timeout",
            type=SECONDS,
            default=600,
            help="seconds to wait for another process before giving up",
        )

    def add_data_arguments(self, dataset, data_help, leave_out=(), several=False):
        """Adds the flags of every script that trains on a data set.

        Args:
            dataset (str | None): the default of `--dataset`; None: it must be given.
            data_help (str): what `--dataset` takes.
            leave_out: `num_workers`, if a script lacks it.
            several (bool): whether `--dataset` takes several, which `args` has as a list.
        """
        group = self.add_argument_group("data and tracking")
        options = dict(default=dataset, required=dataset is None, help=data_help)
        options |= dict(default=[dataset], nargs="+") if several else {}
        group.add_argument("--dataset", **options)
        if "num_workers" not in leave_out:
            group.add_argument(
                "--num_workers",
                type=WORKERS,
                default=0,
                help="processes that load data, per training process",
            )
        group.add_argument(
            "--track",
            default="tensorboard",
            help="experiment trackers of Accelerate, separated by commas (wandb, mlflow, ...), "
            "or none",
        )
        group.add_argument(
            "--profile",
            action="store_true",
            help="write a torch.profiler trace of three steps to output_dir/profile",
        )
        group = self.add_argument_group("quick checks (in a separate folder next to output_dir)")
        group.add_argument(
            "--dry_run",
            action="store_true",
            help="train two steps, with evaluation and checkpoints, then stop",
        )
        group.add_argument(
            "--overfit_batch",
            action="store_true",
            help="train on one batch until the loss is about 0: can the model learn at all?",
        )

    def add_image_arguments(self, val_fraction):
        """Adds the flags of every script that trains on labeled images.

        Args:
            val_fraction (float | None): the default of `--val_fraction`; None: as for
                `sources.find_images`.
        """
        group = self.add_argument_group("data set")
        group.add_argument(
            "--val_fraction",
            type=number(float, 0, below=1, least=1e-6),
            default=val_fraction,
            help="share of each class to hold out of the training images, if there is no val split"
            + "; default: 0.1 if there is no test split either, else 0" * (val_fraction is None),
        )
        group.add_argument(
            "--columns",
            nargs=2,
            metavar=("IMAGE", "LABEL"),
            help="the columns of a table with the images and the classes; default: the only ones",
        )
        return group

    def parse_training_args(self):
        """Parses the command line, and changes the arguments for `--dry_run` and `--overfit_batch`.

        Both write to a folder of their own next to that of the run, which is emptied each time.
        """
        args = self.parse_args()
        if hasattr(args, "columns"):
            args.image_column, args.label_column = args.columns or (None, None)
            del args.columns  # a run records the two
        if getattr(args, "init_from", None) and args.resume not in ("auto", "never"):
            raise UserError(
                "--init_from starts a new run and --resume PATH continues one: give only one of "
                "them"
            )
        if args.dry_run or args.overfit_batch:
            args.push_to_hub = args.patience = None
        if args.dry_run:
            args.output_dir = f"{_folder(args.output_dir)}_dry_run"
            args.max_train_steps, args.eval_every, args.checkpoint_every, args.log_every = (
                2,
                1,
                1,
                1,
            )
        elif args.overfit_batch:
            args.output_dir = f"{_folder(args.output_dir)}_overfit_batch"
            args.max_train_steps = args.max_train_steps or 200
            # By default an epoch, which is one step.
            args.checkpoint_every = args.checkpoint_every or 0
            args.eval_every = args.eval_every or args.max_train_steps
        return args


def _folder(name):
    """The name of a folder to which a suffix can be added; of `.` and such, the whole path."""
    path = Path(name)
    return path if path.name not in ("", "..") else path.resolve()


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows a default unless it is None or False."""

    def _get_help_string(self, action):
        if action.default is None and action.dest in ("checkpoint_every", "eval_every"):
            best = ", and at each new highest score" * (action.dest == "checkpoint_every")
            return f"{action.help} (default: an epoch{best})"
        if action.default is None and action.dest == "log_every":
            return f"{action.help} (default: 10, fewer in runs of less than 200 steps)"
        if action.default is None or action.default is False:
            return action.help
        if isinstance(action.default, list):
            return f"{action.help} (default: {' '.join(action.default)})"
        return super()._get_help_string(action)
