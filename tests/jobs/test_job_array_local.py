"""An array of this machine in trouble: a full disk, no process left, TERM, a directory that was removed; and how many
tasks run at a time."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from infini_run.jobs.folder.task import tasks_of
from tests.jobs.test_job_status import made
from tests.support.command import Command
from tests.support.job_case import JOB
from tests.support.nvml import FOUR
from tests.support.processes import state_of
from tests.support.waiting import LIMIT_S, until

HEAD = "echo $INFINI_JOB_TASK >{bell}; read _ <{gate}"


def pid_of(folder):
    return int(Path(folder, "id").read_text().split(".")[0])


def states(jobs, name):
    return [task["state"] for task in jobs.status(name)["tasks"]]


# ---- TERM


def test_term_ends_the_whole_array_with_the_grace_of_its_ranks(local, bell):
    script = f'trap "sleep 0.2; echo saved; exit 0" TERM; (echo up >{bell.path}; exec sleep 1000) & wait'
    name = local.submit("--array=0-2%2", "--", "sh", "-c", script)
    bell.hear(2)
    os.kill(pid_of(local.path / name), signal.SIGTERM)
    assert local.wait(name)["headline"] == "CANCELLED"
    assert local.status(f"{name}.2")["reason"] == "SIGTERM ended its array"
    assert local.lines(name, "--rank=0") == ["[task 0] [rank 0] saved", "[task 1] [rank 0] saved"]


def test_cancel_signals_each_task_of_an_array_once(local, tmp_path, bell):
    """A second signal would end its ranks without their grace."""
    gates = [tmp_path / str(task) for task in range(2)]
    for gate in gates:
        os.mkfifo(gate)
    script = f"""trap 'echo told >{bell.path}; read _ <{tmp_path}/$INFINI_JOB_TASK; echo saved; exit 0' TERM
    (echo up >{bell.path}; exec sleep 1000) & wait"""
    name = local.submit("--array=0-1", "--", "sh", "-c", script)
    bell.hear(2)
    starts_tasks = pid_of(local.path / name)
    os.kill(starts_tasks, signal.SIGSTOP)
    local.call("cancel", name)
    time.sleep(0.5)  # longer than two signals are taken for one
    os.kill(starts_tasks, signal.SIGCONT)
    assert bell.hear(2) == ["told"] * 2
    until(lambda: state_of(starts_tasks) == "S")
    for gate in gates:
        gate.write_text("\n")
    assert local.wait(name)["headline"] == "CANCELLED"
    assert local.lines(name, "--rank=0") == ["[task 0] [rank 0] saved", "[task 1] [rank 0] saved"]


# ---- a full disk, no processes

FULL = """mount -t tmpfs -o size=$0 tmpfs "$1" || exit 77
dir=$1; shift
exec "$@"
"""


@pytest.fixture
def full(local, tmp_path):
    """Call something with a small file system in place of jobs' directory, which nobody else sees."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare")
    local.path.mkdir()

    def call(script, size="256k"):
        words = ["unshare", "-m", "sh", "-c", FULL, size, str(local.path), "sh", "-c", script, *JOB]
        done = subprocess.run(words, env=local.env, capture_output=True, text=True, check=False, timeout=2 * LIMIT_S)
        if done.returncode == 77:
            pytest.skip(f"no file system can be mounted here: {done.stderr}")
        return done

    return call


