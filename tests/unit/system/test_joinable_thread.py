"""joinable_thread.py: a join that an exception has interrupted can be repeated."""

import os
import subprocess
import sys
import threading

import pytest

from infini_run.system.joinable_thread import JoinableThread
from tests.support.waiting import LIMIT_S, interrupt_main


def test_a_join_that_was_interrupted_can_be_repeated(raised):
    joining, gate = threading.Event(), threading.Event()

    def interrupt_and_wait():
        joining.wait()
        interrupt_main(raised)
        gate.wait()

    thread = JoinableThread(interrupt_and_wait, "gate")
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        joining.set() or thread.join()
    thread.join(0)
    assert thread.is_alive()
    gate.set()
    thread.join()
    assert not thread.is_alive()


def test_a_thread_that_was_never_started_is_not_waited_for():
    thread = JoinableThread(lambda: None, "idle")
    thread.join()
    assert not thread.is_alive()


def test_a_forked_child_does_not_wait_for_its_parents_thread():
    gate = threading.Event()
    thread = JoinableThread(gate.wait, "gate")
    thread.start()
    pid = os.fork()
    if pid == 0:
        thread.join()
        os._exit(int(thread.is_alive()))
    assert os.waitpid(pid, 0)[1] == 0
    assert thread.is_alive()
    gate.set()
    thread.join()


def test_a_thread_does_not_wait_for_itself():
    """As any thread: it would for ever."""
    told = []

    def wait_for_itself():
        try:
            thread.join(LIMIT_S)
        except RuntimeError as error:
            told.append(str(error))

    thread = JoinableThread(wait_for_itself, "itself")
    thread.start()
    thread.join()
    assert told == ["cannot join current thread"]


def test_a_thread_that_cannot_be_had_is_an_error_of_ours():
    code = """
import resource, threading
from infini_run.system.joinable_thread import JoinableThread
from infini_run.errors import StartError
threading.stack_size(1 << 40)
thread = JoinableThread(print, "none")
try:
    thread.start()
except StartError as error:
    print(error)
assert not thread.is_alive()
thread.join()
"""
    got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert got.stdout.startswith("a thread cannot be started: the limit on processes was reached; raise ulimit -u, ")


def test_a_thread_that_comes_too_late_is_as_python_says_it():
    """Python 3.12 starts none once the interpreter ends; that is no limit on processes."""
    code = """
import atexit
from infini_run.system.joinable_thread import JoinableThread
def start():
    try:
        JoinableThread(print, "late").start()
    except RuntimeError as error:
        assert "shutdown" in str(error)
atexit.register(start)
"""
    got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert got.stderr == ""
