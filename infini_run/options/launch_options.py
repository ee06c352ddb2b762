"""The options of a launch: what the user asked for, complete and frozen.

The one rule: nothing here reads a flag. Agents get their options over the link, and load neither the table of flags
nor what reads it.
"""

from __future__ import annotations

from infini_run.record import record, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from infini_run.value_types import RankStreams


@record
class OneProgram:
    """What the user asked for of one of several programs; the fields are those of Options."""

    name: str
    program: tuple[str, ...]
    cwd: str
    env: tuple[tuple[str, str], ...]
    logs: str  # a folder for the logs of its ranks; empty: one in --log_dir
    nproc_per_node: int | str
    master_port: int
    module: bool
    no_python: bool
    distributed_args: bool
    preload: tuple[str, ...]
    gpus_per_proc: int
    omp_num_threads: int
    on_nodes: tuple[int, ...] | None  # the nodes where it runs; None: all of them
    after: tuple[str, ...]  # the programs that are up before it starts
    ready_port: int  # it is up once this port answers; 0: by READY=1
    ends_job: bool
    max_restarts: int  # of its ranks alone, with --restart_scope=program; else the job's


@record
class Options:
    """What the user asked for, complete. Times are in seconds; None for ranks means all of them."""

    nnodes: int  # at most
    least_nodes: int  # the job continues with this many after the loss of others; 0: the loss of a node ends it
    nproc_per_node: int | str  # auto, gpu, cpu
    node_rank: int  # -1: the head assigns it
    master_addr: str
    master_port: int  # 0: a free one
    rdzv_explicit: bool  # somebody gave the address or the port
    standalone: bool
    run_id: str
    role: str
    module: bool
    no_python: bool
    distributed_args: bool
    preload: tuple[str, ...]  # modules that are imported once, before ranks are forked
    preload_timeout_s: float
    engine: str
    hosts: str
    hostfile: str
    ssh_config: str
    remote_python: str
    link_port: int  # 0: a free one
    link_address: str
    token_file: str
    join_timeout_s: float
    node_timeout_s: float
    node_check: str  # words as a shell reads them; empty: none
    node_check_timeout_s: float
    export: tuple[str, ...]
    spares: int
    join_window_s: float
    on_join: str
    max_node_failures: int
    gpus_per_proc: int
    virtual_local_rank: bool
    bind: str
    check_gpus: str
    omp_num_threads: int  # 0: auto
    log_dir: str
    log_layout: str
    console: str
    timestamps: bool
    color: str  # auto, always, never
    ranks_on_console: tuple[int | str, ...] | None  # a text is a rank of a program, trainer:3
    local_ranks_filter: tuple[int, ...] | None
    stdin: int | str  # a global rank, a rank of a program (trainer:3), all, none
    redirects: RankStreams
    tee: RankStreams
    grace_s: float  # after a failure, and where the host program stops the ranks
    signal_grace_s: float  # where a signal from outside stops them
    stop_signal: int
    stop_scope: str
    isolate: bool
    max_restarts: int  # of all ranks
    restart_scope: str  # job, program
    restart_delay_s: float
    restart_window_s: float  # 0: off
    max_no_progress: int  # 0: no bound
    ready_timeout_s: float  # 0: off
    hang_timeout_s: float  # 0: off
    progress_timeout_s: float  # 0: off
    on_hang: str
    snapshots: str  # hang, failure, off
    report: str
    termination_log: str
    keep_going: bool
    dry_run: str  # "", text, json
    verbose: bool
    live: str  # on, auto (where there is a terminal and rich), off
    trace: str
    events: str  # a file, or fd:N
    metrics: str
    metrics_interval_s: float
    program: tuple[str, ...]  # its words
    name: str = ""  # of the program; empty: nobody named it
    programs: tuple[OneProgram, ...] = ()  # empty: there is one, without a name
    one_world: bool = False
    ends_job: bool = False
    after: tuple[str, ...] = ()
    ready_port: int = 0
    cwd: str = ""  # of the program; empty: the launch's
    env: tuple[tuple[str, str], ...] = ()  # of the program
    logs: str = ""  # as of OneProgram
    title: str = ""  # of a launch of functions, for --list; empty: the words of the program
    again_code: int = 0  # of a rank that asks for another run of the job; 0: nobody runs it again
    again_wait_s: float = 0.0  # how long the others run on then, before they are stopped
    blocked_signals: tuple[int, ...] = ()  # ranks start with these blocked, and unblock them themselves

    @property
    def is_elastic(self) -> bool:
        """Whether the job continues after the loss of a node (multinode/head/membership.py)."""
        return self.least_nodes > 0

    def on_node(self, node: int) -> Options:
        """Return the options of one node: there, a program that does not run there has no rank."""
        programs = tuple(
            each if each.on_nodes is None or node in each.on_nodes else replace(each, nproc_per_node=0)
            for each in self.programs
        )
        return replace(self, programs=programs)
