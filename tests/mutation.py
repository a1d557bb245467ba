"""Mutates modules systematically, with the operators of mutmut, and runs the unit tests on each mutant.

python tests/mutation.py utils/run/plan.py       # every mutant of a module; prints the survivors
python tests/mutation.py scripts/train_gpt.py::lr_multiplier    # of one function
python tests/mutation.py --sample 100            # at most 100 of each module
python tests/mutation.py --recent 20             # at least 20 of each module that has changed

mutmut and cosmic-ray run a command per mutant, in a copy of the project or in place: with this
project's imports, ten seconds each. Here pytest collects the tests once; for each mutant a forked
process replaces the mutated function in memory, and runs the unit tests that call it, the quickest
first: a tenth of a second. A test that starts processes is no unit test, and is skipped.

The score of a module is the share of its mutants that the tests notice, of all, those that behave
the same included. Each run ends with the scores as rows of the table in tests/README.md, with which
`--recent` compares.
"""

import argparse
import contextlib
import functools
import gc
import hashlib
import inspect
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("units", "properties")
# Signals, threads and `os._exit`: real processes test them, and canaries.py their tests.
LAUNCHED = ("utils/run/process.py", "utils/run/entry.py", "utils/scale/watchdog.py")
FUNCTIONS = [
    "scripts/train_cifar.py::lr_multiplier,image_size_at,evaluate",
    "scripts/train_gpt.py::lr_multiplier,evaluate",
    "scripts/train_images.py::lr_multiplier,evaluate",
    "scripts/train_model_parallel.py::lr_multiplier,evaluate",
]
ALLOWED = 5  # how many points the share of a changed module may be below its score in the table
NEW = 90  # the score that a module without a row must have
# `zip(strict=True)` raises where two lists differ in length, which they never do.
CHECKS = re.compile(r",?\s*strict=\w+|,\s*(?=\))")
FOR_PEOPLE = ("print", "notice", "warn", "UserError", "RunFailed")
SLOWEST = 10.0  # seconds: a test that takes longer, also on a slow machine, is no unit test
JOBS = 2
SURVIVED = "survived"


class Mutant(NamedTuple):
    """A changed part of a function: `source` is the whole file with the change."""

    file: str
    function: str  # as Python names it, without what is inside it; "" for a constant of the module
    line: int
    old: str
    new: str
    source: str


# ---------------------------------------------------------------------------------------- mutants


def mutants_of(word):
    """The mutants of a file, or of functions of it: those after `::`, separated by commas."""
    import libcst

    file, _, functions = word.partition("::")
    text = (ROOT / file).read_text()
    seen, found, module = {text}, [], libcst.parse_module(text)
    # The code of each statement of the module: only the one with the change is built anew.
    codes = [module.code_for_node(statement) for statement in module.body]
    start = text.index("".join(codes))
    for statement, code in zip(module.body, codes, strict=True):
        before, after = text[:start], text[start + len(code) :]
        start += len(code)
        for node, function in _places(statement):
            if functions and function not in functions.split(","):
                continue
            for changed in _changes(node):
                source = (
                    before + module.code_for_node(statement.deep_replace(node, changed)) + after
                )
                line, old, new = _difference(text, source)
                if source not in seen and CHECKS.sub("", old) != CHECKS.sub("", new):
                    seen.add(source)
                    found.append(Mutant(file, function, line, old, new, source))
    return sorted(found, key=lambda mutant: mutant.line)


def _places(node, class_name="", function=None):
    """Each node below this one, with the function that it is in; "" for a constant.

    Left out is where mutants make no sense: texts for people (strings with a space, formatted
    strings, docstrings, what `raise` or `print` show), annotations, decorators, imports, and the
    body of a class outside its methods.
    """
    import libcst as cst

    left_out = (cst.FormattedString, cst.Annotation, cst.Decorator)
    if isinstance(node, left_out + (cst.Raise, cst.Import, cst.ImportFrom)):
        return
    if isinstance(node, cst.SimpleString) and (" " in node.value or '"""' in node.value):
        return
    if isinstance(node, cst.Call):
        called = getattr(node.func, "attr", node.func)
        if getattr(called, "value", None) in FOR_PEOPLE:
            return
    if isinstance(node, cst.ClassDef):
        class_name += f"{node.name.value}."
    if isinstance(node, cst.FunctionDef) and function is None:  # the outermost one counts
        function = class_name + node.name.value
    if function is not None:
        yield node, function
    elif not class_name and not isinstance(node, cst.If | cst.Expr):
        yield node, ""
    for child in node.children:
        yield from _places(child, class_name, function)


