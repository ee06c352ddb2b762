"""The text of a qsub script for PBS: its options, those that infini-job sets, and the lines of a layout.

The one rule: the script has one `-l select` and one `-l place`, by infini-job, which contain the user's wishes for
each node. Of two, the first would win (OpenPBS 23.06). For OpenPBS, and PBS Professional from 2021.1 on; Torque has
no select.
"""

from __future__ import annotations

from infini_run.jobs.request.array import parse
from infini_run.jobs.request.job_request import CPU, DETERMINED
from infini_run.jobs.request.user_options import NONE, VALUE, Table, read, refusals
from infini_run.record import record
from infini_run.value_types import number

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from infini_run.jobs.request.job_request import JobRequest
    from infini_run.jobs.request.node_shape import Layout

_LETTERS = {letter: (letter, VALUE) for letter in "aACcehJjklmMNopPqrRSuvW"}
_LETTERS |= {letter: (letter, NONE) for letter in "fhIVXzG"}
OPTIONS = Table(longs={}, shorts=_LETTERS, words={})

_FILES = "the job's output goes to its directory; run infini-job logs to see it"
_ENV = "use --env of infini-job"
_QSUB = "concerns qsub itself, which infini-job runs; drop it"
REASONS = {
    "N": "use --title of infini-job",
    "q": "use --pool of infini-job",
    "A": "use --account of infini-job",
    "P": "use --project of infini-job",
    "J": "use --array of infini-job",
    "S": "the job script needs sh; drop it",
    "r": "use --restarts=N of infini-job",
    "c": "checkpoints belong to the program; drop it",
    **dict.fromkeys("ejokR", _FILES),
    **dict.fromkeys("vV", _ENV),
    **dict.fromkeys("CfGIXz", _QSUB),
}
INDEX = "^array_index^"  # what PBS replaces in the names of a task's files
_SIZE = "computed from the slots; use --slots and --slots_per_node"
_OF_A_NODE = "per node; use -l select=1:{}={}"
_CHUNK_ONLY = (
    "ncpus",
    "ngpus",
    "mem",
    "vmem",
    "mpiprocs",
    "ompthreads",
    "host",
    "vnode",
    "arch",
    "accelerator_model",
)
_ARRANGED = ("free", "pack", "scatter", "vscatter")
_SHARED = ("excl", "exclhost", "shared")
_TOLERATE = "tolerate_node_failures"  # from OpenPBS 19 on: else the loss of a node is the end of its job
_HIDDEN = ("block", "sandbox", "interactive", "x11")


@record
class Asked:
    """The meaning of the user's options.

    Args:
        chunk: `name=value` of every node.
        sharing, group: of place.
        others: unchanged options, each as its words.
        problems: one line each.
    """

    chunk: tuple[str, ...]
    sharing: str
    group: str
    others: tuple[tuple[str, ...], ...]
    problems: tuple[str, ...]


def quoted(word: str) -> str:
    """Quote a word for a line of #PBS: quotes as a shell's, but no backslash."""
    if word and not any(char.isspace() or char in "'\"" for char in word):
        return word
    pieces = []
    rest = word
    while rest:
        quote = '"' if rest[0] == "'" else "'"
        size = len(rest) - len(rest.lstrip("'")) if quote == '"' else (rest + "'").index("'")
        pieces.append(f"{quote}{rest[:size]}{quote}")
        rest = rest[size:]
    return "".join(pieces) or "''"


def _items(text: str) -> list[str]:
    """Split `name=value,name=value`; a comma that no name follows belongs to a value."""
    found: list[str] = []
    for item in text.split(","):
        name, equals, _ = item.partition("=")
        is_name = name.isascii() and name.replace("_", "a").replace(".", "").replace("-", "").isalnum()
        if found and not (equals and is_name and (name[0].isalpha() or name[0] == "_")):
            found[-1] += f",{item}"
        else:
            found.append(item)
    return found


