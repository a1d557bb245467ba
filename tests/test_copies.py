"""Users start a project with `cp -r scripts/X.py utils/ ~/my_project/`: every script must run there unchanged."""

import shutil

import pytest
from conftest import ROOT, run

# Arguments for a short run of each script. A new script needs an entry here.
ARGUMENTS = {
    "baselines": 'plain_cifar --options {{"model":"net","batch_size":16,"steps":3}}',
    "benchmark": "--help",
    "check_topology": "--max_bytes 4096",
    "compare_runs": "{project}/cifar_dry_run {project}/minimal --metric accuracy",
    "compare_ddp": "--dataset synthetic --max_train_steps 3 --batch_size 8",
    "evaluate": "--checkpoint {project}/cifar_dry_run",
    "predict_scaling": "--parameters 1e6 --step_seconds 0.1 --latency 1e-5 --bandwidth 1e9",
    "train_cifar": "--dataset synthetic --model net --dry_run --output_dir {project}/cifar",
    "train_gpt": "--dataset synthetic --n_layer 1 --n_head 1 --n_embd 16 --block_size 16 --batch_size 8 --dry_run",
    "train_images": "--dataset synthetic --model squeezenet1_1 --image_size 32 --batch_size 8 --dry_run",
    "train_minimal": "--epochs 1 --output_dir {project}/minimal",
    "train_model_parallel": "--dataset synthetic --width 8 --batch_size 32 --micro_batches 2 --dry_run",
}
# Scripts that they import, and scripts that have to run before.
COMPANIONS = {
    "evaluate": ["train_cifar", "train_images"],
    "baselines": ["train_cifar", "train_gpt"],
    "benchmark": ["train_cifar", "train_gpt", "baselines"],
}
BEFORE = {"compare_runs": ["train_cifar", "train_minimal"], "evaluate": ["train_cifar"]}


@pytest.mark.parametrize("script", sorted(path.stem for path in (ROOT / "scripts").glob("*.py")))
def test_a_copied_script_runs(script, tmp_path):
    project = tmp_path / "project"
    shutil.copytree(ROOT / "utils", project / "utils", ignore=shutil.ignore_patterns("__pycache__"))
    for name in {*COMPANIONS.get(script, []), *BEFORE.get(script, []), script}:
        shutil.copy(ROOT / "scripts" / f"{name}.py", project)
    for name in [*BEFORE.get(script, []), script]:
        arguments = ARGUMENTS[name].format(project=project)
        out = None if "--output_dir" in arguments or name in ("baselines", "benchmark") else tmp_path / name
        config = "cpu" if name.startswith(("train_", "compare_ddp", "check_")) else None
        run(config, f"{name}.py", arguments, root=project, output_dir=out)
