"""What the user asked for: words and variables become complete, frozen Options, or an error says why not.

The one rule: no later module looks at the command line or at a variable that stands for a flag. A conflict within one
authority is an error; otherwise the higher authority is right.
"""

from __future__ import annotations

from infini_run.errors import UsageError
from infini_run.options.grammar import COMMAND_LINE, parse
from infini_run.options.launch_options import OneProgram, Options
from infini_run.options.table import DEFAULTS, GRACES_S, HANDED_OUT, PREFIXES, TABLE, TOKEN
from infini_run.record import fields, record, replace
from infini_run.value_types import MAX_INT, NO_PORT, PYTHON_FILES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from infini_run.environments.environment import ClusterEnvironment
    from infini_run.options.grammar import Given, Values
    from infini_run.options.nodes import NodeList
    from infini_run.options.programs import Part
    from infini_run.options.questions import Question

USAGE = "infini-run [flags] [--] program [args...]"
_RENDEZVOUS = ("nnodes", "node_rank", "rdzv_endpoint", "master_addr", "master_port")
_TORCHRUN = ("numa_binding", "virtual_local_rank", "rdzv_conf")  # flags that stand for infini-run's
_C10D_PORT = 29400  # torch/distributed/elastic/rendezvous/c10d_rendezvous_backend.py
_READY_S = 600.0  # that programs wait for another one by default
_NO_FILES = "/dev/null"  # torchrun's: no logs, and what --redirects names goes nowhere
_NO_PROGRAM = "true"  # of the doctor, who starts none
# Flags that a training script hardly has itself, and whose absence is seen late; and who has them: a launcher.
LAUNCHERS_OWN = frozenset(
    ("nnodes", "nproc_per_node", "node_rank", "rdzv_endpoint", "rdzv_backend", "rdzv_id", "standalone", "hosts",
     "hostfile", "gpus_per_proc", "max_restarts", "stop_signal", "stop_scope", "ranks_on_console",
     "local_ranks_filter")
)  # fmt: skip
_LAUNCHERS = frozenset(
    ("infini-run", "infini_run", "torchrun", "torch.distributed.run", "torch.distributed.launch", "srun", "mpirun",
     "mpiexec", "accelerate", "deepspeed")
)  # fmt: skip
_QUESTIONS = ("plot", "completion")  # answered in place of a launch
_OF_RUNNING = ("list", "top", "follow", "stacks", "stop", "send", "bundle", "ranks", "tail")  # options/questions.py
_MAY_BE_IDLE = ("ssh_config", "remote_python", "link_port", "link_address", "join_timeout", "node_timeout", "export",
                "console", "node_check", "node_check_timeout", "metrics_interval",
                "preload_timeout")  # ineffective_flags.py  # fmt: skip
_OF_MEMBERSHIP = ("join_window", "on_join", "max_node_failures", "node_check_timeout")
_SECONDS = (
    "restart_delay",
    "restart_window",
    "ready_timeout",
    "hang_timeout",
    "progress_timeout",
    "join_timeout",
    "node_timeout",
    "join_window",
    "node_check_timeout",
    "preload_timeout",
    "metrics_interval",
)


@record
class Request:
    """What to do: run `options`, or, without them, answer a question.

    Attributes:
        question: help, helpfull, version, plot, completion, doctor or running; empty: none.
        options: What to run. None: there is a question; but of doctor, how to reach nodes.
        arguments: What the question is about.
        asked: The question to running launches, of `running`. None: it is another one.
        cluster: The cluster environment that --engine=auto found. None: without it.
        node_list: The nodes to reach from here. None: this process is the launcher of one node.
        without_effect: A sentence about flags that have no effect here. Empty: all have.
        is_alone_by_default: Nobody has said that this is a launch on one node.
        variables: The flags that a variable has set, and its name.
    """

    question: str
    options: Options | None
    arguments: tuple[str, ...] = ()
    asked: Question | None = None
    cluster: ClusterEnvironment | None = None
    node_list: NodeList | None = None
    without_effect: str = ""
    is_alone_by_default: bool = False
    variables: tuple[tuple[str, str], ...] = ()

    def name_variable(self, text: str) -> str:
        """Return an error with the variable in place of the flag that it is about, if a variable has set that flag.

        Args:
            text: The error, which begins with what is wrong: `--report=FILE cannot ...`, or `--log_dir: FILE ...`.
        """
        for flag, name in self.variables:
            rest = text.removeprefix(f"--{flag}")
            if rest[:1] in ("=", ":") and rest != text:
                return name + rest
        return text


