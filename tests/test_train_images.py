"""train_images.py: finds, decodes and transforms pictures, and trains on them exactly, with any number of workers."""

import contextlib
import csv
import io
import json
import os
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from conftest import Started, final_weights, load_script, metrics, recorded, results, run, run_once
from PIL import Image
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from utils import image_cache, image_files, pretrained, shared_batches
from utils.augment import normalize
from utils.exits import UserError
from utils.image_data import as_is
from utils.image_files import BadPicture, Encoded, EpochSampler, EvalTransform, ImageBatches, TrainTransform
from utils.image_folder import load_pictures
from utils.mixing import Mix

pytestmark = pytest.mark.filterwarnings("ignore:The image decoding and encoding:DeprecationWarning")
IMAGES = "scripts/train_images.py"
PREPROCESS = dict(resize=36, crop=32, interpolation="bilinear", mean=[0.5] * 3, std=[0.25] * 3)
CLASSES = ("cat", "dog", "yak")


def picture(seed=0, size=(60, 40), mode="RGB"):
    """A picture of smooth random colors."""
    pixels = np.random.default_rng(seed).integers(0, 256, (3, 4, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize(size, Image.BICUBIC).convert(mode)


def encoded(image, kind="JPEG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def make_photos(folder, per_class=8, splits=("train", "val"), classes=CLASSES):
    """Writes a folder of photos of several sizes; without `splits`, the class folders are at the top."""
    for place, split in enumerate(splits or [""]):
        for label, name in enumerate(classes):
            (folder / split / name).mkdir(parents=True)
            for i in range(per_class):
                seed = 1000 * place + 100 * label + i
                (folder / split / name / f"{i}.jpg").write_bytes(encoded(picture(seed, (50 + 3 * i, 60 - 2 * i))))
    return folder


def names(pictures):
    return [os.path.relpath(pictures.name(i), pictures.source.root) for i in range(len(pictures))]


# ---------------------------------------------------------------------------------------------------- finding pictures


@pytest.mark.parametrize("alias", ["val", "valid", "validation", "test"])
def test_finds_splits_by_their_usual_names(alias, tmp_path):
    make_photos(tmp_path, 3, ("train", alias))
    data = load_pictures(str(tmp_path))
    held_out = "test" if alias == "test" else "val"
    assert data.class_names == list(CLASSES) and list(data.splits) == ["train", held_out]
    assert names(data.splits[held_out]) == [f"{alias}/{name}/{i}.jpg" for name in CLASSES for i in range(3)]
    assert data.splits[held_out].labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_splits_by_names_and_seed_only(tmp_path):
    """The same fraction of each class; the same pictures wherever the folder is, others with another seed."""
    make_photos(tmp_path / "a", 10, None)
    shutil.copytree(tmp_path / "a", tmp_path / "elsewhere" / "b")
    data = load_pictures(str(tmp_path / "a"), val_fraction=0.2)
    assert np.bincount(data.splits["val"].labels).tolist() == [2, 2, 2]
    assert sorted(names(data.splits["train"]) + names(data.splits["val"])) == sorted(
        f"{name}/{i}.jpg" for name in CLASSES for i in range(10)
    )
    again = load_pictures(str(tmp_path / "elsewhere" / "b"), val_fraction=0.2)
    assert names(again.splits["val"]) == names(data.splits["val"]) and again.description == data.description
    assert names(load_pictures(str(tmp_path / "a"), seed=1, val_fraction=0.2).splits["val"]) != names(data.splits["val"])


def test_a_class_may_be_called_train_and_hidden_files_do_not_count(tmp_path, capsys):
    make_photos(tmp_path, 3, None, ("train", "bus"))
    (tmp_path / "bus" / "deep").mkdir()
    shutil.move(tmp_path / "bus" / "0.jpg", tmp_path / "bus" / "deep" / "0.JPG")
    (tmp_path / "bus" / "._1.jpg").write_bytes(b"resource fork")
    (tmp_path / ".ipynb_checkpoints").mkdir()
    (tmp_path / "bus" / "photo.heic").write_bytes(b"")
    data = load_pictures(str(tmp_path), val_fraction=0.3)
    assert data.class_names == ["bus", "train"] and sum(map(len, data.splits.values())) == 6
    assert "bus/deep/0.JPG" in names(data.splits["train"]) + names(data.splits["val"])
    assert "1 .heic" in capsys.readouterr().out


def test_the_list_of_files_is_kept_until_a_folder_changes(tmp_path, monkeypatch):
    make_photos(tmp_path / "photos", 3)
    for folder, _, _ in os.walk(tmp_path / "photos"):
        os.utime(folder, (1, 1))  # one that was changed just now may change again within the same tick of its clock
    first = load_pictures(str(tmp_path / "photos"), index_folder=tmp_path / "index")
    monkeypatch.setattr(os, "scandir", None)
    again = load_pictures(str(tmp_path / "photos"), index_folder=tmp_path / "index")
    assert again.description == first.description and names(again.splits["val"]) == names(first.splits["val"])
    monkeypatch.undo()
    (tmp_path / "photos" / "train" / "cat" / "new.jpg").write_bytes(encoded(picture()))
    changed = load_pictures(str(tmp_path / "photos"), index_folder=tmp_path / "index")
    assert len(changed.splits["train"]) == 10 and changed.description != first.description


def test_a_folder_that_cannot_keep_the_list_is_no_error(tmp_path, capsys):
    make_photos(tmp_path / "photos", 3)
    for folder, _, _ in os.walk(tmp_path / "photos"):
        os.utime(folder, (1, 1))
    assert load_pictures(str(tmp_path / "photos"), index_folder="/proc/nowhere").class_names == list(CLASSES)
    assert "not kept" in capsys.readouterr().out


def empty_class(folder):
    make_photos(folder, 2)
    shutil.rmtree(folder / "val" / "dog")


def unknown_class(folder):
    make_photos(folder, 2)
    (folder / "val" / "dog").rename(folder / "val" / "emu")


def loose(folder):
    (folder / "1.jpg").write_bytes(encoded(picture()))


def empty_val(folder):
    make_photos(folder, 2, ("train",))
    (folder / "val").mkdir()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (loose, "has no class folder (1 pictures are directly in it)"),
        (lambda folder: make_photos(folder, 2, classes=("cat",)), "has only one class, cat"),
        (lambda folder: make_photos(folder, 1, None), "class cat has 1 picture"),
        (empty_class, "its val split has no picture of class dog"),
        (unknown_class, "class emu of its val split is not in its train split"),
        (empty_val, "its val split has no class folder"),
        (lambda folder: None, "has no class folder"),
    ],
)
def test_another_layout_is_refused(make, says, tmp_path):
    make(tmp_path)
    with pytest.raises(UserError) as error:
        load_pictures(str(tmp_path))
    assert says in str(error.value) and "\n" not in str(error.value)


def hub_folder(folder, change=lambda split, rows: rows, splits=("train", "validation")):
    """A data set in the layout of the Hub, with a column of bytes that nobody asked for."""
    import datasets

    features = dict(img=datasets.Image(), fine_label=datasets.ClassLabel(names=list(CLASSES)), note=datasets.Value("string"))
    for split in splits:
        rows = {"img": [picture(i) for i in range(6)], "fine_label": [0, 1, 2, 0, 1, 2], "note": ["x"] * 6}
        made = change(split, datasets.Dataset.from_dict(rows, features=datasets.Features(features)))
        made.to_parquet(str(folder / f"{split}-00000-of-00001.parquet"))
    return str(folder)


def test_reads_the_layout_of_the_hub_by_the_types_of_its_columns(tmp_path):
    data = load_pictures(hub_folder(tmp_path))
    assert data.class_names == list(CLASSES) and data.splits["val"].labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert torch.equal(data.splits["val"].open(4).pixels(), Encoded(encoded(picture(4), "PNG")).pixels())
    assert "row 4" in data.splits["val"].name(4)


def no_labels(split, rows):
    return rows.remove_columns("fine_label").add_column("fine_label", [0, -1, 1, -1, 0, 1])


def second_label(split, rows):
    import datasets

    return rows.add_column("coarse", rows["fine_label"][:]).cast_column("coarse", datasets.ClassLabel(names=list(CLASSES)))


def test_unusable_columns_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"2 of 6 rows of the train split of .* have no label.*the first is row 1"):
        load_pictures(hub_folder(make_folder(tmp_path / "a"), no_labels))
    several = hub_folder(make_folder(tmp_path / "b"), second_label)
    with pytest.raises(UserError, match="several label columns, fine_label, coarse: give --label_column"):
        load_pictures(several)
    assert load_pictures(several, label_column="coarse").class_names == list(CLASSES)
    with pytest.raises(UserError, match=r"--image_column photo: .* has the columns img"):
        load_pictures(several, image_column="photo")


