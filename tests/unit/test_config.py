"""Settings: which source wins, where a value came from, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from hisparse_service.config import (
    DEFAULTS,
    FOREIGN_VARIABLES,
    Settings,
    default_runtime_dir,
    flatten,
    load_settings,
    parse_bytes,
    variable_name,
)
from hisparse_service.contract.errors import ConfigError
from hisparse_service.contract.limits import GIB, MIB
from hisparse_service.pool.settings import HugePages, MemoryLock
from hisparse_service.start import pool_settings

ROOT = Path(__file__).parents[2]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "settings.toml"


def load(file: Path | None = None, *, environment: dict[str, str] | None = None, **flags: object):
    named = {name.replace("__", "."): value for name, value in flags.items()}
    return load_settings(
        config_path=str(file) if file else None, environment=environment or {}, flags=named
    )


def test_defaults_are_valid_and_say_so() -> None:
    loaded = load()
    assert loaded.settings == Settings()
    assert set(loaded.origins) == set(DEFAULTS)
    assert set(loaded.origins.values()) == {"default"}
    assert flatten(loaded.settings) == dict(DEFAULTS)


def test_flags_win_over_environment_over_file(file: Path) -> None:
    file.write_text('instance = "a"\n[pool]\nbytes = "1GiB"\nname = "p"\npopulate_threads = 1\n')
    environment = {"HISPARSE_POOL__BYTES": "2GiB", "HISPARSE_POOL__POPULATE_THREADS": "2"}
    loaded = load(file, environment=environment, pool__populate_threads=3)
    assert loaded.settings.instance == "a"
    assert loaded.settings.pool.bytes == 2 * GIB
    assert loaded.settings.pool.populate_threads == 3
    assert loaded.origins["pool.name"] == f"file {file}"
    assert loaded.origins["pool.bytes"] == "environment HISPARSE_POOL__BYTES"
    assert loaded.origins["pool.populate_threads"] == "flag"


def test_the_file_may_be_named_by_the_environment(file: Path) -> None:
    file.write_text('instance = "b"\n')
    assert load(environment={"HISPARSE_CONFIG": str(file)}).settings.instance == "b"


def test_a_flag_that_was_not_given_does_not_hide_a_setting() -> None:
    environment = {"HISPARSE_INSTANCE": "c"}
    assert load(environment=environment, instance=None).settings.instance == "c"


@pytest.mark.parametrize("name", sorted(DEFAULTS))
def test_every_setting_can_be_given_by_its_variable(name: str) -> None:
    default = DEFAULTS[name]
    text = ",".join(map(str, default)) if isinstance(default, list) else str(default).lower()
    if name == "cuda.device":
        return  # contradicts its default neighbour when set alone
    loaded = load(environment={variable_name(name): text})
    assert loaded.origins[name].startswith("environment ")
    assert flatten(loaded.settings)[name] == default


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8GiB", 8 * GIB), ("512 MiB", 512 * MIB), ("1.5gib", 3 * GIB // 2), ("10GB", 10**10),
        ("4096", 4096), ("1_000", 1000), ("2k", 2048), ("0", 0),
    ],
)  # fmt: skip
def test_sizes_are_read(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1", "8 gigs", "1e9", "0.0001KiB", "1,5GiB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_bytes(text)


def test_lists_and_booleans_come_from_the_environment() -> None:
    settings = load(
        environment={
            "HISPARSE_SERVER__ALLOWED_UIDS": "1000, 1001",
            "HISPARSE_POOL__LOCK_MEMORY": "true",
            "HISPARSE_POOL__NUMA": "bind",
            "HISPARSE_POOL__NUMA_NODES": "0,1",
        }
    ).settings
    assert settings.server.allowed_uids == [1000, 1001]
    assert settings.pool.lock_memory is True
    told = pool_settings(settings)
    assert told.numa == "bind:0,1"
    assert told.memory_lock is MemoryLock.LOCK
    assert told.huge_pages is HugePages.OFF


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("instnace = 'x'", "Did you mean 'instance'"),
        ("[pool]\nbyte = 1", "Did you mean 'pool.bytes'"),
        ("[pools]\nbytes = 1", r"Did you mean \[pool\]"),
        ("[limit]\nmax_sessions = 1", r"Did you mean \[limits\]"),
        ("[limit]", r"no section \[limit\]"),
        ("[foo]\nbar = 1", r"Sections are \[cuda\]"),
        ("[limits]\nmax_sesions = 1", "Did you mean 'limits.max_sessions'"),
        ("max_sessions = 1", "Did you mean 'limits.max_sessions'"),
        ("[log]\nzzz = 1", r"Known are: log\.format, log\.level, log\.events_per_second$"),
        ("pool = 3", r"\[pool\]"),
        ("instance = ", "not TOML"),
        ("instance = 'a/b'", "instance"),
        ("[pool]\npopulate_threads = '3'", "populate_threads"),
        ("[pool]\nlock_memory = 1", "lock_memory"),
        ("[pool]\nbytes = 1", "pool.bytes is 1 B, it must lie between 2 MiB and 64 TiB"),
        ("[pool]\nbytes = 'x'", "the default is 1 GiB$"),
        ("[pool]\nnuma = 'both'", "pool.numa"),
        ("[log]\nlevel = 'loud'", "log.level"),
        ("[limits]\nmax_sessions = 0", "limits.max_sessions"),
    ],
)
def test_a_file_that_cannot_work_is_refused_by_name(file: Path, content: str, match: str) -> None:
    file.write_text(content)
    with pytest.raises(ConfigError, match=match) as caught:
        load(file)
    assert caught.value.remedy
    assert len(str(caught.value)) < 300


def test_a_missing_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load(Path("/nowhere/settings.toml"))


def test_a_misspelt_variable_is_refused_and_a_foreign_one_is_not() -> None:
    with pytest.raises(ConfigError, match="HISPARSE_POOL__BYTES"):
        load(environment={"HISPARSE_POOL_BYTES": "8GiB"})
    with pytest.raises(ConfigError, match="no setting"):
        load(environment={"HISPARSE_LIMITS__SESSIONS": "8"})
    load(environment={"HISPARSE_ENDPOINT": "x", "HISPARSE_CRASH_POINT": "y", "POOL__BYTES": "z"})


@pytest.mark.parametrize(
    ("variable", "remedy"),
    [
        ("HISPARSE_LIMIT__MAX_SESSIONS", "HISPARSE_LIMITS__MAX_SESSIONS"),
        ("HISPARSE_INSTNACE", "HISPARSE_INSTANCE"),
        ("HISPARSE_RUNTIMEDIR", "HISPARSE_RUNTIME_DIR"),
        ("HISPARSE_CONFG", "HISPARSE_CONFIG"),
        ("HISPARSE_POLL_BYTES", "HISPARSE_POOL__BYTES"),
        ("HISPARSE_FOO__BAR", r"sections are \[cuda\]"),
    ],
)
def test_a_variable_that_sets_nothing_is_no_silent_default(variable: str, remedy: str) -> None:
    """Before, the daemon started with defaults and said nothing."""
    with pytest.raises(ConfigError, match=f"there is no setting {variable}") as caught:
        load(environment={variable: "1"})
    assert re.search(remedy, caught.value.remedy)


def test_the_variables_of_a_kubernetes_service_are_left_alone() -> None:
    """The kubelet sets them in every pod of a namespace with a Service hisparse-service."""
    names = ("SERVICE_HOST", "SERVICE_PORT", "PORT", "PORT_9477_TCP", "PORT_9477_TCP_ADDR")
    load(environment={f"HISPARSE_SERVICE_{name}": "x" for name in names})


def test_every_variable_of_this_repository_is_a_setting_or_named() -> None:
    """A new one that is left out would be refused, or make a near miss of another name."""
    found = set[str]()
    for folder in ("hisparse_service", "worker_client", "tests", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            if path != Path(__file__):
                found |= set(re.findall(r"[\"\'](HISPARSE_[A-Z0-9_]+)[\"\']", path.read_text()))
    settings = {variable_name(name) for name in DEFAULTS} | {"HISPARSE_CONFIG"}
    assert found - settings == FOREIGN_VARIABLES
    load(environment=dict.fromkeys(FOREIGN_VARIABLES, "1"))


def test_an_unknown_flag_is_refused() -> None:
    with pytest.raises(ConfigError, match="flag: there is no setting"):
        load(pool__size=1)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"limits__session_timeout_s": 4.0}, "limits.heartbeat_interval_s"),
        ({"limits__lease_ttl_s": 15.0}, "limits.session_timeout_s"),
        ({"limits__writer_lease_ttl_s": 1.0}, "limits.session_timeout_s"),
        ({"pool__numa_nodes": [0]}, "pool.numa"),
        ({"pool__numa": "bind"}, "pool.numa_nodes"),
        ({"cuda__device": 1}, "cuda.register"),
    ],
)
def test_contradictory_settings_are_refused_with_both_origins(
    flags: dict[str, object], named: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(**flags)
    assert named in caught.value.message
    assert "from flag" in caught.value.message
    assert "from default" in caught.value.message


def test_settings_are_frozen() -> None:
    settings = load().settings
    with pytest.raises(AttributeError):
        settings.pool.bytes = 1  # type: ignore[misc]
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"unknown": 1}, Settings)


def test_the_default_runtime_directory_is_the_users() -> None:
    environment = {"XDG_RUNTIME_DIR": "/run/user/7"}
    assert default_runtime_dir("x", environment) == Path("/run/user/7/hisparse/x")
    assert default_runtime_dir("x", {}).name == "x"
    assert load(runtime_dir="some/where").settings.resolved_runtime_dir({}).is_absolute()
