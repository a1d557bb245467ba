"""Launched by a test: writes its rank, device, an all-reduced sum and whether a model is sharded to `<out>/<rank>.json`."""

import json
import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

import torch
from accelerate import Accelerator

from utils import topology

accelerator = Accelerator(cpu=topology.check_launch(shards=True))
total = accelerator.reduce(torch.tensor(accelerator.process_index + 1.0, device=accelerator.device), "sum").item()
report = {
    "rank": accelerator.process_index,
    "processes": accelerator.num_processes,
    "device": accelerator.device.type,
    "sum": total,
    "sharded": accelerator.is_fsdp2,
}
(Path(sys.argv[1]) / f"{accelerator.process_index}.json").write_text(json.dumps(report))
accelerator.end_training()
