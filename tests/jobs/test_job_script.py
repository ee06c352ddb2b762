"""The batch script: golden texts, and words that reach the other side as they were, through a real shell."""

from __future__ import annotations

import os
import shlex
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infini_run.errors import UsageError
from infini_run.jobs.request import pbs_script, slurm_script
from infini_run.jobs.request.container import Image
from infini_run.jobs.request.job_request import JobRequest
from infini_run.jobs.request.script import described, plan, render, render_node, render_srun
from infini_run.jobs.scheduler import Facts, Kind, pool_of
from infini_run.record import replace
from tests.support.paths import SUPPORT

GOLDEN = SUPPORT / "golden"
POOL = pool_of("gpu", [Kind(nodes=4, cpus=64, mem_mb=8000, gpus=8)], is_default=True)
SLURM = Facts(scheduler="slurm", has_tres=True, has_gres=True, pools=(POOL,))
PBS = Facts(scheduler="pbs", has_gres=True, pools=(POOL,))
LOCAL = Facts(scheduler="local")
PLAIN = JobRequest(
    name="ir-7f3a91c2e4", folder="/home/me/.infini/jobs/ir-7f3a91c2e4", command=("python", "train.py"),
    cwd="/home/me", python="/opt/env/bin/python", slots=16,
)  # fmt: skip
HERE = replace(PLAIN, slots=1, python="/bin/echo")
ODD = replace(PLAIN, folder='/home/me/it\'s 100% "odd" #1', python="/opt/my env/bin/python")
FULL = replace(PLAIN, pool="gpu", account="me", project="plan b", time_s=4 * 3600, cpus_per_slot=4,
               mem_mb_per_slot=500, restarts=2)  # fmt: skip
SCRIPTS = {
    "slurm": (PLAIN, SLURM),
    "slurm-full": (
        replace(FULL, options=("--comment=two words", "-x n1", "--gres=nvme:1", "--exclude=n2", "-H")),
        SLURM,
    ),
    "slurm-cpu": (replace(PLAIN, slot_type="cpu", slots=8, slots_per_node=4), SLURM),
    "slurm-no-gres": (replace(PLAIN, gres=False, slots_per_node=8), SLURM),
    "slurm-determined": (replace(PLAIN, layout="determined", slots_per_node=8, gpu_type="tesla"), SLURM),
    "slurm-spares": (replace(PLAIN, slots_per_node=8, spares=1), SLURM),
    "slurm-odd": (ODD, SLURM),
    "pbs": (PLAIN, PBS),
    "pbs-full": (replace(FULL, options=("-l select=1:arch=x,place=excl", "-W depend=afterok:1")), PBS),
    "pbs-determined": (replace(PLAIN, layout="determined", slots_per_node=8), PBS),
    "pbs-spares": (replace(PLAIN, slots_per_node=8, spares=1), PBS),
    "pbs-odd": (ODD, PBS),
    "local": (replace(PLAIN, slots=2, single_node=True), LOCAL),
}


def script_of(request, facts):
    return render(request, plan(request, facts), facts)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_this_text(name):
    """GOLDEN=write writes what is there now; look at the difference before it is committed."""
    path = GOLDEN / f"job-{name}.sh"
    text = script_of(*SCRIPTS[name])
    if os.environ.get("GOLDEN") == "write":
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_good_shell(name):
    done = subprocess.run(["sh", "-n"], input=script_of(*SCRIPTS[name]), text=True, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


NAMES = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0\n/"), min_size=1, max_size=40)


@given(NAMES)
def test_the_shell_runs_what_was_meant(name):
    """The last line's words arrive as they were: the interpreter is an echo."""
    text = script_of(replace(HERE, folder=f"/jobs/{name}"), LOCAL)
    done = subprocess.run(["sh"], input=text.encode(), capture_output=True, check=True)
    assert done.stdout == f"-m infini_run.jobs.allocation_main /jobs/{name}\n".encode()


def test_bytes_that_are_no_text_reach_the_other_side():
    folder = os.fsdecode(b"/jobs/\xff\xfe")
    text = os.fsencode(script_of(replace(HERE, folder=folder), LOCAL))
    done = subprocess.run(["sh"], input=text, capture_output=True, check=True)
    assert done.stdout == b"-m infini_run.jobs.allocation_main /jobs/\xff\xfe\n"


PRINTABLE = st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=30)


