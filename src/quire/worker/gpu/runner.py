"""Runs steps on a device: the plan becomes one array on the device, and the step two launches, forward and sample.

Called by the worker. Nothing in a step waits for the device: results are fetched when the core asks for them, while the next step
runs already. Knows rows and tensors; not requests, not why a step looks as it does.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quire.kv.specs import KVLayout
from quire.ops.elementwise import gather_rows
from quire.ops.mask import mask_logits
from quire.ops.ref.attention import AttentionTables
from quire.ops.sampling import Scratch, sample
from quire.ops.step import place_slots, place_tokens
from quire.ops.transfer import ToHost
from quire.sampling.logprobs import TokenLogprobs, token_logprobs
from quire.sampling.sampler import SampleMasks, Sampler
from quire.step import Masks, StepPlan, StepResult
from quire.worker.gpu.batch import Batch
from quire.worker.gpu.failure import told
from quire.worker.gpu.graphs import Graphs, fit, ladder
from quire.worker.gpu.inputs import Shape, StepInputs, decode_shape, mixed_shape
from quire.worker.gpu.masks import NOBODY, MaskStaging
from quire.worker.logprobs import LOGPROBS_AT_ONCE, entries, prompt_span

FIRST_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # recorded before the first request is served


@dataclass(frozen=True)
class SampleShape:
    num_samples: int
    random: bool
    masked: bool = False  # grammars have a say


@dataclass
class _Launched:
    """What `sample` needs of a forward pass."""

    plan: StepPlan
    hidden_TD: Tensor  # of all tokens, where prompt logprobs are owed; else nobody asks
    num_samples: int


class Runner:
    def __init__(
        self, model: nn.Module, layout: KVLayout, *, num_rows: int, max_tokens: int, max_len: int, vocab_size: int, like: Tensor
    ) -> None:
        """`like`: an empty tensor as hidden states are, [0, D]."""
        self.model, self.device, self.num_rows, self.max_tokens = model, like.device, num_rows, max_tokens
        self.batch = Batch(num_rows, max_len, layout.groups, vocab_size, self.device)
        self.inputs = StepInputs(model, layout.groups, num_rows, max_tokens, like)
        self.last_hidden = like.new_zeros(num_rows, like.shape[1])
        self.out_ids = torch.zeros(num_rows, dtype=torch.int32, device=self.device)
        scratch = Scratch(num_rows, vocab_size, self.device)
        self.sampler = Sampler(sample, mask_logits, self.batch.sampling, self.batch.tokens, scratch)
        self.forwards = Graphs(self._forward, self.device)
        self.samplings = Graphs(self._sample, self.device)
        self.row_sizes = ladder(num_rows, smallest=1, step=4, largest_step=16)
        self.token_sizes = ladder(max_tokens, smallest=64, step=64, largest_step=512)
        self.masks = MaskStaging(num_rows, vocab_size, self.device)
        self.launched: _Launched | None = None

    # -- getting ready ---------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def rehearse(self) -> None:
        """Runs the largest step, and one as it is decoded, on nobody's rows: kernels are compiled and loaded, libraries set up (which
        must not happen while a graph is recorded), memory is taken as it will be."""
        for shape in (mixed_shape(self.num_rows, self.max_tokens), decode_shape(self.num_rows), decode_shape(1)):
            self.inputs.fill(StepPlan(-1, [], [], [], [], [], []), shape)
            self._forward(shape)
        for random in (True, False):
            self._sample(SampleShape(self.num_rows, random))
        logits_SV = self.model.logits(self.last_hidden)
        nobody = torch.full((1,), NOBODY, dtype=torch.int32, device=self.device)
        mask_logits(logits_SV, nobody, nobody.expand(-(-logits_SV.shape[1] // 32))[None])
        self.sampler.choose(logits_SV, *self._samples(self.num_rows), random=True, restricted=True, penalized=True)
        copies = [logits_SV.float() for _ in range(3)]  # what editing and logprobs hold at once
        del copies

    @torch.inference_mode()
    def get_ready(self) -> None:
        """The commonest shapes are recorded now, the largest of them first so that the others fit into its memory; the rest later."""
        if not self.forwards.enabled:
            return
        first = [size for size in self.row_sizes if size in FIRST_ROWS or size == self.num_rows]
        decodes = [decode_shape(size) for size in sorted(self.row_sizes, key=lambda s: (s not in first, -s))]
        mixed = [mixed_shape(self.num_rows, size) for size in reversed(self.token_sizes)]
        samplings = [SampleShape(shape.num_samples, random) for shape in decodes for random in (True, False)]
        if self.inputs.recordable:
            self.forwards.want(mixed[:1] + decodes + mixed[1:], now=1 + len(first))
        self.samplings.want(samplings, now=2 * len(first))

    def close(self) -> None:
        """Lets go of what the model still names, and of what refers back here."""
        context = self.model.context
        context.tables.clear()
        context.slots_T.clear()
        context.wanted = self.forwards = self.samplings = self.model = None

    # -- forward ---------------------------------------------------------------------------------------------------------

    @told
    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> None:
        self.batch.update(plan)
        shape, recorded = self._shape(plan)
        if plan.rows:  # empty steps are legal
            self.inputs.fill(plan, shape)
        if recorded:
            self.forwards.replay(shape)
        hidden_TD = self.last_hidden[:0] if recorded or not plan.rows else self._forward(shape)
        self.launched = _Launched(plan, hidden_TD, sum(plan.samples))

    def _shape(self, plan: StepPlan) -> tuple[Shape, bool]:
        """The shape of a recorded graph that fits, else the step's own."""
        exact = self.inputs.exact_shape(plan, wants_all=self.batch.owes_prompt_logprobs(plan))
        if exact.fresh or exact.wants_all:
            return exact, False
        if exact.decode and exact.num_samples == exact.num_rows:
            padded = decode_shape(fit(self.row_sizes, exact.num_rows))
        else:
            padded = mixed_shape(self.num_rows, fit(self.token_sizes, exact.num_tokens))
        return (padded, True) if padded in self.forwards else (exact, False)

    def _forward(self, shape: Shape) -> Tensor:
        """From the step's inputs on the device to its hidden states; those that choose tokens are also kept apart."""
        inputs, batch, count = self.inputs, self.batch, shape.num_tokens
        longest = 1 if shape.decode else count
        step = inputs.rows[: shape.num_rows], inputs.starts[: shape.num_rows], inputs.query_starts[: shape.num_rows + 1]
        token_ids, positions = inputs.token_ids[:count], inputs.positions[:count]
        place_tokens(*step, batch.tokens, token_ids, positions, longest)
        for group, table, slots in zip(inputs.groups, batch.tables, inputs.slots):
            place_slots(*step, table, group.block_size, slots[:count], longest)
        context = self.model.context
        context.slots_T[:] = [slots[:count] for slots in inputs.slots]
        context.tables[:] = [self._tables(group_idx, shape, longest) for group_idx in range(len(inputs.groups))]
        sample_at = inputs.sample_at[: shape.num_samples]
        context.wanted = None if shape.decode or shape.wants_all else sample_at
        hidden = self.model(token_ids, positions)
        if context.wanted is None:
            gather_rows(hidden, sample_at, out=self.last_hidden[: shape.num_samples])
        else:
            self.last_hidden[: shape.num_samples] = hidden
        return hidden

    def _tables(self, group_idx: int, shape: Shape, longest: int) -> AttentionTables:
        inputs, rows, table = self.inputs, self.inputs.rows[: shape.num_rows], self.batch.tables[group_idx]
        if not inputs.reads_work[group_idx]:  # once per step, not in every layer; padding has no context in whichever row it gets
            table, rows = table.index_select(0, rows.clamp(min=0)), None
        return AttentionTables(
            query_starts=inputs.query_starts[: shape.num_rows + 1], context_lens=inputs.context_lens[: shape.num_rows],
            block_table=table, block_size=inputs.groups[group_idx].block_size, max_query_len=longest, max_context_len=0,
            rows=rows, work=inputs.work(group_idx, shape), fresh=shape.fresh,
        )  # fmt: skip

    def mask_memory(self, num_rows: int, num_words: int, is_new: bool) -> memoryview | None:
        return self.masks.memory(num_rows, num_words, is_new)

    # -- sample ----------------------------------------------------------------------------------------------------------

    @told
    @torch.inference_mode()
    def sample(self, masks: Masks | None = None) -> "Pending":
        """Chooses tokens for the rows of the last forward that ask for one; they are appended on the device at once."""
        launched, self.launched = self.launched, None
        plan, sampling = launched.plan, self.batch.sampling
        pending = Pending(plan)
        if self.batch.owes_prompt_logprobs(plan):
            self._prompt_logprobs(launched, pending)
        if launched.num_samples:
            rows = [row for row, samples in zip(plan.rows, plan.samples) if samples]
            size, random, special = fit(self.row_sizes, len(rows)), not sampling.random.isdisjoint(rows), sampling.special(rows)
            key = SampleShape(size, random, masked=masks is not None)
            if masks is not None:
                self.masks.bring(masks)
            if key in self.samplings and not special:
                self.samplings.replay(key)
            else:
                self._sample_specially(rows, key, pending)
            if key.masked and not special:
                self.samplings.ask(key)
        pending.token_ids = ToHost(self.out_ids[: launched.num_samples])
        for graphs in (self.samplings, self.forwards):
            graphs.record_next()
        return pending

    def _sample(self, shape: SampleShape) -> None:
        """For rows that ask for no more than a temperature and a grammar."""
        logits_SV = self.model.logits(self.last_hidden[: shape.num_samples])
        if shape.masked:
            mask_logits(logits_SV, *self._masks(shape.num_samples))
        samples = self._samples(shape.num_samples)
        self.sampler.choose(logits_SV, *samples, random=shape.random, restricted=False, penalized=False)

    def _sample_specially(self, rows: list[int], shape: SampleShape, pending: "Pending") -> None:
        """With whatever the rows ask for."""
        count = len(rows)
        logits_SV, masks = self.model.logits(self.last_hidden[:count]), self._masks(count) if shape.masked else None
        logprobs = self.sampler.sample(logits_SV, rows, *self._samples(count), masks)
        if logprobs is not None:
            pending.add_logprobs(*logprobs)

    def _masks(self, count: int) -> SampleMasks:
        return SampleMasks(self.masks.places[:count], self.masks.words)

    def _samples(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Row and position of each sample, and where its token goes."""
        return self.inputs.sample_rows[:count], self.inputs.sample_positions[:count], self.out_ids[:count]

    def _prompt_logprobs(self, launched: _Launched, pending: "Pending") -> None:
        """For rows that want them: how likely each prompt token was, given those before it."""
        plan, batch = launched.plan, self.batch
        query_start = 0
        for idx, (row, start, count) in enumerate(zip(plan.rows, plan.starts, plan.num_tokens)):
            wanted, delivered = batch.prompt_logprobs.get(row, (None, 0))
            first, last = prompt_span(start, count, delivered, batch.prompt_lens[row])
            if wanted is not None and first <= last:
                offset = query_start - start
                hidden_TD = launched.hidden_TD[offset + first - 1 : offset + last]
                targets_T = batch.tokens[row, first : last + 1].long()
                for at in range(0, len(targets_T), LOGPROBS_AT_ONCE):
                    span = slice(at, at + LOGPROBS_AT_ONCE)
                    columns = token_logprobs(self.model.logits(hidden_TD[span]).float(), targets_T[span], wanted)
                    pending.add_prompt_logprobs(idx, wanted, targets_T[span], columns)
            query_start += count


class Pending:
    """A step's results, on their way from the device."""

    token_ids: ToHost

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.logprobs: tuple[list[int], list[int], ToHost] | None = None
        self.prompt_logprobs: list[tuple[int, int, ToHost]] = []

    def add_logprobs(self, places: list[int], num_top: list[int], columns: TokenLogprobs) -> None:
        """`places`: among the rows that chose a token."""
        self.logprobs = places, num_top, ToHost(*columns)

    def add_prompt_logprobs(self, idx: int, num_top: int, targets_T: Tensor, columns: TokenLogprobs) -> None:
        """`idx`: in the plan's rows; the parts of a row come in order."""
        self.prompt_logprobs.append((idx, num_top, ToHost(targets_T, *columns)))

    @told
    def result(self) -> StepResult:
        token_ids = self.token_ids.wait()[0].tolist()
        which = [idx for idx, samples in enumerate(self.plan.samples) if samples]
        result = StepResult(self.plan.step_id, [[] for _ in self.plan.rows])
        for idx, token_id in zip(which, token_ids, strict=True):
            result.token_ids[idx] = [token_id]
        if self.logprobs is not None:
            places, num_top, columns = self.logprobs
            found = entries([token_ids[i] for i in places], TokenLogprobs(*columns.wait()), num_top)
            result.logprobs = {which[i]: [entry] for i, entry in zip(places, found)}
        for idx, num_top, columns in self.prompt_logprobs:
            targets, *rest = columns.wait()
            found = entries(targets.tolist(), TokenLogprobs(*rest), [num_top] * len(targets))
            result.prompt_logprobs.setdefault(idx, []).extend(found)
        return result
