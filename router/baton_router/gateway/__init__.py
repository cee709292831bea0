"""The endpoint picker of Gateway API's inference extension: an Envoy gateway asks it for a worker."""
