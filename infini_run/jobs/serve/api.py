"""The verbs as requests, and their answers. The framework keeps the OpenAPI document.

The one rule: an answer is what `infini-job VERB --json` prints, a problem is the sentence that it prints.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Annotated, Any

from fastapi import FastAPI, Path, Query
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from infini_run.errors import InfiniRunError, UsageError, printable
from infini_run.jobs.folder.job_dir import JobDir
from infini_run.jobs.folder.job_store import find_folder
from infini_run.jobs.job import Job, find_jobs, forget
from infini_run.jobs.lines import print_line
from infini_run.jobs.prepare import could_run, prepare, read_flags
from infini_run.jobs.request.array import indices, split
from infini_run.jobs.schedulers.detect_scheduler import facts_of, find_schedulers, scheduler_of
from infini_run.jobs.serve import model
from infini_run.jobs.serve.csrf import HEADER
from infini_run.jobs.serve.http_errors import PROBLEM, Answer, NotThere, problem, problem_of
from infini_run.jobs.serve.job_cache import JobCache
from infini_run.jobs.serve.job_timeline import read_timelines
from infini_run.jobs.serve.stream import Stream, Threads, events, lines
from infini_run.jobs.status.each_job import ask_one
from infini_run.jobs.status.logs import check, narrow, read_rank
from infini_run.jobs.submit import SubmissionPlan, submit
from infini_run.options.from_python import check_environment
from infini_run.version import VERSION

TYPE_CHECKING = False
if TYPE_CHECKING:
    from infini_run.jobs.scheduler import Scheduler
    from infini_run.jobs.serve.job_timeline import RunTimeline
    from infini_run.jobs.status.job_status import Status

_ABOUT = f"""Jobs of one user: those of `infini-job` in one directory.

