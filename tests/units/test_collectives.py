"""What `utils.run.collectives` does with several processes."""

import math
import socket
from datetime import timedelta

import pytest
import torch.distributed as dist
from harness.fakes import accelerator
from harness.worlds import World, in_forks

from utils.data.sharing import local_main_first
from utils.run import collectives
from utils.run.failures import RunFailed, Unexpected, UserError


@pytest.fixture
def world(monkeypatch):
    """Makes a World, which the module uses instead of torch.distributed."""

    def make(size, machines=1):
        made = World(size, machines)
        monkeypatch.setattr(collectives, "dist", made)
        return made

    return make


def test_real_processes_exchange_values_over_gloo(tmp_path):
    """The group is made once. It waits for hours, and notices a machine that is gone within 40 s:
    20 s without a word, then four probes, 5 s apart.
    """

    def run(rank):
        dist.init_process_group(
            "gloo", init_method=f"file://{tmp_path}/store", rank=rank, world_size=2
        )
        made, new_group = [], dist.new_group
        dist.new_group = lambda **options: made.append(options) or new_group(**options)
        mine = accelerator(2, rank)
        results = [collectives.gather(mine, [rank]), collectives.gather(mine, rank)]
        collectives.wait_for_all(mine)
        results.append(collectives.gather(mine, -rank, collectives.new_group()))
        ends = []
        for connection in collectives.psutil.Process().net_connections("tcp"):
            if connection.raddr:
                with socket.fromfd(connection.fd, connection.family, connection.type) as end:
                    options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
                    values = [end.getsockopt(socket.IPPROTO_TCP, option) for option in options]
                    ends.append([end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), *values])
        return made, results, [1, 20, 5, 4] in ends

    for made, results, kept_alive in in_forks(run, 2):
        assert made == [{"backend": "gloo", "timeout": timedelta(days=30)}] * 2
        assert results == [[[0], [1]], [0, 1], [0, -1]] and kept_alive


@pytest.mark.parametrize("run", [collectives.run_on_main, local_main_first, collectives.run_on_all])
def test_who_runs_a_function_and_when_and_who_has_its_result_or_error(run, world):
    """Of several errors, that of the lowest rank."""
    order = []

    def process(mine):
        def function():
            order.append(mine.process_index)
            if mine.process_index >= fails_from:
                raise UserError(f"of rank {mine.process_index}")
            return mine.process_index * 10

        return run(mine, function)

    fails_from = 4
    is_main = run is collectives.run_on_main
    assert world(4, machines=2).run(process) == ([0] * 4 if is_main else [0, 10, 20, 30])
    assert sorted(order) == ([0] if is_main else [0, 1, 2, 3])
    assert run is not local_main_first or sorted(order[:2]) == [0, 2]
    for fails_from in (0, 1):
        results = world(2).run(process)
        if fails_from and is_main:
            assert results == [0, 0]
        else:
            line = f"of rank {fails_from}"
            assert [(type(e), str(e)) for e in results] == [(UserError, line)] * 2


@pytest.mark.parametrize("run", [collectives.run_on_main, collectives.run_on_all])
def test_an_unknown_error_keeps_its_name_and_a_known_one_its_line(run, world, capsys):
    """An error loses its traceback on its way: that is sent as text, and printed once, at the end."""

    def process(error):
        def fail():
            raise error

        return lambda mine: run(mine, fail if mine.is_main_process else int)

    errors = world(2).run(process(KeyError("missing")))
    assert [(type(e), str(e)) for e in errors] == [(Unexpected, "KeyError: 'missing'")] * 2
    assert all("raise error\nKeyError: 'missing'" in e.args[1] for e in errors)
    for error, retry in ((OSError(28, "No space left on device"), True), (MemoryError(), False)):
        errors = world(2).run(process(error))
        assert [(type(e), e.retry) for e in errors] == [(RunFailed, retry)] * 2
        assert ("disk is full" in str(errors[1])) == retry
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("values", "agreed"),
    [
        ([(0.5, 0.0), (0.5 + 1e-7, 1e-12)], (0.5, 0.0)),
        ([(0.5 + 1e-7, None), (0.5, None)], (0.5 + 1e-7, None)),
        ([(math.nan, 1.0)] * 2, (math.nan, 1.0)),
        ([(0.5, None), (0.6, None)], None),
        ([(0.5, 2.0), (0.5, 2.1)], None),
    ],
)
def test_the_processes_decide_by_the_numbers_of_the_first(values, agreed, world):
    """They differ by rounding; if they differ more, a gather is missing."""
    outcomes = world(2).run(
        lambda mine: collectives.same_everywhere(mine, values[mine.process_index])
    )
    if agreed:
        assert str(outcomes) == str([agreed] * 2)
    else:
        assert all(isinstance(error, RunFailed) and not error.retry for error in outcomes)
        assert "gather_for_metrics" in str(outcomes[1])
