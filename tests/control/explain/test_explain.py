"""Findings for given summaries, and their properties for any."""

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx_api.cache_curve import NO_TIERS, CacheCurve, TierCurve
from phalanx_api.crd import definition
from phalanx_api.explain.capacity_limits import MAX_SEQS
from phalanx_api.explain.explain import MAX_FINDINGS, explain
from phalanx_api.explain.findings import LIMIT_CAUSES, Explanation, Unit, number, order
from phalanx_api.explain.fleet_limits import MAX_ROUTERS
from phalanx_api.explain.step_limits import MAX_TENSOR
from phalanx_api.spec.inference_service import Spec
from phalanx_api.speculation import SpeculationCounts
from phalanx_api.status import Status
from phalanx_api.summary import LATENCY_BOUNDS_S, GroupSummary, Histogram, Hotspot, RouterSummary, Traffic, bucket_index
from phalanx_api.wire.leader import DevicePower, TenantUse
from phalanx_kubectl import show
from tests.control.summaries import group, summary
from tests.examples import examples

ROOT = Path(__file__).resolve().parents[3]

TARGETS = {"ttftP95Ms": 2000, "itlP95Ms": 100}
MODEL = [0.003, 0.00012, 142.0, 0.068e-6, 0.0]


def make_spec(**fields: Any) -> Spec:
    return Spec.model_validate({"model": {"uri": "hf://org/model"}} | fields)


def scaled(parallelism: dict[str, Any] | None = None, **fields: Any) -> Spec:
    scaling = {"minReplicas": 1, "maxReplicas": 8, "targets": TARGETS} | fields
    return make_spec(autoscaling=scaling, parallelism=parallelism or {})


def latencies(seconds: float) -> Histogram:
    counts = [0] * (len(LATENCY_BOUNDS_S) + 1)
    counts[bucket_index(seconds)] = 100
    return Histogram(counts)


def busy(name: str = "a", **fields: Any) -> GroupSummary:
    defaults = {"running": 8, "device_busy": 0.9, "max_num_seqs": 64, "live_tokens": 3200, "step_model": MODEL, "itl_s": 0.02}
    return group(name, **defaults | fields)


def arrivals(rate: float, prompt: float = 100.0, output: float = 200.0) -> list[Traffic]:
    count = round(rate * 60)
    means = {"prompt": prompt, "prompt_squared": prompt**2, "missed": prompt, "output": output}
    return [Traffic(window_s=60, arrivals=count, output_tokens=count * output, **means)]


def straggler(name: str, signal: float) -> list[Hotspot]:
    return [Hotspot(group=name, cause="straggler", signal=signal, median=1.0, since_s=40.0, action="weigh")]


def explained(*groups: GroupSummary, spec: Spec | None = None, status: Status | None = None, **fields: Any) -> Explanation:
    defaults: dict[str, Any] = {"traffic": arrivals(4.0), "itl": latencies(0.02), "ttft": latencies(0.2)}
    return explain([summary(*groups, **defaults | fields)], spec or make_spec(), status or Status())


def causes(explanation: Explanation) -> list[str]:
    return [finding.cause for finding in explanation.findings]


def advice(explanation: Explanation) -> tuple[str, str]:
    return explanation.findings[0].advice.field, explanation.findings[0].advice.value


def test_service_within_its_targets_has_no_limit() -> None:
    explanation = explained(busy(), spec=scaled())
    assert explanation.findings == []
    assert explanation.state.startswith("nothing limits this service: 1 group 90% busy with 4 requests/s")
    assert "ITL P95" in explanation.state and "of 100 ms" in explanation.state


def test_page_shows_this_answer() -> None:
    full, slow = busy("chat-g-4k2xq", pressure=1.2, preemptions=31), busy("chat-g-9vd7m", pressure=1.1)
    load: dict[str, Any] = {
        "traffic": arrivals(8.0, prompt=1000),
        "queued": 40,
        "wait": latencies(0.41),
        "hotspots": straggler("chat-g-9vd7m", 1.6),
    }
    answer = show.explanation(explained(full, slow, spec=scaled(minReplicas=2), **load))
    assert f"```\n{answer}```\n" in (ROOT / "docs/explain.md").read_text()


