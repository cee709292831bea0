"""
The settings of one router process, each with its unit, default and reason.

Built once where the process starts and passed down; nothing else reads the environment. Each field is
a flag of `baton router` (`--health-interval-s`) and the environment variable `BATON_ROUTER_<NAME>`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, AliasChoices, BeforeValidator, Field, SecretStr
from pydantic_settings import SettingsConfigDict

from baton_api import limits
from baton_api.keys import KeyDigests
from baton_api.logs import Format
from baton_api.sizes import Bytes
from baton_api.texts import Names, Origins
from baton_batches.settings import BatchSettings
from baton_router.scheduling import revision_weights
from baton_router.workers.discovery.dns import DnsName


def _worker_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
        raise ValueError(f"{url!r} is no worker's address; one looks like http://127.0.0.1:8000")
    return f"{parts.scheme}://{parts.netloc}"


def _dns_question(text: str) -> str:
    DnsName.parse(text)
    return text


def _revision_weight(text: str) -> str:
    revision_weights.parse(text)
    return text


def _cluster() -> str:
    """Where Kubernetes says that its API server is."""
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        return ""
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


def _either(name: str) -> AliasChoices:
    """The router's own variable, else the one that workers read: who sets that one wants a key everywhere."""
    return AliasChoices(f"BATON_ROUTER_{name}", f"BATON_{name}")


def _one_key(value: object) -> object:
    """The first of several keys that is no digest: a digest is not what a worker wants to be shown."""
    keys = value.split(",") if isinstance(value, str) else []
    return next((key.strip() for key in keys if not key.strip().startswith("sha256:")), "") if keys else value


WorkerKey = Annotated[SecretStr, BeforeValidator(_one_key)]
DnsQuestion = Annotated[str, AfterValidator(_dns_question)]
RevisionWeight = Annotated[str, AfterValidator(_revision_weight)]
WorkerUrl = Annotated[str, AfterValidator(_worker_url)]
Algorithm = Literal[
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA",
]  # fmt: skip
"""Those that sign with a key that nobody else has; a shared secret is no key for tokens."""


