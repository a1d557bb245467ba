"""Uploads a finished run to the Hub."""

import sys
from pathlib import Path

from utils.run.failures import UserError
from utils.run.process import is_main

NOT_UPLOADED = ["checkpoints/*", "profile/*", ".*"]
# Folders in the formats of transformers and peft, which the Hub expects at the top.
AT_THE_TOP = MODEL, ADAPTER = "model", "adapter"


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

    Only the main process does. If that fails, it prints a warning: the run itself is complete.

    Args:
        folder (Path): that of the run.
        repo (str | None): the value of `--push_to_hub`.
    """
    if repo is None or not is_main():
        return
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
