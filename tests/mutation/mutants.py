"""Mutants of the source: does a test fail when the code is wrong?

``python tests/mutation/mutants.py src/salgp/metrics tests/metrics --count 40 --seed 0`` draws some places in
the files of a package, changes one operator, number or condition at each, and runs the given tests until the
first failure. A mutant that no test notices *survives* and is listed with its line. Every mutant runs in a
process forked from one that has the heavy libraries loaded; nothing is written to the source.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import importlib.abc
import importlib.util
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.And: ast.Or, ast.Or: ast.And, ast.In: ast.NotIn, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.USub: ast.UAdd,
}  # fmt: skip
NAMES = {
    "min": "max",
    "max": "min",
    "amin": "amax",
    "amax": "amin",
    "sum": "mean",
    "mean": "sum",
    "exp": "log",
}


def places(tree: ast.Module) -> list[tuple[ast.AST, str]]:
    """Nodes that can be changed, with what would be done; docstrings, types and messages are left out."""
    found: list[tuple[ast.AST, str]] = []
    for node in _code(tree):
        if isinstance(node, ast.BinOp | ast.UnaryOp | ast.BoolOp) and type(node.op) in OPERATORS:
            found.append((node, "operator"))
        elif isinstance(node, ast.Compare) and type(node.ops[0]) in OPERATORS:
            found.append((node, "comparison"))
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
            found.append((node, "constant"))
        elif isinstance(node, ast.Attribute) and node.attr in NAMES and isinstance(node.ctx, ast.Load):
            found.append((node, "name"))
        elif isinstance(node, ast.If | ast.IfExp):
            found.append((node, "condition"))
    return found


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but annotations, raised messages and the module's own constants for documentation."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params") or isinstance(node, ast.Raise):
            continue
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, ast.AST):
                yield part
                yield from _code(part)


def change(node: Any, what: str) -> str:
    """Change a node in place; says how."""
    if what == "operator":
        before, node.op = node.op, OPERATORS[type(node.op)]()
        return f"{type(before).__name__} -> {type(node.op).__name__}"
    if what == "comparison":
        before, node.ops[0] = node.ops[0], OPERATORS[type(node.ops[0])]()
        return f"{type(before).__name__} -> {type(node.ops[0]).__name__}"
    if what == "constant":
        before = node.value
        node.value = (
            (not before) if isinstance(before, bool) else before + 1 if before in (0, 1) else before * 2
        )
        return f"{before} -> {node.value}"
    if what == "name":
        before, node.attr = node.attr, NAMES[node.attr]
        return f"{before} -> {node.attr}"
    node.test = ast.UnaryOp(ast.Not(), node.test)
    return "condition negated"


class Mutated(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from a changed syntax tree."""

    def __init__(self, name: str, path: Path, tree: ast.Module) -> None:
        self.name, self.path, self.tree = name, path, tree

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """This loader for the one module, nothing for others."""
        if name != self.name:
            return None
        search = [str(self.path.parent)] if self.path.name == "__init__.py" else None
        return importlib.util.spec_from_file_location(
            name, self.path, loader=self, submodule_search_locations=search
        )

    def create_module(self, spec: Any) -> None:
        """The default module object."""

    def exec_module(self, module: Any) -> None:
        """Run the changed code."""
        exec(compile(self.tree, str(self.path), "exec"), module.__dict__)


def survives(name: str, path: Path, tree: ast.Module, tests: list[str], seconds: float) -> bool | None:
    """Do all tests pass with the mutant? None where they took too long, which counts as noticed."""
    child = os.fork()
    if child == 0:
        sys.meta_path.insert(0, Mutated(name, path, tree))
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        import pytest

        code: int = 1
        with contextlib.suppress(BaseException):
            code = int(pytest.main(["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", *tests]))
        os._exit(0 if code == 0 else 1)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def main() -> None:
    """Draw mutants, run tests, list survivors."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("package", type=Path, help="file or folder below src")
    parser.add_argument("tests", nargs="+", help="tests that should notice")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=600.0, help="stop drawing after so long")
    asked = parser.parse_args()
    for heavy in (
        "torch",
        "sklearn.base",
        "scipy.optimize",
        "scipy.stats",
        "pytest",
        "safetensors",
    ):
        importlib.import_module(heavy)
    files = sorted(asked.package.rglob("*.py")) if asked.package.is_dir() else [asked.package]
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in files}
    drawn = [(file, i) for file, tree in trees.items() for i in range(len(places(tree)))]
    random.Random(asked.seed).shuffle(drawn)
    if survives("none", files[0], trees[files[0]], asked.tests, asked.seconds) is not True:
        raise SystemExit("the tests do not pass without a mutant")
    start, killed, alive = time.monotonic(), 0, []
    for file, index in drawn[: asked.count]:
        if time.monotonic() - start > asked.seconds:
            break
        tree = copy.deepcopy(trees[file])
        node, what = places(tree)[index]
        line, how = getattr(node, "lineno", 0), change(node, what)
        name = ".".join(file.with_suffix("").parts[file.parts.index("src") + 1 :]).removesuffix(".__init__")
        if survives(name, file, ast.fix_missing_locations(tree), asked.tests, 120.0):
            alive.append(f"{file}:{line} {how}")
            print(f"survived: {alive[-1]}", flush=True)
        else:
            killed += 1
    total = killed + len(alive)
    print(json.dumps({"package": str(asked.package), "mutants": total, "killed": killed, "seed": asked.seed}))


if __name__ == "__main__":
    main()
