"""Records over the Link: each comes as it went, and only those that are known."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infini_run.errors import LinkError
from infini_run.options import Options, resolve
from infini_run.plain import _RECORDS, from_plain, record_of, to_plain
from infini_run.record import fields

VALUES = st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=5) | st.tuples(st.text(max_size=5))


def sent(value):
    return from_plain(json.loads(json.dumps(to_plain(value))))


@pytest.mark.parametrize("name", sorted(set(_RECORDS) - {"Options"}))
@given(data=st.data())
def test_every_record_comes_as_it_went(name, data):
    cls = _RECORDS[name]
    names = fields(cls)
    record = cls(**{field: data.draw(VALUES) for field in names})
    assert sent(record) == record


@pytest.mark.parametrize(
    "argv",
    [
        ["true"],
        [
            "--nproc_per_node=gpu",
            "--grace=1.5",
            "--log_dir=x",
            "--stdin=3",
            "-r",
            "0:1,1:2",
            "prog",
            "a b\n",
            "\udcff",
        ],
        ["--hosts=a,b:4", "--engine=ssh", "--nproc_per_node=4", "--export=A,B*", "--isolate=false", "prog"],
    ],
)
def test_options_come_as_they_went(argv):
    options = resolve(argv, {}).options
    assert record_of(Options, json.loads(json.dumps(to_plain(options)))) == options


@pytest.mark.parametrize(
    "value",
    [
        {"record": "Popen", "fields": {}},
        {"record": "Exit", "fields": {"nonsense": 1}},
        {"record": "Exit"},
        {"fields": {}},
        {"record": ["Exit"], "fields": {}},
        {"record": "Exit", "fields": 5},
        {},
    ],
)
def test_what_is_no_record_of_ours_is_refused(value):
    with pytest.raises(LinkError):
        from_plain(value)


def test_another_record_than_the_one_due_is_refused():
    options = resolve(["true"], {}).options
    from infini_run.report import Report

    with pytest.raises(LinkError, match="no Report"):
        record_of(Report, to_plain(options))


def test_what_json_cannot_say_is_our_mistake():
    with pytest.raises(TypeError):
        to_plain({1, 2})
