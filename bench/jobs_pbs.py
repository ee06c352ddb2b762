"""(h) Jobs on a real OpenPBS (tests/support/beds/pbs.sh, where PBS_EXEC has one): from `infini-job submit` to the
first rank's first line, 2 nodes × 4 ranks, beside a hand-written script of qsub and pbs_tmrsh; the state of 100 jobs;
and how long after `infini-job cancel` the ranks of all nodes are gone that ignore TERM, beyond their grace.

Everything is called as the bed's user, by the same words. Ranks say that they are there by a FIFO.
"""

from __future__ import annotations

import os
import re
import select
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from bars import Figure, Row, print_figure
from bed import Bed, bed_from_args, scratch
from engines import started
from jobs import LIMIT_S, Bell
from sample import Case, CommandFailed, expect, finish, interleave, raw, start

ROUNDS = 12
JOBS = 100
GRACE_S = 3
EXEC = os.environ.get("PBS_EXEC", "/opt/pbs")
BY_HAND = """#!/bin/sh
#PBS -l select=2:ncpus=4
#PBS -l place=scatter
#PBS -j oe
for host in $(uniq "$PBS_NODEFILE"); do
    {exec}/bin/pbs_tmrsh $host /bin/sh -c 'for n in 1 2 3 4; do echo up > {bell} & done; wait' &
done
wait
"""
COUNTING = '#!/bin/sh\necho "{name} $*" >> {calls}\nexec {exec}/bin/{name} "$@"\n'
AS_USER = '. "$0/env.sh"; tbu "$@"'


@contextmanager
def pbs(bed: Bed, folder: Path) -> Iterator[list[str]]:
    """The words that call something as its user."""
    if os.geteuid() != 0:
        raise CommandFailed("the bed of OpenPBS is for root")
    base = subprocess.run([bed.python, "-c", "import sys; print(sys.base_prefix)"], capture_output=True, text=True)
    shown = f"{base.stdout.strip()} {Path(__file__).parent.parent} {bed.venv}"
    env = {**bed.env, "PBS_TB_HISTORY": "False", "PBS_TB_SHOW": shown, "PBS_TB_NSPREFIX": "bp"}
    with started("pbs.sh", folder, env):
        yield ["/bin/bash", "-c", AS_USER, str(folder)]


def settle(user: list[str], env: Mapping[str, str]) -> None:
    """Nothing is in the queue."""
    end_s = time.monotonic() + LIMIT_S
    while subprocess.run([*user, "qselect"], env=env, capture_output=True, text=True, check=True).stdout:
        if time.monotonic() > end_s:
            raise CommandFailed("PBS's queue does not become empty")
        time.sleep(0.05)


def time_first_line(
    argv: list[str], user: list[str], env: Mapping[str, str], bell: Bell, *, is_last: bool = False
) -> int:
    settle(user, env)
    begin_ns = time.monotonic_ns()
    pid = start([*user, *argv], env)
    first_ns = bell.hear(8, is_last=is_last)
    expect(argv, finish(pid))
    return first_ns - begin_ns


def time_cancel(submit: list[str], cancel: list[str], user: list[str], env: Mapping[str, str], bell: Bell,
                pipe: Path) -> int:  # fmt: skip
    """Every rank holds the pipe open for writing: its end is theirs, on all nodes."""
    settle(user, env)
    fd = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        done = subprocess.run([*user, *submit], env=env, capture_output=True, text=True, check=True)
        bell.hear(8)
        begin_ns = time.monotonic_ns()
        subprocess.run([*user, *cancel, done.stdout.split()[1]], env=env, check=True)
        if not select.select([fd], [], [], LIMIT_S)[0] or os.read(fd, 1):
            raise CommandFailed("ranks live on after the job was canceled")
        return time.monotonic_ns() - begin_ns
    finally:
        os.close(fd)


def time_status(argv: list[str], user: list[str], env: Mapping[str, str]) -> int:
    begin_ns = time.monotonic_ns()
    said = subprocess.run([*user, *argv], env=env, capture_output=True, text=True, check=True).stdout
    if len(re.findall(r"^ir-\w+ +QUEUED", said, re.MULTILINE)) != JOBS:
        raise CommandFailed(f"not all of {JOBS} jobs wait: {said[:300]}")
    return time.monotonic_ns() - begin_ns


