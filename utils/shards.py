"""Sharded checkpoints (torch.distributed.checkpoint) from anywhere: looked through before torch loads them."""

import io
import pickle
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

INDEX = ".metadata"
# All that the index of a checkpoint refers to. Anything else has no business there.
KNOWN = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"} | {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath"},  # where Python 3.13 keeps them
}


def refuse_code(folder):
    """Checks that loading sharded state anywhere below `folder` executes nothing.

    torch unpickles its index, and those of its values that are no tensors.

    Raises:
        pickle.UnpicklingError: it would, or the index is none; names what.
    """
    for path in Path(folder).rglob(f"*{INDEX}"):
        if path.name != INDEX:
            raise pickle.UnpicklingError(f"{path.name} would be read in place of an index")
        try:
            _check(path.parent)
        except (AttributeError, EOFError, IndexError, KeyError, OSError, TypeError, ValueError) as error:
            raise pickle.UnpicklingError(f"{path} is no index of sharded state: {error}") from None


def _check(folder):
    with (folder / INDEX).open("rb") as file:
        index = _Inspector(file).load()
    if type(index.storage_data) is not dict or type(index.state_dict_metadata) is not dict:
        raise TypeError("not of plain dictionaries")  # another mapping may show us other items than it does torch
    for key, place in index.storage_data.items():
        if getattr(place, "transform_descriptors", None):
            raise pickle.UnpicklingError(f"{key.fqn} is stored in a transformed way")
        if isinstance(index.state_dict_metadata[key.fqn], BytesStorageMetadata):
            with (folder / place.relative_path).open("rb") as file:
                file.seek(place.offset)
                torch.load(io.BytesIO(file.read(place.length)), weights_only=True)


class _Inspector(pickle.Unpickler):
    def find_class(self, module, name):
        if name not in KNOWN.get(module, ()):
            raise pickle.UnpicklingError(f"{INDEX} refers to {module}.{name}")
        return super().find_class(module, name)
