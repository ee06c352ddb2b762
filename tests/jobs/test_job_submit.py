"""A job is submitted once, or not at all, whatever its scheduler does; and it is known afterwards. On stand-ins."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import infini_run as ir
from infini_run.jobs.errors import QueryError, SubmitError
from infini_run.jobs.folder.job_dir import environment
from infini_run.jobs.request.container import Image
from infini_run.jobs.request.job_request import JobRequest
from infini_run.jobs.scheduler import strip_scheduler_environment
from infini_run.jobs.schedulers.pbs import Pbs
from infini_run.jobs.schedulers.slurm import Slurm
from infini_run.jobs.submit import hand_over
from infini_run.record import replace
from tests.jobs.test_job_status import made
from tests.support.command import play
from tests.support.job_case import Jobs
from tests.support.waiting import until

COMMAND = {"slurm": "sbatch", "pbs": "qsub"}
ASK = {"slurm": "squeue", "pbs": "qstat"}
CLASS = {"slurm": Slurm, "pbs": Pbs}
TWO = ("--slots=8", "--slots_per_node=4")
NOW = (0.0, 0.0, 0.0)


@pytest.fixture(params=["slurm", "pbs"])
def queue(request):
    return request.getfixturevalue(f"{request.param}_queue")


@pytest.fixture
def jobs(queue, tmp_path, case):
    """infini-job, with that stand-in's commands."""
    path = {"PATH": queue.env["PATH"], "TEST_BATCH": queue.folder, "INFINI_JOB_SCHEDULER": queue.kind}
    jobs = Jobs(tmp_path / "jobs", case, path)
    yield jobs
    jobs.close()
    queue.ended()


@pytest.fixture
def hand(queue, tmp_path):
    """A script handed over; the scheduler's id, what was said, and what it is called."""
    said: list[str] = []
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/sh\ntrue\n")

    def call(pauses_s=NOW):
        name = "ir-0123456789"
        return hand_over(CLASS[queue.kind](queue.env), str(script), name, print_line=said.append, pauses_s=pauses_s)

    call.said = said
    return call


# ---- once


def test_a_script_is_handed_over_once(queue, hand):
    assert hand().startswith("101")
    assert len(queue.jobs()) == len(queue.calls(COMMAND[queue.kind])) == 1
    assert hand.said == []


def test_one_that_was_taken_without_an_answer_is_adopted(queue, hand):
    queue.fail(COMMAND[queue.kind], "lost")
    queue.set(hold="Priority")
    assert hand().startswith("101")
    assert len(queue.jobs()) == 1
    assert len(hand.said) == 1
    assert hand.said[0].startswith(f"{queue.kind} has not responded (")


def test_one_that_ended_before_it_was_looked_for_is_adopted_too(queue, hand):
    if queue.kind == "slurm":
        queue.fail("sbatch", "lost")
        queue.fail("squeue", "away")  # meanwhile it ends
    else:
        queue.fail("qsub", "lost")
        queue.fail("qselect", "away")
    assert hand((0.2, 0.0, 0.0)).startswith("101")
    assert len(queue.jobs()) == 1


def test_one_that_was_not_taken_is_handed_over_again(queue, hand):
    queue.fail(COMMAND[queue.kind], "garbage")
    assert hand().startswith("101")
    assert len(queue.jobs()) == 1
    assert len(queue.calls(COMMAND[queue.kind])) == 2


def test_nothing_is_handed_over_again_before_the_scheduler_has_answered(queue, hand):
    queue.fail(COMMAND[queue.kind], "lost")
    queue.fail({"slurm": "squeue", "pbs": "qselect"}[queue.kind], "away", "away", "away")
    with pytest.raises(SubmitError) as error:
        hand()
    assert error.value.kind == "timed_out"
    assert "but may have the job; later, run infini-job status ir-0123456789" in str(error.value)
    assert len(queue.calls(COMMAND[queue.kind])) == 1


