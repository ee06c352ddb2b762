"""Here: one agent, on this node, as this process's child. For who has all of a job on one machine, and wants it
labelled, stopped and told of as a job of many."""

from __future__ import annotations

from infini_run.multinode.engines import Contact, EngineCommand, agent_words, ended, said

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from infini_run.environments.hostlist import Host
    from infini_run.multinode.engines import Told
    from infini_run.options.options import Options

WINDOW = 1
OVER_STDIO = True
TOKEN_BY_FILE = False
ENDS_STOPPED = True


def clients(
    hosts: Sequence[Host], options: Options, contact: Contact, environ: Mapping[str, str]
) -> list[EngineCommand]:
    """The agent itself: the link is its stdin and stdout."""
    return [EngineCommand(argv=tuple(agent_words(options, contact)), nodes=(0,))]


def explain(host: str, code: int | None, words: str) -> str:
    """What the agent wrote last."""
    lines = said(words)
    return ended("its agent", code, lines[-1] if lines else "")


def ending(told: Sequence[Told], options: Options) -> list[EngineCommand]:
    """It is our own child: it ends with us."""
    return []


def is_passing(code: int | None, words: str) -> bool:
    """It is this machine: what fails once fails again."""
    return False


def blames(words: str) -> str:
    """It ends nobody for another's end that the Link would not tell of."""
    return ""
