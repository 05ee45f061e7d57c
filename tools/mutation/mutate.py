"""Does a test fail when the code is wrong?

``python tools/mutation/mutate.py src/salgp/metrics tests/metrics --count 40`` first runs the tests and
notes which of them reach which line. Then each mutant lives in a process forked from one that has everything
imported and collected: the code of one function is exchanged, the tests that reach the line run until the
first failure. What runs at import (constants, defaults) is imported anew, with all tests that reach the file.
A mutant that no test notices *survives* and is listed. One that takes four times as long is killed, and
counts as noticed. Nothing is written to the source. With ``--out FILE`` a second call tries only what was
not killed yet.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.abc
import importlib.util
import json
import os
import resource
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from mutants import Mutant, draw

HEAVY = (
    "torch",
    "sklearn.base",
    "sklearn.isotonic",
    "scipy.optimize",
    "scipy.stats",
    "safetensors",
)
"""Imported once, before any fork."""

Reached = dict[str, dict[str, Any]]
"""Test -> its seconds and the places it reaches, as ``file:line``."""


class Mutated(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from a changed syntax tree."""

    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """This loader for the one module, nothing for others."""
        if name != self.mutant.module:
            return None
        file = self.mutant.file
        search = [str(file.parent)] if file.name == "__init__.py" else None
        return importlib.util.spec_from_file_location(
            name, file, loader=self, submodule_search_locations=search
        )

    def create_module(self, spec: Any) -> None:
        """The default module object."""

    def exec_module(self, module: Any) -> None:
        """Run the changed code."""
        exec(compile(self.mutant.tree, str(self.mutant.file), "exec"), module.__dict__)


