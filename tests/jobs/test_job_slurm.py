"""Slurm: what its words mean, stand-ins that answer wrongly, and a real one of four nodes that has the last word."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infini_run.environments.hostlist import expand
from infini_run.errors import UsageError
from infini_run.jobs import scheduler
from infini_run.jobs.errors import QueryError, SubmitError
from infini_run.jobs.request import slurm_script
from infini_run.jobs.request.job_request import JobRequest
from infini_run.jobs.request.node_shape import lay_out
from infini_run.jobs.request.script import plan, render
from infini_run.jobs.scheduler import Facts, Kind, strip_scheduler_environment
from infini_run.jobs.schedulers import scheduler_command, slurm_output
from infini_run.jobs.schedulers.slurm import Slurm, _gpus, span_s
from infini_run.jobs.schedulers.slurm_output import hold_of, is_out_of_memory, state_of
from tests.support.cluster import Bed, free_ports, need
from tests.support.waiting import until

pytestmark = pytest.mark.xdist_group(__name__)  # one bed for all of them
QUIET = {"name": "ir-1", "command": ("x",), "cwd": "/", "python": "/bin/true"}


def ask(slots, folder="/f", **changes):
    return JobRequest(slots=slots, folder=str(folder), **QUIET | changes)


# ---- words
HOLDS = [
    ("Resources", "waiting"), ("Priority", "waiting"), ("Dependency", "waiting"),
    ("QOSMaxJobsPerUserLimit", "waiting"), ("AssocGrpGRES", "waiting"), ("QOSGrpCpuLimit", "waiting"),
    ("Licenses", "waiting"), ("JobHeldUser", "waiting"), ("AssocMaxJobsLimit", "waiting"),
    ("SomethingNew", "waiting"), ("Reservation", "waiting"), ("BeginTime", "passing"), ("None", "passing"),
    ("", "passing"), ("Prolog", "passing"), ("NodeDown", "passing"),
    ("(ReqNodeNotAvail, Reserved for maintenance)", "passing"),
    ("ReqNodeNotAvail, UnavailableNodes:node[1-2]", "hopeless"), ("PartitionNodeLimit", "hopeless"),
    ("PartitionTimeLimit", "hopeless"), ("BadConstraints", "hopeless"), ("InvalidAccount", "hopeless"),
    ("InvalidQOS", "hopeless"), ("JobHeldAdmin", "hopeless"), ("QOSMaxCpuPerJobLimit", "hopeless"),
    ("AssocMaxWallDurationPerJobLimit", "hopeless"), ("QOSMaxMemoryPerNode", "hopeless"),
    ("QOSMinGRES", "hopeless"), ("DependencyNeverSatisfied", "hopeless"),
    ("launch_failed_requeued_held", "hopeless"),
]  # fmt: skip


@pytest.mark.parametrize(("reason", "wanted"), HOLDS)
def test_a_reason_is_of_one_of_three_classes(reason, wanted):
    hold, advice = hold_of(reason)
    assert hold == wanted
    assert bool(advice) == (wanted == "hopeless")  # what is hopeless says what to change


STATES = [
    ("PENDING", "QUEUED"), ("CONFIGURING", "STARTING"), ("RUNNING", "RUNNING"), ("COMPLETING", "RUNNING"),
    ("SUSPENDED", "SUSPENDED"),
    ("COMPLETED", "COMPLETED"), ("FAILED", "FAILED"), ("CANCELLED by 1000", "CANCELLED"),
    ("CANCELLED+", "CANCELLED"), ("TIMEOUT", "TIMEOUT"), ("NODE_FAIL", "NODE_FAIL"), ("BOOT_FAIL", "NODE_FAIL"),
    ("OUT_OF_MEMORY", "OOM"), ("PREEMPTED", "PREEMPTED"), ("REQUEUED", "QUEUED"), ("SOMETHING_NEW", "RUNNING"),
    ("", "RUNNING"),
]  # fmt: skip


@pytest.mark.parametrize(("word", "wanted"), STATES)
def test_a_state_of_slurm_is_one_of_ours(word, wanted):
    assert state_of(word) == wanted
    assert wanted in scheduler.STATES


# 22.05.8 with OverMemoryKill, as it was seen; by the kernel in a cgroup: from the sources of 22.05, 23.11 to 25.05
MEMORY = [
    ("slurmstepd-node2: error: StepId=1.0 exceeded memory limit (451506176 > 104857600), being killed", True),
    ("slurmstepd-node1: error: Exceeded job memory limit", True),
    (
        "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=1.0. Some of your processes may have been killed",
        True,
    ),
    (
        "slurmstepd: error: Detected 2 oom_kill events in StepId=1.0. Some of the step tasks have been OOM Killed.",
        True,
    ),
    ("srun: error: node1: task 0: Out Of Memory", True),
    ("slurmstepd-node1: error: *** JOB 1 ON node1 CANCELLED AT 2026-11-22T12:07:01 DUE TO PREEMPTION ***", False),
]


@pytest.mark.parametrize(("line", "wanted"), MEMORY)
def test_what_slurm_says_of_memory_is_understood(line, wanted):
    assert is_out_of_memory(line) == wanted


# job_state_string() in the sources of slurm-22.05, 23.11, 24.05, 25.05 and 26.05, which alone has EXPEDITING
NEWER_STATES = """
COMPLETING STAGE_OUT CONFIGURING EXPEDITING RESIZING REQUEUED REQUEUE_FED REQUEUE_HOLD SPECIAL_EXIT STOPPED REVOKED
RESV_DEL_HOLD SIGNALING PENDING RUNNING SUSPENDED COMPLETED CANCELLED FAILED TIMEOUT NODE_FAIL PREEMPTED BOOT_FAIL
DEADLINE OUT_OF_MEMORY
"""


def test_every_state_of_newer_versions_is_known():
    """An unknown one would be RUNNING."""
    assert {word for word in NEWER_STATES.split() if word not in slurm_output._STATES} == set()


# the texts that decide something, as the sources of 22.05, 23.11, 24.05, 25.05 and 26.05 have them (slurm_errno.c,
# sacct/options.c): command and all before them are of the real 22.05.8
def is_gone(said):
    return said.failure(*slurm_output.GONE) is None


TEXTS = [
    ("scontrol: Job is pending execution for job 17", slurm_output.is_queued),
    ("scancel: error: Kill job error on job id 9: Invalid job id specified", is_gone),
    ("scancel: error: Kill job error on job id 9: Job/step already completing or completed", is_gone),
]


@pytest.mark.parametrize(("text", "means"), TEXTS)
def test_texts_of_newer_versions_are_understood(text, means):
    assert means(scheduler_command.CommandResult(code=1, out="", error=text))
    assert not means(
        scheduler_command.CommandResult(code=1, out="", error="Requested operation is presently disabled for job 17")
    )


SPANS = [("infinite", 0), ("30:00", 1800), ("1:00:00", 3600), ("2-00:00:00", 172800), ("1-12", 129600), ("5", 300),
         ("n/a", 0), ("", 0)]  # fmt: skip


@pytest.mark.parametrize(("text", "wanted"), SPANS)
def test_a_time_of_slurm_is_seconds(text, wanted):
    assert span_s(text) == wanted


GRES = [
    ("gpu:8", [("", 8)]),
    ("gpu:a100:4(S:0-1),nvme:1", [("a100", 4)]),
    ("gpu:a100:4(S:0,2),gpu:v100:2(S:1)", [("a100", 4), ("v100", 2)]),
    ("(null)", []),
    ("gpu", [("", 1)]),
    ("lustre:2", []),
]


@pytest.mark.parametrize(("text", "wanted"), GRES)
def test_gpus_are_found_in_gres(text, wanted):
    assert _gpus(text) == wanted


def test_the_environment_has_no_options_for_the_schedulers_commands():
    given_ = {"SBATCH_GRES": "gpu:1", "SLURM_JOB_ID": "1", "SRUN_CPUS": "1", "SALLOC_X": "1", "PBS_DPREFIX": "#X",
              "SLURM_CONF": "/c", "PBS_CONF_FILE": "/p", "PATH": "/bin", "SQUEUE_FORMAT": "x"}  # fmt: skip
    assert strip_scheduler_environment(given_) == {"SLURM_CONF": "/c", "PBS_CONF_FILE": "/p", "PATH": "/bin"}


# ---- stand-ins that answer wrongly
@pytest.fixture
def slurm(slurm_queue):
    return Slurm(slurm_queue.env)


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "job.sh"

    def write(text="true", nodes=1):
        path.write_text(f"#!/bin/sh\n#SBATCH --nodes={nodes}\n#SBATCH --output={tmp_path}/out\n{text}\n")
        return str(path)

    return write


def test_what_it_has_is_found(slurm, slurm_queue):
    facts = slurm.facts()
    assert (facts.version, facts.select, facts.has_tres, facts.has_gres) == ("22.05.8", "cons_tres", True, True)
    assert not facts.has_accounting
    assert [(pool.name, pool.is_default, pool.limit_s) for pool in facts.pools] == [
        ("debug", True, 0), ("short", False, 3600),
    ]  # fmt: skip
    assert facts.pool().kinds == (Kind(nodes=4, cpus=64, mem_mb=8000, gpus=8),)
    slurm_queue.set(select="linear")
    assert not slurm.facts().has_tres


def test_a_job_is_submitted_found_and_followed_to_its_end(slurm, slurm_queue, script, bell):
    job = slurm.submit(script(f"read _ <{bell.path}", nodes=2), "ir-1")
    until(lambda: slurm.query(["ir-1"])["ir-1"].state == "RUNNING")
    assert slurm.query(["ir-1"])["ir-1"].nodes == "node1,node2"
    assert slurm.find("ir-1") == job
    bell.ring("go")
    slurm_queue.ended()
    assert slurm.query(["ir-1", "ir-2"]) == {
        "ir-1": scheduler.SchedulerJob(id=job, state="COMPLETED", nodes="node1,node2")
    }
    assert slurm.find("ir-1") == job  # it ended well: it must not be submitted again


def test_a_job_that_failed_before_anybody_looked_was_taken(slurm, slurm_queue, script):
    job = slurm.submit(script("exit 3"), "ir-1")
    slurm_queue.ended()
    assert slurm.query(["ir-1"])["ir-1"].state == "FAILED"
    assert slurm.find("ir-1") == job


def test_all_jobs_are_one_query(slurm, slurm_queue):
    slurm.facts()
    slurm.query([f"ir-{n}" for n in range(100)])
    assert len(slurm_queue.calls("squeue")) == 1
    assert slurm_queue.calls("sacct") == []  # there is no accounting, and we were told


def test_what_the_queue_has_forgotten_the_accounting_may_know(slurm, slurm_queue, script):
    slurm_queue.set(accounting=True)
    slurm.submit(script("exit 3"), "ir-1")
    slurm_queue.ended()
    slurm_queue.set(forget=True)
    seen = slurm.query(["ir-1"])["ir-1"]
    assert (seen.state, seen.code) == ("FAILED", 3)


def test_a_database_that_is_down_takes_nothing_from_what_the_queue_says(slurm, slurm_queue, script, bell):
    slurm_queue.set(accounting=True)
    job = slurm.submit(script(f"read _ <{bell.path}"), "ir-1")
    slurm_queue.fail("sacct", "away", "away")
    seen = slurm.query(["ir-1", "ir-2"], {"ir-1": job, "ir-2": "77"})
    assert seen["ir-1"].id == job
    assert seen["ir-1"].state != ""
    assert (seen["ir-2"].id, seen["ir-2"].state) == ("77", "")
    assert seen["ir-2"].reason.endswith("Problem talking to the database: Connection refused")
    with pytest.raises(QueryError, match="Problem talking to the database"):
        slurm.find("ir-2")  # nobody can say that it is not there
    bell.ring("go")
    slurm_queue.ended()


def test_a_job_that_was_cancelled_before_its_time_is_found_by_its_id(slurm, slurm_queue, script):
    slurm_queue.set(accounting=True, hold="JobHeldUser")
    job = slurm.submit(script(), "ir-1")
    slurm.cancel(job)
    seen = slurm.query(["ir-1"])["ir-1"]
    assert (seen.state, seen.reason) == ("CANCELLED", "")  # where squeue still says JobHeldUser
    slurm_queue.set(forget=True)
    assert slurm.query(["ir-1"], {"ir-1": job})["ir-1"].state == "CANCELLED"
    assert slurm.query(["ir-1"]) == {}  # 22.05 lists none by name that was never eligible
    assert len(slurm_queue.calls("sacct")) == 2


def test_without_accounting_it_is_asked_for_once(slurm, slurm_queue):
    assert slurm.query(["ir-1"]) == slurm.query(["ir-1"]) == {}
    assert len(slurm_queue.calls("sacct")) == 1


LOST = [
    ("lost", "timed_out", 1), ("killed", "timed_out", 1), ("silent", "timed_out", 1), ("empty", "timed_out", 0),
    ("garbage", "timed_out", 0), ("refuse", "refused", 0), ("away", "unreachable", 0),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "kind", "jobs"), LOST)
def test_a_submission_without_an_answer_is_told_from_one_that_was_refused(slurm, slurm_queue, script, monkeypatch,
                                                                           fault, kind, jobs):  # fmt: skip
    limited(monkeypatch, fault)
    slurm_queue.fail("sbatch", fault)
    with pytest.raises(SubmitError) as told:
        slurm.submit(script(), "ir-1")
    assert told.value.kind == kind
    assert len(slurm_queue.jobs()) == jobs
    assert (slurm.find("ir-1") is not None) == bool(jobs)
    slurm_queue.ended()


def limited(monkeypatch, fault):
    """A command that never answers is waited for a second here, not a minute."""
    if fault == "silent":
        real = scheduler_command.run_command
        monkeypatch.setattr(
            "infini_run.jobs.schedulers.slurm.run_command", lambda argv, environ: real(argv, environ, 1.0)
        )


@pytest.mark.parametrize("fault", ["garbage", "away", "lost", "silent"])
def test_a_query_without_an_answer_is_no_news(slurm, slurm_queue, script, monkeypatch, fault):
    slurm.submit(script(), "ir-1")
    slurm_queue.ended()
    limited(monkeypatch, fault)
    slurm_queue.fail("squeue", fault)
    with pytest.raises(QueryError):
        slurm.query(["ir-1"])
    assert slurm.query(["ir-1"])["ir-1"].state == "COMPLETED"


def test_an_empty_answer_knows_of_no_job_and_says_nothing_of_its_end(slurm, slurm_queue, script):
    slurm.submit(script(), "ir-1")
    slurm_queue.ended()
    slurm_queue.fail("squeue", "empty")
    assert slurm.query(["ir-1"]) == {}


def test_a_job_is_cancelled_and_one_that_is_gone_is_nobodys_business(slurm, slurm_queue, script, bell):
    job = slurm.submit(script(f"echo up >{bell.path}; sleep 1000"), "ir-1")
    bell.hear(1)
    slurm.cancel(job)
    slurm_queue.ended()
    assert slurm.query(["ir-1"])["ir-1"].state == "CANCELLED"
    slurm.cancel("999")
    slurm_queue.fail("scancel", "away")
    with pytest.raises(QueryError, match="Unable to contact slurm controller"):
        slurm.cancel(job)


def test_an_error_about_one_of_several_jobs_is_not_hidden_by_what_is_said_of_another(tmp_path):
    head = "scancel: error: Kill job error on job id"
    away, gone = "Unable to contact slurm controller (connect failure)", "Job/step already completing or completed"
    scancel = tmp_path / "scancel"
    scancel.write_text(f"#!/bin/sh\necho '{head} 1_1: {away}' >&2\necho '{head} 1_0: {gone}' >&2\nexit 1\n")
    scancel.chmod(0o755)
    with pytest.raises(QueryError, match="1_1: Unable to contact slurm controller"):
        Slurm({"PATH": f"{tmp_path}:{os.environ['PATH']}"}).cancel("1_0", "1_1")


def test_a_job_runs_again_where_it_may(slurm, slurm_queue, script, bell):
    job = slurm.submit(script(f"echo $SLURM_RESTART_COUNT >{bell.path}; sleep 1000"), "ir-1")
    assert bell.hear(1) == ["0"]
    assert slurm.requeue(job)
    assert bell.hear(1) == ["1"]
    slurm.cancel(job)
    slurm_queue.ended()
    assert not slurm.requeue(job)


def test_a_requeue_whose_answer_is_lost_is_asked_for_again(slurm, slurm_queue, script, bell):
    """Slurm says then that the job is pending, which it says too of one that it has queued by itself."""
    slurm_queue.set(kill_wait_s=60.0)
    go = f"{bell.path}.go"
    os.mkfifo(go)
    text = f'[ $SLURM_RESTART_COUNT = 0 ] || exit 0; trap "" TERM; echo up >{bell.path}; read _ <{go}'
    job = slurm.submit(script(text), "ir-1")
    bell.hear(1)
    slurm_queue.fail("scontrol", "lost")
    assert slurm.requeue(job)
    assert len(slurm_queue.calls("scontrol")) == 2
    slurm_queue.fail("scontrol", "away", "away", "away")
    with pytest.raises(QueryError, match="Unable to contact slurm controller"):
        slurm.requeue(job)
    Path(go).write_text("on\n")
    slurm_queue.ended()
    assert slurm.query(["ir-1"])["ir-1"].state == "COMPLETED"


def test_a_scheduler_that_is_not_there_is_told(tmp_path):
    nowhere = Slurm({"PATH": str(tmp_path)})
    with pytest.raises(QueryError, match="scontrol: No such file or directory"):
        nowhere.facts()
    with pytest.raises(SubmitError, match="sbatch: No such file or directory") as told:
        nowhere.submit("/x", "ir-1")
    assert told.value.kind == "unreachable"


def test_a_job_that_waits_says_why(slurm, slurm_queue, script):
    slurm_queue.set(hold="Resources")
    slurm.submit(script(), "ir-1")
    slurm.submit(script(nodes=9), "ir-2")
    seen = slurm.query(["ir-1", "ir-2"])
    assert (seen["ir-1"].state, seen["ir-1"].reason, seen["ir-1"].hopeless) == ("QUEUED", "Resources", False)
    assert (seen["ir-2"].reason, seen["ir-2"].hopeless) == ("PartitionNodeLimit", True)
    assert "request fewer" in seen["ir-2"].advice


# ---- a real Slurm
class Real(Bed):
    """Four nodes of 64 CPUs and 8 GPUs, none of them real."""

    def __init__(self, extra: str = "") -> None:
        super().__init__("slurm.sh", "4", "8", SLURM_TB_PORT=str(free_ports(5)), SLURM_TB_EXTRA=extra)
        self.env = {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "SLURM_CONF": f"{self.folder}/slurm.conf"}
        self.slurm = Slurm(self.env)

    def impatient(self, folder: Path, **settings: object) -> Slurm:
        """Its commands with a configuration of their own; they wait for the controller for 2 s, where Slurm's default
        is 10."""
        conf = Path(self.folder, "slurm.conf").read_text()
        for name, value in {"MessageTimeout": 2, **settings}.items():
            conf = re.sub(f"^{name}=.*", "", conf, flags=re.MULTILINE) + f"{name}={value}\n"
        (folder / "slurm.conf").write_text(conf)
        return Slurm({**self.env, "SLURM_CONF": f"{folder}/slurm.conf"})

    def ask(self, *words: str) -> str:
        done = subprocess.run(words, env=self.env, capture_output=True, text=True, check=False)
        return done.stdout + done.stderr


@pytest.fixture(scope="module")
def real():
    need("slurm-wlm", "munge")
    bed = Real()
    yield bed
    bed.close()


@pytest.fixture(scope="module")
def facts(real):
    return real.slurm.facts()


def test_a_real_slurm_says_what_it_has(facts):
    assert facts.version[:2].isdigit()
    assert (facts.select, facts.has_tres, facts.has_gres, facts.has_accounting) == ("cons_tres", True, True, False)
    assert facts.pool().kinds == (Kind(nodes=4, cpus=64, mem_mb=8000, gpus=8),)
    assert facts.pool("debug") == facts.pool()


def test_every_option_of_the_real_sbatch_is_in_our_table(real):
    """Each with what follows it; those of its help text and of its manual alike."""
    words = [word.strip(",.") for line in real.ask("sbatch", "--help").splitlines() for word in line.split()[:2]]
    longs = {
        word[2:].partition("[")[0].partition("=")[0] for word in words if word.startswith("--") and len(word) > 2
    }
    assert longs - set(slurm_script.OPTIONS.longs) == set()
    shorts = {word[1] for word in words if len(word) == 2 and word[0] == "-" and word != "--"}
    assert shorts - set(slurm_script.OPTIONS.shorts) == set()


LAYOUTS = [
    (ask(16), 2), (ask(32), 4), (ask(16, slots_per_node=4), 4), (ask(3), 1), (ask(16, tres=False), 2),
    (ask(16, gres=False, slots_per_node=8), 2), (ask(8, cpus_per_slot=2, mem_mb_per_slot=500), 1),
    (ask(128, slot_type="cpu"), 2), (ask(6, slot_type="cpu", slots_per_node=2), 3),
    (ask(16, slots_per_node=8, layout="determined"), 2),
    (ask(16, slots_per_node=8, layout="determined", tres=False), 2),
    (ask(10, slots_per_node=4, layout="determined", tres=False), 3),
    (ask(16, slots_per_node=8, layout="determined", gres=False, tres=False), 2),
    (ask(16, slots_per_node=8, layout="determined", slot_type="cpu"), 2),
    (ask(8, layout="determined", slots_per_node=8, single_node=True), 1),
    (ask(8, options=("--exclude=node1", "-x node2", "--comment=it is", "--nice=5")), 1),
    (ask(8, restarts=1, time_s=90, project="a b", account="nobody"), 1),
]  # fmt: skip


@pytest.mark.parametrize(("request_", "nodes"), LAYOUTS, ids=range(len(LAYOUTS)))
def test_the_real_slurm_takes_every_layout_and_gives_the_nodes(real, facts, tmp_path, request_, nodes):
    path = tmp_path / "job.sh"
    path.write_text(render(request_, plan(request_, facts), facts))
    assert real.slurm.check(str(path)) == ""
    said = real.ask("sbatch", "--test-only", str(path))
    names = said.partition(" on nodes ")[2].split()[0]
    assert len(expand(names, "nodes")) == nodes


def test_the_first_row_without_slots_per_node_is_what_some_versions_refuse(real, facts, tmp_path):
    """22.05.5 to 22.05.8 reject what 22.05.4 and 22.05.9 take (Slurm's bug 15857)."""
    request = ask(16, layout="determined")
    path = tmp_path / "job.sh"
    path.write_text(render(request, plan(request, facts), facts))
    is_refused = facts.version in ("22.05.5", "22.05.6", "22.05.7", "22.05.8")
    assert bool(real.slurm.check(str(path))) == is_refused


def test_gpus_and_cpus_of_the_default_layout_are_really_given(real, facts, tmp_path):
    """Determined's rows give one CPU a node; ours the GPUs' share."""
    given_ = {}
    for style in ("default", "determined"):
        request = ask(8, tmp_path, slots_per_node=4, layout=style, name=f"ir-{style}", python="/bin/true")
        (tmp_path / style).write_text(render(request, plan(request, facts), facts))
        real.slurm.submit(str(tmp_path / style), request.name)
        until(lambda name=request.name: real.slurm.query([name])[name].state == "COMPLETED")
        job = real.slurm.find(request.name)
        detail = dict(w.split("=", 1) for w in real.ask("scontrol", "show", "job", job).split() if "=" in w)
        given_[style] = (detail["NumNodes"], detail["NumCPUs"])
    assert given_ == {"default": ("2", "64"), "determined": ("2", "2")}


IMPOSSIBLE = [
    ("--nodes=9", "Requested node configuration is not available"),
    ("--gres=gpu:9", "Requested node configuration is not available"),
    ("--gres=nothing:1", "Invalid generic resource"),
    ("--partition=nosuch", "nvalid partition"),
    ("--constraint=nosuch", "Invalid feature specification; no node has what --constraint requests"),
    ("--no-such-option", "unrecognized option"),
]


@pytest.mark.parametrize(("option", "wanted"), IMPOSSIBLE)
def test_what_can_never_run_is_refused_by_the_check_in_one_line(real, tmp_path, option, wanted):
    path = tmp_path / "job.sh"
    path.write_text(f"#!/bin/sh\n#SBATCH {option}\ntrue\n")
    said = real.slurm.check(str(path))
    assert wanted in said
    assert "\n" not in said
    assert real.ask("squeue", "-h") == ""


def test_nine_nodes_are_refused_by_us_and_by_slurm_itself(real, facts, tmp_path):
    request = ask(72)
    with pytest.raises(UsageError, match="the request needs 9 nodes with 8 GPUs; pool debug has 4"):
        plan(request, facts)
    blind = Facts(scheduler="slurm", has_gres=True, has_tres=True)
    path = tmp_path / "job.sh"
    path.write_text(render(request, lay_out(ask(72, slots_per_node=8), blind), blind))
    assert real.slurm.check(str(path)).startswith("Requested node configuration is not available; no node of")


def test_nine_nodes_that_were_submitted_all_the_same_are_hopeless(real, tmp_path):
    path = tmp_path / "job.sh"
    path.write_text("#!/bin/sh\n#SBATCH --nodes=9\ntrue\n")
    job = real.slurm.submit(str(path), "ir-nine")
    try:
        until(lambda: real.slurm.query(["ir-nine"])["ir-nine"].reason == "PartitionNodeLimit")
        seen = real.slurm.query(["ir-nine"])["ir-nine"]
        assert (seen.id, seen.state, seen.hopeless) == (job, "QUEUED", True)
    finally:
        real.slurm.cancel(job)
    until(lambda: real.slurm.query(["ir-nine"])["ir-nine"].state == "CANCELLED")
    assert real.slurm.find("ir-nine") == job
    real.slurm.cancel(job)  # it has ended already


def test_a_submission_that_was_refused_leaves_nothing_that_would_be_adopted(real, tmp_path):
    path = tmp_path / "job.sh"
    path.write_text("#!/bin/sh\n#SBATCH --gres=gpu:9\ntrue\n")
    with pytest.raises(SubmitError, match="Requested node configuration is not available") as told:
        real.slurm.submit(str(path), "ir-refused")
    assert told.value.kind == "refused"
    assert real.slurm.find("ir-refused") is None


def test_a_job_runs_in_a_directory_with_an_odd_name_and_says_so_there(real, facts, tmp_path):
    folder = tmp_path / 'it\'s 100% "odd" #1 %j'
    folder.mkdir()
    request = ask(1, folder, name="ir-odd", python="/bin/echo", options=('--comment=it"s \\ #odd',))
    (tmp_path / "job.sh").write_text(render(request, plan(request, facts), facts))
    job = real.slurm.submit(str(tmp_path / "job.sh"), request.name)
    until(lambda: real.slurm.query(["ir-odd"])["ir-odd"].state == "COMPLETED")
    assert (folder / "job.log").read_text() == f"-m infini_run.jobs.allocation_main {folder}\n"
    assert 'it"s \\ #odd' in real.ask("scontrol", "show", "job", job)


def test_a_job_that_may_be_requeued_is_and_another_is_not(real, tmp_path, bell):
    path = tmp_path / "job.sh"
    path.write_text(f"#!/bin/sh\n#SBATCH --output=/dev/null\necho up >{bell.path}; sleep 1000\n")
    for option, wanted in (("--requeue", True), ("--no-requeue", False)):
        name = f"ir{option}"
        text = path.read_text().replace("#SBATCH --output", f"#SBATCH {option}\n#SBATCH --output", 1)
        (tmp_path / name).write_text(text)
        job = real.slurm.submit(str(tmp_path / name), name)
        bell.hear(1)
        assert real.slurm.requeue(job) is wanted
        if wanted:
            until(lambda name=name: real.slurm.query([name])[name].state == "QUEUED")
        real.slurm.cancel(job)
        until(lambda name=name: real.slurm.query([name])[name].state == "CANCELLED")


def test_a_controller_that_is_frozen_may_have_taken_the_job_all_the_same(real, tmp_path):
    """sbatch gives up; the job is there when the controller comes back, once, and is found by its name."""
    path = tmp_path / "job.sh"
    path.write_text("#!/bin/sh\n#SBATCH --output=/dev/null\ntrue\n")
    controller = int(Path(real.folder, "slurmctld.pid").read_text())
    slurm = real.impatient(tmp_path)
    os.kill(controller, signal.SIGSTOP)
    try:
        with pytest.raises(SubmitError, match="timed out") as told:
            slurm.submit(str(path), "ir-frozen")
        assert told.value.kind == "timed_out"
        with pytest.raises(QueryError):
            slurm.query(["ir-frozen"])
    finally:
        os.kill(controller, signal.SIGCONT)
    until(lambda: real.slurm.find("ir-frozen"))
    until(lambda: real.slurm.query(["ir-frozen"])["ir-frozen"].state == "COMPLETED")
    assert real.ask("squeue", "-h", "-t", "all", "-n", "ir-frozen", "-o", "%i").split() == [
        real.slurm.find("ir-frozen")
    ]


def test_a_controller_that_is_gone_has_no_job(real, tmp_path):
    (tmp_path / "job.sh").write_text("#!/bin/sh\ntrue\n")
    gone = real.impatient(tmp_path, SlurmctldPort=free_ports(1))
    with pytest.raises(SubmitError, match="Unable to contact slurm controller") as told:
        gone.submit(str(tmp_path / "job.sh"), "ir-gone")
    assert told.value.kind == "unreachable"
    with pytest.raises(QueryError, match="Unable to contact slurm controller"):
        gone.query(["ir-gone"])
    assert real.slurm.find("ir-gone") is None


WORDS = st.text(st.sampled_from("ab1 '\"\\#$%&*;()[]{}|<>?!~`=,.:@+-"), min_size=1, max_size=12)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(word=WORDS.filter(lambda text: text.strip() == text))
def test_words_of_a_directive_reach_the_real_slurm_as_they_were(real, tmp_path, word):
    path = tmp_path / "job.sh"
    path.write_text(
        f"#!/bin/sh\n#SBATCH --hold --output=/dev/null {slurm_script.quoted(f'--comment={word}')}\ntrue\n"
    )
    job = real.slurm.submit(str(path), "ir-word")
    try:
        assert real.ask("squeue", "-h", "-j", job, "-o", "%k") == f"{word}\n"
    finally:
        real.slurm.cancel(job)


NAMES = st.from_regex(r"[a-z]{1,4}(\[[1-9](,[1-9][0-9]?)?(-[1-9][0-9]{2})?(,0[1-9]-0[2-9])?\])?", fullmatch=True)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.lists(NAMES, min_size=1, max_size=3, unique=True).map(",".join))
def test_a_list_of_hosts_is_the_same_to_slurm_and_to_us(real, text):
    try:
        ours = list(expand(text, "nodes"))
    except UsageError:
        return
    assert ours == real.ask("scontrol", "show", "hostnames", text).split()


def test_an_option_in_the_callers_environment_changes_nothing(real, tmp_path):
    path = tmp_path / "job.sh"
    path.write_text("#!/bin/sh\n#SBATCH --gres=gpu:8 --hold --output=/dev/null\ntrue\n")
    caller = Slurm({**real.env, "SBATCH_GRES": "gpu:1", "SBATCH_TIMELIMIT": "1", "SLURM_JOB_ID": "7"})
    job = caller.submit(str(path), "ir-env")
    detail = real.ask("scontrol", "show", "job", job)
    caller.cancel(job)
    assert "gpu:8" in detail
    assert "TimeLimit=UNLIMITED" in detail
