"""What is fuzzed: a reader, whole files for it, and how a mutant is made of them.

The outcome of a mutant is one of: the *same* value as before; *refused* in one sentence that names the file;
*other*, a different value without complaint; *raw*, an error that was meant for programmers. Files of ours
carry checksums, so that nothing but same and refused may come of damage. Edits that renew the checksums, and
formats of others that have none, may give other values, but no raw errors.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mutators import mutate_bytes, mutate_json
from sealing import reseal

from salgp.storage import FormatError, write_header, write_tensors

__all__ = ["TARGETS", "Target", "outcome"]

Make = Callable[[Path], Path]


@dataclass(frozen=True)
class Target:
    """One reader under fire.

    Args:
        name: of the reader.
        make: writes whole files into a folder and returns what the reader is given.
        read: the reader; its value is compared by `digest_of`.
        files: names of the files that are mutated, within the folder.
        edit: ``"bytes"``; ``"json"`` or ``"tensors"`` for edits that renew the checksums.
        checked: have the files checksums that cover everything?
        sentences: what the reader says about the caller's part, where no file is to blame.
        prefix: may a value be the beginning of the whole one (a log after a kill)?
    """

    name: str
    make: Make
    read: Callable[[Path], Any]
    files: tuple[str, ...]
    edit: str = "bytes"
    checked: bool = True
    prefix: bool = False
    sentences: tuple[str, ...] = ()
    cache: dict[str, Any] = field(default_factory=dict)

    def prepare(self, folder: Path) -> Path:
        """Whole files, made once and copied."""
        whole = folder / "whole"
        whole.mkdir()
        given = self.make(whole)
        self.cache["given"] = given.relative_to(whole)
        self.cache["value"] = summary(self.read(given))
        shutil.copytree(whole, folder / "mutant")
        return folder


def outcome(target: Target, folder: Path, seed: int) -> tuple[str, str]:
    """Make mutant ``seed``, read it, and say what came of it."""
    rng = random.Random(f"{target.name}|{seed}")
    name = rng.choice(target.files)
    path, whole = folder / "mutant" / name, folder / "whole" / name
    contents = folder / "mutant" / Path(name).parent / "contents.json"
    listed = contents.read_bytes() if contents.is_file() else b""
    _mutate(target.edit, whole, path, rng)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = summary(target.read(folder / "mutant" / target.cache["given"]))
    except (FormatError, FileNotFoundError) as error:
        return "refused", str(error)
    except (ValueError, TypeError, KeyError) as error:
        said = str(error.args[0]) if error.args else ""
        known = "mutant" in said or any(sentence in said for sentence in target.sentences)
        return ("refused" if known else "raw"), f"{type(error).__name__}: {said}"
    except Exception as error:
        return "raw", f"{type(error).__name__}: {error}"
    finally:
        shutil.copyfile(whole, path)
        if listed:
            contents.write_bytes(listed)
    before = target.cache["value"]
    same = found == before or (target.prefix and found == before[: len(found)])
    return ("same" if same else "other"), ""


def _mutate(edit: str, whole: Path, path: Path, rng: random.Random) -> None:
    if edit == "bytes":
        path.write_bytes(mutate_bytes(whole.read_bytes(), rng))
    elif edit == "json":
        value = {k: v for k, v in json.loads(whole.read_text()).items() if k != "sha256"}
        changed = mutate_json(value, rng)
        if isinstance(changed, dict):
            kind, version = changed.get("format"), changed.get("format_version")
            write_header(path, kind, version, changed)  # type: ignore[arg-type]
        else:
            path.write_text(json.dumps(changed))
    else:
        _edit_tensors(whole, path, rng)
    if edit != "bytes" and (path.parent / "contents.json").is_file():
        reseal(path.parent)


def _edit_tensors(whole: Path, path: Path, rng: random.Random) -> None:
    """Change a tensor, or the metadata, and give the file new checksums."""
    from salgp.storage import read_tensors

    tensors, metadata = read_tensors(whole)
    name = rng.choice(sorted(tensors))
    x = tensors[name]
    deeds: list[Callable[[], Any]] = [
        lambda: tensors.pop(name),
        lambda: tensors.update({name: x[:0] if x.ndim else x.reshape(1)}),
        lambda: tensors.update({name: x.reshape(-1)}),
        lambda: tensors.update({name: x[None]}),
        lambda: tensors.update({name: x.to(rng.choice([torch.float16, torch.int64, torch.bool]))}),
        lambda: tensors.update({name: torch.full_like(x, float(rng.choice([0, -1, 1])))}),
        lambda: tensors.update({name: torch.full(x.shape, rng.choice([float("nan"), float("inf"), -1e38]))}),
        lambda: tensors.update({name: torch.cat([x.reshape(-1), x.reshape(-1)])}),
    ]
    if metadata:
        key = rng.choice(sorted(metadata))
        deeds += [
            lambda: metadata.pop(key),
            lambda: metadata.update(
                {key: rng.choice(["", "[", "99", "-1", "[1]", "null", '["x"]', "[" * 5000])}
            ),
        ]
    rng.choice(deeds)()
    write_tensors(path, tensors, metadata)


def summary(value: Any) -> Any:
    """A comparable digest of what a reader gave; lists stay lists, so that beginnings can be compared."""
    if isinstance(value, list):
        return [summary(part) for part in value]
    found = hashlib.sha256()
    _walk(value, found)
    return found.hexdigest()


def _walk(value: Any, found: hashlib._Hash) -> None:
    if isinstance(value, torch.Tensor):
        found.update(f"{value.dtype}{tuple(value.shape)}".encode())
        found.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray):
        found.update(
            f"{value.dtype}{value.shape}{value.tolist() if value.dtype.kind in 'OSU' else ''}".encode()
        )
        found.update(value.tobytes() if value.dtype.kind not in "OSU" else b"")
    elif isinstance(value, dict):
        for key, part in value.items():
            found.update(f"{key!r}:".encode())
            _walk(part, found)
    elif isinstance(value, list | tuple):
        for part in value:
            _walk(part, found)
    elif isinstance(value, bool | int | float | str | bytes | type(None)):
        found.update(f"{value!r};".encode())
    else:
        _walk(vars(value), found)


def _features() -> Any:
    import salgp

    g = torch.Generator().manual_seed(0)
    layers = {"a": torch.randn(40, 3, generator=g), "b": torch.randn(40, 2, generator=g)}
    return salgp.Features(2 * torch.randn(40, 3, generator=g), layers), torch.arange(40) % 3


def _calibrator(method: str) -> Make:
    def make(folder: Path) -> Path:
        from salgp.calibrators import get

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return get(method).fit(*_features()).save(folder / "cal")

    return make


def _predicted(folder: Path) -> Any:
    from salgp.calibrators import load_calibrator

    return load_calibrator(folder).predict(_features()[0]).probs


NETWORK = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3))


def _make_module(folder: Path) -> Path:
    from salgp.module import calibrate

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = [(_features()[0].layers["a"], _features()[1])]
        return calibrate(NETWORK, data, method="density-aware", perturb=None).save(folder / "cal")


def _read_module(folder: Path) -> Any:
    from salgp.module import load

    return load(folder, NETWORK)(_features()[0].layers["a"]).probs  # type: ignore[operator]


def _make_features(folder: Path) -> Path:
    features, labels = _features()
    return features.save(folder / "f.safetensors", labels, {"classes": '["x", "y", "z"]'})


def _read_features(path: Path) -> Any:
    from salgp.cli.files import read_features

    loaded = read_features(path)
    return [loaded.features, loaded.labels, loaded.classes]


def _make_prediction(folder: Path) -> Path:
    from salgp.cli.predictions import write_prediction
    from salgp.prediction import Prediction

    features, _ = _features()
    prediction = Prediction.from_confidence(features, features.confidence / 2 + 0.3)
    return write_prediction(folder / "p.safetensors", prediction, features.confidence)


def _read_tensors(path: Path) -> Any:
    from salgp.storage import read_tensors

    return read_tensors(path)


def _make_store(folder: Path) -> Path:
    from salgp.store import write_store

    return write_store([_features()], folder / "store", rows=15).folder


def _read_store(path: Path) -> Any:
    from salgp.store import FeatureStore

    return FeatureStore(path).to_features()


def _make_parquet(folder: Path) -> Path:
    return _make_store(folder) / "part-000000.parquet"


def _read_any(path: Path) -> Any:
    from salgp.cli.arrays import read_arrays

    return read_arrays(path)


def _read_table(path: Path) -> Any:
    from salgp.store.columns import check_widths, from_table, read_table

    table = read_table(path, ["logits", "layers.a", "layers.b", "label"], 15)
    check_widths(path, table, {"logits": 3, "layers.a": 3, "layers.b": 2})
    return from_table(table, ["a", "b"])


def _make_records(folder: Path) -> Path:
    from salgp_study.store import append_record

    for i in range(5):
        append_record(folder, {"key": f"k{i}", "ece": 0.01 * i, "sizes": {"a": i}})
    return folder


def _read_records(folder: Path) -> Any:
    from salgp_study.store import read_records

    return read_records(folder)


def _make_npz(folder: Path) -> Path:
    features, labels = _features()
    np.savez_compressed(
        folder / "d.npz", logits=features.logits.numpy(), labels=labels.numpy(), names=np.array(["a", "b"])
    )
    return folder / "d.npz"


def _make_csv(folder: Path) -> Path:
    features, labels = _features()
    rows = [f"{a},{b},{c},{y}" for (a, b, c), y in zip(features.probs.tolist(), labels.tolist(), strict=True)]
    (folder / "d.csv").write_text("\n".join(["probs.0,probs.1,probs.2,label", *rows]) + "\n")
    return folder / "d.csv"


def _read_scores(path: Path) -> Any:
    from salgp.cli.scores import read_scores

    return read_scores(path)


def _make_phoenix(folder: Path) -> Path:
    head = "[PhoenixHeaderVer01.04]\nPhoenixHeaderLength= 00300\nNumberOfRows= 8\nNumberOfColumns= 6\n"
    head += "DesiredDepression= 17\nTargetType= t72_tank\n[EndofPhoenixHeader]\n"
    chip = np.random.default_rng(0).random((8, 6)).astype(">f4")
    (folder / "chip.017").write_bytes(head.encode().ljust(300, b" ") + chip.tobytes())
    return folder


def _read_chips(path: Path) -> Any:
    from salgp_study.mstar import load_mstar

    return load_mstar(path)


def _make_chips(folder: Path) -> Path:
    x = np.random.default_rng(0).integers(0, 255, (5, 8, 8)).astype(np.uint8)
    np.savez(
        folder / "c.npz", x=x, label=np.arange(5) % 2, depression=[15, 17, 30, 15, 17], class_names=["A", "B"]
    )
    return folder / "c.npz"


def _make_curves(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    points = [
        f"{i},{50000 + 3 * t},{b},{rng.normal():.3f},{rng.random():.3f}"
        for i in range(4)
        for b in range(4)
        for t in range(3)
    ]
    (folder / "spcc_lightcurves.csv").write_text(
        "\n".join(["object_id,mjd,passband,flux,flux_err", *points]) + "\n"
    )
    head = "object_id,true_type,spectro,ra,decl,mwebv,hostgal_photoz,hostgal_photoz_err"
    meta = [f"{i},Ia,{i % 2 == 0},1.5,2.5,0.1,0.3,0.05" for i in range(4)]
    (folder / "spcc_metadata.csv").write_text("\n".join([head, *meta]) + "\n")
    return folder


def _read_curves(folder: Path) -> Any:
    from salgp_study.lightcurves import load_spcc

    return load_spcc(folder)


def _make_origin(folder: Path) -> Path:
    write_header(
        folder / "origin.json", "salgp-origin", 1, {"network": "abc", "features": "f.safetensors", "n": 3}
    )
    return folder


def _read_origin(folder: Path) -> Any:
    from salgp.cli.files import read_origin

    return read_origin(folder)


CAL = ("cal/calibrator.json", "cal/calibrator.safetensors", "cal/contents.json")
PARTS = tuple(f"store/part-{i:06d}.parquet" for i in range(3))
METHODS = ("temperature", "histogram", "dirichlet", "latent-gp", "density-aware", "layer-evidence", "sal-gp")

TARGETS = (
    Target("calibrator", _calibrator("density-aware"), _predicted, CAL),
    *(
        Target(f"calibrator-json-{name}", _calibrator(name), _predicted, CAL[:1], "json", checked=False)
        for name in METHODS
    ),
    *(
        Target(
            f"calibrator-tensors-{name}", _calibrator(name), _predicted, CAL[1:2], "tensors", checked=False
        )
        for name in METHODS[3:]
    ),
    Target("module", _make_module, _read_module, ("cal/module.json", *CAL)),
    Target(
        "module-json",
        _make_module,
        _read_module,
        ("cal/module.json",),
        "json",
        checked=False,
        sentences=(
            "another network",
            "other weights",
            "pass it again",
            "is it the same network",
            "did not run",
            "only recurrent layers",
            "unknown pooling",
            "reads hidden layers",
            "is missing; fitted on",
        ),
    ),
    Target("features", _make_features, _read_features, ("f.safetensors",)),
    Target("features-tensors", _make_features, _read_features, ("f.safetensors",), "tensors", checked=False),
    Target("prediction", _make_prediction, _read_tensors, ("p.safetensors",)),
    Target("store", _make_store, _read_store, ("store/manifest.json", *PARTS)),
    Target("manifest-json", _make_store, _read_store, ("store/manifest.json",), "json", checked=False),
    Target("shard", _make_parquet, _read_table, PARTS[:1], checked=False),
    Target("parquet", _make_parquet, _read_any, PARTS[:1], checked=False),
    Target("records", _make_records, _read_records, ("records.jsonl",), prefix=True),
    Target("origin", _make_origin, _read_origin, ("origin.json",)),
    Target("npz", _make_npz, _read_any, ("d.npz",), checked=False),
    Target("scores-csv", _make_csv, _read_scores, ("d.csv",), checked=False),
    Target("phoenix", _make_phoenix, _read_chips, ("chip.017",), checked=False),
    Target("chips-npz", _make_chips, _read_chips, ("c.npz",), checked=False),
    Target(
        "lightcurves",
        _make_curves,
        _read_curves,
        ("spcc_lightcurves.csv", "spcc_metadata.csv"),
        checked=False,
    ),
)
