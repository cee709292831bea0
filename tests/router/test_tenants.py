"""The tenants file: valid and invalid content, and changes."""

from __future__ import annotations

import hashlib
import json
import logging
import textwrap
from pathlib import Path

import pytest

from baton_api.errors import SetupError
from baton_api.request_classes import CLASSES
from baton_api.watched import LOOK_S
from baton_operator.kinds.router_spec import Authentication
from baton_router.settings import RouterSettings
from baton_router.tenants.tenants import Tenant, TenantLimits, Tenants, cache_salt
from tests.router.fake_worker import FakeWorker
from tests.router.running import CHAT, QUESTION, running_router

SECRET = b"between the routers"


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def hashed(key: str) -> str:
    return f"sha256:{digest(key).hex()}"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tenants.yaml"


def write(file: Path, text: str) -> str:
    file.write_text(textwrap.dedent(text))
    return str(file)


def test_tenant_settings_are_read_with_permissive_defaults(file: Path) -> None:
    write(
        file,
        f"""
        tenants:
          - name: acme             # two keys while one replaces the other
            keys: [{hashed("k-1")}, {hashed("k-2")}]
            models: [llama, qwen]
            classes: [interactive, batch]
            requests_per_minute: 600
            tokens_per_minute: 200000
            streams: 20
          - name: umbrella
            keys: [{hashed("k-3")}]
            admin: true
        """,
    )
    tenants = Tenants(str(file), SECRET)
    acme = tenants.by_key(digest("k-1"))
    assert acme is tenants.by_key(digest("k-2")) is tenants.by_name("acme")
    assert acme == Tenant(
        name="acme",
        salt=cache_salt(SECRET, "acme"),
        models=frozenset({"llama", "qwen"}),
        classes=frozenset({"interactive", "batch"}),
        default_class="batch",
        limits=TenantLimits(requests_per_minute=600, tokens_per_minute=200_000, streams=20),
        admin=False,
    )
    umbrella = tenants.by_key(digest("k-3"))
    assert umbrella is not None and umbrella.admin and umbrella.may_use("anything")
    assert umbrella.classes == frozenset(CLASSES) - {"critical"} and umbrella.default_class == "default"
    assert umbrella.limits == TenantLimits()
    assert tenants.by_key(digest("k-4")) is None and tenants.by_name("nobody") is None


def test_tenants_file_may_be_json(file: Path) -> None:
    write(file, json.dumps({"tenants": [{"name": "acme", "keys": [hashed("k")]}]}))
    assert Tenants(str(file), SECRET).by_key(digest("k")) is not None


def test_tenant_has_its_own_salt_that_all_routers_compute(file: Path) -> None:
    write(
        file,
        """
        tenants:
          - name: a
          - name: b
          - {name: c, cache: both}
          - {name: d, cache: both}
          - {name: both}
        """,
    )
    salts = _salts(file)
    assert salts[2] == salts[3] and len(set(salts)) == 4
    assert salts == _salts(file)
    other = Tenants(str(file), b"another secret").by_name("a")
    assert other is not None and other.salt != salts[0]
    assert all(len(salt) == 32 for salt in salts)


def _salts(file: Path) -> list[str]:
    loaded = Tenants(str(file), SECRET)
    return [tenant.salt for name in ("a", "b", "c", "d", "both") if (tenant := loaded.by_name(name))]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tenants: [", "line 2: invalid YAML"),
        ("- name: acme", "Expected `object`, got `array`"),
        ("tenants: [{nane: acme}]", "unknown field `nane`"),
        ("tenants: [{name: 'a b'}]", "tenant 1: a name has at most 64"),
        ("tenants: [{name: a}, {name: a}]", "tenant 2 (a): another tenant has this name"),
        ("tenants: [{name: a, keys: [plain-text]}]", "tenant 1 (a), key 1: a file of tenants has keys as"),
        ("tenants: [{name: a, keys: ['sha256:00']}]", "key 1: expected 64 hexadecimal digits after sha256:"),
        (
            "tenants: [{name: a, keys: [%(k)s]}, {name: b, keys: [%(k)s]}]",
            "tenant 2 (b), key 1: the tenant a",
        ),
        ("tenants: [{name: a, classes: [urgent]}]", "Invalid enum value 'urgent'"),
        ('tenants: [{name: a, classes: ["batch\\n"]}]', "Invalid enum value"),
        ("tenants: [{name: a, classes: []}]", "classes is empty"),
        ("tenants: [{name: a, classes: [batch], default_class: default}]", "is none of its classes"),
        ("tenants: [{name: a, streams: 0}]", "Expected `int` >= 1"),
        ("tenants: [{name: a, admin: yes please}]", "Expected `bool`"),
        ("x: &a [*a]", "unknown field `x`"),
    ],
)
def test_invalid_tenants_file_prevents_the_start_with_the_place(file: Path, text: str, message: str) -> None:
    write(file, text % {"k": hashed("k")} if "%(" in text else text)
    with pytest.raises(SetupError) as caught:
        Tenants(str(file), SECRET)
    assert message in str(caught.value) and str(file) in str(caught.value)
    assert "plain-text" not in str(caught.value)


