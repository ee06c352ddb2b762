"""infini-job serve: the verbs over HTTP, on jobs of this machine and of a stand-in for Slurm."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import time

import pytest

from infini_run.jobs.folder.task import tasks_of
from tests.jobs.test_job_status import made
from tests.support.command import play
from tests.support.job_case import Jobs, changed_job
from tests.support.processes import is_alive
from tests.support.serve_case import Events, Service
from tests.support.waiting import LIMIT_S, until

pytestmark = pytest.mark.xdist_group(__name__)  # one service for most of them

HOLD = "exec sleep 1000"
HOST = os.uname().nodename
OWN = "only for the command; use POST /v1/scripts to show or check a script"


def hold(bell):
    """A rank that rings, and lives until it is told to end."""
    return ("sh", "-c", f"echo up; echo $$ > {bell.path}; {HOLD}")


@pytest.fixture
def local(shared_local):
    """Jobs that the service of this module serves."""
    return shared_local


@pytest.fixture
def service(shared_service):
    """One for most tests of this module."""
    return shared_service


@pytest.fixture
def own_service(local, tmp_path):
    """A service of the test alone."""
    service = Service(local, tmp_path / "s")
    yield service
    service.end()
    assert service.command.err == b""


@pytest.fixture
def on_slurm(tmp_path, case, slurm_queue):
    """A service whose scheduler is a stand-in for Slurm."""
    jobs = Jobs(tmp_path / "jobs", case, slurm_queue.env)
    try:
        service = Service(jobs, tmp_path / "s")
        yield service
        service.end()
    finally:
        jobs.close()


def test_a_job_is_submitted_listed_and_read(service, local):
    answer = service.client.post(
        "/v1/jobs", json={"command": ["sh", "-c", "echo hello $RANK"], "flags": {"slots": 2, "scheduler": "local"}}
    )
    assert answer.status_code == 201
    job = answer.json()
    assert answer.headers["location"] == f"/v1/jobs/{job['name']}"
    assert (job["scheduler"], job["nodes"], job["slots_per_node"]) == ("local", 1, 2)
    assert job["folder"] == str(local.path / job["name"])
    assert service.end_of(job["name"])["headline"] == "COMPLETED"
    log = service.client.get(f"/v1/jobs/{job['name']}/logs")
    assert sorted(log.text.splitlines()) == ["[rank 0] hello 0", "[rank 1] hello 1"]
    assert log.headers["content-type"] == "text/plain; charset=utf-8"


def test_answers_are_what_the_command_prints(service, local):
    first, second = local.submit("--", "true"), service.submit("sh", "-c", "exit 3")
    service.end_of(first)
    service.end_of(second)
    assert service.get("/v1/jobs") == json.loads(local.call("list", "--json").stdout)
    assert service.get("/v1/jobs", name=second) == json.loads(local.call("status", "--json", second).stdout)
    assert service.get(f"/v1/jobs/{first}") == local.status(first)
    assert service.client.get(f"/v1/jobs/{second}/logs").text == local.logs(second)


def test_the_first_failure_is_told(service):
    name = service.submit(*play("@2", "exit=7", "@*", "wait"), slots=4)
    status = service.end_of(name)
    assert (status["headline"], status["code"], status["rank"]) == (f"FAILED exit 7 on {HOST}, rank 2", 7, 2)
    (run,) = service.get(f"/v1/jobs/{name}/timeline")
    assert run["failure"].startswith(f"rank 2 on {HOST} failed: exit code 7")
    assert [(rank["rank"], rank["host"], rank["kind"], rank["is_first"]) for rank in run["ranks"]] == [
        (rank, HOST, "failed" if rank == 2 else "stopped", rank == 2) for rank in range(4)
    ]
    assert all(run["ranks"][2]["start_s"] <= rank["end_s"] for rank in run["ranks"])


def test_the_timeline_of_a_job_that_runs_has_all_of_its_ranks(service, local, bell):
    name = service.submit(*hold(bell), slots=2)
    bell.hear(2)
    local.wait(name, "RUNNING")
    (run,) = service.get(f"/v1/jobs/{name}/timeline")
    assert [(rank["rank"], rank["host"], rank["kind"]) for rank in run["ranks"]] == [
        (0, HOST, "running"), (1, HOST, "running"),
    ]  # fmt: skip
    assert service.get(f"/v1/jobs/{name}")["submitted_s"] <= run["ranks"][0]["start_s"]
    service.client.post(f"/v1/jobs/{name}/cancel")
    service.end_of(name)


def test_each_restart_is_a_run_of_the_timeline(service):
    name = service.submit("sh", "-c", "[ $INFINI_JOB_ATTEMPT = 1 ] || exit 3", restarts=1)
    service.end_of(name)
    first, second = service.get(f"/v1/jobs/{name}/timeline")
    assert (first["attempt"], first["state"], first["ranks"][0]["end"]) == (0, "REQUEUED", "exit 3")
    assert (second["attempt"], second["state"], second["ranks"][0]["end"]) == (1, "COMPLETED", "exit 0")


def test_tasks_of_an_array_are_jobs_of_their_own(service, local, bell):
    """They are told with the array, as they change."""
    script = f"echo is $INFINI_JOB_TASK; echo > {bell.path}; [ $INFINI_JOB_TASK = 2 ] || exec sleep 1000; exit 7"
    with service.client.stream("GET", "/v1/events") as answer:
        lines = answer.iter_lines()
        name = service.submit("sh", "-c", script, array="1-3%2")
        bell.hear(2)
        service.client.post(f"/v1/jobs/{name}.1/cancel")
        wanted = {1: "CANCELLED", 2: f"FAILED exit 7 on {HOST}, rank 0", 3: "RUNNING"}
        for line in lines:
            told = json.loads(line.removeprefix("data: "))["jobs"] if line.startswith("data: ") else []
            if any({task["task"]: task["headline"] for task in job["tasks"]} == wanted for job in told):
                break
    assert service.get(f"/v1/jobs/{name}.2")["headline"] == wanted[2]
    assert "[rank 0] is 1\n" in service.client.get(f"/v1/jobs/{name}/logs", params={"task": 1}).text.splitlines(True)
    assert "[task 1] [rank 0] is 1\n" in service.client.get(f"/v1/jobs/{name}/logs").text.splitlines(True)
    assert service.client.get(f"/v1/jobs/{name}/logs", params={"task": 9}).status_code == 404
    assert service.client.get(f"/v1/jobs/{name}.2/timeline").json()[0]["ranks"][0]["end"] == "exit 7"
    service.client.post(f"/v1/jobs/{name}/cancel")
    status = service.end_of(name)
    assert (status["code"], status["task"]) == (7, 2)
    assert status == local.status(name)


def test_a_job_is_cancelled_with_its_grace(service, bell):
    script = f'trap "echo saved; exit 0" TERM; (echo up > {bell.path}; exec sleep 1000) & wait'
    name = service.submit("sh", "-c", script)
    bell.hear(1)
    answer = service.client.post(f"/v1/jobs/{name}/cancel")
    assert answer.status_code == 202
    assert answer.json()["name"] == name
    assert service.end_of(name)["state"] == "CANCELLED"
    assert "[rank 0] saved\n" in service.client.get(f"/v1/jobs/{name}/logs").text
    assert service.client.post(f"/v1/jobs/{name}/cancel").json()["state"] == "CANCELLED"  # nothing more to do


def test_logs_are_followed_as_they_are_written_to_the_end_of_the_job(service, tmp_path, bell):
    os.mkfifo(tmp_path / "go")
    name = service.submit("sh", "-c", f"echo first; echo > {bell.path}; read word < {tmp_path}/go; echo $word")
    bell.hear(1)
    with service.client.stream("GET", f"/v1/jobs/{name}/logs", params={"follow": True}) as answer:
        lines = answer.iter_lines()
        assert next(lines) == "[rank 0] first"
        (tmp_path / "go").write_text("second\n")
        assert list(lines) == ["[rank 0] second"]
    assert service.get(f"/v1/jobs/{name}")["state"] == "COMPLETED"


def test_logs_of_one_rank_or_node(service):
    name = service.submit("sh", "-c", "echo from $RANK", slots=3)
    service.end_of(name)
    for follow in (False, True):
        answer = service.client.get(f"/v1/jobs/{name}/logs", params={"rank": 1, "follow": follow})
        assert answer.text == "[rank 1] from 1\n"
    assert len(service.client.get(f"/v1/jobs/{name}/logs", params={"node": HOST}).text.splitlines()) == 3
    assert len(service.client.get(f"/v1/jobs/{name}/logs", params={"tail": 1 << 63}).text.splitlines()) == 3
    for follow in (False, True):
        answer = service.client.get(f"/v1/jobs/{name}/logs", params={"rank": 3, "follow": follow})
        assert (answer.status_code, answer.json()["detail"]) == (400, "--rank: unknown rank 3; use ranks 0 to 2")
    answer = service.client.get(f"/v1/jobs/{name}/logs", params={"attempt": 1})
    assert answer.json()["detail"] == f"--attempt=1: job {name} ran 1 time, counted from 0"


def test_who_stops_following_leaves_nothing_behind(own_service, bell):
    name = own_service.submit(*hold(bell))
    bell.hear(1)
    own_service.get(f"/v1/jobs/{name}")
    before = own_service.descriptors()
    with own_service.client.stream("GET", f"/v1/jobs/{name}/logs", params={"follow": True}) as answer:
        assert next(answer.iter_lines()) == "[rank 0] up"
        assert own_service.descriptors() != before
    until(lambda: len(own_service.descriptors()) <= len(before))
    events = Events(own_service)
    events.until(name, "RUNNING")
    events.close()
    until(lambda: len(own_service.descriptors()) <= len(before))
    own_service.client.post(f"/v1/jobs/{name}/cancel")
    own_service.end_of(name)


def test_events_tell_of_every_change(service, local, bell):
    events = Events(service)
    events.next()
    assert events.jobs == {}
    name = local.submit("--", *hold(bell))  # by somebody else than the service
    events.until(name, "RUNNING")
    local.call("cancel", name)
    events.until(name, "CANCELLED")
    assert events.jobs[name] == service.get(f"/v1/jobs/{name}")
    shutil.rmtree(local.path / name)
    while name in events.jobs:
        events.next()
    events.close()


def test_events_tell_of_a_job_whose_process_was_killed(service, local, bell):
    name = service.submit(*hold(bell))
    (pid,) = bell.hear(1)
    events = Events(service)
    events.until(name, "RUNNING")
    os.kill(int((local.path / name / "id").read_text().split(".")[0]), signal.SIGKILL)
    events.until(name, "LOST")
    events.close()
    until(lambda: not is_alive(int(pid)))


def test_term_ends_streams_and_leaves_jobs(own_service, local, bell):
    name = own_service.submit(*hold(bell))
    (pid,) = bell.hear(1)
    events = Events(own_service)
    events.next()
    with own_service.client.stream("GET", f"/v1/jobs/{name}/logs", params={"follow": True}) as answer:
        lines = answer.iter_lines()
        assert next(lines) == "[rank 0] up"
        own_service.command.signal(signal.SIGTERM)
        assert list(lines) == []
    assert own_service.command.wait() == 0
    assert is_alive(int(pid))
    local.call("cancel", name)
    local.wait(name)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_between_the_socket_and_its_first_request_leaves_no_socket(local, tmp_path, monkeypatch, number):
    lines = (
        "import os\n"
        "from infini_run.jobs.serve import service\n"
        "make_app = service.make_app\n"
        f"service.make_app = lambda *given: (os.kill(os.getpid(), {int(number)}), make_app(*given))[1]"
    )
    monkeypatch.setattr("tests.support.job_case.JOB", changed_job(lines))
    path = tmp_path / "s"
    command = local.start("serve", f"--socket={path}")
    assert (command.wait(), command.err) == (0, b"")
    assert not os.path.lexists(path)


def test_term_does_not_wait_for_a_client_that_does_not_read(local, tmp_path, monkeypatch):
    """Longer than its grace: a second here, 5 s else."""
    lines = "from infini_run.jobs.serve import service\nservice._GRACE_S = 1"
    monkeypatch.setattr("tests.support.job_case.JOB", changed_job(lines))
    service = Service(local, tmp_path / "s")
    name = service.submit("sh", "-c", "head -c 8000000 /dev/zero | tr '\\0' x | fold -w 999")
    local.wait(name)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(service.path)
        client.sendall(f"GET /v1/jobs/{name}/logs HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert client.recv(5) == b"HTTP/"
        service.end()


def test_wrong_requests_are_told_in_the_commands_own_words(service, local):
    answer = service.client.post("/v1/jobs", json={"command": ["true"], "flags": {"slotz": 2}})
    assert (answer.status_code, answer.headers["content-type"]) == (400, "application/problem+json")
    assert answer.json()["detail"] == "unknown flag --slotz; did you mean --slots?"
    assert answer.json()["exit_code"] == 2
    for body, said in (
        ({"command": []}, "command: List should have at least 1 item after validation, not 0"),
        ({"command": ["true"], "slots": 2}, "slots: Extra inputs are not permitted"),
        ({"command": ["true"], "flags": {"dir": "/"}}, f"--dir: {OWN}"),
        ({"command": ["true"], "flags": {"help": True}}, "help: --help is not a flag of a job"),
        ({"command": ["true"], "cwd": "/nosuch"}, "--cwd=/nosuch is not a directory"),
    ):  # fmt: skip
        answer = service.client.post("/v1/jobs", json=body)
        assert (answer.status_code, answer.json()["detail"]) == (400, said)
    assert local.is_empty()


def test_a_job_that_is_not_there_or_not_ours_is_told(service, local):
    for path in ("", "/logs", "/timeline"):
        answer = service.client.get(f"/v1/jobs/ir-0123456789{path}")
        assert answer.status_code == 404
        assert answer.json()["detail"].startswith(f"job ir-0123456789: unknown in {local.path}; ")
    assert service.client.post("/v1/jobs/ir-0123456789/cancel").status_code == 404
    assert service.client.get("/v1/jobs/..%2f..%2fetc").status_code == 404
    assert service.client.get("/v1/nosuch").status_code == 404
    assert service.client.delete("/v1/jobs").status_code == 405
    if os.geteuid() != 0:
        return
    name = service.submit("true")
    service.end_of(name)
    os.chown(local.path / name, 65534, 65534)
    answer = service.client.get(f"/v1/jobs/{name}")
    assert answer.status_code == 403
    assert answer.json()["detail"] == f"job {name} belongs to user nobody: only its owner can read it"


OTHERS = (
    ("GET", {"Host": "localhost:8080"}, 200),
    ("GET", {"Host": "127.0.0.1:8080", "Origin": "http://127.0.0.1:8080", "Sec-Fetch-Site": "same-origin"}, 200),
    ("GET", {"Host": "[::1]:8080"}, 200),
    ("GET", {"Sec-Fetch-Site": "none"}, 200),
    ("GET", {"Host": "evil.example:8080"}, 421),
    ("GET", {"Host": "localhost.evil.example"}, 421),
    ("GET", {"Host": "localhost:8080@evil.example"}, 421),
    ("GET", {"Origin": "http://evil.example"}, 403),
    ("GET", {"Origin": "http://localhost:9999", "Host": "localhost:8080"}, 403),
    ("GET", {"Origin": "null"}, 403),
    ("GET", {"Sec-Fetch-Site": "cross-site"}, 403),
    ("GET", {"Sec-Fetch-Site": "same-site"}, 403),
    ("POST", {"Origin": "http://evil.example"}, 403),
    ("OPTIONS", {"Origin": "http://evil.example", "Access-Control-Request-Headers": "x-infini-job"}, 403),
)


def test_what_other_pages_send_is_refused(service):
    for method, headers, status in OTHERS:
        answer = service.client.request(method, "/v1/jobs", headers=headers)
        assert answer.status_code == status, headers
        assert not [name for name in answer.headers if name.startswith("access-control-")]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "default-src 'none'" in answer.headers["content-security-policy"]


def test_what_changes_something_needs_our_header(service, local):
    del service.client.headers["X-Infini-Job"]
    for path in ("/v1/jobs", "/v1/scripts", "/v1/jobs/ir-0123456789/cancel"):
        answer = service.client.post(path, json={"command": ["true"]})
        assert answer.status_code == 403
        assert answer.json()["detail"] == "a request that changes something needs the header X-Infini-Job: 1"
    assert local.is_empty()


def test_the_script_is_shown_and_nothing_is_submitted(on_slurm, slurm_queue, tmp_path):
    body = {"command": ["python", "train.py"], "flags": {"slots": 16, "slots_per_node": 8, "time": "4h"}}
    shown = on_slurm.client.post("/v1/scripts", json=body).json()
    assert "#SBATCH --nodes=2" in shown["script"]
    assert (shown["scheduler"], shown["nodes"], shown["slots_per_node"], shown["pool"]) == ("slurm", 2, 8, "debug")
    assert slurm_queue.calls("sbatch") == []
    assert os.listdir(tmp_path / "jobs") == []


def test_clusters_tell_what_was_detected(on_slurm):
    slurm, here = on_slurm.get("/v1/clusters")
    assert (slurm["scheduler"], slurm["select"], slurm["has_gres"]) == ("slurm", "cons_tres", True)
    assert {pool["name"]: pool["nodes"] for pool in slurm["pools"]} == {"debug": 4, "short": 4}
    assert (here["scheduler"], here["pools"][0]["nodes"]) == ("local", 1)


def test_a_hundred_jobs_are_one_query(on_slurm, slurm_queue, tmp_path):
    slurm_queue.set(hold="Resources")
    first = on_slurm.submit("true", slots=1)
    for n in range(99):
        name = f"ir-{n:010x}"
        shutil.copytree(tmp_path / "jobs" / first, tmp_path / "jobs" / name)
        path = tmp_path / "jobs" / name / "request.json"
        path.write_text(path.read_text().replace(first, name))
    before = len(slurm_queue.calls("squeue"))
    found = on_slurm.get("/v1/jobs")
    assert len(slurm_queue.calls("squeue")) - before == 1
    assert len(found) == 100
    assert {job["name"]: job["headline"] for job in found}[first] == "QUEUED Resources"
    events = Events(on_slurm)
    before = len(slurm_queue.calls("squeue"))
    events.until(first, "QUEUED")
    assert len(slurm_queue.calls("squeue")) - before == 1
    assert len(events.jobs) == 100
    events.close()
    on_slurm.client.post(f"/v1/jobs/{first}/cancel")


def test_a_scheduler_that_does_not_answer_changes_nothing_but_the_news(on_slurm, slurm_queue):
    slurm_queue.set(hold="Resources")
    name = on_slurm.submit("true")
    slurm_queue.fail("squeue", "away")
    status = on_slurm.get(f"/v1/jobs/{name}")
    assert status["state"] == "QUEUED"
    assert status["query_error"]
    slurm_queue.fail("scontrol", "away")
    first, *others = on_slurm.get("/v1/clusters")
    assert (first["scheduler"], first["pools"]) == ("slurm", [])
    assert first["query_error"]
    assert [each["query_error"] for each in others if each["scheduler"] == "local"] == [""]
    on_slurm.client.post(f"/v1/jobs/{name}/cancel")


def test_a_submission_that_is_refused_leaves_nothing(on_slurm, slurm_queue, tmp_path):
    answer = on_slurm.client.post("/v1/jobs", json={"command": ["true"], "flags": {"pool": "nosuch"}})
    assert answer.status_code in (400, 422)
    assert "nosuch" in answer.json()["detail"]
    assert os.listdir(tmp_path / "jobs") == []


def test_the_document_is_valid_and_answers_are_as_it_says(service, local):
    from jsonschema import Draft202012Validator
    from openapi_spec_validator import validate

    document = service.get("/openapi.json")
    validate(document)
    assert {(path, method) for path, methods in document["paths"].items() for method in methods} == {
        ("/v1/jobs", "get"), ("/v1/jobs", "post"), ("/v1/jobs/{name}", "get"),
        ("/v1/jobs/{name}", "delete"), ("/v1/jobs/{name}/logs", "get"),
        ("/v1/jobs/{name}/timeline", "get"), ("/v1/jobs/{name}/cancel", "post"), ("/v1/scripts", "post"),
        ("/v1/clusters", "get"), ("/v1/events", "get"),
    }  # fmt: skip
    flags = document["components"]["schemas"]["SubmissionBody"]["properties"]["flags"]["properties"]
    assert "slots_per_node" in flags
    assert "dir" not in flags
    body = {"command": ["sh", "-c", "exit 3"], "flags": {"slots": 2}, "env": local.env | {"A": "b"}}
    taken = service.client.post("/v1/jobs", json=body).json()
    name = taken["name"]
    service.end_of(name)

    def check(answer: object, schema: dict[str, object]) -> None:
        Draft202012Validator({**schema, "components": document["components"]}).validate(answer)

    def said(path: str, method: str = "get", status: str = "200") -> dict[str, object]:
        return document["paths"][path][method]["responses"][status]["content"]["application/json"]["schema"]

    other = service.client.post("/v1/jobs", json={"command": ["true"]}).json()["name"]
    service.end_of(other)
    assert service.client.delete(f"/v1/jobs/{other}").status_code == 204
    assert service.client.delete(f"/v1/jobs/{other}").status_code == 404
    check(taken, said("/v1/jobs", "post", "201"))
    check(body, document["components"]["schemas"]["SubmissionBody"])
    check(service.get("/v1/jobs"), said("/v1/jobs"))
    check(service.get(f"/v1/jobs/{name}"), said("/v1/jobs/{name}"))
    check(service.get(f"/v1/jobs/{name}/timeline"), said("/v1/jobs/{name}/timeline"))
    problem = document["paths"]["/v1/jobs"]["get"]["responses"]["default"]["content"]["application/problem+json"]
    check(service.client.get("/v1/jobs/x").json(), problem["schema"])


def test_a_directory_that_cannot_be_read_hides_no_other(local, tmp_path):
    service = Service(local, tmp_path / "s")
    first, second = local.submit("--", "true"), local.submit("--", "true")
    service.end_of(first)
    service.end_of(second)
    (local.path / first / "request.json").write_text("{")
    assert [job["name"] for job in service.get("/v1/jobs")] == [second]
    service.command.read_error_until(f"{first}/request.json".encode())
    events = Events(service)
    events.until(second, "COMPLETED")
    assert list(events.jobs) == [second]
    assert f"{first}/request.json" in events.problem
    events.close()
    service.end()


def test_an_array_that_cannot_be_read_hides_no_job(service, local):
    array, job = local.submit("--array=0-1", "--", "true"), local.submit("--", "true")
    local.wait(array)
    local.wait(job)
    path = local.path / array / "request.json"
    path.write_text(path.read_text().replace('"format":2', '"format":99'))
    events = Events(service)
    events.until(job, "COMPLETED")
    assert (list(events.jobs), array in events.problem) == ([job], True)
    events.close()


def test_an_array_that_is_being_submitted_is_no_problem(service, local):
    array = made(local.path, "ir-00000000aa", scheduler="local", submitted_s=time.time(), array="0-3")
    os.unlink(array.file("id"))
    for task in tasks_of(array)[1:]:
        os.rmdir(task.path)
    events = Events(service)
    events.next()
    assert (events.state(array.name), events.problem) == ("QUEUED", "")
    events.close()


def test_bytes_that_are_no_text_do_not_break_the_list(service, local):
    name = local.submit("--", "true", os.fsdecode(b"\xff\xfe"))
    service.end_of(name)
    assert service.get("/v1/jobs")[0]["command"] == ["true", "\udcff\udcfe"]
    events = Events(service)
    events.until(name, "COMPLETED")
    events.close()


def test_no_more_follow_at_once_than_are_served(own_service, local, bell):
    name = own_service.submit(*hold(bell))
    bell.hear(1)
    streams = []
    for _ in range(32):
        streams.append(socket.socket(socket.AF_UNIX))
        streams[-1].settimeout(LIMIT_S)
        streams[-1].connect(own_service.path)
        ask = f"GET /v1/jobs/{name}/logs?follow=true HTTP/1.1\r\nHost: localhost\r\n\r\n"
        streams[-1].sendall(ask.encode())
        assert streams[-1].recv(12) == b"HTTP/1.1 200"
    answer = own_service.client.get(f"/v1/jobs/{name}/logs", params={"follow": True})
    assert (answer.status_code, answer.json()["detail"]) == (
        503,
        "32 requests already follow logs; close one of them",
    )
    assert own_service.get(f"/v1/jobs/{name}")["state"] == "RUNNING"  # who follows is in nobody's way
    for stream in streams:
        stream.close()
    own_service.client.post(f"/v1/jobs/{name}/cancel")
    local.wait(name)


@pytest.mark.parametrize(
    "asked",
    [
        {"command": ["true"], "env": {"A=B": "1"}},
        {"command": ["true"], "env": {"": "1"}},
        {"command": ["true"], "env": {"A": "x\0y"}},
        {"command": ["a\0b"]},
        {"command": ["true"], "flags": {"scheduler": "local", "env": ["A=x\0y"]}},
    ],
)
def test_what_no_process_can_have_is_a_problem_and_leaves_nothing(service, local, asked):
    answer = service.client.post("/v1/jobs", json={"flags": {"scheduler": "local"}, **asked})
    assert (answer.status_code, answer.headers["content-type"]) == (400, "application/problem+json")
    assert answer.json()["exit_code"] == 2
    assert local.is_empty()


def test_a_body_that_is_no_json_is_a_sentence(service):
    headers = {"content-type": "application/json"}
    answer = service.client.post("/v1/jobs", content=b"{command: 1}", headers=headers)
    assert answer.status_code == 400
    assert answer.json()["detail"] == (
        "the body is not JSON: Expecting property name enclosed in double quotes at character 1"
    )
