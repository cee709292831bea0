"""
The custom resources as types: what users write in `spec`, and what the operator reports in `status`.

`baton_operator.crd` generates `crds/` from these types: names, bounds, defaults, descriptions and validation
rules. Docstrings of fields are what `kubectl explain` shows; the generator adds default and range. The
operator reads objects from the API server through the same types.
"""
