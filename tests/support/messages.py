"""The error messages of the program, read from its source: where an error is made, the fixed words of its text.

What a message has from elsewhere is `…` in it. A name is looked up in its function and its module, a call of a
function of the module in what that returns.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from tests.support.paths import ROOT

PACKAGE = ROOT / "infini_run"
ANY = "…"
_MOST = 64  # texts of one expression
# What says no to a value: the option that it was given for is put before it.
_OF_VALUES = (
    "value_types.py",
    "options/table.py",
    "options/torchrun.py",
    "options/grammar.py",
    "jobs/request/array.py",
)
_OF_VALUES += ("jobs/options/table.py",)
# Here the caller of the Python API also gets errors of the standard library.
_OF_CALLERS = ("channel/", "crews/", "jobs/job.py", "jobs/job_executor.py", "options/from_python.py")
_STANDARD = {"TimeoutError", "AskTimeout", "RuntimeError", "IndexError", "KeyError", "TypeError", "ValueError"}
_SMALL = {"NoGpus", "_SyntaxError", "NotThere", "Busy"}  # become one of the tree's, with their words
_SECOND = {
    "SubmitError": 1,
    "NotThere": 1,
    "_SyntaxError": 2,
}  # where the text stands, if not first
_MAKERS = {"died", "warn"}  # functions that make an error, or a warning, of the text that they get first
_PRINTED = {"print_line", "_print_line", "notice", "add_notice"}  # lines on stderr that end nothing
_REPORTS = {
    "headline",
    "describe_end",
    "hint",
    "killed_text",
    "left_behind",
    "_port_hint",
}  # of the report of a failure
_KEPT = {"loss", "problem", "_problem", "_broken", "_over", "query_error"}  # attributes: the text of an error
_OF_CLASS = {"_too_late"}  # the same, in the body of a class
_PREFIXES = ("infini-run: ", "infini-job: ")  # a text that begins so is a whole line
_OF_C = re.compile(r'(?:\bPRINT\(|\bfprintf\(stderr, )"((?:[^"\\]|\\.)*)"')  # what csrc/ writes


@dataclass(frozen=True, order=True)
class Message:
    """The fixed words of an error's text. place: file and function; kind: the class of the error."""

    text: str
    kind: str
    place: str


def messages() -> frozenset[Message]:
    """Every message that has fixed words."""
    return _read_package()[0]


def all_texts() -> frozenset[str]:
    """Every text of the source that has fixed words, a message or not."""
    return _read_package()[1]


@functools.cache
def _read_package() -> tuple[frozenset[Message], frozenset[str]]:
    trees = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
    classes = error_classes(trees.values()) | _SMALL
    found, texts = set(of_c()), set()
    for path, tree in trees.items():
        module = _Module(path, tree, classes)
        found |= module.messages()
        texts |= module.all_texts()
    return frozenset(found), frozenset(texts)


def of_c() -> frozenset[Message]:
    """What the programs of csrc/ print. Some begin with a path: a blank comes first then."""
    return frozenset(
        Message(_tidy(re.sub(r"%s|^(?= )", ANY, text.replace("\\n", ""))), "line", str(path.relative_to(ROOT)))
        for path in sorted((ROOT / "csrc").rglob("*.c")) for text in _OF_C.findall(path.read_text())
    )  # fmt: skip


def error_classes(trees) -> set[str]:
    """InfiniRunError and all that come from it, by their names."""
    bases = {
        node.name: {base.id for base in node.bases if isinstance(base, ast.Name)}
        for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    }  # fmt: skip
    found = {"InfiniRunError"}
    while more := {name for name, of in bases.items() if of & found} - found:
        found |= more
    return found


