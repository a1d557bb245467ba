"""Language models: the loss is the model's own, and packed documents do not see each other."""

import contextlib
import copy
import json
from types import SimpleNamespace

import pytest
import torch

transformers = pytest.importorskip("transformers")

from accelerate import Accelerator
from harness.launches import load_script
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from utils import adapters, causal_lm, lm_loss
from utils.run.failures import UserError

VOCABULARY = 300
SMALL = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    head_dim=8,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
EXPERTS = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2)
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SMALL, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64
    ),
    "gemma2": lambda: transformers.Gemma2Config(
        **SMALL, sliding_window=4, final_logit_softcapping=2.0, query_pre_attn_scalar=8
    ),
    "granite": lambda: transformers.GraniteConfig(**SMALL, logits_scaling=4.0),
    "cohere": lambda: transformers.CohereConfig(**SMALL, logit_scale=0.25),
    "opt": lambda: transformers.OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        word_embed_proj_dim=32,
    ),
    "mistral": lambda: transformers.MistralConfig(**SMALL, sliding_window=4),
    "mixtral": lambda: transformers.MixtralConfig(
        **SMALL, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True
    ),
}
PACKED = [name for name in CONFIGS if name != "opt"]


def build(name, attention=None, chunked=True):
    torch.manual_seed(0)
    config = CONFIGS[name]()
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with torch.no_grad():  # so that a token that sees another document has another loss
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(4)
    if chunked:
        lm_loss.chunk_loss(model)
    return model.eval()


def document(length=17):
    return torch.randint(3, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(1))


def batch(tokens):
    positions = torch.arange(tokens.shape[1] - 1)[None]
    targets = tokens[:, 1:]
    return dict(input_ids=tokens[:, :-1], position_ids=positions, targets=targets)


@pytest.mark.parametrize("size", [1, 5, 2**26])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_loss_and_its_gradients_are_the_models_own(name, size, monkeypatch):
    """In chunks of one, of five positions and of all."""
    monkeypatch.setattr(lm_loss, "LOGITS", size * VOCABULARY)
    tokens, model, own = document(), build(name), build(name, chunked=False)
    tokens[0, 9] = 0  # a token like any other
    # That of OPT takes its hidden states from a part of the backbone.
    assert model.own_loss == (name == "opt")
    loss = model(**batch(tokens))
    expected = own(input_ids=tokens, labels=tokens, use_cache=False).loss
    # The model's own forward pass has one position more, which balances experts a little otherwise.
    if name == "mixtral":
        inputs = batch(tokens)
        targets = inputs.pop("targets")
        expected = own(**inputs, labels=targets, shift_labels=targets, use_cache=False).loss
    assert loss.item() == pytest.approx(16 * expected.item(), rel=1e-5)
    loss.backward()
    (16 * expected).backward()
    for (place, weight), other in zip(model.named_parameters(), own.parameters(), strict=True):
        if other.grad is None:
            assert weight.grad is None, place
            continue
        assert torch.allclose(weight.grad, other.grad, rtol=1e-4, atol=2e-4), place


def test_the_auxiliary_loss_of_experts_counts():
    tokens = document()
    with_it = build("mixtral")(**batch(tokens)).item()
    model = build("mixtral")
    model.config.output_router_logits = False
    assert with_it > model(**batch(tokens)).item() * (1 + 1e-6)


@pytest.mark.parametrize("attention", [None, "eager"])
@pytest.mark.parametrize("name", PACKED)
def test_packed_documents_have_the_loss_that_they_have_alone(name, attention):
    model = build(name, attention)
    model.config.output_router_logits = False  # which is a function of all that is in a batch
    first, second = document(9), document(21)
    one, two = batch(first), batch(second)
    packed = {key: torch.cat([one[key], two[key]], dim=1) for key in one}
    # The first token of a document is no target.
    alone = model(**one).item() + model(**two).item()
    assert model(**packed).item() == pytest.approx(alone, rel=1e-5)
    packed["position_ids"] = torch.arange(packed["input_ids"].shape[1])[None]
    assert model(**packed).item() != pytest.approx(alone, rel=1e-5)


