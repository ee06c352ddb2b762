"""Functions on real ssh hosts: results and failures by rank and host, and nothing left anywhere, whatever dies."""

from __future__ import annotations

import multiprocessing
import os
import pwd
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.shared_memory import SharedMemory

import pytest

import infini_run as ir
from tests.multinode.test_elastic_ssh import launcher_of, process_of
from tests.support.cluster import writes_memory
from tests.support.command import Command
from tests.support.hosts import Bed, agents
from tests.support.paths import ROOT
from tests.support.processes import GUARD, children, marked, processes, state_of, written
from tests.support.waiting import LIMIT_S, until

pytestmark = pytest.mark.xdist_group(__name__)  # one bed for all of them


@pytest.fixture(scope="module")
def bed():
    bed = Bed(hosts=2)
    yield bed
    bed.close()


@pytest.fixture(autouse=True)
def no_agent_left():
    yield
    until(lambda: not agents())


@pytest.fixture
def launcher(bed):
    def make(hosts=("host1", "host2"), nproc=2, **more):
        return ir.Launcher(list(hosts), nproc, engine="ssh", ssh_config=str(bed.config), **more)

    return make


def outposts():
    return [pid for pid, words in _words() if "crews.spawn.spawn_server" in words]


def _words():
    for pid in marked():
        try:
            with open(f"/proc/{pid}/cmdline") as file:
                yield pid, file.read()
        except OSError:
            continue


# ---- hangs


@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.parametrize("preload", [(), ["fractions"]])
def test_a_hang_on_a_host_is_told_with_its_stack(launcher, preload, nproc):
    """Descriptors come and go on the host while the hang is looked into."""

    def hang():
        time.sleep(3600)

    with pytest.raises(ir.WorkerDied, match=r"hung: .*; stopped") as caught:
        launcher(nproc=nproc, preload=preload, hang_timeout=1, on_hang="stop", timeout_s=LIMIT_S).run(hang)
    assert any(frame.endswith("in hang") for frame in caught.value.exit.python_stack)


# ---- results


@writes_memory
def test_workers_of_one_host_share_tracker_and_authkey_of_their_spawn_server(bed):
    """The caller's key crosses no network."""

    def make():
        block = SharedMemory(create=True, size=1)
        block.close()
        return block.name

    def read(name):
        SharedMemory(name=name).close()

    def remove(name):
        if ir.this_worker().rank:
            return
        block = SharedMemory(name=name)
        block.close()
        block.unlink()

    def key():
        return bytes(multiprocessing.current_process().authkey)

    with ir.Pool(["host1"], 2, engine="ssh", ssh_config=str(bed.config)) as pool:
        names = list(pool.run(make))
        for name in (*names, names[0]):
            pool.run(read, name)
        keys = {*pool.run(key), *pool.run(key)}
        for name in names:
            pool.run(remove, name)
    assert len(keys) == 1
    assert keys != {key()}


def test_results_are_found_by_rank_and_by_host(launcher):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NNODES", "MASTER_ADDR")

    def place():
        return [os.uname().nodename, *(os.environ[name] for name in names)]

    result = launcher().run(place)
    assert list(result) == [
        [f"host{node + 1}", str(2 * node + local), "4", str(local), "2", str(node), "2", "127.0.78.1"]
        for node in range(2)
        for local in range(2)
    ]
    assert result.hosts == ("host1", "host2")
    assert result.index("host2", 1) == result.rank(3)


def test_all_ranks_meet_at_a_port_that_is_theirs_alone(launcher):
    def meeting():
        return os.environ["MASTER_PORT"]

    first, second = (set(launcher(nproc=1).run(meeting)) for _ in range(2))
    assert len(first) == len(second) == 1
    assert "29500" not in first | second
    assert set(launcher(nproc=1, rdzv_endpoint="host1:4711").run(meeting)) == {"4711"}


