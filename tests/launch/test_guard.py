"""The guard: when the launcher itself is SIGKILLed, nothing that it started stays."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import infini_run
from infini_run.core.group import debug_flags
from infini_run.node import resources
from tests.support.cluster import writes_memory
from tests.support.command import COMMAND, Command, play
from tests.support.group_case import Live, spec
from tests.support.launch_shapes import strace, with_strace
from tests.support.processes import GUARD, OURS, is_alive, marked, processes, state_of
from tests.support.rows import FORK_STORM
from tests.support.waiting import until

STUBBORN = ["daemon", "ignore=TERM", "ignore=HUP", "name=left-behind", "say=stray", "wait", "done"]
MEEK = [*STUBBORN, "say=ready", "wait"]
PROGRAM = os.fsencode(Path(infini_run.__file__).parent / GUARD)


def guards_of(launcher):
    return [pid for pid, (parent, _, name) in processes().items() if parent == launcher and name == GUARD]


def guard_of(launcher):
    """Ranks do not wait for it; it may not be executed yet."""
    until(lambda: guards_of(launcher))
    (guard,) = guards_of(launcher)
    return guard


def pids_told(command, word, n):
    return [int(words[-1]) for words in command.read_lines(word, n)]


def switches(pid):
    """How often it has gone to sleep."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("voluntary_ctxt_switches")).split()[1])


def all_end(pids):
    until(lambda: not any(map(is_alive, pids)))


@pytest.fixture
def bystanders():
    """So many processes that a look at all of them takes a while."""
    script = "for i in $(seq 400); do sleep 1000 & done; echo; wait"
    shell = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, start_new_session=True)
    shell.stdout.readline()
    yield
    os.killpg(shell.pid, signal.SIGKILL)
    shell.wait()
    shell.stdout.close()


def kill(command):
    command.signal(signal.SIGKILL)
    assert command.wait() == -signal.SIGKILL


# ---- the launcher is killed


@pytest.mark.parametrize("ranks", [1, 8])
def test_daemons_of_a_killed_launcher_are_ended(infini_run, ranks, every_path):
    command = infini_run(f"--nproc_per_node={ranks}", *play(*STUBBORN, "say=ready", "wait"))
    pids = pids_told(command, b"stray", ranks) + pids_told(command, b"ready", ranks) + [guard_of(command.pid)]
    assert len(pids) == 2 * ranks + 1
    kill(command)
    all_end(pids)


def test_daemons_of_daemons_are_ended_when_their_rank_had_ended_before(infini_run, every_path):
    words = ["@0", "daemon", *STUBBORN, "say=stray", "wait", "done", "exit=0", "@1", "say=ready", "wait"]
    command = infini_run("--nproc_per_node=2", *play(*words))
    pids = pids_told(command, b"stray", 2)
    rank = command.pids_of(b"ready")[1]
    until(lambda: set(marked()) == {*pids, rank})  # rank 0 has ended, and all that forked the daemons
    kill(command)
    all_end([*pids, rank])


def test_launcher_killed_in_the_grace(infini_run, every_path):
    words = [*STUBBORN, "tell=TERM", "say=ready", "wait"]
    command = infini_run("--nproc_per_node=2", "--grace=1000", *play(*words))
    pids = pids_told(command, b"stray", 2) + pids_told(command, b"ready", 2)
    command.signal(signal.SIGTERM)
    command.read_lines(b"got TERM", 2)
    kill(command)
    all_end(pids)


def test_launcher_killed_while_it_waits_for_strays(infini_run, every_path):
    command = infini_run("--grace=1000", *play("daemon", "tell=TERM", "say=stray", "wait", "done", "exit=0"))
    pids = pids_told(command, b"stray", 1)
    command.read_lines(b"got TERM")
    kill(command)
    all_end(pids)


def test_launcher_killed_while_it_starts_ranks(infini_run, every_path):
    for _ in range(5):
        script = "echo started; (setsid sleep 1000 &); exec sleep 1000"
        command = infini_run("--nproc_per_node=32", "sh", "-c", script)
        command.read_until(b"started")
        kill(command)
        until(lambda: not marked())


