"""What ps(1) shows of a process that has set its title, and of a worker."""

from __future__ import annotations

import subprocess
import sys

import pytest

import infini_run as ir
from tests.support.waiting import LIMIT_S

SET = "import sys; from infini_run.system.process_title import set_title; set_title(sys.argv[1]); "
READ = "print(open('/proc/self/cmdline', 'rb').read())"


@pytest.mark.parametrize("title", ["a worker", "é", "x" * 10_000])
def test_title_replaces_arguments_as_far_as_they_had_room(title):
    argv = [sys.executable, "-c", SET + READ, title]
    found = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    shown = eval(found.stdout).decode().rstrip("\0")
    assert shown
    assert title.startswith(shown)
    assert len(title) > 1000 or shown == title


@pytest.mark.parametrize("preload", [(), ("decimal",)])
def test_worker_has_its_rank_as_title(preload):
    with ir.Crew(lambda _: open("/proc/self/cmdline", "rb").read(), nproc=2, preload=preload) as crew:
        for rank, shown in enumerate(crew.broadcast(0).result(LIMIT_S)):
            assert shown.decode().startswith(f"infini-run worker: rank {rank} of 2, ")
            assert len(shown) < 200
