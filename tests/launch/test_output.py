"""What workers write comes out whole, in order and labelled, whatever they write and whoever reads."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tty

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import infini_run as ir
from infini_run.core.c_structs import PIPE, TO_CONSOLE, TO_LOG
from tests.support.command import CHILDREN
from tests.support.group_case import Live, read_all, spec, wait_for_line
from tests.support.processes import is_full, processes
from tests.support.waiting import LIMIT_S, until

F_SETPIPE_SZ, F_GETPIPE_SZ = 1031, 1032  # fcntl(2); the module has them from Python 3.10 on, on some builds
BUFFER = 65536  # STREAM_BUFFER of csrc/group/group.h: the longest line that stays in one piece
LINE = re.compile(rb"[^\r\n]*(?:\r\n|\n|\r)|[^\r\n]+\Z")
LABEL = re.compile(rb"\[rank (\d+)( err)?( \+)?\] ")


def lines_of(data):
    """Split after each \\n, \\r\\n and lone \\r; the last one may be unended."""
    return LINE.findall(data)


def pieces_of(console):
    """[(rank, stream, whether it goes on with a line, bytes)] of what a labelled console shows."""
    found = []
    for line in lines_of(console):
        label = LABEL.match(line)
        assert label, f"no label: {line[:80]!r}"
        found.append((int(label[1]), 2 if label[2] else 1, bool(label[3]), line[label.end() :]))
    return found


def shown(console, rank, stream, written):
    """What a stream wrote, given back by taking the labels, and the newlines that were added, off."""
    pieces = [(goes_on, data) for r, s, goes_on, data in pieces_of(console) if (r, s) == (rank, stream)]
    whole = b""
    for i, (_, data) in enumerate(pieces):
        unended = pieces[i + 1][0] if i + 1 < len(pieces) else written[-1:] not in (b"\n", b"\r")
        assert not unended or data.endswith(b"\n")
        whole += data[:-1] if unended else data
    if max(map(len, lines_of(written)), default=0) < BUFFER:
        assert not any(goes_on for goes_on, _ in pieces), "a short line was cut"
    return whole


# ---- any bytes, in any chunks

short = st.binary(max_size=12)
spicy = st.lists(st.sampled_from([b"\r", b"\n", b"\r\n", b"a", b"[rank 1] ", b"\xff\xfe", b"\0"]), max_size=8).map(
    b"".join
)
long = st.tuples(
    st.one_of(st.integers(BUFFER - 3, BUFFER + 3), st.integers(0, 3 * BUFFER)),
    st.sampled_from([b"", b"\n", b"\r", b"\r\n", b"\n\n"]),
)
chunk = st.one_of(short, spicy, spicy, long)
script = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 2), chunk), max_size=25)


def bytes_of(what):
    """A long chunk is drawn as (size, end), so that a failing example can be read."""
    return what if isinstance(what, bytes) else b"l" * what[0] + what[1]


def memory(name):
    fd = os.memfd_create(name)
    return fd, os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_APPEND)


def write_whole(fd, data, between):
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:
            between()


def model_log(chunks, last_order=(1, 2)):
    """The log of one rank whose chunks are each passed on before the next is written. Which of two unended
    last lines comes first is for the kernel to say: both streams end when the worker does."""
    log, pending, unended = b"", {1: b"", 2: b""}, 0

    def put(stream, data):
        nonlocal log, unended
        if unended not in (0, stream):
            log += b"\n"
        log += (b"err: " if stream == 2 else b"") + data
        unended = 0 if data[-1:] in (b"\n", b"\r") else stream

    for stream, data in chunks:
        *whole, last = [*lines_of(pending[stream] + data), b""]
        if whole and (whole[-1][-1:] == b"\r" or whole[-1][-1:] != b"\n"):
            last = whole.pop()  # unended, or it may yet become \r\n
        for line in whole:
            put(stream, line)
        pending[stream] = last
    for stream in last_order:
        if pending[stream]:
            put(stream, pending[stream])
    return log


@given(script, st.booleans(), st.booleans(), st.booleans())
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_any_bytes_in_any_chunks_come_out_whole_and_in_order(chunks, one_console, step_by_step, killed):
    console = memory("out")
    error_console = console if one_console else memory("err")
    logs = [memory(f"log{rank}") for rank in range(3)]
    gate = os.pipe()
    specs = [
        spec(
            rank,
            "/bin/sh",
            "-c",
            "echo ready >&2; echo ready; read gate",
            stdio=(gate[0], PIPE, PIPE),
            output=(TO_CONSOLE | TO_LOG,) * 2,
            log_fd=logs[rank][1],
        )
        for rank in range(3)
    ]
    with Live(*specs, console=(console[1], error_console[1])) as live, contextlib.ExitStack() as ends:
        size = (len("[rank 0] ready\n") + len("[rank 0 err] ready\n")) * 3
        fds = {console[0], error_console[0]}
        live.until(lambda: sum(os.fstat(fd).st_size for fd in fds) == size)
        pipes = {}
        for rank in range(3):
            for stream in (1, 2):
                path = f"/proc/{live.pid(rank)}/fd/{stream}"
                pipes[rank, stream] = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
                ends.callback(os.close, pipes[rank, stream])
        written = dict.fromkeys(pipes, b"ready\n")
        ordered = {rank: [(1, b"ready\n"), (2, b"ready\n")] for rank in range(3)}
        for rank, stream, what in chunks:
            data = bytes_of(what)
            write_whole(pipes[rank, stream], data, live.settle)
            written[rank, stream] += data
            ordered[rank].append((stream, data))
            if step_by_step:
                live.settle()
        ends.close()
        if killed:
            live.group.signal(-1, signal.SIGKILL)
        os.close(gate[1])
        live.end()
    os.close(gate[0])
    texts = [os.pread(fd, os.fstat(fd).st_size, 0) for fd, _ in (console, error_console)]
    for (rank, stream), data in written.items():
        assert shown(texts[stream - 1], rank, stream, data) == data
    for rank in range(3):
        log = os.pread(logs[rank][0], os.fstat(logs[rank][0]).st_size, 0)
        if step_by_step and all(len(line) < BUFFER for data in written.values() for line in lines_of(data)):
            greetings, rest = ordered[rank][:2], ordered[rank][2:]
            orders = [[*greetings, *rest], [*greetings[::-1], *rest]]
            assert log in [model_log(order, last) for order in orders for last in ((1, 2), (2, 1))]
    for fd in {fd for pair in (console, error_console, *logs) for fd in pair}:
        os.close(fd)


@given(
    st.lists(
        st.lists(st.tuples(st.integers(1, 2), chunk, st.booleans()), max_size=8),
        min_size=1,
        max_size=3,
    )
)
@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
def test_the_command_passes_on_what_its_ranks_write(infini_run, tmp_path_factory, ranks):
    folder = tmp_path_factory.mktemp("chunks")
    (folder / "script.json").write_text(
        json.dumps([[(s, bytes_of(d).hex(), w) for s, d, w in rank] for rank in ranks])
    )
    child = (sys.executable, "-ISE", CHILDREN / "write_chunks.py", folder / "script.json")
    command = infini_run(f"--nproc_per_node={len(ranks)}", f"--log_dir={folder}/logs", *child)
    assert command.wait() == 0
    for rank, chunks in enumerate(ranks):
        written = {stream: b"".join(bytes_of(d) for s, d, _ in chunks if s == stream) for stream in (1, 2)}
        assert shown(command.out, rank, 1, written[1]) == written[1]
        assert shown(command.err, rank, 2, written[2]) == written[2]
        log = (folder / f"logs/rank_{rank}.log").read_bytes()
        if not written[2]:
            assert log == written[1]
        if not written[1]:
            assert log == b"".join(b"err: " + line for line in lines_of(written[2]))


def run_script(infini_run, script_, *flags, nproc=1, **kwargs):
    return infini_run(f"--nproc_per_node={nproc}", *flags, "/bin/sh", "-c", script_, **kwargs)


def test_prefix_labels_each_line_with_its_rank_and_stream(infini_run):
    command = run_script(infini_run, "echo out; echo err >&2; printf last", "--console=prefix", nproc=3)
    assert command.wait() == 0
    for rank in range(3):
        assert [p[3] for p in pieces_of(command.out) if p[0] == rank] == [b"out\n", b"last\n"]
        assert b"[rank %d err] err\n" % rank in command.err
    assert len(command.err.splitlines()) == 3


def test_several_nodes_are_told_apart_by_host(infini_run):
    node = ("--nnodes=2", "--node_rank=1", "--rdzv_endpoint=10.0.0.1:29500")
    command = run_script(infini_run, "echo out; echo err >&2", "--console=prefix", *node, nproc=2)
    assert command.wait() == 0
    host = os.uname().nodename
    assert sorted(command.out.decode().splitlines()) == [f"[{host}:2] out", f"[{host}:3] out"]
    assert sorted(command.err.decode().splitlines()) == [f"[{host}:2 err] err", f"[{host}:3 err] err"]


def test_inherit_gives_a_worker_our_own_stdout_and_stderr(infini_run, tmp_path):
    out = tmp_path / "out"
    with out.open("wb") as file:
        command = run_script(infini_run, "readlink /proc/self/fd/1; readlink /proc/self/fd/2", stdout=file)
        assert command.wait() == 0
    first, second = out.read_text().splitlines()
    assert first == str(out)
    assert second.startswith("pipe:")


def test_none_shows_nothing_but_keeps_the_last_words_of_a_failure(infini_run):
    command = run_script(infini_run, "echo out; echo last words >&2; exit 3", "--console=none")
    assert command.wait() == 3
    assert command.out == b""
    assert b"last words" in command.err
    assert command.err.startswith(b"infini-run: rank 0")


def test_none_with_log_dir_still_logs(infini_run, tmp_path):
    command = run_script(infini_run, "echo out; echo err >&2", "--console=none", f"--log_dir={tmp_path}")
    assert command.wait() == 0
    assert (command.out, command.err) == (b"", b"")
    assert sorted((tmp_path / "rank_0.log").read_text().splitlines()) == ["err: err", "out"]


def test_ranks_on_console_chooses_whose_output_is_shown(infini_run, tmp_path):
    flags = ("--ranks_on_console=0,2", "--console=prefix", f"--log_dir={tmp_path}")
    command = run_script(infini_run, "echo out; echo err >&2", *flags, nproc=4)
    assert command.wait() == 0
    assert sorted(command.out.split(b"\n")) == [b"", b"[rank 0] out", b"[rank 2] out"]
    assert sorted(command.err.split(b"\n")) == [b"", b"[rank 0 err] err", b"[rank 2 err] err"]
    for rank in range(4):
        assert "out\n" in (tmp_path / f"rank_{rank}.log").read_text(), "the filter is the console's, not the log's"


def test_local_ranks_filter_counts_on_this_node(infini_run):
    node = ("--nnodes=2", "--node_rank=1", "--rdzv_endpoint=127.0.0.1:29500")
    command = run_script(infini_run, "echo $RANK", "--local_ranks_filter=1", "--console=prefix", *node, nproc=2)
    assert command.wait() == 0
    assert command.out.decode() == f"[{os.uname().nodename}:3] 3\n"


@pytest.mark.parametrize(
    ("flags", "out", "err"),
    [
        (["-r", "1"], set(), {0, 1}),
        (["-r", "2"], {0, 1}, set()),
        (["-r", "3"], set(), set()),
        (["-r", "0:3"], {1}, {1}),
        (["-r", "0:1,1:2"], {1}, {0}),
        (["-r", "3", "-t", "3"], {0, 1}, {0, 1}),
        (["-r", "3", "-t", "1:2"], set(), {1}),
        (["-t", "3"], {0, 1}, {0, 1}),
    ],
)
def test_redirects_takes_a_stream_off_the_console_and_tee_puts_it_back(infini_run, tmp_path, flags, out, err):
    command = run_script(infini_run, "echo out; echo err >&2", f"--log_dir={tmp_path}", *flags, nproc=2)
    assert command.wait() == 0
    assert {rank for rank, *_ in pieces_of(command.out)} == out
    assert {rank for rank, *_ in pieces_of(command.err)} == err
    for rank in range(2):
        assert sorted((tmp_path / f"rank_{rank}.log").read_text().splitlines()) == ["err: err", "out"]


# ---- lines


def test_a_line_longer_than_the_buffer_comes_in_marked_pieces(infini_run):
    command = run_script(infini_run, "head -c 150000 /dev/zero | tr '\\0' x; echo; echo next", "--console=prefix")
    assert command.wait() == 0
    pieces = pieces_of(command.out)
    assert [goes_on for _, _, goes_on, _ in pieces] == [False, *[True] * (len(pieces) - 2), False]
    assert len(pieces) >= 4
    assert all(len(data) <= BUFFER + 1 for *_, data in pieces)
    assert shown(command.out, 0, 1, b"x" * 150000 + b"\nnext\n") == b"x" * 150000 + b"\nnext\n"


def test_a_line_as_long_as_the_buffer_stays_whole(infini_run):
    command = run_script(infini_run, f"head -c {BUFFER - 1} /dev/zero | tr '\\0' x; echo", "--console=prefix")
    assert command.wait() == 0
    assert command.out == b"[rank 0] " + b"x" * (BUFFER - 1) + b"\n"


def test_progress_bars_are_shown_step_by_step(infini_run):
    """Each state of the bar is there as soon as the next one begins, with its label."""
    command = run_script(
        infini_run,
        r"printf '10%%\r20%%\r3'; read x; printf '0%%\r\ndone\n'",
        "--console=prefix",
        stdin=subprocess.PIPE,
    )
    command.read_until(b"[rank 0] 10%\r[rank 0] 20%\r")
    command.process.stdin.write(b"\n")
    command.process.stdin.flush()
    assert command.wait() == 0
    assert command.out == b"[rank 0] 10%\r[rank 0] 20%\r[rank 0] 30%\r\n[rank 0] done\n"


def test_bytes_that_are_no_text_pass_unchanged(infini_run, tmp_path):
    data = bytes(byte for byte in range(256) if byte not in b"\r\n") + b"\xc3(\n"
    (tmp_path / "data").write_bytes(data)
    command = infini_run("--console=prefix", f"--log_dir={tmp_path}", "/bin/cat", str(tmp_path / "data"))
    assert command.wait() == 0
    assert command.out == b"[rank 0] " + data
    assert (tmp_path / "rank_0.log").read_bytes() == data


def test_a_line_is_shown_before_its_worker_goes_on(infini_run):
    """Nothing is held back: the reader sees a line while the worker waits for the reader."""
    command = run_script(infini_run, "echo asked; read x; echo got $x", "--console=prefix", stdin=subprocess.PIPE)
    command.read_until(b"[rank 0] asked\n")
    command.process.stdin.write(b"it\n")
    command.process.stdin.flush()
    assert command.wait() == 0
    assert command.out.endswith(b"[rank 0] got it\n")


# ---- logs


def test_a_killed_worker_leaves_its_last_byte_in_log_and_console(infini_run, tmp_path):
    script_ = "printf 'whole\\nhalf'; printf 'no end' >&2; kill -9 $$"
    command = run_script(infini_run, script_, "--console=prefix", f"--log_dir={tmp_path}")
    assert command.wait() == 137
    assert command.out == b"[rank 0] whole\n[rank 0] half\n"
    assert b"[rank 0 err] no end\n" in command.err
    log = (tmp_path / "rank_0.log").read_bytes()
    assert sorted(log.splitlines()) == [b"err: no end", b"half", b"whole"]
    assert log.index(b"whole") < log.index(b"half")


def test_a_pipe_that_the_worker_made_larger_is_read_to_its_end(infini_run, tmp_path):
    """A killed worker may leave far more in its pipe than we read at once."""
    program = (
        "import fcntl, os, signal\n"
        f"size = fcntl.fcntl(1, {F_SETPIPE_SZ}, 1 << 20)\n"
        "os.write(1, b'0123456789abcde\\n' * (size // 16))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = infini_run("--console=none", f"--log_dir={tmp_path}", sys.executable, "-c", program)
    assert command.wait() == 137
    assert (tmp_path / "rank_0.log").read_bytes() == b"0123456789abcde\n" * (1 << 16)


def test_stdout_of_a_log_is_what_was_written_to_the_byte(infini_run, tmp_path):
    data = os.urandom(300_000)
    (tmp_path / "data").write_bytes(data)
    command = infini_run("--nproc_per_node=2", f"--log_dir={tmp_path}", "/bin/cat", str(tmp_path / "data"))
    assert command.wait() == 0
    assert (tmp_path / "rank_0.log").read_bytes() == data
    assert (tmp_path / "rank_1.log").read_bytes() == data


def test_a_log_is_written_while_its_worker_lives(infini_run, tmp_path):
    command = run_script(
        infini_run, "echo first; read x", "--console=none", f"--log_dir={tmp_path}", stdin=subprocess.PIPE
    )
    until(lambda: (tmp_path / "rank_0.log").exists() and (tmp_path / "rank_0.log").read_bytes() == b"first\n")
    command.process.stdin.close()
    command.process.stdin = None
    assert command.wait() == 1


def test_a_second_launch_appends_to_the_logs(infini_run, tmp_path):
    for word in ("one", "two"):
        command = run_script(infini_run, f"echo {word}", f"--log_dir={tmp_path}", nproc=2)
        assert command.wait() == 0
    for rank in range(2):
        assert (tmp_path / f"rank_{rank}.log").read_text() == "one\ntwo\n"


IN_USE = "another launch also writes {}; use another --log_dir"
LOGS = ("--nproc_per_node=2", "--log_dir=logs")


def test_logs_that_another_launch_writes_are_reported(infini_run, tmp_path):
    first = infini_run(*LOGS, "sh", "-c", "echo up; exec sleep 1000", cwd=tmp_path)
    until(lambda: first.out.count(b"up\n") == 2 or first.read_more())
    second = infini_run(*LOGS, "--report=r", "echo", "too", cwd=tmp_path)
    assert second.wait() == 0
    line = IN_USE.format("logs/rank_0.log and 1 more")
    assert second.err.decode() == f"infini-run: {line}\n"
    assert json.loads((tmp_path / "r").read_text())["notices"] == [line]
    first.process.kill()  # its locks go with it
    assert first.wait() == -signal.SIGKILL
    third = infini_run(*LOGS, "echo", "too", cwd=tmp_path)
    assert (third.wait(), third.err) == (0, b"")


def test_launches_of_other_ranks_share_a_folder_of_logs(infini_run, tmp_path):
    """As tasks of a scheduler do, or programs of one launch."""
    nodes = ("--nnodes=2", "--rdzv_endpoint=localhost:1", "--log_dir=logs")
    words = ("sh", "-c", "echo up; exec sleep 1000")
    commands = [infini_run(*nodes, f"--node_rank={rank}", *words, cwd=tmp_path) for rank in range(2)]
    for command in commands:
        command.read_until(b"up\n")
        command.signal(signal.SIGTERM)
    assert [command.wait() for command in commands] == [143, 143]
    assert not any(b"another launch" in command.err for command in commands)


def test_restarts_keep_their_logs(infini_run, tmp_path):
    flags = ("--max_restarts=3", "--restart_delay=0")
    command = infini_run(*LOGS, *flags, "sh", "-c", "exit $((3 - TORCHELASTIC_RESTART_COUNT))", cwd=tmp_path)
    assert command.wait() == 0
    assert b"another launch" not in command.err


def test_host_program_uses_its_logs_again(tmp_path, capfd):
    for _ in range(3):
        assert ir.run(["true"], nproc_per_node=2, log_dir=str(tmp_path / "logs")).exit_code == 0
    assert "another launch" not in capfd.readouterr().err


def test_a_log_is_the_users_alone(infini_run, tmp_path):
    assert run_script(infini_run, "echo secret", f"--log_dir={tmp_path}").wait() == 0
    assert (tmp_path / "rank_0.log").stat().st_mode & 0o777 == 0o600


@pytest.mark.root
def test_a_full_disk_is_told_once_and_the_job_goes_on(infini_run, tmp_path):
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespace can be made here: needs root")
    folder = tmp_path / "logs"
    folder.mkdir()
    mount = f'mount -t tmpfs -o size=64k none {folder} && "$@"; code=$?; cat {folder}/rank_0.log | wc -c; exit $code'
    script_ = "i=0; while [ $i -lt 200 ]; do printf '%01000d\\n' $i; i=$((i+1)); done; echo end; exit 5"
    command = run_script(
        infini_run,
        script_,
        "--console=prefix",
        f"--log_dir={folder}",
        under=("unshare", "-m", "sh", "-c", mount, "sh"),
    )
    assert command.wait() == 5
    assert command.err.count(b"No space left") == 1
    assert b"the log of rank 0 cannot be written" in command.err
    assert b"[rank 0] end\n" in command.out
    assert command.out.count(b"[rank 0] ") == 201
    assert int(command.out.splitlines()[-1]) == 65536


# ---- many ranks, one console


def check_lines(pieces, ranks, count, longest):
    """Each line is there, whole, in its stream's order."""
    got = {}
    for rank, _, goes_on, data in pieces:
        assert not goes_on
        stream, number, text = data.split(b" ")
        got.setdefault((rank, int(stream)), []).append((int(number), text))
    for rank in range(ranks):
        for stream in (1, 2):
            want = [(n, b"x" * ((n * 7919 + rank * 104729 + stream * 31) % longest) + b"\n") for n in range(count)]
            assert got[rank, stream] == want, f"rank {rank}, stream {stream}"


