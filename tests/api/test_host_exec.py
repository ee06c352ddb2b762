"""A host program that executes another one (os.execv): the process lives on, but nothing that it had launched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.command import Command
from tests.support.launch_shapes import UNSHARE, as_root, strace, with_strace
from tests.support.processes import GUARD, is_alive, marked, processes, state_of
from tests.support.waiting import until

BEGIN = """
import ctypes, multiprocessing, os, signal, subprocess, sys, threading, time
import infini_run as ir

BELL = sys.argv[1]

def busy(bell=BELL):
    import os, signal, subprocess, time
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    child = subprocess.Popen(["setsid", "sleep", "1000"])
    with open(bell, "w") as file:
        file.write(f"{os.getpid()} {child.pid}\\n")
    time.sleep(1000)

def serve(ctx, task):
    busy(task)

COMMAND = ["sh", "-c", f"trap '' TERM; setsid sleep 1000 & echo $$ $! > {BELL}; wait"]

def begin(function, *args, **kwargs):
    threading.Thread(target=function, args=args, kwargs=kwargs, daemon=True).start()
"""

# what a program may have launched: two workers each, which are busy, deaf to SIGTERM, and have a child
LAUNCHES = {
    "command": "begin(ir.run, COMMAND, nproc_per_node=2)",
    "process-launcher": "mine = ir.ProcessLauncher(COMMAND, nproc_per_node=2, grace=600); mine.launch()",
    "restarting": "begin(ir.run, COMMAND, nproc_per_node=2, max_restarts=3)",
    "function": "begin(ir.Launcher(nproc_per_node=2).run, busy)",
    "function-handle": "handle = ir.Launcher(nproc_per_node=2).start(busy)",
    "function-zygote": 'begin(ir.Launcher(nproc_per_node=2, preload=["fractions"]).run, busy)',
    "crew": "crew = ir.Crew(serve, nproc=2); asked = [crew.worker(n).ask(BELL) for n in range(2)]",
    "crew-zygote": (
        'crew = ir.Crew(serve, nproc=2, preload=["fractions"]); asked = [crew.worker(n).ask(BELL) for n in range(2)]'
    ),
    "pool": 'pool = ir.Pool(nproc_per_node=2, preload=["fractions"]); handle = pool.start(busy)',
}

NEW = "import os, sys; print('new', os.getpid(), flush=True); sys.stdin.read()"

END = """
nowhere = subprocess.DEVNULL
# a child of the program, and of the one that follows
own = subprocess.Popen(["sleep", "1000"], stdout=nowhere, stderr=nowhere)
print("own", own.pid, flush=True)
sys.stdin.readline()
NEW = [sys.executable, "-c", os.environ["NEW"]]
"""

# how the program comes to its exec; a sibling is forked by C code, which runs no hook and keeps every descriptor
WAYS = {
    "main": "os.execv(NEW[0], NEW)",
    "thread": "threading.Thread(target=os.execv, args=(NEW[0], NEW)).start(); time.sleep(1000)",
    "with-sibling": """
sibling = ctypes.PyDLL(None)._Fork()
if sibling == 0:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with the test
    signal.pause()
