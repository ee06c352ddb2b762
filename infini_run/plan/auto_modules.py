"""What --preload=auto would import, for --dry_run: the ranks' own Python reads the script, and runs nothing of it."""

from __future__ import annotations

import os

from infini_run.plan.held_program import python_words, split_words
from infini_run.plan.model import Command
from infini_run.system.python_probe import ask_once

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from infini_run.plan.model import Plan

_READER = os.path.join(os.path.dirname(os.path.dirname(__file__)), "warm", "script_imports.py")
NONE_FOUND = "no module of site-packages is imported by the first lines of the script"
_CODE = """
import runpy, sys
start, reader, program, folder, *words = sys.argv[1:]
if not getattr(sys.flags, "safe_path", False):
    del sys.path[0]
else:
    folder = ""
names = runpy.run_path(reader)["find_script_imports"](program, words, folder or None)[1]
print("infini", start, "found", ",".join(dict.fromkeys(name.partition(":")[0] for name in names)), flush=True)
"""


def find_auto_modules(plan: Plan, environ: Mapping[str, str]) -> tuple[tuple[str, ...], str]:
    """Return the modules that the ranks of this node would preload, and why there are none or they are unknown.

    Args:
        plan: The plan, whose program --preload can hold.
        environ: The environment of the launch.
    """
    worker = plan.workers[0]
    python, words = python_words(Command(file=worker.file, argv=worker.argv)) or ([worker.file], [])
    letters, program, kind = split_words(words)
    script = f"-{kind}" if kind else program
    nonce = os.urandom(8).hex()
    answer, instead = ask_once(
        [*python, *(["-P"] if "P" in letters else []), "-c", _CODE, nonce, _READER, script, _folder(script),
         python[-1], *words],
        f"infini {nonce} found ",
        plan.common_environ(environ),
    )  # fmt: skip
    if answer is None:
        return (), f"unknown: {python[-1]}: {instead}"
    names = tuple(name for name in answer.split(",") if name)
    return names, "" if names else NONE_FOUND


def _folder(script: str) -> str:
    """Return what Python puts first on sys.path, as the hook does (warm/site/sitecustomize.py); "": nothing."""
    if script == "-m":
        return os.getcwd()
    if os.path.isfile(script) and not script.endswith((".pyz", ".zip")):
        return os.path.dirname(os.path.realpath(script))
    return script
