"""--console=fold, --timestamps and --color: equal lines once, and nothing lost, reordered or hidden by it."""

from __future__ import annotations

import datetime
import os
import re
import signal
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infini_run.core.c_structs import PIPE, TO_CONSOLE
from infini_run.core.line_fold import ALL, LineFold
from tests.support.command import Bell
from tests.support.group_case import Live, spec, wait_for_line
from tests.support.processes import is_full
from tests.support.pty_window import Window
from tests.support.waiting import until

LABEL = re.compile(rb"\[ranks? ([\d,-]+)(?: and (\d+) more)?( err)?( \+)?\] ")
TIME = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z) ")


def ranks_of(text):
    """0-2,5 as numbers."""
    bounds = [[int(number) for number in part.split(b"-")] for part in text.split(b",")]
    return [rank for each in bounds for rank in range(each[0], each[-1] + 1)]


def unfolded(console):
    """{rank: its lines}, as they would stand there without folding."""
    found = {}
    for line in console.splitlines(keepends=True):
        label = LABEL.match(line)
        assert label, line
        assert not label[2], "not all ranks are named"
        for rank in ranks_of(label[1]):
            found.setdefault(rank, []).append(line[label.end() :])
    return found


# ---- what is held, and when it leaves


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1), st.sampled_from([b"a\n", b"b\n", b"c\r", b"d"]))),
    st.integers(1, 6),
    st.lists(st.booleans(), max_size=200),
)
@settings(max_examples=300, deadline=None)
def test_fold_keeps_each_rank_and_its_order(lines, expected, leaves):
    fold, shown = LineFold(6, expected), []
    for now_ns, (rank, stream, line) in enumerate(lines):
        shown += fold.add(rank, stream, line, now_ns)
        if now_ns < len(leaves) and leaves[now_ns]:
            shown += fold.due(now_ns + 100_000_000)
    shown += fold.due(ALL)
    assert fold.due_s == float("inf")
    for rank in range(6):
        has = [(each.stream, each.line) for each in shown if rank in ranks_of(ranks(each))]
        assert has == [(stream, line) for of, stream, line in lines if of == rank]


def ranks(each):
    return each.ranks or b"%d" % each.rank


def test_fold_lets_line_of_one_rank_go_before_shared_line():
    fold = LineFold(3, 3)
    for rank, line in ((0, b"start\n"), (0, b"step\n"), (1, b"start\n"), (1, b"odd\n"), (1, b"step\n")):
        assert list(fold.add(rank, 0, line, 1)) == []
    assert [(ranks(each), each.line) for each in fold.due(ALL)] == [
        (b"0-1", b"start\n"),
        (b"1", b"odd\n"),
        (b"0-1", b"step\n"),
    ]


def test_fold_waits_until_all_wrote_or_time_is_up():
    fold = LineFold(3, 3)
    assert list(fold.add(0, 0, b"x\n", 1000)) == []
    assert list(fold.add(1, 0, b"x\n", 2000)) == []
    assert list(fold.due(100_000_999)) == []
    assert [ranks(each) for each in fold.due(100_001_000)] == [b"0-1"]
    for rank in range(3):
        assert list(fold.add(rank, 0, b"y\n", 3000)) == []
    assert [ranks(each) for each in fold.due(3000)] == [b"0-2"]


def test_fold_memory_is_bounded():
    fold = LineFold(2, 2)
    out = [each.line for n in range(5000) for each in fold.add(0, 0, b"%d\n" % n, 1)]
    assert 0 < 5000 - len(out) <= 1024
    out += [each.line for each in fold.due(ALL)]
    assert out == [b"%d\n" % n for n in range(5000)]
    wide = [each.line for n in range(200) for each in fold.add(0, 0, b"%d" % n + b"x" * 8000 + b"\n", 1)]
    assert len(wide) > 150
    too_long = [*fold.add(1, 0, b"x" * 10000, 1)]
    assert too_long[-1].line == b"x" * 10000
    assert fold.due_s == float("inf")


def test_fold_counts_ranks_beyond_eight_ranges():
    fold = LineFold(2000, 2000)
    for rank in range(0, 2000, 2):
        assert list(fold.add(rank, 1, b"even\n", 1)) == []
    [line] = fold.due(ALL)
    assert line.ranks == b"0,2,4,6,8,10,12,14 and 992 more"


# ---- the core


