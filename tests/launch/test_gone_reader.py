"""A reader that has gone (`| head`, `| grep -q`): a command that answers ends quietly, with its own exit code."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.launch.test_control import running, stop  # noqa: F401
from tests.support.command import COMMAND
from tests.support.launch_shapes import with_strace
from tests.support.waiting import LIMIT_S, until


def answer_to_nobody(*words, also_stderr=False, limit_s=LIMIT_S):
    """Return the exit code and stderr of a command whose stdout is a pipe without a reader."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        argv = [*COMMAND, *map(str, words)]
        stderr = writer if also_stderr else subprocess.PIPE
        done = subprocess.run(argv, stdout=writer, stderr=stderr, text=True, check=False, timeout=limit_s)
    finally:
        os.close(writer)
    return done.returncode, done.stderr or ""


QUESTIONS = [
    "--help",
    "--help grace",
    "--helpfull",
    "--version",
    "--completion=bash",
    "--list",
    "--list=json",
    "--dry_run true",
    "--dry_run=json true",
    "--dry_run --hosts=a:2,b:1 true",
]


@pytest.mark.parametrize("words", QUESTIONS)
@pytest.mark.parametrize("also_stderr", [False, True], ids=["stdout", "both"])
def test_answer_without_reader_is_quiet(words, also_stderr):
    assert answer_to_nobody(*words.split(), also_stderr=also_stderr) == (0, "")


@pytest.mark.parametrize("word", ["--doctor", "--doctor=json"])
def test_doctor_without_reader_keeps_its_exit_code(word):
    code = subprocess.run([*COMMAND, word], capture_output=True, check=False, timeout=LIMIT_S).returncode
    assert answer_to_nobody(word) == (code, "")


def test_questions_to_a_launch_without_reader_are_quiet(running, tmp_path):  # noqa: F811
    command, _ = running("--console=lines")
    words = ["--list", "--list=json", "--top", "--stacks=json", "--send=CONT", f"--bundle={tmp_path / 'bundle'}"]
    for word in words:
        named = (word, command.pid) if not word.startswith("--list") else (word,)
        assert answer_to_nobody(*named) == (0, ""), word
    assert (tmp_path / "bundle" / "launch.json").exists()
    assert answer_to_nobody("--stop", command.pid) == (0, "")
    assert command.wait() == 143


@pytest.mark.parametrize("also_stderr", [False, True], ids=["stdout", "both"])
def test_follow_without_reader_ends_at_the_next_line(running, also_stderr):  # noqa: F811
    script = 'trap "" PIPE; echo up $RANK $$; while :; do echo line; done'
    command, _ = running("--console=lines", nproc=1, program=("sh", "-c", script), stdout=subprocess.PIPE)
    reading = subprocess.Popen(["cat"], stdin=command.process.stdout, stdout=subprocess.DEVNULL)
    try:
        code, err = answer_to_nobody("--follow", command.pid, also_stderr=also_stderr)
        assert code == 0
        assert "Traceback" not in err
        assert also_stderr or "following" in err
    finally:
        stop(command)
        reading.wait()


@with_strace
@pytest.mark.parametrize("closed", [">&-", "<&- >&-", "<&- >&- 2>&-"])
def test_follow_without_stdout_reads_to_the_end(running, tmp_path, closed):  # noqa: F811
    """A socket to the launch gets no number of a standard stream, so no line goes into it."""
    script = "echo up $RANK $$; while read -r word; do echo $word; done"
    command, _ = running("--console=lines", nproc=1, program=("sh", "-c", script), stdin=subprocess.PIPE)
    trace = tmp_path / "trace"
    calls_of = ["strace", "-e", "trace=socket,write", "-o", str(trace), "sh", "-c", f'exec "$@" {closed}', "sh"]
    asking = subprocess.Popen([*calls_of, *COMMAND, "--follow", str(command.pid)], stderr=subprocess.DEVNULL)
    until(lambda: trace.exists() and "following" in trace.read_text())
    command.process.stdin.write(b"one\ntwo\n")
    command.process.stdin.flush()
    until(lambda: "two" in trace.read_text())
    command.close_stdin()
    assert command.wait() == 0
    assert asking.wait(LIMIT_S) == 0
    calls = trace.read_text().splitlines()
    assert not [call for call in calls if call.startswith("socket(") and call.endswith(("= 0", "= 1", "= 2"))]
    assert [call for call in calls if call.startswith("write(1,") and "two" in call]


def test_follow_to_a_full_disk_is_one_line(running):  # noqa: F811
    script = "echo up $RANK $$; while read -r word; do echo $word; done"
    command, _ = running("--console=lines", nproc=1, program=("sh", "-c", script), stdin=subprocess.PIPE)
    with open("/dev/full", "wb") as full:
        asking = subprocess.Popen(
            [*COMMAND, "--follow", str(command.pid)], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert "following" in asking.stderr.readline()
    command.process.stdin.write(b"one\n")
    command.process.stdin.flush()
    assert asking.stderr.read() == "infini-run: the answer cannot be written: No space left on device\n"
    assert asking.wait(LIMIT_S) == 1
    asking.stderr.close()
    command.close_stdin()
    assert command.wait() == 0
