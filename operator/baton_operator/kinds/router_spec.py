"""The routers of a service, their storage of files and batches, and their exposure outside of the cluster."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from baton_operator.kinds.engine import Arguments, Environment, Image
from baton_operator.kinds.model import SecretReference
from baton_operator.kinds.part import (
    Annotations,
    Anything,
    Duration,
    Label,
    Part,
    Rule,
    Subdomain,
    between,
    rules,
)
from baton_operator.kinds.resources import ResourceRequirements
from baton_operator.kinds.worker_role import Drain, Placement


class RouterDrain(Drain):
    """Shutdown of a router."""

    pre_stop_delay: Annotated[Duration, between("0s", "1h")] = Duration("5s")
    """Time for which a terminating router still accepts connections, until Services stop sending them."""

    timeout: Annotated[Duration, between("1s", "24h")] = Duration("10m")
    """Maximum time for running streams to finish after preStopDelay. They cannot move to another router."""


@rules(
    Rule("has(self.claimName) != has(self.uri)", "files needs either claimName or uri"),
    Rule(
        "has(self.uri) || (!has(self.endpoint) && !has(self.credentialsSecretRef))",
        "endpoint and credentialsSecretRef need uri",
    ),
)
class FileStore(Part):
    """Storage for the contents of files, shared by all routers."""

    claim_name: Subdomain | None = None
    """Name of an existing PersistentVolumeClaim that all routers can write to (ReadWriteMany with several
    routers). Excludes uri."""

    uri: Annotated[str, Field(max_length=1024, pattern=r"^s3://[^/]+(/.*)?$")] | None = None
    """S3 bucket and prefix: s3://BUCKET/PREFIX. Excludes claimName."""

    endpoint: Annotated[str, Field(max_length=1024, pattern=r"^https?://[^/]+")] | None = None
    """URL of an S3-compatible server. Default: Amazon S3."""

    credentials_secret_ref: SecretReference | None = None
    """Secret whose keys become environment variables of the routers, such as AWS_ACCESS_KEY_ID and
    AWS_SECRET_ACCESS_KEY."""


@rules(
    Rule(
        "has(self.databaseSecretRef) == has(self.files)",
        "databaseSecretRef and files need each other: set both for persistent batches",
    ),
)
class BatchSettings(Part):
    """Files and batches API. Without databaseSecretRef and files, each router keeps its own files and batches
    and loses them when its pod ends.
    """

    execution: Literal["Subprocess", "Jobs"] = "Subprocess"
    """Where batches run. Subprocess: in processes beside each router. Jobs: in one Kubernetes Job for each
    batch, declared by a BatchJob."""

    database_secret_ref: SecretReference | None = None
    """Secret whose key `url` is the URL of the Postgres database that all routers share:
    postgresql://USER:PASSWORD@HOST/NAME. The optional key `runners` is the secret with which batch processes
    authenticate to routers; by default it is derived from the URL."""

    parallelism: Annotated[int, Field(ge=1, le=64)] = 1
    """Maximum runners of one batch, which share its requests. With Jobs: parallelism of new BatchJobs."""

    files: FileStore | None = None
    """Storage for the contents of files."""


@rules(
    Rule(
        "self.batches.execution != 'Jobs' || self.replicas == 1 || has(self.batches.databaseSecretRef)",
        "execution Jobs with several routers needs batches.databaseSecretRef: Jobs talk to any of them",
        ".batches.databaseSecretRef",
    ),
)
class Router(Part):
    """Routers: the OpenAI-compatible API, scheduling and queueing. A change restarts routers one by one and
    does not affect workers.
    """

    replicas: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of routers. Routers do not share load information, so few large routers schedule better than
    many small ones."""

    processes: Annotated[int, Field(ge=1, le=64)] = 1
    """Frontend processes of each router, which serve client connections."""

    image: Image | None = None
    """Container image of the routers. Default: the operator's router image."""

    local_prefill_max_tokens: Annotated[int, Field(ge=0, le=10_000_000)] = 512
    """Maximum uncached prompt tokens that a decode worker computes itself while a prefill worker is
    available. 0 sends all prompts with uncached tokens to prefill workers."""

    queue_limit: Annotated[int, Field(ge=1, le=1_000_000)] = 10_000
    """Maximum queued requests of one router. Further requests are rejected with status 429."""

    scale_from_zero_timeout: Annotated[Duration, between("0s", "1h")] = Duration("0s")
    """Maximum time that a request waits for the first worker of a service without workers. 0s rejects it
    immediately with status 503. Must be above 0s if a role has minReplicas 0."""

    dashboard: bool = False
    """Serves the dashboard at `/`: workers, recent requests, and a chat with the model."""

    batches: BatchSettings = BatchSettings()
    """Files and batches API."""

    args: Arguments = []
    """Additional flags of `baton router`, one per entry, after those that the operator sets."""

    env: Environment = []
    """Additional environment variables."""

    resources: ResourceRequirements = ResourceRequirements(
        requests={"cpu": "1", "memory": "512Mi"}, limits={"memory": "512Mi"}
    )
    """Compute resources of one router. Default: requests of one core and 512Mi of memory, which is the limit
    too. A value replaces the whole default."""

    placement: Placement = Placement()
    """Scheduling of the routers. Without topologySpreadConstraints, routers are spread over nodes and zones
    where possible."""

    drain: RouterDrain = RouterDrain()
    """Shutdown of a router."""

    pod_template: Anything | None = None
    """PodTemplateSpec that is merged over the one that the operator generates. The container is named
    main."""


