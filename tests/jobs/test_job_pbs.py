"""PBS: what its words mean, and stand-ins that really run the job and answer wrongly when they are told to."""

from __future__ import annotations

import os
import shlex
import stat

import pytest

from infini_run.errors import UsageError
from infini_run.jobs.errors import QueryError, SubmitError
from infini_run.jobs.request.job_request import JobRequest
from infini_run.jobs.request.script import plan, render
from infini_run.jobs.scheduler import Kind
from infini_run.jobs.schedulers import scheduler_command
from infini_run.jobs.schedulers.pbs import Pbs, is_pbs
from infini_run.jobs.schedulers.pbs_output import hold_of, job_of, read_jobs, size_mb, span_s
from infini_run.record import replace
from tests.support.waiting import until


@pytest.fixture
def pbs(pbs_queue):
    return Pbs(pbs_queue.env)


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "job.sh"

    def write(text="true", select="1:ncpus=1"):
        path.write_text(
            f"#!/bin/sh\n#PBS -l select={select}\n#PBS -l place=scatter\n#PBS -o {tmp_path}/out\n{text}\n"
        )
        return str(path)

    return write


# ---- words
ENDED = [
    ({"job_state": "S", "substate": 45}, "SUSPENDED", -1),
    ({"job_state": "U", "substate": 45}, "SUSPENDED", -1),
    ({"job_state": "F", "Exit_status": 0, "substate": 92}, "COMPLETED", 0),
    ({"job_state": "F", "Exit_status": 3, "substate": 93}, "FAILED", 3),
    ({"job_state": "F", "Exit_status": 0, "substate": 91, "comment": "terminated by me"}, "CANCELLED", -1),
    ({"job_state": "F", "Exit_status": 271, "substate": 91}, "CANCELLED", -1),
    ({"job_state": "F", "Exit_status": 265, "substate": 93}, "FAILED", 137),
    ({"job_state": "F", "Exit_status": -29, "substate": 93}, "TIMEOUT", -1),
    ({"job_state": "F", "Exit_status": -29, "substate": 91}, "TIMEOUT", -1),
    ({"job_state": "F", "Exit_status": -27, "substate": 93}, "OOM", -1),
    ({"job_state": "F", "Exit_status": 0, "substate": 93}, "FAILED", 0),
    ({"job_state": "F", "substate": 92}, "FAILED", -1),
    ({"job_state": "R", "substate": 42}, "RUNNING", -1),
    ({"job_state": "E"}, "RUNNING", -1),
    ({"job_state": "Q"}, "QUEUED", -1),
    ({"job_state": "H", "Hold_Types": "u"}, "QUEUED", -1),
    ({"job_state": "new"}, "RUNNING", -1),
]


@pytest.mark.parametrize(("job", "state", "code"), ENDED)
def test_a_job_of_pbs_is_in_one_of_our_states(job, state, code):
    seen = job_of("1.head", job)
    assert (seen.state, seen.code) == (state, code)


HOLDS = [
    ("Not Running: Insufficient amount of resource: ngpus", "Q", "n", "waiting"),
    ("Not Running: Queue not started.", "Q", "n", "passing"),
    ("Not Running: Not enough free nodes available", "Q", "n", "waiting"),
    ("", "Q", "n", "passing"),
    ("", "W", "n", "waiting"),
    ("Job held by pbs on Sun Nov 22 11:58:16 2026", "H", "u", "waiting"),
    ("Can Never Run: Insufficient amount of resource: ngpus (R: 9 A: 8 T: 8)", "Q", "n", "hopeless"),
    ("job held, too many failed attempts to run", "H", "s", "hopeless"),
    ("Can Never Run: Not enough total nodes available", "Q", "n", "hopeless"),
    ("Can Never Run: Insufficient amount of resource: host (nohost != node1,node2,node3)", "Q", "n", "hopeless"),
    ("", "H", "s", "hopeless"),
    ("Job held by root on Sun Nov 22 11:58:17 2026", "H", "ou", "hopeless"),
    ("", "H", "p", "hopeless"),
]


