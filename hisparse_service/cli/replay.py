"""Sends recorded messages to a daemon, with the ids that this daemon gives out.

What a daemon hands out (session, namespace, lease and block ids, generations) differs from one run
to the next: each reply teaches the mapping for the requests that follow. One message at a time, in
the recorded order, each on a connection of its own session. Main thread of a command.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import zmq

from hisparse_service.contract import limits
from hisparse_service.contract import messages as m
from hisparse_service.contract.errors import ServiceUnavailable
from hisparse_service.contract.keys import key_space
from hisparse_service.server.runtime_directory import CONTROL_SOCKET_NAME
from hisparse_service.telemetry.trace_file import Header, Recorded

LEFT_OUT: Final = (
    m.Drain, m.SetLimits, m.Trace, m.Overview, m.Evict, m.ListBlocks, m.AllocateDeviceBacking,
    m.ReleaseDeviceBacking,
)  # fmt: skip
"""Operators' requests: they would stop or change the daemon that is played to. And those that would
take memory of its GPUs."""

BlockId = tuple[int, int, int]
"""(recorded namespace, block, generation)"""


class _UnknownError(Exception):
    """The message names something from before the recording."""


class Replayer:
    """Plays one recording.

    Args:
        directory: The daemon's runtime directory.
        header: Of the recording.
        timeout_s: For each answer.

    Raises:
        ServiceUnavailable: No daemon is there.
    """

    def __init__(self, directory: Path, header: Header, *, timeout_s: float) -> None:
        self._path = directory / CONTROL_SOCKET_NAME
        if not self._path.exists():
            raise ServiceUnavailable(
                f"no daemon answers in {directory}: no socket is there",
                remedy="Start one for the replay: hisparse-service serve --runtime-dir ...",
            )
        self._header = header
        self._timeout_s = timeout_s
        self._context = zmq.Context(io_threads=1)
        self._sockets: dict[int, zmq.Socket[bytes]] = {}
        self._last_id = 0
        self._namespaces: dict[int, tuple[int, bytes]] = {}
        self._leases: dict[int, int] = {0: 0}
        self._blocks: dict[BlockId, tuple[int, int]] = {}
        self._began_s = time.monotonic()
        self._latencies_us: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self._differences: Counter[tuple[str, str, str]] = Counter()
        self.sent = 0
        self.skipped = 0

    def prepare(self) -> None:
        """Make what was there when the recording began: sessions, namespaces, backings."""
        for session in self._header.sessions:
            hello = m.decode_request(session.hello)
            assert isinstance(hello, m.Hello)
            self._greet(session.session_id, hello)
        if self._header.namespaces and not self._sockets:
            hello = m.Hello(0, limits.PROTOCOL_MIN, limits.PROTOCOL_MAX, "replay", "", 0, 1, "")
            self._greet(0, hello)
        for each in self._header.namespaces:
            session_id = next(iter(self._sockets))
            opened = self._ask(
                session_id,
                m.OpenNamespace(0, _other(each.fingerprint), f"replay {each.name}", each.geometry),
            )
            m.raise_for_error(opened)
            assert isinstance(opened, m.NamespaceReply)
            self._namespaces[each.namespace_id] = (
                opened.namespace_id, key_space(_other(each.fingerprint)),
            )  # fmt: skip
            if each.num_blocks:
                m.raise_for_error(
                    self._ask(
                        session_id, m.AllocateBacking(0, opened.namespace_id, each.num_blocks)
                    )
                )
        self._began_s = time.monotonic()

    def play(self, recorded: Recorded, *, speed: float) -> None:
        """Send one message, at its time, and learn from its answer."""
        if isinstance(recorded.request, LEFT_OUT) or _is_operator(recorded.request):
            self.skipped += 1
            return
        if speed > 0:
            due_s = self._began_s + recorded.start_us / 1e6 / speed
            time.sleep(max(0.0, due_s - time.monotonic()))
        request = recorded.request
        if isinstance(request, m.Hello):
            self._greet(recorded.session_id, request)
            self.sent += 1
            return
        try:
            if recorded.session_id not in self._sockets:
                raise _UnknownError
            translated = self._translate(request)
        except _UnknownError:
            self.skipped += 1
            return
        started_ns = time.monotonic_ns()
        reply = self._ask(recorded.session_id, translated)
        elapsed_us = (time.monotonic_ns() - started_ns) // 1000
        name = type(request).__name__
        self._latencies_us[name].append((recorded.duration_us, elapsed_us))
        self.sent += 1
        before, now = _kind(recorded.reply), _kind(reply)
        if before != now:
            self._differences[(name, before, now)] += 1
        else:
            self._learn(request, recorded.reply, reply)
        if isinstance(request, m.Bye):
            self._sockets.pop(recorded.session_id).close()

    def report(self) -> dict[str, Any]:
        """What was sent, how long answers took (the round trip; recorded: in the daemon)."""
        requests = {}
        for name, pairs in sorted(self._latencies_us.items()):
            before, now = np.array(pairs).T
            requests[name] = {
                "count": len(pairs),
                "recorded_p50_us": int(np.percentile(before, 50)),
                "recorded_p99_us": int(np.percentile(before, 99)),
                "p50_us": int(np.percentile(now, 50)), "p99_us": int(np.percentile(now, 99)),
            }  # fmt: skip
        return {
            "sent": self.sent, "skipped": self.skipped,
            "seconds": round(time.monotonic() - self._began_s, 3), "requests": requests,
            "differences": [
                {"request": name, "recorded": before, "now": now, "count": count}
                for (name, before, now), count in self._differences.most_common()
            ],
        }  # fmt: skip

    # --- the wire ---------------------------------------------------------------------------

    def _greet(self, session_id: int, hello: m.Hello) -> None:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(f"ipc://{self._path}")
        old = self._sockets.pop(session_id, None)
        if old is not None:
            old.close()
        self._sockets[session_id] = socket
        m.raise_for_error(self._ask(session_id, hello))

    def _ask(self, session_id: int, request: m.Request) -> m.Reply:
        self._last_id += 1
        request = msgspec.structs.replace(request, request_id=self._last_id)
        socket = self._sockets[session_id]
        socket.send(m.encode(request))
        while True:
            if not socket.poll(int(self._timeout_s * 1000)):
                raise ServiceUnavailable(
                    f"no answer to {type(request).__name__} within {self._timeout_s:g} s",
                    remedy="See whether the daemon still runs; raise --timeout",
                )
            reply = m.decode_reply(socket.recv())
            if reply.request_id == self._last_id:
                return reply

    # --- ids --------------------------------------------------------------------------------

    def _translate(self, request: m.Request) -> m.Request:
        """The request in the ids of the daemon that is played to.

        Raises:
            _UnknownError: It names something that is not known here.
        """
        changes: dict[str, Any] = {}
        names = request.__struct_fields__
        if isinstance(request, m.OpenNamespace):
            changes = {
                "fingerprint": _other(request.fingerprint), "name": f"replay {request.name}"
            }  # fmt: skip
        namespace = getattr(request, "namespace_id", 0)
        if "namespace_id" in names:
            changes["namespace_id"], space = self._namespace(namespace)
            if "key_space" in names:
                changes["key_space"] = space
        if "lease_id" in names:
            changes["lease_id"] = self._lease(getattr(request, "lease_id", 0))
        if isinstance(request, m.ReleaseLeases):
            changes["lease_ids"] = self._known_leases(request.lease_ids)
        if isinstance(request, m.Ping):
            changes["renew_leases"] = self._known_leases(request.renew_leases)
        if isinstance(request, m.Pin | m.Reclaim | m.ReportDamage):
            changes["blocks"], changes["generations"] = self._blocks_of(
                namespace, request.blocks, request.generations
            )
        elif isinstance(request, m.Unpin | m.Abandon | m.Free):
            changes["blocks"] = self._newest_of(namespace, request.blocks)
        elif isinstance(request, m.MirrorBatch):
            changes |= self._batch(request)
        return msgspec.structs.replace(request, **changes)

    def _batch(self, request: m.MirrorBatch) -> dict[str, Any]:
        namespace = request.namespace_id
        enqueued = [
            m.EnqueuedItem(
                self._lease(item.lease_id),
                *self._blocks_of(namespace, item.blocks, item.generations),
            )
            for item in request.enqueued
        ]
        completed = []
        for item in request.completed:
            parent, parent_generation = self._block(
                (namespace, item.parent, item.parent_generation)
            )
            blocks, generations = self._blocks_of(namespace, item.blocks, item.generations)
            completed.append(
                msgspec.structs.replace(
                    item, lease_id=self._lease(item.lease_id), parent=parent,
                    parent_generation=parent_generation, blocks=blocks, generations=generations,
                )
            )  # fmt: skip
        reserve = [
            m.ReserveItem(self._lease(item.lease_id), item.num_blocks) for item in request.reserve
        ]
        return {"enqueued": enqueued, "completed": completed, "reserve": reserve}

    def _namespace(self, namespace: int) -> tuple[int, bytes]:
        try:
            return self._namespaces[namespace]
        except KeyError:
            raise _UnknownError from None

    def _lease(self, lease_id: int) -> int:
        try:
            return self._leases[lease_id]
        except KeyError:
            raise _UnknownError from None

    def _known_leases(self, lease_ids: list[int]) -> list[int]:
        return [self._leases[each] for each in lease_ids if each in self._leases]

    def _block(self, block: BlockId) -> tuple[int, int]:
        if block[1] == 0:
            return 0, 0
        try:
            return self._blocks[block]
        except KeyError:
            raise _UnknownError from None

    def _blocks_of(self, namespace: int, blocks: bytes, generations: bytes) -> tuple[bytes, bytes]:
        old = zip(
            m.u32_array(blocks, what="blocks").tolist(),
            m.u32_array(generations, what="generations").tolist(), strict=True,
        )  # fmt: skip
        new = [self._block((namespace, block, generation)) for block, generation in old]
        pairs = np.array(new, np.uint32).reshape(-1, 2)
        return pairs[:, 0].tobytes(), pairs[:, 1].tobytes()

    def _newest_of(self, namespace: int, blocks: bytes) -> bytes:
        """Requests without generations mean the one that the lease holds: the newest."""
        newest = {
            block: new[0] for (owner, block, _), new in self._blocks.items() if owner == namespace
        }
        try:
            wanted = m.u32_array(blocks, what="blocks").tolist()
            return np.array([newest[block] for block in wanted], np.uint32).tobytes()
        except KeyError:
            raise _UnknownError from None

    def _learn(self, request: m.Request, before: m.Reply, now: m.Reply) -> None:
        namespace = getattr(request, "namespace_id", 0)
        if isinstance(before, m.NamespaceReply) and isinstance(now, m.NamespaceReply):
            assert isinstance(request, m.OpenNamespace)
            space = key_space(_other(request.fingerprint))
            self._namespaces[before.namespace_id] = (now.namespace_id, space)
        elif isinstance(before, m.BlocksReply) and isinstance(now, m.BlocksReply):
            self._leases[before.lease_id] = now.lease_id
            self._learn_blocks(namespace, before.blocks, before.generations, now)
        elif isinstance(before, m.MirrorReply) and isinstance(now, m.MirrorReply):
            new = m.BlocksReply(0, 0, 0, 0, now.canonical_blocks, now.canonical_generations)
            self._learn_blocks(
                namespace, before.canonical_blocks, before.canonical_generations, new
            )
            for old_item, item in zip(before.reserved, now.reserved, strict=False):
                self._leases[old_item.lease_id] = item.lease_id
                got = m.BlocksReply(0, 0, 0, 0, item.blocks, item.generations)
                self._learn_blocks(namespace, old_item.blocks, old_item.generations, got)

    def _learn_blocks(
        self, namespace: int, blocks: bytes, generations: bytes, now: m.BlocksReply
    ) -> None:
        old = zip(
            m.u32_array(blocks, what="blocks").tolist(),
            m.u32_array(generations, what="generations").tolist(), strict=True,
        )  # fmt: skip
        new = zip(
            m.u32_array(now.blocks, what="blocks").tolist(),
            m.u32_array(now.generations, what="generations").tolist(), strict=True,
        )  # fmt: skip
        for (block, generation), fresh in zip(old, new, strict=False):
            self._blocks.pop((namespace, block, generation), None)  # the newest comes last
            self._blocks[(namespace, block, generation)] = fresh

    def close(self) -> None:
        """Close all connections. Idempotent."""
        for socket in self._sockets.values():
            socket.close()
        self._sockets.clear()
        self._context.term()

    def __enter__(self) -> Replayer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _other(fingerprint: bytes) -> bytes:
    """A fingerprint that no engine has: a replay publishes blocks without bytes."""
    return blake2b(fingerprint, digest_size=limits.FINGERPRINT_BYTES, person=b"replay").digest()


def _is_operator(request: m.Request) -> bool:
    return isinstance(request, m.Hello) and request.operator


def _kind(reply: m.Reply) -> str:
    return reply.code if isinstance(reply, m.ErrorReply) else type(reply).__name__
