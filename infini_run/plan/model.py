"""The plan: every worker of every node that this launch starts, decided before anything starts.

Pure: what the machine is like (devices, CPUs, host names, a free port) comes in with the Node. A worker
sees `base environment - names we set + plan.env (the same for all) + worker.env (its own)`.
"""

from __future__ import annotations

from infini_run.errors import NO_MEMORY, StartError, UsageError, counted
from infini_run.record import made, record, replace
from infini_run.value_types import MARKER_VARIABLE, STDERR, STDOUT, streams_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any

    from infini_run.devices.cpu_binding import CpuBinding
    from infini_run.options.launch_options import OneProgram, Options

LABELLED = ("prefix", "fold")  # values of --console
_WORLD_LIMIT = 2**31 - 1
_ENOMEM = 12
CONTROL_PROTOCOL = 1  # one more whenever the control socket is asked in another way, or answers so
_LONGEST_PROGRAM = 1000  # characters of a command line that others are shown
JOB_NAME = "INFINI_JOB_NAME"
_JOB_VARIABLES = (JOB_NAME, "SLURM_JOB_ID", "PBS_JOBID")  # name the job in which a launch runs
_LONGEST_ADDRESS = 107  # of a socket in a folder: sun_path without its NUL (unix(7))

# What is for one process alone is not handed down: to a launch in a worker of another one, or in a service.
_NEVER = ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE", "WATCHDOG_USEC", "WATCHDOG_PID")


@record
class Command:
    """A program to execute: `file` is its path, unchanged; `argv` has its arguments."""

    file: str
    argv: tuple[str, ...]


@record
class Node:
    """One machine of the launch, and its devices. What it has by local rank counts the ranks of all programs through,
    in their order.

    Attributes:
        index: Its node rank.
        host: Its name.
        nproc: How many workers run on it.
        counts: How many of them each program has. Empty: there is one program.
        cpus: The CPUs that they share; 0: not known.
        devices: The GPU names of each local rank. Empty: --gpus_per_proc leaves the variable alone.
        uuids: The UUIDs of the same GPUs; empty for a rank with an unknown one.
        visible_devices_variable: The variable that gets the names.
        cpu_bindings: The binding of each local rank. Empty: without --bind.
        notices: Sentences for the user.
    """

    index: int
    host: str
    nproc: int
    counts: tuple[int, ...] = ()
    cpus: int = 0
    devices: tuple[tuple[str, ...], ...] = ()
    uuids: tuple[tuple[str, ...], ...] = ()
    visible_devices_variable: str = "CUDA_VISIBLE_DEVICES"
    cpu_bindings: tuple[CpuBinding, ...] = ()
    notices: tuple[str, ...] = ()


@record
class SingleRank:
    """The one worker of a node to start here, where an engine starts every rank itself and numbers it."""

    rank: int
    local_rank: int
    world_size: int


@record
class RankRange:
    """The ranks of one program on one node among its ranks on all nodes.

    Args:
        first: the lowest of them.
        world_size: ranks of the program on all nodes.
        most: ranks of the node that has most; 0: unknown.
        node: the rank of this node among the nodes that run one of several programs; -1: among all.
        nnodes: how many these are; 0: all.
    """

    first: int
    world_size: int
    most: int = 0
    node: int = -1
    nnodes: int = 0


@record
class Output:
    """The targets of one stream of a worker. Neither: nowhere. `piped`: through the launcher, which labels it, logs
    it, or keeps its last words. `unlabelled`: piped to the console, in whole lines without a label or a
    time."""

    console: bool
    log: bool
    piped: bool
    unlabelled: bool = False

    @property
    def way(self) -> str:
        """To the console: inherit, lines, prefix or none."""
        if not self.console:
            return "none"
        return "inherit" if not self.piped else "lines" if self.unlabelled else "prefix"


@record
class FoundProgram:
    """A program of the launch, found on this machine. A launch of one program is a launch of several with one, which
    has no name.

    Attributes:
        options: What the user asked for of it.
        command: What its ranks execute.
        master_port: Their rendezvous port; never 0.
        master_addr: The address of the node with that port. Empty: as in the options of the launch.
        hosts: The names of all nodes that run it. Empty: as the plan says.
    """

    options: Options | OneProgram
    command: Command
    master_port: int
    master_addr: str = ""
    hosts: tuple[str, ...] = ()


