"""--events: a line of JSON for each event while the job runs, which never delays the job."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import resource
import signal
import stat
import subprocess
import threading
import time

import pytest

import infini_run as ir
from infini_run.core.c_structs import KINDS as CORE_KINDS
from infini_run.core.c_structs import Event
from infini_run.display import event_stream
from infini_run.display.event_schema import KINDS, encode_fact, make_fact
from infini_run.display.event_stream import LineFile
from infini_run.report.exit import Exit
from tests.launch.test_security import needs_root
from tests.support.command import COMMAND, play
from tests.support.hosts import Bed, agents
from tests.support.paths import ROOT
from tests.support.waiting import until

WORDS = play("notify=READY=1;PROGRESS=3", "say=up", "exit=0")


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def of(facts, kind):
    return [fact for fact in facts if fact["kind"] == kind]


def validate(facts):
    """What the documented schema promises of the lines of one launch."""
    for fact in facts:
        assert fact.keys() - {"dropped"} == {"kind", "time_s", *KINDS[fact["kind"]]}, fact
    assert [fact["kind"] for fact in facts][:: len(facts) - 1] == ["launched", "ended"]
    return facts


@pytest.fixture
def path(tmp_path):
    return tmp_path / "events.jsonl"


def test_launch_has_a_line_for_each_event(infini_run, path):
    before_s = time.time()
    command = infini_run(f"--events={path}", "--nproc_per_node=2", *WORDS)
    assert command.wait() == 0, command.err
    facts = validate(lines(path))
    (launched,) = of(facts, "launched")
    assert (launched["ranks"], launched["nodes"], launched["restarts"], launched["pid"]) == (2, 1, 0, command.pid)
    pids = command.pids_of(b"up", 2)
    for kind in ("started", "ready", "progress", "exited"):
        assert {fact["rank"] for fact in of(facts, kind)} == {0, 1}, kind
    assert {fact["rank"]: fact["pid"] for fact in of(facts, "exited")} == pids
    assert {(fact["code"], fact["signal"], fact["stopped"]) for fact in of(facts, "exited")} == {(0, 0, False)}
    assert {fact["value"] for fact in of(facts, "progress")} == {3}
    assert (facts[-1]["code"], facts[-1]["signal"], facts[-1]["reason"]) == (0, 0, "")
    assert all(before_s - 1 <= fact["time_s"] <= time.time() + 1 for fact in facts)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_failure_and_restart_are_in_the_lines(infini_run, path):
    words = play("@1", "+0", "exit=7", "+*", "@*", "say=up", "exit=0")
    command = infini_run(
        f"--events={path}", "--nproc_per_node=2", "--max_restarts=1", "--restart_delay=0.1", "--keep_going", *words
    )
    assert command.wait() == 0
    facts = validate(lines(path))
    assert [fact["restarts"] for fact in of(facts, "launched")] == [0, 1]
    assert [fact["restarts"] for fact in of(facts, "restarting")] == [1]
    assert sorted(fact["code"] for fact in of(facts, "exited")) == [0, 0, 0, 7]
    assert len({fact["launch_id"] for fact in of(facts, "launched")}) == 1


def test_end_says_what_failed_first_and_which_signal_came(infini_run, path):
    assert infini_run(f"--events={path}", *play("die=SEGV")).wait() == 128 + signal.SIGSEGV
    facts = validate(lines(path))
    (exited,) = of(facts, "exited")
    assert (exited["code"], exited["signal"]) == (None, signal.SIGSEGV)
    assert facts[-1]["code"] == 139
    assert "rank 0" in facts[-1]["reason"]
    path.unlink()
    command = infini_run(f"--events={path}", *play("say=up", "wait"))
    command.read_until(b"up")
    command.signal(signal.SIGTERM)
    assert command.wait() == 143
    facts = validate(lines(path))
    assert [fact["signal"] for fact in of(facts, "signalled")] == [signal.SIGTERM]
    assert (facts[-1]["code"], facts[-1]["signal"]) == (143, signal.SIGTERM)


def test_launch_that_cannot_start_says_why(infini_run, path, tmp_path):
    command = infini_run(f"--events={path}", f"--metrics={tmp_path}/job.prom", "/no/such/program")
    assert command.wait() == 127
    (ended,) = lines(path)
    assert (ended["kind"], ended["code"]) == ("ended", 127)
    assert ended["reason"] in command.err.decode()
    assert not (tmp_path / "job.prom").exists()
    with pytest.raises(ir.ProgramError), ir.ProcessLauncher(["/no/such/program"], events=path) as launcher:
        launcher.launch()
    assert lines(path)[1]["reason"] == ended["reason"]


def test_hung_rank_has_a_line(infini_run, path):
    words = play("notify=WATCHDOG=1", "wait")
    command = infini_run(f"--events={path}", "--hang_timeout=0.5", "--on_hang=stop", "--grace=1", *words)
    assert command.wait() == 1, command.err
    (hung,) = of(validate(lines(path)), "hung")
    assert hung["rank"] == 0


def test_progress_that_was_held_does_not_follow_later_progress(path, monkeypatch):
    """Nothing has looked at what is due in between, as on a busy machine."""
    monkeypatch.setattr(event_stream, "_GAP_S", 0.05)
    stream = event_stream.EventStream(str(path), os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
    for value in (1, 2):
        stream.add({"kind": "progress", "rank": 0, "value": value})
    time.sleep(0.1)  # the time of the one that is held
    stream.add({"kind": "progress", "rank": 0, "value": 3})
    stream.add({"kind": "exited", "rank": 0})
    assert stream.close() == ""
    assert [fact["value"] for fact in of(lines(path), "progress")] == [1, 3]


def test_progress_comes_once_a_second_and_with_the_last_value(infini_run, path):
    each = itertools.chain.from_iterable((f"notify=PROGRESS={value}", "pause=0.02") for value in range(120))
    assert infini_run(f"--events={path}", *play(*each, "exit=0")).wait() == 0
    told = of(lines(path), "progress")
    assert [fact["value"] for fact in (told[0], told[-1])] == [0, 119]
    assert len(told) <= (told[-1]["time_s"] - told[0]["time_s"]) + 3


def test_lines_are_appended_to_what_was_there(infini_run, path):
    path.write_text('{"kind":"started"}\n{"kind":"exi')  # as a launcher leaves it that was killed
    assert infini_run(f"--events={path}", "true").wait() == 0
    first, cut, *rest = path.read_text().splitlines()
    assert (first, cut) == ('{"kind":"started"}', '{"kind":"exi')
    validate([json.loads(line) for line in rest])


def test_descriptor_gets_the_lines_and_ranks_do_not_have_it(infini_run):
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    words = ("sh", "-c", f"test -e /proc/self/fd/{writer} && exit 9; exit 0")
    command = infini_run(f"--events=fd:{writer}", *words, pass_fds=[writer])
    os.close(writer)
    with open(reader) as file:
        facts = [json.loads(line) for line in file]  # to the end: nothing else holds the pipe
    assert command.wait() == 0
    validate(facts)


@needs_root("a PID namespace")
def test_isolated_launch_writes_to_a_descriptor_of_its_caller(infini_run):
    reader, writer = os.pipe()
    command = infini_run(f"--events=fd:{writer}", "--isolate", "true", pass_fds=[writer])
    os.close(writer)
    with open(reader) as file:
        validate([json.loads(line) for line in file])
    assert command.wait() == 0
    assert command.err == b""


BAD = {
    "{tmp}": "--events={tmp} cannot be written: Is a directory",
    "{tmp}/no/file": "--events={tmp}/no/file cannot be written: No such file or directory",
    "{tmp}/fifo": "--events={tmp}/fifo cannot be written: nobody reads this FIFO, or it is a socket",
    "{tmp}/link": "--events={tmp}/link cannot be written: it is a symbolic link; use its target, or fd:N",
    "{tmp}/hard": "--events={tmp}/hard cannot be written: it is a hard link; use another file",
    "fd:999": "--events=fd:999: not an open descriptor; open it, such as 999>FILE",
    "fd:0": "--events=fd:0: not open for writing; open it, such as 0>FILE",
    "fd:x": "--events=fd:x: expected the name of a file, or fd:N with the number of an open descriptor",
    "fd:99999999999999999999": "expected the name of a file, or fd:N with the number of an open descriptor",
    "{tmp}/report": "--events={tmp}/report conflicts with --report={tmp}/report: both are one file; use two names",
}  # fmt: skip


@pytest.mark.parametrize("isolated", [False, True])
@pytest.mark.parametrize("value", BAD)
def test_what_cannot_be_written_is_one_line_and_starts_nothing(infini_run, tmp_path, value, isolated):
    if isolated and not value.startswith("fd:"):
        pytest.skip("the inner command says it")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "target").touch()
    (tmp_path / "link").symlink_to("target")
    (tmp_path / "other").touch()
    (tmp_path / "hard").hardlink_to(tmp_path / "other")
    given = value.format(tmp=tmp_path)
    flags = ("--isolate",) if isolated else (f"--report={tmp_path}/report",)
    with (tmp_path / "other").open() as stdin:
        command = infini_run(f"--events={given}", *flags, "touch", tmp_path / "started", stdin=stdin)
    assert command.wait() == 2
    (line,) = command.err.decode().splitlines()
    assert BAD[value].format(tmp=tmp_path) in line
    assert not (tmp_path / "started").exists()


def test_full_disk_drops_lines_and_the_job_continues(infini_run):
    command = infini_run("--events=/dev/full", *WORDS)
    assert command.wait() == 0
    assert (
        command.err.decode() == "infini-run: --events=/dev/full: dropped the last events: No space left on device\n"
    )


def test_reader_that_does_not_read_delays_nothing(infini_run):
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"\n" * 4096)
    os.set_blocking(writer, True)
    command = infini_run(f"--events=fd:{writer}", "--nproc_per_node=2", *WORDS, pass_fds=[writer])
    assert command.wait() == 0
    assert command.out.count(b"up") == 2
    assert b"dropped the last events: they were not read in time" in command.err
    os.close(reader)
    os.close(writer)


def test_dropped_lines_are_counted_in_the_next_one(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    file = LineFile(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))
    file.write(make_fact("restarting", 1.0, 1))
    assert json.loads(os.read(reader, 4096))["restarts"] == 1
    os.close(reader)
    for restarts in (2, 3):
        file.write(make_fact("restarting", 1.0, restarts))
    assert (file.dropped, file.problem) == (2, "Broken pipe")
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    for restarts in (4, 5):
        file.write(make_fact("restarting", 1.0, restarts))
    told = [json.loads(line) for line in os.read(reader, 4096).splitlines()]
    assert [(fact["restarts"], fact.get("dropped")) for fact in told] == [(4, 2), (5, None)]
    file.close()
    os.close(reader)


def test_cut_line_is_continued_before_the_next_one(path):
    file = LineFile(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (60, limits[1]))  # Python ignores SIGXFSZ
        for restarts in range(3):
            file.write(make_fact("restarting", 1.0, restarts))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.stat().st_size == 60
    file.write(make_fact("restarting", 1.0, 3))
    assert [(fact["restarts"], fact.get("dropped")) for fact in lines(path)] == [(0, None), (1, None), (3, 1)]
    file.close()


def test_last_lines_stay_whole_when_the_reader_is_slow():
    reader, writer = os.pipe()
    file = LineFile(writer)
    told = bytearray()

    def read():
        while data := os.read(reader, 100):
            told.extend(data)

    thread = threading.Thread(target=read)
    thread.start()
    for restarts in range(5000):
        file.write(make_fact("restarting", 1.0, restarts))
    file.close()
    thread.join()
    os.close(reader)
    assert [json.loads(line)["restarts"] for line in told.splitlines()] == list(range(5000))


# ---- one table of names


def test_kinds_and_fields_are_those_of_the_python_api():
    ours = {"launched", "node_lost"}
    assert KINDS.keys() - ours <= {*CORE_KINDS.values(), "hung", "late", "restarting"}
    words = set(re.findall(r"\w+", Event.__doc__))
    assert KINDS.keys() - ours <= words
    known = {*Event.__annotations__, *Exit.__annotations__}
    for kind in KINDS.keys() - ours - {"restarting", "ended"}:
        assert set(KINDS[kind]) <= known, kind


def test_documentation_has_each_kind_with_its_fields():
    text = (ROOT / "docs/reference/events.md").read_text().partition("## Metrics")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]*) \|", text, re.MULTILINE))
    assert {kind: tuple(re.findall(r"`(\w+)`", fields)) for kind, fields in rows.items()} == KINDS


def test_lines_are_ascii_and_fit_into_a_pipe_at_once():
    texts = ["\x00\ud800\U0001f600\n" * 1000] * 4
    line = encode_fact(make_fact("launched", 1.0, *texts, 1, 2, 3, 4))
    assert line.isascii()
    assert line.count(b"\n") == 1
    assert json.loads(line)["nodes"] == 2


# ---- from Python


def test_python_api_writes_the_events_that_it_returns(path):
    with ir.ProcessLauncher(play("notify=READY=1", "exit=0"), nproc_per_node=2, events=path) as launcher:
        launcher.launch()
        kinds = []
        while events := launcher.events():
            kinds += [event.kind for event in events]
    facts = validate(lines(path))
    assert [fact["kind"] for fact in facts[1:]] == kinds
    report = ir.run(WORDS, events=path)
    assert report.exit_code == 0
    assert len(of(lines(path), "ended")) == 2


def test_python_api_refuses_what_cannot_be_written(tmp_path):
    with pytest.raises(ir.UsageError, match="Is a directory"):
        ir.run(["true"], events=tmp_path)
    with pytest.raises(ir.UsageError, match="not an open descriptor"):
        ir.run(["true"], events="fd:999")


REASON = "the Python program stopped the launch"


@pytest.mark.parametrize(("words", "code"), [((), 143), (("end=TERM:0",), 0), (("ignore=TERM",), 137)])
def test_end_by_host_program_has_reason(path, words, code):
    given = {"nproc_per_node": 2, "events": path, "grace": 0.5 if code == 137 else 60}
    with ir.ProcessLauncher(play(*words, "notify=READY=1", "wait"), **given) as launcher:
        launcher.launch()
        assert launcher.wait_ready(60)
    ended = validate(lines(path))[-1]
    assert (ended["code"], ended["signal"], ended["reason"]) == (code, 0, REASON)


def test_stop_from_outside_is_reason_of_end_in_host_program(path):
    with ir.ProcessLauncher(play("notify=READY=1", "wait"), events=path) as launcher:
        launcher.launch()
        assert launcher.wait_ready(60)
        stop = subprocess.Popen([*COMMAND, "--stop", str(os.getpid())], stdout=subprocess.DEVNULL)
        assert launcher.wait(60)
        assert stop.wait() == 0
    reason = validate(lines(path))[-1]["reason"]
    assert reason.endswith(f"(pid {stop.pid}) asked to stop this launch"), reason


def test_failure_before_end_by_host_program_is_its_reason(path):
    words = play("notify=READY=1", "@0", "exit=3", "@1", "wait")
    with ir.ProcessLauncher(words, nproc_per_node=2, events=path, keep_going=True) as launcher:
        launcher.launch()
        while not any(event.kind == "exited" for event in launcher.events(60)):
            pass
    assert "rank 0" in validate(lines(path))[-1]["reason"]


def test_forked_child_of_the_host_program_holds_no_copy(tmp_path):
    reader, writer = os.pipe()
    with ir.ProcessLauncher(play("wait"), events=f"fd:{writer}") as launcher:
        launcher.launch()
        os.close(writer)
        stay, gone = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(gone)
            os.read(stay, 1)
            os._exit(0)
        os.close(stay)
        launcher.terminate()
        launcher.wait()
    with open(reader) as file:
        validate([json.loads(line) for line in file])
    os.close(gone)
    os.waitpid(child, 0)


# ---- many nodes


@pytest.mark.xdist_group(__name__)
def test_head_writes_the_events_of_all_nodes(infini_run, path):
    bed = Bed(hosts=2)
    try:
        flags = ("--hosts=host[1-2]", f"--ssh_config={bed.config}", "--nproc_per_node=2", f"--events={path}")
        assert infini_run(*flags, *WORDS).wait() == 0
        facts = validate(lines(path))
        assert (facts[0]["nodes"], facts[0]["ranks"]) == (2, 4)
        for kind in ("started", "ready", "progress", "exited"):
            assert {fact["rank"]: fact["host"] for fact in of(facts, kind)} == {
                rank: f"host{1 + rank // 2}" for rank in range(4)
            }, kind
        path.unlink()
        hangs = ("--hang_timeout=0.5", "--on_hang=stop", "--grace=1")
        assert infini_run(*flags, *hangs, *play("@3", "notify=WATCHDOG=1", "wait", "@*", "spin")).wait() == 1
        hung = of(validate(lines(path)), "hung")
        assert [(fact["rank"], fact["host"]) for fact in hung] == [(3, "host2")]
        path.unlink()
        command = infini_run(*flags, *play("say=up", "wait"))
        command.read_lines(b"[host", 4)
        with bed.host_down(2):
            assert command.wait() == 1
        facts = validate(lines(path))
        (lost,) = of(facts, "node_lost")
        assert (lost["node"], lost["host"], lost["ranks"]) == (1, "host2", [2, 3])
        assert "host2" in facts[-1]["reason"]
    finally:
        bed.close()
        until(lambda: not agents())
