"""--trace: a file that a viewer of Chrome traces opens and that says what happened, by the rules of the format."""

from __future__ import annotations

import itertools
import json
import os
import signal
import stat
import time

import pytest

import infini_run as ir
from infini_run.core.c_structs import Event
from infini_run.display.chrome_trace import ChromeTrace
from infini_run.plan.model import Output, Plan, Worker
from tests.support.command import play
from tests.support.processes import processes
from tests.support.waiting import until

PHASES = {"X": {"dur"}, "i": {"s"}, "C": {"args"}, "M": {"args"}}
METADATA = {"process_name": "name", "thread_name": "name", "process_sort_index": "sort_index"}


def validate(content):
    """The rules of the Trace Event Format that what we write has to keep; returns the events."""
    events = content["traceEvents"]
    assert content["displayTimeUnit"] in ("ms", "ns")
    last_ts = 0
    named, open_slices = set(), {}
    for event in events:
        assert {"name", "ph", "ts", "pid", "tid"} | PHASES[event["ph"]] <= event.keys(), event
        assert isinstance(event["name"], str)
        assert event["name"]
        assert all(type(event[field]) is int and event[field] >= 0 for field in ("ts", "pid", "tid")), event
        if event["ph"] == "M":
            assert METADATA[event["name"]] in event["args"]
            named.add((event["pid"], event["tid"], event["name"]))
            continue
        assert event["ts"] >= last_ts, "not in the order of time"
        last_ts = event["ts"]
        assert {(event["pid"], event["tid"], fact) for fact in METADATA} <= named, "a track without a name"
        if event["ph"] == "X":
            assert type(event["dur"]) is int
            assert event["dur"] >= 0
            stack = open_slices.setdefault((event["pid"], event["tid"]), [])
            while stack and stack[-1] <= event["ts"]:
                stack.pop()
            end = event["ts"] + event["dur"]
            assert not stack or end <= stack[-1], f"across another slice: {event}"
            stack.append(end)
        elif event["ph"] == "i":
            assert event["s"] in ("g", "p", "t")
        elif event["ph"] == "C":
            assert event["args"]
            assert all(type(value) is int for value in event["args"].values())
    return events


def read(path):
    content = json.loads(path.read_text())
    return validate(content), content["otherData"]


def of(events, name, pid=None):
    return [e for e in events if e["name"] == name and (pid is None or e["pid"] == pid) and e["ph"] != "M"]


def rank_slices(events):
    return {e["args"]["rank"]: e for e in events if e["ph"] == "X" and e["name"].startswith("rank ")}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "trace.json"


def test_a_launch_has_its_steps_one_after_the_other(infini_run, path):
    words = play("notify=READY=1", "say=hello", "exit=0")
    command = infini_run(f"--trace={path}", "--nproc_per_node=3", "--console=prefix", *words)
    assert command.wait() == 0
    pids = command.pids_of(b"[rank", 3)
    events, other = read(path)
    assert other["world_size"] == 3
    assert other["launch_id"].startswith("ir-")
    steps = [e for e in events if e["ph"] == "X" and e["pid"] == command.pid]
    assert [e["name"] for e in steps] == ["plan", "spawn", "run", "sweep"]
    assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in itertools.pairwise(steps))
    ranks = rank_slices(events)
    assert {rank: e["pid"] for rank, e in ranks.items()} == pids
    for rank, pid in pids.items():
        (starting,), (ready,), (ended,) = (of(events, n, pid) for n in ("starting", "ready", "exit: code 0"))
        assert ranks[rank]["ts"] == starting["ts"]
        assert starting["ts"] + starting["dur"] == ready["ts"] <= ended["ts"]
        assert ranks[rank]["args"]["exit"] == "code 0"
        assert ranks[rank]["cname"] == "good"
    names = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    assert {name: pid for name, pid in names.items() if name.startswith("rank")} == {
        f"rank {rank}": pid for rank, pid in pids.items()
    }
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == [path.name]


def test_what_ranks_wrote_is_counted(infini_run, path):
    words = [
        "sh",
        "-c",
        "i=0; while [ $i -lt 500 ]; do echo 123456789; echo 1234 >&2; i=$((i+1)); done; sleep 0.3; echo .",
    ]
    command = infini_run(f"--trace={path}", "--console=prefix", *words)
    assert command.wait() == 0
    counters = [e for e in read(path)[0] if e["ph"] == "C"]
    assert len(counters) >= 2
    assert counters[-1]["args"] == {"stdout": 5002, "stderr": 2500}
    for before, after in itertools.pairwise(counters):
        assert all(before["args"][name] <= after["args"][name] for name in before["args"])


