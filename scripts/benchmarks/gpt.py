"""train_gpt.py against a plain loop, and against nanoGPT's setting in PyTorch's own layers."""

import statistics
from types import SimpleNamespace

import torch
import torch.nn.functional as F
import train_gpt
from measuring import batches, logged_steps, measure_loop, measure_script, rounds
from torch import nn

from utils.language.text import Windows, synthetic_text
from utils.run import devices
from utils.run.failures import UserError

GPT = dict(n_layer=4, n_head=4, n_embd=128, block_size=64)  # nanoGPT's CPU setting
GPT_BATCH = 12
# github.com/karpathy/nanoGPT, README: validation loss of the CPU setting after 2,000 steps.
NANOGPT_LOSS = 1.88


def gpt(args):
    """train_gpt.py on tinyshakespeare, in nanoGPT's CPU setting.

    `gpt_time`: time to the validation loss that nanoGPT reports after 2,000 steps, over that of
    2,000 such steps in PyTorch's own layers. `gpt_loss`, `gpt_step`: validation loss after 2,000
    steps, and the milliseconds of a step.
    """
    values = {"gpt_time": [], "gpt_loss": [], "gpt_step": []}
    command = f"train_gpt.py --dataset {args.text} {gpt_arguments()} --sample_length 1"

    def train(steps, seed, options=""):
        length = f"--max_train_steps {steps} --eval_every {steps} --checkpoint_every 0"
        return measure_script(f"{command} --seed {seed} {length}{options}", bf16=devices.has_bf16())

    steps = 2000
    for seed in rounds(args):
        seconds = measure_loop("gpt.usual_gpt", steps=200)["seconds"]
        budget = steps * statistics.median(seconds[20:])
        print(f"    a step of the usual GPT loop: {1e3 * budget / steps:.1f} ms")
        lines, results = train(steps, seed)
        step_seconds = statistics.median(logged_steps(lines, 100))
        values["gpt_step"].append(1e3 * step_seconds)
        values["gpt_loss"].append(results["val_loss"])
        # The length of a run decides its schedule: find the shortest that reaches the loss, in
        # units of 25 steps. Short runs need a higher learning rate.
        short = 100
        while train(short, seed, " --lr 0.05")[1]["val_loss"] > NANOGPT_LOSS:
            short += 25
            if short > steps:
                raise UserError(
                    f"train_gpt.py does not reach {NANOGPT_LOSS} in {steps} steps: is {args.text} "
                    "tinyshakespeare?"
                )
        values["gpt_time"].append(short * step_seconds / budget)
    units = dict.fromkeys(values, "nats per byte; step: milliseconds (less is better)")
    units["gpt_time"] = "time over the usual GPT (less is better), ratio"
    return {name: (of_rounds, units[name]) for name, of_rounds in values.items()}


def gpt_arguments():
    """nanoGPT's CPU setting, as arguments of train_gpt.py."""
    sizes = " ".join(f"--{name} {value}" for name, value in GPT.items())
    return f"{sizes} --batch_size {GPT_BATCH}"


def plain_gpt(steps):
    """train_gpt.py as a plain PyTorch loop, in nanoGPT's CPU setting; yields after each step."""
    devices.keep_freed_memory()
    torch.manual_seed(0)
    model, optimizer = small_gpt()
    args = SimpleNamespace(lr_schedule="linear", warmup_steps=50)
    plan = SimpleNamespace(total_steps=steps)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: train_gpt.lr_multiplier(step, plan, args)
    )
    windows = Windows(text_tensor(), GPT["block_size"])
    for ids in batches(len(windows), GPT_BATCH, steps):
        batch = windows.__getitems__(ids.tolist())
        logits = model(batch["inputs"])
        F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        yield


def usual_gpt(steps):
    """nanoGPT's CPU setting in PyTorch's own layers; yields after each step.

    With GELU, layer norm and AdamW.
    """
    torch.manual_seed(0)
    width, length = GPT["n_embd"], GPT["block_size"]
    layer = nn.TransformerEncoderLayer(
        width, GPT["n_head"], 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True, bias=False
    )
    blocks = nn.TransformerEncoder(layer, GPT["n_layer"], enable_nested_tensor=False)
    embed, position = nn.Embedding(256, width), nn.Embedding(length, width)
    head = nn.Linear(width, 256, bias=False)
    parameters = list(nn.ModuleList([blocks, embed, position, head]).parameters())
    optimizer = torch.optim.AdamW(parameters, 1e-3, (0.9, 0.99), weight_decay=0.1)
    mask, places = nn.Transformer.generate_square_subsequent_mask(length), torch.arange(length)
    text = text_tensor().long()
    for _ in range(steps):
        starts = torch.randint(len(text) - length - 1, (GPT_BATCH,))
        windows = torch.stack([text[start : start + length + 1] for start in starts])
        logits = head(blocks(embed(windows[:, :-1]) + position(places), mask, is_causal=True))
        loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        yield


def small_gpt():
    """Builds the model of train_gpt.py in nanoGPT's CPU setting, and its optimizer."""
    model = train_gpt.GPT(**GPT)
    args = SimpleNamespace(optimizer="muon", **train_gpt.RECIPES["muon"])
    return model, train_gpt.build_optimizer(model, args)


def text_tensor():
    """Synthetic text: uint8 [bytes]."""
    return torch.frombuffer(bytearray(synthetic_text(0)), dtype=torch.uint8)
