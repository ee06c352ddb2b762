"""The Python that runs this package's code and a user's script, and the words that start it.

Two rules. First, no process starts as a Python before it is known to be one. In a frozen program, or one that embeds
Python, `sys.executable` may be that program, which would start itself without end (docs/decisions/0058). Nothing else
in the package reads `sys.executable`.

Second, no import takes a module of that name in the user's directory (`types.py`, `hmac.py`) in place of the standard
library's or this package's. The code drops what `-c` puts first on `sys.path`, and what is relative there or in
PYTHONPATH, where an empty entry is the working directory. The standard library comes before all that is left. No
variable is set for it, so ranks' programs keep Python's own path.
"""

from __future__ import annotations

import sys

import infini_run.lean_os as os
from infini_run.errors import UsageError
from infini_run.value_types import OWN_CODE, PROBE_VARIABLE

_FIRST = f"import sys; sys._xoptions['{OWN_CODE}'] = True; "  # it runs; no child inherits what is set there
_OWN_PATH = (
    _FIRST + "sys.path[:] = [p for p in sys.path if p[:1] == '/']; import encodings, posix; "
    "lib = encodings.__path__[0].rpartition('/')[0]; "
    "cwd = posix.readlink('/proc/self/cwd') if posix.access('/proc/self/cwd', posix.F_OK) else '/'; "
    "given = posix.environ.get(b'PYTHONPATH', b'/'); "
    "given = given.decode(sys.getfilesystemencoding(), 'surrogateescape').split(':'); "
    "here = [__import__('os').path.normpath(cwd + '/' + p) for p in given if p[:1] != '/']; "
    "sys.path[:] = [p for p in sys.path if p in given or p not in here]; "
    "sys.path[:] = sorted({folders} + sys.path, key=lambda p: not p.startswith(lib) or '-packages' in p); "
    "del sys, encodings, posix, lib, cwd, given, here; "
)
# Without site and its .pth files, a fourth of an agent's start: found beside this module, or else as any Python finds
# it; and nobody looks for cycles in what modules are made of, then or later
_BARE = (
    "import gc; gc.disable(); "
    "exec('try:\\n import _cffi_backend, {module}\\nexcept ImportError:\\n import site\\n site.main()'); "
    "from {module} import {function}; gc.freeze(); gc.enable(); {function}()"
)
_MARK = "infini_run"
# -I ignores both: they may be where infini-run is
_INHERITED = (
    "import os, site, sys; sys.path[:0] = os.environ.get('PYTHONPATH', '').split(':'); "
    "sys.prefix == sys.base_prefix and site.addsitedir(site.getusersitepackages()); del os, site; "
)
_BUILDS = ("", "d", "t", "td", "m", "dm", "-dbg")  # behind python3.12 in the name of its file


def find_python() -> str:
    """Return the path of the Python to start: this interpreter, or the one that the caller named with
    `multiprocessing.set_executable`.

    An ordinary interpreter costs three system calls. Any other has to answer once per process whether it is a Python.

    Raises:
        UsageError: there is none; or infini-run started this process as a Python, and it runs something else.
    """
    check_may_start()
    executable, frozen = sys.executable or "", is_frozen()
    if not frozen and _is_running(executable):
        return executable
    from infini_run.system.python_probe import find_answering

    return find_answering(executable, foreign_words, is_frozen=frozen)


def is_foreign(python: str) -> bool:
    """Return whether a Python that `find_python` found needs infini-run installed, because it is not this
    interpreter."""
    return is_frozen() or python != sys.executable


def is_frozen() -> bool:
    """Return whether this program contains its Python and its modules, so that no other process could import them
    (PyInstaller, cx_Freeze, PyOxidizer, Nuitka)."""
    compiled = getattr(sys.modules.get("__main__"), "__compiled__", None)  # by Nuitka, which sets no sys.frozen
    return bool(
        getattr(sys, "frozen", False)
        or getattr(sys, "oxidized", False)
        or hasattr(sys, "_MEIPASS")
        or getattr(compiled, "standalone", False)
    )


def executable_text() -> str:
    """Return `sys.executable` for a message; it may be no Python."""
    return sys.executable or "python3"


def check_may_start() -> None:
    """Raise if this process was started as a Python for this package's code, and runs something else.

    Its program would launch, and start itself, without end.

    Raises:
        UsageError: that is the case.
    """
    if os.was_set(PROBE_VARIABLE) or (OWN_CODE not in sys._xoptions and _is_started_by_us()):
        raise UsageError(
            f"a launch in a process that infini-run started as a Python: {executable_text()} ran another program "
            "instead of infini-run's code; use another Python (multiprocessing.set_executable, --remote_python), and "
            "drop launches from sitecustomize and .pth files"
        )


