"""Which data sets choices may be made on, and how often the others were looked at.

``protocol.json`` was committed before the sets were scored. Choices (forms, priors, constants) are made on
the *development* sets, by left-out families. *Report* sets are scored by a command of their own, which writes
a line into ``looks.jsonl``: when, at which commit, which sets and methods. Both files are part of the
repository, and every table says how often its report sets were looked at.
"""

from __future__ import annotations

import datetime
import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["LOOKS", "Protocol", "count_looks", "log_look", "read_protocol"]

HERE = Path(__file__).parent
LOOKS = HERE / "looks.jsonl"


@dataclass(frozen=True)
class Protocol:
    """What was said beforehand.

    Args:
        development: sets on which choices may be made.
        report: sets that are only reported.
        strong: sets whose network is well trained; the others are weak on purpose or by nature.
        seeds: draws of every set.
        in_sight: what was known of a report set beforehand.
    """

    development: tuple[str, ...]
    report: tuple[str, ...]
    strong: tuple[str, ...]
    seeds: tuple[int, ...]
    in_sight: Mapping[str, str]

    @property
    def sets(self) -> tuple[str, ...]:
        """Every set."""
        return (*self.development, *self.report)


def read_protocol(path: Path = HERE / "protocol.json") -> Protocol:
    """The protocol as committed.

    Example:
        >>> sorted(set(read_protocol().development) & set(read_protocol().report))
        []
    """
    found = json.loads(path.read_text(encoding="utf-8"))
    lists = {key: tuple(found[key]) for key in ("development", "report", "strong", "seeds")}
    return Protocol(**lists, in_sight=found["in_sight"])


def log_look(sets: Sequence[str], methods: Sequence[str], path: Path = LOOKS) -> dict[str, Any]:
    """Write down that report sets are about to be scored.

    Args:
        sets: which.
        methods: by which methods.
        path: of the log.

    Returns:
        The line written; ``changed`` says whether files differed from the commit.
    """
    commit, changed = _commit(path.parent)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    look = {"time": now, "commit": commit, "changed": changed, "sets": [*sets], "methods": [*methods]}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(look) + "\n")
    return look


def count_looks(path: Path = LOOKS, method: str | None = None) -> dict[str, int]:
    """How often each report set was scored, by any method or by this one.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     log = Path(folder, "looks.jsonl")
        ...     _ = log_look(["a"], ["temperature"], log), log_look(["a", "b"], ["temperature"], log)
        ...     count_looks(log), count_looks(log, "layer evidence")
        ({'a': 2, 'b': 1}, {})
    """
    counts: dict[str, int] = {}
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    for look in map(json.loads, lines):
        for name in look["sets"] if method is None or method in look["methods"] else ():
            counts[name] = counts.get(name, 0) + 1
    return counts


def _commit(folder: Path) -> tuple[str | None, bool | None]:
    """The commit the code is at, and whether files were changed since; None outside a repository."""

    def ask(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        return ask("rev-parse", "HEAD"), bool(ask("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.CalledProcessError):
        return None, None
