"""The rules of GPUs on a machine without any: `apply()` makes a process obey them.

The device is `cpu:0`, which PyTorch tells from `cpu`: what moves there is copied, as to a GPU. From
then on its memory counts as that of the device, and so does that of all that is computed from it.
A group of processes takes tensors of the device only, as NCCL does, unless it was created for gloo.
"""

import contextlib
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import data_loader
from accelerate.state import PartialState
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).resolve().parents[2]
# Of the operations that `torch.use_deterministic_algorithms` documents to have no deterministic
# algorithm on GPUs, those that models of texts and images use.
FORBIDDEN = """
_adaptive_avg_pool2d_backward adaptive_max_pool2d_backward upsample_bilinear2d_backward
_upsample_bilinear2d_aa_backward upsample_bicubic2d_backward reflection_pad2d_backward
nll_loss2d_forward _ctc_loss_backward _embedding_bag_backward _embedding_bag_dense_backward put_
histc bincount median grid_sampler_2d_backward scatter_reduce scatter_reduce_
""".split()
FORBIDDEN = {f"aten::{name}" for name in FORBIDDEN}
# The host waits until the device has computed what they read, or how large their result is.
WAITING = {"_local_scalar_dense", "_unique2", "equal", "is_nonzero", "masked_select", "nonzero"}

DEVICE = torch.device("cpu", 0)
# The types that NCCL sends, apart from 8-bit floats.
SENT = {torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool}
SENT |= {torch.float16, torch.bfloat16, torch.float32, torch.float64}
COLLECTIVES = ("c10d", "_c10d_functional", "_dtensor")


def line():
    """The innermost line of the project that is being executed."""
    frame = sys._getframe(1)
    while frame:
        path = Path(frame.f_code.co_filename)
        # A virtual environment may be in the folder of the project.
        ours = path.is_relative_to(ROOT) and "site-packages" not in path.parts
        if ours and path.name != "gpu_rules.py":
            return f"{path.relative_to(ROOT)}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


class Rules(TorchDispatchMode):
    """Follows which memory is the device's, and refuses the collectives that NCCL would refuse.

    Attributes:
        operations (set): the names of all that were called with tensors of the device.
        collectives (int): how many were on a group of the device.
        waits (list): what made the host wait for the device, as (name, line of this project): it
            read a result, or copied without `non_blocking`.
    """

    def __init__(self):
        super().__init__()
        self.operations, self.collectives, self._trusts = set(), 0, False
        self.waits = []
        # Address -> a reference that keeps the address from being used again.
        self._memory, self._gloo_groups = {}, set()

    def holds(self, tensor):
        """Whether a tensor is on the device."""
        return tensor.untyped_storage()._cdata in self._memory

    def place(self, tensor, there=True):
        """Makes the memory of a tensor that of the device, or of the host."""
        storage = tensor.untyped_storage()
        if there:
            self._memory[storage._cdata] = storage._weak_ref()
        else:
            self._memory.pop(storage._cdata, None)

    def created_for(self, group, backend):
        """Remembers the backend that a new group was asked to have."""
        if backend == "gloo":
            self._gloo_groups.add(group.group_name)

    def is_gloo(self, group):
        """Whether a group, or one of this name, takes tensors of the host."""
        name = group.group_name if isinstance(group, dist.ProcessGroup) else group
        return isinstance(name, str) and name in self._gloo_groups

    @contextlib.contextmanager
    def trust(self, model=None):
        """All may be sent, as C++ allocates it where the tensors of `model` are: on the device."""
        for name, tensor in model.state_dict(keep_vars=True).items() if model else ():
            if not self.holds(tensor):
                raise RuntimeError(f"{name}: No backend type associated with device type cpu")
        self._trusts = True
        yield
        self._trusts = False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        there = [self.holds(tensor) for tensor in given]
        if function.namespace in COLLECTIVES:
            self._check(function, args, kwargs, given)
        result = function(*args, **kwargs)
        device, name = kwargs.get("device"), function._schema.name
        if any(there) and name.removeprefix("aten::") in WAITING:
            self.waits.append((name, line()))
        if name == "aten::copy_":
            return result
        on_device = any(there) if device is None else device == DEVICE
        if on_device:
            self.operations.add(name)
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and (on_device or device is not None):
                self.place(tensor, on_device)
        return result

    def _check(self, function, args, kwargs, given):
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
                value = dist.ProcessGroup.unbox(value)
            if self.is_gloo(value):
                return
        self.collectives += 1
        for tensor in given:
            layout = torch._prims_common.suggest_memory_format(tensor)
            if not (self._trusts or self.holds(tensor)):
                raise RuntimeError(f"{function}: No backend type associated with device type cpu")
            if not tensor.is_contiguous(memory_format=layout):
                raise ValueError(f"{function}: Tensors must be contiguous")
            if tensor.dtype not in SENT:
                raise TypeError(f"{function}: Input tensor data type is not supported for NCCL")


def apply():
    """Makes this process obey the rules from now on.

    Returns:
        Rules: what was seen.
    """
    rules = Rules()
    _move_by_the_rules(rules)
    initialize, new_group = PartialState.__init__, dist.new_group
    device_of_objects = distributed_c10d._get_object_coll_device
    wrap_model, prepare_forward = DDP.__init__, DDP._pre_forward
    synchronize = data_loader.synchronize_rng_states

    def initialize_there(self, *args, **kwargs):
        initialize(self, *args, **kwargs)
        self.device = DEVICE

    def new_group_of(*args, backend=None, **kwargs):
        group = new_group(*args, backend=backend, **kwargs)
        rules.created_for(group, backend)
        return group

    def synchronize_there(*args, **kwargs):
        with rules.trust():  # on GPUs, Accelerate moves the state to send it
            synchronize(*args, **kwargs)

    def wrap(self, module, *args, **kwargs):
        with rules.trust(module):
            wrap_model(self, module, *args, **kwargs)

    def before_forward(self, *args, **kwargs):
        with rules.trust(self):  # sends how it assigns gradients to buckets
            return prepare_forward(self, *args, **kwargs)

    PartialState.__init__, dist.new_group = initialize_there, new_group_of
    data_loader.synchronize_rng_states = synchronize_there
    DDP.__init__, DDP._pre_forward = wrap, before_forward
    distributed_c10d._get_object_coll_device = lambda group=None: (
        device_of_objects(group) if rules.is_gloo(group) else DEVICE
    )
    rules.__enter__()
    return rules


def _move_by_the_rules(rules):
    """Replaces what reads or changes the device of a tensor, where PyTorch sees one CPU only."""
    to, device_of = torch.Tensor.to, torch.Tensor.device

    def move(self, *args, **kwargs):
        first = args[0] if args else None
        named = {name: value for name, value in kwargs.items() if name != "copy"}
        if isinstance(first, torch.Tensor):
            target = first.device
        else:
            target = torch._C._nn._parse_to(*args, **named)[0]
        result = to(self, *args, **kwargs)
        moves = target is not None and rules.holds(self) != (target == DEVICE)
        if moves and self.dim() and not (named.get("non_blocking") or True in args[1:3]):
            rules.waits.append(("to", line()))
        if target is not None and rules.holds(result) != (target == DEVICE):
            result = result.clone() if result.data_ptr() == self.data_ptr() else result
            rules.place(result, target == DEVICE)
        return result

    torch.Tensor.to, torch.Tensor.cpu = move, lambda self, *_, **__: self.to("cpu")
    torch.Tensor.device = property(
        lambda self: DEVICE if rules.holds(self) else device_of.__get__(self)
    )
