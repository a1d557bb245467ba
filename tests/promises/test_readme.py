"""Every command in the README and in the docstrings of scripts exists, and so do its flags."""

import re
from functools import cache

import pytest
from harness.launches import ROOT, run

README = (ROOT / "README.md").read_text()
FOLDERS = (
    "scripts",
    "scripts/benchmarks",
    "scripts/recipes",
    "accelerate_configs",
    "utils",
    "tests",
)
OTHERS = {name: (ROOT / name / "README.md").read_text() for name in FOLDERS}
PAGES = README + "".join(OTHERS.values())
SCRIPTS = [path.read_text() for path in sorted((ROOT / "scripts").rglob("*.py"))]
DOCS = PAGES + "".join(source.split('"""')[1] for source in SCRIPTS)
CONFIGS_NAMED = set(re.findall(r"accelerate_configs/(\w+\.yaml)", DOCS))
PLACES, KINDS = r"(?:scripts|utils|tests|\.github|recipes)", r"(?:py|png|md|sbatch|diff)"
FILES_NAMED = set(re.findall(rf"(?<![\w/.])({PLACES}/[\w./]+\.{KINDS})", PAGES))


def commands():
    """(script, its flags, the whole command) for every command that names a script."""
    joined = DOCS.replace("\\\n", " ")
    rows = "\n".join(re.findall(r"^\|.*", joined, re.MULTILINE))
    in_tables = "\n".join(re.findall(r"`([^`\n]+)`", rows))
    # A separate command follows after --.
    for line in f"{joined}\n{in_tables}".replace(" -- ", "\n").splitlines():
        match = re.search(
            r"(?:launch|python|torchrun|sbatch)\b.*?((?:scripts|utils|tests)/[\w/]+\.(?:py|sbatch))(.*)",
            line.strip().strip("`"),
        )
        # Programs of the tests have no flags, and start the tests.
        own = match and not match[1].startswith("tests/") and "pytest" not in line
        if own and not line.strip().startswith(("#", "|")):
            yield match[1], re.findall(r"(?<=\s)(--\w+)", " " + match[2]), line.strip()


@cache
def help_of(script):
    return run(None, script, "--help").stdout


def known_flags(script):
    return set(re.findall(r"--\w+", help_of(script)))


def test_the_readme_is_read_in_one_sitting_and_the_pages_name_every_script_and_configuration():
    assert len(README.splitlines()) <= 150
    for path in [*(ROOT / "scripts").iterdir(), *(ROOT / "scripts" / "tools").iterdir()]:
        if path.is_file() and path.name != "README.md":
            assert path.name in README and path.name in OTHERS["scripts"], path.name
    for path in (ROOT / "scripts" / "benchmarks").glob("*.py"):
        assert f"`{path.name}`" in OTHERS["scripts/benchmarks"], path.name
    for path in (ROOT / "scripts" / "recipes").glob("*.diff"):
        assert f"`{path.name}`" in OTHERS["scripts/recipes"], path.name
    for path in (ROOT / "accelerate_configs").glob("*.yaml"):
        assert f"`{path.name}`" in OTHERS["accelerate_configs"], path.name


def test_the_diff_in_the_readme_is_that_of_the_smallest_script():
    """Every line that it adds or keeps stands in train_minimal.py, in the same order."""
    diff = re.search(r"```diff\n(.*?)```", README, re.DOTALL)[1].splitlines()
    shown = [line[2:].strip() for line in diff if line[:1] in "+ "]
    source = (ROOT / "scripts" / "train_minimal.py").read_text()
    lines = [line.partition("  # EDIT")[0].strip() for line in source.splitlines()]
    main = iter(lines[lines.index("def main():") :])
    for line in shown:
        assert line in main, line  # consumes the lines before it
    assert len(shown) >= 20 and sum(line.startswith("-") for line in diff) >= 5


def test_links_lead_somewhere():
    for folder, page in {"": README, **OTHERS}.items():
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page):
            assert (ROOT / folder / target).exists(), f"{folder}/README.md: {target}"


@pytest.mark.parametrize(
    "script", sorted({script for script, _, _ in commands() if script.endswith(".py")})
)
def test_flags_exist(script):
    assert (ROOT / script).exists() and len(list(commands())) >= 20
    for _, flags, line in (c for c in commands() if c[0] == script):
        assert set(flags) <= known_flags(script), line


def test_files_named_on_the_pages_exist():
    assert not [name for name in CONFIGS_NAMED if not (ROOT / "accelerate_configs" / name).exists()]
    for name in FILES_NAMED:
        assert (ROOT / name).exists() or (ROOT / "scripts" / name).exists(), name


# A feature is a flag only where most people who launch that script set it: the rest are recipes.
RULE = (
    "To continue a run, keep its arguments. You may change its length and what does not change "
    "results, such as the options for output, logging and checkpoints."
)
MOST_FLAGS = {"minimal": 15, "cifar": 33, "gpt": 43, "images": 44, "model_parallel": 26, "lm": 47}


@pytest.mark.parametrize("script", MOST_FLAGS)
def test_a_script_has_few_flags_and_its_help_says_how_a_run_continues(script):
    file = f"scripts/train_{script}.py"
    flags, text = known_flags(file) - {"--help"}, " ".join(help_of(file).split())
    assert len(flags) <= MOST_FLAGS[script], sorted(flags)
    assert RULE in text and "None" not in text
    assert RULE in " ".join(OTHERS["scripts"].split())


def test_help_is_printed_once_and_has_the_defaults_of_the_chosen_model():
    done = run("2cpu", "scripts/train_cifar.py", "--model resnet18 --help")
    assert "set (default: 30)" in " ".join(done.stdout.split())
    assert done.stdout.count("usage:") == 1
