"""What every training script promises, and each of them is held to: one table.

All of it is seen from outside: what the runs write, and `wrapped.py record`, which notes what the
model was given. The arguments are no multiples of each other, and no batch divides the data.
"""

import json
import shutil
from hashlib import sha256
from statistics import mean
from typing import NamedTuple

import numpy as np
import pytest
from harness.launches import metrics, results, run, status

STEPS, EPOCH = 11, 4  # steps of a run and of an epoch
COMMON = f"--max_train_steps {STEPS} --log_every 2 --checkpoint_every 3 --eval_every 4 --seed 5"
PIXELS = "--dataset {data}/pixels.npz --batch_size 8 --max_grad_norm 0.5 --track none"


class Script(NamedTuple):
    """How the table starts a script, and what it has to find.

    Attributes:
        words (str): arguments for `COMMON` data.
        samples (int): to train on.
        counted (dict): the size of each held-out split, by a result that is a number of samples, or
            a share of them.
        changes (bool): whether another epoch shows a sample in another way.
        dropout (str | None): arguments with which it has dropout; None: it has none.
        packages (tuple): what it needs.
        killed (int): on how many processes it is interrupted by the tests that are not slow.
    """

    words: str
    samples: int
    counted: dict
    changes: bool = True
    dropout: str | None = None
    packages: tuple = ()
    killed: int = 1


OF_PIXELS = dict(samples=33, counted={"val_accuracy": 11, "test_accuracy": 13})
SCRIPTS = {
    "train_minimal": Script("--batch_size 716", 2880, {"val_accuracy": 997}, changes=False),
    "train_cifar": Script(f"{PIXELS} --model net --lr 0.1", killed=2, **OF_PIXELS),
    "train_images": Script(
        f"{PIXELS} --model squeezenet1_1 --image_size 32 --num_workers 0 --lr 0.01 "
        "--auto_augment trivial",
        dropout="",
        **OF_PIXELS,
    ),
    "train_gpt": Script(
        "--dataset {data}/text --batch_size 12 --n_layer 1 --n_head 2 --n_embd 16 --block_size 16 "
        "--sample_length 4 --max_grad_norm 0.5 --track none",
        49,
        {"val_bytes": 16 * 6 + 9},
        dropout="--dropout 0.3",
        killed=2,
    ),
    "train_lm": Script(
        "--dataset {data}/chats.jsonl --batch_size 12 --block_size 64 "
        "--max_grad_norm 0.5 --lr 0.01 --track none",
        49,
        {"val_tokens": 106},
        changes=False,
        packages=("transformers", "peft"),
    ),
    "train_model_parallel": Script(
        f"{PIXELS} --width 8 --micro_batches 2", 33, {"val_accuracy": 11}
    ),
}


every_script = pytest.mark.parametrize("name", SCRIPTS)


@pytest.fixture(scope="session")
def data(made_once):
    """Small data for all scripts, as noise that depends on the class."""

    def make(folder):
        generator, arrays = np.random.default_rng(0), {}
        for split, count in (("train", 33), ("val", 11), ("test", 13)):
            labels = np.arange(count) % 3
            noise = generator.integers(0, 150, (count, 32, 32, 3))
            images = (noise + 50 * labels[:, None, None, None]).astype(np.uint8)
            arrays |= {f"{split}_images": images, f"{split}_labels": labels}
        np.savez(folder / "pixels.npz", **arrays)
        for split, count in (("train", 16 * 50 + 5), ("val", 16 * 6 + 9 + 1)):
            (folder / "text" / split).mkdir(parents=True)
            words = " ".join(str(generator.integers(1000)) for _ in range(count))
            (folder / "text" / split / "a.txt").write_text(words[:count])
        rows = []
        for number in range(105):
            turns = [
                {"role": "user", "content": f"{number}t"},
                {"role": "assistant", "content": "w" * (1 + number * number % 17)},
            ]
            rows.append(json.dumps({"messages": turns}) + "\n")
        (folder / "chats.jsonl").write_text("".join(rows))
        return folder

    return made_once("every_script/data", make)


