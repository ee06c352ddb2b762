"""What is executed is found once, as a shell would; what cannot be is told with what to type instead."""

from __future__ import annotations

import os
import sys

import pytest

from infini_run.errors import NotExecutable, ProgramMissing
from infini_run.plan.model import Command
from infini_run.plan.program import find_command
from tests.support.command import COMMAND


def make(path, content="#!/bin/sh\n", mode=0o755):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    path.chmod(mode)
    return str(path)


def find(*words, path="/usr/bin:/bin", **flags):
    return find_command(words, {} if path is None else {"PATH": path}, **flags)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ---- found


def test_a_word_with_a_slash_is_a_path(here):
    make(here / "prog")
    assert find("./prog", "x") == Command(file="./prog", argv=("./prog", "x"))


def test_any_other_word_is_looked_for_on_path_and_keeps_its_name(here):
    program = make(here / "bin/prog")
    assert find("prog", "x", path=f"{here}/none:{here}/bin") == Command(file=program, argv=("prog", "x"))


def test_the_search_goes_on_past_what_cannot_be_executed(here):
    make(here / "a/prog", mode=0o644)
    (here / "b/prog").mkdir(parents=True)
    program = make(here / "c/prog")
    make(here / "d/prog")
    path = f"{here}/missing::{here}/a:{here}/b:{here}/c:{here}/d"
    assert find("prog", path=path).file == program


@pytest.mark.parametrize("path", ["", ":", "/nonexistent:", ":/nonexistent", "/nonexistent::/nonexistent"])
def test_an_empty_entry_of_path_is_this_directory(path, here):
    make(here / "prog")
    assert os.path.samefile(find("prog", path=path).file, here / "prog")


def test_without_path_the_systems_own_is_searched():
    assert find("sh", path=None).file in ("/usr/local/bin/sh", "/usr/bin/sh", "/bin/sh")


@pytest.mark.parametrize("name", ["two words", "new\nline", "tab\t", "-dash", "ünïcode", "quote'\"", "$HOME", "*"])
def test_a_name_may_hold_anything(name, here):
    program = make(here / "bin" / name)
    assert find(program).file == program
    assert find(name, path=f"{here}/bin").file == program


def test_a_name_may_be_no_text_at_all(here):
    name = b"\xff\xfe prog"
    with open(os.path.join(os.fsencode(here), name), "wb") as file:
        file.write(b"#!/bin/sh\n")
        os.fchmod(file.fileno(), 0o755)
    assert os.fsencode(find(os.fsdecode(b"./" + name)).file) == b"./" + name


def test_relative_names_begin_in_cwd_where_one_is_given(here):
    program = make(here / "there/prog")
    script = make(here / "there/train.py", "", 0o644)
    assert find("./prog", cwd="there").file == f"{here}/there/./prog"
    assert find("prog", path="", cwd="there").file == f"{here}/there/./prog"
    assert find("train.py", cwd="there").argv[2] == script
    assert find(program, cwd="/").file == program


# ---- Python


def test_a_python_file_without_run_bit_is_run_by_this_python_unbuffered(here):
    make(here / "train.py", "", 0o644)
    expected = Command(file=sys.executable, argv=(sys.executable, "-u", "train.py", "--lr=1"))
    assert find("train.py", "--lr=1") == expected
    assert find("./train.py").argv[2] == "./train.py"


PYTHONS = (
    *("", "\n", "import torch\n", "#!\n", "#!/usr/bin/env python\n", "#!/usr/bin/env python3\r\n"),
    *("#!/no/such/venv/bin/python3.9\n", "#! /usr/bin/env -S python3 -O\n", "#!/usr/bin/env -Spypy3 -O\n"),
    *("#!/usr/bin/env -i LANG=C python\n", "# no line of the kernel's\n", b"\xef\xbb\xbf#!/bin/sh\n"),
)
OTHERS = (
    "#!/bin/sh\n",
    "#!/usr/bin/env bash\n",
    "#!/usr/bin/env -S env -u X=1 sh\n",
    "#!/bin/sh python\n",
    b"\x7fELF...",
)


@pytest.mark.parametrize("content", PYTHONS)
@pytest.mark.parametrize("mode", [0o755, 0o644])
def test_a_python_file_is_run_by_this_python_whatever_its_run_bit(content, mode, here):
    make(here / "train.py", content, mode)
    expected = Command(file=sys.executable, argv=(sys.executable, "-u", "./train.py", "a"))
    assert find("./train.py", "a") == expected
    assert find("train.py", "a").argv[2] == "train.py"


