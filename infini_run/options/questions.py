"""The questions to running launches (--list and those beside it): the words of the command line become a Question.

The one rule: only words of the command line ask. Nothing is stopped, and nothing starts, by a guess.
"""

from __future__ import annotations

from infini_run.errors import UsageError
from infini_run.options.grammar import COMMAND_LINE, quote
from infini_run.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from infini_run.options.grammar import Setting

QUESTIONS = ("list", "top", "follow", "stacks", "stop", "send", "bundle")
DETAILS = {"ranks": ("follow", "stacks", "send"), "tail": ("follow",)}  # flags that belong to questions
_NEEDS_LAUNCH = ("stop", "send", "bundle")  # they change a launch, or give its facts away: it has to be named


@record
class Question:
    """A question to running launches.

    Attributes:
        name: One of QUESTIONS.
        origin: It, as it was given.
        form: text or json.
        launch: The launch that it is about, as the user names it. Empty: not named.
        ranks: The ranks that it is about. None: all.
        signal: The signal to send.
        tail: How many earlier lines of each rank to show.
        folder: Where to write what a bug report needs.
    """

    name: str
    origin: str
    form: str
    launch: str
    ranks: tuple[int | str, ...] | None = None
    signal: int = 0
    tail: int = 0
    folder: str = ""


def read_question(given: dict[str, Setting], words: Sequence[str]) -> Question | None:
    """Return the question that the command line asks, and take it out of what was given. None: there is none.

    Args:
        given: What was given; of these flags, nothing is left.
        words: The words after the flags.

    Raises:
        UsageError: There are two questions, a second word, a flag of a launch, or a detail without its question.
    """
    asked = {name: setting for name in (*QUESTIONS, *DETAILS) if (setting := given.pop(name, None)) is not None}
    names = [name for name in QUESTIONS if name in asked and asked[name].value]
    for detail, of in DETAILS.items():
        if detail in asked and not any(name in of for name in names):
            flags = ", ".join(f"--{name}" for name in of[:-1]) + ", or " * (len(of) > 1) + f"--{of[-1]}"
            missing, origin = "one" if len(of) > 1 else "it", asked[detail].origin
            raise UsageError(f"{origin}: needs {flags}; add {missing}, or drop {origin}")
    if not names:
        return None
    name, others = names[0], [asked[other] for other in names[1:]]
    others += [setting for setting in given.values() if setting.precedence == COMMAND_LINE]
    if others:
        raise UsageError(f"{asked[name].origin}: conflicts with {others[0].origin}; drop one of them")
    origin = asked[name].origin
    unexpected = words[name != "list" :]
    if unexpected:
        raise UsageError(f"{origin}: unexpected {quote(unexpected[0]) or repr('')}; drop it")
    if "" in words:  # of an unset variable in a script: it does not stand for the only launch
        raise UsageError(f"{origin}: '' is not a launch; add its id, or the pid of one of its processes")
    if name in _NEEDS_LAUNCH and not words:
        raise UsageError(f"{origin}: missing launch; add its id, or the pid of one of its processes")
    ranks = asked["ranks"].value if "ranks" in asked else None
    signal = asked[name].value if name == "send" else 0
    form = asked[name].value if name in ("list", "stacks") else "text"
    return Question(
        name=name,
        origin=origin,
        form=form,
        launch="".join(words),
        ranks=ranks,
        signal=signal,
        tail=asked["tail"].value if "tail" in asked else 0,
        folder=asked[name].value if name == "bundle" else "",
    )
