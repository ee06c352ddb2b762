"""One run of a job on its first node: the launch's head, in the allocation of the scheduler.

The one rule: what holds for a launch holds for a job: first failure, teardown, labeled output. A run adds its files
in the job's directory (its phase, its first failure), and a warning before the limit. A file that is not writable
ends nothing.
"""

from __future__ import annotations

import _signal as signal
import os
import select
import time

from infini_run.core.signal_pipe import STOP_SIGNALS, SignalPipe
from infini_run.environments.environment import BATCH
from infini_run.environments.hostlist import Host
from infini_run.errors import InfiniRunError, UsageError, printable
from infini_run.jobs.allocation.result import AGAIN, classify
from infini_run.jobs.allocation.time_limit import NEVER, EndReason, TimeLimitTimer
from infini_run.jobs.folder.job_dir import JobDir
from infini_run.jobs.folder.records import JobResult, Phase
from infini_run.jobs.lines import write_line, write_text
from infini_run.jobs.request.launch_words import ENGINES, NO_DESCRIPTOR, OF_THE_JOB, launch_words
from infini_run.jobs.request.programs import names_programs
from infini_run.jobs.scheduler import FAILED, RUNNING, STARTING, WARNED
from infini_run.multinode.command import raise_fd_limit, save_end
from infini_run.multinode.head.head import Head
from infini_run.options.nodes import NodeList
from infini_run.options.options import resolve
from infini_run.options.table import PREFIXES
from infini_run.record import replace
from infini_run.report.text import signal_name
from infini_run.value_types import DESCRIPTOR

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from infini_run.jobs.folder.records import Submission
    from infini_run.multinode.head.head_observers import HeadObservers
    from infini_run.options.launch_options import Options
    from infini_run.options.options import Request
    from infini_run.report.report import Report

HEAD_NODE = "INFINI_JOB_HEAD_NODE"  # in an agent's environment: Slurm's name of the node that has the script
_FILES = ("report", "termination_log", "trace", "events", "metrics")  # flags that name one for the head
_OF_A_TASK = ("INFINI_JOB_TASK", "INFINI_JOB_TASKS")  # its index; how many there are
_SIGNAL_WAIT_S = 5.0  # for the launcher's stop signal, after ranks ended by theirs
_LOG = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC


class JobRun:
    """One time that the job runs."""

    def __init__(
        self, folder: JobDir, job: Submission, number: int, signals: SignalPipe, environ: Mapping[str, str]
    ) -> None:
        self._folder = folder
        self._job = job
        self._number = number
        self._signals = signals
        self._outer_environ = environ  # the allocation's: what the scheduler's commands get
        self._start_s = time.time()
        self._phase = Phase(state=STARTING, since_s=self._start_s)
        self._nodes: tuple[str, ...] = ()
        self._names: tuple[str, ...] = ()  # of its programs, if it has several
        self._programs: tuple[tuple[str, int], ...] = ()  # and the ranks of each
        self._spares: tuple[str, ...] = ()  # hosts that wait to take the place of one that is lost
        self._lost: tuple[str, ...] = ()  # hosts that are not here any more
        self._left_s = 0.0  # of the limit, when the ranks are to be warned
        self._is_over = False  # the run passed its limit, and the run itself keeps that
        self._is_cancelled = False  # the launcher received a cancellation
        self._options: Options | None = None  # of the launch, once its files are known to be writable
        self._observers: HeadObservers | None = None

    def run(self) -> JobResult:
        """Run from start to end. The directory has the run's progress; the caller records the ending itself."""
        self._write_phase(STARTING)
        self._open_log()
        try:
            asked, options, environ = self._prepare()
            self._names = tuple(program.name for program in options.programs)
            try:
                options = self._open_files(options, environ)
            except UsageError as error:
                raise UsageError(asked.name_variable(str(error))) from None
            node_list = asked.node_list or NodeList(engine="this_node", hosts=(Host(name=os.uname().nodename),))
            head = Head(
                options,
                node_list,
                environ=environ,
                print_line=print_line,
                cwd=self._job.request.cwd,
                observers=self._observers,
                heading=f"run {self._number} of job {self._folder.name}" if self._number else "",
            )
            head.start()
        except InfiniRunError as error:
            print_line(str(error))
            self._save_error(error)
            return self._failed(error)
        try:
            raise_fd_limit(len(node_list.hosts))
            is_ours = self._job.request.scheduler not in ENGINES
            alarm = TimeLimitTimer(
                self._job.request, with_programs(self._outer_environ), self._start_s, is_ours=is_ours
            )
            try:
                while not head.ended:
                    wait_s = None if alarm.due_s == NEVER else max(0.0, alarm.due_s - time.time())
                    head.poll(wait_s, also=(self._signals.fd, alarm.fd))
                    for number in self._signals.read():
                        self._forward_signal(head, number)
                    self._check_deadlines(head, alarm)
                return self._conclude(head, alarm)
            finally:
                alarm.close()
        finally:
            head.close()
            self._close_observers()

    def _failed(self, error: InfiniRunError) -> JobResult:
        return JobResult(
            state=FAILED, code=error.exit_code, reason=str(error), attempt=self._number, end_s=time.time()
        )

    def _open_log(self) -> None:
        fd = os.open(self._folder.log(self._number), _LOG, 0o600)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        os.close(fd)

    # ---- the launch

    def _prepare(self) -> tuple[Request, Options, dict[str, str]]:
        """Return the launch as its command line would have it, its options in this allocation, and its environment.
        Raises UsageError."""
        job, request = self._job, self._job.request
        try:
            given = self._folder.read_env()
        except OSError as error:
            raise UsageError(
                f"{error.filename} on {os.uname().nodename}: {error.strerror}; use a directory that the nodes share"
            ) from None
        given |= {"INFINI_JOB_NAME": self._folder.name, "INFINI_JOB_ATTEMPT": str(self._number)}
        given["INFINI_JOB_FOLDER"] = self._folder.path
        cluster = {name: text for name, text in self._outer_environ.items() if name not in _OF_A_TASK}
        given = {name: text for name, text in given.items() if name not in _OF_A_TASK}  # who submits may be one
        if self._folder.index >= 0:
            given |= dict(zip(_OF_A_TASK, (str(self._folder.index), str(len(job.tasks))), strict=True))
        given.setdefault("PYTHONUNBUFFERED", "1")  # who follows a log wants to see a line when it is written
        for folder in _drop_missing_folder(given, cluster):  # perhaps it exists on another machine
            print_line(f"TMPDIR={folder}: cannot be written on {os.uname().nodename}; dropped it")
        environ = {**cluster, **given}
        environ["PATH"] = ":".join(filter(None, (given.get("PATH", ""), with_programs(self._outer_environ)["PATH"])))
        hosts = self._hosts() if request.scheduler in ENGINES else []
        # a variable is meant for launches of the shell
        own = {f"{prefix.text}{name.upper()}" for prefix in PREFIXES for name in OF_THE_JOB}
        if names_programs(request.command):
            own -= {f"{prefix.text}ONE_WORLD" for prefix in PREFIXES}
        variables = {name: text for name, text in environ.items() if name not in own}
        asked = resolve(launch_words(request, job.slots_per_node, hosts), variables)
        if asked.options is None:
            raise UsageError(f"--run_options: {' '.join(request.run_options)} only prints, and runs nothing")
        options = replace(asked.options, export=(*asked.options.export, *map(_literal, given)))
        if request.container is not None:  # the agent is in there, and the ranks with it
            options = replace(options, remote_python=self._folder.program("node") or request.container.python)
        elif self._folder.program("node"):
            options = replace(options, remote_python=self._folder.program("node"))
        if self._folder.program("bin/srun"):
            environ["PATH"] = f"{self._folder.file('bin')}:{environ['PATH']}"
        is_function = os.path.exists(self._folder.function)
        # of a function's job rank 0 alone makes a checkpoint: nobody has to be waited for
        options = replace(options, again_code=AGAIN, again_wait_s=0.0 if is_function else options.signal_grace_s)
        if is_function:  # its ranks take the warning, and a stop, once they can
            options = replace(options, blocked_signals=tuple({request.warn_signal, int(signal.SIGTERM)}))
        environ[HEAD_NODE] = self._outer_environ.get("SLURMD_NODENAME", "")
        return asked, options, environ

    def _hosts(self) -> list[str]:
        """Return the hosts of the allocation, each once. How many ranks they run is in the order, whatever it has
        room for. Raises UsageError."""
        from infini_run.environments.detect import detect
        from infini_run.options.from_environment import read_file

        cluster = detect(self._outer_environ, read_file)
        if cluster is None or cluster.form != BATCH or not cluster.hosts:
            name = self._job.request.scheduler
            raise UsageError(f"{name}: no allocation here; only its scheduler can run the script of a job")
        return [host.name for host in cluster.hosts]

    # ---- the files that flags name

    def _open_files(self, options: Options, environ: Mapping[str, str]) -> Options:
        """Check and open the files that flags name for the head. A relative path is in the directory of the ranks, as
        --log_dir's. Return the options with whole paths. Raises UsageError: a file is not writable."""
        if options.events.startswith(DESCRIPTOR):
            raise UsageError(f"--events={options.events}: {NO_DESCRIPTOR}")
        paths = {
            flag: os.path.join(self._job.request.cwd, path) for flag in _FILES if (path := getattr(options, flag))
        }
        options = replace(options, **paths)
        if options.termination_log:
            from infini_run.system.secure_files import clear_message

            clear_message("termination_log", options.termination_log)
            self._options = options  # from here on, an error is a message there
        if options.report:
            from infini_run.system.secure_files import check_writable

            check_writable("report", options.report)
        if options.trace or options.events or options.metrics:
            from infini_run.multinode.head.head_observers import open_observers

            self._observers, options = open_observers(options, environ, print_line=print_line)
        self._options = options
        return options

    def _save_error(self, error: InfiniRunError) -> None:
        """Write why nothing started where the end of a launch would be."""
        if self._observers is not None:
            self._observers.finish(error)
        self._close_observers()
        if self._options is not None and self._options.termination_log:
            from infini_run.system.secure_files import save_message

            _print_problem(save_message(self._options.termination_log, f"infini-run: {printable(str(error))}\n"))

    def _save_end(self, report: Report) -> None:
        if self._observers is not None:
            self._observers.finish(report)
        assert self._options is not None
        for problem in save_end(self._options, report, report.text()):
            _print_problem(problem)

    def _close_observers(self) -> None:
        if self._observers is not None:
            _print_problem(self._observers.close())

    # ---- how far it is

    def _forward_signal(self, head: Head, number: int) -> None:
        """Forward a signal. URG is `infini-job cancel` on PBS (jobs/schedulers/pbs.py): its mark in the directory may
        not be visible here yet."""
        if self._is_pbs_cancel(number):
            self._is_cancelled = True
            head.on_stop_signal(signal.SIGTERM)
        else:
            head.on_signal(number)

    def _write_phase(self, state: str, reason: str = "") -> None:
        now_s = time.time()
        self._phase = Phase(
            state=state,
            since_s=now_s,
            nodes=self._nodes,
            spares=self._spares,
            lost=self._lost,
            nproc=0 if names_programs(self._job.request.command) else self._job.slots_per_node,
            programs=self._programs,
            reason=reason,
            begun_s=self._phase.begun_s or (now_s if state == RUNNING else 0.0),
        )
        try_write("its phase", lambda: self._folder.write_phase(self._number, self._phase))

    def _check_deadlines(self, head: Head, alarm: TimeLimitTimer) -> None:
        self._follow_nodes(head)
        left_s, is_over = alarm.check(time.time())
        self._left_s = left_s or self._left_s
        if self._left_s and self._phase.state == RUNNING:  # not before there is somebody to warn
            self._warn(head, self._left_s)
            self._left_s = 0.0
        if is_over:
            self._is_over = True
            head.on_stop_signal(signal.SIGTERM)

    def _follow_nodes(self, head: Head) -> None:
        """Record the nodes that run the ranks: they may change after the loss of one."""
        is_first = self._phase.state == STARTING
        if head.world[0].state != "running" or not (is_first or self._job.request.spares):
            return
        self._take_nodes(head)
        sizes = map(sum, zip(*(map(len, agent.ranks.spans) for agent in head.world), strict=True))
        self._programs = tuple(zip(self._names, sizes, strict=False))  # no name: a job of one program
        now = {"nodes": self._nodes, "spares": self._spares, "lost": self._lost}
        if is_first:
            self._write_phase(RUNNING)
        elif (then := replace(self._phase, **now)) != self._phase:
            self._phase = then
            try_write("its phase", lambda: self._folder.write_phase(self._number, then))

    def _take_nodes(self, head: Head) -> None:
        self._nodes = tuple(agent.name for agent in head.world)
        running = set(self._nodes)
        others = [agent for agent in head.agents if agent.name not in running]
        self._spares = tuple(agent.name for agent in others if agent.is_spare)
        self._lost = tuple(agent.name for agent in others if not agent.is_spare)

    def _warn(self, head: Head, left_s: float) -> None:
        number = self._job.request.warn_signal
        print_line(f"sent {signal_name(number)} to all ranks: {left_s:.0f} s left until the time limit")
        head.forward_signal(number)
        self._write_phase(WARNED)

    # ---- the end

    def _conclude(self, head: Head, alarm: TimeLimitTimer) -> JobResult:
        report = head.report()
        first = report.first_failure
        if self._phase.state == STARTING and any(peer.report for peer in head.agents):  # it was too quick to be seen
            self._take_nodes(head)
            self._write_phase(RUNNING)
        if report.text():
            write_text(report.text())
        content = report.to_json()
        self._save_end(report)
        if first is not None:
            failure = {"node": first.host, "rank": first.rank, "code": first.shell_code, "what": report.headline()}
            try_write("the first failure", lambda: self._folder.write_failure(self._number, failure))
        from infini_run.system.secure_files import write_report

        path = self._folder.file(f"{self._number}/report.json")
        try_write("its report", lambda: write_report(path, content))
        is_termed = first is not None and first.signal == signal.SIGTERM
        end_reason = (
            alarm.end_reason() if report.received_signal or head.is_node_failure or is_termed else EndReason()
        )
        is_cancelled = self._is_cancelled or self._folder.is_cancelled
        ended_well = not report.exit_code and not report.received_signal
        if is_cancelled and ended_well and self._stop_signal_follows():
            report = replace(report, received_signal=signal.SIGTERM)
        return classify(
            report,
            head.error,
            is_node_failure=head.is_node_failure,
            is_cancelled=is_cancelled,
            is_late=self._is_over or (report.received_signal != 0 and end_reason.is_late),
            is_preempted=end_reason.is_preempted,
            is_warned=self._phase.state == WARNED,
            attempt=self._number,
        )

    def _is_pbs_cancel(self, number: int) -> bool:
        return number == signal.SIGURG and self._job.request.scheduler == "pbs"

    def _stop_signal_follows(self) -> bool:
        """Return whether a stop signal comes soon. A scheduler signals every process of a job: ranks may have exited
        by theirs before the launcher gets its own. None comes where the scheduler did not take the cancellation."""
        end_s = time.monotonic() + _SIGNAL_WAIT_S
        while select.select([self._signals.fd], [], [], max(0.0, end_s - time.monotonic()))[0]:
            if any(number in STOP_SIGNALS or self._is_pbs_cancel(number) for number in self._signals.read()):
                return True
        return False


def with_programs(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with PBS's programs on PATH."""
    from infini_run.multinode.engines.pbs import program_dir

    return {**environ, "PATH": ":".join(filter(None, (environ.get("PATH", ""), program_dir())))}


def _drop_missing_folder(*environs: dict[str, str]) -> list[str]:
    """Drop a TMPDIR that this node cannot write to, and return each: programs take /tmp then, and need no folder of
    another machine."""
    given = dict.fromkeys(environ.get("TMPDIR", "") for environ in environs)
    missing = [folder for folder in given if folder and not os.access(folder, os.W_OK | os.X_OK)]
    for environ in environs:
        if environ.get("TMPDIR") in missing:
            del environ["TMPDIR"]
    return missing


def _literal(name: str) -> str:
    """Return a variable's name as a literal, where --export takes patterns."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def print_line(text: str) -> None:
    """Write a line of the launcher to the job's log."""
    write_line(text, "infini-run")


def _print_problem(problem: str) -> None:
    if problem:
        print_line(problem)


def try_write(what: str, write: Callable[[], None]) -> None:
    """Write a file that the job can do without: a full disk must not end it, or cost it the word of how it ended."""
    try:
        write()
    except OSError as error:
        print_line(f"{what} cannot be written: {error.strerror}")
