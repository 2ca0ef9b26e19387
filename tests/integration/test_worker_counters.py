"""What real workers did on the way reaches the daemon: one status shows the node."""

from __future__ import annotations

from helpers import wait_until
from test_transformers_tiers import Engine, daemon, engines, prompts  # noqa: F401 - fixtures

from hisparse_service.contract import messages as m


def test_rows_by_tier_bytes_and_swap_times_of_a_group_reach_the_daemon(
    daemon,  # noqa: F811
    engines,  # noqa: F811
):
    engine: Engine = engines(daemon)
    engine.run(prompts())
    expected = {"rows_read_resident": 0, "rows_read_hot": 0, "rows_missed": 0, "bytes_gathered": 0}
    for generator in engine.generators:
        generator._reporter.report()
        for swaps in generator.tiers.swap_statistics():
            expected["rows_read_resident"] += swaps.resident_lanes
            expected["rows_read_hot"] += swaps.hot_lanes
            expected["rows_missed"] += swaps.miss_lanes
            expected["bytes_gathered"] += swaps.gathered_bytes
    assert min(expected.values()) > 0
    with daemon.client(operator=True) as operator:

        def workers() -> dict[str, float]:
            found: dict[str, float] = operator.ask(m.StatusReply, m.Status).status["workers"]
            return found

        wait_until(
            lambda: {name: workers().get(name) for name in expected} == expected, what=str(expected)
        )
        found = workers()
        (namespace,) = operator.ask(m.StatusReply, m.Status).status["namespaces"]
    assert found["swaps"] > 0
    assert found["swap_seconds"] > 0
    assert found["bytes_mirrored"] == namespace["block_stride_bytes"] * found["mirrored_blocks"]