@record
class Worker:
    """One process of the plan.

    `rank` counts through all programs, in their order, and names the process wherever infini-run names one.
    `program_rank` counts within its `program`, which has a name if somebody named it. `name` is for people: rank 3,
    or trainer 3. `file` is executed in `cwd`; empty: in that of the launch. `stdin`: inherit, pipe (a copy of the
    launcher's) or null. `error_log`: of stderr alone; empty: `log` has both.
    """

    rank: int
    local_rank: int
    node: int
    program: str
    program_rank: int
    name: str
    file: str
    cwd: str
    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    devices: tuple[str, ...]
    cpu_binding: CpuBinding | None
    stdin: str
    stdout: Output
    stderr: Output
    label: str
    log: str
    error_log: str
    error_file: str
    notify: str
    uuids: tuple[str, ...] = ()  # of its devices, where they are known


@record
class Plan:
    """The whole answer. `world_size` counts the ranks of all programs; `env` is what they all see."""

    launch_id: str
    nodes: tuple[Node, ...]
    nnodes: int
    world_size: int
    master_addr: str
    programs: tuple[FoundProgram, ...]
    env: tuple[tuple[str, str], ...]
    workers: tuple[Worker, ...]
    folder: str = ""  # of the launch on this node, for sockets and error files; empty: it has none

    @property
    def master_ports(self) -> tuple[int, ...]:
        """The rendezvous port of each world."""
        ports = tuple(program.master_port for program in self.programs)
        is_one_world = any(name == "MASTER_PORT" for name, _ in self.env)
        return ports[:1] if is_one_world else ports

    def environ(self, worker: Worker, base: Mapping[str, str]) -> dict[str, str]:
        """Return the complete environment of a worker, over the launcher's own."""
        return self.base(base) | dict(self.env) | dict(worker.env)

    def base(self, base: Mapping[str, str]) -> dict[str, str]:
        """Return the launcher's environment without the names that the plan sets."""
        ours = {name for name, _ in self.env} | {name for name, _ in self.workers[0].env} | set(_NEVER)
        return {name: value for name, value in base.items() if name not in ours}


@record
class _Shared:
    """The common values of all workers of a program.

    options: of the launch. index: which program it is. first: how many ranks the programs before it have. spans: its
    ranks on each node. world_size: the ranks that its ranks see, on nnodes nodes. env: what they see, and those of
    other programs do not. has_launcher: no engine starts each rank itself.
    """

    options: Options
    program: FoundProgram
    index: int
    first: int
    spans: Sequence[RankRange]
    world_size: int
    nnodes: int
    master_addr: str
    master_port: int
    env: tuple[tuple[str, str], ...]
    launch_id: str
    folder: str
    error_dir: str
    threads: tuple[int, ...]
    copies_terminal: bool
    consoles: tuple[str, ...]
    is_even: bool
    has_launcher: bool
    outputs: dict[tuple[bool, int, int], tuple[Output, Output]]  # of this program: one pair for ranks that are alike


