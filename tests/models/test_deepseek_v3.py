"""What DeepSeek V3's published checkpoints hold besides what transformers saves."""

import torch

from quire.layers.weights import plain
from quire.models.deepseek_v3 import MODEL, TINY, Config


def test_layers_that_predict_further_tokens_are_left_out():
    """They are numbered on from the last; the last itself is kept, and so is what belongs to no layer."""
    fields = {name: TINY[name] for name in Config.__dataclass_fields__ if name in TINY and name != "rope_parameters"}
    with torch.device("meta"):
        model = MODEL(Config(**fields))
    names = [
        "model.layers.2.mlp.gate.weight",
        "model.layers.3.eh_proj.weight",
        "model.layers.30.mlp.gate.weight",
        "lm_head.weight",
    ]
    kept = [name for theirs in names for name, _ in model.translate(theirs, plain(torch.zeros(1)))]
    assert kept == [names[0], names[3]]
