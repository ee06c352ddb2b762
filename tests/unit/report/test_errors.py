"""The trees of errors are those that are drawn at the top of their files."""

from __future__ import annotations

import ast
import re
from concurrent.futures import BrokenExecutor
from pathlib import Path
from pickle import PicklingError

import pytest

import infini_run
from infini_run import errors
from infini_run.channel import errors as channel_errors
from infini_run.crews import errors as crews_errors
from infini_run.errors import InfiniRunError, NotExecutable, ProgramMissing, StartError
from infini_run.jobs import errors as jobs_errors
from infini_run.report import failures
from infini_run.report.exit import Exit
from infini_run.report.failures import WorkerError
from infini_run.report.report import Report

CLASSES = {
    name: kind
    for module in (errors, failures, channel_errors, crews_errors, jobs_errors)
    for name, kind in vars(module).items()
    if isinstance(kind, type) and issubclass(kind, InfiniRunError)
}
LINE = re.compile(r"^([ │├└─]*)([A-Z]\w+) +(\d+)?")


def drawn():
    """name: (parent's name, exit code or None) of each line of the drawings."""
    found, above = {}, []
    for line in [*errors.__doc__.splitlines(), *channel_errors.__doc__.splitlines()]:
        match = LINE.match(line)
        if match and match[2] in CLASSES:
            depth = len(match[1]) // 4
            del above[depth:]
            if match[2] in found:  # the root of the channels' own drawing
                above.append(match[2])
                continue
            found[match[2]] = (above[-1] if above else None, match[3])
            above.append(match[2])
    return found


def test_the_tree_that_is_drawn_is_the_tree_that_is():
    tree = drawn()
    assert tree.keys() == CLASSES.keys()
    for name, (parent, _) in tree.items():
        first, *others = CLASSES[name].__bases__
        assert first == (CLASSES[parent] if parent else Exception)
        assert set(others) <= {
            TypeError,
            ValueError,
            RuntimeError,
            TimeoutError,
            PicklingError,
            BrokenExecutor,
        }  # what Python itself says there


def test_the_exit_codes_that_are_drawn_are_those_of_the_classes():
    for name, (_, code) in drawn().items():
        if code is not None:
            assert CLASSES[name].exit_code == int(code), name


def test_every_error_is_public():
    assert set(CLASSES) <= set(infini_run.__all__)


def test_an_error_carries_its_data():
    missing = ProgramMissing("x is not on PATH", "x")
    assert (str(missing), missing.path, missing.exit_code) == ("x is not on PATH", "x", 127)
    assert NotExecutable("no", "y").exit_code == 126
    start = StartError("rank 2 cannot be started", "creating the process", 11, 2)
    assert (start.step, start.errno, start.rank, start.exit_code) == ("creating the process", 11, 2, 1)


def test_a_worker_error_tells_the_whole_story():
    first = Exit(rank=3, local_rank=1, host="h", pid=9, code=5, start_s=0.0, end_s=1.0)
    report = Report(
        launch_id="ir-1",
        run_id="",
        host="h",
        world_size=4,
        start_s=0.0,
        end_s=1.0,
        exits=(first,),
        first_failure=first,
    )
    error = WorkerError(report)
    assert (error.report, error.rank, error.exit_code, str(error)) == (report, 3, 5, report.text())


def test_nothing_in_the_package_raises_a_foreign_error_for_what_a_user_did():
    """Raised by name: our own, what a flag's kind says no with, and what records and modules owe to Python."""
    allowed = {*CLASSES, "ValueError", "TypeError", "AttributeError", "OSError", "TimeoutError"}
    allowed |= {"AskTimeout"}  # TimeoutError, and on Python 3.10 also that of concurrent.futures
    allowed |= {"IndexError", "KeyError"}  # LaunchResult is looked into as Python's own sequences and mappings are
    allowed |= {"TurnedAway", "Silent"}  # LinkErrors of head_link.py: a launcher started by hand asks again
    allowed |= {"RuntimeError"}  # for a StopIteration that a task raises, as PEP 479 has it: task_map.py
    allowed |= {
        "InForkedChild",
        "ForkRefused",
        "CannotFork",
        "UnsafeFork",
    }  # ranks or workers start cold: no user sees them
    allowed |= {"Busy", "NotThere"}  # serve's own, each of them a problem+json
    allowed |= {"ImportError"}  # a clone without its core cannot be imported: source_checkout.py
    allowed |= {"NoGpus"}  # a vendor's module to devices.py, which asks the next vendor
    for path in Path(infini_run.__path__[0]).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name):
                name = node.exc.func.id
                # a function's name: it makes one of ours, and mypy knows which
                assert name in allowed or name.startswith("_") or name.islower(), (
                    f"{path.name}:{node.lineno} raises {name}"
                )


def test_no_handler_catches_everything_and_goes_on():
    for path in Path(infini_run.__path__[0]).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler):
                name = ast.unparse(node.type) if node.type else ""
                assert name not in ("", "Exception"), f"{path.name}:{node.lineno}"
                if name == "BaseException" and path.name not in (
                    "capture.py",
                    "exit_hooks.py",
                    "sitecustomize.py",
                ):  # whose callers get it
                    assert isinstance(node.body[-1], ast.Raise), f"{path.name}:{node.lineno} swallows everything"


@pytest.mark.parametrize("kind", CLASSES.values(), ids=CLASSES)
def test_one_handler_catches_them_all(kind):
    assert issubclass(kind, InfiniRunError)
