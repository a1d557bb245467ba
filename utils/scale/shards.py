"""Loads checkpoints without executing code: neither Accelerate's pickles nor an index of shards."""

import contextlib
import enum
import pickle
import stat
from pathlib import Path, PurePosixPath

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import format_utils
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
_refusals = []  # the errors with which the present `safe_loading` refused something


@contextlib.contextmanager
def safe_loading():
    """While it is active, `torch.load` builds nothing but tensors and plain values.

    Sharded state is read by `Reader`. Accelerate and torch ask for more: `weights_only=False` for
    registered objects and for values in shards, and `pickle.load` for the index. So there is no
    check before loading that a file could evade: what is loaded is what is checked.

    Raises:
        pickle.UnpicklingError: at the end of the block, if it was asked to build anything else; the
            message says what. In between, torch turns that error into others.
        Exception: that of a process for which sharded state could not be loaded.
    """
    original_load = torch.load
    modules = (dcp, format_utils)
    readers = [module.FileSystemReader for module in modules]

    def load(*args, **options):
        try:
            return original_load(*args, **{**options, "weights_only": True})
        except pickle.UnpicklingError as error:
            _refusals.append(error)
            raise

    torch.load = load
    for module in modules:
        module.FileSystemReader = Reader
    _refusals.clear()
    try:
        yield
    except BaseException as error:
        cause = _refusals[0] if _refusals else first_cause(error)
        if cause is error:
            raise
        raise cause from None
    finally:
        torch.load = original_load
        for module, reader in zip(modules, readers, strict=True):
            module.FileSystemReader = reader


def first_cause(error):
    """The first error of a process, in place of the `CheckpointException` about those of all."""
    if isinstance(error, dcp.CheckpointException):
        return next(iter(error.failures.values()))[0]
    return error


class Reader(dcp.FileSystemReader):
    """Reads sharded state; its index may refer only to data classes and to files beside it."""

    def read_metadata(self, *args, **options):
        """Reads the index, and checks what it refers to."""
        path = Path(self._get_metadata_path(options.get("rank")))
        try:
            with path.open("rb") as file:
                index = _Unpickler(file).load()
            self._check(index)
        except pickle.UnpicklingError as error:
            _refusals.append(error)
            raise
        except (AttributeError, EOFError, IndexError, KeyError, TypeError, ValueError) as error:
            reason = f"{path.name} is not an index of sharded state: {error}"
            _refusals.append(pickle.UnpicklingError(reason))
            raise _refusals[-1] from None
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
