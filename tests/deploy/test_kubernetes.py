"""The manifests render, fit the published schemas, and start a daemon that an engine attaches to.

The daemon is started with exactly the command, environment, settings and directories of the
rendered pod; only the root of the paths, the user and the size of the pool are this machine's.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from deploy_tools import COMMAND, DEPLOY, find_tool, run
from helpers import SHM, short_directory, unique_instance, wait_until

from hisparse_service.cli.capacity import DAEMON_BASE_BYTES, PAGE_TABLE_SHARE
from hisparse_service.config import parse_bytes
from hisparse_service.contract.limits import MIB

KUBERNETES = DEPLOY / "kubernetes"
OVERLAYS = ("sidecar", "daemonset", "daemonset-cuda")
VERSIONS = ("1.29", "1.34")
"""The first with native sidecars on by default, and the newest that is deployed."""
TOKEN = "a token of the test"  # noqa: S105
Manifest = dict[str, Any]

ENDPOINT = {
    "type": "object",
    "additionalProperties": False,
    "required": ["port", "path"],
    "properties": {
        "port": {"type": "string"}, "path": {"type": "string"},
        "interval": {"type": "string", "pattern": "^[0-9]+s$"},
        "scrapeTimeout": {"type": "string", "pattern": "^[0-9]+s$"},
        "authorization": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "type": {"const": "Bearer"},
                "credentials": {
                    "type": "object", "required": ["name", "key"],
                    "additionalProperties": {"type": "string"},
                },
            },
        },
        "relabelings": {"type": "array"},
    },
}  # fmt: skip
POD_MONITOR = {
    "type": "object",
    "required": ["selector", "podMetricsEndpoints"],
    "additionalProperties": False,
    "properties": {
        "selector": {
            "type": "object", "additionalProperties": False, "required": ["matchLabels"],
            "properties": {"matchLabels": {"type": "object"}},
        },
        "podMetricsEndpoints": {"type": "array", "minItems": 1, "items": ENDPOINT},
    },
}  # fmt: skip
"""The fields of monitoring.coreos.com/v1 that are used: its schema is in no package."""


def render(overlay: str) -> list[Manifest]:
    """All objects of an overlay, as `kubectl apply -k` would send them."""
    done = run([find_tool("kubectl"), "kustomize", KUBERNETES / "overlays" / overlay])
    assert done.returncode == 0, done.stdout
    return [each for each in yaml.safe_load_all(done.stdout) if each]


def one(objects: list[Manifest], kind: str, name: str) -> Manifest:
    (found,) = (
        each for each in objects if (each["kind"], each["metadata"]["name"]) == (kind, name)
    )
    return found


def daemon_pod(overlay: str, objects: list[Manifest]) -> tuple[Manifest, Manifest]:
    """(pod template, the daemon's container)."""
    kind, name = ("Deployment", "engine") if overlay == "sidecar" else (
        "DaemonSet", "hisparse-service",
    )  # fmt: skip
    template = one(objects, kind, name)["spec"]["template"]
    pod = template["spec"]
    containers = [*pod.get("initContainers", []), *pod["containers"]]
    return template, next(each for each in containers if each["name"] == "hisparse-service")


@pytest.fixture(params=OVERLAYS)
def overlay(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def objects(overlay: str) -> list[Manifest]:
    return render(overlay)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_fits_its_published_schema(objects: list[Manifest], version: str) -> None:
    import kubernetes_validate

    for each in objects:
        if each["kind"] == "PodMonitor":
            jsonschema.validate(each["spec"], POD_MONITOR)
        else:
            kubernetes_validate.validate(each, version, strict=True)


def test_a_field_that_does_not_exist_would_have_been_found(objects: list[Manifest]) -> None:
    import kubernetes_validate

    policy = one(objects, "NetworkPolicy", "hisparse-service")
    policy["spec"]["ingres"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(policy, VERSIONS[-1], strict=True)


def test_memory_counts_the_pool_its_page_tables_and_the_daemon(
    overlay: str, objects: list[Manifest]
) -> None:
    template, container = daemon_pod(overlay, objects)
    pool = parse_bytes(settings_of(objects)["pool"]["bytes"])
    needed = pool * (1 + PAGE_TABLE_SHARE) + DAEMON_BASE_BYTES + 256 * MIB
    for kind in ("requests", "limits"):
        assert quantity(container["resources"][kind]["memory"]) >= needed, kind
    volume = volume_of(template["spec"], container, "/dev/shm")
    if "emptyDir" in volume:
        assert volume["emptyDir"]["medium"] == "Memory"
        assert quantity(volume["emptyDir"]["sizeLimit"]) >= pool
    else:
        assert volume["hostPath"]["path"] == "/dev/shm"


def test_the_sidecar_is_native_and_the_engine_waits_for_the_pool() -> None:
    template, container = daemon_pod("sidecar", render("sidecar"))
    assert container in template["spec"]["initContainers"]
    assert container["restartPolicy"] == "Always"
    assert container["startupProbe"]["httpGet"]["path"] == "/readyz"


def test_the_daemon_set_takes_no_gpu_and_never_runs_twice_on_a_node() -> None:
    objects = render("daemonset")
    _, container = daemon_pod("daemonset", objects)
    assert "nvidia.com/gpu" not in str(container["resources"])
    update = one(objects, "DaemonSet", "hisparse-service")["spec"]["updateStrategy"]
    assert update["rollingUpdate"]["maxSurge"] == 0


def test_daemon_and_engine_share_memory_directory_and_user(
    overlay: str, objects: list[Manifest]
) -> None:
    template, container = daemon_pod(overlay, objects)
    engine_template = one(objects, "Deployment", "engine")["spec"]["template"]
    (engine,) = engine_template["spec"]["containers"]
    users = [each["spec"]["securityContext"]["runAsUser"] for each in (template, engine_template)]
    assert users[0] == users[1] != 0
    for path in ("/dev/shm", "/run/hisparse"):
        ours = volume_of(template["spec"], container, path)
        assert ours == volume_of(engine_template["spec"], engine, path)
    (endpoint,) = (e["value"] for e in engine["env"] if e["name"] == "HISPARSE_SERVICE_ENDPOINT")
    assert endpoint == environment_of(container)["HISPARSE_RUNTIME_DIR"]


def test_no_container_is_more_than_it_must_be(objects: list[Manifest]) -> None:
    for each in objects:
        if each["kind"] not in ("Deployment", "DaemonSet"):
            continue
        pod = each["spec"]["template"]["spec"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            if container["name"] == "engine":
                continue
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["readOnlyRootFilesystem"] is True
            assert security["capabilities"]["drop"] == ["ALL"]


def test_policy_monitor_and_probes_name_the_port_that_the_settings_open(
    overlay: str, objects: list[Manifest]
) -> None:
    template, container = daemon_pod(overlay, objects)
    http = settings_of(objects)["http"]
    (port,) = container["ports"]
    assert http["listen"] == f"0.0.0.0:{port['containerPort']}"
    policy = one(objects, "NetworkPolicy", "hisparse-service")["spec"]
    assert policy["ingress"][0]["ports"] == [{"protocol": "TCP", "port": port["containerPort"]}]
    monitor = one(objects, "PodMonitor", "hisparse-service")["spec"]
    assert monitor["podMetricsEndpoints"][0]["port"] == port["name"]
    for selector in (policy["podSelector"], monitor["selector"]):
        assert selector["matchLabels"].items() <= template["metadata"]["labels"].items()
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] == port["name"]
    credentials = monitor["podMetricsEndpoints"][0]["authorization"]["credentials"]
    secret = volume_of(template["spec"], container, str(Path(http["token_file"]).parent))
    assert credentials["name"] == secret["secret"]["secretName"]
    assert credentials["key"] == Path(http["token_file"]).name


def test_the_policy_leaves_the_engine_its_port_and_its_way_out(
    overlay: str, objects: list[Manifest]
) -> None:
    policy = one(objects, "NetworkPolicy", "hisparse-service")["spec"]
    template = one(objects, "Deployment", "engine")["spec"]["template"]
    chosen = policy["podSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    assert chosen is (overlay == "sidecar"), "a policy holds for whole pods"
    if not chosen:
        assert policy["egress"] == [], "the daemon calls nobody"
        return
    assert policy["policyTypes"] == ["Ingress"]
    (engine,) = template["spec"]["containers"]
    open_ports = {port["port"] for rule in policy["ingress"] for port in rule["ports"]}
    assert {port["containerPort"] for port in engine["ports"]} < open_ports


def test_both_patterns_run_the_same_daemon() -> None:
    _, sidecar = daemon_pod("sidecar", render("sidecar"))
    _, node = daemon_pod("daemonset", render("daemonset"))
    assert sidecar.pop("restartPolicy") == "Always"
    assert sidecar == node


def test_budgets_cover_the_engines(objects: list[Manifest]) -> None:
    budget = one(objects, "PodDisruptionBudget", "engine")["spec"]
    labels = one(objects, "Deployment", "engine")["spec"]["template"]["metadata"]["labels"]
    assert budget["selector"]["matchLabels"].items() <= labels.items()


# --- the pod, here ------------------------------------------------------------------------------


class Pod:
    """The daemon's container as this machine can run it: its paths below a directory of the test.

    /dev/shm stays the machine's, because POSIX shared memory lies nowhere else; the instance is the
    test's own, so that its segment is.
    """

    def __init__(self, root: Path, overlay: str, objects: list[Manifest]) -> None:
        self.root = root
        self.instance = unique_instance("kube")
        template, self.container = daemon_pod(overlay, objects)
        self.mounts = sorted(
            (mount["mountPath"] for mount in self.container["volumeMounts"]), key=len, reverse=True
        )
        for path in self.mounts:
            if path != "/dev/shm":
                (root / path[1:]).mkdir(parents=True, exist_ok=True)
        settings = self.rooted(one_config(objects)["data"]["hisparse.toml"])
        settings = re.sub(r'bytes = "\w+"', 'bytes = "16MiB"', settings)
        settings = settings.replace("0.0.0.0:9477", "127.0.0.1:0")
        (root / "etc/hisparse/hisparse.toml").write_text(settings)
        (root / "etc/hisparse-token/token").write_text(TOKEN + "\n")
        self.prepared = [
            self.prepare(each["command"])
            for each in template["spec"].get("initContainers", [])
            if each["name"] == "runtime-directory"
        ]
        kept = {k: v for k, v in os.environ.items() if not k.startswith("HISPARSE_")}
        self.environment = kept | {
            name: self.rooted(value) for name, value in environment_of(self.container).items()
        }
        self.process: subprocess.Popen[bytes] | None = None

    def rooted(self, text: str) -> str:
        """The text with every mounted path moved below the root."""
        mounts = "|".join(re.escape(path) for path in self.mounts if path != "/dev/shm")
        return re.sub(
            rf"(?<![\w/])(?:{mounts})(?=[/\"\s]|$)", lambda found: f"{self.root}{found[0]}", text
        )

    def prepare(self, command: list[str]) -> int:
        """Run an init container's command as this user."""
        ours = {"-o": str(os.getuid()), "-g": str(os.getgid())}
        arguments = [
            ours.get(before, self.rooted(argument))
            for before, argument in zip(["", *command[:-1]], command, strict=True)
        ]
        done = run(arguments)
        assert done.returncode == 0, done.stdout
        return done.returncode

    def arguments(self, words: list[str]) -> list[str]:
        """A command of the image as one of this machine."""
        assert words[0] == "hisparse-service"
        named = [self.instance if word == "default" else self.rooted(word) for word in words[1:]]
        return [str(COMMAND), *named]

    @property
    def log(self) -> str:
        path = self.root / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def start(self) -> None:
        # The image's ENTRYPOINT, then the container's arguments.
        assert "command" not in self.container
        command = self.arguments(["hisparse-service", *self.container["args"]])
        with (self.root / "log").open("ab") as log:
            self.process = subprocess.Popen(
                command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        process = self.process
        wait_until(lambda: '"event": "ready"' in self.log or process.poll() is not None)
        assert process.poll() is None, self.log

    def execute(self, words: list[str]) -> subprocess.CompletedProcess[str]:
        """As `kubectl exec` or a probe would."""
        return run(self.arguments(words), environment=self.environment)

    def end(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(30)
        for path in SHM.glob(f"hisparse-{self.instance}-*"):
            path.unlink()


@pytest.fixture
def pod(overlay: str, objects: list[Manifest]) -> Iterator[Pod]:
    with short_directory() as root:
        made = Pod(root, overlay, objects)
        try:
            yield made
        finally:
            made.close()


def test_the_pod_starts_a_daemon_that_an_engine_attaches_to_and_drains(pod: Pod) -> None:
    pod.start()
    endpoint = Path(pod.environment["HISPARSE_RUNTIME_DIR"])
    assert endpoint.stat().st_mode & 0o777 == 0o700
    # The engine's side: only what its container is given, the directory.
    attach = (
        "import sys; from worker_client import connect\n"
        "with connect(sys.argv[1], client_name='engine') as client: print(client.instance)"
    )
    done = run([sys.executable, "-c", attach, endpoint])
    assert (done.returncode, done.stdout.strip()) == (0, pod.instance)
    hook = pod.container["lifecycle"]["preStop"]["exec"]["command"]
    assert pod.execute(hook).returncode == 0
    assert "draining" in pod.execute(["hisparse-service", "status"]).stdout
    assert pod.end() == 0
    assert not list(SHM.glob(f"hisparse-{pod.instance}-*"))


def test_the_probes_and_the_scrape_get_their_answers(pod: Pod) -> None:
    pod.start()
    base = wait_until(
        lambda: next(iter(re.findall(r"http://127\.0\.0\.1:\d+", pod.log)), ""), what=pod.log
    )
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert get(base + pod.container[probe]["httpGet"]["path"]) == 200
    assert get(base + "/metrics") == 401
    assert get(base + "/metrics", token=TOKEN) == 200
    pod.execute(pod.container["lifecycle"]["preStop"]["exec"]["command"])
    wait_until(lambda: get(base + "/readyz") == 503, what="not ready while draining")
    assert get(base + "/healthz") == 200
    assert pod.end() == 0


def get(url: str, *, token: str = "") -> int:
    request = urllib.request.Request(url)  # noqa: S310
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return int(error.code)


def settings_of(objects: list[Manifest]) -> dict[str, Any]:
    return tomllib.loads(one_config(objects)["data"]["hisparse.toml"])


def one_config(objects: list[Manifest]) -> Manifest:
    (found,) = (each for each in objects if each["kind"] == "ConfigMap")
    return found


def environment_of(container: Manifest) -> dict[str, str]:
    return {each["name"]: each["value"] for each in container["env"]}


def volume_of(pod: Manifest, container: Manifest, path: str) -> Manifest:
    (name,) = (m["name"] for m in container["volumeMounts"] if m["mountPath"] == path)
    return next(volume for volume in pod["volumes"] if volume["name"] == name)


def quantity(text: str) -> int:
    """Bytes of a Kubernetes quantity such as 65Gi."""
    return parse_bytes(f"{text}B")