Served at a Unix socket, only for its owner. Host is localhost; requests other than GET need the header
`{HEADER}: 1`."""
_PAGE = {
    "": ("index.html", "text/html"),
    "page.js": ("page.js", "text/javascript"),
    "page.css": ("page.css", "text/css"),
}
_PROBLEMS: dict[int | str, dict[str, Any]] = {
    "default": {"description": "the problem", "content": {PROBLEM: {"schema": model.Problem.model_json_schema()}}}
}
_TEXT: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}
_EVENTS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}}
Name = Annotated[str, Path(description="a job, such as ir-0123456789, or its task 3: ir-0123456789.3")]


class Api:
    """Each method answers one request. above: where jobs are. environ: the service's."""

    def __init__(self, above: str, environ: Mapping[str, str], threads: Threads, cache: JobCache) -> None:
        self._above = above
        self._environ = environ
        self._threads = threads
        self._cache = cache

    # ---- looking

    async def list_jobs(self, name: Annotated[list[str], Query(description="only these")] = []) -> Response:  # noqa: B006
        """Return all jobs, or those named, the latest last: one query for each scheduler."""

        def call() -> list[Status]:
            for one in name:
                self._folder(one)
            return find_jobs(name, dir=self._above, problem=print_line)

        return Answer([status.to_json() for status in await self._threads.do(call)])

    async def status(self, name: Name) -> Response:
        """Return how a job is: at most one query; none after its end."""
        return Answer((await self._threads.do(lambda: self._found(name))).to_json())

    async def timeline(self, name: Name) -> Response:
        """Return the life of its ranks, run by run. Times are seconds since the epoch; end_s 0: the rank still
        runs."""

        def call() -> list[RunTimeline]:
            folder = self._folder(name)
            return ask_one(folder.path, lambda: read_timelines(folder))

        return Answer([life.to_json() for life in await self._threads.do(call)])

    async def logs(
        self,
        name: Name,
        follow: Annotated[bool, Query(description="keep sending until the job finishes")] = False,
        task: Annotated[str, Query(description="only these tasks of an array: 4, or 0,3-5")] = "",
        rank: Annotated[str, Query(description="only this rank, such as 0, or trainer:0; -1: all")] = "-1",
        node: Annotated[str, Query(description="only this node: its index or host")] = "",
        attempt: Annotated[int, Query(ge=-1, description="only this run, counted from 0; -1: all")] = -1,
        tail: Annotated[int, Query(ge=-1, description="only the last lines of what exists now; -1: all")] = -1,
    ) -> Response:
        """Return the output of its ranks, merged, each line with the name of its rank in front; of an array that of
        its task, too."""
        chosen, one = _tasks(task), -1 if rank == "-1" else read_rank(rank)

        def call() -> tuple[JobDir, Sequence[int], Scheduler | None]:
            folder, tasks = self._narrowed(name, chosen)
            check(folder, rank=one, node=node, attempt=-1 if follow else attempt, tasks=tasks)
            return folder, tasks, self._scheduler_of(folder) if follow else None

        path = os.path.join(self._above, split(name)[0])
        folder, tasks, scheduler = await self._threads.do(lambda: ask_one(path, call))
        stop = self._threads.stop()
        chosen_lines = {"rank": one, "node": node, "attempt": attempt, "tasks": tasks, "tail": tail}
        content = lines(self._threads, folder, scheduler, stop, **chosen_lines)
        return Stream(content, "text/plain", release=lambda: self._threads.release(stop))

    async def events(self) -> Response:
        """Stream all jobs as they change: server-sent events `jobs`, `{"jobs": [those that changed], "gone": [names],
        "problem": ""}`; the first one has all of them."""
        return Stream(events(self._cache), "text/event-stream")

    async def clusters(self) -> Response:
        """Return the schedulers that are here, and what they have."""

        def call() -> list[Any]:
            return [facts_of(found).to_json() for found in find_schedulers(self._above, self._environ)]

        return Answer(await self._threads.do(call))

    # ---- changing

    async def submit(self, submission: model.SubmissionBody) -> Response:
        """Submit a job, once. It outlives the service."""

        def call() -> dict[str, Any]:
            planned, scheduler, environ = self._prepare(submission)
            folder, _ = submit(planned, scheduler, environ, print_line=print_line)
            return {"name": folder.name, "id": folder.id, "folder": folder.path, **_about(planned, scheduler)}

        content = await self._threads.do(call, changes=True)
        return Answer(content, status_code=201, headers={"Location": f"/v1/jobs/{content['name']}"})

    async def script(
        self,
        submission: model.SubmissionBody,
        check: Annotated[bool, Query(description="ask the scheduler whether the job can run")] = False,
    ) -> Response:
        """Return the script that submit would use; submit nothing, and leave nothing."""

        def call() -> dict[str, Any]:
            planned, scheduler, _ = self._prepare(submission)
            if check:
                could_run(planned, scheduler)
            return {"script": planned.text, **_about(planned, scheduler)}

        return Answer(await self._threads.do(call))

    async def cancel(self, name: Name) -> Response:
        """Ask for its end; its ranks have their grace. The answer is how it is right afterwards."""
        await self._threads.do(lambda: self._found(name))  # a directory that does not answer holds no thread

        def call() -> dict[str, Any]:
            folder = self._folder(name)
            job = Job(folder, self._scheduler_of(folder))
            job.cancel()
            return job.status().to_json()

        return Answer(await self._threads.do(call, changes=True), status_code=202)

    async def forget(self, name: Name) -> Response:
        """Remove its directory, after the job's end, or if its scheduler does not know it (LOST)."""
        status = await self._threads.do(lambda: self._found(name))
        await self._threads.do(lambda: forget(self._folder(name), status), changes=True)
        return Response(status_code=204)

    # ---- what they share

    def _found(self, name: str) -> Status:
        """Return how a job is. Raises NotThere, JobHung."""
        folder = self._folder(name)
        return find_jobs([folder.name], dir=self._above)[0]

    def _folder(self, name: str) -> JobDir:
        """Return a job's directory, in a thread. Raises NotThere with the command's sentence, or JobHung."""
        path = os.path.join(self._above, split(name)[0])
        try:
            return ask_one(path, lambda: find_folder(self._above, name))
        except UsageError as error:
            is_there = "/" not in name and "\0" not in name and os.path.lexists(os.path.join(self._above, name))
            raise NotThere(403 if is_there else 404, str(error)) from None

    def _narrowed(self, name: str, tasks: tuple[int, ...]) -> tuple[JobDir, Sequence[int]]:
        """Raises NotThere: there is no such job, or no such task of it."""
        folder = self._folder(name)
        try:
            return narrow(folder, tasks)
        except UsageError as error:
            raise NotThere(404, str(error)) from None

    def _scheduler_of(self, folder: JobDir) -> Scheduler:
        return scheduler_of(folder.read_submission(), self._above, self._environ)

    def _prepare(self, submission: model.SubmissionBody) -> tuple[SubmissionPlan, Scheduler, dict[str, str]]:
        for name in submission.flags:
            own = name.replace("-", "_").removeprefix("no")
            if own in model.THE_COMMANDS_OWN:
                raise UsageError(f"--{name}: only for the command; use POST /v1/scripts to show or check a script")
        environ = dict(self._environ) if submission.env is None else check_environment(submission.env)
        values = {**read_flags(submission.flags, environ), "dir": self._above}
        if submission.cwd:
            values["cwd"] = submission.cwd
        return *prepare(submission.command, values, environ, print_line=print_line), environ


