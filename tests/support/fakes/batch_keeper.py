"""What runs one job of batch_queue.py, however often: batch_keeper.py NUMBER.

It ends the script when it is told to or when its time is over, kills all that carries the job's mark, and writes down
how it ended.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from batch_queue import FOLDER, MARK, Book, start


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


if __name__ == "__main__":
    Keeper(sys.argv[1]).run()
