"""Every Python snippet of the documents on functions, crews and channels runs, and ends."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.support.paths import ROOT
from tests.support.processes import marked
from tests.support.waiting import LIMIT_S

_SNIPPET = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_SSH = '#!/bin/sh\nfor word; do :; done\nexec sh -c "$word"\n'  # runs here what it is to run elsewhere: its last word


@pytest.mark.parametrize("page", ["functions", "crews", "channels", "coming-from"])
def test_the_snippets_of_a_page_run_in_order_as_one_program(page, tmp_path):
    snippets = _SNIPPET.findall((ROOT / "docs" / f"{page}.md").read_text())
    assert snippets
    script = tmp_path / "page.py"
    script.write_text("\n".join(snippets))
    (tmp_path / "ssh").write_text(_SSH)
    (tmp_path / "ssh").chmod(0o700)
    env = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "INFINI_RUN_RDZV_ENDPOINT": "127.0.0.1:29500",  # the hosts "a" and "b" have no addresses
    }
    done = subprocess.run(
        [sys.executable, "-W", "error", script], env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert marked() == {}
