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
    "collections": {"OrderedDict"},
}


def refuse_code(folder):
    """Checks that loading the sharded state in `folder` executes nothing: torch unpickles its index and its plain values.

    Raises:
        pickle.UnpicklingError: it would; names what.
    """
    with (Path(folder) / INDEX).open("rb") as file:
        index = _Inspector(file).load()
    for key, place in index.storage_data.items():
        if getattr(place, "transform_descriptors", None):
            raise pickle.UnpicklingError(f"{key.fqn} is stored in a transformed way")
        if isinstance(index.state_dict_metadata[key.fqn], BytesStorageMetadata):
            with (Path(folder) / place.relative_path).open("rb") as file:
                file.seek(place.offset)
                torch.load(io.BytesIO(file.read(place.length)), weights_only=True)


class _Inspector(pickle.Unpickler):
    def find_class(self, module, name):
        if name not in KNOWN.get(module, ()):
            raise pickle.UnpicklingError(f"{INDEX} refers to {module}.{name}")
        return super().find_class(module, name)
