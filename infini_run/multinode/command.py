"""The command `infini-run` on many nodes: signals go to the head, its report to the user."""

from __future__ import annotations

import os
import time

from infini_run.core.nonblocking_writer import CONSOLE_WAIT_S, write_all
from infini_run.core.signal_pipe import SignalPipe, end_as_interrupted, is_in_foreground
from infini_run.environments.hostlist import Host
from infini_run.errors import InfiniRunError, LinkError, UsageError, printable
from infini_run.lean_os import encode_text
from infini_run.multinode.head.head import Head
from infini_run.multinode.link.agent_options import exported, options_of_agents, working_directory
from infini_run.multinode.link.connection import TOKEN
from infini_run.options.nodes import MANUAL, NodeList
from infini_run.options.table import HANDED_OUT
from infini_run.record import replace
from infini_run.system.stdio import fill_stdio

TYPE_CHECKING = False
if TYPE_CHECKING:
    from _socket import socket
    from collections.abc import Callable, Mapping

    from infini_run.core.c_structs import ProcessState
    from infini_run.environments.environment import ClusterEnvironment
    from infini_run.multinode.head.head_observers import HeadObservers
    from infini_run.options.launch_options import Options
    from infini_run.plan.model import Node
    from infini_run.report.report import Report

_SHORT_TOKEN = 16  # characters
_LONGEST_TOKEN = 4096  # characters, as one variable of an agent holds 128 KiB
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0  # between two attempts to join
_REFUSED_S = (1.0, 60.0)  # before the next one of a node that cannot run its ranks; doubled each time
_FDS_PER_NODE, _FDS_OF_OURS = 12, 512  # a command has those of its group, a pipe and a connection


def run_on_hosts(
    options: Options,
    node_list: NodeList,
    environ: Mapping[str, str],
    *,
    print_line: Callable[[str], None],
    listening: socket | None = None,
) -> int:
    """Run on all nodes, with the head in this process.

    Args:
        print_line: writes a line to stderr, and does not wait long for a reader.
        listening: a socket that already listens on the link's port. None: the head opens one if it needs it.

    Returns:
        The exit code of the command.

    Raises:
        UsageError: the request is invalid. Nothing was started.
    """
    if options.report:
        from infini_run.system.secure_files import check_writable

        check_writable("report", options.report)
    observers: HeadObservers | None = None
    is_written = options.trace or options.events or options.metrics
    if is_written or options.live == "on" or (options.live == "auto" and os.isatty(2)):
        from infini_run.multinode.head.head_observers import open_observers

        observers, options = open_observers(options, environ, print_line=print_line)
    fill_stdio()
    signals = SignalPipe()
    head = Head(options, node_list, environ=environ, observers=observers, listening=listening)
    try:
        head.start()
        raise_fd_limit(len(node_list.hosts))
        if os.getpid() == 1:
            head.reap_orphans()  # those that came before this process took signals
        while not head.ended:
            head.poll(also=(signals.fd,))
            for number in signals.read():
                head.on_signal(number)
        report = head.report()
        if observers is not None:
            observers.finish(report)
    except InfiniRunError as error:
        if observers is not None:
            observers.finish(error)
        raise
    finally:
        head.close()
        problem = "" if observers is None else observers.close()
        if problem:
            print_line(f"infini-run: {printable(problem)}")
    text = report.text()
    for problem in save_end(options, report, text):
        print_line(f"infini-run: {printable(problem)}")
    if text:
        data = encode_text(f"{text}\n")
        write_all(2, data, CONSOLE_WAIT_S if report.received_signal else None, lambda: signals.fd)
    if report.exit_code == 128 + report.received_signal and is_in_foreground():
        end_as_interrupted(report.received_signal)
    return report.exit_code


def save_end(options: Options, report: Report, text: str) -> list[str]:
    """Write the files of --report and --termination_log, if the options ask for them.

    Args:
        options: with the files' paths.
        report: how the launch ended.
        text: the report in words.

    Returns:
        A sentence per file that is not writable.
    """
    problems = []
    if options.report:
        from infini_run.system.secure_files import save_report

        problems.append(save_report(options.report, report.to_json()))
    if options.termination_log and report.exit_code:
        from infini_run.system.secure_files import save_message

        problems.append(save_message(options.termination_log, text))
    return [problem for problem in problems if problem]


