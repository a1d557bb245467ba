"""Functions of train_cifar.py: its models, and what they are given."""

import shutil
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from harness.launches import load_script


@torch.no_grad()
def test_fastnet_classifies_by_the_maximum_of_each_filter():
    model, seen = load_script("train_cifar").build_model("fastnet", 10).eval(), []
    model.blocks.register_forward_hook(lambda module, inputs, output: seen.append(output))
    model.head.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    model(torch.randn(2, 3, 32, 32))
    features, pooled = seen
    assert features.shape == (2, 256, 3, 3) and torch.equal(pooled, features.amax((2, 3)))


def test_views_are_weighted_and_mirrored():
    """Half of the weight for the image, a quarter for each shift by a pixel, with its mirror image."""
    script, seen = load_script("evaluate"), []

    def model(x):
        seen.append(x)
        return x.flatten(1)[:, :5]

    images = torch.arange(2 * 3 * 36).view(2, 3, 6, 6).float()
    outputs = script.predict_views(model, images)
    padded = F.pad(images, (1, 1, 1, 1), mode="reflect")
    up, down = padded[:, :, :6, :6], padded[:, :, 2:, 2:]
    views = [images, images.flip(3), up, up.flip(3), down, down.flip(3)]
    assert all(torch.equal(a, b) for a, b in zip(seen, views, strict=True))
    weights = (0.25, 0.25, 0.125, 0.125, 0.125, 0.125)
    expected = sum(w * view.flatten(1)[:, :5] for w, view in zip(weights, views, strict=True))
    assert torch.equal(outputs, expected)


def test_the_image_size_grows():
    size = load_script("train_cifar").image_size_at
    fast = SimpleNamespace(model="fastnet", lr_schedule="linear")
    assert [size(p, fast) for p in (0.01, 0.6, 0.61, 0.8, 0.81, 1)] == [24, 24, 28, 28, 32, 32]
    assert size(0.1, SimpleNamespace(model="net", lr_schedule="linear")) == 32
    assert size(0.1, SimpleNamespace(model="fastnet", lr_schedule="constant")) == 32


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.parametrize("name", ["net", "resnet18", "fastnet"])
def test_compiled_gradients_in_bf16_are_as_near_to_those_in_float32(name):
    """A compiled backward pass computes some values of the forward pass again, in float32.

    If it looks for those that equal a maximum which was rounded to bf16, as the gradient of `amax`
    does, it finds none, and divides by zero.
    """
    torch.manual_seed(0)
    model = load_script("train_cifar").build_model(name, 10)
    images, labels = torch.randn(16, 3, 32, 32), torch.arange(16) % 10

    def gradients(half=True):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            F.cross_entropy(model(images).float(), labels).backward()
        found = [weight.grad for weight in model.parameters() if weight.requires_grad]
        return torch.cat([gradient.flatten() for gradient in found])

    exact, eager = gradients(half=False), gradients()
    model.compile(dynamic=False)
    assert (gradients() - exact).norm() < 1.5 * (eager - exact).norm()