def test_the_start_check_refuses_a_model_whose_packed_documents_see_each_other(monkeypatch):
    accelerator, model = Accelerator(cpu=True), build("llama")
    lm_loss.check(accelerator, model, packed=True)
    assert not model.own_loss
    forward = model.base_model.forward

    def forgetful(*args, position_ids=None, **kwargs):
        return forward(*args, **kwargs)

    model.base_model.forward = forgetful
    lm_loss.check(accelerator, model, packed=False)
    with pytest.raises(UserError, match="attend to each other"):
        lm_loss.check(accelerator, model, packed=True)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_start_check_accepts_every_architecture_and_leaves_it_as_it_was(name):
    model = build(name)
    before = model.config.to_dict()
    packed = causal_lm.can_pack(model.config)
    assert packed == (name in PACKED)
    for training in (False, True):  # with dropout, in GPT-2 and OPT
        model.train(training)
        lm_loss.check(Accelerator(cpu=True), model, packed)
        assert model.own_loss == (name == "opt")
        assert model.training == training and model.config.to_dict() == before


def test_a_model_whose_masks_ignore_positions_cannot_be_packed():
    """If it can, after an update of transformers, `IGNORE_POSITIONS` need not list it."""
    with pytest.raises(UserError, match="attend to each other"):
        lm_loss.check(Accelerator(cpu=True), build("opt"), packed=True)


def test_the_start_check_notices_the_smallest_leak_in_bfloat16():
    """Weights are random: what a token sees of another document changes its loss by a trifle."""
    torch.manual_seed(0)
    config = causal_lm.tiny_config(259)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    lm_loss.chunk_loss(model)
    accelerator = SimpleNamespace(
        num_processes=1, mixed_precision="bf16", device="cpu", is_main_process=True
    )
    accelerator.unwrap_model = lambda model: model
    with torch.autocast("cpu", torch.bfloat16):
        lm_loss.check(accelerator, model, packed=True)
        forward = model.base_model.forward

        def all_see_all(*args, position_ids, **kwargs):
            # A mask of ones: the positions still start anew.
            kwargs["attention_mask"] = torch.ones_like(kwargs["input_ids"])
            return forward(*args, position_ids=position_ids, **kwargs)

        model.base_model.forward = all_see_all
        lm_loss.check(accelerator, model, packed=False)
        with pytest.raises(UserError, match="attend to each other"):
            lm_loss.check(accelerator, model, packed=True)


def test_a_model_whose_tokens_attend_to_later_ones_is_refused():
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=48,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    lm_loss.chunk_loss(model)
    with pytest.raises(UserError, match="no causal language model"):
        lm_loss.check(Accelerator(cpu=True), model, packed=False)


def test_there_is_no_cache_beside_the_models_own_loss():
    """With one, `transformers` would not look for several documents in a block."""
    model = build("llama")
    model.own_loss = True
    one, two = batch(document(9)), batch(document(21))
    packed = {key: torch.cat([one[key], two[key]], dim=1) for key in one}
    alone = model(**one).item() + model(**two).item()
    assert model(**packed).item() == pytest.approx(alone, rel=1e-5)


def test_a_loss_that_shifts_the_targets_once_more_is_refused():
    """It knows nothing of `shift_labels`, as those of older models."""
    model = build("llama", chunked=False)

    def loss(logits, labels, **kwargs):
        return torch.nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:])

    model.loss_function = loss
    lm_loss.chunk_loss(model)
    model.own_loss = True
    with pytest.raises(UserError, match="shifts the targets once more"):
        lm_loss.check(Accelerator(cpu=True), model, packed=False)