def raise_fd_limit(nodes: int) -> None:
    """Raise the limit of open files for the connections of many nodes, as far as the hard limit allows. Older
    processes keep the old limit."""
    from resource import RLIMIT_NOFILE, getrlimit, setrlimit

    soft, hard = getrlimit(RLIMIT_NOFILE)
    wanted = min(_FDS_PER_NODE * nodes + _FDS_OF_OURS, hard)
    if soft < wanted:
        setrlimit(RLIMIT_NOFILE, (wanted, hard))


def run_as_peer(options: Options, environ: Mapping[str, str], *, print_line: Callable[[str], None]) -> int:
    """Run one of the same commands that the user started on every node, with a token: node 0 is the head, the others
    join it. Returns the exit code; raises UsageError, LinkError, StartError."""
    fill_stdio()
    if not options.rdzv_explicit:
        raise UsageError("a token needs the address of node 0; add --rdzv_endpoint=HOST:PORT")
    if options.isolate:
        raise UsageError(f"--isolate with {TOKEN}: needs one node; drop one of them")
    token = environ.get(TOKEN) or _token_in(options.token_file, _name_of_token_file(options, environ))
    port = options.link_port or options.master_port + 1
    options = replace(options, link_port=port)
    from infini_run.multinode.link.tcp import is_own_host, listen_if_free, retry_unheard

    listening = None
    is_head_host = options.node_rank == HANDED_OUT and is_own_host(options.master_addr)
    if is_head_host:
        listening = listen_if_free(port, options.link_address)
    if options.node_rank != 0 and listening is None:
        peer = HandStartedLauncher(options, environ, os.fsencode(token), print_line, may_be_head=is_head_host)
        try:
            return peer.serve_until_over() if options.is_elastic else retry_unheard(peer.serve, is_head_there=False)
        except LinkError as error:
            listening = peer.listening
            if listening is None:
                if is_head_host and peer.may_be_head:  # no head has spoken: another program may have the port
                    raise LinkError(
                        f"{error}; port {port} is in use on this machine, perhaps by another program"
                    ) from None
                raise
    if len(token) < _SHORT_TOKEN:
        print_line(
            f"infini-run: {TOKEN} has fewer than {_SHORT_TOKEN} characters: others can guess it and join the job; "
            "use a longer one"
        )
    hosts = (Host(name=os.uname().nodename), *(Host(name="") for _ in range(1, options.nnodes + options.spares)))
    node_list = NodeList(engine=MANUAL, hosts=hosts)
    return run_on_hosts(options, node_list, {**environ, TOKEN: token}, print_line=print_line, listening=listening)


