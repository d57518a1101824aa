"""Comparisons of models on small tasks: plan, train, test, tables and plots."""
