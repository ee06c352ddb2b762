"""gevent and eventlet: what they leave usable works, and the rest is refused by name before anything starts."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.support.paths import ROOT

PATCHES = {
    "gevent": "import gevent.monkey; gevent.monkey.patch_all",
    "eventlet": "import eventlet; eventlet.monkey_patch",
}
NAMES = {"gevent": ("select", "socket", "thread"), "eventlet": ("os", "select", "socket", "thread")}
WITHOUT = {tool: ", ".join(f"{name}=False" for name in names) for tool, names in NAMES.items()}
CREW = "with ir.Crew(abs, nproc_per_node=2) as crew: print(list(crew.map([-1, 2])))"
FUNCTION = "print(list(ir.Launcher(nproc_per_node=2, preload=()).run(abs, -1)))"
POOL = "with ir.Pool(nproc_per_node=2) as pool: print(list(pool.run(abs, -1)))"
HOSTS = "ir.run(['true'], hosts=['nowhere.invalid'])"
PROGRAM = "print(ir.run(['true'], nproc_per_node=2).exit_code)"
CHANNEL = "(tx, _), (_, rx) = ir.channel.pair(); tx.send(7); print(rx.recv(timeout_s=60))"
JOB = "print(ir.submit(['true'], scheduler='local').wait(60).exit_code)"


def play(tool, code, home, options=""):
    if find_spec(tool) is None:  # not imported here: eventlet looks at every fork from then on
        pytest.skip(f"no {tool}")
    script = (
        f"import infini_run as ir\ntry:\n    {code}\nexcept ir.UsageError as error:\n    print('refused:', error)"
    )
    argv = [sys.executable, "-W", "ignore", "-c", f"{PATCHES[tool]}({options})\n{script}"]
    environ = {**os.environ, "HOME": str(home)}
    done = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, env=environ, timeout=60)
    assert done.stderr == ""
    return done.stdout.strip()


@pytest.mark.parametrize("tool", PATCHES)
@pytest.mark.parametrize("code", [CREW, FUNCTION, POOL, HOSTS])
def test_threads_are_refused_by_name_under_monkey_patches(tool, code, tmp_path):
    line = play(tool, code, tmp_path)
    assert line.startswith("refused: ")
    assert f": {tool} has patched {', '.join(NAMES[tool])} in this process" in line
    assert f"({WITHOUT[tool]})" in line


@pytest.mark.parametrize(("tool", "name"), [(tool, name) for tool, names in NAMES.items() for name in names])
def test_each_patched_module_is_refused_alone(tool, name, tmp_path):
    others = ", ".join(f"{other}=False" for other in NAMES[tool] if other != name)
    assert f"{tool} has patched {name} in this process" in play(tool, CREW, tmp_path, others)


@pytest.mark.parametrize("tool", PATCHES)
@pytest.mark.parametrize(
    ("code", "result"),
    [(CREW, "[1, 2]"), (FUNCTION, "[1, 1]"), (POOL, "[1, 1]"), (PROGRAM, "0"), (CHANNEL, "7"), (JOB, "0")],
)
def test_advice_about_monkey_patches_works(tool, code, result, tmp_path):
    assert play(tool, code, tmp_path, WITHOUT[tool]) == result


@pytest.mark.parametrize(("code", "result"), [(PROGRAM, "0"), (CHANNEL, "7"), (JOB, "0")])
def test_programs_run_under_gevent_but_not_under_eventlet(code, result, tmp_path):
    assert play("gevent", code, tmp_path) == result
    assert "eventlet has patched os, select in this process" in play("eventlet", code, tmp_path)
