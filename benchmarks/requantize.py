"""A GGUF file with its weights in another type: `python benchmarks/requantize.py IN.gguf OUT.gguf Q8_0`.

For comparisons on files that nobody publishes. Only types that the `gguf` package can write; tensors of one dimension,
and rows that do not fill the type's blocks, stay as they are.
"""

import argparse
from pathlib import Path

import gguf


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("type_name", choices=("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16"))
    args = parser.parse_args()
    source, target = args.source, args.target
    wanted = gguf.GGMLQuantizationType[args.type_name]
    block_size, _ = gguf.GGML_QUANT_SIZES[wanted]
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(Path(target), reader.get_field("general.architecture").contents())
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, inner)
    for tensor in reader.tensors:
        data, kept_type = tensor.data, tensor.tensor_type
        if len(tensor.shape) > 1 and tensor.shape[0] % block_size == 0:
            data = gguf.quants.quantize(gguf.quants.dequantize(data, kept_type), wanted)
            kept_type = wanted
        writer.add_tensor(tensor.name, data, raw_dtype=kept_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file(progress=True)
    writer.close()


if __name__ == "__main__":
    main()
