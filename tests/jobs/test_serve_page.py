"""The page of infini-job serve, in a browser without a window, through a port as `ssh -L` gives one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.support.cluster import give_up, need
from tests.support.command import CHILDREN, play
from tests.support.job_case import Jobs
from tests.support.waiting import LIMIT_S

pytestmark = pytest.mark.xdist_group(__name__)  # one bed for all of them

HOST = os.uname().nodename


@pytest.fixture(scope="module")
def browser():
    need("chromium")
    try:
        from playwright.sync_api import expect, sync_playwright
    except ImportError as error:
        give_up(str(error))
    expect.set_options(timeout=LIMIT_S * 1000)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def local(shared_local):
    """Jobs that the service of this module serves."""
    return shared_local


@pytest.fixture
def service(shared_service):
    """One for all tests of this module."""
    return shared_service


@pytest.fixture(scope="module")
def address(lasting):
    """Where the page is."""
    bridge = subprocess.Popen(
        [sys.executable, str(CHILDREN / "bridge.py"), lasting[0].path],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    yield f"http://localhost:{int(bridge.stdout.readline())}/"
    bridge.stdin.close()
    bridge.wait(LIMIT_S)
    bridge.stdout.close()


@pytest.fixture
def page(request, browser, service, address):
    """The page, open, in a window of the size that is the parameter. What its console says wrong fails the test."""
    context = browser.new_context(viewport=getattr(request, "param", None))
    page = context.new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
    page.set_default_timeout(LIMIT_S * 1000)
    page.goto(address)
    yield page
    context.close()
    assert wrong == []


def expect(what):
    from playwright.sync_api import expect

    return expect(what)


def row(page, name):
    return page.locator("#jobs tr").filter(has_text=name)


def end(local: Jobs, *names):
    for name in names:
        local.call("cancel", name)
        local.wait(name)


def hold(bell):
    return ("sh", "-c", f"echo up; echo up > {bell.path}; exec sleep 1000")


def test_the_list_is_live(page, local, bell):
    expect(page.locator("#none")).to_be_visible()
    name = local.submit("--slots=2", "--", *hold(bell))
    bell.hear(2)
    expect(row(page, name)).to_contain_text("RUNNING")
    expect(row(page, name)).to_contain_text("1 node x 2 cpus")
    expect(page.locator("#none")).to_be_hidden()
    end(local, name)
    expect(row(page, name)).to_contain_text("CANCELLED")
    second = local.submit("--", "true")
    expect(page.locator("#jobs tr").first).to_contain_text(second)
    expect(row(page, second)).to_contain_text("COMPLETED")
    shutil.rmtree(local.path / name)
    expect(row(page, name)).to_have_count(0)


def test_durations_have_two_units(page):
    shown = page.evaluate("[0, 0.9, 59, 60, 89, 3600, 5340, 86399, 90061].map(duration)")
    assert shown == ["0 s", "0 s", "59 s", "1 min", "1 min 29 s", "1 h", "1 h 29 min", "23 h 59 min", "1 d 1 h"]


NO_EVENTS = """window.EventSource = class extends EventTarget {
  constructor() { super(); setTimeout(() => this.dispatchEvent(new Event("error"))); }
};"""


def test_page_says_when_it_is_not_connected(page):
    expect(page.locator("#news")).to_have_text("Live")
    page.add_init_script(NO_EVENTS)
    page.reload()
    expect(page.locator("#news")).to_have_text("Not connected; retrying. Check that infini-job serve runs")


def test_lines_appear_as_they_are_written(page, local, bell, tmp_path):
    os.mkfifo(tmp_path / "go")
    script = f"echo first; echo > {bell.path}; read word < {tmp_path}/go; echo $word"
    name = local.submit("--", "sh", "-c", script)
    bell.hear(1)
    row(page, name).get_by_role("link").click()
    expect(page.locator("#log")).to_contain_text("[rank 0] first")
    expect(page.locator("#log-news")).to_have_text("Following")
    assert "second" not in page.locator("#log").inner_text()
    (tmp_path / "go").write_text("second\n")
    expect(page.locator("#log")).to_contain_text("[rank 0] second")
    expect(page.locator("#log-news")).to_have_text("The job finished")
    expect(page.locator("#headline")).to_have_text("COMPLETED")


def test_the_timeline_shows_the_ranks_of_a_running_job(page, address, local, bell):
    name = local.submit("--slots=3", "--", *hold(bell))
    bell.hear(3)
    page.goto(f"{address}#{name}")  # a link to a job works as well
    ranks = page.locator("#runs tbody tr").filter(has_text="running")
    expect(ranks).to_have_count(3)
    expect(page.locator("#runs th[scope=rowgroup]")).to_have_text(HOST)
    expect(page.locator("#runs caption")).to_have_text("Run 0: RUNNING")
    widths = [bar.bounding_box()["width"] for bar in page.locator("#runs .bar.running").all()]
    assert len(widths) == 3
    assert min(widths) > 20  # from when they began to now is the whole width
    end(local, name)
    expect(page.locator("#runs .bar.stopped")).to_have_count(3)


def test_a_failed_job_shows_its_first_failure(page, local):
    name = local.submit("--slots=3", "--", *play("@1", "exit=7", "@*", "wait"))
    local.wait(name)
    row(page, name).get_by_role("link").click()
    expect(page.locator("#headline")).to_have_text(f"FAILED exit 7 on {HOST}, rank 1")
    expect(page.locator("#reason")).to_contain_text(f"rank 1 on {HOST} failed: exit code 7")
    first = page.locator("#runs tr.first")
    expect(first).to_have_count(1)
    expect(first).to_contain_text("exit 7, first failure")
    expect(page.locator("#runs tbody tr").filter(has_text="stopped")).to_have_count(2)
    expect(page.locator("#log .ours")).to_contain_text(f"infini-run: rank 1 on {HOST} failed: exit code 7")
    expect(page.locator("#cancel")).to_be_hidden()


def test_a_task_of_an_array_is_shown(page, local):
    name = local.submit("--array=0-2", "--wait", "--", "sh", "-c", "echo is $INFINI_JOB_TASK")
    page.get_by_role("link", name=name, exact=True).click()
    expect(page.locator("#ranks-title")).to_have_text("Tasks")
    expect(page.locator("#log")).to_contain_text("[task 2] [rank 0] is 2")
    page.get_by_role("link", name=f"{name}.1").click()
    expect(page.locator("#headline")).to_have_text("COMPLETED")
    expect(page.locator("#log")).to_have_text("[rank 0] is 1")
    expect(page.locator("#runs")).to_contain_text("exit 0")


def test_cancel_asks_first(page, local, bell):
    name = local.submit("--", *hold(bell))
    bell.hear(1)
    row(page, name).get_by_role("link").click()
    page.locator("#cancel").click()
    expect(page.get_by_role("dialog")).to_contain_text(f"Cancel {name}?")
    page.get_by_role("button", name="Keep the job").click()
    expect(page.get_by_role("dialog")).to_be_hidden()
    assert local.status(name)["state"] == "RUNNING"
    page.locator("#cancel").click()
    page.get_by_role("button", name="Cancel the job").click()
    expect(page.locator("#headline")).to_have_text("CANCELLED")
    expect(page.locator("#cancel")).to_be_hidden()
    assert local.status(name)["state"] == "CANCELLED"


def test_what_a_job_says_is_text(page, local):
    """Neither its lines, nor its command, nor why it failed is ever HTML."""
    evil = "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\"><b>bold</b>"
    name = local.submit("--", "sh", "-c", 'echo "$0"; printf "\\033[31mred\\033[0m\\n"; exit 3', evil)
    local.wait(name)
    expect(row(page, name)).to_contain_text("<script>document.title=")
    row(page, name).get_by_role("link").click()
    expect(page.locator("#log")).to_contain_text(f"[rank 0] {evil}")
    expect(page.locator("#log")).to_contain_text(re.compile(r"\[rank 0\] red"))
    expect(page.locator("#facts")).to_contain_text("<b>bold</b>")
    assert page.title() == "Jobs"
    assert page.locator("main script, main img, main b").count() == 0


def test_lines_of_one_rank_are_shown(page, local):
    name = local.submit("--slots=3", "--", "sh", "-c", "echo from $RANK")
    local.wait(name)
    row(page, name).get_by_role("link").click()
    expect(page.locator("#log div")).to_have_count(3)
    page.locator("#rank").fill("1")
    page.locator("#rank").blur()
    expect(page.locator("#log div")).to_have_text(["[rank 1] from 1"])
    page.locator("#rank").fill("")
    page.locator("#rank").blur()
    expect(page.locator("#log div")).to_have_count(3)
    page.locator("#node").select_option(HOST)
    expect(page.locator("#log-news")).to_have_text("The job finished")
    expect(page.locator("#log div")).to_have_count(3)
    options = page.locator("#node option")
    expect(options).to_have_text(["all", HOST])


def test_it_can_be_used_by_keyboard_in_light_and_dark(page, local, bell):
    name = local.submit("--", *hold(bell))
    bell.hear(1)
    expect(row(page, name)).to_contain_text("RUNNING")
    link = row(page, name).get_by_role("link")
    link.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name=name)).to_be_visible()
    expect(row(page, name)).to_have_attribute("aria-current", "true")
    backs = []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        backs.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert page.evaluate(CONTRAST) == []
    assert backs == ["rgb(255, 255, 255)", "rgb(18, 22, 27)"]
    page.locator("#cancel").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Keep the job")).to_be_focused()  # the harmless one
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()
    assert page.evaluate(UNNAMED) == 0
    end(local, name)


@pytest.mark.parametrize("page", [{"width": 390, "height": 844}], indirect=True, ids=["phone"])
def test_nothing_is_cut_off_on_a_phone(page, local):
    long = "--name=" + "long-" * 40
    failed = local.submit("--slots=3", "--", *play("@1", "exit=7", "@*", "wait"), long)
    array = local.submit("--array=0-1", "--", "sh", "-c", "exit $((INFINI_JOB_TASK * 7))", long)
    for name in (failed, array):
        local.wait(name)
    for name, shown in ((failed, "exit 7, first failure"), (array, f"rank 0 on {HOST} failed: exit code 7")):
        row(page, name).get_by_role("link").click()
        expect(page.locator("#runs")).to_contain_text(shown)
        assert page.evaluate(CUT) == []
        assert page.evaluate(CONTRAST) == []
    assert page.get_by_role("row").filter(has_text=failed).count() == 1  # it is a table to a screen reader
    assert page.get_by_role("columnheader", name="Command").count() == 1


# what is wider than the window, or than the box that it would have to be scrolled in
CUT = """() => [document.documentElement, ...document.querySelectorAll(".wide")]
  .filter((e) => e.scrollWidth > e.clientWidth).map((e) => [e.id, e.scrollWidth, e.clientWidth])"""
# what can be used, or jumped to, and has no name that a screen reader could say
UNNAMED = """() => [...document.querySelectorAll("button, select, input, [role=region]")].filter((e) =>
  !(e.labels?.length || e.textContent.trim() || e.ariaLabel || e.getAttribute("aria-labelledby"))).length"""
# every text that is seen has at least 4.5:1 against what is behind it (WCAG 2.2, 1.4.3)
CONTRAST = """() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (e) => { const c = rgb(getComputedStyle(e).backgroundColor);
    return c.length < 4 || c[3] > 0 ? c : e.parentElement ? behind(e.parentElement) : [255, 255, 255]; };
  return [...document.querySelectorAll("body *")].filter((e) => e.checkVisibility() && e.tagName !== "OPTION" &&
    [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim())).map((e) => {
      const [a, b] = [light(rgb(getComputedStyle(e).color)), light(behind(e))];
      return [e.tagName, e.className, e.textContent, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)];
    }).filter(([, , , ratio]) => ratio < 4.5);
}"""


def test_nothing_comes_from_elsewhere(page, address):
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.reload()
    expect(page.locator("#news")).to_have_text("Live")
    assert asked
    assert all(url.startswith(address) for url in asked)


def test_another_page_of_the_browser_can_neither_read_nor_change_anything(browser, page, address, service, local):
    """A page of another origin in the same browser: what it sends is refused, or never sent."""
    other = page.context.new_page()
    other.route("http://other.example/", lambda route: route.fulfill(body="<p>hello</p>", content_type="text/html"))
    other.goto("http://other.example/")
    read = "(u) => fetch(u).then((r) => r.text(), (e) => 'refused')"
    assert other.evaluate(read, f"{address}v1/jobs") == "refused"
    post = (
        "(u) => fetch(u, {method: 'POST', mode: 'no-cors', body: '{\"command\": [\"true\"]}'}).then(() => 0, () => 0)"
    )
    other.evaluate(post, f"{address}v1/jobs")
    marked = "(u) => fetch(u, {method: 'POST', headers: {'X-Infini-Job': '1'}}).then(() => 'sent', () => 'refused')"
    assert other.evaluate(marked, f"{address}v1/jobs") == "refused"
    other.close()
    assert local.is_empty()
