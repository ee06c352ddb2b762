"""The command infini-job: what it says, and what it says of what makes no sense."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import _cffi_backend
import pytest

import infini_run
from infini_run.jobs.allocation.result import restart_reason
from infini_run.jobs.allocation.time_limit import NEVER, parse
from infini_run.jobs.folder.records import JobResult
from infini_run.jobs.options import hints
from infini_run.jobs.options.help import help_text
from infini_run.jobs.options.table import ALL_FLAGS, OTHER_VARIABLES, TABLES, VERBS, _memory, _time, _variables, _warn
from infini_run.options.table import unknown_variables
from infini_run.system.file_systems import is_others, kind_of
from tests.jobs.test_job_status import made
from tests.support.batch import COMMANDS
from tests.support.job_case import JOB
from tests.support.paths import ROOT
from tests.support.pty_window import Window
from tests.support.waiting import LIMIT_S


@pytest.fixture
def bare(tmp_path):
    """A PATH without any scheduler: what a test needs of this machine is linked."""
    folder = tmp_path / "bare"
    folder.mkdir()
    for name in ("sh", "setsid", "true", "sleep"):
        os.symlink(shutil.which(name), folder / name)
    return {"PATH": str(folder), "INFINI_JOB_SCHEDULER": ""}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("sumbit",), "unknown command sumbit; did you mean submit?"),
        (("ls",), "unknown command ls; did you mean list?"),
        (("rm", "ir-0123456789"), "unknown command rm; did you mean forget?"),
        (("frobnicate",), "unknown command frobnicate; use submit, status, list,"),
        (("submit",), "missing program; use infini-job submit [flags] [--] program [args...]"),
        (("submit", "--slotss=3", "--", "true"), "unknown flag --slotss; did you mean --slots?"),
        (("submit", "-n", "4", "true"), "unknown flag -n; use --slots=N for the ranks in all"),
        (("submit", "-N2", "true"), "unknown flag -N2; use --slots=N (ranks in all)"),
        (("submit", "--nodes=2", "true"), "unknown flag --nodes; use --slots=N (ranks in all)"),
        (("submit", "-t", "1h", "true"), "unknown flag -t; use --time=TIME"),
        (("submit", "--dry_run", "true"), "unknown flag --dry_run; use --print or --check"),
        (("submit", "--dependency=afterok:3", "true"), "unknown flag --dependency; use --options="),
        (("submit", "-W", "depend=afterok:3", "true"), "unknown flag -W; use --options='-W depend=afterok:ID'"),
        (("submit", "--signal=USR1@60", "true"), "unknown flag --signal; use --warn=[SIGNAL@]TIME"),
        (("submit", "--gres=gpu:8", "true"), "--gres=gpu:8: expected true or false; use --slots=N and --slots_per"),
        (("submit", "--help=slotz"), "--help slotz: unknown flag; did you mean --slots?"),
        (("list", "--help", "zzz"), "--help zzz: unknown flag; run infini-job list --help"),
        (("submit", "--hang_timeout=1h", "true"), "unknown flag --hang_timeout; use --run_options="),
        (("-V",), "-V: missing command before the flag; use submit, status,"),
        (("submit", "--slots=0", "--", "true"), "--slots=0: expected 1"),
        (("submit", "--slots=two", "--", "true"), "--slots=two: expected 1"),
        (("submit", "--time=soon", "--", "true"), "--time=soon: not a time "),
        (("submit", "--time=1:2", "--", "true"), "--time=1:2: not a time; use 10m, 4h, 1h30m, 1d, or 1-12:00:00"),
        (("submit", "--time=9999999:00:00", "--", "true"), "--time=9999999:00:00: not a time; use 10m"),
        (("submit", "--mem_per_slot=9999999999T", "--", "true"), "--mem_per_slot=9999999999T: not a size; use 500M"),
        (("submit", "--mem_per_slot=0", "--", "true"), "--mem_per_slot=0: not a size; use 500M"),
        (("submit", "--warn=KILL@5m", "--", "true"), "--warn=KILL@5m: cannot be caught by a process"),
        (("submit", "--time=1m", "--warn=5m", "--", "true"), "--warn: expected less than the limit of"),
        (("submit", "--mem_per_slot=much", "--", "true"), "--mem_per_slot=much: not a size; use 500M"),
        (("submit", "--env=1", "--", "true"), "--env=1: expected NAME=VALUE words"),
        (("submit", "--options=a 'b", "--", "true"), "--options=a 'b: expected words that a shell can split"),
        (("submit", "--cwd=/nosuch", "--", "true"), "--cwd=/nosuch is not a directory"),
        (("submit", "--scheduler=lsf", "--", "true"), "--scheduler=lsf: expected auto, slurm, pbs, or local"),
        (("submit", "--slots=4", "--slots_per_node=2", "--", "true"), "--slots=4 --slots_per_node=2: conflicts with"),
        (("submit", "--options=--exclusive", "--", "true"), "--exclusive: --scheduler=local takes no"),
        (("status", "ir-0000000000"), "job ir-0000000000: unknown in "),
        (("logs", "ir-0000000000"), "job ir-0000000000: unknown in "),
        (("cancel", "ir-0000000000"), "job ir-0000000000: unknown in "),
        (("logs", "../etc"), "'../etc': not a job name (ir-0123456789); run infini-job list"),
        (("logs",), "missing job name, and no jobs in this directory; use infini-job logs ir-0123456789"),
        (("logs", "ir-0000000000", "ir-0000000001"), "infini-job logs: expected one job"),
        (("logs", "--tail=x"), "--tail=x: expected 0"),
        (("submit", "--title=a\nb", "--", "true"), "--title='a\\nb': expected at most 100 printable characters"),
        (("submit", f"--title={'a' * 101}", "--", "true"), f"--title={'a' * 101}: expected at most 100 printable"),
        (("cancel",), "missing job name; use infini-job cancel ir-0123456789"),
        (("forget",), "missing job name; use infini-job forget ir-0123456789"),
        (("forget", "ir-0000000000"), "job ir-0000000000: unknown in "),
        (("list", "all"), "infini-job list: expected only flags, not all"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_one_line_that_says_what_to_do(local, words, said):
    done = local.call(*words)
    assert done.returncode == 2, done.stdout
    assert done.stderr.startswith(f"infini-job: {said}"), done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""
    assert local.is_empty()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("INFINI_JOB_TITEL", "; did you mean INFINI_JOB_TITLE?"),
        ("INFINI_JOB_DIRR", "; did you mean INFINI_JOB_DIR?"),
        ("INFINI_JOB_XYZZY", "; infini-job submit --helpfull lists the flags"),
    ],
)
@pytest.mark.parametrize("words", [("submit", "--print", "--", "true"), ("list",)], ids=["submit", "list"])
def test_misspelt_variable_is_one_line(local, words, name, said):
    done = local.call(*words, env={name: "x", "INFINI_JOB_TITLE": "known"})
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[0] == f"infini-job: unknown variable {name}, ignored{said}"


def test_variables_of_jobs_are_known():
    """All that the code names: flags of any command, and what ranks get."""
    text = "\n".join(source.read_text() for source in ROOT.glob("infini_run/**/*.py"))
    named = set(re.findall(r"INFINI_JOB_[A-Z0-9_]*[A-Z0-9]", text))
    assert unknown_variables(dict.fromkeys(named, "1"), "INFINI_JOB_", ALL_FLAGS, OTHER_VARIABLES) == []
    assert named >= OTHER_VARIABLES


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("trian.py",), "on this machine, trian.py is neither in {folder} nor on PATH; did you mean train.py?"),
        (
            ("sh train.py",),
            "on this machine, sh train.py is neither in {folder} nor on PATH; drop the quotes",
        ),
        (
            ("train.py", "--slots=4"),
            "--slots after train.py goes to that program; use flags",
        ),
        (("train.py", "--slots-per-node=4"), "--slots-per-node after train.py goes to that program"),
    ],
)
def test_what_would_fail_only_in_its_turn_is_told_at_once(local, tmp_path, words, said):
    (tmp_path / "train.py").touch()
    done = local.call("submit", "--print", f"--cwd={tmp_path}", *words)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(f"infini-job: {said.format(folder=tmp_path)}"), done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_no_hint_is_for_a_flag_of_submit_and_each_names_its_flags():
    submits = TABLES["submit"]
    assert hints._FLAGS.keys().isdisjoint(submits)
    for name, text in hints._FLAGS.items():
        said = {word[2:].partition("=")[0] for word in text.split() if word.startswith("--")}
        assert said <= submits.keys(), name


def test_a_directory_that_is_not_there_is_one_line_though_its_program_is_not_there_either(local):
    done = local.call("submit", "--print", "--cwd=/nosuch", "./train")
    assert (done.returncode, done.stderr) == (2, "infini-job: --cwd=/nosuch is not a directory\n")


@pytest.mark.parametrize("words", [("--", "train.py", "--slots=4"), ("train.py", "--engine=slurm", "--lr=1")])
def test_what_may_be_meant_so_is_not_told(local, tmp_path, words):
    (tmp_path / "train.py").touch()
    done = local.call("submit", "--print", f"--cwd={tmp_path}", *words)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("text", "said"), [("1d", "24:00:00"), ("90min", "1:30:00"), ("1h30m", "1:30:00"), ("4h", "4:00:00")]
)
@pytest.mark.parametrize("at", [0, 1])
def test_a_limit_in_any_unit_is_the_limit_of_the_job(slurm_queue, local, text, said, at):
    env = {"PATH": f"{slurm_queue.folder}/bin:/usr/bin:/bin", "TEST_BATCH": slurm_queue.folder}
    words = ["submit", "--scheduler=slurm", "--print", "--", "true"]
    words.insert(at, f"--time={text}")
    done = local.call(*words, env=env)
    assert done.returncode == 0, done.stderr
    assert f"#SBATCH --time={said}\n" in done.stdout


def test_a_check_says_that_pbs_cannot_be_asked(local, pbs_queue):
    env = {"PATH": pbs_queue.env["PATH"], "TEST_BATCH": pbs_queue.folder, "INFINI_JOB_SCHEDULER": "pbs"}
    done = local.call("submit", "--slots=8", "--check", "--", "true", env=env)
    assert done.returncode == 0
    assert done.stderr.startswith("infini-job: PBS cannot check a script before it runs"), done.stderr
    assert pbs_queue.jobs() == []


def test_no_scheduler_is_told(local, bare):
    done = local.call("submit", "--", "true", env=bare)
    assert done.returncode == 2
    assert done.stderr == (
        "infini-job: no scheduler found: neither sbatch (Slurm) nor qsub (PBS) is on PATH; run infini-job where "
        "jobs are "
        "submitted, or use --scheduler=local to run it on this machine\n"
    )
    done = local.call("submit", "--scheduler=slurm", "--", "true", env=bare)
    assert done.stderr.startswith("infini-job: --scheduler=slurm: sbatch is not on PATH; ")
    assert local.is_empty()


@pytest.mark.parametrize(("kind", "mark"), [("slurm", "#SBATCH"), ("pbs", "#PBS")])
def test_the_scheduler_that_is_there_is_taken(request, local, kind, mark):
    queue = request.getfixturevalue(f"{kind}_queue")
    env = {"PATH": f"{queue.folder}/bin:/usr/bin:/bin", "TEST_BATCH": queue.folder, "INFINI_JOB_SCHEDULER": ""}
    if kind == "pbs" and shutil.which("sbatch", path="/usr/bin:/bin"):
        env["PATH"] = f"{queue.folder}/bin"
        os.symlink(shutil.which("sh"), f"{queue.folder}/bin/sh")
    done = local.call("submit", "--print", "--", "true", env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1].startswith(f"{mark} ")


def test_grid_engines_qsub_is_not_taken_for_pbs(local, bare):
    for name in ("qsub", "qstat"):
        path = os.path.join(bare["PATH"], name)
        with open(path, "w") as file:
            file.write('#!/bin/sh\necho "error: unable to read qmaster name"\nexit 1\n')
        os.chmod(path, 0o755)
    done = local.call("submit", "--", "true", env=bare)
    assert done.returncode == 2
    assert done.stderr.startswith(f"infini-job: {bare['PATH']}/qsub is not from PBS (Grid Engine?)")


NO_CONFIGURATION = """#!/bin/sh
me=${0##*/}
printf "$me: %s\\n" "error: fetch_config: DNS SRV lookup failed" \
    "error: _establish_config_source: failed to fetch config" "fatal: Could not establish a configuration source" >&2
exit 1
"""


@pytest.fixture
def both(pbs_queue):
    """A PBS that works, and Slurm's commands without a configuration, in the words of 22.05."""
    for name in COMMANDS["slurm"]:
        path = os.path.join(pbs_queue.folder, "bin", name)
        with open(path, "w") as file:
            file.write(NO_CONFIGURATION)
        os.chmod(path, 0o755)
    return {"PATH": pbs_queue.env["PATH"], "TEST_BATCH": pbs_queue.folder, "INFINI_JOB_SCHEDULER": ""}


def test_a_slurm_that_does_not_answer_hides_no_pbs(local, both):
    said = "scontrol exited with 1: scontrol: fatal: Could not establish a configuration source"
    done = local.call("submit", "--print", "--", "true", env=both)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1].startswith("#PBS ")
    assert done.stderr == f"infini-job: slurm does not respond: {said}; using pbs, which does\n"
    done = local.call("clusters", env=both)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == f"slurm does not respond: {said}"
    assert lines[1].startswith("pbs 23.06")
    assert lines[-2].startswith("local ")
    found = json.loads(local.call("clusters", "--json", env=both).stdout)
    assert [(each["scheduler"], each["query_error"]) for each in found] == [
        ("slurm", said),
        ("pbs", ""),
        ("local", ""),
    ]
    done = local.call("submit", "--scheduler=slurm", "--", "true", env=both)
    assert (done.returncode, done.stderr) == (1, f"infini-job: {said}\n")


