"""The command `infini-run`: words in, an exit code out. The process is its own, and it takes all of it."""

from __future__ import annotations

import _signal
import sys

import infini_run.lean_os as os
from infini_run.errors import NO_MEMORY, InfiniRunError, UsageError, printable
from infini_run.value_types import DESCRIPTOR, ISOLATED, MARKER_VARIABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from infini_run.core.c_structs import ProcessState
    from infini_run.display.observers import Observers
    from infini_run.environments.environment import ClusterEnvironment
    from infini_run.node.launch import NodeLaunch
    from infini_run.node.restarting_launch import RestartingLaunch
    from infini_run.node.warm_zygote import WarmZygote
    from infini_run.options.launch_options import Options
    from infini_run.options.options import Request
    from infini_run.plan.model import Plan


def main() -> None:
    """Run, and leave at once: the interpreter's own end costs 2 ms and has nothing to do here.

    Until something is started a signal does what it does to any program. As process 1 that is nothing: the
    kernel drops what is neither blocked nor handled, so there they are blocked from the first line on.
    """
    mask_at_entry = _block() if os.getpid() == 1 else None
    os.drop_coerced_locale()
    try:
        code = _run(sys.argv[1:], mask_at_entry)
    except InfiniRunError as error:
        _write_line(f"infini-run: {printable(str(error))}")
        code = error.exit_code
    except MemoryError:
        _print(2, f"infini-run: out of memory; {NO_MEMORY}")
        code = 1
    except OSError as error:
        limit = _limit_behind(error)
        if not limit:
            raise
        _print(2, f"infini-run: {error.strerror}; {limit}")
        code = 1
    os._exit(code)


def _limit_behind(error: OSError) -> str:
    """Return the limit that caused an error, for its line; "": none did. Without a descriptor, or memory, no import
    works."""
    try:
        from infini_run.system.resource_limits import LIMITS
    except (OSError, MemoryError):
        known = {os.ENOMEM: NO_MEMORY, os.EMFILE: "raise ulimit -n or ulimit -Hn", os.ENFILE: "raise fs.file-max"}
        return known.get(error.errno or 0, "")
    return LIMITS.get(error.errno or 0, "")


def _block() -> set[int]:
    return set(_signal.pthread_sigmask(_signal.SIG_BLOCK, _signal.valid_signals()))


def _run(argv: list[str], mask_at_entry: set[int] | None) -> int:
    from infini_run.options.options import resolve

    environ = os.own_environ()
    request = resolve(argv, environ)
    if request.asked is not None:
        from infini_run.questions.command import ask_running

        _unblock(mask_at_entry)
        text, code = ask_running(request.asked, environ)
        return (_print(1, text) if text else 0) or code
    if request.options is None:
        return _print_information(request.question, request.arguments, mask_at_entry)
    options = request.options
    if request.question == "doctor":
        return _run_doctor(request, options, environ, mask_at_entry)
    if ISOLATED not in environ:  # else it was said one level up
        _warn_of_environment(request, environ)
        _warn_of_words(request, argv, options, environ)
    try:
        return _run_and_note(request, options, environ, mask_at_entry)
    except UsageError as error:
        text = str(error)
        named = request.name_variable(text)
        if named == text:
            raise
        raise UsageError(named) from None


def _run_and_note(request: Request, options: Options, environ: dict[str, str], mask_at_entry: set[int] | None) -> int:
    """Run, and write an error where --termination_log says, too."""
    if not options.termination_log or options.dry_run:
        return _run_options(request, options, environ, mask_at_entry)
    from infini_run.plan.program import absolute_flag_path
    from infini_run.record import replace
    from infini_run.system.secure_files import clear_message, write_message

    path = absolute_flag_path("termination_log", options.termination_log)
    clear_message("termination_log", path)
    try:
        return _run_options(request, replace(options, termination_log=path), environ, mask_at_entry)
    except InfiniRunError as error:
        write_message(path, f"infini-run: {printable(request.name_variable(str(error)))}\n")
        raise


