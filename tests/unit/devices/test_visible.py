"""devices/visible.py against a stand-in driver that the real pynvml loads, and cgroup trees of plain files."""

from __future__ import annotations

import ctypes.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infini_run.devices.gpu import Accelerator
from infini_run.devices.nvidia import Card, visible
from infini_run.devices.visible import VENDORS, VisibleGpus, count_cpus, partition, resolve_nproc
from infini_run.errors import DeviceError
from tests.support.gpus import list_gpus
from tests.support.nvml import FOUR, MIG, UNEQUAL, UUIDS, Driver, ask_all, environment

ENTRY_POINTS = (
    "nvmlInitWithFlags",
    "nvmlShutdown",
    "nvmlSystemGetCudaDriverVersion",
    "nvmlDeviceGetCount_v2",
    "nvmlDeviceGetHandleByIndex_v2",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetMaxMigDeviceCount",
    "nvmlDeviceGetMigDeviceHandleByIndex",
    "nvmlDeviceGetGpuInstanceId",
    "nvmlDeviceGetComputeInstanceId",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetName",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetPciInfo_v3",
)
CODES = (*range(1, 31), 777, 999)


def found(gpus: tuple[Accelerator, ...], inherited: str | None = None) -> VisibleGpus:
    return VisibleGpus(vendor=VENDORS[0], variable="CUDA_VISIBLE_DEVICES", inherited=inherited, gpus=gpus)


# Which GPUs there are.


def test_every_gpu_is_found_with_what_the_driver_says_of_it(driver: Driver) -> None:
    first, second, *_ = driver.ask(FOUR, "find_gpus", {})["is"]
    assert first == {
        "name": "0",
        "uuid": UUIDS[0],
        "product": "NVIDIA H200",
        "memory_mib": 143771,
        "bus_id": "00000000:10:00.0",
        "old_name": None,
        "one_of": None,
        "kfd_id": None,
    }
    assert (second["name"], second["bus_id"]) == ("1", "00000000:11:00.0")


def test_nvml_is_shut_down_after_each_count(driver: Driver) -> None:
    driver.ask(FOUR, "find_gpus", {})
    assert driver.log.read_text().split() == ["init", "shutdown"]


def test_memory_that_a_gpu_shares_with_the_cpu_is_not_known(driver: Driver) -> None:
    (gpu,) = driver.ask([f"{UUIDS[0]}|NVIDIA GB10|-|-"], "find_gpus", {})["is"]
    assert (gpu["name"], gpu["memory_mib"]) == ("0", None)


def test_gpus_without_permission_are_passed_over_and_have_no_index(driver: Driver) -> None:
    boards = [FOUR[0] + "|4", FOUR[1], FOUR[2] + "|4", FOUR[3]]
    found = driver.ask(boards, "find_gpus", {})["is"]
    assert [(gpu["name"], gpu["uuid"]) for gpu in found] == [("0", UUIDS[1]), ("1", UUIDS[3])]


@pytest.mark.parametrize(
    ("inherited", "names"),
    [
        (None, ["0", "1", "2", "3"]),
        ("", []),
        ("-1", []),
        ("2,1", ["2", "1"]),
        ("0,2,-1,1", ["0", "2"]),
        ("0,4,1", ["0"]),
        ("9", []),
        ("3,,1", ["3"]),
        ("0,0", []),
        ("1,0,1", []),
        ("1,-1,1", ["1"]),
        (" 1, 2", ["1", "2"]),
        ("1gpu,+2", ["1", "2"]),
        ("no,1", []),
        (UUIDS[2], [UUIDS[2]]),
        (f"{UUIDS[3]},{UUIDS[0]}", [UUIDS[3], UUIDS[0]]),
        ("GPU-7d,GPU-c", ["GPU-7d", "GPU-c"]),
        ("GPU-7d,GPU-5a88,GPU-c", ["GPU-7d"]),
        ("GPU-7d,GPU-ee,GPU-c", ["GPU-7d"]),
        ("GPU-7d,GPU-7d1a", []),
        ("GPU-7d,3", ["GPU-7d"]),
        (UUIDS[2].upper(), [UUIDS[2].upper()]),
        ("GPU-" + UUIDS[2][4:].replace("-", ""), ["GPU-" + UUIDS[2][4:].replace("-", "")]),
        (f"{UUIDS[2]} ,{UUIDS[0]};x", [f"{UUIDS[2]} ", f"{UUIDS[0]};x"]),
        (f"{UUIDS[2]},{UUIDS[2]}0", []),
        ("GPU-7dx", []),
        ("GPU-", []),
        (UUIDS[2].lower(), []),
        ("3,GPU-7d", ["3"]),
        ("MIG-aaaa", []),
        ("-0,1", ["0", "1"]),
        pytest.param("9" * 5000, [], id="5000 digits"),
    ],
)
def test_inherited_list_is_read_as_cuda_reads_it(driver: Driver, inherited: str | None, names: list[str]) -> None:
    environ = {} if inherited is None else {"CUDA_VISIBLE_DEVICES": inherited}
    assert driver.names(FOUR, **environ) == names


