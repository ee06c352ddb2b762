#!/bin/sh
# The core under valgrind's memcheck, without an interpreter: tests/c/core_driver.c. Called by `make valgrind`.
# No error and no byte that is not given back. A plain fork: valgrind knows no clone(CLONE_VM).
set -eu
cd "$(dirname "$0")/.."

if ! command -v valgrind >/dev/null; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        apt-get update -qq && apt-get install -y -qq valgrind >/dev/null
    else
        echo "scripts/valgrind.sh needs valgrind: install it (Debian: apt-get install valgrind)" >&2
        exit 1
    fi
fi

core=$(ls csrc/*/*.c | grep -v "^csrc/guard/\|^csrc/start/") # those are programs of their own
wrapped="malloc calloc realloc strdup epoll_create1 epoll_ctl timerfd_create signalfd pipe2 fcntl opendir mmap pthread_create"
link=
for name in $wrapped; do link="$link -Wl,--wrap=$name"; done
driver=$(mktemp) GUARD=$(mktemp)
trap 'rm -f "$driver" "$GUARD"' EXIT
export GUARD
${CC:-gcc} -std=c11 -D_GNU_SOURCE -O1 -Icsrc -o "$GUARD" csrc/guard/main.c csrc/guard/find_leftovers.c csrc/teardown/fork_chase.c csrc/sys/clock.c csrc/sys/procfs.c
${CC:-gcc} -std=c11 -D_GNU_SOURCE -g -O1 -UNDEBUG -pthread -Icsrc $link -o "$driver" tests/c/core_driver.c $core
"$driver" walk
"$driver" walk nopidfd
log=$(mktemp)
trap 'rm -f "$driver" "$log"' EXIT
for how in "" nopidfd; do
    status=0
    valgrind -q --error-exitcode=99 --leak-check=full --show-leak-kinds=all --errors-for-leak-kinds=all \
        --child-silent-after-fork=yes "$driver" walk $how 2>"$log" || status=$?
    grep -v '^--' "$log" >&2 || true # "unhandled syscall": an older valgrind knows no pidfd, and says ENOSYS
    [ $status = 0 ] || exit $status
done
echo "valgrind: no error, no leak"
