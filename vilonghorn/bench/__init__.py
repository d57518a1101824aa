"""Benchmarks of the scan and the models."""
