"""What bash, zsh and fish complete, in real shells; and that generated files are up to date with the flags."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from infini_run.options.completed_values import kind, values
from infini_run.options.completion import SHELLS, script
from infini_run.options.grammar import GRAMMAR, Flag
from infini_run.options.table import FLAGS
from infini_run.value_types import bounded_int
from tests.support.cluster import needs
from tests.support.paths import ROOT
from tests.support.pty_window import Window

SHARE = ROOT / "share"
BASH = SHARE / "bash-completion/completions/infini-run"
FISH = SHARE / "fish/vendor_completions.d/infini-run.fish"
needs_bash = needs("bash")
needs_fish = needs("fish")
needs_zsh = needs("zsh")

DRIVER = r"""
source "$1"; shift
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMP_LINE="$*" COMPREPLY=()
COMP_POINT=${#COMP_LINE}
_infini_run infini-run "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
printf '%s\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs.txt").write_text("")
    (tmp_path / "train it.py").write_text("")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/trainer").write_text("#!/bin/sh\n")
    (tmp_path / "bin/trainer").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def complete(*words, setup=""):
    """What bash offers for the last word. Words are as bash parts them: `--a=b` is three (COMP_WORDBREAKS)."""
    command = ["bash", "--norc", "-c", setup + DRIVER, "bash", str(BASH), "infini-run", *words]
    env = {"PATH": f"bin:{os.environ['PATH']}", "HOME": "/", "EXAMPLE_ONE": "1", "EXAMPLE_TWO": "2"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
    assert done.stderr == ""
    return sorted(done.stdout.split("\n")[:-1]) if done.stdout != "\n" else []


@needs_bash
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["--nnod"], ["--nnodes="]),
        (["--nproc-"], ["--nproc-per-node="]),
        (["-nproc_"], ["-nproc_per_node="]),
        (["--verb"], ["--verbose"]),
        (["--noverb"], ["--noverbose"]),
        (["--shutdown"], ["--shutdown_timeout="]),
        (["--start_meth"], []),  # does nothing here
        (["--console", "=", ""], ["auto", "fold", "inherit", "lines", "none", "prefix"]),
        (["--console", "="], ["auto", "fold", "inherit", "lines", "none", "prefix"]),
        (["--console", "=", "p"], ["prefix"]),
        (["--console", "p"], ["prefix"]),
        (["-console", ""], ["auto", "fold", "inherit", "lines", "none", "prefix"]),
        (["--console=p"], ["--console=prefix"]),  # where "=" does not part words
        (["--nproc-per-node", "=", ""], ["auto", "cpu", "gpu"]),
        (["--hang_timeout", ""], ["off"]),
        (["--live", "=", "o"], ["off", "on"]),
        (["--dry_run", "=", ""], ["json", "text"]),
        (["--nnodes", ""], []),
        (["--stop_signal", "=", "WIN"], ["WINCH"]),
        (["--stop_signal", "=", "SIGWIN"], ["WINCH"]),
        (["--export", "=", "EXAMPLE_"], ["EXAMPLE_ONE", "EXAMPLE_TWO"]),
        (["--export", "=", "A,EXAMPLE_T"], ["A,EXAMPLE_TWO"]),
        (["--log_dir", "=", "lo"], ["logs"]),
        (["--log-dir", "lo"], ["logs"]),
        (["--report", "=", "lo"], ["logs", "logs.txt"]),
        (["--flagfile", "lo"], ["logs", "logs.txt"]),
        (["--trace", "lo"], ["logs", "logs.txt"]),
        (["trai"], ["train it.py", "trainer"]),
        (["./trai"], ["./train it.py"]),
        (["--nnodes", "2", "--verbose", "traine"], ["trainer"]),
        (["--nnodes", "=", "2", "--", "traine"], ["trainer"]),
        (["--plot", "=", "o.png", "logs."], ["logs.txt"]),
        (["-m", "traine"], ["trainer"]),
        (["trainer", "--cons"], []),  # nothing after the program is ours
        (["--", "--cons"], []),
        (["--nnodes", "=", "2", "trainer", "--console", "=", ""], []),
    ],
)
def test_bash_offers(folder, words, offered):
    assert complete(*words) == sorted(offered)


@needs_bash
def test_bash_knows_every_flag_that_does_something_and_no_value_is_lost():
    offered = complete("--") + complete("--no")
    for flag in (*FLAGS, *GRAMMAR):
        does = not flag.help.startswith(("ignored:", "refused:"))
        name = f"--{flag.name}" if flag.bare is not None else f"--{flag.name}="
        assert (name in offered) == does, flag.name
        if flag.negated is not None and does:
            assert f"--no{flag.name}" in offered
        if does and flag.choices:
            assert complete(f"--{flag.name}", "=", "") == sorted(flag.choices)


