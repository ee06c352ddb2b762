"""The zygote: what it refuses, what its forks are like, and what its spawner does then."""

from __future__ import annotations

import errno
import os
import random
import re
import resource
import signal
import socket
import sys
import textwrap
import threading
import warnings
from itertools import count, islice

import pytest

import infini_run as ir
from infini_run.crews.capture import capture_exception
from infini_run.crews.spawn.fork_spawner import ForkSpawner
from infini_run.crews.spawn.zygote_protocol import MessageSocket, receive_with_fds, send_with_fds
from infini_run.errors import StartError, UsageError
from tests.support.command import CHILDREN
from tests.support.processes import is_alive, marked, processes, state_of
from tests.support.waiting import until


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Make a module of this code that workers can import."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(code, name="made"):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(code))
        return [name]

    return make


def parent():
    return os.getppid()


# ---- what it refuses


def test_where_a_thread_runs_after_the_imports_workers_are_started_afresh_with_a_word(module):
    preload = module("import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()")
    with pytest.warns(RuntimeWarning, match="new processes instead of forks: 1 thread of the imports still runs"):
        result = ir.Launcher(nproc_per_node=2, preload=preload).run(parent)
    assert set(result) == {os.getpid()}


def import_after_fork():
    import endless_import  # noqa: F401

    return os.getppid()


def test_no_worker_is_forked_while_a_thread_imports(monkeypatch):
    """It would wait for the lock of that import for ever. The first fork starts the thread."""
    monkeypatch.syspath_prepend(CHILDREN)
    with ir.Pool(nproc_per_node=3, preload=["importing_at_fork"]) as pool:
        with pytest.warns(RuntimeWarning, match="instead of forks: 1 thread of the imports still runs"):
            parents = pool.run(import_after_fork)
        assert {*parents, *pool.run(import_after_fork)} == {os.getpid()}


def test_where_a_device_was_opened_too(module):
    """None is here: /dev/dri/... by its name alone."""
    preload = module("import os; os.readlink = lambda path: '/dev/nvidia0'")
    with pytest.warns(RuntimeWarning, match="the imports opened /dev/nvidia0, which a fork cannot use"):
        assert set(ir.Launcher(nproc_per_node=2, preload=preload).run(parent)) == {os.getpid()}


def test_a_pool_that_was_refused_says_so_once(module):
    preload = module("import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()")
    with ir.Pool(nproc_per_node=1, preload=preload) as pool:
        with pytest.warns(RuntimeWarning):
            pool.run(parent)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert pool.run(parent)[0] == os.getpid()


def test_what_the_imports_raise_is_one_error(module):
    preload = module("raise OSError('no weights')")
    with pytest.raises(UsageError, match="preload: made cannot be imported: OSError: no weights"):
        ir.Pool(preload=preload)
    assert marked() == {}


def test_imports_that_end_the_process_are_one_error(module):
    with pytest.raises(StartError, match="is gone: exit code 3"):
        ir.Pool(preload=module("import os; os._exit(3)"))
    assert marked() == {}


READS = [
    "os.environ['RANK']",
    "os.environ.get('LOCAL_RANK', 0)",
    "os.getenv('MASTER_PORT')",
    "'WORLD_SIZE' in os.environ",
    "os.environ.setdefault('TORCHELASTIC_RESTART_COUNT', '0')",
    "os.environb.get(b'NOTIFY_SOCKET')",
    "os.environ.pop('GLOBAL_PROC_RANK', None)",
]


@pytest.mark.parametrize("read", READS)
def test_module_that_reads_its_rank_while_imported_is_refused(module, read):
    module(f"import os\ndef look():\n    try:\n        {read}\n    except KeyError:\n        pass", "looking")
    module("import looking\nlooking.look()", "deepest")
    preload = ["fractions", *module("import deepest")]
    name = read.split("'")[1]
    text = f"preload=made: deepest reads {name} during its import; drop made"
    for start in (
        lambda: ir.Pool(nproc_per_node=2, preload=preload),
        lambda: ir.Launcher(nproc_per_node=2, preload=preload).run(parent),
        lambda: ir.Crew(lambda ctx, task: task, nproc_per_node=2, preload=preload),
    ):
        with pytest.raises(UsageError) as caught:
            start()
        assert str(caught.value) == text
    assert marked() == {}


