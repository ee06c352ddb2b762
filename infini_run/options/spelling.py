"""What a misspelled word was probably meant to be. Imported only once somebody has misspelled one."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable


def nearest(word: str, known: Iterable[str]) -> str:
    """The known word that `word` was probably meant to be, or "".

    Near is one edit in three letters. The front of a longer name is one edit away, so that `--nproc` finds
    `--nproc_per_node`.
    """
    ranked = [(_far(word, name), not name.startswith(word), name) for name in known]
    edits, _, name = min(ranked, default=(len(word) + 1, True, ""))
    return name if edits <= max(1, len(word) // 3) else ""


def _far(word: str, name: str) -> int:
    return min(_edits(word, name), 1 + _edits(word, name[: len(word)]))


def _edits(a: str, b: str) -> int:
    """How many letters to insert, delete, replace or swap with the next one to make `b` of `a`."""
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, x in enumerate(a):
        above, row = row, [i + 1]
        for j, y in enumerate(b):
            row.append(min(above[j + 1] + 1, row[j] + 1, above[j] + (x != y)))
            if i and j and x == b[j - 1] and y == a[i - 1]:
                row[-1] = min(row[-1], before[j - 1] + 1)
        before = above
    return row[-1]
