"""Every link of the built site leads to a page and an anchor of it, and nothing is loaded from another server.

python scripts/check_site.py site
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

LOADED = {("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("video", "src")}
RELATIONS = {"stylesheet", "preconnect", "preload", "prefetch", "dns-prefetch", "icon", "modulepreload"}


class Page(HTMLParser):
    """The anchors of a page, where its links go, and what it loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            text = value or ""
            if name in ("id", "name"):
                self.anchors.add(text)
            elif (tag, name) == ("a", "href"):
                self.links.append(text)
            elif (tag, name) in LOADED or ((tag, name) == ("link", "href") and _loads(dict(attrs))):
                self.loads.append(text)


def _loads(attrs: dict[str, str | None]) -> bool:
    return bool(RELATIONS & set((attrs.get("rel") or "").split()))


def problems(site: Path) -> list[str]:
    """One sentence for each link that leads nowhere, and for each resource of another server."""
    pages = {path.resolve(): Page(path) for path in sorted(site.rglob("*.html"))}
    found = [] if pages else [f"{site} has no page"]
    for path, page in pages.items():
        where = path.relative_to(site.resolve())
        found += [f"{where}: loads {load}" for load in page.loads if _is_external(load)]
        if where.name != "404.html":  # its links are those of the server's root
            found += [f"{where}: {fault}" for link in page.links if (fault := _fault(link, path, pages))]
    for sheet in site.rglob("*.css"):
        text = sheet.read_text()
        found += [f"{sheet}: loads {mark}" for mark in ("url(http", "url(//", "@import") if mark in text]
    return found


def _is_external(link: str) -> bool:
    return link.startswith(("http:", "https:", "//"))


def _fault(link: str, path: Path, pages: dict[Path, Page]) -> str:
    if _is_external(link) or link.startswith(("mailto:", "data:", "javascript:")):
        return ""
    target, anchor = urldefrag(unquote(link))
    there = (path.parent / target).resolve() if target else path
    there = there / "index.html" if there.is_dir() else there
    if there not in pages:
        return "" if there.is_file() else f"there is no {link}"
    return "" if not anchor or anchor in pages[there].anchors else f"there is no anchor {link}"


if __name__ == "__main__":
    faults = problems(Path(sys.argv[1]))
    print(*faults, sep="\n", file=sys.stderr)
    sys.exit(1 if faults else 0)
