"""The structure that utils/README.md describes: rooms that depend downwards only, and short loops."""

import ast
import functools
import re
import sys
from graphlib import TopologicalSorter

import pytest
from harness.launches import ROOT

# Each room, and the rooms from which it may import.
CORE, TOP = {"utils.run"}, {"utils.run", "utils.scale", "utils.report", "utils"}
ROOMS = {
    "utils/run": CORE,
    "utils/scale": {"utils.scale", *CORE},
    "utils/report": {"utils.report", *CORE},
    "utils": TOP,
    "utils/data": {"utils.data", *TOP},
    "utils/images": {"utils.images", "utils.data", *TOP},
    "utils/language": {"utils.language", "utils.data", *TOP},
}
PROGRAMS = ("scripts", "scripts/tools", "scripts/benchmarks")
# Maximum number of lines of `main` and of its loop. A script may have any length that reads well.
MAIN, LOOP = 100, 35
SCRIPTS = "minimal cifar images gpt lm model_parallel".split()
# Maximum number of lines and modules that a copy of a script carries.
CARRIED = {
    "minimal": (3710, 20),
    "cifar": (7330, 44),
    "images": (7740, 47),
    "gpt": (6880, 41),
    "lm": (9020, 46),
    "model_parallel": (6955, 41),
}


@functools.cache
def modules(room):
    return [path for path in sorted((ROOT / room).glob("*.py")) if path.stem != "__init__"]


@functools.cache
def nodes(path):
    """The syntax of a file."""
    return list(ast.walk(ast.parse(path.read_text())))


@functools.cache
def imports(path):
    """The modules that a file imports, anywhere in it."""
    return set().union(*(imports_of(node) for node in nodes(path)))


