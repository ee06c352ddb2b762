"""Holds a user's Python before its script: imports modules once, and returns in forks, which run the script.

The launcher starts the user's own command with this folder first on PYTHONPATH, so Python imports this module at the
end of its start. It restores what it has changed, runs the sitecustomize that it hides, imports, and waits. Only
a fork returns from here, and Python itself runs the script in it: no frame of infini-run is below (decision 66).

It runs in any CPython from 3.8 on, without infini_run. Nothing but a fork may leave it: Python would run the script
in the process that is held. What it says to the launcher (node/warm_zygote.py): a word, and a text.
"""

from __future__ import annotations

import marshal
import os
import sys
from stat import S_ISREG

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

    Request = dict[str, Any]

_VARIABLE = "INFINI_WARM_HOOK"  # set by the launcher; empty: PYTHONPATH was not set
_OURS = (_VARIABLE, "INFINI_RUN_ID")  # that differ in this process alone
_PR_SET_PDEATHSIG, _PR_SET_MM, _PR_SET_MM_MAP, _PR_GET_CHILD_SUBREAPER = 1, 35, 14, 37  # prctl(2)
_SIGKILL = 9
_STAT_ADDRESSES = (23, 24, 42, 43, 44, -1, 25)  # in /proc/PID/stat behind the name, in the order of prctl_mm_map
_kept: list[object] = []  # memory that the kernel reads: /proc/PID/cmdline and environ


def _restore_path() -> str:
    """Undo what the launcher has done to PYTHONPATH and so to sys.path. Return the folder of infini_run/warm."""
    folder = os.path.dirname(os.path.abspath(__file__))
    was_set = os.environ.pop(_VARIABLE, "")
    rest = [entry for entry in os.environ.get("PYTHONPATH", "").split(":") if entry != folder]
    if rest or was_set:
        os.environ["PYTHONPATH"] = ":".join(rest)
    else:
        os.environ.pop("PYTHONPATH", None)
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != folder]
    sys.path_importer_cache.pop(folder, None)
    return os.path.dirname(folder)


def _run_hidden() -> BaseException | None:
    """Import the sitecustomize that this module hides. Return what the import of this module is to raise."""
    ours = sys.modules.pop("sitecustomize", None)
    try:
        __import__("sitecustomize")
    except BaseException as error:
        return error
    finally:
        if sys.modules.get("sitecustomize") is ours:
            sys.modules.pop("sitecustomize", None)
    return None


