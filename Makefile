# Everything runs in .venv, which the first target that needs it makes. See CONTRIBUTING.md.
#
#   make setup TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
# takes PyTorch's CPU build from PyTorch's own package index. Leave it out where pip finds that
# build by itself.

PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3)
TORCH_INDEX_URL ?=
# More arguments for the command that a target runs: make test ARGS="tests/store -x"
ARGS ?=
# Set: make test runs exhaustive grids, too.
ALL ?=
# Set: it also runs grids of random inputs that are longer than a change needs.
NIGHTLY ?=
# How many processes run tests side by side, a file in one of them.
WORKERS ?= 3
# Of vLLM, for make check-vllm; "latest" is the newest that pip finds, empty the installed one.
VERSION ?=

VENV := .venv
BIN := $(VENV)/bin
ENGINE := $(VENV)/.engine-installed
PACKAGE := $(VENV)/.package-installed
# The site needs neither torch nor vLLM, and has an environment of its own.
DOCS_VENV := .venv-docs
DOCS := $(DOCS_VENV)/.installed
SOURCES := $(shell find csrc -type f 2>/dev/null)
CLANG_SOURCES := $(filter %.cpp %.h %.hpp %.cu %.cuh,$(SOURCES))

.PHONY: help setup programs demo test check-vllm gpu-check gpu-dry-run lint format docs dist bench soak clean
.DELETE_ON_ERROR:

help:
	@echo "make setup   install vLLM for CPU and this package into $(VENV)"
	@echo "make programs  install what some tests run by apt: Chromium, curl, jq (needs root)"
	@echo "make demo    run the demo on a small real model"
	@echo "make test    run the tests        (ARGS=\"tests/store -x\"; ALL=1, NIGHTLY=1: more)"
	@echo "make check-vllm  compare what is used of vLLM with another version (VERSION=latest)"
	@echo "make gpu-check  compile the Triton kernels for GPUs that need not be there, and compare"
	@echo "make gpu-dry-run  run what a GPU engine runs on a device double, for GPUs that need not be there"
	@echo "make lint    ruff, mypy, pyright (on the examples), clang-format: check only"
	@echo "make format  ruff, clang-format: change the files"
	@echo "make docs    build the site into site/, strictly: words, links, names of the API"
	@echo "make dist    build the source distribution and a wheel with the CPU kernels into dist/"
	@echo "             (ARGS=--try: then install the wheel into a bare environment and check it)"
	@echo "make bench   run the benchmarks   (ARGS=...)"
	@echo "make soak    load, abuse and kill servers, then check every token  (ARGS=\"routes --seed 2\")"
	@echo "             (ARGS=\"--machine --minutes 60 --workers 2\": random programs across features)"
	@echo "make clean   remove builds and caches, keep $(VENV)"

# The stamps are touched last, so that an interrupted run starts the step again.
setup: $(PACKAGE)
	@echo "$(VENV) is ready"

$(ENGINE): tools/setup.sh
	@PYTHON="$(PYTHON)" TORCH_INDEX_URL="$(TORCH_INDEX_URL)" bash tools/setup.sh engine
	@touch $@

# The version stands in vllm_choreo/__init__.py.
$(PACKAGE): $(ENGINE) tools/setup.sh pyproject.toml setup.py vllm_choreo/__init__.py $(SOURCES)
	@bash tools/setup.sh package
	@touch $@

programs:
	@bash tools/programs.sh

demo: $(PACKAGE)
	@$(BIN)/vllm-choreo demo $(ARGS)

# A process that died is not replaced: the next one would run the same test again, for ever.
test: $(PACKAGE)
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder \
		--max-worker-restart 0 $(if $(ALL),--all) $(if $(NIGHTLY),--nightly) $(ARGS)

check-vllm: $(PACKAGE)
	@$(BIN)/python -m tools.vllm_check $(VERSION) $(ARGS)

gpu-check: $(PACKAGE)
	@$(BIN)/python -m tools.gpu_check $(ARGS)

gpu-dry-run: $(PACKAGE)
	@$(BIN)/python -m tools.gpu_dry_run $(ARGS)

lint: $(PACKAGE)
	@echo "== ruff check" && $(BIN)/ruff check .
	@echo "== ruff format --check" && $(BIN)/ruff format --check .
	@echo "== mypy" && $(BIN)/mypy
	@echo "== mypy and pyright on the examples" && $(BIN)/python -m tools.typed_examples
	@echo "== clang-format" && if [ -n "$(CLANG_SOURCES)" ]; then \
		$(BIN)/clang-format --dry-run --Werror $(CLANG_SOURCES); fi

format: $(PACKAGE)
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .
	@if [ -n "$(CLANG_SOURCES)" ]; then $(BIN)/clang-format -i $(CLANG_SOURCES); fi

$(DOCS): tools/setup.sh pyproject.toml
	@PYTHON="$(PYTHON)" bash tools/setup.sh docs
	@touch $@

docs: $(DOCS)
	@$(DOCS_VENV)/bin/python -m tools.site

dist: $(PACKAGE)
	@$(BIN)/python -m tools.dist $(ARGS)

bench: $(PACKAGE)
	@$(BIN)/python -m benchmarks $(ARGS)

soak: $(PACKAGE)
ifneq ($(filter --machine,$(ARGS)),)
	@$(BIN)/python -m tests.engine.feature_machine $(filter-out --machine,$(ARGS))
else
	@$(BIN)/python -m benchmarks.soak $(ARGS); status=$$?; \
		$(BIN)/python -m benchmarks --page && exit $$status
endif

clean:
	rm -rf build dist site demo-out run-out .mypy_cache .pytest_cache .ruff_cache .hypothesis ./*.egg-info
	find $(wildcard vllm_choreo tests benchmarks examples) -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -f vllm_choreo/*.so $(PACKAGE)
