"""When a model is compiled, and what is said about it."""

import importlib.util
import shutil
from types import SimpleNamespace

import pytest
import torch
from harness.fakes import accelerator

from utils import compilation


@pytest.mark.parametrize(
    "device, mode, missing, compiles, says",
    [
        ("cpu", None, (), False, ""),
        ("cpu", "max-autotune", (), True, "compiling: the first step"),
        ("cuda", None, (), True, "compiling: the first step"),
        ("cuda", "never", (), False, ""),
        ("cuda", None, ("triton",), False, "not compiled, which is slower: the package triton not"),
        ("cuda", None, ("cc",), False, "not compiled, which is slower: a C compiler not found"),
        ("cuda", "default", ("cc", "triton"), True, "compiling: the first step"),
    ],
)
def test_a_model_is_compiled_on_gpus_and_on_request(
    device, mode, missing, compiles, says, monkeypatch, capsys
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name not in missing or None)
    monkeypatch.setattr(shutil, "which", lambda _: "cc" not in missing or None)
    fake, calls = accelerator(device=device, print=print), []
    block = SimpleNamespace(compile=lambda **options: calls.append(options))
    compilation.compile_model(fake, [block, block], mode, on_gpus=True, dynamic=False)
    told = "".join(capsys.readouterr())
    assert calls == [{"mode": mode or "default", "dynamic": False}] * 2 * compiles
    assert says in told and told.count("\n") == bool(says)
    if mode is None:  # by default only where the script says so
        compilation.compile_model(fake, [None], None)


@pytest.mark.parametrize("compiler", ["gcc", "clang", "my-cc"])
def test_any_compiler_will_do_and_one_process_says_that_there_is_none(
    compiler, monkeypatch, capsys
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "triton" or None)
    monkeypatch.setattr(shutil, "which", lambda name: name == compiler or None)
    monkeypatch.setenv("CC", "my-cc")
    calls = []
    block = SimpleNamespace(compile=lambda **options: calls.append(options))
    fake = accelerator(device="cuda", print=print)
    compilation.compile_model(fake, [block], None, on_gpus=True)
    assert calls == [{"mode": "default"}]
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    capsys.readouterr()
    for rank, says in ((1, ""), (0, "the package triton and a C compiler not found")):
        compilation.compile_model(
            accelerator(2, rank, "cuda", print=print), [block], None, on_gpus=True
        )
        assert says in capsys.readouterr().err
    assert len(calls) == 1


@pytest.mark.parametrize("mode", [*compilation.MODES])
def test_each_mode_is_one_of_torch_or_never(mode):
    """`torch.compile` refuses others before it compiles."""
    if mode != "never":
        torch.compile(torch.nn.Linear(1, 1), mode=mode)
    assert {"default", "max-autotune"} <= {*compilation.MODES}
