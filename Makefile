# `make` says what there is. Everything runs in .venv, which `make setup` makes from nothing.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
export OMP_NUM_THREADS = 1
# The tests start hundreds of processes, which need not compile utils/ again.
unexport PYTHONDONTWRITEBYTECODE
# Two workers, each with whole files, because their fixtures are shared; tests/conftest.py has the order.
WORKERS ?= 2
SPREAD := -n $(WORKERS) --dist loadfile --no-loadscope-reorder

help:           ## this list
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1  /p' Makefile | awk '{ name = $$1; $$1 = ""; printf "make %-12s%s\n", name, $$0 }'

setup: $(READY) ## .venv with requirements.txt and what the tests need

$(READY): requirements.txt tests/requirements.txt
	@$(PYTHON) -c "import sys; sys.exit('error: Python 3.11 or newer is needed (fix: make setup PYTHON=python3.11)' if sys.version_info < (3, 11) else 0)"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt -r tests/requirements.txt
	@touch $(READY)

# 2, or 1 where there is one GPU
RANKS = $(shell $(BIN)/python -c "import torch; print(min(2, torch.cuda.device_count() or 2))")
demo: $(READY)  ## fine-tune the tiny model on 2 ranks, then show its answers before and after
	$(BIN)/torchrun --nproc_per_node $(RANKS) recipes/finetune.py --low_cpu_fsdp
	$(BIN)/python recipes/tiny/score.py recipes/tiny $$(ls -dt output/finetune-*/model | head -n 1)

demo-all: $(READY) ## the bare command of each recipe in turn, and a table: before, after, seconds
	$(BIN)/python recipes/tiny/all.py

test: lint      ## lint and tests, at most 5 minutes on 2 cores
	$(BIN)/python -m pytest $(SPREAD)

test-all: lint  ## the slow tests, which `make test` leaves out, at most 20 minutes
	$(BIN)/python -m pytest $(SPREAD) -m "slow and not gpu"

OLDEST := $(shell sed -n 's/^transformers>=\([0-9.]*\),.*/\1.0/p' requirements.txt)
test-oldest: lint ## the tests of `make test`, with the oldest transformers of requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target .oldest transformers==$(OLDEST)
	PYTHONPATH=.oldest $(BIN)/python -m pytest $(SPREAD)

test-4: $(READY) ## what is trained loads in transformers 4, as vLLM and others use it; about 2 minutes
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --target .four 'transformers>=4.57,<5'
	$(BIN)/python tests/transformers_4.py

lint: $(READY)  ## ruff: style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(READY) ## let ruff format everything
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY) ## ratios against other ways, about 30 minutes on 2 cores
	set -e; for what in load step dpo rollouts save loss attention quant; do $(BIN)/python tests/benchmarks/bench.py $$what; done

# make gpu PYTHON=python3 takes the packages of that Python, where none can be installed.
OWN := $(findstring command line,$(origin PYTHON))
GPU_PYTHON := $(if $(OWN),$(PYTHON),$(BIN)/python)
gpu: $(if $(OWN),,$(READY)) ## what needs a GPU: its tests, and the tables configs/measured_<device>.md and planned_<device>.md
	@if $(GPU_PYTHON) -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then \
		$(GPU_PYTHON) -m pytest -m gpu tests/test_gpu.py && $(GPU_PYTHON) tests/benchmarks/bench.py gpu --repeats 1 && \
		$(GPU_PYTHON) tests/benchmarks/bench.py memory --repeats 1; \
	else echo "no GPU here: nothing was run"; fi

house: $(READY) ## figures of the code: tokens, lines, density, imports
	$(BIN)/python tests/test_house.py

tiny: $(READY)  ## make recipes/tiny again: text, tokenizer, model, task
	$(BIN)/python recipes/tiny/make.py

.PHONY: help setup demo demo-all test test-all test-oldest test-4 lint format bench gpu house tiny
