"""What stands in for a batch scheduler: jobs in a file, each run here by a keeper of its own. TEST_BATCH: the folder.

batch_slurm.py and batch_pbs.py are its commands. A keeper runs the script, ends it when it is told to or when its
time is over, kills all that carries the job's mark, and writes down how it ended. Faults are what a test asks for:

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

import contextlib
import ctypes
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time

FOLDER = os.environ["TEST_BATCH"]
MARK = "TEST_BATCH_JOB"
PRESENT = ("PENDING", "RUNNING", "COMPLETING")


class Book:
    """The jobs, and what the test has set; locked while it is open."""

    def __enter__(self):
        self._lock = open(f"{FOLDER}/lock", "w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        with open(f"{FOLDER}/book.json") as file:
            self.data = json.load(file)
        self.jobs = self.data["jobs"]
        self.settings = self.data["settings"]
        return self

    def __exit__(self, *_):
        with open(f"{FOLDER}/book.new", "w") as file:
            json.dump(self.data, file)
        os.rename(f"{FOLDER}/book.new", f"{FOLDER}/book.json")
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
    return subprocess.Popen(
        [sys.executable, "-IS", os.path.abspath(__file__), "keep", number],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        cwd="/", env={**os.environ, MARK: ""},
    ).pid  # fmt: skip


def tell(job, number):
    """A signal to a job's keeper: TERM cancels, USR1 runs it again, USR2 passes job["signal"] on (PBS)."""
    if job["keeper"]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(job["keeper"], number)


def marked(number):
    """What runs for a job, anywhere."""
    text, found = f"{MARK}={number}@{FOLDER}".encode(), []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/environ", "rb") as file:
                if text in file.read().split(b"\0"):
                    found.append(int(entry))
    return found


def session_of(pid):
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[3])
    return 0


def send(pids, number):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


# ---- the keeper


