"""The model of a service, and the storage of its files."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from baton_operator.kinds.part import Part, Quantity, Rule, Subdomain, Text, rules

SCHEMES = ("hf", "s3", "gs", "oci", "pvc", "file", "builtin")


class SecretReference(Part):
    """Reference to a Secret in the same namespace. Pods mount it; the operator never reads it."""

    name: Subdomain
    """Name of the Secret."""


@rules(
    Rule(
        "self.type != 'PVC' || has(self.claimName) != has(self.size)",
        "a cache of type PVC has either claimName (an existing claim) or size (of a new claim)",
    ),
    Rule("self.type != 'HostPath' || has(self.path)", "a cache of type HostPath needs path", ".path"),
    Rule(
        "self.type == 'PVC' || (!has(self.claimName) && !has(self.storageClassName))",
        "claimName and storageClassName are for a cache of type PVC",
    ),
    Rule(
        "!has(self.accessMode) || (self.type == 'PVC' && has(self.size))",
        "accessMode is for a claim that the operator creates: a cache of type PVC with size",
        ".accessMode",
    ),
    Rule(
        "self.type != 'HostPath' || !has(self.size)",
        "a cache of type HostPath has no size",
        ".size",
    ),
    Rule("self.type == 'HostPath' || !has(self.path)", "path is for a cache of type HostPath", ".path"),
)
class Cache(Part):
    """Storage of the model's files between restarts of pods."""

    type: Literal["None", "PVC", "HostPath"] = "None"
    """Kind of storage. None: each pod downloads the files itself. PVC: a Job downloads them once into a
    PersistentVolumeClaim. HostPath: the first pod on each node downloads them into a folder of the node. User
    65532 must be able to write to it. Namespaces with the Pod Security Standard baseline or restricted reject
    such pods."""

    claim_name: Subdomain | None = None
    """PVC: name of an existing PersistentVolumeClaim. Excludes size."""

    size: Quantity | None = None
    """PVC: size of the PersistentVolumeClaim that the operator creates, such as 100Gi. A larger value expands
    the claim if its StorageClass allows that; a smaller value is ignored. None: ephemeral storage that each
    pod requests, and its limit. Not for HostPath."""

    storage_class_name: Subdomain | None = None
    """PVC: StorageClass of the claim that the operator creates. A later change does not affect an existing
    claim. Default: the default StorageClass of the cluster."""

    access_mode: Literal["ReadWriteMany", "ReadWriteOnce"] | None = None
    """PVC: access mode of the claim that the operator creates. ReadWriteOnce is for block storage (EBS,
    Persistent Disk), which pods of one node can use: place all roles on one node by a nodeSelector. A later
    change does not affect an existing claim. Default: ReadWriteMany."""

    path: Annotated[str, Field(max_length=1024, pattern=r"^/[^:]+$")] | None = None
    """HostPath: absolute path of the folder on the nodes. Required for HostPath."""


@rules(
    Rule(
        f"self.uri.matches('^({'|'.join(SCHEMES)})://')",
        f"uri begins with one of {', '.join(f'{scheme}://' for scheme in SCHEMES)}",
        ".uri",
    ),
    Rule(
        "self.cache.type == 'None' || !self.uri.matches('^(pvc|file|builtin)://')",
        "a pvc://, file:// or builtin:// model is not downloaded: set cache.type None",
        ".cache",
    ),
    Rule(
        "!has(self.aliases) || !has(self.name) || !(self.name in self.aliases)",
        "aliases must not repeat the name of the model",
        ".aliases",
    ),
)
class Model(Part):
    """Model that the service serves. A change rolls out a new revision."""

    uri: Annotated[str, Field(min_length=8, max_length=1024)]
    """Location of the model's files. Downloaded: hf://ORGANIZATION/NAME, s3://BUCKET/PATH or gs://BUCKET/PATH.
    Mounted: oci://IMAGE (an image volume) or pvc://CLAIM/PATH. In the container: file:///PATH, of its image
    or a volume of podTemplate. For tests: builtin://smollm2, a small model inside the worker image."""

    name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Name of the model in requests. Default: the name of the InferenceService."""

    aliases: Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=16)] = []
    """Additional names of the model in requests."""

    revision: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Branch, tag or commit of an hf:// model. Default: the newest commit of the default branch at the time
    of the download; all pods of a revision use the same commit."""

    credentials_secret_ref: SecretReference | None = None
    """Secret whose keys become environment variables of the download, such as HF_TOKEN or
    AWS_ACCESS_KEY_ID."""

    allow_patterns: Annotated[list[Text], Field(max_length=32)] = []
    """Glob patterns of the files to download, such as *.safetensors. Empty: all files that the engine
    needs."""

    cache: Cache = Cache()
    """Storage of the downloaded files."""
