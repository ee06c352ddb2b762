"""CPython's own tests of concurrent.futures, with Executor in the place of ProcessPoolExecutor.

    python -m tests.support.cpython_executor_suite REPORT.json

They are those of this interpreter's `test` package. Of the start methods only "spawn" runs: Executor has none. The
report has "ok", "skipped: why", or the first line of the error, by the name of the case.
"""

from __future__ import annotations

import concurrent.futures
import json
import multiprocessing
import sys
import threading
import unittest
from importlib import import_module

import infini_run as ir

PACKAGE = "test.test_concurrent_futures"
MODULES = ("process_pool", "shutdown", "wait", "as_completed", "init", "deadlock", "future")
COLUMN = ("ProcessPoolSpawn", "Future")


class _Process:
    """A worker's process as the suite uses it."""

    def __init__(self, process):
        self._process = process

    def terminate(self):
        self._process.signal(15)

    def join(self):
        assert self._process.group.ended


class _Queue:
    def join_thread(self):
        pass


class ProcessPoolExecutor(ir.Executor):
    """An Executor with the attributes of a ProcessPoolExecutor that the suite looks at."""

    def __init__(self, max_workers=None, mp_context=None, initializer=None, initargs=(), **more):
        more = {"console": "inherit", **more}
        super().__init__(max_workers, initializer=initializer, initargs=initargs, **more)
        self._max_workers = self.max_workers
        self._mp_context = multiprocessing.get_context("spawn") if mp_context is None else mp_context
        self._executor_manager_thread = self._crew._supervisor._thread
        self._call_queue = _Queue()

    @property
    def _processes(self):
        done, supervisor = threading.Event(), self._crew._supervisor
        supervisor.call(done.set)  # a worker starts in another thread
        done.wait()
        workers = supervisor.workers
        return {worker.process.pid: _Process(worker.process) for worker in workers if worker.process is not None}

    @property
    def _broken(self):
        return self._crew.failure


def install():
    """Put the class in the place of CPython's."""
    concurrent.futures.ProcessPoolExecutor = ProcessPoolExecutor


class _Outcomes(unittest.TestResult):
    def __init__(self):
        super().__init__()
        self.outcomes = {}

    def _name(self, case):
        kind = type(case).__name__
        for start in (*COLUMN, "FailingInitializerResources"):
            kind = kind.removeprefix(start)
        return f"{kind.removesuffix('Tests').removesuffix('Test')}.{case._testMethodName}"

    def _note(self, case, what):
        if hasattr(case, "_testMethodName"):
            self.outcomes.setdefault(self._name(case), what)
            print(self._name(case), what, flush=True)

    def addSuccess(self, case):
        self._note(case, "ok")

    def addSkip(self, case, reason):
        self._note(case, f"skipped: {reason}")

    def addError(self, case, error):
        self._note(case, f"{error[0].__name__}: {error[1]}".splitlines()[0])

    addFailure = addError

    def addSubTest(self, case, subtest, error):
        if error is not None:
            self.addError(case, error)


def main(report, *chosen):
    install()
    multiprocessing.set_start_method("spawn")
    from test import support
    from test.support import script_helper

    support.use_resources = None
    ok = script_helper.assert_python_ok
    here = f"import sys; sys.path[:0] = {[path for path in sys.path if path]!r}\n"
    before, after = (f"from {name} import ProcessPool" for name in ("concurrent.futures", __name__))

    def assert_python_ok(option, code):
        return ok(option, here + code.replace(before, after))

    suite = unittest.TestSuite()
    for name in MODULES:
        module = import_module(f"{PACKAGE}.test_{name}")
        if hasattr(module, "assert_python_ok"):
            module.assert_python_ok = assert_python_ok
        for kind in vars(module).values():
            if isinstance(kind, type) and kind.__name__.startswith(COLUMN) and issubclass(kind, unittest.TestCase):
                suite.addTests(unittest.defaultTestLoader.loadTestsFromTestCase(kind))
    if chosen:
        suite = unittest.TestSuite(case for case in suite if case._testMethodName in chosen)
    result = _Outcomes()
    suite.run(result)
    with open(report, "w") as file:
        json.dump(result.outcomes, file)


if __name__ == "__main__":
    from tests.support import cpython_executor_suite  # its class pickles, and has one name here and there

    cpython_executor_suite.main(*sys.argv[1:])
