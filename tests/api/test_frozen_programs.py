"""Programs whose sys.executable is no Python: a frozen one, one that embeds Python, a wrapper. None of them may start
itself for one of its own workers, which would do the same, without end.

Every program here counts its starts in a file, and ends at the fifth.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path

import pytest

import infini_run as ir
from infini_run.system import python_probe
from infini_run.system.interpreter import find_python, own_folders, own_python
from infini_run.version import VERSION
from tests.support.build_c import compiler
from tests.support.paths import ROOT, C
from tests.support.processes import OURS
from tests.support.waiting import until

pytestmark = pytest.mark.xdist_group("frozen")  # one host program for all

MOST = 5
VERSION_OF_PYTHON = "{}.{}".format(*sys.version_info)
ADVICE = f"; use multiprocessing.set_executable(PATH) with a Python {VERSION_OF_PYTHON} that has infini-run {VERSION}"
LAUNCHES = {
    "function": "ir.Launcher(agent_timeout_s=30).run(worked)",
    "preload": "ir.Launcher(nproc=2, preload=['json'], agent_timeout_s=30).run(worked)",
    "hosts": "ir.Launcher(hosts=['localhost'], agent_timeout_s=30).run(worked)",
    "pool": "ir.Pool(nproc=2, preload=['json']).__enter__()",
    "crew": "ir.Crew(lambda ctx, task: task).__enter__()",
    "script": "ir.run([TRAIN])",
    "module": "ir.run(['train'], module=True)",
    "nodes": "ir.run(['true'], hosts=['localhost', '127.0.0.1'])",
    "job": "ir.submit(['true'], scheduler='local', slots=1, dir=FOLDER)",
}


@pytest.fixture
def program(tmp_path):
    """Write a program that does something with infini-run; its path. `starts` has a line for each of its starts."""

    def write(what, before="", after=""):
        (tmp_path / "train.py").write_text("print('trained')\n")
        path = tmp_path / "program.py"
        path.write_text(
            textwrap.dedent(f"""\
                #!{sys.executable}
                import os, sys
                with open({str(tmp_path / "starts")!r}, "a+") as starts:
                    starts.write("start\\n")
                    starts.seek(0)
                    if len(starts.readlines()) >= {MOST}:
                        os._exit(97)
                FOLDER, TRAIN = {str(tmp_path)!r}, {str(tmp_path / "train.py")!r}
                sys.path += {[*own_folders(), *sys.path]}
                """)
            + textwrap.dedent(before)
            + textwrap.dedent(f"""\
                import infini_run as ir
                def worked():
                    import sys
                    return sys.executable
                try:
                    print({what})
                except ir.InfiniRunError as error:
                    print(type(error).__name__, error)
                """)
            + textwrap.dedent(after)
        )
        path.chmod(0o755)
        return path

    return write


@pytest.fixture
def run(tmp_path):
    """Run a program to its end; what it printed, and how many times it was started."""

    def start(*words, **env):
        environ = {**os.environ, OURS[0]: OURS[1], "PYTHONDONTWRITEBYTECODE": "1", **env}
        done = subprocess.run(
            list(map(str, words)), env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=120
        )
        return done.stdout.strip(), len((tmp_path / "starts").read_text().splitlines()), done.stderr

    return start


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """The path of a program that embeds the Python of these tests."""
    made = tmp_path_factory.mktemp("host") / "host"
    library, version = sysconfig.get_config_var("LIBDIR"), sysconfig.get_config_var("LDVERSION")
    words = [compiler(), f"-I{sysconfig.get_path('include')}", str(C / "embedding_host.c"), "-o", str(made)]
    words += [f"-L{library}", f"-Wl,-rpath,{library}", f"-lpython{version}", "-ldl", "-lm", "-lutil", "-lpthread"]
    done = subprocess.run([*words, "-Wl,--export-dynamic"], capture_output=True, text=True, check=False)
    return made if done.returncode == 0 else pytest.skip("there is no libpython of this Python to link with")


@pytest.fixture
def executable(monkeypatch):
    """Let sys.executable be something else, and forget what was asked before."""
    monkeypatch.setattr(python_probe, "_answers", {})

    def set_to(path):
        monkeypatch.setattr(sys, "executable", path if path is None else str(path))

    return set_to


def script(path, text):
    path.write_text(text)
    path.chmod(0o755)
    return path


# ---- a program that runs itself


@pytest.mark.parametrize("launch", LAUNCHES)
def test_frozen_program_does_not_start_itself(launch, program, run, host):
    path = program(LAUNCHES[launch], before="sys.frozen = True\n")
    out, starts, _ = run(host, EMBEDDED=str(path), EMBEDDED_AS="words")
    assert out == (
        f"UsageError sys.executable={str(host)!r}: not a Python but this frozen program, and would start it again"
        + ADVICE
    )
    assert starts == 1


@pytest.mark.parametrize("how", ["self", "words"])
@pytest.mark.parametrize("launch", ["function", "script"])
def test_embedding_program_does_not_start_itself(launch, how, program, run, host):
    out, starts, _ = run(host, EMBEDDED=str(program(LAUNCHES[launch])), EMBEDDED_AS=how)
    assert "not a Python but this program, which embeds Python, and would start it again; use" in out
    assert starts == 1


@pytest.mark.parametrize("launch", ["function", "preload", "script"])
def test_unknown_program_is_started_once_and_refused(launch, program, run):
    """Nothing but its answer tells what it is; its launch ends that start."""
    path = program(LAUNCHES[launch], before="sys.executable = __file__\n")
    out, starts, _ = run(path)
    assert out.startswith(
        f"UsageError sys.executable={str(path)!r}: not a Python: no answer to -c: UsageError a launch"
    )
    assert starts == 2


def test_remote_python_running_program_launches_nothing(program, run):
    """--remote_python=PROGRAM: only on the other host is it known what it is."""
    words = own_python("infini_run.multinode.agent_main.run", str(program(LAUNCHES["function"])))
    out, starts, _ = run(*words)
    assert "UsageError a launch in a process that infini-run started as a Python: " in out
    assert starts == 1


def test_launch_in_sitecustomize_ends_in_first_worker(program, run, tmp_path):
    (tmp_path / "site").mkdir()
    program(LAUNCHES["function"]).rename(tmp_path / "site" / "sitecustomize.py")
    _, starts, err = run(sys.executable, "-c", "pass", PYTHONPATH=str(tmp_path / "site"))
    assert starts == 2, err


def test_worker_may_launch(program, run):
    """It was started as a Python, and is one."""
    nested = """
        def nested():
            import infini_run
            return infini_run.Launcher().run(len, "nested")[0]
    """
    out, starts, err = run(program("ir.Launcher().run(nested)", before=nested))
    assert (out, starts) == ("LaunchResult([6])", 1), err


# ---- what such a program can do


@pytest.mark.parametrize("launch", ["function", "preload", "script"])
@pytest.mark.parametrize("name_it", ["multiprocessing", "sys"])
def test_frozen_program_runs_with_named_python(launch, name_it, program, run, host):
    """The Python has infini-run, and its modules are not the program's: their path would lead into the program."""
    named = f"sys.executable = {sys.executable!r}\n"
    if name_it == "multiprocessing":
        named = f"import multiprocessing\nmultiprocessing.set_executable({sys.executable!r})\n"
    path = program(LAUNCHES[launch], before=f"sys.frozen = True\n{named}")
    out, starts, err = run(host, EMBEDDED=str(path), EMBEDDED_AS="words")
    expected = {"function": [sys.executable], "preload": [sys.executable] * 2}
    assert ("trained" if launch == "script" else f"LaunchResult({expected[launch]})") in out, err
    assert starts == 1