@pytest.mark.parametrize(
    ("summaries", "state"),
    [
        ([], "no router answers, so nothing is known"),
        ([summary(held=3, queued=3)], "no group serves; 3 requests wait"),
        ([summary(group(running=0))], "nothing limits this service: no request arrived at 1 group in the last minute"),
    ],
)
def test_state_without_load(summaries: list[RouterSummary], state: str) -> None:
    assert explain(summaries, make_spec(), Status()) == Explanation(findings=[], state=state)


def test_missed_target_of_a_small_batch_needs_more_ranks() -> None:
    explanation = explained(busy(), busy("b"), spec=scaled(targets={"itlP95Ms": 15}))
    assert causes(explanation) == ["weights"] and advice(explanation) == ("spec.parallelism.tensor", "2")


def test_removable_group_is_named_with_the_target() -> None:
    explanation = explained(busy(), busy("b"), spec=scaled(minReplicas=2))
    assert causes(explanation) == ["weights"] and advice(explanation) == ("spec.autoscaling.minReplicas", "1")
    assert "one group fewer would hold the ITL target of 100 ms" in explanation.findings[0].sentence


def test_autoscaler_that_may_remove_groups_gets_no_advice() -> None:
    idle = [busy(name, device_busy=0.05) for name in "abcd"]
    assert causes(explained(*idle, traffic=arrivals(0.2))) == ["surplus"]
    assert causes(explained(*idle, traffic=arrivals(0.2), spec=scaled())) == []


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("auto", ("spec.engine.kvCacheDtype", "int8")),
        ("int8", ("spec.engine.kvCacheDtype", "int4")),
        ("int4", ("spec.replicas", "2")),
    ],
)
@pytest.mark.parametrize("load", [{"pressure": 1.2}, {"step_model": [0.003, 0.00012, 142.0, 5e-6, 0.0]}], ids=["kv", "attention"])
def test_full_pages_and_long_contexts_table(load: dict[str, Any], dtype: str, expected: tuple[str, str]) -> None:
    spec = make_spec(engine={"kvCacheDtype": dtype})
    queued = 5 if "pressure" in load else 0
    explanation = explained(busy(**load), spec=spec, traffic=arrivals(4.0, prompt=1000), queued=queued)
    assert causes(explanation)[0] == ("kv" if queued else "attention") and advice(explanation) == expected


@pytest.mark.parametrize(("pressure", "times", "memory"), [(1.2, 2, "64Mi"), (1.9, 3, "96Mi"), (99.0, 8, "256Mi")])
def test_full_pages_of_a_set_size_need_more_memory(pressure: float, times: int, memory: str) -> None:
    spec = make_spec(engine={"kvCacheMemory": "32Mi"})
    explanation = explained(busy(pressure=pressure), spec=spec, traffic=arrivals(4.0, prompt=1000), queued=1)
    assert causes(explanation)[0] == "kv" and advice(explanation) == ("spec.engine.kvCacheMemory", memory)
    assert f"{memory} would hold {times} times the tokens of 32Mi" in explanation.findings[0].sentence
    assert explanation.findings[0].sentence.startswith("1 request waits because")


def test_ready_groups_without_a_report_are_counted() -> None:
    assert explained(busy(), status=Status(ready_replicas=2)).state.startswith("1 of 2 ready groups ")


@pytest.mark.parametrize(
    ("reason", "is_named"),
    [("InsufficientCapacity", True), ("ImagePullFailed", True), ("ScaledToZero", False), ("Suspended", False)],
)
def test_groups_that_do_not_start_come_first(reason: str, is_named: bool) -> None:
    ready = {"type": "Ready", "status": "False", "reason": reason, "message": "pod b-0: 0/2 nodes match"}
    ready["lastTransitionTime"] = "2026-01-01T00:00:00Z"
    status = Status.model_validate({"replicas": 2, "readyReplicas": 1, "conditions": [ready]})
    first, _, rest = explained(busy(), status=status).state.partition("\n")
    assert (first == f"1 of 2 groups ready, {reason}: pod b-0: 0/2 nodes match") == is_named == bool(rest)


