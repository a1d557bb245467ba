"""Which documents a data set of a language model has, of which kind, and in which splits."""

import codecs
import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
from harness.chats import write_files as write

from utils.language.documents import find_documents, read_segments
from utils.language.packing import TokenSettings
from utils.run.failures import UserError

CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
PAIR = {"prompt": "2024-01-02", "completion": "007"}
TEXT = {"text": "2024-01-02"}


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def read(rows):
    """The rows, with the text of a file in place of its path."""
    found = []
    for row in rows:
        text = row and row.get("text")
        is_file = isinstance(text, Path)
        found.append({**row, "text": "".join(read_segments(text))} if is_file else row)
    return found


def find(path, streaming=False, **options):
    return find_documents(str(path), TokenSettings(None, 8, **options), streaming=streaming)


def load(path, **options):
    data = find(path, **options)
    return data.kind, {split: read(rows) for split, rows in data.splits.items()}


def test_a_table_has_no_fields_of_other_rows(tmp_path):
    """Parquet has the fields of all rows in each of them; a missing content stays missing."""
    calls = [
        {"function": {"name": "weather", "arguments": {"city": "Rome"}}},
        {"function": {"name": "add", "arguments": {"a": 0, "b": "", "c": False}}},
    ]
    said = [dict(role="assistant", tool_calls=[call]) for call in calls]
    rows = [{"messages": [*CHAT["messages"], message], "tools": None} for message in said]
    rows[0]["tools"] = [{"name": "weather", "parameters": {"city": {"type": "string"}}}]
    rows.append({"messages": None, "tools": None})
    write_table(tmp_path / "a.parquet", rows)
    assert load(tmp_path / "a.parquet")[1] == {"train": rows}
    shards = replace(find(tmp_path / "a.parquet").splits["train"], shard_size=2).shards()
    assert [(shard.first, list(shard)) for shard in shards] == [(0, rows[:2]), (2, rows[2:])]


def write_table(path, rows):
    import datasets

    table = datasets.Dataset.from_list(rows)
    table.to_parquet(str(path)) if path.suffix == ".parquet" else table.to_csv(str(path))


@pytest.mark.parametrize(("row", "kind"), [(CHAT, "messages"), (PAIR, "prompt"), (TEXT, "text")])
@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "csv"])
def test_columns_decide_in_files_of_every_format(row, kind, suffix, tmp_path):
    rows = [{**row, "id": number, "when": "2024-01-02"} for number in range(3)]
    path = tmp_path / f"a.{suffix}"
    if suffix == "csv" and row == CHAT:
        pytest.skip("a CSV file has no lists")
    path.write_text(lines(rows)) if suffix == "jsonl" else write_table(path, rows)
    found, splits = load(path)
    assert found == kind and set(splits) == {"train"}
    assert [{key: some[key] for key in row} for some in splits["train"][-3:]] == [row] * 3
    stream = find(path, streaming=True)
    assert stream.kind == kind
    assert not hasattr(stream.splits["train"].rows, "__len__")  # rows are read one by one


@pytest.mark.parametrize("names", [("train", "val"), ("train", "test"), ("train", "dev", "test")])
def test_splits_of_the_data(names, tmp_path):
    for name in names:
        write(tmp_path, **{f"{name}_jsonl": lines([{"text": name}] * 2)})
    data, held_out = find(tmp_path), names[1]
    texts = {split: read(rows)[0]["text"] for split, rows in data.splits.items()}
    assert texts == {"train": "train", {"dev": "val"}.get(held_out, held_out): held_out}
    said = " ".join(data.details)
    assert ("test, not used: 2 rows" in said) == (len(names) == 3)
    assert ("test: 2 rows" in said) == (held_out == "test")


def test_each_file_of_plain_text_is_a_document(tmp_path):
    """Others are left out."""
    write(tmp_path, a_txt="one\n", sub__c_txt="two", d_txt=codecs.BOM_UTF8 + b"three")
    write(tmp_path, README_md="no", e_txt_gz=b"no", f_txt=b"")
    data = find(tmp_path)
    texts = [row["text"] for row in read(data.splits["train"])]
    assert (data.kind, sorted(texts)) == ("text", sorted(["", "one\n", "three", "two"]))
    assert [len(shard) for shard in data.splits["train"].shards()] == [1] * 4
    said = "\n".join(data.details)
    assert "train: 4 files" in said and ".md files" in said and ".gz files" in said
    with pytest.raises(UserError, match=r"is mapped into memory: leave out --streaming"):
        find(tmp_path, streaming=True)
    with pytest.raises(UserError, match="is compressed: unpack it first"):
        find(tmp_path / "e.txt.gz")


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (dict(a_jsonl=lines([{"turns": [], "id": 1}])), "columns turns, id; one needs messages"),
        (dict(a_csv="prompt,completion\nIs 1, or 2?,2\n"), "more fields than there are names"),
        (dict(a_csv="text;label\nb;1\n"), "has the columns text;label; one needs"),
        (dict(a_json=json.dumps([TEXT])), "row 0 of .* make lines of a list with `jq -c"),
        (dict(a_txt="six".encode("utf-16")), "a.txt: it is not UTF-8"),
        (dict(val_txt="a" * 99, test_txt="b" * 99), "has no train split"),
        (dict(a_txt="a", b_jsonl=lines([TEXT])), "both a.txt and b.jsonl: give files of one form"),
        (dict(a_jsonl=lines([TEXT]) + "{"), "row 1 of .* in JSON: Expecting property"),
    ],
)
def test_data_that_cannot_be_used_is_one_line(files, says, tmp_path):
    with pytest.raises(UserError, match=says) as error:
        load(write(tmp_path, **files))
    assert "\n" not in str(error.value)


def test_a_subset_is_of_the_hub(tmp_path, monkeypatch):
    import datasets

    def load_dataset(path, name=None, **options):
        if name is None:
            raise ValueError("Config name is missing.\nPlease pick one")
        return datasets.DatasetDict(train=datasets.Dataset.from_list([{"text": f"{path} {name}"}]))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    rows = [{"text": "owner/name sample-10BT"}]
    assert load("owner/name", subset="sample-10BT") == ("text", {"train": rows})
    for name, subset, says in (
        ("owner/name", None, "owner/name has several subsets: give --subset"),
        (write(tmp_path, a_txt="text"), "de", "--subset de: only a Hub id has subsets"),
        ("./missing.jsonl", None, "there is no such file"),
    ):
        with pytest.raises(UserError, match=says):
            find(name, subset=subset)


def test_synthetic_conversations_are_the_same_on_every_machine():
    """The figures on the pages are of them. No date is there twice."""
    data, others = find("synthetic", seed=3), find("synthetic", seed=4)
    assert data.kind == "messages"
    splits = {split: list(rows) for split, rows in data.splits.items()}
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 4000, "val": 200}
    assert sha256(json.dumps(splits).encode()).hexdigest().startswith("c9bc515b92c50c10")
    assert len({rows.fingerprint for some in (data, others) for rows in some.splits.values()}) == 4
    assert list(others.splits["val"]) != splits["val"]
    messages = [said for rows in splits.values() for row in rows for said in row["messages"]]
    answers = [said["content"] for said in messages if said["role"] == "assistant"]
    assert len(set(answers)) == len(answers) > 4000
