"""Causal language models of `transformers`: how they are loaded, and their loss.

Needs the packages in scripts/requirements_lm.txt.
"""

import hashlib
import json
import logging
import os
import warnings
from pathlib import Path

import torch
import transformers
from accelerate import init_empty_weights
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as recompute
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from utils.run.failures import UserError
from utils.run.launch import notice

# Every process would draw a bar for each file of weights, and each save would warn that tied
# weights are saved once, as they should be.
transformers.utils.logging.disable_progress_bar()
logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)

TINY = "tiny"
ATTENTION = {
    "auto": None,  # sdpa, or eager for the models that lack it
    "sdpa": "sdpa",
    "eager": "eager",
    "flex": "flex_attention",
    "flash": "flash_attention_2",
}
CONFIGURATION = ["*.json", "*.jinja", "*.model", "*.txt"]  # files of a model without its weights
LOGITS = 2**26  # that exist at once: 256 MiB in float32
SAMPLED = 16, 1 << 16  # for a fingerprint: places in a file of weights, and bytes at each
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- message['content'] + '<|im_end|>' -}}{%- endgeneration -%}
{%- else -%}
{{- message['content'] + '<|im_end|>' -}}
{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


# ---------------------------------------------------------------------------------------- loading


def find(name):
    """Finds the files of a model.

    Args:
        name (str): a folder, the folder of a run, or a Hub id. Of the Hub, the configuration and
            the tokenizer are downloaded now.

    Returns:
        Path: a folder with `config.json`.

    Raises:
        UserError: there is none.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        for folder in (path, path / "model"):
            if (folder / "config.json").is_file():
                return folder
        if (path / "adapter").is_dir():
            raise UserError(
                f"--model {name} has an adapter only: give its base model, and --adapter "
                f"{path / 'adapter'}; or make a model of both with --merge {name}"
            )
        raise UserError(f"--model {name} has no config.json: it is no model of transformers")
    if path.exists() or name.startswith((".", "/", "~")):
        raise UserError(f"--model {name}: there is no such folder")
    try:
        return Path(snapshot_download(name, allow_patterns=CONFIGURATION))
    except HFValidationError as error:
        raise UserError(f"--model {name}: {str(error).splitlines()[0]}") from None
    except (LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0][:200]
        raise UserError(
            f"--model {name} is no folder, and not to be had from the Hub ({reason}): on a machine "
            f"with a network run `hf download {name} --local-dir FOLDER`, and give that folder"
        ) from None


def source(name):
    """What to load the weights from: the folder of a local model, or the Hub id itself.

    The model remembers it, and so does an adapter.
    """
    return find(name) if Path(name).expanduser().is_dir() else name


def load_config(name, tokenizer, block_size):
    """The configuration of a model, checked.

    Raises:
        UserError: it is no causal language model, needs code of its own, or does not fit the
            tokenizer or the size of the blocks.
    """
    if name == TINY:
        config = tiny_config(len(tokenizer))
    else:
        config = _attempt(name, "configuration", lambda: AutoConfig.from_pretrained(find(name)))
        if type(config) not in AutoModelForCausalLM._model_mapping:
            raise UserError(f"--model {name} is no causal language model, but {config.model_type}")
        config = config.get_text_config()
    if len(tokenizer) > config.vocab_size:
        raise UserError(
            f"the tokenizer has {len(tokenizer):,} tokens and --model {name} only "
            f"{config.vocab_size:,}: they do not belong together"
        )
    most = getattr(config, "max_position_embeddings", None)
    if most and block_size > most:
        raise UserError(f"--block_size {block_size}: --model {name} has {most} positions at most")
    return config


def load_tokenizer(name, chat_template=None):
    """The tokenizer of a model.

    Args:
        name (str): as for `find`, or `tiny`.
        chat_template (str | None): a file with a Jinja template to use, and to save with the model.

    Raises:
        UserError: it cannot be loaded.
    """
    if name == TINY:
        tokenizer = byte_tokenizer()
    else:
        tokenizer = _attempt(name, "tokenizer", lambda: AutoTokenizer.from_pretrained(find(name)))
    if chat_template:
        try:
            tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8"
            raise UserError(f"--chat_template {chat_template} cannot be read: {reason}") from None
    if tokenizer.pad_token is None:  # for samples; training never looks at padding
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    return tokenizer


def load_model(accelerator, name, config, *, attention, dtype, from_scratch, seed):
    """Loads a model with its weights, or with random ones.

    Under FSDP only the main process holds the weights: `prepare` sends the shards to the others.
    Until then, these hold empty tensors, which use no memory, because they are never written to.

    Args:
        config: what `load_config` returned.
        attention (str): a key of `ATTENTION`.
        dtype (torch.dtype): of the weights.
        from_scratch (bool): random weights, by the model's own initialization.

    Raises:
        UserError: the weights are missing or are pickles, or this attention does not run here.
    """
    if attention == "flex" and accelerator.device.type == "cpu":
        raise UserError("--attention flex does not train on a CPU: use sdpa")
    options = dict(attn_implementation=ATTENTION[attention], dtype=dtype)
    if accelerator.is_fsdp2 and not accelerator.is_main_process:
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(config, **options)
        _allocate(model)
        model.tie_weights()
        return model

    def load():
        if from_scratch or name == TINY:
            torch.manual_seed(seed)
            return AutoModelForCausalLM.from_config(config, **options)
        return AutoModelForCausalLM.from_pretrained(
            source(name), config=config, use_safetensors=True, **options
        )

    model = _attempt(name, "model", load)
    unsupported = [weight for weight in model.parameters() if weight.is_meta]
    if unsupported:
        raise UserError(f"--model {name}: weights are missing in its files")
    return model


def _attempt(name, what, function):
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return function()
    except UserError:
        raise
    except Exception as error:  # of transformers, of any type: the text says what is wrong
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise UserError(f"--model {name}: cannot load its {what} ({reason})") from None


def _allocate(model):
    """Replaces parameters without memory by tensors that are never written to."""
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            empty = torch.empty_like(weight, device="cpu")
            setattr(module, name, nn.Parameter(empty, requires_grad=weight.requires_grad))


def can_pack(config):
    """Whether attention keeps packed documents apart; states of other layers would not."""
    kinds = set(getattr(config, "layer_types", None) or [])
    with init_empty_weights():
        model_class = AutoModelForCausalLM._model_mapping[type(config)]
    stateful = getattr(model_class, "_is_stateful", False)
    return not stateful and kinds <= {"full_attention", "sliding_attention", "chunked_attention"}


def fingerprint(name, config):
    """What identifies a model: its configuration, and its weights.

    Of a folder, these are sizes and samples of its files; of a Hub id, the commit.
    """
    settings = {key: value for key, value in config.to_dict().items() if key != "dtype"}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    if name != TINY and source(name) == name:
        digest.update(find(name).name.encode())
    elif name != TINY:
        for file in sorted(find(name).glob("*.safetensors")):
            size = os.path.getsize(file)
            digest.update(size.to_bytes(8, "little"))
            with file.open("rb") as opened:
                for number in range(SAMPLED[0]):
                    opened.seek(size * number // SAMPLED[0])
                    digest.update(opened.read(SAMPLED[1]))
    return digest.hexdigest()[:12]


# ------------------------------------------------------------------------------------------- tiny


def tiny_config(vocab_size):
    """A Llama of 0.9 million parameters."""
    return transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=258,
        pad_token_id=256,
    )


def byte_tokenizer():
    """A tokenizer whose tokens are the 256 bytes, and three special ones for conversations."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: number for number, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=SPECIAL[2],
        pad_token=SPECIAL[0],
        chat_template=TEMPLATE,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )


