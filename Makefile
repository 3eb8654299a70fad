# Everything on a fresh machine: `make run` trains, `make test` checks. Set-up happens by itself, once, in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A machine without an NVIDIA GPU gets the version that is known to have a CPU build; override with TORCH='torch>=2.10'.
TORCH ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo 'torch>=2.10' || echo 'torch==2.13.0')
JOBS ?= 2
OUT ?= runs/make-run

.PHONY: run test test-slow test-peers bench docs docs-outputs lint setup clean

run: setup
	$(BIN)/blockscale train --overwrite --out $(OUT)

test: setup lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS)

test-slow: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) -m slow

# torchao, compressed-tensors, ModelOpt and transformers beside the torch that is there
test-peers: setup
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[peers]'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/peers tests/convert tests/test_router_options.py

# the CPU backend, with torchao for comparison where it is installed; writes bench/results
bench: setup
	OMP_NUM_THREADS=2 $(BIN)/python bench/cpu_quantize.py
	OMP_NUM_THREADS=2 $(BIN)/python bench/cpu_step.py

# the documentation, in build/site; `make docs-outputs` writes pictures, and what the examples print, into the pages
docs: setup
	$(BIN)/python -m mkdocs build --strict

docs-outputs: setup
	$(BIN)/python docs/pictures.py
	$(BIN)/python docs/pages.py

lint: setup
	$(BIN)/ruff check src tests bench docs/*.py
	$(BIN)/ruff format --check src tests bench docs/*.py
	$(BIN)/mypy

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check '$(TORCH)'
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[test]'
	# the oldest Triton that is supported, for the tests that compile with it; they are skipped where it cannot be had
	-$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target $(VENV)/triton-3.6.0 triton==3.6.0
	touch $@

clean:
	rm -rf $(VENV) build runs .mypy_cache .ruff_cache .pytest_cache