def _changes(node):
    """What the operators make of a node; a call whose result is not used may also be left out, and
    a condition be turned around.
    """
    import libcst
    from mutmut.mutation.mutators import mutation_operators, operator_string

    for kind, operator in mutation_operators:
        if isinstance(node, kind):
            changed = list(operator(node))
            # A string becomes another one, and not three.
            yield from changed[:1] if operator is operator_string else changed
    if isinstance(node, libcst.Expr) and isinstance(node.value, libcst.Call):
        yield libcst.Pass()
    if isinstance(node, libcst.If):
        inner = node.test.with_changes(lpar=[libcst.LeftParen()], rpar=[libcst.RightParen()])
        yield node.with_changes(test=libcst.UnaryOperation(libcst.Not(), inner))


def _difference(text, source):
    """The number of the first line that differs, and the lines of each side as one."""
    old, new, first = text.splitlines(), source.splitlines(), 1
    while old and new and old[0] == new[0]:
        del old[0], new[0]
        first += 1
    while old and new and old[-1] == new[-1]:
        del old[-1], new[-1]
    return first, *(" ".join(line.strip() for line in lines) for lines in (old, new))


# ------------------------------------------------------------------------- pytest, collected once


def in_processes(jobs):
    """Runs `jobs`, each (what, function, seconds), in forked processes, a few at a time.

    Yields:
        tuple: what, and the text that the function returned, or "" if its process died or took
        longer.
    """
    running = {}

    def ended():
        pid, _ = os.wait()
        with contextlib.suppress(ProcessLookupError):  # what the tests in it have started
            os.killpg(pid, signal.SIGKILL)
        what, file = running.pop(pid)
        file.seek(0)
        return what, file.read()

    for what, function, seconds in jobs:
        file = tempfile.TemporaryFile("w+")  # noqa: SIM115 (until it is read)
        if (pid := os.fork()) == 0:
            _answer(function, seconds, file)
        running[pid] = what, file
        if len(running) == JOBS:
            yield ended()
    while running:
        yield ended()


