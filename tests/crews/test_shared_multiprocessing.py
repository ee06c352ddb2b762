"""multiprocessing in workers: one resource tracker and one authkey for them and the process that started them.

Each case is a program of its own: a tracker, once started, stays until its program ends. What it says at that end, of
blocks that are left or gone, counts as a failure.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
import textwrap

import pytest

import infini_run as ir
from infini_run.crews.spawn.lent_multiprocessing import Lender
from infini_run.crews.worker.borrowed_multiprocessing import AUTHKEY, GRANTED, receive_fds, send_fd
from tests.support.cluster import writes_memory
from tests.support.waiting import LIMIT_S

WAYS = {"exec": (), "fork": ["multiprocessing.managers"], "fork without multiprocessing": ["fractions"]}
COMMON = """
    import os, subprocess, sys
    import infini_run as ir

    def read(name):
        from multiprocessing.shared_memory import SharedMemory
        block = SharedMemory(name=name)
        value = bytes(block.buf[:3])
        block.close()
        return value

    def make(name=None):
        from multiprocessing.shared_memory import SharedMemory
        block = SharedMemory(name=name, create=True, size=3)
        block.buf[:3] = b"abc"
        block.close()
        return block.name

    def remove(name):
        from multiprocessing.shared_memory import SharedMemory
        block = SharedMemory(name=name)
        block.close()
        block.unlink()
