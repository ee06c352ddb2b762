"""Records: keyword-only, frozen, equal by value; as dataclasses would be."""

from __future__ import annotations

import copy
import pickle

import pytest

from infini_run.record import made, record, replace


@record
class Point:
    x: int
    y: int = 2

    @property
    def sum(self):
        return self.x + self.y


@record
class Other:
    x: int
    y: int = 2


@record
class Empty:
    pass


def test_fields_are_given_by_name_and_defaults_fill_the_rest():
    assert (Point(x=1).x, Point(x=1).y) == (1, 2)
    assert Point(y=5, x=1).sum == 6
    assert repr(Empty()) == "Empty()"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, r"Point\(\) needs x="),
        ({"y": 1}, r"Point\(\) needs x="),
        ({"x": 1, "z": 2}, r"Point\(\) has no field z"),
        ({"x": 1, "z": 2, "a": 3}, r"Point\(\) has no field a, z"),
        ({"x": 1, "y": 1, "z": 2}, r"Point\(\) has no field z"),
        ({"y": 1, "z": 2}, r"Point\(\) needs x="),
    ],
)
def test_a_missing_or_unknown_field_is_named(fields, message):
    with pytest.raises(TypeError, match=message):
        Point(**fields)


def test_a_record_made_of_a_dictionary_is_as_one_that_was_called():
    point = made(Point, {"x": 1})
    assert point == Point(x=1) == made(Point, {"y": 2, "x": 1})
    assert (repr(point), hash(point)) == (repr(Point(x=1)), hash(Point(x=1)))
    with pytest.raises(AttributeError, match="Point is frozen: x cannot be set"):
        point.x = 2
    for values, message in (({}, "needs x="), ({"x": 1, "z": 2}, "has no field z"), ({"y": 1, "z": 2}, "needs x=")):
        with pytest.raises(TypeError, match=message):
            made(Point, values)


def test_fields_have_no_order():
    with pytest.raises(TypeError, match=r"^Point\(\) takes its values by name: x=, y=$"):
        Point(1, 2)


def test_nothing_can_be_set_deleted_or_added():
    point = Point(x=1)
    with pytest.raises(AttributeError, match="Point is frozen: x cannot be set"):
        point.x = 2
    with pytest.raises(AttributeError, match="Point is frozen: x cannot be deleted"):
        del point.x
    with pytest.raises(AttributeError, match="Point is frozen: new cannot be set"):
        point.new = 1
    assert point == Point(x=1)


def test_two_are_equal_when_their_class_and_fields_are():
    assert Point(x=1) == Point(x=1, y=2)
    assert Point(x=1) != Point(x=2)
    assert Point(x=1) != Other(x=1)
    assert Point(x=1) != (1, 2)
    assert len({Point(x=1), Point(x=1, y=2), Point(x=3), Other(x=1)}) == 3


def test_the_text_could_be_typed():
    assert repr(Point(x=1)) == "Point(x=1, y=2)"
    assert eval(repr(Point(x=1))) == Point(x=1)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_a_copy_is_equal(copied):
    assert copied(Point(x=[1], y={"a": 2})) == Point(x=[1], y={"a": 2})


def test_replace_changes_a_copy():
    point = Point(x=1)
    assert replace(point, y=9) == Point(x=1, y=9)
    assert point.y == 2
    with pytest.raises(TypeError, match="no field z"):
        replace(point, z=1)
