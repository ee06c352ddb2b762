"""--isolate: the command, once more, as process 1 of a PID namespace of its own.

A worker of one, in a group of the same core: what stops it, waits for it and follows the terminal is what
does so for ranks. The kernel ends every process of the namespace with its process 1 (pid_namespaces(7)).
"""

from __future__ import annotations

import os

from infini_run.errors import StartError
from infini_run.group import GUARD, STEPS, Group, Spec, debug_flags, settle_entry
from infini_run.plan import MARK
from infini_run.record import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from infini_run.group import Entry, Event

_ALL_SIGNALS = 2**64 - 1  # blocked until it reads them: as process 1 it would never see one that came before
_INT, _QUIT, _KILL, _TERM = 2, 3, 9, 15
_SPARE_S = 15.0  # beyond the grace, which ranks and strays share: what the inner command may take for its own bounds


def open_asking() -> tuple[int, int]:
    """Our end of the pipe on which the inner command asks to be stopped, and the inner one's, which we lose when
    we settle."""
    try:
        ours, theirs = os.pipe()
    except OSError as error:
        raise StartError(f"--isolate: no pipe can be made: {error.strerror}", "pipe", error.errno or 0) from None
    os.set_inheritable(theirs, True)
    return ours, theirs


def run_isolated(
    command: Sequence[str],
    environ: Mapping[str, str],
    entry: Entry,
    *,
    grace_s: float,
    asked_fd: int,
    folder: str,
    say: Callable[[str], None],
) -> int:
    """Run `command` so, and return what it exits with. asked_fd: where it asks to be stopped, and we with it. folder:
    its error files', which nobody in it can remove when we are SIGKILLed ("": none).

    Raises StartError: not permitted here.
    """
    argv = [os.fsencode(word) for word in command]
    spec = Spec(0, argv[0], argv, [])
    spec.isolate = spec.dies_with_us = True
    spec.foreground = os.isatty(0)
    group = Group(
        1,
        mark=os.fsencode(f"{MARK}={os.urandom(6).hex()}"),
        grace_s=grace_s + _SPARE_S,
        stop_signal=_TERM,
        stop_scope="leader",
        asked_fd=asked_fd,
        guard=GUARD if folder else None,
        folder=os.fsencode(folder),
        entry=replace(entry, blocked=_ALL_SIGNALS),
        is_last=True,
        debug=debug_flags(environ),
    )
    try:
        group.spawn([spec], [os.fsencode(f"{name}={value}") for name, value in environ.items()])
        settle_entry()
        return _follow(group, say)
    except StartError as error:
        raise _refused(error.step, error.errno) from None
    finally:
        group.close()


def _follow(group: Group, say: Callable[[str], None]) -> int:
    code, told = -1, 0
    while not group.ended:
        for event in group.step():
            if event.kind == "start_failed":
                raise _refused(STEPS[event.code], event.signal)
            if event.kind == "told" and not told:
                told = event.signal
            if event.kind == "exited":
                code = _code(event, told)
            if event.kind == "stuck":
                say(f"infini-run: process {event.pid} did not end by SIGKILL, state {chr(event.code)}; left")
        group.wait()
    if code < 0:  # it was not started, or did not end
        return 128 + told if told else 1
    return code


def _code(event: Event, told: int) -> int:
    """The inner command's; of what we were told (SEGV, or TERM twice) it saw only TERM, or its SIGKILL."""
    sent = told if told in (_INT, _QUIT) else _TERM
    if told and (event.signal == _KILL or event.code == 128 + sent):
        return 128 + told
    return 128 + event.signal if event.signal else event.code


def _refused(step: str, errno: int) -> StartError:
    return StartError(
        f"--isolate: {step}: {os.strerror(errno)}; it needs root, or user namespaces and a /proc "
        "that may be mounted (not inside most containers, whose own PID namespace does the same)",
        step,
        errno,
    )
