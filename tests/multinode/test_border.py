"""The borders where bytes of others come in: whatever they are, an error of ours says so; nothing else is done."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from infini_run.core.c_structs import LAUNCHERS_OWN
from infini_run.environments.hostlist import Host
from infini_run.errors import LinkError
from infini_run.multinode.agent.agent import Agent
from infini_run.multinode.head.agent_state import RemoteAgent
from infini_run.multinode.head.observed_node import ObservedNode
from infini_run.multinode.link import message_schema, protocol
from infini_run.multinode.link.agent_options import options_of_agents
from infini_run.multinode.link.connection import Connection, from_socket
from infini_run.multinode.link.handshake import Handshake
from infini_run.multinode.link.protocol import pack, pack_json
from infini_run.multinode.link.record_codec import to_jsonable
from infini_run.multinode.link.tcp import connect
from infini_run.options.options import resolve
from infini_run.version import VERSION
from tests.multinode.test_by_hand import TOKEN, no_agent_left, node, port, told  # noqa: F401
from tests.multinode.test_record_codec import JUNK
from tests.support.processes import state_of
from tests.support.waiting import until

HELLO = {
    "version": VERSION,
    "host": "h",
    "pid": 1,
    "start_ticks": "1",
    "nproc": 1,
    "counts": [],
    "ports": [1],
    "address": "",
    "facts": [],
    "machine": "boot 1",
    "is_clear": False,
}
SPEC = {
    "version": VERSION,
    "is_by_hand": True,
    "silence_s": 10.0,
    "cwd": "/",
    "environ": {},
    "options": to_jsonable(options_of_agents(resolve(["true"], {}).options)),
    "has_stream": False,
    "asked": [],
    "observe": [],
    "lease_s": 0.0,
    "launch_id": "i",
    "workers": {},
    "names_keywords": False,
}
LAUNCH = {
    "node": 0,
    "nnodes": 1,
    "nproc": 1,
    "first": 0,
    "world_size": 1,
    "most": 1,
    "host": "h",
    "master_addr": "a",
    "master_port": 1,
    "launch_id": "i",
    "restarts": 0,
    "heading": "",
    "programs": [],
}
SCHEMAS = {
    "SPEC": SPEC,
    "LAUNCH": LAUNCH,
    "SIGNAL": {"signal": 15, "ranks": [0, 3], "by": "alice (pid 7)"},
    "STOP": {"signal": 15, "by_signal": True, "after_s": 0},
    "STOP_PROGRAM": {"program": "rollout", "with_snapshot": True},
    "USAGE_REQUEST": {"ranks": [0, 1]},
    "QUESTION": {"number": 1, "request": {"question": "stacks", "ranks": [0]}},
    "GOODBYE": {"exit_code": 0},
    "TURNED_AWAY": {"error": "why", "may_return": True, "launch_id": "id", "timeout_s": 10},
    "HELLO": HELLO,
    "REFUSAL": {"error": "no", "exit_code": 1, "kind": "usage", "host": "h"},
    "STARTED": {"started": 0, "pid": 1},
    "READY": {"ready": 0, "pid": 1},
    "EXITED": {"exited": [0, 1], "failed_ranks": [1]},
    "FAILED": {"failed": 0, "age_ns": 0, "time_ns": 0, "asks_again": False},
    "SIGNALLED": {"signalled": 15},
    "PROGRESS": {"progress": [[0, 7, 1, 1]], "time_ns": 1},
    "SUSPECTS": {"suspects": True},
    "FINISHED": {"finished": "trainer"},
    "UP": {"up": "trainer"},
    "START": {"programs": ["rollout"]},
    "RESTART": {"program": "rollout", "restarts": 1, "heading": "restart 1 of 2"},
    "NOT_STARTED": {"not_started": "rollout", "problem": "no memory", "is_final": False},
    "CHECKED": {"reason": ""},
    "SNAPSHOT_REQUEST": {"is_before_stop": True},
    "CAUSE": {"ranks": [3]},
    "SNAPSHOTS": {"snapshots": [], "ranks": [1]},
    "ANSWERED": {"number": 1, "answer": {"stacks": []}},
    "DONE": {"report": {}, "ports": [1], "progress": -1},
    "PROGRAM_DONE": {"program": "rollout", "report": {}, "progress": -1, "has_ended": True},
}
ALONE = "--restart_scope=program"
MANY = [float("inf"), float("nan"), 10**400, -(2**31), 1e999, "a\0b", {"": 1}, [[]], None, True, "x" * 1000]


def test_every_form_is_tried_here():
    assert set(SCHEMAS) == {
        name for name in vars(message_schema) if name.isupper() and isinstance(getattr(message_schema, name), dict)
    }


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_infini_run_says_is_read(name):
    assert message_schema.read(json.dumps(SCHEMAS[name]).encode(), getattr(message_schema, name)) == SCHEMAS[name]


NEEDS = {"gpus_per_proc": 1, "nproc": "gpu", "log_dir": "logs", "environ": {"A": "b"}}


@pytest.mark.parametrize(
    ("changes", "fits"),
    [
        ({}, True),
        ({"nproc": 8}, True),
        ({"nproc": "all"}, False),
        ({"nproc": 0}, False),
        ({"gpus_per_proc": -1}, False),
        ({"log_dir": "a\0b"}, False),
        ({"environ": {"A=": "b"}}, False),
        ({"more": 1}, False),
    ],
)
def test_what_workers_need_is_checked_field_by_field(changes, fits):
    payload = json.dumps({**SPEC, "workers": {**NEEDS, **changes}}).encode()
    if fits:
        assert message_schema.read(payload, message_schema.SPEC)["workers"] == {**NEEDS, **changes}
        return
    with pytest.raises(LinkError, match="workers is"):
        message_schema.read(payload, message_schema.SPEC)


def try_it(name, field, junk):
    form = getattr(message_schema, name)
    try:
        assert form[field](message_schema.read(json.dumps({**SCHEMAS[name], field: junk}).encode(), form)[field])
    except LinkError:
        return


@pytest.mark.parametrize("name", SCHEMAS)
@settings(max_examples=30)
@given(data=st.data(), junk=JUNK)
def test_another_value_is_refused_or_fits(name, data, junk):
    try_it(name, data.draw(st.sampled_from(sorted(SCHEMAS[name]))), junk)


@pytest.mark.parametrize("name", SCHEMAS)
def test_no_number_is_out_of_bounds(name):
    for field, was in SCHEMAS[name].items():
        for junk in MANY:
            try_it(name, field, junk)
        if isinstance(was, int) and not isinstance(was, bool):
            with pytest.raises(LinkError, match=field):
                message_schema.read(
                    json.dumps({**SCHEMAS[name], field: float("inf")}).encode(), getattr(message_schema, name)
                )


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_field_that_is_missing_or_unknown_is_refused(name):
    form, said = getattr(message_schema, name), SCHEMAS[name]
    for other in ({**said, "more": 1}, dict(list(said.items())[1:]), [], 5, None, "x"):
        with pytest.raises(LinkError):
            message_schema.read(json.dumps(other).encode(), form)


@given(st.binary(max_size=60))
def test_bytes_that_are_no_words_are_refused(payload):
    with pytest.raises(LinkError):
        message_schema.read(payload, message_schema.SIGNAL)


@pytest.mark.parametrize("kind", sorted(LAUNCHERS_OWN))
def test_events_of_a_launcher_do_not_cross_the_link(kind):
    observed = ObservedNode(RemoteAgent(0, Host(name="h")))
    with pytest.raises(LinkError):
        observed.event(kind, -1, *[0] * 8, "")


# ---- a head, and a node that knows the token and says nonsense


def join(target):
    wire = connect(target)
    hand = Handshake(wire, TOKEN.encode(), is_head=False)
    frames = []
    while not hand.is_done:
        frames += hear(wire, hand)
    wire.send(pack_json(protocol.IDENTITY, {"node": 1}))
    while not frames:
        frames += hear(wire)
    assert frames[0][0] == protocol.SPEC
    return wire


def hear(wire, hand=None):
    assert select.select([wire.fileno()], [], [], 60)[0]
    assert not wire.has_ended
    found = []
    for kind, payload in wire.read():
        if hand is not None and not hand.is_done:
            hand.handle_frame(kind, payload)
        else:
            found.append((kind, payload))
    return found


def meet(server):
    """Be a head that a launcher has told which node it is."""
    head = from_socket(server.accept()[0])
    hand, heard = Handshake(head, TOKEN.encode(), is_head=True), []
    while protocol.IDENTITY not in [kind for kind, _ in heard]:
        heard += hear(head, hand)
    return head


def listens(to):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", to)) == 0


@pytest.mark.parametrize(
    ("before", "kind", "words"),
    [
        ([], protocol.HELLO, json.dumps({**HELLO, "ports": [float("inf")]})),
        ([], protocol.HELLO, json.dumps({**HELLO, "nproc": 10**9})),
        ([], protocol.HELLO, json.dumps({**HELLO, "counts": [1]})),
        ([], protocol.HELLO, json.dumps({**HELLO, "ports": [1, 2]})),
        ([HELLO], protocol.HEARTBEAT, '{"at_ns":1e999,"wall_ns":1,"monotonic_ns":1}'),
        ([HELLO], protocol.EVENT, '{"failed":0,"age_ns":Infinity,"time_ns":0,"asks_again":false}'),
        ([HELLO], protocol.DONE, '{"report":{"record":"Report","fields":[]},"ports":[1]}'),
        ([], protocol.HELLO, "[" * 100_000),
    ],
    ids=["a-port-that-is-infinite", "ranks", "programs", "ports", "a-clock", "an-age", "a-report", "a-deep-one"],
)
def test_a_node_that_says_nonsense_is_lost_and_the_head_says_why(node, port, before, kind, words):  # noqa: F811
    head = node(0, "sleep", "1000", nproc=1)
    until(lambda: listens(port + 1))
    wire = join(f"127.0.0.1:{port + 1}")
    for said in before:
        wire.send(pack_json(protocol.HELLO, said))
    while before and protocol.LAUNCH not in [each for each, _ in hear(wire)]:
        pass
    wire.send(pack(kind, words.encode()))
    assert head.wait() == 1
    wire.close()
    (line,) = told(head)
    assert line.startswith("infini-run: lost node 1 (h): " if before else "infini-run: node 1 could not be reached: ")
    assert "came over the link" in line


@pytest.mark.parametrize(
    ("flags", "kind", "said"),
    [
        ((ALONE,), protocol.DONE, SCHEMAS["PROGRAM_DONE"]),
        ((ALONE,), protocol.DONE, SCHEMAS["PROGRAM_DONE"] | {"program": "r"}),
        ((ALONE,), protocol.EVENT, SCHEMAS["FAILED"]),
        ((ALONE,), protocol.EVENT, SCHEMAS["NOT_STARTED"]),
        ((), protocol.DONE, SCHEMAS["PROGRAM_DONE"]),
    ],
    ids=["unknown", "running", "another-node's-rank", "start-of-unknown", "all-restart"],
)
def test_a_node_whose_programs_end_unasked_is_lost(node, port, flags, kind, said):  # noqa: F811
    sleeps = ("sleep", "1000")
    head = node(0, *flags, "--max_restarts=1", "--program=t", *sleeps, ":", "--program=r", *sleeps, nproc=1)
    until(lambda: listens(port + 1))
    wire = join(f"127.0.0.1:{port + 1}")
    wire.send(pack_json(protocol.HELLO, {**HELLO, "nproc": 2, "counts": [1, 1], "ports": [1, 2]}))
    while protocol.LAUNCH not in [each for each, _ in hear(wire)]:
        pass
    wire.send(pack_json(kind, said))
    assert head.wait() == 1
    wire.close()
    assert told(head) == ["infini-run: lost node 1 (h): unexpected message over the link"]


# ---- an agent, and a head that says nonsense


def agent_that_hears(payload):
    ours, theirs = socket.socketpair()
    wire = Connection(fd := theirs.detach(), fd)
    ours.sendall(pack(protocol.SPEC, payload))
    ours.shutdown(socket.SHUT_WR)
    agent = Agent(wire, 0)
    try:
        return agent.serve(None)
    finally:
        assert agent._stdio is None, "it took a SPEC that is none"
        wire.close()
        agent._poller.close()
        ours.close()


@settings(max_examples=50)
@given(st.sampled_from(sorted(SPEC)), JUNK)
@example("silence_s", float("inf"))
@example("environ", {"A=B": "c"})
@example("environ", {"A": "\0"})
@example("options", {"record": "Options", "fields": {}})
def test_an_agent_refuses_a_spec_that_is_none(field, junk):
    said = {**SPEC, "cwd": "/nowhere/at/all", field: junk}
    assert agent_that_hears(json.dumps(said).encode()) in (1, 2)


@settings(max_examples=30)
@given(st.binary(max_size=50))
def test_an_agent_refuses_a_spec_of_any_bytes(payload):
    assert agent_that_hears(payload) == 1


def test_a_launcher_that_joins_as_the_job_ends_hears_the_end(node, port):  # noqa: F811
    """SPEC and GOODBYE come with one read."""
    with socket.create_server(("127.0.0.1", port + 1)) as server:
        joiner = node(1, "true")
        head = meet(server)
    joiner.signal(signal.SIGSTOP)
    until(lambda: state_of(joiner.pid) == "T")
    options = options_of_agents(resolve(["--nnodes=2", f"--master_port={port}", "true"], {}).options)
    head.send(pack_json(protocol.SPEC, {**SPEC, "options": to_jsonable(options)}))
    head.send(pack_json(protocol.GOODBYE, {"exit_code": 7}))
    head.close()
    joiner.signal(signal.SIGCONT)
    assert joiner.wait() == 7, joiner.err
    assert told(joiner) == []


# ---- a count that nobody can have


def no_more_memory():
    resource.setrlimit(resource.RLIMIT_AS, (250 << 20, 250 << 20))


limits_memory = pytest.mark.skipif(
    "TEST_PYTHON" in os.environ, reason="the sanitizer's own memory is beyond any limit"
)


@limits_memory
def test_more_ranks_than_a_machine_can_have_are_refused(infini_run):
    command = infini_run("--nproc_per_node=100000000", "true", preexec_fn=no_more_memory)
    assert command.wait() == 2
    assert b"--nproc_per_node=100000000: expected 1 to 4194304, auto, gpu, or cpu" in command.err
    assert b"Traceback" not in command.err


@limits_memory
def test_ranks_that_find_no_memory_are_one_line(infini_run):
    command = infini_run("--nproc_per_node=4000000", "true", preexec_fn=no_more_memory)
    assert command.wait() == 1
    limits = b"check ulimit -v, the cgroup's limit, and the machine's memory\n"
    assert command.err == b"infini-run: 4000000 ranks: out of memory for their plan; " + limits


@limits_memory
def test_a_host_program_that_finds_no_memory_gets_an_error_of_ours():
    code = """
import resource, infini_run as ir
resource.setrlimit(resource.RLIMIT_AS, (250 << 20, 250 << 20))
try:
    ir.run(["true"], nproc_per_node=4000000)
except ir.InfiniRunError as error:
    print(type(error).__name__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (done.stdout, done.stderr) == (b"StartError\n", b"")
