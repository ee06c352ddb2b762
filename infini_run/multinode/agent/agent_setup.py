"""What an agent does before its ranks start: check that the head's words fit this node, and say what the node is
like."""

from __future__ import annotations

import infini_run.lean_os as os
from infini_run.errors import LinkError, UsageError
from infini_run.multinode.link.agent_options import WorkerNeeds, options_of_agents, working_directory
from infini_run.multinode.link.connection import TOKEN
from infini_run.multinode.link.record_codec import decode_record
from infini_run.record import record, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from infini_run.options.launch_options import Options
    from infini_run.plan.model import Command, FoundProgram, Plan, RankRange

# By these the head decides about the whole job: flags, with where a launch has their values.
_HEAD_DECIDES = {
    "max_restarts": "max_restarts",
    "restart_delay": "restart_delay_s",
    "restart_window": "restart_window_s",
    "max_no_progress": "max_no_progress",
    "join_window": "join_window_s",
    "on_join": "on_join",
    "max_node_failures": "max_node_failures",
}


@record
class NodeSetup:
    """What stays the same over all attempts on this node.

    Args:
        options: those of this node.
        commands: each program, at its path here.
        environ: the environment of the ranks, without what is each rank's own.
        cwd: where the ranks start.
        warnings: lines for this node's user.
        host: name of this node.
        nproc: number of its ranks.
        counts: how many of them each of several programs has.
        gpus: that its check looks at, and nobody may hold.
        log_dir: that its check looks at; empty: there is none.
        check_environ: the environment of its check.
    """

    options: Options
    commands: tuple[Command, ...]
    environ: dict[str, str]
    cwd: str
    warnings: tuple[str, ...]
    host: str
    nproc: int
    counts: tuple[int, ...]
    gpus: int
    log_dir: str
    check_environ: dict[str, str]


def prepare(spec: Mapping[str, Any], own: Options | None, own_environ: Mapping[str, str]) -> NodeSetup:
    """Change to the launch's directory, and find everything that ranks will need.

    Args:
        spec: the head's SPEC frame, checked.
        own: options of this node's own command line, if the user started it manually; else None.
        own_environ: the environment of this process.

    Raises:
        UsageError: the directory is missing, or two command lines contradict each other.
        ProgramError: the program cannot run here.
        DeviceError: the GPUs are not here.
    """
    from infini_run.environments.launcher_variables import close_inherited_on_exec, strip_launcher_environment
    from infini_run.options.launch_options import Options
    from infini_run.plan.program import inspect_node

    cwd = spec["cwd"] if own is None else working_directory()
    try:
        os.chdir(cwd)
    except OSError as error:
        here = os.uname().nodename
        raise UsageError(f"{cwd} on {here}: {error.strerror}; use a directory that every node has") from None
    environ = dict(own_environ)
    if not spec["is_by_hand"]:  # else the user started this one: what is set for MPI is for the ranks
        environ = strip_launcher_environment(environ)
        close_inherited_on_exec()
    environ |= spec["environ"]
    for name in (TOKEN, "INFINI_RUN_TOKEN_FILE"):
        environ.pop(name, None)
    options = decode_record(Options, spec["options"])
    warnings: tuple[str, ...] = ()
    if own is not None:
        _check_same(own, options)
        warnings = _idle_flags(own, options, spec["asked"])
        # the head has the terminal, stdin, and what it shows there
        options = replace(options_of_agents(own), live=options.live, stdin=options.stdin)
        options = options.on_node(own.node_rank) if own.programs else options
    commands = _find_commands(options, environ)
    if options.preload:
        from infini_run.plan.held_program import check_held

        check_held(commands[0], environ, f"--preload={','.join(options.preload)}")
    node = inspect_node(options, environ)
    needs = WorkerNeeds(**spec["workers"]) if spec["workers"] else _needs_of_ranks(options, node.nproc)
    check_environ = {**environ, **needs.environ}
    return NodeSetup(
        options=options,
        commands=commands,
        environ=environ,
        cwd=cwd,
        warnings=warnings,
        host=node.host,
        nproc=node.nproc,
        counts=node.counts,
        gpus=_count_gpus(needs, check_environ),
        log_dir=needs.log_dir and os.join(cwd, needs.log_dir),
        check_environ=check_environ,
    )


