"""Every usual way to start a script works, with the same results."""

import pytest
from accelerate.utils import write_basic_config
from harness.launches import ROOT, final_weights, results, run

MINIMAL = "scripts/train_minimal.py"
TRAINING = ("train_cifar", "train_gpt", "train_images", "train_minimal", "train_model_parallel")
SHORT = {
    "train_cifar": "--dataset synthetic --model net",
    "train_gpt": "--dataset synthetic --n_layer 1 --n_head 1 --n_embd 16 --block_size 16 --batch_size 8",
    "train_images": "--dataset synthetic --model squeezenet1_1 --image_size 32 --batch_size 8 --num_workers 0",
    "train_minimal": "--epochs 1",
    "train_model_parallel": "--dataset synthetic --width 8 --batch_size 32 --micro_batches 2",
}
NOTEBOOK = """
import sys
from accelerate import notebook_launcher
sys.path.insert(0, {scripts!r})
sys.argv = {words!r}
import {script}
notebook_launcher({script}.main, num_processes=1)
"""


def start(way, script, folder, tmp_path):
    """Starts a script in one of the ways; returns the completed process."""
    words = [*SHORT[script].split(), "--max_train_steps", "3"]
    path = f"scripts/{script}.py"
    if way == "notebook":
        words = [f"{script}.py", *words, "--output_dir", str(folder)]
        cell = tmp_path / "cell.py"
        cell.write_text(NOTEBOOK.format(scripts=str(ROOT / "scripts"), words=words, script=script))
        return run(None, cell.name, root=tmp_path)
    launcher = {
        "python": (),
        "torchrun": ("-m", "torch.distributed.run", "--nproc_per_node", "2"),
        "accelerate without a file": ("-m", "accelerate.commands.accelerate_cli", "launch"),
    }
    if way == "accelerate config":
        made = tmp_path / "default" / "made.yaml"
        write_basic_config(save_location=str(made))  # what `accelerate config default` writes
        return run(str(made), path, words, output_dir=folder)
    return run(None, path, words, output_dir=folder, launcher=launcher[way])


WAYS = ("python", "torchrun", "accelerate without a file", "accelerate config", "notebook")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "script", [pytest.param(s, marks=[pytest.mark.slow] * (s != "train_minimal")) for s in TRAINING]
)
def test_a_way_to_start_a_script(script, way, tmp_path):
    start(way, script, tmp_path / "run", tmp_path)
    assert results(tmp_path / "run")["global_step"] == 3
    assert results(tmp_path / "run")["num_processes"] == (2 if way == "torchrun" else 1)
    if way != "torchrun" and script == "train_minimal":
        run("cpu", MINIMAL, "--epochs 1 --max_train_steps 3", output_dir=tmp_path / "again")
        assert final_weights(tmp_path / "run") == final_weights(tmp_path / "again")