# ------------------------------------------------------------------------------------------- loss


def chunk_loss(model):
    """Gives a model's forward pass the argument `targets`, with which it returns a loss.

    `targets`, int64 [batch, time], are the tokens that follow: -100 is none. The result is the sum
    of their cross entropies in nats, a float32 scalar. The logits of a large vocabulary never exist
    at once: only of positions with a target, some at a time, and the backward pass computes them
    again. Without `targets`, as in `generate`, the forward pass is as before.

    This happens within the forward pass of the prepared model, so that the hooks of DDP and FSDP
    run. Between the last hidden states and the logits a model may scale or cap them, so its own
    forward pass computes them: on the chosen hidden states in place of its backbone.

    Args:
        model: a causal language model of `transformers`, or one of `peft` around it.
    """
    causal = _causal(model)
    original, backbone = causal.forward, causal.base_model
    causal.own_loss = backbone is causal or causal.get_output_embeddings() is None

    def logits_of(hidden, outputs, **kwargs):
        result, computes = type(outputs)(last_hidden_state=hidden, **kwargs), backbone.forward
        backbone.forward = lambda *_, **__: result
        try:
            return original(input_ids=None, use_cache=False)
        finally:
            backbone.forward = computes

    def loss_of(hidden, targets, outputs):
        logits = logits_of(hidden[None], outputs).logits[0].float()
        return F.cross_entropy(logits, targets, reduction="sum")

    def forward(*args, targets=None, **kwargs):
        kwargs = {name: value for name, value in kwargs.items() if value is not None}
        if targets is None:
            return original(*args, **kwargs)
        if _flattens(causal):
            kwargs, targets = _flat(kwargs), targets.flatten()[None]
        if causal.own_loss:
            count = (targets >= 0).sum().clamp(min=1)
            return original(**kwargs, labels=targets, shift_labels=targets).loss * count
        experts = getattr(causal.config, "output_router_logits", False)
        extra = {"output_router_logits": True} if experts else {}
        outputs = backbone(**{**kwargs, **extra, "use_cache": False})
        chosen = (targets >= 0).flatten().nonzero()[:, 0]
        hidden = outputs.last_hidden_state.flatten(0, 1)[chosen]
        targets = targets.flatten()[chosen]
        size = max(1, LOGITS // causal.config.get_text_config().vocab_size)
        parts = list(zip(hidden.split(size), targets.split(size), strict=True))
        if len(parts) == 1 or not torch.is_grad_enabled():
            total = sum(loss_of(*part, outputs) for part in parts)
        else:
            total = sum(recompute(loss_of, *part, outputs, use_reentrant=False) for part in parts)
        if not parts:
            total = hidden.sum().float()  # zero, with a gradient for DDP
        if experts:  # counts as often as there are targets, as the loss itself does
            balance = logits_of(hidden[None, :1], outputs, router_logits=outputs.router_logits)
            total = total + causal.router_aux_loss_coef * balance.aux_loss * len(targets)
        return total

    causal.forward = forward


def _causal(model):
    """The model of `transformers` inside the wrappers of `peft`."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _flattens(causal):
    """Flash attention finds packed documents by their positions in a batch of one row only."""
    return "flash" in (causal.config._attn_implementation or "")


def _flat(kwargs):
    names = ("input_ids", "position_ids")
    flat = {name: kwargs[name].flatten()[None] for name in names if name in kwargs}
    return {**kwargs, **flat}


def small_batch(accelerator, model):
    """A batch of one block that has two documents, of 5 and 11 tokens, on the device."""
    vocabulary = _causal(accelerator.unwrap_model(model)).config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(min(vocabulary, 250), (1, 17), generator=generator)
    positions = torch.cat([torch.arange(5), torch.arange(11)])[None]
    targets = tokens[:, 1:].clone()
    targets[:, 4] = -100
    batch = dict(input_ids=tokens[:, :-1], position_ids=positions, targets=targets)
    return {name: value.contiguous().to(accelerator.device) for name, value in batch.items()}


@torch.no_grad()
def check(accelerator, model, packed):
    """Compares the loss of a small batch with what it must be; call it on every process.

    Of two documents in a block, the second has the loss that it has alone: otherwise its tokens
    attend to the first. And the loss is the model's own: if not, that is used from now on.

    Args:
        model: as `prepare` returned it.
        packed (bool): whether blocks will have several documents.

    Raises:
        UserError: packed documents attend to each other.
    """
    was_training = model.training
    model.eval()
    causal = _causal(accelerator.unwrap_model(model))
    batch = small_batch(accelerator, model)
    alone = {name: value[:, 5:] for name, value in batch.items()}
    second = {**batch, "targets": batch["targets"].clone()}
    second["targets"][:, :5] = -100
    tolerance = 1e-4 if accelerator.mixed_precision == "no" else 2e-2
    if causal.dtype != torch.float32:
        tolerance = 2e-2
    expected = model(**alone).item()
    if packed and abs(model(**second).item() / expected - 1) > tolerance:
        raise UserError(
            f"{type(causal).__name__} with --attention {causal.config._attn_implementation} lets "
            "packed documents attend to each other: use another --attention"
        )
    if not causal.own_loss:
        causal.own_loss = True
        own = model(**alone).item()
        causal.own_loss = abs(own / expected - 1) > tolerance
    if causal.own_loss and accelerator.is_main_process:
        notice(f"{type(causal).__name__} computes its own loss, with all logits in memory at once")
    model.train(was_training)


def ends(model, tokenizer):
    """The tokens that end an answer, and that for padding, as arguments of `generate`."""
    configured = model.generation_config.eos_token_id
    found = configured if isinstance(configured, list) else [configured]
    found = {token for token in (*found, tokenizer.eos_token_id) if token is not None}
    return {"eos_token_id": sorted(found) or None, "pad_token_id": tokenizer.pad_token_id}