class _Module:
    """One file of the package."""

    def __init__(self, path: Path, tree: ast.Module, classes: set[str]) -> None:
        self.name = str(path.relative_to(PACKAGE))
        self.classes = classes | _MAKERS
        if self.name in _OF_VALUES:
            self.classes |= {"ValueError"}
        if self.name.startswith(_OF_CALLERS):
            self.classes |= _STANDARD
        self.tree = tree
        self.scopes = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        self.functions = {node.name: node for node in self.scopes}
        self._open: set[str] = set()  # names that are looked into, against circles
        self._own_nodes: dict[ast.AST, list[ast.AST]] = {}

    def messages(self) -> set[Message]:
        found = set()
        for scope in [self.tree, *self.scopes]:
            lists = "problems" in getattr(scope, "name", "")  # such a function returns sentences
            reports = getattr(scope, "name", "") in _REPORTS
            for node in self._own(scope):
                sources = self._sources(node) + (_elements(node) if lists else [])
                sources += [("report", node.value)] if reports and isinstance(node, ast.Return) and node.value else []
                for kind, expression in sources:
                    for text in self._texts(expression, scope):
                        found.add(Message(_tidy(text), kind, f"{self.name}:{getattr(scope, 'name', '')}"))
        return {message for message in found if re.search(r"\w\w+\W+\w\w+", message.text)}

    def all_texts(self) -> set[str]:
        """Every text that has fixed words, a message or not."""
        return {
            _tidy(text) for scope in [self.tree, *self.scopes] for node in self._own(scope)
            if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp) for text in self._texts(node, scope)
        }  # fmt: skip

    def _own(self, scope: ast.AST) -> list[ast.AST]:
        """The nodes of a function, or of a module outside its functions, in the order of the source."""
        if scope not in self._own_nodes:
            self._own_nodes[scope] = list(_walk_own(scope))
        return self._own_nodes[scope]

    def _sources(self, node: ast.AST) -> list[tuple[str, ast.expr]]:
        """The expressions in a node that are the text of a message, each with the kind of it."""
        if isinstance(node, ast.Call):
            name, args = _called(node), node.args
            if name in self.classes and len(args) > _SECOND.get(name, 0):
                return [(name, args[_SECOND.get(name, 0)])]
            if name in _PRINTED and args:
                return [("line", arg) for arg in args]
            if name == "append" and ast.unparse(node.func).endswith("problems.append"):
                return [("UsageError", args[0])]
        if isinstance(node, ast.Assign) and any(_is_kept(target) for target in node.targets):
            value = node.value
            return [("LinkError", value.elts[1] if isinstance(value, ast.Tuple) else value)]  # a class, and its text
        if isinstance(node, ast.Constant | ast.JoinedStr) and _is_line(node):
            return [("line", node)]
        if isinstance(node, ast.ClassDef) and node.name in self.classes:
            return [
                (node.name, call.args[0]) for call in ast.walk(node)
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "super().__init__" and call.args
            ]  # fmt: skip
        return []

    def _texts(self, node: ast.expr, scope: ast.AST) -> list[str]:
        """What an expression may be, with `…` for what is not known here."""
        if isinstance(node, ast.Constant):
            return [node.value] if isinstance(node.value, str) else [ANY]
        if isinstance(node, ast.JoinedStr):
            return self._joined(node.values, scope)
        if isinstance(node, ast.FormattedValue):
            return self._texts(node.value, scope)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self._joined([node.left, node.right], scope)
        if isinstance(node, ast.IfExp):
            return self._texts(node.body, scope) + self._texts(node.orelse, scope)
        if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
            return [*self._texts(node.values[-1], scope), ""]  # where the others are texts, these are empty then
        if isinstance(node, ast.BoolOp):
            texts = [text for value in node.values for text in self._texts(value, scope)]
            of_name = [text for text in texts if text and not text.isalnum()]  # `name or 'none'` is a name
            return of_name if ANY in texts else texts
        if isinstance(node, ast.Name):
            return self._named(node.id, scope)
        if _called(node) == "counted" and isinstance(node.args[1], ast.Constant):  # a number, and its noun
            return [f"{ANY} {node.args[1].value}s"]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            return self._returned(node.func.id)
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):  # one of a table's values
            return self._tabled(node.value.id, scope)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
            found = self._values(node.func.value, scope)
            defaults = [text for arg in node.args[1:] for text in self._texts(arg, scope)]
            return [*(found or [ANY]), *defaults]
        if _called(node) == "join" and isinstance(node.args[0], ast.List):  # lines, of which the first is the message
            return [text + ANY for text in self._texts(node.args[0].elts[0], scope)]
        return [ANY]

    def _tabled(self, name: str, scope: ast.AST) -> list[str]:
        for node in [*self._own(scope), *self._own(self.tree)]:
            if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
                return self._values(node.value, scope) or [ANY]
        return [ANY]

    def _values(self, node: ast.expr, scope: ast.AST) -> list[str]:
        """The texts of a dict, or none."""
        if isinstance(node, ast.Name):
            known = self._tabled(node.id, scope)
            return [] if known == [ANY] else known
        values = node.values if isinstance(node, ast.Dict) else []
        return [text for value in values for text in self._texts(value, scope)]

    def _joined(self, values: list[ast.expr], scope: ast.AST) -> list[str]:
        parts = [self._texts(value, scope) for value in values]
        count = 1
        for part in parts:
            count *= len(part)
        if count > _MOST:
            parts = [part if len(part) == 1 else [ANY] for part in parts]
        return ["".join(words) for words in product(*parts)]

    def _named(self, name: str, scope: ast.AST) -> list[str]:
        if name in self._open:
            return [ANY]
        self._open.add(name)
        texts = self._assigned(name, scope)
        self._open.discard(name)
        return texts

    def _assigned(self, name: str, scope: ast.AST) -> list[str]:
        for place in (scope, self.tree):
            assigned = [node for node in self._own(place) if isinstance(node, ast.Assign)]
            given = [a for a in assigned if any(isinstance(t, ast.Name) and t.id == name for t in a.targets)]
            texts = [text for a in given for text in self._texts(a.value, place)]
            for more in [node for node in self._own(place) if isinstance(node, ast.AugAssign)]:
                before = [a for a in given if a.lineno < more.lineno and ast.unparse(more.target) == name]
                firsts = self._texts(before[-1].value, place) if before else []
                texts += [first + end for end in self._texts(more.value, place) for first in firsts]
            if texts:
                return texts
        return [ANY]

    def _returned(self, name: str) -> list[str]:
        function = self.functions.get(name)
        if function is None or name in self._open:
            return [ANY]
        self._open.add(name)
        values = [
            node.value for node in self._own(function) if isinstance(node, ast.Return) and node.value is not None
        ]
        texts = [text for value in values for text in self._texts(value, function)]
        self._open.discard(name)
        return texts or [ANY]


