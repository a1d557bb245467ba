"""Weights of checkpoints, sharded and averaged ones too; none executes code."""

import os

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness import fakes
from safetensors.torch import save_file

from utils import checkpoint_weights, weight_files
from utils.checkpoint_weights import AVERAGED, SHARDS
from utils.run import manifest
from utils.run.failures import UserError


@pytest.fixture
def writing(tmp_path):
    """The empty folder of a checkpoint of a run."""
    folder = tmp_path / "run" / "checkpoints" / ".writing"
    folder.mkdir(parents=True)
    return folder


def complete(writing):
    """Completes a checkpoint; returns its folder."""
    target = writing.with_name("step_00000003")
    record = {"progress": {"step": 3, "config": {"width": 3}}, "arguments": {"lr": 0.5}}
    files = manifest.hash_and_sync(fakes.accelerator(), writing)
    manifest.complete(writing, target, {**record, "files": files})
    return target


def test_sharded_weights_are_read_by_this_module_only(writing, tmp_path):
    model = {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.ones(2).bfloat16()}
    state = {"model": model | {"other": fakes.Bomb(tmp_path / "executed")}}
    dcp.save(state, checkpoint_id=writing / SHARDS, no_dist=True)
    folder = complete(writing)
    with pytest.raises(UserError, match=r"only scripts/evaluate.py reads .*: finish the run"):
        weight_files.read(folder)
    for path in (folder, folder.parents[1]):
        saved = checkpoint_weights.read(path)
        assert torch.equal(saved.state["weight"], model["weight"]) and saved.config == {"width": 3}
        assert saved.state.keys() == model.keys() and saved.state["bias"].dtype == torch.bfloat16
        assert saved.run == tmp_path / "run" and saved.arguments == {"lr": 0.5}
    assert sorted(os.listdir(folder.parent)) == ["step_00000003"]  # nothing temporary is left
    (folder / SHARDS / ".metadata").unlink()
    with pytest.raises(UserError, match=r"cannot read weights from [^\n]+: no such file"):
        checkpoint_weights.read(folder)
    (folder / SHARDS).rename(tmp_path / "elsewhere")
    (folder / SHARDS).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="is refused: it is a link"):
        checkpoint_weights.read(folder)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("registered", ["averages", "other", "bomb", None])
def test_averaged_weights(registered, writing, tmp_path):
    """As `torch.optim.swa_utils.AveragedModel` saves them; those of a run that has none."""
    save_file({"module.bias": torch.ones(2)}, writing / "model.safetensors")
    state = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(1, 1)).state_dict()
    state["module.bias"].fill_(7.0)
    if registered == "other":
        del state["n_averaged"]
    elif registered == "bomb":
        state["n_averaged"] = fakes.Bomb(tmp_path / "executed")
    if registered:
        torch.save(state, writing / AVERAGED)
    folder = complete(writing)
    if registered == "bomb":
        with pytest.raises(UserError, match=r"it would execute code when loaded: [^\n]+\Z"):
            checkpoint_weights.read(folder)
        assert not (tmp_path / "executed").exists()
        return
    found = checkpoint_weights.read(folder).state
    assert found["bias"].unique().tolist() == [7.0 if registered == "averages" else 1.0]
    assert found.keys() == ({"weight", "bias"} if registered == "averages" else {"bias"})