def start_lines(infini_run, count, longest, **kwargs):
    words = (sys.executable, "-ISE", CHILDREN / "write_lines.py", count, longest)
    return infini_run("--nproc_per_node=8", "--console=prefix", *words, **kwargs)


def test_lines_of_many_ranks_never_mix_in_one_pipe_with_a_slow_reader(infini_run):
    command = start_lines(infini_run, 150, 3000, stderr=subprocess.STDOUT)
    fd = command.process.stdout.fileno()
    fcntl.fcntl(fd, F_SETPIPE_SZ, 4096)  # every write of ours comes in pieces
    data = b""
    while chunk_ := os.read(fd, 777 if len(data) < 200_000 else 65536):
        data += chunk_
    assert command.wait() == 0
    check_lines(pieces_of(data), 8, 150, 3000)


@pytest.mark.parametrize("together", [True, False], ids=["one pty", "two ptys"])
def test_lines_of_many_ranks_never_mix_on_a_terminal(infini_run, together):
    with contextlib.ExitStack() as ends:
        pairs = [os.openpty() for _ in range(1 if together else 2)]
        for controller, terminal in pairs:
            tty.setraw(terminal)
            ends.callback(os.close, controller)
        command = start_lines(infini_run, 60, 2000, stdout=pairs[0][1], stderr=pairs[-1][1])
        for _, terminal in pairs:
            os.close(terminal)
        data = {controller: b"" for controller, _ in pairs}
        open_ = set(data)
        while open_:
            for fd in select.select(open_, [], [], LIMIT_S)[0]:
                try:
                    data[fd] += os.read(fd, 65536)
                except OSError:  # EIO: nobody has the terminal open any more
                    open_.discard(fd)
        assert command.wait() == 0
    texts = [re.sub(rb"\033\[\d+m", b"", text) for text in data.values()]  # labels have a color there
    check_lines([piece for text in texts for piece in pieces_of(text)], 8, 60, 2000)


