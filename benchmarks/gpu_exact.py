"""64 requests of mixed lengths, in float32, on the GPU and on the CPU: every token must be the same.

    python benchmarks/gpu_exact.py

With graphs and two steps in flight, with prompts in chunks, with prefix hits, with so few blocks that requests are
preempted, and with drafts, two thirds of which are right. The model is random and small, and has what kernels could get
wrong: grouped heads, norms of heads, tied weights.
"""

import json
import random
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import torch  # noqa: E402
from tests.worker.drafting import BigramDrafter  # noqa: E402

from quire import LLM, SamplingParams  # noqa: E402
from quire.core.engine import Engine  # noqa: E402
from quire.executor.inproc import InprocExecutor  # noqa: E402

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 4096,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
OPTIONS = dict(dtype="float32", skip_tokenizer_init=True, max_model_len=512, max_num_seqs=48)
CASES = {
    "graphs, depth 2": {},
    "depth 1": {"pipeline_depth": 1},
    "chunks of 64 tokens": {"max_num_batched_tokens": 64},
    "forced preemption": {"num_gpu_blocks_override": 220, "enable_prefix_caching": False},
    "no prefix hits": {"enable_prefix_caching": False},
    "drafts, depth 2": {"num_drafts": 3},
    "drafts, preemption": {"num_drafts": 3, "num_gpu_blocks_override": 220},
}


def save_model(folder: Path) -> None:
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    head = CONFIG["head_dim"]
    q = CONFIG["num_attention_heads"] * head
    kv = CONFIG["num_key_value_heads"] * head
    d, f = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    shapes = {"model.embed_tokens.weight": (CONFIG["vocab_size"], d), "model.norm.weight": (d,)}
    for i in range(CONFIG["num_hidden_layers"]):
        at = f"model.layers.{i}."
        shapes |= {
            at + "input_layernorm.weight": (d,),
            at + "post_attention_layernorm.weight": (d,),
            at + "self_attn.q_proj.weight": (q, d),
            at + "self_attn.k_proj.weight": (kv, d),
            at + "self_attn.v_proj.weight": (kv, d),
            at + "self_attn.o_proj.weight": (d, q),
            at + "self_attn.q_norm.weight": (head,),
            at + "self_attn.k_norm.weight": (head,),
            at + "mlp.gate_proj.weight": (f, d),
            at + "mlp.up_proj.weight": (f, d),
            at + "mlp.down_proj.weight": (d, f),
        }
    tensors = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        tensors[name] = 1 + 0.1 * noise if len(shape) == 1 else noise * shape[1] ** -0.5
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    rng = random.Random(3)
    shared = [rng.randrange(4096) for _ in range(64)]
    prompts = []
    for i in range(64):
        own = [rng.randrange(4096) for _ in range(rng.randint(1, 200))]
        prompts.append(shared + own if i % 4 == 0 else own)
    kinds = (
        {"temperature": 0},
        {"temperature": 0.8},
        {"temperature": 1.0, "top_k": 40, "top_p": 0.9},
        {"temperature": 0, "repetition_penalty": 1.2},
    )
    params = [SamplingParams(**kinds[i % 4], seed=i, max_tokens=rng.randint(8, 96), ignore_eos=True) for i in range(64)]
    return prompts, params


def run(folder: Path, expected: list[list[int]] = [], num_drafts: int = 0, **options) -> tuple[list[list[int]], str]:
    """(the answers, a line about the run); `expected` are the answers that the drafter knows."""
    prompts, params = requests()
    with LLM(str(folder), **{**OPTIONS, **options}) as llm:
        if num_drafts:
            use_drafter(llm, [prompt + answer for prompt, answer in zip(prompts, expected)], num_drafts)
        step = llm.client.engine.step
        num_steps = 0

        def counted_step():
            nonlocal num_steps
            num_steps += 1
            return step()

        llm.client.engine.step = counted_step
        outputs = llm.generate(prompts, params, use_tqdm=False)
        stats = llm.client.engine.stats()
    notes = f"{num_steps} steps, {stats.num_preemptions} preemptions, {stats.prefix_hits} tokens found"
    return [o.outputs[0].token_ids for o in outputs], notes


def use_drafter(llm: LLM, texts: list[list[int]], num_drafts: int) -> None:
    config = llm.client.engine.config
    llm.client.engine.close()
    executor = InprocExecutor(config)
    executor.worker.drafter = BigramDrafter(texts, CONFIG["vocab_size"], config.device.device, num_drafts)
    llm.client.engine = Engine(config, executor)


def main() -> int:
    bad = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(folder)
        expected, _ = run(folder, device="cpu", max_num_batched_tokens=512)
        for case, options in CASES.items():
            started = time.perf_counter()
            found, notes = run(folder, expected, device="cuda", **{"max_num_batched_tokens": 512, **options})
            seconds = time.perf_counter() - started
            differ = [i for i, (a, b) in enumerate(zip(found, expected)) if a != b]
            bad += len(differ)
            line = f"{case:<22}{len(differ)} of {len(expected)} differ  {seconds:5.1f} s  {notes}  {differ[:8]}"
            print(line, flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
