"""Rows -> batches. May import: run."""
