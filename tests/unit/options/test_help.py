"""What --help and --helpfull say."""

from __future__ import annotations

import pytest

from infini_run.options.grammar import GRAMMAR, metavar
from infini_run.options.help import help_text
from infini_run.options.options import resolve
from infini_run.options.table import FLAGS


@pytest.mark.parametrize("full", [False, True])
def test_help_fits_80_columns_and_shows_every_flag_and_its_values(full):
    text = help_text(full)
    assert text.startswith("usage: infini-run [flags] [--] program [args...]\n")
    assert max(map(len, text.splitlines())) < 80
    for flag in (*FLAGS, *GRAMMAR):
        name = f"--[no]{flag.name}" if flag.negated is not None else f"--{flag.name}={metavar(flag)}"
        assert (name in text) == (full or flag.group != "torchrun")


def test_help_shows_defaults_and_ends_with_examples_that_work():
    text = help_text(False)
    assert "(default: auto)" in " ".join(text.split())
    assert "not built" not in text
    examples = text.partition("Examples:\n")[2].replace("\\\n", " ").splitlines()
    assert len(examples) == 5
    for example in examples:
        argv = example.partition("#")[0].split()
        assert argv.pop(0) == "infini-run"
        if not argv[0].startswith("--flagfile"):
            assert resolve(argv, {}).options.program


def test_helpfull_tells_what_becomes_of_torchruns_flags():
    text = " ".join(help_text(True).split())
    for part in ("--run_id=ID, --rdzv_id", "--grace=TIME, --shutdown_timeout", "ignored: ", "refused: "):
        assert part in text


def test_every_default_that_is_shown_has_a_word():
    assert "(default: )" not in " ".join(help_text(True).split())


def test_the_help_says_that_ranks_which_exit_0_after_a_signal_make_it_0():
    text = " ".join(help_text(full=False).split())
    assert "told to stop by signal N: 0 if every process then exited 0, else 128+N" in text
