"""Dashboard of all services."""

from tools.dashboards.records import (
    NAMESPACE,
    SERVICE,
    SERVICES,
    STATUS,
    Dashboard,
    Panel,
    Query,
    Row,
    quantile,
    rate,
    ratio,
)

_BY = ("namespace", "phalanx_dev_service")
_LEGEND = "{{namespace}}/{{phalanx_dev_service}}"
_STATUS_LEGEND = "{{namespace}}/{{service}}"
_OF = ", ".join(_BY)


def _of_routers(gauge: str) -> str:
    return f"max by ({_OF}) ({gauge}{{{SERVICES}}})"


_SERVICES_ROW = Row(
    "Services",
    (
        Panel(
            "Groups that accept requests",
            "Groups that the routers of each service can use, as a share of those they know.",
            "1, and below 1 only while groups start, drain or roll. At 0 no request is answered: see the "
            "condition `Ready` of the service.",
            "percentunit",
            (Query(ratio(_of_routers("phalanx_router_groups_ready"), _of_routers("phalanx_router_groups_known")), _LEGEND),),
        ),
        Panel(
            "Groups by the operator's count",
            "Groups of each service that are not draining, and those of them with all pods ready.",
            "the two lines of a service are equal. A lasting gap is a failed start or missing capacity: "
            "`kubectl phalanx status`.",
            "short",
            (
                Query(f"sum by (namespace, service) (phalanx_service_groups{{{STATUS}}})", f"{_STATUS_LEGEND} groups"),
                Query(f"sum by (namespace, service) (phalanx_service_ready_groups{{{STATUS}}})", f"{_STATUS_LEGEND} ready"),
            ),
        ),
        Panel(
            "Hotspots and draining groups",
            "Overloaded groups, and groups that get no new requests, per service.",
            "0 hotspots outside bursts; draining groups only during rollouts, scale-ins and node drains.",
            "short",
            (
                Query(f"sum by (namespace, service) (phalanx_service_hot_groups{{{STATUS}}})", f"{_STATUS_LEGEND} hot"),
                Query(f"sum by (namespace, service) (phalanx_service_draining_groups{{{STATUS}}})", f"{_STATUS_LEGEND} draining"),
            ),
        ),
    ),
)
_GOODPUT_ROW = Row(
    "Goodput",
    (
        Panel(
            "Finished requests",
            "Requests that ended with a complete answer, per second.",
            "it follows the arrivals; a fall without a fall of arrivals shows in the next panel as failures or refusals.",
            "reqps",
            (Query(rate("phalanx_router_requests_total", f'{SERVICES},outcome="finished"', *_BY), _LEGEND),),
        ),
        Panel(
            "Failed and refused requests",
            "Requests that ended with an error of the service (failed) or without capacity or a valid body "
            "(refused), as a share of all.",
            "0. Failures mean lost groups without a replacement; refusals with shedding mean too few groups.",
            "percentunit",
            tuple(
                Query(
                    ratio(
                        rate("phalanx_router_requests_total", f'{SERVICES},outcome="{outcome}"', *_BY),
                        rate("phalanx_router_requests_total", SERVICES, *_BY),
                    ),
                    f"{_LEGEND} {outcome}",
                )
                for outcome in ("failed", "refused")
            ),
        ),
        Panel(
            "Output tokens",
            "Tokens that clients received, per second.",
            "near the figure of your load test at this number of groups; tokens per group that fall while "
            "queues grow mean a slow group.",
            "ops",
            (Query(rate("phalanx_router_generation_tokens_total", SERVICES, *_BY), _LEGEND),),
        ),
        Panel(
            "Time to first token, p95",
            "95th percentile of the time from arrival at the router to the first token.",
            "below the target of your service. Open the dashboard of the service for its parts.",
            "s",
            (Query(quantile(0.95, "phalanx_router_time_to_first_token_seconds", SERVICES, *_BY), _LEGEND),),
        ),
        Panel(
            "Inter-token latency, p95",
            "95th percentile of the time between two tokens as the router receives them.",
            "below the target of your service, and steady when requests arrive.",
            "s",
            (Query(quantile(0.95, "phalanx_router_inter_token_latency_seconds", SERVICES, *_BY), _LEGEND),),
        ),
    ),
)
_SATURATION_ROW = Row(
    "Saturation and cost",
    (
        Panel(
            "KV cache in use",
            "Share of the KV pages held by requests, of the fullest group of each service.",
            "below 0.9. Near 1 requests wait or are preempted: add groups, or use int8 pages.",
            "percentunit",
            (Query(f"max by ({_OF}) (phalanx_kv_cache_usage_perc{{{SERVICES}}})", _LEGEND),),
        ),
        Panel(
            "Requests queued at routers",
            "Requests that wait for a group with room.",
            "0, with short peaks. A queue that lasts means that all groups are full.",
            "short",
            (Query(f"sum by ({_OF}) (phalanx_router_queued_requests{{{SERVICES}}})", _LEGEND),),
        ),
        Panel(
            "Saturated services",
            "1 while most groups of a service are overloaded, so that moves between them do not help.",
            "0. At 1 only more groups or less load help: raise `spec.autoscaling.maxReplicas` or `spec.replicas`.",
            "none",
            (Query(_of_routers("phalanx_router_fleet_saturated"), _LEGEND),),
        ),
        Panel(
            "Device power",
            "Power draw of the devices of each service; absent without NVML.",
            "it follows the output tokens. Power without tokens is cost without use: scale in.",
            "watt",
            (Query(f"sum by ({_OF}) (phalanx_device_power_watts{{{SERVICES}}})", _LEGEND),),
        ),
        Panel(
            "Device time per 1,000 output tokens",
            "Time in which the devices of a service computed, divided by what its groups generated.",
            "steady, and lower with more load, since a step serves more requests. A rise at the same load is a slower "
            "revision or device, or fewer prefix hits: open the dashboard of the service.",
            "s",
            (
                Query(
                    "1000 * "
                    + ratio(
                        rate("phalanx_tenant_device_seconds_total", SERVICES, *_BY),
                        rate("phalanx_tenant_output_tokens_total", SERVICES, *_BY),
                    ),
                    _LEGEND,
                ),
            ),
        ),
    ),
)

FLEET = Dashboard(
    uid="phalanx-fleet",
    title="Phalanx / Fleet",
    description="All services: do they answer, how well, and how full are they?",
    variables=(NAMESPACE, SERVICE),
    rows=(_SERVICES_ROW, _GOODPUT_ROW, _SATURATION_ROW),
)
