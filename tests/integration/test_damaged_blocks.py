"""Damaged bytes in shared memory: whoever meets them reports them, and nobody gets them again.

Real daemon, real shared memory: a byte of a published block is changed behind everybody's back.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from real_daemon import running_daemon, wait_until
from test_client_daemon import (
    GEOMETRY,
    NUM_BLOCKS,
    chain_of,
    connect,
    fill,
    open_and_attach,
    write_prefix,
)

from hisparse_service.contract import messages as m
from hisparse_service.contract.checksum import Verdict
from hisparse_service.contract.errors import DamagedBlock, ServiceUnavailable, StaleBlock
from hisparse_service.contract.segment import RECORD_BYTES, BlockState
from hisparse_service.pool.segment_file import open_existing
from worker_client.blocks import LeaseState
from worker_client.client import Completed
from worker_client.coordinator import CoordinatorConfig, HiSparseCoordinator, Role
from worker_client.damage import report_damage
from worker_client.requests import StepWork

TOKENS = tuple(range(16))
"""Four blocks."""


@pytest.fixture
def daemon():
    with running_daemon() as made:
        yield made


@pytest.fixture
def three(daemon):
    """Namespaces of three clients: A publishes, B and C read."""
    with contextlib.ExitStack() as stack:
        yield [open_and_attach(stack.enter_context(connect(daemon))) for _ in range(3)]


def damage(namespace, block):
    """One bit of the block's last row of its last layer."""
    namespace.pool.layer_view(GEOMETRY.num_layers - 1)[int(block), -1, -1] ^= 1


def status_of(namespace):
    (found,) = namespace.client.status()["namespaces"]
    counts = found["blocks"]
    total = counts["free"] + counts["reserved"] + counts["published"] + counts["pinned"]
    assert total == counts["capacity"], counts
    return found


def found_blocks(namespace, tokens=TOKENS):
    lease = namespace.lookup(chain_of(namespace, *tokens))
    blocks = lease.blocks.tolist()
    lease.release()
    return blocks


def test_a_damaged_block_is_given_to_nobody_any_more(three):
    a, b, c = three
    held = write_prefix(a, chain_of(a, *TOKENS))
    blocks = held.blocks.tolist()
    damage(a, blocks[2])
    lease = b.lookup(chain_of(b, *TOKENS))
    assert lease.blocks.tolist() == blocks, "the daemon cannot know yet"
    lease.verify(lease.blocks[:2])
    with pytest.raises(DamagedBlock) as caught:
        lease.verify()
    assert caught.value.details["block"] == blocks[2]
    assert caught.value.details["verdict"] == "damaged"
    assert found_blocks(b) == blocks[:2], "the rest of the prefix stays usable"
    assert found_blocks(c) == blocks[:2]
    with pytest.raises(StaleBlock):
        c.pin([blocks[2]], held.generations[2:3])
    # The owner: what is damaged is stale for it too, the rest is not, and it goes on.
    held.check(held.blocks[:2])
    with pytest.raises(StaleBlock):
        held.check([blocks[2]])
    state = status_of(a)
    assert state["statistics"]["checks"] == {"damaged": 1}
    assert state["statistics"]["withdrawn"] == 2, "and the block below it"
    assert state["withdrawn"] == 2, "kept from everybody while they are pinned"
    lease.release()
    assert status_of(a)["withdrawn"] == 2
    held.release()
    state = status_of(a)
    assert (state["withdrawn"], state["blocks"]["pinned"]) == (0, 0)
    assert state["blocks"]["published"] == 2
    again = a.lookup(chain_of(a, *TOKENS))
    republish(a, chain_of(a, *TOKENS), again)
    assert len(found_blocks(c)) == 4
    again.verify()
    again.release()


