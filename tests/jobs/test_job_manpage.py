"""infini-job's man page and completions: every flag is there, and the shells take them."""

from __future__ import annotations

import os
import subprocess

from infini_run.jobs.options.table import VERBS
from tests.support.cluster import needs
from tests.support.paths import ROOT

SHARE = ROOT / "share"
PAGE = SHARE / "man/man1/infini-job.1"
BASH = SHARE / "bash-completion/completions/infini-job"
FISH = SHARE / "fish/vendor_completions.d/infini-job.fish"
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


@needs("groff")
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


@needs("mandoc")
def test_no_tool_has_anything_to_say_against_the_page():
    done = subprocess.run(
        ["mandoc", "-T", "lint", "-W", "warning", PAGE], capture_output=True, text=True, check=False
    )
    assert [line for line in done.stdout.splitlines() if "missing date" not in line] == []


@needs("bash")
def test_bash_completes_verbs_flags_values_and_jobs(tmp_path):
    (tmp_path / "ir-0123456789").mkdir()
    assert complete("st") == ["status", "stacks"]
    assert complete("submit", "--slots") == ["--slots=", "--slots_per_node="]
    assert complete("submit", "--scheduler", "=", "l") == ["local"]
    assert complete("submit", "--runtime", "=") == ["apptainer", "singularity", "podman", "enroot", "pyxis"]
    assert complete("logs", "--fo") == ["--follow"]
    assert complete("logs", "ir-", INFINI_JOB_DIR=str(tmp_path)) == ["ir-0123456789"]
    assert complete("cancel", "") == []
    assert complete("logs", "--nofo") == ["--nofollow"]
    assert complete("submit", "--slots-p") == ["--slots-per-node="]
    assert complete("submit", "--scheduler", "l") == ["local"]
    assert complete("submit", "--dir", f"{tmp_path}/ir") == [f"{tmp_path}/ir-0123456789"]
    assert complete("logs", "--rank", "3", "--follow", "ir-", INFINI_JOB_DIR=str(tmp_path)) == ["ir-0123456789"]
    assert complete("submit", "--slots", "3", f"{tmp_path}/ir") == [f"{tmp_path}/ir-0123456789"]
    assert complete("submit", "--", "--sl") == []


@needs("zsh")
def test_zsh_takes_it():
    done = subprocess.run(["zsh", "-n", ZSH], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    text = ZSH.read_text()
    assert all(f"--{flag.name}" in text for flags in VERBS.values() for flag in flags)


@needs("fish")
def test_fish_completes_verbs_flags_values_and_jobs(tmp_path):
    (tmp_path / "jobs/ir-0123456789").mkdir(parents=True)

    def offered(typed):
        argv = [
            "fish",
            "--no-config",
            "-c",
            f'source {FISH}; complete -c trainer -l its-own; complete -C "$argv[1]"',
            f"infini-job {typed}",
        ]
        environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "INFINI_JOB_DIR": str(tmp_path / "jobs")}
        done = subprocess.run(argv, capture_output=True, text=True, env=environ, check=True, cwd=tmp_path)
        assert done.stderr == ""
        return [line.partition("\t")[0] for line in done.stdout.splitlines()]

    assert offered("") == list(VERBS)
    assert offered("stat") == ["status"]
    assert offered("submit --slots_") == ["--slots_per_node="]
    assert offered("submit --slots-p") == ["--slots-per-node="]
    assert offered("submit --scheduler=l") == ["--scheduler=local"]
    assert offered("submit --scheduler l") == ["local"]
    assert offered("submit --cwd=j") == ["--cwd=jobs/"]
    assert offered("logs --fo") == ["--follow"]
    assert offered("logs --nofo") == ["--nofollow"]
    assert offered("logs --rank 3 ") == offered("cancel ") == ["ir-0123456789"]
    assert offered("submit -- --sl") == []
    assert offered("submit --slots 3 trainer --its") == ["--its-own"]
    for verb, flags in VERBS.items():
        names = {word.rstrip("=") for word in offered(f"{verb} --")}
        assert names >= {f"--{flag.name}" for flag in flags}
