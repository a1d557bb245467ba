"""The model card of a run, whose code is run here, and its upload. (promises/test_push_to_hub.py)"""

import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from harness.launches import ROOT, load_script
from huggingface_hub.utils import filter_repo_objects
from PIL import Image

from utils.images.augment import normalize
from utils.report import model_card
from utils.run import files
from utils.run.failures import UserError


def card_of(script, card):
    """The card of a run of `script` whose model says `card` about itself."""
    arguments = {"batch_size": 96, "dataset": "synthetic"}
    topology = {"processes": 2, "device": "cpu"}
    record = {"arguments": arguments, "command": [f"scripts/{script}"], "topology": topology}
    results = {"global_step": 1000, "train_seconds": 61.0}
    return model_card.render(record | {"data": {}}, results, **card)


def code_in(card):
    return card.split("```python\n")[1].split("```")[0]


@pytest.mark.parametrize("name", ["net", "resnet18", "fastnet"])
def test_the_card_of_train_cifar_loads_the_model_with_its_script(name, tmp_path, monkeypatch):
    torch.manual_seed(0)
    script = load_script("train_cifar")
    model = script.build_model(name, 3)
    with torch.no_grad():
        for tensor in (*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())):
            tensor.add_(0.01 * torch.rand_like(tensor))
    mean, std = torch.tensor([125.3, 123.0, 113.9]), torch.tensor([63.0, 62.1, 66.7])
    config = {"model": name, "class_names": ["cat", "dog", "yak"]}
    config |= {"mean": mean.tolist(), "std": std.tolist()}
    files.write_weights(tmp_path, model, config)
    monkeypatch.setattr(sys, "argv", ["scripts/train_cifar.py"])
    card = card_of("train_cifar.py", script.describe_model(config))
    assert "Classes: cat, dog, yak." in card and "pipeline_tag: image-classification" in card
    pixels = torch.randint(256, (32, 32, 3), dtype=torch.uint8)
    Image.fromarray(pixels.numpy()).save(tmp_path / "image.png")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    names = {}
    with torch.no_grad():
        exec(code_in(card), names)
        expected = model.eval()(normalize(pixels.permute(2, 0, 1)[None], mean, std)).softmax(1)[0]
    assert torch.allclose(names["probabilities"], expected, atol=1e-4)


def test_the_card_of_a_gpt_loads_it_with_its_script(tmp_path, monkeypatch):
    module, sizes = load_script("train_gpt"), dict(n_layer=1, n_head=2, n_embd=16, block_size=8)
    model = module.GPT(**sizes)
    files.write_weights(tmp_path, model, sizes)
    monkeypatch.setattr(sys, "argv", ["scripts/train_gpt.py"])
    card = card_of("train_gpt.py", module.describe_model(sizes))
    assert "pipeline_tag: text-generation" in card and "`python train_gpt.py --sample . " in card
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    names = {}
    exec(code_in(card), names)
    loaded = names["model"].state_dict()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in loaded.items())


RECORD = {
    "arguments": {"dataset": "a_b", "batch_size": 1500},
    "command": ["scripts/train_it.py", "--lr", "1"],
    "topology": {"processes": 2, "device": "H200"},
    "data": {},
}
RESULTS = {"train_seconds": 119.4, "global_step": 12000, "val_accuracy": 0.5, "test_loss": 1.25}
RESULTS |= {"val_top5": 0.75, "val_samples": 9, "train_loss": 3.0, "test_note": "x"}
RESULTS |= {"val_accuracy_standard_error": 0.01}


