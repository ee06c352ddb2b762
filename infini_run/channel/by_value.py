"""cloudpickle's pickler, which also takes functions with a cache by value where no module has them.

functools.lru_cache makes an object that pickles by its name alone, so one of `__main__` would not be found elsewhere.
Code keeps the name of its file, which tracebacks show and cloudpickle drops since 3.1.3.
"""

from __future__ import annotations

import functools
import sys
from types import CodeType

import cloudpickle

from infini_run.channel.portable import check_portable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

_MAIN = ("__main__", "__mp_main__")  # the second: a script, in a process that multiprocessing spawned
if _MAIN[1] in sys.modules:
    cloudpickle.register_pickle_by_value(sys.modules[_MAIN[1]])

_FILENAME = 10  # its place among the arguments of CodeType, in CPython 3.10 to 3.14
_CachedFunction = type(functools.lru_cache(int))


class ByValuePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """A cloudpickle.Pickler that also takes functions with a cache by value."""

    def reducer_override(self, thing: object) -> Any:
        check_portable(thing)
        if isinstance(thing, _CachedFunction) and not _is_found_by_name(thing):
            return _make_cached, (thing.__wrapped__, thing.cache_parameters())
        if isinstance(thing, CodeType):
            make, arguments = self.dispatch_table[CodeType](thing)
            return make, (*arguments[:_FILENAME], thing.co_filename, *arguments[_FILENAME + 1 :])
        return super().reducer_override(thing)


def _is_found_by_name(thing: Any) -> bool:
    home = getattr(thing, "__module__", None)
    found: object = sys.modules.get(home or "")
    for name in getattr(thing, "__qualname__", "").split("."):  # a partial has none
        found = getattr(found, name, None)
    return found is thing and home not in _MAIN


def _make_cached(function: Callable[..., object], parameters: Mapping[str, Any]) -> Callable[..., object]:
    cached: Callable[..., object] = functools.lru_cache(**parameters)(function)
    return cached
