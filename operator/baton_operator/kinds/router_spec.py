"""The routers of a service, and how they are reached from outside of the cluster."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from baton_operator.kinds.batch_settings import BatchSettings
from baton_operator.kinds.engine import Arguments, Environment, Image
from baton_operator.kinds.model import SecretReference
from baton_operator.kinds.part import Annotations, Anything, Label, Part, Quantity, Rule, Subdomain, rules
from baton_operator.kinds.worker_role import Placement


class RouterResources(Part):
    """What one router needs."""

    cpu: Quantity = "1"
    """Processors, requested."""

    memory: Quantity = "512Mi"
    """Memory, requested and the limit."""


class RouterDrain(Part):
    """How a router ends."""

    pre_stop_seconds: Annotated[int, Field(ge=0, le=3600)] = 5
    """Seconds for which a terminating router still accepts connections: as long as Services take to learn of
    its end. Default: 5."""

    timeout_seconds: Annotated[int, Field(ge=1, le=86_400)] = 600
    """Seconds after that for running streams to finish; no other router can continue them. Default: 600."""


@rules(
    Rule(
        "self.batches.execution != 'Jobs' || self.replicas == 1 || has(self.batches.databaseSecretRef)",
        "several routers whose batches are run by Jobs need batches.databaseSecretRef: any of them is asked",
        ".batches.databaseSecretRef",
    ),
)
class Router(Part):
    """The routers."""

    replicas: Annotated[int, Field(ge=1, le=64)] = 1
    """How many. Each knows only of its own requests, so few large ones route better than many small ones."""

    processes: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes of each that hold clients' connections."""

    image: Image | None = None
    """Image of the routers; the operator's own default if it is left out."""

    alone_tokens: Annotated[int, Field(ge=0, le=10_000_000)] = 512
    """Most tokens of a prompt that a decode worker is asked to compute by itself while there is a prefill
    worker."""

    queue_limit: Annotated[int, Field(ge=1, le=1_000_000)] = 10_000
    """Most requests that wait in one router."""

    hold_for_scale_from_zero_seconds: Annotated[int, Field(ge=0, le=3600)] = 0
    """Seconds for which requests wait while there is no worker at all."""

    page: bool = False
    """Whether routers show a page at `/`: workers, the last requests, and a place to talk to the model."""

    batches: BatchSettings = BatchSettings()
    """Files and batches."""

    args: Arguments = []
    """Further flags of `baton router`."""

    env: Environment = []
    """Further environment."""

    resources: RouterResources = RouterResources()
    """What one router needs."""

    placement: Placement = Placement()
    """On which nodes routers are placed. Without `topologySpread` they are spread over nodes and zones where
    there is room."""

    drain: RouterDrain = RouterDrain()
    """How a router ends."""

    pod_template: Anything | None = None
    """A PodTemplateSpec that is merged over what the operator makes; the router's container is called
    main."""


class GatewayReference(Part):
    """A Gateway that an HTTPRoute is attached to."""

    name: Subdomain
    """Name of the Gateway."""

    namespace: Label | None = None
    """Its namespace; the service's own if it is left out."""

    section_name: Subdomain | None = None
    """Its listener; all of them if it is left out."""


class Issuer(Part):
    """Who issues the certificate: cert-manager's Issuer or ClusterIssuer."""

    name: Subdomain
    """Its name."""

    kind: Literal["Issuer", "ClusterIssuer"] = "Issuer"
    """Its kind."""


@rules(
    Rule("has(self.secretName) != has(self.issuerRef)", "tls has either secretName or issuerRef"),
)
class Tls(Part):
    """The certificate of the service's hosts."""

    secret_name: Subdomain | None = None
    """A Secret that holds it."""

    issuer_ref: Issuer | None = None
    """Who issues it."""


class Authentication(Part):
    """Who may send requests."""

    api_keys_secret_ref: SecretReference | None = None
    """A Secret with the file `keys`: one API key to a line, or its sha256, as `baton router --api-key-file`
    reads it."""

    tenants_secret_ref: SecretReference | None = None
    """A Secret with the file `tenants.yaml`, as `baton router --tenants-file` reads it. Its limits hold for
    each router replica: N replicas allow up to N times as much."""


@rules(
    Rule(
        "self.type != 'HTTPRoute' || has(self.gatewayRefs)", "an HTTPRoute needs gatewayRefs", ".gatewayRefs"
    ),
    Rule(
        "self.type != 'HTTPRoute' || !has(self.tls)",
        "the certificate of an HTTPRoute belongs to the Gateway's listener: leave out tls and set it there",
        ".tls",
    ),
    Rule(
        "self.type == 'None' || size(self.hosts) > 0",
        "an Ingress or an HTTPRoute needs hosts",
        ".hosts",
    ),
)
class Exposure(Part):
    """How the service is reached from outside of the cluster."""

    type: Literal["None", "Ingress", "HTTPRoute"] = "None"
    """None: by its Service alone."""

    hosts: Annotated[list[Subdomain], Field(max_length=16)] = []
    """Names under which it is reached."""

    ingress_class_name: Subdomain | None = None
    """Who serves the Ingress; the cluster's default if it is left out."""

    gateway_refs: Annotated[list[GatewayReference], Field(min_length=1, max_length=8)] | None = None
    """The Gateways of the HTTPRoute."""

    annotations: Annotations = {}
    """Of the Ingress or HTTPRoute."""

    tls: Tls | None = None
    """Certificate of an Ingress. An HTTPRoute has none of its own: it belongs to the Gateway's listener."""

    auth: Authentication = Authentication()
    """Who may send requests; everybody who reaches the service if nothing is given."""
