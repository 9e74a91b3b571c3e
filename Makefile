# Everything runs in .venv with the versions of constraints.txt. `make demo` and `make test` need nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS := hf,bench,dev

.PHONY: help setup demo test quick lint bench numbers reference soak clean

help:  ## show this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

setup: $(STAMP)  ## .venv, dependencies, default models; quiet, and quick when there is nothing to do
	@$(BIN)/rekindle pull smollm2 minilm > /dev/null

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing dependencies into $(VENV) (the first time takes some minutes)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e ".[$(EXTRAS)]"
	@touch $@

demo: setup  ## the main job, as far as it exists, on the embedded model
	@$(BIN)/python tools/demo.py

test: setup lint  ## lint, types, layers, all tests
	@$(BIN)/python -m pytest

quick: $(STAMP)  ## the fast inner loop: tiny models only, under two minutes
	@$(BIN)/python -m pytest -q -m "not real and not docs and not storm and not exhaustive"

soak: $(STAMP)  ## 10,000 kills and a ten-minute storm in one cache folder
	@SOAK_KILLS=10000 SOAK_SECONDS=600 $(BIN)/python -m pytest -q -s -m storm tests/faults/test_crash.py

lint: $(STAMP)  ## ruff, mypy --strict, import layers
	@$(BIN)/ruff check --quiet src tests tools
	@$(BIN)/ruff format --quiet --check src tests tools
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/lint-imports > .import-linter.log || (cat .import-linter.log; exit 1)

bench: setup  ## every bench, for people
	@$(BIN)/python tools/write_numbers.py --show

numbers: setup  ## run every bench and rewrite docs/numbers.md
	@$(BIN)/python tools/write_numbers.py

reference: $(STAMP)  ## rewrite docs/reference from the code
	@$(BIN)/python tools/write_reference.py

clean:  ## remove .venv and everything generated; pulled models stay (rekindle rm removes them)
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .import-linter.log dist build
	find src tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
