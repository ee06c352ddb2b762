"""Ascend NPUs from trees of plain files; which vendor's devices a machine with several is taken to mean."""

from __future__ import annotations

import sys

import pytest

from infini_run.devices import ascend
from infini_run.devices.gpu import NoGpus
from infini_run.devices.in_use import check_gpus
from infini_run.devices.visible import find, resolve_nproc
from infini_run.errors import DeviceError


@pytest.fixture(autouse=True)
def no_driver(monkeypatch):
    """No NVIDIA driver, also where there is one."""
    monkeypatch.setitem(sys.modules, "pynvml", None)


@pytest.fixture
def eight(machine):
    machine.write({f"/dev/davinci{n}": "" for n in range(8)} | {"/dev/davinci_manager": ""})
    return machine


def names(machine, listed=None):
    environ = {} if listed is None else {"ASCEND_RT_VISIBLE_DEVICES": listed}
    return [gpu.name for gpu in ascend.find_gpus(environ, machine.root)]


def test_every_davinci_is_one(eight):
    assert names(eight) == [str(n) for n in range(8)]


def test_a_container_counts_its_own_from_0(machine):
    machine.write({"/dev/davinci4": "", "/dev/davinci10": "", "/dev/davinci_manager": ""})
    assert names(machine) == ["0", "1"]
    assert names(machine, "4") == []


@pytest.mark.parametrize(
    ("listed", "shown"),
    [
        ("1,2,3", ["1", "2", "3"]),
        ("1, 2,3", ["1"]),
        ("1,3,8", ["1", "3"]),
        ("1,1,2", ["1"]),
        ("-1", []),
        ("", []),
        ("²", []),
        ("9" * 5000, []),
    ],
)
def test_the_list_ends_with_the_first_entry_that_is_no_id(eight, listed, shown):
    assert names(eight, listed) == shown


def test_no_davinci_is_no_npu(machine):
    machine.write({"/dev/davinci_manager": ""})
    with pytest.raises(NoGpus, match="missing /dev/davinci0"):
        ascend.find_gpus({}, machine.root)
    with pytest.raises(NoGpus, match="missing /dev/davinci0"):
        ascend.find_gpus({}, machine.root + "/nowhere")


def test_ranks_are_dealt_ids_of_the_list(eight):
    found = find({"ASCEND_RT_VISIBLE_DEVICES": "4,5,6"}, eight.root)
    assert (found.vendor.module, found.variable) == ("ascend", "ASCEND_RT_VISIBLE_DEVICES")
    assert [gpu.name for gpu in found.gpus] == ["4", "5", "6"]
    assert resolve_nproc("auto", {"ASCEND_RT_VISIBLE_DEVICES": "4,5,6"}, 0, eight.root) == 3
    with pytest.raises(NoGpus, match="ASCEND_RT_VISIBLE_DEVICES is ''"):
        resolve_nproc("gpu", {"ASCEND_RT_VISIBLE_DEVICES": ""}, 0, eight.root)


def test_who_holds_them_cannot_be_told(eight):
    found = find({}, eight.root)
    with pytest.raises(DeviceError, match="npu-smi info"):
        check_gpus(found, found.gpus, "warn", eight.root)


# ---- several vendors


def test_a_machine_without_any_says_so_for_each(machine):
    with pytest.raises(NoGpus) as caught:
        find({}, machine.root)
    text = str(caught.value)
    assert "pynvml" in text
    assert "missing /dev/kfd" in text
    assert "missing /dev/davinci0" in text
    assert "\n" not in text


def test_the_vendor_whose_variable_is_set_comes_first_and_has_the_last_word(eight):
    eight.amd({"drm_render_minor": 128, "unique_id": 1})
    assert find({}, eight.root).vendor.module == "amd"
    assert find({"ASCEND_RT_VISIBLE_DEVICES": "0"}, eight.root).vendor.module == "ascend"
    hidden = find({"ROCR_VISIBLE_DEVICES": ""}, eight.root)
    assert (hidden.vendor.module, hidden.gpus) == ("amd", ())
    both = find({"CUDA_VISIBLE_DEVICES": "", "ASCEND_RT_VISIBLE_DEVICES": "0,1"}, eight.root)
    assert (both.vendor.module, len(both.gpus)) == ("ascend", 2)
    hidden = find({"CUDA_VISIBLE_DEVICES": ""}, eight.root)
    assert (hidden.vendor.module, hidden.gpus) == ("nvidia", ())


def test_a_variable_of_a_vendor_that_is_not_here_hides_nothing_of_another(eight):
    assert find({"ROCR_VISIBLE_DEVICES": "0"}, eight.root).vendor.module == "ascend"
