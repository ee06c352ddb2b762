"""Every message of the program has an entry with a remedy, and every entry is about a message of the program."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter

import pytest

from tests.support.messages import ANY, Message, all_texts, error_classes, messages
from tests.support.messages import _Module as Module
from tests.support.paths import ROOT

pytestmark = pytest.mark.xdist_group("messages")  # they are read from the source once, in one worker
PAGE = ROOT / "docs/troubleshooting.md"
_BLOCK = re.compile(r"^```text\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_NAMES = {"the default"}  # in the name of a flag that was not given
_BROAD = 30  # functions whose messages one line of the page may cover


def entries() -> dict[str, str]:
    """The text of each entry, by its heading."""
    titles_and_texts = re.split(r"^### (.*)\n", PAGE.read_text(), flags=re.MULTILINE)[1:]
    texts = [re.split(r"^## ", text, flags=re.MULTILINE)[0] for text in titles_and_texts[1::2]]
    return dict(zip(titles_and_texts[::2], texts, strict=True))


def shown_in(text: str) -> list[str]:
    """The messages that a part of the page shows."""
    return [" ".join(line.split()) for block in _BLOCK.findall(text) for line in block.splitlines()]


def lines() -> list[str]:
    """The messages that the page shows."""
    return [line for text in entries().values() for line in shown_in(text)]


@functools.cache
def pattern(line: str) -> re.Pattern[str]:
    """What a line of the page stands for."""
    words = ".*".join(re.escape(part) for part in line.split(ANY))
    words = re.sub(r"^\.\*\\ ", r"(?:.* )?", re.sub(r"\\ \.\*$", r"(?: .*)?", words))  # either end may be empty
    return re.compile(words)


@functools.cache
def lines_of(text: str) -> frozenset[str]:
    """The lines of the page that stand for a text."""
    likely = {line for word in {"", *re.findall(r"\w+", text)} for line in lines_by_word().get(word, ())}
    return frozenset(line for line in likely if pattern(line).fullmatch(text))


@functools.cache
def lines_by_word() -> dict[str, list[str]]:
    """The lines by their longest word, which is in each of their texts; "": those without a whole word."""
    found: dict[str, list[str]] = {}
    for line in lines():
        words = re.findall(rf"(?<![\w{ANY}])\w+(?![\w{ANY}])", line)
        found.setdefault(max(words, key=len, default=""), []).append(line)
    return found


def test_every_message_has_an_entry():
    without = {m for m in messages() if not lines_of(m.text)}
    listed = "\n".join(f"{message.place}: {message.text}" for message in sorted(without, key=lambda m: m.place))
    assert not without, f"docs/troubleshooting.md has no entry for:\n{listed}"


def clauses(text: str) -> list[str]:
    """The fixed words of a message, from one name, colon, semicolon, or parenthesis to the next."""
    whole = re.sub(rf"\b\w+{ANY}|{ANY}\w+\b", ANY, text)  # no parts of words
    parts = [part.strip(" ,.;:'[]=-?") for part in re.split(rf"{ANY}|[:;] |[()]", whole)]
    return [part for part in parts if re.search(r"\w\w+\W+\w\w+", part) and part not in _NAMES]


def test_fixed_words_of_every_message_are_in_its_entry():
    """Who pastes a part of a message into the search finds it: `…` stands for no fixed words."""
    shown = [shown_in(text) for text in entries().values()]
    listed = []
    for message in sorted(messages(), key=lambda m: (m.place, m.text)):
        blocks = ["\n".join(block) for block in shown if not lines_of(message.text).isdisjoint(block)]
        missing = min(
            ([part for part in clauses(message.text) if part not in block] for block in blocks), key=len, default=[]
        )
        listed += [f"{message.place}: {message.text}\n    {missing}"] if missing else []
    assert not listed, "docs/troubleshooting.md has only … for:\n" + "\n".join(listed)


def test_every_line_of_the_page_is_a_message():
    texts = all_texts() | {message.text for message in messages()}
    shown = {line for text in texts for line in lines_of(text)}
    assert [line for line in lines() if line not in shown] == []


def test_no_line_of_the_page_covers_everything():
    known = messages()
    for line in lines():
        places = {message.place for message in known if line in lines_of(message.text)}
        assert len(places) <= _BROAD, f"{line} covers {len(places)} functions: {sorted(places)}"
        assert len(re.findall(r"\w", line)) >= 3, line


@pytest.mark.parametrize("title", entries())
def test_every_entry_has_messages_and_a_remedy(title):
    text = entries()[title]
    assert _BLOCK.search(text)
    assert "**Do:**" in text


def test_errors_of_workers_and_channels_are_in_chapter_of_python():
    chapter = PAGE.read_text().partition("\n## Python\n")[2].partition("\n## ")[0]
    shown = shown_in(chapter)
    made = {m for m in messages() if m.kind in ("died", "CrewFailed") or m.place.startswith("channel/")}
    elsewhere = {m for m in made if lines_of(m.text).isdisjoint(shown)}
    assert {m.text for m in elsewhere if "…; stopped (pid" not in m.text} == set()  # hang_timeout's are in hangs


def test_no_message_is_in_two_entries():
    assert [line for line, count in Counter(lines()).items() if count > 1] == []


SOURCE = """
NAMES = "a or b"

class OurError(InfiniRunError):
    def __init__(self, size):
        super().__init__(f"it has {size} bytes, too many")

def _why(name):
    return f"{name} is not there"

def check(name, is_new):
    if is_new:
        raise UsageError(f"{name}: {NAMES} is allowed")
    text = f"{name} is {'old' if name else 'very old'}"
    problem = UsageError(text + "; make it anew")
    raise UsageError(_why(name)) from problem

class Receiver:
    _too_late = "no piece arrived in time"

    def next(self, name):
        self._over = OurError, f"the side {name} died"
        head = f"rank {name} died"
        text = f"{name} was lost"
        text += ": it slept"
        write(2, f"infini-run: {text}\\n")
        return died("\\n".join([head, *name]), name)
"""


def test_messages_are_found_in_the_source(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.support.messages.PACKAGE", tmp_path)
    (tmp_path / "module.py").write_text(SOURCE)
    tree = ast.parse(SOURCE)
    classes = error_classes([tree]) | {"UsageError"}
    found = Module(tmp_path / "module.py", tree, classes).messages()
    assert found == {
        Message("it has … bytes, too many", "OurError", "module.py:"),
        Message("…: a or b is allowed", "UsageError", "module.py:check"),
        Message("… is old; make it anew", "UsageError", "module.py:check"),
        Message("… is very old; make it anew", "UsageError", "module.py:check"),
        Message("… is not there", "UsageError", "module.py:check"),
        Message("no piece arrived in time", "LinkError", "module.py:"),
        Message("the side … died", "LinkError", "module.py:next"),
        Message("rank … died…", "died", "module.py:next"),
        Message("… was lost", "line", "module.py:next"),
        Message("… was lost: it slept", "line", "module.py:next"),
    }
