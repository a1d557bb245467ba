"""What only real hardware can show, measured on the GPUs of this machine:

    pip install torch torchvision accelerate pytest pytest-xdist
    python -m pytest -m gpu -n 0 -k first     # the promises, about four minutes
    python -m pytest -m gpu -n 0 -k second    # prices: compilation, determinism, shards, ...

These packages are enough; tests of others that are missing are skipped with a line each.

Each check is a function that runs the scripts, fails if a promise is broken, and returns what it
measured. With `-m gpu` it runs at full size, one check at a time, the most telling first: most of
the time are imports (15 s a launch on a machine with an H100), so launches whose speed is not
measured run together. Its figures go to `gpu.json` and `gpu.md` in the folder GPU_RESULTS
(default: runs/gpu). The ordinary tests rehearse every check on the CPU, at a small size, so that
they are tested code before they meet a GPU.

GPU_DATASET: CIFAR-10 as `--dataset` of train_cifar.py takes it; default: synthetic images. A file
    with arrays needs no other package, see `utils/data/array_files.py`.
GPU_PEAK_TFLOPS: the peak of one GPU in bf16, if `utils/run/record.py` does not know it.
"""

import fcntl
import importlib.util
import json
import os
import platform
import shutil
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import accelerate
import pytest
import torch
from harness import warm
from harness.launches import (
    CIFAR,
    GPT,
    LIMIT,
    ROOT,
    final_weights,
    load_script,
    results,
    run,
    status,
)
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode
from torchvision.models import ResNet50_Weights, get_model

from utils.data.augment import augment
from utils.muon import orthogonalize
from utils.run import weights
from utils.run.record import known_tflops

train_cifar = load_script("train_cifar")
IMAGES, LM = "scripts/train_images.py", "scripts/train_lm.py"
DATASET = os.environ.get("GPU_DATASET", "synthetic")
PEAK = os.environ.get("GPU_PEAK_TFLOPS")
RESULTS = Path(os.environ.get("GPU_RESULTS", ROOT / "runs" / "gpu"))

# Sizes on a GPU. nanoGPT's GPU setting is the default of train_gpt.py.
REAL = SimpleNamespace(
    gpu=True,
    cifar=f"--dataset {DATASET} --track none",
    # Not compiled: for so few steps that would take longer than it saves.
    gpt="--dataset synthetic --track none --dropout 0.2 --sample_length 20 --eval_every 100000 "
    "--compile never",
    large_gpt="--dataset synthetic --track none --n_layer 12 --n_head 12 --n_embd 768 "
    "--block_size 1024 --batch_size 16 --sample_length 20 --compile never",
    images="--dataset synthetic --track none --model resnet50 --image_size 224 --batch_size 64 "
    "--ema_decay 0.99 "
    "--mixup 0.2 --num_workers 4",
    # Of the size of SmolLM2-135M.
    llama=dict(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9
    ),
    steps=120,
    # After two epochs; in float32 on a CPU the synthetic images give 100 %.
    accuracy=0.9 if DATASET == "synthetic" else 0.5,
    precision="bf16",
    # The warm processes of the other tests have imported torch, and CUDA does not survive a fork.
    launch=dict(cold=True),
    peak=PEAK and f"--peak_tflops {PEAK}",
)
# The same commands on the CPU: 1gpu.yaml and 4gpu_fsdp.yaml fall back to it where CUDA is not to be
# seen.
REHEARSAL = SimpleNamespace(
    gpu=False,
    cifar="--dataset synthetic --model net --batch_size 100",
    gpt="--dataset synthetic --n_layer 1 --n_head 2 --n_embd 16 --block_size 16 --batch_size 8 "
    "--dropout 0.2 "
    "--sample_length 4 --eval_every 100000",
    large_gpt="--dataset synthetic --n_layer 2 --n_head 2 --n_embd 16 --block_size 16 "
    "--batch_size 8 --sample_length 4",
    images="--dataset synthetic --model squeezenet1_1 --image_size 32 --batch_size 8 "
    "--ema_decay 0.99 --mixup 0.2",
    llama=dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2),
    steps=18,
    accuracy=0.2,  # twice that of chance
    precision="no",
    launch=dict(env={"CUDA_VISIBLE_DEVICES": ""}),
    peak="--peak_tflops 0.001",
)


# ------------------------------------------------------------------------------------------ helpers


def launch(
    place, script, arguments, folder, *, config="1gpu", launcher=(), check=True, precision=None
):
    """Runs a script to its end, in the precision of `place` or another."""
    typed = ("--mixed_precision", precision or place.precision, *launcher)
    return run(
        config, script, arguments, output_dir=folder, launcher=typed, check=check, **place.launch
    )


def wrapped(place, fault, script, arguments, folder, **more):
    return launch(
        place, "tests/harness/wrapped.py", [fault, script, *arguments.split()], folder, **more
    )


def together(*launches):
    """Calls functions at the same time; returns their results."""
    with ThreadPoolExecutor(len(launches)) as pool:
        return [future.result() for future in [pool.submit(launch) for launch in launches]]


