"""Nothing from outside is trusted: names, manifests, links; and systems that lack what is usual."""

import json
import os
import random
import socket
import stat
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from harness.launches import LIMIT, command, run, status

from utils import plots
from utils.run import checkpoint, cpu, failures, files, manifest, output
from utils.run.failures import UserError

MINIMAL = "scripts/train_minimal.py"
NAMES = [
    "$\\frac{1}{$",
    "back`tick` *bold* <b>",
    "\x1b[31mred\nnext",
    "\u202egpj.exe",
    "pipe | [link](x) # head",
    "\udce9t\udce9",
]


# --------------------------------------------------------------------------------------- names


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_one_line_wherever_it_is_shown(name):
    for escape in (output.one_line, output.for_markdown, output.for_plot):
        escaped = escape(name)
        assert escaped.isprintable() and escaped.encode()
    assert str(UserError(f"class {name}")) == f"class {output.one_line(name)}"


def test_escapes_show_what_was_there():
    assert output.one_line("a\tb\x1b\x85é 中") == r"a\tb\x1b\x85é 中"
    assert output.for_markdown("a_b|c`d`<e>") == r"a\_b\|c\`d\`&lt;e&gt;"
    assert output.for_plot("$x$") == r"\$x\$"


def test_plots_draw_any_name(tmp_path, capsys):
    """`$` would start a formula, and each letter that a font lacks would be a warning."""
    names = [*NAMES, "猫", "कुत्ता"]
    count = len(names)
    images = torch.zeros(count, 3, 8, 8, dtype=torch.uint8)
    labels = torch.arange(count)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert plots.image_grid(tmp_path / "a.png", images, labels, labels.roll(1), names)
        assert plots.confusion_matrix(tmp_path / "b.png", torch.eye(count).long(), names)
    assert (tmp_path / "a.png").exists() and (tmp_path / "b.png").exists()
    assert "\x1b" not in plots.class_table(labels, labels.roll(1), names)
    assert capsys.readouterr().err.count("\n") <= 1  # no font has some letter, said once


def test_letters_that_no_font_has_are_told_apart(capsys):
    """Boxes would be the same for all classes."""
    names, fonts = plots.drawable(["cat", "\U000f0123", "\U000f0124x"])  # private use
    assert names == ["cat", r"\uf0123", r"\uf0124x"] and fonts[0] == "DejaVu Sans"
    assert plots.shorten("a" * 14) == "a" * 14 and plots.shorten("a" * 15) == "a" * 13 + "…"


def test_an_extra_that_fails_is_one_line(capsys):
    with failures.optional("the plot"):
        raise RuntimeError("no letter\n\x1b[31m")
    line = capsys.readouterr().err
    assert line == "warning: the plot is missing (RuntimeError: no letter\\n\\x1b[31m)\n"
    with pytest.raises(KeyboardInterrupt), failures.optional("the plot"):
        raise KeyboardInterrupt


# ---------------------------------------------------------------------------------- checkpoints


@pytest.fixture
def saved(tmp_path):
    """A complete checkpoint with one file in a folder, as a sharded one has."""
    writing = tmp_path / "checkpoints" / ".writing"
    (writing / "shards").mkdir(parents=True)
    (writing / "shards" / "0.distcp").write_bytes(b"shard")
    one = type("Accelerator", (), dict(num_processes=1, process_index=0, is_local_main_process=1))
    described = manifest.hash_and_sync(one, writing)
    target = writing.with_name("step_00000003")
    record = {"progress": {"step": 3, "score": None, "best": None}, "arguments": {}}
    manifest.complete(writing, target, {**record, "files": described})
    assert manifest.verify(target)["progress"]["step"] == 3
    return target


def replace_by_link(path):
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


def add_fifo(path):
    os.mkfifo(path / "pipe")


def add_socket(path):
    here = os.getcwd()
    os.chdir(path)  # the path of a socket is short
    try:
        socket.socket(socket.AF_UNIX).bind("socket")
    finally:
        os.chdir(here)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda path: replace_by_link(path / "shards"), "shards is neither a file nor a folder"),
        (lambda path: replace_by_link(path / "shards" / "0.distcp"), "0.distcp is neither"),
        (lambda path: (path / "dangling").symlink_to("nowhere"), "dangling is neither"),
        (add_fifo, "pipe is neither"),
        (add_socket, "socket is neither"),
        (lambda path: (path / "optimizer.bin").write_bytes(b""), "is not in its manifest"),
        (lambda path: (path / "shards" / "0.distcp").unlink(), "0.distcp is missing"),
    ],
)
def test_a_checkpoint_has_only_the_files_that_were_saved(change, says, saved):
    change(saved)
    with pytest.raises(UserError, match=says):
        manifest.verify(saved)


