"""The guide "Run several programs": its programs and its example do what it shows."""

from __future__ import annotations

from tests.support.blocks import blocks
from tests.support.paths import ROOT

PAGE = ROOT / "docs/programs.md"
PARAMETER_SERVER = ROOT / "examples/parameter_server.py"


def test_guide_runs_trainer_and_two_servers(infini_run, tmp_path):
    shown = blocks(PAGE)
    for block in shown:
        if "file" in block.said:
            (tmp_path / block.said["file"]).write_text(block.text)
    command, *output = next(block.text for block in shown if block.language == "console").splitlines()
    run = infini_run(*command.split()[2:], cwd=tmp_path)
    assert run.wait() == 0, run.err
    assert run.out.decode().splitlines() == output


def test_parameter_server_learns_the_line(infini_run):
    words = ["--program=server", PARAMETER_SERVER, ":", "--program=worker", "--nproc_per_node=4", PARAMETER_SERVER]
    run = infini_run(*words)
    assert run.wait() == 0, run.err
    assert run.out.decode().splitlines()[-1] == "[server 0] step 100: y = 3.00 x + 1.00"


def test_parameter_server_has_forty_lines():
    lines = PARAMETER_SERVER.read_text().partition('"""\n\n')[2].splitlines()
    assert len([line for line in lines if line]) <= 40


def test_loop_of_trainer_and_samplers_learns(infini_run):
    loop = ROOT / "examples/rl_loop.py"
    words = ["--program=trainer", "--ends_job", loop, ":", "--program=sampler", "--nproc_per_node=3", loop]
    run = infini_run(*words)
    assert run.wait() == 0, run.err
    last = run.out.decode().splitlines()[-1]
    assert last.startswith("[trainer 0] step 100: reward ")
    assert float(last.split()[-1]) > 0.9


def test_samplers_restart_alone_and_the_trainer_learns_on(infini_run):
    loop = ROOT / "examples/rl_loop.py"
    words = ["--restart_scope=program", "--restart_delay=0", "--program=trainer", "--ends_job", loop, ":"]
    words += ["--program=sampler", "--nproc_per_node=3", "--max_restarts=2", loop, "crash"]
    run = infini_run(*words)
    assert run.wait() == 0, run.err
    *_, waits, _, last = run.out.decode().splitlines()
    assert waits == "[trainer 0] step 60: lost the samplers; waiting for new ones"
    assert float(last.split()[-1]) > 0.9
    assert (
        b"[sampler 1 err] the simulator crashed\ninfini-run: sampler: restart 1 of 2 in 0 ms: sampler 1 on" in run.err
    )