def test_one_that_runs_is_adopted_by_a_pbs_without_history(pbs_queue, tmp_path, bell):
    """qselect -x says that there is none, and exits with 0: it was submitted three times."""
    pbs_queue.set(history=False)
    pbs_queue.fail("qsub", "lost")
    (tmp_path / "job.sh").write_text(f"#!/bin/sh\nread _ <{bell.path}\n")
    found = hand_over(Pbs(pbs_queue.env), str(tmp_path / "job.sh"), "ir-0123456789", print_line=print, pauses_s=NOW)
    bell.ring("go")
    pbs_queue.ended()
    assert found == "101.pbshead"
    assert len(pbs_queue.jobs()) == 1


def test_one_that_has_begun_is_taken_though_pbs_has_forgotten_it(pbs_queue, tmp_path, case):
    """Without history: its directory knows."""
    pbs_queue.set(history=False)
    path = {"PATH": pbs_queue.env["PATH"], "TEST_BATCH": pbs_queue.folder, "INFINI_JOB_SCHEDULER": "pbs"}
    jobs = Jobs(tmp_path / "jobs", case, path)
    pbs_queue.fail("qsub", "late")
    done = jobs.call("submit", *TWO, "--", "true")
    assert done.returncode == 0, done.stderr
    assert len(pbs_queue.jobs()) == 1
    name = done.stdout.split()[1]
    assert "101.pbshead" in done.stdout
    assert jobs.status(name)["state"] == "COMPLETED"


def test_one_that_begins_is_taken_though_nobody_answers(jobs, queue):
    """It says its id in its directory."""
    queue.fail(COMMAND[queue.kind], "lost")
    queue.fail({"slurm": "squeue", "pbs": "qselect"}[queue.kind], *["away"] * 50)
    done = jobs.call("submit", *TWO, "--", "true")
    assert done.returncode == 0, done.stderr
    assert f"  {queue.kind} 101" in done.stdout
    assert len(queue.jobs()) == 1


def test_an_id_that_a_job_says_ends_the_pause_between_two_looks(tmp_path, many_descriptors):
    """Nobody else would tell: of a controller that is back there is no event. A host may have many descriptors."""
    folder = made(tmp_path, "ir-0123456789")

    class Silent:
        name = "slurm"

        def submit(self, script, name):
            raise SubmitError("timed_out", "no answer")

        def find(self, name):
            thread.start()
            raise QueryError("no answer")

    thread = threading.Thread(target=folder.write_id, args=("7",))
    said = []
    found = hand_over(Silent(), folder.script, folder.name, print_line=said.append, pauses_s=(3600.0,), folder=folder,
                      before=folder.id)  # fmt: skip
    thread.join()
    assert found == "7"
    assert len(said) == 1


@pytest.mark.parametrize(("fault", "kind"), [("refuse", "refused"), ("away", "unreachable")])
def test_a_clear_answer_is_not_asked_for_again(queue, hand, fault, kind):
    queue.fail(COMMAND[queue.kind], fault)
    with pytest.raises(SubmitError) as error:
        hand()
    assert error.value.kind == kind
    assert queue.jobs() == []
    assert len(queue.calls(COMMAND[queue.kind])) == 1


@pytest.mark.parametrize("fault", ["refuse", "away"])
def test_what_was_not_taken_leaves_nothing(queue, jobs, fault):
    queue.fail(COMMAND[queue.kind], fault)
    done = jobs.call("submit", *TWO, "--", "true")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""
    assert jobs.is_empty()


@pytest.mark.parametrize("name", ["write_submission", "write_atomic", "write_script", "write_function"])
def test_interrupt_before_submission_leaves_nothing(tmp_path, name):
    def interrupt(frame, event, _):
        if event == "call" and frame.f_code.co_name == name:
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            ir.submit(os.getpid, slots=1, scheduler="local", dir=tmp_path / "jobs")
    finally:
        sys.setprofile(None)
    assert os.listdir(tmp_path / "jobs") == []


def test_one_of_which_nobody_knows_keeps_its_directory_and_is_found_again(queue, jobs):
    """The command would look for two minutes; we end it, and the job is there by its name."""
    queue.set(hold="Priority")
    queue.fail(COMMAND[queue.kind], "lost")
    queue.fail({"slurm": "squeue", "pbs": "qselect"}[queue.kind], *["away"] * 9)
    submitting = jobs.start("submit", *TWO, "--", "true")
    submitting.read_error_until(b"checking whether it has the job")
    submitting.process.kill()
    submitting.wait()
    (name,) = os.listdir(jobs.path)
    assert not (jobs.path / name / "id").exists()
    until(lambda: jobs.status(name)["id"])
    assert jobs.status(name)["id"].startswith("101")
    assert jobs.call("cancel", name).returncode == 0
    assert jobs.wait(name)["headline"] == "CANCELLED"
    assert queue.jobs()[0]["state"] == "CANCELLED"


