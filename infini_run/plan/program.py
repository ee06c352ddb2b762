"""What this machine is for the job, looked at once, before the plan: the program, the GPUs, a port, a folder.

The search for the program is a shell's (exec(3)): a word with a slash is a path, any other is a name on PATH. Some
refusals of the kernel are known beforehand: no run bit, no `#!`, no interpreter. This module reports them, so that a
wrong name is one message and not N.
"""

from __future__ import annotations

import sys
from _stat import S_ISCHR, S_ISDIR

import infini_run.lean_os as os
from infini_run.errors import DeviceError, NotExecutable, ProgramMissing, UsageError, counted
from infini_run.plan.model import Command, Node
from infini_run.record import replace
from infini_run.value_types import OWN_CODE, PROBE_VARIABLE, PYTHON_FILES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from infini_run.devices.gpu import Accelerator
    from infini_run.devices.visible import VisibleGpus
    from infini_run.options.launch_options import OneProgram, Options

MEMORY = "/dev/shm"
PREFIX = "infini-run-"  # of a launch's folder; behind it the launch's id
NEW_S = 60.0  # a folder that is younger may be one whose launcher is about to lock it


DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin"
_LEAST_ROOM = 1 << 20  # bytes; of an error file torch writes some KiB
_NULL = os.makedev(1, 3)  # null(4)


def find_command(
    words: Sequence[str],
    environ: Mapping[str, str],
    *,
    module: bool = False,
    no_python: bool = False,
    cwd: str = "",
) -> Command:
    """Return the command behind the words after the flags.

    module: the first word is a Python module. no_python: execute a file of Python directly. Without it this
    interpreter runs the file, unless its #! line names something that is no Python. It also runs a folder with
    __main__.py, as python(1) does. cwd: where relative paths begin; empty: here. Raises ProgramMissing,
    NotExecutable; UsageError: as find_python.
    """
    name = words[0]
    _check_may_start()
    if module:
        return _of_python("-m", *words)
    path = _find(name, environ, os.abspath(cwd) if cwd else "")
    if not no_python and _is_for_python(name, path):
        return _of_python(path, *words[1:])
    _check_executable(name, path)
    return Command(file=path, argv=tuple(words))


def _check_may_start() -> None:
    """Check as check_may_start does, without its import where this process cannot be what it looks for. Raises
    UsageError."""
    words = sys.orig_argv
    may_be_it = not words or any(OWN_CODE in word for word in words)
    if (may_be_it and OWN_CODE not in sys._xoptions) or os.was_set(PROBE_VARIABLE):
        from infini_run.system.interpreter import check_may_start

        check_may_start()


def _of_python(*words: str) -> Command:
    from infini_run.system.interpreter import find_python

    python = find_python()
    return Command(file=python, argv=(python, "-u", *words))


def _is_for_python(name: str, path: str) -> bool:
    """Return whether Python runs it. Raises NotExecutable if that file is unreadable."""
    if path.endswith(PYTHON_FILES) and os.isfile(path):
        if not os.access(path, os.R_OK):
            raise NotExecutable(f"{name} cannot be read: permission denied", name)
        return names_python(first_line(path))
    return os.isdir(path) and os.isfile(os.join(path, "__main__.py"))


def _find(name: str, environ: Mapping[str, str], cwd: str) -> str:
    if not name:
        raise ProgramMissing("the program's name is empty; use a path or a command on PATH", name)
    path = os.join(cwd, name)
    if "/" in name:
        try:
            os.lstat(path)
        except PermissionError:
            raise NotExecutable(f"{name} cannot be executed: no permission for a folder of its path", name) from None
        except (OSError, ValueError):  # ValueError: a NUL within it
            raise _missing(name, f"does not exist (in {cwd or _here()})", environ, cwd) from None
        return path
    if name.endswith(PYTHON_FILES) and os.isfile(path):
        return path
    found = list(_candidates(name, environ, cwd))
    for path in found:
        if os.access(path, os.X_OK):
            return path
    if found:
        raise NotExecutable(f"{found[0]} has no run bit; run chmod +x {found[0]}", name)
    if os.isfile(path):
        way = f"./{name}" if os.access(path, os.X_OK) else _way(f"./{name}", first_line(path))
        raise ProgramMissing(f"{name} is not on PATH; use {way}", name)
    if os.isdir(path):
        return path
    where = f"is neither in {cwd or _here()} nor on PATH" if name.endswith(PYTHON_FILES) else "is not on PATH"
    raise _missing(name, where, environ, cwd)


