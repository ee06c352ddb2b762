"""A word of another launcher, or one typed in a hurry, is answered with what it is called here."""

from __future__ import annotations

import os
import subprocess

import pytest

from infini_run.options import hints
from infini_run.options.grammar import GRAMMAR
from infini_run.options.table import FLAGS, TABLE
from tests.support.command import COMMAND


@pytest.fixture
def told(tmp_path):
    """The exit code and the only line on stderr, in a directory with train.py."""
    (tmp_path / "train.py").write_text("")

    def run(*words, lines=1):
        done = subprocess.run([*COMMAND, *words], capture_output=True, text=True, cwd=tmp_path)
        assert done.stderr.count("\n") == lines, done.stderr
        return done.returncode, done.stderr.removeprefix("infini-run: ").rstrip("\n")

    return run


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("-n", "4"), ("--nproc_per_node=N", "--nnodes=N")),
        (("-np", "4"), ("--nproc_per_node=N",)),
        (("-N", "4"), ("--nnodes=N", "--nproc_per_node=N")),
        (("-n4",), ("--nproc_per_node=N", "--nnodes=N")),
        (("-np4",), ("--nproc_per_node=N",)),
        (("-N2",), ("--nnodes=N",)),
        (("-xHOME",), ("--export=NAME",)),
        (("-xA=1",), ("--export=NAME",)),
        (("-V",), ("--version",)),
        (("-x", "A=1"), ("--export=NAME",)),
        (("--env", "A=1"), ("--export=NAME",)),
        (("--timeout=1h",), ("timeout(1)", "--hang_timeout", "--grace=TIME")),
        (("--ntasks=4",), ("--nproc_per_node=N",)),
        (("--num_processes", "4"), ("--nproc_per_node=N",)),
        (("--tag-output",), ("--console=prefix",)),
        (("--mca", "btl", "self"), ("--link_address=ADDR",)),
        (("--rankfile=r",), ("--hosts=a,b:4",)),
        (("--display-map",), ("--dry_run",)),
        (("--display", "map"), ("--dry_run",)),
        (("--cpu-list", "0,1"), ("--bind=",)),
        (("--merge-stderr-to-stdout",), ("--log_dir=DIR", "2>&1")),
        (("--continuous",), ("--keep_going",)),
        (("-genvall",), ("--export=NAME",)),
        (("-p", "gpu"), ("infini-job submit",)),
        (("--mixed_precision=bf16",), ("ACCELERATE_MIXED_PRECISION=bf16",)),
    ],
)
def test_a_flag_of_another_launcher_names_ours(told, words, names):
    code, text = told(*words, "train.py")
    assert code == 2
    assert text.startswith(f"unknown flag {words[0].partition('=')[0]}")
    assert all(name in text for name in names)


def test_no_hint_is_for_a_flag_of_ours_and_each_names_one():
    assert hints._FLAGS.keys().isdisjoint(TABLE)
    ours = {f"--{flag.name}" for flag in (*FLAGS, *GRAMMAR)}
    for name, text in hints._FLAGS.items():
        said = {word.partition("=")[0].rstrip(",;") for word in text.split() if word.startswith("--")}
        assert said <= ours, name


@pytest.mark.parametrize("word", ["-z", "-q", "-z4", "-xs"])
def test_a_letter_is_near_to_no_other(told, word):
    assert told(word, "train.py") == (2, f"unknown flag {word}; run --help for the list")


def test_a_file_that_is_not_there_is_told_with_the_folder_and_the_nearest(told, tmp_path):
    assert told("trian.py") == (127, f"trian.py is neither in {tmp_path} nor on PATH; did you mean train.py?")
    assert told("./tran.py") == (127, f"./tran.py does not exist (in {tmp_path}); did you mean ./train.py?")
    assert told("else.py") == (127, f"else.py is neither in {tmp_path} nor on PATH")
    assert told("no/train.py") == (127, f"no/train.py does not exist (in {tmp_path})")


