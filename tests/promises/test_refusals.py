"""What passes the parser but cannot be trained is one line, before anything is written."""

import json

import pytest
from harness.launches import CIFAR, GPT, run

MINIMAL, IMAGES = "scripts/train_minimal.py", "scripts/train_images.py"
PARALLEL = "scripts/train_model_parallel.py"


@pytest.mark.parametrize(
    ("script", "arguments", "says"),
    [
        (MINIMAL, "--batch_size 1048576", "--batch_size 1048576 is more than the 2880 training"),
        (GPT, "--dataset synthetic --batch_size 1048576", "is more than the"),
        (IMAGES, "--dataset synthetic --model alexnet --train_size 24", "not a size for alexnet"),
        (CIFAR, "--dataset synthetic --batch_size 1", "batch norm needs more than the one sample"),
        (
            IMAGES,
            "--dataset synthetic --model resnet18 --image_size 32 --batch_size 4 "
            "--gradient_accumulation_steps 4",
            "batch norm needs more than the one sample",
        ),
        (PARALLEL, "--dataset synthetic --width 12", "--width 12 is not a multiple of 8"),
    ],
)
def test_what_cannot_be_trained_is_refused(script, arguments, says, tmp_path):
    done = run(None, script, arguments, output_dir=tmp_path / "run", check=False)
    errors = [line for line in done.stderr.splitlines() if not line.startswith("***")]
    assert done.returncode == 2 and len(errors) == 1 and says in errors[0], done.stderr
    assert not (tmp_path / "run" / "args.json").exists()


def test_the_greatest_seed_and_timeout_train_and_the_record_holds_what_was_resolved(tmp_path):
    (tmp_path / "a.args").write_text("--lr 0.01\n--max_train_steps 3\n")
    greatest = ["--seed", str(2**32 - 1), "--timeout", str(30 * 24 * 3600)]
    words = [f"@{tmp_path}/a.args", "--max_train_steps", "2", *greatest]
    run("2cpu", MINIMAL, words, output_dir=tmp_path / "run")
    recorded = json.loads((tmp_path / "run" / "args.json").read_text())["arguments"]
    assert (recorded["lr"], recorded["max_train_steps"]) == (0.01, 2)
