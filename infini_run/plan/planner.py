"""How a plan is made (plan/model.py says what it is): `make_plan`, and below it each rank's numbers, variables, and
output.

Pure: what the machine is like (devices, CPUs, host names, a free port) comes in with the Node.
"""

from __future__ import annotations

from infini_run.errors import NO_MEMORY, StartError, UsageError, counted
from infini_run.plan.model import LABELLED, Output, Plan, RankRange, Worker, notify_address
from infini_run.record import made, record, replace
from infini_run.value_types import MARKER_VARIABLE, STDERR, STDOUT, streams_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from infini_run.options.launch_options import OneProgram, Options
    from infini_run.plan.model import FoundProgram, Node, SingleRank

    Variables = tuple[tuple[str, str], ...]

_WORLD_LIMIT = 2**31 - 1
_ENOMEM = 12


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
    env: Variables
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
    by_program: Sequence[Sequence[RankRange]] = ()
    if options.programs:
        from infini_run.plan.several_programs import number_ranks, with_own_variables

        options, spans, by_program = number_ranks(options, programs, nodes, spans)
    spans = spans or _spans(options, nodes)
    first, world_size = nodes[0], task.world_size if task else spans[0].world_size
    _check_world(options, first.nproc, world_size, most=spans[0].most)
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
        copies_terminal=stdin_is_terminal and not (may_use_terminal and _count_ranks(nodes) == 1),
        consoles=tuple(_console(options, 1 if task else _count_ranks(nodes), each) for each in unshared),
        is_even=all(node.nproc == first.nproc for node in nodes),
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
        workers = with_own_variables(workers, env, programs, environ)
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


def _spans(options: Options, nodes: Sequence[Node]) -> Sequence[RankRange]:
    """Return the ranks of each node."""
    if len(nodes) == 1:
        nproc = nodes[0].nproc
        return (RankRange(first=nodes[0].index * nproc, world_size=options.nnodes * nproc, most=nproc),)
    from infini_run.plan.rank_numbers import spans_of

    return spans_of([node.nproc for node in nodes])


def _count_ranks(nodes: Sequence[Node]) -> int:
    return sum(node.nproc for node in nodes)


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


def _workers(parts: Sequence[_Shared], nodes: Sequence[Node]) -> tuple[Worker, ...]:
    try:
        return tuple(
            _worker(part, node, span.first + local_rank, local_rank, span.node)
            for part in parts
            for node, span in zip(nodes, part.spans, strict=True)
            for local_rank in range(node.counts[part.index] if node.counts else node.nproc)
        )
    except (MemoryError, SystemError):  # SystemError: CPython 3.11's, if there is no memory for a frame
        text = f"{counted(_count_ranks(nodes), 'rank')}: out of memory for their plan; {NO_MEMORY}"
        raise StartError(text, "the plan", _ENOMEM) from None


def _parts(
    whole: _Shared,
    programs: Sequence[FoundProgram],
    nodes: Sequence[Node],
    by_program: Sequence[Sequence[RankRange]],
    environ: Mapping[str, str],
) -> tuple[tuple[_Shared, ...], Variables]:
    """Return what is common to the ranks of each program, and what those of all programs see alike."""
    from infini_run.plan.several_programs import describe_programs, split_alike

    options, parts, first = whole.options, [], 0
    for index, spans in enumerate(by_program):
        parts.append(_part(whole, programs, nodes, index, first, spans, environ))
        first += spans[0].world_size
    own_names = ("TORCHELASTIC_RESTART_COUNT",) if options.restart_scope == "program" else ()
    alike, own = split_alike([_common_env(part, nodes[0]) for part in parts], own_names)
    sizes = [spans[0].world_size for spans in by_program]
    described = ("JOB_PROGRAMS", describe_programs(programs, sizes, nodes, options.master_addr))
    with_env = (replace(part, env=env + part.program.options.env) for part, env in zip(parts, own, strict=True))
    return tuple(with_env), (*alike, described)