def make_folder(folder):
    folder.mkdir()
    return folder


# --------------------------------------------------------------------------------------------------------- decoding


def exif_rotated(image):
    exif = Image.Exif()
    exif[image_files.ORIENTATION] = 6  # to be turned by 90 degrees clockwise
    return encoded(image.transpose(Image.Transpose.ROTATE_90), exif=exif, quality=95)


FORMATS = {
    "gray": (lambda image: encoded(image.convert("L"), quality=95), "L"),
    "palette": (lambda image: encoded(image.convert("P"), "PNG"), "P"),
    "rgba": (lambda image: encoded(image.convert("RGBA"), "PNG"), "RGB"),
    "cmyk": (lambda image: encoded(image.convert("CMYK"), quality=95), "RGB"),
    "webp": (lambda image: encoded(image, "WEBP", quality=95), "RGB"),
    "rotated": (exif_rotated, "RGB"),
    "progressive": (lambda image: encoded(image, progressive=True, quality=95), "RGB"),
    "16 bit": (lambda image: encoded(Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257), "PNG"), "L"),
}


@pytest.mark.parametrize("kind", FORMATS)
def test_reads_pictures_of_every_kind(kind):
    make, mode = FORMATS[kind]
    original = picture(3)
    opened = Encoded(make(original))
    pixels = opened.pixels()
    assert (opened.width, opened.height) == (60, 40) and pixels.shape == (3, 40, 60) and pixels.dtype == torch.uint8
    expected = torch.from_numpy(np.array(original.convert(mode).convert("RGB"))).permute(2, 0, 1)
    assert (pixels.float() - expected.float()).abs().mean() < 4, kind


