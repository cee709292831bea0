"""`LoraAdapter`: declares an adapter of a model. The engine of this release does not load adapters."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from baton_operator.kinds.model import SecretReference
from baton_operator.kinds.part import Conditions, Label, Part, Rule, rules


@rules(
    Rule("self.serviceName == oldSelf.serviceName", "serviceName cannot be changed", ".serviceName"),
    Rule(
        "self.uri.matches('^(hf|s3|gs|oci|pvc|file)://')",
        "uri begins with hf://, s3://, gs://, oci://, pvc:// or file://",
        ".uri",
    ),
)
class LoraAdapterSpec(Part):
    """Adapter and service that is to load it. Not implemented in this release; status reports that."""

    service_name: Label
    """Name of the InferenceService in the same namespace. Immutable."""

    uri: Annotated[str, Field(min_length=8, max_length=1024)]
    """Location of the adapter's files: hf://, s3://, gs://, oci://, pvc:// or file://, as in
    InferenceService spec.model.uri."""

    name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Name of the adapter in requests. Default: the name of this object."""

    rank: Annotated[int, Field(ge=1, le=512)] | None = None
    """Rank of the adapter. Default: read from the adapter's configuration."""

    credentials_secret_ref: SecretReference | None = None
    """Secret whose keys become environment variables of the download, such as HF_TOKEN."""


class LoraAdapterStatus(Part):
    """State of the adapter."""

    observed_generation: Annotated[int, Field(ge=0)] = 0
    """Value of metadata.generation that the operator last processed."""

    conditions: Conditions = []
    """Active: whether the adapter is loaded. In this release always False with reason NotImplemented."""