"""


@pytest.fixture(params=WAYS)
def preload(request):
    return WAYS[request.param]


@pytest.fixture
def run():
    def run(code, **names):
        """Run the code, with what the functions of COMMON are and these names; it must be silent on stderr."""
        given = "".join(f"{name} = {value!r}\n" for name, value in names.items())
        program = textwrap.dedent(COMMON) + given + textwrap.dedent(code)
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    return run


# ---- shared memory


@writes_memory
def test_block_of_caller_outlives_workers_that_attach(run, preload):
    run(
        """
        name = make()
        with ir.Pool(nproc_per_node=2, preload=preload) as pool:
            for _ in range(2):
                assert list(pool.run(read, name)) == [b"abc"] * 2
                assert list(ir.Launcher(nproc_per_node=2, preload=preload).run(read, name)) == [b"abc"] * 2
        remove(name)
        """,
        preload=preload,
    )


@writes_memory
def test_block_of_rank_outlives_it_when_caller_uses_no_multiprocessing(run, preload):
    run(
        """
        name, = ir.Launcher(preload=preload).run(make)
        assert read(name) == b"abc"
        remove(name)
        """,
        preload=preload,
    )


@writes_memory
def test_block_made_after_crew_outlives_replaced_and_killed_workers(run, preload):
    run(
        """
        def task(ctx, name):
            if name is None:
                os.kill(os.getpid(), 9)
            return read(name), os.getpid()

        given = {"nproc_per_node": 1, "restart": ir.Restart(max_restarts=2), "max_tasks_per_child": 2}
        with ir.Crew(task, preload=preload, **given) as crew:
            name = make()
            pids = set()
            for _ in range(4):
                value, pid = crew.ask(name).result()
                assert value == b"abc"
                pids.add(pid)
            assert len(pids) == 2
            try:
                crew.ask(None).result()
            except ir.WorkerDied:
                pass
            assert crew.ask(name).result()[0] == b"abc"
        remove(name)
        """,
        preload=preload,
    )


@writes_memory
def test_block_of_killed_caller_is_removed(tmp_path):
    """Its tracker is the one process that may outlive it."""
    program = textwrap.dedent(COMMON) + textwrap.dedent("""
        name = make()
        ir.Launcher().run(read, name)
        print(name, flush=True)
        os.kill(os.getpid(), 9)
    """)
    killed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert killed.returncode == -9  # and stderr, which the tracker holds, has ended
    assert "leaked shared_memory objects" in killed.stderr
    assert not os.path.exists(f"/dev/shm/{killed.stdout.strip()}")


@writes_memory
def test_worker_asks_again_when_tracker_was_killed(run):
    run(
        """
        import signal, warnings
        from multiprocessing import resource_tracker

        warnings.simplefilter("ignore")  # the tracker's own, that it died

        def task(ctx, name):
            return read(name)

        name = make()
        with ir.Crew(task, nproc_per_node=1, max_tasks_per_child=2) as crew:
            assert crew.ask(name).result() == b"abc"
            pid = resource_tracker._resource_tracker._pid
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            assert crew.ask(name).result() == b"abc"  # in the same worker
            assert crew.ask(name).result() == b"abc"
        remove(name)
        """
    )


@writes_memory
def test_forked_child_of_caller_shares_tracker_with_its_workers(run):
    run(
        """
        name = make()
        child = os.fork()
        if child == 0:
            ir.Launcher(nproc_per_node=2).run(read, name)
            os._exit(list(ir.Launcher(nproc_per_node=2).run(read, name)) != [b"abc"] * 2)
        assert os.waitpid(child, 0)[1] == 0
        assert read(name) == b"abc"
        remove(name)
        """
    )


@writes_memory
def test_workers_and_spawned_children_of_worker_share_tracker(run, tmp_path):
    (tmp_path / "reading.py").write_text(textwrap.dedent(COMMON))
    run(
        """
        sys.path.insert(0, folder)
        import reading

        def outer(name):
            import multiprocessing
            list(ir.Launcher(nproc_per_node=2).run(read, name))
            child = multiprocessing.get_context("spawn").Process(target=reading.read, args=(name,))
            child.start()
            child.join()
            return child.exitcode

        name = make()
        assert ir.Launcher().run(outer, name)[0] == 0
        assert read(name) == b"abc"
        remove(name)
        """,
        folder=str(tmp_path),
    )


@writes_memory
def test_program_started_by_worker_inherits_neither_tracker_nor_socket(run, preload):
    run(
        """
        def function(name):
            from multiprocessing import resource_tracker
            read(name)
            os.fstat(resource_tracker._resource_tracker._fd)
            return subprocess.run(["ls", "/proc/self/fd"], close_fds=False, stdout=subprocess.PIPE).stdout

        name = make()
        assert ir.Launcher(preload=preload).run(function, name)[0].split() == [b"0", b"1", b"2", b"3"]
        remove(name)
        """,
        preload=preload,
    )


def test_launch_imports_no_multiprocessing_and_starts_no_tracker(run):
    run(
        """
        def loaded():
            return [name for name in sys.modules if "multiprocessing" in name.split(".")]

        assert ir.Launcher(nproc_per_node=2).run(loaded)[0] == []
        with ir.Pool(preload=["fractions"]) as pool:
            assert pool.run(loaded)[0] == []
        assert loaded() == []
        """
    )


# ---- the authkey


def test_queue_of_manager_takes_from_functions_and_crews(run, preload):
    """The crew is older than the manager, and its program had not imported multiprocessing yet."""
    run(
        """
        def put(queue, value):
            queue.put(value)

        with ir.Crew(lambda ctx, task: put(*task), nproc_per_node=1, preload=preload) as crew:
            import multiprocessing
            with multiprocessing.Manager() as manager:
                queue = manager.Queue()
                ir.Launcher(nproc_per_node=2, preload=preload).run(put, queue, 5)
                crew.ask((queue, 6)).result()
                assert sorted(queue.get() for _ in range(3)) == [5, 5, 6]
        """,
        preload=preload,
    )


def test_authkey_of_caller_is_that_of_workers_and_their_children(run, preload):
    run(
        """
        def key():
            import multiprocessing
            process = multiprocessing.current_process()
            assert dict(process._config.copy())["authkey"] == process.authkey
            hexed = process.authkey.hex().encode()
            for file in ("environ", "cmdline"):
                with open(f"/proc/self/{file}", "rb") as opened:
                    seen = opened.read()
                assert process.authkey not in seen and hexed not in seen
            return bytes(process.authkey)

        def keys():
            import multiprocessing
            context = multiprocessing.get_context("fork")
            ours, theirs = context.Pipe()
            child = context.Process(target=lambda: theirs.send(key()))
            child.start()
            found = ours.recv(), key(), *ir.Launcher().run(key)
            child.join()
            return found

        import multiprocessing
        own = bytes(multiprocessing.current_process().authkey)
        assert ir.Launcher(preload=preload).run(keys)[0] == (own,) * 3
        multiprocessing.current_process().authkey = long = bytes(range(256)) * 300
        assert ir.Launcher(preload=preload).run(key)[0] == long
        """,
        preload=preload,
    )


@writes_memory
@pytest.mark.parametrize("thing", [multiprocessing.Lock, multiprocessing.Event, multiprocessing.Semaphore])
def test_lock_of_multiprocessing_is_refused_with_advice(thing):
    with pytest.raises(ir.UnpicklableError) as caught:
        ir.Launcher().run(print, {"a": thing()})
    text = str(caught.value)
    assert text.startswith(f"argument 0['a'] cannot be sent: a multiprocessing.synchronize.{thing.__name__} does not")
    assert "should only be shared between processes through inheritance" in text
    assert text.endswith("; use one of a multiprocessing.Manager()")


# ---- the lender


@pytest.mark.parametrize("kind", ["Connection", "DupFd"])
def test_descriptor_of_multiprocessing_is_refused_with_advice(kind):
    """It pickles as a number, which is a descriptor of ours in the worker."""
    ours, theirs = multiprocessing.Pipe()
    thing = theirs if kind == "Connection" else multiprocessing.reduction.DupFd(theirs.fileno())
    with ours, theirs, pytest.raises(ir.UnpicklableError, match=rf"{kind} does not pickle .*Manager\(\)"):
        ir.Launcher(nproc_per_node=1).run(print, [thing])
    if kind == "DupFd":
        multiprocessing.resource_sharer.stop()


def test_worker_has_tracker_of_its_own_where_callers_is_in_use(run):
    """Whoever has the tracker's lock may wait for a fork, which waits for the answer."""
    run("""
        from multiprocessing import resource_tracker

        def attach(name):
            resource_tracker.ensure_running()
            return resource_tracker._resource_tracker._pid is not None

        with resource_tracker._resource_tracker._lock:
            assert list(ir.Launcher(nproc_per_node=1, preload=()).run(attach, "")) == [True]
    """)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give up what it may")
