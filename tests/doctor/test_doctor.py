"""--doctor on this machine: it says what is really there, and what a launch then really does."""

from __future__ import annotations

import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from infini_run.core.group import GUARD
from infini_run.doctor.command import compare
from infini_run.doctor.files import check_leftovers
from infini_run.doctor.finding import NOTE, OK, PROBLEM
from infini_run.doctor.limits import check_limits, describe_core, describe_files, describe_processes
from infini_run.doctor.machines import Machine, look_at
from infini_run.doctor.trial import _MOUNTS, TrialPlace, describe_cgroup
from infini_run.errors import UsageError
from infini_run.options.options import resolve
from infini_run.version import VERSION
from tests.support.nvml import FOUR
from tests.support.waiting import until

NAMES = [
    "infini-run", "kernel", "pidfd", "subreaper", "memfd", "close_range", "clone3", "launch", "cgroup", "open files",
    "processes", "core files", "port", "addresses", "ssh", "/dev/shm", "left-over files", "temporary files", "HOME",
]  # fmt: skip
needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="namespaces are made by root"
)


def limits(*pairs):
    """Lower limits, as prlimit does, in the process that the command becomes."""
    return lambda: [resource.setrlimit(which, (value, value)) for which, value in pairs]


def test_it_looks_at_all_of_this_machine_and_starts_no_program(doctor, tmp_path):
    answer = doctor("--", "touch", tmp_path / "started")
    assert list(answer.findings())[: len(NAMES)] == NAMES
    assert {"GPUs"} <= set(answer.findings())
    assert {finding["grade"] for finding in answer.findings().values()} <= {OK, NOTE, PROBLEM}
    problems = [finding for finding in answer.findings().values() if finding["grade"] == PROBLEM]
    assert answer.code == (1 if problems else 0)
    assert answer.content["problems"] == len(problems)
    facts = answer.machines["this machine"]["facts"]
    assert (facts["host"], facts["version"], facts["kernel"]) == (os.uname().nodename, VERSION, os.uname().release)
    assert abs(answer.machines["this machine"]["clock_ahead_s"]) < 60
    grade, text = answer.of("infini-run")
    assert grade == OK
    assert text.startswith(f"{VERSION} in ")
    assert text.endswith(f"at {sys.executable}")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("closed", ["<&-", ">&-", "<&- >&- 2>&-"])
def test_doctor_looks_though_stdio_is_closed(infini_run, closed):
    command = infini_run("--doctor", under=("sh", "-c", f'exec "$@" {closed}', "sh"))
    assert command.wait() == infini_run("--doctor").wait()
    assert command.err == b""


def test_the_text_is_one_screen_with_a_line_or_more_for_each_finding(infini_run):
    command = infini_run("--doctor")
    command.wait()
    first, *lines = command.out.decode().splitlines()
    assert first.startswith(f"this machine ({os.uname().nodename}): ")
    named = [re.match(r"  (ok|note|problem) +(\S.*?)  ", line) for line in lines]
    assert [match[2] for match in named if match][: len(NAMES)] == NAMES
    assert len(lines) <= 50
    too_long = [line for line in lines if len(line) > 118]
    assert [line for line in too_long if len(line.split()) > 1] == []  # a path is not broken


def test_only_the_command_line_asks_it_and_its_form_is_checked():
    assert resolve(["--doctor"], {}).arguments == ("text",)
    assert resolve(["--doctor=json", "--nproc_per_node=2", "a.py"], {}).question == "doctor"
    assert resolve(["a.py"], {"INFINI_RUN_DOCTOR": "json", "PET_DOCTOR": "1"}).question == ""
    assert resolve(["--nodoctor", "a.py"], {}).question == ""
    with pytest.raises(UsageError, match="--doctor=loud: expected text or json"):
        resolve(["--doctor=loud"], {})
    with pytest.raises(UsageError, match="needs an allocation"):
        resolve(["--doctor", "--engine=slurm"], {})