def test_what_each_scheduler_said_is_told_where_none_answers(local, both, pbs_queue):
    pbs_queue.fail("qmgr", "away")
    done = local.call("submit", "--", "true", env=both)
    assert done.returncode == 1
    assert done.stderr.startswith(
        "infini-job: no scheduler responds: slurm: scontrol exited with 1: scontrol: fatal: "
    )
    assert "; pbs: qmgr " in done.stderr
    assert done.stderr.endswith("; use --scheduler=local to run it on this machine\n")
    assert local.is_empty()


def test_a_job_whose_scheduler_does_not_answer_keeps_no_other_from_its_end(local, both, pbs_queue, bell):
    """Of several that are to be cancelled."""
    name = local.submit("--", "sh", "-c", f"echo up > {bell.path}; exec sleep 1000")
    bell.hear(1)
    other = local.submit("--scheduler=pbs", "--", "sleep", "1000", env=both)
    os.unlink(f"{pbs_queue.folder}/bin/qsub")
    done = local.call("cancel", other, name, env={**both, "PATH": f"{pbs_queue.folder}/bin:/usr/bin:/bin"})
    assert done.returncode == 2
    assert done.stderr.startswith(f"infini-job: {other}: --scheduler=pbs: qsub is not on PATH")
    assert local.wait(name)["state"] == "CANCELLED"


