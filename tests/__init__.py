"""The tests. Helpers are in tests.support, imported by that name; their assertions are told as those of tests."""

import pytest

pytest.register_assert_rewrite("tests.support")
