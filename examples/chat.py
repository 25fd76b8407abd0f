"""A conversation: the model's chat template makes a prompt of the messages."""

from quire import LLM, SamplingParams

with LLM("smollm2", max_model_len=1024) as llm:
    params = SamplingParams(temperature=0, max_tokens=48)
    messages = [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "What is the capital of France?"},
    ]
    for question in (None, "And of Italy?"):
        if question is not None:
            messages.append({"role": "user", "content": question})
        answer = llm.chat(messages, params, use_tqdm=False)[0].outputs[0].text
        messages.append({"role": "assistant", "content": answer})
    for message in messages:
        print(f"{message['role']}: {message['content']}")

    # The same prompt, made by hand.
    tokenizer = llm.get_tokenizer()
    prompt = tokenizer.apply_chat_template(messages[:2], tokenize=False, add_generation_prompt=True)
    print(f"the template ends with the token {tokenizer.eos_token!r}: {prompt!r}")
