"""What the next step's plan will tell the worker, gathered between two steps.

The parts of the coordinator that change a page or take a host block note it here; `prepare` makes
the plan of it and begins the next one. On the engine's thread.
"""

from __future__ import annotations

from collections.abc import Iterable

from worker_client.requests import HotRegion, PageRestore, StepPlan, TableUpdate

__all__ = ["PlanDraft"]


class PlanDraft:
    """The notes for one plan.

    Attributes:
        invalidate: Recycled host blocks, in the order in which they came.
        updates: By request slot and page: the last entry counts.
        mirror_step: Of a reader: last step whose mirrors it found.
    """

    def __init__(self) -> None:
        self.invalidate: list[int] = []
        self.updates: dict[tuple[int, int], TableUpdate] = {}
        self.mirror_step = 0

    def forget_slot(self, slot: int) -> None:
        """The request of this slot ended: its tables are nobody's."""
        self.updates = {k: v for k, v in self.updates.items() if k[0] != slot}

    def take(
        self,
        *,
        reset_slots: Iterable[int],
        hot_regions: Iterable[HotRegion],
        restores: Iterable[PageRestore],
    ) -> StepPlan:
        """The plan, with what belongs to this step alone; the notes begin anew."""
        plan = StepPlan(
            invalidate=tuple(self.invalidate),
            reset_slots=tuple(reset_slots),
            hot_regions=tuple(hot_regions),
            restores=tuple(restores),
            updates=tuple(self.updates.values()),
            mirror_step=self.mirror_step,
        )
        self.invalidate.clear()
        self.updates.clear()
        self.mirror_step = 0
        return plan
