"""Reads sharded state without executing code: its index is a pickle."""

import enum
import pickle
import stat
from pathlib import Path, PurePosixPath
from traceback import StackSummary

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import StorageMeta

# The module that defines the data classes of an index; a later release may add some.
METADATA = "torch.distributed.checkpoint.metadata"
# What else an index may refer to: module -> names.
KNOWN = {
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"}
    | {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    "pathlib": {"PosixPath", "PurePosixPath"},
}


class Reader(dcp.FileSystemReader):
    """Reads sharded state; its index may refer only to data classes and to files beside it."""

    def read_metadata(self, *args, **options):
        """Reads the index, and checks what it refers to.

        Raises:
            CheckpointException: torch passes it on. At an `Exception` it would look for an index of
                this process alone, and then forget why it did.
        """
        path = Path(self._get_metadata_path(options.get("rank")))
        try:
            with path.open("rb") as file:
                index = _Unpickler(file).load()
            self._check(index)
        except (OSError, pickle.UnpicklingError) as error:
            raise _failure(error) from None
        except (AttributeError, EOFError, IndexError, KeyError, TypeError, ValueError) as error:
            reason = f"{path.name} is not an index of sharded state: {error}"
            raise _failure(pickle.UnpicklingError(reason)) from None
        if getattr(index, "storage_meta", None) is None:
            index.storage_meta = StorageMeta()
        index.storage_meta.load_id = self.load_id
        return index

    def _check(self, index):
        if type(index.storage_data) is not dict or type(index.state_dict_metadata) is not dict:
            # Another type could return other items to torch than here.
            raise TypeError("it does not hold plain dictionaries")
        for key, location in index.storage_data.items():
            if getattr(location, "transform_descriptors", None):
                raise pickle.UnpicklingError(f"{key.fqn} is stored with a transform")
            name = location.relative_path
            beside = isinstance(name, str) and PurePosixPath(name).name == name
            if not (beside and stat.S_ISREG((Path(self.path) / name).lstat().st_mode)):
                raise pickle.UnpicklingError(f"{key.fqn} is not in a file of the checkpoint")


def _failure(error):
    return dcp.CheckpointException("read its index", {0: (error, StackSummary())})


def _member(kind, name):
    """A member of an enumeration, which Python 3.11.0 to 3.11.3 pickles as getattr(kind, name)."""
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum)):
        raise pickle.UnpicklingError(f"its index refers to getattr of {kind!r}")
    return kind[name]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module, name):
        module = "pathlib" if module == "pathlib._local" else module  # of Python 3.13
        if (module, name) == ("builtins", "getattr"):
            return _member
        if module == METADATA or name in KNOWN.get(module, ()):
            found = super().find_class(module, name)
            if module != METADATA or getattr(found, "__module__", None) == METADATA:
                return found
        raise pickle.UnpicklingError(f"its index refers to {module}.{name}")