SEEN = "GPU-0d993d15-aede-a29e-ba1e-9b6bcd1f4e88"


@pytest.mark.parametrize(
    ("inherited", "count"),
    [
        (SEEN + "0", 1), (SEEN + " ,0", 1), (SEEN + ";x", 1), (SEEN + "-x", 1), (SEEN + SEEN, 1), (" " + SEEN, 0),
        (SEEN.upper(), 1), (SEEN.lower(), 0), (SEEN[:-1], 1), (SEEN[:-1] + "x", 0), (SEEN[:5], 1),
        ("GPU-0d993d15aedea29eba1e9b6bcd1f4e88", 1), ("GPU-0-d9", 1), ("GPU-0d99--", 1), ("GPU-0d99-x", 0),
        ("GPU-", 0), ("GPU--", 1), ("GPU---", 1), ("GPU--x", 0), ("GPU-x", 0), ("GPU- " + SEEN[4:], 0),
        (f"{SEEN},{SEEN}0", 0), (f"GPU-0d99,{SEEN}", 0), (f"{SEEN},,{SEEN}", 1), (f"{SEEN}, {SEEN}", 1),
        ("GPU-,0", 0), ("GPU-0d99 ", 0), ("MIG-" + SEEN[4:], 1), ("MIG-0", 1), ("MIG-0x", 0), ("MIG-f", 0),
        ("MIG-", 0), ("MIG--", 1), (f"MIG-{SEEN}", 0), (f"MIG-{SEEN}/0/0", 0), (f"MIG-{SEEN[4:]}/0/0", 1),
        ("MIG-0/0/0", 0),
        (f"{SEEN},MIG-0", 0), (f"{SEEN},MIG-f", 1), ("0,MIG-0", 1), (f"MIG-0d,{SEEN}", 0),
        ("00", 1), ("0;0", 1), ("0.5", 1), ("- 0", 0), ("+ 0", 0), ("--0", 0), ("1e0", 0), ("0,-0", 0),
        ("NoDevFiles", 0),
    ],
)  # fmt: skip
def test_a_list_shows_what_a_real_driver_showed(inherited: str, count: int) -> None:
    """Driver 580.159 with one H200, asked with cuInit and cuDeviceGetCount."""
    gpu = Accelerator(name=SEEN, uuid=SEEN, product="H200", memory_mib=143771)
    cards = (Card(itself=gpu, is_mig=False, gpus=(gpu,)),)
    assert len(visible(cards, {"CUDA_VISIBLE_DEVICES": inherited})) == count


def test_no_beginning_at_all_names_no_gpu_even_where_there_is_only_one(driver: Driver) -> None:
    assert driver.names(FOUR[:1], CUDA_VISIBLE_DEVICES=f"{UUIDS[0]},") == [UUIDS[0]]


def test_uuid_list_is_kept_as_spelled_and_still_identifies_the_gpus(driver: Driver) -> None:
    found = driver.ask(FOUR, "find_gpus", {"CUDA_VISIBLE_DEVICES": "GPU-7d,GPU-c0"})["is"]
    assert [(gpu["name"], gpu["uuid"]) for gpu in found] == [("GPU-7d", UUIDS[2]), ("GPU-c0", UUIDS[3])]


def test_unequal_gpus_go_by_uuid_because_cuda_may_count_them_otherwise(driver: Driver) -> None:
    assert driver.names(UNEQUAL) == list(UUIDS[:2])
    assert driver.names(UNEQUAL, CUDA_DEVICE_ORDER="FASTEST_FIRST") == list(UUIDS[:2])
    assert driver.names(UNEQUAL, CUDA_DEVICE_ORDER="PCI_BUS_ID") == ["0", "1"]


