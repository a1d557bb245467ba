"""What passes the parser but cannot be trained is one line, before anything is written."""

import json

import pytest
from harness.launches import CIFAR, run

MINIMAL, PARALLEL = "scripts/train_minimal.py", "scripts/train_model_parallel.py"

SYNTHETIC = "--dataset synthetic"
NET = f"{SYNTHETIC} --model net"
REFUSED = [
    (MINIMAL, "--batch_size 1048576", "--batch_size 1048576 is more than the 2880 training"),
    (MINIMAL, "--batch_size \x1b[31m", "argument --batch_size: "),  # its letters are not colors
    (CIFAR, f"{NET} --batch_size 7 --gradient_accumulation_steps 2", "use 6 or 8"),
    (CIFAR, f"{SYNTHETIC} --batch_size 1", "batch norm needs more than the one sample"),
    (CIFAR, f"{NET} --patience 2", "--patience needs held-out images"),
    (CIFAR, f"{NET} --track tensorboard,mlflow", "--track mlflow: not known, or not installed"),
    (CIFAR, f"{NET} --init_from /nowhere --resume /nowhere/step_1", "give only one of them"),
    (PARALLEL, f"{SYNTHETIC} --width 12", "--width 12 is not a multiple of 8"),
    (PARALLEL, f"{SYNTHETIC} --width 8 --micro_batches 3", "--micro_batches 3 does not divide"),
]


@pytest.mark.parametrize(("script", "arguments", "says"), REFUSED)
def test_what_cannot_be_trained_is_refused(script, arguments, says, tmp_path):
    done = run(None, script, arguments, output_dir=tmp_path / "run", check=False)
    errors = [line for line in done.stderr.splitlines() if not line.startswith("***")]
    assert done.returncode == 2 and len(errors) == 1 and says in errors[0], done.stderr
    assert "\x1b" not in errors[0] and not (tmp_path / "run" / "args.json").exists()


# safetensors could not write the weights to the last one, after all the training.
@pytest.mark.parametrize("output_dir", ["/proc/nowhere", "{folder}/a.txt", "{folder}/caf\udce9"])
def test_a_folder_that_cannot_be_written_is_refused(output_dir, tmp_path):
    (tmp_path / "a.txt").touch()
    folder = output_dir.format(folder=tmp_path)
    done = run(None, MINIMAL, "", output_dir=folder, check=False)
    assert done.returncode == 2 and done.stderr.count("error: ") == 1, done.stderr
    assert "--output_dir" in done.stderr and len(list(tmp_path.iterdir())) == 1


def test_the_greatest_seed_and_timeout_train_and_the_record_holds_what_was_resolved(tmp_path):
    (tmp_path / "a.args").write_text("--lr 0.01\n--max_train_steps 3\n")
    greatest = ["--seed", str(2**32 - 1), "--timeout", str(30 * 24 * 3600)]
    words = [f"@{tmp_path}/a.args", "--max_train_steps", "2", *greatest]
    run("2cpu", MINIMAL, words, output_dir=tmp_path / "run")
    recorded = json.loads((tmp_path / "run" / "args.json").read_text())["arguments"]
    assert (recorded["lr"], recorded["max_train_steps"]) == (0.01, 2)
