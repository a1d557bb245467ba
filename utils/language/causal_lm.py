"""Loads causal language models of `transformers`, their configurations and tokenizers.

Needs the packages in scripts/requirements_lm.txt.
"""

import contextlib
import json
import logging
import os
import warnings
from pathlib import Path

import torch
import transformers
from accelerate import PartialState
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from utils.data.sharing import map_bytes
from utils.language import sharded_files
from utils.language.conversations import Encoder, pad_id_of
from utils.language.rows import checksum, reading
from utils.report.model_card import ADAPTER, MODEL
from utils.run.failures import UserError
from utils.run.output import notice

# Every process would draw a bar for each file of weights, and report at length which weights are
# missing (see `load_weights`). Each save would warn that tied weights are saved only once.
transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()
logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)

TINY = "tiny"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # tokens of the tiny model
TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
ATTENTION = {
    "auto": None,  # sdpa, or eager for the models that lack it
    "sdpa": "sdpa",
    "eager": "eager",
    "flex": "flex_attention",
    "flash": "flash_attention_2",
}
# Their masks do not depend on the positions (transformers 5.24).
IGNORE_POSITIONS = {"afmoe", "biogpt", "bloom", "gpt_oss", "mpt", "openai-gpt", "opt", "xglm"}
CONFIGURATION = ["*.json", "*.jinja", "*.model", "*.txt"]  # files of a model without its weights


def find(name, flag="--model"):
    """Finds the files of a model: a folder (Path) with `config.json`; raises UserError if none.

    Args:
        name (str): a folder, the folder of a run, or a Hub id. Of the Hub, the configuration and
            the tokenizer are downloaded now.
        flag (str): what gave the name, for messages.
    """
    path = Path(os.path.abspath(os.path.expanduser(name)))  # an adapter remembers it
    if path.is_dir():
        for folder in (path, path / MODEL):
            if (folder / "config.json").is_file():
                return folder
        if (path / ADAPTER).is_dir():
            raise UserError(
                f"{flag} {name} has an adapter only: give its base model, and --adapter "
                f"{path / ADAPTER}; or make a model of both with --merge {name}"
            )
        raise UserError(f"{flag} {name} has no config.json: it is no model of transformers")
    if path.exists() or name.startswith((".", "/", "~")):
        raise UserError(f"{flag} {name}: there is no such folder")
    try:
        return Path(snapshot_download(name, allow_patterns=CONFIGURATION))
    except HFValidationError as error:
        raise UserError(f"{flag} {name}: {str(error).splitlines()[0]}") from None
    except (LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0][:200]
        raise UserError(
            f"{flag} {name} is no folder, and not to be had from the Hub ({reason}): on a machine "
            f"with a network run `hf download {name} --local-dir FOLDER`, and give that folder"
        ) from None


def source(name):
    """What a model is loaded from, and remembers: the folder of a local one, or the Hub id."""
    return find(name) if Path(name).expanduser().is_dir() else name


