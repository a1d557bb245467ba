"""Keeps the recipes in scripts/recipes up to date with the scripts that they change.

    python tests/recipes.py     # after an edit of a script near a recipe: writes the diffs anew

A recipe is a text (its first line is the wish) and a diff against a script, with one line of context.
"""

import difflib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
RECIPES = sorted((SCRIPTS / "recipes").glob("*.diff"))


def base(recipe):
    """The script that a recipe changes."""
    return SCRIPTS / re.search(r"^--- a/(\w+\.py)$", recipe.read_text(), re.MULTILINE)[1]


def apply(recipe, target):
    """Writes the script as the recipe changes it to `target`.

    Raises:
        subprocess.CalledProcessError: it does not apply. Its `stdout` says which part.
    """
    words = ["patch", "--no-backup-if-mismatch", "--reject-file=-", "-o", target]
    subprocess.run([*words, base(recipe), recipe], check=True, capture_output=True, text=True)


def renewed(recipe):
    """The recipe as it would be written against the present script."""
    script, text = base(recipe), recipe.read_text()
    with tempfile.TemporaryDirectory() as folder:
        apply(recipe, Path(folder) / "changed.py")
        changed = (Path(folder) / "changed.py").read_text()
    lines = [source.splitlines(keepends=True) for source in (script.read_text(), changed)]
    names = (f"a/{script.name}", f"b/{script.name}")
    return text[: text.index("--- a/")] + "".join(difflib.unified_diff(*lines, *names, n=1))


if __name__ == "__main__":
    for recipe in RECIPES:
        try:
            recipe.write_text(renewed(recipe))
        except subprocess.CalledProcessError as error:
            sys.exit(f"{recipe.name} no longer applies:\n{error.stdout}{error.stderr}")
