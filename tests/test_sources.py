"""Every script takes the same sources of data: tables with any columns, folders, 32x32 images."""

import io
import os

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from utils.data.arrays import ArrayBatches, load_arrays, synthetic_arrays
from utils.data.images import Encoded
from utils.data.sources import find_images
from utils.data.text import load_text
from utils.run.failures import UserError

KINDS = ["cat", "dog", "yak"]


def noise(seed, size=(32, 32)):
    """An image of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def png(image):
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def pixels_of(seed):
    return torch.from_numpy(np.array(noise(seed))).permute(2, 0, 1)


COLUMNS = {
    "images": (datasets.Image(), lambda data: {"bytes": data, "path": None}),
    "structs": (
        {"bytes": datasets.Value("binary"), "path": datasets.Value("string")},
        lambda data: {"bytes": data, "path": None},
    ),
    "bytes": (datasets.Value("binary"), lambda data: data),
    "large bytes": (datasets.Value("large_binary"), lambda data: data),
}


def make_table(file, column="bytes", count=30, first_seed=0, **others):
    """Writes a Parquet file with the columns `photo` and `kind`, as other tools write it."""
    kind, convert = COLUMNS[column]
    rows = {
        "photo": [convert(png(noise(first_seed + i))) for i in range(count)],
        "kind": [KINDS[i % 3] for i in range(count)],
    }
    features = {"photo": kind, "kind": datasets.Value("string")}
    for name, values in others.items():
        rows[name] = values
        features[name] = datasets.Value("binary" if isinstance(values[0], bytes) else "int64")
    made = datasets.Dataset.from_dict(rows, features=datasets.Features(features))
    table = made.with_format("arrow")[:]
    if column != "images":
        table = table.replace_schema_metadata(None)  # without what only `datasets` writes
    datasets.Dataset(table).to_parquet(str(file))
    return str(file)


@pytest.mark.parametrize("column", COLUMNS)
def test_a_single_parquet_file_with_columns_of_other_names_is_a_data_set(column, tmp_path):
    file = make_table(tmp_path / "photos.parquet", column)
    found = find_images(file, label_column="kind", val_fraction=0.2)
    assert found.class_names == KINDS and {s: len(i) for s, i in found.splits.items()} == {
        "train": 24,
        "val": 6,
    }
    data = load_arrays(file, label_column="kind", val_fraction=0.2)
    assert data.class_names == KINDS and data.description == found.description
    for split, images in found.splits.items():
        for index in range(len(images)):
            row = images.rows[index]
            assert images.labels[index] == data.splits[split].labels[index] == row % 3
            assert torch.equal(images.open(index).pixels(), pixels_of(row))
            assert torch.equal(data.splits[split].images[index], pixels_of(row))
    assert find_images(file, image_column="photo", label_column="kind").class_names == KINDS


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "arrow"])
def test_other_tables_are_data_sets_too(suffix, tmp_path):
    """The rows of a list of files name images next to it."""
    for i in range(8):
        noise(i).save(tmp_path / f"{i}.png")
    rows = datasets.Dataset.from_dict(
        {"file": [f"{i}.png" for i in range(8)], "label": [10 * (i % 2) for i in range(8)]}
    )
    file = tmp_path / f"list.{suffix}"
    if suffix == "arrow":
        rows.save_to_disk(str(tmp_path / "saved"))
        os.rename(tmp_path / "saved" / "data-00000-of-00001.arrow", file)
    else:
        {"csv": rows.to_csv, "jsonl": rows.to_json}[suffix](str(file))
    data = load_arrays(str(file), image_column="file", val_fraction=0.25)
    assert data.class_names == ["0", "10"] and len(data.splits["val"]) == 2
    found = find_images(str(file), image_column="file", val_fraction=0.25)
    for index, row in enumerate(found.splits["val"].rows):
        assert torch.equal(data.splits["val"].images[index], pixels_of(row))
    # A changed file is noticed although its list is the same.
    before = found.splits["train"].fingerprint(stamps=True)
    os.utime(tmp_path / f"{found.splits['train'].rows[0]}.png", (1, 1))
    assert found.splits["train"].fingerprint(stamps=True) != before


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "has several image columns, photo, mask: give --image_column"),
        ({"image_column": "photo"}, "has no label column that is recognized, only photo, kind"),
        ({"image_column": "score"}, "--image_column score: .* has no images there, but Value"),
        ({"image_column": "photo", "label_column": "class"}, "has the columns photo, kind, mask"),
        (
            {"image_column": "kind", "label_column": "score"},
            "image in row 0 of .*: cat: No such file",
        ),
    ],
)
def test_columns_that_cannot_be_told_apart_are_named(options, says, tmp_path):
    others = dict(mask=[b"x"] * 30, score=[i % 2 for i in range(30)])
    file = make_table(tmp_path / "photos.parquet", **others)
    with pytest.raises(UserError, match=says) as error:
        load_arrays(file, val_fraction=0.2, **options)
    assert "\n" not in str(error.value)


def test_a_single_file_of_another_kind_is_refused(tmp_path):
    noise(0).save(tmp_path / "photo.png")
    with pytest.raises(UserError, match=r"photo.png is a file that does not end in \.parquet"):
        find_images(str(tmp_path / "photo.png"))
    with pytest.raises(UserError, match="there is no such file or folder"):
        find_images("photos.parquet")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and nothing of the kind")
    for load in (find_images, load_arrays, lambda name: load_text(name, "text", 16)):
        with pytest.raises(UserError, match=r"cannot load --dataset .*broken\.parquet") as error:
            load(str(tmp_path / "broken.parquet"))
        assert "\n" not in str(error.value)


# ----------------------------------------------------------------------------- splits


def make_folders(root, splits, per_class=10):
    """Writes a folder with random images of 32x32 pixels of two classes."""
    for place, split in enumerate(splits):
        for label, name in enumerate(KINDS[:2]):
            (root / split / name).mkdir(parents=True)
            for i in range(per_class):
                noise(1000 * place + 100 * label + i).save(root / split / name / f"{i}.png")
    return root


def relative(images):
    return [os.path.relpath(images.name(i), images.source.root) for i in range(len(images))]


def test_no_script_has_to_choose_by_test_data(tmp_path):
    """Without a split for validation, one is taken from `train`; the test split stays as it is."""
    folder = str(make_folders(tmp_path, ("train", "test")))
    whole = find_images(folder, val_fraction=0)
    assert list(whole.splits) == ["train", "test"] and len(whole.splits["train"]) == 20
    found = find_images(folder, val_fraction=0.3)
    assert list(found.splits) == ["train", "val", "test"]
    assert relative(found.splits["test"]) == relative(whole.splits["test"])
    assert np.bincount(found.splits["val"].labels).tolist() == [3, 3]
    taken = relative(found.splits["val"])
    assert all(name.startswith("train/") for name in taken)
    assert sorted(relative(found.splits["train"]) + taken) == sorted(
        relative(whole.splits["train"])
    )
    data = load_arrays(folder, val_fraction=0.3)
    assert [len(split) for split in data.splits.values()] == [14, 6, 20]
    assert list(load_arrays(folder).splits) == ["train", "test"]


def test_a_split_for_validation_is_used_as_it_is(tmp_path):
    folder = str(make_folders(tmp_path, ("train", "valid", "test")))
    found = find_images(folder, val_fraction=0.3)
    assert [len(images) for images in found.splits.values()] == [20, 20, 20]
    assert relative(found.splits["val"])[0] == "valid/cat/0.png"


def test_something_is_held_out(tmp_path):
    folder = str(make_folders(tmp_path, ("train",)))
    for load in (find_images, load_arrays):
        with pytest.raises(UserError, match="no test split and no val split: give --val_fraction"):
            load(folder, val_fraction=0)


def test_synthetic_arrays_get_a_val_split_too():
    whole, data = synthetic_arrays(3), load_arrays("synthetic", seed=3, val_fraction=0.1)
    assert list(whole.splits) == ["train", "test"]
    assert [len(data.splits[split]) for split in ("train", "val", "test")] == [4500, 500, 1000]
    assert torch.equal(data.splits["test"].images, whole.splits["test"].images)
    seen = {image.numpy().tobytes() for image in data.splits["train"].images}
    assert not any(image.numpy().tobytes() in seen for image in data.splits["val"].images)
    assert data.description != load_arrays("synthetic", seed=3).description


# ----------------------------------------------------------------------------- decoded images


@pytest.fixture
def decoded(monkeypatch):
    """Counts the images that are decoded."""
    seen, real_pixels = [], Encoded.pixels
    monkeypatch.setattr(Encoded, "pixels", lambda self: seen.append(self) or real_pixels(self))
    return seen


def test_a_second_start_decodes_nothing_until_a_file_changes(tmp_path, decoded):
    folder, cache = make_folders(tmp_path / "data", ("train", "test")), tmp_path / "cache"
    first = load_arrays(str(folder), cache_dir=cache)
    assert len(decoded) == 40
    again = load_arrays(str(folder), cache_dir=cache, val_fraction=0.2)
    assert len(decoded) == 40
    assert torch.equal(again.splits["test"].images, first.splits["test"].images)
    noise(77).save(folder / "test" / "dog" / "3.png")
    changed = load_arrays(str(folder), cache_dir=cache)
    assert len(decoded) == 60  # one split
    assert torch.equal(changed.splits["test"].images[13], pixels_of(77))


def test_a_second_start_decodes_nothing_until_a_table_changes(tmp_path, decoded):
    file = make_table(tmp_path / "photos.parquet")
    options = dict(label_column="kind", cache_dir=tmp_path / "cache")
    first = load_arrays(file, val_fraction=0.2, **options)
    assert len(decoded) == 30
    load_arrays(file, val_fraction=0.4, **options)
    assert len(decoded) == 30
    make_table(file, first_seed=50)
    changed = load_arrays(file, val_fraction=0.2, **options)
    assert len(decoded) == 60 and changed.description != first.description
    row = find_images(file, label_column="kind", val_fraction=0.2).splits["train"].rows[0]
    assert torch.equal(changed.splits["train"].images[0], pixels_of(50 + row))


def test_images_that_cannot_be_used_are_named(tmp_path):
    folder = make_folders(tmp_path / "data", ("train", "test"))
    (folder / "train" / "cat" / "4.png").write_bytes(b"a thesis")
    with pytest.raises(UserError, match=r"corrupt image in .*train/cat/4.png: it is not an image"):
        load_arrays(str(folder), cache_dir=tmp_path / "cache")
    assert not (tmp_path / "cache").exists() or not list((tmp_path / "cache").iterdir())
    noise(0).save(folder / "train" / "cat" / "4.png")
    with pytest.raises(UserError, match="cannot write the decoded images to /proc/nowhere"):
        load_arrays(str(folder), cache_dir="/proc/nowhere")


def test_a_test_split_without_labels_is_not_used(tmp_path):
    for split, labels in (("train", [0, 1] * 5), ("test", [-1] * 10)):
        rows = {"image": [png(noise(i)) for i in range(10)], "label": labels}
        features = datasets.Features(image=datasets.Value("binary"), label=datasets.Value("int64"))
        made = datasets.Dataset.from_dict(rows, features=features)
        made.to_parquet(str(tmp_path / f"{split}-00000-of-00001.parquet"))
    data = load_arrays(str(tmp_path), val_fraction=0.2)
    assert {split: len(samples) for split, samples in data.splits.items()} == {"train": 8, "val": 2}
    assert "images of a test split without classes: 10" in data.details[-1]


def test_a_batch_by_ids():
    data = synthetic_arrays(0, train=10, test=0).splits["train"]
    batch = ArrayBatches(data).batch([4, 2], torch.device("cpu"))
    assert batch["ids"].tolist() == [4, 2] and torch.equal(batch["labels"], data.labels[[4, 2]])
    assert torch.equal(batch["images"], data.images[[4, 2]])
    assert len(data.first(3)) == 3


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet", "arrow"])
def test_text_comes_from_the_same_tables(suffix, tmp_path):
    rows = datasets.Dataset.from_dict({"title": ["a", "b"], "body": ["one, two", "three\nfour"]})
    if suffix == "arrow":
        rows.save_to_disk(str(tmp_path / "text"))
    else:
        (tmp_path / "text").mkdir()
        write = {"csv": rows.to_csv, "jsonl": rows.to_json, "parquet": rows.to_parquet}[suffix]
        write(str(tmp_path / "text" / f"part.{suffix}"))
    for path in (tmp_path / "text", next((tmp_path / "text").glob(f"*.{suffix}"))):
        text = load_text(str(path), "body", 4)
        assert bytes(torch.cat([text.train, text.held_out])) == b"one, two\nthree\nfour\n"
        with pytest.raises(UserError, match="give --text_column, one of title, body"):
            load_text(str(path), "text", 4)
