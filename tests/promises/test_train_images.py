"""train_images.py: finds, decodes, transforms images; trains on them with any number of workers."""

import ast
import contextlib
import csv
import io
import json
import math
import os
import platform
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torchvision
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from harness.data import kinds_of_classifiers
from harness.launches import (
    Started,
    final_weights,
    load_script,
    metrics,
    recorded,
    results,
    run,
    run_once,
)
from PIL import Image
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from utils import pretrained, scores
from utils.data import image_cache, shared_batches, transforms
from utils.data.augment import normalize
from utils.data.image_batches import ImageBatches
from utils.data.images import ORIENTATION, BadImage, Encoded
from utils.data.loaders import EpochSampler, already_a_batch
from utils.data.mixing import Mix
from utils.data.sources import find_images
from utils.data.transforms import EvalTransform, TrainTransform
from utils.ema import MovingAverage
from utils.run import weights
from utils.run.failures import UserError

pytestmark = pytest.mark.filterwarnings("ignore:The image decoding and encoding:DeprecationWarning")
IMAGES = "scripts/train_images.py"
PREPROCESS = dict(resize=36, crop=32, interpolation="bilinear", mean=[0.5] * 3, std=[0.25] * 3)
CLASSES = ("cat", "dog", "yak")
IMPORTS = (ast.Import, ast.ImportFrom)


def sample_image(seed=0, size=(60, 40), mode="RGB"):
    """An image of smooth random colors."""
    pixels = np.random.default_rng(seed).integers(0, 256, (3, 4, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize(size, Image.BICUBIC).convert(mode)


def encoded(image, kind="JPEG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def make_photos(folder, per_class=8, splits=("train", "val"), classes=CLASSES):
    """Writes photos of several sizes; without `splits`, the class folders are at the top."""
    for place, split in enumerate(splits or [""]):
        for label, name in enumerate(classes):
            (folder / split / name).mkdir(parents=True)
            for i in range(per_class):
                seed = 1000 * place + 100 * label + i
                (folder / split / name / f"{i}.jpg").write_bytes(
                    encoded(sample_image(seed, (50 + 3 * i, 60 - 2 * i)))
                )
    return folder


def names(images):
    return [os.path.relpath(images.name(i), images.source.root) for i in range(len(images))]


# ----------------------------------------------------------------------------------- finding images


@pytest.mark.parametrize("alias", ["val", "valid", "validation", "test"])
def test_finds_splits_by_their_usual_names(alias, tmp_path):
    make_photos(tmp_path, 3, ("train", alias))
    data = find_images(str(tmp_path), val_fraction=0)
    held_out = "test" if alias == "test" else "val"
    assert data.class_names == list(CLASSES) and list(data.splits) == ["train", held_out]
    assert names(data.splits[held_out]) == [
        f"{alias}/{name}/{i}.jpg" for name in CLASSES for i in range(3)
    ]
    assert data.splits[held_out].labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_splits_by_names_and_seed_only(tmp_path):
    """The same fraction of each class, and the same images wherever the folder is."""
    make_photos(tmp_path / "a", 10, None)
    shutil.copytree(tmp_path / "a", tmp_path / "elsewhere" / "b")
    data = find_images(str(tmp_path / "a"), val_fraction=0.2)
    assert np.bincount(data.splits["val"].labels).tolist() == [2, 2, 2]
    assert sorted(names(data.splits["train"]) + names(data.splits["val"])) == sorted(
        f"{name}/{i}.jpg" for name in CLASSES for i in range(10)
    )
    again = find_images(str(tmp_path / "elsewhere" / "b"), val_fraction=0.2)
    assert names(again.splits["val"]) == names(data.splits["val"])
    assert again.description == data.description
    other = find_images(str(tmp_path / "a"), seed=1, val_fraction=0.2)
    assert names(other.splits["val"]) != names(data.splits["val"])


def test_a_class_may_be_called_train_and_hidden_files_do_not_count(tmp_path):
    make_photos(tmp_path, 3, None, ("train", "bus"))
    (tmp_path / "bus" / "deep").mkdir()
    shutil.move(tmp_path / "bus" / "0.jpg", tmp_path / "bus" / "deep" / "0.JPG")
    (tmp_path / "bus" / "._1.jpg").write_bytes(b"resource fork")
    (tmp_path / ".ipynb_checkpoints").mkdir()
    (tmp_path / "bus" / "photo.heic").write_bytes(b"")
    data = find_images(str(tmp_path), val_fraction=0.3)
    assert data.class_names == ["bus", "train"] and sum(map(len, data.splits.values())) == 6
    assert "bus/deep/0.JPG" in names(data.splits["train"]) + names(data.splits["val"])
    left_out = [line for line in data.details if line.startswith("left out")]
    assert left_out == [
        "left out: .heic files, which Pillow cannot read (convert them to JPEG): 1 (bus/photo.heic)",
        "left out: hidden files: 1 (bus/._1.jpg)",
        "left out: hidden folders: 1 (.ipynb_checkpoints)",
    ]


def empty_class(folder):
    make_photos(folder, 2)
    shutil.rmtree(folder / "val" / "dog")


def unknown_class(folder):
    make_photos(folder, 2)
    (folder / "val" / "dog").rename(folder / "val" / "emu")


def loose(folder):
    (folder / "1.jpg").write_bytes(encoded(sample_image()))


def empty_val(folder):
    make_photos(folder, 2, ("train",))
    (folder / "val").mkdir()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (loose, "has no class folder (1 image is directly in it)"),
        (lambda folder: make_photos(folder, 2, classes=("cat",)), "has only one class, cat"),
        (lambda folder: make_photos(folder, 1, None), "class cat has 1 image"),
        (empty_class, "its val split has no image of class dog"),
        (unknown_class, "class emu of its val split is not in its train split"),
        (empty_val, "its val split has no class folder"),
        (lambda folder: None, "has no class folder"),
    ],
)
def test_another_layout_is_refused(make, says, tmp_path):
    make(tmp_path)
    with pytest.raises(UserError) as error:
        find_images(str(tmp_path))
    assert says in str(error.value) and "\n" not in str(error.value)


def hub_folder(folder, change=lambda split, rows: rows, splits=("train", "validation")):
    """A data set in the layout of the Hub, with a column of bytes that nobody asked for."""
    import datasets

    features = dict(
        img=datasets.Image(),
        fine_label=datasets.ClassLabel(names=list(CLASSES)),
        note=datasets.Value("string"),
    )
    for split in splits:
        rows = {
            "img": [sample_image(i) for i in range(6)],
            "fine_label": [0, 1, 2, 0, 1, 2],
            "note": ["x"] * 6,
        }
        made = change(split, datasets.Dataset.from_dict(rows, features=datasets.Features(features)))
        made.to_parquet(str(folder / f"{split}-00000-of-00001.parquet"))
    return str(folder)


def test_reads_the_layout_of_the_hub_by_the_types_of_its_columns(tmp_path):
    data = find_images(hub_folder(tmp_path))
    assert data.class_names == list(CLASSES) and data.splits["val"].labels.tolist() == [
        0,
        1,
        2,
        0,
        1,
        2,
    ]
    assert torch.equal(
        data.splits["val"].open(4).pixels(), Encoded(encoded(sample_image(4), "PNG")).pixels()
    )
    assert "row 4" in data.splits["val"].name(4)


def no_labels(split, rows):
    return rows.remove_columns("fine_label").add_column("fine_label", [0, -1, 1, -1, 0, 1])


def second_label(split, rows):
    import datasets

    return rows.add_column("coarse", rows["fine_label"][:]).cast_column(
        "coarse", datasets.ClassLabel(names=list(CLASSES))
    )


def test_unusable_columns_are_refused(tmp_path):
    with pytest.raises(
        UserError, match=r"2 of 6 rows of the train split of .* have no label.*the first is row 1"
    ):
        find_images(hub_folder(make_folder(tmp_path / "a"), no_labels))
    several = hub_folder(make_folder(tmp_path / "b"), second_label)
    with pytest.raises(
        UserError, match="several label columns, fine_label, coarse: give --columns IMAGE LABEL"
    ):
        find_images(several)
    assert find_images(several, label_column="coarse").class_names == list(CLASSES)
    with pytest.raises(UserError, match=r"--columns photo: .* has the columns img"):
        find_images(several, image_column="photo")


def make_folder(folder):
    folder.mkdir()
    return folder


# ----------------------------------------------------------------------------------------- decoding


def exif_rotated(image):
    exif = Image.Exif()
    exif[ORIENTATION] = 6  # to be turned by 90 degrees clockwise
    return encoded(image.transpose(Image.Transpose.ROTATE_90), exif=exif, quality=95)


FORMATS = {
    "gray": (lambda image: encoded(image.convert("L"), quality=95), "L"),
    "palette": (lambda image: encoded(image.convert("P"), "PNG"), "P"),
    "rgba": (lambda image: encoded(image.convert("RGBA"), "PNG"), "RGB"),
    "cmyk": (lambda image: encoded(image.convert("CMYK"), quality=95), "RGB"),
    "webp": (lambda image: encoded(image, "WEBP", quality=95), "RGB"),
    "rotated": (exif_rotated, "RGB"),
    "progressive": (lambda image: encoded(image, progressive=True, quality=95), "RGB"),
    "16 bit": (
        lambda image: encoded(
            Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257), "PNG"
        ),
        "L",
    ),
}


