"""Every script takes the same sources of data: tables with any columns, folders, 32x32 images."""

import datetime
import io
import os
from decimal import Decimal
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch._subclasses.fake_tensor import FakeTensorMode

from utils.data.arrays import load_arrays, on_device, synthetic_arrays
from utils.data.images import BadImage, Encoded
from utils.data.sources import find_images, find_to_evaluate
from utils.data.text import load_text
from utils.run.failures import UserError

datasets = pytest.importorskip("datasets")

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
        ({}, "has several image columns, photo, mask: give --columns IMAGE LABEL"),
        ({"image_column": "photo"}, "has no label column that is recognized, only photo, kind"),
        ({"image_column": "score"}, "the column score of .* has no images, but Value"),
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
        assert len(load(folder, val_fraction=None).splits["val"]) == 2  # a tenth of each class


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


def test_an_evaluation_leaves_out_what_training_refuses(tmp_path):
    """Also if the evaluation came first, and decoded the images for both."""
    folder, cache = make_folders(tmp_path / "data", ("train",)) / "train", tmp_path / "cache"
    (folder / "cat" / "4.png").write_bytes(b"a thesis")
    split = load_arrays(str(folder), class_names=["cat", "dog"], cache_dir=cache).splits["all"]
    place = [split.name(i) for i in range(20)].index(str(folder / "cat" / "4.png"))
    assert (split.labels < 0).nonzero().flatten().tolist() == [place]
    assert not split.images[place].any() and split.images.flatten(1).any(1).sum() == 19
    chosen = split.select(np.array([place + 1]))
    assert chosen.name(0) == split.name(place + 1) and chosen.labels[0] == 0
    with pytest.raises(UserError, match=r"corrupt image in .*cat/4.png: it is not an image"):
        load_arrays(str(folder), val_fraction=0.2, cache_dir=cache)
    noise(9).save(folder / "cat" / "4.png")
    repaired = load_arrays(str(folder), class_names=["cat", "dog"], cache_dir=cache).splits["all"]
    others = torch.arange(20) != place
    assert torch.equal(repaired.images[others], split.images[others]) and repaired.labels.min() == 0


def test_a_test_split_without_labels_is_not_used(tmp_path):
    for split, labels in (("train", [0, 1] * 5), ("test", [-1] * 10)):
        rows = {"image": [png(noise(i)) for i in range(10)], "label": labels}
        features = datasets.Features(image=datasets.Value("binary"), label=datasets.Value("int64"))
        made = datasets.Dataset.from_dict(rows, features=features)
        made.to_parquet(str(tmp_path / f"{split}-00000-of-00001.parquet"))
    data = load_arrays(str(tmp_path), val_fraction=0.2)
    assert {split: len(samples) for split, samples in data.splits.items()} == {"train": 8, "val": 2}
    assert "images of a test split without classes: 10" in data.details[-1]


def test_images_are_kept_on_a_gpu_if_they_fit_in_half_of_its_free_memory(monkeypatch, capsys):
    data = synthetic_arrays(0, train=10, test=5)
    accelerator = SimpleNamespace(device=torch.device("cuda", 0), is_main_process=True)
    size = 15 * 3 * 32 * 32
    for free, home in ((2 * size, "cuda"), (2 * size - 1, "cpu")):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free, None))
        with FakeTensorMode(allow_non_fake_inputs=True):
            splits = on_device(accelerator, data.splits)
        assert {split.images.device.type for split in splits.values()} == {home}
        assert {split.labels.device.type for split in splits.values()} == {home}
        assert splits["train"].device == accelerator.device
    assert capsys.readouterr().err.count("stay in that of the host") == 1
    accelerator.device = torch.device("cpu")
    assert torch.equal(
        on_device(accelerator, data.splits)["test"].images, data.splits["test"].images
    )


def test_a_batch_by_ids():
    data = synthetic_arrays(0, train=10, test=0).splits["train"]
    batch = data.batch(torch.tensor([4, 2]))
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


# ----------------------------------------------------------------------------- labels


def make_labels(folder, feature, **labels):
    """Writes a Parquet file for each keyword, a split, with a column `label` of this type."""
    folder.mkdir(exist_ok=True)
    for split, values in labels.items():
        rows = {"image": [png(noise(i)) for i in range(len(values))], "label": values}
        features = datasets.Features(image=datasets.Value("binary"), label=feature)
        made = datasets.Dataset.from_dict(rows, features=features)
        made.to_parquet(str(folder / f"{split}-00000-of-00001.parquet"))
    return str(folder)


NAMED = datasets.ClassLabel(names=["cat", "dog"])
DAYS = [20240101.0, 20240102.0, 20240103.0, 20240104.0]


