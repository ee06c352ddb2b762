"""The cffi definition of the core: cut from irun.h, so that nothing can drift.

The extension uses the limited API, so that one abi3 build serves CPython 3.10 and later. A free-threaded CPython has
no limited API (PEP 703), so there it is built for that one version.
IRUN_CFLAGS adds compiler flags (the sanitizer, coverage and warning builds of the Makefile).
"""

import glob
import os
import sysconfig

from cffi import FFI

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
FOLDERS = ("children", "group", "io", "spawn", "sys", "teardown")  # guard and start are programs of their own
SOURCES = sorted(path for folder in FOLDERS for path in glob.glob(os.path.join(HERE, folder, "*.c")))

with open(os.path.join(HERE, "include", "irun.h"), encoding="ascii") as file:
    definition = file.read().split("/* [cffi] */")[1]

is_limited = not sysconfig.get_config_var("Py_GIL_DISABLED")
flags = os.environ.get("IRUN_CFLAGS", "").split()

ffi = FFI()
ffi.cdef(definition)
ffi.set_source(
    "infini_run._irun",
    '#include "include/irun.h"',
    sources=[os.path.relpath(path, os.getcwd()) for path in SOURCES],
    include_dirs=[HERE],
    define_macros=[("_GNU_SOURCE", None), *([("Py_LIMITED_API", "0x030a0000")] if is_limited else [])],
    py_limited_api=is_limited,
    extra_compile_args=["-std=c11", "-O2", "-fvisibility=hidden", "-pthread", *flags],
    extra_link_args=["-pthread", *flags],
)
