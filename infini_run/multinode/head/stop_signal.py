"""What a signal that asks for the end means to a head: a table of who got it and of what came before.

The rule: the first one gives the ranks their grace, and the second one at the same place kills them. A scheduler that
ends a job signals every agent and the head, and perhaps an agent twice: that is the first one still. Pure.
"""

from __future__ import annotations

from _signal import SIGINT, SIGQUIT

# Who got it. A launcher was started by somebody, who can signal it again; an agent, by an engine.
HEAD, LAUNCHER, AGENT = "the head", "a launcher", "an agent"
LOSABLE_AGENT = "an agent of a job that continues when it loses a node"
ENDING_AGENT = "an agent, whose engine has lost a node and may be ending the others"
# What came before: nothing; the same request, a moment ago; one elsewhere; one there.
FIRST, ECHO, ELSEWHERE, AGAIN = range(4)
# What it means: nothing at all; that it was signalled; the end; the end, whose reason the engine may know; SIGKILL.
IGNORE, NOTE, STOP, STOP_OR_FAIL, KILL = "ignore", "note", "stop", "stop or fail", "kill"

MEANINGS = {  # first, echo, elsewhere, again
    HEAD: (STOP, IGNORE, NOTE, KILL),
    LAUNCHER: (STOP, NOTE, NOTE, KILL),
    AGENT: (STOP_OR_FAIL, NOTE, NOTE, NOTE),
    LOSABLE_AGENT: (STOP, NOTE, NOTE, NOTE),
    ENDING_AGENT: (IGNORE, IGNORE, IGNORE, IGNORE),
}
BY_USER = (SIGINT, SIGQUIT)  # at a terminal, where each is meant
_ECHO_S = 1.0  # in which TERM again is the same request: timeout(1) sends it to the process, and then to its group


def meaning(who: str, number: int, *, first: int, since_s: float, was_signalled: bool) -> str:
    """Return what a signal means.

    Args:
        who: got it.
        number: of the signal.
        first: the signal that has asked for the end before; 0: none.
        since_s: the seconds since that.
        was_signalled: whether one came to this head, launcher or agent before.
    """
    is_echo = number == first and since_s < _ECHO_S and number not in BY_USER
    before = FIRST if not first else ECHO if is_echo else AGAIN if was_signalled else ELSEWHERE
    return MEANINGS[who][before]