def test_core_flushes_held_lines_before_a_line_of_ours():
    reader, console = os.pipe()
    labels = ((b"[ranks ", b"] "), (b"[ranks ", b" err] "))
    workers = [spec(n, "/bin/cat", stdio=(-1, PIPE, PIPE), output=(TO_CONSOLE, TO_CONSOLE)) for n in range(3)]
    gates = [os.pipe() for _ in workers]
    for worker, (gate, _) in zip(workers, gates, strict=True):
        worker.stdio[0] = gate
    with Live(*workers, console=(console, console), fold_label=labels, first_rank=4) as live:
        for n, text in ((0, b"a\nb\n"), (2, b"a\n")):
            os.write(gates[n][1], text)
        live.until(lambda: all(live.group.activity(n)[0] for n in (0, 2)))
        live.group.print_line("ours")
        assert wait_for_line(reader) == b"[ranks 4,6] a\n"
        assert wait_for_line(reader) == b"[rank 0] b\n"
        assert wait_for_line(reader) == b"ours\n"
        for gate in gates:
            os.close(gate[1])
        live.end()
    for gate in gates:
        os.close(gate[0])
    os.close(reader)
    os.close(console)


# ---- the command


@pytest.fixture
def at_once(infini_run, tmp_path):
    """Run a shell script on every rank while the launcher is suspended: it reads what all wrote in one moment."""
    bell, gates = Bell(tmp_path / "bell"), []

    def run(script, *flags, nproc=4, code=0):
        gates.extend(Bell(tmp_path / f"gate.{rank}") for rank in range(nproc))
        meet = f"echo > {bell.path}; read go < {tmp_path}/gate.$RANK"
        script = f"{meet}; {script}; {meet}; exit {code}"
        command = infini_run(f"--nproc_per_node={nproc}", "--console=fold", *flags, "sh", "-c", script)
        bell.hear(nproc)
        command.signal(signal.SIGSTOP)
        for gate in gates:
            gate.ring("go")
        bell.hear(nproc)
        command.signal(signal.SIGCONT)
        for gate in gates:
            gate.ring("go")
        assert command.wait() == code, command.err
        return command

    yield run
    for each in (bell, *gates):
        each.close()


def test_equal_lines_are_one_line(at_once):
    command = at_once("echo loading; echo warned >&2; echo $((RANK / 2)); printf end")
    assert command.out.splitlines()[0] == b"[ranks 0-3] loading"
    assert {b"[ranks 0-1] 0", b"[ranks 2-3] 1"} <= set(command.out.splitlines())
    assert all(lines[-1] == b"end\n" for lines in unfolded(command.out).values())  # each comes when its rank ends
    assert command.err == b"[ranks 0-3 err] warned\n"


def test_line_that_differs_is_shown_and_splits_nothing(at_once):
    command = at_once('echo a; if [ $RANK = 2 ]; then echo "loss nan"; fi; echo b; echo c')
    assert command.out.splitlines() == [b"[ranks 0-3] a", b"[rank 2] loss nan", b"[ranks 0-3] b", b"[ranks 0-3] c"]


def test_logs_have_all_that_is_folded(at_once, tmp_path):
    at_once("echo same; echo err >&2", f"--log_dir={tmp_path}/logs")
    for rank in range(4):
        assert sorted((tmp_path / f"logs/rank_{rank}.log").read_text().splitlines()) == ["err: err", "same"]


def test_report_comes_after_all_that_was_held(at_once):
    command = at_once("echo last words >&2", code=3)
    report = command.err.index(b" failed: exit code 3")
    assert command.err.index(b"[ranks 0-3 err] last words\n") < report


def test_long_lines_and_bars_are_whole_and_in_order(infini_run):
    program = (
        "import os, sys; w = lambda text: os.write(1, text.encode())\n"
        "w('a\\n' + 'x' * 9000 + '\\n' + '10%\\r20%\\r30%\\r\\n' + 'y' * 70000); w('z\\nend\\n')\n"
    )
    command = infini_run("--nproc_per_node=3", "--console=fold", sys.executable, "-c", program)
    assert command.wait() == 0
    found = {}
    for line in command.out.splitlines(keepends=True):
        label = LABEL.match(line)
        for rank in ranks_of(label[1]):
            found.setdefault(rank, []).append((bool(label[4]), line[label.end() :]))
    assert sorted(found) == [0, 1, 2]
    for pieces in found.values():
        text = b""
        for at, (_, piece) in enumerate(pieces):
            is_cut = at + 1 < len(pieces) and pieces[at + 1][0]
            text += piece[:-1] if is_cut else piece
        assert text == b"a\n" + b"x" * 9000 + b"\n10%\r20%\r30%\r\n" + b"y" * 70000 + b"z\nend\n"