def republish(namespace, chain, lease):
    """Compute anew what a lookup did not find."""
    start = len(lease.blocks)
    namespace.reserve(chain.num_blocks - start, lease=lease)
    blocks, generations = lease.reserved_blocks, lease.reserved_generations
    for block in blocks:
        fill(namespace, block, 50)
    namespace.mirror(
        completed=[
            Completed(
                lease=lease, blocks=blocks, generations=generations, keys=chain.keys(start),
                parent=int(lease.blocks[-1]), parent_generation=int(lease.generations[-1]),
                checksums=namespace.pool.checksum(blocks),
            )
        ]
    )  # fmt: skip


def test_what_nobody_reads_is_free_at_once_and_an_event_tells_of_it(three):
    a, b, _ = three
    with a.client.events(b"evicted") as events:
        wait_until(lambda: a.client.status()["event_topics"])
        held = write_prefix(a, chain_of(a, *TOKENS))
        blocks, generations = held.blocks.tolist(), held.generations
        held.release()
        damage(a, blocks[0])
        assert report_damage(b, blocks[:1], generations[:1]) == [Verdict.DAMAGED]
        event = events.next(timeout_s=30)
        assert isinstance(event, m.EvictedEvent)
        assert sorted(np.frombuffer(event.blocks, np.uint32).tolist()) == sorted(blocks)
    assert status_of(a)["blocks"]["free"] == NUM_BLOCKS - 1


def test_stale_false_and_unverifiable_reports_change_nothing_but_a_counter(three):
    a, b, _ = three
    held = write_prefix(a, chain_of(a, *TOKENS))
    plain = a.reserve(1)
    own, generation = plain.reserved_blocks, plain.reserved_generations
    a.mirror(
        completed=[
            Completed(
                lease=plain, blocks=own, generations=generation,
                keys=chain_of(a, 7, 7, 7, 7).keys(),
            )
        ]
    )  # fmt: skip
    damage(a, own[0])
    before = status_of(a)["blocks"]
    blocks, generations = held.blocks, held.generations
    assert report_damage(
        b,
        [blocks[0], blocks[1], own[0], NUM_BLOCKS + 5, 0],
        [generations[0], generations[1] + 1, generation[0], 1, 1],
    ) == [Verdict.SOUND, Verdict.STALE, Verdict.UNVERIFIABLE, Verdict.STALE, Verdict.STALE]
    assert status_of(a)["blocks"] == before
    assert status_of(a)["statistics"]["checks"] == {"sound": 1, "stale": 3, "unverifiable": 1}
    assert status_of(a)["statistics"]["withdrawn"] == 0
    held.verify()
    plain.verify()  # nothing to compare it with
    assert found_blocks(b) == blocks.tolist()