class _Control:
    """The socket to the launcher: whole messages, and descriptors with a request."""

    def __init__(self) -> None:
        from _socket import socket

        self._fd = next(fd for fd in range(min(os.sysconf("SC_OPEN_MAX"), 1024) - 1, 2, -1) if not _is_open(fd))
        os.dup2(0, self._fd, inheritable=False)  # a high number: those of the imports are as in any process
        null = os.open("/dev/null", os.O_RDONLY)
        os.dup2(null, 0)
        if null != 0:
            os.close(null)
        self._socket = socket(fileno=self._fd)

    def send(self, word: str, text: str = "") -> None:
        data = f"{word} {text}".encode("utf-8", "surrogateescape")[: 1 << 16]
        self._socket.sendall(len(data).to_bytes(4, "big") + data)

    def receive(self) -> tuple[dict[str, Any], list[int]]:
        """Return the next request and its descriptors. The process ends if the launcher is gone."""
        head, fds = _receive_fds(self._socket, 4, 2)
        while head and len(head) < 4:
            head += self._receive(4 - len(head))
        data, size = b"", int.from_bytes(head, "big")
        while len(data) < size:
            data += self._receive(min(size - len(data), 1 << 20))
        if not head:
            os._exit(0)
        return marshal.loads(data), fds

    def _receive(self, size: int) -> bytes:
        data: bytes = self._socket.recv(size)
        if not data:
            os._exit(0)
        return data

    def close(self) -> None:
        self._socket.close()


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _receive_fds(socket: Any, size: int, count: int) -> tuple[bytes, list[int]]:
    """Return a piece of a message, and the descriptors with it. socket.recv_fds would forget its flags."""
    from _socket import CMSG_LEN, MSG_CMSG_CLOEXEC

    data, rights, _, _ = socket.recvmsg(size, CMSG_LEN(count * 4), MSG_CMSG_CLOEXEC)
    fds = []
    for _, _, packed in rights:
        fds += [int.from_bytes(packed[at : at + 4], sys.byteorder) for at in range(0, len(packed) // 4 * 4, 4)]
    return data, fds


def _read_strings(path: str) -> list[bytes]:
    with open(path, "rb") as file:
        return file.read().split(b"\0")[:-1]


def _load(folder: str, name: str) -> dict[str, Any]:
    """Return the names of a module beside this folder. It needs no infini_run, and gets no name in sys.modules."""
    path = os.path.join(folder, name + ".py")
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec")
    names = {"__name__": "_infini_run_warm_" + name, "__builtins__": __builtins__}
    exec(code, names)
    return names


# ---- before and after the imports


def _script_folder() -> str | None:
    """Return what Python will put first on sys.path for this command; None: nothing."""
    if getattr(sys.flags, "safe_path", False) or not sys.argv:
        return None
    program = sys.argv[0]
    if program == "-m":
        return os.getcwd()
    if program == "-c":
        return ""
    if os.path.isfile(program) and not program.endswith((".pyz", ".zip")):
        return os.path.dirname(os.path.realpath(program))
    return program


def _state(libc: Any) -> dict[str, object]:
    """Return what imports must leave as it is, by name."""
    import ctypes
    from _signal import SIG_DFL, getsignal, valid_signals

    with open("/proc/self/status") as file:
        status = dict(line.rstrip("\n").split(":", 1) for line in file if ":" in line)
    with open("/proc/self/limits") as file:
        limits = file.read()
    adopts = ctypes.c_int()
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(adopts), 0, 0, 0)
    handlers = [getsignal(number) or SIG_DFL for number in sorted(valid_signals())]
    return {
        "signal handlers": (status["SigIgn"], status["SigCgt"], handlers),
        "the signal mask": status["SigBlk"],
        "the working directory": os.readlink("/proc/self/cwd"),
        "the umask": status.get("Umask"),
        "the CPUs that it may use": sorted(os.sched_getaffinity(0)),
        "a resource limit": limits,
        "who adopts orphans": adopts.value,
    }


def _flags_of(fd: str) -> int:
    with open("/proc/self/fdinfo/" + fd) as file:
        return next(int(line.split()[1], 8) for line in file if line.startswith("flags:"))


def _descriptors() -> tuple[dict[str, str], dict[str, str]]:
    """Return what is open, by number, and separately the files that are only read."""
    found, read = {}, {}
    for name in os.listdir("/proc/self/fd"):
        try:
            flags = _flags_of(name)
            target = os.readlink("/proc/self/fd/" + name)
            is_file = S_ISREG(os.fstat(int(name)).st_mode)
        except OSError:  # the one that lists them
            continue
        if is_file and flags & os.O_ACCMODE == os.O_RDONLY:
            read[name] = target
        else:
            found[name] = target
    return found, read


def _open_anew(fd: int) -> None:
    """Give a file that is only read its own position: that of a descriptor from a fork is one for all.

    Raises OSError: it cannot be opened again.
    """
    flags = _flags_of(str(fd))
    if flags & os.O_PATH:
        return
    at, is_inheritable = os.lseek(fd, 0, os.SEEK_CUR), os.get_inheritable(fd)
    own = os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)
    os.lseek(own, at, os.SEEK_SET)
    os.dup2(own, fd, inheritable=is_inheritable)
    os.close(own)


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _find_refusal(
    imports: dict[str, Any],
    preload: Any,
    before: tuple[dict[str, object], dict[str, str], dict[str, str]],
    libc: Any,
) -> str:
    """Return why this process must not be forked after its imports; "" if it may be."""
    state, open_before, shared_before = before
    threads = imports["find_threads"]()
    if threads:
        text: str = imports["threads_text"](threads)
        return text
    device: str = imports["find_device"]()
    if device:
        return "the imports opened " + device
    left = [to for fd, to in _descriptors()[0].items() if open_before.get(fd) != to]
    if left:
        return f"the imports left {left[0]} open"
    shared = [name for at, name in imports["find_shared_memory"]().items() if at not in shared_before]
    if shared:
        return f"the imports made memory that forks share ({shared[0]})"
    if _has_children():
        return "the imports started a process"
    after = _state(libc)
    changed = [name for name in state if state[name] != after[name]]
    if changed:
        return "the imports changed " + changed[0]
    if preload.path_first:
        return f"the imports put {preload.path_first[0]} first on sys.path"
    return ""


