"""The shape of the house: who may import whom, which names are public, what `import salgp` costs."""

from __future__ import annotations

import ast
import functools
import inspect
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

import salgp

PACKAGE = Path(salgp.__file__).parent
STUDY = PACKAGE.parents[1] / "study" / "src" / "salgp_study"

VALUES = {"file_signatures", "io", "labels", "logits", "features", "prediction", "explanation"}
MAY_IMPORT: dict[str, set[str]] = {
    "file_signatures": set(),
    "io": {"file_signatures", "labels"},
    "extras": set(),
    "progress": set(),
    "demo_digits": set(),
    "logits": set(),
    "labels": {"logits"},
    "features": {"io", "labels", "logits"},
    "prediction": {"features"},
    "explanation": {"features", "prediction"},
    "gp": {"io"},
    "neighbours": {"features"},
    "network": {*VALUES, "progress"},
    "metrics": VALUES,
    "calibrators": {*VALUES, "gp", "neighbours", "metrics"},
    "decide": {*VALUES, "metrics"},
    "sets": VALUES,
    "estimate": {*VALUES, "gp", "metrics", "decide"},
    "svg": set(),
    "monitor": {*VALUES, "estimate", "metrics", "svg"},
    "classifier": {*VALUES, "network", "calibrators", "report"},
    "onnx": {"io", "network"},
    "files": {*VALUES, "calibrators", "network", "onnx", "store"},
    "text": {"network"},
    "outputs": {*VALUES, "calibrators"},
    "export": {*VALUES, "calibrators", "classifier", "decide"},
    "sklearn": {*VALUES, "calibrators"},
    "plots": {*VALUES, "metrics"},
    "report": {*VALUES, "metrics", "decide", "estimate", "svg"},
}
EVERYTHING = {"store", "cli", "demo", "__main__"}
"""Top of the house: these may use whatever they need."""

ONLY_IN = {
    "gpytorch": set(),
    "ray": {"store"},
    "matplotlib": {"plots.py"},
    "typer": {"cli"},
    "lightning": set(),
    "transformers": {"files.py"},
}
"""Heavy libraries and the rooms they may be used in."""


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def everything() -> list[Path]:
    """Modules of the library, and of the study beside it."""
    return sorted([*modules(), *STUDY.rglob("*.py")])


def place(path: Path) -> str:
    return path.relative_to(STUDY.parent if path.is_relative_to(STUDY) else PACKAGE.parent).as_posix()


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            base = node.module or ""
            found |= {f"salgp.{alias.name}" for alias in node.names} if base == "salgp" else {base}
    return found


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_import_arrows(path: Path) -> None:
    here = room(path)
    if here in EVERYTHING or here == "__init__":
        return
    assert here in MAY_IMPORT, f"new room {here!r}: say in MAY_IMPORT what it may import"
    used = {name.split(".")[1] for name in imports(path) if name.startswith("salgp.")} - {here}
    allowed = MAY_IMPORT[here] | {"extras", "__version__"}
    assert used <= allowed, f"{path.name} imports {used - allowed}"


ROOMS_OF_CALIBRATORS = {
    "scaling": {"evidence"},
    "gp": {"evidence"},
    "evidence": set(),
}
"""What the rooms of ``calibrators/`` may import of each other; what lies beside them serves all."""


@pytest.mark.parametrize(
    "path", sorted((PACKAGE / "calibrators").glob("*/*.py")), ids=lambda p: f"{p.parent.name}/{p.name}"
)
def test_arrows_between_the_rooms_of_calibrators(path: Path) -> None:
    here = path.parent.name
    parts = [name.split(".") for name in imports(path) if name.startswith("salgp.calibrators.")]
    used = {part[2] for part in parts if part[2] in ROOMS_OF_CALIBRATORS} - {here}
    assert used <= ROOMS_OF_CALIBRATORS[here], f"{here}/{path.name} imports {used}"


def test_no_cycles_even_by_lazy_imports() -> None:
    """Every import counts, wherever in a file it stands; a package is its ``__init__``."""
    known = {name_of(path): path for path in everything()}
    arrows = {name: targets(path, known) - {name} for name, path in known.items()}
    settled: set[str] = set()
    while waiting := {name for name in arrows if name not in settled}:
        free = {name for name in waiting if arrows[name] <= settled}
        assert free, f"a cycle among {sorted(waiting)[:8]}"
        settled |= free


def test_the_library_does_not_know_the_study() -> None:
    users = {room(path) for path in modules() if any("salgp_study" in name for name in imports(path))}
    assert users == set()


