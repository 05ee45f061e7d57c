"""Folders: swapped whole, checked when read, and never at the cost of somebody else's files."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from salgp.storage import (
    ChecksumError,
    FormatError,
    RemovedWarning,
    folders,
    read_folder,
    write_folder,
    write_header,
)

KIND = "salgp-test"


GUEST = "salgp-test-guest"


def save(folder: Path, text: str) -> Path:
    def write(part: Path) -> None:
        (part / "a").write_text(text)
        (part / "b").write_text(text * 2)

    return write_folder(folder, write, KIND, [GUEST])


def load(folder: Path) -> tuple[str, str]:
    return read_folder(folder, KIND, lambda part: ((part / "a").read_text(), (part / "b").read_text()))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_is_written_read_and_replaced(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "x"
    assert save(target, "old") == target
    assert load(target) == ("old", "oldold")
    save(target, "new")
    assert load(target) == ("new", "newnew")
    assert names(target) == ["a", "b", "contents.json"]
    assert names(target.parent) == ["x"]
    (tmp_path / "empty").mkdir()
    assert load(save(tmp_path / "empty", "e")) == ("e", "ee")


def test_relative_and_slashed_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for text in ("1", "2"):
        save(Path("x/"), text)
        save(Path("y/../y"), text)
    assert load(tmp_path / "y") == load(tmp_path / "x") == ("2", "22")


def test_a_failed_write_leaves_the_old_folder_and_no_litter(tmp_path: Path) -> None:
    save(tmp_path / "x", "old")

    def fail(part: Path) -> None:
        (part / "a").write_text("half")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        write_folder(tmp_path / "x", fail, KIND)
    assert load(tmp_path / "x") == ("old", "oldold")
    assert names(tmp_path) == ["x"]


@pytest.mark.parametrize("where", ["thesis.tex", "sub/thesis.tex", "contents.json"])
def test_a_foreign_folder_is_never_replaced(tmp_path: Path, where: str) -> None:
    file = tmp_path / "x" / where
    file.parent.mkdir(parents=True)
    file.write_text("years of work")
    with pytest.raises(FileExistsError, match="left alone"):
        save(tmp_path / "x", "new")
    assert file.read_text() == "years of work"
    assert names(tmp_path) == ["x"]


def test_our_folder_with_a_foreign_file_is_left_alone(tmp_path: Path) -> None:
    target = save(tmp_path / "x", "old")
    (target / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"also holds 'notes\.txt', which is no part of it"):
        save(target, "new")
    assert load(target) == ("old", "oldold"), "a foreign file does not hinder reading"
    (target / "notes.txt").unlink()
    (target / "a").unlink()
    (target / "a").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError, match="also holds 'a'"):
        save(target, "new")


def test_a_guest_stays_with_the_same_contents_and_goes_with_others(tmp_path: Path) -> None:
    target = save(tmp_path / "x", "old")
    for name in ("guest.json", "second.json"):
        write_header(target / name, GUEST, 1, {"says": name})
    before = (target / "guest.json").read_bytes()
    save(target, "old")
    assert names(target) == ["a", "b", "contents.json", "guest.json", "second.json"]
    assert (target / "guest.json").read_bytes() == before
    with pytest.warns(
        RemovedWarning, match=r"'guest\.json' and 'second\.json' in .*x belonged to the contents"
    ):
        save(target, "new")
    assert load(target) == ("new", "newnew")
    assert names(target) == ["a", "b", "contents.json"]
    assert names(tmp_path) == ["x"]


def test_a_guest_keeps_its_place_where_the_writing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(part: Path, target: Path) -> None:
        raise OSError("no exchange")

    target = save(tmp_path / "x", "old")
    write_header(target / "guest.json", GUEST, 1, {})
    monkeypatch.setattr(folders, "_swap", fail)
    for text in ("old", "new"):
        with pytest.raises(OSError, match="no exchange"):
            save(target, text)
    assert load(target) == ("old", "oldold")
    assert names(target) == ["a", "b", "contents.json", "guest.json"]
    assert names(tmp_path) == ["x"]


@pytest.mark.parametrize("kind", ["edited", "another", "link"])
def test_what_is_no_whole_guest_is_left_alone(tmp_path: Path, kind: str) -> None:
    target = save(tmp_path / "x", "old")
    path = target / "guest.json"
    write_header(path, "other" if kind == "another" else GUEST, 1, {"limit": 7})
    if kind == "edited":
        path.write_text(path.read_text().replace("7", "8"))
    if kind == "link":
        path.symlink_to(path.rename(tmp_path / "elsewhere.json"))
    for text in ("old", "new"):
        with pytest.raises(FileExistsError, match=r"also holds 'guest\.json'"):
            save(target, text)
    assert path.exists()


def test_a_folder_of_another_kind_is_left_alone(tmp_path: Path) -> None:
    save(tmp_path / "x", "old")
    with pytest.raises(FileExistsError, match="no folder of kind 'other'"):
        write_folder(tmp_path / "x", lambda part: None, "other")
    with pytest.raises(FormatError, match="expected a folder of kind 'other', got 'salgp-test'"):
        read_folder(tmp_path / "x", "other", lambda part: None)


def test_links_and_files_are_no_targets(tmp_path: Path) -> None:
    save(tmp_path / "real", "old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "dangling").symlink_to(tmp_path / "none")
    (tmp_path / "file").write_text("text")
    for name in ("link", "dangling"):
        with pytest.raises(FileExistsError, match="symbolic link"):
            save(tmp_path / name, "new")
    with pytest.raises(FileExistsError, match="is a file"):
        save(tmp_path / "file", "new")
    assert (tmp_path / "link").is_symlink()
    assert load(tmp_path / "link") == ("old", "oldold"), "reading through a link is fine"


def test_damage_is_named(tmp_path: Path) -> None:
    target = save(tmp_path / "x", "old")
    (target / "b").write_text("OLDOLD")
    with pytest.raises(ChecksumError, match="/b is damaged"):
        load(target)
    (target / "b").unlink()
    with pytest.raises(FormatError, match="/b is missing"):
        load(target)
    (target / "contents.json").unlink()
    with pytest.raises(FormatError, match=r"no contents\.json here"):
        load(target)
    with pytest.raises(FileNotFoundError, match="no such folder"):
        load(tmp_path / "none")


@pytest.mark.parametrize("files", [{"../x": "0"}, {"/etc/passwd": "0"}, ["a"], None, {"": "0"}])
def test_a_list_that_points_elsewhere_is_refused(tmp_path: Path, files: object) -> None:
    target = save(tmp_path / "x", "old")
    write_header(target / "contents.json", "salgp-folder", 1, {"kind": KIND, "files": files})
    with pytest.raises(FormatError):
        load(target)


def test_readers_see_the_old_or_the_new_and_nothing_between(tmp_path: Path) -> None:
    target, stop, seen = save(tmp_path / "x", "0"), threading.Event(), set()

    def read() -> None:
        while not stop.is_set():
            a, b = load(target)
            assert b == a * 2
            seen.add(a)

    errors: list[BaseException] = []
    thread = threading.Thread(target=lambda: _caught(read, errors))
    thread.start()
    for i in range(60):
        save(target, str(i))
    stop.set()
    thread.join()
    assert errors == []
    assert len(seen) > 1


def _caught(function: object, errors: list[BaseException]) -> None:
    try:
        function()  # type: ignore[operator]
    except BaseException as error:
        errors.append(error)


KILLED = (
    "import sys; from pathlib import Path; from salgp.storage import write_folder\n"
    "def write(part):\n"
    "    for name in 'ab': (part / name).write_text(text * (1 + (name == 'b')))\n"
    "print('ready', flush=True)\n"
    "for i in range(10**6):\n"
    "    text = str(i); write_folder(sys.argv[1], write, 'salgp-test')\n"
)


def test_killed_writers_leave_a_whole_folder(tmp_path: Path) -> None:
    target = save(tmp_path / "x", "0")
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(target)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    for _ in range(20):
        a, b = load(target)
        assert b == a * 2
    process.kill()
    process.wait()
    process.stdout.close()
    a, b = load(target)
    assert b == a * 2
    assert os.path.isdir(target)


def test_a_name_as_long_as_the_system_allows(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 250)
    for text in "ab":
        write_folder(folder, lambda part, text=text: (part / "file").write_text(text), "example")
    assert read_folder(folder, "example", lambda part: (part / "file").read_text()) == "b"


def test_a_folder_exchanged_there_and_back_is_read_again(tmp_path: Path) -> None:
    target, turns = save(tmp_path / "x", "old"), []

    def read(part: Path) -> tuple[str, str]:
        turns.append(1)
        a = (part / "a").read_text()
        if len(turns) == 1:
            save(target, "new")
        b = (part / "b").read_text()
        if len(turns) == 1:
            save(target, "old")  # the list of files is the same as in the beginning
        return a, b

    assert read_folder(target, KIND, read) == ("old", "oldold")
    assert len(turns) == 2


def test_a_mixture_that_cannot_be_read_is_read_again(tmp_path: Path) -> None:
    target, turns = save(tmp_path / "x", "1"), []

    def read(part: Path) -> int:
        turns.append(1)
        if len(turns) == 1:
            save(target, "2")
            raise KeyError("of another folder")
        return int((part / "a").read_text())

    assert read_folder(target, KIND, read) == 2
    with pytest.raises(KeyError, match="always"):
        read_folder(target, KIND, lambda part: {}["always"])


WRITER = (
    "import sys; from salgp.storage import read_folder, write_folder\n"
    "folder, me = sys.argv[1:]\n"
    "for _ in range(60):\n"
    "    write_folder(folder, lambda p: [(p / f'{me}{i}').write_text(me) for i in range(3)], 'salgp-test')\n"
    "    names = read_folder(folder, 'salgp-test', lambda p: sorted(f.name for f in p.iterdir()))\n"
    "    assert len({name[0] for name in names if len(name) == 2}) == 1, names\n"
)


def test_three_writers_of_one_folder_all_succeed(tmp_path: Path) -> None:
    started = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "x"), me], stderr=subprocess.PIPE)
        for me in "abc"
    ]
    said = [process.communicate()[1].decode() for process in started]
    assert said == ["", "", ""]
    assert len(names(tmp_path / "x")) == 4
    assert names(tmp_path) == ["x"]


def test_a_writer_that_comes_second_takes_the_place_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swap, turns = folders._swap, []

    def late(part: Path, target: Path) -> None:
        turns.append(1)
        if len(turns) == 1:  # the target is missing, and then another writer makes it
            with monkeypatch.context() as patched:
                patched.setattr(folders, "_swap", swap)
                save(target, "first")
            os.rename(part, target)  # as in _swap, had it looked before: the target is not empty
        swap(part, target)

    monkeypatch.setattr(folders, "_swap", late)
    save(tmp_path / "x", "second")
    assert load(tmp_path / "x") == ("second", "secondsecond")
    assert len(turns) == 2
    assert names(tmp_path) == ["x"]
