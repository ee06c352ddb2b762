"""--max_restarts: all ranks once more, when one has failed; nothing of an attempt is left when the next begins."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.test_terminal import PROMPT, terminal  # noqa: F401
from tests.support.command import play
from tests.support.launch_shapes import STUBBORN, as_root, pass_time
from tests.support.processes import is_alive, marked, processes, state_of
from tests.support.waiting import until

NOW = "--restart_delay=0"
NEVER = "--restart_delay=1000"  # a test that waited for it would not end


def story(path):
    return json.loads(Path(path).read_text())


def restarts_in(err):
    return re.findall(rb"^infini-run: (restart .*)$", err, re.M)


def folders_left(launch_id):
    """The folders of all attempts of a launch that are there."""
    return [f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if launch_id.partition(".")[0] in name]


def until_paused(command):
    """The first restart has been told."""
    command.read_error_until(b"infini-run: restart 1 of ")


# ---- the budget


def test_job_that_fails_twice_and_then_succeeds_has_succeeded(launch, tmp_path):
    words = play("+0", "exit=3", "+1", "die=KILL", "+*", "ask=attempt", "exit=0")
    command = launch("--max_restarts=3", NOW, f"--report={tmp_path}/r", *words)
    assert command.wait() == 0
    assert [words[1] for words in command.read_lines(b"attempt", launch.ranks)] == ["2/3"] * launch.ranks
    first, second = restarts_in(command.err)
    assert command.err.count(b"\n") == 2
    told = rb" in 0 ms: rank \d on \S+ failed: %s \(pid \d+, after [\d.]+ m?s\)"
    assert re.match(rb"restart 1 of 3" + told % b"exit code 3", first)
    assert re.match(rb"restart 2 of 3" + told % b"killed by SIGKILL", second)
    report = story(tmp_path / "r")
    assert (report["exit_code"], report["restarts"], report["first_failure"]) == (0, 2, None)
    assert [(e["exit_code"], e["signal"]) for e in report["earlier_failures"]] == [(3, None), (None, "SIGKILL")]
    assert report["launch_id"].endswith(".2")
    assert not folders_left(report["launch_id"])


def test_when_the_budget_is_used_up_the_last_failure_is_what_is_reported(launch, tmp_path):
    words = play("+0", "exit=5", "+1", "exit=6", "+2", "exit=7")
    command = launch("--max_restarts=2", NOW, f"--report={tmp_path}/r", *words)
    assert command.wait() == 7
    assert len(restarts_in(command.err)) == 2
    assert b"exit code 7 " in command.err.splitlines()[2]
    assert command.err.splitlines()[2].endswith(b"; after 2 restarts")
    report = story(tmp_path / "r")
    assert (report["exit_code"], report["restarts"]) == (7, 2)
    assert [e["exit_code"] for e in report["earlier_failures"]] == [5, 6]
    assert report["ranks"][report["first_failure"]]["exit_code"] == 7


def test_good_run_makes_the_budget_whole_again(infini_run):
    words = play(
        "+0", "pause=0.3", "exit=3", "+1", "pause=0.3", "exit=3", "+2", "pause=0.3", "exit=3", "+3", "exit=0"
    )
    command = infini_run("--max_restarts=1", NOW, "--restart_window=250ms", *words)
    assert command.wait() == 0
    counts = [line.partition(b" in 0 ms")[0] for line in restarts_in(command.err)]
    assert counts == [b"restart 1 of 1", b"restart 1 of 1 (2 since the start)", b"restart 1 of 1 (3 since the start)"]


@pytest.mark.parametrize("window", [(), ("--restart_window=1000",)], ids=["no window", "too short a run"])
def test_without_a_good_run_the_budget_is_one_for_all(infini_run, window):
    words = play("+0", "pause=0.3", "exit=3", "+1", "pause=0.3", "exit=4", "+2", "exit=0")
    command = infini_run("--max_restarts=1", NOW, *window, *words)
    assert command.wait() == 4


def test_the_delay_doubles(infini_run):
    command = infini_run("--max_restarts=3", "--restart_delay=20ms", "false")
    assert command.wait() == 1
    told = [re.search(rb" in (\d+ ms):", line)[1] for line in restarts_in(command.err)]
    assert told == [b"20 ms", b"40 ms", b"80 ms"]


# ---- what is a failure


@pytest.mark.rows(6)
def test_all_ranks_are_started_again_when_one_has_failed(launch, every_path):
    words = play("+0", "say=first", "@0", "exit=3", "@*", "wait", "+1", "say=second", "exit=0")
    command = launch("--max_restarts=1", NOW, *words)
    assert command.wait() == 0
    assert len(command.read_lines(b"second", launch.ranks)) == launch.ranks


@pytest.mark.parametrize(("code", "why"), [(126, "cannot be executed"), (127, "does not exist")])
def test_program_that_cannot_be_run_is_not_tried_again(launch, code, why):
    command = launch("--max_restarts=3", NOW, "sh", "-c", f"exit {code}")
    assert command.wait() == code
    assert not restarts_in(command.err)
    assert command.err.rstrip().endswith(f"; not restarted: exit code {code} means that a program {why}".encode())


def test_what_only_the_kernel_refuses_is_not_tried_again(infini_run, tmp_path):
    program = tmp_path / "program"
    program.write_bytes(b"\x7fELF and no more")
    program.chmod(0o755)
    command = infini_run("--max_restarts=3", NOW, program)
    assert command.wait() == 126
    assert not restarts_in(command.err)


def test_program_that_is_missing_and_a_wrong_flag_are_refused_once(infini_run):
    for words, code in ((["/nowhere/program"], 127), (["--nnodes=0", "true"], 2)):
        command = infini_run("--max_restarts=3", *words)
        assert command.wait() == code
        assert command.err.count(b"\n") == 1


@pytest.mark.parametrize("name", ["TERM", "INT", "SEGV"])
@pytest.mark.rows(5)
def test_job_that_was_told_to_stop_is_not_started_again(launch, name):
    command = launch("--max_restarts=3", NOW, *play("end=TERM:3", "end=INT:3", "say=ready", "wait"))
    command.pids_of(b"ready", launch.ranks)
    command.signal(signal.Signals[f"SIG{name}"])
    assert command.wait() == 128 + signal.Signals[f"SIG{name}"]
    assert not restarts_in(command.err)


def test_job_that_was_told_to_stop_while_a_failure_ends_it_is_not_started_again(infini_run, gate):
    held = gate()
    words = play("@0", f"hold={held}", "exit=3", "@1", "tell=TERM", "say=ready", "wait")
    command = infini_run("--max_restarts=3", NOW, "--grace=1000", "--nproc_per_node=2", *words, gates=(held,))
    command.read_lines(b"ready")
    held.open()
    command.read_lines(b"got TERM")
    command.signal(signal.SIGTERM)
    command.read_error_until(b"SIGTERM: stopping")
    command.insist(signal.SIGTERM)
    assert command.wait() == 3
    assert not restarts_in(command.err)


@pytest.mark.parametrize("name", ["HUP", "USR1"])
def test_job_that_died_of_a_signal_passed_on_is_not_started_again(launch, name):
    command = launch("--max_restarts=3", NOW, *play("say=ready", "wait"))
    command.pids_of(b"ready", launch.ranks)
    command.signal(signal.Signals[f"SIG{name}"])
    assert command.wait() == 128 + signal.Signals[f"SIG{name}"]
    assert not restarts_in(command.err)
    assert command.err.rstrip().endswith(f"; not restarted: SIG{name} was sent to the job".encode())


def test_signal_that_ranks_have_handled_does_not_keep_a_later_failure_from_a_restart(infini_run):
    words = play("+0", "tell=HUP", "say=ready", "listen", "exit=3", "+1", "exit=0")
    command = infini_run("--max_restarts=1", NOW, *words, stdin=subprocess.PIPE)
    command.read_until(b"ready")
    command.signal(signal.SIGHUP)
    command.read_until(b"got HUP")
    command.close_stdin()
    assert command.wait() == 0
    assert len(restarts_in(command.err)) == 1


def test_keep_going_lets_the_others_finish_first(infini_run, gate):
    held = gate()
    words = play("+0", "@0", "exit=3", "@1", "say=works", f"hold={held}", "say=finished", "+1", "@*", "exit=0")
    command = infini_run("--max_restarts=1", NOW, "--keep_going", "--nproc_per_node=2", *words, gates=(held,))
    command.read_lines(b"works")
    held.open()
    assert command.wait() == 0
    assert b"finished" in command.out
    assert len(restarts_in(command.err)) == 1


def test_rank_that_is_not_ready_in_time_is_a_failure(infini_run):
    words = play("+0", "wait", "+1", "notify=READY=1", "exit=0")
    command = infini_run("--max_restarts=1", NOW, "--ready_timeout=2s", *words)
    assert command.wait() == 0
    (line,) = restarts_in(command.err)
    assert b"was not ready after 2.0 s" in line


def test_hang_that_is_to_stop_the_job_is_a_failure(infini_run):
    words = play("+0", "notify=WATCHDOG=trigger", "wait", "+1", "exit=0")
    command = infini_run("--max_restarts=1", NOW, "--on_hang=stop", *words)
    assert command.wait() == 0
    (line,) = restarts_in(command.err)
    assert b" hung: " in line


# ---- an attempt ends completely before the next one begins


def test_daemons_of_an_attempt_are_gone_before_the_next_one_begins(launch, gate):
    first, held = gate(), gate()
    words = play("+0", *STUBBORN, f"hold={first}", "exit=3", "+1", "say=again", f"hold={held}", "exit=0")
    command = launch("--max_restarts=1", NOW, "--grace=0.5", *words, gates=(first, held))
    strays = command.pids_of(b"stray", launch.ranks)
    first.open()
    command.pids_of(b"again", launch.ranks)
    assert not [pid for pid in strays.values() if is_alive(pid)]
    held.open()
    assert command.wait() == 0
    (line,) = restarts_in(command.err)
    assert b"left behind: left-behind (" in line


def test_no_process_is_there_during_the_delay_or_after_kill_of_the_launcher(launch):
    command = launch("--max_restarts=1", "--grace=0.1", NEVER, *play(*STUBBORN, "ask=mark", "exit=3"))
    mark = command.read_lines(b"mark")[0][1]
    until_paused(command)
    assert not [pid for pid, (parent, _, _) in processes().items() if parent == command.pid]
    assert not marked()
    (folder,) = folders_left(mark)
    assert os.listdir(folder) == ["control"]  # other processes find the launch there
    os.kill(command.pid, signal.SIGKILL)
    assert command.wait() != 0
    assert not marked()
    shutil.rmtree(folder)


@pytest.mark.parametrize("name", ["TERM", "INT", "QUIT", "SEGV"])
@pytest.mark.rows(5)
def test_signal_that_stops_ends_the_delay_at_once(launch, name, tmp_path):
    command = launch("--max_restarts=1", NEVER, f"--report={tmp_path}/r", *play("exit=3"))
    until_paused(command)
    command.signal(signal.Signals[f"SIG{name}"])
    assert command.wait() == 128 + signal.Signals[f"SIG{name}"]
    assert command.err.endswith(f"infini-run: no restart: stopped by SIG{name}\n".encode())
    report = story(tmp_path / "r")
    assert (report["received_signal"], report["exit_code"]) == (f"SIG{name}", 128 + signal.Signals[f"SIG{name}"])
    assert [e["exit_code"] for e in report["earlier_failures"]] == [3]


def test_signal_that_does_not_stop_does_not_end_the_delay(infini_run):
    command = infini_run("--max_restarts=1", "--restart_delay=1s", *play("+0", "exit=3", "+1", "say=again", "exit=0"))
    until_paused(command)
    for name in ("USR1", "HUP", "WINCH", "CHLD"):
        command.signal(signal.Signals[f"SIG{name}"])
    assert command.wait() == 0
    assert b"again" in command.out


def test_term_at_any_moment_of_a_restart_is_not_lost(launch, draw):
    for _ in range(4):
        command = launch("--max_restarts=1", "--restart_delay=10ms", *play("+0", "exit=3", "+1", "wait"))
        until_paused(command)
        pass_time(draw(0.08))
        command.signal(signal.SIGTERM)
        assert command.wait() == 143
        assert not marked()


def test_term_from_the_first_rank_of_a_restart_stops_the_start(launch):
    script = "[ $TORCHELASTIC_RESTART_COUNT = 0 ] && exit 3; [ $RANK = 0 ] && kill -TERM $PPID; exec sleep 1000"
    command = launch("--max_restarts=3", NOW, "sh", "-c", script)
    assert command.wait() == 143
    assert len(restarts_in(command.err)) == 1
    assert not marked()


@pytest.mark.rows(1)
def test_fifty_restarts_leave_no_descriptor_open(launch):
    command = launch("--max_restarts=50", NOW, *play("@0", "ask=parents_descriptors", "exit=3", "@*", "wait"))
    assert command.wait() == 3
    counts = [int(words[1]) for words in command.read_lines(b"parents_descriptors")]
    assert len(counts) == 51
    assert min(counts[-10:]) <= max(counts[:10])  # any of them may be a look while the others are being started


def test_during_the_delay_nothing_wakes_us(infini_run):
    command = infini_run("--max_restarts=1", NEVER, *play("exit=3"))
    until_paused(command)
    until(lambda: _sleeps_on(command.pid))  # once what it does at the delay's start is done
    command.signal(signal.SIGTERM)
    assert command.wait() == 143


def _sleeps_on(pid):
    before = wakeups(pid)
    pass_time(0.5)
    return wakeups(pid) == before


def wakeups(pid):
    return Path(f"/proc/{pid}/status").read_text().partition("ctxt_switches:")[2].split()[0]


# ---- what the next attempt finds


def test_free_port_is_another_one_and_a_given_port_stays(infini_run):
    words = play("ask=port", "ask=mark", "+0", "exit=3", "+1", "exit=0")
    command = infini_run("--max_restarts=1", NOW, "--standalone", *words)
    assert command.wait() == 0
    one, other = [words[1] for words in command.read_lines(b"port", 2)]
    assert one != other
    first, second = [words[1] for words in command.read_lines(b"mark", 2)]
    assert second == f"{first}.1"
    command = infini_run("--max_restarts=1", NOW, "--master_port=12345", *words)
    assert command.wait() == 0
    assert [words[1] for words in command.read_lines(b"port", 2)] == ["12345"] * 2


def test_logs_are_appended_to_behind_a_line_that_says_so(launch, tmp_path):
    script = 'printf "attempt $TORCHELASTIC_RESTART_COUNT"; [ $TORCHELASTIC_RESTART_COUNT = 1 ] || exit 3'
    command = launch("--max_restarts=1", NOW, "--keep_going", "--log_dir=logs", "sh", "-c", script, cwd=tmp_path)
    assert command.wait() == 0
    for rank in range(launch.ranks):
        one, mark, other = (tmp_path / "logs" / f"rank_{rank}.log").read_text().split("\n")
        assert (one, other) == ("attempt 0", "attempt 1")
        assert re.match(r"infini-run: restart 1 of 1: rank \d on \S+ failed: exit code 3 \(pid ", mark)


def test_log_that_ends_with_a_line_gets_no_empty_one(infini_run, tmp_path):
    words = play("+0", "say=one", "exit=3", "+1", "say=two", "exit=0")
    assert infini_run("--max_restarts=1", NOW, f"--log_dir={tmp_path}", *words).wait() == 0
    assert [line.split()[0] for line in (tmp_path / "rank_0.log").read_text().splitlines()] == [
        "one",
        "infini-run:",
        "two",
    ]


def test_error_file_of_an_attempt_is_not_taken_for_the_next_ones(infini_run, tmp_path):
    script = '[ $TORCHELASTIC_RESTART_COUNT = 1 ] || echo "no luck" > $TORCHELASTIC_ERROR_FILE; exit 3'
    for more in ((), (f"--log_dir={tmp_path}/logs",)):
        command = infini_run("--max_restarts=1", NOW, f"--report={tmp_path}/r", *more, "sh", "-c", script)
        assert command.wait() == 3
        report = story(tmp_path / "r")
        assert [e["error_message"] for e in report["earlier_failures"]] == ["no luck"]
        assert report["ranks"][0]["error_message"] is None
        assert not folders_left(report["launch_id"])


def test_ranks_start_where_the_first_ones_did_with_the_same_descriptors(infini_run, tmp_path):
    there, ours = os.pipe()
    os.write(ours, b"one\ntwo\n")
    os.close(ours)
    script = f"read line </dev/fd/{there}; echo $line in $(pwd); [ $TORCHELASTIC_RESTART_COUNT = 1 ]"
    command = infini_run("--max_restarts=1", NOW, "sh", "-c", script, pass_fds=[there], cwd=tmp_path)
    os.close(there)
    assert command.wait() == 0
    assert command.out.decode().splitlines() == [f"one in {tmp_path}", f"two in {tmp_path}"]


@pytest.mark.parametrize("more", [(), ("--nproc_per_node=2", "--stdin=all", "--console=prefix")])
def test_file_on_stdin_is_read_again_from_where_it_stood(infini_run, tmp_path, more):
    (tmp_path / "in").write_text("before\nhello\n")
    with open(tmp_path / "in", "rb", buffering=0) as file:
        file.seek(7)
        script = "cat; [ $TORCHELASTIC_RESTART_COUNT = 1 ]"
        command = infini_run("--max_restarts=1", NOW, "--keep_going", *more, "sh", "-c", script, stdin=file)
    assert command.wait() == 0
    assert command.out.count(b"hello\n") == (4 if more else 2)
    assert b"before" not in command.out


# ---- a restart that cannot be


def test_restart_that_cannot_be_started_counts_and_is_tried_again(infini_run, gate):
    held = gate()
    words = play("+0", f"hold={held}", "exit=3", "+*", "say=again", "exit=0")
    command = infini_run("--max_restarts=2", "--restart_delay=1s", *words, gates=(held,))
    limits = resource.prlimit(command.pid, resource.RLIMIT_NOFILE)
    until(lambda: marked())
    resource.prlimit(command.pid, resource.RLIMIT_NOFILE, (14, limits[1]))
    held.open()
    command.read_error_until(b"restart 2 of 2")
    resource.prlimit(command.pid, resource.RLIMIT_NOFILE, limits)
    assert command.wait() == 0
    first, second = restarts_in(command.err)
    assert b"exit code 3" in first
    assert second.startswith(b"restart 2 of 2 in 2.0 s: ")
    assert b"Too many open files" in second


def test_last_restart_that_cannot_be_started_is_told_with_its_reason(infini_run, tmp_path):
    script = "[ $RANK = 3 ] || exec sleep 1000; prlimit --pid $PPID --nofile=15:15; exit 3"
    words = ("--nproc_per_node=4", "--max_restarts=1", NOW, f"--report={tmp_path}/r", "sh", "-c", script)
    command = infini_run(*words)
    assert command.wait() == 3
    last = command.err.decode().splitlines()[-1]
    assert "; after 1 restart; not restarted: rank " in last
    assert "Too many open files" in last
    assert "Too many open files" in story(tmp_path / "r")["not_restarted"]


def test_restart_that_makes_no_sense_any_more_leaves_the_last_failure_to_be_told(infini_run, tmp_path):
    script = "rm -r logs; touch logs; exit 3"
    command = infini_run("--max_restarts=2", NOW, "--log_dir=logs", "sh", "-c", script, cwd=tmp_path)
    assert command.wait() == 3
    (last,) = [line for line in command.err.splitlines() if b" failed: " in line and b"restart 1" not in line]
    assert b"exit code 3" in last
    assert b"; after 1 restart; not restarted: --log_dir=" in last


# ---- a namespace, a terminal


@as_root
@pytest.mark.root
def test_isolated_job_restarts_inside_its_namespace(infini_run, tmp_path):
    words = play("+0", *STUBBORN, "exit=3", "+1", "ask=pids", "exit=0")
    command = infini_run("--isolate", "--max_restarts=1", NOW, "--grace=0.1", f"--report={tmp_path}/r", *words)
    assert command.wait() == 0
    ((_, pids, _, _),) = command.read_lines(b"pids")
    assert int(pids) == 2  # process 1 and the rank
    report = story(tmp_path / "r")
    assert report["restarts"] == 1
    assert not folders_left(report["launch_id"])


@as_root
@pytest.mark.root
@pytest.mark.parametrize("name", ["TERM", "INT", "KILL"])
def test_delay_of_an_isolated_job_ends_with_its_launcher(infini_run, name):
    command = infini_run("--isolate", "--max_restarts=1", NEVER, *play("ask=mark", "exit=3"))
    ((_, mark, _, _),) = command.read_lines(b"mark")
    until_paused(command)
    command.signal(signal.Signals[f"SIG{name}"])
    assert command.wait() == (-9 if name == "KILL" else 128 + signal.Signals[f"SIG{name}"])
    until(lambda: not marked() and not folders_left(mark))


@pytest.mark.parametrize("handled", [(), ("end=INT:130",)], ids=["killed by it", "says 130"])
def test_ctrl_c_ends_a_lone_rank_and_the_job(terminal, handled):  # noqa: F811
    terminal.run("--max_restarts=3", NOW, *play(*handled, "say=ready", "wait"))
    terminal.pids("ready")
    terminal.type("\x03")
    assert terminal.code() == 130
    assert b"restart" not in terminal.seen


def test_ctrl_c_ends_the_delay_and_the_next_attempt_has_the_terminal(terminal):  # noqa: F811
    words = play("+0", "exit=3", "+1", "say=ready", "ask=foreground", "read", "exit=4")
    terminal.run("--max_restarts=2", "--restart_delay=1s", *words)
    terminal.see(rb"foreground True")
    terminal.type("hello\n")
    terminal.see(rb"read hello")
    terminal.see(rb"restart 2 of 2 in 2\.0 s")
    terminal.type("\x03")
    assert terminal.code() == 130


def test_ctrl_z_stops_us_in_the_delay_and_fg_goes_on(terminal):  # noqa: F811
    terminal.run("--max_restarts=1", "--restart_delay=2s", *play("+0", "exit=3", "+1", "say=again", "exit=4"))
    terminal.see(rb"restart 1 of 1 in 2\.0 s")
    pid = terminal.launcher()
    terminal.type("\x1a")
    until(lambda: state_of(pid) == "T")
    terminal.see(PROMPT)
    terminal.type("fg\n")
    terminal.pids("again")
    assert terminal.code() == 4


# ---- what it costs


@pytest.mark.parametrize(
    ("words", "loaded"),
    [(["true"], set()), (["--max_restarts=1", "true"], {"node.restarting_launch"})],
    ids=["unasked", "unneeded"],
)
def test_nothing_of_it_is_imported_before_there_is_a_need(words, loaded):
    argv = [sys.executable, "-X", "importtime", "-m", "infini_run", *words]
    lines = subprocess.run(argv, capture_output=True, text=True, check=True).stderr.splitlines()
    names = {line.rpartition("|")[2].strip() for line in lines}
    assert names & {"infini_run.node.restarting_launch", "infini_run.plan.restart_policy"} == {
        f"infini_run.{name}" for name in loaded
    }


def test_progress_renews_the_budget_and_its_lack_ends_the_job(infini_run, tmp_path):
    """Attempts 0 to 3 get further each, 4 to 6 do not."""
    script = 'n=$TORCHELASTIC_RESTART_COUNT; [ $n -lt 4 ] || n=3; exec "$@" "notify=PROGRESS=$n" exit=3'
    flags = ("--max_restarts=3", "--restart_delay=0", f"--report={tmp_path}/r")
    command = infini_run(*flags, "sh", "-c", script, "sh", *play())
    assert command.wait() == 3
    report = json.loads((tmp_path / "r").read_text())
    assert report["restarts"] == 6
    assert report["not_restarted"] == "3 attempts in a row without exceeding PROGRESS=3"
    assert b"restart 1 of 3 (4 since the start)" in command.err
    assert command.err.count(b"not restarted: 3 attempts in a row without exceeding PROGRESS=3") == 1
