"""Mutates modules systematically, with the operators of mutmut, and runs the unit tests on each mutant.

python tests/mutation.py utils/run/plan.py       # every mutant of a module; prints the survivors
python tests/mutation.py scripts/train_gpt.py::lr_multiplier    # of one function
python tests/mutation.py --sample 100            # at most 100 of each module
python tests/mutation.py --table                 # the score of each module, from the runs so far
python tests/mutation.py --recent 20             # at least 20 of each module that has changed

mutmut and cosmic-ray run a command per mutant, in a copy of the project or in place: with this
project's imports, ten seconds each. Here pytest collects the tests once; for each mutant a forked
process replaces the mutated function in memory, and runs the unit tests that call it, the quickest
first: a tenth of a second. A test that starts processes is no unit test, and is skipped.

Verdicts are kept in runs/mutation/, so that an interrupted run continues; a survivor is tried again
when a test has changed. The score of a module is the share of its mutants that the tests notice, of
all, those that behave the same included. The table in tests/README.md has the scores that
`--recent` compares with.
"""

import argparse
import contextlib
import gc
import hashlib
import inspect
import json
import os
import re
import select
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
PAGE = ROOT / "tests" / "README.md"
ROOMS = ("units", "properties")
RESULTS = ROOT / "runs" / "mutation"
# Signals, threads and `os._exit`: real processes test them, and canaries.py their tests.
LAUNCHED = ("utils/run/process.py", "utils/run/stacks.py")
FUNCTIONS = [
    "scripts/train_cifar.py::lr_multiplier,image_size_at,predict_views,evaluate,predict,summarize",
    "scripts/train_gpt.py::lr_multiplier,evaluate,score_windows",
    "scripts/train_images.py::lr_multiplier,build_ema,ema_decay_at,evaluate",
    "scripts/train_model_parallel.py::lr_multiplier,evaluate",
]
ALLOWED = 0.05  # how much lower the share of a changed module may be than its score in the table
NEW = 0.9  # the score that a module without a row must have
# `zip(strict=True)` raises where two lists differ in length, which they never do.
CHECKS = re.compile(r",?\s*strict=\w+|,\s*(?=\))")
SLOWEST = 3.0  # seconds: a test that takes longer is no unit test
SLOWEST_IN_CI = 10.0  # on a machine that may be slower than the one that made the table
JOBS = 2


class Mutant(NamedTuple):
    """A changed part of a function: `source` is the whole file with the change."""

    file: str
    function: str  # as Python names it, without what is inside it; "" for a constant of the module
    line: int
    old: str
    new: str
    source: str

    @property
    def key(self):
        """What it is known by, wherever the lines stand."""
        return f"{self.file} | {self.function} | {self.old} | {self.new}"

    @property
    def name(self):
        """A hash of the mutated file: any change of the file makes another mutant."""
        return hashlib.sha256(self.source.encode()).hexdigest()[:16]


# ---------------------------------------------------------------------------------------- mutants


def mutants_of(file, functions=None):
    """The mutants of a file, or of some of its functions, in the order of its lines."""
    import libcst
    from libcst.metadata import MetadataWrapper, ParentNodeProvider, PositionProvider
    from mutmut.mutation.mutators import mutation_operators, operator_string

    text = (ROOT / file).read_text()
    wrapper = MetadataWrapper(libcst.parse_module(text))
    parents = wrapper.resolve(ParentNodeProvider)
    positions = wrapper.resolve(PositionProvider)
    seen, found = {text}, []

    def changes(node):
        """What the operators make of a node; a call whose result is not used may also be left out."""
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

    # The code of each statement of the module: only the one with the change is built anew.
    module = wrapper.module
    codes = [module.code_for_node(statement) for statement in module.body]
    start = text.index("".join(codes))
    for index, statement in enumerate(module.body):
        before = text[: start + len("".join(codes[:index]))]
        after = text[len(before) + len(codes[index]) :]
        for node, changed in _changes_in(statement, parents, functions, changes):
            source = before + module.code_for_node(statement.deep_replace(node, changed)) + after
            function = _place(node, parents)
            old, new = _changed_lines(text, source)
            if source not in seen and CHECKS.sub("", old) != CHECKS.sub("", new):
                seen.add(source)
                found.append(Mutant(file, function, positions[node].start.line, old, new, source))
    return sorted(found, key=lambda mutant: mutant.line)