@pytest.mark.parametrize("path", everything(), ids=place)
def test_no_function_is_longer_than_fifty_lines(path: Path) -> None:
    """Signature and body; the docstring does not count."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.FunctionDef):
            told = node.body[0] if ast.get_docstring(node) else None
            docstring = 0 if told is None else (told.end_lineno or 0) - told.lineno + 1
            lines = (node.end_lineno or 0) - node.lineno + 1 - docstring
            assert lines <= 50, f"{node.name} has {lines} lines"


@pytest.mark.parametrize("path", everything(), ids=place)
def test_only_names_a_module_offers_are_imported(path: Path) -> None:
    """``__all__`` is what a module offers outside its folder; within it, any name without an underscore."""
    known = {name_of(other): other for other in everything()}
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and node.module in known:
            offered = offers(known[node.module])
            inner = {alias.name for alias in node.names if f"{node.module}.{alias.name}" in known}
            missing = {alias.name for alias in node.names} - inner - offered
            if known[node.module].parent == path.parent and path.parent != PACKAGE:
                missing = {name for name in missing if name.startswith("_")}
            assert offered == {"*"} or not missing, f"{node.module} does not offer {missing}"


def offers(path: Path) -> set[str]:
    """Names in a module's ``__all__``; a star where it is worked out when the module is loaded."""
    for node in parsed(path).body:
        if isinstance(node, ast.Assign) and any(getattr(t, "id", "") == "__all__" for t in node.targets):
            simple = isinstance(node.value, ast.List | ast.Tuple)
            return set(ast.literal_eval(node.value)) if simple else {"*"}
    return set()


def targets(path: Path, known: Collection[str]) -> set[str]:
    """Modules that a file imports, where ``from package import module`` means the module."""
    found = imports(path) & set(known)
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom):
            inner = {f"{node.module}.{alias.name}" for alias in node.names} & set(known)
            found = (found - {node.module or ""} if len(inner) == len(node.names) else found) | inner
    return found


def name_of(path: Path) -> str:
    parts = Path(place(path)).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize(("library", "rooms"), ONLY_IN.items())
def test_heavy_libraries_stay_in_their_rooms(library: str, rooms: set[str]) -> None:
    users = {
        str(p.relative_to(PACKAGE))
        for p in modules()
        if library in {name.split(".")[0] for name in imports(p)}
    }
    assert {u for u in users if not any(u == r or u.startswith(f"{r}/") for r in rooms)} == set()


@pytest.mark.parametrize("path", everything(), ids=place)
def test_nothing_that_can_run_code_is_loaded_or_written(path: Path) -> None:
    tree = parsed(path)
    assert not {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"} & {
        name.split(".")[0] for name in imports(path)
    }
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
    assert not [n for n in calls if isinstance(n.func, ast.Name) and n.func.id in ("eval", "exec")]
    for call in calls:
        if (
            isinstance(call.func, ast.Attribute)
            and call.func.attr == "load"
            and isinstance(call.func.value, ast.Name)
        ):
            wanted = {"torch": ("weights_only", True), "np": ("allow_pickle", False)}.get(call.func.value.id)
            given = {k.arg: k.value.value for k in call.keywords if isinstance(k.value, ast.Constant)}
            assert wanted is None or given.get(wanted[0]) is wanted[1], f"{path.name}:{call.lineno}"
    assert "torch.save" not in {ast.unparse(call.func) for call in calls}


@pytest.mark.parametrize("path", everything(), ids=place)
def test_every_cholesky_is_in_one_file(path: Path) -> None:
    """The jitter policy of `salgp.gp.linalg` holds for all of them: torch's, NumPy's and SciPy's are not
    called elsewhere.
    """
    if place(path) == "salgp/gp/linalg.py":
        return
    tree = parsed(path)
    used = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    assert not {name for name in used if "cholesky" in name or name in ("cho_factor", "cho_solve")}


BLOCKS = {"salgp/gp/linalg.py", "salgp/gp/leave_out.py", "salgp/calibrators/evidence/monotone.py"}
"""Where systems are solved without a factor: many small blocks at once, as CONTRIBUTING.md says."""


@pytest.mark.parametrize("path", everything(), ids=place)
def test_systems_are_solved_with_the_jitter_policy(path: Path) -> None:
    names = {ast.unparse(n) for n in ast.walk(parsed(path)) if isinstance(n, ast.Attribute)}
    used = {name for name in names if name.endswith(("linalg.inv", "linalg.solve"))}
    assert not used or place(path) in BLOCKS, used


@pytest.mark.parametrize("path", everything(), ids=place)
def test_every_module_explains_itself(path: Path) -> None:
    assert ast.get_docstring(parsed(path))


def test_public_names_are_sorted_complete_and_documented() -> None:
    assert list(salgp.__all__) == sorted(salgp.__all__)
    for name in salgp.__all__:
        value = getattr(salgp, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__doc__, f"salgp.{name} has no docstring"


def test_type_checkers_see_the_same_names_from_the_same_modules() -> None:
    stub = ast.parse((PACKAGE / "__init__.pyi").read_text(encoding="utf-8"))
    found = {
        alias.name: node.module or ""
        for node in ast.walk(stub)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    places = {name: f"salgp.{place}" for name, place in salgp._WHERE.items()}
    assert found == places | dict.fromkeys(salgp._SUBMODULES, "salgp")


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = salgp.nonsense


def test_import_is_light() -> None:
    """`import salgp` may not pull in what `import torch` does not."""
    code = (
        "import torch, sys; before = set(sys.modules); import salgp; "
        "print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    added = done.stdout.split()
    assert len(added) <= 5
    assert {name.split(".")[0] for name in added} == {"salgp"}


def test_no_absolute_paths_in_the_package() -> None:
    for path in everything():
        text = path.read_text(encoding="utf-8")
        assert "/work/" not in text, path
        assert "/home/" not in text, path
