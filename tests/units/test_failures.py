"""What `utils.run.failures` makes of errors, and to whom it tells them."""

import errno
import json
import os
import pickle
import re
from types import SimpleNamespace

import pytest
import torch

from utils.run import failures, memory
from utils.run.failures import RunFailed, UserError


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.setattr(failures, "_hooks", [])
    monkeypatch.setattr(memory, "_micro_batch_size", None)
    for name in ("RANK", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(name, raising=False)


def in_loader(error):
    """The error, raised in torch's module of data loaders."""
    code = compile("def fail(error):\n    raise error", "/x/torch/utils/data/dataloader.py", "exec")
    names = {}
    exec(code, names)
    try:
        names["fail"](error)
    except type(error) as caught:
        return caught


def raised(error):
    """The error, raised here."""
    try:
        raise error
    except type(error) as caught:
        return caught


def test_an_error_says_who_prints_it_and_whether_to_try_again():
    for kind in (UserError, RunFailed):
        assert kind("a\nb").rank_variable == "RANK" and str(kind("a\nb")) == r"a\nb"
        assert kind("a", None).rank_variable is None
        assert kind("a", rank_variable="LOCAL_RANK").rank_variable == "LOCAL_RANK"
    assert (
        RunFailed("a").more == ""
        and RunFailed("a").retry is True
        and RunFailed("a", retry=False).retry is False
    )


def test_every_hook_records_a_reason(capsys):
    assert not failures.recorded_anywhere() and failures.record("why", True) is True
    calls = []

    def hook(answer):
        def called(*reason):
            calls.append(reason)
            if isinstance(answer, Exception):
                raise answer
            return answer

        return called

    failures.on_failure(hook(True))
    failures.on_failure(hook(False))
    assert failures.recorded_anywhere() is True
    assert failures.record("why", False) is False and calls == [("why", False)] * 2
    failures.on_failure(hook(OSError(28, "No space left on device")))
    failures.on_failure(hook(UserError("status.json is damaged")))
    assert failures.record("why", True) is False and len(calls) == 6
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.splitlines() == [
        "warning: the run's status was not written: [Errno 28] No space left on device",
        "warning: the run's status was not written: status.json is damaged",
    ]


def test_an_extra_that_fails_without_a_text_is_named_by_its_type(capsys):
    with failures.optional("the plot"):
        raise ZeroDivisionError
    assert capsys.readouterr().err.endswith("(ZeroDivisionError: ZeroDivisionError)\n")


def test_the_report_of_the_launcher_has_the_line(tmp_path, monkeypatch):
    failures.report_to_launcher("no file asked for")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    (tmp_path / "error.json").write_text("a traceback " * 100)
    monkeypatch.setattr(failures.time, "time", lambda: 1234.9)
    failures.report_to_launcher("the loss is nan")
    assert json.loads((tmp_path / "error.json").read_text()) == {
        "message": "the loss is nan",
        "timestamp": "1234",
    }
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "none" / "error.json"))
    failures.report_to_launcher("the folder is gone")


def test_what_may_pass_is_tried_again(monkeypatch):
    monkeypatch.setenv("RANK", "2")
    gloo = "[/src/gloo/transport/tcp/pair.cc:544] "
    killed = "DataLoader worker (pid 7) is killed by signal: Killed. "
    for error in (
        RuntimeError(killed),
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)),
        failures.LostContact("timed out"),
        RuntimeError(gloo + "anything"),
        torch.distributed.DistBackendError("NCCL error"),
    ):
        assert failures.may_pass(error) is True, error
    for error in (
        RuntimeError("DataLoader worker (pid 7) exited unexpectedly with exit code 1. "),
        in_loader(EOFError()),
        OSError(errno.EACCES, os.strerror(errno.EACCES)),
        ValueError(gloo + "anything"),
        KeyError("a"),
    ):
        assert failures.may_pass(error) is False, error
    monkeypatch.delenv("RANK")
    assert failures.may_pass(failures.LostContact("timed out")) is False
    assert failures.may_pass(RuntimeError(gloo + "anything")) is True