def _missing(name: str, where: str, environ: Mapping[str, str], cwd: str) -> ProgramMissing:
    from infini_run.options.hints import of_program

    hint = of_program(name, environ, cwd)
    return ProgramMissing(f"{name} {where}" + (f"; {hint}" if hint else ""), name)


def _candidates(name: str, environ: Mapping[str, str], cwd: str) -> Iterator[str]:
    for folder in environ.get("PATH", DEFAULT_PATH).split(":"):
        path = os.join(os.join(cwd, folder or "."), name)
        if os.isfile(path):
            yield path


def _here() -> str:
    try:
        return os.getcwd()
    except OSError:
        return "a working directory that was deleted"


def _check_executable(name: str, path: str) -> None:
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        raise ProgramMissing(f"{path} cannot be reached: {error.strerror}", name) from None
    if S_ISDIR(mode):
        raise NotExecutable(f"{name} is a directory; use a program in it", name)
    if not os.access(path, os.X_OK):
        first = first_line(path)
        raise NotExecutable(f"{path} has no run bit; use {_way(path, first)}, or run chmod +x {path}", name)
    _check_shebang(name, path, first_line(path))


def first_line(path: str) -> bytes:
    """Return at most what the kernel reads of a file to decide how to run it (BINPRM_BUF_SIZE, Linux 5.1: 256)."""
    try:
        with open(path, "rb", buffering=0) as file:
            return (file.read(256) or b"").partition(b"\n")[0]
    except OSError:
        return b"\x7fELF"  # may be executed but not read: the kernel decides


def _way(path: str, first: bytes) -> str:
    """Return the words with its interpreter in front; without a #! line the name may say which one that is."""
    words = shebang_words(first)
    if words:
        return f"infini-run ... {os.fsdecode(b' '.join(words)).rstrip(chr(13))} {path}"
    if path.endswith(PYTHON_FILES):
        from infini_run.system.interpreter import executable_text

        return f"infini-run ... {executable_text()} {path}"
    return f"infini-run ... sh {path} (python3 for Python)"


def shebang_words(first: bytes) -> list[bytes]:
    """Return the words after #!, parted as the kernel parts them: by spaces and tabs, and by nothing else."""
    line = first[2:] if first.startswith(b"#!") else b""
    return [word for word in line.replace(b"\t", b" ").split(b" ") if word]


def names_python(first: bytes) -> bool:
    """Return whether a .py file is one of Python's: no #! line says otherwise. Of env(1) the word that it looks for
    counts. That is the first one that is no option (-S may have it in the same word) and sets no variable."""
    words = shebang_words(first)
    if not words:
        return not first.startswith(b"\x7fELF")
    named = words[0]
    if named.rpartition(b"/")[2] == b"env":
        rest = [word.partition(b"S")[2] if word[:1] == b"-" else word for word in words[1:]]
        named = next((word for word in rest if word and b"=" not in word), b"python")
    return named.rpartition(b"/")[2].startswith((b"python", b"pypy"))