@pytest.mark.parametrize("name", ["app.pyz", "train.pyc", "__pycache__/train.cpython-311.pyc"])
@pytest.mark.parametrize("content", [b"PK\x03\x04", b"\xa7\r\r\n\0\0", b"#!/usr/bin/env python3\nPK\x03\x04"])
@pytest.mark.parametrize("mode", [0o755, 0o644])
def test_archives_and_compiled_files_are_run_by_python(name, content, mode, here):
    (here / "__pycache__").mkdir()
    make(here / name, content, mode)
    assert find(f"./{name}", "a").argv == (sys.executable, "-u", f"./{name}", "a")
    assert find(name).argv == (sys.executable, "-u", name)
    if mode == 0o644:
        with pytest.raises(NotExecutable, match=f"has no run bit; use infini-run ... .*python.* ./{name}, or"):
            find(f"./{name}", no_python=True)


def test_archive_for_other_interpreter_is_executed(here):
    make(here / "app.pyz", "#!/bin/sh\n")
    assert find("./app.pyz").argv == ("./app.pyz",)


@pytest.mark.parametrize("name", ["./app", "app", "app/", "."])
def test_folder_with_main_is_run_by_python(name, here):
    make(here / "app/__main__.py", "", 0o644)
    make(here / "__main__.py", "", 0o644)
    assert find(name, "a").argv == (sys.executable, "-u", name, "a")


def test_program_on_path_comes_before_folder_of_its_name(here):
    make(here / "app/__main__.py", "", 0o644)
    program = make(here / "bin" / "app")
    assert find("app", path=f"{here}/bin").file == program


@pytest.mark.parametrize("content", OTHERS)
def test_a_py_file_whose_first_line_names_another_interpreter_is_executed(content, here):
    make(here / "train.py", content)
    assert find("./train.py", "a") == Command(file="./train.py", argv=("./train.py", "a"))
    make(here / "data.py", content, 0o644)
    with pytest.raises(NotExecutable, match=r"\./data\.py has no run bit"):
        find("./data.py")


@pytest.mark.parametrize("first", ["", "#!/no/such/python\n"])
def test_the_last_words_of_an_abort_are_there_and_the_venv_is_ours(first, infini_run, tmp_path):
    """-u: what a rank printed just before os.abort was in a buffer of its own."""
    script = make(tmp_path / "train.py", f"{first}import os, sys\nprint(sys.executable)\nos.abort()\n")
    command = infini_run("sh", "-c", 'ulimit -c 0; exec "$@"', "sh", *COMMAND, script)
    assert command.wait() == 134
    assert command.out.decode().split() == [sys.executable]


def test_no_python_means_it(here):
    make(here / "train.py", "", 0o644)
    with pytest.raises(NotExecutable, match=f"train.py has no run bit; use infini-run ... {sys.executable} "):
        find("./train.py", no_python=True)


def test_a_module_is_run_by_this_python_and_not_looked_for():
    words = (sys.executable, "-u", "-m", "no.such.module", "-x")
    assert find("no.such.module", "-x", module=True) == Command(file=sys.executable, argv=words)


# ---- not there: 127


@pytest.mark.parametrize("name", ["closed/prog", "closed/train.py"])
def test_program_in_closed_folder_is_not_called_missing(name, here):
    make(here / name)
    (here / "closed").chmod(0)
    user = os.geteuid()
    try:
        if user == 0:  # who may enter any folder
            os.seteuid(65534)
        with pytest.raises(NotExecutable) as caught:
            find(f"./{name}")
    finally:
        os.seteuid(user)
        (here / "closed").chmod(0o700)
    assert str(caught.value) == f"./{name} cannot be executed: no permission for a folder of its path"
    assert caught.value.exit_code == 126


@pytest.mark.parametrize("name", ["./prog", "dir/prog", "/nonexistent/prog"])
def test_a_path_that_is_not_there_is_named_with_where_we_are(name, here):
    with pytest.raises(ProgramMissing) as caught:
        find(name)
    assert str(caught.value) == f"{name} does not exist (in {here})"
    assert (caught.value.exit_code, caught.value.path) == (127, name)


def test_a_word_that_is_not_on_path_is_named_and_one_in_this_directory_pointed_at(here):
    with pytest.raises(ProgramMissing, match=r"^prog is not on PATH$"):
        find("prog")
    make(here / "prog")
    with pytest.raises(ProgramMissing, match=r"prog is not on PATH; use ./prog$"):
        find("prog")
    make(here / "plain", "#!/bin/bash -e\n", 0o644)
    with pytest.raises(ProgramMissing, match=r"plain is not on PATH; use infini-run ... /bin/bash -e ./plain$"):
        find("plain")


