"""HFTokenizer beside transformers' own tokenizer of the same file: the same names give the same things."""

import pytest

from quire.errors import RequestError
from quire.frontend.chat import ChatTemplate
from quire.frontend.hf_tokenizer import HFTokenizer

TEXT = "Hello, wörld! <|im_end|> and more"
CHAT = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
]


@pytest.fixture(scope="module")
def ours(smollm2):
    return HFTokenizer(smollm2, ChatTemplate.of(smollm2))


def test_texts_become_the_same_ids(ours, hf_smollm2):
    assert ours(TEXT).input_ids == ours(TEXT)["input_ids"] == hf_smollm2(TEXT).input_ids
    assert ours.encode(TEXT) == hf_smollm2.encode(TEXT)
    assert ours(["a b", "c"]).input_ids == hf_smollm2(["a b", "c"]).input_ids
    assert ours(["a b", "c"]).attention_mask == hf_smollm2(["a b", "c"]).attention_mask
    assert ours.tokenize(TEXT) == hf_smollm2.tokenize(TEXT)


def test_ids_become_the_same_texts(ours, hf_smollm2):
    ids = ours.encode(TEXT)
    assert ours.decode(ids) == hf_smollm2.decode(ids)
    assert ours.decode(ids, skip_special_tokens=True) == hf_smollm2.decode(ids, skip_special_tokens=True)
    assert ours.batch_decode([ids, ids[:2]]) == hf_smollm2.batch_decode([ids, ids[:2]])
    assert ours.convert_ids_to_tokens(ids) == hf_smollm2.convert_ids_to_tokens(ids)
    assert ours.convert_tokens_to_ids("<|im_end|>") == hf_smollm2.convert_tokens_to_ids("<|im_end|>")


def test_special_tokens_have_the_same_names_and_ids(ours, hf_smollm2):
    for name in ("bos_token", "eos_token", "bos_token_id", "eos_token_id"):
        assert getattr(ours, name) == getattr(hf_smollm2, name)
    assert ours.get_vocab() == hf_smollm2.get_vocab() and len(ours) == len(hf_smollm2)
    assert set(hf_smollm2.all_special_ids) <= set(ours.all_special_ids)
    assert ours.eos_token in ours.all_special_tokens and ours.eos_token in ours


@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chats_become_the_same_prompts(ours, hf_smollm2, add_generation_prompt):
    options = {"add_generation_prompt": add_generation_prompt}
    text = hf_smollm2.apply_chat_template(CHAT, tokenize=False, **options)
    assert ours.apply_chat_template(CHAT, tokenize=False, **options) == text
    ids = hf_smollm2(text, add_special_tokens=False).input_ids
    assert ours.apply_chat_template(CHAT, **options) == ids
    assert ours.apply_chat_template(CHAT, return_dict=True, **options)["input_ids"] == ids
    assert ours.apply_chat_template([CHAT, CHAT], **options) == [ids, ids]


def test_a_template_and_its_arguments_may_be_given(ours):
    template = "{{ messages[0].content }} {{ mood }}"
    text = ours.apply_chat_template(CHAT, chat_template=template, tokenize=False, mood="gladly")
    assert text == "Hi gladly"


def test_what_needs_tensors_is_refused_by_name(ours):
    assert ours(TEXT, padding=False, return_tensors=None).input_ids
    with pytest.raises(RequestError, match="return_tensors"):
        ours(TEXT, return_tensors="pt")
    with pytest.raises(RequestError, match="padding"):
        ours.apply_chat_template(CHAT, padding=True)
