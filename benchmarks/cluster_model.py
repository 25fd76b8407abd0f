"""What to expect of many devices, reckoned from what one was measured to do: `python benchmarks/cluster_model.py`.

Prints the tables of docs/parallel.md: 1 to 64 machines of 8 H200. Several cards were never there, so `--check` tries
the same arithmetic on CPUs: it fits a machine to runs of one process with one thread (`cluster_fit.py`), predicts TP 2,
PP 2 and DP 2 with a thread each, measures those, and exits with 1 if a figure is off by more than 25%.
"""

import argparse
import json
import random
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import ceil, exp, inf, log
from pathlib import Path
from statistics import median

SHAPES = Path(__file__).resolve().parent / "shapes"
OFF_LIMIT = 0.25


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder, weights of 16 bits unless `weight_bytes` says otherwise."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int  # of an expert, where there are any
    vocab: int
    experts: int = 1
    top_k: int = 1
    weight_bytes: float = 2.0

    @staticmethod
    def read(config: dict) -> "Shape":
        heads, experts = config["num_attention_heads"], config.get("num_experts", 1)
        return Shape(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            heads=heads,
            kv_heads=config["num_key_value_heads"],
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            ffn=config["moe_intermediate_size"] if experts > 1 else config["intermediate_size"],
            vocab=config["vocab_size"],
            experts=experts,
            top_k=config.get("num_experts_per_tok", 1),
        )

    @property
    def attention_weights(self) -> int:
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def expert_weights(self) -> int:
        return 3 * self.hidden * self.ffn

    @property
    def bytes(self) -> float:
        layer = self.attention_weights + self.experts * self.expert_weights
        return (self.layers * layer + 2 * self.vocab * self.hidden) * self.weight_bytes

    @property
    def kv_token_bytes(self) -> int:
        """Of all layers, 16 bits."""
        return self.layers * 2 * self.kv_heads * self.head_dim * 2


def shape(name: str) -> Shape:
    return Shape.read(json.loads((SHAPES / name / "config.json").read_text()))


LLAMA_405B = Shape(layers=126, hidden=16384, heads=128, kv_heads=8, head_dim=128, ffn=53248, vocab=128256)


@dataclass(frozen=True)
class Layout:
    tp: int = 1
    pp: int = 1
    dp: int = 1


@dataclass(frozen=True)
class Machine:
    """A device, its neighbours, and the host. Times in seconds, rates per second."""

    weight_s: tuple[tuple[int, float], ...]  # (rows, time of a product's one weight for all of them), measured
    attention_flop_s: float  # of long prompts
    attention_half: int  # tokens of a prompt at which half of that is reached
    memory_s: float  # bytes that one device reads
    layer_s: float  # of a layer's small kernels and launches, whatever they compute
    expert_layer_s: float  # the same with experts
    whole_passes: int  # times a layer reads or writes a token's vector on every rank …
    divided_passes: int  # … and in parts, one on each rank
    expert_passes: int  # and for each expert that a token is sent to
    sum_s: float  # of the ranks' vectors: of a short one, and bytes through a rank's links
    link_s: float
    hop_s: float  # from stage to stage: of a short vector, and bytes
    hop_bytes_s: float
    message_s: float  # from the core to its workers and back
    host_step_s: float  # of the core: a step, and a row of it
    host_row_s: float
    prompt_step_s: float  # a step with prompts is launched kernel by kernel
    hides_host: bool  # whether the next step is planned while one is computed
    step_tokens: int  # at most
    shared_memory_s: float = inf  # bytes that all devices of the machine read together

    def products_s(self, weights: float, rows: float) -> float:
        """Between measured numbers of rows on a straight line of logarithms, beyond them in proportion."""
        table = self.weight_s
        if rows <= table[0][0]:
            return weights * table[0][1]
        for (low, low_s), (high, high_s) in pairwise(table):
            if rows <= high:
                share = log(rows / low) / log(high / low)
                return weights * exp(log(low_s) + share * log(high_s / low_s))
        return weights * table[-1][1] * rows / table[-1][0]