# ---- what goes with it


def test_options_of_the_callers_shell_are_left_out():
    environ = {"SBATCH_GRES": "gpu:1", "SLURM_CONF": "/etc/x", "SRUN_DEBUG": "1", "SALLOC_X": "1", "PBS_DPREFIX": "#",
               "SLURM_JOB_ID": "7", "PBS_CONF_FILE": "/etc/pbs", "CUDA_VISIBLE_DEVICES": "3", "HOME": "/h",
               "SHLVL": "3", "MINE": "1"}  # fmt: skip
    asked = JobRequest(
        name="ir-0123456789", folder="/f", command=("x",), cwd="/", python="p", slots=1, env=(("MORE", "2"),)
    )
    kept = {"SLURM_CONF": "/etc/x", "PBS_CONF_FILE": "/etc/pbs", "HOME": "/h", "MINE": "1", "MORE": "2"}
    assert environment(strip_scheduler_environment(environ), asked) == kept
    in_image = replace(asked, container=Image(name="image"), env=(("PATH", "/mine"),))
    assert environment({"PATH": "/usr/bin", "LD_PRELOAD": "x", "HOME": "/h"}, in_image) == {
        "HOME": "/h",
        "PATH": "/mine",
    }


def test_the_environment_is_a_file_that_only_we_can_read(queue, jobs):
    name = jobs.submit(*TWO, "--env=SECRET=hush", "--", "sh", "-c", 'echo "$SECRET"')
    jobs.wait(name)
    assert {line.split("] ")[1] for line in jobs.lines(name)} == {"hush"}
    folder = jobs.path / name
    assert stat.S_IMODE((folder / "env").stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for file in ("job.sh", "request.json"):
        assert b"hush" not in (folder / file).read_bytes()


# ---- how it ends


def test_first_failure_over_two_nodes(queue, jobs):
    done = jobs.call("submit", *TWO, "--wait", "--", *play("@5", "exit=7", "@*", "wait"))
    assert done.returncode == 7, done.stderr + done.stdout
    node = {"slurm": "node2", "pbs": "pbsn2"}[queue.kind]
    assert done.stdout.splitlines()[1].startswith(f"FAILED exit 7 on {node}, rank 5: ")
    queue.ended()
    assert queue.jobs()[0]["code"] == 7


def test_a_job_is_known_when_its_scheduler_has_forgotten_it(queue, jobs):
    name = jobs.submit(*TWO, "--", "true")
    jobs.wait(name)
    queue.set(forget=True, history=False)
    calls = len(queue.calls(ASK[queue.kind]))
    assert jobs.status(name)["headline"] == "COMPLETED"
    assert len(queue.calls(ASK[queue.kind])) == calls  # it was not even asked


def test_a_job_that_is_missing_is_not_finished(queue, jobs, bell):
    name = jobs.submit(*TWO, "--", "sh", "-c", f"echo up > {bell.path}; exec sleep 1000")
    bell.hear(8)
    jobs.wait(name, "RUNNING")
    queue.fail(ASK[queue.kind], "empty")
    status = jobs.status(name)
    assert not status["is_final"]
    assert status["state"] in ("RUNNING", "LOST")
    assert jobs.status(name)["state"] == "RUNNING"
    jobs.call("cancel", name)
    assert jobs.wait(name)["state"] == "CANCELLED"


@pytest.mark.parametrize("fault", ["away", "lost", "garbage"])
def test_an_answer_that_does_not_come_changes_nothing(queue, jobs, bell, fault):
    name = jobs.submit(*TWO, "--", "sh", "-c", f"echo up > {bell.path}; exec sleep 1000")
    bell.hear(8)
    jobs.wait(name, "RUNNING")
    queue.fail(ASK[queue.kind], fault)
    status = jobs.status(name)
    assert (status["state"], status["is_final"]) == ("RUNNING", False)
    assert bool(status["query_error"]) or (queue.kind, fault) == ("pbs", "lost")
    jobs.call("cancel", name)
    jobs.wait(name)


def test_a_cancelled_job_is_no_success(queue, jobs, bell):
    """PBS has Exit_status 0 for it; a rank that ends well on TERM does not change that."""
    script = f'trap "exit 0" TERM; (echo up > {bell.path}; exec sleep 1000) & wait'
    name = jobs.submit(*TWO, "--", "sh", "-c", script)
    bell.hear(8)
    assert jobs.call("cancel", name).returncode == 0
    assert jobs.wait(name)["headline"] == "CANCELLED"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["cancel", "qdel", "limit"])