def test_what_is_transparent_is_white():
    clear = Image.new("RGBA", (8, 8), (255, 0, 0, 0))
    assert (Encoded(encoded(clear, "PNG")).pixels() == 255).all()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"this is a thesis", "not a picture"),
        (encoded(picture(size=(400, 300)))[:-800], "truncated"),
        (encoded(picture(size=(400, 300)), "PNG")[:900], "truncated"),
        (b"", "not a picture"),
    ],
)
def test_a_broken_picture_is_recognized(data, says):
    with pytest.raises(BadPicture, match=says):
        Encoded(data).pixels()


def test_pillow_decodes_to_the_same_pixels_as_torchvision(monkeypatch):
    """Whose decoder is deprecated."""
    data = encoded(picture(size=(300, 200)), quality=90)
    pixels = Encoded(data).pixels()
    monkeypatch.setattr(image_files, "decode_jpeg", None)
    assert torch.equal(pixels, Encoded(data).pixels()) and pixels.stride() == Encoded(data).pixels().stride()


def test_a_large_jpeg_is_decoded_to_a_smaller_size_if_that_is_enough(monkeypatch):
    """And shows the same as when it is decoded in full."""
    opened = Encoded(encoded(picture(size=(800, 600)), quality=95))
    small = EvalTransform(PREPROCESS)(opened)
    assert Encoded(opened._data).pixels(8).shape == (3, 75, 100)
    assert image_files.reduction_for(800, 600, 72, 72) == 8 and image_files.reduction_for(800, 600, 72, 76) == 4
    monkeypatch.setattr(image_files, "REDUCTIONS", ())
    full = EvalTransform(PREPROCESS)(Encoded(opened._data))
    assert (small.float() - full.float()).abs().mean() < 1.5


# ------------------------------------------------------------------------------------------------ random, but repeatable


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return make_photos(tmp_path_factory.mktemp("photos"))


@pytest.fixture(scope="module")
def data(photos):
    return load_pictures(str(photos))


def change(seed=0, **options):
    return TrainTransform(seed, 32, PREPROCESS, auto_augment="trivial", random_erasing=0.5, **options)


def test_normalization_does_not_depend_on_the_memory_format():
    images = torch.randint(0, 256, (3, 3, 8, 6), dtype=torch.uint8)
    mean, std = torch.tensor([120.0, 110.0, 100.0]), torch.tensor([60.0, 50.0, 40.0])
    expected = normalize(images, mean, std)
    assert torch.allclose(expected, (images - mean.view(3, 1, 1)) / std.view(3, 1, 1), atol=1e-6)
    assert torch.equal(normalize(images.contiguous(memory_format=torch.channels_last), mean, std), expected)


def test_a_picture_depends_on_seed_epoch_and_id_only(data):
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
    other_seed = ImageBatches(train, change(seed=1)).__getitems__([(2, i) for i in range(24)])["images"]
    for images in (other_epoch, other_seed):
        assert sum(torch.equal(a, b) for a, b in zip(images, together, strict=True)) == 0
    alike = ImageBatches(train.select(np.zeros(24, dtype=np.int64)), change()).__getitems__([(2, i) for i in range(24)])[
        "images"
    ]
    assert not torch.equal(alike[0], alike[1])


def test_an_epoch_has_each_picture_once_and_whole_steps_only():
    sampler = EpochSampler(103, 10, seed=3)
    first = list(sampler)
    sampler.set_epoch(1)
    second = list(sampler)
    assert len(first) == len(sampler) == 100 and len({i for _, i in first}) == 100
    assert {epoch for epoch, _ in first} == {0} and {epoch for epoch, _ in second} == {1}
    assert [i for _, i in first] != [i for _, i in second]
    assert list(EpochSampler(103, 10, seed=3)) == first and list(EpochSampler(103, 10, seed=4)) != first