# Measured on one H200 (benchmarks/README.md, shapes of Qwen3-8B, 0.6B and 30B-A3B), except where "assumed" is said.
LAYER_8B = 192.9e6  # weights of one layer of Qwen3-8B
H200 = Machine(
    # µs of its four products, less 6 that are launches and in layer_s; 1 row: the speed of memory
    weight_s=tuple(
        (rows, us * 1e-6 / LAYER_8B)
        for rows, us in ((1, 89.7), (8, 101), (64, 105), (256, 149), (1024, 502), (8192, 4206))
    ),
    attention_flop_s=580e12,  # cuDNN: 38 ms of the 8,192-token prompt; 243 TFLOP/s at 1,024
    attention_half=1000,
    memory_s=4.2e12,  # decode attention at 256 rows
    layer_s=15e-6,  # what 4.02 (8B) and 0.76 ms (0.6B) leave when weights are read: 14.3 and 17.2 µs
    expert_layer_s=23e-6,  # the same of 30B-A3B's 2.51 ms
    whole_passes=9,  # together 15 ms of the 8,192-token prompt
    divided_passes=18,
    expert_passes=7,  # experts of 8,192 rows 1.30 ms, of which products 0.86
    sum_s=10e-6,  # assumed: NCCL through NVLink, few rows, in a CUDA graph
    link_s=400e9,  # assumed: of NVLink's 450 GB/s per direction (data sheet)
    hop_s=20e-6,  # assumed: NCCL send and receive through InfiniBand
    hop_bytes_s=45e9,  # assumed: of 50 GB/s, an NDR adapter per GPU (data sheet)
    message_s=0.41e-3,  # to a worker on a cluster and back: `--check` on a machine with two cores
    host_step_s=0.0,
    host_row_s=7.6e-6,  # serving_cost.py: CPU time of the core per token
    prompt_step_s=1.5e-3,  # what 2.3 (0.6B) and 6.3 ms (8B) to the first token of 128 leave
    hides_host=True,
    step_tokens=2048,  # the server's default; 8192 offline
)
CARD_BYTES = 0.9 * 141e9
NODE = 8
API_TOKEN_S = 24e-6  # serving_cost.py: CPU time of the API process per token and event


@dataclass
class Request:
    prompt: int
    output: int
    computed: int = 0
    made: int = 0
    in_flight: bool = False
    start_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0


@dataclass
class Step:
    """What a step computes: `parts` are requests and how many tokens of each."""

    parts: list[tuple[Request, int]] = field(default_factory=list)
    end_s: float = 0.0

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.parts)


def largest_share(kv_heads: int, ranks: int) -> float:
    """Of attention, that the rank with most KV heads has; past one head each, queries are divided."""
    return ceil(kv_heads / ranks) / kv_heads if ranks < kv_heads else 1 / ranks


def stage_s(m: Machine, s: Shape, layout: Layout, step: Step, layers: int, is_last: bool, busy: int = 1) -> float:
    """Seconds of one stage's step, by its slowest rank; `busy` devices compute at the same time."""
    rows, samples = step.tokens, sum(r.computed + n >= r.prompt for r, n in step.parts)
    share, n = largest_share(s.kv_heads, layout.tp), layout.tp
    used = s.experts * (1 - (1 - s.top_k / s.experts) ** rows) if s.experts > 1 else 1.0
    read = s.attention_weights * share + used * s.expert_weights / n
    products = m.products_s(s.attention_weights * share, rows)
    products += m.products_s(used * s.expert_weights / n, rows * s.top_k / used)
    products = max(products, busy * read * s.weight_bytes / m.shared_memory_s)
    attention = 0.0
    for r, count in step.parts:
        if count == 1:  # reads the cache
            attention += (r.computed + 1) * s.kv_token_bytes / s.layers * share / m.memory_s
        else:
            flop = 4 * s.heads * s.head_dim * count * (r.computed + count / 2) * share
            attention += flop / m.attention_flop_s * (1 + m.attention_half / (r.computed + count))
    vector = s.hidden * 2 * rows
    passes = m.whole_passes + (m.divided_passes + m.expert_passes * (s.top_k if s.experts > 1 else 0)) / n
    layer = products + attention + passes * vector / m.memory_s
    layer += m.expert_layer_s if s.experts > 1 else m.layer_s
    if n > 1:
        layer += 2 * (m.sum_s + 2 * (n - 1) / n * vector / m.link_s)
    head = 0.0
    if is_last:
        weights = s.vocab * s.hidden / n
        head = max(m.products_s(weights, samples), busy * weights * s.weight_bytes / m.shared_memory_s)
        head += m.sum_s + samples * s.vocab * 4 / m.link_s if n > 1 else 0.0
    is_prompt = any(count > 1 for _, count in step.parts)
    return layers * layer + head + is_prompt * m.prompt_step_s


def plan(waiting: deque[Request], running: list[Request], pp: int, concurrency: int, budget: int) -> Step:
    """As the scheduler does: running requests that are not in flight, an even share per stage, then new ones."""
    step = Step()
    ready = [r for r in running if not r.in_flight][: ceil(len(running) / pp)]
    while ready or (waiting and len(running) < concurrency and step.tokens < budget):
        if ready:
            request = ready.pop(0)
        else:
            running.append(request := waiting.popleft())
        count = min(
            1 if request.computed >= request.prompt else request.prompt - request.computed, budget - step.tokens
        )
        if count:
            step.parts.append((request, count))
            request.in_flight = True
    return step