def test_kill_of_the_launchers_whole_process_group(infini_run, every_path):
    """What `kill -9 %1` does in an interactive shell."""
    command = infini_run("--nproc_per_node=2", *play(*STUBBORN, "say=ready", "wait"), start_new_session=True)
    pids = pids_told(command, b"stray", 2) + pids_told(command, b"ready", 2)
    os.killpg(command.pid, signal.SIGKILL)
    assert command.wait() == -signal.SIGKILL
    all_end(pids)


UNMARKED = ["sh", "-c", "env -i sh -c 'echo member 0 $$; exec sleep 1000' & echo ready 0 $$; wait"]


def test_group_of_a_rank_is_ended_whatever_its_environment(infini_run, every_path):
    command = infini_run(*UNMARKED)
    pids = pids_told(command, b"member", 1) + pids_told(command, b"ready", 1)
    kill(command)
    all_end(pids)


@with_strace
def test_group_of_a_rank_is_known_before_the_launcher_goes_on(infini_run, every_path, tmp_path):
    """strace holds it just after its clone."""
    inject = ("-e", "trace=setpgid", "-e", "inject=setpgid:delay_enter=2s")
    command = infini_run(*UNMARKED, under=strace(tmp_path / "trace", *inject))
    pids = pids_told(command, b"member", 1) + pids_told(command, b"ready", 1)
    kill(command)
    all_end(pids)


@pytest.mark.parametrize(
    "flags", [(), pytest.param(("--isolate",), marks=pytest.mark.root), ("--engine=local", "--max_restarts=1")]
)
def test_error_folder_of_a_killed_launcher_is_removed(infini_run, flags):
    """Whatever its ranks have made in it."""
    script = 'f=$TORCHELASTIC_ERROR_FILE; echo folder "$(dirname "$f")"; : > "$f"; mkdir -p "$f.d/.hidden/x"; '
    script += 'ln -s / "$f.d/link"; echo; exec sleep 1000'
    command = infini_run(*flags, "sh", "-c", script)
    folder = Path(command.read_lines(b"folder")[0][1])
    command.read_until(b"\n\n")
    assert list(folder.iterdir())
    kill(command)
    until(lambda: not folder.exists())


@writes_memory
def test_error_folder_that_nobody_was_left_to_remove_goes_with_the_next_launch(infini_run):
    """Launcher and guard killed in one stroke, as Slurm does with a step; a folder whose launcher lives stays."""
    env = {name: value for name, value in os.environ.items() if name != "TMPDIR"}
    script = 'echo folder "$(dirname "$TORCHELASTIC_ERROR_FILE")"; exec sleep 1000'
    commands = [infini_run("sh", "-c", script, env=env) for _ in range(2)]
    dead, living = (Path(command.read_lines(b"folder")[0][1]) for command in commands)
    assert dead.parent == Path("/dev/shm")
    guard = guard_of(commands[0].pid)
    os.kill(guard, signal.SIGKILL)
    kill(commands[0])
    (dead / "rank_0.error.json").write_text("{}")
    assert infini_run("true", env=env).wait() == 0
    assert dead.exists()  # it may be one whose launcher is about to lock it
    for folder in (dead, living):
        os.utime(folder, (0, 0))
    assert infini_run("true", env=env).wait() == 0
    until(lambda: not dead.exists())  # a launch of another test may be removing it just now
    assert living.exists()
    kill(commands[1])
    until(lambda: not living.exists())


@writes_memory
@pytest.mark.parametrize(
    "within", ["", "-1", ".2", ".2-1", ".ir-0123456789ab", ".1.ir-0123456789ab-1", "-1.ir-0123456789ab"]
)
def test_what_attempts_nodes_and_workers_have_left_goes_too(infini_run, within):
    env = {name: value for name, value in os.environ.items() if name != "TMPDIR"}
    folder = Path(f"/dev/shm/infini-run-ir-{os.getpid():012x}{within}")
    folder.mkdir(0o700)
    (folder / "rank_0.error.json.stack").touch()
    os.utime(folder, (0, 0))
    assert infini_run("true", env=env).wait() == 0
    until(lambda: not folder.exists())


