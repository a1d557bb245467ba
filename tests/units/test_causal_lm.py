"""Language models of transformers: what is loaded, what identifies it, and what is refused."""

from types import SimpleNamespace

import pytest
import torch
from harness import fakes
from harness.language_models import PACKED, SIZES, VOCABULARY, make_config, make_model
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers")

from utils.language import adapters, causal_lm
from utils.run.failures import UserError


def saved(folder, config):
    config.save_pretrained(folder)
    causal_lm.byte_tokenizer().save_pretrained(folder)
    return str(folder)


def load_model(name="tiny", config=None, accelerator=None, **options):
    defaults = dict(attention="auto", dtype=None, export_dtype="auto", from_scratch=True, seed=0)
    options = defaults | dict(lora_rank=0, adapter=None) | options
    args, config = SimpleNamespace(model=name, **options), config or make_config("llama")
    return causal_lm.load_model(accelerator or fakes.accelerator(), config, args)


def test_the_byte_tokenizer_keeps_any_text():
    tokenizer = causal_lm.byte_tokenizer()
    for text in ("  two  spaces\n\n", "naïve 日本 🙂\t", "<|not special|>", "a , b"):
        ids = tokenizer(text)["input_ids"]
        assert len(ids) == len(text.encode()) and tokenizer.decode(ids) == text
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert tokenizer.convert_tokens_to_ids(names) == [256, 257, 258]
    assert (tokenizer.pad_token, tokenizer.eos_token) == (names[0], names[2])
    assert tokenizer.model_max_length == 2048
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_tiny_model_has_the_documented_size():
    tokenizer = causal_lm.load_tokenizer("tiny")
    config = causal_lm.load_config("tiny", tokenizer, 2048)
    model = load_model("tiny", config)
    assert sum(weight.numel() for weight in model.parameters()) == 820_736
    assert (len(tokenizer), config.vocab_size, config.max_position_embeddings) == (259, 259, 2048)
    assert (config.eos_token_id, config.pad_token_id, config.bos_token_id) == (258, 256, None)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with pytest.raises(UserError, match="--block_size 2049: --model tiny has 2048 positions"):
        causal_lm.load_config("tiny", tokenizer, 2049)


def test_a_fingerprint_tells_models_apart(tmp_path, monkeypatch):
    model, prints = make_model("llama"), []
    for change in (0, 0, 1):
        with torch.no_grad():
            model.lm_head.weight[0, 0] += change
        model.save_pretrained(tmp_path)
        prints.append(causal_lm.fingerprint(str(tmp_path), model.config))
    assert prints[0] == prints[1] != prints[2] and len(prints[0]) == 12
    # Names are part of it.
    file = tmp_path / "model.safetensors"
    state, content = load_file(file), file.read_bytes()
    save_file({f"x.{name}": value for name, value in state.items()}, file)
    assert causal_lm.fingerprint(str(tmp_path), model.config) != prints[2]
    file.write_bytes(content)
    # It lies elsewhere, was read by another release of transformers, in another precision.
    moved = tmp_path.rename(tmp_path.with_name("moved"))
    config = transformers.AutoConfig.from_pretrained(moved, dtype="bfloat16")
    with monkeypatch.context() as patch:
        patch.setattr(transformers.configuration_utils, "__version__", "5.99")
        assert causal_lm.fingerprint(str(moved), config) == prints[2]
    config.rms_norm_eps *= 2
    assert causal_lm.fingerprint(str(moved), config) != prints[2]
    assert causal_lm.fingerprint("tiny", config) != causal_lm.fingerprint("tiny", model.config)


def test_what_keeps_documents_apart_can_be_packed():
    assert all(causal_lm.can_pack(make_config(name)) for name in PACKED)
    chunked = transformers.Llama4TextConfig(num_hidden_layers=4)
    assert "chunked_attention" in chunked.layer_types and causal_lm.can_pack(chunked)
    states = [transformers.MambaConfig(), transformers.Qwen3NextConfig()]
    states += [transformers.RwkvConfig()]  # which does not list its layers
    ignoring = "afmoe biogpt bloom gpt_oss mpt openai-gpt opt xglm".split()
    for config in (*states, *map(transformers.AutoConfig.for_model, ignoring)):
        assert not causal_lm.can_pack(config), config.model_type


def test_other_processes_of_a_sharded_run_hold_no_weights():
    """But the same names, tied weights and real angles of the positions."""
    config = make_config("llama")
    main, other = (fakes.accelerator(2, rank, is_fsdp2=True) for rank in (0, 1))
    model, empty = (load_model("x", config, who) for who in (main, other))
    assert list(model.state_dict()) == list(empty.state_dict())
    assert empty.lm_head.weight is empty.model.embed_tokens.weight
    for (name, one), two in zip(model.named_buffers(), empty.buffers(), strict=True):
        assert torch.equal(one, two), name
    assert all(weight.device.type == "cpu" for weight in empty.parameters())
    assert model.lm_head.weight.std() > 0.01


