"""What scripts/site_hooks.py does to pages: titles of blocks, text for the copy button, marks for the style sheet."""

from __future__ import annotations

import importlib.util
import re
from types import SimpleNamespace

import pytest

from tests.support.paths import ROOT

SPEC = importlib.util.spec_from_file_location("site_hooks", ROOT / "scripts/site_hooks.py")
hooks = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(hooks)


def page(path="guide.md"):
    return SimpleNamespace(file=SimpleNamespace(src_uri=path), meta={})


def block(language, *lines):
    spans = "".join(f'<span id="line-0-{at}">{line}\n</span>' for at, line in enumerate(lines, 1))
    html = f'<div class="language-{language} highlight"><pre><span></span><code>{spans}</code></pre></div>'
    return hooks.on_page_content(html, page())


def copied(html):
    return hooks.unescape(re.search(r'data-copy="([^"]*)"', html)[1])


def test_file_of_indented_block_becomes_its_title():
    text = "    <!-- file: fit.py -->\n    <!-- on: ssh -->\n    ```python\n    ```\n"
    assert hooks.on_page_markdown(text, page()) == '    ```python title="fit.py"\n    ```\n'


@pytest.mark.parametrize(
    ("dialogue", "typed"),
    [
        ("$ ls\na\n$ pwd\n/\n", "ls\npwd"),
        ("$ a && \\\n  b\nout\n", "a && \\\n  b"),
        ("$ cat x\n\n> y\n", "cat x"),
    ],
)
def test_only_commands_of_a_dialogue_are_copied(dialogue, typed):
    assert hooks.commands(dialogue) == typed


def test_copied_text_is_that_of_the_block():
    html = block("python", "if x &lt; 1:", '    <span class="k">print</span>("a")')
    assert copied(html) == 'if x < 1:\n    print("a")'
    assert copied(block("console", '<span class="gp">$ </span>ls', '<span class="go">a</span>')) == "ls"


def test_line_continues_below_its_own_indentation():
    assert re.findall(r"--indent: (\d+)ch", block("python", "if x:", '<span class="w">    </span>y()')) == ["0", "4"]


@pytest.mark.parametrize(("line", "is_drawing"), [("a ──▶ b", True), ("│ c", True), ("-- a | b", False)])
def test_drawing_keeps_its_lines(line, is_drawing):
    assert (" diagram" in block("text", line).partition(">")[0]) == is_drawing


def test_flags_are_marked_whole_outside_of_tags():
    html = block("sh", 'infini-run --dry_run a-b <span class="x --no">-x</span>')
    assert re.findall(r'<span class="flag">(.*?)</span>', html) == ["--dry_run", "-x"]
    for words in ("run --spares=1", f"--spares=1,{'2' * 30}"):
        html = hooks.on_page_content(f"<code>{words}</code>", page())
        assert '<span class="flag">--spares</span>=1' in html
    assert hooks.on_page_content("<code>--spares=1</code>", page()) == '<code class="whole">--spares=1</code>'


def test_cells_have_the_title_of_their_column():
    head = "<thead><tr><th>flag</th><th><code>x</code> &amp; y</th></tr></thead>"
    html = hooks.on_page_content(f"<table>{head}<tbody><tr><td>a</td><td>b</td></tr></tbody></table>", page())
    assert '<td data-label="flag">a</td><td data-label="x &amp; y">b</td>' in html


def test_decisions_rank_last_in_search():
    decision = page("decisions/0001-x.md")
    hooks.on_page_markdown("", decision)
    assert decision.meta["search"] == {"boost": 0.3}