def resolve(argv: Sequence[str], environ: Mapping[str, str]) -> Request:
    """Read the command line (without the command's name) and the environment.

    Order of authority: command line and flag files in order, INFINI_RUN_<NAME>, PET_<NAME> (and torchrun's
    TORCH_ELASTIC_SHUTDOWN_TIMEOUT), the ClusterEnvironment with --engine=auto, the default. Raises UsageError: one
    line with the given value and the allowed ones.
    """
    parsed = parse(argv, environ, TABLE, PREFIXES, _hint_of_flag)
    if parsed.question:
        subject = parsed.subject or "".join(parsed.program[:1])
        is_about_flag = parsed.question == "help" and "=" not in subject
        arguments = tuple(filter(None, (subject,))) if is_about_flag else ()
        return Request(question=parsed.question, options=None, arguments=arguments)
    given = parsed.settings
    for question in _QUESTIONS:
        asked = given.pop(question, None)
        if asked is not None and asked.value:
            return Request(question=question, options=None, arguments=(asked.value, *parsed.program))
    if not given.keys().isdisjoint(_OF_RUNNING):
        from infini_run.options.questions import read_question

        question_asked = read_question(given, parsed.program)
        if question_asked is not None:
            return Request(question="running", options=None, asked=question_asked)
    if "program" in given or "programs" in given:
        return _resolve_programs(given, parsed.program, environ)
    return _complete(given, parsed.program, environ)


def resolve_flags(argv: Sequence[str], environ: Mapping[str, str]) -> Given:
    """Read flags alone, without a program."""
    return parse(argv, environ, TABLE, PREFIXES, _hint_of_flag).settings


def _resolve_programs(given: Given, words: tuple[str, ...], environ: Mapping[str, str]) -> Request:
    """Read the programs of a command line with --program or --programs; variables name none."""
    for name in ("program", "programs"):
        if name in given and given[name].precedence != COMMAND_LINE:
            del given[name]
    if "program" not in given and "programs" not in given:
        return _complete(given, words, environ)
    from infini_run.options.programs import read_parts

    return complete_programs(read_parts(given, words, environ), environ)


def complete_programs(parts: Sequence[Part], environ: Mapping[str, str]) -> Request:
    """Return the request for a job of several programs.

    Args:
        parts: The flags and the words of each; the flags of the job are the same in all.
        environ: The environment.
    """
    from infini_run.options.programs import OF_ONE, read_places

    job = dict(parts[0][0])
    placed = _place(job, environ)  # once: a file of hosts may be a pipe
    for name in OF_ONE:
        job.pop(name, None)
    own = [{name: setting for name, setting in given.items() if name in OF_ONE} for given, _ in parts]
    requests = [
        _complete_placed(job | its, words, environ, placed) for its, (_, words) in zip(own, parts, strict=True)
    ]
    first = requests[0].options
    if first is None or requests[0].question:
        return requests[0]
    places = read_places(parts, first.nnodes)
    each = zip([request.options for request in requests if request.options], places, strict=True)
    programs = tuple(_one_of_several(options, at, nodes) for at, (options, nodes) in enumerate(each))
    if any(program.after for program in programs):
        first = _with_order(first, programs, parts)
    if first.restart_scope == "program":
        first = _with_own_restarts(job, first, programs)
    console = "prefix" if first.console == "auto" else first.console
    port = programs[0].master_port
    options = replace(first, programs=programs, console=console, master_port=port)
    _check_nodes(job, options, placed.node_list, has_token=bool(environ.get(TOKEN) or options.token_file))
    return replace(requests[0], options=options)


def _one_of_several(options: Options, at: int, nodes: tuple[int, ...] | None) -> OneProgram:
    """Return what is one program's own. Its ranks meet at a separate port."""
    own = {name: getattr(options, name) for name in fields(OneProgram) if name != "on_nodes"}
    own["master_port"] = options.master_port if at == 0 and options.rdzv_explicit else 0
    return OneProgram(**own, on_nodes=nodes)


