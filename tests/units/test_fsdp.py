"""Which sharded launches `utils.scale.fsdp` takes, how it shards on a CPU, and what shards may do."""

import contextlib
import os
import pickle
import shutil
from functools import partial
from pathlib import PurePosixPath
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, fsdp_utils
from harness.fakes import Bomb, accelerator
from harness.worlds import group_of_one
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import format_utils, metadata
from torch.distributed.tensor import DTensor

from utils.run import checkpoint, launcher
from utils.run.failures import UserError
from utils.scale import fsdp, patches

POLICY = fsdp.transformer_auto_wrap_policy
NAMES = (
    "ACCELERATE_USE_FSDP FSDP_VERSION FSDP_OFFLOAD_PARAMS ACCELERATE_MIXED_PRECISION WORLD_SIZE "
    "ACCELERATE_USE_PARALLELISM_CONFIG PARALLELISM_CONFIG_DP_REPLICATE_SIZE "
    "PARALLELISM_CONFIG_DP_SHARD_SIZE PARALLELISM_CONFIG_TP_SIZE PARALLELISM_CONFIG_CP_SIZE "
    "PARALLELISM_CONFIG_SP_SIZE PET_NNODES"
).split()


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Sets these variables of a launch and no others; gives back what the check changes."""
    for place in (dcp, format_utils):
        monkeypatch.setattr(place, "FileSystemReader", place.FileSystemReader)
    monkeypatch.setattr(launcher, "option", lambda name: None)

    def give(values):
        for name in NAMES:
            monkeypatch.delenv(name, raising=False)
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    give({})
    return give


def test_a_sharded_model_is_gathered_for_a_while():
    with group_of_one():
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        model = torch.distributed.fsdp.fully_shard(nn.Linear(1, 1), mesh=mesh)
        with contextlib.suppress(ValueError), fsdp.gathered(model):
            assert not isinstance(model.weight, DTensor)
            raise ValueError
        assert isinstance(model.weight, DTensor)
    with fsdp.gathered(nn.Linear(1, 1)):  # has no such methods
        pass


def copies(number, parts, processes=4, **more):
    """The variables of FSDP2 with so many copies of the model in so many parts."""
    return {
        "FSDP_VERSION": "2",
        "ACCELERATE_USE_PARALLELISM_CONFIG": "TRUE",
        "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": str(number),
        "PARALLELISM_CONFIG_DP_SHARD_SIZE": str(parts),
        "WORLD_SIZE": str(processes),
        **more,
    }


TENSOR = "tensor, context or sequence parallelism, .* as 8gpu_fsdp.yaml does"
ASKED = {"ACCELERATE_USE_FSDP": "TRUE"}
FP16 = {"FSDP_VERSION": "2", "ACCELERATE_MIXED_PRECISION": "fp16"}
OFFLOADED = {"FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "True"}


@pytest.mark.parametrize(
    ("variables", "on_cpu", "says"),
    [
        ({"FSDP_VERSION": "1"}, False, "asks for FSDP1, .* set fsdp_version: 2"),
        ({}, False, "asks for FSDP1"),
        (OFFLOADED, True, "set fsdp_offload_params: false"),
        (OFFLOADED, False, None),
        (FP16, False, "in fp16, which is not supported: set mixed_precision: bf16"),
        (FP16, True, None),  # `launch` refuses it on any CPU
        (copies(2, 2), False, None),
        (copies(2, 2, 8), False, "2 copies .* in 2 parts .* fit 8 processes"),
        (copies(2, 1, 2), False, "2 copies of the model .* in 1 parts"),
        (copies(2, 2, PET_NNODES="1:2"), False, "give a fixed --nnodes, or shard"),
        (copies(2, 2, PET_NNODES="2"), False, None),
        *(
            (copies(1, 2, 2) | {f"PARALLELISM_CONFIG_{kind}_SIZE": "2"}, True, TENSOR)
            for kind in ("TP", "CP", "SP")
        ),
        ({**copies(1, 1, 1), "ACCELERATE_USE_FSDP": "FALSE"}, False, TENSOR),
    ],
)
def test_a_kind_of_sharding_that_is_not_supported_is_refused(variables, on_cpu, says, environment):
    environment(ASKED | variables)
    with (
        contextlib.nullcontext() if says is None else pytest.raises(UserError, match=says) as error
    ):
        fsdp.set_up(on_cpu)
    assert says is None or str(error.value).startswith("this launch ")
    assert says or os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "true"
    if not says:  # how many processes share a copy of the model
        hybrid = "PARALLELISM_CONFIG_DP_SHARD_SIZE" in variables
        assert fsdp.parts(accelerator(8, is_fsdp2=True)) == (2 if hybrid else 8)
        assert fsdp.parts(accelerator(8)) == 1


# ---------------------------------------------------------------------- what the model is made of


class Block(nn.Linear):
    pass


class Net(nn.Sequential):
    _no_split_modules = ("Block", "Absent")


def plugin_of(model, listed=None, policy=POLICY, **facts):
    plugin = SimpleNamespace(
        transformer_cls_names_to_wrap=listed,
        auto_wrap_policy=policy,
        mixed_precision_policy="default",
        state_dict_config=SimpleNamespace(offload_to_cpu=True),
    )
    state = SimpleNamespace(fsdp_plugin=plugin)
    mine = accelerator(**{"is_fsdp2": True, "distributed_type": None, **facts}, state=state)
    if model is not None:
        fsdp.use_model_blocks(mine, model)
    else:
        fsdp.configure(mine)
    return plugin


def test_the_blocks_to_gather_are_those_that_the_model_names(monkeypatch):
    def chosen(*args, **more):
        return plugin_of(*args, **more).transformer_cls_names_to_wrap

    net = Net(Block(1, 1), nn.ReLU())
    assert chosen(net) == ["Block"] and chosen(net, is_fsdp2=False) is None
    assert chosen(net, ["ReLU"]) == ["ReLU"]
    assert chosen(net, policy=partial(POLICY, 1)) == ["Block"]
    with pytest.raises(UserError, match="set fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP"):
        chosen(net, policy=None)
    with pytest.raises(UserError, match="Net has no Other: leave the field out"):
        chosen(net, ["Block", "Other"])
    for model in (nn.Sequential(Block(1, 1)), Net(nn.ReLU())):
        with pytest.raises(UserError, match="gathered all at once"):
            chosen(model)
    for old, tied in ((False, True), (True, False), (True, True)):  # new releases keep them tied
        monkeypatch.setattr(
            fsdp, "is_torch_version", lambda *how, old=old: old and how == ("<", "2.13")
        )
        net.config = SimpleNamespace(**{"tie_word_embeddings": True} if tied else {})
        refused = pytest.raises(UserError, match=r"2\.13")
        with refused if old and tied else contextlib.nullcontext():
            chosen(net)


def test_gradients_are_reduced_in_float32_and_shards_saved_where_they_are(environment, capsys):
    plugin = plugin_of(None, mixed_precision="bf16")  # not asked for
    assert plugin.mixed_precision_policy == "default" and plugin.state_dict_config.offload_to_cpu
    assert dcp.FileSystemReader is not fsdp.Reader and capsys.readouterr().out == ""
    environment(ASKED)
    plugin = plugin_of(None, mixed_precision="bf16", processes=2)
    assert capsys.readouterr().out == "the model is sharded over 2 processes\n"
    policy = plugin.mixed_precision_policy
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)
    assert policy.cast_forward_inputs is False
    assert plugin.state_dict_config.offload_to_cpu is False
    assert dcp.FileSystemReader is format_utils.FileSystemReader is fsdp.Reader
    assert plugin_of(None, mixed_precision="no").mixed_precision_policy == "default"
    with pytest.raises(
        UserError, match=r"^this launch asks for a sharded model, but accelerate .* cpu"
    ):
        plugin_of(None, is_fsdp2=False)


def test_processes_on_the_cpu_shard_over_the_cpu(environment, monkeypatch):
    """Also on a machine that has another device, as a Mac has."""
    environment(ASKED | copies(2, 3, 6))
    fsdp.set_up(True)
    assert os.environ["ACCELERATE_USE_PARALLELISM_CONFIG"] == "false"
    of_all, state = SimpleNamespace(), SimpleNamespace()
    monkeypatch.setattr(fsdp, "PartialState", lambda: of_all)
    monkeypatch.setattr(fsdp.ParallelismConfig, "get_device_mesh", lambda self, device: device)
    cpus = DistributedType.MULTI_CPU
    fsdp.configure(accelerator(6, is_fsdp2=True, distributed_type=cpus, state=state))
    assert state.distributed_type == of_all.distributed_type == DistributedType.FSDP
    sizes = state.parallelism_config
    assert (sizes.dp_replicate_size, sizes.dp_shard_size, state.device_mesh) == (2, 3, "cpu")
    assert isinstance(state.fsdp_plugin, FullyShardedDataParallelPlugin)


def test_where_functions_of_libraries_are_replaced(monkeypatch):
    monkeypatch.setattr(fsdp_utils, "fsdp2_load_full_state_dict", None)
    patches.load_shards_with(print)
    assert fsdp_utils.fsdp2_load_full_state_dict is print
    monkeypatch.setattr(patches, "Queue", type("Queue", (), {}))
    patches.report_unsendable_batches(print)
    replaced = [value for value in vars(patches.Queue).values() if isinstance(value, staticmethod)]
    assert [value.__func__ for value in replaced] == [print]


# ----------------------------------------------------------------------------------------- shards


def poison(kind, folder):
    """Makes the index of a sharded checkpoint run or read something else."""
    index = folder / ".metadata"
    if kind == "index":
        index.write_bytes(pickle.dumps(Bomb(folder.parent / "executed")))
    elif kind == "constructor":  # a function that the module of the data classes imports
        index.write_bytes(b"ctorch.distributed.checkpoint.metadata\ndataclass\n(tR.")
    elif kind == "elsewhere":
        shutil.copy(folder / "__0_0.distcp", folder.parent / "outside")
        changed = pickle.loads(index.read_bytes())
        for location in changed.storage_data.values():
            location.relative_path = "../outside"
        index.write_bytes(pickle.dumps(changed))
    elif kind == "damaged":
        index.write_bytes(pickle.dumps("text"))


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("index", "is refused: loading it could execute code .its index refers to posix.mkdir"),
        ("value", "could execute code .*unsupported GLOBAL posix.mkdir"),
        ("constructor", "could execute code .its index refers to torch.distributed.checkpoint.met"),
        ("elsewhere", "could execute code .plain is not in a file of the checkpoint"),
        ("damaged", "could execute code ..metadata is not an index of sharded state"),
        (None, None),
    ],
)
def test_a_poisoned_sharded_checkpoint_executes_nothing(kind, says, tmp_path):
    folder, plain = tmp_path / "shards", [1, "two"]
    state = {
        "weight": torch.ones(3),
        "plain": Bomb(tmp_path / "executed") if kind == "value" else plain,
    }
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    poison(kind, folder)
    loaded = {"weight": torch.zeros(3), "plain": None}

    def load_state(path, map_location):
        reader = dcp.FileSystemReader(path)  # the name by which Accelerate gets it
        dcp.load(loaded, storage_reader=reader, no_dist=True)

    patches.read_shards_with(fsdp.Reader)
    mine = accelerator(load_state=load_state)
    with pytest.raises(UserError, match=says) if says else contextlib.nullcontext():
        checkpoint.load(mine, folder)
    weight, there = ([0, 0, 0], None) if says else ([1, 1, 1], plain)
    assert loaded["weight"].tolist() == weight and loaded["plain"] == there
    assert not (tmp_path / "executed").exists()


class OfPython311:
    """What Python 3.11.0 to 3.11.3, that of Debian 12, pickles for a member of an enumeration."""

    def __init__(self, kind, name):
        self.parts = kind, name

    def __reduce__(self):
        return getattr, self.parts


FORMATS = metadata._MEM_FORMAT_ENCODING


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (PurePosixPath("a/b"), PurePosixPath("a/b")),
        *((OfPython311(FORMATS, member.name), member) for member in FORMATS),
        (OfPython311(FORMATS, "__init__"), None),
        (OfPython311(metadata.Metadata, "__init__"), None),
        (OfPython311(FORMATS.TORCH_CHANNELS_LAST, "name"), None),
    ],
)
def test_an_index_of_another_python_is_read_and_no_other_attribute(value, read, tmp_path):
    pickled = pickle.dumps(metadata.Metadata({}, planner_data=value, storage_data={}), protocol=3)
    # As Python 3.13 pickles it.
    (tmp_path / ".metadata").write_bytes(pickled.replace(b"cpathlib\n", b"cpathlib._local\n"))
    if read is not None:
        assert fsdp.Reader(tmp_path).read_metadata().planner_data == read
        return
    with pytest.raises(dcp.CheckpointException) as error:
        fsdp.Reader(tmp_path).read_metadata()
    assert isinstance(checkpoint.first_cause(error.value), pickle.UnpicklingError)
