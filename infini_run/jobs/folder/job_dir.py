"""The directory of a job: everything that is known of it, for whoever may read it, on whichever machine.

    request.json   the request, and its result                   env         the ranks' variables, NUL between them
    job.sh         what the scheduler runs                       id          the scheduler's name for it
    job.log        what the script itself said                   `cancelled` somebody has asked for its end
    exit           how it ended                                  node, bin/  what starts its container
    0/, 1/, ...    one per run: phase, log, first_failure, report.json; reserve, while it runs
    task/K/        of an array: what its task K has of these for itself

The one rule: others read a file that a rename brought, so it is whole or absent. Only its owner may look (0700). A
reader trusts no name in it. It reads only a regular file of a bounded size, and never a link, because no rename of
infini-job leaves one there (decision 61).
"""

from __future__ import annotations

import os

from infini_run.errors import InfiniRunError, UsageError
from infini_run.jobs.folder.records import JobResult, Phase, Submission
from infini_run.jobs.request.container import Image
from infini_run.jobs.request.job_request import LOG, SPOOL, JobRequest
from infini_run.jobs.request.launch_words import ENGINES
from infini_run.record import replace
from infini_run.system.json_codec import decode, encode
from infini_run.system.secure_files import read_regular, write_atomic

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, TypeVar

    T = TypeVar("T")

FORMAT = 2
_RESERVED = 4096  # bytes; more than any ending has
_LARGEST = 1 << 25  # bytes of a file that is read: more than a command, or an environment, of execve(2) may have
_LONGEST_ID = 1000  # characters; PBS's has the name of its server
_LATEST_S = 1e12  # seconds since the epoch; JSON as Python reads it has NaN and infinities
_MOST = 1 << 63
_DEVICES = (  # a scheduler says which devices a job has; what the caller's shell says is another machine's
    "CUDA_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
    "ASCEND_RT_VISIBLE_DEVICES",
)
_SHELLS_OWN = ("_", "SHLVL", "PWD", "OLDPWD", "HOSTNAME")
_LISTED = _DEVICES + _SHELLS_OWN
_OF_A_SYSTEM = (  # where programs and libraries are: an image has its own
    "PATH",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "PYTHONPATH",
    "PYTHONHOME",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "TMPDIR",
    "SHELL",
)