def split_by_qsub(line):
    """As qsub.c reads a directive (make_argv): blanks divide, both quotes join, a backslash is a character."""
    words, open_quote = [None], ""
    for char in line:
        if char == open_quote:
            open_quote = ""
        elif not open_quote and char in "'\"":
            open_quote, words[-1] = char, words[-1] or ""
        elif not open_quote and char.isspace():
            words += [None] if words[-1] is not None else []
        else:
            words[-1] = (words[-1] or "") + char
    assert not open_quote
    return [word for word in words if word is not None]


@given(st.lists(PRINTABLE, min_size=1, max_size=4))
def test_words_of_a_pbs_line_are_split_as_qsub_splits_them(words):
    assert split_by_qsub(" ".join(map(pbs_script.quoted, words))) == words


@given(st.lists(PRINTABLE, min_size=1, max_size=4))
def test_words_of_an_sbatch_line_are_quoted_for_a_shell_too(words):
    assert shlex.split(" ".join(map(slurm_script.quoted, words)), comments=True) == words


@pytest.mark.parametrize(
    ("folder", "pattern"),
    [("/j/a%j", "/j/a%%j"), ("/j/a\\b", "/j/a\\\\b"), ("/j/a\\b%j", "/j/a\\\\b%j"), ("/j/a%%\\", "/j/a%%\\\\")],
)
def test_output_pattern_of_slurm_names_folder_with_any_characters(folder, pattern):
    """As fname_create of 22.05.8 reads it; test_job_slurm_real.py asks Slurm itself."""
    (word,) = slurm_script.options(replace(PLAIN, folder=folder), plan(PLAIN, SLURM), f"{folder}/job.log")[1]
    assert word == f"--output={pattern}/job.log"


@pytest.mark.parametrize(("scheduler", "array"), [("pbs", ""), ("pbs", "0-3"), ("slurm", "0-3")])
def test_folder_that_scheduler_cannot_name_is_refused(scheduler, array):
    facts = {"pbs": PBS, "slurm": SLURM}[scheduler]
    with pytest.raises(UsageError, match=r"backslash.*; use another --dir"):
        plan(replace(PLAIN, folder="/j/a\\b", array=array), facts)


def test_a_script_for_pbs_says_at_once_what_it_has_to_say(tmp_path):
    text = script_of(replace(PLAIN, folder=str(tmp_path), python="/bin/echo"), PBS)
    done = subprocess.run(["sh"], input=text, text=True, capture_output=True, check=True)
    assert done.stdout == ""
    assert (tmp_path / "job.log").read_text() == f"-m infini_run.jobs.allocation_main {tmp_path}\n"


def test_a_directory_that_the_node_does_not_have_is_told(tmp_path):
    text = script_of(replace(PLAIN, folder=str(tmp_path / "gone")), PBS)
    done = subprocess.run(["sh"], input=text, text=True, capture_output=True, check=False)
    assert done.returncode
    assert "gone/job.log" in done.stderr


def test_a_directory_that_pbs_would_take_for_a_host_is_refused():
    with pytest.raises(UsageError, match="/a:b: PBS reads text before a : as a host; use another --dir"):
        plan(replace(PLAIN, folder="/a:b"), PBS)
    plan(replace(PLAIN, folder="/a:b"), SLURM)


IMAGE = Image(name="/images/it's.sif", runtime="apptainer", options=("--contain",))


def test_an_agent_is_started_in_the_container_with_the_words_that_it_gets(tmp_path):
    request = replace(PLAIN, container=IMAGE, folder=str(tmp_path), cwd=str(tmp_path))
    text = render_node(request, plan(request, SLURM))
    assert text.startswith("#!/bin/sh\nexec apptainer exec ")
    (tmp_path / "apptainer").write_text('#!/bin/sh\nfor word; do echo "$word"; done\n')
    (tmp_path / "apptainer").chmod(0o755)
    (tmp_path / "node").write_text(text)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    argv = ["sh", tmp_path / "node", "-c", "print(1, 2)", "$HOME"]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "exec", "--writable-tmpfs", f"--pwd={tmp_path}", "--no-eval", "--nv", f"--bind={tmp_path}", "--contain",
        "/images/it's.sif", "python3", "-c", "print(1, 2)", "$HOME",
    ]  # fmt: skip