# ---- readers that do not behave


def test_a_report_that_nobody_reads_does_not_hold_a_launcher_that_was_told_to_stop(infini_run):
    script = "setsid sleep 1000 & while :; do echo yes >&2; done"
    command = run_script(infini_run, script, "--console=prefix")
    until(lambda: is_full(command.process.stderr))
    command.signal(signal.SIGTERM)
    assert command.process.wait(LIMIT_S) == 143
    assert is_full(command.process.stderr)


def test_a_job_that_ended_waits_for_its_reader_and_says_so(infini_run):
    """Like any program in a pipeline: what was written is not thrown away because the reader is slow."""
    command = run_script(infini_run, "yes | head -c 40000", "--console=prefix")
    err = b""
    while b"waiting for the reader" not in err:
        assert select.select([command.process.stderr], [], [], LIMIT_S)[0]
        err += os.read(command.process.stderr.fileno(), 4096)
    assert command.process.poll() is None
    assert command.wait() == 0
    assert command.out == b"[rank 0] y\n" * 20000


def test_a_job_that_waits_for_its_reader_only_can_be_told_to_stop(infini_run):
    command = run_script(infini_run, "yes | head -c 40000", "--console=prefix")
    command.read_error_until(b"waiting for the reader")
    command.signal(signal.SIGTERM)
    command.read_error_until(b"dropped its last output")
    assert command.process.wait(LIMIT_S) == 0
    assert is_full(command.process.stdout)