def _with_order(first: Options, programs: Sequence[OneProgram], parts: Sequence[Part]) -> Options:
    """Check which programs start after which. Return the options with a limit for those that others wait for."""
    names = [program.name for program in programs]
    for given, _ in parts:
        for name in given["after"].value if "after" in given else ():
            if name not in names:
                raise UsageError(f"{given['after'].origin}: unknown program {name}; use {', '.join(names)}")
    from infini_run.options.programs import find_cycle

    cycle = find_cycle({program.name: program.after for program in programs})
    if cycle:
        flags = ", ".join(
            f"{name} --after={other}" for name, other in zip(cycle, [*cycle[1:], cycle[0]], strict=True)
        )
        raise UsageError(f"{flags}: cannot be: each waits for the next one; drop one of them")
    if first.keep_going:
        raise UsageError("--after: conflicts with --keep_going: a failed program is never ready; drop one of them")
    return replace(first, ready_timeout_s=first.ready_timeout_s or _READY_S)


def _with_own_restarts(job: Given, first: Options, programs: Sequence[OneProgram]) -> Options:
    """Check that programs can restart alone. Return the options of the job, which never restarts as a whole."""
    scope = job["restart_scope"].origin
    if not any(program.max_restarts for program in programs):
        raise UsageError(f"{scope}: no program may restart; add --max_restarts=N")
    if first.one_world:
        raise UsageError(f"{scope}: conflicts with --one_world: all ranks are in one world; drop one of them")
    if first.keep_going:
        raise UsageError(f"{scope}: conflicts with --keep_going: a failure stops no rank then; drop one of them")
    return replace(first, max_restarts=0)


def _check_nodes(job: Given, options: Options, node_list: NodeList | None, *, has_token: bool) -> None:
    """Check that every node learns of all programs, and has room for their ranks.

    Args:
        job: The settings of the job.
        options: Of the job, with its programs.
        node_list: The nodes that this launcher reaches. None: it reaches no other one.
        has_token: A token joins the launchers of several nodes.
    """
    if node_list is not None:
        from infini_run.options.nodes import check_room

        for node, host in enumerate(node_list.hosts):
            counts = [each.nproc_per_node for each in options.on_node(node).programs]
            if all(isinstance(count, int) for count in counts):
                check_room(job["nnodes"].origin, node_list.engine, host, sum(map(int, counts)))
        return
    if options.nnodes == 1:
        return
    asked = job["nnodes"].origin
    if options.dry_run:
        raise UsageError(f"--dry_run with {asked}: the ranks of other nodes are known only there; add --hosts=a,b")
    if not has_token:
        raise UsageError(
            f"{asked}: several programs need one head; set the same {TOKEN}=... on every node, or add --hosts=a,b"
        )
    limited = next((each for each in options.programs if each.on_nodes is not None), None)
    if limited is not None and options.node_rank == HANDED_OUT:
        raise UsageError(f"--on_nodes of {limited.name}: needs the rank of this node; add --node_rank=N")


@record
class _Placed:
    """Where the job runs.

    Attributes:
        least_nodes: As of Options.
        cluster: As of Request.
        node_list: As of Request.
    """

    least_nodes: int
    cluster: ClusterEnvironment | None
    node_list: NodeList | None


def _place(given: Given, environ: Mapping[str, str]) -> _Placed:
    """Find the nodes, and add to `given` what they say of the job."""
    if not given.keys().isdisjoint(_TORCHRUN):
        from infini_run.options.torchrun import translate

        translate(given)
    if "doctor" in given and "engine" in given:
        _place_doctor(given, environ)
    least_nodes = _split_range(given)
    _apply_endpoint(given)
    _apply_standalone(given)
    cluster = _find_cluster(given, environ)
    return _Placed(least_nodes=least_nodes, cluster=cluster, node_list=_find_nodes(given, environ, least_nodes))


def _complete(given: Given, program: tuple[str, ...], environ: Mapping[str, str]) -> Request:
    """Return what to run: what somebody gave, and defaults for the rest.

    Args:
        given: What somebody gave. It is changed.
        program: The program and its arguments.
        environ: The environment.
    """
    return _complete_placed(given, program, environ, _place(given, environ))


