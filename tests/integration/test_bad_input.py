"""Bad input over a real socket: each has its typed error, changes nothing, hurts nobody else."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

import msgpack
import pytest
import zmq
from helpers import (
    FINGERPRINT,
    GEOMETRY,
    KEY_SPACE,
    OTHER_GEOMETRY,
    DaemonProcess,
    RawClient,
    Resources,
    keys_of,
    unique_instance,
    wait_until,
)

from hisparse_service.contract import limits
from hisparse_service.contract import messages as m
from hisparse_service.contract.errors import (
    CapacityError,
    ForeignKeys,
    GeometryError,
    GeometryMismatch,
    IllegalTransition,
    LeaseLost,
    NotAuthorised,
    NotHeld,
    ProtocolMismatch,
    PublishOutOfOrder,
    StaleBlock,
    UnknownSession,
    UsageError,
    WriterTaken,
)
from hisparse_service.contract.geometry import encode_geometry

Connect = Callable[..., RawClient]


# --- sessions ---------------------------------------------------------------------------------


def test_an_unknown_session_is_told_to_say_hello(connect: Connect) -> None:
    client = connect(greet=False)
    for request in (m.Ping, m.Status, m.Bye):
        with pytest.raises(UnknownSession, match="Hello"):
            client.ask(m.Reply, request)
    assert client.hello().session_id > 0


def test_after_bye_the_session_is_unknown(connect: Connect) -> None:
    client = connect()
    client.ask(m.Done, m.Bye)
    with pytest.raises(UnknownSession):
        client.ask(m.Pong, m.Ping)


def test_a_version_mismatch_names_both_ranges(connect: Connect) -> None:
    client = connect(greet=False)
    low = limits.PROTOCOL_MAX + 1
    with pytest.raises(ProtocolMismatch) as caught:
        client.ask(m.HelloReply, m.Hello, low, low + 3, "new", "", 0, 1, "")
    assert caught.value.details == {
        "client_min": low, "client_max": low + 3,
        "daemon_min": limits.PROTOCOL_MIN, "daemon_max": limits.PROTOCOL_MAX,
    }  # fmt: skip


def test_a_repeated_hello_keeps_the_session_and_another_identity_is_refused(
    connect: Connect,
) -> None:
    client = connect(group="g")
    first = client.session_id
    assert client.hello(group="g").session_id == first
    with pytest.raises(UsageError, match="session"):
        client.hello(group="other")


def test_an_operator_may_not_hold_blocks(connect: Connect) -> None:
    namespace = connect().open()
    operator = connect(operator=True)
    with pytest.raises(NotAuthorised):
        operator.ask(m.BlocksReply, m.Reserve, namespace, 0, 1)


# --- frames -----------------------------------------------------------------------------------

PING = m.encode(m.Ping(7))
MALFORMED = {
    "empty": b"",
    "not_messagepack": b"\xc1\xc1\xc1",
    "truncated": PING[:-1],
    "trailing_bytes": PING + b"\x00",
    "not_an_array": msgpack.packb({"tag": 2}),
    "no_fields": msgpack.packb([2]),
    "unknown_tag": msgpack.packb([77, 7]),
    "tag_of_the_wrong_type": msgpack.packb(["2", 7]),
    "request_id_of_the_wrong_type": msgpack.packb([2, "seven"]),
    "negative_request_id": msgpack.packb([2, -7]),
    "field_of_the_wrong_type": msgpack.packb([20, 7, "one", 0, 1]),
    "field_out_of_range": msgpack.packb([20, 7, 1, 0, 0]),
    "too_few_fields": msgpack.packb([20, 7, 1]),
    "a_reply": m.encode(m.Pong(7, 1, 1, [])),
    "extension_type": msgpack.packb([2, 7, msgpack.ExtType(1, b"x" * 9)]),
    "deeply_nested": b"\x91" * 5_000 + b"\x01",
    "array_length_of_4_gib": b"\xdd\xff\xff\xff\xff\x02\x07",
    "bin_length_of_4_gib": b"\x92\x02\xc6\xff\xff\xff\xff",
    "too_many_lease_ids": msgpack.packb([2, 7, list(range(limits.MAX_LIST_ITEMS + 1))]),
    "text_too_long": msgpack.packb([1, 7, 1, 1, "n" * (limits.MAX_TEXT_BYTES + 1), "", 0, 1, ""]),
    "pickle": b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.",
}


@pytest.mark.parametrize("frame", MALFORMED.values(), ids=MALFORMED.keys())
def test_i8_a_malformed_frame_is_answered_and_the_session_lives(
    connect: Connect, frame: bytes
) -> None:
    client = connect()
    client.send_frames(frame)
    assert client.receive_error().code == "MalformedMessage"
    assert client.ask(m.Pong, m.Ping).epoch == client.epoch


def test_a_malformed_request_is_answered_with_its_id(connect: Connect) -> None:
    client = connect()
    client.send_frames(msgpack.packb([20, 4711, "one", 0, 1]))
    assert client.receive_error().request_id == 4711


def test_a_message_too_long_names_the_limit(connect: Connect) -> None:
    client = connect()
    client.send_frames(bytes(limits.MAX_MESSAGE_BYTES + 1))
    error = client.receive_error()
    assert error.code == "MessageTooLarge"
    assert error.details["limit_bytes"] == limits.MAX_MESSAGE_BYTES
    assert error.details["message_bytes"] == limits.MAX_MESSAGE_BYTES + 1
    client.ask(m.Pong, m.Ping)


def test_a_message_beyond_the_frame_limit_costs_only_its_sender(connect: Connect) -> None:
    greedy, other = connect(), connect()
    greedy.send_frames(bytes(limits.MAX_FRAME_BYTES + 1))
    status = other.ask(m.StatusReply, m.Status)
    wait_until(
        lambda: other.ask(m.StatusReply, m.Status).status["sessions"]["workers"] == 1,
        what="the greedy client's connection is dropped",
    )
    assert status.epoch == other.epoch


@pytest.mark.parametrize("frames", [(PING, PING), (b"", PING), (PING, b"", b""), (b"x",) * 50])
def test_a_wrong_number_of_frames_is_answered(connect: Connect, frames: tuple[bytes, ...]) -> None:
    client = connect()
    client.send_frames(*frames)
    error = client.receive_error()
    assert error.code == "MalformedMessage"
    assert error.details["num_frames"] == len(frames)
    client.ask(m.Pong, m.Ping)


def test_i8_garbage_before_hello_makes_no_session(connect: Connect) -> None:
    stranger, client = connect(greet=False), connect()
    for frame in MALFORMED.values():
        stranger.send_frames(frame)
        assert stranger.receive_error().code == "MalformedMessage"
    assert client.ask(m.ListReply, m.Sessions).total == 1


def test_i8_bytes_that_are_no_zmtp_are_ignored(daemon: DaemonProcess, connect: Connect) -> None:
    import socket

    client = connect()
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"\xff" + bytes(8) + b"\x7f"):
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(str(daemon.runtime_dir / "control.sock"))
            raw.sendall(garbage)
        client.ask(m.Pong, m.Ping)


def test_i8_a_peer_of_zmtp_1_has_no_credentials_and_ends_nobody(
    daemon: DaemonProcess, connect: Connect
) -> None:
    """Its frames have no properties: asked who sent them, libzmq answers with an error."""
    import socket

    client = connect()
    hello = m.encode(
        m.Hello(1, limits.PROTOCOL_MIN, limits.PROTOCOL_MAX, "old", "", 0, 1, "", False)
    )
    identity = b"\x01\x00"
    one, two = b"\x02\x00x", b"\x02\x01x\x02\x00y"
    greeting = bytes([len(hello) + 1, 0]) + hello
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(str(daemon.runtime_dir / "control.sock"))
        raw.sendall(identity + one + two + greeting)
        wait_until(lambda: "hello_refused" in daemon.log)
    client.ask(m.Pong, m.Ping)
    assert "NotAuthorised" in daemon.log
    assert "unexpected_error" not in daemon.log
    assert client.ask(m.StatusReply, m.Status).status["malformed"] == 2


# --- geometry and backing ---------------------------------------------------------------------


def test_attach_with_another_geometry_is_refused(connect: Connect) -> None:
    first, second = connect(), connect()
    first.open()
    with pytest.raises(GeometryMismatch, match="another geometry"):
        second.ask(
            m.NamespaceReply, m.OpenNamespace, FINGERPRINT, "test",
            encode_geometry(OTHER_GEOMETRY),
        )  # fmt: skip


def test_a_larger_backing_than_there_is_is_refused(connect: Connect) -> None:
    client = connect()
    namespace = client.open(64)
    with pytest.raises(GeometryMismatch, match="64 blocks"):
        client.ask(m.BackingReply, m.AllocateBacking, namespace, 65)
    assert client.ask(m.BackingReply, m.AllocateBacking, namespace, 10).num_blocks == 64


def test_rows_that_are_no_multiple_of_16_bytes_are_refused(connect: Connect) -> None:
    # Packed without the check that a client's own code makes first.
    fields = list(msgpack.unpackb(encode_geometry(GEOMETRY)))
    assert fields[-1] == [[1, 1, 16]], fields
    bad = msgpack.packb([*fields[:-1], [[1, 1, 24]]])
    client = connect()
    with pytest.raises(GeometryError, match="16"):
        client.ask(m.NamespaceReply, m.OpenNamespace, FINGERPRINT, "test", bad)


@pytest.mark.parametrize("blob", [b"", b"\xc1", msgpack.packb([1, 2, 3]), os.urandom(300)])
def test_i8_a_geometry_that_is_none_is_refused(connect: Connect, blob: bytes) -> None:
    client = connect()
    client.send(m.OpenNamespace, FINGERPRINT, "test", blob)
    assert client.receive_error().code in ("GeometryError", "MalformedMessage")
    client.ask(m.Pong, m.Ping)


def test_a_backing_that_does_not_fit_names_what_would(connect: Connect) -> None:
    client = connect()
    reply = client.ask(
        m.NamespaceReply, m.OpenNamespace, FINGERPRINT, "test", encode_geometry(GEOMETRY)
    )
    with pytest.raises(CapacityError) as caught:
        client.ask(m.BackingReply, m.AllocateBacking, reply.namespace_id, 1_000_000)
    free = int(caught.value.details["free"])
    assert (
        client.ask(m.BackingReply, m.AllocateBacking, reply.namespace_id, free).num_blocks == free
    )


def test_an_unknown_namespace_is_refused(connect: Connect) -> None:
    client = connect()
    with pytest.raises(UsageError, match="namespace"):
        client.ask(m.BackingReply, m.AllocateBacking, 9, 10)
    with pytest.raises(UsageError):
        client.ask(m.BlocksReply, m.Reserve, 9, 0, 1)


def test_blocks_are_refused_before_there_is_a_backing(connect: Connect) -> None:
    client = connect()
    reply = client.ask(
        m.NamespaceReply, m.OpenNamespace, FINGERPRINT, "test", encode_geometry(GEOMETRY)
    )
    with pytest.raises(UsageError):
        client.ask(m.BlocksReply, m.Reserve, reply.namespace_id, 0, 1)
    with pytest.raises(UsageError):
        client.ask(m.BlocksReply, m.Lookup, reply.namespace_id, 0, KEY_SPACE, keys_of(1))


# --- blocks -----------------------------------------------------------------------------------


def test_i1_a_second_writer_in_a_group_is_refused(connect: Connect) -> None:
    rank0, rank1 = connect(group="tp", rank=0), connect(group="tp", rank=1)
    namespace = rank0.open()
    rank1.open()
    rank0.ask(m.LeaseReply, m.TakeWriter, namespace)
    with pytest.raises(WriterTaken, match="rank 0"):
        rank1.ask(m.LeaseReply, m.TakeWriter, namespace)
    with pytest.raises(LeaseLost):
        rank1.ask(m.BlocksReply, m.Reserve, namespace, 0, 1)
    rank0.ask(m.Done, m.YieldWriter, namespace)
    rank1.ask(m.LeaseReply, m.TakeWriter, namespace)


@pytest.mark.parametrize("phase", ["enqueued", "completed"])
def test_i1_a_mirror_into_another_sessions_block_is_refused(connect: Connect, phase: str) -> None:
    owner, thief = connect(), connect()
    namespace = owner.open()
    thief.open()
    theirs = owner.ask(m.BlocksReply, m.Reserve, namespace, 0, 1)
    own = thief.ask(m.BlocksReply, m.Reserve, namespace, 0, 1)
    enqueued = m.EnqueuedItem(own.lease_id, theirs.blocks, theirs.generations)
    completed = m.CompletedItem(own.lease_id, 0, 0, theirs.blocks, theirs.generations, keys_of(1))
    batch = ([enqueued], []) if phase == "enqueued" else ([], [completed])
    before = owner.counts(namespace)
    with pytest.raises(NotHeld):
        thief.ask(m.MirrorReply, m.MirrorBatch, namespace, KEY_SPACE, *batch)
    assert owner.counts(namespace) == before


def test_i1_another_sessions_lease_is_refused(connect: Connect) -> None:
    owner, thief = connect(), connect()
    namespace = owner.open()
    thief.open()
    theirs = owner.ask(m.BlocksReply, m.Reserve, namespace, 0, 1)
    item = m.CompletedItem(theirs.lease_id, 0, 0, theirs.blocks, theirs.generations, keys_of(1))
    with pytest.raises(LeaseLost):
        thief.ask(m.MirrorReply, m.MirrorBatch, namespace, KEY_SPACE, [], [item])


def test_lookup_and_publication_with_foreign_keys_are_refused(connect: Connect) -> None:
    client = connect()
    namespace = client.open()
    foreign = bytes(limits.KEY_SPACE_BYTES)
    with pytest.raises(ForeignKeys):
        client.ask(m.BlocksReply, m.Lookup, namespace, 0, foreign, keys_of(1))
    got = client.ask(m.BlocksReply, m.Reserve, namespace, 0, 1)
    item = m.CompletedItem(got.lease_id, 0, 0, got.blocks, got.generations, keys_of(1))
    with pytest.raises(ForeignKeys):
        client.ask(m.MirrorReply, m.MirrorBatch, namespace, foreign, [], [item])
    assert client.counts(namespace)["reserved"] == 1


def test_free_of_a_block_not_held_changes_nothing(connect: Connect) -> None:
    client = connect()
    namespace = client.open()
    got = client.ask(m.BlocksReply, m.Reserve, namespace, 0, 1)
    before = client.counts(namespace)
    for block in (0, 50, 2**32 - 1):
        with pytest.raises((NotHeld, UsageError)):
            client.ask(m.Done, m.Free, namespace, got.lease_id, struct.pack("<I", block))
    assert client.counts(namespace) == before


def test_i2_a_double_publish_is_refused(connect: Connect) -> None:
    client = connect()
    namespace = client.open()
    got = client.publish(namespace, keys_of(1))
    item = m.CompletedItem(got.lease_id, 0, 0, got.blocks, got.generations, keys_of(2))
    with pytest.raises(IllegalTransition):
        client.ask(m.MirrorReply, m.MirrorBatch, namespace, KEY_SPACE, [], [item])
    found = client.ask(m.BlocksReply, m.Lookup, namespace, 0, KEY_SPACE, keys_of(2))
    assert found.blocks == b""


def test_i2_a_publish_out_of_order_is_refused(connect: Connect) -> None:
    client = connect()
    namespace = client.open()
    got = client.ask(m.BlocksReply, m.Reserve, namespace, 0, 2)
    parent, parent_generation = (struct.unpack("<I", part[:4])[0] for part in
                                 (got.blocks, got.generations))  # fmt: skip
    item = m.CompletedItem(
        got.lease_id, parent, parent_generation, got.blocks[4:], got.generations[4:], keys_of(2)
    )
    with pytest.raises(PublishOutOfOrder):
        client.ask(m.MirrorReply, m.MirrorBatch, namespace, KEY_SPACE, [], [item])
    assert client.counts(namespace)["reserved"] == 2


def test_i3_a_stale_generation_is_refused(connect: Connect) -> None:
    client = connect()
    namespace = client.open()
    got = client.publish(namespace, keys_of(1))
    (generation,) = struct.unpack("<I", got.generations)
    stale = struct.pack("<I", generation + 1)
    with pytest.raises(StaleBlock):
        client.ask(m.BlocksReply, m.Pin, namespace, 0, got.blocks, stale)


@pytest.mark.parametrize(
    ("blocks", "generations", "keys"),
    [(b"\1\0\0", b"\1\0\0\0", keys_of(1)), (b"\1\0\0\0", b"", keys_of(1)),
     (b"\1\0\0\0", b"\1\0\0\0", b"short"), (b"\1\0\0\0" * 2, b"\1\0\0\0" * 2, keys_of(1))],
    ids=["torn_block", "no_generation", "torn_key", "fewer_keys"],
)  # fmt: skip
def test_i8_arrays_of_unequal_or_torn_length_are_refused(
    connect: Connect, blocks: bytes, generations: bytes, keys: bytes
) -> None:
    client = connect()
    namespace = client.open()
    got = client.ask(m.BlocksReply, m.Reserve, namespace, 0, 2)
    item = m.CompletedItem(got.lease_id, 0, 0, blocks, generations, keys)
    client.send(m.MirrorBatch, namespace, KEY_SPACE, [], [item])
    assert client.receive_error().code in (
        "MalformedMessage", "UsageError", "NotHeld", "StaleBlock",
    )  # fmt: skip
    assert client.counts(namespace)["reserved"] == 2


# --- a daemon that cannot start ---------------------------------------------------------------


def _refused(daemon: DaemonProcess, code: str, *, status: int) -> str:
    assert daemon.process.wait(30) == status, daemon.log
    assert f"{code}: " in daemon.log
    assert "Traceback" not in daemon.log
    return daemon.log


def test_a_runtime_directory_open_to_others_is_refused(
    make_daemon: Callable[..., DaemonProcess], runtime_dir: Path
) -> None:
    (runtime_dir / "run").mkdir(mode=0o755)
    (runtime_dir / "run").chmod(0o755)
    log = _refused(make_daemon(runtime_dir), "RuntimeDirectoryError", status=3)
    assert "chmod 700" in log


def test_a_runtime_directory_that_is_a_link_is_refused(
    make_daemon: Callable[..., DaemonProcess], runtime_dir: Path
) -> None:
    (runtime_dir / "elsewhere").mkdir(mode=0o700)
    (runtime_dir / "run").symlink_to(runtime_dir / "elsewhere")
    _refused(make_daemon(runtime_dir), "RuntimeDirectoryError", status=3)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a directory of another user")
def test_a_runtime_directory_of_another_user_is_refused(
    make_daemon: Callable[..., DaemonProcess], runtime_dir: Path
) -> None:
    (runtime_dir / "run").mkdir(mode=0o700)
    os.chown(runtime_dir / "run", 12345, 12345)
    assert "12345" in _refused(make_daemon(runtime_dir), "RuntimeDirectoryError", status=3)


def test_a_runtime_directory_too_long_for_a_socket_is_refused(
    make_daemon: Callable[..., DaemonProcess], runtime_dir: Path
) -> None:
    daemon = make_daemon(runtime_dir, runtime_dir=str(runtime_dir / ("x" * 100)))
    assert "107" in _refused(daemon, "RuntimeDirectoryError", status=3)


def test_a_second_daemon_on_the_same_directory_is_refused_and_the_first_goes_on(
    daemon: DaemonProcess, connect: Connect, make_daemon: Callable[..., DaemonProcess]
) -> None:
    client = connect()
    second = make_daemon(daemon.directory, instance=unique_instance(), pool_bytes="8MiB")
    assert str(daemon.process.pid) in _refused(second, "RuntimeDirectoryError", status=3)
    client.ask(m.Pong, m.Ping)
    with RawClient(daemon.runtime_dir) as late:
        assert late.hello().epoch == client.epoch


def test_a_pool_name_taken_by_a_foreign_segment_is_refused_and_left_alone(
    make_daemon: Callable[..., DaemonProcess],
) -> None:
    instance = unique_instance()
    foreign = Path(f"/dev/shm/hisparse-{instance}-main")
    foreign.write_bytes(b"somebody else's bytes" * 1000)
    foreign.chmod(0o600)
    try:
        daemon = make_daemon(instance=instance)
        _refused(daemon, "ForeignSegment", status=6)
        assert foreign.read_bytes().startswith(b"somebody else's bytes")
    finally:
        foreign.unlink()


def test_a_pool_larger_than_any_memory_is_refused_with_the_limit(
    make_daemon: Callable[..., DaemonProcess],
) -> None:
    daemon = make_daemon(pool_bytes="60TiB")
    _refused(daemon, "PoolTooLarge", status=3)
    assert daemon.segments == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user")
def test_another_user_may_not_connect(daemon: DaemonProcess, connect: Connect) -> None:
    client = connect()
    # The directory keeps others out; opened up, the socket's filter still does.
    daemon.runtime_dir.chmod(0o711)
    daemon.directory.chmod(0o711)
    (daemon.runtime_dir / "control.sock").chmod(0o777)
    pid = os.fork()
    if pid == 0:
        os.setuid(12345)
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.connect(f"ipc://{daemon.runtime_dir}/control.sock")
        socket.send(m.encode(m.Hello(1, 1, 1, "stranger", "", 0, 1, "")))
        os._exit(1 if socket.poll(1_000) else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert client.ask(m.ListReply, m.Sessions).total == 1


def test_the_resource_check_sees_what_is_left() -> None:
    before = Resources()
    left = Path(f"/dev/shm/hisparse-{unique_instance()}-main")
    left.touch()
    fd = os.open(left, os.O_RDONLY)
    try:
        leaks = Resources().leaked_since(before)
    finally:
        os.close(fd)
        left.unlink()
    assert any(leak.startswith("segment ") for leak in leaks)
    assert any(leak.startswith("descriptor ") for leak in leaks)
