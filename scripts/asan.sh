#!/bin/sh
# The tests with the core under AddressSanitizer and UBSan; called by `make asan`. JOBS=4 runs so many tests at a time; arguments go to pytest.
#
# The sanitizer must be the first library of the process that loads the core. LD_PRELOAD would also reach every
# rank and every tool that a test starts; the dynamic loader's own --preload does not leave this process. Tests
# start the command through TEST_PYTHON; where the product itself starts an interpreter (--isolate) the sanitizer
# comes late, which verify_asan_link_order=0 allows.
#
# detect_leaks=0: the interpreter keeps what it likes until its end, so LeakSanitizer would tell of CPython;
# that the core gives back its memory and descriptors is tested by counting them.
set -eu
cd "$(dirname "$0")/.."
venv=.venv/asan
: "${PYTHON:=python3}" "${EXTRAS:=test,check}" "${SANITIZE:=-fsanitize=address,undefined -fno-sanitize-recover=undefined -g -O1}"
: "${CC:=gcc}"
export CC

[ -x $venv/bin/python ] || "$PYTHON" -m venv $venv
$venv/bin/python -m pip install -q --disable-pip-version-check --upgrade 'pip>=23' 'setuptools>=77.0.3'
# not editable: the sanitized extension must not be mistaken for the real one in the source tree
rm -rf .venv/asan-source
mkdir -p .venv/asan-source
cp -r csrc docs infini_run bin share scripts tests setup.py pyproject.toml MANIFEST.in README.md LICENSE .venv/asan-source
rm -f .venv/asan-source/infini_run/*.so
[ ! -d examples ] || cp -r examples .venv/asan-source
cd .venv/asan-source
venv=../asan
IRUN_CFLAGS="$SANITIZE -include $PWD/tests/c/asan.h" $venv/bin/python -m pip install -q --disable-pip-version-check -e ".[$EXTRAS]"

loader=$($venv/bin/python -c 'import re; print(re.search(r"/\S*/ld-[^ \n]*", open("/proc/self/maps").read())[0])')
# libstdc++: what a C++ library throws (matplotlib's) is looked up by the sanitizer at the start, or never
libraries="$($CC -print-file-name=libasan.so) $($CC -print-file-name=libubsan.so) $($CC -print-file-name=libstdc++.so.6)"
python=$(cd $venv/bin && pwd)/python
# words, not a wrapper script: a shell in between would show in what tests look at (cwd, limits, signals)
export TEST_PYTHON="$loader --preload '$libraries' --argv0 '$python' '$(readlink -f "$python")'"
# handle_segv=0: some tests check that a rank ends by SIGSEGV, which the sanitizer's handler turns into SIGABRT
export ASAN_OPTIONS=detect_leaks=0:handle_segv=0:verify_asan_link_order=0:abort_on_error=1:detect_stack_use_after_return=0
export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
export PYTHONMALLOC=malloc
# the processes of pytest-xdist must be started so, too: their own Python would load the sanitizer late
jobs=${JOBS:-$((2 * $(nproc)))}
[ "$jobs" = 0 ] || set -- --tx "$jobs*popen//python=$TEST_PYTHON" --dist loadgroup --no-loadscope-reorder "$@"
eval exec "$TEST_PYTHON" -m pytest '"$@"'
