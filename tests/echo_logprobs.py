"""An echo model with log-probabilities, as large as a request may ask for: what they cost without a model's time.

Used as `--executor tests.echo_logprobs`.
"""

from quire.executor.echo import EchoExecutor
from quire.params import SamplingParams
from quire.step import Masks, StepPlan, TokenLogprobs


class EchoLogprobs(EchoExecutor):
    def __init__(self, config) -> None:
        super().__init__(config)
        self.params: dict[int, SamplingParams] = {}

    def forward(self, plan: StepPlan) -> None:
        super().forward(plan)
        self.params |= {start.row: start.params for start in plan.new_rows}

    def sample(self, plan: StepPlan, masks: Masks | None = None):
        done = super().sample(plan, masks)
        for idx, (row, start, count) in enumerate(zip(plan.rows, plan.starts, plan.num_tokens)):
            params = self.params[row]
            prompt, num_prompt = self.prompts[row]
            if params.logprobs is not None:
                new_ids = done.step.token_ids[idx]
                done.step.logprobs[idx] = [_logprobs(token_id, params.logprobs) for token_id in new_ids]
            if params.prompt_logprobs is not None:
                old_ids = prompt[start + 1 : min(start + count + 1, num_prompt)]
                done.step.prompt_logprobs[idx] = [_logprobs(token_id, params.prompt_logprobs) for token_id in old_ids]
        return done


def _logprobs(token_id: int, count: int) -> TokenLogprobs:
    top_ids = [100 + rank for rank in range(count)]
    top_logprobs = [-0.5 - rank / 8 for rank in range(count)]
    return TokenLogprobs(token_id, -0.5, 1, top_ids, top_logprobs)


EXECUTOR = EchoLogprobs
