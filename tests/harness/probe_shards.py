"""Loads a language model sharded over processes and exports it, as train_lm.py does; reports memory.

    accelerate launch --config_file accelerate_configs/4gpu_fsdp.yaml tests/harness/probe_shards.py \
        BASE OUT

Writes `rank_N.json` to OUT: bytes of `shard` and `largest` parameter, and by how much the memory of
the process grew at most while it was `loading` and `exporting`. That is RssAnon: pages of mapped
files are shared by all processes, and the kernel takes them back.
"""

import contextlib
import json
import sys
import threading
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[2]))
import torch

from utils.run.collectives import run_on_all, wait_for_all


def anonymous():
    """The bytes of the memory of this process that no file backs, in RAM."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


@contextlib.contextmanager
def growth(report, name):
    """Reports by how much the memory of this process grew at most in a block."""
    seen, stop = [anonymous()], threading.Event()

    def watch():
        while not stop.wait(0.005):
            seen.append(anonymous())

    thread = threading.Thread(target=watch, daemon=True)  # an error ends the process
    thread.start()
    yield
    stop.set()
    thread.join()
    report[name] = max(seen) - seen[0]


def main(base, out):
    from scripts import train_lm

    sys.argv[1:] = ["--model", base, "--output_dir", out, "--block_size", "64", "--track", "none"]
    args, report = train_lm.parse_args(), {}
    accelerator, _ = train_lm.connect(args)
    tokenizer, config, _ = train_lm.load_settings(args)
    wait_for_all(accelerator)
    with growth(report, "loading"):
        model = run_on_all(accelerator, lambda: train_lm.build_model(accelerator, config, args))
        optimizer = train_lm.build_optimizer(model, args)
        model, optimizer = accelerator.prepare(model, optimizer)
        wait_for_all(accelerator)
    with growth(report, "exporting"):
        train_lm.adapters.export(accelerator, Path(out), model, tokenizer)
    weights = list(model.parameters())
    report["shard"] = sum(weight.to_local().nbytes for weight in weights)
    report["largest"] = max(weight.nbytes for weight in weights)
    report["buffers"] = [buffer.double().sum().item() for buffer in model.buffers()]
    (Path(out) / f"rank_{accelerator.process_index}.json").write_text(json.dumps(report))
    accelerator.end_training()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
