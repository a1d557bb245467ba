"""Estimates the memory that training a language model takes, before its weights are loaded.

By arithmetic from the configuration. Weights, gradients and the state of AdamW are exact;
activations are those that a decoder keeps for the backward pass (V. Korthikanti et al.,
arXiv:2205.05198), without the scores of attention. Needs the packages in
scripts/requirements_lm.txt.
"""

from typing import NamedTuple

import psutil
import torch
from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM

from utils.language.lm_loss import LOGITS
from utils.run import devices
from utils.run.failures import UserError
from utils.run.output import notice
from utils.scale import fsdp

GIB = 2**30
FLOAT, ADAM = 4, 8  # bytes of a trained weight and of its gradient; of its two moments
LORA = 0.01  # the part of the weights that LoRA trains, about


class Sizes(NamedTuple):
    """What a model has, in numbers, not bytes.

    parameters, trained: its weights, and those of them that are trained.
    frozen_bytes: of each other weight.
    block, rest: the weights of its largest block, and those of no block: sharding gathers both.
    layers, hidden, vocabulary: of its configuration.
    kept: activations that a block keeps for the backward pass, per token.
    """

    parameters: int
    trained: int
    frozen_bytes: int
    block: int
    rest: int
    layers: int
    hidden: int
    vocabulary: int
    kept: int


class Job(NamedTuple):
    """How a model is trained: by so many processes, of which `shards` share a copy of the model.

    tokens: the positions of a micro-batch of one process. block_size: those of a sample.
    half: whether it computes in bf16. checkpointing: whether activations are computed again.
    """

    processes: int
    shards: int
    tokens: int
    block_size: int
    half: bool
    checkpointing: bool


class Need(NamedTuple):
    """The memory of one process, in bytes."""

    weights: float
    gradients: float
    optimizer: float
    activations: float


def measure(config, dtype=None):
    """The `Sizes` of the model of a configuration; nothing of it is in memory.

    Args: dtype (torch.dtype | None): of the frozen weights, for LoRA; None: all are trained.
    """
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    parameters = sum(weight.numel() for weight in model.parameters())
    blocks = [sum(weight.numel() for weight in block.parameters()) for block in fsdp.blocks(model)]
    text = config.get_text_config()
    hidden, heads = text.hidden_size, text.num_attention_heads
    width = getattr(text, "head_dim", None) or hidden // heads
    inner = getattr(text, "intermediate_size", None) or 4 * hidden
    if experts := getattr(text, "num_experts_per_tok", None):
        inner = experts * (getattr(text, "moe_intermediate_size", None) or inner)
    pairs = getattr(text, "num_key_value_heads", None) or heads
    return Sizes(
        parameters,
        round(parameters * LORA) if dtype else parameters,
        dtype.itemsize if dtype else FLOAT,
        max(blocks, default=0),
        parameters - sum(blocks),
        text.num_hidden_layers,
        hidden,
        text.vocab_size,
        # Two norms with their inputs, two sums; queries, keys, values and what attention returns;
        # the two inner states of the perceptron, before and after the activation.
        6 * hidden + 2 * (heads + pairs) * width + 4 * inner,
    )


def estimate(sizes, job):
    """The `Need` of each process of a job."""
    number = 2 if job.half else FLOAT
    frozen = sizes.parameters - sizes.trained
    weights = (sizes.trained * FLOAT + frozen * sizes.frozen_bytes) / job.shards
    gradients = sizes.trained * FLOAT / job.shards
    if job.shards > 1:  # gathers a block, and the next one meanwhile
        weights += (2 * sizes.block + sizes.rest) * number
    else:
        weights += sizes.trained * number if job.half else 0  # autocast keeps its copies
        gradients *= 2 if job.processes > 1 else 1  # the buckets of DDP
    layers = 1 if job.checkpointing else sizes.layers
    kept = job.tokens * (layers * sizes.kept + sizes.layers * sizes.hidden) * number
    # Of a chunk of the loss: the logits, those in float32, and their gradient.
    logits = 3 * FLOAT * min(job.tokens * sizes.vocabulary, LOGITS)
    return Need(weights, gradients, sizes.trained * ADAM / job.shards, kept + logits)


def advise(sizes, job, free):
    """What would fit into `free` bytes (int), the cheapest first, as text."""

    def fits(sizes, job):
        return sum(estimate(sizes, job)) <= free

    flags = [] if job.checkpointing else ["--activation_checkpointing"]
    job = job._replace(checkpointing=True)
    if not fits(sizes, job) and job.tokens > job.block_size:
        flags.append(f"{job.tokens // job.block_size} times the --gradient_accumulation_steps")
        job = job._replace(tokens=job.block_size)
    if fits(sizes, job):
        return " and ".join(flags)
    choices = []
    lora = sizes._replace(trained=round(sizes.parameters * LORA), frozen_bytes=2)
    if sizes.trained == sizes.parameters and fits(lora, job):
        choices.append("--lora_rank 16")
    for count in (2, 4, 8, 16, 32, 64):
        if count > job.shards and fits(sizes, job._replace(shards=count, processes=count)):
            choices.append(f"{count} GPUs with an FSDP configuration")
            break
    choices = choices or ["a smaller --block_size, or another --model"]
    return f"{', '.join([*flags, 'and '])}{' or '.join(choices)}"


def check(accelerator, config, args):
    """Says what training takes, and what there is; call it before the weights are loaded.

    Raises UserError if weights, gradients and optimizer alone take more than is free.
    """
    frozen, processes = None, accelerator.num_processes
    if args.lora_rank or args.adapter:
        frozen = getattr(torch, args.dtype) if args.dtype else config.dtype or torch.float32
    sizes, half = measure(config, frozen), accelerator.mixed_precision == "bf16"
    samples = args.batch_size // (processes * args.gradient_accumulation_steps)
    sharing, tokens = fsdp.parts(accelerator), samples * args.block_size
    job = Job(processes, sharing, tokens, args.block_size, half, args.activation_checkpointing)
    if accelerator.device.type == "cuda":
        free, where = torch.cuda.mem_get_info(accelerator.device)[0], "GPU"
    else:
        free = psutil.virtual_memory().available // devices.local_processes()
        where = "process"
    need = estimate(sizes, job)
    parts = zip(("weights", "gradients", "optimizer", "activations about"), need, strict=True)
    listed = ", ".join(f"{name} {value / GIB:.1f}" for name, value in parts)
    line = f"memory per {where}: {listed}: {sum(need) / GIB:.1f} of {free / GIB:.1f} GiB free"
    if sum(need) <= free:
        if sum(need) > GIB and accelerator.is_main_process:
            print(line)
        return
    line = f"{line}. It would fit with {advise(sizes, job, free)}"
    if sum(need) - need.activations > free:
        raise UserError(f"the model does not fit: {line}")
    if accelerator.is_main_process:
        notice(line)
