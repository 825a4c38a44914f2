# `make` lists the commands. Each sets up what it needs: nothing has to be installed first but Python 3.11 or later.
PYTHON ?= python3
VENV ?= .venv
# Processes that run tests; each holds a jax of its own.
WORKERS ?= 2
# The GPU that kernels are compiled for, and the environment with its compiler.
TARGET ?= h200
AOT_VENV ?= .venv-aot
# More for pytest or ksana, for example: make test ARGS="-k scheduler", make kernels ARGS="--only decode"
ARGS ?=
EXTRAS ?= dev,docs
LIVES ?= 2000

RUN := $(VENV)/bin/python
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test docs kernels check-kernels emulate-kernels soak run-soak lint format clean

help:
	@echo "make demo     an ablation of attention windows on the embedded model: a table and a figure"
	@echo "make test     the tests                       (ARGS=\"-k name\", WORKERS=$(WORKERS))"
	@echo "make kernels  compiles the kernels for a GPU, without one, reports, and runs what came out in an emulator"
	@echo "              (TARGET=$(TARGET), ARGS=\"--only regex\": the report alone)"
	@echo "make soak     long proofs: what tests leave out, all specs of the kernels, simulated lives (LIVES=$(LIVES))"
	@echo "make docs     the documentation as HTML, in docs/_build; a warning is an error"
	@echo "make lint     ruff and pyright"
	@echo "make format   lays the code out as lint wants it"
	@echo "make clean    removes $(VENV), $(AOT_VENV) and the caches"
	@echo "All of them use the environment VENV=$(VENV), made by PYTHON=$(PYTHON) (3.11 or later) when it is not there."

demo: $(READY)
	@echo "== ksana run configs/quickstart.yaml"
	@$(VENV)/bin/ksana run configs/quickstart.yaml

test: $(READY)
	@$(RUN) -c 'import platform; from importlib.metadata import version; \
	print("== tests on Python %s, jax %s" % (platform.python_version(), version("jax")))'
	@$(RUN) -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

docs: $(READY)
	@$(RUN) docs/build.py

kernels:
	@$(MAKE) --no-print-directory check-kernels VENV="$(AOT_VENV)" EXTRAS=dev,aot-gpu
ifeq ($(strip $(ARGS)),)
	@$(MAKE) --no-print-directory emulate-kernels VENV="$(AOT_VENV)" EXTRAS=dev,aot-gpu
endif

check-kernels: $(READY)
	@$(VENV)/bin/ksana kernels check --target $(TARGET) $(ARGS)

emulate-kernels: $(READY)
	@echo "== the Hopper kernels as they are compiled, in an emulator of PTX"
	@$(RUN) -m pytest -v -n $(WORKERS) tests/pallas_kernels/ptx tests/pallas_kernels/aot $(ARGS)

# Kernels of several warpgroups are interpreted here: jax's interpreter holds a thread of XLA:CPU for each, more than
# small machines start.
soak:
	@$(MAKE) --no-print-directory run-soak VENV="$(AOT_VENV)" EXTRAS=dev,aot-gpu

run-soak: $(READY)
	@echo "== tests marked as soak"
	@$(RUN) -m pytest -n $(WORKERS) -m soak --durations=0 tests $(ARGS)
	@echo "== kernels of several warpgroups in jax's interpreter"
	@NPROC=8 $(RUN) -m pytest -n $(WORKERS) --dist loadfile -k "prefill or warpgroups" --ignore tests/pallas_kernels/ptx \
	  tests/pallas_kernels tests/ops
	@echo "== simulated lives"
	@$(RUN) -m tests.lives --examples $(LIVES) --workers $(WORKERS)

lint: $(READY)
	@echo "== ruff check"
	@$(RUN) -m ruff check --quiet .
	@echo "== ruff format --check"
	@$(RUN) -m ruff format --check --quiet .
	@echo "== pyright"
	@$(RUN) -m pyright --pythonpath $(RUN)

format: $(READY)
	@$(RUN) -m ruff check --fix --quiet .
	@$(RUN) -m ruff format .

clean:
	@for venv in "$(VENV)" "$(AOT_VENV)"; do \
	  if [ -f "$$venv/pyvenv.cfg" ]; then echo "== removing $$venv"; rm -rf "$$venv"; fi; \
	done
	@rm -rf .pytest_cache .ruff_cache .hypothesis .cache build docs/_build ksana_jax.egg-info
	@find ksana_jax pallas_kernels experiments tests -name __pycache__ -prune -exec rm -rf {} +

# The stamp is written last, so that an installation that was cut short is taken up again.
$(READY): pyproject.toml constraints.txt
	@if ! $(RUN) -m pip --version >/dev/null 2>&1; then \
	  $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	    echo "ksana_jax needs Python 3.11 or later, and PYTHON=$(PYTHON) is \
	$$($(PYTHON) -c 'import platform; print(platform.python_version())' 2>/dev/null || echo not a Python that runs here)." >&2; \
	    exit 1; }; \
	  echo "== making the environment $(VENV) with $$($(PYTHON) --version)"; \
	  $(PYTHON) -m venv "$(VENV)" || { \
	    echo "PYTHON=$(PYTHON) could not make $(VENV); on Debian and Ubuntu its package python3-venv is missing." >&2; \
	    exit 1; }; \
	fi
	@echo "== installing ksana_jax and what it needs into $(VENV), about a minute the first time"
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(RUN) -m pip install -qq --constraint constraints.txt --editable ".[$(EXTRAS)]"
	@touch $@