def _check_shebang(name: str, path: str, first: bytes) -> None:
    if first.startswith(b"#!"):
        words = shebang_words(first)
        if not words:
            raise NotExecutable(f"{path} names no interpreter in its #! line; use {_way(path, first)}", name)
        interpreter = os.fsdecode(words[0])
        if not os.exists(interpreter):
            shown = interpreter.replace("\r", "\\r")
            hint = "; the file has DOS line ends" if first.endswith(b"\r") else ""
            raise NotExecutable(f"{path} needs the interpreter {shown}, which does not exist{hint}", name)
        if len(words) == 2 and interpreter.endswith("/env") and words[1].endswith(b"\r"):
            raise NotExecutable(
                f"{path} asks env for {os.fsdecode(words[1][:-1])}\\r: the file has DOS line ends", name
            )
    elif b"\0" not in first and not first.startswith(b"\x7fELF"):
        if _has_binfmt_rules():
            return
        raise NotExecutable(
            f"{path} has no #! line, so the kernel cannot run it; use {_way(path, first)}",
            name,
        )


def _has_binfmt_rules() -> bool:
    """Return whether the kernel may know a file by its name alone (binfmt_misc); else text without #! is ENOEXEC."""
    try:
        return any(entry not in ("register", "status") for entry in os.listdir("/proc/sys/fs/binfmt_misc"))
    except OSError:
        return False


def inspect_node(options: Options, environ: Mapping[str, str]) -> Node:
    """Return this machine's part in the job: its workers, their GPUs, the CPUs that they share or are bound to.

    Raises DeviceError: the GPUs asked for are not there, or not free. UsageError: fewer cores than workers.
    """
    counts: tuple[int, ...] = ()
    nproc = cpus = 0
    for program in options.programs or (options,):
        count = program.nproc_per_node
        if isinstance(count, str):
            from infini_run.devices.visible import resolve_nproc

            count = resolve_nproc(count, environ, program.gpus_per_proc)
        counts += (count,)
        nproc += count
    if (options.omp_num_threads == 0 or options.programs) and nproc != 1 and "OMP_NUM_THREADS" not in environ:
        cpus = len(os.sched_getaffinity(0))
        if cpus >= 2 * nproc:  # else it is one thread each, whatever the cgroup's quota
            from infini_run.system.cgroup import count_cpus

            cpus = count_cpus()
    node = Node(
        index=options.node_rank,
        host=os.uname().nodename,
        nproc=nproc,
        counts=counts if options.programs else (),
        cpus=cpus,
    )
    is_asked = options.gpus_per_proc or options.check_gpus != "off" or options.bind != "none"
    if is_asked or (options.programs and _asks_for_gpus(options)):
        return _with_devices(node, options, environ)
    return node


def _asks_for_gpus(options: Options) -> bool:
    return options.gpus_per_proc > 0 or any(program.gpus_per_proc for program in options.programs)


def _with_devices(node: Node, options: Options, environ: Mapping[str, str]) -> Node:
    """Return the node with the GPUs and the binding of each worker."""
    asks = _asks_for_gpus(options)
    shares: tuple[tuple[Accelerator, ...], ...] = ()
    if asks or options.check_gpus != "off":
        from infini_run.devices.visible import find, likely_shares

        try:
            found = find(environ)
        except DeviceError as error:
            return _without_devices(node, options, error)
        shares = likely_shares(found, node.nproc)
        if asks:
            shares = _divide(found, options.programs or (options,), node.counts or (node.nproc,))
            names = tuple(tuple(gpu.name for gpu in gpus) for gpus in shares)
            node = replace(
                node, devices=names, uuids=tuple(map(_uuids, shares)), visible_devices_variable=found.variable
            )
        if options.check_gpus != "off":
            node = replace(node, notices=_notices(found, shares, options.check_gpus))
    elif options.bind != "none":
        shares = _shares_if_any(node.nproc, environ)
    if options.bind != "none":
        from infini_run.devices.cpu_binding import plan_bindings

        buses = [[gpu.bus_id for gpu in gpus] for gpus in shares]
        node = replace(node, cpu_bindings=plan_bindings(options.bind, node.nproc, buses))
    return node


