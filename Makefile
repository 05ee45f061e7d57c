# Everything runs in .venv, made on first use from pyproject.toml and constraints.txt.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
JOBS   ?= 2
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: help demo test test-slow test-lowest test-pythons fuzz mutants sbom hashes lint types docs docs-version package check bench bench-speed bench-history bench-shift bench-scale clean
help:            ## list the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[cli,report]"
	@touch $@

$(VENV)/.dev: pyproject.toml study/pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[dev]" -e study
	@touch $@ $(VENV)/.run

demo: $(VENV)/.run  ## train a small network, calibrate it, write a report to open (two minutes)
	OMP_NUM_THREADS=2 $(BIN)/salgp demo --out out/demo --force

test: $(VENV)/.dev  ## all tests, doctests included
	$(BIN)/python -m pytest -q -m "not slow" -n $(JOBS)

test-slow: $(VENV)/.dev  ## the long ones: kill-and-resume loops, large sizes
	$(BIN)/python -m pytest -q -m slow

LOWEST ?= .venv-lowest
CORE   := tests/test_features.py tests/test_prediction.py tests/io tests/metrics/test_interval.py tests/gp/test_regression.py \
	tests/gp/test_linalg.py tests/calibrators/test_base.py tests/calibrators/test_temperature.py \
	tests/calibrators/test_contract.py tests/calibrators/evidence tests/test_decide.py tests/test_decide_values.py tests/test_classifier.py \
	tests/test_cli.py tests/test_progress.py tests/test_sets.py tests/estimate tests/monitor/test_monitor.py tests/test_export.py tests/test_sklearn.py \
	tests/store/test_store.py tests/store/test_scoring.py
$(LOWEST)/.made: pyproject.toml constraints-lowest.txt
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install -q -c constraints-lowest.txt -e ".[cli,report,plots,parquet,images,pandas,onnx]" pytest hypothesis
	@touch $@

test-lowest: $(LOWEST)/.made  ## the core tests with the lowest versions that pyproject.toml allows
	# the lowest typer warns of its own option
	$(LOWEST)/bin/python -m pytest -q -m "not slow" $(CORE) -W "ignore:'autocompletion' is renamed:DeprecationWarning"

test-pythons:    ## every other Python that is here: compiles without a warning, and the core tests where it has torch
	@for python in python3.12 python3.13; do \
	  $$python -c "" 2>/dev/null || { echo "$$python: not here"; continue; }; \
	  PYTHONDONTWRITEBYTECODE=1 $$python -W error tools/compiles.py src tests examples benchmarks study tools || exit 1; \
	  if $$python -c "import torch, pytest" 2>/dev/null; then PYTHONPATH=src $$python -m pytest -q -m "not slow" $(CORE) || exit 1; \
	  else echo "$$python: no torch and pytest, no tests"; fi; done

fuzz: $(VENV)/.dev  ## 100,000 mutants for every reader (FUZZ=N for another number), continued where out/fuzz.jsonl ends
	PYTHONPATH=tests:tests/fuzz $(BIN)/python tools/fuzz.py --count $(or $(FUZZ),100000) --out out/fuzz.jsonl

mutants: $(VENV)/.dev  ## mutants of the source against the tests that reach them (PACKAGE=src/salgp/gp TESTS=tests/gp COUNT=40 SEED=0)
	$(BIN)/python tools/mutation/mutate.py $(or $(PACKAGE),src/salgp/decide) $(or $(TESTS),tests/test_decide_values.py tests/test_decide.py) \
	  --count $(or $(COUNT),40) --seed $(or $(SEED),0)

sbom: $(VENV)/.dev  ## every installed package with version, licence and what it needs, as CycloneDX into out/sbom.json
	$(BIN)/python tools/sbom.py out/sbom.json

hashes: $(VENV)/.dev  ## requirements with the SHA-256 of every file, for pip install --require-hashes, into out/
	mkdir -p out
	$(BIN)/python -m pip install -q --dry-run --ignore-installed --report out/report.json -c constraints.txt ".[dev]"
	$(BIN)/python tools/hashes.py out/report.json out/requirements-hashed.txt

lint: $(VENV)/.dev  ## format and lint
	$(BIN)/ruff format --check src tests study benchmarks examples docs/*.py
	$(BIN)/ruff check src tests study benchmarks examples docs/*.py

types: $(VENV)/.dev  ## strict type check
	$(BIN)/mypy

docs: $(VENV)/.dev  ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -q

docs-version: $(VENV)/.dev  ## the same into site/VERSION/, beside other versions, with a switch between them
	$(BIN)/python docs/versions.py site

package: $(VENV)/.dev  ## build wheel and sdist, try the wheel in a fresh environment
	.ci/package

check: lint types docs package test  ## everything that must hold before a change lands

bench: $(VENV)/.dev  ## speed against GPyTorch, netcal, scikit-learn and torchmetrics, in one run
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/core.py
	OMP_NUM_THREADS=2 $(BIN)/python benchmarks/baselines.py
	OMP_NUM_THREADS=2 $(BIN)/python benchmarks/metrics.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/scores_alone.py

bench-speed: $(VENV)/.dev  ## ours, the bare forward passes and the alternatives in one table (SALGP_DATA=folder of the real data)
	$(BIN)/python benchmarks/speed.py --write benchmarks/results/speed.md

bench-history: $(VENV)/.dev  ## the last runs of every figure as a table, from benchmarks/history.jsonl
	$(BIN)/python benchmarks/history.py --write benchmarks/results/history.md

bench-shift: $(VENV)/.dev  ## calibration under shift, every baseline in the same run, into out/ (hours; report sets by hand, as every look at them counts)
	$(BIN)/python -m salgp_study.suite features
	$(BIN)/python -m salgp_study.suite score --methods ours baselines ablations
	$(BIN)/python -m salgp_study.suite tables --out out/shift-results.md

bench-scale: $(VENV)/.dev  ## a million samples, out of core
	OMP_NUM_THREADS=2 $(BIN)/python benchmarks/scale.py --out benchmarks/results/scale.md

clean:           ## remove what the commands made, except the environment
	rm -rf out site build dist .mypy_cache .ruff_cache .pytest_cache
