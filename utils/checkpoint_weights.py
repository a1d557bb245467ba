"""Reads the weights of any checkpoint, sharded and averaged ones too, for scripts/evaluate.py."""

import warnings

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from utils import weight_files
from utils.run import manifest
from utils.run.checkpoint import CheckpointException, first_cause
from utils.run.files import regular_file
from utils.scale.fsdp import Reader

SHARDS = "pytorch_model_fsdp_0"  # where Accelerate saves the weights of a sharded model
AVERAGED = "custom_checkpoint_0.pkl"  # where it saves the first registered object


def read(path):
    """Reads weights as `weight_files.read` does, also from a checkpoint of a sharded run.

    Of a checkpoint of a run that averages its weights by an `AveragedModel`, these are the averaged
    ones, as in its final weights.
    """
    return weight_files.read(path, _load)


def _load(file):
    """The weights (dict) in a file or its checkpoint, by plain name; the config, if known."""
    shards = file.parent / SHARDS
    if shards.exists() and not file.exists():
        state, config = _load_shards(shards), None
    else:
        state, config = weight_files.load(file)
    return _load_averaged(file.parent) or state, config


def _load_shards(folder):
    manifest.refuse_links(folder)
    reader = Reader(folder)
    try:
        found = reader.read_metadata().state_dict_metadata
        state = {
            name: torch.empty(tensor.size, dtype=tensor.properties.dtype)
            for name, tensor in found.items()
            if isinstance(tensor, TensorStorageMetadata)
        }
        with warnings.catch_warnings(action="ignore"):  # one says that this process loads alone
            dcp.load(state, storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        raise first_cause(error) from None
    return weight_files.unwrapped(state)


def _load_averaged(folder):
    """The averaged weights that were registered for checkpointing; None without any."""
    if not (folder / AVERAGED).exists():
        return None
    saved = torch.load(regular_file(folder / AVERAGED), map_location="cpu", weights_only=True)
    if not isinstance(saved, dict) or "n_averaged" not in saved:
        return None
    return weight_files.unwrapped(
        {key: value for key, value in saved.items() if key != "n_averaged"}
    )
