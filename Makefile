# Two commands, each doing all its own set-up: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test lint clean

demo: $(READY)
	$(BIN)/gambit demo

test: lint
	$(BIN)/python -m pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(READY): pyproject.toml scripts/install.sh
	PYTHON="$(PYTHON)" sh scripts/install.sh $(VENV)
	touch $@

clean:
	rm -rf $(VENV)
