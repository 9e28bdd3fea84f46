# One command checks everything, and CI runs that same command.
VENV ?= .venv
PYTHON ?= python3
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed

.PHONY: demo check format lint types test model lower clean

demo: $(STAMP) ## measure the bundled pair on four workloads and print the tables: about a minute, offline
	$(VENV)/bin/specbench run

check: lint types test ## all that CI runs

# A CPU build of torch where there is no NVIDIA GPU: the newest default build is several gigabytes.
$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade pip
	command -v nvidia-smi >/dev/null || $(PY) -m pip install --quiet "torch==2.13.0"
	$(PY) -m pip install --quiet --editable ".[dev]"
	touch $(STAMP)

lint: $(STAMP)
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .

types: $(STAMP)
	$(PY) -m mypy

test: $(STAMP) ## everything but what needs the real model, an engine or a GPU
	$(PY) -m pytest -m "not model and not engine and not gpu"

model: $(STAMP) ## what needs the real model
	$(PY) -m pytest -m "model and not gpu"

# What touches transformers, at the oldest version supported.
LOWER := $(VENV)-lower
lower: pyproject.toml
	test -x $(LOWER)/bin/python || $(PYTHON) -m venv $(LOWER)
	command -v nvidia-smi >/dev/null || $(LOWER)/bin/python -m pip install --quiet "torch==2.13.0"
	$(LOWER)/bin/python -m pip install --quiet --editable ".[dev]" "transformers==5.17.*"
	$(LOWER)/bin/python -m pytest -q -m "not model and not engine and not gpu" tests/test_cache.py \
	  tests/test_loop.py tests/test_probe.py tests/test_conformance.py tests/test_draft.py \
	  tests/test_reference.py tests/test_tiny.py tests/test_decoding_processing.py tests/test_models.py \
	  tests/test_testing.py

format: $(STAMP)
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
