"""Finds the pictures of a data set and their classes: in a folder, on the Hub, or made in memory. Decodes none of them.

What is kept of each picture is its name and its label, in arrays, so that data loader workers share them. The pictures stay
encoded where they are, and are read when they are needed.
"""

import hashlib
import io
import json
import os
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from utils.exits import UserError
from utils.image_data import load_splits, synthetic_images
from utils.image_files import BadPicture, Encoded

EXTENSIONS = {*".jpg .jpeg .jpe .jfif .png .webp .bmp .gif .tif .tiff .ppm .pgm .pbm".split()}
TABLES = {*".parquet .arrow .jsonl .json .csv .tar .zip".split()}  # files in which a data set of the Hub keeps its rows
VAL, TEST = ("val", "valid", "validation"), ("test",)  # names of the splits that are not for training
LAYOUTS = "it takes a folder with one sub-folder per class (or train/ and val/ with such sub-folders), a Hub id, or `synthetic`"


class Names:
    """A list of strings in two arrays. Python objects would be copied into every worker, when it counts references."""

    def __init__(self, names):
        encoded = [os.fsencode(name) for name in names]
        self._ends = np.cumsum([len(name) for name in encoded], dtype=np.int64)
        self._text = np.frombuffer(b"".join(encoded), dtype=np.uint8)

    def __len__(self):
        return len(self._ends)

    def __getitem__(self, index):
        start = self._ends[index - 1] if index else 0
        return os.fsdecode(self._text[start : self._ends[index]].tobytes())


class Files:
    """Pictures in files: `root` (Path) and their names relative to it."""

    def __init__(self, root, names):
        self.root, self._names = root, Names(names)

    def read(self, row):
        """The bytes of a file."""
        return (self.root / self._names[row]).read_bytes()

    def name(self, row):
        """The path of a file."""
        return str(self.root / self._names[row])

    def stamp(self, row):
        """What changes when the file does: its size and time."""
        status = (self.root / self._names[row]).stat()
        return status.st_size, status.st_mtime_ns


class Rows:
    """Pictures in a column of a data set that the `datasets` library has loaded, or in a list of bytes."""

    def __init__(self, rows, place):
        self._rows, self._place = rows, place

    def read(self, row):
        """The bytes of a picture."""
        image = self._rows[int(row)]
        if isinstance(image, bytes):
            return image
        (image,) = image.values()
        if image is None:
            raise ValueError("the row has no image")
        return image["bytes"] if image["bytes"] is not None else Path(image["path"]).read_bytes()

    def name(self, row):
        """Names the row for a message."""
        return f"row {row} of {self._place}"

    def stamp(self, row):
        """Rows do not change."""
        return row


@dataclass
class Pictures:
    """One split. `source` reads the pictures; `rows` and `labels`, int64 [samples], are their rows in it and their classes."""

    source: Files | Rows
    rows: np.ndarray
    labels: np.ndarray

    def __len__(self):
        return len(self.rows)

    def open(self, index):
        """Reads a picture and its header. Raises BadPicture if there is none."""
        try:
            return Encoded(self.source.read(self.rows[index]))
        except (OSError, ValueError) as error:
            raise BadPicture(getattr(error, "strerror", None) or str(error)) from None

    def name(self, index):
        """The path of a picture, or the row and the split in which it is."""
        return self.source.name(self.rows[index])

    def select(self, indices):
        """The pictures at `indices` only."""
        return Pictures(self.source, self.rows[indices], self.labels[indices])

    def spread(self, count):
        """At most `count` pictures, evenly spread over all."""
        return self.select(np.linspace(0, len(self) - 1, min(count, len(self))).astype(np.int64))

    def fingerprint(self, stamps=False):
        """A checksum of the names and labels; with `stamps` (bool), also of the size and time of every file."""
        digest = hashlib.sha256(self.labels.tobytes())
        for row in self.rows:
            digest.update(os.fsencode(self.source.name(row)))
            if stamps:
                digest.update(repr(self.source.stamp(row)).encode())
        return digest.hexdigest()


@dataclass
class PictureData:
    """A data set: `splits` has `train` and `val`, `test` or both; `class_names` are in the order of the labels.

    `description` names it in one line, with a checksum: it differs if a picture was added, removed or renamed.
    """

    splits: dict[str, Pictures]
    class_names: list[str]
    description: str