@pytest.mark.parametrize(
    ("engine", "why"),
    [
        ("pbs", "pbs_tmrsh brings back nothing of what is written on a node"),
        ("mpi", "one mpirun reaches all nodes, and ends all if one fails"),
    ],
)
@pytest.mark.parametrize("hosts", [(), ("--hosts=a,b",)])
def test_engine_without_answers_of_nodes_is_refused_first(engine, why, hosts, infini_run):
    command = infini_run("--doctor", f"--engine={engine}", *hosts)
    assert command.wait() == 2
    way = "use --engine=ssh --hosts=a,b, or run infini-run --doctor on each node"
    assert command.err.decode().splitlines() == [f"infini-run: --doctor with --engine={engine}: {why}; {way}"]


def test_doctor_in_a_step_looks_at_its_node_alone():
    """Open MPI does not report the address of node 0, which a launch would need."""
    environ = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}
    environ |= {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    asked = resolve(["--doctor", "--engine=auto"], environ)
    assert (asked.question, asked.node_list) == ("doctor", None)
    with pytest.raises(UsageError, match="does not report the address of node 0"):
        resolve(["--engine=auto", "a.py"], environ)


# ---- it reports what a launch does


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="this process may use one CPU alone")
def test_cores_that_srun_binds_are_a_note():
    environ, before = {"SLURM_STEP_ID": "0", "SLURM_CPUS_ON_NODE": str(os.cpu_count())}, os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})  # of this thread
    try:
        (finding,) = [each for each in check_limits(environ) if each.name == "CPUs"]
    finally:
        os.sched_setaffinity(0, before)
    assert finding.grade == NOTE
    assert finding.text.startswith("srun binds this process to 1 CPU of ")
    assert not [each for each in check_limits({}) if each.name == "CPUs"]


def test_few_descriptors_are_a_problem_where_no_rank_fits(doctor):
    grade, text = doctor(preexec_fn=limits((resource.RLIMIT_NOFILE, 40))).of("open files")
    assert (grade, text) == (PROBLEM, "ulimit -n is 40 (hard: 40), too few for one rank; raise it")
    answer = doctor(preexec_fn=limits((resource.RLIMIT_NOFILE, 100)))
    grade, text = answer.of("open files")
    assert grade == NOTE
    assert "ulimit -n is 100 (hard: 100), enough for the pipes of 10 ranks" in text


def test_so_many_ranks_as_it_says_are_launched_with_that_limit(infini_run):
    command = infini_run(
        "--nproc_per_node=10", "--console=lines", "true", preexec_fn=limits((resource.RLIMIT_NOFILE, 100))
    )
    assert command.wait() == 0, command.err


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="root lets itself be another user")
def test_few_processes_are_a_problem_where_not_one_rank_starts(doctor, infini_run):
    may_read = ("--inh-caps=+dac_override", "--ambient-caps=+dac_override")  # this Python may be in a closed folder

    def limited(count: int, launch: int) -> tuple[str, ...]:
        uid = 300_000 + 4 * os.getpid() + launch  # its own: what the launch before has killed counts until it is gone
        return "prlimit", f"--nproc={count}:{count}", "setpriv", f"--reuid={uid}", "--clear-groups", *may_read

    answer = doctor(under=limited(2, 0))
    text = "0 more processes or threads can start (ulimit -u, 2): no rank can start; raise it"
    assert answer.of("processes") == (PROBLEM, text)
    assert answer.of("launch")[0] == PROBLEM
    assert "the limit on processes was reached; raise ulimit -u" in answer.of("launch")[1]
    assert answer.code == 1
    assert infini_run("true", under=limited(2, 1)).wait() == 1
    few = doctor(under=limited(5, 2))
    assert few.of("processes")[0] == NOTE
    assert few.of("launch")[0] == OK
    assert infini_run("true", under=limited(5, 3)).wait() == 0


@needs_root
def test_a_read_only_dev_shm_is_a_problem(doctor):
    mount = 'mount -t tmpfs -o ro,size=1m tmpfs /dev/shm && exec "$@"'
    answer = doctor(under=("unshare", "-m", "--propagation", "private", "sh", "-c", mount, "at"))
    text = "cannot be written (Read-only file system): NCCL and the data loaders of PyTorch fail without it"
    assert answer.of("/dev/shm") == (PROBLEM, text)
    assert answer.code == 1


