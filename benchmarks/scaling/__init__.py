"""
How well policies follow the load of a day: Baton, an HPA for the CPU, and a fixed number of workers.

    python -m benchmarks.scaling --policy baton hpa static
    python -m benchmarks.scaling --policy baton --imagined
    python -m benchmarks.scaling --policy baton static --imagined --case slots

The router, Prometheus and a process for each worker are real. Worker processes (`worker`) compute nothing,
but take as long as if they did. A small server acts as the API server of their EndpointSlices. Decisions come
from the operator's `decide`. Everything runs `--scale` times faster than modeled, and modeled times are
printed: three hours in ten minutes. `--imagined` simulates the same in a second of virtual time, without
processes.

The case is fair to all three. The fixed workers are as many as the peak of each role needs, with a margin for
chance, so that they attain nearly all objectives. They show the possible result and its cost. Each part of
the load (`day`) lasts more than ten times as long as a worker takes to start (`case`), as on real days. If
steps ended before new workers are ready, no policy could follow them, and the result would be chance. Each
role has a step that the other has not. The HPA has the defaults of Kubernetes (`hpa`). Prometheus is killed
during high load, and returns long after the load has fallen.
"""