def load_pictures(name, *, seed=0, val_fraction=0.1, image_column=None, label_column=None, index_folder=None):
    """Finds a data set. If it has no split to evaluate on, a part of `train` becomes its `val` split, class by class.

    Args:
        name (str): a folder with one sub-folder per class, with or without splits; a Hub id or a folder in the layout of the
            Hub; or `synthetic`.
        seed (int): seed of the split and of `synthetic`.
        val_fraction (float): share of each class for the split. Which pictures depends on the seed and their names only.
        image_column, label_column (str | None): columns of a Hub data set; None: the only one of its type.
        index_folder (Path | None): where the list of files is kept for the next start.

    Raises:
        UserError: there is no such data set, or it has another layout.
    """
    path = Path(name).expanduser()
    if name == "synthetic":
        splits, names = _synthetic(seed)
    elif path.is_dir() and (found := _find(path.resolve(), index_folder)):
        splits, names = found
    elif path.exists() or not name.startswith((".", "/", "~")):
        splits, names = _from_hub(name, image_column, label_column)
    else:
        raise UserError(f"--dataset {name}: there is no such folder; {LAYOUTS}")
    if len(names) < 2:
        raise UserError(f"--dataset {name} has only one class, {names[0]}: a classifier needs at least two")
    if len(splits) == 1:
        splits["train"], splits["val"] = _stratified(splits["train"], names, seed, val_fraction)
    for split, pictures in splits.items():
        missing = np.flatnonzero(np.bincount(pictures.labels, minlength=len(names)) == 0)
        if len(missing):
            others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise UserError(f"--dataset {name}: its {split} split has no picture of class {names[missing[0]]}{others}")
    counts = " and ".join(f"{len(pictures):,} {split}" for split, pictures in splits.items())
    digest = hashlib.sha256(repr(names).encode())
    for pictures in splits.values():
        digest.update(_portable_fingerprint(pictures).encode())
    return PictureData(splits, names, f"{counts} pictures of {len(names)} classes (fingerprint {digest.hexdigest()[:12]})")


def unlabeled(path):
    """The pictures in a folder and below it, or a single file, in the order of their names; all labels are 0.

    Raises:
        UserError: there are none.
    """
    root = Path(path).expanduser()
    if root.is_file():
        files, root = [root.name], root.parent
    else:
        files = [
            os.path.relpath(os.path.join(folder, name), root)
            for folder, _, names in os.walk(root)
            for name in names
            if not name.startswith(".") and os.path.splitext(name)[1].lower() in EXTENSIONS
        ]
    if not files:
        raise UserError(f"--images {path}: {'it has no pictures' if root.is_dir() else 'there is no such folder or file'}")
    return Pictures(Files(root, sorted(files)), np.arange(len(files)), np.zeros(len(files), dtype=np.int64))


# ------------------------------------------------------------------------------------------------------------- folders


def _find(root, index_folder):
    """Finds the splits and classes of a folder; None if it has no pictures but tables, as a data set of the Hub has."""
    index = _read_index(root, index_folder)
    if index is None:
        index = _scan(root)
        _write_index(root, index_folder, index)
    if index["ignored"]:
        listed = ", ".join(f"{count:,} {suffix or 'without suffix'}" for suffix, count in sorted(index["ignored"].items()))
        print(f"{root}: ignored files that are not pictures by their names: {listed}")
    folders = index["classes"]
    if not folders:
        if index["tables"]:
            return None
        where = f"{index['loose']} pictures are directly in it" if index["loose"] else "no sub-folder of it has pictures"
        raise UserError(f"--dataset {root} has no class folder ({where}); {LAYOUTS}")
    splits, names = {}, sorted({name for classes in folders.values() for name in classes})
    if len(folders) > 1 and "train" not in folders:
        raise UserError(f"--dataset {root} has no train split, only {', '.join(folders)}; {LAYOUTS}")
    for split, classes in folders.items():
        unknown = sorted(classes.keys() - folders["train"].keys())
        if unknown:
            raise UserError(f"--dataset {root}: class {unknown[0]} of its {split} split is not in its train split")
        files = [(name, file) for name in names for file in classes.get(name, ())]
        label_of = {name: label for label, name in enumerate(names)}
        labels = np.array([label_of[name] for name, _ in files], dtype=np.int64)
        splits[split] = Pictures(Files(root, [file for _, file in files]), np.arange(len(files)), labels)
    return splits, names


