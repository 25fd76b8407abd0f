"""A logits processor of one's own: requests that bring a `target_token` get that token and no other."""

from collections.abc import Sequence

import torch

from quire import LLM, LogitsProcessor, SamplingParams


class OnlyTarget(LogitsProcessor):
    def __init__(self, vocab_size: int, device: torch.device) -> None:
        super().__init__(vocab_size, device)
        self.targets: dict[int, int] = {}  # by row

    def wants(self, row: int, params: SamplingParams, prompt_token_ids: Sequence[int]) -> bool:
        self.targets.pop(row, None)
        if (target := params.extra_args.get("target_token")) is not None:
            self.targets[row] = target
        return row in self.targets

    def apply(self, logits: torch.Tensor, rows: Sequence[int], tokens: torch.Tensor, lengths: torch.Tensor) -> None:
        for idx, row in enumerate(rows):
            logits[idx, self.targets[row]] = 1e9


def main() -> None:
    # Workers import it by name: this file must be found, as it is where it runs.
    with LLM("smollm2", max_model_len=512, logits_processors=["logits_processor:OnlyTarget"]) as llm:
        target = llm.get_tokenizer().encode(" sea")[0]
        params = [
            SamplingParams(temperature=0, max_tokens=6, extra_args={"target_token": target}),
            SamplingParams(temperature=0, max_tokens=6),
        ]
        for output in llm.generate(["She looked at the"] * 2, params, use_tqdm=False):
            print(repr(output.outputs[0].text))


if __name__ == "__main__":
    main()
