"""What only real hardware can show, measured on the GPUs of this machine:

    pip install torch torchvision accelerate pytest pytest-xdist
    python -m pytest -m gpu -n 0 tests/test_gpu.py

Each check is a function that runs the scripts, fails if a promise is broken, and returns what it
measured. With `-m gpu` it runs at full size, one check at a time, the most telling first: most of
the time are imports (15 s a launch on a machine with an H100), so launches whose speed is not
measured run together. Its figures go to `gpu.json` in the folder GPU_RESULTS (default: runs/gpu).
Each check is rehearsed on the CPU, at a small size and only as far as its own code goes: the
quickest in every run, the others as slow tests.

GPU_DATASET: CIFAR-10 as `--dataset` of train_cifar.py takes it; default: synthetic images.
"""

import importlib.util
import json
import os
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
from harness.launches import CIFAR, GPT, ROOT, final_weights, metrics, results, run

from utils.images.augment import augment

IMAGES, LM = "scripts/train_images.py", "scripts/train_lm.py"
DATASET = os.environ.get("GPU_DATASET", "synthetic")
RESULTS = Path(os.environ.get("GPU_RESULTS", ROOT / "runs" / "gpu"))

# Sizes on a GPU. nanoGPT's GPU setting is the default of train_gpt.py.
REAL = SimpleNamespace(
    gpu=True,
    device="cuda",
    cifar=f"--dataset {DATASET} --track none",
    # Not compiled: for so few steps that would take longer than it saves.
    gpt="--dataset synthetic --track none --dropout 0.2 --sample_length 20 --eval_every 100000 "
    "--compile never",
    images="--dataset synthetic --track none --model resnet50 --image_size 224 --batch_size 64 "
    "--lr 0.2 --num_workers 4",
    lm="--dataset synthetic --track none --block_size 256 --batch_size 8",
    steps=120,
    accuracy=0.9,
    precision="bf16",
    # The warm processes of the other tests have imported torch, and CUDA does not survive a fork.
    launch=dict(cold=True),
)
# The same commands on the CPU: 1gpu.yaml and 4gpu_fsdp.yaml fall back to it where CUDA is not to be
# seen.
REHEARSAL = SimpleNamespace(
    gpu=False,
    device="cpu",
    cifar="--dataset synthetic --model net --batch_size 100",
    gpt="--dataset synthetic --n_layer 1 --n_head 2 --n_embd 16 --block_size 16 --batch_size 8 "
    "--dropout 0.2 --sample_length 4 --eval_every 100000",
    images="--dataset synthetic --model squeezenet1_1 --image_size 32 --batch_size 8 "
    "--lr 0.02",  # without batch norm
    lm="--dataset synthetic --block_size 64 --batch_size 8",
    steps=18,
    accuracy=0.2,  # twice that of chance
    precision="no",
    launch=dict(env={"CUDA_VISIBLE_DEVICES": ""}),
)


# ------------------------------------------------------------------------------------------ helpers


def launch(
    place, script, arguments, folder, *faults, config="1gpu", processes=1, check=True, precision=""
):
    """Runs a script to its end, in the precision of `place` or another; `faults`: of wrapped.py."""
    launcher = ["--mixed_precision", precision or place.precision]
    if config != "1gpu":
        launcher += ["--num_processes", str(processes)]
    how = dict(launcher=launcher, faults=" ".join(faults), check=check, **place.launch)
    return run(config, script, arguments, output_dir=folder, **how)


def exactly(place, script, arguments, folder, *faults, rank="", **how):
    """A run killed after two thirds of its length ends with the bytes of a whole one: its folder."""
    whole, killed = folder / "whole", folder / "killed"
    launch(place, script, arguments, whole, *faults, **how)
    saved = place.steps * 2 // 3
    death = f"die_in_step@{saved + 2}{rank}"
    died = launch(place, script, arguments, killed, *faults, death, check=False, **how)
    dead = read(killed / "status.json")["state"] == "running" or "exitcode: -9" in died.stderr
    assert died.returncode != 0 and dead, died.stderr
    launch(place, script, arguments, killed, *faults, **how)
    assert results(killed)["resumed_from"] == saved
    assert final_weights(killed) == final_weights(whole), script
    return whole


def together(*launches):
    """Calls functions at the same time."""
    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(launch) for launch in launches]:
            future.result()


def both(place, more=""):
    """Name, script and arguments of the two scripts that most checks run."""
    return [("cifar", CIFAR, f"{place.cifar} {more}"), ("gpt", GPT, f"{place.gpt} {more}")]


def frequent(place):
    """Arguments for the length of a run of `place`, with three checkpoints and six log lines."""
    steps = place.steps
    return f"--max_train_steps {steps} --checkpoint_every {steps // 3} --log_every {steps // 6}"


def read(path):
    return json.loads(path.read_text())