def load_config(name, tokenizer, block_size):
    """The configuration of a model.

    Raises UserError if it cannot be loaded, is no causal language model of text only, or does not
    fit the tokenizer or blocks of so many positions (int).
    """
    if name == TINY:
        config = tiny_config(len(tokenizer))
    else:
        with loading(name, "configuration"):
            config = AutoConfig.from_pretrained(find(name))
        if type(config) not in AutoModelForCausalLM._model_mapping:
            raise UserError(f"--model {name} is no causal language model, but {config.model_type}")
        if hasattr(config, "vision_config"):
            raise UserError(
                f"--model {name} reads images, too, which this script cannot train: give a model "
                "of text only"
            )
        config = config.get_text_config()
    largest = max(tokenizer.get_vocab().values())
    if largest >= config.vocab_size:
        raise UserError(
            f"the tokenizer has a token {largest:,}, and --model {name} only {config.vocab_size:,} "
            "tokens: they do not belong together"
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
        UserError: it or the file cannot be read.
    """
    if name == TINY:
        tokenizer = byte_tokenizer()
    else:
        with loading(name, "tokenizer"):
            tokenizer = AutoTokenizer.from_pretrained(find(name))
    if chat_template:
        with reading(f"--chat_template {chat_template}"):
            tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
    return tokenizer


def load_model(accelerator, config, args):
    """Loads a model with its weights, or with random ones.

    Under FSDP it holds no weights yet: in `prepare` each process reads the slices that it keeps. Of
    a model with random weights, or with other names in its files, the main process holds all, and
    `prepare` sends the shards to the others.

    Args: config: what `load_config` returned. args: those of train_lm.py.

    Returns:
        the model; its `export_dtype` is that of the weights to export.

    Raises:
        UserError: weights are missing or are pickles, or this attention does not run here.
    """
    if args.attention == "flex" and accelerator.device.type == "cpu":
        raise UserError("--attention flex does not train on a CPU: use sdpa")
    is_new = args.from_scratch or args.model == TINY
    files = None if is_new else config.dtype
    frozen = files if args.lora_rank or args.adapter else None
    options = dict(dtype=getattr(torch, args.dtype) if args.dtype else frozen or torch.float32)
    options["attn_implementation"] = ATTENTION[args.attention]
    if args.from_scratch and hasattr(config, "quantization_config"):
        del config.quantization_config  # the new weights are not quantized
    with loading(args.model, "model"):
        model = _load(accelerator, config, args, options)
    chosen = args.export_dtype
    model.export_dtype = files or torch.float32 if chosen == "auto" else getattr(torch, chosen)
    return model


def _load(accelerator, config, args, options):
    """The model with its weights, or under FSDP one without memory."""
    is_new = args.from_scratch or args.model == TINY
    if accelerator.is_fsdp2 and not (is_new and accelerator.is_main_process):
        empty, name = sharded_files.build_empty(config, options), args.model
        reads = not is_new and sharded_files.read_in_prepare(empty, find(name), source(name))
        if reads or not accelerator.is_main_process:
            return empty
    if not is_new:
        model = load_weights(args.model, config=config, **options)
        if accelerator.is_fsdp2:
            notice(
                f"--model {args.model}: its files do not have just the names of the model's "
                "weights, so the main process reads all of them, and sends shards to the others"
            )
        return model
    torch.manual_seed(args.seed)
    return AutoModelForCausalLM.from_config(config, **options)


def load_weights(name, **options):
    """A model with all its weights. Raises UserError if one is missing: it would be random."""
    options |= dict(use_safetensors=True, output_loading_info=True)
    model, found = AutoModelForCausalLM.from_pretrained(source(name), **options)
    unknown = sorted(found["unexpected_keys"])
    if unknown and PartialState().is_main_process:  # of a vision tower, say
        notice(f"{name}: weights that the model does not have, such as {unknown[0]}, are left out")
    missing = sorted(found["missing_keys"])
    if missing:
        raise UserError(f"{name}: its files have no {missing[0]} ({len(missing)} are missing)")
    return model


@contextlib.contextmanager
def loading(name, what):
    """Raises UserError with one line, instead of any error of `transformers` in the block."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except UserError:
        raise
    except Exception as error:  # of any type: the text says what is wrong
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise UserError(f"--model {name}: cannot load its {what} ({reason})") from None


def can_pack(config):
    """Whether attention keeps packed documents apart; states of other layers would not.

    `lm_loss.check` finds out whether it is true.
    """
    kinds = set(getattr(config, "layer_types", None) or [])
    model_class = AutoModelForCausalLM._model_mapping[type(config)]
    stateful = getattr(model_class, "_is_stateful", False)
    if stateful or config.model_type in IGNORE_POSITIONS:
        return False
    return kinds <= {"full_attention", "sliding_attention", "chunked_attention"}


def fingerprint(name, config):
    """What identifies a model: its configuration, and its weights, of the Hub their commit."""
    # Without what depends on where a model lies, and on the release of transformers.
    settings = config.to_diff_dict()
    for key in ("dtype", "transformers_version", "_name_or_path"):
        settings.pop(key, None)
    parts = [json.dumps(settings, sort_keys=True, default=str).encode()]
    if name != TINY and source(name) == name:
        parts.append(find(name).name.encode())
    elif name != TINY:
        files = sorted(find(name).glob("*.safetensors"))
        parts += [map_bytes(file).numpy() for file in files]
    return checksum(*parts)


def ends(model, tokenizer):
    """The tokens that end an answer, and that for padding, as arguments of `generate`.

    The end of a turn in the chat template is often another token than the end of a text: a base
    model that learns conversations stops there only if it is told.
    """
    configured = model.generation_config.eos_token_id
    tokens = configured if isinstance(configured, list) else [configured]
    tokens = {token for token in (*tokens, tokenizer.eos_token_id) if token is not None}
    if tokenizer.chat_template:
        tokens |= {*Encoder(tokenizer).answer_ends()}
    return {"eos_token_id": sorted(tokens) or None, "pad_token_id": pad_id_of(tokenizer)}


# ---------------------------------------------------------------------------------- the tiny model


def tiny_config(vocab_size):
    """A Llama of 0.8 million parameters, whose tokens are bytes."""
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
