"""What each forked process would compute again: tests/ranks.py imports it where they are forked from."""

import gc

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("llama")  # compiles the names of all families, 0.1 s
gc.freeze()  # as in conftest.py
