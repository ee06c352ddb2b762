"""A node that has lost the head asks again until the head answers: whoever else listens there is not it."""

from __future__ import annotations

import os
import signal
import socket
import threading

import pytest

from infini_run.jobs import lost_head
from infini_run.jobs.allocation.job_run import HEAD_NODE
from infini_run.jobs.folder.job_dir import JobDir
from infini_run.jobs.lost_head import await_loss
from tests.multinode.test_by_hand import TOKEN, no_agent_left, port  # noqa: F401
from tests.multinode.test_elastic_by_hand import read_error_until


@pytest.fixture
def others():
    """Programs that listen: one that ends each connection, one that sends back what it hears."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]

    def serve(listener, echoes):
        while True:
            try:
                wire = listener.accept()[0]
            except OSError:
                return
            with wire:
                while echoes and (data := wire.recv(4096)):
                    wire.sendall(data)

    threads = [
        threading.Thread(target=serve, args=(at, echoes)) for at, echoes in zip(listeners, (0, 1), strict=True)
    ]
    for thread in threads:
        thread.start()
    yield [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
    for thread in threads:
        thread.join()


@pytest.fixture
def has_lost(tmp_path):
    """Whether a node that hears nothing of the head takes it for lost, where Slurm says that its node has gone."""
    squeue = tmp_path / "bin" / "squeue"
    squeue.parent.mkdir()
    squeue.write_text("#!/bin/sh\necho 'job|7|RUNNING|None|node[2-3]'\n")
    squeue.chmod(0o755)
    (squeue.parent / "sbatch").symlink_to(squeue)  # by which Slurm is found, also where it is not installed

    def has_lost(port, token=TOKEN):  # noqa: F811
        environ = {"PATH": f"{squeue.parent}:{os.environ['PATH']}", HEAD_NODE: "node1", "INFINI_RUN_TOKEN": token}
        return await_loss(JobDir(str(tmp_path / "job")), f"127.0.0.2,127.0.0.1:{port}", environ)

    return has_lost


def test_another_program_on_the_port_is_not_the_head(others, has_lost):
    assert [has_lost(each) for each in others] == [True, True]


def test_the_head_is_known_by_the_token(infini_run, port, has_lost, suspended, monkeypatch):  # noqa: F811
    env = {**os.environ, "INFINI_RUN_TOKEN": TOKEN}
    flags = ("--nnodes=2", "--spares=1", f"--rdzv_endpoint=127.0.0.1:{port}")
    head = infini_run(*flags, "true", env=env)
    read_error_until([head], b"1 of at least 2 nodes joined")
    assert not has_lost(port + 1)
    assert has_lost(port + 1, token="another one of sixteen characters")
    monkeypatch.setattr(lost_head, "HANDSHAKE_S", 0.2)
    suspended(head.pid)  # the kernel still takes connections for it
    assert has_lost(port + 1)
    os.kill(head.pid, signal.SIGCONT)
    head.signal(signal.SIGTERM)
    assert head.wait() == 143
