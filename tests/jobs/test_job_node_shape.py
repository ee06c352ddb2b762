"""Slots to nodes: Determined's tables row by row, the default layout, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infini_run.errors import UsageError
from infini_run.jobs.request import pbs_script, slurm_script
from infini_run.jobs.request.job_request import JobRequest
from infini_run.jobs.request.node_shape import lay_out
from infini_run.jobs.scheduler import Facts, Kind, pool_of
from infini_run.record import replace
from infini_run.value_types import MAX_INT

NODE = Kind(nodes=4, cpus=64, mem_mb=8000, gpus=8)
SLURM = Facts(
    scheduler="slurm", select="cons_tres", has_tres=True, has_gres=True,
    pools=(pool_of("gpu", [NODE], is_default=True),),
)  # fmt: skip
PBS = replace(SLURM, scheduler="pbs", has_tres=False)
NOTHING = {"slurm": Facts(scheduler="slurm"), "pbs": Facts(scheduler="pbs")}


def ask(slots, **changes):
    return JobRequest(
        **{"name": "ir-1", "folder": "/f", "command": ("x",), "cwd": "/", "python": "/p", "slots": slots} | changes
    )


def words(request, facts):
    layout = lay_out(request, facts)
    if facts.scheduler == "slurm":
        return " ".join(slurm_script.size(layout, []))
    where = pbs_script.place(layout, pbs_script.user_options(request))
    return f"-l select={pbs_script.select(layout, ())}" + (f" -l place={where}" if where else "")


# ---- Determined's tables: slots, slots_per_node of the three columns
COLUMNS = ((16, 8), (16, 0), (10, 4))
TT = ("--gpus=16 --nodes=1-16 --tasks-per-node=1 --gpus-per-task=8", "--gpus=16 --nodes=1-16 --tasks-per-node=1",
      "--gpus=10 --nodes=1-10 --tasks-per-node=1 --gpus-per-task=4")  # fmt: skip
FT = ("--nodes=2 --ntasks=2 --gres=gpu:8", "--nodes=16 --ntasks=16 --gres=gpu:1", "--nodes=3 --ntasks=3 --gres=gpu:4")
FF = ("--nodes=2 --ntasks=2", "--nodes=16 --ntasks=16", "--nodes=3 --ntasks=3")
CPUS = ("--nodes=2 --ntasks=2 --cpus-per-task=8", "--nodes=16 --ntasks=16", "--nodes=3 --ntasks=3 --cpus-per-task=4")
PBS_GRES = ("-l select=2:ngpus=8", "-l select=16:ngpus=1", "-l select=3:ngpus=4")
PBS_NONE = ("-l select=2", "-l select=16", "-l select=3")
PBS_CPUS = ("-l select=2:ncpus=8", "-l select=16:ncpus=1", "-l select=3:ncpus=4")
ROWS = [
    *(("slurm", kind, True, True, TT) for kind in ("cuda", "rocm")),
    *(("slurm", kind, False, True, FT) for kind in ("cuda", "rocm")),
    *(("slurm", kind, False, False, FF) for kind in ("cuda", "rocm")),
    *(("slurm", "cpu", tres, gres, CPUS) for tres in (True, False) for gres in (True, False)),
    *(("pbs", kind, tres, True, PBS_GRES) for kind in ("cuda", "rocm") for tres in (True, False)),
    *(("pbs", kind, False, False, PBS_NONE) for kind in ("cuda", "rocm")),
    *(("pbs", "cpu", False, gres, PBS_CPUS) for gres in (True, False)),
]


@pytest.mark.parametrize(("scheduler", "kind", "tres", "gres", "wanted"), ROWS, ids=lambda value: str(value)[:12])
def test_a_row_of_the_tables_is_what_it_says(scheduler, kind, tres, gres, wanted):
    found = [
        words(
            ask(n, slots_per_node=each, slot_type=kind, tres=tres, gres=gres, layout="determined"), NOTHING[scheduler]
        )
        for n, each in COLUMNS
    ]
    assert tuple(found) == wanted


def test_tres_without_gres_is_no_row_and_is_taken_as_neither():
    request = ask(16, slots_per_node=8, slot_type="cuda", tres=True, gres=False, layout="determined")
    assert words(request, NOTHING["slurm"]) == FF[0]
    assert "--tres: no effect without --gres" in lay_out(request, NOTHING["slurm"]).remark


def test_unset_tres_and_gres_are_true_as_in_determined():
    assert words(ask(16, slots_per_node=8, slot_type="cuda", layout="determined"), NOTHING["slurm"]) == TT[0]


TYPED = [
    ("slurm", True, "--gpus=tesla:16 --nodes=1-16 --tasks-per-node=1 --gpus-per-task=tesla:8"),
    ("slurm", False, "--nodes=2 --ntasks=2 --gres=gpu:tesla:8"),
    ("pbs", False, "-l select=2:ngpus=8"),
]


@pytest.mark.parametrize(("scheduler", "tres", "wanted"), TYPED)
def test_the_type_of_a_gpu_is_in_the_options_of_slurm(scheduler, tres, wanted):
    request = ask(16, slots_per_node=8, slot_type="cuda", gpu_type="tesla", tres=tres, layout="determined")
    assert words(request, NOTHING[scheduler]) == wanted


# what Determined's own tests ask of its calculation, of 100 slots
CALCULATED = [
    ("slurm", {"slot_type": "cpu", "slots_per_node": 32}, {"nodes": 4, "cpus_per_node": 32}),
    ("pbs", {"slot_type": "cpu", "slots_per_node": 16}, {"nodes": 7, "cpus_per_node": 16}),
    ("slurm", {"slot_type": "cpu"}, {"nodes": 100, "cpus_per_node": 0}),
    ("slurm", {"slots_per_node": 32}, {"nodes": 0, "gpus": 100, "gpus_per_task": 32}),
    ("slurm", {}, {"nodes": 0, "gpus": 100, "gpus_per_task": 0}),
    ("pbs", {}, {"nodes": 100, "gpus_per_node": 1}),
    ("slurm", {"slots_per_node": 32, "single_node": True}, {"nodes": 1, "gpus": 100, "gpus_per_task": 32}),
    ("pbs", {"slots_per_node": 16}, {"nodes": 7, "gpus_per_node": 16}),
    ("slurm", {"slots_per_node": 32, "tres": False}, {"nodes": 4, "gpus_per_node": 32}),
    ("slurm", {"slots_per_node": 32, "tres": False, "gres": False}, {"nodes": 4, "gpus_per_node": 0}),
    ("pbs", {"slots_per_node": 16, "tres": False, "gres": False}, {"nodes": 7, "gpus_per_node": 0}),
    ("slurm", {"slot_type": "cpu", "slots": 0}, {"nodes": 1, "cpus_per_node": 0}),
    ("pbs", {"slot_type": "cpu", "slots": 0}, {"nodes": 1, "cpus_per_node": 1}),
]


@pytest.mark.parametrize(("scheduler", "changes", "wanted"), CALCULATED)
def test_the_calculation_is_determineds(scheduler, changes, wanted):
    request = ask(**{"slots": 100, "slot_type": "cuda", "layout": "determined"} | changes)
    layout = lay_out(request, NOTHING[scheduler])
    assert {name: getattr(layout, name) for name in wanted} == wanted


def test_a_job_on_one_node_says_so_and_nothing_of_tasks():
    request = ask(100, slots_per_node=32, slot_type="cuda", single_node=True, layout="determined")
    assert words(request, NOTHING["slurm"]) == "--gpus=100 --nodes=1 --gpus-per-task=32"


def test_what_has_no_row_is_refused_all_at_once():
    request = ask(-1, slot_type="cuda", layout="determined", cpus_per_slot=4, mem_mb_per_slot=100, round_up=True)
    with pytest.raises(UsageError) as told:
        lay_out(request, SLURM)
    assert [line.split(":")[0] for line in str(told.value).splitlines()] == [
        "--cpus_per_slot", "--mem_per_slot", "--round_up", "--slots=-1",
    ]  # fmt: skip


# ---- the default layout
DEFAULT = [
    (SLURM, ask(16), "--nodes=2 --ntasks-per-node=1 --cpus-per-gpu=8 --gres=gpu:8"),
    (SLURM, ask(16, slots_per_node=4), "--nodes=4 --ntasks-per-node=1 --cpus-per-gpu=8 --gres=gpu:4"),
    (SLURM, ask(3), "--nodes=1 --ntasks-per-node=1 --cpus-per-gpu=8 --gres=gpu:3"),
    (SLURM, ask(16, tres=False), "--nodes=2 --ntasks-per-node=1 --cpus-per-task=64 --gres=gpu:8"),
    (SLURM, ask(16, gres=False, slots_per_node=8), "--nodes=2 --ntasks-per-node=1 --exclusive"),
    (SLURM, ask(8, cpus_per_slot=2, mem_mb_per_slot=500),
     "--nodes=1 --ntasks-per-node=1 --cpus-per-gpu=2 --mem=4000M --gres=gpu:8"),
    (SLURM, ask(128, slot_type="cpu"), "--nodes=2 --ntasks-per-node=1 --cpus-per-task=64"),
    (SLURM, ask(16, slot_type="cpu", cpus_per_slot=8), "--nodes=2 --ntasks-per-node=1 --cpus-per-task=64"),
    (SLURM, ask(6, slot_type="cpu", slots_per_node=2), "--nodes=3 --ntasks-per-node=1 --cpus-per-task=2"),
    (NOTHING["slurm"], ask(16, slots_per_node=8), "--nodes=2 --ntasks-per-node=1 --exclusive"),
    (NOTHING["slurm"], ask(4, slot_type="cpu"), "--nodes=1 --ntasks-per-node=1 --cpus-per-task=4"),
    (NOTHING["slurm"], ask(1), "--nodes=1 --ntasks-per-node=1 --exclusive"),
    (PBS, ask(16), "-l select=2:ncpus=64:ngpus=8 -l place=scatter"),
    (PBS, ask(8, slots_per_node=4), "-l select=2:ncpus=32:ngpus=4 -l place=scatter"),
    (PBS, ask(8, slot_type="cpu", slots_per_node=4), "-l select=2:ncpus=4 -l place=scatter"),
    (PBS, ask(8, slots_per_node=4, mem_mb_per_slot=100), "-l select=2:ncpus=32:ngpus=4:mem=400mb -l place=scatter"),
    (NOTHING["pbs"], ask(8, slots_per_node=4), "-l select=2:ncpus=4 -l place=scatter:exclhost"),
]  # fmt: skip


@pytest.mark.parametrize(("facts", "request_", "wanted"), DEFAULT, ids=[wanted for _, _, wanted in DEFAULT])
def test_the_default_layout_has_distinct_hosts_and_cpus_for_the_gpus(facts, request_, wanted):
    assert words(request_, facts) == wanted


def test_a_whole_node_of_pbs_is_all_of_its_cpus():
    """Else its cgroup would have as many as there are slots."""
    pool = pool_of("gpu", [Kind(nodes=4, cpus=64), Kind(nodes=1, cpus=96)], is_default=True)
    facts = Facts(scheduler="pbs", pools=(pool,))
    request = ask(8, slots_per_node=4, slot_type="cuda")
    assert words(request, facts) == "-l select=2:ncpus=64 -l place=scatter:exclhost"
    few = replace(request, cpus_per_slot=2)
    assert words(few, facts) == "-l select=2:ncpus=8 -l place=scatter:exclhost"


def test_without_gpus_in_the_pool_the_slots_are_cpus():
    facts = Facts(scheduler="slurm", pools=(pool_of("cpu", [Kind(nodes=2, cpus=16)], is_default=True),))
    assert words(ask(16), facts) == "--nodes=1 --ntasks-per-node=1 --cpus-per-task=16"


MIXED = replace(
    SLURM,
    pools=(
        pool_of(
            "mixed",
            [
                Kind(nodes=9, cpus=128),
                Kind(nodes=2, cpus=32, gpus=4, gpu_types=(("v100", 4),)),
                Kind(nodes=1, cpus=96, mem_mb=4000, gpus=8, gpu_types=(("a100", 8),)),
            ],
            is_default=True,
        ),
    ),
)
OF_MIXED = [
    (ask(8), "--nodes=2 --ntasks-per-node=1 --cpus-per-gpu=8 --gres=gpu:4"),
    (ask(8, gpu_type="a100"), "--nodes=1 --ntasks-per-node=1 --cpus-per-gpu=12 --gres=gpu:a100:8"),
    (ask(8, slots_per_node=8), "--nodes=1 --ntasks-per-node=1 --cpus-per-gpu=12 --gres=gpu:8"),
    (ask(256, slot_type="cpu"), "--nodes=8 --ntasks-per-node=1 --cpus-per-task=32"),
]


@pytest.mark.parametrize(("request_", "wanted"), OF_MIXED, ids=[wanted for _, wanted in OF_MIXED])
def test_a_pool_of_several_kinds_gives_the_nodes_that_fit(request_, wanted):
    assert words(request_, MIXED) == wanted


FILLS = [
    (
        ask(10, slots_per_node=4),
        "10 slots do not fill nodes of 4; use 8 or 12, --slots_per_node=2 or 1, or --round_up (12)",
    ),
    (ask(10), "10 slots do not fill nodes of 8; use 8 or 16, --slots_per_node=5 or 2, or --round_up (16)"),
    (ask(3, slots_per_node=8), "3 slots do not fill nodes of 8; use 8, --slots_per_node=3 or 1, or --round_up (8)"),
    (ask(1, slots_per_node=8), "1 slot does not fill nodes of 8; use 8, --slots_per_node=1, or --round_up (8)"),
    (
        ask(7, slots_per_node=MAX_INT),  # a loop over so many numbers takes minutes
        f"7 slots do not fill nodes of {MAX_INT}; use {MAX_INT}, --slots_per_node=7 or 1, or --round_up ({MAX_INT})",
    ),
    (ask(9, slots_per_node=2), "9 slots do not fill nodes of 2; use 8 or 10, --slots_per_node=1, or --round_up (10)"),
]


@pytest.mark.parametrize(("request_", "wanted"), FILLS)
def test_slots_that_do_not_fill_their_nodes_are_refused_with_the_nearest_that_do(request_, wanted):
    with pytest.raises(UsageError, match="or --round_up") as told:
        lay_out(request_, SLURM)
    assert wanted in str(told.value)


def test_round_up_takes_more_slots_and_says_so():
    layout = lay_out(ask(10, round_up=True), SLURM)
    assert (layout.slots, layout.nodes, layout.slots_per_node) == (16, 2, 8)
    assert layout.remark == "rounded 10 slots up to 16, to fill nodes of 8"


def test_spares_are_nodes_beside_those_of_the_slots():
    layout = lay_out(ask(16, spares=2), SLURM)
    assert (layout.nodes, layout.spares, layout.slots) == (2, 2, 16)
    assert "--nodes=4 --ntasks-per-node=1 --no-kill " in words(ask(16, spares=2), SLURM)
    assert words(ask(16, spares=2), PBS).startswith("-l select=4:")


IMPOSSIBLE = [
    (ask(0), "--slots=0: expected at least 1"),
    (ask(72), "the request needs 9 nodes with 8 GPUs; pool gpu has 4"),
    (ask(16, slots_per_node=16), "the request needs nodes with 16 GPUs; those of pool gpu have at most 8"),
    (
        ask(80, slots_per_node=16, spares=1),
        (
            "the request needs nodes with 16 GPUs; those of pool gpu have at most 8\n"
            "the request needs 6 nodes (1 spare among them); pool gpu has 4"
        ),
    ),
    (ask(16, pool="gpv"), "--pool=gpv: unknown pool; did you mean gpu?"),
    (ask(16, pool="long"), "--pool=long: unknown pool; use gpu"),
    (ask(16, gpu_type="a100"), "--gpu_type=a100: unknown in pool gpu; its GPUs have no types, so drop it"),
    (ask(16, gpu_type="a100", gres=False),
     "--gpu_type=a100: the scheduler knows no GPUs; use a --pool that has them"),
    (ask(16, gpu_type="a100", slot_type="cpu"),
     "--gpu_type=a100: conflicts with slots that are CPUs; drop it, or use --slot_type=cuda"),
    (ask(8, cpus_per_slot=9), "--cpus_per_slot: needs 72 CPUs per node; those of pool gpu have 64"),
    (ask(8, mem_mb_per_slot=1001), "--mem_per_slot: needs 8008 MB per node; those of pool gpu have 8000"),
    (ask(320, slot_type="cpu"), "the request needs 5 nodes with 64 CPUs; pool gpu has 4"),
    (ask(32, spares=1), "the request needs 5 nodes with 8 GPUs (1 spare among them); pool gpu has 4"),
]  # fmt: skip


@pytest.mark.parametrize(("request_", "wanted"), IMPOSSIBLE, ids=[wanted for _, wanted in IMPOSSIBLE])
def test_what_cannot_be_is_refused_before_anything_is_submitted(request_, wanted):
    with pytest.raises(UsageError) as told:
        lay_out(request_, SLURM)
    assert str(told.value) == wanted


@pytest.mark.parametrize("style", ["default", "determined"])
def test_a_pool_is_to_be_named_where_none_is_the_default(style):
    pools = (pool_of("a", [NODE]), pool_of("b", [NODE]))
    with pytest.raises(UsageError, match=r"missing --pool, as there is no default; use --pool=a\|b"):
        lay_out(ask(8, slots_per_node=8, layout=style), replace(SLURM, pools=pools))


def test_all_that_is_wrong_is_told_at_once():
    pool = pool_of("cpu", [Kind(nodes=2, cpus=16)], limit_s=3600, is_default=True)
    with pytest.raises(UsageError) as told:
        lay_out(ask(0, slot_type="cuda", time_s=7200), replace(SLURM, pools=(pool,)))
    assert str(told.value).splitlines() == [
        "--slots=0: expected at least 1",
        "--slot_type=cuda: the scheduler knows no GPUs in pool cpu; use another --pool, or --slot_type=cpu",
        "--time: expected at most 1h, the limit of pool cpu",
    ]


@pytest.mark.parametrize(
    ("request_", "wanted"),
    [
        (
            ask(20, slots_per_node=4, mem_mb_per_slot=2_000_000, cpus_per_slot=30, time_s=7200),
            [
                "the request needs 5 nodes with 4 GPUs; pool gpu has 4",
                "--cpus_per_slot: needs 120 CPUs per node; those of pool gpu have 64",
                "--mem_per_slot: needs 8000000 MB per node; those of pool gpu have 8000",
                "--time: expected at most 1h, the limit of pool gpu",
            ],
        ),
        (
            ask(10, slots_per_node=10, cpus_per_slot=9, mem_mb_per_slot=2000),
            [
                "the request needs nodes with 10 GPUs; those of pool gpu have at most 8",
                "--cpus_per_slot: needs 90 CPUs per node; those of pool gpu have 64",
                "--mem_per_slot: needs 20000 MB per node; those of pool gpu have 8000",
            ],
        ),
        (
            ask(6, slots_per_node=4, time_s=7200),
            [
                "--slots=6: 6 slots do not fill nodes of 4; use 4 or 8, --slots_per_node=3 or 2, or --round_up (8)",
                "--time: expected at most 1h, the limit of pool gpu",
            ],
        ),
    ],
    ids=["few-nodes", "small-nodes", "unfilled"],
)
def test_every_number_beyond_the_pool_is_reported_at_once(request_, wanted):
    pool = pool_of("gpu", [NODE], limit_s=3600, is_default=True)
    with pytest.raises(UsageError) as told:
        lay_out(request_, replace(SLURM, pools=(pool,)))
    assert str(told.value).splitlines() == wanted


def test_nobody_guesses_how_many_gpus_a_node_has():
    with pytest.raises(UsageError, match="GPUs per node unknown; add --slots_per_node=N"):
        lay_out(ask(16), NOTHING["slurm"])


@given(slots=st.integers(1, 64), each=st.integers(0, 12), kind=st.sampled_from(["cuda", "rocm", "cpu"]),
       scheduler=st.sampled_from([SLURM, PBS]))  # fmt: skip
def test_a_layout_has_exactly_the_slots_that_were_asked_for_or_there_is_none(slots, each, kind, scheduler):
    request = ask(slots, slots_per_node=each, slot_type=kind)
    try:
        layout = lay_out(request, scheduler)
    except UsageError:
        return
    assert layout.nodes * layout.slots_per_node == layout.slots == slots
    assert layout.slots_per_node == (each or layout.slots_per_node)
    assert layout.is_scattered
    if kind != "cpu":
        assert layout.gpus_per_node == layout.slots_per_node
        assert (layout.cpus_per_node or layout.cpus_per_gpu * layout.gpus_per_node) == 8 * layout.slots_per_node