def test_a_checkpoint_may_be_behind_a_link(saved, tmp_path):
    """A link to it is not a link in it."""
    (tmp_path / "link").symlink_to(saved)
    assert manifest.verify(tmp_path / "link")["progress"]["step"] == 3


@pytest.mark.parametrize("name", [".DS_Store", "._0.distcp", ".nfs0000001", "shards/Thumbs.db"])
def test_what_a_system_adds_is_ignored(name, saved):
    (saved / name).write_bytes(b"\0")
    assert manifest.verify(saved)


@pytest.mark.parametrize(
    "value",
    [
        [],
        "text",
        {"progress": [], "files": {}},
        {"progress": {"step": "3"}, "files": {}},
        {"progress": {"step": True}, "files": {}},
        {"progress": {"step": 3, "score": "high"}, "files": {}},
        {"progress": {"step": 3}, "files": []},
        {"progress": {"step": 3}, "files": {"a": 5}},
        {"progress": {"step": 3}, "files": {"a": {"size": 5}}},
        {"progress": {"step": 3}, "files": {}, "arguments": []},
    ],
)
def test_a_manifest_of_other_types_is_not_a_manifest(value, saved):
    (saved / "manifest.json").write_text(json.dumps(value))
    assert manifest.read(saved) is None and manifest.best([saved]) is None
    with pytest.raises(UserError, match="is not a checkpoint"):
        manifest.verify(saved)


@pytest.mark.parametrize("text", ["[" * 100_000, "\0", "", "{", '{"progress": NaN'])
def test_a_manifest_that_is_not_json(text, saved):
    (saved / "manifest.json").write_text(text)
    with pytest.raises(UserError, match=r"is not a checkpoint: .* is missing or unreadable$"):
        manifest.verify(saved)


def test_the_folder_of_a_run_is_no_checkpoint_but_has_one(saved):
    run = saved.parents[1]
    with pytest.raises(UserError, match=f"the newest one in it is {saved}"):
        manifest.verify(run)


def test_a_manifest_is_never_waited_for(saved):
    (saved / "manifest.json").unlink()
    os.mkfifo(saved / "manifest.json")
    assert manifest.read(saved) is None


def test_only_regular_files_are_read(tmp_path):
    (tmp_path / "link").symlink_to("/dev/null")
    for path in ("/dev/null", tmp_path / "link", tmp_path):
        with pytest.raises(UserError, match=r"is not a file, but a (device|folder)"):
            files.regular_file(path)
    (tmp_path / "file").write_text("{}")
    (tmp_path / "behind").symlink_to("file")
    assert files.read_json(tmp_path / "behind") == {}


@pytest.mark.parametrize("name", ["x" * 300, "x/" * 3000, "nul\0"])
def test_a_path_that_cannot_be_used_is_one_line(name, tmp_path):
    with pytest.raises(UserError):
        manifest.verify(tmp_path / name)
    with pytest.raises((UserError, FileNotFoundError)):
        files.regular_file(tmp_path / name)


@pytest.mark.parametrize("library", ["torch", "numpy", "random", None])
def test_random_states_that_were_not_restored_are_an_error(library, tmp_path):
    """Accelerate only logs that it could not restore them, and trains on with others."""
    torch.save(
        {
            "random_state": random.getstate(),
            "numpy_random_seed": np.random.get_state(),
            "torch_manual_seed": torch.get_rng_state(),
        },
        tmp_path / "random_states_0.pkl",
    )
    draw = {"torch": lambda: torch.rand(1), "numpy": np.random.rand, "random": random.random}
    draw.get(library, int)()
    checkpoint._check_random_states(tmp_path / "random_states_1.pkl")  # a process that is new
    if library is None:
        return checkpoint._check_random_states(tmp_path / "random_states_0.pkl")
    with pytest.raises(ValueError, match="could not be restored"):
        checkpoint._check_random_states(tmp_path / "random_states_0.pkl")


def test_a_changed_value_of_a_manifest_keeps_it_valid(saved):
    manifest.amend(saved, {"score": 0.5})
    assert manifest.verify(saved)["progress"] == {"step": 3, "score": 0.5, "best": None}