@pytest.mark.parametrize("kind", FORMATS)
def test_reads_images_of_every_kind(kind):
    make, mode = FORMATS[kind]
    original = sample_image(3)
    opened = Encoded(make(original))
    pixels = opened.pixels()
    assert (opened.width, opened.height) == (60, 40)
    assert pixels.shape == (3, 40, 60)
    assert pixels.dtype == torch.uint8
    expected = torch.from_numpy(np.array(original.convert(mode).convert("RGB"))).permute(2, 0, 1)
    assert (pixels.float() - expected.float()).abs().mean() < 4, kind


def test_what_is_transparent_is_white():
    clear = Image.new("RGBA", (8, 8), (255, 0, 0, 0))
    assert (Encoded(encoded(clear, "PNG")).pixels() == 255).all()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"this is a thesis", "not an image"),
        (encoded(sample_image(size=(400, 300)))[:-800], "truncated"),
        (encoded(sample_image(size=(400, 300)), "PNG")[:900], "truncated"),
        (b"", "not an image"),
    ],
)
def test_a_broken_image_is_recognized(data, says):
    with pytest.raises(BadImage, match=says):
        Encoded(data).pixels()


def test_pillow_decodes_to_the_same_pixels_as_torchvision(monkeypatch):
    """Whose decoder is deprecated."""
    data = encoded(sample_image(size=(300, 200)), quality=90)
    pixels = Encoded(data).pixels()
    monkeypatch.setattr("utils.data.images._jpeg_decoder", lambda: None)
    assert torch.equal(pixels, Encoded(data).pixels())
    assert pixels.stride() == Encoded(data).pixels().stride()


def test_a_large_jpeg_is_decoded_to_a_smaller_size_if_that_is_enough(monkeypatch):
    """And shows the same as when it is decoded in full."""
    opened = Encoded(encoded(sample_image(size=(800, 600)), quality=95))
    small = EvalTransform(PREPROCESS)(opened)
    assert Encoded(opened._data).pixels(8).shape == (3, 75, 100)
    assert transforms.reduction_for(800, 600, 72, 72) == 8
    assert transforms.reduction_for(800, 600, 72, 76) == 4
    monkeypatch.setattr(transforms, "REDUCTIONS", ())
    full = EvalTransform(PREPROCESS)(Encoded(opened._data))
    assert (small.float() - full.float()).abs().mean() < 1.5


# --------------------------------------------------------------------------- random, but repeatable


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return make_photos(tmp_path_factory.mktemp("photos"))


@pytest.fixture(scope="module")
def data(photos):
    return find_images(str(photos))


def change(seed=0, **options):
    return TrainTransform(
        seed, 32, PREPROCESS, auto_augment="trivial", random_erasing=0.5, **options
    )


def test_normalization_does_not_depend_on_the_memory_format():
    images = torch.randint(0, 256, (3, 3, 8, 6), dtype=torch.uint8)
    mean, std = torch.tensor([120.0, 110.0, 100.0]), torch.tensor([60.0, 50.0, 40.0])
    expected = normalize(images, mean, std)
    assert torch.allclose(expected, (images - mean.view(3, 1, 1)) / std.view(3, 1, 1), atol=1e-6)
    assert torch.equal(
        normalize(images.contiguous(memory_format=torch.channels_last), mean, std), expected
    )


def test_an_image_depends_on_seed_epoch_and_id_only(data):
    train = data.splits["train"]
    batches = ImageBatches(train, change())
    torch.manual_seed(1)
    together = batches.__getitems__([(2, i) for i in range(24)])["images"]
    drawn = torch.rand(3)
    torch.manual_seed(9)
    for i in (23, 4, 11):
        assert torch.equal(batches.__getitems__([(2, i)])["images"][0], together[i])
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.rand(3))  # nor does it change the numbers that others draw
    other_epoch = batches.__getitems__([(3, i) for i in range(24)])["images"]
    other_seed = ImageBatches(train, change(seed=1)).__getitems__([(2, i) for i in range(24)])[
        "images"
    ]
    for images in (other_epoch, other_seed):
        assert sum(torch.equal(a, b) for a, b in zip(images, together, strict=True)) == 0
    alike = ImageBatches(train.select(np.zeros(24, dtype=np.int64)), change()).__getitems__(
        [(2, i) for i in range(24)]
    )["images"]
    assert not torch.equal(alike[0], alike[1])


