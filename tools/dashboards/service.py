"""Dashboard of one service: latency, queue, cache, speculation, moves and scaling."""

from tools.dashboards.records import (
    NAMESPACE,
    RATE,
    SERVICE,
    SERVICES,
    STATUS,
    Annotation,
    Dashboard,
    Panel,
    Query,
    Row,
    quantile,
    rate,
    ratio,
)


def _percentiles(histogram: str) -> tuple[Query, ...]:
    return tuple(Query(quantile(share, histogram, SERVICES), f"p{share * 100:.0f}") for share in (0.5, 0.95, 0.99))


_LATENCY_ROW = Row(
    "Latency",
    (
        Panel(
            "Time to first token",
            "From the arrival of a request at the router to its first token.",
            "p95 below the target of your service, and p99 below three times p50. If the wait below grows "
            "with it, groups are missing; else prompts are long or cold.",
            "s",
            _percentiles("phalanx_router_time_to_first_token_seconds"),
        ),
        Panel(
            "Inter-token latency",
            "Time between two tokens as the router receives them.",
            "p95 below the target of your service. Peaks with prefill mean a token budget per step that is "
            "too large; peaks at moves show as stalls below.",
            "s",
            _percentiles("phalanx_router_inter_token_latency_seconds"),
        ),
        Panel(
            "Step time by group",
            "Time of a step of each group, about that between two tokens of a stream, as routers know it.",
            "equal in all groups at equal load. One slower group is a straggler: drain it, and look at its devices in "
            "the dashboard Engine.",
            "s",
            (Query(f"max by (group) (phalanx_router_group_step_seconds{{{SERVICES}}} > 0)", "{{group}}"),),
        ),
        Panel(
            "Requests by outcome",
            "Ended requests per second.",
            "almost all `finished`; `cancelled` are clients that disconnected, `failed` are errors of the service.",
            "reqps",
            (Query(rate("phalanx_router_requests_total", SERVICES, "outcome"), "{{outcome}}"),),
        ),
    ),
)
_OBJECTIVES_ROW = Row(
    "Objectives",
    (
        Panel(
            "Error budget burn rate",
            "How fast the objectives of `spec.slo` spend their error budget, over one and six hours. At 1 it lasts 30 days.",
            "below 1. Above 14.4 over an hour, or 6 over six hours, `PhalanxErrorBudgetBurnsFast` fires: see docs/runbooks.md.",
            "short",
            tuple(
                Query(f"max by (objective) (phalanx:objective_burn_rate:{window}{{{SERVICES}}})", "{{objective}} " + window)
                for window in ("1h", "6h")
            ),
        ),
        Panel(
            "Burn rate over three days",
            "The same over three days.",
            "below 1. Above it the budget of 30 days is spent early: `PhalanxErrorBudgetBurnsSlowly` fires.",
            "short",
            (Query(f"max by (objective) (phalanx:objective_burn_rate:3d{{{SERVICES}}})", "{{objective}}"),),
        ),
        Panel(
            "Events that met their objective",
            "Share of the requests with a complete response, of first tokens and of gaps between tokens within their targets.",
            "at least 0.95 for ttft and itl, and your availability. Without `spec.slo` only availability is counted.",
            "percentunit",
            (
                Query(
                    ratio(
                        rate("phalanx_router_objective_events_total", f'{SERVICES},outcome="good"', "objective"),
                        rate("phalanx_router_objective_events_total", SERVICES, "objective"),
                    ),
                    "{{objective}}",
                ),
            ),
        ),
    ),
)
_QUEUE_ROW = Row(
    "Queue",
    (
        Panel(
            "Wait at the router",
            "Time from the arrival of a request to its first dispatch to a group.",
            "p95 of a few milliseconds. Seconds mean that no group has room, or a cold start.",
            "s",
            _percentiles("phalanx_router_wait_seconds"),
        ),
        Panel(
            "Waiting requests",
            "Requests queued at routers, held for a cold start, and waiting in groups.",
            "near 0; routers queue first, so a queue in groups means stale load reports or direct clients.",
            "short",
            (
                Query(f"sum(phalanx_router_queued_requests{{{SERVICES}}})", "queued at routers"),
                Query(f"sum(phalanx_router_held_requests{{{SERVICES}}})", "held for a cold start"),
                Query(f"sum(phalanx_num_requests_waiting{{{SERVICES}}})", "waiting in groups"),
            ),
        ),
        Panel(
            "Queue time in groups",
            "From the arrival of a request in the engine to its first step.",
            "p95 below one step and a half of the engine dashboard.",
            "s",
            _percentiles("vllm:request_queue_time_seconds"),
        ),
        Panel(
            "Rejected with 429",
            "Requests per second that routers reject for lack of room, by reason.",
            "0. `quota_` reasons are limits of a client; others mean too few groups.",
            "reqps",
            (Query(rate("phalanx_router_shed_total", SERVICES, "why"), "{{why}}"),),
        ),
    ),
)
_CACHE_ROW = Row(
    "KV cache",
    (
        Panel(
            "KV cache in use by group",
            "Share of the KV pages held by requests.",
            "below 0.9, and similar in all groups. One group far above the others is a hotspot.",
            "percentunit",
            (Query(f"max by (phalanx_dev_group) (phalanx_kv_cache_usage_perc{{{SERVICES}}})", "{{phalanx_dev_group}}"),),
        ),
        Panel(
            "Prefix cache hits",
            "Share of the prompt tokens that the prefix cache had.",
            "steady, and near the share of shared prompts of your clients. A fall after a scale-out is normal for minutes.",
            "percentunit",
            (
                Query(
                    ratio(rate("vllm:prefix_cache_hits_total", SERVICES), rate("vllm:prefix_cache_queries_total", SERVICES)),
                    "hits",
                ),
            ),
        ),
        Panel(
            "Prefix pages by tier",
            "Pages per second that prompts took from the device, from host memory and from disk, and tokens "
            "pulled from other groups.",
            "most from the device. Many from host memory mean a working set above the KV pages: the next "
            "panel shows what more pages give.",
            "ops",
            (
                Query(rate("phalanx_pages_reused_total", SERVICES), "device pages"),
                Query(rate("phalanx_host_loaded_pages_total", SERVICES), "host pages"),
                Query(rate("phalanx_disk_fetched_pages_total", SERVICES), "disk pages"),
                Query(rate("phalanx_router_pull_tokens_total", SERVICES), "pulled tokens"),
            ),
        ),
        Panel(
            "Hit rate by size",
            "Estimated hit rate of page lookups with other numbers of pages, and with the tiers there are.",
            "`twice` is less than 0.05 above `now`. Otherwise more pages, int8 pages or a host tier pay.",
            "percentunit",
            (
                Query(f"avg by (size) (phalanx_cache_curve_hit_rate{{{SERVICES}}})", "{{size}}"),
                Query(f"avg by (tier) (phalanx_cache_tier_hit_rate{{{SERVICES}}})", "with {{tier}}"),
            ),
        ),
    ),
)
_SPECULATION_ROW = Row(
    "Speculation",
    (
        Panel(
            "Draft tokens accepted",
            "Share of the draft tokens that the target model accepted.",
            "above 0.5 where speculation is configured; depth falls to 0 where drafts do not pay.",
            "percentunit",
            (
                Query(
                    ratio(
                        rate("vllm:spec_decode_num_accepted_tokens_total", SERVICES),
                        rate("vllm:spec_decode_num_draft_tokens_total", SERVICES),
                    ),
                    "accepted",
                ),
            ),
        ),
        Panel(
            "Draft tokens per request and step",
            "Depth of speculation of each group; 0 without speculation or when it does not pay.",
            "high at low load, low at high load.",
            "short",
            (Query(f"max by (phalanx_dev_group) (phalanx_speculation_depth{{{SERVICES}}})", "{{phalanx_dev_group}}"),),
        ),
        Panel(
            "Tokens saved",
            "Tokens per second beyond one for each request and step.",
            "above 0 where speculation is configured, at least at low load.",
            "ops",
            (Query(rate("phalanx_speculation_saved_tokens_total", SERVICES), "saved"),),
        ),
    ),
)
_MOVES_ROW = Row(
    "Moves and scaling",
    (
        Panel(
            "Moves by outcome",
            "Requests per second that went from one group to another.",
            "few, most of them `moved`. Many refused moves mean that no group has room.",
            "ops",
            (
                Query(rate("phalanx_router_moves_total", SERVICES, "outcome"), "{{outcome}}"),
                Query(rate("phalanx_router_replays_total", SERVICES), "replayed after a loss"),
            ),
        ),
        Panel(
            "Stall of moved streams",
            "Time between the last token before a move and the first after it.",
            "p95 below 0.1 s. Longer stalls mean a slow network between groups.",
            "s",
            _percentiles("phalanx_router_move_stall_seconds"),
        ),
        Panel(
            "Scaling decisions",
            "Groups that the load of the last minute needs, that the autoscaler wants, and that are ready. "
            "The reason of each decision is in "
            "`status.autoscaling.history`.",
            "wanted is at least needed, and ready follows wanted within the start time of a group.",
            "short",
            (
                Query(f"max(phalanx_operator_needed_groups{{{STATUS}}})", "needed"),
                Query(f"max(phalanx_operator_desired_groups{{{STATUS}}})", "wanted"),
                Query(f"max(phalanx_service_ready_groups{{{STATUS}}})", "ready"),
            ),
        ),
        Panel(
            "Hotspots by cause",
            "Overloaded groups by cause.",
            "0. See the table of hotspots in docs/balancing.md for what each cause needs.",
            "short",
            (
                Query(
                    f"sum by (cause) (max by (phalanx_dev_group, group, cause) (phalanx_router_hotspot{{{SERVICES}}}))",
                    "{{cause}}",
                ),
            ),
        ),
    ),
)

