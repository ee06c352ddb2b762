"""What somebody has put in a job's directory in place of ours: one line for that job, all others shown."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest

from infini_run.jobs.folder.records import JobResult, Phase
from infini_run.jobs.status import each_job
from infini_run.jobs.status.each_job import JobHung, for_each, kept, note_progress
from infini_run.jobs.status.logs import Reader
from infini_run.system.secure_files import open_regular, read_end, read_regular
from tests.jobs.test_job_status import made
from tests.support.job_case import JOB, changed_job
from tests.support.serve_case import Service
from tests.support.waiting import LIMIT_S, until

GOOD, BAD = "ir-00000000aa", "ir-00000000bb"
HUNG = Path(__file__).parents[1] / "support" / "children" / "hung_mount.py"
NEVER_OVERRIDE = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]


def no_rights(path):
    Path(path).touch()
    os.chmod(path, 0)


def large(path):
    with open(path, "wb") as file:
        file.truncate(1 << 30)


BROKEN = {
    "fifo": (os.mkfifo, "it is not a regular file"),
    "folder": (os.mkdir, "it is not a regular file"),
    "loop": (lambda path: os.symlink(os.path.basename(path), path), "it is a symbolic link"),
    "link": (lambda path: os.symlink("/dev/zero", path), "it is a symbolic link"),
    "socket": (lambda path: os.mknod(path, 0o140600), "it is a FIFO or a socket"),
    "large": (large, "it has 1073741824 bytes, and at most 33554432 are read"),
    "no rights": (no_rights, "Permission denied"),
}
FILES = ["request.json", "id", "exit", "0/phase"]


@pytest.fixture
def pair(local):
    """Two jobs that have ended, the latter of which somebody is to break."""
    local.path.mkdir()
    for name in (GOOD, BAD):
        folder = made(local.path, name, scheduler="local", array="")
        folder.begin()
        folder.write_phase(0, Phase(state="RUNNING", since_s=1.0, nodes=("n",), nproc=1))
        folder.write_result(JobResult(state="COMPLETED", code=0, end_s=2.0))
    return local


def spoil(local, name, kind):
    path = local.path / BAD / name
    path.unlink()
    BROKEN[kind][0](path)
    return f"job {BAD}: {path} cannot be read: {BROKEN[kind][1]}; mend it, or remove {path.parents[name.count('/')]}"


def without_override(local, *words):
    argv = [*NEVER_OVERRIDE, *JOB, *words]
    return subprocess.run(argv, env=local.env, capture_output=True, text=True, check=False, timeout=LIMIT_S)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", BROKEN)
def test_broken_file_costs_one_line_and_hides_no_other_job(pair, name, kind):
    said = spoil(pair, name, kind)
    for words in (["list"], ["status", GOOD, BAD]):
        done = without_override(pair, *words)
        assert (done.returncode, done.stderr) == (int(len(words) > 1), f"infini-job: {said}\n"), words
        assert done.stdout.split()[:2] == [GOOD, "COMPLETED"]
    done = without_override(pair, "forget", BAD, GOOD)
    assert (done.returncode, done.stderr) == (1, f"infini-job: {said}\n")
    assert os.listdir(pair.path) == [BAD]
    for words in (["cancel", BAD], ["logs", BAD]):
        done = without_override(pair, *words)
        if done.returncode:  # what is not asked for harms nobody
            assert (done.returncode, done.stderr) == (1, f"infini-job: {said}\n"), words


def test_folder_of_job_without_rights_is_told(pair):
    if not os.geteuid():
        os.chmod(pair.path / BAD, 0)
    done = without_override(pair, "list")
    assert done.stdout.split()[:2] == [GOOD, "COMPLETED"]
    assert done.stderr == (
        f"infini-job: job {BAD}: {pair.path / BAD}/request.json cannot be read: Permission denied; "
        f"mend it, or remove {pair.path / BAD}\n"
    )
    os.chmod(pair.path / BAD, 0o700)


@pytest.mark.parametrize("name", ["0/log", "job.log"])
def test_logs_wait_for_no_fifo(pair, name):
    words = ["--scheduler_log"] if name == "job.log" else []
    os.mkfifo(pair.path / BAD / name)
    done = pair.call("logs", *words, BAD)
    assert done.returncode == 1
    assert done.stderr == f"infini-job: {pair.path / BAD / name} cannot be read: it is not a regular file\n"


def test_status_waits_for_no_fifo_in_place_of_job_log(pair):
    (pair.path / BAD / "exit").unlink()
    os.mkfifo(pair.path / BAD / "job.log")
    done = pair.call("status", BAD)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("text", ['"end_s":NaN', '"end_s":1e999', '"end_s":2.0,"attempt":' + "9" * 30])
def test_number_that_no_clock_has_is_told(pair, text):
    (pair.path / BAD / "exit").write_text('{"state":"COMPLETED","code":0,' + text + "}")
    done = pair.call("list", "--json")
    assert done.stderr.endswith("/exit: not as infini-job wrote it; check who changed it\n")
    assert GOOD in done.stdout


def test_service_shows_others_and_ends_beside_broken_job(pair, tmp_path):
    service = Service(pair, tmp_path / "s")
    try:
        said = spoil(pair, "exit", "fifo")
        assert [job["name"] for job in service.get("/v1/jobs")] == [GOOD]
        answer = service.client.get(f"/v1/jobs/{BAD}")
        assert (answer.status_code, answer.json()["detail"]) == (500, said)
        os.mkfifo(pair.path / BAD / "0" / "report.json")
        assert service.client.get(f"/v1/jobs/{BAD}/timeline").status_code == 500
        with service.client.stream("GET", "/v1/events") as events:
            first = next(line for line in events.iter_lines() if line.startswith("data: "))
        assert said in first
        assert GOOD in first
    finally:
        service.end()


# ---- a file server that is gone


def hung(path, *command):
    """A command for which that directory hangs."""
    probe = ["unshare", "--mount", "--propagation", "private", sys.executable, str(HUNG), str(path)]
    done = subprocess.run([*probe, "true"], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no FUSE here: {done.stderr.strip()}")
    return [*probe, *command]


HUNG_S = 3.0  # where it is 10 s else
IMPATIENT = changed_job(f"from infini_run.jobs.status import each_job\neach_job.for_each.__defaults__ = ({HUNG_S},)")


def test_hung_directory_costs_one_line_and_hides_no_other_job(pair):
    argv = hung(pair.path / BAD, *IMPATIENT, "list")
    done = subprocess.run(argv, env=pair.env, capture_output=True, text=True, check=False, timeout=LIMIT_S * 2)
    assert done.stdout.split()[:2] == [GOOD, "COMPLETED"]
    assert done.stderr == (f"infini-job: {pair.path / BAD} has not responded for 3 s; check its file server\n")


def test_service_answers_and_ends_beside_hung_job(pair, tmp_path, monkeypatch):
    monkeypatch.setattr("tests.support.job_case.JOB", hung(pair.path / BAD, *IMPATIENT))
    service = Service(pair, tmp_path / "s")
    try:
        service.client.timeout = LIMIT_S
        answer = service.client.get(f"/v1/jobs/{BAD}")
        assert (answer.status_code, answer.json()["detail"].split(" has ")[1]) == (
            503, "not responded for 3 s; check its file server",
        )  # fmt: skip
        begun_s = time.monotonic()
        for _ in range(20):  # it is known by now: no further thread waits for it
            assert service.client.get(f"/v1/jobs/{BAD}").status_code == 503
            assert service.client.get(f"/v1/jobs/{BAD}/logs").status_code == 503
            assert [job["name"] for job in service.get("/v1/jobs")] == [GOOD]
        assert time.monotonic() - begun_s < HUNG_S * 10
        service.client.close()
        service.command.signal(signal.SIGTERM)
        assert service.command.wait() == 0
    finally:
        service.command.close()


def test_each_job_that_hangs_holds_one_thread():
    """What hangs is read at a pipe here, and let go at the end."""
    read_fd, write_fd = os.pipe()
    asked = []

    def look(item):
        asked.append(item)
        return os.read(read_fd, 1) if item.startswith("hung") else item

    items = ["a", "hung1", "b", "hung2", "c"]
    found = for_each(items, look, lambda item: item, hung_s=1.0)
    problems = []
    assert kept(found, problems.append) == ["a", "b", "c"]
    assert [text.split()[0] for text in problems] == ["hung1", "hung2"]
    again = for_each(items, look, lambda item: item, hung_s=1.0)
    assert [type(outcome) for outcome in again] == [str, JobHung, str, JobHung, str]
    assert asked.count("hung1") == asked.count("hung2") == 1
    os.write(write_fd, b"12")
    until(lambda: not each_job._hung)
    assert for_each(["hung1"], lambda item: item, lambda item: item) == ["hung1"]
    os.close(read_fd)
    os.close(write_fd)


def test_slow_array_that_is_heard_of_is_waited_for():
    def look(item):
        end_s = time.monotonic() + 1.0
        while time.monotonic() < end_s:
            note_progress()
        return item

    assert for_each(["a"], look, lambda item: item, hung_s=0.5) == ["a"]


def test_mistake_of_ours_is_raised_where_it_is_waited_for():
    with pytest.raises(ZeroDivisionError):
        for_each([1, 0], lambda item: 1 // item, str)


# ---- one file


def test_only_regular_files_of_bounded_size_are_read(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    os.symlink("file", tmp_path / "link")
    assert read_regular(str(path), 10) == b"0123456789"
    assert read_regular(str(tmp_path / "link"), 10, follows_links=True) == b"0123456789"
    assert read_end(str(path), 3) == b"789"
    assert read_end(str(path), 30) == b"0123456789"
    with pytest.raises(OSError, match="it has 10 bytes, and at most 9 are read"):
        read_regular(str(path), 9)
    with pytest.raises(OSError, match="it is a symbolic link"):
        open_regular(str(tmp_path / "link"))
    with pytest.raises(OSError, match="bytes, and at most 5 are read"):
        read_regular("/proc/self/status", 5)  # its size is 0


def test_read_reserves_what_file_has(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(100_000))
    tracemalloc.start()
    try:
        assert len(read_regular(str(path), 1 << 28)) == 100_000
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


# ---- ids, homes, and lines


@pytest.mark.parametrize("text", ["abc@{host}", "1.x@{host}", "1@elsewhere", "-9", "1 2", "\u2028"])
def test_foreign_id_hides_no_other_job(pair, text, bell):
    name = pair.submit("--", "sh", "-c", f"echo up > {bell.path}; exec sleep 1000")
    bell.hear(1)
    (pair.path / BAD / "exit").unlink()
    (pair.path / BAD / "id").write_text(text.format(host=os.uname().nodename))
    done = pair.call("list", "--json")
    shown = {job["name"]: job for job in json.loads(done.stdout)}
    assert (shown[name]["state"] in ("STARTING", "RUNNING"), shown[name]["query_error"]) == (True, "")
    assert shown[BAD]["query_error"] if BAD in shown else ": not as infini-job wrote it" in done.stderr
    assert pair.call("cancel", name).returncode == 0
    pair.wait(name, "CANCELLED")


@pytest.mark.parametrize("verb", ["submit", "serve"])
def test_home_directory_that_is_missing_is_not_made(local, tmp_path, verb):
    home = tmp_path / "nonexistent"
    words = {"submit": ["submit", "--", "true"], "serve": ["serve", f"--socket={tmp_path}/s"]}[verb]
    done = local.call(*words, env={"HOME": str(home), "INFINI_JOB_DIR": ""})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"infini-job: HOME={home}: not a directory, and jobs need ~/.infini-run; set HOME, or add "
        "--dir=DIR on storage that the nodes share\n"
    )
    assert not home.exists()


def test_label_of_many_digits_is_no_label(pair):
    lines = [f"[rank {'9' * 5000}] a", f"[n:{'9' * 5000}] b", f"[{'n' * 5000}:0] c", "[rank 0] d"]
    (pair.path / BAD / "0" / "log").write_text("".join(f"{line}\n" for line in lines))
    done = pair.call("logs", "--rank=0", BAD)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[rank 0] d\n", "")


def test_time_of_long_line_grows_with_its_length_alone(tmp_path):
    """Twice the length took four times as long: the line was put together again for each piece."""

    def cpu_s(mebibytes):
        path = tmp_path / f"{mebibytes}"
        with open(path, "wb") as file:
            file.truncate(mebibytes << 20)
        begun_s = time.process_time()
        reader = Reader(str(path))
        assert list(reader.lines()) == []
        assert len(reader.end()) == (mebibytes << 20) + 1
        return time.process_time() - begun_s

    least = {size: min(cpu_s(size) for _ in range(3)) for size in (128, 512)}  # smaller ones stay in the heap
    assert least[512] < 9 * least[128]  # linear: 4 times; square: 16 times
