# `make demo` and `make test` need python3 (3.11 or later), make and git; they build .venv themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One thread a process: the tests run side by side, and small matrices gain nothing from more.
TESTENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 MPLBACKEND=Agg
JOBS ?= 2

.PHONY: demo test test-slow typecheck lint bench figures clean

demo: $(VENV)/.installed
	$(BIN)/measureflow demo

test: lint
	$(TESTENV) $(BIN)/python -m pytest -q -n $(JOBS)

test-slow: $(VENV)/.installed-test
	$(TESTENV) $(BIN)/python -m pytest -q -n $(JOBS) --only-slow

typecheck: $(VENV)/.installed-test
	$(TESTENV) $(BIN)/python -m pytest -q -n $(JOBS) --typecheck

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

bench: $(VENV)/.installed-test
	$(TESTENV) $(BIN)/python -m benchmarks

figures: $(VENV)/.installed-test
	for script in examples/*.py; do echo $$script; $(TESTENV) $(BIN)/python $$script || exit 1; done

clean:
	rm -rf $(VENV) measureflow-demo

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else f"measureflow needs Python 3.11 or later, and {sys.executable} is {v.major}.{v.minor}; try: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[mp4]"
	@touch $@

$(VENV)/.installed-test: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[test]"
	@touch $@ $(VENV)/.installed