def test_launch_starts_where_no_descriptor_may_be_on_its_way(tmp_path):
    """The limit is the user's, for whom 300 are on their way (ETOOMANYREFS of unix(7))."""
    text = textwrap.dedent("""
        import os, resource, socket
        import infini_run as ir

        ours, theirs = socket.socketpair()
        for _ in range(3):
            socket.send_fds(ours, [b"x"], [0] * 100)
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
        print(list(ir.Launcher(nproc_per_node=2, preload=()).run(os.getenv, "RANK")))
    """)
    (tmp_path / "program.py").write_text(text)
    words = ("setpriv", "--bounding-set=-all", "--inh-caps=-all", sys.executable, str(tmp_path / "program.py"))
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.stdout, done.stderr) == ("['0', '1']\n", "")


@pytest.fixture
def asking():
    """A lender, and what a worker has of it."""
    lender = Lender()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        lender.endow(ours)
        _, fds = receive_fds(theirs, 1)
        with socket.socket(fileno=fds[0]) as worker:
            lender.close_theirs()
            yield lender, worker
    lender.poll()
    assert lender.fileno() == -1
    lender.close()


@pytest.mark.parametrize("kind", ["file", "none", "many", "unknown", "empty", "closed"])
def test_lender_refuses_what_is_no_question(asking, kind):
    lender, worker = asking
    ours, theirs = socket.socketpair()
    rights = {"none": [], "many": [theirs.fileno()] * 20}.get(kind, [theirs.fileno()])
    with ours, theirs, open(os.devnull) as file:
        if kind == "file":
            rights = [file.fileno()]
        if kind == "closed":
            ours.close()
        question = {"unknown": b"?", "empty": b""}.get(kind, AUTHKEY)
        socket.send_fds(worker, [question], rights)
        theirs.close()
        lender.poll()
        assert kind == "closed" or ours.recv(1) == b""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            send_fd(worker, AUTHKEY, theirs.fileno())
        lender.poll()
        assert ours.recv(64) == GRANTED + bytes(multiprocessing.current_process().authkey)
        assert ours.recv(1) == b""
