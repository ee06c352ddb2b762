"""The man page: every flag is in it, no tool has anything to say against it, and nothing of the text became roff."""

from __future__ import annotations

import os
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infini_run.options.grammar import GRAMMAR
from infini_run.options.help import EXAMPLES, explain, usage
from infini_run.options.manpage import escape, man_page
from infini_run.options.table import FLAGS
from tests.support.cluster import needs
from tests.support.paths import ROOT

PAGE = ROOT / "share/man/man1/infini-run.1"
needs_groff = needs("groff")
needs_man = needs("man")
needs_mandoc = needs("mandoc")


def shown(text=None):
    """As groff shows it, on one very long line a paragraph."""
    text = (
        f".ll 2000n\n{text}" if text is not None else PAGE.read_text().replace(".SH NAME", ".ll 2000n\n.SH NAME", 1)
    )
    done = subprocess.run(
        ["groff", "-man", "-Tascii", "-ww", "-P-c", "-P-b", "-P-u", "-rLL=2000n"],
        input=text, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stderr == ""
    return done.stdout


@needs_groff
def test_every_flag_is_there_with_its_text():
    lines = [" ".join(line.split()) for line in shown().splitlines()]
    for flag in (*FLAGS, *GRAMMAR):
        at = lines.index(usage(flag))
        text = explain(flag)
        assert lines[at + 1] == " ".join(f"{text[0].upper()}{text[1:]}.".split())
    for example in EXAMPLES.splitlines()[1:]:
        assert " ".join(example.split()) in lines


@needs_man
def test_man_shows_it_without_a_complaint():
    env = {**os.environ, "MANWIDTH": "80", "LC_ALL": "C.UTF-8", "MAN_KEEP_FORMATTING": "", "MANPAGER": "cat"}
    done = subprocess.run(["man", "--warnings", "-l", PAGE], capture_output=True, text=True, env=env)
    if "minimized" in done.stdout or "unminimize" in done.stdout:
        pytest.skip("man is a stand-in here, as in minimal containers")
    assert (done.returncode, done.stderr) == (0, "")
    for section in (
        "NAME",
        "SYNOPSIS",
        "DESCRIPTION",
        "OPTIONS",
        "ENVIRONMENT",
        "SIGNALS",
        "EXIT STATUS",
        "EXAMPLES",
    ):
        assert f"\n{section}\n" in done.stdout


@needs_mandoc
def test_mandoc_has_nothing_to_say():
    done = subprocess.run(["mandoc", "-Tlint", PAGE], capture_output=True, text=True)
    complaints = [line for line in done.stdout.splitlines() if 'missing date, using ""' not in line]  # it has none
    assert complaints == []


@needs_groff
def test_any_text_is_shown_as_it_is():
    @given(st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), min_size=1, max_size=30).map(str.strip))
    def check(text):
        assert escape(text).isascii()
        examples.append(text)

    examples = ["'quoted", ".SH no", "\\fBno", "a`b^c~d-e\\", ".", "'"]
    check()
    words = [text for text in dict.fromkeys(" ".join(e.split()) for e in examples) if text]
    lines = shown(".nf\n" + "".join(f"|{escape(word)}|\n" for word in words)).splitlines()
    assert [line.strip().replace("   ", " ") for line in lines if "|" in line] == [f"|{word}|" for word in words]
    first = shown(".nf\n" + "".join(f"{escape(word)}\n" for word in (".SH no", "'quoted", ".")))
    assert first.split() == [".SH", "no", "'quoted", "."]


def test_it_is_the_same_wherever_it_is_made():
    assert man_page("1.2") == man_page("1.2")
    assert 'infini\\-run 1.2"' in man_page("1.2")
