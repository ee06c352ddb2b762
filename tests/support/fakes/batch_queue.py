"""What stands in for a batch scheduler: jobs in a file, each run here by a keeper of its own. TEST_BATCH: the folder.

batch_slurm.py and batch_pbs.py are its commands, batch_keeper.py runs the jobs. Commands are started by the thousand,
so they import what all of them need: no json, re, enum or subprocess. Faults are what a test asks for:

    lost      it does what it is asked to, and says that nobody answered
    late      the same, and not before the job that it submitted has ended
    killed    it does what it is asked to, and is killed
    early     the server has not heard yet that the job has begun (qsig)
    silent    it does what it is asked to, and never answers
    empty     it does nothing, says nothing, and exits with 0
    garbage   it does nothing, and answers with something else
    slow      it answers when TEST_BATCH/gate is opened
    refuse    it says no
    away      it finds nobody to ask
"""

import _signal as signal  # the C module: `signal` makes enumerations
import fcntl
import marshal
import os
import sys
import time

sys.modules["gettext"] = None  # getopt would translate its errors, and imports re for it
FOLDER = os.environ["TEST_BATCH"]
MARK = "TEST_BATCH_JOB"
PRESENT = ("PENDING", "RUNNING", "COMPLETING")


class Book:
    """The jobs, and what the test has set; locked while it is open."""

    def __enter__(self):
        self._lock = open(f"{FOLDER}/lock", "w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        with open(f"{FOLDER}/book", "rb") as file:
            self.data = marshal.load(file)
        self.jobs = self.data["jobs"]
        self.settings = self.data["settings"]
        return self

    def __exit__(self, *_):
        with open(f"{FOLDER}/book.new", "wb") as file:
            marshal.dump(self.data, file)
        os.rename(f"{FOLDER}/book.new", f"{FOLDER}/book")
        self._lock.close()

    def new(self):
        self.data["next"] += 1
        return str(self.data["next"] - 1)

    def add(self, number="", **job):
        number = number or self.new()
        waits = self.settings["hold"]
        self.jobs[number] = {"id": number, "state": "PENDING", "reason": waits, "code": 0, "restarts": 0, "keeper": 0,
                             "how": "", "begin_s": 0, **job}  # fmt: skip
        return number


def fault_of(command):
    """What this call of a command is to do wrong. It is written down that the command was called."""
    with open(f"{FOLDER}/calls", "a") as file:
        file.write(" ".join([command, *sys.argv[2:]]) + "\n")
    with Book() as book:
        waiting = book.data["faults"].get(command, [])
        return waiting.pop(0) if waiting else ""


def before(command):
    """The faults that keep a command from doing anything. Returns the fault that comes after it."""
    fault = fault_of(command)
    if fault == "slow":
        with open(f"{FOLDER}/gate") as gate:
            gate.read()
    if fault == "empty":
        sys.exit(0)
    if fault == "garbage":
        print("<html>500 %!| it works { again")
        sys.exit(0)
    return fault


def after(fault, words, code=1):
    """The faults of a command that has done what it was asked to."""
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "silent":
        signal.pause()
    if fault == "late":
        wait_for_end()
    if fault in ("lost", "late"):
        print(words, file=sys.stderr)
        sys.exit(code)


def wait_for_end():
    """Of all jobs there are. A file tells nobody of its change, so we look."""
    while True:
        with Book() as book:
            if all(job["state"] not in PRESENT for job in book.jobs.values()):
                return
        time.sleep(0.02)


def start(number):
    """A keeper for the job, unless jobs wait; for so many tasks of an array as may run at a time."""
    with Book() as book:
        tasks = tasks_of(book.jobs, number)
        waiting = [task["id"] for task in tasks if task["state"] == "PENDING" and not task["keeper"]]
        running = sum(task["state"] in PRESENT and bool(task["keeper"]) for task in tasks)
        count = min(len(waiting), (tasks[0]["at_once"] or len(tasks)) - running) if tasks else 0
        if not book.settings["hold"]:
            for one in waiting[:count] if tasks else [number]:
                book.jobs[one]["keeper"] = keep(one)


def tasks_of(jobs, number):
    """Those of an array, by its number or that of a task."""
    array = jobs[number].get("array", "") if number in jobs else ""
    return [job for job in jobs.values() if array and job.get("array") == array and "at_once" in job]


def keep(number):
    """It waits for the book, in which it stands by then."""
    import subprocess

    return subprocess.Popen(
        [sys.executable, "-IS", f"{os.path.dirname(__file__)}/batch_keeper.py", number],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        cwd="/", env={**os.environ, MARK: ""},
    ).pid  # fmt: skip


def tell(job, number):
    """A signal to a job's keeper: TERM cancels, USR1 runs it again, USR2 passes job["signal"] on (PBS)."""
    if job["keeper"]:
        try:  # noqa: SIM105 - contextlib imports functools and collections
            os.kill(job["keeper"], number)
        except ProcessLookupError:
            pass