@pytest.mark.parametrize(("comment", "letter", "holds", "wanted"), HOLDS)
def test_a_comment_is_of_one_of_three_classes(comment, letter, holds, wanted):
    hold, advice = hold_of(comment, letter, holds)
    assert hold == wanted
    assert bool(advice) == (wanted == "hopeless" or letter == "H")


def test_a_host_that_is_not_there_is_named():
    comment = "Can Never Run: Insufficient amount of resource: host (nohost != node1,node2,node3)"
    assert hold_of(comment)[1] == "no node of the queue has host=nohost; run pbsnodes -a to list them"


def test_a_job_that_waits_for_another_is_not_held_by_an_administrator():
    """PBS gives it a hold of the kind s, and no comment."""
    seen = job_of("35.head", {"job_state": "H", "Hold_Types": "s", "depend": "afterok:34.head@head"})
    assert (seen.state, seen.hold, seen.reason) == ("QUEUED", "waiting", "waits for afterok:34.head@head")
    assert job_of("36.head", {"job_state": "H", "Hold_Types": "u"}).reason == "held"


def test_sizes_and_times_of_pbs_are_ours():
    assert [size_mb(text) for text in ("1056270208kb", "8gb", "1048576", "2mw", "", "x")] == [
        1031513,
        8192,
        1,
        16,
        0,
        0,
    ]
    assert [span_s(text) for text in ("01:00:00", "90", "1:30", "", "x")] == [3600, 90, 90, 0, 0]


# ---- what it has
def test_what_it_has_is_found(pbs):
    facts = pbs.facts()
    assert (facts.scheduler, facts.version, facts.has_gres, facts.has_history) == ("pbs", "23.06.06", True, True)
    assert [(pool.name, pool.is_default, pool.limit_s, pool.nodes) for pool in facts.pools] == [
        ("workq", True, 0, 4), ("short", False, 3600, 4),
    ]  # fmt: skip
    assert facts.pool().kinds == (Kind(nodes=4, cpus=64, mem_mb=8000, gpus=8),)


def test_vnodes_of_a_host_are_one_node_and_bound_hosts_are_of_their_queue(pbs, pbs_queue):
    half = {"ncpus": 32, "ngpus": 4, "accelerator_model": "a100", "mem": "4096000kb"}
    pbs_queue.set(nodes={"n1[0]": {**half, "host": "n1"}, "n1[1]": {**half, "host": "n1"}, "n2": {"ncpus": 16}})
    (pool, _) = pbs.facts().pools
    assert pool.kinds == (
        Kind(nodes=1, cpus=64, mem_mb=8000, gpus=8, gpu_types=(("a100", 8),)), Kind(nodes=1, cpus=16, mem_mb=8000),
    )  # fmt: skip
    assert (pool.gpus_per_node, pool.gpu_types) == (8, ("a100",))


def test_the_limit_of_a_job_that_asks_for_none(pbs, pbs_queue):
    pbs_queue.set(pools={"workq": {}, "brief": {"resources_default": {"walltime": "00:10:00"}},
                         "most": {"resources_max": {"walltime": "01:00:00"}}})  # fmt: skip
    assert {pool.name: pool.default_s for pool in pbs.facts().pools} == {"workq": 0, "brief": 600, "most": 3600}


@pytest.mark.parametrize("fault", ["garbage", "empty", "away"])
def test_what_is_no_answer_is_not_taken_for_one(pbs, pbs_queue, fault):
    pbs_queue.fail("qmgr", fault)
    with pytest.raises(QueryError, match="qmgr"):
        pbs.facts()


# ---- a job's life
def test_a_job_is_submitted_found_and_followed_to_its_end(pbs, pbs_queue, script, bell):
    job = pbs.submit(script(f"read _ <{bell.path}", "2:ncpus=1"), "ir-1")
    assert job == "101.pbshead"
    until(lambda: pbs.query(["ir-1"])["ir-1"].state == "RUNNING")
    assert pbs.query(["ir-1"], {"ir-1": job})["ir-1"].nodes == "pbsn1,pbsn2"
    assert pbs.find("ir-1") == job
    bell.ring("go")
    pbs_queue.ended()
    seen = pbs.query(["ir-1", "ir-2"])
    assert {name: (one.state, one.code) for name, one in seen.items()} == {"ir-1": ("COMPLETED", 0)}
    assert pbs.find("ir-1") == job