def _find_commands(options: Options, environ: Mapping[str, str]) -> tuple[Command, ...]:
    """Return what to execute for each program. One that has no rank here may be missing."""
    from infini_run.plan.model import Command
    from infini_run.plan.program import find_command

    commands = []
    for each in options.programs or (options,):
        if not each.nproc_per_node:
            commands.append(Command(file=each.program[0], argv=each.program))
            continue
        if each.cwd and not os.isdir(each.cwd):
            here = os.uname().nodename
            raise UsageError(f"cwd={each.cwd} of {each.name} is not a directory on {here}; use one that is there")
        variables = {**environ, **dict(each.env)}
        commands.append(
            find_command(each.program, variables, module=each.module, no_python=each.no_python, cwd=each.cwd)
        )
    return tuple(commands)


def _needs_of_ranks(options: Options, nproc: int) -> WorkerNeeds:
    return WorkerNeeds(gpus_per_proc=options.gpus_per_proc, nproc=nproc, log_dir=options.log_dir, environ={})


def _count_gpus(needs: WorkerNeeds, environ: Mapping[str, str]) -> int:
    """Raises DeviceError: there are none to count."""
    nproc = needs.nproc
    if needs.gpus_per_proc and isinstance(nproc, str):
        from infini_run.devices.visible import resolve_nproc

        nproc = resolve_nproc(nproc, environ, needs.gpus_per_proc)
    return needs.gpus_per_proc * nproc if isinstance(nproc, int) else 0


def check_version(spec: object) -> None:
    """Raises UsageError: the head is of another version, which may use other frames."""
    from infini_run.version import VERSION

    theirs = spec.get("version") if isinstance(spec, dict) else None
    if isinstance(theirs, str) and theirs != VERSION:
        here = os.uname().nodename
        raise UsageError(f"infini-run {VERSION} is on {here}, {theirs} on the head: run the same version on both")


def _check_same(own: Options, heads: Options) -> None:
    """Raises UsageError: the commands of two nodes differ where they must not."""
    for name, ours, theirs in (
        ("nnodes", _node_count(own), _node_count(heads)),
        ("spares", own.spares, heads.spares),
        ("master_port", own.master_port, heads.master_port),
        ("restart_scope", own.restart_scope, heads.restart_scope),
    ):
        if ours != theirs:
            raise UsageError(f"--{name}={ours} here, {theirs} on node 0; use the same on every node")
    programs = [[(each.name, each.on_nodes, each.ends_job) for each in options.programs] for options in (own, heads)]
    if programs[0] != programs[1] or own.one_world != heads.one_world:
        here, there = (", ".join(each.name for each in options.programs) or "none" for options in (own, heads))
        raise UsageError(
            f"--program: {here} here, {there} on node 0; use the same names, --on_nodes, --ends_job, and --one_world "
            "on every node"
        )


def _node_count(options: Options) -> str:
    """Return the value of --nnodes."""
    range_of = options.is_elastic and options.least_nodes < options.nnodes
    return f"{options.least_nodes}:{options.nnodes}" if range_of else str(options.nnodes)


def _idle_flags(own: Options, heads: Options, asked: Sequence[str]) -> tuple[str, ...]:
    """Return a line about flags of this command line that only have an effect in that of node 0, and one about logs
    that only its ranks have."""
    from infini_run.options.table import HEADS_OWN, TABLE

    idle = [f"--{name}" for name in HEADS_OWN if getattr(own, name) not in ("", "auto", "off") and name not in asked]
    for name, attribute in _HEAD_DECIDES.items():
        if getattr(own, attribute) not in (TABLE[name][0].default, getattr(heads, attribute)):
            idle.append(f"--{name}")
    if own.stdin not in (0, heads.stdin):
        idle.append(f"--stdin={own.stdin}")
    lines = [f"infini-run: {', '.join(idle)}: no effect here; set it on node 0"] if idle else []
    if heads.log_dir and not own.log_dir:
        lines.append("infini-run: --log_dir: set on node 0 only, so ranks of this node have no log; add it here")
    return tuple(lines)


def hello(setup: NodeSetup, engine_facts: Sequence[str], *, nothing_old_lives: bool) -> dict[str, Any]:
    """Return the fields of HELLO.

    Args:
        nothing_old_lives: no rank of the job's earlier attempts lives here.
        engine_facts: values of the variables that the engine asked for.
    """
    from infini_run.multinode.agent.old_world import machine_id
    from infini_run.version import VERSION

    return {
        "version": VERSION,
        "host": setup.host,
        "pid": os.getpid(),
        "start_ticks": _start_ticks(),
        "nproc": setup.nproc,
        "counts": list(setup.counts),
        "ports": free_ports(setup),
        "address": own_address(),
        "machine": machine_id(),
        "is_clear": nothing_old_lives,
        "facts": list(engine_facts),
    }


