"""Settings: file < environment < flags, read once, checked as a whole, then frozen.

The only reader of the three sources; inner code is given the frozen sections it needs and never
sees a file, `os.environ` or an argument parser. Each value remembers where it came from, which is
what `hisparse-service config show` prints.

msgspec does the conversion and the range checks: it is in the process anyway, where
pydantic-settings would add 24 MB and 0.4 s to the daemon's start (measured on 2 cores).

Pure but for `load_settings`, which reads one file: any thread.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from hisparse_service.contract import limits
from hisparse_service.contract.errors import ConfigError
from hisparse_service.contract.sizes import size_text

CONFIG_PATH_VARIABLE: Final = "HISPARSE_CONFIG"
_PREFIX: Final = "HISPARSE_"
FOREIGN_VARIABLES: Final = frozenset(
    (
        # The vLLM plugin, and the switches of the tests.
        "HISPARSE_SERVICE_ENDPOINT", "HISPARSE_CRASH_POINT", "HISPARSE_TESTING_DEVICE_DIRECTORY",
        "HISPARSE_CI_REQUIRE_CONFORMANCE", "HISPARSE_CI_SKIP_CONFORMANCE", "HISPARSE_PICTURES",
        "HISPARSE_FAULTS_EVERY", "HISPARSE_FAULTS_EXAMPLES", "HISPARSE_FAULTS_LIVE_FRAMES",
        "HISPARSE_STORM_IN_NAMESPACE", "HISPARSE_STORM_PLANT",
    )
)  # fmt: skip
"""Variables of this project that are no settings."""
_NEAR: Final = 0.8
"""How alike (difflib's ratio) a name must be to count as a setting's misspelt."""
_MIN_POOL_BYTES: Final = 2 * limits.MIB

# As in pool/names.py, which this module may not import: both become part of a segment's name.
InstanceName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
PoolName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_]{1,32}$")]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]
BlockQuota = Annotated[int, Meta(ge=0, le=2**63 - 1)]
ByteCount = Annotated[int, Meta(ge=0)]
"""Bytes; text such as "8GiB", "512 MiB" or "1_000_000" is understood."""


class PoolSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The host memory that the daemon owns."""

    name: PoolName = "main"
    """The segment is /hisparse-<instance>-<name>."""
    bytes: ByteCount = limits.GIB
    """Size of the pool, headers and block tables included."""
    populate_threads: Annotated[int, Meta(ge=0, le=256)] = 0
    """Threads that reserve the pages; 0 = one a core."""
    numa: Literal["none", "interleave", "bind"] = "none"
    """Where pages go on a machine with several NUMA nodes. none: where first touched."""
    numa_nodes: list[Annotated[int, Meta(ge=0, le=1023)]] = []
    """Nodes for interleave and bind; empty with interleave means all."""
    huge_pages: Literal["never", "advise"] = "never"
    """advise: ask for transparent huge pages. Off by default: compaction on a fragmented host can
    turn seconds into minutes."""
    lock_memory: bool = False
    """mlock the pool, so that it is never swapped. Needs RLIMIT_MEMLOCK."""


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who may connect, and how long stopping may take."""

    allowed_uids: list[Annotated[int, Meta(ge=0, le=2**32 - 2)]] = []
    """Users that may connect, beside the daemon's own."""
    drain_timeout_s: Annotated[float, Meta(ge=0, le=86_400)] = 5.0
    """How long SIGTERM waits for the workers to leave."""


class LimitSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Deadlines and quotas."""

    heartbeat_interval_s: Seconds = limits.HEARTBEAT_INTERVAL_S
    """How often clients are told to ping; a third as often while they ask for nothing."""
    session_timeout_s: Seconds = limits.SESSION_TIMEOUT_S
    """Silence after which a session ends, where neither its process nor its socket told."""
    lease_ttl_s: Seconds = limits.LEASE_TTL_S
    """How long a lease lasts unless its heartbeat renews it."""
    writer_lease_ttl_s: Seconds = limits.WRITER_LEASE_TTL_S
    """The same for the writer lease of a tensor-parallel group."""
    adoption_grace_s: Seconds = limits.ADOPTION_GRACE_S
    """How long after a restart nothing is evicted that clients were reading before it."""
    max_sessions: Annotated[int, Meta(ge=1, le=limits.MAX_SESSIONS)] = limits.MAX_SESSIONS
    """Connections at a time, operators included."""
    max_leases_per_session: Annotated[int, Meta(ge=1, le=limits.MAX_LEASES_PER_SESSION)] = (
        limits.MAX_LEASES_PER_SESSION
    )
    """Leases that one session may hold."""
    max_reserved_blocks_per_session: BlockQuota = 0
    """Blocks that one session may hold unpublished; 0 = all of the backing."""
    max_pins_per_session: BlockQuota = 0
    """Blocks that the leases of one session may pin, each lease's counted; 0 = no limit."""
    max_reserved_blocks_per_namespace: BlockQuota = 0
    """The same of all sessions of a namespace; 0 = no limit."""
    max_pins_per_namespace: BlockQuota = 0
    """Pins of all sessions of a namespace; 0 = no limit."""


class CudaSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the daemon does with CUDA: in child processes, and only what is switched on."""

    register: bool = False
    """Workers register their own mapping whatever this says; on, the pages are unmovable early."""
    device: Annotated[int, Meta(ge=-1, le=1023)] = -1
    """CUDA device for it; -1 = the first one visible."""
    device_backing_bytes: ByteCount = 0
    """Memory of each GPU that the daemon may allocate for workers (resident and hot rows), so that
    it outlives them; 0 = none. Costs a CUDA context a GPU beside it."""
    device_backing_lease_s: Seconds = limits.DEVICE_BACKING_LEASE_S
    """How long such memory waits for its next holder before it is given back."""
    device_backing_timeout_s: Seconds = limits.DEVICE_ANSWER_S
    """How long a worker that asks for it waits for the driver."""


class LogSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is written to standard error."""

    format: Literal["console", "json"] = "console"
    """json: one object a line, for collectors."""
    level: Literal["debug", "info", "warning", "error"] = "info"
    """What is less important is left out."""
    events_per_second: Annotated[int, Meta(ge=1, le=10_000)] = 20
    """Lines a second of one event name; what goes beyond is counted and summed up."""


class HttpSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Metrics, health and the status page."""

    listen: str = "127.0.0.1:9477"
    """Address as host:port; port 0 takes a free one, an empty value none. While another process has
    it, the daemon serves its workers and goes on trying."""
    socket: str = ""
    """Path of a UNIX socket (mode 0600) that serves the same without a token; a relative one lies
    in runtime_dir."""
    token_file: str = ""
    """File whose first line all requests but those for health must carry as a bearer token.
    Required where listen is not a loopback address."""


class TracingSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """OpenTelemetry spans of control messages. Needs hisparse-service[otel]."""

    otlp_endpoint: str = ""
    """OTLP/HTTP collector, such as "http://127.0.0.1:4318"; empty: no spans."""
    sample_ratio: Annotated[float, Meta(ge=0, le=1)] = 0.01
    """Share of the messages that get a span; those answered with an error always do."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of one daemon."""

    instance: InstanceName = "default"
    """Name of the daemon: part of the segment's name and of the default runtime directory."""
    runtime_dir: str = ""
    """Where the sockets and the lock lie; empty: see `default_runtime_dir`."""
    pool: PoolSettings = PoolSettings()
    server: ServerSettings = ServerSettings()
    limits: LimitSettings = LimitSettings()
    cuda: CudaSettings = CudaSettings()
    log: LogSettings = LogSettings()
    http: HttpSettings = HttpSettings()
    tracing: TracingSettings = TracingSettings()

    def resolved_runtime_dir(self, environment: Mapping[str, str] | None = None) -> Path:
        """The runtime directory to use, an absolute path."""
        if self.runtime_dir:
            return Path(self.runtime_dir).absolute()
        return default_runtime_dir(
            self.instance, os.environ if environment is None else environment
        )


class LoadedSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The effective settings and, for each dotted name, where its value came from."""

    settings: Settings
    origins: dict[str, str]
    path: str = ""
    """Of the settings file, absolute; empty without one."""


def default_runtime_dir(instance: str, environment: Mapping[str, str]) -> Path:
    """Where an instance lives unless told: a directory of the user, never shared with others."""
    if environment.get("XDG_RUNTIME_DIR"):
        return Path(environment["XDG_RUNTIME_DIR"]) / "hisparse" / instance
    if os.geteuid() == 0:
        return Path("/run/hisparse") / instance
    # The directory is checked for owner and mode 0700 before anything is put into it.
    return Path(f"/tmp/hisparse-{os.geteuid()}") / instance  # noqa: S108


_UNITS: Final = {
    "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip


def parse_bytes(text: str) -> int:
    """Bytes of "8GiB", "1.5 GiB", "512M" (binary), "10GB" (decimal) or a plain number.

    Raises:
        ConfigError: It is none of these, or no whole number of bytes.
    """
    match = re.fullmatch(r"([0-9][0-9_]*(?:\.[0-9]+)?)\s*([A-Za-z]*)", text.strip())
    unit = _UNITS.get(match.group(2).lower()) if match else None
    if match is None or unit is None:
        raise ConfigError(
            f"{text!r} is not a size", remedy='Write a number of bytes or, for instance, "8GiB"'
        )
    number = match.group(1).replace("_", "")
    size = float(number) * unit if "." in number else int(number) * unit
    if size != int(size):
        raise ConfigError(
            f"{text!r} is {size} bytes, not a whole number", remedy="Use a smaller unit"
        )
    return int(size)


class Listen(msgspec.Struct, frozen=True):
    """An address to listen on."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def parse_listen(text: str) -> Listen | None:
    """The address in "127.0.0.1:9477", "[::1]:9477" or "localhost:0"; None of an empty text.

    Raises:
        ConfigError: It is none.
    """
    if not text:
        return None
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9_.-]+)):([0-9]{1,5})", text)
    if match is None or int(match.group(3)) > 65_535:
        raise ConfigError(
            f"{text!r} is not an address to listen on",
            remedy='Write host:port, such as "127.0.0.1:9477" or "[::1]:9477"',
        )
    return Listen(match.group(1) or match.group(2), int(match.group(3)))


