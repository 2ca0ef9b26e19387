"""Start, stop, crash and adoption of a real daemon."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import KEY_SPACE, DaemonProcess, RawClient, keys_of, unique_instance, wait_until

from hisparse_service.contract import messages as m
from hisparse_service.contract.errors import NotReady

MakeDaemon = Callable[..., DaemonProcess]
KEYS = keys_of(1, 2, 3)


def test_readiness_reaches_the_service_manager(make_daemon: MakeDaemon, runtime_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(runtime_dir / "notify"))
        manager.settimeout(30)
        daemon = make_daemon(runtime_dir)
        daemon.close()
        daemon.environment["NOTIFY_SOCKET"] = str(runtime_dir / "notify")
        daemon.start().wait_ready()
        heard = b""
        while b"READY=1" not in heard.splitlines():
            heard = manager.recv(500)
        assert daemon.terminate() == 0
        while b"STOPPING=1" not in heard.splitlines():
            heard = manager.recv(500)


def test_the_daemon_imports_no_torch(daemon: DaemonProcess) -> None:
    maps = Path(f"/proc/{daemon.process.pid}/maps").read_text()
    assert "msgspec" in maps
    assert "torch" not in maps


def test_i6_sigterm_without_workers_releases_the_pool(daemon: DaemonProcess) -> None:
    assert daemon.segments
    assert daemon.terminate() == 0
    assert daemon.segments == []
    assert not (daemon.runtime_dir / "control.sock").exists()


def test_i6_sigterm_with_a_worker_keeps_the_pool_for_the_successor(
    make_daemon: MakeDaemon, runtime_dir: Path
) -> None:
    daemon = make_daemon(runtime_dir, server__drain_timeout_s="0.2").wait_ready()
    with daemon.client() as client:
        namespace = client.open()
        client.publish(namespace, KEYS)
        assert daemon.terminate() == 0
        assert daemon.segments
    daemon.start().wait_ready()
    with daemon.client() as client:
        namespace = client.open()
        found = client.ask(m.BlocksReply, m.Lookup, namespace, 0, KEY_SPACE, KEYS)
        assert len(found.blocks) == 12


def test_a_second_sigterm_does_no_harm(make_daemon: MakeDaemon, runtime_dir: Path) -> None:
    daemon = make_daemon(runtime_dir, server__drain_timeout_s="1").wait_ready()
    with daemon.client() as client:
        daemon.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "draining" in daemon.log)
        daemon.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "signal_again" in daemon.log)
        client.ask(m.Pong, m.Ping)
        daemon.process.send_signal(signal.SIGINT)
        assert daemon.process.wait(30) == 0
    assert "Traceback" not in daemon.log


def test_a_draining_daemon_ends_when_its_last_worker_leaves(
    make_daemon: MakeDaemon, runtime_dir: Path
) -> None:
    daemon = make_daemon(runtime_dir, server__drain_timeout_s="600").wait_ready()
    with daemon.client() as client:
        namespace = client.open()
        lease = client.ask(m.BlocksReply, m.Reserve, namespace, 0, 1).lease_id
        daemon.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "draining" in daemon.log)
        with pytest.raises(NotReady, match="draining"):
            client.ask(m.BlocksReply, m.Reserve, namespace, 0, 1)
        with RawClient(daemon.runtime_dir) as late, pytest.raises(NotReady, match="draining"):
            late.hello()
        client.ask(m.Done, m.ReleaseLeases, [lease])
    assert daemon.process.wait(30) == 0
    assert daemon.segments == []


def test_sigterm_while_the_pool_is_populated_leaves_nothing(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(pool_bytes="512MiB", pool__populate_threads="1")
    wait_until(lambda: "starting" in daemon.log or daemon.process.poll() is not None)
    assert daemon.terminate() == 0
    assert daemon.segments == []


def test_after_sigkill_the_next_daemon_adopts_what_was_published_and_frees_the_rest(
    make_daemon: MakeDaemon, runtime_dir: Path
) -> None:
    daemon = make_daemon(
        runtime_dir, limits__heartbeat_interval_s="0.2", limits__session_timeout_s="1.5",
        limits__lease_ttl_s="2", limits__writer_lease_ttl_s="2", limits__adoption_grace_s="1",
    ).wait_ready()  # fmt: skip
    with daemon.client() as client:
        namespace = client.open()
        client.publish(namespace, KEYS)
        client.ask(m.BlocksReply, m.Reserve, namespace, 0, 5)
        first_epoch = client.epoch
        daemon.kill()
    daemon.start().wait_ready()
    with daemon.client() as again:
        assert again.epoch not in (0, first_epoch)
        namespace = again.open()
        assert again.ask(m.BackingReply, m.AllocateBacking, namespace, 2).adopted
        expected = {"capacity": 63, "free": 60, "reserved": 0, "published": 3, "pinned": 0}
        wait_until(lambda: again.counts(namespace) == expected)
        found = again.ask(m.BlocksReply, m.Lookup, namespace, 0, KEY_SPACE, KEYS)
        assert len(found.blocks) == 12


def test_a_client_of_a_dead_daemon_meets_unknown_session_and_a_new_epoch(
    make_daemon: MakeDaemon, runtime_dir: Path
) -> None:
    daemon = make_daemon(runtime_dir).wait_ready()
    with daemon.client() as client:
        first_epoch = client.epoch
        daemon.kill()
        daemon.start().wait_ready()
        client.send(m.Ping)
        error = client.receive_error()
        assert error.code == "UnknownSession"
        assert error.epoch != first_epoch
        client.hello()


def test_a_daemon_killed_at_each_step_of_making_its_pool_is_followed_by_a_clean_one(
    make_daemon: MakeDaemon, runtime_dir: Path
) -> None:
    daemon = make_daemon(runtime_dir)
    daemon.close()
    for point in ("segment.after_truncate", "segment.after_populate", "segment.after_publish"):
        daemon.environment["HISPARSE_CRASH_POINT"] = point
        daemon.start()
        assert daemon.process.wait(30) == -signal.SIGKILL, point
        del daemon.environment["HISPARSE_CRASH_POINT"]
        daemon.start().wait_ready()
        assert len(daemon.segments) == 1, point
        assert daemon.terminate() == 0
        assert daemon.segments == [], point


def test_an_unknown_setting_ends_the_start_with_a_clear_message(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(pool__byte="1GiB")
    assert daemon.process.wait(30) == 3
    assert "HISPARSE_POOL__BYTES" in daemon.log
    assert "Traceback" not in daemon.log


# --- the death of clients -----------------------------------------------------------------------

_CLIENT = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from helpers import RawClient, m, keys_of
client = RawClient(Path({runtime!r}))
client.hello(group="tp", rank=0)
namespace = client.open()
client.ask(m.LeaseReply, m.TakeWriter, namespace)
client.publish(namespace, keys_of(1, 2))
client.ask(m.BlocksReply, m.Reserve, namespace, 0, 7)
client.ask(m.TurnReply, m.RegistrationTurn, namespace, False)
print("holding", flush=True)
sys.stdin.read()
"""


