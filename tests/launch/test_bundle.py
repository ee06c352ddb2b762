"""--bundle: what a bug report needs of a running launch, without secrets."""

from __future__ import annotations

import json
import os
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infini_run.node.masking import MASK, masked, masked_command
from tests.launch.test_control import PYTHON_UP, ask, found, running, stop  # noqa: F401

SECRETS = {
    "HF_TOKEN": "hidden-1",
    "WANDB_API_KEY": "hidden-2",
    "db_password": "hidden-3",
    "AWS_CREDENTIALS": "hidden-4",
    "PIP_INDEX_URL": "https://alice:hidden-5@example.org/simple",
    "GIT_REMOTE": "https://hidden-6@example.org/x.git",
    "NETRC_CONTENT": "machine example.org login alice hidden-10",
    "AWS_SESSION": "hidden-11",
    "HEADER": "Bearer hidden-7-hidden",
    "UPLOAD": "https://example.org/x?sig=hidden-8&x=1",
    "NOTE": "ghp_hidden9hidden9hidden",
}


def test_bundle_has_report_trace_stacks_and_masked_environment(running, tmp_path):  # noqa: F811
    command, ranks = running(
        f"--trace={tmp_path / 'trace.json'}",
        program=(sys.executable, "-c", PYTHON_UP, "--api_key=hidden-0", "--password", "hidden-0", "--lr=1"),
        env={**os.environ, **SECRETS, "HARMLESS": "seen"},
    )
    folder = tmp_path / "bundle"
    launch_id = found(command.pid).launch_id
    done, read = ask(f"--bundle={folder}", command.pid).splitlines()
    names = ["launch.json", "report.json", "environment.json", "trace.json", "stacks.txt"]
    assert done == f"{launch_id}: wrote {', '.join(names)} to {folder}"
    assert read.startswith("read them before you send them")
    assert sorted(os.listdir(folder)) == sorted(names)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert all((folder / name).stat().st_mode & 0o777 == 0o600 for name in names)
    assert not any("hidden" in (folder / name).read_text() for name in names)
    about, report, environment, trace = (json.loads((folder / name).read_text()) for name in names[:4])
    assert about["id"] == report["launch_id"] == launch_id
    assert about["program"].endswith(f"--api_key={MASK} --password {MASK} --lr=1")
    assert [each["pid"] for each in report["ranks"]] == [ranks[0], ranks[1]]
    assert environment["common"]["HARMLESS"] == "seen"
    assert {name: environment["common"][name] for name in SECRETS} == dict.fromkeys(SECRETS, MASK)
    assert [environment["ranks"][rank]["RANK"] for rank in ("0", "1")] == ["0", "1"]
    assert trace["traceEvents"]
    assert "ranks 0-1 on " in (folder / "stacks.txt").read_text()
    stop(command)
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_bundle_goes_to_a_new_folder_only(running, tmp_path):  # noqa: F811
    command, _ = running()
    assert ask(f"--bundle={tmp_path}", command.pid, code=2) == (
        f"--bundle={tmp_path}: cannot make it: File exists; use a new folder"
    )
    assert ask(f"--bundle={tmp_path / 'x' / 'y'}", command.pid, code=2).endswith(
        ": cannot make it: No such file or directory; use a new folder"
    )
    line = ask(f"--bundle={tmp_path / 'x'}", code=2)
    assert line == f"--bundle={tmp_path / 'x'}: missing launch; add its id, or the pid of one of its processes"
    assert os.listdir(tmp_path) == []
    stop(command)


@pytest.mark.parametrize(
    ("name", "value"), [*SECRETS.items(), ("X", "mysql://u:p@h/db"), ("X", "a=1;password=b"), ("SENTRY_DSN", "x")]
)
def test_secrets_are_masked(name, value):
    assert masked({name: value}) == {name: MASK}


@pytest.mark.parametrize(
    ("name", "value"),
    [("PATH", "/bin:/usr/bin"), ("URL", "https://example.org/a?b=c"), ("MASTER_ADDR", "10.0.0.1"), ("TOKEN", "")],
)
def test_other_variables_are_kept(name, value):
    assert masked({name: value}) == {name: value}


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("x.py --password correct horse battery --lr 1", f"x.py --password {MASK} --lr 1"),
        ("x.py --token=a b", f"x.py --token={MASK}"),
        ("x.py -H Authorization: Bearer abcdefgh -v", f"x.py -H Authorization: {MASK} -v"),
        ("x.py -H Authorization:Bearer abcdefgh", f"x.py -H Authorization:{MASK}"),
        ("x.py --header Bearer abcdefgh --lr 1", f"x.py --header Bearer {MASK} --lr 1"),
        ("x.py --token= --lr 1", "x.py --token= --lr 1"),
        ("x.py --use_auth --lr 1", "x.py --use_auth --lr 1"),
        ("x.py --url https://u:p@h/x data", f"x.py --url {MASK} data"),
    ],
)
def test_secret_words_of_a_command_line_are_masked(line, shown):
    """The words come without quotes, so a secret with spaces ends where the next option begins."""
    assert masked_command(line) == shown


@given(st.text())
def test_any_command_line_can_be_masked(text):
    masked_command(text)
