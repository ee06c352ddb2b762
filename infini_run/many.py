"""The command on many nodes: hosts from the flags, signals to the head, its report to the user."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from infini_run.errors import printable
from infini_run.head import Head
from infini_run.record import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from infini_run.engines import Engine
    from infini_run.options import Options

_LEFT_ALONE = {
    signal.SIGKILL,
    signal.SIGSTOP,
    signal.SIGCHLD,
    signal.SIGPIPE,
    signal.SIGTTIN,
    signal.SIGTTOU,
    signal.SIGURG,
}
_STOPS = {
    signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS,
    signal.SIGFPE, signal.SIGILL, signal.SIGSYS, signal.SIGTRAP, signal.SIGXCPU, signal.SIGXFSZ,
}  # fmt: skip


class Signals:
    """What the process is told, as a descriptor: each byte read from it is a signal's number."""

    def __init__(self) -> None:
        self.fd, self._write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._before = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        for number in signal.valid_signals() - _LEFT_ALONE:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, and what a shell ignores in the background
                signal.signal(number, _nothing)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())

    def read(self) -> bytes:
        try:
            return os.read(self.fd, 256)
        except BlockingIOError:
            return b""


def _nothing(number: int, frame: object) -> None:
    """The number is in the pipe already."""


def run_many(options: Options, environ: Mapping[str, str]) -> int:
    """Run on all nodes from here; our exit code. Raises UsageError before anything was started."""
    engine, hosts, agents_options = _site(options, environ)
    signals = Signals()
    head = Head(
        agents_options,
        hosts,
        engine,
        environ=environ,
        exported=_exported(options, environ),
        token=os.urandom(32).hex(),
        say=_say,
    )
    head.start()
    try:
        while not head.ended:
            head.step(also=(signals.fd,))
            for number in signals.read():
                _act(head, number)
        report = head.report()
    finally:
        head.close()
    if options.report:
        from infini_run.files import write_report

        write_report(os.path.abspath(options.report), report.to_json())
    if head.blames_node:
        assert head.error is not None
        _say(str(head.error))
        return head.error.exit_code
    text = report.text()
    if text:
        print(text, file=sys.stderr, flush=True)
    return report.exit_code


def _act(head: Head, number: int) -> None:
    if number == signal.SIGTSTP:
        head.signal(number)
        os.kill(os.getpid(), signal.SIGSTOP)
        head.resume()
        head.signal(signal.SIGCONT)
    elif number in _STOPS:
        head.tell(number)
    else:
        head.signal(number)


def _site(options: Options, environ: Mapping[str, str]) -> tuple[Engine, list[str], Options]:
    from importlib import import_module

    engine: Engine = import_module(f"infini_run.engines.{options.engine}")  # type: ignore[assignment]
    hosts = options.hosts.split(",") if options.hosts else _allocated(options, environ)
    console = "prefix" if options.console == "inherit" else options.console
    shipped = replace(options, console=console, report="", hosts="", hostfile="", nnodes=len(hosts), engine="local")
    return engine, hosts, shipped


def _allocated(options: Options, environ: Mapping[str, str]) -> list[str]:
    out = subprocess.run(["scontrol", "show", "hostnames"], capture_output=True, text=True, check=True, env=dict(environ))
    return out.stdout.split()


def _exported(options: Options, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of ours that --export names; * stands for anything."""
    from fnmatch import fnmatchcase

    return {n: v for n, v in environ.items() if any(fnmatchcase(n, pattern) for pattern in options.export)}


def _say(text: str) -> None:
    print(f"infini-run: {printable(text)}", file=sys.stderr, flush=True)
