"""The loss of a language model in chunks, what the start refuses, and attention by document.

Losses and gradients of any documents are in the properties.
"""

import itertools
from types import SimpleNamespace

import pytest
import torch
from harness import fakes
from harness.language_models import PACKED, VOCABULARY, batch, document, make_model

transformers = pytest.importorskip("transformers")

from utils.language import causal_lm, lm_loss
from utils.run.failures import UserError


def build(name, attention=None, **changes):
    model = make_model(name, attention, **changes)
    lm_loss.chunk_loss(model)
    return model


def start_check(model, pack, precision="no"):
    accelerator = fakes.accelerator(mixed_precision=precision, unwrap_model=lambda model: model)
    lm_loss.check(accelerator, model, packed=pack)


# ------------------------------------------------------------------------------------------- loss


@pytest.mark.parametrize("size", [1, 5, 2**26])
def test_experts_are_balanced_in_training_and_not_in_evaluations(size, monkeypatch):
    monkeypatch.setattr(lm_loss, "LOGITS", size * VOCABULARY)
    model, own = (make("mixtral", output_router_logits=True) for make in (build, make_model))
    inputs = batch(document())
    targets = inputs["targets"]
    told = {key: value for key, value in inputs.items() if key != "targets"}
    expected = 16 * own(**told, labels=targets, shift_labels=targets, use_cache=False).loss
    loss = model(**inputs)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    loss.backward()
    expected.backward()
    for (place, weight), other in zip(model.named_parameters(), own.parameters(), strict=True):
        assert (weight.grad is None) == (other.grad is None), place
        if weight.grad is not None:
            assert torch.allclose(weight.grad, other.grad, rtol=1e-4, atol=2e-4), place
    with torch.no_grad():
        evaluated = model(**inputs, per_block=True).sum().item()
    model.config.output_router_logits = False
    assert evaluated == pytest.approx(model(**inputs).item(), rel=1e-6)
    assert loss.item() > evaluated * (1 + 1e-6)


def test_the_largest_logits_are_those_of_a_chunk(monkeypatch):
    """Also in the backward pass; and none are computed where there is no target."""
    monkeypatch.setattr(lm_loss, "LOGITS", 5 * VOCABULARY)
    model, seen, inputs = build("llama"), [], batch(document())
    model.lm_head.register_forward_hook(lambda _, args, __: seen.append(args[0].shape[-2]))
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


# ---------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("name", PACKED)
def test_every_architecture_is_accepted_and_stays_as_it_was(name):
    """Its mode (GPT-2 has dropout), its configuration, the names of its weights, and what it writes."""
    model, plain = build(name).train(), make_model(name)
    start_check(model, True)
    assert model.training and model.config.to_dict() == plain.config.to_dict()
    assert list(model.state_dict()) == list(plain.state_dict())
    written = [
        some.eval().generate(document(6), max_new_tokens=5, do_sample=False)
        for some in (model, plain)
    ]
    assert torch.equal(*written)


@pytest.mark.parametrize("told", ["position_ids", "attention_mask"])
def test_a_model_whose_packed_documents_see_each_other_is_refused(told):
    """However small the leak is: weights are random, and in bfloat16 losses hardly differ."""
    config = causal_lm.tiny_config(259)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    lm_loss.chunk_loss(model)

    def spoil(_, args, inputs):  # the positions are forgotten, or there is a mask of ones
        if inputs["input_ids"] is None:  # it only computes logits
            return None
        value = None if told == "position_ids" else torch.ones_like(inputs["input_ids"])
        return args, inputs | {told: value}

    with torch.autocast("cpu", torch.bfloat16):
        start_check(model, True, "bf16")
        model.base_model.register_forward_pre_hook(spoil, with_kwargs=True)
        start_check(model, False, "bf16")
        with pytest.raises(UserError, match=r"LlamaForCausalLM with .* attend to each other"):
            start_check(model, True, "bf16")


