"""A quantization for tests, written like a file of quant/: codes, scales and offsets, for the paths in its settings."""

import math
import re
from functools import partial

import torch

from quire.quant.base import Method, Weight

GROUP = 16  # inputs that share a scale and an offset
ENDS = (".codes", ".scales", ".offsets")


def numbers(codes, scales, offsets):
    groups = codes.view(*scales.shape, GROUP).float()
    return ((groups - offsets[..., None]) * scales[..., None]).view(codes.shape)


class Toy(Method):
    def __init__(self, parts, dtype, device):
        super().__init__(parts, dtype, device)
        self.held = [{} for _ in parts]

    def declare(self, part_idx, part):
        *rows, columns = part.shape
        grouped = *rows, columns // GROUP
        for end, shape, types in zip(ENDS, (part.shape, grouped, grouped), (("U8",), ("F32",), ("F32",))):
            num_values = math.prod(part.shape) if end == ".codes" else 0
            load = partial(self.load_one, part_idx, end)
            yield Weight(f"{part.path}{end}", shape, load, part.split, types=types, num_values=num_values)

    def load_one(self, part_idx, end, tensor):
        own = tensor.raw.view(tensor.shape) if end == ".codes" else tensor.dense(torch.float32)
        self.held[part_idx][end] = own.clone()

    def numbers(self):
        return torch.cat([numbers(*(found[end] for end in ENDS)) for found in self.held]).to(self.dtype)

    def tensors(self):
        return [tensor for found in self.held for tensor in found.values()]


def quantization(settings: dict):
    return lambda path, ways: Toy if re.fullmatch(settings["paths"], path) else ways.plain
