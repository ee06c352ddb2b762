"""Launcher.run: what a function gets, what comes back, and what is refused before anything starts."""

from __future__ import annotations

import functools
import logging
import os
import re
import subprocess
import sys
import textwrap
import threading
import time

import pytest

import infini_run as ir
from infini_run.crews.spawn.spawner import KILL_ANSWER_S
from tests.support.processes import marked
from tests.support.waiting import LIMIT_S

WAYS = {"exec": (), "fork": ["fractions"]}


@pytest.fixture(params=WAYS)
def preload(request):
    """Workers that are started, and workers that are forked."""
    return WAYS[request.param]


@pytest.fixture
def run(preload):
    def run(function, *args, nproc=2, **flags):
        return ir.Launcher(nproc_per_node=nproc, preload=preload, **flags).run(function, *args)

    return run


def by_name(word, *, more=""):
    return f"{word}{more} {os.environ['RANK']}"


class Account:
    def __init__(self, money):
        self.money = money

    def __eq__(self, other):
        return self.money == other.money


# ---- results


def test_each_rank_gets_the_call_and_its_result_comes_back_by_rank(run):
    result = run(lambda x, y: (int(os.environ["RANK"]), x + y), 2, 3, nproc=3)
    assert isinstance(result, ir.LaunchResult)
    assert list(result) == [(0, 5), (1, 5), (2, 5)]
    assert (len(result), result[1], result.rank(2)) == (3, (1, 5), (2, 5))


def test_a_result_is_found_by_host_and_local_rank_and_names_what_there_is(run):
    result = run(os.getpid)
    host = os.uname().nodename
    assert result.hosts == (host,)
    assert result.index(host, 1) == result.rank(1)
    assert result.by_host == {host: list(result)}
    with pytest.raises(IndexError, match="unknown rank; use 0 to 1"):
        result.rank(2)
    with pytest.raises(KeyError, match="unknown host; use"):
        result.index("elsewhere", 0)
    with pytest.raises(IndexError, match="use 0 to 1"):
        result.index(host, 2)


def test_keyword_arguments_travel():
    assert ir.Launcher().run(by_name, "a", more="b")[0] == "ab 0"


def test_closures_partials_and_classes_of_no_module_travel_by_value(run):
    class Local:
        def __init__(self, n):
            self.n = n

    kept = Local(7)
    assert run(lambda: Local(kept.n + 1))[0].n == 8
    assert list(run(functools.partial(by_name, "p"))) == ["p 0", "p 1"]


def test_functions_with_a_cache_that_no_module_has_travel_by_value(run, preload):
    program = textwrap.dedent("""
        import functools, sys
        import infini_run as ir

        @functools.lru_cache(maxsize=40)
        def fibonacci(n):
            return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

        class Table:
            @functools.cache
            def __getitem__(self, n):
                return fibonacci(n)

        launcher = ir.Launcher(preload=sys.argv[1:])
        print(launcher.run(fibonacci, 50)[0], launcher.run(lambda: Table()[50])[0])
        with ir.Crew(lambda ctx, n: (fibonacci(n), fibonacci.cache_parameters()["maxsize"])) as crew:
            print(*crew.ask(50).result())
    """)
    command = [sys.executable, "-c", program, *preload]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.stdout.split(), done.stderr) == (["12586269025"] * 3 + ["40"], "")
    local = functools.cache(lambda: int(os.environ["RANK"]))
    assert list(run(local)) == [0, 1]
    assert run(cached_here)[0] == (cached_here.__module__, 1)


@functools.cache
def cached_here():
    return cached_here.__module__, cached_here.cache_info().misses