def _leaves(prefix: str, struct_type: type[msgspec.Struct]) -> Iterator[tuple[str, Any, Any]]:
    for field in msgspec.structs.fields(struct_type):
        name = f"{prefix}{field.name}"
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from _leaves(f"{name}.", field.type)
        else:
            default = field.default
            if default is msgspec.NODEFAULT:  # msgspec turns `[]` into a factory
                default = field.default_factory() if callable(field.default_factory) else None
            yield name, field.type, default


DEFAULTS: Final[Mapping[str, Any]] = {name: value for name, _, value in _leaves("", Settings)}
"""Dotted name of every setting, and its default."""
SECTIONS: Final = tuple(sorted({name.split(".")[0] for name in DEFAULTS if "." in name}))

_KNOWN_SECTIONS: Final = f"sections are {', '.join(f'[{each}]' for each in SECTIONS)}"


def variable_name(dotted: str) -> str:
    """The environment variable of a setting: pool.bytes is HISPARSE_POOL__BYTES."""
    return _PREFIX + dotted.replace(".", "__").upper()


_VARIABLES: Final = {variable_name(dotted): dotted for dotted in DEFAULTS}


def load_settings(
    *,
    config_path: str | None = None,
    flags: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
) -> LoadedSettings:
    """Read all sources and check the whole.

    Args:
        config_path: TOML file; None takes HISPARSE_CONFIG, and no file when that is unset.
        flags: Dotted name to value; None values are flags that were not given.
        environment: Stands in for `os.environ`.

    Raises:
        ConfigError: A source cannot be read, a setting is unknown, out of range, or contradicts
            another. Nothing was changed.
    """
    environment = os.environ if environment is None else environment
    values: dict[str, Any] = dict(DEFAULTS)
    origins = dict.fromkeys(DEFAULTS, "default")
    path = config_path or environment.get(CONFIG_PATH_VARIABLE) or None
    layers: list[tuple[Mapping[str, Any], Mapping[str, str]]] = []
    if path:
        from_file = _read_file(Path(path))
        layers.append((from_file, dict.fromkeys(from_file, f"file {path}")))
    from_environment = _read_environment(environment)
    layers.append(
        (
            from_environment,
            {name: f"environment {variable_name(name)}" for name in from_environment},
        )
    )
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    for name in given:
        _require_known(name, "flag")
    layers.append((given, dict.fromkeys(given, "flag")))
    for layer, layer_origins in layers:
        values.update(layer)
        origins.update(layer_origins)
    settings = _convert(values, origins)
    _check_relations(settings, origins)
    return LoadedSettings(
        settings=settings, origins=origins, path=os.path.abspath(path) if path else ""
    )


