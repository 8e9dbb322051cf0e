# Each target sets itself up: a machine with Python 3.11 or later, pip and a compiler is enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
TORCH := torch==2.13.0
OUT ?= demo-out
ENGINE ?= auto

.PHONY: setup demo test lint bench proto docs clean
.DEFAULT_GOAL := test

setup: $(STAMP)

# torch goes first and by its exact version, so that a build for the CPU that is at hand is taken and stays.
$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or later is needed")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/ftis-node demo --out $(OUT) --engine $(ENGINE)

test: $(STAMP)
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)
	for file in bench/*.py; do $(BIN)/python $$file || exit 1; done

proto: $(STAMP)
	$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=ftis_node/records --pyi_out=ftis_node/records proto/rollout.proto

docs: $(STAMP)
	$(BIN)/python -m ftis_node.config.reference > docs/configuration.md

clean:
	rm -rf $(VENV) build dist *.egg-info $(OUT)