def test_hosts_with_room_for_different_numbers_have_so_many_workers(launcher):
    def place():
        return os.environ["RANK"], os.environ["LOCAL_WORLD_SIZE"], os.environ["WORLD_SIZE"], os.uname().nodename

    assert list(launcher(hosts=["host1:2", "host2:1"], nproc=None).run(place)) == [
        ("0", "2", "3", "host1"), ("1", "2", "3", "host1"), ("2", "1", "3", "host2"),
    ]  # fmt: skip


def test_hosts_may_have_different_numbers_of_workers(launcher):
    def place():
        return (
            os.uname().nodename, os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_WORLD_SIZE"]
        )  # fmt: skip

    assert list(launcher(nproc=[2, 1]).run(place)) == [
        ("host1", "0", "3", "2"),
        ("host1", "1", "3", "2"),
        ("host2", "2", "3", "1"),
    ]


def test_as_many_workers_as_a_host_has_cores(launcher):
    result = launcher(nproc="cpu").run(lambda: os.environ["WORLD_SIZE"])
    assert len(result) == 2 * len(os.sched_getaffinity(0))
    assert set(result) == {str(len(result))}


def test_a_large_result_comes_whole(launcher):
    size = 50 << 20

    def make():
        return os.environ["RANK"].encode() * size

    result = launcher(nproc=1).run(make)
    assert [len(data) for data in result] == [size, size]
    assert [data.count(str(rank).encode()) for rank, data in enumerate(result)] == [size, size]


def test_large_arguments_come_whole_to_every_rank(launcher):
    data = os.urandom(1 << 20) * 20

    def check(data):
        import hashlib

        return hashlib.sha256(data).hexdigest()

    import hashlib

    assert set(launcher().run(check, data)) == {hashlib.sha256(data).hexdigest()}


def test_arguments_cross_the_link_once_for_each_node(bed):
    """What ssh has written is what has crossed: two nodes' copies, for eight ranks."""
    size = 16 << 20
    with ir.Pool(["host1", "host2"], 4, engine="ssh", ssh_config=str(bed.config)) as pool:
        assert list(pool.run(len, os.urandom(size))) == [size] * 8
        crossed = sum(written(pid) for pid, name in children().items() if name.split()[0] == "ssh")
    assert 2 * size <= crossed < 3 * size


def test_output_is_labelled_with_host_and_rank(launcher, capfd):
    def say():
        print("said", os.environ["RANK"])
        print("complained", file=sys.stderr)

    launcher(nproc=1).run(say)
    said = capfd.readouterr()
    assert sorted(said.out.splitlines()) == ["[host1:0] said 0", "[host2:1] said 1"]
    assert sorted(said.err.splitlines()) == ["[host1:0 err] complained", "[host2:1 err] complained"]


def test_logs_are_written_on_the_hosts(launcher, tmp_path):
    launcher(log_dir=tmp_path / "logs", console="none").run(lambda: print("said", os.environ["RANK"]))
    found = {path.name: path.read_text() for path in (tmp_path / "logs").iterdir() if path.suffix == ".log"}
    assert found == {f"rank_{rank}.log": f"said {rank}\n" for rank in range(4)}


def test_logging_records_come_with_rank_and_host(launcher, caplog):
    import logging

    def log():
        logging.getLogger("far").warning("here is %s", os.uname().nodename)

    launcher(nproc=1, log_level="INFO").run(log)
    found = {(record.rank, record.host, record.getMessage()) for record in caplog.records if record.name == "far"}
    assert found == {(0, "host1", "here is host1"), (1, "host2", "here is host2")}


def test_workers_are_forked_where_modules_are_preloaded(launcher):
    def parent():
        with open(f"/proc/{os.getppid()}/cmdline") as file:
            return "zygote" in file.read(), "fractions" in sys.modules, os.uname().nodename

    assert set(launcher(preload=["fractions"]).run(parent)) == {(True, True, "host1"), (True, True, "host2")}