def flatten(settings: Settings) -> dict[str, Any]:
    """Dotted name to value, for printing."""
    flat: dict[str, Any] = {}
    for dotted in DEFAULTS:
        value: Any = settings
        for part in dotted.split("."):
            value = getattr(value, part)
        flat[dotted] = value
    return flat


def _read_file(path: Path) -> dict[str, Any]:
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"the configuration file {path} cannot be read: {error.strerror}",
            remedy="Give its path with --config or HISPARSE_CONFIG, or make it readable",
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the configuration file {path} is not TOML: {error}", remedy="Correct that place"
        ) from error
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if key in SECTIONS:
            if not isinstance(value, dict):
                raise ConfigError(
                    f"file {path}: {key} is a section, got {value!r}",
                    remedy=f"Write [{key}] and its settings below it",
                )
            flat.update({f"{key}.{name}": inner for name, inner in value.items()})
        elif isinstance(value, dict):
            raise _unknown_section(key, f"file {path}")
        else:
            flat[key] = value
    for name in flat:
        _require_known(name, f"file {path}")
    return flat


def _read_environment(environment: Mapping[str, str]) -> dict[str, str]:
    flat = {}
    for variable, value in environment.items():
        if variable in _VARIABLES:
            flat[_VARIABLES[variable]] = value
        elif _is_misspelt(variable):
            known = [*_VARIABLES, CONFIG_PATH_VARIABLE]
            close = difflib.get_close_matches(variable, known, n=1, cutoff=_NEAR)
            raise ConfigError(
                f"environment: there is no setting {variable}",
                remedy=f"Did you mean {close[0]}?" if close else f"Unset it; {_KNOWN_SECTIONS}",
            )
    return flat