def _changes_in(statement, parents, functions, changes):
    """Yields (node, what to put there) for the mutants of a statement of a module."""
    for node in _walk(statement):
        function = _place(node, parents)
        if function is None or (functions and function not in functions):
            continue
        for changed in changes(node):
            yield node, changed


def _walk(node):
    yield node
    for child in node.children:
        yield from _walk(child)


def _place(node, parents):
    """The function that a node is in, "" for a constant; None where mutants make no sense.

    These are texts for people (strings with a space, formatted strings, docstrings, what `raise` or
    `print` show), annotations, decorators, imports, and the body of a class outside its methods.
    """
    import libcst

    if isinstance(node, libcst.SimpleString) and (" " in node.value or '"""' in node.value):
        return None
    names, parent = [], node
    while parent is not None:
        if isinstance(parent, libcst.FormattedString | libcst.Annotation | libcst.Decorator):
            return None
        if isinstance(parent, libcst.Raise | libcst.Import | libcst.ImportFrom):
            return None
        if isinstance(parent, libcst.Call):
            called = getattr(parent.func, "attr", parent.func)
            if getattr(called, "value", None) in ("print", "notice", "UserError", "RunFailed"):
                return None
        if isinstance(parent, libcst.FunctionDef | libcst.ClassDef):
            names.append(parent)
        parent = parents.get(parent)
    names.reverse()
    for depth, place in enumerate(names):
        if isinstance(place, libcst.FunctionDef):
            return ".".join(part.name.value for part in names[: depth + 1])
    return None if names or isinstance(node, libcst.If | libcst.Expr) else ""


def _changed_lines(text, source):
    """The lines that differ between two sources, each side as one line."""
    old, new = text.splitlines(), source.splitlines()
    while old and new and old[0] == new[0]:
        del old[0], new[0]
    while old and new and old[-1] == new[-1]:
        del old[-1], new[-1]
    return tuple(" ".join(line.strip() for line in lines) for lines in (old, new))


# ------------------------------------------------------------------------- pytest, collected once


