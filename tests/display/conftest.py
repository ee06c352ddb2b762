"""Fixtures of these tests."""

from __future__ import annotations

from tests.support.nvml import busy_gpus, driver, stub_folder  # noqa: F401
