"""Which documents a data set of a language model has, of which kind, and in which splits."""

import codecs
import datetime
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from utils.language.documents import (
    find_documents,
    make_conversations,
    ordinal,
    ordinal_in_words,
    read_segments,
    year_in_words,
)
from utils.language.packing import TokenSettings
from utils.run.failures import UserError

CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
PAIR = {"prompt": "2024-01-02", "completion": "007"}
TEXT = {"text": "2024-01-02"}
TURNS = {"prompt": CHAT["messages"][:1], "completion": CHAT["messages"][1:]}


def write(root, **files):
    """Writes files: `a_jsonl` becomes a.jsonl, `sub__a_txt` sub/a.txt."""
    for name, content in files.items():
        path = root.joinpath(*name.replace("_", ".").split(".."))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


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


@pytest.mark.parametrize(
    ("row", "kind", "asked"),
    [
        (CHAT, "messages", "messages"),
        (PAIR, "prompt", "prompt"),
        (TURNS, "prompt", "messages"),
        (TEXT, "text", "text"),
    ],
)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "csv"])
def test_columns_decide_in_files_of_every_format(row, kind, asked, suffix, tmp_path):
    rows = [{**row, "id": number, "when": "2024-01-02"} for number in range(3)]
    path = tmp_path / f"a.{suffix}"
    if suffix != "csv":  # an empty row does not say how a model is asked
        rows.insert(0, dict.fromkeys(rows[0]))
    elif row in (CHAT, TURNS):
        pytest.skip("a CSV file has no lists")
    path.write_text(lines(rows)) if suffix == "jsonl" else write_table(path, rows)
    found, splits = load(path)
    assert found == kind and set(splits) == {"train"}
    assert [{key: some[key] for key in row} for some in splits["train"][-3:]] == [row] * 3
    assert find(path).asked == asked
    stream = find(path, streaming=True)
    assert (stream.kind, stream.asked) == (kind, asked)
    assert not hasattr(stream.splits["train"].rows, "__len__")  # rows are read one by one


@pytest.mark.parametrize("names", [("train", "val"), ("train", "test"), ("train", "dev", "test")])
def test_splits_of_the_data(names, tmp_path):
    for name in names:
        write(tmp_path, **{f"{name}_jsonl": lines([{"text": name}] * 2)})
    data = find(tmp_path)
    assert {split: read(rows)[0]["text"] for split, rows in data.splits.items()} == {
        "train": "train",
        {"dev": "val"}.get(names[1], names[1]): names[1],
    }
    said = " ".join(data.details)
    assert ("test, not used: 2 rows" in said) == (len(names) == 3)
    assert ("test: 2 rows" in said) == (names[1] == "test")


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


@pytest.mark.parametrize("name", ["a_txt", "a_jsonl"])
def test_rows_change_their_fingerprint_with_their_content(name, tmp_path):
    seen = set()
    for text in ("one", "two"):
        folder = write(tmp_path / text, **{name: lines([{"text": text}] * 3)})
        prints = [find(folder).splits["train"].fingerprint for _ in range(2)]
        assert prints[0] == prints[1]
        seen.add(prints[0])
    assert len(seen) == 2


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (dict(a_jsonl=lines([{"turns": [], "id": 1}])), "columns turns, id; one needs messages"),
        (dict(a_jsonl=lines([{"prompt": "a"}])), "columns prompt; one needs"),
        (dict(a_csv="prompt,completion\nIs 1, or 2?,2\n"), "its first row has 3 fields: name"),
        (dict(a_csv="text\n" + "b\n" * 30 + "b, more\n"), "Expected 1 fields in line 32, saw 2"),
        (dict(a_csv="text;label\nb;1\n"), "a.csv are separated by ';': convert it to CSV"),
        (dict(a_jsonl="[" * 100_000), "a.jsonl does not hold an object in each line"),
        (dict(a_jsonl='{"text": "a\x01"}'), "row 0 of .* is not JSON: Invalid control character"),
        (dict(a_json=json.dumps([TEXT])), "of one list, make lines with `jq -c"),
        (dict(a_txt="six".encode("utf-16")), "a.txt: it is not UTF-8"),
        (dict(val_txt="a" * 99, test_txt="b" * 99), "has no train split"),
        (dict(a_csv_gz=b"no"), "holds no file that ends in"),
        ({"a::b_jsonl": lines([TEXT])}, "rename .*a::b.jsonl, because"),
        (dict(a_jsonl=lines([TEXT]) + "{"), "row 1 of .* is not JSON"),
        (dict(a_jsonl=lines([TEXT]) + "[" * 100_000), "row 1 of .* is not JSON"),
    ],
)
def test_data_that_cannot_be_used_is_one_line(files, says, tmp_path):
    with pytest.raises(UserError, match=says) as error:
        load(write(tmp_path, **files))
    assert "\n" not in str(error.value)


