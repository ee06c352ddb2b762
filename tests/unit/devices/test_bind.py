"""--bind on this machine: what really launched ranks are bound to, as /proc/PID says it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess

import pytest

import infini_run as ir
from infini_run.devices.topology import format_list, memory_allowed, parse_list, read_topology
from tests.support.build_c import build
from tests.support.command import COMMAND, PATHS, play
from tests.support.group_case import Live, spec

OURS = os.sched_getaffinity(0)
CORES = len(read_topology(OURS).cores)
HAS_NODES = bool(read_topology(OURS, memory_allowed()).memory)
TELL = (
    'status() { sed -n "s/^$1:[[:space:]]*//p" /proc/self/status; };'
    ' echo "$RANK cpus $(status Cpus_allowed_list) nodes $(status Mems_allowed_list)'
    ' policy $(sed -n "s/^[^ ]* \\([^ ]*\\) .*heap.*/\\1/p" /proc/self/numa_maps) threads ${OMP_NUM_THREADS:-unset}"'
)
TELLING = ("sh", "-c", TELL)


def told(command):
    """What each rank said, by rank: cpus, nodes, policy, threads."""
    assert command.wait() == 0, command.err
    lines = sorted(line.split() for line in command.out.decode().splitlines())
    return [dict(zip(words[1::2], words[2::2], strict=True)) for words in lines]


def bound(infini_run, *words, **kwargs):
    return told(infini_run(*words, *TELLING, **kwargs))


needs_two_cores = pytest.mark.skipif(CORES < 2, reason="needs two cores")
needs_numa = pytest.mark.skipif(not HAS_NODES, reason="this kernel tells of no NUMA nodes")


def test_without_bind_a_rank_is_where_we_are(infini_run):
    (rank,) = bound(infini_run)
    assert rank["cpus"] == format_list(OURS)
    if HAS_NODES:
        assert rank["policy"] == "default"


@needs_two_cores
def test_each_rank_has_cores_of_its_own(infini_run, every_path):
    ranks = bound(infini_run, f"--nproc_per_node={CORES}", "--bind=cores")
    cpus = [cpu for rank in ranks for cpu in parse_list(rank["cpus"])]
    assert len(ranks) == CORES
    assert sorted(cpus) == sorted(OURS), "all of ours, and none twice"


@needs_numa
@pytest.mark.parametrize("mode", ["numa", "socket", "cores"])
def test_memory_is_preferred_on_the_nodes_of_the_cpus(infini_run, every_path, mode):
    (rank,) = bound(infini_run, f"--bind={mode}")
    topology = read_topology(OURS, memory_allowed())
    nodes = {core.node for core in topology.cores if set(core.cpus) & set(parse_list(rank["cpus"]))}
    assert rank["policy"].startswith("prefer")
    assert set(parse_list(rank["policy"].partition(":")[2].removeprefix("many:"))) == nodes


@needs_two_cores
@pytest.mark.parametrize("mode", ["numa", "socket", "cores"])
def test_the_affinity_that_we_were_given_is_never_left(infini_run, mode):
    last = str(max(OURS))
    (rank,) = bound(infini_run, f"--bind={mode}", under=("taskset", "-c", last))
    assert rank["cpus"] == last


@needs_two_cores
def test_a_core_for_each_is_counted_among_those_that_we_were_given(infini_run):
    command = infini_run("--nproc_per_node=2", "--bind=cores", "true", under=("taskset", "-c", str(min(OURS))))
    assert command.wait() == 2
    expected = f"1 can be used here (CPUs {min(OURS)})"
    assert expected in command.err.decode()
    assert command.err.count(b"\n") == 1


def test_more_ranks_than_cores_share_a_node(infini_run):
    ranks = bound(infini_run, f"--nproc_per_node={len(OURS) + 1}", "--bind=numa")
    assert len(ranks) == len(OURS) + 1
    assert {rank["threads"] for rank in ranks} == {"1"}


def test_threads_follow_the_cpus_that_a_rank_is_bound_to(infini_run):
    ranks = bound(infini_run, f"--nproc_per_node={CORES}", "--bind=cores") if CORES > 1 else []
    for rank in ranks:
        assert int(rank["threads"]) == len(parse_list(rank["cpus"]))
    said = bound(infini_run, "--nproc_per_node=2", "--bind=numa", env=os.environ | {"OMP_NUM_THREADS": "7"})
    assert [rank["threads"] for rank in said] == ["7", "7"]
    (alone,) = bound(infini_run, "--bind=numa")
    assert alone["threads"] == "unset"


def test_what_a_rank_starts_is_bound_as_it_is(infini_run):
    (rank,) = told(infini_run("--bind=cores", "sh", "-c", '"$@" | cat', "sh", *TELLING))
    assert set(parse_list(rank["cpus"])) <= OURS


def test_the_launcher_itself_is_not_bound(infini_run, gate):
    wait = gate()
    script = f"echo here; read -r x </proc/self/fd/{wait}; true"
    command = infini_run("--bind=cores", "sh", "-c", script, gates=(wait,))
    command.read_until(b"here")
    assert os.sched_getaffinity(command.pid) == OURS
    wait.open()
    assert command.wait() == 0


# ---- what is told


def test_verbose_says_who_gets_what(infini_run):
    command = infini_run("--nproc_per_node=2", "--bind=numa", "--verbose", "true")
    assert command.wait() == 0
    lines = command.err.decode().splitlines()
    for rank in range(2):
        assert any(line.startswith(f"  rank {rank}: CPU") for line in lines), lines


def test_a_dry_run_says_who_gets_what_and_can_still_be_pasted(infini_run):
    command = infini_run("--bind=numa", "--dry_run", "echo", "it is")
    assert command.wait() == 0
    line = command.out.decode().splitlines()[-1]
    assert f"  # CPU{'s' if len(OURS) > 1 else ''} " in line
    pasted = line.partition(": ")[2]
    done = subprocess.run(["sh", "-c", pasted], capture_output=True, text=True, check=True)
    assert done.stdout == "it is\n"


def test_a_dry_run_in_json_has_the_cpus_as_numbers(infini_run):
    for flag, cpus in (("--bind=numa", sorted(OURS)), ("--bind=none", None)):
        command = infini_run(flag, "--dry_run=json", "true")
        assert command.wait() == 0
        (rank,) = json.loads(command.out)["ranks"]
        if cpus is None:
            assert (rank["cpus"], rank["memory_nodes"]) == (None, None)
        else:
            assert set(rank["cpus"]) <= set(cpus)


# ---- what a sandbox or a kernel refuses


@needs_numa
@pytest.mark.parametrize("debug", PATHS)
def test_a_sandbox_without_memory_policies_is_told_of_once_and_cpus_are_bound(infini_run, debug, monkeypatch):
    monkeypatch.setenv("INFINI_RUN_DEBUG", debug)
    deny = (build("deny.c", instead_of="*"), "set_mempolicy", "0", "1")
    command = infini_run("--nproc_per_node=2", "--bind=numa", *TELLING, under=deny)
    if command.wait() == 77:
        pytest.skip("no filter is permitted here")
    assert command.process.returncode == 0
    err = command.err.decode()
    assert err.count("\n") == 1
    assert "bound to CPUs, but not to memory (set_mempolicy: Operation not permitted: a container's seccomp" in err
    assert command.out.count(b"cpus") == 2


@needs_numa
def test_a_sandbox_without_memory_policies_is_told_of_once_for_each_attempt(infini_run):
    deny = (build("deny.c", instead_of="*"), "set_mempolicy", "0", "1")
    again = ("--max_restarts=1", "--restart_delay=0")
    command = infini_run("--nproc_per_node=2", "--bind=numa", *again, *play("+0", "exit=3"), under=deny)
    if command.wait() == 77:
        pytest.skip("no filter is permitted here")
    assert command.err.count(b"set_mempolicy") == 2


def test_a_sandbox_that_forbids_affinity_is_a_failed_start_with_its_step(infini_run, every_path):
    deny = (build("deny.c", instead_of="*"), "sched_setaffinity", "0", "0")
    command = infini_run("--nproc_per_node=2", "--bind=numa", "true", under=deny)
    if command.wait() == 77:
        pytest.skip("no filter is permitted here")
    assert command.process.returncode == 1
    assert b"binding it to its CPUs: Operation not permitted" in command.err


def test_a_cpu_that_is_gone_by_then_is_a_failed_start_with_its_step(every_path):
    """Beyond all that there are: the mask is larger than the kernel's own."""
    worker = spec(0, "/bin/true")
    worker.cpus = (70_000,)
    with Live(worker, debug=debug_of(every_path)) as live:
        live.end()
        (failed,) = live.of("start_failed")
        assert (failed.code, failed.signal) == (step_of("binding it to its CPUs"), 22)
        assert live.of("exited")[0].code == 1


