"""The path of a training step on a GPU, seen without one: launches, bytes (step_costs.py) and waits.

The budgets stand in scripts/benchmarks/README.md. Whoever needs more says there what it buys.
"""

import json
import os
import re

import pytest
import torch
from harness import warm
from harness.launches import LIMIT, ROOT, load_script
from harness.worlds import in_group
from torch.distributed.tensor import Shard, distribute_tensor, placement_types

from utils.muon import orthogonalize_all

PAGE = (ROOT / "scripts" / "benchmarks" / "README.md").read_text()
SCRIPTS = ("train_cifar", "train_gpt", "train_lm")


def printed(words):
    """What a program prints, as JSON, in a process of its own."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = warm.run(words, environment, LIMIT, cwd=str(ROOT))
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.skipif(
    torch.__version__ < "2.13", reason="earlier releases of PyTorch have no fake GPUs, or others"
)
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_step_on_a_gpu_keeps_to_its_budget(script):
    if script == "train_lm":
        pytest.importorskip("transformers")
    words = [] if script == "train_lm" else ["--dataset", "synthetic"]
    costs = printed(["tests/step_costs.py", script, *words])
    row = re.search(rf"^\| `{script}.py` \| ([\d,]+) \| ([\d.]+) \|", PAGE, re.MULTILINE)
    launches, gigabytes = int(row[1].replace(",", "")), float(row[2])
    assert 0.9 * launches <= costs["launches"] <= launches
    assert 0.9 * gigabytes <= costs["bytes"] / 1e9 <= gigabytes
    assert costs["launches"] == sum(costs["launches_by_op"].values())


def test_shards_of_muon_are_exchanged_as_on_gpus():
    """Two exchanges for each kind of matrix, there and back, with the result of whole ones.

    On a CPU, DTensor goes from shards of rows to whole matrices by an all-gather, on GPUs by an
    all-to-all. Gloo has that, too: here it is PyTorch's operation for GPUs, with its arithmetic for
    sizes that do not divide evenly. What remains unproven without GPUs is NCCL's transport, and its
    order on CUDA streams.
    """

    def orthogonalize(_, mesh):
        exchanges, differences = [], []

        def all_to_all(shard, gather_dim, shard_dim, mesh, mesh_dim):
            exchanges.append(shard)
            group = mesh.get_group(mesh_dim).group_name
            return torch.ops._dtensor.shard_dim_alltoall(shard, gather_dim, shard_dim, group)

        placement_types.shard_dim_alltoall = all_to_all
        torch.manual_seed(0)
        # Fewer and more matrices than processes, rows that they do not divide, or too few of them.
        for count, rows, columns in ((1, 6, 4), (2, 8, 8), (3, 9, 5), (7, 8, 20), (2, 2, 6)):
            whole = [torch.randn(rows, columns) for _ in range(count)]
            sharded = orthogonalize_all([distribute_tensor(x, mesh, [Shard(0)]) for x in whole], 3)
            for result, expected in zip(sharded, orthogonalize_all(whole, 3), strict=True):
                assert result.placements == (Shard(0),)
                differences.append((result.full_tensor() - expected).abs().max().item())
        return len(exchanges), max(differences)

    for exchanges, difference in in_group(orthogonalize, 3):
        assert exchanges == 10 and difference < 1e-5


@pytest.fixture(scope="module")
def gpt():
    torch.manual_seed(0)
    script = load_script("train_gpt")
    model = script.GPT(n_layer=2, n_head=2, n_embd=16, block_size=12)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.3)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several wait for each other where other processes run
    yield script, model
    torch.set_num_threads(threads)


@pytest.mark.parametrize("prompt", ["a", "more than what fits into a context"])
def test_a_sample_is_what_the_model_finds_most_likely(prompt, gpt):
    """Also where the context is full."""
    script, model = gpt
    text = list(prompt.encode())
    with torch.no_grad():
        for _ in range(20):
            text.append(model(torch.tensor([text[-12:]]))[0, -1].argmax().item())
    sample = script.generate(model, prompt, length=20, temperature=0, seed=5)
    assert sample == bytes(text).decode(errors="replace")
