# Each target sets up what it needs from nothing, in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
JOBS ?= 2

.PHONY: demo test test-long test-frameworks test-integrations test-models test-gpu lint format bench docs dist clean

# torch comes first and alone: the pinned CPU build is then what every other package's requirement finds. Triton, which
# that build does not bring, is for the tests: its interpreter runs the kernels on a machine without a GPU.
$(VENV)/.core: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch numpy
	$(PIP) --editable ".[plots,testing]"
	touch $@

$(VENV)/.test: $(VENV)/.core
	$(PIP) --editable ".[test]"
	$(PIP) --no-deps triton
	touch $@

$(VENV)/.docs: $(VENV)/.core
	$(PIP) --editable ".[docs]"
	touch $@

$(VENV)/.dist: $(VENV)/.core
	$(PIP) --editable ".[dist]"
	touch $@

demo: $(VENV)/.core
	$(BIN)/python examples/train.py $(ARGS)

# Those of integrations are in `make test-integrations`, where all frameworks are installed; those of real models in
# `make test-models`.
test: $(VENV)/.test
	$(BIN)/python -m pytest -n $(JOBS) -q --ignore tests/integrations --ignore tests/models $(ARGS)

# All combinations where `make test` takes a few that have every pair, and ten times as many random examples.
test-long: $(VENV)/.test
	$(BIN)/python -m pytest -n $(JOBS) -q --long --ignore tests/models $(ARGS)

# Other libraries' own ways with quantized models: the packages are installed into an environment of their own, unless
# FRAMEWORKS names another one.
FRAMEWORKS ?= .venv-frameworks

test-frameworks: $(FRAMEWORKS)/.frameworks
	$(FRAMEWORKS)/bin/python -m pytest -n $(JOBS) -q tests/integrations tests/frameworks $(ARGS)

# hybridtensor.integrations with the real packages, the scripts of examples/frameworks and the pages that need
# Transformers, in the same environment.
test-integrations: $(FRAMEWORKS)/.frameworks
	$(FRAMEWORKS)/bin/python -m pytest -n $(JOBS) -q tests/integrations \
	  'tests/test_snippets.py::test_snippets_run[docs/tutorial.md-0]' \
	  'tests/test_snippets.py::test_snippets_run[docs/inference.md-0]' $(ARGS)

$(FRAMEWORKS)/.frameworks: pyproject.toml constraints.txt
	$(MAKE) VENV=$(FRAMEWORKS) $(FRAMEWORKS)/.test
	$(FRAMEWORKS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	  --editable ".[frameworks]"
	touch $@

# Real architectures, tiny and with random weights, in an environment of their own, unless MODELS names another one.
MODELS ?= .venv-models

test-models: $(MODELS)/.models
	$(MODELS)/bin/python -m pytest -n $(JOBS) -q tests/models $(ARGS)

# timm requires torchvision, whose builds do not fit every torch: tests import timm without it.
$(MODELS)/.models: pyproject.toml constraints.txt
	$(MAKE) VENV=$(MODELS) $(MODELS)/.test
	$(MODELS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --editable ".[models]"
	$(MODELS)/bin/python -m pip uninstall --quiet --yes torchvision
	touch $@

# On a machine with a GPU and its own torch: PYTHON names the interpreter that has it. What takes time there is compiling
# kernels, each of which is then there for all workers.
test-gpu: JOBS = 12
test-gpu:
	TRITON_CACHE_DIR=$${TRITON_CACHE_DIR:-$(CURDIR)/build/triton} \
	  $(PYTHON) -m pytest -n $(JOBS) -q -p no:cacheprovider $(ARGS)

lint: $(VENV)/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.core
	$(BIN)/python benchmarks/saved.py $(ARGS)
	$(BIN)/python benchmarks/memory.py $(ARGS)
	$(BIN)/python benchmarks/cast.py $(ARGS)
	$(BIN)/python benchmarks/linear.py $(ARGS)
	$(BIN)/python benchmarks/linear_details.py $(ARGS)
	$(BIN)/python benchmarks/blocks.py $(ARGS)
	$(BIN)/python benchmarks/end_to_end.py $(ARGS)

# The site is build/docs/index.html. A warning, such as a link that leads nowhere, is an error.
docs: $(VENV)/.docs
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --doctree-dir build/doctrees docs build/docs

# A wheel and an sdist in dist/, checked; the wheel, of the sdist, is tried in an environment that has torch only.
dist: $(VENV)/.dist
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/twine check --strict dist/*
	$(BIN)/python .ci/try_wheel.py dist/*.whl constraints.txt

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
