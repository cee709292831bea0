"""
Settings of a router. Each field is a flag of `baton router` and a variable `BATON_ROUTER_<NAME>`.

The docstring of a field is its help text. Other modules do not read the environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, AliasChoices, BeforeValidator, Field, SecretStr
from pydantic_settings import SettingsConfigDict

from baton_api import limits
from baton_api.exposure import DEFAULT_PORT
from baton_api.keys import KeyDigests
from baton_api.logs import Format
from baton_api.setting_types import Bytes, Names, Origins
from baton_api.workers import EngineKind
from baton_batches.settings import BatchSettings

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""A container's own limit (cgroup version 2)."""

MEMINFO = Path("/proc/meminfo")


def memory_limit(cgroup: Path = CGROUP_LIMIT, meminfo: Path = MEMINFO) -> int | None:
    """Return bytes; None if the system does not say."""
    limits = [int(text) for text in (_read(cgroup), _total(_read(meminfo))) if text.isdigit()]
    return min(limits, default=None)


def _total(meminfo: str) -> str:
    for line in meminfo.splitlines():
        name, _, value = line.partition(":")
        if name == "MemTotal":
            return str(1024 * int(value.removesuffix("kB")))
    return ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _worker_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
        raise ValueError(f"{url!r} is not the URL of a worker. Expected a URL such as http://127.0.0.1:8000")
    return f"{parts.scheme}://{parts.netloc}"


@dataclass(frozen=True, slots=True)
class DnsName:
    """A name to resolve."""

    name: str
    port: int | None
    """None: that and the host are in SRV records."""

    @classmethod
    def parse(cls, text: str) -> DnsName:
        """
        >>> DnsName.parse("workers:8000"), DnsName.parse("_http._tcp.workers")
        (DnsName(name='workers', port=8000), DnsName(name='_http._tcp.workers', port=None))
        """
        name, colon, port = text.rpartition(":")
        if not colon and text.startswith("_"):
            return cls(text, None)
        if not name or ":" in name or "/" in text or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(
                f"{text!r} is nothing to ask DNS for: give NAME:PORT, or the name of SRV records, such as "
                "_http._tcp.workers.example.org"
            )
        return cls(name, int(port))


def _dns_question(text: str) -> str:
    DnsName.parse(text)
    return text


def parse_weight(text: str) -> tuple[str, float]:
    """
    >>> parse_weight("6f1c2ab9=10")
    ('6f1c2ab9', 10.0)
    """
    revision, _, weight = (part.strip() for part in text.partition("="))
    try:
        number = float(weight)
    except ValueError:
        number = -1.0
    if not revision or not 0 <= number < float("inf"):
        raise ValueError(
            f"Invalid weight: {text!r}. Expected REVISION=NUMBER, such as 6f1c2ab9=10, with a number >= 0"
        )
    return revision, number


def _revision_weight(text: str) -> str:
    parse_weight(text)
    return text


def _cluster() -> str:
    """Return the URL of the API server of the router's own cluster, or an empty string."""
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        return ""
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


def _either(name: str) -> AliasChoices:
    """Read the router's own variable, or else the one that all processes share."""
    return AliasChoices(f"BATON_ROUTER_{name}", f"BATON_{name}")


def _one_key(value: object) -> object:
    """Return the first key that is not a digest, because a worker needs the key itself."""
    keys = value.split(",") if isinstance(value, str) else []
    return next((key.strip() for key in keys if not key.strip().startswith("sha256:")), "") if keys else value


WorkerKey = Annotated[SecretStr, BeforeValidator(_one_key)]
DnsQuestion = Annotated[str, AfterValidator(_dns_question)]
RevisionWeight = Annotated[str, AfterValidator(_revision_weight)]
WorkerUrl = Annotated[str, AfterValidator(_worker_url)]
if TYPE_CHECKING:
    EngineChoice = str
else:
    EngineChoice = Literal[("auto", *(kind.value for kind in EngineKind))]

Algorithm = Literal[
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA",
]  # fmt: skip
"""Asymmetric algorithms only: a shared secret does not prove who issued a token."""


CONNECTION_SHARE = 0.2
"""Default share of the process's memory for bodies and responses."""

CONTAINER_BYTES = 512 * 1024**2
"""Memory of a router's container by default, for systems that do not say what there is."""


