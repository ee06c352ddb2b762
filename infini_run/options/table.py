"""Every flag of infini-run, in the order of --help: the one place for names, defaults and help texts.

A default is a value, not a text. The flags of torchrun come last. The kind of an unsupported one rejects its value
and names what to use.
"""

from __future__ import annotations

import _signal

from infini_run import value_types
from infini_run.options.grammar import COMMAND_LINE, Flag, Prefix, boolean, index, plain, switch, without_variable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from infini_run.options.grammar import Entry

GROUPS = ("job", "program", "where", "membership", "devices", "output", "ending", "seeing", "torchrun")
ENGINES = ("ssh", "slurm", "pbs", "mpi")  # they reach other nodes
# Of the same command on every node: node 0 writes and shows the output.
HEADS_OWN = ("report", "trace", "live", "events", "metrics")
ALLOCATION_ENGINES = ("slurm", "pbs")  # they reach the nodes of the allocation in which the launcher runs
TOKEN = "INFINI_RUN_TOKEN"  # the variable with the secret: with it, or --token_file, launchers of several nodes join
HANDED_OUT = -1  # the node rank of a launcher that the head gives one
PREFIXES = (
    Prefix(text="INFINI_RUN_"),
    Prefix(text="PET_", is_binary=True),
    Prefix(text="TORCH_ELASTIC_", names=("shutdown_timeout",)),  # torch/distributed/launcher/api.py
)
ENVIRONMENT_PRECEDENCE = COMMAND_LINE + len(PREFIXES) + 1  # the precedence of what the cluster environment says
GRACES_S = (10.0, 25.0)  # after a failure; after a stop: Kubernetes and Slurm kill after 30, so a checkpoint has time

_LONGEST_NAME = 64  # of a program: it names a folder, and stands before each line
_NO_NAMES = ("all", "none", "rank", "rank0")  # a program's name would read like a rank's

OTHER_VARIABLES = frozenset(  # that begin as those of flags do, and are none
    ("INFINI_RUN_ID", "INFINI_RUN_TOKEN", "INFINI_RUN_DEBUG", "INFINI_RUN_ISOLATED", "INFINI_RUN_PROBE")
)
# One of these is set wherever environments/detect.py finds something.
CLUSTER_VARIABLES = (
    "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "PE_HOSTFILE", "FLUX_JOB_ID", "PALS_RANKID", "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "PMIX_RANK", "LWS_LEADER_ADDRESS", "MASTER_ADDR", "JOB_COMPLETION_INDEX",
    "SM_HOSTS",
)  # fmt: skip
_RANKS = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "FLUX_TASK_RANK", "NODE_RANK", "RANK")


def _text_or_json(text: str) -> str:
    if text in ("", "text", "json"):
        return text
    try:
        return "text" if boolean(text) else ""
    except ValueError:
        raise ValueError("expected text or json") from None


def _form(text: str) -> str:
    """As _text_or_json, for a question. An empty value asks none: the next word would be a program."""
    if not text:
        raise ValueError("expected text or json")
    return _text_or_json(text)


def _check_gpus(text: str) -> str:
    if text in ("off", "warn", "refuse"):
        return text
    try:
        return "warn" if boolean(text) else "off"
    except ValueError:
        raise ValueError("expected off, warn, or refuse") from None


def _events(text: str) -> str:
    number = text.removeprefix(value_types.DESCRIPTOR)
    if number != text and not (number.isascii() and number.isdigit() and int(number[:12]) <= value_types.MAX_INT):
        raise ValueError("expected the name of a file, or fd:N with the number of an open descriptor")
    return text


def _interval(text: str) -> float:
    value = value_types.duration(text)
    if value < 1:
        raise ValueError("expected at least 1s; use 15s, 1m, or 5m")
    return value


def _live(text: str) -> str:
    if text in ("auto", "on", "off"):
        return text
    try:
        return "on" if boolean(text) else "off"
    except ValueError:
        raise ValueError("expected on, off, or auto") from None


def _shell(text: str) -> str:
    if text not in ("bash", "zsh", "fish", "install"):
        raise ValueError("expected bash, zsh, fish, or install")
    return text