def has_another_loss():
    """It knows nothing of `shift_labels`, as those of older models."""
    model = make_model("llama")
    model.loss_function = lambda logits, labels, **kwargs: torch.nn.functional.cross_entropy(
        logits[0, :-1], labels[0, 1:]
    )
    return model


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: make_model("opt"), "OPTForCausalLM cannot be trained: its forward pass"),
        (has_another_loss, "has another loss than that of each token"),
    ],
)
def test_a_model_whose_loss_would_be_wrong_is_refused(make, says):
    model = make()
    lm_loss.chunk_loss(model)
    with pytest.raises(UserError, match=says):
        start_check(model, False)


# --------------------------------------------------------------------------------------- attention

CPU = dict(device=torch.device("cpu"), mixed_precision="bf16")
FORMULA, KERNEL = lm_loss.NAME, lm_loss.KERNEL
GPU = dict(device=torch.device("cuda"), mixed_precision="bf16")


def varlen_attn(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa
):
    """Stands in for the kernel of GPUs: the formula, document by document."""
    bounds, groups = cu_seq_q.tolist(), query.size(1) // key.size(1)
    sizes = [end - begin for begin, end in itertools.pairwise(bounds)]
    assert cu_seq_q.dtype == torch.int32 and cu_seq_k is cu_seq_q
    assert (max_q, max_k) == (max(sizes), max(sizes)) and sum(sizes) == len(query) == len(key)
    assert window_size == (-1, 0) and enable_gqa == (groups > 1)
    outputs = []
    for q, k, v in zip(*(part.split(sizes) for part in (query, key, value)), strict=True):
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        shares = scores.masked_fill(later, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", shares, v))
    return torch.cat(outputs)


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(lm_loss, "varlen_attn", varlen_attn)


def chosen(name, place=CPU, attention=None, **changes):
    model = make_model(name, attention, **changes)
    lm_loss.attend_by_document(SimpleNamespace(**place), model)
    return model


@pytest.mark.parametrize(
    ("name", "changes", "place", "expected"),
    [
        ("llama", {}, CPU, FORMULA),
        ("llama", {}, GPU, KERNEL),
        ("gpt2", {}, CPU, FORMULA),
        # Tokens that do not attend to all before them, or another attention that was chosen.
        ("mistral", {"sliding_window": None}, CPU, FORMULA),
        ("mistral", {"sliding_window": 8}, CPU, "sdpa"),
        ("llama", {"attention": "eager"}, CPU, "eager"),
        ("doge", {"num_key_value_heads": 4}, CPU, "sdpa"),  # its layers have a mask of their own
        ("persimmon", {}, CPU, "sdpa"),  # its layers are not told positions
        # What the kernel does not compute.
        ("llama", {"attention_dropout": 0.1}, GPU, "sdpa"),
        ("llama", {"head_dim": 12}, GPU, "sdpa"),
        ("llama", {}, GPU | {"mixed_precision": "no"}, "sdpa"),
        ("llama", {}, GPU | {"capability": (7, 5)}, "sdpa"),
        ("llama", {}, GPU | {"kernel": lambda query: None}, "sdpa"),  # of older releases
    ],
)
def test_documents_are_computed_one_by_one_where_that_is_the_same(
    name, changes, place, expected, monkeypatch
):
    capability = place.get("capability", (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(lm_loss, "varlen_attn", place.get("kernel", varlen_attn))
    assert chosen(name, place, **changes).config._attn_implementation == expected


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_kernel_of_gpus_gets_all_documents_at_once(gpu, name):
    """Grouped heads, two rows of one and of three documents; loss, gradients, and a recomputation.

    In float64, so that the results agree to rounding.
    """
    changes = dict(attn_pdrop=0, embd_pdrop=0, resid_pdrop=0) if name == "gpt2" else {}
    models = [chosen(name, each, **changes).double() for each in (CPU, GPU)]
    models[1].load_state_dict(models[0].state_dict())
    assert models[1].config._attn_implementation == lm_loss.KERNEL
    tokens = torch.randint(VOCABULARY, (2, 12))
    positions = torch.stack([torch.arange(12), torch.tensor([*range(7), 0, *range(4)])])
    for model in models:
        model.activation_checkpointing_enable({"use_reentrant": False})
        model.train()
        model(
            input_ids=tokens, position_ids=positions.clone(), use_cache=False
        ).logits.square().sum().backward()
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