def test_named_python_must_have_infini_run(program, run, host, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    python = tmp_path / "bare" / "bin" / "python"
    named = f"sys.frozen = True\nimport multiprocessing\nmultiprocessing.set_executable({str(python)!r})\n"
    out, _, _ = run(host, EMBEDDED=str(program(LAUNCHES["function"], before=named)), EMBEDDED_AS="words")
    assert out == f"UsageError multiprocessing.set_executable({str(python)!r}): infini-run missing there" + ADVICE


def test_embedding_program_uses_python_on_path(program, run, host, tmp_path):
    """Py_Initialize() takes it for its own, and so do shims of it."""
    (tmp_path / "bin").mkdir()
    shim = script(tmp_path / "bin" / "python3", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    out, starts, err = run(host, EMBEDDED=str(program(LAUNCHES["function"])), EMBEDDED_AS="path", PATH=path)
    assert (out, starts) == (f"LaunchResult([{sys.executable!r}])", 1), err
    assert shim.exists()


@pytest.mark.parametrize("launch", ["function", "preload", "pool"])
def test_modules_in_several_folders_are_found_by_workers(launch, program, run, tmp_path):
    """As in an archive that unpacks each distribution into a folder of its own (pex)."""
    import _cffi_backend
    import cloudpickle

    for module in (ir, _cffi_backend, cloudpickle):
        file = Path(module.__file__)
        source = file.parent if file.name == "__init__.py" else file
        (tmp_path / module.__name__).mkdir()
        (tmp_path / module.__name__ / source.name).symlink_to(source)
    folders = [str(tmp_path / name) for name in ("infini_run", "_cffi_backend", "cloudpickle")]
    path = program(LAUNCHES[launch])
    lines = path.read_text().splitlines()
    lines = [f"sys.path += {folders}" if line.startswith("sys.path") else line for line in lines]
    path.write_text("\n".join(lines))
    out, _, err = run(sys.executable, "-I", "-S", path)
    assert out.startswith("<Pool" if launch == "pool" else f"LaunchResult([{sys.executable!r}"), out + err


# ---- what sys.executable may be


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("empty", "not a Python"),
        ("none", "not a Python"),
        ("missing", "not a Python: No such file or directory"),
        ("folder", "not a Python: cannot be executed"),
        ("text", "not a Python: cannot be executed"),
        ("garbage", "not a Python: Exec format error"),
        ("silent", "not a Python: no answer to -c"),
        ("speaks", "not a Python: no answer to -c: usage: program FILE"),
        ("echoes", "not a Python: no answer to -c: -I -c import sys"),
    ],
)
@pytest.mark.parametrize("launch", ["function", "script"])
def test_executable_is_refused_unless_python(launch, kind, problem, executable, tmp_path):
    path = tmp_path / "program"
    match kind:
        case "folder":
            path.mkdir()
        case "text":
            path.write_text("text")
        case "garbage":
            script(path, "\x7fELF and nothing else")
        case "silent":
            script(path, "#!/bin/sh\n")
        case "speaks":
            script(path, "#!/bin/sh\necho usage: program FILE >&2\nexit 2\n")
        case "echoes":
            script(path, '#!/bin/sh\necho "$@"\n')
    executable({"empty": "", "none": None}.get(kind, path))
    (tmp_path / "train.py").write_text("")
    with pytest.raises(ir.UsageError) as caught:
        ir.Launcher().run(len, "") if launch == "function" else ir.run([str(tmp_path / "train.py")])
    shown = "''" if kind in ("empty", "none") else repr(str(path))
    assert str(caught.value).startswith(f"sys.executable={shown}: {problem}")
    assert str(caught.value).endswith(ADVICE)