class Run(NamedTuple):
    """A run of a script on some processes, which tests share and do not change.

    Attributes:
        arguments (str): those of the script.
        accumulation (int): the micro-batches of a step, of each process.
        steps, losses (list): as `recorded` returns them.
    """

    folder: object
    arguments: str
    accumulation: int
    steps: list
    losses: list


class Table:
    """Starts the runs of the table, each once."""

    def __init__(self, made_once, data):
        self.made_once, self.data = made_once, data

    def start(self, name, folder, processes, accumulation, dropout):
        """Runs a script to its end, with what it has of accumulation and dropout."""
        script = SCRIPTS[name]
        arguments = f"{script.words.format(data=self.data)} {COMMON}"
        if accumulation > 1 and name != "train_minimal":
            arguments += f" --gradient_accumulation_steps {accumulation}"
        else:
            accumulation = 1
        if dropout and script.dropout is not None:
            arguments += f" {script.dropout}"
        steps, losses = recorded(name, arguments, folder, processes, accumulation, dropout)
        return Run(folder, arguments, accumulation, steps, losses)

    def whole(self, name, processes=1, accumulation=1, dropout=False):
        """An uninterrupted run."""
        for package in SCRIPTS[name].packages:
            pytest.importorskip(package)
        if SCRIPTS[name].dropout is None:
            dropout = False
        words = (name, processes, accumulation, "dropout" if dropout else "plain")
        return self.made_once(
            f"every_script/{'_'.join(map(str, words))}",
            lambda folder: self.start(name, folder / "run", processes, accumulation, dropout),
        )

    def one(self, name):
        """The run on one process: with micro-batches, if that is the run that is interrupted."""
        shared = SCRIPTS[name].killed == 1 and SCRIPTS[name].dropout is None
        return self.whole(name, accumulation=2 if shared else 1)

    def interrupted(self, name, processes):
        """A run that gets a signal in step 3, is killed in step 8, and is continued each time.

        Returns:
            tuple: the outputs and states of both launches, and the `Run` that ended.
        """
        whole = self.whole(name, processes, 2, dropout=True)

        def make(folder):
            ended = []
            per_step = len(whole.losses[0]) // processes
            first = 4 if processes > 1 else 3  # several processes agree one step later
            last = processes - 1
            for fault, step in ((f"sigterm_in_step@{{}}:{last}", 3), ("die_in_step@{}:0", 8)):
                calls = step if step == 3 else step - first
                options = dict(output_dir=folder / "run", faults=fault.format(calls * per_step))
                config = "2cpu" if processes > 1 else None
                done = run(config, f"scripts/{name}.py", whole.arguments, check=False, **options)
                saved = sorted(path.name for path in (folder / "run" / "checkpoints").iterdir())
                ended.append((done, status(folder / "run"), saved))
            return ended, self.start(name, folder / "run", processes, 2, dropout=True)

        return self.made_once(f"every_script/{name}_{processes}_interrupted", make)


@pytest.fixture(scope="session")
def table(made_once, data):
    return Table(made_once, data)


def recorded(name, arguments, folder, processes=1, accumulation=1, dropout=False):
    """Runs a script, and reads what it trained on.

    Returns:
        tuple: for each optimizer step of this launch, the `step`, and the `ids` of all processes,
            sorted, each with a checksum of what the model was given; and the losses of all
            micro-batches of all processes.
    """
    records = folder.with_name(f"{folder.name}_records")
    records.mkdir()
    options = dict(output_dir=folder, faults=f"record@{int(not dropout)}:{records}")
    if processes > 1:
        options["launcher"] = ("--num_processes", str(processes))
    run("2cpu" if processes > 1 else None, f"scripts/{name}.py", arguments, **options)
    files = [(records / f"{rank}.jsonl").open() for rank in range(processes)]
    steps, losses = [], []
    for lines in zip(*files, strict=True):
        parts = [json.loads(line) for line in lines]
        batches = [batch for part in parts for batch in part["batches"]]
        assert len({part["step"] for part in parts}) == 1
        assert len(batches) == processes * accumulation and len(set(map(len, batches))) == 1
        ids = sorted(tuple(sample) for batch in batches for sample in batch)
        steps.append({"step": parts[0]["step"], "ids": ids})
        losses.append([loss for part in parts for loss in part["losses"]])
    return steps, losses


