"""Several programs in one job on many nodes, through sshd hosts and by hand: their worlds, one failure, one end."""

from __future__ import annotations

import json
import os
import shlex
import signal

import pytest

from tests.display.test_chrome_trace import validate
from tests.launch.test_program_order import ready
from tests.multinode.test_by_hand import node, port, told  # noqa: F401
from tests.multinode.test_control_nodes import ask, row_of, word  # noqa: F401
from tests.multinode.test_elastic_ssh import launcher_of
from tests.multinode.test_many_ssh import bed, many, no_agent_left, own_lines  # noqa: F401
from tests.support.nvml import FOUR, driver, stub_folder  # noqa: F401
from tests.support.processes import marked
from tests.support.waiting import until

pytestmark = pytest.mark.xdist_group(__name__)  # one bed for all of them
SEEN = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "GROUP_RANK",
    "GROUP_WORLD_SIZE",
)  # fmt: skip
SAY = f"echo {' '.join('$' + name for name in SEEN)} $MASTER_ADDR $MASTER_PORT"
# What each rank of `6 : 1` on two nodes sees, in separate worlds and in one.
SEPARATE = {
    f"host{1 + rank // 6}:t {rank}": f"{rank} 12 {rank % 6} 6 t {rank} 12 {rank // 6} 2" for rank in range(12)
} | {f"host{1 + rank}:r {rank}": f"{rank} 2 0 1 r {rank} 2 {rank} 2" for rank in range(2)}
ONE = {f"host{1 + rank // 6}:t {rank}": f"{rank} 14 {rank % 6} 7 t {rank} 12 {rank // 6} 2" for rank in range(12)} | {
    f"host{1 + rank}:r {rank}": f"{12 + rank} 14 6 7 r {rank} 2 {rank} 2" for rank in range(2)
}


def sh(script):
    return ["sh", "-c", script]


def two(first, second, *flags, of_first=(), of_second=()):
    """The words of a job of the programs t and r."""
    return [*flags, "--program=t", *of_first, *first, ":", "--program=r", *of_second, *second]


def said(command):
    """What each rank has written last, by its label."""
    return dict(line[1:].split("] ", 1) for line in command.out.decode().splitlines())


def report_of(path):
    return json.loads(path.read_text())


def waits(command, start):
    """Read until a line begins so; return its words."""
    return command.read_lines(start)[0].split()


@pytest.mark.parametrize(("flags", "table"), [((), SEPARATE), (("--one_world",), ONE)], ids=["worlds", "one-world"])
def test_six_and_one_on_two_hosts(many, flags, table):  # noqa: F811
    words = two(sh(SAY), sh(SAY), *flags, of_first=("--nproc_per_node=6",), of_second=("--nproc_per_node=1",))
    command = many(*words, hosts="host1,host2")
    assert command.wait() == 0, command.err
    found = said(command)
    assert {label: " ".join(text.split()[: len(SEEN)]) for label, text in found.items()} == table
    meetings = {label.split(":")[1][0]: text.split()[len(SEEN) :] for label, text in found.items()}
    assert {place[0] for place in meetings.values()} == {"127.0.78.1"}
    assert (meetings["t"] == meetings["r"]) == bool(flags)
    assert own_lines(command) == []


def test_program_is_on_its_nodes_only(many):  # noqa: F811
    """The first node of a program is where its ranks meet; `rest` is what no other program lists."""
    show = sh(f"{SAY}; echo $JOB_PROGRAMS")
    of_first, of_second = ("--nproc_per_node=2", "--on_nodes=1-2"), ("--nproc_per_node=1", "--on_nodes=rest")
    command = many(*two(show, sh(SAY), of_first=of_first, of_second=of_second))
    assert command.wait() == 0, command.err
    lines = [line[1:].split("] ", 1) for line in command.out.decode().splitlines()]
    places = {label: text.split() for label, text in lines if text[0] != "["}
    assert sorted(places) == ["host1:r 0", "host2:t 0", "host2:t 1", "host3:t 2", "host3:t 3", "host4:r 1"]
    assert places["host3:t 2"][:10] == ["2", "4", "0", "2", "t", "2", "4", "1", "2", "127.0.78.2"]
    assert places["host4:r 1"][:10] == ["1", "2", "0", "1", "r", "1", "2", "1", "2", "127.0.78.1"]
    (text,) = {text for _, text in lines if text[0] == "["}
    assert [(each["name"], each["size"], each["hosts"], each["addr"]) for each in json.loads(text)] == [
        ("t", 4, ["host2", "host3"], "127.0.78.2"),
        ("r", 2, ["host1", "host4"], "127.0.78.1"),
    ]


