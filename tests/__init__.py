"""The tests. Helpers are in tests.support, imported by that name; their assertions are told as those of tests.

A rank that is sent a function of a test module imports that module, and does without pytest, whose import takes four
times as long as all else that most of them do: marks and fixtures are nothing there.
"""

import sys
import types


class _Nothing:
    """A mark or a fixture where no test is run. What tests for something needs pytest itself."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args, **kwargs):
        is_decorated = len(args) == 1 and not kwargs and isinstance(args[0], types.FunctionType | type)
        return args[0] if is_decorated else self


if "pytest" not in sys.modules:
    sys.modules["pytest"] = types.ModuleType("pytest")
    sys.modules["pytest"].__getattr__ = lambda name: _Nothing().__getattr__(name)

import pytest  # noqa: E402

pytest.register_assert_rewrite("tests.support")
