"""Counts what a training step costs a GPU, on a machine without one: launches and bytes.

    python tests/step_costs.py train_gpt --dropout 0.2    # with arguments of the script; prints JSON

The step of a script runs on fake CUDA tensors (`FakeTensorMode`): they have shapes, dtypes and a
device, and no data, so PyTorch takes the path of a GPU (autocast's, flash attention, foreach
optimizers) and computes nothing. `Costs` sees each operation of the forward pass, the backward pass
and the optimizer:

- launches: operations that are not views. A few of them start more than one kernel.
- bytes: each input is read once and each output written once, as if no cache helped.

For what a step waits, `harness/gpu_rules.py` shows.

Fake CUDA tensors change the process for good (`fake_cuda`), so tests start this file as a process.
"""

import contextlib
import functools
import importlib
import json
import math
import sys
from collections import Counter
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from accelerate.utils import convert_outputs_to_fp32
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import optimizer as torch_optimizer
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
from utils.images.arrays import Split

CUDA = torch.device("cuda", 0)
# They start no kernel: they reserve memory, or keep books.
FREE = {"empty", "empty_like", "empty_strided", "lift_fresh", "new_empty", "new_empty_strided"}


# ---------------------------------------------------------------------------------------- counting


class Costs(TorchDispatchMode):
    """Counts the operations of a block that involve the device: `launches` and `bytes` by the name
    of the operation.
    """

    def __init__(self):
        super().__init__()
        self.launches, self.bytes = Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        inputs, name = _tensors((args, kwargs)), func._schema.name.split("::")[1]
        # A fake tensor has no values: any number will do, and all of its elements are not zero.
        if name == "_local_scalar_dense" and getattr(args[0], "constant", True) is None:
            result = 1.0 if args[0].is_floating_point() else 1
        elif name == "nonzero" and isinstance(args[0], FakeTensor):
            result = args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.int64)
        elif name.startswith("_fused_") and any(isinstance(x, FakeTensor) for x in inputs):
            result = None  # an optimizer, which changes its arguments
        else:
            result = func(*args, **kwargs)
        outputs = _tensors(result)
        devices = {x.device.type for x in (*inputs, *outputs)}
        if "cuda" not in devices or name in FREE:
            return result
        if func._schema.is_mutable or not _is_view(inputs, outputs):
            self.launches[name] += 1
            self.bytes[name] += _bytes(func, args, kwargs, outputs)
        return result

    def report(self):
        """The counts as a dict for JSON."""
        found = {}
        for name, counted in (("launches", self.launches), ("bytes", self.bytes)):
            found |= {name: counted.total(), f"{name}_by_op": dict(counted.most_common())}
        return found


def _tensors(values):
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _is_view(inputs, outputs):
    """Whether all outputs are in the memory of inputs."""
    storages = {x.untyped_storage()._cdata for x in inputs}
    return all(x.untyped_storage()._cdata in storages for x in outputs)


def _bytes(func, args, kwargs, outputs):
    read, written = {}, {_place(x): _size(x) for x in outputs}
    for place, argument in enumerate(func._schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        sizes = {_place(x): _size(x) for x in _tensors(value)}
        read |= sizes
        if argument.alias_info is not None and argument.alias_info.is_write:
            written |= sizes
    return sum(read.values()) + sum(written.values())


def _place(x):
    return x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride()


def _size(x):
    """Bytes of the elements of a tensor; an expanded one has fewer than its shape says."""
    sides = (side for side, stride in zip(x.shape, x.stride(), strict=True) if stride)
    return x.element_size() * math.prod(sides) if x.numel() else 0


# ----------------------------------------------------------------------------------- a GPU that is not there


class _FakeCuda(TorchDispatchMode):
    """Makes the autograd engine work with fake CUDA tensors.

    During the backward pass it tells the C++ side that tensors are on the device `meta`, because
    the engine would ask the CUDA driver for streams, and creates what it then asks for on the GPU.
    """

    backward = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            device = args[0].fake_device
            return torch.device("meta") if self.backward and device.type == "cuda" else device
        if func is torch.ops.aten._pin_memory.default:
            return args[0]
        device = kwargs.get("device")
        if device is not None and device.type == "meta":
            kwargs = {**kwargs, "device": CUDA}
        return func(*args, **kwargs)


@functools.cache
def _believe_in_another_accelerator():
    if torch.cuda.is_available():
        raise RuntimeError("fake CUDA tensors are for machines without a GPU")
    _setup_privateuseone_for_python_backend("no_device")
    torch._C._ensureCUDADeviceGuardSet()


@contextlib.contextmanager
def fake_cuda():
    """Within this block, tensors on "cuda" are fake, and PyTorch takes the paths of a GPU for them.

    It changes the process for good: PyTorch believes in another accelerator, of which no tensor is,
    and so the autograd engine does not wait for streams.
    """
    _believe_in_another_accelerator()
    mode, run_backward = _FakeCuda(), torch.Tensor.backward
    attention = F.scaled_dot_product_attention

    def backward(*args, **kwargs):
        mode.backward = True
        try:
            run_backward(*args, **kwargs)
        finally:
            mode.backward = False

    def flash_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **more):
        """What PyTorch chooses on GPUs for half precision; here it cannot ask one."""
        if attn_mask is not None or query.dtype == torch.float32:
            return attention(query, key, value, attn_mask, dropout_p, is_causal, **more)
        options = dict(scale=more.get("scale"))
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, **options)[0]

    replaced = mock.patch.object
    # Optimizers update lists of fake tensors, too.
    types, listed = "_foreach_supported_types", [torch.Tensor, nn.Parameter, FakeTensor]
    with (
        replaced(torch.cuda, "is_available", lambda: True),
        replaced(torch.cuda, "is_bf16_supported", lambda *_, **__: True),
        replaced(torch.Tensor, "backward", backward),
        replaced(F, "scaled_dot_product_attention", flash_attention),
        replaced(torch_optimizer, types, listed),
        replaced(_foreach_utils, types, listed),
        FakeTensorMode(allow_non_fake_inputs=True),
        mode,
    ):
        yield


