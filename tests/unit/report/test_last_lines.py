"""The report shows the message, also where a program prints its stack behind it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infini_run.report.last_lines import choose_line, choose_lines

WATCHDOG = (
    "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=ALLREDUCE) ran for 10000 milliseconds"
)
C10_FRAME = "frame #{n}: c10d::ProcessGroupNCCL::heartbeat() + 0x96 (0x7f0c in /venv/lib/libtorch_cuda.so)"

# what was printed, what has to be among five lines, and the one line
PRINTED = {
    "c10": (
        [
            "step 7: loss 0.3",
            f"[rank0]:[E1128 12:00:00.1 ProcessGroupNCCL.cpp:616] [Rank 0] {WATCHDOG}",
            "terminate called after throwing an instance of 'c10::DistBackendError'",
            f"  what():  [PG ID 0 Rank 0] Process group watchdog thread terminated with exception: {WATCHDOG}",
            "Exception raised from checkTimeout at ../ProcessGroupNCCL.cpp:607 (most recent call first):",
            *(C10_FRAME.format(n=n) for n in range(10)),
        ],
        [f"  what():  [PG ID 0 Rank 0] Process group watchdog thread terminated with exception: {WATCHDOG}"],
        f"  what():  [PG ID 0 Rank 0] Process group watchdog thread terminated with exception: {WATCHDOG}".strip(),
    ),
    "node": (
        [
            "/srv/a.js:1",
            "  throw new Error('boom')",
            "  ^",
            "Error: boom",
            *(f"    at Module._compile (node:internal/modules/cjs/loader:{n}:14)" for n in range(9)),
            "    at Object.<anonymous> (/srv/a.js:3:9)",
            "    at async main (file:///srv/a.js:9:1)",
            "    at node:internal/main/run_main_module:28:49",
            "Node.js v20.20.2",
        ],
        ["Error: boom", "Node.js v20.20.2"],
        "Error: boom",
    ),
    "java": (
        [
            'Exception in thread "main" java.lang.IllegalStateException: boom',
            *["\tat org.example.A.f(A.java:1)"] * 9,
            "\tat java.base/jdk.internal.reflect.DirectMethodHandleAccessor.invoke(Native Method)",
            "\t... 12 more",
        ],
        ['Exception in thread "main" java.lang.IllegalStateException: boom'],
        'Exception in thread "main" java.lang.IllegalStateException: boom',
    ),
    "rust": (
        [
            "thread 'main' (7) panicked at src/main.rs:1:37:",
            "boom",
            "stack backtrace:",
            "   0:     0x557d - std::backtrace_rs::backtrace::libunwind::trace::hd1e5",
            "                               at /rustc/00/library/std/src/backtrace_rs/libunwind.rs:116:5",
            "   1: rust_begin_unwind",
            "   2: <core::fmt::Arguments as core::fmt::Display>::fmt",
            "   3: main::f",
            "             at ./src/main.rs:1:37",
            "  37:                0x0 - <unknown>",
            "note: Some details are omitted, run with `RUST_BACKTRACE=full` for a verbose backtrace.",
        ],
        ["thread 'main' (7) panicked at src/main.rs:1:37:", "boom"],
        "thread 'main' (7) panicked at src/main.rs:1:37: boom",
    ),
    "go": (
        [
            "panic: boom",
            "goroutine 1 [running]:",
            *["main.f(0x3)", "\t/srv/a.go:4 +0x18"] * 4,
            "created by main.main in goroutine 1",
            "\t/srv/a.go:9 +0x1d",
            "exit status 2",
        ],
        ["panic: boom"],
        "panic: boom",
    ),
    "julia": (
        [
            "ERROR: LoadError: boom",
            "Stacktrace:",
            *[" [1] error(s::String)", "   @ Base ./error.jl:35"] * 4,
            " [2] top-level scope",
            "   @ /srv/a.jl:1",
            "in expression starting at /srv/a.jl:1",
        ],
        ["ERROR: LoadError: boom"],
        "ERROR: LoadError: boom",
    ),
    "faulthandler": (
        [
            "loaded",
            "Fatal Python error: Segmentation fault",
            "Current thread 0x00007f3c (most recent call first):",
            '  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at',
            '  File "train.py", line 5 in f',
            *['  File "train.py", line 4 in f'] * 9,
            "Extension modules: numpy.core._multiarray_umath (total: 1)",
        ],
        ["Fatal Python error: Segmentation fault", '  File "train.py", line 5 in f'],
        "Fatal Python error: Segmentation fault",
    ),
    "a sanitizer": (
        [
            "==7==ERROR: AddressSanitizer: heap-buffer-overflow on address 0x602000000014",
            *(f"    #{n} 0x5588 in f /srv/a.c:{n}" for n in range(6)),
            *(f"  Shadow byte {n}: fa" for n in range(9)),
            "==7==ABORTING",
        ],
        ["==7==ERROR: AddressSanitizer: heap-buffer-overflow on address 0x602000000014"],
        "==7==ERROR: AddressSanitizer: heap-buffer-overflow on address 0x602000000014",
    ),
    "glibc and Open MPI": (
        [
            "a.out: a.c:3: main: Assertion `n > 0' failed.",
            "[host:77] [ 0] /lib/x86_64-linux-gnu/libc.so.6(+0x3c050)[0x7fb1]",
            *["/lib/x86_64-linux-gnu/libc.so.6(abort+0xd3)[0x7fb0]"] * 6,
            "[host:77] *** End of error message ***".removeprefix("[host:77] "),
        ],
        ["a.out: a.c:3: main: Assertion `n > 0' failed."],
        "a.out: a.c:3: main: Assertion `n > 0' failed.",
    ),
    "V8": (
        [
            "[20215:0xa3b3ca0]       35 ms: Mark-Compact 20.1 (52.7) -> 20.1 (52.7) MB, 3.01 / 0.00 ms",
            "<--- JS stacktrace --->",
            "FATAL ERROR: Reached heap limit Allocation failed - JavaScript heap out of memory",
            "----- Native stack trace -----",
            *(f" {n}: 0xb78db{n} node::OOMErrorHandler(char const*, v8::OOMDetails const&) [node]" for n in range(9)),
            "10: 0x10fb205  [node]",
        ],
        ["FATAL ERROR: Reached heap limit Allocation failed - JavaScript heap out of memory"],
        "FATAL ERROR: Reached heap limit Allocation failed - JavaScript heap out of memory",
    ),
    "a Node error with fields": (
        [
            "node:internal/modules/cjs/loader:1210",
            "  throw err;",
            "  ^",
            "Error: Cannot find module './nosuch'",
            "Require stack:",
            "- /srv/[eval]",
            *(f"    at Module.require (node:internal/modules/cjs/loader:{n}:19)" for n in range(9)),
            "    at [eval]:1:1",
            "    at evalScript (node:internal/process/execution:133:3) {",
            "  code: 'MODULE_NOT_FOUND',",
            "  requireStack: [ '/srv/[eval]' ]",
            "}",
            "Node.js v20.20.2",
        ],
        ["Error: Cannot find module './nosuch'"],
        "Error: Cannot find module './nosuch'",
    ),
    "a crash in C below Go": (
        [
            "SIGSEGV: segmentation violation",
            "PC=0x46e2c1 m=0 sigcode=1 addr=0x0",
            "signal arrived during cgo execution",
            "goroutine 1 gp=0xc000002380 m=0 mp=0x5a3b40 [syscall]:",
            *["runtime.cgocall(0x46e2a0, 0xc00006ced0)", "\t/usr/lib/go/src/runtime/cgocall.go:167 +0x4b"] * 3,
            *(f"{name}    0x0" for name in ("rax", "rbx", "rcx", "r8 ", "r15", "rip", "rflags", "cs ")),
        ],
        ["SIGSEGV: segmentation violation"],
        "SIGSEGV: segmentation violation",
    ),
    "a Rust error and a stack overflow": (
        [
            *(f"step {n}" for n in range(9)),
            "thread 'main' (20351) has overflowed its stack",
            "fatal runtime error: stack overflow, aborting",
            "   0: 0x557d - std::rt::lang_start",
        ],
        ["fatal runtime error: stack overflow, aborting"],
        "fatal runtime error: stack overflow, aborting",
    ),
    "glibc's heap below Open MPI": (
        [
            *(f"step {n}" for n in range(9)),
            "free(): double free detected in tcache 2",
            "[host:77] *** Process received signal ***",
            "[host:77] Signal: Aborted (6)",
            "[host:77] Signal code:  (-6)",
            "[host:77] [ 0] /lib/x86_64-linux-gnu/libc.so.6(+0x3c050)[0x7fb1]",
            "[host:77] *** End of error message ***",
        ],
        ["free(): double free detected in tcache 2", "[host:77] Signal: Aborted (6)"],
        "free(): double free detected in tcache 2",
    ),
    "an exception of any name": (
        [
            "Traceback (most recent call last):",
            '  File "train.py", line 8, in f',
            '    raise queue.Empty("nothing came")',
            "          ^^^^^^^^^^^^^^^^^^^^^^^^^^^",
            "_queue.Empty: nothing came",
            *(f"worker {n} has stopped" for n in range(9)),
        ],
        ['  File "train.py", line 8, in f', "_queue.Empty: nothing came"],
        "worker 8 has stopped",
    ),
    "what Python ignores at its end": (
        [
            "Traceback (most recent call last):",
            '  File "train.py", line 3, in <module>',
            "    f(1)",
            "ValueError: boom",
            "Exception ignored in: <function Pool.__del__ at 0x7f3c>",
            "Traceback (most recent call last):",
            '  File "/usr/lib/python3.11/pool.py", line 271, in __del__',
            "    self.notify(1)",
            "TypeError: 'NoneType' object is not callable",
            "Exception ignored in: <_io.TextIOWrapper name='<stdout>' mode='w' encoding='utf-8'>",
            "BrokenPipeError: [Errno 32] Broken pipe",
        ],
        ['  File "train.py", line 3, in <module>', "ValueError: boom"],
        "BrokenPipeError: [Errno 32] Broken pipe",
    ),
    "NCCL beside an exception": (
        [
            '[rank3]:   File "train.py", line 41, in step',
            "[rank3]:     dist.all_reduce(x)",
            "[rank3]: torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:77, unhandled error",
            *(f"host:77:{n} [3] misc/socket.cc:484 NCCL WARN Connection closed by remote peer" for n in range(9)),
        ],
        ["[rank3]: torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:77, unhandled error"],
        "host:77:8 [3] misc/socket.cc:484 NCCL WARN Connection closed by remote peer",
    ),
    "NCCL alone": (
        [
            "host:77:90 [0] misc/socket.cc:484 NCCL WARN socketStartConnect: Connect to 10.0.0.1 failed",
            *(f"host:77:90 [0] NCCL INFO transport/net.cc:{n} -> 2" for n in range(9)),
        ],
        ["host:77:90 [0] misc/socket.cc:484 NCCL WARN socketStartConnect: Connect to 10.0.0.1 failed"],
        "host:77:90 [0] NCCL INFO transport/net.cc:8 -> 2",
    ),
    "CUDA alone": (
        ["CUDA error at main.cu:12: an illegal memory access was encountered", *(f"freed {n}" for n in range(9))],
        ["CUDA error at main.cu:12: an illegal memory access was encountered"],
        "freed 8",
    ),
    "noise after a Python exception": (
        [
            "[rank0]: Traceback (most recent call last):",
            '[rank0]:   File "train.py", line 3, in <module>',
            "[rank0]:     f(1)",
            "[rank0]: ValueError: boom",
            *(f"[W1128 socket.cpp:{n}] connection closed" for n in range(9)),
        ],
        ["[rank0]: ValueError: boom", "[W1128 socket.cpp:8] connection closed"],
        "[W1128 socket.cpp:8] connection closed",
    ),
}


@pytest.mark.parametrize("language", PRINTED)
def test_message_is_chosen_when_its_stack_follows(language):
    lines, wanted, _ = PRINTED[language]
    chosen = choose_lines(lines, 5)
    assert set(wanted) <= set(chosen)
    assert not any("frame #" in line or line.lstrip().startswith("at ") for line in chosen)


@pytest.mark.parametrize("language", PRINTED)
def test_one_line_is_message_when_its_stack_follows(language):
    lines, _, line = PRINTED[language]
    assert choose_line(lines).strip() == line


def test_python_traceback_is_shown_from_its_end():
    lines = [
        "Traceback (most recent call last):",
        '  File "train.py", line 9, in <module>',
        "    main(1)",
        '  File "train.py", line 5, in main',
        "    step(x)",
        "    ~~~~^^^",
        "ValueError: boom",
    ]
    assert choose_lines(lines, 5) == tuple(lines[-5:])
    assert choose_line(lines) == "ValueError: boom"


def test_place_of_exception_is_shown_before_noise():
    noise = [f"[W1128 socket.cpp:{n}] connection closed" for n in range(9)]
    raised = ['  File "train.py", line 5, in main', "    step(x)", "    ~~~~^^^", "ValueError: boom"]
    assert choose_lines(["Traceback (most recent call last):", *raised, *noise], 5) == (*raised, noise[-1])
    assert choose_lines([*raised, *noise], 2) == (raised[-1], noise[-1])


def test_ignored_exception_hides_no_message_after_it():
    ignored = ["Exception ignored in: <function A.__del__ at 0x7f3c>", "OSError: ignored"]
    lines = [*ignored, "ValueError: boom", *(f"step {n}" for n in range(9))]
    assert "ValueError: boom" in choose_lines(lines, 5)
    assert choose_lines([*(f"step {n}" for n in range(9)), *ignored], 5)[-2:] == tuple(ignored)


def test_exception_is_shown_when_torch_cannot_record_it():
    own = [
        "Traceback (most recent call last):",
        '  File "/venv/torch/distributed/elastic/multiprocessing/errors/__init__.py", line 367, in wrapper',
        "    return f(*args, **kwargs)",
        '  File "train.py", line 6, in main',
        "ValueError: boom",
    ]
    recorder = [
        "During handling of the above exception, another exception occurred:",
        "Traceback (most recent call last):",
        '  File "/torch/distributed/elastic/multiprocessing/errors/error_handler.py", line 77, in record_exception',
        '    with open(file, "w") as fp:',
        "OSError: [Errno 28] No space left on device",
    ]
    assert choose_lines([*own, *recorder], 5) == tuple(own)
    assert choose_line([*own, *recorder]) == "ValueError: boom"
    closing = [recorder[0], "OSError: [Errno 28] No space left on device"]
    assert choose_lines([*own, *closing, *recorder], 5) == tuple(own)
    other = [recorder[0], *recorder[1:2], '  File "train.py", line 9, in <module>', "KeyError: 1"]
    assert choose_lines([*own, *other], 4) == tuple(other)


def test_plain_lines_are_shown_from_their_end():
    lines = [f"at step {n}, with 3: fine (7)" for n in range(9)]
    assert choose_lines(lines, 5) == tuple(lines[-5:])
    assert choose_line(lines) == lines[-1]


def test_stack_alone_is_shown_from_its_end():
    lines = [C10_FRAME.format(n=n) for n in range(9)]
    assert choose_lines(lines, 5) == tuple(lines[-5:])
    assert choose_line(lines) == lines[-1]


every_line = st.one_of(
    st.sampled_from([line for lines, _, _ in PRINTED.values() for line in lines]), st.text(min_size=1, max_size=50)
)


@given(st.lists(every_line, max_size=30), st.integers(0, 25))
def test_chosen_lines_are_some_of_them_in_order(lines, most):
    chosen = choose_lines(lines, most)
    assert len(chosen) <= most
    rest = iter(lines)
    assert all(line in rest for line in chosen)
    assert len(chosen) == len(lines) or len(lines) > most
    assert bool(choose_line(lines)) == bool(lines)
