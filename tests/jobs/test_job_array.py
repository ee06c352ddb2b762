"""Arrays: `--array=0-9%3`, a job directory with a task for each index, on every scheduler."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from infini_run.jobs.folder.job_dir import JobDir
from infini_run.jobs.folder.records import JobResult, Phase
from infini_run.jobs.folder.task import tasks_of
from infini_run.jobs.job import Job
from infini_run.jobs.request.array import Array, members, parse, split, task_id, whole_id
from infini_run.jobs.request.script import render_task
from infini_run.jobs.schedulers.local import Local, id_of
from infini_run.jobs.schedulers.scheduler_command import CommandResult
from infini_run.jobs.schedulers.slurm import Slurm
from infini_run.jobs.schedulers.slurm_output import advised
from tests.jobs.test_job_status import made
from tests.support.command import Command
from tests.support.job_case import JOB
from tests.support.waiting import until

LISTS = [
    ("0-3", (0, 1, 2, 3), 0, "0-3"),
    ("1,3,7", (1, 3, 7), 0, ""),
    ("7,1,3,5,1", (1, 3, 5, 7), 0, "1-7:2"),
    ("0-20:5%3", (0, 5, 10, 15, 20), 3, "0-20:5"),
    ("0-2,10-1000:990%1", (0, 1, 2, 10, 1000), 1, ""),
    ("5", (5,), 0, ""),
]


@pytest.mark.parametrize(("text", "tasks", "at_once", "pbs"), LISTS)
def test_a_list_is_read_as_sbatch_reads_it(text, tasks, at_once, pbs):
    assert parse(text) == Array(tasks=tasks, at_once=at_once)
    assert parse(text).range == pbs


SUCH = "; use 0-9, 1,3,7, 0-20:5, or 0-9%3 (at most three at a time)"
WRONG = [
    ("", f"missing index{SUCH}"),
    ("%3", f"missing index{SUCH}"),
    ("a", f"'a' is not an index{SUCH}"),
    ("1 2", f"'1 2' is not an index{SUCH}"),
    ("\x1b", f"'\\x1b' is not an index{SUCH}"),
    ("0-", f"missing index{SUCH}"),
    ("-3", f"missing index{SUCH}"),
    ("1,,2", f"missing index beside a comma{SUCH}"),
    ("3-1", "range 3-1 ends before it starts"),
    ("0-3:0", "the step of 0-3:0 is 0; use 1 or more"),
    ("0-3:x", f"'x' is not a step{SUCH}"),
    ("0-3:", f"missing step{SUCH}"),
    ("3:2", "'3:2' has a step but no range; use 0-20:5"),
    ("0-3%0", "%0 would run no task; use %1 or more"),
    ("0-3%", f"missing %M{SUCH}"),
    ("0-3%x", f"'x' is not %M{SUCH}"),
    ("1001", "expected an index of at most 1000, not 1001"),
    ("0-99999", "expected an index of at most 1000, not 99999"),
]


@pytest.mark.parametrize(("text", "said"), WRONG)
def test_what_is_wrong_with_a_list_is_one_sentence(text, said):
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        parse(text)


def test_the_error_names_the_flag_and_nothing_is_left(local):
    done = local.call("submit", "--array=3-1", "--", "true")
    assert done.returncode == 2
    assert done.stderr == "infini-job: --array=3-1: range 3-1 ends before it starts\n"
    assert local.is_empty()


def test_a_task_is_known_by_our_name_and_by_theirs():
    assert split("ir-0123456789.12") == ("ir-0123456789", 12)
    assert split("ir-0123456789.012") == ("ir-0123456789.012", -1)
    assert (task_id("12", 3), task_id("12[].head", 3), task_id("7.99@here", 3)) == ("12_3", "12[3].head", "")
    assert (whole_id("12_3"), whole_id("12[3].head"), whole_id("12.head")) == ("12", "12[].head", "12.head")
    assert members("n", "12_3") == [("n.3", "12_3"), ("n", "12")]
    assert members("n", "12_[1,4-8:2%2]") == [
        ("n.1", "12_1"),
        ("n.4", "12_4"),
        ("n.6", "12_6"),
        ("n.8", "12_8"),
        ("n", "12"),
    ]
    assert members("n", "12[3].head") == [("n.3", "12[3].head")]
    assert members("n", "12[].head") == [("n", "12[].head")]
    assert members("n.3", "15.head") == [("n.3", "15.head")]


def test_a_task_by_itself_has_the_lines_of_its_array():
    """Only \\n ends a line of a script."""
    rest = "#!/bin/sh\n#PBS -A a\x0bb\x85c\u2028d\necho\n"
    assert render_task(rest.replace("echo", "#PBS -J 0-3\necho"), 1) == rest


def test_what_slurm_says_of_an_array_is_said_of_each_of_its_tasks(tmp_path):
    """Slurm 22.05.8: squeue and sacct of an array of which some tasks wait, one of which was cancelled (16)."""
    said = {
        "squeue": "n|1_[8-14:2,20%2]|PENDING|JobArrayTaskLimit|\nn|1_4|RUNNING|None|node1\n"
        "n|2_0|FAILED|NonZeroExitCode|node1",
        "sacct": "n|1_6|CANCELLED by 0|0:0|node1\nn|1_[16,18%2]|CANCELLED by 0|0:0|None assigned",
    }
    for name, text in said.items():
        (tmp_path / name).write_text(f"#!/bin/sh\necho $SLURM_BITSTR_LEN $* >>{tmp_path}/asked\necho '{text}'\n")
        (tmp_path / name).chmod(0o755)
    slurm = Slurm({**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"})
    names = [f"n.{index}" for index in range(0, 22, 2)]
    found = slurm.query(names, {name: f"1_{name[2:]}" for name in names})
    assert {name: (found[name].id, found[name].state) for name in names if name in found} == {
        "n.0": ("2_0", "FAILED"), "n.4": ("1_4", "RUNNING"), "n.6": ("1_6", "CANCELLED"), "n.8": ("1_8", "QUEUED"),
        "n.10": ("1_10", "QUEUED"), "n.12": ("1_12", "QUEUED"), "n.14": ("1_14", "QUEUED"),
        "n.16": ("1_16", "CANCELLED"), "n.18": ("1_18", "CANCELLED"), "n.20": ("1_20", "QUEUED"),
    }  # fmt: skip
    asked = (tmp_path / "asked").read_text().splitlines()
    assert all(line.startswith("0 ") for line in asked)
    assert "--name=n --format" in asked[0]
    assert "--jobs=1 " in asked[1]


def test_a_cluster_that_takes_fewer_tasks_says_where_that_stands():
    said = CommandResult(
        code=1, out="", error="sbatch: error: Batch job submission failed: Invalid job array specification\n"
    )
    assert advised(said).endswith("Invalid job array specification; an index exceeds MaxArraySize; "
                                  "run `scontrol show config` to see it")  # fmt: skip


# ---- on this machine


HEAD = "echo $INFINI_JOB_TASK >{bell}; read _ <{gate}"


def states(jobs, name):
    return [task["state"] for task in jobs.status(name)["tasks"]]


def test_so_many_tasks_run_at_a_time_and_have_one_line_each(local, bell, turnstile):
    """One fails, one is cancelled while it waits."""
    script = f"echo $INFINI_JOB_TASK of $INFINI_JOB_TASKS; {HEAD}; exit $((INFINI_JOB_TASK == 2 ? 7 : 0))"
    script = script.format(bell=bell.path, gate=turnstile.path)
    waiting = local.start("submit", "--array=0-5%3", "--wait", "--", "sh", "-c", script)
    waiting.read_until(b"\n")
    name = waiting.out.split()[1].decode()
    assert waiting.out.split(b"  ")[2] == b"6 tasks x 1 node x 1 cpu"
    assert sorted(bell.hear(3)) == ["0", "1", "2"]
    assert states(local, name)[3:] == ["QUEUED"] * 3
    assert local.call("cancel", f"{name}.4").returncode == 0
    assert local.status(f"{name}.4")["headline"] == "CANCELLED"
    assert local.call("list").stdout.count("\n") == 1
    for _ in range(5):
        turnstile.ring("")
    assert sorted(bell.hear(2)) == ["3", "5"]
    assert waiting.wait() == 7
    head = f"FAILED exit 7 on {os.uname().nodename}, rank 0, task 2: 4 COMPLETED, 1 FAILED, 1 CANCELLED"
    assert waiting.out.splitlines()[-1].decode().startswith(f"{head}: task 2: rank 0 on ")
    status = local.status(name)
    assert (status["headline"], status["code"], status["task"], status["rank"]) == (head, 7, 2, 0)
    assert [task["task"] for task in status["tasks"]] == [0, 1, 2, 3, 4, 5]
    shown = [line.split()[0] for line in local.call("status", name).stdout.splitlines()]
    assert [word for word in shown if word.startswith("ir-")] == [name, *(f"{name}.{k}" for k in range(6))]
    said = [line for line in local.lines(name) if "infini-run" not in line]
    assert said == [f"[task {k}] [rank 0] {k} of 6" for k in (0, 1, 2, 3, 5)]
    assert local.lines(name, "--task=5", "--rank=0") == local.lines(f"{name}.5") == ["[rank 0] 5 of 6"]
    for words in (("forget", f"{name}.5"), ("logs", f"{name}.9"), ("logs", "--task=9", name)):
        assert local.call(*words).returncode == 2
    assert local.call("forget", name).returncode == 0
    assert local.is_empty()


def test_cancel_ends_those_that_run_with_their_grace_and_those_that_wait(local, bell):
    script = f'trap "echo saved; exit 0" TERM; (echo up >{bell.path}; exec sleep 1000) & wait'
    name = local.submit("--array=1-9:2%2", "--", "sh", "-c", script)
    following = local.start("logs", "-f", name)
    bell.hear(2)
    assert local.call("cancel", name).returncode == 0
    assert local.wait(name)["headline"] == "CANCELLED"
    assert set(states(local, name)) == {"CANCELLED"}
    assert following.wait() == 0
    assert sorted(line for line in following.out.splitlines() if b"saved" in line) == [
        b"[task 1] [rank 0] saved", b"[task 3] [rank 0] saved",
    ]  # fmt: skip
    assert local.call("cancel", name).returncode == 0


def test_cancel_of_array_and_wrong_task_names_that_task(local):
    name = local.submit("--array=1-2", "--", "sleep", "1000")
    done = local.call("cancel", f"{name}.9", name, f"{name}.1")
    assert done.returncode == 2
    assert done.stderr == f"infini-job: {name}.9: job {name}: no task 9; its tasks are 1-2\n"
    assert local.wait(name)["headline"] == "CANCELLED"


def test_cancel_ends_a_task_that_began_while_it_looked(local, bell, turnstile):
    begin = HEAD.format(bell=bell.path, gate=turnstile.path)
    stay = f'trap "echo told >{bell.path}; exit 0" TERM; (echo 1 >{bell.path}; exec sleep 1000) & wait'
    script = f"if [ $INFINI_JOB_TASK = 0 ]; then {begin}; else {stay}; fi"
    name = local.submit("--array=0-1%1", "--", "sh", "-c", script)
    assert bell.hear(1) == ["0"]

    class Slow(Local):
        def query(self, names, ids=None):
            found = super().query(names, ids)
            if f"{name}.0" in found:
                turnstile.ring("")
                assert bell.hear(1) == ["1"]
            return found

    Job(JobDir(str(local.path / name)), Slow(str(local.path), local.env)).cancel()
    assert bell.hear(1) == ["told"]
    assert local.wait(name)["headline"] == "CANCELLED: 1 COMPLETED, 1 CANCELLED"


def test_a_task_asks_to_be_run_again_by_itself(local):
    name = local.submit("--array=0-2", "--", "sh", "-c", "[ $INFINI_JOB_TASK$INFINI_JOB_ATTEMPT != 10 ] || exit 85")
    status = local.wait(name)
    assert (status["headline"], [task["attempt"] for task in status["tasks"]]) == ("COMPLETED", [0, 1, 0])


def test_tasks_outlive_who_starts_them(local, bell, turnstile):
    """Those that waited for it are lost."""
    name = local.submit("--array=0-2%2", "--", "sh", "-c", HEAD.format(bell=bell.path, gate=turnstile.path))
    bell.hear(2)
    with open(local.path / name / "job.log", "a") as log:
        log.write("OSError: its last words\n")
    os.kill(int((local.path / name / "id").read_text().split(".")[0]), signal.SIGKILL)
    until(lambda: states(local, name)[2] == "LOST")
    assert local.status(f"{name}.2")["reason"] == "OSError: its last words"
    turnstile.ring("")
    turnstile.ring("")
    assert local.wait(name)["headline"] == "LOST, task 2: 2 COMPLETED, 1 LOST"
    assert states(local, name) == ["COMPLETED", "COMPLETED", "LOST"]


def test_a_task_that_cannot_be_started_ends_no_other(local):
    script = "[ $INFINI_JOB_TASK != 0 ] || mkdir $INFINI_JOB_FOLDER/../1/job.log"
    name = local.submit("--array=0-2%1", "--", "sh", "-c", script)
    local.wait(name)
    assert states(local, name) == ["COMPLETED", "FAILED", "COMPLETED"]
    path = local.path / name / "task/1/job.log"
    assert local.status(f"{name}.1")["reason"] == f"cannot start it: {path}: Is a directory"


def test_a_job_of_a_task_is_none_itself(local):
    """What a rank finds in its environment is no flag of its own commands, and goes with no other job."""
    inner = "infini_run.jobs submit --wait -- sh -c 'echo is ${INFINI_JOB_TASK:-none} ${INFINI_JOB_TASKS:-none}'"
    name = local.submit("--array=3", "--", "sh", "-c", f"{sys.executable} -m {inner}")
    assert local.wait(name)["headline"] == "COMPLETED", local.logs(name)
    inside = next(one for one in os.listdir(local.path) if one != name)
    assert local.logs(inside) == "[rank 0] is none none\n"
    done = local.call("logs", inside, env={"INFINI_JOB_TASK": "3", "INFINI_JOB_ATTEMPT": "1"})
    assert (done.returncode, done.stdout) == (0, "[rank 0] is none none\n")


def test_an_array_from_python(local):
    import infini_run as ir

    job = ir.submit(["sh", "-c", "echo is $INFINI_JOB_TASK"], array="0-1", scheduler="local", dir=local.path)
    assert job.wait().state == "COMPLETED"
    assert list(job.logs()) == ["[task 0] [rank 0] is 0", "[task 1] [rank 0] is 1"]
    assert list(job.logs(task=1)) == list(ir.find_job(f"{job.name}.1", dir=local.path).logs()) == ["[rank 0] is 1"]


@pytest.fixture
def two_hosts(local):
    """An array of which task 0 ran on n1, and task 1, at its second run, on n2; task 2 waits."""
    array = made(local.path, "ir-00000000aa", array="0-2")
    for task, hosts in zip(tasks_of(array), (("n1",), ("n2", "n2")), strict=False):
        for host in hosts:
            number = task.begin()
            task.write_phase(number, Phase(state="RUNNING", since_s=2e9, nodes=(host,), nproc=1))
            with open(task.log(number), "w") as file:
                file.write(f"[rank 0] run {number}\n")
        task.write_result(JobResult(state="COMPLETED", code=0, attempt=len(hosts) - 1, end_s=0.0))
    return array


def test_the_lines_of_one_node_are_those_of_the_tasks_that_ran_there(local, two_hosts):
    """Where task 2 may yet run nobody knows."""
    assert local.lines(two_hosts.name, "--node=n1") == ["[task 0] [rank 0] run 0"]
    assert local.lines(two_hosts.name, "--node=n2", "--attempt=1") == ["[task 1] [rank 0] run 1"]
    assert local.lines(two_hosts.name, "--node=n3") == []
    tasks_of(two_hosts)[2].write_result(JobResult(state="CANCELLED", code=-1, end_s=0.0))
    done = local.call("logs", "--node=n3", two_hosts.name)
    assert (done.returncode, done.stderr) == (2, "infini-job: --node=n3: unknown node; use n1, n2, or 0 to 0\n")


def test_a_run_of_an_array_is_that_of_each_task(local, two_hosts):
    assert local.lines(two_hosts.name, "--attempt=0") == ["[task 0] [rank 0] run 0", "[task 1] [rank 0] run 0"]
    assert local.lines(two_hosts.name, "--attempt=1") == ["[task 1] [rank 0] run 1"]
    done = local.call("logs", "--attempt=2", two_hosts.name)
    assert (done.returncode, done.stderr) == (
        2, f"infini-job: --attempt=2: job {two_hosts.name} ran 2 times, counted from 0\n",
    )  # fmt: skip


def test_logs_of_an_array_that_waits_say_why(local):
    array = made(local.path, "ir-00000000aa", scheduler="local", array="0-1")
    array.write_id(id_of(os.getpid()))
    done = local.call("logs", array.name)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith(f"infini-job: {array.name} is waiting in the queue")


def test_an_array_with_indices_that_are_too_large_is_another_versions(local):
    array = made(local.path, "ir-00000000aa", array="0-1")
    with open(array.file("request.json"), "r+") as file:
        text = file.read().replace('"0-1"', '"0-5000"')
        file.seek(0)
        file.write(text)
    done = local.call("list")
    assert "job of another infini-run version" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_follower_of_many_tasks_needs_few_descriptors(local):
    array = made(local.path, "ir-00000000aa", scheduler="local", array="0-99")
    for task in tasks_of(array):
        task.write_id(id_of(os.getpid()))
        number = task.begin()
        task.write_phase(number, Phase(state="RUNNING", since_s=2e9, nodes=("n1",), nproc=1))
        with open(task.log(number), "w") as file:
            file.write("[rank 0] up\n")
    limited = ["sh", "-c", 'ulimit -n 32; exec "$@"', "sh", *JOB, "logs", "-f", array.name]
    following = Command(limited, env=local.env)
    try:
        following.read_until(b"[task 99] [rank 0] up\n")
        with open(tasks_of(array)[0].log(0), "a") as file:
            file.write("[rank 0] last\n")
        for task in tasks_of(array):
            task.write_result(JobResult(state="COMPLETED", code=0, end_s=0.0))
        assert following.wait() == 0
        lines = sorted(following.out.splitlines())
        assert (len(lines), lines[0]) == (101, b"[task 0] [rank 0] last")
    finally:
        following.close()


# ---- on a PBS that is none


@pytest.fixture
def pbs(local, pbs_queue):
    local.env |= {**pbs_queue.env, "INFINI_JOB_SCHEDULER": "pbs", "INFINI_JOB_DIR": str(local.path)}
    return local


ONE = ("--slots=1", "--slot_type=cpu")


def test_an_array_on_pbs(pbs, pbs_queue, bell, turnstile):
    """Two at a time; one fails, one is cancelled while it waits, all by the ids of tasks."""
    script = f"echo $INFINI_JOB_TASK of $INFINI_JOB_TASKS; {HEAD}; exit $((INFINI_JOB_TASK == 2 ? 7 : 0))"
    script = script.format(bell=bell.path, gate=turnstile.path)
    name = pbs.submit(*ONE, "--array=0-8:2%2", "--", "sh", "-c", script)
    assert sorted(bell.hear(2)) == ["0", "2"]
    status = pbs.status(name)
    assert [task["id"] for task in status["tasks"]] == [f"101[{k}].pbshead" for k in range(0, 10, 2)]
    assert [task["state"] for task in status["tasks"][2:]] == ["QUEUED"] * 3
    assert pbs.call("cancel", f"{name}.8").returncode == 0
    assert pbs.status(f"{name}.8")["headline"] == "CANCELLED"
    for _ in range(4):
        turnstile.ring("")
    status = pbs.wait(name)
    assert (status["code"], status["task"], status["headline"].partition(": ")[2]) == (
        7, 2, "3 COMPLETED, 1 FAILED, 1 CANCELLED",
    )  # fmt: skip
    assert pbs.lines(name, "--task=6", "--rank=0")[0].endswith(" 6 of 5")


def test_cancel_of_an_array_on_pbs_gives_its_tasks_their_grace(pbs, pbs_queue, bell):
    once = 'trap "" TERM; echo saved; exit 0'  # two TERMs may come
    script = f"trap '{once}' TERM; (echo up >{bell.path}; exec sleep 1000) & wait"
    name = pbs.submit(*ONE, "--array=0-4%2", "--", "sh", "-c", script)
    bell.hear(2)
    assert pbs.call("cancel", name).returncode == 0
    assert pbs.wait(name)["headline"] == "CANCELLED"
    assert [line.rpartition(" ")[2] for k in range(5) for line in pbs.lines(f"{name}.{k}")] == ["saved"] * 2


def test_cancel_of_an_array_of_which_no_id_is_known_needs_an_answer(pbs, pbs_queue):
    pbs_queue.set(hold="Not Running: Not enough free nodes available")
    name = pbs.submit(*ONE, "--array=0-1", "--", "true")
    os.unlink(pbs.path / name / "id")
    pbs_queue.fail("qselect", "away")
    done = pbs.call("cancel", name)
    assert (done.returncode != 0, "cannot connect to server" in done.stderr) == (True, True)
    assert pbs.call("cancel", name).returncode == 0
    assert pbs.wait(name)["headline"] == "CANCELLED"


def test_a_task_on_pbs_is_run_again_as_a_job_by_itself(pbs, pbs_queue):
    script = "echo run $INFINI_JOB_ATTEMPT; [ $INFINI_JOB_TASK$INFINI_JOB_ATTEMPT != 10 ] || exit 85"
    name = pbs.submit(*ONE, "--array=0-1", "--", "sh", "-c", script)
    status = pbs.wait(name)
    assert (status["headline"], [task["attempt"] for task in status["tasks"]]) == ("COMPLETED", [0, 1])
    assert [task["id"] for task in status["tasks"]] == ["101[0].pbshead", "102.pbshead"]
    assert [line.rpartition("] ")[2] for line in pbs.lines(f"{name}.1")] == ["run 0", "run 1"]


def test_a_task_that_asks_to_run_again_while_its_array_is_cancelled_is_cancelled(pbs, pbs_queue, bell, turnstile):
    """Its new job is submitted after the cancel, which could not know of it."""
    name = pbs.submit(*ONE, "--array=0-1", "--", "sh", "-c", "[ $INFINI_JOB_TASK = 0 ] || exit 85; exec sleep 1000")
    qsub = Path(pbs_queue.folder, "bin/qsub")
    real = qsub.rename(qsub.with_name("real-qsub"))
    qsub.write_text(f'#!/bin/sh\necho asks >{bell.path}; read _ <{turnstile.path}; exec {real} "$@"\n')
    qsub.chmod(0o755)
    assert bell.hear(1) == ["asks"]
    assert pbs.call("cancel", name).returncode == 0
    turnstile.ring("")
    status = pbs.wait(name)
    assert [task["headline"] for task in status["tasks"]] == ["CANCELLED"] * 2
    pbs_queue.ended()


def test_an_array_of_which_pbs_gave_no_answer_is_found(pbs, pbs_queue):
    pbs_queue.fail("qsub", "lost")
    name = pbs.submit(*ONE, "--array=0-1", "--", "true")
    assert pbs.wait(name)["headline"] == "COMPLETED"
    assert (pbs.path / name / "id").read_text() == "101[].pbshead"


def test_pbs_takes_one_range(pbs, pbs_queue):
    done = pbs.call("submit", *ONE, "--array=1,2,5", "--", "true")
    assert done.returncode == 2
    assert done.stderr == "infini-job: --array=1,2,5: PBS needs one range of two or more tasks; use 0-9 or 0-20:5\n"
    assert pbs.is_empty()
