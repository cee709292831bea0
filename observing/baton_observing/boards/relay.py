"""How workers run the relay: what each role has to do, what it holds, and how blocks come over."""

from __future__ import annotations

from baton_api import metrics
from baton_observing import dcgm
from baton_observing.annotations import ROLLOUTS
from baton_observing.panels import HERE, Board, Panel, Query, Row
from baton_observing.promql import Scope, or_zero, ratio
from baton_observing.variables import CLUSTER, NAMESPACE, ROLE, SERVICE, WORKER

CHOSEN = Scope(HERE.window, (*HERE.chosen, 'role=~"$role"', 'worker=~"$worker"'))

WORK = Row(
    "What do workers have to do?",
    (
        Panel(
            title="Running",
            meaning="Sequences in the batch. When all workers are at their limit, requests wait.",
            unit="none",
            queries=(
                Query(CHOSEN.now(metrics.WORKER_RUNNING, "worker"), "{{worker}}"),
                Query(
                    CHOSEN.now(metrics.WORKER_RUNNING_LIMIT, "worker", how="max"),
                    "{{worker}} limit",
                ),
            ),
        ),
        Panel(
            title="Waiting",
            meaning="Sequences that wait in workers to be in the batch. The router holds requests back, so "
            "there "
            "should be few.",
            unit="none",
            queries=(Query(CHOSEN.now(metrics.WORKER_QUEUED, "worker"), "{{worker}}"),),
            kind="stacked",
            runbook="BatonImbalance",
        ),
        Panel(
            title="Prompt tokens still to be computed",
            meaning="Divided by a worker's prompt tokens a second: the seconds that a new prompt waits. If "
            "it "
            "grows, more prefill workers are needed.",
            unit="short",
            queries=(Query(CHOSEN.now(metrics.WORKER_QUEUED_TOKENS, "worker"), "{{worker}}"),),
            kind="stacked",
        ),
        Panel(
            title="Prompt tokens computed",
            meaning="By where the KV came from: computed here, brought from a prefill worker, or cached.",
            unit="cps",
            queries=(
                Query(
                    CHOSEN.per_second(metrics.WORKER_PROMPT_TOKENS, "role", "source"),
                    "{{role}} {{source}}",
                ),
            ),
            kind="stacked",
        ),
        Panel(
            title="Tokens generated",
            meaning="For clients, by worker. Workers of one role should have about the same.",
            unit="cps",
            queries=(Query(CHOSEN.per_second(metrics.WORKER_GENERATION_TOKENS, "worker"), "{{worker}}"),),
            kind="stacked",
        ),
        Panel(
            title="Waiting for prefill, and prefill, p95",
            meaning="From a prompt's arrival at the engine that computes it to its first pass, and from "
            "there to "
            "its first token. The first grows: more prefill workers. The second: longer prompts, or slower "
            "workers.",
            unit="s",
            queries=(
                Query(CHOSEN.quantile(0.95, metrics.WORKER_QUEUE_TIME, "role"), "{{role}} waits"),
                Query(CHOSEN.quantile(0.95, metrics.WORKER_PREFILL_TIME, "role"), "{{role}} computes"),
            ),
        ),
    ),
)

CACHE = Row(
    "Is there room for more?",
    (
        Panel(
            title="KV cache in use",
            meaning="Share of the blocks that a new request cannot have. Near 1, sequences are put back "
            "(Retractions) and answers get slow: more decode workers, or fewer sequences in each.",
            unit="percentunit",
            queries=(Query(CHOSEN.now(metrics.WORKER_KV_USAGE, "worker", how="max"), "{{worker}}"),),
            limit=0.95,
            runbook="BatonKvSaturated",
        ),
        Panel(
            title="KV blocks by state",
            meaning="Cached blocks are free for whoever needs them. Quarantined ones belong to transfers "
            "of which "
            "it is not known that they have ended; they should come back within a minute.",
            unit="short",
            queries=(Query(CHOSEN.now(metrics.WORKER_BLOCKS, "state"), "{{state}}"),),
            kind="stacked",
            runbook="BatonKvQuarantined",
        ),
        Panel(
            title="Prefix cache hits",
            meaning="Share of the tokens of prompts that were found in the worker's cache. It falls when "
            "prompts "
            "have less in common, or blocks are dropped too early (Evictions).",
            unit="percentunit",
            queries=(
                Query(
                    ratio(
                        CHOSEN.per_second(metrics.WORKER_CACHE_HITS, "role"),
                        CHOSEN.per_second(metrics.WORKER_CACHE_QUERIES, "role"),
                    ),
                    "{{role}}",
                ),
            ),
        ),
        Panel(
            title="Retractions",
            meaning="Sequences that gave back their blocks to go on later, a second. Clients see a pause. "
            "More than "
            "one a second: the cache is too small for what runs.",
            unit="ops",
            queries=(Query(CHOSEN.per_second(metrics.WORKER_RETRACTIONS, "worker"), "{{worker}}"),),
            limit=1,
            runbook="BatonRetractions",
        ),
        Panel(
            title="Evictions",
            meaning="Blocks of known content that were dropped to make room, a second. Many, with few "
            "hits: more "
            "memory for the cache would pay.",
            unit="ops",
            queries=(Query(CHOSEN.per_second(metrics.WORKER_CACHE_EVICTIONS, "worker"), "{{worker}}"),),
        ),
        Panel(
            title="Step, and forward pass, p95",
            meaning="One engine step. What it takes beyond the forward pass is the engine's own; it should "
            "stay "
            "below a millisecond.",
            unit="s",
            queries=(
                Query(CHOSEN.quantile(0.95, metrics.WORKER_STEP, "role"), "{{role}} step"),
                Query(CHOSEN.quantile(0.95, metrics.WORKER_FORWARD, "role"), "{{role}} forward"),
            ),
        ),
    ),
)

