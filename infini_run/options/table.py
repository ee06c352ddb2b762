"""Every flag of infini-run, in the order of --help: the one place for names, defaults and help texts.

A default is a value, not a text. torchrun's flags come last; the kind of one that cannot be honoured refuses
what it is given and says what to use.
"""

from __future__ import annotations

import _signal

from infini_run import value_types
from infini_run.options.grammar import COMMAND_LINE, GRAMMAR_GROUP, Flag, Prefix, boolean, index, plain, switch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

GROUPS = ("job", "program", "where", "membership", "devices", "output", "ending", "seeing", "torchrun")
ENGINES = ("ssh", "slurm", "pbs", "mpi")  # they reach other nodes
ALLOCATION_ENGINES = ("slurm", "pbs")  # they reach the nodes of the allocation in which the launcher runs
PREFIXES = (
    Prefix(text="INFINI_RUN_"),
    Prefix(text="PET_", is_binary=True),
    Prefix(text="TORCH_ELASTIC_", names=("shutdown_timeout",)),  # torch/distributed/launcher/api.py
)
ENVIRONMENT_PRECEDENCE = COMMAND_LINE + len(PREFIXES) + 1  # the precedence of what the cluster environment says
GRACES_S = (10.0, 25.0)  # after a failure; when told: Kubernetes and Slurm kill after 30, so a checkpoint has time

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


def _check_gpus(text: str) -> str:
    if text in ("off", "warn", "refuse"):
        return text
    try:
        return "warn" if boolean(text) else "off"
    except ValueError:
        raise ValueError("expected off, warn, or refuse") from None


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


def _command_line(text: str) -> str:
    import shlex

    try:
        words = shlex.split(text)
    except ValueError:
        raise ValueError("expected a command with matching quotes") from None
    if any(word in ("&&", "||", "|", "&", ";") or (word.endswith(";") and len(word) > 1) for word in words):
        raise ValueError("expected a program and its arguments, without a shell; use sh -c '...' for several")
    return text


def _variable_names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if any("=" in name for name in names):
        raise ValueError("expected names of variables, not values; set the values in the environment")
    return names


def _module_names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not all(part.isidentifier() for name in names for part in name.split(".")):
        raise ValueError("expected names of modules, such as torch,transformers.trainer")
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
    """The first choice is the default."""
    return Flag(group=group, name=name, kind=plain, default=choices[0], choices=choices, help=help, shown=shown)


def _ignored(
    name: str, metavar: str, why: str, read: Callable[[str], object] = plain, choices: tuple[str, ...] = ()
) -> Flag:
    return Flag(
        group="torchrun", name=name, kind=read, default="", metavar=metavar, choices=choices, help=f"ignored: {why}"
    )


