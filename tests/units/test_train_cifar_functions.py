"""Functions of train_cifar.py: its models, and what they are given."""

import shutil

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
