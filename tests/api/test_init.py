"""What `import infini_run` gives, and what it does not cost."""

from __future__ import annotations

import ast
import inspect
import os
import subprocess
import sys
import textwrap
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


def test_dir_has_only_public_names_after_a_launch():
    ir = infini_run
    ir.Launcher(preload=()).run(abs, -1)
    assert {"crews", "errors"} <= vars(ir).keys()
    assert [name for name in dir(ir) if not name.startswith("__")] == ir.__all__


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


def test_typing_extensions_is_for_type_checkers_alone(tmp_path):
    """In this process, and in those that run functions and tasks."""
    (tmp_path / "typing_extensions.py").write_text("raise SystemExit('typing_extensions was imported')\n")
    code = textwrap.dedent("""
        import importlib, pkgutil, sys
        import infini_run as ir
        for found in pkgutil.walk_packages(ir.__path__, "infini_run."):
            needs_more = ".serve" in found.name or found.name.endswith("joblib_backend")  # fastapi, joblib
            if not needs_more and not found.name.endswith("__main__"):
                importlib.import_module(found.name)
        assert ir.Pool(preload=["fractions"]).run(lambda: "typing_extensions" in sys.modules)[0] is False
        with ir.Crew(lambda ctx, task: "typing_extensions" in sys.modules) as crew:
            assert crew.ask(0).result() is False
    """)
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_star_import_gives_every_public_name():
    namespace = {}
    exec("from infini_run import *", namespace)
    assert set(infini_run.__all__) <= namespace.keys()


PICKLED = {"Body", "TaskFailed"}  # what a CrewEvent keeps until somebody asks for its value or error
TYPE_VARIABLES = {"R"}


def defined_in(module):
    """The classes and imported names of a module, as (module, name), those for type checkers too."""
    found = {}
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("infini_run"):
            found |= {alias.asname or alias.name: (node.module, alias.name) for alias in node.names}
        elif isinstance(node, ast.ClassDef):
            found.setdefault(node.name, (module.__name__, node.name))
    return found


def returned_names(thing):
    """The names in what a function, or the public methods, properties and fields of a class, are annotated with."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(thing))).body[0]
    nodes = [tree] if isinstance(tree, ast.FunctionDef) else tree.body
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not node.name.startswith("_"):
            annotation = node.returns
        elif isinstance(node, ast.AnnAssign) and not node.target.id.startswith("_"):
            annotation = node.annotation
        else:
            continue
        yield from (part.id for part in ast.walk(annotation) if isinstance(part, ast.Name))


def test_every_type_that_a_public_name_returns_or_holds_is_public():
    missing = set()
    for name in infini_run.__all__:
        thing = getattr(infini_run, name)
        homes = defined_in(sys.modules[thing.__module__])
        missing |= {homes[part] for part in returned_names(thing) if part in homes}
    assert {name for _, name in missing} - {*infini_run.__all__, *PICKLED, *TYPE_VARIABLES} == set()
