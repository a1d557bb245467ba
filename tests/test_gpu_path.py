"""The path of a training step on a GPU, seen without one: launches, bytes, waits (step_costs.py).

The budgets stand in scripts/benchmarks/README.md. Whoever needs more says there what it buys.
"""

import json
import os
import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from harness import warm
from harness.data import Loader
from harness.fakes import accelerator
from harness.launches import LIMIT, ROOT, load_script
from step_costs import Costs
from torch.overrides import TorchFunctionMode

PAGE = (ROOT / "scripts" / "benchmarks" / "README.md").read_text()
TOOL = ROOT / "tests" / "step_costs.py"
SCRIPTS = ("train_minimal", "train_cifar", "train_images", "train_gpt", "train_lm")
# How many of a batch's tokens are targets decides how large the logits are.
WAITS = {"train_lm": ["nonzero"]}
counts = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="earlier releases of PyTorch have no fake GPUs, or others"
)
# What a process prints that believes in a GPU: which of the words it waits for, and the costs of a
# step of each script.
COUNT = """
import importlib.util, json, sys
sys.path.insert(1, sys.argv[1])
import torch
from step_costs import Costs, count, fake_cuda
with fake_cuda():
    weight = torch.ones(8, 8, device="cuda", requires_grad=True)
    host, x = torch.ones(8, device="cpu"), weight.detach()
    with Costs() as costs, torch.autocast("cuda", torch.bfloat16):
        loss = (weight @ weight).square().sum()
    loss.backward()
    seen = {"cast": costs.casts, "gradient": str(weight.grad.device)}
    for code in json.loads(sys.argv[2]):
        with Costs() as costs:
            eval(code)
        seen[code] = [name for name, _ in costs.waits]
    try:
        x + host
    except Exception as error:
        seen["mixed"] = "device" in str(error)
costs = {"seen": seen}
for script in sys.argv[3:]:
    if script != "train_lm" or importlib.util.find_spec("transformers"):
        synthetic = script in ("train_cifar", "train_images", "train_gpt")
        costs[script] = count(script, ["--dataset", "synthetic"] * synthetic).report()
print(json.dumps(costs))
"""
WAIT_FOR = {
    "x.sum().item()": ["_local_scalar_dense"],
    "x.cpu()": ["_to_copy"],
    "host.to('cuda')": ["_to_copy"],
    "host.to('cuda', non_blocking=True)": [],
    "x.nonzero()": ["nonzero"],
    "x * torch.tensor(2.0, device='cpu')": [],
    "bool((x > 0).all())": ["_local_scalar_dense"],
    "torch.zeros((), device='cpu').item()": [],
}


