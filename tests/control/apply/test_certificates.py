"""Certificates of `spec.security.tls: Internal`: issued once, renewed in time, and always trusted by every other pod."""

import base64
import datetime
from dataclasses import dataclass

import pytest
from cryptography import x509

from phalanx_api import labels
from phalanx_operator.apply import issuing
from phalanx_operator.apply.certificates import CHECK_S, ServiceCertificates
from phalanx_operator.kube.client import SECRETS, Json, Rejected, Retry
from tests.certificates import Authority
from tests.control.builders import make_service
from tests.control.fake_kube import FakeKube
from tests.control.worlds import World

START = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
HOUR = datetime.timedelta(hours=1)
INTERNAL = {"security": {"tls": "Internal"}}
NAMES = {"chat-authority", "chat-router-tls", "chat-group-tls", "chat-metrics-tls"}
SERVICE = make_service(**INTERNAL)


def file(secret: Json, name: str) -> bytes:
    return base64.b64decode(secret["data"][name])


def leaf(secret: Json) -> x509.Certificate:
    return x509.load_pem_x509_certificates(file(secret, "tls.crt"))[0]


@dataclass
class Operator:
    """Keeps the certificates of one service at a time that the test sets."""

    kube: FakeKube
    now: datetime.datetime = START

    def __post_init__(self) -> None:
        self.certificates = ServiceCertificates(self.kube, lambda: (self.now - START).total_seconds())

    async def keep(self) -> dict[str, Json]:
        await self.certificates.keep(SERVICE, self.now)
        return {name: body for name, body in self.kube.of_kind(SECRETS).items() if name in NAMES}


def trusts(holder: Json, other: Json, now: datetime.datetime) -> bool:
    """Whether a pod with the Secret `holder` accepts the certificate of `other`."""
    authorities = x509.load_pem_x509_certificates(file(holder, "ca.crt"))
    certificate = leaf(other)
    pairs = [authority for authority in authorities if authority.not_valid_before_utc <= now < authority.not_valid_after_utc]
    is_valid = certificate.not_valid_before_utc <= now < certificate.not_valid_after_utc
    for authority in pairs:
        try:
            certificate.verify_directly_issued_by(authority)
            return is_valid
        except Exception:
            continue
    return False


async def test_pods_trust_one_another_through_all_renewals() -> None:
    """Also while one of them has the Secret of the step before, as a kubelet that is slow."""
    operator, slow = Operator(FakeKube()), dict[str, Json]()
    leaves, authorities, fine = set[int](), set[int](), 0
    while operator.now < START + 2 * issuing.AUTHORITY_LIFETIME:
        secrets = await operator.keep()
        group, router = secrets["chat-group-tls"], secrets["chat-router-tls"]
        for holder, other in ((group, slow.get("chat-router-tls", router)), (slow.get("chat-group-tls", group), router)):
            assert trusts(holder, other, operator.now), operator.now
        known = {each.serial_number for each in authorities_of(secrets)}
        fine = 8 if known - authorities else fine - 1
        slow, leaves, authorities = secrets, leaves | {leaf(group).serial_number}, authorities | known
        operator.now += datetime.timedelta(minutes=5) if fine > 0 else 8 * HOUR
    assert len(authorities) == 4 and len(leaves) > 30


def authorities_of(secrets: dict[str, Json]) -> list[x509.Certificate]:
    return x509.load_pem_x509_certificates(file(secrets["chat-authority"], "ca.crt"))


async def test_new_authority_is_trusted_before_it_signs() -> None:
    operator = Operator(FakeKube())
    first = await operator.keep()
    (old,) = authorities_of(first)
    operator.now = START + 0.7 * issuing.AUTHORITY_LIFETIME
    second = await operator.keep()
    new, kept = authorities_of(second)
    assert kept == old and new != old
    leaf(second["chat-group-tls"]).verify_directly_issued_by(old)
    operator.now += issuing.LIFETIME
    third = await operator.keep()
    leaf(third["chat-group-tls"]).verify_directly_issued_by(new)
    assert file(third["chat-router-tls"], "ca.crt").count(b"BEGIN CERTIFICATE") == 2
    operator.now = START + issuing.AUTHORITY_LIFETIME + HOUR
    assert authorities_of(await operator.keep()) == [new]


