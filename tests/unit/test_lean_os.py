"""lean_os.py: a part of `os` and `errno`, and nothing else."""

from __future__ import annotations

import errno
import os

from infini_run import lean_os


def test_numbers_of_errors_are_those_of_the_system():
    numbers = {name: getattr(lean_os, name) for name in lean_os.__all__ if name in errno.errorcode.values()}
    assert len(numbers) == 12
    assert numbers == {name: getattr(errno, name) for name in numbers}


def test_functions_of_os_are_its_own():
    """Those of os.path are written again, and two have no counterpart."""
    own = {"fsdecode", "fsencode", "drop_coerced_locale", "own_environ", "was_set"}
    names = set(lean_os.__all__) & set(dir(os)) - own
    assert all(getattr(lean_os, name) is getattr(os, name) for name in names)