def _complete_placed(given: Given, program: tuple[str, ...], environ: Mapping[str, str], placed: _Placed) -> Request:
    """As `_complete`, for settings that have what `_place` adds."""
    doctor = given.pop("doctor", None)
    form = doctor.value if doctor is not None else ""
    least_nodes, cluster, node_list = placed.least_nodes, placed.cluster, placed.node_list
    values: Values = DEFAULTS | {name: setting.value for name, setting in given.items()}
    values["program"] = program or ((_NO_PROGRAM,) if form else ())
    values["name"] = given["program"].value if "program" in given else ""
    values["programs"] = ()
    values["title"] = ""
    values["env"] = given["env"].value if "env" in given else ()
    values["cwd"] = given["cwd"].value if "cwd" in given else ""
    values["logs"] = given["logs"].value if "logs" in given else ""
    values["least_nodes"] = least_nodes or (values["nnodes"] if values["spares"] else 0)
    values["rdzv_explicit"] = not given.keys().isdisjoint(("rdzv_endpoint", "master_addr", "master_port"))
    values["master_addr"] = _rendezvous_part(given, "master_addr", 0)
    values["master_port"] = 0 if _wants_free_port(given, values) else _rendezvous_part(given, "master_port", 1)
    values["grace_s"], values["signal_grace_s"] = GRACES_S if values["grace"] is None else (values["grace"],) * 2
    for name in _SECONDS:
        values[f"{name}_s"] = values[name]
    values["again_code"], values["again_wait_s"], values["blocked_signals"] = 0, 0.0, ()  # infini-job sets them
    has_logs = bool(values["logs"]) or values["log_dir"] not in ("", _NO_FILES) or values["tee"] != DEFAULTS["tee"]
    if values["console"] == "auto" and (has_logs or values["timestamps"]):
        values["console"] = "prefix"
    _apply_live(given, values)
    counts = node_list.counts if node_list is not None else cluster.counts if cluster is not None else ()
    has_token = bool(environ.get(TOKEN) or values["token_file"])
    if values["least_nodes"]:
        from infini_run.options.elastic import check_membership

        check_membership(given, values, node_list, has_token=has_token)
    elif values["node_check"] and (node_list is not None or values["nnodes"] > 1):
        raise UsageError(
            f"{given['node_check'].origin}: needs a job that can exclude a failing node; add --spares=N, or use "
            "--nnodes=MIN:MAX"
        )
    elif idle := [given[name] for name in _OF_MEMBERSHIP if name in given]:
        if idle[0].precedence == COMMAND_LINE:
            raise UsageError(
                f"{idle[0].origin}: needs a job that can lose a node; add --spares=N, or use --nnodes=MIN:MAX"
            )
    elif has_token and values["nnodes"] > 1 and "node_rank" not in given:
        values["node_rank"] = HANDED_OUT
    _check_job(given, values, counts, is_ours=node_list is not None)
    _check_program(given, values)
    if values["preload"]:
        _check_preload(given, values, is_task=cluster is not None and cluster.is_task)
    _check_output(given, values)
    if not values["name"] and not _is_open(values, node_list, has_token=has_token):
        _check_world(given, values, cluster, counts)
    if values["log_dir"] == _NO_FILES:
        values["log_dir"] = ""
    options = Options(**{name: values[name] for name in fields(Options)})
    if form:
        return Request(question="doctor", options=options, arguments=(form,), node_list=node_list)
    without_effect = ""
    if not given.keys().isdisjoint(_MAY_BE_IDLE):
        without_effect = _flags_without_effect(given, values, node_list, has_token=has_token)
    by_variable = [(name, each) for name, each in given.items() if 0 < each.precedence <= len(PREFIXES)]
    return Request(
        question="",
        options=options,
        cluster=cluster,
        node_list=node_list,
        without_effect=without_effect,
        is_alone_by_default=given.keys().isdisjoint(("engine", "hosts", "hostfile", "nnodes", "standalone")),
        variables=tuple((name, each.origin.partition("=")[0]) for name, each in by_variable),
    )


