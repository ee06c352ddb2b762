"""infini-job on a real Slurm of four nodes (tests/support/beds/slurm.sh): every way for a job to end."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

import infini_run as ir
from tests.multinode.test_many_slurm import Slurm
from tests.support.cluster import give_up, missing, need
from tests.support.command import play
from tests.support.job_case import FILES, Jobs, check_files
from tests.support.processes import processes, state_of
from tests.support.restarting_programs import ENDS, IDS, JOB_FLAGS, check_job, programs
from tests.support.waiting import LIMIT_S, until

pytestmark = pytest.mark.xdist_group(__name__)  # one bed for all of them

PREEMPTING = """PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=requeued Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE
PartitionName=cancelled Nodes=ALL PriorityTier=1 PreemptMode=CANCEL
PartitionName=graced Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF"""
TWO = ("--slots=8", "--slots_per_node=4")


@pytest.fixture(scope="module")
def eights():
    """Nodes of 8 GPUs, with accounting where its packages are. A job that is to be run again waits for 5 s, where
    Slurm's own is 2 minutes; what gets TERM has Slurm's own 30 s to end, which a busy machine needs. `high` takes the
    nodes of `requeued`, `cancelled` and `graced`."""
    need("slurm-wlm", "munge")
    problem = missing("slurmdbd", "mariadb-server")
    accounting = "" if problem else "1"
    settings = {"SLURM_TB_CRED": "5", "SLURM_TB_KILLWAIT": "30", "SLURM_TB_ACCOUNTING": accounting}
    bed = Slurm(gpus=8, **settings, SLURM_TB_EXTRA=PREEMPTING)
    bed.no_accounting = problem
    yield bed
    bed.close()


@pytest.fixture
def queue(tmp_path, eights, case):
    """Jobs of that Slurm. Nothing of them is left at the end, there and here."""
    jobs = Jobs(tmp_path / "jobs", case, {**eights.env, "INFINI_JOB_SCHEDULER": "slurm"})
    yield jobs
    jobs.close()
    for name in os.listdir(jobs.path) if jobs.path.exists() else ():
        subprocess.run(["scancel", "--name", name], env=jobs.env, check=False, capture_output=True)
    eights.settle()
    case.end()


def hold(bell):
    return ("sh", "-c", f'echo up $RANK; echo "$RANK $$" > {bell.path}; exec sleep 1000')


def ids(queue, name):
    """Slurm's ids of all jobs of that name that it knows."""
    words = ["squeue", "-h", "-t", "all", "-o", "%i", "-n", name]
    return subprocess.run(words, env=queue.env, capture_output=True, text=True, check=True).stdout.split()


def launcher_of(folder):
    """The process that the script of a job becomes."""
    words = ["pgrep", "-f", f"/infini_run/jobs/start.py {folder}$"]
    return int(subprocess.run(words, capture_output=True, check=True).stdout)


def step_on(slurmd):
    """All processes of steps on an emulated node, which are in its UTS namespace: slurmstepd first."""
    host = os.readlink(f"/proc/{slurmd}/ns/uts")
    found = []
    for pid, (_, _, name) in processes().items():
        try:
            if pid != slurmd and os.readlink(f"/proc/{pid}/ns/uts") == host:
                found.append((name != "slurmstepd", pid))
        except OSError:
            continue
    return [pid for _, pid in sorted(found)]


@pytest.mark.parametrize("name", ["a\\b", "a\\b%j", "a%j", "a%%\\"])
def test_directory_of_any_name_gets_output_of_script(queue, name):
    above = queue.path / name
    done = queue.call("submit", f"--dir={above}", "--slots=1", "--wait", "--", "sh", "-c", "echo hi; exit 3")
    assert (done.returncode, done.stderr.splitlines()[-1].split("  ")[-1]) == (3, "FAILED exit 3 on node1, rank 0")
    (folder,) = above.iterdir()
    assert (folder / "job.log").exists()
    shutil.rmtree(above)


def test_programs_of_a_job_are_on_their_nodes(queue):
    say = "echo $ROLE_NAME $RANK/$WORLD_SIZE $CUDA_VISIBLE_DEVICES"
    trainer = ("--program=trainer", "--on_nodes=0", "--nproc_per_node=4", "sh", "-c", say)
    server = ("--program=server", "--on_nodes=rest", "--after=trainer", "sh", "-c", say)
    done = queue.call("submit", *TWO, "--wait", *trainer, ":", *server)
    assert done.returncode == 0, done.stderr
    lines = queue.lines(done.stdout.split()[1])
    assert sorted(line.split()[:4] for line in lines) == [
        ["[node1:trainer", f"{rank}]", "trainer", f"{rank}/4"] for rank in range(4)
    ] + [["[node2:server", "0]", "server", "0/1"]]
    assert lines[-1].startswith("[node2:server 0]")


