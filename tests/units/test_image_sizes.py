"""Image sizes that a model cannot take are refused."""

import pytest

from utils.images import pretrained
from utils.run.failures import UserError


@pytest.mark.parametrize(
    ("name", "sizes", "says"),
    [
        ("alexnet", {"--image_size": 32}, "--image_size 32: not a size for alexnet"),
        ("vit_b_16", {"--image_size": None, "--train_size": 64}, "--train_size 64: not a size"),
        ("resnet18", {"--image_size": 8, "--train_size": None}, None),
        ("inception_v3", {"--image_size": 96}, None),
        ("regnet_x_400mf", {"--image_size": 64}, None),
    ],
)
def test_a_size_that_a_model_cannot_take_is_one_line(name, sizes, says):
    if says is None:
        assert pretrained.check_sizes(name, sizes) is None
        return
    with pytest.raises(UserError, match=says) as error:
        pretrained.check_sizes(name, sizes)
    assert "\n" not in str(error.value)