def output_of(script, *words):
    """The JSON that a Python script prints in a process without a real GPU."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = warm.run([str(script), *words], environment, LIMIT, cwd=str(ROOT))
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def counted(made_once):
    """What a step of each script costs at its default size; and what `Costs` saw, as "seen"."""

    def count(folder):
        (folder / "code.py").write_text(COUNT)
        words = [str(TOOL.parent), json.dumps(list(WAIT_FOR)), *SCRIPTS]
        return output_of(folder / "code.py", *words)

    return made_once("counted", count)


def check_budget(costs, row):
    """Holds the launches and GB of a step to the table on the page."""
    found = re.search(rf"^\| {row} \| ([\d,]+) \| ([\d.]+) \|", PAGE, re.MULTILINE)
    launches, gigabytes = int(found[1].replace(",", "")), float(found[2])
    assert 0.9 * launches <= costs["launches"] <= launches
    assert 0.9 * gigabytes <= costs["bytes"] / 1e9 <= gigabytes


@counts
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_step_on_a_gpu_never_waits_and_keeps_to_its_budget(script, counted):
    if script not in counted:
        pytest.skip("needs transformers")
    costs = counted[script]
    assert [name for name, _ in costs["waits"]] == WAITS.get(script, []) and costs["mixed"] == []
    check_budget(costs, f"`{script}.py`, eager")
    names = ["launches", "bytes", "launches_by_op", "bytes_by_op", "casts", "waits", "mixed"]
    assert list(costs) == names and costs["launches"] == sum(costs["launches_by_op"].values()) > 10


@pytest.mark.slow
@counts
def test_a_compiled_step_keeps_to_its_budget(counted):
    """By the kernels that Inductor plans for a CPU, where attention is float32."""
    costs = output_of(TOOL, *"train_gpt --dataset synthetic --compile".split())
    check_budget(costs, "`train_gpt.py`, compiled")
    # Each block is one graph, and no operation of a block runs by itself.
    assert "_scaled_dot_product_flash_attention_for_cpu" not in costs["launches_by_op"]
    # The logits have no float32 copy, which Accelerate makes of what a model returns; with a larger
    # vocabulary that is a lot.
    eager = counted["train_gpt"]["casts"]
    assert eager["float32 (16384, 256)"] == 1 and "float32 (64, 256, 256)" not in eager
    assert not [cast for cast in costs["casts"] if cast.endswith(" 256)")]


# -------------------------------------------------------------------------------------- the counting


def costs_of(function):
    with Costs("cpu") as costs:
        function()
    return costs


X, Y = torch.ones(10, 6), torch.ones(10, 6)  # of 240 bytes each
BYTES = {
    "view": (lambda: X.view(60).t().detach()[2:].expand(3, 58), 0, 0),
    "reserve": (lambda: torch.empty_like(X), 0, 0),
    "add": (lambda: X + Y, 1, 3 * 240),
    "add to itself": (lambda: X + X, 1, 2 * 240),
    "add in place": (lambda: X.add_(Y), 1, 3 * 240),
    "add a list": (lambda: torch._foreach_add_([X, Y], 1.0), 1, 4 * 240),
    "add a row": (lambda: X + Y[0], 1, 2 * 240 + 24),
    "add an expanded row": (lambda: X + Y[:1].expand(10, 6), 1, 2 * 240 + 24),
    "fill": (lambda: X.fill_(1), 1, 240),
    "zeros": (lambda: torch.zeros_like(X), 1, 240),
    "copy": (lambda: X.copy_(Y), 1, 2 * 240),
    "cast": (lambda: X.bfloat16(), 1, 240 + 120),
    "sum": (lambda: X.sum(), 1, 240 + 4),
    "rows": (lambda: X[torch.tensor([3, 4])], 1, 48 + 48 + 16),
}


@pytest.mark.parametrize("name", BYTES)
def test_what_an_operation_costs(name):
    function, launches, size = BYTES[name]
    costs = costs_of(function)
    assert (costs.launches.total(), costs.bytes.total()) == (launches, size), costs.bytes


@counts
def test_fake_cuda_tensors_show_what_a_gpu_would_wait_for(counted):
    casts = {"bfloat16 (8, 8)": 1, "float32 (8, 8)": 1}  # `square` is float32
    more = {"cast": casts, "gradient": "cuda:0", "mixed": True}
    assert counted["seen"] == WAIT_FOR | more


READING = ("__bool__", "__float__", "__int__", "cpu", "item", "numpy", "tolist")


class Reads(TorchFunctionMode):
    """Notes with which methods the values of tensors are read, in their order."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function.__name__ in READING:
            self.seen.append(function.__name__)
        return function(*args, **(kwargs or {}))


# ------------------------------------------------------------------------------------- evaluation, samples


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


def test_an_evaluation_waits_once(gpt):
    script, model = gpt
    batch = {name: torch.randint(256, (3, 12)) for name in ("inputs", "targets")}
    batches = Loader([batch] * 4, SimpleNamespace(targets=4 * 36))
    with Reads() as reads:
        script.evaluate(accelerator(gather_for_metrics=lambda values: values), model, batches, iter)
    assert reads.seen == ["tolist"]