class HandStartedLauncher:
    """The launcher of one node, which joins the head on another one.

    Args:
        options: of the launch, with the port of the link.
        token: the secret.
        may_be_head: the head's address is this machine's, and the port was taken. If nobody answers there this
            launcher listens itself, which ends `serve` with a LinkError; `listening` then is the socket.
    """

    def __init__(
        self,
        options: Options,
        environ: Mapping[str, str],
        token: bytes,
        print_line: Callable[[str], None],
        *,
        may_be_head: bool,
    ) -> None:
        self._options = options
        self._environ = environ
        self._target = f"{options.master_addr}:{options.link_port}"
        self._token = token
        self._print_line = print_line
        self.may_be_head = may_be_head
        self.listening: socket | None = None
        self._host = os.uname().nodename if options.node_rank == HANDED_OUT else ""
        self._entry: ProcessState | None = None
        self.has_ever_joined = False
        self._last_job = "", 0.0
        self._cwd = working_directory()  # once it has run ranks, a launcher is in /
        self.has_joined = self.has_refused = False

    def serve(self, limit_s: float | None = None) -> int:
        """Join, and do what the head says.

        Args:
            limit_s: how long to try to reach the head; None: --join_timeout.

        Returns:
            The exit code.

        Raises:
            LinkError: the head has gone, or rejects this launcher; or there is none, and this launcher listens in its
                place.
        """
        from infini_run.multinode.agent.agent import Agent
        from infini_run.multinode.link.handshake import Silent, Unheard
        from infini_run.multinode.link.tcp import connect_with_retry

        self.has_joined = self.has_refused = False
        options = self._options
        try:
            os.chdir(self._cwd)
        except OSError as error:
            raise UsageError(f"{self._cwd}: {error.strerror}") from None
        limit_s = options.join_timeout_s if limit_s is None else limit_s
        connection = connect_with_retry(self._target, limit_s, self._print, self._take_port)
        agent = Agent(
            connection,
            options.node_rank,
            own_options=options,
            environ=self._environ,
            host=self._host,
            entry=self._entry,
            last_job=self._last_job,
        )
        try:
            return agent.serve(self._token)
        except LinkError as error:
            if not isinstance(error, (Silent, Unheard)):
                self.may_be_head = False  # a head has spoken: its job is not begun a second time
            raise
        finally:
            connection.close()
            self._entry, self.has_joined, self._last_job = agent.entry, agent.has_joined, agent.last_job
            self.has_ever_joined = self.has_ever_joined or agent.has_joined
            self.has_refused = agent.has_refused

    def _take_port(self) -> bool:
        """Return whether this launcher listens in the head's place: nobody does, and no head has answered."""
        from infini_run.multinode.link.tcp import listen_if_free

        if self.may_be_head:
            self.listening = listen_if_free(self._options.link_port, self._options.link_address)
        return self.listening is not None

    def serve_until_over(self) -> int:
        """Join, and join again after the loss of the head, or while it has no free place here: the job continues.
        Raises LinkError if that took --join_timeout, or the first head rejects the token."""
        from infini_run.multinode.agent.head_link import TurnedAway
        from infini_run.multinode.link.handshake import Unheard

        end_s, pause_s = time.monotonic() + self._options.join_timeout_s, _FIRST_PAUSE_S
        reasons: set[str] = set()  # that a line has said
        refused_s = _REFUSED_S[0]
        while True:
            try:
                return self.serve(max(0.0, end_s - time.monotonic()))
            except LinkError as error:
                if self.listening is not None:
                    raise
                if self.has_joined:
                    reasons.clear()
                    pause_s = refused_s if self.has_refused else _FIRST_PAUSE_S
                    refused_s = min(2 * refused_s, _REFUSED_S[1]) if self.has_refused else _REFUSED_S[0]
                    end_s = time.monotonic() + pause_s + self._options.join_timeout_s
                elif time.monotonic() + _LONGEST_PAUSE_S > end_s:
                    limit_s = self._options.join_timeout_s
                    raise LinkError(
                        f"{error}; no job accepted this launcher within {limit_s:g} s (--join_timeout)"
                    ) from None
                elif not isinstance(error, (TurnedAway, Unheard)) and not self.has_ever_joined:
                    raise  # later it is another program that has the port for a while
                if self.has_refused:
                    self._print(f"this node cannot run its ranks; rejoining in {pause_s:g} s")
                elif self.has_joined or str(error) not in reasons:
                    reasons.add(str(error))
                    self._print(f"{error}; rejoining")
            time.sleep(pause_s)  # no event reports a free place
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _print(self, text: str) -> None:
        self._print_line(f"infini-run: {printable(text)}")


def _name_of_token_file(options: Options, environ: Mapping[str, str]) -> str:
    """Return the path of the token file as the user gave it."""
    variable = "INFINI_RUN_TOKEN_FILE"
    return variable if environ.get(variable) == options.token_file else "--token_file"


