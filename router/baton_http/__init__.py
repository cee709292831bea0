"""HTTP on both sides of a proxy: clients' connections, and connections to workers and to Kubernetes."""