def test_python_of_another_version_is_refused(executable, tmp_path):
    other = "import sys; sys.implementation.cache_tag = 'cpython-27'; exec(sys.argv[3])"
    executable(script(tmp_path / "python", f'#!/bin/sh\nexec {sys.executable} -c "{other}" "$@"\n'))
    with pytest.raises(ir.UsageError, match="not a Python of this version: cpython-27, expected cpython-"):
        find_python()


def test_wrapper_of_python_is_asked_once(executable, tmp_path):
    wrapper = script(
        tmp_path / "wrapper", f'#!/bin/sh\necho >> {tmp_path}/asked\necho Welcome\nexec {sys.executable} "$@"\n'
    )
    executable(wrapper)
    assert [find_python() for _ in range(3)] == [str(wrapper)] * 3
    assert (tmp_path / "asked").read_text() == "\n"
    script(tmp_path / "other", "#!/bin/sh\nexit 1\n").replace(wrapper)
    with pytest.raises(ir.UsageError, match="no answer to -c"):
        find_python()


def test_silent_program_is_killed_after_limit(executable, monkeypatch, tmp_path):
    monkeypatch.setattr(python_probe, "LIMIT_S", 0.5)
    executable(script(tmp_path / "python", f"#!/bin/sh\necho $$ > {tmp_path}/pid\nsleep 600 & wait\n"))
    with pytest.raises(ir.UsageError, match=r"not a Python: no answer within 0.5 s"):
        find_python()
    pid = int((tmp_path / "pid").read_text())
    until(lambda: not [entry for entry in os.listdir("/proc") if entry.isdigit() and _session(entry) == pid])


def _session(pid):
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[3])
    except (OSError, IndexError):
        return 0


def test_ordinary_interpreter_is_not_asked(executable):
    """Nor is a name of it that is a link, as in a virtual environment."""
    assert find_python() == sys.executable
    executable(os.path.realpath(sys.executable))
    assert find_python() == sys.executable
    assert python_probe._answers == {}


def test_replaced_interpreter_is_asked(tmp_path):
    """A package manager may replace the file under a program that runs."""
    copy = tmp_path / Path(os.path.realpath(sys.executable)).name
    shutil.copy(os.path.realpath(sys.executable), copy)
    code = f"""if True:
        import os, sys
        os.rename({str(copy)!r}, {str(copy) + ".old"!r})
        os.symlink({sys.executable!r}, {str(copy)!r})
        sys.path += {[str(ROOT), *own_folders()]}
        from infini_run.system.interpreter import find_python
        print(find_python(), "infini_run.system.python_probe" in sys.modules)
    """
    environ = {**os.environ, "PYTHONHOME": sys.base_prefix}
    done = subprocess.run([copy, "-c", code], env=environ, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == f"{copy} True", done.stderr
