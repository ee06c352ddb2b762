"""AMD's GPUs from trees of plain files; the variables as ROCR-Runtime and HIP read them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infini_run.devices import amd
from infini_run.devices.gpu import Accelerator, NoGpus
from infini_run.devices.topology import pci_node
from infini_run.devices.visible import find, resolve_nproc
from infini_run.errors import DeviceError

CPU = {"cpu_cores_count": 64, "simd_count": 0}


def mi300(number, **more):
    return {
        "cpu_cores_count": 0,
        "simd_count": 1216,
        "gfx_target_version": 90402,
        "location_id": 0x0100 * (number + 1),
        "domain": 0,
        "drm_render_minor": 128 + number,
        "unique_id": 0x1000_0000_0000_0000 + number,
    } | more


@pytest.fixture
def four(machine):
    machine.amd(CPU, CPU, *(mi300(n) for n in range(4)))
    return machine


def names(machine, **environ):
    return [gpu.name for gpu in amd.find_gpus(environ, machine.root)]


def places(machine, **environ):
    """Which of the machine's GPUs they are, by the last digit of their UUIDs."""
    return [int(gpu.uuid[-1]) for gpu in amd.find_gpus(environ, machine.root)]


# ---- which there are


def test_kfd_lists_gpus_among_cpus_and_says_where_they_are(four):
    first, *others = amd.list_gpus(four.root)
    assert first == Accelerator(
        name="0", uuid="GPU-1000000000000000", product="gfx942", bus_id="0000:01:00.0", kfd_id=102
    )  # fmt: skip
    assert [gpu.name for gpu in others] == ["1", "2", "3"]


def test_gpus_are_counted_in_the_order_of_kfds_numbers_not_of_their_names_text(machine):
    machine.amd(*(mi300(n) for n in range(12)))
    assert [gpu.kfd_id for gpu in amd.list_gpus(machine.root)] == list(range(100, 112))


def test_a_gpu_whose_render_node_is_not_in_the_container_has_no_index(four):
    (Path(four.root) / "dev/dri/renderD128").unlink()
    assert [gpu.uuid[-1] for gpu in amd.list_gpus(four.root)] == ["1", "2", "3"]
    assert names(four) == ["0", "1", "2"]


def test_partitions_of_one_board_are_gpus_of_their_own_at_one_bus_id(machine):
    machine.amd(CPU, *(mi300(n, location_id=0x0500 | n << 28) for n in range(3)))
    assert [gpu.bus_id for gpu in amd.list_gpus(machine.root)] == ["0000:05:00.0"] * 3


def test_the_numa_node_of_a_gpu_follows_from_its_location(machine):
    machine.amd(mi300(0, location_id=0xC3 << 8 | 2 << 3 | 1, domain=0x10))
    machine.pci("0010:c3:02.1", 3)
    (gpu,) = amd.list_gpus(machine.root)
    assert pci_node(gpu.bus_id, machine.root) == 3


@pytest.mark.parametrize(("version", "name"), [(90010, "gfx90a"), (90402, "gfx942"), (110501, "gfx1151"), (0, None)])
def test_the_architecture_is_written_as_rocm_writes_it(machine, version, name):
    machine.amd(mi300(0, gfx_target_version=version))
    assert amd.list_gpus(machine.root)[0].product == name


def test_an_old_board_without_a_unique_id_goes_by_index_alone(machine):
    machine.amd(mi300(0, unique_id=0))
    assert amd.list_gpus(machine.root)[0].uuid is None
    assert names(machine, ROCR_VISIBLE_DEVICES="0") == ["0"]
    assert names(machine, ROCR_VISIBLE_DEVICES="GPU-0000000000000000") == []


def test_no_kfd_is_no_amd_gpu(machine):
    with pytest.raises(NoGpus, match="missing /dev/kfd"):
        amd.list_gpus(machine.root)


