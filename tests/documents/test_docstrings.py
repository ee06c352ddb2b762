"""What the docstrings and comments of infini_run/ name exists: exceptions after `Raises`, identifiers in backticks,
and files. An identifier counts if it stands anywhere in the package's code, as a name or as a text.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import keyword
import re
import sys
import tokenize

import pytest

import infini_run as ir
from tests.support.paths import ROOT

FILES = sorted((ROOT / "infini_run").rglob("*.py"))
SOURCES = [str(path) for folder in ("infini_run", "csrc") for path in (ROOT / folder).rglob("*.*")]

# Of Python, of other programs, and of their users.
FOREIGN_NAMES = {"as_completed", "set_executable", "_wait_for_tstate_lock", "DupFd", "resources_available", "MODULE"}
FOREIGN_NAMES |= {"idna", "_get_argument", "a100", "NAME", "K", "FUNCTION", "INFINI_JOB_NAME", "S", "Z", "SIGSEGV"}
FOREIGN_NAMES |= {"wait_woken", "pipe_read", "anon_pipe_read"}
FOREIGN_ERRORS = {"CancelledError", "NVMLError"}
FOREIGN_FILES = re.compile(r"train\.py|(torch|linux|slurm)/.+|(job|pbs_internal)\.h|(qmgr|svr_jobfunc|topology)\.c")


pytestmark = pytest.mark.xdist_group("docstrings")  # the files are parsed once, in one worker


@functools.cache
def nodes_of(path):
    return list(ast.walk(ast.parse(path.read_text())))


@functools.cache
def is_source(name):
    """Whether a file of the package or of the core has this path, or ends with it."""
    return any(source.endswith(f"/{name.lstrip('/')}") for source in SOURCES)


@functools.cache
def exceptions():
    """The exceptions of Python, and the classes of the package that derive from one."""
    classes = [node for path in FILES for node in nodes_of(path) if isinstance(node, ast.ClassDef)]
    pairs = {(node.name, getattr(base, "attr", getattr(base, "id", ""))) for node in classes for base in node.bases}
    found = FOREIGN_ERRORS | {name for name, thing in vars(builtins).items() if isinstance(thing, type)}
    while more := {name for name, base in pairs if base in found} - found:
        found |= more
    return found


@functools.cache
def names():
    """The identifiers of the package, of Python and of others."""
    fields = ("name", "id", "attr", "arg", "asname", "module", "value")
    found = {getattr(node, field, None) for path in FILES for node in nodes_of(path) for field in fields}
    texts = {text for text in found if isinstance(text, str)} | {name for path in FILES for name in path.parts}
    ours = {part for text in texts for part in re.split(r"[.=-]", text)}
    return ours | set(dir(builtins)) | set(keyword.kwlist) | sys.stdlib_module_names | FOREIGN_NAMES


def docstrings(path):
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [text for node in nodes_of(path) if isinstance(node, kinds) and (text := ast.get_docstring(node))]


def comments(path):
    with path.open("rb") as file:
        return [token.string for token in tokenize.tokenize(file.readline) if token.type == tokenize.COMMENT]


def raised(text):
    """The names after `Raises`: of a sentence (`Raises A, B: why`), or of a section of lines `A, B: why`."""
    sections = re.findall(r"^Raises:\n((?:    .*\n?|\n(?=    ))+)", text, re.M)
    lists = [names for lines in sections for names in re.findall(r"^ {4}([A-Z][\w, \n]*):", lines, re.M)]
    lists += re.findall(r"\b[Rr]aises?\s+((?:`?[A-Z]\w+`?(?:,\s+|\s+or\s+)?)+)", text)
    return {name for names in lists for name in re.findall(r"[A-Z]\w+", names) if not name.startswith("SIG")}


def unknown_in(path):
    """Each name in a docstring or a comment of this file that stands for nothing."""
    texts = docstrings(path) + comments(path)
    found = {name for text in docstrings(path) for name in raised(text)} - exceptions()
    quoted = [name for text in texts for name in re.findall(r"`+([A-Za-z_][\w.]*)(?:\(\))?`+", text)]
    found |= {name for name in quoted if not set(re.sub(r"\.py$", "", name).split(".")) <= names()}
    files = [name for text in texts for name in re.findall(r"[\w/]+\.(?:py|[ch])\b", text)]
    for name in files:
        is_foreign = FOREIGN_FILES.fullmatch(name) or name.removesuffix(".py") in sys.stdlib_module_names
        if not is_foreign and not is_source(name):
            found.add(name)
    return found


@pytest.mark.parametrize("folder", sorted({path.parent for path in FILES}), ids=lambda folder: folder.name)
def test_what_a_docstring_or_a_comment_names_exists(folder):
    assert not {path.name: names for path in FILES if path.parent == folder and (names := unknown_in(path))}


def public_docstrings():
    """The docstring of each public class and function, and of their public methods and properties."""
    for name in ir.__all__:
        thing = getattr(ir, name)
        yield name, inspect.getdoc(thing)
        for member in dir(thing) if isinstance(thing, type) else ():
            if not member.startswith("_"):
                yield f"{name}.{member}", inspect.getdoc(inspect.getattr_static(thing, member))


def test_public_docstring_says_instead_of_referring():
    """An IDE shows no other docstring beside it."""
    refers = re.compile(r"(?im)(:|^Raises|\.) *(and )?(raises )?as (for |in )?`?[\w.]+`?( does)?\.?$|\bas above\b")
    found = {name: match[0] for name, text in public_docstrings() if (match := refers.search(text or ""))}
    assert not found


def test_names_are_read_from_sentences_and_from_sections():
    text = "Raises A1, B2: why; raises `C3` or D4.\n\nRaises:\n    E5, F6: why,\n        G7: no.\n\n    H8: why."
    assert raised(text) == {"A1", "B2", "C3", "D4", "E5", "F6", "H8"}
