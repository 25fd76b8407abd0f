"""Beam search: of all continuations of a prompt, keeps the most likely few at every token.

Driven by `LLM.beam_search` and `server/beams.py`. Every beam is a request of one token; what it has computed before is
in the prefix cache. Knows tokens and logprobs, not text.
"""

from collections.abc import Callable, Collection, Sequence

from quire.frontend.model import ModelInfo
from quire.outputs import BeamSearchSequence, RequestOutput
from quire.params import BeamSearchParams, SamplingParams

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


class BeamSearch:
    """The searches of several prompts, token by token: what `asked` gives is to be answered with `step`'s parameters,
    and the outputs go to `take`, until nothing is asked any more."""

    def __init__(self, model: ModelInfo, prompts: Sequence[Sequence[int]], params: BeamSearchParams) -> None:
        self.model = model
        self.params = params
        self.searches = [Search(prompt) for prompt in prompts]
        self.growing = self.searches
        self.num_left = params.max_tokens
        self.end_ids = frozenset(() if params.ignore_eos else model.eos_ids)
        # Twice as many as are kept: as many that are completed may be among them.
        num_logprobs = min(2 * params.beam_width, model.vocab_size)
        self.step = SamplingParams(logprobs=num_logprobs, max_tokens=1, temperature=0, detokenize=False)

    def asked(self) -> list[list[int]]:
        """The beams that still grow."""
        limit = self.model.max_model_len if self.num_left else 0
        self.growing = [search for search in self.searches if search.beams and len(search.beams[0].tokens) < limit]
        return [beam.tokens for search in self.growing for beam in search.beams]

    def take(self, outputs: Sequence[RequestOutput]) -> None:
        self.num_left -= 1
        each = iter(outputs)
        for search in self.growing:
            search.extend([next(each) for _ in search.beams], self.end_ids)
            search.keep(self.params.beam_width, self._score)

    def best(self) -> list[list[BeamSearchSequence]]:
        """The best sequences of each prompt, best first."""
        return [search.best(self.params.beam_width, self._score) for search in self.searches]

    def _score(self, beam: BeamSearchSequence) -> float:
        length = len(beam.tokens) - (beam.tokens[-1] in self.end_ids)
        return beam.cum_logprob / max(length, 1) ** self.params.length_penalty