def test_processes_of_a_sharded_run_read_their_own_slices(tmp_path, monkeypatch, capfd):
    """None holds weights before `prepare`; unless transformers has to convert them."""
    used = []
    monkeypatch.setattr(causal_lm.sharded_files.patches, "load_shards_with", used.append)
    main, other = (fakes.accelerator(2, rank, is_fsdp2=True) for rank in (0, 1))
    for name, reads in (("llama", 2), ("mixtral", 0)):
        used.clear()
        model = make_model(name)
        model.save_pretrained(tmp_path / name)
        models = [
            load_model(str(tmp_path / name), model.config, who, from_scratch=False)
            for who in (main, other)
        ]
        said = " ".join(capfd.readouterr())
        assert len(used) == reads and ("the main process reads all of them" in said) == (not reads)
        state = models[0].state_dict()
        assert reads or torch.equal(state["lm_head.weight"], model.lm_head.weight)
        assert [list(some.state_dict()) for some in models] == [list(model.state_dict())] * 2
        if reads:
            assert models[1].config.to_dict() == models[0].config.to_dict()


# ---------------------------------------------------------------------------------------- refusals


def test_a_model_that_cannot_be_trained_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tokenizer = causal_lm.byte_tokenizer()
    llama = saved(tmp_path / "llama", make_config("llama"))
    small = saved(tmp_path / "small", transformers.LlamaConfig(**SIZES | {"vocab_size": 258}))
    t5 = saved(tmp_path / "t5", transformers.T5Config(vocab_size=300))
    broken, empty = tmp_path / "broken", tmp_path / "empty"
    for folder in (broken, empty, tmp_path / "lora" / "adapter"):
        folder.mkdir(parents=True)
    (broken / "config.json").write_text("{")
    cases = [
        (llama, 65, "--block_size 65"),
        (small, 16, "has a token 258, and"),
        (t5, 16, "no causal language model, but t5"),
        (str(broken), 16, "cannot load its configuration"),
        (str(empty), 16, "has no config.json"),
        (str(tmp_path / "lora"), 16, f"has an adapter only: .* --merge {tmp_path / 'lora'}"),
        (f"{tmp_path}/nowhere", 16, "there is no such folder"),
        ("./nowhere", 16, "there is no such folder"),
        ("someone/not-there", 16, "not to be had from the Hub"),
        ("not a/name/at all", 16, "--model not a/name/at all"),
    ]
    for name, block_size, says in cases:
        with pytest.raises(UserError, match=says) as error:
            causal_lm.load_config(name, tokenizer, block_size)
        assert "\n" not in str(error.value)
    assert causal_lm.load_config(llama, tokenizer, 64).model_type == "llama"
    with pytest.raises(UserError, match="the model runs/nowhere is no folder, and not to be had"):
        adapters.load_trained("runs/nowhere")
    sparse = SimpleNamespace(get_vocab=lambda: {"a": 0, "b": VOCABULARY})
    with pytest.raises(UserError, match=f"has a token {VOCABULARY}, and"):
        causal_lm.load_config(llama, sparse, 64)


def test_a_chat_template_is_read_from_a_file(tmp_path):
    (tmp_path / "good.jinja").write_text("ä", encoding="utf-8")
    (tmp_path / "bad.jinja").write_bytes(b"\xff")
    assert causal_lm.load_tokenizer("tiny", str(tmp_path / "good.jinja")).chat_template == "ä"
    for file, says in (("none", "No such file"), ("bad", "it is not UTF-8")):
        path = str(tmp_path / f"{file}.jinja")
        with pytest.raises(UserError, match=f"cannot read --chat_template {path}: {says}"):
            causal_lm.load_tokenizer("tiny", path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=rf"--model {tmp_path}: cannot load its tokenizer \("):
        causal_lm.load_tokenizer(str(tmp_path))


def test_weights_are_safetensors_or_refused(tmp_path):
    folder = saved(tmp_path, make_config("llama"))
    torch.save(make_model("llama").state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="cannot load its model"):
        load_model(folder, from_scratch=False)
    with pytest.raises(UserError, match="flex does not train on a CPU"):
        load_model(folder, attention="flex")


def test_a_weight_that_the_files_lack_is_not_drawn_at_random(tmp_path, capfd):
    model = make_model("qwen3")
    model.save_pretrained(tmp_path)
    model.config.num_hidden_layers = 1
    loaded = causal_lm.load_weights(str(tmp_path), config=model.config)
    assert len(loaded.model.layers) == 1
    assert "model.layers.1" in capfd.readouterr().err.replace("NOTE", "")  # left out, and said
    state = load_file(tmp_path / "model.safetensors")
    lacking = {name: value for name, value in state.items() if "0.mlp.up_proj" not in name}
    save_file(lacking, tmp_path / "model.safetensors", metadata={"format": "pt"})
    says = r"have no model.layers.0.mlp.up_proj.weight \(1 are missing\)"
    with pytest.raises(UserError, match=says):
        causal_lm.load_weights(str(tmp_path), config=model.config)
    assert "MISSING" not in capfd.readouterr().err  # the report of transformers, a page long