@pytest.mark.parametrize(
    ("nodes", "advised"),
    [
        (["n7", "n1"], "Run `kubectl phalanx drain chat chat-g-b` and set spec.placement.affinity to a rule that avoids n7: ITL"),
        (["n1"], "Run `kubectl phalanx drain chat chat-g-b`: ITL"),
    ],
)
def test_straggler_is_named_with_its_own_nodes(nodes: list[str], advised: str) -> None:
    rows = [{"name": "chat-g-b", "phase": "Ready", "nodes": nodes}, {"name": "a", "phase": "Ready", "nodes": ["n1"]}]
    status = Status.model_validate({"groups": rows})
    groups = [busy("a"), busy("chat-g-b"), busy("c")]
    first = explained(*groups, status=status, hotspots=straggler("chat-g-b", 4.4)).findings[0]
    assert (first.cause, first.group) == ("straggler", "chat-g-b")
    assert "take 4.4 times as long as usual, for 40 s" in first.text and advised in first.text
    off = explained(*groups, spec=make_spec(rebalancing={"mode": "Off"}), hotspots=straggler("a", 1.9))
    assert advice(off) == ("spec.rebalancing.mode", "Migrate")


def test_momentary_slowness_makes_no_straggler() -> None:
    assert "straggler" not in causes(explained(busy("a"), busy("b", speed=2.1)))
    assert "straggler" not in causes(explained(busy("a"), busy("b"), hotspots=straggler("b", 1.1)))


def test_held_requests_wait_for_a_cold_start() -> None:
    spec = scaled(minReplicas=0, scaleToZero={"enabled": True})
    status = Status.model_validate({"autoscaling": {"coldStartSeconds": 90}})
    first = explained(spec=spec, status=status, held=4, queued=4).findings[0]
    assert first.sentence == "4 requests wait for a group to start, which takes 90 s, because the service scales to zero"
    assert first.effect is None, "no group has measured its steps"


@pytest.mark.parametrize(("queued", "is_named"), [(129, True), (2, False)])
def test_full_group_with_a_place_free_at_the_moment(queued: int, is_named: bool) -> None:
    """A request has just ended: three of four run, and the others wait at the router."""
    explanation = explained(busy(running=3, max_num_seqs=4, pressure=0.02), traffic=arrivals(10.0), queued=queued)
    assert ("queue" in causes(explanation)) == is_named


@pytest.mark.parametrize("traffic", [[], arrivals(4.0, output=0.0)], ids=["no arrivals", "embeddings"])
@pytest.mark.parametrize(("load", "cause"), [({"pressure": 1.2}, "kv"), ({"running": 4, "max_num_seqs": 4}, "queue")])
def test_waiting_requests_without_output_are_explained(load: dict[str, Any], cause: str, traffic: list[Traffic]) -> None:
    explanation = explained(busy(**load), traffic=traffic, queued=5)
    assert causes(explanation) == [cause] and explanation.findings[0].effect is None


@pytest.mark.parametrize("traffic", [[], arrivals(4.0)], ids=["no arrivals", "arrivals"])
def test_requests_that_wait_are_never_called_unlimited(traffic: list[Traffic]) -> None:
    explanation = explained(busy(), traffic=traffic, queued=5)
    assert explanation.findings == [] and explanation.state.startswith("why requests wait is not known: ")


@pytest.mark.parametrize("device_busy", [0.05, 0.9], ids=["surplus", "weights"])
@pytest.mark.parametrize(
    "load", [{"ttft": latencies(5.0)}, {"itl": latencies(0.3)}, {"queued": 2}], ids=["ttft", "itl", "waiting"]
)
def test_groups_are_kept_while_a_target_is_missed(load: dict[str, Any], device_busy: float) -> None:
    spec, groups = make_spec(slo=TARGETS), [busy(name, device_busy=device_busy) for name in "abcd"]
    assert advice(explained(*groups, spec=spec, traffic=arrivals(0.2)))[0] == "spec.replicas"
    kept = explained(*groups, spec=spec, traffic=arrivals(0.2), **load)
    assert all(finding.advice.field != "spec.replicas" for finding in kept.findings)


