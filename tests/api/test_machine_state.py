"""Any order of launch, signal, kill, stop, wait and close: what ProcessLauncher says is what happened."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import infini_run as ir
from tests.support.command import Bell
from tests.support.processes import marked
from tests.support.waiting import until

NPROC = 3
# Each rank has a FIFO of its own, open at both ends: it exits with what is written there.
RANK = 'exec 3<>"$0.$RANK"; echo "$RANK" > "$0"; read code <&3; exit "$code"'
RANKS = st.integers(0, NPROC - 1)
ENDING = st.sampled_from([signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGKILL])


class Launching(RuleBasedStateMachine):
    """The model: each rank's end (code as a shell says it, stopped), None while it runs; the first failure."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.mkdtemp()
        self.bell = Bell(Path(self.folder) / "bell")
        self.rank_bells = [Bell(Path(f"{self.bell.path}.{rank}")) for rank in range(NPROC)]
        self.launchers = {
            keep_going: ir.ProcessLauncher(
                ["sh", "-c", RANK, self.bell.path], nproc_per_node=NPROC, keep_going=keep_going
            )
            for keep_going in (False, True)
        }
        self.keep_going = True
        self.launcher = self.launchers[True]
        self.launches = 0
        self.ends: list[tuple[int, bool] | None] = [(0, False)] * NPROC
        self.first: int | None = None
        self.pids: list[int] = []

    def teardown(self):
        self.launcher.close()
        for bell in (self.bell, *self.rank_bells):
            bell.close()
        shutil.rmtree(self.folder)
        assert marked() == {}

    # ---- the model

    def alive(self):
        return any(end is None for end in self.ends)

    def end(self, rank, code, stopped=False):
        """One rank has ended; where it failed and must not, so have the others."""
        assert self.ends[rank] is None
        self.ends[rank] = (code, stopped)
        if code != 0 and not stopped and self.first is None:
            self.first = rank
            if not self.keep_going:
                self.stop(128 + signal.SIGTERM)

    def stop(self, code):
        self.ends = [(code, True) if end is None else end for end in self.ends]

    def settle(self, rank):
        """Wait until the launcher has heard of this rank's end and of all that follows from it."""
        until(lambda: self.launcher.exit_code(rank) is not None)
        if not self.alive():
            assert self.launcher.wait()

    # ---- what can be done

    @precondition(lambda self: not self.alive())
    @rule(keep_going=st.booleans())
    def launch(self, keep_going):
        self.keep_going, self.launcher = keep_going, self.launchers[keep_going]
        self.launcher.launch()
        self.launches += 1
        self.ends, self.first = [None] * NPROC, None
        assert sorted(self.bell.hear(NPROC)) == [str(rank) for rank in range(NPROC)]
        self.pids = [exit_.pid for exit_ in self.launcher.status()]

    @precondition(lambda self: self.alive())
    @rule()
    def launch_again_too_early(self):
        with pytest.raises(ir.InfiniRunError):
            self.launcher.launch()

    @precondition(lambda self: self.alive())
    @rule(rank=RANKS, code=st.sampled_from([0, 0, 1, 3, 255]))
    def let_exit(self, rank, code):
        if self.ends[rank] is None:
            self.rank_bells[rank].ring(str(code))
            self.end(rank, code)
            self.settle(rank)

    @precondition(lambda self: self.launches)
    @rule(rank=RANKS, number=ENDING)
    def signal_one(self, rank, number):
        reached = self.launcher.signal(number, rank)
        assert reached == (self.ends[rank] is None)
        if reached:
            self.end(rank, 128 + number)
            self.settle(rank)

    @precondition(lambda self: self.launches)
    @rule(number=ENDING)
    def signal_all(self, number):
        living = [rank for rank, end in enumerate(self.ends) if end is None]
        assert self.launcher.signal(number) == len(living)
        if living:
            self.launcher.wait()
            ends = self.launcher.status()
            assert {ends[rank].shell_code for rank in living} <= {128 + number, 128 + signal.SIGTERM}
            if self.first is None:  # whichever of them was the first to die
                self.first = self.launcher.first_failure().rank
                assert self.first in living
            for rank in living:
                self.ends[rank] = (ends[rank].shell_code, ends[rank].stopped)

    @precondition(lambda self: self.alive())
    @rule(ranks=st.permutations(range(NPROC)))
    def kill_from_outside_one_after_the_other(self, ranks):
        living = [rank for rank in ranks if self.ends[rank] is None]
        for rank in living:
            pid = self.pids[rank]
            os.kill(pid, signal.SIGKILL)
            until(lambda pid=pid: Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z")
        self.launcher.wait()
        if self.first is None:
            self.first = living[0]
        status = self.launcher.status()
        for rank in living:
            self.ends[rank] = (128 + signal.SIGKILL, status[rank].stopped)
        assert not status[self.first].stopped

    @precondition(lambda self: self.alive())
    @rule(rank=RANKS)
    def freeze(self, rank):
        assert self.launcher.signal(signal.SIGSTOP, rank) == (self.ends[rank] is None)
        if self.ends[rank] is None:
            until(lambda: Path(f"/proc/{self.pids[rank]}/stat").read_text().split()[2] == "T")
            self.launcher.signal(signal.SIGCONT, rank)

    @precondition(lambda self: self.launches)
    @rule()
    def terminate(self):
        self.launcher.terminate()
        self.stop(128 + signal.SIGTERM)
        assert self.launcher.wait()

    @precondition(lambda self: self.launches)
    @rule()
    def kill(self):
        self.launcher.kill()
        self.stop(128 + signal.SIGKILL)
        assert self.launcher.wait()

    @rule()
    def close(self):
        self.launcher.close()
        self.stop(128 + signal.SIGTERM)

    @precondition(lambda self: self.launches)
    @rule()
    def wait_a_little(self):
        assert self.launcher.wait(0) is not self.alive()

    @precondition(lambda self: self.launches)
    @rule()
    def ask_for_events(self):
        for event in self.launcher.events(timeout_s=0):
            assert event.rank == -1 or event.pid == self.pids[event.rank]

    # ---- what must hold

    @invariant()
    def what_the_launcher_says_is_what_happened(self):
        if not self.launches:
            return
        status = self.launcher.status()
        said = [None if e.end_s is None else (e.shell_code, e.stopped) for e in status]
        assert said == self.ends
        assert [self.launcher.exit_code(rank) for rank in range(NPROC)] == [end and end[0] for end in self.ends]
        first = self.launcher.first_failure()
        assert (None if first is None else first.rank) == self.first
        assert self.launcher.running() == self.alive()
        assert [e.pid for e in status] == self.pids
        if not self.alive():
            stopped = next((code for code, _ in self.ends if code), 0)
            expected = stopped if self.first is None else self.ends[self.first][0]
            assert self.launcher.report().exit_code == expected


Launching.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=15,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestLaunching = Launching.TestCase
