"""Users start a project with `cp -r scripts/X.py utils/ ~/my_project/`: every script must run there
unchanged, and has marked places to edit.
"""

import re
import shutil
import subprocess

import pytest
from harness.launches import ROOT, run, script_file, some_slow

# Arguments for a short run of each script. A new script needs an entry here.
ARGUMENTS = {
    "chaos": "--help",
    "measuring": 'cifar.plain_cifar --options {{"model":"net","batch_size":16,"steps":3}}',
    "benchmark": "--help",
    "check_topology": "--max_bytes 4096",
    "compare_runs": "{project}/cifar_dry_run {project}/minimal --metric accuracy",
    "compare_ddp": "--dataset synthetic --max_train_steps 3 --batch_size 8",
    "evaluate": "{project}/cifar_dry_run",
    "predict_scaling": "--parameters 1e6 --step_seconds 0.1 --latency 1e-5 --bandwidth 1e9",
    "train_cifar": "--dataset synthetic --model net --dry_run --output_dir {project}/cifar",
    "train_gpt": "--dataset synthetic --n_layer 1 --n_head 1 --n_embd 16 --block_size 16 "
    "--batch_size 8 --dry_run",
    "train_images": "--dataset synthetic --model squeezenet1_1 --image_size 32 --batch_size 8 "
    "--dry_run",
    "train_lm": "--block_size 128 --batch_size 8 --dry_run",
    "train_minimal": "--epochs 1 --output_dir {project}/minimal",
    "train_model_parallel": "--dataset synthetic --width 8 --batch_size 32 --micro_batches 2 "
    "--dry_run",
}
# Modules of benchmark.py.
BENCHMARKS = sorted(path.stem for path in (ROOT / "scripts/benchmarks").glob("*.py"))
# Scripts that they import, and scripts that have to run before.
COMPANIONS = {
    "evaluate": ["train_cifar"],
    "measuring": ["train_cifar", "train_gpt", *BENCHMARKS],
    "benchmark": ["train_cifar", "train_gpt", *BENCHMARKS],
    "compare_ddp": ["train_cifar"],
}
BEFORE = {"compare_runs": ["train_cifar", "train_minimal"], "evaluate": ["train_cifar"]}
PROGRAMS = [*(ROOT / "scripts").glob("*.py"), *(ROOT / "scripts" / "tools").glob("*.py")]
SCRIPTS = sorted({"measuring", "benchmark", *(path.stem for path in PROGRAMS)})


def project_with(folder, *scripts, library="utils"):
    """Copies scripts and the library to `folder`, as a user does."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / library, folder / library, ignore=ignored)
    for name in scripts:
        shutil.copy(script_file(name), folder)
    return folder


LONG = ("compare_ddp", "compare_runs", "train_images", "train_lm", "train_model_parallel")


# `evaluate` runs train_cifar.py, too, and `compare_runs` train_minimal.py.
@pytest.mark.parametrize(
    "script", some_slow([name for name in SCRIPTS if name != "train_cifar"], *LONG)
)
def test_a_copied_script_runs(script, tmp_path):
    needed = {*COMPANIONS.get(script, []), *BEFORE.get(script, []), script}
    project = project_with(tmp_path / "project", *needed)
    for name in [*BEFORE.get(script, []), script]:
        arguments = ARGUMENTS[name].format(project=project)
        chosen = "--output_dir" in arguments or name in ("measuring", "benchmark", "chaos")
        config = "cpu" if name.startswith(("train_", "compare_ddp", "check_")) else None
        out = None if chosen else tmp_path / name
        run(config, f"{name}.py", arguments, root=project, output_dir=out)


def test_a_copy_of_the_smallest_script_needs_one_folder(tmp_path):
    """utils/run: by the commands of the README, inside the repository, whose library it ignores."""
    readme = (ROOT / "README.md").read_text()
    commands = re.findall(r"^       (mkdir .*\n       cp .*)", readme, re.M)
    project_with(tmp_path)
    project_with(tmp_path / "scripts", "train_minimal", library="accelerate_configs")
    shutil.move(tmp_path / "scripts" / "accelerate_configs", tmp_path)
    shutil.copy(ROOT / "requirements.txt", tmp_path)
    subprocess.run(["bash", "-ec", *commands], cwd=tmp_path, check=True)
    shutil.rmtree(tmp_path / "utils" / "run")
    project = tmp_path / "my_project"
    run("2cpu", "train_minimal.py", "--epochs 1", root=project, output_dir=tmp_path / "run")
    assert (tmp_path / "run" / "results.json").exists()


@pytest.mark.parametrize("script", [name for name in SCRIPTS if name.startswith("train_")])
def test_the_places_to_edit_are_marked_in_every_script(script):
    source = (ROOT / "scripts" / f"{script}.py").read_text()
    marks = re.findall(r"  # EDIT: (\w+)", source)
    more = {"train_minimal": {"batch", "defaults", "optimizer"}, "train_images": {"defaults"}}
    assert set(marks) == {"data", "loss", "metric", "model"} | more.get(script, set())
    # The metric that is the score is named in the loop, too, if the script has a score.
    in_the_loop = "score=metrics[" in source and script == "train_minimal"
    assert marks.count("metric") == 1 + in_the_loop


def test_a_change_of_the_script_is_said(tmp_path):
    """A finished run has nothing to do, and says so: that would hide the change."""
    project = project_with(tmp_path, "train_minimal")

    def again(steps, **options):
        words = ("train_minimal.py", f"--max_train_steps {steps}")
        return run(None, *words, root=project, output_dir=project / "run", **options)

    assert "has changed" not in again(2).stdout + again(2).stdout
    done = run(None, "scripts/evaluate.py", [str(project / "run")], check=False)
    assert done.returncode == 2 and "train_gpt.py or train_lm.py, but 'minimal'" in done.stderr
    copy = project / "train_minimal.py"
    source = copy.read_text().replace("nn.Linear(64, 64)", "nn.Linear(64, 32)")
    copy.write_text(source.replace("Linear(64, 2)", "Linear(32, 2)"))
    done = again(2)
    says = "train_minimal.py has changed since this run started: use another --output_dir"
    assert says in done.stdout and "finished" in done.stdout
    done = again(4, check=False)
    assert done.returncode == 2 and "size mismatch for 2.weight" in done.stderr
    assert "use another --output_dir" in done.stderr