def test_ports_of_job_programs_are_those_of_the_worlds(many):  # noqa: F811
    show = sh("echo $MASTER_PORT $JOB_PROGRAMS")
    command = many(*two(show, show, of_second=("--on_nodes=1",)), hosts="host1,host2")
    assert command.wait() == 0, command.err
    for label, text in said(command).items():
        port, told = text.split(" ", 1)  # noqa: F811
        (own,) = (each for each in json.loads(told) if each["name"] == label.split(":")[1][0])
        assert own["port"] == int(port)


@pytest.mark.parametrize("where", [0, 1])
def test_failure_on_one_host_ends_all_programs(many, tmp_path, where):  # noqa: F811
    first, second = sh("echo up; exec sleep 1000"), sh(f'test "$RANK" = {where} && exit 7; exec sleep 1000')
    command = many(*two(first, second, f"--report={tmp_path}/r"), nproc=2, hosts="host1,host2")
    assert command.wait() == 7
    assert own_lines(command)[-1].startswith(f"infini-run: r {where} on host{1 + where} failed: exit code 7 (pid ")
    report = report_of(tmp_path / "r")
    assert report["first_failure"] == 4 + where
    assert [(each["rank"], each["program"], each["program_rank"], each["host"]) for each in report["ranks"]] == [
        (rank, "t", rank, f"host{1 + rank // 2}") for rank in range(4)
    ] + [(4 + rank, "r", rank, f"host{1 + rank}") for rank in range(2)]
    assert not marked(f"INFINI_RUN_ID={report['launch_id']}".encode())


def test_end_of_a_program_on_all_its_hosts_ends_the_job(many, bell, tmp_path):  # noqa: F811
    """--ends_job waits for the ranks of the program on all nodes."""
    script = f'test "$RANK" = 0 && exit 0; echo here; read go < {shlex.quote(bell.path)}; echo last'
    words = two(sh("exec sleep 1000"), sh(script), f"--report={tmp_path}/r", of_second=("--ends_job",))
    command = many(*words, nproc=1, hosts="host1,host2")
    command.read_lines(b"[host2:r 1] here")
    bell.ring("go")
    assert command.wait() == 0, command.err
    assert b"[host2:r 1] last" in command.out
    report = report_of(tmp_path / "r")
    assert (report["ended_by"], report["exit_code"]) == ("r", 0)
    assert [each["stopped"] for each in report["ranks"]] == [True, True, False, False]
    assert own_lines(command) == []


def test_signal_stops_all_programs_on_all_hosts(many):  # noqa: F811
    up = sh("echo up; exec sleep 1000")
    command = many(*two(up, up), nproc=1, hosts="host1,host2")
    for start in (b"[host1:t 0]", b"[host2:t 1]", b"[host1:r 0]", b"[host2:r 1]"):
        command.read_lines(start)
    command.signal(signal.SIGTERM)
    assert command.wait() == 128 + signal.SIGTERM


def test_restart_is_that_of_all_programs_on_all_hosts(many):  # noqa: F811
    script = "echo $TORCHELASTIC_RESTART_COUNT $MASTER_PORT; test $TORCHELASTIC_RESTART_COUNT = 1 || exit 3"
    flags = ("--max_restarts=1", "--restart_delay=0")
    waiting = sh("echo $JOB_PROGRAMS; exec sleep 1000")
    words = two(waiting, sh(script), *flags, of_second=("--ends_job", "--on_nodes=1"))
    command = many(*words, nproc=1, hosts="host1,host2")
    assert command.wait() == 0, command.err
    lines = [line[1:].split("] ", 1) for line in command.out.decode().splitlines()]
    counts = [text.split() for label, text in lines if label == "host2:r 0"]
    assert [count for count, _ in counts] == ["0", "1"]
    learned = [json.loads(text)[1]["port"] for label, text in lines if label == "host1:t 0"]
    assert {str(port) for port in learned} <= {port for _, port in counts}  # noqa: F811