def _stamps(names: list[str], folder: str | None) -> dict[str, tuple[int, int] | None]:
    """Return when the files of the imports changed: those of the named modules, and those below the script's
    folder."""
    wanted = {os.readlink("/proc/self/exe")}
    parents = {".".join(name.split(".")[: at + 1]) for name in names for at in range(name.count(".") + 1)}
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if isinstance(path, str) and (name in parents or (folder and path.startswith(folder + "/"))):
            wanted.add(path)
    return {path: _stamp(path) for path in wanted}


def _stamp(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


# ---- a fork


def _own_memory(libc: Any, argv: list[bytes], env: list[bytes]) -> bool:
    """Have /proc/PID/cmdline and environ show these (PR_SET_MM_MAP, no privilege needed). Return whether they do."""
    import ctypes

    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    strings = [b"".join(text + b"\0" for text in texts) for texts in (argv, env)]
    buffer = ctypes.create_string_buffer(b"".join(strings))
    _kept[:] = [buffer]
    start = ctypes.addressof(buffer)
    middle, end = start + len(strings[0]), start + len(strings[0]) + len(strings[1])
    values = [int(fields[at]) for at in _STAT_ADDRESSES] + [start, middle, middle, end, 0, 0xFFFFFFFF << 32]
    block = (ctypes.c_uint64 * 13)(*values)
    libc.sbrk.restype, libc.sbrk.argtypes = ctypes.c_void_p, (ctypes.c_ssize_t,)
    for _ in range(8):  # until nothing has moved the end of the heap meanwhile
        block[5] = libc.sbrk(0)
        if libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, block, ctypes.c_ulong(ctypes.sizeof(block)), 0) < 0:
            return False
        if block[5] == libc.sbrk(0):
            return True
    return False


def _find_bad_fork() -> str:
    """Return the accelerator that was used before the fork, as torch knows it; "" if none."""
    torch = sys.modules.get("torch")
    for name in ("cuda", "xpu"):
        is_bad = getattr(getattr(torch, name, None), "_is_in_bad_fork", None)
        if is_bad is not None and is_bad():
            return name
    return ""


def _renew_stdio() -> None:
    """Give sys.stdin, stdout and stderr what depends on the file below: its buffer, whether it is a terminal."""
    from _io import DEFAULT_BUFFER_SIZE, FileIO, TextIOWrapper

    streams: Any = sys.__stdin__, sys.__stdout__, sys.__stderr__
    for fd, stream in enumerate(streams):
        if type(stream) is not TextIOWrapper:
            continue
        buffer: Any = stream.buffer
        raw: Any = FileIO(fd, "wb" if fd else "rb", closefd=False)
        raw.name = stream.name
        is_buffered = hasattr(buffer, "raw")
        if is_buffered:
            size = raw._blksize if raw._blksize > 1 else DEFAULT_BUFFER_SIZE
            if sys.version_info >= (3, 14):
                size = max(min(size, 8 << 20), DEFAULT_BUFFER_SIZE)
            buffer.__init__(raw, size)
        else:
            buffer = raw
        stream.__init__(  # type: ignore[misc]
            buffer,
            stream.encoding,
            stream.errors,
            newline="\n",
            line_buffering=is_buffered and ((fd == 2 and sys.version_info >= (3, 9)) or raw.isatty()),
            write_through=stream.write_through,
        )


