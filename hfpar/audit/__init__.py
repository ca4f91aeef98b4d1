"""Which items of a benchmark has a checkpoint seen: probes, statistics, evidence and reports."""
