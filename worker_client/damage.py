"""What a reader does about bytes that are not those that were published: it says so.

A published block may carry a checksum of its content. Whoever reads can compare (`BlockLease.
verify`), and a block that does not fit is reported to the daemon, which looks for itself and takes
it away from everybody; see `messages.ReportDamage`. Until then, and where the daemon is too old to
know of reports, only this reader stays away from it.

Any thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from hisparse_service.contract.checksum import NO_CHECKSUM, Verdict
from hisparse_service.contract.errors import (
    DamagedBlock,
    HiSparseError,
    InternalError,
    MalformedMessage,
    UsageError,
)
from hisparse_service.contract.limits import MAX_REPORTED_BLOCKS
from hisparse_service.contract.messages import DamageReply, ReportDamage
from worker_client.blocks import U32Array, as_blocks

if TYPE_CHECKING:
    from worker_client.client import Namespace

__all__ = ["find_damaged", "refuse", "report_damage"]

_LOOK_UP: Final = "Do not use the bytes; look the keys up again: what is before it is still good"


def report_damage(
    namespace: Namespace,
    blocks: npt.ArrayLike,
    generations: npt.ArrayLike,
    *,
    timeout_s: float | None = None,
) -> list[Verdict]:
    """Have the daemon check published blocks whose bytes look wrong, and withdraw the damaged.

    Args:
        namespace: Theirs.
        blocks: u32 [n]
        generations: u32 [n], as they were found.
        timeout_s: For each answer, which comes after the check: about 1 ms a MB.

    Returns:
        What the daemon found, in order. All NOT_CHECKED from a daemon that does not know reports.

    Raises:
        ServiceUnavailable: No answer before the deadline. The daemon may still carry it out.
    """
    wanted, of = as_blocks(blocks, "blocks"), as_blocks(generations, "generations")
    if len(wanted) != len(of):
        raise UsageError(f"{len(wanted)} blocks with {len(of)} generations")
    verdicts: list[Verdict] = []
    for start in range(0, len(wanted), MAX_REPORTED_BLOCKS):
        part = slice(start, start + MAX_REPORTED_BLOCKS)
        verdicts += _report(namespace, wanted[part], of[part], timeout_s)
    return verdicts


def _report(
    namespace: Namespace, blocks: U32Array, generations: U32Array, timeout_s: float | None
) -> list[Verdict]:
    def build(request_id: int) -> ReportDamage:
        return ReportDamage(
            request_id, namespace.namespace_id, blocks.tobytes(), generations.tobytes()
        )

    try:
        reply = namespace.client.session.request(build, DamageReply, timeout_s=timeout_s)
    except MalformedMessage:  # an older daemon, that has no such message
        return [Verdict.NOT_CHECKED] * len(blocks)
    if len(reply.verdicts) != len(blocks):
        raise InternalError(f"the daemon answered {len(reply.verdicts)} of {len(blocks)} verdicts")
    # A newer daemon may find what this code has no name for; it did not withdraw anything then.
    known = set(Verdict)
    return [Verdict(v) if v in known else Verdict.UNVERIFIABLE for v in reply.verdicts]


def find_damaged(namespace: Namespace, blocks: U32Array) -> npt.NDArray[np.bool_]:
    """Bool [n]: whose bytes do not fit the checksum in their record; False where there is none."""
    pool = namespace.require_pool()
    expected = np.asarray(pool.table["checksum"][blocks])
    wrong = np.zeros(len(blocks), np.bool_)
    given = np.flatnonzero(expected != NO_CHECKSUM)
    wrong[given] = pool.checksum(blocks[given]) != expected[given]
    return wrong


def refuse(namespace: Namespace, blocks: U32Array, generations: U32Array) -> DamagedBlock:
    """Report blocks whose bytes do not fit; the error for their reader."""
    namespace.counters.add("damaged_reads", len(blocks))
    try:
        found = report_damage(namespace, blocks, generations)[0].name.lower()
    except HiSparseError as error:  # the bytes are wrong, whoever knows of it
        found = f"not reported: {error.code}"
    return DamagedBlock(
        f"the bytes of block {blocks[0]} do not fit their checksum, nor those of "
        f"{len(blocks) - 1} others; the daemon's verdict: {found}",
        remedy=_LOOK_UP, block=int(blocks[0]), generation=int(generations[0]), verdict=found,
        num_damaged=len(blocks),
    )  # fmt: skip