def run(m: Machine, s: Shape, layout: Layout, requests: Sequence[Request], concurrency: int = 10**6) -> float:
    """Plays one engine's requests, at most `concurrency` at a time; they keep their times. Returns seconds in all."""
    waiting, running, flight = deque(requests), [], deque[Step]()
    stages = [ceil(s.layers * (i + 1) / layout.pp) - ceil(s.layers * i / layout.pp) for i in range(layout.pp)]
    free_s, now_s, arrived = [0.0] * layout.pp, 0.0, concurrency
    while waiting or running:
        step = plan(waiting, running, layout.pp, concurrency, m.step_tokens)
        if step.parts:
            host_s = m.host_step_s + m.host_row_s * len(step.parts)
            at_s = now_s + (0.0 if m.hides_host else host_s)
            busy = layout.tp * layout.dp * min(layout.pp, len(running))
            for i, layers in enumerate(stages):
                took_s = stage_s(m, s, layout, step, layers, i == layout.pp - 1, busy)
                at_s = max(at_s, free_s[i]) + (max(took_s, host_s) if m.hides_host else took_s)
                free_s[i] = at_s
                if i < layout.pp - 1:
                    at_s += m.hop_s + step.tokens * s.hidden * 2 / m.hop_bytes_s
            # Where stages follow each other, or nothing is planned ahead, a message is waited for.
            waits = layout.pp > 1 or (layout.tp > 1 and not m.hides_host)
            step.end_s = at_s + (m.message_s if waits else 0.0)
            flight.append(step)
            if len(flight) < layout.pp:
                continue
        done = flight.popleft()
        now_s = max(now_s, done.end_s)
        for request, count in done.parts:
            request.computed, request.in_flight = request.computed + count, False
            if request.computed < request.prompt:
                continue
            request.made += 1
            request.first_s, request.last_s = request.first_s or now_s, now_s
            if request.made >= request.output:
                running.remove(request)
                if arrived < len(requests):  # the client of the one that ended sends the next
                    requests[arrived].start_s, arrived = now_s, arrived + 1
    return now_s


@dataclass(frozen=True)
class Figures:
    ttft_s: float
    tpot_s: float
    tokens_s: float


def lone(m: Machine, s: Shape, layout: Layout, prompt: int, output: int = 129) -> Figures:
    run(m, s, layout, [request := Request(prompt, output)])
    tpot_s = (request.last_s - request.first_s) / max(output - 1, 1)
    return Figures(request.first_s, tpot_s, 1 / tpot_s if tpot_s else inf)


def loaded(m: Machine, s: Shape, layout: Layout, streams: int, prompt: int, output: int) -> Figures:
    """Each engine with `streams` clients that send again when answered; medians, without those that began together."""
    rng = random.Random(0)
    requests = [Request(prompt, rng.randint(1, output)) for _ in range(streams)]
    requests += [Request(prompt, output) for _ in range(2 * streams)]
    run(m, s, layout, requests, streams)
    steady = requests[streams : 2 * streams]
    ttft_s = median(r.first_s - r.start_s for r in steady)
    tpot_s = median((r.last_s - r.first_s) / (output - 1) for r in steady)
    return Figures(ttft_s, tpot_s, layout.dp * streams / (ttft_s + tpot_s * (output - 1)) * output)


def fits(s: Shape, layout: Layout, streams: int, context: int) -> bool:
    """Weights and KV of a card; more ranks than KV heads have copies of them."""
    kv_share = largest_share(s.kv_heads, min(layout.tp, s.kv_heads))
    kv = streams * context * s.kv_token_bytes * kv_share
    return (s.bytes / layout.tp + kv) / layout.pp <= CARD_BYTES


OFFLINE = replace(H200, step_tokens=8192)
# TTFT of 128 and 1,024 tokens, TPOT after 128 (ms), mixed256 (tok/s), p1024d128 (req/s), of one card
MEASURED: dict[str, tuple[float | None, ...]] = {
    "qwen3-0.6b": (2.3, 5.3, 0.78, 27040, 146),
    "qwen3-8b": (6.3, 24.0, 4.02, 10200, 31.7),
    "qwen3-30b-a3b": (8.5, None, 2.51, 6640, 41.3),
}