def _is_started_by_us() -> bool:
    words = sys.orig_argv
    if not words:  # a program that embeds Python, and keeps its arguments for itself
        try:
            with open("/proc/self/cmdline", "rb") as file:
                words = os.fsdecode(file.read()).split("\0")
        except OSError:
            return False
    return any(_FIRST in word for word in words)


def _is_running(executable: str) -> bool:
    """Return whether that file runs this process, and has the name of a Python. A program that embeds Python runs
    itself, too, but by another name."""
    try:
        running = os.readlink("/proc/self/exe")
        if not _is_name_of_python(os.basename(running)):
            return False
        ours, theirs = os.stat(running), os.stat(executable)
        return (ours.st_ino, ours.st_dev) == (theirs.st_ino, theirs.st_dev)
    except (OSError, ValueError):  # deleted or replaced; no /proc; a NUL within it
        return False


def _is_name_of_python(name: str) -> bool:
    for word in ("python", "pypy", "graalpy"):
        if name.startswith(word):
            return name.removeprefix(word).lstrip("0123456789.") in _BUILDS
    return False


def own_path(folders: list[str]) -> str:
    """Return a line of Python that removes the working directory from `sys.path` and puts the standard library
    first.

    The line has no line ends and no double quotes, because every engine passes it on as a word.

    Args:
        folders: directories that come directly behind the standard library.
    """
    return _OWN_PATH.format(folders=folders)


def own_folders(*modules: str) -> list[str]:
    """Return the directories of this package, of what its core needs, and of more modules. An archive may have
    unpacked each into a separate one (pex)."""
    import _cffi_backend

    package = os.dirname(os.dirname(os.dirname(os.abspath(__file__))))
    folders = [package, os.dirname(os.abspath(_cffi_backend.__file__))]
    for module in modules:
        from importlib.util import find_spec

        spec = find_spec(module)
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            folders.append(os.dirname(os.abspath(folder)))
    return list(dict.fromkeys(folders))


def flags() -> list[str]:
    """Return the flags for an interpreter of this version: -P from Python 3.11, or -c would import `linecache` from
    the working directory (3.13)."""
    return ["-P"] if sys.version_info >= (3, 11) else []


def inherited_flags() -> list[str]:
    """Return `flags`, and those of this interpreter that a child inherits (-O, -X, -W, and so on, as multiprocessing
    passes them on)."""
    from subprocess import _args_from_interpreter_flags  # type: ignore[attr-defined]

    ours = ("-P", "-I") if _MARK in sys._xoptions else ("-P",)  # -I from own_python is for that process alone
    return [*flags(), *(flag for flag in _args_from_interpreter_flags() if flag not in ours)]


def own_python(call: str, python: str = "", *, inherits: bool = False) -> list[str]:
    """Return the command that calls a function of this package in a new interpreter, and leaves no name in __main__.

    Args:
        call: `MODULE.FUNCTION`.
        python: another interpreter than `find_python` finds, of any version; empty: that one.
        inherits: for functions: it finds cloudpickle as well, and has the flags of this interpreter (-O, -X, -W), if
            it is the same.

    Raises:
        UsageError: as for `find_python`.
    """
    module, _, function = call.rpartition(".")
    code = f"__import__('{module}', fromlist=['{function}']).{function}()"
    check_may_start()
    here = "" if python else find_python()
    if python or is_foreign(here):
        return [python or here, *foreign_words(code)]
    if inherits:
        return [here, *inherited_flags(), "-c", own_path(own_folders("cloudpickle")) + code]
    return [here, *flags(), "-c", own_path(own_folders()) + code]


def foreign_words(code: str) -> list[str]:
    """Return the arguments for a Python of any version that has infini-run installed. All versions know -I."""
    return ["-I", f"-X{_MARK}", "-c", _INHERITED + own_path([]) + code]


def bare_python(call: str) -> list[str]:
    """Return the command as `own_python` does, for this interpreter without `site` (`python -S`). That is a fourth of
    an agent's start.

    Args:
        call: `MODULE.FUNCTION`.

    Raises:
        UsageError: as for `find_python`.
    """
    python = find_python()
    if is_foreign(python):
        return own_python(call, python)
    module, _, function = call.rpartition(".")
    code = own_path(own_folders()) + _BARE.format(module=module, function=function)
    return [python, *flags(), "-S", "-c", code]
