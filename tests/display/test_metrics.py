"""--metrics: a file that node_exporter reads, always whole, which never delays the job."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from threading import Event

import pytest
from hypothesis import given
from hypothesis import strategies as st

import infini_run as ir
from infini_run.display.background_writer import BackgroundWriter
from infini_run.display.event_schema import make_fact
from infini_run.display.metrics import _HELP, PHASES, STATES, LaunchNumbers
from tests.launch.test_security import needs_root
from tests.support.command import play
from tests.support.hosts import Bed, agents
from tests.support.paths import ROOT
from tests.support.processes import marked
from tests.support.waiting import until

HUNG = Path(__file__).parents[1] / "support" / "children" / "hung_mount.py"
exposition = pytest.importorskip("prometheus_client.parser")
EXPORTER = shutil.which("prometheus-node-exporter")
LAUNCHED = ("ir-1", "run", "train.py", "host1", 7, 1, 2, 0)


def parse(text):
    """The values of a file, by name and the label that is not the launch's."""
    found = {}
    for family in exposition.text_string_to_metric_families(text):
        assert family.documentation
        assert family.type in ("gauge", "counter")
        for sample in family.samples:
            names = ("state", "phase") if family.name == "infini_run_info" else ("program", "state", "phase")
            labels = tuple(value for name, value in sample.labels.items() if name in names)
            key = (sample.name.removeprefix("infini_run_"), *labels)
            assert key not in found, key
            found[key] = sample.value
    return found


def read(path):
    return parse(path.read_text())


@pytest.fixture
def path(tmp_path):
    return tmp_path / "job.prom"


# ---- the numbers


def numbers(*facts):
    """The numbers after some facts, one second apart."""
    counted = LaunchNumbers(0.0)
    for at, (kind, *values) in enumerate((("launched", *LAUNCHED), *facts)):
        counted.add(make_fact(kind, 0.0, *values), float(at))
    return counted


def text(counted, now_s=100.0, signs=None):
    def last_sign_ns(rank):
        sign_s = (signs or {}).get(rank, 0)
        return None if sign_s is None else round(sign_s * 1e9)

    return counted.text(now_s, 1e9, last_sign_ns)


def test_numbers_follow_the_facts():
    counted = numbers(("started", 0, "h", 1), ("started", 1, "h", 2), ("ready", 1, "h"), ("progress", 1, "h", 40))
    found = parse(text(counted, 10.0))
    assert {state: found["ranks", state] for state in STATES} == {
        **dict.fromkeys(STATES, 0),
        "running": 1,
        "ready": 1,
    }
    assert (found["progress",], found["progress_lowest",]) == (40, 40)
    assert ("progress_per_second",) not in found
    assert found["silence_seconds",] == 9  # rank 0, since its start
    assert {phase: found["phase_seconds_total", phase] for phase in PHASES} == {
        "starting": 2, "running": 8, "stopped": 0,
    }  # fmt: skip
    counted.add(make_fact("progress", 0.0, 0, "h", 60), 12.0)
    found = parse(text(counted, 14.0, signs={0: 13.0, 1: 13.5}))
    assert (found["progress",], found["progress_lowest",], found["progress_per_second",]) == (60, 40, 5)
    assert found["silence_seconds",] == 1


def test_silence_of_ranks_that_write_themselves_is_unknown_without_progress():
    counted = numbers(("started", 0, "h", 1), ("started", 1, "h", 2))
    assert parse(text(counted, 20.0, signs={0: None, 1: 15.0}))["silence_seconds",] == 5
    assert ("silence_seconds",) not in parse(text(counted, 20.0, signs={0: None, 1: None}))
    counted.add(make_fact("progress", 0.0, 0, "h", 60), 12.0)
    assert parse(text(counted, 20.0, signs={0: None, 1: None}))["silence_seconds",] == 8


def test_losses_restarts_and_the_end_are_counted():
    counted = numbers(("started", 0, "h", 1), ("started", 1, "h", 2), ("node_lost", 0, "h", [0], "silent"))
    found = parse(text(counted))
    assert (found["lost_nodes_total",], found["ranks", "lost"], found["ended",]) == (1, 1, 0)
    for kind, *values in (("restarting", 1), ("launched", *LAUNCHED[:-1], 1), ("hung", 0, "h"), ("hung", 1, "h")):
        counted.add(make_fact(kind, 0.0, *values), 110.0)
    found = parse(text(counted, 120.0))
    assert (found["restarts_total",], found["hangs_total",], found["ranks", "waiting"]) == (1, 1, 2)
    assert ("received_signal",) not in found
    counted.add(make_fact("ended", 0.0, 143, 15, ""), 130.0)
    found = parse(text(counted, 500.0))
    assert (found["ended",], found["exit_code",], found["received_signal",]) == (1, 143, 15)
    assert sum(found["phase_seconds_total", phase] for phase in PHASES) == 130


