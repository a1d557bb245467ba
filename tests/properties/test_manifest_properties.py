"""A checkpoint is accepted exactly as it was written; and which of several is the best."""

import json
import math
import os
import tempfile
from hashlib import sha256
from pathlib import Path

import pytest
from harness import fakes
from hypothesis import assume, example, given
from hypothesis import strategies as st

from utils.run import manifest
from utils.run.failures import UserError
from utils.run.saves import Best

CONTENTS = {"model.safetensors": b"weights", "optimizer.bin": b"momenta", "shards/0.distcp": b"0"}
SAVED = {"progress": {"step": 3, "score": 0.5, "position": [7]}, "arguments": {"lr": 0.1}}
SYSTEM_FILES = [".DS_Store", "._model", ".nfs0001", "Thumbs.db", "desktop.ini"]
SYSTEM_FILES += [".manifest.json.77.writing"]  # of a process that was killed in `amend`


def write(folder, contents=CONTENTS, **saved):
    writing, path = folder / ".writing", folder / "checkpoints" / "step_00000003"
    for name, content in contents.items():
        (writing / name).parent.mkdir(parents=True, exist_ok=True)
        (writing / name).write_bytes(content)
    path.parent.mkdir(exist_ok=True)
    files = manifest.hash_and_sync(fakes.accelerator(), writing)
    assert {name: described["size"] for name, described in files.items()} == {
        name: len(content) for name, content in contents.items()
    }
    manifest.complete(writing, path, {**SAVED, **saved, "files": files})
    return path


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A checkpoint, which every test leaves as it was."""
    return write(tmp_path_factory.mktemp("run"))


def refused(path, match=None):
    with pytest.raises(UserError, match=match):
        manifest.verify(fakes.accelerator(), path)
    return True


@st.composite
def edits(draw, content):
    """Another content: bytes are flipped, cut off, taken out or added."""
    start = draw(st.integers(0, len(content)))
    end = draw(st.integers(start, len(content)))
    return content[:start] + draw(st.binary(max_size=4)) + content[end:]


@given(st.data())
def test_no_byte_of_a_file_may_change(path, data):
    name = data.draw(st.sampled_from(sorted(CONTENTS)))
    content = data.draw(edits(CONTENTS[name]))
    assume(content != CONTENTS[name])
    (path / name).write_bytes(content)
    assert refused(path, f"is damaged: {name} does not match its checksum")
    (path / name).write_bytes(CONTENTS[name])
    assert manifest.verify(fakes.accelerator(), path)["progress"] == SAVED["progress"]


@given(st.data())
def test_nothing_that_the_manifest_says_may_change(path, data):
    """Spaces between its values may."""
    file, before = path / manifest.MANIFEST, manifest.verify(fakes.accelerator(), path)
    content = file.read_bytes()
    try:
        file.write_bytes(data.draw(edits(content)))
        assert manifest.verify(fakes.accelerator(), path) == before
    except UserError:
        pass
    finally:
        file.write_bytes(content)


@given(st.sampled_from([*CONTENTS, "shards"]), st.sampled_from(["", "another"]))
def test_no_file_may_be_missing(path, name, new_name):
    """Not under another name either."""
    aside = path / new_name if new_name else path.with_name("aside")
    (path / name).rename(aside)
    assert refused(path, "shards/0.distcp is missing" if name == "shards" else f"{name} is missing")
    aside.rename(path / name)
    assert manifest.verify(fakes.accelerator(), path)["arguments"] == SAVED["arguments"]


@pytest.mark.parametrize(
    "name", ["extra", "shards/model.safetensors", "shards/manifest.json", ".x"]
)
@pytest.mark.parametrize("kind", ["file", "link", "dangling link", "link to a folder", "pipe"])
def test_nothing_may_be_added(kind, name, path):
    added = path / name
    if kind == "file":
        added.touch()
    elif kind == "pipe":
        os.mkfifo(added)
    else:
        targets = {"link to a folder": "shards", "dangling link": "nowhere"}
        added.symlink_to(path / targets.get(kind, "optimizer.bin"))
    assert refused(path, f"is refused: {name} is ")
    if kind == "file":
        manifest.refuse_links(path)
    else:
        with pytest.raises(UserError, match="neither a file nor a folder"):
            manifest.refuse_links(path)
    added.unlink()
    for system_file in SYSTEM_FILES:  # but what a system adds is harmless
        (path / "shards" / system_file).touch()
    assert manifest.verify(fakes.accelerator(), path)["files"].keys() == CONTENTS.keys()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)
SAID = st.fixed_dictionaries({"progress": JSON, "files": JSON, "sha256": JSON})


@given((JSON | SAID).map(json.dumps) | st.text(max_size=9))
@example("[" * 100_000)
def test_anything_in_the_place_of_a_manifest_is_refused_in_one_line(content):
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, manifest.MANIFEST).write_text(content)
        assert refused(folder, "is not a checkpoint: its manifest.json is missing, unreadable or")
        assert manifest.read(folder) is None


def test_what_is_no_checkpoint_is_said(path, tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        manifest.verify(fakes.accelerator(), tmp_path / "none")
    newest = f"missing, unreadable or changed .the newest one in it is {path}.$"
    assert refused(path.parents[1], newest)
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(UserError, match="is refused: it is a link"):
        manifest.refuse_links(link)


def test_amended_values_are_sealed_too(tmp_path):
    path = write(tmp_path)
    before = manifest.verify(fakes.accelerator(), path)
    manifest.amend(path, {"score": 0.75, "evaluation_due": False})
    changed = {**SAVED["progress"], "score": 0.75, "evaluation_due": False}
    assert manifest.verify(fakes.accelerator(), path) == before | {"progress": changed}


SCORES = st.none() | st.sampled_from([0.1, 0.5, 0.5, math.nan, -math.inf, 1])
LOSSES = st.none() | st.sampled_from([0.0, 1.0, 2.0, math.nan])


@given(st.lists(st.tuples(SCORES, LOSSES), max_size=4))
def test_the_best_has_the_highest_score_then_the_lowest_loss_then_the_latest_step(pairs):
    """A run counts its patience by the same rule as it keeps checkpoints."""

    def worth(step):
        score, loss = pairs[step]
        score = -math.inf if math.isnan(score) else score
        return score, -math.inf if loss is None or math.isnan(loss) else -loss, step

    with tempfile.TemporaryDirectory() as folder:
        paths, run = [], Best()
        for step, (score, loss) in enumerate(pairs):
            paths.append(Path(folder, f"step_{step:08d}"))
            record = {"progress": {"step": step, "score": score, "loss": loss}}
            record["sha256"] = sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
            paths[-1].mkdir()
            (paths[-1] / manifest.MANIFEST).write_text(json.dumps(record))
            scored = [at for at in range(step + 1) if pairs[at][0] is not None]
            best = max(scored, key=worth, default=None)
            found = manifest.best(paths)
            assert found == (None if best is None else paths[best])
            if score is not None:
                run.add(step, score, loss)
                assert (run.stale == 0) == (best == step)
        damaged = Path(folder, "step_00000099")
        damaged.mkdir()
        assert manifest.best([*paths, damaged]) == manifest.best(paths)