def test_ranks_of_pbs_on_all_nodes_have_their_grace(pbs_queue, tmp_path, case, bell, how):
    """PBS's TERM reaches all of its session on the first node, pbs_tmrsh too, and nothing on the others; what is left
    is killed as soon as the launcher has gone. `cancel` goes without PBS, whose own wait is shorter here."""
    pbs_queue.set(kill_wait_s=0.2 if how == "cancel" else 60.0)
    jobs = Jobs(tmp_path / "jobs", case, {"PATH": pbs_queue.env["PATH"], "TEST_BATCH": pbs_queue.folder,
                                          "INFINI_JOB_SCHEDULER": "pbs"})  # fmt: skip
    os.mkfifo(tmp_path / "go")
    go = os.open(tmp_path / "go", os.O_RDWR)
    once = f'trap "" TERM; echo term > {bell.path}; read _ < {tmp_path}/go; echo saved; exit 0'  # two TERMs may come
    save = f"trap '{once}' TERM; echo up > {bell.path}"
    limit = ["--time=10s"] if how == "limit" else []
    name = jobs.submit(*TWO, *limit, "--", "sh", "-c", f"{save}; while :; do sleep 1000 & wait; done")
    bell.hear(8)
    if how == "cancel":
        assert jobs.call("cancel", name).returncode == 0
    elif how == "qdel":
        subprocess.run(["qdel", jobs.status(name)["id"]], env=pbs_queue.env, check=True)
    bell.hear(8)
    os.write(go, b"\n" * 16)
    status = jobs.wait(name)
    os.close(go)
    assert status["state"] == ("TIMEOUT" if how == "limit" else "CANCELLED"), jobs.logs(name)
    assert sum(line.endswith("] saved") for line in jobs.lines(name)) == 8, jobs.logs(name)
    pbs_queue.ended()


def test_what_is_cancelled_again_is_ended_by_pbs(pbs_queue, tmp_path, case, bell):
    """Its launcher may be beyond help: here it is stopped."""
    pbs_queue.set(kill_wait_s=0.2)
    jobs = Jobs(tmp_path / "jobs", case, {"PATH": pbs_queue.env["PATH"], "TEST_BATCH": pbs_queue.folder,
                                          "INFINI_JOB_SCHEDULER": "pbs"})  # fmt: skip
    name = jobs.submit(*TWO, "--", "sh", "-c", f"echo up $PPID > {bell.path}; exec sleep 1000")
    bell.hear(8)
    jobs.wait(name, "RUNNING")
    stopped = list(launchers(pbs_queue))
    assert stopped
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    assert jobs.call("cancel", name).returncode == 0
    assert pbs_queue.jobs()[0]["state"] == "RUNNING", (stopped, jobs.status(name), jobs.logs(name))
    assert jobs.call("cancel", name).returncode == 0
    pbs_queue.ended()
    assert jobs.wait(name)["headline"] == "CANCELLED"


def launchers(queue):
    """The processes that a job's script has become."""
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
            environ = Path(f"/proc/{entry}/environ").read_bytes()
            if (
                any(word.endswith(b"/infini_run/jobs/start.py") for word in words)
                and os.fsencode(queue.folder) in environ
            ):
                yield int(entry)


def test_one_cancelled_while_it_waits_never_runs(queue, jobs, tmp_path):
    queue.set(hold="Priority")
    name = jobs.submit(*TWO, "--", "touch", tmp_path / "ran")
    assert jobs.status(name)["state"] == "QUEUED"
    jobs.call("cancel", name)
    queue.set(forget=True, history=False)
    assert jobs.wait(name)["headline"] == "CANCELLED"
    assert not (tmp_path / "ran").exists()


