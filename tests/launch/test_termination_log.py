"""--termination_log: the first failure in the file that Kubernetes reads, and the probes of a container."""

from __future__ import annotations

import json
import os
import shlex
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.test_pid1 import STRAY, UNSHARE
from tests.launch.test_security import needs_root
from tests.multinode.test_elastic_by_hand import read_error_until
from tests.support.blocks import blocks
from tests.support.cluster import free_ports
from tests.support.command import COMMAND, play
from tests.support.hosts import Bed, agents
from tests.support.paths import ROOT
from tests.support.waiting import until

# A container sees its own launches alone, and not those of other tests.
POD = (*UNSHARE, "sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh")


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "termination-log"
    path.write_text("of an earlier container\n")
    return path


def test_first_failure_is_in_the_file(infini_run, path):
    words = play("@1", "say=no data", "exit=3", "@*", "wait")
    command = infini_run(f"--termination_log={path}", "--nproc_per_node=2", *words)
    assert command.wait() == 3
    text = path.read_text()
    assert text.rstrip("\n") == command.err.decode().rstrip("\n")
    assert f"rank 1 on {os.uname().nodename} failed: exit code 3" in text


def test_good_end_leaves_the_file_empty(infini_run, path):
    before = path.stat()
    assert infini_run(f"--termination_log={path}", "true").wait() == 0
    after = path.stat()
    assert (after.st_size, after.st_ino, after.st_mode) == (0, before.st_ino, before.st_mode)


def test_new_file_is_the_users_alone(infini_run, tmp_path):
    assert infini_run(f"--termination_log={tmp_path}/new", "true").wait() == 0
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o600


def test_launch_that_cannot_start_says_why(infini_run, path):
    command = infini_run(f"--termination_log={path}", "/no/such/program")
    assert command.wait() == 127
    assert path.read_text() == command.err.decode()
    assert "/no/such/program" in path.read_text()


def test_stop_is_no_failure(infini_run, path):
    command = infini_run(f"--termination_log={path}", *play("say=up", "wait"))
    command.read_until(b"up")
    command.signal(signal.SIGTERM)
    assert command.wait() == 143
    assert path.read_text() == ""


@pytest.mark.parametrize(("code", "count"), [(143, 1), (0, 0)])
def test_stop_names_leftover_processes_in_the_file_if_it_exits_nonzero(infini_run, path, code, count):
    words = play(*STRAY, f"end=TERM:{code}", "say=up", "wait")
    command = infini_run(f"--termination_log={path}", "--grace=0.5", *words)
    command.read_until(b"up")
    command.signal(signal.SIGTERM)
    assert command.wait() == code
    assert b"left behind: " in command.err
    assert path.read_text().count("left behind: ") == count


def test_file_has_at_most_what_kubernetes_reads(infini_run, path):
    code = "import sys; sys.stderr.write('Error: ' + '\u20ac' * 3000 + '\\n'); sys.exit(1)"
    flags = (f"--termination_log={path}", sys.executable, "-c", code)
    command = infini_run(*flags, env={**os.environ, "LC_ALL": "C.UTF-8"})
    assert command.wait() == 1
    data = path.read_bytes()
    assert len(data) <= 4096
    assert "rank 0" in data.decode()  # whole letters


BAD = {
    "{tmp}": "Is a directory",
    "{tmp}/no/file": "No such file or directory",
    "{tmp}/fifo": "it is a FIFO or a socket",
    "{tmp}/link": "it is a symbolic link",
    "/dev/full": "it is not a regular file",
}


@pytest.mark.parametrize("value", BAD)
def test_what_cannot_be_written_is_one_line_and_starts_nothing(infini_run, tmp_path, value):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("target")
    given = value.format(tmp=tmp_path)
    command = infini_run(f"--termination_log={given}", "touch", tmp_path / "started")
    assert command.wait() == 2
    (line,) = command.err.decode().splitlines()
    hint = "use a regular file of yours, or /dev/termination-log in a pod"
    assert line == f"infini-run: --termination_log={given} cannot be written: {BAD[value]}; {hint}"
    assert not (tmp_path / "started").exists()


