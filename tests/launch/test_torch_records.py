"""torch's Flight Recorder at a hang: who is asked, what is read, and whom it names. Recorded dumps stand for NCCL."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infini_run.plan.torch_recorder import recorder_prefixes
from infini_run.watchdog import torch_dumps
from infini_run.watchdog.torch_dumps import read_dump
from tests.launch.test_waited_rank import PYSPY
from tests.support.command import CHILDREN, play

HOST = os.uname().nodename
RECORDS = f"{CHILDREN}/nccl_records.py"
FLAGS = ("--nproc_per_node=4", "--hang_timeout=2", "--on_hang=stop", "--grace=1", "--console=none")
SKIPPED = "  process group 0 (default_pg): rank 2 did not enter NCCL all_gather #288686; all entered #288685"


def hang(infini_run, tmp_path, *words, flags=FLAGS, **kwargs):
    report = tmp_path / "report"
    command = infini_run(*flags, f"--report={report}", *map(str, words), **kwargs)
    assert command.wait() == 1, command.err
    content = json.loads(report.read_text())
    lines = command.err.decode().splitlines()
    first = next(at for at, line in enumerate(lines) if " for " in line and "stopping" not in line)
    assert len(lines) - first <= 10
    return lines[first:], content


# ---- whom it names


@PYSPY
@pytest.mark.rows(2)
def test_rank_that_skips_a_collective_is_named_by_the_records(infini_run, every_path, tmp_path):
    """All Pythons are in one place: NCCL's collectives run while Python is elsewhere."""
    lines, content = hang(infini_run, tmp_path, sys.executable, RECORDS, "skips")
    assert ": 3 of 4 ranks wait for rank 2; 3 others were stopped" in lines[0]
    assert lines[1].startswith(f"  ranks 0-3 on {HOST}  optimizer_step (nccl_records.py:")
    assert SKIPPED in lines
    assert content["first_failure"] == 2
    (shot,) = (shot for shot in content["snapshots"] if shot["rank"] == 0)
    assert shot["collectives"][0]["number"] == 288686
    assert shot["collectives"][0]["members"] == [0, 1, 2, 3]
    assert (shot["collectives"][0]["pending"], shot["collectives"][0]["names"][-1]) == (True, "nccl:all_gather")


@PYSPY
def test_rank_that_waits_for_another_itself_is_not_named(infini_run, tmp_path):
    lines, _ = hang(infini_run, tmp_path, sys.executable, RECORDS, "chain")
    assert ": 3 of 4 ranks wait for rank 2; " in lines[0]
    assert any("ranks 1-2 did not enter NCCL all_gather #288686; all entered #288685" in line for line in lines)
    gap = "rank 2 did not enter NCCL all_gather_base #42; all entered #41"
    assert f"  process group 1 (tensor_parallel): {gap}" in lines


@pytest.mark.parametrize("kind", ["silent", "evil"])
def test_hang_is_reported_without_records_that_cannot_be_read(infini_run, tmp_path, kind):
    _, content = hang(infini_run, tmp_path, sys.executable, RECORDS, kind)
    known = {shot["rank"] for shot in content["snapshots"] if shot["collectives"]}
    assert known == (set() if kind == "silent" else {0, 2, 3})
    assert "never" not in json.dumps(content)


@PYSPY
@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.xdist_group("torch")
def test_gloo_job_of_torch_is_named_by_its_own_records(infini_run, tmp_path):
    flags = ("--nproc_per_node=4", "--hang_timeout=3", "--on_hang=stop", "--console=none")
    logs, script = tmp_path / "logs", f"{CHILDREN}/torch_hang.py"
    lines, _ = hang(infini_run, tmp_path, sys.executable, script, "skips", flags=(*flags, f"--log_dir={logs}"))
    assert ": 3 of 4 ranks wait for rank 2; " in lines[0]
    assert lines[1].startswith(f"  rank 2 on {HOST} ")
    assert lines[2].startswith(f"  ranks 0-1,3 on {HOST}  wait_elsewhere (torch_hang.py:")
    assert lines[2].endswith("  Gloo all_gather #4")
    assert lines[3] == ("  process group 0 (default_pg): rank 2 did not enter Gloo all_gather #4; all entered #3")
    assert sorted(path.name for path in logs.glob("torch_*")) == [f"torch_trace_{n}" for n in range(4)]