@pytest.mark.parametrize("nproc", [8])
def test_flood_to_slow_reader_loses_nothing(infini_run, nproc):
    script = "i=0; while [ $i -lt 3000 ]; do echo line $i; [ $((i % 7)) != $RANK ] || echo own $i; i=$((i+1)); done"
    command = infini_run(f"--nproc_per_node={nproc}", "--console=fold", "sh", "-c", script)
    until(lambda: is_full(command.process.stdout))
    assert command.wait() == 0
    found = unfolded(command.out)
    for rank in range(nproc):
        want = []
        for i in range(3000):
            want += [b"line %d\n" % i, *([b"own %d\n" % i] if i % 7 == rank else [])]
        assert found[rank] == want


def test_single_line_is_shown_while_ranks_wait(infini_run):
    """What nobody else writes is held for a moment, not until the end."""
    command = infini_run(
        "--nproc_per_node=2",
        "--console=fold",
        "--stdin=0",
        *("sh", "-c", "[ $RANK = 1 ] || echo asked; read x; echo got $x"),
        stdin=subprocess.PIPE,
    )
    command.read_until(b"[rank 0] asked\n")
    command.process.stdin.write(b"it\n")
    command.process.stdin.flush()
    command.read_until(b"[rank 0] got it\n")
    command.process.stdin.close()
    command.process.stdin = None
    assert command.wait() == 0


# ---- the time


def test_timestamps_are_utc_to_the_millisecond(infini_run):
    before = datetime.datetime.now(datetime.timezone.utc).replace(tzinfo=None)
    command = infini_run("--nproc_per_node=2", "--timestamps", "sh", "-c", "echo out; echo err >&2")
    assert command.wait() == 0
    after = datetime.datetime.now(datetime.timezone.utc).replace(tzinfo=None)
    for console, rest in ((command.out, b"out"), (command.err, b"err")):
        lines = console.splitlines()
        assert len(lines) == 2
        for line in lines:
            stamp = TIME.match(line)
            at = datetime.datetime.strptime(stamp[1].decode(), "%Y-%m-%dT%H:%M:%S.%fZ")
            assert before - datetime.timedelta(milliseconds=1) <= at <= after
            assert LABEL.match(line, stamp.end())
            assert line.endswith(rest)


@pytest.mark.parametrize(("console", "rest"), [("lines", b"x"), ("prefix", b"[rank 0] x"), ("fold", b"[rank 0] x")])
def test_timestamps_are_before_lines_of_each_kind(infini_run, tmp_path, console, rest):
    command = infini_run("--timestamps", f"--console={console}", f"--log_dir={tmp_path}", "echo", "x")
    assert command.wait() == 0
    assert TIME.sub(b"", command.out) == rest + b"\n"
    assert len(command.out) > len(rest) + 20
    assert (tmp_path / "rank_0.log").read_bytes() == b"x\n"


def test_timestamps_conflict_with_inherit(infini_run):
    command = infini_run("--timestamps", "--console=inherit", "true")
    assert command.wait() == 2
    assert b"--timestamps: conflicts with --console=inherit" in command.err


# ---- color


@pytest.mark.parametrize(
    ("flags", "environ", "is_colored"),
    [
        ((), {}, True),
        ((), {"NO_COLOR": "1"}, False),
        ((), {"NO_COLOR": ""}, True),
        ((), {"TERM": "dumb"}, False),
        (("--color=never",), {}, False),
        (("--color=always",), {"NO_COLOR": "1"}, True),
    ],
)
def test_labels_have_color_on_terminal(flags, environ, is_colored):
    window = Window("--console=prefix", *flags, "sh", "-c", "echo out; echo err >&2", **environ)
    try:
        assert window.wait() == 0
    finally:
        window.close()
    assert (b"\033[36m[rank 0]\033[0m out" in window.seen) == is_colored
    assert (b"\033[33m[rank 0 err]\033[0m err" in window.seen) == is_colored
    assert (b"[rank 0] out" in window.seen) != is_colored


@pytest.mark.parametrize(("flag", "out"), [("auto", b"[rank 0] x\n"), ("always", b"\033[36m[rank 0]\033[0m x\n")])
def test_labels_have_color_in_pipe_only_if_asked(infini_run, flag, out):
    command = infini_run("--console=prefix", f"--color={flag}", "echo", "x")
    assert command.wait() == 0
    assert command.out == out


def test_color_surrounds_labels_of_folded_lines(at_once):
    assert at_once("echo x", "--color=always").out == b"\033[36m[ranks 0-3]\033[0m x\n"
