"""Writes the final weights to a safetensors file."""

import json
import os
from pathlib import Path

from safetensors.torch import save_file

from utils.run.files import set_usual_mode, sync


def export(folder, model, config):
    """Writes the weights of an unwrapped model to `model.safetensors` in `folder`, atomically.

    Unwrapped: no DDP and no compile wrapper.

    Args: config (dict): what is needed to build the model again, for the header of the file.
    """
    state, seen = {}, set()
    for name, value in model.state_dict().items():
        value = value.detach().cpu().contiguous()
        storage = value.untyped_storage().data_ptr()
        # safetensors refuses tensors that share memory, such as tied weights.
        state[name] = value.clone() if storage in seen else value
        seen.add(storage)
    temporary = Path(folder) / ".model.safetensors.writing"
    # One key only: safetensors writes several keys in an order that varies from run to run.
    save_file(state, temporary, metadata={"config": json.dumps(config, sort_keys=True)})
    set_usual_mode(temporary)
    sync(temporary)
    os.replace(temporary, Path(folder) / "model.safetensors")
    sync(folder)
