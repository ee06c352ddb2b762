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
_FENCE = re.compile(r"^(```+)(\S*)[^\n]*\n(.*?)^\1$", re.MULTILINE | re.DOTALL)
_COMMENTS = re.compile(r"(?:^<!--[^\n]*-->\n)+\Z", re.MULTILINE)
_COMMENT = re.compile(r"^<!-- ([a-z ]+): (.*) -->$", re.MULTILINE)


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
    """The blocks of a document, in its order."""
    text, page = path.read_text(), str(path.relative_to(ROOT))
    found = []
    for match in _FENCE.finditer(text):
        before = _COMMENTS.search(text, 0, match.start())
        said = dict(_COMMENT.findall(before[0])) if before else {}
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(page, line, match[2], match[3], said))
    return found


def indented(path: Path) -> list[int]:
    """Lines where a block is made by spaces alone: no language and no comment can be given to it."""
    found, in_list, in_fence, is_after_blank = [], False, False, True
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.startswith("```"):
            in_fence = not in_fence
        elif not in_fence and line.strip():
            if re.match(r"( *[-*]|\d+\.) ", line):
                in_list = True
            elif not line.startswith(" "):
                in_list = False
            if line.startswith("    ") and is_after_blank and not in_list:
                found.append(number)
        is_after_blank = not line.strip()
    return found
