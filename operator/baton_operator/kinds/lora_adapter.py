"""`LoraAdapter`: a model's adapter, declared; the engine of this release does not load adapters yet."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from baton_operator.kinds.model import SecretReference
from baton_operator.kinds.part import Label, Part, Rule, rules
from baton_operator.kinds.status import Conditions


@rules(
    Rule("self.serviceName == oldSelf.serviceName", "serviceName cannot be changed", ".serviceName"),
    Rule(
        "self.uri.matches('^(hf|s3|gs|oci|pvc|file)://')",
        "uri begins with hf://, s3://, gs://, oci://, pvc:// or file://",
        ".uri",
    ),
)
class LoraAdapterSpec(Part):
    """Which adapter, and for which service. Not active in this release: status says so."""

    service_name: Label
    """The InferenceService."""

    uri: Annotated[str, Field(min_length=8, max_length=1024)]
    """Where its files are, as a model's."""

    name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """What requests call it; the object's name if it is left out."""

    rank: Annotated[int, Field(ge=1, le=512)] | None = None
    """Its rank, if it is known before it is loaded."""

    credentials_secret_ref: SecretReference | None = None
    """Environment of what fetches the files."""


class LoraAdapterStatus(Part):
    """Where it is loaded."""

    observed_generation: Annotated[int, Field(ge=0)] = 0
    """The metadata.generation that this is about."""

    conditions: Conditions = []
    """Active is False with the reason NotImplemented in this release."""
