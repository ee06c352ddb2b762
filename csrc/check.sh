#!/bin/sh
# Compiles the core with every warning as an error, by both compilers, optimised and not, and has it analysed and
# its form compared with .clang-format. Called by `make lint` with the warning flags.
set -eu
cd "$(dirname "$0")/.."
warnings=${1:-"-Wall -Wextra -Werror"}
flags="-std=c11 -D_GNU_SOURCE -Icsrc"

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
        for source in csrc/[!_]*.c; do
            $compiler $flags $warnings $level -c -o /dev/null "$source"
        done
    done
done
# between clone and exec nothing may be called: a first call would be resolved in memory that is shared
case $(uname -m) in x86_64 | aarch64)
    object=$(mktemp)
    gcc $flags -O2 -c -o "$object" csrc/child.c
    undefined=$(nm -u "$object")
    rm -f "$object"
    [ -z "$undefined" ] || { echo "csrc/child.c calls $undefined" >&2; exit 1; }
    ;;
esac
clang-tidy --quiet csrc/[!_]*.c -- $flags
clang-format --dry-run -Werror csrc/[!_]*.c
echo "csrc: no warnings"