def test_a_full_disk_costs_neither_the_end_of_a_job_nor_the_tasks_after_it(local, full):
    """What a rank wrote is lost, as are reports; that it failed, and with which code, is not."""
    fill = "until [ -e ../1/up ]; do :; done; head -c 1000000 /dev/zero >big 2>&-; exit 3"
    free = ": >up; until [ -e ../0/exit ]; do :; done; rm ../0/big; exit 4"
    done = full(
        f"""a='cd $INFINI_JOB_FOLDER; [ $INFINI_JOB_TASK = 1 ] || {{ {fill}; }}; {free}'
        "$0" "$@" submit --wait --array=0-1%2 -- sh -c "$a"; echo "code $?"
        "$0" "$@" list --json
        cat "$INFINI_JOB_DIR"/*/task/0/0/log"""
    )
    assert "Traceback" not in done.stdout + done.stderr
    assert "code 3\n" in done.stdout
    text = done.stdout[done.stdout.index("\n[") :]
    (status,), _ = json.JSONDecoder().raw_decode(text.strip())
    heads = [f"FAILED exit {code} on {os.uname().nodename}, rank 0" for code in (3, 4)]
    assert [task["headline"] for task in status["tasks"]] == heads
    assert status["tasks"][0]["reason"].startswith("rank 0 on ")


def test_a_job_that_ends_on_a_full_disk_has_its_own_word(local, full):
    done = full(
        """"$0" "$@" submit --wait -- sh -c '
            echo up; until [ -s $INFINI_JOB_FOLDER/0/log ]; do :; done
            head -c 1000000 /dev/zero >$INFINI_JOB_FOLDER/big 2>&-; exit 3'
        echo "code $?"; cat "$INFINI_JOB_DIR"/*/0/log"""
    )
    assert "Traceback" not in done.stdout + done.stderr
    assert f"\nFAILED exit 3 on {os.uname().nodename}, rank 0: rank 0 on " in done.stdout
    assert "code 3\n" in done.stdout
    assert "infini-run: its report cannot be written: No space left on device" in done.stdout


def test_tasks_that_begin_on_a_full_disk_end_no_other(local, full):
    """Of those nothing can be written down; what starts them looks after all of them all the same."""
    script = "[ $INFINI_JOB_TASK != 0 ] || head -c 1000000 /dev/zero >$INFINI_JOB_FOLDER/big 2>&-; true"
    done = full(
        f"""name=$("$0" "$@" submit --array=0-3%1 -- sh -c '{script}' | cut -d" " -f2)
        "$0" "$@" logs -f $name >/dev/null 2>&1
        "$0" "$@" status --json $name; cat "$INFINI_JOB_DIR"/*/job.log"""
    )
    assert "Traceback" not in done.stdout + done.stderr
    (status,), _ = json.JSONDecoder().raw_decode(done.stdout.strip())
    assert [task["state"] for task in status["tasks"]] == ["COMPLETED", *["LOST"] * 3]


