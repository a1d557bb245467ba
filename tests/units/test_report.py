"""What is said about a data set before training."""

from types import SimpleNamespace

import numpy as np
import pytest
from harness.fakes import accelerator

from utils.data import report
from utils.run.failures import UserError


def test_a_data_set_must_be_the_same_on_every_process(monkeypatch, capsys):
    data = SimpleNamespace(description="8 images", details=["cat 4", "dog 4"])
    for rank in (0, 1):
        monkeypatch.setattr(report, "gather", lambda _, own: [own, "8 images"])
        assert report.agree(accelerator(2, rank), "photos", data) == "8 images"
    assert capsys.readouterr().out == "data: 8 images\n  cat 4\n  dog 4\n"
    monkeypatch.setattr(report, "gather", lambda _, own: [own, "7 images"])
    says = "--dataset photos differs between machines: 7 images against 8 images"
    with pytest.raises(UserError, match=says):
        report.agree(accelerator(2, 0), "photos", data)


class Split(list):
    """Samples with a fingerprint: their first."""

    def fingerprint(self):
        return str(self[0])


def test_a_description_counts_splits_and_classes_and_knows_data_by_a_checksum():
    splits = {"train": Split(range(1200)), "val": Split(range(30)), "test": Split(range(2))}
    said = report.describe_images(splits, ["cat", "dog"])
    start, end = "1,200 train, 30 val and 2 test images of 2 classes (fingerprint ", said[-13:]
    assert said == start + end and len(end) == 13 and end.endswith(")")
    others = [report.describe_images(splits, ["dog", "cat"])]
    others.append(report.describe_images(splits | {"test": Split([1, 0])}, ["cat", "dog"]))
    assert len({said, *others}) == 3
    whole = report.describe_images({"all": Split(range(5))}, ["cat"])
    assert whole.startswith("5 images of 1 classes (")


def test_lines_about_classes_and_what_was_left_out():
    many = SimpleNamespace(labels=np.repeat(np.arange(12), 91))
    few = SimpleNamespace(labels=np.array([0, 0, 2]))
    names = [f"c{i}" for i in range(12)]
    first, second = report.count_classes({"train": many, "val": few}, names)
    counts = ", ".join(f"c{i} 91" for i in range(10))
    assert first == f"train 1,092: {counts}, and 2 more classes"
    assert second.startswith("val   3: c0 2, c1 0, c2 1, c3 0")
    assert report.count_classes({"all": few}, names[:10])[0].endswith("c9 0")
    left_out = report.LeftOut()
    for added in (("videos", "a.mp4"), ("hidden files", ".x", 1500), ("videos", "b.mp4", 2)):
        left_out.add(*added)
    expected = ["left out: hidden files: 1,500 (.x)", "left out: videos: 3 (a.mp4)"]
    assert left_out.lines() == expected