@needs_bash
def test_bash_hands_over_to_the_programs_own_completion(folder):
    setup = '_comp_command_offset() { COMPREPLY=("from $1"); }\n'
    assert complete("--verbose", "--nnodes", "=", "2", "trainer", "--x", setup=setup) == ["from 5"]


@needs_bash
def test_bash_at_a_terminal_completes_what_is_typed(folder):
    environ = {"PS1": "> ", "HISTFILE": "/dev/null", "INPUTRC": "/dev/null", "COMPLETION": str(BASH)}
    window = Window(program=["bash", "--norc", "--noprofile", "-i"], **environ)
    try:
        window.see(lambda: window.text[0] == ">")
        window.type('source "$COMPLETION"\n')  # in one line, however long the path of the checkout
        window.see(lambda: window.text[1].startswith(">"))
        for typed, line in [
            ("--consol\tpre\t", "--console=prefix "),
            ("--log-d\tlog\t", "--log-dir=logs/"),
            ("--verb\ttrain\\ \t", "--verbose train\\ it.py "),
            ("trainer logs.\t", "trainer logs.txt "),  # the shell's ordinary completion
        ]:
            window.type(f"infini-run {typed}#")
            window.see(lambda line=line: any(f"> infini-run {line}#" in shown for shown in window.text))
            window.type("\x15")
    finally:
        window.close()


@needs_zsh
def test_zsh_at_a_terminal_completes_what_is_typed(folder):
    (folder / ".infini-run/jobs/ir-0123456789").mkdir(parents=True)
    window = Window(program=["zsh", "-f", "-i"], PS1="> ", HOME=str(folder), columns=120, lines=40)
    try:
        window.see(lambda: window.text[0].startswith(">"))
        window.type(f"fpath=({SHARE}/zsh/site-functions $fpath); autoload -U compinit; compinit -u -D; clear\n")
        window.see(lambda: window.text[0] == ">" and not any(window.text[1:]))
        for typed, line in [
            ("run --consol\tpre\t", "run --console=prefix"),
            ("run --nproc-p\tgp\t", "run --nproc_per_node=gpu"),
            ("run --log-d\tlog\t", "run --log_dir=logs/"),
            ("run --nnodes 2 --verb\ttrain\\ \t", "run --nnodes 2 --verbose train\\ it.py"),
            ("run cat logs.\t", "run cat logs.txt"),
            ("run --export=EXAMPLE_O\t", "run --export=EXAMPLE_O"),  # there is none
            ("job sub\t--slots-p\t2 ./tr\t", "job submit --slots_per_node=2 ./train\\ it.py"),
            ("job logs --fo\tir-\t", "job logs --follow ir-0123456789"),
        ]:
            window.type(f"infini-{typed}#")
            window.see(lambda line=line: any(f"> infini-{line}" in s and s.endswith("#") for s in window.text))
            window.type("\x15")
    finally:
        window.close()


def fish(line, home, **environ):
    """What fish offers at the end of a line, without the descriptions."""
    command = [
        "fish",
        "--no-config",
        "-c",
        f'source {FISH}; complete -c trainer -l its-own; complete -C "$argv[1]"',
        line,
    ]
    env = {"PATH": f"bin:{os.environ['PATH']}", "HOME": str(home), "EXAMPLE_ONE": "1", "EXAMPLE_TWO": "2", **environ}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
    assert done.stderr == ""
    return sorted(line.partition("\t")[0] for line in done.stdout.splitlines())


