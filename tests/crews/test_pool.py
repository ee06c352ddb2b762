"""Pool: the modules are imported once, launches take milliseconds, and each has processes of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest

import infini_run as ir
from tests.support.processes import children, is_alive, marked
from tests.support.waiting import LIMIT_S, until


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module that says where it was imported, in a file."""
    (tmp_path / "slow_module.py").write_text(
        textwrap.dedent(
            f"""
            import os
            with open({str(tmp_path / "imported")!r}, "a") as file:
                file.write(f"{{os.getpid()}}\\n")
            ENVIRON = dict(os.environ)
            """
        )
    )
    monkeypatch.syspath_prepend(tmp_path)
    return lambda: [int(line) for line in (tmp_path / "imported").read_text().split()]


def use():
    import slow_module

    assert slow_module
    return os.getpid(), os.getppid()


def own_port():
    return os.environ["MASTER_PORT"]


@pytest.mark.parametrize("preload", [(), ["fractions"]])
def test_launches_that_have_ended_hold_no_descriptor(preload):
    """Nor a port: each launch has one of its own."""
    with ir.Pool(nproc_per_node=2, preload=preload) as pool:
        ports = {pool.run(own_port)[0]}
        held = os.listdir("/proc/self/fd")
        for _ in range(5):
            ports.add(pool.run(own_port)[0])
        assert len(os.listdir("/proc/self/fd")) <= len(held)
        assert len(ports) > 1


def test_the_imports_are_done_once_for_all_launches(module):
    with ir.Pool(nproc_per_node=3, preload=["slow_module"]) as pool:
        (zygote,) = module()
        seen = [pid for _ in range(3) for pid, parent in pool.run(use) if parent == zygote]
        assert len(set(seen)) == 9
        assert module() == [zygote]
    assert not is_alive(zygote)


def test_a_rank_has_the_environment_of_its_launch_and_the_imports_saw_no_rank(module):
    with ir.Pool(nproc_per_node=2, preload=["slow_module"], env={"OURS": "1"}) as pool:

        def look():
            import slow_module

            return os.environ["RANK"], os.environ["INFINI_RUN_ID"], slow_module.ENVIRON

        first, second = pool.run(look), pool.run(look)
    assert [rank for rank, *_ in first] == ["0", "1"]
    assert first[0][1] != second[0][1]
    assert "RANK" not in first[0][2]
    assert first[0][2]["OURS"] == "1"
    assert "OPENBLAS_NUM_THREADS" in first[0][2]


def test_openblas_is_told_of_one_thread_for_the_imports_only(module):
    with ir.Pool(preload=["slow_module"]) as pool:
        assert pool.run(lambda: os.environ.get("OPENBLAS_NUM_THREADS"))[0] is None


def test_launches_of_one_pool_run_at_once(bell):
    def work(bell):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        with open(bell, "w") as file:
            file.write("up\n")
        signal.sigwait({signal.SIGUSR1})
        return os.environ["RANK"]

    with ir.Pool(nproc_per_node=2, preload=["fractions"]) as pool:
        handles = [pool.start(work, bell.path) for _ in range(3)]
        bell.hear(6)
        assert [handle.signal(signal.SIGUSR1) for handle in handles] == [2, 2, 2]
        assert [list(handle.result(LIMIT_S)) for handle in handles] == [["0", "1"]] * 3
        for handle in handles:
            handle.close()


def test_a_pool_is_used_by_several_threads():
    found = []
    with ir.Pool(nproc_per_node=2, preload=["fractions"]) as pool:

        def work(n):
            for _ in range(3):
                found.append((n, list(pool.run(lambda: n))))

        threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(found) == sorted((n, [n, n]) for n in range(3) for _ in range(3))


def test_a_failure_ends_its_launch_and_not_the_pool():
    with ir.Pool(nproc_per_node=2, preload=["fractions"]) as pool:
        with pytest.raises(ir.WorkerDied, match="exit code 9"):
            pool.run(lambda: os._exit(9))
        with pytest.raises(ZeroDivisionError):
            pool.run(lambda: 1 / 0)
        assert list(pool.run(lambda: 1)) == [1, 1]


def test_what_is_left_of_one_launch_is_ended_and_another_goes_on(bell):
    def leave():
        return subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=-3, stderr=-3).pid

    def stay(bell):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        child = subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=-3, stderr=-3)
        with open(bell, "w") as file:
            file.write(f"{child.pid}\n")
        signal.sigwait({signal.SIGUSR1})
        return child.poll()

    with ir.Pool(nproc_per_node=1, preload=["fractions"]) as pool, pool.start(stay, bell.path) as handle:
        (sleeper,) = map(int, bell.hear(1))
        assert not is_alive(pool.run(leave)[0])
        assert is_alive(sleeper)
        handle.signal(signal.SIGUSR1)
        assert handle.result(LIMIT_S)[0] is None
        assert not is_alive(sleeper)


