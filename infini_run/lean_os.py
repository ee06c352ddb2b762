"""The part of `os` that plain launches and agents need: `os` itself, with what it imports, is a tenth of their start.

The functions are those of `os` and `os.path`, for str alone. The numbers of errors are those of `errno`, which makes
130. Modules that neither of the two loads import `os` and `errno`.
"""

from __future__ import annotations

import posix
import sys
from _stat import S_ISDIR, S_ISREG
from posix import (
    O_CLOEXEC,
    O_RDONLY,
    O_RDWR,
    P_ALL,
    R_OK,
    W_OK,
    WEXITED,
    WNOHANG,
    X_OK,
    _exit,
    access,
    chdir,
    chmod,
    close,
    dup,
    dup2,
    fstat,
    getcwd,
    geteuid,
    getpid,
    isatty,
    listdir,
    lstat,
    makedev,
    mkdir,
    open,  # noqa: A004
    pipe,
    read,
    readlink,
    register_at_fork,
    rmdir,
    scandir,
    sched_getaffinity,
    set_blocking,
    set_inheritable,
    stat,
    statvfs,
    strerror,
    sysconf,
    uname,
    urandom,
    waitid,
    write,
)

__all__ = [
    "E2BIG", "EADDRINUSE", "EAGAIN", "EBADF", "EINTR", "EMFILE", "ENFILE", "ENOEXEC", "ENOMEM", "EPERM", "ESRCH",
    "ETIME", "O_CLOEXEC", "O_RDONLY", "O_RDWR", "P_ALL", "R_OK", "WEXITED", "WNOHANG", "W_OK", "X_OK", "_exit",
    "abspath", "access", "basename", "chdir", "chmod", "close", "dirname", "drop_coerced_locale", "dup", "dup2",
    "encode_text", "exists", "fsdecode", "fsencode", "fstat", "getcwd", "geteuid", "getpid", "isatty", "isdir",
    "isfile", "join", "lexists", "listdir", "lstat", "makedev", "mkdir", "open", "own_environ", "pipe", "read",
    "readlink",
    "register_at_fork", "rmdir", "scandir", "sched_getaffinity", "set_blocking", "set_inheritable", "stat",
    "statvfs", "strerror", "sysconf", "uname", "urandom", "waitid", "was_set", "write",
]  # fmt: skip

# errno(3), on every machine that the core knows
EPERM, ESRCH, EINTR, E2BIG, ENOEXEC, EBADF, EAGAIN, ENOMEM = 1, 3, 4, 7, 8, 9, 11, 12
ENFILE, EMFILE, ETIME, EADDRINUSE = 23, 24, 62, 98

_COERCED = (b"C.UTF-8", b"C.utf8", b"UTF-8")  # what PEP 538 takes, in this order
_CODEC = sys.getfilesystemencoding(), sys.getfilesystemencodeerrors()


def fsencode(text: str) -> bytes:
    return text.encode(*_CODEC)


def encode_text(text: str) -> bytes:
    """Return a text for people as bytes, whatever the locale: where it lacks a character, as UTF-8. What ranks wrote
    may be in any encoding, and an error must not replace it."""
    try:
        return fsencode(text)
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogateescape")


def fsdecode(data: bytes) -> str:
    return data.decode(*_CODEC)


def own_environ() -> dict[str, str]:
    """Return a copy of this process's variables, as `dict(os.environ)`."""
    if "os" in sys.modules:  # then it may hold changes
        return dict(sys.modules["os"].environ)
    return {fsdecode(name): fsdecode(value) for name, value in posix.environ.items()}


def drop_coerced_locale() -> None:
    """Give this process the LC_CTYPE that it was started with, for who inherits its variables.

    In the C locale an interpreter sets LC_CTYPE itself (PEP 538), and every rank would see it. The kernel still has
    the variables of the start (/proc/PID/environ in proc(5)); without /proc nothing is known, and nothing is changed.
    """
    name = b"LC_CTYPE"
    if posix.environ.get(name) not in _COERCED:
        return
    try:
        fd = open("/proc/self/environ", O_RDONLY | O_CLOEXEC)
        try:
            data = b"".join(iter(lambda: read(fd, 1 << 16), b""))
        finally:
            close(fd)
    except OSError:
        return
    given = next((each[len(name) + 1 :] for each in data.split(b"\0") if each.startswith(name + b"=")), None)
    environ = sys.modules["os"].environb if "os" in sys.modules else None
    if given is not None:
        posix.putenv(name, given)
        posix.environ[name] = given
        if environ is not None:
            environ[name] = given
        return
    posix.unsetenv(name)
    del posix.environ[name]
    if environ is not None:
        environ.pop(name, None)


def was_set(variable: str) -> bool:
    """Return whether this process was started with a variable, whatever has become of it."""
    return fsencode(variable) in posix.environ


def join(folder: str, name: str) -> str:
    return name if not folder or name[:1] == "/" else f"{folder.removesuffix('/')}/{name}"


def dirname(path: str) -> str:
    folder = path[: path.rfind("/") + 1]
    return folder.rstrip("/") or folder


def basename(path: str) -> str:
    return path[path.rfind("/") + 1 :]


def abspath(path: str) -> str:
    """Raises OSError: the path is relative, and the working directory was deleted."""
    from os.path import abspath

    return abspath(path)


def lexists(path: str) -> bool:
    try:
        lstat(path)
    except (OSError, ValueError):
        return False
    return True


def exists(path: str) -> bool:
    return _mode(path) != 0


def isfile(path: str) -> bool:
    return S_ISREG(_mode(path))


def isdir(path: str) -> bool:
    return S_ISDIR(_mode(path))


def _mode(path: str) -> int:
    try:
        return stat(path).st_mode
    except (OSError, ValueError):  # ValueError: a NUL within it
        return 0
