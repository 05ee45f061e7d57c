"""``salgp study``: added to the command line of salgp by an entry point of this distribution."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from salgp.cli import main
from salgp_study.cli import register

ENTRY = '[project.entry-points."salgp.commands"]\nstudy = "salgp_study.cli:register"\n'


@pytest.fixture
def app() -> typer.Typer:
    made = typer.Typer()
    register(made)
    made.command("other")(lambda: None)
    return made


def test_the_distribution_announces_its_command() -> None:
    assert ENTRY in (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")


def test_studies_are_listed(app: typer.Typer) -> None:
    found = CliRunner().invoke(app, ["study", "list", "--json"])
    assert found.exit_code == 0
    assert "mstar-convnet" in json.loads(found.output)["studies"]


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("study run nothing -o out --preset smoke", "nothing"),
        ("study table .", "records"),
        ("study run mstar-convnet --seeds one -o out", "--seeds one"),
    ],
)
def test_what_is_wrong_is_named(
    line: str,
    word: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(line.split()) != 0
    assert word in capsys.readouterr().err
