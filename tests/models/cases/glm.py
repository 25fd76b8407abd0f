"""Variants of GLM beyond its TINY."""

GLM4 = {"architectures": ["Glm4ForCausalLM"], "model_type": "glm4", "rms_norm_eps": 1e-5}

CASES = {
    "no biases, tied": {"attention_bias": False, "tie_word_embeddings": True, "partial_rotary_factor": 1.0},
    "glm4": GLM4,
    "glm4, no biases, tied": {**GLM4, "attention_bias": False, "tie_word_embeddings": True},
    "glm4, yarn": {
        **GLM4,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    },
}
