"""The Python API: `run` for a launch from start to end; process_launcher.py has `ProcessLauncher`."""

from __future__ import annotations

import os
import time

from infini_run.core.group import forking
from infini_run.errors import LaunchTimeout, StartError, UsageError
from infini_run.node.host_stderr import has_own_stderr, print_line
from infini_run.number_arguments import read_seconds
from infini_run.options.from_python import (
    check_names,
    check_path,
    make_environment,
    read_command,
    read_flags,
)
from infini_run.options.keyword_errors import KeywordErrors
from infini_run.options.table import TABLE
from infini_run.process_launcher import ProcessLauncher
from infini_run.record import replace
from infini_run.report.failures import WorkerError
from infini_run.system.exit_hooks import close_at_exit, closed
from infini_run.system.fork_hooks import call_in_forked_children
from infini_run.system.monkey_patches import check_threads

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from typing_extensions import Unpack

    from infini_run.multinode.head.head_observers import HeadObservers
    from infini_run.options.from_python import Program
    from infini_run.options.keywords import ProgramOptions, RunOptions
    from infini_run.options.launch_options import Options
    from infini_run.options.nodes import NodeList
    from infini_run.report.report import Report


def run(
    command: Sequence[str] | Sequence[Program],
    *,
    check: bool = True,
    timeout_s: float | None = None,
    env: Mapping[str, str] | None = None,
    inherit_env: bool = True,
    cwd: str | os.PathLike[str] | None = None,
    **flags: Unpack[RunOptions],
) -> Report:
    """Run a command on every rank, from start to end.

    After any exception, also after Ctrl-C, no rank is left.

    Args:
        command: The program and its arguments; or a list of `Program`, several programs of one job.
        check: Raise WorkerError if a rank failed.
        timeout_s: Seconds after which everything is stopped. None: no limit.
        env: Variables that are added to the environment of the ranks. None: none.
        inherit_env: The ranks have this process's environment, too.
        cwd: Where the ranks start, and where a relative program is looked for. None: this process's.
        flags: The command's flags by their names: `nproc_per_node=8` (or `nproc=8`), `log_dir="logs"`, `grace=30`.
            `hosts=["a", "b"]` or `engine="slurm"` reach many nodes. With `engine="auto"` this process is the
            launcher of the node that the cluster environment names, or of a whole allocation. By default, `stdin` is
            "none", because typed input is for the host program.

    Returns:
        How every rank ended.

    Raises:
        UsageError: The request is invalid. Nothing was started.
        ProgramError: The program does not exist, or cannot be executed. Nothing was started.
        StartError: A rank could not be created.
        WorkerError: A rank failed, and `check` is true.
        LaunchTimeout: `timeout_s` has passed.
        NodeLost: A node could not be reached, or was lost.
    """
    check_names("run", flags, TABLE, run)
    timeout_s = None if timeout_s is None else read_seconds("timeout_s", timeout_s)
    (words, programs), environ = read_command(command), make_environment(env, inherit_env)
    request = read_flags(flags, words, environ, programs)
    assert request.options is not None
    errors = KeywordErrors(flags, has_programs=bool(programs))
    node_list = request.node_list or _preloading_node(request.options)
    if node_list is not None:
        with errors:
            return _run_on_nodes(request.options, node_list, environ, check, timeout_s, cwd, errors)
    with _WaitedForLauncher(command, env=environ, inherit_env=False, cwd=cwd, **flags) as launcher:
        launcher.launch()
        if not launcher.wait(timeout_s):
            raise LaunchTimeout(
                f"{programs[0].name if programs else words[0]} did not end within {timeout_s:g} s; stopped all ranks"
            )
        launcher.close()  # what an observer could not write is in the report
        report = launcher.report()
    if check and report.exit_code != 0:
        raise WorkerError(report)
    return report


def launch_local(
    program: str,
    num_processes: int,
    args: Sequence[str] = (),
    log_dir: str = "./logs",
    *,
    check: bool = True,
    timeout_s: float | None = None,
    env: Mapping[str, str] | None = None,
    inherit_env: bool = True,
    cwd: str | os.PathLike[str] | None = None,
    **flags: Unpack[ProgramOptions],
) -> Report:
    """Run a program in processes of this machine, each with a log file, and with a GPU if there are enough.

    Args:
        program: The program. A .py file is run by this Python.
        num_processes: How many processes.
        args: Its arguments.
        log_dir: The directory of the log files.
        check: Raise WorkerError if a rank failed.
        timeout_s: Seconds after which everything is stopped. None: no limit.
        env: Variables that are added to the environment of the ranks. None: none.
        inherit_env: The ranks have this process's environment, too.
        cwd: Where the ranks start, and where a relative program is looked for. None: this process's.
        flags: The command's flags by their names: `grace=30`. `gpus_per_proc=0` leaves CUDA_VISIBLE_DEVICES alone.

    Returns:
        How every rank ended.

    Raises:
        UsageError: The request is invalid. Nothing was started.
        ProgramError: The program does not exist, or cannot be executed. Nothing was started.
        StartError: A rank could not be created.
        WorkerError: A rank failed, and `check` is true; its `rank` and `exit_code` say which and how.
        LaunchTimeout: `timeout_s` has passed.
    """
    check_names("launch_local", flags, TABLE, launch_local)
    given: dict[str, Any] = {**flags, "nproc_per_node": num_processes, "log_dir": log_dir}
    given |= {"check": check, "timeout_s": timeout_s, "cwd": cwd}
    if "gpus_per_proc" not in given:
        from infini_run.devices.visible import find
        from infini_run.errors import DeviceError

        try:
            enough = len(find(make_environment(env, inherit_env)).gpus) >= num_processes
        except DeviceError:
            enough = False
        given["gpus_per_proc"] = 1 if enough else 0
    return run([program, *args], env=env, inherit_env=inherit_env, **given)