class RouterSettings(BatchSettings):
    """One router."""

    model_config = SettingsConfigDict(
        env_prefix="BATON_ROUTER_",
        frozen=True,
        use_attribute_docstrings=True,
        extra="forbid",
        validate_by_name=True,
        validate_by_alias=True,
    )

    host: str = "127.0.0.1"
    """Address of the OpenAI API. Other machines can reach it only if this says so."""

    port: int = Field(default=8080, ge=0, le=65535)
    """Port of the OpenAI API; 0 takes a free one."""

    processes: int = Field(default=1, ge=1, le=64)
    """Processes that hold clients' connections. With more than one, a scheduler's process of its own chooses
    for all of them; one process serves some thousand requests a second. Requests to /v1/responses pass
    through the scheduler's process too, unless they say `store: false` and continue nothing, or nothing is
    kept (--responses-kept 0)."""

    scheduler_patience_s: float = Field(default=5.0, gt=0)
    """Seconds in which the scheduler has to acknowledge a request, where it is a process of its own. The
    request waits meanwhile, also for a scheduler that is started again; then it is rejected with 503. No more
    than --queue-requests and --queue-bytes wait in each of the other processes."""

    decode: tuple[WorkerUrl, ...] = ()
    """Workers that answer requests, such as http://127.0.0.1:8001; a worker of role both is one. One at an
    https:// address is spoken to with the certificate of --tls-folder."""

    prefill: tuple[WorkerUrl, ...] = ()
    """Workers that compute prompts for the decode workers. Without one, decode workers compute them."""

    decode_dns: tuple[DnsQuestion, ...] = ()
    """Decode workers by DNS: NAME:PORT stands for all IPv4 addresses of the name (or its IPv6 addresses if it
    has no other), a name that begins with _ such as _http._tcp.workers.example.org for its SRV records."""

    prefill_dns: tuple[DnsQuestion, ...] = ()
    """Prefill workers by DNS."""

    dns_interval_s: float = Field(default=5.0, gt=0)
    """Seconds from one question to DNS to the next. Without an answer the workers stay as they are; an answer
    without addresses counts if it comes three times in a row."""

    kubernetes_selector: str = ""
    """Workers by Kubernetes: those in the EndpointSlices with these labels, such as
    kubernetes.io/service-name=workers. A slice's labels are its Service's; baton.dev/role (decode, prefill,
    both; decode if there is none) and baton.dev/revision are read from there. The router's account must be
    allowed to list and watch endpointslices of discovery.k8s.io, in its namespace, and nothing else."""

    kubernetes_namespace: str = ""
    """Namespace of the EndpointSlices; empty: the router's own."""

    kubernetes_port: str = "http"
    """Name of the workers' port in the EndpointSlices, if they have several."""

    kubernetes_api: str = Field(default_factory=_cluster)
    """URL of the API server; empty: that of the cluster in which the router runs. At an http:// URL, such as
    `kubectl proxy` has, no account is used."""

    kubernetes_account: str = "/var/run/secrets/kubernetes.io/serviceaccount"
    """Folder with the account's `token`, `ca.crt` and `namespace`, read again for each connection."""

    revision_weight: tuple[RevisionWeight, ...] = ()
    """What part of the requests workers of a generation get, as REVISION=NUMBER; repeated. While one with a
    weight can serve, those without get none. No weights at all: all workers compete."""

    revision_weights_file: str = ""
    """A file of such weights, one to a line, read again within a second when it changes: a mounted ConfigMap.
    It goes before --revision-weight."""

    worker_drain_s: float = Field(default=600.0, ge=0)
    """Seconds that a worker which is listed no more, or as terminating, has for the requests that it has;
    what is not done then goes on at another one."""

    tls_folder: str = ""
    """A folder with `tls.crt`, `tls.key` and `ca.crt`, as a Secret of cert-manager has them: this router's
    certificate for workers that want one, and the authority of theirs. Used for workers at https://
    addresses, for all that DNS lists, and for those of a Service that says `appProtocol: https`. The files
    are read again within a second when they change."""

    tls_name: str = ""
    """A DNS name that each worker's certificate must have. Empty: whatever the authority has signed."""

    ticket_secret: str = ""
    """Shared with the prefill workers: with it, each request carries a signed ticket for its prefill
    worker. Set it by environment, not by flag, where others can list processes."""

    api_key: KeyDigests = Field(default=(), validation_alias=_either("API_KEY"))
    """A key that clients may send as `Authorization: Bearer <key>`, or its `sha256:<hex>`; repeated for
    several. With any, all but /health, /ready, /ping and /metrics wants one. Set it by environment (with
    commas between; BATON_API_KEY does too), or in a file: the command line is for all of this machine to
    read."""

    api_key_file: str = Field(default="", validation_alias=_either("API_KEY_FILE"))
    """A file of API keys, read again within a second when it changes: one to a line, as `key`, `name:key`,
    `sha256:<hex>` or `name:sha256:<hex>`; what follows a # at the start of a line is a comment."""

    tenants_file: str = ""
    """A YAML file of tenants, read again within a second when it changes: under `tenants`, a list of `name`,
    `keys` (each as `sha256:<hex>`), `models`, `classes` (critical, interactive, default, batch),
    `default_class`, `requests_per_minute`, `tokens_per_minute`, `streams`, `cache` and `admin`. All but the
    name may be left out: then a tenant may ask for every model, in all classes but critical, without limits.
    No two tenants share KV blocks, unless they name the same `cache`. Only an `admin` sees and ends what is
    others'. Limits hold for each router replica: N replicas allow up to N times as much. Set --ticket-secret
    too: the salts of the tenants' caches are made from it, and could be guessed without."""

    jwt_jwks: str = ""
    """Address or file of an issuer's public keys (JWKS): with it, its tokens are as good as API keys. Fetched
    again every five minutes, and when a token names a key that is not known, at most once a minute. Needs
    `baton[jwt]`."""

    jwt_issuer: str = ""
    """What a token must have as `iss`."""

    jwt_audience: str = ""
    """What a token must have as its `aud`, or among them."""

    jwt_algorithms: tuple[Algorithm, ...] = ("RS256", "ES256", "EdDSA")
    """With which tokens may be signed."""

    jwt_leeway_s: float = Field(default=30.0, ge=0)
    """Seconds by which the clocks of an issuer and this router may differ."""

    jwt_tenant_claim: str = "sub"
    """The claim that names the tenant. With --tenants-file it must be one of the file's, and has what that
    says; without, each name is a tenant of its own."""

    jwt_models_claim: str = ""
    """The claim that lists the models that a token is good for, if tokens have one: a list, or one text with
    blanks between. What the tenant may not use stays forbidden."""

    jwt_classes_claim: str = ""
    """The claim that lists the classes that a token is good for, in the same way."""

    log_format: Format = Field(default="auto", validation_alias=_either("LOG_FORMAT"))
    """auto: one JSON object to a line, unless the log goes to a terminal. text or json: that one in any case.
    A line that belongs to a request has its id, and no line has a prompt."""

    log_requests: bool = False
    """Log each request to generate when it has ended: its status, workers, tokens and times."""

    tracing_endpoint: str = Field(default="", validation_alias=_either("TRACING_ENDPOINT"))
    """Where spans of requests are sent by OTLP over HTTP, such as http://collector:4318. Empty: none are
    made, and a client's `traceparent` passes as it is. Of OpenTelemetry's own variables those that say more
    are read: OTEL_EXPORTER_OTLP_HEADERS, OTEL_EXPORTER_OTLP_CERTIFICATE and OTEL_RESOURCE_ATTRIBUTES."""

    tracing_ratio: float = Field(default=1.0, ge=0, le=1)
    """Share of the requests that are traced, of those whose `traceparent` does not say."""

    page: bool = False
    """Show a page at `/`: the workers and what they do, the last requests as timelines, and a place to talk
    to the model. Anybody may load it; what it shows wants a key where keys are wanted, and a tenant who is no
    admin sees its own requests and nobody's load. Costs nothing while nobody has it open."""

    worker_api_key: WorkerKey = Field(
        default=SecretStr(""), validation_alias=AliasChoices("BATON_ROUTER_WORKER_API_KEY", "BATON_API_KEY")
    )
    """The key that the workers want of this router; BATON_API_KEY, which they read too, gives it as well.
    With it, or with keys of the router's own, clients' keys are not passed on; without either they are, for
    the workers to judge. Set it by environment."""

    allowed_origins: Origins = ()
    """Origins (`https://chat.example.org`, or * for all) whose pages may call this server from a browser,
    repeated or with commas between. Empty: all if an API key is wanted, else none, because every page that
    somebody opens on this machine could use a server without a key."""

    profile: tuple[Path, ...] = ()
    """A file that `baton bench --find` wrote, with what a model takes on these machines; repeated, for one
    model each. With it the first requests go where they are answered soonest, too; later ones teach the
    router better."""

    alone_tokens: int = Field(default=512, ge=0)
    """Most tokens of a prompt that a decode worker is asked to compute beside its streams while there is a
    prefill worker for it. Whether it is asked for fewer depends on who would be done sooner."""

    health_interval_s: float = Field(default=2.0, gt=0)
    """Seconds from one look at a worker to the next, and the longest that a look may take."""

    health_misses: int = Field(default=3, ge=1)
    """Looks in a row without an answer after which a worker counts as down."""

    connect_s: float = Field(default=1.0, gt=0)
    """Seconds that a connection to a worker may take."""

    retries: int = Field(default=2, ge=0)
    """Other workers that are tried for one request, as long as no byte of an answer was sent."""

    retry_ratio: float = Field(default=0.1, ge=0)
    """Retries per request, over all requests, that workers may cause which refuse (429, 503), are slow, or
    crash: more would turn an overload into a storm. A crash counts once, however many requests it loses.
    Workers that cannot be reached do not count. 0: no such retries."""

    interactive_s: float = Field(default=10.0, gt=0)
    """Seconds within which requests of the class interactive (x-baton-class) want their first token, if they
    do not say (x-slo-ttft-ms). One that has to wait, and is predicted to take one and a half times as
    long, is refused at once with 503; none waits for longer than that."""

    wait_s: float = Field(default=300.0, gt=0)
    """Seconds for which requests of the classes critical and default, which name no objective, wait for a
    free worker before they are refused with 503. Those of the class batch wait for as long as their client
    does."""

    recovery_s: float = Field(default=5.0, ge=0)
    """Seconds for which a request waits at most if no worker is ready: one that was restarted may be soon. 0
    refuses at once."""

    hold_s: float = Field(default=0.0, ge=0)
    """Seconds for which a request waits at most if no worker is ready, where workers are started only when
    they are needed: it goes before --recovery-s, and the router is ready without workers."""

    hold_models: Names = ()
    """Names of the models that such workers have, with commas between: a request for any other is told that
    there is no such model. Without names, requests for any wait while no worker is there to say its own."""

    queue_requests: int = Field(default=10_000, ge=1)
    """Requests that may wait in the router. A tenant may fill four fifths of what the others leave."""

    queue_bytes: Bytes = Field(default=64 * 1024**2, ge=1)
    """Bytes of bodies that may wait in the router, shared in the same way."""

    prefill_tokens: int = Field(default=8192, ge=1)
    """Tokens of prompts that one worker is given at a time, if it is more than one prompt. What is beyond
    waits in the router, where it can still be put in another order or go elsewhere."""

    first_byte_s: float = Field(default=2.0, gt=0)
    """Least seconds that a worker has for the first token before another one is asked, if there is one and
    the worker's speed is known. It has three times what was predicted, if that is more, and once that in
    any case."""

    answer_s: float = Field(default=600.0, gt=0)
    """Seconds that the first byte of an answer may take in all. OpenAI's clients wait as long."""

    idle_s: float = Field(default=30.0, gt=0)
    """Seconds without a token after which a stream goes on at another worker; fifty steps of the worker, if
    that is more. One that cannot go on elsewhere is cut after as long without any sign of life, or after
    --answer-s without a token. Also the seconds for which a client may read nothing."""

    max_body: int = Field(default=limits.BODY.most, ge=1)
    """Bytes of a request's body; more are refused with 413."""

    max_header: int = Field(default=limits.HEAD.most, ge=1024)
    """Bytes of a request's head; more are refused with 431."""

    header_s: float = Field(default=10.0, gt=0)
    """Seconds that a client has to send a request's head."""

    body_s: float = Field(default=60.0, gt=0)
    """Seconds that a client has to send a request's body."""

    responses_kept: int = Field(default=10_000, ge=0)
    """Most responses of /v1/responses that this router keeps, to be asked for by id and continued by
    previous_response_id; the oldest go first. Routers know nothing of each other's: where there are several,
    each client must always meet the same one, or send its whole conversation."""

    responses_memory: Bytes = Field(default=256 * 1024**2, ge=0)
    """Most bytes of memory for them. 0: none are kept."""

    responses_ttl_s: float = Field(default=86_400, ge=0)
    """Seconds for which a response is kept, if there is room for so long. They are gone after a restart."""

    drain_notice_s: float = Field(default=0.0, ge=0)
    """Seconds between a SIGTERM, from which on /ready says 503, and the end of listening: as long as
    those who read /ready take to send new requests elsewhere."""

    drain_s: float = Field(default=60.0, ge=0)
    """Seconds that running requests get to finish after listening has ended."""

    @property
    def asks_for_workers(self) -> bool:
        """Whether others than flags list workers."""
        return bool(self.decode_dns or self.prefill_dns or self.kubernetes_selector)