def _is_misspelt(variable: str) -> bool:
    """Whether it can only be meant for a setting: other programs have HISPARSE_ names too."""
    if not variable.startswith(_PREFIX) or variable == CONFIG_PATH_VARIABLE:
        return False
    if variable in FOREIGN_VARIABLES:
        return False
    name = variable.removeprefix(_PREFIX)
    if "__" in name or name.startswith(tuple(f"{section.upper()}_" for section in SECTIONS)):
        return True
    known = [each.removeprefix(_PREFIX) for each in (*_VARIABLES, CONFIG_PATH_VARIABLE)]
    return bool(difflib.get_close_matches(name, known, n=1, cutoff=_NEAR))


def _require_known(name: str, source: str) -> None:
    if name in DEFAULTS:
        return
    section, dot, key = name.partition(".")
    if dot and section not in SECTIONS:
        raise _unknown_section(section, source)
    beside = [each for each in DEFAULTS if each.rpartition(".")[0] == (section if dot else "")]
    close = difflib.get_close_matches(name, beside, n=1)
    elsewhere = [each for each in DEFAULTS if each.endswith(f".{key or section}")]
    meant = [*close, *elsewhere]
    known = [each for each in beside if each.startswith(f"{section}.")] if dot else beside
    raise ConfigError(
        f"{source}: there is no setting {name!r}",
        remedy=f"Did you mean {meant[0]!r}?" if meant else f"Known are: {', '.join(known)}",
    )


def _unknown_section(section: str, source: str) -> ConfigError:
    close = difflib.get_close_matches(section, SECTIONS, n=1)
    return ConfigError(
        f"{source}: there is no section [{section}]",
        remedy=f"Did you mean [{close[0]}]?" if close else f"{_KNOWN_SECTIONS.capitalize()}",
    )