def test_what_a_directory_knows_needs_no_scheduler(local, both, pbs_queue):
    """Of a job that has ended, on a machine without the commands of its scheduler."""
    name = local.submit("--scheduler=pbs", "--", "sh", "-c", "echo hello", env=both)
    pbs_queue.ended()
    os.unlink(f"{pbs_queue.folder}/bin/qsub")
    env = {**both, "PATH": f"{pbs_queue.folder}/bin:/usr/bin:/bin"}
    done = local.call("logs", "-f", name, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    assert "hello" in done.stdout
    assert local.call("cancel", name, env=env).returncode == 0
    script = f"import infini_run as ir; print(ir.find_job({name!r}, dir={str(local.path)!r}).wait().headline)"
    done = subprocess.run([sys.executable, "-c", script], env={**local.env, **env}, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("COMPLETED\n", "")


def test_print_shows_the_script_and_submits_nothing(local):
    done = local.call("submit", "--print", "--slots=2", "--", "true")
    assert done.returncode == 0
    assert done.stdout.startswith("#!/bin/sh\n")
    assert "/infini_run/jobs/start.py " in done.stdout
    assert local.is_empty()


def test_check_of_this_machine_is_always_good(local):
    done = local.call("submit", "--check", "--", "true")
    assert (done.returncode, done.stderr) == (0, "infini-job: local can run this job\n")
    assert local.is_empty()


def test_a_warning_before_no_limit_is_told(local):
    """Nothing ends a job on this machine but its own --time."""
    done = local.call("submit", "--warn=5m", "--print", "--", "true")
    assert (done.returncode, done.stderr) == (
        0, "infini-job: --warn: no effect on this machine without a limit; add --time=TIME\n",
    )  # fmt: skip
    assert local.call("submit", "--warn=5m", "--time=1h", "--print", "--", "true").stderr == ""


def test_a_warning_before_no_limit_of_a_queue_is_told(local, pbs_queue):
    words = ("submit", "--scheduler=pbs", "--slot_type=cpu", "--warn=5m", "--print", "--", "true")
    done = local.call(*words, env=pbs_queue.env)
    assert done.stderr == "infini-job: --warn: no effect in workq without a limit; add --time=TIME\n"
    pbs_queue.set(pools={"workq": {"resources_default": {"walltime": "01:00:00"}}})
    assert local.call(*words, env=pbs_queue.env).stderr == ""


SLOW = {"site", "enum", "signal", "re", "json", "subprocess", "socket", "shutil", "tempfile", "threading", "shlex",
        "ctypes", "contextlib", "typing", "dataclasses", "pathlib"}  # fmt: skip
SUBMIT = ("submit", "--scheduler=pbs", "--slot_type=cpu", "--print", "--", "true")


@pytest.mark.parametrize("words", [
    ("infini_run/jobs/start.py", "/no/such/job"),
    ("-c", "from infini_run.jobs.cli import main; main()", *SUBMIT),
], ids=["inside", "submit"])  # fmt: skip
def test_what_starts_a_job_imports_nothing_that_is_slow(pbs_queue, tmp_path, words):
    """Without site, as bin/infini-job and a job's script do it: they stand before a rank's first line."""
    root = Path(infini_run.__file__).parent.parent
    found = f"{root}:{Path(_cffi_backend.__file__).parent}"
    env = {**pbs_queue.env, "PYTHONPATH": found, "INFINI_JOB_DIR": str(tmp_path)}
    argv = [sys.executable, "-S", "-X", "importtime", *words]
    done = subprocess.run(argv, cwd=root, env=env, capture_output=True, text=True, check=False)
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert {"infini_run.errors", "infini_run.system.shell"} <= loaded, done.stderr
    assert not SLOW & loaded


def test_all_that_is_wrong_is_told_at_once(slurm_queue, local):
    env = {"PATH": slurm_queue.env["PATH"], "TEST_BATCH": slurm_queue.folder, "INFINI_JOB_SCHEDULER": "slurm"}
    words = ("--pool=nosuch", "--options=--nodes=3 --gpus=4")
    done = local.call("submit", *words, "--", "true", env=env)
    assert done.returncode == 2
    assert [line.split(":")[1].strip() for line in done.stderr.splitlines()] == [
        "--pool=nosuch", "--nodes=3", "--gpus=4",
    ]  # fmt: skip


def test_clusters_says_what_is_here(slurm_queue, local):
    env = {"PATH": slurm_queue.env["PATH"], "TEST_BATCH": slurm_queue.folder, "INFINI_JOB_SCHEDULER": ""}
    done = local.call("clusters", env=env)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("slurm 22.05")
    assert lines[0].endswith("select/cons_tres, GPUs as a resource, no accounting")
    assert lines[1] == "  debug (default): 4 nodes x 8 gpus x 64 cpus"
    assert lines[2] == "  short: 4 nodes x 8 gpus x 64 cpus, up to 1 h"
    assert lines[3].startswith("local ")
    found = json.loads(local.call("clusters", "--json", env=env).stdout)
    assert [each["scheduler"] for each in found] == ["slurm", "local"]
    assert found[0]["pools"][0]["kinds"][0]["gpus"] == 8


def test_clusters_says_every_kind_of_node(slurm_queue, local):
    few, many = {"cpus": 32, "gpus": 4}, {"cpus": 64, "gpus": 8}
    slurm_queue.set(nodes={"a1": many, "a2": many, "b1": few, "c1": {"cpus": 16}})
    env = {"PATH": slurm_queue.env["PATH"], "TEST_BATCH": slurm_queue.folder, "INFINI_JOB_SCHEDULER": ""}
    lines = local.call("clusters", env=env).stdout.splitlines()
    assert lines[1] == "  debug (default): 2 nodes x 8 gpus x 64 cpus, 1 node x 4 gpus x 32 cpus, 1 node x 16 cpus"


def test_submit_says_it_in_json(local):
    done = local.call("submit", "--json", "--slots=2", "--", "true")
    said = json.loads(done.stdout)
    assert said["scheduler"] == "local"
    assert said["folder"] == str(local.path / said["name"])
    local.wait(said["name"])


def test_flags_of_other_verbs_may_come_after_the_job(local):
    name = local.submit("--slots=2", "--", "sh", "-c", "echo from $RANK")
    local.wait(name)
    assert local.call("logs", name, "--rank=1").stdout == "[rank 1] from 1\n"
    assert local.call("status", name, "--json").returncode == 0


def test_variables_stand_for_flags(local):
    done = local.call("submit", "--print", "--", "true", env={"INFINI_JOB_SLOTS": "0"})
    assert done.stderr.startswith("infini-job: INFINI_JOB_SLOTS=0: expected 1")


def test_help_fits_and_names_every_flag():
    for verb, flags in VERBS.items():
        text = help_text(verb)
        assert all(len(line) <= 79 for line in text.splitlines())
        assert all(f"--{flag.name}" in text or f"--[no]{flag.name}" in text for flag in flags)
    text = help_text("")
    assert all(len(line) <= 79 for line in text.splitlines())
    assert all(f"  {verb} " in text for verb in VERBS)


def test_help_and_version_are_answers(local):
    assert local.call("--help").stdout.startswith("usage: infini-job VERB")
    assert local.call("submit", "--help").stdout.startswith("usage: infini-job submit")
    assert local.call("--help", "status").stdout.startswith("usage: infini-job status")
    for words in (("--help=slots",), ("--help", "slots"), ("--help", "--slots")):
        shown = local.call("submit", *words).stdout.splitlines()
        assert (shown[0].split()[0], shown[-1].split()) == ("--slots=N", ["variable:", "INFINI_JOB_SLOTS"])
    assert local.call("--version").stdout.startswith("infini-job ")


def test_a_file_that_cannot_be_written_is_one_line(local, bell):
    name = local.submit("--", "sh", "-c", f"echo up >{bell.path}; exec sleep 1000")
    bell.hear(1)
    full = ["prlimit", "--fsize=0", *JOB, "cancel", name]
    done = subprocess.run(full, env=local.env, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert done.returncode == 1
    assert done.stderr == f"infini-job: {local.path / name}/cancelled: File too large\n"
    assert local.call("cancel", name).returncode == 0
    assert local.wait(name)["state"] == "CANCELLED"


def test_a_reader_that_has_enough_is_nobodys_failure(local):
    name = local.submit("--", "sh", "-c", "yes | head -c 1000000")
    local.wait(name)
    script = f"{' '.join(JOB)} logs {name} | head -1"
    done = subprocess.run(["sh", "-c", script], env=local.env, capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.stdout, done.stderr) == ("[rank 0] y\n", "")


@pytest.mark.rows(8)
@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("submit", "--wait", "--", "sh", "-c", "exit 3"), 3),
        (("submit", "--wait", "--json", "--", "sh", "-c", "exit 3"), 3),
        (("submit", "--print", "--", "true"), 0),
        (("list",), 0),
        (("list", "--json"), 0),
        (("status", "NAME"), 0),
        (("status", "NAME", "ir-0123456789"), 2),
        (("logs", "NAME"), 0),
        (("clusters",), 0),
        (("cancel", "ir-0123456789"), 2),
        (("frobnicate",), 2),
        (("--help",), 0),
        (("--version",), 0),
        (("--completion=bash",), 0),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_gone_reader_changes_no_exit_code(local, words, code):
    name = local.submit("--", "echo", "said")
    local.wait(name)
    words = [name if word == "NAME" else word for word in words]
    for streams in (("stdout",), ("stderr",), ("stdout", "stderr")):
        reader, writer = os.pipe()
        os.close(reader)
        given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | dict.fromkeys(streams, writer)
        done = subprocess.run([*JOB, *words], env=local.env, text=True, timeout=LIMIT_S, **given)
        os.close(writer)
        assert done.returncode == code, streams
        assert "Error" not in (done.stderr or ""), done.stderr


def test_wait_has_a_line_that_lives_on_a_terminal(local, tmp_path, bell):
    os.mkfifo(tmp_path / "go")
    script = f"echo up > {bell.path}; read word < {tmp_path}/go; exit 3"
    window = Window("submit", "--wait", "--", "sh", "-c", script, program=JOB, columns=160, **local.env)
    try:
        bell.hear(1)
        window.see(lambda: window.text[1].endswith("  RUNNING"))
        (tmp_path / "go").write_text("on\n")
        assert window.wait() == 3
        assert window.text[1].startswith("FAILED exit 3 ")
        assert window.text[2] == ""
    finally:
        window.close()


@pytest.mark.parametrize("words", ["submit --wait -- sleep 1000", "logs -f NAME"], ids=["submit", "logs"])
def test_ctrl_c_ends_loop_around_who_waits_and_not_job(words, local):
    name = local.submit("--", "sh", "-c", "echo up; exec sleep 1000")
    local.wait(name, "RUNNING")
    loop = f"for i in 1 2 3; do echo begin; {shlex.join(JOB)} {words.replace('NAME', name)}; done; echo still here"
    window = Window("-c", loop, program=["bash"], columns=160, **local.env)
    try:
        window.see(lambda: any("up" in line or "RUNNING" in line for line in window.text))
        os.write(window.master, b"\x03")
        assert window.wait() == 128 + signal.SIGINT
        assert window.seen.count(b"begin") == 1
        assert b"still here" not in window.seen
    finally:
        window.close()
        for job in json.loads(local.call("list", "--json").stdout):
            assert job["state"] == "RUNNING"
            local.call("cancel", job["name"])
            local.wait(job["name"])


# ---- pure


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("4h", 14400), ("90m", 5400), ("30", 30), ("1-12:00:00", 129600), ("00:01:05", 65), ("500ms", 1)],
)
def test_times_are_read_as_people_and_schedulers_write_them(text, seconds):
    assert _time(text) == seconds


