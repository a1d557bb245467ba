"""LoRA by `peft`, frozen weights, and the folders that a language model is exported to.

Needs the packages in scripts/requirements_lm.txt.
"""

import json
import os
import shutil
import sys
import warnings
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from transformers import AutoTokenizer
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from utils.language import causal_lm
from utils.report.model_card import ADAPTER, MODEL
from utils.run.collectives import run_on_all, run_on_main
from utils.run.failures import UserError
from utils.run.files import read_json, set_usual_mode, sync, write_json

SHARD_SIZE = "5GB"  # of a file, at most
TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}  # of safetensors
# Of peft, about its own call of transformers; every process would print it.
warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
# Of peft, about experts, whose fused weights get no adapters.
warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys did", RuntimeWarning)


def add_lora(model, rank, alpha, dropout, targets):
    """Freezes a model, and adds adapters of low rank to its layers (arXiv:2106.09685), in float32.

    Args:
        rank (int), alpha (float), dropout (float): of the adapters, scaled by alpha / rank.
        targets (list[str]): names of layers; `all-linear`: all but the last.

    Returns:
        PeftModel. Raises UserError if no layer has one of the names, or one is tied to the
        embedding.
    """
    from peft import LoraConfig, get_peft_model  # here, because it takes a second

    layers = {name.rpartition(".")[2] for name, layer in model.named_modules() if _is_matrix(layer)}
    if unknown := set(targets) - layers - {"all-linear"}:
        names = ", ".join(sorted(layers))
        raise UserError(f"--lora_targets {min(unknown)} matches no layer; there are {names}")
    heads = model.get_input_embeddings(), model.get_output_embeddings()
    tied = {n.rpartition(".")[2] for n, layer in model.named_modules() if layer in heads}
    if heads[1] is not None and heads[0].weight is heads[1].weight and tied & set(targets):
        layer = min(tied & set(targets))
        raise UserError(
            f"--lora_targets {layer} is tied to the embedding, which a merge would change, too: "
            "leave it out"
        )
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules="all-linear" if "all-linear" in targets else targets,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config)


