"""A launch of one process by the core, as ranks are launched: whether it starts, has a guard, and has
its cgroup. What the core does shows what it decides."""

from __future__ import annotations

import os

from infini_run.doctor.finding import Finding, failing, note, ok
from infini_run.errors import StartError
from infini_run.record import record
from infini_run.system.cgroup import read_text
from infini_run.system.resource_limits import with_limit_hint
from infini_run.system.shell import find_program

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

_MOUNTS = ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")  # where the core looks for v2
_WITHOUT = (
    "infini-run finds leftover processes by process group, environment, and parents; if infini-run is SIGKILLed, a "
    "process that hides from all three survives"
)
_BOOTED = "/run/systemd/system"  # sd_booted(3)


@record
class TrialPlace:
    """Where the doctor runs.

    Args:
        is_root: whether it is root, to whom another manager delegates than to a user.
        is_process_1: whether the command is process 1 of its PID namespace, as in a container.
        has_systemd: whether systemd runs here, and delegates.
    """

    is_root: bool
    is_process_1: bool
    has_systemd: bool


def check_launch(environ: Mapping[str, str]) -> list[Finding]:
    """Launch a process, and see how the core did it. environ: INFINI_RUN_DEBUG applies, as in any launch."""
    try:
        from infini_run.core.group import GUARD
    except ImportError as error:
        return [failing("core", f"cannot be imported: {error}; nothing can be launched")]
    program = find_program("cat", environ.get("PATH") or os.defpath)
    if not program:
        return [note("launch", "no cat on PATH, so nothing was tried")]
    try:
        kinds, output = _launch(program, environ)
    except StartError as error:
        return [failing("launch", str(with_limit_hint(error)))]
    if "start_failed" in kinds:
        return [failing("launch", f"{program} cannot be executed here")]
    # this process is the child of the command, or of what the engine started: 1 is the command in a container
    place = TrialPlace(is_root=os.geteuid() == 0, is_process_1=os.getppid() == 1, has_systemd=os.path.isdir(_BOOTED))
    # so short a launch may be over before the core sees that the guard's exec failed
    has_guard = "unguarded" not in kinds and os.access(GUARD, os.X_OK)
    return [
        describe_guard(place, has_guard=has_guard),
        describe_cgroup(read_text("/proc/self/cgroup"), output, place),
    ]


def _launch(program: str, environ: Mapping[str, str]) -> tuple[set[str], str]:
    """Return the kinds of its events, and what the process read of its cgroups."""
    from infini_run.core.c_structs import PIPE, SpawnSpec
    from infini_run.core.group import GUARD, Group, debug_flags
    from infini_run.system.signal_numbers import SIGTERM
    from infini_run.value_types import MARKER_VARIABLE

    mark = os.fsencode(f"{MARKER_VARIABLE}=doctor-{os.urandom(6).hex()}")
    spec = SpawnSpec(0, os.fsencode(program), [os.fsencode(program), b"/proc/self/cgroup"])
    spec.stdio[1] = spec.stdio[2] = PIPE
    kinds: set[str] = set()
    group = Group(
        1,
        mark=mark,
        grace_s=0.0,
        stop_signal=SIGTERM,
        stop_scope="group",
        guard=GUARD,
        debug=debug_flags(environ),
    )
    try:
        group.spawn([spec], [mark])
        while not group.ended:
            kinds.update(event.kind for event in group.run_once())
            if not group.ended:
                group.wait(None)
        return kinds, group.tail(0).decode("utf-8", "replace")
    finally:
        group.close()


def describe_guard(place: TrialPlace, *, has_guard: bool) -> Finding:
    """Say whether launches have a guard, or need none (csrc/children/guard.c).

    Args:
        place: where the doctor runs.
        has_guard: a guard started for the process that was launched.
    """
    if place.is_process_1:
        only = "infini-run is process 1 here, and needs a guard only for jobs that may lose nodes (--spares)"
        if has_guard:
            return ok("launch", f"a process started; {only}")
        return note("launch", f"a process started, but not the guard; {only}")
    if has_guard:
        return ok("launch", "a process started with its guard, which ends ranks if infini-run is killed")
    return note("launch", "a process started, but not the guard: if infini-run is killed, its ranks survive")


def describe_cgroup(own: str, of_rank: str, place: TrialPlace) -> Finding:
    """Say which cgroups there are, and whether each rank has one, or needs none.

    Args:
        own: /proc/self/cgroup of this process.
        of_rank: the same of the process that was launched.
        place: where the doctor runs.
    """
    if any(line.startswith("0::") and "/infini-run-doctor-" in line for line in of_rank.splitlines()):
        text = "v2, and delegated: each rank has its cgroup, and everything left in it is killed at once"
        return ok("cgroup", text)
    if place.is_process_1:
        return ok(
            "cgroup",
            "none per rank, and none is needed: infini-run is process 1 here, and when it ends, the kernel ends all "
            "processes of its PID namespace",
        )
    has_v2 = any(line.startswith("0::") for line in own.splitlines()) and any(
        os.path.exists(f"{mount}/cgroup.controllers") for mount in _MOUNTS
    )
    if not own.strip():
        return note("cgroup", f"none is visible here: {_WITHOUT}")
    if not has_v2:
        return note("cgroup", f"v1, while a cgroup per rank needs v2: {_WITHOUT}")
    text = f"v2, but not delegated to this user: {_WITHOUT}"
    if place.has_systemd:
        command = "systemd-run --scope" if place.is_root else "systemd-run --user --scope"
        text += f"; {command} -p Delegate=yes infini-run ... delegates one"
    return note("cgroup", text)
