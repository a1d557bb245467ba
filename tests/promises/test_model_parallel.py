"""train_model_parallel.py: the number of stages changes no result."""

import pytest
from harness.launches import metrics, run
from safetensors.torch import load_file

SCRIPT = "scripts/train_model_parallel.py"
ARGUMENTS = (
    "--dataset synthetic --width 8 --batch_size 32 --micro_batches 2 --max_train_steps 6 "
    "--log_every 1 --eval_every 6 --track none"
)


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    """The folder of a run with two stages."""
    folder = tmp_path_factory.mktemp("model_parallel")
    run(None, SCRIPT, ARGUMENTS, output_dir=folder)
    return folder


@pytest.mark.slow
def test_the_number_of_stages_changes_no_result(split, tmp_path):
    """Up to rounding: with other micro-batch sizes, gradients are added in another order."""
    other = f"{ARGUMENTS} --devices_per_process 1 --micro_batches 1"
    run(None, SCRIPT, other, output_dir=tmp_path)
    names = [load_file(folder / "model.safetensors").keys() for folder in (tmp_path, split)]
    assert names[0] == names[1]
    for a, b in zip(metrics(tmp_path, "train"), metrics(split, "train"), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
