"""infini-job on this machine: the whole life of a job, without any scheduler."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from infini_run.jobs.allocation.job_run import _SIGNAL_WAIT_S
from tests.support.build_c import build
from tests.support.command import in_locale, play
from tests.support.job_case import FILES, JOB, check_files
from tests.support.processes import is_alive
from tests.support.waiting import LIMIT_S, until


def hold(bell):
    """A rank that rings, and lives until it is told to end."""
    return ("sh", "-c", f'echo up $RANK; echo "$RANK $$" > {bell.path}; exec sleep 1000')


def test_a_job_that_ends_well_is_completed(local):
    done = local.call("submit", "--slots=2", "--wait", "--", "sh", "-c", "echo hello $RANK of $WORLD_SIZE")
    assert done.returncode == 0, done.stderr
    first, last = done.stdout.splitlines()
    name = first.split()[1]
    assert first.startswith(f"job {name}  local ")
    assert first.endswith(f"  1 node x 2 cpus   logs: infini-job logs -f {name}")
    assert last == "COMPLETED"
    assert sorted(local.lines(name)) == ["[rank 0] hello 0 of 2", "[rank 1] hello 1 of 2"]


def test_repeated_lists_of_words_add_up(local, tmp_path):
    words = (
        "--env=A=1",
        "--env=B='2 3' C=4",
        f"--run_options=--report={tmp_path}/r",
        "--run_options=--max_restarts=1",
    )
    script = 'echo "$A $B $C $TORCHELASTIC_MAX_RESTARTS"'
    name = local.submit(*words, "--", "sh", "-c", script)
    assert local.wait(name)["headline"] == "COMPLETED"
    assert local.lines(name) == ["[rank 0] 1 2 3 4 1"]
    assert (tmp_path / "r").exists()


def test_the_first_failure_is_told_by_code_node_and_rank(local):
    done = local.call("submit", "--slots=4", "--wait", "--", *play("@2", "exit=7", "@*", "wait"))
    host = os.uname().nodename
    assert done.returncode == 7
    assert done.stdout.splitlines()[1].startswith(
        f"FAILED exit 7 on {host}, rank 2: rank 2 on {host} failed: exit code 7"
    )
    name = done.stdout.split()[1]
    failure = json.loads((local.path / name / "0" / "first_failure").read_text())
    assert (failure["node"], failure["rank"], failure["code"]) == (host, 2, 7)
    assert json.loads((local.path / name / "0" / "report.json").read_text())["first_failure"] == 2


def test_a_rank_that_dies_of_a_signal_gives_its_code_as_a_shell_does(local):
    done = local.call("submit", "--slots=2", "--wait", "--", *play("@1", "die=SEGV", "@*", "wait"))
    assert done.returncode == 139
    assert "FAILED exit 139 " in done.stdout


def test_submit_does_not_wait_and_the_job_outlives_it(local, bell):
    name = local.submit("--slots=2", "--", *hold(bell))
    pids = [int(line.split()[1]) for line in bell.hear(2)]
    status = local.wait(name, "RUNNING")
    assert status["nodes"] == [os.uname().nodename]
    local.call("cancel", name)
    assert local.wait(name)["headline"] == "CANCELLED"
    assert not any(is_alive(pid) for pid in pids)


def test_it_holds_nothing_of_who_submitted_it(local, bell):
    """A pipe that it inherited would never end."""
    done = subprocess.run(
        [*JOB, "submit", "--", *hold(bell)],
        env=local.env,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    bell.hear(1)
    local.call("cancel", done.stdout.split()[1])


def test_cancel_gives_ranks_their_grace(local, bell):
    script = f'trap "echo saved; exit 0" TERM; (echo up > {bell.path}; exec sleep 1000) & wait'
    name = local.submit("--", "sh", "-c", script)
    bell.hear(1)
    called_s = time.time()
    assert local.call("cancel", name).returncode == 0
    assert local.wait(name)["state"] == "CANCELLED"
    written_s = (local.path / name / "exit").stat().st_mtime
    assert written_s < called_s + _SIGNAL_WAIT_S  # it has its signal, and waits for no other
    assert "[rank 0] saved" in local.lines(name)
    assert local.call("cancel", name).returncode == 0  # it has ended: nothing to do


def test_ranks_that_end_well_by_the_cancellation_before_the_launcher_hears_of_it_are_cancelled(local, tmp_path, bell):
    """A scheduler signals every process of a job, one after the other."""
    os.mkfifo(tmp_path / "go")
    name = local.submit("--", "sh", "-c", f"echo up > {bell.path}; read word < {tmp_path}/go")
    bell.hear(1)
    (local.path / name / "cancelled").touch()
    (tmp_path / "go").write_text("\n")
    until((local.path / name / "0" / "report.json").exists)
    os.kill(int((local.path / name / "id").read_text().split(".")[0]), signal.SIGTERM)
    status = local.wait(name)
    assert (status["headline"], status["code"], status["reason"]) == ("CANCELLED", 143, "it was canceled")


def test_a_cancellation_that_no_scheduler_took_does_not_make_a_job_that_ends_well_a_cancelled_one(
    local, tmp_path, bell
):
    os.mkfifo(tmp_path / "go")
    name = local.submit("--", "sh", "-c", f"echo up > {bell.path}; read word < {tmp_path}/go")
    bell.hear(1)
    (local.path / name / "cancelled").touch()
    (tmp_path / "go").write_text("\n")
    assert local.wait(name)["headline"] == "COMPLETED"


def test_without_pidfds_a_job_is_followed_and_cancelled(local, bell):
    """Linux 4.18 (RHEL 8), and sandboxes."""
    name = local.submit("--", *hold(bell))
    bell.hear(1)
    deny = (build("deny.c", instead_of="*"), "pidfd_open", "1", "0")
    words = {"env": local.env, "capture_output": True, "text": True, "timeout": LIMIT_S, "check": False}
    done = subprocess.run([*deny, *JOB, "cancel", name], **words)
    if done.returncode == 77:
        pytest.skip("no filter is permitted here")
    assert (done.returncode, done.stderr) == (0, "")
    assert local.wait(name)["state"] == "CANCELLED"
    done = subprocess.run([*deny, *JOB, "submit", "--wait", "--", "sh", "-c", "exit 3"], **words)
    assert done.returncode == 3
    assert "FAILED exit 3 " in done.stdout


def test_one_whose_process_was_killed_is_lost_and_not_finished(local, bell):
    waiting = local.start("submit", "--wait", "--", *hold(bell))
    bell.hear(1)
    waiting.read_until(b"\n")
    name = waiting.out.split()[1].decode()
    pid = int((local.path / name / "id").read_text().split(".")[0])
    os.kill(pid, signal.SIGKILL)
    assert waiting.wait() == 1
    assert waiting.out.splitlines()[1].startswith(b"LOST: its process is gone and left no reason")
    assert local.status(name)["state"] == "LOST"


def test_where_nothing_can_be_written_a_job_is_told_of_and_can_be_taken_away(local, bell):
    name = local.submit("--", "sh", "-c", f"echo $$ >{bell.path}; exec sleep 1000")
    bell.hear(1)
    full = ["prlimit", "--fsize=0", *JOB]

    def call(*words):
        return subprocess.run([*full, *words], env=local.env, capture_output=True, text=True, check=False)

    os.kill(int((local.path / name / "id").read_text().split(".")[0]), signal.SIGKILL)
    until(lambda: "LOST" in call("list").stdout)
    assert not (local.path / name / "exit").exists()
    assert call("forget", name).returncode == 0
    assert not (local.path / name).exists()


def test_ranks_are_warned_before_the_limit(local):
    """They have six seconds to be there: a busy machine may take some."""
    name = local.submit("--slots=2", "--time=1000", "--warn=994", "--", *play("tell=USR2", "wait"))
    local.wait(name, "WARNED")
    until(lambda: len(local.lines(name)) == 2)
    assert {tuple(line.split()[2:4]) for line in local.lines(name)} == {("got", "USR2")}
    assert "infini-run: sent SIGUSR2 to all ranks: 994 s left until the time limit\n" in local.logs(name)
    local.call("cancel", name)
    assert local.wait(name)["state"] == "CANCELLED"


def test_another_signal_may_be_the_warning(local):
    """Who waits sees a state that lasts; one that is over in a moment it may miss."""
    name = local.submit("--time=1000", "--warn=USR1@994", "--", *play("tell=USR1", "wait"))
    local.wait(name, "WARNED")
    until(lambda: any(" got USR1" in line for line in local.lines(name)))
    local.call("cancel", name)
    assert local.wait(name)["headline"] == "CANCELLED"


def test_the_limit_ends_it(local):
    done = local.call("submit", "--time=2s", "--wait", "--", "sleep", "1000")
    assert done.returncode == 143
    assert done.stdout.splitlines()[1] == "TIMEOUT exit 143: its time limit was reached"


def test_restarts_have_logs_of_their_own(local):
    script = "echo attempt $INFINI_JOB_ATTEMPT; [ $INFINI_JOB_ATTEMPT = 2 ] || exit 3"
    name = local.submit("--restarts=2", "--", "sh", "-c", script)
    assert local.wait(name)["headline"] == "COMPLETED"
    assert local.lines(name) == ["[rank 0] attempt 0", "[rank 0] attempt 1", "[rank 0] attempt 2"]
    assert local.lines(name, "--attempt=1") == ["[rank 0] attempt 1"]
    assert local.status(name)["attempt"] == 2
    done = local.call("logs", name, "--attempt=3")
    assert (done.returncode, done.stderr) == (
        2, f"infini-job: --attempt=3: job {name} ran 3 times, counted from 0\n",
    )  # fmt: skip


def test_restarts_are_counted(local):
    name = local.submit("--restarts=1", "--", "sh", "-c", "exit 3")
    status = local.wait(name)
    assert (status["headline"], status["attempt"]) == (f"FAILED exit 3 on {os.uname().nodename}, rank 0", 1)


def test_job_has_its_end_in_any_locale(local):
    """Python's ASCII stands for any locale that is not UTF-8."""
    local.env |= {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    name = local.submit("--", "sh", "-c", r"printf '\342\230\203 boom\n' >&2; exit 3")
    assert local.wait(name)["headline"] == f"FAILED exit 3 on {os.uname().nodename}, rank 0"
    assert "  | \N{SNOWMAN} boom" in local.lines(name)


def test_a_rank_that_exits_85_is_run_again_and_that_is_no_failure(local):
    name = local.submit("--", "sh", "-c", "[ $INFINI_JOB_ATTEMPT = 3 ] || exit 85")
    status = local.wait(name)
    assert (status["headline"], status["attempt"]) == ("COMPLETED", 3)
    run = local.path / name / "0"
    assert (run / "log").read_text().count("asked to run again (exit code 85") == 1
    report = json.loads((run / "report.json").read_text())
    rank = report["ranks"][0]
    assert (report["first_failure"], rank["failed"], rank["asked_again"], rank["exit_code"]) == (0, False, True, 85)


class Savers:
    """Ranks that save when they are told to, one by one, and then ask for another run; the next run ends at once."""

    def __init__(self, folder, bell):
        self.folder = folder
        for rank in (0, 1):
            os.mkfifo(folder / f"save{rank}")
        self.script = (
            f"[ $INFINI_JOB_ATTEMPT = 0 ] || exit 0; trap 'echo $RANK >> {folder}/termed; exit 1' TERM; "
            f"echo $RANK $$ > {bell.path}; exec 3<> {folder}/save$RANK; read go <&3; "
            f"echo $RANK >> {folder}/saved; exit 85"
        )

    def save(self, rank):
        (self.folder / f"save{rank}").write_text("go\n")

    def has(self, what):
        path = self.folder / what
        return path.read_text().split() if path.exists() else []


@pytest.fixture
def savers(tmp_path, bell):
    return Savers(tmp_path, bell)


def asked_again(rank, log):
    """The line of the launcher about who asked, and about the others."""
    return next(
        line for line in log.splitlines() if f"rank {rank} on {os.uname().nodename} asked to run again" in line
    )


def test_a_rank_that_asks_to_be_run_again_lets_the_others_save(local, savers, bell):
    name = local.submit("--slots=2", "--run_options=--grace=1000", "--", "bash", "-c", savers.script)
    pids = dict(line.split() for line in bell.hear(2))
    savers.save(1)
    until(lambda: not is_alive(int(pids["1"])))
    savers.save(0)
    status = local.wait(name)
    assert (status["headline"], status["attempt"]) == ("COMPLETED", 1)
    assert (savers.has("saved"), savers.has("termed")) == (["1", "0"], [])
    log = (local.path / name / "0" / "log").read_text()
    line = asked_again(1, log)
    assert "asked to run again (exit code 85, pid " in line
    assert line.endswith("; 1 more asked")
    assert "failed" not in log


def test_the_others_have_the_grace_to_save_and_then_are_stopped(local, savers, bell):
    name = local.submit("--slots=2", "--run_options=--grace=0.5", "--", "bash", "-c", savers.script)
    bell.hear(2)
    savers.save(1)
    status = local.wait(name)
    assert (status["headline"], status["attempt"]) == ("COMPLETED", 1)
    assert (savers.has("saved"), savers.has("termed")) == (["1"], ["0"])
    assert asked_again(1, (local.path / name / "0" / "log").read_text()).endswith("; 1 other was stopped")


def test_a_job_is_cancelled_at_once_though_ranks_have_time_to_save(local, savers, bell):
    name = local.submit("--slots=2", "--run_options=--grace=1000", "--", "bash", "-c", savers.script)
    pids = dict(line.split() for line in bell.hear(2))
    savers.save(1)
    until(lambda: not is_alive(int(pids["1"])))
    local.call("cancel", name)
    status = local.wait(name)
    assert (status["state"], status["attempt"]) == ("CANCELLED", 0)
    assert (savers.has("saved"), savers.has("termed")) == (["1"], ["0"])


def test_another_run_of_the_job_is_no_restart_of_its_ranks(local):
    script = "echo run $INFINI_JOB_ATTEMPT.$TORCHELASTIC_RESTART_COUNT; [ $INFINI_JOB_ATTEMPT = 1 ] || exit 85"
    name = local.submit("--run_options=--max_restarts=3", "--", "sh", "-c", script)
    assert local.wait(name)["headline"] == "COMPLETED"
    lines = [*local.lines(name, "--attempt=0"), *local.lines(name, "--attempt=1")]
    assert lines == ["[rank 0] run 0.0", "[rank 0] run 1.0"]


def test_a_job_that_is_cancelled_is_not_run_again(local, bell):
    name = local.submit("--restarts=5", "--", *hold(bell))
    bell.hear(1)
    local.call("cancel", name)
    status = local.wait(name)
    assert (status["state"], status["attempt"]) == ("CANCELLED", 0)


def test_one_that_was_cancelled_before_it_began_has_a_time_and_the_code_of_the_signal(local):
    name = local.submit("--", "true")
    local.wait(name)
    (local.path / name / "exit").unlink()
    (local.path / name / "cancelled").touch()
    began_s = time.time()
    done = subprocess.run(["sh", local.path / name / "job.sh"], env=local.env, capture_output=True, check=False)
    ending = json.loads((local.path / name / "exit").read_text())
    assert (done.returncode, ending["state"], ending["code"]) == (143, "CANCELLED", 143)
    assert ending["end_s"] >= began_s


def test_logs_follow_from_the_first_line_to_the_end(local):
    name = local.submit("--slots=2", "--", *play("say=one", "say=two"))
    following = local.start("logs", "-f", name)
    assert following.wait() == 0
    ranks = [line.split()[1:4] for line in following.out.decode().splitlines() if line.startswith("[rank")]
    assert sorted((words[1], words[2]) for words in ranks) == [("one", "0"), ("one", "1"), ("two", "0"), ("two", "1")]


def test_logs_follow_shows_a_line_when_it_is_written(local, tmp_path, bell):
    os.mkfifo(tmp_path / "go")
    script = f"echo first; echo up > {bell.path}; read word < {tmp_path}/go; echo $word"
    name = local.submit("--", "sh", "-c", script)
    bell.hear(1)
    following = local.start("logs", "-f", name)
    following.read_until(b"[rank 0] first\n")
    (tmp_path / "go").write_text("second\n")
    following.read_until(b"[rank 0] second\n")
    assert following.wait() == 0


def test_logs_follow_goes_on_through_restarts(local, bell, tmp_path):
    os.mkfifo(tmp_path / "go")
    script = (
        f"echo life $INFINI_JOB_ATTEMPT; [ $INFINI_JOB_ATTEMPT = 1 ] && exit 0; echo up > {bell.path}; "
        f"read word < {tmp_path}/go; exit 3"
    )
    name = local.submit("--restarts=1", "--", "sh", "-c", script)
    bell.hear(1)
    following = local.start("logs", "--follow", name)
    following.read_until(b"life 0\n")
    (tmp_path / "go").write_text("on\n")
    assert following.wait() == 0
    assert b"[rank 0] life 1\n" in following.out


def test_logs_of_one_rank_have_its_folded_lines(local, monkeypatch):
    monkeypatch.setitem(local.env, "INFINI_RUN_CONSOLE", "fold")
    monkeypatch.setitem(local.env, "INFINI_RUN_TIMESTAMPS", "1")
    name = local.submit("--slots=3", "--", "sh", "-c", "echo same; echo from $RANK")
    local.wait(name)
    lines = local.lines(name, "--rank=1")
    assert [line.partition("] ")[2] for line in lines] == ["same", "from 1"]
    assert all(len(line.split()[0]) == 24 for line in lines)
    assert local.lines(name, "--node=0") == local.lines(name)


def test_logs_of_one_rank(local):
    name = local.submit("--slots=3", "--", "sh", "-c", "echo from $RANK; echo '[rank 1] I am' >&2")
    local.wait(name)
    assert sorted(local.lines(name, "--rank=1")) == ["[rank 1 err] [rank 1] I am", "[rank 1] from 1"]
    assert len(local.lines(name, "--node=0")) == 6
    done = local.call("logs", "--rank=3", name)
    assert (done.returncode, done.stderr) == (2, "infini-job: --rank: unknown rank 3; use ranks 0 to 2\n")
    for node in ("nosuch", "9" * 5000):  # more digits than int() reads
        done = local.call("logs", f"--node={node}", name)
        assert done.returncode == 2
        assert done.stderr.startswith(f"infini-job: --node={node}: unknown node; use ")


def test_the_environment_goes_with_it_whatever_its_bytes(local, tmp_path):
    wild = "a b\n'\"$(x) \\ * \udcff\udc80 ü"
    env = {"WILD": wild, "SLURM_NTASKS": "5", "SBATCH_TIMELIMIT": "1", "PBS_DPREFIX": "#XX"}
    show = f"import os; open({str(tmp_path / 'seen')!r}, 'wb').write(os.environb[b'WILD'])"
    check = (
        "; print(sorted(n for n in os.environ if n.startswith(('SLURM_', 'SBATCH_', 'PBS_'))), os.environ['MORE'])"
    )
    words = ("--env=MORE='x y'", "--", sys.executable, "-c", show + check)
    name = local.submit(*words, env=env)
    local.wait(name)
    assert local.lines(name) == ["[rank 0] [] x y"]
    assert (tmp_path / "seen").read_bytes() == os.fsencode(wild)
    assert stat.S_IMODE((local.path / name / "env").stat().st_mode) == 0o600
    assert stat.S_IMODE((local.path / name).stat().st_mode) == 0o700


def test_ranks_start_where_it_was_submitted(local, tmp_path):
    folder = tmp_path / "with space"
    folder.mkdir()
    name = local.submit("--", "pwd", cwd=folder)
    local.wait(name)
    assert local.lines(name) == [f"[rank 0] {folder}"]


def test_flags_of_the_launcher_itself_are_taken(local):
    done = local.call("submit", "--run_options=--keep_going", "--slots=2", "--wait", "--",
                      *play("@0", "exit=4", "@1", "pause=0.1", "say=on"))  # fmt: skip
    assert done.returncode == 4
    assert "on 1" in local.logs(done.stdout.split()[1])


@pytest.mark.parametrize("is_variable", [False, True])
def test_files_that_flags_name_are_written_in_directory_of_ranks(local, tmp_path, is_variable):
    """An earlier launch's are replaced, and its events stay."""
    (tmp_path / "cwd").mkdir()
    for name in FILES.values():
        (tmp_path / "cwd" / name).write_text("{}\n" if name == FILES["events"] else "old\n")
    (tmp_path / "cwd" / FILES["events"]).write_text('{"kind": "old"}\n')
    variables = {f"INFINI_RUN_{flag.upper()}": name for flag, name in FILES.items()}
    options = "" if is_variable else " ".join(f"--{flag}={name}" for flag, name in FILES.items())
    words = [*([f"--run_options={options}"] if options else []), f"--cwd={tmp_path}/cwd", "--slots=2"]
    env = variables if is_variable else {}
    local.wait(local.submit(*words, "--", "sh", "-c", "exit $((3 * RANK))", env=env))
    check_files(tmp_path / "cwd", os.uname().nodename, 2)
    assert (tmp_path / "cwd" / FILES["events"]).read_text().startswith('{"kind": "old"}\n{"kind":"launched"')


def test_file_that_cannot_be_written_ends_job_before_ranks_start(local, tmp_path):
    env = {"INFINI_RUN_TRACE": "/proc/no/t", "INFINI_RUN_TERMINATION_LOG": f"{tmp_path}/l"}
    name = local.submit("--", "echo", "started", env=env)
    said = "INFINI_RUN_TRACE=/proc/no/t cannot be written: No such file or directory; use a file in a folder that"
    end = local.wait(name)
    assert (end["headline"], end["reason"].startswith(said)) == ("FAILED exit 2", True), end
    assert (tmp_path / "l").read_text().startswith(f"infini-run: {said}")
    assert local.lines(name) == []


def test_variables_for_flags_of_the_job_itself_change_nothing(local):
    """They are for launches of the shell."""
    env = {"INFINI_RUN_HOSTS": "a,b", "INFINI_RUN_NNODES": "4", "PET_NNODES": "2", "INFINI_RUN_DRY_RUN": "1"}
    name = local.submit("--slots=2", "--", "sh", "-c", "echo $WORLD_SIZE $NNODES", env=env)
    assert local.wait(name)["headline"] == "COMPLETED"
    assert sorted(local.lines(name)) == ["[rank 0] 2 1", "[rank 1] 2 1"]


def test_logs_of_flag_have_line_between_runs_of_job(local, tmp_path):
    words = ("--restarts=1", f"--cwd={tmp_path}", "--run_options=--log_dir=logs")
    name = local.submit(*words, "--", "sh", "-c", "echo is $INFINI_JOB_ATTEMPT; exit $((1 - INFINI_JOB_ATTEMPT))")
    assert local.wait(name)["headline"] == "COMPLETED"
    log = (tmp_path / "logs" / "rank_0.log").read_text()
    assert log.splitlines() == ["is 0", f"infini-run: run 1 of job {name}", "is 1"]


def test_relative_flag_file_is_that_of_the_submission(local, tmp_path):
    (tmp_path / "flags").write_text("--timestamps\n")
    for options in ("--flagfile=flags", "--flagfile flags"):
        name = local.submit(f"--run_options={options}", "--", "echo", "on", cwd=tmp_path)
        assert local.wait(name)["headline"] == "COMPLETED"
        assert re.fullmatch(r"\S+Z \[rank 0\] on", local.lines(name)[0]), local.lines(name)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--bogus=1", ["unknown flag --bogus; run --help for the list"]),
        (
            "--grace=x",
            ["--grace=x: not a time from 0 to 2147483647 seconds; use 10, 10s, 500ms, 2m, 1h30m, or 1d"],
        ),
        (
            "--nproc_per_node=2 --hosts=a",
            [
                "--nproc_per_node=2: use --slots and --slots_per_node of infini-job",
                "--hosts=a: the scheduler chooses the nodes; use --scheduler and --pool of infini-job",
            ],
        ),
        ("--dry_run", ["--dry_run: use --print or --check of infini-job"]),
        ("--isolate", ["--isolate: a job needs no isolation; drop it"]),
        ("--help", ["--help: starts no ranks; run infini-run --help"]),
        ("--keep_going x", ["x is not a flag of infini-run"]),
        ("--keep_going --", ["-- is not a flag of infini-run"]),
        ("--events=fd:3", ["--events=fd:3: a job has no descriptor of your shell; use a file"]),
        (
            "--console=inherit",
            ["--console=inherit: infini-run writes the output of a job; use --console=lines, prefix, fold, or none"],
        ),
        ("--live", ["--live: use infini-job logs -f or infini-job status"]),
        ("--stacks", ["--stacks: use infini-job top, follow, stacks, or cancel"]),
        ("--ssh_config=c", ["--ssh_config=c: the scheduler reaches the nodes; drop it"]),
        ("--token_file=t", ["--token_file=t: the nodes of a job need no token; drop it"]),
        ("--link_port=8", ["--link_port=8: no effect with --scheduler=local; drop it"]),
        ("--rdzv_conf=join_timeout=5", ["--rdzv_conf=join_timeout=5: no effect with --scheduler=local; drop it"]),
        ("--ranks_on_console=7", ["--ranks_on_console=7: unknown rank 7; use ranks 0 to 0"]),
        (
            "--on_join=wait",
            ["--on_join=wait: needs a job that can lose a node; add --spares=N, or use --nnodes=MIN:MAX"],
        ),
    ],
)
def test_flags_of_the_launcher_are_checked_before_anything_is_made(local, options, said):
    done = local.call("submit", f"--run_options={options}", "--", "true")
    assert (done.returncode, done.stderr.splitlines()) == (2, [f"infini-job: --run_options: {line}" for line in said])
    assert local.is_empty()