def _file(text: str) -> str:
    if not text:
        raise ValueError("expected the name of a file")
    return text


def _folder(text: str) -> str:
    if not text:
        raise ValueError("expected the name of a new folder")
    return text


def _some_ranks(text: str) -> tuple[int | str, ...] | None:
    """As value_types.named_ranks. A variable that is empty in a script names no rank: it does not stand for all."""
    if not text:
        raise ValueError("expected all, or ranks and ranges such as 0,4-7")
    return value_types.named_ranks(text)


def _command_line(text: str) -> str:
    import shlex

    try:
        words = shlex.split(text)
    except ValueError:
        raise ValueError("expected a command with matching quotes") from None
    if any(word in ("&&", "||", "|", "&", ";") or (word.endswith(";") and len(word) > 1) for word in words):
        raise ValueError("expected a program and its arguments, without a shell; use sh -c '...' for several")
    return text


def _program_name(text: str) -> str:
    is_plain = text.isascii() and text[:1].isalpha() and text.replace("_", "").replace("-", "").isalnum()
    if not is_plain or text in _NO_NAMES or len(text) > _LONGEST_NAME:
        raise ValueError(f"expected a letter, then letters, digits, _, and -, at most {_LONGEST_NAME}, as in trainer")
    return text


def _variable_names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if any("=" in name for name in names):
        raise ValueError("expected names of variables, not values; set the values in the environment")
    return names


def _program_names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_program_name(name.strip()) for name in text.split(",") if name.strip()))


def _module_names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not all(part.isidentifier() for name in names for part in name.split(".")):
        raise ValueError("expected names of modules, such as torch,transformers.trainer")
    if "auto" in names and len(names) > 1:
        raise ValueError("expected auto alone, or names of modules")
    return tuple(dict.fromkeys(names))


def _rdzv_backend(text: str) -> str:
    if text not in ("static", "c10d"):
        raise ValueError("expected static or c10d; use --rdzv_endpoint=HOST:PORT for the address of rank 0")
    return text


def _flag(
    group: str,
    name: str,
    kind: Callable[[str], object],
    default: object,
    metavar: str,
    help: str,  # noqa: A002
    shown: str = "",
    aliases: tuple[str, ...] = (),
) -> Flag:
    return Flag(
        group=group,
        name=name,
        kind=kind,
        default=default,
        metavar=metavar,
        help=help,
        shown=shown,
        aliases=aliases,
    )


def _choice(group: str, name: str, choices: tuple[str, ...], help: str, shown: str = "") -> Flag:  # noqa: A002
    """Return a kind with these words; the first one is the default."""
    return Flag(group=group, name=name, kind=plain, default=choices[0], choices=choices, help=help, shown=shown)


def _ignored(
    name: str, metavar: str, why: str, read: Callable[[str], object] = plain, choices: tuple[str, ...] = ()
) -> Flag:
    return Flag(
        group="torchrun", name=name, kind=read, default="", metavar=metavar, choices=choices, help=f"ignored: {why}"
    )


def _foreign(name: str) -> Callable[[str], object]:
    """Return a kind whose import waits for the flag."""

    def read(text: str) -> object:
        from infini_run.options.torchrun import KINDS

        return KINDS[name](text)

    return read


def _refused(name: str, metavar: str, use: str) -> Flag:
    def refuse(text: str) -> object:
        raise ValueError(f"not supported; {use}")

    return _flag("torchrun", name, refuse, "", metavar, f"refused: {use}")


def _refused_switch(name: str, use: str) -> Flag:
    def refuse_true(text: str) -> object:
        if boolean(text):
            raise ValueError(f"not supported; {use}")
        return False

    return Flag(
        group="torchrun",
        name=name,
        kind=refuse_true,
        default=False,
        help=f"refused: {use}",
        bare="true",
        negated="false",
    )