@needs_root
def test_a_small_dev_shm_is_a_note(doctor):
    mount = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
    grade, text = doctor(under=("unshare", "-m", "--propagation", "private", "sh", "-c", mount, "at")).of("/dev/shm")
    assert grade == NOTE
    assert text.startswith(
        "64 of 64 MiB are free: SIGBUS may kill data loaders and NCCL; use docker run --shm-size=8g"
    )


def test_what_the_core_is_told_to_do_without_is_not_reported_as_there(doctor):
    grade, text = doctor(env={**os.environ, "INFINI_RUN_DEBUG": "nocgroup"}).of("cgroup")
    assert grade == NOTE
    assert "of their own with v2 alone" in text or "not delegated" in text or "none is visible" in text


TAKES_PORT = """
import os, socket, sys
taken = socket.create_server(("", 29500))
taken.set_inheritable(True)
os.execvp(sys.argv[1], sys.argv[1:])
"""


@needs_root
@pytest.mark.parametrize("name", ["0abc", "12", "127.example", "10.0.0.1"])
def test_host_name_is_no_address_of_the_machine(doctor, name):
    """Container ids, which are names of hosts, often begin with a digit."""
    alone = ("unshare", "--net", "--uts", "sh", "-c", 'ip link set lo up; hostname $1; shift; exec "$@"', "sh", name)
    grade, text = doctor(under=alone).of("addresses")
    assert grade == NOTE
    assert text.startswith("loopback only: ")


@needs_root
def test_a_taken_port_and_a_home_that_is_not_there_are_notes(doctor):
    """In a network of its own: a test that reports at the same time would find the port taken."""
    env = {**os.environ, "HOME": "/nosuch", "TMPDIR": "/nosuch/tmp"}
    answer = doctor(under=("unshare", "--net", sys.executable, "-ISc", TAKES_PORT), env=env)
    grade, text = answer.of("port")
    assert grade == NOTE
    assert text.startswith(
        "29500, the usual MASTER_PORT, is not available (Address already in use); add --standalone"
    )
    assert answer.of("HOME")[0] == NOTE
    assert answer.of("HOME")[1].startswith("/nosuch cannot be written (No such file or directory)")
    assert answer.of("temporary files")[0] == PROBLEM


def test_gpus_are_counted_and_who_holds_them_is_named(doctor, driver):
    environ = {
        **os.environ,
        "LD_LIBRARY_PATH": str(driver.folder),
        **driver.settings(FOUR),
        "NVML_STUB_HELD": f"{FOUR[0].split('|')[0]}|{os.getpid()}|2048",
    }
    answer = doctor(env=environ)
    grade, text = answer.of("GPUs")
    assert (grade, text) == (OK, "4 GPUs (NVIDIA H200): --nproc_per_node=auto starts a rank per GPU")
    grade, text = answer.of("GPU memory")
    assert grade == NOTE
    assert text.startswith(f"in use: GPU 0: {Path('/proc/self/comm').read_text().strip()} (pid {os.getpid()}, ")
    assert "has 2048 MiB; ranks may run out of it" in text
    shown = doctor(env={**environ, "CUDA_VISIBLE_DEVICES": ""}).of("GPUs")
    assert shown == (NOTE, "CUDA_VISIBLE_DEVICES= shows none: --nproc_per_node=gpu fails")


def test_folders_of_launches_that_were_killed_are_counted(tmp_path):
    old = tmp_path / "infini-run-ir-0123456789ab"
    old.mkdir(mode=0o700)
    (tmp_path / "infini-run-ir-ba9876543210").mkdir(mode=0o700)  # a launch that has just begun
    os.utime(old, (1, 1))
    found = check_leftovers(str(tmp_path))
    assert found.grade == NOTE
    assert found.text == (
        f"a folder in {tmp_path}, of killed launches: the next launch removes them; "
        "1 belongs to running launches or other users"
    )
    old.rmdir()
    assert check_leftovers(str(tmp_path)).grade == OK


