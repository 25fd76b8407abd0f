"""Writes a Llama GGUF as a Hugging Face folder in bfloat16, for the peers that do not read GGUF.

Run by `benchmarks/peers/install.py` in the environment of transformers, with PyPI's `gguf` to dequantize.
`--check` compares the folder's logits with those of transformers' own way of loading the GGUF.
"""

import argparse
from pathlib import Path

import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def hf_name(gguf_name: str) -> str:
    stem, _, kind = gguf_name.rpartition(".")
    if stem in TOP_NAMES:
        return f"{TOP_NAMES[stem]}.{kind}"
    _, layer_idx, part = stem.split(".")
    return f"model.layers.{layer_idx}.{LAYER_NAMES[part]}.{kind}"


def read_config(reader: GGUFReader) -> LlamaConfig:
    def field(key: str) -> int | float:
        return reader.get_field(key).contents()

    return LlamaConfig(
        vocab_size=len(field("tokenizer.ggml.tokens")),
        hidden_size=field("llama.embedding_length"),
        intermediate_size=field("llama.feed_forward_length"),
        num_hidden_layers=field("llama.block_count"),
        num_attention_heads=field("llama.attention.head_count"),
        num_key_value_heads=field("llama.attention.head_count_kv"),
        max_position_embeddings=field("llama.context_length"),
        rms_norm_eps=field("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field("llama.rope.freq_base")},
        bos_token_id=field("tokenizer.ggml.bos_token_id"),
        eos_token_id=field("tokenizer.ggml.eos_token_id"),
        tie_word_embeddings=all(tensor.name != "output.weight" for tensor in reader.tensors),
    )


def undo_rope_order(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """GGUF keeps each head's two RoPE halves interleaved row by row; Hugging Face keeps them one after the other."""
    return weight.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).reshape(weight.shape)


def export(gguf: Path, folder: Path) -> None:
    reader = GGUFReader(gguf)
    config = read_config(reader)
    weights = {}
    for tensor in reader.tensors:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if "attn_q." in tensor.name:
            weight = undo_rope_order(weight, config.num_attention_heads)
        elif "attn_k." in tensor.name:
            weight = undo_rope_order(weight, config.num_key_value_heads)
        weights[hf_name(tensor.name)] = weight
    model = LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise SystemExit(f"the GGUF is no plain Llama: missing {missing}, unexpected {unexpected}")
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def check(gguf: Path, folder: Path) -> None:
    """Logits of both loads in float32: they differ by the rounding of the weights to bfloat16, no more."""
    token_ids = torch.arange(100, 8100, 125).reshape(1, -1)
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    with torch.inference_mode():
        our_logprobs = ours(token_ids).logits.log_softmax(-1)
        their_logprobs = theirs(token_ids).logits.log_softmax(-1)
    divergence = (their_logprobs.exp() * (their_logprobs - our_logprobs)).sum(-1).mean().item()
    agreement = (our_logprobs.argmax(-1) == their_logprobs.argmax(-1)).float().mean().item()
    print(f"KL divergence {divergence:.2e} nats per token, the same best token at {agreement:.1%} of positions")
    if divergence > 1e-2:
        raise SystemExit("the exported folder does not compute what the GGUF does")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("gguf", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--check", action="store_true", help="compare with transformers' own GGUF loading")
    args = parser.parse_args()
    export(args.gguf, args.folder)
    if args.check:
        check(args.gguf, args.folder)


if __name__ == "__main__":
    main()
