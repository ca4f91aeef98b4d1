"""Benchmark items in training rows: common runs of words and near matches."""