def test_head_ends_its_pipeline_without_ending_the_job(infini_run, tmp_path):
    words = " ".join(map(str, ("-m", "infini_run", "--console=prefix", f"--log_dir={tmp_path}")))
    shell = f"({sys.executable} {words} seq 20000; echo $? >&2) | head -n 1"
    done = subprocess.run(["/bin/sh", "-c", shell], capture_output=True, check=True, timeout=LIMIT_S)
    assert done.stdout == b"[rank 0] 1\n"
    assert done.stderr.splitlines()[-1] == b"0"
    assert len((tmp_path / "rank_0.log").read_bytes().splitlines()) == 20000


# ---- kinds of consoles


def test_a_file_that_is_appended_to_keeps_what_it_had(infini_run, tmp_path):
    path = tmp_path / "console"
    path.write_text("before\n")
    with path.open("ab") as out, path.open("ab") as err:
        script_ = "for i in 1 2 3; do echo $i; echo $i >&2; done"
        command = run_script(infini_run, script_, "--console=prefix", nproc=2, stdout=out, stderr=err)
        assert command.wait() == 0
        out.write(b"after\n")
    lines = path.read_text().splitlines()
    assert lines[0] == "before"
    assert lines[-1] == "after"
    assert sorted(lines[1:-1]) == sorted(
        f"[rank {rank}{kind}] {i}" for rank in (0, 1) for kind in ("", " err") for i in (1, 2, 3)
    )