print("sibling", sibling, flush=True)
os.execv(NEW[0], NEW)
""",
}


class Host(Command):
    """A program that goes on at `go`."""

    others = ()  # processes that are to live as long as it does

    def go(self):
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def number(self, word):
        return int(self.read_lines(word)[0][-1])

    def kids(self, name):
        return [pid for pid, (parent, _, called) in processes().items() if parent == self.pid and called == name]


@pytest.fixture
def host(bell):
    """A program that has launched something busy: it, and the pids of that. It goes on to its end at `go`."""
    started = []

    def start(launch, end, count=2, under=(), new=NEW):
        text = textwrap.dedent(f"{BEGIN}\n{launch}\n{END}\n{end}\n")
        argv = [*under, sys.executable, "-c", text, bell.path]
        env = {**os.environ, "NEW": new}
        started.append(Host(argv, stdin=subprocess.PIPE, env=env))
        busy = [int(pid) for line in bell.hear(count) for pid in line.split()]
        assert len(busy) == 2 * count
        if not under:  # there a number is another one
            started[-1].others = (started[-1].number(b"own"),)
        return started[-1], busy

    yield start
    for command in started:
        command.close()
        for pid in command.others:
            os.kill(pid, signal.SIGKILL)


def assert_ended(command, busy):
    """All that was launched, and the guards; but not the program, nor what else it has started."""
    command.go()
    assert command.number(b"new") == command.pid
    until(lambda: not any(map(is_alive, busy)))
    until(lambda: not marked())
    until(lambda: all(state_of(guard) == "Z" for guard in command.kids(GUARD)))
    assert command.process.poll() is None
    assert all(map(is_alive, command.others))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.rows(15)
def test_nothing_launched_outlives_exec_of_host(host, launch, way):
    command, busy = host(LAUNCHES[launch], WAYS[way])
    assert_ended(command, busy)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_spawn_ends_at_exec(host, way, every_path):
    command, busy = host(LAUNCHES["process-launcher"], WAYS[way])
    assert_ended(command, busy)


def test_launch_in_its_grace_ends_at_exec(host):
    command, busy = host(LAUNCHES["process-launcher"], f"mine.terminate()\n{WAYS['main']}")
    assert_ended(command, busy)


def test_several_launches_all_end_at_exec(host):
    launches = "\n".join(LAUNCHES[name].replace("mine", name[:2]) for name in ("process-launcher", "crew", "pool"))
    assert_ended(*host(launches, WAYS["main"], count=6))


def test_error_folder_is_removed_at_exec(host, tmp_path):
    script = f'dirname "$TORCHELASTIC_ERROR_FILE" > {tmp_path}/folder; echo $$ $$ > $0; exec sleep 1000'
    launch = f"mine = ir.ProcessLauncher(['sh', '-c', {script!r}, BELL]); mine.launch()"
    command, busy = host(launch, WAYS["main"], count=1)
    folder = Path((tmp_path / "folder").read_text().strip())
    assert folder.is_dir()
    assert_ended(command, busy)
    assert not folder.exists()


@as_root
@pytest.mark.root
def test_host_that_is_process_1_leaves_nothing_at_exec(host):
    """As a container's program does that reloads itself: there the kernel ends nothing."""
    command, busy = host(LAUNCHES["process-launcher"], WAYS["main"], under=UNSHARE)
    before = set(marked())
    assert len(before) == len(busy)
    command.go()
    assert command.number(b"new") == 1
    until(lambda: not any(map(is_alive, before)))
    assert command.process.poll() is None


STARTING = """
def start():
    for _ in range(1000):
        mine.append(ir.ProcessLauncher(["sh", "-c", "setsid sleep 1000 & exec sleep 1000"], nproc_per_node=32))
        mine[-1].launch()
        starts.release()

mine, starts = [], threading.Semaphore(0)
begin(start)
starts.acquire()
time.sleep(float(sys.argv[2]))
os.execv(sys.executable, [sys.executable, "-c", os.environ["NEW"]])
"""


@pytest.mark.parametrize("after_ms", range(0, 60, 6))
def test_exec_during_start_leaves_nothing(after_ms, bell):
    words = [sys.executable, "-c", BEGIN + STARTING, bell.path, str(after_ms / 1000)]
    command = Host(words, stdin=subprocess.PIPE, env={**os.environ, "NEW": NEW})
    try:
        assert command.number(b"new") == command.pid
        until(lambda: all(state_of(guard) == "Z" for guard in command.kids(GUARD)))
        assert not marked()
    finally:
        command.close()


UNSEEN = """
begin(ir.run, ["sleep", "1000"], bind="cores")
def kids():
    files = [f"/proc/self/task/{task}/children" for task in os.listdir("/proc/self/task")]
    return [pid for file in files for pid in open(file).read().split()]
while len(kids()) < 2:  # the guard and the rank
    time.sleep(0.001)
NEW = [sys.executable, "-c", os.environ["NEW"]]
""" + WAYS["with-sibling"]