class Loop:
    """Takes the place of pytest's loop: notes what each test reaches, then tries the mutants.

    Args:
        package: whose lines are noted.
        mutants: of functions.
        tell: is given each mutant and whether it survived.
    """

    def __init__(self, package: Path, mutants: Sequence[Mutant], tell: Callable[[Mutant, str], None]) -> None:
        self.package, self.mutants, self.tell = package, mutants, tell
        self.reached: Reached = {}

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Called once everything is collected."""
        self.reached = json.loads(in_child(lambda: json.dumps(self._baseline(session)))[1] or "{}")
        if not self.reached:
            raise pytest.UsageError("the tests do not pass without a mutant")
        functions = _functions(self.package)
        for mutant in self.mutants:
            live = functions.get((str(mutant.file.resolve()), mutant.function or 0), [])
            items = self._items(session, {f"{mutant.file.resolve()}:{line}" for line in mutant.lines})
            if not live or not items:
                self.tell(mutant, "not reached")
                continue
            compile(mutant.tree, str(mutant.file), "exec")  # a mutant that is no Python is a bug of ours
            seconds = 5 + 4 * sum(self.reached[item.nodeid]["seconds"] for item in items)
            code, _ = in_child(lambda m=mutant, f=live, i=items: _try(m, f, i), seconds)
            self.tell(mutant, "survived" if code == 0 else "killed")
        return True

    def _items(self, session: pytest.Session, places: set[str]) -> list[pytest.Item]:
        """Tests that reach one of some places, quick ones first, those of a file together."""
        found = [
            item
            for item in session.items
            if not places.isdisjoint(self.reached.get(item.nodeid, {}).get("places", ()))
        ]
        seconds = {item: self.reached[item.nodeid]["seconds"] for item in found}
        first: dict[Path, float] = {}
        for item in found:
            first[item.path] = min(first.get(item.path, 1e9), seconds[item])
        return sorted(found, key=lambda item: (first[item.path], str(item.path), seconds[item]))

    def _baseline(self, session: pytest.Session) -> Reached:
        """Run all tests, noting seconds and lines; nothing where one fails."""
        found: Reached = {}
        root = str(self.package.resolve())
        for item, following in zip(session.items, [*session.items[1:], None], strict=True):
            places: set[str] = set()
            start = time.process_time()
            tracer = _tracer(root, places)
            threading.settrace(tracer)  # of threads that the test starts
            sys.settrace(tracer)
            try:
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            finally:
                sys.settrace(None)
                threading.settrace(None)  # type: ignore[arg-type]
            found[item.nodeid] = {"seconds": time.process_time() - start, "places": sorted(places)}
            if session.testsfailed:
                print(f"fails without a mutant: {item.nodeid}", file=sys.__stderr__)
                return {}
        return found


def in_child(work: Callable[[], Any], seconds: float = 3600.0) -> tuple[int, str]:
    """Do something in a forked process; its exit code and what it gave as text.

    Args:
        work: gives text, or an exit code.
        seconds: of processor time after which it is killed; of the clock, six times as many and two minutes.
    """
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(out)
        os.setpgid(0, 0)
        resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 2))
        signal.alarm(int(120 + 6 * seconds))  # one that waits for ever uses no processor
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        code: Any = 1
        try:
            code = work()
            if isinstance(code, str):
                with os.fdopen(into, "w") as file:
                    file.write(code)
                code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(into)
    with os.fdopen(out) as file:
        text = file.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # processes it started and left
    return code, text


def _try(mutant: Mutant, functions: Sequence[types.FunctionType], items: Sequence[pytest.Item]) -> int:
    """Exchange the code of a function and run tests; 1 at the first failure."""
    code = _code_of(compile(mutant.tree, str(mutant.file), "exec"), mutant.function or 0)
    for function in functions:
        function.__code__ = code
    session = items[0].session
    for item, following in zip(items, [*items[1:], None], strict=True):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.testsfailed:
            return 1
    return 0


def _code_of(code: types.CodeType, line: int) -> types.CodeType:
    """The outermost function that begins at a line."""
    parts = [part for part in code.co_consts if isinstance(part, types.CodeType)]
    for part in parts:
        if part.co_firstlineno == line and part.co_flags & 0x2:  # has local variables: no class body
            return part
    inside = [part for part in parts if not part.co_flags & 0x2]
    found = [_code_of(part, line) for part in inside if _has(part, line)]
    return found[0]


def _has(code: types.CodeType, line: int) -> bool:
    parts = [part for part in code.co_consts if isinstance(part, types.CodeType)]
    return any(part.co_firstlineno == line or _has(part, line) for part in parts)


def _functions(package: Path) -> dict[tuple[str, int], list[types.FunctionType]]:
    """Live functions of a package by file and first line."""
    root = str(package.resolve())
    found: dict[tuple[str, int], list[types.FunctionType]] = {}
    for function in gc.get_objects():
        if type(function) is types.FunctionType and function.__code__.co_filename.startswith(root):
            code = function.__code__
            found.setdefault((code.co_filename, code.co_firstlineno), []).append(function)
    return found


def _tracer(root: str, places: set[str]) -> Callable[..., Any]:
    def line(frame: types.FrameType, event: str, argument: Any) -> Any:
        places.add(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        return line

    def call(frame: types.FrameType, event: str, argument: Any) -> Any:
        return line if frame.f_code.co_filename.startswith(root) else None

    return call


def imported_anew(mutant: Mutant, tests: Sequence[str], seconds: float) -> str:
    """Try a mutant of what runs at import, in a process that has not imported the package yet."""

    def work() -> int:
        sys.meta_path.insert(0, Mutated(mutant))
        return int(pytest.main([*OPTIONS, "-x", *tests])) != 0

    return "survived" if in_child(work, seconds)[0] == 0 else "killed"


OPTIONS = ["-q", "-m", "not slow", "-p", "no:cacheprovider", "-p", "no:xdist"]


def main() -> None:
    """Draw mutants, run tests, list survivors."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("package", type=Path, help="file or folder below src")
    parser.add_argument("tests", nargs="+", help="tests that should notice")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file of results, one line each")
    asked = parser.parse_args()
    for heavy in HEAVY:
        importlib.import_module(heavy)
    known = {name: how for name, how in _lines(asked.out).items() if how == "killed"}
    fresh = [m for m in draw(asked.package, asked.count, asked.seed) if m.name not in known]
    results = {m.name: known[m.name] for m in draw(asked.package, asked.count, asked.seed) if m.name in known}

    def tell(mutant: Mutant, how: str) -> None:
        results[mutant.name] = how
        print(f"{how}: {mutant.name}", file=sys.__stderr__, flush=True)
        if asked.out:
            with asked.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"mutant": mutant.name, "result": how}) + "\n")

    def functions() -> str:
        told: list[tuple[int, str]] = []
        loop = Loop(
            asked.package,
            [m for m in fresh if m.function is not None],
            lambda m, how: told.append((m.index, how)) or tell(m, how),  # type: ignore[func-returns-value]
        )
        pytest.main([*OPTIONS, *asked.tests], plugins=[loop])
        seconds = sum(one["seconds"] for one in loop.reached.values())
        return json.dumps([seconds, results])

    seconds, found = json.loads(in_child(functions, 1e6)[1])
    results.update(found)
    for mutant in fresh:
        if mutant.function is None:
            tell(mutant, imported_anew(mutant, asked.tests, 20 + 3 * seconds))
    killed = sum(how == "killed" for how in results.values())
    figures = {"package": str(asked.package), "mutants": len(results), "killed": killed, "seed": asked.seed}
    print(json.dumps(figures))


def _lines(path: Path | None) -> dict[str, str]:
    if path is None or not path.is_file():
        return {}
    read = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {line["mutant"]: line["result"] for line in read}


if __name__ == "__main__":
    main()
