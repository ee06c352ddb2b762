"""The blocks of code of the documents, and what the comments before a block say about it.

<!-- file: train.py -->          the block is the content of that file
<!-- given: train.py=slow.py --> a program of tests/documents/programs, under the name that the block uses
<!-- on: ssh -->                 where it runs: ssh (host1 to host4), slurm, gpus (four), or service (at job.sock)
<!-- dry run: REASON -->         infini-run shows its plan and starts nothing
<!-- not run: REASON -->         nothing of it runs
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.paths import ROOT

PROGRAMS = ROOT / "tests/documents/programs"
SHELL = ("sh", "console")
SHOWN = ("text", "json", "yaml", "dockerfile", "ini", "toml", "c")  # neither shell nor Python
PLACES = ("ssh", "slurm", "gpus", "service")
_FENCE = re.compile(r"^( *)(```+)(\S*)[^\n]*\n(.*?)^\1\2$", re.MULTILINE | re.DOTALL)
_COMMENTS = re.compile(r"(?:^ *<!--[^\n]*-->\n)+\Z", re.MULTILINE)
_COMMENT = re.compile(r"^ *<!-- ([a-z ]+): (.*) -->$", re.MULTILINE)
_CONTAINER = re.compile(r"( *)(?:===[!+]?|!!!|\?\?\?\+?) ")  # a tab or an admonition: its content is set in by 4


@dataclass(frozen=True)
class Block:
    """A block of code. said: what the comments before it say, by their first words."""

    page: str
    line: int
    language: str
    text: str
    said: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def is_code(self) -> bool:
        return self.language in (*SHELL, "python")

    @property
    def runs(self) -> bool:
        return self.is_code and "not run" not in self.said

    def problems(self) -> list[str]:
        """What is wrong with its language or its comments."""
        found = []
        if self.language not in (*SHELL, "python", *SHOWN):
            found.append(f"its language is {self.language!r}: sh, console, python, {', '.join(SHOWN)}")
        unknown = set(self.said) - {"file", "given", "on", "dry run", "not run"}
        found += [f"no comment begins with {word!r}" for word in sorted(unknown)]
        for word in ("dry run", "not run"):
            if word in self.said and len(self.said[word].split()) < 3:
                found.append(f"{word}: a reason has three words or more")
            named = re.findall(r"tests/[\w/]+(?:\.py)?", self.said.get(word, ""))
            found += [f"{word}: there is no {path}" for path in named if not (ROOT / path).exists()]
        if self.said.get("on", PLACES[0]) not in PLACES:
            found.append(f"on: {', '.join(PLACES)}")
        given = [PROGRAMS / pair.partition("=")[2] for pair in self.said.get("given", "").split()]
        return found + [f"there is no {path}" for path in given if not path.is_file()]


def pages() -> list[Path]:
    """The documents that users read."""
    first = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "bench/README.md")]
    return [path for path in first if path.is_file()] + sorted(ROOT.glob("docs/**/*.md"))  # the sdist lacks bench/


def blocks(path: Path) -> list[Block]:
    """Return the blocks of a document in order, also those in tabs, admonitions, and lists."""
    text, page = path.read_text(), str(path.relative_to(ROOT))
    found = []
    for match in _FENCE.finditer(text):
        before = _COMMENTS.search(text, 0, match.start())
        said = dict(_COMMENT.findall(before[0])) if before else {}
        line = text.count("\n", 0, match.start()) + 1
        content = re.sub(f"^{match[1]}", "", match[4], flags=re.MULTILINE)
        found.append(Block(page, line, match[3], content, said))
    return found


def indented(path: Path) -> list[int]:
    """Return the lines where a block is made by spaces alone: it cannot have a language or a comment."""
    found, depth, in_list, in_fence, is_after_blank = [], 0, False, False, True
    for number, line in enumerate(path.read_text().splitlines(), 1):
        indent = len(line) - len(line.lstrip())
        if line.lstrip().startswith("```"):
            in_fence = not in_fence
        elif not in_fence and line.strip():
            depth = min(depth, indent - indent % 4)
            if re.match(r" *([-*]|\d+\.) ", line):
                in_list = True
            elif indent <= depth:
                in_list = False
            if indent >= depth + 4 and is_after_blank and not in_list:
                found.append(number)
            if container := _CONTAINER.match(line):
                depth = len(container[1]) + 4
        is_after_blank = not line.strip()
    return found