@pytest.mark.parametrize(
    ("kind", "values", "class_names"),
    [
        (NAMED, [0, 1], ["cat", "dog"]),
        ("float64", DAYS, [f"{day:.0f}" for day in DAYS]),
        ("float32", [0.0, 1.0, 7.0], ["0", "1", "7"]),
        ("int64", [2**62, 2**62 + 1], [str(2**62), str(2**62 + 1)]),
        ("int8", [-1, 1], ["-1", "1"]),
        ("float64", [-1.0, 1.0], ["-1", "1"]),
        ("bool", [True, False], ["False", "True"]),
        ("decimal128(3, 1)", [Decimal("1.0"), Decimal("12.0")], ["1", "12"]),
        ("string", ["b", "-1", "1"], ["-1", "1", "b"]),
        ("date32", [datetime.date(2024, 1, 2), datetime.date(2024, 1, 1)], None),
    ],
)
def test_every_value_of_a_label_is_a_class(kind, values, class_names, tmp_path):
    feature = datasets.Value(kind) if isinstance(kind, str) else kind
    name = make_labels(tmp_path / "d", feature, train=values * 6)
    found = find_images(name, val_fraction=0.2)
    assert found.class_names == (class_names or ["2024-01-01", "2024-01-02"])
    labels = np.concatenate([images.labels for images in found.splits.values()])
    assert np.bincount(labels).tolist() == [6] * len(values)
    train = found.splits["train"]
    expected = values if isinstance(kind, str) else found.class_names
    for index, row in enumerate(train.rows):
        value = expected[row % len(values)]
        shown = f"{value:.0f}" if isinstance(value, float | Decimal) else str(value)
        assert found.class_names[train.labels[index]] == shown


def test_a_declared_class_without_images_is_left_out_and_named(tmp_path):
    kind = datasets.ClassLabel(names=["cat", "bird", "cow", "dog"])
    name = make_labels(tmp_path / "d", kind, train=[3, 0] * 6, test=[0, 3])
    data = find_images(name)
    assert data.class_names == ["cat", "dog"]
    assert data.splits["test"].labels.tolist() == [0, 1]
    left_out = [line for line in data.details if "left out" in line]
    assert left_out == ["left out: classes without images to train with: 2 (bird)"]
    found = find_to_evaluate(name, ["dog", "cat"])
    assert found.splits["test"].labels.tolist() == [1, 0] and len(found.details) == 2
    name = make_labels(tmp_path / "other", kind, train=[3, 0] * 6, test=[0, 3, 1])
    with pytest.raises(UserError, match=r"class bird of its test split \(row 2\) is not in the tr"):
        find_images(name)


@pytest.mark.parametrize(
    ("kind", "labels", "says"),
    [
        (NAMED, dict(train=[0, 1, None] * 4), r"4 of 12 rows of the train split .* have no label"),
        (datasets.List(datasets.Value("int64")), dict(train=[[0], [0, 1]] * 4), "several labels"),
        ("int64", dict(train=[-1, 0, 1] * 4), r"4 of 12 rows .* have no label, or -1"),
        ("string", dict(train=["a", " ", "b"] * 4), r"4 of 12 rows .* have no label"),
        ("float64", dict(train=[0.13, 2.5, 0.7] * 4), r"numbers such as 0.13, .* measurements"),
        ("float64", dict(train=[float("inf"), 1.0] * 4), "numbers such as inf"),
        ("decimal128(3, 1)", dict(train=[Decimal("1.5"), Decimal("2.5")] * 4), "such as 1.5"),
        (
            "float32",
            dict(train=DAYS * 4),
            "float32 values such as 20240100, .* too large to be exa",
        ),
        ("float64", dict(train=[2.0**53 + 2, 1.0] * 4), "too large to be exact"),
        ("int64", dict(train=[None] * 4), "has no labels in its column label"),
        ("int64", dict(train=[0, 1] * 4, test=[0, 1, 2]), r"class 2 of its test split \(row 2\)"),
        ("string", dict(train=["a", "b"] * 4, validation=["c"]), "class c of its val split"),
    ],
)
def test_labels_that_are_no_classes_are_one_line(kind, labels, says, tmp_path):
    feature = datasets.Value(kind) if isinstance(kind, str) else kind
    name = make_labels(tmp_path / "d", feature, **labels)
    for load in (find_images, load_arrays):
        with pytest.raises(UserError, match=says) as error:
            load(name, val_fraction=0.2)
        assert "\n" not in str(error.value)


def test_a_test_split_with_one_of_two_signs_keeps_its_labels(tmp_path):
    name = make_labels(tmp_path / "d", datasets.Value("int64"), train=[-1, 1] * 6, test=[1, -1, 1])
    found = find_images(name, val_fraction=0.2)
    assert found.splits["test"].labels.tolist() == [1, 0, 1]


