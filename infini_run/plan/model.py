"""The plan: every worker of every node that this launch starts, decided before anything starts.

Pure: what the machine is like (devices, CPUs, host names, a free port) comes in with the Node. A worker
sees `base environment - names we set + plan.env (the same for all) + worker.env (its own)`.
"""

from __future__ import annotations

from infini_run.errors import NO_MEMORY, StartError, UsageError
from infini_run.record import made, record, replace
from infini_run.value_types import MARKER_VARIABLE, STDERR, STDOUT, streams_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from infini_run.devices.cpu_binding import CpuBinding
    from infini_run.options.options import Options

LABELLED = ("prefix", "fold")  # values of --console
_WORLD_LIMIT = 2**31 - 1
_ENOMEM = 12
CONTROL_PROTOCOL = 1  # one more whenever the control socket is asked in another way, or answers so
_LONGEST_PROGRAM = 1000  # characters of a command line that others are shown
_JOB_VARIABLES = ("INFINI_JOB_NAME", "SLURM_JOB_ID", "PBS_JOBID")  # name the job in which a launch runs
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
    """One machine of the launch, and its devices.

    Attributes:
        index: Its node rank.
        host: Its name.
        nproc: How many workers run on it.
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
    """The ranks of one node among those of all, where its node rank does not determine them: nodes may differ in how
    many they have.

    Args:
        first: the lowest of them.
        most: ranks of the node that has most; 0: unknown.
    """

    first: int
    world_size: int
    most: int = 0


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
class Worker:
    """One process of the plan. `stdin`: inherit, pipe (a copy of the launcher's) or null. `error_log`: of stderr
    alone; empty: `log` has both."""

    rank: int
    local_rank: int
    node: int
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
    """The whole answer. `file` is what every worker executes; `env` is what they all see."""

    launch_id: str
    nodes: tuple[Node, ...]
    nnodes: int
    world_size: int
    master_addr: str
    master_port: int
    file: str
    env: tuple[tuple[str, str], ...]
    workers: tuple[Worker, ...]
    folder: str = ""  # of the launch on this node, for sockets and error files; empty: it has none

    def environ(self, worker: Worker, base: Mapping[str, str]) -> dict[str, str]:
        """Return the complete environment of a worker, over the launcher's own."""
        return self.base(base) | dict(self.env) | dict(worker.env)

    def base(self, base: Mapping[str, str]) -> dict[str, str]:
        """Return the launcher's environment without the names that the plan sets."""
        ours = {name for name, _ in self.env} | {name for name, _ in self.workers[0].env} | set(_NEVER)
        return {name: value for name, value in base.items() if name not in ours}


@record
class _Shared:
    """The common values of all workers of a plan. has_launcher: no engine starts each rank itself."""

    options: Options
    command: Command
    world_size: int
    launch_id: str
    folder: str
    error_dir: str
    threads: tuple[int, ...]
    copies_terminal: bool
    consoles: tuple[str, ...]
    is_even: bool
    has_launcher: bool
    outputs: dict[tuple[bool, ...], Output]  # one for all that are alike


def make_plan(
    options: Options,
    command: Command,
    nodes: Sequence[Node],
    *,
    launch_id: str,
    master_port: int,
    environ: Mapping[str, str],
    folder: str = "",
    error_dir: str = "",
    stdin_is_terminal: bool = False,
    may_use_terminal: bool = True,
    unshared: tuple[bool, bool] = (False, False),
    task: SingleRank | None = None,
    span: RankRange | None = None,
) -> Plan:
    """Decide everything about the ranks of some nodes.

    Args:
        options: What the user asked for.
        command: The program and its arguments.
        nodes: The one node that this process starts, or all nodes of the launch.
        launch_id: The launch's id.
        master_port: The rendezvous port; never 0.
        environ: The launcher's environment.
        folder: The folder that this node makes for its ranks' sockets. Empty: it makes none.
        error_dir: Where workers may leave error files. Empty: nowhere.
        stdin_is_terminal: The launcher's stdin is one.
        may_use_terminal: A rank that is alone may have the terminal itself.
        unshared: Whether stdout, and stderr, are a terminal or /dev/null: there ranks write without the launcher
            in between, unless the user asked for it.
        task: The one rank that an engine starts itself. None: the launcher starts ranks.
        span: The ranks of the one node that there is. None: all nodes have as many as this one.

    Raises:
        UsageError: Ranks that cannot be.
        StartError: Memory is too small for this number.
    """
    spans = [span] if span else _spans(options, nodes)
    first, world_size = nodes[0], task.world_size if task else spans[0].world_size
    _check_world(options, first.nproc, world_size, most=spans[0].most)
    ranks = 1 if task else sum(node.nproc for node in nodes)
    is_single = len(nodes) == 1 and first.nproc == 1
    shared = _Shared(
        options=options,
        command=command,
        world_size=world_size,
        launch_id=launch_id,
        folder=folder,
        error_dir=error_dir,
        threads=_omp_threads(options, first, environ),
        copies_terminal=stdin_is_terminal and not (is_single and may_use_terminal),
        consoles=tuple(_console(options, ranks, is_unshared) for is_unshared in unshared),
        is_even=all(node.nproc == first.nproc for node in nodes),
        has_launcher=task is None,
        outputs={},
    )
    return Plan(
        launch_id=launch_id,
        nodes=tuple(nodes),
        nnodes=options.nnodes,
        world_size=world_size,
        master_addr=options.master_addr,
        master_port=master_port,
        file=command.file,
        env=_common_env(shared, first, master_port),
        workers=(_worker(shared, first, task.rank, task.local_rank),) if task else _workers(shared, nodes, spans),
        folder=folder,
    )


def _workers(shared: _Shared, nodes: Sequence[Node], spans: Sequence[RankRange]) -> tuple[Worker, ...]:
    try:
        return tuple(
            _worker(shared, node, span.first + local_rank, local_rank)
            for node, span in zip(nodes, spans, strict=True)
            for local_rank in range(node.nproc)
        )
    except (MemoryError, SystemError):  # SystemError: CPython 3.11's, if there is no memory for a frame
        count = sum(node.nproc for node in nodes)
        text = f"{count} ranks: out of memory for their plan; {NO_MEMORY}"
        raise StartError(text, "the plan", _ENOMEM) from None


def _spans(options: Options, nodes: Sequence[Node]) -> list[RankRange]:
    """Return the ranks of each node. Ranks count from node to node: those of all nodes before it come first."""
    if len(nodes) == 1:
        nproc = nodes[0].nproc
        return [RankRange(first=nodes[0].index * nproc, world_size=options.nnodes * nproc, most=nproc)]
    return spans_of([node.nproc for node in nodes])


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
    asked = {
        "--ranks_on_console": (options.ranks_on_console or (), world_size, "ranks"),
        "--local_ranks_filter": (options.local_ranks_filter or (), most or nproc, "local ranks"),
        "--stdin": ((options.stdin,) if isinstance(options.stdin, int) else (), world_size, "ranks"),
    }
    for flag, (ranks, count, what) in asked.items():
        for rank in ranks:
            if rank >= count:
                raise UsageError(f"{flag}: unknown rank {rank}; use {what} 0 to {count - 1}")


def _common_env(shared: _Shared, node: Node, master_port: int) -> tuple[tuple[str, str], ...]:
    """Return the variables that all workers see. node: any of the nodes, if they are alike."""
    options, launch_id = shared.options, shared.launch_id
    nnodes = str(options.nnodes)
    world, port = str(shared.world_size), str(master_port)
    env = [
        (MARKER_VARIABLE, launch_id),
        # infini_run
        ("NNODES", nnodes),
        ("MASTER_ADDR", options.master_addr),
        ("MASTER_PORT", port),
        ("PROC_WORLD_SIZE", world),
        # torchrun, as of torch 2.13. Never TORCHELASTIC_USE_AGENT_STORE=True: rank 0 would wait for a
        # store that the launcher does not host (torch/distributed/rendezvous.py).
        ("WORLD_SIZE", world),
        ("GROUP_WORLD_SIZE", nnodes),
        ("ROLE_WORLD_SIZE", world),
        ("ROLE_NAME", options.role),
        ("TORCHELASTIC_RUN_ID", _run_id(options, launch_id)),
        ("TORCHELASTIC_RESTART_COUNT", "0"),
        ("TORCHELASTIC_MAX_RESTARTS", str(options.max_restarts)),
    ]
    if len(shared.threads) == 1:
        env.append(("OMP_NUM_THREADS", str(shared.threads[0])))
    if options.hang_timeout_s:  # sd_watchdog_enabled(3); no WATCHDOG_PID: any process of the rank may ping
        env.append(("WATCHDOG_USEC", str(max(1, round(options.hang_timeout_s * 1e6)))))
    return (*env, *_local_env(node)) if shared.is_even else tuple(env)


def _run_id(options: Options, launch_id: str) -> str:
    """Return the run id in torchrun's variables."""
    return options.run_id or (launch_id if options.standalone else "none")


def _local_env(node: Node) -> tuple[tuple[str, str], ...]:
    """Return how many workers this node has, in each dialect."""
    return ("NPROC_PER_NODE", str(node.nproc)), ("LOCAL_WORLD_SIZE", str(node.nproc))


def _omp_threads(options: Options, node: Node, environ: Mapping[str, str]) -> tuple[int, ...]:
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


def _worker(shared: _Shared, node: Node, rank: int, local_rank: int) -> Worker:
    options, command, threads = shared.options, shared.command, shared.threads
    text, local = str(rank), str(local_rank)
    # without a launcher nobody listens
    notify = notify_address(shared.folder, shared.launch_id, rank) if shared.has_launcher else ""
    env = [
        ("GLOBAL_PROC_RANK", text),
        ("LOCAL_PROC_RANK", local),
        ("RANK", text),
        ("LOCAL_RANK", "0" if options.virtual_local_rank else local),
        ("ROLE_RANK", text),
        ("GROUP_RANK", str(node.index)),
    ]
    if notify:
        env.append(("NOTIFY_SOCKET", notify))
    log, error_log, error_file = _files(shared, node.index, rank, local_rank)
    if error_file:
        env.append(("TORCHELASTIC_ERROR_FILE", error_file))
    devices = node.devices[local_rank] if node.devices else ()
    if devices:
        env.append((node.visible_devices_variable, ",".join(devices)))
    if len(threads) > 1:
        env.append(("OMP_NUM_THREADS", str(threads[local_rank])))
    if not shared.is_even:
        env += _local_env(node)
    extra: tuple[str, ...] = ()
    if options.distributed_args:
        extra = (f"--distributed-rank={rank}", f"--distributed-world-size={shared.world_size}")
    values = {
        "rank": rank,
        "local_rank": local_rank,
        "node": node.index,
        "argv": command.argv + extra if extra else command.argv,
        "env": tuple(env),
        "devices": devices,
        "cpu_binding": node.cpu_bindings[local_rank] if node.cpu_bindings else None,
        "stdin": _stdin(options, rank, node.nproc, shared.copies_terminal),
        "stdout": _output(shared, rank, local_rank, STDOUT, shared.consoles[0]),
        "stderr": _output(shared, rank, local_rank, STDERR, shared.consoles[1]),
        "label": f"{node.host}:{rank}" if options.nnodes > 1 else f"rank {rank}",
        "log": log,
        "error_log": error_log,
        "error_file": error_file,
        "notify": notify,
        "uuids": node.uuids[local_rank] if node.uuids else (),
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
    log = f"{options.log_dir}/rank_{rank}.log" if options.log_dir else ""
    return log, "", _error_file(error_dir, rank)


def _error_file(folder: str, rank: int) -> str:
    return f"{folder}/rank_{rank}.error.json" if folder else ""


def notify_address(folder: str, launch_id: str, rank: int) -> str:
    """Return a rank's address for sd_notify(3), where csrc/io/sd_notify.c listens.

    It is a new one in each attempt. In the folder only this user reaches it. Without a folder, or with a path that is
    too long for an address (unix(7)), the address is abstract.
    """
    _, dot, attempt = launch_id.partition(".")
    path = f"{folder}/notify.{rank}{dot}{attempt}"
    if not folder or len(path.encode("utf-8", "surrogateescape")) > _LONGEST_ADDRESS:
        return f"@infini-run/{launch_id}/{rank}"
    return path


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


def about_launch(plan: Plan, options: Options, environ: Mapping[str, str], start_s: float) -> bytes:
    """Return what the control socket says of the launch on this node."""
    return about_text(
        launch_id=plan.launch_id,
        start_s=start_s,
        program=options.program,
        nodes=plan.nnodes,
        node=plan.nodes[0].index,
        world=plan.world_size,
        ranks=(plan.workers[0].rank, plan.workers[-1].rank),
        devices=dict.fromkeys(name for worker in plan.workers for name in worker.devices),
        job=job_in(environ),
    )


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
) -> bytes:
    """Return what a control socket sends first (control/launch_facts.py): NAME=value, each with a NUL behind it."""
    text = (
        f"protocol={CONTROL_PROTOCOL}\0id={launch_id}\0start={start_s}\0"
        f"program={' '.join(program)[:_LONGEST_PROGRAM]}\0nodes={nodes}\0node={node}\0world={world}\0"
        f"ranks={ranks[0]}-{ranks[1]}\0devices={','.join(devices)}\0job={job}\0"
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

    return replace(plan, folder=folder, workers=tuple(of(worker) for worker in plan.workers))


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


def inheriting(plan: Plan) -> Plan:
    """Return the same plan without pipes that only keep lines whole."""
    direct = Output(console=True, log=False, piped=False)

    def of(output: Output) -> Output:
        return direct if output.unlabelled and not output.log else output

    return replace(
        plan,
        workers=tuple(replace(each, stdout=of(each.stdout), stderr=of(each.stderr)) for each in plan.workers),
    )


def _output(shared: _Shared, rank: int, local_rank: int, stream: int, console: str) -> Output:
    """Return the targets of a stream. console says how, the rank filters say whose; --redirects takes a stream off,
    --tee puts it back."""
    options = shared.options
    has_table = options.live == "on"  # which shows the last line of each rank
    shown = (
        console != "none"
        and not has_table
        and (options.ranks_on_console is None or rank in options.ranks_on_console)
        and (options.local_ranks_filter is None or local_rank in options.local_ranks_filter)
    )
    if streams_of(options.redirects, local_rank) & stream and not streams_of(options.tee, local_rank) & stream:
        shown = False
    logged = bool(options.log_dir)
    labelled = shown and console in LABELLED
    whole = shown and not labelled and (console == "lines" or logged)
    last_words = stream == STDERR and not shown
    piped = labelled or whole or logged or last_words or has_table
    key = shown, logged, piped, whole and not options.timestamps
    found = shared.outputs.get(key)
    if found is None:
        found = Output(console=shown, log=logged, piped=piped, unlabelled=key[3])
        shared.outputs[key] = found
    return found