# ---- it is bounded, and leaves nothing


def machine(script, label="x"):
    return Machine(label, ["sh", "-c", script], explain=lambda code, stderr: f"ended with {code}: {stderr.strip()}")


MAGIC = r"printf '\000infini-run doctor 1\n'"
FINDING = """echo '{"check": "kernel"}'; echo '{"name": "kernel", "grade": "ok", "text": "fine"}'"""


def look(*machines, limit_s=30.0):
    look_at(machines, {"PATH": os.environ["PATH"]}, limit_s)
    return [[(finding.grade, finding.name, finding.text) for finding in one.findings] for one in machines]


def test_a_check_that_hangs_is_named_and_what_came_before_it_is_kept():
    hung = machine(f"""{MAGIC}; {FINDING}; echo '{{"check": "GPUs"}}'; exec sleep 1000""")
    silent = machine("echo the driver waits >&2; exec sleep 1000")
    ended = machine("echo no such thing >&2; exit 3")
    assert look(hung, silent, ended, limit_s=3.0) == [
        [(OK, "kernel", "fine"), (PROBLEM, "GPUs", "this check did not end within 3 s; skipped it")],
        [(PROBLEM, "reach", "no answer within 3 s: a launch would wait for it; its last output: the driver waits")],
        [(PROBLEM, "reach", "ended with 3: no such thing")],
    ]


def test_what_a_shell_prints_at_login_is_a_note_and_is_skipped():
    ((first, login),) = look(machine(f"""echo Welcome to x; {MAGIC}; {FINDING}; echo '{{"done": true}}'"""))
    assert first == (OK, "kernel", "fine")
    assert login[:2] == (NOTE, "login")
    assert login[2].startswith("its shell prints 13 bytes without a terminal ('Welcome to x')")


def test_one_that_ends_in_the_midst_says_in_which_check():
    ((first, second),) = look(machine(f"""{MAGIC}; {FINDING}; kill -SEGV $$"""))
    assert first[0] == OK
    assert second == (PROBLEM, "kernel", "this check ended early: ended with 139: ")


def test_more_machines_than_are_asked_at_a_time_all_answer():
    machines = [machine(f"""{MAGIC}; {FINDING}; echo '{{"done": true}}'""") for _ in range(70)]
    assert look(*machines) == [[(OK, "kernel", "fine")]] * 70


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_doctor_that_is_ended_leaves_no_command(infini_run, tmp_path, number):
    ssh = tmp_path / "bin/ssh"
    ssh.parent.mkdir()
    ssh.write_text(f"#!/bin/sh\ncd {shlex.quote(str(tmp_path))} && echo $$ > new && mv new pid; exec sleep 1000\n")
    ssh.chmod(0o755)
    command = infini_run("--doctor", "--hosts=a", env={**os.environ, "PATH": f"{ssh.parent}:{os.environ['PATH']}"})
    until((tmp_path / "pid").exists)
    pid = int((tmp_path / "pid").read_text())
    command.signal(number)
    assert command.wait() == -number
    assert command.err == b""
    until(lambda: not os.path.exists(f"/proc/{pid}"))


# ---- what is said of limits and differences


def test_limits_are_described_for_as_many_ranks_as_there_are_cpus():
    assert describe_files(1024, resource.RLIM_INFINITY, 8).grade == OK
    assert describe_files(1024, 4096, 8).grade == OK
    assert describe_files(1024, 4096, 1000).grade == NOTE
    assert describe_files(256, 4096, 8).text.endswith(
        "a rank has 256, too few for many data loaders; run ulimit -n 1024"
    )
    assert describe_processes([], 8).text == "no limit"
    assert describe_processes([(5000, "a"), (100, "ulimit -u, 4096")], 8).grade == NOTE
    assert describe_processes([(5000, "a")], 8).grade == OK
    assert describe_processes([(-3, "b")], 8).text.startswith("0 more processes or threads can start (b)")
    assert describe_core(0, "core").grade == OK
    assert describe_core(resource.RLIM_INFINITY, "|/usr/lib/systemd/systemd-coredump %P").grade == OK
    assert describe_core(resource.RLIM_INFINITY, "core").grade == NOTE


