"""The Python API by itself: run, launch_local, ProcessLauncher. What it does beside a host: test_host_program.py."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import infini_run as ir
from tests.support.command import CHILDREN, play
from tests.support.processes import descriptors, marked, no_descriptor_left, processes
from tests.support.waiting import LIMIT_S, ended_after, until
from tests.unit.environments.test_environments import SRUN

IDLE = 'echo "$RANK" > "$0"; exec sleep 600'  # rings, then stays


def idle(bell):
    return ["sh", "-c", IDLE, bell.path]


def answer(bell):
    return [sys.executable, "-SE", f"{CHILDREN}/answer.py", bell.path]


# ---- run


def test_run_returns_how_every_rank_ended():
    report = ir.run(["sh", "-c", "exit 0"], nproc_per_node=3)
    assert isinstance(report, ir.Report)
    assert (report.exit_code, report.world_size, report.first_failure) == (0, 3, None)
    assert [(e.rank, e.local_rank, e.code, e.signal) for e in report.exits] == [
        (0, 0, 0, 0),
        (1, 1, 0, 0),
        (2, 2, 0, 0),
    ]
    assert len({e.pid for e in report.exits}) == 3


@pytest.mark.parametrize("more", [{}, {"max_restarts": 1}], ids=str)
def test_a_report_of_a_good_launch_has_what_ranks_reported(more):
    report = ir.run(play("notify=STATUS=working", "notify=PROGRESS=5"), nproc_per_node=2, **more)
    assert [(each.status, each.progress) for each in report.exits] == [("working", 5)] * 2
    assert report.to_json()["ranks"][1]["status"] == "working"


def test_a_report_begins_before_its_ranks_and_ends_after_them():
    report = ir.run(["true"], nproc_per_node=2)
    for exit_ in report.exits:
        assert report.start_s <= exit_.start_s <= exit_.end_s <= report.end_s


def test_run_raises_the_first_failure_with_its_rank_and_exit_code():
    with pytest.raises(ir.WorkerError) as caught:
        ir.run(["sh", "-c", '[ "$RANK" != 1 ] || exit 5; exec sleep 600'], nproc_per_node=3)
    assert (caught.value.rank, caught.value.exit_code) == (1, 5)
    assert caught.value.report.first_failure.rank == 1
    assert "rank 1 " in str(caught.value)
    assert "2 others were stopped" in str(caught.value)


def test_a_signal_is_a_failure_of_128_and_its_number():
    with pytest.raises(ir.WorkerError) as caught:
        ir.run(["sh", "-c", "kill -USR1 $$"])
    assert caught.value.exit_code == 128 + signal.SIGUSR1
    assert "SIGUSR1" in str(caught.value)


def test_run_without_check_returns_the_failure():
    report = ir.run(["sh", "-c", "exit 9"], check=False)
    assert (report.exit_code, report.first_failure.code) == (9, 9)


def test_run_stops_everything_when_its_time_is_up(bell):
    with pytest.raises(ir.LaunchTimeout, match=r"sh did not end within 0\.2 s; stopped all ranks"):
        ir.run(idle(bell), nproc_per_node=2, timeout_s=0.2)
    assert marked() == {}


def test_run_with_time_to_spare_returns_normally():
    assert ir.run(["true"], timeout_s=600).exit_code == 0


@pytest.mark.parametrize("inherits", [True, False])
def test_env_is_added_to_the_environment_or_is_all_of_it(tmp_path, monkeypatch, inherits):
    monkeypatch.setenv("OURS", "1")
    env = {"THEIRS": "2", "RANK": "77"}
    ir.run(["/usr/bin/env", "-0"], env=env, inherit_env=inherits, log_dir=tmp_path / "logs", console="none")
    seen = dict(pair.split("=", 1) for pair in (tmp_path / "logs/rank_0.log").read_text().split("\0") if pair)
    assert ("OURS" in seen) == inherits
    assert ("PATH" in seen) == inherits
    assert seen["THEIRS"] == "2"
    assert seen["RANK"] == "0"


def test_the_given_env_is_not_changed():
    env = {"A": "1", "PATH": os.environ["PATH"]}
    ir.run(["true"], env=env, nproc_per_node=2)
    assert env == {"A": "1", "PATH": os.environ["PATH"]}
    assert "RANK" not in os.environ


def test_ranks_start_in_cwd(tmp_path):
    (tmp_path / "here").mkdir()
    ir.run(["sh", "-c", "pwd > where"], cwd=tmp_path / "here")
    assert (tmp_path / "here/where").read_text() == f"{tmp_path}/here\n"


def test_a_relative_program_is_looked_for_in_cwd(tmp_path, monkeypatch):
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "there/program"
    program.write_text("#!/bin/sh\necho ran > ran\n")
    program.chmod(0o755)
    script = tmp_path / "there/script.py"
    script.write_text("open('ran_too', 'w').close()")
    ir.run(["./program"], cwd="there")
    ir.run(["script.py"], cwd="there")
    assert (tmp_path / "there/ran").exists()
    assert (tmp_path / "there/ran_too").exists()
    with pytest.raises(ir.ProgramMissing):
        ir.run(["there/program"], cwd="there")


@pytest.mark.parametrize("cwd", ["missing", "file"])
def test_a_cwd_that_is_no_directory_is_refused_before_anything_starts(cwd, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ir.UsageError, match=f"cwd=.*{cwd}"):
        ir.run(["true"], cwd=tmp_path / cwd)


def test_flags_are_keywords_with_python_values(tmp_path):
    report = ir.run(
        ["sh", "-c", 'echo "$MASTER_ADDR $MASTER_PORT $TORCHELASTIC_RUN_ID"'],
        nproc_per_node=4,
        log_dir=tmp_path,
        console="none",
        grace=1.5,
        stop_signal=signal.SIGUSR1,
        ranks_on_console=range(2),
        local_ranks_filter=[0, 3],
        keep_going=True,
        hosts=None,
        module=False,
        rdzv_endpoint="node0:7",
        run_id="a b",
    )
    assert report.run_id == "a b"
    assert (tmp_path / "rank_3.log").read_text() == "node0 7 a b\n"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"nnodes": 0}, "nnodes=0: expected 1"),
        ({"nproc_per_node": 1.5}, "nproc_per_node=1.5: expected 1"),
        ({"node_rank": 1}, "node_rank=1: with nnodes=1"),
        ({"rdzv_endpoint": "here"}, 'rdzv_endpoint="here": missing port'),
        ({"engine": "ssh"}, 'engine="ssh": needs a list of hosts; add hosts="a,b" or hostfile=FILE'),
        *(
            ({name: True}, "not a keyword of the Python API")
            for name in ("help", "h", "helpfull", "version", "dry_run", "isolate", "verbose")
        ),
        ({"report": "report.json"}, "report=: not a keyword of the Python API; use it with the command"),
    ],
)
def test_a_wrong_flag_is_refused_before_anything_starts(flags, message, tmp_path):
    with pytest.raises(ir.UsageError) as caught:
        ir.run(["touch", str(tmp_path / "started")], **flags)
    assert message in str(caught.value)
    assert not str(caught.value).startswith("--")
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize("call", [ir.run, ir.ProcessLauncher])
def test_a_keyword_that_is_no_flag_is_a_type_error_as_for_any_function(call):
    with pytest.raises(TypeError, match=r"keyword argument 'nproc_per_nod'; did you mean nproc_per_node\?"):
        call(["true"], nproc_per_nod=2)


@pytest.mark.parametrize(
    ("owner", "given", "wrong", "meant"),
    [
        ("run", (["true"],), "timeout", "timeout_s"),
        ("ProcessLauncher", (["true"],), "inherits_env", "inherit_env"),
        ("launch_local", ("true", 1), "gpus_per_process", "gpus_per_proc"),
        ("launch_multi_node", ("true", ["a"], 1), "time_out_s", "timeout_s"),
        ("Launcher", (), "agent_timeout", "agent_timeout_s"),
        ("Launcher", (), "extra_env_vars", "env"),
        ("Launcher", (), "workers_per_host", "nproc_per_node"),
        ("Pool", (), "env_fil", "env_file"),
        ("Pool", (), "max_workers", "nproc_per_node"),
        ("Crew", (print,), "watchdog", "watchdog_s"),
        ("submit", (["true"],), "inherits_env", "inherit_env"),
    ],
)
def test_the_keyword_that_was_meant_is_named_whether_it_is_a_flag_or_not(owner, given, wrong, meant):
    with pytest.raises(TypeError) as caught:
        getattr(ir, owner)(*given, **{wrong: 1})
    words = f"{owner}() got an unexpected keyword argument {wrong!r}; did you mean {meant}?"
    assert str(caught.value) == words


def test_keyword_of_subprocess_names_how_output_is_read():
    with pytest.raises(TypeError, match=r"'capture_output'; use log_dir=DIR, and read DIR/rank_N\.log$"):
        ir.run(["true"], capture_output=True)


# ---- engine="auto"

PLACE = ["sh", "-c", "echo $RANK/$WORLD_SIZE $GROUP_RANK/$NNODES $MASTER_ADDR:$MASTER_PORT ${PMI_RANK-none} > $0"]


def test_auto_is_one_node_of_those_that_the_surroundings_name(tmp_path):
    environ = {**os.environ, **SRUN, "PMI_RANK": "2"}
    report = ir.run([*PLACE, str(tmp_path / "said")], engine="auto", env=environ)
    assert [exit_.rank for exit_ in report.exits] == [2]
    assert (tmp_path / "said").read_text() == "2/3 2/3 node2:29799 none\n"


def test_a_launcher_to_watch_takes_its_place_as_well(tmp_path):
    environ = {**os.environ, **SRUN}
    with ir.ProcessLauncher([*PLACE, str(tmp_path / "said")], engine="auto", env=environ) as launcher:
        launcher.launch()
        assert launcher.wait(LIMIT_S)
    assert (tmp_path / "said").read_text() == "2/3 2/3 node2:29799 none\n"


@pytest.mark.parametrize("engine", ["auto", "local"])
def test_where_nothing_is_found_it_is_a_launch_on_this_machine(engine):
    assert ir.run(["true"], engine=engine, nproc_per_node=2).world_size == 2


def test_auto_as_a_task_that_is_one_rank_is_refused():
    with pytest.raises(ir.UsageError, match=r"SLURM_STEP_TASKS_PER_NODE=2\(x3\) each task is one rank"):
        ir.run(
            ["true"], engine="auto", env={**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2(x3)", "SLURM_STEP_NUM_TASKS": "6"}
        )


def test_auto_in_a_rank_of_another_launch_is_refused():
    with pytest.raises(ir.UsageError, match="INFINI_RUN_ID is set"):
        ir.run(["true"], engine="auto", env={**SRUN, "INFINI_RUN_ID": "ir-1"})


def test_what_auto_has_guessed_is_a_warning():
    environ = {
        "PATH": os.environ["PATH"],
        "MASTER_ADDR": "m-0",
        "MASTER_PORT": "2345",
        "WORLD_SIZE": "2",
        "RANK": "1",
    }
    with pytest.warns(RuntimeWarning, match="taken to count nodes"):
        ir.run(["true"], engine="auto", env=environ, inherit_env=False)


@pytest.mark.parametrize("command", ["true", "", [], ()])
def test_a_command_is_a_list_of_words(command):
    with pytest.raises(ir.UsageError, match="expected a list, the program and its arguments"):
        ir.run(command)


def test_words_may_be_paths(tmp_path):
    assert ir.run([Path("/bin/sh"), "-c", "exit 0"]).exit_code == 0
    ir.run(["touch", tmp_path / "made"])
    assert (tmp_path / "made").exists()


def test_arguments_of_a_launch_are_a_list(tmp_path):
    with (
        ir.ProcessLauncher(["touch"]) as launcher,
        pytest.raises(ir.UsageError, match="args='abc': expected a list of"),
    ):
        launcher.launch("abc")


@pytest.mark.parametrize("where", ["argument", "variable", "launch"])
def test_a_nul_is_refused_and_not_cut_off(where, tmp_path):
    words = ["touch", f"{tmp_path}/a\0b"] if where == "argument" else ["touch", f"{tmp_path}/a"]
    env = dict(os.environ, BAD="x\0y") if where == "variable" else None
    with (
        pytest.raises(ir.UsageError, match="NUL"),
        ir.ProcessLauncher(words, env=env) as launcher,
    ):
        launcher.launch(["c\0d"] if where == "launch" else [])
    assert list(tmp_path.iterdir()) == []


def test_a_missing_program_and_one_that_cannot_be_executed_have_their_own_errors(tmp_path):
    (tmp_path / "plain").write_text("#!/bin/sh\n")
    with pytest.raises(ir.ProgramMissing) as missing:
        ir.run(["no-such-program"])
    with pytest.raises(ir.NotExecutable) as plain:
        ir.run([f"{tmp_path}/plain"])
    assert (missing.value.path, missing.value.exit_code) == ("no-such-program", 127)
    assert (plain.value.path, plain.value.exit_code) == (f"{tmp_path}/plain", 126)


def test_keep_going_lets_the_others_finish():
    script = '[ "$RANK" != 0 ] || exit 4; exit 0'
    with pytest.raises(ir.WorkerError) as caught:
        ir.run(["sh", "-c", script], nproc_per_node=3, keep_going=True)
    assert [e.code for e in caught.value.report.exits] == [4, 0, 0]


# ---- launch_local


def test_launch_local_writes_a_log_for_each_rank_and_marks_stderr(tmp_path, capfd):
    script = "echo out $RANK; echo err $RANK >&2"
    report = ir.launch_local("sh", 2, ["-c", script], f"{tmp_path}/logs", gpus_per_proc=0)
    assert report.world_size == 2
    for rank in (0, 1):
        lines = (tmp_path / f"logs/rank_{rank}.log").read_text().splitlines()
        assert sorted(lines) == [f"err: err {rank}", f"out {rank}"]
    console = capfd.readouterr()
    assert sorted(console.out.splitlines()) == ["[rank 0] out 0", "[rank 1] out 1"]
    assert sorted(console.err.splitlines()) == ["[rank 0 err] err 0", "[rank 1 err] err 1"]


def test_launch_local_raises_the_rank_the_exit_code_and_the_last_words(tmp_path):
    script = '[ "$RANK" = 1 ] || exec sleep 600; echo boom >&2; exit 6'
    with pytest.raises(ir.WorkerError) as caught:
        ir.launch_local("sh", 2, ["-c", script], f"{tmp_path}/logs", console="none")
    error = caught.value
    assert (error.rank, error.exit_code) == (1, 6)
    assert error.report.first_failure.last_lines == ("boom",)
    assert error.report.first_failure.log.endswith("/rank_1.log")


def test_launch_local_logs_into_logs_here_unless_told_otherwise(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ir.launch_local("true", 1)
    assert (tmp_path / "logs/rank_0.log").read_bytes() == b""


def test_what_the_error_file_says_is_in_the_report(tmp_path):
    script = """printf '{"message": {"message": "it broke"}}' > "$TORCHELASTIC_ERROR_FILE"; exit 1"""
    report = ir.run(["sh", "-c", script], check=False)
    assert report.first_failure.error_message == "it broke"


# ---- ProcessLauncher: launching


def test_launch_adds_its_arguments_after_the_commands_own(tmp_path):
    with ir.ProcessLauncher(["sh", "-c", 'echo "$@"', "sh", "own"], log_dir=tmp_path, console="none") as launcher:
        launcher.launch(["--first", "a b"])
        assert launcher.wait()
        launcher.launch(["--second"])
        assert launcher.wait()
        launcher.launch()
        assert launcher.wait()
    assert (tmp_path / "rank_0.log").read_text() == "own --first a b\nown --second\nown\n"


def test_a_second_launch_starts_from_a_clean_slate():
    with ir.ProcessLauncher(["sh", "-c", 'exit "$0"']) as launcher:
        launcher.launch(["3"])
        launcher.wait()
        assert launcher.first_failure().code == 3
        first = launcher.report()
        launcher.launch(["0"])
        launcher.wait()
        assert launcher.first_failure() is None
        assert launcher.exit_code(0) == 0
        assert launcher.report().launch_id != first.launch_id
        assert first.exit_code == 3


def test_one_launch_at_a_time(bell):
    with ir.ProcessLauncher(idle(bell)) as launcher:
        launcher.launch()
        with pytest.raises(ir.InfiniRunError, match="already running"):
            launcher.launch()
        assert launcher.running()
        launcher.kill()


def test_nothing_can_be_asked_before_the_launch_but_whether_it_runs():
    with ir.ProcessLauncher(["true"]) as launcher:
        assert launcher.running() is False
        for ask in (launcher.wait, launcher.events, launcher.status, launcher.report, launcher.first_failure):
            with pytest.raises(ir.InfiniRunError, match=r"nothing was launched; call launch\(\) first"):
                ask()
        launcher.terminate()
        launcher.kill()


def test_a_launch_that_fails_leaves_the_launcher_usable(tmp_path):
    program = tmp_path / "program"
    with ir.ProcessLauncher([str(program)]) as launcher:
        with pytest.raises(ir.ProgramMissing):
            launcher.launch()
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
        launcher.launch()
        assert launcher.wait()


@pytest.mark.parametrize("nproc", [1, 3])
def test_distributed_args_are_added_to_each_rank_where_asked(nproc, tmp_path):
    command = ["sh", "-c", 'echo "$*"', "sh", "run"]
    with ir.ProcessLauncher(
        command, nproc_per_node=nproc, distributed_args=True, log_dir=tmp_path, console="none"
    ) as launcher:
        launcher.launch(["--project", "x"])
        launcher.wait()
    for rank in range(nproc):
        said = (tmp_path / f"rank_{rank}.log").read_text()
        assert said == f"run --project x --distributed-rank={rank} --distributed-world-size={nproc}\n"


# ---- ProcessLauncher: watching


def test_events_come_once_and_in_order():
    with ir.ProcessLauncher(["true"], nproc_per_node=3) as launcher:
        launcher.launch()
        events = []
        while more := launcher.events():
            events += more
        assert launcher.events() == []
        assert launcher.events(timeout_s=600) == []
    kinds = [event.kind for event in events]
    assert kinds[:3] == ["started"] * 3
    assert sorted(kinds) == ["ended"] + ["exited"] * 3 + ["started"] * 3
    assert kinds[-1] == "ended"
    assert [event.rank for event in events[:3]] == [0, 1, 2]
    assert {event.pid for event in events[:3]} == {event.pid for event in events if event.kind == "exited"}
    assert [event.time_ns for event in events] == sorted(event.time_ns for event in events)


def test_events_that_wait_and_status_have_seen_are_still_told():
    with ir.ProcessLauncher(["true"]) as launcher:
        launcher.launch()
        launcher.status()
        launcher.wait()
        assert [event.kind for event in launcher.events()] == ["started", "exited", "ended"]


def test_events_are_complete_and_in_order_while_other_threads_wait():
    """Any of the threads may read an event. Without an order between them a launch in twenty lost some."""
    for _ in range(150):
        with ir.ProcessLauncher(["true"], nproc_per_node=2) as launcher:
            launcher.launch()
            others = [threading.Thread(target=launcher.wait) for _ in range(2)]
            for each in others:
                each.start()
            kinds = []
            while events := launcher.events():
                kinds += [event.kind for event in events]
            for each in others:
                each.join()
        assert (sorted(kinds), kinds[-1]) == (["ended", *2 * ["exited"], *2 * ["started"]], "ended")


def test_events_of_the_last_launch_are_not_told_in_the_next():
    with ir.ProcessLauncher(["true"]) as launcher:
        for _ in range(2):
            launcher.launch()
            launcher.wait()
        assert [event.kind for event in launcher.events()] == ["started", "exited", "ended"]


def test_events_come_back_empty_when_nothing_happens_in_time(bell):
    with ir.ProcessLauncher(idle(bell)) as launcher:
        launcher.launch()
        assert [event.kind for event in launcher.events()] == ["started"]
        assert launcher.events(timeout_s=0) == []
        assert launcher.events(timeout_s=0.01) == []


def test_a_program_that_cannot_be_executed_after_all_is_an_event_and_a_failure(tmp_path):
    program = tmp_path / "program"
    program.write_bytes(b"\x7fELF nonsense \0")
    program.chmod(0o755)
    with ir.ProcessLauncher([str(program)]) as launcher:
        launcher.launch()
        launcher.wait()
        assert "start_failed" in [event.kind for event in launcher.events()]
        first = launcher.first_failure()
        assert first.start_failure == "executing the program"
        assert launcher.exit_code(0) == 126


def test_first_failure_has_what_its_rank_said():
    says = "import infini_run as ir; ir.progress(2)"
    with ir.ProcessLauncher([sys.executable, "-c", f"{says}; raise SystemExit(3)"]) as launcher:
        launcher.launch()
        launcher.wait()
        assert launcher.first_failure().progress == 2


@pytest.mark.parametrize("max_restarts", [0, 1])
def test_first_failure_has_its_last_lines_without_a_report(max_restarts):
    command = ["sh", "-c", "echo boo >&2; exit 3"]
    with ir.ProcessLauncher(command, console="none", max_restarts=max_restarts) as launcher:
        launcher.launch()
        launcher.wait()
        assert launcher.first_failure().last_lines == ("boo",)
        assert launcher.first_failure() == launcher.report().first_failure
        assert "exited" in [event.kind for event in launcher.events(0)]


def test_wait_says_whether_everything_has_ended(bell):
    with ir.ProcessLauncher(idle(bell)) as launcher:
        launcher.launch()
        assert launcher.wait(0) is False
        assert launcher.wait(timeout_s=0.01) is False
        assert launcher.running() is True
        launcher.terminate()
        assert launcher.wait() is True
        assert launcher.wait(0) is True
        assert launcher.running() is False


def test_status_tells_each_rank_as_far_as_it_has_come(bell):
    script = 'echo > "$0"; [ "$RANK" = 1 ] || exec sleep 600; exit 0'
    with ir.ProcessLauncher(["sh", "-c", script, bell.path], nproc_per_node=3) as launcher:
        launcher.launch()
        bell.hear(3)
        until(lambda: launcher.exit_code(1) is not None)
        status = launcher.status()
        assert [e.rank for e in status] == [0, 1, 2]
        assert [e.end_s is None for e in status] == [True, False, True]
        assert all(e.pid > 0 and e.start_s > 0 for e in status)
        assert (launcher.exit_code(0), launcher.exit_code(1)) == (None, 0)
        assert launcher.first_failure() is None
        launcher.terminate()
        launcher.wait()
        assert [e.stopped for e in launcher.status()] == [True, False, True]
        assert [launcher.exit_code(rank) for rank in range(3)] == [143, 0, 143]
        assert launcher.first_failure() is None


@pytest.mark.parametrize("rank", [-1, 2, 99])
def test_a_rank_that_is_not_there_is_refused(rank, bell):
    with ir.ProcessLauncher(idle(bell), nproc_per_node=2) as launcher:
        launcher.launch()
        with pytest.raises(ir.UsageError, match="rank"):
            launcher.exit_code(rank)
        with pytest.raises(ir.UsageError, match="rank"):
            launcher.signal(signal.SIGTERM, rank)


def test_ranks_of_another_node_keep_their_global_numbers():
    with ir.ProcessLauncher(["true"], nnodes=3, node_rank=1, nproc_per_node=2) as launcher:
        launcher.launch()
        launcher.wait()
        assert [e.rank for e in launcher.status()] == [2, 3]
        assert launcher.exit_code(3) == 0
        with pytest.raises(ir.UsageError, match="rank=0: unknown rank; use 2 to 3"):
            launcher.exit_code(0)


def test_the_first_failure_is_the_first_to_die(bell):
    with ir.ProcessLauncher(idle(bell), nproc_per_node=3, keep_going=True) as launcher:
        launcher.launch()
        bell.hear(3)
        pids = [e.pid for e in launcher.status()]
        os.kill(pids[2], signal.SIGKILL)
        until(lambda: Path(f"/proc/{pids[2]}/stat").read_text().split()[2] == "Z")
        os.kill(pids[0], signal.SIGKILL)
        until(lambda: Path(f"/proc/{pids[0]}/stat").read_text().split()[2] == "Z")
        assert launcher.first_failure().rank == 2


def test_a_report_can_be_had_while_ranks_run(bell):
    with ir.ProcessLauncher(idle(bell)) as launcher:
        launcher.launch()
        assert launcher.report().exits[0].end_s is None
        launcher.kill()
        launcher.wait()
        assert launcher.report().exits[0].signal == signal.SIGKILL


# ---- ProcessLauncher: steering


def test_a_signal_reaches_one_rank_or_all_and_says_how_many(bell):
    with ir.ProcessLauncher(answer(bell), nproc_per_node=3) as launcher:
        launcher.launch()
        assert sorted(bell.hear(3)) == ["up 0", "up 1", "up 2"]
        assert launcher.signal(signal.SIGUSR1, 1) == 1
        assert bell.hear(1) == ["SIGUSR1 1"]
        assert launcher.signal(signal.SIGUSR1) == 3
        assert sorted(bell.hear(3)) == ["SIGUSR1 0", "SIGUSR1 1", "SIGUSR1 2"]
        assert launcher.signal(0) == 3
        launcher.kill()
        launcher.wait()
        assert launcher.signal(signal.SIGUSR1) == 0


def test_a_signal_to_what_has_ended_reaches_nobody_at_any_time():
    with ir.ProcessLauncher(["true"]) as launcher:
        launcher.launch()
        launcher.wait()
        assert launcher.signal(signal.SIGTERM) == 0
        launcher.report()
        assert launcher.signal(signal.SIGTERM) == 0
        assert launcher.signal(signal.SIGTERM, 0) == 0
        with pytest.raises(ir.UsageError):
            launcher.signal(signal.SIGTERM, 1)
    assert launcher.signal(signal.SIGTERM) == 0


def test_a_signal_that_is_none_is_refused(bell):
    with ir.ProcessLauncher(idle(bell)) as launcher:
        launcher.launch()
        with pytest.raises(ir.UsageError, match="number=True: unknown signal"):
            launcher.signal(True)
        with pytest.raises(ir.UsageError, match="number=9999: unknown signal"):
            launcher.signal(9999)


def test_terminate_asks_with_the_stop_signal_and_kill_does_not_ask(bell):
    with ir.ProcessLauncher(answer(bell), stop_signal="USR2", grace="1h") as launcher:
        launcher.launch()
        bell.hear(1)
        launcher.terminate()
        launcher.terminate()
        launcher.wait()
        assert launcher.exit_code(0) == 7
        assert launcher.status()[0].stopped
        launcher.launch()
        bell.hear(1)
        launcher.kill()
        launcher.wait()
        assert launcher.exit_code(0) == 128 + signal.SIGKILL
        assert launcher.first_failure() is None


def test_kill_ends_what_terminate_could_not(bell):
    with ir.ProcessLauncher(answer(bell), grace="1h") as launcher:
        launcher.launch()
        bell.hear(1)
        launcher.terminate()
        assert bell.hear(1) == ["SIGTERM 0"]
        assert launcher.wait(0) is False
        launcher.kill()
        assert launcher.wait() is True
        assert launcher.exit_code(0) == 137


@pytest.mark.parametrize("grace", [0, 0.01])
def test_the_grace_ends_with_sigkill(grace, bell):
    with ir.ProcessLauncher(answer(bell), grace=grace) as launcher:
        launcher.launch()
        bell.hear(1)
        launcher.terminate()
        launcher.wait()
        assert launcher.exit_code(0) == 137


def test_close_is_safe_at_any_time_and_twice(bell):
    launcher = ir.ProcessLauncher(idle(bell), nproc_per_node=2)
    launcher.close()
    launcher.launch()
    bell.hear(2)
    launcher.close()
    launcher.close()
    assert marked() == {}
    assert [launcher.exit_code(rank) for rank in (0, 1)] == [143, 143]
    assert launcher.wait() is True
    assert launcher.running() is False
    launcher.terminate()
    launcher.kill()


def test_an_exception_in_the_block_stops_every_rank_and_goes_on(bell):
    def fail():
        with launcher:
            launcher.launch()
            bell.hear(2)
            raise ZeroDivisionError

    launcher = ir.ProcessLauncher(idle(bell), nproc_per_node=2)
    with pytest.raises(ZeroDivisionError):
        fail()
    assert marked() == {}
    assert not launcher.running()


def test_a_grandchild_that_left_the_process_group_ends_with_the_block(bell):
    script = 'setsid sh -c \'echo $$ > "$0"; exec sleep 600\' "$0" & exec sleep 600'
    with ir.ProcessLauncher(["sh", "-c", script, bell.path]) as launcher:
        launcher.launch()
        pid = int(bell.hear(1)[0])
        launcher.terminate()
        launcher.wait()
        until(lambda: pid not in processes())  # whoever adopted it has to reap it
        assert pid in [stray.pid for stray in launcher.report().leftover_processes]


@pytest.mark.parametrize(("what", "steps"), [("start", 10000), ("end", 150), ("restart", 100)])
def test_an_interrupt_at_any_line_of_a_launch_leaves_no_rank_and_does_not_hang(what, steps):
    words = [sys.executable, CHILDREN / "interrupt_launch.py", what, str(steps)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=2 * LIMIT_S)
    assert done.stderr == ""
    assert int(done.stdout.split()[0]) > 100


def test_a_launcher_that_is_dropped_takes_its_ranks_with_it(bell):
    launcher = ir.ProcessLauncher(idle(bell), nproc_per_node=2)
    launcher.launch()
    bell.hear(2)
    with ended_after():
        with pytest.warns(ResourceWarning, match="was dropped while its ranks ran"):
            del launcher
        until(lambda: marked() == {})


@pytest.mark.filterwarnings("error::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_dropped_launcher_kills_ranks_though_warning_is_error(bell):
    launcher = ir.ProcessLauncher(idle(bell))
    launcher.launch()
    bell.hear(1)
    with ended_after():
        del launcher
        until(lambda: marked() == {})


def test_start_without_descriptors_names_them_and_waits_for_nothing():
    """Each look for leftovers would fail, too, and be repeated every 20 ms for 5 s."""
    ir.run(["true"])  # what is imported for it is
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    steps = set()
    for spare in range(24):
        waits = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + spare, hard))
        try:
            ir.run(["true"])
            break
        except ir.StartError as error:
            steps.add(error.step)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - waits < 100, spare
    else:
        raise AssertionError("no launch had enough descriptors")
    assert not any("memory" in step for step in steps)


def test_a_launch_that_the_caller_stopped_has_not_exited_with_0(bell):
    with ir.ProcessLauncher(idle(bell)) as launcher:
        launcher.launch()
        bell.hear(1)
        launcher.kill()
        launcher.wait()
        assert launcher.report().exit_code == 128 + signal.SIGKILL
        assert launcher.first_failure() is None


def test_two_ranks_start_where_the_host_has_closed_its_stdin():
    program = "import os, infini_run as ir; os.close(0); ir.run(['true'], nproc_per_node=2)"
    assert subprocess.run([sys.executable, "-c", program], stdin=subprocess.DEVNULL, check=False).returncode == 0


@pytest.mark.parametrize("closed", [(0,), (0, 1), (1, 2), (0, 1, 2)])
def test_nodes_are_reached_where_host_has_closed_its_stdio(tmp_path, closed):
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\n[ "$1" = -V ] && exit\nfor last; do :; done\nexec sh -c "$last"\n')
    ssh.chmod(0o755)
    program = "import os, sys, infini_run as ir\n"
    program += f"for fd in {closed}: os.close(fd)\n"
    program += "os._exit(ir.run(['true'], hosts='a,b', nproc_per_node=1).exit_code)\n"
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert subprocess.run([sys.executable, "-c", program], env=env, check=False, timeout=LIMIT_S).returncode == 0


def test_errors_travel_between_processes():
    with pytest.raises(ir.WorkerError) as failed:
        ir.run(["sh", "-c", "exit 3"])
    again = pickle.loads(pickle.dumps(failed.value))
    assert (str(again), again.rank, again.exit_code) == (str(failed.value), 0, 3)
    with pytest.raises(ir.ProgramMissing) as missing:
        ir.run(["./nowhere"])
    assert pickle.loads(pickle.dumps(missing.value)).path == "./nowhere"


def test_output_of_a_handle_does_not_wait_for_the_host_program():
    """The host program is in no method of the handle: more than a pipe holds goes its way all the same."""
    code = "import sys, infini_run as ir\nwith ir.ProcessLauncher(sys.argv[1:], nproc_per_node=2) as launcher:\n"
    code += "    launcher.launch()\n    sys.stdin.read()\n"
    words = ["sh", "-c", "head -c 300000 /dev/zero; echo over >&2; exec sleep 1000"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code, *words], **pipes) as host:
        try:
            assert len(host.stdout.read(600_000)) == 600_000
            assert [host.stderr.readline() for _ in range(2)] == [b"over\n"] * 2
        finally:
            host.stdin.close()
            assert host.wait(LIMIT_S) == 0


def test_nproc_is_nproc_per_node_of_a_command_too():
    assert ir.run(["true"], nproc=2).world_size == 2
    with ir.ProcessLauncher(["true"], nproc=2) as launcher:
        launcher.launch()
        assert launcher.report().world_size == 2


@pytest.mark.parametrize(
    ("command", "flags", "message"),
    [
        (["true"], {"nproc": 2, "nproc_per_node": 2}, "nproc_per_node=2 conflicts with nproc=2"),
        ([1, 2], {}, "command: 1: expected text"),
        (["true", b"x"], {}, "command: b'x': expected text"),
        (3, {}, "command=3: expected a list"),
        (["true"], {"log_dir": 3}, "log_dir=3: expected a path"),
        (["true"], {"trace": True}, "trace=True: expected FILE"),
        (["true"], {"nproc_per_node": True}, r"nproc_per_node=True: expected N\|auto\|gpu\|cpu"),
        (["true"], {"grace": False}, "grace=False: expected TIME"),
    ],
    ids=["both", "number", "bytes", "no-list", "path", "switched-path", "switched-number", "switched-off"],
)
def test_a_value_of_another_kind_is_told_with_its_name(command, flags, message):
    with pytest.raises(ir.UsageError, match=f"^{message}"):
        ir.run(command, **flags)


def test_report_of_a_failure_needs_no_descriptor():
    """Whether another program has the rendezvous port is unknown then. The first report imports what it needs."""
    with ir.ProcessLauncher(["sh", "-c", "exit 3"]) as launcher:
        launcher.launch()
        assert launcher.wait(60)
        launcher.report()
        with no_descriptor_left():
            assert launcher.report().exit_code == 3


def test_events_of_closed_launcher_leave_no_descriptor():
    with ir.ProcessLauncher(["true"]) as launcher:
        launcher.launch()
        assert launcher.wait(60)
    before = descriptors()
    launcher.events(0)
    assert descriptors() == before