@writes_memory
@with_strace
def test_ranks_do_not_wait_until_abandoned_folders_are_removed(infini_run, tmp_path):
    env = {name: value for name, value in os.environ.items() if name != "TMPDIR"}
    folder, trace = Path(f"/dev/shm/infini-run-ir-{os.getpid():012x}"), tmp_path / "trace"
    folder.mkdir(0o700)
    os.utime(folder, (0, 0))
    under = strace(trace, "-e", "trace=clone,clone3,open,openat")
    assert infini_run("--nproc_per_node=2", "true", env=env, under=under).wait() == 0
    until(lambda: not folder.exists())
    text = trace.read_text()
    clones = [found.start() for found in re.finditer(r"clone3?\(", text)]
    assert len(clones) == 3  # the guard's, too
    assert text.find('"/dev/shm", ', clones[-1]) > 0
    assert '"/dev/shm", ' not in text[: clones[-1]]


def test_folders_of_launches_that_have_just_begun_cost_another_one_no_import(tmp_path):
    """Where many begin, each would read what only removes them."""
    (tmp_path / "infini-run-ir-0123456789ab").mkdir(0o700)
    looks = "import sys; from infini_run.node import resources; resources.MEMORY = sys.argv[1]; "
    looks += "resources._remove_abandoned(); assert not {'re', 'shutil', 'fcntl', 'os'} & set(sys.modules)"
    env = {"PYTHONPATH": str(Path(infini_run.__file__).parent.parent)}
    subprocess.run([sys.executable, "-S", "-c", looks, str(tmp_path)], cwd="/", env=env, check=True)
    assert list(tmp_path.iterdir())


def test_look_for_abandoned_folders_is_bounded(tmp_path, monkeypatch):
    """A stranger may make folders of such names without end."""
    for number in range(resources.MOST_SEEN + 50):
        (tmp_path / f"infini-run-ir-{number:012x}").mkdir(0o700)
        os.utime(tmp_path / f"infini-run-ir-{number:012x}", (0, 0))
    monkeypatch.setattr(resources, "MEMORY", str(tmp_path))
    resources._remove_abandoned()
    assert len(list(tmp_path.iterdir())) == 50


@writes_memory
def test_a_folder_that_is_not_ours_alone_is_no_launch_s(infini_run):
    """A log folder of that name, or a user's own."""
    env = {name: value for name, value in os.environ.items() if name != "TMPDIR"}
    theirs = [Path(f"/dev/shm/infini-run-{name}{os.getpid()}") for name in ("logs-", "ir-")]
    open_to_all = Path(f"/dev/shm/infini-run-ir-{os.getpid():012x}")
    try:
        for folder in (*theirs, open_to_all):
            folder.mkdir(0o755 if folder == open_to_all else 0o700)
            os.utime(folder, (0, 0))
        assert infini_run("true", env=env).wait() == 0
        assert all(folder.exists() for folder in (*theirs, open_to_all))
    finally:
        for folder in (*theirs, open_to_all):
            folder.rmdir()


@writes_memory
def test_folder_of_isolated_launch_with_logs_is_removed_after_sigkill(infini_run, tmp_path):
    """Its processes end with the kernel's help, and the guard removes the folder."""
    command = infini_run("--isolate", f"--log_dir={tmp_path}", *play(*STUBBORN, "ask=mark", "say=ready", "wait"))
    command.read_until(b"ready")
    folder = Path(f"/dev/shm/infini-run-{command.out.partition(b'mark ')[2].split()[0].decode()}")
    assert folder.exists()
    kill(command)
    until(lambda: not marked() and not folder.exists())


# ---- what is not ours


def test_a_killed_inner_launcher_takes_only_its_own(infini_run, every_path):
    inner = [*COMMAND, *play(*STUBBORN, "say=inner", "wait")]
    script = 'if [ "$RANK" = 0 ]; then "$@" & echo launcher 0 $!; wait; fi; echo outer $RANK $$; exec sleep 1000'
    command = infini_run("--nproc_per_node=2", "sh", "-c", script, "sh", *inner)
    ours = pids_told(command, b"stray", 1) + pids_told(command, b"inner", 1)
    os.kill(pids_told(command, b"launcher", 1)[0], signal.SIGKILL)
    all_end(ours)
    outer = pids_told(command, b"outer", 2)
    assert all(map(is_alive, outer))
    command.signal(signal.SIGTERM)
    assert command.wait() == 143


