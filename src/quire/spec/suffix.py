"""Suffix decoding: what followed a text's last tokens before, in itself or in recent answers, is guessed again.

For traffic that repeats itself, such as agents and edits. The rule is arctic-inference's, on the latest places only: of
the matches of every length, each drafts so many tokens as it is long (times a factor), always the most frequent next
one; the length whose drafts are likeliest in sum wins. Runs in the core; answers are shared only among requests of one
API key and cache_salt.
"""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

from quire.config.speculation import Speculation

MAX_PLACES = 16  # at which the last two tokens occurred, the latest ones, that are compared
MAX_LENGTHS = 4  # of matches, the longest ones, that are tried
INDEXED_AT_ONCE = 8192  # tokens of a long prompt that one call looks at
# Recent answers are kept in two parts, of which the older one is dropped when the newer one is full.
PART_TOKENS = 1 << 17
MAX_SHARED_TOKENS = 1 << 19  # of all keys and salts together: some 130 MB
SCOPE_TOKENS = 256  # what a key or salt costs beside its answers, in tokens
SEPARATOR = -1  # between answers: no token


class Text:
    """Tokens, and where pairs of neighbours end in them."""

    def __init__(self, token_ids: list[int]) -> None:
        """`token_ids` may grow; `index` says when its new tokens are to be found, too."""
        self.token_ids = token_ids
        self.num_indexed = 0
        self.ends: dict[tuple[int, int], list[int]] = {}

    def index(self, most: int = 1 << 62) -> None:
        """Of the next tokens, `most` at most."""
        first, end = max(1, self.num_indexed), min(len(self.token_ids), self.num_indexed + most)
        for at, pair in enumerate(pairwise(self.token_ids[first - 1 : end]), first + 1):
            ends = self.ends.setdefault(pair, [])
            ends.append(at)
            if len(ends) > 2 * MAX_PLACES:
                del ends[:MAX_PLACES]
        self.num_indexed = end

    def matches(self, pattern: Sequence[int]) -> list[tuple[int, int]]:
        """(how many tokens before it are the pattern's last ones, where it ends) of places, the latest first."""
        found = []
        token_ids = self.token_ids
        for end in reversed(self.ends.get((pattern[-2], pattern[-1]), [])[-MAX_PLACES - 1 :]):
            if end == len(token_ids):
                continue  # nothing follows: the pattern itself
            length, most = 2, min(len(pattern), end)
            while length < most and token_ids[end - 1 - length] == pattern[-1 - length]:
                length += 1
            found.append((length, end))
        return found


def likeliest(
    texts: Sequence[Text], pattern: Sequence[int], most: int, factor: float, min_probability: float
) -> tuple[float, list[int]]:
    """(sum of their probabilities, tokens) that followed the pattern in these texts."""
    matches = [(length, end, text.token_ids) for text in texts for length, end in text.matches(pattern)]
    best: tuple[float, list[int]] = 0.0, []
    for length in sorted({length for length, _, _ in matches}, reverse=True)[:MAX_LENGTHS]:
        places = [(end, token_ids) for other, end, token_ids in matches if other >= length]
        found = _walk(places, min(most, int(length * factor + 1e-6)), min_probability)
        if found[0] > best[0]:
            best = found
    return best


def _walk(places: list[tuple[int, list[int]]], most: int, min_probability: float) -> tuple[float, list[int]]:
    """From all places at once, always to the most frequent next token."""
    score, probability = 0.0, 1.0
    drafts: list[int] = []
    while len(drafts) < most:
        following: dict[int, list[tuple[int, list[int]]]] = {}
        for end, token_ids in places:
            if end < len(token_ids) and token_ids[end] != SEPARATOR:
                following.setdefault(token_ids[end], []).append((end + 1, token_ids))
        if not following:
            break
        token_id = max(following, key=lambda token_id: len(following[token_id]))
        probability *= len(following[token_id]) / len(places)
        if probability < min_probability:
            break
        drafts.append(token_id)
        score += probability
        places = following[token_id]
    return score, drafts


class Answers:
    """Recent answers that the same requests may see."""

    def __init__(self, max_answers: int) -> None:
        self.max_answers = max_answers
        self.parts = [Text([]), Text([])]  # the older one first
        self.counts = [0, 0]  # answers in each

    def add(self, token_ids: list[int]) -> None:
        is_full = len(self.parts[1].token_ids) >= PART_TOKENS or self.counts[1] >= max(1, self.max_answers // 2)
        if is_full:
            self.parts, self.counts = [self.parts[1], Text([])], [self.counts[1], 0]
        if self.num_answers == self.max_answers:
            self.parts[0], self.counts[0] = Text([]), 0
        newer = self.parts[1]
        newer.token_ids += [*token_ids[-PART_TOKENS:], SEPARATOR]
        newer.index()
        self.counts[1] += 1

    @property
    def num_answers(self) -> int:
        return sum(self.counts)

    @property
    def num_tokens(self) -> int:
        return SCOPE_TOKENS + sum(len(part.token_ids) for part in self.parts)


class Recent:
    """The recent answers of all keys and salts."""

    def __init__(self, speculation: Speculation) -> None:
        self.max_answers = speculation.max_cached_requests
        self.by_scope: OrderedDict[tuple[str, str], Answers] = OrderedDict()  # the longest unused first
        self.num_tokens = 0
        self.num_answers = 0

    def of(self, scope: tuple[str, str]) -> list[Text]:
        answers = self.by_scope.get(scope)
        return [] if answers is None else answers.parts

    def add(self, scope: tuple[str, str], token_ids: list[int]) -> None:
        if not self.max_answers or not token_ids:
            return
        answers = self._take(scope) if scope in self.by_scope else Answers(self.max_answers)
        answers.add(token_ids)
        self.by_scope[scope] = answers
        self.num_tokens += answers.num_tokens
        self.num_answers += answers.num_answers
        while self.num_tokens > MAX_SHARED_TOKENS or self.num_answers > self.max_answers:
            self._take(next(iter(self.by_scope)))

    def _take(self, scope: tuple[str, str]) -> Answers:
        answers = self.by_scope.pop(scope)
        self.num_tokens -= answers.num_tokens
        self.num_answers -= answers.num_answers
        return answers


class Suffix:
    """Of one request. `recent`: where its answer goes when it is finished, and others' come from; None: nowhere."""

    def __init__(
        self,
        speculation: Speculation,
        num_prompt_tokens: int,
        recent: Recent | None = None,
        scope: tuple[str, str] = ("", ""),
    ) -> None:
        self.speculation = speculation
        self.text = Text([])
        self.num_prompt_tokens = num_prompt_tokens
        self.recent = recent
        self.scope = scope

    def propose(self, token_ids: list[int], most: int) -> list[int]:
        text, rule = self.text, self.speculation
        text.token_ids = token_ids
        text.index(INDEXED_AT_ONCE)
        if text.num_indexed < len(token_ids) or len(token_ids) < 2:
            return []
        pattern = token_ids[-max(2, rule.max_tree_depth) :]
        limits = most, rule.max_spec_factor, rule.min_token_prob
        own = likeliest([text], pattern, *limits)
        shared = likeliest(self.recent.of(self.scope), pattern, *limits) if self.recent is not None else (0.0, [])
        return max(own, shared, key=lambda found: found[0])[1]

    def finish(self, token_ids: list[int]) -> None:
        if self.recent is not None:
            self.recent.add(self.scope, token_ids[self.num_prompt_tokens :])