def test_variables_are_set_on_every_host(launcher, monkeypatch):
    monkeypatch.setenv("NOT_COPIED", "1")
    monkeypatch.setenv("HF_HOME", "/hf")
    made = launcher(nproc=1, env={"MINE": "a b"})
    got = made.run(lambda: [os.environ.get(name) for name in ("MINE", "HF_HOME", "NOT_COPIED", "HOME")])
    home = pwd.getpwuid(os.getuid()).pw_dir  # a login's, whatever ours says
    assert list(got) == [["a b", "/hf", None, home]] * 2


def test_a_pool_holds_its_hosts_for_several_launches(bed):
    with ir.Pool(["host1", "host2"], 1, engine="ssh", ssh_config=str(bed.config)) as pool:
        held = sorted(outposts())
        results = [list(pool.run(lambda i: (os.environ["RANK"], i, os.environ["MASTER_PORT"]), i)) for i in range(3)]
        assert sorted(outposts()) == held
    assert [[(rank, i) for rank, i, _ in each] for each in results] == [[("0", i), ("1", i)] for i in range(3)]
    assert len({port for each in results for _, _, port in each}) == 3
    with pytest.raises(ir.UsageError, match="closed"):
        pool.run(os.getpid)


def test_several_launches_at_once_from_threads(bed):
    found = {}
    with ir.Pool(["host1", "host2"], 2, engine="ssh", ssh_config=str(bed.config)) as pool:

        def launch(i):
            found[i] = list(pool.run(lambda: (i, int(os.environ["RANK"]))))

        threads = [threading.Thread(target=launch, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
    assert found == {i: [(i, rank) for rank in range(4)] for i in range(4)}


# ---- failures


def test_what_a_rank_raises_is_raised_here_with_rank_host_and_remote_traceback(launcher):
    def fail():
        if os.environ["RANK"] == "3":
            raise KeyError("no such thing")
        time.sleep(1000)

    begun = time.monotonic()
    with pytest.raises(KeyError, match="no such thing") as caught:
        launcher().run(fail)
    assert time.monotonic() - begun < LIMIT_S
    assert (caught.value.rank, caught.value.host) == (3, "host2")
    assert "on rank 3, host2:\nTraceback" in caught.value.__notes__[0]
    assert 'raise KeyError("no such thing")' in caught.value.__notes__[0] or "in fail" in caught.value.__notes__[0]


def test_a_rank_that_is_killed_is_told_with_host_signal_and_last_words(launcher):
    def die():
        if os.environ["RANK"] == "1":
            print("oh dear", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(1000)

    with pytest.raises(ir.WorkerDied, match=r"rank 1 on host1 ended without a result: killed by SIGSEGV") as caught:
        launcher().run(die)
    assert caught.value.host == "host1"
    assert caught.value.signal == signal.SIGSEGV
    assert caught.value.last_lines == ("oh dear",)


def test_a_rank_that_just_ends_is_a_failure(launcher):
    with pytest.raises(ir.WorkerDied, match=r"rank . on host. ended without a result: exit code 0"):
        launcher(nproc=1).run(lambda: os._exit(0))


def test_the_first_failure_in_time_is_raised_whichever_node_it_is_on(launcher, tmp_path):
    def fail(path):
        if os.environ["RANK"] == "0":
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # it is to fail, too
            with open(path) as file:
                file.read()
            time.sleep(0.1)  # more than two clocks are apart by estimate
            raise ValueError("second")
        os.open(path, os.O_WRONLY)  # until this process has ended
        raise LookupError("first")

    os.mkfifo(tmp_path / "held")
    with pytest.raises(LookupError, match="first"):
        launcher(nproc=1).run(fail, str(tmp_path / "held"))


def test_an_unreachable_host_is_told_as_by_the_command(launcher):
    with pytest.raises(
        ir.NodeLost,
        match=r"node 1 \(nowhere\) could not be reached: ssh exited "
        r"with 255: ",
    ) as caught:
        launcher(hosts=["host1", "nowhere"]).run(os.getpid)
    assert (caught.value.host, caught.value.node) == ("nowhere", 1)


def test_a_host_without_infini_run_is_told_as_by_the_command(launcher):
    with pytest.raises(ir.NodeLost, match=r"\(host1\) did not join: .*; add remote_python="):
        launcher(hosts=["host1"], remote_python="/no/such/python").run(os.getpid)


def test_another_version_is_told_as_by_the_command(launcher, tmp_path):
    python = tmp_path / "python"
    python.write_text(
        f"#!{sys.executable}\nimport sys, infini_run.version as v\nv.VERSION = '0.0.9'\n"
        "from infini_run.multinode.agent_main import run; run()\n"
    )
    python.chmod(0o755)
    with pytest.raises(ir.UsageError, match=r"host1: infini-run 0\.0\.9 is on host1"):
        launcher(hosts=["host1"], remote_python=str(python)).run(os.getpid)


def test_a_module_that_cannot_be_preloaded_is_told_with_the_host(launcher):
    with pytest.raises(ir.UsageError, match=r"host.: preload: no_such_module cannot be imported"):
        launcher(preload=["no_such_module"]).run(os.getpid)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"nproc": [1, 2, 3]}, "3 numbers for 2 hosts"),
        ({"hosts": ["host1:1"], "nproc": 2}, "the 1 slot of host1"),
        ({"grace": "x"}, "grace"),
        ({"standalone": True}, "standalone"),
        ({"cwd": "/no/such/dir"}, "/no/such/dir on host.*use a directory that every node has"),
    ],
)
def test_what_makes_no_sense_is_refused(launcher, given, words):
    with pytest.raises(ir.UsageError, match=words):
        launcher(**given).run(os.getpid)


