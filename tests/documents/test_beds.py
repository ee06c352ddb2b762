"""The test beds name where a scheduler comes from; how it is built is its own project's to say."""

from __future__ import annotations

import os
import re
import subprocess

from tests.support.paths import ROOT

BED = ROOT / "tests" / "support" / "beds" / "pbs.sh"
RECIPE = re.compile(r"git clone|autogen|configure\b.*--|make install|chmod 4755")


def test_bed_of_openpbs_names_its_install_and_prefix(tmp_path):
    environ = {**os.environ, "PBS_EXEC": str(tmp_path / "none")}
    done = subprocess.run([BED, "where"], env=environ, capture_output=True, text=True, check=True)
    assert f"there is no OpenPBS in {tmp_path}/none (PBS_EXEC)" in done.stdout
    assert "openpbs/blob/master/INSTALL" in done.stdout
    assert "prefix /opt/pbs" in done.stdout


def test_no_bed_has_its_own_recipe_for_openpbs():
    for file in (BED, ROOT / "Makefile", ROOT / "CONTRIBUTING.md"):
        text = "\n".join(line for line in file.read_text().splitlines() if "pbs" in line.lower())
        assert RECIPE.search(text) is None, file


def test_make_pbs_names_the_install_and_the_prefix():
    shown = subprocess.run(["make", "-s", "-C", ROOT, "help"], capture_output=True, text=True, check=True).stdout
    (line,) = (line for line in shown.splitlines() if line.startswith("make pbs "))
    assert "INSTALL" in line
    assert "/opt/pbs" in line
