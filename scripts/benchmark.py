"""Measures the speeds that this collection claims, as ratios in one run on one machine.

    python scripts/benchmark.py --quick                        # all that need no data, a few minutes
    python scripts/benchmark.py loop_overhead startup_ratio    # some of them
    python scripts/benchmark.py --text input.txt --images cifar10    # all, with the data that two of them need

Each benchmark runs both sides in turn, `--rounds` times, each time in new processes, and gives the median of the rounds with
their range. It writes `benchmark.json`, `benchmark.md` and `benchmark.png` to `--output_dir`.

    loop_overhead       a step of train_cifar.py (--model net, default model, two processes) and of train_gpt.py over a plain
                        PyTorch (DDP) loop with the same model, batches, optimizer and schedule
    tutorial_speedup    samples per second of train_cifar.py over the loop of the usual tutorial with the same network:
                        per-sample transforms in two workers, float32, loss.item() in every step; and what gives how much
    pipeline_speedup    images per second of the batched augmentation over per-sample transforms in two workers
    picture_loading     images per second of train_images.py, without and with --cache, over the usual ImageFolder and
                        transforms: 500 x 375 JPEGs, two workers each, to normalized batches of random 224 x 224 crops
    scaling_efficiency  two DDP processes with one thread each over two independent runs side by side
    startup_ratio       time from `accelerate launch` to the first step over a five-line script for Accelerate
    time_to_accuracy    training time of train_cifar.py --tta on CIFAR-10 (--images), with another seed in each round, over that
                        of the recipe of airbench94_muon: the same network, 8 epochs of 50,000 images at full size; /flops: the
                        same of floating-point operations; /accuracy: what train_cifar.py reaches
    checkpoint_share    part of the time that checkpoints of a state of 450 MB block train_gpt.py at its default cadence
    machine_limit       what the machine can do: operations per second of a matrix product, bytes per second that a copy reads
                        and writes; and the share of the former that a step of train_cifar.py, with its three image sizes, and
                        of train_gpt.py reach, optimizer included (in bf16 where the CPU has it; the GPT in float32)
    memory              peak memory of train_cifar.py over that of a plain loop which holds the same data
    gpt                 on tinyshakespeare (--text), in nanoGPT's CPU setting, ours in bf16 where the CPU has it:
    gpt_time            time of train_gpt.py to the validation loss that nanoGPT reports after 2,000 steps (1.88), over the time
                        of 2,000 such steps in PyTorch's own layers
    gpt_at_equal_time   validation loss of train_gpt.py after that time
    gpt_loss, gpt_step  validation loss of train_gpt.py after 2,000 steps, and the milliseconds of a step

Copy it together with `baselines.py`, `train_cifar.py` and `train_gpt.py`.
"""

import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

# Finds `utils` next to this script (a copy) or one folder up (the repository).
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
from utils import exits

if __name__ == "__main__":
    exits.install()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(exits.PREEMPTED))  # an exception: subprocess.run then kills its process

import numpy as np
import train_cifar
from baselines import COPIED, GPT, GPT_BATCH, MATRIX, RECORD_BATCH, RECORD_EPOCHS, PerSample, cifar_flops, gpt_flops
from PIL import Image
from torch.utils.data import DataLoader

from utils import plots, topology
from utils.arguments import Parser, number
from utils.augment import augment, normalize
from utils.exits import UserError
from utils.files import read_json_lines, write_json, write_text
from utils.image_data import BatchedImages, as_is, synthetic_images
from utils.run_folder import versions

HERE = Path(__file__).resolve().parent
NANOGPT_LOSS = 1.88  # github.com/karpathy/nanoGPT, README: validation loss of the CPU setting after 2,000 steps


# ------------------------------------------------------------------------------------------------------ measuring


def measure_loop(name, processes=1, **options):
    """Runs one of the loops of baselines.py in new processes.

    Returns:
        tuple[list, int]: seconds of each step, peak memory of the first process in bytes.
    """
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(processes)] if processes > 1 else []
    command = [sys.executable, *launcher, str(HERE / "baselines.py"), name, "--options", json.dumps(options)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment())
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    return answer["seconds"], answer["memory"]


