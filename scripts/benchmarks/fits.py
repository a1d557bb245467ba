"""Prints which language models train_lm.py trains on which GPUs, by arithmetic: nothing is run.

    python scripts/benchmarks/fits.py

In bf16, with a micro-batch of one block of 4,096 tokens and activation checkpointing; on several
GPUs sharded, 8 per machine.
"""

import sys
from pathlib import Path

# Finds `utils` next to this script (a copy) or above (the repository).
sys.path[1:1] = map(str, Path(__file__).resolve().parents[1:3])

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from utils.language import causal_lm, lm_loss

GIB = causal_lm.GIB
BLOCK = 4096
DISK = 2e9  # bytes per second that a machine reads
# Published sizes: layers, width, inner width, heads, heads of keys and values, tokens.
MODELS = {
    "0.6B (Qwen3)": (28, 1024, 3072, 16, 8, 151_936),
    "8B (Llama 3.1)": (32, 4096, 14_336, 32, 8, 128_256),
    "32B (Qwen3)": (64, 5120, 25_600, 64, 8, 151_936),
    "70B (Llama 3.3)": (80, 8192, 28_672, 64, 8, 128_256),
}
NAMES = "num_hidden_layers hidden_size intermediate_size num_attention_heads num_key_value_heads"
JOBS = [
    ("0.6B (Qwen3)", 1, None),
    ("8B (Llama 3.1)", 1, torch.bfloat16),
    ("8B (Llama 3.1)", 4, None),
    ("8B (Llama 3.1)", 8, None),
    ("32B (Qwen3)", 2, torch.bfloat16),
    ("32B (Qwen3)", 16, None),
    ("70B (Llama 3.3)", 4, torch.bfloat16),
    ("70B (Llama 3.3)", 32, None),
    ("70B (Llama 3.3)", 64, None),
]


def activations(config):
    """The bytes of the activations of a block of tokens, recomputed layer by layer.

    About those that a decoder keeps for the backward pass (V. Korthikanti et al.,
    arXiv:2205.05198), without the scores of attention.
    """
    heads = config.num_attention_heads + config.num_key_value_heads
    # Two norms with their inputs, two sums; queries, keys, values and what attention returns; the
    # two inner states of the perceptron, before and after the activation.
    layer = 6 * config.hidden_size + 2 * heads * config.head_dim + 4 * config.intermediate_size
    decoder_bytes = BLOCK * (layer + config.num_hidden_layers * config.hidden_size) * 2
    # Of a chunk of the loss: the logits, those in float32, and their gradient.
    return decoder_bytes + 3 * 4 * min(BLOCK * config.vocab_size, lm_loss.LOGITS)


def row(name, gpus, frozen):
    """A row of the table: a model, GPUs, and the dtype of frozen weights or None."""
    config = LlamaConfig(**dict(zip(NAMES.split(), MODELS[name], strict=False)), head_dim=128)
    config.vocab_size, config.tie_word_embeddings = MODELS[name][-1], config.hidden_size < 2048
    need = *causal_lm.estimate_memory(config, frozen, gpus, gpus, True), activations(config)
    with torch.device("meta"):
        parameters = LlamaForCausalLM(config).num_parameters()
    trained = parameters * causal_lm.LORA if frozen else parameters
    files, checkpoint = 2 * parameters, 12 * trained  # bf16; weights and two moments
    export = 4 * trained if frozen else files
    cells = [f"{value / GIB:.1f}" for value in (*need, sum(need))]
    machines = -(-gpus // 8)
    cells += [f"{files / machines / DISK:.0f} s", f"{checkpoint / 1e9:.1f}", f"{export / 1e9:.1f}"]
    return [name, "LoRA" if frozen else "all weights", str(gpus), *cells]


def main():
    heads = "model trains GPUs weights gradients optimizer activations total load checkpoint export"
    print(f"| {' | '.join(heads.split())} |\n|{'---|' * len(heads.split())}")
    for job in JOBS:
        print(f"| {' | '.join(row(*job))} |")


if __name__ == "__main__":
    main()
