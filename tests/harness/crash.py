"""The file operations of a run, and what a disk may hold after a crash at each of them.

This is how SQLite is tested, and what "All File Systems Are Not Created Equal" (OSDI 2014) does to
databases. strace records what a process does to the files of a folder, whoever asks for it: Python,
the C++ of torch, the Rust of safetensors. From any prefix of the operations, `states` rebuilds what
can be on the disk: everything that was done, if only the process died; if the machine lost power,
at least what an fsync has covered.

`crash_operations.jsonl` has the operations of one run, for the quick test, which needs no strace.
Delete it, and the slow test records it anew.
"""

import json
import os
import re
import subprocess
from copy import copy
from pathlib import Path

RECORDED = Path(__file__).with_name("crash_operations.jsonl")
CALLS = "openat,write,writev,fsync,rename,renameat,unlink,unlinkat,mkdir,rmdir,ftruncate"
CALL = re.compile(r"^\d+ +(\w+)\((.*)\) += (\d+)")
TEXT = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')
OPEN_FILE = re.compile(r"(\d+)<((?:\\x[0-9a-f]{2})+)>")
VARIANTS = ("process killed", "data lost", "names lost", "all lost but removals")


def record(command, folder):
    """Runs a command under strace; returns the operations on what is below `folder`, in order.

    Returns:
        list[tuple]: as arguments of `Disk.apply`.
    """
    trace = Path(f"{folder}.trace")
    words = ["strace", "-f", "--seccomp-bpf", "-y", "-xx", "-s", "10000000", "-e", f"trace={CALLS}"]
    words += ["-o", trace, *command]
    subprocess.run(words, capture_output=True, text=True, timeout=450, check=True)
    operations = list(_operations(trace, str(folder)))
    disk = Disk()
    for operation in operations:
        disk.apply(*operation)
    assert disk.files("process killed") == read(folder), "strace missed an operation"
    return operations


def _operations(trace, folder):
    """Reads what strace has written."""
    begun, offsets, appending = {}, {}, set()
    for line in trace.open():
        process = line.split()[0]
        if "<unfinished ...>" in line:
            begun[process] = line.partition("<unfinished ...>")[0].rstrip()
            continue
        if "resumed>" in line:  # it counts from the moment at which it has happened
            line = begun.pop(process) + line.partition("resumed>")[2]
        match = CALL.match(line)
        if not match:  # it failed
            continue
        call, words, result = match[1], match[2], int(match[3])
        texts = [_decoded(text) for text in TEXT.findall(words)]
        files = [
            (int(number), os.fsdecode(_decoded(at))) for number, at in OPEN_FILE.findall(words)
        ]
        if call in ("write", "writev", "fsync", "ftruncate"):  # of an open file
            number, path = files[0] if files else (0, "")
            paths = [path]
        else:  # a path may be relative to an open folder
            at = files[0][1] if files and call.endswith("at") else "/"
            paths = [os.path.join(at, os.fsdecode(text)) for text in texts]
        if not all(path == folder or path.startswith(f"{folder}/") for path in paths):
            continue
        paths = [os.path.relpath(path, folder) for path in paths]
        if call == "fsync":
            yield "fsync", *paths
        elif call == "ftruncate":
            offsets[number] = 0
            yield "truncate", *paths, int(words.rpartition(",")[2])
        elif call in ("write", "writev"):
            data = b"".join(texts)[:result]
            yield "write", *paths, None if number in appending else offsets[number], data
            offsets[number] += len(data)
        elif call == "openat":
            offsets[result] = 0
            (appending.add if "O_APPEND" in words else appending.discard)(result)
            if "O_CREAT" in words:
                yield "open", *paths, "O_TRUNC" in words
        elif call in ("unlink", "unlinkat", "rmdir"):
            yield "remove", *paths
        else:
            yield call.removesuffix("at"), *paths


def _decoded(text):
    return bytes.fromhex(text.replace("\\x", ""))


class Node:
    """A file's bytes, or a folder's names and their nodes: now, and at the last fsync."""

    def __init__(self, content):
        self.now, self.synced = content, copy(content)


