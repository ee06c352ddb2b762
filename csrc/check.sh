#!/bin/sh
# Compiles the core with every warning as an error, by both compilers, optimised and not, and has it analysed and
# its form compared with .clang-format. Called by `make lint` with the warning flags.
set -eu
cd "$(dirname "$0")/.."
warnings=${1:-"-Wall -Wextra -Werror"}
flags="-std=c11 -D_GNU_SOURCE -Icsrc"
sources="$(ls csrc/*/*.c)"

missing=
for tool in gcc clang clang-format clang-tidy; do
    command -v $tool >/dev/null || missing="$missing $tool"
done
if [ -n "$missing" ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get update -qq && apt-get install -y -qq gcc clang clang-format clang-tidy >/dev/null
    missing=
fi
if [ -n "$missing" ]; then
    echo "csrc/check.sh needs$missing: install them (Debian: apt-get install gcc clang clang-format clang-tidy)" >&2
    exit 1
fi

for compiler in gcc clang; do
    for level in -O2 -O0; do
        for source in $sources; do
            $compiler $flags $warnings $level -c -o /dev/null "$source"
        done
    done
done
# between clone and exec nothing may be called: a first call would be resolved in memory that is shared; and before
# libc has started nothing of it
calls_nothing() { # FILE [SYMBOL]
    object=$(mktemp)
    gcc $flags -O2 -fno-stack-protector -c -o "$object" "$1"
    undefined=$(nm -u "$object" | grep -v " ${2:-nothing}\$" || true)
    rm -f "$object"
    [ -z "$undefined" ] || { echo "$1 calls $undefined" >&2; exit 1; }
}
case $(uname -m) in x86_64 | aarch64)
    calls_nothing csrc/spawn/child.c
    calls_nothing csrc/guard/freestanding_start.c _start
    calls_nothing csrc/start/main.c
    ;;
esac
clang-tidy --quiet $sources -- $flags
clang-format --dry-run -Werror $sources
echo "csrc: no warnings"
