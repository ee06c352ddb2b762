"""torchrun's options, read from the source of torch/distributed/run.py without importing it."""

from __future__ import annotations

import ast
import importlib.util
import os
from pathlib import Path
from zipfile import ZipFile

_FILE = "torch/distributed/run.py"
_READ_FROM_VARIABLES = {"env", "check_env"}  # argparse actions of torch/distributed/argparse_util.py


def torchrun_source() -> tuple[str, str] | None:
    """Its text and the version: of the wheel that TEST_TORCH_WHEEL names, else of the torch that is installed."""
    wheel = os.environ.get("TEST_TORCH_WHEEL")
    if wheel:
        with ZipFile(wheel) as archive:
            return archive.read(_FILE).decode(), Path(wheel).name.split("-")[1].partition("+")[0]
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    from importlib.metadata import version

    return (Path(spec.origin).parent.parent / _FILE).read_text(), version("torch").partition("+")[0]


def options_of(source: str) -> dict[str, tuple[str, str]]:
    """Each option's short name ("": none) and variable ("": none), by its name, as `log_dir`."""
    found = {}
    for call in ast.walk(ast.parse(source)):
        if not isinstance(call, ast.Call) or getattr(call.func, "attr", "") != "add_argument":
            continue
        names = [word.value for word in call.args if isinstance(word, ast.Constant) and word.value.startswith("-")]
        if not names:  # the script and its arguments
            continue
        (name,) = {name[2:].replace("-", "_") for name in names if name.startswith("--")}
        short = next((name[1:] for name in names if not name.startswith("--")), "")
        action = next((key.value for key in call.keywords if key.arg == "action"), None)
        by_variable = isinstance(action, ast.Name) and action.id in _READ_FROM_VARIABLES
        found[name] = short, f"PET_{name.upper()}" if by_variable else ""
    return found
