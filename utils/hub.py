"""Uploads a finished run to the Hugging Face Hub."""

import sys

from utils.exits import UserError

NOT_UPLOADED = ["checkpoints/*", "profile/*", ".*"]


def check(repo):
    """Raises UserError if nothing can be uploaded to `repo`: its name is not valid, or this machine has no token."""
    from huggingface_hub import get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise UserError(f"--push_to_hub {repo}: {str(error).splitlines()[0]}") from None
    if not get_token():
        raise UserError(f"--push_to_hub {repo} needs a token of the Hub: run `hf auth login`, or export HF_TOKEN=...")


def push(folder, repo):
    """Uploads a run's folder without its checkpoints, to a model repository that is made if necessary, and prints its address.

    If that fails, it prints a warning: the run itself is complete.
    """
    from huggingface_hub import HfApi

    try:
        name = HfApi().create_repo(repo, exist_ok=True).repo_id
        print(f"uploaded to {HfApi().upload_folder(repo_id=name, folder_path=folder, ignore_patterns=NOT_UPLOADED)}")
    except Exception as error:  # no network, no permission, no space there: whatever it is, nothing is lost
        reason = str(error).strip().splitlines() or [type(error).__name__]
        again = f"run the same command, or: hf upload {repo} {folder}"
        print(f"warning: could not upload to {repo}: {reason[0]}. To try again, {again}", file=sys.stderr)
