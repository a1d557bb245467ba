"""Which documents a data set of a language model has, of which kind, and in which splits."""

import bz2
import codecs
import gzip
import itertools
import json
import os

import pytest

from utils.data import documents as module
from utils.data.dates import (
    date_in_words,
    make_conversations,
    ordinal,
    ordinal_in_words,
    year_in_words,
)
from utils.data.documents import find_documents, open_documents, segments, segments_of
from utils.run.failures import UserError

CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
PAIR = {"prompt": "2024-01-02", "completion": "007"}
TEXT = {"text": "2024-01-02"}


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
    """The rows, with a text as a whole."""
    found = []
    for row in rows:
        text = row and row.get("text")
        found.append({**row, "text": "".join(text)} if hasattr(text, "__next__") else row)
    return found


def load(path, **options):
    data = find_documents(str(path), **options)
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


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_how_a_model_is_asked(tmp_path, suffix):
    prompt, completion = ([message] for message in CHAT["messages"])
    chats = [{"prompt": prompt, "completion": completion}] * 2
    for rows, asked in (([CHAT] * 2, "messages"), ([PAIR] * 2, "prompt"), (chats, "messages")):
        empty = dict.fromkeys(rows[0])
        file = tmp_path / f"a.{suffix}"
        if suffix == "parquet":
            write_table(file, [empty, *rows])
        else:
            file.write_text(lines([empty, *rows]))
        assert find_documents(str(file)).asked == asked == open_documents(str(file)).asked


@pytest.mark.parametrize("place", ["chats[1].jsonl", "what?.jsonl", "[2024] x/a*.jsonl"])
def test_names_that_look_like_patterns(tmp_path, place):
    """Beside files that they would match."""
    for name in (place, "chats1.jsonl", "what1.jsonl", "2 x/ab.jsonl"):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(lines([{"text": name}] * 2))
    assert load(tmp_path / place)[1] == {"train": [{"text": place}] * 2}
    if "/" in place:
        assert load((tmp_path / place).parent)[1] == {"train": [{"text": place}] * 2}


def test_a_name_that_looks_like_an_archive(tmp_path):
    (tmp_path / "a::b.jsonl").write_text(lines([TEXT]))
    with pytest.raises(UserError, match=r"rename .*a::b.jsonl, because"):
        find_documents(str(tmp_path))


def test_a_file_of_another_size_and_the_same_time_is_read_again(tmp_path):
    for count in (2, 3):
        write(tmp_path, a_jsonl=lines([TEXT] * count))
        os.utime(tmp_path / "a.jsonl", (1, 1))
        assert len(load(tmp_path)[1]["train"]) == count


def write_table(path, rows):
    import datasets

    table = datasets.Dataset.from_list(rows)
    table.to_parquet(str(path)) if path.suffix == ".parquet" else table.to_csv(str(path))


@pytest.mark.parametrize(("row", "kind"), [(CHAT, "messages"), (PAIR, "prompt"), (TEXT, "text")])
@pytest.mark.parametrize(
    "suffix", ["jsonl", "ndjson", "json", "jsonl_gz", "array", "parquet", "csv"]
)
def test_columns_decide_in_files_of_every_format(row, kind, suffix, tmp_path):
    rows = [{**row, "id": number, "when": "2024-01-02"} for number in range(3)]
    path = tmp_path / f"a.{suffix.replace('_', '.').replace('array', 'json')}"
    if suffix in ("parquet", "csv"):
        if suffix == "csv" and kind == "messages":
            pytest.skip("a CSV file has no lists")
        write_table(path, rows)
    else:
        text = json.dumps(rows, indent=1) if suffix == "array" else lines(rows)
        path.write_bytes(gzip.compress(text.encode()) if suffix.endswith("gz") else text.encode())
    found, splits = load(path)
    assert found == kind and set(splits) == {"train"}
    assert [{key: some[key] for key in row} for some in splits["train"]] == [row] * 3


@pytest.mark.parametrize("names", [("train", "val"), ("train", "test"), ("train", "dev", "test")])
def test_splits_of_the_data(names, tmp_path):
    for name in names:
        write(tmp_path, **{f"{name}_jsonl": lines([{"text": name}] * 2)})
    data = find_documents(str(tmp_path))
    assert {split: read(rows)[0]["text"] for split, rows in data.splits.items()} == {
        "train": "train",
        {"dev": "val"}.get(names[1], names[1]): names[1],
    }
    said = " ".join(data.details)
    assert ("left out: rows or files of the test split: 2" in said) == (len(names) == 3)
    assert ("test: 2 rows" in said) == (names[1] == "test")