def _flags_without_effect(given: Given, values: Values, node_list: NodeList | None, *, has_token: bool) -> str:
    """Return the lines about flags that do nothing here."""
    from infini_run.options.ineffective_flags import LOCAL, PEER, ineffective_flags

    is_one_of_several = values["nnodes"] + values["spares"] > 1
    place = PEER if has_token and is_one_of_several else "auto" if values["engine"] == "auto" else LOCAL
    return ineffective_flags(given, node_list.engine if node_list else place, is_one_of_several=is_one_of_several)


def find_late_flag(argv: Sequence[str], program: Sequence[str], own: frozenset[str]) -> str:
    """Return a flag that only a launcher has among the words of a program, to which it goes; "" without one. It is
    also "" where `--` precedes the program, where that is a launcher itself, or where the flag also precedes it.

    Args:
        argv: the command line; `program` is its end.
        program: the program and its arguments.
        own: names of such flags.
    """
    at = len(argv) - len(program)
    for word in program[1:]:
        if word[:2] == "--":
            written = word.partition("=")[0]
            name = written[2:].replace("-", "_")
            if name in own:
                break
            if not name:
                return ""
    else:
        return ""
    ours = {other.lstrip("-").partition("=")[0].replace("-", "_") for other in argv[:at]}
    is_meant = argv[at - 1 : at] == ["--"] or any(other.rpartition("/")[2] in _LAUNCHERS for other in program)
    return "" if is_meant or name in ours else written


def _hint_of_flag(name: str) -> str:
    from infini_run.options.hints import of_flag

    return of_flag(name)


def _quoted_setting(given: Given, name: str) -> str:
    """Return a flag as somebody gave it, or its default."""
    return given[name].origin if name in given else f"--{name}={DEFAULTS[name]} (the default)"


def _place_doctor(given: Given, environ: Mapping[str, str]) -> None:
    """Refuse an engine that --doctor cannot use before it asks for more. In a step, look at this node alone: nothing
    of the others has to be known."""
    from infini_run.environments.detect import detect
    from infini_run.environments.environment import BATCH
    from infini_run.options.from_environment import read_file
    from infini_run.options.nodes import check_doctor_engine

    engine = given["engine"]
    check_doctor_engine(engine.value, engine.origin)
    if engine.value == "auto":
        cluster = detect(environ, read_file)
        if cluster is not None and cluster.form != BATCH:
            given["engine"] = replace(engine, value=DEFAULTS["engine"])


def _find_cluster(given: Given, environ: Mapping[str, str]) -> ClusterEnvironment | None:
    if "engine" not in given or given["engine"].value != "auto":
        return None
    from infini_run.options.from_environment import merge_environment

    return merge_environment(given, environ)


def _split_range(given: Given) -> int:
    """Split --nnodes=MIN:MAX: MAX becomes the number of nodes. Return MIN, or 0 for one number."""
    asked = given.get("nnodes")
    if asked is None or not isinstance(asked.value, tuple):
        return 0
    least, most = asked.value
    given["nnodes"] = replace(asked, value=most)
    return int(least)


def _find_nodes(given: Given, environ: Mapping[str, str], least_nodes: int) -> NodeList | None:
    asked = [
        name for name in ("engine", "hosts", "hostfile") if name in given and given[name].value != DEFAULTS[name]
    ]
    if not asked or (asked == ["engine"] and given["engine"].value == "auto"):
        return None
    from infini_run.options.from_environment import read_file
    from infini_run.options.nodes import resolve_nodes

    return resolve_nodes(given, environ, read_file, least_nodes)


def _apply_endpoint(given: Given) -> None:
    """Apply the endpoint. For one without a port, torchrun's c10d has a default port."""
    endpoint, backend = given.get("rdzv_endpoint"), given.get("rdzv_backend")
    if endpoint is None or endpoint.value[1] >= 0:
        return
    if backend is None or backend.value != "c10d":
        raise UsageError(f"{endpoint.origin}: {NO_PORT}")
    given["rdzv_endpoint"] = replace(endpoint, value=(endpoint.value[0], _C10D_PORT))


