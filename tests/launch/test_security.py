"""What strangers on the machine, a hostile folder and a hostile rank can do to a launch: docs/security.md.

Real links, real users, real umasks. Strangers are made by giving up root, so without it their tests are left out.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import stat
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.command import Command, play
from tests.support.processes import marked
from tests.support.waiting import until

STRANGER = 30000 + os.getpid() % 20000
SECRET = "do-not-tell-7261"
# these tests may be below it: it is bound onto itself, so that only that mount is changed
READ_ONLY_TMP = "mount --bind /tmp /tmp; mount -o remount,bind,ro /tmp"
HOSTILE = "\x1b[2J\x1b]0;owned\x07 \x9b31m"


def needs_root(reason):
    def mark(test):
        return pytest.mark.root(pytest.mark.skipif(os.geteuid() != 0, reason=f"{reason} needs root")(test))

    return mark


def as_stranger(act):
    """Do something as another user; whether it was permitted."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(STRANGER)
            os.setuid(STRANGER)
            act()
            code = 0
        except PermissionError:
            code = 13
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, 13), "the stranger failed in another way"
    return code == 0


@pytest.fixture
def shared():
    """A folder like /tmp: everybody may write, the sticky bit is set."""
    folder = Path(tempfile.mkdtemp(prefix="infini-run-shared-", dir="/tmp"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def secret(tmp_path):
    file = tmp_path / "secret"
    file.write_text(SECRET)
    file.chmod(0o600)
    return file


def refused(infini_run, *words, **kwargs):
    command = infini_run(*words, "echo", "output", **kwargs)
    assert command.wait() == 2, command.err
    assert command.err.count(b"\n") == 1
    assert command.out == b""
    return command.err.decode()


# ---- logs


def in_the_way(kind, log, ours):
    """What could be planted under a log's name."""
    if kind == "link":
        log.symlink_to(ours)
    elif kind == "dangling link":
        log.symlink_to(ours.parent / "made-by-the-link")
    elif kind == "hard link":
        log.hardlink_to(ours)  # by root: fs.protected_hardlinks, where it is on, keeps a stranger from it
    elif kind == "device":
        os.mknod(log, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    else:
        os.mkfifo(log)
        log.chmod(0o666)


@pytest.mark.parametrize("kind", ["link", "dangling link", "hard link", "fifo", "fifo with a reader", "device"])
def test_a_log_is_never_written_through_what_was_planted_under_its_name(kind, infini_run, shared, secret):
    if kind == "device" and os.geteuid() != 0:
        pytest.skip("a device can only be made by root")
    log = shared / "rank_1.log"
    in_the_way(kind, log, secret)
    reader = os.open(log, os.O_RDONLY | os.O_NONBLOCK) if kind == "fifo with a reader" else -1
    line = refused(infini_run, f"--log_dir={shared}", "--nproc_per_node=2")
    assert f"--log_dir: {log} cannot be written: it " in line
    assert secret.read_text() == SECRET
    assert not (secret.parent / "made-by-the-link").exists()
    if reader >= 0:
        assert os.read(reader, 100) == b""
        os.close(reader)


@needs_root("another user")
def test_a_strangers_file_in_a_shared_folder_gets_no_output(infini_run, shared):
    log = shared / "rank_0.log"

    def plant():
        os.umask(0)
        log.touch(0o666)

    assert as_stranger(plant)
    line = refused(infini_run, f"--log_dir={shared}")
    assert "cannot be written: " in line  # by us, or by the kernel before us: fs.protected_regular
    assert log.read_text() == ""


def test_our_own_log_in_a_shared_folder_is_appended_to(infini_run, shared):
    for _ in range(2):
        assert infini_run(f"--log_dir={shared}", "echo", "line").wait() == 0
    assert (shared / "rank_0.log").read_text() == "line\nline\n"


def test_a_folder_for_logs_may_be_a_link(infini_run, tmp_path):
    """To another disk, as on most clusters: which folder is the user's to say."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "logs").symlink_to("disk")
    assert infini_run(f"--log_dir={tmp_path}/logs", "echo", "line").wait() == 0
    assert (tmp_path / "disk/rank_0.log").read_text() == "line\n"


# ---- modes


@pytest.mark.parametrize("umask", [0, 0o022, 0o777])
def test_nothing_that_we_make_can_be_written_or_read_by_others_whatever_the_umask(umask, infini_run, tmp_path):
    if umask == 0o777 and os.geteuid() != 0:
        pytest.skip("nobody but root could enter a folder made under it")
    flags = (f"--report={tmp_path}/report", f"--log_dir={tmp_path}/a/b/logs")
    assert infini_run(*flags, "echo", "line", preexec_fn=lambda: os.umask(umask)).wait() == 0
    for name in ("a", "a/b", "a/b/logs"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o755 & ~umask
    for name in ("report", "a/b/logs/rank_0.log"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600 & ~umask


def test_folder_of_error_files_is_the_users_alone_and_its_name_cannot_be_known(infini_run):
    names = set()
    for _ in range(2):
        script = 'd=${TORCHELASTIC_ERROR_FILE%/*}; stat -c %a "$d"; echo "${d##*/}"'
        command = infini_run("sh", "-c", script, preexec_fn=lambda: os.umask(0))
        assert command.wait() == 0
        mode, name = command.out.decode().split()
        assert mode == "700"
        names.add(name)
    assert len(names) == 2
    assert all(len(name.rpartition("-")[2]) == 12 for name in names)


# ---- the report


@pytest.mark.parametrize("kind", ["link", "dangling link", "hard link"])
def test_a_report_replaces_a_link_and_never_follows_it(kind, infini_run, shared, secret):
    in_the_way(kind, shared / "report", secret)
    assert infini_run(f"--report={shared}/report", "true").wait() == 0
    assert not (shared / "report").is_symlink()
    assert json.loads((shared / "report").read_text())["exit_code"] == 0
    assert secret.read_text() == SECRET
    assert os.listdir(shared) == ["report"]


def test_who_reads_an_earlier_report_reads_it_to_its_end(infini_run, tmp_path):
    report = tmp_path / "report"
    report.write_text("earlier")
    with report.open() as reader:
        assert infini_run(f"--report={report}", "true").wait() == 0
        assert reader.read() == "earlier"
    assert json.loads(report.read_text())["exit_code"] == 0


@needs_root("a PID namespace of its own")
def test_what_a_killed_launch_left_keeps_no_later_one_from_its_report(infini_run, tmp_path):
    """In a container the launcher's number is 1 every time."""
    (tmp_path / "report.1").write_text("half a rep")
    under = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
    assert infini_run(f"--report={tmp_path}/report", "true", under=under).wait() == 0
    assert json.loads((tmp_path / "report").read_text())["exit_code"] == 0


# ---- what a rank leaves us


@pytest.mark.parametrize(
    "plant",
    [
        'ln -s "$0" "$TORCHELASTIC_ERROR_FILE"',
        'ln "$0" "$TORCHELASTIC_ERROR_FILE"',
        'mkfifo "$TORCHELASTIC_ERROR_FILE"',
        'mkdir "$TORCHELASTIC_ERROR_FILE"',
    ],
    ids=["link", "hard link", "fifo", "folder"],
)
@pytest.mark.parametrize("logged", [True, False], ids=["log_dir", "no log_dir"])
def test_an_error_file_is_not_read_through_what_a_rank_planted(plant, logged, infini_run, tmp_path, secret):
    flags = [f"--log_dir={tmp_path}/logs"] if logged else []
    near = '"$TORCHELASTIC_ERROR_FILE.secret"'  # on its file system, or no hard link could be made
    script = f'cp "$0" {near}; set -- {near}; {plant.replace("$0", "$1")}; exit 3'
    command = infini_run(*flags, f"--report={tmp_path}/report", "sh", "-ec", script, secret)
    assert command.wait() == 3
    assert command.err.startswith(b"infini-run: rank 0 on ")
    assert SECRET.encode() not in command.err
    assert SECRET not in (tmp_path / "report").read_text()


def test_a_huge_error_file_costs_a_bounded_read(infini_run):
    """1 TiB, sparse: who read it all would not come back."""
    script = 'printf boom > "$TORCHELASTIC_ERROR_FILE"; truncate -s 1T "$TORCHELASTIC_ERROR_FILE" || exit 4; exit 3'
    command = infini_run("sh", "-c", script)
    assert command.wait() in (3, 4)  # 4: a file system without such sizes
    assert len(command.err) < 5000


@pytest.mark.parametrize("way", ["last words", "error file", "program's name", "flag"])
def test_escape_sequences_never_reach_the_terminal_from_what_we_say(way, infini_run, tmp_path):
    json_text = json.dumps({"message": {"message": HOSTILE}})
    words = {
        "last words": ("--console=none", "sh", "-c", 'printf %s "$0" >&2; exit 3', HOSTILE),
        "error file": ("sh", "-c", 'printf %s "$0" > "$TORCHELASTIC_ERROR_FILE"; exit 3', json_text),
        "program's name": (f"./{HOSTILE}",),
        "flag": (f"--grace={HOSTILE}", "true"),
    }[way]
    command = infini_run(f"--report={tmp_path}/report", *words)
    assert command.wait() != 0
    assert b"\\x1b[2J" in command.err
    assert_harmless(command.err)
    if (tmp_path / "report").exists():
        assert_harmless((tmp_path / "report").read_bytes())


def assert_harmless(text):
    decoded = text.decode("utf-8", "surrogateescape")
    assert [c for c in decoded if c not in "\n" and (ord(c) < 32 or 0x7F <= ord(c) < 0xA0)] == []
    assert [c for c in decoded if "\udc80" <= c < "\udca0"] == []


@pytest.mark.parametrize("flags", [["--verbose"], ["--verbose", "--console=prefix"], []], ids=" ".join)
def test_a_stray_cannot_steer_the_terminal_by_its_name(flags, infini_run):
    name = "\x1b[2Jm\n\udc9b31m"
    stray = ("daemon", f"name={name}", "say=stray", "wait", "done")
    command = infini_run(*flags, "--grace=0.2", *play(*stray, "exit=0"))
    assert command.wait() == 0
    assert b"left behind" in command.err
    assert b"\\x1b[2Jm" in command.err
    assert b"\\n" in command.err
    assert_harmless(command.err)


@needs_root("a PID namespace of its own")
def test_an_isolated_rank_cannot_stop_or_kill_its_launcher(infini_run):
    command = infini_run("--isolate", "sh", "-c", "kill -STOP 1; kill -KILL 1; kill -STOP 1; echo alive; exit 5")
    assert command.wait() == 5
    assert command.out == b"alive\n"


def test_nothing_of_the_environment_is_told(infini_run, tmp_path):
    env = {**os.environ, "MY_TOKEN": SECRET}
    flags = ("--verbose", f"--report={tmp_path}/report", f"--log_dir={tmp_path}/logs")
    for words in (
        (*flags, "--nproc_per_node=2", "sh", "-c", "exit 3"),
        (*flags, "no-such-program"),
        ("--grace=never", "true"),
        ("--dry_run", "true"),
        ("--dry_run=json", "true"),
        ("--helpfull",),
    ):
        command = infini_run(*words, env=env)
        command.wait()
        assert SECRET.encode() not in command.out + command.err
    for file in tmp_path.rglob("*"):
        assert file.is_dir() or SECRET not in file.read_text()


# ---- strangers and a launch that runs


@needs_root("another user")
def test_a_stranger_can_neither_read_nor_signal_a_launch(infini_run, shared):
    flags = (f"--log_dir={shared}", "--console=none")
    command = infini_run(*flags, *play("say=ready", "wait"))
    log = shared / "rank_0.log"
    until(lambda: log.exists() and b"ready" in log.read_bytes())
    (rank,) = marked()
    acts = [log.read_bytes, log.unlink, lambda: log.rename(shared / "other")]
    for pid in (command.pid, rank):
        acts += [
            lambda pid=pid: os.kill(pid, signal.SIGTERM),
            lambda pid=pid: os.listdir(f"/proc/{pid}/fd"),
            lambda pid=pid: Path(f"/proc/{pid}/environ").read_bytes(),
            lambda pid=pid: Path(f"/proc/{pid}/mem").read_bytes(),
        ]
    assert [as_stranger(act) for act in acts] == [False] * len(acts)
    command.signal(signal.SIGTERM)
    assert command.wait() == 143


@needs_root("another user")
def test_stranger_cannot_send_to_ranks(infini_run):
    """An abstract address is everybody's, and is listed for everybody; what is sent to it may freeze who takes it."""
    command = infini_run("--nproc_per_node=2", *play("ask=mark", "wait"))
    ((_, mark, _, _), _) = command.read_lines(b"mark", 2)
    names = [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if mark in line]
    kinds = {"control": socket.SOCK_STREAM, "notify.0": socket.SOCK_DGRAM, "notify.1": socket.SOCK_DGRAM}
    assert sorted(names) == [f"/dev/shm/infini-run-{mark}/{name}" for name in kinds]
    for name in names:
        with socket.socket(socket.AF_UNIX, kinds[name.rpartition("/")[2]]) as sender:
            assert not as_stranger(lambda sender=sender, name=name: sender.connect(name))
    command.signal(signal.SIGTERM)
    assert command.wait() == 143


@needs_root("another user")
def test_stranger_who_takes_folder_of_next_attempts_gets_nothing(infini_run, tmp_path):
    """The folder is the launcher's through all attempts: nobody else enters it, or puts another in its place."""
    script = 'echo "$NOTIFY_SOCKET $TORCHELASTIC_ERROR_FILE"; echo boom > "$TORCHELASTIC_ERROR_FILE"; exit 3'
    flags = ("--max_restarts=2", "--restart_delay=1s", f"--report={tmp_path}/report")
    command = infini_run(*flags, "sh", "-c", script)
    command.read_error_until(b"restart 1 of 2")
    ((address, _),) = command.read_lines(b"/")
    folder = Path(address).parent
    assert not as_stranger(lambda: (folder / "taken").mkdir())
    assert not as_stranger(lambda: folder.rename(f"{folder}-taken"))
    assert not as_stranger(folder.rmdir)
    assert command.wait() == 3
    _, *later = command.read_lines(b"/", 3)
    assert address not in {own for own, _ in later}
    assert json.loads((tmp_path / "report").read_text())["ranks"][0]["error_message"] == "boom"
    assert not folder.exists()


@needs_root("a small file system")
@pytest.mark.parametrize("inodes", [1, 2, 3])
def test_a_full_dev_shm_costs_no_more_than_the_error_file(inodes, infini_run):
    """Without room for the folder, for a first socket, for a second one: then in /tmp."""
    mount = f'mount -t tmpfs -o nr_inodes={inodes} none /dev/shm; exec "$@"'
    under = ("unshare", "-m", "--propagation=private", "sh", "-ec", mount, "sh")
    script = 'echo "$NOTIFY_SOCKET"; ls /dev/shm; exit 3'
    command = infini_run("--nproc_per_node=2", "sh", "-c", script, under=under)
    assert command.wait() == 3
    assert b"exit code 3" in command.err
    addresses = [line.decode() for line in command.out.splitlines()]
    assert all(address.startswith("/tmp/infini-run-ir-") for address in addresses)
    assert not any(Path(address).parent.exists() for address in addresses)


@needs_root("a small file system")
def test_stranger_cannot_take_abstract_addresses_of_next_attempt(infini_run):
    """Where no folder can be made. The launch's id is in the guard's command line."""
    mount = f'mount -t tmpfs -o nr_inodes=1 none /dev/shm; {READ_ONLY_TMP}; exec "$@"'
    under = ("unshare", "-m", "--propagation=private", "sh", "-ec", mount, "sh")
    env = {name: value for name, value in os.environ.items() if name != "TMPDIR"}
    words = play("ask=mark", "+0", "exit=3", "+1", "exit=0")
    command = infini_run("--max_restarts=1", "--restart_delay=1s", *words, under=under, env=env)
    command.read_error_until(b"restart 1 of 1")
    mark = command.read_lines(b"mark")[0][1]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as taken:
        taken.bind(f"\0infini-run/{mark}.1/0")
        assert command.wait() == 0, command.err


@needs_root("a small file system")
@pytest.mark.parametrize("flags", [(), ("--log_dir=/mnt/logs",)])
@pytest.mark.parametrize("full", ["/dev/shm", "/dev/shm /tmp", "/mnt", "/mnt /dev/shm /tmp"])
def test_rank_has_error_file_only_when_written(full, flags, infini_run):
    """A file system without a free block still takes folders, sockets and empty files."""
    fill = "mount -t tmpfs -o size=1m none $1; dd if=/dev/zero of=$1/full bs=4k 2>/dev/null || :"
    fill = f"if [ $1 = /tmp ]; then {READ_ONLY_TMP}; else {fill}; fi"
    mounts = f"mount -t tmpfs none /mnt; set -- {full} @; while [ $1 != @ ]; do {fill}; shift; done"
    under = ("unshare", "-m", "--propagation=private", "sh", "-ec", f'all() {{ {mounts}; }}; all; exec "$@"', "sh")
    script = '[ -z "$TORCHELASTIC_ERROR_FILE" ] || echo boom > "$TORCHELASTIC_ERROR_FILE" || exit 4; exit 3'
    flags = (*flags, "--nproc_per_node=2", "--console=none")
    command = infini_run(*flags, "sh", "-c", script, under=under)
    assert command.wait() == 3, command.err
    has_place = not {"/dev/shm", "/tmp"} <= set(full.split()) or (
        flags[0].startswith("--log_dir") and "/mnt" not in full
    )
    assert (b"error: boom" in command.err) == has_place


# ---- where we look for code


def test_the_command_imports_nothing_from_the_folder_that_it_is_called_in(tmp_path):
    script = Path(sys.executable).parent / "infini-run"
    if not script.exists():
        pytest.skip("the command is not installed beside this Python")
    for name in sys.stdlib_module_names | {"infini_run", "cffi", "pynvml", "sitecustomize"}:
        (tmp_path / f"{name}.py").write_text("import os; os.write(1, b'hostile'); os._exit(66)")
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    flags = ("--report=report", "--log_dir=logs", "--verbose")
    for code, words in {
        3: (*flags, "--nproc_per_node=2", "sh", "-c", 'echo boom > "$TORCHELASTIC_ERROR_FILE"; exit 3'),
        127: ("no-such-program",),
        0: ("--dry_run=json", "true"),
        2: ("--gpus_per_proc=100000", "true"),
    }.items():
        command = Command([str(script), *words], cwd=tmp_path, env=env)
        assert command.wait() == code, (command.out, command.err)
        assert b"hostile" not in command.out


@pytest.mark.parametrize(("path", "code"), [("", 0), (":/usr/bin", 0), ("bin", 0), ("/usr/bin:/bin", 127)])
def test_a_program_in_the_working_directory_is_found_only_where_path_says_so(path, code, infini_run, tmp_path):
    """As a shell does it (exec(3)): an empty entry is the working directory, a relative one begins there."""
    for place in (tmp_path, tmp_path / "bin"):
        place.mkdir(exist_ok=True)
        (place / "planted").write_text("#!/bin/sh\nexit 0\n")
        (place / "planted").chmod(0o755)
    command = infini_run("planted", cwd=tmp_path, env={**os.environ, "PATH": path})
    assert command.wait() == code, command.err
