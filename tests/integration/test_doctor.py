"""doctor finds each problem in a world that has it, says what to do, repairs only what is safe."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import DaemonProcess, unique_instance, wait_until

from hisparse_service.cli import doctor_host as host
from hisparse_service.cli import doctor_service as service
from hisparse_service.cli.doctor_findings import Check, Finding, Verdict, bad
from hisparse_service.config import Settings, load_settings
from hisparse_service.contract import messages as m
from hisparse_service.contract.limits import GIB

MakeDaemon = Callable[..., DaemonProcess]
HELD = str(Path(__file__).parent.parent / "held_daemon.py")
TIMEOUT_S = 110.0
OWN_SHM = 'mount -t tmpfs -o size={size},mode=1777 tmpfs /dev/shm && exec "$@"'


def settings_of(**flags: Any) -> Settings:
    named = {name.replace("__", "."): value for name, value in flags.items()}
    return load_settings(flags=named, environment={}).settings


def doctor(*arguments: str, prefix: tuple[str, ...] = (), **environment: str) -> dict[str, Any]:
    """Run the command; check name to its rows."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HISPARSE_")}
    ran = subprocess.run(
        [*prefix, sys.executable, "-m", "hisparse_service", "doctor", "--json", *arguments],
        capture_output=True, text=True, env=kept | environment, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert ran.stdout, ran.stderr
    rows: dict[str, Any] = {}
    for row in json.loads(ran.stdout):
        rows.setdefault(row["check"], []).append(row)
    has_bad = any(row["verdict"] == "bad" for each in rows.values() for row in each)
    assert ran.returncode == int(has_bad)
    return rows


def where(daemon: DaemonProcess) -> tuple[str, ...]:
    return (
        "--runtime-dir", str(daemon.runtime_dir), "--instance", daemon.instance,
        "--set", "pool.bytes=8MiB", "--quick",
    )  # fmt: skip


def expect(finding: Finding, verdict: Verdict, *words: str) -> None:
    assert finding.verdict is verdict, finding
    for word in words:
        assert word in f"{finding.found} | {finding.remedy}", finding
    if verdict in (Verdict.BAD, Verdict.WARNING):
        assert finding.remedy


def findings(found: Finding | Any) -> list[Finding]:
    return [found] if isinstance(found, Finding) else list(found)


# --- the machine --------------------------------------------------------------------------------


def can_unshare() -> bool:
    try:
        tried = subprocess.run(
            ["unshare", "--mount", "sh", "-c", OWN_SHM.format(size="4m"), "sh", "true"],
            capture_output=True, timeout=30, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return False
    return tried.returncode == 0


needs_unshare = pytest.mark.skipif(not can_unshare(), reason="needs unshare and mount")


def own_shm(size: str) -> tuple[str, ...]:
    return ("unshare", "--mount", "sh", "-c", OWN_SHM.format(size=size), "sh")


@needs_unshare
def test_a_small_dev_shm_is_found_and_the_round_trip_fails_in_it(runtime_dir: Path) -> None:
    rows = doctor(
        "--set", "pool.bytes=64MiB", "--runtime-dir", str(runtime_dir / "run"),
        "--instance", unique_instance(), prefix=own_shm("4m"),
    )  # fmt: skip
    (found,) = rows["shared memory"]
    assert found["verdict"] == "bad"
    assert "64.0 MiB" in found["found"]
    assert "4.0 MiB of 4.0 MiB" in found["found"]
    assert "--shm-size" in found["remedy"]
    assert rows["round trip"][0]["verdict"] == "bad"
    assert "PoolTooLarge" in rows["round trip"][0]["found"]


def test_a_missing_or_closed_dev_shm_is_found(tmp_path: Path) -> None:
    roots = host.Roots(shm=tmp_path / "none")
    expect(host.check_shared_memory(settings_of(), roots), Verdict.BAD, "is not there")


def test_a_pool_that_is_there_needs_nothing_more(tmp_path: Path) -> None:
    settings = settings_of(instance="t", pool__bytes="1GiB")
    (tmp_path / "hisparse-t-main").touch()
    assert host.needed_bytes(settings, host.Roots(shm=tmp_path)) == GIB
    os.truncate(tmp_path / "hisparse-t-main", GIB)
    assert host.needed_bytes(settings, host.Roots(shm=tmp_path)) == 0


def tree(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_a_tight_cgroup_is_found(tmp_path: Path) -> None:
    proc = tree(tmp_path / "proc", self__cgroup="0::/pod\n")
    cgroup = tree(tmp_path / "cgroup")
    (cgroup / "pod").mkdir(parents=True)
    (cgroup / "pod/memory.max").write_text(f"{GIB}\n")
    (cgroup / "pod/memory.current").write_text(f"{GIB // 2}\n")
    roots = host.Roots(proc=proc, cgroup=cgroup, shm=tmp_path)
    found = host.check_cgroup(settings_of(pool__bytes="1GiB"), roots)
    expect(found, Verdict.BAD, "512.0 MiB of 1.0 GiB", "MemoryMax")
    good = host.check_cgroup(settings_of(pool__bytes="256MiB"), roots)
    expect(good, Verdict.GOOD)


def test_too_little_memory_is_found(tmp_path: Path) -> None:
    proc = tree(tmp_path, meminfo="MemTotal: 4194304 kB\nMemAvailable: 524288 kB\n")
    roots = host.Roots(proc=proc, shm=tmp_path)
    expect(host.check_memory(settings_of(pool__bytes="1GiB"), roots), Verdict.BAD, "512.0 MiB")


def test_a_low_memlock_limit_is_found_where_pages_are_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proc = tree(tmp_path, self__status="CapEff: 0000000000000000\nVmLck: 0 kB\n")
    monkeypatch.setattr(host.resource, "getrlimit", lambda _: (65_536, 65_536))
    roots = host.Roots(proc=proc)
    locked = settings_of(pool__lock_memory=True)
    expect(host.check_memlock(locked, roots), Verdict.BAD, "64.0 KiB", "LimitMEMLOCK")
    expect(host.check_memlock(settings_of(), roots), Verdict.GOOD, "nothing is locked")


@pytest.mark.parametrize(
    ("mode", "policy", "word"),
    [("[never] advise always", "advise", "echo advise"), ("never [always]", "never", "compaction")],
)
def test_huge_pages_that_are_not_as_the_settings_want_are_found(
    tmp_path: Path, mode: str, policy: str, word: str
) -> None:
    tree(tmp_path, kernel__mm__transparent_hugepage__shmem_enabled=mode)
    found = findings(
        host.check_huge_pages(settings_of(pool__huge_pages=policy), host.Roots(sys=tmp_path))
    )
    expect(found[0], Verdict.WARNING, word)


def test_reserved_huge_pages_that_nobody_uses_are_found(tmp_path: Path) -> None:
    tree(tmp_path, meminfo="MemTotal: 8388608 kB\nHugePages_Free: 1024\nHugepagesize: 2048 kB\n")
    found = findings(host.check_huge_pages(settings_of(), host.Roots(proc=tmp_path)))
    expect(found[-1], Verdict.WARNING, "2.0 GiB", "nr_hugepages")


def test_numa_without_a_policy_and_with_an_impossible_one_are_found(tmp_path: Path) -> None:
    tree(tmp_path, devices__system__node__has_memory="0-1\n")
    roots = host.Roots(sys=tmp_path)
    expect(host.check_numa(settings_of(), roots), Verdict.WARNING, "2 nodes", "interleave")
    bound = settings_of(pool__numa="bind", pool__numa_nodes="5")
    expect(host.check_numa(bound, roots), Verdict.BAD, "[5]")
    interleaved = settings_of(pool__numa="interleave")
    expect(host.check_numa(interleaved, roots), Verdict.GOOD)


SECCOMP = """
import ctypes, json, struct
from hisparse_service.cli.doctor_host import Roots, check_kernel
rules = [(0x20, 0, 0, 0)]  # load the call's number
for number in REFUSED:
    rules += [(0x15, 0, 1, number), (0x06, 0, 0, 0x50001)]  # EPERM
rules += [(0x06, 0, 0, 0x7FFF0000)]  # allow
code = b"".join(struct.pack("HBBI", *rule) for rule in rules)
buffer = ctypes.create_string_buffer(code)
program = struct.pack("HxxxxxxQ", len(rules), ctypes.addressof(buffer))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.c_char_p(program), 0, 0) == 0, ctypes.get_errno()
found = check_kernel(Roots())
print(json.dumps([found.verdict.value, found.found, found.remedy]))
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="call numbers of x86_64")
@pytest.mark.parametrize(
    ("refused", "verdict", "words"),
    [
        ([434, 319], "bad", ["memfd_create", "pidfd_open"]),
        ([28], "warning", ["MADV_POPULATE_READ", "MADV_POPULATE_WRITE"]),
        ([], "good", ["work"]),
    ],
)
def test_calls_that_a_seccomp_filter_refuses_are_found(
    refused: list[int], verdict: str, words: list[str]
) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", SECCOMP.replace("REFUSED", repr(refused))], capture_output=True,
        text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found[0] == verdict
    assert all(word in found[1] for word in words)


def test_a_moved_monotonic_clock_is_found() -> None:
    code = (
        "from hisparse_service.cli.doctor_host import Roots, check_clock\n"
        "print(check_clock(Roots()).found)"
    )
    ran = subprocess.run(
        ["unshare", "--fork", "--time", "--monotonic", "1000", sys.executable, "-c", code],
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    if "unshare" in ran.stderr:
        pytest.skip(f"needs time namespaces: {ran.stderr.strip()}")
    assert "monotonic clock is moved" in ran.stdout


def test_a_wall_clock_that_is_not_set_or_not_synchronised_is_found(tmp_path: Path) -> None:
    unset = host.Roots(proc=tmp_path, wall_time_s=lambda: 86_400.0)
    expect(host.check_clock(unset), Verdict.WARNING, "1970-01-02")
    loose = host.Roots(proc=tmp_path, adjtimex_status=lambda: 0x40)
    expect(host.check_clock(loose), Verdict.WARNING, "not synchronised")
    good = host.Roots(proc=tmp_path, adjtimex_status=lambda: 0)
    expect(host.check_clock(good), Verdict.GOOD)


def test_the_status_of_the_clock_is_the_kernels() -> None:
    status = host.read_adjtimex_status()
    buffer = ctypes.create_string_buffer(512)
    answer = ctypes.CDLL(None).adjtimex(buffer)
    assert status == -1 or bool(status & 0x40) == (answer == 5)  # TIME_ERROR


def test_a_gpu_that_is_asked_for_and_not_there_is_found(tmp_path: Path) -> None:
    none = host.Roots(dev=tmp_path)
    (found,) = findings(host.check_driver(settings_of(cuda__register=True), none))
    expect(found, Verdict.BAD, "no NVIDIA GPU")
    wanted = settings_of(cuda__device_backing_bytes=1 << 30)
    (found,) = findings(host.check_driver(wanted, none))
    expect(found, Verdict.BAD, "cuda.device_backing_bytes")
    (found,) = findings(host.check_driver(settings_of(), none))
    expect(found, Verdict.SKIPPED)


def test_device_files_without_a_driver_are_found(tmp_path: Path) -> None:
    tree(tmp_path, dev__nvidia0="")
    roots = host.Roots(dev=tmp_path / "dev", proc=tmp_path / "proc")
    (found,) = findings(host.check_driver(settings_of(), roots))
    expect(found, Verdict.BAD, "nvidia/version", "nvidia-smi")
    tree(tmp_path, proc__driver__nvidia__version="NVRM version: x86_64  580.95.05  Sep\n")
    (found, *_) = findings(host.check_driver(settings_of(pool__bytes="600GiB"), roots))
    expect(found, Verdict.GOOD, "580.95.05", "512 GiB", "256.0 GiB")


@pytest.mark.skipif(host.has_gpu(host.Roots()), reason="here is a GPU")
def test_cuda_ipc_that_does_not_work_is_found(tmp_path: Path) -> None:
    tree(tmp_path, dev__nvidia0="")
    found = host.check_cuda_ipc(settings_of(), host.Roots(dev=tmp_path / "dev"))
    expect(found, Verdict.BAD, "share an IPC namespace")
    expect(host.check_cuda_ipc(settings_of(), host.Roots(dev=tmp_path)), Verdict.SKIPPED)


@pytest.mark.gpu
def test_cuda_ipc_works_between_two_processes() -> None:
    expect(host.check_cuda_ipc(settings_of(), host.Roots()), Verdict.GOOD, "was read by another")


# --- the daemon and a worker's way to it --------------------------------------------------------


def test_a_directory_that_is_open_to_others_is_found_and_closed(
    runtime_dir: Path,
) -> None:
    place = runtime_dir / "run"
    place.mkdir()
    place.chmod(0o755)
    arguments = ("--runtime-dir", str(place), "--instance", unique_instance(), "--quick")
    (found,) = doctor(*arguments)["runtime directory"]
    assert (found["verdict"], found["can_fix"]) == ("bad", "yes")
    assert "0755" in found["found"]
    (found,) = doctor(*arguments, "--fix")["runtime directory"]
    assert found["verdict"] == "fixed"
    assert place.stat().st_mode & 0o777 == 0o700


def test_a_directory_that_cannot_be_one_is_found(runtime_dir: Path) -> None:
    def check(path: Path) -> Finding:
        (found,) = Check(
            "runtime directory",
            lambda: service.check_runtime_directory(settings_of(runtime_dir=str(path))),
        ).run()
        return found

    (runtime_dir / "file").touch()
    expect(check(runtime_dir / "file"), Verdict.BAD, "is no directory")
    expect(check(runtime_dir / ("x" * 120)), Verdict.BAD, "shorter")
    expect(check(runtime_dir / "new"), Verdict.GOOD)
    if os.geteuid() == 0:
        (runtime_dir / "theirs").mkdir(mode=0o700)
        os.chown(runtime_dir / "theirs", 12_345, 12_345)
        expect(check(runtime_dir / "theirs"), Verdict.BAD, "12345")


def test_a_living_daemon_is_good_in_every_way(daemon: DaemonProcess) -> None:
    rows = doctor(*where(daemon))
    for check in ("runtime directory", "daemon", "segments", "attach", "http"):
        assert [row["verdict"] for row in rows[check]] == ["good"], rows[check]
    assert "and the segment is the daemon's" in rows["attach"][0]["found"]


def test_the_size_that_counts_is_the_running_daemons(daemon: DaemonProcess) -> None:
    """The settings of the command say 60 TiB: no machine has that."""
    rows = doctor(*where(daemon)[:4], "--set", "pool.bytes=60TiB", "--quick")
    for check in ("shared memory", "memory"):
        (found,) = rows[check]
        assert found["verdict"] == "good", found
        assert "60.0 TiB" not in found["found"], found


def test_what_a_starting_daemon_has_reserved_is_not_needed_again(tmp_path: Path) -> None:
    settings = settings_of(instance="t", pool__bytes="1GiB")
    roots = host.Roots(shm=tmp_path, reserved_bytes=GIB // 4)
    assert host.needed_bytes(settings, roots) == GIB - GIB // 4


def test_no_daemon_and_a_killed_one_are_told_apart(daemon: DaemonProcess) -> None:
    daemon.kill()
    rows = doctor(*where(daemon))
    assert "it was killed" in rows["daemon"][0]["found"]
    assert "adopts it" in rows["segments"][0]["found"]
    assert rows["attach"][0]["verdict"] == "bad"
    rows = doctor(*where(daemon), "--fix")
    assert rows["daemon"][0]["verdict"] == "fixed"
    rows = doctor(*where(daemon))
    assert "none runs in" in rows["daemon"][0]["found"]
    assert daemon.segments  # a pool with prefixes in it is not removed by --fix


def test_a_daemon_that_hangs_is_found(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    daemon = make_daemon(program=(HELD, "reply.before_Ping", str(hold))).wait_ready()
    with daemon.client() as client:
        hold.touch()
        client.send(m.Ping)
        wait_until(lambda: hold.with_suffix(".reached").exists())
        rows = doctor(*where(daemon))
        hold.unlink()
    (found,) = rows["daemon"]
    assert found["verdict"] == "bad"
    for (found,) in (rows["daemon"], rows["attach"]):
        assert f"pid {daemon.process.pid} holds the lock and does not answer" in found["found"]
        assert "py-spy" in found["remedy"]
        assert "serve" not in found["remedy"]


def test_a_daemon_that_populates_or_drains_is_told(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    daemon = make_daemon(program=(HELD, "segment.after_truncate", str(hold)))
    wait_until(lambda: hold.with_suffix(".reached").exists())
    wait_until((daemon.runtime_dir / "control.sock").exists)
    rows = doctor(*where(daemon))
    assert "0% of the pool is populated" in rows["daemon"][0]["found"]
    assert "not open yet" in rows["attach"][0]["found"]
    hold.unlink()
    daemon.wait_ready()
    with daemon.client(), daemon.client(operator=True) as operator:
        operator.ask(m.Done, m.Drain, False)
        rows = doctor(*where(daemon))
    assert rows["daemon"][0]["verdict"] == "warning"
    assert "draining" in rows["daemon"][0]["found"]


def test_another_daemon_of_the_same_instance_is_found(
    daemon: DaemonProcess, runtime_dir: Path
) -> None:
    rows = doctor(
        "--runtime-dir", str(runtime_dir / "run"), "--instance", daemon.instance, "--quick"
    )
    (found,) = rows["daemon"]
    assert found["verdict"] == "bad"
    assert "another daemon of the same instance" in found["found"]


def test_a_segment_that_was_never_finished_is_found_and_removed(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon()
    daemon.environment["HISPARSE_CRASH_POINT"] = "segment.after_populate"
    daemon.close()
    daemon.start()
    daemon.process.wait(TIMEOUT_S)
    assert daemon.segments
    (found,) = doctor(*where(daemon))["segments"]
    assert (found["verdict"], found["can_fix"]) == ("warning", "yes")
    assert "purge" in found["remedy"]
    (found,) = doctor(*where(daemon), "--fix")["segments"]
    assert found["verdict"] == "fixed"
    assert daemon.segments == []


def test_a_segment_that_is_not_ours_is_found_and_left_alone(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon().wait_ready()
    daemon.terminate()
    path = Path(f"/dev/shm/hisparse-{daemon.instance}-main")
    path.write_bytes(b"somebody else's" * 1_000)
    (found,) = doctor(*where(daemon), "--fix")["segments"]
    assert (found["verdict"], found["can_fix"]) == ("bad", "no")
    assert path.exists()


@needs_unshare
def test_a_worker_that_sees_another_dev_shm_is_told_so(daemon: DaemonProcess) -> None:
    (found,) = doctor(*where(daemon), prefix=own_shm("16m"))["attach"]
    assert found["verdict"] == "bad"
    assert "cannot be opened here" in found["found"]
    assert "Share /dev/shm" in found["remedy"]


def test_an_address_that_the_daemon_cannot_have_is_found(make_daemon: MakeDaemon) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        daemon = make_daemon(http__listen=f"127.0.0.1:{taken.getsockname()[1]}").wait_ready()
        wait_until(lambda: "http_address_unavailable" in daemon.log)
        (found,) = doctor(*where(daemon))["http"]
    assert found["verdict"] == "warning"
    assert "Address already in use" in found["found"]


def test_a_token_file_that_cannot_be_read_is_found(tmp_path: Path) -> None:
    settings = settings_of(http__token_file=str(tmp_path / "none"))
    expect(service.check_http(settings), Verdict.BAD, "No such file")
    (tmp_path / "none").write_text("\n")
    expect(service.check_http(settings), Verdict.BAD, "empty")


def test_the_round_trip_works_here() -> None:
    expect(service.check_round_trip(), Verdict.GOOD, "published, found and read")


def test_the_vllm_plugin_is_checked_where_vllm_is(tmp_path: Path, runtime_dir: Path) -> None:
    arguments = ("--runtime-dir", str(runtime_dir / "run"), "--instance", unique_instance())
    package = tmp_path / "vllm-0.1.2.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.1.2\n")
    rows = doctor(*arguments, PYTHONPATH=str(tmp_path))["vllm plugin"]
    (version,) = [row for row in rows if row["found"].startswith("vllm version")]
    assert version["verdict"] == "bad"
    assert "0.1.2, supported" in version["found"]
    endpoint = rows[-1]
    assert endpoint["verdict"] == "bad"
    assert "endpoint" in endpoint["found"]


def test_vllm_alone_is_checked_with_the_endpoint_that_the_engine_is_given(
    tmp_path: Path, daemon: DaemonProcess
) -> None:
    def found(*arguments: str, **environment: str) -> dict[str, dict[str, str]]:
        rows = doctor("vllm", *arguments, **environment)
        assert list(rows) == ["vllm plugin"]
        return {row["found"].split(":")[0]: row for row in rows["vllm plugin"]}

    rows = found()
    assert rows["vllm version"]["verdict"] == "bad"
    assert "Python that runs vLLM" in rows["vllm version"]["remedy"]
    assert rows["endpoint"]["verdict"] == "warning", "an engine without one runs stock"
    there = found(str(daemon.runtime_dir))["endpoint"]
    assert there["verdict"] == "good"
    assert daemon.instance in there["found"]
    assert found("--runtime-dir", str(daemon.runtime_dir))["endpoint"] == there
    away = found(HISPARSE_SERVICE_ENDPOINT=str(tmp_path))["endpoint"]
    assert away["verdict"] == "bad"
    assert str(tmp_path) in away["found"]


# --- the frame ----------------------------------------------------------------------------------


def test_a_check_that_breaks_does_not_hide_the_others() -> None:
    def breaks() -> Finding:
        raise ZeroDivisionError

    (found,) = Check("x", breaks).run()
    expect(found, Verdict.WARNING, "ZeroDivisionError")


def test_a_repair_that_fails_leaves_it_bad() -> None:
    def fails() -> str:
        raise PermissionError("not allowed")

    (found,) = Check("x", lambda: bad("x", "broken", "do this", fails)).run(fix=True)
    expect(found, Verdict.BAD, "broken", "not allowed", "do this")


def test_one_line_each_for_people(daemon: DaemonProcess) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "hisparse_service", "doctor", *where(daemon)], capture_output=True,
        text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    lines = ran.stdout.splitlines()
    assert len(lines) == 15
    assert all(line.split()[0] in {each.value for each in Verdict} for line in lines[:-1])