def test_a_cancelled_job_is_no_success_though_its_exit_status_is_0(pbs, pbs_queue, script, bell):
    job = pbs.submit(script(f"echo up >{bell.path}; sleep 1000"), "ir-1")
    bell.hear(1)
    pbs.cancel(job, again=True)
    pbs_queue.ended()
    assert pbs.query(["ir-1"])["ir-1"].state == "CANCELLED"
    assert pbs.find("ir-1") == job
    pbs.cancel(job)  # it has ended
    pbs.cancel("999.pbshead")  # it never was


def test_a_job_that_failed_before_anybody_looked_was_taken(pbs, pbs_queue, script):
    job = pbs.submit(script("exit 3"), "ir-1")
    pbs_queue.ended()
    seen = pbs.query(["ir-1"])["ir-1"]
    assert (seen.state, seen.code) == ("FAILED", 3)
    assert pbs.find("ir-1") == job


def test_a_job_that_runs_is_told_by_a_signal_that_ends_nothing_by_itself(pbs, pbs_queue, script, bell):
    """TERM would end the user's shell above the script, and PBS kills the rest at once."""
    deaf = f"trap 'echo told >{bell.path}; exit 0' URG; echo up >{bell.path}; while :; do sleep 1000 & wait; done"
    job = pbs.submit(script(deaf), "ir-1")
    bell.hear(1)
    pbs.cancel(job)
    assert bell.hear(1) == ["told"]
    pbs_queue.ended()
    assert pbs_queue.jobs()[0]["state"] == "COMPLETED"
    assert pbs_queue.calls("qdel") == []


def test_a_job_of_which_the_server_has_not_heard_yet_that_it_runs_is_not_deleted(pbs, pbs_queue, script, bell):
    """Its substate is 41 then, qsig says that the state is invalid, and qdel would leave no grace."""
    deaf = f"trap 'echo told >{bell.path}; exit 0' URG; echo up >{bell.path}; while :; do sleep 1000 & wait; done"
    job = pbs.submit(script(deaf), "ir-1")
    bell.hear(1)
    pbs_queue.fail("qsig", "early", "early")
    pbs.cancel(job)
    assert bell.hear(1) == ["told"]
    pbs_queue.ended()
    assert pbs_queue.calls("qdel") == []


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("state", ["COMPLETED", "COMPLETING"])
def test_cancel_leaves_a_task_alone_that_has_ended_or_ends(pbs, pbs_queue, tmp_path, state, again):
    """OpenPBS refuses qsig and qdel of it, and lists it as X or E."""
    pbs_queue.set(hold="Not Running: Not enough free nodes available")
    (tmp_path / "job.sh").write_text(f"#!/bin/sh\n#PBS -J 0-1\n#PBS -o {tmp_path}/out\ntrue\n")
    pbs.submit(str(tmp_path / "job.sh"), "ir-1")
    pbs_queue.change("101[0]", state=state)
    pbs.cancel("101[0].pbshead", "101[1].pbshead", again=again)
    assert [job["state"] for job in pbs_queue.jobs()[1:]] == [state, "CANCELLED"]


@pytest.mark.parametrize("command", ["qsig", "qdel"])
def test_an_error_about_one_of_several_jobs_is_not_hidden_by_what_is_said_of_another(pbs_queue, tmp_path, command):
    said = f"{command}: Server could not connect to MOM 102.pbshead\n{command}: Unknown Job Id 101.pbshead"
    command_that_says(tmp_path, command, said, 153)
    pbs = Pbs({**pbs_queue.env, "PATH": f"{tmp_path}:{pbs_queue.env['PATH']}"})
    with pytest.raises(QueryError, match="Server could not connect to MOM 102"):
        pbs.cancel("101.pbshead", "102.pbshead", again=command == "qdel")