class JobDir:
    """The directory of one job. Each method reads it anew, except for the submission, which never changes.

    index: of a task of an array; -1: it is none.
    """

    index = -1

    def __init__(self, path: str) -> None:
        self.path = path
        self.name = os.path.basename(path)
        self._submission: Submission | None = None

    def __repr__(self) -> str:
        return f"JobDir({self.path!r})"

    def require(self) -> None:
        """Raise InfiniRunError if the directory is gone, so nothing will ever be written there."""
        if not os.path.lexists(self.path):
            raise InfiniRunError(f"job {self.name}: its directory {self.path} was removed")

    @property
    def queue_name(self) -> str:
        """The name of the job at its scheduler. Raises UsageError if its request.json is not readable."""
        return self.read_submission().request.queue_name

    def file(self, name: str) -> str:
        return os.path.join(self.path, name)

    @property
    def home(self) -> str:
        """Where all jobs are."""
        return os.path.dirname(self.path)

    @property
    def script(self) -> str:
        return self.file("job.sh")

    @property
    def scheduler_logs(self) -> tuple[str, ...]:
        """What the script said, and what PBS has caught before it could."""
        return self.file(LOG), self.file(SPOOL)

    # ---- written once, by who submits

    def write_submission(self, order: Submission, environ: Mapping[str, str]) -> None:
        """Write the request, and the environment: any bytes but NUL, which no variable can hold."""
        request = dict(vars(replace(order.request, env=())))
        if order.request.container is not None:
            request["container"] = dict(vars(order.request.container))
        content = {"format": FORMAT, **vars(order), "request": request}
        self._write("env", b"".join(os.fsencode(f"{name}={text}") + b"\0" for name, text in environ.items()))
        self._write_json("request.json", content)

    def write_script(self, text: str) -> None:
        self._write("job.sh", os.fsencode(text))

    def read_script(self) -> str:
        """Raises OSError."""
        return os.fsdecode(read_regular(self.script, _LARGEST))

    def write_program(self, name: str, text: str) -> None:
        """Write the program that replaces a Python or srun, for the job's container. Writes none where the text is
        empty."""
        if text:
            os.makedirs(os.path.dirname(self.file(name)), mode=0o700, exist_ok=True)
            self._write(name, os.fsencode(text))
            os.chmod(self.file(name), 0o700)

    def program(self, name: str) -> str:
        """Return the path of that program; "" without one."""
        return self.file(name) if os.path.exists(self.file(name)) else ""

    @property
    def function(self) -> str:
        """The path of the pickled call; it is there if the job's command is a function."""
        return self.file("function")

    def write_function(self, data: bytes) -> None:
        """Write the pickled call. Raises OSError."""
        self._write("function", data)

    @property
    def next_function(self) -> str:
        """The path of the pickled call that a checkpoint has left for the next run."""
        return self.file("next")

    def result_file(self, attempt: int, rank: int) -> str:
        """Return the path of what a function returned or raised on a rank."""
        return self.file(f"{attempt}/result.{rank}")

    def read_submission(self) -> Submission:
        """Return the submission. Raises UsageError if it is no job's directory, or of another version."""
        if self._submission is None:
            self._submission = self._read_submission()
        return self._submission

    def _read_submission(self) -> Submission:
        content = self._read_json("request.json")
        if not content or content.pop("format", 0) != FORMAT:
            raise UsageError(
                f"{self.path}: not a job directory of this version; request.json is missing or different"
            )
        try:
            request = content.pop("request")
            if request.get("container") is not None:
                request["container"] = _make(Image, request["container"])
            order = _make(Submission, {**content, "request": _make(JobRequest, request)})
            _ = order.tasks  # ValueError: another version allows larger indices
            return order
        except (TypeError, KeyError, AttributeError, ValueError):
            raise UsageError(
                f"{self.path}: job of another infini-run version; cannot read its request.json"
            ) from None

    def read_env(self) -> dict[str, str]:
        """Return the ranks' environment. Raises OSError."""
        words = read_regular(self.file("env"), _LARGEST).split(b"\0")[:-1]
        return dict(os.fsdecode(word).split("=", 1) for word in words)

    # ---- its life

    def write_id(self, id: str) -> None:  # noqa: A002
        self._write("id", id.encode())

    @property
    def id(self) -> str:
        """The scheduler's id; "" where it has not (yet) taken the job. Raises InfiniRunError for a text that is no
        id: a scheduler's command would read it as an option, or as several ids."""
        text = (self._read("id") or b"").decode("utf-8", "replace")
        if text and not (text.isprintable() and len(text) <= _LONGEST_ID and text[0] not in "-," and " " not in text):
            raise InfiniRunError(self._is_foreign("id"))
        return text

    def mark_cancelled(self, *, scheduler_was_asked: bool = False) -> None:
        """Write down that the job is to end.

        Args:
            scheduler_was_asked: Whether the scheduler was asked to end it, and did not refuse.

        Raises:
            OSError: It is not writable.
        """
        self._write("cancelled", b"asked" if scheduler_was_asked else b"")

    @property
    def is_cancelled(self) -> bool:
        return os.path.exists(self.file("cancelled"))

    @property
    def scheduler_was_asked(self) -> bool:
        return bool(self._read("cancelled"))

    def begin(self) -> int:
        """Make the directory of the run that begins now, with space for the word of how it ends.

        Returns:
            Its number. The result of the run before moves into that run's directory.

        Raises:
            OSError: The directory cannot be created.
        """
        number = self.attempts()
        while True:
            try:
                os.mkdir(self.file(str(number)), 0o700)
                break
            except FileExistsError:
                number += 1
        self._reserve(number)
        if number > 0:
            try:
                os.rename(self.file("exit"), self.file(f"{number - 1}/exit"))
            except FileNotFoundError:
                return number  # that run has left no result
        return number

    def _reserve(self, attempt: int) -> None:
        """Reserve space for the record of the end: ranks may fill the disk."""
        try:
            with open(self.file(f"{attempt}/reserve"), "wb", buffering=0) as file:
                os.posix_fallocate(file.fileno(), 0, _RESERVED)
        except OSError:  # no space even now, or a file system that reserves none
            return

    def attempts(self) -> int:
        """Return how many runs began."""
        count = 0
        while os.path.isdir(self.file(str(count))):
            count += 1
        return count

    def log(self, attempt: int) -> str:
        return self.file(f"{attempt}/log")

    def write_phase(self, attempt: int, phase: Phase) -> None:
        self._write_json(f"{attempt}/phase", vars(phase))

    def phase(self, attempt: int) -> Phase | None:
        return self._read_record(f"{attempt}/phase", Phase)

    def write_failure(self, attempt: int, content: dict[str, Any]) -> None:
        self._write_json(f"{attempt}/first_failure", content)

    def failure(self, attempt: int) -> dict[str, Any]:
        """Return the first failure: node, rank, code, and what it was; {} without one."""
        return self._read_json(f"{attempt}/first_failure")

    def write_result(self, ending: JobResult) -> None:
        """Write down how the job ended; on a full disk in the space that `begin` has reserved.

        Raises:
            OSError: It is not writable.
        """
        reserve = self.file(f"{ending.attempt}/reserve")
        try:
            self._write_json("exit", vars(ending))
        except OSError:
            if not os.path.exists(reserve):
                raise
            with open(reserve, "r+b", buffering=0) as file:
                file.truncate(file.write(encode(vars(ending)) + b"\n"))
            os.rename(reserve, self.file("exit"))
        else:
            _remove(reserve)

    def write_result_if_absent(self, ending: JobResult) -> bool:
        """Write down how the job ended, as another process than the job's own.

        Returns:
            False: the job itself has written it meanwhile, and that stays.

        Raises:
            OSError: It is not writable.
        """
        draft = self.file(f"exit.{os.urandom(6).hex()}")
        self._write_json(os.path.basename(draft), vars(ending))
        try:
            os.link(draft, self.file("exit"))
        except FileExistsError:
            return False
        finally:
            os.unlink(draft)
        return True

    def result(self, attempt: int = -1) -> JobResult | None:
        """Return how the job ended; None: nobody has written it (yet).

        Args:
            attempt: Of an earlier run, after which another has begun; -1: the latest.
        """
        return self._read_record("exit" if attempt < 0 else f"{attempt}/exit", JobResult)

    # ---- bytes

    def _write(self, name: str, data: bytes) -> None:
        try:
            write_atomic(self.file(name), data)
        except OSError as error:
            error.filename = error.filename or self.file(name)
            raise

    def _write_json(self, name: str, content: object) -> None:
        self._write(name, encode(content) + b"\n")

    def _read(self, name: str) -> bytes | None:
        """Return a file's bytes, or None if it does not exist. Raises InfiniRunError if it is not readable."""
        try:
            return read_regular(self.file(name), _LARGEST)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise InfiniRunError(
                f"job {self.name}: {self.file(name)} cannot be read: {error.strerror}; mend it, or remove {self.path}"
            ) from None

    def _read_json(self, name: str) -> dict[str, Any]:
        """Return a JSON file's content, or {} if it does not exist. Raises InfiniRunError if infini-job did not write
        it."""
        data = self._read(name)
        if data is None:
            return {}
        try:
            content = decode(data.strip())
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, dict):
            raise InfiniRunError(self._is_foreign(name))
        return content

    def _read_record(self, name: str, cls: type[T]) -> T | None:
        """Return a record from a file, or None if it does not exist. Raises InfiniRunError if infini-job did not
        write it."""
        content = self._read_json(name)
        try:
            return _make(cls, content) if content else None
        except TypeError:
            raise InfiniRunError(self._is_foreign(name)) from None

    def _is_foreign(self, name: str) -> str:
        return f"{self.file(name)}: not as infini-job wrote it; check who changed it"


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:  # it never existed, or it stays: nobody reads it
        return


