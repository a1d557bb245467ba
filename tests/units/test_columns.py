"""Each value of a column of labels is a class, exactly, whatever its type."""

import numpy as np
import pytest
from harness.data import encoded, noise

from utils.images import columns
from utils.images.arrays import load_arrays
from utils.images.sources import find_images, find_to_evaluate
from utils.run.failures import UserError

datasets = pytest.importorskip("datasets")

NAMED = datasets.ClassLabel(names=["cat", "dog"])
DECLARED = datasets.ClassLabel(names=["cat", "bird", "cow", "dog"])


def make_labels(folder, kind, **labels):
    """Writes a Parquet file for each keyword, a split, with a column `label` of this type."""
    folder.mkdir(exist_ok=True)
    kind = datasets.Value(kind) if isinstance(kind, str) else kind
    features = datasets.Features(image=datasets.Value("binary"), label=kind)
    for split, values in labels.items():
        rows = {"image": [encoded(noise(i)) for i in range(len(values))], "label": values}
        made = datasets.Dataset.from_dict(rows, features=features)
        made.to_parquet(str(folder / f"{split}-00000-of-00001.parquet"))
    return str(folder)


def test_a_model_has_its_own_order_of_classes():
    """A class that it does not have is named, with its row."""
    rows = datasets.Dataset.from_dict({"label": ["dog", "cat", None, "dog"]})
    empty = datasets.Dataset.from_dict({"other": [1, 2]})
    tables, model = {"test": rows, "val": empty}, ["dog", "yak", "cat"]
    found, names = columns.read_labels("d", tables, "label", model)
    assert names == model and found["test"].tolist() == [0, 2, -1, 0]
    assert found["val"].tolist() == [-1, -1] and found["val"].dtype == np.int64
    with pytest.raises(
        UserError, match=r"class 'cat' of its test split \(row 1\) is not in those of"
    ):
        columns.read_labels("d", tables, "label", ["dog", "yak"])
    text = datasets.Dataset.from_dict({"label": ["1", "x", "-1", " "]})
    found, names = columns.read_labels("d", {"train": text}, "label")
    assert names == ["1", "x"] and found["train"].tolist() == [0, 1, -1, -1]
    truth = datasets.Dataset.from_dict({"label": [True, False]})
    assert columns.read_labels("d", {"train": truth}, "label")[1] == ["False", "True"]


def test_a_declared_class_without_images_is_left_out_and_named(tmp_path):
    name = make_labels(tmp_path / "d", DECLARED, train=[3, 0] * 6, test=[0, 3])
    data = find_images(name)
    assert data.class_names == ["cat", "dog"] and data.splits["test"].labels.tolist() == [0, 1]
    left_out = [line for line in data.details if "left out" in line]
    assert left_out == ["left out: classes without images to train with: 2 (bird)"]
    found = find_to_evaluate(name, ["dog", "cat"])
    assert found.splits["test"].labels.tolist() == [1, 0] and len(found.details) == 2


@pytest.mark.parametrize(
    ("kind", "labels", "says"),
    [
        (NAMED, dict(train=[0, 1, None] * 4), r"4 of 12 rows of the train split .* have no label"),
        (NAMED, dict(train=[0, 1, -1] * 4), r"or -1, in the column label \(the first is row 2\)"),
        (datasets.List(datasets.Value("int64")), dict(train=[[0], [1]] * 4), "has List.*, and not"),
        ("int64", dict(train=[-1, 0, 1] * 4), r"4 of 12 rows .* have no label, or -1"),
        ("string", dict(train=["a", " ", "b"] * 4), r"4 of 12 rows .* have no label"),
        ("float64", dict(train=[0.0, 1.0] * 4), "float64.*, and not one class for each image"),
        ("int64", dict(train=[-1, 1] * 4), "give a class another name than -1"),
        ("int64", dict(train=[None] * 4), "has no labels in its column label"),
        ("int64", dict(train=[0, 1] * 4, test=[0, 1, 2]), r"class '2' of its test split \(row 2\)"),
        ("string", dict(train=["a", "b"] * 4, validation=["c"]), "class 'c' of its val split"),
        (
            DECLARED,
            dict(train=[3, 0] * 6, test=[0, 3, 1]),
            r"class 'bird' of its test split \(row 2",
        ),
    ],
)
def test_labels_that_are_no_classes_are_one_line(kind, labels, says, tmp_path):
    name = make_labels(tmp_path / "d", kind, **labels)
    for load in (find_images, load_arrays):
        with pytest.raises(UserError, match=says) as error:
            load(name, val_fraction=0.2)
        assert "\n" not in str(error.value)


def test_a_test_split_without_labels_is_left_out(tmp_path):
    name = make_labels(tmp_path / "d", "int64", train=[0, 1] * 6, test=[-1] * 3)
    found = find_images(name, val_fraction=0.2)
    assert list(found.splits) == ["train", "val"]
    assert "images of a test split without classes: 3" in found.details[-1]