# fmt: off
_ALL = (
    _flag("job", "nnodes", value_types.node_count, 1, "N|MIN:MAX",
         "run on N nodes; MIN:MAX: run on MIN to MAX nodes, and continue after losing one",
         shown="all nodes of --hosts or --engine, else 1"),
    _flag("job", "nproc_per_node", value_types.proc_count, 1, "N|auto|gpu|cpu",
         "start N ranks on each node; gpu: one per GPU, cpu: one per usable CPU, auto: gpu if there is a GPU, "
         "else cpu"),
    _flag("job", "node_rank", value_types.bounded_int(0), 0, "N",
         "set the rank of this node, from 0; with INFINI_RUN_TOKEN, the head assigns a missing one"),
    _flag("job", "rdzv_endpoint", value_types.endpoint, ("127.0.0.1", 29500), "HOST:PORT",
         "set where rank 0 listens; [IPV6]:PORT for an IPv6 address; if one infini-run starts all ranks, port 0 "
         "means a free port",
         shown="127.0.0.1:29500; with --hosts or --engine, node 0 and a port that infini-run chooses"),
    _flag("job", "master_addr", value_types.address, "127.0.0.1", "HOST", "host of --rdzv_endpoint",
         shown="that of --rdzv_endpoint"),
    _flag("job", "master_port", value_types.port, 29500, "PORT", "port of --rdzv_endpoint",
         shown="that of --rdzv_endpoint"),
    switch("standalone", "job", "run on one node, with a free port"),
    _flag("job", "run_id", plain, "", "ID", "name this run; all nodes need the same name",
         shown="none", aliases=("rdzv_id",)),

    _flag("program", "program", _program_name, "", "NAME",
          "name the program, which may be one of several: --program=a [flags] a.py : --program=b [flags] b.py",
          shown="none"),
    _flag("program", "programs", _file, "", "FILE",
          "read the programs from FILE: one [[program]] table of TOML each, with name, command, env, cwd, and flags",
          shown="none"),
    switch("one_world", "program",
           "put all programs into one world, with ranks numbered one program after the other; else each has its own "
           "world"),
    _flag("program", "on_nodes", value_types.node_ranks, None, "all|rest|0-2,4",
         "start this program on these nodes only; rest: on the nodes that no program lists", shown="all"),
    _flag("program", "after", _program_names, (), "NAME,...",
         "start this program once all ranks of the named ones have sent READY=1, or exited with code 0",
         shown="at once"),
    _flag("program", "ready_port", value_types.port, 0, "PORT",
         "with --after: treat this program as ready once PORT answers on each of its nodes", shown="by READY=1"),
    switch("ends_job", "program", "stop the other programs when all ranks of this one exited with code 0"),
    switch("module", "program", "run a Python module, with python -u -m", aliases=("m",)),
    switch("no_python", "program",
           "execute the program itself; otherwise, this Python runs .py, .pyc, and .pyz files, and folders with "
           "__main__.py, with -u, unless a #! line names another program"),
    switch("distributed_args", "program",
           "add --distributed-rank=R --distributed-world-size=W to each rank's arguments"),
    _flag("program", "preload", _module_names, (), "NAME,...",
          "import these modules once per node, and fork all ranks from that process, also at restarts; "
          "auto: what the script's first lines import", shown="none"),
    _flag("program", "preload_timeout", value_types.patience, 600.0, "TIME",
          "give up if the imports of --preload take longer than TIME", shown="10m"),

    _choice("where", "engine", ("local", *ENGINES, "auto"),
            "choose how to reach other nodes; with --hosts, the default is ssh; auto: take the nodes, the node rank, "
            "and the endpoint from Slurm, PBS, LSF, Grid Engine, Flux, MPI launchers, Kubernetes, or SageMaker"),
    _flag("where", "hosts", plain, "", "a,b:4,node[01-16]",
         "list the nodes; b:4: run at most 4 ranks on b, and 4 by default; quote [...] in zsh", shown="none"),
    _flag("where", "hostfile", plain, "", "FILE", "read the list of --hosts from a file", shown="none"),
    _flag("where", "ssh_config", plain, "", "FILE", "use this configuration file for ssh", shown="ssh's own"),
    _flag("where", "remote_python", plain, "", "PATH", "use this Python on other nodes; it needs infini-run",
         shown="the same path as here"),
    _flag("where", "link_port", value_types.port, 0, "PORT",
         "listen on PORT for other nodes",
         shown="a free one; in a manual launch, the port after that of --rdzv_endpoint"),
    _flag("where", "link_address", plain, "", "ADDR|INTERFACE",
         "listen for other nodes on this address only, or on the address of this interface", shown="all"),
    _flag("where", "token_file", plain, "", "FILE",
         "read the secret that joins the launchers of all nodes from the first line of FILE; INFINI_RUN_TOKEN "
         "holds the secret itself",
         shown="none"),
    _flag("where", "join_timeout", value_types.duration, 300.0, "TIME",
         "wait at most TIME for all nodes to join", shown="5m"),
    _flag("where", "node_timeout", value_types.patience, 10.0, "TIME",
         "treat nodes silent for TIME as lost", shown="10s"),
    _flag("where", "export", _variable_names, (), "NAME,...",
         "pass these variables to other nodes; with --engine=auto, ranks also get these variables of an MPI "
         "launcher, which they otherwise lose", shown="none"),

    _flag("membership", "spares", value_types.bounded_int(0, value_types.MAX_LISTED), 0, "N",
         "keep N more nodes waiting, to replace lost ones"),
    _flag("membership", "join_window", value_types.duration, 10.0, "TIME",
         "wait TIME for missing nodes once enough have joined, with --nnodes=MIN:MAX or --spares",
         shown="10s"),
    _choice("membership", "on_join", ("wait", "restart"),
            "choose what follows when a node joins a job below MAX nodes; wait: it becomes a spare, restart: all "
            "ranks restart with it"),
    _flag("membership", "node_check", _command_line, "", "COMMAND",
         "run COMMAND (quoted words, without a shell) on each node first; exclude nodes where it fails, and report "
         "its last line of output", shown="none"),
    _flag("membership", "node_check_timeout", value_types.patience, 60.0, "TIME",
         "kill the check and exclude the node after TIME", shown="1m"),
    _flag("membership", "max_node_failures", value_types.bounded_int(0), 2, "N",
         "exclude a node whose ranks failed first in N attempts, if enough others remain; 0: never"),

    _flag("devices", "gpus_per_proc", value_types.bounded_int(0), 0, "N",
         "show N GPUs to each rank; 0: leave CUDA_VISIBLE_DEVICES (AMD: ROCR_VISIBLE_DEVICES, Ascend: "
         "ASCEND_RT_VISIBLE_DEVICES) unchanged"),
    _choice("devices", "bind", ("none", "numa", "socket", "cores"),
            "bind each rank to CPUs and to the memory near them; numa: the NUMA node of its GPU, socket: the "
            "socket of that node, cores: whole cores that no other rank has"),
    Flag(group="devices", name="check_gpus", kind=_check_gpus, default="off", metavar="off|warn|refuse", bare="warn",
         negated="off", help="check whether other processes hold memory on the GPUs; warn, or refuse to start"),
    _flag("devices", "omp_num_threads", value_types.thread_count, 0, "N|auto",
         "set OMP_NUM_THREADS if it is unset; auto: with more than one rank, the usable CPUs divided by the ranks, "
         "or with --bind the number of the rank's CPUs",
         shown="auto"),

    _flag("output", "log_dir", plain, "", "DIR", "write DIR/rank_<rank>.log for each rank", shown="none"),
    _choice("output", "log_layout", ("flat", "torchrun"),
            "choose the files in --log_dir; flat: DIR/rank_<rank>.log, torchrun: DIR/<run "
            "id>_<random>/attempt_<restarts>/<local rank>/ with stdout.log, stderr.log, and error.json; several "
            "nodes add node_<node rank>/ before attempt_<restarts>/"),
    _choice("output", "console", ("auto", "inherit", "lines", "prefix", "fold", "none"),
            "choose how output is shown; inherit: ranks write it themselves; lines: whole lines, which never mix; "
            "prefix: lines marked [rank 3]; fold: as prefix, but a line that several ranks write within 100 ms only "
            "once, marked [ranks 0-7]; none: no output; auto: prefix with --log_dir, --tee, --timestamps, "
            "--program, or a head of several nodes, else inherit for one rank, a terminal, or /dev/null, else lines",
            shown="auto"),
    switch("timestamps", "output", "show the time (UTC) before each line of a rank"),
    _choice("output", "color", ("auto", "always", "never"),
            "color the labels of lines; auto: if stdout and stderr are terminals and NO_COLOR is unset"),
    _flag("output", "ranks_on_console", value_types.named_ranks, None, "all|0,4-7",
         "show the output of these ranks only; trainer:0-3: ranks of a program", shown="all"),
    _flag("output", "stdin", value_types.stdin_reader, 0, "rank0|all|none|N",
         "give the input of this terminal to this rank, all, or none; other ranks read /dev/null; trainer:0: a rank "
         "of a program", shown="rank0"),
    _flag("output", "redirects", value_types.streams, value_types.RankStreams(), "0-3|RANK:0-3,...",
         "send these streams (1: stdout, 2: stderr, 3: both) to --log_dir only, as torchrun does; "
         "--log_dir=/dev/null drops them",
         shown="0", aliases=("r",)),
    _flag("output", "tee", value_types.streams, value_types.RankStreams(), "0-3|RANK:0-3,...",
         "send these streams to --log_dir and to the console, as torchrun does", shown="0", aliases=("t",)),
    _flag("output", "local_ranks_filter", value_types.ranks, None, "all|0,4-7",
         "show the output of these local ranks only, as torchrun does", shown="all"),

    _flag("ending", "grace", value_types.duration, None, "TIME",
         "wait TIME (10, 10s, 500ms, 2m) between the stop signal and KILL, whatever the cause",
         shown="25s after a stop request, else 10s", aliases=("shutdown_timeout",)),
    _flag("ending", "stop_signal", value_types.stop_signal, _signal.SIGTERM, "SIGNAL",
         "send SIGNAL to ask ranks to stop",
         shown="TERM"),
    _choice("ending", "stop_scope", ("group", "leader", "mixed"),
            "choose who gets the stop signal; group: each rank's process group, leader: the rank only, mixed: the "
            "rank, and its group at half the grace"),
    switch("isolate", "ending", "run the job in a separate PID namespace"),
    _flag("ending", "max_restarts", value_types.bounded_int(0), 0, "N",
         "restart all ranks after a failure, at most N times until --restart_window or PROGRESS= resets the count; "
         "never after a stop request or exit code 126 or 127"),
    _choice("ending", "restart_scope", ("job", "program"),
            "choose what restarts after a failure; job: all ranks, program: the ranks of the failed program, while "
            "the others continue"),
    _flag("ending", "restart_delay", value_types.duration, 1.0, "TIME",
         "wait TIME before the first restart, and twice as long before each further one, up to 5 minutes",
         shown="1s"),
    _flag("ending", "restart_window", value_types.timeout, 0.0, "TIME|off",
         "reset the restart count after TIME without a failure", shown="off"),
    _flag("ending", "max_no_progress", value_types.bounded_int(0), 3, "N",
         "end the job after N attempts in a row without progress, if ranks report PROGRESS=; progress resets the "
         "restart count; 0: no limit"),
    _flag("ending", "ready_timeout", value_types.timeout, 0.0, "TIME|off",
         "stop the job if a rank has not sent READY=1 within TIME; a program that --after waits for has 10m by "
         "default", shown="off"),
    _flag("ending", "hang_timeout", value_types.timeout, 0.0, "TIME|off",
         "treat a rank as hung after TIME without output and CPU use, noticed within twice TIME; once it has sent "
         "WATCHDOG=1: after TIME without another one",
         shown="off"),
    _flag("ending", "progress_timeout", value_types.timeout, 0.0, "TIME|off",
         "treat the job as hung if no rank has sent a higher PROGRESS= for TIME, counted from the first one",
         shown="off"),
    _choice("ending", "on_hang", ("report", "stop"),
            "choose what follows a hang; report: print what every rank waits in, stop: print it, and stop the job"),
    _choice("ending", "snapshots", ("hang", "failure", "off"),
            "choose when to look at what ranks wait in; hang: at a hang, failure: also after a failure, which stops "
            "the other ranks up to 1 s later, off: never"),
    _flag("ending", "report", plain, "", "FILE", "write how every rank ended to FILE, as JSON", shown="none"),
    _flag("ending", "termination_log", plain, "", "FILE",
         "write the first failure to FILE, at most 4096 bytes, for Kubernetes: /dev/termination-log", shown="none"),
    switch("keep_going", "ending", "let the other ranks finish after a failure"),

    Flag(group="seeing", name="dry_run", kind=_text_or_json, default="", metavar="text|json", bare="text",
         negated="", shown="off",
         help="print the plan, with every rank's environment and arguments, and start nothing; for several nodes, "
         "the line `each node adds` names what each node sets itself"),
    switch("verbose", "seeing", "print each step"),
    Flag(group="seeing", name="live", kind=_live, default="auto", metavar="on|off|auto", bare="on", negated="off",
         help=
         "show one table of all ranks on all nodes in place of --console, if stderr is a terminal; needs rich; "
         "auto: with --console=none at a terminal, if rich is installed"),
    _flag("seeing", "trace", plain, "", "FILE",
         "write the life of all ranks on all nodes to FILE, as a Chrome trace for ui.perfetto.dev",
         shown="none"),
    _flag("seeing", "events", _events, "", "FILE|fd:N",
         "append a line of JSON to FILE, or to an open descriptor, for each event of the launch, while it runs",
         shown="none"),
    _flag("seeing", "metrics", plain, "", "FILE",
         "write the numbers of the launch to FILE while it runs, as node_exporter reads them", shown="none"),
    _flag("seeing", "metrics_interval", _interval, 15.0, "TIME", "replace the file of --metrics every TIME",
         shown="15s"),
    Flag(group="seeing", name="list", kind=_form, default="", metavar="text|json", bare="text", negated="false",
         shown="off", help="list the launches of this user that run here, or of all users for root"),
    switch("top", "seeing",
           "show the ranks of a running launch in a table, as --live does; q ends the view; without a terminal, "
           "print it once; needs rich"),
    switch("follow", "seeing",
           "print the lines that ranks of a running launch write from now on; name it as for --stop"),
    _flag("seeing", "tail", value_types.bounded_int(0, value_types.MOST_TAIL), 0, "N",
          "print the last N lines of each rank first, with --follow"),
    Flag(group="seeing", name="stacks", kind=_form, default="", metavar="text|json", bare="text", negated="false",
         shown="off", help=
         "print the Python stack of every rank of a running launch, by py-spy, or the system call that it waits in"),
    switch("stop", "seeing",
           "ask a running launch to stop, as SIGTERM does; name it after the flags, by its id, a unique beginning of "
           "the id, or the pid of one of its processes"),
    _flag("seeing", "send", value_types.any_signal, "", "SIGNAL",
          "send SIGNAL to the ranks of a running launch, named as for --stop", shown="none"),
    _flag("seeing", "bundle", _folder, "", "DIR",
          "write a running launch's report, trace, and stacks so far, and its ranks' variables without secrets, to "
          "the new folder DIR, for a bug report; name it as for --stop", shown="none"),
    _flag("seeing", "ranks", _some_ranks, None, "all|0,4-7",
         "ask about these ranks only, with --follow, --stacks, or --send",
          shown="all"),
    _flag("seeing", "plot", _file, "", "FILE.png",
         "draw a finished launch, and start nothing: infini-run --plot=FILE.png REPORT.json|LOG_DIR...; needs "
         "matplotlib",
         shown="none"),
    Flag(group="seeing", name="doctor", kind=_text_or_json, default="", metavar="text|json", bare="text",
         negated="false", shown="off",
         help=
         "check this machine, and every node of --hosts or --engine, for what a launch needs, and start nothing; "
         "exit code 1 if a launch would fail"),
    _flag("seeing", "completion", _shell, "", "bash|zsh|fish|install",
         "print a script that completes flags in this shell, and start nothing; install: write the scripts where "
         "your shells look for them", shown="none", aliases=("print_completion",)),

    _flag("torchrun", "rdzv_backend", _rdzv_backend, "static", "static|c10d",
         "choose the default port, as torchrun does; c10d: a free one on a single node without an endpoint, 29400 "
         "for an endpoint without a port; etcd is refused"),
    _flag("torchrun", "rdzv_conf", _foreign("rdzv_conf"), "", "K=V,...",
         "read --join_timeout from join_timeout=SECONDS; ignore other keys, because there is no rendezvous server",
         shown="none"),
    _flag("torchrun", "role", plain, "default", "NAME", "set ROLE_NAME of the ranks"),
    Flag(group="torchrun", name="numa_binding", kind=plain, default="", shown="none",
         choices=("node", "socket", "exclusive", "core-complex"),
         help="bind ranks as torchrun does; node: --bind=numa, socket: --bind=socket, exclusive and core-complex: "
         "--bind=cores"),
    switch("virtual_local_rank", "torchrun",
           "set LOCAL_RANK to 0 for every rank, which sees only its GPU (implies --gpus_per_proc=1)"),
    _ignored("monitor_interval", "TIME", "infini-run does not poll", _foreign("monitor_interval")),
    _ignored("start_method", "", "the program is always executed", choices=("spawn", "fork", "forkserver")),
    _ignored("event_log_handler", "NAME", "use --report"),
    _ignored("log_line_prefix_template", "TEXT", "lines are marked [rank 3]"),
    _ignored("local_addr", "HOST", "no address is published", _foreign("local_addr")),
    _ignored("signals_to_handle", "NAMES", "infini-run handles or forwards every signal",
             _foreign("signals_to_handle")),
    _refused_switch("run_path", "use the script as the program"),
    _refused("logs_specs", "NAME", "use --log_dir, --console, and --report"),
    _refused("duplicate_stdout_filters", "TEXT,...", "run grep on the files of --log_dir"),
    _refused("duplicate_stderr_filters", "TEXT,...", "run grep on the files of --log_dir"),
)
# fmt: on