def test_an_old_checkpoint_that_cannot_be_deleted_is_tried_again(saved, monkeypatch, capsys):
    newer = saved.with_name("step_00000006")
    newer.mkdir()
    real = checkpoint.shutil.rmtree

    def rmtree(path, ignore_errors=False):
        if not ignore_errors:
            raise OSError(39, "Directory not empty")

    monkeypatch.setattr(checkpoint.shutil, "rmtree", rmtree)
    checkpoint._prune(saved.parent, 1, newer)
    assert "step_00000003 was not deleted (Directory not empty)" in capsys.readouterr().err
    assert [path.name for path in manifest.all_in(saved.parents[1])] == ["step_00000006"]
    monkeypatch.setattr(checkpoint.shutil, "rmtree", real)
    checkpoint._prune(saved.parent, 1, newer)
    assert [path.name for path in saved.parent.iterdir()] == ["step_00000006"]


# -------------------------------------------------------------------------------------- systems


@pytest.mark.parametrize(
    ("own", "quotas", "cores"),
    [
        (
            "0::/job/step\n",
            {"job/cpu.max": "250000 100000\n", "job/step/cpu.max": "max 100000"},
            2.5,
        ),
        ("0::/on/the/host\n", {"cpu.max": "100000 100000\n"}, 1.0),
        (
            "4:memory:/x\n3:cpu,cpuacct:/docker\n",
            {"cpu,cpuacct/docker/cpu.cfs_quota_us": "50000"},
            0.5,
        ),
        ("3:cpu,cpuacct:/docker\n", {"cpu,cpuacct/docker/cpu.cfs_quota_us": "-1"}, float("inf")),
        ("0::/\n", {}, float("inf")),
    ],
)
def test_the_quota_of_a_container_limits_the_cores(own, quotas, cores, tmp_path, monkeypatch):
    for name, text in quotas.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        if name.endswith("quota_us"):
            path.with_name("cpu.cfs_period_us").write_text("100000\n")
    (tmp_path / "own").write_text(own)
    assert cpu.quota(tmp_path / "cgroup", tmp_path / "own") == cores
    monkeypatch.setattr(cpu, "quota", lambda: cores)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    assert cpu.cores() == max(1, min(8, int(min(cores, 8))))


@pytest.mark.slow
def test_few_files_may_be_open_and_there_is_no_home(tmp_path):
    words = " ".join(command(None, MINIMAL, "--max_train_steps 20", output_dir=tmp_path / "run"))
    line = f"ulimit -n 64; unset HOME; exec {words}"
    environment = {name: value for name, value in os.environ.items() if name != "HOME"}
    done = subprocess.run(["sh", "-c", line], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert status(tmp_path / "run")["state"] == "finished"


@pytest.mark.slow
def test_a_user_without_a_name(tmp_path):
    """As in a container that runs with a user id that it does not know."""
    unshare = ["unshare", "--user", "--map-user=54321"]
    if subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("no user namespaces here")
    words = command(None, MINIMAL, "--max_train_steps 20", output_dir=tmp_path / "run")
    done = subprocess.run([*unshare, *words], capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_folder_whose_name_is_not_text_is_refused_at_the_start(tmp_path):
    """safetensors could not write the weights there, after all the training."""
    folder = os.fsencode(tmp_path) + b"/caf\xe9"
    words = command(None, MINIMAL, "--max_train_steps 20")
    done = subprocess.run([*words, "--output_dir", folder], capture_output=True, timeout=LIMIT)
    assert done.returncode == 2 and done.stderr.count(b"error: --output_dir") == 1, done.stderr
    assert b"is not valid UTF-8" in done.stderr and not os.listdir(tmp_path)


def test_new_files_have_the_usual_permissions(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    os.chmod(tmp_path / "file", 0o600)
    before = os.umask(0o022)
    try:
        files.set_usual_mode(tmp_path / "file")
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o644


@pytest.mark.parametrize("value", ["5\n6", "\x1b[31m", "５"])
def test_an_error_about_a_value_is_one_line(value, tmp_path):
    done = run(None, MINIMAL, ["--batch_size", value], output_dir=tmp_path / "run", check=False)
    lines = [line for line in done.stderr.splitlines() if line]
    assert done.returncode == 2 and len(lines) == 1 and lines[0].startswith("error: "), lines
    assert "\x1b" not in done.stderr and sys.executable