def is_adapter(model):
    """Whether a model is a `PeftModel`: none is, as long as nobody has imported `peft`."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def _is_matrix(layer):
    weight = getattr(layer, "weight", None)
    return getattr(weight, "ndim", 0) == 2 and not isinstance(layer, torch.nn.Embedding)


def save_trained_only(model):
    """Leaves frozen parameters out of a model's state: checkpoints then hold the adapter only.

    Call it after `prepare`, which sends the whole state to all processes. `save_state` calls
    `state_dict` and `load_state_dict` on any topology. Loading still requires all that is trained.

    Args: model: unwrapped; without an adapter, nothing is left out. It is returned.
    """
    if not is_adapter(model):
        return model

    def drop_frozen(module, state, prefix, _metadata):
        frozen = _frozen(module)
        for key in list(state):
            name = key.removeprefix(prefix)
            # The scales of a quantized weight have names below its own.
            if {name, name.partition(".weight.")[0] + ".weight"} & frozen:
                del state[key]

    def allow_missing_frozen(module, incompatible):
        frozen = _frozen(module)
        missing = [name for name in incompatible.missing_keys if name not in frozen]
        incompatible.missing_keys[:] = missing

    model.register_state_dict_post_hook(drop_frozen)
    model.register_load_state_dict_post_hook(allow_missing_frozen)
    return model


def _frozen(module):
    weights = module.named_parameters(remove_duplicate=False)
    return {name for name, weight in weights if not weight.requires_grad}


# ----------------------------------------------------------------------------------------- folders


def export(accelerator, folder, model, tokenizer):
    """Writes the weights of a prepared model, or of its adapter; call it on every process.

    Rounds the weights to what is written, so that an evaluation that follows is of that.
    """
    unwrapped = accelerator.unwrap_model(model)
    adapted = is_adapter(unwrapped)
    if not adapted:
        _round_weights(unwrapped)
        if accelerator.is_fsdp2 and _write_shards(accelerator, folder, unwrapped, tokenizer):
            return
    state = accelerator.get_state_dict(model)  # under FSDP gathered from all processes
    dtype = None if adapted else unwrapped.export_dtype
    # The others wait here, and not in a collective that times out.
    run_on_main(accelerator, lambda: write(folder, unwrapped, state, tokenizer, dtype))


def _round_weights(model):
    """Rounds the weights of a model to its `export_dtype`; each keeps its own dtype."""
    with torch.no_grad():
        for weight in model.state_dict().values():  # of a sharded model, this frees gathered ones
            if weight.is_floating_point():
                weight.copy_(weight.to(model.export_dtype))


def write(folder, model, state, tokenizer, dtype=None):
    """Writes `model/` for `AutoModelForCausalLM`, or `adapter/` for `PeftModel`, to a run's folder.

    Args:
        model: unwrapped; a `PeftModel` has an adapter.
        state (dict): its weights, or those of the adapter, by name.
        dtype: of the weights in the files; None: they stay as they are.
    """
    state = {
        name: value.detach().to("cpu", dtype if value.is_floating_point() else None)
        for name, value in state.items()
    }
    # Copies of weights from other devices and processes no longer share memory: tied ones would be
    # written twice.
    first = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        if name in state:
            state[name] = state[first.setdefault(id(weight), name)]
    _complete(_begin(folder, model, state, tokenizer, dtype))


def _write_shards(accelerator, folder, model, tokenizer):
    """As `write`, of a sharded model: each process writes its slices.

    Returns:
        bool: False: it writes nothing, because the names in the files of this model are others.
    """
    dtype, writing = model.export_dtype, folder / f".{MODEL}.writing"

    def begin():
        if causal_lm.keeps_names(model):
            _begin(folder, model, {}, tokenizer, dtype)
            return lay_out(writing, model, dtype)

    layout = run_on_main(accelerator, begin)
    if layout is not None:
        run_on_all(accelerator, lambda: write_slices(writing, layout, model, dtype))
        run_on_main(accelerator, lambda: _complete(writing))
    return layout is not None


def _begin(folder, model, state, tokenizer, dtype):
    """Writes all files of an export, of the weights those in `state`; returns their folder."""
    writing = folder / f".{ADAPTER if is_adapter(model) else MODEL}.writing"
    shutil.rmtree(writing, ignore_errors=True)
    # Whoever loads the model stops where its answers end.
    model.generation_config.eos_token_id = causal_lm.ends(model, tokenizer)["eos_token_id"]
    model.save_pretrained(writing, state_dict=state, max_shard_size=SHARD_SIZE)
    if dtype is not None:  # transformers writes that in which the model was trained
        settings = read_json(writing / "config.json")
        write_json(writing / "config.json", settings | {"dtype": str(dtype).rpartition(".")[2]})
    tokenizer.save_pretrained(writing)
    (writing / "README.md").unlink(missing_ok=True)  # of peft; the run has one
    return writing


def _complete(writing):
    """Gives a folder that is written its name, atomically."""
    folder, part = writing.parent, writing.stem.removeprefix(".")
    for file in writing.iterdir():
        set_usual_mode(file)
        sync(file)
    if part == ADAPTER:
        shutil.rmtree(folder / MODEL, ignore_errors=True)  # an earlier adapter, merged
    shutil.rmtree(folder / part, ignore_errors=True)
    os.replace(writing, folder / part)
    sync(folder)


# ------------------------------------------------------------------------------------------ slices


def lay_out(folder, model, dtype):
    """Makes the files that `save_pretrained` writes of a model, without values; on one process.

    Args:
        folder (Path): it must exist.
        dtype: of the values, one of `TYPES`.

    Returns:
        dict: name of a file -> for each of its weights, the byte at which its values begin.
    """
    state = model.state_dict(keep_vars=True)
    twice = {
        name for name, first in model.all_tied_weights_keys.items() if state[name] is state[first]
    }
    sizes = {
        name: torch.empty(weight.shape, dtype=dtype, device="meta")
        for name, weight in state.items()
        if name not in twice
    }
    split = split_torch_state_dict_into_shards(sizes, max_shard_size=SHARD_SIZE)
    if split.is_sharded:
        metadata = {"total_parameters": model.num_parameters(), **split.metadata}
        index = {"metadata": metadata, "weight_map": dict(sorted(split.tensor_to_filename.items()))}
        write_json(folder / SAFE_WEIGHTS_INDEX_NAME, index)
    return {
        name: _make_file(folder / name, {key: sizes[key] for key in keys})
        for name, keys in split.filename_to_tensors.items()
    }


def _make_file(path, sizes):
    """Writes the header of a file, as safetensors does, and makes it as long as it will be."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, like in sorted(sizes.items()):
        offsets = [end, end := end + like.nbytes]
        shape = list(like.shape)
        header[name] = {"dtype": TYPES[like.dtype], "shape": shape, "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        begin = file.tell()
        file.truncate(begin + end)
    return {name: begin + header[name]["data_offsets"][0] for name in sizes}


def write_slices(folder, layout, model, dtype):
    """Writes the slices of this process into files, and waits until they are on disk.

    Args:
        folder (Path): on a disk that all machines share.
        layout (dict): what `lay_out` returned, with this dtype.
        model: sharded by rows, as FSDP2 does.
    """
    state = model.state_dict()
    for file_name, begins in layout.items():
        # Only to write: to a file that may be read, too, NFS writes whole pages, over what other
        # machines wrote to their part of a page.
        with open(os.open(folder / file_name, os.O_WRONLY), "wb") as file:
            for name, begin in begins.items():
                weight = state[name]
                start, part = causal_lm.own_part(weight)
                if part.numel() == 0 or not _is_first_copy(weight):
                    continue
                row = weight.shape[1:].numel() * dtype.itemsize
                file.seek(begin + start[0] * row)
                values = part.detach().to("cpu", dtype).contiguous().view(-1)
                file.write(values.view(torch.uint8).numpy())
            file.flush()
            os.fsync(file.fileno())


def _is_first_copy(weight):
    """Whether this process is of the first of several copies of a model (hybrid sharding)."""
    placed = zip(weight.device_mesh.get_coordinate(), weight.placements, strict=True)
    return all(place == 0 for place, placement in placed if placement.is_replicate())


# ----------------------------------------------------------------------------------------- loading


def load_trained(path, **options):
    """Loads the model of a run, or any other one, to generate or to evaluate text.

    Args: options: of `from_pretrained`, for the model or the base model of an adapter.

    Returns:
        tuple: the model, its tokenizer, and what it was trained on: `messages`, `prompt` or `text`.
        Raises UserError if it cannot be loaded, or its adapter is that of another model.
    """
    folder = Path(path).expanduser()
    recorded = (read_json(folder / "args.json") or {}).get("data", {})
    if (folder / ADAPTER).is_dir() and not (folder / MODEL).is_dir():
        model, tokenizer = _load_adapted(folder, **options)
    else:
        model, tokenizer = _load(path, **options)
    kind = recorded.get("kind") or ("messages" if tokenizer.chat_template else "text")
    return model, tokenizer, kind


def _load_adapted(folder, **options):
    """The base model of a LoRA run, if it has not changed, with its adapter; and the tokenizer."""
    settings = json.loads((folder / ADAPTER / "adapter_config.json").read_text())
    base = settings.get("base_model_name_or_path")
    if not base:
        raise UserError(f"{folder / ADAPTER} does not say what its base model is")
    model, _ = _load(base, **options)
    trained_on = (read_json(folder / "args.json") or {}).get("data", {}).get("base")
    if trained_on and trained_on != causal_lm.fingerprint(base):
        raise UserError(f"{folder / ADAPTER} was trained on another model than {base} is now")
    with causal_lm.loading(base, "adapter"):
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, folder / ADAPTER)
    return model, AutoTokenizer.from_pretrained(folder / ADAPTER)