def test_lost_host_is_reported_with_its_programs(many, bell, tmp_path):  # noqa: F811
    up = sh(f"echo up > {shlex.quote(bell.path)}; exec sleep 1000")
    command = many(*two(up, up, f"--report={tmp_path}/r", of_second=("--on_nodes=1",)), nproc=1, hosts="host1,host2")
    bell.hear(3)
    os.kill(launcher_of(1), signal.SIGKILL)
    assert command.wait() == 1
    report = report_of(tmp_path / "r")
    lost = [(each["program"], each["program_rank"], each["local_rank"]) for each in report["ranks"] if each["lost"]]
    assert lost == [("t", 1, 0), ("r", 0, 0)]


def test_logs_are_in_a_folder_per_program(many, tmp_path):  # noqa: F811
    says = sh("echo $ROLE_NAME $RANK")
    command = many(*two(says, says, f"--log_dir={tmp_path}/logs"), nproc=1, hosts="host1,host2")
    assert command.wait() == 0, command.err
    found = {str(path.relative_to(tmp_path / "logs")) for path in (tmp_path / "logs").rglob("*.log")}
    assert found == {"t/rank_0.log", "t/rank_1.log", "r/rank_0.log", "r/rank_1.log"}
    assert (tmp_path / "logs/r/rank_1.log").read_text().splitlines()[0] == "r 1"


def test_logs_of_a_program_are_in_its_own_folder(many, tmp_path):  # noqa: F811
    says = sh("echo $ROLE_NAME $RANK")
    command = many(*two(says, says, of_second=("--log_dir=own",)), nproc=1, hosts="host1,host2", cwd=tmp_path)
    assert command.wait() == 0, command.err
    found = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*.log")}
    assert found == {f"own/rank_{rank}.log": f"r {rank}\n" for rank in range(2)}


def test_flags_name_ranks_by_program(many, tmp_path):  # noqa: F811
    (tmp_path / "typed").write_text("typed\n")
    says = sh("echo $ROLE_RANK; cat")
    flags = ("--ranks_on_console=t:1,r:0-1", "--stdin=r:1")
    with open(tmp_path / "typed") as stdin:
        command = many(*two(says, says, *flags), nproc=1, hosts="host1,host2", stdin=stdin)
    assert command.wait() == 0, command.err
    assert sorted(command.out.decode().splitlines()) == [
        "[host1:r 0] 0", "[host2:r 1] 1", "[host2:r 1] typed", "[host2:t 1] 1",
    ]  # fmt: skip


def test_rank_of_a_program_that_is_not_there_is_one_line(many):  # noqa: F811
    command = many(*two(["true"], ["true"], "--stdin=r:2"), nproc=1, hosts="host1,host2")
    assert command.wait() == 2
    assert own_lines(command) == ["infini-run: --stdin: unknown rank r:2; use r:0 to r:1"]


def test_trace_names_ranks_by_program(many, tmp_path):  # noqa: F811
    command = many(*two(["true"], ["true"], f"--trace={tmp_path}/t"), nproc=1, hosts="host1,host2")
    assert command.wait() == 0, command.err
    content = report_of(tmp_path / "t")
    validate(content)
    found = {
        each["name"]: (each["args"]["program"], each["args"]["rank"])
        for each in content["traceEvents"]
        if each.get("cat") == "rank" and "rank" in each.get("args", {})
    }
    assert found == {
        "t 0 on host1": ("t", 0), "t 1 on host2": ("t", 1), "r 0 on host1": ("r", 2), "r 1 on host2": ("r", 3)
    }  # fmt: skip


def test_events_name_ranks_by_program(many, tmp_path):  # noqa: F811
    command = many(*two(["true"], ["true"], f"--events={tmp_path}/e"), nproc=1, hosts="host1,host2")
    assert command.wait() == 0, command.err
    facts = [json.loads(line) for line in (tmp_path / "e").read_text().splitlines()]
    found = {(each["rank"], each["program"], each["program_rank"], each["host"]) for each in facts if "rank" in each}
    assert found == {(0, "t", 0, "host1"), (1, "t", 1, "host2"), (2, "r", 0, "host1"), (3, "r", 1, "host2")}


def test_hang_is_that_of_one_program_on_all_hosts(many, tmp_path):  # noqa: F811
    hangs, works = sh("echo up; exec sleep 1000"), sh("while :; do echo on; sleep 0.1; done")
    flags = ("--hang_timeout=2", "--on_hang=stop", f"--report={tmp_path}/r")
    command = many(*two(works, hangs, *flags, of_second=("--nproc_per_node=2",)), nproc=1, hosts="host1,host2")
    assert command.wait() == 1
    text = "\n".join(own_lines(command))
    assert "all 4 ranks wait in" in text
    assert "r 0-3 on 2 hosts" in text
    report = report_of(tmp_path / "r")
    assert {each["program"] for each in report["snapshots"] if each["kind"]} == {"r"}