def make_plan(
    options: Options,
    programs: tuple[FoundProgram, ...],
    nodes: tuple[Node, ...],
    *,
    launch_id: str,
    environ: Mapping[str, str],
    folder: str = "",
    error_dir: str = "",
    stdin_is_terminal: bool = False,
    may_use_terminal: bool = True,
    unshared: tuple[bool, bool] = (False, False),
    task: SingleRank | None = None,
    spans: Sequence[RankRange] = (),
) -> Plan:
    """Decide everything about the ranks of some nodes.

    Args:
        options: What the user asked for.
        programs: The programs, at least one.
        nodes: The one node that this process starts, or all nodes of the launch.
        launch_id: The launch's id.
        environ: The launcher's environment.
        folder: The folder that this node makes for its ranks' sockets. Empty: it makes none.
        error_dir: Where workers may leave error files. Empty: nowhere.
        stdin_is_terminal: The launcher's stdin is one.
        may_use_terminal: A rank that is alone may have the terminal itself.
        unshared: Whether stdout, and stderr, are a terminal or /dev/null: there ranks write without the launcher
            in between, unless the user asked for it.
        task: The one rank that an engine starts itself. None: the launcher starts ranks.
        spans: The ranks of each program on the one node that there is. Empty: `nodes` are all nodes, or all have as
            many as the one.

    Raises:
        UsageError: Ranks that cannot be.
        StartError: Memory is too small for this number.
    """
    by_program: list[list[RankRange]] = []
    if options.programs:
        from infini_run.plan.rank_numbers import RankNumbers

        by_program = [[span] for span in spans] or [_spans_of_one(nodes, at) for at in range(len(programs))]
        numbers = RankNumbers([each.options.name for each in programs], [its[0].world_size for its in by_program])
        options = numbers.in_options(options)
        spans = (RankRange(first=0, world_size=numbers.world_size, most=max(node.nproc for node in nodes)),)
    spans = spans or _spans(options, nodes)
    first, world_size = nodes[0], task.world_size if task else spans[0].world_size
    _check_world(options, first.nproc, world_size, most=spans[0].most)
    is_alone = not nodes[1:]
    ranks = 1 if task else first.nproc if is_alone else sum(node.nproc for node in nodes)
    is_single = is_alone and first.nproc == 1
    whole = _Shared(
        options=options,
        program=programs[0],
        index=0,
        first=0,
        spans=spans,
        world_size=world_size,
        nnodes=options.nnodes,
        master_addr=programs[0].master_addr or options.master_addr,
        master_port=programs[0].master_port,
        env=(),
        launch_id=launch_id,
        folder=folder,
        error_dir=error_dir,
        threads=_omp_threads(programs[0].options, first, environ),
        copies_terminal=stdin_is_terminal and not (is_single and may_use_terminal),
        consoles=tuple(_console(options, ranks, is_unshared) for is_unshared in unshared),
        is_even=is_alone or all(node.nproc == first.nproc for node in nodes),
        has_launcher=task is None,
        outputs={},
    )
    parts: tuple[_Shared, ...] = (whole,)
    if options.programs:
        parts, env = _parts(whole, programs, nodes, by_program, environ)
    else:
        env = (*_common_env(whole, first), *_recorder_env(options, folder, error_dir, environ))
    workers = (_worker(whole, first, task.rank, task.local_rank),) if task else _workers(parts, nodes)
    if options.programs:
        _check_own_variables(workers, env, programs)
        workers = _inheriting_alike(workers, environ)
    return Plan(
        launch_id=launch_id,
        nodes=nodes,
        nnodes=options.nnodes,
        world_size=world_size,
        master_addr=options.master_addr,
        programs=programs,
        env=env,
        workers=workers,
        folder=folder,
    )


def _workers(parts: Sequence[_Shared], nodes: Sequence[Node]) -> tuple[Worker, ...]:
    try:
        return tuple(
            _worker(part, node, span.first + local_rank, local_rank, span.node)
            for part in parts
            for node, span in zip(nodes, part.spans, strict=True)
            for local_rank in range(node.counts[part.index] if node.counts else node.nproc)
        )
    except (MemoryError, SystemError):  # SystemError: CPython 3.11's, if there is no memory for a frame
        count = sum(node.nproc for node in nodes)
        text = f"{counted(count, 'rank')}: out of memory for their plan; {NO_MEMORY}"
        raise StartError(text, "the plan", _ENOMEM) from None


def _parts(
    whole: _Shared,
    programs: Sequence[FoundProgram],
    nodes: Sequence[Node],
    by_program: Sequence[Sequence[RankRange]],
    environ: Mapping[str, str],
) -> tuple[tuple[_Shared, ...], tuple[tuple[str, str], ...]]:
    """Return what is common to the ranks of each program, and what those of all programs see alike."""
    options, parts, first = whole.options, [], 0
    for index, (program, spans) in enumerate(zip(programs, by_program, strict=True)):
        world = programs[0 if options.one_world else index]
        counts = {node.counts[index] for node in nodes}
        parts.append(
            replace(
                whole,
                program=program,
                index=index,
                first=first,
                spans=spans,
                world_size=whole.world_size if options.one_world else spans[0].world_size,
                nnodes=whole.nnodes if options.one_world else spans[0].nnodes,
                master_addr=world.master_addr or options.master_addr,
                master_port=world.master_port,
                error_dir=program.options.logs
                or (f"{whole.error_dir}/{program.options.name}" if options.log_dir else whole.error_dir),
                threads=_omp_threads(program.options, nodes[0], environ),
                is_even=whole.is_even if options.one_world else len(counts) == 1,
                outputs={},
            )
        )
        first += spans[0].world_size
    envs = [_common_env(part, nodes[0]) for part in parts]
    own_counts = options.restart_scope == "program"
    alike = tuple(
        pair
        for pair in envs[0]
        if all(pair in env for env in envs) and not (own_counts and pair[0] == "TORCHELASTIC_RESTART_COUNT")
    )
    own = [tuple(pair for pair in env if pair not in alike) + part.program.options.env
           for part, env in zip(parts, envs, strict=True)]  # fmt: skip
    others = ("JOB_PROGRAMS", _describe_programs(parts, nodes))
    return tuple(replace(part, env=env) for part, env in zip(parts, own, strict=True)), (*alike, others)