def test_a_model_with_another_loss_computes_its_own(capsys):
    model = build("llama", chunked=False)
    model.loss_function = lambda logits, **kwargs: logits.square().mean()
    lm_loss.chunk_loss(model)
    lm_loss.check(Accelerator(cpu=True), model, packed=False)
    assert model.own_loss and "computes its own loss" in capsys.readouterr().err
    inputs = batch(document())
    logits = model(input_ids=inputs["input_ids"]).logits
    assert model(**inputs).item() == pytest.approx(16 * logits.square().mean().item(), rel=1e-5)


def test_the_largest_logits_are_those_of_a_chunk(monkeypatch):
    """Also in the backward pass; and none are computed where there is no target."""
    monkeypatch.setattr(lm_loss, "LOGITS", 5 * VOCABULARY)
    model, seen = build("llama"), []
    model.lm_head.register_forward_hook(lambda _, args, __: seen.append(args[0].shape[-2]))
    inputs = batch(document())
    inputs["targets"] = inputs["targets"].clone()
    inputs["targets"][:, ::4] = -100
    model(**inputs).backward()
    assert max(seen) == 5 and sum(seen) == 2 * 12  # computed again for the backward pass
    seen.clear()
    with torch.no_grad():
        model(**inputs)
    assert max(seen) == 5 and sum(seen) == 12
    seen.clear()
    monkeypatch.setattr(lm_loss, "LOGITS", 12 * VOCABULARY)
    model(**inputs).backward()
    assert seen == [12]  # a single chunk is kept


def test_the_losses_of_blocks_are_those_of_each_alone(monkeypatch):
    monkeypatch.setattr(lm_loss, "LOGITS", 5 * VOCABULARY)  # a chunk ends within a block
    model, inputs = build("llama"), batch(torch.cat([document(), document().flip(1)]))
    inputs["position_ids"] = inputs["position_ids"].expand(2, -1)
    inputs["targets"] = inputs["targets"].clone()
    inputs["targets"][0, 1::3] = -100
    total, losses = model(**inputs, per_block=True)
    total.backward()
    gradient = model.lm_head.weight.grad.clone()
    model.zero_grad()
    alone = [model(**{name: rows[i : i + 1] for name, rows in inputs.items()}) for i in (0, 1)]
    assert losses.tolist() == pytest.approx([loss.item() for loss in alone], rel=1e-5)
    assert losses.sum().item() == pytest.approx(total.item(), rel=1e-5) and not losses.requires_grad
    sum(alone).backward()
    assert torch.allclose(model.lm_head.weight.grad, gradient, atol=1e-5)
    inputs["targets"] = torch.full_like(inputs["targets"], -100)
    assert model(**inputs, per_block=True)[1].tolist() == [0, 0]


def test_a_models_own_loss_is_not_that_of_each_block():
    model, inputs = build("opt"), batch(torch.cat([document(), document().flip(1)]))
    total, losses = model(**inputs, per_block=True)
    assert total.item() == model(**inputs).item() and losses.dtype == torch.float32
    assert losses.shape == (2,) and losses.isnan().all()
    inputs["targets"] = torch.full_like(inputs["targets"], -100)
    inputs["targets"][0, 3] = 7
    alone = model(**inputs).item()  # of a single target
    inputs["targets"][0, 5] = 9
    assert model(**inputs).item() > alone