def test_a_socket_as_console_takes_everything(infini_run):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        command = start_lines(infini_run, 60, 2000, stdout=theirs, stderr=theirs)
        theirs.close()
        assert select.select([ours], [], [], LIMIT_S)[0]
        data = read_all(ours.fileno())
        assert command.wait() == 0
    check_lines(pieces_of(data), 8, 60, 2000)


def test_a_socket_whose_peer_has_gone_is_told_once(infini_run):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.close()
        command = run_script(
            infini_run, "for i in 1 2 3; do echo $i; done; exit 4", "--console=prefix", stdout=theirs
        )
        assert command.wait() == 4
    assert command.err.count(b"the console takes no more output") == 1


def test_the_console_stays_blocking_for_whoever_else_has_it(infini_run):
    """O_NONBLOCK belongs to the open file, which the shell and the next program share."""
    reader, writer = os.pipe()
    command = run_script(
        infini_run, "echo x; read x; echo y", "--console=prefix", stdin=subprocess.PIPE, stdout=writer
    )
    assert wait_for_line(reader) == b"[rank 0] x\n"
    assert os.get_blocking(writer)
    command.process.stdin.write(b"\n")
    command.process.stdin.flush()
    assert wait_for_line(reader) == b"[rank 0] y\n"
    assert command.wait() == 0
    os.close(reader)
    os.close(writer)


