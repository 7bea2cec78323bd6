"""Fetch models from the Hugging Face hub. huggingface_hub does the transfer; if the hub does not answer,
it uses its cache.
"""

from huggingface_hub import snapshot_download

from ..run.errors import ConfigError, reason_of_others

# The files to fetch, among them the licence, which a save copies; and files of weights in other layouts,
# which are left out.
FILES = """*.safetensors *.json tokenizer.* *.model *.tiktoken *.jinja *.txt
    LICENSE* NOTICE* USE_POLICY*""".split()
NOT_FILES = "*/*.safetensors */*.json original/* consolidated*".split()


def fetch(name: str, trust_remote_code: bool, near: str) -> str:
    """Fetch a hub id and return its folder in the cache: safetensors, tokenizer and configuration, and *.py
    if trusted. Raises ConfigError if that fails. near: "; did you mean ...?" or "", for the message.
    """
    patterns = FILES + ["*.py"] * trust_remote_code
    try:
        return snapshot_download(name, allow_patterns=patterns, ignore_patterns=NOT_FILES)
    except Exception as error:  # of the network, the hub, the disk
        raise ConfigError(
            f"{name} is no folder and cannot be had from the hub{near}: {reason_of_others(error)}"
            " (fix: its name; HF_TOKEN where it is private or gated; HF_HOME on a disk with room)"
        ) from None
