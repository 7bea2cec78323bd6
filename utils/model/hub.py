"""Models of the Hugging Face hub. huggingface_hub does the transfer, and where the hub is silent it takes its
cache.
"""

from huggingface_hub import snapshot_download

from ..run.errors import ConfigError, reason_of_others

# What a hub id is fetched for, and the weights in other layouts.
FILES = ["*.safetensors", "*.json", "tokenizer.*", "*.model", "*.jinja", "*.txt"]
NOT_FILES = ["*/*.safetensors", "*/*.json", "original/*", "consolidated*"]


def fetch(name: str, trust_remote_code: bool, near: str) -> str:
    """The folder of a hub id in the cache, with its safetensors, tokenizer and configuration, and *.py if
    trusted. ConfigError: it is out of reach. near: "; did you mean ...?", or "".
    """
    patterns = FILES + ["*.py"] * trust_remote_code
    try:
        return snapshot_download(name, allow_patterns=patterns, ignore_patterns=NOT_FILES)
    except Exception as error:  # of the network, the hub, the disk
        fix = "its name; HF_TOKEN where it is private or gated; HF_HOME on a disk with room"
        what = f"{name} is no folder and cannot be had from the hub{near}"
        raise ConfigError(f"{what}: {reason_of_others(error)} (fix: {fix})") from None
