"""`import infini_run` in a clone whose core was not built in place: it takes the installed package.

A script beside the clone finds its folder before all others, and `pip install .` builds in another folder. The one
rule: the installed package takes this one's place as a whole; no module of one is mixed with the other's.
"""

from __future__ import annotations

import sys
from importlib.machinery import EXTENSION_SUFFIXES, PathFinder
from importlib.util import module_from_spec
from os.path import exists, realpath

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

_NAME = "infini_run"


def use_installed_package(folder: str) -> None:
    """Import the installed package in place of the one in `folder`. Raises ImportError: there is none."""
    spec = _find_installed(folder)
    if spec is None or spec.loader is None:
        root = folder.rpartition("/")[0]
        raise ImportError(
            f"the core of infini-run was not built in {folder}, and this Python has no other infini-run; "
            f"try: {sys.executable} -m pip install {root}",
            name=_NAME,
            path=folder,
        )
    for name in [name for name in sys.modules if name == _NAME or name.startswith(f"{_NAME}.")]:
        del sys.modules[name]
    module = module_from_spec(spec)
    sys.modules[_NAME] = module
    spec.loader.exec_module(module)


def _find_installed(folder: str) -> ModuleSpec | None:
    """Find a module as Python does, but not in that folder."""
    others = [path for path in sys.path if realpath(f"{path or '.'}/{_NAME}") != realpath(folder)]
    for finder in sys.meta_path:
        where = others if finder is PathFinder else None
        spec = finder.find_spec(_NAME, where)
        if spec is not None and any(map(_has_core, spec.submodule_search_locations or ())):
            return spec
    return None


def _has_core(folder: str) -> bool:
    return any(exists(f"{folder}/_irun{suffix}") for suffix in EXTENSION_SUFFIXES)
