"""What a plan is: every rank of every node that this launch starts, decided before anything starts.

Frozen records, which plan/planner.py makes; then the addresses of a launch's sockets, and what its control socket
says of the plan. A worker sees `base environment - names we set + plan.env (for all) + worker.env (its own)`.
"""

from __future__ import annotations

from infini_run.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from infini_run.devices.cpu_binding import CpuBinding
    from infini_run.options.launch_options import OneProgram, Options

LABELLED = ("prefix", "fold")  # values of --console
CONTROL_PROTOCOL = 1  # one more whenever the control socket is asked in another way, or answers so
JOB_NAME = "INFINI_JOB_NAME"
_JOB_VARIABLES = (JOB_NAME, "SLURM_JOB_ID", "PBS_JOBID")  # name the job in which a launch runs
_LONGEST_PROGRAM = 1000  # characters of a command line that others are shown
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
        return self.common_environ(base) | dict(worker.env)

    def common_environ(self, base: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that all workers have alike, over the launcher's own."""
        return self.base(base) | dict(self.env)

    def base(self, base: Mapping[str, str]) -> dict[str, str]:
        """Return the launcher's environment without the names that the plan sets."""
        ours = {name for name, _ in self.env} | {name for name, _ in self.workers[0].env} | set(_NEVER)
        return {name: value for name, value in base.items() if name not in ours}


def reads_output(worker: Worker) -> bool:
    """Return whether all output of a rank comes to the launcher."""
    return worker.stdout.piped and worker.stderr.piped


# ---- its sockets


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

    Args:
        launch_id: The launch's id, without its attempt.
        start_s: When it started, in seconds since the epoch.
        program: Its command line.
        nodes: How many nodes it runs on.
        node: The node rank of the part that is asked; -1: it is the head of all.
        world: How many ranks it has on all nodes.
        ranks: The first and the last rank of that part.
        devices: The GPUs of these ranks.
        job: What `job_in` returns.
        restart_s: Between two attempts, when the next one begins, in seconds since the epoch; 0: an attempt runs.
    """
    restart = f"restart={restart_s:.3f}\0" if restart_s else ""
    text = (
        f"protocol={CONTROL_PROTOCOL}\0id={launch_id}\0start={start_s}\0"
        f"program={' '.join(program)[:_LONGEST_PROGRAM]}\0nodes={nodes}\0node={node}\0world={world}\0"
        f"ranks={ranks[0]}-{ranks[1]}\0devices={','.join(devices)}\0job={job}\0{restart}"
    )
    return text.encode("utf-8", "surrogateescape")


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


def job_in(environ: Mapping[str, str]) -> str:
    """Return the name and the value of the variable that names the scheduler's job. Empty: there is none."""
    return next((f"{name}={environ[name]}" for name in _JOB_VARIABLES if environ.get(name)), "")
