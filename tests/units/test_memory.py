"""What `utils.run.memory` says when memory runs out."""

import sys
from types import SimpleNamespace

import pytest
import torch

from utils.run import failures, memory

ACCUMULATION = "a larger --gradient_accumulation_steps splits"
BF16 = "mixed_precision: bf16"
CHECKPOINTING = "--activation_checkpointing"
LORA = "--lora_rank 16"
FSDP = "an FSDP configuration"
SMALLER = "a smaller --batch_size"


@pytest.mark.parametrize(
    ("facts", "shards", "precision", "ways"),
    [
        (
            {"gradient_accumulation_steps": 2, "activation_checkpointing": False, "lora_rank": 0},
            True,
            "bf16",
            [ACCUMULATION, CHECKPOINTING, LORA, FSDP, SMALLER],
        ),
        ({"activation_checkpointing": True, "lora_rank": 8}, False, "no", [BF16, SMALLER]),
        ({}, False, "", [BF16, SMALLER]),
        ({}, False, None, [BF16, SMALLER]),
        ({}, False, "fp16", [SMALLER]),
    ],
)
def test_what_lowers_memory_depends_on_the_script_and_comes_cheapest_first(
    facts, shards, precision, ways, monkeypatch
):
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    if precision is not None:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
    memory.remember(SimpleNamespace(**facts), shards)
    memory.remember_micro_batch_size(250)
    before, _, rest = memory.message(3, "why").partition(". What lowers it, cheapest first: ")
    assert before == "out of memory on rank 3, which computes 250 samples at a time"
    said = rest.removesuffix(" (why)").split("; ")
    assert len(said) == len(ways) and rest.endswith(" (why)")
    assert all(one.startswith(way) for one, way in zip(said, ways, strict=True)), said


def test_the_memory_of_a_gpu_and_its_snapshot_are_named(tmp_path, monkeypatch):
    def write(path):
        with open(path, "w") as file:
            file.write("a snapshot")

    gpu = SimpleNamespace(
        is_initialized=lambda: True,
        memory_allocated=lambda: 3 * 2**29,
        memory_reserved=lambda: 2**31,
        current_device=lambda: 1,
        get_device_properties=lambda device: SimpleNamespace(total_memory=2**35 if device else 0),
        memory=SimpleNamespace(**{"_dump_snapshot": write}),
    )
    monkeypatch.setattr(torch, "cuda", gpu)
    usage = "samples at a time (1.5 GiB in tensors, 2.0 reserved, of 32.0"
    memory.remember_folder(tmp_path)
    path = f"{tmp_path}/memory_rank_2.pickle"
    assert f"{usage}; {path} for pytorch.org/memory_viz). What" in memory.message(2, "")
    assert (tmp_path / "memory_rank_2.pickle").read_text() == "a snapshot"
    memory.remember_folder(tmp_path / "gone")
    assert f"{usage}). What" in memory.message(2, "")
    gpu.is_initialized = lambda: False
    assert "GiB" not in memory.message(2, "")
    monkeypatch.delitem(sys.modules, "torch")
    assert "GiB" not in memory.message(2, "")


def test_processes_that_the_kernel_ended_are_counted(tmp_path):
    own, job = tmp_path / "own", tmp_path / "groups" / "slurm" / "job_7"
    job.mkdir(parents=True)
    root, version_2 = tmp_path / "groups", "3:cpu:/other\n0::/slurm/job_7/step\n"

    def kills(events, lines=version_2, folder=job):
        own.write_text(lines)
        (folder / "memory.events").write_text(events)
        return memory.kills(root, own)

    own.write_text(version_2)
    assert memory.kills(root, own) == 0 == memory.kills(root, tmp_path / "nowhere")
    assert kills("low 0\noom 5\noom_kill 2\noom_group_kill 0\n") == 2
    assert kills("low 0\n") == kills("oom_kill many\n") == 0
    assert kills("oom_kill 5\n", "0::/elsewhere\n", tmp_path) == 0  # beside the groups
    assert kills("oom_kill 4\n", "0::/elsewhere\n", root) == 4  # of the root
    assert kills("oom_kill 4\n", "3:memory:/other\n", root) == 0  # version 1


def test_a_process_that_the_kernel_ended_is_said_to_be(monkeypatch):
    error = RuntimeError("[/src/gloo/transport/tcp/pair.cc:544] Connection closed by peer [::1]:4")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(memory, "kills", lambda: memory.KILLS_BEFORE)
    assert "which has ended (the launcher's report names it)" in failures.describe(error)
    monkeypatch.setattr(memory, "kills", lambda: memory.KILLS_BEFORE + 1)
    assert "which the kernel ended because the machine" in failures.describe(error)
