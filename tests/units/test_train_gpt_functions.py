"""Functions of train_gpt.py: its model, and the samples that it prints."""

import copy
from types import SimpleNamespace

import torch
from harness.launches import load_script


def test_no_prediction_depends_on_later_bytes():
    torch.manual_seed(0)
    model = load_script("train_gpt").GPT(n_layer=2, n_head=2, n_embd=16, block_size=12)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    text = torch.randint(256, (1, 12))
    other = text.clone()
    other[0, 6] = (text[0, 6] + 1) % 256
    with torch.no_grad():
        same = torch.isclose(model(text), model(other)).all(2)[0]
    assert same[:6].all() and not same[6:].any()


def test_attention_is_float32_on_a_cpu_in_bf16_too(monkeypatch):
    """The backward pass of PyTorch's attention is slow in bf16 there."""
    script, seen = load_script("train_gpt"), []

    def attention(*tensors, **options):
        seen.append((torch.is_autocast_enabled("cpu"), {tensor.dtype for tensor in tensors[:3]}))
        return original(*tensors, **options)

    original = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    model = script.GPT(n_layer=1, n_head=2, n_embd=16, block_size=12)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(torch.zeros(1, 12, dtype=torch.int64))
    assert seen == [(False, {torch.float32})] and logits.dtype == torch.bfloat16


def test_the_copy_of_a_compiled_model_computes_with_its_own_weights():
    model, tokens = load_script("train_gpt").GPT(1, 2, 16, 8), torch.arange(8)[None]
    model.compile(backend="eager")
    twin, before = copy.deepcopy(model), model(tokens, tokens).tolist()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_()
    assert twin(tokens, tokens).tolist() == before != model(tokens, tokens).tolist()
    torch.compiler.reset()  # other tests count what is compiled


def test_one_process_prints_a_sample_also_of_bytes_that_are_not_text(monkeypatch, tmp_path, capsys):
    script = load_script("train_gpt")
    sizes = dict(n_layer=1, n_head=1, n_embd=8, block_size=8)
    monkeypatch.setattr(script.weight_files, "read", lambda path: None)
    monkeypatch.setattr(script, "load_model", lambda saved: script.GPT(**sizes))
    args = SimpleNamespace(sample="run", prompt="a\udcff", temperature=0, sample_length=2, seed=0)
    for rank, printed in (("0", True), ("1", False)):
        monkeypatch.setenv("RANK", rank)
        script.sample(args)
        assert capsys.readouterr().out.startswith("a\ufffd") == printed
