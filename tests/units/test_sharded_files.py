"""Slices of files of weights: who reads and writes which bytes, and which files are not read so."""

import pytest
import torch
import torch.distributed as dist
from harness.language_models import make_model
from harness.worlds import in_group
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import fully_shard

transformers = pytest.importorskip("transformers")

from utils.language import adapters, causal_lm

MODELS = {"llama": dict(), "qwen3": dict(head_dim=2)}  # tied; vectors of 2 rows
OPTIONS = dict(dtype=torch.float32, attn_implementation="sdpa")


def save(folder, name, dtype=torch.float32, **options):
    """Writes a small model to a folder as transformers does; returns it."""
    model = make_model(name, **MODELS.get(name, {})).to(dtype)
    model.save_pretrained(folder, **options)
    return model


def load_sharded(accelerator, mesh, folder, adapt=lambda model: model, **options):
    """The model in a folder, as `prepare` makes it; `options` of its building, and `offload`."""
    offload = options.pop("offload", False)
    config = transformers.AutoConfig.from_pretrained(folder)
    model = causal_lm.build_empty(config, OPTIONS | options)
    places = causal_lm.find_weights(model, str(folder))
    model = adapt(model)
    drawn, buffers = model.state_dict(), dict(model.named_buffers())
    model = fully_shard(model.to("meta"), mesh=mesh)
    model.tie_weights()
    assert causal_lm.read_slices(places, accelerator, model, drawn, offload) is model
    model.tie_weights()
    for name, buffer in buffers.items():
        owner, _, last = name.rpartition(".")
        model.get_submodule(owner).register_buffer(last, buffer, persistent=False)
    return model


def write_slices(accelerator, folder, model, dtype):
    """Writes a sharded model, as the export does."""
    layout = [None]
    if accelerator.is_main_process:
        layout = [adapters.lay_out(folder, model, dtype)]
        for name in layout[0]:
            load_file(folder / name)  # it has its length before its values
    dist.broadcast_object_list(layout)
    adapters.write_slices(folder, layout[0], model, dtype)


@pytest.mark.parametrize(
    ("name", "dtype", "limit", "sizes"),
    [
        ("llama", torch.bfloat16, "20KB", (3,)),
        ("qwen3", torch.float16, "5GB", (3,)),
        ("llama", torch.float32, "5GB", (2, 2)),
    ],
)
def test_slices_make_the_files_that_transformers_writes(
    name, dtype, limit, sizes, tmp_path, monkeypatch
):
    """Of several copies of a model, the first is written."""
    monkeypatch.setattr(adapters, "SHARD_SIZE", limit)
    base, copy, copies = tmp_path / "base", tmp_path / "copy", len(sizes) == 2
    expected = save(base, name, dtype, max_shard_size=limit).state_dict()
    copy.mkdir()

    def process(accelerator, mesh):
        model = load_sharded(accelerator, mesh, base, offload=copies)
        for key, weight in model.state_dict().items():
            assert weight.dtype == torch.float32 and weight.to_local().device.type == "cpu"
            assert torch.equal(weight.full_tensor(), expected[key].float()), key
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(mesh.get_coordinate()[0] if copies else 0)
        write_slices(accelerator, copy, model, dtype)
        return [len(weight.to_local()) for weight in model.parameters()]

    rows = in_group(process, 4 if copies else 3, sizes=sizes)
    assert (name == "qwen3") == (0 in rows[2]) and min(rows[0]) > 0
    one, other = ({path.name: path.read_bytes() for path in f.glob("model*")} for f in (base, copy))
    assert one == other and (len(one) == 1 if limit == "5GB" else len(one) > 3)


def test_adapters_are_those_of_the_first_process(tmp_path):
    """And the frozen weights keep the dtype of their files."""
    base = save(tmp_path, "llama", torch.bfloat16).state_dict()

    def process(accelerator, mesh):
        drawn = {}

        def adapt(model):
            torch.manual_seed(accelerator.process_index)
            model = adapters.add_lora(model, 2, 4, 0.0, ["q_proj"])
            adapter = {name for name in model.state_dict() if "lora_" in name}
            drawn.update({name: model.state_dict()[name].tolist() for name in adapter})
            return model

        model = load_sharded(accelerator, mesh, tmp_path, adapt, dtype=torch.bfloat16)
        state = {name: weight.full_tensor() for name, weight in model.state_dict().items()}
        for name, weight in base.items():
            layered = name.replace("q_proj.", "q_proj.base_layer.")
            assert torch.equal(state[f"base_model.model.{layered}"], weight), name
            assert state[f"base_model.model.{layered}"].dtype == torch.bfloat16
        trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
        assert trained == drawn.keys() and len(trained) == 4
        return drawn, {name: state[name].tolist() for name in trained}

    (drawn, one), (others, two) = in_group(process, 2)
    assert one == two == drawn != others


# ----------------------------------------------------------------------- files that are not read so


def places_of(folder, model=None, name=None):
    config = transformers.AutoConfig.from_pretrained(folder)
    model = model or causal_lm.build_empty(config, OPTIONS)
    return causal_lm.find_weights(model, name or str(folder))


def change(folder, edit):
    state = load_file(folder / "model.safetensors")
    edit(state)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def test_only_files_with_just_the_parameters_are_read_in_slices(tmp_path, monkeypatch):
    """From the Hub, only those that the index names are downloaded."""
    for edit in (
        lambda state: state.pop("model.norm.weight"),
        lambda state: state.update(more=torch.ones(1)),
        lambda state: state.update({"lm_head.weight": torch.ones(300, 32)}),  # which is tied
        lambda state: state.update({"model.norm.weight": torch.ones(1, 32)}),
    ):
        save(tmp_path, "llama")
        assert places_of(tmp_path)
        change(tmp_path, edit)
        assert places_of(tmp_path) is None
    (tmp_path / "model.safetensors").unlink()
    model, asked = save(tmp_path, "llama", max_shard_size="20KB"), []

    def download(name, allow_patterns):
        asked.append((name, allow_patterns))
        return tmp_path

    monkeypatch.setattr(causal_lm, "snapshot_download", download)
    (tmp_path / "consolidated.safetensors").touch()
    places = places_of(tmp_path)
    assert {*places} == dict(model.named_parameters()).keys() and not asked
    assert places_of(tmp_path, name="some/model") == places
    names = sorted({path.name for path in places.values()})
    assert ("some/model", names) in asked and len(names) > 2
    for name, path in places.items():
        assert path.parent == tmp_path and name in load_file(path)
    model.config.quantization_config = {}
    assert places_of(tmp_path, model) is None
    del model.config.quantization_config
    model.register_buffer("kept", torch.ones(1))
    assert places_of(tmp_path, model) is None
    places["model.norm.weight"].unlink()
    assert places_of(tmp_path) is None
