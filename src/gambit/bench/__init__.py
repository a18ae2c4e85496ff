"""Comparison of search methods on benchmarks: runs, rows, statistics, reports."""