def test_live_jobs_of_known_ids_are_one_query(pbs, pbs_queue, script):
    """Not in JSON, of which OpenPBS prints the first alone when it is asked for several."""
    pbs_queue.set(hold="Not Running: Not enough free nodes available")
    jobs = {f"ir-{n}": pbs.submit(script(), f"ir-{n}") for n in range(4)}
    seen = pbs.query(list(jobs), jobs)
    assert {name: (one.id, one.state) for name, one in seen.items()} == {n: (i, "QUEUED") for n, i in jobs.items()}
    assert len(pbs_queue.calls("qstat")) == 1
    assert pbs_queue.calls("qselect") == []
    for job in jobs.values():
        pbs.cancel(job)


def test_a_job_of_which_an_answer_says_nothing_is_asked_for_by_itself(pbs, pbs_queue, script):
    pbs_queue.set(hold="Not Running: Not enough free nodes available")
    jobs = {f"ir-{n}": pbs.submit(script(), f"ir-{n}") for n in range(3)}
    pbs_queue.fail("qstat", "first", "first")
    assert set(pbs.query(list(jobs), jobs)) == set(jobs)
    assert len(pbs_queue.calls("qstat")) == 3
    pbs_queue.fail("qstat", "first", "first", "empty")
    with pytest.raises(QueryError, match="shows nothing of job 103"):
        pbs.query(list(jobs), jobs)
    for job in jobs.values():
        pbs.cancel(job)


@pytest.mark.parametrize("history", [False, True])
def test_a_job_that_was_queued_again_is_found_though_its_id_is_another_by_now(pbs, pbs_queue, script, history):
    pbs_queue.set(history=history)
    old = pbs.submit(script("exit 85"), "ir-1")
    pbs_queue.ended()
    pbs_queue.set(hold="Not Running: Not enough free nodes available")
    new = pbs.submit(script(), "ir-1")
    seen = pbs.query(["ir-1"], {"ir-1": old})["ir-1"]
    assert (seen.id, seen.state) == (new, "QUEUED")
    pbs.cancel(new)


def test_attributes_are_told_apart_whatever_is_in_them():
    line = "Job Id: 1.head\x1fJob_Name=ir-1\x1fjob_state=R\x1fsubstate=42\x1fcomment=a|b=c\\nd^_job_state=F"
    assert read_jobs(line + "\n") == {
        "1.head": {"Job_Name": "ir-1", "job_state": "R", "substate": 42, "comment": "a|b=c\\nd^_job_state=F"}
    }
    assert read_jobs("") == {}
    assert read_jobs("<html>\n") is None


def test_jobs_without_ids_are_listed_by_their_name_or_as_all_of_ours(pbs, pbs_queue, script):
    jobs = {f"ir-{n}": pbs.submit(script(), f"ir-{n}") for n in range(3)}
    pbs_queue.ended()
    assert pbs.find("ir-1") == jobs["ir-1"]
    assert set(pbs.query(list(jobs), {"ir-0": jobs["ir-0"]})) == set(jobs)
    first, second = pbs_queue.calls("qselect")
    assert first.split() == ["qselect", "-x", "-N", "ir-1"]
    assert second.split()[:3] == ["qselect", "-x", "-u"]
    pbs_queue.fail("qselect", "garbage")
    with pytest.raises(QueryError, match="qselect: cannot understand its answer"):
        pbs.find("ir-1")


def test_known_and_unknown_ids_together_are_exit_code_153_and_an_answer_all_the_same(pbs, pbs_queue, script):
    job = pbs.submit(script(), "ir-1")
    pbs_queue.ended()
    seen = pbs.query(["ir-1", "ir-2"], {"ir-1": job, "ir-2": "999.pbshead"})
    assert {name: one.state for name, one in seen.items()} == {"ir-1": "COMPLETED"}
    assert pbs.query(["ir-2"], {"ir-2": "999.pbshead"}) == {}