def user_options(request: JobRequest) -> Asked:
    """Return the user's options, sorted by what they are, and all that is wrong with them."""
    given = read(request.options, OPTIONS)
    problems = [*given.problems, *refusals(given.options, REASONS)]
    problems += [f"{option.text}: unknown option of qsub" for option in given.options if not option.is_known]
    others = [option.argv for option in given.without("l")]
    for option in given.options:
        names = {item.partition("=")[0].strip().lower() for item in _items(option.value or "")}
        if option.name == "W" and not names.isdisjoint(_HIDDEN):
            problems.append(f"{option.text}: {_QSUB}")
        if option.name == "W" and _TOLERATE in names:
            problems.append(
                f"{option.text}: use --spares=N of infini-job; without spares, losing a node ends the job"
            )
    resources = _Resources(request)
    for option in given.options:
        if option.name == "l":
            for item in _items(option.value or ""):
                resources.add(item, option.text)
    return Asked(
        chunk=tuple(resources.chunk),
        sharing=resources.sharing,
        group=resources.group,
        others=(*others, *(("-l", item) for item in resources.others)),
        problems=(*problems, *resources.problems),
    )


class _Resources:
    """What the lists of -l ask for."""

    def __init__(self, request: JobRequest) -> None:
        self.request = request
        self.is_determined = request.layout == DETERMINED
        self.chunk: list[str] = []
        self.others: list[str] = []
        self.problems: list[str] = []
        self.sharing = self.group = ""

    def add(self, item: str, origin: str) -> None:
        name, _, value = item.partition("=")
        name = name.strip()
        if name == "select":
            self._select(value, origin)
        elif name == "place":
            self._place(value, origin)
        elif name == "walltime":
            self.problems.append(f"{origin}: use --time of infini-job")
        elif name in ("nodes", "nodect"):
            self.problems.append(f"{origin}: {_SIZE}")
        elif name in _CHUNK_ONLY:
            ours = "ngpus" if name == "ngpus" else "ncpus" if name == "ncpus" else ""
            self.problems.append(f"{origin}: {_SIZE if ours else _OF_A_NODE.format(name, value)}")
        elif item not in self.others:
            self.others.append(item)

    def _select(self, text: str, origin: str) -> None:
        """Read [count:]name=value:..., where infini-job sets the count and the slots: Determined ignores them,
        infini-job rejects them."""
        if "+" in text:
            self.problems.append(f"{origin}: expected one chunk, as all nodes are alike")
            return
        first, *rest = text.split(":")
        if number(first) is None:
            rest = [first, *rest]
        elif number(first) != 1 and not self.is_determined:
            self.problems.append(f"{origin}: {_SIZE}, and -l select=1:... for each node")
        for item in rest:
            self._resource(item, origin)

    def _resource(self, item: str, origin: str) -> None:
        name, equals, value = item.partition("=")
        if not equals or not name:
            self.problems.append(f"{origin}: expected name=value, not {item!r}")
        elif self.is_determined and name == ("ncpus" if self.request.slot_type == CPU else "ngpus"):
            return
        elif not self.is_determined and name in ("ngpus", "ncpus"):
            why = "use --cpus_per_slot of infini-job" if name == "ncpus" else _SIZE
            self.problems.append(f"{origin}: {name}: {why}")
        elif name == "mpiprocs":
            self.problems.append(f"{origin}: mpiprocs: each node runs one launcher; drop it")
        elif name == "mem" and self.request.mem_mb_per_slot:
            self.problems.append(f"{origin}: mem: use --mem_per_slot of infini-job")
        elif any(other.partition("=")[0] == name and other != item for other in self.chunk):
            self.problems.append(f"{origin}: {name} already has another value; drop one of them")
        elif f"{name}={value}" not in self.chunk:
            self.chunk.append(item)

    def _place(self, text: str, origin: str) -> None:
        """Read [arrangement][:sharing][:group=resource], where infini-job sets the arrangement."""
        for item in text.split(":"):
            if item in _SHARED:
                self.sharing = item
            elif item.startswith("group="):
                self.group = item
            elif item not in _ARRANGED:
                self.problems.append(
                    f"{origin}: {item!r}: unknown placement; use scatter, excl, exclhost, shared, or group=RESOURCE"
                )
            elif item != "scatter" and not self.is_determined:
                self.problems.append(f"{origin}: conflicts with one part of the job per node; use scatter")