# ---- what dies


def _ring(path):
    """On a rank: say that it is there, and stay."""
    with open(path, "w") as file:
        file.write("here\n")
    time.sleep(1000)


def test_a_node_that_dies_ends_all_and_is_named(bed, launcher, bell):
    handle = launcher().start(_ring, bell.path)
    try:
        bell.hear(4)
        with bed.host_down(2), pytest.raises(ir.NodeLost, match=r"lost node 1 \(host2\)") as caught:
            handle.result(LIMIT_S)
    finally:
        handle.close()
    assert (caught.value.host, caught.value.node) == ("host2", 1)
    until(lambda: not marked(), LIMIT_S)


@pytest.mark.parametrize("who", ["agent", "outpost"])
def test_what_holds_a_node_and_is_killed_is_a_lost_node(launcher, bell, who):
    handle = launcher().start(_ring, bell.path)
    try:
        bell.hear(4)
        os.kill(next(iter(agents())) if who == "agent" else outposts()[0], signal.SIGKILL)
        with pytest.raises(ir.NodeLost, match=r"lost node . \(host.\)"):
            handle.result(LIMIT_S)
    finally:
        handle.close()


LATE = """
import sys
sys.path.insert(0, {tests!r})
import infini_run as ir
from tests.crews.test_function_nodes import _speak
try:
    ir.Launcher(["host1", "host2"], 1, engine="ssh", ssh_config={config!r}).run(_speak, {path!r}, {gate!r})
except ir.NodeLost as error:
    print(error, *error.__notes__, sep="\\n")
"""


def _speak(path, gate):
    """On a rank: say that it is there, and stay; rank 0 writes a line when the gate is opened."""
    with open(path, "w") as file:
        file.write("here\n")
    if os.environ["RANK"] == "0":
        with open(gate) as file:
            print(file.read(), flush=True)
    time.sleep(1000)


