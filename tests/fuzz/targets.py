"""What is fuzzed: every reader, which of its files are mutated, and how."""

from __future__ import annotations

import whole as w
from harness import Target

__all__ = ["TARGETS"]

CAL = ("cal/calibrator.safetensors",)
WATCH = tuple(f"watch/{name}" for name in ("monitor.json", "state.safetensors", "log.jsonl"))
PARTS = tuple(f"store/part-{i:06d}.parquet" for i in range(3))
METHODS = ("temperature", "histogram", "dirichlet", "latent-gp", "density-aware", "layer-evidence", "sal-gp")

TARGETS = (
    Target("calibrator", w.calibrator("density-aware"), w.predicted, CAL),
    *(
        Target(
            f"calibrator-value-{name}",
            w.calibrator(name),
            w.predicted,
            CAL,
            "value",
            checked=False,
            sentences=("fitted on ",),  # of other features than these: the file is whole
        )
        for name in METHODS
    ),
    *(
        Target(f"calibrator-tensors-{name}", w.calibrator(name), w.predicted, CAL, "tensors", checked=False)
        for name in METHODS[3:]
    ),
    Target("classifier", w.make_module, w.read_module, CAL),
    Target(
        "classifier-value",
        w.make_module,
        w.read_module,
        CAL,
        "value",
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
            "fitted on ",
        ),
    ),
    Target("rule", w.make_rule, w.read_rule, ("rule.json",)),
    Target("rule-json", w.make_rule, w.read_rule, ("rule.json",), "json", checked=False),
    Target("sets", w.make_sets, w.read_sets, ("sets.safetensors",)),
    Target("sets-tensors", w.make_sets, w.read_sets, ("sets.safetensors",), "tensors", checked=False),
    Target("monitor", w.make_monitor, w.read_monitor, WATCH),
    Target(
        "monitor-json",
        w.make_monitor,
        w.read_monitor,
        WATCH[:1],
        "json",
        checked=False,
        sentences=("this monitor watches ",),  # other channels than these: the file is whole
    ),
    Target("monitor-tensors", w.make_monitor, w.read_monitor, WATCH[1:2], "tensors", checked=False),
    Target("features", w.make_features, w.read_features, ("f.safetensors",)),
    Target(
        "features-tensors", w.make_features, w.read_features, ("f.safetensors",), "tensors", checked=False
    ),
    Target("store", w.make_store, w.read_store, ("store/manifest.json", *PARTS)),
    Target("manifest-json", w.make_store, w.read_store, ("store/manifest.json",), "json", checked=False),
    Target("shard", w.make_parquet, w.read_table, PARTS[:1], checked=False),
    Target("parquet", w.make_parquet, w.read_any, PARTS[:1], checked=False),
    Target("records", w.make_records, w.read_records, ("records.jsonl",), prefix=True),
    Target("npz", w.make_npz, w.read_any, ("d.npz",), checked=False),
    Target("scores-csv", w.make_csv, w.read_scores, ("d.csv",), checked=False),
    Target("weights-pt", w.make_weights, w.read_weights, ("w.pt",), checked=False),
    Target("phoenix", w.make_phoenix, w.read_chips, ("chip.017",), checked=False),
    Target("chips-npz", w.make_chips, w.read_chips, ("c.npz",), checked=False),
    Target(
        "lightcurves",
        w.make_curves,
        w.read_curves,
        ("spcc_lightcurves.csv", "spcc_metadata.csv"),
        checked=False,
    ),
)