def test_a_lost_contact_says_why_without_the_place_or_the_advice(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    place = "[/src/gloo/transport/tcp/pair.cc:544] "
    advice = ". This is usually due to a failure. Connection refused GLHF, read timed out\nmore"
    before = "rank 3 lost contact with another process, "
    ended = f"{before}which has ended (the launcher's report names it): "
    waited = f"{before}and waited for it longer than --timeout: "
    for text, line in (
        ("Connection closed by peer [::1]:4" + advice, ended + "Connection closed by peer [::1]:4"),
        ("Timed out waiting 10ms\nfor recv", waited + "Timed out waiting 10ms"),
        ("Timed out GLHF Connection refused", waited + "Timed out "),
    ):
        assert failures.describe(RuntimeError(place + text)) == line


def test_out_of_memory_names_the_samples_at_a_time(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    memory.remember_micro_batch_size(250)
    memory.remember(SimpleNamespace(gradient_accumulation_steps=1), shards=False)
    allocator = (
        "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you"
    )
    for error, text in (
        (torch.OutOfMemoryError("CUDA out of memory. Tried\nmore"), "CUDA out of memory. Tried"),
        (MemoryError(), ""),
        (RuntimeError(f"{allocator}\nmore"), allocator),
    ):
        assert failures.describe(error) == (
            "out of memory on rank 1, which computes 250 samples at a time. What lowers it, "
            "cheapest first: a larger --gradient_accumulation_steps splits the same batch into "
            "smaller parts; mixed_precision: bf16 (activations take half as much); a smaller "
            f"--batch_size or model (another result) ({text})"
        )
    assert failures.describe(ValueError(allocator)) is None
    assert failures.describe(RuntimeError("out of memory")) is None


def test_a_full_disk_shows_the_first_line_of_the_error():
    error = OSError(errno.EDQUOT, "Disk quota exceeded\nmore")
    assert failures.describe(error) == (
        "rank 0: the disk is full: free some space, then run the same command again "
        f"([Errno {errno.EDQUOT}] Disk quota exceeded)"
    )
    outer = ValueError("An error occurred")
    outer.__cause__ = error  # `raise ... from error`
    assert failures.describe(outer) == failures.describe(error) and failures.may_pass(outer)
    outer.__cause__, outer.__context__ = None, error  # it was handled
    assert failures.describe(outer) is None


def test_a_silent_loader_is_told_by_where_it_was_raised():
    text = "DataLoader timed out after 600.0 seconds"
    line = failures.describe(in_loader(RuntimeError(text)))
    assert line.startswith("rank 0 waited longer than --timeout for a batch: its data loader wor")
    assert failures.describe(raised(RuntimeError(text))) is None
    assert failures.describe(in_loader(RuntimeError("the " + text))) is None


def test_a_dead_worker_is_told_by_its_error_or_by_where_the_connection_broke():
    text = "DataLoader worker (pid 7) is killed by signal: Killed. \nIt is possible"
    line = (
        "rank 0: a data loader worker died: DataLoader worker (pid 7) is killed by signal: Killed. "
    )
    assert failures.describe(RuntimeError(text)) == line
    for kind in (EOFError, ConnectionResetError):
        line = f"rank 0: a data loader worker died while sending a batch ({kind.__name__})"
        assert failures.describe(in_loader(kind())) == line
        assert failures.describe(raised(kind())) is None
    assert failures.describe(in_loader(KeyError("label"))) is None


def test_the_last_line_of_nccl_that_is_not_empty():
    error = torch.distributed.DistBackendError("NCCL error in: a.cpp:93\n  Last error: \n\n")
    assert failures.describe(error) == "rank 0: NCCL: Last error:"
    assert failures.describe(torch.distributed.DistBackendError("another backend")) is None


def test_what_is_not_deterministic_is_named_with_the_way_out():
    name = "_histc_cuda with floating point input"
    text = f"{name} does not have a deterministic implementation, but you set 'torch.use"
    line = failures.describe(RuntimeError(text))
    assert line.startswith(f"rank 0: {name} has no deterministic algorithm on GPUs")
    assert line.endswith("give --nondeterministic")
    for error in (ValueError(text), RuntimeError(f"this is\n{text}")):
        assert failures.describe(error) is None


def test_causes_are_followed_to_the_first():
    first, second, third = ValueError("1"), KeyError("2"), OSError("3")
    second.__context__, third.__context__, third.__cause__ = first, ValueError("no"), second
    assert list(failures.causes(third)) == [third, second, first]


def test_errors_cross_processes():
    """A data loader worker sends its error to the training process as its text."""
    again = pickle.loads(pickle.dumps(UserError("a\x1b")))
    assert str(again) == r"a\x1b" and again.rank_variable == "RANK"
    assert re.fullmatch("run the same command again to continue", failures.SAME_COMMAND)
