"""--top: the table of --live for a launch in another terminal."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import termios

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infini_run.control.client import ask as ask_launch
from infini_run.errors import InfiniRunError
from infini_run.questions import top_view
from tests.display.test_live_table import window  # noqa: F401
from tests.launch.test_control import ask, found, listed, running, stop, waiting  # noqa: F401
from tests.launch.test_slow_ranks import LOOP, TIMES
from tests.support.command import play_in_python
from tests.support.waiting import until

pytestmark = pytest.mark.xdist_group("top")  # one launch for all


def test_without_a_terminal_the_table_comes_once(running):  # noqa: F811
    command, ranks = running(
        "--console=lines", "--keep_going", nproc=3, program=play_in_python("say=up", "@2", "exit=3", "@*", "wait")
    )
    # a rank has a CPU from 0.2 s after its start on
    until(lambda: "exit 3" in (table := ask("--top", command.pid)) and table.count("%") >= 2)
    head, columns, *rows = ask("--top", command.pid).splitlines()
    assert head.startswith("infini-run, 3 ranks, 0:")
    assert head.endswith(": 1 failed, 2 running")
    assert columns.split() == ["RANK", "STATE", "PID", "UP", "CPU", "MEM", "LAST", "LINE"]
    words = [row.split() for row in rows]
    assert [row[:2] for row in words] == [["0", "running"], ["1", "running"], ["2", "exit"]]
    assert [int(row[2]) for row in words[:2]] == [ranks[0], ranks[1]]
    assert words[0][5].endswith("M")
    assert "up" in words[0]
    command.signal(signal.SIGTERM)
    assert command.wait() == 3


def test_table_between_two_attempts_has_the_last_one(waiting):  # noqa: F811
    command, _ = waiting
    title, _, *ranks = ask("--top", command.pid).splitlines()
    assert title.startswith("infini-run, 2 ranks, "), title
    assert " exit 3 " in "".join(ranks)
    stop(command)


def states(command):
    """The state of each rank in the table, and what the title counts."""
    title, _, *rows = ask("--top", command.pid).splitlines()
    return [row.split()[1] for row in rows], title.split(": ")[1]


WAITS_THEN_SPINS = """if True:
    import os, signal
    def spin(*_):
        while True: pass
    signal.signal(signal.SIGUSR1, spin)
    print("up", os.environ["RANK"], os.getpid(), flush=True)
    spin() if os.environ["RANK"] == "0" else signal.pause()
"""


def test_rank_that_hangs_is_shown_until_it_uses_cpu(running):  # noqa: F811
    program = (sys.executable, "-c", WAITS_THEN_SPINS)
    command, ranks = running("--hang_timeout=1s", "--console=lines", program=program)
    command.read_error_until(b"hung: no output and no CPU used")
    assert states(command) == (["running", "hung"], "1 hung, 1 running")
    os.kill(ranks[1], signal.SIGUSR1)
    until(lambda: states(command) == (["running", "running"], "2 running"))
    stop(command)


def test_rank_that_sends_signs_of_life_is_shown_until_the_next(running):  # noqa: F811
    """What it writes meanwhile is none."""
    script = "import os, signal\nfrom infini_run.rank_messages import notify_launcher\n"
    script += "signal.signal(signal.SIGUSR1, lambda *_: print('still', flush=True))\n"
    script += "signal.signal(signal.SIGUSR2, lambda *_: notify_launcher('WATCHDOG=1'))\n"
    script += "notify_launcher('WATCHDOG=1')\nprint('up', 0, os.getpid(), flush=True)\n"
    script += "while True: signal.pause()\n"
    program = (sys.executable, "-c", script)
    command, ranks = running("--hang_timeout=1s", "--console=lines", nproc=1, program=program)
    command.read_error_until(b"hung: no WATCHDOG=1")
    os.kill(ranks[0], signal.SIGUSR1)
    command.read_until(b"still")
    assert states(command) == (["hung"], "1 hung")
    os.kill(ranks[0], signal.SIGUSR2)
    until(lambda: states(command) == (["running"], "1 running"))
    stop(command)


def test_slow_rank_is_shown(infini_run):
    command = infini_run("--standalone", "--nproc_per_node=4", *LOOP, "meet", "2", "1000", *TIMES)
    until(lambda: listed(command.pid))
    until(lambda: states(command) == (["running", "running", "slow", "running"], "1 slow, 3 running"))
    stop(command)


def test_q_ends_the_view_and_not_the_job(running, window):  # noqa: F811
    command, ranks = running("--console=lines")
    view = window("--top", command.pid)
    view.see(lambda: view.row(0)[2:3] == [str(ranks[0])])
    assert not termios.tcgetattr(view.slave)[3] & termios.ICANON
    view.type("xq")
    assert view.wait() == 0
    assert termios.tcgetattr(view.slave) == view.modes
    assert view.row(1)[1] == "running"  # the last frame stays
    stop(command)
    assert len(command.err.splitlines()) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_end_of_a_view_by_signal_restores_the_terminal(running, window, number):  # noqa: F811
    command, _ = running()
    view = window("--top", command.pid)
    view.see(lambda: view.row(1))
    view.process.send_signal(number)
    assert view.wait() == 128 + number
    assert termios.tcgetattr(view.slave) == view.modes
    stop(command)


def test_view_ends_with_its_launch(running, window):  # noqa: F811
    command, _ = running()
    view = window("--top", command.pid)
    view.see(lambda: view.row(1))
    stop(command)
    assert view.wait() == 0
    assert any("infini-run: ir-" in line for line in view.text)


def test_launcher_reads_nothing_of_its_ranks_for_a_view(running):  # noqa: F811
    """Neither rich nor NVML is imported where the job runs."""
    command, _ = running()
    ask("--top", command.pid)
    with open(f"/proc/{command.pid}/maps") as file:
        assert "nvidia" not in file.read()
    stop(command)


def test_without_rich_one_line_says_what_to_install(running, tmp_path):  # noqa: F811
    (tmp_path / "rich.py").write_text("raise ImportError\n")
    command, _ = running()
    code = "from infini_run.cli import main; main()"
    argv = [sys.executable, "-c", code, "--top", str(command.pid)]
    done = subprocess.run(
        argv, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (
        2,
        "infini-run: --top: needs rich; run pip install 'infini-run[live]'\n",
    )
    stop(command)


# ---- what a launch may answer

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
PLACES = ("node", "host", "pid", "is_stopping", "is_interrupted", "ranks", "exits", "lines", "usage", "hung")


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    """What a launch says of two ranks, and the launch."""
    argv = [sys.executable, "-m", "infini_run", "--nproc_per_node=2", "sh", "-c", "echo up; exec sleep 1000"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        process.stdout.readline()
        launch = found(process.pid)
        yield launch, ask_launch(launch, "facts", ranks=None, usage=False)
        process.terminate()
        process.stdout.read()


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_answer_is_a_table_or_an_error(facts, data):
    launch, answer = facts
    changed = json.loads(json.dumps(answer))
    node = changed["nodes"][0]
    place = data.draw(st.sampled_from(PLACES))
    if type(node[place]) is list and node[place] and data.draw(st.booleans()):
        node[place][0] = data.draw(VALUES)
    else:
        node[place] = data.draw(VALUES)
    ranks = top_view._Ranks(launch)
    with contextlib.closing(ranks), contextlib.suppress(InfiniRunError):
        top_view._frame(launch, ranks.read(changed), {})
