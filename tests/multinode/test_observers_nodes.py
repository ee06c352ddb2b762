"""--trace and --live over several nodes: one trace and one table of all ranks, by the head's clock."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys

import pytest

from tests.display.test_chrome_trace import validate
from tests.display.test_live_table import (
    assert_in_order,
    shell,  # noqa: F401
    window,  # noqa: F401
)
from tests.launch.test_control import ask
from tests.multinode.test_by_hand import port  # noqa: F401  a fixture
from tests.multinode.test_clock_offset import late  # noqa: F401  a fixture
from tests.support.command import CHILDREN, COMMAND, play
from tests.support.hosts import Bed, agents
from tests.support.processes import marked
from tests.support.waiting import until

pytestmark = pytest.mark.xdist_group(__name__)  # one bed for all of them
TOKEN = {"INFINI_RUN_TOKEN": "a-secret-that-nobody-guesses"}


@pytest.fixture(scope="module")
def bed():
    bed = Bed(hosts=2)
    yield bed
    bed.close()


@pytest.fixture(autouse=True)
def no_agent_left():
    yield
    until(lambda: not agents())


@pytest.fixture(params=["hand", "ssh"])
def flags(request, bed, port, infini_run):  # noqa: F811
    """What the head's command is given for two nodes; by hand the other one is started, with the same words."""

    def make(*words, nproc=2):
        each = (f"--nproc_per_node={nproc}",)
        if request.param == "ssh":
            return ("--hosts=host[1-2]", f"--ssh_config={bed.config}", *each, *words)
        each += (f"--rdzv_endpoint=127.0.0.1:{port}", "--nnodes=2")
        infini_run("--node_rank=1", *each, *words, env={**os.environ, **TOKEN})
        return (*each, *words)

    return make


def read(path):
    content = json.loads(path.read_text())
    return validate(content), content["otherData"]


def rank_slices(events):
    return {e["args"]["rank"]: e for e in events if e["ph"] == "X" and e["name"].startswith("rank ")}


# ---- slow ranks


def test_slow_rank_is_found_among_the_ranks_of_all_nodes(bed, infini_run, tmp_path):
    """Each node alone would see that all of its ranks take equally long."""
    trace, report = tmp_path / "trace.json", tmp_path / "report.json"
    words = (sys.executable, f"{CHILDREN}/slow_loop.py", "meet", "2", "70")
    where = ("--hosts=host[1-2]", f"--ssh_config={bed.config}", "--nproc_per_node=2")
    command = infini_run(*where, f"--trace={trace}", f"--report={report}", *words)
    assert command.wait() == 0, command.err
    (slow,) = json.loads(report.read_text())["slow_ranks"]
    assert slow["rank"] == 2
    assert slow["step_s"] > 1.5 * slow["others_step_s"]
    assert slow["waited_s"] > 1.0
    lines = [line for line in command.err.decode().splitlines() if " was slow: " in line]
    assert [line.partition(" on ")[0] for line in lines] == ["infini-run: rank 2"]
    events, _ = read(trace)
    assert {e["pid"] for e in events if e["name"] == "progress"} == {e["pid"] for e in rank_slices(events).values()}


# ---- the trace


def test_a_trace_has_the_ranks_of_all_nodes(flags, infini_run, tmp_path):
    path = tmp_path / "trace.json"
    words = play("notify=READY=1", "say=hello", "exit=0")
    command = infini_run(*flags(f"--trace={path}", *words), env={**os.environ, **TOKEN})
    assert command.wait() == 0, command.err
    events, other = read(path)
    ranks = rank_slices(events)
    assert sorted(ranks) == [0, 1, 2, 3]
    pids = {int(line.split()[-2]): int(line.split()[-1]) for line in command.out.decode().splitlines()}
    assert {rank: e["args"]["pid"] for rank, e in ranks.items()} == pids
    assert len({e["pid"] for e in ranks.values()} | {command.pid}) == 5
    assert all(e["args"]["host"] and e["args"]["exit"] == "code 0" for e in ranks.values())
    assert {e["pid"] for e in events if e["ph"] == "C" and e["args"]["stdout"]} == {e["pid"] for e in ranks.values()}
    (run,) = [e for e in events if e["pid"] == command.pid and e["name"] == "run"]
    slack_us = 1e6 * sum(clock["bound_s"] for clock in other["clocks"])
    for e in ranks.values():  # by one clock: what the head waited for lies within its wait
        assert run["ts"] - slack_us <= e["ts"] <= e["ts"] + e["dur"] <= run["ts"] + run["dur"] + slack_us
    assert [clock["node"] for clock in other["clocks"]] == [0, 1]
    assert all(abs(clock["offset_s"]) <= clock["bound_s"] < 5 for clock in other["clocks"])  # one machine's clock
    assert other["world_size"] == 4


