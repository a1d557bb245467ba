"""Writes the card of a finished run: what the model is, how good it is, and how to load it without these scripts."""

import ast
import json
from pathlib import Path

from safetensors import safe_open

CARD = """---
{metadata}
---

# {title}

Trained with `{script}`{data}: {steps:,} optimizer steps of {batch_size:,} samples, {time} on {hardware}.

| figure | value |
|---|---|
{figures}

{about}`args.json` has all arguments and versions, `results.json` all figures, and `metrics.jsonl` their history.

## Use

{use}
"""

IMPORTS = """import torch, torchvision
from collections import OrderedDict
from PIL import Image, ImageOps
from safetensors.torch import load_file
from torch import nn
from torchvision.transforms import v2
"""

# The models of train_cifar.py, made of PyTorch's and torchvision's own layers with the same parameter names.
CIFAR = {
    "net": """layers = dict(conv1=nn.Conv2d(3, 6, 5), act1=nn.ReLU(), pool1=nn.MaxPool2d(2), conv2=nn.Conv2d(6, 16, 5))
layers |= dict(act2=nn.ReLU(), pool2=nn.MaxPool2d(2), flat=nn.Flatten(), fc1=nn.Linear(400, 120), act3=nn.ReLU())
model = nn.Sequential(OrderedDict(layers, fc2=nn.Linear(120, 84), act4=nn.ReLU(), fc3=nn.Linear(84, {classes}))).eval()
""",
    "resnet18": """model = torchvision.models.resnet18(num_classes={classes}).eval()
model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
""",
    "fastnet": """sizes = [(24, 64, 1), (64, 64, 0), (64, 256, 1), (256, 256, 0), (256, 256, 1), (256, 256, 0)]
blocks = [m for i, o, pool in sizes for m in (
    nn.Conv2d(i, o, 3, padding=1, bias=False), *[nn.MaxPool2d(2)] * pool, nn.BatchNorm2d(o), nn.GELU())]
model = nn.Sequential(OrderedDict(whiten=nn.Conv2d(3, 24, 2), act=nn.GELU(), blocks=nn.Sequential(*blocks),
    pool=nn.AdaptiveMaxPool2d(1), flat=nn.Flatten(), head=nn.Linear(256, {classes}, bias=False))).eval()
""",
}
CIFAR_USE = """model.load_state_dict(load_file("model.safetensors"))
image = v2.functional.pil_to_tensor(Image.open("picture.png").convert("RGB").resize((32, 32)))
probabilities = model(v2.functional.normalize(image.float(), {mean}, {std})[None]).softmax(1)[0]  # of the classes above
"""

PICTURES = """model = torchvision.models.get_model("{model}", num_classes={classes}{options}).eval()
model.load_state_dict(load_file("model.safetensors"))
resize, crop = v2.Resize({resize}, v2.InterpolationMode("{interpolation}"), antialias=True), v2.CenterCrop({crop})
normalize = v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize({mean}, {std})])
picture = v2.functional.pil_to_tensor(ImageOps.exif_transpose(Image.open("picture.jpg")).convert("RGB"))
probabilities = model(normalize(crop(resize(picture)))[None]).softmax(1)[0]  # of the classes above
"""

GPT = """Next to `{module}.py` and `utils/`: `python {module}.py --sample . --prompt "The "`, or

```python
from safetensors.torch import load_file
from {module} import GPT

model = GPT({sizes}).eval()
model.load_state_dict(load_file("model.safetensors"))
```"""


def card(weights, record, results):
    """The card of a run, Markdown with metadata for the Hub.

    Args:
        weights (Path): its `model.safetensors`.
        record, results (dict): what `args.json` and `results.json` have.
    """
    with safe_open(weights, framework="pt") as file:
        config = json.loads((file.metadata() or {}).get("config", "null")) or {}
    arguments, script, names = record["arguments"], Path(record["command"][0]).name, config.get("class_names", [])
    library, task, title, use = _use(config, names, script)
    metadata = [f"library_name: {library}", *([f"pipeline_tag: {task}"] if task else []), "tags:", f"- {Path(script).stem}"]
    shown = ", ".join(names[:50]) + (f" and {len(names) - 50} more" if len(names) > 50 else "")
    about = f"Classes: {shown}. " if names else ""
    if arguments.get("ema_decay"):
        about += f"The weights are averages with a decay of {arguments['ema_decay']}. "
    topology = record["topology"]
    return CARD.format(
        metadata="\n".join(metadata),
        title=title,
        script=script,
        data=f" on {data}" if (data := arguments.get("pictures") or arguments.get("dataset")) else "",
        steps=results["global_step"],
        batch_size=arguments["batch_size"],
        time=f"{seconds:.0f} s" if (seconds := results["train_seconds"]) < 120 else f"{seconds / 60:.0f} min",
        hardware=f"{topology['processes']} x {topology['device']}",
        figures="\n".join(f"| {name.replace('_', ' ')} | {value} |" for name, value in _figures(results)),
        about=about,
        use=use,
    )


def _figures(results):
    for name, value in results.items():
        if name.startswith(("test_", "val_")) and isinstance(value, float):
            yield name, f"{value:.2%}" if "accuracy" in name or "top5" in name else f"{value:.4f}"


def _use(config, names, script):
    """The library, task, title and last section of the card."""
    options = "".join(f", {name}={value!r}" for name, value in config.get("options", {}).items())
    if "preprocessing" in config:
        code = PICTURES.format(model=config["model"], classes=len(names), options=options, **config["preprocessing"])
        kind = "torchvision", "image-classification", f"{config['model']}, {len(names)} classes"
    elif script == "train_cifar.py" and config.get("model") in CIFAR:  # a copy may have another model of the same name
        colors = {name: [round(value, 3) for value in config[name]] for name in ("mean", "std")}
        code = (CIFAR[config["model"]] + CIFAR_USE).format(classes=len(names), **colors)
        kind = "pytorch", "image-classification", f"{config['model']}, {len(names)} classes"
    elif "n_embd" in config:
        sizes = ", ".join(f"{name}={value}" for name, value in config.items())
        return "pytorch", "text-generation", "A byte-level GPT", GPT.format(sizes=sizes, module=Path(script).stem)
    else:
        code = 'tensors = load_file("model.safetensors")  # name -> tensor'
        kind = "pytorch", None, f"A model of {script}"
    used = {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}
    imported = [line for line in IMPORTS.splitlines() if used & set(line.partition("import ")[2].split(", "))]
    settings = (
        f"; its header has the settings of the model, as JSON: {', '.join(f'`{name}`' for name in config)}" if config else ""
    )
    header = f"`model.safetensors` has the weights{settings}."
    return (*kind, header + "\n\n```python\n" + "\n".join(imported) + f"\n\n{code.strip()}\n```")
