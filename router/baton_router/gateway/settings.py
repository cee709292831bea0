"""Settings of the endpoint picker. They are part of the router's settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from baton_batches.settings import BatchSettings


class GatewaySettings(BatchSettings):
    """The port that Envoy gateways ask."""

    GROUPS: ClassVar[Mapping[str, str]] = {"gateway_port": "Gateway API"}
    """The first setting of the group in the help, and the title of the group."""

    gateway_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of the endpoint picker, which Envoy gateways ask where a request goes: ext_proc over gRPC, as
    Gateway API's inference extension defines it. 0: a free port. Requires `batonserve[gateway]`. Empty:
    disabled."""

    gateway_host: str = ""
    """Address on which the endpoint picker listens. Empty: that of --host."""

    gateway_certificate: str = "self-signed"
    """Certificate of --gateway-port: `self-signed`, `none` for plaintext (h2c), or a folder with `tls.crt`
    and `tls.key`, such as a mounted Secret. Changed files are used for new connections."""