def train_lines(folder):
    """The log lines of training, with their times."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["split"] == "train"]


def losses_of(folder):
    return [line["loss"] for line in metrics(folder, "train")]


def median(folder, name):
    """Of a value of the log lines in the second half of a run."""
    lines = train_lines(folder)
    return statistics.median(line[name] for line in lines[len(lines) // 2 :])


def step_milliseconds(folder):
    return 1e3 * median(folder, "step_seconds")


def peak_gib(folder):
    return results(folder)["peak_memory_bytes"] / 2**30


# ------------------------------------------------------------------------------------------- checks


def default_recipe(place, folder):
    """The default recipe learns, in these seconds."""
    length = "" if place.gpu else "--max_train_steps 60 --lr 0.1"
    arguments = f"{place.cifar} {length} --eval_every 100000 --checkpoint_every 0"
    launch(place, CIFAR, f"{arguments} --log_every 5", folder)
    topology, result = read(folder / "args.json")["topology"], results(folder)
    assert topology["mixed_precision"] == place.precision
    assert result["test_accuracy"] > place.accuracy
    names = ("test_accuracy", "train_seconds", "peak_memory_bytes")
    return {name: result[name] for name in names}


def kill_and_resume(place, folder):
    """A killed run ends with the same bytes: CIFAR, GPT, images in files, and tokens."""
    scripts = [*both(place), ("images", IMAGES, place.images)]
    if all(map(importlib.util.find_spec, ("transformers", "peft"))):
        scripts.append(("lm", LM, place.lm))
    if not place.gpu:
        scripts = scripts[-1:]  # test_every_script.py has the others
    together(
        *(
            partial(exactly, place, script, f"{arguments} {frequent(place)}", folder / name)
            for name, script, arguments in scripts
        )
    )
    return {f"{name}_peak_memory_gib": peak_gib(folder / name / "whole") for name, _, _ in scripts}


def cpu_and_gpu(place, folder):
    """A CPU and a GPU augment alike and give the same first losses; a run moves between them, and
    `evaluate.py` finds its score.
    """
    images = torch.randint(256, (100, 3, 32, 32), dtype=torch.uint8)
    ids = torch.randperm(100)
    on_cpu = augment(images, ids, 3, 0, padding=4)
    on_gpu = augment(images.to(place.device), ids, 3, 0, padding=4)
    assert torch.equal(on_cpu, on_gpu.cpu())
    arguments = f"{place.cifar} --batch_size 100 --log_every 1 --checkpoint_every 5"
    gpu, cpu, length = folder / "gpu", folder / "cpu", "--max_train_steps"
    launch(place, CIFAR, f"{arguments} {length} 5", gpu, precision="no")
    launch(place, CIFAR, f"{arguments} {length} 5", cpu, config="cpu", precision="no")
    ours, theirs = losses_of(gpu), losses_of(cpu)
    assert ours == pytest.approx(theirs, rel=2e-2) and ours[0] == pytest.approx(theirs[0], rel=1e-3)
    launch(place, CIFAR, f"{arguments} {length} 7", gpu, config="cpu", precision="no")
    assert results(gpu)["resumed_from"] == 5 and results(gpu)["global_step"] == 7
    launch(place, "scripts/evaluate.py", str(gpu), folder / "evaluation", precision="no")
    assert results(folder / "evaluation")["test_accuracy"] == results(gpu)["test_accuracy"]
    return {"losses": ours, "losses_on_the_cpu": theirs}


def prices(place, folder):
    """What a step costs in each precision, with the deterministic algorithms that identical bytes
    need and without, and compiled; a killed run that is compiled ends with the same bytes.
    """
    kinds, figures = ("no", "bf16", "fp16") if place.gpu else ("no", "bf16"), {}
    for name, script, arguments in both(place, frequent(place))[not place.gpu :]:
        made = {kind: folder / f"{name}_{kind}" for kind in (*kinds, "nondeterministic")}
        for kind in kinds:
            launch(place, script, arguments, made[kind], precision=kind)
        losses = [losses_of(made[kind])[-1] for kind in kinds]
        assert max(losses) < 1.1 * min(losses), losses
        free = f"{arguments} --nondeterministic"
        launch(place, script, free, made["nondeterministic"], precision="bf16")
        again = f"{arguments} --compile"
        made["compiled"] = exactly(place, script, again, folder / f"{name}_compiled")
        figures |= {f"{name}_step_ms_{kind}": step_milliseconds(at) for kind, at in made.items()}
    return figures


def sharded(place, folder):
    """FSDP2, on one GPU, too: sharded checkpoints, and an exact continuation."""
    processes = max(2**i for i in range(4) if 2**i <= torch.cuda.device_count()) if place.gpu else 2
    arguments, figures = f"{place.gpt} {frequent(place)}", {"processes": processes}
    for count in sorted({1, processes}) if place.gpu else [2]:
        several = dict(config="4gpu_fsdp", processes=count)
        whole = exactly(place, GPT, arguments, folder / f"{count}", rank=":0", **several)
        assert results(whole)["num_processes"] == count
        last = whole / "checkpoints" / f"step_{place.steps:08}"
        assert len(list(last.glob("pytorch_model_fsdp_0/*.distcp"))) == count
        figures[f"step_ms_{count}"] = step_milliseconds(whole)
        figures[f"peak_memory_gib_{count}"] = peak_gib(whole)
    return figures


def waits(place, folder):
    """No step makes the host wait for the device (`torch.cuda.set_sync_debug_mode`)."""
    length = "--max_train_steps 16 --log_every 100 --checkpoint_every 0 --eval_every 100"
    scripts = both(place, length)
    if place.gpu:
        scripts.append(("images", IMAGES, f"{place.images} {length}"))
    together(
        *(
            partial(launch, place, *how, folder / name, f"count_waits@0:{folder}/{name}.json")
            for name, *how in scripts
        )
    )
    figures = {}
    for name, _, _ in scripts:
        where = read(folder / f"{name}.json")
        if not place.gpu:  # promises/test_gpu_rules.py shows what a step would wait for
            assert where.pop().startswith("wrapped.py")
        assert not where, sorted(set(where))
        figures[f"{name}_waits_in_10_steps"] = len(where)
    return figures


def speed(place, folder):
    """Tokens per second of nanoGPT's GPU setting, as a share of the GPU's peak (MFU) where that is
    known, and images per second of a ResNet-50.
    """
    # On a GPU compiled, as by default.
    more = "--compile" if place.gpu else ""
    gpt, images = folder / "gpt", folder / "images"
    launch(place, GPT, f"{place.gpt} --max_train_steps {place.steps} --log_every 3 {more}", gpt)
    launch(place, IMAGES, f"{place.images} {frequent(place)}", images)
    figures = {"images_per_second": median(images, "samples_per_second")}
    for name in train_lines(gpt)[-1].keys() & {"tokens_per_second", "mfu"}:
        figures[name] = median(gpt, name)
    return {**figures, "gpt_gib": peak_gib(gpt), "images_gib": peak_gib(images)}


def one_device(place, folder):
    """Two processes on one GPU learn what one does, and a killed run of theirs ends with the same
    bytes.

    Over gloo: NCCL refuses two processes on one device.
    """
    what = (place, GPT, f"{place.gpt} --dropout 0 {frequent(place)}")
    two = dict(config="2gpu", processes=2, rank=":1")
    together(
        partial(launch, *what, folder / "one", precision="no"),
        partial(exactly, *what, folder / "two", "one_device", precision="no", **two),
    )
    assert results(folder / "two" / "whole")["num_processes"] == 2
    ours, theirs = losses_of(folder / "two" / "whole"), losses_of(folder / "one")
    # Muon orthogonalizes in float16 on a GPU.
    assert ours == pytest.approx(theirs, rel=2e-2 if place.gpu else 1e-4)
    return {"losses_of_two": ours, "losses_of_one": theirs}


CHECKS = [default_recipe, kill_and_resume, one_device, waits, speed, cpu_and_gpu]
CHECKS += [sharded, prices]


def store(folder, check, figures, seconds):
    """Adds the figures of a check to gpu.json, which says on what they were measured."""
    path = folder / "gpu.json"
    record = read(path) if path.exists() else {"checks": {}}
    record["gpus"] = [torch.cuda.get_device_name(gpu) for gpu in range(torch.cuda.device_count())]
    record["versions"] = f"torch {torch.__version__}, accelerate {accelerate.__version__}"
    record["date"] = datetime.now(UTC).date().isoformat()
    measured = {"promise": check.__doc__.splitlines()[0], "seconds": seconds, "figures": figures}
    record["checks"][check.__name__] = measured
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1))


# -------------------------------------------------------------------------------------------- tests


NO_GPU = "no GPU here (other tests rehearse this on the CPU)"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_GPU)
@pytest.mark.parametrize("check", CHECKS)
def test_on_the_gpus(check, tmp_path):
    assert "PYTEST_XDIST_WORKER" not in os.environ, "give -n 0: checks would slow each other down"
    start_time = time.perf_counter()
    figures = check(REAL, tmp_path)
    store(RESULTS, check, figures, time.perf_counter() - start_time)


@pytest.mark.parametrize(
    "check", [pytest.param(check, marks=[pytest.mark.slow] * (check != waits)) for check in CHECKS]
)
def test_rehearsed_on_the_cpu(check, tmp_path):
    if check is prices and not shutil.which("g++"):
        pytest.skip("torch.compile needs a C++ compiler")
    figures = check(REHEARSAL, tmp_path / "check")
    store(tmp_path / "results", check, figures, 1.0)
    record = read(tmp_path / "results" / "gpu.json")
    assert record["checks"][check.__name__]["figures"] == figures and figures