def measure_script(script, arguments, processes=1, bf16=False):
    """Runs a training script in new processes.

    Returns:
        tuple[list, dict]: the lines of metrics.jsonl, results.json.
    """
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(processes)] if processes > 1 else []
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *launcher, str(HERE / script), *arguments.split(), "--output_dir", folder]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment(bf16))
        lines = read_json_lines(Path(folder) / "metrics.jsonl")
        return lines, json.loads((Path(folder) / "results.json").read_text())


def environment(bf16=False):
    """The environment of a measured process: no settings of a launcher around this script."""
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS")}
    # Also without bf16: this variable marks a launched process, which ends when the one that started it does.
    return kept | {"ACCELERATE_MIXED_PRECISION": "bf16" if bf16 else "no"}


def steady(seconds):
    """Seconds of a step: the 10th percentile, because other programs on the machine can only make a step slower."""
    return statistics.quantiles(seconds, n=10, method="inclusive")[0]


def logged_steps(lines, warm_up):
    """Seconds per step from the log lines after `warm_up` steps."""
    return [line["step_seconds"] for line in lines if line["split"] == "train" and line["step"] > warm_up]


def each_round(args):
    """Yields the number of each round, and prints which one begins, because some take a quarter of an hour."""
    for index in range(args.rounds):
        print(f"    round {index + 1} of {args.rounds}", flush=True)
        yield index


# ----------------------------------------------------------------------------------------------------- the benchmarks
# Each takes the arguments, and returns name -> (one value per round, unit).


