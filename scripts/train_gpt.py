"""A byte-level GPT: the language template.

Shows a transformer small enough to read, two update rules in one optimizer, text in memory or streamed, and a model sharded
over GPUs (FSDP2), all with the loop of train_cifar.py. Tokens are bytes: no tokenizer, and losses that can be compared.

    accelerate launch --config_file accelerate_configs/cpu.yaml scripts/train_gpt.py --dataset input.txt \\
        --n_layer 4 --n_head 4 --n_embd 128 --block_size 64 --batch_size 12 --max_train_steps 2000
    accelerate launch --config_file accelerate_configs/4gpu.yaml scripts/train_gpt.py --dropout 0.2
    accelerate launch --config_file accelerate_configs/4gpu_fsdp.yaml scripts/train_gpt.py --streaming --max_train_steps 5000 \\
        --dataset HuggingFaceFW/fineweb-edu --n_layer 24 --n_head 16 --n_embd 2048 --block_size 2048 --activation_checkpointing
    python scripts/train_gpt.py --sample runs/train_gpt --prompt "ROMEO:" --temperature 0.8 --top_k 40

Measured on 2026-11-25 with the first command (and --eval_every 2000) on tinyshakespeare, 2 cores of an Intel Xeon: validation
loss 1.516 nats per byte; 1.740 after 400 steps, where nanoGPT's 2,000 steps reach 1.880. Not run on a GPU yet.
"""

import contextlib
import math
import sys
from datetime import timedelta
from pathlib import Path

# Finds `utils` next to this script (a copy) or one folder up (the repository).
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
from utils import exits

if __name__ == "__main__":
    exits.install()  # before torch: a signal during the slow imports below must not be lost

import torch
import torch.nn.functional as F
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from accelerate.utils import GradientAccumulationPlugin, InitProcessGroupKwargs, set_seed
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint as recompute
from torch.utils.data import DataLoader

from utils import plots, report, topology, tracking, weights
from utils.arguments import Parser, number
from utils.exits import UserError
from utils.files import read_json, write_text
from utils.gpu_peaks import peak_flops
from utils.guard import Guard
from utils.image_data import as_is
from utils.muon import MuonAdamW
from utils.plan import Plan
from utils.run_folder import RunFolder
from utils.sampling import generate
from utils.text_data import TextStream, Windows, gather_position, load_held_out, load_text

RECIPES = {"muon": dict(lr=0.02, weight_decay=0.1), "adamw": dict(lr=0.01, weight_decay=0.1)}


# ------------------------------------------------------------------------------------------------------------ model


def norm(x, *shares):
    """Layer norm without scale and bias; then adds, per channel, shares of the positions before (arXiv:2305.13048)."""
    x = F.layer_norm(x, (x.size(-1),))
    return sum((share * F.pad(x, (0, 0, back, 0))[:, : x.size(1)] for back, share in enumerate(shares, 1)), x)


def rotations(length, size, device):
    """Rotary position embedding (J. Su, arXiv:2104.09864): cos and sin of the angles, float32 [time, size]."""
    frequency = 10_000.0 ** (-torch.arange(0, size, 2, device=device) / size)
    angle = torch.outer(torch.arange(length, device=device), frequency)
    return torch.cat([angle.cos(), angle.cos()], 1), torch.cat([-angle.sin(), angle.sin()], 1)


