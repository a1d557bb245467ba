"""Every usual way to start a script works, with the same results."""

import pytest
from accelerate.utils import write_basic_config
from harness.launches import ROOT, final_weights, results, run, run_once

MINIMAL = "scripts/train_minimal.py"
SHORT = "--epochs 1 --max_train_steps 3"
NOTEBOOK = """
import sys
from accelerate import notebook_launcher
sys.path.insert(0, {scripts!r})
sys.argv = {words!r}
import train_minimal
notebook_launcher(train_minimal.main, num_processes=1)
"""
WAYS = {
    "torchrun": "-m torch.distributed.run --nproc_per_node 2",
    "accelerate without a file": "-m accelerate.commands.accelerate_cli launch",
    "accelerate config": "",
    "notebook": "",
}


def start(way, folder, tmp_path):
    """Starts the script in one of the ways."""
    if way == "notebook":
        words = ["train_minimal.py", *SHORT.split(), "--output_dir", str(folder)]
        cell = tmp_path / "cell.py"
        cell.write_text(NOTEBOOK.format(scripts=str(ROOT / "scripts"), words=words))
        run(None, cell.name, root=tmp_path)
        return
    config = None
    if way == "accelerate config":
        config = tmp_path / "default" / "made.yaml"
        write_basic_config(save_location=str(config))  # what `accelerate config default` writes
    run(config, MINIMAL, SHORT, output_dir=folder, launcher=WAYS[way].split())


@pytest.fixture(scope="module")
def expected(made_once):
    """The weights of the run of one process that Python starts."""
    return final_weights(run_once(made_once, "launchers", None, MINIMAL, SHORT).folder)


@pytest.mark.parametrize("way", WAYS)
def test_a_way_to_start_a_script(way, expected, tmp_path):
    start(way, tmp_path / "run", tmp_path)
    assert results(tmp_path / "run")["global_step"] == 3
    assert results(tmp_path / "run")["num_processes"] == (2 if way == "torchrun" else 1)
    assert way == "torchrun" or final_weights(tmp_path / "run") == expected