def test_a_failure_is_marked_and_what_it_stopped_too(infini_run, path):
    words = play("@1", "exit=3", "@*", "wait")
    command = infini_run(f"--trace={path}", "--nproc_per_node=3", *words)
    assert command.wait() == 3
    events, _ = read(path)
    steps = [e["name"] for e in events if e["ph"] == "X" and e["pid"] == command.pid]
    assert steps == ["plan", "spawn", "run", "stop", "sweep"]
    ranks = rank_slices(events)
    assert (ranks[1]["args"]["failed"], ranks[1]["cname"]) == (True, "terrible")
    assert not of(events, "stopping", ranks[1]["pid"])
    for rank in (0, 2):
        assert (ranks[rank]["args"]["stopped"], ranks[rank]["cname"]) == (True, "grey")
        (stopping,) = of(events, "stopping", ranks[rank]["pid"])
        assert stopping["ts"] + stopping["dur"] == ranks[rank]["ts"] + ranks[rank]["dur"]
        assert of(events, "exit: SIGTERM", ranks[rank]["pid"])


def test_signals_and_what_was_left_behind_are_marked(infini_run, path):
    words = play("daemon", "name=left-behind", "say=stray", "wait", "done", "tell=USR1", "say=ready", "wait")
    command = infini_run(f"--trace={path}", *words)
    command.read_until(b"ready")
    command.signal(signal.SIGUSR1)
    command.read_until(b"got USR1")
    command.signal(signal.SIGTERM)
    assert command.wait() == 143
    events, _ = read(path)
    (passed,) = of(events, "passed SIGUSR1 on")
    (told,) = of(events, "signalled SIGTERM")
    (stray,) = of(events, "left behind: left-behind")
    (sweep,) = of(events, "sweep")
    assert passed["ts"] <= told["ts"] <= sweep["ts"] <= stray["ts"] <= sweep["ts"] + sweep["dur"]


def test_a_rank_that_could_not_be_executed_is_there(infini_run, path, tmp_path):
    program = tmp_path / "program"
    program.write_bytes(b"\x7fELFnot really")
    program.chmod(0o755)
    command = infini_run(f"--trace={path}", program)
    assert command.wait() == 126
    assert of(read(path)[0], "start failed")


def test_without_a_first_rank_the_trace_is_written_all_the_same(infini_run, path):
    command = infini_run(
        f"--trace={path}", "--nproc_per_node=4", "sleep", "1000", under=("prlimit", "--nofile=12:12")
    )
    assert command.wait() == 1
    events, _ = read(path)
    assert of(events, "plan")
    assert not rank_slices(events)


# ---- the file


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("missing/t.json", "No such file or directory"),
        (".", "is not a regular file"),
        ("/dev/null", "is not a regular file"),
    ],
)
def test_a_file_that_cannot_be_made_is_refused_before_the_start(infini_run, tmp_path, name, reason):
    command = infini_run(f"--trace={tmp_path / name}", "touch", tmp_path / "started")
    assert command.wait() == 2
    assert command.err.count(b"\n") == 1
    assert reason.encode() in command.err
    assert b"--trace=" in command.err
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize("other", ["t.json", "./t.json", "link/t.json", "{}/t.json"])
def test_one_file_cannot_be_trace_and_report(infini_run, tmp_path, other):
    (tmp_path / "link").symlink_to(".")
    other = other.format(tmp_path)
    command = infini_run("--trace=t.json", f"--report={other}", "true", cwd=tmp_path)
    assert command.wait() == 2
    assert (
        command.err
        == f"infini-run: --trace=t.json conflicts with --report={other}: both are one file; use two names\n".encode()
    )
    assert os.listdir(tmp_path) == ["link"]


def test_a_report_may_have_the_name_of_the_trace_in_another_folder(infini_run, tmp_path):
    (tmp_path / "other").mkdir()
    assert infini_run("--trace=t.json", "--report=other/t.json", "true", cwd=tmp_path).wait() == 0
    assert read(tmp_path / "t.json")
    assert (tmp_path / "other/t.json").exists()