def options(request: JobRequest, layout: Layout, log: str) -> list[tuple[str, ...]]:
    """Return the options of a request, each as its words, infini-job's first. `log`: where PBS puts the script's
    output. Does not check again what `user_options` rejects."""
    asked = user_options(request)
    if request.array:  # PBS takes no array that may not be run again
        array = parse(request.array)
        most = f"%{array.at_once}" if array.at_once else ""
        own = [("-o", f"/task/{INDEX}/".join(log.rpartition("/")[::2])), ("-r", "y"), ("-J", array.range + most)]
    else:
        own = [("-o", log), ("-r", "n")]
    ours: list[tuple[str, ...]] = [("-N", request.queue_name), ("-j", "oe"), *own]
    for name, text in (("-q", request.pool), ("-A", request.account), ("-P", _project(request.project))):
        if text:
            ours.append((name, text))
    if request.time_s:
        ours.append(("-l", f"walltime={_clock(request.time_s)}"))
    ours.append(("-l", f"select={select(layout, asked.chunk)}"))
    where = place(layout, asked)
    if where:
        ours.append(("-l", f"place={where}"))
    if layout.spares:
        ours.append(("-W", f"{_TOLERATE}=all"))
    return [*ours, *asked.others]


def array_problems(request: JobRequest) -> list[str]:
    """Return why PBS rejects an array: it takes one range, of two tasks at least."""
    if not request.array or parse(request.array).range:
        return []
    return [f"--array={request.array}: PBS needs one range of two or more tasks; use 0-9 or 0-20:5"]


def misplaced(request: JobRequest, layout: Layout) -> list[str]:
    """Return what no PBS could do with these nodes, each of which is another host. PBS lets it wait for ever."""
    if layout.all_nodes < 2:
        return []
    return [
        f"-l select: {item}: names one node, and the job needs {layout.all_nodes}; drop it"
        for item in user_options(request).chunk
        if item.partition("=")[0] in ("host", "vnode")
    ]


def select(layout: Layout, chunk: Sequence[str]) -> str:
    """Return the chunks of a layout: N:ncpus=C:ngpus=G, and the user's wishes for each."""
    found = [str(layout.all_nodes)]
    if layout.cpus_per_node:
        found.append(f"ncpus={layout.cpus_per_node}")
    if layout.gpus_per_node:
        found.append(f"ngpus={layout.gpus_per_node}")
        if layout.gpu_type and layout.style != DETERMINED:
            found.append(f"accelerator_model={layout.gpu_type}")
    if layout.mem_mb_per_node:
        found.append(f"mem={layout.mem_mb_per_node}mb")
    return ":".join([*found, *chunk])


def place(layout: Layout, asked: Asked) -> str:
    """Return the place of a layout. Chunks of one job go to separate hosts: else PBS puts two that fit on one."""
    sharing = asked.sharing or ("exclhost" if layout.is_exclusive else "")
    found = ["scatter" if layout.is_scattered else "", sharing, asked.group]
    return ":".join(item for item in found if item)


def _project(text: str) -> str:
    """Return a project's name with _ for each character that PBS does not take there (qsub(1B), -P)."""
    return "".join("_" if char in '/[]";:|<>+,?*= ' else char for char in text)


def _clock(time_s: int) -> str:
    return f"{time_s // 3600:02}:{time_s // 60 % 60:02}:{time_s % 60:02}"
