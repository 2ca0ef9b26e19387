"""Peer addresses are untrusted text (I8), and only allowed users pass."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hisparse_service.contract.errors import NotAuthorised
from hisparse_service.membership.credentials import Authoriser, Credentials, parse_peer_address


@given(uid=st.integers(0, 2**32 - 1), gid=st.integers(0, 2**32 - 1), pid=st.integers(0, 2**31 - 1))
def test_what_libzmq_writes_is_read_back(uid, gid, pid):
    expected = Credentials(uid=uid, gid=gid, pid=pid)
    assert parse_peer_address(f"localhost:{uid}:{gid}:{pid}") == expected


@pytest.mark.parametrize(
    "address",
    [
        "", "localhost", "localhost:1:2", "localhost:1:2:3:4", ":1:2:3", "localhost:-1:2:3",
        "localhost:1:2:3\n", " localhost:1:2:3", "localhost:1:2:", "localhost:+1:2:3",
        "localhost:1:2:4294967296", "localhost:4294967296:2:3", "localhost:1:2:2147483648",
        "localhost:1_0:2:3", "localhost:0x1:2:3", "localhost:\u0661:2:3", "127.0.0.1:5555",
        "[::1]:1:2:3", "localhost:1:2:3.0", "a" * 10_000,
    ],
)  # fmt: skip
def test_i8_anything_else_is_nobody(address):
    with pytest.raises(NotAuthorised):
        parse_peer_address(address)


@given(st.text(max_size=60))
def test_i8_no_text_crashes_the_parser(address):
    try:
        parsed = parse_peer_address(address)
    except NotAuthorised:
        return
    assert address.split(":")[1:] != [] and parsed.pid >= 0  # noqa: PT018


def test_only_allowed_users_may_connect():
    authoriser = Authoriser([1000, 0])
    authoriser.check(Credentials(uid=1000, gid=5, pid=0))
    with pytest.raises(NotAuthorised) as error:
        authoriser.check(Credentials(uid=1001, gid=1000, pid=1))
    assert error.value.details == {"uid": 1001}
    assert "[0, 1000]" in str(error.value)
    with pytest.raises(NotAuthorised):
        Authoriser([]).check(Credentials(uid=0, gid=0, pid=1))