@pytest.mark.parametrize("array", [(), ("--array=0-1",)], ids=["job", "array"])
def test_script_that_user_runs_leaves_waiting_job_alone(queue, array):
    """Without an allocation, and in another job's."""
    name = queue.submit("--slots=1", "--options=--hold", *array, "--", "true")
    said = f"infini-run: slurm: not in the allocation of {name}{{}}; only its scheduler can run the script of a job"
    for words in (), ("srun", "-n1", "-Q"):
        done = subprocess.run(
            [*words, "sh", queue.path / name / "job.sh"], env=queue.env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 2
        assert said.format("") in done.stderr.splitlines()  # srun has its own line before or after it
    other = {**queue.env, "SLURM_JOB_ID": "99999", "SLURM_JOB_NAME": "bash"}
    if array:
        other |= {"SLURM_ARRAY_JOB_ID": "99999", "SLURM_ARRAY_TASK_ID": "1"}
    done = subprocess.run(
        ["sh", queue.path / name / "job.sh"], env=other, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr.splitlines()) == (2, [said.format(".1" if array else "")])
    assert queue.status(name)["state"] == "QUEUED"
    assert queue.call("cancel", name).returncode == 0
    assert queue.wait(name)["state"] == "CANCELLED"


def test_job_whose_node_is_down_starts_when_node_is_back(queue, eights):
    try:
        eights.ask("scontrol", "update", "nodename=node4", "state=drain", "reason=test")
        name = queue.submit("--slots=1", "--options=-w node4", "--", "true")
        until(lambda: queue.status(name)["hold"] == "hopeless")
        advice = "hopeless: nodes that it needs are down; request others, or wait until they are back"
        assert advice in queue.call("status", name).stdout
    finally:
        eights.ask("scontrol", "update", "nodename=node4", "state=resume")
    assert queue.wait(name)["state"] == "COMPLETED"


@pytest.mark.parametrize("shells", [{}, {"TMPDIR": "/dev/shm"}], ids=["slurmd", "shell"])
def test_tmpdir_of_env_replaces_that_of_slurm(queue, tmp_path, shells):
    """slurmd sets one for each script: that of sbatch, else /tmp."""
    own, gone = tmp_path / "own", tmp_path / "gone"
    own.mkdir()
    del queue.env["TMPDIR"]  # the tests' own
    words = ("--slots=2", "--slots_per_node=1", "--", "sh", "-c", "echo $TMPDIR")
    name, missing = (queue.submit(f"--env=TMPDIR={path}", *words, env=shells) for path in (own, gone))
    assert queue.wait(name)["state"] == queue.wait(missing)["state"] == "COMPLETED"
    assert sorted(queue.lines(name)) == [f"[node1:0] {own}", f"[node2:1] {own}"]
    assert f"infini-run: TMPDIR={gone}: cannot be written on node1; dropped it" in queue.logs(missing).splitlines()
    assert {line.split()[-1] for line in queue.lines(missing)} == {shells.get("TMPDIR", "/tmp")}


@pytest.mark.parametrize(("fails", "check"), ENDS, ids=IDS)
def test_program_of_a_job_restarts_alone_on_its_nodes(queue, tmp_path, fails, check):
    words = ["--slots=4", "--slots_per_node=1", f"--run_options={' '.join(JOB_FLAGS)}", *programs(tmp_path, fails)]
    check_job(queue, queue.call("submit", "--wait", *words), check)


def test_titled_array_is_shown_and_found_by_name(queue, bell):
    """Its tasks have ended, and one of them ran again, under the name that Slurm knows."""
    words = ["--title=llama 7b, lr=3e-4", "--slots=1", "--array=0-1", "--restarts=1"]
    script = f"[ $INFINI_JOB_TASK = 0 ] || echo up > {bell.path}; [ $INFINI_JOB_TASK = 0 ] || exec sleep 1000; exit 3"
    name = queue.submit(*words, "--", "sh", "-c", script)
    bell.hear(1)
    asked = ["squeue", "-h", "-o", "%j", "-t", "all", "-n", f"llama_7b__lr_3e-4.{name}"]
    assert subprocess.run(asked, env=queue.env, capture_output=True, text=True, check=True).stdout.split()
    until(lambda: queue.status(name)["tasks"][0]["attempt"] == 1)  # who runs it again needs the id
    (queue.path / name / "id").unlink()
    status = queue.status(name)
    assert status["query_error"] == ""
    assert status["tasks"][1]["state"] == "RUNNING"
    assert queue.call("cancel", f"{name}.1").returncode == 0
    status = queue.wait(name)
    assert [(task["state"], task["attempt"]) for task in status["tasks"]] == [("FAILED", 1), ("CANCELLED", 0)]


def test_files_that_flags_name_are_written_by_first_node(queue, tmp_path):
    """The paths are relative to the directory of the submission."""
    options = " ".join(f"--{flag}={name}" for flag, name in FILES.items())
    name = queue.submit(
        *TWO, f"--run_options={options}", "--", "sh", "-c", "exit $((RANK == 1 ? 3 : 0))", cwd=tmp_path
    )
    assert queue.wait(name)["headline"] == "FAILED exit 3 on node1, rank 1"
    check_files(tmp_path, "node1", 8)


def test_job_runs_after_another_one(queue, bell):
    first = queue.submit("--slots=1", "--", "sh", "-c", f"echo up > {bell.path}; sleep 1000 & wait")
    bell.hear(1)
    dependent = f"--options=--dependency=afterany:{queue.status(first)['id']}"
    second = queue.submit("--slots=1", dependent, "--", "true")
    assert queue.status(second)["headline"] == "QUEUED Dependency"
    assert queue.call("cancel", first).returncode == 0
    assert queue.wait(second)["headline"] == "COMPLETED"


def test_two_nodes_of_four_ranks(queue):
    show = 'echo "is $RANK $LOCAL_RANK $GROUP_RANK $WORLD_SIZE $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES $(nproc)"'
    done = queue.call("submit", *TWO, "--wait", "--", "sh", "-c", show)
    assert done.returncode == 0, done.stderr
    first, last = done.stdout.splitlines()
    assert last == "COMPLETED"
    form = r"job (ir-[0-9a-f]{10})  slurm \d+  2 nodes x 4 gpus  partition debug   logs: infini-job logs -f \1"
    name = re.fullmatch(form, first)[1]
    said = sorted(line.split("is ")[1].split()[:6] for line in queue.lines(name))
    assert said == [[str(r), str(r % 4), str(r // 4), "8", f"node{r // 4 + 1}", "0,1,2,3"] for r in range(8)]
    assert {line.split(":")[0] for line in queue.lines(name)} == {"[node1", "[node2"}
    assert len(queue.lines(name, "--node=1")) == len(queue.lines(name, "--node=node2")) == 4
    assert [line.split("is ")[1][0] for line in queue.lines(name, "--rank=5")] == ["5"]
    assert ids(queue, name) == [queue.status(name)["id"]]


def test_the_first_failure_of_all_nodes_is_told_and_is_our_exit_code(queue):
    """Where srun itself says 143."""
    done = queue.call("submit", *TWO, "--wait", "--", *play("@5", "exit=7", "@*", "wait"))
    assert done.returncode == 7, done.stderr
    assert done.stdout.splitlines()[1].startswith(
        "FAILED exit 7 on node2, rank 5: rank 5 on node2 failed: exit code 7"
    )
    name = done.stdout.split()[1]
    assert queue.status(name)["headline"] == "FAILED exit 7 on node2, rank 5"
    assert (queue.path / name / "exit").exists()


def test_cancel_of_a_job_that_runs(queue, bell):
    script = f'trap "echo saved $RANK; exit 0" TERM; (echo up > {bell.path}; exec sleep 1000) & wait'
    name = queue.submit(*TWO, "--", "sh", "-c", script)
    bell.hear(8)
    assert queue.wait(name, "RUNNING")["nodes"] == ["node1", "node2"]
    assert queue.call("cancel", name).returncode == 0
    assert queue.wait(name)["headline"] == "CANCELLED"


def test_a_job_that_slurm_has_suspended_says_so(queue, bell):
    name = queue.submit(*TWO, "--", *hold(bell))
    pids = [int(line.split()[1]) for line in bell.hear(8)]
    pids.append(launcher_of(queue.path / name))
    number = queue.wait(name, "RUNNING")["id"]
    for word, wanted, states in (("suspend", "SUSPENDED", "T"), ("resume", "RUNNING", "SR")):
        subprocess.run(["scontrol", word, number], env=queue.env, check=True)
        assert queue.status(name)["headline"] == wanted
        # on its nodes, too: Slurm kills at once what is still suspended there
        until(lambda: all(state_of(pid) in states for pid in pids))  # noqa: B023
    assert queue.call("cancel", name).returncode == 0
    status = queue.wait(name)
    assert (status["headline"], status["reason"]) == ("CANCELLED", "it was canceled")


def test_scancel_is_a_cancel_too(queue, bell):
    name = queue.submit(*TWO, "--", *hold(bell))
    bell.hear(8)
    subprocess.run(["scancel", queue.status(name)["id"]], env=queue.env, check=True)
    status = queue.wait(name)
    assert status["headline"] == "CANCELLED"
    # where its ranks, which Slurm signals too, end before the launcher is told, it is Slurm that says why
    assert status["reason"] in ("it was asked to stop (SIGTERM)", "it was canceled")


def forget(queue, name):
    """From now on squeue does not know it any more, as after MinJobAge."""
    folder = queue.path.parent / "forgetful"
    folder.mkdir()
    (folder / "squeue").write_text(f'#!/bin/sh\n/usr/bin/squeue "$@" >{folder}/said || exit\n'
                                   f"grep -v '^{name}|' {folder}/said; true\n")  # fmt: skip
    (folder / "squeue").chmod(0o755)
    queue.env["PATH"] = f"{folder}:{queue.env['PATH']}"


def test_a_database_that_is_down_hides_no_job_that_slurm_knows(queue, bell, eights):
    if eights.no_accounting:
        give_up(eights.no_accounting)
    held = queue.submit(*TWO, "--options=--hold", "--", "true")
    subprocess.run(["scancel", queue.status(held)["id"]], env=queue.env, check=True)
    name = queue.submit(*TWO, "--", *hold(bell))
    bell.hear(8)
    forget(queue, held)
    eights.call("dbd-down")
    try:
        assert queue.wait(name, "RUNNING")["query_error"] == ""
        status = queue.status(held)
        assert (status["state"], status["is_final"]) == ("QUEUED", False)
        assert "Problem talking to the database: Connection refused" in status["query_error"]
    finally:
        eights.call("dbd-up")
    until(lambda: queue.status(held)["is_final"])  # by its number: it was never eligible
    assert queue.status(held)["state"] == "CANCELLED"


def test_a_step_beside_ours_takes_nothing_from_the_job(queue, bell):
    name = queue.submit(*TWO, "--", *hold(bell))
    ranks = [int(line.split()[1]) for line in bell.hear(8)]
    number = queue.wait(name, "RUNNING")["id"]
    words = ["srun", "--overlap", f"--jobid={number}", "--nodes=2", "--ntasks=2", "hostname"]
    done = subprocess.run(words, env=queue.env, capture_output=True, text=True, check=True)
    assert sorted(done.stdout.split()) == ["node1", "node2"]
    assert queue.status(name)["headline"] == "RUNNING"
    # ours: Slurm kills its agents, and srun says no more than of one that was killed on its node. Slurm kills one
    # process after another: an agent that runs may report a rank that was killed before it, which has then failed
    agents = {processes()[pid][0] for pid in ranks}
    assert len(agents) == 2
    for pid in agents:
        os.kill(pid, signal.SIGSTOP)
    subprocess.run(["scancel", f"{number}.0"], env=queue.env, check=True)
    status = queue.wait(name)
    assert status["state"] == "NODE_FAIL"
    assert "srun exited with 137: srun: error: node" in status["reason"]


def preempt(queue):
    """A job that takes all nodes of others; its number. It ends when it is cancelled."""
    words = ["sbatch", "--parsable", "--partition=high", "--nodes=4", "--exclusive", "--output=/dev/null"]
    script = f"touch {queue.path.parent}/$SLURM_JOB_ID; exec sleep 1000"
    done = subprocess.run([*words, f"--wrap={script}"], env=queue.env, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def let_go(queue, other):
    """Cancel that job once it runs: of one that is cancelled while it starts, Slurm may leave the processes."""
    until((queue.path.parent / other).exists)
    subprocess.run(["scancel", other], env=queue.env, check=True)


@pytest.mark.parametrize("pool", ["requeued", "cancelled", "graced"])
def test_a_job_that_is_preempted_says_so(queue, bell, pool):
    """In its grace time Slurm has not ended it, and would say that it has FAILED."""
    name = queue.submit(*TWO, f"--pool={pool}", "--", *hold(bell))
    bell.hear(8)
    other = preempt(queue)
    try:
        status = queue.wait(name)
    finally:
        let_go(queue, other)
    assert (status["headline"], status["reason"]) == ("PREEMPTED exit 143", "it was preempted")
    if pool != "graced":  # what Slurm has written where no rank is to blame
        assert "DUE TO PREEMPTION ***" in queue.logs(name, "--scheduler_log")
        assert "  slurm: slurmstepd" in queue.call("status", name).stdout


@pytest.mark.parametrize("pool", ["requeued", "cancelled"])
def test_a_preempted_job_is_run_again_as_often_as_it_may_be(queue, bell, pool):
    """Slurm queues those of one partition by itself, and ends those of the other."""
    script = f'echo life $INFINI_JOB_ATTEMPT >&2; echo "$RANK $$" > {bell.path}; exec sleep 1000'
    name = queue.submit(*TWO, f"--pool={pool}", "--restarts=1", "--", "sh", "-c", script)
    first = queue.status(name)["id"]
    bell.hear(8)
    other = preempt(queue)
    until(lambda: queue.status(name)["headline"] == "QUEUED BeginTime")
    let_go(queue, other)
    bell.hear(8)
    other = preempt(queue)
    status = queue.wait(name)
    let_go(queue, other)
    assert (status["headline"], status["attempt"], status["id"]) == ("PREEMPTED exit 143", 1, first)
    words = ["squeue", "-h", "-t", "PD,R", "-n", name]
    until(lambda: not subprocess.run(words, env=queue.env, capture_output=True, text=True, check=True).stdout)


def test_cancel_of_a_job_that_waits(queue, bell):
    busy = queue.submit("--slots=32", "--slots_per_node=8", "--", *hold(bell))
    bell.hear(32)
    name = queue.submit(*TWO, "--", "true")
    status = queue.wait(name, "QUEUED")
    until(lambda: queue.status(name)["reason"] == "Resources")
    assert queue.status(name)["hold"] == "waiting"
    waits = f"infini-job: {name} is waiting in the queue: Resources\n"
    done = queue.call("logs", name)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", waits)
    following = queue.start("logs", "-f", name)
    following.read_error_until(waits.encode())
    assert queue.call("cancel", name, busy).returncode == 0
    status = queue.wait(name)
    assert (status["headline"], status["attempt"], status["reason"]) == ("CANCELLED", -1, "it was canceled")
    assert following.wait(LIMIT_S) == 0
    assert queue.wait(busy)["state"] == "CANCELLED"


@pytest.mark.slow
def test_ranks_are_warned_before_the_limit(queue):
    """Slurm counts in minutes, and kills up to one later."""
    rank = play("tell=USR2", "say=up", "wait")
    name = queue.submit(*TWO, "--time=1m", "--warn=45s", "--", *rank)
    following = queue.start("logs", "-f", name)
    while following.out.count(b" got USR2") < 8:
        following.read_more(LIMIT_S)
    number = queue.wait(name, "WARNED")["id"]
    words = ["squeue", "-h", "-t", "all", "-o", "%T", "-j", number]  # a tenth of the CPU of our own question
    until(lambda: subprocess.run(words, env=queue.env, capture_output=True, text=True).stdout == "TIMEOUT\n")
    status = queue.wait(name, "TIMEOUT")
    assert (status["headline"], status["attempt"]) == ("TIMEOUT exit 143", 0)


@pytest.fixture
def unknown_limit(tmp_path, turnstile):
    """A PATH for a job that learns its limit from squeue, which says it when the turnstile rings: when its ranks are
    there. Before it warns them, it asks once more."""
    squeue = tmp_path / "late" / "squeue"
    squeue.parent.mkdir()
    waits = f'case "$*" in *"-o %e") read _ <{turnstile.path};; esac'
    squeue.write_text(f'#!/bin/sh\n{waits}\nexec /usr/bin/squeue "$@"\n')
    squeue.chmod(0o755)
    return f"{squeue.parent}:{os.environ['PATH']}"


def test_a_warned_rank_that_asks_for_it_is_run_again(queue, bell, unknown_limit, turnstile):
    """It saves, exits 85, and goes on later: here with a limit that is never reached."""
    script = 'echo life $INFINI_JOB_ATTEMPT; [ $INFINI_JOB_ATTEMPT = 1 ] && exit 0; trap "exit 85" USR2; '
    script += f"echo up > {bell.path}; while :; do sleep 0.1; done"
    words = (*TWO, "--time=2m", "--warn=117s", "--", "bash", "-c", script)
    name = queue.submit(*words, env={"PATH": unknown_limit})
    bell.hear(8)
    turnstile.ring("\n")
    status = queue.wait(name)
    assert (status["headline"], status["attempt"]) == ("COMPLETED", 1), queue.logs(name)
    assert {line.split("] ")[1] for line in queue.lines(name, "--attempt=0")} == {"life 0"}
    assert {line.split("] ")[1] for line in queue.lines(name, "--attempt=1")} == {"life 1"}


def test_restarts_go_through_the_queue(queue):
    script = "echo life $INFINI_JOB_ATTEMPT; [ $INFINI_JOB_ATTEMPT = 1 ] || [ $RANK != 3 ] || exit 4"
    name = queue.submit(*TWO, "--restarts=1", "--", "sh", "-c", script)
    first = queue.status(name)["id"]
    queue.wait(name, "QUEUED")
    until(lambda: queue.status(name)["attempt"] == 0 and queue.status(name)["state"] == "QUEUED")
    status = queue.wait(name)
    assert (status["headline"], status["attempt"]) == ("COMPLETED", 1), queue.logs(name)
    assert status["id"] == first
    assert {line.split("] ")[1] for line in queue.lines(name, "--attempt=1")} == {"life 1"}


def test_a_step_that_dies_on_a_node_is_a_node_that_failed(queue, bell, eights):
    name = queue.submit(*TWO, "--", *hold(bell))
    bell.hear(8)
    queue.wait(name, "RUNNING")
    slurmd = int(Path(f"{eights.folder}/slurmd.node2.pid").read_text())
    for pid in step_on(slurmd):
        os.kill(pid, signal.SIGKILL)
    status = queue.wait(name)
    assert (status["state"], status["node"]) == ("NODE_FAIL", "node2"), status
    assert "lost node" in status["reason"]


def test_a_controller_that_took_it_without_an_answer_has_one_job(queue, eights):
    """Frozen, it takes what comes, and sbatch gives up: here after 3 s, where Slurm's default is 10."""
    conf = Path(eights.folder, "slurm.conf").read_text()
    (queue.path.parent / "slurm.conf").write_text(f"{conf}MessageTimeout=3\n")
    queue.env["SLURM_CONF"] = f"{queue.path.parent}/slurm.conf"
    assert queue.call("clusters").returncode == 0
    pid = int(Path(f"{eights.folder}/slurmctld.pid").read_text())
    frozen = queue.env | {"PATH": f"{queue.path.parent}/bin:{queue.env['PATH']}"}
    (queue.path.parent / "bin").mkdir()
    wrapper = queue.path.parent / "bin" / "sbatch"  # the controller freezes between our questions and sbatch
    wrapper.write_text(f"#!/bin/sh\n[ -e {wrapper}.done ] || {{ touch {wrapper}.done; kill -STOP {pid}; }}\n"
                       'exec /usr/bin/sbatch "$@"\n')  # fmt: skip
    wrapper.chmod(0o755)
    queue.env = frozen
    submitting = queue.start("submit", "--slots=2", "--slots_per_node=1", "--", "sh", "-c", "echo once $RANK")
    try:
        submitting.read_error_until(b"slurm has not responded")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert submitting.wait(LIMIT_S * 2) == 0, submitting.err
    name = submitting.out.split()[1].decode()
    assert queue.wait(name)["headline"] == "COMPLETED"
    assert len(ids(queue, name)) == 1
    assert ids(queue, name) == [queue.status(name)["id"]]
    assert sorted(line.split("] ")[1] for line in queue.lines(name)) == ["once 0", "once 1"]


def test_more_nodes_than_there_are_is_refused_before_the_queue(queue):
    done = queue.call("submit", "--slots=72", "--slots_per_node=8", "--check", "--", "true")
    assert done.returncode == 2
    assert done.stderr.startswith("infini-job: the request needs 9 nodes with 8 GPUs; pool debug has 4")
    assert queue.is_empty()


def test_check_asks_slurm_itself(queue):
    done = queue.call("submit", *TWO, "--options=--constraint=nosuch", "--check", "--", "true")
    assert done.returncode == 1
    assert done.stderr.startswith("infini-job: --check: slurm can never run this job: ")
    assert len(done.stderr.splitlines()) == 1
    done = queue.call("submit", *TWO, "--check", "--", "true")
    assert (done.returncode, done.stderr) == (0, "infini-job: slurm can run this job\n")
    assert queue.is_empty()


def test_what_slurm_refuses_leaves_nothing(queue):
    done = queue.call("submit", *TWO, "--options=--constraint=nosuch", "--", "true")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "onstraint" in done.stderr or "feature" in done.stderr or "configuration" in done.stderr
    assert queue.is_empty()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--pool=nosuch",), "--pool=nosuch: unknown pool; use debug"),
        (("--slots=3", "--slots_per_node=2"), "--slots=3: 3 slots do not fill nodes of 2"),
        (("--slots=12", "--slots_per_node=12"), "the request needs nodes with 12 GPUs; "),
        (("--options=--nodes=3",), "--nodes=3: computed from the slots"),
        (("--gpu_type=h900",), "--gpu_type=h900: "),
    ],
)
def test_bad_requests_are_one_line_and_leave_nothing(queue, words, said):
    done = queue.call("submit", *words, "--", "true")
    assert done.returncode == 2
    assert done.stderr.startswith(f"infini-job: {said}"), done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert queue.is_empty()


def test_a_hundred_jobs_are_one_query(queue):
    """Their directories are there, and Slurm is asked once."""
    first = queue.submit(*TWO, "--options=--hold", "--", "true")
    names = [first]
    for number in range(99):
        name = f"ir-{number:010x}"
        folder = queue.path / name
        folder.mkdir(mode=0o700)
        for file in ("request.json", "id", "env", "job.sh"):
            (folder / file).write_bytes(
                (queue.path / first / file).read_bytes().replace(first.encode(), name.encode())
            )
        names.append(name)
    tool = queue.path.parent / "count"
    tool.mkdir()
    for command in ("squeue", "sacct", "scontrol", "sinfo"):
        (tool / command).write_text(f'#!/bin/sh\necho {command} >>{tool}/asked\nexec /usr/bin/{command} "$@"\n')
        (tool / command).chmod(0o755)
    done = queue.call("status", "--json", *names, env={"PATH": f"{tool}:{queue.env['PATH']}"})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 100
    assert found[0]["state"] == "QUEUED"
    assert (tool / "asked").read_text().count("squeue") == 1
    assert "scontrol" not in (tool / "asked").read_text()
    queue.call("cancel", first)
    queue.wait(first)


def test_all_ranks_are_gone_soon_after_a_failure(queue, bell):
    go = queue.path.parent / "go"
    os.mkfifo(go)
    script = f'echo "$RANK $$" > {bell.path}; [ $RANK = 9 ] || exec sleep 1000; read word < {go}; exit 7'
    name = queue.submit("--slots=16", "--slots_per_node=4", "--", "sh", "-c", script)
    pids = [int(line.split()[1]) for line in bell.hear(16)]
    start_s = time.monotonic()
    go.write_text("on\n")
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    assert time.monotonic() - start_s < LIMIT_S
    assert queue.wait(name)["headline"] == "FAILED exit 7 on node3, rank 9"


def test_a_directory_that_the_nodes_do_not_have_is_told(queue):
    name = queue.submit(*TWO, "--options=--hold", "--", "true")
    hidden = queue.path / "elsewhere"
    (queue.path / name).rename(hidden)
    try:
        slurm_id = (hidden / "id").read_text()
        subprocess.run(["scontrol", "release", slurm_id], env=queue.env, check=True)
        words = ["squeue", "-h", "-t", "all", "-o", "%T", "-j", slurm_id]
        until(lambda: subprocess.run(words, env=queue.env, capture_output=True, text=True).stdout == "FAILED\n")
    finally:
        hidden.rename(queue.path / name)
    status = queue.status(name)
    assert (status["state"], status["is_final"], status["attempt"]) == ("FAILED", True, -1)
    assert f"it started nothing; check that its nodes share {queue.path / name}, " in status["reason"]


# ---- arrays
ALONE = ("--slots=1", "--slot_type=cpu")
# two TERMs may come: Slurm's to all of a step, and the launcher's
COUNTED = """trap 'trap "" TERM; echo "-$INFINI_JOB_TASK" >{bell}; exit 0' TERM
echo "+$INFINI_JOB_TASK" >{bell}
read _ <{gate}
echo "-$INFINI_JOB_TASK" >{bell}
echo is $INFINI_JOB_TASK of $INFINI_JOB_TASKS
exit $((INFINI_JOB_TASK == 2 ? 7 : 0))
"""


def test_an_array_runs_so_many_tasks_at_a_time(queue, bell, turnstile, eights):
    """Of ten three at most; one fails, one is cancelled while it waits, one by Slurm's own command, which accounting
    alone knows of."""
    if eights.no_accounting:
        give_up(eights.no_accounting)
    script = COUNTED.format(bell=bell.path, gate=turnstile.path)
    waiting = queue.start("submit", *ALONE, "--array=0-18:2%3", "--wait", "--", "sh", "-c", script)
    waiting.read_until(b"\n")
    name = waiting.out.split()[1].decode()
    heard = bell.hear(3)
    status = queue.status(name)
    number = status["id"]
    assert [task["id"] for task in status["tasks"]] == [f"{number}_{k}" for k in range(0, 20, 2)]
    assert [task["state"] for task in status["tasks"][3:]] == ["QUEUED"] * 7
    until(lambda: queue.status(f"{name}.18")["headline"] == "QUEUED JobArrayTaskLimit")
    assert queue.status(f"{name}.18")["hold"] == "waiting"
    assert queue.call("cancel", f"{name}.16").returncode == 0
    subprocess.run(["scancel", f"{number}_14"], env=queue.env, check=True)
    for index in (14, 16):
        assert queue.wait(f"{name}.{index}")["headline"] == "CANCELLED"
    for _ in range(8):
        turnstile.ring("")
    assert waiting.wait() == 7
    heard += bell.hear(16 - len(heard))
    steps = [1 if word[0] == "+" else -1 for word in heard]
    assert max(sum(steps[:count]) for count in range(len(steps) + 1)) == 3
    head = f"FAILED exit 7 on {queue.status(f'{name}.2')['node']}, rank 0, task 2: 7 COMPLETED, 1 FAILED, 2 CANCELLED"
    assert waiting.out.splitlines()[-1].decode().startswith(head)
    assert queue.lines(f"{name}.6") == queue.lines(name, "--task=6", "--rank=0") != []
    assert [line.rpartition("is ")[2] for line in queue.lines(f"{name}.6")] == ["6 of 10"]


def test_cancel_of_an_array_gives_its_tasks_their_grace(queue, bell):
    script = COUNTED.replace("read _ <{gate}", "sleep 1000 & wait").format(bell=bell.path)
    name = queue.submit(*ALONE, "--array=0-9%2", "--", "sh", "-c", script)
    bell.hear(2)
    assert queue.call("cancel", name).returncode == 0
    assert queue.wait(name)["headline"] == "CANCELLED"
    assert sorted(bell.hear(2)) == ["-0", "-1"]


@pytest.mark.parametrize("words", [(), ("--restarts=1",)])
def test_a_task_is_run_again_by_itself(queue, words):
    """Without restarts as an array of that one task, for Slurm may not requeue it."""
    script = "echo run $INFINI_JOB_ATTEMPT; [ $INFINI_JOB_TASK$INFINI_JOB_ATTEMPT != 10 ] || exit 85"
    two = ("--slots=2", "--slots_per_node=1", "--slot_type=cpu")
    name = queue.submit(*two, *words, "--array=0-1", "--", "sh", "-c", script)
    status = queue.wait(name)
    assert (status["headline"], [task["attempt"] for task in status["tasks"]]) == ("COMPLETED", [0, 1])
    assert (status["tasks"][1]["id"] == f"{status['id']}_1") is bool(words)
    assert status["shape"] == "2 tasks x 2 nodes x 1 cpu"
    lines = [line.rpartition("] ")[2] for line in queue.lines(f"{name}.1")]
    assert (lines[0], lines[-2:]) == ("run 0", ["run 1"] * 2)  # of run 0 one rank may have ended the other


def test_function_runs_on_two_nodes_and_as_array(queue, eights, monkeypatch):
    for name, text in eights.env.items():
        monkeypatch.setenv(name, text)
    submit = functools.partial(ir.submit, scheduler="slurm", dir=queue.path)
    job = submit(lambda: (int(os.environ["RANK"]), os.environ["SLURMD_NODENAME"]), slots=8, slots_per_node=4)
    assert job.results(LIMIT_S * 2) == [(rank, f"node{rank // 4 + 1}") for rank in range(8)]
    job = submit(lambda: 1 // (int(os.environ["RANK"]) - 5), slots=8, slots_per_node=4)
    error = job.exception(LIMIT_S * 2)
    assert (type(error), error.rank, job.status().node) == (ZeroDivisionError, 5, "node2")
    job = submit(lambda text: text + os.environ["INFINI_JOB_TASK"], slots=1, array=["a", "b", "c"])
    assert job.result(LIMIT_S * 2) == ["a0", "b1", "c2"]


class Steps:
    """A function that waits in its first run, until that is stopped, and returns in the next one."""

    def __init__(self, bell, step=0):
        self.bell = bell
        self.step = step

    def __call__(self, name):
        with open(self.bell, "w") as bell:
            bell.write(f"{os.environ['RANK']}\n")
        while not self.step:
            signal.pause()
        return self.step, name, os.environ["INFINI_JOB_ATTEMPT"]

    def checkpoint(self, name):
        return functools.partial(Steps(self.bell, self.step + 1), name)


@pytest.mark.parametrize("cause", ["limit", "preemption"])
def test_checkpoint_says_which_call_follows_in_requeued_job(
    queue, eights, monkeypatch, bell, unknown_limit, turnstile, cause
):
    for name, text in {**eights.env, "PATH": unknown_limit}.items():
        monkeypatch.setenv(name, text)
    flags = {"time": "2m", "warn": "117s"} if cause == "limit" else {"pool": "requeued", "max_timeouts": 0}
    call = functools.partial(Steps(bell.path), "llama")
    job = ir.submit(call, scheduler="slurm", dir=queue.path, slots=8, slots_per_node=4, **flags)
    bell.hear(8)
    turnstile.ring("\n")
    if cause == "preemption":
        other = preempt(queue)
        until(lambda: job.status().attempt == 0 and job.status().state == "QUEUED")
        let_go(queue, other)
    assert job.results(LIMIT_S * 4) == [(1, "llama", "1")] * 8


class Unfinished:
    """A function that asks for another run at each warning."""

    def __call__(self):
        while True:
            signal.pause()

    def checkpoint(self):
        return self


def test_slurm_max_num_timeout_ends_job_that_is_never_done(queue, eights, monkeypatch):
    for name, text in eights.env.items():
        monkeypatch.setenv(name, text)
    executor = ir.JobExecutor(queue.path, cluster="slurm", timeout_min=2, warn="117s", slurm_max_num_timeout=1)
    job = executor.submit(Unfinished())
    assert isinstance(job.exception(LIMIT_S * 4), ir.JobFailed)
    status = job.status()
    assert (status.state, status.attempt, status.code) == ("TIMEOUT", 1, 85)


def test_job_executor_submits_to_slurm(queue, eights, monkeypatch):
    for name, text in eights.env.items():
        monkeypatch.setenv(name, text)
    executor = ir.JobExecutor(queue.path, slurm_partition="debug", timeout_min=5)
    executor.update_parameters(nodes=2, tasks_per_node=3)
    job = executor.submit(max, 5, 7)
    assert job.results(LIMIT_S * 2) == [7] * 6
    assert (job.job_id, job.done()) == (ids(queue, job.name)[0], True)
    executor.update_parameters(nodes=1, tasks_per_node=2, gpus_per_node=2, slurm_array_parallelism=2)
    jobs = executor.map_array(lambda text: text + os.environ["SLURM_ARRAY_JOB_ID"], ["a", "b", "c"])
    known = [job.job_id for job in jobs]
    whole = known[0].partition("_")[0]
    assert [job.result(LIMIT_S * 2) for job in jobs] == [f"{text}{whole}" for text in "abc"]
    assert [job.job_id for job in jobs] == known == [f"{whole}_{index}" for index in range(3)]
    assert sorted(ids(queue, jobs[0].name[:-2])) == known
