"""What an error of a function says: the same text as on the rank, source lines of cells, hints; and that no message
ends the caller."""

from __future__ import annotations

import builtins
import functools
import linecache
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import traceback

import pytest

import infini_run as ir
from tests.support.paths import ROOT
from tests.support.waiting import LIMIT_S

WAYS = {"exec": (), "fork": ["fractions"]}


@pytest.fixture(params=WAYS)
def preload(request):
    return WAYS[request.param]


class AddsToItsText(Exception):
    def __init__(self, text):
        super().__init__(f"failed: {text}")


class Rebuilds(Exception):
    """Its text comes from an attribute, which pickle keeps."""

    def __init__(self, text):
        super().__init__(text)
        self.text = text

    def __str__(self):
        return f"rebuilt {self.text}"


def raising(error):
    def function():
        raise error

    return function


# ---- the text of an exception


def test_an_exception_whose_text_changes_when_it_is_made_again_comes_as_a_remote_error_with_its_own(preload):
    def function():
        raise AddsToItsText("503")

    with pytest.raises(ir.RemoteError) as caught:
        ir.Launcher(preload=preload).run(function)
    assert str(caught.value).endswith("AddsToItsText: failed: 503")
    assert caught.value.kind.endswith("AddsToItsText")
    assert "its type or text changes on the way" in caught.value.__notes__[-1]
    assert caught.value.rank == 0


@pytest.mark.parametrize("error", [Rebuilds("x"), KeyError("x"), ValueError(object()), OSError(2, "no", "file")])
def test_an_exception_that_is_made_again_as_it_was_keeps_its_type(error):
    with pytest.raises(type(error)) as caught:
        ir.Launcher().run(raising(error))
    assert type(caught.value) is not ir.RemoteError


ExceptionGroup = getattr(builtins, "ExceptionGroup", None)


@pytest.mark.skipif(ExceptionGroup is None, reason="Python has no exception groups")
@pytest.mark.parametrize(("member", "keeps"), [(AddsToItsText, False), (Rebuilds, True)])
def test_each_exception_of_a_group_says_what_it_said_or_the_group_comes_as_a_remote_error(member, keeps):
    def function():
        raise ExceptionGroup("several", [OSError(2, "no"), ExceptionGroup("inner", [member("503")])])

    with pytest.raises(ExceptionGroup if keeps else ir.RemoteError) as caught:
        ir.Launcher().run(function)
    text = printed(caught.value)
    assert f"{member('503')}\n" in text
    assert "failed: failed" not in text


def printed(error):
    return "".join(traceback.format_exception(type(error), error, error.__traceback__))