@needs_fish
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("--nnod", ["--nnodes="]),
        ("--nproc-", ["--nproc-per-node="]),
        ("-nproc_", ["-nproc_per_node="]),
        ("--verb", ["--verbose"]),
        ("--noverb", ["--noverbose"]),
        ("--node_r", ["--node_rank="]),
        ("--shutdown", ["--shutdown_timeout="]),
        ("--start_method=", []),  # does nothing here
        ("--console=", [f"--console={word}" for word in ("auto", "fold", "inherit", "lines", "none", "prefix")]),
        ("--console=p", ["--console=prefix"]),
        ("--console p", ["prefix"]),
        ("-console ", ["auto", "fold", "inherit", "lines", "none", "prefix"]),
        ("--nproc-per-node=", [f"--nproc-per-node={word}" for word in ("auto", "cpu", "gpu")]),
        ("--hang_timeout ", ["off"]),
        ("--nnodes ", []),
        ("--stop_signal=WIN", ["--stop_signal=WINCH"]),
        ("--export=EXAMPLE_", ["--export=EXAMPLE_ONE", "--export=EXAMPLE_TWO"]),
        ("--export=A,EXAMPLE_T", ["--export=A,EXAMPLE_TWO"]),
        ("--log_dir=lo", ["--log_dir=logs/"]),
        ("--log-dir lo", ["logs/"]),
        ("--report=lo", ["--report=logs.txt", "--report=logs/"]),
        ("--flagfile lo", ["logs.txt", "logs/"]),
        ("trai", ["train it.py", "trainer"]),
        ("./trai", ["./train it.py"]),
        ("--nnodes 2 --verbose traine", ["trainer"]),
        ("--nnodes=2 -- traine", ["trainer"]),
        ("--plot=o.png logs.", ["logs.txt"]),
        ("-m traine", ["trainer"]),
        ("trainer --cons", []),  # nothing after the program is ours
        ("trainer logs.", ["logs.txt"]),
        ("-- --cons", []),
        ("--nnodes=2 trainer --console=", [f"--console={f}" for f in ("bin/", "logs.txt", "logs/", "train it.py")]),
        ("--verbose trainer --its", ["--its-own"]),  # that program's own completion
    ],
)
def test_fish_offers(folder, typed, offered):
    assert fish(f"infini-run {typed}", folder) == sorted(offered)


@needs_fish
def test_fish_knows_every_flag_that_does_something_and_no_value_is_lost(tmp_path):
    offered = fish("infini-run --", tmp_path) + fish("infini-run --no", tmp_path)
    for flag in (*FLAGS, *GRAMMAR):
        does = not flag.help.startswith(("ignored:", "refused:"))
        name = f"--{flag.name}" if flag.bare is not None else f"--{flag.name}="
        assert (name in offered) == does, flag.name
        if flag.negated is not None and does:
            assert f"--no{flag.name}" in offered
        if does and flag.choices:
            assert fish(f"infini-run --{flag.name} ", tmp_path) == sorted(flag.choices)


@pytest.mark.parametrize("shell", [pytest.param(shell, marks=needs(shell)) for shell in SHELLS])
def test_the_command_prints_what_a_shell_evaluates(infini_run, shell):
    command = infini_run(f"--completion={shell}")
    assert command.wait() == 0
    assert command.out.decode() == script(shell)
    setup = "autoload -U compinit; compinit -u -D\n" if shell == "zsh" else ""
    known = {
        "bash": "complete -p infini-run",
        "zsh": "echo $_comps[infini-run]",
        "fish": "complete -c infini-run",
    }[shell]
    words = [shell, {"bash": "--norc", "zsh": "-f", "fish": "--no-config"}[shell], "-c"]
    done = subprocess.run(
        [*words, f"{setup}{command.out.decode()}\n{known}"], capture_output=True, text=True, check=True
    )
    assert "_infini_run" in done.stdout
    assert done.stderr == ""


def test_another_shell_is_refused(infini_run):
    command = infini_run("--completion=tcsh")
    assert command.wait() == 2
    assert command.err == b"infini-run: --completion=tcsh: expected bash, zsh, fish, or install\n"


def test_what_a_value_can_be_is_in_its_metavar():
    def flag(metavar, choices=()):
        return Flag(name="x", kind=bounded_int(0), default=0, group="job", help="x", metavar=metavar, choices=choices)

    assert values(flag("N|auto|gpu")) == ("auto", "gpu")
    assert values(flag("", ("a", "b-c"))) == ("a", "b-c")
    assert values(flag("all|0,4-7")) == ("all",)
    assert values(flag("N")) == values(flag("a,b")) == ()
    assert [kind(flag(m)) for m in ("FILE", "FILE.png", "DIR", "SIGNAL", "NAME,...", "N")] == [
        "file", "file", "folder", "signal", "variables", "",
    ]  # fmt: skip


def test_what_is_generated_is_up_to_date():
    done = subprocess.run([sys.executable, SHARE / "generate.py", "--check"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), f"{done.stdout}{done.stderr}"


def test_what_is_out_of_date_is_noticed_and_made_anew(tmp_path):
    shutil.copytree(SHARE, tmp_path / "share")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for folder in ("infini_run/options", "infini_run/jobs/options"):
        (tmp_path / folder).mkdir(parents=True)
        shutil.copy(ROOT / folder / "keywords.py", tmp_path / folder)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    page = tmp_path / "share/man/man1/infini-run.1"
    page.write_text(page.read_text().replace("nnodes", "nodes"))
    generate = [sys.executable, tmp_path / "share/generate.py"]
    done = subprocess.run([*generate, "--check"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "share/man/man1/infini-run.1\n")
    subprocess.run(generate, check=True, capture_output=True)
    assert page.read_text() == (SHARE / "man/man1/infini-run.1").read_text()