def test_without_history_a_job_that_runs_is_known_and_one_that_ended_is_not(pbs, pbs_queue, script, bell):
    """`-x` knows none then, and exits with 0."""
    pbs_queue.set(history=False)
    assert not pbs.facts().has_history
    job = pbs.submit(script(f"read _ <{bell.path}"), "ir-1")
    assert pbs.find("ir-1") == job
    assert pbs.query(["ir-1"], {"ir-1": job})["ir-1"].id == job
    bell.ring("go")
    pbs_queue.ended()
    assert pbs.query(["ir-1"], {"ir-1": job}) == pbs.query(["ir-1"]) == {}
    assert pbs.find("ir-1") is None


LOST = [("lost", "timed_out", 1), ("killed", "timed_out", 1), ("silent", "timed_out", 1), ("empty", "timed_out", 0),
        ("garbage", "timed_out", 0), ("refuse", "refused", 0), ("away", "unreachable", 0)]  # fmt: skip


@pytest.mark.parametrize(("fault", "kind", "jobs"), LOST)
def test_a_submission_without_an_answer_is_told_from_one_that_was_refused(pbs, pbs_queue, script, monkeypatch, fault,
                                                                           kind, jobs):  # fmt: skip
    limited(monkeypatch, fault)
    pbs_queue.fail("qsub", fault)
    with pytest.raises(SubmitError) as told:
        pbs.submit(script(), "ir-1")
    assert told.value.kind == kind
    assert len(pbs_queue.jobs()) == jobs
    assert (pbs.find("ir-1") is not None) == bool(jobs)
    pbs_queue.ended()


def limited(monkeypatch, fault):
    """A command that never answers is waited for a second here, not a minute."""
    if fault == "silent":
        real = scheduler_command.run_command
        monkeypatch.setattr(
            "infini_run.jobs.schedulers.pbs.run_command", lambda argv, environ: real(argv, environ, 1.0)
        )


@pytest.mark.parametrize("fault", ["garbage", "empty", "away", "silent"])
def test_a_query_without_an_answer_is_no_news(pbs, pbs_queue, script, monkeypatch, fault):
    job = pbs.submit(script(), "ir-1")
    pbs_queue.ended()
    limited(monkeypatch, fault)
    pbs_queue.fail("qstat", fault)
    with pytest.raises(QueryError):
        pbs.query(["ir-1"], {"ir-1": job})
    assert pbs.query(["ir-1"], {"ir-1": job})["ir-1"].state == "COMPLETED"


def test_good_json_counts_whatever_the_exit_code(pbs, pbs_queue, script):
    job = pbs.submit(script(), "ir-1")
    pbs_queue.ended()
    pbs_queue.fail("qstat", "lost")  # it has told all, and then complains
    assert pbs.query(["ir-1"], {"ir-1": job})["ir-1"].state == "COMPLETED"


def test_a_slow_answer_is_an_answer(pbs, pbs_queue, script):
    job = pbs.submit(script(), "ir-1")
    pbs_queue.ended()
    os.mkfifo(f"{pbs_queue.folder}/gate")
    pbs_queue.fail("qstat", "slow")
    pid = os.fork()
    if pid == 0:
        with open(f"{pbs_queue.folder}/gate", "w"):
            os._exit(0)
    try:
        assert pbs.query(["ir-1"], {"ir-1": job})["ir-1"].state == "COMPLETED"
    finally:
        os.waitpid(pid, 0)


REFUSED = [
    ("#PBS -q nosuch", "Unknown queue; run infini-job clusters to list the pools"),
    ("#PBS -l foo=1", "Unknown resource Resource_List.foo; the cluster has no such resource"),
    ("#PBS -b", "invalid option -- 'b'; run `man qsub` to list its options"),
    ("#PBS -N :()", "illegal -N value"),
]


@pytest.mark.parametrize(("line", "wanted"), REFUSED)
def test_what_pbs_refuses_is_told_in_its_words_with_what_to_do(pbs, pbs_queue, tmp_path, line, wanted):
    path = tmp_path / "job.sh"
    path.write_text(f"#!/bin/sh\n{line}\ntrue\n")
    name = ":()" if "-N" in line else "ir-1"
    with pytest.raises(SubmitError) as told:
        pbs.submit(str(path), name)
    assert (told.value.kind, told.value.text) == ("refused", wanted)
    assert pbs_queue.jobs() == []


