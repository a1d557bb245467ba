"""Images of 32x32 pixels in memory: decoded once."""

import pytest
import torch
from harness.data import noise, write_images
from harness.fakes import accelerator

from utils.images.arrays import in_memory, load_arrays, on_device
from utils.images.sources import described, find_splits
from utils.run.failures import UserError


@pytest.fixture
def folder(tmp_path):
    return write_images(tmp_path / "data", "cat/", "dog/", count=10)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "decoded_images"


def test_an_evaluation_leaves_out_what_training_refuses(folder, tmp_path):
    """Also if the evaluation came first, and decoded the images for both."""

    def to_evaluate():
        return in_memory(described(*find_splits(folder)), skip=True).splits["train"]

    broken = tmp_path / "data" / "cat" / "4.png"
    broken.write_bytes(b"a thesis")
    split = to_evaluate()
    place = [split.name(i) for i in range(20)].index(str(broken))
    assert (split.labels < 0).nonzero().flatten().tolist() == [place]
    assert not split.images[place].any() and split.images.flatten(1).any(1).sum() == 19
    for _ in range(2):
        with pytest.raises(UserError, match=r"corrupt image in .*cat/4.png: it is not an image"):
            load_arrays(folder, val_fraction=0.2)
    noise(9).save(broken)
    repaired, others = to_evaluate(), torch.arange(20) != place
    assert torch.equal(repaired.images[others], split.images[others]) and repaired.labels.min() == 0


def test_a_cache_that_cannot_be_written_is_named(folder, cache, monkeypatch):
    data = load_arrays(folder)
    assert data.details[-1].startswith("images are used at 32x32 pixels")
    before = data.splits["val"].images.clone()
    assert torch.equal(load_arrays(folder).splits["val"].images, before)
    monkeypatch.setenv("HF_DATASETS_CACHE", "/proc/nowhere")
    with pytest.raises(UserError, match="cannot write the decoded images to /proc/nowhere"):
        load_arrays(folder)


def test_images_are_kept_on_the_device(folder):
    data = load_arrays(folder).splits
    batch = data["train"].batch(torch.tensor([4, 2]))
    assert batch["ids"].tolist() == [4, 2] and len(data["train"].first(3)) == 3
    assert torch.equal(batch["labels"], data["train"].labels[[4, 2]])
    assert torch.equal(batch["images"], data["train"].images[[4, 2]])
    mean, std = data["train"].mean_and_std()
    channels = data["train"].images.double().transpose(0, 1).flatten(1)
    torch.testing.assert_close(mean, channels.mean(1).float())
    torch.testing.assert_close(std, channels.std(1, correction=0).float())
    data["train"].images[:, 2] = 7
    assert [float(value[2]) for value in data["train"].mean_and_std()] == [7, 1]
    for split in on_device(accelerator(device="meta"), data).values():
        assert split.images.device.type == split.labels.device.type == "meta"
    assert torch.equal(on_device(accelerator(), data)["val"].images, data["val"].images)
