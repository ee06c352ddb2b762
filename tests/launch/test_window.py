"""Many ranks: each gets a table of few descriptors (csrc/spawn/window.c), on kernels and in sandboxes of all kinds,
and with all that it would have had from a shell."""

from __future__ import annotations

import os
import re
import signal

import pytest

from tests.support.build_c import build
from tests.support.command import play
from tests.support.launch_shapes import strace, with_strace
from tests.support.processes import is_alive, marked
from tests.support.waiting import until

N = 40  # a third of the places are used for a third time
MANY = f"--nproc_per_node={N}"
NOTHING, UNSHARING, CLONE_FILES = 0xFFFFFFFF, 2, 0x400
CUTS = (6, 11)  # the first kernel that cuts a table without a trace of what it cut off
has_window = pytest.mark.skipif(
    "TEST_PYTHON" in os.environ
    or "ASAN_OPTIONS" in os.environ
    or tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) < CUTS,
    reason="needs a core that shares memory, and Linux 6.11",
)


def deny(*call):
    return (build("deny.c", instead_of="*"), *map(str, call))


SANDBOXES = {
    "none": (),
    "no close_range": ("close_range", 0, NOTHING),  # of our question whether it is to be had
    "no table of its own by close_range": ("close_range", 2, UNSHARING),
}


@pytest.fixture
def inherited():
    """The reading end of a pipe: at a low number, and at one beyond all that the launcher opens."""
    low, write = os.pipe()
    high = 3000
    os.dup2(low, high)
    os.write(write, b"x" * 2 * N)
    yield low, high
    for fd in (low, high, write):
        os.close(fd)


def check_ranks(infini_run, tmp_path, inherited, *flags, under=()):
    """Each has had its own stdio, and of other descriptors what we had inherited, and no more."""
    script = "echo out $RANK; echo err $RANK >&2; ls /proc/$$/fd; " + "".join(
        f"head -c1 <&{fd}; " for fd in inherited
    )
    argv = ("bash", "-c", script)
    command = infini_run(MANY, *flags, f"--log_dir={tmp_path}", *argv, pass_fds=inherited, under=under)
    if command.wait() == 77:
        pytest.skip("no filter is permitted here")
    assert command.process.returncode == 0, command.err
    for rank in range(N):
        words = (tmp_path / f"rank_{rank}.log").read_text().replace("err: ", "").split()
        fds = ["0", "1", "2", *map(str, inherited)]
        assert sorted(words) == sorted(["out", str(rank), "err", str(rank), *fds, "xx"])
    return command


def test_each_of_many_ranks_has_its_own_stdio_and_what_was_inherited(infini_run, tmp_path, inherited, every_path):
    command = check_ranks(infini_run, tmp_path, inherited, "--console=prefix")
    said = re.findall(rb"\[rank +(\d+)\] out (\d+)", command.out)
    assert sorted(said) == sorted((b"%d" % rank, b"%d" % rank) for rank in range(N))


@pytest.mark.parametrize("flags", [("--console=none",), ()], ids=str)
def test_inherited_descriptors_reach_ranks_with_every_console(infini_run, tmp_path, inherited, flags):
    check_ranks(infini_run, tmp_path, inherited, *flags)


@pytest.mark.parametrize("sandbox", SANDBOXES)
def test_inherited_descriptors_reach_ranks_in_every_sandbox(infini_run, tmp_path, inherited, sandbox):
    call = SANDBOXES[sandbox]
    check_ranks(infini_run, tmp_path, inherited, "--console=prefix", under=deny(*call) if call else ())