class Block(nn.Module):
    """[batch, time, width] -> the same: causal attention, then an MLP with squared ReLU (arXiv:2109.08668), both residual."""

    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        # Separate matrices, because Muon orthogonalizes each of them.
        self.query, self.key, self.value, self.out_proj = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.shares = nn.ParameterList(torch.zeros(width) for _ in range(4))

    def forward(self, x, cos, sin):
        batch, length, width = x.shape
        y, dropout = norm(x, *self.shares[:2]), self.dropout * self.training
        # Normalized queries and keys keep the attention logits bounded at any learning rate (arXiv:2302.05442); 1.5 allows
        # sharper attention. Both are rotated by an angle that grows with the position: their product depends on the distance.
        both = norm(torch.stack([self.query(y), self.key(y)]).view(2, batch, length, self.heads, -1).transpose(2, 3))
        value = self.value(y).view(batch, length, self.heads, -1).transpose(1, 2)
        # The angles are float32 in any precision; attention needs a single dtype. On CPUs its bf16 backward pass is slow.
        query, key = (both * cos + both.roll(both.size(-1) // 2, -1) * sin).to(torch.float32 if x.is_cpu else value.dtype)
        with torch.autocast("cpu", enabled=False):
            scale = 1.5 * key.size(-1) ** -0.5
            y = F.scaled_dot_product_attention(query, key, value.to(key.dtype), None, dropout, is_causal=True, scale=scale)
        x = x + F.dropout(self.out_proj(y.to(value.dtype).transpose(1, 2).reshape(batch, length, width)), dropout)
        return x + F.dropout(self.down(F.relu(self.up(norm(x, *self.shares[2:]))).square()), dropout)


class GPT(nn.Module):  # EDIT: model
    """Maps bytes, int64 [batch, time <= block_size], to the logits of each next byte, [batch, time, 256]."""

    def __init__(self, n_layer, n_head, n_embd, block_size, dropout=0.0, activation_checkpointing=False):
        super().__init__()
        self.block_size, self.activation_checkpointing = block_size, activation_checkpointing
        self.embed = nn.Embedding(256, n_embd)
        self.blocks = nn.ModuleList(Block(n_embd, n_head, dropout) for _ in range(n_layer))
        self.skips = nn.ParameterList(torch.zeros(n_embd) for _ in range(n_layer))  # from the embedding to each block
        self.head = nn.Linear(n_embd, 256, bias=False)
        for name, weight in self.named_parameters():
            if name.endswith(("out_proj.weight", "down.weight", "head.weight")):
                nn.init.zeros_(weight)  # every block starts as the identity, predictions start uniform
            elif weight.ndim == 2:
                nn.init.normal_(weight, std=1.0 if name == "embed.weight" else n_embd**-0.5)

    def forward(self, x):
        cos, sin = rotations(x.size(1), self.embed.embedding_dim // self.blocks[0].heads, x.device)
        x = first = norm(self.embed(x))
        for block, skip in zip(self.blocks, self.skips, strict=True):
            x = x + skip * first
            # Keeps only the input of the block and recomputes the rest in the backward pass: a third more computation.
            checkpointed = self.activation_checkpointing and self.training
            x = recompute(block, x, cos, sin, use_reentrant=False) if checkpointed else block(x, cos, sin)
        return self.head(norm(x))

    def flops_per_token(self):
        """FLOPs of the forward and backward pass per token: 6 N + 12 L H Q T (PaLM, arXiv:2204.02311, appendix B).

        N: weights of matrices without the embedding, which is looked up and not multiplied. The formula counts the full
        attention matrix, although causal attention needs half of it, and does not count recomputed activations.
        """
        multiplied = sum(weight.numel() for weight in self.parameters() if weight.ndim == 2) - self.embed.weight.numel()
        return 6 * multiplied + 12 * len(self.blocks) * self.embed.embedding_dim * self.block_size


def build_optimizer(model, args):
    """Muon (or AdamW) for the matrices of the blocks, AdamW without weight decay for all other parameters."""
    matrices = [weight for weight in model.blocks.parameters() if weight.ndim == 2]
    vectors = [weight for weight in model.parameters() if weight.ndim == 1]
    muon = dict(muon=args.optimizer == "muon", momentum=(0.85, 0.95, 300), iterations=3, beta2=0.95)
    groups = [
        dict(params=matrices, lr=args.lr, weight_decay=args.weight_decay, **muon),
        dict(params=[model.embed.weight, *vectors], lr=args.lr, muon=False),
        dict(params=[model.head.weight], lr=args.lr / 5, muon=False),
    ]
    return MuonAdamW(groups, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0)


def lr_multiplier(step, total_steps, args):
    """The learning-rate multiplier at `step`: linear warm-up (at most a tenth), then linear or cosine decay, or constant."""
    progress, warmup = step / total_steps, min(args.warmup_steps, total_steps // 10)
    decay = {"linear": 1 - progress, "cosine": 0.5 + 0.5 * math.cos(math.pi * progress), "constant": 1.0}
    return min(1.0, (step + 1) / (warmup + 1)) * decay[args.lr_schedule]


# ------------------------------------------------------------------------------------- data, evaluation, sampling


def build_loaders(accelerator, train_set, held_out, args):  # EDIT: data
    """Builds loaders of global batches. A stream yields only the share of this process, so it needs no `prepare`."""
    common = dict(collate_fn=as_is, worker_init_fn=exits.worker_init, pin_memory=accelerator.device.type == "cuda")
    eval_set = Windows(held_out, args.block_size)
    eval_batch = topology.evaluation_batch(accelerator, len(eval_set), max(1, 16_384 // args.block_size))
    eval_loader = DataLoader(eval_set, eval_batch, **common)
    if args.streaming:
        # At most one worker, which prefetches. The position saved with a checkpoint does not include prefetched batches.
        return DataLoader(train_set, batch_size=None, num_workers=min(1, args.num_workers), **common), eval_loader
    micro_batch = args.batch_size // args.gradient_accumulation_steps
    return DataLoader(train_set, micro_batch, shuffle=True, drop_last=True, num_workers=args.num_workers, **common), eval_loader


def epoch_batches(loader, epoch, batches_done):
    """The remaining batches of `epoch`. A stream has no epochs: it continues at its own position."""
    if isinstance(loader.dataset, TextStream):
        return loader
    loader.dataset.set_offset(epoch)
    loader.set_epoch(epoch)
    return skip_first_batches(loader, batches_done)


def compute_loss(model, batch, device):  # EDIT: loss
    """The mean loss in nats per byte of a batch of windows; targets of -100 do not count."""
    inputs, targets = (batch[name].to(device, non_blocking=True) for name in ("inputs", "targets"))
    return F.cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten())


@torch.no_grad()
def evaluate(accelerator, model, loader):  # EDIT: metric
    """Computes the exact mean loss in nats per byte: each held-out byte counts once, on any number of processes.

    The windows do not overlap, so the first prediction in each window has a context of one byte only.
    """
    model.eval()
    total, count = 0.0, 0
    for batch in loader:
        losses = F.cross_entropy(model(batch["inputs"]).flatten(0, 1).float(), batch["targets"].flatten(), reduction="none")
        # Gather per window: this drops the windows repeated to fill up the last batch, and counts the bytes of a short one.
        losses = losses.view_as(batch["targets"]).sum(1)
        losses, counts = accelerator.gather_for_metrics((losses, (batch["targets"] >= 0).sum(1)))
        total, count = total + losses.double().sum().item(), count + counts.sum().item()
    model.train()
    if count != len(loader.dataset.text) - 1:
        raise RuntimeError(f"evaluated {count} of {len(loader.dataset.text) - 1} held-out bytes")
    return total / count


def sample(args):
    """For --sample: prints text generated by a finished run, one of its checkpoints or a model.safetensors."""
    state, config, file = weights.read(args.sample)
    if config is None:  # a checkpoint
        config = {name: (read_json(file.parent / "manifest.json") or {}).get("arguments", {}).get(name) for name in SIZES}
    try:
        model = GPT(**{name: config[name] for name in SIZES})
        model.load_state_dict(state)
    except (KeyError, TypeError, RuntimeError):
        raise UserError(f"{file} does not hold a model of this script") from None
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    print(generate(model, config["block_size"], args.sample_length, args.seed, args.prompt, args.temperature, args.top_k))


# ------------------------------------------------------------------------------------------------------------- main

SIZES = ("n_layer", "n_head", "n_embd", "block_size")
MAY_CHANGE = ("activation_checkpointing", "peak_tflops", "sample_length", "sample_sharded", "prompt", "temperature", "top_k")


def set_precision(accelerator):
    """Makes attention deterministic on GPUs, and keeps FSDP's gradient reduction in float32."""
    if accelerator.device.type == "cuda":
        # Without `warn_only`, because only then is the backward pass of attention deterministic. It is somewhat slower.
        torch.use_deterministic_algorithms(True)
    if accelerator.is_fsdp2 and accelerator.mixed_precision == "bf16":
        # By default Accelerate also reduces gradients in bf16, and casts the angles in `Block` to bf16.
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
        accelerator.state.fsdp_plugin.mixed_precision_policy = policy


def main():
    args = parse_args()
    if args.sample:
        return sample(args)
    # --batch_size is global: each batch is split over the processes, so every topology sees the same batches in the same order.
    loading = DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True, data_seed=args.seed, non_blocking=True)
    accelerator = Accelerator(
        cpu=topology.check_launch(training=True, shards=True),
        dataloader_config=loading,
        gradient_accumulation_plugin=GradientAccumulationPlugin(args.gradient_accumulation_steps, sync_with_dataloader=False),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=args.timeout))],
        log_with=tracking.trackers(args.track),
        project_dir=f"{args.output_dir}/tensorboard",
    )
    topology.print_banner(accelerator, args.batch_size, args.gradient_accumulation_steps)
    set_precision(accelerator)
    source, train_set = (args.dataset, args.text_column, args.block_size), None
    if args.streaming:
        held_out = topology.run_on_main(accelerator, lambda: load_held_out(*source))
    else:
        text, held_out = topology.local_main_first(accelerator, lambda: load_text(*source, args.seed))
        if args.overfit_batch:
            text = held_out = text[: args.batch_size * args.block_size + 1]
        # An epoch reads each byte once. All windows have the same length, so micro-batches and processes have equal weight.
        train_set = Windows(text, args.block_size, None if args.overfit_batch else args.seed)
    if args.dry_run:
        held_out = held_out[: 20 * args.block_size]
    plan = Plan.from_args(args, None if args.streaming else len(train_set))
    run = RunFolder(args, accelerator, MAY_CHANGE)
    run.open(plan)  # the folder is empty, or has a run to continue, or a finished run
    if run.finished:
        return
    if args.streaming:
        position = run.progress.get("position")
        train_set = topology.local_main_first(accelerator, lambda: TextStream.from_args(args, accelerator, position))

    set_seed(args.seed)
    sizes = {name: getattr(args, name) for name in SIZES}
    empty = accelerator.is_fsdp2 and not accelerator.is_main_process
    with torch.device("meta") if empty else contextlib.nullcontext():
        model = GPT(**sizes, dropout=args.dropout, activation_checkpointing=args.activation_checkpointing)
    if empty:
        # With FSDP only the main process holds the full weights, and `prepare` sends the shards to the others. The others need
        # tensors with distinct addresses, by which Accelerate identifies them. Never written to, they use no physical memory.
        model.to_empty(device="cpu")
    weights.initialize(accelerator, model, run.init_from)
    parameters, flops = sum(weight.numel() for weight in model.parameters()), model.flops_per_token()
    if args.compile:
        for block in model.blocks:  # all alike, so compiled only once; FSDP's hooks run between them
            block.compile()
    optimizer = build_optimizer(model, args)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_multiplier(step, plan.total_steps, args))
    train_loader, eval_loader = build_loaders(accelerator, train_set, held_out, args)
    model, optimizer, scheduler, eval_loader = accelerator.prepare(model, optimizer, scheduler, eval_loader)
    train_loader = train_loader if args.streaming else accelerator.prepare(train_loader)
    topology.set_up_ddp(accelerator, model, held_out[None, :8].long().to(accelerator.device))
    rates, peak = {"tokens_per_second": args.block_size}, peak_flops(accelerator, args.peak_tflops)
    if peak:
        rates["mfu"] = args.block_size * flops / peak
    step = run.start(scheduler, rates)  # accelerator.load_state, if there is a checkpoint
    run.print(f"{parameters:,} parameters, {flops / 1e6:.1f} MFLOP per byte of training")
    guard = Guard(accelerator, args.timeout)
    train_loss, val_loss = math.inf, None
    with report.profiler(accelerator, run.path, args.profile) as profiler:
        for epoch, todo in plan.epochs(start=step):
            batches = epoch_batches(train_loader, epoch, todo.batches_done)
            for step, micro_batches in todo.steps(run.timed(batches)):
                losses, ids, norm = [], [], None
                for batch in micro_batches:
                    # Makes a restart draw the same dropout masks. Seeds after loading the batch, which may draw numbers too.
                    topology.seed_step(accelerator, args.seed, step, len(losses))
                    with accelerator.accumulate(model):
                        loss = compute_loss(model, batch, accelerator.device)
                        accelerator.backward(loss)
                        if accelerator.sync_gradients and args.max_grad_norm:
                            norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                        optimizer.step()
                        scheduler.step()
                        optimizer.zero_grad()
                    losses.append(loss.detach())
                    ids.append(batch["ids"])
                profiler.step()
                stop = guard.should_stop(step, losses, ids, norm)  # the same answer on every process
                if plan.log_due(step):
                    train_loss = accelerator.reduce(torch.stack(losses).mean(), "mean").item()  # one loss, not one per rank
                    run.log("train", step, loss=train_loss, grad_norm=norm, lr=scheduler.get_last_lr()[0])
                if plan.evaluation_due(step):
                    val_loss = evaluate(accelerator, model, eval_loader)
                    run.log("val", step, score=-val_loss, loss=val_loss, bits_per_byte=val_loss / math.log(2))
                    if not accelerator.is_fsdp2 or args.sample_sharded:
                        run.log("sample", step, text=generate(model, args.block_size, args.sample_length, args.seed))
                if stop or plan.save_due(step, improved=run.improved_at(step)):
                    guard.check(model)  # a checkpoint never holds a diverged model
                    with run.checkpoint(step, position=gather_position(batch)) as folder:
                        accelerator.save_state(folder)
                if stop and step < plan.total_steps:
                    run.exit_preempted(step)
            if args.overfit_batch and train_loss < 0.01:
                break

    if val_loss is None or step < plan.total_steps:  # resumed after the last step, or --overfit_batch ended early
        val_loss = evaluate(accelerator, model, eval_loader)
    sampled = generate(model, args.block_size, args.sample_length, args.seed)
    state = accelerator.get_state_dict(model)  # under FSDP gathered from all processes
    if accelerator.is_main_process:
        unwrapped = GPT(**sizes)
        unwrapped.load_state_dict(state)
        weights.export(run.path, unwrapped, sizes)
        write_text(run.path / "sample.txt", sampled)
        plots.curves(run.path, figures=("loss", "bits_per_byte"))
        print(sampled)
    results = {"val_loss": val_loss, "val_bits_per_byte": val_loss / math.log(2), "flops_per_token": flops}
    results |= {"parameters": parameters, "tokens_seen": step * args.batch_size * args.block_size}
    run.finish(step, next_command=f'python scripts/train_gpt.py --sample {run.path} --prompt "The "', **results)
    accelerator.end_training()


