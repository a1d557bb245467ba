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
{metadata}---

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


@optional("the model card README.md")
def write(run, **about):
    """Writes the card README.md of a finished run: Markdown with metadata for the Hub.

    On the main process only; an error costs the card and a warning.

    Args:
        run (RunFolder): after `finish`.
        about: what the script says about its model: `title`, `about` (a paragraph), `weights`
            (where they are) and `usage` (how to load them), all str; for the Hub `library`, `task`
            (its `library_name` and `pipeline_tag`) and `metadata`, more fields such as
            `base_model`.
    """
    record, results = run.record, run.results
    arguments, topology = record["arguments"], record["topology"]
    script, processes = Path(record["command"][0]), topology["processes"]
    data = for_markdown(record["data"].get("data") or arguments.get("dataset") or "")
    seconds, hardware = results["train_seconds"], f"{processes} x {topology['device']}"
    if topology["device"] == "CPU":
        hardware = plural(processes, "CPU process")
    fields = {"library_name": about.get("library", "pytorch"), "pipeline_tag": about.get("task")}
    fields |= {**about.get("metadata", {}), "tags": [script.stem]}
    fields = {name: value for name, value in fields.items() if value is not None}
    text = CARD.format(
        metadata=yaml.safe_dump(fields, sort_keys=False),
        title=about.get("title", f"A model of {script.name}"),
        script=script.name,
        data=f" on {data}" if data else "",
        length=f"{results['global_step']:,} optimizer steps of {arguments['batch_size']:,} samples",
        time=f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min",
        hardware=hardware,
        figures="\n".join(_rows(results)),
        about=f"{about['about']}\n\n" if about.get("about") else "",
        weights=about.get("weights", WEIGHTS),
        usage=f"{about['usage'].strip()}\n\n{EXPORT}" if "usage" in about else USAGE,
    )
    write_text(run.path / "README.md", text)


def command(script, *words):
    """The command that runs a script beside this one; None if it is not there, as in a copy."""
    path = Path(sys.argv[0]).with_name(script)
    return shlex.join(["python", str(path), *map(str, words)]) if path.exists() else None


def for_markdown(text):
    """Escapes a name for Markdown, also in a table: it is shown as it is, and formats nothing."""
    escaped = html.escape(one_line(text), quote=False)
    return re.sub(r"([\\`*_{}\[\]#+!|~$])", r"\\\1", escaped)


def _rows(results):
    for name, value in results.items():
        shown = name.startswith(("test_", "val_")) and not name.endswith("_standard_error")
        if shown and isinstance(value, float):
            form = ".2%" if "accuracy" in name or "top5" in name else ".4f"
            error = results.get(f"{name}_standard_error")
            spread = "" if error is None else f" ± {error:{form}}"
            yield f"| {name.replace('_', ' ')} | {value:{form}}{spread} |"
