"""Recorded steps compute the same as steps that Python runs, for any rows, however requests come and go."""

import ctypes
import json
import logging
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from quire import LLM, SamplingParams, registry
from quire.ops.attention import cpu as attention
from quire.ops.attention.reference import AttentionTables
from quire.ops.cpu.tape import Recording, Rows
from quire.ops.elementwise import cpu as elementwise
from quire.ops.packed_linear import cpu as linear
from tests.prompts import PROMPTS

# Model files whose decode steps are compiled kernels only, where the CPU has the instructions for all of these.
RECORDED = ("glm", "llama", "phi3", "qwen2", "qwen3", "smollm3")


def answers(llm: LLM, count: int) -> list[list[int]]:
    params = [SamplingParams(temperature=0, max_tokens=3 + 5 * (i % 7), ignore_eos=True) for i in range(count)]
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS[:count], params, use_tqdm=False)]


@pytest.mark.parametrize("count", [1, 5, 19])
def test_a_tape_gives_the_same_tokens_as_python(smollm2, count):
    with LLM("smollm2", max_model_len=256, enable_prefix_caching=False) as llm:
        graphs = llm.client.engine.executor.worker.runner.recordings
        recorded = graphs.tape is not None
        played = answers(llm, count)
        graphs.tape = None
        plain = answers(llm, count)
    assert played == plain
    assert recorded == linear.supported()


def of_tiny(name: str, folder: Path) -> LLM:
    """A model file's TINY with random weights, in bfloat16 on the CPU."""
    fields = registry.literals("quire.models", "TINY")[name]
    (folder / "config.json").write_text(json.dumps(fields))
    options = {"dtype": "bfloat16", "num_threads": 1, "kv_cache_memory_bytes": 64 << 20}
    return LLM(str(folder), device="cpu", load_format="dummy", skip_tokenizer_init=True, **options)


@pytest.mark.parametrize("name", RECORDED)
def test_a_model_of_compiled_kernels_is_recorded(name, tmp_path):
    with of_tiny(name, tmp_path) as llm:
        recordings = llm.client.engine.executor.worker.runner.recordings
        # On a CPU without the instructions for packed products, torch computes these, and must compute nothing else.
        assert recordings.computed_by_torch == (set() if linear.supported() else {"linear"})
        assert (recordings.tape is not None) == linear.supported()


def test_a_model_that_torch_computes_in_part_says_so_once(tmp_path, caplog):
    caplog.set_level(logging.INFO, "quire.worker.cpu.graphs")
    with of_tiny("gpt2", tmp_path) as llm:
        assert llm.client.engine.executor.worker.runner.recordings.tape is None
        llm.generate([[1, 2, 3], [4]], SamplingParams(max_tokens=4), use_tqdm=False)
    (record,) = [record for record in caplog.records if record.name == "quire.worker.cpu.graphs"]
    assert "cannot be recorded" in record.message and "gelu" in record.message


def test_a_pass_in_which_torch_computes_gives_no_tape():
    x = torch.ones(2, 32)
    with Recording() as recording:
        y = x + 1
    assert recording.tape(y, 2) is None


@pytest.mark.skipif(not elementwise.supported(torch.float32), reason="needs a C++ compiler")
def test_a_tape_reads_its_inputs_anew_and_keeps_little_memory():
    x = torch.randn(4, 64)
    weight = torch.rand(64)
    with torch.inference_mode():
        with Recording() as recording:
            y = x[:2]
            for _ in range(50):
                y, _ = elementwise.rms_norm(y, weight, 1e-6, x[:2])
        tape = recording.tape(y, max_rows=4)
        x.copy_(torch.randn(4, 64))
        expected = x
        for _ in range(50):
            expected, _ = elementwise.rms_norm(expected, weight, 1e-6, x)
        for rows in (4, 1, 3):
            assert torch.equal(tape.play(rows), expected[:rows])
    assert tape.arena.nbytes < 8 * x.nbytes  # a hundred buffers were allocated while recording


def test_a_tape_moves_pointers_and_leaves_numbers_alone():
    """A stride is a large number too, and might happen to be the address of a buffer."""
    heard = []

    def function(*args: object) -> None:
        heard.extend(args)

    function.argtypes = [ctypes.c_void_p, ctypes.c_int64, Rows]
    with Recording() as recording:
        y = torch.empty(2, 64)
        recording.calls.append((function, (y.data_ptr(), y.data_ptr(), 2)))
    tape = recording.tape(y, max_rows=4)
    tape.play(3)
    assert [argument.value for argument in heard] == [tape.output.data_ptr(), y.data_ptr(), 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.skipif(not elementwise.supported(torch.float32), reason="needs a C++ compiler")
def test_a_tape_attends_over_blocks_that_lie_apart(dtype):
    K, D, size, padding = 2, 32, 16, 48
    memory = torch.zeros(4, 2 * size * K * D + padding, dtype=dtype)
    cache = memory[:, :-padding].view(4, 2, size, K, D)
    qkv = torch.randn(3, 4 * K, D).to(dtype)
    cos_sin = torch.ones(1, D)
    positions = torch.zeros(3, dtype=torch.int64)
    slots = torch.arange(1, 4) * size
    starts = torch.arange(4).int()
    lens = torch.ones(3).int()
    table = torch.arange(1, 4).int()[:, None]

    def attend(count: int) -> torch.Tensor:
        """Each row writes its first token, into a block of its own, and sees nothing else."""
        q, k, v = qkv[:count].split((2 * K, K, K), 1)
        elementwise.rope_and_write(q, k, v, cos_sin, positions[:count], cache, slots[:count])
        tables = AttentionTables(starts[: count + 1], lens[:count], table[:count], size, 1)
        return attention.paged_attention(q, cache, tables, scale=1.0)

    with torch.inference_mode(), Recording() as recording:
        out = attend(2)
    tape = recording.tape(out, max_rows=3)
    qkv.copy_(torch.randn(qkv.shape))
    memory.zero_()
    expected = qkv[:, 3 * K :].repeat_interleave(2, 1)
    torch.testing.assert_close(tape.play(3), expected)
    assert memory[1:, :-padding].any(1).all() and not memory[0].any() and not memory[:, -padding:].any()


def test_recording_does_not_import_torchs_compiler():
    program = (
        "import sys, torch; from quire.ops.cpu.tape import Recording\n"
        "with Recording(): torch.empty(3).view(3)\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.skipif(not elementwise.supported(torch.float32), reason="needs a C++ compiler")
def test_a_tape_does_not_hear_other_threads():
    x, weight = torch.randn(4, 64), torch.rand(64)
    with Recording() as recording:
        thread = threading.Thread(target=lambda: elementwise.rms_norm(x, weight, 1e-6))
        thread.start()
        thread.join()
    assert recording.calls == []
