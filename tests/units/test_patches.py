"""What replaces attributes of libraries: it gets all that they are given."""

from types import SimpleNamespace

import pytest
import torch

from utils.scale import patches
from utils.scale.patches import DistributedType


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_processes_on_the_cpu_shard_if_they_are_asked_to(precision, monkeypatch):
    """Over the CPU, also on a machine that has another device, as a Mac has."""

    class State:
        distributed_type = DistributedType.MULTI_CPU

        def __init__(self, *args, **options):
            self.given = args, options
            self.__dict__["_mixed_precision"] = options.get("precision", "no")

    monkeypatch.setattr(patches, "AcceleratorState", State)
    monkeypatch.setattr(patches, "PartialState", SimpleNamespace(**{"_shared_state": {}}))
    monkeypatch.setattr(torch.distributed.fsdp, "fully_shard", lambda *args, **how: (args, how))
    monkeypatch.setattr(patches, "init_device_mesh", lambda *args: args)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    patches.shard_on_cpu()
    asked = []
    plugin = SimpleNamespace(set_mixed_precision=asked.append)
    made = State("here", fsdp_plugin=plugin, precision=precision)
    assert made.given == (("here",), {"fsdp_plugin": plugin, "precision": precision})
    assert made.distributed_type == DistributedType.FSDP and made.fsdp_plugin is plugin
    assert asked == ([] if precision == "no" else [precision])
    plain = State("here")
    assert plain.distributed_type == DistributedType.MULTI_CPU
    assert plain.given == (("here",), {"fsdp_plugin": None})
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