def test_other_processes_name_ranks_by_program(many, word):  # noqa: F811
    trap = sh("trap 'echo got; exit 0' USR1; echo up; while :; do sleep 1000 & wait; done")
    command = many(*two([*trap, word], trap), nproc=1, hosts="host1,host2")
    for start in (b"[host1:t 0] up", b"[host2:t 1] up", b"[host1:r 0] up", b"[host2:r 1] up"):
        command.read_lines(start)
    row = row_of(word)
    assert " : --program=r sh -c " in row["program"]
    assert row["ranks"]["running"] == 4
    line = f"{row['id']}: unknown rank r:2; use r:0 to r:1"
    assert ask("--send=USR1", "--ranks=r:2", row["id"], code=2) == line
    stacks = json.loads(ask("--stacks=json", "--ranks=r:1", row["id"]))
    assert [(each["program"], each["rank"]) for each in stacks["stacks"]] == [("r", 3)]
    assert ask("--send=USR1", "--ranks=r:1", row["id"]) == f"{row['id']}: sent SIGUSR1 to 1 of 1 rank\n"
    until(lambda: b"[host2:r 1] got" in command.out or command.read_more())
    assert ask("--stop", row["id"]).startswith(f"{row['id']}: stopping")
    assert command.wait() == 143
    assert command.out.count(b"got") == 1


def test_program_waits_for_another_on_all_hosts(many, bell):  # noqa: F811
    """It starts everywhere once the last rank of the other one is ready, on whichever host that is."""
    server = ready(first=f'test "$RANK" = 0 || {{ echo waits; read go < {shlex.quote(bell.path)}; echo serves; }}')
    words = two(server, sh("echo uses"), of_second=("--after=t", "--ends_job"))
    command = many(*words, nproc=1, hosts="host1,host2")
    command.read_lines(b"[host2:t 1] waits")
    assert b"uses" not in command.out
    bell.ring("go")
    assert command.wait() == 0, command.err
    lines = command.out.decode().splitlines()
    assert sorted(line for line in lines if "uses" in line) == ["[host1:r 0] uses", "[host2:r 1] uses"]
    assert own_lines(command) == []


def test_program_that_waits_is_alone_on_its_host(many):  # noqa: F811
    words = two(
        sh("echo prepares"), sh("echo uses"), of_first=("--on_nodes=1",), of_second=("--after=t", "--on_nodes=0")
    )
    command = many(*words, nproc=1, hosts="host1,host2")
    assert command.wait() == 0, command.err
    assert command.out.decode().splitlines() == ["[host2:t 0] prepares", "[host1:r 0] uses"]


def test_failure_elsewhere_ends_a_host_that_waits(many, tmp_path):  # noqa: F811
    words = two(sh("exit 4"), sh(f"touch {tmp_path}/started"), of_first=("--on_nodes=1",), of_second=("--after=t",))
    command = many(*words, nproc=1, hosts="host1,host2")
    assert command.wait() == 4
    assert not (tmp_path / "started").exists()


def test_restart_on_many_hosts_waits_again(many):  # noqa: F811
    uses = sh("echo uses $TORCHELASTIC_RESTART_COUNT; test $TORCHELASTIC_RESTART_COUNT = 1 || exit 3")
    words = two(ready(), uses, "--max_restarts=1", "--restart_delay=0", of_second=("--after=t", "--ends_job"))
    command = many(*words, nproc=1, hosts="host1,host2")
    assert command.wait() == 0, command.err
    assert {line.split("] ")[1] for line in command.out.decode().splitlines()} == {"uses 0", "uses 1"}


def test_by_hand_is_the_same(node):  # noqa: F811
    words = two(sh(SAY), sh(SAY), of_first=("--nproc_per_node=2",), of_second=("--on_nodes=1",))
    commands = [node(rank, *words, nproc=1) for rank in range(2)]
    for command in commands:
        assert command.wait() == 0, command.err
    found = {label.split(":")[1]: text.split()[:9] for label, text in said(commands[0]).items()}
    assert found == {
        **{f"t {rank}": f"{rank} 4 {rank % 2} 2 t {rank} 4 {rank // 2} 2".split() for rank in range(4)},
        "r 0": ["0", "1", "0", "1", "r", "0", "1", "0", "1"],
    }


