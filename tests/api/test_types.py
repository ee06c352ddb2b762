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

from asyncio import gather, wrap_future
from concurrent.futures import Future, as_completed
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar, overload

import infini_run as ir

T = TypeVar("T")


def train(lr: float, steps: int = 1) -> str:
    return f"{lr} {steps}"


report: ir.Report = ir.run(["true"], nproc_per_node=2, console="none", grace="5s", redirects={0: 3}, env={"A": "1"})
ir.run(["true"], nproc="gpu", hosts=["a", "b"], log_dir=None, inherit_env=False)
ir.run(["python", "train.py"], preload=["torch"], preload_timeout="5m")
ir.run(["python", "train.py"], preload=["torch", 3])  # refused
ir.launch_local("train.py", 2, preload="auto")
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
ir.submit(["true"], array=["a"])  # refused
fitted: ir.Job[str] = ir.submit(partial(train, 0.1), slots=2, time="4h", env={"A": "1"})
loss: str = fitted.result() + fitted.results()[0]
ir.submit(train)  # refused
losses: list[str] = ir.submit(train, array=[0.1, 0.2], time="4h").result()
each: list[list[str]] = ir.submit(partial(train, steps=2), array=(0.1, 0.2)).results()
ir.submit(train, array=["a", "b"])  # refused
ir.submit(train, array=[0.1], slotz=2)  # refused
executor = ir.JobExecutor("log", timeout_min=60, slurm_partition="gpu", nodes=2, gpus_per_node=8, tasks_per_node=8)
executor.update_parameters(slots=8, time="4h", env={"A": "1"})
executor.update_parameters(timeout_mins=3)  # refused
submitted: ir.ExecutorJob[str] = executor.submit(train, 0.1, steps=2)
executor.submit(train, "0.1")  # refused
mapped: list[str] = [job.result() for job in executor.map_array(train, [0.1], [2])]
wrong_loss: list[int] = ir.submit(train, array=[0.1]).result()  # refused
result: ir.LaunchResult[str] = ir.Launcher(nproc_per_node=2, console="none").run(train, 0.5, steps=3)
text: str = result.rank(0) + result[1]
number: int = result[0]  # refused
ir.Launcher().run(train, "0.5")  # refused
ir.Launcher().run(train, 0.5, step=3)  # refused
ir.Launcher(nproc_per_nod=2)  # refused
ir.Launcher(trace="file")  # refused
ir.Launcher(nproc_per_node="gpus")  # refused
ir.Launcher(nproc_per_node=[2, 1], hosts=["a", "b"], backend="gloo", log_level="INFO", progress="rich")
ir.Launcher(progress="richer")  # refused
ir.Launcher(backend=3)  # refused
ir.Launcher(max_restarts="3")  # refused
ir.Launcher(timeout=3)  # refused
ir.Launcher(env={"A": 1})  # refused
handle: ir.LaunchHandle[str] = ir.Pool(nproc_per_node=2, preload=["json"]).start(train, lr=0.5)
waited: ir.LaunchResult[str] = handle.result(5.0)
ir.Pool(nproc_per_nod=2)  # refused
ir.Pool(nproc="all")  # refused
slice_: tuple[str, ...] = result[:2]
hosts: dict[str, list[str]] = result.by_host
ends: list[ir.Exit | None] = list(handle.exits)


@overload
def either(what: int) -> int: ...
@overload
def either(what: str) -> str: ...
def either(what: int | str) -> int | str:
    return what


def same(what: T) -> T:
    return what


def many(*numbers: int, **names: str) -> int:
    return len(numbers) + len(names)


overloaded: ir.LaunchResult[int] = ir.Launcher().run(either, 1)
generic: ir.LaunchResult[bytes] = ir.Launcher().run(same, b"")
several: ir.LaunchResult[int] = ir.Launcher().run(many, 1, 2, name="three")
ir.Launcher().run(many, "one")  # refused
part: ir.LaunchResult[str] = ir.Launcher().run(partial(train, 0.5), steps=2)


