"""Every flag of infini-run: its default, its values, who beats whom."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import infini_run
from infini_run.errors import UsageError
from infini_run.options.grammar import GRAMMAR
from infini_run.options.launch_options import Options
from infini_run.options.options import resolve
from infini_run.options.table import FLAGS, GROUPS, PREFIXES, TABLE
from infini_run.record import fields, replace
from infini_run.value_types import MAX_INT, RankStreams

DESIGN = [
    *(
        "nnodes",
        "nproc_per_node",
        "node_rank",
        "rdzv_endpoint",
        "master_addr",
        "master_port",
        "standalone",
        "run_id",
    ),
    *(
        "program",
        "programs",
        "one_world",
        "on_nodes",
        "after",
        "ready_port",
        "ends_job",
        "module",
        "no_python",
        "distributed_args",
        "preload",
        "preload_timeout",
    ),
    *("engine", "hosts", "hostfile", "ssh_config", "remote_python", "link_port", "link_address", "token_file"),
    *("join_timeout", "node_timeout", "export"),
    *("spares", "join_window", "on_join", "node_check", "node_check_timeout", "max_node_failures"),
    *("gpus_per_proc", "bind", "check_gpus", "omp_num_threads"),
    *("log_dir", "log_layout", "console", "timestamps", "color", "ranks_on_console"),
    *("stdin", "redirects", "tee", "local_ranks_filter"),
    *(
        "grace",
        "stop_signal",
        "stop_scope",
        "isolate",
        "max_restarts",
        "restart_scope",
        "restart_delay",
        "restart_window",
        "max_no_progress",
        "ready_timeout",
        "hang_timeout",
        "progress_timeout",
        "on_hang",
        "snapshots",
        "report",
        "termination_log",
        "keep_going",
    ),
    *(
        "dry_run",
        "verbose",
        "live",
        "trace",
        "events",
        "metrics",
        "metrics_interval",
        "list",
        "top",
        "follow",
        "tail",
        "stacks",
        "stop",
        "send",
        "bundle",
        "ranks",
        "plot",
        "doctor",
        "completion",
    ),
]
TORCHRUN = [
    *(
        "nnodes",
        "nproc_per_node",
        "node_rank",
        "master_addr",
        "master_port",
        "local_addr",
        "standalone",
        "role",
    ),
    *(
        "rdzv_backend",
        "rdzv_endpoint",
        "rdzv_id",
        "rdzv_conf",
        "max_restarts",
        "monitor_interval",
        "start_method",
    ),
    *("event_log_handler", "module", "m", "no_python", "run_path", "log_dir", "redirects", "r", "tee", "t"),
    *(
        "local_ranks_filter",
        "duplicate_stdout_filters",
        "duplicate_stderr_filters",
        "logs_specs",
        "numa_binding",
    ),
    *("signals_to_handle", "shutdown_timeout", "virtual_local_rank", "help", "h"),
]


def options(*argv, **environ):
    request = resolve([*argv, "program"], environ)
    assert request.question == ""
    return request.options


def test_the_table_is_the_design_in_its_order():
    assert [flag.name for flag in FLAGS if flag.group != "torchrun"] == DESIGN
    assert list(dict.fromkeys(flag.group for flag in FLAGS)) == list(GROUPS)


@pytest.mark.parametrize("name", TORCHRUN)
def test_every_flag_of_torchrun_is_known(name):
    assert name in TABLE


def test_no_two_flags_share_a_spelling():
    spellings = [name for flag in (*FLAGS, *GRAMMAR) for name in (flag.name, *flag.aliases)]
    negations = ["no" + flag.name for flag in (*FLAGS, *GRAMMAR) if flag.negated is not None]
    assert len({*spellings, *negations}) == len(spellings) + len(negations)


def test_no_flag_is_set_by_a_variable_that_workers_see():
    variables = {prefix.text + name.upper() for prefix in PREFIXES for name in TABLE}
    assert variables.isdisjoint({"INFINI_RUN_ID", "INFINI_RUN_TOKEN"})


def test_every_default_is_what_its_flag_makes_of_the_default_that_help_shows():
    for flag in FLAGS:
        shown = flag.shown or str(flag.default)
        if flag.negated is None and shown and " " not in shown and flag.default not in ("", ()):
            assert flag.kind(shown) == flag.default, flag.name


def test_the_defaults_are_complete():
    assert options() == Options(
        nnodes=1,
        least_nodes=0,
        nproc_per_node=1,
        node_rank=0,
        master_addr="127.0.0.1",
        master_port=29500,
        rdzv_explicit=False,
        standalone=False,
        run_id="",
        role="default",
        module=False,
        no_python=False,
        distributed_args=False,
        preload=(),
        preload_timeout_s=600.0,
        engine="local",
        hosts="",
        hostfile="",
        ssh_config="",
        remote_python="",
        link_port=0,
        link_address="",
        token_file="",
        join_timeout_s=300.0,
        node_timeout_s=10.0,
        node_check="",
        node_check_timeout_s=60.0,
        export=(),
        spares=0,
        join_window_s=10.0,
        on_join="wait",
        max_node_failures=2,
        gpus_per_proc=0,
        virtual_local_rank=False,
        bind="none",
        check_gpus="off",
        omp_num_threads=0,
        log_dir="",
        log_layout="flat",
        console="auto",
        timestamps=False,
        color="auto",
        ranks_on_console=None,
        local_ranks_filter=None,
        stdin=0,
        redirects=RankStreams(),
        tee=RankStreams(),
        grace_s=10.0,
        signal_grace_s=25.0,
        stop_signal=15,
        stop_scope="group",
        isolate=False,
        max_restarts=0,
        restart_scope="job",
        restart_delay_s=1.0,
        restart_window_s=0.0,
        max_no_progress=3,
        ready_timeout_s=0.0,
        hang_timeout_s=0.0,
        progress_timeout_s=0.0,
        on_hang="report",
        snapshots="hang",
        report="",
        termination_log="",
        keep_going=False,
        dry_run="",
        verbose=False,
        live="off",
        trace="",
        events="",
        metrics="",
        metrics_interval_s=15.0,
        program=("program",),
    )


@pytest.mark.parametrize(
    ("argv", "environ", "live"),
    [
        (["--live"], {}, "on"),
        (["--live=yes"], {}, "on"),
        (["--nolive", "--console=none"], {}, "off"),
        (["--live=auto"], {}, "off"),
        (["--console=none"], {}, "auto"),
        (["--live=auto", "--console=none", "--log_dir=x"], {}, "auto"),
        (["--log_dir=x"], {}, "off"),
        (["--live", "--log_dir=x"], {}, "on"),
        (["--live", "--console=none"], {}, "on"),
        (["--live"], {"INFINI_RUN_CONSOLE": "prefix"}, "on"),
        (["--console=prefix"], {"INFINI_RUN_LIVE": "1"}, "off"),
        ([], {"PET_LIVE": "1"}, "on"),
    ],
)
def test_a_table_has_the_screen_that_nobody_of_higher_authority_wants(argv, environ, live):
    assert options(*argv, **environ).live == live


@pytest.mark.parametrize("origin", ["--live --console=inherit", "INFINI_RUN_LIVE=on INFINI_RUN_CONSOLE=prefix"])
def test_a_table_and_lines_on_one_screen_are_refused(origin):
    words = origin.split()
    argv = words if words[0].startswith("-") else []
    environ = {} if argv else dict(word.split("=") for word in words)
    with pytest.raises(UsageError, match=f"^{words[0]} conflicts with {words[1]}"):
        options(*argv, **environ)


def test_plot_and_completion_are_questions_that_only_the_command_line_asks():
    assert resolve(["--plot=o.png", "a.json", "b.json"], {}).arguments == ("o.png", "a.json", "b.json")
    request = resolve(["--nnodes=2", "--completion", "zsh"], {})
    assert (request.question, request.options, request.arguments) == ("completion", None, ("zsh",))
    assert resolve(["x"], {"INFINI_RUN_PLOT": "o.png", "PET_COMPLETION": "zsh"}).question == ""


def listed(ranks):
    return "all" if ranks is None else ",".join(map(str, ranks))


def mapped(streams):
    return ",".join(f"{rank}:{value}" for rank, value in streams.ranks) or str(streams.others)


RENDERED = {
    "ranks_on_console": listed,
    "local_ranks_filter": listed,
    "redirects": mapped,
    "tee": mapped,
    "export": ",".join,
    "preload": ",".join,
    "after": ",".join,
    "grace_s": "{!r}s".format,
}


WITHOUT_A_FLAG = ("name", "programs", "cwd", "env", "logs", "title", "again_code", "again_wait_s", "blocked_signals")


def rendered(wanted):
    """The flags that ask for these options, each as name and text."""
    for name in fields(Options):
        value = getattr(wanted, name)
        if name not in ("rdzv_explicit", "signal_grace_s", "program", "least_nodes", *WITHOUT_A_FLAG):
            text = str(int(value)) if isinstance(value, bool) else RENDERED.get(name, str)(value)
            yield name.removesuffix("_s"), text


names = st.text(min_size=1, alphabet=st.characters(codec="utf-8", exclude_characters="\0"))
hosts = st.from_regex(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", fullmatch=True) | st.ip_addresses().map(str)
programs = st.lists(st.text() | st.sampled_from(["--", "--nnodes=2", "--help", "-m", "-"]), min_size=1).map(tuple)


@st.composite
def every_option(draw):
    nnodes = draw(st.integers(1, 64))
    nproc = draw(st.integers(1, 64) | st.sampled_from(["auto", "gpu", "cpu"]))
    local = 4096 if isinstance(nproc, str) else nproc
    maps = st.integers(0, 3).map(lambda value: RankStreams(others=value)) | st.dictionaries(
        st.integers(0, local - 1), st.integers(0, 3), min_size=1
    ).map(lambda ranks: RankStreams(ranks=tuple(sorted(ranks.items()))))
    some = lambda count: st.none() | st.sets(st.integers(0, count - 1), min_size=1).map(sorted).map(tuple)  # noqa: E731
    module, standalone = draw(st.booleans()), nnodes == 1 and draw(st.booleans())
    gpus, run_id = draw(st.integers(0, 16)), draw(names)
    port = 0 if standalone else draw(st.integers(1 if nnodes > 1 else 0, 65535))
    grace_s = draw(st.floats(0, MAX_INT))
    return replace(
        options(),
        nnodes=nnodes,
        nproc_per_node=nproc,
        node_rank=draw(st.integers(0, nnodes - 1)),
        master_addr=draw(hosts),
        master_port=port,
        rdzv_explicit=True,
        standalone=standalone,
        run_id=run_id,
        role=draw(names),
        module=module,
        no_python=not module and draw(st.booleans()),
        distributed_args=draw(st.booleans()),
        preload_timeout_s=draw(st.floats(0.1, MAX_INT)),
        ssh_config=draw(names),
        remote_python=draw(names),
        link_port=draw(st.integers(0, 65535)),
        link_address=draw(names),
        export=tuple(draw(st.lists(st.from_regex(r"[A-Z_]+", fullmatch=True)))),
        join_window_s=draw(st.floats(0, MAX_INT)),
        on_join=draw(st.sampled_from(["wait", "restart"])),
        max_node_failures=draw(st.integers(0, MAX_INT)),
        gpus_per_proc=gpus,
        virtual_local_rank=gpus > 0 and draw(st.booleans()),
        bind=draw(st.sampled_from(["none", "numa", "socket", "cores"])),
        check_gpus=draw(st.sampled_from(["off", "warn", "refuse"])),
        omp_num_threads=draw(st.integers(0, 512)),
        log_dir="logs" + draw(names),
        log_layout="flat" if "/" in run_id else draw(st.sampled_from(["flat", "torchrun"])),
        console=draw(st.sampled_from(["inherit", "lines", "prefix", "none"])),
        ranks_on_console=draw(some(nnodes * local)),
        local_ranks_filter=draw(some(local)),
        stdin=draw(st.integers(0, nnodes * local - 1) | st.sampled_from(["all", "none"])),
        redirects=draw(maps),
        tee=draw(maps),
        grace_s=grace_s,
        signal_grace_s=grace_s,
        stop_signal=draw(st.integers(1, 31).filter(lambda number: number not in (9, 19)) | st.integers(35, 64)),
        stop_scope=draw(st.sampled_from(["group", "leader", "mixed"])),
        isolate=draw(st.booleans()),
        max_restarts=draw(st.integers(0, MAX_INT)),
        restart_delay_s=draw(st.floats(0, MAX_INT)),
        restart_window_s=draw(st.floats(0, MAX_INT)),
        max_no_progress=draw(st.integers(0, MAX_INT)),
        ready_timeout_s=draw(st.floats(0, MAX_INT)),
        hang_timeout_s=draw(st.floats(0, MAX_INT)),
        progress_timeout_s=draw(st.floats(0, MAX_INT)),
        on_hang=draw(st.sampled_from(["report", "stop"])),
        snapshots=draw(st.sampled_from(["hang", "failure", "off"])),
        report=draw(names),
        keep_going=draw(st.booleans()),
        dry_run=draw(st.sampled_from(["", "text", "json"])),
        verbose=draw(st.booleans()),
        program=draw(programs),
    )


@settings(deadline=None)
@given(every_option())
def test_options_written_as_flags_are_read_as_the_same_options(wanted):
    of_membership = {"join_window": 10.0, "on_join": "wait", "max_node_failures": 2, "node_check_timeout": 60.0}
    argv = [f"--{name}={text}" for name, text in rendered(wanted) if name not in of_membership]
    defaults = {name + "_s" * (type(value) is float): value for name, value in of_membership.items()}
    assert resolve([*argv, "--", *wanted.program], {}).options == replace(wanted, **defaults)


@settings(deadline=None)
@given(every_option(), st.sampled_from([prefix for prefix in PREFIXES if not prefix.names]))
def test_options_written_as_variables_are_read_as_the_same_options(wanted, prefix):
    environ = {prefix.text + name.upper(): text for name, text in rendered(wanted)}
    assert resolve(["--", *wanted.program], environ).options == wanted


def test_torch_elastics_prefix_is_for_the_shutdown_timeout_alone():
    environ = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "3", "TORCH_ELASTIC_LIVE": "foo", "TORCH_ELASTIC_GRACE": "4"}
    assert resolve(["true"], environ).options.grace_s == 3


@given(programs)
def test_the_program_and_its_words_are_never_touched(program):
    assert resolve(["--nnodes=2", "--", *program], {}).options.program == program
    if program[0][:1] != "-" or program[0] == "-":
        assert resolve(["--nnodes", "2", *program], {}).options.program == program


@pytest.mark.parametrize("name", ["help", "helpfull", "version"])
def test_a_question_comes_back_without_options(name):
    request = resolve([f"--{name}"], {})
    assert (request.question, request.options) == (name, None)


def test_the_command_line_beats_our_variables_and_those_beat_torchruns(tmp_path):
    file = tmp_path / "f"
    file.write_text("--nnodes=5")
    both = {"INFINI_RUN_NNODES": "3", "PET_NNODES": "4"}
    assert options(PET_NNODES="4").nnodes == 4
    assert options(**both).nnodes == 3
    assert options("--nnodes=2", **both).nnodes == 2
    assert options("--nnodes=2", f"--flagfile={file}", **both).nnodes == 5
    assert options(f"--flagfile={file}", "--nnodes=2", **both).nnodes == 2
    assert options(INFINI_RUN_NNODES="", PET_NNODES="").nnodes == 1


def test_what_kubeflow_sets_is_understood():
    got = options(
        PET_NNODES="2",
        PET_NPROC_PER_NODE="auto",
        PET_NODE_RANK="1",
        PET_MASTER_ADDR="job-0",
        PET_MASTER_PORT="23456",
    )
    assert (got.nnodes, got.nproc_per_node, got.node_rank) == (2, "auto", 1)
    assert (got.master_addr, got.master_port, got.rdzv_explicit) == ("job-0", 23456, True)


def test_an_endpoint_agrees_with_the_address_and_port_that_say_the_same():
    got = options("--rdzv_endpoint=[::1]:5", "--master_addr=::1", "--master_port=5")
    assert (got.master_addr, got.master_port) == ("::1", 5)


def test_of_an_endpoint_and_an_address_the_higher_authority_is_right():
    assert options("--rdzv_endpoint=a:5", PET_MASTER_ADDR="b", PET_MASTER_PORT="6").master_addr == "a"
    got = options("--master_port=6", PET_RDZV_ENDPOINT="a:5")
    assert (got.master_addr, got.master_port) == ("a", 6)


def test_a_port_nobody_named_is_free_where_it_need_not_be_known():
    assert options("--standalone").master_port == 0
    assert options("--rdzv_backend=c10d").master_port == 0
    assert options("--rdzv_backend=c10d", "--rdzv_endpoint=h:5").master_port == 5
    assert options("--rdzv_backend=c10d", "--rdzv_endpoint=h").master_port == 29400
    assert options("--rdzv_endpoint=[::1]", PET_RDZV_BACKEND="c10d").master_port == 29400
    assert options("--rdzv_backend=c10d", "--nnodes=2", "--node_rank=0").master_port == 29500
    assert options("--rdzv_backend=static").master_port == 29500


def test_standalone_is_one_node_whatever_a_lower_authority_says():
    kubeflow = {
        "PET_NNODES": "2",
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "job-0",
        "PET_MASTER_PORT": "23456",
    }
    got = options("--standalone", **kubeflow)
    assert (got.nnodes, got.node_rank, got.master_addr, got.master_port) == (1, 0, "127.0.0.1", 0)
    assert (got.standalone, got.rdzv_explicit) == (True, False)
    got = options("--nnodes=2", PET_STANDALONE="1")
    assert (got.nnodes, got.standalone, got.master_port) == (2, False, 29500)


def test_a_module_and_no_python_from_two_authorities_is_no_contradiction():
    assert options("-m", PET_NO_PYTHON="1").no_python is False
    assert options("--no_python", PET_MODULE="1").module is False


def test_the_console_is_prefixed_where_there_is_a_log_directory():
    assert options("--log_dir=x").console == "prefix"
    assert options("--log_dir=x", "--console=inherit").console == "inherit"
    assert options("--log_dir=x", PET_CONSOLE="none").console == "none"
    assert options("--log_dir=x", "--console=auto").console == "prefix"
    assert options("--log_dir=").console == "auto"


def test_torchruns_flags_without_meaning_are_accepted():
    got = options(
        "--rdzv-backend=c10d",
        "--rdzv_id=7",
        "--rdzv-conf=timeout=3,a=b",
        "--role=trainer",
        "--monitor-interval=0.1",
        "--start_method=spawn",
        "--event_log_handler=null",
        "--local-addr=10.0.0.1",
        "--signals-to-handle=SIGTERM,SIGINT",
        "--shutdown_timeout=3",
        "--nnodes=1:1",
        "--run_path=false",
        "--novirtual_local_rank",
        "--max-restarts=0",
    )
    assert (got.run_id, got.role, got.grace_s, got.nnodes, got.master_port) == ("7", "trainer", 3.0, 1, 0)


def test_reading_a_command_line_imports_nothing_heavy():
    heavy = {
        "argparse",
        "re",
        "typing",
        "dataclasses",
        "enum",
        "signal",
        "json",
        "pathlib",
        "difflib",
        "inspect",
    }
    code = """
import sys
sys.path.insert(0, sys.argv[1])
from infini_run.options.options import resolve
resolve(["--nnodes=2", "--log-dir=x", "program", "--x"], {"PET_NODE_RANK": "1"})
print(*sys.modules)
"""
    root = os.path.dirname(infini_run.__path__[0])
    done = subprocess.run([sys.executable, "-S", "-c", code, root], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert loaded.isdisjoint(heavy)
    assert {name for name in loaded if name.startswith("infini_run.")} == {
        f"infini_run.{name}"
        for name in (
            "errors",
            "options",
            "options.grammar",
            "options.launch_options",
            "value_types",
            "options.table",
            "options.options",
            "record",
        )
    }
