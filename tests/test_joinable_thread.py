"""joinable_thread.py: a join that an exception has interrupted can be repeated."""

import os
import signal
import threading

import pytest

from infini_run.crews.joinable_thread import JoinableThread


def _interrupt_main():
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


def test_a_join_that_was_interrupted_can_be_repeated():
    gate = threading.Event()
    thread = JoinableThread(lambda: _interrupt_main() or gate.wait() and None, "gate")
    with pytest.raises(KeyboardInterrupt):
        thread.start()
        thread.join()
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
    thread = JoinableThread(lambda: gate.wait() and None, "gate")
    thread.start()
    pid = os.fork()
    if pid == 0:
        thread.join()
        os._exit(int(thread.is_alive()))
    assert os.waitpid(pid, 0)[1] == 0
    assert thread.is_alive()
    gate.set()
    thread.join()
