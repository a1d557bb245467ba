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
FILES = [*CONTENTS, manifest.MANIFEST]
SAVED = {"progress": {"step": 3, "score": 0.5, "position": [7]}, "arguments": {"lr": 0.1}}
SYSTEM_FILES = [".DS_Store", "._model", ".nfs0001", "Thumbs.db", "desktop.ini"]
SYSTEM_FILES += [".manifest.json.77.writing"]  # of a process that was killed in `amend`


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A checkpoint, which every test leaves as it was."""
    folder = tmp_path_factory.mktemp("run")
    writing, path = folder / ".writing", folder / "checkpoints" / "step_00000003"
    for name, content in CONTENTS.items():
        (writing / name).parent.mkdir(parents=True, exist_ok=True)
        (writing / name).write_bytes(content)
    path.parent.mkdir()
    files = manifest.hash_and_sync(fakes.accelerator(), writing)
    sizes = {name: described["size"] for name, described in files.items()}
    assert sizes == {name: len(content) for name, content in CONTENTS.items()}
    manifest.complete(writing, path, {**SAVED, "files": files})
    return path


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
    """Nor anything that the manifest says: spaces between its values may."""
    before, name = manifest.verify(fakes.accelerator(), path), data.draw(st.sampled_from(FILES))
    content = (path / name).read_bytes()
    edited = data.draw(edits(content))
    assume(content != edited)
    (path / name).write_bytes(edited)
    try:
        if name in CONTENTS:
            assert refused(path, f"is damaged: {name} does not match its checksum")
        elif manifest.read(path) is None:
            assert refused(path, "is not a checkpoint: its manifest.json is missing, unreadable or")
        else:
            assert manifest.verify(fakes.accelerator(), path) == before
    finally:
        (path / name).write_bytes(content)
    assert manifest.verify(fakes.accelerator(), path)["progress"] == SAVED["progress"]


@pytest.mark.parametrize("name", [*CONTENTS, "shards"])
def test_no_file_may_be_missing(name, path):
    """Not under another name either."""
    says = "shards/0.distcp is missing" if name == "shards" else f"{name} is missing"
    for aside in (path / "another", path.with_name("aside")):
        (path / name).rename(aside)
        assert refused(path, says)
        aside.rename(path / name)


@pytest.mark.parametrize("name", ["extra", "shards/manifest.json"])
@pytest.mark.parametrize("kind", ["file", "link", "dangling link", "link to a folder", "pipe"])
def test_nothing_may_be_added(kind, name, path):
    """But what a system adds is harmless."""
    added = path / name
    if kind == "file":
        added.touch()
    elif kind == "pipe":
        os.mkfifo(added)
    else:
        targets = {"link to a folder": "shards", "dangling link": "nowhere"}
        added.symlink_to(path / targets.get(kind, "optimizer.bin"))
    assert refused(path, f"is refused: {name} is ")
    added.unlink()
    for system_file in SYSTEM_FILES:
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