def _answer(function, seconds, file):
    """In a forked process: writes what `function()` returns, unless it takes longer."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    quiet = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(quiet, descriptor)
    try:
        file.write(function())
    except BaseException as error:
        file.write(f"error: {error!r}")
    file.flush()
    os._exit(0)


class Driver:
    """A plugin of pytest: judges mutants instead of running the tests."""

    def __init__(self, mutants, deadline):
        self._mutants, self._deadline = mutants, deadline
        self._files = {str(ROOT / mutant.file): mutant.file for mutant in mutants}
        self._seconds = {}  # how long each test takes
        self._callers = {}  # (file, function) -> the tests that call it
        self.verdicts = {}

    def pytest_runtestloop(self, session):
        """Runs all unit tests once, then those that call a mutated function, for each mutant."""
        self._items = {item.nodeid: item for item in session.items}
        for file in self._files.values():
            if "scripts/" in file:  # once, and not in each process
                sys.modules["harness.launches"].load_script(Path(file).stem)
        self._config = session.config
        self._base = session.config._tmp_path_factory.getbasetemp()
        session.config.pluginmanager.unregister(name="terminalreporter")
        gc.collect()
        gc.freeze()  # or each forked process copies all that the collector looks at
        tests = [(test, functools.partial(self._trace, test), 5 + SLOWEST) for test in self._items]
        for test, answer in in_processes(tests):
            if answer.startswith("["):  # it did not die, or take too long
                seconds, outcomes, called = json.loads(answer)
                if outcomes == ["passed"] and seconds <= SLOWEST:
                    self._seconds[test] = seconds
                    for place in map(tuple, called):
                        self._callers.setdefault(place, set()).add(test)
        print(f"{len(self._seconds)} unit tests, {len(self._mutants)} mutants", flush=True)
        for mutant, verdict in in_processes(self._jobs()):
            self.verdicts[mutant] = verdict or "the process died, or takes too long"
            print("S" if verdict == SURVIVED else ".", end="", flush=True)
        return True

    def _jobs(self):
        for mutant in self._mutants:
            if time.time() > self._deadline:
                return
            tests = self._tests_of(mutant)
            seconds = 10 + 10 * sum(self._seconds[test] for test in tests)
            yield mutant, functools.partial(self._run, tests, mutant), seconds

    def _tests_of(self, mutant):
        """The tests that call a function, or for a constant anything in its file; quickest first."""
        tests = set()
        for (file, function), callers in self._callers.items():
            if file == mutant.file and mutant.function in (function, ""):
                tests |= callers
        return sorted(tests, key=self._seconds.get)

    def _run(self, tests, mutant):
        """In a forked process: the first of the tests that fails, or SURVIVED."""
        install(mutant)
        for test in tests:
            if not self._passes(test):
                return test
        return SURVIVED

    def _passes(self, test):
        """Runs a test with a folder of this process."""
        item, folder = self._items[test], self._base / f"mutant-{os.getpid()}"
        folder.mkdir(exist_ok=True)
        self._config._tmp_path_factory._basetemp = folder
        self._config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        shutil.rmtree(folder, ignore_errors=True)
        return not item.session.testsfailed

    def _trace(self, test):
        """In a forked process: how long a test takes, how it ends, and which functions it calls."""
        called, outcomes = set(), []

        def trace(frame, *_):  # called for each Python function; None: not for its lines
            if frame.f_code.co_filename in self._files:
                name = frame.f_code.co_qualname.partition(".<locals>")[0]
                called.add((self._files[frame.f_code.co_filename], name))

        def note(report):
            if report.when == "call" or report.outcome != "passed":
                outcomes.append(report.outcome)

        self._config.pluginmanager.register(types.SimpleNamespace(pytest_runtest_logreport=note))
        start_time = time.perf_counter()
        threading.settrace(trace)
        sys.settrace(trace)
        self._passes(test)
        sys.settrace(None)
        return json.dumps([time.perf_counter() - start_time, outcomes, sorted(called)])


def install(mutant):
    """Replaces a function, or the constants of a module, in the modules that were imported."""
    path = str(ROOT / mutant.file)
    code = compile(mutant.source, path, "exec")
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) != path:
            continue
        mutated = types.ModuleType(module.__name__)
        mutated.__file__ = path
        exec(code, mutated.__dict__)
        if not mutant.function:
            for name, value in mutated.__dict__.items():
                if not inspect.isfunction(value) and not inspect.isclass(value):
                    module.__dict__[name] = value
            continue
        target, source = (_function(owner, mutant.function) for owner in (module, mutated))
        target.__code__ = source.__code__
        target.__defaults__, target.__kwdefaults__ = source.__defaults__, source.__kwdefaults__


def _function(owner, name):
    """The plain function of this dotted name in a module, behind its decorators."""
    *classes, last = name.split(".")
    for part in classes:
        owner = getattr(owner, part)
    found = vars(owner)[last]
    found = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
    return inspect.unwrap(found)


# ------------------------------------------------------------------------------------------ verdicts


def judge(mutants, deadline, tests):
    """Runs the unit tests on mutants.

    Args:
        deadline (float): seconds since 1970, after which no mutant is begun.
        tests (list): what pytest collects; empty: all tests.

    Returns:
        dict: mutant -> the test that noticed it, or SURVIVED. Those that were not begun are missing.
    """
    if not mutants:
        return {}
    import pytest
    import torch

    sys.path.insert(0, str(ROOT / "tests"))
    os.chdir(ROOT)
    torch.set_num_threads(1)  # a forked process must not wait for threads that it does not have
    os.environ.update(WARM_SERVER="none", HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    driver = Driver(mutants, deadline)
    with tempfile.TemporaryDirectory() as home:
        os.environ["HF_HOME"] = f"{home}/hub"  # not a folder above those of the tests
        from harness import warm

        warm.run = warm.Program = lambda *_, **__: pytest.skip("starts processes")
        words = ["-q", "-s", "-o", "addopts=", "-p", "no:cacheprovider", "-p", "no:xdist"]
        words += ["-m", "not slow and not gpu", "--basetemp", f"{home}/tmp"]
        rooms = [str(ROOT / "tests" / room) for room in ROOMS]
        code = pytest.main([*words, *(tests or rooms)], plugins=[driver])
    print()
    if code not in (0, 5):
        raise SystemExit("the tests were not collected")
    return driver.verdicts


def modules():
    """What is mutated: the modules of `utils`, and the functions of scripts that units test."""
    files = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "utils").rglob("*.py"))]
    return [f for f in files if f not in LAUNCHED and not f.endswith("__init__.py")] + FUNCTIONS


def shuffled(mutants):
    """The mutants in an order that does not depend on where they stand."""

    def place(mutant):
        words = (mutant.file, mutant.function, mutant.old, mutant.new)
        return hashlib.sha256(" | ".join(words).encode()).digest()

    return sorted(mutants, key=place)


def recent_mutants(count):
    """For each module that the last ten commits and the working tree changed, the newest first: the
    mutants of the lines that changed, filled up with others to `count`. Nothing where there is no
    history.
    """

    def git(*words):
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
        return done.stdout if done.returncode == 0 else ""

    before = max(0, min(10, int(git("rev-list", "--first-parent", "--count", "HEAD") or 0) - 1))
    log = ("log", f"-{before}", "--first-parent", "-m", "--name-only", "--format=")
    changed = [*git("diff", "--name-only", "HEAD").split(), *git(*log).split()]
    words = {word.partition("::")[0]: word for word in modules()}
    chosen = []
    for file in [file for file in dict.fromkeys(changed) if file in words]:
        difference = git("diff", "-U0", f"HEAD~{before}", "--", file)
        lines = set()
        for first, length in re.findall(r"^@@ -\S+ \+(\d+),?(\d*) @@", difference, re.MULTILINE):
            lines |= set(range(int(first), int(first) + int(length or 1)))
        mutants = shuffled(mutants_of(words[file]))
        mutants.sort(key=lambda mutant: mutant.line not in lines)
        own = sum(mutant.line in lines for mutant in mutants)
        chosen += mutants[: max(count, min(own, 3 * count))] if own else []
    return chosen


def tests_that_name(mutants):
    """The files of tests that name a module of these mutants: to collect all would take minutes."""
    stems = {Path(mutant.file).stem for mutant in mutants}
    words = re.compile(rf"\b({'|'.join(stems)})\b")
    files = [path for room in ROOMS for path in sorted((ROOT / "tests" / room).glob("*.py"))]
    return [str(path) for path in files if words.search(path.read_text())]


def rows(mutants, verdicts):
    """The rows of the table for these verdicts; those with fewer noticed mutants than it says."""
    page = (ROOT / "tests" / "README.md").read_text()
    said = dict(re.findall(r"^\| `([^`]+)`.*\| (\d+)% \|$", page, re.MULTILINE))
    lines, wrong = [], []
    for file in dict.fromkeys(mutant.file for mutant in verdicts):
        own = [verdict for mutant, verdict in verdicts.items() if mutant.file == file]
        score = 100 * sum(verdict != SURVIVED for verdict in own) / len(own)
        lines.append(f"| `{file}` | {len(own)} | {score:.0f}% |")
        if len(own) < sum(mutant.file == file for mutant in mutants):
            lines[-1] += " not all of its mutants: not compared"
        elif score < (expected := int(said.get(file, NEW))) - ALLOWED:
            wrong.append(f"{lines[-1]} in tests/README.md: {expected}%")
    return lines, wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("modules", nargs="*", metavar="FILE[::FUNCTION,...]")
    parser.add_argument("--recent", type=int, metavar="N", help="N mutants per changed module")
    parser.add_argument("--sample", type=int, metavar="N", help="at most N mutants per module")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start none after these")
    parser.add_argument("--tests", nargs="*", default=[], help="only these tests, for a first look")
    args = parser.parse_args()
    began, tests = time.time(), args.tests
    if args.recent:
        mutants = recent_mutants(args.recent)
        tests = tests_that_name(mutants)
    else:
        groups = [mutants_of(word) for word in args.modules or modules()]
        mutants = [mutant for group in groups for mutant in shuffled(group)[: args.sample]]
    verdicts = judge(mutants, began + args.seconds, tests)
    alive = sorted(mutant for mutant, verdict in verdicts.items() if verdict == SURVIVED)
    for mutant in alive:
        place = f"{mutant.file}:{mutant.line} in {mutant.function or 'the module'}"
        print(f"\n{place}\n- {mutant.old}\n+ {mutant.new}")
    lines, wrong = rows(mutants, verdicts)
    print("", *lines, sep="\n")
    print(
        f"\n{len(verdicts)} mutants, {len(alive)} survived, {len(mutants) - len(verdicts)} left out, "
        f"in {time.time() - began:.0f} s"
    )
    if args.recent and wrong:
        sys.exit("\n".join(["\nthe tests notice fewer than the table says:", *wrong]))


if __name__ == "__main__":
    main()
