"""Debuggers in ranks: debugpy under a real client of its protocol, as VS Code is, and pdb at a terminal."""

from __future__ import annotations

import json
import re
import sys
from importlib.util import find_spec

import pytest

from tests.support.debug_client import DebugClient
from tests.support.pty_window import Window

SCRIPT = """
import os, sys
rank = int(os.environ["RANK"])
answer = (rank, sys.argv[1:])
print("rank", rank, "ends", flush=True)
"""
LINE = 5  # of the print
PDB = "import os\nif os.environ['RANK'] == '1':\n    x = 7\n    breakpoint()\nprint('end')\n"


@pytest.fixture
def debug(tmp_path):
    if find_spec("debugpy") is None:  # not imported here: what it loads stays
        pytest.skip("no debugpy")
    started = []

    def start(*words, code=SCRIPT, line=LINE, expression="answer", **more):
        script = tmp_path / "train.py"
        script.write_text(code)
        started.append(DebugClient(*words, script=script, line=line, expression=expression, cwd=tmp_path, **more))
        result, out, err = started[-1].run()
        return result, out, err, sorted(started[-1].hits)

    yield start
    for client in started:
        client.close()


@pytest.mark.parametrize(
    "words", [["train.py"], ["-m", "train"], [sys.executable, "train.py"], ["--max_restarts=1", "train.py"]]
)
def test_breakpoint_is_hit_in_every_rank_under_debugpy(debug, words):
    wanted = ["(0, ['a', 'b c'])", "(1, ['a', 'b c'])"]
    code, out, err, hits = debug("-m", "infini_run", "--nproc_per_node=2", *words, "a", "b c")
    assert code == 0, err
    assert hits == wanted
    assert sorted(out.splitlines()) == ["rank 0 ends", "rank 1 ends"]


def test_failure_of_a_rank_is_told_under_debugpy(debug):
    words, wanted = ["-m", "infini_run", "--nproc_per_node=2", "train.py"], ["(0, [])", "(1, [])"]
    code, _, err, hits = debug(*words, code=SCRIPT + "sys.exit(3)\n")
    assert (code, hits) == (3, wanted)
    assert re.search(r"infini-run: rank \d on .* failed: exit code 3", err)


def test_other_programs_start_as_they_stand_under_debugpy(debug):
    code, out, err, hits = debug("-m", "infini_run", "--nproc_per_node=2", "echo", "train.py")
    assert (code, out, hits) == (0, "train.py\n" * 2, []), err


def test_children_are_left_alone_where_the_debugger_does_not_follow(debug):
    code, out, err, hits = debug("-m", "infini_run", "--nproc_per_node=2", "train.py", follows=False)
    assert (code, sorted(out.splitlines()), hits) == (0, ["rank 0 ends", "rank 1 ends"], []), err


def test_dry_run_shows_the_debugger_in_the_command(debug):
    code, out, err, _ = debug("-m", "infini_run", "--dry_run=json", "train.py", "a")
    assert code == 0, err
    (rank,) = json.loads(out)["ranks"]
    argv = rank["argv"]
    assert argv[0] == sys.executable
    assert argv[2].endswith("pydevd.py")
    assert argv[-3:-1] == ["--file", argv[-2]]
    assert argv[-2].endswith("train.py")
    assert argv[-1] == "a"


def test_plan_has_no_debugger_without_one(infini_run, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    command = infini_run("--dry_run=json", tmp_path / "train.py")
    assert command.wait() == 0
    assert json.loads(command.out)["ranks"][0]["argv"] == [sys.executable, "-u", str(tmp_path / "train.py")]


def test_breakpoint_without_input_is_told_how_to_get_it(infini_run, tmp_path):
    (tmp_path / "train.py").write_text(PDB)
    command = infini_run("--nproc_per_node=2", tmp_path / "train.py")
    assert command.wait() == 1
    advice = b"  next: add --stdin=1, and call breakpoint() on rank 1 alone; only one rank has input\n"
    assert command.err.endswith(advice)


def test_advice_about_breakpoint_works(tmp_path):
    (tmp_path / "train.py").write_text(PDB)
    window = Window("--nproc_per_node=2", "--stdin=1", tmp_path / "train.py")
    try:
        window.see(lambda: any("(Pdb)" in line for line in window.text))
        window.type("p x * 6\n")
        window.see(lambda: any(line.endswith("42") for line in window.text))
        window.type("c\n")
        assert window.wait() == 0
    finally:
        window.close()


HOST = """
import sys
import infini_run as ir
from train import work
if __name__ == "__main__":
    {call}
"""
WORK = "import os\ndef work(x):\n    y = (int(os.environ['RANK']), x + 1)\n    return y[1]\n"
CALLS = {
    "run": ("ir.run(['train.py', 'a'], nproc_per_node=2)", SCRIPT, LINE, "answer", ["(0, ['a'])", "(1, ['a'])"]),
    "launcher": ("print(*ir.Launcher(nproc_per_node=2).run(work, 3))", WORK, 4, "y", ["(0, 4)", "(1, 4)"]),
    "crew": (
        "with ir.Crew(work, nproc=2) as crew: print(*[crew.worker(rank).ask(3).result() for rank in (0, 1)])",
        WORK, 4, "y", ["(0, 4)", "(1, 4)"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_breakpoint_is_hit_in_what_a_debugged_program_launches(debug, tmp_path, name):
    call, code, line, expression, expected = CALLS[name]
    host = HOST if code == WORK else HOST.replace("from train import work\n", "")
    (tmp_path / "host.py").write_text(host.format(call=call))
    result, _, err, hits = debug("host.py", code=code, line=line, expression=expression)
    assert (result, hits) == (0, expected), err


def test_isolate_is_refused_under_debugger(debug):
    code, out, err, _ = debug("-m", "infini_run", "--isolate", "train.py")
    assert (code, out) == (2, "")
    assert err == ("infini-run: --isolate: the debugger that runs infini-run cannot follow; drop --isolate\n")
