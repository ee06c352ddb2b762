"""On a real OpenPBS: `make pbs`. tests/support/beds/pbs.sh starts one. Its jobs are a user's.

PBS_ROUNDS (2): how often each way to end a job is tried. PBS_EXEC (/opt/pbs): where it is.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.paths import ROOT, SUPPORT
from tests.support.waiting import LIMIT_S, until

BED = SUPPORT / "beds" / "pbs.sh"
EXEC = os.environ.get("PBS_EXEC", "/opt/pbs")
ROUNDS = int(os.environ.get("PBS_ROUNDS", "2"))
WHOLE = ("--slots=6", "--slots_per_node=2", "--slot_type=cpu")
ONE = ("--slots=1", "--slot_type=cpu")
AS_USER = '. "$0/env.sh"; tbu "$@"'
AS_ROOT = '. "$0/env.sh"; tb "$@"'
SAVE = """
trap 'sleep 4; touch {save}/$INFINI_JOB_NAME.$RANK; exit 0' TERM
touch {save}/up.$INFINI_JOB_NAME.$RANK
while :; do sleep 1000 & wait; done
"""

pytestmark = [
    pytest.mark.pbs,
    pytest.mark.skipif(os.geteuid() != 0, reason="the bed of a real PBS needs root"),
    pytest.mark.skipif(
        not os.access(f"{EXEC}/sbin/pbs_mom", os.X_OK),
        reason=f"there is no OpenPBS in {EXEC} (PBS_EXEC): tests/support/beds/pbs.sh names its INSTALL",
    ),
]


class RealPbs:
    """A server and three nodes. Its user's home is `home`."""

    def __init__(self, folder: str, environ: dict[str, str]) -> None:
        self.folder = folder
        self._environ = environ
        self.home = Path(folder, "user")
        self.save = self.home / "save"
        self.save.mkdir()
        os.chown(self.save, 2001, 2001)
        self.jobs = self.home / "jobs"
        (self.home / "rank.sh").write_text(SAVE.format(save=self.save))

    def tell(self, word: str, *words: object) -> None:
        """Let the bed's script do something."""
        done = subprocess.run(
            [BED, word, self.folder, *map(str, words)], env=self._environ, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def user(self, *words: object, shell: str = AS_USER) -> subprocess.CompletedProcess[str]:
        argv = ["bash", "-c", shell, self.folder, *map(str, words)]
        environ = {name: text for name, text in os.environ.items() if name != "TMPDIR"}
        return subprocess.run(
            argv,
            env=environ,
            capture_output=True,
            text=True,
            check=False,
            timeout=2 * LIMIT_S,
            stdin=subprocess.DEVNULL,
        )

    def root(self, *words: object) -> None:
        done = self.user(*words, shell=AS_ROOT)
        assert done.returncode == 0, done.stderr

    def call(self, *words: object, env: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        given = (f"INFINI_JOB_DIR={self.jobs}", "INFINI_JOB_SCHEDULER=pbs", *env)
        return self.user("env", *given, sys.executable, "-m", "infini_run.jobs", *words)

    def submit(self, *words: object, **kwargs: tuple[str, ...]) -> str:
        done = self.call("submit", *words, **kwargs)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()[1]

    def status(self, *names: str) -> list[dict[str, object]]:
        return list(json.loads(self.call("status", "--json", *names).stdout))

    def wait(self, *names: str, state: str = "") -> list[dict[str, object]]:
        """Until they have this state; without one, until they have ended."""
        found: list[dict[str, object]] = []

        def is_there() -> bool:
            found[:] = self.status(*names)
            return all(one["state"] == state if state else one["is_final"] for one in found)

        until(is_there, 2 * LIMIT_S)
        return found

    def logs(self, name: str) -> str:
        return self.call("logs", name).stdout

    def id(self, name: str) -> str:
        return (self.jobs / name / "id").read_text()


@pytest.fixture(scope="module")
def bed():
    with started() as bed:
        yield bed


@contextmanager
def started() -> Iterator[RealPbs]:
    """Without a history, which is PBS's default. One at a time: jobs of two have the same ids, and folders."""
    folder = tempfile.mkdtemp(prefix="pbs-", dir="/tmp")
    os.chmod(folder, 0o755)
    shown = f"{sys.base_prefix} {ROOT} {sys.prefix}"
    env = {**os.environ, "PBS_TB_HISTORY": "False", "PBS_TB_SHOW": shown, "PBS_TB_NSPREFIX": f"p{os.getpid()}"}
    start = subprocess.run(
        [BED, "start", folder, "3", "8", "2"], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    try:
        assert start.returncode == 0, start.stdout.decode()
        yield RealPbs(folder, env)
    finally:
        subprocess.run([BED, "stop", folder], env=env, capture_output=True, check=False)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(params=["no history", "history"])
def pbs(request, bed):
    bed.root("qmgr", "-c", f"set server job_history_enable={request.param == 'history'}")
    yield bed
    clear(bed)


def clear(bed):
    left = bed.user("qselect").stdout.split()
    if left:
        bed.user("qdel", "-W", "force", *left)
        until(lambda: not bed.user("qselect").stdout)


@pytest.fixture
def bare(bed):
    bed.root("qmgr", "-c", "set server job_history_enable=False")
    yield bed
    clear(bed)


def test_the_first_failure_is_told_and_the_exit_code_is_its_own(pbs):
    done = pbs.call("submit", *WHOLE, "--wait", "--", "sh", "-c", "[ $RANK = 3 ] || exec sleep 1000; exit 7")
    assert done.returncode == 7, done.stderr
    assert done.stdout.splitlines()[-1].startswith(
        "FAILED exit 7 on node2, rank 3: rank 3 on node2 failed: exit code 7"
    )


def test_live_jobs_are_all_known(pbs):
    names = [pbs.submit(*ONE, "--", "sleep", "1000") for _ in range(4)]
    assert {one["state"] for one in pbs.wait(*names, state="RUNNING")} == {"RUNNING"}
    pbs.call("cancel", *names)
    assert {one["headline"] for one in pbs.wait(*names)} == {"CANCELLED"}


def test_a_job_whose_answer_is_lost_is_there_once(pbs):
    lost = pbs.home / "lost"
    lost.mkdir(exist_ok=True)
    words = "cannot send job script: End of File from server head"
    (lost / "qsub").write_text(f'#!/bin/sh\n{EXEC}/bin/qsub "$@" >/dev/null\necho "qsub: {words}" >&2\nexit 1\n')
    (lost / "qsub").chmod(0o755)
    name = pbs.submit(*ONE, "--", "sleep", "1000", env=(f"PATH={lost}:{EXEC}/bin:/usr/bin:/bin",))
    assert pbs.user("qselect").stdout.split() == [pbs.id(name)]
    pbs.call("cancel", name)
    pbs.wait(name)


def test_a_job_that_is_run_again_has_a_new_id_and_is_known(pbs):
    script = "[ $INFINI_JOB_ATTEMPT = 0 ] && exit 85; sleep 1000"
    name = pbs.submit(*ONE, "--", "sh", "-c", script)
    first = pbs.id(name)
    until(lambda: [(one["state"], one["attempt"]) for one in pbs.status(name)] == [("RUNNING", 1)])
    (again,) = pbs.status(name)
    assert again["id"] == pbs.id(name) != first
    pbs.call("cancel", name)
    assert pbs.wait(name)[0]["headline"] == "CANCELLED"


@pytest.mark.parametrize("how", ["cancel", "qdel", "limit"])
def test_ranks_that_save_for_4_s_have_all_saved(bare, how):
    limit = ["--time=15s"] if how == "limit" else []
    names = [bare.submit(*WHOLE, *limit, "--", "sh", bare.home / "rank.sh") for _ in range(ROUNDS)]
    for name in names:
        until(lambda: len(list(bare.save.glob(f"up.{name}.*"))) == 6)  # noqa: B023
        if how == "cancel":
            assert bare.call("cancel", name).returncode == 0
        elif how == "qdel":
            assert bare.user("qdel", bare.id(name)).returncode == 0
    ends = bare.wait(*names)
    assert {one["state"] for one in ends} == {"TIMEOUT" if how == "limit" else "CANCELLED"}
    saved = {name: len(list(bare.save.glob(f"{name}.*"))) for name in names}
    assert saved == dict.fromkeys(names, 6), bare.logs(names[0])


def test_ranks_of_a_script_by_hand_have_saved_too(bare):
    script = bare.home / "by-hand.sh"
    words = f"{sys.executable} -m infini_run --engine=pbs --export=INFINI_JOB_NAME sh {bare.home}/rank.sh"
    lines = ("-l select=3:ncpus=2:mpiprocs=2", "-l place=scatter", "-j oe")
    text = "".join(f"#PBS {line}\n" for line in lines)
    ids = []
    for n in range(ROUNDS):
        script.write_text(f"#!/bin/sh\n{text}cd {bare.home}/save; export INFINI_JOB_NAME=hand{n}\nexec {words}\n")
        ids.append(bare.user("qsub", script).stdout.strip())
    for n, job in enumerate(ids):
        until(lambda: len(list(bare.save.glob(f"up.hand{n}.*"))) == 6)  # noqa: B023
        assert bare.user("qdel", job).returncode == 0
    until(lambda: not bare.user("qselect").stdout)
    assert [len(list(bare.save.glob(f"hand{n}.*"))) for n in range(ROUNDS)] == [6] * ROUNDS


def test_ranks_are_warned_of_a_limit_that_is_their_queues(bare):
    for words in ("create queue brief queue_type=e,enabled=True,started=True",
                  "set queue brief resources_default.walltime=00:05:00"):  # fmt: skip
        bare.root("qmgr", "-c", words)
    warned = "trap 'echo warned; exit 0' USR2; while :; do sleep 1000 & wait; done"
    done = bare.call("submit", *ONE, "--pool=brief", "--warn=295s", "--wait", "--", "sh", "-c", warned)
    assert done.stdout.splitlines()[-1] == "COMPLETED", done.stderr
    assert "] warned" in bare.logs(done.stdout.split()[1])


# ---- arrays
TASK = """
touch {save}/up.$INFINI_JOB_NAME
until [ -e {save}/go ]; do sleep 0.1; done
exit $((INFINI_JOB_TASK == 2 ? 7 : 0))
"""


def test_an_array_runs_so_many_tasks_at_a_time(pbs):
    """Two of five; one fails, one is cancelled while it waits, one while it runs."""
    (pbs.home / "task.sh").write_text(TASK.format(save=pbs.save))
    name = pbs.submit(*ONE, "--array=0-8:2%2", "--", "sh", pbs.home / "task.sh")

    def states():
        return [task["state"] for task in pbs.status(name)[0]["tasks"]]

    until(lambda: states() == ["RUNNING"] * 2 + ["QUEUED"] * 3, LIMIT_S)
    number = pbs.id(name).partition("[")[0]
    assert [task["id"] for task in pbs.status(name)[0]["tasks"]] == [f"{number}[{k}].head" for k in range(0, 10, 2)]
    for index, others in ((8, ["RUNNING"] * 2 + ["QUEUED"] * 2), (0, ["RUNNING"] * 2 + ["QUEUED"])):
        assert pbs.call("cancel", f"{name}.{index}").returncode == 0
        until(lambda others=others: [one for one in states() if one != "CANCELLED"] == others, LIMIT_S)
    assert sorted(path.name for path in pbs.save.glob(f"up.{name}.*")) == [f"up.{name}.{k}" for k in (0, 2, 4)]
    (pbs.save / "go").touch()
    try:
        (status,) = pbs.wait(name)
    finally:
        (pbs.save / "go").unlink()
    assert (status["code"], status["task"], status["rank"]) == (7, 2, 0)
    assert status["headline"].partition(": ")[2] == "2 COMPLETED, 1 FAILED, 2 CANCELLED"


def test_a_task_is_run_again_as_a_job_by_itself(pbs):
    script = "echo run $INFINI_JOB_ATTEMPT; [ $INFINI_JOB_TASK$INFINI_JOB_ATTEMPT != 10 ] || exit 85"
    two = ("--slots=2", "--slots_per_node=1", "--slot_type=cpu")
    name = pbs.submit(*two, "--array=0-1", "--", "sh", "-c", script)
    (status,) = pbs.wait(name)
    assert (status["headline"], [task["attempt"] for task in status["tasks"]]) == ("COMPLETED", [0, 1])
    said = [line.rpartition("] ")[2] for line in pbs.logs(f"{name}.1").splitlines() if "] run" in line]
    assert (said[0], said[-2:]) == ("run 0", ["run 1"] * 2)  # of run 0 one rank may have ended the other


def test_cancel_of_an_array_gives_its_tasks_their_grace(pbs):
    name = pbs.submit(*ONE, "--array=0-4%2", "--", "sh", pbs.home / "rank.sh")
    until(lambda: len(list(pbs.save.glob(f"up.{name}.*"))) == 2, LIMIT_S)
    assert pbs.call("cancel", name).returncode == 0
    assert pbs.wait(name)[0]["headline"] == "CANCELLED"
    assert sorted(path.name for path in pbs.save.glob(f"{name}.*")) == [f"{name}.{k}.0" for k in (0, 1)]
    assert len(list(pbs.save.glob(f"up.{name}.*"))) == 2


def test_a_job_that_is_suspended_is_told_so(bare):
    name = bare.submit(*ONE, "--", "sleep", "1000")
    for word, wanted in (("suspend", "SUSPENDED"), ("resume", "RUNNING")):
        bare.wait(name, state="RUNNING" if word == "suspend" else "SUSPENDED")
        bare.root("qsig", "-s", word, bare.id(name))
        bare.wait(name, state=wanted)
    bare.call("cancel", name)
    assert bare.wait(name)[0]["headline"] == "CANCELLED"


def test_a_warning_before_no_limit_is_told(bare):
    """Neither the queue nor the server of the bed has one."""
    done = bare.call("submit", *ONE, "--warn=5m", "--print", "--", "true")
    assert done.stderr == "infini-job: --warn: no effect in workq without a limit; add --time=TIME\n"


WAITING = [
    (("--options=-l select=1:host=nohost",), "hopeless", "no node of the queue has host=nohost"),
    (("--options=-h",), "waiting", "you hold it; run qrls to release it"),
    (("--pool=stopped",), "passing", ""),
]


def test_why_a_job_waits_is_told_in_the_words_of_pbs(bare):
    bare.root("qmgr", "-c", "create queue stopped queue_type=e,enabled=True,started=False")
    names = [bare.submit(*ONE, *words, "--", "true") for words, _, _ in WAITING]
    until(lambda: all(one["reason"] for one in bare.status(*names)))
    found = bare.status(*names)
    assert [one["hold"] for one in found] == [hold for _, hold, _ in WAITING], found
    for one, (_, _, advice) in zip(found, WAITING, strict=True):
        assert advice in str(one["advice"])
    bare.call("cancel", *names)
    assert {one["headline"] for one in bare.wait(*names)} == {"CANCELLED"}


REFUSED = [
    (("--options=-l select=1:foo=3",), "Unknown resource: foo; the cluster has no such resource"),
    (("--options=-l foo=1",), "Unknown resource Resource_List.foo; the cluster has no such resource"),
    (("--pool=closed",), "Queue is not enabled; the queue takes no jobs now; use another --pool"),
    (("--options=-q nosuch",), "-q nosuch: use --pool of infini-job"),
]


@pytest.mark.parametrize(("words", "said"), REFUSED)
def test_what_pbs_refuses_leaves_nothing(bare, words, said):
    bare.user("true")
    bare.user("qmgr", "-c", "create queue closed queue_type=e,enabled=False,started=True", shell=AS_ROOT)
    before = os.listdir(bare.jobs) if bare.jobs.exists() else []
    done = bare.call("submit", *ONE, *words, "--", "true")
    assert done.returncode != 0
    assert done.stderr.strip().endswith(said), done.stderr
    assert (os.listdir(bare.jobs) if bare.jobs.exists() else []) == before


COMMANDS = [
    ("qstat", "-f", "-F", "dsv", "99.SERVER"),
    ("qstat", "-x", "-f", "-F", "dsv", "99.SERVER", "98.SERVER"),
    ("qstat", "-E", "-f", "-F", "dsv", "99.SERVER", "98.SERVER"),
    ("qstat", "-f", "-F", "json", "99.SERVER"),
    ("qselect", "-x"),
    ("qselect", "-N", "nosuch"),
    ("qdel", "99.SERVER"),
    ("qsig", "-s", "URG", "99.SERVER"),
    ("qstat", "--version"),
]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_the_stand_ins_say_what_pbs_says(bare, pbs_queue, words):
    """Without a history; tests/support/fakes/batch_pbs.py."""
    pbs_queue.set(history=False)
    real = bare.user(*(word.replace("SERVER", "head") for word in words))
    theirs = [word.replace("SERVER", "pbshead") for word in words]
    fake = subprocess.run(theirs, env=pbs_queue.env, capture_output=True, text=True, check=False)
    assert real.returncode == fake.returncode
    assert real.stderr == fake.stderr.replace("pbshead", "head")
    assert like(real.stdout) == like(fake.stdout.replace("pbshead", "head"))


def like(text):
    """As JSON but for the time, where it is some."""
    try:
        return {name: value for name, value in json.loads(text).items() if name != "timestamp"}
    except ValueError:
        return text