def launch_multi_node(
    program: str,
    hosts: Sequence[str],
    num_processes_per_node: int,
    args: Sequence[str] = (),
    log_dir: str = "./logs",
    *,
    check: bool = True,
    timeout_s: float | None = None,
    env: Mapping[str, str] | None = None,
    inherit_env: bool = True,
    cwd: str | os.PathLike[str] | None = None,
    **flags: Unpack[ProgramOptions],
) -> Report:
    """Run a program in some processes on each of some hosts, with a log file for each on its own host.

    Args:
        program: The program. A .py file is run by the Python of each host.
        hosts: Their names. They are reached by ssh, unless `engine=` names another engine.
        num_processes_per_node: How many processes on each.
        args: The program's arguments.
        log_dir: The directory of the log files on each host.
        check: Raise WorkerError if a rank failed.
        timeout_s: Seconds after which everything is stopped. None: no limit.
        env: Variables that are added to the environment of the ranks. None: none.
        inherit_env: The ranks have this process's environment, too.
        cwd: Where the ranks start, and where a relative program is looked for. None: this process's.
        flags: The command's flags by their names: `engine="slurm"`, `ssh_config="file"`, `grace=30`.

    Returns:
        How every rank ended.

    Raises:
        UsageError: The request is invalid. Nothing was started.
        ProgramError: The program does not exist, or cannot be executed. Nothing was started.
        StartError: A rank could not be created.
        WorkerError: A rank failed, and `check` is true; its `rank` and `exit_code` say which and how.
        LaunchTimeout: `timeout_s` has passed.
        NodeLost: A host could not be reached, or was lost.
    """
    check_names("launch_multi_node", flags, TABLE, launch_multi_node)
    given: dict[str, Any] = {**flags, "nproc_per_node": num_processes_per_node, "log_dir": log_dir}
    given |= {"check": check, "timeout_s": timeout_s, "cwd": cwd}
    return run([program, *args], env=env, inherit_env=inherit_env, hosts=hosts, **given)


def _preloading_node(options: Options) -> NodeList | None:
    """Return this machine as the one node of a launch with `preload=`: its agent forks the ranks.

    Forked ranks come to the process that adopts orphans (decision 66). A host program must not be that: it would get
    the orphans of its other children, too. None: there is no `preload=`. Raises UsageError: the launch is one of
    several, one on each node.
    """
    if not options.preload:
        return None
    if options.nnodes > 1:
        raise UsageError(
            f"preload=: this is one of {options.nnodes} launches, one on each node; use hosts=, or the command"
        )
    from infini_run.environments.hostlist import Host
    from infini_run.options.nodes import NodeList

    return NodeList(engine="this_node", hosts=(Host(name=os.uname().nodename),))


def _run_on_nodes(
    options: Options,
    node_list: NodeList,
    environ: Mapping[str, str],
    check: bool,
    timeout_s: float | None,
    cwd: str | os.PathLike[str] | None,
    keywords: KeywordErrors,
) -> Report:
    from infini_run.multinode.head.head import Head
    from infini_run.multinode.link.agent_options import working_directory
    from infini_run.system.resource_limits import with_limit_hint

    check_threads("a launch on several hosts")
    folder = check_path("cwd", cwd)
    if folder is None:
        folder = working_directory()
    observers: HeadObservers | None = None
    if options.trace or options.events or options.metrics or options.live == "on":
        from infini_run.multinode.head.head_observers import open_observers

        observers, options = open_observers(options, os.environ, print_line=None)
    own = has_own_stderr()
    try:
        with forking:  # a child that is forked meanwhile lets go of it, or has nothing of it
            head = Head(
                options,
                node_list,
                environ=environ,
                print_line=None if own else print_line,
                cwd=folder,
                observers=observers,
                keywords=keywords,
            )
            exit_number = close_at_exit(head)
            call_in_forked_children(head)
    except BaseException as error:
        if observers is not None:
            observers.close()
        if type(error) is OSError:  # no descriptor or memory is left
            number = error.errno or 0
            raise with_limit_hint(StartError(os.strerror(number), "setting up", number)) from None
        raise
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    is_late = False
    try:
        head.start()
        while not head.ended:
            head.poll(None if deadline is None or is_late else max(0.0, deadline - time.monotonic()))
            if deadline is not None and not is_late and time.monotonic() >= deadline:
                is_late = True
                head.stop()
                head.limit_reader()
        report = head.report()
        if observers is not None:
            observers.finish(report, stopper="the Python program")
    finally:
        closed(exit_number)
        head.close()
        problem = "" if observers is None else observers.close()
    if problem:
        report = replace(report, notices=(*report.notices, keywords.rename(problem)))
    if is_late:
        program = options.program[0]
        raise LaunchTimeout(f"{program} did not end within {timeout_s:g} s; stopped all ranks")
    if head.error is not None and head.is_node_failure:
        raise head.error
    if check and report.exit_code != 0:
        raise WorkerError(report)
    return report


class _WaitedForLauncher(ProcessLauncher):
    """A launch that the host program waits for until its end: output through the launcher always moves."""

    _auto_console = "auto"
