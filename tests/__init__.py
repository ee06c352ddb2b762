"""The tests. Helpers are in tests.support, imported by that name; their assertions are told as those of tests.

A rank that is sent a function of a test module imports that module, and does without pytest and hypothesis, whose
import takes four times as long as all else that most of them do: marks, fixtures, and strategies are nothing there.
"""

import sys
import types


class _Nothing:
    """A mark, a fixture, or a strategy where no test is run. What tests for something needs pytest itself."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args, **kwargs):
        is_decorated = len(args) == 1 and not kwargs and isinstance(args[0], types.FunctionType | type)
        return args[0] if is_decorated else self

    def __or__(self, other):
        return self


if "pytest" not in sys.modules:
    for absent in ("pytest", "hypothesis", "hypothesis.strategies"):
        sys.modules[absent] = types.ModuleType(absent)
        sys.modules[absent].__getattr__ = lambda name: _Nothing().__getattr__(name)
    sys.modules["hypothesis"].strategies = sys.modules["hypothesis.strategies"]
    sys.modules["hypothesis.strategies"].composite = lambda function: _Nothing()  # a strategy, once it is called

import pytest  # noqa: E402

pytest.register_assert_rewrite("tests.support")