def test_a_command_in_one_word_is_told_so(told, tmp_path):
    for word in ("sh train.py", "/bin/sh train.py", "train.py --lr=1"):
        code, text = told(word)
        assert code == 127
        assert f"drop the quotes ({word})" in text
    code, text = told("no such program")
    assert (code, text) == (127, "no such program is not on PATH")


@pytest.mark.parametrize("word", ["help", "version"])
def test_a_question_without_dashes_is_a_program_where_there_is_one(told, word, infini_run, tmp_path):
    assert told(word) == (127, f"{word} is not on PATH; did you mean infini-run --{word}?")
    program = tmp_path / "bin" / word
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho mine\n")
    program.chmod(0o755)
    command = infini_run(word, env={"PATH": str(program.parent)})
    assert (command.wait(), command.out, command.err) == (0, b"mine\n", b"")


def test_a_hostfile_that_is_not_there_is_named_once(told):
    text = "--hostfile=nope cannot be read: No such file or directory"
    assert told("--hostfile=nope", "train.py") == (2, text)


# ---- a flag of ours after the program


@pytest.mark.parametrize(
    "word", ["--nproc_per_node=2", "--nproc-per-node", "--nnodes=2", "--standalone", "--hosts=a,b"]
)
def test_a_launchers_flag_after_the_program_is_told_in_one_line(told, word):
    name = word.partition("=")[0]
    code, text = told("train.py", "--lr=1", word)
    assert code == 0
    assert text.startswith(f"{name} after train.py goes to that program")


@pytest.mark.parametrize(
    "words",
    [
        (
            "train.py",
            "--log_dir=x",
            "--verbose",
            "--help",
            "--lr=1",
            "-n",
            "2",
        ),  # what a program may well have itself
        ("train.py", "--nproc_per_nodes=2", "nproc_per_node=2", "-nproc_per_node=2"),
        ("train.py", "--", "--nproc_per_node=2"),
        ("--", "train.py", "--nproc_per_node=2"),
        ("--nproc_per_node=1", "train.py", "--nproc_per_node=2"),
        ("true", "torchrun", "--nproc_per_node=2"),
        ("true", "-m", "infini_run", "--nproc_per_node=2"),
    ],
)
def test_what_may_be_the_programs_own_is_not(told, words):
    assert told(*words, lines=0) == (0, "")


# ---- words of a first try


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        ((".",), 126, ". is a directory; use a program in it"),
        (("folder",), 126, "folder is a directory; use a program in it"),
        (("train",), 127, "train is not on PATH; did you mean train.py?"),
        (("./train",), 127, "./train does not exist (in {here}); did you mean ./train.py?"),
        (("launch", "train.py"), 127, "launch is not on PATH; drop it, infini-run has no verbs"),
        (
            ("FOO=1", "train.py"), 127,
            "FOO=1 is not on PATH; set it before the command: FOO=1 infini-run ..., or use env FOO=1 ...",
        ),
        (
            ("\N{EN DASH}nnodes=1", "train.py"), 127,
            ("\N{EN DASH}nnodes=1 is not on PATH; \N{EN DASH} is a typographic dash; use - or --"),
        ),
        (
            ("-\N{EM DASH}nnodes", "train.py"), 2,
            ("unknown flag -\N{EM DASH}nnodes; \N{EM DASH} is a typographic dash; use - or --"),
        ),
        (("--log_dir", "train.py"), 2, "missing program: --log_dir took train.py as its value; use --log_dir=VALUE"),
    ],
)  # fmt: skip
def test_a_word_of_a_first_try_is_told_what_it_is(told, tmp_path, words, code, text):
    (tmp_path / "folder").mkdir()
    assert told(*words) == (code, text.format(here=tmp_path))


def test_a_pods_variables_are_told_in_words():
    words = [*COMMAND, "--engine=auto", "--dry_run", "true"]
    env = {**os.environ, "MASTER_ADDR": "here", "MASTER_PORT": "29500", "WORLD_SIZE": "2", "RANK": "0"}
    done = subprocess.run(words, capture_output=True, text=True, env=env)
    assert "found: variables of a pod, with a launcher on each node\n" in done.stdout