def test_each_module_that_reads_its_rank_is_named(module):
    preload = [
        *module("import os; os.getenv('RANK'); os.getenv('MASTER_ADDR')", "one"),
        *module("import fractions", "two"),
        *module("import one, os; os.getenv('LOCAL_RANK')", "three"),
    ]
    with pytest.raises(UsageError) as caught:
        ir.Pool(preload=preload)
    assert str(caught.value) == (
        "preload=one: one reads RANK during its import; drop one"
        "; preload=three: three reads LOCAL_RANK during its import; drop three"
    )


def test_copy_of_environment_and_other_variables_are_no_reads_of_rank(module, monkeypatch):
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("MASTER_ADDR", "elsewhere")
    preload = module("""
        import os, subprocess
        copies = [dict(os.environ), os.environ.copy(), {**os.environ}, dict(os.environ.items()), list(os.environ)]
        subprocess.run(["true"])
        subprocess.run(["true"], env=dict(os.environ))
        os.getenv("TORCH_DISTRIBUTED_COMPILE_ON_ONE_RANK"), os.getenv("MY_RANK"), os.getenv("INFINI_RUN_ID")
        os.getenv("OMP_NUM_THREADS")
    """)
    with ir.Pool(nproc_per_node=2, preload=preload) as pool:
        (zygote,) = set(pool.run(parent))
        assert zygote != os.getpid()
        assert list(pool.run(lambda: os.environ["RANK"])) == ["0", "1"]


def test_read_of_rank_in_preload_of_our_own_choice_starts_afresh(module):
    """A torch that has such a backend, say."""
    module("import os; RANK = os.environ.get('LOCAL_RANK')", "torch")

    def function():
        import torch

        return torch.RANK, os.getppid()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = ir.Launcher(nproc_per_node=2).run(function)
    assert list(result) == [("0", os.getpid()), ("1", os.getpid())]


# ---- what its forks are like


def test_generators_that_no_import_has_seeded_differ_in_each_fork(module):
    preload = module("import random; random.random()")
    with ir.Pool(nproc_per_node=2, preload=preload) as pool:
        drawn = [*pool.run(lambda: random.random()), *pool.run(lambda: random.random())]
    assert len(set(drawn)) == 4


@pytest.mark.parametrize("drawn", [0, 3, 5000])
def test_generator_that_an_import_has_seeded_goes_on_as_in_fresh_process(module, drawn):
    preload = module(f"import random; random.seed(5); [random.random() for _ in range({drawn})]")

    def function():
        import made

        return random.random() if made else None

    fresh = ir.Launcher(preload=()).run(function)[0]
    with ir.Pool(nproc_per_node=2, preload=preload) as pool:
        assert {*pool.run(function), *pool.run(function)} == {fresh}


def test_what_imports_print_comes_once(module, monkeypatch, capfd):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    with ir.Pool(nproc_per_node=2, preload=module("print('imported', end=' ')")) as pool:
        pool.run(parent)
        pool.run(print, "done")
    out = capfd.readouterr().out
    assert (out.count("imported"), out.count("done")) == (1, 2)


