"""A byte-level GPT: the language template.

Shows a transformer small enough to read, two update rules in one optimizer, text mapped into
memory, and a model sharded over GPUs (FSDP2), all with the loop of train_cifar.py. Tokens are
bytes, so there is no tokenizer, and losses are comparable across models.

    accelerate launch --config_file accelerate_configs/cpu.yaml scripts/train_gpt.py \\
        --dataset input.txt --n_layer 4 --n_head 4 --n_embd 128 --block_size 64 --batch_size 12 \\
        --max_train_steps 2000
    accelerate launch --config_file accelerate_configs/4gpu.yaml scripts/train_gpt.py --dropout 0.2
    accelerate launch --config_file accelerate_configs/4gpu_fsdp.yaml scripts/train_gpt.py \\
        --dataset books/ --max_train_steps 5000 --n_layer 24 --n_head 16 --n_embd 2048 \\
        --block_size 2048 --activation_checkpointing
    python scripts/train_gpt.py --sample runs/train_gpt --prompt "ROMEO:"

Measured on 2026-11-30 with the first command (and --eval_every 2000) on tinyshakespeare, 2
cores of an AMD EPYC: validation loss 1.514 nats per byte, in 100 s. nanoGPT reaches 1.880 after as
many steps.
"""

import contextlib
import math
import os
import sys
from pathlib import Path
from types import MethodType

# Finds `utils` next to this script (a copy) or one folder up (the repository).
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
from utils.run import process

if __name__ == "__main__":
    process.handle_signals()  # before torch: a signal during the slow imports must not be lost

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.checkpoint import checkpoint as recompute
from torch.utils.data import DataLoader

from utils import flags, schedule, weight_files
from utils.compilation import compile_model, make_attention_deterministic
from utils.data import evaluation
from utils.data.loaders import EpochSampler, explain, loader_options
from utils.data.sharing import agree, evaluation_batch_size, local_main_first
from utils.language.text import Windows, load_text
from utils.muon import MuonAdamW
from utils.report import model_card, plots
from utils.report.mfu import peak_flops
from utils.report.tracking import Trackers, start_profiler
from utils.run import ddp, entry, files, launch
from utils.run.arguments import Parser, frozen, number
from utils.run.collectives import run_on_main
from utils.run.ddp import seed_step
from utils.run.failures import UserError
from utils.run.files import write_text
from utils.run.folder import RunFolder
from utils.run.guard import Guard
from utils.run.plan import Plan
from utils.scale import elastic, fsdp
from utils.scale.saving import BackgroundWriter
from utils.scale.watchdog import Watchdog

RECIPES = {"muon": dict(lr=0.02, weight_decay=0.1), "adamw": dict(lr=0.01, weight_decay=0.1)}


# ------------------------------------------------------------------------------------------- model


def norm(x):
    """Layer norm over the last dimension, without scale and bias."""
    with torch.autocast(x.device.type, enabled=False):  # on GPUs it would return float32
        return F.layer_norm(x, (x.size(-1),))


def cast(x):
    """`x` in the dtype in which autocast multiplies matrices.

    A GPU takes most of its time to read and write activations. So cast them before they are
    normalized and shifted, and once for all layers that read them.
    """
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def token_shift(x, weights):
    """Adds the channels of earlier positions, each with a weight of its own (arXiv:2305.13048).

    Args:
        x: [batch, time, width].
        weights (list): tensors [width]: the first is for the previous position, and so on.
    """
    length, count = x.size(1), len(weights)
    padded = F.pad(x, (0, 0, count, 0))
    for back, weight in enumerate(weights, 1):
        x = x + weight.to(x.dtype) * padded[:, count - back : count - back + length]
    return x


