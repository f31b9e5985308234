"""Compares other engines with ours on the same workloads."""
