"""Language models of transformers: what is loaded, what identifies it, and what is refused."""

from types import SimpleNamespace

import pytest
import torch
from harness import fakes
from harness.chats import write_files
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
    defaults = dict(attention="auto", export_dtype="auto", from_scratch=True, seed=0)
    options = defaults | dict(lora_rank=0) | options
    args, config = SimpleNamespace(model=name, **options), config or make_config("llama")
    return causal_lm.load_model(accelerator or fakes.accelerator(), config, args)


def test_the_tiny_model_has_the_documented_size_and_reads_any_text():
    tokenizer = causal_lm.load_tokenizer("tiny")
    for text in ("  two  spaces\n\n", "naïve 日本 🙂\t", "<|not special|>", "a , b"):
        ids = tokenizer(text)["input_ids"]
        assert len(ids) == len(text.encode()) and tokenizer.decode(ids) == text
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>assistant\n"
    )
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert tokenizer.convert_tokens_to_ids(names) == [256, 257, 258]
    config = causal_lm.load_config("tiny", tokenizer, 2048)
    assert (tokenizer.pad_token_id, config.pad_token_id) == (256, 256)
    assert (tokenizer.eos_token_id, config.eos_token_id, config.bos_token_id) == (258, 258, None)
    assert len(tokenizer) == config.vocab_size == 259
    with pytest.raises(UserError, match="--block_size 2049: --model tiny has 2048 positions"):
        causal_lm.load_config("tiny", tokenizer, 2049)
    config.quantization_config = {"quant_method": "fp8"}  # new weights have none
    model = load_model("a", config)
    assert sum(weight.numel() for weight in model.parameters()) == 820_736
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "quantization_config" not in model.config.to_dict()


def test_a_fingerprint_tells_models_apart(tmp_path):
    model, folder = make_model("llama"), tmp_path / "model"
    file = folder / "model.safetensors"

    def found():
        return causal_lm.fingerprint(str(folder))

    model.save_pretrained(folder)
    first = found()
    assert first == found() and len(first) == 12
    state, content = load_file(file), file.read_bytes()
    changed = {name: weight + (name == "model.norm.weight") for name, weight in state.items()}
    for other in (changed, {f"x.{name}": value for name, value in state.items()}):
        save_file(other, file, metadata={"format": "pt"})
        assert found() != first
    file.write_bytes(content)
    folder = folder.rename(tmp_path / "moved")
    assert found() == first != causal_lm.fingerprint("tiny")
    model.config.rms_norm_eps *= 2
    model.config.save_pretrained(folder)
    assert found() != first


def test_what_keeps_documents_apart_can_be_packed():
    chunked = transformers.Llama4TextConfig(num_hidden_layers=4)
    assert "chunked_attention" in chunked.layer_types
    assert all(causal_lm.can_pack(config) for config in (chunked, *map(make_config, PACKED)))
    states = ["mamba", "qwen3_next", "rwkv"]  # the last does not list its layers
    ignoring = "afmoe biogpt bloom gpt_oss mpt openai-gpt opt xglm".split()
    for name in (*states, *ignoring):
        assert not causal_lm.can_pack(transformers.AutoConfig.for_model(name)), name


@pytest.mark.parametrize(
    ("name", "from_scratch", "reads"),
    [("llama", False, 2), ("mixtral", False, 0), ("llama", True, 0)],
)
def test_processes_of_a_sharded_run_hold_no_weights(
    name, from_scratch, reads, tmp_path, monkeypatch, capfd
):
    """Each reads its slices; but the main process has those that are drawn, and those that
    transformers has to convert. All have the same names, tied weights and angles of the positions.
    """
    used = []
    monkeypatch.setattr(causal_lm.patches, "load_shards_with", used.append)
    expected = make_model(name)
    expected.generation_config.update(temperature=0.5, do_sample=True)
    expected.save_pretrained(tmp_path)
    both = [fakes.accelerator(2, rank, is_fsdp2=True) for rank in (0, 1)]
    options = dict(config=expected.config, from_scratch=from_scratch)
    main, other = (load_model(str(tmp_path), accelerator=who, **options) for who in both)
    said = " ".join(capfd.readouterr())
    assert ("the main process reads all of them" in said) == (name == "mixtral")
    assert len(used) == reads and (reads or main.lm_head.weight.std() > 0.01)
    for model in (main, other):
        assert list(model.state_dict()) == list(expected.state_dict())
        tied = model.lm_head.weight is model.get_input_embeddings().weight
        assert tied == (name == "llama")
        for (key, one), two in zip(model.named_buffers(), expected.buffers(), strict=True):
            assert torch.equal(one, two), key
        assert all(weight.device.type == "cpu" for weight in model.parameters())
    if name == "mixtral":
        assert torch.equal(main.lm_head.weight, expected.lm_head.weight)
    if reads:
        assert main.config.to_dict() == other.config.to_dict()
        assert main.generation_config.temperature == 0.5
        assert main.name_or_path == main.config.name_or_path == str(tmp_path)
        assert used[0].args == (causal_lm.find_weights(main, str(tmp_path)),)


