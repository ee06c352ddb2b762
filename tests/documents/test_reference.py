"""The reference has each public name and each variable of ours; the check of the site finds faults."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import infini_run
from infini_run import channel
from tests.support.paths import ROOT

REFERENCE = ROOT / "docs/reference"
_ENTRY = re.compile(r"^::: infini_run\.(\S+)$", re.MULTILINE)
_VARIABLE = re.compile(r"\bINFINI_(?:RUN|JOB)_[A-Z]+\b(?!_)")
_EXAMPLES = {"INFINI_RUN_NAME", "INFINI_RUN_GRACE"}  # NAME stands for any flag


def test_every_public_name_has_an_entry():
    entries = [name for page in REFERENCE.glob("*.md") for name in _ENTRY.findall(page.read_text())]
    assert sorted(entries) == sorted(set(entries))
    ends = {f"channel.{name}" for name in channel.__all__} - {"channel.Sender", "channel.Receiver"}
    keywords = {name for name in entries if ".keywords." in name}
    assert len(keywords) == 5
    assert set(entries) - keywords == {*infini_run.__all__, *ends}


def test_every_variable_of_ours_is_explained():
    sources = [*ROOT.glob("infini_run/**/*.py"), *ROOT.glob("csrc/**/*.[ch]")]
    names = {name for path in sources for name in _VARIABLE.findall(path.read_text())} - _EXAMPLES
    assert "INFINI_RUN_TOKEN" in names
    page = (REFERENCE / "variables.md").read_text()
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []


def test_every_field_of_the_report_is_explained():
    exit_ = infini_run.Exit(rank=0, local_rank=0, host="a")
    record = infini_run.CollectiveRecord(group="0", about="", members=(0,), number=1, is_pending=True, names=("x",))
    thread = infini_run.ThreadSnapshot(tid=1, name="x", state="S", wchan="", syscall="", stack=())
    process = infini_run.ProcessSnapshot(pid=1, name="x", state="S", is_python=False, threads=(thread,))
    look = infini_run.HangSnapshot(rank=0, pid=1, host="a", time_s=0.0, records=(record,), processes=(process,))
    report = infini_run.Report(
        launch_id="x",
        run_id="",
        host="a",
        world_size=1,
        start_s=0.0,
        end_s=0.0,
        exits=(exit_,),
        stuck=(infini_run.LeftoverProcess(pid=1, name="x"),),
        leftover_processes=(infini_run.LeftoverProcess(pid=1, name="x"),),
        snapshots=(look,),
        clocks=(infini_run.Clock(host="a", offset_s=0.0, bound_s=0.0),),
        preload=(infini_run.PreloadUse(host="a", modules=(), wall_s=0.0, cpu_s=0.0, fork_s=0.0, cold_because=""),),
        slow=(infini_run.SlowRank(rank=0, step_s=0.0, others_s=0.0, steps=1, waited_s=0.0, share=0.0),),
    )
    page = (REFERENCE / "report.md").read_text()
    assert [name for name in sorted(set(_keys(report.to_json()))) if f"`{name}`" not in page] == []


def _keys(thing):
    """Yield every key of nested JSON."""
    for item in thing.values() if isinstance(thing, dict) else thing if isinstance(thing, list) else ():
        yield from _keys(item)
    yield from thing if isinstance(thing, dict) else ()


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ('<a href="other.html">x</a>', "there is no other.html"),
        ('<a href="#below">x</a>', "there is no anchor #below"),
        ('<a href="two/#below">x</a>', "there is no anchor two/#below"),
        ('<script src="https://cdn.example/x.js"></script>', "loads https://cdn.example/x.js"),
        ('<link rel="stylesheet" href="//fonts.example/x.css">', "loads //fonts.example/x.css"),
        ('<a href="two/#there" id="here">x</a><a href="https://example.org">y</a><a href="#here">z</a>', ""),
    ],
)
def test_a_fault_of_the_site_is_found(body, fault, tmp_path):
    (tmp_path / "two").mkdir()
    (tmp_path / "index.html").write_text(body)
    (tmp_path / "two/index.html").write_text('<h2 id="there">Two</h2>')
    check = [sys.executable, ROOT / "scripts/check_site.py", tmp_path]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == ((1, f"index.html: {fault}") if fault else (0, ""))


def test_a_site_without_a_page_is_a_fault(tmp_path):
    check = [sys.executable, ROOT / "scripts/check_site.py", tmp_path]
    assert subprocess.run(check, capture_output=True, check=False).returncode == 1