def _about(planned: SubmissionPlan, scheduler: Scheduler) -> dict[str, Any]:
    layout = planned.layout
    shape = {"nodes": layout.nodes, "slots_per_node": layout.slots_per_node, "array": planned.request.array}
    return {"scheduler": scheduler.name, "pool": planned.pool, **shape, "remark": layout.remark}


def _tasks(text: str) -> tuple[int, ...]:
    try:
        return indices(text) if text else ()
    except ValueError as error:
        raise UsageError(f"task={printable(text)}: {error}") from None


async def _page(request: Request) -> Response:
    """Return the page, from the package: nothing of it comes from elsewhere."""
    name, kind = _PAGE[request.url.path.strip("/")]
    return Response((files(__package__) / "page" / name).read_bytes(), media_type=kind)


async def _of_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, InfiniRunError)
    return problem_of(error)


async def _of_request(request: Request, error: Exception) -> Response:
    """Return the problem of an invalid request."""
    assert isinstance(error, RequestValidationError)
    return problem(400, "\n".join(map(_sentence, error.errors())), exit_code=2)


def _sentence(wrong: Mapping[str, Any]) -> str:
    """Return what pydantic found: the place in the request, and what is wrong there."""
    place = wrong["loc"]
    if wrong["type"] == "json_invalid":  # its place is a character
        return f"the body is not JSON: {wrong['ctx']['error']} at character {place[1]}"
    return f"{'.'.join(map(str, place[1:])) or place[0]}: {wrong['msg']}"


async def _of_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    answer = problem(error.status_code, f"{request.method} {request.url.path}: {error.detail}; see /openapi.json")
    answer.headers.update(error.headers or {})
    return answer


def make_app(above: str, environ: Mapping[str, str], threads: Threads, cache: JobCache) -> FastAPI:
    """Return the whole service, for this user only: another part checks who asks."""
    api = Api(above, environ, threads, cache)
    app = FastAPI(title="infini-job", version=VERSION, description=_ABOUT, docs_url=None, redoc_url=None)

    def add(method: str, path: str, call: Any, answer: Any, code: int = 200, **more: Any) -> None:
        responses = {**_PROBLEMS, **more.pop("responses", {})}
        app.add_api_route(
            path, call, methods=[method], response_model=answer, status_code=code, responses=responses,
            operation_id=call.__name__, **more,
        )  # fmt: skip

    add("GET", "/v1/jobs", api.list_jobs, list[model.STATUS])
    add("POST", "/v1/jobs", api.submit, model.Submitted, 201)
    add("GET", "/v1/jobs/{name}", api.status, model.STATUS)
    add("GET", "/v1/jobs/{name}/logs", api.logs, None, response_class=Stream, responses=_TEXT)
    add("GET", "/v1/jobs/{name}/timeline", api.timeline, list[model.TIMELINE])
    add("POST", "/v1/jobs/{name}/cancel", api.cancel, model.STATUS, 202)
    add("DELETE", "/v1/jobs/{name}", api.forget, None, 204)
    add("POST", "/v1/scripts", api.script, model.Script)
    add("GET", "/v1/clusters", api.clusters, list[model.FACTS])
    add("GET", "/v1/events", api.events, None, response_class=Stream, responses=_EVENTS)
    for path in _PAGE:
        app.add_route(f"/{path}", _page, methods=["GET"], include_in_schema=False)
    for kind, answer in (
        (InfiniRunError, _of_error),
        (RequestValidationError, _of_request),
        (HTTPException, _of_http),
    ):
        app.add_exception_handler(kind, answer)
    return app
