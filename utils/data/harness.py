"""EleutherAI's lm-eval on our model: https://github.com/EleutherAI/lm-evaluation-harness.

lm-eval sees every rank as rank 0 of 1, so all ranks make the same requests. The Asker divides the work among
them. All ranks get all answers, so no result depends on the number of ranks.
"""

from collections import defaultdict

from ..run.errors import check
from .evaluated import scored, windows


def harness_of(base: type, tokenizer, asker, seq_len: int, max_new_tokens: int):
    """A model for lm_eval. base: lm_eval's class TemplateLM, which encodes requests. asker: see
    train/asking.py.

    seq_len: maximum tokens of a sequence; lm-eval's max_length is one less, because the last token is not an
    input. max_new_tokens: maximum tokens of an answer, if the task sets none. Sequences that are too long are
    cut on the left, as by lm-eval's own models.
    """
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id

    def score(sequences: list) -> list[tuple[float, bool]]:
        groups = [[sequence] for sequence in sequences]
        # [::2] leaves out the number of tokens.
        rows = asker.score(groups, lambda _, scores: {"score": scores[0][::2]})
        return [row["score"] for row in rows]

    class Harness(base):
        tokenizer_name = tokenizer.name_or_path
        eot_token_id = eos
        prefix_token_id = eos if bos is None else bos

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_) -> list[int]:
            if add_special_tokens is None:  # not if a chat template wrote the BOS token
                add_special_tokens = bos is None or not string.startswith(tokenizer.bos_token)
            return tokenizer.encode(string, add_special_tokens=add_special_tokens)

        def apply_chat_template(self, chat_history: list, add_generation_prompt=True) -> str:
            return tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )

        def _loglikelihood_tokens(self, requests: list, **_) -> list[tuple[float, bool]]:
            sequences = []
            for _, context, continuation in requests:
                ids = (context + continuation)[-seq_len:]
                sequences.append(scored(ids, max(1, len(ids) - len(continuation))))
            return score(sequences)

        def loglikelihood_rolling(self, requests: list, **_) -> list[float]:
            sequences, numbers = [], []
            for number, request in enumerate(requests):
                ids = [self.prefix_token_id, *self.tok_encode(*request.args)]
                for begin, first, end in windows(len(ids), seq_len, seq_len - 1):
                    sequences.append(scored(ids[begin:end], first - begin))
                    numbers.append(number)
            sums = [0.0] * len(requests)
            for number, (log_prob, _) in zip(numbers, score(sequences), strict=True):
                sums[number] += log_prob
            return sums

        def generate_until(self, requests: list, **_) -> list[str]:
            by_size = defaultdict(list)  # maximum new tokens -> [(request number, prompt)]
            for number, request in enumerate(requests):
                context, options = request.args
                draws = options.get("do_sample") and options.get("temperature", 1)
                check(not draws, f"lm_eval: answers are greedy here, and a task has {options}")
                size = options.get("max_gen_toks", max_new_tokens)
                left = seq_len - 1 - size  # tokens of a prompt
                check(left > 0, f"--seq_len {seq_len}: a task has answers of {size} tokens")
                ids = self.tok_encode(context)[-left:]
                prompt = scored(ids, len(ids))
                by_size[size].append((number, prompt))
            texts = [""] * len(requests)
            for size, asked in by_size.items():
                numbers, prompts = zip(*asked, strict=True)
                rows = asker.complete(prompts, size, lambda _, ids: {"ids": ids})
                for number, row in zip(numbers, rows, strict=True):
                    text = tokenizer.decode(row["ids"], skip_special_tokens=True)
                    until = requests[number].args[1].get("until") or []
                    stops = [until] if isinstance(until, str) else until
                    for stop in filter(None, stops):
                        text = text.split(stop)[0]
                    texts[number] = text
            return texts

    Harness.tokenizer = tokenizer  # lm-eval reads its chat template
    return Harness()