@pytest.mark.parametrize("error", ["ValueError('bad luck')", "AddsToItsText('503')"], ids=["itself", "RemoteError"])
@pytest.mark.parametrize(
    "call", ["Launcher(max_restarts=1, restart_delay=0.01).run(fail)", "Crew(fail).ask(0).result()"]
)
def test_what_python_prints_of_an_error_has_the_traceback_of_the_rank(call, error):
    """In a process of its own: Python 3.10 prints no notes, unless a backport of exception groups is there."""
    program = textwrap.dedent(f"""
        import infini_run as ir
        class AddsToItsText(Exception):
            def __init__(self, text):
                super().__init__("failed: " + text)
        def fail(*task):
            raise {error}
        ir.{call}
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LIMIT_S)
    host = os.uname().nodename
    trace = f'on rank 0, {host}:\nTraceback (most recent call last):\n  File "<string>", line 7, in fail\n'
    assert trace in done.stderr
    assert ("after 1 restart of all ranks" in done.stderr) == ("max_restarts" in call)


# ---- what unpickling does in the caller


class Calls:
    """Unpickled, it calls a function."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def interrupt():
    raise KeyboardInterrupt("not the user")


def raised_by_a_pickle(function, *args):
    return lambda: Calls(function, *args)


@pytest.mark.parametrize(("function", "args"), [(sys.exit, (3,)), (interrupt, ())])
def test_what_a_result_raises_when_it_is_unpickled_does_not_end_the_caller(function, args):
    with pytest.raises(ir.RemoteError, match=r"result of rank 0 .* cannot be unpickled here"):
        ir.Launcher().run(raised_by_a_pickle(function, *args))


def test_an_exception_whose_unpickling_exits_only_in_the_caller_does_not_end_it():
    place = os.getpid()

    def exits_in(pid):
        if os.getpid() == pid:
            sys.exit(3)
        return ValueError("the words")

    class Odd(ValueError):
        def __reduce__(self):
            return exits_in, (place,)

    with pytest.raises((ir.RemoteError, ValueError), match="the words"):
        ir.Launcher().run(lambda: (_ for _ in ()).throw(Odd("the words")))


class NoPath:
    def __reduce__(self):
        return int, ("no path",)


def test_an_argument_that_does_not_unpickle_is_told_as_one():
    with pytest.raises(ValueError, match="no path") as caught:
        ir.Launcher(nproc_per_node=1).run(print, NoPath())
    assert "the function and its arguments could not be unpickled on rank 0" in caught.value.__notes__
    with ir.Crew(lambda ctx, task: task, nproc_per_node=1) as crew:
        error = crew.ask(NoPath()).exception()
        assert "the task could not be unpickled on rank 0" in error.__notes__


def test_a_task_whose_unpickling_exits_fails_and_its_worker_lives():
    with ir.Crew(lambda ctx, task: ctx.restarts) as crew:
        with pytest.raises(ir.CannotUnpickle, match="raised SystemExit: 3"):
            crew.ask(Calls(sys.exit, 3)).result()
        assert crew.ask(1).result() == 0


def test_a_real_interrupt_while_a_result_is_unpickled_stops_the_launch():
    """The pickle's code sends SIGINT to the caller, as Ctrl-C does."""
    with pytest.raises(KeyboardInterrupt):
        ir.Launcher().run(raised_by_a_pickle(signal.raise_signal, signal.SIGINT))


def test_an_interrupt_by_a_handler_of_python_is_a_real_one_too():
    def handler(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            ir.Launcher().run(raised_by_a_pickle(signal.raise_signal, signal.SIGINT))
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_exit_by_a_handler_of_a_signal_ends_the_caller():
    before = signal.signal(signal.SIGUSR1, lambda number, frame: sys.exit(5))
    try:
        with pytest.raises(SystemExit):
            ir.Launcher().run(raised_by_a_pickle(signal.raise_signal, signal.SIGUSR1))
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_an_interrupt_raised_by_a_pickle_in_another_thread_is_an_error():
    found = []

    def work():
        try:
            ir.Launcher().run(raised_by_a_pickle(interrupt))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(LIMIT_S)
    assert isinstance(found[0], ir.RemoteError)


# ---- functions whose call runs nothing


async def coroutine(*args):
    return 1


async def async_generator(*args):
    yield 1


def generator(*args):
    yield 1


class WithAsyncCall:
    async def __call__(self, *args):
        return 1


class WithAsyncTask:
    async def task(self, ctx, task):
        return 1


HINTS = {
    coroutine: "asyncio.run",
    async_generator: "asyncio.run",
    generator: "return a list",
    functools.partial(coroutine, 1): "asyncio.run",
    WithAsyncCall(): "asyncio.run",
}


@pytest.mark.parametrize(("function", "hint"), HINTS.items())
def test_a_function_whose_call_runs_nothing_is_refused_with_a_hint(function, hint):
    with pytest.raises(ir.UsageError, match=hint):
        ir.Launcher().run(function)
    with pytest.raises(ir.UsageError, match=hint):
        ir.Crew(function)


@pytest.mark.parametrize(
    ("function", "hint"), [(coroutine, "asyncio.run"), (generator, "send a list"), (async_generator, "send a list")]
)
def test_one_that_is_called_by_another_function_is_told_with_a_hint_too(function, hint):
    with pytest.raises(ir.UnpicklableError, match=rf"result\['of'\] of rank 0 cannot be sent: .*; .*{hint}"):
        ir.Launcher(console="none").run(lambda: {"of": function()})


@pytest.mark.parametrize("target", [WithAsyncTask, WithAsyncTask(), functools.partial(WithAsyncTask)])
def test_a_target_with_an_async_task_is_refused(target):
    with pytest.raises(ir.UsageError, match=r"task.*asyncio\.run"):
        ir.Crew(target)


# ---- source lines


def cell(code, name):
    """Run code as a notebook does: its lines are in linecache, and in no file."""
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    space = {"__name__": "__main__"}
    exec(compile(code, name, "exec"), space)
    return space


def test_frames_of_a_notebooks_cells_have_their_source_lines(preload):
    code = "def inner(x):\n    return 1 / x  # the place\n\ndef outer():\n    return inner(0)\n"
    space = cell(code, "<ipython-input-7-abc>")
    with pytest.raises(ZeroDivisionError) as caught:
        ir.Launcher(preload=preload).run(space["outer"])
    note = caught.value.__notes__[0]
    assert '  File "<ipython-input-7-abc>", line 5, in outer\n    return inner(0)\n' in note
    assert '  File "<ipython-input-7-abc>", line 2, in inner\n    return 1 / x  # the place\n' in note
    assert "return 1 / x" in caught.value.__cause__.trace


KERNEL = """
import re, sys
import nbclient, nbformat
from tests.support.kernel_ports import client_config

book = nbformat.v4.new_notebook()
cells = sys.stdin.read().split("# %%\\n")
book.cells = [nbformat.v4.new_code_cell(cell) for cell in cells]
given = {"timeout": 120, "kernel_name": "python3", "allow_errors": True, "config": client_config()}
nbclient.NotebookClient(book, **given).execute()
for cell in book.cells:
    for output in cell.outputs:
        text = "\\n".join(output.get("traceback", [output.get("text", "")]))
        print(re.sub("\\x1b[^m]*m", "", text))
"""
CELLS = """
import infini_run as ir
class Odd(Exception):
    pass
def inner(x):
    raise Odd(x)  # the place
# %%
ir.Launcher(nproc_per_node=2).run(lambda: inner(3))
# %%
crew = ir.Crew(lambda ctx, x: inner(x))
await crew.ask(4)
# %%
try:
    await ir.Launcher().arun(inner, 5)
except Odd as error:
    print("caught", error, error.rank)
await crew.aclose()
# %%
import ctypes
ir.Launcher().run(lambda: ctypes.string_at(0))
"""


def test_errors_in_a_real_notebook_have_the_lines_of_its_cells(tmp_path):
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    command = [sys.executable, "-W", "ignore", "-c", KERNEL]
    env = os.environ | {"PYTHONPATH": str(ROOT), "JUPYTER_PLATFORM_DIRS": "1"}
    env |= {"HOME": str(tmp_path), "IPYTHONDIR": str(tmp_path)}
    done = subprocess.run(command, input=CELLS, env=env, capture_output=True, text=True, timeout=LIMIT_S * 2)
    assert done.returncode == 0, done.stderr
    by_launch, by_crew, crash = (part for part in re.split(r"^-{70,}$", done.stdout, flags=re.MULTILINE)[1:])
    for text in (by_launch, by_crew):
        assert re.search(r", in inner\n +raise Odd\(x\)  # the place\nOdd: ", text)
    assert re.search(r"in <lambda>\n +ir\.Launcher\(nproc_per_node=2\)", by_launch)
    assert "caught 5 0\n" in by_crew
    assert re.search(r"killed by SIGSEGV .*\n.*string_at\n.*line 2 in <lambda>", crash)


CALLS = """
import infini_run as ir
def inner(x):
    raise ValueError(x)
crew = ir.Crew(inner)
# %%
ir.Launcher(nproc_per_node=2).run(inner, 3)  # ValueError: 3
# %%
crew.ask(4).result()  # ValueError: 4
# %%
list(crew.map([5]))  # ValueError: 5
# %%
await ir.Launcher().arun(inner, 6)  # ValueError: 6
# %%
ir.Launcher(nproc_per_node=0)  # UsageError: nproc_per_node=0
# %%
ir.run(["no such program"])  # ProgramMissing: no such program
# %%
ir.channel.pair()[0][0].send(x for x in ())  # UnpicklableError: message cannot be sent
# %%
ir.Launcher().run(lambda: __import__("os")._exit(3))  # WorkerDied
# %%
crew.close()
"""


def test_notebook_shows_no_frames_of_the_package(tmp_path):
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    command = [sys.executable, "-W", "ignore", "-c", KERNEL]
    env = os.environ | {"PYTHONPATH": str(ROOT), "JUPYTER_PLATFORM_DIRS": "1"}
    env |= {"HOME": str(tmp_path), "IPYTHONDIR": str(tmp_path)}
    done = subprocess.run(command, input=CALLS, env=env, capture_output=True, text=True, timeout=LIMIT_S * 2)
    assert done.returncode == 0, done.stderr
    assert "infini_run/" not in done.stdout
    expected = re.findall("  # (.*)", CALLS)
    shown = re.split(r"^-{70,}$", done.stdout, flags=re.MULTILINE)[1:]
    assert len(shown) == len(expected)
    for text, error in zip(shown, expected, strict=True):
        assert f"{error}\n" in text or f"{error.partition(':')[0]}" in text
        assert re.search(r"^(-+>|\s*\d+ ?-+>).*# " + re.escape(error), text, re.MULTILINE)


# ---- sys.path


@pytest.mark.parametrize("entry", ["", "part/.."])
@pytest.mark.parametrize("module", ["local_part", "local_package", "local_folder.part"])
@pytest.mark.rows(4)
def test_a_module_of_a_relative_entry_of_sys_path_is_found_by_workers_elsewhere(tmp_path, preload, entry, module):
    """In a process of its own, as in a console: sys.path has a relative entry, and the directory changes."""
    for file in ("local_part.py", "local_package/__init__.py", "local_folder/part.py", "part/x", "elsewhere/x"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("def place():\n    return __name__\n")
    program = textwrap.dedent(f"""
        import importlib, os, sys
        sys.path.insert(0, {entry!r})
        import infini_run as ir
        part = importlib.import_module({module!r})
        given = {{"preload": {preload!r}}}
        print(ir.Launcher(cwd="elsewhere", **given).run(part.place)[0])
        os.chdir("elsewhere")
        print(ir.Launcher(**given).run(part.place)[0])
        print(ir.Launcher(**given).run(lambda: part.place())[0])
        with ir.Crew(lambda ctx, task: task(), **given) as crew:
            print(crew.ask(part.place).result())
        with ir.Pool(preload=[{module!r}]) as pool:
            print(pool.run(lambda: {module!r} in sys.modules)[0])
    """)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert (done.stdout.split(), done.stderr) == ([module] * 4 + ["True"], "")
