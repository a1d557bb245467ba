"""The functions of train_lm.py: what is evaluated, generated, asked and refused."""

import sys
from types import SimpleNamespace

import pytest
import torch
from harness import fakes
from harness.language_models import make_model
from harness.launches import load_script

from utils.run.failures import UserError

transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")

from utils.language import causal_lm


@pytest.fixture(scope="module")
def script():
    return load_script("train_lm")


# ---------------------------------------------------------------------------------------- samples


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_prompts_of_any_length_are_answered_as_each_alone(script, kind, monkeypatch):
    """25 at a time, with all weights of a sharded model; no token is for padding."""
    changes = dict(vocab_size=259, bos_token_id=None, eos_token_id=None, tie_word_embeddings=False)
    model, plain = (make_model(kind, **changes) for _ in range(2))
    with torch.no_grad():
        for some in (model, plain):
            some.lm_head.weight[:250] = 0  # it often writes special tokens
    script.lm_loss.attend_by_document(fakes.accelerator(), model)
    script.lm_loss.chunk_loss(model)
    tokenizer = causal_lm.byte_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token = tokenizer.chat_template = None
    gathered, of_fsdp = [], script.fsdp.gathered
    monkeypatch.setattr(script.fsdp, "gathered", lambda m: gathered.append(m) or of_fsdp(m))
    # Of one that leaves no position for an answer, the end is read.
    prompts = [list(range(3, 83)), *([40 + i] * (1 + i % 7) for i in range(26))]
    answers = script.generate(model.train(), tokenizer, prompts, 64)
    assert model.training and gathered == [model] * 2 and len(answers) == 27
    options = dict(max_new_tokens=32, do_sample=False, pad_token_id=0)
    special = set()
    for number in (0, 1, 6, 24, 25, 26):
        inputs = torch.tensor([prompts[number][-32:]])
        new = plain.generate(inputs, **options)[0, inputs.shape[1] :]
        special |= set(new.tolist()) & {256, 257, 258}
        assert answers[number] == tokenizer.decode(new, skip_special_tokens=True)
    assert special and len(set(answers)) > 2
    one = script.generate(model.eval(), tokenizer, prompts[1:2], 5)
    assert answers[1].startswith(one[0]) and not model.training and tokenizer.pad_token is None


@pytest.mark.parametrize(("part", "kind"), [("model", "text"), ("adapter", "messages")])
def test_the_card_names_what_is_on_the_hub(script, part, kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / part).mkdir()
    (tmp_path / "mine").mkdir()
    args = SimpleNamespace(model="a/b", from_scratch=False, dataset="c/d")
    card = script.describe_model(args, tmp_path, kind)
    assert card["metadata"] == {"base_model": "a/b", "datasets": ["c/d"]}
    assert card["library"] == {"model": "transformers", "adapter": "peft"}[part]
    assert ("apply_chat_template" in card["usage"]) == (kind == "messages")
    assert card["weights"] == f"The folder `{part}` has the weights, and the tokenizer."
    (tmp_path / part / "config.json").write_text('{"dtype": "bfloat16"}')
    assert "in bfloat16, which" in script.describe_model(args, tmp_path, kind)["weights"]
    for args.model, args.from_scratch in (("a/b", True), ("mine", False), ("tiny", False)):
        assert script.describe_model(args, tmp_path, kind)["metadata"] == {"datasets": ["c/d"]}
    for args.dataset in ("mine", "synthetic"):
        assert script.describe_model(args, tmp_path, kind)["metadata"] == {}


# -------------------------------------------------------------------------------------- arguments


def parse(script, monkeypatch, words):
    monkeypatch.setattr(sys, "argv", ["train_lm.py", *words.split()])
    return script.parse_args()


