"""A byte-level GPT: the language template.

Teaches: a transformer small enough to read, two update rules in one optimizer, text that fits in memory or streams,
and a model sharded over GPUs (FSDP2), all in the loop of train_cifar.py. Bytes are the tokens: no tokenizer, and
losses of any two data sets or models compare.

    accelerate launch --config_file accelerate_configs/cpu.yaml scripts/train_gpt.py --dataset input.txt \\
        --n_layer 4 --n_head 4 --n_embd 128 --block_size 64 --batch_size 12 --max_train_steps 2000
    accelerate launch --config_file accelerate_configs/1gpu.yaml scripts/train_gpt.py --dropout 0.2
    accelerate launch --config_file accelerate_configs/4gpu.yaml scripts/train_gpt.py --dropout 0.2
    accelerate launch --config_file accelerate_configs/4gpu_fsdp.yaml scripts/train_gpt.py --streaming \\
        --dataset HuggingFaceFW/fineweb-edu --n_layer 24 --n_head 16 --n_embd 2048 --block_size 2048 \\
        --activation_checkpointing
    python scripts/train_gpt.py --sample runs/train_gpt --prompt "ROMEO:" --temperature 0.8 --top_k 40

Measured on 2026-11-21 with the first command (and --eval_every 2000) on tinyshakespeare, 2 cores of an AMD EPYC, float32:
validation loss 1.571 nats a byte (2.267 bits) over the whole held-out tenth in 219 s; 1.839 with 400 steps, in 43 s, where
nanoGPT's 2,000 steps took 2 minutes to 1.880. Not run on a GPU yet.
"""

import contextlib
import math
import sys
import time
from datetime import timedelta
from itertools import islice
from pathlib import Path

# `utils` lies beside this script (a copy) or one folder up (the repository).
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
from utils import exits

if __name__ == "__main__":
    exits.install()  # before torch: a signal during the slow imports below must not be lost

import torch
import torch.nn.functional as F
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from accelerate.utils import (
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    ProjectConfiguration,
    gather_object,
    send_to_device,
    set_seed,
)
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint as recompute
from torch.utils.data import DataLoader
from tqdm import tqdm

from utils import checkpoint, plots, report, topology, weights
from utils.arguments import Parser, add_data_arguments, add_run_arguments, number
from utils.exits import UserError
from utils.gpu_peaks import peak_flops
from utils.guard import Guard
from utils.image_data import as_is
from utils.muon import MuonAdamW
from utils.run_folder import RunFolder, read_json, scratch_name, write_text
from utils.text_data import TextStream, Windows, load_held_out, load_text

RECIPES = {"muon": dict(lr=0.02, weight_decay=0.1), "adamw": dict(lr=0.01, weight_decay=0.1)}


# ------------------------------------------------------------------------------------------------------------ model


def norm(x):
    """RMSNorm without a gain (B. Zhang, arXiv:1910.07467): the next matrix can scale as it likes."""
    return F.rms_norm(x, (x.size(-1),))


def rotations(time_, size, device):
    """cos and sin, float32 [time, size], of the angles that pairs of channels are turned by (J. Su, arXiv:2104.09864)."""
    frequency = 10_000.0 ** (-torch.arange(0, size, 2, device=device) / size)
    angle = torch.outer(torch.arange(time_, device=device), frequency)
    return torch.cat([angle.cos(), angle.cos()], 1), torch.cat([-angle.sin(), angle.sin()], 1)