@pytest.mark.parametrize(
    ("tiers", "rates", "memory"),
    [
        (NO_TIERS, (0.3, 0.5), "5Gi"),
        (TierCurve(1000, [0.4, 0.5, 0.7, 0.8], 0.5), (0.5, 0.7), "10Gi"),
        (TierCurve(1000, [0.4, 0.5, 0.7, 0.8], 0.5, 0.55), (0.55, 0.7), "10Gi"),
    ],
    ids=["device", "host", "disk"],
)
def test_larger_host_tier_is_measured_from_the_present_tiers(tiers: TierCurve, rates: tuple[float, float], memory: str) -> None:
    """Pages of 10 MiB over both ranks."""
    full = busy(total_pages=1000, page_bytes=10 << 20, cache_curve=CacheCurve(900, [0.2, 0.3, 0.5, 0.6], tiers))
    spec = make_spec(parallelism={"tensor": 2})
    explanation = explained(full, spec=spec, traffic=arrivals(4.0, prompt=2000))
    (found,) = (finding for finding in explanation.findings if finding.cause == "prefix")
    assert found.effect is not None and (found.effect.before, found.effect.after) == rates
    assert (found.advice.field, found.advice.value) == ("spec.engine.hostCacheMemory", memory)


def test_disk_that_already_has_the_pages_is_enough() -> None:
    tiers = TierCurve(1000, [0.4, 0.5, 0.7, 0.8], 0.5, 0.65)
    full = busy(total_pages=1000, page_bytes=10 << 20, cache_curve=CacheCurve(900, [0.2, 0.3, 0.5, 0.6], tiers))
    assert "prefix" not in causes(explained(full, traffic=arrivals(4.0, prompt=2000)))


def test_advice_ends_at_the_limits_of_the_spec() -> None:
    seqs = explained(busy(running=MAX_SEQS, max_num_seqs=MAX_SEQS), queued=5)
    assert causes(seqs) == ["queue"] and advice(seqs) == ("spec.replicas", "2")
    tokens = explained(busy(running=64, max_num_batched_tokens=100), queued=5)
    assert advice(tokens) == ("spec.engine.maxNumSeqs", "100")
    routers = [summary(busy(), traffic=arrivals(0.1), itl=latencies(0.02), cpu_share=0.9)] * MAX_ROUTERS
    assert causes(explain(routers, scaled(), Status())) == []
    tensor = explained(busy(), spec=scaled(targets={"itlP95Ms": 15}, parallelism={"tensor": MAX_TENSOR}))
    assert causes(tensor) == []


@pytest.mark.parametrize(
    ("path", "limit"),
    [("engine.maxNumSeqs", MAX_SEQS), ("router.replicas", MAX_ROUTERS), ("parallelism.tensor", MAX_TENSOR)],
)
def test_limits_are_those_of_the_crd(path: str, limit: int) -> None:
    assert field_of(f"spec.{path}")["maximum"] == limit


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0, "s", "0 ms"),
        (0.0123, "s", "12.3 ms"),
        (0.9994, "s", "999 ms"),
        (0.9999, "s", "1 s"),
        (1234.0, "s", "1,234 s"),
        (0.07, "requests/s", "0.07 requests/s"),
        (123.0, "requests/s", "123 requests/s"),
        (250.0, "x", "250x"),
        (1.25, "x", "1.2x"),
    ],
)
def test_numbers_have_no_exponent(value: float, unit: Unit, text: str) -> None:
    assert number(value, unit) == text


@pytest.mark.parametrize("running", [0, 8])
def test_slow_speculation_is_named_between_requests_too(running: int) -> None:
    counts = SpeculationCounts(paths=50, drafted=[200], accepted=[10])
    found = causes(explained(busy(running=running, speedup=0.7, speculation=counts), spec=scaled()))
    assert found == ["speculation"]


def test_draining_and_silent_groups_are_ignored() -> None:
    slow = [busy("b", speed=3.0, draining=True), busy("c", speed=3.0, state="dead")]
    assert causes(explained(busy(), *slow, spec=scaled())) == []


