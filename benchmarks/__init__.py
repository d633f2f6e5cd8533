"""Benchmarks against other implementations. Each prints a table and, with --json, writes its figures."""
