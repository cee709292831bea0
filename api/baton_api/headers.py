"""HTTP headers between client, router and workers, in lower case."""

REQUEST_ID = "x-request-id"
"""On every response. The id of a client is used if it has at most 128 visible ASCII characters."""

PREFILL = "x-baton-prefill"
"""Router to decode worker: `host:port` of the prefill worker's control server."""

TICKET = "x-baton-ticket"
"""Router to decode worker, which forwards it to the prefill worker. See `baton_api.tickets`."""

SALT = "x-baton-salt"
"""Router to decode worker, which forwards it to the prefill worker: the cache salt. Prompts share KV blocks
only with prompts of the same salt."""

TENANT = "x-baton-tenant"
"""Router to worker: an opaque name of the tenant. Tenants take turns in a worker's queue; without it,
requests do."""

OBJECTIVE = "x-slo-ttft-ms"
"""Client to router: deadline of the first token in milliseconds."""

PREDICTED = "x-predicted-ttft-ms"
"""Router to client, when the deadline cannot be met: predicted time to first token in milliseconds."""

CLASS = "x-baton-class"
"""Client to router: priority class of the request, one of `request_classes.CLASSES`. Router to worker: only
`BATCH_CLASS`, for a class of the background."""

BATCH_CLASS = "batch"
"""The class of requests without an interactive client, such as the lines of batches."""

WORKER = "x-baton-worker"
"""Router to client: name of the worker that served the request."""

RESUMABLE = "x-baton-resumable"
"""Router to worker: report the resume state beside the stream, or what it has cost so far where it cannot be
resumed. See `baton_api.stream_comments`."""

USAGE = "x-baton-usage"
"""Worker to router: tokens of a whole answer. See `baton_api.stream_comments`."""

PROMPT = "x-baton-prompt"
"""Worker to router and client: report of the prompt. See `baton_api.prompt_report`."""

DECISION = "x-baton-decision"
"""Router to client: where the router planned to compute the prompt, and its prediction."""

CACHED = "x-cached-tokens"
"""Router to client: cached tokens of the prompt."""

TIMING = "server-timing"
"""Router to client, shown by browsers: milliseconds of queueing, of computing the prompt, and of
transferring its blocks, which mostly overlaps with computing."""

SHOULD_RETRY = "x-should-retry"
"""Server to client: false when a retry does not help. OpenAI's clients read it."""

STATE = "x-baton-state"
"""Router to worker, on `/v1/responses`: the router stores responses. The value is the number of items at the
start of `input` that come from previous responses."""