def test_environment_path_and_directory_set_by_imports_reach_forks(module, monkeypatch, tmp_path):
    (tmp_path / "first").mkdir()
    (tmp_path / "last").mkdir()
    (tmp_path / "last" / "found_late.py").write_text("")
    monkeypatch.setenv("REMOVED", "1")
    monkeypatch.setenv("CHANGED", "1")
    preload = module(f"""
        import os, sys
        del os.environ["REMOVED"]
        os.environ.update(CHANGED="2", ADDED="3", MASTER_ADDR="own")
        sys.path.insert(0, {str(tmp_path / "first")!r})
        sys.path.append({str(tmp_path / "last")!r})
        os.chdir({str(tmp_path)!r})
    """)

    def function():
        import found_late

        names = ("REMOVED", "CHANGED", "ADDED", "MASTER_ADDR", "RANK")
        return [os.environ.get(name) for name in names], sys.path[0], found_late.__name__, sys.path[-1], os.getcwd()

    expected = [
        ([None, "2", "3", "own", rank], str(tmp_path / "first"), "found_late", str(tmp_path / "last"), str(tmp_path))
        for rank in ("0", "1")
    ]
    with ir.Pool(nproc_per_node=2, preload=preload) as pool:
        assert list(pool.run(function)) == expected


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import sys; sys.exit('no licence')", "SystemExit: no licence"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt: "),
        ("raise ValueError('a\\nb\\x1b')", r"ValueError: a\nb\x1b"),
    ],
)
def test_import_that_ends_its_program_is_named(module, code, reason):
    (name,) = module(code)
    with pytest.raises(ir.UsageError, match=re.escape(f"preload: {name} cannot be imported: {reason}")):
        ir.Pool(nproc_per_node=1, preload=[name]).run(len, "")


def test_import_may_clear_environment(module):
    with ir.Pool(nproc_per_node=2, preload=module("import os; os.environ.clear()")) as pool:
        assert list(pool.run(os.getenv, "RANK")) == ["0", "1"]


def test_process_that_import_has_started_is_not_ended_by_forks(module, capfd):
    preload = module("""
        import multiprocessing, time
        process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,), daemon=True)
        process.start()
    """)
    (name,) = preload
    with ir.Pool(nproc_per_node=2, preload=preload) as pool:
        (pid, _) = pool.run(lambda: __import__(name).process.pid)
        pool.run(print)
        assert is_alive(pid)
    assert "Error" not in capfd.readouterr().err


def test_wrapper_that_drops_variables_is_named(tmp_path, monkeypatch):
    wrapper = tmp_path / "wrapper"
    wrapper.write_text(f'#!/bin/sh\nexec env -u INFINI_RUN_ID {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(wrapper))
    with pytest.raises(ir.UsageError, match="INFINI_RUN_ID is missing in a new Python"):
        ir.Pool(nproc_per_node=2, preload=["fractions"]).run(len, "")


def test_thread_that_takes_descriptors_keeps_no_zygote_from_forking(recwarn):
    """A worker's message with a descriptor that is slow to close (csrc/io/rights_drop.c). The zygote is stopped until
    the worker has closed its own: the last to close is who waits."""

    def send():
        import socket

        ours, theirs = lingering_pair()
        os.kill(os.getppid(), signal.SIGSTOP)
        until(lambda: state_of(os.getppid()) == "T")
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.connect(os.environ["NOTIFY_SOCKET"].replace("@", "\0", 1))
            socket.send_fds(sender, [b"BARRIER=1"], [ours.fileno()])
        ours.close()
        os.kill(os.getppid(), signal.SIGCONT)
        return theirs.detach() >= 0 and os.getppid()

    with ir.Pool(nproc_per_node=1, preload=["fractions"]) as pool:
        parents = {pool.run(send)[0] for _ in range(3)}
    assert len(parents) == 1
    assert not recwarn


def lingering_pair():
    import contextlib
    import socket
    import struct

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    ours.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            ours.send(bytes(1 << 20))
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 60))
    return ours, theirs


def status(name):
    with open("/proc/self/status") as file:
        return next(line.split()[1] for line in file if line.startswith(f"{name}:"))


def test_a_fork_has_fresh_signals_one_thread_and_dies_with_the_zygote():
    def look():
        import ctypes

        number = ctypes.c_int()
        ctypes.CDLL(None).prctl(2, ctypes.byref(number))  # PR_GET_PDEATHSIG
        return number.value, signal.getsignal(signal.SIGINT), status("SigBlk"), status("Threads"), os.getsid(0)

    with ir.Pool(nproc_per_node=1, preload=["fractions"]) as pool:
        death, handler, blocked, threads, session = pool.run(look)[0]
    assert (death, handler, int(blocked, 16), threads) == (signal.SIGKILL, signal.default_int_handler, 0, "1")
    assert session == os.getsid(0)