def test_an_epoch_has_each_image_once_and_whole_steps_only():
    sampler = EpochSampler(103, 10, seed=3)
    first = list(sampler)
    sampler.set_epoch(1)
    second = list(sampler)
    assert len(first) == len(sampler) == 100 and len({i for _, i in first}) == 100
    assert {epoch for epoch, _ in first} == {0} and {epoch for epoch, _ in second} == {1}
    assert [i for _, i in first] != [i for _, i in second]
    assert list(EpochSampler(103, 10, seed=3)) == first
    assert list(EpochSampler(103, 10, seed=4)) != first


def test_skipping_decodes_nothing(data, monkeypatch):
    """Counts what is decoded after a restart in the middle of an epoch."""
    decoded = []
    real_open = type(data.splits["train"]).open
    monkeypatch.setattr(
        type(data.splits["train"]),
        "open",
        lambda self, index: decoded.append(index) or real_open(self, index),
    )
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True)
    )
    sampler = EpochSampler(24, 8, seed=0)
    dataset = ImageBatches(data.splits["train"], change())
    loader = accelerator.prepare(
        DataLoader(dataset, 4, sampler=sampler, drop_last=True, collate_fn=already_a_batch)
    )
    whole = {"train": loader}
    module = load_script("train_images")
    batches = list(module.epoch_batches(whole, 1, 0, set()))
    assert len(batches) == 6 and sorted(decoded) == list(range(24))
    decoded.clear()
    rest = list(module.epoch_batches(whole, 1, 4, set()))
    assert decoded == torch.cat([batch["ids"] for batch in rest]).tolist() and len(decoded) == 8
    for a, b in zip(rest, batches[4:], strict=True):
        assert torch.equal(a["images"], b["images"]) and torch.equal(a["ids"], b["ids"])
    assert skip_first_batches is module.skip_first_batches


@pytest.mark.parametrize("alphas", [(0.2, 0.0), (0.0, 1.0), (0.2, 1.0)])
def test_mixing_is_that_of_the_global_batch(alphas):
    """Whatever the parts in which it is mixed; images and labels of a pair have the same shares."""
    images = (
        torch.arange(8.0)[:, None, None, None]
        .expand(8, 3, 16, 16)
        .contiguous(memory_format=torch.channels_last)
    )
    labels = torch.arange(8)
    mix, differences = Mix(*alphas, 8, seed=5), 0
    for step in range(6):
        mixed, targets = mix(images, labels, step)
        for parts in (2, 4):
            halves = [
                mix(a, b, step)
                for a, b in zip(images.chunk(parts), labels.chunk(parts), strict=True)
            ]
            assert torch.equal(torch.cat([a for a, _ in halves]), mixed)
            assert torch.equal(torch.cat([b for _, b in halves]), targets)
        expected = (targets * torch.arange(8.0)).sum(1)
        assert torch.allclose(mixed.mean((1, 2, 3)), expected, atol=1e-5)
        pairs = targets.view(4, 2, 8)
        assert torch.allclose(pairs.sum((0, 1)).view(4, 2).sum(1), torch.full((4,), 2.0))
        assert (targets > 0).sum(1).max() <= 2 and all(
            targets[p, (p ^ 1) + 0] + targets[p, p] > 0.999 for p in range(8)
        )
        differences += not torch.equal(mixed, mix(images, labels, step + 1)[0])
    assert differences == 6


# --------------------------------------------------------------------------------------- bad images


@pytest.fixture
def broken(tmp_path):
    """Photos of which two for training and one for validation cannot be read."""
    make_photos(tmp_path / "photos", 4)
    for name in ("train/cat/1.jpg", "train/cat/2.jpg", "val/yak/3.jpg"):
        (tmp_path / "photos" / name).write_bytes(b"no image")
    return tmp_path / "photos"


def test_a_bad_image_stops_or_is_replaced_by_the_next(broken, capsys):
    data = find_images(str(broken))
    with pytest.raises(
        UserError,
        match=r"cannot read .*train/cat/1.jpg: it is not an image; .* --on_bad_image skip",
    ):
        ImageBatches(data.splits["train"], change()).__getitems__([(0, 1)])
    skipping = ImageBatches(data.splits["train"], change(), "skip", replace=True)
    batch = skipping.__getitems__([(0, 1), (0, 3), (0, 1)])
    assert batch["bad"] == [1, 2, 1, 2]
    assert batch["labels"].tolist() == [0, 0, 0]
    assert batch["ids"].tolist() == [1, 3, 1]
    assert torch.equal(batch["images"][0], batch["images"][1])
    assert capsys.readouterr().err.count("train/cat/1.jpg") == 1
    # In an evaluation it does not count.
    batch = ImageBatches(data.splits["val"], EvalTransform(PREPROCESS), "skip").__getitems__(
        [10, 11]
    )
    assert batch["labels"].tolist() == [2, -1] and batch["bad"] == [11]


class OneProcess:
    is_main_process = is_local_main_process = True
    num_processes, process_index = 1, 0


def test_check_names_every_bad_image(broken, capsys):
    data = find_images(str(broken))
    with pytest.raises(
        UserError,
        match=r"2 of 12 images of the train split.*cat/1.jpg.*cat/2.jpg.*--on_bad_image skip",
    ):
        image_cache.check(OneProcess, data.splits["train"], "train", "stop")
    image_cache.check(OneProcess, data.splits["train"], "train", "skip")
    assert "left out: 2 of 12" in capsys.readouterr().out


# -------------------------------------------------------------------------------------------- cache


def test_the_cache_has_what_the_evaluation_sees(data, tmp_path):
    """It is made once, is complete or absent, and is made again if a file changes."""
    val = data.splits["val"]
    cached = image_cache.cached(OneProcess, val, "val", 36, tmp_path)
    (file,) = tmp_path.iterdir()
    keys = list(range(len(val)))
    expected = ImageBatches(val, EvalTransform(PREPROCESS)).__getitems__(keys)
    loaded = ImageBatches(cached, EvalTransform(PREPROCESS)).__getitems__(keys)
    assert torch.equal(loaded["images"], expected["images"]) and torch.equal(
        loaded["labels"], expected["labels"]
    )
    few = np.array([2, 5, 9])
    some = ImageBatches(cached.select(few), EvalTransform(PREPROCESS)).__getitems__([0, 1, 2])
    assert all(torch.equal(some[name], expected[name][few]) for name in ("images", "labels"))
    assert cached.select(few).name(1) == val.name(5)
    assert cached.open(3).pixels().is_contiguous(memory_format=torch.contiguous_format) is False
    before = file.stat().st_mtime_ns
    image_cache.cached(OneProcess, val, "val", 36, tmp_path)
    assert [path.stat().st_mtime_ns for path in tmp_path.iterdir()] == [before]
    assert image_cache.cache_file(val, 36, tmp_path, "bilinear") == file
    assert image_cache.cache_file(val, 40, tmp_path, "bilinear") != file
    os.utime(val.name(0), (1, 1))
    assert image_cache.cache_file(val, 36, tmp_path, "bilinear") != file


