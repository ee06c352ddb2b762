"""What mkdocs.yml cannot express: links that leave docs/ go to the repository, every decision is in the navigation,
and blocks, code, and tables are prepared for the style sheet and the copy button."""

from __future__ import annotations

import logging
import re
from html import escape, unescape
from pathlib import Path
from posixpath import dirname, normpath

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(?<=\]\()(\.\./[^)#\s]*)(#[^)\s]*)?(?=\))")
FILE = re.compile(r"^( *)<!-- file: (\S+) -->\n((?:\1<!--.*-->\n)*\1```\w+)$", re.MULTILINE)
TITLED = r'\3 title="\2"'
COMMENT = re.compile(r"^[ \t]*<!--.*?-->[ \t]*\n", re.DOTALL | re.MULTILINE)
BLOCK = re.compile(r'<div class="(language-(\w+) highlight)">(.*?<code>)(.*?)</code>', re.DOTALL)
LINE = re.compile(r'<span id="(line-\d+-\d+)">(.*?)(?=<span id="line-|\Z)', re.DOTALL)
INLINE = re.compile(r"(?<!<pre>)(?<!</span>)(<code>)(.*?)</code>", re.DOTALL)
TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
TAG = re.compile(r"<[^>]+>")
DIAGRAM = re.compile(r"[│▼▶┌└]")  # characters that only a drawing has
FLAG = re.compile(r"(?<![\w&-])(--?[a-z][\w-]*)")
SHORT_CODE = re.compile(r"<code>(?=[^<\s]{1,30}</code>)")
MESSAGES = "troubleshooting.md"
DECISIONS = "decisions/"
HOMEPAGE = re.compile(r'^Homepage = "(.+)"$', re.MULTILINE)

log = logging.getLogger("mkdocs.hooks.site")  # a warning fails a strict build


def on_config(config):
    """Put the pages of all decisions below their index."""
    decisions = sorted(path.name for path in (ROOT / "docs/decisions").glob("[0-9]*.md"))
    architecture = next(item["Architecture"] for item in config.nav if "Architecture" in item)
    architecture[-1] = {"Decisions": ["decisions/README.md", *(f"decisions/{name}" for name in decisions)]}
    return config


def on_page_markdown(markdown, page, **_):
    """Drop comments, which are for the tests of the blocks, but for names of files, which become titles. Turn links
    that leave docs/ into the repository's."""
    if page.file.src_uri == "index.md":  # nothing is beside it in the navigation
        page.meta["hide"] = ["navigation"]
    if page.file.src_uri.startswith(DECISIONS):  # the last in a search
        page.meta["search"] = {"boost": 0.3}
    home = HOMEPAGE.search((ROOT / "pyproject.toml").read_text())[1]

    def outside(match):
        path = normpath(f"docs/{dirname(page.file.src_uri)}/{match[1]}")
        if path.startswith("docs/") or path == "docs":
            return match[0]
        if not (ROOT / path).exists():
            log.warning("%s: there is no %s", page.file.src_uri, path)
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"{home}/{kind}/main/{path}{match[2] or ''}"

    return LINK.sub(outside, COMMENT.sub("", FILE.sub(TITLED, markdown)))


def on_page_content(html, page, **_):
    """Prepare blocks, code, and tables for the style sheet and the copy button."""
    html = BLOCK.sub(_block, html)
    html = SHORT_CODE.sub('<code class="whole">', html)
    html = INLINE.sub(lambda match: f"{match[1]}{_keep_flags(match[2])}</code>", html)
    html = TABLE.sub(_label_cells, html)
    return f'<div class="messages">{html}</div>' if page.file.src_uri == MESSAGES else html


def _block(match):
    """Mark where a line of a block continues, and give the copy button its text. A drawing keeps its lines."""
    lines = [(name, body, plain(body)) for name, body in LINE.findall(match[4])]
    text = "".join(text for _, _, text in lines)
    copied = commands(text) if match[2] == "console" else text
    marked = "".join(
        f'<span id="{name}" style="--indent: {len(text) - len(text.lstrip(" "))}ch">{_keep_flags(body)}'
        for name, body, text in lines
    )
    kind = " diagram" if DIAGRAM.search(text) else ""
    return f'<div class="{match[1]}{kind}" data-copy="{escape(copied.rstrip())}">{match[3]}{marked}</code>'


def plain(html):
    """Return the text of HTML."""
    return unescape(TAG.sub("", html))


def commands(dialogue):
    """Return what a reader of a dialogue types, without prompts and outputs."""
    typed, continues = [], False
    for line in dialogue.splitlines():
        if continues or line.startswith("$ "):
            typed.append(line if continues else line[2:])
            continues = line.endswith("\\")
    return "\n".join(typed)


def _keep_flags(html):
    """Mark flags: a line isn't broken after their dashes."""
    parts = re.split(TAG, html)
    tags = [*TAG.findall(html), ""]
    return "".join(
        FLAG.sub(r'<span class="flag">\1</span>', part) + tag for part, tag in zip(parts, tags, strict=True)
    )


def _label_cells(match):
    """Give each cell the title of its column, for screens that show a row as a card."""
    titles = [plain(title) for title in re.findall(r"<th[^>]*>(.*?)</th>", match[0], re.DOTALL)]

    def row(cells):
        names = iter(titles)
        return re.sub(r"<td", lambda _: f'<td data-label="{escape(next(names, ""))}"', cells[0])

    return re.sub(r"<tr>.*?</tr>", row, match[0], flags=re.DOTALL)