def test_a_mask_with_more_bits_than_the_kernel_has_is_what_is_left_of_it(every_path, tmp_path):
    worker = spec(0, "/bin/sh", "-c", f"grep Cpus_allowed_list /proc/self/status > {tmp_path}/said")
    worker.cpus = (min(OURS), 2047, 70_000)
    with Live(worker, debug=debug_of(every_path)) as live:
        live.end()
        assert not live.of("start_failed")
    assert (tmp_path / "said").read_text().split()[1] == str(min(OURS))


def test_a_node_that_is_not_there_leaves_the_memory_to_the_kernel(every_path):
    workers = [spec(rank, "/bin/true") for rank in range(3)]
    for worker in workers:
        worker.cpus, worker.nodes = tuple(OURS), (63,)
    with Live(*workers, debug=debug_of(every_path)) as live:
        live.end()
        (told_once,) = live.of("unplaced")
        assert told_once.signal in (22, 38)
        assert [event.code for event in live.of("exited")] == [0, 0, 0]
        assert live.events[-1].kind == "ended"


def debug_of(path):
    from infini_run.core.group import debug_flags

    return debug_flags({"INFINI_RUN_DEBUG": path})


def step_of(words):
    from infini_run.core.c_structs import STEPS

    return next(number for number, said in STEPS.items() if said == words)


