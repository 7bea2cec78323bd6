"""A hub id is fetched once per node by its first rank, then treated as a folder.

huggingface_hub does the transfer and keeps its cache: a file cut in the middle goes on with a Range request,
finished files are not asked for again, and its lock is an flock, which the kernel releases when the holder
dies. HF_ENDPOINT, HF_HOME, HF_TOKEN and HF_HUB_OFFLINE mean what they always mean.
"""

import re
import time
from concurrent.futures import ThreadPoolExecutor
from difflib import get_close_matches
from pathlib import Path
from threading import Thread

from ..run.distributed import World, gather, host_name, together
from ..run.errors import ConfigError, check, reason_of_others, say

FILES = ["*.safetensors", "*.json", "tokenizer.*", "*.model", "*.jinja", "*.txt"]
# the weights in other layouts
NOT_FILES = ["*/*.safetensors", "*/*.json", "original/*", "consolidated*"]
ANSWER_SECONDS = 10  # how long the hub may be silent before it counts as out of reach
QUICK_SECONDS = 2  # the same, where a plan was asked for and nothing else waits


def fetch_model(name: str, world: World, trust_remote_code: bool = False) -> Path:
    """The folder of model `name`: a local folder as it is, or a hub id that each node's first rank downloads.

    Every rank calls it. Only safetensors, tokenizer and configuration are fetched, and *.py with
    trust_remote_code. Raises one ConfigError on all ranks when the name is neither a folder nor within reach
    (after about ANSWER_SECONDS), when the repository is gated or holds no safetensors, or the disk is full.
    """
    folder = Path(name) if Path(name).exists() else Path(name).expanduser()
    found = gather(world, folder.is_dir())
    if all(found):
        return folder.resolve()
    hint = _did_you_mean(folder)
    with together(world):
        check(not folder.is_file(), f"model {name} is a file (fix: name the folder that holds it)")
        here = folder.is_dir() or not any(found)
        check(
            here, f"model {name} is a folder elsewhere, not on {host_name()} (fix: a shared disk)"
        )
        known = folder.is_dir() or re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", name, re.ASCII)
        check(known, f"model {name} is not a folder{hint}, and no hub id like owner/name either")
    # The others wait in short collectives: one long one would end with the group's timeout, not the download.
    pool = ThreadPoolExecutor(1)
    job = pool.submit(_answer, name, trust_remote_code, hint) if world.local_rank == 0 else None
    while not all(gather(world, job is None or job.done())):
        time.sleep(0.5)
    answers = gather(world, job.result() if job else ("", ""))
    if errors := dict.fromkeys(error for _, error in answers if error):
        raise ConfigError(list(errors), agreed=True)
    return Path(answers[world.rank - world.local_rank][0])  # of this node's first rank


def fetch_config(name: str, trust_remote_code: bool, fix: str):
    """The transformers config of a hub id, for what needs no weights. ConfigError within some seconds where
    the hub does not answer, and the cache has none either.
    """
    from huggingface_hub import HfApi
    from transformers import AutoConfig

    answers: list[Exception | None] = []

    def ask() -> None:
        try:
            HfApi().model_info(name, timeout=QUICK_SECONDS)
            answers.append(None)
        except Exception as error:
            answers.append(error)

    asking = Thread(target=ask, daemon=True)  # looking up a name has no limit of its own
    asking.start()
    asking.join(QUICK_SECONDS)
    error = answers[0] if answers else TimeoutError(f"no answer in {QUICK_SECONDS} s")
    try:
        how = {"trust_remote_code": trust_remote_code, "local_files_only": error is not None}
        return AutoConfig.from_pretrained(name, **how)
    except Exception:
        if error is None:
            raise
        raise ConfigError(f"--{_explain(name, error, '')} (fix: {fix})") from None


def _answer(*args) -> tuple[str, str]:
    """(folder, "") or ("", one line about what went wrong): in there it is the world's doing, not ours."""
    try:
        return _download(*args), ""
    except ConfigError as error:
        return "", str(error)


def _download(name: str, trust_remote_code: bool, hint: str) -> str:
    """The folder of the newest snapshot; where the hub does not answer, of the one in the cache."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    patterns = {
        "allow_patterns": FILES + ["*.py"] * trust_remote_code,
        "ignore_patterns": NOT_FILES,
    }
    try:
        # snapshot_download may wait for ever
        repository = HfApi().model_info(name, timeout=ANSWER_SECONDS)
    except Exception as error:
        try:
            folder = snapshot_download(name, local_files_only=True, **patterns)
        except (LocalEntryNotFoundError, ValueError):  # ValueError: not quite the shape of a hub id
            raise ConfigError(_explain(name, error, hint)) from None
        say(f"model {name}: the hub does not answer, so the copy in its cache is used")
        return folder
    safe = any(file.rfilename.endswith(".safetensors") for file in repository.siblings or [])
    check(
        safe, f"model {name} has no safetensors on the hub (fix: convert it, and name the folder)"
    )
    for last in (False, False, True):
        try:
            return snapshot_download(name, **patterns)
        except Exception as error:
            # the disk, or the hub refuses; else a connection was lost
            if last or isinstance(error, OSError):
                raise ConfigError(_explain(name, error, hint)) from None
    raise AssertionError("not reached")


def _explain(name: str, error: Exception, hint: str) -> str:
    """One line for whatever huggingface_hub raised."""
    from huggingface_hub import constants, errors

    hub, cache = constants.ENDPOINT, f"{constants.HF_HUB_CACHE} on {host_name()}"
    if isinstance(error, errors.GatedRepoError):
        return f"model {name} is gated (fix: accept its terms at {hub}/{name}, then set HF_TOKEN)"
    if isinstance(error, OSError) and error.errno:
        return f"model {name} cannot be stored in {cache}: {error.strerror} (fix: HF_HOME on another disk)"
    if isinstance(error, errors.RepositoryNotFoundError):
        why = f"nor on the hub at {hub} (fix: its name; if it is private, set HF_TOKEN)"
    elif isinstance(error, errors.OfflineModeIsEnabled):
        why = f"nor in the cache {cache}, and HF_HUB_OFFLINE is set"
    else:
        why = f"nor reachable on the hub at {hub} ({reason_of_others(error)})"
    return f"model {name} is neither a folder{hint} {why}"


def _did_you_mean(folder: Path) -> str:
    """A folder that differs from `folder` in one misspelt part, as " (did you mean X?)"; else nothing."""
    missing = next((p for p in [*reversed(folder.parents), folder] if not p.exists()), folder)
    names = [p.name for p in missing.parent.iterdir()] if missing.parent.is_dir() else []
    for name in get_close_matches(missing.name, names):
        candidate = missing.parent / name / folder.relative_to(missing)
        if candidate.is_dir():
            return f" (did you mean {candidate}?)"
    return ""