_COST_ROW = Row(
    "Cost",
    (
        Panel(
            "Devices in use by tenant",
            "Time of steps on all devices per second, divided among the requests of each step.",
            "the sum is the busy share of the service's devices. A tenant with most of it limits the others; "
            "`schedulingPolicy: fair` divides tokens among tenants.",
            "short",
            (Query(rate("phalanx_tenant_device_seconds_total", SERVICES, "tenant"), "{{tenant}}"),),
        ),
        Panel(
            "Device time per 1,000 output tokens",
            "Device seconds per 1,000 generated tokens by revision, prompts included.",
            "falls with load, because batches share the weights; a new revision is not above the old one at the same load.",
            "s",
            (
                Query(
                    "1000 * "
                    + ratio(
                        rate("phalanx_tenant_device_seconds_total", SERVICES, "phalanx_dev_revision"),
                        rate("phalanx_tenant_output_tokens_total", SERVICES, "phalanx_dev_revision"),
                    ),
                    "{{phalanx_dev_revision}}",
                ),
            ),
        ),
        Panel(
            "Power by tenant",
            "Power of the service's GPUs while they compute, divided as the time of their steps; without GPUs that count energy "
            "there is no data.",
            "follows the devices in use; a tenant with few requests has all of the power while only they are computed.",
            "watt",
            (
                Query(rate("phalanx_tenant_energy_joules_total", SERVICES, "tenant"), "{{tenant}}"),
                Query(rate("phalanx_device_energy_joules_total", SERVICES), "all devices, also without work"),
            ),
        ),
        Panel(
            "Computed tokens by tenant",
            "Prompt tokens that no cache had, and generated tokens, per second.",
            "prompts below the arrivals of the tenant times its prompt length: the prefix cache has the rest.",
            "short",
            (
                Query(rate("phalanx_tenant_prompt_tokens_total", SERVICES, "tenant"), "{{tenant}} prompts"),
                Query(rate("phalanx_tenant_output_tokens_total", SERVICES, "tenant"), "{{tenant}} output"),
            ),
        ),
    ),
)

SERVICE_DASHBOARD = Dashboard(
    uid="phalanx-service",
    title="Phalanx / Service",
    description="One service: what clients wait for, and what limits it.",
    variables=(NAMESPACE, SERVICE),
    rows=(_LATENCY_ROW, _OBJECTIVES_ROW, _QUEUE_ROW, _CACHE_ROW, _SPECULATION_ROW, _MOVES_ROW, _COST_ROW),
    annotations=(
        Annotation("Moves", f"sum by (outcome, why) (increase(phalanx_router_moves_total{{{SERVICES}}}[{RATE}])) > 0", "blue"),
        Annotation("Hotspots", f"max by (group, cause) (phalanx_router_hotspot{{{SERVICES}}}) == 1", "red"),
        Annotation("Scaling", f"changes(phalanx_operator_desired_groups{{{STATUS}}}[{RATE}]) > 0", "orange"),
    ),
)
