"""The protocol: what one side writes the other reads, and nothing else is read (I8)."""

from __future__ import annotations

import typing

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hisparse_service.contract import errors, limits, messages
from hisparse_service.contract.errors import HiSparseError, MalformedMessage, MessageTooLarge
from hisparse_service.contract.messages import (
    REQUEST_TYPES,
    ErrorReply,
    Hello,
    Lookup,
    MirrorBatch,
    Ping,
    decode_reply,
    decode_request,
    encode,
    raise_for_error,
)

u64 = st.integers(0, 2**64 - 1)
text = st.text(max_size=20)
BY_TYPE = {
    messages.U16: st.integers(0, 2**16 - 1),
    messages.U32: st.integers(0, 2**32 - 1),
    messages.U64: u64,
    messages.Text: text,
    messages.Fingerprint: st.binary(min_size=16, max_size=16),
    messages.KeySpace: st.binary(min_size=8, max_size=8),
    messages.Blocks: st.binary(max_size=40),
    messages.Checksums: st.binary(max_size=40),
    messages.Keys: st.binary(max_size=40),
    messages.EventHandles: st.binary(max_size=40),
    messages.NumBlocks: st.integers(1, limits.MAX_BLOCKS_PER_BACKING),
    messages.NumReserve: st.integers(1, limits.MAX_RESERVE_BLOCKS),
    messages.LeaseIds: st.lists(u64, max_size=5),
}


def strategy_for(annotation):
    if annotation in BY_TYPE:
        return BY_TYPE[annotation]
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return structs(annotation)
    base = annotation.__origin__ if hasattr(annotation, "__metadata__") else annotation
    if typing.get_origin(base) is list:
        return st.lists(strategy_for(typing.get_args(base)[0]), max_size=3)
    if typing.get_origin(base) is dict:
        return st.dictionaries(text, st.floats(0, 1e18), max_size=3)
    if typing.get_origin(base) is typing.Literal:
        return st.sampled_from(typing.get_args(base))
    return {
        bool: st.booleans(),
        float: st.floats(0, 86_400),
        bytes: st.binary(max_size=40),
        int: st.integers(1, 1_000),
    }[base]


def structs(struct_type):
    hints = typing.get_type_hints(struct_type, include_extras=True)
    fields = {name: strategy_for(hints[name]) for name in struct_type.__struct_fields__}
    return st.builds(struct_type, **fields)


requests = st.one_of([structs(request_type) for request_type in REQUEST_TYPES.values()])


@given(requests)
def test_every_request_survives_the_wire(request):
    assert decode_request(encode(request)) == request


@given(st.binary(max_size=200))
def test_i8_random_bytes_are_refused_by_type(data):
    try:
        request = decode_request(data)
    except MalformedMessage:
        return
    assert encode(request)


@given(requests, st.data())
def test_i8_a_truncated_or_extended_message_is_refused(request, data):
    frame = encode(request)
    cut = data.draw(st.integers(0, len(frame) - 1))
    with pytest.raises(MalformedMessage):
        decode_request(frame[:cut])
    with pytest.raises(MalformedMessage):
        decode_request(frame + b"\x00")


class Evil:
    def __reduce__(self):
        return (exec, ("raise SystemExit",))


@pytest.mark.parametrize(
    "fields",
    [
        [],
        [2],
        {"tag": 2},
        [2, "one"],
        [2, -1],
        [77, 1],
        [True, 1],
        [20, 1, 70_000, 0, 1],
        [20, 1, 1, 0, 0],
        [20, 1, 1, 0, limits.MAX_RESERVE_BLOCKS + 1],
        [21, 1, 1, 0, b"short", b""],
        [10, 1, b"short", "name", b""],
        [1, 1, 1, 1, "x" * 2_000, "", 0, 1, ""],
        [20, 1, 1.5, 0, 1],
        [27, 1, [0] * (limits.MAX_LIST_ITEMS + 1)],
        [2, 1, [[[[[[1]]]]]]],
        [2, 1, [], {"hits": float("nan")}],
        [44, 1, True, float("nan")],
        [44, 1, True, float("inf")],
    ],
    ids=repr,
)
def test_i8_fields_out_of_type_or_range_are_refused(fields):
    with pytest.raises(MalformedMessage) as caught:
        decode_request(msgpack.packb(fields))
    assert caught.value.remedy


