"""Kills a training run at random times, again and again, and checks that its results are the same.

    python scripts/tools/chaos.py --kills 50 -- \\
        accelerate launch --config_file accelerate_configs/2cpu.yaml scripts/train_cifar.py \\
        --dataset synthetic --model net --batch_size 500 --max_train_steps 200 --checkpoint_every 10

First runs the command without interruption. Then runs it in another folder, kills it with SIGKILL
after a random time (one process, all processes, or only the launcher), and runs the same command
again, until it finishes. Then compares the final weights, byte for byte, and every metric.
Repeats this until the number of kills is reached. If none of these runs continued from a
checkpoint, nothing was tested, and this script fails: take more steps, or save more often.

To test your own script, give its launch command without `--output_dir`.
"""

import contextlib
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

# Finds `utils` and the training scripts next to this script (a copy) or above (the repository).
sys.path[1:1] = map(str, Path(__file__).resolve().parents[1:3])
import psutil

from utils.run import entry, process
from utils.run.arguments import Parser, number
from utils.run.failures import RunFailed, UserError
from utils.run.output import plural

# Metrics and results that depend on the time that steps take, or on where the last start was.
CLOCK = {
    "samples_per_second",
    "step_seconds",
    "data_share",
    "memory_bytes",
    "seconds_left",
    "tokens_per_second",
    "mfu",
    "slowest_behind",
    "slow_rank",
    "train_seconds",
    "peak_memory_bytes",
    "resumed_from",
    "peak_memory_bytes_per_stage",  # of train_model_parallel.py
}
VICTIMS = ("one process", "all processes", "the launcher")


def weight_files(folder):
    """The files with the final weights of a run, relative to its folder (Path), sorted."""
    parts = (folder, folder / "model", folder / "adapter")
    return [
        file.relative_to(folder) for part in parts for file in sorted(part.glob("*.safetensors"))
    ]


def main():
    args = parse_args()
    folder = Path(args.folder)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    kills, rounds, continued, rng = Counter(), 0, 0, random.Random()
    with (folder / "chaos.log").open("w") as log:
        reference = run_reference(args, log)
        print(f"uninterrupted: {sum(reference[:2]):.0f} s", flush=True)
        while kills.total() < args.kills:
            rounds += 1
            run = folder / f"round_{rounds}"
            run_with_kills(args, run, reference, kills, rng, log)
            difference = compare(folder / "reference", run)
            says = f"round {rounds}, {kills.total()} kills so far"
            print(f"{says}: {difference or 'identical'}", flush=True)
            if difference:
                raise SystemExit(1)
            step = json.loads((run / "results.json").read_text())["resumed_from"]
            continued += step > 0
            shutil.rmtree(run)
    if not continued:
        raise RunFailed(
            f"{kills.total()} kills, and no run continued from a checkpoint: give the command more "
            "steps or a smaller --checkpoint_every, or give more --kills"
        )
    counts = ", ".join(f"{victim}: {kills[victim]}" for victim in VICTIMS if kills[victim])
    print(
        f"{plural(rounds, 'run')}, killed {plural(kills.total(), 'time')} ({counts}), ended with "
        "the weights and metrics of an uninterrupted one; how many continued from a checkpoint: "
        f"{continued}"
    )


def run_reference(args, log):
    """Runs the command without interruption.

    Returns:
        tuple: seconds until the first line of its log, and from then to its end; number of lines.
    """
    reference, start_time = Path(args.folder) / "reference", time.monotonic()
    with launched(args.command, reference, log) as launcher:
        while launcher.poll() is None and log_lines(reference) < 1:
            time.sleep(0.02)
        first_line = time.monotonic()
        code = launcher.wait()
    if code != 0:
        raise RunFailed(f"the command fails without being killed: see {args.folder}/chaos.log")
    return first_line - start_time, time.monotonic() - first_line, log_lines(reference)


def log_lines(run):
    """The number of lines in the log of a run."""
    log = run / "metrics.jsonl"
    return log.read_bytes().count(b"\n") if log.exists() else 0