def test_times_of_a_node_with_other_clocks_are_by_the_heads(bed, late, window, tmp_path):  # noqa: F811
    path, python = tmp_path / "trace.json", tmp_path / "python"
    odd = f"export LD_PRELOAD={late} LATE=5000 EARLIER_BOOT=1000"
    python.write_text(f'#!/bin/sh\n[ $(uname -n) = host2 ] && {odd}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    words = ("--hosts=host[1-2]", f"--ssh_config={bed.config}", f"--remote_python={python}", f"--trace={path}")
    one = window(*words, "--live", "true")
    assert one.wait() == 0
    assert any("host2 is 1 h 23 min ahead" in line for line in one.text)
    events, other = read(path)
    assert [round(clock["offset_s"] / 100) for clock in other["clocks"]] == [0, 50]
    (run,) = [e for e in events if e["pid"] == one.pid and e["name"] == "run"]
    for e in rank_slices(events).values():
        bound_us = 1e6 * max(clock["bound_s"] for clock in other["clocks"])
        assert run["ts"] - bound_us <= e["ts"] <= e["ts"] + e["dur"] <= run["ts"] + run["dur"] + bound_us


def test_a_trace_tells_of_a_failure_and_of_all_that_was_stopped(flags, infini_run, tmp_path):
    path = tmp_path / "trace.json"
    command = infini_run(*flags(f"--trace={path}", *play("@3", "exit=3", "@*", "wait")), env={**os.environ, **TOKEN})
    assert command.wait() == 3, command.err
    ranks = rank_slices(read(path)[0])
    assert ranks[3]["args"]["failed"]
    assert ranks[3]["cname"] == "terrible"
    assert all(ranks[rank]["args"]["stopped"] for rank in (0, 1, 2))


def test_a_lost_node_is_in_the_trace_as_far_as_it_told(bed, infini_run, bell, tmp_path):
    path = tmp_path / "trace.json"
    ring = ["sh", "-c", f"echo $RANK > {shlex.quote(bell.path)}; exec sleep 1000"]
    command = infini_run("--hosts=host[1-2]", f"--ssh_config={bed.config}", f"--trace={path}", *ring)
    bell.hear(2)
    with bed.host_down(2):
        assert command.wait() == 1
    events, _ = read(path)
    assert rank_slices(events)[1]["args"]["exit"] == "its node was lost"
    assert any("lost node 1 (host2)" in e["name"] for e in events)


def test_restarts_are_in_the_trace(flags, infini_run, tmp_path):
    path = tmp_path / "trace.json"
    fail = ["sh", "-c", "exit $((1 - TORCHELASTIC_RESTART_COUNT))"]
    words = flags(f"--trace={path}", "--max_restarts=1", "--restart_delay=0", *fail, nproc=1)
    command = infini_run(*words, env={**os.environ, **TOKEN})
    assert command.wait() == 0, command.err
    events, _ = read(path)
    names = [e["name"].partition(" on ")[0] for e in events if e["ph"] == "X" and e["name"].startswith("rank")]
    assert sorted(names) == ["rank 0", "rank 0, attempt 1", "rank 1", "rank 1, attempt 1"]


def test_a_trace_that_cannot_be_made_is_refused_before_anybody_is_reached(bed, infini_run, tmp_path):
    command = infini_run("--hosts=host1,host2", f"--ssh_config={bed.config}", f"--trace={tmp_path}/no/t", "true")
    assert command.wait() == 2
    assert b"--trace" in command.err


def test_a_program_may_ask_for_a_trace_of_all_nodes(bed, tmp_path):
    code = (
        "import infini_run as ir, sys\n"
        f"report = ir.run(['true'], hosts=['host1', 'host2'], ssh_config={str(bed.config)!r}, trace='t.json')\n"
        "print(report.world_size)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, check=True)
    assert done.stdout == b"2\n"
    assert sorted(rank_slices(read(tmp_path / "t.json")[0])) == [0, 1]


def test_a_picture_is_drawn_of_the_report(flags, infini_run, tmp_path):
    pytest.importorskip("matplotlib")
    report = tmp_path / "r.json"
    command = infini_run(*flags(f"--report={report}", "true"), env={**os.environ, **TOKEN})
    assert command.wait() == 0, command.err
    drawn = infini_run(f"--plot={tmp_path}/p.svg", report)
    assert drawn.wait() == 0, drawn.err
    assert b"<!-- 4 done -->" in (tmp_path / "p.svg").read_bytes()  # of what is drawn as shapes the text is a comment


# ---- the table


def heads(window):  # noqa: F811
    return sum("RANK HOST" in line for line in window.text)


def row(window, rank):  # noqa: F811
    """A rank's last line: host, state and the rest."""
    found = [line.split() for line in window.text if line.split()[:1] == [str(rank)]]
    return found[-1][1:] if found else []


def test_the_table_has_the_ranks_of_all_nodes(flags, window, bell):  # noqa: F811
    stop = "[ $RANK = 2 ] && { read word; kill -STOP $$; }"
    ring = ["sh", "-c", f'echo "rank $RANK says hello"; echo $RANK $$ > {bell.path}; {stop}; exec cat']
    one = window("--stdin=all", *flags("--live", *ring), columns=120, **TOKEN)
    pids = dict(line.split() for line in bell.hear(4))
    one.see(lambda: all(row(one, rank)[1:2] == ["running"] and "says" in row(one, rank) for rank in range(4)))
    assert heads(one) == 1
    assert "4 ranks on 2 nodes" in one.text[0]
    assert all(row(one, rank)[2] == pids[str(rank)] for rank in range(4))
    assert any("times by this machine's clock, to within" in line for line in one.text)
    one.see(lambda: all(row(one, rank)[5][-1:] in ("K", "M") and row(one, rank)[4][-1:] == "%" for rank in range(4)))
    one.type("go\n")
    one.see(lambda: row(one, 2)[1:2] == ["suspended"] and row(one, 3)[-1] == "go")
    os.kill(one.pid, signal.SIGCONT)
    one.see(lambda: row(one, 2)[1:2] == ["running"])
    one.type("\x04")
    assert one.wait() == 0
    assert all(row(one, rank)[1] == "done" for rank in range(4))
    assert heads(one) == 2  # SIGCONT: a shell may have written below it meanwhile
    assert_in_order(one)


@pytest.mark.parametrize("key", ["\x03", "\x1c"])
def test_a_key_that_ends_it_leaves_the_terminal_in_order(flags, window, bell, key):  # noqa: F811
    ring = ["sh", "-c", f"ulimit -c 0; echo up > {bell.path}; exec sleep 1000"]
    one = window(*flags("--live", *ring), **TOKEN)
    bell.hear(4)
    one.see(lambda: all(row(one, rank)[1:2] == ["running"] for rank in range(4)))
    one.type(key)
    assert one.wait() == {"\x03": 130, "\x1c": 131}[key]
    assert all(row(one, rank)[1] == "stopped" for rank in range(4))
    assert_in_order(one)


def test_a_failure_is_told_below_the_table_and_lines_of_nodes_above(flags, window):  # noqa: F811
    one = window(*flags("--live", "--verbose", "sh", "-c", "[ $RANK = 3 ] && exit 7; exec sleep 1000"), **TOKEN)
    assert one.wait() == 7
    table = next(i for i, line in enumerate(one.text) if "RANK HOST" in line)
    assert any("started 2 of 2 ranks" in line for line in one.text[:table])
    assert row(one, 3)[1:3] == ["exit", "7"]
    assert any(line.startswith("infini-run: rank 3") for line in one.text[table:])
    assert_in_order(one)


def test_ranks_of_a_lost_node_are_lost(bed, window, bell):  # noqa: F811
    ring = ["sh", "-c", f"echo $RANK > {shlex.quote(bell.path)}; exec sleep 1000"]
    one = window("--hosts=host[1-2]", f"--ssh_config={bed.config}", "--live", *ring)
    bell.hear(2)
    one.see(lambda: row(one, 1)[1:2] == ["running"])
    with bed.host_down(2):
        assert one.wait() == 1
    assert row(one, 1)[:2] == ["host2", "lost"]
    assert_in_order(one)


def test_table_shows_the_rank_that_hangs_until_it_uses_cpu(flags, window):  # noqa: F811
    spins = "spin() { while :; do :; done; }"
    ring = ["sh", "-c", f"{spins}; trap spin USR1; [ $RANK = 1 ] || spin; sleep 1000 & wait"]
    one = window(*flags("--live", "--hang_timeout=1", *ring, nproc=1), **TOKEN)
    one.see(lambda: [row(one, rank)[1:2] for rank in range(2)] == [["running"], ["hung"]])
    ask("--send=USR1", "--ranks=1", one.pid)
    one.see(lambda: [row(one, rank)[1:2] for rank in range(2)] == [["running"], ["running"]])
    one.type("\x03")
    assert one.wait() == 130
    assert_in_order(one)


def test_table_shows_the_next_attempt_of_a_program(flags, window, bell):  # noqa: F811
    """The rank whose failure restarted its program runs again, with another pid."""
    fails = 'test "$RANK$TORCHELASTIC_RESTART_COUNT" = 10 && exit 3; test $TORCHELASTIC_RESTART_COUNT = 0'
    ring = ["sh", "-c", f"{fails} || echo $RANK $$ > {shlex.quote(bell.path)}; exec sleep 1000"]
    alone = ("--restart_scope=program", "--restart_delay=0", "--program=a", "sleep", "1000", ":", "--program=b")
    one = window(*flags("--live", *alone, "--max_restarts=1", *ring, nproc=1), **TOKEN)
    pids = dict(line.split() for line in bell.hear(2))
    one.see(
        lambda: all(any({"b", "running", pid} <= set(line.split()) for line in one.text) for pid in pids.values())
    )
    assert any("b: restart 1 of 1 in" in line for line in one.text)
    one.type("\x03")
    assert one.wait() == 130
    assert_in_order(one)


def test_ctrl_z_and_fg_draw_the_table_anew(bed, shell, bell):  # noqa: F811
    words = ["--hosts=host[1-2]", f"--ssh_config={bed.config}", "--live"]
    shell.type(shlex.join([*COMMAND, *words, "sh", "-c", f"echo up > {bell.path}; exec sleep 1000"]) + "\n")
    bell.hear(2)
    shell.see(lambda: row(shell, 1)[:2] == ["host2", "running"])
    shell.type("\x1a")
    shell.see(lambda: any("Stopped" in line for line in shell.text))
    shell.type("fg\n")
    shell.see(lambda: heads(shell) == 2 and row(shell, 1)[1:2] == ["running"])
    shell.type("\x03")
    shell.see(lambda: shell.text[shell.screen.cursor.y].startswith("next>"))


def test_sigkill_leaves_the_terminal_in_order_and_no_rank(flags, window, bell):  # noqa: F811
    one = window(*flags("--live", "sh", "-c", f"echo up > {bell.path}; exec sleep 1000"), **TOKEN)
    bell.hear(4)
    one.see(lambda: row(one, 3)[1:2] == ["running"])
    os.kill(one.pid, signal.SIGKILL)
    assert one.wait() == 128 + signal.SIGKILL
    assert_in_order(one)
    until(lambda: not marked())


def test_more_ranks_than_lines_show_who_failed(flags, window):  # noqa: F811
    fail = ["sh", "-c", "[ $RANK = 9 ] && exit 7; exec sleep 1000"]
    one = window(*flags("--live", "--keep_going", *fail, nproc=6), lines=10, **TOKEN)
    one.see(lambda: row(one, 9)[1:3] == ["exit", "7"] and any("and 7 more: 7 running" in line for line in one.text))
    one.type("\x03")
    assert one.wait() == 7


def test_without_a_terminal_it_says_so_and_goes_on(flags, infini_run):
    command = infini_run(*flags("--live", "sh", "-c", "echo said"), env={**os.environ, **TOKEN})
    assert command.wait() == 0
    assert command.err.count(b"--live: stderr is not a terminal") == 1
    assert command.out.count(b"said") == 4


def test_nothing_of_it_is_imported_where_nobody_asks(bed):
    code = (
        "import infini_run as ir, sys\n"
        f"ir.run(['true'], hosts=['host1', 'host2'], ssh_config={str(bed.config)!r})\n"
        "print([name for name in ('multinode.head.head_observers', 'display.live_table', "
        "'display.chrome_trace', 'display.relay') if f'infini_run.{name}' in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout == b"[]\n"
