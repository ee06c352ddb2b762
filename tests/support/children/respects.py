"""A rank that writes down all in which it could differ from one that was started otherwise: DIR/RANK.json.

Syntax of Python 3.8: any Python runs it. What differs between two launches (numbers of processes, ids) is left out,
or compared within the rank.
"""

import ctypes
import os
import sys

BEFORE = sorted(name for name in globals() if name not in ("ctypes", "os", "sys"))
MODULES = sorted(sys.modules)

import atexit  # noqa: E402
import gc  # noqa: E402
import json  # noqa: E402
import pickle  # noqa: E402
import random  # noqa: E402
import resource  # noqa: E402
import signal  # noqa: E402
import threading  # noqa: E402
import traceback  # noqa: E402
import warnings  # noqa: E402

OF_A_LAUNCH = ("INFINI_RUN_ID", "NOTIFY_SOCKET", "TORCHELASTIC_ERROR_FILE", "MASTER_PORT", "_")


class Pickled:
    """A class of __main__."""


def names(path):
    with open(path, "rb") as file:
        return [os.fsdecode(text) for text in file.read().split(b"\0")[:-1]]


def frames():
    frame, found = sys._getframe(1), []
    while frame is not None:
        found.append((os.path.basename(frame.f_code.co_filename), frame.f_code.co_name))
        frame = frame.f_back
    return found


def stream(one):
    buffer = one.buffer
    raw = getattr(buffer, "raw", buffer)
    return [
        type(one).__name__, one.name, one.mode, one.encoding, one.errors, one.line_buffering, one.write_through,
        one.isatty(), one.seekable(), one.fileno(), type(buffer).__name__, raw.name, raw.mode, raw.closefd,
        os.readlink(f"/proc/self/fd/{one.fileno()}").partition(":")[0],
    ]  # fmt: skip


def environment():
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_char_p
    seen = {name: value for name, value in os.environ.items() if name not in OF_A_LAUNCH}
    kernel = dict(text.split("=", 1) for text in names("/proc/self/environ"))
    return {
        "python": seen,
        "c": {name: os.fsdecode(libc.getenv(os.fsencode(name)) or b"") == value for name, value in seen.items()},
        "kernel": {name: value for name, value in kernel.items() if name not in OF_A_LAUNCH},
        "id": kernel["INFINI_RUN_ID"] == os.environ["INFINI_RUN_ID"],
    }


def status():
    kept = (
        "SigQ",
        "SigBlk",
        "SigIgn",
        "SigCgt",
        "Umask",
        "Cpus_allowed",
        "CapEff",
        "NoNewPrivs",
        "Seccomp",
        "Threads",
    )
    with open("/proc/self/status") as file:
        fields = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    return {name: fields.get(name, "").partition("/")[2] if name == "SigQ" else fields.get(name) for name in kept}


def parent_death():
    number = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(number), 0, 0, 0)
    return number.value


def respects():
    main = threading.main_thread()
    spec = sys.modules["__main__"].__spec__
    return {
        "argv": sys.argv, "orig_argv": getattr(sys, "orig_argv", None), "flags": repr(sys.flags),
        "xoptions": sys._xoptions, "warnoptions": sys.warnoptions, "path": sys.path,
        "executable": [sys.executable, sys.prefix, sys.exec_prefix, sys.base_prefix],
        "main": [BEFORE, __name__, __file__, spec and spec.name, type(__loader__).__name__, __package__],
        "frames": frames(), "stack": len(traceback.format_stack()),
        "pickle": pickle.loads(pickle.dumps(Pickled())).__class__ is Pickled,
        "handlers": [str(signal.getsignal(number)).partition(" at ")[0] for number in sorted(signal.valid_signals())],
        "status": status(), "parent_death": parent_death(),
        "limits": [resource.getrlimit(number) for number in range(16)],
        "priority": [os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)],
        "oom": open("/proc/self/oom_score_adj").read(),
        "group": os.getpgid(0) == os.getpid(), "session": os.getsid(0) == os.getsid(os.getppid()),
        "parent": open(f"/proc/{os.getppid()}/comm").read(),
        "cgroup": open("/proc/self/cgroup").read(), "cwd": os.getcwd(), "umask": status()["Umask"],
        "descriptors": sorted(fd for fd in map(int, os.listdir("/proc/self/fd")) if is_open(fd)),
        "streams": [stream(one) for one in (sys.stdin, sys.stdout, sys.stderr)],
        "same streams": [sys.stdin is sys.__stdin__, sys.stdout is sys.__stdout__, sys.stderr is sys.__stderr__],
        "stdin": sys.stdin.read() if "read" in sys.argv else None,
        "environment": environment(), "cmdline": names("/proc/self/cmdline"),
        "comm": open("/proc/self/comm").read(), "exe": os.readlink("/proc/self/exe"),
        "threads": [threading.active_count(), main.name, main.ident == threading.get_ident(),
                    getattr(main, "native_id", 0) == os.getpid()],
        "gc": [gc.isenabled(), gc.get_threshold(), gc.callbacks], "atexit": atexit._ncallbacks(),
        "hooks": [sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__,
                  [str(one).partition(" at ")[0] for one in sys.meta_path + sys.path_hooks]],
        "settings": [sys.getswitchinterval(), sys.getrecursionlimit()],
        "filters": repr(warnings.filters),
        "customized": [getattr(sys, "site_said", None), getattr(sys, "user_said", None)],
        "encodings": [sys.getfilesystemencoding(), sys.getfilesystemencodeerrors(), sys.stdout.encoding],
    }  # fmt: skip


def is_open(fd):
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    found = respects()
    random_number = random.random()
    found["modules"] = MODULES
    found["random"] = random_number
    folder = os.environ["RESPECTS"]
    with open(os.path.join(folder, os.environ["RANK"] + ".json"), "w") as file:
        json.dump(found, file, default=str, indent=1, sort_keys=True)
