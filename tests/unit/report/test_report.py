"""How a launch ended, told in ten lines and in JSON."""

from __future__ import annotations

import json
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infini_run.record import replace
from infini_run.report.exit import Exit, LeftoverProcess
from infini_run.report.hang_snapshot import HangSnapshot
from infini_run.report.report import TEXT_LINES, Report
from infini_run.report.text import signal_name
from infini_run.system.procfs import ProcessSnapshot, ThreadSnapshot


def ended(rank=0, **fields):
    return replace(
        Exit(rank=rank, local_rank=rank, host="node1", pid=100 + rank, code=0, start_s=10.0, end_s=12.5), **fields
    )


def report(*exits, **fields):
    first = next((e for e in exits if e.is_failure), None)
    return Report(
        launch_id="ir-1",
        run_id="job",
        host="node1",
        world_size=len(exits),
        start_s=10.0,
        end_s=13.0,
        exits=exits,
        **({"first_failure": first} | fields),
    )


# ---- one exit


@pytest.mark.parametrize(
    ("fields", "is_failure", "shell_code"),
    [
        ({}, False, 0),
        ({"code": 3}, True, 3),
        ({"code": None, "signal": 9}, True, 137),
        ({"code": None, "signal": 15, "stopped": True}, False, 143),
        ({"code": 1, "stopped": True}, False, 1),
        ({"code": None, "status_lost": True}, True, 1),
        ({"code": 127, "start_failure": "executing the program", "start_errno": 2}, True, 127),
        ({"code": 126, "start_failure": "executing the program", "start_errno": 8}, True, 126),
        ({"code": None, "end_s": None}, False, 1),
        ({"code": 0, "stopped": True, "watchdog_reason": "hung"}, True, 1),
        ({"code": None, "signal": 15, "stopped": True, "watchdog_reason": "was not ready"}, True, 1),
    ],
)
def test_a_failure_is_what_ended_badly_by_itself(fields, is_failure, shell_code):
    exit_ = ended(**fields)
    assert (exit_.is_failure, exit_.shell_code) == (is_failure, shell_code)


# ---- the code of all


@pytest.mark.parametrize(
    ("made", "code"),
    [
        (report(ended()), 0),
        (report(ended(), ended(1, code=7)), 7),
        (report(ended(code=None, signal=11)), 139),
        (report(ended(code=None, signal=15, stopped=True), received_signal=15), 143),
        (report(ended(code=None, signal=2, stopped=True), received_signal=2), 130),
        (report(ended(), received_signal=15), 0),
        (report(ended(), received_signal=15, silent=1), 143),
        (report(ended(), ended(1, code=7, stopped=True), received_signal=15), 143),
        (report(ended(), received_signal=15, stuck=(LeftoverProcess(pid=5, name="nfs", state="D"),)), 1),
        (report(ended(code=3), received_signal=15), 3),
        (report(ended(), stuck=(LeftoverProcess(pid=5, name="nfs", state="D"),)), 1),
        (report(ended(code=4), stuck=(LeftoverProcess(pid=5, name="nfs", state="D"),)), 4),
    ],
)
def test_our_code_is_the_first_failures_then_the_signal_that_we_were_told(made, code):
    assert made.exit_code == code


# ---- text


def test_success_says_nothing():
    assert report(ended(), ended(1)).text() == ""


def test_a_failure_is_told_with_rank_host_code_pid_and_duration():
    assert (
        report(ended(), ended(1, code=3)).text()
        == "infini-run: rank 1 on node1 failed: exit code 3 (pid 101, after 2.5 s)"
    )


@pytest.mark.parametrize(
    ("reasons", "said"),
    [
        (("hung: no progress for 2 s", "hung: no progress for 2 s"), "1 more hung"),
        (("was not ready after 2 s", "was not ready after 2 s"), "1 more not ready in time"),
        (("hung: no output for 2 s", "", "hung: no output for 2 s"), "1 more failed, 1 more hung"),
    ],
)
def test_others_are_counted_by_what_was_wrong_with_them(reasons, said):
    ends = [ended(rank, code=1, watchdog_reason=reason) for rank, reason in enumerate(reasons)]
    assert report(*ends).text().splitlines()[0].endswith(f"; {said}")


