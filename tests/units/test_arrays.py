"""Images of 32x32 pixels in memory: decoded once."""

import pytest
import torch
from harness.data import noise, write_images
from harness.fakes import accelerator

from utils.images.arrays import load_arrays, load_arrays_to_evaluate, on_device
from utils.run.failures import UserError

CLASSES = ["cat", "dog"]


@pytest.fixture
def folder(tmp_path):
    return write_images(tmp_path / "data", "cat/", "dog/", count=10)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "decoded_images"


def test_images_that_cannot_be_used_are_named(folder, tmp_path, cache, monkeypatch):
    (tmp_path / "data" / "cat" / "4.png").write_bytes(b"a thesis")
    with pytest.raises(UserError, match=r"corrupt image in .*cat/4.png: it is not an image"):
        load_arrays(folder)
    assert not cache.exists() or not list(cache.iterdir())
    noise(0).save(tmp_path / "data" / "cat" / "4.png")
    monkeypatch.setenv("HF_DATASETS_CACHE", "/proc/nowhere")
    with pytest.raises(UserError, match="cannot write the decoded images to /proc/nowhere"):
        load_arrays(folder)


def test_an_evaluation_leaves_out_what_training_refuses(folder, tmp_path):
    """Also if the evaluation came first, and decoded the images for both."""

    def to_evaluate():
        return load_arrays_to_evaluate(folder, CLASSES).splits["all"]

    broken = tmp_path / "data" / "cat" / "4.png"
    broken.write_bytes(b"a thesis")
    split = to_evaluate()
    place = [split.name(i) for i in range(20)].index(str(broken))
    assert (split.labels < 0).nonzero().flatten().tolist() == [place]
    assert not split.images[place].any() and split.images.flatten(1).any(1).sum() == 19
    with pytest.raises(UserError, match=r"corrupt image in .*cat/4.png: it is not an image"):
        load_arrays(folder, val_fraction=0.2)
    noise(9).save(broken)
    repaired, others = to_evaluate(), torch.arange(20) != place
    assert torch.equal(repaired.images[others], split.images[others]) and repaired.labels.min() == 0


def test_a_damaged_file_is_named(folder, cache):
    data = load_arrays(folder)
    assert data.details[-1].startswith("images are used at 32x32 pixels")
    before = data.splits["val"].images.clone()
    assert torch.equal(load_arrays(folder).splits["val"].images, before)
    for file in cache.iterdir():
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"decoded_images/\w+.bin is damaged: delete it, and it is"):
        load_arrays(folder)


def test_synthetic_arrays_are_repeatable_and_disjoint_and_get_a_val_split_too():
    whole, data = (
        load_arrays("synthetic", seed=3),
        load_arrays("synthetic", seed=3, val_fraction=0.1),
    )
    assert [len(data.splits[split]) for split in ("train", "val", "test")] == [4500, 500, 1000]
    assert torch.equal(data.splits["test"].images, whole.splits["test"].images)
    assert data.description != whole.description
    images = torch.cat([split.images for split in data.splits.values()]).numpy()
    assert len({image.tobytes() for image in images}) == 6000
    for split, count in (("train", 5000), ("test", 1000)):
        assert whole.splits[split].labels.bincount(minlength=10).min() > 0.07 * count
    other = load_arrays("synthetic", seed=4).splits["train"]
    assert not torch.equal(other.images, whole.splits["train"].images)


@pytest.mark.slow
def test_a_linear_model_cannot_learn_the_synthetic_data():
    """Ridge regression on all pixels stays far below the 95 % of the default model."""
    data = load_arrays("synthetic").splits

    def pixels(split):
        pixels = split.images.flatten(1).double() / 255
        return torch.cat([pixels, torch.ones(len(split), 1)], 1)

    x = pixels(data["train"])
    y = torch.nn.functional.one_hot(data["train"].labels).double()
    weights = torch.linalg.solve(x.T @ x + 10 * torch.eye(x.shape[1]), x.T @ y)
    predictions = (pixels(data["test"]) @ weights).argmax(1)
    assert (predictions == data["test"].labels).double().mean() < 0.7


def test_images_are_kept_on_the_device(folder):
    data = load_arrays(folder).splits
    batch = data["train"].batch(torch.tensor([4, 2]))
    assert batch["ids"].tolist() == [4, 2] and len(data["train"].first(3)) == 3
    assert torch.equal(batch["labels"], data["train"].labels[[4, 2]])
    assert torch.equal(batch["images"], data["train"].images[[4, 2]])
    for found, name in zip(data["train"].mean_and_std(), ("mean", "std"), strict=True):
        channels = data["train"].images.double().transpose(0, 1).flatten(1)
        expected = channels.mean(1) if name == "mean" else channels.std(1, correction=0)
        torch.testing.assert_close(found, expected.float())
    for split in on_device(accelerator(device="meta"), data).values():
        assert split.images.device.type == split.labels.device.type == "meta"
    assert torch.equal(on_device(accelerator(), data)["val"].images, data["val"].images)
