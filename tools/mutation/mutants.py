"""Mutants of the source: one operator, number, name or condition changed at a place drawn at random.

`run` tries them against the tests.
"""

from __future__ import annotations

import ast
import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

__all__ = ["Mutant", "draw"]

OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.And: ast.Or, ast.Or: ast.And, ast.In: ast.NotIn, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.USub: ast.UAdd,
}  # fmt: skip
NAMES = {
    "min": "max", "max": "min", "amin": "amax", "amax": "amin", "sum": "mean", "mean": "sum", "exp": "log",
    "clamp_min": "clamp_max", "clamp_max": "clamp_min", "minimum": "maximum", "maximum": "minimum",
    "argmax": "argmin", "argmin": "argmax",
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One change of one file.

    Args:
        file: below ``src``.
        index: of the place among all of the file.
    """

    file: Path
    index: int

    @cached_property
    def _made(self) -> tuple[ast.Module, range, str]:
        tree = copy.deepcopy(_parsed(self.file))
        node, what = places(tree)[self.index]
        lines, how = _lines(node), change(node, what)
        return ast.fix_missing_locations(tree), lines, how

    @property
    def tree(self) -> ast.Module:
        """The changed file."""
        return self._made[0]

    @property
    def line(self) -> int:
        """Where it was changed."""
        return self._made[1].start

    @property
    def lines(self) -> range:
        """All lines of what was changed; a test that reaches one of them meets the change."""
        return self._made[1]

    @property
    def module(self) -> str:
        """Name under which the file is imported."""
        parts = self.file.with_suffix("").parts
        return ".".join(parts[parts.index("src") + 1 :]).removesuffix(".__init__")

    @property
    def name(self) -> str:
        """File, line, number of the place in the file, and what was done; no other mutant has it."""
        return f"{self.file.as_posix()}:{self.line} [{self.index}] {self._made[2]}"

    @property
    def function(self) -> int | None:
        """First line of the outermost function whose body was changed; None for what runs at import."""
        return _function(_parsed(self.file), places(_parsed(self.file))[self.index][0])


def draw(package: Path, count: int, seed: int) -> list[Mutant]:
    """Different mutants of a file or folder, in random order."""
    files = sorted(package.rglob("*.py")) if package.is_dir() else [package]
    found = [Mutant(file, i) for file in files for i in range(len(places(_parsed(file))))]
    random.Random(seed).shuffle(found)
    return found[:count]


@cache
def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _function(tree: ast.AST, node: ast.AST) -> int | None:
    """Functions of modules and classes; those inside of functions belong to the outer one."""
    for part in ast.iter_child_nodes(tree):
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
            if any(node is inner for statement in part.body for inner in ast.walk(statement)):
                return min([part.lineno, *(d.lineno for d in part.decorator_list)])
        elif (found := _function(part, node)) is not None:
            return found
    return None


def _lines(node: Any) -> range:
    """Of a condition, not of what it decides about."""
    last = node.test if isinstance(node, ast.If | ast.IfExp) else node
    return range(node.lineno, last.end_lineno + 1)


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
