"""A checkpoint that comes from anywhere executes nothing: what is registered, and what is sharded.

Without the checks, Accelerate and torch would unpickle it.
"""

import os
import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from accelerate.utils.other import load

from utils.run import checkpoint
from utils.run.failures import UserError
from utils.scale import shards


class Bomb:
    """Runs a command when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def loading(load_state):
    """An accelerator of one process that loads with `load_state`."""
    return SimpleNamespace(num_processes=1, process_index=0, scaler=None, load_state=load_state)


def test_registered_state_executes_nothing(tmp_path):
    """In a folder of the run's own, too: that may have been downloaded."""
    counter, file = torch.nn.BatchNorm1d(1), tmp_path / "custom_checkpoint_0.pkl"
    accelerator = loading(
        lambda path, **_: counter.load_state_dict(
            load(Path(path) / "custom_checkpoint_0.pkl", weights_only=False)
        )
    )
    for _ in range(2):  # what was refused before leaves nothing behind
        file.write_bytes(pickle.dumps(Bomb(tmp_path / "executed")))
        with pytest.raises(UserError, match="execute code"):
            checkpoint.load(accelerator, tmp_path)
        assert not (tmp_path / "executed").exists()
        torch.save({**counter.state_dict(), "bias": torch.tensor([7.0])}, file)
        checkpoint.load(accelerator, tmp_path)
        assert counter.bias.item() == 7
        assert torch.load.__name__ == "load" and dcp.FileSystemReader is not shards.Reader


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


@pytest.mark.parametrize("kind", ["index", "value", "constructor", "elsewhere", None])
def test_a_poisoned_sharded_checkpoint_executes_nothing(kind, tmp_path):
    folder, plain = tmp_path / "shards", [1, "two"]
    state = {
        "weight": torch.ones(3),
        "plain": Bomb(tmp_path / "executed") if kind == "value" else plain,
    }
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    poison(kind, folder)
    loaded = {"weight": torch.zeros(3), "plain": None}

    def load_state(path, **_):
        reader = dcp.FileSystemReader(path)  # the name by which Accelerate gets it
        dcp.load(loaded, storage_reader=reader, no_dist=True)

    if kind is None:
        checkpoint.load(loading(load_state), folder)
        assert loaded["weight"].tolist() == [1, 1, 1] and loaded["plain"] == plain
        return
    with pytest.raises(UserError, match="execute code"):
        checkpoint.load(loading(load_state), folder)
    assert not (tmp_path / "executed").exists() and loaded["weight"].tolist() == [0, 0, 0]