def train_lines(folder):
    """The log lines of training, with their times."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["split"] == "train"]


def step_milliseconds(folder):
    """The median over the log lines of the second half of a run."""
    lines = train_lines(folder)
    return 1e3 * statistics.median(line["step_seconds"] for line in lines[len(lines) // 2 :])


def device(place):
    return torch.device("cuda" if place.gpu else "cpu")


def step_flops(name, batch_size, size):
    """FLOPs of the forward and backward pass of a classifier, without those of its optimizer.

    PyTorch counts them, without computing anything: two for a multiplication and addition.

    Args:
        name (str): a network of train_cifar.py or of torchvision.
        batch_size (int): images.
        size (int): their height and width.
    """
    own = name in train_cifar.RECIPES
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        model = train_cifar.build_model(name, 10) if own else get_model(name, num_classes=10)
        model(torch.empty(batch_size, 3, size, size)).sum().backward()
    return counter.get_total_flops()


def peak_flops(place):
    """Of one GPU, per second; None: it is not known."""
    known = float(PEAK) if PEAK else place.gpu and known_tflops(torch.cuda.get_device_name())
    tflops = known if place.gpu else float(place.peak.split()[-1])
    return tflops and tflops * 1e12


def utilization(place, folder, name, batch_size, size_at):
    """The share of the GPU's peak that the median log line of a run of a classifier reached.

    Args:
        size_at: the share of the steps that were done -> the height and width of the images.

    Returns:
        dict: `mfu`, or nothing where the peak is not known.
    """
    peak, lines = peak_flops(place), train_lines(folder)
    if not peak:
        return {}
    flops = {
        line["step"]: step_flops(name, batch_size, size_at(line["step"] / lines[-1]["step"]))
        for line in lines[1:]
    }
    reached = [flops[line["step"]] / line["step_seconds"] / peak for line in lines[1:]]
    assert min(reached) > 0 and (not place.gpu or max(reached) < 1), reached
    return {"mfu": statistics.median(reached)}


def sizes_of(name):
    """How the recipe of a network of train_cifar.py grows its images: the `size_at` of it."""
    recipe = SimpleNamespace(model=name, lr_schedule="linear")
    return partial(train_cifar.image_size_at, args=recipe)


def mean_step_seconds(lines, size_at):
    """The mean over a run, of which each log line counts as the median one with images of its size.

    Each size begins with the choice of its kernels, or with their compilation.

    Args:
        lines (list): log lines of training, after equally many steps each.
        size_at: as for `utilization`.
    """
    by_size = {}
    for line in lines:
        size = size_at(line["step"] / lines[-1]["step"])
        by_size.setdefault(size, []).append(line["step_seconds"])
    return sum(statistics.median(found) * len(found) for found in by_size.values()) / len(lines)


def frequent(place):
    """Arguments for the length of a run of `place`, with a checkpoint after each third, and six log
    lines.
    """
    steps = place.steps
    return f"--max_train_steps {steps} --checkpoint_every {steps // 3} --log_every {steps // 6}"


# ------------------------------------------------------------------------------------------- checks


def default_recipe(place, folder):
    """The default recipe for two epochs: it learns."""
    length = "--epochs 2" if place.gpu else "--max_train_steps 60 --lr 0.1"
    launch(place, CIFAR, f"{place.cifar} {length} --log_every 5", folder / "run")
    result = results(folder / "run")
    assert result["test_accuracy"] > place.accuracy
    assert (
        json.loads((folder / "run" / "args.json").read_text())["topology"]["mixed_precision"]
        == place.precision
    )
    return {
        "data": DATASET if place.gpu else "synthetic",
        "test_accuracy": result["test_accuracy"],
        "steps": result["global_step"],
        "samples_per_second": max(
            line["samples_per_second"] for line in train_lines(folder / "run")
        ),
        "peak_memory_gib": result["peak_memory_bytes"] / 2**30,
    }


def kill_and_resume(place, folder):
    """A killed run ends with the bytes of an uninterrupted one: CIFAR, GPT, averaged weights with
    Mixup, and LoRA.
    """
    scripts = {
        "cifar": (CIFAR, place.cifar),
        "gpt": (GPT, place.gpt),
        "images": (IMAGES, place.images),
    }
    if all(map(importlib.util.find_spec, ("transformers", "peft"))):
        scripts["lm"] = (LM, lora(place, folder))

    def whole(name, script, arguments):
        launch(place, script, arguments, folder / f"{name}_whole")

    def killed(name, script, arguments):
        fault, run_folder = f"die_in_step@{place.steps * 2 // 3 + 2}", folder / f"{name}_killed"
        died = wrapped(place, fault, script, arguments, run_folder, check=False)
        assert died.returncode != 0 and status(run_folder)["state"] == "running", died.stderr
        launch(place, script, arguments, run_folder)

    runs = [
        partial(part, name, script, f"{arguments} {frequent(place)}")
        for name, (script, arguments) in scripts.items()
        for part in (whole, killed)
    ]
    together(*runs)
    figures = {}
    for name in scripts:
        one, other = folder / f"{name}_whole", folder / f"{name}_killed"
        assert results(other)["resumed_from"] == place.steps * 2 // 3
        assert exported(one) == exported(other), name
        figures[f"{name}_peak_memory_gib"] = results(one)["peak_memory_bytes"] / 2**30
    return figures


def lora(place, folder):
    """Arguments of train_lm.py for LoRA on a Llama with random weights, which this makes."""
    import transformers

    from utils.causal_lm import byte_tokenizer

    tokenizer = byte_tokenizer()
    ends = dict(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    config = transformers.LlamaConfig(vocab_size=49_152, **ends, **place.llama)
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "llama")
    tokenizer.save_pretrained(folder / "llama")
    return f"--model {folder / 'llama'} --block_size 256 --batch_size 8 --lora_rank 8"


def exported(folder):
    """The bytes of the weights that a run leaves."""
    adapter = folder / "adapter" / "adapter_model.safetensors"
    return adapter.read_bytes() if adapter.exists() else final_weights(folder)


def determinism(place, folder):
    """What the deterministic algorithms that identical bytes take cost."""
    figures = {}
    for name, script, arguments in (("cifar", CIFAR, place.cifar), ("gpt", GPT, place.gpt)):
        arguments = f"{arguments} {frequent(place)}"
        one, other = folder / f"{name}_deterministic", folder / f"{name}_not_deterministic"
        launch(place, script, arguments, one)
        launch(place, script, f"{arguments} --nondeterministic", other)
        with_, without = step_milliseconds(one), step_milliseconds(other)
        figures[f"{name}_step_ms"], figures[f"{name}_step_ms_not_deterministic"] = with_, without
        figures[f"{name}_cost_of_determinism"] = with_ / without - 1
    return figures


def precisions(place, folder):
    """Float32, bf16 and fp16 learn alike."""
    figures = {}
    for name, script, arguments in (("cifar", CIFAR, place.cifar), ("gpt", GPT, place.gpt)):
        losses = {}
        for precision in ("no", "bf16", "fp16") if place.gpu else ("no", "bf16"):
            run_folder = folder / f"{name}_{precision}"
            launch(place, script, f"{arguments} {frequent(place)}", run_folder, precision=precision)
            losses[precision] = train_lines(run_folder)[-1]["loss"]
            figures[f"{name}_step_ms_{precision}"] = step_milliseconds(run_folder)
        assert max(losses.values()) < 1.1 * min(losses.values()), losses
    return figures


def other_ends(place, folder):
    """A signal, a NaN and too little memory end runs as on a CPU; the smallest script and
    `evaluate.py` run.
    """
    signaled, nan, memory = folder / "signaled", folder / "nan", folder / "memory"
    arguments = f"{place.cifar} {frequent(place)}"

    def stop_and_continue():
        done = wrapped(place, "sigterm_in_step@5", CIFAR, arguments, signaled, check=False)
        assert done.returncode != 0 and status(signaled)["state"] == "preempted", done.stderr
        launch(place, CIFAR, arguments, signaled)
        evaluate = ["scripts/evaluate.py", "--checkpoint", str(signaled)]
        launch(place, evaluate[0], evaluate[1:], folder / "evaluation")

    def fail(fault, run_folder, says):
        done = wrapped(place, fault, CIFAR, arguments, run_folder, check=False)
        assert done.returncode != 0 and says in done.stderr, done.stderr[-2000:]
        assert says in status(run_folder)["reason"]

    def smallest():
        launch(place, "scripts/train_minimal.py", "--max_train_steps 60", folder / "minimal")

    together(
        stop_and_continue,
        partial(fail, "nan@5", nan, "non-finite"),
        partial(fail, "out_of_memory@5", memory, "out of memory"),
        smallest,
    )
    evaluated = json.loads((folder / "evaluation" / "results.json").read_text())
    assert evaluated["test_accuracy"] == pytest.approx(results(signaled)["test_accuracy"], abs=0.01)
    return {"minimal_val_accuracy": results(folder / "minimal")["val_accuracy"]}


def cpu_and_gpu(place, folder):
    """The same seed gives the same augmentation on a CPU and on a GPU, and the same first losses; a
    run moves from one to the other.
    """
    images = torch.randint(256, (100, 3, 32, 32), dtype=torch.uint8)
    ids = torch.randperm(100)
    on_cpu = augment(images, ids, 3, 0, padding=4, cutout=8)
    on_gpu = augment(images.to(device(place)), ids, 3, 0, padding=4, cutout=8)
    assert all(torch.equal(a, b.cpu()) for a, b in zip(on_cpu, on_gpu, strict=True))
    arguments = f"{place.cifar} --batch_size 100 --log_every 1 --checkpoint_every 5"
    gpu, cpu = folder / "gpu", folder / "cpu"
    first = f"{arguments} --max_train_steps 5"
    launch(place, CIFAR, first, gpu, precision="no")
    launch(place, CIFAR, first, cpu, config="cpu", precision="no")
    ours, theirs = ([line["loss"] for line in train_lines(run_folder)] for run_folder in (gpu, cpu))
    assert ours == pytest.approx(theirs, rel=2e-2) and ours[0] == pytest.approx(theirs[0], rel=1e-3)
    longer = f"{arguments} --max_train_steps 7"
    launch(place, CIFAR, longer, gpu, config="cpu", precision="no")
    assert results(gpu)["resumed_from"] == 5 and results(gpu)["global_step"] == 7
    return {"largest_difference": max(abs(a / b - 1) for a, b in zip(ours, theirs, strict=True))}


def orthogonalization(place, folder):
    """Muon's iterations in float32, TF32 and float16: milliseconds, and the distance from float64.

    On the matrices of the default GPT, with singular values that decay.
    """
    count, rows, columns = (12, 384, 1536) if place.gpu else (2, 16, 64)
    torch.manual_seed(0)
    left, _, right = torch.linalg.svd(torch.randn(count, rows, columns), full_matrices=False)
    x = (left / torch.arange(1, rows + 1) @ right).to(device(place))
    exact, figures = orthogonalize(x.double(), half=False), {}
    matmul = torch.backends.cuda.matmul
    for name, half in (("float32", False), ("tf32", False), ("float16", True)):
        matmul.allow_tf32 = name == "tf32"
        seconds = []
        for _ in range(10):
            start_time = time.perf_counter()
            made = orthogonalize(x, half=half)
            if place.gpu:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start_time)
        figures[f"{name}_ms"] = 1e3 * statistics.median(seconds[3:])
        figures[f"{name}_distance"] = ((made - exact).norm() / exact.norm()).item()
    matmul.allow_tf32 = False
    assert figures["float32_distance"] < 1e-2 and figures["float16_distance"] < 0.1, figures
    return figures


def muon_precisions(place, folder):
    """A GPT learns alike whether Muon orthogonalizes in float32, TF32 or float16."""

    arguments = f"{place.gpt} {frequent(place)}"
    precisions = ("float32", "tf32", "float16")
    faults = {name: f"muon_precision@0:{name}" for name in precisions}
    together(
        partial(launch, place, GPT, arguments, folder / "usual"),
        *(partial(wrapped, place, faults[p], GPT, arguments, folder / p) for p in precisions),
    )
    usual, *losses = (train_lines(folder / p)[-1]["loss"] for p in ("usual", *precisions))
    figures = {f"{p}_loss": loss for p, loss in zip(precisions, losses, strict=True)}
    assert usual == figures["float16_loss" if place.gpu else "float32_loss"], figures
    assert len(set(losses)) > 1 and max(losses) < 1.05 * min(losses), figures
    return figures


def whole_recipe(place, folder):
    """The default recipe to its end, eager and compiled, beside the published seconds of records.

    Those are of one A100, to 94 % on CIFAR-10 as published: the images and the GPU differ.
    """
    figures = dict(airbench94_muon_published_seconds=2.59, hiverge_published_seconds=1.99)
    size_at = sizes_of("fastnet" if place.gpu else "net")
    for name, flag in (("eager", ""), ("compiled", "--compile")) if place.gpu else (("eager", ""),):
        length = "" if place.gpu else "--max_train_steps 60 --lr 0.1"
        arguments = f"{place.cifar} {length} {flag} --tta --eval_every 100000 --checkpoint_every 0"
        launch(place, CIFAR, f"{arguments} --log_every 5", folder / name)
        lines, result = train_lines(folder / name), results(folder / name)
        figures[f"{name}_seconds"] = mean_step_seconds(lines, size_at) * result["global_step"]
        for figure in ("test_accuracy", "test_accuracy_tta"):
            assert result[figure] > place.accuracy
            figures[f"{name}_{figure}"] = result[figure]
    return figures


def batch_sizes(place, folder):
    """CIFAR at three batch sizes, eager and compiled: what a larger batch and fewer launches save.

    `seconds`: of the steps of the default recipe's epochs of 50,000 images; `busy_share`: of the
    time in which the GPU computed.
    """
    figures, name = {}, "fastnet" if place.gpu else "net"
    size_at = sizes_of(name)
    for size in (480, 1000, 2000) if place.gpu else (50, 100):
        for flag in ("", "--compile") if place.gpu else ("",):
            run_folder, key = folder / f"{size}{flag}", f"{size}{flag.replace('--', '_')}"
            arguments = f"{place.cifar} --batch_size {size} {flag}"
            often = f"{frequent(place)} --log_every {max(1, place.steps // 30)}"
            launch(place, CIFAR, f"{arguments} {often}", run_folder)
            profiled = f"{arguments} --max_train_steps 8 --log_every 100 --profile"
            launch(place, CIFAR, profiled, folder / f"{key}_profiled")
            trace = json.loads((folder / f"{key}_profiled/profile/trace.json").read_text())
            figures[f"{key}_step_ms"] = step_milliseconds(run_folder)
            steps = train_cifar.RECIPES["fastnet"]["epochs"] * (50_000 // size)
            seconds = mean_step_seconds(train_lines(run_folder), size_at)
            figures[f"{key}_seconds"] = seconds * steps
            figures[f"{key}_busy_share"] = copies_in(trace["traceEvents"])["busy_share"]
            reached = utilization(place, run_folder, name, size, size_at)
            figures |= {f"{key}_{figure}": value for figure, value in reached.items()}
    return figures


def images(place, folder):
    """Images per second of a classifier of torchvision, and the share of the GPU's peak (MFU)."""
    words = place.images.split()
    name, size, batch_size = (
        words[words.index(flag) + 1] for flag in ("--model", "--image_size", "--batch_size")
    )
    launch(place, IMAGES, f"{place.images} {frequent(place)}", folder / "run")
    lines, result = train_lines(folder / "run"), results(folder / "run")
    reached = utilization(place, folder / "run", name, int(batch_size), lambda _: int(size))
    return {
        "images_per_second": statistics.median(line["samples_per_second"] for line in lines[1:]),
        **reached,
        "peak_memory_gib": result["peak_memory_bytes"] / 2**30,
    }


