"""When a model is compiled, and what is said about it."""

import importlib.util
import shutil
from types import SimpleNamespace

import pytest
import torch
from harness.fakes import accelerator

from utils import compilation

NOT = "not compiled, which is slower: {} not found"


@pytest.mark.parametrize(
    ("device", "mode", "found", "says"),
    [
        ("cpu", None, "triton my-cc", ""),
        ("cpu", "max-autotune", "", "compiling"),
        ("cpu", "reduce-overhead", "", "compiling"),
        ("cuda", None, "triton my-cc", "compiling"),
        ("cuda", None, "triton gcc", "compiling"),
        ("cuda", None, "triton clang", "compiling"),
        ("cuda", "never", "triton my-cc", ""),
        ("cuda", None, "my-cc", NOT.format("the package triton")),
        ("cuda", None, "triton", NOT.format("a C compiler")),
        ("cuda", None, "", NOT.format("the package triton and a C compiler")),
    ],
)
def test_a_model_is_compiled_on_gpus_and_on_request(device, mode, found, says, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in found.split() or None)
    monkeypatch.setattr(shutil, "which", lambda name: name in found.split() or None)
    monkeypatch.setenv("CC", "my-cc")
    calls = []
    block = SimpleNamespace(compile=lambda **options: calls.append(options))
    for rank, told in ((0, says), (1, says * says.startswith("compiling"))):
        calls.clear()
        fake = accelerator(2, rank, device, print=print)
        compilation.compile_model(fake, [block, block], mode, on_gpus=True, dynamic=False)
        said = "".join(capsys.readouterr())
        assert told in said and said.count("\n") == bool(told)
        expected = [{"mode": mode or "default", "dynamic": False}] * 2
        assert calls == expected * says.startswith("compiling")
    assert mode is None or mode in compilation.MODES
    if mode not in (None, "never"):  # torch refuses others
        torch.compile(torch.nn.Linear(1, 1), mode=mode)
    if mode is None:  # by default only where the script says so
        compilation.compile_model(fake, [None], None)