def free_ports(setup: NodeSetup) -> list[int]:
    """Return a free port for each program."""
    from infini_run.node.ports import free_port

    return [free_port() for _ in setup.commands]


def make_node_plan(setup: NodeSetup, launch: Mapping[str, Any]) -> tuple[Plan, Options]:
    """Return the plan of this node, and the options that belong to it.

    Args:
        launch: the head's LAUNCH frame, checked.
    """
    from infini_run.plan.planner import make_plan
    from infini_run.plan.program import error_folder, inspect_node, launch_folder

    options = replace(
        setup.options,
        nnodes=launch["nnodes"],
        node_rank=launch["node"],
        nproc_per_node=launch["nproc"],
        log_dir=_log_dir(setup, launch["restarts"]),
        master_addr=launch["master_addr"],
        master_port=launch["master_port"],
    )
    launch_id = launch["launch_id"]
    programs, spans = _found_programs(setup, options, launch)
    folder = launch_folder(options, launch_id, setup.environ)
    plan = make_plan(
        options,
        programs,
        (replace(inspect_node(options, setup.environ), host=launch["host"]),),
        launch_id=launch_id,
        environ=setup.environ,
        folder=folder,
        error_dir=error_folder(options, folder),
        may_use_terminal=False,
        spans=spans,
    )
    if launch["restarts"]:
        from infini_run.plan.next_attempt import with_new_launch_id

        ports = tuple(program.master_port for program in programs)
        plan = with_new_launch_id(plan, launch_id=launch_id, master_ports=ports, restarts=launch["restarts"])
    return plan, options


def _found_programs(
    setup: NodeSetup, options: Options, launch: Mapping[str, Any]
) -> tuple[tuple[FoundProgram, ...], tuple[RankRange, ...]]:
    """Return the programs, and the ranks of each on this node. Raises LinkError: the head knows others."""
    from infini_run.plan.model import FoundProgram, RankRange

    places = launch["programs"]
    if len(places) != len(options.programs):
        raise LinkError("what came over the link is not what infini-run sends: other programs")
    if not places:
        found = FoundProgram(options=options, command=setup.commands[0], master_port=options.master_port)
        return (found,), (RankRange(first=launch["first"], world_size=launch["world_size"], most=launch["most"]),)
    programs = tuple(
        FoundProgram(
            options=replace(program, logs=os.join(setup.cwd, program.logs)) if program.logs else program,
            command=command,
            master_port=place["port"],
            master_addr=place["addr"],
            hosts=tuple(place["hosts"]),
        )
        for program, command, place in zip(options.programs, setup.commands, places, strict=True)
    )
    spans = tuple(
        RankRange(
            first=place["first"],
            world_size=place["size"],
            most=place["most"],
            node=place["node"],
            nnodes=place["nnodes"],
        )
        for place in places
    )
    return programs, spans


def _log_dir(setup: NodeSetup, restarts: int) -> str:
    """Return the folder of an attempt's logs; "" without logs. If nodes may come and go, each attempt has a separate
    one. Two machines that append to one file of a network file system lose lines."""
    if not setup.options.log_dir:
        return ""
    folder = os.join(setup.cwd, setup.options.log_dir)
    return os.join(folder, f"attempt_{restarts + 1}") if setup.options.is_elastic else folder


def _start_ticks() -> str:
    """Return when this process started, in the kernel's ticks: together with the pid this names it and no other
    (proc(5), stat)."""
    try:
        with open("/proc/self/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[19].decode()
    except OSError:  # without /proc, nobody can find this process by them either
        return "0"


def own_address() -> str:
    """Return the address by which the head has reached this node, as sshd knows it (ssh(1), SSH_CONNECTION); else "".
    Slurm passes on the variable of a user's other login, so an address that is not this machine's has no effect."""
    words = os.own_environ().get("SSH_CONNECTION", "").split()
    if len(words) != 4:
        return ""
    from infini_run.multinode.link.tcp import can_bind

    return words[2] if can_bind(words[2]) else ""