@pytest.mark.parametrize("prompt", ["a", "more than what fits into a context"])
def test_a_sample_is_what_the_model_finds_most_likely(prompt, gpt):
    """Also where the context is full, several times, and goes on with its last half.

    It waits for the device once, and computes each byte once.
    """
    script, model = gpt
    text, start, parts = list(prompt.encode()), max(0, len(prompt) - 12), [min(len(prompt), 12)]
    for _ in range(20):  # without a cache
        if len(text) - start > 12:
            start = len(text) - 6
            parts.append(6)
        elif len(text) > len(prompt):
            parts.append(1)
        with torch.no_grad():
            text.append(model(torch.tensor([text[start:]]))[0, -1].argmax().item())
    seen = []
    hook = model.register_forward_pre_hook(lambda _, args: seen.append(args[0].size(1)))
    sample = script.generate(model, prompt, length=20, temperature=0, seed=5)
    hook.remove()
    assert sample == bytes(text).decode(errors="replace") and seen == parts
    with Reads() as reads:
        script.generate(model, prompt, length=20, temperature=0.8, seed=5)
    assert reads.seen == ["tolist"]


def test_the_loss_of_a_model_is_the_cross_entropy_of_its_logits(gpt):
    script, model = gpt
    text, targets = torch.randint(256, (2, 3, 12))
    targets[1, 7:] = -100
    losses = model(text, targets)
    expected = F.cross_entropy(model(text).flatten(0, 1), targets.flatten(), reduction="none")
    assert torch.allclose(losses.flatten(), expected) and (losses[1, 7:] == 0).all()
    batch = {"inputs": text[:1], "targets": targets[:1]}
    loss = script.compute_loss(model, batch, torch.device("cpu"))
    assert torch.allclose(loss, F.cross_entropy(model(text[:1])[0], targets[0]))


def test_samples_of_the_gpt_take_one_percent_of_the_time(monkeypatch):
    """On an A100 that does nothing but read and write during a step, and launch during a sample."""
    monkeypatch.setattr("sys.argv", ["train_gpt.py", "--dataset", "synthetic"])
    script = load_script("train_gpt")
    args = script.parse_args()
    model = script.GPT(args.n_layer, n_head=1, n_embd=8, block_size=64)

    def launches(length):
        generate = partial(script.generate, model, "\n", length, temperature=0.8, seed=0)
        return costs_of(generate).launches.total()

    per_byte = (launches(20) - launches(10)) / 10
    step = float(re.search(r"`train_gpt.py`, compiled \| [\d,]+ \| ([\d.]+)", PAGE)[1]) * 1e9 / 2e12
    assert args.sample_length * per_byte * 5e-6 < 0.01 * script.SAMPLE_EVERY * step


def test_a_sample_follows_the_first_evaluation_after_so_many_steps(monkeypatch):
    script = load_script("train_gpt")
    monkeypatch.setattr(script, "SAMPLE_EVERY", 50)
    plan = SimpleNamespace(evaluate_every=20, total_steps=160)
    evaluated = range(20, 161, 20)
    assert [step for step in evaluated if script.sample_due(step, plan)] == [60, 100]
    monkeypatch.setattr(script, "SAMPLE_EVERY", 10)
    assert [step for step in evaluated if script.sample_due(step, plan)] == [*evaluated][:-1]


def test_a_compiled_gpt_has_the_same_names_and_parts(gpt):
    script, _ = gpt
    model, calls = script.GPT(n_layer=2, n_head=2, n_embd=16, block_size=12), []

    def backend(graph, _):
        calls.append(graph)
        return graph

    names = list(model.state_dict())
    model.compile(backend=backend)
    assert list(model.state_dict()) == names
    text = torch.randint(256, (2, 12))
    model(text, text).mean().backward()
    assert len(calls) == 2  # a block, of which all are alike, and the loss
