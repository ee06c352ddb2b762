"""What users call jobs, and what commands say of one: titles, the newest log and its end, times, waits that end."""

from __future__ import annotations

import json
import re
import signal

import pytest

import infini_run as ir
from infini_run.errors import UsageError
from infini_run.jobs.request.array import own_name
from infini_run.jobs.request.job_request import JobRequest
from infini_run.jobs.schedulers.slurm_output import is_never_met
from infini_run.jobs.status.logs import Reader, last_lines
from infini_run.record import replace
from infini_run.system.file_tail import start_of_last
from tests.support.job_case import Jobs

REQUEST = JobRequest(name="ir-0123456789", folder="/j", command=("true",), cwd="/", python="p", slots=1)
TITLE = "llama 7b, lr=3e-4"


@pytest.fixture(params=["slurm", "pbs"])
def queue(request, tmp_path, case):
    batch = request.getfixturevalue(f"{request.param}_queue")
    jobs = Jobs(tmp_path / "jobs", case, {**batch.env, "INFINI_JOB_SCHEDULER": request.param})
    jobs.batch = batch
    yield jobs
    jobs.close()


def hold(bell):
    return ("sh", "-c", f"echo up > {bell.path}; exec sleep 1000")


@pytest.mark.parametrize(
    ("title", "queued"),
    [
        ("", "ir-0123456789"),
        ("lr=3e-4, seed 1", "lr_3e-4__seed_1.ir-0123456789"),
        ("-rf", "_rf.ir-0123456789"),
        ("\u00e9t\u00e9", "_t_.ir-0123456789"),
        ("a.3", "a.3.ir-0123456789"),
    ],
)
def test_queue_name_has_title_first_and_only_characters_of_pbs(title, queued):
    assert replace(REQUEST, title=title).queue_name == queued
    assert own_name(queued) == "ir-0123456789"
    assert own_name(f"{queued}.7") == "ir-0123456789.7"


def test_title_is_shown_by_scheduler_and_list_and_job_is_found(queue, bell):
    name = queue.submit(f"--title={TITLE}", "--slots=1", "--", *hold(bell))
    bell.hear(1)
    (job,) = queue.batch.jobs()
    assert job["name"] == f"llama_7b__lr_3e-4.{name}"
    status = queue.wait(name, "RUNNING")
    assert (status["name"], status["title"], status["query_error"]) == (name, TITLE, "")
    assert TITLE in queue.call("list").stdout
    (queue.path / name / "id").unlink()  # found again by its name in the queue
    assert queue.status(name)["state"] == "RUNNING"
    assert queue.call("cancel", name).returncode == 0
    queue.wait(name, "CANCELLED")


def test_tasks_of_titled_array_have_states_of_their_own(queue):
    if queue.batch.kind == "slurm":
        pytest.skip("the stand-in for Slurm has no arrays; test_job_slurm_real.py has one")
    name = queue.submit(f"--title={TITLE}", "--slots=1", "--array=0-2", "--", "sh", "-c", "exit $INFINI_JOB_TASK")
    status = queue.wait(name)
    assert [(task["name"], task["state"], task["code"]) for task in status["tasks"]] == [
        (f"{name}.0", "COMPLETED", 0), (f"{name}.1", "FAILED", 1), (f"{name}.2", "FAILED", 2),
    ]  # fmt: skip
    assert status["title"] == TITLE


def test_titled_job_runs_again_under_its_name(queue):
    script = "[ $INFINI_JOB_ATTEMPT = 1 ] || exit 3"
    name = queue.submit("--title=again", "--slots=1", "--restarts=1", "--", "sh", "-c", script)
    status = queue.wait(name)
    assert (status["state"], status["attempt"]) == ("COMPLETED", 1)


def test_title_works_here_and_from_python(local):
    job = ir.submit(["sh", "-c", "exit 3"], scheduler="local", dir=local.path, title="mine", array=range(2))
    status = job.wait()
    assert (job.name, status.title, status.exit_code) == (local.status(job.name)["name"], "mine", 3)
    with pytest.raises(UsageError, match="expected at most 100 printable characters"):
        ir.submit(["true"], scheduler="local", dir=local.path, title="a\nb")


def test_answers_suit_encoding_of_stdout(local):
    """A locale may lack characters of a title. In a UTF-8 one, a path may still have any bytes."""
    name = local.submit("--title=\N{SNOWMAN}\N{LATIN SMALL LETTER N WITH TILDE}", "--", "true")
    local.wait(name)
    done = local.call("list", env={"PYTHONIOENCODING": "iso8859-2"})  # CPython calls it "charmap" in its errors
    assert (done.returncode, done.stderr) == (0, "")
    assert "  \\u2603\\xf1  true\n" in done.stdout
    words = ("submit", "--print", f"--dir={local.path}/\udcff", "--", "true")
    done = local.call(*words, env={"PYTHONIOENCODING": "utf-8"}, errors="surrogateescape")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{local.path}/\udcff/ir-" in done.stdout


# ---- logs


