"""train_lm.py against TRL's SFTTrainer."""

import importlib.util
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from measuring import (
    QUIET,
    SCRIPTS,
    environment,
    first_steps,
    logged_steps,
    measure_script,
    rounds,
    script_words,
)

from utils.run import devices

LM_MODEL = """
import json, sys
from transformers import LlamaConfig, LlamaForCausalLM
from utils.language.causal_lm import byte_tokenizer
sizes = dict(json.loads(sys.argv[2]), tie_word_embeddings=True, max_position_embeddings=32_768)
config = LlamaConfig(vocab_size=49_152, eos_token_id=258, pad_token_id=256, **sizes)
LlamaForCausalLM(config).save_pretrained(sys.argv[1])
byte_tokenizer().save_pretrained(sys.argv[1])
"""
# Those of SmolLM2-135M, and smaller ones.
SMOLLM2 = dict(hidden_size=576, intermediate_size=1536, num_hidden_layers=30)
SMOLLM2 |= dict(num_attention_heads=9, num_key_value_heads=3)
SMALL = dict(hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4)
# Its loss never has all logits in memory, as ours.
TRL = """
import json, resource, sys, time
begin = float(sys.argv[2])
import torch
from datasets import load_dataset
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer
options, ends = json.loads(sys.argv[1]), []
class Clock(TrainerCallback):
    def on_step_end(self, *_, **__):
        ends.append(time.time())
data = load_dataset("json", data_files=options.pop("data"), split="train")
model = options.pop("model")
config = SFTConfig(report_to=[], save_strategy="no", logging_steps=1,
    use_cpu=not torch.cuda.is_available(), gradient_checkpointing=False, adam_beta2=0.95,
    weight_decay=0.0, disable_tqdm=True,
    lr_scheduler_type="constant", model_init_kwargs={"dtype": "float32"}, **options)
trainer = SFTTrainer(model=model, args=config, train_dataset=data, callbacks=[Clock()])
started = time.time()
trainer.train()
print(json.dumps({
    "losses": [line["loss"] for line in trainer.state.log_history if "loss" in line],
    "start": ends[0] - begin, "seconds": ends[-1] - started,
    "memory": torch.cuda.max_memory_allocated() or
    1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
}))
"""


def lm(args):
    """train_lm.py against TRL's SFTTrainer (skipped if `trl` is not installed).

    The same Llama with random weights, prompts and completions, AdamW, precision and device.
    /loss_difference: the largest between the losses of 20 steps on the same documents; the others
    compare an epoch of each at its best.
    """
    if importlib.util.find_spec("trl") is None:
        print("    skipped: trl is not installed (pip install trl)")
        return {}
    gpu = torch.cuda.is_available()
    bf16, rows, documents = gpu or devices.has_bf16(), 16 if gpu else 4, 4096 if gpu else 256
    if args.quick:
        documents //= 4
    values = {name: [] for name in ("loss_difference", "speed", "memory", "start")}
    with tempfile.TemporaryDirectory() as folder:
        model = f"{folder}/model"
        make_model(model, SMOLLM2 if gpu else SMALL)
        few, many = (write_completions(f"{folder}/{n}", n) for n in (16, documents))
        ours = f"train_lm.py --model {model} --lr_schedule constant --warmup_steps 0 --lr 1e-3"
        ours += (
            " --weight_decay 0 --log_every 1 --eval_every 1000 --checkpoint_every 0 --track none"
        )
        for index in rounds(args):
            # All documents are in one batch, so that their order does not matter.
            same = f"{ours} --dataset {few} --block_size 2048 --batch_size 1 --epochs 20"
            lines, _ = measure_script(same)
            options = dict(model=model, data=few + "/train.jsonl", learning_rate=1e-3, bf16=False)
            whole = dict(per_device_train_batch_size=16, num_train_epochs=20, max_length=None)
            theirs = measure_trl({**options, **whole, "output_dir": f"{folder}/trl"})
            losses = [line["loss"] for line in lines if line["split"] == "train"]
            pairs = zip(losses, theirs["losses"], strict=True)
            values["loss_difference"].append(max(abs(a - b) for a, b in pairs))

            best = f"{ours} --dataset {many} --block_size 1024 --batch_size {rows}"
            _, mine = measure_script(best, bf16=bf16)
            options |= {"data": many + "/train.jsonl", "bf16": bf16, "max_length": 1024}
            options["num_train_epochs"] = 1
            packed = {**options, "packing": True, "per_device_train_batch_size": rows}
            padded = {**options, "per_device_train_batch_size": 4 * rows}
            peers = {
                name: measure_trl({**how, "output_dir": f"{folder}/trl"})
                for name, how in (("packed", packed), ("padded", padded))
            }
            (first,), _ = first_steps(script_words(best, f"{folder}/ours{index}"))
            for name, peer in peers.items():
                print(f"    TRL, {name}: {peer['seconds']:.1f} s, {peer['memory'] / 2**30:.2f} GiB")
            fastest = min(peers.values(), key=lambda peer: peer["seconds"])
            seconds, memory = mine["train_seconds"], mine["peak_memory_bytes"]
            print(f"    train_lm.py: {seconds:.1f} s, {memory / 2**30:.2f} GiB")
            values["speed"].append(fastest["seconds"] / seconds)
            values["memory"].append(memory / fastest["memory"])
            values["start"].append(first / fastest["start"])
    units = dict.fromkeys(values, "over TRL (less is better), ratio")
    units["loss_difference"] = "nats per token"
    units["speed"] = "target tokens per second over TRL (more is better), ratio"
    return {f"lm/{name}": (of_rounds, units[name]) for name, of_rounds in values.items()}


