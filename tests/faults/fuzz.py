"""A fuzzer for what comes from outside: frames of the socket, and bytes of the segment (I8).

    python -m tests.faults.fuzz --frames 10000000 --segments 200000 --seed 1 [--jobs 2]

Frames are valid messages that were cut, extended, spliced, or had bytes, lengths and types changed,
and plain noise. Each must either raise one of the two typed errors or decode to a message that is
within its bounds and means the same when it is encoded again. Headers, backing records and block
records are damaged likewise; what differs from the original in a byte that carries meaning must be
refused. The last line is one JSON object with the counts; exit code 1 on any finding.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
import time
from collections import Counter
from collections.abc import Callable

import msgpack
import numpy as np

from hisparse_service.contract import messages
from hisparse_service.contract.errors import CorruptSegmentError, MalformedMessage, MessageTooLarge
from hisparse_service.contract.messages import CompletedItem, EnqueuedItem, ReserveItem
from hisparse_service.contract.segment import (
    ARENA_OFFSET,
    RECORD_DTYPE,
    BackingRecord,
    Header,
    pack_backing,
    pack_header,
    record_check,
    record_checks,
    unpack_backing,
    unpack_header,
)

SEGMENT_BYTES = 1 << 30
SAMPLES = [
    messages.Hello(1, 1, 1, "engine", "group", 0, 2, "GPU-1", False),
    messages.Ping(2, [1, 2, 3], {"hits": 1.5}),
    messages.Bye(3),
    messages.OpenNamespace(4, bytes(range(16)), "glm", bytes(range(40))),
    messages.AllocateBacking(5, 1, 1_000),
    messages.TakeWriter(6, 1),
    messages.YieldWriter(7, 1),
    messages.RegistrationTurn(8, 1, False),
    messages.Reserve(9, 1, 0, 16),
    messages.Lookup(10, 1, 5, bytes(8), bytes(range(64))),
    messages.Pin(11, 1, 5, bytes(8), bytes(8)),
    messages.Unpin(12, 1, 5, bytes(8)),
    messages.MirrorBatch(
        13, 1, bytes(8), [EnqueuedItem(1, bytes(4), bytes(4))],
        [CompletedItem(1, 0, 0, bytes(4), bytes(4), bytes(16))], [ReserveItem(1, 2)],
    ),
    messages.Abandon(14, 1, 5, b""),
    messages.Free(15, 1, 5, bytes(4)),
    messages.ReleaseLeases(16, [1, 2, 2**40]),
    messages.Status(17),
    messages.Sessions(18, 0),
    messages.ListBlocks(19, 1, "PUBLISHED", 5),
    messages.Evict(20, 1, 5),
    messages.Drain(21, True, 5.0),
    messages.Reclaim(22, 1, 5, bytes(8), bytes(8)),
    messages.ReportDamage(23, 1, bytes(8), bytes(8)),
    messages.SetLimits(23, -1, 100, 10, 0, 1_000, 64),
    messages.Trace(24, "look", 5.0, 1_000_000),
    messages.Overview(25),
    messages.AllocateDeviceBacking(28, 1, "kv", "GPU-" + "0" * 32, 2**30, bytes(16), "open"),
    messages.ReleaseDeviceBacking(29, 1, "kv", "GPU-" + "0" * 32, "give_back"),
    messages.OfferEvents(26, 1, "GPU-1", bytes(range(64))),
    messages.FetchEvents(27, 1),
]  # fmt: skip
assert {type(sample) for sample in SAMPLES} == set(messages.REQUEST_TYPES.values())
FRAMES = [messages.encode(sample) for sample in SAMPLES]
# Type bytes and lengths at the edges of MessagePack's formats.
EDGES = bytes([0x00, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, *range(0xC0, 0xE1), 0xFF])


def mutate(frame: bytes, rng: random.Random) -> bytes:
    """One damaged copy."""
    data = bytearray(frame)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        kind = rng.randrange(7)
        at = rng.randrange(len(data)) if data else 0
        if kind == 0 and data:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and data:
            data[at] = rng.choice(EDGES)
        elif kind == 2:
            del data[at:]
        elif kind == 3:
            data[at:at] = rng.randbytes(rng.randint(1, 9))
        elif kind == 4:
            other = rng.choice(FRAMES)
            data[at:] = other[rng.randrange(len(other)) :]
        elif kind == 5:
            data[at : at + 4] = rng.choice(
                (b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\xdd\xff\xff\xff", b"\xc6\x7f\xff\xff")
            )
        else:
            data += rng.randbytes(rng.randint(1, 20))
    return bytes(data)


def check_frame(frame: bytes) -> str:
    """`refused` or `accepted`; raises AssertionError on a finding, or whatever escaped."""
    try:
        message = messages.decode_request(frame)
    except (MalformedMessage, MessageTooLarge):
        return "refused"
    again = messages.encode(message)
    assert messages.decode_request(again) == message, "an accepted message changes on the wire"
    assert agrees(unpack(frame), unpack(again)), "accepted with other fields"
    return "accepted"


def unpack(frame: bytes) -> object:
    """The frame by another decoder, whatever stands in the fields that are only skipped."""
    return msgpack.unpackb(
        frame,
        unicode_errors="surrogateescape",
        strict_map_key=False,
        ext_hook=lambda code, data: (code, data),  # its own type takes no negative codes
        object_pairs_hook=lambda pairs: {repr(key): value for key, value in pairs},
    )


def agrees(sent: object, understood: object) -> bool:
    """Whether a message was taken as it was sent; a newer peer appends, an older one leaves out."""
    if isinstance(sent, list) and isinstance(understood, list):
        return all(map(agrees, sent, understood))
    return sent == understood


def fuzz_frames(count: int, seed: int) -> Counter[str]:
    """Damaged frames through the decoder."""
    rng = random.Random(f"frames-{seed}")
    outcomes: Counter[str] = Counter()
    for _ in range(count):
        if rng.random() < 0.05:
            frame = rng.randbytes(rng.randrange(64))
        else:
            frame = mutate(FRAMES[rng.randrange(len(FRAMES))], rng)
        outcomes[check_frame(frame)] += 1
    return outcomes


HEADER = Header(
    pool_uuid=bytes(range(16)), instance="fuzz", pool_name="main", segment_bytes=SEGMENT_BYTES,
    page_bytes=4096, created_unix_ns=1, creator_pid=2,
)  # fmt: skip
BACKING = BackingRecord(
    namespace=1, fingerprint=bytes(range(16)), name="glm", geometry=bytes(range(40)), generation=1,
    num_blocks=100, table_offset_bytes=ARENA_OFFSET, payload_offset_bytes=ARENA_OFFSET + 65_536,
    payload_bytes=1 << 20,
)  # fmt: skip


def fuzz_structure(
    packed: bytes, meaningful: int, read: Callable[[bytes], object], original: object,
    rng: random.Random,
) -> str:  # fmt: skip
    """One damaged header or backing record: refused, empty, or a finding."""
    damaged = mutate(packed[:meaningful], rng)
    page = (damaged + bytes(len(packed)))[: rng.choice((len(packed), len(damaged)))]
    if page.rstrip(b"\0") == packed.rstrip(b"\0"):
        return "unchanged"
    try:
        value = read(page)
    except CorruptSegmentError:
        return "refused"
    assert value is None, f"accepted a damaged structure: {value}"
    assert original is not None
    return "empty"


def fuzz_records(rng: random.Random) -> str:
    """One damaged block record among good ones: its check must not pass."""
    table = np.zeros(8, RECORD_DTYPE)
    raw = np.frombuffer(rng.randbytes(table.nbytes), np.uint8).copy()
    table = raw.view(RECORD_DTYPE)
    table["check"] = record_checks(table)
    block = rng.randrange(8)
    covered = [*range(16), *range(24, 59)]
    before = table[block : block + 1].copy()
    for _ in range(rng.randint(1, 3)):
        raw[block * 64 + rng.choice(covered)] ^= rng.randint(1, 255)
    if table[block] == before[0]:
        return "unchanged"
    names = ("key_low", "key_high", "checksum", "generation", "parent", "parent_generation")
    fields = {name: int(table[block][name]) for name in (*names, "depth", "namespace", "flags")}
    assert record_check(block=block, **fields) != int(table[block]["check"]), "a damaged record"
    passes = record_checks(table) == table["check"]
    assert not passes[block], "a damaged record passes"
    assert passes.sum() == 7, "a good record does not pass"
    return "refused"


def fuzz_segments(count: int, seed: int) -> Counter[str]:
    """Damaged headers, backing records and block records."""
    rng = random.Random(f"segments-{seed}")
    outcomes: Counter[str] = Counter()
    header, backing = pack_header(HEADER), pack_backing(BACKING)
    for number in range(count):
        if number % 3 == 0:
            outcome = fuzz_structure(
                header, 220,
                lambda page: unpack_header(page, segment_bytes=SEGMENT_BYTES), HEADER, rng,
            )  # fmt: skip
        elif number % 3 == 1:
            outcome = fuzz_structure(
                backing, len(backing.rstrip(b"\0")),
                lambda page: unpack_backing(page, segment_bytes=SEGMENT_BYTES), BACKING, rng,
            )  # fmt: skip
        else:
            outcome = fuzz_records(rng)
        outcomes[outcome] += 1
    return outcomes


def main() -> int:
    """Fuzz both in several processes, print the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=200_000)
    parser.add_argument("--segments", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    start = time.monotonic()
    totals = {"frames": Counter[str](), "segments": Counter[str]()}
    findings = []
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        # Many short pieces, so that a finding names a seed that repeats it quickly.
        pieces = options.jobs * 16
        running = [
            (name, seed, pool.apply_async(fuzz, (count // pieces, options.seed * 1_000 + seed)))
            for seed in range(pieces)
            for name, fuzz, count in (
                ("frames", fuzz_frames, options.frames),
                ("segments", fuzz_segments, options.segments),
            )
        ]
        for name, seed, result in running:
            try:
                totals[name] += result.get()
            except Exception as error:
                findings.append(f"{name} seed {options.seed * 1_000 + seed}: {error!r}"[:300])
    summary = {
        "frames": sum(totals["frames"].values()),
        "frames_refused": totals["frames"]["refused"],
        "frames_accepted_as_valid": totals["frames"]["accepted"],
        "segments": sum(totals["segments"].values()),
        "segments_by_outcome": dict(totals["segments"]),
        "findings": findings[:10],
        "seconds": round(time.monotonic() - start, 1),
    }
    print(json.dumps(summary))
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
