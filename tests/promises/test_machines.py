"""Several machines: network namespaces with their own addresses, connected by a virtual network."""

import json

import pytest
import torch
from harness.launches import CIFAR, GPT, SMALL, final_weights, metrics, results, run, status
from safetensors.torch import load_file

PROBE = "tests/harness/probe_processes.py"
pytestmark = pytest.mark.slow


def finish(started):
    """Waits for launchers that must succeed; returns what each printed."""
    outcomes = [each.finish() for each in started]
    assert {code for code, _ in outcomes} == {0}, outcomes
    return [printed for _, printed in outcomes]


def test_two_machines_compute_the_same_as_one_and_continue_after_one_died(
    machines, reference, tmp_path
):
    """With the static rendezvous of the YAML. Only the first machine prints losses; args.json has
    the number of machines.
    """
    both = [machine.started(CIFAR, SMALL, tmp_path) for machine in machines]
    both[0].wait_for("step  7/")
    both[1].kill_all()
    code, printed = both[0].finish()
    assert code != 0 and "lost contact with another process" in printed
    both = [machine.started(CIFAR, SMALL, tmp_path) for machine in machines]
    printed, elsewhere = finish(both)
    assert "global batch 60 = 4 processes x 15 samples" in printed and "loss" not in elsewhere
    assert '"machines": 2' in (tmp_path / "args.json").read_text()
    assert results(tmp_path)["resumed_from"] >= 3 and status(tmp_path)["state"] == "finished"
    assert final_weights(tmp_path) == final_weights(reference("4gpu", 4).folder)
    assert metrics(tmp_path, "train") == metrics(reference("4gpu", 4).folder, "train")


def test_hybrid_sharding_over_two_machines_computes_what_one_process_does(machines, tmp_path):
    """Each machine has a copy of the model, sharded over its processes."""
    small = (
        "--dataset synthetic --n_layer 2 --n_head 2 --n_embd 32 --block_size 32 --batch_size 12 "
        "--sample_length 8 --max_train_steps 10 --log_every 1 --eval_every 10"
    )
    sizes = "--num_processes 4 --parallelism_config_dp_shard_size 2 --mixed_precision no"
    launch = dict(config="2node_8gpu_fsdp", launcher=sizes)
    folders = {name: tmp_path / name for name in ("one", "four")}
    run("cpu", GPT, small, output_dir=folders["one"])
    finish([machine.started(GPT, small, folders["four"], **launch) for machine in machines])
    newest = folders["four"] / "checkpoints" / "step_00000010" / "pytorch_model_fsdp_0"
    assert len(list(newest.glob("*.distcp"))) == 4
    lines = [metrics(folder, "train") for folder in folders.values()]
    for one, four in zip(*lines, strict=True):
        assert four["loss"] == pytest.approx(one["loss"], abs=1e-4)
    one, four = (load_file(folder / "model.safetensors") for folder in folders.values())
    assert one.keys() == four.keys()
    assert all(torch.allclose(four[name], one[name], atol=1e-3) for name in one)


@pytest.mark.parametrize(("each", "sharded"), [(4, ""), (8, "_fsdp")])
def test_starts_as_many_processes_as_it_says(each, sharded, machines, tmp_path):
    words, options = (PROBE, [str(tmp_path)], None), dict(config=f"2node_{each}gpu{sharded}")
    both = [machine.started(*words, launcher="--quiet", **options) for machine in machines]
    printed = finish(both)
    reports = [json.loads(file.read_text()) for file in tmp_path.iterdir()]
    assert sorted(rank["rank"] for rank in reports) == list(range(2 * each))
    assert {rank["processes"] for rank in reports} == {2 * each}
    assert printed[0].count("NO GPU FOUND") == 1
    for rank in reports:
        mesh = {"dp_replicate": rank["machine"], "dp_shard": rank["rank"] % each}
        assert rank["mesh"] == (mesh if sharded else None) and rank["sharded"] == bool(sharded)