def test_a_subset_is_of_the_hub(tmp_path, monkeypatch):
    import datasets

    asked = {}

    def load_dataset(path, name=None, **options):
        asked.update(path=path, name=name)
        if name is None:
            raise ValueError("Config name is missing.\nPlease pick one")
        return datasets.DatasetDict(train=datasets.Dataset.from_list([TEXT] * 3))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load("owner/name", subset="sample-10BT") == ("text", {"train": [TEXT] * 3})
    assert asked == dict(path="owner/name", name="sample-10BT")
    local = str(write(tmp_path, a_txt="text"))
    for name, subset, says in (
        ("owner/name", None, "owner/name has several subsets: give --subset"),
        (local, "de", "--subset de: only a Hub id has subsets"),
        ("./missing.jsonl", None, "there is no such file"),
    ):
        with pytest.raises(UserError, match=says):
            find(name, subset=subset)


# ---------------------------------------------------------------------------------------- dates


def test_dates_in_words():
    days = {1: "first", 3: "third", 12: "twelfth", 13: "thirteenth", 20: "twentieth"}
    days |= {22: "twenty-second", 30: "thirtieth"}
    assert {day: ordinal_in_words(day) for day in days} == days
    assert [ordinal(day) for day in (1, 2, 3, 4, 11, 12, 13, 21, 22, 23)] == (
        "1st 2nd 3rd 4th 11th 12th 13th 21st 22nd 23rd".split()
    )
    said = {1600: "sixteen hundred", 1905: "nineteen oh five", 1994: "nineteen ninety-four"}
    said |= {2000: "two thousand", 2007: "two thousand and seven", 2024: "twenty twenty-four"}
    assert {year: year_in_words(year) for year in said} == said


def test_synthetic_conversations_are_all_different_and_share_no_date():
    data = find("synthetic", seed=3)
    assert (data.kind, set(data.splits), data.asked) == ("messages", {"train", "val"}, "messages")
    splits = {split: list(rows) for split, rows in data.splits.items()}
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 4000, "val": 200}
    assert splits == make_conversations(3) and splits != make_conversations(4)
    prints = [
        rows.fingerprint for seed in (3, 4) for rows in find("synthetic", seed=seed).splits.values()
    ]
    assert len(set(prints)) == 4
    shapes, answers = Counter(), []
    for row in [*splits["train"], *splits["val"]]:
        shapes["".join(message["role"][0] for message in row["messages"])] += 1
        answers += [said["content"] for said in row["messages"] if said["role"] == "assistant"]
    assert len(set(answers)) == len(answers) > 4000
    assert {datetime.date.fromisoformat(answer).year for answer in answers} == {*range(1600, 2100)}
    shares = {shape: count / 4200 for shape, count in shapes.items()}
    assert shares == pytest.approx(dict(ua=4 / 9, sua=2 / 9, uaua=2 / 9, suaua=1 / 9), abs=0.03)
