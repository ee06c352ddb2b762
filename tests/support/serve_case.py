"""`infini-job serve` for tests: started, asked over its socket, ended by TERM; whatever it leaves is a failure.

It takes longer to start than most of its tests take. A module whose tests leave it as it was has one for all of them
(`shared_service`), and jobs in one directory (`shared_local`).
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import Case
from tests.support.job_case import LOCAL, Jobs
from tests.support.waiting import LIMIT_S, until


class Service:
    """One that listens. `client`: asks it as our page does."""

    def __init__(self, jobs: Jobs, path: Path) -> None:
        self.path = str(path)
        self.command = jobs.start("serve", f"--socket={path}")
        self.command.read_until(f"infini-job: serving at {path}\n".encode())
        self.client = self._new_client()

    def _new_client(self):
        import httpx

        return httpx.Client(
            transport=httpx.HTTPTransport(uds=self.path), base_url="http://localhost",
            headers={"X-Infini-Job": "1"}, timeout=LIMIT_S,
        )  # fmt: skip

    def as_another_client(self) -> Service:
        """The same one, asked by a client of its own."""
        other = copy.copy(self)
        other.client = self._new_client()
        return other

    def get(self, path: str, **query: object) -> object:
        """The JSON of an answer."""
        answer = self.client.get(path, params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def submit(self, *command: object, **flags: object) -> str:
        """The name of a job that was taken."""
        body = {"command": list(map(str, command)), "flags": flags}
        answer = self.client.post("/v1/jobs", json=body)
        assert answer.status_code == 201, answer.text
        return answer.json()["name"]

    def end_of(self, name: str) -> dict[str, object]:
        """Its status, once it has ended: followed, not asked for again and again."""
        self.client.get(f"/v1/jobs/{name}/logs", params={"follow": True})
        return self.get(f"/v1/jobs/{name}")

    def descriptors(self) -> list[str]:
        """What it holds, by what that is."""
        folder = f"/proc/{self.command.pid}/fd"
        found = []
        for fd in os.listdir(folder):
            try:
                found.append(os.readlink(f"{folder}/{fd}"))
            except FileNotFoundError:
                continue
        return sorted(found)

    def end(self) -> None:
        """By TERM, cleanly. Once."""
        self.client.close()
        if self.command.process.poll() is None:
            self.command.signal(signal.SIGTERM)
            assert self.command.wait() == 0, self.command.err
            assert not os.path.lexists(self.path)


class Events:
    """The list of jobs as it changes: what has come so far, by name."""

    def __init__(self, service: Service) -> None:
        self._context = service.client.stream("GET", "/v1/events")
        self._lines = self._context.__enter__().iter_lines()
        self.jobs: dict[str, dict[str, object]] = {}
        self.problem = ""

    def next(self) -> None:
        line = next(line for line in self._lines if line.startswith("data: "))
        content = json.loads(line.removeprefix("data: "))
        self.jobs.update({job["name"]: job for job in content["jobs"]})
        for name in content["gone"]:
            del self.jobs[name]
        self.problem = content["problem"]

    def state(self, name: str) -> object:
        return self.jobs.get(name, {}).get("state")

    def until(self, name: str, *states: object) -> None:
        while self.state(name) not in states:
            self.next()

    def close(self) -> None:
        self._context.__exit__(None, None, None)


@pytest.fixture
def service(local: Jobs, tmp_path: Path) -> Iterator[Service]:
    """Of jobs on this machine."""
    service = Service(local, tmp_path / "s")
    yield service
    service.end()
    assert service.command.err == b""


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, Jobs, Case]]:
    """A service for all tests of a module."""
    case, path = Case(), tmp_path_factory.mktemp("serve")
    jobs = Jobs(path / "jobs", case, LOCAL)
    try:
        service = Service(jobs, path / "s")
        yield service, jobs, case
        service.end()
        assert service.command.err == b""
    finally:
        jobs.close()
        case.clear()


@pytest.fixture
def shared_local(lasting: tuple[Service, Jobs, Case]) -> Iterator[Jobs]:
    """Jobs of this machine, which the service of the module serves. Nothing of them is left at the end."""
    service, jobs, case = lasting
    yield jobs
    until(lambda: case.alive().keys() == {service.command.pid})
    until(lambda: "anon_inode:inotify" not in service.descriptors())  # it has noticed that nobody reads
    for folder in jobs.path.iterdir():
        shutil.rmtree(folder)


@pytest.fixture
def shared_service(shared_local: Jobs, lasting: tuple[Service, Jobs, Case]) -> Iterator[Service]:
    """That of the module, with a client for this test."""
    service = lasting[0].as_another_client()
    yield service
    service.client.close()
    assert service.command.process.poll() is None