def test_file_of_one_launch_is_refused_for_arrays(local):
    done = local.call("submit", "--array=0-1", "--run_options=--report=r --events=e", "--", "true")
    why = "each task would replace the file; drop it, as each task has its own report.json"
    said = f"infini-job: --run_options: --report=r: conflicts with --array: {why}\n"
    assert (done.returncode, done.stderr) == (2, said)


def test_forget_takes_away_what_has_ended_and_what_is_lost_and_nothing_that_lives(local, bell):
    ended, lost, alive = local.submit("--", "true"), local.submit("--", *hold(bell)), local.submit("--", *hold(bell))
    bell.hear(2)
    os.kill(int((local.path / lost / "id").read_text().split(".")[0]), signal.SIGKILL)
    local.wait(ended)
    local.wait(lost, "LOST")
    local.wait(alive, "RUNNING")
    done = local.call("forget", alive, ended, lost)
    said = f"infini-job: job {alive} is RUNNING; run infini-job cancel {alive} first\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)
    assert os.listdir(local.path) == [alive]
    local.call("cancel", alive)
    local.wait(alive)
    assert local.call("forget", alive).returncode == 0
    assert local.is_empty()


def test_list_and_status_tell_the_same(local, bell):
    first = local.submit("--", "true")
    local.wait(first)
    second = local.submit("--", *hold(bell))
    bell.hear(1)
    local.wait(second, "RUNNING")
    listed = local.call("list").stdout.splitlines()
    assert [line.split()[:2] for line in listed] == [[first, "COMPLETED"], [second, "RUNNING"]]
    assert [line.split()[0] for line in local.call("status").stdout.splitlines()] == [second]
    assert [job["name"] for job in json.loads(local.call("list", "--json").stdout)] == [first, second]
    local.call("cancel", second)
    local.wait(second)
    assert local.call("status").stdout == "no job is waiting or running; run infini-job list to see 2 finished jobs\n"


