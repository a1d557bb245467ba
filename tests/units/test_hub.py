"""What is uploaded to the Hub, and which names are refused. (promises/test_push_to_hub.py: tokens.)"""

from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.utils import filter_repo_objects

from utils.report import hub
from utils.run.failures import UserError

KEPT = "README.md args.json curves.png model.safetensors tensorboard/a/events".split()
TOP = "config.json adapter_model.safetensors".split()  # where transformers and peft look for them
LEFT = ".lock checkpoints/step_00000001/model.safetensors profile/trace.json".split()


def test_a_repository_needs_a_name_and_a_token(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    with pytest.raises(UserError, match="--push_to_hub a/b/c: "):
        hub.check_repository("a/b/c")
    hub.check_repository("a/b")
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(UserError, match="--push_to_hub a/b needs a token of the Hub: run `hf auth"):
        hub.check_repository("a/b")


def test_everything_but_the_checkpoints_is_uploaded(tmp_path, monkeypatch, capsys):
    for name in (*KEPT, *(f"adapter/{name}" for name in TOP), *LEFT):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    uploaded = {}

    class Api:
        def create_repo(self, repo, exist_ok):
            assert exist_ok
            return huggingface_hub.RepoUrl(f"https://huggingface.co/{repo}")

        def upload_folder(self, repo_id, folder_path, ignore_patterns=()):
            files = [path for path in Path(folder_path).rglob("*") if path.is_file()]
            names = [str(path.relative_to(folder_path)) for path in files]
            kept = filter_repo_objects(names, ignore_patterns=ignore_patterns)
            uploaded.setdefault(repo_id, set()).update(kept)
            return "https://huggingface.co/me/model"

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    hub.upload(tmp_path, None)
    monkeypatch.setenv("RANK", "1")
    hub.upload(tmp_path, "me/model")
    assert not uploaded
    monkeypatch.setenv("RANK", "0")
    hub.upload(tmp_path, "me/model")
    assert uploaded == {"me/model": {*KEPT, *TOP}}
    assert "uploaded to https://huggingface.co/me/model" in capsys.readouterr().out
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: [][0])
    hub.upload(tmp_path, "me/model")
    again = f"To try again, run the same command, or: hf upload me/model {tmp_path}\n"
    line = f"warning: could not upload to me/model: list index out of range. {again}"
    assert capsys.readouterr().err == line