class Driver:
    """A plugin of pytest: judges mutants instead of running the tests."""

    def __init__(self, mutants, deadline, keep, slowest):
        self.mutants, self._deadline, self._keep = mutants, deadline, keep
        self._slowest = slowest
        self.verdicts, self.left_out = {}, 0
        self._durations, self._callers = {}, {}

    def pytest_runtestloop(self, session):
        """Runs all unit tests once, then those that call a mutated function, for each mutant."""
        self._items = {item.nodeid: item for item in session.items}
        scripts = {Path(mutant.file) for mutant in self.mutants if "scripts/" in mutant.file}
        for script in scripts:
            sys.modules["harness.launches"].load_script(
                script.stem
            )  # once, and not in each process
        self._base = session.config._tmp_path_factory.getbasetemp()
        # A forked process must not write to the terminal.
        session.config.pluginmanager.unregister(name="terminalreporter")
        self._terminal = os.dup(2)
        gc.collect()
        gc.freeze()  # or each forked process copies all that the collector looks at
        self._find_callers()
        self._show(f"{len(self._durations)} unit tests, {len(self.mutants)} mutants\n")
        running = {}  # read end of a pipe -> (mutant, pid, when to give up)
        waiting = list(self.mutants)
        while waiting or running:
            while waiting and len(running) < JOBS:
                mutant = waiting.pop(0)
                if time.time() > self._deadline:
                    self.left_out += 1
                    continue
                tests = self._tests_of(mutant)
                if not tests:
                    self._judge(mutant, "not reached")
                    continue
                limit = 10 + 10 * sum(self._durations[test] for test in tests)
                reader, pid = self._fork(lambda m=mutant, t=tests: self._run(t, m))
                running[reader] = (mutant, pid, time.monotonic() + limit)
            if running:
                self._collect(running)
        return True

    def _collect(self, running):
        ready, _, _ = select.select(list(running), [], [], 0.5)
        for reader, (mutant, pid, limit) in list(running.items()):
            late = time.monotonic() > limit
            if reader not in ready and not late:
                continue
            answer = os.read(reader, 65536).decode() if reader in ready else "takes too long"
            _end(pid, reader)
            del running[reader]
            self._judge(mutant, answer or "the process died")

    def _judge(self, mutant, verdict):
        self.verdicts[mutant.key] = verdict
        self._keep(mutant, verdict)
        self._show("S" if survived(verdict) else ".")

    def _show(self, text):
        os.write(self._terminal, text.encode())

    def _fork(self, function):
        """Calls `function()` in a new process; its result, a text, comes through the pipe."""
        reader, writer = os.pipe()
        pid = os.fork()
        if pid:
            os.close(writer)
            return reader, pid
        os.setpgid(0, 0)
        quiet = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(quiet, descriptor)
        try:
            answer = function()
        except BaseException as error:
            answer = f"error: {error!r}"
        os.write(writer, answer.encode())
        os._exit(0)

    def _run(self, tests, mutant):
        """In a forked process: the first of the tests that fails, or "survived"."""
        folder = self._base / f"mutant-{os.getpid()}"
        folder.mkdir()
        first = self._items[tests[0]]
        first.config._tmp_path_factory._basetemp = folder
        try:
            try:
                install(mutant)
            except Exception as error:
                return f"import: {error!r}"
            for test in tests:
                item = self._items[test]
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
                if item.session.testsfailed:
                    return test
            return "survived"
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _tests_of(self, mutant):
        """The tests that call a function, or for a constant anything in its file; quickest first."""
        places = [mutant.function] if mutant.function else list(self._callers.get(mutant.file, {}))
        functions = self._callers.get(mutant.file, {})
        tests = set().union(*(functions.get(place, ()) for place in places))
        return sorted(tests, key=self._durations.get)

    def _find_callers(self):
        """Runs every test in a process of its own, and notes which functions it calls."""
        files = {str(ROOT / mutant.file): mutant.file for mutant in self.mutants}
        waiting, running = list(self._items.items()), {}
        while waiting or running:
            while waiting and len(running) < JOBS:
                test, item = waiting.pop(0)
                reader, pid = self._fork(lambda i=item: json.dumps(self._trace(i, files)))
                running[reader] = (test, pid, time.monotonic() + 5 + self._slowest, [])
            ready, _, _ = select.select(list(running), [], [], 0.5)
            for reader, (test, pid, limit, parts) in list(running.items()):
                part = os.read(reader, 65536) if reader in ready else None
                if part:
                    parts.append(part)
                elif part is not None or time.monotonic() > limit:
                    _end(pid, reader)
                    del running[reader]
                    self._note(test, b"".join(parts))

    def _note(self, test, answer):
        """Keeps what a test calls, if it is a unit test that passes."""
        try:
            seconds, passed, called = json.loads(answer)
        except ValueError:  # it died, or took too long
            return
        if passed and seconds <= self._slowest:
            self._durations[test] = seconds
            for file, function in called:
                self._callers.setdefault(file, {}).setdefault(function, set()).add(test)

    def _trace(self, item, files):
        called = set()

        def trace(frame, *_):  # called for each Python function; None: not for its lines
            if frame.f_code.co_filename in files:
                name = frame.f_code.co_qualname.partition(".<locals>")[0]
                called.add((files[frame.f_code.co_filename], name))

        folder = self._base / f"mutant-{os.getpid()}"
        folder.mkdir()
        item.config._tmp_path_factory._basetemp = folder
        outcomes = []
        item.config.pluginmanager.register(_Reports(outcomes))
        start_time = time.perf_counter()
        threading.settrace(trace)
        sys.settrace(trace)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        sys.settrace(None)
        seconds = time.perf_counter() - start_time
        shutil.rmtree(folder, ignore_errors=True)
        return seconds, "passed" in outcomes and "failed" not in outcomes, sorted(called)


class _Reports:
    def __init__(self, outcomes):
        self._outcomes = outcomes

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            self._outcomes.append(report.outcome)


def _end(pid, reader):
    os.close(reader)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


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


