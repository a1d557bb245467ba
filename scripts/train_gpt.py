"""A byte-level GPT: the language template.

Shows a transformer small enough to read, two update rules in one optimizer, text in memory or
streamed, and a model sharded over GPUs (FSDP2), all with the loop of train_cifar.py. Tokens are
bytes, so there is no tokenizer, and losses are comparable across models.

    accelerate launch --config_file accelerate_configs/cpu.yaml scripts/train_gpt.py \\
        --dataset input.txt --n_layer 4 --n_head 4 --n_embd 128 --block_size 64 --batch_size 12 \\
        --max_train_steps 2000
    accelerate launch --config_file accelerate_configs/4gpu.yaml scripts/train_gpt.py --dropout 0.2
    accelerate launch --config_file accelerate_configs/4gpu_fsdp.yaml scripts/train_gpt.py \\
        --dataset HuggingFaceFW/fineweb-edu --streaming --max_train_steps 5000 --n_layer 24 \\
        --n_head 16 --n_embd 2048 --block_size 2048 --activation_checkpointing
    python scripts/train_gpt.py --sample runs/train_gpt --prompt "ROMEO:" --top_k 40

Measured on 2026-11-25 with the first command (and --eval_every 2000) on tinyshakespeare, 2 cores of
an Intel Xeon: validation loss 1.516 nats per byte; 1.740 after 400 steps. nanoGPT reaches 1.880
after 2,000 steps.
"""

import contextlib
import math
import sys
from pathlib import Path

# Finds `utils` next to this script (a copy) or one folder up (the repository).
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
from utils.run import process

if __name__ == "__main__":
    process.handle_signals()  # before torch: a signal during the slow imports must not be lost

import torch
import torch.nn.functional as F
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import set_seed
from torch import nn
from torch.utils.checkpoint import checkpoint as recompute
from torch.utils.data import DataLoader

from utils import plots
from utils.data.lanes import gather_position
from utils.data.loaders import evaluation_batch_size, loader_options
from utils.data.report import agree
from utils.data.text import Windows, load_text
from utils.data.text_stream import TextStream, describe_stream, load_held_out
from utils.muon import MuonAdamW
from utils.run import ddp, fsdp, launch, weights
from utils.run.arguments import Parser, number
from utils.run.collectives import local_main_first, run_on_main
from utils.run.failures import UserError, optional
from utils.run.files import write_text
from utils.run.folder import RunFolder
from utils.run.guard import Guard
from utils.run.metrics import start_profiler
from utils.run.plan import Plan
from utils.run.record import peak_flops
from utils.run.seeds import seed_step

RECIPES = {"muon": dict(lr=0.02, weight_decay=0.1), "adamw": dict(lr=0.01, weight_decay=0.1)}


# ------------------------------------------------------------------------------------------- model


def norm(x):
    """Layer norm over the last dimension, without scale and bias."""
    return F.layer_norm(x, (x.size(-1),))


def token_shift(x, weights):
    """Adds the channels of earlier positions, each with a weight of its own (arXiv:2305.13048).

    Args:
        x: [batch, time, width].
        weights (list): tensors [width]: the first is for the previous position, and so on.
    """
    shifted = x
    for back, weight in enumerate(weights, 1):
        shifted = shifted + weight * F.pad(x, (0, 0, back, 0))[:, : x.size(1)]
    return shifted


def rotations(length, size, device):
    """Rotary position embedding (J. Su, arXiv:2104.09864).

    Returns:
        tuple: cos and sin of the angles, float32 [time, size] each.
    """
    frequency = 10_000.0 ** (-torch.arange(0, size, 2, device=device) / size)
    angle = torch.outer(torch.arange(length, device=device), frequency)
    return torch.cat([angle.cos(), angle.cos()], 1), torch.cat([-angle.sin(), angle.sin()], 1)


