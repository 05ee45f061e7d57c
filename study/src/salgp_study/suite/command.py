"""The commands of the shift suite.

features   train the networks and write their features (hours on two cores; resumable)
score      score methods on the development sets (resumable)
look       score methods on the report sets; counted in looks.jsonl
tables     write the tables from the records; a page of more results is not replaced
keep       write the records into the archive of the repository
readme     write README's table from the archive
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from salgp_study.store import read_archive
from salgp_study.suite.archive import ARCHIVE, fill_readme, keep_records
from salgp_study.suite.cache import case_folder, is_complete, write_case
from salgp_study.suite.protocol import log_look, read_protocol
from salgp_study.suite.report import write_report
from salgp_study.suite.running import method_names, read_records, run_methods
from salgp_study.suite.scoring import Record
from salgp_study.suite.sets import SETS, Build
from salgp_study.suite.summary import Results

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> None:
    """Run one command."""
    options = _parser().parse_args(arguments)
    torch.set_num_threads(options.threads)
    run: Callable[[argparse.Namespace], None] = options.run
    try:
        run(options)
    except (FileNotFoundError, KeyError, ValueError) as error:
        sys.exit(f"salgp_study.suite: {error.args[0] if error.args else error}")


def _features(options: argparse.Namespace) -> None:
    for seed in options.seeds:
        for name in options.sets or read_protocol().sets:
            if not is_complete(case_folder(options.cache, name, seed)):
                write_case(_build(name)(seed, options.data, options.cache), options.cache)


def _score(options: argparse.Namespace) -> None:
    protocol = read_protocol()
    sets = options.sets or protocol.development
    reported = [name for name in sets if name in protocol.report]
    if reported:
        raise ValueError(f"{reported[0]} is a report set: score it with `look`, which counts")
    run_methods(options.cache, sets, options.seeds, method_names(options.methods), fresh=options.fresh)


def _look(options: argparse.Namespace) -> None:
    sets = options.sets or read_protocol().report
    methods = method_names(options.methods)
    look = log_look(sets, methods)
    print(f"a look at {', '.join(sets)}, commit {look['commit']}, files changed since: {look['changed']}")
    run_methods(options.cache, sets, options.seeds, methods, fresh=options.fresh)


def _tables(options: argparse.Namespace) -> None:
    protocol = read_protocol()
    sets = options.sets or protocol.sets
    records = read_archive(options.records) if options.records else _scored(options)
    scored = {record["set"] for record in records}
    for name in [name for name in sets if name not in scored]:
        how = "look" if name in protocol.report else "score"
        print(f"{name}: not in the tables, as it has no records; `{how}` makes them", file=sys.stderr)
    print(write_report(records, options.out))


def _keep(options: argparse.Namespace) -> None:
    print(keep_records(_scored(options), options.records))


def _readme(options: argparse.Namespace) -> None:
    fill_readme(options.readme, Results(read_archive(options.records)))


def _scored(options: argparse.Namespace) -> list[Record]:
    records = read_records(options.cache, options.sets or read_protocol().sets, options.seeds)
    if not records:
        raise FileNotFoundError(f"{options.cache}: no records here; run `score` or `look` first")
    return records


def _build(name: str) -> Build:
    if name not in SETS:
        raise KeyError(f"no data set called {name!r}; known: {', '.join(SETS)}")
    return SETS[name]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m salgp_study.suite",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True)
    features = _command(commands, "features", _features)
    features.add_argument("--data", type=Path, help="folder of the real data; default: SALGP_DATA")
    for name, run in (("score", _score), ("look", _look)):
        command = _command(commands, name, run)
        command.add_argument("--methods", nargs="+", default=["ours", "baselines"], help="names or groups")
        command.add_argument("--fresh", action="store_true", help="score again what has records")
    tables = _command(commands, "tables", _tables)
    tables.add_argument("--out", type=Path, help="page to write, such as docs/research/shift-results.md")
    tables.add_argument("--records", type=Path, help=f"archive to read instead of a cache, such as {ARCHIVE}")
    keep, readme = _command(commands, "keep", _keep), _command(commands, "readme", _readme)
    for command in (keep, readme):
        command.add_argument("--records", type=Path, default=ARCHIVE, help="the archive")
    readme.add_argument("--readme", type=Path, default=Path("README.md"), help="page with the two comments")
    return parser


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Callable[[argparse.Namespace], None],
) -> argparse.ArgumentParser:
    command = commands.add_parser(name)
    command.set_defaults(run=run)
    command.add_argument("--cache", type=Path, default=Path(".cache/shift"), help="features and records")
    command.add_argument("--sets", nargs="+", help="data sets; default: those the protocol names")
    command.add_argument("--seeds", nargs="+", type=int, default=list(read_protocol().seeds))
    command.add_argument("--threads", type=int, default=1)
    return command