def test_a_directory_that_cannot_be_read_hides_no_other(local):
    first, second = local.submit("--", "true"), local.submit("--", "true")
    local.wait(second)
    local.wait(first)
    (local.path / first / "request.json").write_text("{}")
    done = local.call("list")
    assert [line.split()[0] for line in done.stdout.splitlines()] == [second]
    assert done.stderr.startswith(f"infini-job: {local.path / first}: not a job directory of this version; ")
    assert len(done.stderr.splitlines()) == 1
    (local.path / first / "request.json").write_text("[")
    assert "request.json: not as infini-job wrote it" in local.call("list").stderr
    assert local.call("status", first).returncode == 1
    content = json.loads((local.path / second / "request.json").read_text())
    content["request"]["of_tomorrow"] = 1
    (local.path / first / "request.json").write_text(json.dumps(content))
    done = local.call("list")
    assert [line.split()[0] for line in done.stdout.splitlines()] == [second]
    assert done.stderr.startswith(f"infini-job: {local.path / first}: job of another infini-run version; ")
    assert len(done.stderr.splitlines()) == 1


def test_a_program_that_is_not_there_is_told(local):
    done = local.call("submit", "--wait", "--", "nosuch-program")
    assert done.returncode == 127
    assert done.stdout.splitlines()[1].startswith("FAILED exit 127: ")
    assert "nosuch-program" in done.stdout


