"""Prints what the checkpoint of every case consists of.

With --keep it writes a layer of each, and what its library computes, for tests on machines that lack the library.
"""

import json
import sys

from tests.quant.published import CASES, Published


def report(name: str, published: Published) -> None:
    print(f"\n==== {name}")
    config = dict(published.config)
    print("quantization_config:", json.dumps(config.pop("quantization_config", None)))
    for file, content in published.files.items():
        print(f"{file}:", json.dumps(content))
    print("tensors of layer 0, of the head, and what layer 1 has in other types:")
    first = {n: t for n, t in published.tensors.items() if ".layers.0." in n or n.startswith("lm_head")}
    for tensor_name, tensor in first.items():
        print(f"    {tensor_name:60} {str(tensor.dtype).removeprefix('torch.'):15} {list(tensor.shape)}")
    for tensor_name, tensor in published.tensors.items():
        twin = first.get(tensor_name.replace(".layers.1.", ".layers.0."))
        if ".layers.1." in tensor_name and (twin is None or twin.dtype != tensor.dtype):
            print(f"    {tensor_name:60} {str(tensor.dtype).removeprefix('torch.'):15} {list(tensor.shape)}")
    largest = max(float(value.abs().max()) for value in published.values.values())
    print(f"{len(published.values)} quantized linears, max |value| {largest:.6g}")


if sys.argv[1:2] == ["--keep"]:
    from tests.quant.test_published import keep

    for name in sys.argv[2:] or CASES:
        keep(name)
else:
    for name in sys.argv[1:] or CASES:
        report(name, CASES[name]())
