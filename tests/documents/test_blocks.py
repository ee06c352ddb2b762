"""Every block of the documents runs, or says why it does not; what a command prints is what its page shows, in kind.

In kind: numbers, times, names of jobs, folders and this host may differ; exit codes and ranks may not. Lines of
several ranks may come in any order.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.batch import Queue
from tests.support.blocks import PROGRAMS, Block, blocks, indented, pages
from tests.support.command import PATIENT, program_with
from tests.support.hosts import Bed
from tests.support.job_case import Jobs
from tests.support.nvml import FOUR
from tests.support.paths import ROOT
from tests.support.processes import marked
from tests.support.serve_case import Service
from tests.support.waiting import LIMIT_S, until


def _letter(number: str) -> str:
    return chr(ord("A") + int(number))  # no number, so it stays


_JOB = re.compile(r"ir-[0-9a-f]{10,12}")
_SSH = '#!/bin/sh\nfor word; do :; done\nexec sh -c "$word"\n'  # runs here what it is to run elsewhere: its last word
_WAITS = " is waiting in the queue"
_LOOK = "--snapshots=failure"
_KINDS = (
    (
        re.compile(r"\b(exit code|rank|exit|FAILED) (\d+)"),
        lambda match: f"{match[1]} {chr(ord('A') + int(match[2]))}",
    ),
    (re.compile(r"\[(?:\w+:|rank )(\d+)( err)?\]"), lambda match: f"[{chr(ord('A') + int(match[1]))}{match[2]}]"),
    (re.compile(r"; \d+ others? (was|were) stopped"), ""),  # or had ended by then
    (re.compile(rf"^{_JOB.pattern}  (QUEUED|STARTING|RUNNING)$", re.MULTILINE), ""),  # may pass unseen
    (_JOB, "JOB"),
    (re.compile(rf"\b(vm|{re.escape(os.uname().nodename)})\b"), "HOST"),
    (re.compile(r"(?<![\w.])/(?:tmp|run|home)/[^\s\":,]*/"), "FOLDER/"),
    (re.compile(r"\d+(?:[.,:]\d+)*"), "N"),
    (re.compile(r"\bN (?:µs|ms|s|min|h)\b"), "TIME"),
    (re.compile(r" {2,}"), "  "),
)
_MARKS = re.compile(r"^\W*[~^]+$", re.MULTILINE)  # below a line of a traceback, of some versions of Python
PAGES = {str(path.relative_to(ROOT)): path for path in pages()}


@pytest.mark.parametrize("page", PAGES)
def test_every_block_has_a_language_and_runs_or_says_why_not(page):
    assert {block.name: wrong for block in blocks(PAGES[page]) if (wrong := block.problems())} == {}
    assert indented(PAGES[page]) == []


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("```\nls\n```\n", "its language is ''"),
        ("<!-- not run: later -->\n```sh\nls\n```\n", "not run: a reason"),
        ("<!-- not run: see tests/nowhere.py instead -->\n```sh\nls\n```\n", "not run: there is no tests/nowhere.py"),
        ("<!-- given: train.py=nothing.py -->\n```sh\nls\n```\n", "there is no "),
        ("<!-- skip: it needs a GPU -->\n```sh\nls\n```\n", "no comment begins with 'skip'"),
        ("<!-- on: mars -->\n```sh\nls\n```\n", "on: ssh"),
    ],
)
def test_a_block_that_says_nothing_is_found(text, wrong, tmp_path, monkeypatch):
    monkeypatch.setattr("tests.support.blocks.ROOT", tmp_path)
    (tmp_path / "page.md").write_text(f"# Page\n\n{text}")
    [block] = blocks(tmp_path / "page.md")
    assert block.line == (3 if text.startswith("```") else 4)
    [problem] = block.problems()
    assert problem.startswith(wrong)


def test_block_of_spaces_is_found(tmp_path):
    (tmp_path / "page.md").write_text("Text:\n\n    ls\n\n- item\n\n    more of it\n\n```sh\n\n    ls\n```\n")
    assert indented(tmp_path / "page.md") == [3]


TABS = """=== "Command"

    Text in a tab.

    <!-- given: train.py=done.py -->
    <!-- dry run: it is only an example -->
    ```sh
    if true; then
        ls
    fi
    ```

    !!! note

        Text in a note.

        ```python
        print(1)
        ```

=== "Python"

        ls

    - item

      ```text
      done
      ```