def test_a_node_is_lost_before_a_rank_that_its_loss_ends_though_the_caller_reads_both_late(bed, bell, tmp_path):
    """The last that a node has sent is no younger because a busy caller reads it late."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    words = LATE.format(tests=str(ROOT), config=str(bed.config), path=bell.path, gate=str(gate))
    caller = Command([sys.executable, "-c", words])
    try:
        bell.hear(2)
        agent, spawn_server = launcher_of(0), process_of(1)
        started = {pid: name for pid, (parent, _, name) in processes().items() if parent == spawn_server}
        (rank_1,) = (pid for pid, name in started.items() if name != GUARD)
        caller.suspend()
        before = written(agent)
        gate.write_text("the last of rank 0")
        until(lambda: written(agent) > before)
        os.kill(agent, signal.SIGKILL)
        os.kill(rank_1, signal.SIGTERM)
        until(lambda: state_of(rank_1) in ("", "Z"))
        caller.signal(signal.SIGCONT)
        assert caller.wait() == 0, caller.err
    finally:
        caller.close()
    lost, later = (line for line in caller.out.decode().splitlines() if "the last of rank 0" not in line)
    assert lost.startswith("lost node 0 (host1)")
    assert later.startswith("later: rank 1 on host2 ended without a result: killed by SIGTERM")


@pytest.mark.parametrize(("how", "told"), [("ValueError", ValueError), ("Cancelled", ir.RemoteError)])
def test_a_node_that_is_lost_after_a_failure_with_which_all_went_on_is_not_the_cause(
    launcher, bell, tmp_path, how, told
):
    """Its last heartbeat may be from long before the failure; it is asked for another one then. The failure is dated
    by the rank's host (what it raised) or here (Cancelled)."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)

    def run(path):
        with open(path, "w") as file:
            file.write("here\n")
        if os.environ["RANK"] == "0":
            time.sleep(1000)
        with open(gate):
            raise ValueError("the first failure") if how == "ValueError" else ir.Cancelled("the first failure")

    handle = launcher(nproc=1, keep_going=True, node_timeout=3600).start(run, bell.path)
    try:
        bell.hear(2)
        gate.write_text("")
        launch = handle._launch
        until(lambda: launch.failures)
        until(lambda: launch.workers[0].process.node.peer.alive_wall_s > launch.failures[0].time_s)
        os.kill(launcher_of(0), signal.SIGKILL)
        with pytest.raises(told, match=r"the first failure|raised infini_run\.Cancelled") as caught:
            handle.result(LIMIT_S)
    finally:
        handle.close()
    assert [note for note in caught.value.__notes__ if "lost node 0 (host1)" in note]


CALLER = """
import sys
sys.path.insert(0, {tests!r})
import infini_run as ir
from tests.crews.test_function_nodes import _ring
ir.Launcher(["host1", "host2"], 2, engine="ssh", ssh_config={config!r}, preload={preload!r}).run(_ring, {path!r})
"""


@pytest.mark.parametrize("preload", [(), ("fractions",)])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_caller_that_is_killed_leaves_nothing_anywhere(bed, bell, number, preload):
    tests = str(ROOT)
    words = CALLER.format(tests=tests, config=str(bed.config), path=bell.path, preload=preload)
    caller = Command([sys.executable, "-c", words])
    try:
        bell.hear(4)
        caller.signal(number)
        caller.wait()
        until(lambda: not marked() and not agents(), LIMIT_S)
    finally:
        caller.close()


EXEC = """
import os, sys, threading
import infini_run as ir

REACHED = {{"hosts": ["host1", "host2"], "engine": "ssh", "ssh_config": {config!r}}}
BELL = {path!r}

def busy(ctx=None, task=None, bell=BELL):
    import signal, subprocess, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen(["setsid", "sleep", "1000"])
    with open(bell, "w") as file:
        file.write("here\\n")
    time.sleep(1000)

def begin(function, *args, **kwargs):
    threading.Thread(target=function, args=args, kwargs=kwargs, daemon=True).start()

{launch}
sys.stdin.readline()
new = [sys.executable, "-c", "import sys; print('new', flush=True); sys.stdin.read()"]
{way}
"""
LAUNCHED = {
    "function": "begin(ir.Launcher(nproc_per_node=2, **REACHED).run, busy)",
    "pool": 'pool = ir.Pool(nproc_per_node=2, preload=["fractions"], **REACHED); handle = pool.start(busy)',
    "crew": "crew = ir.Crew(busy, nproc=2, **REACHED); asked = [crew.worker(n).ask(0) for n in range(4)]",
    "command": (
        'script = "trap \'\' TERM; setsid sleep 1000 & echo here > " + BELL + "; wait"\n'
        'begin(ir.run, ["sh", "-c", script], nproc_per_node=2, **REACHED)'
    ),
}
EXECS = {
    "main": "os.execv(new[0], new)",
    "thread": "threading.Thread(target=os.execv, args=(new[0], new)).start(); threading.Event().wait()",
}