def parse_args():
    parser = Parser(description=__doc__.split("\n")[0])
    group = parser.add_argument_group("model")
    group.add_argument("--n_layer", type=number(int, 1), default=6, help="number of blocks")
    group.add_argument("--n_head", type=number(int, 1), default=6, help="attention heads per block")
    group.add_argument("--n_embd", type=number(int, 2), default=384, help="width of the embedding")
    group.add_argument("--block_size", type=number(int, 1), default=256, help="bytes of context")
    group.add_argument("--dropout", type=number(float, 0), default=0.0, help="dropout probability")
    group.add_argument("--activation_checkpointing", action="store_true", help="less memory, a third more computation")
    group.add_argument("--compile", action="store_true", help="torch.compile the model")
    group = parser.add_argument_group("training (a sample is a window of block_size bytes)")
    group.add_argument("--optimizer", choices=RECIPES, default="muon", help="for the weight matrices of the blocks")
    parser.add_training_arguments(group)
    parser.add_optimizer_arguments(group)
    group.add_argument("--lr_schedule", choices=["linear", "cosine", "constant"], default="linear", help="after warm-up")
    group.add_argument("--warmup_steps", type=number(int, 0), default=50, help="steps of warm-up, at most a tenth of all")
    group.add_argument("--peak_tflops", type=number(float, 0, above=True), help="peak of one GPU, for MFU; known for some GPUs")
    parser.add_run_arguments()
    parser.add_data_arguments("karpathy/tiny_shakespeare", "Hub id, local text file or folder, or `synthetic`")
    group = parser.add_argument_group("text")
    group.add_argument("--text_column", default="text", help="column with the text, for a Hub id, JSONL or Parquet")
    group.add_argument("--streaming", action="store_true", help="read the text during training; needs --max_train_steps")
    group.add_argument("--stream_lanes", type=number(int, 1), default=8, help="parallel parts; a multiple of the process count")
    group.add_argument("--shuffle_buffer", type=number(int, 1), default=1000, help="windows per lane (part) of a stream")
    group = parser.add_argument_group("samples")
    group.add_argument("--sample", metavar="PATH", help="do not train: generate text with the weights of a run")
    group.add_argument("--prompt", default="\n", help="text to continue")
    group.add_argument("--sample_length", type=number(int, 1), default=300, help="bytes to sample")
    group.add_argument("--sample_sharded", action="store_true", help="sample at evaluations with FSDP too, which is slow")
    group.add_argument("--temperature", type=number(float, 0), default=0.8, help="of sampling; 0: always the most likely byte")
    group.add_argument("--top_k", type=number(int, 1), help="sample from this many bytes; default: from all")
    # In steps: an epoch of a small text takes seconds, and the length of a stream's epoch is unknown.
    parser.set_defaults(epochs=10, batch_size=64, max_grad_norm=1.0, eval_every=250, checkpoint_every=250)
    parser.set_defaults(**RECIPES.get(parser.choice("optimizer"), {}))
    args = parser.parse_training_args()
    if args.n_embd % args.n_head or args.n_embd // args.n_head % 2:
        raise UserError(f"--n_embd {args.n_embd} must be an even number times --n_head {args.n_head}")
    if not args.prompt:
        raise UserError("--prompt is empty: give at least one character")
    if args.streaming and (args.overfit_batch or not args.max_train_steps):
        raise UserError("--streaming needs --max_train_steps, and cannot be combined with --overfit_batch")
    if args.overfit_batch:
        args.lr_schedule, args.dropout = "constant", 0.0
    return args


if __name__ == "__main__":
    exits.run(main)