class Block(nn.Module):
    """Causal attention, then an MLP with squared ReLU (arXiv:2109.08668), both residual.

    [batch, time, width] -> [batch, time, width].
    """

    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        # Separate matrices, because Muon orthogonalizes each of them.
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out_proj = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        # Two for the attention, two for the MLP.
        self.shifts = nn.ParameterList(torch.zeros(width) for _ in range(4))

    def forward(self, x, cos, sin):
        dropout = self.dropout * self.training
        y = self.attention(token_shift(norm(x), self.shifts[:2]), cos, sin, dropout)
        x = x + F.dropout(self.out_proj(y), dropout)
        y = self.up(token_shift(norm(x), self.shifts[2:]))
        return x + F.dropout(self.down(F.relu(y).square()), dropout)

    def attention(self, x, cos, sin, dropout):
        batch, length, width = x.shape
        # Normalized queries and keys keep the attention logits bounded at any learning rate
        # (arXiv:2302.05442); 1.5 allows sharper attention. Both are rotated by an angle that grows
        # with the position, so that their product depends on the distance between positions.
        both = torch.stack([self.query(x), self.key(x)])
        both = norm(both.view(2, batch, length, self.heads, -1).transpose(2, 3))
        value = self.value(x).view(batch, length, self.heads, -1).transpose(1, 2)
        # The angles are float32 in any precision; attention needs a single dtype. On CPUs its bf16
        # backward pass is slow.
        both = both * cos + both.roll(both.size(-1) // 2, -1) * sin
        query, key = both.to(torch.float32 if x.is_cpu else value.dtype)
        options = dict(is_causal=True, scale=1.5 * key.size(-1) ** -0.5, dropout_p=dropout)
        with torch.autocast("cpu", enabled=False):
            y = F.scaled_dot_product_attention(query, key, value.to(key.dtype), **options)
        return y.to(value.dtype).transpose(1, 2).reshape(batch, length, width)


class GPT(nn.Module):  # EDIT: model
    """Maps bytes to the logits of each next byte.

    int64 [batch, time <= block_size] -> float [batch, time, 256].
    """

    _no_split_modules = ("Block",)  # what FSDP gathers at a time

    def __init__(
        self, n_layer, n_head, n_embd, block_size, dropout=0.0, activation_checkpointing=False
    ):
        super().__init__()
        self.block_size, self.activation_checkpointing = block_size, activation_checkpointing
        self.embed = nn.Embedding(256, n_embd)
        self.blocks = nn.ModuleList(Block(n_embd, n_head, dropout) for _ in range(n_layer))
        # From the embedding to each block.
        self.skips = nn.ParameterList(torch.zeros(n_embd) for _ in range(n_layer))
        self.head = nn.Linear(n_embd, 256, bias=False)
        for name, weight in self.named_parameters():
            if name.endswith(("out_proj.weight", "down.weight", "head.weight")):
                # Every block starts as the identity, and predictions start uniform.
                nn.init.zeros_(weight)
            elif weight.ndim == 2:
                nn.init.normal_(weight, std=1.0 if name == "embed.weight" else n_embd**-0.5)

    def forward(self, x):
        head_size = self.embed.embedding_dim // self.blocks[0].heads
        cos, sin = rotations(x.size(1), head_size, x.device)
        x = first = norm(self.embed(x))
        for block, skip in zip(self.blocks, self.skips, strict=True):
            x = x + skip * first
            if self.activation_checkpointing and self.training:
                # Keeps only the input of the block and recomputes the rest in the backward pass: a
                # third more computation.
                x = recompute(block, x, cos, sin, use_reentrant=False)
            else:
                x = block(x, cos, sin)
        return self.head(norm(x))

    def flops_per_token(self):
        """FLOPs of the forward and backward pass per token: 6 N + 12 L H Q T.

        From PaLM (arXiv:2204.02311, appendix B). N: weights of matrices without the embedding,
        which is looked up and not multiplied. The formula counts the full attention matrix,
        although causal attention needs half of it, and does not count recomputed activations.
        """
        matrices = sum(weight.numel() for weight in self.parameters() if weight.ndim == 2)
        multiplied = matrices - self.embed.weight.numel()
        return 6 * multiplied + 12 * len(self.blocks) * self.embed.embedding_dim * self.block_size


def build_optimizer(model, args):
    """Muon (or AdamW) for the matrices of the blocks; AdamW for all other parameters.

    The other parameters have no weight decay.
    """
    matrices = [weight for weight in model.blocks.parameters() if weight.ndim == 2]
    vectors = [weight for weight in model.parameters() if weight.ndim == 1]
    muon = dict(muon=args.optimizer == "muon", momentum=(0.85, 0.95, 300), iterations=3, beta2=0.95)
    groups = [
        dict(params=matrices, lr=args.lr, weight_decay=args.weight_decay, **muon),
        dict(params=[model.embed.weight, *vectors], lr=args.lr, muon=False),
        dict(params=[model.head.weight], lr=args.lr / 5, muon=False),
    ]
    return MuonAdamW(groups, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0)


def lr_multiplier(step, plan, args):
    """The learning-rate multiplier at `step`.

    Linear warm-up (at most a tenth of all steps), then linear or cosine decay, or constant.
    """
    progress, warmup = step / plan.total_steps, min(args.warmup_steps, plan.total_steps // 10)
    cosine = 0.5 + 0.5 * math.cos(math.pi * progress)
    decay = {"linear": 1 - progress, "cosine": cosine, "constant": 1.0}[args.lr_schedule]
    return min(1.0, (step + 1) / (warmup + 1)) * decay


# --------------------------------------------------------------------- data, evaluation, sampling


def load_data(accelerator, args):  # EDIT: data
    """Loads the text.

    Returns:
        tuple: the training set, `Windows`, or None for a stream, which is opened later; the
        held-out bytes, uint8.
    """
    source = (args.dataset, args.text_column, args.block_size)
    if args.streaming:
        train_set, held_out = None, run_on_main(accelerator, lambda: load_held_out(*source))
        data = run_on_main(accelerator, lambda: describe_stream(args.dataset, held_out))
    else:
        data = local_main_first(accelerator, lambda: load_text(*source, args.seed))
        text, held_out = data.train, data.held_out
        if args.overfit_batch:
            text = held_out = text[: args.batch_size * args.block_size + 1]
        # An epoch reads each byte once. All windows have the same length, so micro-batches and
        # processes have equal weight.
        train_set = Windows(text, args.block_size, None if args.overfit_batch else args.seed)
    args.data = agree(accelerator, args.dataset, data)  # a run continues with the same text only
    if args.dry_run:
        held_out = held_out[: 20 * args.block_size]
    return train_set, held_out


def build_loaders(accelerator, train_set, held_out, args):
    """Builds loaders of global batches; `prepare` splits each over the processes.

    A stream yields only the share of this process, so it needs no `prepare`.
    """
    options = loader_options(accelerator)
    eval_set = Windows(held_out, args.block_size)
    windows = max(1, 16_384 // args.block_size)
    eval_batch_size = evaluation_batch_size(accelerator, len(eval_set), windows)
    eval_loader = accelerator.prepare(DataLoader(eval_set, eval_batch_size, **options))
    if args.streaming:
        # At most one worker, which prefetches. The position saved with a checkpoint does not
        # include prefetched batches.
        options = loader_options(accelerator, min(1, args.num_workers), args.timeout)
        return DataLoader(train_set, batch_size=None, **options), eval_loader
    options = loader_options(accelerator, args.num_workers, args.timeout)
    batch_size = args.batch_size // args.gradient_accumulation_steps
    train_loader = DataLoader(train_set, batch_size, shuffle=True, drop_last=True, **options)
    return accelerator.prepare(train_loader), eval_loader


def epoch_batches(loader, epoch, skip):
    """The batches of `epoch` after the first `skip`.

    A stream has no epochs: it continues at its own position.
    """
    if isinstance(loader.dataset, TextStream):
        return loader
    loader.dataset.set_offset(epoch)
    loader.set_epoch(epoch)
    return skip_first_batches(loader, skip) if skip else loader


def compute_loss(model, batch, device):  # EDIT: loss
    """The mean loss in nats per byte of a batch of windows; targets of -100 do not count."""
    inputs = batch["inputs"].to(device, non_blocking=True)
    targets = batch["targets"].to(device, non_blocking=True)
    return F.cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten())


@torch.no_grad()
def evaluate(accelerator, model, loader, watch):  # EDIT: metric
    """Computes exact metrics: each held-out byte counts once, on any number of processes.

    The windows do not overlap, so the first prediction in each window has a context of one byte.

    Returns:
        dict: `loss` in nats per byte, `bits_per_byte`.
    """
    model.eval()
    total, count = 0.0, 0
    for batch in watch(loader):
        logits = model(batch["inputs"]).flatten(0, 1).float()
        losses = F.cross_entropy(logits, batch["targets"].flatten(), reduction="none")
        # Gather per window: this drops the windows that were repeated to fill up the last batch,
        # and counts the bytes of a short one.
        losses = losses.view_as(batch["targets"]).sum(1)
        counts = (batch["targets"] >= 0).sum(1)
        losses, counts = accelerator.gather_for_metrics((losses, counts))
        total += losses.double().sum().item()
        count += counts.sum().item()
    model.train()
    if count != len(loader.dataset.text) - 1:
        raise RuntimeError(f"evaluated {count} of {len(loader.dataset.text) - 1} held-out bytes")
    return {"loss": total / count, "bits_per_byte": total / count / math.log(2)}


@torch.compiler.set_stance("force_eager")  # because each text length would be compiled separately
@torch.no_grad()
def generate(model, args, prompt="\n", temperature=0.8, top_k=None):
    """Continues `prompt` by `--sample_length` bytes, each sampled from the `top_k` most likely.

    Under FSDP every process must call this function, because a forward pass needs all shards. All
    processes sample the same bytes.

    Args:
        temperature (float): 0: always choose the most likely byte.
        top_k (int | None): None: sample from all bytes.

    Returns:
        str: the prompt and its continuation; bytes that are not UTF-8 are replaced.
    """
    was_training = model.training
    model.eval()
    # Its own generator: sampling must not change training's random numbers.
    generator = torch.Generator().manual_seed(args.seed)
    device = next(model.parameters()).device
    text = torch.tensor([list(prompt.encode())], device=device)
    for _ in range(args.sample_length):
        logits = model(text[:, -args.block_size :])[0, -1].float().cpu()
        top = logits.topk(min(top_k or 256, 256))
        probabilities = (top.values / max(temperature, 1e-6)).softmax(0)
        choice = top.indices[torch.multinomial(probabilities, 1, generator=generator)]
        text = torch.cat([text, choice.view(1, 1).to(device)], 1)
    model.train(was_training)
    return bytes(text[0].tolist()).decode(errors="replace")


def sample(args):
    """For --sample: prints text generated by a run, one of its checkpoints or a weights file."""
    saved = weights.read(args.sample)
    try:
        model = GPT(**{name: saved.config[name] for name in SIZES})
        model.load_state_dict(weights.fitted(saved.state, model))
    except (KeyError, TypeError, RuntimeError):
        raise UserError(f"{saved.file} does not hold a model of this script") from None
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    args.block_size = model.block_size
    print(generate(model, args, args.prompt, args.temperature, args.top_k))


# --------------------------------------------------------------------------------------------- main

SIZES = ("n_layer", "n_head", "n_embd", "block_size")
MAY_CHANGE = (
    "activation_checkpointing",
    "peak_tflops",
    "sample_length",
    "sample_sharded",
    "prompt",
    "temperature",
    "top_k",
)
USAGE = """Next to `{module}.py` and `utils/`: `python {module}.py --sample . --prompt "The "`, or

```python
from safetensors.torch import load_file
from {module} import GPT

model = GPT({sizes}).eval()
model.load_state_dict(load_file("model.safetensors"))
```"""


def describe_model(sizes):
    """What the model card says about a model, for `run.close`."""
    sizes = ", ".join(f"{name}={value}" for name, value in sizes.items())
    usage = USAGE.format(sizes=sizes, module=Path(sys.argv[0]).stem)
    return {"title": "A byte-level GPT", "task": "text-generation", "usage": usage}


def set_precision(accelerator):
    """Makes attention deterministic on GPUs, and keeps FSDP's gradient reduction in float32."""
    if torch.are_deterministic_algorithms_enabled():  # on GPUs, by `launch.check`
        # The backward pass of attention is deterministic only without `warn_only`. This is somewhat
        # slower.
        torch.use_deterministic_algorithms(True)
    fsdp.reduce_in_float32(accelerator)


def build_model(accelerator, sizes, args):
    """Builds the model with random weights; under FSDP only the main process holds them.

    `prepare` sends the shards to the others. Until then, the others hold empty tensors, because
    Accelerate identifies tensors by their addresses. These use no physical memory, because they
    are never written to.
    """
    empty = accelerator.is_fsdp2 and not accelerator.is_main_process
    options = dict(dropout=args.dropout, activation_checkpointing=args.activation_checkpointing)
    with torch.device("meta") if empty else contextlib.nullcontext():
        model = GPT(**sizes, **options)
    fsdp.use_model_blocks(accelerator, model)
    return model.to_empty(device="cpu") if empty else model


def main():
    args = parse_args()
    if args.sample:
        return sample(args)
    on_cpu = launch.check(args, shards=True)
    accelerator = Accelerator(cpu=on_cpu, **launch.accelerator_options(args))
    launch.print_banner(accelerator, args.batch_size, args.gradient_accumulation_steps)
    set_precision(accelerator)
    train_set, held_out = load_data(accelerator, args)
    plan = Plan.from_args(args, None if args.streaming else len(train_set))
    run = RunFolder(args, accelerator, MAY_CHANGE)
    run.open(plan)  # the folder is empty, or has a run to continue, or a finished run
    if run.finished:
        return
    if args.streaming:
        position = run.progress.get("position")
        train_set = local_main_first(
            accelerator, lambda: TextStream.from_args(args, accelerator, position)
        )

    set_seed(args.seed)
    sizes = {name: getattr(args, name) for name in SIZES}
    model = build_model(accelerator, sizes, args)
    weights.initialize(accelerator, model, run.init_from)
    parameters = sum(weight.numel() for weight in model.parameters())
    flops = model.flops_per_token()
    if args.compile:
        for block in model.blocks:  # all alike, so compiled once; FSDP's hooks run between them
            block.compile()
    optimizer = build_optimizer(model, args)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: lr_multiplier(step, plan, args)
    )
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    train_loader, eval_loader = build_loaders(accelerator, train_set, held_out, args)
    first = eval_loader.dataset.__getitems__([0])
    first = {name: value[:, :8] for name, value in first.items() if name != "ids"}
    ddp.warm_up(model, lambda: compute_loss(model, first, accelerator.device))
    rates, peak = {"tokens_per_second": args.block_size}, peak_flops(accelerator, args.peak_tflops)
    if peak:
        rates["mfu"] = args.block_size * flops / peak
    step = run.start(scheduler, rates)  # accelerator.load_state, if there is a checkpoint
    run.print(f"{parameters:,} parameters, {flops / 1e6:.1f} MFLOP per byte of training")
    guard = Guard(accelerator, args.timeout)

    def validate(step):
        metrics = evaluate(accelerator, model, eval_loader, guard.watch)
        run.log("val", step, score=-metrics["loss"], **metrics)
        if not accelerator.is_fsdp2 or args.sample_sharded:
            run.log("sample", step, text=generate(model, args))
        return metrics

    train_loss = math.inf
    metrics = validate(step) if run.evaluation_due else None  # due: a signal came first
    profile = start_profiler(accelerator, run.path, args.profile)
    for epoch, remaining in plan.epochs(start=step):
        batches = epoch_batches(train_loader, epoch, remaining.skip)
        for step, micro_batches in remaining.accumulated(run.timed(batches)):
            losses, ids, norm = [], [], None
            for batch in micro_batches:
                # So that a restart draws the same dropout masks. Seed after loading the batch,
                # because loading may also draw random numbers.
                seed_step(accelerator, args.seed, step, len(losses))
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
            profile.step()
            stop = guard.should_stop(step, losses, ids, norm)  # the same on every process
            if plan.log_due(step):
                mean_loss = torch.stack(losses).mean()
                train_loss = accelerator.reduce(mean_loss, "mean").item()  # once, not per rank
                lr = scheduler.get_last_lr()[0]
                run.log("train", step, loss=train_loss, grad_norm=norm, lr=lr)
            if plan.evaluation_due(step) and not stop:
                try:
                    metrics = validate(step)
                except process.Interrupted:  # by a signal: the restart evaluates
                    stop = True
            if stop or plan.save_due(step, improved=run.improved_at(step)):
                guard.check(model)  # a checkpoint never holds a diverged model
                position = gather_position(batch)
                with run.checkpoint(step, config=sizes, position=position) as folder:
                    accelerator.save_state(folder)
            if stop:
                run.exit_preempted(step)
        if args.overfit_batch and train_loss < 0.01:
            break
    profile.stop()

    if metrics is None or step < plan.total_steps:  # nothing was left to do, or --overfit_batch
        metrics = evaluate(accelerator, model, eval_loader, guard.watch)
    text = generate(model, args)
    state = accelerator.get_state_dict(model)  # under FSDP gathered from all processes
    if accelerator.is_main_process:
        unwrapped = GPT(**sizes)
        unwrapped.load_state_dict(state)
        weights.export(run.path, unwrapped, sizes)
    results = {f"val_{name}": value for name, value in metrics.items()}
    results |= {"parameters": parameters, "flops_per_token": flops}
    results["tokens_seen"] = step * args.batch_size * args.block_size
    run.finish(step, **results)
    if accelerator.is_main_process:
        with optional("sample.txt"):
            write_text(run.path / "sample.txt", text)
        labels = {"loss": "loss (nats per byte)", "bits_per_byte": "bits per byte"}
        plots.curves(run.path, labels)
        print(text)
    next_command = f'python scripts/train_gpt.py --sample {run.path} --prompt "The "'
    run.close(next_command, card=describe_model(sizes))
    accelerator.end_training()


def parse_args():
    parser = Parser(description=__doc__.split("\n")[0])
    group = parser.add_argument_group("model")
    # Llama 3.1 405B: 126 blocks of width 16,384 with 128 heads, and a context of 2**17.
    layers, width = number(int, 1, most=1000), number(int, 2, most=2**14)
    heads, window = number(int, 1, most=2**13), number(int, 1, most=2**20)
    group.add_argument("--n_layer", type=layers, default=6, help="number of blocks")
    group.add_argument("--n_head", type=heads, default=6, help="attention heads per block")
    group.add_argument("--n_embd", type=width, default=384, help="width of the embedding")
    group.add_argument("--block_size", type=window, default=256, help="bytes of context")
    group.add_argument(
        "--dropout", type=number(float, 0, below=1), default=0.0, help="dropout probability"
    )
    group.add_argument(
        "--activation_checkpointing",
        action="store_true",
        help="less memory, a third more computation",
    )
    group.add_argument("--compile", action="store_true", help="torch.compile the model")
    group = parser.add_argument_group("training (a sample is a window of block_size bytes)")
    group.add_argument(
        "--optimizer", choices=RECIPES, default="muon", help="for the weight matrices of the blocks"
    )
    parser.add_training_arguments(group)
    parser.add_optimizer_arguments(group)
    group.add_argument(
        "--lr_schedule",
        choices=["linear", "cosine", "constant"],
        default="linear",
        help="after warm-up",
    )
    group.add_argument(
        "--warmup_steps",
        type=number(int, 0),
        default=50,
        help="steps of warm-up, at most a tenth of all",
    )
    group.add_argument(
        "--peak_tflops",
        type=number(float, 0, above=True, most=100_000),  # a hundred times that of an H100
        help="peak of one GPU, for MFU; known for some GPUs",
    )
    parser.add_run_arguments()
    parser.add_data_arguments(
        "karpathy/tiny_shakespeare", "Hub id, local text file or folder, or `synthetic`"
    )
    group = parser.add_argument_group("text")
    group.add_argument(
        "--text_column", default="text", help="column with the text, for a Hub id, JSONL or Parquet"
    )
    group.add_argument(
        "--streaming",
        action="store_true",
        help="read the text during training; needs --max_train_steps",
    )
    group.add_argument(
        "--stream_lanes",
        type=number(int, 1, most=100_000),  # more than there are processes
        default=8,
        help="parts of the stream read in parallel; a multiple of the number of processes",
    )
    group.add_argument(
        "--shuffle_buffer",
        type=number(int, 1, most=10**7),  # more than fits into memory
        default=1000,
        help="windows in the shuffle buffer of each part of the stream",
    )
    group = parser.add_argument_group("samples")
    group.add_argument(
        "--sample", metavar="PATH", help="do not train: generate text with the weights of a run"
    )
    group.add_argument("--prompt", type=str, default="\n", help="text to continue")
    length = number(int, 1, most=10**6)  # each byte takes a forward pass
    group.add_argument("--sample_length", type=length, default=300, help="bytes to sample")
    group.add_argument(
        "--sample_sharded",
        action="store_true",
        help="sample at evaluations with FSDP too, which is slow",
    )
    group.add_argument(
        "--temperature",
        type=number(float, 0, most=1000),  # far below that, all bytes are equally likely
        default=0.8,
        help="of sampling; 0: always the most likely byte",
    )
    group.add_argument(
        "--top_k",
        type=number(int, 1, most=256),
        help="sample from this many bytes; default: from all 256",
    )
    # In steps: an epoch of a small text takes seconds, and the length of a stream's epoch is
    # unknown.
    parser.set_defaults(
        epochs=10, batch_size=64, max_grad_norm=1.0, eval_every=250, checkpoint_every=250
    )
    parser.set_defaults(**RECIPES.get(parser.choice("optimizer"), {}))
    args = parser.parse_training_args()
    if args.n_embd % args.n_head or args.n_embd // args.n_head % 2:
        raise UserError(
            f"--n_embd {args.n_embd} must be an even number times --n_head {args.n_head}"
        )
    if not args.prompt:
        raise UserError("--prompt is empty: give at least one character")
    if args.streaming and (args.overfit_batch or not args.max_train_steps):
        raise UserError(
            "--streaming needs --max_train_steps, and cannot be combined with --overfit_batch"
        )
    if args.overfit_batch:
        args.lr_schedule, args.dropout = "constant", 0.0
    return args


if __name__ == "__main__":
    process.run(main)
