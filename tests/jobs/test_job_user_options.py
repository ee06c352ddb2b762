"""Users' options for sbatch and qsub: read as those read them, merged with ours, refused where they are ours."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infini_run.errors import UsageError
from infini_run.jobs.request import pbs_script, slurm_script
from infini_run.jobs.request.job_request import JobRequest
from infini_run.jobs.request.script import plan
from infini_run.jobs.request.user_options import MAYBE, NONE, VALUE, read
from infini_run.jobs.scheduler import Facts, Kind, pool_of

POOL = pool_of("gpu", [Kind(nodes=4, cpus=64, mem_mb=8000, gpus=8)], is_default=True)
FACTS = {
    "slurm": Facts(scheduler="slurm", has_tres=True, has_gres=True, pools=(POOL,)),
    "pbs": Facts(scheduler="pbs", has_gres=True, pools=(POOL,)),
}


def ask(*options, slots=16, **changes):
    return JobRequest(
        name="ir-1", folder="/f", command=("x",), cwd="/", python="/p", slots=slots, options=options, **changes
    )


def pairs(*texts, table=slurm_script.OPTIONS):
    found = read(texts, table)
    assert found.problems == ()
    return [(option.name, option.value) for option in found.options]


def rendered(module, facts, *options, **changes):
    request = ask(*options, **changes)
    layout = plan(request, facts)
    return [" ".join(words) for words in module.options(request, layout, "/f/log")]


def problems(kind, *options, **changes):
    with pytest.raises(UsageError) as told:
        plan(ask(*options, **changes), FACTS[kind])
    return str(told.value).splitlines()


# ---- reading
SPELLED = [
    ("--constraint=a100", [("constraint", "a100")]),
    ("--constraint a100", [("constraint", "a100")]),
    ("-C a100", [("constraint", "a100")]),
    ("-Ca100", [("constraint", "a100")]),
    ("-HCa100", [("hold", None), ("constraint", "a100")]),
    ("--constr=a100", [("constraint", "a100")]),
    ("--constr a100", [("constraint", "a100")]),
    ("--comment=two words", [("comment", "two words")]),
    ("--comment 'two words'", [("comment", "two words")]),
    ("--comment=it's -N4", [("comment", "it's -N4")]),
    ("-C a100 -H --nice", [("constraint", "a100"), ("hold", None), ("nice", None)]),
    ("--nice=5", [("nice", "5")]),
    ("-koff", [("no-kill", "off")]),  # its value is glued to it or there is none (sbatch 22.05: -kN2 is -k with N2)
    ("-k", [("no-kill", None)]),
    ("-s --exclusive=user", [("oversubscribe", None), ("exclusive", "user")]),
    ("--begin=", [("begin", "")]),
    ("-w -x", [("nodelist", "-x")]),  # as getopt does
    ("--plugin-option=1", [("plugin-option", "1")]),
    ("--plugin-option 1 -H", [("plugin-option", "1"), ("hold", None)]),
    ("--plugin-flag -H", [("plugin-flag", None), ("hold", None)]),
]


@pytest.mark.parametrize(("text", "wanted"), SPELLED, ids=[text for text, _ in SPELLED])
def test_an_option_is_read_as_sbatch_reads_it(text, wanted):
    assert pairs(text) == wanted


def test_options_may_be_words_of_their_own_or_lines_of_several():
    assert pairs("-C", "a100", "-H -x n1") == [("constraint", "a100"), ("hold", None), ("exclude", "n1")]


def test_options_of_qsub_have_one_letter():
    assert pairs("-a 1200 -hlselect=1:mem=4gb", "-mabe", table=pbs_script.OPTIONS) == [
        ("a", "1200"), ("h", None), ("l", "select=1:mem=4gb"), ("m", "abe"),
    ]  # fmt: skip


UNREADABLE = [
    ("--node=2", "--node=2: ambiguous; use one of --nodefile, --nodelist, --nodes"),
    ("--hold 'a", "--hold 'a: a shell cannot read it: no closing quotation"),
    ("--hold=1", "--hold=1: --hold takes no value"),
    ("--constraint", "--constraint: missing value"),
    ("-x", "-x: missing value"),
    ("-Hx", "-x: missing value"),
    ("a100", "a100: not an option; use quotes around a value with blanks"),
    ("--", "--: not an option"),
    ("-", "-: not an option"),
    ("-Ca\nb", r"'-Ca\nb': expected one line of printable text"),
]


@pytest.mark.parametrize(("text", "wanted"), UNREADABLE, ids=[text for text, _ in UNREADABLE])
def test_what_is_no_option_is_told(text, wanted):
    assert read([text], slurm_script.OPTIONS).problems == (wanted,)


LETTERS = {name: letter for letter, (name, _) in slurm_script.OPTIONS.shorts.items()}
VALUES = st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1)


@st.composite
def spelled(draw):
    """An option of the table and its value, and one way to write it."""
    name = draw(st.sampled_from(sorted(slurm_script.OPTIONS.longs)))
    follows = slurm_script.OPTIONS.longs[name]
    value = None if follows == NONE else draw(VALUES if follows == VALUE else st.none() | VALUES)
    letter = LETTERS.get(name)
    forms = [[f"--{name}"] if value is None else [f"--{name}={value}"]]
    if value is not None and follows == VALUE:
        forms.append([f"--{name}", value])
    if letter:
        if value is None or " " not in value.partition("=")[0]:  # else it would be a line
            forms.append([f"-{letter}"] if value is None else [f"-{letter}{value}"])
        if value is not None and follows != MAYBE:
            forms.append([f"-{letter}", value])
    return name, value, draw(st.sampled_from(forms))


def words_of(options):
    return [word for _, _, words in options for word in words]


@given(st.lists(spelled(), max_size=6))
def test_a_line_is_its_words(options):
    """Where its first word is an option without a value glued to it by =."""
    words = ["-H", *words_of(options)]
    assert pairs(shlex.join(words)) == [("hold", None), *((name, value) for name, value, _ in options)]


@given(st.lists(spelled(), max_size=6))
def test_every_spelling_of_every_option_is_read_the_same(options):
    assert pairs(*words_of(options)) == [(name, value) for name, value, _ in options]


@given(st.lists(spelled(), max_size=6))
def test_options_that_are_not_ours_come_out_as_they_went_in(options):
    kept = [one for one in options if one[0] not in slurm_script.REASONS and one[0] not in ("gres", "exclude")]
    ours = read(words_of(kept), slurm_script.OPTIONS).without()
    assert [(o.name, o.value) for o in ours] == pairs(*(word for o in ours for word in o.argv))


@given(st.lists(spelled(), min_size=1, max_size=6))
def test_every_spelling_of_an_option_that_is_ours_is_refused(options):
    found = slurm_script.refusals(read(words_of(options), slurm_script.OPTIONS).options, slurm_script.REASONS)
    assert [line.rpartition(": ")[2] for line in found] == [
        slurm_script.REASONS[name].rpartition(": ")[2] for name, _, _ in options if name in slurm_script.REASONS
    ]


# ---- what is ours
FORBIDDEN = [
    "--nodes=4", "--nodes 4", "-N4", "-N 4", "--ntasks=2", "-n2", "--ntasks-per-node=2", "--tasks-per-node=2",
    "--gpus=4", "-G4", "--gpus-per-node=8", "--gpus-per-n=8", "--gpus-per-task=1", "--cpus-per-task=4", "-c4",
    "--cpus-per-gpu=8", "--output=x", "-ox", "--error=x", "-e x", "--chdir=/", "-D /", "--partition=x", "-px",
    "--requeue", "--no-requeue", "--job-name=x", "-Jx", "--wckey=x", "--account=x", "-Ax", "--time=5", "-t5",
    "--array=1-3", "-a1-3", "--parsable", "--wait", "-W", "--wrap=x", "-h", "--help", "--signal=USR1",
    "--export=NONE", "--clusters=all", "-M all", "-k", "--test-only", "--container=x", "--container-image=x",
    "--open-mode=truncate", "--input=x",
]  # fmt: skip


@pytest.mark.parametrize("text", FORBIDDEN)
def test_an_option_of_slurm_that_is_ours_is_refused_with_a_reason(text):
    (line,) = problems("slurm", text)
    said, _, reason = line.partition(": ")
    assert said == text
    assert len(reason) > 10


PBS_FORBIDDEN = [
    "-c n", "-W umask=022,block=true",
    "-C x", "-e x", "-G", "-I", "-j oe", "-J 1-3", "-k oe", "-N x", "-o x", "-q x", "-r y", "-R o",
    "-S /bin/sh", "-v A=1", "-V", "-X", "-z", "-A x", "-P x", "-W block=true", "-l nodes=2",
]  # fmt: skip


@pytest.mark.parametrize("text", PBS_FORBIDDEN)
def test_an_option_of_pbs_that_is_ours_is_refused_with_a_reason(text):
    (line,) = problems("pbs", text)
    assert line.startswith(f"{text}: ")


def test_all_that_is_wrong_is_told_at_once_and_so_is_the_size():
    found = problems("slurm", "-N4 --foo=1 -G2", "--gres=gpu:2,nvme:1", "x", slots=10)
    assert [line.split(": ")[0] for line in found] == ["--slots=10", "x", "-N4", "-G2", "--gres=gpu:2,nvme:1"]


def test_memory_is_said_once():
    assert problems("slurm", "--mem=4G", mem_mb_per_slot=100) == ["--mem=4G: use --mem_per_slot of infini-job"]
    assert "--mem=4G" in rendered(slurm_script, FACTS["slurm"], "--mem=4G")
    assert problems("pbs", "-l select=1:mem=4gb", mem_mb_per_slot=100) == [
        "-l select=1:mem=4gb: mem: use --mem_per_slot of infini-job"
    ]


def test_a_job_of_several_parts_is_refused():
    line = "cannot be: all nodes of a job are equal; use #SBATCH hetjob in a script that runs infini-run"
    assert problems("slurm", "hetjob") == [f"hetjob: {line}"]
    assert problems("slurm", "-C a : -C b : -C c") == [f":: {line}"]


# ---- merging
GRES = [
    (("--gres=nvme:1",), "--gres=gpu:8,nvme:1"),
    (("--gres=nvme:1", "--gres nvme:1,lustre:2"), "--gres=gpu:8,nvme:1,lustre:2"),
    ((), "--gres=gpu:8"),
]


@pytest.mark.parametrize(("options", "wanted"), GRES)
def test_gres_of_the_user_is_one_with_ours(options, wanted):
    found = [line for line in rendered(slurm_script, FACTS["slurm"], *options) if "gres" in line]
    assert found == [wanted]


@pytest.mark.parametrize("value", ["gpu:1", "nvme:1,gpu:a100:2", "GPU:1", "gres:gpu:1", "gres/gpu:1", "gpu"])
def test_gres_is_not_to_have_gpus(value):
    assert problems("slurm", f"--gres={value}") == [
        f"--gres={value}: GPUs are computed from --slots; use --gpu_type for their type"
    ]


@pytest.mark.parametrize("value", ["none", "", "nvme:1,,x", "help"])
def test_gres_that_is_no_list_of_resources_is_refused(value):
    assert problems("slurm", f"--gres={value}")[0].endswith("expected names of resources, such as nvme:1")


def test_all_excludes_are_one_option():
    found = rendered(slurm_script, FACTS["slurm"], "-x node[1-2]", "--exclude=node4", "-xnode4", "-C a -C a")
    assert [line for line in found if "exclude" in line] == ["--exclude=node[1-2],node4"]
    assert found[-1] == "-C a"  # once


def test_users_options_come_after_ours_as_they_were_written():
    found = rendered(
        slurm_script,
        FACTS["slurm"],
        "--qos=high",
        "-H",
        "--foo bar",
        pool="gpu",
        account="me",
        project="a b",
        time_s=90,
    )
    assert found == [
        "--job-name=ir-1", "--output=/f/log", "--open-mode=append", "--no-requeue", "--partition=gpu", "--account=me",
        "--wckey=a b", "--time=0:02:00", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-gpu=8", "--gres=gpu:8",
        "--qos=high", "-H", "--foo bar",
    ]  # fmt: skip


SELECTS = [
    (("-l select=1:mem=4gb",), {}, "select=2:ncpus=64:ngpus=8:mem=4gb", "place=scatter"),
    (("-l select=mem=4gb:arch=a", "-l select=mem=4gb"), {}, "select=2:ncpus=64:ngpus=8:mem=4gb:arch=a",
     "place=scatter"),
    (("-l place=excl",), {}, "select=2:ncpus=64:ngpus=8", "place=scatter:excl"),
    (("-l place=scatter:excl:group=rack",), {}, "select=2:ncpus=64:ngpus=8", "place=scatter:excl:group=rack"),
    (("-lselect=1:arch=x,place=excl",), {}, "select=2:ncpus=64:ngpus=8:arch=x", "place=scatter:excl"),
    (("-l select=9:ngpus=1:mem=4gb:ncpus=3", "-l place=pack:excl"), {"layout": "determined", "slots_per_node": 8},
     "select=2:ngpus=8:mem=4gb:ncpus=3", "place=excl"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "changes", "chunks", "place"), SELECTS)
def test_select_and_place_of_the_user_are_one_with_ours(options, changes, chunks, place):
    found = [line for line in rendered(pbs_script, FACTS["pbs"], *options, **changes) if line.startswith("-l ")]
    assert found == [f"-l {chunks}", f"-l {place}"]


RESOURCES = st.dictionaries(
    st.sampled_from(["mem", "arch", "scratch", "accelerator", "bigmem"]), st.sampled_from(["1gb", "x", "true", "a-b"])
)


@given(wanted=RESOURCES, lines=st.integers(1, 3), place=st.sets(st.sampled_from(["excl", "group=rack", "scatter"])))
def test_every_resource_of_a_chunk_is_said_once_however_it_was_written(wanted, lines, place):
    items = [f"{name}={value}" for name, value in wanted.items()]
    options = [f"-lselect={':'.join(['1', *items[n:]])}" for n in range(lines)]
    options += [f"-l place={':'.join(sorted(place))}"] if place else []
    found = [line for line in rendered(pbs_script, FACTS["pbs"], *options) if line.startswith("-l ")]
    assert found == [
        ":".join(["-l select=2", "ncpus=64", "ngpus=8", *items]),
        ":".join(["-l place=scatter", *(each for each in ("excl", "group=rack") if each in place)]),
    ]


@given(st.lists(st.text(max_size=20), max_size=4))
def test_any_words_are_options_or_problems(words):
    for table in (slurm_script.OPTIONS, pbs_script.OPTIONS):
        found = read(words, table)
        assert len(found.options) + len(found.problems) >= bool(words)
        assert all(problem.isprintable() for problem in found.problems)


CHUNKS = [
    (
        "-l select=2:mem=4gb",
        "computed from the slots; use --slots and --slots_per_node, and -l select=1:... for each node",
    ),
    ("-l select=1:ngpus=4", "ngpus: computed from the slots; use --slots and --slots_per_node"),
    ("-l select=1:ncpus=4", "ncpus: use --cpus_per_slot of infini-job"),
    ("-l select=1:mpiprocs=4", "mpiprocs: each node runs one launcher; drop it"),
    ("-l select=1:mem=4gb+1:mem=8gb", "expected one chunk, as all nodes are alike"),
    ("-l select=1:mem", "expected name=value, not 'mem'"),
    ("-l place=pack", "conflicts with one part of the job per node; use scatter"),
    ("-l place=nowhere", "'nowhere': unknown placement; use scatter, excl, exclhost, shared, or group=RESOURCE"),
    ("-l walltime=1:00:00", "use --time of infini-job"),
    ("-l mem=4gb", "per node; use -l select=1:mem=4gb"),
    ("-l ncpus=4", "computed from the slots; use --slots and --slots_per_node"),
    ("-y", "unknown option of qsub"),
]


@pytest.mark.parametrize(("text", "wanted"), CHUNKS)
def test_what_a_chunk_cannot_say_is_refused(text, wanted):
    assert problems("pbs", text) == [f"{text}: {wanted}"]


def test_resources_of_the_whole_job_are_passed_on():
    found = rendered(
        pbs_script, FACTS["pbs"], "-l filesystems=home:eagle,software=x", "-W depend=afterok:12", "-mabe"
    )
    assert found[-4:] == ["-W depend=afterok:12", "-mabe", "-l filesystems=home:eagle", "-l software=x"]


def test_the_local_scheduler_takes_no_options():
    with pytest.raises(UsageError, match="-C a100: --scheduler=local takes no options; drop it"):
        plan(ask("-C a100", slots=1), Facts(scheduler="local"))
