"""--doctor over ssh, on real sshd hosts: each is looked at, and one that is down, slow or wrong is named in time."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from infini_run.doctor.finding import NOTE, OK, PROBLEM
from infini_run.version import VERSION
from tests.support.hosts import Bed
from tests.support.processes import marked
from tests.support.waiting import until

pytestmark = pytest.mark.xdist_group(__name__)


@pytest.fixture(scope="module")
def bed():
    bed = Bed(hosts=4)
    yield bed
    bed.close()


@pytest.fixture
def over_ssh(bed, doctor):
    """Run the doctor on hosts; config: another ssh_config."""

    def ask(hosts, *words, config=None):
        return doctor(f"--hosts={hosts}", f"--ssh_config={config or bed.config}", *words)

    return ask


def on_host(bed, number, *argv):
    """Run a command in the mounts of a host."""
    above = (bed.folder / f"host.{number}.pid").read_text().strip()
    init = subprocess.check_output(["pgrep", "-P", above], text=True).strip()
    subprocess.run(["nsenter", "-t", init, "-m", "--", *argv], check=True)


def test_every_host_is_looked_at_as_this_machine_is(over_ssh):
    answer = over_ssh("host[1-2]")
    assert list(answer.machines) == ["this machine", "host1", "host2"]
    for name in ("host1", "host2"):
        assert answer.machines[name]["facts"]["host"] == name
        assert answer.of("reach", name) == (OK, f"reached; infini-run there is {VERSION}, as here")
        assert answer.of("clock", name) == (OK, "differs by less than a second")
        ours, theirs = set(answer.findings()), set(answer.findings(name))
        assert theirs - ours == {"reach", "clock", "rank 0"}
        assert ours <= theirs
    grade, text = answer.of("rank 0", "host1")
    assert grade == OK
    assert re.fullmatch(r"listens on port \d+ of this node, as MASTER_PORT, and 1 of 1 node connected", text)
    grade, text = answer.of("rank 0", "host2")
    assert grade == OK
    assert re.fullmatch(r"connects to 127\.0\.78\.1:\d+, as its ranks will to MASTER_PORT", text)


@pytest.fixture
def cabled_bed():
    bed = Bed(hosts=3, mode="netns")
    yield bed
    bed.close()


def test_a_node_that_does_not_reach_the_port_of_rank_0_is_named(cabled_bed, doctor):
    subprocess.run(
        [*["ip", "-n"], f"{cabled_bed.prefix}2", *["route", "add", "prohibit", "10.78.0.1/32"]], check=True
    )
    answer = doctor("--hosts=host[1-3]", f"--ssh_config={cabled_bed.config}", under=cabled_bed.under)
    assert answer.code == 1
    grade, text = answer.of("rank 0", "host2")
    assert grade == PROBLEM
    assert re.match(r"cannot connect to 10\.78\.0\.1:\d+ from host2 \(.*\): ranks cannot meet; open the ports", text)
    assert answer.of("rank 0", "host3")[0] == OK
    assert answer.of("rank 0", "host1")[1].endswith("and 1 of 2 nodes connected")


def test_a_host_that_is_down_is_named_and_the_others_are_looked_at(bed, over_ssh):
    with bed.host_down(2):
        answer = over_ssh("host[1-3]")
    assert answer.code == 1
    assert list(answer.findings("host2")) == ["reach"]
    grade, text = answer.of("reach", "host2")
    assert grade == PROBLEM
    assert text.startswith("ssh exited with 255: ssh: connect to host ")
    assert text.endswith("Connection refused; check that sshd runs there, on that port")
    assert answer.of("launch", "host1") == answer.of("launch", "host3") == answer.of("launch")


def test_a_host_with_an_old_path_of_python_says_what_to_give(bed, over_ssh):
    folder = str(Path(sys.executable).parent)
    on_host(bed, 3, "mount", "-t", "tmpfs", "tmpfs", folder)
    try:
        answer = over_ssh("host[1,3]")
    finally:
        on_host(bed, 3, "umount", folder)
    assert answer.code == 1
    grade, text = answer.of("reach", "host3")
    assert grade == PROBLEM
    assert text.startswith("ssh exited with 127: ")
    assert text.endswith("add --remote_python=PATH, a Python there with infini-run")
    assert answer.of("reach", "host1")[0] == OK


def test_a_python_without_infini_run_is_named(over_ssh, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    answer = over_ssh("host1", f"--remote_python={tmp_path}/bare/bin/python")
    grade, text = answer.of("reach", "host1")
    assert grade == PROBLEM
    assert "No module named 'infini_run'; install infini-run there, or add --remote_python=PATH" in text


def test_a_host_that_does_not_answer_is_named_at_the_limit(bed, over_ssh):
    config = bed.config_with("slow", "Host host2\n  ProxyCommand sleep 1000\n")
    answer = over_ssh("host[1-2]", "--join_timeout=8", config=config)  # ssh gives up after 10 s
    assert answer.code == 1
    assert answer.of("reach", "host2") == (PROBLEM, "no answer within 8 s: a launch would wait for it")
    assert answer.of("reach", "host1")[0] == OK
    until(lambda: "sleep" not in marked(b"PATH=").values())


def test_a_read_only_dev_shm_of_one_host_is_its_problem_alone(bed, over_ssh):
    on_host(bed, 4, "mount", "-t", "tmpfs", "-o", "ro", "tmpfs", "/dev/shm")
    try:
        answer = over_ssh("host[1,4]")
    finally:
        on_host(bed, 4, "umount", "/dev/shm")
    assert answer.of("/dev/shm", "host4")[0] == PROBLEM
    assert answer.of("/dev/shm", "host1") == (OK, answer.of("/dev/shm", "host1")[1])
    assert answer.code == 1


def test_the_output_of_a_login_shell_is_a_note(bed, over_ssh, tmp_path):
    noisy = tmp_path / "noisy"
    noisy.write_text('#!/bin/sh\necho "Welcome to $(uname -n)"\nfor word; do :; done\nexec sh -c "$word"\n')
    noisy.chmod(0o755)
    on_host(bed, 1, "mount", "--bind", str(noisy), "/bin/bash")
    try:
        answer = over_ssh("host1")
    finally:
        with bed.host_down(1):
            pass  # its mounts go with it
    grade, text = answer.of("login", "host1")
    assert grade == NOTE
    assert text.startswith("its shell prints 17 bytes without a terminal ('Welcome to host1')")


def test_the_text_for_many_machines_shows_what_is_not_well(bed, infini_run):
    with bed.host_down(4):
        command = infini_run("--doctor", "--hosts=host[1-4]", f"--ssh_config={bed.config}")
        assert command.wait() == 1
    text = command.out.decode()
    assert "\nhost4: 1 problem\n  problem  reach  ssh exited with 255" in text
    assert not any(line.startswith("  ok ") for line in text.splitlines())
    assert text.splitlines()[-1].startswith("5 machines: ")