def compiled(place, folder):
    """`--compile`: how often the model is cut and compiled again, how long that takes, and what it
    saves per step.
    """
    figures = {}
    for name, script, arguments in (("cifar", CIFAR, place.cifar), ("gpt", GPT, place.gpt)):
        arguments = f"{arguments} {frequent(place)}"
        launch(place, script, arguments, folder / name)
        report = folder / f"{name}.json"
        wrapped(
            place,
            f"count_compilations@0:{report}",
            script,
            f"{arguments} --compile",
            folder / f"{name}_compiled",
        )
        killed = folder / f"{name}_killed"
        fault, again = f"die_in_step@{place.steps * 2 // 3 + 2}", f"{arguments} --compile"
        assert wrapped(place, fault, script, again, killed, check=False).returncode != 0
        launch(place, script, again, killed)
        assert final_weights(killed) == final_weights(folder / f"{name}_compiled")
        counted = json.loads(report.read_text())
        assert counted["compiled_functions"] >= 1 and counted["graph_breaks"] == 0, counted
        figures |= {f"{name}_{figure}": value for figure, value in counted.items()}
        figures[f"{name}_step_ms"] = step_milliseconds(folder / name)
        figures[f"{name}_step_ms_compiled"] = step_milliseconds(folder / f"{name}_compiled")
    return figures


