"""The imports of a preload, and what they leave that each fork is to have for itself.

The rule: a fork is as a process that has imported the modules itself. So a module is refused that reads, while it is
imported, what differs between ranks; generators of random numbers are seeded anew, unless an import has seeded them;
and forks have what imports have set: variables, sys.path, the directory. What cannot be seen stays as it is: a
generator that a module has made for itself, a variable that was read in C or copied with all others. Decision 57.

Two kinds of process use it: the zygote of functions (crews/spawn/zygote.py), and a user's command that is held
before its script. The second may run any CPython from 3.8 on, without infini_run.
"""

from __future__ import annotations

import atexit
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType, TracebackType
    from typing import Any

    Visit = Callable[[ModuleType], None]

_BLAS = "OPENBLAS_NUM_THREADS"
_DRAWN = 1600  # blocks of 624 numbers: who has drawn more than a million has surely seeded before
_EXITS = {  # what ends a process's own children and threads, and writes out its own logs
    "logging": "shutdown",
    "multiprocessing.util": "_exit_function",
    "torch.utils.data._utils": "_set_python_exit_flag",
}
_MOST_THREADS = 5  # that are named
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/davinci")


class Preload:
    """What was imported, and what it has done.

    Args:
        variables: Names that the plan of a launch sets for a rank or an attempt, but for the launch marker.
        flag: How the user asked for it, for messages.
        import_one: Imports a module by name, and returns what that has raised.
    """

    def __init__(
        self, variables: Collection[str], flag: str, import_one: Callable[[str], BaseException | None]
    ) -> None:
        self._variables = frozenset(variables)
        self._flag = flag
        self._import_one = import_one
        self._drawn = {name: kind() for name, kind in _GENERATORS.items()}
        self._environ: dict[str, str | None] = {}  # that imports have set, or removed
        self._path: tuple[list[str], list[str]] = [], []  # that they have put first and last
        self._cwd = ""  # that they have changed to
        self._blas: list[Any] = []  # functions that set its number of threads, one per copy that was loaded
        self._exits = _ExitWatch()
        self.is_refused = False  # a module reads what it must not
        self.refused: list[tuple[str, str]] = []  # modules that do, or that cannot be imported, and why

    def run(self, names: Sequence[str]) -> str:
        """Import what forks will need; why that cannot be, or ""."""
        for name in self._variables:
            os.environ.pop(name, None)
        environ, path, cwd = dict(os.environ), list(sys.path), _cwd()
        watch = call_when_imported({name: drawn.begin for name, drawn in self._drawn.items()})
        with self._exits:
            problem = self._import(names)
        sys.meta_path.remove(watch)
        _flush()
        if problem:
            return problem
        self._environ = {
            name: os.environ.get(name)
            for name in environ.keys() | os.environ.keys()
            if environ.get(name) != os.environ.get(name)
        }
        self._path = _added(path, sys.path)
        self._cwd = "" if _cwd() == cwd else _cwd()
        for drawn in self._drawn.values():
            drawn.end()
        self._blas = _find_blas()
        return ""

    def _import(self, names: Sequence[str]) -> str:
        """Import the modules. One thread must be alive, but OpenBLAS (numpy) starts one per core while it loads
        unless this variable is set."""
        reads: list[str] = []
        before = os.environ.get(_BLAS)
        os.environ[_BLAS] = "1"
        try:
            for name in names:
                with _EnvironWatch(self._variables) as watch:
                    error = self._import_one(name)
                if error is not None:
                    self.refused = [(name, f"{type(error).__name__}: {error}")]
                    return f"{self._flag}: {name} cannot be imported: {type(error).__name__}: {error}"
                if watch.found:
                    module, variable = watch.found
                    self.refused.append((name, f"{module} reads {variable} during its import"))
                    reads.append(f"{self._flag}={name}: {module} reads {variable} during its import; drop {name}")
        finally:
            if before is None:
                os.environ.pop(_BLAS, None)
            else:
                os.environ[_BLAS] = before
        self.is_refused = bool(reads)
        return "; ".join(reads)

    @property
    def path_first(self) -> list[str]:
        """The folders that imports put first on sys.path."""
        return self._path[0]

    # ---- in a fork

    def set_environ(self, env: Mapping[str, str]) -> None:
        """Make os.environ equal to `env` with the imports' changes, and touch only variables that differ."""
        wanted = {name: value for name, value in {**env, **self._environ}.items() if value is not None}
        for name in os.environ.keys() - wanted.keys():
            del os.environ[name]
        for name, value in wanted.items():
            if os.environ.get(name) != value:
                os.environ[name] = value

    def path_after(self, path: Sequence[str]) -> list[str]:
        """Return sys.path after the imports, if it was `path` before them."""
        first, last = self._path
        return [*first, *path, *(folder for folder in last if folder not in path)]

    def make_own(self) -> None:
        """Make this process's what all forks had from the imports."""
        if self._cwd:
            os.chdir(self._cwd)
        self._exits.disown()
        _disown()
        _renew_main_thread()
        for name, drawn in self._drawn.items():
            if name in sys.modules:
                drawn.renew(sys.modules[name])
        self._set_threads()

    def _set_threads(self) -> None:
        """OpenBLAS, in what was loaded already, with the threads that it would have found for itself in a fresh
        process. OMP_NUM_THREADS was the same at the imports."""
        asked = os.environ.get(_BLAS) or os.environ.get("OMP_NUM_THREADS") or "0"
        count = int(asked) if asked.isdigit() else 0
        count = count or len(os.sched_getaffinity(0))
        if count > 1:
            for set_threads in self._blas:
                set_threads(count)


