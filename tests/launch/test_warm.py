"""--preload: a rank that is forked from a process with the imports is as one that was started (decision 66)."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import CHILDREN, COMMAND

RESPECTS = CHILDREN / "respects.py"
PYENV = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
OTHERS = {f"3.{minor}": sorted(PYENV.glob(f"versions/3.{minor}.*/bin/python3")) for minor in range(8, 15)}
PYTHONS = [sys.executable, *(str(found[0]) for found in OTHERS.values() if found)]
IDS = ["own", *(name for name, found in OTHERS.items() if found)]
CHANGING = ("modules", "random")  # more modules are there; numbers are drawn


@pytest.fixture
def compare(infini_run, tmp_path):
    """Run words cold and warm, and return what the ranks of both have written down, by rank."""

    def run(*words, preload="decimal", flags=(), nproc=2, **kwargs):
        found = []
        for more in ([], [f"--preload={preload}"]):
            folder = tmp_path / f"found{len(found)}"
            folder.mkdir()
            environ = {**kwargs.get("env", os.environ), "RESPECTS": str(folder)}
            command = infini_run(f"--nproc_per_node={nproc}", *flags, *more, *words, **{**kwargs, "env": environ})
            assert command.wait() == 0, command.err
            assert b"cold" not in command.err
            ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(nproc)]
            found.append(ranks)
            for rank in ranks:
                rank["environment"]["python"].pop("RESPECTS")
                rank["environment"]["c"].pop("RESPECTS")
                rank["environment"]["kernel"].pop("RESPECTS")
        return found

    return run


def differences(cold, warm):
    return {
        f"{rank}: {name}": (one[name], other[name])
        for rank, (one, other) in enumerate(zip(cold, warm, strict=True))
        for name in one
        if name not in CHANGING and one[name] != other[name]
    }


def assert_same(cold, warm):
    assert differences(cold, warm) == {}
    for one, other in zip(cold, warm, strict=True):
        assert set(one["modules"]) <= set(other["modules"])
        assert "decimal" in other["modules"]
    drawn = [rank["random"] for rank in warm]
    assert len(set(drawn)) == len(drawn), "ranks drew the same numbers"


@pytest.mark.parametrize("python", PYTHONS, ids=IDS)
def test_warm_rank_is_as_cold_one(compare, python):
    assert_same(*compare(python, "-u", RESPECTS, "--lr", "1e-4", preload="decimal,random"))


@pytest.mark.parametrize(
    "words",
    [
        [RESPECTS, "x"],
        ["-m", "respects", "x"],
        [sys.executable, "-O", "-X", "utf8", "-W", "ignore::DeprecationWarning", RESPECTS],
        [sys.executable, "-bB", RESPECTS],
        [sys.executable, "-c", f"__file__ = 'x'; exec(open({str(RESPECTS)!r}).read())"],
    ],
    ids=["script", "module", "flags", "buffered", "code"],
)  # fmt: skip
def test_warm_command_is_as_cold_one(compare, words):
    environ = {**os.environ, "PYTHONPATH": str(CHILDREN)}
    flags = ["-m"] if words[0] == "-m" else []
    assert_same(*compare(*words[len(flags) :], flags=flags, env=environ))


@pytest.mark.parametrize("path", [None, "", "relative", "/nowhere:relative:"])
def test_warm_rank_has_pythonpath_of_launch(compare, path):
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    assert_same(*compare(RESPECTS, env=environ if path is None else {**environ, "PYTHONPATH": path}))


def test_warm_rank_behind_wrapper_is_as_cold_one(compare, tmp_path):
    wrapper = tmp_path / "python3"
    text = "#!/bin/sh\nexport WRAPPED=yes PATH=/wrapped:$PATH PYTHONPATH=$PYTHONPATH:/wrapped\n"
    wrapper.write_text(f'{text}exec {sys.executable} -B "$@"\n')
    wrapper.chmod(0o755)
    cold, warm = compare(wrapper, RESPECTS, env={**os.environ, "PYTHONPATH": "/given"})
    assert_same(cold, warm)
    assert warm[0]["environment"]["kernel"]["WRAPPED"] == "yes"


def test_warm_script_with_interpreter_line_is_as_cold_one(compare, tmp_path):
    script = tmp_path / "train"
    script.write_text(f"#!{sys.executable} -B\n{RESPECTS.read_text()}")
    script.chmod(0o755)
    assert_same(*compare("--no_python", script, "x"))


def test_warm_rank_runs_customizations_of_site(compare, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nsys.site_said = 'site'\nos.environ['BY_SITE'] = 'x'\n"
    )
    (tmp_path / "usercustomize.py").write_text("import os, sys\nsys.user_said = 'user' + os.environ['RANK']\n")
    python = PYTHONS[1]  # of a virtual environment usercustomize is not imported
    cold, warm = compare(python, RESPECTS, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert_same(cold, warm)
    assert [rank["customized"] for rank in warm] == [["site", "user0"], ["site", "user1"]]


def test_error_in_sitecustomize_is_shown_by_warm_ranks(infini_run, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("raise ValueError('of the site')\n")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    texts = []
    for more in ([], ["--preload=decimal"]):
        command = infini_run(*more, sys.executable, "-c", "print('ran')", env=environ)
        assert command.wait() == 0
        texts.append((command.out, command.err))
    assert texts[0] == texts[1]
    assert b"of the site" in texts[0][1]


def test_warm_rank_has_callers_descriptors_limits_and_mask(compare, tmp_path):
    given = tmp_path / "given"
    given.write_text("")
    fd = os.open(given, os.O_RDONLY)
    os.set_inheritable(fd, True)

    def prepare():
        import resource
        import signal

        os.umask(0o137)
        os.nice(1)
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 300))
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        signal.signal(signal.SIGQUIT, signal.SIG_IGN)

    try:
        cold, warm = compare(RESPECTS, pass_fds=[fd], preexec_fn=prepare)
    finally:
        os.close(fd)
    assert_same(cold, warm)
    assert fd in warm[0]["descriptors"]


@pytest.mark.parametrize("console", ["inherit", "prefix", "none", "lines"])
def test_warm_rank_writes_as_cold_one(compare, console):
    assert_same(*compare(RESPECTS, flags=[f"--console={console}"]))


def test_warm_rank_has_distributed_args(compare):
    cold, warm = compare(RESPECTS, "x", flags=["--distributed_args"])
    assert_same(cold, warm)
    assert warm[1]["argv"][1:] == ["x", "--distributed-rank=1", "--distributed-world-size=2"]


@pytest.mark.parametrize("reader", ["all", "rank0", "none", "1"])
def test_warm_ranks_read_stdin_as_cold_ones(compare, tmp_path, reader):
    text = tmp_path / "input"
    text.write_text("a line\n")
    with open(text) as file:
        cold, warm = compare(
            RESPECTS, "read", flags=[f"--stdin={reader}"], stdin=file, preexec_fn=lambda: os.lseek(0, 0, os.SEEK_SET)
        )
    assert_same(cold, warm)
    expected = {"all": (0, 1), "rank0": (0,), "none": (), "1": (1,)}[reader]
    assert [rank["stdin"] for rank in warm] == ["a line\n" if rank in expected else "" for rank in range(2)]


ENDS = {
    "exit": "sys.exit(7)",
    "text": "sys.exit('a reason')",
    "now": "os._exit(9)",
    "abort": "os.abort()",
    "segv": "os.kill(os.getpid(), 11)",
    "int": "os.kill(os.getpid(), 2)",
    "term": "os.kill(os.getpid(), 15)",
    "raise": "1 / 0",
    "chain": "\ntry:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise ValueError('x') from error",
    "recursion": "\ndef f(): f()\nf()",
    "thread": "threading.Thread(target=lambda: 1 / 0).start()",
    "syntax": "compile('x y', 'file', 'exec')",
    "exits": "atexit.register(print, 'at the end'); print('now')",
}


@pytest.mark.parametrize("name", ENDS)
def test_warm_rank_ends_as_cold_one(infini_run, tmp_path, name):
    script = tmp_path / "ends.py"
    script.write_text(f"import atexit, os, sys, threading\n{ENDS[name]}\n")
    found = []
    for more in ([], ["--preload=decimal"]):
        command = infini_run("--console=inherit", *more, script)
        code = command.wait()
        ours = b"infini-run: "
        lines = [line for line in command.err.splitlines() if not line.startswith(ours)]
        found.append((code, command.out, lines))
    assert found[0] == found[1]


def test_warm_script_with_syntax_error_fails_as_cold_one(infini_run, tmp_path):
    (tmp_path / "bad.py").write_text("x y\n")
    texts = []
    for more in ([], ["--preload=decimal"]):
        command = infini_run("--console=inherit", *more, "bad.py", cwd=tmp_path)
        assert command.wait() == 1
        texts.append(command.err.split(b"infini-run:")[0])
    assert texts[0] == texts[1]
    assert b"SyntaxError" in texts[0]


# ---- multiprocessing


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_warm_rank_uses_multiprocessing(infini_run, tmp_path, method):
    script = tmp_path / "pool.py"
    script.write_text(
        "import multiprocessing, os\n\n\ndef double(x):\n    return x * 2, os.environ['RANK']\n\n\n"
        "if __name__ == '__main__':\n"
        f"    with multiprocessing.get_context('{method}').Pool(2) as pool:\n"
        "        print(pool.map(double, [1, 2]))\n"
    )
    command = infini_run("--preload=multiprocessing.pool", "--nproc_per_node=2", script)
    assert command.wait() == 0, command.err
    assert sorted(command.out.splitlines()) == [f"[(2, '{r}'), (4, '{r}')]".encode() for r in range(2)]


def test_folder_of_hook_is_transparent_on_somebodys_path(tmp_path):
    import infini_run.warm

    folder = Path(infini_run.warm.__file__).parent / "site"
    code = "import sys; print('sitecustomize' in sys.modules, [p for p in sys.path if p.endswith('site')])"
    environ = {**os.environ, "PYTHONPATH": str(folder)}
    assert subprocess.check_output([sys.executable, "-c", code], env=environ) == b"False []\n"


def test_hook_has_syntax_of_python_3_8():
    import ast

    import infini_run.warm

    for path in Path(infini_run.warm.__file__).parent.rglob("*.py"):
        ast.parse(path.read_text(), feature_version=(3, 8))


TERMINAL = """
import os, sys
owns = sys.stdin.isatty() and os.tcgetpgrp(0) == os.getpid()
print(owns, sys.stdin.isatty(), sys.stdout.isatty(), sys.stdout.line_buffering, flush=True)
print("read", sys.stdin.readline().strip(), flush=True)
"""


@pytest.mark.parametrize("nproc", [1, 2])
def test_warm_rank_has_terminal_as_cold_one(nproc):
    texts = []
    for more in ([], ["--preload=decimal"]):
        pid, fd = pty.fork()
        if pid == 0:
            os.execv(COMMAND[0], [*COMMAND, f"--nproc_per_node={nproc}", *more, sys.executable, "-c", TERMINAL])
        text, has_typed = b"", False
        with contextlib.suppress(OSError):  # EIO: the last one has closed it
            while piece := os.read(fd, 4096):
                text += piece
                if b"e\r\n" in text and not has_typed:
                    os.write(fd, b"typed\n")
                    has_typed = True
        os.close(fd)
        os.waitpid(pid, 0)
        lines = text.replace(b"\r", b"").splitlines()
        texts.append(sorted(line for line in lines if line.startswith((b"True", b"False", b"read"))))
    assert texts[0] == texts[1]
    assert b"read typed" in texts[1]


def test_trace_has_imports_once_and_a_fork_for_each_attempt(infini_run, tmp_path):
    program = "import os, sys; sys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')"
    flags = ["--preload=decimal", "--max_restarts=1", "--restart_delay=0", f"--trace={tmp_path}/trace.json"]
    # the first attempt fails within 10 s of its fork: the second one is cold
    command = infini_run("--nproc_per_node=2", *flags, sys.executable, "-c", program)
    assert command.wait() == 0, command.err
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = {name: [each for each in events if each["name"] == name] for name in ("plan", "preload", "spawn", "fork")}
    assert [each["args"]["text"] for each in spans["preload"]] == ["decimal"]
    (fork,) = spans["fork"]
    assert {each["pid"] for part in spans.values() for each in part} == {fork["pid"]}
    assert is_within(spans["preload"][0], spans["plan"][0])
    assert is_within(fork, spans["plan"][0])
    assert fork["ts"] + fork["dur"] <= spans["spawn"][0]["ts"]


def is_within(inner, outer):
    """Viewers of traces draw spans that only overlap in the wrong place."""
    return outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]