"""


def test_blocks_in_tabs_admonitions_and_lists_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.support.blocks.ROOT", tmp_path)
    (tmp_path / "page.md").write_text(TABS)
    found = [(block.line, block.language, block.text) for block in blocks(tmp_path / "page.md")]
    assert found == [(7, "sh", "if true; then\n    ls\nfi\n"), (17, "python", "print(1)\n"), (27, "text", "done\n")]
    assert set(blocks(tmp_path / "page.md")[0].said) == {"given", "dry run"}
    assert indented(tmp_path / "page.md") == [23]


@pytest.mark.parametrize(
    ("shown", "printed", "is_alike"),
    [
        ("rank 2 on vm failed (pid 1, after 2 ms)", "rank 2 on vm failed (pid 9, after 3.1 s)", 1),
        ("exit code 7", "exit code 8", 0),
        ("[rank 1] a\n[rank 0] a", "[rank 0] a\n[rank 1] a", 1),
        ("[rank 1] a\n[rank 0] a", "[rank 0] a", 0),
        ("[host4:7] a", "[host4:6] a", 0),
        ("ir-0123456789  STARTING\ndone", "ir-abcdef0123  RUNNING\ndone", 1),
        ("one", "one\ntwo", 0),
        ("[node1:5] a", "infini-job: ir-abcdef0123 is waiting in the queue\n[node1:5] a", 1),
        ("one\n...", "one\ntwo", 1),
        ("job ir-0123456789 in /tmp/a/b", "job ir-abcdef0123 in /tmp/c/d/b", 1),
    ],
)  # fmt: skip
def test_outputs_are_compared_in_kind(shown, printed, is_alike):
    assert (differences(shown, printed) == "") == bool(is_alike)


SHELL_PAGES = [name for name, path in PAGES.items() if any(b.runs and b.language != "python" for b in blocks(path))]
PYTHON_PAGES = [
    name for name, path in PAGES.items()
    if any(b.runs and b.language == "python" and "file" not in b.said for b in blocks(path))
]  # fmt: skip


@pytest.mark.parametrize("page", PYTHON_PAGES)
def test_the_python_of_a_page_runs_in_order_as_one_program(page, tmp_path, case):
    """The hosts "a" and "b" have no addresses, and are this machine."""
    parts = [b.text for b in blocks(PAGES[page]) if b.runs and b.language == "python" and "file" not in b.said]
    (tmp_path / "page.py").write_text("\n".join(parts))
    (tmp_path / "ssh").write_text(_SSH)
    (tmp_path / "ssh").chmod(0o700)
    env = {
        **os.environ,
        **case.env,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "INFINI_JOB_DIR": str(tmp_path / "jobs"),
        "INFINI_RUN_RDZV_ENDPOINT": "127.0.0.1:29500",
    }
    done = subprocess.run(
        [sys.executable, "-W", "error", "page.py"],
        cwd=tmp_path, env=env, capture_output=True, text=True, timeout=LIMIT_S * 2, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    until(lambda: not marked(), LIMIT_S)
    case.end()


@pytest.mark.parametrize("page", SHELL_PAGES)
def test_the_commands_of_a_page_run_and_print_what_it_shows(page, tmp_path, case, stub_folder):
    with ExitStack() as stack:
        reader = Reader(tmp_path, Places(tmp_path, case, stub_folder, stack))
        wrong = [text for block in blocks(PAGES[page]) if block.runs and (text := reader.play(block))]
    assert "\n\n".join(wrong) == ""
    case.end()


class Places:
    """Where blocks run: the environment of each place, which is made when the first block asks for it."""

    def __init__(self, folder: Path, case, stub_folder: Path, stack: ExitStack) -> None:
        self._folder, self._case, self._stub, self._stack = folder, case, stub_folder, stack
        self._made: dict[str, dict[str, str]] = {}
        programs = Path(sys.executable).parent
        self._plain = {
            **os.environ,
            **case.env,
            "PATH": f"{programs}:{os.environ['PATH']}",
            "HOME": str(folder),
            "INFINI_JOB_DIR": str(folder / "jobs"),
        }

    def environment(self, block: Block) -> dict[str, str]:
        """The variables of a block."""
        place = block.said.get("on", "")
        if place not in self._made:
            self._made[place] = {"": dict, "ssh": self._ssh, "slurm": self._slurm, "gpus": self._gpus}.get(
                place, self._service
            )()
        dry = {"INFINI_RUN_DRY_RUN": "1"} if "dry run" in block.said else {}
        return self._plain | self._made[place] | dry

    def _ssh(self) -> dict[str, str]:
        bed = Bed()
        self._stack.callback(bed.close)
        return {"INFINI_RUN_SSH_CONFIG": str(bed.config), "INFINI_RUN_REMOTE_PYTHON": sys.executable}

    def _slurm(self) -> dict[str, str]:
        queue = Queue("slurm")
        self._stack.callback(queue.close)
        return {"PATH": f"{Path(sys.executable).parent}:{queue.env['PATH']}", "TEST_BATCH": queue.folder}

    def _gpus(self) -> dict[str, str]:
        return {"LD_LIBRARY_PATH": str(self._stub), "NVML_STUB_GPUS": "\n".join(FOUR), "NVML_STUB_CUDA": "12080"}

    def _service(self) -> dict[str, str]:
        jobs = Jobs(self._folder / "jobs", self._case)
        service = Service(jobs, self._folder / "job.sock")
        self._stack.callback(jobs.close)
        self._stack.callback(service.end)
        return {}


class Reader:
    """Somebody who types what a page shows, in a folder that has its files."""

    def __init__(self, folder: Path, places: Places) -> None:
        self._folder, self._places = folder, places
        self._names: dict[str, str] = {}  # of jobs: as the page has them, as they are

    def play(self, block: Block) -> str:
        """What a block does otherwise than the page says; "": nothing."""
        for pair in block.said.get("given", "").split():
            name, _, program = pair.partition("=")
            (self._folder / name).write_bytes((PROGRAMS / program).read_bytes())
            (self._folder / name).chmod(0o755)
        if "file" in block.said:
            (self._folder / block.said["file"]).write_text(block.text)
            return ""
        if block.language == "python":
            return ""
        env = self._places.environment(block)
        if block.language == "sh":
            code, printed = self._call(f"set -e\n{block.text}", env)
            return f"{block.name} ends with {code}:\n{printed}" if code else ""
        return "".join(self._command(block, command, shown, env) for command, shown in dialogue(block.text))

    def _command(self, block: Block, command: str, shown: str, env: dict[str, str]) -> str:
        for name, real in self._names.items():
            command = command.replace(name, real)
        _, printed = self._call(command, self._with_patience(env) if _LOOK in command else env)
        self._names |= dict(zip(_JOB.findall(shown), _JOB.findall(printed), strict=False))
        wrong = "" if "dry run" in block.said else differences(shown, printed)
        return f"{block.name}: $ {command}\n{wrong}\n" if wrong else ""

    def _with_patience(self, env: dict[str, str]) -> dict[str, str]:
        folder = self._folder / ".patient"
        folder.mkdir(exist_ok=True)
        (folder / "main.py").write_text(program_with(PATIENT))
        (folder / "infini-run").write_text(f'#!/bin/sh\nexec "{sys.executable}" "{folder}/main.py" "$@"\n')
        (folder / "infini-run").chmod(0o755)
        return {**env, "PATH": f"{folder}:{env['PATH']}"}

    def _call(self, script: str, env: dict[str, str]) -> tuple[int, str]:
        done = subprocess.run(
            ["bash", "-c", script], cwd=self._folder, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S * 2, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout


def dialogue(text: str) -> list[tuple[str, str]]:
    """Commands, each with what it prints."""
    found: list[tuple[str, str]] = []
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith("$ "):
            command = line[2:]
            while command.endswith("\\"):
                command = f"{command}\n{next(lines)}"
            found.append((command, ""))
        else:
            command, shown = found[-1]
            found[-1] = (command, f"{shown}{line}\n")
    return found


def differences(shown: str, printed: str) -> str:
    """Lines that only one of two texts has, in kind; "": they are alike. A line of `...` stands for any lines; that
    a job waits is said only where it does."""
    expected, actual = kinds(shown), kinds(printed)
    is_part = "..." in expected
    missing = [f"  shown:   {line}" for line in expected if line not in actual and line != "..."]
    extra = [f"  printed: {line}" for line in actual if not (line in expected or is_part or _WAITS in line)]
    return "\n".join(missing + extra) + (f"\n{printed}" if missing or extra else "")


def kinds(text: str) -> list[str]:
    """The lines of a text, without what differs from run to run."""
    text = _MARKS.sub("", text)
    for pattern, kind in _KINDS:
        text = pattern.sub(kind, text)
    return [line.rstrip() for line in text.splitlines() if line.strip()]