def _run_options(request: Request, options: Options, environ: dict[str, str], mask_at_entry: set[int] | None) -> int:
    if request.node_list is not None:
        from infini_run.multinode.command import render_plan, run_on_hosts

        if options.dry_run:
            cluster = request.cluster or _allocation(options, environ)
            return _print(1, render_plan(options, request.node_list, cluster, environ))
        if request.cluster is not None:
            _print_environment(request.cluster, options)
        return run_on_hosts(options, request.node_list, environ, print_line=_print_line)
    if _joins_by_hand(options, request.cluster, environ):
        from infini_run.multinode.command import run_as_peer

        if options.engine == "auto":
            environ = _prepare_environment(request.cluster, options, environ)
        if mask_at_entry is not None:
            from infini_run.core.signal_pipe import end_by_signals

            end_by_signals()
            _unblock(mask_at_entry)
        return run_as_peer(options, environ, print_line=_print_line)
    inside = environ.pop(ISOLATED, "").split()
    is_inside = len(inside) == 3 and inside[0].isdecimal() and inside[2].isdecimal() and os.getpid() == 1
    launch_id, suspend_write_fd = "", -1
    if is_inside:
        mask_at_entry = {number for number in range(1, 65) if int(inside[0]) >> (number - 1) & 1}
        launch_id, suspend_write_fd = inside[1], int(inside[2])
        os.set_inheritable(suspend_write_fd, False)
    if options.isolate and not options.dry_run and not is_inside:
        if options.events.startswith(DESCRIPTOR):
            from infini_run.display.event_stream import check_descriptor

            check_descriptor(options.events)
        return _run_isolated(options, environ, mask_at_entry)
    if options.engine == "auto":
        environ = _prepare_environment(request.cluster, options, environ)
    if options.node_rank < 0:  # options/table.py HANDED_OUT
        from infini_run.record import replace

        _print_line("infini-run: the head assigns the node rank; the plan is that of node 0")
        options = replace(options, node_rank=0)
    elif options.dry_run and options.node_rank >= options.nnodes:  # the environment numbers spares, too
        from infini_run.record import replace

        _print_line("infini-run: this node is a spare; the plan is that of node 0")
        options = replace(options, node_rank=0)
    if options.dry_run and options.is_elastic and not _has_token(options, environ):
        _print_line(
            "infini-run: the launch itself needs a token to join its nodes; set the same INFINI_RUN_TOKEN=... on "
            "every node"
        )
    observers: Observers | None = None
    is_written = options.trace or options.events or options.metrics
    is_seen = is_written or options.live == "on" or (options.live == "auto" and os.isatty(2))
    if is_seen and not options.dry_run:
        from infini_run.display.observers import open_observers

        observers, options = open_observers(options, environ, print_line=_print_line)
    try:
        plan = _make_plan(options, environ, launch_id, request.cluster)
    except InfiniRunError as error:
        if observers is not None:
            observers.finish(error)
            observers.close()
        raise
    for notice in plan.nodes[0].notices:
        _print_line(f"infini-run: {notice}")
    if options.nnodes > 1 and not (request.cluster and request.cluster.rank > 0):
        _warn_of_address(options)
        if not options.is_elastic and not _has_token(options, environ):  # elastic launchers do not start without one
            _warn_of_restarts(options)
    if options.dry_run:
        return _show(plan, options, environ, mask_at_entry, request.cluster)
    if request.cluster is not None and request.cluster.is_task:
        from infini_run.node.exec_rank import exec_rank

        _unblock(mask_at_entry)
        exec_rank(plan, environ)
    return _launch(plan, options, environ, mask_at_entry, suspend_write_fd, observers)


def _warn_of_environment(request: Request, environ: dict[str, str]) -> None:
    """Warn of variables that set no flag, and of a scheduler's other nodes or tasks that no flag asks for."""
    from infini_run.options.table import PREFIXES, may_be_first_of_cluster, unknown_variables

    names = unknown_variables(environ)
    if names:
        from infini_run.options.notices import of_variables

        _print_line(f"infini-run: {printable(of_variables(names, PREFIXES[0].text))}")
    if not request.is_alone_by_default or environ.get(MARKER_VARIABLE) or not may_be_first_of_cluster(environ):
        return
    from infini_run.options.from_environment import read_file
    from infini_run.options.notices import of_cluster

    line = of_cluster(environ, read_file)
    if line:
        _print_line(f"infini-run: {printable(line)}")


def _warn_of_words(request: Request, argv: list[str], options: Options, environ: dict[str, str]) -> None:
    """Warn of words that have no effect."""
    if request.without_effect and not options.dry_run:
        _print_line(f"infini-run: {printable(request.without_effect)}")
    if ":" in options.program:
        from infini_run.options.notices import of_colon

        line = of_colon(options.program, environ)
        if line:
            _print_line(f"infini-run: {printable(line)}")
            return
    if options.programs:
        return
    from infini_run.options.options import LAUNCHERS_OWN, find_late_flag

    late = find_late_flag(argv, options.program, LAUNCHERS_OWN)
    if late:
        from infini_run.options.hints import of_late_flag

        _print_line(f"infini-run: {printable(of_late_flag(options.program, late))}")