def test_an_interrupted_cache_is_absent(data, tmp_path, monkeypatch):
    (tmp_path / "old").mkdir()
    monkeypatch.setattr(image_cache, "CHUNK", 5)
    file = image_cache.cache_file(data.splits["val"], 36, tmp_path, "bilinear")
    val, partly = data.splits["val"], []

    def interrupt(*_):
        partly.extend(tmp_path.glob("*.writing.*"))
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(val, "open", lambda i: interrupt() if i == 17 else type(val).open(val, i))
        image_cache.cached(OneProcess, val, "val", 36, tmp_path)
    assert partly and [path.name for path in tmp_path.iterdir()] == ["old"]
    # As of a process that was killed, here and on another machine that shares the disk.
    for machine in (platform.node(), "elsewhere"):
        (tmp_path / f"{file.stem}.writing.{machine}.999999999").write_bytes(b"half")
    assert len(image_cache.cached(OneProcess, data.splits["val"], "val", 36, tmp_path)) == 24
    others = {"old", f"{file.stem}.writing.elsewhere.999999999"}
    assert {path.name for path in tmp_path.iterdir()} == {file.name} | others
    with file.open("r+b") as opened:
        for size in (file.stat().st_size - 100, 100, 4, 0):
            opened.truncate(size)
            with pytest.raises(UserError, match="is damaged: delete it"):
                image_cache.cached(OneProcess, data.splits["val"], "val", 36, tmp_path)


# ------------------------------------------------------------------------------------------ weights


def small(classes=3, name="squeezenet1_1"):
    return pretrained.build(dict(model=name, options={}, class_names=list("abcdefgh")[:classes]))


def config(model="squeezenet1_1", classes=3):
    return dict(model=model, options={}, class_names=list("abcdefgh")[:classes])


@pytest.mark.parametrize("flag", ["--weights", "--init_from"])
def test_a_run_continues_where_its_first_weights_are_moved_or_gone(flag, photo_folder, tmp_path):
    (tmp_path / "old" / "source").mkdir(parents=True)
    weights.export(tmp_path / "old" / "source", small(), config())

    def train(place, steps):
        words = f"--dataset {photo_folder} {TINY} {flag} {place / 'source'} --num_workers 0"
        run(None, IMAGES, f"{words} --max_train_steps {steps}", output_dir=place / "run")

    train(tmp_path / "old", 1)
    (tmp_path / "old").rename(tmp_path / "new")
    train(tmp_path / "new", 2)
    shutil.rmtree(tmp_path / "new" / "source")
    train(tmp_path / "new", 3)
    assert results(tmp_path / "new" / "run")["resumed_from"] == 2