@pytest.mark.parametrize("own_loss", [False, True])
def test_flash_attention_is_given_all_blocks_in_one_row(own_loss, monkeypatch):
    """There positions tell packed documents apart in a batch of one row only."""
    model, inputs = build("llama"), batch(torch.cat([document(), document().flip(1)]))
    inputs["position_ids"] = inputs["position_ids"].repeat(2, 1)
    model.own_loss = own_loss
    expected, losses = model(**inputs), model(**inputs, per_block=True)[1]
    rows, forward = [], model.base_model.forward

    def look(*args, **kwargs):
        rows.append((kwargs["input_ids"].shape, kwargs["position_ids"].shape))
        return forward(*args, **kwargs)

    model.base_model.forward = look
    kinds = {None: False, "sdpa": False, "flash_attention_2": True}
    for attention, flattens in kinds.items():
        config = SimpleNamespace(_attn_implementation=attention)
        assert lm_loss._flattens(SimpleNamespace(config=config)) == flattens
    monkeypatch.setattr(lm_loss, "_flattens", lambda causal: True)
    assert model(**inputs).item() == pytest.approx(expected.item(), rel=1e-6)
    assert rows == [((1, 32), (1, 32))]
    total, again = model(**inputs, per_block=True)
    assert total.item() == pytest.approx(expected.item(), rel=1e-6)
    assert own_loss or again.tolist() == pytest.approx(losses.tolist(), rel=1e-5)


def test_whether_a_model_computes_logits_is_known_in_any_precision_and_place():
    for move in (dict(dtype=torch.bfloat16), dict(device="meta")):
        model = build("llama", chunked=False).to(**move)
        lm_loss.chunk_loss(model)
        assert not model.own_loss
    model.get_output_embeddings = lambda: None
    lm_loss.chunk_loss(model)
    assert model.own_loss


def test_a_small_batch_has_two_documents():
    def small(vocabulary):
        config = transformers.LlamaConfig(**{**SMALL, "vocab_size": vocabulary})
        inside = SimpleNamespace(config=config)
        wrapped = SimpleNamespace(get_base_model=lambda: inside)
        accelerator = SimpleNamespace(unwrap_model=lambda model: wrapped, device="meta")
        assert all(v.device.type == "meta" for v in lm_loss.small_batch(accelerator, None).values())
        accelerator.device = "cpu"
        return lm_loss.small_batch(accelerator, None)

    one, two = small(VOCABULARY), small(3)
    assert one["position_ids"].tolist() == [[*range(5), *range(11)]]
    assert (one["targets"] == -100).nonzero().tolist() == [[0, 4]]  # not of another document
    following = one["input_ids"][:, 1:]
    assert ((one["targets"][:, :-1] == following) | (one["targets"][:, :-1] == -100)).all()
    assert two["input_ids"].max() < 3 and two["input_ids"].unique().numel() > 1
    assert all(torch.equal(value, small(VOCABULARY)[name]) for name, value in one.items())


@pytest.mark.parametrize(
    ("precision", "dtype", "error", "refused"),
    [
        ("no", torch.float32, 1e-5, False),
        ("no", torch.float32, 1e-3, True),
        ("bf16", torch.float32, 1e-3, False),
        ("no", torch.bfloat16, 1e-3, False),
        ("bf16", torch.bfloat16, 0.1, True),
    ],
)
def test_packed_documents_have_the_loss_that_they_have_alone_but_for_rounding(
    precision, dtype, error, refused
):
    model = build("llama").to(dtype)
    forward = model.forward

    def off(**inputs):  # where two documents are in a block
        return forward(**inputs) * (1 + error * (inputs["input_ids"].shape[1] == 16))

    model.forward = off
    accelerator = SimpleNamespace(num_processes=1, mixed_precision=precision, device="cpu")
    accelerator.unwrap_model, accelerator.is_main_process = lambda model: model, True
    lm_loss.check(accelerator, model, packed=False)
    outcome = contextlib.nullcontext()
    if refused:
        outcome = pytest.raises(UserError, match=r"LlamaForCausalLM with .* attend to each other")
    with outcome:
        lm_loss.check(accelerator, model, packed=True)


def test_a_batch_without_targets_has_a_loss_of_zero_and_gradients():
    inputs = batch(document())
    inputs["targets"] = torch.full_like(inputs["targets"], -100)
    model = build("llama")
    loss = model(**inputs)
    loss.backward()
    assert loss.item() == 0 and model.lm_head.weight.grad is not None