@needs_root("a mount")
def test_file_that_is_a_mount_is_written_as_process_1(infini_run, tmp_path, path):
    """The kubelet mounts a file of its own on /dev/termination-log."""
    place = tmp_path / "place"
    place.touch()
    words = shlex.join([*COMMAND, f"--termination_log={place}", *play("exit=5")])
    command = subprocess.run(
        ["unshare", "--mount", *UNSHARE[1:], "sh", "-c", f"mount --bind {path} {place} && exec {words}"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert command.returncode == 5, command.stderr
    assert "exit code 5" in path.read_text()
    assert place.read_text() == ""


def probes():
    """The commands of the probes that the guide and its reference show."""
    import yaml

    pages = [
        block for name in ("start/containers.md", "reference/kubernetes.md") for block in blocks(ROOT / "docs" / name)
    ]
    texts = [block.text for block in pages if block.language == "yaml" and "Probe:" in block.text]
    shown = {name: probe for text in texts for name, probe in yaml.safe_load(text).items()}
    return {name: shown[name]["exec"]["command"] for name in ("startupProbe", "livenessProbe")}


@needs_root("a PID namespace")
def test_probes_of_the_guide_work_with_the_launcher_as_process_1(infini_run, gate, tmp_path):
    pytest.importorskip("yaml")
    first, second = gate(), gate()
    words = play("say=up", f"hold={first}", "notify=READY=1", "say=ready", f"hold={second}", "exit=0")
    command = infini_run("--nproc_per_node=8", *words, under=POD, gates=(first, second))
    command.pids_of(b"up", 8)
    launcher = Path(f"/proc/{command.pid}/task/{command.pid}/children").read_text().split()[0]
    inside = ("nsenter", "-t", launcher, "--pid", "--mount")
    (tmp_path / "infini-run").write_text(f'#!/bin/sh\nexec {shlex.join(COMMAND)} "$@"\n')
    (tmp_path / "infini-run").chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def ask(name):
        return subprocess.run([*inside, *probes()[name]], env=environ, check=False).returncode

    listed = subprocess.run([*inside, *COMMAND, "--list=json"], capture_output=True, check=True).stdout
    assert 1 in [launch["pid"] for launch in json.loads(listed)["launches"]]
    assert ask("startupProbe") != 0
    first.open()
    command.read_lines(b"ready", 8)
    assert ask("startupProbe") == 0
    assert ask("livenessProbe") == 0
    second.open()
    assert command.wait() == 0


@needs_root("a PID namespace")
def test_startup_probe_of_the_guide_holds_in_every_pod(infini_run, gate, tmp_path):
    """The pod with index 0 sees the ranks of all pods, another one its own."""
    pytest.importorskip("yaml")
    first, second = gate(), gate()
    (tmp_path / "infini-run").write_text(f'#!/bin/sh\nexec {shlex.join(COMMAND)} "$@"\n')
    (tmp_path / "infini-run").chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "INFINI_RUN_TOKEN": "t" * 32}
    flags = ("--nnodes=2", "--nproc_per_node=3", f"--rdzv_endpoint=127.0.0.1:{free_ports(2)}")
    ready = play("say=up", f"hold={first}", "@5", f"hold={second}", "@*", "notify=READY=1", "say=ready", "wait")
    commands = [
        infini_run(*flags, f"--node_rank={node}", *ready, under=POD, gates=(first, second), env=environ)
        for node in range(2)
    ]

    def ask():
        codes = []
        for command in commands:
            inside = Path(f"/proc/{command.pid}/task/{command.pid}/children").read_text().split()[0]
            words = ["nsenter", "-t", inside, "--pid", "--mount", *probes()["startupProbe"]]
            codes.append(subprocess.run(words, env=environ, check=False).returncode)
        return codes

    def see(word, count):
        while commands[0].out.count(word) < count:
            commands[0].read_more()

    see(b"up ", 6)
    assert ask() == [1, 1]
    first.open()
    see(b"ready ", 5)
    assert ask() == [1, 1]
    second.open()
    see(b"ready ", 6)
    until(lambda: ask() == [0, 0])
    os.kill(
        int(Path(f"/proc/{commands[0].pid}/task/{commands[0].pid}/children").read_text().split()[0]), signal.SIGTERM
    )
    assert [command.wait() for command in commands] == [143, 143]


@needs_root("a PID namespace")
def test_startup_probe_of_the_guide_passes_in_waiting_spare(infini_run, gate, tmp_path):
    """A spare has no ranks that could be ready; the pod with index 0 asks for those of all pods."""
    pytest.importorskip("yaml")
    held = gate()
    (tmp_path / "infini-run").write_text(f'#!/bin/sh\nexec {shlex.join(COMMAND)} "$@"\n')
    (tmp_path / "infini-run").chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "INFINI_RUN_TOKEN": "t" * 32}
    flags = ("--nnodes=1", "--spares=1", f"--rdzv_endpoint=127.0.0.1:{free_ports(2)}")
    ready = play("say=up", f"hold={held}", "notify=READY=1", "say=ready", "wait")
    commands = [infini_run(*flags, *ready, under=POD, gates=(held,), env=environ) for _ in range(2)]

    def ask():
        codes = []
        for index, command in enumerate(commands):
            inside = Path(f"/proc/{command.pid}/task/{command.pid}/children").read_text().split()[0]
            words = ["nsenter", "-t", inside, "--pid", "--mount", *probes()["startupProbe"]]
            pod = {**environ, "JOB_COMPLETION_INDEX": str(index)}
            codes.append(subprocess.run(words, env=pod, check=False).returncode)
        return codes

    read_error_until(commands, b"; spares: ")
    commands.sort(key=lambda command: b"; spares: " not in command.err)  # the head first, as in the pod with index 0
    commands[0].read_until(b"up ")
    assert ask() == [1, 0]
    held.open()
    commands[0].read_until(b"ready ")
    until(lambda: ask() == [0, 0])
    os.kill(
        int(Path(f"/proc/{commands[0].pid}/task/{commands[0].pid}/children").read_text().split()[0]), signal.SIGTERM
    )
    assert [command.wait() for command in commands] == [143, 143]