@pytest.mark.parametrize("written", range(4))
async def test_authority_of_a_stopped_operator_signs_for_no_stranger(written: int) -> None:
    """It stops after some of its writes. The next one finds certificates that are due, and kubelets are slow."""
    kube = FakeKube()
    first = Operator(kube)
    await first.keep()
    first.now = START + 0.6 * issuing.AUTHORITY_LIFETIME
    order = ["chat-router-tls", "chat-group-tls", "chat-metrics-tls", "chat-authority"]
    kube.failures[f"apply secrets {order[written]}"] = Retry("the operator stops")
    with pytest.raises(Retry):
        await first.keep()
    mounted = {name: body for name, body in kube.of_kind(SECRETS).items() if name in NAMES}
    for wait in (2 * issuing.SPREAD, issuing.LIFETIME * 0.6):
        second = Operator(kube, first.now + wait)
        secrets = await second.keep()
        for holder in (mounted["chat-group-tls"], secrets["chat-group-tls"]):
            assert trusts(holder, secrets["chat-router-tls"], second.now), wait
        mounted = secrets


async def test_each_role_has_its_name_and_no_authority() -> None:
    secrets = await Operator(FakeKube()).keep()
    for role in ("router", "group", "metrics"):
        secret = secrets[f"chat-{role}-tls"]
        names = leaf(secret).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert names.get_values_for_type(x509.DNSName) == [f"{role}.chat.team.phalanx.internal"]
        assert set(secret["data"]) == {"tls.crt", "tls.key", "ca.crt"} and secret["type"] == "kubernetes.io/tls"
        assert secret["metadata"]["ownerReferences"][0]["uid"] == SERVICE.uid
        limits = leaf(secret).extensions.get_extension_for_class(x509.BasicConstraints)
        assert limits.critical and not limits.value.ca


async def test_another_operator_keeps_valid_certificates() -> None:
    kube = FakeKube()
    first = await Operator(kube).keep()
    assert await Operator(kube, START + HOUR).keep() == first


@pytest.mark.parametrize("name", sorted(NAMES))
@pytest.mark.parametrize("damage", ["deleted", "blank", "cut"])
async def test_damaged_secret_is_repaired(name: str, damage: str) -> None:
    kube = FakeKube()
    secrets = await Operator(kube).keep()
    if damage == "deleted":
        del kube.objects["secrets", "team", name]
    else:
        data = {key: text[:40] for key, text in secrets[name]["data"].items()} if damage == "cut" else {}
        kube.put(SECRETS, secrets[name] | {"data": data})
    operator = Operator(kube, START + HOUR)
    repaired = await operator.keep()
    leaves = [repaired[each] for each in sorted(NAMES - {"chat-authority"})]
    assert all(trusts(holder, other, operator.now) for holder in leaves for other in leaves)


async def test_secret_of_another_owner_is_left_alone() -> None:
    kube = FakeKube()
    body: Json = {"metadata": {"name": "chat-group-tls", "namespace": "team", "ownerReferences": []}, "data": {"a": "Yg=="}}
    kube.put(SECRETS, body)
    with pytest.raises(Rejected, match="Secret chat-group-tls exists and the operator does not own it"):
        await Operator(kube).keep()
    assert kube.of_kind(SECRETS)["chat-group-tls"]["data"] == {"a": "Yg=="}
    former = {"name": "chat", "uid": "former", "controller": True}
    kube.put(SECRETS, body | {"metadata": body["metadata"] | {"ownerReferences": [former]}})
    with pytest.raises(Retry, match="still being deleted"):
        await Operator(kube).keep()


