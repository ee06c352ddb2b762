"""--preload on many nodes: every agent has its own process of the imports (decision 66), on real sshd hosts."""

from __future__ import annotations

import json
import os
import signal
import sys

import pytest

from tests.multinode.test_by_hand import node, port  # noqa: F401
from tests.multinode.test_elastic_ssh import CALM, launcher_of
from tests.multinode.test_many_ssh import bed, lines_of, many, no_agent_left, own_lines  # noqa: F401
from tests.support.hosts import agents
from tests.support.processes import marked
from tests.support.waiting import until

pytestmark = pytest.mark.xdist_group(__name__)  # one bed for all of them

SAYS = "'preloaded' in sys.modules, getattr(sys.modules.get('preloaded'), 'PID', 0)"
SHOW = f"import os, sys; print(os.environ['RANK'], os.uname().nodename, {SAYS}, os.getppid(), flush=True)"


@pytest.fixture
def warm(many, tmp_path):  # noqa: F811
    """Start a Python program on hosts with a module that is preloaded."""

    def start(text, *flags, module="import os\nPID = os.getpid()\n", **kwargs):
        (tmp_path / "preloaded.py").write_text(module)
        env = {**os.environ, "PYTHONPATH": str(tmp_path), **kwargs.pop("env", {})}
        words = ["--export=PYTHONPATH,BELL,GO", "--preload=preloaded", *flags, sys.executable, "-c", text]
        return many(*words, env=env, **kwargs)

    return start


def rows_of(command, skip=0):
    return sorted(line.split("] ", 1)[1].split()[skip:] for line in lines_of(command))


def zygotes():
    """The processes of imports, as this machine numbers them."""
    found = []
    for pid in marked():
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                is_one = b"INFINI_RUN_ID=preload-" in file.read()
        except OSError:
            continue
        found += [pid] if is_one else []
    return found


def test_ranks_of_each_node_are_forks_of_its_own_process(warm):
    command = warm(SHOW)
    assert command.wait() == 0, command.err
    rows = rows_of(command)
    assert [row[:3] for row in rows] == [[str(rank), f"host{rank // 2 + 1}", "True"] for rank in range(8)]
    assert own_lines(command) == []
    for host in range(4):
        assert len({(row[3], row[4]) for row in rows if row[1] == f"host{host + 1}"}) == 1


def test_trace_has_imports_and_fork_of_each_node(warm, tmp_path):
    command = warm(SHOW, f"--trace={tmp_path}/trace.json", hosts="host1,host2")
    assert command.wait() == 0, command.err
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    for name in ("preload", "fork"):
        assert len({event["pid"] for event in events if event["name"] == name}) == 2


def test_imports_run_while_other_nodes_connect(warm, bell, tmp_path):
    """host2's agent waits until host1 has imported."""
    python = tmp_path / "python"
    os.mkfifo(tmp_path / "go")
    python.write_text(f'#!/bin/sh\n[ $(uname -n) = host2 ] && read x < {tmp_path}/go\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    module = "import os\nwith open(os.environ['BELL'], 'w') as file:\n    file.write(os.uname().nodename + '\\n')\n"
    flags = (f"--remote_python={python}",)
    command = warm(SHOW, *flags, module=module, hosts="host1,host2", nproc=1, env={"BELL": bell.path})
    assert bell.hear(1) == ["host1"]
    with open(tmp_path / "go", "w") as file:
        file.write("\n")
    assert bell.hear(1) == ["host2"]
    assert command.wait() == 0, command.err


def test_node_that_falls_back_does_so_alone(warm, tmp_path):
    module = "import os\nif os.uname().nodename == 'host2':\n    os.umask(0o7)\n"
    command = warm(SHOW, f"--report={tmp_path}/report", module=module, hosts="host[1-3]", nproc=1)
    assert command.wait() == 0, command.err
    assert own_lines(command) == ["infini-run: host2: ranks start cold: the imports changed the umask"]
    assert [row[1:3] for row in rows_of(command)] == [["host1", "True"], ["host2", "False"], ["host3", "True"]]
    report = json.loads((tmp_path / "report").read_text())
    assert report["notices"] == ["ranks start cold: the imports changed the umask"]
    assert [rank["start_method"] for rank in report["ranks"]] == ["fork", "exec", "fork"]
    assert [(use["host"], use["modules"], use["cold_because"]) for use in report["preload"]] == [
        ("host1", ["preloaded"], None), ("host2", [], "the imports changed the umask"), ("host3", ["preloaded"], None)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("import nosuch", "preloaded cannot be imported: ModuleNotFoundError: No module named 'nosuch'"),
        (
            "import os; os.environ.get('WORLD_SIZE')",
            "preloaded reads WORLD_SIZE during its import; drop preloaded",
        ),
    ],
)
def test_module_that_one_node_refuses_ends_job(warm, source, text):
    command = warm(SHOW, module=f"import os\nif os.uname().nodename == 'host2':\n    {source}\n", hosts="host[1-2]")
    assert command.wait() == 2
    assert len(own_lines(command)) == 1
    assert "host2" in own_lines(command)[0]
    assert text in own_lines(command)[0]


