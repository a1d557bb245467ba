"""What replaces attributes of libraries: it gets all that they are given."""

from types import SimpleNamespace

import pytest
import torch

from utils.scale import patches
from utils.scale.patches import DistributedType


@pytest.fixture
def state(monkeypatch):
    """What replaces the state of Accelerate: of a class whose `__init__` notes what it is given."""

    class State:
        distributed_type = DistributedType.MULTI_CPU

        def __init__(self, *args, **options):
            self.given = args, options
            self.__dict__["_mixed_precision"] = options.get("precision", "no")

    monkeypatch.setattr(patches, "AcceleratorState", State)
    shared = SimpleNamespace(**{"_shared_state": {}})
    monkeypatch.setattr(patches, "PartialState", shared)
    monkeypatch.setattr(
        torch.distributed.fsdp, "fully_shard", lambda *args, **options: (args, options)
    )
    patches.shard_on_cpu()
    return State


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_processes_on_the_cpu_shard_if_they_are_asked_to(precision, state):
    asked = []
    plugin = SimpleNamespace(set_mixed_precision=asked.append)
    made = state("here", fsdp_plugin=plugin, precision=precision)
    assert made.given == (("here",), {"fsdp_plugin": plugin, "precision": precision})
    assert made.distributed_type == DistributedType.FSDP and made.fsdp_plugin is plugin
    assert asked == ([] if precision == "no" else [precision])
    plain = state("here")
    assert plain.distributed_type == DistributedType.MULTI_CPU
    assert plain.given == (("here",), {"fsdp_plugin": None})


def test_a_model_is_sharded_over_the_processes_of_the_cpu(state, monkeypatch):
    monkeypatch.setattr(patches, "init_device_mesh", lambda *args: args)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    shard = torch.distributed.fsdp.fully_shard
    assert shard("model", reshard=True) == (("model",), {"mesh": ("cpu", (3,)), "reshard": True})
    assert shard("model", mesh="given") == (("model",), {"mesh": "given"})


def test_an_error_of_a_batch_that_cannot_be_sent_is_reported(monkeypatch):
    queue, told = type("Queue", (), {}), []
    monkeypatch.setattr(patches, "Queue", queue)
    patches.report_unsendable_batches(lambda error, batch: told.append((error, batch)))
    (replaced,) = [value for value in vars(queue).values() if isinstance(value, staticmethod)]
    replaced("an error", "a batch")
    assert told == [("an error", "a batch")]
