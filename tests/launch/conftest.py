"""Fixtures of these tests."""

from __future__ import annotations

from tests.support.launch_shapes import draw, launch, launches  # noqa: F401
