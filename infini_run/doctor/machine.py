"""The process that looks at one machine: `machine.run`, started here, by ssh or by srun.

It writes lines of JSON behind a line that no shell writes at login: facts; the name of each check before it starts;
its findings. So a check that hangs, in a driver or a file system, is known by its name, and all before it is kept.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from infini_run.doctor.finding import Finding, failing

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

MAGIC = b"\0infini-run doctor 1\n"
_LONGEST_S = 120  # when whoever has asked is gone


def run() -> None:
    """Look at this machine, write what is found to stdout, and end."""
    answer(checks(dict(os.environ)))


def answer(to_check: Sequence[tuple[str, Callable[[], list[Finding]]]]) -> None:
    """Write facts, and what these checks find, to stdout, and end."""
    signal.alarm(_LONGEST_S)
    out = os.dup(1)
    os.dup2(2, 1)  # what a library prints is no finding
    os.write(out, MAGIC)
    _write(out, {"facts": facts()})
    for name, check in to_check:
        _write(out, {"check": name})
        for finding in findings_of(name, check):
            _write(out, {"name": finding.name, "grade": finding.grade, "text": finding.text})
    _write(out, {"done": True})
    os._exit(0)


def facts() -> dict[str, Any]:
    """Return the facts that must agree on all machines of a launch."""
    from infini_run.multinode.agent.agent_setup import own_address
    from infini_run.node.ports import free_port
    from infini_run.version import VERSION

    return {
        "host": os.uname().nodename,
        "time": time.time(),
        "version": VERSION,
        "python": ".".join(map(str, sys.version_info[:3])),
        "kernel": os.uname().release,
        "architecture": os.uname().machine,
        "address": own_address(),
        "port": free_port(),
    }


def checks(environ: Mapping[str, str]) -> list[tuple[str, Callable[[], list[Finding]]]]:
    """Return the checks in their order, those that may hang last."""
    from infini_run.doctor.files import check_files
    from infini_run.doctor.kernel import check_kernel
    from infini_run.doctor.limits import check_limits
    from infini_run.doctor.network import check_network
    from infini_run.doctor.software import check_gpus, check_installation
    from infini_run.doctor.trial import check_launch

    return [
        ("infini-run", check_installation),
        ("kernel", check_kernel),
        ("launch", lambda: check_launch(environ)),
        ("limits", lambda: check_limits(environ)),
        ("network", lambda: check_network(environ)),
        ("files", lambda: check_files(environ)),
        ("GPUs", lambda: check_gpus(environ)),
    ]


def findings_of(name: str, check: Callable[[], list[Finding]]) -> list[Finding]:
    """Run a check. One that meets a limit of the machine has found something, too."""
    try:
        return check()
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return [failing(name, f"cannot be checked: {where}{error.strerror}")]
    except ImportError as error:
        return [failing(name, f"cannot be checked: {error}")]


def _write(fd: int, content: dict[str, Any]) -> None:
    from json import dumps

    data = (dumps(content) + "\n").encode()
    while data:
        data = data[os.write(fd, data) :]
