"""
How well a day is followed: by Baton, by an HPA for the CPU, or by nobody, with the peak's workers always.

    python -m benchmarks.scaling --policy baton hpa static
    python -m benchmarks.scaling --policy baton --imagined
    python -m benchmarks.scaling --policy baton static --imagined --case slots

Real are the router, Prometheus and a process for each worker (`worker`, which computes nothing and takes as
long as if it did); the API server of its EndpointSlices behaves as one. Decisions are those of the operator's
own `decide`. Everything happens `--scale` times faster than meant, and is printed as meant: three hours in
ten minutes. `--imagined` plays the same in a second of virtual time, without processes.

The case is fair to all three. The fixed workers are as many as the peak of each role needs by what a worker
can do, with room for chance, so that they attain nearly everything: they show what can be attained, and what
that costs. Each part of the load (`day`) lasts more than ten times as long as a worker takes to start
(`case`), as in days; where steps are over when the workers have come nobody can follow, and what is measured
is chance. Each role has a step that the other has not. The HPA has Kubernetes' own defaults (`hpa`).
Prometheus is killed while the load is high, and comes back when the load has long fallen.
"""
