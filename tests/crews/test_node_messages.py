"""The border between a caller and the spawn servers of its nodes: what fits no line of the table is our error."""

from __future__ import annotations

import ast
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infini_run.crews.spawn.node_messages import DOWN, UP, read
from infini_run.crews.spawn.remote_node import RemoteNode
from infini_run.crews.spawn.stream_multiplexer import Multiplexer
from infini_run.errors import LinkError, StartError, UsageError
from infini_run.system.poller import Poller
from tests.multinode.test_record_codec import JUNK
from tests.support.paths import ROOT

ERROR = {"is_usage": False, "text": "no memory", "step": "forking", "errno": 12, "rank": 3}
MESSAGES = {
    "setup": {
        "path": ["/a"],
        "argv": [""],
        "env": {"A": "b"},
        "nproc": [2, "gpu"],
        "preload": ["torch"],
        "is_silent": True,
        "start_timeout_s": None,
        "flags": {"grace": 2.0},
        "node": 1,
    },
    "start": {
        "id": 1,
        "workers": [[2, 0], [3, 1]],
        "restarts": 0,
        "apart": False,
        "node": 0,
        "nnodes": 1,
        "first": 0,
        "world_size": 2,
        "host": "h",
        "address": "::1",
        "port": 1,
    },
    "signal": {"worker": 1, "number": 0},
    "stop": {"worker": 1, "number": 15},
    "kill": {"worker": 1},
    "close": {"worker": 1},
    "up": {"nproc": 2, "port": 1, "notices": ["a note"]},
    "refused": {"error": ERROR},
    "answer": {"id": 1, "port": 1, "error": None},
    "pid": {"worker": 1, "value": 2},
    "pinged": {"worker": 1},
    "exit": {"worker": 1, "value": {}},
    "ended": {"worker": 1, "value": ""},
    "gone": {"worker": 1, "value": True},
}
FIELDS = [(kind, field) for kind in MESSAGES for field in MESSAGES[kind]]


def table_of(kind):
    return DOWN if kind in DOWN else UP


def test_every_message_is_tried_here():
    assert set(MESSAGES) == {*DOWN, *UP}
    assert not set(DOWN) & set(UP)


@pytest.mark.parametrize("kind", MESSAGES)
def test_what_infini_run_sends_is_read(kind):
    assert read({kind: MESSAGES[kind]}, table_of(kind)) == (kind, MESSAGES[kind])


@given(place=st.sampled_from(FIELDS), junk=JUNK)
def test_code_behind_the_border_can_rely_on_every_value(place, junk):
    kind, field = place
    try:
        _, fields = read({kind: {**MESSAGES[kind], field: junk}}, table_of(kind))
    except LinkError:
        return
    assert table_of(kind)[kind][field](fields[field])


@pytest.mark.parametrize("kind", MESSAGES)
def test_a_field_too_few_or_too_many_is_an_error(kind):
    fields = MESSAGES[kind]
    for wrong in ({}, {**fields, "more": 1}, dict(list(fields.items())[1:]), None, [fields], "worker"):
        with pytest.raises(LinkError):
            read({kind: wrong}, table_of(kind))


@pytest.mark.parametrize(
    "message", [{}, {"": {}}, {"setup": {}, "kill": {"worker": 1}}, {"kill": {"worker": 0}}, {"k" * 1000: None}]
)
def test_what_is_no_message_is_an_error_of_one_short_line(message):
    with pytest.raises(LinkError) as raised:
        read(message, DOWN)
    assert len(str(raised.value)) < 200


def kinds_sent(module):
    """Each kind that a module sends by name."""
    tree = ast.parse((ROOT / "infini_run" / "crews" / "spawn" / module).read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    words = [arg for call in calls if call.func.attr in SENDS for arg in call.args[:2]]
    return {word.value for word in words if isinstance(word, ast.Constant)}


SENDS = ("_send_control", "_when_read", "_request")


def test_the_table_has_what_both_sides_send_and_no_more():
    assert kinds_sent("spawn_server.py") == set(UP)
    assert kinds_sent("remote_process.py") | {"setup", "start"} == set(DOWN)


# ---- a caller that hears from a node


class Pair:
    """A node as its caller knows it, and the other end of its stream."""

    def __init__(self):
        self.poller = Poller()
        peer = SimpleNamespace(index=0, name="h", title="node 0 (h)", clock=SimpleNamespace(offset_s=0.0))
        self.node = RemoteNode(peer, 0, self.poller, lambda *_: None, lambda: None)
        self.there = Multiplexer(self.poller, self.node.streams.feed, lambda _: None)

    def say(self, kind, **fields):
        self.there.send_control({kind: fields})


@pytest.fixture
def pair():
    pair = Pair()
    yield pair
    pair.poller.close()


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("up", {"nproc": 10**12, "port": 1, "notices": []}),
        ("up", {"nproc": 0, "port": 1, "notices": []}),
        ("up", {"nproc": float("inf"), "port": 1, "notices": []}),
        ("up", {"nproc": 1, "port": 65536, "notices": []}),
        ("up", {"nproc": 1, "port": 1, "notices": "text"}),
        ("answer", {"id": 1, "port": -1, "error": None}),
        ("answer", {"id": 1, "port": 1, "error": {**ERROR, "errno": "12"}}),
        ("ended", {"worker": 1, "value": 5}),
        ("unheard_of", {"worker": 1}),
    ],
)
def test_a_node_that_says_nonsense_is_an_error_of_the_link(pair, kind, fields):
    with pytest.raises(LinkError):
        pair.say(kind, **fields)
    assert (pair.node.nproc, pair.node.port, pair.node.answers) == (0, 0, {})


def test_what_a_node_cannot_do_is_raised_with_its_name(pair):
    pair.say("answer", id=1, port=7, error=ERROR)
    pair.say("answer", id=2, port=7, error=None)
    error = pair.node.answers[1]
    assert (type(error), str(error), error.step, error.errno, error.rank) == (
        StartError, "h: no memory", "forking", 12, 3,
    )  # fmt: skip
    assert pair.node.answers[2] is None
    pair.say("refused", error={**ERROR, "is_usage": True})
    assert type(pair.node.problem) is UsageError
    assert pair.node.is_refused
