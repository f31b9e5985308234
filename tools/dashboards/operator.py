"""Dashboard of the operator."""

from tools.dashboards.records import RATE, Dashboard, Panel, Query, Row, rate

_RECONCILES_ROW = Row(
    "Reconciles",
    (
        Panel(
            "Leaders",
            "Replicas that hold the lease.",
            "1. At 0 nothing is rolled, scaled or replaced; services go on serving.",
            "short",
            (Query("sum(phalanx_operator_is_leader)", "leaders"),),
        ),
        Panel(
            "Time of a reconcile",
            "Time of one reconcile of a service.",
            "p95 below 1 s. Slower ones wait for the API server.",
            "s",
            tuple(
                Query(f"histogram_quantile({share}, sum by (le) (rate(phalanx_operator_reconcile_seconds_bucket[{RATE}])))", name)
                for share, name in ((0.5, "p50"), (0.95, "p95"))
            ),
        ),
        Panel(
            "Due services",
            "Services that wait for a reconcile.",
            "near 0. A queue that lasts needs more `workers`, or the API server is slow.",
            "short",
            (Query("max(phalanx_operator_queue_keys)", "due"),),
        ),
        Panel(
            "Failed reconciles",
            "Reconciles per second that failed, by error; they are retried.",
            "only `Conflict` and `Gone`, and few of them.",
            "ops",
            (Query(rate("phalanx_operator_reconcile_errors_total", "", "error"), "{{error}}"),),
        ),
    ),
)
_EFFECTS_ROW = Row(
    "Effects",
    (
        Panel(
            "Actions",
            "Groups created, drained, kept and deleted per second.",
            "0 at rest. Groups that are created and deleted all the time are a scaling or rollout that does not settle.",
            "ops",
            (Query(rate("phalanx_operator_actions_total", "", "action"), "{{action}}"),),
        ),
        Panel(
            "Status writes",
            "Status writes per second.",
            "near 0 at rest: the status holds counters, not gauges.",
            "ops",
            (Query(rate("phalanx_operator_status_writes_total", ""), "writes"),),
        ),
        Panel(
            "Calls to the API server",
            "Calls per second by verb, and failed ones.",
            "below one per service and second. Failures other than `Conflict` and `Gone` are missing "
            "permissions or an overloaded API server.",
            "ops",
            (
                Query(rate("phalanx_operator_api_calls_total", "", "verb"), "{{verb}}"),
                Query(rate("phalanx_operator_api_errors_total", "", "error"), "failed: {{error}}"),
            ),
        ),
        Panel(
            "Age of watches",
            "Time since the last data of a watch, by kind.",
            "below 120 s; bookmarks arrive each minute. An old watch misses changes, and the pod restarts.",
            "s",
            (Query("max by (kind) (phalanx_operator_watch_age_seconds)", "{{kind}}"),),
        ),
    ),
)
_PROCESS_ROW = Row(
    "Process",
    (
        Panel(
            "CPU",
            "CPU seconds per second of each replica.",
            "below 0.1 per 100 services.",
            "percentunit",
            (Query(f"rate(process_cpu_seconds_total[{RATE}]) and on (instance, pod) phalanx_operator_is_leader", "{{pod}}"),),
        ),
        Panel(
            "Memory",
            "Resident memory of each replica.",
            "below half of the limit, and constant.",
            "bytes",
            (Query("process_resident_memory_bytes and on (instance, pod) phalanx_operator_is_leader", "{{pod}}"),),
        ),
    ),
)

OPERATOR = Dashboard(
    uid="phalanx-operator",
    title="Phalanx / Operator",
    description="The operator: does one lead, does it keep up, and what does it do?",
    variables=(),
    rows=(_RECONCILES_ROW, _EFFECTS_ROW, _PROCESS_ROW),
)