def _describe_programs(parts: Sequence[_Shared], nodes: Sequence[Node]) -> str:
    """Return what each rank learns of all programs, as JSON: the module would take longer than the plan."""
    from _json import encode_basestring_ascii as quoted

    described = []
    for part in parts:
        program, size = part.program, part.spans[0].world_size
        name, addr = quoted(program.options.name), quoted(program.master_addr or part.options.master_addr)
        hosts = ", ".join(map(quoted, program.hosts or [node.host for node in nodes if node.counts[part.index]]))
        where = f'"addr": {addr}, "port": {program.master_port}'
        described.append(f'{{"name": {name}, "size": {size}, "hosts": [{hosts}], {where}}}')
    return f"[{', '.join(described)}]"


def _check_own_variables(
    workers: Sequence[Worker], common: Sequence[tuple[str, str]], programs: Sequence[FoundProgram]
) -> None:
    """Check that no program has a variable of the plan among those that the user gave it."""
    firsts = {worker.program: worker for worker in reversed(workers)}
    for program in programs:
        first = firsts.get(program.options.name)  # None: it has no rank here
        names = [name for name, _ in (*common, *first.env)] if first is not None else []
        for name, _ in program.options.env:
            if names.count(name) > 1:
                raise UsageError(f"env of {program.options.name}: {name} is set by infini-run; use another name")


def _inheriting_alike(workers: Sequence[Worker], environ: Mapping[str, str]) -> tuple[Worker, ...]:
    """Return the workers so that a variable that only some programs set is inherited by the ranks of the others: what
    is set for one rank is inherited by none (Plan.base)."""
    firsts = {worker.program: worker for worker in reversed(workers)}
    names = {index: {name for name, _ in worker.env} for index, worker in firsts.items()}
    ours = set().union(*names.values())
    inherited = {
        index: tuple((name, environ[name]) for name in sorted(ours - own) if name in environ)
        for index, own in names.items()
    }
    return tuple(
        replace(worker, env=worker.env + inherited[worker.program]) if inherited[worker.program] else worker
        for worker in workers
    )


def _spans(options: Options, nodes: Sequence[Node]) -> list[RankRange]:
    """Return the ranks of each node. Ranks count from node to node: those of all nodes before it come first."""
    if len(nodes) == 1:
        nproc = nodes[0].nproc
        return [RankRange(first=nodes[0].index * nproc, world_size=options.nnodes * nproc, most=nproc)]
    return spans_of([node.nproc for node in nodes])


def _spans_of_one(nodes: Sequence[Node], index: int) -> list[RankRange]:
    """Return the ranks of one of several programs on each node."""
    return spans_on([node.counts[index] for node in nodes])


def spans_on(counts: Sequence[int]) -> list[RankRange]:
    """Return the ranks of one of several programs on each node, from their numbers. Nodes without any don't count."""
    spans, at, nnodes = [], 0, sum(count > 0 for count in counts)
    for span, count in zip(spans_of(counts), counts, strict=True):
        spans.append(replace(span, node=at, nnodes=nnodes))
        at += count > 0
    return spans


def spans_of(counts: Sequence[int]) -> list[RankRange]:
    """Return the ranks of each node, from their numbers."""
    world_size, most, first = sum(counts), max(counts), 0
    spans = []
    for count in counts:
        spans.append(RankRange(first=first, world_size=world_size, most=most))
        first += count
    return spans


