"""The model card of a run, whose code is run here."""

import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from harness.launches import ROOT, load_script
from PIL import Image

from utils.images.augment import normalize
from utils.report import model_card
from utils.run import files

RECORD = {
    "arguments": {"dataset": "a_b", "batch_size": 1500},
    "command": ["scripts/train_it.py", "--lr", "1"],
    "topology": {"processes": 2, "device": "H200"},
    "data": {},
}
RESULTS = {"train_seconds": 119.4, "global_step": 12000, "val_accuracy": 0.5, "test_loss": 1.25}
RESULTS |= {"val_top5": 0.75, "val_samples": 9, "train_loss": 3.0, "test_note": "x"}
RESULTS |= {"val_accuracy_standard_error": 0.01}


def card_of(folder, said, results=RESULTS, **record):
    """The card of a run whose script says `said` about its model."""
    run = SimpleNamespace(path=folder, record=RECORD | record, results=results)
    model_card.write(run, **said)
    return (folder / "README.md").read_text()


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
    card = card_of(tmp_path, script.describe_model(config))
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
    card = card_of(tmp_path, module.describe_model(sizes))
    assert "pipeline_tag: text-generation" in card and "`python train_gpt.py --sample . " in card
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    names = {}
    exec(code_in(card), names)
    loaded = names["model"].state_dict()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in loaded.items())


def test_a_card(tmp_path, capsys, monkeypatch):
    said = dict(title="A net", library="torchvision", task="image-classification")
    card = card_of(tmp_path, said | dict(about="Two classes.", usage=" use it\n"))
    assert card.startswith(
        "---\nlibrary_name: torchvision\npipeline_tag: image-classification\ntags:\n- train_it\n"
        "---\n\n# A net\n\nTrained with `train_it.py` on a\\_b: 12,000 optimizer steps of 1,500 "
        "samples, 119 s on 2 x H200.\n\n| metric | value |\n|---|---|\n"
        "| val accuracy | 50.00% ± 1.00% |\n| test loss | 1.2500 |\n| val top5 | 75.00% |\n\n"
        "Two classes.\n\n`args.json` has all argum"
    )
    assert "history. `model.safetensors` has the weights;" in card
    assert "\n\n## Use\n\nuse it\n\nTo run it without any of its code" in card
    assert "scripts/recipes/onnx.diff\n    python scripts/export.py THIS_FOLDER\n\nTo share" in card
    # Of a script that says nothing.
    config = {"model": "net", "class_names": ["a", "b"]}
    files.write_weights(tmp_path, torch.nn.Linear(2, 2), config)
    cpus = dict(arguments={"batch_size": 1}, topology={"processes": 2, "device": "CPU"})
    card = card_of(tmp_path, {}, RESULTS | {"train_seconds": 120.0}, **cpus)
    assert card.startswith("---\nlibrary_name: pytorch\ntags:\n- train_it\n---\n\n# A model of tr")
    assert "Trained with `train_it.py`: 12,000 optimizer" in card
    assert " 2 min on 2 CPU processes.\n" in card and "75.00% |\n\n`args.json` has" in card
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(code_in(card), names)
    assert names["tensors"].keys() == {"weight", "bias"}
    more = {"metadata": {"license": "mit", "base_model": "me/base"}, "weights": "They are here."}
    card = card_of(tmp_path, more, data={"data": "mine"})
    assert "license: mit\nbase_model: me/base\n" in card and "history. They are here.\n" in card
    assert "`train_it.py` on mine: " in card
    card_of(tmp_path, {}, results={})
    assert "warning: the model card README.md is missing (KeyError" in capsys.readouterr().err


def test_the_command_is_for_a_script_that_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "my scripts" / "train.py")])
    assert model_card.command("look.py", "run") is None
    (tmp_path / "my scripts").mkdir()
    (tmp_path / "my scripts" / "look.py").touch()
    words = ["python", str(tmp_path / "my scripts" / "look.py"), "my run", "--prompt", "The "]
    assert shlex.split(model_card.command("look.py", Path("my run"), "--prompt", "The ")) == words
