# One command checks everything, and CI runs that same command.
VENV ?= .venv
PYTHON ?= python3
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed

.PHONY: demo check format lint types test model lower clean

demo: $(STAMP) ## measure the bundled pair on four workloads and print the tables: some minutes, offline
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
	OMP_NUM_THREADS=1 $(PY) -m pytest -n auto --dist loadfile -m "not model and not engine and not gpu"

model: $(STAMP) ## what needs the real model
	$(PY) -m pytest -m "model and not gpu"

# Every dependency at the oldest release that pyproject.toml promises: needs Python 3.11, for which they have
# wheels. torch alone is the build above: older ones come with several gigabytes for GPUs.
LOWER := $(VENV)-lower
$(LOWER)/.installed: pyproject.toml tools/lower_bounds.py
	$(PYTHON) -m venv $(LOWER)
	command -v nvidia-smi >/dev/null || $(LOWER)/bin/python -m pip install --quiet "torch==2.13.0"
	$(LOWER)/bin/python tools/lower_bounds.py --except torch >$(LOWER)/constraints.txt
	$(LOWER)/bin/python -m pip install --quiet --constraint $(LOWER)/constraints.txt --editable ".[dev]"
	touch $@

# The tests that meet a dependency. Old releases use what newer ones beneath them have deprecated.
lower: $(LOWER)/.installed ## what meets a dependency, with the oldest releases supported
	OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore::DeprecationWarning $(LOWER)/bin/python -m pytest -q -n auto --dist loadfile \
	  -m "not model and not engine and not gpu" -W ignore::DeprecationWarning \
	  $(addprefix tests/test_,$(addsuffix .py,audit_plots cache chi_squared cli decoding_processing doctor draft environment \
	  grammar loop models pair probe reference report stats store testing tiny trace workloads))

format: $(STAMP)
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