def _check_world(options: Options, nproc: int, world_size: int, *, most: int) -> None:
    """Check the world again, for a number of workers that the command line did not know (auto, gpu, cpu)."""
    if world_size > _WORLD_LIMIT:
        raise UsageError(f"{options.nnodes} nodes x {nproc} ranks are {world_size} ranks; use at most {_WORLD_LIMIT}")
    stdin = (options.stdin,) if isinstance(options.stdin, int) else ()
    asked: tuple[tuple[str, tuple[Any, ...], int, str], ...] = (
        ("--ranks_on_console", options.ranks_on_console or (), world_size, "ranks"),
        ("--local_ranks_filter", options.local_ranks_filter or (), most or nproc, "local ranks"),
        ("--stdin", stdin, world_size, "ranks"),
    )
    for flag, ranks, count, what in asked:
        for rank in ranks:
            if rank >= count:
                raise UsageError(f"{flag}: unknown rank {rank}; use {what} 0 to {count - 1}")


def _common_env(shared: _Shared, node: Node) -> tuple[tuple[str, str], ...]:
    """Return the variables that all workers of a program see. node: any of the nodes, if they are alike."""
    options, launch_id = shared.options, shared.launch_id
    nnodes = str(shared.nnodes)
    world, port, name = str(shared.world_size), str(shared.master_port), shared.program.options.name
    env = [
        (MARKER_VARIABLE, launch_id),
        # infini_run
        ("NNODES", nnodes),
        ("MASTER_ADDR", shared.master_addr),
        ("MASTER_PORT", port),
        ("PROC_WORLD_SIZE", world),
        # torchrun, as of torch 2.13. Never TORCHELASTIC_USE_AGENT_STORE=True: rank 0 would wait for a
        # store that the launcher does not host (torch/distributed/rendezvous.py).
        ("WORLD_SIZE", world),
        ("GROUP_WORLD_SIZE", nnodes),
        ("ROLE_WORLD_SIZE", str(shared.spans[0].world_size) if name else world),
        ("ROLE_NAME", name or options.role),
        ("TORCHELASTIC_RUN_ID", _run_id(options, launch_id)),
        ("TORCHELASTIC_RESTART_COUNT", "0"),
        ("TORCHELASTIC_MAX_RESTARTS", str(shared.program.options.max_restarts)),
    ]
    if len(shared.threads) == 1:
        env.append(("OMP_NUM_THREADS", str(shared.threads[0])))
    if options.hang_timeout_s:  # sd_watchdog_enabled(3); no WATCHDOG_PID: any process of the rank may ping
        env.append(("WATCHDOG_USEC", str(max(1, round(options.hang_timeout_s * 1e6)))))
    return (*env, *_local_env(shared, node)) if shared.is_even else tuple(env)


def _recorder_env(
    options: Options, folder: str, error_dir: str, environ: Mapping[str, str]
) -> tuple[tuple[str, str], ...]:
    """Return the variables of torch's Flight Recorder, if hangs are looked for."""
    if not options.hang_timeout_s and not options.progress_timeout_s:
        return ()
    from infini_run.plan.torch_recorder import recorder_variables

    return recorder_variables(options, folder, error_dir, environ)


def _run_id(options: Options, launch_id: str) -> str:
    """Return the run id in torchrun's variables."""
    return options.run_id or (launch_id if options.standalone else "none")


def _local_env(shared: _Shared, node: Node) -> tuple[tuple[str, str], ...]:
    """Return how many workers of their world this node has, in each dialect."""
    is_own = node.counts and not shared.options.one_world
    nproc = str(node.counts[shared.index] if is_own else node.nproc)
    return ("NPROC_PER_NODE", nproc), ("LOCAL_WORLD_SIZE", nproc)