def test_two_reporters_at_once_withdraw_once(three):
    a, b, c = three
    held = write_prefix(a, chain_of(a, *TOKENS))
    damage(a, held.blocks[1])
    leases = [each.lookup(chain_of(each, *TOKENS)) for each in (b, c)]
    barrier = threading.Barrier(2)
    errors = []

    def read(lease):
        barrier.wait()
        try:
            lease.verify()
        except StaleBlock as error:
            errors.append(error)

    threads = [threading.Thread(target=read, args=(lease,)) for lease in leases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(errors) == 2
    assert status_of(a)["statistics"]["withdrawn"] == 3
    assert found_blocks(b) == found_blocks(c) == held.blocks.tolist()[:1]
    for lease in (*leases, held):
        lease.release()
    assert status_of(a)["withdrawn"] == 0


def test_a_reporter_that_is_killed_leaves_nothing_behind(daemon, three):
    a, _, c = three
    held = write_prefix(a, chain_of(a, *TOKENS))
    damage(a, held.blocks[1])
    code = f"""
import sys, worker_client
sys.path.insert(0, "tests/integration")
from test_client_daemon import open_and_attach
from hisparse_service.contract import messages as m
client = worker_client.connect(sys.argv[1], client_name="reporter", timeout_s=30)
namespace = open_and_attach(client)
print("ready", flush=True)
sys.stdin.readline()
client.session._socket.send(m.encode(m.ReportDamage(
    10**6, namespace.namespace_id, {held.blocks[1:2].tobytes()!r},
    {held.generations[1:2].tobytes()!r})))
print("sent", flush=True)
sys.stdin.read()
"""
    reporter = subprocess.Popen(
        [sys.executable, "-c", code, str(daemon.directory)], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with reporter:
        assert reporter.stdout.readline() == "ready\n"
        reporter.stdin.write("go\n")
        reporter.stdin.flush()
        assert reporter.stdout.readline() == "sent\n"
        reporter.kill()
    wait_until(lambda: a.client.status()["sessions"]["workers"] == 3)
    lease = c.lookup(chain_of(c, *TOKENS))
    with contextlib.suppress(StaleBlock):  # where the report died with the reporter
        lease.verify()
    lease.release()
    assert found_blocks(c) == held.blocks.tolist()[:1]
    assert status_of(a)["statistics"]["withdrawn"] == 3
    held.release()
    assert status_of(a)["withdrawn"] == 0


def test_a_daemon_killed_before_the_check_is_told_again(daemon, three):
    a, b, c = three
    held = write_prefix(a, chain_of(a, *TOKENS))
    blocks = held.blocks.tolist()
    damage(a, blocks[2])
    daemon.signal(signal.SIGSTOP)
    with pytest.raises(ServiceUnavailable):
        report_damage(b, blocks[2:3], held.generations[2:3], timeout_s=0.2)
    epoch = a.client.epoch
    daemon.kill()
    daemon.start()
    for each in three:  # all of them: who comes later finds its pins gone
        wait_until(lambda each=each: each.client.epoch != epoch and each.is_daemon_there)
        each.wait_attached()
    assert found_blocks(c) == blocks, "its checksum came back with it"
    lease = c.lookup(chain_of(c, *TOKENS))
    with pytest.raises(DamagedBlock):
        lease.verify()
    lease.release()
    assert found_blocks(b) == found_blocks(a) == blocks[:2]
    assert held.state is LeaseState.GRANTED
    held.release()
    wait_until(lambda: status_of(a)["withdrawn"] == 0, "the adopting daemon's own pins end")


def test_a_daemon_killed_after_the_check_does_not_bring_the_block_back(daemon, three):
    a, b, c = three
    held = write_prefix(a, chain_of(a, *TOKENS))
    blocks = held.blocks.tolist()
    damage(a, blocks[2])
    assert report_damage(b, blocks[2:3], held.generations[2:3]) == [Verdict.DAMAGED]
    daemon.kill()
    daemon.start()
    wait_until(lambda: b.is_daemon_there and c.is_daemon_there)
    assert found_blocks(c) == blocks[:2]
    table = c.pool.table
    assert (table["state"][blocks[2:]] == int(BlockState.FREE)).all()
    assert (table["generation"][blocks[2:]] != held.generations[2:]).all()


def test_a_damaged_record_is_withdrawn_like_a_damaged_block(three):
    a, b, _ = three
    held = write_prefix(a, chain_of(a, *TOKENS))
    segment = open_existing(b.client.status()["pool"]["segment"])
    try:
        table = b.pool._backing_reply.table_offset_bytes
        segment.map()[table + int(held.blocks[3]) * RECORD_BYTES + 24] ^= 1  # its checksum
    finally:
        segment.close()
    lease = b.lookup(chain_of(b, *TOKENS))
    with pytest.raises(DamagedBlock):
        lease.verify()
    assert found_blocks(b) == held.blocks.tolist()[:3]
    assert status_of(a)["statistics"]["checks"] == {"damaged": 1}


def test_an_operator_sees_it(daemon, three):
    a, b, _ = three
    held = write_prefix(a, chain_of(a, *TOKENS))
    damage(a, held.blocks[2])
    assert b.report_damage(held.blocks[2:3], held.generations[2:3]) == [Verdict.DAMAGED]
    shown = subprocess.run(
        [
            sys.executable, "-m", "hisparse_service", "status", "--runtime-dir",
            str(daemon.directory),
        ],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert "2 published blocks were withdrawn because of damage, 2 of them are still read" in shown
    assert "block_damaged" in daemon.log
    held.release()


def test_the_heartbeat_tells_the_owner_what_it_lost(three):
    a, b, _ = three
    held = write_prefix(a, chain_of(a, *TOKENS))
    damage(a, held.blocks[2])
    assert report_damage(b, held.blocks[2:3], held.generations[2:3]) == [Verdict.DAMAGED]
    lost = wait_until(a.take_lost_pins)
    expected = zip(held.blocks[2:].tolist(), held.generations[2:].tolist(), strict=True)
    assert lost == dict(expected)
    assert not b.take_lost_pins()
    held.release()


# --- engines ------------------------------------------------------------------------------------


def make_engine(namespace):
    """A writer's coordinator that verifies what it finds."""
    return HiSparseCoordinator(
        namespace,
        CoordinatorConfig(
            block_size=4, num_device_blocks=64, num_resident_groups=1, num_hot_groups=1,
            hot_blocks_per_request=1, max_num_requests=4, max_model_tokens=64, max_step_tokens=8,
        ),
        role=Role.WRITER, content=namespace.pool,
    )  # fmt: skip


def step(engine, name, tokens, *, publish=True):
    """One step of one request; its copies complete at once."""
    engine.prepare([StepWork(name, len(tokens))])
    mirrors = engine.commit(name, tokens)
    for mirror in mirrors:
        fill(engine._service, mirror.host_block, tokens[0] + mirror.page)
    engine.enqueued(mirrors)
    for mirror in mirrors:
        engine.completed(name, mirror.page)
    return engine.publish() if publish else None


def test_an_engine_builds_no_request_on_a_damaged_prefix(three):
    a, _, c = three
    engine = make_engine(a)
    engine.admit("first", [1] * 16, max_tokens=20)
    step(engine, "first", [1] * 8)
    step(engine, "first", [1] * 8)
    blocks = [page.host_block for page in engine.pages("first")]
    engine.finish("first")
    damage(a, blocks[2])
    admission = engine.admit("second", [1] * 16, max_tokens=20)
    assert admission.num_hit_tokens == 8
    assert engine.statistics.damaged_hits == 1
    assert len(found_blocks(c, [1] * 16)) == 2, "others are spared the finding"
    for at in (8, 16):
        step(engine, "second", [1] * (16 - at or 4))
    assert len(found_blocks(c, [1] * 16)) == 4
    engine.close()


def test_an_engine_whose_prefix_was_withdrawn_goes_on(three):
    a, b, _ = three
    engine = make_engine(a)
    for name, token in (("hurt", 1), ("well", 2), ("ending", 3)):
        engine.admit(name, [token] * 16, max_tokens=20)
        step(engine, name, [token] * 8)
    for name in ("hurt", "ending"):
        page = engine.pages(name)[0]
        damage(a, page.host_block)
        assert report_damage(b, [page.host_block], [page.generation]) == [Verdict.DAMAGED]
    # All three have pages that hang below what they published, two of them below nothing now.
    for name, token in (("hurt", 1), ("well", 2), ("ending", 3)):
        step(engine, name, [token] * 8, publish=False)
    engine.finish("ending")
    for _ in range(3):
        engine.publish()
    assert found_blocks(b, [2] * 16) == [page.host_block for page in engine.pages("well")]
    assert engine.num_finishing == 0, "what can be published nowhere is not waited for"
    assert engine.lost_requests() == ["hurt"]
    engine.preempt("hurt")
    assert status_of(a)["withdrawn"] == 0
    admission = engine.admit("hurt", [1] * 16, max_tokens=20)
    assert admission.num_hit_tokens == 0
    step(engine, "hurt", [1] * 8)
    assert len(found_blocks(b, [1] * 8)) == 2
    engine.check_accounting()
    engine.close()
    assert status_of(a)["blocks"]["reserved"] == 0
