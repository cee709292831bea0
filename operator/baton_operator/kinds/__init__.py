"""
The custom resources, as types: what a person may write, and what the operator answers in `status`.

`crds/` is generated from these (`baton_operator.crd`): names, bounds, defaults, descriptions and the rules
that the API server checks. What it has admitted is read back by the same types.
"""
