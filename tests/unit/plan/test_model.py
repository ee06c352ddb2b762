"""Addresses of sockets: in the launch's folder where they fit."""

from __future__ import annotations

import pytest

from infini_run.plan.model import notify_address


@pytest.mark.parametrize(
    ("folder", "launch_id", "wanted"),
    [
        ("/f", "ir-1", "/f/notify.4"),
        ("/f", "ir-1.2", "/f/notify.4.2"),
        ("/f", "ir-1.2.ir-3", "/f/notify.4.2.ir-3"),
        ("", "ir-1.2", "@infini-run/ir-1.2/4"),
        ("/" + "x" * 97, "ir-1", "/" + "x" * 97 + "/notify.4"),
        ("/" + "x" * 98, "ir-1", "@infini-run/ir-1/4"),
        ("/" + "ä" * 49, "ir-1", "@infini-run/ir-1/4"),
    ],
)
def test_notify_address_is_in_folder_if_path_fits(folder, launch_id, wanted):
    assert notify_address(folder, launch_id, 4) == wanted
