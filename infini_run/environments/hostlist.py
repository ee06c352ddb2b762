"""Lists of hosts: text to hosts. Pure, without a shell or scontrol. The way back: compressed_hostlist.py.

    list   item[,item...]      where a comma inside brackets belongs to the item
    item   [user@]name[:slots] with every [...] of the name a set of numbers: node[01-16], gpu-a[1-2,7]-x[0-1]
    name   or an IPv6 address in brackets: [::1]:4

The one rule: text that is no list raises UsageError, one line that names the column or the line of the mistake.
The grammar of node lists is Slurm's (`scontrol show hostnames`), leading zeros and products of brackets included.
"""

from __future__ import annotations

from infini_run.errors import UsageError, counted
from infini_run.record import record, replace
from infini_run.value_types import MAX_INT, MOST_RANKS, number

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

MAX_HOSTS = 2**17
_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
_HEX = frozenset("0123456789abcdefABCDEF:.")
_MANY = f"expected at most {MAX_HOSTS} hosts"
_MOST_BYTES = 1 << 24  # of a host file, as characters
_PORT = 1024  # a host with more CPUs than ports that are root's alone is rarer than a port after its name
_SHOWN = 60  # characters of a wrong list that a message repeats


@record
class Host:
    """One host of a list.

    Args:
        name: the name of the host.
        slots: how many processes it has room for; 0: unknown.
        user: the user to log in as; empty: ssh decides.
    """

    name: str
    slots: int = 0
    user: str = ""

    @property
    def destination(self) -> str:
        """The host as ssh(1) takes it."""
        return f"{self.user}@{self.name}" if self.user else self.name


class _SyntaxError(ValueError):
    """What is wrong with a list, and from which of its characters on."""

    def __init__(self, at: int, text: str, why: str) -> None:
        super().__init__(why)
        self.at = at
        self.text = text


def parse_hosts(text: str, origin: str = "--hosts") -> tuple[Host, ...]:
    """Return the hosts of a list, in its order.

    Args:
        text: a list in the grammar above.
        origin: the flag or variable that gave the list, for messages.

    Raises:
        UsageError: it is no such list; the message has the column, counted from 1.
    """
    try:
        return _checked(_parse(text))
    except _SyntaxError as wrong:
        raise UsageError(f"{origin}: column {wrong.at + 1}, {quoted(wrong.text)}: {wrong}") from None


def parse_hostfile(text: str, path: str) -> tuple[Host, ...]:
    """Return the hosts of a host file: one a line as `host`, `host:4`, `host slots=4` or `host 4`; # begins a
    comment.

    Files of Open MPI, MPICH and DeepSpeed are such files. So are those of PBS (PBS_NODEFILE), where a host has a line
    for each of its processes: once a host has two lines, each line without a number stands for one process.

    Args:
        text: the content of the file.
        path: its name, for messages.

    Raises:
        UsageError: it is no such file; the message has the line.
    """
    found: dict[str, Host] = {}
    lines: dict[str, list[int]] = {}
    for at, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        where = f"{quoted(path)}:{at}"
        try:
            hosts = _line(words) if words else ()
        except _SyntaxError as wrong:
            raise UsageError(f"{where}: {quoted(wrong.text)}: {wrong}") from None
        for host in hosts:
            earlier = lines.setdefault(host.name, [])
            if earlier and (
                host.slots or host != found[host.name] or earlier[-1] == at or len(earlier) == MOST_RANKS
            ):
                raise UsageError(
                    f"{where}: {host.name} is already in line {earlier[0]}; use slots=N for the number of its "
                    "processes"
                )
            found[host.name] = host
            earlier.append(at)
        if len(found) > MAX_HOSTS:
            raise UsageError(f"{where}: {_MANY}")
    if not found:
        raise UsageError(f"{quoted(path)}: no host in it; use one line per host, such as node1 slots=8")
    if all(len(numbers) == 1 for numbers in lines.values()):
        return tuple(found.values())
    return tuple(replace(host, slots=host.slots or len(lines[host.name])) for host in found.values())