def test_a_killed_outer_launcher_takes_the_inner_one_with_all_that_it_started(infini_run, every_path):
    inner = [*COMMAND, *play(*STUBBORN, "say=inner", "wait")]
    command = infini_run("sh", "-c", 'env -i "$@" & wait', "sh", *inner)
    pids = pids_told(command, b"stray", 1) + pids_told(command, b"inner", 1)
    kill(command)
    all_end(pids)


def test_somebody_who_looks_at_the_launch_with_its_variables_is_not_touched(infini_run):
    command = infini_run("sh", "-c", 'echo id 0 "$INFINI_RUN_ID"; echo ready 0 $$; exec sleep 1000')
    rank = pids_told(command, b"ready", 1)
    mark = command.read_lines(b"id")[0][-1]
    onlooker = subprocess.Popen(["sleep", "1000"], env={**os.environ, "INFINI_RUN_ID": mark})
    guard = guard_of(command.pid)
    try:
        kill(command)
        all_end([*rank, guard])
        assert onlooker.poll() is None
    finally:
        onlooker.kill()
        onlooker.wait()


def test_a_program_with_a_pid_namespace_for_its_children_has_them_run_as_without_us(tmp_path):
    """unshare --pid without --fork: the first child is process 1 there, and must be a rank."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    # process 1 there takes the others with it: it waits until they have gone, and starts nobody who would be number 2
    os.mkfifo(tmp_path / "here")
    script = f"echo $RANK $$; cd {tmp_path}; if [ $RANK = 1 ]; then echo >here; else read line <here; "
    script += "while kill -0 2 2>&-; do sleep 0.01; done; fi"
    words = ["unshare", "--pid", *COMMAND, "--nproc_per_node=2", "sh", "-c", script]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    assert (done.returncode, sorted(done.stdout.split(b"\n"))) == (0, [b"", b"0 1", b"1 2"])
    assert done.stderr == b""


@FORK_STORM
@pytest.mark.rows(2)
def test_processes_that_fork_and_exit_without_end_are_ended(infini_run, tmp_path, bystanders, every_path):
    """Their list is longer than one of them lives: no look at /proc finds them where it says."""
    beat = tmp_path / "beat"
    beat.touch()
    command = infini_run(*play("say=ready", *4 * ["daemon", f"hop={beat}", "done"], "wait"))
    command.read_lines(b"ready")
    first = beat.stat().st_mtime_ns
    until(lambda: beat.stat().st_mtime_ns != first)
    kill(command)
    try:
        until(lambda: not marked())
        last = beat.stat().st_mtime_ns
        assert not any(marked() for _ in range(20))
        assert beat.stat().st_mtime_ns == last
    finally:
        beat.unlink()  # without it they end by themselves


# ---- the guard itself


def test_guard_holds_nothing_and_sleeps_in_one_call(infini_run, tmp_path, gate):
    shared = gate()
    command = infini_run(*play("say=ready", "wait"), gates=(shared,), cwd=tmp_path)
    command.read_lines(b"ready")
    guard = guard_of(command.pid)
    until(lambda: len(os.listdir(f"/proc/{guard}/fd")) == 3)
    held = [os.readlink(f"/proc/{guard}/fd/{fd}") for fd in range(3)]
    assert held[0].startswith("pipe:")
    assert held[1:] == ["/dev/null", "/dev/null"]
    until(lambda: os.readlink(f"/proc/{guard}/cwd") == "/")
    assert Path(f"/proc/{guard}/environ").read_bytes() == b""
    until(lambda: state_of(guard) == "S")
    slept = switches(guard)
    command.signal(signal.SIGUSR2)  # work for the launcher, none for its guard
    command.signal(signal.SIGTERM)
    assert command.wait() in (140, 143)
    assert slept <= 3
    assert not is_alive(guard)


def test_process_1_has_no_guard(infini_run):
    command = infini_run(*play("ask=pids", "exit=0"), under=("unshare", "--pid", "--fork", "--mount-proc"))
    assert command.wait() == 0
    assert command.out.split() == [b"pids", b"2", b"0", b"2"]  # process 1 and its rank


def test_guard_that_is_killed_is_missed_and_the_job_goes_on(infini_run, gate, every_path):
    done = gate()
    command = infini_run(*play("say=ready", f"hold={done}", "exit=3"), gates=(done,))
    command.read_lines(b"ready")
    guard = guard_of(command.pid)
    os.kill(guard, signal.SIGKILL)
    command.read_error_until(b"no guard (it was killed): if infini-run is SIGKILLed")
    done.open()
    assert command.wait() == 3


def test_guard_that_cannot_be_executed_is_told(every_path, gate):
    done = gate()
    os.set_inheritable(done.fd, True)
    words = play(f"hold={done}", "exit=0")
    with Live(size=1, guard=b"/no/such/guard", debug=debug_flags(os.environ)) as live:
        live.spawn(spec(0, *words))
        if "nopidfd" not in every_path:  # there, in a library, nothing tells of its end
            live.until(lambda: live.of("unguarded"))
            (event,) = live.of("unguarded")
            assert event.signal == errno.ENOENT
        done.open()
        live.end()
        assert live.of("exited")[0].code == 0


def test_guard_started_by_hand_says_what_it_is():
    done = subprocess.run([PROGRAM], capture_output=True, check=False)
    assert done.returncode == 2
    assert done.stderr.endswith(b"started by infini-run, for infini-run\n")


# ---- a guard that waits for what ends by itself, as srun does

WAITS = """
import os, sys
from infini_run.core.c_structs import INHERIT, SpawnSpec
from infini_run.core.group import GUARD, Group, debug_flags
group = Group(1, mark=b"", grace_s=0, stop_signal=15, stop_scope="group", guard=GUARD,
              guard_wait_s=float(sys.argv[1]), debug=debug_flags(os.environ))