def test_inherited_index_of_unequal_gpus_is_passed_on_without_a_guess_at_which_it_is(driver: Driver) -> None:
    (gpu,) = driver.ask(UNEQUAL, "find_gpus", {"CUDA_VISIBLE_DEVICES": "0"})["is"]
    assert (gpu["name"], gpu["uuid"], gpu["product"]) == ("0", None, None)
    by_bus = {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    (gpu,) = driver.ask(UNEQUAL, "find_gpus", by_bus)["is"]
    assert (gpu["name"], gpu["uuid"], gpu["product"]) == ("0", UUIDS[0], "NVIDIA T4")
    assert driver.names(UNEQUAL, CUDA_VISIBLE_DEVICES="1,0,2") == ["1", "0"]
    assert driver.names(UNEQUAL, CUDA_VISIBLE_DEVICES="0,0") == []


# MIG.


def test_mig_instances_and_whole_boards_are_the_units_where_nothing_is_inherited(driver: Driver) -> None:
    found = driver.ask(MIG, "find_gpus", {})["is"]
    assert [gpu["name"] for gpu in found] == [UUIDS[0], "MIG-aaaa", "MIG-bbbb", "MIG-cccc"]
    assert [gpu["memory_mib"] for gpu in found] == [81559, 40000, 40000, 20000]
    assert found[1]["old_name"] == f"MIG-{UUIDS[1]}/1/0"
    assert found[1]["bus_id"] == "00000000:11:00.0"


@pytest.mark.parametrize(
    ("inherited", "uuids"),
    [
        ("MIG-bbbb,MIG-aaaa", ["MIG-bbbb", "MIG-aaaa"]),
        (f"MIG-{UUIDS[1]}/2/0", ["MIG-cccc"]),
        (f"MIG-{UUIDS[1]}/1/1,MIG-cccc", ["MIG-bbbb", "MIG-cccc"]),
        (f"MIG-{UUIDS[1]}/1/1,MIG-bbbb", []),
        (f"MIG-{UUIDS[1]}/7/0", []),
        ("MIG-aa", []),
        (f"MIG-{UUIDS[1][4:]}", []),
        (f"MIG-cccc,{UUIDS[0]}", ["MIG-cccc", UUIDS[0]]),
        ("0,1", [UUIDS[0], "MIG-aaaa"]),
        ("0,2,1", [UUIDS[0]]),
        (UUIDS[1], ["MIG-aaaa"]),
        (UUIDS[2], []),
        (f"{UUIDS[1]},MIG-aaaa", []),
    ],
)
def test_inherited_mig_names_are_found(driver: Driver, inherited: str, uuids: list[str]) -> None:
    found = driver.ask(MIG, "find_gpus", {"CUDA_VISIBLE_DEVICES": inherited})["is"]
    assert [gpu["uuid"] for gpu in found] == uuids
    assert [gpu["name"] for gpu in found] == inherited.split(",")[: len(found)]


def test_mig_instances_that_cuda_would_not_show_together_are_refused_for_a_process_that_gets_all(
    driver: Driver,
) -> None:
    two_slices = {"CUDA_VISIBLE_DEVICES": "MIG-aaaa,MIG-cccc"}
    one_slice = {"CUDA_VISIBLE_DEVICES": "MIG-aaaa,MIG-bbbb"}
    assert driver.ask(MIG, "resolve_nproc", "gpu", two_slices, 0, cuda=12080) == {"is": 2}
    for environ, cuda in ((two_slices, 12040), (one_slice, 12080)):
        answer = driver.ask(MIG, "resolve_nproc", "auto", environ, 0, cuda=cuda)
        assert "only 1 of these 2 MIG instances" in answer["error"]
        assert "--gpus_per_proc=1" in answer["error"]
        assert driver.ask(MIG, "resolve_nproc", "auto", environ, 1, cuda=cuda) == {"is": 2}


def test_no_rank_gets_two_mig_instances_of_which_cuda_shows_it_one() -> None:
    gpus = tuple(Accelerator(name=f"MIG-{n}", one_of="MIG-GPU-0/1") for n in range(2))
    assert partition(found(gpus), 2, 1) == ((gpus[0],), (gpus[1],))
    with pytest.raises(DeviceError, match="only 1 of these 2 MIG instances"):
        partition(found(gpus), 1, 2)


# How many ranks.


def test_gpu_means_one_rank_for_each_or_for_each_group(driver: Driver) -> None:
    assert driver.ask(FOUR, "resolve_nproc", "gpu", {}, 0) == {"is": 4}
    assert driver.ask(FOUR, "resolve_nproc", "gpu", {}, 1) == {"is": 4}
    assert driver.ask(FOUR, "resolve_nproc", "gpu", {}, 3) == {"is": 1}
    assert driver.ask(FOUR, "resolve_nproc", "gpu", {"CUDA_VISIBLE_DEVICES": "3,1"}, 0) == {"is": 2}


def test_group_larger_than_what_is_visible_is_refused_with_all_three_numbers(driver: Driver) -> None:
    answer = driver.ask(FOUR, "resolve_nproc", "gpu", {"CUDA_VISIBLE_DEVICES": "3,1"}, 4)
    needed = "1 rank(s) with --gpus_per_proc=4 need 4 GPU(s)"
    assert answer["error"] == f"{needed}, and 2 can be used here (CUDA_VISIBLE_DEVICES is '3,1')"


def test_auto_means_gpus_where_there_are_any(driver: Driver) -> None:
    assert driver.ask(FOUR, "resolve_nproc", "auto", {}, 2) == {"is": 2}


@pytest.mark.parametrize("inherited", ["", "-1"])
def test_gpu_says_no_and_auto_means_cpus_where_the_caller_hides_all(driver: Driver, inherited: str) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": inherited}
    answer = driver.ask(FOUR, "resolve_nproc", "gpu", environ, 0)
    reason = f"no usable GPU: CUDA_VISIBLE_DEVICES is {inherited!r}"
    assert answer["error"] == f"--nproc_per_node=gpu: {reason}; use --nproc_per_node=N"
    assert driver.ask(FOUR, "resolve_nproc", "auto", environ, 0) == {"is": count_cpus()}
    assert not driver.log.exists()


@pytest.mark.parametrize("kind", ["gpu", "auto"])
def test_list_that_names_no_gpu_is_refused_even_for_auto(driver: Driver, kind: str) -> None:
    answer = driver.ask(FOUR, "resolve_nproc", kind, {"CUDA_VISIBLE_DEVICES": "0,0"}, 0)
    assert "CUDA_VISIBLE_DEVICES is '0,0'" in answer["error"]


@pytest.mark.parametrize("boards", [[], MIG[2:]])
def test_machine_without_a_usable_gpu_is_told_for_gpu_and_counts_cpus_for_auto(
    driver: Driver, boards: list[str]
) -> None:
    assert "no usable GPU" in driver.ask(boards, "resolve_nproc", "gpu", {}, 0)["error"]
    assert driver.ask(boards, "resolve_nproc", "auto", {}, 0) == {"is": count_cpus()}


def test_auto_does_not_give_cpu_ranks_to_a_caller_who_wants_gpus_in_each(driver: Driver) -> None:
    assert "no usable GPU" in driver.ask([], "resolve_nproc", "auto", {}, 1)["error"]


def test_cpu_asks_no_driver(driver: Driver) -> None:
    assert driver.ask(FOUR, "resolve_nproc", "cpu", {}, 0) == {"is": count_cpus()}
    assert not driver.log.exists()


# A driver that is missing, asleep, closed to us, or broken.

ABSENT = {"nvmlInitWithFlags=9": "not loaded", "nvmlInitWithFlags=4": "permission"}
BROKEN = {
    "nvmlInitWithFlags=18": "different versions",
    "nvmlDeviceGetHandleByIndex_v2=15": "fallen off the bus",
    "nvmlInitWithFlags=999": "Unknown Error (NVML error 999)",
    "nvmlDeviceGetCount_v2=777": "only this driver knows (NVML error 777)",
    "nvmlDeviceGetUUID=13": "Function Not Found (NVML error 13)",
}


@pytest.mark.parametrize("fail", [*ABSENT, *BROKEN])
def test_driver_that_does_not_answer_is_one_clear_error_for_gpu(driver: Driver, fail: str) -> None:
    answer = driver.ask(FOUR, "resolve_nproc", "gpu", {}, 0, fail=fail)
    assert (ABSENT | BROKEN)[fail] in answer["error"]
    assert "\n" not in answer["error"]


@pytest.mark.parametrize("fail", ABSENT)
def test_auto_counts_cpus_where_the_driver_has_nothing_for_us(driver: Driver, fail: str) -> None:
    assert driver.ask(FOUR, "resolve_nproc", "auto", {}, 0, fail=fail) == {"is": count_cpus()}


@pytest.mark.parametrize("fail", BROKEN)
def test_auto_does_not_hide_a_broken_driver(driver: Driver, fail: str) -> None:
    assert BROKEN[fail] in driver.ask(FOUR, "resolve_nproc", "auto", {}, 0, fail=fail)["error"]


def test_gpus_that_are_all_closed_to_us_are_a_matter_of_permission(driver: Driver) -> None:
    closed = [board + "|4" for board in FOUR]
    assert "permission" in driver.ask(closed, "find_gpus", {})["error"]
    assert driver.log.read_text().split() == ["init", "shutdown"]


@pytest.mark.parametrize(("kind", "word"), [("gpu", "libnvidia-ml.so.1 cannot be loaded"), ("auto", None)])
def test_missing_driver_library_is_named_for_gpu_and_means_cpus_for_auto(
    tmp_path: Path, kind: str, word: str | None
) -> None:
    (tmp_path / "libnvidia-ml.so.1").write_text("no library\n")  # found before any real one, and not loadable
    (answer,) = ask_all(tmp_path, [{"call": "resolve_nproc", "args": [kind, {}, 0]}])
    assert word in answer["error"] if word else answer == {"is": count_cpus()}


@pytest.mark.parametrize("kind", ["gpu", "auto"])
def test_missing_pynvml_is_named_for_gpu_and_means_cpus_for_auto(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    if kind == "auto":
        assert resolve_nproc("auto", {}, 0) == count_cpus()
    else:
        with pytest.raises(DeviceError, match="pip install nvidia-ml-py"):
            resolve_nproc("gpu", {}, 0)


def test_every_nvml_call_may_fail_in_every_way_and_nvml_is_still_shut_down(driver: Driver) -> None:
    faults = [(name, code) for name in ENTRY_POINTS for code in CODES]
    settings = [driver.settings(MIG), *(driver.settings(MIG, f"{name}={code}") for name, code in faults)]
    whole, *answers = ask_all(driver.folder, [{"set": one, "call": "find_gpus", "args": [{}]} for one in settings])
    assert len(whole["is"]) == 4
    passed_over = [fault for fault, answer in zip(faults, answers, strict=True) if "is" in answer]
    assert passed_over == [  # what not every board, driver or user has
        ("nvmlDeviceGetMigMode", 3),
        ("nvmlDeviceGetMigMode", 13),
        ("nvmlDeviceGetMigDeviceHandleByIndex", 4),
        ("nvmlDeviceGetMigDeviceHandleByIndex", 6),
        ("nvmlDeviceGetMemoryInfo", 3),
    ]
    log = driver.log.read_text().split()
    assert log.count("init") == log.count("shutdown") == len(settings) - len(CODES)


# Who gets what.

unique_gpus = st.integers(0, 12).map(lambda n: tuple(Accelerator(name=f"GPU-{i}") for i in range(n)))


@given(gpus=unique_gpus, nproc=st.integers(1, 9), gpus_per_proc=st.integers(0, 5))
def test_each_rank_gets_its_number_of_gpus_in_order_and_no_gpu_goes_to_two(
    gpus: tuple[Accelerator, ...], nproc: int, gpus_per_proc: int
) -> None:
    if nproc * gpus_per_proc > len(gpus):
        with pytest.raises(DeviceError) as refusal:
            partition(found(gpus, "0,1"), nproc, gpus_per_proc)
        assert f"need {nproc * gpus_per_proc} GPU(s), and {len(gpus)} can" in str(refusal.value)
        assert "CUDA_VISIBLE_DEVICES is '0,1'" in str(refusal.value)
        return
    shares = partition(found(gpus), nproc, gpus_per_proc)
    assert [len(theirs) for theirs in shares] == [gpus_per_proc] * nproc
    handed_out = tuple(gpu for theirs in shares for gpu in theirs)
    assert handed_out == gpus[: len(handed_out)]


def test_refusal_says_when_no_list_was_inherited() -> None:
    with pytest.raises(DeviceError, match=r"CUDA_VISIBLE_DEVICES is not set"):
        partition(found(()), 1, 1)


# Lists of every kind against what they were made to mean: text, and the GPU that it names or None.

CARDS = tuple(
    Card(itself=gpu, is_mig=False, gpus=(gpu,))
    for gpu in (Accelerator(name=uuid, uuid=uuid, product="H200", memory_mib=143771) for uuid in UUIDS)
)
numbers = st.integers(0, 3)
index_entries = st.one_of(
    st.tuples(st.sampled_from(["{}", " {}", "+{}", "0{}", "{}x", "\t{} ", "-{}"]), numbers).map(
        lambda pair: (pair[0].format(pair[1]), None if pair[0] == "-{}" and pair[1] else pair[1])
    ),
    st.sampled_from(["", "-1", "4", "x1", "+-1", " ", "four", "1" * 5000, "²"]).map(lambda text: (text, None)),
)
uuid_entries = st.one_of(
    st.tuples(numbers, st.integers(9, len(UUIDS[0]))).map(lambda pair: (UUIDS[pair[0]][: pair[1]], pair[0])),
    st.tuples(numbers, st.sampled_from(["0", " ", "-x"])).map(lambda pair: (UUIDS[pair[0]] + pair[1], pair[0])),
    numbers.map(lambda number: ("GPU-" + UUIDS[number][4:].replace("-", "").upper(), number)),
    st.sampled_from(["GPU-", "GPU-5a88", "GPU-ffff", "0", " " + UUIDS[0], UUIDS[0][:-1] + "x", "gpu-7d", ""]).map(
        lambda text: (text, None)
    ),
)


index_lists = st.lists(index_entries, min_size=1)
uuid_lists = st.lists(uuid_entries, min_size=1).filter(lambda entries: entries[0][0].startswith("GPU-"))


@given(entries=st.one_of(index_lists, uuid_lists))
def test_any_list_shows_what_its_entries_mean_up_to_the_first_that_means_nothing(
    entries: list[tuple[str, int | None]],
) -> None:
    meant = [number for _, number in entries]
    shown = meant[: meant.index(None)] if None in meant else meant
    if len(set(shown)) < len(shown):
        shown = []
    gpus = visible(CARDS, {"CUDA_VISIBLE_DEVICES": ",".join(text for text, _ in entries)})
    assert [gpu.uuid for gpu in gpus] == [UUIDS[number] for number in shown]


# CPUs, from trees of plain files.


class Tree:
    """A machine's cgroups below one folder. A mount is (file system, cgroup at its top, where, options)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, files: dict[str, str]) -> None:
        for name, text in files.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def count(self, cgroup: str, mounts: list[tuple[str, str, str, str]], affinity: int = 64) -> int:
        lines = [
            f"{40 + n} 24 0:{n} {top} {self.folder}/{where} rw,nosuid shared:9 - {kind} {kind} rw{options}\n"
            for n, (kind, top, where, options) in enumerate(mounts)
        ]
        self.write({"cgroup": cgroup, "mountinfo": "23 1 8:1 / / rw - ext4 /dev/vda rw\n" + "".join(lines)})
        return count_cpus(affinity, str(self.folder / "cgroup"), str(self.folder / "mountinfo"))


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


V2 = [("cgroup2", "/", "cg", "")]
V1 = [("cgroup", "/", "cg/cpu,cpuacct", ",cpu,cpuacct"), ("cgroup", "/", "cg/cpuset", ",cpuset")]


@pytest.mark.parametrize(
    ("limit", "cpus"),
    [("max 100000", 64), ("400000 100000", 4), ("150000 100000", 2), ("1000 9000", 1), ("990000 9000", 64)],
)
def test_quota_is_rounded_up_and_never_adds_cpus(tree: Tree, limit: str, cpus: int) -> None:
    tree.write({"cg/job/cpu.max": limit + "\n"})
    assert tree.count("0::/job\n", V2) == cpus


@pytest.mark.parametrize("limit", ["", "max", "400000", "many 100000", "400000 0", "-1 100000", "1 2 3"])
def test_quota_that_makes_no_sense_is_no_limit(tree: Tree, limit: str) -> None:
    tree.write({"cg/job/cpu.max": limit})
    assert tree.count("0::/job\n", V2) == 64


def test_tightest_quota_on_the_way_to_the_root_counts(tree: Tree) -> None:
    tree.write(
        {
            "cg/pods/cpu.max": "300000 100000\n",
            "cg/pods/a/cpu.max": "max 100000\n",
            "cg/pods/a/b/cpu.max": "800000 100000\n",
            "cg/other/cpu.max": "100000 100000\n",
        }
    )
    assert tree.count("0::/pods/a/b\n", V2) == 3


def test_version_1_quota_is_read_where_the_cpu_controller_is_mounted(tree: Tree) -> None:
    files = {"cpu.cfs_quota_us": "250000\n", "cpu.cfs_period_us": "100000\n"}
    tree.write({f"cg/cpu,cpuacct/job/{name}": text for name, text in files.items()})
    tree.write({"cg/cpuset/job/cpu.cfs_quota_us": "100000", "cg/cpuset/job/cpu.cfs_period_us": "100000"})
    tree.write({"cg/cpu,cpuacct/cpu.cfs_quota_us": "-1\n", "cg/cpu,cpuacct/cpu.cfs_period_us": "100000\n"})
    assert tree.count("5:cpuset:/elsewhere\n4:cpu,cpuacct:/job\n1:name=systemd:/\n", V1) == 3


def test_hybrid_mounts_are_both_read(tree: Tree) -> None:
    tree.write(
        {
            "cg/cpu,cpuacct/job/cpu.cfs_quota_us": "600000",
            "cg/cpu,cpuacct/job/cpu.cfs_period_us": "100000",
            "cg/unified/job/cpu.max": "500000 100000",
        }
    )
    mounts = [*V1, ("cgroup2", "/", "cg/unified", ",nsdelegate")]
    assert tree.count("4:cpu,cpuacct:/job\n0::/job\n", mounts) == 5
    assert tree.count("4:cpu,cpuacct:/job\n0::/\n", mounts) == 6


def test_container_that_mounts_only_its_own_cgroup_finds_it_at_the_mount_point(tree: Tree) -> None:
    tree.write({"cg/cpu.max": "700000 100000", "cg/inner/cpu.max": "200000 100000"})
    assert tree.count("0::/docker/abc\n", [("cgroup2", "/docker/abc", "cg", "")]) == 7
    assert tree.count("0::/docker/abc/inner\n", [("cgroup2", "/docker/abc", "cg", "")]) == 2


def test_cgroup_namespace_shows_the_limit_at_its_root(tree: Tree) -> None:
    tree.write({"cg/cpu.max": "700000 100000"})
    assert tree.count("0::/\n", V2) == 7


def test_mount_of_a_cgroup_above_our_namespace_limits_us_too(tree: Tree) -> None:
    tree.write({"cg/cpu.max": "700000 100000"})
    assert tree.count("0::/inner\n", [("cgroup2", "/../..", "cg", "")]) == 7


def test_mount_of_another_cgroup_does_not_limit_us(tree: Tree) -> None:
    tree.write({"cg/cpu.max": "100000 100000"})
    assert tree.count("0::/docker/abc\n", [("cgroup2", "/docker/abcd", "cg", "")]) == 64
    assert tree.count("0::/../sibling\n", [("cgroup2", "/", "cg", "")]) == 64


def test_cgroup_path_that_is_not_there_falls_back_to_what_is_above_it(tree: Tree) -> None:
    tree.write({"cg/cpu.max": "700000 100000"})
    assert tree.count("0::/docker/unseen (deleted)\n", V2) == 7


def test_mount_point_with_spaces_is_found(tree: Tree) -> None:
    tree.write({"my cg/job/cpu.max": "300000 100000"})
    assert tree.count("0::/job\n", [("cgroup2", "/", "my\\040cg", "")]) == 3


@pytest.mark.parametrize("mountinfo", ["", "\n", "a - b\n", "1 2 3 / /x rw - cgroup\n", "4 - cgroup2 x rw"])
def test_mount_table_that_makes_no_sense_is_no_limit(tree: Tree, mountinfo: str) -> None:
    tree.write({"cgroup": "x\n0::/\n:::\n", "mountinfo": mountinfo})
    assert count_cpus(3, str(tree.folder / "cgroup"), str(tree.folder / "mountinfo")) == 3


def test_machine_without_proc_has_the_cpus_of_the_affinity_mask(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    assert count_cpus(cgroup_file=missing, mountinfo_file=missing) == len(os.sched_getaffinity(0))
    assert count_cpus(0, missing, missing) == 1


def test_affinity_mask_is_honoured_on_this_machine() -> None:
    program = (
        "import os; from infini_run.devices.visible import count_cpus;"
        " os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); print(count_cpus())"
    )
    command = [sys.executable, "-c", program]
    assert subprocess.check_output(command, env=environment(), text=True).strip() == "1"


def test_devices_bring_no_heavy_module_and_counting_cpus_not_pynvml() -> None:
    program = (
        "import sys, infini_run; before = set(sys.modules); from infini_run.devices.visible import *;"
        " resolve_nproc('cpu', {}, 0); print(*sorted(set(sys.modules) - before))"
    )
    loaded = subprocess.check_output([sys.executable, "-c", program], env=environment(), text=True).split()
    ours = {
        f"infini_run.{name}"
        for name in (
            "system",
            "system.cgroup",
            "devices",
            "devices.visible",
            "errors",
            "devices.gpu",
            "lean_os",
            "record",
        )
    }
    assert set(loaded) <= {"__future__"} | ours


# The real thing.

CUDA_COUNT = """
import ctypes
cuda, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
print(0 if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)) else count.value)
"""


@pytest.mark.gpu
def test_real_gpus_are_those_that_nvidia_smi_lists() -> None:
    lines, _ = list_gpus()
    usable = [
        line.partition("UUID: ")[2].rstrip(")")
        for line, after in zip(lines, [*lines[1:], ""], strict=True)
        if line.startswith("MIG") or not after.startswith("MIG")
    ]
    (answer,) = ask_all(None, [{"call": "find_gpus", "args": [{}]}])
    assert [gpu["uuid"] for gpu in answer["is"]] == usable
    assert all(gpu["product"] and gpu["bus_id"] for gpu in answer["is"])


@pytest.mark.gpu
def test_real_cuda_shows_as_many_gpus_as_we_say_for_every_kind_of_list() -> None:
    lines, _ = list_gpus()
    if any(line.startswith("MIG") for line in lines):
        pytest.skip("MIG: CUDA shows a process only some of the instances")
    if ctypes.util.find_library("cuda") is None:
        pytest.skip("no libcuda.so.1 to compare with")
    uuid = lines[0].partition("UUID: ")[2].rstrip(")")
    lists = ["", "-1", "0", "0,-1", "0,99", "99,0", "0,0", "x", " 0", "0x", "+0", "0,,0", uuid, uuid[:12]]
    lists += [f"{uuid},{uuid}", f"{uuid},0", f"0,{uuid}", f"{uuid}0", f"{uuid},MIG-0"]
    bare = uuid[4:].replace("-", "")
    lists += [
        uuid.upper(),
        f"GPU-{bare}",
        f"GPU-{bare[:5]}",
        f"{uuid} ,x",
        f"{uuid},{uuid} ",
        f"{uuid[:12]}x",
        "GPU-,0",
    ]
    lists += [
        f"MIG-{bare[:1]}",
        f"{uuid},MIG-{bare[:2]}",
        f"MIG-{uuid}",
        "MIG-",
        "GPU--",
        "GPU--x",
        uuid.lower(),
        f"{uuid[:-1]}x",
        f"GPU-{bare[:1]}",
        f" {uuid}",
        f"GPU--{bare}",
        f"GPU-{bare[:3]}-{bare[3:]}",
    ]
    questions = [{"call": "find_gpus", "args": [{"CUDA_VISIBLE_DEVICES": value}]} for value in lists]
    ours = [len(answer["is"]) for answer in ask_all(None, questions)]
    for value, count in zip(lists, ours, strict=True):
        command = [sys.executable, "-c", CUDA_COUNT]
        cuda = subprocess.check_output(command, env=environment(CUDA_VISIBLE_DEVICES=value))
        assert (value, int(cuda)) == (value, count)
