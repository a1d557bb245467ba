"""The structure that CONTRIBUTING.md describes: layers of modules, short scripts, and the loop that the README shows."""

import ast
import re
import sys
import textwrap

import pytest
from conftest import ROOT

LAYERS = [
    set("__init__ exits augment chaos gpu_peaks model_card muon report sampling shared_batches shards".split()),
    {"arguments", "devices", "files", "fsdp", "guard", "hub", "image_data", "image_files", "plan", "tracking"},
    {"image_folder", "mixing", "plots", "topology"},
    {"checkpoint", "image_cache", "text_data", "weights"},
    {"pretrained", "run_folder"},
]
# Maximum number of lines of the script, of `main`, and of the loop.
LIMITS = {
    "train_minimal": (100, 60, 35),
    "train_cifar": (330, 100, 35),
    "train_images": (400, 100, 35),
    "train_gpt": (400, 120, 35),
    "train_model_parallel": (330, 100, 35),
}


def imports(path):
    """The modules of `utils` that a file imports, anywhere in it, and the names of all other modules that it imports."""
    own, others = set(), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "utils":
            own |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module.startswith("utils."):
            own.add(node.module.removeprefix("utils."))
        elif isinstance(node, ast.ImportFrom):
            others.add(node.module.partition(".")[0])
        elif isinstance(node, ast.Import):
            others |= {alias.name.partition(".")[0] for alias in node.names}
    return own, others


def test_every_module_has_a_layer():
    assert {path.stem for path in (ROOT / "utils").glob("*.py")} == set().union(*LAYERS)


@pytest.mark.parametrize("path", sorted((ROOT / "utils").glob("*.py")), ids=lambda path: path.stem)
def test_modules_import_from_lower_layers_only_and_no_script(path):
    own, others = imports(path)
    layer = next(number for number, names in enumerate(LAYERS) if path.stem in names)
    assert own <= set().union(*LAYERS[:layer]), path.name
    assert not others & {script.stem for script in (ROOT / "scripts").glob("*.py")}


def test_every_package_that_is_imported_is_required():
    """Packages that come with others may leave with them."""
    imported = set().union(*(imports(path)[1] for folder in ("scripts", "utils") for path in (ROOT / folder).glob("*.py")))
    names = {"PIL": "pillow", "yaml": "pyyaml"}
    own = {path.stem for path in (ROOT / "scripts").glob("*.py")} | {"utils"}
    needed = {names.get(name, name) for name in imported - own - sys.stdlib_module_names}
    required = set(re.findall(r"^[\w-]+", (ROOT / "requirements.txt").read_text(), re.MULTILINE))
    assert needed <= required


def loop_of(script):
    """The source lines of a script, its `main`, and the outermost loop of `main`."""
    source = (ROOT / "scripts" / f"{script}.py").read_text()
    main = next(node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == "main")
    loops = [node for node in ast.walk(main) if isinstance(node, ast.For)]
    return source.splitlines(), main, max(loops, key=lambda node: node.end_lineno - node.lineno)


@pytest.mark.parametrize("script", LIMITS)
def test_scripts_stay_short(script):
    lines, main, loop = loop_of(script)
    counts = (len(lines), main.end_lineno - main.lineno + 1, loop.end_lineno - loop.lineno + 1)
    assert all(count <= limit for count, limit in zip(counts, LIMITS[script], strict=True)), counts


def test_the_readme_shows_the_loop_of_the_smallest_script():
    lines, _, loop = loop_of("train_minimal")
    assert textwrap.dedent("\n".join(lines[loop.lineno - 1 : loop.end_lineno])) in (ROOT / "README.md").read_text()
