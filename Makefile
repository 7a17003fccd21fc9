# Everything runs in .venv, which is made on first use and brought up to date when what it depends on changes.
# Needs python3 (3.10 or newer) with its venv module, and nothing else. Where the CUDA build of torch is too large:
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make demo

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip --disable-pip-version-check install --quiet -c constraints.txt
SOURCES := src tests benchmarks examples
BENCHMARKS := $(filter-out benchmarks/peers.py,$(sort $(wildcard benchmarks/*.py)))

.PHONY: help demo test lint bench fuzz soak mutants clean
.DEFAULT_GOAL := help

help:
	@echo "make demo     plan a small GPT at half of its memory, and see that its gradients stay the same"
	@echo "make test     lint, type check, tests"
	@echo "make lint     ruff and mypy alone"
	@echo "make bench    all benchmarks, against PyTorch's own checkpointing and torch_remat"
	@echo "make fuzz     10,000 random programs against plain autograd"
	@echo "make soak     2,000 steps of a small model under all features, memory flat"
	@echo "make mutants  plant faults in the engine, one after the other, and see that the tests find each"
	@echo "make clean    remove .venv and everything that was generated"

demo: .venv/installed
	@$(BIN)/recollect demo

# In two halves at once, because there are many of them.
test: lint
	@$(BIN)/python -m pytest tests/frameworks tests/gpu tests/test_[a-l]*.py & first=$$!; \
	$(BIN)/python -m pytest tests/test_[m-z]*.py src; second=$$?; \
	wait $$first && exit $$second

lint: .venv/installed
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy

bench: .venv/installed-bench
	@for script in $(BENCHMARKS); do echo "== $$script"; $(BIN)/python $$script || exit 1; done

fuzz: .venv/installed
	@RECOLLECT_FUZZ=10000 $(BIN)/python tests/test_fuzz.py

soak: .venv/installed
	@RECOLLECT_SOAK=2000 $(BIN)/python -m pytest -q tests/test_soak.py

mutants: .venv/installed
	@$(BIN)/python tests/mutants.py

clean:
	rm -rf .venv build dist demo.html src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch goes first and alone: it is the large one, and no other requirement shall choose its version.
.venv/installed: pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit("recollect needs Python 3.10 or newer, got " + sys.version if sys.version_info < (3, 10) else 0)'
	@echo "Installing into .venv: once, and it takes a while"
	@$(PYTHON) -m venv .venv
	@$(PIP) torch
	@$(PIP) --editable '.[test,lint,frameworks]'
	@touch $@

.venv/installed-bench: .venv/installed
	@$(PIP) --editable '.[bench]'
	@touch $@