class GatewayReference(Part):
    """Gateway to which the HTTPRoute attaches."""

    name: Subdomain
    """Name of the Gateway."""

    namespace: Label | None = None
    """Namespace of the Gateway. Default: the namespace of the service."""

    section_name: Subdomain | None = None
    """Listener of the Gateway. Default: all listeners."""


class InferencePool(Part):
    """InferencePool (inference.networking.k8s.io/v1) with the routers as endpoint picker."""

    failure_mode: Literal["FailClose", "FailOpen"] = "FailClose"
    """Behavior of the gateway if no router answers. FailOpen: it chooses any worker."""


class Issuer(Part):
    """Issuer or ClusterIssuer of cert-manager."""

    name: Subdomain
    """Name of the issuer."""

    kind: Literal["Issuer", "ClusterIssuer"] = "Issuer"
    """Kind of the issuer."""


@rules(
    Rule("has(self.secretName) != has(self.issuerRef)", "set either secretName or issuerRef"),
)
class Tls(Part):
    """Certificate of the hosts."""

    secret_name: Subdomain | None = None
    """Name of an existing Secret of type kubernetes.io/tls. Excludes issuerRef."""

    issuer_ref: Issuer | None = None
    """Issuer from which cert-manager requests the certificate. Excludes secretName."""


class Authentication(Part):
    """Authentication of clients. Without any, everyone who reaches the service can send requests."""

    api_keys_secret_ref: SecretReference | None = None
    """Secret whose key `keys` has one API key per line, in the format of `baton router --api-key-file`: the
    key or its SHA-256 hash."""

    tenants_secret_ref: SecretReference | None = None
    """Secret whose key `tenants.yaml` is in the format of `baton router --tenants-file`. Each router
    replica applies the limits by itself: N replicas admit up to N times as much."""


@rules(
    Rule(
        "self.type != 'HTTPRoute' || has(self.gatewayRefs)",
        "HTTPRoute needs gatewayRefs",
        ".gatewayRefs",
    ),
    Rule(
        "self.type != 'HTTPRoute' || !has(self.tls)",
        "type HTTPRoute does not support tls: set the certificate in the listener of the Gateway",
        ".tls",
    ),
    Rule(
        "self.type != 'Ingress' || !has(self.inferencePool)",
        "type Ingress does not support inferencePool: an Ingress cannot ask an endpoint picker",
        ".inferencePool",
    ),
    Rule(
        "self.type == 'None' || size(self.hosts) > 0",
        "type Ingress or HTTPRoute needs hosts",
        ".hosts",
    ),
)
class Exposure(Part):
    """Access from outside of the cluster."""

    type: Literal["None", "Ingress", "HTTPRoute"] = "None"
    """Object that exposes the routers. None: only their Service."""

    hosts: Annotated[list[Subdomain], Field(max_length=16)] = []
    """Host names of the service. Required for Ingress and HTTPRoute. The first one stands in status.url."""

    ingress_class_name: Subdomain | None = None
    """IngressClass of the Ingress. Default: the default class of the cluster."""

    gateway_refs: Annotated[list[GatewayReference], Field(min_length=1, max_length=8)] | None = None
    """Gateways of the HTTPRoute. Required for HTTPRoute."""

    inference_pool: InferencePool | None = None
    """Creates an InferencePool: gateways with Gateway API's inference extension ask a router for the worker
    and send requests to it themselves. The HTTPRoute then refers to the pool. With type None, create the
    HTTPRoute yourself. Default: none; gateways send requests to routers."""

    annotations: Annotations = {}
    """Annotations of the Ingress or HTTPRoute."""

    tls: Tls | None = None
    """Certificate of the Ingress. Not for HTTPRoute, whose certificate belongs to the Gateway's listener."""

    auth: Authentication = Authentication()
    """Authentication of clients. Default: none."""