def test_each_file_of_plain_text_is_a_document(tmp_path):
    write(tmp_path, a_txt="one\n", b_md="two", sub__c_txt_gz=gzip.compress(b"three"))
    write(tmp_path, d_txt_bz2=bz2.compress(b"four"), README_md="no", e_pdf="no")
    write(tmp_path, f_txt=codecs.BOM_UTF8 + b"five", g_txt="six".encode("utf-16"))
    data = find_documents(str(tmp_path))
    texts = [row["text"] for row in read(data.splits["train"])]
    assert (data.kind, sorted(texts)) == (
        "text",
        sorted(["one\n", "two", "three", "four", "five", "six"]),
    )
    assert any("train: 6 files" in line for line in data.details)
    assert any(".pdf files" in line for line in data.details)


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_the_end_of_a_single_text_is_held_out(pack, tmp_path):
    text = "".join(f"line {number} of ä text\n" for number in range(100))
    path = write(tmp_path, **{"a_txt" if pack is bytes else "a_txt_gz": pack(text.encode())})
    kind, splits = load(path, val_fraction=0.25)
    assert (
        "val: the last 0.25 of the only document"
        in find_documents(str(path), val_fraction=0.25).details
    )
    (train,), (val,) = [[row["text"] for row in splits[split]] for split in ("train", "val")]
    assert train + val == text and train.endswith("\n")
    assert len(val) == pytest.approx(len(text) / 4, abs=30)
    assert set(load(path, val_fraction=0)[1]) == {"train"}
    table = write(tmp_path / "t", a_jsonl=lines([{"text": text}]))
    assert load(table, val_fraction=0.25) == (kind, splits)


@pytest.mark.parametrize("fraction", [0.1, 0.3, 0.5, 0.9])
def test_a_text_without_lines_is_cut_between_characters(fraction, tmp_path):
    text = "äöü€😀" * 21 + "€"
    _, splits = load(write(tmp_path, a_txt=text), val_fraction=fraction)
    assert splits["train"][0]["text"] + splits["val"][0]["text"] == text
    assert 0 < len(splits["val"][0]["text"]) < len(text)


def test_long_texts_are_read_in_segments(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SEGMENT", 10)
    for text in ("one two\nthree\nfour five six seven\n", "ä" * 33, "a " * 20, "", "x"):
        path = write(tmp_path, a_txt=text) / "a.txt"
        parts = list(module._segments(path))
        assert "".join(parts) == text and max(map(len, parts)) <= 20
        if " " in text:
            ends = itertools.pairwise(parts)
            assert all(part.endswith("\n") or after.startswith(" ") for part, after in ends)
        assert list(module._segments(path, 0, 4)) == list(segments([text.encode()[:4].decode()]))
        assert "".join(segments_of(text)) == text
    assert list(segments(["a b", "c\nd", "e"])) == ["a", " bc\n", "de"]


def test_rows_change_their_fingerprint_with_their_content(tmp_path):
    seen = set()
    for text in ("one\n" * 9, "two\n" * 9):
        for name in ("a_txt", "a_jsonl", "a_json"):
            rows = [{"text": text}] * 3
            content = {"a_txt": text, "a_jsonl": lines(rows), "a_json": json.dumps(rows)}[name]
            folder = write(tmp_path / text[:3] / name, **{name: content})
            for _ in range(2):
                splits = find_documents(str(folder)).splits
                seen |= {rows.fingerprint for rows in splits.values()}
    assert len(seen) == 8  # a plain text has two splits


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (
            dict(a_jsonl=lines([{"conversations": [], "id": 1}])),
            "columns conversations, id; one needs messages",
        ),
        (dict(a_jsonl=lines([{"prompt": "a", "chosen": "b", "rejected": "c"}])), "preference data"),
        (dict(a_jsonl=lines([{**CHAT, "chosen": "b", "rejected": "c"}])), "preference data"),
        (dict(a_jsonl=lines([{"prompt": "a"}])), "columns prompt; one needs"),
        (dict(a_csv="id,title\n1,2\n"), "columns id, title; one needs"),
        (
            dict(a_csv="prompt,completion\nWhat is 1, plus 1?,2\n"),
            "its first row has 3 fields: name",
        ),
        (dict(a_csv="\ntext,label\n\nhello,1,\n"), "names 2 columns, and its first row has 3"),
        (dict(a_tsv="text\nb\tc\n"), "names 1 columns"),
        (
            dict(a_csv="text\n" + "b\n" * 30 + "b, and more\n"),
            "Expected 1 fields in line 32, saw 2",
        ),
        (dict(a_csv="text,label\n" + "b,1\n" * 30 + "b, more,1\n"), "Expected 2 fields in line 32"),
        (dict(a_csv="text;label\nb;1\n"), "a.csv are separated by ';': convert it to CSV"),
        (dict(a_jsonl="[" * 100_000), "holds neither an object in each line nor one list"),
        (dict(a_json="{\n}"), "holds neither an object in each line nor one list"),
        (dict(a_json="[1, 2]"), "holds neither"),
        (dict(a_jsonl=lines([CHAT])), "has one row: none is left to hold out"),
        (dict(a_txt="x"), "has 1 bytes: too few"),
        (dict(val_txt="a" * 99, test_txt="b" * 99), "has no train split"),
        (dict(a_csv_gz=b"no"), "holds no file that ends in"),
    ],
)
def test_data_that_cannot_be_used_is_one_line(files, says, tmp_path):
    with pytest.raises(UserError, match=says) as error:
        find_documents(str(write(tmp_path, **files)))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a_txt", b"\xff\xfeb\x00\xd8", "a.txt"),
        ("a_txt", b"caf\xe9 latin", "a.txt: it is not UTF-8"),
        ("a_txt_gz", b"\x1f\x8bbroken", "a.txt.gz"),
        ("a_jsonl", lines([TEXT]).encode() + b"{", "row 1 of .* is not JSON"),
        ("a_jsonl", lines([TEXT]).encode() + b"[" * 100_000, "row 1 of .* is not JSON"),
    ],
)
def test_files_that_cannot_be_read_are_one_line(name, content, says, tmp_path):
    with pytest.raises(UserError, match=says):
        for rows in find_documents(str(write(tmp_path, **{name: content}))).splits.values():
            read(rows)


