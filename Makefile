# make train      train the quickstart; ARGS="max_lag=2 seed=1 out=runs/x" are passed on
# make test       the tests, in under ten minutes
# make test-all   the slow ones too
# make check      formatting, lint, types
# make bench      all benchmarks into benchmarks/RESULTS.md; ARGS=--quick for a look
#
# On Linux plain pip installs PyTorch's CUDA build. For CPU only, name PyTorch's CPU wheel index, whose address is on
# PyTorch's installation page: make train TORCH_INDEX=...

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
ARGS ?=
RECIPE ?= recipes/quickstart.toml
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet

.PHONY: train test test-all check bench format clean

$(VENV)/.base: pyproject.toml constraints.txt
	@echo "installing turnwise into $(VENV) (once; a few minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$$(grep '^torch==' constraints.txt)"
	@$(PIP) --constraint constraints.txt --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.base
	@$(PIP) --constraint constraints.txt --editable ".[dev]"
	@touch $@

train: $(VENV)/.base
	@$(BIN)/turnwise train $(RECIPE) $(ARGS)

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n auto -m "not slow" $(ARGS)

test-all: $(VENV)/.dev
	$(BIN)/python -m pytest -n auto $(ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.base
	@$(BIN)/python benchmarks/run_all.py $(ARGS)

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