class _Held:
    """The process that is held: its imports, and the forks that leave it."""

    def __init__(self, control: _Control, folder: str) -> None:
        import ctypes

        self._control = control
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._warm_folder = folder
        self._imports = _load(folder, "imports")
        self._preload: Any = None
        self._argv = _read_strings(
            "/proc/self/cmdline"
        )  # a wrapper, or the kernel for a #! line, may have changed it
        self._wrapper: dict[str, str] = {}  # variables that a wrapper around this Python has set
        self._startup: dict[str, str] = {}  # that the start of this Python has set
        self._names: list[str] = []
        self._skipped: list[str] = []  # by --preload=auto
        self._files: list[int] = []  # that the imports have left open, and only read
        self._stamps: dict[str, tuple[int, int] | None] = {}

    def run(self, given: dict[str, str], hidden: BaseException | None) -> BaseException | None:
        """Import, then fork on request. Returns in a fork: what the module's import is to raise, or None."""
        self._startup = {name: value for name, value in os.environ.items() if given.get(name) != value}
        request, _ = self._control.receive()
        passed = dict(os.fsdecode(text).split("=", 1) for text in request["env"])
        self._wrapper = {name: value for name, value in given.items() if passed.get(name) != value}
        for name in _OURS:
            self._wrapper.pop(name, None)
        self._names, self._skipped = request["names"], request["skipped"]
        self._import(request["watched"], request["flag"])
        while True:
            request, fds = self._control.receive()
            if request["word"] == "check":
                changed = [path for path, stamp in self._stamps.items() if _stamp(path) != stamp]
                self._control.send("changed" if changed else "same", changed[0] if changed else "")
            elif len(fds) == 2 and self._fork(request, fds):
                return hidden

    def _import(self, watched: list[str], flag: str) -> None:
        import gc

        folder = _script_folder()
        open_before, read_before = _descriptors()
        before = _state(self._libc), open_before, self._imports["find_shared_memory"]()
        script = self._find_names(folder) if self._names == ["auto"] else ""
        if folder is not None:
            sys.path.insert(0, folder)

        refusals: dict[str, str] = {}

        def import_one(name: str) -> BaseException | None:
            error = _import_one(name)
            if error is None and script:
                refusal = _find_refusal(self._imports, self._preload, before, self._libc)
                if refusal:
                    refusals[name] = refusal
                    error = RuntimeError(refusal)
            return error

        self._preload = self._imports["Preload"](watched, flag, import_one)
        problem = self._preload.run(self._names)
        if folder is not None and folder in sys.path:
            sys.path.remove(folder)
        if problem and script:
            name, reason = self._preload.refused[0]
            self._end("skip", f"{name.partition(':')[0]} {refusals.get(name, reason)}")
        if problem:
            self._end("failed", problem)
        refusal = _find_refusal(self._imports, self._preload, before, self._libc)
        if refusal:
            self._end("cold", refusal)
        self._files = [int(fd) for fd, to in _descriptors()[1].items() if read_before.get(fd) != to]
        try:
            for fd in self._files:
                _open_anew(fd)
        except OSError as error:
            self._end("cold", f"the imports left a file open that cannot be opened again: {error}")
        if not self._can_own_memory():
            self._end("cold", "this kernel does not show a fork's own command line")
        names = [name.partition(":")[0] for name in self._names]
        self._stamps = _stamps(names, folder)
        if script:
            self._stamps[script] = _stamp(script)
        gc.collect()
        gc.freeze()
        cpu_ms, modules = sum(os.times()[:4]) * 1000, ",".join(dict.fromkeys(names))
        self._control.send("ready", f"{cpu_ms:.0f} {modules}")

    def _find_names(self, folder: str | None) -> str:
        """Find the modules for --preload=auto. Return the path of the script."""
        words = [os.fsdecode(word) for word in self._argv]
        script, names = _load(self._warm_folder, "script_imports")["find_script_imports"](sys.argv[0], words, folder)
        self._names = [name for name in names if name.partition(":")[0] not in self._skipped]
        if not self._names:
            why = "can be preloaded" if names else "is imported by the first lines of the script"
            self._end("cold", f"no module of site-packages {why}")
        return str(script)

    def _can_own_memory(self) -> bool:
        return _own_memory(self._libc, self._argv, _read_strings("/proc/self/environ"))

    def _end(self, word: str, text: str) -> None:
        self._control.send(word, text)
        os._exit(0)

    def _fork(self, request: Request, fds: list[int]) -> bool:
        """Fork a process that forks all ranks and exits, so that they are orphans. Return whether this is a rank."""
        from _socket import socket

        threads = self._find_threads()  # that the last fork has started
        parent, middle = os.getpid(), os.fork()
        if middle == 0:
            self._control.close()
            try:
                self._fork_ranks(request, socket(fileno=fds[0]), fds[1], parent, threads)
            except BaseException as error:
                _die(error)
            return True
        for fd in fds:
            os.close(fd)
        _, status = os.waitpid(middle, 0)
        self._control.send("forked" if status == 0 else "broken", str(status))
        return False

    def _find_threads(self) -> str:
        """Return which threads a fork would lack, or "". One of them may hold the lock of an import for ever."""
        threads = self._imports["find_threads"]()
        return self._imports["threads_text"](threads) if threads else ""

    def _fork_ranks(self, request: Request, exchange: Any, gate: int, parent: int, threads: str) -> None:
        """Fork the ranks, in the middle process. Return in each rank. What is run at a fork may start a thread."""
        from _signal import SIG_BLOCK, SIG_SETMASK, pthread_sigmask, valid_signals

        self._libc.prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
        mask = pthread_sigmask(SIG_BLOCK, valid_signals())
        bad = _find_bad_fork()
        if bad:
            _refuse(exchange, f"the imports used torch.{bad}")
        for _ in range(request["count"]):
            data, fds = _receive_fds(exchange, 1 << 20, 3)
            if not data or len(fds) != 3:
                os._exit(1)
            threads = threads or self._find_threads()
            if threads:
                _refuse(exchange, threads)
            if os.fork() == 0:
                self._become(request, marshal.loads(data), fds, exchange, gate)
                pthread_sigmask(SIG_SETMASK, mask)  # last: what came meanwhile comes now
                return
            for fd in fds:
                os.close(fd)
        os._exit(0)

    def _become(
        self, request: dict[str, Any], rank: dict[str, Any], fds: list[int], exchange: Any, gate: int
    ) -> None:
        """Make this fork a rank: like a process that was started for it."""
        os.setpgid(0, 0)
        for number, fd in enumerate(fds):
            os.dup2(fd, number)
            os.close(fd)
        variables = dict(os.fsdecode(text).split("=", 1) for text in request["env"] + rank["env"])
        variables.update(self._wrapper)
        env = [os.fsencode(f"{name}={value}") for name, value in variables.items()]
        variables.update(self._startup)
        self._preload.set_environ(variables)
        self._preload.make_own()
        for fd in self._files:
            _open_anew(fd)
        for words in (sys.argv, getattr(sys, "orig_argv", [])):
            words += [os.fsdecode(word) for word in rank["more"]]
        if not _own_memory(self._libc, self._argv + rank["more"], env):
            os._exit(1)
        exchange.send(f"{rank['index']} {os.getpid()}".encode())
        exchange.close()
        if not os.read(gate, 1):
            os._exit(1)  # the launch was given up
        os.close(gate)
        self._libc.prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
        if os.getppid() != request["launcher"]:
            os._exit(128 + _SIGKILL)
        if rank["foreground"]:
            os.tcsetpgrp(0, os.getpid())
        _renew_stdio()