@pytest.mark.parametrize(("text", "mib"), [("16G", 16384), ("500M", 500), ("1T", 1 << 20), ("2048", 2048), ("1K", 1)])
def test_memory_is_mib(text, mib):
    assert _memory(text) == mib


def test_a_warning_is_a_time_and_maybe_a_signal():
    assert _warn("5m") == (12, 300)
    assert _warn("USR1@90") == (10, 90)
    assert _warn("off") == (12, 0)


def test_variables_are_words_of_a_shell():
    assert _variables("A=1 B='x y' C=a=b D=") == (("A", "1"), ("B", "x y"), ("C", "a=b"), ("D", ""))


def test_a_deadline_is_slurms_local_time():
    assert parse("N/A\n") == parse("") == parse("Unknown") == NEVER
    assert parse("2026-11-21T23:15:02\n") - parse("2026-11-21T23:14:02") == 60


@pytest.mark.parametrize(
    ("kind", "is_other"),
    [("ext4", False), ("tmpfs", False), ("overlay", False), ("nfs4", True), ("fuse.sshfs", True), ("wekafs", True),
     ("dvs", True), ("ocfs2", True), ("fuse.juicefs", True), ("of_tomorrow", True)],
)  # fmt: skip
def test_only_what_is_known_to_be_this_machines_tells_of_all_that_changes(kind, is_other):
    assert is_others(kind_of("/jobs/ir-1", f"1 0 8:1 / /jobs rw - {kind} x rw\n")) is is_other


