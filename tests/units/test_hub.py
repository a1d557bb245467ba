"""What is uploaded to the Hub, and what is refused before the run."""

from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.utils import filter_repo_objects

from utils.report import hub
from utils.run.failures import UserError


def test_a_name_that_is_no_repository_is_refused(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    hub.check_repository("a/b")
    with pytest.raises(UserError, match="--push_to_hub a/b/c: "):
        hub.check_repository("a/b/c")


def test_everything_but_the_checkpoints_is_uploaded(tmp_path, monkeypatch, capsys):
    wanted = (
        "README.md",
        "args.json",
        "curves.png",
        "metrics.jsonl",
        "model.safetensors",
        "tensorboard/a/events",
        "sample.txt",
    )
    top = ("config.json", "adapter_model.safetensors")  # where transformers and peft look for them
    for name in (
        *wanted,
        *(f"adapter/{name}" for name in top),
        ".lock",
        "checkpoints/step_00000001/model.safetensors",
        "profile/trace.json",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    uploaded = {}

    class Api:
        def create_repo(self, repo, exist_ok):
            assert exist_ok
            return huggingface_hub.RepoUrl(f"https://huggingface.co/{repo}")

        def upload_folder(self, repo_id, folder_path, ignore_patterns=()):
            files = [
                str(path.relative_to(folder_path))
                for path in Path(folder_path).rglob("*")
                if path.is_file()
            ]
            files = set(filter_repo_objects(files, ignore_patterns=ignore_patterns))
            uploaded.setdefault(repo_id, set()).update(files)
            return "https://huggingface.co/me/model"

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    hub.upload(tmp_path, None)
    assert not uploaded
    hub.upload(tmp_path, "me/model")
    assert (
        uploaded == {"me/model": {*wanted, *top}}
        and "uploaded to https://huggingface.co/me/model" in capsys.readouterr().out
    )