def test_a_rank_sees_what_a_rank_of_a_command_sees(run):
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GLOBAL_PROC_RANK", "NNODES"]
    names += ["PROC_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "INFINI_RUN_ID"]
    first, second = run(lambda: {name: os.environ.get(name) for name in names})
    differing = {name for name in names if first[name] != second[name]}
    assert differing == {"RANK", "LOCAL_RANK", "GLOBAL_PROC_RANK"}
    assert [first["RANK"], second["RANK"], first["WORLD_SIZE"]] == ["0", "1", "2"]
    assert None not in first.values()


def test_every_rank_is_a_process_group_of_its_own_with_stdin_from_nowhere(run):
    found = run(lambda: (os.getpid(), os.getpgid(0), os.readlink("/proc/self/fd/0"), sys.stdin.read()))
    assert [pid for pid, *_ in found] == [group for _, group, *_ in found]
    assert {rest for *_, a, b in found for rest in [(a, b)]} == {("/dev/null", "")}


def open_files():
    found = {}
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            found[fd] = os.readlink(f"/proc/self/fd/{fd}").split(":")[0]
        except OSError:
            continue  # the listing itself
    return found


def test_a_rank_has_no_descriptor_beyond_its_own(run):
    inherited = [kind for fd, kind in open_files().items() if fd > 2 and os.get_inheritable(fd)]
    kinds = [".stack" if kind.endswith(".stack") else kind for kind in run(open_files)[1].values()]
    assert sorted(kinds) == sorted([".stack", "/dev/null", "pipe", "pipe", "socket", "socket", *inherited])


def test_one_worker_is_enough_and_there_may_be_many(run):
    assert list(run(lambda: os.environ["RANK"], nproc=1)) == ["0"]
    assert list(run(lambda: int(os.environ["RANK"]), nproc=12)) == list(range(12))


def test_large_results_and_arguments_come_whole(run):
    data = os.urandom(20_000_000)
    result = run(lambda given: given[::-1], data)
    assert [value == data[::-1] for value in result] == [True, True]


def test_what_a_worker_reads_late_does_not_hold_the_launcher(tmp_path):
    """Its start fills the pipe of its output before it reads its task, which fills the channel."""
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.stderr.write('x' * 300_000 + '\\n')")
    env = {"PYTHONPATH": str(tmp_path)}
    result = ir.Launcher(env=env, preload=(), log_dir=tmp_path / "logs", console="none").run(len, b"x" * 10_000_000)
    assert result[0] == 10_000_000


def test_two_launches_in_two_threads_are_apart(preload):
    found = {}

    def work(name):
        found[name] = list(ir.Launcher(nproc_per_node=2, preload=preload).run(lambda: (name, os.environ["RANK"])))

    threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {name: [(name, "0"), (name, "1")] for name in "ab"}


def test_a_worker_may_launch_workers_of_its_own(run):
    result = run(
        lambda: list(ir.Launcher(nproc_per_node=2, preload=()).run(lambda: os.environ["WORLD_SIZE"])), nproc=1
    )
    assert result[0] == ["2", "2"]


def test_random_numbers_differ_between_ranks(run):
    import random

    assert len(set(run(lambda: random.random(), nproc=4))) == 4


# ---- environment, folder, logs


def test_variables_are_set_from_a_file_and_by_name(run, tmp_path, monkeypatch):
    monkeypatch.setenv("OURS", "1")
    (tmp_path / "env").write_text('# a comment\nexport FROM_FILE="a b"\nBOTH=file\n')
    seen = run(lambda: dict(os.environ), env={"BOTH": "name"}, env_file=tmp_path / "env")[1]
    assert (seen["OURS"], seen["FROM_FILE"], seen["BOTH"]) == ("1", "a b", "name")


def test_only_what_matches_is_copied_where_patterns_are_given(run, monkeypatch):
    monkeypatch.setenv("KEPT_1", "x")
    monkeypatch.setenv("DROPPED", "x")
    patterns = ["KEPT_*", "PATH", "TEST_RUN", "TMPDIR", "LD_LIBRARY_PATH"]
    seen = run(lambda: dict(os.environ), copy_env=patterns)[0]
    assert "KEPT_1" in seen
    assert "DROPPED" not in seen


def test_workers_start_where_they_are_told(run, tmp_path):
    assert run(os.getcwd, cwd=tmp_path)[0] == str(tmp_path)


def test_prints_are_prefixed_and_written_to_a_file_for_each_rank(run, tmp_path, capfd):
    def talk():
        print("out", os.environ["RANK"])
        print("err", file=sys.stderr)

    run(talk, log_dir=tmp_path / "logs")
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["[rank 0] out 0", "[rank 1] out 1"]
    assert sorted(err.splitlines()) == ["[rank 0 err] err", "[rank 1 err] err"]
    lines = (tmp_path / "logs" / "rank_1.log").read_text().splitlines()
    assert sorted(lines) == ["err: err", "out 1"]


def test_a_hundred_thousand_lines_of_two_ranks_are_all_there(run, tmp_path):
    def flood():
        for number in range(100_000):
            print(f"line {number}")

    run(flood, log_dir=tmp_path, console="none")
    for rank in range(2):
        lines = (tmp_path / f"rank_{rank}.log").read_text().splitlines()
        assert lines == [f"line {number}" for number in range(100_000)]


def test_logging_records_reach_our_handlers_with_rank_and_host_and_are_text(run, caplog):
    class Odd:
        def __str__(self):
            return "odd"

    def log():
        logger = logging.getLogger("train.deep")
        logger.info("loss %s of %s", 0.5, Odd())
        logger.debug("too little")
        try:
            raise ValueError("inner")
        except ValueError:
            logger.exception("caught")

    with caplog.at_level(logging.INFO):
        run(log, log_level="INFO")
    records = [record for record in caplog.records if record.name == "train.deep"]
    assert sorted((r.rank, r.levelname) for r in records) == [
        (n, level) for n in (0, 1) for level in ("ERROR", "INFO")
    ]
    assert {record.host for record in records} == {os.uname().nodename}
    texts = [record.getMessage() for record in records if record.rank == 0]
    assert texts[0] == "loss 0.5 of odd"
    assert "ValueError: inner" in texts[1]


@pytest.mark.parametrize(("level", "expected"), [("ERROR", ["ERROR", "CRITICAL"]), ("CRITICAL", ["CRITICAL"])])
def test_records_below_log_level_do_not_arrive(run, caplog, level, expected):
    def log():
        logging.getLogger("verbose").setLevel("DEBUG")  # the level of a logger there changes nothing of it
        for name in ("plain", "verbose"):
            for each in ("DEBUG", "WARNING", "ERROR", "CRITICAL"):
                logging.getLogger(name).log(getattr(logging, each), each)

    with caplog.at_level(logging.DEBUG):
        run(log, nproc=1, log_level=level)
    for name in ("plain", "verbose"):
        assert [record.levelname for record in caplog.records if record.name == name] == expected


def test_records_stay_with_the_workers_where_nobody_handles_them_here(run, caplog):
    run(lambda: logging.getLogger("x").warning("w"), log_level=False, console="none")
    assert [record for record in caplog.records if record.name == "x"] == []


def test_main_of_workers_is_empty(run):
    def names():
        return [name for name in vars(sys.modules["__main__"]) if not name.startswith("__")]

    assert list(run(names, nproc=1)) == [[]]


def test_a_function_can_say_how_far_it_is():
    def work():
        worker = ir.this_worker()
        worker.progress(1, 2)
        return worker.rank, worker.world_size

    assert list(ir.Launcher(nproc_per_node=2).run(work)) == [(0, 2), (1, 2)]
    with pytest.raises(ir.UsageError, match="not a worker"):
        ir.this_worker()


# ---- what is refused before anything starts


@pytest.fixture
def nothing_starts(monkeypatch):
    def refuse(*given, **more):
        raise AssertionError("something was started")

    monkeypatch.setattr("infini_run.node.launch.NodeLaunch.start", refuse)


@pytest.mark.usefixtures("nothing_starts")
def test_a_call_is_checked_before_anything_starts():
    launcher = ir.Launcher(nproc_per_node=2)
    with pytest.raises(ir.UsageError, match="3 is not callable"):
        launcher.run(3)
    with pytest.raises(ir.UnpicklableError, match=r"^argument 1 cannot be sent: a generator does not pickle"):
        launcher.run(print, 1, (n for n in ()))
    with pytest.raises(ir.UnpicklableError, match=r"^argument lock cannot be sent: a _thread.lock does not pickle"):
        launcher.run(print, lock=threading.Lock())
    lock = threading.Lock()

    def holds():
        return lock

    with pytest.raises(
        ir.UnpicklableError, match=r"^the function '.*holds''s variable lock cannot be sent: a _thread.lock"
    ):
        launcher.run(holds)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"nproc_per_node": 0}, "^nproc_per_node=0: expected 1"),
        ({"nproc": 0}, "^nproc=0: expected 1"),
        ({"nproc": 2, "nproc_per_node": 2}, "nproc_per_node=2 conflicts with nproc=2"),
        ({"nproc_per_node": -1}, "nproc_per_node=-1"),
        ({"nproc_per_node": True}, "nproc_per_node=True: expected a number from 1"),
        ({"nproc_per_node": [1, 2]}, "2 numbers for 1 host"),
        ({"nproc_per_node": []}, "nproc_per_node="),
        ({"hosts": []}, "hosts=.*: expected a list of names"),
        ({"hosts": 5}, "hosts=5: expected a list of names, or 'auto'; for 5 workers, use nproc=5$"),
        ({"hosts": [""]}, "hosts=.*: expected a list of names"),
        ({"preload": "torch"}, "preload='torch': expected a list"),
        ({"backend": 3}, "backend=3"),
        ({"backend": ""}, "backend='': expected 'gloo', 'nccl', another"),
        ({"hosts": "Auto"}, "hosts='Auto': expected a list of names, or 'auto'"),
        ({"max_restarts": -1}, "^max_restarts=-1: "),
        ({"cwd": b"/tmp"}, r"^cwd: b'/tmp': expected text; did you mean os.fsdecode"),
        ({"timeout_s": 0}, "timeout_s=0: expected a number of seconds, above 0"),
        ({"agent_timeout_s": "x"}, "agent_timeout_s='x'"),
        ({"log_level": "LOUD"}, "log_level='LOUD'"),
        ({"progress": "line"}, "progress='line'"),
        ({"cwd": "/nowhere"}, "cwd=/nowhere is not a directory"),
        ({"env": {"A": 1}}, r"env\['A'\]: 1: expected text"),
        ({"env": {"A=B": "1"}}, "not a variable name"),
        ({"env_file": "/nowhere"}, "env_file=/nowhere cannot be read"),
        ({"copy_env": "PATH"}, "copy_env='PATH': expected a list"),
        ({"preload": ["fractions"], "bind": "cores"}, "bind=: conflicts with preload="),
    ],
)
@pytest.mark.usefixtures("nothing_starts")
def test_what_makes_no_sense_is_refused_before_anything_starts(given, message):
    with pytest.raises(ir.UsageError, match=message):
        ir.Launcher(**given).run(os.getpid)