def read_hostfile(path: str, origin: str = "") -> tuple[Host, ...]:
    """Return the hosts of a host file.

    Args:
        path: the file.
        origin: the flag or variable that named the file, with the path; empty: --hostfile.

    Raises:
        UsageError: it cannot be read, or is no host file.
    """
    named = origin or f"--hostfile={quoted(path)}"
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            text = file.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        why = getattr(error, "strerror", error)
        raise UsageError(f"{named} cannot be read: {why}") from None
    if len(text) > _MOST_BYTES:
        raise UsageError(f"{named}: expected at most {_MOST_BYTES} bytes")
    return parse_hostfile(text, path)


def expand(text: str, origin: str) -> tuple[str, ...]:
    """Return the names of a node list such as `node[001-003,7],login`.

    Args:
        text: the list; users and numbers of processes are not allowed.
        origin: the flag or variable that gave the list, for messages.

    Raises:
        UsageError: as `parse_hosts`.
    """
    hosts = parse_hosts(text, origin)
    for host in hosts:
        if host.slots or host.user:
            raise UsageError(f"{origin}: expected a list of names, without users and numbers of processes")
    return tuple(host.name for host in hosts)


def repeats(text: str, origin: str) -> tuple[int, ...]:
    """Return the numbers of a run-length list: `8(x2),4` is 8, 8, 4. Slurm writes such lists of tasks and CPUs.

    Args:
        text: the list.
        origin: the variable that gave it, for messages.

    Raises:
        UsageError: it is no such list.
    """
    found: list[int] = []
    at = 1
    for item in text.split(","):
        value, times = item, "1"
        if item.endswith(")"):
            value, mark, times = item[:-1].partition("(x")
            times = times if mark else ""
        each, count = number(value), number(times)
        if each is None or count is None or not 0 <= each <= MAX_INT or not 1 <= count <= MAX_HOSTS - len(found):
            why = "expected numbers with repetitions, such as 8(x2),4"
            raise UsageError(f"{origin}: column {at}, {quoted(item)}: {why}")
        found += [each] * count
        at += len(item) + 1
    return tuple(found)


def machines(names: Iterable[str]) -> tuple[Host, ...]:
    """Return the hosts of a list that names each once for every process that it has room for (PBS_NODEFILE), in
    order.

    Args:
        names: host names, with repetitions.
    """
    slots: dict[str, int] = {}
    for name in names:
        slots[name] = slots.get(name, 0) + 1
    return tuple(Host(name=name, slots=count) for name, count in slots.items())


def quoted(text: str) -> str:
    """Return text that others have written as a message shows it: one printable line of 60 characters at most."""
    shown = text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
    return shown if shown.isprintable() and shown == shown.strip() != "" else ascii(shown)


# ---- reading


def _split(text: str) -> Iterator[tuple[int, str]]:
    """Return the items of a list, each with the place where it begins."""
    start, opened = 0, -1
    for at, char in enumerate(text):
        if char == "[":
            if opened >= 0:
                raise _SyntaxError(at, text[at:], "brackets cannot be nested")
            opened = at
        elif char == "]":
            if opened < 0:
                raise _SyntaxError(at, text[at:], "missing [ before this ]")
            opened = -1
        elif char == "," and opened < 0:
            yield start, text[start:at]
            start = at + 1
    if opened >= 0:
        raise _SyntaxError(opened, text[opened:], "missing ] after this [")
    yield start, text[start:]


def _parse(text: str) -> list[tuple[int, Host]]:
    found: list[tuple[int, Host]] = []
    for start, item in _split(text):
        bare = item.strip(" ")
        at = start + len(item) - len(item.lstrip(" "))
        if not bare:
            raise _SyntaxError(start, text[start:], "missing host")
        found += [(at, host) for host in _item(at, bare, MAX_HOSTS - len(found))]
    return found


def _checked(found: Sequence[tuple[int, Host]]) -> tuple[Host, ...]:
    seen: set[str] = set()
    for at, host in found:
        if host.name in seen:
            raise _SyntaxError(
                at, host.name, f"already in the list; use {_again(host.name)} for the number of its processes"
            )
        seen.add(host.name)
    return tuple(host for _, host in found)


def _again(name: str) -> str:
    return f"[{name}]:N" if ":" in name else f"{name}:N"