def test_program_that_is_no_python_is_refused_by_nodes(many):  # noqa: F811
    command = many("--preload=decimal", "sh", "-c", "true", hosts="host1", nproc=1)
    assert command.wait() == 2
    assert b"host1: --preload=decimal: needs a Python program, and sh is not one" in command.err


def test_imports_print_once_per_node(warm):
    command = warm("pass", module="print('importing')\n", hosts="host[1-2]")
    assert command.wait() == 0, command.err
    assert sorted(lines_of(command)) == ["[host1:preload] importing", "[host2:preload] importing"]


def test_imports_that_take_too_long_end_job(warm):
    module = "import os, time\nif os.uname().nodename == 'host2':\n    time.sleep(1000)\n"
    command = warm(SHOW, "--preload_timeout=2s", module=module, hosts="host[1-2]")
    assert command.wait() == 1
    assert "host2: --preload: the imports took longer than 2.0 s" in own_lines(command)[0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_head_that_ends_during_imports_leaves_nothing(warm, bell, number):
    module = "import os, time\nopen(os.environ['BELL'], 'w').write('up\\n')\ntime.sleep(1000)\n"
    command = warm(SHOW, module=module, hosts="host[1-2]", nproc=1, env={"BELL": bell.path})
    bell.hear(2)
    command.signal(number)
    assert command.wait() == (143 if number == signal.SIGTERM else -9)
    assert command.out == b""
    until(lambda: not agents() and not marked())


RESTARTS = """
import os, sys
count = os.environ["TORCHELASTIC_RESTART_COUNT"]
print("attempt", count, os.environ["RANK"], "preloaded" in sys.modules, sys.modules.get("preloaded") and
      sys.modules["preloaded"].PID, flush=True)
open(os.environ["BELL"], "w").write("up\\n")
open(os.environ["GO"] + os.environ["RANK"]).read()
sys.exit(3 if count != "2" and os.environ["RANK"] == "1" else 0)
"""


def test_restart_keeps_processes_of_imports(warm, bell, tmp_path):
    """Rank 1 fails soon after its fork: its node starts cold once, and the others are forked as before."""
    for rank in range(2):
        os.mkfifo(tmp_path / f"go{rank}")
    flags = ("--max_restarts=2", "--restart_delay=0")
    env = {"BELL": bell.path, "GO": str(tmp_path / "go")}
    command = warm(RESTARTS, *flags, hosts="host[1-2]", nproc=1, env=env)
    for attempt in range(3):
        bell.hear(2)
        for rank in range(2) if attempt == 2 else [1]:
            with open(tmp_path / f"go{rank}", "w"):
                pass
    assert command.wait() == 0, command.err
    rows = rows_of(command)
    assert [row[:4] for row in rows] == [
        ["attempt", str(count), str(rank), "False" if (count, rank) == (1, 1) else "True"]
        for count in range(3)
        for rank in range(2)
    ]
    assert len({row[4] for row in rows if row[2] == "0"}) == 1, "host1 has imported once"
    assert rows[1][4] == rows[5][4], "host2 has imported once"
    cold = [line for line in own_lines(command) if "cold" in line]
    assert len(cold) == 1
    assert cold[0].startswith("infini-run: host2: ranks start cold: the last attempt failed 0.")


def test_spare_is_warm(warm, bell):
    """The imports of a spare are done before it is needed, and those of other nodes are kept."""
    text = (
        "import os, sys, time\n"
        f"with open(os.environ['BELL'], 'w') as file: print(os.environ['TORCHELASTIC_RESTART_COUNT'], "
        f"os.environ['RANK'], os.uname().nodename, {SAYS}, file=file)\n"
        "time.sleep(1000)\n"
    )
    command = warm(text, *CALM, hosts="host[1-3]", nproc=1, env={"BELL": bell.path})
    first = {row.split()[1]: row.split() for row in bell.hear(2)}
    until(lambda: len(zygotes()) == 3)
    before = set(zygotes())
    os.kill(launcher_of(1), signal.SIGKILL)
    second = {row.split()[1]: row.split() for row in bell.hear(2)}
    assert [second[rank][2:4] for rank in "01"] == [["host1", "True"], ["host3", "True"]]
    assert second["0"][4] == first["0"][4]
    assert len(before & set(zygotes())) == 2, "nothing was imported again"
    command.signal(signal.SIGTERM)
    assert command.wait() == 143


def test_spare_that_refuses_is_excluded(warm, bell, tmp_path):
    """Its imports fail while the others run: the next attempt waits for the host that was lost."""
    fails = tmp_path / "fails"
    os.mkfifo(tmp_path / "gate")
    module = (
        "import os\n"
        "if os.uname().nodename == 'host3':\n"
        f"    os.path.exists('{fails}') or open('{tmp_path}/gate').close()\n"
        "    import nosuch\n"
    )
    text = (
        "import os, time\n"
        "with open(os.environ['BELL'], 'w') as file: print(os.environ['TORCHELASTIC_RESTART_COUNT'], "
        "os.environ['RANK'], os.uname().nodename, file=file)\n"
        "time.sleep(1000)\n"
    )
    command = warm(text, *CALM, module=module, hosts="host[1-3]", nproc=1, env={"BELL": bell.path})
    assert sorted(bell.hear(2)) == ["0 0 host1", "0 1 host2"]
    fails.touch()
    with open(tmp_path / "gate", "w"):
        pass
    command.read_error_until(b"excluded host3: it refused to run")
    os.kill(launcher_of(1), signal.SIGKILL)
    assert sorted(bell.hear(2)) == ["1 0 host1", "1 1 host2"]
    command.signal(signal.SIGTERM)
    assert command.wait() == 143


def test_dry_run_says_once_per_node(infini_run):
    words = ["--dry_run", "--hosts=a,b", "--nproc_per_node=1", "--preload=torch", "x.py"]
    command = infini_run(*words)
    assert command.wait() == 0
    assert b"preload: torch, imported once per node; the ranks are forked from that process" in command.out


def test_launchers_joined_by_token_are_warm(node):  # noqa: F811
    text = "import os, sys; print(os.environ['RANK'], 'decimal' in sys.modules)"
    nodes = [node(rank, sys.executable, "-c", text, flags=["--preload=decimal"]) for rank in range(2)]
    assert [node.wait() for node in nodes] == [0, 0], [node.err for node in nodes]
    assert rows_of(nodes[0]) == [[str(rank), "True"] for rank in range(4)]


def test_refusal_of_launcher_joined_by_token_is_told_on_both_nodes(node, tmp_path):  # noqa: F811
    (tmp_path / "refused.py").write_text(
        "import os, time\nif os.environ['NODE'] == '1': import nosuch\ntime.sleep(1000)\n"
    )
    nodes = [
        node(rank, sys.executable, "-c", "pass", flags=["--preload=refused"],
             env={"PYTHONPATH": str(tmp_path), "NODE": str(rank)})
        for rank in range(2)
    ]  # fmt: skip
    assert [node.wait() for node in nodes] == [2, 2], [node.err for node in nodes]
    for node in nodes:
        assert b"refused cannot be imported: ModuleNotFoundError" in node.err


def test_signal_during_imports_ends_launchers_joined_by_token(node, bell, tmp_path):  # noqa: F811
    (tmp_path / "slow.py").write_text(
        "import os, time\nopen(os.environ['BELL'], 'w').write('up\\n')\ntime.sleep(1000)\n"
    )
    env = {"PYTHONPATH": str(tmp_path), "BELL": bell.path}
    nodes = [node(rank, sys.executable, "-c", "pass", flags=["--preload=slow"], env=env) for rank in range(2)]
    bell.hear(2)
    nodes[1].signal(signal.SIGTERM)
    assert [node.wait() for node in nodes] == [143, 143], [node.err for node in nodes]
    until(lambda: not marked())