def test_each_program_has_numbers_of_its_own():
    counted = LaunchNumbers(0.0)
    counted.add(make_fact("launched", 0.0, *LAUNCHED[:-2], 3, 0) | {"programs": {"t": 2, "r": 1}}, 0.0)
    facts = (("started", 0, "h", 1), ("started", 2, "h", 2), ("progress", 2, "h", 40), ("progress", 0, "h", 3))
    facts += (("hung", 0, "h"), ("hung", 1, "h"), ("hung", 2, "h"), ("ready", 0, "h"), ("hung", 0, "h"))
    for kind, rank, *values in facts:
        counted.add(make_fact(kind, 0.0, rank, *values) | {"program": "r" if rank == 2 else "t"}, float(rank))
    counted.add(make_fact("restarting", 0.0, 1) | {"program": "r"}, 5.0)
    found = parse(text(counted, 10.0))
    assert [found["ranks", "t", state] for state in STATES[:3]] == [1, 0, 1]
    assert [found["ranks", "r", state] for state in STATES[:3]] == [0, 1, 0]
    for name, of_t, of_r in (
        ("restarts_total", 0, 1),
        ("hangs_total", 2, 1),
        ("progress", 3, 40),
        ("progress_lowest", 3, 40),
        ("silence_seconds", 10, 8),
    ):
        assert (found[name, "t"], found[name, "r"]) == (of_t, of_r), name
        assert (name,) not in found
    counted.add(make_fact("progress", 0.0, 2, "h", 60) | {"program": "r"}, 11.0)
    found = parse(text(counted, 20.0))
    assert (found["progress_per_second", "t"], found["progress_per_second", "r"]) == (0, 2)
    assert found["nodes",] == 1


def test_restart_of_all_ranks_is_one_of_each_program():
    counted = LaunchNumbers(0.0)
    for kind, *values in (("launched", *LAUNCHED), ("restarting", 1), ("launched", *LAUNCHED[:-1], 1)):
        counted.add(make_fact(kind, 0.0, *values) | ({"programs": {"t": 1, "r": 1}} if len(values) > 1 else {}), 1.0)
    found = parse(text(counted))
    assert (found["restarts_total", "t"], found["restarts_total", "r"], found["ranks", "r", "waiting"]) == (1, 1, 1)


@given(st.text(), st.text(st.characters(codec=None), max_size=20))
def test_any_text_is_escaped(run_id, program):
    counted = LaunchNumbers(0.0)
    counted.add(make_fact("launched", 0.0, "ir-1", run_id, program, 'a"b\\n\n', 7, 1, 2, 0), 0.0)
    data = text(counted).encode("utf-8", "strict")
    families = exposition.text_string_to_metric_families(data.decode())
    (info,) = (family for family in families if family.name == "infini_run_info")
    (sample,) = info.samples
    assert sample.labels["host"] == 'a"b\\n\n'
    assert sample.labels["run_id"] == run_id.encode("utf-8", "replace").decode()


def test_documentation_has_each_number_with_its_type():
    page = (ROOT / "docs/reference/events.md").read_text()
    rows = dict(re.findall(r"^\| `infini_run_(\w+)(?:\{.*?\})?` \| (gauge|counter) \|", page, re.MULTILINE))
    assert rows == {name: kind for name, (kind, _) in _HELP.items()}


# ---- the file


def test_file_has_the_numbers_of_the_launch(infini_run, path, gate):
    hold = gate()
    words = play("notify=READY=1;PROGRESS=7", "say=up", f"hold={hold}", "@1", "exit=4", "@*", "exit=0")
    flags = (f"--metrics={path}", "--metrics_interval=1", "--nproc_per_node=2", "--keep_going")
    command = infini_run(*flags, *words, gates=(hold,))
    command.pids_of(b"up", 2)
    until(lambda: path.exists() and read(path).get(("ranks", "ready")) == 2)
    found = read(path)
    assert (found["ended",], found["progress",]) == (0, 7)
    assert found["phase_seconds_total", "running"] > 0
    before = path.stat().st_ino
    until(lambda: path.stat().st_ino != before)
    hold.open()
    assert command.wait() == 4
    found = read(path)
    assert (found["ended",], found["exit_code",], found["ranks", "done"], found["ranks", "failed"]) == (1, 4, 1, 1)
    assert os.listdir(path.parent) == [path.name]
    assert stat.S_IMODE(path.stat().st_mode) == 0o644 & ~_umask()


