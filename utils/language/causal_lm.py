"""Loads causal language models of `transformers`, if they fit, and their tokenizers.

Needs the packages in scripts/requirements_lm.txt.
"""

import contextlib
import copy
import logging
import os
import warnings
from collections import defaultdict
from functools import partial
from pathlib import Path

import psutil
import torch
import transformers
from accelerate import PartialState, init_empty_weights
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from safetensors import safe_open
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from torch.distributed.tensor import distribute_tensor, empty
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from utils.data.sharing import map_bytes
from utils.language.conversations import Encoder, pad_id_of
from utils.language.rows import checksum, reading
from utils.report.model_card import ADAPTER, MODEL
from utils.run import devices
from utils.run.collectives import run_on_all
from utils.run.failures import UserError
from utils.run.files import read_json
from utils.run.output import notice
from utils.scale import fsdp, patches

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
# Their masks do not depend on the positions (transformers 5.24).
IGNORE_POSITIONS = {"afmoe", "biogpt", "bloom", "gpt_oss", "mpt", "openai-gpt", "opt", "xglm"}
GIB = 2**30
FLOAT, ADAM = 4, 8  # bytes of a trained weight and of its gradient; of its two moments
LORA = 0.01  # the part of the weights that LoRA trains, about
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
                f"{flag} {name} has an adapter only: make a model of it with --merge {name}"
            )
        raise UserError(f"{flag} {name} has no config.json: it is no model of transformers")
    if path.exists() or name.startswith((".", "/", "~")):
        raise UserError(f"{flag} {name}: there is no such folder")
    try:
        return Path(snapshot_download(name, allow_patterns=CONFIGURATION))
    except (HFValidationError, LocalEntryNotFoundError, OSError) as error:
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


def estimate_memory(config, frozen, processes, shards, half):
    """The bytes that weights, their gradients and the moments of AdamW take in a process.

    Activations come on top of it. Nothing of the model is in memory.

    Args:
        frozen (torch.dtype | None): of the weights beside LoRA's; None: all are trained.
        processes, shards (int): all of them, and those that share a copy of the model.
        half (bool): whether it computes in bf16.

    Returns:
        tuple[float, float, float].
    """
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    count, size = model.num_parameters(), 2 if half else FLOAT
    trained = count * LORA if frozen else count
    frozen_bytes = (count - trained) * frozen.itemsize if frozen else 0
    weights, gradients = (trained * FLOAT + frozen_bytes) / shards, trained * FLOAT / shards
    if shards > 1:  # it gathers what belongs to no block, a block, and meanwhile the next one
        blocks = [sum(map(torch.numel, block.parameters())) for block in fsdp.blocks(model)]
        weights += (2 * max(blocks, default=0) + count - sum(blocks)) * size
    else:
        weights += trained * size if half else 0  # autocast keeps its copies
        gradients *= 2 if processes > 1 else 1  # the buckets of DDP
    return weights, gradients, trained * ADAM / shards


def check_memory(accelerator, config, args):
    """Says what training takes, and what there is; call it before the weights are loaded.

    Raises UserError if weights, gradients and optimizer take more than is free.
    """
    processes, shards = accelerator.num_processes, fsdp.parts(accelerator)
    frozen = config.dtype or torch.float32 if args.lora_rank else None
    half = accelerator.mixed_precision == "bf16"
    parts = estimate_memory(config, frozen, processes, shards, half)
    if accelerator.device.type == "cuda":
        free, where = torch.cuda.mem_get_info(accelerator.device)[0], "GPU"
    else:
        free = psutil.virtual_memory().available // devices.local_processes()
        where = "process"
    named = zip(("weights", "gradients", "optimizer"), parts, strict=True)
    listed = ", ".join(f"{name} {part / GIB:.1f}" for name, part in named)
    line = f"memory per {where}: {listed}, and activations; {free / GIB:.1f} GiB are free"
    if sum(parts) > free:
        raise UserError(
            f"the model does not fit: {line}. Less takes --lora_rank 16, or more GPUs with an FSDP "
            "configuration"
        )
    if sum(parts) > GIB and accelerator.is_main_process:
        print(line)


def load_model(accelerator, config, args):
    """Loads a model with its weights, or with random ones.

    Under FSDP it holds no weights yet: in `prepare` each process reads the slices that it keeps. Of
    a model with random weights, or with other names in its files, the main process holds all, and
    `prepare` sends the shards to the others.

    Args: config: what `load_config` returned. args: those of train_lm.py.

    Returns:
        the model; its `export_dtype` is that of the weights to export.

    Raises:
        UserError: weights are missing or are pickles.
    """
    is_new = args.from_scratch or args.model == TINY
    files = None if is_new else config.dtype
    frozen = files if args.lora_rank else None
    options = dict(dtype=frozen or torch.float32)
    if args.attention != "auto":
        options["attn_implementation"] = args.attention
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
        model = build_empty(config, options)
        reads = not is_new and read_in_prepare(model, args.model)
        if reads or not accelerator.is_main_process:
            return model
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
    model, loading_info = AutoModelForCausalLM.from_pretrained(source(name), **options)
    unknown = sorted(loading_info["unexpected_keys"])
    if unknown and PartialState().is_main_process:  # of a vision tower, say
        notice(f"{name}: weights that the model does not have, such as {unknown[0]}, are left out")
    missing = sorted(loading_info["missing_keys"])
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


