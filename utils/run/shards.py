"""Inspects sharded checkpoints from untrusted sources before torch.distributed loads them."""

import io
import pickle
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

INDEX = ".metadata"
# All names that the index of a checkpoint may refer to: module -> names.
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
    "torch": {"Size"}
    | {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath"},  # where Python 3.13 keeps them
}


def refuse_code(folder):
    """Checks that loading sharded state anywhere below `folder` executes no code.

    torch unpickles the index and all values that are not tensors.

    Raises:
        pickle.UnpicklingError: loading would execute code, or the index is invalid; the message
        says what.
    """
    for path in Path(folder).rglob(f"*{INDEX}"):
        if path.name != INDEX:
            raise pickle.UnpicklingError(f"{path.name} would be read as an index")
        try:
            _check(path.parent)
        except (
            AttributeError,
            EOFError,
            IndexError,
            KeyError,
            OSError,
            TypeError,
            ValueError,
        ) as error:
            raise pickle.UnpicklingError(
                f"{path} is not an index of sharded state: {error}"
            ) from None


def _check(folder):
    with (folder / INDEX).open("rb") as file:
        index = _Inspector(file).load()
    if type(index.storage_data) is not dict or type(index.state_dict_metadata) is not dict:
        # Another type could return other items to torch than here.
        raise TypeError("it does not hold plain dictionaries")
    for key, location in index.storage_data.items():
        if getattr(location, "transform_descriptors", None):
            raise pickle.UnpicklingError(f"{key.fqn} is stored with a transform")
        if isinstance(index.state_dict_metadata[key.fqn], BytesStorageMetadata):
            with (folder / location.relative_path).open("rb") as file:
                file.seek(location.offset)
                torch.load(io.BytesIO(file.read(location.length)), weights_only=True)


class _Inspector(pickle.Unpickler):
    def find_class(self, module, name):
        if name not in KNOWN.get(module, ()):
            raise pickle.UnpicklingError(f"{INDEX} refers to {module}.{name}")
        return super().find_class(module, name)