# ------------------------------------------------------------------------------------------ memory


def test_weights_gradients_and_moments_are_counted():
    """In bytes: of all weights, of shards, and of LoRA beside weights in bfloat16."""
    config = make_config("llama")
    model = make_model("llama")
    count = model.num_parameters()
    block = sum(weight.numel() for weight in model.model.layers[0].parameters())
    rest = 2 * block + model.model.embed_tokens.weight.numel() + 32  # the last norm
    for options, expected in (
        ((None, 1, 1, False), (4, 4, 8)),
        ((None, 2, 1, False), (4, 8, 8)),  # the buckets of DDP
        ((None, 1, 1, True), (6, 4, 8)),  # autocast keeps copies
        ((None, 8, 4, False), (1 + 4 * rest / count, 1, 2)),
        ((None, 4, 4, True), (1 + 2 * rest / count, 1, 2)),
        ((torch.bfloat16, 1, 1, False), (0.99 * 2 + 0.04, 0.04, 0.08)),
    ):
        found = causal_lm.estimate_memory(config, *options)
        assert [part / count for part in found] == pytest.approx(expected), options
    assert causal_lm.estimate_memory(make_config("gpt2"), None, 2, 2, False)


def test_what_cannot_fit_is_refused_and_what_may_is_said(monkeypatch, capsys):
    memory, asked, gib = SimpleNamespace(available=50 * 2**30), [], 2**30

    def estimate(*options):
        asked.append(options[1:])
        return 4 * gib, 8 * gib, 8 * gib

    monkeypatch.setattr(causal_lm.psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(causal_lm.devices, "local_processes", lambda: 2)
    monkeypatch.setattr(causal_lm, "estimate_memory", estimate)

    def check(rank=0, **options):
        here = fakes.accelerator(2, rank, mixed_precision="bf16")
        args = SimpleNamespace(**dict(lora_rank=0) | options)
        causal_lm.check_memory(here, SimpleNamespace(dtype=torch.bfloat16), args)
        return capsys.readouterr().out

    says = "memory per process: weights 4.0, gradients 8.0, optimizer 8.0, and activations; 25.0"
    assert check().startswith(says) and check(rank=1) == ""
    check(lora_rank=4)
    dtypes = [None, None, torch.bfloat16]
    assert asked == [(dtype, 2, 1, True) for dtype in dtypes]
    memory.available = 2 * 19 * gib
    with pytest.raises(UserError, match=r"the model does not fit: .* 19\.0 GiB are free"):
        check()
    gib = 10
    assert check() == ""


# ---------------------------------------------------------------------------------------- refusals


def test_a_model_that_cannot_be_trained_is_one_line(tmp_path, monkeypatch):
    """Code in it, such as that of a class next to its weights, is not run."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tokenizer = causal_lm.byte_tokenizer()
    llama = saved(tmp_path / "llama", make_config("llama"))
    saved(tmp_path / "small", transformers.LlamaConfig(**SIZES | {"vocab_size": 258}))
    saved(tmp_path / "t5", transformers.T5Config(vocab_size=300))
    mine = '{"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}'
    code = f"open({str(tmp_path / 'ran')!r}, 'w')"
    write_files(tmp_path, broken__config_json="{", own__config_json=mine, own__mine_py=code)
    for folder in ("empty", "lora/adapter"):
        (tmp_path / folder).mkdir(parents=True)
    for name, says in (
        ("small", "has a token 258, and"),
        ("t5", "no causal language model, but t5"),
        ("broken", "cannot load its configuration"),
        ("own", "cannot load its configuration"),
        ("empty", "has no config.json"),
        ("lora", f"has an adapter only: .* --merge {tmp_path / 'lora'}"),
        ("./nowhere", "there is no such folder"),
        ("someone/not-there", "not to be had from the Hub"),
        ("not a/name/at all", "--model not a/name/at all"),
    ):
        local = "/" not in name
        with pytest.raises(UserError, match=says) as error:
            causal_lm.load_config(str(tmp_path / name) if local else name, tokenizer, 16)
        assert "\n" not in str(error.value) and not (tmp_path / "ran").exists()
    with pytest.raises(UserError, match="the model runs/nowhere is no folder, and not to be had"):
        adapters.load_trained("runs/nowhere")
    assert causal_lm.load_config(llama, tokenizer, 64).model_type == "llama"
    sparse = SimpleNamespace(get_vocab=lambda: {"a": 0, "b": VOCABULARY})
    for known, size, says in (
        (sparse, 64, f"has a token {VOCABULARY}, and"),
        (tokenizer, 65, "--block_size 65"),
    ):
        with pytest.raises(UserError, match=says):
            causal_lm.load_config(llama, known, size)


def test_a_chat_template_is_read_from_a_file(tmp_path):
    (tmp_path / "good.jinja").write_text("ä", encoding="utf-8")
    (tmp_path / "bad.jinja").write_bytes(b"\xff")
    assert causal_lm.load_tokenizer("tiny", str(tmp_path / "good.jinja")).chat_template == "ä"
    for file, says in (("none", "No such file"), ("bad", "it is not UTF-8")):
        path = str(tmp_path / f"{file}.jinja")
        with pytest.raises(UserError, match=f"cannot read --chat_template {path}: {says}"):
            causal_lm.load_tokenizer("tiny", path)


def test_weights_are_all_in_files_of_safetensors_or_refused(tmp_path, capfd):
    folder, file = saved(tmp_path, make_config("qwen3")), tmp_path / "model.safetensors"
    model = make_model("qwen3")
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="cannot load its model"):
        load_model(folder, from_scratch=False)
    model.save_pretrained(tmp_path)
    model.config.num_hidden_layers = 1
    loaded = causal_lm.load_weights(folder, config=model.config)
    assert len(loaded.model.layers) == 1
    assert "model.layers.1" in capfd.readouterr().err.replace("NOTE", "")  # left out, and said
    state = load_file(file)
    lacking = {name: value for name, value in state.items() if "0.mlp.up_proj" not in name}
    save_file(lacking, file, metadata={"format": "pt"})
    says = r"have no model.layers.0.mlp.up_proj.weight \(1 are missing\)"
    with pytest.raises(UserError, match=says):
        causal_lm.load_weights(folder, config=model.config)
    assert "MISSING" not in capfd.readouterr().err  # the report of transformers, a page long


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
    before = causal_lm.fingerprint(name)
    make_model("llama").save_pretrained(snapshot)
    assert causal_lm.fingerprint(name) == before and causal_lm.find(name) == snapshot
    model = load_model(name, loaded, from_scratch=False)
    assert model.name_or_path == name  # which an adapter records
    adapter = adapters.add_lora(model, 2, 4.0, 0.0, ["q_proj"])
    adapters.write(tmp_path, adapter, adapter.state_dict(), tokenizer)
    assert f'"{name}"' in (tmp_path / "adapter" / "adapter_config.json").read_text()
    adapters.merge(tmp_path)
    assert (tmp_path / "model" / "model.safetensors").exists()


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


def test_an_answer_ends_with_any_end_of_the_model_or_the_tokenizer():
    for configured, end, pad, ends, fills in (
        (7, 5, None, [5, 7], 5),
        ([9, 7], None, None, [7, 9], 0),
        (None, None, 0, None, 0),
    ):
        model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=configured))
        tokenizer = SimpleNamespace(eos_token_id=end, pad_token_id=pad, chat_template=None)
        expected = dict(eos_token_id=ends, pad_token_id=fills)
        assert causal_lm.ends(model, tokenizer) == expected
