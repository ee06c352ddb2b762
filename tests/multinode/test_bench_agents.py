"""The agents that the benchmarks simulate speak the Link of this version."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import pytest

from tests.support.cluster import free_ports
from tests.support.paths import ROOT
from tests.support.waiting import until

TOKEN = {"INFINI_RUN_TOKEN": "0123456789abcdef0123456789abcdef"}
AGENTS = ROOT / "bench/agents.py"


def listens(port):
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.skipif(not AGENTS.exists(), reason="the sdist lacks bench/")
def test_simulated_agents_join_a_head(infini_run):
    port = free_ports(2)
    shape = ["--nnodes=4", "--node_rank=0", "--nproc_per_node=1", f"--rdzv_endpoint=127.0.0.1:{port}"]
    head = infini_run(
        *shape, f"--link_port={port + 1}", "sh", "-c", "echo up; exec sleep 1000", env={**os.environ, **TOKEN}
    )
    until(lambda: listens(port + 1))
    agents = subprocess.Popen(
        [sys.executable, AGENTS, f"127.0.0.1:{port + 1}", "1", "3"],
        env={**os.environ, **TOKEN},
        stdout=subprocess.PIPE,
    )
    with agents:
        assert agents.stdout.readline().startswith(b"joined ")
        head.signal(signal.SIGTERM)
        assert head.wait() == 143
