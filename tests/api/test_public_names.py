"""What a program sees of the public classes: names that complete, documented parameters, and no warning."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys

import pytest

import infini_run as ir
from tests.support.paths import ROOT
from tests.support.waiting import LIMIT_S

PROGRAM = """
import asyncio
import os
import tempfile
import infini_run as ir

def double(number):
    return 2 * number

assert ir.run(["true"], nproc_per_node=2).exit_code == 0
assert list(ir.Launcher(nproc=2).run(double, 2)) == [4, 4]
with ir.Pool(nproc=2, preload=["decimal"]) as pool:
    assert list(pool.run(double, 2)) == [4, 4]
with ir.Crew(double, nproc=2) as crew:
    assert list(crew.map(range(5), chunksize=2)) == [0, 2, 4, 6, 8]
    assert crew.broadcast(1).result() == [2, 2]
with ir.Executor(2) as executor:
    assert executor.submit(double, 3).result() == 6

async def main():
    asyncio.get_running_loop().slow_callback_duration = 60  # imports, on a busy machine
    async with ir.Crew(double, nproc=1) as crew:
        return await crew.ask(4)

assert asyncio.run(main()) == 8

try:
    ir.Launcher(nproc=2).run(int, "x")
except ValueError as error:
    assert error.rank in (0, 1)
with ir.Executor(1) as executor:
    assert isinstance(executor.submit(os._exit, 3).exception(), ir.ExecutorFailed)

(sender, receiver), (far_sender, far_receiver) = ir.channel.pair()
sender.send({"a": 1})
assert far_receiver.recv() == {"a": 1}
for end in (sender, receiver, far_sender, far_receiver):
    end.close()

with tempfile.TemporaryDirectory() as folder:
    executor = ir.JobExecutor(folder, cluster="local")
    job = executor.submit(double, 5)

    async def wait():
        asyncio.get_running_loop().slow_callback_duration = 60
        return await job

    assert asyncio.run(wait()) == 10
    assert job.stdout() == job.stderr() == ""
    assert [job.result() for job in executor.map_array(double, [1, 2])] == [2, 4]
    assert isinstance(executor.submit(int, "x").exception(), ValueError)
    job.forget()
print("done")
"""
# Signatures of which the standard library, or only this package, decides; and records, which nobody makes.
NOT_CALLED = {"Ask", "Asks", "Context", "CrewSlice", "Job", "LaunchHandle", "LaunchResult", "Receiver", "Sender"}
NOT_CALLED |= {"ExecutorJob", "WorkerHandle", "Ask.set_answer"}


def functions():
    """The public functions, classes and methods, by their names."""
    for name in ir.__all__:
        thing = getattr(ir, name)
        if not callable(thing) or (isinstance(thing, type) and issubclass(thing, BaseException)):
            continue
        yield name, thing
        for method, value in vars(thing).items() if isinstance(thing, type) else ():
            if inspect.isfunction(value) and not method.startswith("_"):
                yield f"{name}.{method}", value


def test_every_parameter_has_its_line_in_the_docstring():
    without = {}
    for name, function in functions():
        parameters = set(inspect.signature(function).parameters) - {"self", "unnamed", "given", "more"}
        text = inspect.getdoc(function) or ""
        if isinstance(function, type):
            text += inspect.getdoc(function.__init__) or ""
        missing = sorted(each for each in parameters if not re.search(rf"^ +(\w+, )*{each}(, \w+)*: ", text, re.M))
        if missing and name not in NOT_CALLED:
            without[name] = missing
    assert without == {}


def test_pool_and_launcher_have_one_text():
    assert inspect.getdoc(ir.Pool.__init__) == inspect.getdoc(ir.Launcher.__init__)


EDITOR = """
import jedi
import infini_run as ir

project = jedi.Project(".")
names = jedi.Script("import infini_run as ir\\nir.", project=project).complete(2, 3)
assert {name.name for name in names} >= set(ir.__all__)
for call in ("Launcher(", "Pool(", "Crew(", "Executor(", "submit(", "JobExecutor(", "run("):
    text = f"import infini_run as ir\\nir.{call}"
    shown = jedi.Script(text, project=project).get_signatures(2, len(call) + 3)
    assert len(shown[0].params) > 1, call
    assert "Args:" in shown[0].docstring() or call in ("Launcher(", "Pool("), call  # jedi shows no __init__
"""


def test_editors_complete_names_and_show_parameters():
    pytest.importorskip("jedi")
    done = subprocess.run([sys.executable, "-c", EDITOR], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


def test_handles_complete_what_their_users_call(tmp_path):
    with ir.Crew(lambda task: task, nproc=2) as crew, ir.Executor(1) as executor:
        ask = crew.ask(1)
        handles = {
            crew: {"aclose", "ask", "broadcast", "call", "close", "events", "failure", "map", "nproc", "signal"}
            | {"status", "worker"},
            crew[0]: {"ask", "call", "cancel", "rank", "send", "signal", "status"},
            crew[:]: {"ask", "call", "ranks"},
            ask: {
                "add_done_callback",
                "cancel",
                "cancelled",
                "done",
                "exception",
                "has_begun",
                "has_failed",
                "result",
            }
            | {"running", "task"},
            executor: {"map", "max_workers", "shutdown", "submit"},
        }
        for handle, names in handles.items():
            assert {name for name in dir(handle) if not name.startswith("__")} == names
        assert ask.result(LIMIT_S) == 1
    with ir.Launcher(nproc=1).start(int) as handle:
        names = {name for name in dir(handle) if not name.startswith("__")}
        result = handle.result(LIMIT_S)
    assert names == {"close", "done", "exits", "kill", "pids", "restarts", "result", "signal", "stop", "wait"}
    assert {name for name in dir(result) if name[0] != "_"} == {"by_host", "hosts", "index", "rank"}
    job = ir.submit(["true"], scheduler="local", slot_type="cpu", dir=tmp_path)
    job.wait(LIMIT_S)
    (sender, receiver), other = ir.channel.pair()
    for thing in (result, job, ir.JobExecutor(), sender, receiver):
        assert not [name for name in dir(thing) if name[0] == "_" and name[:2] != "__"]
    for end in (sender, receiver, *other):
        end.close()
    found = ir.Launcher(nproc=1).run(lambda: dir(ir.this_worker()))[0]
    assert not [name for name in found if name.startswith("_") and not name.startswith("__")]


@pytest.mark.parametrize("flags", [("-W", "error", "-X", "dev")])
def test_no_warning_in_development_mode(flags):
    program = [sys.executable, *flags, "-c", PROGRAM]
    found = subprocess.run(program, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (found.stdout, found.stderr, found.returncode) == ("done\n", "", 0)
