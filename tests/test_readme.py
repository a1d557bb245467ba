"""Every command in the README and in the docstrings of scripts exists, and so do its flags."""

import json
import re
from functools import cache

import pytest
import yaml
from conftest import ROOT, load_script, run

README = (ROOT / "README.md").read_text()
PAGES = README + "".join((ROOT / ".github" / f"{name}.md").read_text() for name in ("CLUSTERS", "RESULTS"))
DOCS = PAGES + "".join(path.read_text().split('"""')[1] for path in sorted((ROOT / "scripts").glob("*.py")))


def commands():
    """(script, its flags, the whole command) for every command that names a script."""
    joined = DOCS.replace("\\\n", " ")
    in_tables = "\n".join(re.findall(r"`([^`\n]+)`", "\n".join(re.findall(r"^\|.*", joined, re.MULTILINE))))
    # A separate command follows after --.
    for line in f"{joined}\n{in_tables}".replace(" -- ", "\n").splitlines():
        match = re.search(
            r"(?:launch|python|torchrun|sbatch)\b.*?((?:scripts|utils|tests)/\w+\.(?:py|sbatch))(.*)", line.strip().strip("`")
        )
        if match and not line.strip().startswith(("#", "|")):
            yield match[1], re.findall(r"(?<=\s)(--\w+)", " " + match[2]), line.strip()


@cache
def known_flags(script):
    return set(re.findall(r"--\w+", run(None, script, "--help").stdout))


def test_the_readme_is_read_in_one_sitting_and_names_every_script_and_configuration():
    assert len(README.splitlines()) <= 200
    for path in [*(ROOT / "scripts").iterdir(), *(ROOT / "accelerate_configs").iterdir()]:
        assert path.name in README or path.name == "__pycache__", path.name


def test_there_are_commands():
    found = [line for _, _, line in commands()]
    assert len(found) >= 20 and any("--main_process_ip" in line for line in found), "the launch matrix"


def test_numbers_of_lines_are_those_of_the_files():
    rows = re.findall(r"^\| `(scripts/[\w.]+)` \|[^|]*\| (\d+) \|", README, re.MULTILINE)
    assert len(rows) == len([path for path in (ROOT / "scripts").iterdir() if path.is_file()]) - 1  # all but baselines.py
    for script, lines in rows:
        assert len((ROOT / script).read_text().splitlines()) == int(lines), script
    changed = re.findall(r"^[+-](?![+-]{2})", (ROOT / ".github" / "regression.diff").read_text(), re.MULTILINE)
    assert f"changes {len(changed)} lines" in README


def test_the_benchmark_table_is_that_of_the_record():
    """.github/benchmark.json is what benchmark.py wrote, and names only benchmarks and options that exist."""
    benchmark, record = load_script("benchmark"), json.loads((ROOT / ".github" / "benchmark.json").read_text())
    assert benchmark.table(record) in README
    for name, figure in record["figures"].items():
        words = figure["command"].split()
        assert words[:2] == ["python", "scripts/benchmark.py"] and words[2] in benchmark.BENCHMARKS
        assert name.startswith(words[2])
        assert {word for word in words if word.startswith("--")} <= known_flags("scripts/benchmark.py")


@pytest.mark.parametrize("script", sorted({script for script, _, _ in commands() if script.endswith(".py")}))
def test_flags_exist(script):
    assert (ROOT / script).exists()
    for _, flags, line in (c for c in commands() if c[0] == script):
        assert set(flags) <= known_flags(script), line


@pytest.mark.parametrize("name", sorted(set(re.findall(r"accelerate_configs/(\w+\.yaml)", DOCS))))
def test_configs_exist(name):
    assert (ROOT / "accelerate_configs" / name).exists()


def test_files_named_in_the_readme_exist():
    for name in set(re.findall(r"(?<![\w/.])((?:scripts|utils|tests|\.github)/[\w./]+\.(?:py|png|md|sbatch|diff))", PAGES)):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("path", sorted((ROOT / "accelerate_configs").glob("*.yaml")), ids=lambda path: path.name)
def test_configs_explain_every_field(path):
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    assert all("#" in line for line in lines if not line.endswith(":")), path.name
    fields = yaml.safe_load(path.read_text())
    assert isinstance(fields["mixed_precision"], str), "an unquoted no is read as false"
