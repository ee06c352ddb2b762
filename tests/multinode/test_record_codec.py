"""Records over the Link: each comes as it went, and only those that are known."""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import infini_run
from infini_run.errors import LinkError
from infini_run.multinode.link.record_codec import _BOUNDS, _RECORDS, decode_record, to_jsonable
from infini_run.options.launch_options import Options
from infini_run.options.options import resolve
from infini_run.record import fields, replace
from infini_run.report.exit import Exit
from infini_run.report.report import Report

_PARTS = re.compile(r"[A-Za-z_.]+|\[|\]|,|\|")
_PLAIN = {"int": 7, "float": 2.5, "bool": True, "str": "a\udcff", "None": None, "Any": "any"}
TEXT = st.text(st.characters(codec=None), max_size=5)
PLAIN = {
    "int": st.integers(-(2**62), 2**62),
    "float": st.floats(-1e15, 1e15),
    "bool": st.booleans(),
    "str": TEXT,
}


def values(kind):
    """Of that annotation's type."""
    if kind.endswith(" | None"):
        return st.none() | values(kind.removesuffix(" | None"))
    if kind.startswith("tuple["):
        inner = kind[len("tuple[") : -1]
        if inner.endswith(", ..."):
            return st.lists(values(inner.removesuffix(", ...")), max_size=2).map(tuple)
        return st.tuples(*map(values, inner.split(", ")))
    if " | " in kind:
        return st.one_of(*map(values, kind.split(" | ")))
    return PLAIN[kind] if kind in PLAIN else records(kind)


def records(name):
    cls = getattr(importlib.import_module(_RECORDS[name]), name)
    bounded = {field: st.integers(0, most) for field, most in _BOUNDS.get(name, ())}
    kinds = {field: values(cls.__annotations__[field]) for field in fields(cls)}
    return st.builds(cls, **{field: bounded.get(field, kinds[field]) for field in kinds})


def sent(value):
    return decode_record(type(value), json.loads(json.dumps(to_jsonable(value))))


@pytest.mark.parametrize("name", sorted(_RECORDS))
@settings(max_examples=20)
@given(data=st.data())
def test_every_record_comes_as_it_went(name, data):
    record = data.draw(records(name))
    assert sent(record) == record


@pytest.mark.parametrize(("field", "value"), [("code", 256), ("code", -1), ("signal", 65), ("start_errno", 2**31)])
def test_what_would_be_an_exit_code_of_ours_is_none_beyond_those(field, value):
    with pytest.raises(LinkError, match=f"{field} {value} of Exit"):
        sent(replace(Exit(rank=0, local_rank=0, host="a"), **{field: value}))


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)


def spots(value, path=()):
    """Every place in it where something else could stand."""
    yield path
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in parts:
        yield from spots(inner, (*path, key))


@settings(max_examples=200)
@given(data=st.data())
def test_something_else_anywhere_in_a_report_is_refused_or_of_the_same_type(data):
    whole = [to_jsonable(data.draw(records("Report")))]
    *path, last = data.draw(st.sampled_from(list(spots(whole))[1:]))
    holder = whole
    for key in path:
        holder = holder[key]
    holder[last] = data.draw(JUNK)
    try:
        report = decode_record(Report, whole[0])
    except LinkError:
        return
    assert to_jsonable(report) == json.loads(json.dumps(whole[0]))
    report.to_json()
    report.text()


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
    assert decode_record(Options, json.loads(json.dumps(to_jsonable(options)))) == options


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
@pytest.mark.parametrize("cls", [Exit, Report])
def test_what_is_no_record_of_ours_is_refused(cls, value):
    with pytest.raises(LinkError):
        decode_record(cls, value)


def test_another_record_than_the_one_due_is_refused():
    options = resolve(["true"], {}).options
    with pytest.raises(LinkError, match="no Report"):
        decode_record(Report, to_jsonable(options))


def test_what_json_cannot_say_is_our_mistake():
    with pytest.raises(TypeError):
        to_jsonable({1, 2})


def all_records():
    """Every record that there is, by name: a field's type is only a text while the program runs."""
    for module in pkgutil.walk_packages(infini_run.__path__, "infini_run."):
        if not module.name.rpartition(".")[2].startswith("_"):
            importlib.import_module(module.name)
    ours = [vars(module) for name, module in list(sys.modules.items()) if name.startswith("infini_run")]
    return {
        name: value
        for names in ours
        for name, value in names.items()
        if isinstance(value, type) and "_fields" in vars(value)
    }


def full(text, records):
    """A value of that type with nothing left out, and the records that are in it."""
    words, at = _PARTS.findall(text), 0
    seen = set()

    def union():
        nonlocal at
        first = one()
        while at < len(words) and words[at] == "|":
            at += 1
            one()
        return first

    def one():
        nonlocal at
        name, at = words[at].rpartition(".")[2], at + 1
        parts = []
        if at < len(words) and words[at] == "[":
            while words[at] != "]":
                at += 1
                if words[at] == "...":
                    at += 1
                else:
                    parts.append(union())
            at += 1
        if name in _PLAIN:
            return _PLAIN[name]
        if name == "tuple":
            return tuple(parts)
        assert name in records, f"{text}: what is {name}?"
        seen.add(name)
        values = {}
        for field, annotation in records[name].__annotations__.items():
            values[field], more = full(annotation, records)
            seen.update(more)
        return records[name](**values)

    value = union()
    assert at == len(words), text
    return value, seen


@pytest.mark.parametrize("root", ["Options", "Report"])
def test_no_record_that_can_travel_is_forgotten(root):
    """Walks the types of the fields, however deep."""
    value, seen = full(root, all_records())
    assert seen - set(_RECORDS) == set()
    assert sent(value) == value
