"""What a type checker says of programs that use the API: mypy --strict and pyright accept the good lines of a program
and refuse the bad ones, each of which ends in `# refused`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PROGRAM = """
from __future__ import annotations

import infini_run as ir


def train(lr: float, steps: int = 1) -> str:
    return f"{lr} {steps}"


report: ir.Report = ir.run(["true"], nproc_per_node=2, console="none", grace="5s", redirects={0: 3}, env={"A": "1"})
ir.run(["true"], nproc="gpu", hosts=["a", "b"], log_dir=None, inherit_env=False)
ir.run(["true"], nproc_per_nod=2)  # refused
ir.run(["true"], nproc_per_node="gpus")  # refused
ir.run(["true"], console="prefixed")  # refused
ir.run(["true"], dry_run=True)  # refused
exits: int = ir.run(["true"])  # refused
ir.ProcessLauncher(["true"], bind="cores", max_restarts=1)
ir.ProcessLauncher(["true"], bind="core")  # refused
ir.launch_local("./train", 2, ["--lr=1"], gpus_per_proc=0, check=False, timeout_s=5.0, cwd="/")
ir.launch_local("./train", 2, nproc_per_node=2)  # refused
ir.launch_multi_node("./train", ["a", "b"], 2, engine="slurm")
ir.launch_multi_node("./train", ["a", "b"], 2, engine="slrum")  # refused
job: ir.Job = ir.submit(["true"], slots=2, time="4h", scheduler="local", options=["--exclusive"], array="0-9%3")
ir.submit(["true"], slotz=2)  # refused
ir.submit(["true"], scheduler="slrum")  # refused
ir.submit(["true"], wait=True)  # refused
result: ir.LaunchResult[str] = ir.Launcher(nproc_per_node=2, console="none").run(train, 0.5, steps=3)
text: str = result.rank(0) + result[1]
number: int = result[0]  # refused
ir.Launcher().run(train, "0.5")  # refused
ir.Launcher().run(train, 0.5, step=3)  # refused
ir.Launcher(nproc_per_nod=2)  # refused
ir.Launcher(trace="file")  # refused
handle: ir.LaunchHandle[str] = ir.Pool(nproc_per_node=2, preload=["json"]).start(train, lr=0.5)
waited: ir.LaunchResult[str] = handle.result(5.0)
ir.Pool(nproc_per_nod=2)  # refused


async def wait_for_it() -> str:
    first = await ir.Launcher().arun(train, 0.5)
    second = await handle
    return first.rank(0) + second.rank(0)


def answer(ctx: ir.Context, question: str) -> int:
    ctx.progress(1, 2)
    return len(question)


crew = ir.Crew(answer, nproc_per_node=2, restart=ir.Restart(strategy="one_for_one"))
count: int = crew.ask("how long").result()
crew.ask(7)  # refused
words: list[str] = list(crew.map(["one", "two"]))  # refused
counts: list[int] = list(crew.map(["one", "two"], ordered=False))
worker: ir.WorkerHandle[str, int] = crew.worker(0)
ask: ir.Ask[int] = worker.ask("again")
worker.ask(8)  # refused
ir.Restart(strategy="one_for_on")  # refused
ir.Crew(answer, nproc_per_nod=2)  # refused
ir.Crew(answer, console="prefixed")  # refused


class Counter:
    def task(self, ctx: ir.Context, step: int) -> float:
        return step / 2


half: float = ir.Crew(Counter).ask(3).result()
ir.Crew(Counter()).ask("3")  # refused
"""


def refused_lines(text: str) -> set[int]:
    return {number for number, line in enumerate(text.splitlines(), 1) if line.endswith("# refused")}


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def test_mypy_refuses_the_bad_lines_and_no_others(program):
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--follow-imports=silent", program]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "MYPYPATH": str(ROOT)})
    found = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert {int(line.split(":")[1]) for line in found} == refused_lines(PROGRAM), done.stdout + done.stderr


# basedpyright: pyright as a wheel, where pyright itself fetches what it runs from elsewhere
def test_pyright_refuses_the_bad_lines_and_no_others(program):
    settings = {"extraPaths": [str(ROOT)], "typeCheckingMode": "strict", "reportUnusedExpression": False}
    (program.parent / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "basedpyright", "--outputjson", f"--pythonpath={sys.executable}"]
    done = subprocess.run([*command, "-p", program.parent], capture_output=True, text=True)
    found = [item for item in json.loads(done.stdout)["generalDiagnostics"] if item["severity"] == "error"]
    assert {item["range"]["start"]["line"] + 1 for item in found} == refused_lines(PROGRAM), done.stdout
