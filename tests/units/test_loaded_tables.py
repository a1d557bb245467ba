"""Tables that the `datasets` library loads: what it is asked for, and what is said if it fails."""

import pytest

datasets = pytest.importorskip("datasets")

from utils.data import tables
from utils.data.scan import LeftOut
from utils.run.failures import UserError


@pytest.mark.parametrize("name", ["./a", "/nowhere/a", "~/none", "a.npz", "b/c.CSV"])
def test_a_path_without_a_file_is_no_hub_id(name):
    with pytest.raises(UserError, match=r": there is no such file or folder; or else$"):
        tables.local_path(name, "or else")
    assert tables.local_path("someone/data", "or else") is None


def test_the_library_knows_files_by_their_sizes(tmp_path, monkeypatch):
    asked, file, versions = [], tmp_path / "a.csv", []
    monkeypatch.setattr(datasets, "load_dataset", lambda **options: asked.append(options) or {})
    for text in ("x,y\n1,2\n", "x,y\n1,2\n", "x,y\n1,23\n"):
        file.write_text(text)
        assert tables.load_table(str(file)) == {}
        versions.append(asked[-1]["name"])
        assert asked[-1]["path"] == "csv" and asked[-1]["data_files"] == {"train": [str(file)]}
        assert asked[-1]["converters"][0] is str and not asked[-1]["streaming"]
    assert versions[0] == versions[1] != versions[2]
    (tmp_path / "b.tsv").write_text("x\ty\n1\t2\n")
    tables.load_table(str(tmp_path / "b.tsv"), streaming=True)
    assert asked[-1]["sep"] == "\t" and asked[-1]["streaming"]
    tables.load_table("someone/data", subset="small")
    assert asked[-1] == dict(path="someone/data", name="small", streaming=False)


def test_what_cannot_be_loaded_may_be_a_folder_that_is_missing(tmp_path, monkeypatch):
    def fail(**_):
        raise ValueError("the Hub is away.\nmore")

    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    monkeypatch.setattr(datasets, "load_dataset", fail)
    for name, given, ending in (
        ("missing", "or else", "; there is no such file or folder here; or else"),
        ("missing", "", "; there is no such file or folder here"),
        ("here", "or else", "; or else"),
        ("here", "", ""),
    ):
        with pytest.raises(UserError) as error:
            tables.load_table(name, alternatives=given)
        assert str(error.value) == f"cannot load --dataset {name} (the Hub is away){ending}"


def test_a_table_of_another_name_is_left_out_unless_it_is_the_only_one():
    left_out = LeftOut()
    assert tables.name_splits("d", {"some": 1}, left_out) == {"train": 1}
    found = tables.name_splits("d", {"dev": 1, "extra": 2, "training": 3}, left_out)
    assert list(found.items()) == [("train", 3), ("val", 1)]
    assert left_out.lines() == ["left out: splits of other names: 1 (extra)"]
    with pytest.raises(UserError, match="d: val and dev are both its val split: remove or rename"):
        tables.name_splits("d", {"val": 1, "dev": 2}, left_out)


def test_words_of_one_split_alone_are_names_of_any_kind():
    tables.refuse_almost_splits("d", {"train_a": None, "train_b": None})
    with pytest.raises(UserError, match="d: rename train_a: to train if it is a split"):
        tables.refuse_almost_splits("d", {"train_a": None, "val": "val"})


def test_some_are_held_out_and_some_stay_and_equal_ones_stay_together():
    assert tables.hold_out([3, 1, 2, 4], 0.5) == [1, 2]
    assert tables.hold_out([3, 1, 1, 4], 0.25) == [1, 2]
    assert tables.hold_out([2, 1], 0.01) == tables.hold_out([2, 1], 0.99) == [1]
    assert tables.hold_out([5, 5, 5], 0.5) == [0, 1]


def test_a_page_may_describe_its_folder(tmp_path):
    for page, described in (
        (b"# Photos\nconfigs: none", False),
        (b"---\nlicense: mit\n---\n\xff", False),
        (b"---\nlicense: mit\nconfigs:\n- data\n---\n\xff", True),
    ):
        (tmp_path / "README.md").write_bytes(page)
        assert tables.describes_itself(tmp_path) == described
    assert not tables.describes_itself(tmp_path / "none")
