"""The model card of a run: how good the model is, and how to load it without these scripts."""

import sys
from pathlib import Path

import yaml

from utils.run.failures import UserError
from utils.run.files import write_text
from utils.run.output import for_markdown

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
"""

WEIGHTS = (
    "`model.safetensors` has the weights; the settings of the model are in its header, as\nJSON."
)

USAGE = """```python
from safetensors.torch import load_file

tensors = load_file("model.safetensors")  # name -> tensor
```"""

NOT_UPLOADED = ["checkpoints/*", "profile/*", ".*"]
# Folders in the formats of transformers and peft, which the Hub expects at the top.
AT_THE_TOP = MODEL, ADAPTER = "model", "adapter"


def weight_files(folder):
    """The files with the final weights of a run, relative to its folder (Path), sorted."""
    parts = (folder, *(folder / part for part in AT_THE_TOP))
    return [
        file.relative_to(folder) for part in parts for file in sorted(part.glob("*.safetensors"))
    ]


def write(
    folder,
    record,
    results,
    *,
    title=None,
    library="pytorch",
    task=None,
    metadata=None,
    about="",
    weights=WEIGHTS,
    usage=USAGE,
):
    """Writes README.md, in Markdown with metadata for the Hub.

    Args:
        folder (Path): that of the run.
        record, results (dict): the contents of args.json and results.json.
        title, about, weights, usage (str): what the script says about its model: a headline, a
            paragraph, where the weights are, and how to load them.
        library, task (str): the Hub's `library_name` and `pipeline_tag`.
        metadata (dict | None): more fields for the Hub, such as `base_model`.
    """
    arguments, script = record["arguments"], Path(record["command"][0]).name
    data = for_markdown(arguments.get("data") or arguments.get("dataset") or "")
    seconds = results["train_seconds"]
    fields = {**({"pipeline_tag": task} if task else {}), **(metadata or {})}
    card = CARD.format(
        library=library,
        metadata=yaml.safe_dump(fields, sort_keys=False) if fields else "",
        tag=Path(script).stem,
        title=title or f"A model of {script}",
        script=script,
        data=f" on {data}" if data else "",
        length=f"{results['global_step']:,} optimizer steps of {arguments['batch_size']:,} samples",
        time=f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min",
        hardware=f"{record['topology']['processes']} x {record['topology']['device']}",
        figures="\n".join(_rows(results)),
        about=f"{about}\n\n" if about else "",
        weights=weights,
        usage=usage.strip(),
    )
    write_text(Path(folder) / "README.md", card)


def _rows(results):
    for name, value in results.items():
        shown = name.startswith(("test_", "val_")) and not name.endswith("_standard_error")
        if shown and isinstance(value, float):
            share = "accuracy" in name or "top5" in name
            yield f"| {name.replace('_', ' ')} | {f'{value:.2%}' if share else f'{value:.4f}'} |"


def check_repository(repo):
    """Raises UserError if nothing can be uploaded to `repo`: its name is invalid, or no token."""
    from huggingface_hub import get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise UserError(f"--push_to_hub {repo}: {str(error).splitlines()[0]}") from None
    if not get_token():
        raise UserError(
            f"--push_to_hub {repo} needs a token of the Hub: run `hf auth login`, or export "
            "HF_TOKEN=..."
        )


def upload(folder, repo):
    """Uploads a run without its checkpoints to a model repository, which is made if necessary.

    If that fails, it prints a warning: the run itself is complete.
    """
    from huggingface_hub import HfApi

    try:
        name = HfApi().create_repo(repo, exist_ok=True).repo_id
        parts = [part for part in AT_THE_TOP if (Path(folder) / part).is_dir()][:1]
        for part in parts:
            HfApi().upload_folder(repo_id=name, folder_path=Path(folder) / part)
        ignored = NOT_UPLOADED + [f"{part}/*" for part in AT_THE_TOP]
        address = HfApi().upload_folder(repo_id=name, folder_path=folder, ignore_patterns=ignored)
        print(f"uploaded to {address}")
    except Exception as error:  # no network, no permission, no space there: nothing is lost
        reason = str(error).strip().splitlines() or [type(error).__name__]
        again = f"run the same command, or: hf upload {repo} {folder}"
        line = f"warning: could not upload to {repo}: {reason[0]}. To try again, {again}"
        print(line, file=sys.stderr)
