"""What a crew can be made of: functions, classes, objects, partials, with arguments; and how its objects show."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import pytest

import infini_run as ir
from infini_run.crews.spawn import placement
from infini_run.crews.spawn.exec_spawner import ExecSpawner
from infini_run.options.keywords import CrewOptions, FunctionOptions


class Line:
    def __init__(self, slope=1, *, offset=0):
        self.slope, self.offset = slope, offset

    def start(self, ctx):
        self.rank = ctx.rank

    def task(self, ctx, x):
        assert self.rank == ctx.rank
        return self.slope * x + self.offset


class GenericLine(Line, Generic[TypeVar("T")]):
    pass


@dataclass
class DataLine:
    slope: int
    offset: int = 0
    tasks: list[int] = field(default_factory=list)

    def task(self, ctx, x):
        self.tasks.append(x)
        return self.slope * x + self.offset


class NamedLine(NamedTuple):
    slope: int
    offset: int = 0

    def task(self, ctx, x):
        return self.slope * x + self.offset

    def serve(self, ctx, x):
        return self.task(ctx, x)


def line(ctx, x, slope, offset=0):
    return slope * x + offset


def plain(x):
    return 3 * x + 1


def plain_with_arguments(x, slope, *, offset):
    return slope * x + offset


def passing_on(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        return function(*args, **kwargs)

    return call


def without_context(function):
    @functools.wraps(function)
    def call(ctx, task):
        return function(task)

    return call


class PlainLine:
    def serve(self, x):
        return plain(x)


TARGETS = {
    "class with arguments": {"target": Line, "args": (3,), "kwargs": {"offset": 1}},
    "partial of a class": {"target": functools.partial(Line, 3, offset=1)},
    "partial of a class, with arguments": {"target": functools.partial(Line, 3), "kwargs": {"offset": 1}},
    "object": {"target": Line(3, offset=1)},
    "class of a generic type": {"target": GenericLine[int], "args": (3,), "kwargs": {"offset": 1}},
    "partial of a generic type": {"target": functools.partial(GenericLine[int], 3), "kwargs": {"offset": 1}},
    "object of a generic type": {"target": GenericLine[int](3, offset=1)},
    "dataclass": {"target": DataLine, "kwargs": {"slope": 3, "offset": 1}},
    "object of a dataclass": {"target": DataLine(3, 1)},
    "named tuple": {"target": NamedLine, "args": (3, 1)},
    "object of a named tuple": {"target": NamedLine(3, 1)},
    "method": {"target": NamedLine(3, 1).serve},
    "partial of a method": {"target": functools.partial(NamedLine(3, 1).serve)},
    "function with arguments": {"target": line, "args": (3,), "kwargs": {"offset": 1}},
    "partial of a function": {"target": functools.partial(line, slope=3, offset=1)},
    "function of the task": {"target": plain},
    "lambda of the task": {"target": lambda x: 3 * x + 1},
    "function of the task with arguments": {"target": plain_with_arguments, "args": (3,), "kwargs": {"offset": 1}},
    "partial of a function of the task": {"target": functools.partial(plain_with_arguments, slope=3, offset=1)},
    "method of the task": {"target": PlainLine().serve},
    "decorated function of the task": {"target": passing_on(plain)},
    "decorator that drops the context": {"target": without_context(plain)},
}


@pytest.mark.parametrize("given", TARGETS.values(), ids=TARGETS)
def test_a_crew_takes_any_target_with_its_arguments(given):
    with ir.Crew(**given, nproc_per_node=2) as crew:
        assert list(crew.map([1, 2, 3])) == [4, 7, 10]


def test_function_that_can_take_both_gets_the_context():
    with ir.Crew(lambda ctx, task=5: (ctx.rank, task)) as crew:
        assert crew.ask(1).result() == (0, 1)
    with ir.Crew(abs) as crew:
        assert crew.ask(-1).result() == 1


def test_workers_start_without_inspect():
    code = "import sys, infini_run.crews.worker.worker_main; print('inspect' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("False\n", "")


class OfTheTask:
    def task(self, x):
        return x


class StartsAlone(Line):
    def start(self):
        pass


def three(a, b, c):
    return a


def test_an_object_is_copied_to_each_worker():
    class Counter:
        count = 0

        def task(self, ctx, n):
            self.count += n
            return self.count

    counter = Counter()
    with ir.Crew(counter, nproc_per_node=2) as crew:
        assert [crew.worker(rank).ask(1).result() for rank in (0, 0, 1)] == [1, 2, 1]
    assert counter.count == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"target": 3}, "expected a function"),
        ({"target": int}, "expected a function"),
        ({"target": functools.partial(int)}, "expected a function"),
        ({"target": Line(), "args": (1,)}, "already an object"),
        ({"target": three}, r"three\(a, b, c\) can be called with neither \(ctx, task\) nor \(task\)"),
        ({"target": three, "args": (1, 2), "kwargs": {"c": 3}}, r"neither \(ctx, task, 1, 2, c=3\) nor \(task, 1, 2"),
        ({"target": plain_with_arguments, "args": (3,)}, "neither"),
        ({"target": functools.partial(line, offset=1)}, "neither"),
        ({"target": OfTheTask}, r"OfTheTask.task\(self, x\): too many .*; it is called with \(ctx, task\)"),
        ({"target": OfTheTask()}, r"OfTheTask.task\(x\): too many .*; it is called with \(ctx, task\)"),
        ({"target": StartsAlone}, r"StartsAlone.start\(self\): too many .*; it is called with \(ctx\)"),
        ({"target": Line, "args": (1, 2)}, r"Line\(.*\): too many .*; it is called with args= and kwargs="),
        ({"target": DataLine}, "DataLine.*missing a required argument: 'slope'"),
        ({"target": NamedLine, "args": (1, threading.Lock())}, r"args\[1\]"),
        ({"target": Line, "kwargs": {"offset": threading.Lock()}}, r"kwargs\['offset'\]"),
    ],
)
def test_what_is_no_target_is_refused(given, message):
    with pytest.raises((ir.UsageError, ir.UnpicklableError), match=message):
        ir.Crew(**given)


def test_a_result_is_indexed_and_sliced_as_a_tuple():
    result = ir.Launcher(nproc_per_node=3, preload=()).run(lambda: ir.this_worker().rank)
    assert (result[-1], result[-3], result[:2], result[::-1]) == (2, 0, (0, 1), (2, 1, 0))
    for rank in (3, -4):
        with pytest.raises(IndexError, match="unknown rank; use 0 to 2"):
            result[rank]


def test_objects_show_what_they_are_and_how():
    launcher = ir.Launcher(nproc_per_node=2, preload=())
    assert repr(launcher) == "<Launcher: nproc_per_node=2>"
    with launcher.start(time.sleep, 60) as handle:
        assert repr(handle) == "<LaunchHandle of 2 ranks: running>"
    assert repr(handle) == "<LaunchHandle of 2 ranks: stopped>"
    with ir.Pool() as pool:
        assert repr(pool) == "<Pool: nproc_per_node=1>"
    assert repr(pool) == "<Pool: nproc_per_node=1, closed>"
    with ir.Crew(line, args=(1,), nproc_per_node=2) as crew:
        ask = crew.ask(1)
        assert repr(ask).startswith(f"<Ask of task {ask.task}: ")
        ask.result()
        assert repr(ask) == f"<Ask of task {ask.task}: done>"
        assert repr(crew) == "<Crew of 2: running>"
    assert repr(crew) == "<Crew of 2: closed>"


# ---- flags of the command


@pytest.mark.parametrize(
    "flag",
    [
        {"trace": "t.json"},
        {"live": True},
        {"plot": "p.png"},
        {"stdin": "rank0"},
        {"node_rank": 1},
        {"ready_timeout": 5},
    ],
)
def test_flags_without_effect_on_functions_and_crews_are_refused(flag):
    (name,) = flag
    with pytest.raises(ir.UsageError, match=f"no effect on functions: {name}="):
        ir.Launcher(**flag)
    with pytest.raises(ir.UsageError, match=f"no effect on a crew: {name}="):
        ir.Crew(line, **flag)


@pytest.mark.parametrize(
    "flag", [{"nnodes": 2}, {"engine": "ssh"}, {"ssh_config": "f"}, {"node_timeout": 5}, {"export": ["A"]}]
)
def test_flags_about_hosts_are_refused_without_hosts(flag):
    (name,) = flag
    for make in (ir.Launcher, lambda **given: ir.Crew(line, **given)):
        with pytest.raises(ir.UsageError, match=rf"{name}=.*: needs the nodes of a launch; add hosts="):
            make(**flag)
    assert ir.Launcher(nnodes=1, engine="local").run(os.getpid)


def test_what_a_spawner_is_made_of_is_refused_beside_one():
    given = {
        "nproc_per_node": 2,
        "hosts": ["a"],
        "env": {"A": "1"},
        "grace": 3,
        "preload": ["math"],
        "console": "none",
    }
    for name, value in {**given, "nproc": 2, "inherit_env": False, "log_dir": "logs", "cwd": "."}.items():
        with pytest.raises(ir.UsageError, match=f"^{name}=: no effect with spawner="):
            ir.Crew(line, spawner=ExecSpawner(nproc=1), **{name: value})
    with ir.Crew(line, args=(1,), spawner=ExecSpawner(nproc=2)) as crew:
        assert crew.nproc == 2


def test_arguments_of_a_launcher_that_would_have_no_effect_are_refused():
    for kind in (ir.Launcher, ir.Pool):
        with pytest.raises(ir.UsageError, match="worker_timeout_s=5: no effect without backend="):
            kind(worker_timeout_s=5)
        with pytest.raises(
            ir.UsageError,
            match=r"inherit_env=False: conflicts with copy_env=\['PATH'\]; drop "
            r"one of them",
        ):
            kind(copy_env=["PATH"], inherit_env=False)
    assert ir.Launcher(worker_timeout_s=5, backend="gloo").worker_timeout_s == 5


def test_typed_keywords_are_those_that_are_not_refused():
    assert CrewOptions.__annotations__.keys().isdisjoint({**placement._NO_EFFECT, **placement._NO_EFFECT_ON_CREWS})
    assert FunctionOptions.__annotations__.keys().isdisjoint(placement._NO_EFFECT)


def test_a_file_names_the_hosts(tmp_path, monkeypatch):
    """The hosts have no addresses, and are this machine."""
    (tmp_path / "ssh").write_text('#!/bin/sh\nfor word; do :; done\nexec sh -c "$word"\n')
    (tmp_path / "ssh").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    hostfile = tmp_path / "hosts"
    hostfile.write_text("a\nme@b slots=2  # the large one\n[::1]:1\n")
    launcher = ir.Launcher(hostfile=hostfile, console="none")
    assert launcher.hosts == ("a", "me@b:2", "[::1]:1")
    assert launcher.run(os.getpid).hosts == ("a", "b", "::1")
    with ir.Crew(line, args=(1,), hostfile=str(hostfile), console="none") as crew:
        assert crew.nproc == 4
    with pytest.raises(ir.UsageError, match=r"hosts=\['a'\]: conflicts with hostfile='f'; drop one of them"):
        ir.Launcher(["a"], hostfile="f")
    with pytest.raises(ir.UsageError, match=r"hostfile='/no/such' cannot be read"):
        ir.Launcher(hostfile="/no/such")


def test_all_flags_without_effect_are_named_at_once():
    with pytest.raises(ir.UsageError, match=r"max_restarts= .*ir\.Restart.*, keep_going= .*, trace= .*max_no"):
        ir.Crew(line, max_restarts=3, keep_going=True, trace="t.json", max_no_progress=2)