def _foreign(name: str) -> Callable[[str], object]:
    """A kind that is imported only when somebody gives the flag."""

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
FLAGS = (
    _flag("job", "nnodes", value_types.node_count, 1, "N|MIN:MAX",
         "how many nodes; with MIN:MAX the job runs on as few as MIN, and goes on when it loses one"),
    _flag("job", "nproc_per_node", value_types.proc_count, 1, "N|auto|gpu|cpu",
         "how many processes on each node; gpu: one for each GPU, cpu: one for each core that we may use, "
         "auto: gpu where there is one, else cpu"),
    _flag("job", "node_rank", value_types.bounded_int(0), 0, "N",
         "which node this is, from 0; with INFINI_RUN_TOKEN ranks are handed out where it is not given"),
    _flag("job", "rdzv_endpoint", value_types.endpoint, ("127.0.0.1", 29500), "HOST:PORT",
         "where rank 0 listens; [IPV6]:PORT; port 0 is a free one, on a single node",
         shown="127.0.0.1:29500"),
    _flag("job", "master_addr", value_types.address, "127.0.0.1", "HOST", "the same host, on its own"),
    _flag("job", "master_port", value_types.port, 29500, "PORT", "the same port, on its own"),
    switch("standalone", "job", "one node and a free port"),
    _flag("job", "run_id", plain, "", "ID", "a name for this run, the same on every node",
         shown="none", aliases=("rdzv_id",)),

    switch("module", "program", "the program is a Python module, run with python -u -m", aliases=("m",)),
    switch("no_python", "program",
           "execute the program itself, always; without this flag this Python runs a .py, .pyc or .pyz file, or a "
           "folder with __main__.py, with -u, unless a #! line names something that is no Python"),
    switch("distributed_args", "program",
           "add --distributed-rank=R --distributed-world-size=W to each process's arguments"),
    _flag("program", "preload", _module_names, (), "NAME,...",
          "import these modules once in one process, and fork all ranks from it, also at restarts", shown="none"),
    _flag("program", "preload_timeout", value_types.patience, 600.0, "TIME",
          "give up if the imports of --preload take longer than TIME", shown="10m"),

    _choice("where", "engine", ("local", *ENGINES, "auto"),
            "what reaches the other nodes; auto: what started us says how many there are, which one this is and "
            "where they meet: Slurm, PBS, LSF, Grid Engine, Flux, MPI launchers, Kubernetes, SageMaker"),
    _flag("where", "hosts", plain, "", "a,b:4,node[01-16]",
         "the nodes, with how many processes each has room for", shown="none"),
    _flag("where", "hostfile", plain, "", "FILE", "the same from a file", shown="none"),
    _flag("where", "ssh_config", plain, "", "FILE", "a configuration file for ssh", shown="ssh's own"),
    _flag("where", "remote_python", plain, "", "PATH", "the Python on the other nodes that has infini-run",
         shown="the same path as here"),
    _flag("where", "link_port", value_types.port, 0, "PORT",
         "where the head listens, where nodes dial; by hand, with INFINI_RUN_TOKEN, the port after the rendezvous "
         "endpoint's", shown="a free one"),
    _flag("where", "link_address", plain, "", "ADDR|INTERFACE",
         "the one address that the head listens on for the nodes, or the interface that has it", shown="all"),
    _flag("where", "token_file", plain, "", "FILE",
         "its first line is the secret that joins the launchers of all nodes; INFINI_RUN_TOKEN is the secret itself",
         shown="none"),
    _flag("where", "join_timeout", value_types.duration, 300.0, "TIME",
         "how long to wait for all nodes to come", shown="5m"),
    _flag("where", "node_timeout", value_types.patience, 10.0, "TIME",
         "after so much silence a node is lost", shown="10s"),
    _flag("where", "export", _variable_names, (), "NAME,...",
         "variables of the environment that other nodes get too; with --engine=auto, those of an MPI launcher's own "
         "that ranks keep", shown="none"),

    _flag("membership", "spares", value_types.bounded_int(0, value_types.MAX_LISTED), 0, "N",
         "how many more nodes wait, to take the place of one that is lost"),
    _flag("membership", "join_window", value_types.duration, 10.0, "TIME",
         "with --nnodes=MIN:MAX or --spares: how long a job that could start waits for nodes that have not come",
         shown="10s"),
    _choice("membership", "on_join", ("wait", "restart"),
            "with fewer than MAX nodes, when another one joins: it waits as a spare, or all processes are started "
            "again with it"),
    _flag("membership", "node_check", _command_line, "", "COMMAND",
         "run this on each node before it takes part, quoted as in a shell: a node where it does not exit 0 is left "
         "out, with its last line of output", shown="none"),
    _flag("membership", "node_check_timeout", value_types.patience, 60.0, "TIME",
         "kill it, and leave the node out, after so long", shown="1m"),
    _flag("membership", "max_node_failures", value_types.bounded_int(0), 2, "N",
         "a node whose processes were the first to fail in so many attempts is left out, if enough others are there; "
         "0: none is"),

    _flag("devices", "gpus_per_proc", value_types.bounded_int(0), 0, "N",
         "how many GPUs each process sees; 0 leaves CUDA_VISIBLE_DEVICES (AMD: ROCR_VISIBLE_DEVICES, Ascend: "
         "ASCEND_RT_VISIBLE_DEVICES) alone"),
    _choice("devices", "bind", ("none", "numa", "socket", "cores"),
            "the CPUs that each process is bound to, with the memory beside them: those of its GPU's NUMA node, of "
            "that node's socket, or whole cores of its own"),
    Flag(group="devices", name="check_gpus", kind=_check_gpus, default="off", metavar="off|warn|refuse", bare="warn",
         negated="off", help="look first who has memory on the GPUs of this job: tell it, or start nothing then"),
    _flag("devices", "omp_num_threads", value_types.thread_count, 0, "N|auto",
         "OMP_NUM_THREADS where it is not set; auto: cores / processes, or those that a process is bound to, "
         "with more than one process",
         shown="auto"),

    _flag("output", "log_dir", plain, "", "DIR", "write DIR/rank_<rank>.log for each process", shown="none"),
    _choice("output", "log_layout", ("flat", "torchrun"),
            "flat: as above; torchrun: DIR/<run id>_<random>/attempt_<restarts>/<local rank>/ with stdout.log, "
             "stderr.log and error.json; with several nodes node_<node rank>/ is before attempt_<restarts>/"),
    _choice("output", "console", ("auto", "inherit", "lines", "prefix", "none"),
            "how output is shown: inherit: each process writes itself; lines: whole lines as they are, which "
            "never mix; prefix: lines marked [rank 3]; auto: prefix with --log_dir, --tee and from other nodes, "
            "inherit for one process, a terminal and /dev/null, else lines", shown="auto"),
    _flag("output", "ranks_on_console", value_types.ranks, None, "all|0,4-7", "whose output is shown", shown="all"),
    _flag("output", "stdin", value_types.stdin_reader, 0, "rank0|all|none|N",
         "who reads this terminal's input; the others read /dev/null", shown="rank0"),
    _flag("output", "redirects", value_types.streams, value_types.RankStreams(), "0-3|RANK:0-3,...",
         "as torchrun: the streams (1 stdout, 2 stderr, 3 both) that go to --log_dir only; "
         "--log_dir=/dev/null drops them",
         shown="0", aliases=("r",)),
    _flag("output", "tee", value_types.streams, value_types.RankStreams(), "0-3|RANK:0-3,...",
         "as torchrun: the streams that go to --log_dir and to the console", shown="0", aliases=("t",)),
    _flag("output", "local_ranks_filter", value_types.ranks, None, "all|0,4-7",
         "as torchrun: the local ranks whose output is shown", shown="all"),

    _flag("ending", "grace", value_types.duration, None, "TIME",
         "time from the stop signal to KILL: 10, 10s, 500ms, 2m; where it is given, on every path",
         shown="25s when a signal told us to stop, else 10s", aliases=("shutdown_timeout",)),
    _flag("ending", "stop_signal", value_types.stop_signal, _signal.SIGTERM, "SIGNAL", "what asks a process to stop",
         shown="TERM"),
    _choice("ending", "stop_scope", ("group", "leader", "mixed"),
            "who gets it: each rank's process group, the rank's own process only, or that and at half the "
            "grace its group"),
    switch("isolate", "ending", "run the job in a PID namespace of its own"),
    _flag("ending", "max_restarts", value_types.bounded_int(0), 0, "N",
         "start all processes again when one has failed, so many times; not when we were told to stop, nor when the "
         "exit code is 126 or 127"),
    _flag("ending", "restart_delay", value_types.duration, 1.0, "TIME",
         "time before the first restart; it doubles with each one, up to 5 minutes", shown="1s"),
    _flag("ending", "restart_window", value_types.timeout, 0.0, "TIME|off",
         "a failure after so long a good run has all of --max_restarts before it again", shown="off"),
    _flag("ending", "max_no_progress", value_types.bounded_int(0), 3, "N",
         "end the job when so many starts in a row got no further, once a process has told its NOTIFY_SOCKET "
         "PROGRESS=number; a start that got further has all of --max_restarts before it again; 0: no such bound"),
    _flag("ending", "ready_timeout", value_types.timeout, 0.0, "TIME|off",
         "stop the job when a process has not told its NOTIFY_SOCKET READY=1 so long after its start", shown="off"),
    _flag("ending", "hang_timeout", value_types.timeout, 0.0, "TIME|off",
         "a process hangs when it gives no sign of life for so long: no WATCHDOG=1, where it ever told its "
         "NOTIFY_SOCKET one; else no output that we carry and no use of the CPU, which is seen after once to "
         "twice that time",
         shown="off"),
    _choice("ending", "on_hang", ("report", "stop"),
            "what is done then: say what every process waits in, or that, and stop the job"),
    _flag("ending", "report", plain, "", "FILE", "write how every rank ended to FILE, as JSON", shown="none"),
    switch("keep_going", "ending", "let the other ranks finish when one has failed"),

    Flag(group="seeing", name="dry_run", kind=_text_or_json, default="", metavar="text|json", bare="text",
         negated="", shown="off",
         help="print the plan, every rank's environment and arguments, and start nothing"),
    switch("verbose", "seeing", "say what is done"),
    Flag(group="seeing", name="live", kind=_live, default="auto", metavar="on|off|auto", bare="on", negated="off",
         help="one table of all ranks on all nodes, redrawn in place on the terminal that is our stderr, in place of "
         "--console; needs rich; auto: with --console=none at a terminal, where rich is"),
    _flag("seeing", "trace", plain, "", "FILE",
         "write the life of all ranks on all nodes to FILE, as a Chrome trace: open it in ui.perfetto.dev",
         shown="none"),
    _flag("seeing", "plot", _file, "", "FILE.png",
         "start nothing: draw what has run, infini-run --plot=FILE.png REPORT.json|LOG_DIR...; needs matplotlib",
         shown="none"),
    Flag(group="seeing", name="doctor", kind=_text_or_json, default="", metavar="text|json", bare="text",
         negated="", shown="off",
         help="start nothing: look at this machine, and with --hosts or --engine at every node, and say what "
         "each has for a launch; exit code 1 if a launch would fail"),
    _flag("seeing", "completion", _shell, "", "bash|zsh|fish|install",
         "start nothing: print what makes this shell complete our flags; install: write it to where your shells look "
         "for it", shown="none", aliases=("print_completion",)),

    _flag("torchrun", "rdzv_backend", _rdzv_backend, "static", "static|c10d",
         "honoured: c10d on a single node without endpoint means a free port, and the port of an endpoint without "
         "one is 29400; etcd is refused"),
    _flag("torchrun", "rdzv_conf", _foreign("rdzv_conf"), "", "K=V,...",
         "honoured: join_timeout=SECONDS is --join_timeout; the rest has no effect, for nobody meets before the "
         "program starts", shown="none"),
    _flag("torchrun", "role", plain, "default", "NAME", "honoured: the ROLE_NAME that the processes see"),
    Flag(group="torchrun", name="numa_binding", kind=plain, default="", shown="none",
         choices=("node", "socket", "exclusive", "core-complex"),
         help="honoured: node is --bind=numa, socket is --bind=socket, exclusive and core-complex are --bind=cores"),
    switch("virtual_local_rank", "torchrun",
           "honoured: LOCAL_RANK is 0 for every process, and each sees its own GPUs only (--gpus_per_proc=1)"),
    _ignored("monitor_interval", "TIME", "nothing is polled", _foreign("monitor_interval")),
    _ignored("start_method", "", "the program is always executed", choices=("spawn", "fork", "forkserver")),
    _ignored("event_log_handler", "NAME", "see --report"),
    _ignored("log_line_prefix_template", "TEXT", "lines are marked [rank 3]"),
    _ignored("local_addr", "HOST", "no address is published", _foreign("local_addr")),
    _ignored("signals_to_handle", "NAMES", "every signal is handled or passed on", _foreign("signals_to_handle")),
    _refused_switch("run_path", "use the script as the program"),
    _refused("logs_specs", "NAME", "use --log_dir, --console, and --report"),
    _refused("duplicate_stdout_filters", "TEXT,...", "run grep on the files of --log_dir"),
    _refused("duplicate_stderr_filters", "TEXT,...", "run grep on the files of --log_dir"),
)
# fmt: on

DEFAULTS = {flag.name: flag.default for flag in FLAGS}
TABLE = index(FLAGS)


def flag_of_variable(prefix: str, name: str) -> str:
    """Return the variable of a flag by one of its names; "": none sets it (one letter, a negation, the grammar's)."""
    flag, _, is_negated = TABLE[name]
    return "" if len(name) == 1 or is_negated or flag.group == GRAMMAR_GROUP else prefix + name.upper()


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Return the variables that begin as those of flags do, and set none."""
    prefix = PREFIXES[0].text
    found = [name for name in environ if name.startswith(prefix) and environ[name] and name not in OTHER_VARIABLES]
    names = ((variable, variable[len(prefix) :].lower()) for variable in found)
    return [variable for variable, name in names if name not in TABLE or flag_of_variable(prefix, name) != variable]


def may_be_first_of_cluster(environ: Mapping[str, str]) -> bool:
    """Return whether a scheduler or launcher may have started this process as the first of its tasks: what costs
    nothing to know."""
    has_one = not environ.keys().isdisjoint(CLUSTER_VARIABLES)
    return has_one and all(environ.get(name, "0") in ("0", "") for name in _RANKS)
