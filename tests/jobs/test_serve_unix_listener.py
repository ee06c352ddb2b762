"""The socket of infini-job serve: where it may be, whose requests are read, what is left of it."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile

import pytest

from tests.support.job_case import JOB
from tests.support.serve_case import Service
from tests.support.waiting import LIMIT_S, until

NOBODY = 65534


def refused(local, path, said):
    done = local.call("serve", f"--socket={path}")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"infini-job: {said}\n"


def ask_as_nobody(path):
    """What another user is told: how far it comes."""
    code = f"""
import os, socket
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
client = socket.socket(socket.AF_UNIX)
try:
    client.connect({path!r})
    client.sendall(b"GET /v1/jobs HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n")
    print(client.recv(100))
except OSError as error:
    print(type(error).__name__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=LIMIT_S)
    return done.stdout.strip()


def test_the_socket_is_its_owners_alone_and_goes_with_the_service(service):
    assert stat.S_IMODE(os.lstat(service.path).st_mode) == 0o600
    assert service.get("/v1/jobs") == []
    service.end()
    assert not os.path.lexists(service.path)


def test_its_mode_does_not_follow_the_umask(local, tmp_path):
    before = os.umask(0)
    try:
        service = Service(local, tmp_path / "s")
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.lstat(service.path).st_mode) == 0o600
    service.end()


@pytest.mark.root
def test_another_user_is_not_read_from_even_where_the_socket_can_be_reached(local):
    if os.geteuid() != 0:
        pytest.skip("needs root to be another user")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # which everybody may pass
        os.chmod(folder, 0o755)
        service = Service(local, f"{folder}/s")
        assert ask_as_nobody(service.path) == "PermissionError"
        os.chmod(service.path, 0o666)
        assert ask_as_nobody(service.path) in ("b''", "ConnectionResetError", "BrokenPipeError")
        service.command.read_error_until(b": this service is only for its owner\n")
        assert service.command.err.startswith(b"infini-job: refused a connection of user 65534 (process ")
        assert service.get("/v1/jobs") == []  # it goes on
        service.end()


def test_a_live_one_is_not_replaced(service, local):
    refused(
        local,
        service.path,
        f"--socket={service.path}: already in use by a service (process {service.command.pid}); "
        "use another path, or stop it",
    )
    assert service.get("/v1/jobs") == []


def test_what_a_killed_one_has_left_is_replaced(local, tmp_path):
    first = Service(local, tmp_path / "s")
    first.client.close()
    first.command.signal(signal.SIGKILL)
    first.command.wait()
    assert os.path.lexists(first.path)
    second = Service(local, tmp_path / "s")
    assert second.get("/v1/jobs") == []
    second.end()


def test_of_several_that_start_at_once_one_serves(local, tmp_path):
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(tmp_path / "s"))
    left.close()
    started = [local.start("serve", f"--socket={tmp_path}/s") for _ in range(3)]

    def over():
        return [one for one in started if one.process.poll() is not None]

    until(lambda: len(over()) == 2)
    assert [one.wait() for one in over()] == [2, 2]
    (live,) = [one for one in started if one.process.poll() is None]
    live.read_until(b"serving at")
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(tmp_path / "s"))
    live.signal(signal.SIGTERM)
    assert live.wait() == 0
    assert not os.path.lexists(tmp_path / "s")


def test_another_ones_socket_is_left_at_the_end(local, tmp_path):
    service = Service(local, tmp_path / "s")
    service.client.close()
    os.unlink(service.path)
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(service.path)
        service.command.signal(signal.SIGTERM)
        assert service.command.wait() == 0
    assert os.path.lexists(service.path)


def test_what_is_no_socket_is_left_alone(local, tmp_path):
    path = tmp_path / "s"
    path.write_text("precious")
    refused(local, path, f"--socket={path}: already exists, and is not your socket; use another path")
    assert path.read_text() == "precious"
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    refused(local, path, f"--socket={path}: already exists, and is not your socket; use another path")


def test_a_directory_of_jobs_that_cannot_be_made_is_one_line(local, tmp_path):
    done = local.call("serve", f"--socket={tmp_path}/s", "--dir=/proc/no/such")
    assert (done.returncode, done.stdout) == (2, "")
    said = "--dir=/proc/no/such: No such file or directory; use a directory that you can write"
    assert done.stderr == f"infini-job: {said}\n"


def test_a_directory_that_others_may_write_is_refused(local, tmp_path):
    for folder in ("open", "open/closed"):
        (tmp_path / folder).mkdir(mode=0o700)
    (tmp_path / "open").chmod(0o770)
    said = f"--socket: others can write in {tmp_path}/open, and replace the socket; run chmod go-w {tmp_path}/open"
    refused(local, tmp_path / "open" / "s", said)
    refused(local, tmp_path / "open" / "closed" / "s", said)
    refused(
        local,
        tmp_path / "nosuch" / "s",
        f"--socket: {tmp_path}/nosuch is not a directory; run mkdir -m 700 {tmp_path}/nosuch",
    )
    if os.geteuid() == 0:
        os.chown(tmp_path / "open", NOBODY, NOBODY)
        refused(
            local,
            tmp_path / "open" / "s",
            f"--socket: {tmp_path}/open belongs to another user, who could replace the socket; use a directory of "
            "your own",
        )


def test_a_path_that_is_too_long_is_told(local, tmp_path):
    path = tmp_path / ("s" * 100)
    refused(local, path, f"--socket={path}: expected a path of at most 107 bytes; use a shorter one")


def test_without_a_path_one_is_asked_for(local):
    done = local.call("serve")
    assert (done.returncode, done.stderr) == (
        2, "infini-job: missing --socket; use infini-job serve --socket=$XDG_RUNTIME_DIR/infini-job.sock\n",
    )  # fmt: skip


def without(module, *words, env):
    """infini-job, where a module is not installed."""
    code = f"import sys; sys.modules[{module!r}] = None; from infini_run.jobs.cli import main; main()"
    argv = [sys.executable, "-c", code, *words]
    return subprocess.run(argv, env=env, capture_output=True, text=True, check=False, timeout=LIMIT_S)


def test_without_the_extra_it_says_what_to_install(local, tmp_path):
    for module in ("fastapi", "uvicorn", "starlette", "pydantic"):
        done = without(module, "serve", f"--socket={tmp_path}/s", env=local.env)
        assert done.returncode == 2
        assert done.stderr.endswith("pip install 'infini-run[serve]'\n")
        assert len(done.stderr.splitlines()) == 1
        assert not (tmp_path / "s").exists()
        assert without(module, "list", env=local.env).returncode == 0


def test_nothing_of_it_is_imported_by_the_other_verbs(local):
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *JOB[1:], "list"], env=local.env, capture_output=True, text=True,
        check=True, timeout=LIMIT_S,
    )  # fmt: skip
    found = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "infini_run" in found
    assert not found & {"fastapi", "starlette", "uvicorn", "pydantic", "asyncio", "anyio"}