def test_a_subset_is_of_the_hub(tmp_path):
    write(tmp_path, a_txt="text")
    with pytest.raises(UserError, match="--subset de: only a Hub id has subsets"):
        find_documents(str(tmp_path), subset="de")
    with pytest.raises(UserError, match="there is no such file"):
        find_documents("./missing.jsonl")


def test_a_subset_is_passed_on(monkeypatch):
    import datasets

    asked = {}

    def load_dataset(path, name=None, **options):
        asked.update(path=path, name=name)
        return datasets.DatasetDict(train=datasets.Dataset.from_list([TEXT] * 3))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load("owner/name", subset="sample-10BT") == ("text", {"train": [TEXT] * 3})
    assert asked == dict(path="owner/name", name="sample-10BT")


def test_subsets_are_listed_where_one_is_missing(monkeypatch):
    import datasets

    def load_dataset(path, name=None, **options):
        raise ValueError("Config name is missing.\nPlease pick one")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(datasets, "get_dataset_config_names", lambda name: ["de", "en"])
    with pytest.raises(UserError, match="has several subsets: give --subset, such as de, en"):
        find_documents("owner/name")


# ---------------------------------------------------------------------------------------- dates


def test_dates_in_words():
    assert [ordinal_in_words(n) for n in (1, 12, 20, 22, 30, 31)] == (
        "first twelfth twentieth twenty-second thirtieth thirty-first".split()
    )
    assert [ordinal(n) for n in (1, 2, 3, 4, 11, 12, 13, 21, 22, 31)] == (
        "1st 2nd 3rd 4th 11th 12th 13th 21st 22nd 31st".split()
    )
    said = {1600: "sixteen hundred", 1905: "nineteen oh five", 1994: "nineteen ninety-four"}
    said |= {2000: "two thousand", 2007: "two thousand and seven", 2024: "twenty twenty-four"}
    assert {year: year_in_words(year) for year in said} == said


def test_synthetic_conversations_are_all_different_and_share_no_date():
    data = find_documents("synthetic", seed=3)
    assert (data.kind, set(data.splits)) == ("messages", {"train", "val"})
    splits = {split: list(rows) for split, rows in data.splits.items()}
    assert splits == make_conversations(3) and splits != make_conversations(4)
    assert (
        data.splits["train"].fingerprint
        != find_documents("synthetic", seed=4).splits["train"].fingerprint
    )
    dates, shapes = {}, set()
    for split, rows in splits.items():
        for row in rows:
            roles = [message["role"] for message in row["messages"]]
            shapes.add("".join(role[0] for role in roles))
            answers = [m["content"] for m in row["messages"] if m["role"] == "assistant"]
            assert all(len(answer) == 10 for answer in answers)
            dates.setdefault(split, []).extend(answers)
    everything = dates["train"] + dates["val"]
    assert len(set(everything)) == len(everything) > 4000
    assert shapes == {"ua", "sua", "uaua", "suaua"}


def test_a_stream_of_synthetic_conversations_has_those_of_seed_0():
    stream = open_documents("synthetic")
    assert (stream.kind, stream.asked, stream.details) == ("messages", "messages", [])
    assert {split: list(rows) for split, rows in stream.splits.items()} == make_conversations(0)


def test_all_ways_to_say_a_date_are_used():
    import datetime
    import random

    rng = random.Random(0)
    said = {date_in_words(datetime.date(1994, 3, 3), rng) for _ in range(200)}
    assert "the third of March, nineteen ninety-four" in said and "March 3rd, 1994" in said
    assert len(said) == 6