def _take_over_process(mask_at_entry: set[int] | None) -> ProcessState:
    from infini_run.core.group import take_over_process

    blocked = _block() if mask_at_entry is None else mask_at_entry
    return take_over_process(sum(1 << (number - 1) for number in blocked))


def _joins_by_hand(options: Options, cluster: ClusterEnvironment | None, environ: dict[str, str]) -> bool:
    """Return whether a token joins this launcher and others; a task that is one rank is no launcher."""
    is_task = cluster is not None and cluster.is_task
    is_one_of_several = options.nnodes > 1 or options.is_elastic
    return is_one_of_several and not options.dry_run and not is_task and _has_token(options, environ)


def _has_token(options: Options, environ: dict[str, str]) -> bool:
    from infini_run.options.table import TOKEN

    return bool(environ.get(TOKEN) or options.token_file)


def _allocation(options: Options, environ: dict[str, str]) -> ClusterEnvironment | None:
    """Return the allocation whose nodes an engine takes, for the plan. None: flags name the nodes."""
    if options.hosts or options.hostfile:
        return None
    from infini_run.options.from_environment import find_allocation

    return find_allocation(environ)


def _prepare_environment(
    cluster: ClusterEnvironment | None, options: Options, environ: dict[str, str]
) -> dict[str, str]:
    """Print what was found. Return the environment without the variables that belong to one process alone."""
    from infini_run.environments.launcher_variables import strip_launcher_environment

    _print_environment(cluster, options)
    if cluster is None or cluster.is_task:
        return environ
    if cluster.engine == "slurm":
        from infini_run.environments.slurm import explain_binding
        from infini_run.system.cgroup import count_own_cpus

        binding = explain_binding(environ, *count_own_cpus())
        if binding:
            _print_line(f"infini-run: {binding}")
    return strip_launcher_environment(environ, options.export)


def _print_environment(cluster: ClusterEnvironment | None, options: Options) -> None:
    """Print what was found, if that is asked for or guessed."""
    from infini_run.options.from_environment import NOTHING, describe

    if not options.dry_run and (options.verbose or (cluster and cluster.warning)):
        _print_line(
            "infini-run: " + printable(NOTHING if cluster is None else "; ".join(map(str.strip, describe(cluster))))
        )


def _warn_of_restarts(options: Options) -> None:
    """Warn once that each launcher restarts alone."""
    if options.max_restarts and options.node_rank == 0:
        _print_line(
            "infini-run: --max_restarts on several nodes: each restarts alone, out of step with the others; set the "
            "same INFINI_RUN_TOKEN=... on every node to make them one job"
        )


def _warn_of_address(options: Options) -> None:
    if not options.rdzv_explicit:
        _print_line("infini-run: other nodes cannot reach 127.0.0.1; add --rdzv_endpoint=HOST:PORT of node 0")
        return
    from infini_run.system.addresses import read_hosts, unreachable_reason

    why = unreachable_reason(options.master_addr, read_hosts())
    if why:
        _print_line(
            f"infini-run: other nodes cannot reach node 0: {printable(why)}; use another --rdzv_endpoint or "
            "--master_addr"
        )


def _make_plan(options: Options, environ: dict[str, str], launch_id: str, cluster: ClusterEnvironment | None) -> Plan:
    """Plan the ranks of this node: alone, as one of several nodes, or as one task of a step."""
    from infini_run.node import plan_node
    from infini_run.plan.model import SingleRank

    task = None
    if cluster is not None and cluster.is_task:
        task = SingleRank(rank=cluster.rank, local_rank=cluster.local_rank, world_size=cluster.world_size)
        launch_id = f"ir-{cluster.engine}-{cluster.job_id}" if cluster.job_id else ""
    span = None
    if cluster is not None and cluster.counts:
        from infini_run.plan.rank_numbers import spans_of

        span = spans_of(cluster.counts)[options.node_rank]
    return plan_node(options, environ, launch_id=launch_id, task=task, span=span)