def _cwd() -> str:
    """Return the current directory; "" if it was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def _flush() -> None:
    """Write out what the imports have printed: each fork would, too."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, ValueError, OSError):  # None, closed, or nobody reads it
            continue
    import ctypes

    ctypes.CDLL(None).fflush(None)  # what was printed in C


def _added(before: list[str], after: list[str]) -> tuple[list[str], list[str]]:
    """Return the entries added before the first old entry, and those added after it."""
    known = set(before)
    first = next((at for at, folder in enumerate(after) if folder in known), len(after))
    return after[:first], [folder for folder in after[first:] if folder not in known]


def _find_blas() -> list[Any]:
    names = ("scipy_openblas_set_num_threads64_", "scipy_openblas_set_num_threads", "openblas_set_num_threads")
    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if "openblas" in line}
    if not paths:
        return []
    import ctypes

    libraries = [ctypes.CDLL(path) for path in paths]
    return [getattr(library, name) for library in libraries for name in names if hasattr(library, name)]


_not_ours: list[object] = []  # to free it would take longer than all else here


def _disown() -> None:
    """Forget the processes and the objects to finalize that the imports left: they are the zygote's."""
    if processes := sys.modules.get("multiprocessing.process"):
        processes._children = set()  # type: ignore[attr-defined]  # multiprocessing's forks do so, too
    if weakref := sys.modules.get("weakref"):
        _not_ours.append(weakref.finalize._registry)
        weakref.finalize._registry = {}
        weakref.finalize._registered_with_atexit = False


def _renew_main_thread() -> None:
    """Set the number of a fork's main thread, which `threading` does not do in each version."""
    threading = sys.modules.get("threading")
    if threading is not None and hasattr(threading.Thread, "_set_native_id"):
        threading.main_thread()._set_native_id()


