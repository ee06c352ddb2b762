"""Lists of hosts: what they stand for, what is refused and where, and the way back to short text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infini_run.environments import hostlist
from infini_run.environments.compressed_hostlist import compress
from infini_run.environments.hostlist import (
    Host,
    expand,
    machines,
    parse_hostfile,
    parse_hosts,
    read_hostfile,
    repeats,
)
from infini_run.errors import UsageError


def names(text):
    return [host.name for host in parse_hosts(text)]


# `scontrol show hostnames` of Slurm 22.05 answers the same to those without a number behind the bracket
NODELISTS = [
    ("node[001-003,7],gpu-a[1-2]-x[0-1]", "node001 node002 node003 node7 gpu-a1-x0 gpu-a1-x1 gpu-a2-x0 gpu-a2-x1"),
    ("n1,n[3-4],m", "n1 n3 n4 m"),
    ("node[01-16]", " ".join(f"node{n:02}" for n in range(1, 17))),
    ("n[08-11]", "n08 n09 n10 n11"),
    ("n[98-101]", "n98 n99 n100 n101"),
    ("n[01-100]", " ".join(f"n{n:02}" for n in range(1, 101))),
    ("n[0-0]", "n0"),
    ("a[1-2,9]b", "a1b a2b a9b"),
    (
        "r[1-2]n[1-2].cluster.example",
        "r1n1.cluster.example r1n2.cluster.example r2n1.cluster.example r2n2.cluster.example",
    ),
    ("host", "host"),
    ("10.0.0.[1-2]", "10.0.0.1 10.0.0.2"),
]


@pytest.mark.parametrize(("text", "wanted"), NODELISTS, ids=[text for text, _ in NODELISTS])
def test_a_node_list_stands_for_its_names(text, wanted):
    assert list(expand(text, "LIST")) == names(text) == wanted.split()


HOSTS = [
    ("a,b:4", [Host(name="a"), Host(name="b", slots=4)]),
    (" a , b:4 ", [Host(name="a"), Host(name="b", slots=4)]),
    ("node[1-2]:8", [Host(name="node1", slots=8), Host(name="node2", slots=8)]),
    ("me@a:2,b", [Host(name="a", slots=2, user="me"), Host(name="b")]),
    (
        "[::1]:4,[fe80::1%eth0],me@[::2]",
        [Host(name="::1", slots=4), Host(name="fe80::1%eth0"), Host(name="::2", user="me")],
    ),
    ("me@n[1-2]", [Host(name="n1", user="me"), Host(name="n2", user="me")]),
]


@pytest.mark.parametrize(("text", "wanted"), HOSTS, ids=[text for text, _ in HOSTS])
def test_hosts_have_slots_and_users(text, wanted):
    assert list(parse_hosts(text)) == wanted


def test_a_destination_is_what_ssh_takes():
    assert [host.destination for host in parse_hosts("me@a:2,b,[::1]")] == ["me@a", "b", "::1"]


WRONG = [
    ("", "column 1, '': missing host"),
    ("a,,b", "column 3, ,b: missing host"),
    ("a,", "column 3, '': missing host"),
    ("a:0", "column 3, 0: expected 1 to 4194304 processes"),
    ("b,a:-1", "column 5, -1: expected 1"),
    ("a:", "column 3, '': expected 1"),
    ("a:4x", "column 3, 4x: expected 1"),
    ("a[1-3", "column 2, [1-3: missing ] after this ["),
    ("a,b]", "column 4, ]: missing [ before this ]"),
    ("a[[1]]", "column 3, [1]]: brackets cannot be nested"),
    ("a[]", "column 3, '': expected numbers and ranges in rising order"),
    ("a[1,]", "column 5, '': expected numbers and ranges"),
    ("a[3-1]", "column 3, 3-1: expected numbers and ranges in rising order"),
    ("a[1-01]", "column 3, 1-01: expected numbers and ranges"),
    ("a[1-2-3]", "column 3, 1-2-3: expected numbers and ranges"),
    ("a[x]", "column 3, x: expected numbers and ranges"),
    ("b,node[1-99999999999]", "column 8, 1-99999999999: expected at most 131072 hosts"),
    ("n[1-9999][1-9999]", "column 11, 1-9999: expected at most 131072 hosts"),
    ("a[1-131072],b", "column 13, b: expected at most 131072 hosts"),
    ("a,b,a", "column 5, a: already in the list; use a:N for the number of its processes"),
    ("n[1-3],n2", "column 8, n2: already in the list"),
    ("[::1],[::1]", "column 7, ::1: already in the list; use [::1]:N"),
    ("fe80::1", "column 1, fe80::1: expected brackets around an IPv6 address"),
    ("[::g]", "column 1, [::g]: expected an IPv6 address between these brackets"),
    ("[::1]x", "column 6, x: expected :N after the address"),
    ("a b", "column 2, ' b': expected letters"),
    ("-oProxyCommand", "column 1, -oProxyCommand: host name cannot begin with a dash"),
    ("-l@a", "column 1, -l: user cannot begin with a dash"),
    ("@a", "column 1, '': missing user"),
    ("a;reboot", "column 2, ;reboot: expected letters"),
    ("b\x1b[1]", r"column 2, '\x1b"),
    ("a" * 5000 + "!", "column 5001, !: expected letters"),
]


@pytest.mark.parametrize(("text", "message"), WRONG, ids=[text[:20] for text, _ in WRONG])
def test_a_wrong_list_is_refused_with_its_column(text, message):
    with pytest.raises(UsageError) as caught:
        parse_hosts(text, "--hosts")
    assert message in str(caught.value)
    assert str(caught.value).startswith("--hosts: column ")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 250


def test_a_node_list_has_no_users_and_slots():
    for text in ("a:4", "me@a"):
        with pytest.raises(UsageError, match="LIST: expected a list of names"):
            expand(text, "LIST")


# ---- host files


def test_the_forms_of_a_host_file():
    text = """# the cluster
    node1
    node2:4   # MPICH
    node3 slots=8 max_slots=16
    node4 2
    me@node[5-6] slots=3
    [::1] max-slots=4

    """
    assert list(parse_hostfile(text, "hosts")) == [
        Host(name="node1"),
        Host(name="node2", slots=4),
        Host(name="node3", slots=8),
        Host(name="node4", slots=2),
        Host(name="node5", slots=3, user="me"),
        Host(name="node6", slots=3, user="me"),
        Host(name="::1"),
    ]


@pytest.mark.parametrize(
    ("text", "slots"),
    [
        ("a\na\nb\nb\n", {"a": 2, "b": 2}),
        ("b.example.org\na\nb.example.org\n", {"b.example.org": 2, "a": 1}),
        ("a\na\nb slots=4\n", {"a": 2, "b": 4}),
        ("n[1-2]\nn[1-2]\nn2\n", {"n1": 2, "n2": 3}),
        ("a\nb\n", {"a": 0, "b": 0}),
    ],
)
def test_lines_of_one_host_are_counted(text, slots):
    """The form of PBS_NODEFILE (pbs_attributes(7B), mpiprocs), in the order in which the hosts come first."""
    found = parse_hostfile(text, "hosts")
    assert [(host.name, host.slots) for host in found] == list(slots.items())


WRONG_FILES = [
    ("a\n\nb:x", "hosts:3: x: expected 1"),
    ("a\nb slots=0", "hosts:2: 0: expected 1"),
    ("a slots", "hosts:1: slots: expected 1"),
    ("a cpu=4", "hosts:1: cpu=4: expected only slots=N after a host"),
    ("a:2 slots=4", "hosts:1: slots=4: a has 2 slots already"),
    ("a 2 4", "hosts:1: 4: a has 2 slots already"),
    ("a 2\n#\nb\na", "hosts:4: a is already in line 1; use slots=N for the number of its processes"),
    ("a\na:2", "hosts:2: a is already in line 1"),
    ("a:2\na:2", "hosts:2: a is already in line 1"),
    ("a\nme@a", "hosts:2: a is already in line 1"),
    ("n[1,1]", "hosts:1: n1 is already in line 1"),
    ("a,b", "hosts:1: a,b: expected one host per line"),
    ("n[1-131072]\nb", "hosts:2: expected at most 131072 hosts"),
    ("# nothing\n", "hosts: no host in it"),
    ("", "hosts: no host in it"),
]


@pytest.mark.parametrize(("text", "message"), WRONG_FILES, ids=[repr(text[:20]) for text, _ in WRONG_FILES])
def test_a_wrong_host_file_is_refused_with_its_line(text, message):
    with pytest.raises(UsageError) as caught:
        parse_hostfile(text, "hosts")
    assert str(caught.value).startswith(message)


def test_a_host_file_is_read(tmp_path):
    (tmp_path / "hosts").write_text("a slots=2\n")
    assert read_hostfile(str(tmp_path / "hosts")) == (Host(name="a", slots=2),)
    for path in (tmp_path / "none", tmp_path, f"{tmp_path}/\0"):
        with pytest.raises(UsageError, match=r"^--hostfile=.* cannot be read: "):
            read_hostfile(str(path))


def test_a_file_of_one_line_for_each_process_counts_them():
    hosts = machines(["a", "b", "a", "a"])
    assert hosts == (Host(name="a", slots=3), Host(name="b", slots=1))


# ---- run-length lists


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("8(x2),4", (8, 8, 4)), ("3,1", (3, 1)), ("8,1(x2)", (8, 1, 1)), ("1", (1,)), ("0(x3)", (0, 0, 0))],
)
def test_a_run_length_list_stands_for_its_numbers(text, wanted):
    assert repeats(text, "TASKS") == wanted


@pytest.mark.parametrize(
    ("text", "column"),
    [
        ("", 1),
        ("8(x0)", 1),
        ("1,8(2)", 3),
        ("8(x2", 1),
        ("1,,2", 3),
        ("-1", 1),
        ("1(x99999999999)", 1),
        ("8(x2)[", 1),
    ],
)
def test_a_wrong_run_length_list_is_refused_with_its_column(text, column):
    with pytest.raises(UsageError, match=f"^TASKS: column {column}, "):
        repeats(text, "TASKS")


# ---- for any text


anything = st.text() | st.text(alphabet="ab01-[],:@x() .%\n=#slot")


@given(anything)
def test_any_text_is_hosts_or_one_line_that_says_why_not(text):
    said = []
    for read in (
        lambda: parse_hosts(text),
        lambda: parse_hostfile(text, "file"),
        lambda: repeats(text, "VAR"),
        lambda: expand(text, "VAR"),
    ):
        try:
            assert len(read()) <= hostlist.MAX_HOSTS
        except UsageError as error:
            said.append(str(error))
    assert all(text.isprintable() for text in said)


labels = st.from_regex(r"[a-z][a-z0-9.]{0,3}([0-9]{1,3}){0,2}(-[a-z]{1,2}[0-9]{0,2})?", fullmatch=True)
addresses = st.ip_addresses().map(str)
some = st.lists(labels | addresses | st.integers(0, 30).map("node{:02}".format), unique=True, min_size=1, max_size=40)


@given(some | some.map(sorted))
def test_a_compressed_list_expands_to_the_same_names_in_the_same_order(hosts):
    assert names(compress(hosts)) == hosts


@given(st.integers(1, 12), st.lists(st.tuples(st.integers(0, 999), st.integers(0, 30)), min_size=1, max_size=4))
def test_expanding_and_compressing_again_loses_nothing(width, ranges):
    text = "n[" + ",".join(f"{low:0{width}}-{low + more:0{width}}" for low, more in ranges) + "]x"
    try:
        found = names(text)
    except UsageError:
        assert len({low + k for low, more in ranges for k in range(more + 1)}) < sum(more + 1 for _, more in ranges)
        return
    assert names(compress(found)) == found
    assert len(compress(found)) <= len(text)


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("n1,n2,n3,m07,m08", "n[1-3],m[07-08]"),
        ("node1,node2,node3,node07,node08", "node[1-3,07-08]"),
        ("n9,n10", "n[9-10]"),
        ("n1,n3", "n[1,3]"),
        ("a1-x1,a1-x2,a2-x1", "a1-x[1-2],a2-x1"),
        ("n1.c2.org,n2.c2.org", "n[1-2].c2.org"),
        ("a,b", "a,b"),
        ("n1", "n1"),
    ],
)
def test_a_message_shows_the_short_form(text, short):
    assert compress(text.split(",")) == short
