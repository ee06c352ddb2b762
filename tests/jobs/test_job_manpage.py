"""infini-job's man page and completions: every flag is there, and the shells take them."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from infini_run.jobs.options.table import VERBS
from tests.support.paths import ROOT

SHARE = ROOT / "share"
PAGE = SHARE / "man/man1/infini-job.1"
BASH = SHARE / "bash-completion/completions/infini-job"
ZSH = SHARE / "zsh/site-functions/_infini-job"
DRIVER = r"""
source "$1"; shift
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMPREPLY=()
_infini_job
printf '%s\n' "${COMPREPLY[@]}"
"""


def complete(*words, **env):
    """What bash offers for the last word; `--a=b` is three words (COMP_WORDBREAKS)."""
    argv = ["bash", "--norc", "-c", DRIVER, "bash", str(BASH), "infini-job", *words]
    environ = {"PATH": os.environ["PATH"], "HOME": "/nosuch", **env}
    done = subprocess.run(argv, capture_output=True, text=True, env=environ, check=True)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
def test_the_page_names_every_verb_and_flag():
    done = subprocess.run(
        ["groff", "-man", "-Tascii", "-ww", "-P-c", "-P-b", "-P-u", "-rLL=2000n", PAGE],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stderr == ""
    words = done.stdout.replace("[no]", "").split()
    for verb, flags in VERBS.items():
        assert verb in words
        assert all(any(word.startswith(f"--{flag.name}") for word in words) for flag in flags)


@pytest.mark.skipif(shutil.which("mandoc") is None, reason="mandoc is not installed")
def test_no_tool_has_anything_to_say_against_the_page():
    done = subprocess.run(
        ["mandoc", "-T", "lint", "-W", "warning", PAGE], capture_output=True, text=True, check=False
    )
    assert [line for line in done.stdout.splitlines() if "missing date" not in line] == []


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes_verbs_flags_values_and_jobs(tmp_path):
    (tmp_path / "ir-0123456789").mkdir()
    assert complete("st") == ["status"]
    assert complete("submit", "--slots") == ["--slots=", "--slots_per_node="]
    assert complete("submit", "--scheduler", "=", "l") == ["local"]
    assert complete("submit", "--runtime", "=") == ["apptainer", "singularity", "podman", "enroot", "pyxis"]
    assert complete("logs", "--fo") == ["--follow"]
    assert complete("logs", "ir-", INFINI_JOB_DIR=str(tmp_path)) == ["ir-0123456789"]
    assert complete("cancel", "") == []
    assert complete("submit", "--", "--sl") == []


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_takes_it():
    done = subprocess.run(["zsh", "-n", ZSH], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    text = ZSH.read_text()
    assert all(f"--{flag.name}" in text for flags in VERBS.values() for flag in flags)