class _ExitWatch:
    """Notes what the imports within its block register to be done at the end. That is the zygote's to do: it would be
    done once for each fork, to what all of them share (a temporary folder, say). But what concerns a fork alone is
    done as ever, in its order; so is what was registered before the imports, as by a .pth file."""

    def __init__(self) -> None:
        self._register = atexit.register
        self._registered: list[Any] = []
        self._is_first = False  # nothing was registered before

    def __enter__(self) -> None:
        self._is_first = atexit._ncallbacks() == 0

        def note_and_register(function: Any, *args: Any, **keywords: Any) -> Any:
            self._registered.append(function)
            return self._register(function, *args, **keywords)

        atexit.register = note_and_register  # type: ignore[assignment]

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        atexit.register = self._register

    def disown(self) -> None:
        """Drop those calls, in a fork."""
        if self._is_first:
            atexit._clear()
        for function in self._registered:
            atexit.unregister(function)
        for name in list(sys.modules):
            if name in _EXITS:
                function = getattr(sys.modules[name], _EXITS[name])
                if self._is_first or function in self._registered:
                    atexit.register(function)


# ---- what must not be forked


def find_threads() -> list[str]:
    """Return the names of the threads of this process without the main one: Python's names, else the kernel's."""
    threading = sys.modules.get("threading")
    names = {} if threading is None else {thread.native_id: thread.name for thread in threading.enumerate()}
    found = []
    with open("/proc/self/stat") as file:  # it may be of another PID namespace, with other numbers
        main = int(file.read().partition(" ")[0])
    for thread in sorted(set(map(int, os.listdir("/proc/self/task"))) - {main}):
        try:
            with open(f"/proc/self/task/{thread}/comm") as file:
                found.append(names.get(thread) or file.read().rstrip("\n"))
        except OSError:  # it is gone
            continue
    return found


def threads_text(names: Sequence[str]) -> str:
    """Return `2 threads of the imports still run (Thread-1, pool)`."""
    count, shown = len(names), ", ".join(sorted(set(names))[:_MOST_THREADS])
    return f"{count} thread{'s' * (count > 1)} of the imports still run{'s' * (count == 1)} ({shown})"


def find_device() -> str:
    """Return the path of an accelerator that this process has open; "": none."""
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if target.startswith(_DEVICES):
            return target
    return ""


def find_shared_memory() -> dict[str, str]:
    """Return what this process and its forks both write to, by address: semaphores of multiprocessing, say."""
    with open("/proc/self/maps", errors="surrogateescape") as maps:
        fields = [line.rstrip("\n").split(None, 5) for line in maps]
    return {words[0]: words[5] if words[5:] else "without a name" for words in fields if words[1][1::2] == "ws"}


# ---- when a module has been imported


def call_when_imported(visits: Mapping[str, Visit]) -> ImportWatch:
    """Call a function with each of these modules, by name: at once if it is loaded, else whenever it is imported."""
    for name, visit in visits.items():
        if name in sys.modules:
            visit(sys.modules[name])
    watch = ImportWatch(visits)
    sys.meta_path.insert(0, watch)
    return watch


class ImportWatch:
    """A finder that finds no module: it has functions called whenever some are imported. While there may be other
    threads it stays in sys.meta_path, which they may be going through."""

    def __init__(self, visits: Mapping[str, Visit]) -> None:
        self._visits = visits

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Leave it to the other finders, but for the loader of what is watched."""
        visit = self._visits.get(name)
        if visit is None:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                spec.loader = spec.loader and _VisitingLoader(spec.loader, visit)  # type: ignore[assignment]
                return spec
        return None


class _VisitingLoader:
    """The loader of one module, with which a function is called as soon as it has been executed."""

    def __init__(self, loader: Any, visit: Visit) -> None:
        self._loader = loader
        self._visit = visit

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._visit(module)


# ---- what is read


class _EnvironWatch:
    """Notes the first of some variables that is read from os.environ within its block, and the module whose import
    reads it: by `os.environ[...]`, `get`, `in`, os.getenv. A copy of all variables reads none of them, since none is
    set."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._getitem: Callable[[Any, Any], Any] = os._Environ.__getitem__
        self.found: tuple[str, str] | None = None

    def __enter__(self) -> _EnvironWatch:
        getitem = self._getitem

        def note_and_get(environ: Any, name: Any) -> Any:
            self._note(name)
            return getitem(environ, name)

        os._Environ.__getitem__ = note_and_get  # type: ignore[method-assign]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        os._Environ.__getitem__ = self._getitem  # type: ignore[method-assign]

    def _note(self, name: object) -> None:
        if not isinstance(name, (str, bytes)) or self.found is not None:
            return
        text = os.fsdecode(name)
        if text in self._names:
            frame = sys._getframe(2)
            while frame.f_back is not None and frame.f_code.co_name != "<module>":
                frame = frame.f_back
            self.found = str(frame.f_globals.get("__name__")), text


