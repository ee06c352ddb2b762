"""JSON, by the interpreter's own C code. `import json` takes longer than all else that an agent imports, for the
regular expressions of a decoder that the C one replaces."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

try:
    import _json as c
except ImportError:  # another interpreter than CPython
    c = None  # type: ignore[assignment]


class _Rules:
    """The defaults of json.JSONDecoder that the C scanner reads."""

    strict = True
    object_hook = object_pairs_hook = None
    parse_float = float
    parse_int = int
    parse_constant = {"-Infinity": float("-inf"), "Infinity": float("inf"), "NaN": float("nan")}.__getitem__
    memo: dict[str, str] = {}  # noqa: RUF012


def _refuse(value: object) -> object:
    raise TypeError(f"{value!r} is none of JSON's types")


def encode(content: object) -> bytes:
    """Return the shortest JSON of plain types, in ASCII.

    Args:
        content: dicts, lists, tuples, strings, numbers, booleans and None.

    Raises:
        TypeError: it has another type in it.
    """
    if c is None:
        import json

        return json.dumps(content, separators=(",", ":")).encode()
    encode = c.make_encoder(None, _refuse, c.encode_basestring_ascii, None, ":", ",", False, False, True)
    return "".join(encode(content, 0)).encode()


def decode(data: bytes) -> Any:
    """Return the value that `encode` wrote; tuples come back as lists.

    Args:
        data: JSON in UTF-8.

    Raises:
        ValueError, RecursionError: `encode` did not write that.
    """
    text = data.decode()
    if c is None:
        import json

        return json.loads(text)
    try:
        content, end = c.make_scanner(_Rules)(text, 0)  # type: ignore[arg-type]
    except (StopIteration, SystemError):  # the latter: its own error is json.decoder's, which nobody has imported
        raise ValueError("not JSON") from None
    if end != len(text):
        raise ValueError("more than one JSON text")
    return content