def run_with_kills(args, run, reference, kills, rng, log):
    """Launches the command again and again in the folder `run`, and kills it, until it finishes.

    A quarter of the kills come while it starts, the others when its log has reached a random line:
    the speed of a machine may change.

    Args:
        reference (tuple): what `run_reference` returned.
        kills (Counter): victim -> number of kills; counts those of this run.
    """
    start, training, lines = reference
    while True:
        delay, logged = None, log_lines(run)
        with launched(args.command, run, log) as launcher:
            if kills.total() < args.kills and rng.random() < 0.25:
                delay = rng.uniform(0.1, 1) * start
            elif kills.total() < args.kills and logged < lines:
                line = rng.randint(logged + 1, lines)
                while launcher.poll() is None and log_lines(run) < line:
                    time.sleep(0.02)
                delay = rng.random() * training / lines
            try:
                code = launcher.wait(delay)
            except subprocess.TimeoutExpired:
                victim = rng.choice(VICTIMS)
                kills[victim] += kill(launcher, victim, rng)
                launcher.wait()
                continue
        if code != 0:
            raise RunFailed(
                f"{run.name}: a relaunch failed without being killed: see {args.folder}/chaos.log"
            )
        return


@contextlib.contextmanager
def launched(command, output_dir, log):
    """Starts the command in a separate session.

    It does not outlive the block if this script is interrupted.
    """
    words = [*command, "--output_dir", str(output_dir)]
    pipes = dict(stdout=log, stderr=subprocess.STDOUT)
    try:
        launcher = subprocess.Popen(words, start_new_session=True, **pipes)
    except OSError as error:
        raise UserError(f"cannot start {command[0]}: {error.strerror}") from None
    try:
        yield launcher
    finally:
        if launcher.poll() is None:
            kill(launcher, "all processes", None)
            launcher.wait()


def kill(launcher, victim, rng):
    """Sends SIGKILL to `victim` of a launch; returns whether there was anything to kill."""
    try:
        parent = psutil.Process(launcher.pid)
        workers = [p for p in parent.children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
        victims = [parent]
        if victim == "one process" and workers:
            victims = [rng.choice(workers)]
        elif victim == "all processes":
            victims = [parent, *workers]
        for process in victims:
            process.kill()
        return True
    except psutil.NoSuchProcess:
        return False


def compare(reference, run):
    """Describes the difference between two finished runs; None if there is none."""
    names = weight_files(reference)
    if not names or names != weight_files(run):
        return "the weights are in other files"
    for name in names:
        if (reference / name).read_bytes() != (run / name).read_bytes():
            return f"{name} differs"
    for name in ("metrics.jsonl", "results.json"):
        if figures(reference / name) != figures(run / name):
            return f"{name} differs"
    return None


def figures(path):
    """The lines of a JSON file, without what depends on times, or on the last start."""
    text = path.read_text()
    lines = [json.loads(text)] if path.suffix == ".json" else map(json.loads, text.splitlines())
    lines = [line for line in lines if line.get("split") != "checkpoint"]
    return [{name: line[name] for name in line.keys() - CLOCK} for line in lines]


def parse_args():
    parser = Parser(description=__doc__.split("\n")[0])
    kills = number(int, 1, most=100_000)  # each takes seconds
    parser.add_argument("--kills", type=kills, default=50, help="number of kills")
    parser.add_argument("--folder", default="runs/chaos", help="for the runs; emptied first")
    parser.add_argument("command", nargs="...", type=str, help="-- followed by the launch command")
    args = parser.parse_args()
    if args.command[:1] == ["--"]:
        args.command = args.command[1:]
    if not args.command:
        raise UserError("no command to launch: give it after --")
    folder = Path(args.folder)
    if folder.exists() and not (folder / "chaos.log").exists():
        raise UserError(
            f"{folder} exists and does not belong to an earlier chaos run: give another --folder"
        )
    return args


if __name__ == "__main__":
    # As an exception, which also ends the processes that it has launched.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(process.PREEMPTED))
    entry.run(main)
