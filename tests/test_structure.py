"""The structure that utils/README.md describes: rooms that depend downwards only, and short loops."""

import ast
import functools
import importlib.util
import json
import re
import sys
from graphlib import TopologicalSorter

import pytest
from harness.launches import ROOT

# Each room, and the rooms from which it may import.
ROOMS = {
    "utils/run": {"utils.run"},
    "utils/data": {"utils.data", "utils.run"},
    "utils": {"utils", "utils.data", "utils.run"},
}
# Maximum number of lines of `main` and of its loop. A script may have any length that reads well.
LIMITS = {
    "train_minimal": (65, 26),
    "train_cifar": (115, 42),
    "train_images": (130, 44),
    "train_gpt": (117, 40),
    "train_lm": (125, 44),
    "train_model_parallel": (116, 42),
}


def modules(room):
    return [path for path in sorted((ROOT / room).glob("*.py")) if path.stem != "__init__"]


def imports(path):
    """The modules that a file imports, anywhere in it."""
    return set().union(*(imports_of(node) for node in ast.walk(parsed(path))))


def imports_of(node):
    """The modules that a statement imports."""
    if isinstance(node, ast.ImportFrom):
        # `from utils.run import weights` imports a module.
        return {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {alias.name for alias in node.names} if isinstance(node, ast.Import) else set()


def own(path):
    """The modules of `utils` that a file imports, by their dotted names."""
    known = {
        ".".join(p.relative_to(ROOT).with_suffix("").parts) for room in ROOMS for p in modules(room)
    }
    return imports(path) & known


@pytest.mark.parametrize("room", ROOMS)
def test_nobody_imports_upwards(room):
    for path in modules(room):
        rooms = {name.rpartition(".")[0] for name in own(path)}
        assert rooms <= ROOMS[room], f"{path.name} imports from {rooms - ROOMS[room]}"
        scripts = {script.stem for script in (ROOT / "scripts").glob("*.py")}
        assert not imports(path) & (scripts | {"scripts"}), path.name


def test_modules_import_each_other_in_no_circle():
    graph = {}
    for room in ROOMS:
        for path in modules(room):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            graph[name] = own(path)
    assert len(list(TopologicalSorter(graph).static_order())) == len(graph)  # raises CycleError


def test_packages_hold_nothing_themselves():
    for room in ROOMS:
        assert (ROOT / room / "__init__.py").read_text() == ""


def test_what_comes_before_torch_imports_only_the_standard_library():
    """A signal during the import of torch must not be lost."""
    for name in ("process", "failures"):
        for module in imports(ROOT / "utils" / "run" / f"{name}.py"):
            top = module.split(".")[0]
            assert top in sys.stdlib_module_names or module.startswith(
                ("utils.run", "torch.distributed.elastic")
            )


def test_every_module_is_used():
    used = set().union(*(own(path) for room in (*ROOMS, "scripts") for path in modules(room)))
    for room in ROOMS:
        for path in modules(room):
            assert ".".join(path.relative_to(ROOT).with_suffix("").parts) in used, path.name


def test_the_map_of_the_rooms_names_every_module():
    page = (ROOT / "utils" / "README.md").read_text()
    for room in ROOMS:
        for path in modules(room):
            assert re.search(rf"`{path.stem}`", page), path.name


def test_every_dependency_is_required():
    """`requirements.txt` names each package that is imported; some are for train_lm.py only."""
    files = [path for room in (*ROOMS, "scripts") for path in modules(room)]
    scripts = {path.stem for path in modules("scripts")}
    packages = {"PIL": "pillow", "yaml": "pyyaml"}
    required, for_lm = (
        set(re.findall(r"^[\w-]+", (ROOT / file).read_text(), re.MULTILINE))
        for file in ("requirements.txt", "scripts/requirements_lm.txt")
    )
    importing = set()
    for path in files:
        names = {name.split(".")[0] for name in imports(path) if name}
        names -= scripts | {"utils"} | set(sys.stdlib_module_names)
        needed = {packages.get(name, name) for name in names}
        assert needed <= required | for_lm, path.name
        importing |= {path.stem for _ in needed & for_lm}
    users = {path.stem for path in files if imports(path) & {f"utils.{name}" for name in importing}}
    assert users <= {"train_lm"} | importing


@functools.cache
def parsed(path):
    return ast.parse(path.read_text())


def imports_at_once(path, seen):
    """The packages that importing a file of this project imports, through its own modules too."""
    found = set()
    for node in parsed(path).body:
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        for name in imports_of(node):
            own_file = ROOT / f"{name.replace('.', '/')}.py"
            if own_file.exists() and own_file not in seen:
                seen.add(own_file)
                found |= imports_at_once(own_file, seen)
            elif not own_file.exists():
                found.add(name.split(".")[0])
    return found


def test_the_tests_are_collected_without_packages_that_few_need():
    """On a machine with GPUs, torch, torchvision and accelerate are enough for `-m gpu`."""
    few = {"datasets", "tensorboard", "matplotlib", "transformers", "peft", "trl"}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        skips = set(
            re.findall(r'^\w+ = pytest.importorskip\("(\w+)', path.read_text(), re.MULTILINE)
        )
        if not skips:
            assert not imports_at_once(path, set()) & few, path.name


def test_every_wrong_edit_applies():
    """What each of tests/mutants.py changes stands once in its file, and its tests exist."""
    for mutant in load_mutants().MUTANTS:
        assert (ROOT / mutant.file).read_text().count(mutant.old) == 1, mutant.name
        assert (ROOT / "tests" / mutant.tests.split()[0]).exists(), mutant.name


def test_every_survivor_has_a_reason():
    """Those that behave the same are told from those that no test notices yet."""
    for entry in json.loads((ROOT / "tests" / "survivors.json").read_text()):
        assert entry.keys() == {"file", "function", "line", "mutated", "reason"}
        assert (ROOT / entry["file"]).exists() and len(entry["reason"]) > 20, entry
        assert entry["reason"].startswith(("equivalent", "accepted")), entry


def load_mutants():
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "tests" / "mutants.py")
    sys.modules["mutants"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("script", LIMITS)
def test_loops_stay_short(script):
    source = (ROOT / "scripts" / f"{script}.py").read_text()
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    main = next(node for node in functions if node.name == "main")
    loops = [node for node in ast.walk(main) if isinstance(node, ast.For)]
    loop = max(loops, key=lambda node: node.end_lineno - node.lineno)
    counts = tuple(node.end_lineno - node.lineno + 1 for node in (main, loop))
    assert all(count <= limit for count, limit in zip(counts, LIMITS[script], strict=True)), counts