def test_logs_without_name_are_of_newest_job(local):
    for word in ("old", "new"):
        local.call("submit", "--wait", "--", "echo", word)
    done = local.call("logs")
    assert done.stdout == "[rank 0] new\n"
    assert re.fullmatch(r"infini-job: showing logs of ir-[0-9a-f]{10}, the newest job\n", done.stderr)


def test_tail_is_last_lines_of_all_runs_or_of_one_rank(local):
    script = "for i in 1 2 3; do echo $INFINI_JOB_ATTEMPT $i; done; [ $INFINI_JOB_ATTEMPT = 1 ] || exit 3"
    done = local.call("submit", "--wait", "--restarts=1", "--", "sh", "-c", script)
    name = done.stdout.split()[1]
    whole = local.logs(name).splitlines(keepends=True)
    for count in (0, 1, 2, 5, 1000):
        assert local.logs(name, f"--tail={count}") == "".join(whole[-count:] if count else [])
    assert local.logs(name, "--tail=2", "--rank=0") == "[rank 0] 1 2\n[rank 0] 1 3\n"
    job = ir.find_job(name, dir=local.path)
    assert list(job.logs(tail=1)) == [whole[-1].rstrip("\n")]
    with pytest.raises(UsageError, match="tail=-1: expected a whole number"):
        list(job.logs(tail=-1))


def test_tail_follows_what_comes(local, turnstile, bell):
    script = f"echo a; echo b; echo > {bell.path}; read x < {turnstile.path}; echo c"
    name = local.submit("--", "sh", "-c", script)
    bell.hear(1)
    follower = local.start("logs", "-f", "--tail=1", name)
    follower.read_until(b"\n")
    turnstile.ring("go")
    assert follower.wait() == 0
    assert follower.out == b"[rank 0] b\n[rank 0] c\n"


@pytest.mark.parametrize("text", ["", "\n", "a", "a\n", "a\nb", "a\nb\n", "\n\n", "a\n" * 100_000])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 70_000])
def test_last_lines_are_found_from_the_end(tmp_path, text, count):
    path = tmp_path / "log"
    path.write_text(text)
    wanted = "".join(text.splitlines(keepends=True)[-count:] if count else [])
    with open(path, "rb", buffering=0) as file:
        assert text[start_of_last(file, count) :] == wanted
    assert last_lines(text.encode(), count) == wanted.encode()
    reader = Reader(str(path), count)
    assert (
        b"".join([*reader.lines(), reader.end()])
        == (wanted if wanted.endswith("\n") or not wanted else f"{wanted}\n").encode()
    )


# ---- what is said


def test_exit_code_of_live_job_is_none(local, bell):
    job = ir.submit(list(hold(bell)), scheduler="local", dir=local.path)
    bell.hear(1)
    assert job.wait(0).exit_code is None
    assert job.cancel() is True
    assert job.wait().exit_code == 143
    assert job.cancel() is False


def test_time_is_that_of_the_last_change_and_says_so(local, bell):
    name = local.submit("--", *hold(bell))
    bell.hear(1)
    assert re.search(r"^ir-\w+  (STARTING|RUNNING)  for \d+ s  local", local.call("list").stdout)
    local.call("cancel", name)
    local.wait(name)
    assert re.search(r"^ir-\w+  CANCELLED  \d+ s ago  local", local.call("status", name).stdout)
    done = local.call("cancel", name)
    assert (done.returncode, done.stderr) == (0, f"infini-job: job {name} already finished: CANCELLED\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopping_who_waits_names_the_job_and_dies_of_the_signal(local, bell, number):
    waiting = local.start("submit", "--wait", "--", *hold(bell))
    waiting.read_until(b"\n")
    name = waiting.out.split()[1].decode()
    bell.hear(1)
    waiting.read_error_until(b"RUNNING")
    waiting.signal(number)
    assert waiting.wait() == -number
    how = f"run infini-job logs -f {name} to follow it, or infini-job cancel {name} to stop it"
    said = f"infini-job: job {name} keeps running; {how}\n"
    assert waiting.err.decode().endswith(said)
    local.call("cancel", name)
    local.wait(name)


def test_wait_ends_when_dependency_cannot_be_met(tmp_path, case, slurm_queue):
    slurm_queue.set(hold="DependencyNeverSatisfied")
    jobs = Jobs(tmp_path / "jobs", case, {**slurm_queue.env, "INFINI_JOB_SCHEDULER": "slurm"})
    done = jobs.call("submit", "--slots=1", "--wait", "--json", "--", "true")
    name = json.loads(done.stdout)["name"]
    assert done.returncode == 1
    assert done.stderr == (
        f"infini-job: job {name} cannot start (DependencyNeverSatisfied): its dependency cannot be met; run "
        f"infini-job cancel {name}\n"
    )
    assert jobs.call("cancel", name).returncode == 0
    jobs.close()


def test_only_what_can_never_begin_ends_the_wait():
    assert is_never_met("DependencyNeverSatisfied")
    assert is_never_met("(DependencyNeverSatisfied)")
    assert not any(map(is_never_met, ("Dependency", "JobHeldUser", "PartitionTimeLimit", "")))
