"""utils/data/loaders.py: options and workers; orders and batch sizes are in tests/properties."""

import signal
import sys
from types import SimpleNamespace

import pytest
import torch
from harness.fakes import accelerator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.data import DataLoader

from utils.data import loaders
from utils.images.augment import to_device
from utils.run.failures import UserError


@pytest.mark.parametrize(("device", "pinned"), [("cpu", False), ("cuda", True)])
def test_options_of_loaders(device, pinned):
    options = loaders.loader_options(accelerator(device=device), 3)
    assert (options["num_workers"], options["timeout"], options["pin_memory"]) == (3, 600, pinned)
    # A worker of a server that forks would outlive a killed process.
    how = "fork" if sys.platform == "linux" else None
    assert options["multiprocessing_context"] == how
    assert options["worker_init_fn"] is loaders.set_up_worker
    alone = dict(num_workers=0, timeout=0, multiprocessing_context=None)
    assert loaders.loader_options(accelerator(device=device)) == options | alone
    assert options["collate_fn"]([1, 2]) == [1, 2]


def test_a_batch_is_copied_to_a_gpu_from_pinned_memory(monkeypatch):
    pinned, cpu, gpu = [], torch.device("cpu"), torch.device("cuda", 0)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self) or self)
    with FakeTensorMode():
        there = to_device(torch.zeros(3), gpu)
        assert there.device == gpu and len(pinned) == 1
        assert to_device(there, gpu) is there
        assert to_device(torch.zeros(3), cpu).device == cpu and len(pinned) == 1


def test_orders_stay_the_same():
    """A run that an earlier version began continues with the same samples."""
    assert loaders.shuffled(1000, 3, 1)[:4].tolist() == [260, 184, 460, 598]
    assert loaders.shuffled(1000, 2**62, 0)[:4].tolist() == [82, 289, 689, 2]


def test_workers_end_when_asked():
    """Of those loaders only that have any."""
    kept = dict(num_workers=1, persistent_workers=True, multiprocessing_context="fork")
    used = {"train": DataLoader(range(4), **kept), "val": DataLoader(range(4)), "x": 1}
    assert len(list(used["train"])) == len(list(used["val"])) == 4
    (worker,) = torch.multiprocessing.active_children()
    loaders.end_workers(used)
    assert not worker.is_alive()


def test_a_worker_ignores_signals_and_ends_with_its_process(monkeypatch):
    ignored, calls = [], []
    library = SimpleNamespace(prctl=lambda *options: calls.append(options))
    monkeypatch.setattr(loaders.signal, "signal", lambda *options: ignored.append(options))
    monkeypatch.setattr(loaders.ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(loaders.patches, "Queue", type("Queue", (), {}))  # whose errors it handles
    loaders.set_up_worker(0)
    names = {signum.name for signum, handler in ignored if handler == signal.SIG_IGN}
    assert names >= {"SIGTERM", "SIGINT", "SIGUSR1"} and len(names) == len(ignored)
    assert calls == ([(1, signal.SIGKILL)] if sys.platform == "linux" else [])


KILLED = "DataLoader worker (pid 7) is killed by signal: Killed. "
DIED = "rank 1: a data loader worker died"
TIMED_OUT = "DataLoader timed out after 600.0 seconds"
WAITED = "rank 1 waited longer than --timeout for a batch: "


def raised(error, file="/x/torch/utils/data/dataloader.py", context=None):
    """The error, raised in that file while another one was handled."""
    names = {}
    exec(compile("def fail(error):\n    raise error", file, "exec"), names)
    with pytest.raises(type(error)):
        names["fail"](error)
    error.__context__ = context
    return error


# The error, the start of the line that replaces it, and whether the same command may succeed.
@pytest.mark.parametrize(
    ("error", "line", "passes"),
    [
        (RuntimeError(f"{KILLED}\nIt is possible"), f"{DIED}: {KILLED}", True),
        (RuntimeError("DataLoader worker (pid 7) exited with code 1. "), f"{DIED}: D", False),
        (raised(EOFError()), f"{DIED} while sending a batch (EOFError)", False),
        (raised(ConnectionResetError()), f"{DIED} while sending a batch (Connection", False),
        (raised(RuntimeError(TIMED_OUT)), WAITED, False),
        (raised(EOFError(), context=RuntimeError(KILLED)), f"{DIED}: {KILLED}", True),
        (ValueError(KILLED), None, None),
        (raised(EOFError(), "/x/train.py"), None, None),
        (raised(KeyError("label")), None, None),
        (raised(RuntimeError(TIMED_OUT), "/x/train.py"), None, None),
        (raised(RuntimeError(f"the {TIMED_OUT}")), None, None),
        (UserError("cannot read a.png"), None, None),
    ],
)
def test_a_worker_is_told_by_its_error_or_by_where_the_connection_broke(
    error, line, passes, monkeypatch
):
    monkeypatch.setenv("RANK", "1")
    explained = loaders.explain(error)
    if line is None:
        assert explained is None
    else:
        assert str(explained).startswith(line) and explained.retry is passes
        assert "\n" not in str(explained) and explained.rank_variable is None


class Refusing(torch.utils.data.Dataset):
    """A data set without a sample that can be read."""

    def __len__(self):
        return 1

    def __getitem__(self, index):
        raise UserError("cannot read a.png: a\nb", None)


def test_a_user_error_of_a_worker_is_its_line_alone():
    with pytest.raises(UserError) as caught:
        next(iter(DataLoader(Refusing(), num_workers=1)))
    explained = loaders.explain(caught.value)
    assert str(explained) == "cannot read a.png: a\\nb" and explained.rank_variable is None