def judge(mutants, deadline, keep=lambda *_: None, tests=(), slowest=SLOWEST):
    """Runs the unit tests on mutants.

    Args:
        deadline (float): seconds since 1970, after which no mutant is begun.
        keep (Callable): called with each mutant and its verdict.
        tests (list): what pytest collects; empty: all tests.
        slowest (float): seconds that a unit test may take.

    Returns:
        tuple[dict, int]: key -> the test that noticed the mutant, "survived" or "not reached" (no
        unit test calls the function); how many mutants were left out.
    """
    if not mutants:
        return {}, 0
    import pytest
    import torch

    sys.path.insert(0, str(ROOT / "tests"))
    os.chdir(ROOT)
    torch.set_num_threads(1)  # a forked process must not wait for threads that it does not have
    os.environ.update(WARM_SERVER="none", HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    driver = Driver(mutants, deadline, keep, slowest)
    with tempfile.TemporaryDirectory() as home:
        os.environ["HF_HOME"] = home
        from harness import warm

        def skip(*_, **__):
            pytest.skip("starts processes")

        warm.run = warm.Program = skip
        words = ["-q", "-o", "addopts=", "-p", "no:cacheprovider", "-p", "no:xdist"]
        words += ["-m", "not slow and not gpu", "--basetemp", f"{home}/tmp"]
        chosen = list(tests) or [str(ROOT / "tests" / room) for room in ROOMS]
        code = pytest.main([*words, *chosen], plugins=[driver])
    print()
    if code not in (0, 5) or (mutants and not driver.verdicts and not driver.left_out):
        raise SystemExit("the tests were not collected")
    return driver.verdicts, driver.left_out


def modules():
    """What is mutated: the modules of `utils`, and the functions of scripts that units test."""
    files = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "utils").rglob("*.py"))]
    return [file for file in files if file not in LAUNCHED and not file.endswith("__init__.py")] + (
        FUNCTIONS
    )


def by_hash(mutants):
    """The mutants in an order that does not depend on where they stand."""
    return sorted(mutants, key=lambda mutant: hashlib.sha256(mutant.key.encode()).digest())


def survived(verdict):
    return verdict in ("survived", "not reached")


def select_mutants(words):
    """The mutants of files, or of functions of a file after `::`, separated by commas."""
    chosen = []
    for word in words:
        file, _, functions = word.partition("::")
        chosen += mutants_of(file, functions.split(",") if functions else None)
    return chosen


