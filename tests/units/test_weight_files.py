"""What `utils.run.weights` takes of another model's weights, for --init_from."""

import pytest
import torch
from harness import fakes
from safetensors.torch import load_file, save_file

from utils.run import weights
from utils.run.failures import UserError


def build(classes=3):
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.ReLU(), torch.nn.Linear(5, classes))


@pytest.fixture
def file(tmp_path):
    """Weights of `build()`, all of them 7."""
    path = tmp_path / "weights.safetensors"
    save_file(
        {name: torch.full_like(value, 7.0) for name, value in build().state_dict().items()}, path
    )
    return path


def test_loads_every_weight(file, capsys):
    model = build()
    weights.initialize(fakes.accelerator(), model, str(file))
    assert all((value == 7).all() for value in model.state_dict().values())
    assert "4 of 4 tensors initialized" in capsys.readouterr().out


class Wrapped(torch.nn.Module):
    """Holds a model as `model`, as many training scripts do."""

    def __init__(self):
        super().__init__()
        self.model = build()


@pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".pt", ".ckpt"])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "model.", "module._orig_mod."])
@pytest.mark.parametrize("make", [build, Wrapped])
def test_the_prefix_of_a_wrapper_does_not_matter(prefix, suffix, make, tmp_path):
    sevens = {
        f"{prefix}{name}": torch.full_like(v, 7.0) for name, v in build().state_dict().items()
    }
    path = tmp_path / f"weights{suffix}"
    if suffix == ".safetensors":
        save_file(sevens, path)
    else:
        torch.save({"state_dict": sevens, "epoch": 3} if suffix == ".ckpt" else sevens, path)
    model = make()
    weights.initialize(fakes.accelerator(), model, str(path))
    assert all((value == 7).all() for value in model.state_dict().values())


def test_an_unknown_prefix_is_named(tmp_path):
    state = {f"backbone.{name}": value for name, value in build().state_dict().items()}
    save_file(state, tmp_path / "w.safetensors")
    with pytest.raises(UserError, match=r"all its names begin with `backbone\.`") as error:
        weights.initialize(fakes.accelerator(), build(), str(tmp_path / "w.safetensors"))
    assert "\n" not in str(error.value)


class Executes:
    def __reduce__(self):
        return print, ("executed",)


def test_a_pickle_that_holds_anything_else_is_one_line(tmp_path, capsys):
    path = tmp_path / "w.pth"
    torch.save(build().state_dict(), path)
    whole = path.read_bytes()
    for content in (
        *({"a": Executes()}, [1, 2], {}, {"model": {"a": 3}}, "text"),
        *(b"", b"\x80\x02", whole[: len(whole) // 2], b"\x80\x02}q\x00X\xff.", b"not a pickle"),
    ):
        path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
        with pytest.raises(UserError, match="cannot read weights from") as error:
            weights.read(path)
        assert "\n" not in str(error.value)
    assert "executed" not in capsys.readouterr().out
    with pytest.raises(UserError, match="no such file"):
        weights.read(tmp_path / "none.pth")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda state: state.pop("0.bias"), "it has no 0.bias"),
        (lambda state: state.update({"0.bias": torch.zeros(6)}), r"its 0.bias is \[6\], not \[5\]"),
        (lambda state: state.update({"extra": torch.zeros(6)}), "this one has no extra"),
    ],
)
def test_another_model_is_refused(change, says, file):
    state = load_file(file)
    change(state)
    save_file(state, file)
    model = build()
    with pytest.raises(UserError, match=says):
        weights.initialize(fakes.accelerator(), model, str(file))
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), build().parameters(), strict=True)
    )