# ----------------------------------------------------------------------------- the steps of the scripts


# For each script: a function that builds its model, and one that returns its optimizer and a function
# that computes the loss of a batch. Batches come from the memory of the host, as from a loader.


def cifar_step(script, args, model):
    images, labels = on_host(1000, 3, 32, 32).to(torch.uint8), on_host(1000)
    split = Split(*to_device(images=images, labels=labels).values())
    ids, (mean, std) = on_host(args.batch_size), torch.ones(2, 3, device=CUDA)

    def compute_loss():
        return script.compute_loss(model, split.batch(ids), mean, std, 0, 32, args)

    return script.build_optimizer(model, args), compute_loss


def gpt_step(script, args, model):
    windows = on_host(args.batch_size, args.block_size)
    batch = {"inputs": windows, "targets": windows}
    optimizer = script.build_optimizer(model, args)
    return optimizer, lambda: script.compute_loss(model, batch, CUDA)


def lm_step(script, args, model):
    shape, optimizer = (args.batch_size, args.block_size), script.build_optimizer(model, args)
    positions = torch.arange(args.block_size).expand(shape).contiguous()
    batch = {"input_ids": on_host(*shape), "position_ids": positions, "targets": on_host(*shape)}
    return optimizer, lambda: script.compute_loss(model, to_device(**batch))


def build_lm(script, args):
    _, config, _ = script.load_settings(args)
    model = script.causal_lm.transformers.AutoModelForCausalLM.from_config(config)
    script.lm_loss.chunk_loss(model)
    return model


def build_gpt(script, args):
    return script.GPT(*(getattr(args, name) for name in script.SIZES), dropout=args.dropout)


STEPS = {
    "train_cifar": (lambda script, args: script.build_model(args.model, 10), cifar_step),
    "train_gpt": (build_gpt, gpt_step),
    "train_lm": (build_lm, lm_step),
}


def on_host(*shape):
    """A tensor int64 in the memory of the host."""
    return torch.zeros(shape, dtype=torch.int64)


def to_device(**batch):
    """Copies a batch to the device as a prepared loader does, from pinned memory."""
    return {name: tensor.to(CUDA, non_blocking=True) for name, tensor in batch.items()}


def make_fake(model):
    """Replaces the parameters and buffers of a model by fake ones on the device."""

    def fake(tensor):
        layout = dict(dtype=tensor.dtype, device=CUDA)
        return torch.empty_strided(tensor.size(), tensor.stride(), **layout)

    for layer in model.modules():
        for name, weight in layer._parameters.items():
            if weight is not None:
                layer._parameters[name] = nn.Parameter(fake(weight), weight.requires_grad)
        for name, buffer in layer._buffers.items():
            if buffer is not None:
                layer._buffers[name] = fake(buffer)


def count(name, words=()):
    """The costs of a step of a script at its default size, or with the arguments in `words`."""
    script, (build_model, build_step) = importlib.import_module(name), STEPS[name]
    with mock.patch.object(sys, "argv", [f"{name}.py", *words]):
        args = script.parse_args()
    model = build_model(script, args)
    with fake_cuda():
        make_fake(model)
        optimizer, compute_loss = build_step(script, args, model)
        # As `Accelerator.prepare` does with `mixed_precision: bf16`.
        autocast = torch.autocast("cuda", torch.bfloat16)
        model.forward = convert_outputs_to_fp32(autocast(model.forward))
        for _ in range(2):  # the first step creates the state of the optimizer
            with Costs() as costs:
                compute_loss().backward()
                if getattr(args, "max_grad_norm", 0):
                    torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
    return costs


if __name__ == "__main__":
    print(json.dumps(count(sys.argv[1], sys.argv[2:]).report(), indent=1))
