"""LoRA: what is trained, saved, merged and refused; and the folders that a model is exported to."""

import json

import pytest
import torch
from harness import fakes
from harness.chats import make_tokenizer
from harness.language_models import make_model
from harness.worlds import in_group
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard

transformers = pytest.importorskip("transformers")

from peft import PeftModel
from transformers import AutoModelForCausalLM

from utils.language import adapters, causal_lm
from utils.run.failures import UserError


def lora(targets=("q_proj",), model=None):
    return adapters.add_lora(model or make_model("llama"), 4, 8.0, 0.0, list(targets))


def test_the_state_of_lora_is_the_adapter():
    model = lora(["all-linear"])
    layer = model.get_base_model().model.layers[0].mlp.up_proj
    layer.register_state_dict_post_hook(  # as one whose weight is quantized
        lambda _, state, prefix, __: state.update({f"{prefix}base_layer.weight.absmax": 0})
    )
    whole = model.state_dict()
    assert any(name.endswith(".weight.absmax") for name in whole)
    adapters.save_trained_only(model)
    state = model.state_dict()
    assert state and all("lora_" in name for name in state) and len(whole) > len(state)
    changed = {name: value + 1 for name, value in state.items()}
    model.load_state_dict(changed)
    assert all(torch.equal(value, changed[name]) for name, value in model.state_dict().items())
    changed.pop(next(iter(changed)))
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(changed)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict({**state, "other": torch.zeros(1)})
    plain = make_model("llama")
    adapters.save_trained_only(plain.requires_grad_(False))
    assert plain.state_dict()


def test_lora_has_its_settings_and_trains_only_adapters_in_float32():
    of_all = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    for targets, expected in (
        (["q_proj", "v_proj"], {"q_proj", "v_proj"}),
        (["all-linear"], of_all),
    ):
        model = adapters.add_lora(make_model("llama").to(torch.bfloat16), 4, 8.0, 0.5, targets)
        config = model.peft_config["default"]
        assert (config.r, config.lora_alpha, config.lora_dropout) == (4, 8.0, 0.5)
        assert config.task_type == "CAUSAL_LM"  # the class that loads it
        trained = {name: some for name, some in model.named_parameters() if some.requires_grad}
        assert {weight.dtype for weight in trained.values()} == {torch.float32}
        assert {name.split(".lora_")[0].rpartition(".")[2] for name in trained} == expected


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: lora(["nothing"]), "--lora_targets nothing matches no layer; .* o_proj, q_proj"),
        (lambda: lora(["q_proj", "proj"]), "--lora_targets proj matches no layer"),
        (lambda: lora(["q_proj", "lm_head"]), "lm_head is tied to the embedding, which a merge"),
        (lambda: adapters.merge("nowhere"), "has no adapter/"),
    ],
)
def test_what_matches_nothing_is_one_line(call, says):
    with pytest.raises(UserError, match=says):
        call()


def prepared(here, model):
    """An accelerator with a prepared model. Gathered, tied weights come as two copies."""

    def gather(_):
        state = model.state_dict().items()
        return {key: getattr(value, "full_tensor", value.clone)() for key, value in state}

    here.unwrap_model, here.get_state_dict = lambda _: model, gather
    return here


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, "20KB"), (torch.bfloat16, "5GB")])
def test_an_export_is_what_transformers_writes_of_the_rounded_model(
    dtype, limit, tmp_path, monkeypatch
):
    """And what is evaluated last."""
    monkeypatch.setattr(adapters, "SHARD_SIZE", limit)
    model, expected = make_model("llama"), make_model("llama")
    for some in (model, expected):
        some.register_buffer("count", torch.tensor(2**30 + 1))  # no rounding
    for left_over in ("model", ".model.writing"):
        (tmp_path / left_over).mkdir()
        (tmp_path / left_over / "model_of_before").touch()
    model.export_dtype = dtype
    here = prepared(fakes.accelerator(), model)
    adapters.export(here, tmp_path, model, causal_lm.byte_tokenizer())
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    expected.to(dtype).save_pretrained(tmp_path / "expected", max_shard_size=limit)
    folders = [tmp_path / part for part in ("model", "expected")]
    one, other = ({path.name: path.read_bytes() for path in f.glob("model*")} for f in folders)
    assert one == other and (len(one) > 3) == (limit == "20KB")
    one, other = (json.loads((folder / "config.json").read_text()) for folder in folders)
    assert one == other and one["dtype"] == str(dtype).split(".")[1]
    assert model.dtype == torch.float32 and model.count == 2**30 + 1
    rounded = expected.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, rounded[name].to(value.dtype)), name


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_processes_export_a_sharded_model_together(name, tmp_path, monkeypatch):
    """Each its slices; unless transformers has to join its weights first."""
    wrote, write = [], adapters.write_slices
    monkeypatch.setattr(adapters, "write_slices", lambda *a: wrote.append(1) or write(*a))

    def process(here, mesh):
        model, tokenizer = make_model(name), causal_lm.byte_tokenizer()
        model.export_dtype = torch.bfloat16
        model = fully_shard(model, mesh=mesh)
        adapters.export(prepared(here, model), tmp_path, model, tokenizer)
        return len(wrote)

    assert in_group(process, 2) == [int(name == "llama")] * 2
    loaded, _, _ = adapters.load_trained(tmp_path)
    assert loaded.dtype == torch.bfloat16 and [*tmp_path.iterdir()] == [tmp_path / "model"]
    expected = make_model(name).to(torch.bfloat16).state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in loaded.state_dict().items())