def test_a_file_system_is_known_by_its_mount():
    mounts = (
        "22 1 0:20 / / rw shared:1 - ext4 /dev/sda1 rw\n"
        "30 22 0:40 / /home rw,noatime shared:2 master:3 - nfs4 server:/home rw\n"
        "31 22 0:41 / /scratch\\040old rw - lustre a@tcp:/x rw\n"
        "32 22 0:42 / /home/local rw - fuse.sshfs x rw\n"
    )
    found = [kind_of(path, mounts) for path in ("/tmp/x", "/home/me", "/homes", "/scratch old/j", "/home/local/x")]
    assert found == ["ext4", "nfs4", "ext4", "lustre", "sshfs"]


@pytest.mark.parametrize(
    ("state", "code", "failures", "restarts", "again"),
    [
        ("COMPLETED", 0, 0, 3, False), ("FAILED", 1, 0, 0, False), ("FAILED", 1, 0, 1, True),
        ("FAILED", 1, 1, 1, False), ("FAILED", 85, 5, 0, True), ("NODE_FAIL", 1, 0, 1, True),
        ("CANCELLED", 143, 0, 3, False), ("TIMEOUT", 143, 0, 3, False), ("OOM", 137, 0, 1, True),
    ],
)  # fmt: skip
def test_who_is_run_again(state, code, failures, restarts, again):
    ending = JobResult(state=state, code=code, node="n", rank=0, end_s=0.0)
    assert bool(restart_reason(ending, failures=failures, restarts=restarts)) is again


