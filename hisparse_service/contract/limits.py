"""Every maximum of the system, in one place; relations between them are asserted at import.

Pure: usable on any thread of either side.
"""

from __future__ import annotations

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB

# --- protocol -------------------------------------------------------------------------------
PROTOCOL_MIN: Final = 1
PROTOCOL_MAX: Final = 1
"""Versions of the control protocol that this code speaks, both ends included."""

MAX_MESSAGE_BYTES: Final = 4 * MIB
"""Longest message that is decoded; a longer one gets `MessageTooLarge`."""

MAX_FRAME_BYTES: Final = 8 * MIB
"""ZMQ_MAXMSGSIZE: libzmq drops the connection above it. Twice the message limit, so that a message
that is only slightly too long still gets its typed answer."""

MAX_KEYS: Final = 131_072
"""Keys in one Lookup: 8,388,608 tokens at block 64."""

MAX_BLOCKS_PER_MESSAGE: Final = 131_072
MAX_RESERVE_BLOCKS: Final = 32_768
"""Blocks reserved, published, freed or evicted by one message.

Each may have to evict another block, 1.8 us a block on the control loop (16,384 took 25 ms, 131,072
took 234 ms; 2 cores, 2026-12-01), and ping must answer within 100 ms (I7). Publishing 131,072 took
226 ms, freeing them 113 ms."""

MAX_BATCH_ITEMS: Final = 4_096
"""Requests whose mirrors travel in one MirrorBatch."""

MAX_LIST_ITEMS: Final = 8_192
"""Items of any list in a message that has no closer limit."""

MAX_TEXT_BYTES: Final = 1_024
MAX_LAYERS: Final = 1_024
MAX_COUNTERS: Final = 256
"""Counters that a worker reports in one heartbeat."""
MAX_LIST_ROWS: Final = 1_000
"""Rows of one page of an operator's listing (sessions, blocks)."""

# --- sizes ----------------------------------------------------------------------------------
BLOCK_KEY_BYTES: Final = 16
KEY_SPACE_BYTES: Final = 8
FINGERPRINT_BYTES: Final = 16
ROW_ALIGNMENT_BYTES: Final = 16
MIN_BLOCK_SIZE: Final = 1
MAX_BLOCK_SIZE: Final = 1_024
MAX_ROW_BYTES: Final = 64 * KIB
MAX_BLOCKS_PER_BACKING: Final = 2**31 - 1
"""Block ids are u32 on the wire and int32 in the device tables; rows and bytes are 64-bit (I10)."""
MAX_POOL_BYTES: Final = 64 * 1024 * GIB
MAX_BACKINGS: Final = 64
MAX_NAMESPACES: Final = 64
MAX_REGISTRATION_BYTES: Final = 256 * GIB
"""One CUDA registration of 512 GiB or more fails on current drivers."""
MAX_REGISTRATION_RANGES: Final = 4_096

# --- membership -----------------------------------------------------------------------------
MAX_SESSIONS: Final = 256
MAX_WORLD_SIZE: Final = 2**20
MAX_LEASES_PER_SESSION: Final = 8_192
"""All of them end at once when the session does, about 10 us each on the control loop (65,536 took
956 ms, 2 busy cores, 2026-12-01)."""
MAX_EXPIRED_LEASES: Final = 2_048
"""Leases that expire between two looks at the socket; the others do at the next tick."""
MAX_IN_FLIGHT_PER_SESSION: Final = 64
"""Requests of one session that wait in the daemon; above it the oldest connection is slowed down
by not reading it (its own queue fills, nobody else's)."""
HEARTBEAT_INTERVAL_S: Final = 1.0
MAX_QUIET_HEARTBEATS: Final = 3
"""A client that asked for nothing since its last heartbeat sends the next one only after so many
intervals, if the session's time-out has room for five of those. Its death is told by its pid and
its socket all the same (I9)."""
SESSION_TIMEOUT_S: Final = 15.0
"""Silence after which a session is dead even where neither its pid nor its socket tells."""
QUARANTINE_S: Final = 600.0
"""How long unpublished blocks of a process that fell silent, but may live, are given to nobody."""
LEASE_TTL_S: Final = 30.0
WRITER_LEASE_TTL_S: Final = 30.0
ADOPTION_GRACE_S: Final = 5.0
"""How long a daemon that adopted a pool evicts nothing that its predecessor's clients were reading:
they are attached again within a second, a stopped one may take a little longer."""