@pytest.mark.parametrize("prepared", [False, True])
def test_the_copy_of_a_model_computes_with_its_own_weights(prepared):
    model, inputs = build("llama"), batch(document())
    model = Accelerator(cpu=True).prepare(model) if prepared else model
    twin, before = copy.deepcopy(model), model(**inputs).item()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(2)
    assert twin(**inputs).item() == before != model(**inputs).item()


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_names_tying_and_generation_stay_as_they_were(name):
    model, plain = build(name), build(name, chunked=False)
    assert list(model.state_dict()) == list(plain.state_dict())
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tied == (name != "mixtral")
    plain.config.output_router_logits = False  # with which `generate` fails
    tokens = document(6)
    options = dict(max_new_tokens=5, do_sample=False)
    assert torch.equal(model.generate(tokens, **options), plain.generate(tokens, **options))


def test_a_model_with_states_is_not_packed():
    assert causal_lm.can_pack(CONFIGS["llama"]()) and causal_lm.can_pack(CONFIGS["gpt2"]())
    assert causal_lm.can_pack(CONFIGS["gemma2"]())
    assert not causal_lm.can_pack(transformers.MambaConfig())
    assert not causal_lm.can_pack(transformers.RwkvConfig())  # which does not list its layers
    assert not causal_lm.can_pack(transformers.Qwen3NextConfig())


def test_other_processes_of_a_sharded_run_hold_no_weights(tmp_path):
    """But the same names, tied weights and real angles of the positions."""
    config = CONFIGS["llama"]()
    options = dict(attention="sdpa", dtype=torch.float32, from_scratch=True, seed=0)
    main = SimpleNamespace(is_fsdp2=True, is_main_process=True, device=torch.device("cpu"))
    other = SimpleNamespace(is_fsdp2=True, is_main_process=False, device=torch.device("cpu"))
    model, empty = (causal_lm.load_model(who, "x", config, **options) for who in (main, other))
    assert list(model.state_dict()) == list(empty.state_dict())
    assert empty.lm_head.weight is empty.model.embed_tokens.weight
    for (name, one), two in zip(model.named_buffers(), empty.buffers(), strict=True):
        assert torch.equal(one, two), name
    assert all(weight.device.type == "cpu" for weight in empty.parameters())


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_prompts_of_any_length_are_answered_as_each_alone(name):
    """Of one that leaves no position for an answer, the end is read. No token is for padding."""
    generate, model = load_script("train_lm").generate, build(name)
    model.generation_config.eos_token_id = None
    tokenizer = causal_lm.byte_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token = None
    prompts = [document(80)[0].tolist(), document(9)[0].tolist(), [5]]
    expected = [generate(model, tokenizer, [prompt[-32:]], 64)[0] for prompt in prompts]
    assert generate(model, tokenizer, prompts, 64) == expected and len(set(expected)) == 3
    assert tokenizer.pad_token is None


def test_the_byte_tokenizer_keeps_any_text(tmp_path):
    tokenizer = causal_lm.byte_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in ("Hello, world", "  two  spaces\n\n", "naïve 日本 🙂\t", "<|not special|>"):
        ids = tokenizer(text)["input_ids"]
        assert len(ids) == len(text.encode()) and tokenizer.decode(ids) == text
        assert loaded(text)["input_ids"] == ids
    assert len(tokenizer) == causal_lm.tiny_config(len(tokenizer)).vocab_size == 259
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"]) == [256, 258]


