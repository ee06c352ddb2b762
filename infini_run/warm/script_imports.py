"""What --preload=auto imports: the modules that a script's own first lines import, found without running it.

It reads the imports at the top of the script, up to the first line that does anything else: a later import may depend
on what that line does. It takes modules of site-packages alone, and stops at one of the script's own. The syntax is
that of Python 3.8, and nothing of infini_run is imported: the hook of a held Python reads it by path.
"""

from __future__ import annotations

import ast
import os
import sys
from importlib.machinery import PathFinder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_MOST_BYTES = 1 << 22  # of a script


def find_script_imports(program: str, words: Sequence[str], folder: str | None) -> tuple[str, list[str]]:
    """Return the path of the script, and what it imports first: `module`, or `module:name,name`.

    Args:
        program: sys.argv[0] before the script runs: its path, -m, or -c.
        words: The command of this Python.
        folder: What will be the first entry of sys.path. None: nothing.
    """
    path = _module_path(_module_name(words), [folder or "", *sys.path]) if program == "-m" else program
    if os.path.isdir(path):
        path = os.path.join(path, "__main__.py")
    try:
        with open(path, "rb") as file:
            tree = ast.parse(file.read(_MOST_BYTES))
    except (OSError, ValueError, SyntaxError, RecursionError):  # the script's own error is the better one
        return path, []
    own = [os.path.realpath(each) for each in (folder or os.path.dirname(path) or ".", os.getcwd())]
    return path, list(_imports(tree.body, [folder or "", *sys.path], own))


def _imports(body: Sequence[ast.stmt], path: list[str], own: list[str]) -> Iterator[str]:
    for statement in body:
        if isinstance(statement, ast.Import):
            found = [(alias.name, "") for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom) and not statement.level and statement.module:
            found = [(statement.module, ",".join(alias.name for alias in statement.names if alias.name != "*"))]
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue  # a docstring
        else:
            return
        for module, names in found:
            place = _place(module.partition(".")[0], path, own)
            if place == "own":
                return
            if place == "site":
                yield f"{module}:{names}" if names else module


def _place(name: str, path: list[str], own: list[str]) -> str:
    """Return where a module is: of Python, of site-packages, or the user's own."""
    if name in sys.builtin_module_names:
        return "python"
    spec = PathFinder.find_spec(name, path)
    if spec is None:
        return "python" if name in sys.modules else "own"
    places = [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
    where = os.path.realpath(places[0]) if places else ""
    for site in _site_folders():
        if where.startswith(site + "/"):
            is_own = any(where.startswith(each + "/") and not (site + "/").startswith(each + "/") for each in own)
            return "own" if is_own else "site"
    return "python" if where.startswith(os.path.dirname(os.path.realpath(os.__file__)) + "/") else "own"


def _site_folders() -> list[str]:
    return [
        os.path.realpath(each) for each in sys.path if os.path.basename(each) in ("site-packages", "dist-packages")
    ]


def _module_name(words: Sequence[str]) -> str:
    """Return the name behind -m among the words of a python command."""
    rest = list(words[1:])
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            break
        if word == "--check-hash-based-pycs":
            rest = rest[1:]
        for at, letter in enumerate(word[1:] if not word.startswith("--") else "", 2):
            if letter in "mWX":
                value = word[at:] or (rest.pop(0) if rest else "")
                if letter == "m":
                    return value
                break
    return ""


def _module_path(name: str, path: list[str]) -> str:
    """Return the file of a module, without an import of its package; "" if it is not found."""
    parts, origin = name.split("."), ""
    for at in range(len(parts)):
        spec = PathFinder.find_spec(".".join(parts[: at + 1]), path)
        if spec is None:
            return ""
        path, origin = list(spec.submodule_search_locations or ()), spec.origin or ""
    return os.path.join(path[0], "__main__.py") if path else origin
