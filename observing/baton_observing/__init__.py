"""Dashboards, recording rules and alerts as code. The chart's files are generated from them."""