def _import_one(name: str) -> BaseException | None:
    from importlib import import_module

    module, _, names = name.partition(":")
    try:
        import_module(module)
        if names:  # as `from module import names`, which a package may load late
            __import__(module, fromlist=names.split(","))
            for each in names.split(","):
                getattr(sys.modules[module], each, None)
    except BaseException as error:
        return error
    return None


def _refuse(exchange: Any, why: str) -> NoReturn:
    """Answer the launcher in the middle process: its ranks start cold."""
    exchange.send(f"cold {why}".encode())
    os._exit(0)


def _die(error: BaseException) -> NoReturn:
    """Nothing but a fork that is ready leaves this module."""
    os.write(2, f"infini-run: --preload: {type(error).__name__}: {error}\n".encode("utf-8", "replace"))
    os._exit(1)


def _hold() -> BaseException | None:
    """Returns in forks: what the import of this module raises, or None."""
    try:
        texts = _read_strings("/proc/self/environ")
        given = dict(os.fsdecode(text).split("=", 1) for text in texts if b"=" in text)
        folder = _restore_path()
        given.pop("PYTHONPATH", None)
        if "PYTHONPATH" in os.environ:
            given["PYTHONPATH"] = os.environ["PYTHONPATH"]
        control = _Control()
        control.send("held")
        if sys.implementation.name != "cpython":
            control.send("cold", f"{sys.implementation.name} is not CPython")
            os._exit(0)
        hidden = _run_hidden()
        return _Held(control, folder).run(given, hidden)
    except BaseException as error:
        _die(error)


if _VARIABLE in os.environ:
    _hidden = _hold()
else:  # this folder is on somebody's path
    _restore_path()
    _hidden = _run_hidden()
if _hidden is not None:
    raise _hidden