def _scan(root):
    """Lists the files of a folder: split -> class -> paths relative to `root`; without splits, all are `train`."""
    index = {"classes": {}, "ignored": Counter(), "tables": False, "loose": 0, "folders": {}}

    def visit(folder):
        """The pictures in a folder and below it, and its own sub-folders."""
        index["folders"][os.path.relpath(folder, root)] = os.stat(folder).st_mtime_ns
        files, folders = [], []
        for entry in sorted(os.scandir(folder), key=lambda entry: os.fsencode(entry.name)):
            if entry.name.startswith((".", "__MACOSX")):
                continue
            suffix = os.path.splitext(entry.name)[1].lower()
            if entry.is_dir():
                folders.append(entry.path)
            elif suffix in EXTENSIONS:
                files.append(os.path.relpath(entry.path, root))
            elif suffix in TABLES:
                index["tables"] = True
            else:
                index["ignored"][suffix] += 1
        return files, folders

    def below(folder):
        files, folders = visit(folder)
        return files + [file for inner in folders for file in below(inner)]

    def classes_in(folders):
        return {os.path.basename(folder): files for folder in folders if (files := below(folder))}

    loose, folders = visit(root)
    index["loose"] = len(loose)
    by_name = {os.path.basename(folder).lower(): folder for folder in folders}
    inside = visit(by_name["train"]) if "train" in by_name else None
    if inside and inside[1] and not inside[0]:  # not a class that is called train: it has sub-folders, and no pictures
        index["classes"]["train"] = classes_in(inside[1])
        for split, aliases in (("val", VAL), ("test", TEST)):
            for alias in aliases:
                if alias in by_name and split not in index["classes"]:
                    index["classes"][split] = classes_in(visit(by_name[alias])[1])
        empty = [split for split, classes in index["classes"].items() if not classes]
        if empty and not index["tables"]:
            raise UserError(f"--dataset {root}: its {empty[0]} split has no class folder with pictures; {LAYOUTS}")
        index["classes"] = {split: classes for split, classes in index["classes"].items() if classes}
    else:
        classes = classes_in(folders)
        if classes:
            index["classes"]["train"] = classes
    return index


def _index_path(root, index_folder):
    return Path(index_folder) / f"index_{hashlib.sha256(os.fsencode(root)).hexdigest()[:16]}.json"


def _read_index(root, index_folder):
    """The list of files that an earlier start wrote, if no folder was changed since: adding or renaming changes its time."""
    try:
        index = json.loads(_index_path(root, index_folder).read_text())
        unchanged = all(os.stat(root / folder).st_mtime_ns == time for folder, time in index["folders"].items())
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return index if unchanged else None


def _write_index(root, index_folder, index):
    """Writes the list of files, if it can be: a start without it takes longer, and finds the same."""
    if index_folder is None or max(index["folders"].values()) > time.time_ns() - 2e9:
        return  # a folder that is being filled can change again without changing its time
    path = _index_path(root, index_folder)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(index, file)
        os.replace(file.name, path)
    except (OSError, UnicodeEncodeError) as error:
        print(f"the list of files is not kept for the next start: {error}")


def _stratified(pictures, names, seed, fraction):
    """Splits off the same share of every class: the pictures whose names, hashed with the seed, come first."""
    held_out = np.zeros(len(pictures), dtype=bool)
    for label, class_name in enumerate(names):
        members = np.flatnonzero(pictures.labels == label)
        if len(members) < 2:
            raise UserError(f"class {class_name} has {len(members)} picture: at least 2 are needed to split off a val split")
        keys = [
            hashlib.blake2b(f"{seed}/{_portable_name(pictures, i)}".encode("utf-8", "surrogateescape")).digest()
            for i in members
        ]
        order = sorted(range(len(members)), key=keys.__getitem__)
        held_out[members[order[: min(max(1, round(len(members) * fraction)), len(members) - 1)]]] = True
    return pictures.select(np.flatnonzero(~held_out)), pictures.select(np.flatnonzero(held_out))


def _portable_name(pictures, index):
    """The name of a picture without the folder of the data set, which may be another on each machine."""
    if isinstance(pictures.source, Files):
        return pictures.source._names[pictures.rows[index]]
    return f"row {pictures.rows[index]}"