def test_what_never_begins_is_told_at_once(slurm_queue, tmp_path, case):
    slurm_queue.set(hold="PartitionTimeLimit")
    jobs = Jobs(tmp_path / "jobs", case, {"PATH": slurm_queue.env["PATH"], "TEST_BATCH": slurm_queue.folder})
    waiting = jobs.start("submit", *TWO, "--wait", "--", "true")
    waiting.read_error_until(b"QUEUED PartitionTimeLimit: request less --time, or use another --pool\n")
    name = waiting.out.split()[1].decode() if waiting.out else os.listdir(jobs.path)[0]
    assert jobs.status(name)["hold"] == "hopeless"
    assert "hopeless: request less --time" in jobs.call("status").stdout
    jobs.call("cancel", name)
    assert waiting.wait() == 1
    jobs.close()


def test_the_limit_of_pbs_ends_it(pbs_queue, tmp_path, case):
    """Slurm counts in minutes: test_job_slurm_real.py."""
    jobs = Jobs(tmp_path / "jobs", case, {"PATH": pbs_queue.env["PATH"], "TEST_BATCH": pbs_queue.folder,
                                          "INFINI_JOB_SCHEDULER": "pbs"})  # fmt: skip
    done = jobs.call("submit", *TWO, "--time=2s", "--wait", "--", "sleep", "1000")
    assert done.stdout.splitlines()[1].startswith("TIMEOUT"), done.stderr
    assert jobs.status(done.stdout.split()[1])["is_final"]


@pytest.mark.slow
def test_ranks_of_pbs_are_warned_too(pbs_queue, tmp_path, case):
    """PBS itself has no such signal. The ranks have ten seconds to be there."""
    jobs = Jobs(tmp_path / "jobs", case, {"PATH": pbs_queue.env["PATH"], "TEST_BATCH": pbs_queue.folder,
                                          "INFINI_JOB_SCHEDULER": "pbs"})  # fmt: skip
    done = jobs.call("submit", *TWO, "--time=1000s", "--warn=990s", "--wait", "--", *play("end=USR2:0", "wait"))
    assert done.returncode == 0, done.stderr + done.stdout
    name = done.stdout.split()[1]
    assert sum(" got USR2 " in line for line in jobs.lines(name)) == 8
    pbs_queue.ended()


def test_ranks_are_warned_of_a_limit_that_is_their_queues(pbs_queue, tmp_path, case, bell):
    """PBS says what it is once they are there."""
    pbs_queue.set(pools={"workq": {"resources_default": {"walltime": "00:16:40"}}})
    pbs_queue.fail("qstat", "slow")
    os.mkfifo(f"{pbs_queue.folder}/gate")
    jobs = Jobs(tmp_path / "jobs", case, {"PATH": pbs_queue.env["PATH"], "TEST_BATCH": pbs_queue.folder,
                                          "INFINI_JOB_SCHEDULER": "pbs"})  # fmt: skip
    rank = f"trap 'echo warned; exit 0' USR2; echo up >{bell.path}; while :; do sleep 1000 & wait; done"
    name = jobs.submit(*TWO, "--warn=999s", "--", "sh", "-c", rank)
    bell.hear(8)
    os.close(os.open(f"{pbs_queue.folder}/gate", os.O_WRONLY))
    assert jobs.wait(name)["headline"] == "COMPLETED"
    assert sum(line.endswith("] warned") for line in jobs.lines(name)) == 8
    pbs_queue.ended()


def test_a_restart_is_another_run_of_the_same_job(queue, jobs):
    script = "echo life $INFINI_JOB_ATTEMPT; [ $INFINI_JOB_ATTEMPT = 1 ] || exit 4"
    name = jobs.submit(*TWO, "--restarts=1", "--", "sh", "-c", script)
    status = jobs.wait(name)
    assert (status["headline"], status["attempt"]) == ("COMPLETED", 1), jobs.logs(name)
    assert {line.split("] ")[1] for line in jobs.lines(name, "--attempt=1")} == {"life 1"}