def _load(name, **options):
    causal_lm.find(name, "the model")  # or says what is missing
    source = causal_lm.source(name)
    with causal_lm.loading(name, "model"):
        model = causal_lm.load_weights(name, **options)
        return model, AutoTokenizer.from_pretrained(source)


def merge(path):
    """Writes `model/` to the folder of a LoRA run: its base model with the adapter merged.

    Returns:
        str: what was written, and the largest difference of its logits from those with the adapter.

    Raises:
        UserError: there is no adapter, or not its base model; or the merged model is another one.
    """
    folder = Path(path).expanduser()
    if not (folder / ADAPTER).is_dir():
        raise UserError(f"--merge {path}: it has no {ADAPTER}/, as the folder of a LoRA run does")
    # In float32: a small change of a weight would be rounded away in bfloat16.
    model, tokenizer = _load_adapted(folder, dtype=torch.float32)
    tokens = torch.arange(min(64, model.config.get_text_config().vocab_size))[None]
    with torch.no_grad():
        before = model(tokens).logits
        model = model.merge_and_unload()
        difference = (model(tokens).logits - before).abs().max().item()
    if difference > 0.01 * before.std().item():
        raise UserError(
            f"--merge {path}: the merged model has other logits, by up to {difference:.2g}: use "
            "the adapter itself"
        )
    write(folder, model, model.state_dict(), tokenizer, torch.float32)
    return f"written to {folder / MODEL}; logits differ by at most {difference:.1g}"
