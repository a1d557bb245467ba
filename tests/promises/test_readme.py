"""Every command in the README and in the docstrings of scripts exists, and so do its flags."""

import json
import re
import sys
from functools import cache

import pytest
import yaml
from harness.launches import ROOT, load_script, run

from utils.run.failures import UserError

README = (ROOT / "README.md").read_text()
FOLDERS = ("scripts", "accelerate_configs", "utils", "tests")
OTHERS = {name: (ROOT / name / "README.md").read_text() for name in FOLDERS}
PAGES = README + "".join(OTHERS.values())
DOCS = PAGES + "".join(
    path.read_text().split('"""')[1] for path in sorted((ROOT / "scripts").glob("*.py"))
)


def commands():
    """(script, its flags, the whole command) for every command that names a script."""
    joined = DOCS.replace("\\\n", " ")
    in_tables = "\n".join(
        re.findall(r"`([^`\n]+)`", "\n".join(re.findall(r"^\|.*", joined, re.MULTILINE)))
    )
    # A separate command follows after --.
    for line in f"{joined}\n{in_tables}".replace(" -- ", "\n").splitlines():
        match = re.search(
            r"(?:launch|python|torchrun|sbatch)\b.*?((?:scripts|utils|tests)/\w+\.(?:py|sbatch))(.*)",
            line.strip().strip("`"),
        )
        # Programs of the tests have no flags, and start the tests.
        own = match and not match[1].startswith("tests/") and "pytest" not in line
        if own and not line.strip().startswith(("#", "|")):
            yield match[1], re.findall(r"(?<=\s)(--\w+)", " " + match[2]), line.strip()


@cache
def known_flags(script):
    return set(re.findall(r"--\w+", run(None, script, "--help").stdout))


def test_the_readme_is_read_in_one_sitting_and_the_pages_name_every_script_and_configuration():
    assert len(README.splitlines()) <= 150
    for path in (ROOT / "scripts").iterdir():
        if path.is_file() and path.name != "README.md":
            assert f"`{path.name}`" in README and f"`{path.name}`" in OTHERS["scripts"], path.name
    for path in (ROOT / "scripts" / "recipes").iterdir():
        assert f"`recipes/{path.name}`" in OTHERS["scripts"], path.name
    for path in (ROOT / "accelerate_configs").glob("*.yaml"):
        assert f"`{path.name}`" in OTHERS["accelerate_configs"], path.name


def test_the_diff_in_the_readme_is_that_of_the_smallest_script():
    """Every line that it adds or keeps stands in train_minimal.py, in the same order."""
    diff = re.search(r"```diff\n(.*?)```", README, re.DOTALL)[1].splitlines()
    shown = [line[2:].strip() for line in diff if line[:1] in "+ "]
    lines = [
        line.strip() for line in (ROOT / "scripts" / "train_minimal.py").read_text().splitlines()
    ]
    main = iter(lines[lines.index("def main():") :])
    for line in shown:
        assert line in main, line  # consumes the lines before it
    assert len(shown) >= 20 and sum(line.startswith("-") for line in diff) >= 5


def test_there_are_commands():
    found = [line for _, _, line in commands()]
    assert len(found) >= 20 and any("--main_process_ip" in line for line in found), (
        "the launch matrix"
    )


def test_links_lead_somewhere():
    for folder, page in {"": README, **OTHERS}.items():
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page):
            assert (ROOT / folder / target).exists(), f"{folder}/README.md: {target}"


def test_the_benchmark_table_is_that_of_the_record():
    """.github/benchmark.json is what benchmark.py wrote, and names only benchmarks and options that
    exist.
    """
    benchmark, record = (
        load_script("benchmark"),
        json.loads((ROOT / ".github" / "benchmark.json").read_text()),
    )
    assert benchmark.table(record) in OTHERS["scripts"]
    for name, figure in record["figures"].items():
        words = figure["command"].split()
        assert words[:2] == ["python", "scripts/benchmark.py"] and words[2] in benchmark.BENCHMARKS
        assert name.startswith(words[2])
        assert {word for word in words if word.startswith("--")} <= known_flags(
            "scripts/benchmark.py"
        )


@pytest.mark.parametrize(
    "script", sorted({script for script, _, _ in commands() if script.endswith(".py")})
)
def test_flags_exist(script):
    assert (ROOT / script).exists()
    for _, flags, line in (c for c in commands() if c[0] == script):
        assert set(flags) <= known_flags(script), line


@pytest.mark.parametrize("name", sorted(set(re.findall(r"accelerate_configs/(\w+\.yaml)", DOCS))))
def test_configs_exist(name):
    assert (ROOT / "accelerate_configs" / name).exists()


def test_files_named_in_the_readme_exist():
    for name in set(
        re.findall(
            r"(?<![\w/.])((?:scripts|utils|tests|\.github|recipes)/[\w./]+\.(?:py|png|md|sbatch|diff))",
            PAGES,
        )
    ):
        assert (ROOT / name).exists() or (ROOT / "scripts" / name).exists(), name


# A feature is a flag only where most people who launch that script set it: the rest are recipes.
MOST_FLAGS = {"minimal": 15, "cifar": 34, "gpt": 45, "images": 54, "model_parallel": 27, "lm": 48}


@pytest.mark.parametrize("script", MOST_FLAGS)
def test_a_script_has_few_flags(script):
    flags = known_flags(f"scripts/train_{script}.py") - {"--help"}
    assert len(flags) <= MOST_FLAGS[script], sorted(flags)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "accelerate_configs").glob("*.yaml")), ids=lambda path: path.name
)
def test_configs_explain_every_field(path):
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    assert all("#" in line for line in lines if not line.endswith(":")), path.name
    fields = yaml.safe_load(path.read_text())
    assert isinstance(fields["mixed_precision"], str), "an unquoted no is read as false"


@pytest.mark.parametrize(
    ("script", "flag", "bad"),
    [
        ("train_cifar", "--label_smoothing", "2"),
        ("train_cifar", "--val_fraction", "-0.1"),
        ("train_images", "--label_smoothing", "1"),
        ("train_images", "--flip", "2"),
        ("train_images", "--min_scale", "1.5"),
        ("train_gpt", "--dropout", "2"),
        ("train_gpt", "--dropout", "nan"),
    ],
)
def test_a_probability_that_cannot_be_is_one_line(script, flag, bad, monkeypatch):
    """Alike in all scripts, and not an error of torch after the data was loaded."""
    words = [f"{script}.py", "--dataset", "synthetic", flag, bad]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(UserError, match=f"{flag}: must be"):
        load_script(script).parse_args()