LORA = "--model m --lora_rank 4"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", dict(lr=4e-3, epochs=2, block_size=256, max_grad_norm=1.0, lr_schedule="cosine")),
        ("--model m", dict(lr=2e-5, epochs=1, block_size=1024, batch_size=16, weight_decay=0.1)),
        (LORA, dict(lr=2e-4, lora_alpha=8.0)),
        (f"{LORA} --lora_alpha 3", dict(lora_alpha=3.0)),
        ("--model m --lora_rank 0", dict(lr=2e-5)),
        ("--overfit_batch", dict(lr_schedule="constant", max_train_steps=200)),
        ("--streaming --max_train_steps 4", dict(streaming=True, val_fraction=0.1)),
    ],
)
def test_what_is_not_given_follows_from_the_rest(script, words, expected, monkeypatch):
    args = vars(parse(script, monkeypatch, words))
    assert {name: args[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--lora_rank 4", "LoRA adapts pretrained weights"),
        (f"{LORA} --from_scratch", "LoRA adapts pretrained weights"),
        ("--streaming", "--streaming needs --max_train_steps"),
        ("--streaming --max_train_steps 4 --overfit_batch", "--streaming needs"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(script, words, says, monkeypatch):
    with pytest.raises(UserError, match=says):
        parse(script, monkeypatch, words)


def test_what_is_not_installed_is_named(script, monkeypatch):
    monkeypatch.setattr(script, "MISSING", ["transformers", "peft"])
    with pytest.raises(UserError, match="needs transformers and peft: pip install -r"):
        parse(script, monkeypatch, "")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_embeddings_and_vectors_have_no_weight_decay(script, kind, tied):
    model = make_model(kind, tie_word_embeddings=tied)
    frozen = next(weight for weight in model.parameters() if weight.ndim == 1).requires_grad_(False)
    optimizer = script.build_optimizer(model, SimpleNamespace(lr=1.0, weight_decay=0.1))
    assert optimizer.defaults["betas"] == (0.9, 0.95) and optimizer.defaults["fused"] is True
    decayed, others = optimizer.param_groups
    assert (decayed["lr"], others["lr"]) == (1.0, 1.0)
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    looked_up, groups = ("embed_tokens.weight", "wte.weight", "wpe.weight"), {}
    for name, weight in model.named_parameters():
        if weight is not frozen:
            is_decayed = weight.ndim > 1 and not name.endswith(looked_up)
            groups.setdefault(is_decayed, set()).add(weight)
    assert (set(decayed["params"]), set(others["params"])) == (groups[True], groups[False])


@pytest.mark.parametrize(("tied", "frozen"), [(True, False), (False, False), (False, True)])
def test_a_known_gpu_has_an_mfu(script, tied, frozen, monkeypatch):
    model, here = make_model("llama", tie_word_embeddings=tied), fakes.accelerator()
    config, args = model.config, SimpleNamespace(block_size=32)
    if frozen:
        model.model.layers[0].requires_grad_(False)
    assert script.rates_per_block(here, model, args) == {"tokens_per_second": 32}
    monkeypatch.setattr(script, "peak_flops", lambda _: 1e9)
    matrices = [layer.weight for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
    flops = sum(weight.numel() * (4 + 2 * weight.requires_grad) for weight in matrices)
    flops += 12 * config.num_hidden_layers * config.hidden_size * 32
    assert script.rates_per_block(here, model, args)["mfu"] == pytest.approx(32 * flops / 1e9)
    config.num_experts_per_tok = 2
    assert "mfu" not in script.rates_per_block(here, model, args)


def test_patience_needs_a_validation_split(script, monkeypatch):
    data = SimpleNamespace(held_out="test")
    monkeypatch.setattr(script, "local_main_first", lambda *_: data)
    monkeypatch.setattr(script, "agree", lambda *_: "")
    names = ("subset", "loss_on", "block_size", "val_fraction", "seed")
    args = dict.fromkeys(names) | {"dataset": "a", "streaming": False, "patience": 1}
    with pytest.raises(UserError, match="--patience needs a validation split"):
        script.load_data(None, None, True, SimpleNamespace(**args))