def test_a_link_is_replaced_and_never_followed(infini_run, path, tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    path.symlink_to(precious)
    assert infini_run(f"--trace={path}", "true").wait() == 0
    assert precious.read_text() == "mine"
    assert not path.is_symlink()
    assert read(path)


def test_an_earlier_trace_is_not_taken_for_this_one(infini_run, path):
    path.write_text("old")
    command = infini_run(f"--trace={path}", *play("say=ready", "wait"))
    command.read_until(b"ready")
    assert not path.exists()
    command.process.kill()
    command.wait()
    assert os.listdir(path.parent) == []  # nor half of it


def test_a_trace_that_cannot_be_written_at_the_end_is_told_and_changes_nothing(infini_run, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    command = infini_run(f"--trace={folder}/t.json", "rmdir", folder)
    assert command.wait() == 0
    assert (
        command.err
        == f"infini-run: the trace {folder}/t.json cannot be written: No such file or directory\n".encode()
    )


def test_a_relative_path_is_where_we_were_started(infini_run, tmp_path):
    assert infini_run("--trace=t.json", "true", cwd=tmp_path).wait() == 0
    assert read(tmp_path / "t.json")


def test_a_program_may_ask_for_it(path):
    report = ir.run(play("exit=0"), nproc_per_node=2, trace=path)
    assert report.exit_code == 0
    events, other = read(path)
    assert len(rank_slices(events)) == 2
    assert other["launch_id"] == report.launch_id


def test_a_program_is_told_in_the_report_when_it_cannot_be_written(tmp_path):
    (tmp_path / "folder").mkdir()
    with ir.ProcessLauncher(["rmdir", str(tmp_path / "folder")], trace=tmp_path / "folder/t.json") as launcher:
        launcher.launch()
        launcher.wait()
    assert "cannot be written" in launcher.report().notices[0]


# ---- what may come without end


OUTPUT = Output(console=False, log=False, piped=True)


def plan(count):
    workers = tuple(
        Worker(
            rank=rank, local_rank=rank, node=0, program="", program_rank=rank, name=f"rank {rank}", file="x", cwd="",
            argv=("x",), env=(), devices=("1",), cpu_binding=None, stdin="null",
            stdout=OUTPUT, stderr=OUTPUT, label="", log="", error_log="", error_file="", notify="",
        )
        for rank in range(count)
    )  # fmt: skip
    return Plan(
        launch_id="ir-1", nodes=(), nnodes=1, world_size=count, master_addr="a", programs=(), env=(),
        workers=workers,
    )  # fmt: skip


class Writers:
    """In place of a group: ranks that have always written something more."""

    def __init__(self):
        self.bytes = 0

    def volume(self, worker):
        self.bytes += 1
        return self.bytes, 0


def test_a_trace_of_a_long_job_stays_small_and_right(path):
    trace = ChromeTrace(str(path), gap_ns=0, max_samples=1000)
    trace.begin(plan(10), Writers())
    start_ns = trace._begin_ns
    for rank in range(10):
        trace.on_event(Event(kind="started", worker=rank, rank=rank, pid=100 + rank, time_ns=start_ns))
    for _ in range(5000):
        trace.run_due()
        trace._next_ns = 0
    for _ in range(20000):
        trace.on_event(Event(kind="forwarded", signal=10, time_ns=start_ns))
    for rank in range(10):
        trace.on_event(Event(kind="exited", worker=rank, rank=rank, pid=100 + rank, time_ns=start_ns + 10**12))
    trace.on_event(Event(kind="ended", time_ns=start_ns + 10**12))
    trace.end()
    assert trace.write() == ""
    events, _ = read(path)
    counters = [e for e in events if e["ph"] == "C"]
    assert 300 < len(counters) <= 1020
    assert len(of(events, "passed SIGUSR1 on")) == 10_000
    assert max(e["args"]["stdout"] for e in counters) == 50_010  # the last one is never dropped


def test_after_the_last_thing_that_happened_it_looks_once_more_and_then_never(path):
    trace = ChromeTrace(str(path), gap_ns=10**12)
    trace.begin(plan(1), Writers())
    trace.run_due()
    assert trace.timeout_s(None) is None
    trace.run_due()
    assert 0 < trace.timeout_s(None) <= 1000
    assert trace.timeout_s(5.0) == 5.0
    trace._next_ns = 0
    assert trace.timeout_s(None) == 0
    trace.run_due()
    assert trace.timeout_s(None) is None


def test_several_attempts_are_one_trace(path):
    trace = ChromeTrace(str(path))
    for attempt in range(3):
        trace.begin(plan(1), Writers())
        one = {"worker": 0, "rank": 0, "pid": 10 + attempt}
        trace.on_event(Event(kind="started", time_ns=time.monotonic_ns(), **one))
        trace.on_event(Event(kind="exited", code=1, time_ns=time.monotonic_ns(), **one))
        trace.end()
    assert trace.write() == ""
    events, _ = read(path)
    assert len([e for e in events if e["name"] == "rank 0" and e["ph"] == "X"]) == 3
    assert len(of(events, "plan")) == 1
    assert len(of(events, "spawn")) == 3


def test_the_validator_sees_what_is_wrong(path):
    good = {"name": "a", "ph": "X", "ts": 5, "dur": 10, "pid": 1, "tid": 1, "args": {}}
    facts = {"process_name": {"name": "p"}, "thread_name": {"name": "t"}, "process_sort_index": {"sort_index": 1}}
    names = [{"name": f, "ph": "M", "ts": 0, "pid": 1, "tid": 1, "args": args} for f, args in facts.items()]
    validate({"traceEvents": [*names, good, good | {"dur": 3}], "displayTimeUnit": "ms"})
    for bad in ({"dur": 11, "ts": 6}, {"dur": -1}, {"ts": 4}, {"ts": 5.5}, {"name": ""}, {"pid": 2}, {"ph": "Z"}):
        with pytest.raises((AssertionError, KeyError)):
            validate({"traceEvents": [*names, good, good | bad], "displayTimeUnit": "ms"})


def test_traces_of_jobs_that_are_told_to_stop_while_they_start_are_valid(infini_run, path):
    command = infini_run(f"--trace={path}", "--nproc_per_node=200", "sleep", "1000")
    until(lambda: sum(parent == command.pid for parent, _, _ in processes().values()) > 3)
    command.signal(signal.SIGTERM)
    assert command.wait() == 143
    assert of(read(path)[0], "signalled SIGTERM")