def test_a_cgroup_of_the_ranks_own_is_seen_in_what_it_reads():
    place = TrialPlace(is_root=False, is_process_1=False, has_systemd=False)
    delegated = describe_cgroup(
        "0::/user.slice/me\n", "1:pids:/x\n0::/user.slice/me/infini-run-doctor-1/rank-0\n", place
    )
    assert (delegated.grade, delegated.name) == (OK, "cgroup")
    assert describe_cgroup("1:pids:/x\n", "1:pids:/x\n", place).text.startswith(
        "v1, while a cgroup per rank needs v2"
    )
    assert describe_cgroup("", "", place).text.startswith("none is visible")


@pytest.mark.skipif(
    not any(os.path.exists(f"{mount}/cgroup.controllers") for mount in _MOUNTS), reason="needs cgroup v2"
)
def test_cgroup_advice_names_systemd_only_where_it_runs():
    places = [TrialPlace(is_root=False, is_process_1=False, has_systemd=systemd) for systemd in (False, True)]
    without, with_it = [describe_cgroup("0::/me\n", "0::/me\n", place).text for place in places]
    assert with_it == without + "; systemd-run --user --scope -p Delegate=yes infini-run ... delegates one"


@needs_root
def test_process_1_of_a_container_needs_no_cgroup(doctor):
    grade, text = doctor(under=("unshare", "--pid", "--fork", "--mount-proc")).of("cgroup")
    assert grade == OK
    assert text.startswith(("none per rank, and none is needed: infini-run is process 1", "v2, and delegated"))


IN_CONTAINER = "infini-run is process 1 here, and needs a guard only for jobs that may lose nodes (--spares)"


@needs_root
@pytest.mark.parametrize(
    ("namespaces", "hide", "finding"),
    [
        ("--pid --fork --mount-proc", "", (OK, f"a process started; {IN_CONTAINER}")),
        ("--pid --fork --mount-proc", "/dev/null", (NOTE, f"a process started, but not the guard; {IN_CONTAINER}")),
        ("--mount", "", (OK, "a process started with its guard, which ends ranks if infini-run is killed")),
        (
            "--mount",
            "/dev/null",
            (NOTE, "a process started, but not the guard: if infini-run is killed, its ranks survive"),
        ),
    ],
)
def test_guard_is_reported_where_launches_have_one(doctor, namespaces, hide, finding):
    """A guard behind /dev/null cannot be executed."""
    command = f"mount --bind {hide} {shlex.quote(os.fsdecode(GUARD))} && " * bool(hide) + 'exec "$@"'
    assert doctor(under=("unshare", *namespaces.split(), "sh", "-c", command, "sh")).of("launch") == finding


def test_what_differs_between_nodes_is_graded_by_what_it_does_to_a_launch():
    here = {"version": VERSION, "python": "3.11.7", "architecture": "x86_64"}
    assert [finding.grade for finding in compare(here, here, 0.4)] == [OK, OK]
    (refused, _) = compare({**here, "version": "0.1.0"}, here, 0.0)
    assert refused.grade == PROBLEM
    assert refused.text.startswith(f"infini-run there is 0.1.0, here {VERSION}: a launch fails")
    assert [finding.name for finding in compare({**here, "python": "3.12.1"}, here, 0.0)][1] == "versions"
    assert [f.grade for f in compare({**here, "python": "3.11.2"}, here, -2.0)] == [OK, NOTE]
    late = compare(here, here, -301.0)[-1]
    assert (late.grade, late.name) == (PROBLEM, "clock")
    assert late.text.startswith("301.0 s behind")


def test_a_launch_imports_nothing_of_it():
    words = [sys.executable, "-X", "importtime", "-m", "infini_run", "--nproc_per_node=1", "true"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0
    assert "infini_run.cli" in done.stderr
    assert "infini_run.doctor" not in done.stderr
