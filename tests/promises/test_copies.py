"""Users start a project with `cp -r scripts/X.py utils/ ~/my_project/`: every script must run there
unchanged.
"""

import re
import shutil
import subprocess

import pytest
from harness.launches import ROOT, final_weights, results, run, some_slow

# Arguments for a short run of each script. A new script needs an entry here.
ARGUMENTS = {
    "chaos": "--help",
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
    "train_lm": "--block_size 128 --batch_size 8 --dry_run",
    "train_minimal": "--epochs 1 --output_dir {project}/minimal",
    "train_model_parallel": "--dataset synthetic --width 8 --batch_size 32 --micro_batches 2 --dry_run",
}
# Scripts that they import, and scripts that have to run before.
COMPANIONS = {
    "evaluate": ["train_cifar"],
    "baselines": ["train_cifar", "train_gpt"],
    "benchmark": ["train_cifar", "train_gpt", "baselines"],
}
BEFORE = {"compare_runs": ["train_cifar", "train_minimal"], "evaluate": ["train_cifar"]}


@pytest.mark.parametrize(
    "script",
    some_slow(
        sorted(path.stem for path in (ROOT / "scripts").glob("*.py")),
        # `evaluate` runs the second, too.
        *("compare_runs", "train_cifar", "train_images", "train_lm"),
    ),
)
def test_a_copied_script_runs(script, tmp_path):
    project = tmp_path / "project"
    shutil.copytree(ROOT / "utils", project / "utils", ignore=shutil.ignore_patterns("__pycache__"))
    for name in {*COMPANIONS.get(script, []), *BEFORE.get(script, []), script}:
        shutil.copy(ROOT / "scripts" / f"{name}.py", project)
    for name in [*BEFORE.get(script, []), script]:
        arguments = ARGUMENTS[name].format(project=project)
        out = (
            None
            if "--output_dir" in arguments or name in ("baselines", "benchmark", "chaos")
            else tmp_path / name
        )
        config = "cpu" if name.startswith(("train_", "compare_ddp", "check_")) else None
        run(config, f"{name}.py", arguments, root=project, output_dir=out)


def test_a_copy_of_the_smallest_script_needs_one_folder(tmp_path):
    """utils/run: by the commands of the README, inside the repository, whose library it ignores."""
    commands = re.findall(
        r"^       (mkdir .*\n       cp .*)", (ROOT / "README.md").read_text(), re.M
    )
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("utils", "accelerate_configs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/train_minimal.py", "requirements.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    subprocess.run(["bash", "-ec", *commands], cwd=tmp_path, check=True)
    shutil.rmtree(tmp_path / "utils" / "run")
    project = tmp_path / "my_project"
    run("2cpu", "train_minimal.py", "--epochs 1", root=project, output_dir=tmp_path / "run")
    assert (tmp_path / "run" / "results.json").exists()
    assert (tmp_path / "run" / "README.md").exists()


DICT_MODEL = """
class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 2))

    def forward(self, inputs):
        return {"logits": self.layers(inputs["points"]), "unused": None}


def build_model():
    return Classifier()


def compute_loss(model, x, y):
    outputs = model({"points": x})
    return nn.functional.cross_entropy(outputs["logits"], y)


@torch.no_grad()
def evaluate(accelerator, model, loader, watch):
    model.eval()
    correct = []
    for _, x, y in loader:
        logits = model({"points": x})["logits"]
        correct.append(accelerator.gather_for_metrics(logits.argmax(1) == y))
    model.train()
    return {"accuracy": torch.cat(correct).double().mean().item()}


def main():"""


@pytest.mark.parametrize("processes", some_slow([1, 2, 4], 1, 4))
def test_a_model_with_dictionaries_and_dropout_trains_and_resumes(processes, tmp_path):
    """What a copier changes must not work on two processes and crash on four."""
    source = (ROOT / "scripts" / "train_minimal.py").read_text()
    script = tmp_path / "mine.py"
    script.write_text(source.replace("\ndef main():", DICT_MODEL, 1))
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "utils", tmp_path / "utils", ignore=ignored)
    words = ["--max_train_steps", "24", "--checkpoint_every", "8"]
    options = dict(launcher=("--num_processes", str(processes)), root=ROOT)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run("2cpu", str(script), words, output_dir=whole, **options)
    wrapped = ["die_in_step@11", str(script), *words]
    done = run(
        "2cpu", "tests/harness/wrapped.py", wrapped, output_dir=killed, check=False, **options
    )
    assert done.returncode != 0
    run("2cpu", str(script), words, output_dir=killed, **options)
    assert results(killed)["resumed_from"] == 8 and results(whole)["num_processes"] == processes
    assert final_weights(killed) == final_weights(whole)