# ----------------------------------------------------------------------------- splits of tables


def rename(folder, *names):
    for old, new in zip(sorted(folder.iterdir()), names, strict=True):
        (folder / new).parent.mkdir(exist_ok=True)
        old.rename(folder / new)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["test-0.parquet", "train-0.parquet"], {"test": 4, "train": 8}),
        (["Testing.parquet", "Training.parquet"], {"test": 4, "train": 8}),
        (["test/0.parquet", "train/0.parquet"], {"test": 4, "train": 8}),
        (["birds_valid.parquet", "birds_train.parquet"], {"val": 4, "train": 8}),
        # The library's search for key words would drop one of these.
        (["test_tube.parquet", "train_station.parquet"], {"train": 12}),
        (["test_tube.parquet", "cats.parquet"], {"train": 12}),
    ],
)
def test_splits_of_tables_by_the_names_of_files(names, expected, tmp_path):
    values = dict(test=[0, 1] * 2, train=[0, 1] * 4)
    name = make_labels(tmp_path / "d", datasets.Value("int64"), **values)
    rename(tmp_path / "d", *names)
    found = find_images(name, val_fraction=0 if len(expected) > 1 else 0.25)
    if len(expected) > 1:
        assert {split: len(images) for split, images in found.splits.items()} == expected
    else:
        assert sum(map(len, found.splits.values())) == expected["train"]


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["notes.parquet", "train.parquet"], r"train.parquet is one of its splits, and notes"),
        (["test.parquet", "val.parquet"], "has no train split, only"),
    ],
)
def test_tables_that_are_ambiguous_are_one_line(names, says, tmp_path):
    values = dict(test=[0, 1] * 2, train=[0, 1] * 4)
    name = make_labels(tmp_path / "d", datasets.Value("int64"), **values)
    rename(tmp_path / "d", *names)
    with pytest.raises(UserError, match=says):
        find_images(name)


# ----------------------------------------------------------------------------- rows that name files


def rows_with_paths(folder, paths, suffix="parquet"):
    folder.mkdir(exist_ok=True)
    rows = {"image": [str(path) for path in paths], "label": [0, 1] * (len(paths) // 2)}
    file = folder / f"list.{suffix}"
    table = datasets.Dataset.from_dict(rows)
    {"parquet": table.to_parquet, "csv": table.to_csv, "jsonl": table.to_json}[suffix](str(file))
    return str(file)


def read_all(file):
    found = find_images(file, image_column="image", val_fraction=0.25)
    return [i.open(k).pixels() for i in found.splits.values() for k in range(len(i))]


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/dev/zero", "is not in the folder of the table"),
        ("../outside.png", "is not in the folder of the table"),
        ("inside/../../outside.png", "is not in the folder of the table"),
        ("{outside}", "is not in the folder of the table"),
        ("fifo.png", "not a regular file"),
        ("zero.png", "not a regular file"),
        ("nul\0byte", "null|NUL"),
    ],
)
def test_rows_name_regular_files_of_their_folder_only(path, says, tmp_path):
    folder = tmp_path / "d"
    folder.mkdir()
    noise(0).save(tmp_path / "outside.png")
    os.mkfifo(folder / "fifo.png")
    os.symlink("/dev/zero", folder / "zero.png")
    path = path.format(outside=tmp_path / "outside.png")
    file = rows_with_paths(folder, [path] * 8)
    with pytest.raises(BadImage, match=says):
        read_all(file)
    with pytest.raises(UserError, match=says) as error:
        load_arrays(file, image_column="image", val_fraction=0.25, cache_dir=tmp_path / "c")
    assert "\n" not in str(error.value)


def test_rows_may_name_files_beside_their_table_and_a_list_any(tmp_path):
    folder = tmp_path / "d"
    for i in range(8):
        (folder / "in").mkdir(parents=True, exist_ok=True)
        noise(i).save(folder / "in" / f"{i}.png")
    relative = [f"in/{i}.png" for i in range(8)]
    absolute = [folder / name for name in relative]
    assert len(read_all(rows_with_paths(folder, relative))) == 8
    assert len(read_all(rows_with_paths(folder, absolute))) == 8
    for suffix in ("csv", "jsonl"):  # a person can read and write these
        assert len(read_all(rows_with_paths(tmp_path / "lists", absolute, suffix))) == 8
    with pytest.raises(BadImage, match="not in the folder of the table"):
        read_all(rows_with_paths(tmp_path / "tables", absolute))
    os.symlink(folder, tmp_path / "link")
    linked = rows_with_paths(tmp_path / "link", absolute)
    assert len(read_all(linked)) == 8
