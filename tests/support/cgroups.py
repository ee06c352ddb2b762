"""Control groups of our own, where this machine lets us make some."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from infini_run.system.cgroup import own_folders
from tests.support.waiting import until


@contextmanager
def cgroup(controller: str, limits: Mapping[int, Mapping[str, str]]) -> Iterator[Path]:
    """Yield the folder of a new cgroup. At the end its processes come to ours, and it is removed.

    Args:
        controller: what limits it: cpu, memory.
        limits: by version of cgroups, what its files are to say; the first file must be there.
    """
    ours: dict[int, Path] = {}
    for version, above in own_folders(controller):
        ours.setdefault(version, Path(above))
        try:
            folder = Path(tempfile.mkdtemp(prefix="infini-run-test-", dir=above))
        except OSError:
            continue
        try:
            if _is_limited(folder, limits[version]):
                yield folder
                return
        finally:
            while pids := (folder / "cgroup.procs").read_text().split():
                for pid in pids:
                    with suppress(ProcessLookupError):
                        (ours[version] / "cgroup.procs").write_text(pid)
            until(lambda folder=folder: _is_removed(folder))  # which takes a moment after the end of a process
    pytest.skip(f"no {controller} cgroup can be made here")


def _is_limited(folder: Path, limits: Mapping[str, str]) -> bool:
    (needed, limit), *others = limits.items()
    try:
        (folder / needed).write_text(limit)
    except OSError:
        return False
    for name, text in others:
        if (folder / name).exists():
            (folder / name).write_text(text)
    return True


def _is_removed(folder: Path) -> bool:
    with suppress(OSError):
        folder.rmdir()
    return not folder.exists()
