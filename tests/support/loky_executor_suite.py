"""A plugin of pytest for loky's tests of its executor, with Executor in the place of loky's.

    cd loky-3.7.0 && python -m pytest -p loky_executor_suite tests/test_process_executor_loky.py

PYTHONPATH names this folder: the sdist has a package `tests`, too. What is loky's alone is no part of Executor, and
this module has it: `context`, `kill_workers`, and the attributes that the suite looks at.
"""

from __future__ import annotations

import pickle
import sys
import threading
from concurrent.futures.process import _RemoteTraceback
from multiprocessing.context import get_spawning_popen, set_spawning_popen

import pytest

import infini_run as ir

sys.modules["psutil"] = None  # by which the suite counts the children of this process: each worker has a guard, too

process_executor = pytest.importorskip("loky.process_executor")


_LONGEST_S = 30


def _call_pickled(call):
    """Call an initializer whose arguments were pickled for a process that starts, as loky pickles them."""
    initializer, initargs = pickle.loads(call)
    initializer(*initargs)


def _pickled(call):
    before = get_spawning_popen()
    set_spawning_popen(True)
    try:
        return pickle.dumps(call)
    finally:
        set_spawning_popen(before)


class _Process:
    def __init__(self, process):
        self._process = process
        self.pid = process.pid

    def terminate(self):
        self._process.signal(15)

    def join(self):
        assert self._process.group.ended


class _Flags:
    def __init__(self, executor):
        self._supervisor = executor._crew._supervisor
        self._phase = self._supervisor.phase

    @property
    def broken(self):
        return self._supervisor.failure

    @property
    def shutdown(self):
        return self._supervisor.phase != "RUNNING"


class _Queue:
    def join_thread(self):
        pass


class ProcessPoolExecutor(ir.Executor):
    """An Executor with the arguments and attributes of loky's that the suite uses."""

    def __init__(self, max_workers=None, initializer=None, initargs=(), context=None, **more):
        if initializer is not None:
            initializer, initargs = _call_pickled, (_pickled((initializer, initargs)),)
        more = {"console": "inherit", **more}
        super().__init__(max_workers, initializer=initializer, initargs=initargs, **more)
        self._executor_manager_thread = self._crew._supervisor._thread
        self._flags = _Flags(self)
        self._call_queue = _Queue()
        self._has_started = False

    def submit(self, fn, /, *args, **kwargs):
        if not self._has_started:  # loky starts all workers with the first call, and the suite counts them
            self._has_started = True
            supervisor = self._crew._supervisor
            for _ in range(self.max_workers):
                supervisor.call(supervisor.expect_task)
        return super().submit(fn, *args, **kwargs)

    @property
    def _running_work_items(self):
        return [task for worker in self._crew._supervisor.workers for task in worker.assigned]

    @property
    def _pending_work_items(self):
        return self._crew._supervisor.waiting

    @property
    def _processes(self):
        done, supervisor = threading.Event(), self._crew._supervisor
        supervisor.call(done.set)  # a worker starts in another thread
        done.wait()
        workers = supervisor.workers
        return {worker.process.pid: _Process(worker.process) for worker in workers if worker.process is not None}

    def shutdown(self, wait=True, kill_workers=False, **more):
        super().shutdown(False, **more)
        supervisor = self._crew._supervisor
        if kill_workers or (wait and not supervisor.join(_LONGEST_S)):  # of a case that failed before it let it go on
            self._crew.close(drain=False)


def install():
    """Put the classes in the place of loky's."""
    process_executor.ProcessPoolExecutor = ProcessPoolExecutor
    process_executor.BrokenProcessPool = process_executor.TerminatedWorkerError = ir.ExecutorFailed
    process_executor.ShutdownExecutorError = RuntimeError
    process_executor._RemoteTraceback = _RemoteTraceback


def pytest_collection_modifyitems(items):
    cases = sys.modules["tests._test_process_executor"]
    check = cases.check_subprocess_call

    def check_subprocess_call(argv, **more):
        return check([*argv[:-1], f"import {__name__}; {__name__}.install()\n{argv[-1]}"], **more)

    cases.check_subprocess_call = check_subprocess_call


install()
