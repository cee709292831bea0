"""The HTTP headers that pass between client, router and workers, each named once (in lower case)."""

REQUEST_ID = "x-request-id"
"""On every answer. A client's own is kept if it is at most 128 visible ASCII characters."""

PREFILL = "x-baton-prefill"
"""Router to decode worker: `host:port` of the control server of the prefill worker to ask."""

TICKET = "x-baton-ticket"
"""Router to decode worker, carried on to the prefill worker: see `baton_api.tickets`."""

SALT = "x-baton-salt"
"""Router to decode worker, carried on to the prefill worker: whose KV blocks a prompt may share."""

OBJECTIVE = "x-slo-ttft-ms"
"""Client to router: milliseconds within which the first token is wanted."""

PREDICTED = "x-predicted-ttft-ms"
"""Router to client, where that cannot be: milliseconds after which the first token was to be expected."""

CLASS = "x-baton-class"
"""Client to router: how urgent a request is: critical, interactive, default or batch. Router to worker:
batch, if it is that."""

PATIENT_CLASS = "batch"
"""The class of requests whose answers nobody waits for."""

WORKER = "x-baton-worker"
"""Router to client: the name of the worker that answered."""

FOLLOW = "x-baton-follow"
"""Router to worker: say beside the stream what another worker would need to go on with it."""

PROMPT = "x-baton-prompt"
"""Worker to router and client: see `baton_api.reports`."""

DECISION = "x-baton-decision"
"""Router to client: where the prompt was to be computed, and what was expected of that."""

CACHED = "x-cached-tokens"
"""Router to client: tokens of the prompt that were in a cache."""

TIMING = "server-timing"
"""Router to client, as browsers show it: milliseconds in which the prompt waited, was computed, and in which
its blocks were moved, if they were: mostly while it was computed."""

SHOULD_RETRY = "x-should-retry"
"""Server to client: false where sending the request again cannot help; OpenAI's clients read it."""

STATE = "x-baton-state"
"""Router to worker, with `/v1/responses`: the router keeps responses. The number says how many items at the
start of `input` it took from earlier ones."""
