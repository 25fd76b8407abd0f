"""Every schema of the official JSON-Schema-Test-Suite: is it accepted, and do the outputs generated under it validate?

    python -m benchmarks.json_schema_suite --suite json/tests \\
        [--engine auto] [--sampler random|model] [--draft draft2020-12]

The suite is the folder `json/tests` of jsonschema's source package; the validator is `jsonschema[format]` itself.
`random` draws tokens under the masks, over the default model's vocabulary; `model` asks the default model itself, at
temperature 1.
"""

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import numpy

from quire.errors import RequestError
from quire.messages import Vocabulary
from quire.structured.engines.base import Grammar
from quire.structured.grammars.formats import HONOURED
from quire.structured.running.trial import Lowered, Setup, Trial
from quire.structured.spec import GrammarSpec, check

DRAFTS = {
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
    "draft7": "http://json-schema.org/draft-07/schema#",
}
MAX_TOKENS = 600
AT_ONCE = 8  # schemas in one batch
_ENDS = (b'"', b"}", b"]", b'"}', b'"]', b"}}", b"]}", b'"}]', b"e", b"l", b"0", b"1")


class Case(NamedTuple):
    group: str  # the keyword
    name: str
    schema: Any


def cases(suite: Path, draft: str) -> Iterator[Case]:
    for path in sorted((suite / draft).glob("*.json")):
        for case in json.loads(path.read_text()):
            schema = case["schema"]
            if isinstance(schema, dict):
                schema = {"$schema": DRAFTS[draft], **schema}
            yield Case(path.stem, case["description"], schema)


def vocabulary() -> tuple[Any, Vocabulary]:
    from quire.checkpoint.find import find
    from quire.frontend.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_files(find("smollm2"))
    tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
    return tokenizer, Vocabulary(tokens, sorted(tokenizer.special_ids), sorted(tokenizer.eos_token_ids), len(tokens))


def validator(schema: Any) -> Callable[[str], str | None]:
    """A function that says what is wrong with a text. Numbers are read as decimals: 0.07 is a multiple of 0.01."""
    from jsonschema import FormatChecker
    from jsonschema.validators import validator_for

    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    kind = validator_for(exact, default=validator_for({"$schema": DRAFTS["draft2020-12"]}))
    formats = FormatChecker(())
    formats.checkers = {name: how for name, how in kind.FORMAT_CHECKER.checkers.items() if name in HONOURED}
    checker = kind(exact, format_checker=formats)

    def problem(text: str) -> str | None:
        try:
            value = json.loads(text, parse_float=Decimal)
        except ValueError as error:
            return f"not JSON: {error}"
        return next((error.message for error in checker.iter_errors(value)), None)

    return problem


class RandomSampler:
    """Tokens at random under the masks, leaning towards those that close something, so that samples end."""

    def __init__(self, vocab: Vocabulary, seed: int = 0) -> None:
        self._vocabulary = vocab
        self._random = numpy.random.default_rng(seed)
        self._mask = numpy.zeros(vocab.num_words, dtype=numpy.int32)
        self._ends = numpy.array([token_id for token_id, token in enumerate(vocab.tokens) if token in _ENDS])
        self.fill_s: list[float] = []

    def sample(self, grammar: Grammar) -> str | None:
        """A finished output; None if it was cut."""
        matcher = grammar.matcher()
        out: list[bytes] = []
        for count in range(MAX_TOKENS):
            started = time.perf_counter()
            if not matcher.fill(self._mask):
                raise RuntimeError(f"dead end after {b''.join(out)!r}")
            self.fill_s.append(time.perf_counter() - started)
            token_id = self._choose(matcher.is_complete, hurry=count > 60)
            if not matcher.accept(token_id):
                raise RuntimeError(f"the mask allows a token that is not accepted after {b''.join(out)!r}")
            if matcher.terminated:
                return b"".join(out).decode()
            out.append(self._vocabulary.tokens[token_id])
        return None

    def _choose(self, may_end: bool, hurry: bool) -> int:
        if may_end and self._random.random() < 0.5:
            return self._vocabulary.stop_ids[0]
        bits = numpy.unpackbits(self._mask.view(numpy.uint8), bitorder="little")
        if self._random.random() < (0.95 if hurry else 0.3):
            ends = self._ends[bits[self._ends] == 1]
            if len(ends):
                return int(self._random.choice(ends))
        return int(self._random.choice(numpy.flatnonzero(bits)))


class Outcome(NamedTuple):
    case: Case
    refused: str = ""  # why
    texts: tuple[str, ...] = ()
    num_cut: int = 0
    violations: tuple[str, ...] = ()


def judged(case: Case, texts: list[str | None]) -> Outcome:
    problem = validator(case.schema)
    finished = tuple(text for text in texts if text is not None)
    problems = [(text, problem(text)) for text in finished]
    violations = tuple(f"{text[:200]!r}: {what}" for text, what in problems if what)
    return Outcome(case, texts=finished, num_cut=len(texts) - len(finished), violations=violations)