def _apply_standalone(given: Given) -> None:
    """Apply one node and a free port, over everything that a lower authority says of nodes and ports."""
    ours = given.get("standalone")
    if ours is None or not ours.value:
        return
    theirs = [given[name] for name in _RENDEZVOUS if name in given and not _is_one_node(name, given[name].value)]
    for setting in theirs:
        if setting.precedence == ours.precedence:
            raise UsageError(
                f"{ours.origin} conflicts with {setting.origin}: it means one node and a free port; drop one of them"
            )
    if any(setting.precedence < ours.precedence for setting in theirs):
        del given["standalone"]
        return
    for name in _RENDEZVOUS:
        if name in given and given[name].precedence > ours.precedence:
            del given[name]
    given["nnodes"] = replace(ours, value=1)


def _is_one_node(name: str, value: Any) -> bool:
    """Return whether a value agrees with one node and a free port."""
    if name == "nnodes":
        return bool(value == 1)
    if name == "rdzv_endpoint":
        return bool(value[1] == 0)
    return name != "master_port" or value == 0


def _wants_free_port(given: Given, values: Values) -> bool:
    """Return whether nobody named a port and nobody needs it beforehand."""
    is_alone = values["standalone"] or (values["rdzv_backend"] == "c10d" and values["nnodes"] == 1)
    return is_alone and "rdzv_endpoint" not in given and "master_port" not in given


def _rendezvous_part(given: Given, name: str, part: int) -> Any:
    """Return the address or the port: its own flag or its part of the endpoint, by authority."""
    own, whole = given.get(name), given.get("rdzv_endpoint")
    if whole is None:
        return own.value if own else DEFAULTS[name]
    if own is None or own.precedence > whole.precedence:
        return whole.value[part]
    if own.precedence == whole.precedence and own.value != whole.value[part]:
        raise UsageError(f"{whole.origin} conflicts with {own.origin}; drop one of them")
    return own.value


def _apply_live(given: Given, values: Values) -> None:
    """Settle the screen. A table and lines cannot share it: the higher authority has it. `auto` takes one that nobody
    uses.

    Whether there is a screen is unknown here: without one, the console is what it would be without the table."""
    live, console = given.get("live"), given.get("console")
    if values["live"] == "on" and console is not None and console.value not in ("auto", "none"):
        assert live is not None
        if live.precedence == console.precedence:
            raise UsageError(
                f"{live.origin} conflicts with {console.origin}: a table replaces the lines; drop one of them "
                "(--log_dir=DIR writes the lines to files)"
            )
        values["live"] = "on" if live.precedence < console.precedence else "off"
    if values["live"] == "auto" and values["console"] != "none":
        values["live"] = "off"


def _is_open(values: Values, node_list: NodeList | None, *, has_token: bool) -> bool:
    """Return whether only all nodes together know how many ranks there are: each has its own, and a token joins
    them."""
    by_hand = node_list is None and values["nnodes"] > 1 and has_token
    return by_hand or not isinstance(values["nproc_per_node"], int)


def _check_job(given: Given, values: Values, counts: Sequence[int], *, is_ours: bool) -> None:
    """Check the numbers of a job. is_ours: this launcher starts all nodes. counts: their ranks, where they differ."""
    nnodes, nproc, nodes = values["nnodes"], values["nproc_per_node"], _quoted_setting(given, "nnodes")
    if values["node_rank"] >= nnodes + values["spares"]:
        raise UsageError(
            f"{_quoted_setting(given, 'node_rank')}: with {nodes}, expected a rank from 0 to {nnodes - 1}"
        )
    is_c10d = values["rdzv_backend"] == "c10d" and values["node_rank"] != HANDED_OUT
    if nnodes > 1 and not is_ours and is_c10d and "node_rank" not in given:
        raise UsageError(
            f"{_quoted_setting(given, 'rdzv_backend')} with {nodes}: rank of this node unknown; use --engine=auto "
            f"to ask Slurm, PBS, MPI, or Kubernetes, set the same {TOKEN}=... on every node to have ranks assigned, "
            "or add --node_rank=N"
        )
    if nnodes > 1 and not is_ours and values["master_port"] == 0:
        port = _quoted_setting(given, "master_port" if "master_port" in given else "rdzv_endpoint")
        raise UsageError(f"{port}: cannot be a free port with {nodes}; use a port from 1 to 65535")
    if isinstance(nproc, int) and not counts and nnodes * nproc > MAX_INT:
        each = _quoted_setting(given, "nproc_per_node")
        raise UsageError(f"{nodes} and {each} make {nnodes * nproc} ranks; use at most {MAX_INT}")


