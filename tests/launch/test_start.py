"""The start: a worker sees what a shell's exec would give it; what cannot be had fails cleanly, by its name."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys

import pytest

from tests.support.build_c import build
from tests.support.command import COMMAND, LOCALES, in_locale, locale_of
from tests.support.launch_shapes import strace, with_strace
from tests.support.processes import marked, processes
from tests.support.rows import sample
from tests.support.waiting import until


def plain(argv, **kwargs):
    """What the program says when it is started without us."""
    return subprocess.run(argv, stdout=subprocess.PIPE, check=True, **kwargs).stdout


def limit(number, soft, hard):
    return lambda: resource.setrlimit(number, (soft, hard))


def both(infini_run, argv, **kwargs):
    command = infini_run(*argv, **kwargs)
    assert command.wait() == 0, command.err
    return command.out, plain(argv, **kwargs)


def fds_of(pid):
    found = {}
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            found[int(fd)] = os.readlink(f"/proc/{pid}/fd/{fd}")
        except FileNotFoundError:
            continue  # closed meanwhile
    return found


def names_below(pid):
    return {name: child for child, (parent, _, name) in processes().items() if parent == pid}


@with_strace
@pytest.mark.parametrize("number", [90, 5000])
def test_launcher_lets_go_of_an_inherited_descriptor_without_a_look_at_each_number(infini_run, tmp_path, number):
    inherited = os.open("/dev/zero", os.O_RDONLY)
    os.dup2(inherited, number)
    os.close(inherited)
    try:
        counts = tmp_path / "counts"
        command = infini_run("sleep", "1000", under=strace(counts, "-c", "-e", "trace=fcntl"), pass_fds=(number,))
    finally:
        os.close(number)
    until(lambda: "sleep" in names_below(command.pid))
    sleep = names_below(command.pid)["sleep"]
    until(lambda: number not in fds_of(command.pid))
    assert fds_of(sleep)[number] == "/dev/zero"
    command.signal(signal.SIGTERM)
    assert command.wait() == 143
    calls = next(line for line in counts.read_text().splitlines() if line.endswith("fcntl"))
    assert int(calls.split()[3]) < 600


# ---- what a worker sees


def test_working_directory_is_where_we_were_started(infini_run, tmp_path, every_path):
    ours, theirs = both(infini_run, ["pwd", "-P"], cwd=tmp_path)
    assert ours == theirs == f"{tmp_path.resolve()}\n".encode()


def test_umask_is_handed_on(infini_run, every_path):
    ours, theirs = both(infini_run, ["sh", "-c", "umask"], preexec_fn=lambda: os.umask(0o137))
    assert ours == theirs == b"0137\n"


def test_limits_are_handed_on_though_we_raise_our_own(infini_run, every_path):
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    ours, theirs = both(infini_run, ["cat", "/proc/self/limits"], preexec_fn=limit(resource.RLIMIT_NOFILE, 77, hard))
    assert ours == theirs
    assert b"77" in ours


def test_signals_are_as_a_shell_would_leave_them(infini_run, every_path):
    def prepare():
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1, signal.SIGRTMIN + 2])
        signal.signal(signal.SIGQUIT, signal.SIG_IGN)

    ours, theirs = both(infini_run, ["grep", "^Sig[BIC]", "/proc/self/status"], preexec_fn=prepare)
    assert ours == theirs


@pytest.mark.parametrize("console", ["inherit", "prefix", "none"])
def test_no_descriptor_of_ours_is_in_a_rank(infini_run, tmp_path, every_path, console):
    command = infini_run(
        "--nproc_per_node=3", f"--console={console}", f"--log_dir={tmp_path}", "sh", "-c", "ls /proc/$$/fd"
    )
    assert command.wait() == 0
    for rank in range(3):
        assert (tmp_path / f"rank_{rank}.log").read_text().split() == ["0", "1", "2"]


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2)])
@pytest.mark.rows(8)
def test_closed_stdio_is_dev_null_and_takes_no_other_file(infini_run, closed, every_path):
    under = ("sh", "-c", 'exec "$@" ' + " ".join(f"{fd}>&-" for fd in closed), "sh")
    command = infini_run("sleep", "1000", under=under)
    until(lambda: "sleep" in names_below(command.pid))
    sleep = names_below(command.pid)["sleep"]
    until(lambda: sorted(fds_of(sleep)) == [0, 1, 2])  # its loader has opened libraries, one after the other
    ours, theirs = fds_of(command.pid), fds_of(sleep)
    for fd in range(3):
        assert ours[fd] == theirs[fd]
        assert theirs[fd].startswith("/dev/null" if fd in (0, *closed) else "pipe:")
    command.signal(signal.SIGTERM)
    assert command.wait() == 143


def test_closed_stdio_with_labels_and_logs_loses_nothing(infini_run, tmp_path, every_path):
    under = ("sh", "-c", 'exec "$@" 0<&- 1>&- 2>&-', "sh")
    words = ["--console=prefix", f"--log_dir={tmp_path}", "--nproc_per_node=2"]
    command = infini_run(*words, "sh", "-c", "echo out; echo err >&2", under=under)
    assert command.wait() == 0
    for rank in range(2):
        assert sorted((tmp_path / f"rank_{rank}.log").read_text().splitlines()) == ["err: err", "out"]


def test_rank_is_the_leader_of_a_group_of_its_own(infini_run, every_path):
    command = infini_run("--nproc_per_node=3", "sh", "-c", 'read -r a b c d e f < /proc/$$/stat; echo "$$ $d $e"')
    assert command.wait() == 0
    rows = [line.split() for line in command.out.decode().splitlines()]
    assert len(rows) == 3
    assert all(pid == parent_group for pid, _, parent_group in rows)
    assert {parent for _, parent, _ in rows} == {str(command.pid)}


# ---- limits, walked


def walk_is_clean(command, limits):
    """It worked, or it said in one line which limit was hit; either way nothing is left."""
    code = command.wait()
    assert not marked(), (code, command.err)
    if code == 0:
        return True
    assert code == 1, (code, command.err)
    assert b"Traceback" not in command.err, command.err
    assert any(limit in command.err for limit in limits), command.err
    assert command.err.count(b"\n") == 1, command.err
    return False


def walk_descriptors(infini_run, *flags):
    def run(n):
        return infini_run(*flags, "true", preexec_fn=limit(resource.RLIMIT_NOFILE, n, n))

    needed = first_that_starts_an_interpreter()
    limits = [needed, *sample(range(needed + 1, 59), 10), 59]
    results = [walk_is_clean(run(n), (b"ulimit -n",)) for n in limits]
    assert results == sorted(results), "more descriptors made it worse"
    assert results[-1]
    return results


def first_that_starts_an_interpreter():
    """How many descriptors Python itself needs to come as far as us: below that nobody can speak."""
    words = [sys.executable, "-c", "import infini_run.cli, infini_run.options.options, infini_run.core.group"]
    for n in range(3, 60):
        done = subprocess.run(words, preexec_fn=limit(resource.RLIMIT_NOFILE, n, n), capture_output=True, check=False)
        if done.returncode == 0:
            return n
    raise AssertionError("Python does not start at all")


@pytest.mark.rows(2)
def test_descriptor_limit_walked_one_by_one(infini_run, every_path):
    assert not all(walk_descriptors(infini_run, "--nproc_per_node=4"))


def test_descriptor_limit_walked_one_by_one_with_pipes_and_logs(infini_run, tmp_path):
    assert not all(walk_descriptors(infini_run, "--nproc_per_node=4", "--console=prefix", f"--log_dir={tmp_path}"))


def test_soft_descriptor_limit_does_not_matter(infini_run, every_path):
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    command = infini_run(
        "--nproc_per_node=32", "--console=prefix", "sh", "-c", "ulimit -n", preexec_fn=limit(7, 20, hard)
    )
    assert command.wait() == 0, command.err
    assert {line.split()[-1] for line in command.out.splitlines()} == {b"20"}


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs a user of its own, whose processes are counted")
def test_rank_that_cannot_be_created_is_named(infini_run, every_path):
    uid = 31000 + os.getpid() % 10000
    words = (f"--reuid={uid}", f"--regid={uid}", "--clear-groups")
    under = ("setpriv", *words, "--inh-caps=-all,+dac_override", "--ambient-caps=-all,+dac_override")
    command = infini_run(
        "--nproc_per_node=6", "sh", "-c", "trap '' TERM; exec sleep 1000", under=under,
        preexec_fn=limit(resource.RLIMIT_NPROC, 4, 4),
    )  # fmt: skip
    assert command.wait() == 1
    assert b"rank 2 cannot be started: creating the process: " in command.err
    assert not marked()


def beside_stranger():
    """As a user who cannot open the pipes of these tests anew, so that a thread has to write there."""
    uid = 41000 + os.getpid() % 10000
    words = (f"--reuid={uid}", f"--regid={uid}", "--clear-groups")
    return ("setpriv", *words, "--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search")


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs a user of its own, whose processes are counted")
def test_limit_is_named_where_no_thread_can_write(infini_run):
    command = infini_run("sleep", "1000", under=beside_stranger(), preexec_fn=limit(resource.RLIMIT_NPROC, 1, 1))
    assert not walk_is_clean(command, (b"ulimit -u",))


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs a pipe of another user")
def test_limit_is_named_where_writing_needs_descriptors(infini_run):
    needed = first_that_starts_an_interpreter()
    for n in range(needed, needed + 6):
        command = infini_run("sleep", "1000", under=beside_stranger(), preexec_fn=limit(resource.RLIMIT_NOFILE, n, n))
        assert not walk_is_clean(command, (b"ulimit -n",))


@pytest.mark.parametrize(("number", "named"), [(errno.ENOMEM, "ulimit -v"), (errno.EMFILE, "ulimit -n")])
def test_limit_is_named_where_no_import_works(number, named):
    """As in a walk of ulimit -v, where it depends on the allocator which step finds no memory."""
    code = (
        "import sys, infini_run.cli\n"
        "class Nothing:\n"
        "    def find_spec(*_):\n"
        f"        raise OSError({number}, '')\n"
        "sys.modules.pop('infini_run.system.resource_limits', None)\n"
        "sys.meta_path[:] = [Nothing]\n"
        f"print(infini_run.cli._limit_behind(OSError({number}, '')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert named in done.stdout


# ---- programs that cannot be run


def script(path, text, mode=0o755):
    path.write_bytes(text)
    path.chmod(mode)
    return path


def test_one_rank_that_cannot_start_takes_the_others_down(infini_run, tmp_path, every_path):
    """The file goes away after it was looked for: those that have it already are stopped."""
    path = script(tmp_path / "program", b"#!/bin/sh\n[ $RANK = 0 ] && rm -f $0 && exit 2\nexec sleep 1000\n")
    command = infini_run("--nproc_per_node=64", "--grace=1000", path)
    code = command.wait()
    assert code in (126, 127, 2), command.err
    assert not marked()


def test_a_clone_that_is_refused_becomes_a_fork_that_still_tells_why(tmp_path):
    """A sandbox or an emulator that knows no CLONE_PIDFD and no CLONE_VM: strace refuses the first two clones."""
    if shutil.which("strace") is None:
        pytest.skip("needs strace")
    if "ASAN_OPTIONS" in os.environ:
        pytest.skip("under a sanitizer there is no shared clone to refuse")
    refuse = [
        "strace",
        "-qq",
        "-o",
        tmp_path / "trace",
        "-e",
        "trace=clone",
        "-e",
        "inject=clone:error=EINVAL:when=1..2",
    ]
    path = script(tmp_path / "program", b"\0\1\2 no format that anybody knows")
    done = subprocess.run([*refuse, *COMMAND, "--nproc_per_node=3", path], capture_output=True, check=False)
    assert done.returncode == 126
    assert b"could not be started: executing the program: Exec format error" in done.stderr
    assert subprocess.run([*refuse, *COMMAND, "--nproc_per_node=3", "true"], check=False).returncode == 0
    assert (tmp_path / "trace").read_text().count("CLONE_VM") == 2


FORBIDDEN = [
    (("setpgid", 0, 0), "making its process group"),  # our own is for the child's number, not for 0
    (("prctl", 0, 1), "tying it to the launcher"),  # PR_SET_PDEATHSIG
    (("dup3", 2, 0), "connecting its stdio"),
    (("prlimit64", 3, 0), "restoring its descriptor limit"),  # what only sets
    (("rt_sigaction", 0, 13), "restoring its signals"),  # SIGPIPE
    (("mount", 3, 0x44000), "mounting /proc in its PID namespace"),  # MS_REC | MS_PRIVATE
    (("mount", 3, 0xE), "mounting /proc in its PID namespace"),  # MS_NOSUID | MS_NODEV | MS_NOEXEC
]


@pytest.mark.parametrize(("forbidden", "step"), FORBIDDEN, ids=[f"{call[0]}-{call[2]}" for call, _ in FORBIDDEN])
@pytest.mark.rows(8)
def test_what_a_sandbox_forbids_between_clone_and_exec_is_told_with_its_step(infini_run, forbidden, step, every_path):
    if forbidden[0] == "prlimit64" and "ASAN_OPTIONS" in os.environ:
        pytest.skip("AddressSanitizer's own start sets a limit")
    words = ["--nproc_per_node=2", "--console=prefix", "true"]
    if forbidden[0] == "mount":
        if os.geteuid() != 0:
            pytest.skip("needs root: a user namespace would come first")
        words = ["--isolate", "true"]
    command = infini_run(*words, under=(build("deny.c", instead_of="*"), *map(str, forbidden)))
    code = command.wait()
    if code == 77:
        pytest.skip("no filter is permitted here")
    assert code == 1
    assert f"{step}: Operation not permitted".encode() in command.err
    assert not marked()


# ---- the environment


@pytest.mark.parametrize("flags", [(), ("--nproc_per_node=1", "--isolate"), ("--max_restarts=1",)])
@pytest.mark.parametrize("locale", LOCALES, ids=str)
def test_rank_has_locale_that_was_given(locale, flags, infini_run):
    if "--isolate" in flags and os.geteuid() != 0:
        pytest.skip("needs root")
    command = infini_run(*flags, "env", env=in_locale(locale, os.environ))
    assert command.wait() == 0
    assert locale_of(command.out.decode().splitlines()) == locale


def test_locale_is_left_alone_without_proc():
    """Nobody knows then what was given."""
    code = (
        "from infini_run import lean_os as os; import posix; open = os.open; "
        "os.open = lambda path, flags: open('/nonexistent', flags); os.drop_coerced_locale(); "
        "print(posix.environ.get(b'LC_CTYPE'))"
    )
    env = in_locale({}, os.environ)
    found = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert found.stdout in ("b'C.UTF-8'\n", "None\n")  # None: this build does not set it