@with_strace
def test_rank_unseen_by_guard_does_not_start_after_exec(bell, tmp_path):
    """strace holds it after its clone until the guard has given up. The sibling keeps the pipe to the guard open: so
    the rank can write its pid, which nobody reads."""
    inject = (
        "-e",
        "trace=sched_setaffinity",
        "-e",
        "inject=sched_setaffinity:delay_enter=7s",
    )  # nobody else calls it
    words = strace(tmp_path / "trace", "-f", *inject)
    command = Host(
        [*words, sys.executable, "-c", BEGIN + UNSEEN, bell.path],
        stdin=subprocess.PIPE,
        env={**os.environ, "NEW": NEW},
    )
    try:
        sibling, host = command.number(b"sibling"), command.number(b"new")
        kids = [pid for pid, (parent, *_) in processes().items() if parent == host and pid != sibling]
        assert len(kids) == 2
        until(lambda: not any(map(is_alive, kids)))
        assert is_alive(sibling)
    finally:
        command.close()


# ---- what is no exec of the host

NO_EXEC = {
    "exec-that-fails": """
for file in ("/no/such/program", "/etc/passwd", "/"):
    try:
        os.execv(file, [file])
    except OSError:
        pass
""",
    "exec-that-fails-in-a-thread": """
def fail():
    try:
        os.execv("/no/such/program", ["x"])
    except OSError:
        pass
thread = threading.Thread(target=fail)
thread.start()
thread.join()
""",
    "subprocess": """
for close in (True, False):
    subprocess.run(["true"], close_fds=close, check=True)
subprocess.run(["true"], preexec_fn=lambda: None, check=True)
os.waitpid(os.posix_spawn("/bin/true", ["true"], os.environ), 0)
os.system("true")
""",
    "fork": """
for end in (lambda: None, lambda: os.execv("/bin/true", ["true"]), lambda: os.closerange(3, 4096)):
    pid = os.fork()
    if pid == 0:
        end()
        os._exit(0)
    os.waitpid(pid, 0)
""",
    "fork-by-c": """
for end in (lambda: None, lambda: os.execv("/bin/true", ["true"]), lambda: os.closerange(3, 4096)):
    pid = ctypes.PyDLL(None)._Fork()
    if pid == 0:
        end()
        os._exit(0)
    os.waitpid(pid, 0)
""",
    "multiprocessing": """
for method in ("fork", "spawn", "forkserver"):
    process = multiprocessing.get_context(method).Process(target=time.sleep, args=(0,))
    process.start()
    process.join()
""",
}


@pytest.mark.parametrize("launch", ["process-launcher", "crew"])
@pytest.mark.parametrize("what", NO_EXEC)
def test_launch_lives_on_when_host_does_not_exec(host, what, launch):
    end = f"{NO_EXEC[what]}\nprint('done', os.getpid(), flush=True)\nsys.stdin.read()"
    command, busy = host(LAUNCHES[launch], end)
    command.go()
    assert command.number(b"done") == command.pid
    assert all(map(is_alive, busy))
    guards = command.kids(GUARD)
    assert guards
    assert not any(state_of(guard) in ("Z", "") for guard in guards)
    command.process.kill()
    until(lambda: not any(map(is_alive, busy)))


# ---- an end in order, before the exec

CLOSED = """
with ir.ProcessLauncher(["true"], nproc_per_node=2) as other:
    other.launch()
    other.wait()
with ir.Crew(lambda ctx, task: task, nproc=2) as idle:
    assert idle.ask(3).result() == 3
"""


def test_host_that_has_closed_execs_without_zombies(host):
    command, _ = host(CLOSED, WAYS["main"], count=0)
    command.go()
    assert command.number(b"new") == command.pid
    assert tuple(pid for pid, (parent, *_) in processes().items() if parent == command.pid) == command.others
    assert all(map(is_alive, command.others))


RELOADED = """
import os, sys
import infini_run as ir
with ir.ProcessLauncher(["sleep", "1000"], nproc_per_node=2, grace=0) as launcher:
    launcher.launch()
    print("new", os.getpid(), flush=True)
    sys.stdin.readline()
    print("alive", sum(one.end_s is None for one in launcher.status()), flush=True)
"""


def test_launch_of_new_program_lives_on(host):
    """The same process launches again, at once, as a program does that reloads itself."""
    command, busy = host(LAUNCHES["process-launcher"], WAYS["main"], new=RELOADED)
    command.go()
    assert command.number(b"new") == command.pid
    until(lambda: not any(map(is_alive, busy)))
    until(lambda: [state_of(guard) for guard in sorted(command.kids(GUARD))].count("Z") == 1)
    until(lambda: len(marked()) == 2)
    command.go()
    assert command.number(b"alive") == 2
    assert command.wait() == 0
