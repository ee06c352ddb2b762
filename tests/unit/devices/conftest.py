"""Fixtures of these tests."""

from __future__ import annotations

from tests.support.fake_sysfs import machine  # noqa: F401
from tests.support.nvml import driver, stub_folder  # noqa: F401
