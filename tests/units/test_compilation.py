"""When a model is compiled, and what is said about it."""

import importlib.util
import shutil
from types import SimpleNamespace

import pytest
from harness.fakes import accelerator

from utils import compilation

NOT = "not compiled, which is slower: {} not found"


@pytest.mark.parametrize(
    ("device", "mode", "found", "says"),
    [
        ("cpu", None, "triton my-cc", ""),
        *(("cpu", mode, "", "compiling") for mode in ("max-autotune", "reduce-overhead")),
        *(("cuda", None, f"triton {name}", "compiling") for name in ("my-cc", "gcc", "clang")),
        ("cuda", "never", "triton my-cc", ""),
        ("cuda", None, "my-cc", NOT.format("the package triton")),
        ("cuda", None, "", NOT.format("the package triton and a C compiler")),
    ],
)
def test_a_model_is_compiled_on_gpus_and_on_request(device, mode, found, says, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in found.split() or None)
    monkeypatch.setattr(shutil, "which", lambda name: name in found.split() or None)
    monkeypatch.setenv("CC", "my-cc")
    calls = []
    block = SimpleNamespace(compile=lambda **options: calls.append(options))
    compiles = says == "compiling"
    for rank in (0, 1):
        calls.clear()
        fake = accelerator(2, rank, device, print=print)
        compilation.compile_model(fake, [block, block], mode, on_gpus=True, dynamic=False)
        said = "".join(capsys.readouterr())
        told = says if compiles or rank == 0 else ""
        assert told in said and said.count("\n") == bool(told)
        assert calls == [{"mode": mode or "default", "dynamic": False}] * 2 * compiles
    if mode is None:  # by default only where the script says so
        compilation.compile_model(fake, [None], None)