def test_its_number_of_threads_for_openmp_is_the_workers(module, monkeypatch):
    preload = module("import os; SEEN = os.environ.get('OMP_NUM_THREADS')")

    def look():
        import made

        return made.SEEN, os.environ.get("OMP_NUM_THREADS")

    with ir.Pool(nproc_per_node=64, preload=preload) as pool:
        assert pool.run(look)[0] == ("1", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    with ir.Pool(nproc_per_node=2, preload=preload) as pool:
        assert pool.run(look)[0] == ("5", "5")


def test_what_an_import_left_for_the_end_is_done_once_by_the_zygote(module, tmp_path):
    preload = module(
        f"""
        import atexit, os, weakref
        class Thing: pass
        thing = Thing()
        def note(word):
            with open({str(tmp_path / "noted")!r}, "a") as file:
                file.write(f"{{word}} {{os.getpid()}}\\n")
        atexit.register(note, "atexit")
        weakref.finalize(thing, note, "finalize")
        """
    )
    with ir.Pool(nproc_per_node=3, preload=preload) as pool:
        (zygote,) = set(pool.run(parent))
    lines = (tmp_path / "noted").read_text().split("\n")
    assert sorted(line for line in lines if line) == [f"atexit {zygote}", f"finalize {zygote}"]


def test_workers_are_known_by_the_mark_of_their_own_launch(bell):
    def work(bell):
        with open(bell, "w") as file:
            file.write(f"{os.getpid()} {os.environ['INFINI_RUN_ID']}\n")
        signal.pause()

    with ir.Pool(preload=["fractions"]) as pool, pool.start(work, bell.path):
        pid, mark = bell.hear(1)[0].split()
        with open(f"/proc/{pid}/environ", "rb") as file:
            assert f"INFINI_RUN_ID={mark}".encode() in file.read().split(b"\0")


def test_a_worker_that_is_killed_at_its_gate_or_before_is_told(monkeypatch):
    """The zygote is stopped meanwhile: the launch waits, and goes on with it."""
    with ir.Pool(nproc_per_node=2, preload=["fractions"]) as pool:
        zygote = set(pool.run(parent)).pop()
        os.kill(zygote, signal.SIGSTOP)
        until(lambda: processes()[zygote][1] == "T")
        found = []
        thread = threading.Thread(target=lambda: found.append(list(pool.run(parent))))
        thread.start()
        os.kill(zygote, signal.SIGCONT)
        thread.join()
        assert found == [[zygote, zygote]]


def test_more_ranks_than_descriptors_in_one_message():
    with ir.Pool(nproc_per_node=210, preload=["fractions"], console="none") as pool:
        assert list(pool.run(lambda: int(os.environ["RANK"]))) == list(range(210))


def test_forks_serve_a_crew_too():
    spawner = ForkSpawner(["fractions"], nproc=2)
    try:
        with ir.Crew(lambda ctx, task: (task, os.getppid()), spawner=spawner) as crew:
            answers = [crew.worker(rank).ask(rank).result() for rank in range(2)]
        assert [task for task, _ in answers] == [0, 1]
        assert len({pid for _, pid in answers} - {os.getpid()}) == 1
    finally:
        spawner.close()


def test_when_it_is_killed_its_forks_are_gone(bell):
    def work(bell):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with open(bell, "w") as file:
            file.write(f"{os.getpid()} {os.getppid()}\n")
        while True:
            signal.pause()

    with ir.Pool(nproc_per_node=2, preload=["fractions"]) as pool, pool.start(work, bell.path) as handle:
        lines = [list(map(int, line.split())) for line in bell.hear(2)]
        os.kill(lines[0][1], signal.SIGKILL)
        handle.wait()
        until(lambda: not any(is_alive(pid) for pid, _ in lines))


# ---- where it may open no more descriptors


def fds_of(pid):
    return [int(fd) for fd in os.listdir(f"/proc/{pid}/fd")]


def sockets_of(pid):
    found = [capture_exception(os.readlink, f"/proc/{pid}/fd/{fd}")[0] for fd in fds_of(pid)]
    return [name for name in found if name and name.startswith("socket:")]


def allow_fds(pid, more):
    """Let a process open so many descriptors more. The limit is on their numbers, of which some may be free."""
    used = set(fds_of(pid))
    first = next(islice((fd for fd in count() if fd not in used), more, None))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (first, hard))


