"""Pickling by cloudpickle: functions and classes that no module has travel by value. Imported where that is needed
only: it takes 20 ms."""

from __future__ import annotations

from io import BytesIO

from cloudpickle import Pickler

from infini_run.crews.capture import capture_exception
from infini_run.errors import UnpicklableError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from pickle import PickleBuffer


def dumps(what: object, name: str, keep: Callable[[PickleBuffer], bool]) -> bytes:
    """The pickle of it. name: what it is, for the error. keep: is given what is large; False: it has taken it.
    Raises UnpicklableError."""
    file = BytesIO()
    _, error = capture_exception(Pickler(file, protocol=5, buffer_callback=keep).dump, what)
    if error is not None:
        raise UnpicklableError(f"{name} cannot be pickled: {error}") from error
    return file.getvalue()  # no copy (io.BytesIO)
