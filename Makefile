# One word for each thing a developer does. Every target works on a fresh clone; PYTHON chooses the interpreter.
PYTHON ?= python3
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
VENV := .venv/$(VERSION)
BIN := $(VENV)/bin
CORE := $(wildcard csrc/*.c csrc/*.h)
WARNINGS := -Wall -Wextra -Wconversion -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wvla -Werror
SANITIZE := -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g -O1
PYTEST_ARGS ?=
BENCH_ARGS ?=

.PHONY: help test check lint asan bench clean build
help:
	@echo "make test    set up a virtual environment and run the tests (PYTHON=python3.13 chooses another Python)"
	@echo "make check   linters, types, layers, C warnings and analysis, then the tests"
	@echo "make asan    the tests with AddressSanitizer and UBSan in the C core"
	@echo "make bench   measure, print one table, write bench/results/bench.json"
	@echo "make build   an sdist and a wheel in dist/"

$(VENV)/made: pyproject.toml setup.py csrc/build.py $(CORE)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check --upgrade 'pip>=23' 'setuptools>=70.1'
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[test,check]'
	@touch $@

test: $(VENV)/made
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/made
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	csrc/check.sh "$(WARNINGS)"

check: lint test

# A venv of its own: the sanitized core must not be mistaken for the real one. Leaks are not asked for:
# the interpreter keeps what it likes until its end, and the core's own tests count descriptors and memory.
asan:
	PYTHON="$(PYTHON)" SANITIZE="$(SANITIZE)" tests/asan.sh $(PYTEST_ARGS)

bench:
	$(PYTHON) bench/run.py $(BENCH_ARGS)

build: $(VENV)/made
	$(BIN)/python -m pip install -q build
	$(BIN)/python -m build

clean:
	rm -rf .venv build dist *.egg-info csrc/_irun.c infini_run/_irun.c infini_run/*.so bench/results