def test_a_fingerprint_tells_models_apart(tmp_path, monkeypatch):
    model = build("llama", chunked=False)
    prints = []
    for change in (0, 0, 1):
        with torch.no_grad():
            model.lm_head.weight[0, 0] += change
        model.save_pretrained(tmp_path)
        prints.append(causal_lm.fingerprint(str(tmp_path), model.config))
    assert prints[0] == prints[1] != prints[2]
    # A small part of each weight is read.
    with monkeypatch.context() as patch:
        patch.setattr(causal_lm, "SAMPLED", (2, 8))
        for weight in model.parameters():
            with torch.no_grad():
                weight.add_(1)
            model.save_pretrained(tmp_path)
            prints.append(causal_lm.fingerprint(str(tmp_path), model.config))
    assert len(set(prints)) == 2 + len(list(model.parameters()))
    prints[2] = causal_lm.fingerprint(str(tmp_path), model.config)
    # It lies elsewhere, and was read by another release of transformers.
    moved = tmp_path.rename(tmp_path.with_name("moved"))
    config = transformers.AutoConfig.from_pretrained(moved)
    with monkeypatch.context() as patch:
        patch.setattr(transformers.configuration_utils, "__version__", "5.99")
        assert causal_lm.fingerprint(str(moved), config) == prints[2]
    config.rms_norm_eps *= 2
    assert causal_lm.fingerprint(str(moved), config) != prints[2]


# ------------------------------------------------------------------------------------------- LoRA


def test_the_state_of_lora_is_the_adapter():
    model = adapters.add_lora(build("llama"), 4, 8.0, 0.0, ["all-linear"])
    whole = model.state_dict()
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


def test_lora_of_a_bfloat16_base_is_float32():
    model = build("llama").to(torch.bfloat16)
    model = adapters.add_lora(model, 4, 8.0, 0.0, ["q_proj"])
    kinds = {weight.dtype for weight in model.parameters() if weight.requires_grad}
    assert kinds == {torch.float32}
    names = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert names and all("q_proj.lora_" in name for name in names)


def test_the_loss_under_the_wrapper_of_peft_is_that_of_the_model():
    tokens = document()
    wrapped = get_peft_model(build("qwen3", chunked=False), LoraConfig(r=2, task_type="CAUSAL_LM"))
    lm_loss.chunk_loss(wrapped)
    expected = build("qwen3")(**batch(tokens)).item()  # an adapter starts as zero
    assert wrapped(**batch(tokens)).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m: adapters.add_lora(m, 2, 2.0, 0.0, ["nothing"]), "nothing matches no layer"),
        (lambda m: adapters.load_adapter(m, "nowhere"), "adapter_model.safetensors"),
        (lambda m: adapters.merge("nowhere"), "has no adapter/"),
    ],
)
def test_what_matches_nothing_is_one_line(call, words):
    with pytest.raises(UserError) as error:
        call(build("llama"))
    assert words in str(error.value)


