# One word for each thing a developer does. Every target works on a fresh clone; PYTHON chooses the interpreter.
PYTHON ?= python3
# Tests wait more than they compute, so there are five for each core.
JOBS ?= $(shell echo $$(( 5 * $$(nproc) )))
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
VENV := .venv/$(VERSION)
# What the environment has besides the package; .ci/run makes smaller ones, each as a VENV of its own.
EXTRAS ?= test,check
BIN := $(VENV)/bin
CORE := $(wildcard csrc/*/*)
WARNINGS := -Wall -Wextra -Wconversion -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wvla -Werror
SANITIZE := -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g -O1
PYTEST_ARGS ?=
BENCH_ARGS ?=
# Each worker of a test run rewrites the asserts of all tests, in two thirds of its start, unless it may keep them.
unexport PYTHONDONTWRITEBYTECODE

WHEELS := .venv/wheels-$(VERSION)
DOCS := .venv/docs-$(VERSION)
WHEEL_BEDS := qemu-user-static mmdebstrap
TORCH := .venv/torch-$(VERSION)
TORCH_TESTS := tests/launch/test_warm_torch.py tests/launch/test_warm_gpu.py tests/launch/test_waited_rank.py tests/launch/test_slow_ranks.py tests/launch/test_progress_recipes.py tests/crews/test_function_torch.py tests/crews/test_torch.py tests/multinode/test_many_ssh.py tests/multinode/test_many_slurm.py \
    tests/multinode/test_ddp_ssh.py tests/multinode/test_ddp_slurm.py
GPU_TESTS := tests/launch/test_warm_gpu.py tests/unit/devices/test_visible.py

.PHONY: help generated near test test-all torch torch-env gpu executor-suites pbs check lint lint-python lint-types lint-c lint-workflows asan coverage walk fuzz valgrind stress soak bench pictures faults wheels wheels-test docs clean
help:
	@echo "make test    set up a virtual environment and run the tests (PYTHON=python3.13 chooses another Python, JOBS=1 runs one at a time)"
	@echo "make near    a minute of the tests of what differs from origin/main (NEAR_BASE=HEAD~1 chooses another base), without beds"
	@echo "make test-all  the same with every row of the large matrices, of which make test runs a sample"
	@echo "make torch   the tests that need PyTorch, over ssh and Slurm, too, in an environment of their own (3.10 to 3.13)"
	@echo "make gpu     the tests that need an NVIDIA GPU, in the same environment; each fails without one"
	@echo "make pbs     the tests that need a real OpenPBS (see its own INSTALL; prefix /opt/pbs, or PBS_EXEC=...), for root; PBS_ROUNDS=20"
	@echo "make check   linters, types, layers, C warnings and analysis, then the tests"
	@echo "make generated  the man page, the completions and the reference pages, out of the table of flags"
	@echo "make asan    the tests with AddressSanitizer and UBSan in the C core"
	@echo "make coverage  lines and branches of the C core that the tests go through; fails below 90 %"
	@echo "make walk    every system call of the core fails once, in every kind of launch (a sample is in the tests)"
	@echo "make fuzz    libFuzzer on the output pump and the reader of /proc, FUZZ_SECONDS (60) each"
	@echo "make valgrind  the core without an interpreter under memcheck, every allocation denied once"
	@echo "make stress  every fault 100 times in a row (STRESS=N; LOAD=1 with every core busy meanwhile)"
	@echo "make soak    100000 launches in one process: nothing may grow (SOAK=N); losses of nodes at random, for root"
	@echo "make bench   measure, print one table, write bench/results/bench.json"
	@echo "make pictures  the recordings of the documentation, for root"
	@echo "make faults  the same faults under other launchers beside us, one table, bench/results/faults.json"
	@echo "make docs    the documentation site in site/: strict, every link and anchor checked, nothing of another server"
	@echo "make wheels  the sdist and every wheel (glibc and musl, x86-64 and aarch64) in dist/"
	@echo "make wheels-test  each wheel installed and run: on glibc, on aarch64 under qemu, as process 1 of an image; for root"

# The tests start thousands of interpreters, perhaps where none may write what it has compiled. A .pth file of
# setuptools imports a module at each start, for those who import distutils. What pytest makes of the asserts is kept, or
# each worker of the first run would make it.
$(VENV)/made: pyproject.toml setup.py csrc/build.py $(CORE)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check --upgrade 'pip>=23' 'setuptools>=77.0.3'
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[$(EXTRAS)]'
	$(BIN)/python -m compileall -q infini_run
	rm -f $(VENV)/lib/python*/site-packages/distutils-precedence.pth
	$(BIN)/python -m pytest --collect-only -qq >/dev/null 2>&1 || true
	@touch $@

test: $(VENV)/made
	tests/support/beds/install.sh openssh-server openssh-client iproute2 slurm-wlm munge slurmdbd mariadb-server openmpi-bin mpich \
	    chromium podman crun zsh fish mandoc || true
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup --no-loadscope-reorder $(PYTEST_ARGS)

# tests/support/near.py has the table of what is tested for which change.
near: $(VENV)/made
	$(BIN)/python -m tests.support.near -n $$(( 2 * $$(nproc) )) --dist loadgroup --no-loadscope-reorder $(PYTEST_ARGS)

# Every row of every matrix, where `make test` chooses some of them by a seed that it prints.
test-all:
	TEST_ROWS=all $(MAKE) test

# PyTorch is large, so it has an environment of its own, and a test that cannot find it there fails.
$(TORCH)/made: pyproject.toml setup.py csrc/build.py $(CORE)
	$(PYTHON) -m venv $(TORCH)
	$(TORCH)/bin/python -m pip install -q --disable-pip-version-check --upgrade 'pip>=23' 'setuptools>=77.0.3'
	$(TORCH)/bin/python -m pip install -q --disable-pip-version-check -e '.[test,torch]'
	@touch $@

torch-env: $(TORCH)/made

torch: torch-env
	tests/support/beds/install.sh openssh-server openssh-client iproute2 slurm-wlm munge || true
	TEST_TORCH=required $(TORCH)/bin/python -m pytest -n $(shell nproc) --dist loadgroup --no-loadscope-reorder -m torch $(TORCH_TESTS) $(PYTEST_ARGS)

# First on a machine with a GPU: one test after the other, because all count who holds memory on it. A test without a
# GPU, or without a torch that has CUDA, fails.
gpu: torch-env
	TEST_TORCH=required TEST_GPU=required $(TORCH)/bin/python -m pytest -m gpu $(GPU_TESTS) $(PYTEST_ARGS)

# CPython's tests of executors, where this Python has them (3.12), and loky's, which are not copied.
executor-suites: $(VENV)/made
	$(BIN)/python -m pip install -q --disable-pip-version-check 'loky==3.7.0'
	$(BIN)/python -m pip download -q --disable-pip-version-check --no-deps --no-binary :all: -d build/loky 'loky==3.7.0'
	tar -xzf build/loky/loky-3.7.0.tar.gz -C build/loky
	LOKY_SDIST=$(CURDIR)/build/loky/loky-3.7.0 $(BIN)/python -m pytest tests/crews/test_executor_suites.py $(PYTEST_ARGS)

# Debian has no package of OpenPBS, so these tests are not among the others. Its own INSTALL says how it is built, with
# the prefix /opt/pbs that is expected here, or another one that PBS_EXEC names.
pbs: $(VENV)/made
	tests/support/beds/install.sh postgresql iproute2 || true
	@tests/support/beds/pbs.sh where
	$(BIN)/python -m pytest -m pbs tests/jobs/test_job_pbs_real.py tests/jobs/test_job_pbs_spares.py \
	    tests/jobs/test_job_function_pbs.py $(PYTEST_ARGS)

# .pre-commit-config.yaml runs those that a commit concerns.
lint: lint-python lint-types lint-c lint-workflows

lint-python: $(VENV)/made
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lint-types: $(VENV)/made
	$(BIN)/mypy
	$(BIN)/lint-imports

lint-c:
	csrc/check.sh "$(WARNINGS)"

lint-workflows: $(VENV)/made
	$(BIN)/actionlint

check: lint test

generated: $(VENV)/made
	$(BIN)/python share/generate.py

# A venv of its own: the sanitized core must not be mistaken for the real one. Leaks are not asked for:
# the interpreter keeps what it likes until its end, and the core's own tests count descriptors and memory.
asan:
	PYTHON="$(PYTHON)" EXTRAS="$(EXTRAS)" SANITIZE="$(SANITIZE)" scripts/asan.sh $(PYTEST_ARGS)

coverage:
	PYTHON="$(PYTHON)" scripts/coverage.sh $(PYTEST_ARGS)

walk: $(VENV)/made
	TEST_ROWS=all $(BIN)/python -m pytest -o faulthandler_timeout=0 tests/launch/faults/test_faults_core.py tests/launch/faults/test_faults_guard.py $(PYTEST_ARGS)

fuzz:
	scripts/fuzz.sh

valgrind:
	scripts/valgrind.sh

# Hours, so not in CI. scripts/stress.sh says what else can be set.
stress: $(VENV)/made
	PYTHON=$(BIN)/python scripts/stress.sh

soak: $(VENV)/made
	$(BIN)/python scripts/soak.py
	SOAK_PAIRS=100000 $(BIN)/python -m pytest tests/soak tests/multinode/test_simulated_losses.py $(PYTEST_ARGS)

# Draws docs/assets/*.svg anew, from runs on a terminal.
pictures: $(VENV)/made torch-env
	BIN=$(BIN) TORCH=$(TORCH) scripts/pictures.sh

bench:
	$(PYTHON) bench/run.py $(BENCH_ARGS)

faults:
	$(PYTHON) bench/faults.py $(BENCH_ARGS)

# An environment of its own, since a C compiler with every libc comes with it (100 MB).
$(WHEELS)/made: pyproject.toml
	$(PYTHON) -m venv $(WHEELS)
	$(WHEELS)/bin/python -m pip install -q --disable-pip-version-check --upgrade 'pip>=25.1'
	$(WHEELS)/bin/python -m pip install -q --disable-pip-version-check --group wheels
	@touch $@

wheels: $(WHEELS)/made
	$(WHEELS)/bin/python scripts/wheels.py

# Each wheel is installed and run where it is made for, as far as there is a place for it: glibc, and another processor under qemu. For root.
wheels-test: $(VENV)/made $(WHEELS)/made
	tests/support/beds/install.sh $(WHEEL_BEDS)
	test -n "$(wildcard dist/*.whl)" || $(MAKE) wheels
	$(BIN)/python -m pytest -o faulthandler_timeout=0 -m wheels tests/wheels $(PYTEST_ARGS)

# What a site is built with is no part of what a user installs, nor of what tests need.
$(DOCS)/made: pyproject.toml
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install -q --disable-pip-version-check --upgrade 'pip>=25.1'
	$(DOCS)/bin/python -m pip install -q --disable-pip-version-check --group docs
	@touch $@

docs: $(DOCS)/made
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --quiet
	$(DOCS)/bin/python scripts/check_site.py site
	@echo "the site is in site/; to read it: python3 -m http.server --directory site"

clean:
	rm -rf .venv build dist site *.egg-info csrc/_irun.c infini_run/_irun.c infini_run/*.so bench/results