def test_a_card(tmp_path, capsys, monkeypatch):
    said = dict(title="A net", library="torchvision", task="image-classification")
    run = SimpleNamespace(path=tmp_path, record=RECORD, results=RESULTS)
    model_card.write(run, **said, about="Two classes.", usage=" use it\n")
    card = (tmp_path / "README.md").read_text()
    head, _, rest = card.partition("# A net\n\n")
    assert head == (
        "---\nlibrary_name: torchvision\npipeline_tag: image-classification\ntags:\n- train_it\n"
        "---\n\n"
    )
    assert rest.startswith(
        "Trained with `train_it.py` on a\\_b: 12,000 optimizer steps of 1,500 samples, 119 s on 2 x "
        "H200.\n\n| metric | value |\n|---|---|\n| val accuracy | 50.00% ± 1.00% |\n"
        "| test loss | 1.2500 |\n| val top5 | 75.00% |\n\nTwo classes.\n\n`args.json` has all argum"
    )
    assert "history. `model.safetensors` has the weights;" in rest
    assert "\n\n## Use\n\nuse it\n\nTo run it without any of its code" in rest
    assert rest.endswith("scripts/recipes/onnx.diff\n    python scripts/export.py THIS_FOLDER\n")
    # Of a script that says nothing.
    files.write_weights(
        tmp_path, torch.nn.Linear(2, 2), {"model": "net", "class_names": ["a", "b"]}
    )
    run.record = {**RECORD, "arguments": {"batch_size": 1}}
    run.results = {**RESULTS, "train_seconds": 120.0}
    model_card.write(run)
    card = (tmp_path / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: pytorch\ntags:\n- train_it\n---\n\n# A model of tr")
    assert "Trained with `train_it.py`: 12,000 optimizer" in card and " 2 min on 2 x" in card
    assert "75.00% |\n\n`args.json` has" in card
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(code_in(card), names)
    assert names["tensors"].keys() == {"weight", "bias"}
    metadata = {"license": "mit", "base_model": "me/base"}
    record = {**RECORD, "data": {"data": "mine"}}
    card = model_card.render(record, RESULTS, metadata=metadata, weights="They are here.")
    assert "license: mit\nbase_model: me/base\n" in card and "history. They are here.\n" in card
    assert "`train_it.py` on mine: " in card
    run.record = {}
    model_card.write(run)
    assert "warning: the model card README.md is missing (KeyError" in capsys.readouterr().err


def test_the_command_is_for_a_script_that_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "my scripts" / "train.py")])
    assert model_card.command("look.py", "run") is None
    (tmp_path / "my scripts").mkdir()
    (tmp_path / "my scripts" / "look.py").touch()
    words = ["python", str(tmp_path / "my scripts" / "look.py"), "my run", "--prompt", "The "]
    assert shlex.split(model_card.command("look.py", Path("my run"), "--prompt", "The ")) == words


# -------------------------------------------------------------------------------------- the Hub

KEPT = "README.md args.json curves.png model.safetensors tensorboard/a/events".split()
TOP = "config.json adapter_model.safetensors".split()  # where transformers and peft look for them
LEFT = ".lock checkpoints/step_00000001/model.safetensors profile/trace.json".split()


def test_a_repository_needs_a_name_and_a_token(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    with pytest.raises(UserError, match="--push_to_hub a/b/c: "):
        model_card.check_repository("a/b/c")
    model_card.check_repository("a/b")
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(UserError, match="--push_to_hub a/b needs a token of the Hub: run `hf auth"):
        model_card.check_repository("a/b")


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
    model_card.upload(tmp_path, None)
    monkeypatch.setenv("RANK", "1")
    model_card.upload(tmp_path, "me/model")
    assert not uploaded
    monkeypatch.setenv("RANK", "0")
    model_card.upload(tmp_path, "me/model")
    assert uploaded == {"me/model": {*KEPT, *TOP}}
    assert "uploaded to https://huggingface.co/me/model" in capsys.readouterr().out
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: [][0])
    model_card.upload(tmp_path, "me/model")
    again = f"To try again, run the same command, or: hf upload me/model {tmp_path}\n"
    line = f"warning: could not upload to me/model: list index out of range. {again}"
    assert capsys.readouterr().err == line