def _line(words: Sequence[str]) -> tuple[Host, ...]:
    """Read a line of a host file. max_slots (Open MPI) after the name has no effect here."""
    hosts = tuple(host for _, host in _parse(words[0]))
    if "," in words[0] and len(list(_split(words[0]))) > 1:
        raise _SyntaxError(0, words[0], "expected one host per line")
    for word in words[1:]:
        name, equals, value = word.partition("=")
        name = name.replace("-", "_")
        if equals and name == "max_slots":
            continue
        if equals and name != "slots":
            raise _SyntaxError(0, word, "expected only slots=N after a host")
        if hosts[0].slots:
            raise _SyntaxError(0, word, f"{hosts[0].name} has {counted(hosts[0].slots, 'slot')} already")
        slots = _slots(0, value if equals else word)
        hosts = tuple(replace(host, slots=slots) for host in hosts)
    return hosts


def _item(at: int, text: str, room: int) -> list[Host]:
    """[user@]name[:slots], every name that it stands for."""
    user, mark, rest = text.rpartition("@")
    start = at + len(user) + len(mark)
    if mark:
        _check_name(at, user, "user")
    if rest.startswith("[") and ":" in rest[: rest.find("]")]:
        name, colon, slots = rest[1:].partition("]")
        if not set(name.partition("%")[0]) <= _HEX or not set(name.partition("%")[2]) <= _LETTERS:
            raise _SyntaxError(start, rest, "expected an IPv6 address between these brackets")
        if colon and slots and slots[0] != ":":
            raise _SyntaxError(start + len(name) + 2, slots, "expected :N after the address")
        names, colon, slots = [name], slots[:1], slots[1:]
    else:
        name, colon, slots = rest.partition(":")
        if ":" in slots:
            raise _SyntaxError(start, rest, "expected brackets around an IPv6 address; use [::1] or [::1]:4")
        names = _names(start, name, room)
    count = _slots(start + len(rest) - len(slots), slots) if colon else 0
    if count >= _PORT:
        raise _SyntaxError(
            start,
            rest,
            f"not a port, but room for {count} processes on {names[0]}; set ports in --ssh_config, or use "
            f"a line '{names[0]} slots={count}' in --hostfile",
        )
    return [Host(name=each, slots=count, user=user) for each in names]


def _slots(at: int, text: str) -> int:
    value = number(text)
    if value is None or not 1 <= value <= MOST_RANKS:
        raise _SyntaxError(at, text, f"expected 1 to {MOST_RANKS} processes")
    return value


def _check_name(at: int, text: str, what: str) -> None:
    """Letters, digits, dots, dashes, underscores; a dash in front would be an option to ssh."""
    if not text:
        raise _SyntaxError(at, text, f"missing {what}")
    for offset, char in enumerate(text):
        if char not in _LETTERS:
            raise _SyntaxError(
                at + offset, text[offset:], f"expected letters, digits, '.', '-', or '_' in the {what}"
            )
    if text[0] == "-":
        raise _SyntaxError(at, text, f"{what} cannot begin with a dash")


def _names(at: int, text: str, room: int) -> list[str]:
    """Return every name of `text`: the product of its brackets, the last one counting fastest."""
    names, start = [""], at
    while text:
        plain, opened, rest = text.partition("[")
        names = [name + plain for name in names]
        start += len(plain)
        if not opened:
            break
        inside, _, text = rest.partition("]")
        numbers = _numbers(start + 1, inside, room // len(names))
        names = [name + each for name in names for each in numbers]
        start += len(inside) + 2
    if len(names) > room:
        raise _SyntaxError(at, names[0], _MANY)
    _check_name(at, names[0] if names else "", "host name")
    return names


def _numbers(at: int, text: str, room: int) -> list[str]:
    """1-3,07: every number as it is written, with the leading zeros of the first one of its range."""
    found: list[str] = []
    for part in text.split(","):
        low_text, dash, high_text = part.partition("-")
        low, high = number(low_text), number(high_text if dash else low_text)
        is_padded = dash and high_text.startswith("0") and len(high_text) != len(low_text)
        if low is None or high is None or low < 0 or high < low or is_padded:
            raise _SyntaxError(at, part, "expected numbers and ranges in rising order, such as 1-3,07-16")
        if high - low >= room - len(found):
            raise _SyntaxError(at, part, _MANY)
        width = len(low_text)
        found += [f"{value:0{width}}" for value in range(low, high + 1)]
        at += len(part) + 1
    return found