def test_everything_there_is_to_know_comes_in_one_order():
    first = ended(
        code=None,
        signal=9,
        out_of_memory=True,
        error_message="it broke",
        last_lines=tuple(f"line {i}" for i in range(9)),
        log="logs/rank_0.log",
    )
    stopped = ended(1, code=None, signal=15, stopped=True)
    text = report(
        first, stopped, ended(2, code=1), leftover_processes=(LeftoverProcess(pid=7, name="loader"),)
    ).text()
    how = "killed by SIGKILL (by the kernel, for memory) (pid 100, after 2.5 s)"
    assert text.splitlines() == [
        f"infini-run: rank 0 on node1 failed: {how}; 1 more failed, 1 other was stopped",
        "  error: it broke",
        *(f"  | line {i}" for i in range(4, 9)),
        "  log: logs/rank_0.log",
        "  next: give the job more memory, or use less in each rank",
        "infini-run: stopped 1 process left behind: loader (7)",
    ]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"code": None, "signal": 11, "dumped_core": True}, "killed by SIGSEGV (core dumped)"),
        ({"code": None, "signal": 15}, "killed by SIGTERM"),
        ({"code": None, "signal": 37}, "killed by SIGRTMIN+3"),
        (
            {"code": None, "status_lost": True},
            "exit code unknown: this program ignores SIGCHLD, or waits for every child",
        ),
        (
            {"code": 126, "start_failure": "executing the program", "start_errno": 7},
            "could not be started: executing the program: Argument list too long",
        ),
    ],
)
def test_an_end_is_named(fields, said):
    assert said in report(ended(**fields)).text()


@pytest.mark.parametrize(
    ("fields", "hint"),
    [
        ({"code": None, "signal": 9}, "dmesg"),
        ({"code": None, "signal": 7}, "df /dev/shm"),
        ({"code": 126, "start_failure": "executing the program", "start_errno": 7}, "ulimit -s"),
    ],
)
def test_what_to_do_next_is_said_where_we_know(fields, hint):
    text = report(ended(**fields)).text()
    assert "  next: " in text
    assert hint in text


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0, "0 ms"),
        (0.0123, "12 ms"),
        (1, "1.0 s"),
        (119.94, "119.9 s"),
        (120, "2 min 0 s"),
        (3599, "59 min 59 s"),
        (3600, "1 h 0 min"),
        (90061, "25 h 1 min"),
    ],
)
def test_a_duration_is_told_in_units_that_fit(seconds, said):
    assert f"after {said})" in report(ended(code=1, start_s=0.0, end_s=float(seconds))).text()


def test_a_lone_rank_that_took_ctrl_c_itself_is_not_told_to_the_one_who_typed_it():
    assert report(ended(code=None, signal=2), user_interrupted=True).text() == ""
    assert report(ended(code=None, signal=2), user_interrupted=True).exit_code == 130


def test_what_sigkill_did_not_end_is_named_with_its_state():
    text = report(ended(), stuck=(LeftoverProcess(pid=5, name="dd", state="D"),)).text()
    assert text == "infini-run: process 5 (dd) survived SIGKILL (state D); leaving it"


def test_process_that_survived_sigkill_is_not_among_those_that_were_stopped():
    strays = tuple(LeftoverProcess(pid=pid, name=f"p{pid}") for pid in (5, 6))
    stuck = (LeftoverProcess(pid=5, name="p5", state="D"),)
    survived = "infini-run: process 5 (p5) survived SIGKILL (state D); leaving it"
    assert report(ended(), leftover_processes=strays[:1], stuck=stuck).text() == survived
    text = report(ended(), leftover_processes=strays, leftover_count=2, stuck=stuck).text()
    assert text == f"{survived}\ninfini-run: stopped 1 process left behind: p6 (6)"


def test_many_strays_are_counted_and_some_named():
    strays = tuple(LeftoverProcess(pid=i, name=f"p{i}") for i in range(6))
    text = report(ended(), leftover_processes=strays).text()
    assert text == "infini-run: stopped 6 processes left behind: p0 (0), p1 (1), p2 (2), p3 (3), ..."
    text = report(ended(), leftover_processes=strays, leftover_count=20_000).text()
    assert "stopped 20000 processes left behind" in text


LINES = st.lists(st.text(st.characters(blacklist_categories=["Cs", "Cc", "Zl", "Zp"])), max_size=30).map(tuple)
STRAYS = st.lists(
    st.builds(lambda pid: LeftoverProcess(pid=pid, name="p", state="D"), st.integers(1)), max_size=30
).map(tuple)


@given(LINES, STRAYS, STRAYS, st.booleans(), st.booleans())
def test_a_report_is_never_more_than_ten_lines(lines, strays, stuck, has_log, has_error):
    first = ended(
        code=None,
        signal=9,
        last_lines=lines,
        log="x.log" if has_log else "",
        error_message="e" if has_error else "",
    )
    text = report(first, leftover_processes=strays, stuck=stuck).text()
    assert 1 <= len(text.split("\n")) <= TEXT_LINES
    assert text.startswith("infini-run: rank 0 on node1 failed")


LOOK = HangSnapshot(
    rank=0,
    pid=7,
    host="node1",
    time_s=1.0,
    kind="hung",
    why="no CPU used for 30.0 s",
    status="loading \x1b[2J",
    processes=tuple(
        ProcessSnapshot(pid=pid, name="p", state="S", is_python=True, threads=(
            ThreadSnapshot(tid=pid, name="p", state="S", wchan="do_wait", syscall="61 0x1", stack=("a+0x1", "b+0x2")),
        ))
        for pid in range(7, 12)
    ),
    python=("Process 7: p\n\nThread 8 (idle)\n    other (o.py:1)\nThread 7 (idle): \"MainThread\"\n"
            + "".join(f"    f{n} (x.py:{n})\n" for n in range(9)),),
    file="/ex/logs/hang_0.txt",
)  # fmt: skip


