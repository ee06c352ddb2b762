"""The plan of the next attempt: new ids, ports, and files. Pure, and imported with a restart."""

from __future__ import annotations

from infini_run.plan.model import notify_address, renewed_address
from infini_run.record import replace
from infini_run.value_types import MARKER_VARIABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from infini_run.plan.model import Plan, Worker


def with_new_launch_id(plan: Plan, *, launch_id: str, master_ports: Sequence[int], restarts: int) -> Plan:
    """Return the plan of the next attempt: its launch id, and so its notify addresses, are new.

    Args:
        plan: The plan of the first attempt.
        launch_id: The new id.
        master_ports: The rendezvous port of each program.
        restarts: How many there were, with this one.
    """
    programs = tuple(replace(old, master_port=port) for old, port in zip(plan.programs, master_ports, strict=True))
    ports = {str(old.master_port): str(port) for old, port in zip(plan.programs, master_ports, strict=True)}
    new = {MARKER_VARIABLE: launch_id, "TORCHELASTIC_RESTART_COUNT": str(restarts)}
    workers = []
    for worker in plan.workers:
        notify = notify_address(plan.folder, launch_id, worker.rank)
        log, error_log, error_file = _files(worker, restarts)
        changed = {"NOTIFY_SOCKET": notify, "TORCHELASTIC_ERROR_FILE": error_file}
        env = tuple((name, changed.get(name) or _with_ports(name, value, ports)) for name, value in worker.env)
        workers.append(replace(worker, env=env, notify=notify, log=log, error_log=error_log, error_file=error_file))
    return replace(
        plan,
        launch_id=launch_id,
        programs=programs,
        env=tuple((name, new.get(name) or _with_ports(name, value, ports)) for name, value in plan.env),
        workers=tuple(workers),
    )


def with_restarted_program(plan: Plan, first: Plan, program: str, restarts: int) -> Plan:
    """Return the plan with another attempt of one of several programs. Its port stays: other programs know it.

    Args:
        plan: The plan of the launch.
        first: The plan with which it began.
        program: The name of the program.
        restarts: How many restarts it had, with this one.
    """
    workers = []
    for worker, its_first in zip(plan.workers, first.workers, strict=True):
        if worker.program == program:
            notify = renewed_address(its_first.notify, restarts)
            changed = {"TORCHELASTIC_RESTART_COUNT": str(restarts), "NOTIFY_SOCKET": notify}
            env = tuple((name, changed.get(name, value)) for name, value in worker.env)
            worker = replace(worker, env=env, notify=notify)
        workers.append(worker)
    return replace(plan, workers=tuple(workers))


def _with_ports(name: str, value: str, ports: Mapping[str, str]) -> str:
    """Return the value of a variable with the new rendezvous ports, by the old ones."""
    if name == "MASTER_PORT":
        return ports[value]
    if name != "JOB_PROGRAMS":
        return value
    import json

    return json.dumps([each | {"port": int(ports[str(each["port"])])} for each in json.loads(value)])


def _files(worker: Worker, restarts: int) -> tuple[str, str, str]:
    """Return its log, the log of stderr alone and its error file. Only in torchrun's layout they are new."""
    files = worker.log, worker.error_log, worker.error_file
    if not worker.error_log:
        return files
    from infini_run.options.torchrun import in_attempt

    return in_attempt(files[0], restarts), in_attempt(files[1], restarts), in_attempt(files[2], restarts)