@pytest.mark.parametrize(
    ("words", "path"),
    [("--weights runs/a", "runs/a"), ("--weights a.pth", "a.pth"), ("--init_from a", "a")]
    + [("--weights DEFAULT", None)],
)
def test_weights_that_are_gone_have_the_same_path_as_before(words, path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train_images.py", "--dataset", "a", *words.split()])
    parsed = load_script("train_images").parse_args().weights
    assert parsed == (str(tmp_path / path) if path else "DEFAULT")


@pytest.mark.parametrize("wrapped", [False, True])
def test_reads_a_pth_and_replaces_a_head_of_another_size(wrapped, tmp_path, capsys):
    state = small(5).state_dict()
    file = tmp_path / "weights.pth"
    torch.save(
        {"model": {f"module.{name}": value for name, value in state.items()}, "epoch": 3}
        if wrapped
        else state,
        file,
    )
    model = small(3)
    pretrained.initialize(OneProcess, model, config(), str(file))
    assert torch.equal(model.features[0].weight, state["features.0.weight"])
    assert "keeps its initial weights: classifier.1.weight" in capsys.readouterr().out


def test_a_head_for_other_classes_is_replaced_though_it_has_the_same_size(tmp_path, capsys):

    earlier = small(3)
    weights.export(tmp_path, earlier, config() | {"class_names": ["x", "y", "z"]})
    model = small(3)
    pretrained.initialize(OneProcess, model, config(), str(tmp_path))
    assert "keeps its initial weights: classifier.1.weight" in capsys.readouterr().out
    assert not torch.equal(model.classifier[1].weight, earlier.classifier[1].weight)
    assert torch.equal(model.features[0].weight, earlier.features[0].weight)


class Executes:
    def __reduce__(self):
        return os.system, ("touch /tmp/executed",)


class Plan:
    total_steps = 100


class Registers(OneProcess):
    """Stands for an accelerator."""

    def register_for_checkpointing(self, ema):
        self.registered = ema


def test_the_decay_of_averaged_weights_rises(capsys):
    """A run shorter than the averaging window must not end with its initial weights."""
    train_images = load_script("train_images")
    decays = [train_images.ema_decay_at(t, 0.99998) for t in (1, 8, 90, 10**6)]
    assert decays == [2 / 11, 9 / 18, 91 / 100, 0.99998]
    model, accelerator = torch.nn.Linear(1, 1, bias=False), Registers()
    model.register_buffer("statistics", torch.zeros(1))
    ema = train_images.build_ema(accelerator, model, 0.9, Plan)
    assert accelerator.registered is ema
    expected = None
    for update in range(40):
        with torch.no_grad():
            model.weight.fill_(update + 1.0)
            model.statistics.fill_(-update)
        ema.update(model)
        decay = min(0.9, (1 + update) / (10 + update))
        expected = decay * expected + (1 - decay) * (update + 1) if update else 1.0
        assert ema.module.weight.item() == pytest.approx(expected, rel=1e-5)
        assert ema.module.statistics.item() == pytest.approx(1 - expected, abs=1e-4)
    # A restart continues where the count was.
    again = train_images.build_ema(accelerator, model, 0.9, Plan)
    again.load_state_dict(ema.state_dict())
    for average in (ema, again):
        average.update(model)
    assert torch.equal(again.module.weight, ema.module.weight)
    assert train_images.build_ema(accelerator, model, 0.0, Plan) is None
    assert capsys.readouterr().err == ""
    train_images.build_ema(accelerator, model, 0.995, Plan)
    assert "averages over about 200 steps, more than the 100 of this run" in capsys.readouterr().err


@pytest.mark.parametrize("name", kinds_of_classifiers())
def test_every_classifier_takes_weights_from_safetensors(name):
    """Such a file has no place for what some classes save with their weights."""
    model = pretrained.without_weights(name)
    model.load_state_dict(dict(model.state_dict()))
    average = MovingAverage(model, lambda updates: 0.9)
    average.load_state_dict(average.state_dict())


def test_the_model_card_of_an_mnasnet_loads_its_weights(tmp_path, monkeypatch):
    described = pretrained.describe("mnasnet0_5", None, ["a", "b"])
    model = pretrained.build(described)
    weights.export(tmp_path, model, described)
    args = SimpleNamespace(ema_decay=0)
    usage = load_script("train_images").describe_model(described, args)["usage"]
    # As on another machine, without this project.
    classes = torchvision.models.MNASNet
    monkeypatch.setattr(classes, "_load_from_state_dict", pretrained.load_mnasnet)
    monkeypatch.chdir(tmp_path)
    code = usage.removeprefix("```python\n").partition("preprocess =")[0]
    found = {}
    exec(code, found)
    loaded = found["model"].state_dict()
    assert all(torch.equal(value, loaded[key]) for key, value in model.state_dict().items())


def test_unusable_weights_are_refused(tmp_path, monkeypatch):
    torch.save(small(3, "shufflenet_v2_x0_5").state_dict(), tmp_path / "other.pth")
    torch.save({"model": Executes()}, tmp_path / "code.pth")
    torch.save([1, 2], tmp_path / "list.pth")
    (tmp_path / "empty.pth").write_bytes(b"")
    for name, says in (
        ("other.pth", "holds another model"),
        ("code.pth", "it would execute code"),
        ("list.pth", "does not hold the weights"),
        ("empty.pth", "cannot read"),
        ("none.pth", "there is no such file"),
        ("IMAGENET1K_V7", "no such weights of squeezenet1_1; the nearest: IMAGENET1K_V1"),
    ):
        choice = str(tmp_path / name) if name.endswith(".pth") else name
        with pytest.raises(UserError, match=says):
            pretrained.initialize(OneProcess, small(3), config(), choice)
    with pytest.raises(UserError, match=r"no classifier of this name; the nearest: .*resnet50"):
        pretrained.check_name("resnet_50")
    # Without a network, the message says where to put the file.
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(
        torch.hub,
        "download_url_to_file",
        lambda *a, **k: (_ for _ in ()).throw(OSError("no network")),
    )
    with pytest.raises(
        UserError,
        match=rf"cannot download .*put the file from https://.* at {tmp_path}/hub/checkpoints/sq",
    ):
        pretrained.initialize(OneProcess, small(3), config(), "DEFAULT")


def test_the_preprocessing_is_that_of_the_weights():
    enum = pretrained.find("resnet50", "IMAGENET1K_V2")
    expected = dict(resize=232, crop=224, interpolation="bilinear", **pretrained.IMAGENET)
    assert pretrained.preprocessing("resnet50", enum) == expected
    assert pretrained.preprocessing("resnet50", None, size=112) == expected | dict(
        resize=128, crop=112
    )
    assert pretrained.preprocessing("resnet50", enum, resize=224)["resize"] == 224
    assert pretrained.find("resnet50", "ResNet50_Weights.DEFAULT") == enum
    inception = pretrained.preprocessing("inception_v3", pretrained.find("inception_v3", "DEFAULT"))
    assert inception["mean"] == [0.5] * 3 and inception["crop"] == 299


def test_frozen_batch_norm_stays_in_evaluation_mode():
    model = pretrained.freeze(small(3, "shufflenet_v2_x0_5"))
    pretrained.train(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [name for name, weight in model.named_parameters() if weight.grad is not None] == [
        "fc.weight",
        "fc.bias",
    ]
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    pretrained.train(model)
    assert all(module.training for module in model.modules())


@pytest.mark.slow
def test_the_last_layer_of_every_model_is_found():
    """Without allocating weights; but RegNet and MaxViT need them: the smallest stand for all."""
    import torchvision

    looked_at = 0
    for name in torchvision.models.list_models(module=torchvision.models):
        real = name in ("regnet_x_400mf", "regnet_y_400mf", "maxvit_t")
        if name.startswith(("regnet", "maxvit")) and not real:
            continue
        options = {"options": pretrained.OPTIONS.get(name, {})}
        with contextlib.nullcontext() if real else torch.device("meta"):
            one, two = (pretrained.build(config(name, classes) | options) for classes in (3, 7))
        a, b, head = one.state_dict(), two.state_dict(), pretrained.head(one)
        assert {key for key in a if a[key].shape != b[key].shape} == {
            key for key in a if key.startswith(head + ".")
        }, name
        looked_at += 1
    assert looked_at > 50


def test_weight_decay_and_learning_rates_of_the_groups():
    model = small(3, "shufflenet_v2_x0_5")
    args = SimpleNamespace(
        lr=0.1, head_lr_multiplier=10, weight_decay=0.3, optimizer="sgd", momentum=0.9
    )
    groups = load_script("train_images").build_optimizer(model, args).param_groups
    found = {
        id(p): (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]
    }
    assert len(found) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        expected = (1.0 if name.startswith("fc.") else 0.1, 0.3 if parameter.ndim > 1 else 0.0)
        assert found[id(parameter)] == pytest.approx(expected), name


@pytest.mark.parametrize("preset", ["scratch", "finetune", "small", "torchvision"])
def test_a_preset_is_a_set_of_known_options_that_flags_override(preset, monkeypatch, capsys):
    train_images = load_script("train_images")
    monkeypatch.setattr(
        sys,
        "argv",
        ["train_images.py", "--dataset", "synthetic", "--preset", preset, "--epochs", "7"],
    )
    wanted = {**train_images.PRESETS[preset], "epochs": 7}
    assert wanted.items() <= vars(train_images.parse_args()).items()
    monkeypatch.setattr(sys, "argv", ["train_images.py", "--help"])
    with pytest.raises(SystemExit):
        train_images.parse_args()
    flags = {f"--{name}" for name in wanted.keys() - {"head_lr_multiplier"}}
    assert flags <= set(capsys.readouterr().out.split())


def test_the_learning_rate_rises_and_falls():
    module, plan = load_script("train_images"), SimpleNamespace(steps_per_epoch=10, total_steps=100)
    for schedule, middle in (("cosine", 0.5), ("linear", 0.5), ("constant", 1.0)):
        args = SimpleNamespace(warmup_epochs=1, lr_schedule=schedule)
        multipliers = [module.lr_multiplier(step, plan, args) for step in range(101)]
        assert multipliers[0] == pytest.approx(1 / 11)
        assert multipliers[9] == pytest.approx(10 / 11)
        assert multipliers[10] == 1
        assert multipliers[55] == pytest.approx(middle) and multipliers[100] == pytest.approx(
            0.0 if middle < 1 else 1.0
        )


# ---------------------------------------------------------------------------------------- real runs

RECIPE = (
    "--model shufflenet_v2_x0_5 --image_size 32 --batch_size 8 --gradient_accumulation_steps 2 "
    "--lr 0.02 --max_train_steps 8 --log_every 1 --eval_every 4 --checkpoint_every 3 "
    "--ema_decay 0.5 --mixup 0.2 --cutmix 1 --auto_augment trivial --random_erasing 0.3 "
    "--track none --eval_samples 10"
)
TINY = "--model squeezenet1_1 --image_size 32 --batch_size 6"


@pytest.fixture(scope="session")
def photo_folder(made_once):
    return made_once("photos", lambda folder: make_photos(folder, per_class=8))


@pytest.fixture(scope="session")
def reference_run(made_once, photo_folder):
    """Two processes with a worker each, killed by nobody: 24 images, 3 steps in an epoch."""
    arguments = f"--dataset {photo_folder} {RECIPE}"
    return run_once(made_once, "images_reference", "2cpu", IMAGES, f"{arguments} --num_workers 1")


def test_evaluations_take_some_images_always_the_same_and_the_last_one_all(reference_run):
    whole, lines = results(reference_run.folder), metrics(reference_run.folder, "val")
    assert "evaluations: 10 of 24 held-out samples, always the same" in reference_run.stdout
    assert [line["images"] for line in lines] == [10, 10] and whole["val_images"] == 24
    accuracy = whole["val_accuracy"]
    error = math.sqrt(accuracy * (1 - accuracy) / 23)
    assert whole["val_accuracy_standard_error"] == pytest.approx(error)
    assert f"val accuracy {accuracy:.4f} ± {error:.4f}" in reference_run.stdout


def test_leaves_everything_it_promises(reference_run, photo_folder):
    folder, done = reference_run.folder, results(reference_run.folder)
    for name in ("README.md", "results.json", "metrics.jsonl", "without_ema/model.safetensors"):
        assert (folder / name).exists(), name
    for name in ("predictions.png", "mistakes.png", "confusion_matrix.png", "curves.png"):
        assert min(Image.open(folder / name).size) > 200, name
    assert done["val_accuracy"] * 24 == pytest.approx(round(done["val_accuracy"] * 24))
    assert "val_top5" not in done
    assert [line["step"] for line in metrics(folder, "val")] == [4, 8] and done["bad_images"] == 0
    with open(folder / "model.safetensors", "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    stored = json.loads(header["__metadata__"]["config"])
    assert stored["class_names"] == list(CLASSES) and stored["model"] == "shufflenet_v2_x0_5"
    assert stored["preprocessing"] == dict(
        resize=37, crop=32, interpolation="bilinear", scaling={}, **pretrained.IMAGENET
    )
    figures, lines = results(folder), metrics(folder, "val")
    assert lines[-1]["trained_loss"] != lines[-1]["loss"]
    assert figures["val_trained_loss"] != figures["val_loss"]
    averaged = load_file(folder / "model.safetensors")
    last = load_file(folder / "without_ema" / "model.safetensors")
    assert averaged.keys() == last.keys()
    assert not torch.equal(averaged["fc.weight"], last["fc.weight"])
    newest = sorted((folder / "checkpoints").iterdir())[-1]
    saved = weights.read(newest)
    assert saved.config == stored and saved.run == folder
    assert all(torch.equal(saved.state[name], value) for name, value in averaged.items())


def test_the_model_card_loads_the_model_without_these_scripts(
    reference_run, photo_folder, tmp_path, monkeypatch
):
    card = (reference_run.folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: torchvision\n") and "| val accuracy | " in card
    code = card.split("```python\n")[1].split("```")[0]
    lines = [node for node in ast.parse(code).body if not isinstance(node, IMPORTS)]
    assert len(lines) == 6
    shutil.copy(reference_run.folder / "model.safetensors", tmp_path)
    shutil.copy(photo_folder / "val" / "dog" / "5.jpg", tmp_path / "image.jpg")
    monkeypatch.chdir(tmp_path)
    names = {}
    with torch.no_grad():
        exec(code, names)
        # The same as what this project computes for the image.
        stored = pretrained.describe("shufflenet_v2_x0_5", str(reference_run.folder), CLASSES)
        opened = Encoded((tmp_path / "image.jpg").read_bytes())
        image = EvalTransform(stored["preprocessing"])(opened).float() / 255
        mean, std = (
            torch.tensor(stored["preprocessing"][name])[:, None, None] for name in ("mean", "std")
        )
        expected = names["model"](((image - mean) / std)[None]).softmax(1)[0]
    assert torch.allclose(names["probabilities"], expected, atol=0.02)


def test_predictions_and_accuracy_agree_where_outputs_are_equal(tmp_path):
    """Of equal outputs `argmax` and `topk` choose different ones."""
    labels, names = torch.arange(20) % 10, [*"abcdefghij"]
    gray = torch.zeros(40, 3, 8, 8, dtype=torch.uint8)
    images = SimpleNamespace(name="image {}".format)
    dataset = SimpleNamespace(__getitems__=lambda ids: {"images": gray[: len(ids)]}, images=images)
    args = SimpleNamespace(output_dir=str(tmp_path))
    saved = SimpleNamespace(file="model.safetensors", run=tmp_path)
    logits = torch.zeros(20, 10)
    evaluate = load_script("evaluate")
    outputs = evaluate.of_each_image(logits, labels)
    evaluate.write_evaluation(args, saved, dataset, outputs, names)
    found = results(tmp_path)
    assert found["val_accuracy"] == pytest.approx(0.1)
    predicted = names[logits.topk(5).indices[0, 0]]
    assert found["per_class"] == {name: float(name == predicted) for name in names}
    rows = list(csv.DictReader((tmp_path / "predictions.csv").open()))
    assert [row["class_1"] for row in rows] == [predicted] * 20
    assert [float(rows[0][f"probability_{rank}"]) for rank in range(1, 6)] == [0.1] * 5
    assert found["val_top5"] == pytest.approx(0.5) and "class_6" not in rows[0]
    assert [row["true_class"] for row in rows] == [*names, *names] and rows[3]["file"] == "image 3"


def test_unreadable_images_are_named_by_evaluate(tmp_path, capsys):
    labels, names = torch.tensor([0, -1, 1]), ["a", "b"]
    images = SimpleNamespace(name="image {}".format)
    gray = torch.zeros(40, 3, 8, 8, dtype=torch.uint8)
    dataset = SimpleNamespace(__getitems__=lambda ids: {"images": gray[: len(ids)]}, images=images)
    args = SimpleNamespace(output_dir=str(tmp_path))
    saved = SimpleNamespace(file="model.safetensors", run=tmp_path)
    logits = torch.tensor([[2.0, 0.0]] * 3)
    evaluate = load_script("evaluate")
    outputs = evaluate.of_each_image(logits, labels)
    evaluate.write_evaluation(args, saved, dataset, outputs, names)
    assert "unreadable, and left out: image 1\n" in capsys.readouterr().out
    rows = list(csv.DictReader((tmp_path / "predictions.csv").open()))
    assert [row["true_class"] for row in rows] == ["a", "", "b"]
    assert [row["class_1"] for row in rows] == ["a", "", "a"]


def test_unreadable_images_do_not_count():
    labels, top = torch.tensor([2, -1, 0, 5]), torch.tensor([[2, 0], [1, 0], [1, 0], [5, 4]])
    found = scores.summarize(labels, torch.tensor([1.0, 99.0, 2.0, 3.0]), top)
    # Of the classes 0, 2 and 5, and of the predictions 1, 2 and 5.
    assert found == pytest.approx(
        {"loss": 2.0, "accuracy": 2 / 3, "balanced_accuracy": 2 / 3, "macro_f1": 2 / 4, "images": 3}
        | {"loss_standard_error": 3**-0.5, "accuracy_standard_error": 1 / 3}
    )
    five = torch.cat([top, torch.full((4, 3), 9)], 1)
    assert scores.summarize(labels, torch.zeros(4), five)["top5"] == 1
    with pytest.raises(UserError, match="none of the 4 images can be read"):
        scores.summarize(torch.full((4,), -1), torch.zeros(4), top)
    shares = scores.class_accuracy(labels, top[:, 0], [*"abcdef"])
    assert list(shares.items()) == [("c", 1), ("f", 1), ("a", 0)]


def test_rare_classes_count_as_much():
    """Values of scikit-learn's balanced_accuracy_score, f1_score and precision_score."""
    labels, predictions = torch.tensor([0] * 8 + [1, 1]), torch.tensor([0] * 6 + [1] * 3 + [0])
    found = scores.summarize(labels, torch.zeros(10), predictions[:, None])
    assert found["accuracy"] == pytest.approx(0.7)
    assert found["balanced_accuracy"] == pytest.approx(0.625)
    assert found["macro_f1"] == pytest.approx(0.6)
    assert scores.class_precision(labels, predictions, ["a", "b"]) == pytest.approx(
        {"a": 6 / 7, "b": 1 / 3}
    )
    assert scores.score(found, "macro_f1") == found["macro_f1"]
    assert scores.score({"loss": 2.0}, "loss") == -2.0


def test_class_weights_do_not_depend_on_the_other_images():
    """So that the loss is the same on any number of processes and micro-batches."""
    module = load_script("train_images")
    labels = np.array([0] * 90 + [2] * 10)
    train = SimpleNamespace(labels=labels)
    data = SimpleNamespace(splits={"train": train}, class_names=["a", "b", "c"])
    args = SimpleNamespace(class_weights="none", label_smoothing=0.0)
    assert module.class_weights(data, "cpu", args) is None
    args.class_weights = "balanced"
    weights = module.class_weights(data, "cpu", args)
    assert weights[labels].mean() == pytest.approx(2 / 3)  # a class has no images
    assert weights[0] * 90 == pytest.approx(weights[2] * 10)
    assert weights[1] == pytest.approx(100 / 3)  # as of a single image
    images = torch.randint(256, (6, 3, 2, 2), dtype=torch.uint8)
    batch = {"images": images, "labels": torch.tensor([0, 0, 2, 0, 0, 0])}
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 3))
    color = 255 * torch.ones(3)  # so that no probability is 0 or 1

    def loss(part):
        some = {name: values[part] for name, values in batch.items()}
        return module.compute_loss(model, some, color, color, None, 1, args, weights)

    halves = (loss(slice(0, 3)) + loss(slice(3, 6))) / 2
    assert loss(slice(0, 6)).item() == pytest.approx(halves.item(), rel=1e-5)
    one = torch.nn.functional.cross_entropy(
        model(module.normalize(images[2:3], color, color)), batch["labels"][2:3]
    )
    assert loss(slice(2, 3)).item() == pytest.approx(weights[2].item() * one.item(), rel=1e-5)


def test_evaluate_finds_the_same_accuracy_and_classifies_a_folder(
    reference_run, photo_folder, tmp_path
):
    """On two processes from the weights, on one from the averages in the last checkpoint."""
    done = results(reference_run.folder)
    run(
        "2cpu",
        "scripts/evaluate.py",
        ["--checkpoint", str(reference_run.folder)],
        output_dir=tmp_path / "a",
    )
    assert results(tmp_path / "a")["val_accuracy"] == done["val_accuracy"]
    assert results(tmp_path / "a")["per_class"] == done["per_class"] and len(done["per_class"]) == 3
    scored = list(csv.DictReader((tmp_path / "a" / "predictions.csv").open()))
    assert list(scored[0])[:4] == ["file", "true_class", "class_1", "probability_1"]
    assert len(scored) == 24 and {Path(row["file"]).parent.name for row in scored} == set(CLASSES)
    assert all(Path(row["file"]).parent.name == row["true_class"] for row in scored)
    right = sum(row["true_class"] == row["class_1"] for row in scored)
    assert right / len(scored) == pytest.approx(done["val_accuracy"])
    checkpoint = reference_run.folder / "checkpoints" / "step_00000008"
    run(None, "scripts/evaluate.py", ["--checkpoint", str(checkpoint)], output_dir=tmp_path / "c")
    assert results(tmp_path / "c")["val_loss"] == pytest.approx(done["val_loss"], rel=1e-5)
    shutil.copytree(photo_folder / "val" / "dog", tmp_path / "holiday" / "day 1")
    (tmp_path / "holiday" / "broken.jpg").write_bytes(b"no image")
    arguments = [
        "--checkpoint",
        str(checkpoint),
        "--images",
        str(tmp_path / "holiday"),
        "--num_workers",
        "0",
    ]
    run(None, "scripts/evaluate.py", arguments, output_dir=tmp_path / "b")
    rows = json.loads((tmp_path / "b" / "predictions.json").read_text())
    assert [os.path.relpath(row["file"], tmp_path / "holiday") for row in rows] == [
        "broken.jpg",
        *(f"day 1/{i}.jpg" for i in range(8)),
    ]
    assert rows[0]["classes"] == [] and all(
        {name for name, _ in row["classes"]} == set(CLASSES) for row in rows[1:]
    )
    assert all(
        sum(share for _, share in row["classes"]) == pytest.approx(1, abs=1e-4) for row in rows[1:]
    )
    lines = list(csv.reader((tmp_path / "b" / "predictions.csv").open()))
    assert lines[0] == [
        "file",
        *(f"{what}_{i}" for i in (1, 2, 3) for what in ("class", "probability")),
    ]
    assert [line[1:3] for line in lines[2:]] == [
        [name, str(share)] for name, share in (row["classes"][0] for row in rows[1:])
    ]
    assert min(Image.open(tmp_path / "b" / "contact_sheet.png").size) > 200


def test_shared_memory_is_used_again_only_when_a_batch_is_gone(data):
    """Views count, too, and a batch may be kept for longer than its worker lives."""
    dataset, epoch = (
        ImageBatches(data.splits["train"], change()),
        [[(0, i % 24), (0, (i + 7) % 24)] for i in range(40)],
    )
    expected = [dataset.__getitems__(keys) for keys in epoch]
    loader = DataLoader(
        dataset,
        batch_sampler=epoch,
        collate_fn=already_a_batch,
        num_workers=1,
        persistent_workers=True,
    )
    for kept_part in (lambda images: images, lambda images: images[1:, :, ::2]):
        kept = [kept_part(batch["images"]) for batch in loader]  # all 40 at once
        assert all(
            torch.equal(a, kept_part(b["images"])) for a, b in zip(kept, expected, strict=True)
        )
    del kept
    before = len(shared_batches._attached)
    assert before >= 40
    for batch, other in zip(loader, expected, strict=True):  # one after the other
        assert all(torch.equal(batch[name], other[name]) for name in ("images", "labels", "ids"))
        assert batch["images"].is_contiguous(memory_format=torch.channels_last)
        assert batch["bad"] == other["bad"]
    assert len(shared_batches._attached) - before < 10
    fresh = DataLoader(dataset, batch_sampler=epoch, collate_fn=already_a_batch, num_workers=1)
    batches = iter(fresh)
    kept = next(batches)["images"]
    assert sum(1 for _ in batches) == 39
    assert torch.equal(kept, expected[0]["images"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "resumed_with",
    [
        "--num_workers 0",
        "--num_workers 1",
        "--num_workers 3",
    ],
)
def test_killed_mid_accumulation_with_workers_ends_with_the_same_bytes(
    resumed_with, reference_run, photo_folder, tmp_path
):
    """Killed in the second micro-batch of the sixth step; continues with other workers."""
    arguments = f"--dataset {photo_folder} {RECIPE}"
    fault = ["die_in_step@12:1", IMAGES, *arguments.split(), "--num_workers", "2"]
    killed = run(
        "2cpu", "tests/harness/wrapped.py", fault, output_dir=tmp_path / "run", check=False
    )
    assert killed.returncode != 0 and not (tmp_path / "run" / "model.safetensors").exists()
    run("2cpu", IMAGES, f"{arguments} {resumed_with}", output_dir=tmp_path / "run")
    assert 0 < results(tmp_path / "run")["resumed_from"] < 6
    assert final_weights(tmp_path / "run") == final_weights(reference_run.folder)
    assert final_weights(tmp_path / "run" / "without_ema") == final_weights(
        reference_run.folder / "without_ema"
    )
    for split in ("train", "val"):
        assert metrics(tmp_path / "run", split) == metrics(reference_run.folder, split)


@pytest.mark.slow
def test_every_step_mixes_the_same_images_on_any_number_of_processes_and_after_a_kill(
    photo_folder, tmp_path
):
    """Records a checksum of all images and labels after augmentation and mixing."""
    arguments = (
        f"--dataset {photo_folder} {RECIPE} --batch_size 12 --max_train_steps 5 --num_workers 0"
    )
    steps = recorded("cpu", IMAGES, arguments.replace("steps 2", "steps 1"), tmp_path / "one")
    assert len(steps) == 5 and steps[0] != steps[2]
    assert all(len(step["ids"]) == 12 for step in steps)
    three = ("--num_processes", "3")
    fault, options = ["die_in_step@10:2", IMAGES, *arguments.split()], dict(launcher=three)
    run(
        "2cpu",
        "tests/harness/wrapped.py",
        fault,
        output_dir=tmp_path / "three",
        check=False,
        **options,
    )
    rest = recorded("2cpu", IMAGES, arguments, tmp_path / "three", processes=3, accumulation=2)
    resumed_from = results(tmp_path / "three")["resumed_from"]
    assert 0 < resumed_from < 5 and rest == steps[resumed_from:]


def test_a_signal_saves_and_ends_with_persistent_workers(photo_folder, tmp_path):
    endless = "--max_train_steps 1000 --num_workers 1 --eval_every 1000"
    arguments = f"--dataset {photo_folder} {RECIPE} {endless}"
    started = Started(None, IMAGES, arguments, output_dir=tmp_path / "run")
    started.wait_for("step    5/1000")
    os.kill(started.process.pid, 15)
    code, output = started.finish()
    assert code == 75 and "stopped by SIGTERM" in output


def test_a_bad_image_in_a_run(broken, tmp_path):
    arguments = f"--dataset {broken} {TINY} --epochs 1 --num_workers 1"
    done = run(None, IMAGES, arguments, output_dir=tmp_path / "run", check=False)
    errors = [line for line in done.stderr.splitlines() if not line.startswith("***")]
    assert done.returncode == 2 and len(errors) <= 2 and "no image" not in done.stdout
    assert errors[0].startswith("error: cannot read ") and "it is not an image" in errors[0], (
        done.stderr
    )
    run(
        None, IMAGES, f"{arguments} --on_bad_image skip", output_dir=tmp_path / "run"
    )  # continues, or starts again
    listed = (tmp_path / "run" / "bad_images.txt").read_text().splitlines()
    assert [os.path.relpath(line, broken) for line in listed] == [
        "train/cat/1.jpg",
        "train/cat/2.jpg",
        "val/yak/3.jpg",
    ]
    assert results(tmp_path / "run")["bad_images"] == 3
    assert results(tmp_path / "run")["val_accuracy"] * 11 == pytest.approx(
        round(results(tmp_path / "run")["val_accuracy"] * 11)
    )


BAD = {
    "unknown_model": ("--model resnet_50", "the nearest: "),
    "unknown_weights": ("--weights IMAGENET1K_V9", "no such weights of squeezenet1_1"),
    "odd_pairs": ("--mixup 0.2 --batch_size 3", "cannot be paired"),
    "batch_too_large": ("--batch_size 48", "more than the 24 training samples"),
    "no_folder": ("--dataset ./nowhere", "there is no such file or folder"),
    "broken_image": (
        "--check_images --dataset {broken}",
        "2 of 12 images of the train split cannot be read",
    ),
    "no_cache": (
        "--cache /proc/nowhere",
        "cannot write the cache to /proc/nowhere",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(name, photo_folder, broken, tmp_path):
    arguments, words = BAD[name]
    arguments = f"--dataset {photo_folder} {TINY} {arguments.format(broken=broken)}"
    done = run(None, IMAGES, arguments, output_dir=tmp_path / "run", check=False)
    errors = [line for line in done.stderr.splitlines() if not line.startswith("***")]
    assert done.returncode == 2 and len(errors) == 1, done.stderr
    assert errors[0].startswith("error: ")
    assert words in errors[0]
    assert not (tmp_path / "run" / "args.json").exists()