def test_an_empty_name_is_refused():
    with pytest.raises(ProgramMissing, match="name is empty"):
        find("")


@pytest.mark.parametrize("target", ["loop", "nowhere"])
def test_a_link_to_nothing_or_to_itself_is_missing(target, here):
    (here / "loop").symlink_to(target)
    with pytest.raises(ProgramMissing, match="loop cannot be reached: "):
        find("./loop")
    with pytest.raises(ProgramMissing, match="loop is not on PATH"):
        find("loop", path=str(here))


def test_a_path_through_a_file_is_missing(here):
    make(here / "file")
    with pytest.raises(ProgramMissing, match="file/prog does not exist"):
        find("./file/prog")


def test_a_working_directory_that_was_deleted_is_no_traceback(here):
    (here / "gone").mkdir()
    os.chdir(here / "gone")
    (here / "gone").rmdir()
    with pytest.raises(ProgramMissing, match="in a working directory that was deleted"):
        find("./prog")
    assert find("sh").file.endswith("/sh")


# ---- there, and cannot be executed: 126


@pytest.mark.parametrize("name", [".", "./dir", "/", "./dir.py"])
def test_a_directory_is_no_program(name, here):
    (here / "dir").mkdir()
    (here / "dir.py").mkdir()
    name = name if "/" in name else name + "/"
    with pytest.raises(NotExecutable, match="is a directory; use a program in it") as caught:
        find(name)
    assert caught.value.exit_code == 126


@pytest.mark.parametrize(
    ("content", "way"),
    [
        ("#!/bin/bash\n", "/bin/bash ./prog, or run chmod +x ./prog"),
        ("#! /usr/bin/env python3\n", "/usr/bin/env python3 ./prog, or run chmod +x ./prog"),
        ("echo hi\n", "sh ./prog"),
        ("", "sh ./prog"),
    ],
)
def test_a_file_without_run_bit_says_what_to_type(content, way, here):
    make(here / "prog", content, 0o644)
    with pytest.raises(NotExecutable) as caught:
        find("./prog")
    assert f"./prog has no run bit; use infini-run ... {way}" in str(caught.value)


def test_what_is_on_path_without_run_bit_says_what_to_type(here):
    program = make(here / "bin/prog", mode=0o644)
    with pytest.raises(NotExecutable, match=f"{program} has no run bit; run chmod \\+x {program}"):
        find("prog", path=f"{here}/bin")


NO_BINFMT = not os.path.exists("/proc/sys/fs/binfmt_misc/status")


@pytest.mark.skipif(not NO_BINFMT, reason="binfmt_misc may run anything")
@pytest.mark.parametrize("content", ["echo hi\n", "", "\n#!/bin/sh\n", "import torch\n"])
def test_a_script_without_an_interpreter_says_what_to_type(content, here):
    make(here / "prog", content)
    make(here / "train.py", content)
    with pytest.raises(NotExecutable, match=r"\./prog has no #! line.*; use infini-run \.\.\. sh \./prog"):
        find("./prog")
    with pytest.raises(NotExecutable, match=rf"no #! line.*; use infini-run \.\.\. {sys.executable} \./train\.py"):
        find("./train.py", no_python=True)


@pytest.mark.parametrize(
    ("first", "said"),
    [
        ("#!/no/such/python\n", "needs the interpreter /no/such/python, which does not exist"),
        ("#!/bin/sh\r\n", r"needs the interpreter /bin/sh\r, which does not exist; the file has DOS line ends"),
        ("#!/usr/bin/env python3\r\n", r"asks env for python3\r: the file has DOS line ends"),
        ("#!\n", "names no interpreter in its #! line; use infini-run ... sh "),
        ("#!   \n", "names no interpreter in its #! line"),
    ],
)
def test_an_interpreter_that_is_not_there_is_named(first, said, here):
    make(here / "prog", first)
    with pytest.raises(NotExecutable) as caught:
        find("./prog")
    assert said in str(caught.value)


@pytest.mark.parametrize("first", ["#!/bin/sh", "#! /bin/sh -e\n", "#!\t/bin/sh\n", "#!/usr/bin/env -S sh -e\n"])
def test_an_interpreter_may_have_spaces_before_it_and_arguments_behind(first, here):
    make(here / "prog", first)
    assert find("./prog").file == "./prog"


def test_a_program_that_may_be_executed_but_not_read_is_left_to_the_kernel(here):
    make(here / "prog", b"\x7fELF...", 0o111)
    assert find("./prog").file == "./prog"
