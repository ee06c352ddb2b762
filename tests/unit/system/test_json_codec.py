"""JSON without `import json`: the same texts, the same refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infini_run.system import json_codec

TEXT = st.text(st.characters(codec=None), max_size=20)  # lone surrogates too: bytes of file names
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)

FOLDER = os.path.dirname(os.path.dirname(os.path.dirname(json_codec.__file__)))


@given(PLAIN)
@settings(deadline=None)
def test_it_is_what_json_writes_and_comes_back(content):
    data = json_codec.encode(content)
    assert data == json.dumps(content, separators=(",", ":")).encode()
    assert json_codec.decode(data) == content


@given(st.binary(max_size=30))
@settings(deadline=None)
def test_anything_else_is_a_value_error_or_what_json_reads(data):
    read = []
    for load in (json_codec.decode, lambda data: json.loads(data.decode())):
        try:
            read.append(repr(load(data)))
        except ValueError:
            read.append("refused")
    # json bears white space around a text, which nothing that we write has
    assert read[0] == read[1] or (read[0] == "refused" and data != data.strip(b" \t\r\n"))


def test_deep_nesting_is_a_recursion_error():
    with pytest.raises(RecursionError):
        json_codec.decode(b"[" * 200_000)


def test_what_is_not_plain_is_a_type_error():
    with pytest.raises(TypeError, match="none of JSON's types"):
        json_codec.encode({"a": object()})


def test_neither_json_nor_re_is_imported():
    code = f"import sys; sys.path[:1] = [{FOLDER!r}]; from infini_run.system import json_codec as n"
    code += "; n.decode(n.encode([1, 'a'])); print(*sys.modules)"
    said = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True)
    assert not {"json", "re", "enum"} & set(said.stdout.split())


@pytest.mark.parametrize("text", ["{", '{"a"', '{"a":1,}', '"', "[1", "[", "", "null null"])
def test_what_is_no_json_is_a_value_error_where_nobody_has_imported_json(text):
    code = f"""
import sys
sys.path[:1] = [{FOLDER!r}]
from infini_run.system import json_codec
try:
    json_codec.decode({text.encode()!r})
except ValueError:
    print("json" in sys.modules)
"""
    said = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout == "False\n"