@has_window
@with_strace
def test_no_table_of_many_ranks_is_copied(infini_run, tmp_path):
    """Each shares it until it takes its own, which ends below what the launcher has opened for the ranks."""
    trace = tmp_path / "trace"
    under = ("strace", "-D", "-f", "-qq", "-o", trace, "-e", "trace=clone,clone3,close_range,unshare")
    assert infini_run(MANY, f"--log_dir={tmp_path}", "true", under=under).wait() == 0
    text = trace.read_text()
    assert len(re.findall(r"clone3?\(.*CLONE_FILES", text)) == N
    ends = [int(end) for end in re.findall(r"close_range\((\d+), \d+, CLOSE_RANGE_UNSHARE", text)]
    assert len(ends) == N
    assert max(ends) < 100
    assert "unshare(" not in text


@with_strace
def test_before_linux_6_11_every_table_is_copied_whole(infini_run, tmp_path):
    """There a rank with a table that was cut would get its 65th descriptor at a number beyond its limit."""
    trace = tmp_path / "trace"
    traced = strace(trace, "-f", "-e", "trace=clone,clone3,close_range")
    under = ("setarch", "--uname-2.6", *traced)
    assert infini_run(MANY, f"--log_dir={tmp_path}", "true", under=under).wait() == 0
    text = trace.read_text()
    assert "CLONE_FILES" not in text
    assert "CLOSE_RANGE_UNSHARE" not in text


def test_few_descriptors_start_as_many_ranks_as_before(infini_run):
    """Near the limit the window would take what the ranks need."""
    from resource import RLIMIT_NOFILE, setrlimit

    limit = 3 * N + 30
    command = infini_run(
        MANY, "--console=inherit", "true", preexec_fn=lambda: setrlimit(RLIMIT_NOFILE, (limit, limit))
    )
    assert command.wait() == 0, command.err


@has_window
def test_rank_that_gets_no_table_fails_by_its_step_and_ends_the_start(infini_run):
    """It has ended without a word: the kernel tells the launcher, which would wait for it else."""
    under = (*deny("close_range", 2, UNSHARING), *deny("unshare", 0, CLONE_FILES))
    command = infini_run(MANY, "true", under=under)
    if command.wait() == 77:
        pytest.skip("no filter is permitted here")
    assert command.process.returncode == 1
    assert b"opening pipes: Operation not permitted" in command.err
    assert not marked()


@has_window
@with_strace
def test_rank_that_is_held_before_its_first_step_is_killed(infini_run, tmp_path):
    """The tracer holds each for 5.5 s; the launcher waits for 5 s, then it ends the one whose places it needs. Of 32
    ranks, the fewest that share places, each place is used twice."""
    under = ("strace", "-D", "-f", "-qq", "-o", tmp_path / "trace", "-e", "trace=close_range")
    hold = ("-e", "inject=close_range:delay_enter=5500000:when=1")
    command = infini_run("--nproc_per_node=32", "true", under=(*under, *hold))
    assert command.wait() == 128 + signal.SIGKILL
    assert b"SIGKILL" in command.err
    assert not marked()


@with_strace
@pytest.mark.parametrize("call", ["clone", "dup3", "setpgid"])
def test_none_of_many_ranks_outlives_a_launcher_killed_while_they_start(infini_run, tmp_path, call):
    """Then children have our table, our lock on the guard's pipe with it, or a place that is used again."""
    for k in (1, 2, 17, 33, N):
        under = strace(tmp_path / "trace", "-e", f"trace={call}", "-e", f"inject={call}:signal=KILL:when={k}")
        command = infini_run(MANY, *play("wait"), under=under)
        assert command.wait() == -signal.SIGKILL
        until(lambda: not marked())
        assert not is_alive(command.pid)


def test_restarted_ranks_have_what_was_inherited(infini_run, tmp_path, inherited):
    script = f"test $TORCHELASTIC_RESTART_COUNT = 1 || exit 1; head -c1 <&{inherited[1]}"
    again = (MANY, "--max_restarts=1", "--restart_delay=0", f"--log_dir={tmp_path}")
    command = infini_run(*again, "bash", "-c", script, pass_fds=inherited)
    assert command.wait() == 0, command.err
