"""--isolate: the command, once more, as process 1 of a new PID namespace.

A worker of one, in a group of the same core: what stops it, waits for it and follows the terminal is what
does so for ranks. The kernel ends every process of the namespace with its process 1 (pid_namespaces(7)).
"""

from __future__ import annotations

import os

from infini_run.core.c_structs import STEPS, SpawnSpec
from infini_run.core.group import GUARD, Group, debug_flags, release_caller_descriptors
from infini_run.errors import StartError
from infini_run.record import replace
from infini_run.system.resource_limits import LIMITS
from infini_run.system.signal_numbers import SIGINT, SIGKILL, SIGQUIT, SIGTERM
from infini_run.value_types import MARKER_VARIABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from infini_run.core.c_structs import Event, ProcessState

_ALL_SIGNALS = 2**64 - 1  # blocked until it reads them: as process 1 it would never see one that came before
_SLACK_S = 15.0  # beyond the grace, which ranks and leftovers share: the inner command's own limits


def open_suspend_pipe() -> tuple[int, int]:
    """Make the pipe on which the inner command asks for a suspension.

    Returns:
        The end of this process, and the end of the inner command, which inherits it.

    Raises:
        StartError: There is no pipe.
    """
    try:
        ours, theirs = os.pipe()
    except OSError as error:
        raise StartError(f"--isolate: no pipe can be made: {error.strerror}", "pipe", error.errno or 0) from None
    os.set_inheritable(theirs, True)
    return ours, theirs


def run_isolated(
    command: Sequence[str],
    environ: Mapping[str, str],
    entry: ProcessState,
    *,
    grace_s: float,
    suspend_read_fd: int,
    folder: str,
    print_line: Callable[[str], None],
) -> tuple[int, int, bool]:
    """Run `command` as process 1 of a new PID namespace.

    Args:
        command: The program and its arguments.
        environ: Its environment.
        entry: The state of this process at its start.
        grace_s: Seconds that the inner command has for its ranks.
        suspend_read_fd: Where the inner command asks for a suspension of itself, and of this process with it.
        folder: The folder of its launch, which the guard removes after a SIGKILL of all. Empty: none.
        print_line: Gets a line for the user.

    Returns:
        Its exit code; the signal by which a key of the terminal stopped its job (0: none did). Third, whether the key
        reached the inner command alone.

    Raises:
        StartError: The kernel permits no PID namespace here.
    """
    argv = [os.fsencode(word) for word in command]
    spec = SpawnSpec(0, argv[0], argv)
    spec.isolate = spec.dies_with_us = True
    spec.foreground = os.isatty(0)
    group = Group(
        1,
        mark=os.fsencode(f"{MARKER_VARIABLE}={os.urandom(6).hex()}"),
        grace_s=grace_s + _SLACK_S,
        stop_signal=SIGTERM,
        stop_scope="leader",
        suspend_read_fd=suspend_read_fd,
        guard=GUARD if folder else None,
        folder=os.fsencode(folder),
        entry=replace(entry, blocked=_ALL_SIGNALS),
        is_last=True,
        debug=debug_flags(environ),
    )
    try:
        group.spawn([spec], [os.fsencode(f"{name}={value}") for name, value in environ.items()])
        release_caller_descriptors()
        return _run_to_end(group, print_line)
    except StartError as error:
        raise _refused(error.step, error.errno) from None
    finally:
        group.close()


def _run_to_end(group: Group, print_line: Callable[[str], None]) -> tuple[int, int, bool]:
    code, received, key, is_theirs = -1, 0, 0, False
    while not group.ended:
        for event in group.run_once():
            if event.kind == "start_failed":
                raise _refused(STEPS[event.code], event.signal)
            if event.kind == "signalled" and event.code:
                key, is_theirs = event.signal, event.worker >= 0
            if event.kind == "signalled" and not received:
                received = event.signal
            if event.kind == "exited":
                code = _code(event, received)
            if event.kind == "stuck":
                print_line(f"infini-run: process {event.pid} survived SIGKILL (state {chr(event.code)}); leaving it")
        group.wait()
    if code < 0:  # it was not started, or did not end
        code = 128 + received if received else 1
    return code, key, is_theirs


def _code(event: Event, received: int) -> int:
    """Return the exit code. It is the inner command's; of a signal to this process (SEGV, or TERM twice) that command
    saw only TERM, or its SIGKILL."""
    sent = received if received in (SIGINT, SIGQUIT) else SIGTERM
    if received and (event.signal == SIGKILL or event.code == 128 + sent):
        return 128 + received
    return 128 + event.signal if event.signal else event.code


def _refused(step: str, errno: int) -> StartError:
    needs = LIMITS.get(errno) or (
        "it needs root, or user namespaces and a /proc that may be mounted (not inside most containers, whose own "
        "PID namespace does the same)"
    )
    return StartError(f"--isolate: {step}: {os.strerror(errno)}; {needs}", step, errno)