def _launch(
    plan: Plan,
    options: Options,
    environ: dict[str, str],
    mask_at_entry: set[int] | None,
    suspend_write_fd: int,
    observers: Observers | None,
) -> int:
    from infini_run.plan.program import absolute_flag_path
    from infini_run.record import replace

    entry = replace(_take_over_process(mask_at_entry), suspend_write_fd=suspend_write_fd)
    report_path = absolute_flag_path("report", options.report) if options.report else ""
    try:
        run = _start(plan, options, environ, entry, observers)
        key = _poll_to_end(run, suspend_write_fd)
        run.close()
        is_asked = bool(report_path) or observers is not None
        report = run.report() if is_asked or not run.went_well else None
        if observers is not None and report is not None:
            observers.finish(report)
    except InfiniRunError as error:
        if observers is not None:
            observers.finish(error)
        raise
    finally:
        if observers is not None:
            _print_problem(observers.close())
    if report is None:
        return 0
    if report_path:
        from infini_run.system.secure_files import save_report

        _print_problem(save_report(report_path, report.to_json()))
    text = report.text()
    if options.termination_log and report.exit_code:
        from infini_run.system.secure_files import save_message

        _print_problem(save_message(options.termination_log, text))
    if text:
        _write_line(text, is_bounded=bool(report.received_signal))
    by_rank = 0
    if report.user_interrupted and report.first_failure is not None:
        by_rank = report.first_failure.signal
        _notify_outer_launcher(by_rank, suspend_write_fd)
    return _end(report.exit_code, by_rank or key, whole_group=bool(by_rank))


def _poll_to_end(run: NodeLaunch | RestartingLaunch, suspend_write_fd: int) -> int:
    """Return the signal that a key of the terminal sent; 0: none."""
    key = 0
    while not run.ended:
        for event in run.poll():
            if event.kind == "signalled" and event.code:
                key = event.signal
                _notify_outer_launcher(key, suspend_write_fd)
    return key


def _notify_outer_launcher(number: int, suspend_write_fd: int) -> None:
    """Tell the launcher outside of --isolate to end by a signal, as process 1 cannot."""
    if suspend_write_fd >= 0 and number:
        os.write(suspend_write_fd, bytes([number]))


def _end(code: int, key: int, *, whole_group: bool) -> int:
    """Return an exit code, or end by the signal that a key of the terminal sent, if the job ended for that."""
    if key and code == 128 + key:
        from infini_run.core.signal_pipe import end_as_interrupted

        end_as_interrupted(key, whole_group=whole_group)
    return code


def _start(
    plan: Plan, options: Options, environ: dict[str, str], entry: ProcessState, observers: Observers | None
) -> NodeLaunch | RestartingLaunch:
    """Start the ranks. A launch that may restart them stays in their directory, and keeps descriptors for them."""
    run: NodeLaunch | RestartingLaunch
    zygote: WarmZygote | None = None
    if options.preload:
        from infini_run.node.warm_zygote import WarmZygote

        zygote = WarmZygote(plan, options, environ=environ, entry=entry, print_line=_print_line)
    if options.max_restarts:
        from infini_run.node.restarting_launch import RestartingLaunch

        run = RestartingLaunch(
            plan,
            options,
            environ=environ,
            entry=entry,
            print_line=_print_line,
            observers=observers,
            zygote=zygote,
        )
        run.start()
        return run
    from infini_run.core.group import release_caller_descriptors
    from infini_run.node.launch import NodeLaunch

    given: dict[str, Any] = {"environ": environ, "entry": entry, "print_line": _print_line, "observers": observers}
    if zygote is None:
        run = NodeLaunch(plan, options, is_last=True, **given)
    else:
        from infini_run.node.warm_launch import WarmLaunch

        run = WarmLaunch(plan, options, is_last=True, zygote=zygote, **given)
    try:
        run.start()
    finally:
        if zygote is not None:
            zygote.close()  # no attempt follows
    if not run.starts_more:  # those start here, with these descriptors
        release_caller_descriptors(entry.inherited_end)
    return run


def _print_problem(problem: str) -> None:
    if problem:
        _print_line(f"infini-run: {printable(problem)}")


def _run_isolated(options: Options, environ: dict[str, str], mask_at_entry: set[int] | None) -> int:
    """Run this same command as process 1 of a new PID namespace: when it ends, the kernel ends all in it.

    The inner command stops its ranks within its grace; the grace here is for the case that it does not.
    """
    from infini_run.node.pid_namespace import open_suspend_pipe, run_isolated
    from infini_run.plan.program import launch_folder, new_launch_id, remove_launch_folder

    if "pydevd" in sys.modules:
        raise UsageError("--isolate: the debugger that runs infini-run cannot follow; drop --isolate")

    entry = _take_over_process(mask_at_entry)
    launch_id = new_launch_id()  # the inner command's: if that is killed, this process removes its folder
    suspend_read_fd, suspend_write_fd = open_suspend_pipe()
    environ[ISOLATED] = f"{entry.blocked} {launch_id} {suspend_write_fd}"
    command = _same_command()
    folder = launch_folder(options, launch_id, environ)
    try:
        code, key, is_theirs = run_isolated(
            command,
            environ,
            entry,
            grace_s=options.signal_grace_s,
            suspend_read_fd=suspend_read_fd,
            folder=folder,
            print_line=_print_line,
        )
    finally:
        if folder:
            remove_launch_folder(folder)
    return _end(code, key, whole_group=is_theirs)


