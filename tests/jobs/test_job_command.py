"""One command of a scheduler: what it said, however it ended, and nothing of it left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from infini_run.jobs.schedulers.scheduler_command import MISSING, kill_group, run_command
from tests.support.build_c import build
from tests.support.job_case import few_descriptors
from tests.support.processes import is_alive
from tests.support.waiting import LIMIT_S, until


def sh(text, limit_s=LIMIT_S):
    return run_command(["sh", "-c", text], os.environ, limit_s)


def test_what_it_said_and_how_it_ended():
    said = sh("echo out; echo error >&2; exit 3")
    assert (said.out, said.error, said.code, said.timed_out) == ("out\n", "error\n", 3, False)


def test_a_signal_is_a_code_as_a_shell_has_it():
    assert sh("kill -9 $$").code == 137


def test_a_program_that_is_not_there_is_told():
    said = run_command(["no-such-program"], os.environ)
    assert (said.code, said.error) == (MISSING, "no-such-program: No such file or directory")


def test_it_gets_the_environment_that_was_given_and_no_stdin():
    said = run_command(["/bin/sh", "-c", "read line && echo read; echo $A $HOME"], {"A": "1"})
    assert said.out == "1\n"


def test_it_gets_variables_that_no_shell_would_keep():
    """Modules of a site are functions of bash, which sbatch takes along."""
    odd = {"BASH_FUNC_module%%": "() {  echo loaded\n}", "a.b": "it's"}
    said = run_command(["env", "-0"], {**odd, "PATH": os.environ["PATH"], "A": "1"})
    found = dict(each.split("=", 1) for each in said.out.split("\0") if each)
    assert {name: found.get(name) for name in ("BASH_FUNC_module%%", "a.b", "A")} == {
        "BASH_FUNC_module%%": "() {  echo loaded\n}", "a.b": "it's", "A": "1",
    }  # fmt: skip


def test_every_number_of_descriptors_is_enough_or_is_told():
    """None of its own stays open, which a fixture checks after each test."""
    ends = []
    for count in range(12):
        with few_descriptors(count):
            said = sh("echo out")
        ends.append((said.code, said.out, said.error))
    assert set(ends) == {(MISSING, "", "sh: Too many open files"), (0, "out\n", "")}
    assert (ends[0][0], ends[-1][0]) == (MISSING, 0)


def test_it_gets_no_descriptor_of_its_caller():
    """qsub leaves a daemon behind, which would hold a pipe of ours open."""
    read, write = os.pipe()
    os.set_inheritable(write, True)
    try:
        assert sh("ls /proc/$$/fd").out.split() == ["0", "1", "2"]
    finally:
        os.close(read)
        os.close(write)


def test_it_is_answered_where_our_own_stdio_is_closed():
    code = (
        "import os\nfrom infini_run.jobs.schedulers.scheduler_command import run_command\n"
        "words = ['sh', '-c', 'read line; echo out $line; echo error >&2; ls /proc/$$/fd']\n"
        "said = run_command(words, os.environ, given='in')\n"
        "open('/proc/self/fd/9', 'w').write(repr((said.code, said.out.split(), said.error)))"
    )
    words = ["sh", "-c", 'exec "$@" 9>&1 <&- >&- 2>&-', "sh", sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.stdout == "(0, ['out', 'in', '0', '1', '2'], 'error\\n')"


def test_what_is_too_slow_is_killed_with_all_that_it_has_started(bell):
    said = sh(f"sleep 1000 & echo $! >{bell.path}; echo so far; wait", 0.5)
    (pid,) = map(int, bell.hear(1))
    assert (said.timed_out, said.out, said.code) == (True, "so far\n", 137)
    until(lambda: not is_alive(pid))  # SIGKILL is on its way


def test_what_it_leaves_behind_does_not_hold_us(bell):
    """A daemon that keeps its stdout: a pipe would never end."""
    begin = time.monotonic()
    said = sh(f"setsid sh -c 'echo $$ >{bell.path}; exec sleep 1000' & echo done")
    (pid,) = map(int, bell.hear(1))
    assert said.out == "done\n"
    assert time.monotonic() - begin < LIMIT_S
    os.kill(pid, 9)


def test_bytes_that_are_no_text_are_shown_as_well_as_can_be():
    assert sh("printf 'a\\377b'").out == "a\ufffdb"


@pytest.mark.parametrize(("text", "wanted"), [("echo a; echo b >&2; echo >&2", "b"), ("echo a", "a"), ("true", "")])
def test_the_last_words_are_those_that_say_something(text, wanted):
    assert sh(text).last_line == wanted


def test_without_pidfds_a_command_has_its_limit_too():
    """Linux 4.18 (RHEL 8), and sandboxes."""
    code = (
        "import os\nfrom infini_run.jobs.schedulers.scheduler_command import run_command\n"
        "print(run_command(['sh', '-c', 'echo so far; exec sleep 1000'], os.environ, 0.5))\n"
        "print(run_command(['sh', '-c', 'exit 3'], os.environ))"
    )
    deny = (build("deny.c", instead_of="*"), "pidfd_open", "1", "0")
    done = subprocess.run([*deny, sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode == 77:
        pytest.skip("no filter is permitted here")
    assert "code=137, out='so far\\n', error='', timed_out=True" in done.stdout, done.stderr
    assert "code=3, out='', error='', timed_out=False" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("host", ["ignores", "reaps"])
def test_a_host_that_reaps_every_child_does_not_hide_how_a_command_ended(host):
    code = """
        import os, signal, sys, threading
        from infini_run.jobs.schedulers.scheduler_command import run_command

        def reap():
            while True:
                try:
                    os.wait()
                except ChildProcessError:
                    pass

        if sys.argv[1] == "ignores":
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        else:
            threading.Thread(target=reap, daemon=True).start()
        for text in ("exit 3", "exit 0", "kill -9 $$", "exec sleep 1000"):
            said = run_command(["sh", "-c", text], os.environ, 2.0 if "sleep" in text else 60.0)
            print(said.code, said.error, said.timed_out)
    """
    words = [sys.executable, "-c", textwrap.dedent(code), host]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["3  False", "0  False", "137  False", "137  True"], done.stderr


def test_the_group_of_a_child_that_was_reaped_is_nobodys():
    """Its number may be another's."""
    left = subprocess.Popen(["sh", "-c", "sleep 1000 & echo $!"], stdout=subprocess.PIPE, start_new_session=True)
    pid = int(left.stdout.readline())
    os.waitpid(left.pid, 0)
    kill_group(left.pid)
    assert is_alive(pid)
    left.wait()
    left.stdout.close()
    os.kill(pid, 9)


def test_an_ignored_sigchld_does_not_hide_how_a_command_ended(tmp_path):
    """The kernel reaps the children of who ignores it, and every exit code would be 0."""
    fake = tmp_path / "scontrol"
    fake.write_text("#!/bin/sh\necho no, never >&2\nexit 3\n")
    fake.chmod(0o755)
    words = ["--scheduler=slurm", f"--dir={tmp_path}/jobs", "true"]
    done = subprocess.run(
        [sys.executable, "-m", "infini_run.jobs", "submit", *words],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 1
    assert b"no, never" in done.stderr
