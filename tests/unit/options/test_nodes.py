"""The roll: hosts from flags, and every request that makes no sense, in one line before anything starts."""

from __future__ import annotations

import pytest

from infini_run.errors import UsageError
from infini_run.multinode.link.agent_options import exported, options_of_agents
from infini_run.options.options import resolve


def roster_of(*flags, environ=None):
    return resolve([*flags, "true"], environ or {})


def test_hosts_in_their_order_with_their_slots():
    request = roster_of("--engine=ssh", "--hosts=b:2,a:2,me@n[01-02]:2")
    assert [(host.name, host.slots, host.destination) for host in request.node_list.hosts] == [
        ("b", 2, "b"), ("a", 2, "a"), ("n01", 2, "me@n01"), ("n02", 2, "me@n02"),
    ]  # fmt: skip
    assert (request.options.nnodes, request.options.nproc_per_node) == (4, 2)


def test_hosts_alone_mean_ssh():
    assert roster_of("--hosts=a,b").node_list.engine == "ssh"


def test_the_first_nnodes_of_them():
    assert [host.name for host in roster_of("--hosts=a,b,c", "--nnodes=2").node_list.hosts] == ["a", "b"]


def test_fewer_ranks_than_slots_are_a_choice():
    assert roster_of("--hosts=a:8,b:4", "--nproc_per_node=3").options.nproc_per_node == 3


def test_hosts_may_have_different_numbers_of_slots():
    request = roster_of("--hosts=a:4,b:8,c:1", "--stdin=12", "--local_ranks_filter=7", "--ranks_on_console=0,12")
    assert request.node_list.counts == (4, 8, 1)
    assert roster_of("--hosts=a:4,b:8,c:1", "--nnodes=2").node_list.counts == (4, 8)
    assert roster_of("--hosts=a:4,b:4,c:1", "--nnodes=2").node_list.counts == ()
    for flag in ("--stdin=13", "--local_ranks_filter=8", "--ranks_on_console=13"):
        with pytest.raises(UsageError, match="unknown rank"):
            roster_of("--hosts=a:4,b:8,c:1", flag)


SALLOC = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2"}


@pytest.mark.parametrize(
    ("environ", "flags", "each", "counts"),
    [
        ({"SLURM_NTASKS": "12", "SLURM_TASKS_PER_NODE": "4,8"}, [], 8, (4, 8)),
        ({"SLURM_NTASKS": "8", "SLURM_TASKS_PER_NODE": "4(x2)"}, [], 4, ()),
        ({"SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "1(x2)"}, ["--nproc_per_node=8"], 8, ()),  # no limit
        ({"SLURM_TASKS_PER_NODE": "64(x2)"}, [], 1, ()),  # of salloc --exclusive: CPUs, nobody asked for tasks
    ],
)
def test_the_tasks_that_slurm_was_asked_for_are_the_ranks_where_nobody_says_more(environ, flags, each, counts):
    request = roster_of("--engine=slurm", *flags, environ=SALLOC | environ)
    assert (request.options.nproc_per_node, request.node_list.counts) == (each, counts)


def test_a_file_of_hosts(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# ours\na slots=4\nb:4\n")
    request = roster_of("--engine=ssh", f"--hostfile={path}")
    assert [host.name for host in request.node_list.hosts] == ["a", "b"]
    assert request.options.nproc_per_node == 4


@pytest.mark.parametrize(
    ("flags", "texts"),
    [
        (["--hosts=a,b[1-"], ["--hosts", "column 4"]),
        (["--hosts=a,,b"], ["--hosts", "column 3"]),
        (["--hosts=a,b[3-1]"], ["--hosts", "column"]),
        (["--hosts=a,b,a"], ["--hosts", "column 5"]),
        (["--hosts=a:0,b"], ["--hosts", "column"]),
        (["--hosts=a:-1"], ["--hosts", "column"]),
        (["--hosts=-oProxyCommand=x,b"], ["--hosts", "column 1"]),
        (["--hosts=a b"], ["--hosts", "column"]),
        (["--hosts=a,b", "--nnodes=3"], ["--nnodes=3", "--hosts=a,b, which is 2 hosts"]),
        (["--hosts=a", "--nnodes=3"], ["--hosts=a, which is 1 host"]),
        (["--hosts=a,b", "--node_rank=1"], ["--node_rank=1 conflicts with --hosts=a,b", "drop one"]),
        (["--hosts=a,b", "--standalone"], ["--standalone conflicts with --hosts=a,b"]),
        (["--hosts=a,b", "--isolate"], ["--isolate conflicts with --hosts=a,b"]),
        (["--hosts=a,b", "--hostfile=/dev/null"], ["only one list of hosts"]),
        (["--hosts=a:4,b"], ["--hosts=a:4,b: missing the number of processes for b", "--nproc_per_node"]),
        (
            ["--hosts=host1:22178"],
            [
                "column 1",
                "not a port, but room for 22178 processes on host1",
                "a line 'host1 slots=22178' in --hostfile",
            ],
        ),
        (["--hosts=a:4,b:2", "--nproc_per_node=3"], ["--nproc_per_node=3", "the 2 slots of b"]),
        (["--engine=ssh"], ["--engine=ssh: needs a list of hosts; add --hosts"]),
        (["--engine=slurm"], ["--engine=slurm", "needs an allocation"]),
        (["--engine=pbs"], ["--engine=pbs", "needs an allocation"]),
        (["--hostfile=/no/such", "--engine=ssh"], ["/no/such", "No such file"]),
        (["--hostfile=/dev/null", "--engine=ssh"], ["no host in it"]),
    ],
)
def test_what_makes_no_sense_is_refused(flags, texts):
    with pytest.raises(UsageError) as caught:
        roster_of(*flags)
    for text in texts:
        assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_exported_is_what_is_named():
    environ = {"A": "1", "AB": "2", "B": "3", "a": "4", "A*": "5"}
    assert exported(("A*",), environ) == {"A": "1", "AB": "2", "A*": "5"}
    assert exported(("A?", "B"), environ) == {"AB": "2", "A*": "5", "B": "3"}
    assert exported((), environ) == {}


def test_an_agent_is_told_its_own_part_only():
    told = options_of_agents(roster_of("--hosts=a,b", "--report=r.json", "--export=X", "--grace=3").options)
    assert (told.engine, told.hosts, told.report, told.export, told.grace_s) == ("local", "", "", (), 3.0)
    assert told.console == "prefix"