def _same_command() -> list[str]:
    """Return this command once more; in a frozen program, that program. -m would look into the working directory
    before the first line; the arguments of a program that embeds Python are unknown."""
    from infini_run.system.interpreter import executable_text, own_python

    words = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]
    if sys.orig_argv and words[-2:] != ["-m", "infini_run"]:
        return [executable_text(), *sys.orig_argv[1:]]
    python, *start = own_python("infini_run.cli.main")
    return [python, *words[:-2], *start, *sys.argv[1:]]


def _print_information(question: str, words: tuple[str, ...], mask_at_entry: set[int] | None) -> int:
    _unblock(mask_at_entry)
    if question == "plot":
        from infini_run.display.plot import plot

        plot(words[0], words[1:])
        return 0
    if question == "completion":
        from infini_run.options.completion import script

        if words[0] != "install":
            return _print(1, script(words[0]).rstrip("\n"))
        from infini_run.options.install_completion import install_completion

        lines, code = install_completion("infini-run", script, os.own_environ())
        return _print(1, "\n".join(lines)) or code
    if question == "version":
        from importlib.metadata import version

        return _print(1, f"infini-run {version('infini-run')}")
    from infini_run.options.help import flag_text, full_help_text, help_text

    if words:
        return _print(1, flag_text(words[0]))
    return _print(1, full_help_text() if question == "helpfull" else help_text())


def _run_doctor(request: Request, options: Options, environ: dict[str, str], mask_at_entry: set[int] | None) -> int:
    from infini_run.doctor.command import run_doctor

    _unblock(mask_at_entry)
    text, code = run_doctor(options, request.node_list, environ, request.arguments[0])
    return _print(1, text) or code


def _show(
    plan: Plan,
    options: Options,
    environ: dict[str, str],
    mask_at_entry: set[int] | None,
    cluster: ClusterEnvironment | None,
) -> int:
    from infini_run.plan.dry_run import render_json, render_text

    _unblock(mask_at_entry)
    render = render_json if options.dry_run == "json" else render_text
    spares = [""] * options.spares
    preload, auto = options.preload, ""
    if preload == ("auto",):
        from infini_run.plan.auto_modules import find_auto_modules

        preload, auto = find_auto_modules(plan, environ)
    least = options.least_nodes
    return _print(1, render(plan, cluster, least_nodes=least, spares=spares, preload=preload, auto=auto))


def _unblock(mask_at_entry: set[int] | None) -> None:
    """Unblock the signals that the command blocked: its answer may meet a pager that is gone, or it waits for
    others."""
    if mask_at_entry is not None:
        _signal.pthread_sigmask(_signal.SIG_SETMASK, mask_at_entry)


def _print_line(text: str) -> None:
    _write_line(text, is_bounded=True)


def _write_line(text: str, *, is_bounded: bool = False) -> None:
    """Write a line for the user to stderr.

    Args:
        text: the line.
        is_bounded: wait for a reader that does not read one second at most. Else until a signal comes: the launch
            finished, so nothing else acts on signals. Before the core is loaded, a signal ends this process.
    """
    if "infini_run._irun" not in sys.modules:
        _print(2, text)
        return
    from infini_run.core.nonblocking_writer import CONSOLE_WAIT_S, write_all

    write_all(
        2, os.encode_text(text + "\n"), CONSOLE_WAIT_S if is_bounded else None, None if is_bounded else _stop_fd
    )


def _stop_fd() -> int:
    try:
        from infini_run.core.signal_pipe import SignalPipe

        return SignalPipe().fd
    except OSError:  # too few descriptors, which is what the line is about
        return -1


def _print(fd: int, text: str) -> int:
    """Write an answer. Return 1 if it is not writable, else 0. A reader that closes early is no failure."""
    data = os.encode_text(text + "\n")
    try:
        while data:
            data = data[os.write(fd, data) :]
    except BrokenPipeError:
        return 0
    except OSError as error:
        if fd == 1:
            _print(2, f"infini-run: the answer cannot be written: {error.strerror}")
        return 1
    return 0