def test_gpus_of_each_node_are_given_out_once(node, driver):  # noqa: F811
    env = {**driver.settings(FOUR), "LD_LIBRARY_PATH": str(driver.folder)}
    say = sh("echo $GROUP_RANK $CUDA_VISIBLE_DEVICES")
    words = two(say, say, of_first=("--gpus_per_proc=1", "--nproc_per_node=2"), of_second=("--gpus_per_proc=2",))
    commands = [node(rank, *words, nproc=1, env=env) for rank in range(2)]
    for command in commands:
        assert command.wait() == 0, command.err
    given = [text.split() for text in said(commands[0]).values()]
    for rank in "01":
        names = [name for where, devices in given if where == rank for name in devices.split(",")]
        assert len(names) == len(set(names)) == 4


def test_more_gpus_than_one_node_has_start_nothing_anywhere(node, driver, tmp_path):  # noqa: F811
    env = {**driver.settings(FOUR), "LD_LIBRARY_PATH": str(driver.folder)}
    touch = sh(f"touch {tmp_path}/started-$ROLE_NAME-$RANK")
    of_second = ("--gpus_per_proc=4", "--on_nodes=1")
    words = two(touch, touch, of_first=("--gpus_per_proc=1",), of_second=of_second)
    commands = [node(rank, *words, nproc=1, env=env) for rank in range(2)]
    assert [command.wait() for command in commands] == [2, 2]
    assert any(
        "1 of t with --gpus_per_proc=1, 1 of r with --gpus_per_proc=4 need 5 GPUs" in line for line in told(*commands)
    )
    assert not list(tmp_path.glob("started*"))


def test_by_hand_nodes_may_have_different_numbers(node):  # noqa: F811
    commands = [
        node(rank, *two(sh(SAY), sh(SAY), of_first=(f"--nproc_per_node={1 + rank}",)), nproc=1) for rank in range(2)
    ]
    for command in commands:
        assert command.wait() == 0, command.err
    found = {label.split(":")[1]: text.split()[:4] for label, text in said(commands[0]).items()}
    assert found["t 2"] == ["2", "3", "1", "2"]
    assert found["r 1"] == ["1", "2", "0", "1"]


def test_by_hand_other_programs_are_refused(node):  # noqa: F811
    commands = [node(0, *two(["true"], ["true"]), nproc=1), node(1, "--program=t", "true", nproc=1)]
    assert [command.wait() for command in commands] == [2, 2]
    assert any("--program: t here, t, r on node 0; use the same names" in line for line in told(*commands))


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--nnodes=2", "--on_nodes=2"), "--on_nodes=2: unknown node 2; use nodes 0 to 1"),
        (("--nnodes=2", "--on_nodes=1"), None),
        (("--on_nodes=0",), "--on_nodes=0: unknown node"),
    ],
)
def test_nodes_that_are_not_there_are_refused(infini_run, flags, line):
    words = [each for each in flags if each.startswith("--nnodes")]
    on = [each for each in flags if not each.startswith("--nnodes")]
    command = infini_run("--hosts=a,b", *two(["true"], ["true"], *words, of_first=on, of_second=on), "x")
    if line is None:
        line = "--on_nodes=1, --on_nodes=1: node 0 runs no program; add it to one, or use --on_nodes=rest"
    elif not words:
        line = "--on_nodes=0, --on_nodes=0: node 1 runs no program; add it to one, or use --on_nodes=rest"
    assert command.wait() == 2
    assert command.err.decode() == f"infini-run: {line}\n"


def test_more_ranks_than_a_host_has_room_for_are_refused(infini_run):
    command = infini_run("--hosts=a:4,b:2", *two(["true"], ["true"], of_first=("--nproc_per_node=2",)))
    assert command.wait() == 2
    assert command.err.decode().startswith(
        "infini-run: --hosts=a:4,b:2: needs more than the 2 slots of b for 3 ranks of all programs; "
    )


def test_programs_on_nodes_without_a_head_are_refused(infini_run):
    command = infini_run("--nnodes=2", "--node_rank=0", "--rdzv_endpoint=h:1", *two(["true"], ["true"]))
    assert command.wait() == 2
    assert command.err.decode().startswith("infini-run: --nnodes=2: several programs need one head; ")