def test_kfd_without_gpus_says_what_may_be_missing(machine):
    machine.amd(CPU, mi300(0), render=False)
    with pytest.raises(NoGpus, match="/dev/dri/renderD"):
        amd.list_gpus(machine.root)


def test_files_that_make_no_sense_are_no_gpu(machine):
    machine.amd(CPU)
    folder = "/sys/class/kfd/kfd/topology/nodes"
    machine.write({f"{folder}/7/gpu_id": "many", f"{folder}/8/gpu_id": "5", f"{folder}/8/properties": "\x00 x\n a"})
    machine.write({f"{folder}/nine/gpu_id": "1"})
    with pytest.raises(NoGpus):
        amd.list_gpus(machine.root)


def test_a_closed_kfd_names_the_group_that_opens_it(four, tmp_path):
    kfd = Path(four.root) / "dev/kfd"
    kfd.chmod(0)
    code = "import sys; from infini_run.devices import amd; amd.list_gpus(sys.argv[1])"
    under = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    done = subprocess.run(
        [*under, sys.executable, "-c", code, four.root], capture_output=True, text=True, check=False
    )
    if under and "setpriv" in done.stderr:
        pytest.skip(f"root stays root here: {done.stderr}")
    assert "join its group (render)" in done.stderr


# ---- the variables


@pytest.mark.parametrize(
    ("listed", "shown"),
    [
        ("2,0", [2, 0]),
        (" 1 , 3", [1, 3]),
        ("0x1,03", [1, 3]),
        ("GPU-1000000000000002", [2]),
        ("gpu-1000000000000003,0", [3, 0]),
        ("GPU-10", []),
        ("0,0,1", [0]),
        ("0,4,1", [0]),
        ("0,-1,1", [0]),
        ("1,two,3", [1]),
        ("1,,3", [1]),
        ("1x", []),
        ("", []),
    ],
)
def test_rocr_takes_entries_up_to_the_first_that_is_none_or_is_there_twice(four, listed, shown):
    assert places(four, ROCR_VISIBLE_DEVICES=listed) == shown


@pytest.mark.parametrize(
    ("listed", "shown"),
    [
        ("2,0", [2, 0]),
        ("1,1,2", [1, 2]),
        ("0,4,1", [0]),
        ("0, 1", [0]),
        ("-1", []),
        ("01", []),
        ("GPU-1000000000000003,1", [3, 1]),
        ("", [0, 1, 2, 3]),
    ],
)
def test_hip_takes_entries_up_to_the_first_that_is_none(four, listed, shown):
    assert places(four, HIP_VISIBLE_DEVICES=listed) == shown
    assert places(four, CUDA_VISIBLE_DEVICES=listed) == shown


def test_hip_takes_from_what_rocr_left_and_cuda_is_read_where_hip_is_not_set(four):
    assert places(four, ROCR_VISIBLE_DEVICES="3,2,1", HIP_VISIBLE_DEVICES="2,0") == [1, 3]
    assert places(four, ROCR_VISIBLE_DEVICES="3,2", HIP_VISIBLE_DEVICES="3") == []
    assert places(four, HIP_VISIBLE_DEVICES="1", CUDA_VISIBLE_DEVICES="2,3") == [1]
    assert places(four, HIP_VISIBLE_DEVICES="", CUDA_VISIBLE_DEVICES="2,3") == [2, 3]


def test_hips_index_of_unequal_gpus_is_passed_on_without_a_guess_at_which_it_is(machine):
    machine.amd(mi300(0), mi300(1, gfx_target_version=110501))
    (gpu,) = amd.find_gpus({"HIP_VISIBLE_DEVICES": "1"}, machine.root)
    assert (gpu.name, gpu.uuid, gpu.bus_id) == ("1", None, None)
    (gpu,) = amd.find_gpus({"ROCR_VISIBLE_DEVICES": "1"}, machine.root)
    assert gpu.bus_id == "0000:02:00.0"


