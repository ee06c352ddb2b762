#!/bin/sh
# Which lines and branches of the core the tests go through, by gcov; called by `make coverage`. Arguments go to
# pytest, in place of the files named here. Fails below 90 % of either, of all files together.
#
# The command ends by _exit(2), where gcov writes nothing by itself (tests/c/coverage.c). A child counts with us until
# its exec, as it shares our memory; after a plain fork it does not. A launcher that a test SIGKILLs counts nothing.
# A branch is a way that a condition may go; those that no code can reach are left out (gcovr's words for it).
set -eu
cd "$(dirname "$0")/.."
: "${PYTHON:=python3}" "${COVERAGE_LEAST:=90}"
[ $# -gt 0 ] || set -- -q tests/launch/test_group.py tests/launch/test_output.py tests/launch/test_stdin.py tests/launch/test_stop.py \
    tests/launch/test_orphan.py tests/launch/test_exit_code.py tests/launch/test_start.py tests/launch/test_signal.py tests/launch/test_terminal.py \
    tests/launch/test_pid1.py tests/launch/test_isolate.py tests/api/test_launch.py tests/launch/faults/test_faults_core.py tests/launch/faults/test_faults_guard.py tests/launch/test_guard.py \
    tests/launch/test_cgroup_leaves.py tests/launch/test_ready.py tests/launch/test_hang.py tests/launch/faults/test_faults_io.py tests/launch/faults/test_faults_run.py \
    tests/launch/faults/test_faults_teardown.py tests/launch/faults/test_faults_entry.py

venv=$PWD/.venv/coverage source=$PWD/.venv/coverage-source
[ -x "$venv/bin/python" ] || "$PYTHON" -m venv "$venv"
"$venv/bin/python" -m pip install -q --disable-pip-version-check 'setuptools>=77.0.3' wheel 'cffi>=1.15' \
    'nvidia-ml-py>=12' 'pytest>=8' 'hypothesis>=6.100' 'gcovr>=7'
rm -rf "$source"
mkdir -p "$source"
cp -r csrc docs infini_run bin share scripts tests setup.py pyproject.toml MANIFEST.in README.md LICENSE "$source"
[ ! -d examples ] || cp -r examples "$source"
cd "$source"
rm -f infini_run/*.so infini_run/irun-guard
flags="--coverage -fprofile-update=atomic -fprofile-abs-path -O0 -DNDEBUG"
# not by pip: it would build, and look for the counters' files, in a folder that is gone by then
IRUN_GUARD_CFLAGS="$flags" IRUN_CFLAGS="$flags -include $source/tests/c/coverage.c" "$venv/bin/python" -W ignore setup.py -q build_ext --inplace \
    --build-temp "$source/build"
${CC:-gcc} -DPRELOAD -D_GNU_SOURCE -O1 -shared -fPIC -o "$source/coverage.so" tests/c/coverage.c

wrapped=$(sed -n 's/^wrapped="\(.*\)"$/\1/p' scripts/valgrind.sh)
link=
for name in $wrapped; do link="$link -Wl,--wrap=$name"; done
mkdir -p driver
core=$(cd driver && ls ../csrc/*/*.c | grep -v "/guard/\|/start/" | tr "\n" " ") # those are programs of their own
# shellcheck disable=SC2086
(cd driver && ${CC:-gcc} -std=c11 -D_GNU_SOURCE $flags -pthread -I../csrc $link -o driver ../tests/c/core_driver.c $core)
export GUARD="$source/infini_run/irun-guard"
export TEST_ROWS=all # a sample would count what it happens to meet
for how in "" nopidfd "clone" "clone nopidfd"; do driver/driver walk $how >/dev/null; done

for target in pump stat; do
    # another name: the counters' file of a source is named after it
    cp tests/c/fuzz/$target.c driver/fuzz_$target.c
    sources="fuzz_$target.c ../tests/c/fuzz/replay.c"
    [ $target = stat ] || sources="$sources $core"
    # shellcheck disable=SC2086
    (cd driver && ${CC:-gcc} -std=c11 -D_GNU_SOURCE $flags -pthread -I../csrc -o $target $sources)
    driver/$target tests/c/fuzz/$target/* >/dev/null
done

loader=$("$venv/bin/python" -c 'import re; print(re.search(r"/\S*/ld-[^ \n]*", open("/proc/self/maps").read())[0])')
python=$venv/bin/python
export PYTHONPATH="$source"
export TEST_PYTHON="$loader --preload '$source/coverage.so' --argv0 '$python' '$(readlink -f "$python")'"
status=0
eval "$TEST_PYTHON" -m pytest '"$@"' || status=$?
cd "$source"
"$venv/bin/gcovr" --root "$source" --filter 'csrc/' --exclude 'csrc/_irun.c' --exclude-throw-branches \
    --exclude-unreachable-branches --json "$source/coverage.json" --html-details "$source/coverage.html" >/dev/null
"$venv/bin/gcovr" --root "$source" --add-tracefile coverage.json --txt-metric line
"$venv/bin/gcovr" --root "$source" --add-tracefile coverage.json --txt-metric branch \
    --fail-under-line "$COVERAGE_LEAST" --fail-under-branch "$COVERAGE_LEAST"
echo "coverage: line by line in .venv/coverage-source/coverage.html"
exit $status
