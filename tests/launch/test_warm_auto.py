"""--preload=auto: the modules of site-packages that a script's first lines import, found without running it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from infini_run.options.from_python import read_flags
from infini_run.warm.script_imports import find_script_imports


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """An interpreter of its own, with four packages in its site-packages."""
    folder = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    [site] = folder.glob("lib/python*/site-packages")
    for name, text in {
        "one": "HERE = 1\n",
        "two": "import os\nPID = os.getpid()\nclass Lazy:\n    pass\n",
        "late": "",
        "bad": "import os\nRANK = os.environ.get('RANK')\n",
        "threads": "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n",
    }.items():
        (site / name).mkdir()
        (site / name / "__init__.py").write_text(text)
    (site / "one" / "part.py").write_text("")
    return folder / "bin" / "python"


@pytest.fixture
def script(tmp_path):
    def write(text, name="train.py"):
        (tmp_path / "job").mkdir(exist_ok=True)
        path = tmp_path / "job" / name
        path.write_text(text)
        return path

    return write


pytestmark = pytest.mark.xdist_group("warm_auto")  # one environment for all

TOP = '"""Trains."""\nfrom __future__ import annotations\nimport os\nimport sys\n'


def preloaded(infini_run, python, script, *words, **kwargs):
    command = infini_run("--preload=auto", *words, python, script, **kwargs)
    assert command.wait() == 0, command.err
    return command


SHOWS = "\nprint(os.environ['RANK'], two.PID != os.getpid(), 'one.part' in sys.modules, flush=True)\n"


def test_auto_imports_what_first_lines_import(infini_run, python, script):
    path = script(f"{TOP}from one import part\nimport two\n{SHOWS}")
    command = preloaded(infini_run, python, path, "--nproc_per_node=2")
    assert sorted(command.out.splitlines()) == [b"0 True True", b"1 True True"]
    assert command.err == b""


def test_auto_imports_what_module_imports(infini_run, python, script, tmp_path):
    script(f"{TOP}import two, one.part\n{SHOWS}", "__main__.py")
    (tmp_path / "job" / "__init__.py").write_text("")
    command = infini_run("--preload=auto", python, "-W", "ignore", "-um", "job", cwd=tmp_path)
    assert (command.wait(), command.out, command.err) == (0, b"0 True True\n", b"")


def test_auto_skips_module_that_reads_rank(infini_run, python, script):
    path = script(f"{TOP}import bad, two\nimport one.part\n{SHOWS}")
    command = preloaded(infini_run, python, path)
    assert command.out == b"0 True True\n"
    assert command.err == b"infini-run: not preloaded: bad: bad reads RANK during its import\n"


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("import threads", b"threads: 1 thread of the imports still runs (Thread-1"),
        ("import one.nosuch", b"one.nosuch: ModuleNotFoundError: No module named 'one.nosuch'"),
    ],
)
def test_auto_skips_module_that_cannot_be_forked(infini_run, python, script, line, text):
    path = script(f"{TOP}import two\n{line}\n")
    command = infini_run("--preload=auto", python, path)
    command.wait()
    assert command.err.startswith(b"infini-run: not preloaded: " + text)
    assert b"start cold" not in command.err


def test_auto_starts_cold_without_anything_to_import(infini_run, python, script):
    command = preloaded(infini_run, python, script("import os\nprint('ran')\n"))
    text = b"no module of site-packages is imported by the first lines of the script"
    assert (command.out, command.err) == (b"ran\n", b"infini-run: ranks start cold: " + text + b"\n")


def test_auto_leaves_error_of_script_to_ranks(infini_run, python, script):
    command = infini_run("--preload=auto", python, script("import two\nx y\n"))
    assert command.wait() == 1
    assert b"SyntaxError" in command.err


def test_auto_stands_alone(infini_run):
    command = infini_run("--preload=auto,torch", sys.executable, "x.py")
    assert command.wait() == 2
    assert b"--preload=auto,torch: expected auto alone, or names of modules" in command.err


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import pytest", ["pytest"]),
        ("import os, json.decoder\nfrom pytest import mark, raises\nimport _pytest.mark",
         ["pytest:mark,raises", "_pytest.mark"]),
        ("import own\nimport pytest", []),
        ("from . import x\nimport pytest", []),
        ("import os\nos.environ['X'] = 'y'\nimport pytest", []),
        ("try:\n    import pytest\nexcept ImportError:\n    pass", []),
        ("import nosuch\nimport pytest", []),
        ("from pytest import *", ["pytest"]),
        ("import pytest as p; p.x()\nimport hypothesis", ["pytest"]),
        ("import shadowed, pytest", []),
        ("\0", []),
        ("(" * 1000, []),
    ],
)  # fmt: skip
def test_first_imports_of_script(script, text, found):
    path = script(text)
    script("", "own.py")
    script("", "shadowed.py")
    assert find_script_imports(str(path), ["python", str(path)], str(path.parent)) == (str(path), found)


def test_modules_below_folder_of_script_are_its_own(script):
    path = script("import pytest")
    assert find_script_imports(str(path), [], os.path.dirname(pytest.__file__))[1] == []


def test_python_api_takes_names_and_auto():
    flags = {"hosts": ["a", "b"], "preload": ["torch", "numpy"]}
    assert read_flags(flags, ("x.py",), {}).options.preload == ("torch", "numpy")
    assert read_flags({"preload": "auto"}, ("x.py",), {}).options.preload == ("auto",)
