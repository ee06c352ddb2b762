"""Pages, messages, help, docstrings, and comments have plain words and short sentences."""

from __future__ import annotations

import re

import pytest

from tests.support.blocks import pages
from tests.support.paths import ROOT
from tests.support.prose import long_sentences, paragraphs, phrases, sentences, texts_of_module

STRICT = ("Home", "Get started", "Guides")  # groups of the navigation where no sentence is too long
SHARE = 0.05  # of the sentences of a page elsewhere
PAGES = [str(path.relative_to(ROOT)) for path in [*pages(), ROOT / "CHANGELOG.md"]]
PARTS = sorted(
    f"infini_run/{path.name}"
    for path in (ROOT / "infini_run").iterdir()
    if path.suffix == ".py" or (path / "__init__.py").exists()
)


def strict_pages() -> set[str]:
    """Return the pages that new users read."""
    found, group = {"README.md"}, ""
    for line in (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2].splitlines():
        if top := re.match(r"  - ([^:]+):", line):
            group = top[1]
        if (page := re.search(r"(\S+\.md)$", line)) and group in STRICT:
            found.add(f"docs/{page[1]}")
    return found


def faults(name: str) -> list[str]:
    """Return what is wrong with the words of a page or of a part of the package."""
    path = ROOT / name
    if not name.startswith("infini_run/"):
        return faults_of_page(path.read_text(), 0 if name in strict_pages() else SHARE)
    modules = path.rglob("*.py") if path.is_dir() else [path]
    return [phrase for module in modules for text in texts_of_module(module.read_text()) for phrase in phrases(text)]


def faults_of_page(text: str, share: float) -> list[str]:
    found = [phrase for paragraph in paragraphs(text) for phrase in phrases(paragraph)]
    long = long_sentences(text)
    return found + (long if len(long) > share * len(sentences(text)) else [])


@pytest.mark.parametrize("name", PAGES + PARTS)
def test_words_are_plain_and_sentences_short(name):
    assert faults(name) == []


def test_strict_pages_are_those_of_new_users():
    assert {"README.md", "docs/index.md", "docs/tour.md", "docs/restarts.md"} < strict_pages()
    assert not {"docs/design.md", "docs/troubleshooting.md", "docs/torchrun.md"} & strict_pages()


TWENTY_SIX = "It has " + "one " * 23 + "more."


@pytest.mark.parametrize(
    ("text", "share", "found"),
    [
        ("A rank is told to stop.\n", 0, ["is told"]),
        ("A node that is\nlost starts\nagain.\n", 0, ["starts again"]),
        ("| flag | we restart it |\n|---|---|\n| `--us` | honoured |\n", 0, ["we", "honoured"]),
        ("Read `is told`:\n\n```text\nwe go on\n```\n\n- It goes on 3 nodes.\n", 0, []),
        (f"{TWENTY_SIX}\n", 0, [TWENTY_SIX]),
        (f"{TWENTY_SIX[4:]}\nShort. infini-run is, too.\n", 0, []),
        (f"# Title\n\n- {TWENTY_SIX}\n" + "- One.\n" * 19, SHARE, []),
        (f"=== \"Tab\"\n\n    {TWENTY_SIX}\n\n    ```sh\n    ls\n    ```\n", 0, [TWENTY_SIX]),
    ],
)  # fmt: skip
def test_fault_of_page_is_found(text, share, found):
    assert faults_of_page(text, share) == found


def test_docstrings_messages_and_comments_are_read():
    source = 'def stop():\n    """We stop `it of ours`."""\n    # it starts\n    # again\n'
    source += '    raise Error(f"{name} goes on", "us")\n'
    assert [phrases(text) for text in texts_of_module(source)] == [["We"], ["goes on"], ["starts again"]]
