"""An issuer of tokens: keys of its own, the set that it shows, and tokens, good and bad."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import jwt
import msgspec
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

ISSUER = "https://issuer.example"
AUDIENCE = "baton"

_RSA = rsa.generate_private_key(public_exponent=65537, key_size=2048)  # slow to make: one for all tests


class Issuer:
    """Its keys by name; each has one algorithm."""

    def __init__(self) -> None:
        self.keys: dict[str, tuple[str, Any]] = {}
        self.fetches = 0
        self.down = False
        self.add("rsa", "RS256")

    def add(self, name: str, algorithm: str) -> None:
        kinds: Mapping[str, Any] = {
            "RS256": lambda: _RSA,
            "ES256": lambda: ec.generate_private_key(ec.SECP256R1()),
            "EdDSA": ed25519.Ed25519PrivateKey.generate,
        }
        self.keys[name] = algorithm, kinds[algorithm]()

    def shown(self) -> bytes:
        """The set of public keys."""
        bodies = []
        for name, (algorithm, key) in self.keys.items():
            kind = jwt.get_algorithm_by_name(algorithm)
            body: dict[str, Any] = dict(kind.to_jwk(key.public_key(), as_dict=True))
            bodies.append({**body, "kid": name, "alg": algorithm, "use": "sig"})
        return msgspec.json.encode({"keys": bodies})

    async def fetch(self) -> bytes:
        self.fetches += 1
        if self.down:
            raise OSError("The issuer does not answer.")
        return self.shown()

    def token(self, key: str = "rsa", headers: dict[str, Any] | None = None, **claims: Any) -> str:
        """Good for five minutes, unless the claims say otherwise; None takes a claim away."""
        algorithm, private = self.keys[key]
        claimed = {"iss": ISSUER, "aud": AUDIENCE, "sub": "acme", "exp": time.time() + 300, **claims}
        claimed = {name: value for name, value in claimed.items() if value is not None}
        named = {"kid": key, **(headers or {})}
        return jwt.encode(
            claimed, private, algorithm, {name: value for name, value in named.items() if value}
        )
