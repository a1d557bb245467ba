"""Writes the card of a trained image classifier: what it is, how good it is, and how to load it without these scripts."""

CARD = """---
library_name: torchvision
pipeline_tag: image-classification
tags:
- image-classification
- {model}
metrics:
- accuracy
---

# {model}, {classes} classes

An image classifier, trained with `{script}` on {data}.

| {split} images | accuracy | among the first {first} | loss |
|---|---|---|---|
| {count:,} | {accuracy:.2%} | {top5:.2%} | {loss:.4f} |

{steps:,} optimizer steps of {batch_size} images{ema}. Classes: {names}. `predictions.png`, `mistakes.png` and `curves.png` show
more, and `args.json` has all arguments.

## Use

`model.safetensors` has the weights; its header has the names of the classes and the preprocessing, as JSON.

```python
import torch, torchvision
from PIL import Image, ImageOps
from safetensors.torch import load_file
from torchvision.transforms import v2

{code}
```
"""

CODE = """model = torchvision.models.get_model("{model}", num_classes={classes}{options}).eval()
model.load_state_dict(load_file("model.safetensors"))
resize, crop = v2.Resize({resize}, v2.InterpolationMode("{interpolation}"), antialias=True), v2.CenterCrop({crop})
normalize = v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize({mean}, {std})])
picture = v2.functional.pil_to_tensor(ImageOps.exif_transpose(Image.open("picture.jpg")).convert("RGB"))
probabilities = model(normalize(crop(resize(picture)))[None]).softmax(1)[0]"""


def card(config, description, split, metrics, details, *, steps, batch_size, ema_decay, script):
    """The text of the card, Markdown with metadata for the Hub.

    Args:
        config (dict): what the header of `model.safetensors` has: `model`, `options`, `class_names`, `preprocessing`.
        description (str): of the data.
        split (str): on which `metrics` (`accuracy`, `top5`, `loss`) were measured.
        details (dict): `labels`, int64 [samples], of that split; -1 does not count.
    """
    names = config["class_names"]
    options = "".join(f", {name}={value!r}" for name, value in config["options"].items())
    code = CODE.format(model=config["model"], classes=len(names), options=options, **config["preprocessing"])
    shown = ", ".join(names[:50]) + (f" and {len(names) - 50} more" if len(names) > 50 else "")
    ema = f", weights averaged with a decay of {ema_decay}" if ema_decay else ""
    count = (details["labels"] >= 0).sum().item()
    figures = dict(split=split, count=count, first=min(5, len(names)), **metrics)
    about = dict(model=config["model"], classes=len(names), names=shown, data=description, script=script)
    return CARD.format(**about, **figures, code=code, steps=steps, batch_size=batch_size, ema=ema)
