"""By hand: the same command on every node, with INFINI_RUN_TOKEN. Node 0 is the head, and starts its own agent; the
others' launchers are agents themselves, and dial. Nothing is started elsewhere."""

from __future__ import annotations

from infini_run.multinode.engines import Contact, EngineCommand, agent_words, ended, said

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from infini_run.environments.hostlist import Host
    from infini_run.multinode.engines import Told
    from infini_run.options.options import Options

WINDOW = 1
OVER_STDIO = False
TOKEN_BY_FILE = False
ENDS_STOPPED = False


def clients(
    hosts: Sequence[Host], options: Options, contact: Contact, environ: Mapping[str, str]
) -> list[EngineCommand]:
    """Our own node's agent."""
    return [EngineCommand(argv=tuple(agent_words(options, contact, "0")), nodes=(0,))]


def explain(host: str, code: int | None, words: str) -> str:
    """What the agent wrote last."""
    lines = said(words)
    return ended("the agent of this node", code, lines[-1] if lines else "")


def ending(told: Sequence[Told], options: Options) -> list[EngineCommand]:
    """Nobody else's processes are ours."""
    return []


def is_passing(code: int | None, words: str) -> bool:
    """It is this machine: what fails once fails again."""
    return False


def blames(words: str) -> str:
    """It ends nobody for another's end that the Link would not tell of."""
    return ""
