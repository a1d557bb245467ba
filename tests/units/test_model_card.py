"""The model card of a run, whose code is run here, and --push_to_hub."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness.launches import ROOT, load_script, run
from PIL import Image

from utils.data.augment import normalize
from utils.run import model_card, weights
from utils.run.failures import UserError

GPT = "scripts/train_gpt.py"
SMALL = (
    "--dataset synthetic --n_layer 1 --n_head 1 --n_embd 8 --block_size 8 --batch_size 4 "
    "--max_train_steps 2 --push_to_hub me/model"
)


def card_of(folder, script, card, **figures):
    """The card of a run of `script` whose model says `card` about itself."""
    arguments = {"batch_size": 96, "dataset": "synthetic"}
    topology = {"processes": 2, "device": "cpu"}
    record = {"arguments": arguments, "command": [f"scripts/{script}"], "topology": topology}
    model_card.write(
        folder, record, {"global_step": 1000, "train_seconds": 61.0, **figures}, **card
    )
    return (folder / "README.md").read_text()


def code_in(card):
    return card.split("```python\n")[1].split("```")[0]


@pytest.mark.parametrize("name", ["net", "resnet18", "fastnet"])
def test_the_card_of_train_cifar_loads_the_model_in_plain_torch(name, tmp_path, monkeypatch):
    torch.manual_seed(0)
    script = load_script("train_cifar")
    model = script.build_model(name, 3)
    with torch.no_grad():
        for tensor in (*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())):
            tensor.add_(0.01 * torch.rand_like(tensor))
    mean, std = torch.tensor([125.3, 123.0, 113.9]), torch.tensor([63.0, 62.1, 66.7])
    config = {"model": name, "class_names": ["cat", "dog", "yak"]}
    config |= {"mean": mean.tolist(), "std": std.tolist()}
    weights.export(tmp_path, model, config)
    figures = dict(test_accuracy=0.5, test_loss=1.25, test_accuracy_tta=0.5123)
    card = card_of(tmp_path, "train_cifar.py", script.describe_model(config), **figures)
    assert "1,000 optimizer steps of 96 samples, 61 s on 2 x cpu" in card
    assert "Classes: cat, dog, yak." in card and "pipeline_tag: image-classification" in card
    assert (
        "| test accuracy | 50.00% |\n| test loss | 1.2500 |\n| test accuracy tta | 51.23% |" in card
    )
    pixels = torch.randint(256, (32, 32, 3), dtype=torch.uint8)
    Image.fromarray(pixels.numpy()).save(tmp_path / "image.png")
    monkeypatch.chdir(tmp_path)
    names = {}
    with torch.no_grad():
        exec(code_in(card), names)
        expected = model.eval()(normalize(pixels.permute(2, 0, 1)[None], mean, std)).softmax(1)[0]
    assert torch.allclose(names["probabilities"], expected, atol=1e-4)


def test_the_card_of_a_gpt_loads_it_with_its_script(tmp_path, monkeypatch):
    module, sizes = load_script("train_gpt"), dict(n_layer=1, n_head=2, n_embd=16, block_size=8)
    model = module.GPT(**sizes)
    weights.export(tmp_path, model, sizes)
    monkeypatch.setattr(sys, "argv", ["scripts/train_gpt.py"])
    card = card_of(tmp_path, "train_gpt.py", module.describe_model(sizes), val_loss=1.5)
    assert "pipeline_tag: text-generation" in card and "`python train_gpt.py --sample . " in card
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    names = {}
    exec(code_in(card), names)
    loaded = names["model"].state_dict()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in loaded.items())


def test_the_card_of_a_script_that_says_nothing_promises_no_model(tmp_path, monkeypatch):
    weights.export(tmp_path, torch.nn.Linear(2, 2), {"model": "net", "class_names": ["a", "b"]})
    card = card_of(tmp_path, "my_copy.py", {}, val_accuracy=1.0)
    assert "pipeline_tag" not in card and "A model of my_copy.py" in card
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(code_in(card), names)
    assert names["tensors"].keys() == {"weight", "bias"}


# -------------------------------------------------------------------------------------- push_to_hub


def test_a_run_without_a_token_ends_before_anything_is_written(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "HF_TOKEN"} | {
        "HF_HOME": str(tmp_path / "hf")
    }
    command = [
        sys.executable,
        str(ROOT / GPT),
        "--output_dir",
        str(tmp_path / "out"),
        *SMALL.split(),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and not (tmp_path / "out").exists()
    assert done.stderr.splitlines()[-1].startswith(
        "error: --push_to_hub me/model needs a token of the Hub: run `hf auth login`"
    )


def test_a_name_that_is_no_repository_is_refused(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    with pytest.raises(UserError, match="--push_to_hub a/b/c: "):
        model_card.check_repository("a/b/c")
    model_card.check_repository("a/b")


def test_without_a_network_the_run_is_complete_and_can_be_uploaded_later(tmp_path, monkeypatch):
    """Nothing listens on port 9. The same command tries again, although the run has finished."""
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    for says in ("done", "already finished"):
        done = run(None, GPT, SMALL, output_dir=tmp_path / "out")
        warnings = [
            line
            for line in done.stderr.splitlines()
            if line.startswith("warning: could not upload to me/model")
        ]
        assert (
            says in done.stdout
            and len(warnings) == 1
            and f"hf upload me/model {tmp_path / 'out'}" in warnings[0]
        )
    assert json.loads((tmp_path / "out" / "status.json").read_text())["state"] == "finished"
    assert (tmp_path / "out" / "README.md").read_text().startswith("---\nlibrary_name: pytorch\n")


def test_everything_but_the_checkpoints_is_uploaded(tmp_path, monkeypatch, capsys):
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

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
    model_card.upload(tmp_path, "me/model")
    assert (
        uploaded == {"me/model": {*wanted, *top}}
        and "uploaded to https://huggingface.co/me/model" in capsys.readouterr().out
    )


def test_weights_are_found_in_every_format(tmp_path):
    names = ["b.safetensors", "model/a.safetensors", "model/c.safetensors", "adapter/d.safetensors"]
    for name in (*names, "checkpoints/step_1/e.safetensors", "model/config.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    assert [str(name) for name in model_card.weight_files(tmp_path)] == names
    assert model_card.weight_files(tmp_path / "nowhere") == []