def loop_overhead(args):
    few, many = (24, 200) if args.quick else (60, 500)
    values = {}
    for name, processes, steps, arguments, plain in (
        ("net", 1, many, "train_cifar.py --model net --batch_size 96", dict(model="net", batch_size=96)),
        ("default", 1, few, "train_cifar.py --batch_size 96", dict(model="fastnet", batch_size=96)),
        ("two_processes", 2, many, "train_cifar.py --model net --batch_size 96", dict(model="net", batch_size=96)),
        ("gpt", 1, many, f"train_gpt.py {gpt_arguments()} --num_workers 0", None),
    ):
        script, _, arguments = arguments.partition(" ")
        arguments += f" --dataset synthetic --max_train_steps {steps} --eval_every {steps} --checkpoint_every 0"
        every = 2 if steps == few else 10  # 10: the default; beside a long step a log line costs nothing
        arguments += f" --log_every {every}"
        milliseconds, ratios = [], []
        for _ in each_round(args):
            if plain:
                seconds, _ = measure_loop("plain_cifar", processes, steps=steps, **plain)
            else:
                seconds, _ = measure_loop("plain_gpt", steps=steps)
            lines, _ = measure_script(script, arguments, processes)
            seconds = [statistics.mean(seconds[i : i + every]) for i in range(steps // 5, steps, every)]  # as in log lines
            ours, theirs = steady(logged_steps(lines, steps // 5)), steady(seconds)
            milliseconds.append(1e3 * (ours - theirs))
            ratios.append(ours / theirs)
        if theirs >= 0.02:
            values[f"loop_overhead/{name}"] = ratios, "time per step over a plain PyTorch loop (less is better), ratio"
        else:
            values[f"loop_overhead/{name}"] = milliseconds, "ms per step above a plain PyTorch loop (less is better)"
    return values


def tutorial_speedup(args):
    steps, batch = (6, 240) if args.quick else (10, 480)
    bf16 = topology.cpu_has_bf16()
    options = dict(steps=steps, batch_size=batch)
    stages = {"batched": dict(batched=True), "channels_last": dict(channels_last=True)}
    stages |= {"bf16": dict(bf16=True)} if bf16 else {}
    stages |= {"small_images_first": dict(sizes=(24, 24, 24, 28, 32))}
    names = ["tutorial", *stages, "train_cifar.py"]
    speeds = {name: [] for name in names}
    for _ in each_round(args):
        done = {}
        for name in names[:-1]:
            done |= stages.get(name, {})
            seconds, _ = measure_loop("tutorial", **options, **done)
            speeds[name].append(batch * (steps - 1) / sum(seconds[1:]))
        arguments = f"--dataset synthetic --batch_size {batch} --max_train_steps {steps} --eval_every {steps} --log_every 1"
        lines, _ = measure_script("train_cifar.py", f"{arguments} --checkpoint_every 0", bf16=bf16)
        speeds["train_cifar.py"].append(batch * (steps - 1) / sum(logged_steps(lines, 1)))
    for name in names:
        print(f"    {name:20} {statistics.median(speeds[name]):8,.0f} samples/s")
    unit = "samples per second over the usual tutorial (more is better), ratio"
    return {"tutorial_speedup": (ratios_of(speeds["train_cifar.py"], speeds["tutorial"]), unit)}


def pipeline_speedup(args):
    images, batch = (5_000 if args.quick else 20_000), 1000
    data = synthetic_images(0, train=images, test=0).train
    mean, std = data.mean_and_std()
    per_sample, batched = PerSample(data, cutout=True), BatchedImages(data)

    def usual():
        for _ in DataLoader(per_sample, batch, shuffle=True, num_workers=2):
            pass

    def ours():
        for loaded in DataLoader(batched, batch, shuffle=True, collate_fn=as_is):
            kept = augment(loaded["images"], loaded["ids"], 0, 0, padding=4, cutout=8)
            normalize(kept[0], mean, std, kept[1])

    topology.keep_freed_memory()  # as all training scripts do; for both sides
    speeds = {usual: [], ours: []}
    for _ in each_round(args):
        for load, values in speeds.items():
            start_time = time.perf_counter()
            load()
            values.append(images / (time.perf_counter() - start_time))
    for load, values in speeds.items():
        print(f"    {load.__name__:20} {statistics.median(values):8,.0f} images/s")
    unit = "images per second over per-sample transforms (more is better), ratio"
    return {"pipeline_speedup": (ratios_of(speeds[ours], speeds[usual]), unit)}


def picture_loading(args):
    speeds, passes = {"usual_pictures": [], "our_pictures": [], "cached_pictures": []}, 4
    with tempfile.TemporaryDirectory() as folder:
        for split, count in (("val", 2), ("train", 160 if args.quick else 960)):
            make_photos(Path(folder) / "photos" / split, count)
        for _ in each_round(args):
            for name, values in speeds.items():
                seconds, _ = measure_loop(name, folder=folder, steps=passes)
                values.append(count * (passes - 1) / sum(seconds[1:]))  # the first pass starts the workers
    for name, values in speeds.items():
        print(f"    {name:20} {statistics.median(values):8,.0f} images/s")
    unit, usual = "images per second over ImageFolder (more is better), ratio", speeds.pop("usual_pictures")
    return {f"picture_loading/{name.partition('_')[0]}": (ratios_of(ours, usual), unit) for name, ours in speeds.items()}


def make_photos(folder, count):
    """Writes JPEGs of 500 x 375 pixels, with noise of all sizes as in photos (60 kB each), in two class folders."""
    rng = np.random.default_rng(0)
    for index in range(count):
        scales = [(2**k, rng.integers(0, 256, (375 >> k, 500 >> k, 3), dtype=np.uint8)) for k in range(7)]
        layers = [size * np.float32(Image.fromarray(noise).resize((500, 375), Image.BICUBIC)) for size, noise in scales]
        (folder / str(index % 2)).mkdir(parents=True, exist_ok=True)
        Image.fromarray((sum(layers) / 127).astype(np.uint8)).save(folder / str(index % 2) / f"{index}.jpg", quality=90)
    return folder


def scaling_efficiency(args):
    steps, batch = (20 if args.quick else 60), 128
    arguments = (
        f"train_cifar.py --dataset synthetic --max_train_steps {steps} --eval_every {steps} --checkpoint_every 0 --log_every 5"
    )
    script, _, arguments = arguments.partition(" ")
    together, apart = [], []
    for _ in each_round(args):
        lines, _ = measure_script(script, f"{arguments} --batch_size {2 * batch}", processes=2)
        together.append(2 * batch / statistics.median(logged_steps(lines, 10)))
        apart.append(sum(side_by_side(script, f"{arguments} --batch_size {batch}", batch)))
    unit = "samples per second over two independent runs (more is better), ratio"
    return {"scaling_efficiency": (ratios_of(together, apart), unit)}


def side_by_side(script, arguments, batch):
    """Runs a script twice at the same time, with one thread each; returns the samples per second of each."""
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for number in range(2):
            command = [sys.executable, str(HERE / script), *arguments.split(), "--output_dir", f"{folder}/{number}"]
            one_core = environment() | {"OMP_NUM_THREADS": "1"}
            own_core = lambda number=number: os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[number]})  # noqa: E731
            running.append(
                subprocess.Popen(
                    command, env=one_core, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=own_core
                )
            )
        if any(process.wait() for process in running):
            raise RuntimeError(f"{script} failed")
        logs = [read_json_lines(Path(folder) / str(number) / "metrics.jsonl") for number in range(2)]
    return [batch / statistics.median(logged_steps(log, 10)) for log in logs]


def time_to_accuracy(args):
    bf16, batch, images = topology.cpu_has_bf16(), train_cifar.RECIPES["fastnet"]["batch_size"], 50_000
    record_steps, values = images * RECORD_EPOCHS // RECORD_BATCH, {"": [], "/flops": [], "/accuracy": []}
    for seed in each_round(args):
        seconds, _ = measure_loop("record_cifar", steps=2 if args.quick else 6, bf16=bf16)
        arguments = f"--dataset {args.images} --tta --seed {seed} --eval_every 100000 --checkpoint_every 0"
        arguments += " --max_train_steps 4" if args.quick else ""
        _, results = measure_script("train_cifar.py", arguments, bf16=bf16)
        steps, recipe = results["global_step"], SimpleNamespace(model="fastnet", lr_schedule="linear")
        sizes = Counter(train_cifar.image_size_at(step / steps, recipe) for step in range(1, steps + 1))
        flops = sum(count * cifar_flops(batch, size) for size, count in sizes.items())
        values[""].append(results["train_seconds"] / (record_steps * statistics.median(seconds[1:])))
        values["/flops"].append(flops / (record_steps * cifar_flops(RECORD_BATCH, 32)))
        values["/accuracy"].append(results["test_accuracy_tta"])
        print(f"    accuracy {values['/accuracy'][-1]:.4f} after {results['train_seconds']:.0f} s")
    units = dict.fromkeys(("", "/flops"), "time (flops: operations) over the record recipe (less is better), ratio")
    units["/accuracy"] = "test accuracy (more is better)"
    return {f"time_to_accuracy{name}": (rounds, units[name]) for name, rounds in values.items()}


FIVE_LINES = """
import torch
from accelerate import Accelerator
accelerator, model = Accelerator(), torch.nn.Linear(8, 8)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
accelerator.backward(model(torch.ones(2, 8)).sum())
optimizer.step()
print("step 1", flush=True)
"""


def startup_ratio(args):
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "five_lines.py").write_text(FIVE_LINES)
        seconds = {"five_lines": [], "train_minimal": [], "train_cifar": [], "train_gpt": []}
        arguments = {"train_minimal": [], "train_cifar": ["--model", "net", "--dataset", "synthetic"]}
        arguments["train_gpt"] = ["--dataset", "synthetic", *gpt_arguments().split()]
        for number in each_round(args):
            for name, values in seconds.items():
                script = HERE / f"{name}.py" if name in arguments else Path(folder) / "five_lines.py"
                command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--cpu", str(script)]
                if name in arguments:
                    command += [*arguments[name], "--log_every", "1", "--output_dir", f"{folder}/{name}{number}"]
                start_time = time.perf_counter()
                process = subprocess.Popen(
                    command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment()
                )
                while not process.stdout.readline().startswith("step "):
                    pass
                values.append(time.perf_counter() - start_time)
                process.terminate()
                process.communicate()
    for name, values in seconds.items():
        print(f"    {name:20} {statistics.median(values):6.2f} s to the first step")
    unit = "seconds to the first step over a five-line script (less is better), ratio"
    return {f"startup_ratio/{name}": (ratios_of(seconds[name], seconds["five_lines"]), unit) for name in arguments}


def checkpoint_share(args):
    """Weights and momentum of 57 million parameters. Eight steps show how long a step takes, and the last one saves."""
    arguments = "--dataset synthetic --n_layer 2 --n_head 8 --n_embd 1536 --block_size 32 --batch_size 4 --sample_length 1"
    arguments += " --max_train_steps 8 --checkpoint_every 4 --eval_every 8 --log_every 1"
    cadence, shares = 250, []  # the default of train_gpt.py, in steps
    for _ in each_round(args):
        lines, _ = measure_script("train_gpt.py", arguments)
        saves = [line["seconds"] for line in lines if line["split"] == "checkpoint"]
        shares.append(statistics.median(saves) / (cadence * statistics.median(logged_steps(lines, 2))))
    print(f"    a checkpoint takes {statistics.median(saves):.2f} s")
    return {"checkpoint_share": (shares, "share of the training time (less is better)")}


def machine_limit(args):
    bf16, batch = topology.cpu_has_bf16(), train_cifar.RECIPES["fastnet"]["batch_size"]
    steps, recipe = 12 if args.quick else 60, SimpleNamespace(model="fastnet", lr_schedule="linear")
    common = f"--dataset synthetic --max_train_steps {steps} --eval_every {steps} --checkpoint_every 0 --log_every 1"
    products = ["float32", *(["bf16"] if bf16 else [])]
    limits = {name: [] for name in (*products, "copy")}
    shares = {**{f"cifar_{size}px": [] for size in (24, 28, 32)}, "gpt": []}
    for _ in each_round(args):
        for name in products:
            seconds, _ = measure_loop("matrix_product", steps=2 * steps, bf16=name == "bf16")
            limits[name].append(2e-12 * MATRIX**3 / steady(seconds))
        seconds, _ = measure_loop("copy", steps=steps)
        limits["copy"].append(2e-12 * COPIED / steady(seconds))
        lines, _ = measure_script("train_cifar.py", common, bf16=bf16)
        for size in (24, 28, 32):
            logged = [line for line in lines if line["split"] == "train"]
            seconds = [s["step_seconds"] for s in logged if train_cifar.image_size_at(s["step"] / steps, recipe) == size]
            limit = limits[products[-1]][-1]
            shares[f"cifar_{size}px"].append(1e-12 * cifar_flops(batch, size) / steady(seconds) / limit)
        lines, _ = measure_script("train_gpt.py", f"{common} {gpt_arguments()} --sample_length 1")
        shares["gpt"].append(1e-12 * gpt_flops() / steady(logged_steps(lines, steps // 2)) / limits["float32"][-1])
    units = dict.fromkeys(limits, "10^12 operations (copy: bytes) per second")
    units |= dict.fromkeys(shares, "operations per second over a matrix product (more is better), ratio")
    return {f"machine_limit/{name}": (values, units[name]) for name, values in (limits | shares).items()}


def memory(args):
    steps, ratios = 6, []
    for _ in each_round(args):
        _, plain = measure_loop("plain_cifar", model="fastnet", batch_size=480, steps=steps)
        _, results = measure_script("train_cifar.py", f"--dataset synthetic --max_train_steps {steps} --checkpoint_every 0")
        ratios.append(results["peak_memory_bytes"] / plain)
    return {"memory": (ratios, "peak memory over a plain PyTorch loop (less is better), ratio")}


def gpt(args):
    """`gpt_time`, `gpt_at_equal_time` and `gpt_loss`."""
    values = {"gpt_time": [], "gpt_at_equal_time": [], "gpt_loss": [], "gpt_step": []}
    steps, common = 2000, f"--dataset {args.text} {gpt_arguments()} --sample_length 1 --checkpoint_every 0"

    def train(steps, seed):
        arguments = f"{common} --seed {seed} --max_train_steps {steps} --eval_every {steps}"
        return measure_script("train_gpt.py", arguments, bf16=topology.cpu_has_bf16())

    for seed in each_round(args):
        seconds, _ = measure_loop("usual_gpt", steps=200)
        budget = steps * statistics.median(seconds[20:])
        print(f"    a step of the usual GPT loop: {1e3 * budget / steps:.1f} ms")
        # The length of the run decides its schedule: find the longest that fits, and, in units of 50 steps,
        # the shortest that reaches the loss.
        lines, results = train(steps, seed)
        step_seconds = statistics.median(logged_steps(lines, 100))
        values["gpt_step"].append(1e3 * step_seconds)
        values["gpt_loss"].append(results["val_loss"])
        _, results = train(int(budget / step_seconds), seed)
        values["gpt_at_equal_time"].append(results["val_loss"])
        short = 200
        while train(short, seed)[1]["val_loss"] > NANOGPT_LOSS:
            short += 50
            if short > steps:
                raise UserError(f"train_gpt.py does not reach {NANOGPT_LOSS} in {steps} steps: is {args.text} tinyshakespeare?")
        values["gpt_time"].append(short * step_seconds / budget)
    units = dict.fromkeys(values, "nats per byte; step: milliseconds (less is better)")
    units["gpt_time"] = "time over the usual GPT (less is better), ratio"
    return {name: (rounds, units[name]) for name, rounds in values.items()}


def gpt_arguments():
    """nanoGPT's CPU setting, as arguments of train_gpt.py."""
    return " ".join(f"--{name} {value}" for name, value in GPT.items()) + f" --batch_size {GPT_BATCH}"


def ratios_of(ours, theirs):
    """The ratio of each round."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]


BENCHMARKS = {
    "loop_overhead": loop_overhead,
    "tutorial_speedup": tutorial_speedup,
    "pipeline_speedup": pipeline_speedup,
    "picture_loading": picture_loading,
    "scaling_efficiency": scaling_efficiency,
    "startup_ratio": startup_ratio,
    "time_to_accuracy": time_to_accuracy,
    "checkpoint_share": checkpoint_share,
    "machine_limit": machine_limit,
    "memory": memory,
    "gpt": gpt,
}
NEEDS = {"gpt": "text", "time_to_accuracy": "images"}  # data that must be given


# ------------------------------------------------------------------------------------------------------------- main


def main():
    args = parse_args()
    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    figures = {}
    for name in args.names or [name for name in BENCHMARKS if name not in NEEDS or getattr(args, NEEDS[name])]:
        print(f"{name} ...")
        command = f"python scripts/benchmark.py {name} --rounds {args.rounds}" + " --quick" * args.quick
        command += f" --{NEEDS[name]} PATH" if name in NEEDS else ""
        for figure, (values, unit) in BENCHMARKS[name](args).items():
            spread = dict(median=statistics.median(values), min=min(values), max=max(values), n=len(values))
            figures[figure] = {**spread, "unit": unit, "command": command}
            print("  {0:28} {median:8.3f}   ({min:.3f} to {max:.3f}, {n} rounds)  {unit}".format(figure, **figures[figure]))
    record = {"hardware": hardware(), "versions": versions(), "date": datetime.now(UTC).date().isoformat(), "figures": figures}
    write_json(folder / "benchmark.json", record)
    write_text(folder / "benchmark.md", table(record))
    plots.benchmark(folder / "benchmark.png", figures)
    print(f"written to {folder}")


def table(record):
    """The figures as a table in Markdown, with the parts of a benchmark in one row."""
    lines = [f"{record['hardware']}, torch {record['versions']['torch']}, {record['date']}", ""]
    lines += ["| name | median (range) | rounds | unit |", "|---|---|---|---|"]
    rows = {}
    for name, figure in record["figures"].items():
        benchmark = figure["command"].split()[2]
        part = name.removeprefix(benchmark).lstrip("/_")
        value = f"{part} {figure['median']:.3g} ({figure['min']:.3g} to {figure['max']:.3g})".strip()
        rows.setdefault((benchmark, figure["n"], figure["unit"]), []).append(value)
    lines += [f"| `{name}` | {', '.join(values)} | {rounds} | {unit} |" for (name, rounds, unit), values in rows.items()]
    return "\n".join(lines) + "\n"


def hardware():
    """The processor, its cores and its memory, in words."""
    model = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    return f"{len(os.sched_getaffinity(0))} cores of {model}{', native bf16' * topology.cpu_has_bf16()}"


def parse_args():
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which benchmarks: {', '.join(BENCHMARKS)}; default: all")
    parser.add_argument("--quick", action="store_true", help="fewer steps, for a first look")
    parser.add_argument("--rounds", type=number(int, 1), default=5, help="how often to measure both sides, in turn")
    parser.add_argument("--text", metavar="FILE", help="tinyshakespeare (input.txt), for the benchmark `gpt`")
    parser.add_argument("--images", metavar="PATH", help="CIFAR-10, as for train_cifar.py, for `time_to_accuracy`")
    parser.add_argument("--output_dir", default="runs/benchmark", help="folder for the table, the figures as JSON, and a plot")
    args = parser.parse_args()
    for name in args.names:
        if name not in BENCHMARKS:
            raise UserError(f"no benchmark is called {name}: choose from {', '.join(BENCHMARKS)}")
        if name in NEEDS and not getattr(args, NEEDS[name]):
            raise UserError(f"the benchmark {name} needs data: --{NEEDS[name]} (see --help)")
    return args


if __name__ == "__main__":
    exits.run(main)