# ---- the variables


SHOW = "env | grep ^TORCH_ | sort"


def variables(infini_run, *flags, **environ):
    command = infini_run(*flags, "--console=lines", "sh", "-c", SHOW, env={**os.environ, **environ})
    assert command.wait() == 0, command.err
    return dict(line.split("=", 1) for line in command.out.decode().splitlines())


@pytest.mark.parametrize("flags", [(), ("--hang_timeout=9", "--snapshots=off"), ("--snapshots=failure",)])
def test_ranks_get_no_variables_of_torch_unless_hangs_are_looked_at(infini_run, flags):
    assert not [name for name in variables(infini_run, *flags) if "FR_" in name or "NCCL" in name]


@pytest.mark.parametrize("flag", ["--hang_timeout=1m", "--progress_timeout=1m"])
def test_ranks_get_what_a_dump_needs(infini_run, flag):
    found = variables(infini_run, flag)
    assert found["TORCH_NCCL_TRACE_BUFFER_SIZE"] == "2000"
    folder = os.path.dirname(found["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"])
    assert found["TORCH_FR_DUMP_TEMP_FILE"] == found["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] == f"{folder}/torch_trace_"
    assert not os.path.exists(folder), "it goes with the launch"


def test_dumps_are_beside_logs(infini_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = variables(infini_run, "--hang_timeout=1m", "--log_dir=logs")
    assert found["TORCH_FR_DUMP_TEMP_FILE"] == f"{tmp_path}/logs/torch_trace_"


def test_variables_of_the_user_stay(infini_run, tmp_path):
    own = {
        "TORCH_FR_BUFFER_SIZE": "7",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"{tmp_path}/own_",
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"{tmp_path}/pipe_",
    }
    assert variables(infini_run, "--hang_timeout=1m", **own) == own


def test_pipes_and_dumps_of_the_user_are_used(infini_run, tmp_path):
    own = {"TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/own_", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"{tmp_path}/pipe_"}
    _, content = hang(infini_run, tmp_path, sys.executable, RECORDS, "skips", env={**os.environ, **own})
    assert all(shot["collectives"] for shot in content["snapshots"])
    assert (tmp_path / "own_3").exists()


def test_relative_prefixes_are_not_asked():
    """They are relative to a directory of the rank's."""
    assert recorder_prefixes({"TORCH_FR_DUMP_TEMP_FILE": "a_", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": "/b_"}) is None
    assert recorder_prefixes({}) is None


def test_rank_without_torch_costs_a_hang_nothing(infini_run, tmp_path):
    _, content = hang(infini_run, tmp_path, *play("wait"))
    assert all(shot["collectives"] == [] for shot in content["snapshots"])


# ---- a dump is another process's


DUMP = {
    "pg_config": {"0": {"ranks": "[0, 1]"}},
    "entries": [
        {"process_group": ("0", "default_pg"), "collective_seq_id": 3, "profiling_name": "nccl:barrier", "state": "x"}
    ],
}


def test_dump_is_read():
    assert read_dump(pickle.dumps(DUMP)) == [["0", "default_pg", [0, 1], 3, True, ["nccl:barrier"]]]


def test_points_to_point_and_parts_do_not_count():
    send = {**DUMP["entries"][0], "is_p2p": True, "collective_seq_id": 9}
    content = {**DUMP, "entries": [*DUMP["entries"], send, *DUMP["entries"]]}
    assert read_dump(pickle.dumps(content)) == read_dump(pickle.dumps(DUMP))


def test_groups_and_names_are_bounded():
    entry = DUMP["entries"][0]
    many = [{**entry, "process_group": (str(n), "x" * 999), "collective_seq_id": n} for n in range(99)]
    more = [{**entry, "collective_seq_id": n, "profiling_name": "y" * 999} for n in range(99)]
    groups = read_dump(pickle.dumps({**DUMP, "entries": [*many, *more]}))
    assert len(groups) == torch_dumps.MOST_GROUPS
    assert max(len(group[1]) for group in groups) == torch_dumps.MOST_TEXT
    assert [len(groups[0][5]), len(groups[0][5][-1])] == [torch_dumps.MOST_NAMES, torch_dumps.MOST_TEXT]


class Calls:
    def __reduce__(self):
        return os.mkdir, ("/tmp/infini-run-test-never",)


@pytest.mark.parametrize(
    "content", [Calls(), {**DUMP, "more": Calls()}, {"entries": 3}, [], None, {}, DUMP["entries"]]
)
def test_object_in_a_dump_is_refused_and_never_made(content):
    with pytest.raises(ValueError, match="not a dump"):
        read_dump(pickle.dumps(content))
    assert not os.path.exists("/tmp/infini-run-test-never")


@pytest.mark.parametrize("number", [10**5000, 1 << 63, -2], ids=["5000 digits", "64 bits", "below"])
def test_number_that_torch_cannot_have_is_refused(number):
    """One of 5,000 digits would be no JSON, and cost the other ranks of the node their records."""
    with pytest.raises(ValueError, match="not a dump"):
        read_dump(pickle.dumps({**DUMP, "entries": [{**DUMP["entries"][0], "collective_seq_id": number}]}))


def test_unfinished_dump_is_no_dump():
    data = pickle.dumps(DUMP)
    for size in range(len(data)):
        with pytest.raises(ValueError, match="not a dump"):
            read_dump(data[:size])


@contextlib.contextmanager
def little_memory():
    """As in the process that reads dumps: a few bytes may ask for gigabytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@given(st.data())
def test_no_bytes_do_more_than_be_refused(data):
    dump = bytearray(pickle.dumps(DUMP))
    for _ in range(data.draw(st.integers(1, 8))):
        dump[data.draw(st.integers(0, len(dump) - 1))] = data.draw(st.integers(0, 255))
    with little_memory(), contextlib.suppress(ValueError, MemoryError):
        read_dump(bytes(dump))


BOMB = b"\x80\x02Nr\xff\xff\xff\x7f."  # LONG_BINPUT: a memo of 2**31 entries


def ask(tmp_path, *ranks, limit_s=0.2):
    words = (sys.executable, "-I", "-S", torch_dumps.__file__, f"{tmp_path}/pipe_", f"{tmp_path}/dump_", str(limit_s))
    run = subprocess.run([*words, *map(str, ranks)], capture_output=True, check=True, timeout=60)
    return json.loads(run.stdout)


@pytest.fixture
def pipe(tmp_path):
    path = tmp_path / "pipe_0.pipe"
    os.mkfifo(path)
    fd = os.open(path, os.O_RDWR)
    yield path
    os.close(fd)


@pytest.mark.parametrize("data", [BOMB, b"", b"\0" * 100, pickle.dumps(DUMP)[:-1]])
def test_broken_dump_ends_within_the_limit(tmp_path, pipe, data):
    """The memory of the process has a limit, too."""
    dump = tmp_path / "dump_0"
    read = subprocess.Popen(["sh", "-c", f"head -c 1 < {pipe} > /dev/null; cat {tmp_path}/data > {dump}"])
    (tmp_path / "data").write_bytes(data)
    assert ask(tmp_path, 0, limit_s=1) == {}
    read.wait()


def test_old_dump_is_not_taken_for_a_new_one(tmp_path, pipe):
    (tmp_path / "dump_0").write_bytes(pickle.dumps(DUMP))
    assert ask(tmp_path, 0) == {}


def test_pipe_without_reader_file_and_link_are_not_written(tmp_path):
    os.mkfifo(tmp_path / "pipe_0.pipe")
    (tmp_path / "pipe_1.pipe").write_text("file")
    (tmp_path / "pipe_2.pipe").symlink_to(tmp_path / "pipe_1.pipe")
    assert ask(tmp_path, 0, 1, 2, 3, limit_s=1000) == {}, "and nobody is waited for"
    assert (tmp_path / "pipe_1.pipe").read_text() == "file"


def test_dump_of_others_links_and_large_ones_are_not_read(tmp_path, monkeypatch):
    data, path = pickle.dumps(DUMP), tmp_path / "dump"
    path.write_bytes(data)
    assert torch_dumps._read(str(path)) is not None
    (tmp_path / "link").symlink_to(path)
    os.mkfifo(tmp_path / "pipe")
    assert torch_dumps._read(str(tmp_path / "link")) is torch_dumps._read(str(tmp_path / "pipe")) is None
    monkeypatch.setattr(torch_dumps, "MOST_DUMP", len(data) - 1)
    assert torch_dumps._read(str(path)) is None
    monkeypatch.undo()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert torch_dumps._read(str(path)) is None
