# Set-up, demo and tests. Needs make and Python 3.11 or later; the rest goes into .venv.

PYTHON ?= python3
PIP_VERSION := 26.3
VENV := .venv
LOWEST := .venv-lowest
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
PYTEST ?=
DOCS := $(wildcard docs/reference/*.md)
COG := $(BIN)/python -m cogapp -I docs --verbosity=1

# Stamps: newer than these files if what is installed was installed for them as they are now.
PACKAGE := $(VENV)/.package
DEV := $(VENV)/.dev
SETTINGS := pyproject.toml constraints.txt Makefile

# Hundreds of processes import the same modules: they are compiled once.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo test lint style types fresh-docs docs soak lowest clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    train the bundled job"
	@echo "make test    lint, types, docs and tests"
	@echo "make soak    the long-running tests in full"
	@echo "make lowest  the unit tests with the lowest versions that pyproject.toml declares"
	@echo "make lint    ruff and mypy"
	@echo "make docs    regenerate the generated parts of docs"
	@echo "make clean   remove .venv and caches; runs/ stays"

demo: $(PACKAGE)
	@$(BIN)/python -m allranks run

# Debian's packages are installed beside Python's.
# Types and docs are checked while the tests run, which leave a core idle now and then. Collecting
# once beforehand compiles what four workers would otherwise each compile at the same time.
test: | $(BIN)/python
	@tests/install.sh & packages=$$!; $(MAKE) -s style && wait $$packages
	@$(MAKE) -s types fresh-docs >$(VENV)/checks.log 2>&1 & checks=$$!; \
	$(BIN)/python -m pytest --collect-only -qq $(PYTEST) >/dev/null; \
	$(BIN)/python -m pytest -n 4 --dist loadscope --no-loadscope-reorder $(PYTEST) && \
	  echo "flaky: 0" || { \
	  [ $$? = 1 ] && echo "tests that failed, run once more on their own:" && \
	  $(BIN)/python -m pytest -x --last-failed --last-failed-no-failures none --alone $(PYTEST); }; \
	tests=$$?; wait $$checks; checks=$$?; cat $(VENV)/checks.log; exit $$((tests | checks))

lint: style types

style: $(DEV)
	@$(BIN)/python -m ruff check
	@$(BIN)/python -m ruff format --check

types: $(DEV)
	@$(BIN)/python -m mypy

fresh-docs: $(DEV)
	@$(COG) --check --check-fail-msg="make docs regenerates it" $(DOCS)

docs: $(DEV)
	@$(COG) -r $(DOCS)

soak: $(DEV)
	@$(BIN)/python -m pytest -m soak $(PYTEST)
	@$(BIN)/python -m pytest tests/unit --hypothesis-profile=others $(PYTEST)

lowest: $(LOWEST)/.installed
	@$(LOWEST)/bin/python -m pytest tests/unit $(PYTEST)

clean:
	rm -rf $(VENV) $(LOWEST) .mypy_cache .pytest_cache .ruff_cache .hypothesis dist
	find . -name __pycache__ -prune -exec rm -rf {} +

$(PACKAGE): $(SETTINGS) | $(BIN)/python
	@echo "installing allranks into $(VENV): torch is large, this can take minutes"
	@$(PIP) install "pip==$(PIP_VERSION)"
	@$(PIP) install -c constraints.txt --build-constraint constraints.txt -e .
	@touch $@

$(DEV): $(SETTINGS) | $(BIN)/python
	@echo "installing allranks and what its tests need into $(VENV): this can take minutes"
	@$(PIP) install "pip==$(PIP_VERSION)"
	@$(PIP) install --no-compile -c constraints.txt --build-constraint constraints.txt -e '.[digits,doctor,report,web]' --group dev
	@touch $(PACKAGE) $@

$(LOWEST)/.installed: $(SETTINGS) tests/lowest.py | $(BIN)/python
	@echo "installing the lowest versions into $(LOWEST): this can take minutes"
	@$(BIN)/python -m venv --clear $(LOWEST)
	@$(BIN)/python tests/lowest.py > $(LOWEST)/requirements.txt
	@$(LOWEST)/bin/python -m pip --disable-pip-version-check -qq install "pip==$(PIP_VERSION)"
	@$(LOWEST)/bin/python -m pip -qq install -r $(LOWEST)/requirements.txt
	@$(LOWEST)/bin/python -m pip -qq install --build-constraint constraints.txt --no-deps -e .
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: $(PYTHON) is missing or older than 3.11"; \
	  echo "  fix: install Python 3.11 or later, or name one: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	  apt-get -qq update && apt-get -qq install -y python3-venv; } || { \
	  echo "error: $(PYTHON) cannot make virtual environments: it has no module ensurepip"; \
	  echo "  fix: install it (Debian, Ubuntu: apt-get install python3-venv)"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