def _check_program(given: Given, values: Values) -> None:
    for name in ("one_world", "ends_job", "on_nodes", "after", "ready_port", "restart_scope"):
        if values[name] != DEFAULTS[name] and not values["name"]:
            raise UsageError(f"{given[name].origin}: needs programs with names; add --program=NAME")
    if not values["name"] and ("ranks_on_console" in given or "stdin" in given):
        _check_no_names(given, values)
    if values["module"] and values["no_python"]:
        module, no_python = given["module"], given["no_python"]
        if module.precedence == no_python.precedence:
            raise UsageError(
                f"{module.origin} conflicts with {no_python.origin}: a module needs Python; drop one of them"
            )
        values["no_python" if module.precedence < no_python.precedence else "module"] = False
    if not values["program"]:
        what = "module" if values["module"] else "program"
        for setting in given.values():
            flag, _, text = setting.origin.partition("=")
            if setting.precedence == COMMAND_LINE and text.endswith(PYTHON_FILES):
                raise UsageError(f"missing {what}: {flag} took {text} as its value; use {flag}=VALUE")
        raise UsageError(f"missing {what}; use {USAGE}, or run infini-run --help")


def _check_no_names(given: Given, values: Values) -> None:
    for name, ranks in (("ranks_on_console", values["ranks_on_console"] or ()), ("stdin", (values["stdin"],))):
        program = next((rank.rpartition(":")[0] for rank in ranks if isinstance(rank, str)), "")
        if program:
            raise UsageError(f"{given[name].origin}: unknown program {program}; add --program={program}")


def _check_preload(given: Given, values: Values, *, is_task: bool) -> None:
    flag = given["preload"].origin
    if is_task:
        raise UsageError(
            f"{flag}: each task of the scheduler is one rank, and nothing is shared; run one task per node"
        )
    if values["bind"] != "none":
        raise UsageError(
            f"{flag}: conflicts with {given['bind'].origin}: imported memory stays where the imports ran; drop one"
        )


def _check_output(given: Given, values: Values) -> None:
    if values["redirects"] != DEFAULTS["redirects"] and not values["log_dir"]:
        raise UsageError(
            f"{_quoted_setting(given, 'redirects')}: needs a file; add --log_dir=DIR (--log_dir=/dev/null drops "
            "that output)"
        )
    if values["timestamps"] and values["console"] == "inherit":
        raise UsageError(
            f"{given['timestamps'].origin}: conflicts with {given['console'].origin}, where ranks write themselves; "
            "use --console=prefix, fold, or lines"
        )
    if values["log_layout"] != DEFAULTS["log_layout"] and not values["log_dir"]:
        raise UsageError(f"{_quoted_setting(given, 'log_layout')}: needs files to lay out; add --log_dir=DIR")
    if values["log_layout"] == "torchrun" and "/" in values["run_id"]:
        raise UsageError(
            f"{_quoted_setting(given, 'run_id')}: cannot contain /, because --log_layout=torchrun names a folder "
            "after it"
        )


def _check_world(given: Given, values: Values, cluster: ClusterEnvironment | None, counts: Sequence[int]) -> None:
    """Check that the ranks that flags name exist. counts: of each node, where they differ."""
    nproc, stdin = values["nproc_per_node"], values["stdin"]
    world = cluster.world_size if cluster is not None and cluster.is_task else sum(counts) or values["nnodes"] * nproc
    _check_ranks(given, "ranks_on_console", values["ranks_on_console"] or (), world, "ranks")
    _check_ranks(given, "stdin", (stdin,) if isinstance(stdin, int) else (), world, "ranks")
    _check_ranks(given, "local_ranks_filter", values["local_ranks_filter"] or (), nproc, "local ranks")
    for name in ("redirects", "tee"):
        _check_ranks(given, name, [rank for rank, _ in values[name].ranks], nproc, "local ranks")


def _check_ranks(given: Given, name: str, ranks: Sequence[int], count: int, what: str) -> None:
    if ranks and max(ranks) >= count:
        raise UsageError(f"{_quoted_setting(given, name)}: unknown rank {max(ranks)}; use {what} 0 to {count - 1}")
