"""What each kind of value may be, as the flags that take it see it."""

from __future__ import annotations

import contextlib
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infini_run.options.options import resolve
from infini_run.value_types import MAX_INT, STDERR, STDOUT, duration, streams_of


def options(*argv, **environ):
    request = resolve([*argv, "program"], environ)
    assert request.question == ""
    return request.options


@pytest.mark.parametrize(
    ("word", "address", "port"),
    [
        ("node0:1", "node0", 1),
        ("[::1]:29400", "::1", 29400),
        ("[fe80::1%eth0]:65535", "fe80::1%eth0", 65535),
        ("localhost:0", "localhost", 0),
    ],
)
def test_an_endpoint_is_a_host_and_a_port(word, address, port):
    got = options(f"--rdzv_endpoint={word}")
    assert (got.master_addr, got.master_port, got.rdzv_explicit) == (address, port, True)


def test_ranks_of_programs_have_names():
    got = resolve(["--ranks_on_console=b:0-1,3,a:2,b:1", "--stdin=a:0", "--program=a", "x"], {}).options
    assert (got.ranks_on_console, got.stdin) == ((3, "b:0", "b:1", "a:2"), "a:0")


def test_ranks_are_lists_and_ranges():
    got = options("--nproc_per_node=8", "--ranks_on_console=0,4-6,5", "--local_ranks_filter=1,0")
    assert (got.ranks_on_console, got.local_ranks_filter) == ((0, 4, 5, 6), (0, 1))
    assert options("--ranks_on_console=all", "--local_ranks_filter=").ranks_on_console is None
    assert options("--nproc_per_node=gpu", "--ranks_on_console=99").ranks_on_console == (99,)


def test_streams_are_chosen_for_all_ranks_or_by_rank():
    got = options("--nproc_per_node=16", "--log_dir=x", "-r", "0:3,10:1", "--tee=2")
    assert [streams_of(got.redirects, rank) for rank in (0, 1, 10)] == [STDOUT | STDERR, 0, STDOUT]
    assert [streams_of(got.tee, rank) for rank in (0, 15)] == [STDERR, STDERR]
    assert streams_of(options("--redirects=0").redirects, 0) == 0


@pytest.mark.parametrize(("word", "reader"), [("rank0", 0), ("3", 3), ("all", "all"), ("none", "none")])
def test_stdin_goes_to_a_rank_to_all_or_to_none(word, reader):
    assert options("--nproc_per_node=4", f"--stdin={word}").stdin == reader


@pytest.mark.parametrize(
    ("word", "seconds"),
    [
        ("0", 0),
        ("10", 10),
        ("0.5", 0.5),
        ("10s", 10),
        ("500ms", 0.5),
        ("2m", 120),
        ("1h", 3600),
        ("1e2", 100),
    ],
)
def test_grace_is_a_time_in_seconds_or_with_its_unit(word, seconds):
    assert options(f"--grace={word}").grace_s == options(f"--shutdown-timeout={word}").grace_s == seconds


@pytest.mark.parametrize(
    ("word", "seconds"),
    [("1d", 86400), ("90min", 5400), ("1h30m", 5400), ("1d2h3m4.5s", 93784.5), ("1h10s", 3610), ("5sec", 5)],
)
def test_a_time_may_have_several_parts_from_the_longest_unit_down(word, seconds):
    assert duration(word) == seconds


@pytest.mark.parametrize(
    "word", ["1h30", "1m1h", "1hh", "h", "30m1h", "1h-30m", "2m500ms", "1h 30m", "1x", "", "m30"]
)
def test_other_orders_and_parts_without_a_unit_are_no_time(word):
    with pytest.raises(ValueError, match="use 10, 10s, 500ms, 2m, 1h30m, or 1d"):
        duration(word)


@given(st.text(st.sampled_from("0123456789.+-eminfhdc s_")))
def test_any_time_is_refused_or_finite_and_not_negative(text):
    with contextlib.suppress(ValueError):
        assert 0 <= duration(text) <= MAX_INT


@pytest.mark.parametrize(
    ("word", "number"),
    [
        ("TERM", 15),
        ("SIGTERM", 15),
        ("sigint", 2),
        ("15", 15),
        ("RTMIN+3", signal.SIGRTMIN + 3),
        ("SIGRTMAX-1", signal.SIGRTMAX - 1),
        ("64", 64),
    ],
)
def test_a_stop_signal_is_a_name_or_a_number(word, number):
    assert options(f"--stop_signal={word}").stop_signal == number


@pytest.mark.parametrize(("word", "value"), [("", "text"), ("=text", "text"), ("=json", "json"), ("=true", "text")])
def test_dry_run_is_text_or_json(word, value):
    assert options("--dry_run" + word).dry_run == value
    assert options("--dry_run" + word, "--nodry_run").dry_run == ""


def test_omp_num_threads_and_export_are_read():
    assert options("--omp_num_threads=auto").omp_num_threads == 0
    assert options("--omp_num_threads=4", "--export=A, B,").export == ("A", "B")