def _walk_own(scope: ast.AST) -> Iterator[ast.AST]:
    left = [scope]
    while left:
        node = left.pop()
        if node is not scope:
            yield node
        left += reversed([child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.FunctionDef)])


def _elements(node: ast.AST) -> list[tuple[str, ast.expr]]:
    """The elements of a list, or what a comprehension makes."""
    if isinstance(node, ast.List):
        return [("UsageError", element) for element in node.elts if not isinstance(element, ast.Starred)]
    return [("UsageError", node.elt)] if isinstance(node, ast.ListComp) else []


def _is_kept(target: ast.expr) -> bool:
    """Whether what is assigned becomes the text of an error."""
    return getattr(target, "attr", "") in _KEPT or getattr(target, "id", "") in _OF_CLASS


def _is_line(node: ast.Constant | ast.JoinedStr) -> bool:
    """Whether it is a whole line of a command, and not the first part of one."""
    parts = [getattr(part, "value", "") for part in (node.values if isinstance(node, ast.JoinedStr) else [node])]
    whole = "".join(part if isinstance(part, str) else ANY for part in parts)
    return whole.startswith(_PREFIXES) and not whole.endswith(" ") and "\n" not in whole.strip()


def _called(node: ast.AST) -> str:
    if not isinstance(node, ast.Call):
        return ""
    return node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")


def _tidy(text: str) -> str:
    """One line, in which several unknown parts in a row are one."""
    return re.sub(r"^infini-(run|job):(\Z| )", "", re.sub(rf"{ANY}+", ANY, " ".join(text.split())))