def tests_hash():
    digest = hashlib.sha256()
    for path in sorted((ROOT / "tests").rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def recent_mutants(count):
    """For each module that the last ten commits and the working tree changed, the mutants of the
    lines that changed, filled up with others to `count`. Nothing where there is no history.
    """

    def git(*words):
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
        return done.stdout if done.returncode == 0 else ""

    before = max(0, min(10, int(git("rev-list", "--first-parent", "--count", "HEAD") or 0) - 1))
    chosen = []
    for word in modules():
        lines = set()
        for row in git("diff", "-U0", f"HEAD~{before}", "--", word.partition("::")[0]).splitlines():
            if row.startswith("@@"):
                first, _, length = row.split("+")[1].split(" ")[0].partition(",")
                lines |= set(range(int(first), int(first) + int(length or 1)))
        if lines:
            mutants = by_hash(select_mutants([word]))
            mutants.sort(key=lambda mutant: mutant.line not in lines)
            changed = sum(mutant.line in lines for mutant in mutants)
            chosen += mutants[: max(count, min(changed, 3 * count))] if changed else []
    return chosen


def tests_that_name(modules):
    """The files of tests that name one of these modules: to collect all would take minutes."""
    words = re.compile(rf"\b({'|'.join(modules)})\b")
    files = [path for room in ROOMS for path in sorted((ROOT / "tests" / room).glob("*.py"))]
    return [str(path) for path in files if words.search(path.read_text())]


def scores():
    """File -> the score that the table in tests/README.md gives it, from 0 to 1."""
    rows = re.findall(r"^\| `([^`]+)`.*\| (\d+)% \|$", PAGE.read_text(), re.MULTILINE)
    return {file: int(percent) / 100 for file, percent in rows}


def fallen(verdicts):
    """The modules of which the tests notice too small a share of these mutants, one line each."""
    lines, expected = [], scores()
    for file in sorted({mutant.file for mutant in verdicts}):
        own = [verdict for mutant, verdict in verdicts.items() if mutant.file == file]
        share = sum(not survived(verdict) for verdict in own) / len(own)
        if share < expected.get(file, NEW) - ALLOWED:
            lines.append(
                f"{file}: {share:.0%} of {len(own)}, in the table {expected.get(file, NEW):.0%}"
            )
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("modules", nargs="*", metavar="FILE[::FUNCTION,...]")
    parser.add_argument("--recent", type=int, metavar="N", help="N mutants per changed module")
    parser.add_argument("--sample", type=int, metavar="N", help="at most N mutants per module")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="start none after these"
    )
    parser.add_argument("--table", action="store_true", help="the score of each module so far")
    parser.add_argument("--tests", nargs="*", default=[], help="only these tests, for a first look")
    args = parser.parse_args()
    began = time.time()
    deadline = min(began + args.seconds, float(os.environ.pop("BEGIN_UNTIL", "inf")))
    if args.table:
        return print(table())
    if args.recent:
        mutants = recent_mutants(args.recent) if time.time() < deadline else []
        tests = tests_that_name({Path(mutant.file).stem for mutant in mutants})
        verdicts, left_out = judge(mutants, deadline, tests=tests, slowest=SLOWEST_IN_CI)
    else:
        groups = [select_mutants([word]) for word in args.modules or modules()]
        mutants = [mutant for group in groups for mutant in by_hash(group)[: args.sample]]
        verdicts, left_out = judge_and_keep(mutants, deadline, args.tests)
    judged = {mutant: verdicts[mutant.key] for mutant in mutants if mutant.key in verdicts}
    alive = [mutant for mutant, verdict in judged.items() if survived(verdict)]
    for mutant in alive:
        print(
            f"\n{mutant.file}:{mutant.line} in {mutant.function or 'the module'}, "
            f"{judged[mutant]}\n- {mutant.old}\n+ {mutant.new}"
        )
    print(
        f"\n{len(judged)} mutants, {len(alive)} survived, {left_out} left out, in "
        f"{time.time() - began:.0f} s"
    )
    lines = fallen(judged) if args.recent else []
    if lines:
        print("\nthe tests notice fewer than the table in tests/README.md says:", *lines, sep="\n")
    return bool(lines)


def judge_and_keep(mutants, deadline, tests):
    """Judges the mutants that have no verdict yet, and keeps each verdict as soon as it is known."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    kept, now = {file: kept_verdicts(file) for file in {m.file for m in mutants}}, tests_hash()
    known, rest = {}, []
    for mutant in mutants:
        entry = kept[mutant.file].get(mutant.name)
        if entry and (not survived(entry["verdict"]) or entry["tests"] == now):
            known[mutant.key] = entry["verdict"]
        else:
            rest.append(mutant)

    def keep(mutant, verdict):
        kept[mutant.file][mutant.name] = {"verdict": verdict, "tests": now}
        results_of(mutant.file).write_text(json.dumps(kept[mutant.file], indent=1))

    found, left_out = judge(rest, deadline, keep, tests)
    return known | found, left_out


def results_of(file):
    return RESULTS / f"{file.replace('/', '.')}.json"


def kept_verdicts(file):
    """Name of a mutant -> its verdict, and the hash of the tests that gave it."""
    return json.loads(results_of(file).read_text()) if results_of(file).exists() else {}


def table():
    """The table of tests/README.md."""
    lines = ["| module | mutants | score |", "|---|---|---|"]
    for word in modules():
        kept = kept_verdicts(word.partition("::")[0])
        judged = [mutant for mutant in select_mutants([word]) if mutant.name in kept]
        noticed = sum(not survived(kept[mutant.name]["verdict"]) for mutant in judged)
        name = word.replace("::", "`: `").replace(",", "`, `")
        if judged:
            lines.append(f"| `{name}` | {len(judged)} | {noticed / len(judged):.0%} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
