"""Several machines: network namespaces with their own addresses, connected by a virtual network."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from harness.launches import CIFAR, SMALL, final_weights, metrics, results, run, status
from safetensors.torch import load_file

pytestmark = pytest.mark.slow


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
    (code, printed), (other_code, elsewhere) = (started.finish() for started in both)
    assert code == other_code == 0, printed + elsewhere
    assert "global batch 60 = 4 processes x 15 samples" in printed and "loss" not in elsewhere
    assert '"machines": 2' in (tmp_path / "args.json").read_text()
    assert results(tmp_path)["resumed_from"] >= 3 and status(tmp_path)["state"] == "finished"
    assert final_weights(tmp_path) == final_weights(reference("4gpu", 4).folder)
    assert metrics(tmp_path, "train") == metrics(reference("4gpu", 4).folder, "train")


def test_a_host_name_that_resolves_to_a_loopback_address(machines, tmp_path):
    """As on Debian, where /etc/hosts gives the machine's own name 127.0.1.1: gloo would tell the
    others to connect there.
    """
    hosts = [Path("/etc/netns") / machine.name / "hosts" for machine in machines]
    try:
        for file, machine in zip(hosts, machines, strict=True):
            file.parent.mkdir(parents=True)
            file.write_text(f"127.0.0.1 localhost\n127.0.1.1 {machine.name}\n")
        unset = ("env", "-u", "GLOO_SOCKET_IFNAME")
        for script, arguments in (
            ("scripts/check_topology.py", "--max_bytes 4096"),
            (CIFAR, SMALL),
        ):
            both = [
                machine.started(script, arguments, tmp_path / Path(script).stem, enter=unset)
                for machine in machines
            ]
            outcomes = [started.finish() for started in both]
            assert [code for code, _ in outcomes] == [0, 0], outcomes
    finally:
        for file in hosts:
            shutil.rmtree(file.parent, ignore_errors=True)


def test_a_machine_that_dies_and_comes_back(machines, reference, tmp_path):
    """With the elastic rendezvous, the launcher of the other machine waits for it, and the run
    continues automatically.
    """
    elastic = (
        "--rdzv_backend",
        "c10d",
        "--max_restarts",
        "3",
        "--num_processes",
        "4",
        "--main_process_ip",
        "10.77.0.1",
    )

    def start(machine):
        conf = ("--rdzv_conf", f"is_host={1 - machine.rank},join_timeout=120")
        env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PET_LOCAL_ADDR": machine.address}
        launcher = (*elastic, "--machine_rank", str(machine.rank), *conf)
        return machine.started(CIFAR, SMALL, tmp_path / "two", launcher=launcher, env=env)

    both = [start(machine) for machine in machines]
    both[0].wait_for("step  7/")
    both[1].kill_all()
    both[1] = start(machines[1])
    (code, printed), (other_code, elsewhere) = (started.finish() for started in both)
    assert code == other_code == 0, printed + elsewhere
    assert results(tmp_path / "two")["resumed_from"] >= 3
    assert final_weights(tmp_path / "two") == final_weights(reference("4gpu", 4).folder)


def test_machines_with_different_numbers_of_processes(machines, tmp_path):
    """`accelerate launch` divides processes evenly over machines; torchrun starts a given number on
    each.
    """
    run("2cpu", CIFAR, SMALL, output_dir=tmp_path / "one", launcher=("--num_processes", "3"))
    both = []
    for machine in machines:
        torchrun = f"-m torch.distributed.run --nnodes 2 --node_rank {machine.rank} --nproc_per_node {machine.rank + 1}"
        torchrun += f" --master_addr {machines[0].address} --master_port 29500"
        both.append(
            machine.started(CIFAR, SMALL, tmp_path / "two", launcher=torchrun.split(), config=None)
        )
    outcomes = [started.finish() for started in both]
    assert [code for code, _ in outcomes] == [0, 0], outcomes
    assert results(tmp_path / "two")["num_processes"] == 3
    # Not identical bit for bit: the process that is alone on its machine uses more threads.
    for one, two in zip(
        metrics(tmp_path / "one", "train"), metrics(tmp_path / "two", "train"), strict=True
    ):
        assert two == pytest.approx(one, abs=1e-4)


def test_hybrid_sharding_over_two_machines_computes_the_same_and_continues_exactly(
    machines, tmp_path
):
    """Each machine has a copy of the model, sharded over its processes.

    Losses and weights are those of one process.
    """
    sizes = "--n_layer 2 --n_head 2 --n_embd 32 --block_size 32 --batch_size 12 --sample_length 8"
    small = f"--dataset synthetic {sizes} --max_train_steps 20 --log_every 1 --eval_every 20 --checkpoint_every 5"

    def start(folder):
        both = []
        for machine in machines:
            typed = f"--machine_rank {machine.rank} --main_process_ip {machines[0].address} --num_processes 4"
            typed += " --parallelism_config_dp_shard_size 2 --mixed_precision no"
            launch = dict(config="2node_8gpu_fsdp", launcher=typed.split())
            both.append(machine.started("scripts/train_gpt.py", small, folder, **launch))
        return both

    def finish(both):
        outcomes = [started.finish() for started in both]
        assert [code for code, _ in outcomes] == [0, 0], outcomes

    run("cpu", "scripts/train_gpt.py", small, output_dir=tmp_path / "one")
    finish(start(tmp_path / "whole"))
    both = start(tmp_path / "killed")
    both[0].wait_for("step 11/20")
    both[1].kill_all()
    assert both[0].finish()[0] != 0
    assert (
        len(
            list(
                (tmp_path / "killed").glob(
                    "checkpoints/step_00000005/pytorch_model_fsdp_0/*.distcp"
                )
            )
        )
        == 4
    )
    finish(start(tmp_path / "killed"))
    assert results(tmp_path / "killed")["resumed_from"] >= 5
    assert final_weights(tmp_path / "killed") == final_weights(tmp_path / "whole")
    for one, two in zip(
        metrics(tmp_path / "one", "train"), metrics(tmp_path / "whole", "train"), strict=True
    ):
        assert two["loss"] == pytest.approx(one["loss"], abs=1e-4)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "whole"))
    assert one.keys() == two.keys() and all(
        torch.allclose(two[name], one[name], atol=1e-3) for name in one
    )


@pytest.mark.parametrize(("each", "sharded"), [(4, ""), (8, ""), (8, "_fsdp")])
def test_starts_as_many_processes_as_it_says(each, sharded, machines, tmp_path):
    def typed(rank):
        return ("--machine_rank", str(rank), "--main_process_ip", machines[0].address)

    both = [
        machine.started(
            "tests/harness/probe_processes.py",
            [str(tmp_path)],
            None,
            config=f"2node_{each}gpu{sharded}",
            launcher=typed(machine.rank),
        )
        for machine in machines
    ]
    outcomes = [started.finish() for started in both]
    assert [code for code, _ in outcomes] == [0, 0], outcomes
    reports = [json.loads(file.read_text()) for file in tmp_path.iterdir()]
    assert sorted(rank["rank"] for rank in reports) == list(range(2 * each))
    assert {rank["processes"] for rank in reports} == {2 * each}
    assert all(text.count("NO GPU FOUND") == 1 for _, text in outcomes[:1])
    for rank in reports:
        mesh = (
            {"dp_replicate": rank["machine"], "dp_shard": rank["rank"] % each} if sharded else None
        )
        assert rank["mesh"] == mesh and rank["sharded"] == bool(sharded)
