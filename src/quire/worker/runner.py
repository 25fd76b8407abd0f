"""Runs steps. A plan becomes one array on the device; a step is two launches, forward and sample.

Called by the worker. Nothing in a step waits for the device: results are fetched when the core asks for them, while the
next step is running. What differs between kinds of devices (kernels, recordings, how masks are copied) is in
`cpu/device.py` and `gpu/device.py`. Knows rows and tensors, not requests and not the reasons for a plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from quire.distributed.base import ALONE, Ranks
from quire.errors import EngineError
from quire.kv.specs import CacheSpec, Group
from quire.layers.attention import CacheLayer
from quire.layers.attention.base import AttentionBackend, Limits, StepShape
from quire.layers.decoder import CausalLM
from quire.ops.transfer import ToHost, on_device
from quire.sampling.logprobs import LogprobColumns, token_logprobs
from quire.sampling.sampler import Sampler
from quire.spec.base import NoDrafter
from quire.step import VECTOR, Masks, StepPlan, StepResult
from quire.worker.batch import Batch
from quire.worker.build import Model
from quire.worker.device import Device
from quire.worker.failure import explain_gpu_errors
from quire.worker.inputs import NO_ROW, SampleShape, StepInputs, decode_shape, mixed_shape
from quire.worker.kv_cache import KVMemory, cache_layers
from quire.worker.logprobs import LOGPROBS_AT_ONCE, entries, prompt_span


@dataclass
class _Launched:
    """What `sample` needs of a forward pass."""

    plan: StepPlan
    hidden_TD: Tensor  # of all tokens, if the step computes prompt logprobs; else not used


class Runner:
    def __init__(
        self,
        model: Model,
        memory: KVMemory,
        device: Device,
        limits: Limits,
        vocab_size: int,
        drafter: NoDrafter,
        batch: Batch | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """`limits.hidden_like`: an empty tensor [0, D] with the dtype and device of hidden states.

        `batch`: another runner's, whose rows this one reads and extends; None: its own.
        """
        self.model = model
        self.memory = memory
        self.device = device
        self.limits = limits
        self.drafter = drafter
        self.ranks = ranks
        num_rows, num_samples = limits.num_rows, limits.num_samples
        where = limits.hidden_like.device
        if batch is None:
            batch = Batch(num_rows, limits.max_len, memory.groups, vocab_size, where, device.scatter_segments)
        self.batch = batch
        layers = cache_layers(model).values()
        used = sorted({layer.group_idx for layer in layers})  # groups: another model may have others
        for layer in layers:
            layer.group_idx = used.index(layer.group_idx)
        self.groups = [memory.groups[group_idx] for group_idx in used]
        self.tables = [batch.tables[group_idx] for group_idx in used]
        self.group_names = [batch.table_names[group_idx] for group_idx in used]
        self.vocab_size = vocab_size
        # If only the device knows how many drafts were accepted, it corrects the plan's starts by these.
        self.shifts: Tensor | None = None
        if limits.num_drafts and device.known_lengths(self.batch.lengths) is None:
            self.shifts = torch.zeros(num_rows, dtype=torch.int32, device=where)
        self.inputs = StepInputs(group_backends(model, self.groups, limits), self.tables, limits, self.shifts)
        self.last_hidden = limits.hidden_like.new_zeros(num_samples, limits.hidden_like.shape[1])
        self.received: Tensor | None = None  # where the stage before writes what this one begins with
        if ranks.before is not None and isinstance(model, CausalLM):
            self.received = limits.hidden_like.new_zeros(limits.max_tokens, model.stream_size)
        self.out_ids = torch.zeros(num_samples, dtype=torch.int32, device=where)
        # Of each sample, whether its logits are numbers. Only float16 is so small that they may not be.
        is_small = limits.hidden_like.dtype == torch.float16
        self.is_finite = torch.ones(num_samples, dtype=torch.bool, device=where) if is_small else None
        self.num_accepted = torch.zeros(num_rows, dtype=torch.int32, device=where)  # drafts of each producing row
        scratch = device.Scratch(num_samples, vocab_size, where)
        self.sampler = Sampler(device.sample, device.mask_logits, self.batch.sampling, self.batch.tokens, scratch)
        self.masks = device.MaskStaging(num_samples, vocab_size, where)
        self.recordings = device.Recordings(self)
        self.launched: _Launched | None = None
        self.small: Runner | None = None  # runs a draft model on the same rows

    # -- getting ready ---------------------------------------------------------------------------------------

    @torch.inference_mode()
    def rehearse(self) -> None:
        """Runs the largest step, and steps of one token per row, on padding rows.

        This compiles and loads kernels and sets up libraries, which must not happen while a graph is recorded, and
        allocates as much memory as later steps will.
        """
        num_rows, num_samples = self.limits.num_rows, self.limits.num_samples
        for shape in (mixed_shape(self.limits, self.limits.max_tokens), decode_shape(num_rows), decode_shape(1)):
            self.inputs.fill(StepPlan(-1, [], [], [], [], [], []), shape)
            self.compute(shape)
        if not self.ranks.is_last:
            return
        for random in (True, False):
            self.choose(SampleShape(num_samples, random))
        logits_SV = self.model.logits(self.last_hidden)
        no_sample = torch.full((1,), NO_ROW, dtype=torch.int32, device=logits_SV.device)
        no_words = no_sample.expand(-(-logits_SV.shape[1] // 32))[None]
        self.device.mask_logits(logits_SV, no_sample, no_words)
        self.sampler.choose(logits_SV, *self._samples(num_samples), random=True, restricted=True, penalized=True)
        copies = [logits_SV.float() for _ in range(3)]  # as many as editing and logprobs need at once
        del copies
        if self.small is not None:
            self.small.rehearse()

    @torch.inference_mode()
    def get_ready(self) -> None:
        self.recordings.get_ready()
        if self.small is not None:
            self.small.get_ready()

    def close(self) -> None:
        """Drops the references to memory that the model still has, and those that refer back to this runner."""
        if self.small is not None:
            self.small.close()
        context = self.model.context
        context.tables.clear()
        context.slots_T.clear()
        context.output_tokens = context.received = None
        for layer in cache_layers(self.model).values():
            layer.detach_cache()
        del self.recordings, self.model, self.memory

    # -- forward ---------------------------------------------------------------------------------------------

    @explain_gpu_errors
    @torch.inference_mode()
    def forward(self, plan: StepPlan, places: Sequence[int] = ()) -> None:
        """`places`: how far after its last token each row begins, if only the device knows where that is; empty: 0."""
        self.batch.update(plan)
        self.memory.move(plan.moves)
        hidden_TD = self.last_hidden[:0]
        if plan.rows:  # empty steps are legal
            lengths = self.device.known_lengths(self.batch.lengths) if self.drafter.num_drafts else None
            wants_all = self.batch.owes_prompt_logprobs(plan)
            apart = plan.only_verifies and not wants_all
            exact = self.inputs.exact_shape(plan, wants_all, apart)
            recorded = self.recordings.find(exact)
            self.inputs.fill(plan, recorded or exact, lengths, apart, places)
            hidden_TD = self.compute(exact) if recorded is None else self.recordings.forward(recorded)
            self.drafter.see(plan)
        self.launched = _Launched(plan, hidden_TD)

    def compute(self, shape: StepShape) -> Tensor:
        """Computes hidden states from the step's inputs on the device, and keeps those that choose tokens."""
        self.begin(shape)
        hidden_TD = self.run_model(shape)
        self.end(hidden_TD, shape)
        return hidden_TD

    def begin(self, shape: StepShape) -> None:
        """All that the model reads is in its place."""
        self.place(shape)
        if self.ranks.before is not None and self.received is not None:
            self.ranks.before.receive(self.received[: shape.num_tokens])

    def end(self, hidden_TD: Tensor, shape: StepShape) -> None:
        """Hands on what the model computed: to the next stage, or to the choice of tokens."""
        if self.ranks.after is not None:
            self.ranks.after.send(hidden_TD)
        else:
            self.keep(hidden_TD, shape)

    def place(self, shape: StepShape) -> None:
        """Computes the id, position and slots of each token."""
        inputs = self.inputs
        count = shape.num_tokens
        step = inputs.rows[: shape.num_rows], inputs.starts[: shape.num_rows], inputs.query_starts[: shape.num_rows + 1]
        if self.shifts is not None:
            places, context_lens = inputs.places[: shape.num_rows], inputs.context_lens[: shape.num_rows]
            self.device.correct_starts(*step, places, self.batch.lengths, context_lens, self.shifts)
        self.device.place_tokens(
            *step, self.batch.tokens, inputs.token_ids[:count], inputs.positions[:count], shape.longest
        )
        for group, table, slots in zip(self.groups, self.tables, inputs.slots):
            self.device.place_slots(*step, table, group.block_size, slots[:count], shape.longest)
        if self.shifts is not None:
            sample_at = inputs.sample_at[: shape.num_samples]
            self.device.place_samples(sample_at, inputs.positions, inputs.sample_positions[: shape.num_samples])

    def run_model(self, shape: StepShape) -> Tensor:
        inputs = self.inputs
        count = shape.num_tokens
        context = self.model.context
        context.slots_T[:] = [slots[:count] for slots in inputs.slots]
        context.tables[:] = [backend.tables(shape) for backend in inputs.backends]
        context.received = None if self.received is None else self.received[:count]
        context.output_tokens = None if shape.decode or shape.wants_all else inputs.sample_at[: shape.num_samples]
        return self.model(inputs.token_ids[:count], inputs.positions[:count])

    def keep(self, hidden_TD: Tensor, shape: StepShape) -> None:
        """Copies the hidden states that choose tokens to `last_hidden`."""
        kept = self.last_hidden[: shape.num_samples]
        if shape.decode or shape.wants_all:
            self.device.gather_rows(hidden_TD, self.inputs.sample_at[: shape.num_samples], out=kept)
        else:
            kept.copy_(hidden_TD)

    # -- sample ----------------------------------------------------------------------------------------------

    @explain_gpu_errors
    @torch.inference_mode()
    def sample(self, masks: Masks | None = None) -> "Pending | Elsewhere":
        """Chooses tokens for the rows of the last forward pass that produce any, and appends them on the device."""
        launched = self.launched
        if launched is None:
            raise EngineError("a step was sampled before its forward pass: this is a bug in the executor")
        self.launched = None
        plan = launched.plan
        sampling = self.batch.sampling
        num_samples = plan.num_samples
        if not self.ranks.is_last:
            return Elsewhere(plan)
        pending = Pending(plan)
        if self.batch.owes_prompt_logprobs(plan):
            self._prompt_logprobs(launched, pending)
        if num_samples:
            rows: list[int] = []  # of each sample
            for row, produces in zip(plan.rows, plan.produces):
                rows += [row if produces > 0 else NO_ROW] * abs(produces)
            if masks is not None:
                self.masks.bring(masks)
            is_sampled = False
            if not sampling.special(rows):
                random = not sampling.random.isdisjoint(rows)
                is_sampled = self.recordings.sample(SampleShape(len(rows), random, masked=masks is not None))
            if not is_sampled:
                self._choose_specially(rows, masks is not None, pending)
            if self.drafter.num_drafts or plan.verifies:
                self._accept(plan, pending)
            if VECTOR in plan.produces:
                pending.vectors = ToHost(self.last_hidden[:num_samples].float())
        pending.token_ids = ToHost(self.out_ids[:num_samples])
        if self.is_finite is not None:
            pending.is_finite = ToHost(self.is_finite[:num_samples])
        self.recordings.record_next()
        return pending

    @explain_gpu_errors
    @torch.inference_mode()
    def guess(self) -> None:
        """Chooses a token for each row of the last forward pass, and appends it on the device; nobody is told."""
        if self.launched is None:
            raise EngineError("a token was guessed before its forward pass: this is a bug in the drafter")
        rows, self.launched = self.launched.plan.rows, None
        shape = SampleShape(len(rows), random=not self.batch.sampling.random.isdisjoint(rows))
        if not self.recordings.sample(shape):
            self.choose(shape)
        self.recordings.record_next()

    def known_lengths(self) -> np.ndarray | None:
        """Tokens of each row; None: only the device knows."""
        return self.device.known_lengths(self.batch.lengths)

    def num_held(self, row: int) -> int:
        """Tokens for which the row has blocks."""
        lens = self.batch.table_lens
        return min(lens[name][row] * group.block_size for name, group in zip(self.group_names, self.groups))

    def _accept(self, plan: StepPlan, pending: "Pending") -> None:
        """Accepts drafts up to the first that differs from the token chosen in its place; then new ones are guessed."""
        inputs = self.inputs
        num_producing = sum(map(bool, plan.produces))
        first_samples = inputs.first_samples[: num_producing + 1]
        num_accepted = self.num_accepted[:num_producing]
        count = plan.num_samples
        at, chosen = inputs.sample_at[:count], self.out_ids[:count]
        rows_S, positions_S = inputs.sample_rows[:count], inputs.sample_positions[:count]
        step = first_samples, at, rows_S, positions_S, chosen, inputs.token_ids
        self.drafter.decide(*step)
        self.device.accept(*step, self.batch.lengths, num_accepted)
        pending.num_accepted = ToHost(num_accepted)
        rows = [row for row, produces in zip(plan.rows, plan.produces) if produces > 0]
        if rows and plan.wants_drafts:
            rows_R = on_device(rows, self.batch.tokens.device)
            num_drafts = self.drafter.draft(rows_R, self.batch.lengths, self.batch.tokens)
            pending.num_drafts = None if num_drafts is None else ToHost(num_drafts)
            if plan.tells_drafts:
                pending.drafts = ToHost(self._after(rows_R))

    def _after(self, rows_R: Tensor) -> Tensor:
        """What stands after the tokens of these rows, guesses or not: [R, num_drafts]."""
        lengths, tokens = self.batch.lengths, self.batch.tokens
        rows_R1 = rows_R.long()[:, None]
        places = lengths[rows_R1] + torch.arange(self.drafter.num_drafts, device=rows_R.device)
        return tokens[rows_R1, places.clamp_(max=tokens.shape[1] - 1)]

    def choose(self, shape: SampleShape) -> None:
        """Chooses tokens for rows with nothing but a temperature and a grammar."""
        logits_SV = self._logits(shape.num_samples)
        if shape.masked:
            self.device.mask_logits(logits_SV, *self.masks.of(shape.num_samples))
        samples = self._samples(shape.num_samples)
        self.sampler.choose(logits_SV, *samples, random=shape.random, restricted=False, penalized=False)

    def _choose_specially(self, rows: list[int], masked: bool, pending: "Pending") -> None:
        """Chooses tokens with all sampling parameters of the rows."""
        count = len(rows)
        logits_SV = self._logits(count)
        masks = self.masks.of(count) if masked else None
        logprobs = self.sampler.sample(logits_SV, rows, *self._samples(count), masks)
        if logprobs is not None:
            pending.logprobs = logprobs.places, logprobs.num_top, ToHost(*logprobs.tokens)

    def _logits(self, count: int) -> Tensor:
        logits_SV = self.model.logits(self.last_hidden[:count])
        if logits_SV.shape[1] > self.vocab_size:  # a draft model's, padded to another size
            logits_SV = logits_SV[:, : self.vocab_size].contiguous()
        if self.is_finite is not None:  # a sum of numbers from float16 is one in float32
            self.is_finite[:count] = logits_SV.sum(1, dtype=torch.float32).isfinite()
        return logits_SV

    def _samples(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Row and position of each sample, and where its token is written."""
        return self.inputs.sample_rows[:count], self.inputs.sample_positions[:count], self.out_ids[:count]

    def _prompt_logprobs(self, launched: _Launched, pending: "Pending") -> None:
        """Computes the logprobs of prompt tokens, for rows that want them."""
        plan = launched.plan
        batch = self.batch
        query_start = 0
        for idx, (row, start, count) in enumerate(zip(plan.rows, plan.starts, plan.num_tokens)):
            num_top, delivered = batch.prompt_logprobs.get(row, (None, 0))
            first, last = prompt_span(start, count, delivered, batch.prompt_lens[row])
            if num_top is not None and first <= last:
                offset = query_start - start
                hidden_TD = launched.hidden_TD[offset + first - 1 : offset + last]
                targets_T = batch.tokens[row, first : last + 1].long()
                for at in range(0, len(targets_T), LOGPROBS_AT_ONCE):
                    span = slice(at, at + LOGPROBS_AT_ONCE)
                    columns = token_logprobs(self.model.logits(hidden_TD[span]).float(), targets_T[span], num_top)
                    pending.prompt_logprobs.append((idx, num_top, ToHost(targets_T[span], *columns)))
            query_start += count


def group_backends(model: nn.Module, groups: Sequence[Group], limits: Limits) -> list[AttentionBackend]:
    """Makes an attention backend for each group, and gives it to the group's layers."""
    layers_of: list[list[CacheLayer]] = [[] for _ in groups]
    for layer in cache_layers(model).values():
        layers_of[layer.group_idx].append(layer)
    backends: list[AttentionBackend] = []
    twins: dict[tuple[CacheSpec, int], AttentionBackend] = {}  # the first of each kind
    for group, layers in zip(groups, layers_of):
        kind = group.spec, layers[0].num_heads
        backend = layers[0].backend_class(layers, group.block_size, limits, twins.get(kind))
        twins.setdefault(kind, backend)
        for layer in layers:
            layer.backend = backend
        backends.append(backend)
    return backends


class Elsewhere:
    """A step whose tokens the last stage of a pipeline chooses."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan

    def result(self) -> StepResult:
        return StepResult(self.plan.step_id, [[] for _ in self.plan.rows])


class Pending:
    """A step's results, while they are copied from the device."""

    token_ids: ToHost
    num_accepted: ToHost | None = None  # None: there are no drafts
    num_drafts: ToHost | None = None  # of rows that chose tokens, for the next step; None: always as many
    drafts: ToHost | None = None  # what stands after the tokens of these rows; None: nobody asks
    vectors: ToHost | None = None  # hidden states of all samples; None: no row wants any
    is_finite: ToHost | None = None  # None: all logits are numbers

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        # Indices of the samples that have logprobs, how many of the most likely tokens each wants, columns.
        self.logprobs: tuple[list[int], list[int], ToHost] | None = None
        # Index in the plan's rows, how many of the most likely tokens it wants, columns; parts of a row are in order.
        self.prompt_logprobs: list[tuple[int, int, ToHost]] = []

    @explain_gpu_errors
    def result(self) -> StepResult:
        chosen = self.token_ids.wait()[0].tolist()
        num_accepted = None if self.num_accepted is None else self.num_accepted.wait()[0].tolist()
        vectors = () if self.vectors is None else self.vectors.wait()[0].unbind()
        is_finite = None if self.is_finite is None else self.is_finite.wait()[0].tolist()
        result = StepResult(self.plan.step_id, [[] for _ in self.plan.rows], overflowed=[])
        first = 0  # sample of the row
        row_of: dict[int, int] = {}  # sample whose token is a result -> index in the plan's rows
        producing = (idx for idx, produces in enumerate(self.plan.produces) if produces)
        for nth, idx in enumerate(producing):
            end = first + 1 + (num_accepted[nth] if num_accepted is not None else 0)
            if is_finite is not None and not all(is_finite[first:end]):
                result.overflowed.append(idx)
            if self.plan.produces[idx] == VECTOR:
                result.vectors[idx] = vectors[first].tolist()
            else:
                result.token_ids[idx] = chosen[first:end]
                row_of.update((sample, idx) for sample in range(first, end))
            first += abs(self.plan.produces[idx])
        if num_accepted is not None and not self.plan.wants_drafts:
            result.num_drafts = [0] * len(self.plan.rows)
        elif self.num_drafts is not None:
            guessed = iter(self.num_drafts.wait()[0].tolist())
            result.num_drafts = [next(guessed) if produces > 0 else 0 for produces in self.plan.produces]
        if self.drafts is not None:
            told = iter(self.drafts.wait()[0].tolist())
            result.drafts = [next(told) if produces > 0 else [] for produces in self.plan.produces]
        if self.logprobs is not None:
            samples, num_top_each, columns = self.logprobs
            found = entries([chosen[sample] for sample in samples], LogprobColumns(*columns.wait()), num_top_each)
            for sample, entry in zip(samples, found):
                if sample in row_of:
                    result.logprobs.setdefault(row_of[sample], []).append(entry)
        for idx, num_top, columns in self.prompt_logprobs:
            targets, *rest = columns.wait()
            found = entries(targets.tolist(), LogprobColumns(*rest), [num_top] * len(targets))
            result.prompt_logprobs.setdefault(idx, []).extend(found)
        return result