def test_what_qsub_itself_says_is_told_before_a_librarys_words(tmp_path, script):
    command_that_says(tmp_path, "qsub", "qsub: could not create/open tmp file /x/pbsscrpthmz8Sl for script", 1)
    path = tmp_path / "qsub"
    path.write_text(path.read_text().replace("printf", "echo 'mkstemp: Permission denied' >&2\nprintf", 1))
    with pytest.raises(SubmitError, match=r"^could not create/open tmp file /x/pbsscrpthmz8Sl for script$"):
        Pbs({"PATH": f"{tmp_path}:{os.environ['PATH']}"}).submit(script(), "ir-1")


def test_a_job_that_is_too_large_is_taken_and_told_to_be_hopeless(pbs, script):
    assert pbs.check(script(select="9:ngpus=8")) == ""
    job = pbs.submit(script(select="9:ngpus=8"), "ir-9")
    seen = pbs.query(["ir-9"], {"ir-9": job})["ir-9"]
    assert (seen.state, seen.hold) == ("QUEUED", "hopeless")
    assert seen.reason == "Can Never Run: Not enough total nodes available"
    pbs.cancel(job)
    assert pbs.query(["ir-9"])["ir-9"].state == "CANCELLED"


def test_pbs_runs_nothing_again_by_itself(pbs):
    assert not pbs.requeue("101.pbshead")


def test_two_chunks_that_fit_on_one_host_are_on_two(pbs, pbs_queue, tmp_path):
    """Without place=scatter both would be on the first: one launcher for two nodes' ranks."""
    request = JobRequest(name="ir-1", folder=str(tmp_path), command=("x",), cwd="/", python="/bin/true", slots=8,
                      slots_per_node=4)  # fmt: skip
    facts = pbs.facts()
    (tmp_path / "job.sh").write_text(render(request, plan(request, facts), facts))
    pbs.submit(str(tmp_path / "job.sh"), request.name)
    pbs_queue.ended()
    assert pbs_queue.jobs()[0]["nodes"] == ["pbsn1", "pbsn2"]
    assert pbs_queue.jobs()[0]["state"] == "COMPLETED"
    assert (tmp_path / "job.log").exists()


@pytest.mark.parametrize("item", ["host=pbsn1", "vnode=pbsn1"])
def test_one_host_for_several_nodes_is_refused(pbs, item):
    """PBS says "Not Running: Insufficient amount of resource: vnode" for ever."""
    request = JobRequest(name="ir-1", folder="/f", command=("x",), cwd="/", python="/bin/true", slots=8,
                      slots_per_node=4, options=("-l", f"select=1:{item}"))  # fmt: skip
    with pytest.raises(UsageError, match=f"{item}: names one node, and the job needs 2; drop it$"):
        plan(request, pbs.facts())
    assert plan(replace(request, slots=4), pbs.facts()).nodes == 1


# ---- who is who
def command_that_says(folder, name, text, code=0):
    path = folder / name
    path.write_text(f"#!/bin/sh\nprintf '%s\\n' {shlex.quote(text)} >&2\nexit {code}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


SAID = [
    ("pbs_version = 23.06.06", 0, True),
    ("error: commlib error: unable to read qmaster name", 1, False),
    ("GE 8.1.9\nusage: qstat [options]", 1, False),
    ("Version: 6.1.2\nCommit: 661e", 0, False),
]


@pytest.mark.parametrize(("text", "code", "wanted"), SAID)
def test_the_qstat_of_pbs_is_told_from_those_of_others(tmp_path, text, code, wanted):
    command_that_says(tmp_path, "qstat", text, code)
    assert is_pbs({"PATH": f"{tmp_path}:{os.environ['PATH']}"}) is wanted


def test_a_qstat_that_is_not_there_is_no_pbs(tmp_path):
    assert not is_pbs({"PATH": str(tmp_path)})
