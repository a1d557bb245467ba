"""What `utils.run.collectives` does with several processes: here threads, which exchange values."""

import socket
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest

from utils.run import collectives
from utils.run.failures import RunFailed, UserError


class World:
    """Stands for torch.distributed: `size` threads with an accelerator each."""

    def __init__(self, size, machines=1):
        self.size, self.machines, self.groups, self.order = size, machines, [], []
        self._values, self._barrier = [None] * size, threading.Barrier(size, timeout=20)
        self._rank = threading.local()

    def new_group(self, **options):
        self.groups.append(options)
        return "the host group"

    def all_gather_object(self, values, value, group):
        assert group == "the host group" and values == [None] * self.size
        self._values[self._rank.number] = value
        self._barrier.wait()
        values[:] = self._values
        self._barrier.wait()

    def run(self, function):
        """Calls `function(accelerator)` on every rank; the results, or the errors, by rank."""
        results = [None] * self.size

        def process(rank):
            self._rank.number = rank
            accelerator = SimpleNamespace(
                num_processes=self.size,
                process_index=rank,
                is_main_process=rank == 0,
                is_local_main_process=rank % (self.size // self.machines) == 0,
            )
            try:
                results[rank] = function(accelerator)
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=process, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return results


@pytest.fixture
def world(monkeypatch):
    """Makes a World, which the module uses instead of torch.distributed."""

    def make(size, machines=1):
        made = World(size, machines)
        monkeypatch.setattr(collectives, "dist", made)
        # One group for all threads, which in a process of its own each rank would make.
        monkeypatch.setattr(collectives, "_host_group", "the host group" if size > 1 else None)
        return made

    return make


def test_values_are_gathered_by_rank(world):
    results = world(3).run(
        lambda accelerator: collectives.gather(accelerator, accelerator.process_index)
    )
    assert results == [[0, 1, 2]] * 3
    assert world(1).run(lambda accelerator: collectives.gather(accelerator, "x")) == [["x"]]


def test_the_group_for_values_is_made_once_and_outlives_long_work(world, monkeypatch):
    """Over gloo, also on GPUs: NCCL would end the run while one process works on files."""
    made = world(2)
    calls = []
    monkeypatch.setattr(collectives, "_host_group", None)
    monkeypatch.setattr(collectives, "keep_alive", lambda: calls.append("keep alive"))
    monkeypatch.setattr(made, "all_gather_object", lambda values, value, group: calls.append(group))
    accelerator = SimpleNamespace(num_processes=2)
    assert collectives.gather(accelerator, 7) == [None, None]  # filled by torch
    collectives.wait_for_all(accelerator)
    assert made.groups == [{"backend": "gloo", "timeout": timedelta(hours=3)}]
    assert calls == ["keep alive", "the host group", "the host group"]


def test_waits_for_every_process(world):
    arrived = []

    def wait(accelerator):
        arrived.append(accelerator.process_index)
        collectives.wait_for_all(accelerator)
        return len(arrived)

    assert world(4).run(wait) == [4] * 4


def test_the_main_process_runs_a_function_for_all(world):
    ran = []

    def on_main(accelerator):
        return collectives.run_on_main(
            accelerator, lambda: ran.append(accelerator.process_index) or "made"
        )

    assert world(3).run(on_main) == ["made"] * 3 and ran == [0]


def test_an_error_on_the_main_process_is_raised_on_every_one(world):
    def fail(accelerator):
        collectives.run_on_main(
            accelerator, lambda: (_ for _ in ()).throw(UserError("no such file"))
        )

    errors = world(3).run(fail)
    assert all(type(error) is UserError and str(error) == "no such file" for error in errors)


def test_one_process_of_each_machine_goes_first(world):
    order, lock = [], threading.Lock()

    def cached(accelerator):
        def function():
            with lock:
                order.append(accelerator.process_index)
            return accelerator.process_index * 10

        return collectives.local_main_first(accelerator, function)

    assert world(4, machines=2).run(cached) == [0, 10, 20, 30]
    assert sorted(order[:2]) == [0, 2] and sorted(order[2:]) == [1, 3]


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("run", [collectives.local_main_first, collectives.run_on_all])
def test_an_error_on_any_process_is_raised_on_every_one(run, bad, world):
    """And of several errors that of the lowest rank."""

    def function(accelerator):
        def fail():
            if accelerator.process_index >= bad:
                raise UserError(f"of rank {accelerator.process_index}")
            return "fine"

        return run(accelerator, fail)

    errors = world(2).run(function)
    assert all(type(error) is UserError for error in errors), errors
    assert {str(error) for error in errors} == {f"of rank {bad}"}


def test_every_process_runs_a_function(world):
    def function(accelerator):
        return collectives.run_on_all(accelerator, lambda: accelerator.process_index)

    assert world(3).run(function) == [0, 1, 2]


def test_an_unknown_error_keeps_its_name_and_a_known_one_its_line(world, capsys):
    """The traceback cannot be sent: it is printed where the error was raised."""

    def function(accelerator):
        collectives.run_on_main(accelerator, lambda: {}["missing"])

    errors = world(2).run(function)
    assert [(type(error), str(error)) for error in errors] == [
        (RuntimeError, "KeyError: 'missing'")
    ] * 2
    assert capsys.readouterr().err.count("Traceback") == 1

    def full(accelerator):
        def write():
            raise OSError(28, "No space left on device")

        collectives.run_on_main(accelerator, write)

    errors = world(2).run(full)
    assert all(type(error) is RunFailed and "the disk is full" in str(error) for error in errors)


def test_connections_notice_a_machine_that_is_gone():
    """Within 40 s: 20 s without a word, then four probes, 5 s apart."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as one, server.accept()[0] as other:
            collectives.keep_alive()
            for end in (one, other):
                assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
                assert [end.getsockopt(socket.IPPROTO_TCP, option) for option in options] == [
                    20,
                    5,
                    4,
                ]
            one.sendall(b"still connected")
            assert other.recv(100) == b"still connected"
        assert server.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 0  # nobody at its end
