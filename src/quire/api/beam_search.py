"""Beam search: of all continuations of a prompt, keeps the most likely few at every token.

Called by `LLM.beam_search`. Every token is one call of `generate` with all beams of all prompts; what a beam has
computed before is in the prefix cache. Knows tokens and logprobs, not text.
"""

from collections.abc import Callable, Collection, Sequence

from quire.frontend.model import ModelInfo
from quire.outputs import BeamSearchSequence, RequestOutput
from quire.params import BeamSearchParams, SamplingParams

Generate = Callable[[list[list[int]], SamplingParams], list[RequestOutput]]
Score = Callable[[BeamSearchSequence], float]


class Search:
    """The beams of one prompt."""

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        self.beams = [BeamSearchSequence(list(prompt_token_ids), [])]
        self.completed: list[BeamSearchSequence] = []

    def extend(self, outputs: Sequence[RequestOutput], end_ids: Collection[int]) -> None:
        """Replaces each beam by its continuations, one per logprob of its output."""
        longer: list[BeamSearchSequence] = []
        for beam, output in zip(self.beams, outputs):
            (entry,) = output.outputs[0].logprobs or [{}]
            for token_id, logprob in entry.items():
                total = beam.cum_logprob + logprob.logprob
                extended = BeamSearchSequence([*beam.tokens, token_id], [*beam.logprobs, entry], total)
                if token_id in end_ids:
                    extended.finish_reason, extended.stop_reason = "stop", token_id
                    self.completed.append(extended)
                else:
                    longer.append(extended)
        self.beams = longer

    def keep(self, count: int, score: Score) -> None:
        self.beams = sorted(self.beams, key=score, reverse=True)[:count]

    def best(self, count: int, score: Score) -> list[BeamSearchSequence]:
        for beam in self.beams:
            beam.finish_reason = "length"
        return sorted([*self.completed, *self.beams], key=score, reverse=True)[:count]


def beam_search(
    generate: Generate, model: ModelInfo, prompts: Sequence[Sequence[int]], params: BeamSearchParams
) -> list[list[BeamSearchSequence]]:
    """The best sequences of each prompt."""
    searches = [Search(prompt) for prompt in prompts]
    end_ids = frozenset(() if params.ignore_eos else model.eos_ids)
    # Twice as many as are kept: as many that are completed may be among them.
    num_logprobs = min(2 * params.beam_width, model.vocab_size)
    step = SamplingParams(logprobs=num_logprobs, max_tokens=1, temperature=0, detokenize=False)

    def score(beam: BeamSearchSequence) -> float:
        length = len(beam.tokens) - (beam.tokens[-1] in end_ids)
        return beam.cum_logprob / max(length, 1) ** params.length_penalty

    for _ in range(params.max_tokens):
        growing = [search for search in searches if search.beams and len(search.beams[0].tokens) < model.max_model_len]
        if not growing:
            break
        outputs = iter(generate([beam.tokens for search in growing for beam in search.beams], step))
        for search in growing:
            search.extend([next(outputs) for _ in search.beams], end_ids)
            search.keep(params.beam_width, score)
    return [search.best(params.beam_width, score) for search in searches]