class Keeper:
    """One job, from its start to its end, however often it is run."""

    def __init__(self, number):
        self.number = number
        self.how = ""  # CANCELLED, TIMEOUT, REQUEUED: who ended it, where it was not itself
        self.kill_s = 0.0
        self.session = 0
        self.codes = {}

    def run(self):
        signals = {signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD}
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: what is orphaned comes to us
        threading.Thread(target=self.watch, daemon=True).start()
        while True:
            with Book() as book:
                job = book.jobs[self.number]
                job.update(state="RUNNING", reason="", keeper=os.getpid(), begin_s=time.time())
                settings = book.settings
            self.how = ""
            code = self.once(job, settings, signals)
            with Book() as book:
                job = book.jobs[self.number]
                if self.how == "REQUEUED":
                    job.update(state="PENDING", reason="BeginTime", restarts=job["restarts"] + 1)
                    continue
                state = self.how or ("FAILED" if code else "COMPLETED")
                job.update(state=state, code=code, reason="", how=self.how, keeper=0)
            if "array" in job:
                start(self.number)  # the next one
            return

    def watch(self):
        """When the test is gone, however, the job ends."""
        with contextlib.suppress(FileNotFoundError):
            alive = os.open(f"{FOLDER}/alive", os.O_RDONLY | os.O_NONBLOCK)
            with contextlib.suppress(BlockingIOError):
                os.read(alive, 1)  # nothing: it is gone already
                os.kill(os.getpid(), signal.SIGTERM)
            poll = select.poll()
            poll.register(alive, 0)
            poll.poll()  # POLLHUP
        os.kill(os.getpid(), signal.SIGTERM)

    def once(self, job, settings, signals):
        """Run the script; its exit code."""
        self.start_mom(job)
        try:
            script = self.script(job, settings)
            end_s = job["begin_s"] + job["limit_s"] if job["limit_s"] else float("inf")
            while script.pid not in self.codes or self.is_orphaned(job):
                due_s = self.kill_s or (end_s if not self.how else float("inf"))
                wait_s = min(max(0.0, due_s - time.time()), 3600.0)
                came = signal.sigtimedwait(signals, wait_s)
                if came is not None and came.si_signo == signal.SIGUSR2:
                    self.signal(job)
                elif came is not None and came.si_signo != signal.SIGCHLD:
                    self.end("CANCELLED" if came.si_signo == signal.SIGTERM else "REQUEUED", settings, job)
                elif came is None and self.kill_s and time.time() >= self.kill_s:
                    self.kill()
                elif came is None and time.time() >= end_s and not self.how:
                    self.end("TIMEOUT", settings, job)
                self.reap()
        finally:
            self.kill()
        self.kill_s = 0.0
        code = script.returncode = self.codes[script.pid]
        return code if code >= 0 else 128 - code

    def script(self, job, settings):
        with open(f"{FOLDER}/{self.number}.nodes", "w") as file:
            file.write("".join(f"{node}\n" * job.get("lines", 1) for node in job["nodes"]))
        env = {**job["env"], **{name: text.format(**job, folder=FOLDER) for name, text in settings["env"].items()}}
        env |= {"TEST_BATCH": FOLDER, MARK: f"{self.number}@{FOLDER}", "TEST_PBS_MOM": f"{FOLDER}/{self.number}.mom"}
        words = ["sh", f"{FOLDER}/{self.number}.sh"]
        if job["kind"] == "pbs":  # a shell of the user's runs the script, and is what PBS calls the job's first task
            words = ["sh", "-c", '"$@"; exit $?', "sh", *words]
        with open(job["output"], "ab" if job["appends"] else "wb") as out:
            script = subprocess.Popen(
                words, env=env, cwd=job["cwd"], stdin=subprocess.DEVNULL, stdout=out,
                stderr=out, start_new_session=True,
                preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, ()),
            )  # fmt: skip
        self.session = script.pid
        return script

    def start_mom(self, job):
        """What pbs_tmrsh of a PBS job talks to."""
        if job["kind"] != "pbs":
            return
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{FOLDER}/{self.number}.mom")
        mom = subprocess.Popen(
            [sys.executable, "-IS", f"{os.path.dirname(os.path.abspath(__file__))}/pbs_mom.py",
             f"{FOLDER}/{self.number}.mom", FOLDER], stdout=subprocess.PIPE,
            env={**os.environ, MARK: f"{self.number}@{FOLDER}"},
            preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, ()),
        )  # fmt: skip
        mom.stdout.readline()
        mom.stdout.close()
        mom.returncode = 0  # it is reaped with all that comes to us

    def end(self, how, settings, job):
        """TERM, and KILL when its time is over too."""
        self.how = self.how or how
        self.kill_s = self.kill_s or time.time() + settings["kill_wait_s"]
        send(self.on_first_node(job) if job["kind"] == "pbs" else marked(self.number), signal.SIGTERM)

    def signal(self, job):
        with Book() as book:
            name = book.jobs[self.number]["signal"]
        send(self.on_first_node(job), signal.Signals[f"SIG{name}"])

    def on_first_node(self, job):
        """What PBS signals: the sessions of the script and of the tasks there. Those elsewhere go with the job."""
        sessions = {self.session}
        with contextlib.suppress(FileNotFoundError), open(f"{FOLDER}/{self.number}.mom.tasks") as file:
            sessions |= {int(pid) for host, pid in map(str.split, file) if host == job["nodes"][0]}
        return [pid for pid in marked(self.number) if session_of(pid) in sessions]

    def is_orphaned(self, job):
        """Told to end, a job of PBS whose shell has ended lives as long as something of it does on the first node."""
        return job["kind"] == "pbs" and bool(self.how) and self.kill_s > time.time() and bool(self.on_first_node(job))

    def kill(self):
        """Nothing of the job is left."""
        while left := marked(self.number):
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.reap()

    def reap(self):
        """All that has ended and came to us; `codes` keeps how."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            self.codes[pid] = os.waitstatus_to_exitcode(status)


if __name__ == "__main__" and sys.argv[1:2] == ["keep"]:
    Keeper(sys.argv[2]).run()