_IS_OF: dict[str, Callable[[Any], bool]] = {  # what JSON has where a record's field is annotated so
    "str": lambda value: isinstance(value, str),
    "int": lambda value: type(value) is int and abs(value) < _MOST,
    "float": lambda value: type(value) in (int, float) and abs(value) < _LATEST_S,  # a time
    "int | None": lambda value: value is None or (type(value) is int and abs(value) < _MOST),
    "bool": lambda value: isinstance(value, bool),
    "bool | None": lambda value: value is None or isinstance(value, bool),
    "tuple[str, ...]": lambda value: isinstance(value, tuple) and all(isinstance(item, str) for item in value),
    "tuple[tuple[str, int], ...]": lambda value: (
        isinstance(value, tuple)
        and all(isinstance(item, tuple) and tuple(map(type, item)) == (str, int) for item in value)
    ),
}


def _make(cls: type[T], content: dict[str, Any]) -> T:
    """Return the record that JSON has. Raises TypeError: a field is missing, unknown, or of another type."""
    made = cls(**_tuples(content))
    for name, annotation in cls.__annotations__.items():
        is_good = _IS_OF.get(annotation)
        if is_good is not None and not is_good(getattr(made, name)):
            raise TypeError(f"{cls.__name__}.{name} is not a {annotation}")
    return made


def _tuples(content: Any) -> Any:
    """Make tuples of the lists that JSON has."""
    if isinstance(content, dict):
        return {name: _tuples(item) for name, item in content.items()}
    return tuple(map(_tuples, content)) if isinstance(content, list) else content


def environment(environ: Mapping[str, str], request: JobRequest) -> dict[str, str]:
    """Return the variables that go with a job.

    Args:
        environ: The caller's, without those of schedulers. What is true of its machine only, or of this side of a
            container, is dropped.
        request: The job, whose `env` is added.
    """
    left_out: tuple[str, ...] = _LISTED if request.container is None else _LISTED + _OF_A_SYSTEM
    if request.scheduler in ENGINES:  # slurmd and PBS's MoM set one; only that of `env` replaces it
        left_out += ("TMPDIR",)
    return {name: text for name, text in environ.items() if name not in left_out} | dict(request.env)