def test_the_null_device_as_console_is_no_failure(infini_run):
    command = run_script(infini_run, "seq 1000; seq 1000 >&2", "--console=prefix", stdout=subprocess.DEVNULL)
    assert command.wait() == 0
    assert command.err.count(b"[rank 0 err] ") == 1000


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_that_were_closed_at_entry_do_no_harm(infini_run, tmp_path, closed):
    """No descriptor of ours, a log's least of all, may land where a worker writes."""
    (tmp_path / "logs").mkdir()
    command = run_script(
        infini_run,
        "echo out; echo err >&2",
        "--console=prefix",
        f"--log_dir={tmp_path}/logs",
        nproc=2,
        under=("/bin/sh", "-c", f'exec "$@" {closed}', "sh"),
    )
    assert command.wait() == 0
    for rank in range(2):
        log = (tmp_path / f"logs/rank_{rank}.log").read_text()
        assert [line for line in log.splitlines() if not line.startswith("err: ")] == ["out"]
        assert "err: err\n" in log
    if ">&-" not in closed.replace("2>&-", ""):
        assert sorted(command.out.splitlines()) == [b"[rank 0] out", b"[rank 1] out"]


# ---- who holds a pipe


def test_in_a_library_too_a_grandchild_does_not_hold_the_pipe(tmp_path):
    script_ = f"setsid sh -c 'echo > {tmp_path}/ready; exec sleep 1000' & "
    script_ += f"until test -e {tmp_path}/ready; do :; done; printf done"
    report = ir.run(["/bin/sh", "-c", script_], console="none", log_dir=str(tmp_path / "logs"))
    assert report.exit_code == 0
    assert [stray.name for stray in report.leftover_processes] in (["sh"], ["sleep"])  # before its exec, or after
    assert (tmp_path / "logs/rank_0.log").read_text() == "done"