def _divide(
    found: VisibleGpus, programs: Sequence[Options | OneProgram], counts: Sequence[int]
) -> tuple[tuple[Accelerator, ...], ...]:
    """Return the GPUs of each worker: those of the first program come first, and no GPU is given twice."""
    from infini_run.devices.visible import partition

    wanted = [count * program.gpus_per_proc for program, count in zip(programs, counts, strict=True)]
    if len(programs) > 1 and sum(wanted) > len(found.gpus):
        each = ", ".join(
            f"{count} of {program.name} with --gpus_per_proc={program.gpus_per_proc}"
            for program, count in zip(programs, counts, strict=True)
            if count
        )
        setting = "not set" if found.inherited is None else repr(found.inherited)
        raise DeviceError(
            f"{each} need {counted(sum(wanted), 'GPU')}, and {len(found.gpus)} can be used here ({found.variable} is "
            f"{setting})"
        )
    shares: list[tuple[Accelerator, ...]] = []
    for program, count in zip(programs, counts, strict=True):
        rest = replace(found, gpus=found.gpus[sum(len(gpus) for gpus in shares) :])
        shares += partition(rest, count, program.gpus_per_proc)
    return tuple(shares)


def _without_devices(node: Node, options: Options, error: DeviceError) -> Node:
    """Return the node without GPUs. It reports that only where the GPUs were only for a check, and the start goes
    ahead."""
    if options.virtual_local_rank:
        raise DeviceError(f"--virtual_local_rank: needs one GPU per rank: {error}")
    if _asks_for_gpus(options):
        raise DeviceError(f"--gpus_per_proc: {error}; drop it to run without GPUs")
    if options.check_gpus != "warn":
        raise DeviceError(f"--check_gpus={options.check_gpus}: {error}; use --check_gpus=warn")
    notice = f"--check_gpus: checked nothing: {error}"
    if options.bind == "none":
        return replace(node, notices=(notice,))
    from infini_run.devices.cpu_binding import plan_bindings

    return replace(node, notices=(notice,), cpu_bindings=plan_bindings(options.bind, node.nproc, ()))


def _uuids(gpus: Sequence[Accelerator]) -> tuple[str, ...]:
    known = tuple(gpu.uuid for gpu in gpus if gpu.uuid is not None)
    return known if len(known) == len(gpus) else ()


def _notices(found: VisibleGpus, shares: Sequence[Sequence[Accelerator]], mode: str) -> tuple[str, ...]:
    from infini_run.devices.in_use import check_gpus

    notice = check_gpus(found, [gpu for gpus in shares for gpu in gpus] or found.gpus, mode)
    return (notice,) if notice else ()


def _shares_if_any(nproc: int, environ: Mapping[str, str]) -> tuple[tuple[Accelerator, ...], ...]:
    """Return the GPUs that ranks will probably use, for a job that requests none, where that is known."""
    from infini_run.devices.visible import find, likely_shares, may_have_gpus

    try:
        return likely_shares(find(environ), nproc) if may_have_gpus() else ()
    except DeviceError:
        return ()


def unshared_streams() -> tuple[bool, bool]:
    """Return whether stdout and stderr are a terminal or /dev/null (or closed): lines there need no care."""
    return _is_unshared(1), _is_unshared(2)


def _is_unshared(fd: int) -> bool:
    try:
        status = os.fstat(fd)
    except OSError:
        return True
    return S_ISCHR(status.st_mode) and (status.st_rdev == _NULL or os.isatty(fd))


def is_port_in_use(port: int) -> bool:
    """Return whether somebody listens on a port at present; closed connections do not count. Without a descriptor
    for the question, it is not known to be in use."""
    import errno
    from _socket import AF_INET, SO_REUSEADDR, SOCK_STREAM, SOL_SOCKET, socket

    try:
        probe = socket(AF_INET, SOCK_STREAM)
    except OSError:
        return False
    try:
        probe.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
        probe.bind(("", port))
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    finally:
        probe.close()
    return False