def test_code_in_a_model_is_not_run(tmp_path):
    """`auto_map` names a class in a file next to the weights."""
    folder = saved(tmp_path, make_config("llama"))
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    text = (tmp_path / "config.json").read_text()
    text = text.replace('"model_type": "llama"', '"model_type": "mine"').rstrip().rstrip("}")
    (tmp_path / "config.json").write_text(text + ', "auto_map": {"AutoConfig": "mine.Config"}}')
    with pytest.raises(UserError):
        causal_lm.load_config(folder, causal_lm.byte_tokenizer(), 16)
    assert not (tmp_path / "ran").exists()


def test_a_model_of_the_hub_is_loaded_from_its_cache(tmp_path, monkeypatch):
    """Its fingerprint is the commit, before and after the weights are there."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    commit, name, folder = "a" * 40, "someone/model", tmp_path / "models--someone--model"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    snapshot = folder / "snapshots" / commit
    saved(snapshot, make_config("llama"))
    tokenizer = causal_lm.load_tokenizer(name)
    loaded = causal_lm.load_config(name, tokenizer, 16)
    before = causal_lm.fingerprint(name, loaded)
    make_model("llama").save_pretrained(snapshot)
    assert causal_lm.fingerprint(name, loaded) == before and causal_lm.find(name) == snapshot
    model = load_model(name, loaded, from_scratch=False)
    assert model.name_or_path == name  # which an adapter records
    adapter = adapters.add_lora(model, 2, 4.0, 0.0, ["q_proj"])
    adapters.write(tmp_path, adapter, adapter.state_dict(), tokenizer)
    assert f'"{name}"' in (tmp_path / "adapter" / "adapter_config.json").read_text()
    adapters.merge(tmp_path)
    assert (tmp_path / "model" / "model.safetensors").exists()


def test_new_weights_are_not_quantized():
    config = causal_lm.tiny_config(259)
    config.quantization_config = {"quant_method": "fp8"}
    assert "quantization_config" not in load_model("a", config).config.to_dict()


FLOAT, BRAIN = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("options", "dtype", "exported"),
    [
        ({}, FLOAT, BRAIN),
        ({"export_dtype": "float32"}, FLOAT, FLOAT),
        ({"from_scratch": True}, FLOAT, FLOAT),
        ({"from_scratch": True, "export_dtype": "bfloat16"}, FLOAT, BRAIN),
        ({"name": "tiny"}, FLOAT, FLOAT),
        ({"lora_rank": 4}, BRAIN, BRAIN),
        ({"adapter": "a"}, BRAIN, BRAIN),
        ({"lora_rank": 4, "dtype": "float32"}, FLOAT, BRAIN),
        ({"attention": "sdpa"}, FLOAT, BRAIN),
        ({"attention": "eager"}, FLOAT, BRAIN),
    ],
)
def test_the_dtype_of_weights_and_of_their_export(options, dtype, exported, tmp_path):
    base = load_model(seed=1).bfloat16()
    base.save_pretrained(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    options = {"name": str(tmp_path), "from_scratch": False} | options
    model = load_model(config=config, **options)
    assert (model.dtype, model.export_dtype) == (dtype, exported)
    attention = model.config._attn_implementation  # of transformers
    assert attention == ("eager" if options.get("attention") == "eager" else "sdpa")
    is_new = options["from_scratch"] or options["name"] == "tiny"
    assert torch.equal(model.lm_head.weight.bfloat16(), base.lm_head.weight) != is_new


def test_any_error_while_a_model_is_loaded_is_one_line():
    long = ValueError("a  b\nc " + 400 * "x")
    for error, reason in ((long, f"a b c {294 * 'x'}"), (KeyError(), "KeyError")):
        with pytest.raises(UserError) as caught, causal_lm.loading("NAME", "model"):
            raise error
        assert str(caught.value) == f"--model NAME: cannot load its model ({reason})"


@pytest.mark.parametrize(
    ("configured", "end", "pad", "expected"),
    [
        (7, 5, None, dict(eos_token_id=[5, 7], pad_token_id=5)),
        ([9, 7], None, None, dict(eos_token_id=[7, 9], pad_token_id=0)),
        (None, None, 0, dict(eos_token_id=None, pad_token_id=0)),
    ],
)
def test_an_answer_ends_with_any_end_of_the_model_or_the_tokenizer(configured, end, pad, expected):
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=configured))
    tokenizer = SimpleNamespace(eos_token_id=end, pad_token_id=pad, chat_template=None)
    assert causal_lm.ends(model, tokenizer) == expected