def test_skipping_decodes_nothing(data, monkeypatch):
    """Counts what is decoded after a restart in the middle of an epoch."""
    decoded = []
    real_open = type(data.splits["train"]).open
    monkeypatch.setattr(type(data.splits["train"]), "open", lambda self, index: decoded.append(index) or real_open(self, index))
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True))
    sampler = EpochSampler(24, 8, seed=0)
    dataset = ImageBatches(data.splits["train"], change())
    loader = accelerator.prepare(DataLoader(dataset, 4, sampler=sampler, drop_last=True, collate_fn=as_is))
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
    """Whatever the parts in which it is mixed; a pair is mixed with itself, by the same shares as its labels."""
    images = torch.arange(8.0)[:, None, None, None].expand(8, 3, 16, 16).contiguous(memory_format=torch.channels_last)
    labels = torch.arange(8)
    mix, differences = Mix(*alphas, 8, seed=5), 0
    for step in range(6):
        mixed, targets = mix(images, labels, step)
        for parts in (2, 4):
            halves = [mix(a, b, step) for a, b in zip(images.chunk(parts), labels.chunk(parts), strict=True)]
            assert torch.equal(torch.cat([a for a, _ in halves]), mixed)
            assert torch.equal(torch.cat([b for _, b in halves]), targets)
        expected = (targets * torch.arange(8.0)).sum(1)
        assert torch.allclose(mixed.mean((1, 2, 3)), expected, atol=1e-5)
        pairs = targets.view(4, 2, 8)
        assert torch.allclose(pairs.sum((0, 1)).view(4, 2).sum(1), torch.full((4,), 2.0))
        assert (targets > 0).sum(1).max() <= 2 and all(targets[p, (p ^ 1) + 0] + targets[p, p] > 0.999 for p in range(8))
        differences += not torch.equal(mixed, mix(images, labels, step + 1)[0])
    assert differences == 6


# ---------------------------------------------------------------------------------------------------------- bad pictures


@pytest.fixture
def broken(tmp_path):
    """Photos of which two for training and one for validation cannot be read."""
    make_photos(tmp_path / "photos", 4)
    for name in ("train/cat/1.jpg", "train/cat/2.jpg", "val/yak/3.jpg"):
        (tmp_path / "photos" / name).write_bytes(b"no picture")
    return tmp_path / "photos"


def test_a_bad_picture_stops_or_is_replaced_by_the_next(broken, capsys):
    data = load_pictures(str(broken))
    with pytest.raises(UserError, match=r"cannot read .*train/cat/1.jpg: it is not a picture; .* --on_bad_image skip"):
        ImageBatches(data.splits["train"], change()).__getitems__([(0, 1)])
    skipping = ImageBatches(data.splits["train"], change(), "skip", replace=True)
    batch = skipping.__getitems__([(0, 1), (0, 3), (0, 1)])
    assert batch["bad"] == [1, 2, 1, 2] and batch["labels"].tolist() == [0, 0, 0] and batch["ids"].tolist() == [1, 3, 1]
    assert torch.equal(batch["images"][0], batch["images"][1])
    assert capsys.readouterr().err.count("train/cat/1.jpg") == 1
    # In an evaluation it does not count.
    batch = ImageBatches(data.splits["val"], EvalTransform(PREPROCESS), "skip").__getitems__([10, 11])
    assert batch["labels"].tolist() == [2, -1] and batch["bad"] == [11]


class OneProcess:
    is_main_process = is_local_main_process = True
    num_processes, process_index = 1, 0


def test_check_names_every_bad_picture(broken, capsys):
    data = load_pictures(str(broken))
    with pytest.raises(UserError, match=r"2 of 12 pictures of the train split.*cat/1.jpg.*cat/2.jpg.*--on_bad_image skip"):
        image_cache.check(OneProcess, data.splits["train"], "train", "stop")
    image_cache.check(OneProcess, data.splits["train"], "train", "skip")
    assert "left out: 2 of 12" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------------------------- cache


def test_the_cache_has_what_the_evaluation_sees(data, tmp_path):
    """It is made once, is complete or absent, and is made again if a file changes."""
    val = data.splits["val"]
    cached = image_cache.cached(OneProcess, val, "val", 36, tmp_path)
    (file,) = tmp_path.iterdir()
    keys = list(range(len(val)))
    expected = ImageBatches(val, EvalTransform(PREPROCESS)).__getitems__(keys)
    loaded = ImageBatches(cached, EvalTransform(PREPROCESS)).__getitems__(keys)
    assert torch.equal(loaded["images"], expected["images"]) and torch.equal(loaded["labels"], expected["labels"])
    assert cached.open(3).pixels().is_contiguous(memory_format=torch.contiguous_format) is False
    before = file.stat().st_mtime_ns
    image_cache.cached(OneProcess, val, "val", 36, tmp_path)
    assert [path.stat().st_mtime_ns for path in tmp_path.iterdir()] == [before]
    assert image_cache._path(val, 36, tmp_path, "bilinear") == file != image_cache._path(val, 40, tmp_path, "bilinear")
    os.utime(val.name(0), (1, 1))
    assert image_cache._path(val, 36, tmp_path, "bilinear") != file


