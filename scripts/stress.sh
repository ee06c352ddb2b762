#!/bin/sh
# Every fault, again and again, until one fails; called by `make stress`.
#
#   JOBS=4           so many tests at a time
#   STRESS=100       rounds; a round is the whole fault matrix, with a seed of its own that a failure tells
#   LOAD=1           with a busy loop on every core meanwhile
#   TEST_SEED=N     begin with this seed: `TEST_SEED=N STRESS=1` repeats the round that told it
#   FAULT_TRIALS=N   at last, so many TERMs in the first milliseconds (10000; 0: none)
#
# Arguments go to pytest instead of the names of the fault matrix.
set -u
cd "$(dirname "$0")/.."
: "${PYTHON:=python3}" "${JOBS:=$((2 * $(nproc)))}" "${STRESS:=100}" "${LOAD:=0}" "${FAULT_TRIALS:=10000}" "${ROUND_S:=1200}"
: "${TEST_SEED:=$(od -An -N3 -tu4 /dev/urandom | tr -d ' ')}"
trials=$FAULT_TRIALS
unset FAULT_TRIALS
[ $# -gt 0 ] || set -- tests/launch/faults/test_faults_*.py
log=$(mktemp) busy=

finish() {
    for pid in $busy; do kill "$pid"; done
    rm -f "$log"
}
trap finish EXIT
trap 'exit 130' INT TERM HUP

if [ "$LOAD" != 0 ]; then
    for _ in $(seq "$(nproc)"); do
        setpriv --pdeathsig KILL sh -c 'while :; do :; done' &
        busy="$busy $!"
    done
fi

# A round that hangs is a failure too: every test has bounds of its own, far below this one.
run() {
    timeout --foreground --kill-after=30 --signal=INT "$ROUND_S" "$PYTHON" -m pytest -q -x -n "$JOBS" --dist loadgroup -p no:cacheprovider "$@" >"$log" 2>&1
}

started=$(date +%s)
for round in $(seq "$STRESS"); do
    began=$(date +%s)
    export TEST_SEED=$((TEST_SEED + 1))
    if ! run "$@"; then
        tail -n 60 "$log"
        echo "stress: round $round of $STRESS failed, LOAD=$LOAD; again: TEST_SEED=$((TEST_SEED - 1)) STRESS=1"
        exit 1
    fi
    echo "stress: round $round of $STRESS: $(tail -n 1 "$log"), $(($(date +%s) - began)) s, seed $TEST_SEED"
done
[ "$STRESS" -eq 0 ] || echo "stress: $STRESS rounds green, LOAD=$LOAD, $(($(date +%s) - started)) s"
if [ "$trials" -gt 0 ]; then
    export FAULT_TRIALS=$trials ROUND_S=7200
    if ! run tests/launch/faults/test_faults_spawn.py -k no_term_of_the_first_milliseconds_is_lost; then
        tail -n 60 "$log"
        echo "stress: a TERM of the first milliseconds was lost; again: TEST_SEED=$((TEST_SEED - 1)) STRESS=0"
        exit 1
    fi
    echo "stress: 0 of $trials TERMs of the first milliseconds lost: $(tail -n 1 "$log")"
fi