def test_a_pool_without_modules_starts_each_worker_afresh():
    before = children()
    with ir.Pool(nproc_per_node=2) as pool:
        assert children() == before
        assert {parent for _, parent in pool.run(lambda: (1, os.getppid()))} == {os.getpid()}


@pytest.mark.parametrize("preload", [[], ["fractions"]])
def test_launches_that_run_at_once_meet_at_ports_of_their_own(preload):
    def port():
        return os.environ["MASTER_PORT"]

    with ir.Pool(nproc_per_node=2, preload=preload) as pool, pool.start(port) as one, pool.start(port) as other:
        ports = {*one.result(LIMIT_S), *other.result(LIMIT_S)}
    assert len(ports) == 2


def test_a_closed_pool_says_so_and_closes_twice():
    pool = ir.Pool(preload=["fractions"])
    pool.close()
    pool.close()
    with pytest.raises(ir.UsageError, match="this Pool is closed"):
        pool.run(os.getpid)
    assert marked() == {}


def test_closing_a_pool_ends_the_launches_that_run_in_it(bell):
    def work(bell):
        with open(bell, "w") as file:
            file.write(f"{os.getpid()}\n")
        signal.pause()

    pool = ir.Pool(nproc_per_node=2, preload=["fractions"])
    handle = pool.start(work, bell.path)
    pids = [int(word) for word in bell.hear(2)]
    pool.close()
    assert not any(map(is_alive, pids))
    with pytest.raises(ir.InfiniRunError):
        handle.result(LIMIT_S)
    handle.close()


def test_a_pool_whose_process_was_killed_says_so_and_leaves_nothing(module, bell):
    def work(bell):
        child = subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=-3, stderr=-3)
        with open(bell, "w") as file:
            file.write(f"{os.getpid()}\n{child.pid}\n")
        signal.pause()

    with ir.Pool(nproc_per_node=2, preload=["slow_module"]) as pool:
        handle = pool.start(work, bell.path)
        pids = [int(word) for word in bell.hear(4)]
        os.kill(module()[0], signal.SIGKILL)
        with pytest.raises(ir.WorkerDied, match="ended without a result"):
            handle.result(LIMIT_S)
        handle.close()
        until(lambda: not any(map(is_alive, pids)))
        with pytest.raises(ir.StartError, match="is gone: killed by SIGKILL"):
            pool.run(os.getpid)


def test_a_pool_that_is_not_closed_ends_with_its_program(tmp_path):
    code = """
        import infini_run as ir
        pool = ir.Pool(nproc_per_node=2, preload=["fractions"])
        print(list(pool.run(lambda: 1)))
    """
    words = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[1, 1]\n", "")
    assert marked() == {}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_when_the_program_is_killed_its_pool_goes_with_it(number, module, tmp_path):
    code = f"""
        import sys, infini_run as ir
        sys.path.insert(0, {str(tmp_path)!r})
        pool = ir.Pool(nproc_per_node=2, preload=["slow_module"])
        pool.run(lambda: 1)
        print("up", flush=True)
        input()
    """
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], **pipes) as program:
        assert program.stdout.readline() == b"up\n"
        program.send_signal(number)
        program.wait(LIMIT_S)
    until(lambda: not is_alive(module()[0]))
    until(lambda: marked() == {})


def test_prints_go_where_our_stdout_is_now(capfd):
    with ir.Pool(nproc_per_node=2, preload=["fractions"]) as pool:
        for word in ("one", "two"):
            pool.run(lambda word=word: print(word))
            assert sorted(capfd.readouterr().out.splitlines()) == [f"[rank 0] {word}", f"[rank 1] {word}"]


@pytest.mark.parametrize("preload", [[], ["fractions"]])
def test_a_signal_or_a_rank_that_there_is_not_is_refused_and_harms_nobody(preload, bell):
    def stay(path):
        with open(path, "w") as file:
            file.write("up\n")
        signal.sigwait({signal.SIGUSR1})

    with ir.Pool(nproc_per_node=1, preload=preload) as pool, pool.start(stay, bell.path) as handle:
        bell.hear(1)
        with pytest.raises(ir.UsageError, match="unknown signal"):
            handle.signal(999)
        with pytest.raises(ir.UsageError, match="unknown rank; use 0 to 0"):
            handle.signal(signal.SIGUSR1, rank=9)
        assert pool.run(os.getpid)[0] != os.getpid()


def test_what_still_runs_ends_with_its_pool(bell):
    def stay(path):
        with open(path, "w") as file:
            file.write(f"{os.getpid()}\n")
        signal.pause()

    pool = ir.Pool(nproc_per_node=1)
    handle = pool.start(stay, bell.path)
    (pid,) = map(int, bell.hear(1))
    pool.close()
    assert not is_alive(pid)
    assert handle.done()
