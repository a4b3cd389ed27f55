"""Measure Phalanx beside its peers: ``python -m benchmarks``, in a checkout; not installed."""
