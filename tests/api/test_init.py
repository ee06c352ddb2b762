"""What `import infini_run` gives, and what it does not cost."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import pytest

import infini_run

ROOT = infini_run.__path__[0].rpartition("/")[0]


def test_the_list_of_names_is_sorted_and_has_each_once():
    assert infini_run.__all__ == sorted(set(infini_run.__all__))


@pytest.mark.parametrize("name", infini_run.__all__)
def test_every_name_is_there_and_is_called_so(name):
    assert getattr(infini_run, name).__name__ == name
    assert name in dir(infini_run)


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'infini_run' has no attribute 'nothing'"):
        infini_run.nothing  # noqa: B018


def test_the_version_is_the_packages():
    assert infini_run.__version__ == version("infini-run")
    assert "__version__" in dir(infini_run)


def test_importing_the_package_imports_nothing_else():
    code = "import sys; sys.path.insert(0, sys.argv[1]); before = set(sys.modules); import infini_run; "
    code += "print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-S", "-c", code, ROOT], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) <= {"infini_run", "__future__"}


def test_a_star_import_gives_every_public_name():
    namespace = {}
    exec("from infini_run import *", namespace)
    assert set(infini_run.__all__) <= namespace.keys()