def exported(folder):
    """The hash of each file with weights that a run exported."""
    files = [path for path in folder.rglob("*.safetensors") if "checkpoints" not in path.parts]
    return {str(path.relative_to(folder)): sha256(path.read_bytes()).hexdigest() for path in files}


def held_out_results(folder):
    return numbers({k: v for k, v in results(folder).items() if k.startswith(("val_", "test_"))})


def numbers(figures):
    """Those of a dict's values that are numbers."""
    return {name: value for name, value in figures.items() if isinstance(value, int | float)}


def all_metrics(folder):
    return {split: metrics(folder, split) for split in ("train", "val", "test", "sample")}


interrupted_scripts = pytest.mark.parametrize(
    ("name", "processes"),
    [
        pytest.param(name, count, marks=[pytest.mark.slow] * (count != script.killed))
        for name, script in SCRIPTS.items()
        for count in range(script.killed, 3)
    ],
)


@interrupted_scripts
def test_killed_and_started_again_it_ends_with_the_same_bytes(name, processes, table):
    """And the same metrics; with accumulation, dropout and augmentation, in the middle of an epoch."""
    whole = table.whole(name, processes, 2, dropout=True)
    (_, (killed, state, saved)), again = table.interrupted(name, processes)
    assert killed.returncode != 0 and state["state"] != "finished"
    assert saved[-1] == "step_00000006" and results(again.folder)["resumed_from"] == 6
    assert again.steps == whole.steps[6:] and again.losses == whole.losses[6:]
    assert exported(again.folder) == exported(whole.folder) and exported(whole.folder)
    assert all_metrics(again.folder) == all_metrics(whole.folder)
    assert held_out_results(again.folder) == held_out_results(whole.folder)
    for figure in ("global_step", "samples_seen", "num_processes", "best_checkpoint"):
        assert results(again.folder)[figure] == results(whole.folder)[figure], figure


@interrupted_scripts
def test_a_signal_saves_at_once_and_says_how_to_continue(name, processes, table):
    """The evaluation that is due is left to the restart, as `..._the_same_bytes` shows."""
    (done, state, saved), _ = table.interrupted(name, processes)[0]
    output, step = done.stdout + done.stderr, 2 + processes
    assert output.count("run the same command again") == 1
    assert done.returncode == 75 if processes == 1 else "exitcode  : 75" in output
    assert state["state"] == "preempted" and state["step"] == step
    assert saved[-1] == f"step_{step:08}"


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
@every_script
def test_each_step_trains_on_the_same_samples_on_any_number_of_processes(name, processes, table):
    """Augmented in the same way; so each step has the same loss."""
    one, other = table.one(name), table.whole(name, processes, 2 if processes == 2 else 1)
    assert [step["step"] for step in one.steps] == list(range(1, STEPS + 1))
    assert one.steps == other.steps
    for a, b in zip(metrics(one.folder, "train"), metrics(other.folder, "train"), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-4)
        assert a["lr"] == b["lr"]


@every_script
def test_each_epoch_has_each_sample_once_in_another_order(name, table):
    """A batch that is left over is left out; over time, that is not always the same."""
    samples, changes = SCRIPTS[name].samples, SCRIPTS[name].changes
    steps = [step["ids"] for step in table.one(name).steps]
    orders = [[sample for step in steps[i : i + EPOCH] for sample in step] for i in (0, EPOCH, 8)]
    for order in orders:
        assert len({number for number, _ in order}) == len(order)
    first, second = (dict(order) for order in orders[:2])
    assert len(first) == len(second) == EPOCH * len(steps[0]) < samples
    numbers = [[number for number, _ in order] for order in orders]
    assert numbers[0] != numbers[1] and numbers[1][: len(numbers[2])] != numbers[2]
    offset = min(first | second)
    assert (first | second).keys() == set(range(offset, offset + samples))
    changed = [first[number] != second[number] for number in first.keys() & second.keys()]
    assert mean(changed) > 0.9 if changes else not any(changed)