def mixed256(s: Shape, layout: Layout) -> float:
    """Output tokens per second of one engine."""
    from quire.bench import workloads

    tasks = workloads.build("mixed256", "cuda").tasks
    requests = [Request(len(task.prompt_token_ids), task.num_output_tokens) for task in tasks]
    return sum(r.output for r in requests) / run(OFFLINE, s, layout, requests, 256)


def print_measured() -> None:
    """One card, where the figures were measured: what the arithmetic makes of them."""
    print("| one card: reckoned (measured) | TTFT 128, ms | TTFT 1,024 | TPOT | mixed256, tok/s | p1024d128, req/s |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, measured in MEASURED.items():
        s, one = shape(name), Layout()
        stream, longer = lone(OFFLINE, s, one, 128), lone(OFFLINE, s, one, 1024)
        rate = 1000 / run(OFFLINE, s, one, [Request(1024, 128) for _ in range(1000)], 256)
        ours = (stream.ttft_s * 1e3, longer.ttft_s * 1e3, stream.tpot_s * 1e3, mixed256(s, one), rate)
        cells = [f"{a:,.{2 if a < 10 else 0}f}" + (f" ({b:,})" if b else "") for a, b in zip(ours, measured)]
        print(f"| {name} | " + " | ".join(cells) + " |")


def print_cards() -> None:
    """A model that one card holds, over the cards of one machine."""
    s, counts = shape("qwen3-8b"), (1, 2, 4, NODE)
    tpot = [lone(OFFLINE, s, Layout(tp=n), 128).tpot_s * 1e3 for n in counts]
    rates = [mixed256(s, Layout(tp=n)) for n in counts]
    print("\n| Qwen3-8B, bf16, cards | " + " | ".join(map(str, counts)) + " |")
    print("| --- " * (len(counts) + 1) + "|")
    print("| one request, `-tp N`: TPOT, ms | " + " | ".join(f"{each:.1f}" for each in tpot) + " |")
    print("| mixed256, `-tp N`, tok/s | " + " | ".join(f"{each:,.0f}" for each in rates) + " |")
    print("| mixed256 for each of N engines, tok/s | " + " | ".join(f"{rates[0] * n:,.0f}" for n in counts) + " |")


# (name, shape, layout of one engine, clients of one engine)
PLANS = (
    ("Qwen3-8B, `-dp 8`", "qwen3-8b", Layout(1, 1), 64),
    ("Qwen3-8B, `-tp 8`", "qwen3-8b", Layout(8, 1), 512),
    ("Qwen3-30B-A3B, `-dp 8`", "qwen3-30b-a3b", Layout(1, 1), 64),
    ("405B, `-tp 8`", "", Layout(8, 1), 64),
    ("405B, `-tp 8 -pp 2`", "", Layout(8, 2), 256),
)
NODES = (1, 2, 4, 8, 16, 32, 64)
PROMPT, OUTPUT = 1024, 256


def print_tables() -> None:
    print_measured()
    print_cards()
    print(f"\n{PROMPT:,} tokens in, {OUTPUT} out.\n")
    print("| per engine | lone: TTFT / TPOT, ms | clients | TTFT / TPOT, ms | tok/s of 8 cards |")
    print("| --- | --- | --- | --- | --- |")
    rates = {}
    for name, folder, layout, streams in PLANS:
        s = shape(folder) if folder else LLAMA_405B
        if not fits(s, layout, streams, PROMPT + OUTPUT):
            raise SystemExit(f"{name}: {streams} clients do not fit")
        alone, many = lone(H200, s, layout, PROMPT), loaded(H200, s, layout, streams, PROMPT, OUTPUT)
        rates[name] = many.tokens_s / (layout.tp * layout.pp) * NODE
        times = [f"{f.ttft_s * 1e3:,.0f} / {f.tpot_s * 1e3:,.1f}" for f in (alone, many)]
        print(f"| {name} | {times[0]} | {streams} | {times[1]} | {rates[name]:,.0f} |")
    print("\n| tok/s of all engines; API processes for them | " + " | ".join(f"{n}" for n in NODES) + " |")
    print("| --- " * (len(NODES) + 1) + "|")
    for name, _, layout, _ in PLANS:
        least = layout.tp * layout.pp // NODE
        cells = [f"{rates[name] * n:,.0f}; {ceil(rates[name] * n * API_TOKEN_S)}" if n >= least else "–" for n in NODES]
        print(f"| {name} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="fit this CPU, predict TP 2, PP 2, DP 2, and measure them")
    parser.add_argument(
        "--rounds", type=int, default=5, help="with --check: of which the fastest of each figure counts"
    )
    args = parser.parse_args()
    if not args.check:
        print_tables()
        return
    import cluster_fit

    sys.exit(cluster_fit.check(args.rounds))


if __name__ == "__main__":
    main()
