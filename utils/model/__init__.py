"""A checkpoint's tensors <-> this rank's shards. May import: run."""

from transformers.utils.versions import require_version

for oldest in ("torch>=2.11.0a0", "transformers>=5.17"):  # a0: NVIDIA's containers
    require_version(oldest, "(fix: pip install -r requirements.txt)")
