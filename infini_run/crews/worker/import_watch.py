"""Something to do with a module as soon as it has been imported, without importing it for that."""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

    Visit = Callable[[ModuleType], None]


def call_when_imported(visits: Mapping[str, Visit]) -> ImportWatch:
    """Call a function with each of these modules, by name: at once if it is loaded, else whenever it is imported."""
    for name, visit in visits.items():
        if name in sys.modules:
            visit(sys.modules[name])
    watch = ImportWatch(visits)
    sys.meta_path.insert(0, watch)
    return watch


class ImportWatch:
    """A finder that finds no module: it has functions called whenever some are imported. While there may be other
    threads it stays in sys.meta_path, which they may be going through."""

    def __init__(self, visits: Mapping[str, Visit]) -> None:
        self._visits = visits

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Leave it to the other finders, but for the loader of what is watched."""
        visit = self._visits.get(name)
        if visit is None:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                spec.loader = spec.loader and _VisitingLoader(spec.loader, visit)  # type: ignore[assignment]
                return spec
        return None


class _VisitingLoader:
    """The loader of one module, with which a function is called as soon as it has been executed."""

    def __init__(self, loader: Any, visit: Visit) -> None:
        self._loader = loader
        self._visit = visit

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._visit(module)