class RouterSettings(BatchSettings):
    """Settings of one router."""

    model_config = SettingsConfigDict(
        env_prefix="BATON_ROUTER_",
        frozen=True,
        use_attribute_docstrings=True,
        extra="forbid",
        validate_by_name=True,
        validate_by_alias=True,
    )

    GROUPS: ClassVar[Mapping[str, str]] = {
        "host": "Server",
        "decode": "Workers",
        "revision_weight": "Rollouts",
        "policy": "Scheduling",
        "queue_requests": "Queue",
        "retries": "Retries and timeouts",
        "api_key": "Authentication",
        "responses_kept": "Responses",
        "log_format": "Observability",
        "gateway_port": "Gateway API",
    }
    """The first setting of each group in the help, and the title of the group."""

    # --- Server ---

    host: str = "127.0.0.1"
    """Address on which the OpenAI API listens. Use 0.0.0.0 to accept connections from other machines."""

    port: int = Field(default=DEFAULT_PORT, ge=0, le=65535)
    """Port of the OpenAI API. 0: a free port."""

    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of /metrics and /workers/targets, for Prometheus, on the address of --host. It needs no key: let
    only those reach it who may see workers, tenants and usage. The port of the API does not serve them
    then. 0: a free port. Empty: the port of the API serves them, to admins only if keys are required."""

    processes: int = Field(default=1, ge=1, le=64)
    """Number of frontend processes. Each handles some thousand requests per second. With more than one, a
    separate scheduler process chooses the workers. Requests to /v1/responses pass through the
    scheduler process, except those that store and continue nothing, or if --responses-kept is 0."""

    scheduler_timeout_s: float = Field(default=5.0, gt=0)
    """Maximum time until the scheduler process acknowledges a request, including a restart of the scheduler
    process. Then the request is rejected with 503. --queue-requests and --queue-bytes bound the
    waiting requests of each frontend process."""

    dashboard: bool = False
    """Serve a dashboard at `/`: workers, timelines of recent requests, and a chat. The page itself is public;
    its data require an API key where keys are required. Tenants without admin rights see their own
    requests only."""

    allowed_origins: Origins = ()
    """Origins, such as https://chat.example.org, whose pages may call this server from a browser; * allows
    all. Repeat the flag or separate origins by commas. Empty: all if an API key is required, otherwise
    none, because any page in a local browser could use a server without a key."""

    max_body: Bytes = Field(default=limits.BODY.most, ge=1)
    """Maximum size of a request body. Larger requests are rejected with 413."""

    max_header: Bytes = Field(default=limits.HEAD.most, ge=1024)
    """Maximum size of a request head. Larger requests are rejected with 431."""

    header_s: float = Field(default=10.0, gt=0)
    """Maximum time for a client to send the request head."""

    body_s: float = Field(default=60.0, gt=0)
    """Maximum time for which a client may stop sending the request body. On average it must send 4 KiB per
    second."""

    connection_memory: Bytes | None = Field(default=None, ge=1)
    """Maximum memory of request bodies, from the head that announces them until the request ends, and of
    responses that clients have not read. One tenant may use up to 80% of what others leave; bodies beyond
    that are rejected with 503, the later the more clients of the tenant are rejected. What a client announces
    and does not send counts for a few seconds. Empty: a fifth of the memory that the process may use."""

    drain_notice_s: float = Field(default=0.0, ge=0)
    """Delay between SIGTERM, when /ready begins to return 503, and the end of listening. Load balancers need
    it to stop sending requests."""

    drain_s: float = Field(default=60.0, ge=0)
    """Time that running requests have to finish after the router has stopped listening."""

    # --- Workers ---

    decode: tuple[WorkerUrl, ...] = ()
    """URL of a worker that answers requests (role decode or both), such as http://127.0.0.1:8001; repeatable.
    For an https:// URL the router presents the certificate of --tls-folder."""

    prefill: tuple[WorkerUrl, ...] = ()
    """URL of a prefill worker; repeatable. Without prefill workers, decode workers compute prompts."""

    worker: tuple[WorkerUrl, ...] = ()
    """URL of a server with OpenAI's API, such as llama.cpp, TGI or Ollama; repeatable. As --decode."""

    engine: EngineChoice = "auto"
    """Engine of the workers. auto: the router asks each worker. openai: any server with OpenAI's API."""

    decode_dns: tuple[DnsQuestion, ...] = ()
    """DNS name of decode workers; repeatable. NAME:PORT stands for all IPv4 addresses of the name, or its
    IPv6 addresses if it has no other. A name that begins with an underscore, such as
    _http._tcp.workers.example.org, is looked up as SRV records."""

    prefill_dns: tuple[DnsQuestion, ...] = ()
    """DNS name of prefill workers, in the form of --decode-dns; repeatable."""

    dns_interval_s: float = Field(default=5.0, gt=0)
    """Interval between DNS lookups. If a lookup fails, the workers stay. Three empty answers in a row remove
    them."""

    kubernetes_selector: str = ""
    """Label selector of the EndpointSlices that list the workers, such as kubernetes.io/service-name=workers.
    The labels baton.dev/role (decode, prefill or both; default: decode) and baton.dev/revision of the
    Service apply. The ServiceAccount needs list and watch on endpointslices of discovery.k8s.io in
    that namespace."""

    kubernetes_namespace: str = ""
    """Namespace of the EndpointSlices. Empty: the router's own."""

    kubernetes_port: str = "http"
    """Name of the workers' port in EndpointSlices that have several ports."""

    kubernetes_api: str = Field(default_factory=_cluster)
    """URL of the Kubernetes API server. Empty: that of the router's own cluster. The ServiceAccount is not
    used for http:// URLs, such as that of `kubectl proxy`."""

    kubernetes_account: str = "/var/run/secrets/kubernetes.io/serviceaccount"
    """Folder with `token`, `ca.crt` and `namespace` of the ServiceAccount. It is read for every
    connection."""

    worker_api_key: WorkerKey = Field(
        default=SecretStr(""), validation_alias=AliasChoices("BATON_ROUTER_WORKER_API_KEY", "BATON_API_KEY")
    )
    """API key that the router sends to workers. BATON_API_KEY, which workers read too, also sets it. If this
    key or any key of the router is set, the router does not forward clients' keys; otherwise it does.
    Set it by the environment variable."""

    ticket_secret: str = ""
    """Secret shared with the workers (their BATON_TICKET_SECRET). The router then signs a ticket for each
    request, which the prefill worker verifies. Set it by the environment variable, because other users can
    read command-line arguments."""

    tls_folder: str = ""
    """Folder with `tls.crt`, `tls.key` and `ca.crt`, such as a mounted Secret of cert-manager: the router's
    certificate and the authority of the workers' certificates. Used for https:// URLs, for all workers
    found by DNS, and for Services with `appProtocol: https`. Changed files are reloaded within one
    second."""

    tls_name: str = ""
    """DNS name that every worker's certificate must contain. Empty: any certificate of the authority."""

    health_interval_s: float = Field(default=2.0, gt=0)
    """Interval between health checks of a worker, and the timeout of each."""

    health_misses: int = Field(default=3, ge=1)
    """Number of consecutive failed health checks after which a worker is down."""

    connect_s: float = Field(default=1.0, gt=0)
    """Timeout of a connection attempt to a worker."""

    worker_drain_s: float = Field(default=600.0, ge=0)
    """Time that requests of a removed or terminating worker have to finish. Then another worker continues
    them."""

    # --- Rollouts ---

    revision_weight: tuple[RevisionWeight, ...] = ()
    """Relative share of requests for a revision of workers, as REVISION=NUMBER; repeatable. While a revision
    with a weight is available, revisions without one receive no requests. Without weights all workers
    compete."""

    revision_weights_file: str = ""
    """File of weights, one per line, such as a mounted ConfigMap. It is reloaded within one second after a
    change and overrides --revision-weight."""

    # --- Scheduling ---

    policy: Literal["predicted-time", "least-requests"] = "predicted-time"
    """Policy that chooses among the workers that can serve a request. predicted-time: the lowest predicted
    time to first token, with the delay of other requests. least-requests: the fewest requests at the
    worker, or at both workers of a pair."""

    profile: tuple[Path, ...] = ()
    """Profile written by `baton bench --find`; repeatable, one per model. It provides the speed of workers
    until the router has measured it."""

    local_prefill_max_tokens: int = Field(default=512, ge=0)
    """Maximum number of uncached prompt tokens that a decode worker computes itself while a prefill worker is
    available. Below the limit the router chooses the faster path."""

    prefill_tokens: int = Field(default=8192, ge=1)
    """Maximum number of prompt tokens in flight to one worker, if these are more than one prompt. Further
    requests wait in the router, which can still reorder them or choose another worker."""

    # --- Queue ---

    queue_requests: int = Field(default=10_000, ge=1)
    """Maximum number of queued requests. One tenant may use up to 80% of the capacity that others leave."""

    queue_bytes: Bytes = Field(default=64 * 1024**2, ge=1)
    """Maximum total size of queued request bodies, shared in the same way."""

    interactive_s: float = Field(default=10.0, gt=0)
    """Target time to first token of class interactive, for requests without `x-slo-ttft-ms`. Requests that
    would be queued and are predicted to exceed 1.5 times the target are rejected with 503, as are
    those queued for longer than that."""

    wait_s: float = Field(default=300.0, gt=0)
    """Maximum queue time of classes critical and default without a target, then 503. Requests of class batch
    wait as long as their client does."""

    recovery_s: float = Field(default=5.0, ge=0)
    """Maximum queue time while no worker is ready, for example during a restart. 0: reject immediately."""

    hold_s: float = Field(default=0.0, ge=0)
    """Maximum queue time while no worker is ready, for services that scale from zero. It overrides
    --recovery-s, and the router is ready without workers."""

    hold_models: Names = ()
    """Names of the models of workers that are scaled to zero, separated by commas. Requests for other models
    receive 404. Empty: requests for any model are held while no worker is ready."""

    # --- Retries and timeouts ---

    retries: int = Field(default=2, ge=0)
    """Maximum number of retries of a request on other workers, until the first byte of the response."""

    retry_ratio: float = Field(default=0.1, ge=0)
    """Retry budget: retries per request, averaged over all requests, after 429, 503, slow workers or crashes.
    It prevents retry storms. A crash counts once, however many requests it affects; failed connections
    do not count. 0: no such retries."""

    first_byte_s: float = Field(default=2.0, gt=0)
    """Minimum time for the first token before another worker is tried, if there is one and the speed of the
    worker is known. A request has this time or three times the predicted one, whichever is longer."""

    idle_s: float = Field(default=30.0, gt=0)
    """Maximum time between two tokens of a stream, or 50 steps of the worker if that is longer; then another
    worker continues the stream. A stream that cannot be resumed is cut after the same time without a
    sign of life, or after --answer-s without a token. Also the maximum time for which a client may stop
    reading; on average it must read 4 KiB per second of what waits for it."""

    answer_s: float = Field(default=600.0, gt=0)
    """Maximum time to the first byte of a response, in total. OpenAI's clients have the same limit."""

    # --- Authentication ---

    api_key: KeyDigests = Field(default=(), validation_alias=_either("API_KEY"))
    """API key that clients send as `Authorization: Bearer KEY`, or its digest as `sha256:HEX`. Repeat it for
    several keys. If any key is set, every path except /health, /ready and /ping requires one. Prefer the
    environment variable (separate keys by commas; BATON_API_KEY works too) or --api-key-file, because any
    local user can read command-line arguments."""

    api_key_file: str = Field(default="", validation_alias=_either("API_KEY_FILE"))
    """File of API keys, one per line: `key`, `name:key`, `sha256:HEX` or `name:sha256:HEX`. Lines that begin
    with # are comments. The file is reloaded within one second after a change."""

    tenants_file: str = ""
    """YAML file of tenants: a list `tenants` with `name`, `keys` (`sha256:HEX`), `models`, `classes`,
    `default_class`, `cache`, `admin`, and limits such as `tokens_per_minute`. Only `name` is required; a
    tenant may use every model, and every class except critical, without limits. Tenants share KV blocks
    only if they have the same `cache`. Only an `admin` may see and cancel the requests of others. Limits
    apply per router replica. Set --ticket-secret as well: cache salts are derived from it. The file is
    reloaded within one second after a change."""

    jwt_jwks: str = ""
    """URL or file of the public keys (JWKS) of a token issuer. Its tokens are then accepted like API keys.
    The keys are fetched every five minutes, and for an unknown key at most once per minute. Requires
    `batonserve[jwt]`."""

    jwt_issuer: str = ""
    """Required `iss` claim of a token."""

    jwt_audience: str = ""
    """Required `aud` claim of a token, or one of its audiences."""

    jwt_algorithms: tuple[Algorithm, ...] = ("RS256", "ES256", "EdDSA")
    """Accepted signature algorithms."""

    jwt_leeway_s: float = Field(default=30.0, ge=0)
    """Tolerated clock difference between the issuer and this router."""

    jwt_tenant_claim: str = "sub"
    """Claim that names the tenant. With --tenants-file it must be a tenant of that file, whose limits apply;
    otherwise each value is a tenant."""

    jwt_models_claim: str = ""
    """Claim that lists the models that a token may use: a list, or a string separated by spaces. It never
    extends the rights of the tenant."""

    jwt_classes_claim: str = ""
    """Claim that lists the priority classes that a token may use, in the same form."""

    # --- Responses ---

    responses_kept: int = Field(default=10_000, ge=0)
    """Maximum number of stored responses of /v1/responses, which clients retrieve by id or continue by
    previous_response_id. The oldest are dropped first."""

    responses_memory: Bytes = Field(default=128 * 1024**2, ge=0)
    """Maximum memory of stored responses. 0: store none."""

    responses_ttl_s: float = Field(default=86_400, ge=0)
    """Time for which a response is stored."""

    response_store: SecretStr = SecretStr("memory")
    """Where responses are stored. memory: in this router; a restart drops all, and with several replicas a
    client must reach the same one, or send the whole conversation. A URL such as
    `redis://user:password@host:6379/0` (rediss:// with TLS, or unix://): in a Redis or Valkey that several
    routers share, and that only this service uses. The limits are then those of all its routers. Requires
    `batonserve[redis]`. Set it by the environment variable if it has a password."""

    # --- Observability ---

    log_format: Format = Field(default="auto", validation_alias=_either("LOG_FORMAT"))
    """Format of log lines. auto: text on a terminal, otherwise one JSON object per line. Lines about a
    request contain its id; no line contains a prompt."""

    log_requests: bool = False
    """Log status, workers, tokens and times of each inference request at its end."""

    tracing_endpoint: str = Field(default="", validation_alias=_either("TRACING_ENDPOINT"))
    """OTLP/HTTP endpoint for OpenTelemetry spans, such as http://collector:4318. OTEL_EXPORTER_OTLP_HEADERS,
    OTEL_EXPORTER_OTLP_CERTIFICATE and OTEL_RESOURCE_ATTRIBUTES apply. Empty: disabled; the router
    forwards `traceparent` unchanged."""

    tracing_ratio: float = Field(default=1.0, ge=0, le=1)
    """Fraction (0-1) of requests to trace, among those whose `traceparent` does not decide."""

    # --- Gateway API ---

    gateway_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of the endpoint picker, which Envoy gateways ask where a request goes: ext_proc over gRPC, as
    Gateway API's inference extension defines it. 0: a free port. Requires `batonserve[gateway]`. Empty:
    disabled."""

    gateway_host: str = ""
    """Address on which the endpoint picker listens. Empty: that of --host."""

    gateway_certificate: str = "self-signed"
    """Certificate of --gateway-port: `self-signed`, `none` for plaintext (h2c), or a folder with `tls.crt`
    and `tls.key`, such as a mounted Secret. Changed files are used for new connections."""

    @property
    def connection_bytes(self) -> int:
        """Bytes of memory for bodies and responses in each process; at least one body fits."""
        limit = self.connection_memory
        if limit is None:
            limit = int(CONNECTION_SHARE * (memory_limit() or CONTAINER_BYTES))
        processes = self.processes + 1 if self.processes > 1 else 1  # the scheduler's is one more
        return max(limit // processes, 2 * self.max_body)

    @property
    def requires_keys(self) -> bool:
        """Return whether clients need a key or a token."""
        return bool(self.api_key or self.api_key_file or self.tenants_file or self.jwt_jwks)

    @property
    def has_workers(self) -> bool:
        """Return whether workers that answer requests are listed or discovered."""
        return bool(self.decode or self.worker or self.asks_for_workers)

    @property
    def asks_for_workers(self) -> bool:
        """Return whether workers are discovered by DNS or Kubernetes."""
        return bool(self.decode_dns or self.prefill_dns or self.kubernetes_selector)
