"""The mixture layer against transformers' blocks, from their own checkpoints' names, with both backends."""

import importlib

import pytest
import torch
from torch import Tensor, nn
from transformers import DeepseekV2Config, DeepseekV3Config, GptOssConfig, MixtralConfig, Qwen2MoeConfig, Qwen3MoeConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from quire.layers.experts import torch as torch_backend
from quire.layers.experts import triton as triton_backend
from quire.layers.linear import Linear
from quire.layers.mlp import GatedMLP
from quire.layers.moe import MoE, Routing
from quire.ops.packed_linear import cpu as linear
from quire.worker.choose import CANDIDATES
from tests.attached import filled, raw, runtime

D, F, E, K = 64, 32, 8, 2
SIZES = dict(hidden_size=D, moe_intermediate_size=F, num_experts_per_tok=K, n_routed_experts=E, n_shared_experts=1)
backends = pytest.mark.parametrize("backend", [torch_backend, triton_backend], ids=["torch", "triton"])


class SharedGate(MoE):
    """As a model file would have it: the shared expert's output is multiplied by a gate."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.shared_expert_gate = Linear(D, 1)

    def shared(self, x_TD: Tensor) -> Tensor:
        return torch.sigmoid(self.shared_expert_gate(x_TD)) * self.shared_experts(x_TD)


def random_block(block: nn.Module) -> tuple[nn.Module, dict[str, Tensor]]:
    """Everything random, buffers too; its tensors by name."""
    torch.manual_seed(0)
    state = {name: torch.randn_like(tensor) * 0.3 for name, tensor in block.state_dict().items()}
    block.load_state_dict(state)
    return block.eval(), state


def per_expert(state: dict[str, Tensor], names: tuple[str, str, str]) -> dict[str, Tensor]:
    """The stacked tensors of a block, as checkpoints have them."""
    gate_up, down = state.pop("experts.gate_up_proj"), state.pop("experts.down_proj")
    for i in range(E):
        parts = (*gate_up[i].chunk(2), down[i])
        state |= {f"experts.{i}.{name}.weight": part for name, part in zip(names, parts, strict=True)}
    return state


def check(moe: MoE, block: nn.Module, backend) -> None:
    moe.experts.backend = backend
    for num_tokens in (1, 5):
        x = torch.randn(num_tokens, D)
        with torch.no_grad():
            expected = block(x[None])
        if isinstance(expected, tuple):
            expected = expected[0]
        torch.testing.assert_close(moe(x), expected[0], rtol=1e-4, atol=1e-4)


def build(*args, kind: type[MoE] = MoE, **kwargs) -> MoE:
    with torch.device("meta"):
        return kind(D, F, E, *args, **kwargs)


@backends
@pytest.mark.parametrize("renormalize", [False, True], ids=["", "renormalized"])
def test_softmax_and_the_best(backend, renormalize: bool) -> None:
    config = Qwen3MoeConfig(
        hidden_size=D, moe_intermediate_size=F, num_experts=E, num_experts_per_tok=K, norm_topk_prob=renormalize
    )
    block, state = random_block(Qwen3MoeSparseMoeBlock(config))
    moe = build(Routing(K, renormalize=renormalize))
    check(filled(moe, per_expert(state, ("gate_proj", "up_proj", "down_proj"))), block, backend)


@backends
def test_experts_by_other_names(backend) -> None:
    config = MixtralConfig(hidden_size=D, intermediate_size=F, num_local_experts=E, num_experts_per_tok=K)
    block, state = random_block(MixtralSparseMoeBlock(config))
    moe = build(Routing(K, renormalize=True), names=("w1", "w3", "w2"))
    check(filled(moe, per_expert(state, ("w1", "w3", "w2"))), block, backend)


@backends
def test_groups_by_their_best_expert(backend) -> None:
    config = DeepseekV2Config(
        **SIZES, topk_method="group_limited_greedy", n_group=4, topk_group=2, routed_scaling_factor=16.0
    )
    block, state = random_block(DeepseekV2Moe(config))
    routing = Routing(K, scale=16.0, num_groups=4, num_groups_kept=2)
    moe = build(routing, shared=GatedMLP(D, F), names=("gate_up_proj", "down_proj"))
    check(filled(moe, state), block, backend)


@backends
def test_groups_by_their_two_best_and_a_bias_that_only_chooses(backend) -> None:
    config = DeepseekV3Config(**SIZES, n_group=4, topk_group=2, norm_topk_prob=True, routed_scaling_factor=2.5)
    block, state = random_block(DeepseekV3MoE(config))
    routing = Routing(K, "sigmoid", renormalize=True, scale=2.5, num_groups=4, num_groups_kept=2, group_score_size=2)
    moe = build(routing, shared=GatedMLP(D, F), correction_bias="gate.e_score_correction_bias")
    check(filled(moe, per_expert(state, ("gate_proj", "up_proj", "down_proj"))), block, backend)


@backends
def test_biases_and_the_clamped_activation(backend) -> None:
    config = GptOssConfig(hidden_size=D, intermediate_size=F, num_local_experts=E, num_experts_per_tok=K)
    block, state = random_block(GptOssMLP(config))
    for name in ("gate_up_proj", "gate_up_proj_bias"):  # gate and up take turns
        tensor = state[f"experts.{name}"]
        state[f"experts.{name}"] = torch.cat((tensor[..., 0::2], tensor[..., 1::2]), -1)
    for name in ("gate_up_proj", "down_proj"):
        state[f"experts.{name}"] = state[f"experts.{name}"].transpose(1, 2)
    state = {name.replace("router.", "gate."): tensor for name, tensor in state.items()}
    routing = Routing(K, renormalize=True)
    moe = build(routing, activation="clamped_swiglu", bias=True, names=("gate_up_proj", "down_proj"))
    check(filled(moe, state), block, backend)


@backends
def test_a_model_shares_in_its_own_way(backend) -> None:
    config = Qwen2MoeConfig(
        hidden_size=D, moe_intermediate_size=F, shared_expert_intermediate_size=F, num_experts=E, num_experts_per_tok=K
    )
    block, state = random_block(Qwen2MoeSparseMoeBlock(config))
    state = {name.replace("shared_expert.", "shared_experts."): tensor for name, tensor in state.items()}
    moe = build(Routing(K), shared=GatedMLP(D, F), names=("gate_up_proj", "down_proj"), kind=SharedGate)
    check(filled(moe, state), block, backend)


def test_a_bias_of_each_expert_has_its_name() -> None:
    experts = build(Routing(K), bias=True).experts
    experts.attach(runtime(), "mlp.experts")
    wanted = {weight.name: weight.shape for weight in experts.weights()}
    assert len(wanted) == E * 6
    assert {n: s for n, s in wanted.items() if ".7." in n} == {
        "mlp.experts.7.gate_proj.weight": (F, D),
        "mlp.experts.7.up_proj.weight": (F, D),
        "mlp.experts.7.down_proj.weight": (D, F),
        "mlp.experts.7.gate_proj.bias": (F,),
        "mlp.experts.7.up_proj.bias": (F,),
        "mlp.experts.7.down_proj.bias": (D,),
    }


def test_asking_what_is_wanted_takes_no_memory_and_numbers_arrive_in_the_models_type(monkeypatch) -> None:
    monkeypatch.setattr(linear, "supported", lambda: False)  # the plain backend
    moe = build(Routing(K), correction_bias="gate.e_score_correction_bias")
    moe.attach(runtime(dtype="bfloat16"), "mlp")
    moe.experts.attach(moe.runtime, "experts")
    wanted = {weight.name: weight for layer in (moe, moe.experts) for weight in layer.weights()}
    gate_up, down = moe.experts.methods
    assert all(p.is_meta for p in moe.parameters()) and not gate_up.tensors() and not down.tensors()
    for name in ("experts.3.up_proj.weight", "experts.0.down_proj.weight", "mlp.gate.e_score_correction_bias"):
        wanted[name].load(raw(torch.full(wanted[name].shape, 1.25)))
    assert gate_up.numbers().dtype == down.numbers().dtype == torch.bfloat16
    assert moe.correction_bias.dtype == torch.float32
    assert (gate_up.numbers().view(E, 2 * F, D)[3, F:] == 1.25).all()
    assert (down.numbers().view(E, D, F)[0] == 1.25).all()


@pytest.mark.parametrize(("kind", "device"), [("cpu", "cpu"), ("gpu", "cuda")])
def test_every_device_has_a_backend(kind: str, device: str) -> None:
    candidates = map(importlib.import_module, CANDIDATES["experts"][kind])
    assert any(backend.why_not(torch.device(device), torch.bfloat16) is None for backend in candidates)
