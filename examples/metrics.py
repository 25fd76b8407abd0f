"""What the engine has counted so far: what a server's /metrics would show."""

from quire import LLM, SamplingParams
from quire.metrics.reader import Counter, Gauge, Histogram

with LLM("smollm2", max_model_len=512) as llm:
    llm.generate(["The sea is", "The sky is"], SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
    for metric in llm.get_metrics():
        if isinstance(metric, (Counter, Gauge)) and metric.value:
            print(f"{metric.name} = {metric.value:g}")
        elif isinstance(metric, Histogram) and metric.count:
            print(f"{metric.name}: {metric.count} observations, mean {metric.sum / metric.count:.4f}")