def test_an_adapter_is_exported_with_its_settings(tmp_path):
    model = adapters.add_lora(build("llama"), 4, 8.0, 0.0, ["q_proj"])
    tokenizer = causal_lm.byte_tokenizer()
    adapters.export(tmp_path, model, model.state_dict(), tokenizer)
    names = {file.name for file in (tmp_path / "adapter").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= names
    again = adapters.load_adapter(build("llama"), tmp_path)
    trained = [name for name, weight in again.named_parameters() if weight.requires_grad]
    assert trained and all("q_proj.lora_" in name for name in trained)


# -------------------------------------------------------------------------------------- bad models


def saved(folder, config):
    config.save_pretrained(folder)
    causal_lm.byte_tokenizer().save_pretrained(folder)
    return str(folder)


def test_a_model_that_cannot_be_trained_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tokenizer = causal_lm.byte_tokenizer()
    llama, bert = tmp_path / "llama", tmp_path / "bert"
    saved(llama, CONFIGS["llama"]())
    saved(bert, transformers.BertConfig(**{"vocab_size": 300, "is_decoder": False}))
    small = saved(tmp_path / "small", transformers.LlamaConfig(**{**SMALL, "vocab_size": 200}))
    t5 = saved(tmp_path / "t5", transformers.T5Config(vocab_size=300))
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{")
    empty = tmp_path / "empty"
    empty.mkdir()
    cases = [
        (str(llama), 65, "--block_size 65"),
        (small, 16, "has a token 258, and"),
        (t5, 16, "no causal language model, but t5"),
        (str(broken), 16, "cannot load its configuration"),
        (str(empty), 16, "has no config.json"),
        (f"{tmp_path}/nowhere", 16, "there is no such folder"),
        ("someone/not-there", 16, "not to be had from the Hub"),
        ("not a/name/at all", 16, "--model not a/name/at all"),
    ]
    for name, block_size, words in cases:
        with pytest.raises(UserError) as error:
            causal_lm.load_config(name, tokenizer, block_size)
        assert words in str(error.value), name
    causal_lm.load_config(str(llama), tokenizer, 64)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    with pytest.raises(UserError, match="the model runs/nowhere: there is no such folder"):
        adapters.load_trained("runs/nowhere")
    sparse = SimpleNamespace(get_vocab=lambda: {"a": 0, "b": VOCABULARY})
    with pytest.raises(UserError, match=f"has a token {VOCABULARY}, and"):
        causal_lm.load_config(str(llama), sparse, 64)


def test_weights_are_safetensors_or_refused(tmp_path):
    config = CONFIGS["llama"]()
    folder = saved(tmp_path, config)
    torch.save(build("llama", chunked=False).state_dict(), tmp_path / "pytorch_model.bin")
    accelerator = SimpleNamespace(is_fsdp2=False, is_main_process=True, device=torch.device("cpu"))
    options = dict(attention="auto", dtype=torch.float32, seed=0)
    with pytest.raises(UserError, match="cannot load its model"):
        causal_lm.load_model(accelerator, folder, config, from_scratch=False, **options)
    with pytest.raises(UserError, match="flex does not train on a CPU"):
        options["attention"] = "flex"
        causal_lm.load_model(accelerator, folder, config, from_scratch=True, **options)


def without(file, word):
    """Leaves the tensors out of a file whose names contain a word; returns their names."""
    state = load_file(file)
    dropped = [name for name in state if word in name]
    kept = {name: value for name, value in state.items() if name not in dropped}
    save_file(kept, file, metadata={"format": "pt"})
    return dropped


def test_a_weight_that_the_files_lack_is_not_drawn_at_random(tmp_path, capfd):
    model = build("qwen3", chunked=False)
    model.save_pretrained(tmp_path)
    model.config.num_hidden_layers = 1
    loaded = causal_lm.load_weights(str(tmp_path), config=model.config)
    assert len(loaded.model.layers) == 1
    assert "model.layers.1" in capfd.readouterr().err.replace("NOTE", "")  # left out, and said
    (name,) = without(tmp_path / "model.safetensors", "layers.0.mlp.up_proj")
    with pytest.raises(UserError) as error:
        causal_lm.load_weights(str(tmp_path), config=model.config)
    assert f"have no {name} (1 are missing)" in str(error.value)
    assert "MISSING" not in capfd.readouterr().err  # the report of transformers, a page long


@pytest.mark.parametrize(("word", "where"), [("layers.1", "the model"), (None, "the adapter")])
def test_an_adapter_of_other_layers_is_refused(word, where, tmp_path):
    """Of layers that one of them lacks, peft only warns."""
    model = adapters.add_lora(build("llama"), 2, 4.0, 0.0, ["q_proj"])
    model.save_pretrained(tmp_path)
    if word:
        assert without(tmp_path / "adapter_model.safetensors", word)
    smaller = build("llama")
    if not word:
        del smaller.model.layers[1]
    with pytest.raises(UserError, match=f"another model: only {where} has .*layers.1"):
        adapters.load_adapter(smaller, tmp_path)


def test_tied_weights_are_written_once(tmp_path):
    """Gathered from other processes, they come as two copies."""
    model = build("llama")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    adapters.export(tmp_path, model, state, causal_lm.byte_tokenizer())
    written = load_file(tmp_path / "model" / "model.safetensors")
    assert len(written) == len(state) - 1 and "lm_head.weight" not in written


def test_an_adapter_is_merged_in_float32_with_the_base_that_it_was_trained_on(tmp_path):
    """In bfloat16 most of these changes would be rounded away."""
    base, run = tmp_path / "base", tmp_path / "run"
    run.mkdir()
    model = build("llama", chunked=False).to(torch.bfloat16)
    model.save_pretrained(base)
    tokenizer = causal_lm.byte_tokenizer()
    tokenizer.save_pretrained(base)
    fingerprint = causal_lm.fingerprint(str(base), model.config)
    (run / "args.json").write_text(json.dumps({"arguments": {"base": fingerprint}}))
    adapter = adapters.add_lora(causal_lm.load_weights(str(base)), 4, 8.0, 0.0, ["q_proj"])
    for name, weight in adapter.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=1e-5)
    adapters.export(run, adapter, adapter.state_dict(), tokenizer)
    adapters.merge(run)
    merged = load_file(run / "model" / "model.safetensors")
    for name, weight in model.state_dict().items():
        if "q_proj" in name:
            changed = (merged[name] != weight.float()).float().mean()
            assert merged[name].dtype == torch.float32 and changed > 0.5
    # An adapter that is trained further is not evaluated with what was merged before.
    adapters.export(run, adapter, adapter.state_dict(), tokenizer)
    assert isinstance(adapters.load_trained(run)[0], PeftModel)
    with torch.no_grad():
        model.model.norm.weight.add_(1)
    model.save_pretrained(base)
    with pytest.raises(UserError, match="was trained on another model"):
        adapters.merge(run)


def test_code_in_a_model_is_not_run(tmp_path):
    """`auto_map` names a class in a file next to the weights."""
    folder = saved(tmp_path, CONFIGS["llama"]())
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
    commit = "a" * 40
    folder = tmp_path / "models--someone--model"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    snapshot = folder / "snapshots" / commit
    config = CONFIGS["llama"]()
    saved(snapshot, config)
    name, accelerator = "someone/model", SimpleNamespace(is_fsdp2=False, device=torch.device("cpu"))
    tokenizer = causal_lm.load_tokenizer(name)
    loaded = causal_lm.load_config(name, tokenizer, 16)
    before = causal_lm.fingerprint(name, loaded)
    build("llama", chunked=False).save_pretrained(snapshot)
    assert causal_lm.fingerprint(name, loaded) == before and causal_lm.find(name) == snapshot
    options = dict(attention="auto", dtype=torch.float32, from_scratch=False, seed=0)
    model = causal_lm.load_model(accelerator, name, loaded, **options)
    assert model.name_or_path == name  # which an adapter records
    adapter = adapters.add_lora(model, 2, 4.0, 0.0, ["q_proj"])
    adapters.export(tmp_path, adapter, adapter.state_dict(), tokenizer)
    assert f'"{name}"' in (tmp_path / "adapter" / "adapter_config.json").read_text()
    adapters.merge(tmp_path)
    assert (tmp_path / "model" / "model.safetensors").exists()


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_embeddings_and_vectors_have_no_weight_decay(name):
    """Tied to the output or not."""
    model = build(name)
    args = SimpleNamespace(lr=1.0, weight_decay=0.1)
    optimizer = load_script("train_lm").build_optimizer(model, args)
    assert optimizer.defaults["betas"] == (0.9, 0.95) and optimizer.defaults["fused"] is True
    decayed, others = optimizer.param_groups
    assert (decayed["lr"], others["lr"]) == (1.0, 1.0)
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    names = {weight: name for name, weight in model.named_parameters()}
    vectors = {name for name, weight in model.named_parameters() if weight.ndim == 1}
    embeddings = {"model.embed_tokens.weight", "transformer.wte.weight", "transformer.wpe.weight"}
    assert {names[weight] for weight in others["params"]} == vectors | embeddings & set(
        names.values()
    )
    assert len(decayed["params"]) + len(others["params"]) == len(names)