def _token_in(path: str, name: str) -> str:
    """Return the first line of a file that only this user may read, without what surrounds it.

    The owner of the file knows the token, and may change it. Anything but a line of 16 to 4096 printable
    characters is rejected: it is a file of another kind, or a guess finds it. Random bytes would end at the first
    newline.

    Args:
        path: The file, or a pipe that a shell opened for this process.
        name: The path as the user gave it.

    Raises:
        UsageError: It is unreadable, is another user's, or has no such line.
    """
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            problem = _why_no_secret(os.fstat(file.fileno()), path)
            line = b"" if problem else file.readline(4 * _LONGEST_TOKEN + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise UsageError(f"{name}={path}: {getattr(error, 'strerror', error)}") from None
    token = line.decode("utf-8", "surrogateescape").strip()
    if not problem and not token:
        problem = "its first line is empty; use any text that is hard to guess"
    elif not problem and not (token.isprintable() and _SHORT_TOKEN <= len(token) <= _LONGEST_TOKEN):
        problem = (
            f"its first line is not {_SHORT_TOKEN} to {_LONGEST_TOKEN} printable characters; "
            f"run openssl rand -hex 16 > {path}"
        )
    if problem:
        raise UsageError(f"{name}={path}: {problem}")
    return token


def _open_at_once(path: str, flags: int) -> int:
    """Open without waiting for the other end of a named pipe."""
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    os.set_blocking(fd, True)
    return fd


def _why_no_secret(found: os.stat_result, path: str) -> str:
    import stat

    if not (stat.S_ISREG(found.st_mode) or stat.S_ISFIFO(found.st_mode)):
        return "not a regular file"
    if found.st_uid not in (0, os.geteuid()):
        return f"belongs to user {found.st_uid}, who can read the token; run chown {os.geteuid()} {path}"
    if not stat.S_IMODE(found.st_mode) & 0o077:
        return ""
    is_own = found.st_uid == os.geteuid()  # a Secret of Kubernetes is root's, and fsGroup lets a group read it
    return f"others can read or write it; {f'run chmod 600 {path}' if is_own else f'set {TOKEN}=... instead'}"


def render_plan(
    options: Options, node_list: NodeList, cluster: ClusterEnvironment | None, environ: Mapping[str, str]
) -> str:
    """Return the text of --dry_run for all nodes, as far as this node knows the plan. Raises UsageError if the
    number of ranks depends on the devices of other nodes. cluster: what --engine=auto found. environ: has what
    --export names."""
    from infini_run.plan.dry_run import render_json, render_text
    from infini_run.plan.model import Command, FoundProgram
    from infini_run.plan.planner import make_plan
    from infini_run.plan.program import new_launch_id

    for each in options.programs or (options,):
        nproc = each.nproc_per_node
        if isinstance(nproc, str) and not node_list.counts:
            raise UsageError(
                f"--dry_run with --nproc_per_node={nproc}: the number of ranks is known only on the nodes; use "
                "--nproc_per_node=N"
            )
    hosts, spares = node_list.hosts[: options.nnodes], node_list.hosts[options.nnodes :]
    nodes = tuple(
        _planned_node(options, index, host.name, node_list.counts[index] if node_list.counts else 0)
        for index, host in enumerate(hosts)
    )
    plan = make_plan(
        replace(options, console=options_of_agents(options).console, nnodes=len(hosts)),
        tuple(
            FoundProgram(
                options=each,
                command=Command(file=each.program[0], argv=each.program),
                master_port=each.master_port,
            )
            for each in options.programs or (options,)
        ),
        nodes,
        launch_id=new_launch_id(),
        environ={},
    )
    later = _known_later(options, node_list)
    render = render_json if options.dry_run == "json" else render_text
    names = [host.name for host in spares]
    is_auto = options.preload == ("auto",)
    return render(
        plan,
        cluster,
        later,
        least_nodes=options.least_nodes,
        spares=names,
        preload=() if is_auto else options.preload,
        auto="each node reads the imports of the script" if is_auto else "",
        exported=sorted(exported(options.export, environ)),
    )


def _planned_node(options: Options, index: int, host: str, count: int) -> Node:
    """Return a node with the ranks that somebody asked for. count: by its list of hosts; 0: as the options say."""
    from infini_run.plan.model import Node

    if options.programs:
        counts = tuple(int(each.nproc_per_node) for each in options.on_node(index).programs)
        return Node(index=index, host=host, nproc=sum(counts), counts=counts)
    return Node(index=index, host=host, nproc=count or int(options.nproc_per_node))


def _known_later(options: Options, node_list: NodeList) -> dict[str, str]:
    """Return the variables that rendezvous.rendezvous_address sets when all nodes are ready, with a description of
    their values."""
    if options.programs:
        later = {"JOB_PROGRAMS": "the hosts and ports of all programs"}
        if options.one_world and options.rdzv_explicit and options.master_port:
            return later
        return later | {"MASTER_ADDR": "address of the first node of the program", "MASTER_PORT": "free port there"}
    first, later = node_list.hosts[0].name, {}
    if len(node_list.hosts) > 1 and not options.rdzv_explicit:
        later["MASTER_ADDR"] = f"address of {first}"
    if not (options.rdzv_explicit and options.master_port):
        later["MASTER_PORT"] = f"free port of {first}"
    return later