def imports_of(node):
    """The modules that a statement imports."""
    if isinstance(node, ast.ImportFrom):
        # `from utils.run import weights` imports a module.
        return {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {alias.name for alias in node.names} if isinstance(node, ast.Import) else set()


def dotted(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def own(path):
    """The modules of `utils` that a file imports, by their dotted names."""
    return imports(path) & {dotted(module) for room in ROOMS for module in modules(room)}


def test_nobody_imports_upwards():
    scripts = {path.stem for room in PROGRAMS for path in modules(room)} | {"scripts"}
    for room, below in ROOMS.items():
        for path in modules(room):
            rooms = {name.rpartition(".")[0] for name in own(path)}
            assert rooms <= below, f"{path.name} imports from {rooms - below}"
            assert not imports(path) & scripts, path.name


def test_modules_import_each_other_in_no_circle():
    graph = {dotted(path): own(path) for room in ROOMS for path in modules(room)}
    assert len(list(TopologicalSorter(graph).static_order())) == len(graph)  # raises CycleError


def test_what_comes_before_torch_imports_only_the_standard_library():
    """A signal during the import of torch must not be lost."""
    for name in ("process", "failures"):
        for module in imports(ROOT / "utils" / "run" / f"{name}.py"):
            top = module.split(".")[0]
            assert top in sys.stdlib_module_names or module.startswith(
                ("utils.run", "torch.distributed.elastic")
            )


def test_every_module_is_used_and_on_the_map_of_the_rooms():
    used = set().union(*(own(path) for room in (*ROOMS, *PROGRAMS) for path in modules(room)))
    page = (ROOT / "utils" / "README.md").read_text()
    for room in ROOMS:
        assert (ROOT / room / "__init__.py").read_text() == ""
        for path in modules(room):
            assert dotted(path) in used and f"`{path.stem}`" in page, path.name


# ------------------------------------------------------------------------------------ the tests

# They may reach into the product: they replace parts of it, or stand for Accelerate.
REACH_INSIDE = {"wrapped.py", "fakes.py"}


def files_of_tests(*rooms):
    return [path for room in rooms for path in sorted((ROOT / "tests" / room).glob("*.py"))]


def private_names(path, of_the_product):
    """What a file reads, sets, replaces or imports that is private, also as a string: "file:line name"."""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        named = re.findall(r"""(?<!\bself)(?<!\bcls)[."'](_\w+)|\bimport .*\b(_\w+)""", line)
        names = of_the_product & {name for pair in named for name in pair}
        yield from (f"{path.name}:{number} {name}" for name in names)


def defined(path):
    """The functions, classes, variables and own attributes that a file defines."""
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
            if isinstance(node.ctx, ast.Store):
                yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def test_tests_use_no_private_name():
    """So the inside of the product can be rebuilt under the same tests."""
    product = [path for room in (*ROOMS, *PROGRAMS) for path in modules(room)]
    names = {name for path in product for name in defined(path) if re.match("_[a-zA-Z]", name)}
    names -= {"_exit", "_replace"}  # also of `os`, and of named tuples
    found = []
    for path in files_of_tests("promises", "properties", "units", "harness"):
        if path.name not in REACH_INSIDE:  # nor through another wrapper in the harness
            found += private_names(path, names)
    assert not found, f"{len(found)} uses: {', '.join(found)}"


def test_promises_know_commands_and_files_only():
    """What a script or a module does inside is for the other rooms."""
    inside = {"utils", *(path.stem for room in PROGRAMS for path in modules(room))}
    for path in files_of_tests("promises"):
        names = {name for name in imports(path) if name.split(".")[0] in inside}
        assert not names and "load_script" not in path.read_text(), f"{path.name}: {names}"


# ----------------------------------------------------------------------------------- the scripts


@pytest.mark.parametrize("script", SCRIPTS)
def test_loops_stay_short_and_arguments_do_not_change_after_parsing(script):
    """`frozen` sees to that; here, that every training script calls it."""
    found = nodes(ROOT / "scripts" / f"train_{script}.py")
    functions = {node.name: node for node in found if isinstance(node, ast.FunctionDef)}
    main = functions["main"]
    loops = [node for node in ast.walk(main) if isinstance(node, ast.For)]
    counts = [node.end_lineno - node.lineno + 1 for node in (main, *loops)]
    assert counts[0] <= MAIN and max(counts[1:]) <= LOOP, counts
    assert ast.unparse(functions["parse_args"].body[-1]).startswith("return frozen(")


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_copy_stays_light(script):
    """What a script imports, directly or through other modules: people copy all of it."""
    files = {dotted(path): path for room in ROOMS for path in modules(room)}
    seen, todo = set(), [ROOT / "scripts" / f"train_{script}.py"]
    while todo:
        new = {files[name] for name in own(todo.pop())} - seen
        seen |= new
        todo += new
    lines, count = sum(len(path.read_text().splitlines()) for path in seen), len(seen)
    assert lines <= CARRIED[script][0] and count <= CARRIED[script][1], (lines, count)
    if script == "minimal":
        assert {path.parent.name for path in seen} == {"run"}


def test_what_makes_code_hard_to_follow_stays_out():
    """Ambient state, many or long modules, long classes, and functions with many parameters."""
    assert sum(len(modules(room)) for room in ROOMS) <= 62
    for path in [path for room in ROOMS for path in modules(room)]:
        assert path.parent.name != "run" or len(path.read_text().splitlines()) <= 300, path.name
        for node in nodes(path):
            assert not isinstance(node, ast.Global), f"{path.name}: global {node.names}"
            if isinstance(node, ast.FunctionDef):
                names = [a.arg for a in node.args.posonlyargs + node.args.args]
                names += [a.arg for a in node.args.kwonlyargs]
                assert len(set(names) - {"self", "cls"}) <= 6, f"{path.name}: {node.name}"
            if isinstance(node, ast.ClassDef):
                limit = 250 if node.name == "RunFolder" else 270
                assert node.end_lineno - node.lineno < limit, f"{path.name}: {node.name}"