def test_srun_is_told_of_the_container_and_the_rest_is_as_it_was(tmp_path):
    request = replace(PLAIN, container=replace(IMAGE, runtime="pyxis", name="nvcr.io/x/y:1"))
    (tmp_path / "ours").mkdir()
    (tmp_path / "real").mkdir()
    (tmp_path / "ours" / "srun").write_text(render_srun(request, plan(request, SLURM)))
    (tmp_path / "real" / "srun").write_text('#!/bin/sh\nfor word; do echo "$word"; done\n')
    for name in ("ours", "real"):
        (tmp_path / name / "srun").chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}/ours:{tmp_path}/real:{os.environ['PATH']}"}
    done = subprocess.run(["srun", "--nodes=2", "a b"], env=env, capture_output=True, text=True, check=True)
    said = done.stdout.splitlines()
    assert said[0] == "--container-image=nvcr.io#x/y:1"
    assert said[-3:] == ["--contain", "--nodes=2", "a b"]
    assert render_srun(PLAIN, plan(PLAIN, SLURM)) == ""


def test_without_a_container_or_where_srun_starts_it_there_is_no_such_script():
    assert render_node(PLAIN, plan(PLAIN, SLURM)) == ""
    request = replace(PLAIN, container=replace(IMAGE, runtime="pyxis"))
    assert render_node(request, plan(request, SLURM)) == ""
    with pytest.raises(
        UsageError,
        match="--runtime=pyxis: needs srun, which --scheduler=pbs lacks; use --runtime=apptainer, podman, or enroot",
    ):
        plan(request, PBS)


def test_what_is_wrong_with_a_container_is_told_with_the_rest():
    with pytest.raises(UsageError) as told:
        plan(replace(PLAIN, slots=10, container=replace(IMAGE, binds=(":",)), options=("-N4",)), SLURM)
    assert [line.split(":")[0] for line in str(told.value).splitlines()] == ["--slots=10", "--bind=", "-N4"]


@pytest.mark.parametrize("field", ["pool", "account", "project"])
def test_a_line_break_cannot_become_a_directive(field):
    with pytest.raises(UsageError, match=f"--{field}='a.n#SBATCH -N9': expected one line of printable text"):
        plan(replace(PLAIN, **{field: "a\n#SBATCH -N9"}), replace(SLURM, pools=()))


def test_a_directory_with_a_line_break_is_refused():
    with pytest.raises(UsageError, match="with a line break in its name"):
        plan(replace(PLAIN, folder="/a\nb"), SLURM)


DESCRIBED = [
    (PLAIN, "2 nodes x 8 gpus"),
    (replace(PLAIN, slots=1), "1 node x 1 gpu"),
    (replace(PLAIN, slot_type="cpu", slots=4), "1 node x 4 cpus"),
    (replace(PLAIN, layout="determined", slots_per_node=8), "16 gpus on 1 to 16 nodes"),
]


@pytest.mark.parametrize(("request_", "wanted"), DESCRIBED)
def test_a_layout_is_told_in_words(request_, wanted):
    assert described(plan(request_, SLURM)) == wanted


@pytest.mark.parametrize(
    ("changes", "facts", "said"),
    [
        ({"options": ("-W", "tolerate_node_failures=none")}, PBS, "use --spares=N of infini-job"),
        ({"container": Image(name="i", runtime="pyxis")}, SLURM, "--spares=1 with --runtime=pyxis: nothing outside"),
    ],
)
def test_what_contradicts_spares_is_refused(changes, facts, said):
    request = replace(PLAIN, slots_per_node=8, spares=1, scheduler=facts.scheduler, **changes)
    with pytest.raises(UsageError) as told:
        plan(request, facts)
    assert said in str(told.value)


@pytest.mark.parametrize("image", [None, Image(name="i", runtime="podman")])
def test_an_agent_of_a_job_with_spares_is_followed_by_who_looks_for_the_head(image):
    """Only where it does not end well, and only on Slurm: PBS ends such a job by itself."""
    request = replace(PLAIN, slots_per_node=8, spares=1, scheduler="slurm", container=image, array="0-3")
    first, second = render_node(request, plan(request, SLURM)).splitlines()[1:]
    assert first.endswith(' "$@" --exit_if_lost=1 && exit')
    words = f"/opt/env/bin/python -m infini_run.jobs.lost_head {PLAIN.folder} {PLAIN.name}"
    assert second == f'cd / && exec {words} "$SLURM_ARRAY_TASK_ID" -- "$@"'
    on_pbs = replace(request, scheduler="pbs", container=None)
    assert render_node(on_pbs, plan(on_pbs, PBS)) == ""