def lowered(case: Case, trial: Trial) -> Lowered:
    spec = GrammarSpec("json", json.dumps(case.schema))
    try:
        check(spec)
    except RequestError as error:
        return Lowered(error=str(error))
    return trial.run(spec)


def by_random(accepted: list[tuple[Case, Lowered]], trial: Trial, num_samples: int) -> Iterator[Outcome]:
    sampler = RandomSampler(trial.vocabulary)
    for case, low in accepted:
        grammar = trial.engines[low.engine].compile_lowered(low.spec)
        yield judged(case, [sampler.sample(grammar) for _ in range(num_samples)])
    print("fill: median {:.0f} us, p99 {:.0f} us, worst {:.1f} ms".format(*_quantiles(sampler.fill_s)))


def by_model(accepted: list[tuple[Case, Lowered]], engine: str, num_samples: int) -> Iterator[Outcome]:
    """Several schemas at a time, so that the batch is full."""
    from tqdm import tqdm

    from quire import LLM, SamplingParams, StructuredOutputs

    with LLM("smollm2", structured_outputs_backend=engine) as llm, tqdm(total=len(accepted)) as bar:
        for start in range(0, len(accepted), AT_ONCE):
            batch = [case for case, _ in accepted[start : start + AT_ONCE]]
            chats, params = [], []
            for case in batch:
                ask = f"Answer with JSON for this schema, as short as you can: {json.dumps(case.schema)[:1500]}"
                chats.append([{"role": "user", "content": ask}])
                shape = StructuredOutputs(json=case.schema)
                sampling = {"temperature": 1.0, "max_tokens": MAX_TOKENS, "seed": 0}
                params.append(SamplingParams(n=num_samples, structured_outputs=shape, **sampling))
            for case, answer in zip(batch, llm.chat(chats, params, use_tqdm=False)):
                texts = [output.text if output.finish_reason == "stop" else None for output in answer.outputs]
                yield judged(case, texts)
            bar.update(len(batch))


def _says_unsatisfiable(refusal: str) -> bool:
    return "no JSON value satisfies" in refusal or "nsatisfiable" in refusal


def report(outcomes: list[Outcome]) -> int:
    """Prints the table; gives the number of violations."""
    groups = dict.fromkeys(outcome.case.group for outcome in outcomes)
    refused = [outcome for outcome in outcomes if outcome.refused]
    unsatisfiable = [outcome for outcome in refused if _says_unsatisfiable(outcome.refused)]
    unsupported = [outcome for outcome in refused if not _says_unsatisfiable(outcome.refused)]
    served_groups = {outcome.case.group for outcome in outcomes if outcome not in unsupported}
    lost_groups = [group for group in groups if group not in served_groups]
    num_violations = sum(len(outcome.violations) for outcome in outcomes)
    for outcome in outcomes:
        for violation in outcome.violations[:2]:
            case = outcome.case
            print(f"VIOLATION {case.group}: {case.name}: {json.dumps(case.schema)[:300]}\n    {violation[:400]}")
    reasons = Counter(f"{outcome.case.group}: {outcome.refused[:100]}" for outcome in unsupported)
    for reason, count in reasons.most_common():
        print(f"refused {count:3}  {reason}")
    num_samples = sum(len(outcome.texts) for outcome in outcomes)
    num_cut = sum(outcome.num_cut for outcome in outcomes)
    print(
        f"schemas {len(outcomes)}: accepted {len(outcomes) - len(refused)}, "
        f"refused {len(refused)} ({len(unsatisfiable)} of them satisfied by no value)"
    )
    print(f"samples {num_samples}, cut {num_cut}, violations {num_violations}")
    print(f"groups {len(groups)}: refused altogether {len(lost_groups)} ({', '.join(lost_groups) or 'none'})")
    return num_violations


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", type=Path, required=True)
    parser.add_argument("--draft", choices=[*DRAFTS, "all"], default="all")
    parser.add_argument("--engine", choices=["auto", "xgrammar", "llguidance"], default="auto")
    parser.add_argument("--sampler", choices=["random", "model"], default="random")
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--group", help="only this keyword")
    args = parser.parse_args()
    drafts = list(DRAFTS) if args.draft == "all" else [args.draft]
    chosen = [case for draft in drafts for case in cases(args.suite, draft) if args.group in (None, case.group)]
    trial = Trial(Setup(args.engine, vocabulary()[1], timeout_s=10.0))
    tried = [(case, lowered(case, trial)) for case in chosen]
    accepted = [(case, low) for case, low in tried if low.spec is not None]
    if args.sampler == "model":
        sampled = by_model(accepted, args.engine, args.samples)
    else:
        sampled = by_random(accepted, trial, args.samples)
    outcomes = [*sampled, *(Outcome(case, refused=low.error) for case, low in tried if low.spec is None)]
    raise SystemExit(1 if report(outcomes) else 0)


def _quantiles(seconds: list[float]) -> tuple[float, float, float]:
    return float(numpy.median(seconds)) * 1e6, float(numpy.quantile(seconds, 0.99)) * 1e6, max(seconds) * 1e3


if __name__ == "__main__":
    main()