def test_an_interrupted_cache_is_absent(data, tmp_path, monkeypatch):
    (tmp_path / "old").mkdir()
    monkeypatch.setattr(image_cache, "CHUNK", 5)
    file = image_cache._path(data.splits["val"], 36, tmp_path, "bilinear")
    val, partly = data.splits["val"], []

    def interrupt(*_):
        partly.extend(tmp_path.glob("*.writing.*"))
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(val, "open", lambda i: interrupt() if i == 17 else type(val).open(val, i))
        image_cache.cached(OneProcess, val, "val", 36, tmp_path)
    assert partly and [path.name for path in tmp_path.iterdir()] == ["old"]
    left_over = file.with_suffix(".writing.999999999")  # as of a process that was killed
    left_over.write_bytes(b"half")
    assert len(image_cache.cached(OneProcess, data.splits["val"], "val", 36, tmp_path)) == 24
    assert {path.name for path in tmp_path.iterdir()} == {"old", file.name}
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - 100)
    with pytest.raises(UserError, match="is damaged: delete it"):
        image_cache.cached(OneProcess, data.splits["val"], "val", 36, tmp_path)


# -------------------------------------------------------------------------------------------------------------- weights


def small(classes=3, name="squeezenet1_1"):
    return pretrained.build(dict(model=name, options={}, class_names=list("abcdefgh")[:classes]))


def config(model="squeezenet1_1", classes=3):
    return dict(model=model, options={}, class_names=list("abcdefgh")[:classes])


@pytest.mark.parametrize("wrapped", [False, True])
def test_reads_a_pth_and_replaces_a_head_of_another_size(wrapped, tmp_path, capsys):
    state = small(5).state_dict()
    file = tmp_path / "weights.pth"
    torch.save({"model": {f"module.{name}": value for name, value in state.items()}, "epoch": 3} if wrapped else state, file)
    model = small(3)
    pretrained.initialize(OneProcess, model, config(), str(file))
    assert torch.equal(model.features[0].weight, state["features.0.weight"])
    assert "keeps its initial weights: classifier.1.weight" in capsys.readouterr().out


def test_a_head_for_other_classes_is_replaced_though_it_has_the_same_size(tmp_path, capsys):
    from utils import weights

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


