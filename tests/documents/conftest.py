"""Fixtures of these tests."""

from __future__ import annotations

from tests.support.nvml import stub_folder  # noqa: F401
