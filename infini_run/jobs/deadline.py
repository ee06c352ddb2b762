"""When the scheduler ends the job that we are in, as it says itself: a limit may be changed while a job runs."""

from __future__ import annotations

import subprocess
import time

from infini_run.jobs.scheduler import clean

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from infini_run.jobs.request import Request

NEVER = float("inf")
_ANSWER_S = 30.0  # for a controller that is busy


def deadline(request: Request, environ: Mapping[str, str], start_s: float) -> float:
    """Seconds since the epoch; infinite: there is no limit, or nobody says. start_s: when the job began.

    Slurm is asked, or has said SLURM_JOB_END_TIME (23.02 and later). OpenPBS counts from the start.
    """
    if request.scheduler == "slurm" and environ.get("SLURM_JOB_ID"):
        return _of_slurm(environ)
    return start_s + request.time_s if request.time_s else NEVER


def _of_slurm(environ: Mapping[str, str]) -> float:
    argv = ["squeue", "-h", "-j", environ["SLURM_JOB_ID"], "-o", "%e"]
    try:
        asked = subprocess.run(
            argv, env=clean(environ), stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=_ANSWER_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return _said_at_start(environ)
    found = parse(asked.stdout)
    return _said_at_start(environ) if asked.returncode else found


def _said_at_start(environ: Mapping[str, str]) -> float:
    text = environ.get("SLURM_JOB_END_TIME", "")
    return float(text) if text.isdecimal() else NEVER


def parse(text: str) -> float:
    """`2026-11-21T23:15:02`, as squeue writes it in our own zone; anything else is no limit."""
    try:
        return time.mktime(time.strptime(text.strip(), "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return NEVER
