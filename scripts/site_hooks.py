"""What MkDocs is told beside mkdocs.yml: links that leave docs/ go to the repository, and every decision is in the
navigation, and names that stay on one line are marked for the style sheet."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from posixpath import dirname, normpath

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(?<=\]\()(\.\./[^)#\s]*)(#[^)\s]*)?(?=\))")
FILE = re.compile(r"^( *)<!-- file: (\S+) -->\n((?:\1<!--.*-->\n)*\1```\w+)$", re.MULTILINE)
TITLED = r'\3 title="\2"'
COMMENT = re.compile(r"^[ \t]*<!--.*?-->[ \t]*\n", re.DOTALL | re.MULTILINE)
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
    """Mark code without a space that fits into a line of a phone: it is not broken at its dashes. Messages are."""
    html = SHORT_CODE.sub('<code class="whole">', html)
    return f'<div class="messages">{html}</div>' if page.file.src_uri == MESSAGES else html
