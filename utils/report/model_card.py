"""The model card of a run: how good the model is, how to load and share it."""

import html
import re
import shlex
import sys
from pathlib import Path

import yaml

from utils.report.plots import optional
from utils.run.files import write_text
from utils.run.output import one_line, plural

# Folders in the formats of transformers and peft.
AT_THE_TOP = MODEL, ADAPTER = "model", "adapter"

CARD = """---
library_name: {library}
{metadata}tags:
- {tag}
---

# {title}

Trained with `{script}`{data}: {length}, {time} on {hardware}.

| metric | value |
|---|---|
{figures}

{about}`args.json` has all arguments and versions, `results.json` all figures, and `metrics.jsonl`
their history. {weights}

## Use

{usage}

To share it: `hf upload you/model THIS_FOLDER . --exclude "checkpoints/*"`
"""

WEIGHTS = (
    "`model.safetensors` has the weights; the settings of the model are in its header, as\nJSON."
)
EXPORT = """To run it without any of its code, as in
`onnxruntime.InferenceSession("model.onnx").run(None, {"inputs": inputs})`, export it. The
top of the recipe says what `inputs` are:

    patch -o scripts/export.py scripts/evaluate.py scripts/recipes/onnx.diff
    python scripts/export.py THIS_FOLDER"""

USAGE = """```python
from safetensors.torch import load_file

tensors = load_file("model.safetensors")  # name -> tensor
```"""


def write(run, **about):
    """Writes the model card of a finished run; an error costs it and a warning. Main process only.

    Args:
        run (RunFolder): after `finish`.
        about: as for `render`.
    """
    with optional("the model card README.md"):
        write_text(run.path / "README.md", render(run.record, run.results, **about))


def render(record, results, **about):
    """The text of README.md, in Markdown with metadata for the Hub.

    Args:
        record, results (dict): the contents of args.json and results.json.
        about: what the script says about its model: `title`, `about` (a paragraph), `weights`
            (where they are) and `usage` (how to load them), all str; for the Hub `library`, `task`
            (its `library_name` and `pipeline_tag`) and `metadata`, more fields such as
            `base_model`.

    Returns:
        str.
    """
    arguments, script = record["arguments"], Path(record["command"][0]).name
    data = for_markdown(record["data"].get("data") or arguments.get("dataset") or "")
    seconds = results["train_seconds"]
    fields = {"pipeline_tag": about["task"]} if "task" in about else {}
    fields |= about.get("metadata", {})
    paragraph = f"{about['about']}\n\n" if about.get("about") else ""
    return CARD.format(
        library=about.get("library", "pytorch"),
        metadata=yaml.safe_dump(fields, sort_keys=False) if fields else "",
        tag=Path(script).stem,
        title=about.get("title", f"A model of {script}"),
        script=script,
        data=f" on {data}" if data else "",
        length=f"{results['global_step']:,} optimizer steps of {arguments['batch_size']:,} samples",
        time=f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min",
        hardware=_hardware(record["topology"]["processes"], record["topology"]["device"]),
        figures="\n".join(_rows(results)),
        about=paragraph,
        weights=about.get("weights", WEIGHTS),
        usage=f"{about['usage'].strip()}\n\n{EXPORT}" if "usage" in about else USAGE,
    )


def command(script, *words):
    """The command that runs a script beside this one; None if it is not there, as in a copy."""
    path = Path(sys.argv[0]).with_name(script)
    return shlex.join(["python", str(path), *map(str, words)]) if path.exists() else None


def for_markdown(text):
    """Escapes a name for Markdown, also in a table: it is shown as it is, and formats nothing."""
    escaped = html.escape(one_line(text), quote=False)
    return re.sub(r"([\\`*_{}\[\]#+!|~$])", r"\\\1", escaped)


def _hardware(processes, device):
    return plural(processes, "CPU process") if device == "CPU" else f"{processes} x {device}"


def _rows(results):
    for name, value in results.items():
        shown = name.startswith(("test_", "val_")) and not name.endswith("_standard_error")
        if shown and isinstance(value, float):
            form = ".2%" if "accuracy" in name or "top5" in name else ".4f"
            error = results.get(f"{name}_standard_error")
            spread = "" if error is None else f" ± {error:{form}}"
            yield f"| {name.replace('_', ' ')} | {value:{form}}{spread} |"
