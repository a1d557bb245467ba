"""Generates text with a model that predicts bytes."""

import torch


@torch.compiler.set_stance("force_eager")  # eager, because each text length would be compiled separately
@torch.no_grad()
def generate(model, block_size, length, seed, prompt="\n", temperature=0.8, top_k=None):
    """Continues `prompt` by `length` bytes, each sampled from the `top_k` most likely ones.

    Under FSDP every process must call this function, because a forward pass needs all shards. All draw the same bytes.

    Args:
        model: int64 bytes [1, time <= block_size] -> logits [1, time, 256].
        temperature (float): 0: always choose the most likely byte.
        top_k (int | None): None: sample from all bytes.

    Returns:
        str: the prompt and its continuation; bytes that are not UTF-8 are replaced.
    """
    was_training = model.training
    model.eval()
    generator = torch.Generator().manual_seed(seed)  # separate: sampling must not change training's random numbers
    device = next(model.parameters()).device
    text = torch.tensor([list(prompt.encode())], device=device)
    for _ in range(length):
        logits = model(text[:, -block_size:])[0, -1].float().cpu()
        top = logits.topk(min(top_k or 256, 256))
        probabilities = (top.values / max(temperature, 1e-6)).softmax(0)
        choice = top.indices[torch.multinomial(probabilities, 1, generator=generator)]
        text = torch.cat([text, choice.view(1, 1).to(device)], 1)
    model.train(was_training)
    return bytes(text[0].tolist()).decode(errors="replace")