def test_a_launch_for_which_it_has_too_few_descriptors_fails_alone():
    """From a limit that is too low for any launch to one that is not: each launch fails with an error of ours or
    works, and the zygote goes on."""
    with ir.Pool(nproc_per_node=2, preload=["fractions"]) as pool:
        zygote = set(pool.run(parent)).pop()
        until(lambda: len(sockets_of(zygote)) == 1)  # nothing is left of that launch
        idle = len(fds_of(zygote))
        ways = []
        while ways[-3:] != ["works"] * 3:
            allow_fds(zygote, 1 + len(ways))  # it has one in reserve
            found, error = capture_exception(pool.run, parent)
            if found is not None:
                assert set(found) == {zygote}
            else:
                assert (type(error), error.errno) == (StartError, errno.EMFILE)
                assert "ulimit -n" in str(error)
            ways.append("fails" if found is None else "works")
            until(lambda: len(fds_of(zygote)) == idle)
    assert ways.index("works") > 5


@pytest.mark.parametrize("more", [2, 9])  # fewer than come with the request; too few to set it up
def test_a_launch_that_goes_on_is_not_hurt_by_one_for_which_there_are_no_descriptors(bell, more):
    def work(path):
        with open(path, "w") as file:
            file.write("up\n")
        signal.pause()

    with ir.Pool(nproc_per_node=2, preload=["fractions"]) as pool, pool.start(work, bell.path) as handle:
        bell.hear(2)
        allow_fds(processes()[handle.pids[0]][0], more)
        with pytest.raises(StartError, match="limit on open descriptors"):
            pool.run(parent)
        assert all(map(is_alive, handle.pids))


# ---- the wire


@pytest.fixture
def wires():
    one, other = socket.socketpair()
    made = MessageSocket(one), MessageSocket(other)
    yield made
    for wire in made:
        wire.close()


def test_messages_arrive_whole_in_order_and_before_the_end(wires):
    one, other = wires
    messages = [("a", 1), ("b", "x" * 1000), ("c", None)]
    for message in messages:
        one.send(message)
    one.close()
    assert other.receive() == messages
    assert other.has_ended


def test_what_finds_no_room_is_kept_and_sent_later(wires):
    one, other = wires
    big = b"x" * 3_000_000
    one.send(big)
    assert one.is_full
    found = []
    while not found:
        found = other.receive()
        one.flush()
    assert found == [big]
    assert not one.is_full
    assert not other.has_ended


def test_a_side_that_is_gone_takes_no_more_and_raises_nothing(wires):
    one, other = wires
    other.close()
    one.send("x" * 1_000_000)
    assert not one.is_full
    assert one.receive() == []
    assert one.has_ended


def test_a_parcel_brings_its_descriptors():
    one, other = socket.socketpair()
    with one, other:
        reader, writer = os.pipe()
        send_with_fds(one, {"a": 1}, [writer])
        os.close(writer)
        message, (fd,) = receive_with_fds(other)
        assert message == {"a": 1}
        assert not os.get_inheritable(fd)
        os.write(fd, b"hello")
        os.close(fd)
        assert os.read(reader, 10) == b"hello"
        os.close(reader)
        one.close()
        assert receive_with_fds(other) is None


@pytest.mark.parametrize("left", range(1, 12))
def test_pool_runs_again_after_interrupt_of_request(left):
    calls = 0

    def interrupt(frame, event, argument):
        nonlocal calls
        names = frame.f_code.co_name, frame.f_back.f_code.co_name
        if event.startswith("c_") and ("send_link" in names or "send_with_fds" in names):
            calls += 1
            if calls == left:
                raise KeyboardInterrupt

    with ir.Pool(nproc_per_node=2, preload=["fractions"]) as pool:
        sys.setprofile(interrupt)
        try:
            pool.run(parent)
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        assert len(pool.run(parent)) == 2
