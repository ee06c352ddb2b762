"""What is looked at on this machine before a plan is made."""

from __future__ import annotations

import os

import pytest

from infini_run.options.options import resolve
from infini_run.plan.program import error_folder, inspect_node, launch_folder, new_launch_id
from infini_run.system.cgroup import count_cpus
from tests.support.cluster import writes_memory


def options(*flags):
    return resolve([*flags, "prog"], {}).options


def test_a_node_is_named_and_numbered():
    node = inspect_node(options("--nnodes=4", "--node_rank=2", "--nproc_per_node=3"), {})
    assert (node.index, node.host, node.nproc, node.devices) == (2, os.uname().nodename, 3, ())


@pytest.mark.parametrize(
    ("flags", "environ", "looks"),
    [
        (("--nproc_per_node=2",), {}, True),
        (("--nproc_per_node=1",), {}, False),
        (("--nproc_per_node=2",), {"OMP_NUM_THREADS": "4"}, False),
        (("--nproc_per_node=2", "--omp_num_threads=4"), {}, False),
    ],
)
def test_cpus_are_counted_only_where_they_are_shared_out(flags, environ, looks):
    assert inspect_node(options(*flags), environ).cpus == (count_cpus() if looks else 0)


def test_cpu_is_one_rank_for_each_core_that_we_may_use():
    assert inspect_node(options("--nproc_per_node=cpu"), {}).nproc == count_cpus()


def test_every_launch_has_an_id_of_its_own():
    ids = {new_launch_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert all(launch_id.startswith("ir-") and launch_id.isprintable() for launch_id in ids)


@writes_memory
def test_error_files_lie_beside_the_logs_or_where_they_go_with_us(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = launch_folder(options(), "ir-1", {"TMPDIR": "/var/tmp"})
    assert folder == "/dev/shm/infini-run-ir-1"
    assert error_folder(options(), folder) == folder
    assert error_folder(options("--log_dir=logs"), folder) == f"{tmp_path}/logs"
    assert not os.path.exists(folder)
