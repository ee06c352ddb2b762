"""The site, in a browser without a window: no page is wider than the window, and nothing comes from another server.

`make docs` makes the environment that builds it.
"""

from __future__ import annotations

import functools
import http.server
import os
import shutil
import subprocess
import threading

import pytest

from tests.support.cluster import give_up, need
from tests.support.paths import ROOT

pytestmark = pytest.mark.xdist_group(__name__)

FITS = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"


class Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        """Say nothing."""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The address of the site, and its pages."""
    builders = sorted(ROOT.glob(".venv/docs-*/bin/mkdocs"))
    if not builders:
        give_up("MkDocs is not installed: make docs")
    folder = tmp_path_factory.mktemp("site")
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    build = [builders[-1], "build", "--strict", "--quiet", "--site-dir", folder]
    done = subprocess.run(build, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=folder))
    server.daemon_threads = False  # joined at the end
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    pages = sorted(str(path.parent.relative_to(folder)) for path in folder.rglob("index.html"))
    alike = [name for name in pages if name.startswith("decisions/")]
    yield f"http://127.0.0.1:{server.server_port}/", [name for name in pages if name not in alike[3:]]
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="module")
def browser():
    need("chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError as error:
        give_up(str(error))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.mark.slow
def test_every_page_fits_and_loads_nothing_from_elsewhere(site, browser):
    address, pages = site
    from playwright.sync_api import TimeoutError as PlaywrightTimeout

    wrong = []
    for width in (390, 1280):  # a window of each, since Chromium 150 may hang while a window's size is changed
        context = browser.new_context(viewport={"width": width, "height": 844})
        page = context.new_page()
        page.on("request", lambda request: None if _is_ours(request.url, address) else wrong.append(request.url))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
        for name in pages:
            page.goto(f"{address}{name}/")
            try:  # the scripts of the page move its sidebars
                page.wait_for_function(FITS, timeout=10_000)
            except PlaywrightTimeout:
                wrong.append(f"{name} is wider than {width}")
        context.close()
    assert wrong == []
    assert len(pages) > 40


def test_a_word_is_found(site, browser):
    context = browser.new_context(viewport={"width": 1280, "height": 844})
    page = context.new_page()
    page.goto(site[0])
    page.locator(".md-search__input").first.click()
    page.keyboard.type("hang_timeout")
    page.locator(".md-search-result__link").first.wait_for()
    context.close()


def test_copy_button_copies_commands_alone(site, browser):
    context = browser.new_context(viewport={"width": 1280, "height": 844})
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = context.new_page()
    page.goto(site[0])
    page.locator("[data-copy*='--nproc_per_node=2'] .md-code__button").click()
    assert (
        page.evaluate("navigator.clipboard.readText()") == "infini-run --nproc_per_node=2 --console=prefix train.py"
    )
    context.close()


def _is_ours(url: str, address: str) -> bool:
    return url.startswith((address, "data:", "blob:"))