def test_i8_extension_types_are_not_decoded():
    """An ext type is how MessagePack would carry objects; none is ever made."""
    frame = msgpack.packb([2, 1, msgpack.ExtType(5, b"payload")])
    with pytest.raises(MalformedMessage):
        decode_request(frame)


def test_a_refused_message_still_tells_which_request_it_was():
    with pytest.raises(MalformedMessage) as caught:
        decode_request(msgpack.packb([20, 41, "not a namespace", 0, 1]))
    assert caught.value.details["request_id"] == 41
    assert "Reserve" in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ([20, 1, 0, 0, 0], "`num_blocks`"),
        ([1, 1, 1, 1, "x" * 2000, "", 0, 1, ""], "`client_name`"),
        ([24, 1, 1, bytes(8), [[1, 2, b""]]], "`enqueued[0][1]`"),
        ([20, 1, 0], "Reserve"),
    ],
    ids=["out_of_range", "too_long", "nested", "missing"],
)
def test_a_field_that_is_refused_is_named(fields, named):
    """`$[4]` says nothing to whoever called reserve(0)."""
    with pytest.raises(MalformedMessage) as caught:
        decode_request(msgpack.packb(fields))
    assert named in caught.value.message
    assert "$" not in caught.value.message
    assert "protocol" not in caught.value.remedy


def test_a_message_above_the_limit_names_both_sizes():
    frame = bytes(limits.MAX_MESSAGE_BYTES + 1)
    with pytest.raises(MessageTooLarge) as caught:
        decode_request(frame)
    assert caught.value.details["message_bytes"] == len(frame)
    assert str(limits.MAX_MESSAGE_BYTES) in str(caught.value)


def test_the_longest_lookup_fits_in_a_message():
    keys = bytes(limits.MAX_KEYS * limits.BLOCK_KEY_BYTES)
    lookup = Lookup(1, 1, 0, bytes(8), keys)
    assert decode_request(encode(lookup)) == lookup
    too_long = encode(Lookup(1, 1, 0, bytes(8), keys + bytes(16)))
    with pytest.raises(MalformedMessage):
        decode_request(too_long)


def test_fields_that_a_newer_peer_appends_are_ignored():
    fields = msgpack.unpackb(encode(Hello(1, 1, 9, "engine", "g", 0, 1, "", False)))
    assert decode_request(msgpack.packb([*fields, "newer"])).client_name == "engine"


def test_fields_that_an_older_peer_leaves_out_take_their_defaults():
    assert decode_request(msgpack.packb([2, 7])) == Ping(7)
    assert decode_request(msgpack.packb([24, 7, 1, bytes(8)])) == MirrorBatch(7, 1, bytes(8))


@pytest.mark.parametrize("code", sorted(HiSparseError.registry))
def test_every_error_crosses_the_wire_as_itself(code):
    error = HiSparseError.registry[code]("what", remedy="do", needed=5, free=2)
    reply = decode_reply(encode(messages.error_reply(3, 9, error)))
    assert isinstance(reply, ErrorReply)
    with pytest.raises(HiSparseError.registry[code]) as caught:
        raise_for_error(reply)
    assert type(caught.value) is type(error)
    assert (caught.value.message, caught.value.remedy) == ("what", "do")
    assert caught.value.details == {"needed": 5, "free": 2}


def test_an_error_code_of_a_newer_daemon_is_kept_in_words():
    error = errors.from_wire("FluxError", "flux is low", "add flux")
    assert type(error) is HiSparseError
    assert str(error) == "FluxError: flux is low. add flux"


def test_replies_that_are_none_are_refused():
    for frame in (b"", b"\xc1", msgpack.packb([2]), msgpack.packb([999, 1, 1])):
        with pytest.raises(MalformedMessage):
            decode_reply(frame)
        with pytest.raises(MalformedMessage):
            messages.decode_event(frame)


def test_raw_arrays_are_checked_for_whole_values():
    assert messages.u32_array(b"\x01\0\0\0\x02\0\0\0", what="blocks").tolist() == [1, 2]
    for reader in (messages.u32_array, messages.u64_array):
        with pytest.raises(MalformedMessage, match="blocks: 5 bytes"):
            reader(bytes(5), what="blocks")
    with pytest.raises(MalformedMessage, match="17 bytes"):
        messages.num_keys(bytes(17))


def test_tags_are_unique_over_requests_and_over_replies():
    reply_types = typing.get_args(messages.AnyReply)
    tags = [reply.__struct_config__.tag for reply in reply_types]
    assert len(set(tags)) == len(tags)
    assert len(REQUEST_TYPES) == 30
