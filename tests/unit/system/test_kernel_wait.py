"""What a thread waits for, whatever this kernel calls its functions: real processes wait in each way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from infini_run.system.kernel_wait import KINDS, wait_kind
from infini_run.system.procfs import ProcessTable, snapshot_processes
from tests.support.waiting import until

HEAD = "import os, select, socket, sys, threading, time\nprint('up', flush=True)\n"
A_PAIR = "a, b = socket.socketpair(); "
A_SERVER = "s = socket.create_server(('127.0.0.1', 0)); "
WAITS = {
    "pipe": ("pipe", "os.read(0, 1)"),
    "full pipe": ("pipe", "os.write(1, bytes(1 << 22))"),
    "own pipe": ("own pipe", "r, w = os.pipe(); os.read(r, 1)"),
    "own full pipe": ("own pipe", "r, w = os.pipe(); os.write(w, bytes(1 << 22))"),
    "child's pipe": ("own pipe", "r, w = os.pipe(); os.fork() or time.sleep(1000); os.close(w); os.read(r, 1)"),
    "stream": ("socket", A_PAIR + "a.recv(1)"),
    "stream by read": ("socket", A_PAIR + "os.read(a.fileno(), 1)"),
    "datagram": ("socket", "a, b = socket.socketpair(type=socket.SOCK_DGRAM); a.recvmsg(1)"),
    "TCP": ("socket", A_SERVER + "c = socket.create_connection(s.getsockname()); c.recv(1)"),
    "accept": ("socket", A_SERVER + "s.accept()"),
    "poll": ("poll", A_PAIR + "p = select.poll(); p.register(a, select.POLLIN); p.poll()"),
    "select": ("poll", A_PAIR + "select.select([a], [], [])"),
    "epoll": ("poll", A_PAIR + "p = select.epoll(); p.register(a, select.EPOLLIN); p.poll()"),
    "lock": ("lock", "lock = threading.Lock(); lock.acquire(); lock.acquire()"),
    "sleep": ("", "time.sleep(1000)"),
    "sleep in select": ("", "select.select([], [], [], 1000)"),
    "sleep in poll": ("", "select.poll().poll()"),
    "child": ("", "pid = os.fork() or time.sleep(1000); os.waitpid(pid, 0)"),
}


def main_thread(pid):
    return snapshot_processes(ProcessTable().tree(pid))[0].threads[0]


@pytest.mark.parametrize("way", WAITS)
def test_wait_is_known_by_its_system_call(way):
    kind, code = WAITS[way]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    child = subprocess.Popen([sys.executable, "-c", HEAD + code], **pipes, start_new_session=True)
    try:
        assert child.stdout.read(3) == b"up\n"
        until(lambda: (thread := main_thread(child.pid)).state == "S" and thread.waits_for == kind)
        thread = main_thread(child.pid)
        assert (thread.state, thread.waits_for) == ("S", kind), thread
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        ("anon_pipe_read", "pipe"),
        ("pipe_read", "pipe"),
        ("unix_stream_read_generic", "socket"),
        ("__skb_wait_for_more_packets", "socket"),
        ("sk_wait_data", "socket"),
        ("inet_csk_accept", "socket"),
        ("futex_wait_queue_me", "lock"),
        ("ep_poll", "poll"),
        ("do_sys_poll", "poll"),
        ("hrtimer_nanosleep", ""),
        ("usleep_range_state", ""),
        ("wait_woken", ""),
        ("", ""),
    ],
)
@pytest.mark.parametrize("call", ["", "running", "-1 0x0 0x0"])
def test_words_of_the_function_count_if_the_call_is_unknown(function, kind, call):
    assert wait_kind(function, call, lambda fd: "") == kind


def test_numbers_of_calls_are_those_of_the_machine():
    asked = []

    def link_of(fd):
        asked.append(fd)
        return "socket:[7]"

    assert wait_kind("wait_woken", "63 0x5 0x0 0x1 0x0", link_of, "aarch64") == "socket"
    assert wait_kind("wait_woken", "0 0x5 0x0 0x1 0x0", link_of, "x86_64") == "socket"
    assert wait_kind("wait_woken", "0 0x5 0x0 0x1 0x0", link_of, "s390x") == ""
    assert asked == [5, 5]
    assert {wait_kind("", f"{number} 0x1 0x1 0x1", link_of, "x86_64") for number in range(500)} == {*KINDS, ""} - {
        "pipe"
    }