@pytest.mark.parametrize("way", EXECS)
@pytest.mark.parametrize("launch", LAUNCHED)
def test_caller_that_execs_leaves_nothing_anywhere(bed, bell, launch, way):
    """Its connections end with the program that it was, and so do the agents; the process lives on."""
    text = EXEC.format(config=str(bed.config), path=bell.path, launch=LAUNCHED[launch], way=EXECS[way])
    caller = Command([sys.executable, "-c", text], stdin=subprocess.PIPE)
    try:
        bell.hear(4)
        caller.process.stdin.write(b"\n")
        caller.process.stdin.flush()
        caller.read_until(b"new")
        until(lambda: not marked() and not agents())
        until(lambda: all(state in "Z" for parent, state, _ in processes().values() if parent == caller.pid))
        assert caller.process.poll() is None
    finally:
        caller.close()


def test_a_launch_is_stopped_gracefully_on_every_host(launcher, bell):
    def wait(path):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        with open(path, "w") as file:
            file.write("here\n")
        signal.sigwait({signal.SIGTERM})
        with open(path, "w") as file:
            file.write(f"ended {os.environ['RANK']}\n")
        os._exit(0)

    handle = launcher().start(wait, bell.path)
    assert bell.hear(4) == ["here"] * 4
    handle.stop()
    assert sorted(bell.hear(4)) == [f"ended {rank}" for rank in range(4)]
    with pytest.raises(ir.InfiniRunError, match="was stopped before all ranks returned"):
        handle.result(LIMIT_S)
    handle.close()


def test_a_signal_reaches_the_rank_that_it_is_for(launcher, bell):
    def wait(path):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        with open(path, "w") as file:
            file.write("here\n")
        if os.environ["RANK"] == "2":
            signal.sigwait({signal.SIGUSR1})
        return os.environ["RANK"]

    with launcher().start(wait, bell.path) as handle:
        bell.hear(4)
        assert handle.signal(signal.SIGUSR1, 2) == 1
        assert list(handle.result(LIMIT_S)) == ["0", "1", "2", "3"]


def test_a_launch_that_takes_too_long_is_stopped_everywhere(launcher):
    with pytest.raises(ir.LaunchTimeout, match=r"rank 0 on .*: did not return within 4 s"):
        launcher(timeout_s=4).run(time.sleep, 1000)


def test_a_forked_child_of_the_caller_ends_nothing(bed):
    """A fork has copies of everything; closing them is all that it may do."""
    with ir.Pool(["host1", "host2"], 1, engine="ssh", ssh_config=str(bed.config)) as pool:
        pid = os.fork()
        if pid == 0:
            os._exit(0 if pool._hold is None else 3)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert len(pool.run(os.getpid)) == 2


def test_a_worker_may_not_be_reached_by_a_closed_handle(launcher):
    handle = launcher(nproc=1).start(os.getpid)
    handle.close()
    assert handle.signal(signal.SIGTERM) == 0


def test_a_program_that_just_ends_takes_its_hosts_with_it(bed):
    words = (
        "import infini_run as ir\n"
        f"pool = ir.Pool(['host1', 'host2'], engine='ssh', ssh_config={str(bed.config)!r})\n"
        "print(len(pool.run(int)))\n"
    )
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")