@needs_root("a PID namespace")
def test_liveness_probe_of_the_guide_passes_between_two_attempts(infini_run, tmp_path):
    pytest.importorskip("yaml")
    (tmp_path / "infini-run").write_text(f'#!/bin/sh\nexec {shlex.join(COMMAND)} "$@"\n')
    (tmp_path / "infini-run").chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    flags = ("--max_restarts=1", "--restart_delay=1000", "--nproc_per_node=2")
    command = infini_run(*flags, *play("@0", "exit=3", "@*", "wait"), under=POD)
    command.read_error_until(b"restart 1 of 1")
    launcher = Path(f"/proc/{command.pid}/task/{command.pid}/children").read_text().split()[0]
    inside = ("nsenter", "-t", launcher, "--pid", "--mount")

    def ask(name):
        done = subprocess.run([*inside, *probes()[name]], env=environ, capture_output=True, check=False)
        assert done.stderr == b""
        return done.returncode

    until(lambda: ask("livenessProbe") == 0)
    assert ask("startupProbe") != 0
    os.kill(int(launcher), signal.SIGTERM)
    assert command.wait() == 143


@needs_root("a PID namespace")
def test_liveness_probe_of_the_guide_passes_while_a_pod_waits_for_the_first(infini_run, tmp_path):
    """Only the launcher of the pod with index 0 is in --list from its start on."""
    pytest.importorskip("yaml")
    (tmp_path / "infini-run").write_text(f'#!/bin/sh\nexec {shlex.join(COMMAND)} "$@"\n')
    (tmp_path / "infini-run").chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "INFINI_RUN_TOKEN": "t" * 32}
    flags = ("--nnodes=2", "--node_rank=1", f"--rdzv_endpoint=127.0.0.1:{free_ports(2)}")
    command = infini_run(*flags, *play("wait"), under=POD, env=environ)
    command.read_error_until(b"waiting for node 0")
    launcher = Path(f"/proc/{command.pid}/task/{command.pid}/children").read_text().split()[0]
    inside = ("nsenter", "-t", launcher, "--pid", "--mount")

    def ask(index):
        pod = {**environ, "JOB_COMPLETION_INDEX": index}
        return subprocess.run([*inside, *probes()["livenessProbe"]], env=pod, check=False).returncode

    assert [ask("1"), ask("0")] == [0, 1]
    os.kill(int(launcher), signal.SIGTERM)
    assert command.wait() == 143


@pytest.mark.xdist_group(__name__)
def test_head_writes_the_first_failure_of_all_nodes(infini_run, path):
    bed = Bed(hosts=2)
    try:
        flags = ("--hosts=host[1-2]", f"--ssh_config={bed.config}", f"--termination_log={path}")
        assert infini_run(*flags, *play("@1", "exit=3", "@*", "wait")).wait() == 3
        assert "rank 1 on host2 failed: exit code 3" in path.read_text()
        assert infini_run(*flags, "/no/such/program").wait() == 127
        assert "/no/such/program" in path.read_text()
    finally:
        bed.close()
        until(lambda: not agents())