class Block(nn.Module):
    """Causal self-attention, then a two-layer network, each added to its input. [batch, time, width] -> the same."""

    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        # Apart rather than in one matrix: Muon orthogonalises each for itself.
        self.query, self.key, self.value, self.mix = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x, cos, sin):
        batch, time_, width = x.shape
        y, dropout = norm(x), self.dropout * self.training
        # Queries and keys of norm 1 keep the attention logits bounded at any learning rate (arXiv:2302.05442); both
        # are turned by an angle that grows with their position, so their product knows the distance.
        both = norm(torch.stack([self.query(y), self.key(y)]).view(2, batch, time_, self.heads, -1).transpose(2, 3))
        value = self.value(y).view(batch, time_, self.heads, -1).transpose(1, 2)
        # The angles are float32 in any precision; attention wants one type.
        query, key = (both * cos + both.roll(both.size(-1) // 2, -1) * sin).to(value.dtype)
        y = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        x = x + F.dropout(self.mix(y.transpose(1, 2).reshape(batch, time_, width)), dropout)
        # Squared ReLU: D. So, arXiv:2109.08668.
        return x + F.dropout(self.down(F.relu(self.up(norm(x))).square()), dropout)


class GPT(nn.Module):
    """int64 bytes [batch, time <= block_size] -> logits of the byte after each [batch, time, 256]."""

    def __init__(self, n_layer, n_head, n_embd, block_size, dropout=0.0, activation_checkpointing=False):
        super().__init__()
        self.block_size, self.activation_checkpointing = block_size, activation_checkpointing
        self.embed = nn.Embedding(256, n_embd)
        self.blocks = nn.ModuleList(Block(n_embd, n_head, dropout) for _ in range(n_layer))
        self.head = nn.Linear(n_embd, 256, bias=False)
        for name, weight in self.named_parameters():
            if name.endswith(("mix.weight", "down.weight", "head.weight")):
                nn.init.zeros_(weight)  # every block starts as the identity, every prediction as uniform
            else:
                nn.init.normal_(weight, std=1.0 if name == "embed.weight" else n_embd**-0.5)

    def forward(self, x):
        cos, sin = rotations(x.size(1), self.embed.embedding_dim // self.blocks[0].heads, x.device)
        x = norm(self.embed(x))
        for block in self.blocks:
            # Keeps only the block's input and computes the rest again in the backward pass: a third more work.
            again = self.activation_checkpointing and self.training
            x = recompute(block, x, cos, sin, use_reentrant=False) if again else block(x, cos, sin)
        return self.head(norm(x))

    def flops_per_token(self):
        """Forward and backward, 6 N + 12 L H Q T: PaLM, arXiv:2204.02311, appendix B.

        N: parameters, but for the embedding, which is looked up and not multiplied. Of the attention matrix the
        formula counts all, though the causal half is enough; recomputed activations it does not count.
        """
        multiplied = sum(weight.numel() for weight in self.parameters()) - self.embed.weight.numel()
        return 6 * multiplied + 12 * len(self.blocks) * self.embed.embedding_dim * self.block_size


def build_optimizer(model, args):
    """Muon (or AdamW) for the matrices of the blocks, AdamW for the embedding and the head, which are not decayed."""
    common = dict(betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0)
    groups = [
        dict(
            params=list(model.blocks.parameters()),
            lr=args.lr,
            weight_decay=args.weight_decay,
            muon=args.optimizer == "muon",
            momentum=0.95,
        ),
        dict(params=[model.embed.weight], lr=args.lr, muon=False),
        dict(params=[model.head.weight], lr=args.lr / 5, muon=False),
    ]
    return MuonAdamW(groups, **common)


def lr_at(step, total_steps, args):
    """The share of the peak rate at `step`: linear warm-up (over a tenth at most), then linear or cosine decay, or constant."""
    progress, warmup = step / total_steps, min(args.warmup_steps, total_steps // 10)
    decay = {"linear": 1 - progress, "cosine": 0.5 + 0.5 * math.cos(math.pi * progress), "constant": 1.0}
    return min(1.0, (step + 1) / (warmup + 1)) * decay[args.lr_schedule]


# --------------------------------------------------------------------------------------------- evaluation, sampling


@torch.no_grad()
def evaluate(accelerator, model, loader, max_batches=None):
    """The mean loss in nats per byte, each held-out byte counted once, on any number of processes.

    The text is read in windows that do not overlap: the first byte of each is predicted from a single one.
    """
    model.eval()
    total, count = 0.0, 0
    for batch in islice(loader, max_batches):
        losses = F.cross_entropy(model(batch["inputs"]).flatten(0, 1).float(), batch["targets"].flatten(), reduction="none")
        # Per window: the windows that fill up the last batch are left out here, and a short one weighs less.
        losses = losses.view_as(batch["targets"]).sum(1)
        losses, counts = accelerator.gather_for_metrics((losses, (batch["targets"] >= 0).sum(1)))
        total, count = total + losses.double().sum().item(), count + counts.sum().item()
    model.train()
    if max_batches is None and count != len(loader.dataset.text) - 1:
        raise RuntimeError(f"evaluated {count} of {len(loader.dataset.text) - 1} held-out bytes")
    return total / count


@torch.compiler.set_stance("force_eager")  # every byte makes the text longer, and each length would be compiled anew
@torch.no_grad()
def generate(model, block_size, device, prompt="\n", length=500, temperature=0.8, top_k=None, seed=0):
    """Continues `prompt` by `length` bytes, each drawn from the `top_k` likeliest (None: all; temperature 0: the likeliest).

    Under FSDP every process has to call it: a forward pass needs all shards. They all draw the same bytes.
    """
    was_training = model.training
    model.eval()
    generator = torch.Generator().manual_seed(seed)  # its own: training draws the same numbers with or without samples
    text = torch.tensor([list(prompt.encode())], device=device)
    for _ in range(length):
        logits = model(text[:, -block_size:])[0, -1].float().cpu()
        likeliest = logits.topk(min(top_k or 256, 256))
        chances = (likeliest.values / max(temperature, 1e-6)).softmax(0)
        choice = likeliest.indices[torch.multinomial(chances, 1, generator=generator)]
        text = torch.cat([text, choice.view(1, 1).to(device)], 1)
    model.train(was_training)
    return bytes(text[0].tolist()).decode(errors="replace")


def sample(args):
    """For --sample: prints what a finished run, one of its checkpoints or a model.safetensors writes."""
    state, config, file = weights.read(args.sample)
    if config is None:  # a checkpoint
        config = {name: (read_json(file.parent / "manifest.json") or {}).get("arguments", {}).get(name) for name in SIZES}
    try:
        model = GPT(**{name: config[name] for name in SIZES})
        model.load_state_dict(state)
    except (KeyError, TypeError, RuntimeError):
        raise UserError(f"{file} is not of a model of this script") from None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, length = model.to(device), args.sample_length
    print(generate(model, config["block_size"], device, args.prompt, length, args.temperature, args.top_k, args.seed))


# ------------------------------------------------------------------------------------------------------------- main

LENGTH = ("epochs", "max_train_steps")
SIZES = ("n_layer", "n_head", "n_embd", "block_size")
HARMLESS = ("activation_checkpointing", "peak_tflops", "sample_length", "prompt", "temperature", "top_k")


def main():
    args = parse_args()
    if args.sample:
        sample(args)
        return
    accelerator = Accelerator(
        cpu=topology.check_launch(),
        # --batch_size is global: every batch is split over the processes, so each topology sees the same ones in order.
        dataloader_config=DataLoaderConfiguration(
            split_batches=True, use_seedable_sampler=True, data_seed=args.seed, non_blocking=True
        ),
        gradient_accumulation_plugin=GradientAccumulationPlugin(args.gradient_accumulation_steps, sync_with_dataloader=False),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=args.timeout))],
        log_with="tensorboard",
        project_config=ProjectConfiguration(logging_dir=args.output_dir),
    )
    if accelerator.device.type == "cuda":
        # Strictly: only then is the backward pass of attention the same every time. Costs some speed, buys exact resume.
        torch.use_deterministic_algorithms(True)
    if accelerator.is_fsdp2 and accelerator.mixed_precision == "bf16":
        # Accelerate would also add up the gradients of all processes in bf16, and round the angles in `Block` to it.
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
        accelerator.state.fsdp_plugin.mixed_precision_policy = policy
    say = accelerator.on_main_process(print)  # accelerator.print speaks once per machine
    banner = topology.banner(accelerator, "train_gpt", args.batch_size, args.gradient_accumulation_steps)
    where = (args.dataset, args.text_column, args.block_size)
    if args.streaming:
        held_out, steps_per_epoch = topology.from_main(accelerator, lambda: load_held_out(*where)), args.max_train_steps
    else:
        text, held_out = topology.node_first(accelerator, lambda: load_text(*where, args.seed))
        if args.overfit_batch:
            text = held_out = text[: args.batch_size * args.block_size + 1]
        # An epoch reads each byte once. Every step sees the same number, so micro-batches and processes weigh alike.
        train_set = Windows(text, args.block_size, None if args.overfit_batch else args.seed)
        steps_per_epoch = len(train_set) // args.batch_size
        if steps_per_epoch == 0:
            raise UserError(f"--batch_size {args.batch_size} is more than the {len(train_set)} training windows")
    total_steps = args.max_train_steps or args.epochs * steps_per_epoch

    # ---- what this folder holds already: nothing, a run to continue, or one that must not be touched
    run = RunFolder(args, accelerator, free=HARMLESS + (LENGTH if args.lr_schedule == "constant" else ()))
    finished, found = run.open()
    if finished:
        say(report.summary(finished, run.path, "this run is finished already, nothing to do"))
        return
    progress = {"step": 0, "train_seconds": 0.0, "score": None, "best": None, "position": None}
    progress |= (found[1]["progress"] | {"score": None}) if found else {}

    # ---- model, optimizer, data
    set_seed(args.seed)
    sizes = {name: getattr(args, name) for name in SIZES}
    elsewhere = accelerator.is_fsdp2 and not accelerator.is_main_process
    with torch.device("meta") if elsewhere else contextlib.nullcontext():
        model = GPT(**sizes, dropout=args.dropout, activation_checkpointing=args.activation_checkpointing)
    if elsewhere:
        # Sharded, the weights exist whole on the main process only: `prepare` sends out the shards. Here stand empty
        # ones, never touched and so without memory, because Accelerate tells weights apart by their address.
        model.to_empty(device="cpu")
    parameters, flops = sum(weight.numel() for weight in model.parameters()), model.flops_per_token()
    if args.compile:
        for block in model.blocks:  # alike, so compiled once; and FSDP, which works between them, stays out of it
            block.compile()
    optimizer = build_optimizer(model, args)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_at(step, total_steps, args))
    common = dict(collate_fn=as_is, worker_init_fn=exits.worker_init, pin_memory=accelerator.device.type == "cuda")
    # 16,384 bytes at a time and process.
    eval_batch = accelerator.num_processes * max(1, 16_384 // args.block_size)
    eval_loader = DataLoader(Windows(held_out, args.block_size), eval_batch, **common)
    model, optimizer, scheduler, eval_loader = accelerator.prepare(model, optimizer, scheduler, eval_loader)
    micro_batch = args.batch_size // args.gradient_accumulation_steps
    if args.streaming:
        share = (accelerator.process_index, accelerator.num_processes)
        stream = dict(lanes=args.stream_lanes, buffer=args.shuffle_buffer, seed=args.seed, position=progress["position"])
        part = micro_batch // accelerator.num_processes
        train_set = topology.node_first(accelerator, lambda: TextStream(*where, part, share=share, **stream))
        # Not prepared: it splits itself. One worker at most, which reads ahead; what it has read too much is not counted.
        train_loader = DataLoader(train_set, batch_size=None, num_workers=min(1, args.num_workers), **common)
    else:
        train_loader = DataLoader(train_set, micro_batch, shuffle=True, drop_last=True, num_workers=args.num_workers, **common)
        train_loader = accelerator.prepare(train_loader)

    def compute_loss(batch):
        return F.cross_entropy(model(batch["inputs"]).flatten(0, 1).float(), batch["targets"].flatten())

    example = {name: held_out[None, :8].long().to(accelerator.device) for name in ("inputs", "targets")}
    topology.settle_gradient_buckets(accelerator, model, lambda: compute_loss(example))
    if found:
        checkpoint.load(accelerator, found[0])
    step = resumed_from = saved_at = progress["step"]
    run.begin(step, topology.describe(accelerator))
    accelerator.init_trackers("tensorboard", init_kwargs={"tensorboard": {"purge_step": step + 1}})
    tracker = accelerator.get_tracker("tensorboard", unwrap=True) if accelerator.is_main_process else None
    say(f"{banner}\n{parameters:,} parameters, {flops / 1e6:.1f} million operations per byte trained on")
    epochs = "in a stream" if args.streaming else f"{steps_per_epoch} an epoch"
    say(f"{total_steps} steps, {epochs}; everything goes to {run.path}")
    say(f"continuing from {found[0]}" if found else "starting at step 0")

    began = time.perf_counter()
    guard = Guard(accelerator, args.timeout)
    meter = report.Meter(accelerator, args.batch_size, total_steps, step)
    bar = tqdm(total=total_steps, initial=step, disable=not (accelerator.is_main_process and sys.stderr.isatty()))
    peak = peak_flops(accelerator, args.peak_tflops)

    def draw_sample():
        return generate(model, args.block_size, accelerator.device, length=args.sample_length, seed=args.seed)

    def save():
        guard.check_loss()
        now = progress | {"step": step, "train_seconds": progress["train_seconds"] + time.perf_counter() - began}
        if args.streaming:
            now["position"] = dict(gather_object(list(position.items())))
        written, seconds = checkpoint.save(accelerator, run.path, now, args.keep_checkpoints, run.record)
        run.log("checkpoint", step, seconds=seconds, written=written)
        return step if written else saved_at

    # ---- the loop
    stop, val_loss, sampled, position = False, None, None, None
    model.train()
    with report.profiler(accelerator, run.path, args.profile) as profile_step:
        while step < total_steps and not stop:
            epoch, done = divmod(step, steps_per_epoch)
            batches = train_loader
            if not args.streaming:
                train_set.cut_for(epoch)
                train_loader.set_epoch(epoch)
                batches = skip_first_batches(train_loader, done * args.gradient_accumulation_steps) if done else train_loader
            # Whole optimizer steps only: what is left of the epoch is the same for every accumulation.
            steps = min(steps_per_epoch - done, total_steps - step)
            step_loss, ids = 0.0, []
            meter.data_wanted()
            for batch in islice(batches, steps * args.gradient_accumulation_steps):
                meter.data_arrived()
                position, batch = batch.get("position"), send_to_device(batch, accelerator.device, non_blocking=True)
                if not ids:
                    # For dropout: drawn anew from the step, so a restart changes nothing.
                    set_seed((args.seed + 1_000_003 * step + 7_919 * accelerator.process_index) % 2**32)
                with accelerator.accumulate(model):
                    loss = compute_loss(batch)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients and args.max_grad_norm:
                        accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                step_loss = step_loss + loss.detach() / args.gradient_accumulation_steps
                ids.append(batch["ids"])
                if accelerator.sync_gradients:
                    step += 1
                    bar.update()
                    profile_step()
                    stop = guard.should_stop(step, step_loss, ids)
                    if step % args.log_every == 0 or step == total_steps:
                        # Of the whole global batch, not of this process' share: one loss, not one per rank.
                        loss = accelerator.reduce(step_loss, "mean").item()
                        line = meter.line(step, epoch=step / steps_per_epoch, loss=loss, lr=scheduler.get_last_lr()[0])
                        line["tokens_per_second"] = line["samples_per_second"] * args.block_size
                        if peak:
                            line["mfu"] = line["tokens_per_second"] * flops / peak
                        run.log("train", **line)
                        shown = [n for n in ("loss", "lr", "samples_per_second", "tokens_per_second", "mfu") if n in line]
                        accelerator.log({f"train/{n}": line[n] for n in shown}, step=step)
                        text = meter.text(line) + (f"  MFU {100 * line['mfu']:.1f} %" if peak else "")
                        bar.write(text) if not bar.disable else say(text)
                        stop = stop or (args.overfit_batch and loss < 0.01)
                    improved = False
                    if step % args.eval_every == 0 or step == total_steps:
                        val_loss = evaluate(accelerator, model, eval_loader, 2 if args.dry_run else None)
                        improved = progress["best"] is None or val_loss < progress["best"]
                        progress |= {"score": -val_loss, "best": val_loss if improved else progress["best"]}
                        figures = {"loss": val_loss, "bits_per_byte": val_loss / math.log(2)}
                        run.log("val", step, epoch=step / steps_per_epoch, **figures)
                        accelerator.log({f"val/{name}": value for name, value in figures.items()}, step=step)
                        sampled = draw_sample()
                        run.log("sample", step, text=sampled)
                        if tracker:
                            tracker.add_text("sample", f"```\n{sampled}\n```", step)
                            write_text(run.path / "sample.txt", sampled)
                        say(f"step {step}  val loss {val_loss:.4f}  {val_loss / math.log(2):.4f} bits per byte")
                    if step == total_steps or (args.checkpoint_every and (improved or step % args.checkpoint_every == 0)):
                        saved_at = save()
                    if progress["score"] is not None:
                        progress["score"] = None  # of this step only
                        meter.restart(step)
                    step_loss, ids = 0.0, []
                    if stop:
                        break
                meter.data_wanted()
    bar.close()
    if step < total_steps and not args.overfit_batch:
        if saved_at != step:
            saved_at = save()
        run.preempted(f"at step {step}, saved at step {saved_at}", step=saved_at)

    # ---- the results
    train_seconds = progress["train_seconds"] + time.perf_counter() - began
    if val_loss is None or step < total_steps:
        val_loss, sampled = evaluate(accelerator, model, eval_loader), draw_sample()
    results = {
        "val_loss": val_loss,
        "val_bits_per_byte": val_loss / math.log(2),
        "global_step": step,
        "samples_seen": step * args.batch_size,
        "tokens_seen": step * args.batch_size * args.block_size,
        "train_seconds": train_seconds,
        "samples_per_second": step * args.batch_size / train_seconds,
        "parameters": parameters,
        "flops_per_token": flops,
        "num_processes": accelerator.num_processes,
        "peak_memory_bytes": report.memory_bytes(accelerator.device),
        "resumed_from": resumed_from,
    }
    whole = accelerator.get_state_dict(model)  # under FSDP put together from all processes
    if accelerator.is_main_process:
        bare = GPT(**sizes)
        bare.load_state_dict(whole)
        weights.export(run.path / "model.safetensors", bare, sizes)
        plots.curves(run.path, figures=("loss", "bits_per_byte"))
        print(sampled)
        flags = {name: value for name, value in run.arguments.items() if value is not None}
        tracker.add_hparams(flags, {f"final/{n}": v for n, v in results.items() if n.startswith("val_")}, run_name=".")
        run.finish(results)
        print(report.summary(results, run.path, "done"))
    accelerator.wait_for_everyone()  # a scheduler may end the other machines once one has left
    accelerator.end_training()


def parse_args():
    parser = Parser(description=__doc__.split("\n")[0])
    group = parser.add_argument_group("model")
    group.add_argument("--n_layer", type=number(int, 1), default=6)
    group.add_argument("--n_head", type=number(int, 1), default=6)
    group.add_argument("--n_embd", type=number(int, 2), default=384, help="width")
    group.add_argument("--block_size", type=number(int, 1), default=256, help="bytes of context")
    group.add_argument("--dropout", type=number(float, 0), default=0.0)
    group.add_argument("--activation_checkpointing", action="store_true", help="less memory, a third more work")
    group.add_argument("--compile", action="store_true", help="torch.compile the model")
    group = parser.add_argument_group("training (defaults marked * depend on --optimizer)")
    group.add_argument("--epochs", type=number(int, 1), default=10, help="passes over the training text")
    group.add_argument("--max_train_steps", type=number(int, 1), help="optimizer steps; wins over --epochs")
    group.add_argument("--batch_size", type=number(int, 1), default=64, help="windows of block_size bytes per step, in all")
    group.add_argument("--gradient_accumulation_steps", type=number(int, 1), default=1, help="micro-batches per step")
    group.add_argument("--optimizer", choices=RECIPES, default="muon", help="of the matrices in the blocks")
    group.add_argument("--lr", type=number(float, 0), help="peak learning rate *")
    group.add_argument("--lr_schedule", choices=["linear", "cosine", "constant"], default="linear")
    group.add_argument("--warmup_steps", type=number(int, 0), default=50)
    group.add_argument("--weight_decay", type=number(float, 0), help="of the matrices in the blocks *")
    group.add_argument("--max_grad_norm", type=number(float, 0), default=1.0, help="clip gradients to this norm; 0: do not")
    group.add_argument("--peak_tflops", type=number(float, 0, above=True), help="of one GPU, for the MFU; known for some")
    add_run_arguments(parser, "runs/train_gpt")
    add_data_arguments(parser, "karpathy/tiny_shakespeare", "Hub id, local text file or folder, or `synthetic`")
    group = parser.add_argument_group("text")
    group.add_argument("--text_column", default="text", help="of a Hub id, JSONL or Parquet")
    group.add_argument("--streaming", action="store_true", help="read while training; needs --max_train_steps")
    group.add_argument(
        "--stream_lanes", type=number(int, 1), default=8, help="parts of a stream: a multiple of all process counts to come"
    )
    group.add_argument("--shuffle_buffer", type=number(int, 1), default=1000, help="windows, per lane of a stream")
    group = parser.add_argument_group("samples")
    group.add_argument("--sample", metavar="PATH", help="do not train: write text with a run's folder or its weights")
    group.add_argument("--prompt", default="\n")
    group.add_argument("--sample_length", type=number(int, 1), default=300, help="bytes")
    group.add_argument("--temperature", type=number(float, 0), default=0.8, help="0: always the likeliest byte")
    group.add_argument("--top_k", type=number(int, 1), help="draw from this many; not given: from all")
    # An epoch of a small text is a few seconds, one of a stream is not known.
    parser.set_defaults(eval_every=250, checkpoint_every=250)
    args = parser.parse_args()
    args.output_dir = scratch_name(args)
    if args.n_embd % args.n_head or args.n_embd // args.n_head % 2:
        raise UserError(f"--n_embd {args.n_embd} must be an even number times --n_head {args.n_head}")
    if not args.prompt:
        raise UserError("--prompt is empty: give at least one character")
    for name, value in RECIPES[args.optimizer].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.dry_run:
        args.max_train_steps, args.eval_every, args.checkpoint_every, args.log_every = 2, 1, 1, 1
    if args.streaming and (args.overfit_batch or not args.max_train_steps):
        raise UserError("--streaming needs --max_train_steps, and does not go with --overfit_batch")
    if args.overfit_batch:
        args.lr_schedule, args.dropout, args.max_train_steps = "constant", 0.0, args.max_train_steps or 200
    return args


if __name__ == "__main__":
    exits.run(main)
