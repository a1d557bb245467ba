"""What is said when memory runs out."""

import sys
from types import SimpleNamespace

import pytest
import torch

from utils.run import failures, memory


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    for name, value in (("_ways", []), ("_micro_batch_size", None), ("_folder", None)):
        monkeypatch.setattr(memory, name, value)


def test_what_lowers_memory_depends_on_the_script_and_comes_cheapest_first(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    args = SimpleNamespace(
        gradient_accumulation_steps=2, activation_checkpointing=False, lora_rank=0
    )
    memory.remember(args, shards=True)
    line = memory.message(3, "why")
    words = ["--gradient", "--activation", "--lora_rank 16", "FSDP", "--batch_size", "(why)"]
    places = [line.index(word) for word in words]
    assert places == sorted(places) and "bf16" not in line
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    args.activation_checkpointing, args.lora_rank = True, 8
    memory.remember(args, shards=False)
    line = memory.message(3, "why")
    assert "bf16" in line and not any(word in line for word in ("--activation", "--lora", "FSDP"))
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "")
    memory.remember(args, shards=False)
    assert "bf16" in memory.message(3, "why")
    memory.remember(SimpleNamespace(), shards=False)
    assert "--gradient" not in memory.message(3, "why")


def test_the_memory_of_a_gpu_and_its_snapshot_are_named(tmp_path, monkeypatch):
    written = []
    gpu = SimpleNamespace(
        is_initialized=lambda: True,
        memory_allocated=lambda: 3 * 2**29,
        memory_reserved=lambda: 2**31,
        current_device=lambda: 1,
        get_device_properties=lambda device: SimpleNamespace(total_memory=2**35 if device else 0),
        memory=SimpleNamespace(_dump_snapshot=written.append),
    )
    monkeypatch.setattr(torch, "cuda", gpu)
    path = f"{tmp_path}/memory_rank_2.pickle"
    usage = "(1.5 GiB in tensors, 2.0 reserved, of 32.0"
    assert f"{usage})" in memory.message(2, "") and not written  # there is no folder yet
    memory.remember_folder(tmp_path)
    assert f"{usage}; {path} for pytorch.org/memory_viz)" in memory.message(2, "")
    assert written == [path]

    def full(path):
        raise OSError("no space left")

    gpu.memory._dump_snapshot = full
    assert f"{usage})" in memory.message(2, "")
    gpu.is_initialized = lambda: False
    assert "GiB" not in memory.message(2, "")
    monkeypatch.delitem(sys.modules, "torch")
    assert "GiB" not in memory.message(2, "")


def test_processes_that_the_kernel_ended_are_counted(tmp_path):
    own, job = tmp_path / "own", tmp_path / "groups" / "slurm" / "job_7"
    job.mkdir(parents=True)
    own.write_text("3:cpu:/other\n0::/slurm/job_7/step\n")
    assert memory.kills(tmp_path / "groups", own) == 0
    (job / "memory.events").write_text("low 0\noom 5\noom_kill 2\noom_group_kill 0\n")
    assert memory.kills(tmp_path / "groups", own) == 2
    (job / "memory.events").write_text("low 0\n")
    assert memory.kills(tmp_path / "groups", own) == 0
    (job / "memory.events").write_text("oom_kill many\n")
    assert memory.kills(tmp_path / "groups", own) == 0
    assert memory.kills(tmp_path / "groups", tmp_path / "nowhere") == 0
    (tmp_path / "groups" / "memory.events").write_text("oom_kill 4\n")  # of the root
    own.write_text("0::/elsewhere\n")
    assert memory.kills(tmp_path / "groups", own) == 4
    own.write_text("3:memory:/other\n")  # version 1
    assert memory.kills(tmp_path / "groups", own) == 0


def test_a_process_that_the_kernel_ended_is_said_to_be(monkeypatch):
    error = RuntimeError("[/src/gloo/transport/tcp/pair.cc:544] Connection closed by peer [::1]:4")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(memory, "kills", lambda: memory.KILLS_BEFORE)
    assert "which has ended (the launcher's report names it)" in failures.describe(error)
    monkeypatch.setattr(memory, "kills", lambda: memory.KILLS_BEFORE + 1)
    assert "which the kernel ended because the machine" in failures.describe(error)