_WORDS = ("program", "list", "top", "follow", "tail", "stacks", "stop", "send", "bundle", "ranks", "plot", "doctor",
          "completion")  # fmt: skip # a variable would change every launch of a shell
FLAGS = tuple(without_variable(flag) if flag.name in _WORDS else flag for flag in _ALL)
DEFAULTS = {flag.name: flag.default for flag in FLAGS}
TABLE = index(FLAGS)


def flag_of_variable(prefix: str, name: str, table: Mapping[str, Entry] = TABLE) -> str:
    """Return the variable of a flag by one of its names; "": none sets it (one letter, a negation, a word only)."""
    flag, _, is_negated = table[name]
    return prefix + name.upper() if flag.has_variable and len(name) > 1 and not is_negated else ""


def unknown_variables(
    environ: Mapping[str, str],
    prefix: str = PREFIXES[0].text,
    table: Mapping[str, Entry] = TABLE,
    others: Collection[str] = OTHER_VARIABLES,
) -> list[str]:
    """Return the variables that begin as those of flags do, and set none.

    Args:
        environ: The environment.
        prefix: How those of flags begin.
        table: The flags.
        others: The variables that begin so, and are no flags.
    """
    found = [name for name in environ if name.startswith(prefix) and environ[name] and name not in others]
    names = ((variable, variable[len(prefix) :].lower()) for variable in found)
    return [
        variable for variable, name in names if name not in table or flag_of_variable(prefix, name, table) != variable
    ]


def may_be_first_of_cluster(environ: Mapping[str, str]) -> bool:
    """Return whether a scheduler or launcher may have started this process as the first of its tasks: what costs
    nothing to know."""
    has_one = not environ.keys().isdisjoint(CLUSTER_VARIABLES)
    return has_one and all(environ.get(name, "0") in ("0", "") for name in _RANKS)