def _convert(values: Mapping[str, Any], origins: Mapping[str, str]) -> Settings:
    tree: dict[str, Any] = {}
    for dotted, field_type, _ in _leaves("", Settings):
        value = values[dotted]
        try:
            if field_type == ByteCount and isinstance(value, str):
                value = parse_bytes(value)
            elif isinstance(value, str) and msgspec.inspect.type_info(field_type).__class__ is (
                msgspec.inspect.ListType
            ):
                value = [part.strip() for part in value.split(",") if part.strip()]
            # Only text (environment, flags) is read leniently: in a file, "1" is no number.
            strict = not origins[dotted].startswith(("environment", "flag"))
            value = msgspec.convert(value, field_type, strict=strict)
        except (msgspec.ValidationError, ConfigError) as error:
            reason = error.message if isinstance(error, ConfigError) else str(error)
            default = DEFAULTS[dotted]
            shown = size_text(default) if field_type == ByteCount else repr(default)
            raise ConfigError(
                f"{dotted} = {value!r} ({origins[dotted]}): {reason}",
                remedy=f"Correct it; the default is {shown}",
            ) from error
        node = tree
        *sections, leaf = dotted.split(".")
        for section in sections:
            node = node.setdefault(section, {})
        node[leaf] = value
    return msgspec.convert(tree, Settings)


def _check_relations(settings: Settings, origins: Mapping[str, str]) -> None:
    def refuse(names: tuple[str, ...], what: str, remedy: str) -> None:
        where = ", ".join(f"{name} from {origins[name]}" for name in names)
        raise ConfigError(f"{what} ({where})", remedy=remedy)

    pool, times, cuda = settings.pool, settings.limits, settings.cuda
    if not _MIN_POOL_BYTES <= pool.bytes <= limits.MAX_POOL_BYTES:
        refuse(
            ("pool.bytes",),
            f"pool.bytes is {size_text(pool.bytes)}, it must lie between "
            f"{size_text(_MIN_POOL_BYTES)} and {size_text(limits.MAX_POOL_BYTES)}",
            "Size it by the context and the concurrency that it shall hold",
        )
    if times.session_timeout_s < 5 * times.heartbeat_interval_s:
        refuse(
            ("limits.session_timeout_s", "limits.heartbeat_interval_s"),
            f"limits.session_timeout_s is {times.session_timeout_s}, it must be at least five "
            f"heartbeats of {times.heartbeat_interval_s} s",
            "Raise the timeout or shorten the heartbeat interval",
        )
    _check_http(settings.http, refuse)
    for name in ("lease_ttl_s", "writer_lease_ttl_s"):
        if getattr(times, name) <= times.session_timeout_s:
            refuse(
                (f"limits.{name}", "limits.session_timeout_s"),
                f"limits.{name} is {getattr(times, name)}, it must be longer than the session "
                f"timeout of {times.session_timeout_s} s",
                "A lease must not end while its session may still be alive",
            )
    if pool.numa == "none" and pool.numa_nodes:
        refuse(
            ("pool.numa", "pool.numa_nodes"),
            f"pool.numa_nodes is {pool.numa_nodes} and pool.numa is none",
            'Set pool.numa to "interleave" or "bind", or leave the nodes out',
        )
    if pool.numa == "bind" and not pool.numa_nodes:
        refuse(
            ("pool.numa", "pool.numa_nodes"),
            "pool.numa is bind and pool.numa_nodes is empty",
            "Name the nodes to bind to",
        )
    if cuda.device >= 0 and not cuda.register:
        refuse(
            ("cuda.device", "cuda.register"),
            f"cuda.device is {cuda.device} and cuda.register is off",
            "Switch cuda.register on, or leave the device out",
        )


def _check_http(http: HttpSettings, refuse: Callable[[tuple[str, ...], str, str], None]) -> None:
    try:
        listen = parse_listen(http.listen)
    except ConfigError as error:
        refuse(("http.listen",), error.message, error.remedy)
        return
    if listen is not None and not listen.is_loopback and not http.token_file:
        refuse(
            ("http.listen", "http.token_file"),
            f"http.listen is {http.listen}, which others than this machine can reach, and "
            "http.token_file is not set",
            "Name a file with a token, or listen on 127.0.0.1",
        )