@pytest.mark.parametrize("history", [False, True])
def test_a_run_again_whose_answer_is_lost_is_found_and_no_failure(pbs_queue, tmp_path, case, history):
    """By its name: the run before has the same, and is there still."""
    pbs_queue.set(history=history)
    pbs_queue.fail("qsub", "", "lost")
    jobs = Jobs(tmp_path / "jobs", case, {"PATH": pbs_queue.env["PATH"], "TEST_BATCH": pbs_queue.folder,
                                          "INFINI_JOB_SCHEDULER": "pbs"})  # fmt: skip
    name = jobs.submit(*TWO, "--restarts=1", "--", "sh", "-c", "[ $INFINI_JOB_ATTEMPT = 1 ] || exit 4")
    assert jobs.wait(name)["headline"] == "COMPLETED", jobs.logs(name)
    pbs_queue.ended()
    assert len(pbs_queue.jobs()) == 2
    assert jobs.status(name)["id"] == "102.pbshead"


def test_what_takes_a_job_off_the_queue_is_believed_before_a_rank_that_asks_for_another_run(queue, jobs, bell):
    """Its code 85 counts at a warning, at the limit and at a preemption."""
    rank = f"trap 'exit 85' TERM; echo up >{bell.path}; while :; do sleep 1000 & wait; done"
    name = jobs.submit(*TWO, "--restarts=1", "--", "sh", "-c", rank)
    bell.hear(8)
    subprocess.run(
        [{"slurm": "scancel", "pbs": "qdel"}[queue.kind], jobs.status(name)["id"]], env=queue.env, check=True
    )
    status = jobs.wait(name)
    assert (status["state"], status["attempt"]) == ("CANCELLED", 0), jobs.logs(name)
    queue.ended()
    assert len(queue.jobs()) == 1


def exits_in(events):
    """The ranks that have ended, as far as the head has written it to its file of events."""
    lines = events.read_text().split("\n")[:-1]
    return [event["rank"] for event in map(json.loads, lines) if event["kind"] == "exited"]


def test_ranks_of_another_node_save_after_the_first_that_asks_for_another_run(queue, jobs, bell, tmp_path):
    """Though one beside it fails meanwhile, for instance since the first one is gone. Each ends after the head has
    heard of the one before: what is closer together than the clocks of two nodes are known has no order."""
    for rank in range(8):
        os.mkfifo(tmp_path / f"save{rank}")
    script = f"[ $INFINI_JOB_ATTEMPT = 0 ] || exit 0; trap 'echo $RANK >> {tmp_path}/termed; exit 1' TERM; "
    script += f"echo $RANK $$ > {bell.path}; exec 3<> {tmp_path}/save$RANK; read code <&3; "
    script += f"echo $RANK >> {tmp_path}/ended; exit $code"
    events = tmp_path / "events"
    name = jobs.submit(*TWO, f"--run_options=--grace=1000 --events={events}", "--", "bash", "-c", script)
    bell.hear(8)
    codes = {7: 85, 4: 1, 0: 85, 6: 85, 5: 85, 3: 85, 2: 85, 1: 85}
    for count, (rank, code) in enumerate(codes.items(), 1):
        (tmp_path / f"save{rank}").write_text(f"{code}\n")
        until(lambda: count == len(codes) or len(exits_in(events)) == count)  # noqa: B023
    status = jobs.wait(name)
    assert (status["headline"], status["attempt"]) == ("COMPLETED", 1), jobs.logs(name)
    assert (tmp_path / "ended").read_text().split() == ["7", "4", "0", "6", "5", "3", "2", "1"]
    assert not (tmp_path / "termed").exists()
    line = next(line for line in jobs.logs(name).splitlines() if "asked to run again (exit code 85, pid " in line)
    assert "rank 7 on " in line
    assert line.endswith("; 6 more asked, 1 more failed")


@pytest.fixture
def slurm_jobs(slurm_queue, tmp_path, case):
    env = {"PATH": slurm_queue.env["PATH"], "TEST_BATCH": slurm_queue.folder, "INFINI_JOB_SCHEDULER": "slurm"}
    return Jobs(tmp_path / "jobs", case, env)