def test_a_rank_that_we_stopped_the_job_for_is_told_with_what_it_was_in():
    first = ended(
        signal=15,
        code=None,
        stopped=True,
        watchdog_reason=LOOK.sentence,
        last_lines=tuple("abcdefg"),
        log="logs/rank_0.log",
    )
    made = report(first, ended(1, signal=15, code=None, stopped=True), first_failure=first, snapshots=(LOOK,))
    assert made.exit_code == 1
    assert made.text().splitlines() == [
        "infini-run: rank 0 on node1 hung: no CPU used for 30.0 s (pid 100); 1 other was stopped",
        "  status: loading \\x1b[2J",
        "  in: p (7) do_wait, p (8) do_wait, p (9) do_wait, and 2 more",
        "  | f0 (x.py:0)",
        "  | f1 (x.py:1)",
        "  | f2 (x.py:2)",
        "  | f3 (x.py:3)",
        "  | g",
        "  log: logs/rank_0.log",
        "  details: logs/hang_0.txt",
    ]
    (look,) = json.loads(json.dumps(made.to_json()))["snapshots"]
    assert (look["kind"], look["why"], len(look["processes"])) == ("hung", "no CPU used for 30.0 s", 5)
    assert look["python"] == list(LOOK.python)
    assert look["processes"][0]["threads"][0]["stack"] == ["a+0x1", "b+0x2"]


def test_the_file_of_a_look_has_all_of_it_and_steers_no_terminal():
    text = LOOK.text()
    assert all(line.isprintable() for line in text.splitlines())
    for part in ("hung: no CPU used", "f8 (x.py:8)", "process 11 p S", "do_wait syscall 61 0x1", "    b+0x2"):
        assert part in text


# ---- JSON


def test_the_json_says_the_same_and_more():
    first = ended(1, code=None, signal=11, dumped_core=True, last_lines=("a", "b"), log="l", error_message="m")
    made = report(
        ended(user_s=1.5, system_s=0.5, max_rss_kib=99),
        first,
        leftover_processes=(LeftoverProcess(pid=3, name="s"),),
        notices=("n",),
    )
    content = json.loads(json.dumps(made.to_json()))
    ranks = content.pop("ranks")
    assert content == {
        "format": 2,
        "launch_id": "ir-1",
        "run_id": "job",
        "host": "node1",
        "world_size": 2,
        "exit_code": 139,
        "start": 10.0,
        "end": 13.0,
        "received_signal": None,
        "first_failure": 1,
        "leftover_processes": [{"pid": 3, "name": "s"}],
        "restarts": 0,
        "earlier_failures": [],
        "not_restarted": None,
        "leftover_count": 1,
        "stuck": [],
        "notices": ["n"],
        "snapshots": [],
        "clocks": [],
        "preload": [],
        "slow_ranks": [],
        "ended_by": None,
        "unanswered": [],
        "error": None,
        "lost": [],
    }
    assert ranks[0]["rusage"] == {"user": 1.5, "system": 0.5, "max_rss_kib": 99}
    assert ranks[1] == {
        "rank": 1,
        "program": None,
        "program_rank": 0,
        "local_rank": 1,
        "host": "node1",
        "pid": 101,
        "start": 10.0,
        "start_method": "exec",
        "ready": None,
        "end": 12.5,
        "exit_code": None,
        "signal": "SIGSEGV",
        "sent_by": None,
        "dumped_core": True,
        "out_of_memory": False,
        "failed": True,
        "asked_again": False,
        "stopped": False,
        "killed_after": None,
        "stuck": False,
        "start_failure": None,
        "error_message": "m",
        "last_lines": ["a", "b"],
        "status": None,
        "progress": None,
        "progress_time": None,
        "watchdog_reason": None,
        "lost": False,
        "log": "l",
        "rusage": {"user": 0.0, "system": 0.0, "max_rss_kib": 0},
    }


@pytest.mark.parametrize("number", range(1, 65))
def test_every_signal_has_a_name(number):
    name = signal_name(number)
    if name in signal.Signals.__members__:
        assert signal.Signals[name] == number
    else:
        assert name in (f"SIGRTMIN+{number - signal.SIGRTMIN}", f"signal {number}")


def test_killed_ranks_have_the_names_of_their_programs():
    killed = {"code": None, "signal": 9, "stopped": True, "killed_after_s": 2.5}
    exits = [
        ended(rank, program=program, program_rank=at, **(killed if rank != 1 else {}))
        for rank, (program, at) in enumerate([("trainer", 0), ("trainer", 1), ("trainer", 2), ("actor", 0)])
    ]
    text = report(*exits, first_failure=None, received_signal=15).text()
    assert text == "infini-run: trainer 0,2, actor 0 did not exit within 2.5 s, and were killed"
