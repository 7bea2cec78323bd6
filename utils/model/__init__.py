"""A checkpoint's tensors <-> this rank's shards. May import: run."""