def attention(args):
    """A step of train_lm.py on a packed block: attention by document, over that with a mask.

    A model of SmolLM2-135M's width, 2 of its 30 layers; documents of 500 tokens.
    """
    values = {}
    with tempfile.TemporaryDirectory() as folder:
        model, data = f"{folder}/model", Path(folder, "train.jsonl")
        make_model(model, SMOLLM2 | {"num_hidden_layers": 2})
        # 500 bytes and the end of the text: 500 positions, of which each predicts the next token.
        data.write_text("".join(json.dumps({"text": f"{n:0500}"}) + "\n" for n in range(400)))
        for _ in rounds(args):
            for block in (4096, 16_384):
                same = f"train_lm.py --model {model} --dataset {data} --block_size {block}"
                same += " --batch_size 1 --max_train_steps 2 --log_every 1 --eval_every 9 "
                same += "--checkpoint_every 0 --eval_samples 1 --track none --attention "
                seconds, memory = {}, {}
                for kind in ("auto", "sdpa"):
                    lines, results = measure_script(same + kind)
                    seconds[kind] = min(logged_steps(lines, warm_up=1))
                    memory[kind] = results["peak_memory_bytes"]
                    print(f"    {block} tokens, {kind}: {seconds[kind]:.1f} s")
                for name, figures in (("speed", seconds), ("memory", memory)):
                    parts = values.setdefault(f"{name}_{block}", [])
                    parts.append(figures["auto"] / figures["sdpa"])
    unit = "by document over with a mask (less is better), ratio"
    return {f"attention/{name}": (of_rounds, unit) for name, of_rounds in values.items()}


def make_model(folder, sizes):
    """Writes a Llama with random weights, whose tokens are bytes, to `folder`."""
    words = [sys.executable, "-c", LM_MODEL, folder, json.dumps(sizes)]
    subprocess.run(words, check=True, cwd=SCRIPTS.parent, env=environment(), **QUIET)


def write_completions(folder, count):
    """Writes `count` prompts with completions of very different length; returns the folder."""
    rng, rows = random.Random(0), []
    for _ in range(count):
        sizes = [min(400, round(rng.lognormvariate(3.6, 0.8))) for _ in range(2)]
        prompt, completion = ("".join(rng.choices("abcdefgh ", k=size)) for size in sizes)
        rows.append(json.dumps({"prompt": prompt, "completion": completion + "."}) + "\n")
    Path(folder).mkdir()
    Path(folder, "train.jsonl").write_text("".join(rows))
    Path(folder, "val.jsonl").write_text(rows[0])
    return folder


def measure_trl(options):
    """Trains with TRL in a new process: a dict of `losses`, `start`, `seconds` and `memory`."""
    words = [sys.executable, "-c", TRL, json.dumps(options), str(time.time())]
    done = subprocess.run(words, check=True, capture_output=True, text=True, env=environment())
    return json.loads(done.stdout.strip().splitlines()[-1])
