"""Control groups of our own, where this machine lets us make some."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from infini_run.system.cgroup import own_folders


@contextmanager
def cgroup(controller: str, limits: Mapping[int, Mapping[str, str]]) -> Iterator[Path]:
    """A cgroup below our own, empty again at the end.

    Args:
        controller: what limits it: cpu, memory.
        limits: by version of cgroups, what its files are to say; the first file must be there.
    """
    for version, above in own_folders(controller):
        folder = Path(above) / f"infini-run-test-{os.getpid()}"
        (needed, limit), *others = limits[version].items()
        try:
            folder.mkdir()
            (folder / needed).write_text(limit)
        except OSError:
            if folder.is_dir():
                folder.rmdir()
            continue
        for name, text in others:
            if (folder / name).exists():
                (folder / name).write_text(text)
        try:
            yield folder
        finally:
            for pid in (folder / "cgroup.procs").read_text().split():  # that a failed test has left
                (folder.parent / "cgroup.procs").write_text(pid)
            folder.rmdir()
        return
    pytest.skip(f"no {controller} cgroup can be made here")
