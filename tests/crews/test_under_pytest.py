"""Functions and crews in a user's own tests: pytest's ways to import them, its captures, several processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.waiting import LIMIT_S

CHECKS = """
    import pytest
    import infini_run as ir

    class Odd(Exception):
        pass

    def add_one(n):
        return n + 1

    def fail():
        raise Odd("as it is")

    def test_function_of_the_module():
        assert list(ir.Launcher(nproc_per_node=2).run(add_one, 1)) == [2, 2]
        with pytest.raises(Odd):
            ir.Launcher().run(fail)
        with ir.Crew(lambda ctx, n: add_one(n), preload=["fractions"]) as crew:
            assert list(crew.map(range(3))) == [1, 2, 3]

    def test_function_inside():
        def add_two(n):
            return n + 2

        assert ir.Launcher().run(add_two, 1)[0] == 3

    def test_capfd(capfd):
        ir.Launcher().run(print, "from the rank")
        assert "from the rank" in capfd.readouterr().out

    def test_capsys(capsys):
        ir.Launcher().run(print, "from the rank")
        assert capsys.readouterr().out == ""
"""
PYTEST = Path(sys.executable).with_name("pytest")  # `python -m pytest` adds the current directory to sys.path


@pytest.mark.parametrize(
    ("words", "configuration", "failed"),
    [
        ([], "", 0),
        (["-n2"], "", 0),
        (["--import-mode=importlib"], "", 1),
        (["--import-mode=importlib"], "pythonpath = .", 0),
        (["--import-mode=importlib", "-n2"], "pythonpath = .", 0),
    ],
)
def test_what_the_documents_say_of_pytest(tmp_path, words, configuration, failed):
    (tmp_path / "checks").mkdir()
    (tmp_path / "checks/test_mine.py").write_text(textwrap.dedent(CHECKS))
    (tmp_path / "pytest.ini").write_text(f"[pytest]\n{configuration}\n")
    command = [PYTEST, "-q", "-p", "no:cacheprovider", "-p", "xdist", *words]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # other plugins of these tests load modules in each of its processes
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    found = re.search(r"(?:(\d+) failed, )?(\d+) passed", done.stdout)
    assert found is not None, done.stdout + done.stderr
    assert (int(found[1] or 0), int(found[2])) == (failed, 4 - failed), done.stdout
    assert ("No module named" in done.stdout) == bool(failed)