def _umask():
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def test_reader_never_finds_half_a_file(infini_run, path):
    begin_s, seen = time.monotonic(), set()
    command = infini_run(f"--metrics={path}", "--metrics_interval=1", *play("pause=2.5", "exit=0"))
    while command.process.poll() is None:
        if path.exists():
            content = path.read_text()
            assert content.endswith("\n")
            assert ("written_timestamp_seconds",) in parse(content)
            seen.add(content)
    assert command.wait() == 0
    assert 2 <= len(seen) <= time.monotonic() - begin_s + 2


def test_killed_launcher_leaves_an_old_file(infini_run, path):
    command = infini_run(f"--metrics={path}", "--metrics_interval=1", *play("say=up", "wait"))
    command.read_until(b"up")
    until(path.exists)
    command.signal(signal.SIGKILL)
    command.wait()
    assert read(path)["ended",] == 0
    until(lambda: not marked())


def test_numbers_are_written_during_the_delay_of_a_restart(infini_run, path):
    flags = (f"--metrics={path}", "--metrics_interval=1", "--max_restarts=1", "--restart_delay=1h")
    command = infini_run(*flags, "false")
    until(lambda: path.exists() and read(path)["phase_seconds_total", "stopped"] > 1)
    assert read(path)["ended",] == 0
    command.signal(signal.SIGTERM)
    assert command.wait() == 143
    assert read(path)["exit_code",] == 143


@pytest.mark.parametrize(
    ("flag", "error"),
    [
        ("--metrics={tmp}", "is not a regular file"),
        ("--metrics=/dev/full", "is not a regular file"),
        ("--metrics={tmp}/no/file", "cannot be written: No such file or directory"),
        ("--metrics_interval=0.5", "expected at least 1s; use 15s, 1m, or 5m"),
        ("--metrics_interval=x", "not a time"),
        ("--metrics={tmp}/one --trace={tmp}/one", "both are one file; use two names"),
    ],
)
def test_bad_flag_is_one_line_and_starts_nothing(infini_run, tmp_path, flag, error):
    command = infini_run(*flag.format(tmp=tmp_path).split(), "touch", tmp_path / "started")
    assert command.wait() == 2
    (line,) = command.err.decode().splitlines()
    assert error in line
    assert not (tmp_path / "started").exists()


def test_folder_that_is_gone_is_one_line_at_the_end(infini_run, tmp_path, gate):
    folder, hold = tmp_path / "folder", gate()
    folder.mkdir()
    command = infini_run(f"--metrics={folder}/job.prom", *play("say=up", f"hold={hold}", "exit=0"), gates=(hold,))
    command.read_until(b"up")
    until(lambda: os.listdir(folder) == ["job.prom"])
    (folder / "job.prom").unlink()
    folder.rmdir()
    hold.open()
    assert command.wait() == 0
    (line,) = command.err.decode().splitlines()
    assert line == f"infini-run: --metrics={folder}/job.prom cannot be written: No such file or directory"


def test_slow_writer_takes_the_newest_numbers_last():
    written, begun, go_on = [], Event(), Event()

    def write(item):
        written.append(item)
        begun.set()
        assert go_on.wait(60)

    writer = BackgroundWriter(write, 1, "test: writer")
    writer.put("first", is_newest=True)
    assert begun.wait(60)
    for item in ("second", "last"):
        assert writer.put(item, is_newest=True)
    go_on.set()
    assert writer.close(60)
    assert written == ["first", "last"]


@needs_root("a FUSE mount")
def test_hung_file_server_delays_neither_output_nor_the_end(infini_run, tmp_path, gate):
    folder, hold = tmp_path / "folder", gate()
    folder.mkdir()
    words = play("say=up", f"hold={hold}", "say=later", "exit=0")
    flags = (f"--metrics={folder}/job.prom", "--metrics_interval=1", "--console=prefix")
    command = infini_run(*flags, *words, gates=(hold,), under=("unshare", "--mount", "--propagation=private"))
    command.read_until(b"up")
    mount = ["nsenter", "-t", str(command.pid), "-m", sys.executable, str(HUNG), str(folder), "sleep", "1000"]
    server = subprocess.Popen(mount)
    try:
        until(lambda: b"fuse.hung" in Path(f"/proc/{command.pid}/mounts").read_bytes())
        until(lambda: any(b"fuse" in wchan for wchan in _waits_of(command.pid)))
        hold.open()
        command.read_until(b"later")
        assert command.wait(60) == 0
        assert b"the last numbers were not written in time" in command.err
    finally:
        server.kill()
        server.wait()