def _portable_fingerprint(pictures):
    digest = hashlib.sha256(pictures.labels.tobytes())
    for index in range(len(pictures)):
        digest.update(os.fsencode(_portable_name(pictures, index)) + b"\0")
    return digest.hexdigest()


# ----------------------------------------------------------------------------------------------------- Hub, synthetic


def _from_hub(name, image_column, label_column):
    import datasets  # here, because it takes a second, and folders do not need it

    loaded = load_splits(name, LAYOUTS)
    keys = {"train": next((key for key in loaded if key == "train" or len(loaded) == 1), None)}
    for split, aliases in (("val", VAL), ("test", TEST)):
        keys[split] = next((key for key in aliases if key in loaded and key != keys["train"]), None)
    if keys["train"] is None:
        raise UserError(f"--dataset {name} has no train split, only {', '.join(loaded)}; {LAYOUTS}")
    features = loaded[keys["train"]].features
    images = [column for column, feature in features.items() if isinstance(feature, datasets.Image)]
    image_column = _choose(name, features, "image", image_column, images)
    classes = [column for column, feature in features.items() if isinstance(feature, datasets.ClassLabel)]
    plain = [column for column in ("label", "labels", "class", "cls", "target", "fine_label") if column in features]
    label_column = _choose(name, features, "label", label_column, classes or plain)
    values = {split: loaded[key].with_format("numpy")[label_column][:] for split, key in keys.items() if key}
    if isinstance(features[label_column], datasets.ClassLabel):
        names = list(features[label_column].names)
    else:
        kinds = sorted({kind for kind in values["train"].tolist() if kind not in (None, -1)})
        names = [str(kind) for kind in kinds]
        position = {kind: label for label, kind in enumerate(kinds)}
        values = {split: np.array([position.get(v, -1) for v in column.tolist()]) for split, column in values.items()}
    splits = {}
    for split, column in values.items():
        labels = np.array([-1 if value is None else value for value in column.tolist()], dtype=np.int64)
        missing = np.flatnonzero(labels < 0)
        if len(missing) == len(labels) and split == "test":  # as in data sets of competitions
            print(f"the test split of {name} has no labels (all are -1): it is not used")
            continue
        if len(missing):
            raise UserError(
                f"{len(missing):,} of {len(labels):,} rows of the {split} split of {name} have no label or one that the train "
                f"split does not have (the first is row {missing[0]}): filter them out"
            )
        rows = loaded[keys[split]].select_columns([image_column]).cast_column(image_column, datasets.Image(decode=False))
        splits[split] = Pictures(Rows(rows, f"{name}, {split} split"), np.arange(len(labels)), labels)
    return splits, names


def _choose(name, features, kind, wanted, candidates):
    """The column of a kind: the one that is wanted, or the only one."""
    if wanted is not None:
        if wanted not in features:
            raise UserError(f"--{kind}_column {wanted}: --dataset {name} has the columns {', '.join(features)}")
        return wanted
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        raise UserError(f"--dataset {name} has several {kind} columns, {', '.join(candidates)}: give --{kind}_column")
    raise UserError(
        f"--dataset {name} has no {kind} column that is recognized, only {', '.join(features)}: give --{kind}_column"
    )


def _synthetic(seed, train=1000, val=200):
    """The patterns of `synthetic_images` as encoded pictures of 40 to 160 pixels a side; every tenth is gray, or a PNG."""
    data = synthetic_images(seed, train, val)
    sizes = np.random.default_rng(seed).integers(40, 161, (train + val, 2))
    splits = {}
    for split, part, offset in (("train", data.train, 0), ("val", data.test, train)):
        encoded = []
        for index, image in enumerate(part.images):
            picture = Image.fromarray(image.permute(1, 2, 0).numpy()).resize(sizes[offset + index].tolist(), Image.BICUBIC)
            picture = picture.convert("L") if index % 10 == 3 else picture
            buffer = io.BytesIO()
            picture.save(buffer, "PNG" if index % 10 == 7 else "JPEG")
            encoded.append(buffer.getvalue())
        splits[split] = Pictures(Rows(encoded, f"synthetic, {split} split"), np.arange(len(encoded)), part.labels.numpy())
    return splits, data.class_names