def test_a_flag_that_makes_no_sense_is_refused_where_the_launcher_is_made():
    with pytest.raises(ir.UsageError, match=r'^grace="soon": not a time from 0'):
        ir.Launcher(grace="soon")
    with pytest.raises(ir.UsageError, match=r"^cwd: b'/tmp': expected text"):
        ir.Launcher(cwd=b"/tmp")


def test_hosts_as_one_text_are_those_of_the_command():
    assert ir.Launcher("a,b:2,n[1-2]").hosts == ("a", "b:2", "n1", "n2")
    assert ir.Launcher("a").hosts == ("a",)


def test_a_module_that_cannot_be_preloaded_is_one_error_and_leaves_nothing():
    with pytest.raises(ir.UsageError, match="preload: no_such_module cannot be imported: ModuleNotFoundError"):
        ir.Launcher(preload=["no_such_module"]).run(os.getpid)
    assert marked() == {}


def test_a_launch_that_takes_too_long_is_stopped(run, bell):
    started = time.monotonic()
    with pytest.raises(ir.LaunchTimeout, match=r"^rank 0 on \S+, rank 1 on \S+: did not return within 1 s;"):
        run(time.sleep, 600, timeout_s=1)
    assert time.monotonic() - started < 60


def test_launch_timeout_names_ranks_that_have_not_returned(run):
    def wait():
        if os.environ["RANK"] != "1":
            time.sleep(600)

    with pytest.raises(ir.LaunchTimeout) as caught:
        run(wait, nproc=7, timeout_s=6)
    assert re.findall(r"rank (\d)", str(caught.value)) == ["0", "2", "3", "4"]
    assert str(caught.value).endswith(" and 2 more: did not return within 6 s; stopped all ranks")


@pytest.mark.slow
def test_workers_that_do_not_come_up_are_named(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import time; time.sleep(600)")
    env = {"PYTHONPATH": str(tmp_path)}
    with pytest.raises(ir.LaunchTimeout, match=r"rank 0 on .*, rank 1 on .*: not up within 0\.5 s"):
        ir.Launcher(nproc_per_node=2, env=env, preload=(), agent_timeout_s=0.5).run(os.getpid)
    begin_s = time.monotonic()
    with pytest.raises(ir.StartError, match=r"the imports took longer than 0\.5 s"):
        ir.Launcher(nproc_per_node=2, env=env, preload=["fractions"], agent_timeout_s=0.5).run(os.getpid)
    assert time.monotonic() - begin_s < KILL_ANSWER_S, "the imports are not waited for any longer"


def test_nproc_is_nproc_per_node():
    assert list(ir.Launcher(nproc=2).run(abs, -1)) == [1, 1]
    with ir.Pool(nproc=2) as pool:
        assert list(pool.run(abs, -1)) == [1, 1]
