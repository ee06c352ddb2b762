"""What --help and --helpfull say."""

from __future__ import annotations

import pytest

from infini_run.errors import UsageError
from infini_run.options.grammar import GRAMMAR, metavar
from infini_run.options.help import flag_text, full_help_text, help_text
from infini_run.options.options import resolve
from infini_run.options.table import FLAGS


def test_helpfull_fits_80_columns_and_shows_every_flag_and_its_values():
    text = full_help_text()
    assert text.startswith("usage: infini-run [flags] [--] program [args...]\n")
    assert max(map(len, text.splitlines())) < 80
    for flag in (*FLAGS, *GRAMMAR):
        name = f"--[no]{flag.name}" if flag.negated is not None else f"--{flag.name}={metavar(flag)}"
        assert name in text


def test_help_explains_first_group_and_names_every_flag_on_one_screen():
    lines = help_text().splitlines()
    assert lines[0] == "usage: infini-run [flags] [--] program [args...]"
    assert max(map(len, lines)) < 80
    assert len(lines) <= 39
    words = {
        word.partition("=")[0] for line in lines if not line.startswith("  infini-run ") for word in line.split()
    }
    for flag in (*FLAGS, *GRAMMAR):
        assert (f"--{flag.name}" in words) == (flag.group != "torchrun")


def test_help_explains_each_flag_of_first_group_in_one_line():
    lines = help_text().splitlines()
    for flag in FLAGS:
        if flag.group == FLAGS[0].group:
            clause = flag.help.partition(";")[0]
            assert [line for line in lines if line.startswith(f"  --{flag.name}") and line.endswith(f" {clause}")]


@pytest.mark.parametrize(
    "words", [["--help", "restart_window"], ["-h", "--restart-window"], ["--help=restart_window"]]
)
def test_help_of_flag_shows_text_default_and_variable(words, infini_run):
    command = infini_run(*words)
    assert (command.wait(), command.err) == (0, b"")
    text = "reset the restart count after TIME without a failure (default: off) variable: INFINI_RUN_RESTART_WINDOW"
    assert " ".join(command.out.decode().split()) == f"--restart_window=TIME|off {text}"


@pytest.mark.parametrize("flag", [flag.name for flag in (*FLAGS, *GRAMMAR)])
def test_help_of_flag_knows_every_flag(flag):
    assert flag_text(flag).startswith("  ")
    assert resolve([f"--help={flag}"], {}).arguments == (flag,)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nproc", "--help nproc: unknown flag; did you mean --nproc_per_node?"),
        ("ppn", "--help ppn: unknown flag; use --nproc_per_node=N"),
        ("xyzzy\n", "--help 'xyzzy\\n': unknown flag; run infini-run --helpfull"),
    ],
)
def test_help_of_unknown_flag_names_nearest(name, said):
    with pytest.raises(UsageError) as refusal:
        flag_text(name)
    assert str(refusal.value).startswith(said)


@pytest.mark.parametrize("text", [help_text(), full_help_text()], ids=["help", "helpfull"])
def test_examples_work(text):
    text = text.partition("Examples:\n")[2] or text
    examples = [line for line in text.replace("\\\n", " ").splitlines() if line.startswith("  infini-run ")]
    assert len(examples) >= 5
    for example in examples:
        argv = example.partition("#")[0].split()
        assert argv.pop(0) == "infini-run"
        if not argv[0].startswith("--flagfile"):
            assert resolve(argv, {}).options.program


def test_helpfull_shows_defaults():
    assert "(default: auto)" in " ".join(full_help_text().split())
    assert "not built" not in full_help_text()


def test_helpfull_tells_what_becomes_of_torchruns_flags():
    text = " ".join(full_help_text().split())
    for part in ("--run_id=ID, --rdzv_id", "--grace=TIME, --shutdown_timeout", "ignored: ", "refused: "):
        assert part in text


def test_every_default_that_is_shown_has_a_word():
    assert "(default: )" not in " ".join(full_help_text().split())


def test_helpfull_says_that_ranks_which_exit_0_after_a_signal_make_it_0():
    text = " ".join(full_help_text().split())
    assert "After a request to stop by signal N: 0 if every rank then exited 0, else 128+N" in text
