"""Nothing from outside is trusted, and systems may lack what is usual."""

import os
import subprocess

import pytest
from harness.launches import LIMIT, command, status

MINIMAL = "scripts/train_minimal.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    "start",
    [
        "ulimit -n 64; unset HOME; exec",  # few files may be open, and there is no home
        "exec unshare --user --map-user=54321",  # a user without a name, as in a container
    ],
)
def test_a_system_that_lacks_what_is_usual(start, tmp_path):
    if "unshare" in start and subprocess.run(["sh", "-c", f"{start} true"]).returncode:
        pytest.skip("no user namespaces here")
    words = " ".join(command(None, MINIMAL, "--max_train_steps 20", output_dir=tmp_path / "run"))
    done = subprocess.run(["sh", "-c", f"{start} {words}"], capture_output=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    assert status(tmp_path / "run")["state"] == "finished"


@pytest.mark.slow
def test_a_folder_whose_name_is_not_text_is_refused_at_the_start(tmp_path):
    """safetensors could not write the weights there, after all the training."""
    folder = os.fsencode(tmp_path) + b"/caf\xe9"
    words = command(None, MINIMAL, "--max_train_steps 20")
    done = subprocess.run([*words, "--output_dir", folder], capture_output=True, timeout=LIMIT)
    assert done.returncode == 2 and done.stderr.count(b"error: argument --output_dir: ") == 1
    assert b"bytes that are not UTF-8" in done.stderr and not os.listdir(tmp_path)
