"""What a function needs to have imported that takes long: found in its code, without running any of it.

Worth knowing where several workers start at once: forks of one process that imports it are several times faster than
as many imports. This names only what is known to bear a fork.
"""

from __future__ import annotations

import dis
import sys
from types import CodeType, ModuleType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

_TORCH = {"torch", "torchvision", "torchaudio", "lightning", "pytorch_lightning", "accelerate", "transformers"}
_DEPTH = 6  # functions that a function refers to


def modules_to_preload(function: Any) -> tuple[str, ...]:
    """Return ("torch",) where it is installed and the function imports it, or refers to what needs it. The search
    covers its own code, its module, what it closes over, and the functions that it calls."""
    if _TORCH.isdisjoint(_packages(function, set(), _DEPTH)):
        return ()
    from importlib.util import find_spec

    return ("torch",) if "torch" in sys.modules or find_spec("torch") is not None else ()


def _packages(thing: Any, seen: set[int], depth: int) -> Iterator[str]:
    """Yield the names of the packages that come up."""
    if id(thing) in seen or depth == 0:
        return
    seen.add(id(thing))
    if isinstance(thing, ModuleType):
        yield thing.__name__.partition(".")[0]
        return
    module = getattr(thing, "__module__", None)
    if isinstance(module, str):
        yield module.partition(".")[0]
        if module != "__main__":  # it is imported with the function, and all that it imports
            for value in vars(sys.modules.get(module, object)).values():
                if isinstance(value, ModuleType):
                    yield value.__name__.partition(".")[0]
    thing = getattr(thing, "func", getattr(thing, "__func__", thing))  # functools.partial, a method
    code = getattr(thing, "__code__", None)
    if not isinstance(code, CodeType):
        return
    yield from _imports(code)
    known = getattr(thing, "__globals__", {})
    cells = [cell for cell in getattr(thing, "__closure__", None) or () if _is_filled(cell)]
    for value in [known[name] for name in code.co_names if name in known] + [cell.cell_contents for cell in cells]:
        yield from _packages(value, seen, depth - 1)


def _imports(code: CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME":
            yield str(instruction.argval).partition(".")[0]
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _imports(constant)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