def test_routers_share_the_groups() -> None:
    one = summary(busy(), traffic=arrivals(2.0), itl=latencies(0.02), cpu_share=0.9)
    explanation = explain([one, one], scaled(), Status())
    assert causes(explanation) == ["router_cpu"] and advice(explanation) == ("spec.router.replicas", "4")
    assert explanation.state.startswith("1 group ") and "with 4 requests/s" in explanation.state


NUMBERS = st.one_of(
    st.floats(0, 1), st.floats(0, 1e4), st.sampled_from([math.nan, math.inf, -math.inf, -1.0, 0.0, 1e-300, 1e300])
)
COUNTS = st.one_of(st.integers(0, 300), st.sampled_from([-1, 0, 10**30]))
NAMES = st.sampled_from(["a", "b", "c", ""])
HISTOGRAMS = st.one_of(
    st.just(Histogram()),
    st.lists(st.integers(0, 9), max_size=70).map(Histogram),
    st.floats(1e-4, 2000).map(latencies),
)


def records(kind: type[Any], **special: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Returns records with any numbers in their fields."""
    fields: dict[str, st.SearchStrategy[Any]] = {}
    for field in msgspec.structs.fields(kind):
        if field.type in (int, float):
            fields[field.name] = COUNTS if field.type is int else NUMBERS
    return st.builds(kind, **fields | special)


GROUPS = records(
    GroupSummary,
    group=NAMES,
    revision=st.just("r"),
    state=st.sampled_from(["fresh", "degraded", "suspect", "dead"]),
    draining=st.booleans(),
    step_model=st.one_of(st.just(MODEL), st.lists(NUMBERS, max_size=9)),
    cache_curve=st.builds(CacheCurve, COUNTS, st.lists(NUMBERS, max_size=4)),
    speculation=st.builds(SpeculationCounts, paths=COUNTS, drafted=st.lists(COUNTS, max_size=3), draft_s=NUMBERS),
)
SUMMARIES = records(
    RouterSummary,
    router=NAMES,
    groups=st.lists(GROUPS, max_size=4),
    traffic=st.lists(records(Traffic, window_s=st.sampled_from([6.0, 60.0])), max_size=3),
    ttft=HISTOGRAMS,
    itl=HISTOGRAMS,
    wait=HISTOGRAMS,
)
SPECS = st.sampled_from(
    [
        make_spec(),
        scaled(),
        scaled(minReplicas=0, scaleToZero={"enabled": True}),
        scaled(minReplicas=3, maxReplicas=3, targets={"itlP95Ms": 1}),
        make_spec(engine={"kvCacheDtype": "int4"}, rebalancing={"mode": "Off"}),
    ]
)
STATUSES = st.sampled_from([Status(), Status.model_validate({"autoscaling": {"coldStartSeconds": 60}})])


def field_of(path: str) -> dict[str, Any]:
    """Returns the schema of a field of the CRD; empty if there is none."""
    node: dict[str, Any] = definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for name in path.split("."):
        node = node.get("properties", {}).get(name, {})
    return node


def has_field(path: str) -> bool:
    """Returns whether the CRD's spec has this field."""
    return bool(field_of(path))


@settings(max_examples=examples(80), deadline=None)
@given(st.lists(SUMMARIES, max_size=3), SPECS, STATUSES)
def test_any_record_gives_ordered_findings_about_spec_fields(summaries: list[RouterSummary], spec: Spec, status: Status) -> None:
    explanation = explain(summaries, spec, status)
    findings = explanation.findings
    assert findings == order(findings) and len(findings) <= MAX_FINDINGS
    assert explanation.state
    for finding in findings:
        assert (has_field(finding.advice.field) or finding.advice.command) and finding.cause in LIMIT_CAUSES
        assert 0 <= finding.severity <= 1 and "\n" not in finding.text
        numbers = [evidence.value for evidence in finding.evidence]
        numbers += [finding.effect.before, finding.effect.after] if finding.effect else []
        assert all(map(math.isfinite, numbers)), finding.text
    msgspec.json.decode(msgspec.json.encode(explanation), type=Explanation)


def test_field_that_the_spec_lacks_is_noticed() -> None:
    assert has_field("spec.engine.maxNumSeqs") and not has_field("spec.engine.maxNumSequences")


def test_output_has_its_cost_and_the_shares_of_tenants() -> None:
    uses = (
        [TenantUse("alice", 30.0, 1, 1), TenantUse("", 10.0, 1, 1)],
        [TenantUse("alice", 20.0, 1, 1), TenantUse("bob", 40.0, 1, 1)],
    )
    groups = [busy(name, tenants=tenants) for name, tenants in zip("ab", uses, strict=True)]
    found = explained(*groups, spec=make_spec(parallelism={"tensor": 4}), traffic=arrivals(4.0, output=200.0))
    assert found.cost == (
        "8 devices for 800 tokens/s of output: 10 s of device time per 1,000 tokens, 9 s of it in use; "
        "since the start of the groups alice 50%, bob 40%, requests without a tenant 10%"
    )
    assert f"{found.cost}.\n" in show.explanation(found)
    assert explained(busy("a"), traffic=arrivals(4.0)).cost.endswith("of it in use"), "no tenant is named"
    assert explained(busy("a"), traffic=[]).cost == ""


def test_tenants_and_revisions_have_their_cost_and_energy() -> None:
    power = DevicePower(400.0, 100.0)
    old = [TenantUse("alice", 30.0, 1, 10_000, 60_000.0), TenantUse("bob", 10.0, 1, 5_000, 20_000.0)]
    new = [TenantUse("alice", 20.0, 1, 20_000, 40_000.0), TenantUse("carol", 0.0, 1, 0, 0.0)]
    groups = busy(revision="r1", tenants=old, power=power), busy("b", revision="r2", tenants=new, power=power)
    found = explained(*groups, spec=make_spec(parallelism={"tensor": 2}), traffic=arrivals(4.0))
    assert found.cost.endswith(
        "; since the start of the groups alice 83%, bob 17%, carol 0%; by 1,000 tokens revision r1 5.33 s, revision r2 2 s"
    )
    assert found.energy.endswith(
        "; since the start of the groups, for each token, alice 3.3 J, bob 4 J; revision r1 5.3 J, revision r2 2 J"
    )
    uncounted = busy(tenants=[TenantUse("alice", 1.0, 1, 5, 9.0), TenantUse("bob", 1.0, 1, 5)], power=power)
    assert "since" not in explained(uncounted, traffic=arrivals(4.0)).energy, "a device of bob's group does not count"


def test_energy_names_what_would_lower_it() -> None:
    power = DevicePower(400.0, 100.0)
    found = explained(busy(power=power), busy("b", power=power), traffic=arrivals(4.0))
    assert found.energy.startswith("800 W, 1 J per token, 2% of it without work; more requests per step would lower it: ")
    assert f"{found.energy}.\n" in show.explanation(found)
    idle = [busy(name, device_busy=0.05, power=DevicePower(115.0, 100.0)) for name in "abcd"]
    found = explained(*idle, traffic=arrivals(0.2))
    assert causes(found) == ["surplus"] and advice(found) == ("spec.replicas", "1")
    assert found.energy.startswith("460 W, 12 J per token, 83% of it without work; 1 group instead of 4 would use "), found.energy
    after_j = float(found.energy.rsplit(" ", 2)[1])
    assert 100 / 40 < after_j < 400 / 40, "between one group without work and one with all of it"
    assert f"```\n{found.energy}.\n```\n" in (ROOT / "docs/explain.md").read_text(), found.energy


@pytest.mark.parametrize(
    "groups",
    [
        [busy()],
        [busy(power=DevicePower(400.0, 100.0)), busy("b")],
        [],
    ],
    ids=["no report", "one of two reports", "no group"],
)
def test_energy_is_unknown_without_the_power_of_all(groups: list[GroupSummary]) -> None:
    assert explained(*groups).energy == ""


def test_costs_and_effects_have_one_rate_of_output() -> None:
    found = explained(busy(pressure=1.2), queued=5, traffic=arrivals(4.0, output=200.0))
    (effect,) = [finding.effect for finding in found.findings if finding.effect and finding.effect.metric == "output"]
    assert f" for {number(effect.before, 'tokens/s')} of output" in found.cost
