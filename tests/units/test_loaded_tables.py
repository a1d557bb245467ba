"""Tables that the `datasets` library loads: what it is asked for, and what is said if it fails."""

import pytest

datasets = pytest.importorskip("datasets")

from utils.data import tables
from utils.run.failures import UserError


@pytest.fixture
def asked(monkeypatch):
    """What the library is asked for."""
    calls = []
    monkeypatch.setattr(datasets, "load_dataset", lambda **options: calls.append(options) or "rows")
    return calls


@pytest.mark.parametrize("name", ["./a", "/none/a", "~/none", "a.npz", "a.txt", "b/c.CSV"])
def test_a_path_without_a_file_is_no_hub_id(name):
    with pytest.raises(UserError, match=r": there is no such file or folder; or else$"):
        tables.local_path(name, "or else")
    assert tables.local_path("someone/data", "or else") is None


def test_the_library_knows_files_by_their_sizes(asked, tmp_path):
    file, versions = tmp_path / "a.csv", []
    for text in ("x,y\n1,2\n", "x,y\n1,2\n", "x,y\n1,23\n"):
        file.write_text(text)
        assert tables.load_table(str(file)) == "rows"
        versions.append(asked[-1]["name"])
        assert asked[-1]["path"] == "csv" and asked[-1]["data_files"] == {"train": [str(file)]}
        assert asked[-1]["converters"] == {"x": str, "y": str} and not asked[-1]["streaming"]
    assert versions[0] == versions[1] != versions[2]
    (tmp_path / "b.tsv").write_text("x\ty\n1\t2\n")
    tables.load_table(str(tmp_path / "b.tsv"), streaming=True)
    assert asked[-1]["sep"] == "\t" and asked[-1]["streaming"]
    tables.load_table("someone/data", subset="small")
    assert asked[-1] == dict(path="someone/data", name="small", streaming=False)


@pytest.mark.parametrize(
    ("name", "ending"),
    [("missing", "; there is no such file or folder here; or else"), ("here", "; or else")],
)
def test_what_cannot_be_loaded_may_be_a_folder_that_is_missing(name, ending, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()

    def fail(**_):
        raise ValueError("the Hub is away.\nmore")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(UserError) as error:
        tables.load_table(name, alternatives="or else")
    assert str(error.value) == f"cannot load --dataset {name} (the Hub is away){ending}"
    with pytest.raises(UserError) as error:
        tables.load_table("missing")
    assert str(error.value).endswith("; there is no such file or folder here")


def test_columns_are_checked_before_they_are_read(tmp_path):
    empty = tmp_path / "a.csv"
    empty.write_text("\n\n")
    assert tables.header(empty) == []
    with pytest.raises(UserError, match=r"by its name, train\.csv is one of its splits, and other"):
        tables.files_by_split(tmp_path, ["train.csv", "other.csv"])
