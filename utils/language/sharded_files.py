"""Files of safetensors of which each process of a sharded model reads and writes its own slices.

No process holds the whole model. Processes exchange no weights, so none waits in a collective of
the training for the disk of another. Needs the packages in scripts/requirements_lm.txt.
"""

import copy
import json
import os
from collections import defaultdict
from functools import partial

import torch
from accelerate import init_empty_weights
from huggingface_hub import snapshot_download, split_torch_state_dict_into_shards
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import distribute_tensor, empty
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME as INDEX
from transformers.utils import SAFE_WEIGHTS_NAME as SINGLE

from utils.run.collectives import run_on_all
from utils.run.files import read_json, write_json
from utils.scale import patches

SHARD_SIZE = "5GB"  # of a file, at most
TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}  # of safetensors


# ---------------------------------------------------------------------------------------- reading


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


def read_in_prepare(model, folder, source):
    """Lets `prepare` read the weights of an empty model, each process the slices that it keeps.

    Returns:
        bool: False: that is not possible, see `find`.
    """
    places = find(model, folder, source)
    if places is not None:
        model.name_or_path = model.config.name_or_path = str(source)
        if (folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder)
        patches.load_shards_with(partial(read, places))
    return places is not None


def find(model, folder, source):
    """Finds the weights of a model in files.

    Args:
        model: only its names and shapes are read.
        folder (Path): with the configuration of the model.
        source: the same folder; or a Hub id, whose files of weights are downloaded.

    Returns:
        dict | None: name -> its file (Path). None: the files do not have just the parameters of the
        model, by their names and shapes; `transformers` can convert them.
    """
    if not keeps_names(model) or hasattr(model.config, "quantization_config"):
        return None
    index = read_json(folder / INDEX)
    names = sorted({*index["weight_map"].values()}) if index else [SINGLE]
    if source != folder:
        snapshot_download(source, allow_patterns=names)
    if not all((folder / name).is_file() for name in names):
        return None
    shapes, places = {}, {}
    for name in names:
        with safe_open(folder / name, framework="pt") as file:
            found = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118 (not a dict)
        shapes |= found
        places |= dict.fromkeys(found, folder / name)
    own = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}  # also tied ones
    return places if shapes == own and every == model.state_dict().keys() else None


def keeps_names(model):
    """Whether `transformers` does not rename, split or join weights, such as those of experts."""
    used = getattr(model, "_weight_conversions", None)  # in reading it
    kept_precise = getattr(model, "_keep_in_fp32_modules", None) and model.dtype != torch.float32
    ignored = getattr(model, "_keys_to_ignore_on_save", None)
    return not (
        used or kept_precise or ignored or get_model_conversion_mapping(model, add_legacy=False)
    )


def read(places, accelerator, model, drawn, cpu_offload=False):
    """Gives a sharded model its weights, in place of `fsdp2_load_full_state_dict` of Accelerate.

    Args:
        places (dict): what `find` returned.
        model: sharded, without memory (on the meta device). It is returned.
        drawn (dict): the state from before; what the files lack, such as adapters, comes from that
            of the main process.
        cpu_offload (bool): whether the shards lie in memory of the CPU.
    """
    values, wanted, state = {}, defaultdict(dict), {}
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
                wanted[places[plain]][plain] = values[weight]
        state[name] = values[weight]
    run_on_all(accelerator, lambda: _fill(wanted))
    model.load_state_dict(state, assign=True)
    return model


def _fill(wanted):
    for path, weights in wanted.items():
        with safe_open(path, framework="pt") as file:
            for name, weight in weights.items():
                start, part = _own_part(weight)
                if part.numel():  # of few rows, some processes have none
                    ranges = zip(start, part.shape, strict=True)
                    slices = tuple(slice(first, first + size) for first, size in ranges)
                    part.copy_(file.get_slice(name)[slices])  # and to the dtype of the model


def _own_part(weight):
    """The index at which the part of this process begins (tuple), and that part (a tensor)."""
    _, start = compute_local_shape_and_global_offset(
        weight.shape, weight.device_mesh, weight.placements
    )
    return start, weight.to_local()


# ---------------------------------------------------------------------------------------- writing


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
        weight_map = dict(sorted(split.tensor_to_filename.items()))
        write_json(folder / INDEX, {"metadata": metadata, "weight_map": weight_map})
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


def write(folder, layout, model, dtype):
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
                start, part = _own_part(weight)
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