def new_launch_id() -> str:
    """Return an id that is unique on this machine and all others. It separates leftover processes from strangers'."""
    return f"ir-{os.urandom(6).hex()}"


def absolute_flag_path(flag: str, path: str) -> str:
    """Return the absolute path of a flag's file.

    Args:
        flag: the name of the flag, for the message.
        path: as the user gave it.

    Raises:
        UsageError: the working directory is gone.
    """
    try:
        return os.abspath(path)
    except OSError:
        raise UsageError(
            f"--{flag}={path} cannot be found, because this directory was deleted; use an absolute path"
        ) from None


def launch_folder(options: Options, launch_id: str, environ: Mapping[str, str]) -> str:
    """Return the folder that a launch makes for its ranks' sockets, and removes at its end.

    In memory where possible: on a disk, removing an empty folder takes longer than creating a process. Not where
    TMPDIR says: whoever looks for a user's launches must know the place, and sockets need a short path.

    Args:
        options: What the user asked for.
        launch_id: The launch's id, which nobody can guess.
        environ: The launcher's environment, whose TMPDIR is the last resort.

    Returns:
        An absolute path, on the first file system that has room, else on the first that is writable: sockets need
        none. Empty: no file system takes a folder.
    """
    node = f"-{options.node_rank}" if options.nnodes > 1 else ""  # two nodes may be containers that share it
    full = ""
    for base in folder_bases(environ):
        if os.access(base, os.W_OK | os.X_OK):
            folder = os.join(base, f"{PREFIX}{launch_id}{node}")
            if has_room(base):
                return folder
            full = full or folder
    return full


def folder_bases(environ: Mapping[str, str]) -> list[str]:
    """Return where a launch's folder may be, the best place first."""
    return [base for base in (MEMORY, "/tmp", environ.get("TMPDIR", "")) if base[:1] == "/"]


def remove_launch_folder(folder: str) -> None:
    """Remove a launch's folder with what is in it. Without that, it needs no import."""
    try:
        os.rmdir(folder)
    except OSError:
        from infini_run.system.secure_files import remove_folder

        remove_folder(folder)


def is_folder_name(name: str) -> bool:
    """Return whether a launch may have given a folder this name (launch_folder). It is its id, that of an attempt
    (.1), or of workers within one, with its node. Or it is a name after a stranger had taken that (.ir-...)."""
    if not name.startswith(PREFIX):
        return False
    words = [_without_node(word) for word in name[len(PREFIX) :].split(".")]
    return _is_launch_id(words[0]) and all(word.isdecimal() or _is_launch_id(word) for word in words[1:])


def _without_node(word: str) -> str:
    last, _, node = word.rpartition("-")
    return last if last not in ("", "ir") and node.isdecimal() else word


def _is_launch_id(word: str) -> bool:
    return len(word) == 15 and word.startswith("ir-") and not word[3:].strip("0123456789abcdef")


def has_room(folder: str, files: int = 1, of_bytes: int = _LEAST_ROOM) -> bool:
    """Return whether a file system has inodes and blocks left for some files.

    statvfs(3): one without a limit reports 0 of 0. Quotas are unknown.

    Args:
        folder: Any folder of it.
        files: How many files.
        of_bytes: Bytes of all of them together.
    """
    try:
        found = os.statvfs(folder)
    except OSError:
        return True  # the file will tell
    has_blocks = not found.f_blocks or found.f_bavail * found.f_frsize >= of_bytes
    return has_blocks and (not found.f_files or found.f_favail >= files)


def error_folder(options: Options, folder: str) -> str:
    """Return where ranks leave error files: beside the logs, else in the launch's folder. Empty: nowhere."""
    return absolute_flag_path("log_dir", options.log_dir) if options.log_dir else folder