def test_missing_tenants_file_prevents_the_start(file: Path) -> None:
    with pytest.raises(SetupError, match="cannot be read: No such file"):
        Tenants(str(file), SECRET)


def test_changed_file_is_reread_and_an_invalid_one_is_ignored(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    caplog.set_level(logging.INFO)
    tenants = Tenants(write(file, f"tenants: [{{name: a, keys: [{hashed('k-1')}]}}]"), SECRET, clock)
    write(file, f"tenants: [{{name: a, keys: [{hashed('k-2')}]}}, {{name: b}}]")
    clock.now = LOOK_S / 2
    assert tenants.by_key(digest("k-1")) is not None  # not looked at yet
    clock.now = LOOK_S
    assert tenants.by_key(digest("k-1")) is None and tenants.by_key(digest("k-2")) is not None
    assert (len(tenants), tenants.reads, tenants.problem) == (2, 2, "")

    write(file, "tenants: [{name: a, keyz: []}]")
    clock.now = 2 * LOOK_S
    assert tenants.by_key(digest("k-2")) is not None
    assert (len(tenants), tenants.reads) == (2, 2) and "keyz" in tenants.problem
    assert "The tenants stay as they were." in caplog.text

    file.unlink()
    clock.now = 3 * LOOK_S
    assert tenants.by_name("b") is not None and "cannot be read" in tenants.problem

    write(file, "tenants: []")
    clock.now = 4 * LOOK_S
    assert tenants.by_key(digest("k-2")) is None and (len(tenants), tenants.problem) == (0, "")


@pytest.mark.parametrize(
    ("models", "classes", "left"),
    [
        (None, None, ({"m1", "m2"}, {"default", "batch"}, "default")),
        (["m2", "m3"], None, ({"m2"}, {"default", "batch"}, "default")),
        ([], None, (set(), {"default", "batch"}, "default")),
        (None, ["batch", "critical"], ({"m1", "m2"}, {"batch"}, "batch")),
        (None, ["critical"], ({"m1", "m2"}, set(), "default")),
    ],
)
def test_member_never_has_more_rights_than_its_tenant(
    models: list[str] | None, classes: list[str] | None, left: tuple[set[str], set[str], str]
) -> None:
    tenant = Tenant(models=frozenset({"m1", "m2"}), classes=frozenset({"default", "batch"}))
    member = tenant.narrowed(models, classes)
    assert (set(member.models or ()), set(member.classes), member.default_class) == left
    assert Tenant().narrowed(["m1"], None).models == frozenset({"m1"})


def test_example_is_a_valid_tenants_file() -> None:
    example = Path(__file__).parents[2] / "examples" / "tenants.yaml"
    tenants = Tenants(str(example), SECRET)
    names = ("acme", "umbrella-research", "umbrella-sales", "operations")
    acme, research, sales, operations = (tenants.by_name(name) for name in names)
    assert acme and research and sales and operations and len(tenants) == 4
    assert acme.limits.streams == 20 and acme.default_class == "interactive"
    assert research.salt == sales.salt != acme.salt
    assert operations.admin and "critical" in operations.classes


def test_limits_are_described_as_per_router() -> None:
    """Wherever tenants are configured: N routers give N times the quota."""
    root = Path(__file__).parents[2]
    message = RouterSettings.model_fields["tenants_file"].description or ""
    operator_text = Authentication.model_fields["tenants_secret_ref"].description or ""
    texts = [message, operator_text]
    texts += [(root / one).read_text() for one in ("docs/guides/tenants.md", "examples/tenants.yaml")]
    for text in texts:
        assert "router replica" in " ".join(text.split()).lower()


def one_tenant(file: Path, **limits: int) -> str:
    file.write_text(json.dumps({"tenants": [{"name": "a", "keys": [hashed("k")], **limits}]}))
    return str(file)


async def test_limits_of_two_routers_are_twice_those_of_one(file: Path) -> None:
    """The documented behavior of replicas is correct."""
    tenants = one_tenant(file, requests_per_minute=2)
    key = {"authorization": "Bearer k"}
    async with (
        FakeWorker() as worker,
        running_router([worker], tenants_file=tenants) as one,
        running_router([worker], tenants_file=tenants) as two,
    ):
        answers = [
            (await router.client.post(CHAT, json=QUESTION, headers=key)).status_code
            for router in (one, two)
            for _ in range(3)
        ]
        assert answers == [200, 200, 429] * 2