def test_a_task_waits_until_the_system_has_a_process_for_it():
    """By RLIMIT_NPROC, which does not bind root: as another user (who may read all files, for the interpreter may be
    below /root), whose other processes end then."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root and setpriv")
    uid = 200_000 + os.getpid() % 100_000
    may_read = ["--inh-caps=+dac_override", "--ambient-caps=+dac_override"]
    ids = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", *may_read]
    home = tempfile.mkdtemp(prefix="jobs-")
    others = [subprocess.Popen([*ids, "sleep", "1000"]) for _ in range(20)]
    queue = None
    try:
        array = made(Path(home), "ir-00000000aa", scheduler="local", array="0-1%1", python=sys.executable, slots=1)
        subprocess.run(["chown", "-R", f"{uid}:{uid}", home], check=True)
        until(lambda: all(Path(f"/proc/{one.pid}/comm").read_text() == "sleep\n" for one in others))
        module = [sys.executable, "-m", "infini_run.jobs.array_main", array.path]
        queue = Command([*ids, "prlimit", f"--nproc={len(others) + 1}", *module], cwd="/")
        queue.read_error_until(b"ir-00000000aa.0 cannot start yet: Resource temporarily unavailable; retrying\n")
        for one in others:
            one.kill()
            one.wait()
        assert queue.wait() == 0, queue.err
        assert [task.attempts() for task in tasks_of(array)] == [1, 1]  # access(2) may keep them from the interpreter
    finally:
        for one in others:
            one.kill()
            one.wait()
        if queue is not None:
            queue.close()
        shutil.rmtree(home)


# ---- a directory that is removed


def test_that_a_job_was_removed_is_said_at_once_to_those_who_wait_for_it(local, turnstile):
    waiting = local.start("submit", "--wait", "--", "sh", "-c", f"echo up; read _ <{turnstile.path}")
    waiting.read_until(b"\n")
    name = waiting.out.split()[1].decode()
    waiting.read_error_until(b"RUNNING")
    following = local.start("logs", "-f", name)
    following.read_until(b"[rank 0] up\n")
    shutil.rmtree(local.path / name)
    line = f"infini-job: job {name}: its directory {local.path / name} was removed\n".encode()
    assert (waiting.wait(), following.wait()) == (1, 1)
    assert waiting.err.endswith(line)
    assert following.err.endswith(line)
    turnstile.ring("")


def test_an_array_without_the_directories_of_its_tasks_can_be_looked_at(local, bell, turnstile):
    script = HEAD.format(bell=bell.path, gate=turnstile.path)
    name = local.submit("--array=0-1%2", "--", "sh", "-c", script)
    bell.hear(2)
    shutil.rmtree(local.path / name / "task")
    for words in (("status", name), ("list",), ("list", "--json"), ("logs", name)):
        done = local.call(*words)
        assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    waiting = local.start("logs", "-f", name)
    assert local.call("cancel", name).returncode == 0
    assert waiting.wait() == 0
    assert b"Traceback" not in waiting.err
    assert local.call("forget", name).returncode == 0


# ---- how many at a time


def test_as_many_run_at_a_time_as_have_cpus_of_their_own(local, bell, turnstile):
    script = HEAD.format(bell=bell.path, gate=turnstile.path)
    one = [
        "taskset",
        "-c",
        str(min(os.sched_getaffinity(0))),
        *JOB,
        "submit",
        "--array=0-1",
        "--",
        "sh",
        "-c",
        script,
    ]
    done = subprocess.run(one, env=local.env, capture_output=True, text=True, check=True)
    name = done.stdout.split()[1]
    assert bell.hear(1) == ["0"]
    assert states(local, name) == ["RUNNING", "QUEUED"]
    turnstile.ring("")
    assert bell.hear(1) == ["1"]
    turnstile.ring("")
    assert local.wait(name)["state"] == "COMPLETED"


def test_tasks_that_run_at_the_same_time_have_gpus_of_their_own(local, driver, bell, turnstile):
    script = f"echo $INFINI_JOB_TASK $CUDA_VISIBLE_DEVICES >{bell.path}; read _ <{turnstile.path}"
    local.env |= driver.settings(FOUR) | {"LD_LIBRARY_PATH": str(driver.folder)}
    name = local.submit("--slots=2", "--slot_type=cuda", "--array=0-2", "--", "sh", "-c", script)
    assert sorted(bell.hear(4)) == ["0 0,1", "0 0,1", "1 2,3", "1 2,3"]
    assert states(local, name)[2] == "QUEUED"
    for _ in range(4):
        turnstile.ring("")
    shown = set(bell.hear(2))
    assert shown in ({"2 0,1"}, {"2 2,3"})
    for _ in range(2):
        turnstile.ring("")
    assert local.wait(name)["state"] == "COMPLETED"


# ---- which tasks


def test_logs_of_some_tasks(local):
    name = local.submit("--array=0-5%1", "--", "sh", "-c", "echo is $INFINI_JOB_TASK")
    assert local.wait(name)["state"] == "COMPLETED"
    assert local.lines(name, "--task=0,3-4") == [f"[task {k}] [rank 0] is {k}" for k in (0, 3, 4)]
    assert local.lines(name, "--task=3") == ["[rank 0] is 3"]
    for text, said in (
        ("0,9", f"job {name}: no task 9; its tasks are 0-5%1"),
        ("0-3%2", "--task=0-3%2: %M is only for --array; use 4, 0,3-5, or 0-20:5"),
        ("x", "--task=x: 'x' is not an index; use"),
    ):
        done = local.call("logs", f"--task={text}", name)
        assert (done.returncode, said in done.stderr) == (2, True), done.stderr
    import infini_run as ir

    job = ir.find_job(name, dir=local.path)
    assert list(job.logs(task=[1, 2])) == ["[task 1] [rank 0] is 1", "[task 2] [rank 0] is 2"]


def test_logs_say_which_tasks_are_lost(local, bell, turnstile):
    name = local.submit("--array=0-1%1", "--", "sh", "-c", HEAD.format(bell=bell.path, gate=turnstile.path))
    bell.hear(1)
    os.kill(pid_of(local.path / name), signal.SIGKILL)
    until(lambda: states(local, name)[1] == "LOST")
    done = local.call("logs", name)
    gone = "the process that starts the tasks of its array is gone and left no reason (SIGKILL?)"
    line = f"infini-job: {name}.1 is LOST: {gone}\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, "", line)
    assert local.call("logs", "--task=0", name).stderr == ""
    assert local.call("logs", f"{name}.1").stderr == line
    following = local.start("logs", "-f", name)
    following.read_error_until(line.encode())
    turnstile.ring("")
    assert following.wait() == 0
    assert following.err.decode().count(line) == 1


def test_names_of_tasks_that_are_wrong_are_named(local, bell, turnstile):
    """The good ones are cancelled; nothing is forgotten."""
    name = local.submit("--array=0-1%2", "--", "sh", "-c", HEAD.format(bell=bell.path, gate=turnstile.path))
    bell.hear(2)
    done = local.call("cancel", f"{name}.9", f"{name}.0", f"{name}.1.1")
    assert done.returncode == 2
    assert done.stderr == (
        f"infini-job: {name}.9: job {name}: no task 9; its tasks are 0-1%2\n"
        f"infini-job: {name}.1.1: {name}.1: a task has no tasks; use {name}, the array\n"
    )
    assert local.wait(f"{name}.0")["state"] == "CANCELLED"
    assert local.status(f"{name}.1")["state"] == "RUNNING"
    done = local.call("cancel", f"{name}.1", name)
    assert (done.returncode, done.stderr) == (0, "")
    assert local.wait(name)["headline"] == "CANCELLED"
    other = local.submit("--", "true")
    local.wait(other)
    done = local.call("forget", other, name, f"{name}.0")
    assert done.returncode == 2
    assert done.stderr == f"infini-job: {name}.0: a task is removed with its array; use infini-job forget {name}\n"
    assert (local.path / other).exists()
    assert (local.path / name).exists()
    assert local.call("logs", "--task=1", f"{name}.1").stderr == (
        f"infini-job: {name}.1: a task has no tasks; use {name}, the array\n"
    )


def test_a_submission_says_that_it_is_an_array(local, service):
    done = local.call("submit", "--print", "--array=0-5%2", "--", "true")
    name = done.stdout.partition("# ")[2].split(":")[0]
    assert f"# {name}: 6 tasks (--array=0-5%2) x 1 node x 1 cpu\n" in done.stdout
    said = json.loads(local.call("submit", "--json", "--array=1", "--", "true").stdout)
    assert said["array"] == "1"
    body = {"command": ["true"], "flags": {"array": "0-5%2"}}
    assert service.client.post("/v1/scripts", json=body).json()["array"] == "0-5%2"
    taken = service.client.post("/v1/jobs", json=body).json()
    assert taken["array"] == "0-5%2"
    service.end_of(taken["name"])
    params = {"task": "0,2-3"}
    assert service.client.get(f"/v1/jobs/{taken['name']}/logs", params=params).status_code == 200
    answer = service.client.get(f"/v1/jobs/{taken['name']}/logs", params={"task": "x"})
    assert (answer.status_code, answer.json()["detail"].startswith("task=x: 'x' is not an index")) == (400, True)
    answer = service.client.get(f"/v1/jobs/{taken['name']}.1/logs", params={"task": "1"})
    assert (answer.status_code, ": a task has no tasks; use " in answer.json()["detail"]) == (404, True)
    local.wait(said["name"])