@given(listed=st.text("0123456789,GPU-abcx +", max_size=30), name=st.sampled_from(["ROCR", "HIP", "CUDA"]))
def test_no_list_shows_a_gpu_twice_or_one_that_is_not_there(listed, name):
    gpus = tuple(Accelerator(name=str(n), uuid=f"GPU-{n:016x}") for n in range(12))
    shown = amd.visible(gpus, {f"{name}_VISIBLE_DEVICES": listed})
    assert len({gpu.uuid for gpu in shown}) == len(shown)
    assert {gpu.uuid for gpu in shown} <= {gpu.uuid for gpu in gpus}


# ---- what a rank's own is shown by


@pytest.mark.parametrize(
    ("environ", "variable", "shown"),
    [
        ({}, "ROCR_VISIBLE_DEVICES", ["0", "1", "2", "3"]),
        ({"ROCR_VISIBLE_DEVICES": "2,3"}, "ROCR_VISIBLE_DEVICES", ["2", "3"]),
        ({"HIP_VISIBLE_DEVICES": "2,3"}, "HIP_VISIBLE_DEVICES", ["2", "3"]),
        ({"CUDA_VISIBLE_DEVICES": "2,3"}, "CUDA_VISIBLE_DEVICES", ["2", "3"]),
        ({"ROCR_VISIBLE_DEVICES": "3,2,1", "HIP_VISIBLE_DEVICES": "1,2"}, "HIP_VISIBLE_DEVICES", ["1", "2"]),
        ({"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "2"}, "HIP_VISIBLE_DEVICES", ["1"]),
        ({"HIP_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": "1"}, "ROCR_VISIBLE_DEVICES", ["1"]),
    ],
)
def test_the_topmost_variable_that_is_set_is_dealt_out_and_else_rocrs(four, environ, variable, shown, no_driver):
    found = find(environ, four.root)
    assert (found.vendor.module, found.variable) == ("amd", variable)
    assert [gpu.name for gpu in found.gpus] == shown


@pytest.fixture
def no_driver(monkeypatch):
    """No NVIDIA driver, also where there is one."""
    monkeypatch.setitem(sys.modules, "pynvml", None)


def test_ranks_are_counted_by_what_the_variables_leave(four, no_driver):
    assert resolve_nproc("gpu", {}, 0, four.root) == 4
    assert resolve_nproc("auto", {"HIP_VISIBLE_DEVICES": "0,1"}, 0, four.root) == 2
    assert resolve_nproc("auto", {"ROCR_VISIBLE_DEVICES": "0,1,2"}, 2, four.root) == 1
    with pytest.raises(DeviceError, match="ROCR_VISIBLE_DEVICES is 'x'"):
        resolve_nproc("auto", {"ROCR_VISIBLE_DEVICES": "x"}, 0, four.root)
    with pytest.raises(
        DeviceError, match=r"need 5 GPU\(s\), and 4 can be used here \(ROCR_VISIBLE_DEVICES is not set"
    ):
        resolve_nproc("gpu", {}, 5, four.root)


# ---- who holds them


def test_kfd_tells_who_has_memory_on_a_gpu(four):
    four.write({
        "/sys/class/kfd/kfd/proc/77/vram_103": str(5 << 30),
        "/sys/class/kfd/kfd/proc/77/vram_102": "0",
        "/sys/class/kfd/kfd/proc/8/vram_103": str(1 << 20),
        "/sys/class/kfd/kfd/proc/9/vram_104": "what",
    })  # fmt: skip
    holders = amd.find_holders(amd.list_gpus(four.root), four.root)
    assert [(holder.gpu.name, holder.pid, holder.mib) for holder in holders] == [("1", 8, 1), ("1", 77, 5120)]


def test_nobody_holds_anything_where_kfd_lists_no_process(four):
    assert amd.find_holders(amd.list_gpus(four.root), four.root) == ()
