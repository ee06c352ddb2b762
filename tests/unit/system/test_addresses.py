"""Which addresses never leave their machine."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infini_run.system.addresses import unreachable_reason

HOSTS = """127.0.0.1 localhost
127.0.1.1 Node0.example node0   # Debian
::1 localhost ip6-localhost
10.0.0.2 node1
127.0.0.1 node2 # and
10.0.0.3 node2
fe80::2 node3
"""


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("127.0.0.1", "127.0.0.1 is a loopback address"),
        ("127.8.8.8", "a loopback address"),
        ("::1", "a loopback address"),
        ("::ffff:127.0.0.1", "a loopback address"),
        ("0.0.0.0", "the address of every interface"),
        ("::", "the address of every interface"),
        ("169.254.1.2", "a link-local address"),
        ("fe80::1", "a link-local address"),
        ("fe80::1%eth0", "a link-local address"),
        ("febf::1", "a link-local address"),
        ("localhost", "the loopback name of every machine"),
        ("LocalHost.", "the loopback name of every machine"),
        ("db.localhost", "the loopback name of every machine"),
        ("node0", "node0 is 127.0.1.1 in /etc/hosts, a loopback address"),
        ("NODE0.example.", "is 127.0.1.1 in /etc/hosts"),
        ("node3", "node3 is fe80::2 in /etc/hosts, a link-local address"),
        ("ip6-localhost", "is ::1 in /etc/hosts"),
    ],
)
def test_what_stays_on_its_machine_is_named(address, why):
    assert why in unreachable_reason(address, HOSTS)


@pytest.mark.parametrize(
    "address", ["node1", "node2", "elsewhere", "10.0.0.1", "fec0::1", "2001:db8::1", "128.0.0.1", "a\0b"]
)
def test_what_others_may_reach_is_not(address):
    assert unreachable_reason(address, HOSTS) == ""


@given(st.ip_addresses())
def test_the_numbers_are_read_as_the_standard_library_reads_them(address):
    plain = getattr(address, "ipv4_mapped", None) or address
    expected = plain.is_loopback or plain.is_unspecified or plain.is_link_local
    assert bool(unreachable_reason(str(address), "")) == expected
    assert isinstance(address, (ipaddress.IPv4Address, ipaddress.IPv6Address))


@given(st.text(), st.text())
def test_no_text_is_more_than_a_name(address, hosts):
    assert isinstance(unreachable_reason(address, hosts), str)