def sharded(place, folder):
    """FSDP2 on the GPUs that are there, one included: sharded checkpoints, an exact continuation,
    and whole weights.
    """
    processes = max(2**i for i in range(4) if 2**i <= torch.cuda.device_count()) if place.gpu else 2
    arguments, figures = f"{place.gpt} {frequent(place)}", {"processes": processes}
    for count in sorted({1, processes}):
        several = dict(config="4gpu_fsdp", launcher=("--num_processes", str(count)))
        whole, killed = folder / f"whole{count}", folder / f"killed{count}"
        launch(place, GPT, arguments, whole, **several)
        fault = f"die_in_step@{place.steps * 2 // 3 + 2}:0"
        assert wrapped(place, fault, GPT, arguments, killed, check=False, **several).returncode != 0
        last = killed / "checkpoints" / f"step_{place.steps * 2 // 3:08}"
        assert len(list((last / weights.SHARDS).glob("*.distcp"))) == count
        launch(place, GPT, arguments, killed, **several)
        assert (
            results(killed)["resumed_from"] == place.steps * 2 // 3
            and results(killed)["num_processes"] == count
        )
        assert final_weights(killed) == final_weights(whole)
        exported = load_file(whole / "model.safetensors")
        in_shards = weights.read(whole / "checkpoints" / f"step_{place.steps:08}").state
        assert exported.keys() == in_shards.keys()
        assert all(torch.equal(in_shards[name], exported[name]) for name in exported)
        figures[f"step_ms_{count}"] = step_milliseconds(whole)
        figures[f"peak_memory_gib_{count}"] = results(whole)["peak_memory_bytes"] / 2**30
    return figures


