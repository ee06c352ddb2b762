#!/bin/sh
# libFuzzer, AddressSanitizer and UBSan on the parts of the core that take anybody's bytes: tests/c/fuzz/*.c, each for
# FUZZ_SECONDS. Called by `make fuzz`. What it finds new goes to .cache/fuzz; the seeds in tests/c/fuzz stay few.
set -eu
cd "$(dirname "$0")/.."
: "${FUZZ_SECONDS:=60}" "${FUZZ_TARGETS:=pump stat}"

if ! command -v clang >/dev/null; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        apt-get update -qq && apt-get install -y -qq clang >/dev/null
    else
        echo "scripts/fuzz.sh needs clang: install it (Debian: apt-get install clang)" >&2
        exit 1
    fi
fi

core=$(ls csrc/*/*.c | grep -v "^csrc/guard/\|^csrc/start/" | tr "\n" " ") # those are programs of their own
for target in $FUZZ_TARGETS; do
    found=.cache/fuzz/$target
    mkdir -p "$found"
    sources=tests/c/fuzz/$target.c
    case $target in pump) sources="$sources $core" ;; esac
    # shellcheck disable=SC2086
    clang -std=c11 -D_GNU_SOURCE -UNDEBUG -g -O2 -fsanitize=fuzzer,address,undefined \
        -fno-sanitize-recover=undefined -pthread -Icsrc -o ".cache/fuzz/$target.bin" $sources
    echo "fuzzing $target for $FUZZ_SECONDS s"
    if ! ".cache/fuzz/$target.bin" -max_total_time="$FUZZ_SECONDS" -max_len=600 -rss_limit_mb=4096 -timeout=60 \
        -artifact_prefix="$found-" -print_final_stats=1 "$found" "tests/c/fuzz/$target" >".cache/fuzz/$target.log" 2>&1; then
        tail -40 ".cache/fuzz/$target.log" >&2
        echo "scripts/fuzz.sh: $target found something; the input is $found-crash-... or the like" >&2
        exit 1
    fi
    grep "^stat::number_of_executed_units\|^stat::average" ".cache/fuzz/$target.log"
done
echo "fuzz: nothing found"