BATON = Row(
    "Does the baton come over?",
    (
        Panel(
            title="KV transferred",
            meaning="Bytes of blocks pulled from prefill workers, by transport. TCP where there should be "
            "RDMA or "
            "shared memory: `baton doctor`.",
            unit="Bps",
            queries=(Query(CHOSEN.per_second(metrics.WORKER_TRANSFER_BYTES, "transport"), "{{transport}}"),),
            kind="stacked",
        ),
        Panel(
            title="Transfer of a prompt",
            meaning="Time in which blocks of a prompt were on their way. Most of it passes while the "
            "prompt is "
            "still being computed.",
            unit="s",
            queries=tuple(
                Query(CHOSEN.quantile(share, metrics.WORKER_TRANSFER_SECONDS), f"p{share * 100:g}")
                for share in (0.5, 0.95, 0.99)
            ),
        ),
        Panel(
            title="Transfers that failed",
            meaning="Prompts that did not come over whole, a second, by reason; decode workers computed "
            "the rest "
            "themselves. Nobody sees it but in time.",
            unit="reqps",
            queries=(
                Query(
                    or_zero(
                        CHOSEN.per_second(metrics.WORKER_TRANSFER_FAILURES, "reason") + " > 0", reason="none"
                    ),
                    "{{reason}}",
                ),
            ),
            kind="stacked",
            runbook="BatonTransferFailing",
        ),
        Panel(
            title="Where prompts are computed",
            meaning="By prefill workers (remote), by the decode worker because that is sooner (local), or "
            "by it "
            "because something went wrong (fallback).",
            unit="reqps",
            queries=(Query(HERE.per_second(metrics.ROUTER_DECISIONS, "path"), "{{path}}"),),
            kind="stacked",
        ),
        Panel(
            title="On their way, and held",
            meaning="Sequences whose prompt is being brought, and computed prompts whose blocks wait to be "
            "pulled. "
            "Held for long: decode workers do not come to fetch.",
            unit="none",
            queries=(
                Query(CHOSEN.now(metrics.WORKER_FETCHING), "on their way"),
                Query(CHOSEN.now(metrics.WORKER_HELD), "held"),
            ),
        ),
        Panel(
            title="Blocks put into quarantine",
            meaning="Blocks of reads that were given up, a second. They are not used again before it is "
            "sure that "
            "nobody writes to them.",
            unit="ops",
            queries=(
                Query(
                    or_zero(CHOSEN.per_second(metrics.WORKER_QUARANTINES, "transport"), transport="none"),
                    "{{transport}}",
                ),
            ),
            runbook="BatonKvQuarantined",
        ),
    ),
)

GPUS = Row(
    "Are the GPUs at work?",
    (
        Panel(
            title="GPU busy",
            meaning="Share of the time in which a kernel ran, and in which tensor cores did. Busy without "
            "tensor cores: small batches, or long contexts. Needs NVIDIA's DCGM exporter.",
            unit="percentunit",
            queries=(
                Query(f"{dcgm.by_pod(dcgm.USED)} / 100", "{{pod}}"),
                Query(dcgm.by_pod(dcgm.TENSOR_ACTIVE), "{{pod}} tensor cores"),
            ),
        ),
        Panel(
            title="GPU memory in use",
            meaning="Weights, KV cache and buffers. It is constant once a worker has started. Near 1 the "
            "next allocation may fail.",
            unit="percentunit",
            queries=(
                Query(
                    f"{dcgm.by_pod(dcgm.MEMORY_USED, 'sum')} / ({dcgm.by_pod(dcgm.MEMORY_USED, 'sum')} + "
                    f"{dcgm.by_pod(dcgm.MEMORY_FREE, 'sum')})",
                    "{{pod}}",
                ),
            ),
        ),
        Panel(
            title="Last GPU error (XID)",
            meaning="Code of the last error of each worker's GPUs; 0 without one. NVIDIA's list of XID "
            "errors says for which the node has to be drained.",
            unit="none",
            queries=(Query(dcgm.by_pod(dcgm.XID, "max"), "{{pod}}"),),
        ),
    ),
)

BOARD = Board(
    "relay",
    "Baton: Prefill and decode",
    "What workers have to do, how much room they have, and how blocks come from one to the other.",
    (CLUSTER, NAMESPACE, SERVICE, ROLE, WORKER),
    (WORK, CACHE, BATON, GPUS),
    (ROLLOUTS,),
)
