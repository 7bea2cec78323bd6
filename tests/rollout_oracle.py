"""The completions of which TRL's policy-gradient losses are recorded, for record_trl_grpo.py and
test_trl_grpo.py. The models and their gradients are those of preference_oracle.py.

Ids and numbers are drawn as integers, so they are the same bit for bit on every machine. What each token's
log-probability was when it was drawn is recorded too: it is that of the policy, moved by a drawn drift.
"""

from typing import NamedTuple

import preference_oracle as oracle
import torch

SEEDS = {"completions": 21, "advantages": 22, "drift": 23}
PROMPTS, GROUP_SIZE = (3, 7), 4  # the lengths of the prompts, and the completions of each
MAX_NEW_TOKENS = 13  # of which one completion has all, and no EOS
TEMPERATURE = 0.7
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
DRIFT = 0.5  # nats a token, at most
SETTINGS = {  # name -> (loss, beta)
    f"{loss}{'_kl' if beta else ''}": (loss, beta)
    for loss in ("dapo", "grpo", "dr_grpo")
    for beta in (0.0, 0.04)
}


class Drawn(NamedTuple):
    """A prompt with one of its completions."""

    prompt: oracle.Ids
    ids: oracle.Ids  # of the completion
    advantage: float


def seeded(what: str) -> torch.Generator:
    return torch.Generator().manual_seed(SEEDS[what])


def completions() -> list[Drawn]:
    """Completions have 1 to MAX_NEW_TOKENS tokens, and all but the longest one end with EOS. Advantages have
    both signs in each group, and one of them is 0.
    """
    generator, found = seeded("completions"), []
    advantages = (2 * oracle.uniform((len(PROMPTS), GROUP_SIZE), seeded("advantages"))).tolist()
    advantages[0][1] = 0.0
    for size, of_group in zip(PROMPTS, advantages, strict=True):
        prompt = oracle.letters(size, generator)
        lengths = oracle.sizes(0, MAX_NEW_TOKENS, GROUP_SIZE, generator)
        for length, advantage in zip(lengths, of_group, strict=True):
            ids = oracle.letters(length, generator) + [oracle.EOS]
            found.append(Drawn(prompt, ids, advantage))
    found[-1] = found[-1]._replace(ids=oracle.letters(MAX_NEW_TOKENS, generator))
    return found


def drifts() -> list[list[float]]:
    """Of each token of each completion: by how many nats the policy is likelier to draw it now."""
    generator = seeded("drift")
    return [(DRIFT * oracle.uniform((len(row.ids),), generator)).tolist() for row in completions()]
