"""What comes over a worker's channel: a message whose every value can be relied on, or an error of ours."""

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infini_run.channel.errors import ChannelBroken
from infini_run.crews import protocol
from infini_run.crews.protocol import Body, decode, encode
from infini_run.record import fields
from infini_run.system.json_codec import encode as write_json

BODIES = [Body(parts=(b"pickle",)), Body(parts=(b"pickle", b"one", b""), writable=(True, False))]
VALUES = {
    "int": [-1, 2**63 - 1],
    "float": [0, 1.5, float("inf")],
    "str": ["", "ü\udcff\0"],
    "tuple[str, ...]": [(), ("a", "b")],
}
KINDS = list(protocol._KINDS.values())
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=9,
)


def messages(kind):
    """One of each kind with the first, and one with the last of the values that its fields can have."""
    choices = VALUES | {"Body": BODIES}
    return [kind(**{name: choices[kind.__annotations__[name]][at] for name in fields(kind)}) for at in (0, -1)]


def frame(*content, body=b""):
    head = write_json(content)
    return len(head).to_bytes(4, "big") + head + body


def content_of(message):
    return {
        name: ([bytes(part) for part in value.parts], value.writable) if type(value) is Body else value
        for name, value in vars(message).items()
    }


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_message_comes_as_it_was_sent(kind):
    for sent in messages(kind):
        came = decode(b"".join(encode(sent)))
        assert type(came) is kind
        assert content_of(came) == content_of(sent)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0\0\0",
        b"\xff\xff\xff\xff",
        b"\0\0\0\1i am no message",
        b"\0\0\0\5(\xff\xff\xff\x7f",  # a count that marshal would believe
        frame(),
        frame("ready"),
        frame("ready", [], [], 1),
        frame("ready", [1], [], body=b"x"),
        frame("ready", {}, []),
        frame("unheard", [], []),
        frame(["ready"], [], []),
        frame("status", [], []),
        frame("status", [], [], 5),
        frame("progress", [], [], "a", None, []),
        frame("extend", [], [], 10**400),
        frame("cancel", [], [], True),
        frame("cancel", [], [], 2**63),
        frame("emit", [], [], 1),
        frame("emit", [3], [], 1, body=b"four"),
        frame("emit", [5], [], 1, body=b"four"),
        frame("emit", [-1, 5], [True], 1, body=b"four"),
        frame("emit", [True], [], 1, body=b"f"),
        frame("emit", [2, 2], [], 1, body=b"four"),
        frame("emit", [2, 2], [1], 1, body=b"four"),
        frame("hello", [], [], 0, 0, 1, ["a", 2], [], 0, -1, 0.0, 0),
        (60000).to_bytes(4, "big") + b"[" * 60000,
        *(code + bytes(size) for code in (b"\xf1", b"\xf3") for size in (0, 7, 8)),  # one short, or without a body
        b"\xf3" + bytes(16),
        *(b"\xf2" + bytes(size) for size in (0, 7, 9)),
        b"\xf4" + bytes(40),
    ],
)
def test_what_is_no_message_is_an_error_of_ours(data):
    with pytest.raises(ChannelBroken, match="is not what infini-run sends"):
        decode(data)


@settings(deadline=None)
@given(data=st.binary(max_size=64) | st.binary(max_size=64).map(lambda head: len(head).to_bytes(4, "big") + head))
def test_any_bytes_are_a_message_or_an_error_of_ours(data):
    with contextlib.suppress(ChannelBroken):
        decode(data)


@settings(deadline=None)
@given(name=st.sampled_from(list(protocol._KINDS)), values=st.lists(PLAIN, max_size=4), body=st.binary(max_size=4))
def test_any_head_is_a_message_or_an_error_of_ours(name, values, body):
    for sizes in ([], [len(body)]):
        try:
            message = decode(frame(name, sizes, [], *values, body=body if sizes else b""))
        except ChannelBroken:
            continue
        for field in fields(message):
            assert type(getattr(message, field)).__name__ in (type(message).__annotations__[field], "int", "tuple")
