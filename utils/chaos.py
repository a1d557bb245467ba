"""Kills a training run again and again, at random times, and checks that it still ends with the same results.

    python utils/chaos.py --kills 50 -- accelerate launch --config_file accelerate_configs/2cpu.yaml \
        scripts/train_cifar.py --dataset synthetic --model net --batch_size 500 --max_train_steps 200 --checkpoint_every 10

First runs the command without interruption. Then runs it in another folder, kills it with SIGKILL after a random time (one
process, all processes, or only the launcher), and runs the same command again, until it finishes. Then compares the final
weights, byte for byte, and every logged metric. Repeats this until the number of kills is reached. To test your own script,
give its launch command without `--output_dir`.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil

CLOCK = {"samples_per_second", "step_seconds", "data_share", "memory_bytes", "seconds_left", "tokens_per_second", "mfu"}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="number of kills")
    parser.add_argument("--folder", default="runs/chaos", help="folder for the runs; deleted first")
    parser.add_argument("--seed", type=int, default=0, help="seed of the times, and of which processes are killed")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- followed by the launch")
    args = parser.parse_args()
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        parser.error("no command to launch: give it after --")
    folder, rng = Path(args.folder), random.Random(args.seed)
    if folder.exists() and not (folder / "chaos.log").exists():
        parser.error(f"{folder} exists and does not belong to an earlier chaos run: give another --folder")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)

    with (folder / "chaos.log").open("w") as log:
        start_time = time.monotonic()
        if launch(command, folder / "reference", log).wait() != 0:
            raise SystemExit(f"the command fails without being killed: see {folder}/chaos.log")
        seconds = time.monotonic() - start_time
        print(f"uninterrupted: {seconds:.0f} s", flush=True)
        kills, rounds, victims = 0, 0, {"one process": 0, "all processes": 0, "the launcher": 0}
        while kills < args.kills:
            rounds += 1
            run = folder / f"round_{rounds}"
            while True:
                start_time, launcher = time.monotonic(), launch(command, run, log)
                delay = rng.uniform(0.2, 1.1) * seconds if kills < args.kills else None
                try:
                    code = launcher.wait(delay)
                except subprocess.TimeoutExpired:
                    victim = rng.choice(list(victims))
                    if kill(launcher, victim, rng):
                        kills += 1
                        victims[victim] += 1
                    launcher.wait()
                    continue
                if code != 0:
                    raise SystemExit(f"round {rounds}: a relaunch failed without being killed: see {folder}/chaos.log")
                seconds = min(seconds, time.monotonic() - start_time)  # so that the next kill falls within a launch
                break
            difference = compare(folder / "reference", run)
            print(f"round {rounds}, {kills} kills so far: {difference or 'identical'}", flush=True)
            if difference:
                raise SystemExit(1)
            shutil.rmtree(run)
    counts = ", ".join(f"{victim} {count} times" for victim, count in victims.items() if count)
    print(f"{kills} kills ({counts}) in {rounds} run(s): each ended with the weights and metrics of the uninterrupted one")


def launch(command, output_dir, log):
    """Starts the command in a separate session."""
    full = [*command, "--output_dir", str(output_dir)]
    return subprocess.Popen(full, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


def kill(launcher, victim, rng):
    """Sends SIGKILL to `victim` of a launch; returns whether there was anything to kill."""
    try:
        parent = psutil.Process(launcher.pid)
        workers = [p for p in parent.children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
        if victim == "one process" and workers:
            rng.choice(workers).kill()
        else:
            for process in [parent, *workers] if victim == "all processes" else [parent]:
                process.kill()
        return True
    except psutil.NoSuchProcess:
        return False


def compare(reference, run):
    """Describes the difference between two finished runs; None if there is none."""
    if (reference / "model.safetensors").read_bytes() != (run / "model.safetensors").read_bytes():
        return "model.safetensors differs"
    if logged_metrics(reference) != logged_metrics(run):
        return "metrics.jsonl differs"
    return None


def logged_metrics(run):
    """The logged metrics, without those that depend on the time that steps take."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in CLOCK} for line in lines if line["split"] != "checkpoint"]


if __name__ == "__main__":
    sys.exit(main())