def rotations(length, size, device):
    """Rotary position embedding (J. Su, arXiv:2104.09864).

    Returns:
        tuple: cos and sin of the angles, float32 [length, 1, 1, size] each.
    """
    frequency = 10_000.0 ** (-torch.arange(0, size, 2, device=device) / size)
    angle = torch.outer(torch.arange(length, device=device), frequency)
    cos, sin = angle.cos()[:, None, None], angle.sin()[:, None, None]
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


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

    def forward(self, x, first, skip, cos, sin):
        dropout = self.dropout * self.training
        x = x + skip * first
        y = self.attention(token_shift(norm(cast(x)), self.shifts[:2]), cos, sin, dropout)
        x = x + F.dropout(self.out_proj(y), dropout)
        y = F.relu(self.up(token_shift(norm(cast(x)), self.shifts[2:])))
        # Not `y.square()`, which autocast computes in float32 on GPUs.
        return x + F.dropout(self.down(y * y), dropout)

    def attention(self, x, cos, sin, dropout):
        batch, length, width = x.shape
        # Normalized queries and keys keep the attention logits bounded at any learning rate
        # (arXiv:2302.05442); 1.5 allows sharper attention. Both are rotated by an angle that grows
        # with the position, so that their product depends on the distance between positions.
        both = F.linear(x, torch.cat([self.query.weight, self.key.weight]))
        both = norm(both.view(batch, length, 2, self.heads, -1))
        cos, sin = cos.to(both.dtype), sin.to(both.dtype)
        both = torch.addcmul(both * cos, both.roll(both.size(-1) // 2, -1), sin)
        value = self.value(x).view(batch, length, self.heads, -1)
        # On CPUs the backward pass of attention is slow in bf16.
        query, key = both.to(torch.float32 if x.is_cpu else value.dtype).unbind(2)
        heads_first = (part.transpose(1, 2) for part in (query, key, value.to(key.dtype)))
        options = dict(is_causal=True, scale=1.5 * key.size(-1) ** -0.5, dropout_p=dropout)
        with torch.autocast("cpu", enabled=False):
            y = F.scaled_dot_product_attention(*heads_first, **options)
        return y.to(both.dtype).transpose(1, 2).reshape(batch, length, width)


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

    def forward(self, x, targets=None):
        """With `targets`, int64 [batch, time], returns their losses, float32 [batch, time].

        The loss is in nats per byte, and 0 for a target of -100.
        """
        head_size = self.embed.embedding_dim // self.blocks[0].heads
        cos, sin = rotations(x.size(1), head_size, x.device)
        first = norm(self.embed(x))
        x = first.view_as(first)  # if it were the same tensor, the first block would compile anew
        for block, skip in zip(self.blocks, self.skips, strict=True):
            if self.activation_checkpointing and self.training:
                # Keeps only the input of the block and recomputes the rest in the backward pass: a
                # third more computation.
                x = recompute(block, x, first, skip, cos, sin, use_reentrant=False)
            else:
                x = block(x, first, skip, cos, sin)
        return self.logits(x) if targets is None else self.losses(x, targets)

    def logits(self, x):
        return self.head(norm(cast(x)))

    def losses(self, x, targets):
        # Here and not behind the model, because Accelerate makes a float32 copy of what a model
        # returns. Compiled, this makes none.
        logits = self.logits(x).flatten(0, 1).float()
        return F.cross_entropy(logits, targets.flatten(), reduction="none").view_as(targets)

    def compile(self, **options):
        """Compiles the blocks, between which hooks of FSDP run, and the loss."""
        for block in self.blocks:
            block.compile(**options)
        # A method, so that a copy of the model computes with its own weights.
        self.losses = MethodType(torch.compile(GPT.losses, **options), self)

    def count(self):
        """The number of parameters."""
        return sum(weight.numel() for weight in self.parameters())

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
    """The learning-rate multiplier at `step`; the warm-up takes at most a tenth of all steps."""
    warmup = min(args.warmup_steps, plan.total_steps // 10)
    return schedule.multiplier(args.lr_schedule, step, plan.total_steps, warmup)


def build_scheduler(optimizer, plan, args):
    """Multiplies each learning rate by `lr_multiplier` after each step."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: lr_multiplier(step, plan, args)
    )


# --------------------------------------------------------------------- data, evaluation, sampling


def load_data(accelerator, args):  # EDIT: data
    """Loads the text.

    Returns:
        tuple: the `Windows` to train on; those held out; a description, with a checksum: a run
        continues with the same text.
    """
    data = read_text(accelerator, args)
    text, held_out = data.train, data.held_out
    if args.overfit_batch:
        text = held_out = text[: args.batch_size * args.block_size + 1]
    # An epoch reads each byte once. All windows have the same length, so micro-batches and
    # processes have equal weight.
    train_set = Windows(text, args.block_size, None if args.overfit_batch else args.seed)
    description = agree(accelerator, args.dataset, data)
    if args.dry_run:
        held_out = held_out[: 20 * args.block_size]
    return train_set, Windows(held_out, args.block_size), description


def read_text(accelerator, args):
    """Reads the `Text` to train on, and what is held out."""
    source = args.dataset, args.text_column, args.block_size, args.seed
    return local_main_first(accelerator, lambda: load_text(*source))


def build_loaders(accelerator, train_set, eval_set, args):
    """Builds loaders of global batches, which `prepare` divides over the processes."""
    eval_loader = build_eval_loader(accelerator, eval_set, args.block_size)
    options = loader_options(accelerator, args.num_workers, args.timeout)
    batch_size = args.batch_size // args.gradient_accumulation_steps
    order = EpochSampler(
        len(train_set), args.batch_size, args.seed, with_epoch=not args.overfit_batch
    )
    train_loader = DataLoader(train_set, batch_size, sampler=order, drop_last=True, **options)
    return accelerator.prepare(train_loader), eval_loader


def build_eval_loader(accelerator, windows, block_size):
    """Builds the loader of held-out `Windows`, in their order."""
    batch_size = evaluation_batch_size(accelerator, len(windows), max(1, 16_384 // block_size))
    return accelerator.prepare(DataLoader(windows, batch_size, **loader_options(accelerator)))


def compute_loss(model, batch, device):  # EDIT: loss
    """The mean loss in nats per byte of a batch of full windows."""
    inputs = batch["inputs"].to(device, non_blocking=True)
    targets = batch["targets"].to(device, non_blocking=True)
    return model(inputs, targets).mean()


@torch.no_grad()
def evaluate(accelerator, model, loader, watch):  # EDIT: metric
    """Computes exact metrics: each held-out byte counts once, on any number of processes.

    Returns:
        dict: `loss` in nats per byte, with its standard error; `bits_per_byte`; number of `bytes`.
    """
    model.eval()
    sums = seen = 0
    for batch in watch(loader):
        # The windows do not overlap: the first prediction in each has a context of one byte.
        losses = model(batch["inputs"], batch["targets"]).sum(1)
        counts = (batch["targets"] >= 0).sum(1)  # a window may be short
        # This drops the windows that were repeated to fill up the last batch.
        losses, counts = accelerator.gather_for_metrics((losses, counts))
        sums, seen = sums + evaluation.moments(losses, counts), seen + len(counts)
    model.train()
    loss, error, count = evaluation.mean_and_error(sums)
    if seen != len(loader.dataset):
        raise RuntimeError(f"evaluated {seen} of {len(loader.dataset)} held-out windows")
    metrics = evaluation.with_error("loss", loss, error)
    return {**metrics, "bits_per_byte": loss / math.log(2), "bytes": count}


@torch.compiler.set_stance("force_eager")  # because each text length would be compiled separately
@torch.no_grad()
def generate(model, prompt, length, temperature, seed):
    """Continues `prompt` by `length` sampled bytes; `temperature` 0: always the most likely ones.

    The context of each byte are the last `block_size` ones, and it is computed anew. Under FSDP
    every process must call this function, because a forward pass needs all shards. All processes
    sample the same bytes.

    Returns:
        str: the prompt and its continuation; bytes that are not UTF-8 are replaced.
    """
    was_training, device = model.training, next(model.parameters()).device
    block_size = getattr(model, "module", model).block_size
    model.eval()
    # Its own generator: sampling must not change training's random numbers.
    generator = torch.Generator(device).manual_seed(seed)
    # As typed: bytes that are not UTF-8, too.
    text = torch.tensor([list(os.fsencode(prompt))], device=device)
    # Autocast casts the weights once for all of it, not for each byte.
    with torch.autocast(device.type, enabled=False):
        for _ in range(length):
            logits = model(text[:, -block_size:])[0, -1].float()
            probabilities = (logits / max(temperature, 1e-6)).softmax(0)
            # This is what `torch.multinomial` computes. But it waits for the device.
            noise = torch.empty_like(probabilities).exponential_(generator=generator)
            text = torch.cat([text, (probabilities / noise).argmax().view(1, 1)], 1)
    model.train(was_training)
    return bytes(text[0].tolist()).decode(errors="replace")


def load_model(saved):
    """The model whose weights `weight_files.read` returned."""
    try:
        model = GPT(**{name: saved.config[name] for name in SIZES})
        model.load_state_dict(weight_files.fitted(saved.state, model))
    except (KeyError, TypeError, RuntimeError):
        raise UserError(f"{saved.file} does not hold a model of train_gpt.py") from None
    return model


def sample(args):
    """For --sample: prints text generated by a run, one of its checkpoints or a weights file."""
    model = load_model(weight_files.read(args.sample))
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    text = generate(model, args.prompt, args.sample_length, args.temperature, args.seed)
    if process.is_main():
        print(text)


# --------------------------------------------------------------------------------------------- main

SIZES = ("n_layer", "n_head", "n_embd", "block_size")
MAY_CHANGE = flags.MAY_CHANGE | {
    "activation_checkpointing",
    "sample_length",
    "prompt",
    "temperature",
}
USAGE = """Next to `{module}.py` and `utils/`: `python {module}.py --sample . --prompt "The "`, or

```python
from safetensors.torch import load_file
from {module} import GPT

model = GPT({sizes}).eval()
model.load_state_dict(load_file("model.safetensors"))
```"""


def describe_model(sizes):
    """What the model card says about a model, for `model_card.write`."""
    sizes = ", ".join(f"{name}={value}" for name, value in sizes.items())
    usage = USAGE.format(sizes=sizes, module=Path(sys.argv[0]).stem)
    return {"title": "A byte-level GPT", "task": "text-generation", "usage": usage}


def build_model(accelerator, sizes, args):
    """Builds the model with random weights; under FSDP only the main process holds them.

    `prepare` sends the shards to the others. Until then, these hold tensors, by whose addresses
    Accelerate identifies them, but which use no memory, because they are never written to.
    """
    empty = accelerator.is_fsdp2 and not accelerator.is_main_process
    options = dict(dropout=args.dropout, activation_checkpointing=args.activation_checkpointing)
    with torch.device("meta") if empty else contextlib.nullcontext():
        model = GPT(**sizes, **options)
    make_attention_deterministic()
    fsdp.use_model_blocks(accelerator, model)
    return model.to_empty(device="cpu") if empty else model


def rates_per_window(accelerator, flops, block_size):
    """What is logged besides the windows per second, for `run.start`: bytes, and if known MFU."""
    peak = peak_flops(accelerator)
    mfu = {"mfu": block_size * flops / peak} if peak else {}
    return {"tokens_per_second": block_size, **mfu}


def export(accelerator, folder, model, sizes):
    """Writes the weights of the model; call it on every process."""
    state = accelerator.get_state_dict(model)  # under FSDP gathered from all processes

    def write():
        unwrapped = GPT(**sizes)
        unwrapped.load_state_dict(state)
        files.write_weights(folder, unwrapped, sizes)

    run_on_main(accelerator, write)  # the others wait here, and not in a collective that times out


def write_outputs(run, text, sizes):
    """Writes the sample, the curves and the model card of a finished run; main process only."""
    with plots.optional("sample.txt"):
        write_text(run.path / "sample.txt", text)
    plots.curves(run.path, {"loss": "loss (nats per byte)", "bits_per_byte": "bits per byte"})
    model_card.write(run, **describe_model(sizes))
    print(text)


def connect(args):
    """Sets up this process; returns the `Accelerator`, and its trackers."""
    on_cpu = launch.set_up(args, shards=True)  # network, threads, deterministic algorithms
    fsdp.set_up(on_cpu)
    trackers = Trackers(args)
    accelerator = Accelerator(cpu=on_cpu, **launch.accelerator_options(args), **trackers.options())
    launch.print_banner(accelerator)
    elastic.divide_batch(accelerator, args.batch_size, args.gradient_accumulation_steps)
    fsdp.configure(accelerator)
    return accelerator, trackers


def main():
    args = parse_args()
    if args.sample:
        return sample(args)
    accelerator, trackers = connect(args)
    train_set, held_out, description = load_data(accelerator, args)
    plan = Plan.from_args(args, len(train_set))
    writer = None if args.wait_for_checkpoints else BackgroundWriter(accelerator)
    run = RunFolder(args, accelerator, MAY_CHANGE, [trackers], writer)
    run.open(plan, data=description)  # has a run to continue, a finished one, or none
    if run.finished:
        return
    eval_samples = evaluation.count_evaluated(run, plan, args, len(held_out))
    set_seed(args.seed)
    sizes = {name: getattr(args, name) for name in SIZES}
    model = build_model(accelerator, sizes, args)
    weight_files.initialize(accelerator, model, run.init_from)
    parameters, flops = model.count(), model.flops_per_token()
    compile_model(accelerator, [model], args.compile, on_gpus=True)
    optimizer = build_optimizer(model, args)
    scheduler = build_scheduler(optimizer, plan, args)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    eval_set = evaluation.choose(held_out, eval_samples, args.seed)
    train_loader, eval_loader = build_loaders(accelerator, train_set, eval_set, args)
    first = eval_set.__getitems__([0])
    # Hidden passes, for an exact resume.
    ddp.warm_up(model, lambda: compute_loss(model, first, accelerator.device))
    rates = rates_per_window(accelerator, flops, args.block_size)
    step = run.start(rates)  # accelerator.load_state, if there is a checkpoint
    schedule.recompute(scheduler)  # the run may have another length now
    run.print(f"{parameters:,} parameters, {flops / 1e6:.1f} MFLOP per byte of training")
    guard = Guard(accelerator, args.timeout)
    watchdog = Watchdog(run, guard, accelerator, model, args.timeout)
    progress = evaluation.Progress(accelerator, guard.watch)

    def validate(step):
        metrics = evaluate(accelerator, model, eval_loader, progress)
        run.log("val", step, score=-metrics["loss"], **metrics)

    train_loss, saved = math.inf, dict(config=sizes, eval_samples=eval_samples)
    if run.evaluation_due:  # the run was stopped in it
        validate(step)
    profile = start_profiler(accelerator, run.path, args.profile)
    for epoch, remaining in plan.epochs(start=step, done=run.best.out_of_patience):
        train_loader.set_epoch(epoch)
        batches = remaining.rest(train_loader)  # without those before an interruption
        for step, micro_batches in remaining.accumulated(run.timed(batches)):
            losses, ids, norm = [], [], None
            for batch in micro_batches:
                # A restart draws the same dropout masks. After loading, which may draw, too.
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
            if plan.log_due(step):  # one loss, not one per process
                train_loss = accelerator.reduce(torch.stack(losses).mean(), "mean").item()
                figures = dict(loss=train_loss, grad_norm=norm, lr=scheduler.get_last_lr()[0])
                run.log("train", step, **figures, **watchdog.figures())
            if stop or run.save_due(step):
                with run.checkpoint(step, guard, model, **saved) as folder:
                    accelerator.save_state(folder)
            if stop:
                run.exit_preempted(step)
            if plan.evaluation_due(step):
                validate(step)  # a signal ends it at once: the restart evaluates
        if args.overfit_batch and train_loss < 0.01:
            break
    profile.stop()

    text = generate(model, args.prompt, args.sample_length, args.temperature, args.seed)
    run.log("sample", step, text=text)
    export(accelerator, run.path, model, sizes)
    last = evaluation.choose(held_out, evaluation.count_last(plan, args, len(held_out)), args.seed)
    counts = progress.announce(len(last), len(held_out), run.path)
    last_loader = build_eval_loader(accelerator, last, args.block_size)
    metrics = evaluate(accelerator, model, last_loader, progress)
    results = {f"val_{name}": value for name, value in metrics.items()}
    run.finish(step, **results, **counts, parameters=parameters, flops_per_token=flops)
    if accelerator.is_main_process:
        write_outputs(run, text, sizes)
    run.close(model_card.command(Path(__file__).name, "--sample", run.path, "--prompt", "The "))
    accelerator.end_training()


def parse_args():
    parser = Parser(description=__doc__.split("\n")[0])
    group = parser.add_argument_group("data")
    group.add_argument(
        "--dataset",
        default="karpathy/tiny_shakespeare",
        help="Hub id, local text file or folder, or `synthetic`",
    )
    flags.add(group, "num_workers")
    group.add_argument(
        "--text_column", default="text", help="column with the text, for a Hub id, JSONL or Parquet"
    )
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
    flags.add(group, "compile")
    group = parser.add_argument_group("training (a sample is a window of block_size bytes)")
    group.add_argument(
        "--optimizer", choices=RECIPES, default="muon", help="for the weight matrices of the blocks"
    )
    parser.add_training_arguments(group)
    flags.add(group, *flags.OPTIMIZER, "lr_schedule", lr_schedule="linear")
    group.add_argument(
        "--warmup_steps",
        type=number(int, 0),
        default=50,
        help="steps of warm-up, at most a tenth of the run",
    )
    group = parser.add_run_arguments()
    flags.add(group, "init_from", "patience", "eval_samples", *flags.EXTRAS)
    group = parser.add_argument_group("samples")
    group.add_argument(
        "--sample", metavar="PATH", help="do not train: generate text with the weights of a run"
    )
    group.add_argument("--prompt", type=str, default="\n", help="text to continue")
    length = number(int, 1, most=10**6)  # each byte takes a forward pass
    group.add_argument("--sample_length", type=length, default=300, help="bytes to sample")
    group.add_argument(
        "--temperature",
        type=number(float, 0, most=1000),  # far below that, all bytes are equally likely
        default=0.8,
        help="of sampling; 0: always the most likely byte",
    )
    # In steps, because an epoch of a small text takes seconds.
    parser.set_defaults(
        epochs=10, batch_size=64, max_grad_norm=1.0, eval_every=250, checkpoint_every=250
    )
    parser.set_defaults(**RECIPES.get(flags.choice(parser, "optimizer"), {}))
    args = flags.parse_with_checks(parser)
    if args.n_embd % args.n_head or args.n_embd // args.n_head % 2:
        raise UserError(
            f"--n_embd {args.n_embd} must be an even number times --n_head {args.n_head}"
        )
    if not args.prompt:
        raise UserError("--prompt is empty: give at least one character")
    if args.overfit_batch:
        args.lr_schedule, args.dropout = "constant", 0.0
    return frozen(args)


if __name__ == "__main__":
    entry.run(main, explain)