def measure(bed: Bed) -> Figure:
    if not os.access(f"{EXEC}/sbin/pbs_mom", os.X_OK):
        why = f"there is no OpenPBS in {EXEC} (tests/support/beds/pbs.sh says how to get one)"
        return Figure(name="jobs_pbs", rows=[], samples={}, remarks=[f"jobs_pbs left out: {why}"])
    env = {name: text for name, text in bed.env.items() if name != "TMPDIR"}
    with scratch() as folder:
        os.chmod(folder, 0o755)
        with pbs(bed, folder / "pbs") as user:
            return measure_with(bed, folder, user, env)


def measure_with(bed: Bed, folder: Path, user: list[str], env: Mapping[str, str]) -> Figure:
    home = folder / "pbs" / "user"
    (home / "bin").mkdir()
    for name in ("qstat", "qselect"):
        (home / "bin" / name).write_text(COUNTING.format(name=name, calls=home / "calls", exec=EXEC))
        (home / "bin" / name).chmod(0o755)
    bell, pipe = Bell(folder / "bell"), folder / "pipe"
    os.mkfifo(pipe)
    for path in (folder / "bell", pipe):
        path.chmod(0o666)
    (home / "by-hand.sh").write_text(BY_HAND.format(bell=folder / "bell", exec=EXEC))
    infini_job = ["env", "INFINI_JOB_SCHEDULER=pbs", str(bed.venv / "bin" / "infini-job")]
    shape = ["--slots=8", "--slots_per_node=4", "--slot_type=cpu"]
    ours = [*infini_job, "submit", *shape, "--", "sh", "-c", f"echo up > {folder}/bell"]
    stubborn = f"trap '' TERM; exec 9>{pipe}; echo up > {folder}/bell; sleep 1000; sleep 1000"
    graced = [*infini_job, "submit", *shape, f"--run_options=--grace={GRACE_S}", "--", "sh", "-c", stubborn]
    rounds = bed.rounds(ROUNDS)
    first = {"user": user, "env": env, "bell": bell}
    cases = [
        Case(name="submit", measure=partial(time_first_line, ours, **first), rounds=rounds),
        Case(
            name="manual",
            measure=partial(time_first_line, ["qsub", str(home / "by-hand.sh")], **first),
            rounds=rounds,
        ),
        Case(
            name="manual, all",
            measure=partial(time_first_line, ["qsub", str(home / "by-hand.sh")], **first, is_last=True),
            rounds=rounds,
        ),
        Case(
            name="cancel",
            measure=partial(time_cancel, graced, [*infini_job, "cancel"], **first, pipe=pipe),
            rounds=max(3, rounds // 2),
        ),
    ]
    done = interleave(cases)
    settle(user, env)
    (home / "hundred.sh").write_text(
        f"for n in $(seq {JOBS}); do\n"
        f"    {' '.join(infini_job)} submit --slots=1 --slot_type=cpu --options=-h -- true\ndone\n"
    )
    subprocess.run([*user, "sh", str(home / "hundred.sh")], env=env, check=True, capture_output=True)
    asked = ["env", f"PATH={home}/bin:{EXEC}/bin:/usr/bin:/bin", *infini_job[1:], "status"]
    (home / "calls").write_text("")
    (home / "calls").chmod(0o666)
    time_status(asked, user, env)
    queries = len((home / "calls").read_text().splitlines())
    hundred = Case(name="status", measure=partial(time_status, asked, user, env), rounds=rounds)
    interleave([hundred])
    os.close(bell.fd)
    names = ("submit", "manual", "manual, all", "cancel")
    submit, hand, hand_all, cancel = (done[name].median / 1e6 for name in names)
    against = "manual qsub + pbs_tmrsh"
    rows = [
        Row(
            figure="submit to first line, PBS",
            value=submit,
            unit="ms",
            ratio=submit / hand,
            against=against,
            bar="job",
        ),
        Row(figure=f"- {against}", value=hand, unit="ms"),
        # our ranks begin when all nodes have come, and pbs_tmrsh to another node takes longer than to its own
        Row(
            figure="- the same, all lines of both nodes",
            value=hand_all,
            unit="ms",
            ratio=hand_all / hand,
            against=against,
        ),
        Row(figure=f"state of {JOBS} jobs, PBS: queries", value=queries, unit="", bar="one"),
        Row(figure=f"- {JOBS} jobs", value=hundred.median / 1e6, unit="ms"),
        Row(
            figure="cancel to all gone, PBS: beyond the grace",
            value=cancel - GRACE_S * 1000,
            unit="ms",
            bar="cancelled",
        ),
    ]
    return Figure(name="jobs_pbs", rows=rows, samples=raw([*cases, hundred]))


if __name__ == "__main__":
    print_figure(measure(bed_from_args(__doc__)))
