"""What reaches other nodes: each engine turns hosts into local commands that start agents there.

The one rule: an engine knows commands and what they say when they fail, and nothing of ranks. What it starts is
supervised by the head as any process.
"""

from __future__ import annotations

from infini_run.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any, Protocol

    from infini_run.environments.hostlist import Host
    from infini_run.options.options import Options

    Told = tuple[Host, int, Mapping[str, Any]]  # a node, its index, what its agent said of itself

    class Engine(Protocol):
        """A module of this package.

        WINDOW: so many commands at a time. OVER_STDIO: the link is the command's stdin and stdout; else the agents
        dial, and have the token from their environment or, TOKEN_BY_FILE, from a file. ENDS_STOPPED: an agent
        that is stopped is ended, and its ranks with it.
        """

        WINDOW: int
        OVER_STDIO: bool
        TOKEN_BY_FILE: bool
        ENDS_STOPPED: bool

        def clients(
            self, hosts: Sequence[Host], options: Options, contact: Contact, environ: Mapping[str, str]
        ) -> list[EngineCommand]:
            """The commands that start one agent on each of `hosts`."""

        def explain(self, host: str, code: int | None, words: str) -> str:
            """Why the command ended before its agent had said anything, and what to do about it. code: None where
            it was not ours to read."""

        def ending(self, told: Sequence[Told], options: Options) -> list[EngineCommand]:
            """Commands that end what agents have left, when they do not end: they may be stopped, or beyond reach.
            One that names a node ends with 0 where it has killed its agent. Empty: the clients' own end is all
            that there is."""

        def blames(self, words: str) -> str:
            """The line of a command that has not ended in which it says whose end it now ends all others for; ""."""

        def is_passing(self, code: int | None, words: str) -> bool:
            """Whether the same command may well succeed a moment later."""


_AGENT = "infini_run.multinode.agent.run"


@record
class Contact:
    """How agents reach the head: `HOST,HOST:PORT`; empty where the link is the command's own stdio. token_file: where
    they find the token; empty: in their environment."""

    target: str = ""
    token_file: str = ""


@record
class EngineCommand:
    """A local command that starts agents. nodes: their indices; empty: all, and each tells. env: added to ours."""

    argv: tuple[str, ...]
    nodes: tuple[int, ...]
    env: tuple[tuple[str, str], ...] = ()


def find_engine(name: str) -> Engine:
    """The module of that name."""
    from importlib import import_module

    engine: Engine = import_module(f"infini_run.multinode.engines.{name}")
    return engine


_OURS = ("infini_run", "_cffi_backend")  # modules that an interpreter without us has not
_GONE = "infini-run: the head has gone"  # what others say when the first has ended


def said(words: str, *, by_engine: tuple[str, ...] = ()) -> list[str]:
    """The lines of it, those that begin as the engine's own do before those that agents have written: the last is the
    best reason that there is."""
    lines = [line.strip() for line in words.splitlines() if line.strip() and line.strip() != _GONE]
    return sorted(lines, key=lambda line: not line.startswith(by_engine)) if by_engine else lines


def ended(program: str, code: int | None, about: str = "") -> str:
    """That it has, with its exit code, and why."""
    how = (
        "and left no exit code (this program ignores SIGCHLD, or waits for every child)"
        if code is None
        else f"with {code}"
    )
    return f"{program} ended {how}" + (f": {about}" if about else "")


def lacks_us(line: str) -> bool:
    """Whether an interpreter says that infini-run is not installed there."""
    return "No module named" in line and any(name in line.rpartition("No module named")[2] for name in _OURS)


def agent_words(
    options: Options, contact: Contact, node: str = "", tell: Sequence[str] = (), host: str | None = None
) -> list[str]:
    """What runs on the other node: the same interpreter, or --remote_python. node: its index, or the variable that
    has it. tell: variables whose values its hello is to have. host: the variable that has its name in the list of
    hosts (empty: as the node itself is called), where the engine may number the nodes in another order."""
    from infini_run.system.interpreter import bare_python, own_python

    python = own_python(_AGENT, options.remote_python) if options.remote_python else bare_python(_AGENT)
    if not contact.target:
        return python
    words = [*python, f"--link={contact.target}"]
    if contact.token_file:
        words.append(f"--token_file={contact.token_file}")
    if node:
        words.append(f"--node={node}")
    if host is not None:
        words.append(f"--host={host}")
    if tell:
        words.append(f"--tell={','.join(tell)}")
    return words