def fingerprint(name):
    """What identifies a model: its configuration and its weights; of one of the Hub its commit."""
    if name == TINY:
        return TINY
    folder = find(name)
    if source(name) == name:
        return checksum(folder.name.encode())
    files = [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
    return checksum(*(map_bytes(file).numpy() for file in files))


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


# ------------------------------------------------------------------------------------------ slices
#
# Each process of a sharded model reads its own slices of the files. No process holds the whole
# model, and none waits in a collective of the training for the disk of another.


def build_empty(config, options):
    """A model with real buffers, and tensors that use no memory, since they are never written to.

    Args: options (dict): of `from_config`.
    """
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), **options)
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            like = torch.empty_like(weight, device="cpu")
            setattr(module, name, nn.Parameter(like))
    model.tie_weights()
    return model


def read_in_prepare(model, name):
    """Lets `prepare` read the weights of an empty model, each process the slices that it keeps.

    Returns:
        bool: False: that is not possible, see `find_weights`.
    """
    places = find_weights(model, name)
    if places is not None:
        model.name_or_path = model.config.name_or_path = str(source(name))
        if (find(name) / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(find(name))
        patches.load_shards_with(partial(read_slices, places))
    return places is not None


def find_weights(model, name):
    """Finds the weights of a model in its files; those on the Hub are downloaded.

    Args: model: only its names and shapes are read. name (str): as of `find`.

    Returns:
        dict | None: name -> its file (Path). None: the files do not have just the parameters of the
        model, by their names and shapes; `transformers` can convert them.
    """
    if not keeps_names(model) or hasattr(model.config, "quantization_config"):
        return None
    folder = find(name)
    index = read_json(folder / SAFE_WEIGHTS_INDEX_NAME)
    files = sorted({*index["weight_map"].values()}) if index else [SAFE_WEIGHTS_NAME]
    if source(name) == name:
        snapshot_download(name, allow_patterns=files)
    if not all((folder / file).is_file() for file in files):
        return None
    shapes, places = {}, {}
    for path in (folder / file for file in files):
        with safe_open(path, framework="pt") as file:
            file_shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118 (not a dict)
        shapes |= file_shapes
        places |= dict.fromkeys(file_shapes, path)
    parameters = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}  # also tied ones
    return places if shapes == parameters and every == model.state_dict().keys() else None


def keeps_names(model):
    """Whether `transformers` does not rename, split or join weights, such as those of experts."""
    used = getattr(model, "_weight_conversions", None)  # in reading it
    kept_precise = getattr(model, "_keep_in_fp32_modules", None) and model.dtype != torch.float32
    ignored = getattr(model, "_keys_to_ignore_on_save", None)
    return not (
        used or kept_precise or ignored or get_model_conversion_mapping(model, add_legacy=False)
    )


def read_slices(places, accelerator, model, drawn, cpu_offload=False):
    """Gives a sharded model its weights, in place of `fsdp2_load_full_state_dict` of Accelerate.

    Args:
        places (dict): what `find_weights` returned.
        model: sharded, without memory (on the meta device). It is returned.
        drawn (dict): the state from before; what the files lack, such as adapters, comes from that
            of the main process.
        cpu_offload (bool): whether the shards lie in memory of the CPU.
    """
    values, tensors, state = {}, defaultdict(dict), {}
    for name, weight in model.state_dict(keep_vars=True).items():
        if weight not in values:  # else it is tied
            layout = dict(device_mesh=weight.device_mesh, placements=weight.placements)
            plain = name.removeprefix("base_model.model.").replace(".base_layer.", ".")  # of peft
            if plain in places:
                value = empty(weight.shape, dtype=weight.dtype, **layout)
            else:
                source = drawn[name].detach().to(weight.device_mesh.device_type)
                value = distribute_tensor(source, **layout)
            values[weight] = value.to("cpu") if cpu_offload else value
            if plain in places:
                tensors[places[plain]][plain] = values[weight]
        state[name] = values[weight]
    run_on_all(accelerator, lambda: _fill(tensors))
    model.load_state_dict(state, assign=True)
    return model


def _fill(tensors):
    for path, weights in tensors.items():
        with safe_open(path, framework="pt") as file:
            for name, weight in weights.items():
                start, part = own_part(weight)
                if part.numel():  # of few rows, some processes have none
                    ranges = zip(start, part.shape, strict=True)
                    slices = tuple(slice(first, first + size) for first, size in ranges)
                    part.copy_(file.get_slice(name)[slices])  # and to the dtype of the model


def own_part(weight):
    """The index at which the part of this process begins (tuple), and that part (a tensor)."""
    _, start = compute_local_shape_and_global_offset(
        weight.shape, weight.device_mesh, weight.placements
    )
    return start, weight.to_local()


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