def _omp_threads(options: Options | OneProgram, node: Node, environ: Mapping[str, str]) -> tuple[int, ...]:
    """Return the threads of all workers alike, or of each: as requested. By default each gets a fair share of the
    CPUs, or the CPUs of its binding."""
    if options.omp_num_threads:
        return (options.omp_num_threads,)
    if node.nproc == 1 or "OMP_NUM_THREADS" in environ:
        return ()
    if node.cpu_bindings:
        each = tuple(binding.threads for binding in node.cpu_bindings)
        return each if len(set(each)) > 1 else each[:1]
    return (max(1, node.cpus // node.nproc),) if node.cpus else ()  # else the CPUs are unknown: another machine


def _worker(shared: _Shared, node: Node, rank: int, local_rank: int, node_rank: int = -1) -> Worker:
    """Return a worker.

    Args:
        shared: What all of its program have in common.
        node: Where it runs.
        rank: Its number among the ranks of its program.
        local_rank: The same on its node.
        node_rank: The rank of that node among those that run the program; -1: among all.
    """
    before = sum(node.counts[: shared.index]) if shared.index else 0
    options, program, threads = shared.options, shared.program, shared.threads
    command, name, slot, number = program.command, program.options.name, before + local_rank, shared.first + rank
    seen, local = (number, slot) if options.one_world else (rank, local_rank)
    # without a launcher nobody listens
    notify = notify_address(shared.folder, shared.launch_id, number) if shared.has_launcher else ""
    text, local_text = str(seen), str(local)
    env = [
        *shared.env,
        ("GLOBAL_PROC_RANK", text),
        ("LOCAL_PROC_RANK", local_text),
        ("RANK", text),
        ("LOCAL_RANK", "0" if options.virtual_local_rank else local_text),
        ("ROLE_RANK", text if seen == rank else str(rank)),
        ("GROUP_RANK", str(node.index if options.one_world or node_rank < 0 else node_rank)),
    ]
    if notify:
        env.append(("NOTIFY_SOCKET", notify))
    log, error_log, error_file = _files(shared, node.index, rank, local_rank)
    if error_file:
        env.append(("TORCHELASTIC_ERROR_FILE", error_file))
    devices = node.devices[slot] if node.devices else ()
    if devices:
        env.append((node.visible_devices_variable, ",".join(devices)))
    if len(threads) > 1:
        env.append(("OMP_NUM_THREADS", str(threads[slot])))
    if not shared.is_even:
        env += _local_env(shared, node)
    extra: tuple[str, ...] = ()
    if program.options.distributed_args:
        extra = (f"--distributed-rank={seen}", f"--distributed-world-size={shared.world_size}")
    who = f"{name} {rank}" if name else f"rank {rank}"
    stdout, stderr = _outputs(shared, number, local)
    values = {
        "rank": number,
        "local_rank": local,
        "node": node.index,
        "program": name,
        "program_rank": rank,
        "name": who,
        "file": command.file,
        "cwd": program.options.cwd,
        "argv": command.argv + extra if extra else command.argv,
        "env": tuple(env),
        "devices": devices,
        "cpu_binding": node.cpu_bindings[slot] if node.cpu_bindings else None,
        "stdin": _stdin(options, number, node.nproc, shared.copies_terminal),
        "stdout": stdout,
        "stderr": stderr,
        "label": f"{node.host}:{who.removeprefix('rank ')}" if options.nnodes > 1 else who,
        "log": log,
        "error_log": error_log,
        "error_file": error_file,
        "notify": notify,
        "uuids": node.uuids[slot] if node.uuids else (),
    }
    return made(Worker, values)


def _files(shared: _Shared, node: int, rank: int, local_rank: int) -> tuple[str, str, str]:
    """Return the log, the log of stderr alone and the error file; empty: none.

    Only the path of the error file must be absolute: the program may change its working directory.
    """
    options, error_dir = shared.options, shared.error_dir
    if options.log_dir and options.log_layout == "torchrun":
        from infini_run.options.torchrun import log_folder

        of_node = node if options.nnodes > 1 else None
        run_id = _run_id(options, shared.launch_id)
        folder = log_folder(run_id, shared.launch_id, of_node, 0, local_rank)
        names = f"{options.log_dir}/{folder}/stdout.log", f"{options.log_dir}/{folder}/stderr.log"
        return *names, f"{error_dir}/{folder}/error.json" if error_dir else ""
    own = shared.program.options.logs
    if not options.log_dir and not own:
        return "", "", _error_file(error_dir, shared.first + rank)
    name = shared.program.options.name
    folder = own or (f"{options.log_dir}/{name}" if name else options.log_dir)
    return f"{folder}/rank_{rank}.log", "", _error_file(error_dir, rank)


def _error_file(folder: str, rank: int) -> str:
    return f"{folder}/rank_{rank}.error.json" if folder else ""


def notify_address(folder: str, launch_id: str, rank: int) -> str:
    """Return a rank's address for sd_notify(3), where csrc/io/sd_notify.c listens.

    It is a new one in each attempt. In the folder only this user reaches it. Without a folder, or with a path that is
    too long for an address (unix(7)), the address is abstract.
    """
    _, dot, attempt = launch_id.partition(".")
    path = f"{folder}/notify.{rank}{dot}{attempt}"
    size = len(path) if path.isascii() else len(path.encode("utf-8", "surrogateescape"))
    if not folder or size > _LONGEST_ADDRESS:
        return f"@infini-run/{launch_id}/{rank}"
    return path


def renewed_address(notify: str, restarts: int) -> str:
    """Return a rank's new address for sd_notify(3) when its program restarts: the first one and a number. A
    longer one than the kernel takes stays as it is: nobody else listens there any more."""
    renewed = f"{notify}.{restarts}"
    is_short = len(renewed.encode("utf-8", "surrogateescape")) <= _LONGEST_ADDRESS
    return renewed if notify and is_short else notify


def _stdin(options: Options, rank: int, nproc: int, copies_terminal: bool) -> str:
    """Return the stdin of a worker. A lone worker inherits a terminal, and gets the foreground with it. One of
    several gets a copy of what the user types, because Ctrl-C and Ctrl-Z must go to all."""
    if options.stdin == "all":
        return "pipe" if nproc > 1 or copies_terminal else "inherit"
    if options.stdin != rank:
        return "null"
    return "pipe" if copies_terminal else "inherit"


def _console(options: Options, ranks: int, is_unshared: bool) -> str:
    """Return how to show one stream by default: lines of several ranks must not mix in a pipe or a file."""
    if options.console != "auto":
        return options.console
    return "inherit" if ranks == 1 or is_unshared else "lines"


def control_address(folder: str) -> str:
    """Return the path of a launch's control socket, where csrc/io/control.c listens. Empty: it would be too long for
    an address (unix(7)), or the launch has no folder."""
    path = f"{folder}/control"
    return path if folder and len(path.encode("utf-8", "surrogateescape")) <= _LONGEST_ADDRESS else ""


def about_launch(
    plan: Plan, options: Options, environ: Mapping[str, str], start_s: float, restart_s: float = 0.0
) -> bytes:
    """Return what the control socket says of the launch on this node. Times as for `about_text`."""
    return about_text(
        launch_id=without_attempt(plan.launch_id),
        start_s=start_s,
        program=shown_words(options),
        nodes=plan.nnodes,
        node=plan.nodes[0].index,
        world=plan.world_size,
        ranks=(plan.workers[0].rank, plan.workers[-1].rank),
        devices=dict.fromkeys(name for worker in plan.workers for name in worker.devices),
        job=job_in(environ),
        restart_s=restart_s,
    )


def without_attempt(launch_id: str) -> str:
    """Return the id of a whole launch: `ir-7f3a91c2e4d5`, also for `ir-7f3a91c2e4d5.1`, its second attempt."""
    return launch_id.partition(".")[0]


def shown_words(options: Options) -> tuple[str, ...]:
    """Return the programs and their arguments, as on a command line, or what a launch of functions is called."""
    if options.title:
        return (options.title,)
    if not options.programs:
        return options.program
    return tuple(word for each in options.programs for word in (":", f"--program={each.name}", *each.program))[1:]


def about_text(
    *,
    launch_id: str,
    start_s: float,
    program: Sequence[str],
    nodes: int,
    node: int,
    world: int,
    ranks: tuple[int, int],
    devices: Iterable[str],
    job: str,
    restart_s: float = 0.0,
) -> bytes:
    """Return what a control socket sends first (control/launch_facts.py): NAME=value, each with a NUL behind it.

    restart_s: between two attempts, when the next one begins, since the epoch; 0: an attempt runs.
    """
    restart = f"restart={restart_s:.3f}\0" if restart_s else ""
    text = (
        f"protocol={CONTROL_PROTOCOL}\0id={launch_id}\0start={start_s}\0"
        f"program={' '.join(program)[:_LONGEST_PROGRAM]}\0nodes={nodes}\0node={node}\0world={world}\0"
        f"ranks={ranks[0]}-{ranks[1]}\0devices={','.join(devices)}\0job={job}\0{restart}"
    )
    return text.encode("utf-8", "surrogateescape")


def job_in(environ: Mapping[str, str]) -> str:
    """Return the name and the value of the variable that names the scheduler's job. Empty: there is none."""
    return next((f"{name}={environ[name]}" for name in _JOB_VARIABLES if environ.get(name)), "")


def with_folder(plan: Plan, folder: str, *, abstract_id: str) -> Plan:
    """Return the same plan for another folder of the launch.

    Args:
        plan: The plan.
        folder: The folder. Empty: none; then ranks get no error file that would have been in it.
        abstract_id: In the ranks' addresses, if the folder takes no sockets: nobody can guess it, or a stranger would
            be there first. Empty: it takes them.
    """

    def of(worker: Worker) -> Worker:
        error_file = worker.error_file
        if plan.folder and error_file.startswith(f"{plan.folder}/"):
            error_file = folder and folder + error_file[len(plan.folder) :]
        notify = notify_address("" if abstract_id else folder, abstract_id or plan.launch_id, worker.rank)
        env = _changed(worker.env, {"NOTIFY_SOCKET": notify, "TORCHELASTIC_ERROR_FILE": error_file})
        return replace(worker, env=env, notify=notify, error_file=error_file)

    return replace(
        plan,
        folder=folder,
        env=_moved(plan.env, plan.folder, folder),
        workers=tuple(of(worker) for worker in plan.workers),
    )


def _moved(env: tuple[tuple[str, str], ...], before: str, folder: str) -> tuple[tuple[str, str], ...]:
    """Return the variables with what is in the launch's folder in another one. Without any, those are dropped."""
    if not before or all(not value.startswith(f"{before}/") for _, value in env):
        return env
    return tuple(
        (name, folder + value[len(before) :] if value.startswith(f"{before}/") else value)
        for name, value in env
        if folder or not value.startswith(f"{before}/")
    )


def with_error_folder(plan: Plan, folder: str) -> Plan:
    """Return the same plan with the ranks' error files in another folder.

    A rank that cannot write its error file raises that in place of its exception, so it gets none then.

    Args:
        plan: The plan.
        folder: The folder. Empty: ranks get no error file.
    """

    def of(worker: Worker) -> Worker:
        error_file = _error_file(folder, worker.rank) if worker.error_file else ""
        return replace(
            worker, env=_changed(worker.env, {"TORCHELASTIC_ERROR_FILE": error_file}), error_file=error_file
        )

    return replace(plan, workers=tuple(of(worker) for worker in plan.workers))


def _changed(env: tuple[tuple[str, str], ...], values: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the variables with other values, without one whose value is empty in the end."""
    return tuple((name, text) for name, value in env if (text := values.get(name, value)) or value == "")


def reads_output(worker: Worker) -> bool:
    """Return whether all output of a rank comes to the launcher."""
    return worker.stdout.piped and worker.stderr.piped


def inheriting(plan: Plan) -> Plan:
    """Return the same plan without pipes that only keep lines whole."""
    direct = Output(console=True, log=False, piped=False)

    def of(output: Output) -> Output:
        return direct if output.unlabelled and not output.log else output

    return replace(
        plan,
        workers=tuple(replace(each, stdout=of(each.stdout), stderr=of(each.stderr)) for each in plan.workers),
    )


def _outputs(shared: _Shared, rank: int, local_rank: int) -> tuple[Output, Output]:
    """Return the targets of stdout and stderr."""
    options = shared.options
    is_chosen = (options.ranks_on_console is None or rank in options.ranks_on_console) and (
        options.local_ranks_filter is None or local_rank in options.local_ranks_filter
    )
    key = is_chosen, streams_of(options.redirects, local_rank), streams_of(options.tee, local_rank)
    found = shared.outputs.get(key)
    if found is None:
        found = shared.outputs[key] = (_output(shared, STDOUT, *key), _output(shared, STDERR, *key))
    return found


def _output(shared: _Shared, stream: int, is_chosen: bool, redirected: int, teed: int) -> Output:
    """Return the targets of a stream. console says how, the rank filters say whose; --redirects takes a stream off,
    --tee puts it back.

    Args:
        shared: What all ranks have in common.
        stream: STDOUT or STDERR.
        is_chosen: The rank filters let this rank onto the console.
        redirected: Which of its streams --redirects takes off.
        teed: Which of them --tee puts back.
    """
    options, console = shared.options, shared.consoles[stream == STDERR]
    has_table = options.live == "on"  # which shows the last line of each rank
    shown = console != "none" and not has_table and is_chosen
    if redirected & stream and not teed & stream:
        shown = False
    logged = bool(options.log_dir or shared.program.options.logs)
    labelled = shown and console in LABELLED
    whole = shown and not labelled and (console == "lines" or logged)
    last_words = stream == STDERR and not shown
    piped = labelled or whole or logged or last_words or has_table
    return Output(console=shown, log=logged, piped=piped, unlabelled=whole and not options.timestamps)