def holding_client(daemon: DaemonProcess) -> subprocess.Popen[bytes]:
    """A process that holds the writer lease, 2 pins, 7 reserved blocks and a registration turn."""
    code = _CLIENT.format(tests=str(Path(__file__).parent.parent), runtime=str(daemon.runtime_dir))
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"holding\n"
    return process


def test_i9_a_killed_client_gives_everything_back_and_its_published_blocks_stay(
    daemon: DaemonProcess, connect: Callable[..., RawClient]
) -> None:
    watcher = connect(group="tp", rank=1)
    process = holding_client(daemon)
    try:
        namespace = watcher.open()
        held = watcher.counts(namespace)
        assert (held["reserved"], held["pinned"]) == (7, 2)
        turn = watcher.ask(m.TurnReply, m.RegistrationTurn, namespace, False)
        assert (turn.granted, turn.ahead) == (False, 1)
    finally:
        process.kill()
        process.wait(30)
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()
    wait_until(lambda: watcher.counts(namespace)["reserved"] == 0)
    assert watcher.counts(namespace) == {
        "capacity": 63, "free": 61, "reserved": 0, "published": 2, "pinned": 0,
    }  # fmt: skip
    watcher.ask(m.LeaseReply, m.TakeWriter, namespace)
    assert watcher.ask(m.TurnReply, m.RegistrationTurn, namespace, False).granted


def test_i1_a_closed_connection_ends_the_session_but_its_process_may_go_on_copying(
    connect: Callable[..., RawClient],
) -> None:
    """What it had reserved is given to nobody; the process, seen to live, gets it back."""
    watcher, other = connect(), connect()
    namespace = watcher.open()
    other.open()
    got = other.ask(m.BlocksReply, m.Reserve, namespace, 0, 3)
    assert watcher.counts(namespace)["reserved"] == 3
    other.close()

    def ended() -> dict[str, int]:
        status = watcher.ask(m.StatusReply, m.Status).status
        return dict(status["sessions"]["ended_total"])

    wait_until(ended)
    assert ended() == {"disconnected": 1}
    assert watcher.counts(namespace)["reserved"] == 3
    again = connect()
    again.open()
    back = again.ask(m.BlocksReply, m.Reclaim, namespace, 0, got.blocks, got.generations)
    assert (back.blocks, back.generations) == (got.blocks, got.generations)
    again.ask(m.Done, m.Bye)
    assert watcher.counts(namespace)["reserved"] == 0


def test_i9_connections_that_come_and_go_end_no_other_session(
    connect: Callable[..., RawClient],
) -> None:
    """Each takes over the descriptor of one that just ended; 6 % were taken for that one."""
    errors: list[BaseException] = []

    def come_and_go() -> None:
        try:
            for _ in range(40):
                client = connect(greet=False)
                client.hello()
                client.ask(m.Pong, m.Ping)
                client.close()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=come_and_go) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors


def test_a_silent_session_times_out_and_a_heartbeat_keeps_one(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(
        limits__heartbeat_interval_s="0.1", limits__session_timeout_s="1.0"
    ).wait_ready()
    with daemon.client() as silent, daemon.client() as lively, daemon.client(operator=True) as boss:

        def ended() -> bool:
            lively.ask(m.Pong, m.Ping)
            status = boss.ask(m.StatusReply, m.Status).status
            return bool(status["sessions"]["ended_total"] == {"timed_out": 1})

        wait_until(ended)
        rows = boss.ask(m.ListReply, m.Sessions).rows
        assert {row["session"] for row in rows} == {lively.session_id, boss.session_id}
        silent.send(m.Ping)
        assert silent.receive_error().code == "UnknownSession"


def test_a_dead_pid_in_the_lock_file_does_not_matter(
    make_daemon: MakeDaemon, runtime_dir: Path
) -> None:
    (runtime_dir / "run").mkdir(mode=0o700)
    (runtime_dir / "run" / "daemon.lock").write_text(f"{os.getpid()} 1\n")
    (runtime_dir / "run" / "control.sock").touch()
    daemon = make_daemon(runtime_dir, instance=unique_instance()).wait_ready()
    with daemon.client() as client:
        client.ask(m.Pong, m.Ping)
