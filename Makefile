# Every target sets itself up in .venv; a second run installs nothing unless pyproject.toml has changed.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

# How many pytest processes share the tests: one more than two cores have, as tests with real processes often wait.
JOBS   ?= 3
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup

.PHONY: help demo test test-quick check format bench clean

help:
	@echo "make demo     compare strategies on a modelled slow cluster, then run real processes"
	@echo "make test     run the tests"
	@echo "make test-quick  four cases of each test, without real processes: under a minute"
	@echo "make check    lint, formatting, types, doctests"
	@echo "make format   rewrite the sources as 'make check' wants them"
	@echo "make bench    run every benchmark"
	@echo "make clean    remove .venv and everything made"

demo: $(READY)
	$(BIN)/paceline demo

test: $(READY)
	$(PYTEST)

test-quick: $(READY)
	$(PYTEST) --quick

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m tools.exports --check
	$(BIN)/pyright
	$(BIN)/python -m pytest --doctest-modules src

format: $(READY)
	$(BIN)/python -m tools.exports
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	@failed=; for file in benchmarks/[a-z]*.py; do \
		name=$$(basename "$$file" .py); echo "python -m benchmarks.$$name"; \
		$(BIN)/python -m "benchmarks.$$name" || failed="$$failed $$name"; \
	done; test -z "$$failed" || { echo "did not run to their end:$$failed" >&2; exit 1; }

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is written last, so an interrupted installation is taken up again.
$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "paceline needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1);" \
			"name another with: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@