def test_unusable_weights_are_refused(tmp_path, monkeypatch):
    torch.save(small(3, "shufflenet_v2_x0_5").state_dict(), tmp_path / "other.pth")
    torch.save({"model": Executes()}, tmp_path / "code.pth")
    torch.save([1, 2], tmp_path / "list.pth")
    (tmp_path / "empty.pth").write_bytes(b"")
    for name, says in (
        ("other.pth", "holds another model"),
        ("code.pth", "it would execute code"),
        ("list.pth", "does not hold the weights"),
        ("empty.pth", "cannot be read"),
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
    monkeypatch.setattr(torch.hub, "download_url_to_file", lambda *a, **k: (_ for _ in ()).throw(OSError("no network")))
    with pytest.raises(UserError, match=rf"cannot download .*put the file from https://.* at {tmp_path}/hub/checkpoints/squee"):
        pretrained.initialize(OneProcess, small(3), config(), "DEFAULT")


def test_the_preprocessing_is_that_of_the_weights():
    enum = pretrained.find("resnet50", "IMAGENET1K_V2")
    expected = dict(resize=232, crop=224, interpolation="bilinear", **pretrained.IMAGENET)
    assert pretrained.preprocessing("resnet50", enum) == expected
    assert pretrained.preprocessing("resnet50", None, size=112) == expected | dict(resize=128, crop=112)
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
    assert [name for name, weight in model.named_parameters() if weight.grad is not None] == ["fc.weight", "fc.bias"]
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    pretrained.train(model)
    assert all(module.training for module in model.modules())


@pytest.mark.slow
def test_the_last_layer_of_every_model_is_found():
    """Without allocating their weights. RegNet and MaxViT need real ones: the smallest stand for the others."""
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
        assert {key for key in a if a[key].shape != b[key].shape} == {key for key in a if key.startswith(head + ".")}, name
        looked_at += 1
    assert looked_at > 50


def test_weight_decay_and_learning_rates_of_the_groups():
    model = small(3, "shufflenet_v2_x0_5")
    args = SimpleNamespace(lr=0.1, head_lr_multiplier=10, weight_decay=0.3, optimizer="sgd", momentum=0.9)
    groups = load_script("train_images").build_optimizer(model, args).param_groups
    found = {id(p): (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}
    assert len(found) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        expected = (1.0 if name.startswith("fc.") else 0.1, 0.3 if parameter.ndim > 1 else 0.0)
        assert found[id(parameter)] == pytest.approx(expected), name


@pytest.mark.parametrize("preset", ["scratch", "finetune", "small", "torchvision"])
def test_a_preset_is_a_set_of_known_options_that_flags_override(preset, monkeypatch, capsys):
    train_images = load_script("train_images")
    monkeypatch.setattr(sys, "argv", ["train_images.py", "--dataset", "synthetic", "--preset", preset, "--epochs", "7"])
    wanted = {**train_images.PRESETS[preset], "epochs": 7}
    assert wanted.items() <= vars(train_images.parse_args()).items()
    monkeypatch.setattr(sys, "argv", ["train_images.py", "--help"])
    with pytest.raises(SystemExit):
        train_images.parse_args()
    assert {f"--{name}" for name in wanted} <= set(capsys.readouterr().out.split())


def test_the_learning_rate_rises_and_falls():
    module, plan = load_script("train_images"), SimpleNamespace(steps_per_epoch=10, total_steps=100)
    for schedule, middle in (("cosine", 0.5), ("linear", 0.5), ("constant", 1.0)):
        args = SimpleNamespace(warmup_epochs=1, lr_schedule=schedule)
        multipliers = [module.lr_multiplier(step, plan, args) for step in range(101)]
        assert multipliers[0] == pytest.approx(1 / 11) and multipliers[9] == pytest.approx(10 / 11) and multipliers[10] == 1
        assert multipliers[55] == pytest.approx(middle) and multipliers[100] == pytest.approx(0.0 if middle < 1 else 1.0)


# ------------------------------------------------------------------------------------------------------------- real runs

RECIPE = (
    "--model shufflenet_v2_x0_5 --image_size 32 --batch_size 8 --max_train_steps 8 --gradient_accumulation_steps 2 --lr 0.02 "
    "--log_every 1 --eval_every 4 --checkpoint_every 3 --ema_decay 0.5 --mixup 0.2 --cutmix 1 --auto_augment trivial "
    "--random_erasing 0.3 --track none"
)


@pytest.fixture(scope="session")
def photo_folder(made_once):
    return made_once("photos", lambda folder: make_photos(folder, per_class=8))


@pytest.fixture(scope="session")
def reference_run(made_once, photo_folder):
    """Two processes with a worker each, killed by nobody: 24 pictures, 3 steps in an epoch."""
    arguments = f"--dataset {photo_folder} {RECIPE}"
    return run_once(made_once, "images_reference", "2cpu", IMAGES, f"{arguments} --num_workers 1")


def test_leaves_everything_it_promises(reference_run, photo_folder):
    folder, done = reference_run.folder, results(reference_run.folder)
    for name in ("README.md", "results.json", "metrics.jsonl", "without_ema/model.safetensors"):
        assert (folder / name).exists(), name
    for name in ("predictions.png", "mistakes.png", "confusion_matrix.png", "curves.png"):
        assert min(Image.open(folder / name).size) > 200, name
    assert done["val_accuracy"] * 24 == pytest.approx(round(done["val_accuracy"] * 24)) and "val_top5" not in done
    assert [line["step"] for line in metrics(folder, "val")] == [4, 8] and done["bad_images"] == 0
    with open(folder / "model.safetensors", "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    stored = json.loads(header["__metadata__"]["config"])
    assert stored["class_names"] == list(CLASSES) and stored["model"] == "shufflenet_v2_x0_5"
    assert stored["preprocessing"] == dict(resize=37, crop=32, interpolation="bilinear", **pretrained.IMAGENET)
    averaged, last = load_file(folder / "model.safetensors"), load_file(folder / "without_ema" / "model.safetensors")
    assert not torch.equal(averaged["fc.weight"], last["fc.weight"]) and averaged.keys() == last.keys()


def test_the_model_card_loads_the_model_without_these_scripts(reference_run, photo_folder, tmp_path, monkeypatch):
    card = (reference_run.folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: torchvision\n") and "| val accuracy | " in card
    code = card.split("```python\n")[1].split("```")[0]
    assert len([line for line in code.splitlines() if line and not line.startswith(("import", "from"))]) == 6
    shutil.copy(reference_run.folder / "model.safetensors", tmp_path)
    shutil.copy(photo_folder / "val" / "dog" / "5.jpg", tmp_path / "picture.jpg")
    monkeypatch.chdir(tmp_path)
    names = {}
    with torch.no_grad():
        exec(code, names)
        # The same as what this project computes for the picture.
        stored = pretrained.describe("shufflenet_v2_x0_5", str(reference_run.folder), CLASSES)
        opened = Encoded((tmp_path / "picture.jpg").read_bytes())
        image = EvalTransform(stored["preprocessing"])(opened).float() / 255
        mean, std = (torch.tensor(stored["preprocessing"][name])[:, None, None] for name in ("mean", "std"))
        expected = names["model"](((image - mean) / std)[None]).softmax(1)[0]
    assert torch.allclose(names["probabilities"], expected, atol=0.02)


def test_evaluate_finds_the_same_accuracy_and_classifies_a_folder(reference_run, photo_folder, tmp_path):
    """On two processes from the weights, on one from the averages in the last checkpoint."""
    done = results(reference_run.folder)
    run("2cpu", "scripts/evaluate.py", ["--checkpoint", str(reference_run.folder)], output_dir=tmp_path / "a")
    assert results(tmp_path / "a")["val_accuracy"] == done["val_accuracy"]
    assert results(tmp_path / "a")["per_class"] == done["per_class"] and len(done["per_class"]) == 3
    checkpoint = reference_run.folder / "checkpoints" / "step_00000008"
    run(None, "scripts/evaluate.py", ["--checkpoint", str(checkpoint)], output_dir=tmp_path / "c")
    assert results(tmp_path / "c")["val_loss"] == pytest.approx(done["val_loss"], rel=1e-5)
    shutil.copytree(photo_folder / "val" / "dog", tmp_path / "holiday" / "day 1")
    (tmp_path / "holiday" / "broken.jpg").write_bytes(b"no picture")
    arguments = ["--checkpoint", str(checkpoint), "--images", str(tmp_path / "holiday"), "--num_workers", "0"]
    run(None, "scripts/evaluate.py", arguments, output_dir=tmp_path / "b")
    rows = json.loads((tmp_path / "b" / "predictions.json").read_text())
    assert [os.path.relpath(row["file"], tmp_path / "holiday") for row in rows] == [
        "broken.jpg",
        *(f"day 1/{i}.jpg" for i in range(8)),
    ]
    assert rows[0]["classes"] == [] and all({name for name, _ in row["classes"]} == set(CLASSES) for row in rows[1:])
    assert all(sum(share for _, share in row["classes"]) == pytest.approx(1, abs=1e-4) for row in rows[1:])
    lines = list(csv.reader((tmp_path / "b" / "predictions.csv").open()))
    assert lines[0] == ["file", *(f"{what}_{i}" for i in (1, 2, 3) for what in ("class", "probability"))]
    assert [line[1:3] for line in lines[2:]] == [[name, str(share)] for name, share in (row["classes"][0] for row in rows[1:])]
    assert min(Image.open(tmp_path / "b" / "contact_sheet.png").size) > 200


def test_shared_memory_is_used_again_only_when_a_batch_is_gone(data):
    """Views count, too, and a batch may be kept for longer than its worker lives."""
    dataset, epoch = ImageBatches(data.splits["train"], change()), [[(0, i % 24), (0, (i + 7) % 24)] for i in range(40)]
    expected = [dataset.__getitems__(keys) for keys in epoch]
    loader = DataLoader(dataset, batch_sampler=epoch, collate_fn=as_is, num_workers=1, persistent_workers=True)
    for kept_part in (lambda images: images, lambda images: images[1:, :, ::2]):
        kept = [kept_part(batch["images"]) for batch in loader]  # all 40 at once
        assert all(torch.equal(a, kept_part(b["images"])) for a, b in zip(kept, expected, strict=True))
    del kept
    before = len(shared_batches._attached)
    assert before >= 40
    for batch, other in zip(loader, expected, strict=True):  # one after the other
        assert all(torch.equal(batch[name], other[name]) for name in ("images", "labels", "ids"))
        assert batch["images"].is_contiguous(memory_format=torch.channels_last) and batch["bad"] == other["bad"]
    assert len(shared_batches._attached) - before < 10
    fresh = DataLoader(dataset, batch_sampler=epoch, collate_fn=as_is, num_workers=1)
    batches = iter(fresh)
    kept = next(batches)["images"]
    assert sum(1 for _ in batches) == 39
    assert torch.equal(kept, expected[0]["images"])


@pytest.mark.parametrize(
    "resumed_with",
    [
        "--num_workers 0",
        pytest.param("--num_workers 1 --no-persistent_workers", marks=pytest.mark.slow),
        pytest.param("--num_workers 3", marks=pytest.mark.slow),
    ],
)
def test_killed_mid_accumulation_with_workers_ends_with_the_same_bytes(resumed_with, reference_run, photo_folder, tmp_path):
    """In the second micro-batch of the sixth step; and continues with another number of workers than it was killed with."""
    arguments = f"--dataset {photo_folder} {RECIPE}"
    fault = ["die_in_step@12:1", IMAGES, *arguments.split(), "--num_workers", "2"]
    killed = run("2cpu", "tests/wrapped.py", fault, output_dir=tmp_path / "run", check=False)
    assert killed.returncode != 0 and not (tmp_path / "run" / "model.safetensors").exists()
    run("2cpu", IMAGES, f"{arguments} {resumed_with}", output_dir=tmp_path / "run")
    assert 0 < results(tmp_path / "run")["resumed_from"] < 6
    assert final_weights(tmp_path / "run") == final_weights(reference_run.folder)
    assert final_weights(tmp_path / "run" / "without_ema") == final_weights(reference_run.folder / "without_ema")
    for split in ("train", "val"):
        assert metrics(tmp_path / "run", split) == metrics(reference_run.folder, split)


def test_every_step_mixes_the_same_pictures_on_any_number_of_processes_and_after_a_kill(photo_folder, tmp_path):
    """Records a checksum of every picture and label on which the model trains, after all augmentation and mixing."""
    arguments = f"--dataset {photo_folder} {RECIPE} --batch_size 12 --max_train_steps 5 --num_workers 0"
    steps = recorded("cpu", IMAGES, arguments.replace("steps 2", "steps 1"), tmp_path / "one")
    assert len(steps) == 5 and all(len(step["ids"]) == 12 for step in steps) and steps[0] != steps[2]
    three = ("--num_processes", "3")
    fault = ["die_in_step@12:2", IMAGES, *arguments.split()]  # the first two backward passes warm up DDP
    run("2cpu", "tests/wrapped.py", fault, output_dir=tmp_path / "three", launcher=three, check=False)
    rest = recorded("2cpu", IMAGES, arguments, tmp_path / "three", processes=3, accumulation=2)
    resumed_from = results(tmp_path / "three")["resumed_from"]
    assert 0 < resumed_from < 5 and rest == steps[resumed_from:]


def test_a_signal_saves_and_ends_with_persistent_workers(photo_folder, tmp_path):
    arguments = f"--dataset {photo_folder} {RECIPE} --max_train_steps 1000 --num_workers 1 --eval_every 1000"
    started = Started(None, IMAGES, arguments, output_dir=tmp_path / "run")
    started.wait_for("step    5/1000")
    os.kill(started.process.pid, 15)
    code, output = started.finish()
    assert code == 75 and "stopped by SIGTERM" in output


def test_a_bad_picture_in_a_run(broken, tmp_path):
    arguments = f"--dataset {broken} --model squeezenet1_1 --image_size 32 --batch_size 6 --epochs 1 --num_workers 1"
    done = run(None, IMAGES, arguments, output_dir=tmp_path / "run", check=False)
    errors = [line for line in done.stderr.splitlines() if not line.startswith("***")]
    assert done.returncode == 2 and len(errors) <= 2 and "no picture" not in done.stdout
    assert errors[0].startswith("error: cannot read ") and "it is not a picture" in errors[0], done.stderr
    run(None, IMAGES, f"{arguments} --on_bad_image skip", output_dir=tmp_path / "run")  # continues, or starts again
    listed = (tmp_path / "run" / "bad_images.txt").read_text().splitlines()
    assert [os.path.relpath(line, broken) for line in listed] == ["train/cat/1.jpg", "train/cat/2.jpg", "val/yak/3.jpg"]
    assert results(tmp_path / "run")["bad_images"] == 3
    assert results(tmp_path / "run")["val_accuracy"] * 11 == pytest.approx(
        round(results(tmp_path / "run")["val_accuracy"] * 11)
    )


BAD = {
    "unknown_model": ("--model resnet_50", "the nearest: "),
    "unknown_weights": ("--weights IMAGENET1K_V9", "no such weights of squeezenet1_1"),
    "odd_pairs": ("--mixup 0.2 --batch_size 3", "cannot be paired"),
    "batch_too_large": ("--batch_size 48", "more than the 24 training samples"),
    "no_folder": ("--dataset ./nowhere", "there is no such folder"),
    "broken_picture": ("--check_images --dataset {broken}", "2 of 12 pictures of the train split cannot be read"),
    "no_cache": ("--cache --cache_dir /proc/nowhere", "cannot write the cache to --cache_dir /proc/nowhere"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(name, photo_folder, broken, tmp_path):
    arguments, words = BAD[name]
    arguments = f"--dataset {photo_folder} --model squeezenet1_1 --image_size 32 --batch_size 6 {arguments}".format(
        broken=broken
    )
    done = run(None, IMAGES, arguments, output_dir=tmp_path / "run", check=False)
    errors = [line for line in done.stderr.splitlines() if not line.startswith("***")]
    assert done.returncode == 2 and len(errors) == 1, done.stderr
    assert errors[0].startswith("error: ") and words in errors[0] and not (tmp_path / "run" / "args.json").exists()