def test_a_run_says_what_its_model_was_trained_on(tmp_path):
    """Otherwise the template does, if there is one."""
    model, tokenizer = make_model("llama"), causal_lm.byte_tokenizer()
    for template, expected in ((tokenizer.chat_template, "messages"), (None, "text")):
        tokenizer.chat_template = template
        adapters.write(tmp_path, model, model.state_dict(), tokenizer)
        loaded, known, found = adapters.load_trained(tmp_path, dtype=torch.bfloat16)
        assert found == expected and known.get_vocab() == tokenizer.get_vocab()
        assert loaded.dtype == torch.bfloat16
    (tmp_path / "args.json").write_text('{"arguments": {}, "data": {"kind": "prompt"}}')
    assert adapters.load_trained(tmp_path)[2] == "prompt"


def test_an_adapter_is_merged_in_float32_with_the_base_that_it_was_trained_on(
    tmp_path, monkeypatch
):
    """In bfloat16 most of these changes would be rounded away."""
    base, run = tmp_path / "base", tmp_path / "run"
    run.mkdir()
    model, tokenizer = make_model("llama").to(torch.bfloat16), causal_lm.byte_tokenizer()
    model.save_pretrained(base)
    tokenizer.save_pretrained(base)
    fingerprint = causal_lm.fingerprint(str(base))
    (run / "args.json").write_text(json.dumps({"arguments": {}, "data": {"base": fingerprint}}))
    adapter = lora(model=causal_lm.load_weights(str(base)))
    for name, weight in adapter.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=1e-5)
    adapters.export(prepared(fakes.accelerator(), adapter), run, adapter, tokenizer)
    names = {file.name for file in (run / "adapter").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= names
    written = load_file(run / "adapter" / "adapter_model.safetensors").values()
    assert {value.dtype for value in written} == {torch.float32}
    assert "README.md" not in names  # that of peft
    with monkeypatch.context() as patch:
        patch.setattr(PeftModel, "merge_and_unload", lambda _: make_model("qwen3"), raising=False)
        with pytest.raises(UserError, match="the merged model has other logits, by up to"):
            adapters.merge(run)
    assert not (run / "model").exists()
    assert adapters.merge(run).startswith(f"written to {run / 'model'}; logits differ by at most ")
    merged = load_file(run / "model" / "model.safetensors")
    for name, weight in model.state_dict().items():
        if "q_proj" in name:
            changed = (merged[name] != weight.float()).float().mean()
            assert merged[name].dtype == torch.float32 and changed > 0.5
    # An adapter that is trained further is not evaluated with what was merged before.
    adapters.write(run, adapter, adapter.state_dict(), tokenizer)
    loaded, _, _ = adapters.load_trained(run, dtype=torch.float32)
    assert isinstance(loaded, PeftModel) and loaded.get_base_model().dtype == torch.float32
    with torch.no_grad():
        model.model.norm.weight.add_(1)
    model.save_pretrained(base)
    with pytest.raises(UserError, match="was trained on another model"):
        adapters.merge(run)
    settings = run / "adapter" / "adapter_config.json"
    settings.write_text(settings.read_text().replace(f'"{base}"', "null"))
    with pytest.raises(UserError, match="does not say what its base model is"):
        adapters.merge(run)


def test_whoever_loads_an_export_stops_where_answers_end(tmp_path):
    """The base model knows the end of a text, and the template ends a turn with another token."""
    model, tokenizer = make_model("llama"), make_tokenizer(eos_token="<pad>")
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    adapters.write(tmp_path, model, model.state_dict(), tokenizer)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    ends = sorted(tokenizer.convert_tokens_to_ids(["<|im_end|>", "<pad>"]))
    assert loaded.generation_config.eos_token_id == ends