def _waits_of(pid):
    """Where the threads of a process wait in the kernel."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found += [(task / "wchan").read_bytes(), (task / "stack").read_bytes()]
    return found


def scrape(folder):
    """What node_exporter publishes of the files of a folder."""
    words = ("--collector.disable-defaults", "--collector.textfile", "--web.listen-address=127.0.0.1:0")
    words += (f"--collector.textfile.directory={folder}",)
    with subprocess.Popen([str(EXPORTER), *words], stderr=subprocess.PIPE, text=True) as exporter:
        try:
            told = (re.search(r"address=(127\S+:[1-9]\d*)", line) for line in exporter.stderr)
            address = next(found[1] for found in told if found)
            with urllib.request.urlopen(f"http://{address}/metrics") as answer:
                page = answer.read().decode()
        finally:
            exporter.kill()
    assert "node_textfile_scrape_error 0" in page
    return page


@pytest.mark.skipif(EXPORTER is None, reason="needs prometheus-node-exporter")
def test_node_exporter_publishes_the_numbers(infini_run, path):
    assert infini_run(f"--metrics={path}", "--nproc_per_node=2", *play("notify=PROGRESS=9", "exit=0")).wait() == 0
    page = scrape(path.parent)
    assert re.search(r'^infini_run_progress{launch="ir-\w+"} 9$', page, re.MULTILINE)


@pytest.mark.skipif(EXPORTER is None, reason="needs prometheus-node-exporter")
def test_node_exporter_publishes_numbers_by_program(infini_run, path, bell):
    """While one of them runs on, and the other one has restarted."""
    server = f'test "$TORCHELASTIC_RESTART_COUNT" = 0 && exit 3; echo up > {shlex.quote(bell.path)}; exec sleep 1000'
    flags = (f"--metrics={path}", "--metrics_interval=1", "--restart_scope=program", "--restart_delay=0")
    first = ("--program=t", "--nproc_per_node=2", *play("notify=PROGRESS=9", "wait"))
    second = ("--program=r", "--max_restarts=2", "sh", "-c", server)
    command = infini_run(*flags, *first, ":", *second)
    assert bell.hear(1) == ["up"]
    until(lambda: read(path).get(("progress", "t")) == 9 and read(path)["restarts_total", "r"] == 1)
    page = scrape(path.parent)
    for line in (
        r'ranks{launch="ir-\w+",program="t",state="running"} 2',
        r'ranks{launch="ir-\w+",program="r",state="running"} 1',
        r'progress{launch="ir-\w+",program="t"} 9',
        r'restarts_total{launch="ir-\w+",program="t"} 0',
        r'restarts_total{launch="ir-\w+",program="r"} 1',
        r'nodes{launch="ir-\w+"} 1',
    ):
        assert re.search(f"^infini_run_{line}$", page, re.MULTILINE), line
    command.signal(signal.SIGTERM)
    assert command.wait() == 143


@pytest.mark.parametrize(
    ("flags", "is_known"),
    [
        (("--nproc_per_node=1",), False),
        (("--nproc_per_node=1", "--console=lines"), True),
        (("--nproc_per_node=2",), True),
        (("--nproc_per_node=2", "--console=none"), False),
    ],
)
def test_silence_is_known_where_all_output_passes_through(infini_run, path, flags, is_known):
    command = infini_run(*flags, f"--metrics={path}", "--metrics_interval=1", *play("notify=READY=1", "wait"))
    until(lambda: path.exists() and read(path)["ranks", "ready"] == int(flags[0][-1]))
    assert (("silence_seconds",) in read(path)) == is_known
    command.signal(signal.SIGTERM)
    command.wait()


def test_python_api_writes_the_numbers(path):
    assert ir.run(play("notify=PROGRESS=5", "exit=0"), nproc_per_node=2, metrics=path).exit_code == 0
    assert (read(path)["progress",], read(path)["ranks", "done"]) == (5, 2)


@pytest.mark.xdist_group(__name__)
def test_head_writes_the_numbers_of_all_nodes(infini_run, path):
    bed = Bed(hosts=2)
    try:
        flags = ("--hosts=host[1-2]", f"--ssh_config={bed.config}", "--nproc_per_node=2", f"--metrics={path}")
        words = play("notify=READY=1;PROGRESS=3", "say=up", "wait")
        command = infini_run(*flags, "--metrics_interval=1", *words)
        command.read_lines(b"[host", 4)
        until(lambda: path.exists() and read(path).get(("ranks", "ready")) == 4)
        until(lambda: read(path).get(("progress",)) == 3)
        assert read(path)["nodes",] == 2
        assert read(path)["silence_seconds",] < 120
        with bed.host_down(2):
            assert command.wait() == 1
        found = read(path)
        assert (found["lost_nodes_total",], found["ranks", "lost"], found["exit_code",]) == (1, 2, 1)
    finally:
        bed.close()
        until(lambda: not agents())