def test_the_python_api_has_no_names_that_the_command_needs():
    code = "import sys, infini_run; print([n for n in sys.modules if n.startswith('infini_run.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--json", "list"), 0, "[]\n"),
        (("--dir", "list", "list", "--json"), 0, "[]\n"),
        (("--json", "status", "--json"), 0, "[]\n"),
        (("--nosuch", "list"), 2, "unknown flag --nosuch"),
        (("--time=soon", "submit", "true"), 2, "--time=soon: not a time from 0"),
        (("--json",), 2, "--json: missing command before the flag; use submit, status,"),
        (("--json", "lits"), 2, "--json: missing command before the flag; use submit, status,"),
    ],
)
def test_flags_may_stand_before_the_verb(words, code, said, bare, tmp_path):
    env = {**os.environ, **bare, "INFINI_JOB_DIR": str(tmp_path)}
    done = subprocess.run([*JOB, *words], capture_output=True, text=True, env=env, cwd=tmp_path, timeout=LIMIT_S)
    assert (done.returncode, said in done.stdout + done.stderr) == (code, True), done.stderr


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(
    "words", [("list",), ("submit", "--wait", "--", "true"), ("logs", "ir-00000000aa"), ("--help",)]
)
def test_what_the_caller_has_closed_is_dev_null(local, closed, words):
    made(local.path, "ir-00000000aa", scheduler="local")
    script = f'exec "$@" {closed}'
    done = subprocess.run(
        ["sh", "-c", script, "sh", *JOB, *words], env=local.env, capture_output=True, text=True, timeout=LIMIT_S * 2,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert (done.stdout if ">&-" in closed.split() else "") == ""
    if words[0] == "submit":
        (name,) = set(os.listdir(local.path)) - {"ir-00000000aa"}
        assert local.status(name)["headline"] == "COMPLETED"


@pytest.mark.parametrize("words", [(), ("--json",), ("--wait",)])
def test_a_job_whose_name_cannot_be_printed_is_named_on_stderr(local, words):
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*JOB, "submit", *words, "--", "true"], env=local.env, stdout=full, stderr=subprocess.PIPE, text=True,
            timeout=LIMIT_S * 2, check=False,
        )  # fmt: skip
    (name,) = os.listdir(local.path)
    said = f"infini-job: the output: No space left on device; submitted job {name}\n"
    assert (done.returncode, done.stderr) == (1, said)
    assert local.wait(name)["headline"] == "COMPLETED"


def test_a_directory_that_was_removed_is_named(local, tmp_path):
    def call(*words):
        (tmp_path / "gone").mkdir()
        script = 'cd "$1"; rmdir "$1"; shift; exec "$@"'
        return subprocess.run(
            ["sh", "-c", script, "sh", str(tmp_path / "gone"), *JOB, *words], env=local.env, capture_output=True,
            text=True, timeout=LIMIT_S * 2, check=False,
        )  # fmt: skip

    done = call("submit", "--", "true")
    said = "infini-job: the current directory was removed; add --cwd=/DIR for the ranks\n"
    assert (done.returncode, done.stderr) == (2, said)
    done = call("list", "--dir=jobs")
    said = "infini-job: --dir=jobs: the current directory was removed; use a path from /\n"
    assert (done.returncode, done.stderr) == (2, said)
    done = call("submit", "--wait", "--cwd=/", "--", "true")
    assert (done.returncode, done.stderr.count("Traceback")) == (0, 0), done.stderr
