"""An error file is read and never trusted."""

from __future__ import annotations

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infini_run.report.error_file import read_error_file


def read(tmp_path, content):
    path = tmp_path / "error.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_error_file(str(path))


TORCH = {
    "message": {
        "message": "RuntimeError: CUDA out of memory",
        "extraInfo": {"py_callstack": "Traceback ...", "timestamp": "1700000000"},
    }
}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (json.dumps(TORCH), "RuntimeError: CUDA out of memory"),
        (json.dumps({"message": "plain"}), "plain"),
        (json.dumps("just text"), "just text"),
        ("it broke\n  at line 3\n", "it broke at line 3"),
        (json.dumps({"message": {"message": "two\nlines"}}), "two lines"),
        ('{"message": {"message": "cut o', '{"message": {"message": "cut o'),
        ('{"other": 1}', ""),
        ('{"message": 5}', '{"message": 5}'),
        ('{"message": {"message": null}}', '{"message": {"message": null}}'),
        ("[1, 2]", "[1, 2]"),
        ("", ""),
        (" \n\t ", ""),
        (b"\xff\xfe bad bytes", "\ufffd\ufffd bad bytes"),
        ("x" * 600, "x" * 497 + "..."),
        ("[" * 100_000, "[" * 497 + "..."),
    ],
)
def test_json_of_torch_and_any_text_give_one_line(content, message, tmp_path):
    assert read(tmp_path, content) == message


@given(
    st.binary(max_size=2000)
    | st.text().map(str.encode)
    | st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["message", "a"]), inner),
    ).map(lambda value: json.dumps(value).encode())
)
def test_any_bytes_give_one_short_line(tmp_path_factory, content):
    message = read(tmp_path_factory.getbasetemp(), content)
    assert len(message) <= 500
    assert len(message.splitlines()) <= 1


def test_a_huge_file_is_read_in_part(tmp_path):
    assert read(tmp_path, "y" * (5 << 20)) == "y" * 497 + "..."


def test_what_is_no_file_says_nothing(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "fifo")
    for name in ("missing", "folder", "link", "fifo"):
        assert read_error_file(str(tmp_path / name)) == ""