def copies(place, folder):
    """Batches are copied to the GPU without making it wait: from pinned memory, and next to nothing
    of it is visible.
    """
    figures = {}
    for name, script, arguments in (("cifar", CIFAR, place.cifar), ("gpt", GPT, place.gpt)):
        launch(
            place,
            script,
            f"{arguments} --max_train_steps 8 --log_every 100 --profile",
            folder / name,
        )
        found = copies_in(
            json.loads((folder / name / "profile" / "trace.json").read_text())["traceEvents"]
        )
        if place.gpu:
            assert (
                found["copies"] >= 3
                and found["from_pageable_memory"] == 0
                and found["exposed_share"] < 0.05
            ), found
        figures |= {f"{name}_{figure}": value for figure, value in found.items()}
    return figures


def copies_in(events):
    """What a trace says about copies of more than 4 KiB to the GPU.

    Returns:
        dict: `copies`; how many came `from_pageable_memory`, for which the host waits; and of the
            time from the first kernel to
        the last, the shares in which the GPU computed (`busy_share`), and only copied
        (`exposed_share`).
    """
    kernels = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "kernel")
    found = [
        e
        for e in events
        if e.get("cat") == "gpu_memcpy" and "HtoD" in e["name"] and e["args"].get("bytes", 0) > 4096
    ]
    busy, exposed = 0.0, sum(e["dur"] for e in found)
    end = float("-inf")
    for first, last in kernels:
        first, end = max(first, end), max(last, end)  # kernels may overlap
        busy += max(0.0, last - first)
        exposed -= sum(max(0.0, min(last, e["ts"] + e["dur"]) - max(first, e["ts"])) for e in found)
    span = max((last for _, last in kernels), default=0.0) - min(
        (first for first, _ in kernels), default=0.0
    )
    return {
        "copies": len(found),
        "from_pageable_memory": sum("Pageable" in e["name"] for e in found),
        "busy_share": busy / span if span else 0.0,
        "exposed_share": exposed / span if span else 0.0,
    }


