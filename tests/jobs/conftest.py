"""Fixtures of these tests."""

from __future__ import annotations

from tests.support.batch import pbs_queue, slurm_queue  # noqa: F401
from tests.support.fake_sysfs import machine  # noqa: F401
from tests.support.job_case import local, many_descriptors, turnstile  # noqa: F401
from tests.support.launch_shapes import draw, launch, launches  # noqa: F401
from tests.support.nvml import driver, stub_folder  # noqa: F401
from tests.support.podman import podman  # noqa: F401
from tests.support.serve_case import lasting, service, shared_local, shared_service  # noqa: F401