def test_in_a_library_a_process_without_the_mark_is_named_and_left(tmp_path):
    """What took our name off is not ours to end, and must not hold us either."""
    script_ = f"cd {tmp_path}; env -i setsid sh -c 'echo $$ > pid; mv pid ready; exec sleep 1000' & "
    script_ += f"until test -e {tmp_path}/ready; do :; done; printf done"
    report = ir.run(["/bin/sh", "-c", script_], console="none", log_dir=str(tmp_path / "logs"))
    pid = int((tmp_path / "ready").read_text())
    assert pid in processes()
    os.kill(pid, signal.SIGKILL)
    until(lambda: processes().get(pid, (0, "X", ""))[1] in "ZX")  # its reaper is the machine's
    assert report.exit_code == 0
    assert any("stdout of rank 0 is still open" in notice for notice in report.notices)
    assert (tmp_path / "logs/rank_0.log").read_text() == "done"


def test_output_of_a_rank_that_is_stopped_is_not_lost(infini_run):
    script_ = "trap 'seq 20000; exit 0' TERM; echo ready; while :; do sleep 0.01; done"
    command = run_script(infini_run, script_, "--console=prefix", nproc=2)
    command.read_until(b"[rank 0] ready\n")
    command.read_until(b"[rank 1] ready\n")
    command.signal(signal.SIGTERM)
    assert command.wait() == 0
    for rank in range(2):
        numbers = [data for r, _, _, data in pieces_of(command.out) if r == rank][1:]
        assert numbers == [b"%d\n" % n for n in range(1, 20001)]


