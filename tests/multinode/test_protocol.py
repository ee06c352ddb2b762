"""Frames under any chunking; what is no frame is refused, and never more is held than the limit lets."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infini_run.errors import LinkError
from infini_run.multinode.link.protocol import KINDS, Decoder, pack, pack_json, unpack_json

FRAMES = st.lists(st.tuples(st.sampled_from(sorted(KINDS)), st.binary(max_size=200)), max_size=8)
TEXT = st.text(st.characters(codec=None), max_size=20) | st.binary(max_size=20).map(
    lambda raw: raw.decode("utf-8", "surrogateescape")
)


def pieces(data, cuts):
    at = 0
    for cut in [*sorted(cut % (len(data) + 1) for cut in cuts), len(data)]:
        yield data[at:cut]
        at = cut


@given(FRAMES, st.lists(st.integers(min_value=0), max_size=20))
def test_frames_come_out_as_they_went_in_under_any_chunking(frames, cuts):
    decoder = Decoder()
    data = b"".join(pack(kind, payload) for kind, payload in frames)
    assert [frame for piece in pieces(data, cuts) for frame in decoder.feed(piece)] == frames
    assert decoder.is_empty


@given(FRAMES.filter(bool), st.integers(min_value=1))
def test_half_a_frame_is_no_frame(frames, missing):
    decoder = Decoder()
    last = pack(*frames[-1])
    data = b"".join(pack(*frame) for frame in frames)[: -(missing % len(last) or len(last) - 1 or 1)]
    assert len(list(decoder.feed(data))) == len(frames) - 1
    assert not decoder.is_empty


@given(st.binary(min_size=5))
def test_garbage_is_refused_or_waits_for_more(data):
    decoder = Decoder(limit=64)
    try:
        for kind, payload in decoder.feed(data):
            assert kind in KINDS
            assert len(payload) <= 64
    except LinkError:
        return
    assert len(decoder._buffer) < 5 + 64


def test_a_payload_over_the_limit_is_refused_at_its_header():
    with pytest.raises(LinkError):
        list(Decoder(limit=10).feed(pack(b"o", b"x" * 11)[:5]))
    assert list(Decoder(limit=10).feed(pack(b"o", b"x" * 10))) == [(b"o", b"x" * 10)]


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=10,
)


@given(PLAIN)
def test_words_of_any_bytes_go_and_come(content):
    payload = next(iter(Decoder().feed(pack_json(b"S", content))))[1]
    assert unpack_json(payload) == content


@given(st.binary(max_size=40))
def test_what_is_no_json_is_refused(payload):
    try:
        content = unpack_json(payload)
    except LinkError:
        return
    assert repr(content) == repr(json.loads(payload.decode()))  # NaN is not equal to itself


def test_a_nest_without_end_is_refused():
    with pytest.raises(LinkError):
        unpack_json(b"[" * 200_000)
