"""Images of 32x32 pixels in memory: decoded once."""

import numpy as np
import pytest
import torch
from harness.data import noise
from harness.fakes import accelerator

from utils.images.arrays import (
    load_arrays,
    load_arrays_to_evaluate,
    on_device,
    synthetic_arrays,
)
from utils.images.decoding import Encoded
from utils.run.failures import UserError

CLASSES = ["cat", "dog"]


def make_folders(root, *splits, size=(32, 32)):
    """Writes ten PNGs of each class and split, with random pixels."""
    for place, split in enumerate(splits):
        for label, name in enumerate(CLASSES):
            (root / split / name).mkdir(parents=True)
            for i in range(10):
                noise(1000 * place + 100 * label + i, size).save(root / split / name / f"{i}.png")
    return root


@pytest.fixture
def decoded(monkeypatch):
    """Counts the images that are decoded."""
    seen, real_pixels = [], Encoded.pixels
    monkeypatch.setattr(Encoded, "pixels", lambda self: seen.append(self) or real_pixels(self))
    return seen


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "decoded_images"


def test_images_that_cannot_be_used_are_named(tmp_path, cache, monkeypatch):
    folder = make_folders(tmp_path / "data", "train", "test")
    (folder / "train" / "cat" / "4.png").write_bytes(b"a thesis")
    with pytest.raises(UserError, match=r"corrupt image in .*train/cat/4.png: it is not an image"):
        load_arrays(str(folder))
    assert not cache.exists() or not list(cache.iterdir())
    noise(0).save(folder / "train" / "cat" / "4.png")
    monkeypatch.setenv("HF_DATASETS_CACHE", "/proc/nowhere")
    with pytest.raises(UserError, match="cannot write the decoded images to /proc/nowhere"):
        load_arrays(str(folder))


def test_an_evaluation_leaves_out_what_training_refuses(tmp_path):
    """Also if the evaluation came first, and decoded the images for both."""
    folder = make_folders(tmp_path / "data", "train") / "train"

    def to_evaluate():
        return load_arrays_to_evaluate(str(folder), CLASSES).splits["all"]

    (folder / "cat" / "4.png").write_bytes(b"a thesis")
    split = to_evaluate()
    place = [split.name(i) for i in range(20)].index(str(folder / "cat" / "4.png"))
    assert (split.labels < 0).nonzero().flatten().tolist() == [place]
    assert not split.images[place].any() and split.images.flatten(1).any(1).sum() == 19
    chosen = split.select(np.array([place + 1]))
    assert chosen.name(0) == split.name(place + 1) and chosen.labels[0] == 0
    with pytest.raises(UserError, match=r"corrupt image in .*cat/4.png: it is not an image"):
        load_arrays(str(folder), val_fraction=0.2)
    noise(9).save(folder / "cat" / "4.png")
    repaired, others = to_evaluate(), torch.arange(20) != place
    assert torch.equal(repaired.images[others], split.images[others]) and repaired.labels.min() == 0


def test_a_damaged_file_is_named(tmp_path, cache):
    folder = str(make_folders(tmp_path / "data", "train", "test"))
    before = load_arrays(folder).splits["test"].images.clone()
    assert torch.equal(load_arrays(folder).splits["test"].images, before)
    for file in cache.iterdir():
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"decoded_images/\w+.bin is damaged: delete it, and it is"):
        load_arrays(folder)


def test_synthetic_arrays_get_a_val_split_too():
    whole, data = synthetic_arrays(3), load_arrays("synthetic", seed=3, val_fraction=0.1)
    assert list(whole.splits) == ["train", "test"]
    assert [len(data.splits[split]) for split in ("train", "val", "test")] == [4500, 500, 1000]
    assert torch.equal(data.splits["test"].images, whole.splits["test"].images)
    seen = {image.numpy().tobytes() for image in data.splits["train"].images}
    assert not any(image.numpy().tobytes() in seen for image in data.splits["val"].images)
    assert data.description != load_arrays("synthetic", seed=3).description


def test_images_are_kept_on_the_device():
    data = synthetic_arrays(0, train=10, test=5).splits
    batch = data["train"].batch(torch.tensor([4, 2]))
    assert batch["ids"].tolist() == [4, 2] and len(data["train"].first(3)) == 3
    assert torch.equal(batch["labels"], data["train"].labels[[4, 2]])
    assert torch.equal(batch["images"], data["train"].images[[4, 2]])
    for split in on_device(accelerator(device="meta"), data).values():
        assert split.images.device.type == split.labels.device.type == "meta"
    assert torch.equal(on_device(accelerator(), data)["test"].images, data["test"].images)