# --- control loop ---------------------------------------------------------------------------
LOOKUP_SLICE_KEYS: Final = 8_192
"""Keys looked up before other clients are served: about 0.3 ms of the control loop."""
SEND_HIGH_WATER_MARK: Final = 1_000
RECEIVE_HIGH_WATER_MARK: Final = 1_000
SOCKET_LINGER_MS: Final = 200
WITHDRAW_SLICE_BLOCKS: Final = 4_096
"""Blocks below a damaged one that are taken out of the index before other clients are served."""
MAX_REPORTED_BLOCKS: Final = 64
"""Blocks of one `ReportDamage`. A block of 78 layers has 3.3 MB, so a report has 200 MB to read."""
MAX_BLOCKS_IN_CHECK: Final = 256
"""Reported blocks that wait for their check, of all sessions; the reports beyond are not taken."""
MAX_LOST_PINS: Final = 4_096
"""Withdrawn blocks that one heartbeat's answer names."""
MAX_EVENT_BLOCKS: Final = 4_096
"""Blocks named in one event; a longer list is split."""
MAX_UNIX_PATH_BYTES: Final = 107
MAX_TRACE_BYTES: Final = GIB
"""Of one recording of control messages."""

# --- CUDA events of writers -----------------------------------------------------------------
EVENT_HANDLE_BYTES: Final = 64
"""Of cudaIpcEventHandle_t."""
MAX_SHARED_EVENTS: Final = 64
"""In a writer's ring: steps that its device may be behind. One offer a session and namespace, so
the daemon keeps at most 64 MiB of handles."""

# --- device memory of the daemon ------------------------------------------------------------
MEMORY_HANDLE_BYTES: Final = 64
"""Of CUipcMemHandle."""
DEVICE_BACKING_ALIGNMENT_BYTES: Final = 2 * MIB
"""Smaller allocations share a page of the driver's, and a CUDA IPC handle opens the whole page."""
MAX_DEVICE_BACKING_BYTES: Final = 1024 * GIB
MAX_DEVICE_BACKINGS: Final = 256
"""Of one daemon. Each has at most two orders under way, so a device child's pipe never fills."""
MAX_DEVICES: Final = 64
DEVICE_BACKING_LEASE_S: Final = 300.0
"""How long device memory waits for the next holder: an engine loads its weights meanwhile."""
DEVICE_ANSWER_S: Final = 30.0
"""Until a device child counts as hanging; making a context takes under a second, several where the
driver must start first."""
DEVICE_CHILD_LINGER_S: Final = 10.0
"""How long a device child without memory stays: an engine builds its caches twice at start."""

# --- client ---------------------------------------------------------------------------------
DEFAULT_REQUEST_TIMEOUT_S: Final = 5.0
CONNECT_TIMEOUT_S: Final = 10.0
MAX_QUEUED_MIRRORS: Final = 65_536
"""Completed blocks that the client keeps while the daemon is away."""

# --- data plane -----------------------------------------------------------------------------
MAX_HOT_ROWS: Final = 32_768
"""Hot slots are 16-bit."""
MAX_TOP_K: Final = 4_096
MAX_SPECULATIVE_ROWS: Final = 8

assert MAX_KEYS * BLOCK_KEY_BYTES <= MAX_MESSAGE_BYTES
assert MAX_FRAME_BYTES >= 2 * MAX_MESSAGE_BYTES
assert MAX_BLOCKS_PER_MESSAGE * (BLOCK_KEY_BYTES + 8) <= MAX_MESSAGE_BYTES
assert HEARTBEAT_INTERVAL_S * 3 <= ADOPTION_GRACE_S <= LEASE_TTL_S
assert HEARTBEAT_INTERVAL_S * MAX_QUIET_HEARTBEATS * 5 <= SESSION_TIMEOUT_S < LEASE_TTL_S
assert LOOKUP_SLICE_KEYS <= MAX_KEYS
assert MAX_REPORTED_BLOCKS <= MAX_BLOCKS_IN_CHECK
assert MAX_SESSIONS * MAX_NAMESPACES * MAX_SHARED_EVENTS * EVENT_HANDLE_BYTES <= 64 * MIB