class Disk:
    """A folder whose operations are applied one by one."""

    def __init__(self):
        self.root, self.replaced = Node({}), {}

    def find(self, path):
        """The node at a path."""
        node = self.root
        for part in Path(path).parts:
            node = node.now[part]
        return node

    def walk(self, synced=False):
        """Yields (path, node) of all that is there, folders first."""
        waiting = [("", self.root)]
        for place, folder in waiting:
            for name, node in (folder.synced if synced else folder.now).items():
                yield place + name, node
                if isinstance(node.now, dict):
                    waiting.append((f"{place}{name}/", node))

    def apply(self, operation, path, *more):
        """("open", path, whether it is emptied), ("write", path, offset or None for the end, data),
        ("truncate", path, size), ("fsync", path), ("rename", path, new), ("remove", path) or
        ("mkdir", path).
        """
        if operation == "fsync":
            node = self.find(path)
            node.synced = copy(node.now)
            return
        place, name = self.find(Path(path).parent), Path(path).name
        node = place.now.get(name)
        if operation == "mkdir":
            place.now[name] = Node({})
        elif operation == "open":
            node = place.now.setdefault(name, Node(b""))
            if more[0]:
                node.now = b""
        elif operation == "write":
            offset, data = more
            offset = len(node.now) if offset is None else offset
            before = node.now[:offset].ljust(offset, b"\0")
            node.now = before + data + node.now[offset + len(data) :]
        elif operation == "truncate":
            node.now = node.now[: more[0]].ljust(more[0], b"\0")
        elif operation == "remove":
            del place.now[name]
        else:
            del place.now[name]
            new = self.find(Path(more[0]).parent)
            self.replaced[new.now.get(Path(more[0]).name)] = node
            new.now[Path(more[0]).name] = node

    def files(self, variant):
        """What is on the disk: path -> bytes, or None for a folder.

        Args:
            variant (str): "process killed": everything. "data lost": of each file what an fsync has
                covered, of names all. "names lost": of each folder, too. "all lost but removals":
                the same, but what was removed has gone. A file that a rename has replaced is no
                removed one: the old file is there if the new one is not.
        """
        alive = {node for _, node in self.walk()}
        found = {}
        for path, node in self.walk(synced=variant in VARIANTS[2:]):
            newest = node
            while newest in self.replaced:
                newest = self.replaced[newest]
            if variant == "all lost but removals" and newest not in alive:
                continue
            if isinstance(node.now, dict):
                found[path] = None
            else:
                found[path] = node.now if variant == "process killed" else node.synced
        return found


def states(operations):
    """Every state that a crash can leave.

    Yields:
        tuple: the operations that had been done, the name of the variant, the files (see
        `Disk.files`).
    """
    disk = Disk()
    for count, operation in enumerate(operations, 1):
        disk.apply(*operation)
        for variant in VARIANTS:
            yield operations[:count], variant, disk.files(variant)


def save_record(operations):
    """Writes the operations up to the last checkpoint to `crash_operations.jsonl`: of a write, in
    place of the data, the path at which they end, or the text of a status, or the beginning of a
    line of the log.
    """
    last = max(i for i, (_, path, *_) in enumerate(operations) if "checkpoints" in path)
    disk, paths, lines = Disk(), {}, []
    for name, path, *more in operations[: last + 1]:
        disk.apply(name, path, *more)
        # A file gets its final name later.
        paths |= {node: at for at, node in disk.walk() if "/." not in at or node not in paths}
        if name == "write" and path.endswith(".jsonl"):
            more = [re.match(r'{"split": "\w+", "step": \d+', more[1].decode())[0]]
        elif name == "write":
            more = [more[1].decode() if "status" in path else disk.find(path)]
        if [name, path, *more] not in lines[-1:]:  # a file is written in several parts
            lines.append([name, path, *more])
    with RECORDED.open("w") as file:
        for line in lines:
            file.write(json.dumps([paths.get(part, part) for part in line]) + "\n")


def load_record(files):
    """The operations in `crash_operations.jsonl`, with the data of another run of the same command.

    Args:
        files (dict): what that run has left (see `read`), all checkpoints included.
    """
    operations = [json.loads(line) for line in RECORDED.read_text().splitlines()]
    for operation in operations:
        if operation[0] == "write":
            path, data = operation[1], operation[2].encode()
            if path.endswith(".jsonl"):  # the line of the same step: numbers may differ
                lines = files[path].splitlines(keepends=True)
                operation[2:] = None, next(line for line in lines if line.startswith(data))
            else:
                operation[2:] = 0, files.get(operation[2], data)
    return operations


def read(folder):
    """What is below a folder: path -> bytes, or None for a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def write(files, folder):
    """Makes a folder with these files."""
    for path, data in files.items():
        if data is None:
            (folder / path).mkdir(parents=True, exist_ok=True)
        else:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
