# One word each. Every target does its own set-up in .venv; a new machine needs Linux, Python 3.11 and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
FUZZ_ROUNDS ?= 25

.PHONY: setup demo test check kill bench fuzz real clean

setup: $(READY)

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fairtrial needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --editable '.[all]' --group dev
	touch $@

# The whole story on this machine, about a minute.
demo: $(READY)
	$(BIN)/fairtrial demo

test: $(READY)
	$(BIN)/python -m pytest

# Format, lint, types, and the tests that run what the docs show.
check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/docs

# What follows takes longer than continuous integration may; it is run by hand.

# The runner is killed at every step of its ledger, and production must come back every time.
kill: $(READY)
	$(BIN)/python tests/kill.py

# On a machine with nothing else running: an A-A run, the runner's own time, trips, a rehearsal, every story five times.
bench: $(READY)
	$(BIN)/python benchmarks/aa.py
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/trip.py
	$(BIN)/python benchmarks/rehearsal.py
	$(BIN)/python benchmarks/stories.py

# Every property test again with new random examples, FUZZ_ROUNDS times.
fuzz: $(READY)
	@for round in $$(seq $(FUZZ_ROUNDS)); do \
		echo "round $$round of $(FUZZ_ROUNDS)"; \
		env -u CI $(BIN)/python -m pytest -m hypothesis || exit 1; \
	done

# The same window on real vLLM with a real model: 6 GB of disk, x86-64, nothing else running.
real: $(READY)
	examples/vllm-cpu/setup.sh
	$(BIN)/python examples/vllm-cpu/real.py

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
