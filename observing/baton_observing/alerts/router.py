"""What goes wrong between clients and workers: requests wait, or the router lacks what it chooses by."""

from __future__ import annotations

from baton_api import metrics
from baton_observing.alerts.alert import WHICH, Alert
from baton_observing.alerts.objectives import enough
from baton_observing.promql import Scope, ratio
from baton_observing.recording import REQUESTS

BY = ("namespace", "service")
NOW = Scope("5m")

WORKER_STATES = NOW.now(metrics.ROUTER_WORKER_STATE, *BY, "role", "worker", how="max", state="=~down|ejected")
AT_WORK = NOW.now(metrics.ROUTER_WORKER_STATE, *BY, state="=~ready|full|on_trial")

SENT_AWAY = NOW.per_second(metrics.ROUTER_REJECTS, *BY, reason="=~full|late|waited|unready")


def _share(part: str) -> str:
    return ratio(part, REQUESTS.over("5m"))


ALERTS = (
    Alert(
        name="BatonNoWorker",
        severity="page",
        summary=f"{WHICH}: requests come, and the router has no worker that could take one.",
        expression=f"{AT_WORK} == 0 and {REQUESTS.over('5m')} > 0",
        lasting="3m",
    ),
    Alert(
        name="BatonWorkersMissing",
        severity="ticket",
        summary=f"{WHICH}: {{{{ $value }}}} {{{{ $labels.role }}}} workers are down or fail requests.",
        expression=f"count by (namespace, service, role) ({WORKER_STATES} > 0)",
        lasting="10m",
    ),
    Alert(
        name="BatonQueueGrowing",
        severity="ticket",
        summary=f"{WHICH}: {{{{ $value }}}} requests wait in the router, and there are more and more.",
        expression=f"{NOW.now(metrics.ROUTER_QUEUE_DEPTH, *BY, class_='!=batch')} > 10 and "
        f"{NOW.over('deriv', metrics.ROUTER_QUEUE_DEPTH, *BY, class_='!=batch')} > 0",
    ),
    Alert(
        name="BatonQueueOld",
        severity="page",
        summary=f"{WHICH}: requests of class {{{{ $labels.class }}}} have waited for "
        "{{ $value | humanizeDuration }}.",
        expression=f"{NOW.now(metrics.ROUTER_QUEUE_AGE, *BY, 'class', how='max', class_='!=batch')} > 30",
    ),
    Alert(
        name="BatonSendingAway",
        severity="ticket",
        summary=f"{WHICH}: {{{{ $value | humanizePercentage }}}} of requests are sent away for want of "
        f"workers.",
        expression=f"{_share(SENT_AWAY)} > 0.01 and {enough('5m')}",
    ),
    Alert(
        name="BatonTenantsStale",
        severity="ticket",
        summary=f"{WHICH}: the file of tenants is wrong; an older one counts.",
        expression=f"{NOW.now(metrics.ROUTER_TENANTS_STALE, *BY, how='max')} > 0",
    ),
    Alert(
        name="BatonRetrying",
        severity="ticket",
        summary=f"{WHICH}: {{{{ $value | humanizePercentage }}}} of requests had to be given to another "
        f"worker.",
        expression=f"{_share(NOW.per_second(metrics.ROUTER_RETRIES, *BY))} > 0.05 and {enough('5m')}",
        lasting="10m",
    ),
    Alert(
        name="BatonSchedulerAway",
        severity="ticket",
        summary=f"{WHICH}: for {{{{ $value | humanizePercentage }}}} of requests the scheduler did not "
        f"answer.",
        expression=f"{_share(NOW.per_second(metrics.ROUTER_UNASKED, *BY))} > 0.01",
    ),
    Alert(
        name="BatonRouterSlow",
        severity="ticket",
        summary=f"{WHICH}: the router's event loop is {{{{ $value | humanizeDuration }}}} late.",
        expression=f"{NOW.quantile(0.99, metrics.ROUTER_LOOP_LAG, *BY)} > 0.25",
        lasting="10m",
    ),
    Alert(
        name="BatonCacheIgnored",
        severity="ticket",
        summary=f"{WHICH}: {{{{ $labels.worker }}}} does not hold what the router believes; its cache is "
        f"ignored.",
        expression=f"{NOW.now(metrics.ROUTER_CACHE_IGNORED, *BY, 'worker', how='max')} > 0",
        lasting="15m",
    ),
    Alert(
        name="BatonKvEventsMissing",
        severity="ticket",
        summary=f"{WHICH}: no KV events come from {{{{ $labels.worker }}}}.",
        expression=f"{NOW.now(metrics.ROUTER_KV_DEGRADED, *BY, 'worker', how='max')} > 0",
        lasting="10m",
    ),
)
