"""A reward model, for example from reward.py, that scores completions. It is sharded and never trained."""

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer

from ..model.folder import open_model, run_facts
from ..model.loading import build_model, plan_pieces
from ..model.sharding import reshard
from ..run.distributed import World, gather, together
from ..run.errors import check, others_code


@dataclass
class RewardModel:
    """model: on meta at first; frozen_copy shards it and loads `pieces`. digest: a hash of its weights."""

    model: nn.Module
    pieces: list
    tokenizer: object
    digest: str

    @torch.no_grad()
    def scores(self, batch_size: int, world: World, prompts: list, texts: list[str]) -> list[float]:
        """The score of each text as the answer to its prompt, which is a text or messages. All ranks make the
        same call and get all scores. Each rank computes a share of them, batch_size at a time.
        """
        count = len(texts)
        turns = math.ceil(count / world.size)  # equal on each rank: some texts are scored twice
        share = [(i * world.size + world.rank) % count for i in range(turns)]
        own: dict[int, float] = {}
        for start in range(0, turns, batch_size):
            part = share[start : start + batch_size]
            rows = [torch.tensor(self.ids_of(prompts[i], texts[i])) for i in part]
            ids = pad_sequence(rows, batch_first=True)  # (B, T), on the right: causal attention
            places = [k * ids.shape[1] + len(row) - 1 for k, row in enumerate(rows)]
            ends = torch.tensor(places, device=world.device)
            values = self.model(ids.to(world.device), ends=ends)
            own |= zip(part, values.tolist(), strict=True)
        reshard(self.model)  # without a backward, FSDP2 keeps some units gathered
        for of_rank in gather(world, own):
            own |= of_rank
        return [own[i] for i in range(count)]

    def ids_of(self, prompt: str | list[dict], text: str) -> list[int]:
        """The ids of the conversation with its answer, in the form the model was trained on. Only the last
        tokens are kept, as many as the model has positions.
        """
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        turns = [*asked, {"role": "assistant", "content": text}]
        ids = self.tokenizer.apply_chat_template(turns, return_dict=True)["input_ids"]
        return ids[-getattr(self.model.config, "max_position_embeddings", len(ids)) :]


def open_reward_model(
    name: str, dtype: torch.dtype, world: World, trust_remote_code: bool
) -> RewardModel:
    """Open a reward model, with one score per sequence, and its tokenizer. name: a folder or Hugging Face id.
    Every rank calls it. Raises ConfigError if it is another kind of model.
    """
    source = open_model(name, world, trust_remote_code)
    with together(world):
        labels = source.config.num_labels
        fix = "a folder that reward.py has made"
        check(labels == 1, f"--reward_model {name} has {labels} labels, not one (fix: {fix})")
        model = build_model(
            source.config, dtype, trust_remote_code=trust_remote_code, kind="scores"
        )
        pieces = plan_pieces(model, source.weights, source.folder)
        with others_code(f"--reward_model {name}: its tokenizer", fix):
            tokenizer = AutoTokenizer.from_pretrained(source.folder, local_files_only=True)
            tokenizer.get_chat_template()
        digest = run_facts(source.config, source.weights, "")["weights"]
    return RewardModel(model, pieces, tokenizer, digest)
