# Each goal sets up .venv when it has to, and then runs.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LM_EVAL := $(VENV)/.lm_eval_installed
CUDA := $(VENV)/cuda/.installed
WORKDIR ?= runs/mod
# Two workers. The tests of a file stay together, since they share compiled
# programs. Files keep their order: xdist would leave those with few tests, which
# are the slow ones, for the end, when one worker has nothing left to do. A worker
# that dies ends the run: xdist would replace it, and then wait for ever for the
# tests of the file that it left unfinished.
PYTEST_ARGS ?= -n 2 --dist=loadfile --no-loadscope-reorder \
  --max-worker-restart=0

# The environment below is for CPUs (README: on a GPU or TPU, install the extra
# and call train.py). Unsaid, JAX would look for a TPU, at length.
export JAX_PLATFORMS ?= cpu

.PHONY: train twins test test-fast test-slow lint format docs clean

# XLA takes fresh memory for every result, and a CPU spends much time on the
# first touch of its pages. So take them large, where Linux and glibc can.
train twins: export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1

# `make` alone lists the goals.
.DEFAULT_GOAL := help
.PHONY: help setup
help:
	@echo 'make setup      sets up .venv; the other goals do it when it is needed'
	@echo 'make train      trains a small language model, in minutes on two cores'
	@echo 'make twins      trains dense models with as many training FLOPs'
	@echo 'make test       runs the tests, in about six minutes on two cores'
	@echo 'make test-fast  runs the tests of layers, routing, losses and configs'
	@echo 'make test-slow  runs the rest: long runs, notebooks, several hosts, wheels'
	@echo 'make lint       checks the style'
	@echo 'make format     corrects what it can of the style'
	@echo 'make docs       builds the site in build/docs'
	@echo 'make clean      removes what was built and cached'

setup: $(STAMP)

train: $(STAMP)
	$(BIN)/python train.py --config=configs/lm/mod.py --workdir=$(WORKDIR)

# Dense models of equal training FLOPs, to see what the routed blocks are worth.
twins: $(STAMP)
	$(BIN)/python train.py --config=configs/lm/dense.py --workdir=$(WORKDIR)_dense
	$(BIN)/python train.py --config=configs/lm/dense.py:shallow \
	  --workdir=$(WORKDIR)_shallow

test: $(STAMP)
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m 'not slow'

# At every save: what is quick to compile, and a whole run of the loop.
FAST := tests/routing tests/losses tests/layers tests/test_config.py \
  tests/test_imports.py \
  tests/extension/test_extension.py::test_a_task

test-fast: $(STAMP)
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m 'not slow' $(FAST)

# What takes long: whole runs, rare combinations, notebooks, benchmarks, programs
# for accelerators that are not here, several hosts, wheels; and
# lm-evaluation-harness, of whose packages three are built from source.
test-slow: $(LM_EVAL) $(CUDA)
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m slow

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The site, in build/docs; a warning, such as of a broken link, is an error.
docs: $(STAMP)
	$(BIN)/sphinx-build -q -W --keep-going -b html docs build/docs

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Leaves the downloads in .venv; the next make only looks them through.
clean:
	rm -rf $(STAMP) $(LM_EVAL) $(CUDA) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find mod_jax kernels configs tests -name __pycache__ -prune -exec rm -rf {} +

# A Python that is too old is found out here, not by an installer's backtrace.
$(STAMP): requirements.txt requirements-no-deps.txt setup.cfg pyproject.toml .python-version
	@set -e; \
	wanted=$$(cat .python-version); \
	new_enough='import sys; sys.exit(sys.version_info < (3, 12))'; \
	python=; \
	for candidate in "$(BIN)/python" "python$$wanted" python3; do \
	  if "$$candidate" -c "$$new_enough" 2>/dev/null; then \
	    python=$$candidate; break; \
	  fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "error: Python $$wanted or newer is needed, and neither" \
	    "python$$wanted nor python3 is one; install it, or put it on PATH." >&2; \
	  exit 1; \
	fi; \
	echo "Setting up $(VENV) (once; later runs skip this)."; \
	if [ "$$python" != "$(BIN)/python" ]; then \
	  "$$python" -m venv --clear $(VENV); \
	elif ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	  $(BIN)/python -m ensurepip --upgrade >/dev/null; \
	fi
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --require-hashes -r requirements.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --require-hashes --no-deps -r requirements-no-deps.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --no-deps --no-build-isolation -e .
	@touch $@

$(LM_EVAL): requirements-lm-eval.txt $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --require-hashes --no-deps -r requirements-lm-eval.txt
	@touch $@

# Not where JAX would find it by itself: it would miss a GPU at every start.
$(CUDA): requirements-cuda.txt $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --require-hashes --no-deps --upgrade --target $(VENV)/cuda \
	  -r requirements-cuda.txt
	@touch $@
