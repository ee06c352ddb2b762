"""The words that start a Python for our own code, on a path that has nothing of the working directory.

The one rule: a module of that name in the user's directory (`types.py`, `hmac.py`) is never imported in place of the
standard library's or ours. What `-c` puts first on `sys.path` is dropped, and so is what is relative there or in
PYTHONPATH, where an empty entry is the working directory; the standard library comes before all that is left. No
variable is set for it, so ranks' programs keep Python's own path.
"""

from __future__ import annotations

import os
import sys

_OWN_PATH = (
    "import sys; sys.path[:] = [p for p in sys.path if p[:1] == '/']; import os; lib = os.path.dirname(os.__file__); "
    "cwd = os.readlink('/proc/self/cwd') if os.path.exists('/proc/self/cwd') else '/'; "
    "given = os.environ.get('PYTHONPATH', '/').split(':'); "
    "here = [os.path.normpath(cwd + '/' + p) for p in given if p[:1] != '/']; "
    "sys.path[:] = [p for p in sys.path if p in given or p not in here]; "
    "sys.path[:] = sorted({folders} + sys.path, key=lambda p: not p.startswith(lib) or '-packages' in p); "
)
# Without site and its .pth files, a fourth of an agent's start: found where we are, or else as any Python finds it
_BARE = (
    "exec('try:\\n import _cffi_backend, {module}\\nexcept ImportError:\\n import site\\n site.main()'); "
    "from {module} import {function}; {function}()"
)
_MARK = "infini_run"
# -I ignores both: they may be where infini-run is
_INHERITED = (
    "import os, site, sys; sys.path[:0] = os.environ.get('PYTHONPATH', '').split(':'); "
    "sys.prefix == sys.base_prefix and site.addsitedir(site.getusersitepackages()); "
)


def own_path(folders: list[str]) -> str:
    """Return a line of Python that removes the working directory from `sys.path` and puts the standard library
    first.

    The line has no line ends and no double quotes, because every engine passes it on as a word.

    Args:
        folders: directories that come directly behind the standard library.
    """
    return _OWN_PATH.format(folders=folders)


def flags() -> list[str]:
    """Return the flags for an interpreter of this version: -P from Python 3.11, or -c would import `linecache` from
    the working directory (3.13)."""
    return ["-P"] if sys.version_info >= (3, 11) else []


def inherited_flags() -> list[str]:
    """Return `flags`, and those of this interpreter that a child is to have (-O, -X, -W and so on, as
    multiprocessing passes them on)."""
    from subprocess import _args_from_interpreter_flags  # type: ignore[attr-defined]

    ours = ("-P", "-I") if _MARK in sys._xoptions else ("-P",)  # -I from own_python is for that process alone
    return [*flags(), *(flag for flag in _args_from_interpreter_flags() if flag not in ours)]


def own_python(call: str, python: str = "") -> list[str]:
    """Return the command that calls a function of this package in a new interpreter.

    Args:
        call: `MODULE.FUNCTION`.
        python: another interpreter than this one, of any version (-I is known to all); empty: this one.
    """
    module, _, function = call.rpartition(".")
    code = f"from {module} import {function}; {function}()"
    if python:
        return [python, "-I", f"-X{_MARK}", "-c", _INHERITED + own_path([]) + code]
    return [sys.executable, *flags(), "-c", own_path([]) + code]


def bare_python(call: str) -> list[str]:
    """Return the command as `own_python` does, for this interpreter without `site` (`python -S`), which is a fourth
    of an agent's start.

    Args:
        call: `MODULE.FUNCTION`.
    """
    import _cffi_backend

    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    folders = [package, os.path.dirname(os.path.abspath(_cffi_backend.__file__))]
    module, _, function = call.rpartition(".")
    code = own_path(list(dict.fromkeys(folders))) + _BARE.format(module=module, function=function)
    return [sys.executable, *flags(), "-S", "-c", code]