def _part(
    whole: _Shared,
    programs: Sequence[FoundProgram],
    nodes: Sequence[Node],
    index: int,
    first: int,
    spans: Sequence[RankRange],
    environ: Mapping[str, str],
) -> _Shared:
    """Return what is common to the ranks of one program, without `env`.

    Args:
        whole: What is common to all ranks.
        programs: The programs.
        nodes: The nodes of the plan.
        index: Which program it is.
        first: How many ranks the programs before it have.
        spans: Its ranks on each node.
        environ: The launcher's environment.
    """
    options, program = whole.options, programs[index]
    world = programs[0 if options.one_world else index]
    counts = {node.counts[index] for node in nodes}
    return replace(
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


# ---- variables


def _common_env(shared: _Shared, node: Node) -> Variables:
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


def _recorder_env(options: Options, folder: str, error_dir: str, environ: Mapping[str, str]) -> Variables:
    """Return the variables of torch's Flight Recorder, if hangs are looked for."""
    if not options.hang_timeout_s and not options.progress_timeout_s:
        return ()
    from infini_run.plan.torch_recorder import recorder_variables

    return recorder_variables(options, folder, error_dir, environ)


def _run_id(options: Options, launch_id: str) -> str:
    """Return the run id in torchrun's variables."""
    return options.run_id or (launch_id if options.standalone else "none")


def _local_env(shared: _Shared, node: Node) -> Variables:
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


def _rank_env(
    shared: _Shared,
    node: Node,
    slot: int,
    seen: int,
    local: int,
    rank: int,
    group_rank: int,
    notify: str,
    error_file: str,
) -> Variables:
    """Return the variables that one rank has for itself, or its program.

    Args:
        shared: What all of its program have in common.
        node: Where it runs.
        slot: Which of the processes there it is.
        seen: Its number in its world.
        local: The same on its node.
        rank: Its number among the ranks of its program.
        group_rank: The rank of its node in its world.
        notify: Its address for sd_notify(3). Empty: nobody listens.
        error_file: The path of its error file. Empty: it gets none.
    """
    text, local_text = str(seen), str(local)
    env = [
        *shared.env,
        ("GLOBAL_PROC_RANK", text),
        ("LOCAL_PROC_RANK", local_text),
        ("RANK", text),
        ("LOCAL_RANK", "0" if shared.options.virtual_local_rank else local_text),
        ("ROLE_RANK", text if seen == rank else str(rank)),
        ("GROUP_RANK", str(group_rank)),
    ]
    if notify:
        env.append(("NOTIFY_SOCKET", notify))
    if error_file:
        env.append(("TORCHELASTIC_ERROR_FILE", error_file))
    if node.devices and node.devices[slot]:
        env.append((node.visible_devices_variable, ",".join(node.devices[slot])))
    if len(shared.threads) > 1:
        env.append(("OMP_NUM_THREADS", str(shared.threads[slot])))
    if not shared.is_even:
        env += _local_env(shared, node)
    return tuple(env)


# ---- one rank


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
    options, program = shared.options, shared.program
    command, name, slot, number = program.command, program.options.name, before + local_rank, shared.first + rank
    seen, local = (number, slot) if options.one_world else (rank, local_rank)
    # without a launcher nobody listens
    notify = notify_address(shared.folder, shared.launch_id, number) if shared.has_launcher else ""
    log, error_log, error_file = _files(shared, node.index, rank, local_rank)
    extra: tuple[str, ...] = ()
    if program.options.distributed_args:
        extra = (f"--distributed-rank={seen}", f"--distributed-world-size={shared.world_size}")
    who = f"{name} {rank}" if name else f"rank {rank}"
    stdout, stderr = _outputs(shared, number, local)
    group_rank = node.index if options.one_world or node_rank < 0 else node_rank
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
        "env": _rank_env(shared, node, slot, seen, local, rank, group_rank, notify, error_file),
        "devices": node.devices[slot] if node.devices else (),
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
        return "", "", rank_error_file(error_dir, shared.first + rank)
    name = shared.program.options.name
    folder = own or (f"{options.log_dir}/{name}" if name else options.log_dir)
    return f"{folder}/rank_{rank}.log", "", rank_error_file(error_dir, rank)


def rank_error_file(folder: str, rank: int) -> str:
    """Return the path of a rank's error file; empty: it gets none.

    Args:
        folder: Where it may leave one. Empty: nowhere.
        rank: Its number.
    """
    return f"{folder}/rank_{rank}.error.json" if folder else ""


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


# ---- the same plan for what this node turned out to have. A launch without descriptors needs it, and imports nothing


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
        error_file = rank_error_file(folder, worker.rank) if worker.error_file else ""
        return replace(
            worker, env=_changed(worker.env, {"TORCHELASTIC_ERROR_FILE": error_file}), error_file=error_file
        )

    return replace(plan, workers=tuple(of(worker) for worker in plan.workers))


def _changed(env: tuple[tuple[str, str], ...], values: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the variables with other values, without one whose value is empty in the end."""
    return tuple((name, text) for name, value in env if (text := values.get(name, value)) or value == "")


def inheriting(plan: Plan) -> Plan:
    """Return the same plan without pipes that only keep lines whole."""
    direct = Output(console=True, log=False, piped=False)

    def of(output: Output) -> Output:
        return direct if output.unlabelled and not output.log else output

    return replace(
        plan,
        workers=tuple(replace(each, stdout=of(each.stdout), stderr=of(each.stderr)) for each in plan.workers),
    )
