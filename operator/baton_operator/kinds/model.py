"""Which model a service serves, and where its files are kept."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from baton_operator.kinds.part import Part, Quantity, Rule, Subdomain, Text, rules

SCHEMES = ("hf", "s3", "gs", "oci", "pvc", "file", "builtin")


class SecretReference(Part):
    """A Secret in the service's namespace. Its content is mounted, never read by the operator."""

    name: Subdomain
    """Name of the Secret."""


@rules(
    Rule(
        "self.type != 'PVC' || has(self.claimName) != has(self.size)",
        "a cache of type PVC has either claimName (one that exists) or size (of one to be made)",
    ),
    Rule("self.type != 'HostPath' || has(self.path)", "a cache of type HostPath needs path", ".path"),
    Rule(
        "self.type == 'PVC' || (!has(self.claimName) && !has(self.storageClassName))",
        "claimName and storageClassName are for a cache of type PVC",
    ),
    Rule("self.type != 'HostPath' || !has(self.size)", "a folder of the node has no size", ".size"),
    Rule("self.type == 'HostPath' || !has(self.path)", "path is for a cache of type HostPath", ".path"),
)
class Cache(Part):
    """Where a model's files are kept between the starts of pods."""

    type: Literal["None", "PVC", "HostPath"] = "None"
    """None: every pod fetches the files for itself. PVC: a Job fetches them once into a volume claim.
    HostPath: the first pod on a node fetches them into a folder of the node, which has to belong to user
    65532; a namespace whose pods are restricted does not allow it."""

    claim_name: Subdomain | None = None
    """A PersistentVolumeClaim that exists."""

    size: Quantity | None = None
    """PVC: size of the PersistentVolumeClaim to be made. A larger one makes the claim grow, if its class
    allows that; a smaller one changes nothing. None: storage of the node that each pod requests for the
    files, and may use."""

    storage_class_name: Subdomain | None = None
    """Class of the PersistentVolumeClaim to be made; the cluster's default if it is left out. A change of it
    does not touch a claim that is there."""

    path: Annotated[str, Field(max_length=1024, pattern=r"^/[^:]+$")] | None = None
    """Folder on the nodes."""


@rules(
    Rule(
        f"self.uri.matches('^({'|'.join(SCHEMES)})://')",
        f"uri begins with one of {', '.join(f'{one}://' for one in SCHEMES)}",
        ".uri",
    ),
    Rule(
        "self.cache.type == 'None' || !self.uri.matches('^(pvc|file|builtin)://')",
        "a model that lies in a volume, in the image or in the package needs no cache",
        ".cache",
    ),
    Rule(
        "!has(self.aliases) || !has(self.name) || !(self.name in self.aliases)",
        "the model's name is not one of its aliases",
        ".aliases",
    ),
)
class Model(Part):
    """The model that is served."""

    uri: Annotated[str, Field(min_length=8, max_length=1024)]
    """Where its files are: hf://ORGANISATION/NAME, s3://BUCKET/PATH, gs://BUCKET/PATH, oci://IMAGE (mounted
    as a volume), pvc://CLAIM/PATH, file:///PATH (in the image or on a volume of the pod template), or
    builtin://smollm2, which comes with the package."""

    name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """What requests call it; the service's own name if it is left out."""

    aliases: Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=16)] = []
    """Further names that requests may use."""

    revision: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Branch, tag or commit of a model on the hub. Without one, the newest commit when it is fetched."""

    credentials_secret_ref: SecretReference | None = None
    """Environment of the Job, or of the pods without a cache, that fetches the files: HF_TOKEN,
    AWS_ACCESS_KEY_ID and the like."""

    allow_patterns: Annotated[list[Text], Field(max_length=32)] = []
    """Only files whose names match one of these are fetched, such as *.safetensors. All that are needed if it
    is empty."""

    cache: Cache = Cache()
    """Where the files are kept."""