def test_the_library_labels_on_the_hosts_own_streams():
    program = (
        "import infini_run as ir\n"
        "for word in 'ab':\n"
        "    ir.run(['/bin/sh', '-c', f'seq -f {word}%g 3000; echo {word} >&2'], nproc_per_node=2,"
        " console='prefix')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, timeout=LIMIT_S)
    for rank in range(2):
        got = [data for r, _, _, data in pieces_of(done.stdout) if r == rank]
        assert got == [b"%s%d\n" % (word, n) for word in (b"a", b"b") for n in range(1, 3001)]
        assert [data for r, _, _, data in pieces_of(done.stderr) if r == rank] == [b"a\n", b"b\n"]


# ---- the last lines, in the report


@pytest.mark.parametrize("hosts", [(), ("--hosts=a", "--engine=ssh")])
def test_report_has_lines_that_locale_lacks(infini_run, tmp_path, hosts):
    """Python's ASCII stands for any locale that is not UTF-8."""
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    if hosts:
        (tmp_path / "ssh").write_text('#!/bin/sh\nfor last; do :; done\nexec sh -c "$last"\n')
        (tmp_path / "ssh").chmod(0o755)
        ascii_only["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    script = r"printf '\342\230\203 boom\n' >&2; exit 3"
    command = infini_run("--console=none", *hosts, "sh", "-c", script, env={**os.environ, **ascii_only})
    assert command.wait() == 3
    assert "  | \N{SNOWMAN} boom\n" in command.err.decode()


def test_hang_report_has_status_that_locale_lacks(infini_run):
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    send = "import os, socket, time; s = socket.socket(1, 2); s.connect(os.environ['NOTIFY_SOCKET'])"
    program = f"{send}; s.send('STATUS=\\u2603 load'.encode()); time.sleep(1000)"
    command = infini_run("--hang_timeout=1s", sys.executable, "-c", program, env={**os.environ, **ascii_only})
    command.read_error_until("\N{SNOWMAN} load".encode())
    command.signal(signal.SIGTERM)
    assert command.wait() == 143


@pytest.mark.parametrize("frames", [10, 100])
def test_report_shows_message_when_its_stack_follows(infini_run, tmp_path, frames):
    """As c10 ends: the message, then frames of 80 bytes and more; a hundred are more than was once kept of stderr."""
    frame = "frame #%d: c10d::ProcessGroupNCCL::heartbeatMonitor() + 0x7f (0x7f0c5e in libtorch_cuda.so)"
    stack = "\n".join(frame % n for n in range(frames))
    (tmp_path / "end").write_text(f"terminate called after throwing\n  what():  Watchdog caught it\n{stack}\n")
    command = infini_run(
        f"--report={tmp_path}/report", "--console=none", "sh", "-c", f"cat {tmp_path}/end >&2; kill -ABRT $$"
    )
    assert command.wait() == 128 + signal.SIGABRT
    assert b"  |   what():  Watchdog caught it\n" in command.err
    assert b"frame #" not in command.err
    last = json.loads((tmp_path / "report").read_text())["ranks"][0]["last_lines"]
    assert "  what():  Watchdog caught it" in last


# ---- the Python that lacks a module


@pytest.fixture
def other_python(tmp_path):
    """A `python` that comes first on PATH, of another environment."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    return str(tmp_path / "bin" / "python")


def in_folder_of(python):
    return {**os.environ, "PATH": f"{os.path.dirname(python)}:{os.environ['PATH']}"}


def advice_of(command):
    assert command.wait() == 1
    return [line for line in command.err.decode().splitlines() if line.startswith("  next: ")]


def test_report_names_python_that_lacks_module(infini_run, other_python, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import no_such_module.inner")
    flags = ("--nproc_per_node=2", "--console=none")
    here, there = in_folder_of(sys.executable), in_folder_of(other_python)
    ran = f"  next: {sys.executable} ran the program and lacks no_such_module"
    assert advice_of(infini_run(*flags, script, env=here)) == [
        f"{ran}; install it there, or use infini-run ... /PATH/TO/python {script}"
    ]
    way = f"python on PATH is {other_python}; use infini-run ... python {script}"
    assert advice_of(infini_run(*flags, script, env=there)) == [f"{ran}; {way}"]
    assert advice_of(infini_run(*flags, "python", script, env=there)) == []


def test_report_names_python_when_stderr_is_not_seen(infini_run, other_python, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import no_such_module")
    here, there = in_folder_of(sys.executable), in_folder_of(other_python)
    assert advice_of(infini_run(script, env=here)) == []
    way = f"python on PATH is {other_python}; use infini-run ... python {script}"
    advice = advice_of(infini_run(script, env=there))
    assert advice == [f"  next: if a module is missing: {sys.executable} ran the program; {way}"]
    script.write_text("raise SystemExit(2)")
    assert infini_run(script, env=there).wait() == 2


def test_report_has_no_advice_for_another_exception(infini_run, other_python, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import json; json.loads('x')")
    assert advice_of(infini_run("--console=none", script, env=in_folder_of(other_python))) == []