@pytest.mark.root
def test_an_isolated_job_is_bound_too(infini_run):
    if os.geteuid() != 0:
        pytest.skip("needs root")
    ranks = bound(infini_run, "--isolate", f"--nproc_per_node={CORES}", "--bind=cores")
    assert sorted(cpu for rank in ranks for cpu in parse_list(rank["cpus"])) == sorted(OURS)


# ---- in Python


def test_the_python_api_binds_too(tmp_path):
    with ir.ProcessLauncher(["sh", "-c", f'grep Cpus_allowed_list /proc/self/status > {tmp_path}/$RANK'],
                            nproc_per_node=CORES, bind="cores") as launcher:  # fmt: skip
        launcher.launch()
        assert launcher.wait(60)
    cpus = [cpu for rank in range(CORES) for cpu in parse_list((tmp_path / str(rank)).read_text().split()[1])]
    assert sorted(cpus) == sorted(OURS)
    assert os.sched_getaffinity(0) == OURS, "the host program stays where it is"
    with pytest.raises(ir.UsageError, match=r'^bind="cores": needs'):
        ir.run(["true"], nproc_per_node=CORES + 1, bind="cores")


# ---- a machine of plain files in place of /sys


# Its own mounts alone: the folder's sys over /sys, and its dev, with what every program needs, over /dev.
MOUNT = """
for file in null zero urandom; do touch "$0/dev/$file" && mount --bind "/dev/$file" "$0/dev/$file" || exit 77; done
mount --rbind "$0/dev" /dev && mount --bind "$0/sys" /sys || exit 77
exec "$@"
"""


@pytest.mark.root
@needs_two_cores
@pytest.mark.parametrize(("flags", "shown"), [(["--gpus_per_proc=1"], ["0", "1"]), ([], ["all", "all"])])
@pytest.mark.parametrize("mode", ["numa", "cores"])
def test_ranks_are_beside_their_gpus_where_sys_and_the_driver_say_so(machine, stub_folder, flags, shown, mode):
    """Two nodes with a CPU each, and the first GPU at the second node."""
    first, second = sorted(OURS)[:2]
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare")
    for cpu in (first, second):
        machine.core([cpu], socket=0)
    machine.nodes({0: [first], 1: [second]})
    machine.pci("0000:10:00.0", 1)
    machine.pci("0000:11:00.0", 0)
    machine.write({"/dev/nvidiactl": ""})
    board = "H200|1000|off"
    stub = {"LD_LIBRARY_PATH": str(stub_folder), "NVML_STUB_GPUS": f"GPU-a|{board}\nGPU-b|{board}"}
    under = ["unshare", "-m", "sh", "-c", MOUNT, machine.root, "taskset", "-c", f"{first},{second}"]
    words = ["sh", "-c", TELL.replace("$RANK", "$RANK gpu ${CUDA_VISIBLE_DEVICES:-all}")]
    argv = [*under, *COMMAND, "--nproc_per_node=2", f"--bind={mode}", *flags, *words]
    done = subprocess.run(argv, env=os.environ | stub, capture_output=True, text=True, check=False)
    if done.returncode == 77 or done.stderr.startswith("unshare"):
        pytest.skip(f"no mount namespace here: {done.stderr}")
    assert done.returncode == 0, done.stderr
    said = sorted(line.split()[:5] for line in done.stdout.splitlines())
    assert said == [["0", "gpu", shown[0], "cpus", str(second)], ["1", "gpu", shown[1], "cpus", str(first)]]