def test_a_new_job_of_slurm_whose_answer_is_lost_writes_its_number_down_itself(slurm_queue, slurm_jobs):
    """With --restarts=0 a job that asks to be run again is submitted anew."""
    slurm_queue.fail("sbatch", "", "lost")
    name = slurm_jobs.submit(*TWO, "--", "sh", "-c", "[ $INFINI_JOB_ATTEMPT = 1 ] || exit 85")
    assert slurm_jobs.wait(name)["headline"] == "COMPLETED", slurm_jobs.logs(name)
    slurm_queue.ended()
    assert len(slurm_queue.jobs()) == 2
    assert slurm_jobs.status(name)["id"] == "102"


def test_a_new_job_of_slurm_that_nobody_knows_is_handed_over_again(slurm_queue, slurm_jobs):
    """sbatch has said nothing, and has done nothing."""
    slurm_queue.fail("sbatch", "", "empty")
    name = slurm_jobs.submit(*TWO, "--", "sh", "-c", "[ $INFINI_JOB_ATTEMPT = 1 ] || exit 85")
    assert slurm_jobs.wait(name)["headline"] == "COMPLETED", slurm_jobs.logs(name)
    assert len(slurm_queue.jobs()) == 2


def test_a_requeue_without_any_answer_is_no_end_before_slurm_has_said_so(slurm_queue, slurm_jobs):
    """It may have been queued all the same."""
    slurm_queue.fail("scontrol", "", "away", "away", "away")
    name = slurm_jobs.submit(*TWO, "--restarts=1", "--", "sh", "-c", "exit 4")
    slurm_queue.ended()
    ending = json.loads((slurm_jobs.path / name / "exit").read_text())
    assert (ending["state"], ending["scheduler_ended_it"]) == ("FAILED", True)
    status = slurm_jobs.wait(name)
    assert (status["headline"].split()[:3], status["is_final"]) == (["FAILED", "exit", "4"], True)
    assert "cannot queue it again: scontrol requeue exited with 1" in status["reason"]


def test_jobs_of_one_scheduler_are_one_query(queue, jobs):
    queue.set(hold="Priority")
    names = [jobs.submit(*TWO, "--", "true") for _ in range(3)]
    before = len(queue.calls(ASK[queue.kind]))
    found = json.loads(jobs.call("status", "--json").stdout)
    assert sorted(status["name"] for status in found) == sorted(names)
    assert len(queue.calls(ASK[queue.kind])) == before + 1
    assert jobs.call("cancel", *names).returncode == 0
    for name in names:
        assert jobs.wait(name)["state"] == "CANCELLED"


def test_a_scheduler_that_cannot_be_asked_is_an_error_of_submit(queue, jobs):
    queue.fail({"slurm": "scontrol", "pbs": "qmgr"}[queue.kind], "away")
    done = jobs.call("submit", *TWO, "--", "true")
    assert done.returncode == QueryError.exit_code
    assert len(done.stderr.splitlines()) == 1
    assert jobs.is_empty()


STRIP = """#!/bin/sh
for word; do
    case $word in --container-*) echo "$word" >>{folder}/asked ;; *) set -- "$@" "$word" ;; esac
    shift
done
exec {srun} "$@"
"""


def test_pyxis_is_srun_with_more_options(slurm_queue, tmp_path, case):
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text(STRIP.format(folder=tmp_path, srun=f"{slurm_queue.folder}/bin/srun"))
    srun.chmod(0o755)
    path = f"{srun.parent}:{slurm_queue.env['PATH']}"
    jobs = Jobs(tmp_path / "jobs", case, {"PATH": path, "TEST_BATCH": slurm_queue.folder})
    words = ("--container=image:1", "--runtime=pyxis", f"--container_python={sys.executable}")
    name = jobs.submit(*TWO, *words, "--", "sh", "-c", "echo in $RANK")
    assert jobs.wait(name)["state"] == "COMPLETED", jobs.logs(name)
    assert len(jobs.lines(name)) == 8
    asked = (tmp_path / "asked").read_text().splitlines()
    assert "--container-image=image:1" in asked
    assert any(word.startswith("--container-mounts=") and f"{jobs.path}/{name}" in word for word in asked)
    jobs.close()