def test_pairs_of_unreadable_files_are_nothing() -> None:
    pair = Authority().pairs[0]
    assert [each.certificate for each in issuing.read_pairs(pair.pem.encode(), pair.key_pem.encode())] == [pair.certificate]
    for certificates, keys in [(b"", b""), (b"?", b"?"), (pair.pem.encode(), b""), (pair.pem.encode(), b"-----BEGIN\n-----END")]:
        assert issuing.read_pairs(certificates, keys) == []


async def test_services_without_the_field_have_no_certificates() -> None:
    world = World()
    await world.settle()
    assert not NAMES & set(world.kube.of_kind(SECRETS))


async def test_certificates_are_kept_while_the_spec_is_invalid() -> None:
    world = World(security={"tls": "Internal"})
    await world.settle()
    await world.change(**INTERNAL, parallelism={"tensor": 4, "gpusPerPod": 3})
    del world.kube.objects["secrets", "team", "chat-router-tls"]
    world.clock += CHECK_S
    await world.reconcile()
    assert world.ready == ("False", "SpecInvalid") and "chat-router-tls" in world.kube.of_kind(SECRETS)


async def test_invalid_service_without_certificates_gets_none() -> None:
    world = World(parallelism={"tensor": 4, "gpusPerPod": 3})
    await world.settle()
    assert world.ready == ("False", "SpecInvalid") and not NAMES & set(world.kube.of_kind(SECRETS))


async def turned_off() -> World:
    """A service with the field for a moment, whose user has deleted the Secrets since."""
    world = World()
    world.cluster.start_router_pods()
    await world.settle()
    await world.change(**INTERNAL)
    await world.reconcile()
    await world.change(security={})
    await world.reconcile()
    for name in NAMES:
        del world.kube.objects["secrets", "team", name]
    return world


async def test_invalid_service_turned_off_gets_no_new_secrets() -> None:
    world = await turned_off()
    await world.change(parallelism={"tensor": 4, "gpusPerPod": 3})
    world.clock += CHECK_S
    await world.reconcile()
    assert world.ready == ("False", "SpecInvalid") and not NAMES & set(world.kube.of_kind(SECRETS))


async def test_secrets_deleted_while_off_are_issued_again() -> None:
    world = await turned_off()
    await world.change(**INTERNAL)
    await world.reconcile()
    assert set(world.kube.of_kind(SECRETS)) >= NAMES


async def test_renewal_ends_once_the_authority_is_deleted() -> None:
    operator = Operator(FakeKube())
    await operator.keep()
    for name in NAMES:
        del operator.kube.objects["secrets", "team", name]
    operator.now += datetime.timedelta(seconds=CHECK_S)
    await operator.certificates.renew(SERVICE, operator.now)
    assert not operator.kube.of_kind(SECRETS)


async def test_users_own_authority_stops_no_invalid_service() -> None:
    operator = Operator(FakeKube())
    operator.kube.put(SECRETS, {"metadata": {"name": "chat-authority", "namespace": "team", "ownerReferences": []}, "data": {}})
    await operator.certificates.renew(SERVICE, operator.now)
    assert set(operator.kube.of_kind(SECRETS)) == {"chat-authority"}


async def test_groups_are_replaced_after_routers_have_certificates() -> None:
    world = World()
    world.cluster.start_router_pods()
    await world.settle()
    former = world.groups
    await world.change(**INTERNAL)
    for _ in range(4):
        world.cluster.start_pods()
        world.cluster.start_routers()
        await world.reconcile()
    assert set(world.kube.of_kind(SECRETS)) >= NAMES
    assert world.groups == former and not world.draining(), "the router without a certificate could not reach a successor"
    world.cluster.start_router_pods(1, {labels.INTERNAL_TLS: "true"})
    await world.settle()
    assert set(world.draining()) == former
    assert [target.peer_name for target in world.routers.targets] == ["router.chat.team.phalanx.internal"]
    assert world.routers.targets[0].address.endswith(":8443")
