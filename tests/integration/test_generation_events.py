"""A writer and a reader that share events: the same tokens, found with fewer questions."""

from __future__ import annotations

from shared_event_driver import FileEvent, FileEventDriver
from test_transformers_tiers import SlowTracker, assert_exact, daemon, engines, prompts

from worker_client.events import PeerEvents, WriterEvents

__all__ = ["daemon", "engines"]

POLLS = 7
"""Of the writer, until the copies of a step are done."""


class LateEvent(FileEvent):
    left = 0

    def record(self) -> None:
        super().record()
        self.left = POLLS

    def query(self) -> bool:
        self.left -= 1
        if self.left == 0:
            self.complete()
        return super().query()


class LateDriver(FileEventDriver):
    """The writer's copies complete some polls after they were enqueued."""

    def create(self) -> tuple[FileEvent, bytes]:
        event, handle = super().create()
        event.__class__ = LateEvent
        return event, handle


def reader_messages(engine) -> int:
    return engine.generators[1].coordinator.statistics.control_messages


def test_a_reader_with_events_asks_less_and_computes_the_same(daemon, engines, tmp_path) -> None:
    without = engines(daemon, tracker=SlowTracker(POLLS))
    without.run(prompts(2))
    asked = reader_messages(without)
    without.close()

    driver = LateDriver(tmp_path)
    engine = engines(daemon, event_driver=driver)
    writer, reader = (generator._events for generator in engine.generators)
    assert isinstance(writer, WriterEvents)
    assert isinstance(reader, PeerEvents)
    others = {name: prompt[::-1] for name, prompt in prompts(2).items()}  # no common prefix
    engine.run(others)
    assert len(driver.opened) == writer.num_events
    assert reader_messages(engine) < asked
    assert engine.generators[1].coordinator.statistics.published_pages > 0
    assert engine.witnesses[1].wrong == 0
    assert_exact(engine, others)