@every_script
def test_one_and_two_processes_evaluate_each_held_out_sample_once(name, table):
    one, two = table.one(name), table.whole(name, 2, 2)
    for kind, size in SCRIPTS[name].counted.items():
        for folder in (one.folder, two.folder):
            found = results(folder)[kind]
            if kind.endswith("accuracy"):  # of prime numbers no other share is such a fraction
                assert found * size == pytest.approx(round(found * size), abs=1e-9)
            else:
                assert found == size
    expected = held_out_results(two.folder)
    assert held_out_results(one.folder) == pytest.approx(expected, rel=1e-4)
    lines = [[line for line in metrics(run.folder, "val") if line["step"]] for run in (one, two)]
    assert [line["step"] for line in lines[0]] == [4, 8, STEPS]
    for a, b in zip(*lines, strict=True):
        assert numbers(a) == pytest.approx(numbers(b), rel=1e-4)


@pytest.mark.parametrize("processes", [1, 2])
@every_script
def test_logs_the_loss_of_the_global_batch_once_per_due_step(name, processes, table):
    whole = table.one(name) if processes == 1 else table.whole(name, 2, 2)
    lines, batch = metrics(whole.folder, "train"), len(whole.steps[0]["ids"])
    assert [line["step"] for line in lines] == [2, 4, 6, 8, 10, STEPS]
    combine = sum if name == "train_lm" else mean  # parts with their shares of all targets
    for line in lines:
        losses = whole.losses[line["step"] - 1]
        assert len(losses) == processes * whole.accumulation
        assert line["loss"] == pytest.approx(combine(losses), rel=1e-6)
    rates = [line["lr"] for line in lines]  # of the next step
    if name == "train_minimal":
        assert set(rates) == {0.005}
    else:
        assert rates[-1] == pytest.approx(0, abs=1e-12) and min(rates[:-1]) > 0
    result = results(whole.folder)
    assert (result["global_step"], result["samples_seen"]) == (STEPS, STEPS * batch)
    assert (result["num_processes"], result["resumed_from"]) == (processes, 0)
    assert status(whole.folder)["state"] == "finished"


@every_script
def test_clips_the_gradient_of_the_whole_batch(name, table):
    if name == "train_minimal":
        pytest.skip("it has no --max_grad_norm")
    runs = (table.one(name), table.whole(name, 2, 2))
    norms = [[line["grad_norm"] for line in metrics(run.folder, "train")] for run in runs]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3) and max(norms[0]) > 0.5


@every_script
def test_a_finished_run_is_left_alone_and_trains_longer(name, table, tmp_path):
    one, folder = table.one(name), tmp_path / "run"
    shutil.copytree(one.folder, folder, ignore=shutil.ignore_patterns(".lock"))

    def files():
        paths = [path for path in folder.rglob("*") if path.name != ".lock"]
        return {path: path.stat().st_mtime_ns for path in paths}

    before = files()
    done = run(None, f"scripts/{name}.py", one.arguments, output_dir=folder)
    assert "already finished" in done.stdout and files() == before
    assert "run the same command with a larger" in done.stdout
    longer = f"{one.arguments} --max_train_steps {STEPS + 2}"
    steps, _ = recorded(name, longer, folder, accumulation=one.accumulation)
    assert [step["step"] for step in steps] == [STEPS + 1, STEPS + 2]
    before = {number for step in one.steps[2 * EPOCH :] for number, _ in step["ids"]}
    assert before.isdisjoint(number for number, _ in steps[0]["ids"])  # the last of their epoch
    result = results(folder)
    assert (result["global_step"], result["resumed_from"]) == (STEPS + 2, STEPS)
    logged = [line["step"] for line in metrics(folder, "train")]
    assert logged == [2, 4, 6, 8, 10, STEPS, STEPS + 1, STEPS + 2]
