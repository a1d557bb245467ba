"""The classifiers of torchvision by name, with weights of torchvision, of a file, or of a run."""

import difflib
from pathlib import Path
from urllib.error import URLError

import torch
import torchvision
from torch import nn
from torchvision.transforms import InterpolationMode

from utils import weight_files
from utils.compilation import make_attention_deterministic
from utils.run.collectives import run_on_main
from utils.run.failures import UserError

IMAGENET = dict(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])
SUFFIXES = (*weight_files.PICKLES, ".safetensors")


def check_name(name):
    """Raises UserError, with the nearest names, if torchvision has no such classifier."""
    names = torchvision.models.list_models(module=torchvision.models)
    if name not in names:
        nearest = _nearest(name, names)
        raise UserError(f"--model {name}: torchvision has no classifier of this name; {nearest}")
    if name.startswith(("mnasnet", "googlenet", "inception")):
        raise UserError(
            f"--model {name}: not with these scripts (a safetensors file cannot hold an MNASNet, "
            "and Inception networks have several outputs): use efficientnet_b0, say"
        )


def check_size(name, size):
    """Raises UserError if the model cannot take images of so many pixels; computes nothing."""
    try:
        with torch.device("meta"):
            model = torchvision.models.get_model(name)
    except NotImplementedError:  # RegNets compute their widths in tensors
        model = torchvision.models.get_model(name).to("meta")
    try:
        model(torch.empty(2, 3, size, size, device="meta"))
    except (RuntimeError, ValueError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"--image_size {size}: not a size for {name} ({reason})") from None


def build(config):
    """Builds the model of a config, with random weights.

    On GPUs, training it ends with one line if an operation has no deterministic algorithm, as the
    adaptive pooling of AlexNet and the VGGs.
    """
    make_attention_deterministic()
    classes = len(config["class_names"])
    return torchvision.models.get_model(config["model"], weights=None, num_classes=classes)


def find(name, choice):
    """Finds what `--weights` names, for the model called `name`.

    Args:
        choice (str | None): a name of torchvision such as DEFAULT or IMAGENET1K_V2; a file; a run's
            folder or a checkpoint.

    Returns:
        torchvision.models.WeightsEnum | Path | None.

    Raises:
        UserError: there is no such file and no such name; the nearest ones are named.
    """
    if choice is None or Path(choice).exists():
        return choice and Path(choice)
    if choice.endswith(SUFFIXES) or "/" in choice:
        raise UserError(f"weights {choice}: there is no such file or folder")
    enum = torchvision.models.get_model_weights(name)
    names = ["DEFAULT", *enum.__members__] if len(enum) else []
    short = choice.rpartition(".")[2]
    if short not in names:
        nearest = _nearest(short, names)
        raise UserError(f"weights {choice}: torchvision has no such weights of {name}; {nearest}")
    return enum[short] if short in enum.__members__ else enum.DEFAULT


def preprocessing(weights, size=None):
    """Finds out what is done to an image before the model sees it, as these weights were trained.

    Args:
        weights: what `find` returned.
        size (int | None): pixels of the model's input; None: as the weights have it, or 224.

    Returns:
        dict: `resize` (of the shorter side) and `crop` in pixels; `interpolation`; `mean`, `std`,
        for values from 0 to 1.
    """
    values = dict(resize=256, crop=224, interpolation="bilinear", **IMAGENET)
    if isinstance(weights, Path):
        values |= (weight_files.read(weights).config or {}).get("preprocessing", {})
    elif weights is not None:
        presets = weights.transforms()
        values = dict(resize=presets.resize_size[0], crop=presets.crop_size[0])
        values["interpolation"] = presets.interpolation.value
        values |= dict(mean=list(presets.mean), std=list(presets.std))
        if values["interpolation"] != InterpolationMode.BICUBIC.value:
            values["interpolation"] = "bilinear"
    if size:
        values |= dict(resize=round(size * values["resize"] / values["crop"]), crop=size)
    return values


def initialize(accelerator, model, config, choice):
    """Loads the weights `choice` (None: none), as for `find`, into a model before `prepare`.

    Call it on every process; only the main process loads them. The last layer keeps its initial
    weights if it has another size, or if the weights are of a run with other classes than `config`.

    Raises:
        UserError: they cannot be read or downloaded, or are those of another model.
    """
    if choice is not None:
        run_on_main(accelerator, lambda: print(_load(model, config, choice)))


def colors(config, device):
    """The mean and the standard deviation of pixels from 0 to 255, float32 [3] on a device."""
    values = (config["preprocessing"][name] for name in ("mean", "std"))
    return tuple(255 * torch.tensor(value).to(device) for value in values)


def head(model):
    """The name of the last layer, which computes a value per class."""
    return next(reversed(model.state_dict())).rpartition(".")[0]


def freeze(model):
    """Excludes everything but the last layer from training; returns the model."""
    prefix = head(model) + "."
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(prefix))
    return model


def train(model):
    """Calls `model.train()`, except for frozen batch norm: it would go on to collect statistics."""
    model.train()
    for module in model.modules():
        parameters = list(module.parameters(recurse=False))
        frozen = parameters and not any(parameter.requires_grad for parameter in parameters)
        if frozen and isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()


def _load(model, config, choice):
    weights = find(config["model"], choice)
    if isinstance(weights, Path):
        saved = weight_files.read(weights)
        state, file = saved.state, saved.file
        class_names = (saved.config or {}).get("class_names", config["class_names"])
        if class_names != config["class_names"]:
            last = head(model) + "."
            state = {key: value for key, value in state.items() if not key.startswith(last)}
    else:
        file = Path(torch.hub.get_dir()) / "checkpoints" / weights.url.rpartition("/")[2]
        try:
            state = weights.get_state_dict(progress=False, check_hash=True)
        except (URLError, OSError, RuntimeError) as error:
            reason = getattr(error, "reason", error)
            raise UserError(
                f"weights {choice}: cannot download the weights ({reason}): put the file from "
                f"{weights.url} at {file}"
            ) from None
    place = f"{file} (--weights; the network is that of --model, {config['model']})"
    return weight_files.load_into(model, state, place, file)


def _nearest(name, names):
    close = difflib.get_close_matches(name, names, cutoff=0.4)
    return f"the nearest: {', '.join(close)}" if close else f"there are: {', '.join(names)}"