words = [b"/bin/sh", b"-c", b"sleep 1000 & echo child 0 $!; echo worker 0 $$; read line"]
spec = SpawnSpec(0, words[0], words)
spec.stdio, spec.label = [int(sys.argv[2]), INHERIT, INHERIT], ((b"", b""), (b"", b""))
group.spawn([spec], [os.fsencode(f"{name}={value}") for name, value in os.environ.items()])
sys.stdin.readline()
os.execv("/bin/sleep", ["sleep", "1000"])
"""


@pytest.fixture(params=["kill", "exec"])
def waiting(gate, request):
    """A program with a worker that ends when the gate opens, and a child of that; the program is killed, or executes
    another one."""
    commands, children = [], []

    def start(wait_s):
        end = gate()
        argv = [sys.executable, "-c", WAITS, str(wait_s), str(end)]
        command = Command(argv, stdin=subprocess.PIPE, env={**os.environ, **dict([OURS])}, pass_fds=[end.fd])
        commands.append(command)
        children.extend(pids_told(command, b"child", 1))
        worker, guard = *pids_told(command, b"worker", 1), guard_of(command.pid)
        until(lambda: state_of(guard) == "S")
        before = switches(guard)
        if request.param == "exec":
            command.process.stdin.write(b"\n")
            command.process.stdin.flush()
        else:
            command.signal(signal.SIGKILL)
            command.process.wait()  # its output goes on as long as the child has it
        return worker, children[0], guard, end, before

    yield start
    for child in children:
        os.kill(child, signal.SIGKILL)
    for command in commands:
        command.close()


def test_a_worker_that_ends_by_itself_is_not_killed_meanwhile_and_nothing_else_is(waiting, every_path):
    worker, child, guard, end, before = waiting(1000)
    until(lambda: switches(guard) > before)  # it sleeps again
    assert is_alive(worker)
    end.open()
    all_end([worker, guard])
    assert is_alive(child)


def test_a_worker_that_does_not_end_by_itself_is_killed_alone(waiting, every_path):
    worker, child, guard, *_ = waiting(0.2)
    all_end([worker, guard])
    assert is_alive(child)


# ---- in a library

HOST = """
import os, sys, threading
import infini_run as ir
launcher = ir.ProcessLauncher(sys.argv[1:], nproc_per_node=2, grace=0)
thread = threading.Thread(target=launcher.launch)
thread.start()
thread.join()
print("launched 0", os.getpid(), flush=True)
{end}
"""


@pytest.fixture
def host(tmp_path):
    """A program whose ranks were launched by a thread that has ended, and how it ends itself."""
    hosts = []

    def start(end, *words):
        argv = [sys.executable, "-c", HOST.format(end=end), *play(*words)]
        hosts.append(subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        lines = [hosts[-1].stdout.readline().decode().split() for _ in range(5)]
        pids = [int(words[-1]) for words in lines if words[0] in ("ready", "stray")]
        assert len(pids) == 4
        assert all(map(is_alive, pids))
        return hosts[-1], pids

    yield start
    for one in hosts:
        one.kill()
        one.wait()
        one.stdin.close()
        one.stdout.close()


def test_ranks_launched_by_a_thread_that_has_ended_outlive_it_but_not_the_program(host, every_path):
    program, pids = host("sys.stdin.read()", *STUBBORN, "say=ready", "wait")
    program.kill()
    program.wait()
    all_end(pids)


@pytest.mark.parametrize("leave", ["os._exit(0)", "sys.exit(0)", "raise KeyboardInterrupt"])
@pytest.mark.rows(4)
def test_ranks_of_a_program_that_just_leaves_are_ended(host, leave, every_path):
    program, pids = host(f"sys.stdin.readline(); {leave}", *STUBBORN, "say=ready", "wait")
    program.communicate(b"\n")
    all_end(pids)


@pytest.mark.parametrize("way", ["sys.exit(0)", "launcher.close(); os._exit(0)", "launcher.kill(); os._exit(0)"])
@pytest.mark.rows(4)
def test_a_child_that_the_host_forked_ends_and_the_launch_goes_on(host, way, every_path):
    fork = f"pid = os.fork()\nif not pid:\n    {way}\nos.waitpid(pid, 0)\n"
    program, pids = host(f"sys.stdin.readline()\n{fork}print('waited', flush=True)\nsys.stdin.read()", *MEEK)
    program.stdin.write(b"\n")
    program.stdin.flush()
    assert program.stdout.readline() == b"waited\n"
    assert all(map(is_alive, pids))
    program.communicate(b"")
    all_end(pids)


def test_a_child_that_the_host_forked_does_not_hold_the_guard_back(host):
    fork = "sys.stdin.readline()\npid = os.fork()\nif pid: print(pid, flush=True)\nsys.stdin.read()"
    program, pids = host(fork, *STUBBORN, "say=ready", "wait")
    program.stdin.write(b"\n")
    program.stdin.flush()
    child = int(program.stdout.readline())
    program.kill()
    program.wait()
    all_end(pids)
    assert is_alive(child)  # until its stdin ends, with the test


def test_library_does_not_touch_a_child_of_the_host_that_has_the_mark(tmp_path):
    script = f"echo $INFINI_RUN_ID > {tmp_path}/id; exec sleep 1000"
    with infini_run.ProcessLauncher(["sh", "-c", script], grace=0.2) as launcher:
        launcher.launch()
        until(lambda: (tmp_path / "id").exists() and (tmp_path / "id").read_text().endswith("\n"))
        mark = (tmp_path / "id").read_text().strip()
        mine = subprocess.Popen(["sleep", "1000"], env={**os.environ, "INFINI_RUN_ID": mark})
    try:
        assert mine.poll() is None
    finally:
        mine.kill()
        mine.wait()


def test_library_leaves_no_guard_behind():
    with infini_run.ProcessLauncher(play("wait"), nproc_per_node=2) as launcher:
        launcher.launch()
        until(lambda: len(guards_of(os.getpid())) == 1)
        launcher.terminate()
        launcher.wait()
        assert not guards_of(os.getpid())
