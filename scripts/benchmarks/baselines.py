"""Runs one of the loops that the benchmarks compare the training scripts with, in plain PyTorch.

    python scripts/benchmarks/baselines.py gpt.plain_gpt --options '{"steps": 20}'

The loop is a generator in a module of this folder, which yields after each step. Prints the seconds
of each step and what the loop returns, as JSON. With torchrun, `plain_cifar` uses DDP over gloo.
"""

import importlib
import json
import sys
import time
from pathlib import Path

# Finds `utils` and the training scripts next to this script (a copy) or above (the repository).
sys.path[1:1] = map(str, Path(__file__).resolve().parents[1:3])
from utils.run import process

if __name__ == "__main__":
    process.handle_signals()  # ends this process when the benchmark that started it does

import torch

from utils.run import entry
from utils.run.arguments import Parser


def main():
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("loop", help="module and name of the loop")
    parser.add_argument("--options", default="{}", help="the arguments of the loop, as JSON")
    args = parser.parse_args()
    module, _, name = args.loop.partition(".")
    loop, seconds, results = getattr(importlib.import_module(module), name), [], {}

    def steps():
        results.update((yield from loop(**json.loads(args.options))) or {})

    start_time = time.perf_counter()
    for _ in steps():
        now = time.perf_counter()
        seconds.append(now - start_time)
        start_time = now
    if torch.distributed.is_initialized():
        # Without it, a process that uses gloo occasionally aborts at exit.
        torch.distributed.destroy_process_group()
    if process.is_main():
        print(json.dumps({"seconds": seconds, "results": results}))


if __name__ == "__main__":
    entry.run(main)
