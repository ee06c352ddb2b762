"""The short form of a list of hosts, for messages: node[1-3,07-08],login. Pure.

The one rule: hostlist.py expands the short form to the same names in the same order.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_DIGITS = frozenset("0123456789")


def compress(names: Iterable[str]) -> str:
    """Return a short list that expands to the same names in the same order, such as `node[01-16]`.

    Args:
        names: host names.
    """
    groups: list[tuple[list[str], int, list[str]]] = []  # parts of the first name, the part that varies, its values
    for name in names:
        parts = _parts(name)
        if groups and _joins(groups[-1], parts):
            first, varying, values = groups[-1]
            varying = varying if varying >= 0 else _difference(first, parts)
            values = values or [first[varying]]
            groups[-1] = (first, varying, [*values, parts[varying]])
        else:
            groups.append((parts, -1, []))
    return ",".join(_written(*group) for group in groups)


def _parts(name: str) -> list[str]:
    """Split a name into text and numbers by turns, text first: node07-b is 'node', '07', '-b'."""
    if ":" in name:
        return [f"[{name}]"]
    parts = [""]
    for char in name:
        if (char in _DIGITS) == (len(parts) % 2 == 0):
            parts[-1] += char
        else:
            parts.append(char)
    return parts


def _difference(a: Sequence[str], b: Sequence[str]) -> int:
    """Return the index of the one number in which two names differ; -1 if more differs, text differs, or nothing
    does."""
    if len(a) != len(b):
        return -1
    places = [at for at, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]
    is_number = len(places) == 1 and places[0] % 2 == 1 and len(a[places[0]]) <= 18 and len(b[places[0]]) <= 18
    return places[0] if is_number else -1


def _joins(group: tuple[list[str], int, list[str]], parts: list[str]) -> bool:
    first, varying, values = group
    place = _difference(first, parts)
    return place >= 0 and varying in (-1, place) and parts[place] not in values


def _written(parts: list[str], varying: int, values: Sequence[str]) -> str:
    if varying < 0:
        return "".join(parts)
    ranges: list[list[str]] = []
    for value in values:
        if ranges and value == f"{int(ranges[-1][-1]) + 1:0{len(ranges[-1][0])}}":
            ranges[-1] = [ranges[-1][0], value]
        else:
            ranges.append([value])
    inside = ",".join("-".join(pair) for pair in ranges)
    return "".join([*parts[:varying], f"[{inside}]", *parts[varying + 1 :]])
