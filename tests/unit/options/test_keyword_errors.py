"""Errors of the Python API name keywords (options/keyword_errors.py)."""

import pickle
import sys

import pytest

import infini_run as ir
from infini_run.errors import InfiniRunError, UsageError
from infini_run.jobs.job import _SubmitErrors
from infini_run.options.keyword_errors import KeywordErrors


@pytest.mark.parametrize(
    ("given", "text", "renamed"),
    [
        ({}, "--grace=x: not a time; use 10, or 1h30m", 'grace="x": not a time; use 10, or 1h30m'),
        (
            {},
            "--console=a: add --log_dir=DIR (--log_dir=/x drops it)",
            'console="a": add log_dir=DIR (log_dir="/x" drops it)',
        ),
        (
            {},
            "--after: conflicts with --keep_going; use --nokeep_going",
            "after=: conflicts with keep_going=True; use keep_going=False",
        ),
        ({}, "--nnodes=1:2: add --hosts=a,b, or --spares=1.", 'nnodes="1:2": add hosts="a,b", or spares=1.'),
        ({}, "use --hosts='n[1-2]' or --rdzv_endpoint=HOST:PORT", "use hosts='n[1-2]' or rdzv_endpoint=HOST:PORT"),
        ({"log_dir": "a b"}, "--log_dir=a b: cannot be made", 'log_dir="a b": cannot be made'),
        ({"log_dir": 'a"b'}, '--log_dir=a"b: cannot be made', "log_dir='a\"b': cannot be made"),
        ({"nproc": "x"}, "--nproc_per_node=x: use --nproc_per_node=N", 'nproc="x": use nproc=N'),
        ({"nproc": None}, "use --nproc_per_node=N", "use nproc_per_node=N"),
        (
            {},
            "run infini-run --bind=numa, srun --export=ALL, or --help",
            "run infini-run --bind=numa, srun --export=ALL, or --help",
        ),
        (
            {},
            "--ntasks-per-node=1 and --dry_run and --distributed-rank",
            "--ntasks-per-node=1 and --dry_run and --distributed-rank",
        ),
        (
            {},
            "--ready_port=80: needs programs; add --program=NAME",
            "ready_port=80: needs programs; add Program(..., name=NAME)",
        ),
    ],
)
def test_message_names_keywords(given, text, renamed):
    assert KeywordErrors(given).rename(text) == renamed


def test_message_of_programs_names_them_as_their_class():
    text = "--program=a: already the name of another program"
    assert KeywordErrors({}, has_programs=True).rename(text) == 'name="a": already the name of another program'


@pytest.mark.parametrize(
    ("given", "text", "renamed"),
    [
        (
            {},
            "--slots=10: use --slots_per_node=2 or 1, or --round_up (12)",
            "slots=10: use slots_per_node=2 or 1, or round_up=True (12)",
        ),
        ({"options": ["--time=4h"]}, "--time=4h: use --time of infini-job", "--time=4h: use time= of submit"),
        (
            {"run_options": "--spares=1 -x"},
            "--run_options: --spares=1: use --spares",
            "run_options=: --spares=1: use spares=",
        ),
        ({"time": "4x"}, "--time=4x: not a time", 'time="4x": not a time'),
        ({}, "missing --pool; use --pool=a|b, or --check", "missing pool=; use pool=a|b, or --check"),
    ],
)
def test_message_of_submit_names_its_keywords(given, text, renamed):
    assert _SubmitErrors(given).rename(text) == renamed


def test_error_of_another_kind_keeps_what_it_quotes():
    """A rank's own words are no flags of the caller."""
    for error in (InfiniRunError("rank 0: --grace=3"), ValueError("--grace=3")):
        with pytest.raises(type(error), match=r"--grace=3"), KeywordErrors({}):
            raise error
    with pytest.raises(UsageError, match=r"^grace=3$"), KeywordErrors({}):
        raise UsageError("--grace=3")


def test_report_names_keywords_in_its_advice_alone():
    script = "import pdb, sys; print('--grace=3', file=sys.stderr); raise pdb.bdb.BdbQuit"
    with pytest.raises(ir.WorkerError) as caught:
        ir.run(
            [sys.executable, "-c", f"import os, time\nif os.environ['RANK'] == '0': time.sleep(600)\n{script}"],
            nproc=2,
            console="prefix",
            grace=1,
        )
    lines = str(caught.value).splitlines()
    assert "  | --grace=3" in lines
    assert lines[-1].startswith("  next: add stdin=1, and call breakpoint() on rank 1 alone")
    assert caught.value.report.text() == str(caught.value)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.report) == (str(caught.value), caught.value.report)


def test_report_names_keywords_in_its_notices():
    """A full file is known at the end alone."""
    with ir.ProcessLauncher(["true"], events="/dev/full") as launcher:
        launcher.launch()
        launcher.wait()
        launcher.close()
        (notice,) = launcher.report().notices
    assert notice.startswith('events="')
    (notice,) = ir.run(["true"], events="/dev/full").notices
    assert notice.startswith('events="')


def test_lines_of_agent_name_keywords(capfd, tmp_path):
    """`preload=` makes an agent start the ranks, whose lines come with theirs."""
    (tmp_path / "train.py").write_text("import sys; print('rank: --check_gpus', file=sys.stderr)")
    command = [sys.executable, tmp_path / "train.py"]
    report = ir.run(command, preload=["json"], check_gpus="warn", console="prefix")
    lines = capfd.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith("infini-run: ") and "check_gpus=: checked nothing: " in line]
    assert [line for line in lines if line.endswith("rank: --check_gpus")]
    assert not [line for line in lines if line.startswith("infini-run: ") and "--" in line]
    assert report.exit_code == 0


def test_lines_name_keywords_but_not_in_what_ranks_wrote():
    lines = ["lost: (--node_timeout)", "  | --grace=3", "  next: add --stdin=1", "  status: --grace"]
    assert KeywordErrors({}).rename_lines(lines) == [
        "lost: (node_timeout=)",
        "  | --grace=3",
        "  next: add stdin=1",
        "  status: --grace",
    ]


def test_error_names_keywords_that_are_not_called_as_their_flag():
    names = {"nproc_per_node": "max_workers"}
    assert KeywordErrors({}, names=names).rename("use --nproc_per_node=N") == "use max_workers=N"


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: ir.run(["true"], nproc="x"), 'nproc="x": expected 1 to 4194304, auto, gpu, or cpu'),
        (lambda: ir.run(["true"], redirects=3), "redirects=3: needs a file; add log_dir=DIR "),
        (lambda: ir.run(["true"], ranks_on_console="5"), 'ranks_on_console="5": unknown rank 5; use ranks 0 to 0'),
        (lambda: ir.ProcessLauncher(["true"], stdin=5).launch(), "stdin=5: unknown rank 5; use ranks 0 to 0"),
        (lambda: ir.Crew(print, bind="x"), 'bind="x": expected none, numa, socket, or cores'),
        (lambda: ir.submit(["true"], slots="x"), 'slots="x": expected 1 to 2147483647'),
        (lambda: ir.run([ir.Program(["true"], name="a", nproc_per_node="x")]), 'nproc_per_node="x": expected 1 to '),
    ],
    ids=["run", "advice", "plan", "launcher", "crew", "submit", "program"],
)
def test_each_call_raises_what_names_its_keywords(call, text):
    with pytest.raises(UsageError) as caught:
        call()
    assert str(caught.value).startswith(text)