# ---- what is drawn


class _PythonRandom:
    """`random`, which seeds itself anew in each fork, whatever it was seeded with."""

    def __init__(self) -> None:
        self._state: Any = None

    def begin(self, module: ModuleType) -> None:
        """Note the state after its import."""
        self._state = module.getstate()

    def end(self) -> None:
        """Keep the state after all imports, but only if one of them seeded it."""
        if self._state is None:
            return
        random = sys.modules["random"]
        state = random.getstate()
        fresh = random.Random()
        fresh.setstate(self._state)
        is_drawn = _is_reached(state[1][:624], lambda: fresh.getstate()[1][:624], lambda: fresh.getrandbits(32 * 624))
        self._state = None if is_drawn else state

    def renew(self, module: ModuleType) -> None:
        """Restore the kept state, in a fork."""
        if self._state is not None:
            module.setstate(self._state)


class _NumpyRandom:
    """The generator behind the functions of `numpy.random`."""

    def __init__(self) -> None:
        self._state: Any = None
        self._is_seeded = False

    def begin(self, module: ModuleType) -> None:
        """Note the state after its import."""
        self._state = module.get_state()

    def end(self) -> None:
        """Find, after all imports, whether one of them seeded it."""
        if self._state is None:
            return
        numpy = sys.modules["numpy.random"]
        state = numpy.get_state()
        if not isinstance(state, tuple):  # another kind of generator: somebody has chosen it
            self._is_seeded = True
            return
        fresh = numpy.RandomState()
        fresh.set_state(self._state)
        self._is_seeded = not _is_reached(
            state[1].tolist(), lambda: fresh.get_state()[1].tolist(), lambda: fresh.bytes(4 * 624)
        )

    def renew(self, module: ModuleType) -> None:
        """Seed it anew in a fork, unless the imports seeded it."""
        if not self._is_seeded:
            module.seed()


class _TorchRandom:
    """torch's generator for the CPU, which has another seed in each process. Those of devices are made with the
    device, and so in each fork."""

    def __init__(self) -> None:
        self._seed: int | None = None
        self._is_seeded = False

    def begin(self, module: ModuleType) -> None:
        """Note the seed after its import."""
        if hasattr(module, "default_generator"):  # else it is another torch
            self._seed = module.initial_seed()

    def end(self) -> None:
        """Find, after all imports, whether one of them seeded it."""
        self._is_seeded = self._seed is None or sys.modules["torch"].initial_seed() != self._seed

    def renew(self, module: ModuleType) -> None:
        """Seed it anew in a fork, unless the imports seeded it."""
        if not self._is_seeded:
            module.default_generator.seed()  # not torch.seed(), which would seed what devices will have, too


_GENERATORS: dict[str, Any] = {"random": _PythonRandom, "numpy.random": _NumpyRandom, "torch": _TorchRandom}


def _is_reached(after: Sequence[int], key: Callable[[], Sequence[int]], draw_block: Callable[[], object]) -> bool:
    """Return whether drawing from another Mersenne twister leads to this state, without a new seed."""
    for _ in range(_DRAWN):
        if key() == after:
            return True
        draw_block()
    return False