@dataclass
class Config:
    lr: float


def fit(config: Config) -> float:
    return config.lr


def shard(index: int) -> bytes:
    return bytes(index)


fits: list[float] = ir.submit(fit, array=[Config(0.1), Config(0.2)]).result()
ir.submit(fit, array=[0.1])  # refused
ir.submit(fit, array="0-9%3")  # refused
shards: list[bytes] = ir.submit(shard, array="0-9%3").result()
shards = ir.submit(shard, array=range(3)).result()


async def wait_for_job() -> float:
    return (await ir.submit(fit, array=[Config(0.1)]))[0] + len(await fitted)


built_in: ir.LaunchResult[int] = ir.Launcher().run(len, [1])


async def wait_for_it() -> str:
    first = await ir.Launcher().arun(train, 0.5)
    await ir.Launcher().arun(train, 0.5, step=2)  # refused
    second = await handle
    return first.rank(0) + second.rank(0)


def read(error: ir.WorkerDied | ir.RemoteError | ir.LaunchTimeout) -> str:
    if isinstance(error, ir.WorkerDied):
        return error.exit.python_stack[0]
    if isinstance(error, ir.RemoteError):
        return error.trace
    timeout: TimeoutError = error
    return str(timeout)


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
ir.Crew(answer, nproc_per_node="gpus")  # refused
ir.Crew(answer, nproc="cpu", max_tasks_per_child=100, drain_s=None)


class Counter:
    def task(self, ctx: ir.Context, step: int) -> float:
        return step / 2


half: float = ir.Crew(Counter).ask(3).result()
ir.Crew(Counter()).ask("3")  # refused


@dataclass
class Adder:
    add: int

    def task(self, ctx: ir.Context, what: int) -> float:
        return what + self.add

    def method(self, what: int) -> bytes:
        return bytes(what)


class Box(Generic[T]):
    def __init__(self, value: T) -> None:
        self.value = value

    def task(self, ctx: ir.Context, what: int) -> T:
        return self.value


def len_of(text: str) -> int:
    return len(text)


def serve(ctx: ir.Context, task: tuple[int, str], extra: int = 0) -> list[str]:
    return [task[1]] * task[0]


bound: ir.LaunchResult[bytes] = ir.Launcher().run(Adder(1).method, 3)
ir.Launcher().run(Adder(1).method, "3")  # refused
made: ir.LaunchResult[Adder] = ir.Launcher().run(Adder, 3)
plain: bytes = ir.Crew(Adder(1).method).ask(3).result()
lengths: list[int] = list(ir.Crew(len_of).map(["a"]))
adders: ir.Crew[int, float] = ir.Crew(Adder, args=(1,))
adders = ir.Crew(partial(Adder, 1))
boxed: str = ir.Crew(Box("text")).ask(3).result()
boxed = ir.Crew(Box[str], args=("text",)).ask(3).result()
ir.Crew(Box("text")).ask("3")  # refused
server = ir.Crew(serve, args=(3,))
served: list[str] = server.ask((3, "x")).result(timeout=5)
server.ask((3, 4))  # refused
maps: list[list[str]] = list(server.map([1, 2], ["a", "b"], timeout_s=4, chunksize=2, buffersize=3))
futures: list[Future[list[str]]] = [server.ask((1, "a"))]
first: list[str] = next(as_completed(futures)).result()
status: ir.CrewStatus = server.close()
state: str = status.workers[0].state


async def ask_all() -> list[float]:
    async with ir.Crew(Adder, args=(1,)) as crew:
        wrapped: float = await wrap_future(crew.ask(1))
        wrong: str = await crew.ask(1)  # refused
        async for event in crew:
            print(event.kind.upper())
        return [wrapped, *await gather(*[crew.ask(n) for n in range(3)])]
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