def waits(place, folder):
    """No step makes the host wait for the device (`torch.cuda.set_sync_debug_mode`)."""
    figures, length = (
        {},
        "--max_train_steps 16 --log_every 100 --checkpoint_every 0 --eval_every 100",
    )
    scripts = {"cifar": (CIFAR, place.cifar), "gpt": (GPT, place.gpt)}
    if place.gpu:
        scripts["images"] = (IMAGES, place.images)

    def count(name, script, arguments):
        fault = f"count_waits@0:{folder}/{name}.json"
        wrapped(place, fault, script, f"{arguments} {length}", folder / name)

    together(*(partial(count, name, *how) for name, how in scripts.items()))
    for name in scripts:
        where = json.loads((folder / f"{name}.json").read_text())
        if not place.gpu:
            # The guard reads a loss that has been copied to the host, and the loader makes indices.
            # So the others would be seen.
            assert where.count(next((line for line in where if "guard" in line), None)) >= 10
            where = [
                line
                for line in where
                if line.split(":")[0] in ("train_cifar.py", "train_gpt.py", "augment.py")
            ]
        assert not where, sorted(set(where))
        figures[f"{name}_waits_in_10_steps"] = len(where)
    return figures


def tokens(place, folder):
    """Tokens per second of nanoGPT's GPU setting, and the share of the GPU's peak that this is
    (MFU).
    """
    launch(
        place,
        GPT,
        # On a GPU compiled, as by default.
        f"{place.gpt} {place.peak or ''} --max_train_steps {place.steps} --log_every 3"
        f"{' --compile' * place.gpu}",
        folder / "run",
    )
    lines, result = train_lines(folder / "run"), results(folder / "run")
    lines = lines[len(lines) // 2 :]
    figures = {"tokens_per_second": statistics.median(line["tokens_per_second"] for line in lines)}
    if "mfu" in lines[0]:  # the peak is known
        figures["mfu"] = statistics.median(line["mfu"] for line in lines)
        per_flop = figures["mfu"] / (figures["tokens_per_second"] * result["flops_per_token"])
        assert 0 < figures["mfu"] < 1 or not place.gpu
        assert place.gpu or per_flop == pytest.approx(1 / 1e9, rel=1e-6)  # 0.001 TFLOPS
    figures["peak_memory_gib"] = result["peak_memory_bytes"] / 2**30
    return figures


def activation_checkpointing(place, folder):
    """Recomputing activations saves memory and costs time."""
    figures = {}
    for name, flag in (("without", ""), ("with", "--activation_checkpointing")):
        arguments = f"{place.large_gpt} {flag} --max_train_steps {place.steps // 3} --log_every 2 --checkpoint_every 0"
        launch(place, GPT, arguments, folder / name)
        figures[f"{name}_peak_memory_gib"] = results(folder / name)["peak_memory_bytes"] / 2**30
        figures[f"{name}_step_ms"] = step_milliseconds(folder / name)
    without, with_ = (
        [line["loss"] for line in train_lines(folder / name)] for name in ("without", "with")
    )
    assert with_ == pytest.approx(without, abs=0.02 if place.gpu else 1e-5)
    assert (
        not place.gpu or figures["with_peak_memory_gib"] < 0.7 * figures["without_peak_memory_gib"]
    ), figures
    return figures


def shared_gpu(place, folder):
    """More processes than GPUs are refused with one line, before anything is written."""
    gpus = torch.cuda.device_count() if place.gpu else 1
    started = {"config": "2gpu", "launcher": ("--num_processes", str(gpus + 1)), "check": False}
    arguments = f"{place.cifar} --max_train_steps 2"
    if place.gpu:
        done = launch(place, CIFAR, arguments, folder / "run", **started)
    else:
        done = wrapped(place, "gpus@1", CIFAR, arguments, folder / "run", **started)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode != 0 and not (folder / "run").exists()
    assert (
        len(errors) == 1
        and f"starts {gpus + 1} processes on this machine, which has {gpus} GPU" in errors[0]
    ), done.stderr
    return {"refused_with": errors[0].removeprefix("error: ")}


def one_device(place, folder):
    """Two processes on one GPU learn what one does, and a killed run of theirs ends with the same
    bytes.

    Over gloo: NCCL refuses two processes on one device.
    """
    arguments, steps = f"{place.gpt} --dropout 0 {frequent(place)}", place.steps
    two = dict(config="2gpu", launcher=("--num_processes", "2"), precision="no")
    alone, whole, killed = folder / "one", folder / "two", folder / "two_killed"

    def kill():
        fault = f"tests/harness/wrapped.py die_in_step@{steps * 2 // 3 + 2}:1 {GPT} {arguments}"
        script, *words = fault.split()
        died = wrapped(place, "one_device", script, " ".join(words), killed, check=False, **two)
        assert died.returncode != 0 and "exitcode: -9" in died.stderr, died.stderr
        wrapped(place, "one_device", GPT, arguments, killed, **two)

    together(
        partial(launch, place, GPT, arguments, alone, precision="no"),
        partial(wrapped, place, "one_device", GPT, arguments, whole, **two),
        kill,
    )
    assert results(whole)["num_processes"] == 2 and results(killed)["num_processes"] == 2
    assert results(killed)["resumed_from"] == steps * 2 // 3
    assert final_weights(killed) == final_weights(whole)
    ours, theirs = ([line["loss"] for line in train_lines(some)] for some in (whole, alone))
    # Muon orthogonalizes in float16 on a GPU.
    assert ours == pytest.approx(theirs, rel=2e-2 if place.gpu else 1e-4)
    return {"largest_difference": max(abs(a / b - 1) for a, b in zip(ours, theirs, strict=True))}


def predicted_memory(place, folder):
    """The peak memory of a process of DDP is what predict_scaling.py says, to 10 %.

    With windows so short that activations take next to nothing.
    """
    arguments = (
        f"{place.large_gpt} --block_size 16 --batch_size 2 --optimizer adamw --max_train_steps 3 "
        "--checkpoint_every 0 --eval_every 100000"
    )
    two = dict(config="2gpu", launcher=("--num_processes", "2"))
    wrapped(place, "one_device", GPT, arguments, folder / "run", **two)
    result = results(folder / "run")
    link = "--step_seconds 1 --latency 1e-6 --bandwidth 1e9 --processes 2"
    predict = f"--parameters {result['parameters']} {link}"
    launch(place, "scripts/predict_scaling.py", predict, folder / "prediction")
    made = json.loads((folder / "prediction" / "scaling.json").read_text())
    predicted = made["comparison"][0]["memory_bytes"]
    assert made["comparison"][0]["kind"] == "DDP" and predicted == 20 * result["parameters"]
    error = result["peak_memory_bytes"] / predicted - 1
    assert abs(error) < 0.1 or not place.gpu, error
    return {"predicted_gib": predicted / 2**30, "error": error}


HALVES = {
    "first": [
        default_recipe,
        kill_and_resume,
        one_device,
        waits,
        tokens,
        images,
        copies,
        orthogonalization,
        other_ends,
        cpu_and_gpu,
        shared_gpu,
    ],
    "second": [
        compiled,
        determinism,
        sharded,
        precisions,
        predicted_memory,
        muon_precisions,
        whole_recipe,
        batch_sizes,
        activation_checkpointing,
    ],
}
CHECKS = {check: f"{half}-{check.__name__}" for half, part in HALVES.items() for check in part}


# ------------------------------------------------------------------------------------------ results


def hardware():
    """What the figures were measured on."""
    gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    return {
        "gpu": f"{torch.cuda.device_count()} x {gpu.name}, {gpu.total_memory / 2**30:.0f} GiB"
        if gpu
        else "none",
        "cpu": f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": f"torch {torch.__version__}, CUDA {torch.version.cuda}, accelerate {accelerate.__version__}",
        "date": datetime.now(UTC).date().isoformat(),
    }


def store(folder, check, figures, seconds):
    """Adds the figures of a check to gpu.json, and writes the table again; the checks may run in
    several processes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "gpu.json"
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        record = json.loads(path.read_text()) if path.exists() else {"checks": {}}
        record |= {"hardware": hardware()}
        record["checks"][check.__name__] = {
            "promise": check.__doc__.splitlines()[0],
            "seconds": seconds,
            "figures": figures,
        }
        path.write_text(json.dumps(record, indent=1))
        (folder / "gpu.md").write_text(table(record))


def table(record):
    """gpu.json as a Markdown table."""
    lines = [", ".join(record["hardware"].values()), "", "| check | measured |", "|---|---|"]
    for check in record["checks"].values():
        figures = "; ".join(
            f"{name.replace('_', ' ')}: {shown(name, value)}"
            for name, value in check["figures"].items()
        )
        lines.append(f"| {check['promise']} | {figures} |")
    return "\n".join(lines) + "\n"


def shown(name, value):
    if isinstance(value, float) and any(
        word in name for word in ("share", "cost", "mfu", "accuracy", "error")
    ):
        return f"{value:.1%}"
    return (
        f"{value:,.4g}"
        if isinstance(value, float) and value < 1000
        else f"{value:,.0f}"
        if isinstance(value, float)
        else value
    )


# -------------------------------------------------------------------------------------------- tests


@pytest.fixture
def alone():
    """The GPU for one check at a time, however many processes share the tests: else they would slow
    each other down.
    """
    RESULTS.mkdir(parents=True, exist_ok=True)
    with (RESULTS / ".alone").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="no GPU here (the ordinary tests rehearse this on the CPU)",
)
@pytest.mark.parametrize("check", CHECKS, ids=CHECKS.get)
def test_on_the_gpus(check, alone, tmp_path):
    start_time = time.perf_counter()
    figures = check(REAL, tmp_path)
    store(RESULTS, check, figures, time.perf_counter() - start_time)


NEEDS_COMPILER = pytest.mark.skipif(
    not shutil.which("g++"), reason="torch.compile needs a C++ compiler"
)
REHEARSED_LATER = {
    compiled: [pytest.mark.slow, NEEDS_COMPILER],
    kill_and_resume: pytest.mark.slow,
    one_device: pytest.mark.slow,
    images: pytest.mark.slow,
    determinism: pytest.mark.slow,
    precisions: pytest.mark.slow,
    other_ends: pytest.mark.slow,
    cpu_and_gpu: pytest.mark.slow,
    batch_sizes: pytest.mark.slow,
    muon_precisions: pytest.mark.slow,
    whole_recipe: pytest.mark.slow,
    default_recipe: pytest.mark.slow,
    activation_checkpointing: pytest.mark.slow,
    sharded: pytest.mark.slow,
}


@pytest.mark.parametrize(
    "check",
    [pytest.param(check, marks=REHEARSED_LATER.get(check, ())) for check in CHECKS],
    ids=CHECKS.get,
)
def test_rehearsed_on_the_cpu(check, tmp_path):
    figures = check(REHEARSAL, tmp_path / "check")
    store(tmp_path / "results", check, figures, 1.0)
    record = json.loads((tmp_path / "results" / "gpu.json").read_text())
    assert record["checks"][check.__name__]["figures"] == figures and figures
    assert check.__doc__.splitlines()[0] in (tmp_path / "results" / "gpu.md").read_text()


def test_what_a_trace_says_about_copies():
    def event(cat, name, ts, dur, size=8192):
        return {"cat": cat, "name": name, "ts": ts, "dur": dur, "args": {"bytes": size}}

    pinned, pageable = "Memcpy HtoD (Pinned -> Device)", "Memcpy HtoD (Pageable -> Device)"
    events = [
        event("kernel", "gemm", 0, 40),
        event("kernel", "norm", 30, 20),  # on another stream: busy until 50
        event("kernel", "gemm", 60, 40),
        event("gpu_memcpy", pinned, 35, 10),  # hidden
        event("gpu_memcpy", pinned, 45, 10),  # half of it hidden
        event("gpu_memcpy", pageable, 52, 6),
        event("gpu_memcpy", pageable, 58, 1, size=8),  # a scalar
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 50, 10),
        {"ph": "M", "name": "process_name"},
    ]
    found = copies_in(events)
    assert found["copies"] == 3 and found["from_pageable_memory"] == 1
    assert found["busy_share"] == pytest.approx(0.9) and found["exposed_share"] == pytest.approx(
        0.11
    )


def test_mfu_is_that_of_the_median_line_at_the_size_of_its_images(tmp_path):
    published = 2 * 1e9 * ResNet50_Weights.DEFAULT.meta["_ops"]  # counts additions with products
    # The backward pass takes twice as many operations; none for the gradient of the images.
    assert step_flops("resnet50", 2, 224) == pytest.approx(2 * 3 * published, rel=0.02)
    lines = [
        dict(split="train", step=10, step_seconds=9.0),  # with the choice of kernels
        dict(split="val", step=15),
        *(dict(split="train", step=step, step_seconds=0.5) for step in (20, 30, 40)),
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text)
    small, large = (step_flops("resnet18", 8, size) / 0.5 / 1e9 for size in (32, 64))
    assert large > 2 * small
    sizes = {0.5: 32, 0.75: 64, 1: 32}
    reached = utilization(REHEARSAL, tmp_path, "resnet18", 8, sizes.get)
    assert reached == {"mfu": pytest.approx(small)}


def test_a_mean_step_leaves_out_the_lines_in_which_kernels_are_compiled():
    seconds = [9.0, 1.0, 1.0, 1.0, 9.0, 3.0, 3.0]
    lines = [dict(step=4 * n, step_seconds=s) for n, s in enumerate(seconds, 1)]
    mean = mean_step_seconds(lines, lambda done: 24 if done <= 4 / 7 else 32)
    assert mean == pytest.approx((4 * 1.0 + 3 * 3.0) / 7)


def test_the_table_keeps_the_other_checks(tmp_path):
    store(tmp_path, tokens, {"tokens_per_second": 123456.7, "mfu": 0.3456}, 2.0)
    store(tmp_path, waits, {"cifar_waits_in_10_steps": 0}, 3.0)
    text = (tmp_path / "gpu.md").read_text()
    assert "tokens per second: 123,457; mfu: 34.6%" in text and "cifar waits in 10 steps: 0" in text
    assert f"torch {torch.__version__}" in text and len(text.splitlines()) == 6


def test_there_is_a_reason_where_there_is_no_gpu():
    """`-m gpu` on such a machine skips every check, and says why."""
    words = [
        "-m",
        "pytest",
        "-m",
        "gpu",
        "-n",
        "0",
        "-rs",
        "-q",
        "-p",
        "no:cacheprovider",
        str(ROOT / "tests" / "test_gpu.py"),
    ]
    done = warm.run(words, {**os.environ, "CUDA_VISIBLE_DEVICES": ""}, LIMIT, cwd=str(ROOT))
    assert (
        done.returncode == 0
        and f"{len(CHECKS)} skipped" in done.stdout
        and "no GPU here" in done.stdout
    ), done.stdout
