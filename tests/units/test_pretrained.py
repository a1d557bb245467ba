"""The classifiers of torchvision: names, weights, preprocessing, and what is frozen."""

import contextlib

import pytest
import torch
import torchvision
from harness.fakes import accelerator

from utils.images import pretrained
from utils.run import files
from utils.run.failures import UserError

SQUEEZENET = "squeezenet1_1"


def config(model=SQUEEZENET, classes=3):
    return dict(model=model, class_names=list("abcdefgh")[:classes])


def small(classes=3, name=SQUEEZENET):
    return pretrained.build(config(name, classes))


@pytest.mark.parametrize("wrapped", [False, True])
def test_reads_a_pth_and_replaces_a_head_of_another_size(wrapped, tmp_path, capsys):
    state, file, model = small(5).state_dict(), tmp_path / "weights.pth", small(3)
    names = {f"module.{name}": value for name, value in state.items()}
    torch.save({"model": names, "epoch": 3} if wrapped else state, file)
    pretrained.initialize(accelerator(), model, config(), str(file))
    assert torch.equal(model.features[0].weight, state["features.0.weight"])
    said = capsys.readouterr().out
    assert f"initialized from {file}; " in said and "initial weights: classifier.1.weight" in said
    assert pretrained.preprocessing(file)["crop"] == 224  # a file without a config
    before = model.features[0].weight.clone()
    pretrained.initialize(accelerator(), model, config(), None)
    assert torch.equal(model.features[0].weight, before) and not capsys.readouterr().out


@pytest.mark.parametrize("other", [True, False])
def test_a_head_for_other_classes_is_replaced_though_it_has_the_same_size(other, tmp_path, capsys):
    """One of a file that names no classes is kept."""
    earlier, model = small(3), small(3)
    files.write_weights(tmp_path, earlier, {"class_names": ["x", "y", "z"]} if other else {})
    pretrained.initialize(accelerator(), model, config(), str(tmp_path))
    said = "keeps its initial weights: classifier.1.weight" in capsys.readouterr().out
    assert said is other
    assert torch.equal(model.classifier[1].weight, earlier.classifier[1].weight) is not other
    assert torch.equal(model.features[0].weight, earlier.features[0].weight)


def test_unusable_weights_are_refused(tmp_path, monkeypatch):
    torch.save(small(3, "shufflenet_v2_x0_5").state_dict(), tmp_path / "other.pth")
    for name, says in (
        ("other.pth", r"other.pth \(--weights; .* of --model, squeezenet1_1\) holds another model"),
        ("none.pth", "there is no such file"),
        ("IMAGENET1K_V7", "no such weights of squeezenet1_1; the nearest: IMAGENET1K_V1"),
        ("xyz", "no such weights of squeezenet1_1; there are: DEFAULT, IMAGENET1K_V1"),
    ):
        choice = str(tmp_path / name) if name.endswith(".pth") else name
        with pytest.raises(UserError, match=says):
            pretrained.initialize(accelerator(), small(3), config(), choice)
    with pytest.raises(UserError, match=r"no classifier of this name; the nearest: .*resnet50"):
        pretrained.check_name("resnet_50")
    for name in ("mnasnet0_5", "googlenet", "inception_v3"):
        with pytest.raises(UserError, match=rf"{name}: not with .*: use efficientnet_b0"):
            pretrained.check_name(name)

    def no_network(*_, **__):
        raise OSError("no network")

    # The message says where to put the file.
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", no_network)
    says = rf"cannot download .no network: put .* from https://.* at {tmp_path}/hub/checkpoints/sq"
    with pytest.raises(UserError, match=says.replace(".no network", ".*no network.")):
        pretrained.initialize(accelerator(), small(3), config(), "DEFAULT")


def test_colors_are_those_of_pixels():
    mean, std = pretrained.colors(
        {"preprocessing": {"mean": [0, 0.5, 1], "std": [1, 0.2, 0.4]}}, torch.device("cpu")
    )
    assert mean.tolist() == [0, 127.5, 255] and std.tolist() == pytest.approx([255, 51, 102])


def test_the_preprocessing_is_that_of_the_weights(tmp_path):
    enum = pretrained.find("resnet50", "IMAGENET1K_V2")
    expected = dict(resize=232, crop=224, interpolation="bilinear", **pretrained.IMAGENET)
    assert pretrained.preprocessing(enum) == expected
    half = dict(resize=128, crop=112)
    assert pretrained.preprocessing(None, size=112) == expected | half
    assert pretrained.find("resnet50", "ResNet50_Weights.DEFAULT") == enum
    bicubic = pretrained.find("swin_t", "DEFAULT")
    assert pretrained.preprocessing(bicubic)["interpolation"] == "bicubic"
    files.write_weights(tmp_path, small(), {"preprocessing": {"interpolation": "bicubic"}})
    usual = dict(resize=256, interpolation="bicubic")  # what a file does not say
    assert pretrained.preprocessing(tmp_path) == expected | usual
    # Of a run, it is that of the run, whatever the model.
    own = dict(resize=40, crop=32, interpolation="bicubic", mean=[0.1] * 3, std=[0.2] * 3)
    files.write_weights(tmp_path, small(), config() | {"preprocessing": own})
    found = pretrained.find(SQUEEZENET, str(tmp_path))
    assert pretrained.preprocessing(found, size=16) == own | dict(resize=20, crop=16)


def test_frozen_batch_norm_stays_in_evaluation_mode():
    model = pretrained.freeze(small(3, "shufflenet_v2_x0_5"))
    pretrained.train(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    trained = [name for name, weight in model.named_parameters() if weight.grad is not None]
    assert trained == ["fc.weight", "fc.bias"]
    model.requires_grad_(True)
    pretrained.train(model)
    assert all(module.training for module in model.modules())


@pytest.mark.slow
def test_the_last_layer_of_every_model_is_found():
    """Without allocating weights; but RegNet and MaxViT need them: the smallest stand for all."""
    looked_at = 0
    for name in torchvision.models.list_models(module=torchvision.models):
        real = name in ("regnet_x_400mf", "regnet_y_400mf", "maxvit_t")
        if name.startswith(("regnet", "maxvit", "googlenet", "inception")) and not real:
            continue
        with contextlib.nullcontext() if real else torch.device("meta"):
            one, two = (pretrained.build(config(name, classes)) for classes in (3, 7))
        a, b, head = one.state_dict(), two.state_dict(), pretrained.head(one)
        differ = {key for key in a if a[key].shape != b[key].shape}
        assert differ == {key for key in a if key.startswith(head + ".")}, name
        looked_at += 1
    assert looked_at > 50


def test_a_size_that_a_model_cannot_take_is_one_line():
    with pytest.raises(
        UserError, match=r"--image_size 32: not a size for alexnet \(.*\)$"
    ) as error:
        pretrained.check_size("alexnet", 32)
    assert "\n" not in str(error.value)
    pretrained.check_size("resnet18", 8)
    pretrained.check_size("regnet_x_400mf", 64)