def test_a_directory_of_another_user_is_refused(local):
    if os.geteuid() != 0:
        pytest.skip("needs root to give a directory away")
    name = local.submit("--", "true")
    local.wait(name)
    os.chown(local.path / name, 65534, 65534)
    for verb in ("status", "logs", "cancel"):
        done = local.call(verb, name)
        assert done.returncode == 2
        assert done.stderr == f"infini-job: job {name} belongs to user nobody: only its owner can read it\n"
    others = "no jobs in this directory are yours; only its owner can read a job (1 of user nobody)\n"
    assert local.call("list").stdout == others


def test_a_directory_that_cannot_be_made_is_told_and_nothing_runs(local, tmp_path):
    (tmp_path / "file").write_text("")
    done = local.call("submit", f"--dir={tmp_path}/file/jobs", "--", "touch", tmp_path / "ran")
    assert done.returncode == 2
    assert done.stderr == (
        f"infini-job: --dir={tmp_path}/file/jobs: cannot create a job directory there: Not a directory; "
        "use a directory that you can write and that the nodes share\n"
    )
    assert not (tmp_path / "ran").exists()


def test_python_submits_waits_reads_and_cancels(local, bell, tmp_path):
    script = f"""
import infini_run as ir
job = ir.submit(["sh", "-c", "echo one $RANK; exit 5"], slots=2, scheduler="local", dir={str(local.path)!r})
status = job.wait()
print(status.state, status.code, status.exit_code)
print(sorted({{line for line in job.logs() if line.startswith("[rank 0]")}}))
job = ir.submit({list(hold(bell))!r}, scheduler="local", dir={str(local.path)!r})
print(job.wait(0.01).is_final)
job.cancel()
print(job.wait().state, [line for line in job.logs(follow=True, rank=0)])
"""
    done = subprocess.run([sys.executable, "-c", script], env=local.env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, second, third, fourth = done.stdout.splitlines()
    assert first == "FAILED 5 5"
    assert second in ("['[rank 0] one 0']", "[]")
    assert third == "False"
    assert fourth.startswith("CANCELLED [")


def test_interrupting_who_waits_leaves_the_job(local, bell):
    waiting = local.start("submit", "--wait", "--", *hold(bell))
    waiting.read_until(b"\n")
    name = waiting.out.split()[1].decode()
    bell.hear(1)
    waiting.signal(signal.SIGINT)
    assert waiting.wait() == -signal.SIGINT
    assert local.status(name)["state"] == "RUNNING"
    local.call("cancel", name)
    local.wait(name)


def test_the_script_can_be_run_by_hand(local):
    """What is in the directory is all there is."""
    name = local.submit("--", "sh", "-c", "echo again")
    local.wait(name)
    script = local.path / name / "job.sh"
    assert shlex.split(script.read_text().splitlines()[-1])[-1] == str(local.path / name)
    subprocess.run(["sh", script], env=local.env, check=True, timeout=LIMIT_S)
    assert local.lines(name).count("[rank 0] again") == 2
    until(lambda: local.status(name)["is_final"])
    assert Path(local.log(name, 1)).exists()


RUNTIME = """#!/bin/sh
printf '%s\\n' "$@" >>{folder}/asked
while [ "$1" != "docker://image:1" ]; do shift; done
shift 2 # the image, and its Python
exec {python} "$@"
"""


def test_ranks_run_in_a_container(local, tmp_path):
    """One for the node, in which infini-run starts the ranks."""
    runtime = tmp_path / "bin" / "apptainer"
    runtime.parent.mkdir()
    runtime.write_text(RUNTIME.format(folder=tmp_path, python=sys.executable))
    runtime.chmod(0o755)
    env = {"PATH": f"{runtime.parent}:{os.environ['PATH']}"}
    words = ("--slots=2", "--container=image:1", "--bind=/data:/there:ro")
    name = local.submit(*words, "--", "sh", "-c", "echo in $RANK", env=env, cwd=tmp_path)
    assert local.wait(name)["state"] == "COMPLETED", local.logs(name)
    assert sorted(local.lines(name)) == ["[rank 0] in 0", "[rank 1] in 1"]
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked[:2] == ["exec", "--writable-tmpfs"]
    assert asked.count("docker://image:1") == 1
    assert {f"--bind={local.path}/{name}", f"--bind={tmp_path}", "--bind=/data:/there:ro"} <= set(asked)


def test_a_container_that_cannot_be_is_told(local):
    for words, said in (
        (
            ("--runtime=pyxis", "--container=x"),
            "--runtime=pyxis: needs srun, which --scheduler=local lacks; use --runtime=apptainer, podman, or enroot",
        ),
        (
            ("--runtime=podman", "--container=x", "--bind=:"),
            "--bind=:: expected HOST, HOST:THERE, or HOST:THERE:ro",
        ),
        (
            ("--runtime=lxc", "--container=x"),
            "--runtime=lxc: expected apptainer, singularity, podman, enroot, or pyxis",
        ),
    ):
        done = local.call("submit", *words, "--", "true")
        assert done.returncode == 2
        assert done.stderr.startswith(f"infini-job: {said}")
        assert len(done.stderr.splitlines()) == 1
    assert local.is_empty()


def test_nothing_is_imported_from_the_folder_that_it_runs_in(local, tmp_path):
    """What is called signal.py there belongs to the ranks."""
    for name in ("signal", "json", "select", "socket"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')")
    name = local.submit("--slots=2", f"--cwd={tmp_path}", "--", "sh", "-c", "echo hello; pwd")
    assert local.wait(name)["state"] == "COMPLETED", local.logs(name)
    assert sorted(set(local.lines(name))) == [f"[rank {r}] {text}" for r in (0, 1) for text in (tmp_path, "hello")]


def test_tmpdir_is_dropped_when_node_cannot_write_it(local, tmp_path):
    """It is of the shell that submitted, perhaps on a machine with another /scratch."""
    words = ("--slots=1", "--", "sh", "-c", "echo ${TMPDIR-none}")
    missing = local.submit(*words, env={"TMPDIR": f"{tmp_path}/gone"})
    there = local.submit(*words, env={"TMPDIR": str(tmp_path)})
    assert local.wait(missing)["state"] == local.wait(there)["state"] == "COMPLETED"
    assert f"[rank 0] {tmp_path}" in local.lines(there)
    lines = local.logs(missing).splitlines()
    assert "[rank 0] none" in lines
    assert any(line.startswith(f"infini-run: TMPDIR={tmp_path}/gone: cannot be written on ") for line in lines)


def test_tmpdir_of_env_replaces_that_of_shell(local, tmp_path):
    (tmp_path / "own").mkdir()
    name = local.submit(
        "--slots=1", f"--env=TMPDIR={tmp_path}/own", "--", "sh", "-c", "echo $TMPDIR", env={"TMPDIR": "/tmp"}
    )
    assert local.wait(name)["state"] == "COMPLETED"
    assert local.lines(name) == [f"[rank 0] {tmp_path}/own"]


@pytest.mark.parametrize("array", [(), ("--array=0-1",)])
def test_rank_has_locale_of_submitting_shell(local, array):
    local.env = in_locale({}, local.env)
    bare = local.submit("--slots=1", *array, "--", "sh", "-c", "echo ${LC_CTYPE-none}")
    plain = local.submit("--slots=1", *array, "--", "sh", "-c", "echo ${LC_CTYPE-none}", env={"LC_CTYPE": "C"})
    for name, text in ((bare, "none"), (plain, "C")):
        assert local.wait(name)["state"] == "COMPLETED"
        assert {line.split()[-1] for line in local.lines(name)} == {text}
