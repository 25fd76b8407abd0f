"""HFTokenizer: a model's tokenizer with the names that Hugging Face's have, for programs of users.

Given out by `get_tokenizer()` of LLM and AsyncLLM; nothing here is used to serve requests. Texts become lists of ids,
never tensors: padding, truncation and tensors are refused.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

from quire.errors import RequestError
from quire.frontend.chat import ChatTemplate, encode_chat
from quire.frontend.tokenizer import Tokenizer
from quire.utils.attributes import Attributes


class HFTokenizer:
    is_fast = True

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.special_tokens_map = dict(tokenizer.special_tokens)  # "bos_token" -> its spelling
        spelling = tokenizer.special_tokens.get
        self.bos_token, self.eos_token = spelling("bos_token"), spelling("eos_token")
        self.pad_token, self.unk_token = spelling("pad_token"), spelling("unk_token")
        self.bos_token_id, self.eos_token_id = self._id(self.bos_token), self._id(self.eos_token)
        self.pad_token_id, self.unk_token_id = self._id(self.pad_token), self._id(self.unk_token)
        self.all_special_ids = sorted(tokenizer.special_ids)
        self.all_special_tokens = self.convert_ids_to_tokens(self.all_special_ids)
        self.chat_template = template.source
        self.vocab_size = tokenizer.vocab_size

    def _id(self, spelling: str | None) -> int | None:
        return self.tokenizer.token_id(spelling) if spelling is not None else None

    def __len__(self) -> int:
        return self.vocab_size

    # -- text to ids ---------------------------------------------------------------------------------------------

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True, **options: Any) -> Attributes:
        _refuse(options)
        if isinstance(text, str):
            ids: Any = self.encode(text, add_special_tokens)
            return Attributes(input_ids=ids, attention_mask=[1] * len(ids))
        ids = [self.encode(each, add_special_tokens) for each in text]
        return Attributes(input_ids=ids, attention_mask=[[1] * len(each) for each in ids])

    def encode(self, text: str, add_special_tokens: bool = True, **options: Any) -> list[int]:
        _refuse(options)
        return self.tokenizer.encode(text, add_special_tokens)

    def tokenize(self, text: str, add_special_tokens: bool = False) -> list[str | None]:
        return self.convert_ids_to_tokens(self.encode(text, add_special_tokens))

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        return_dict: bool = False,
        **template_kwargs: Any,
    ) -> Any:
        """The conversation as a prompt: its token ids, or with `tokenize=False` its text. Several give a list."""
        if documents is not None:
            raise RequestError("documents is not supported by apply_chat_template: give them in a message")
        _refuse({name: template_kwargs.pop(name) for name in _REFUSED if name in template_kwargs})
        template = self.template if chat_template is None else ChatTemplate.of(self.tokenizer, chat_template)

        def prompt(messages: Sequence[Mapping[str, Any]]) -> Any:
            options = add_generation_prompt, continue_final_message, tools, template_kwargs
            if not tokenize:
                return template.render(messages, *options)
            return encode_chat(self.tokenizer, template, messages, *options)

        is_one = not conversation or isinstance(conversation[0], Mapping)
        prompts = prompt(conversation) if is_one else [prompt(each) for each in conversation]
        if not (tokenize and return_dict):
            return prompts
        return Attributes(
            input_ids=prompts, attention_mask=[1] * len(prompts) if is_one else [[1] * len(p) for p in prompts]
        )

    # -- ids to text ---------------------------------------------------------------------------------------------

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self.tokenizer.decode(ids, skip_special_tokens)

    def batch_decode(self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = False) -> list[str]:
        return [self.decode(token_ids, skip_special_tokens) for token_ids in sequences]

    @overload
    def convert_ids_to_tokens(self, ids: int) -> str | None: ...

    @overload
    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str | None]: ...

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> str | None | list[str | None]:
        """Tokens as the vocabulary spells them."""
        name = self.tokenizer.backend.id_to_token
        return name(ids) if isinstance(ids, int) else [name(token_id) for token_id in ids]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        if isinstance(tokens, str):
            return self.tokenizer.token_id(tokens)
        return [self.tokenizer.token_id(token) for token in tokens]

    def get_vocab(self) -> dict[str, int]:
        return self.tokenizer.backend.get_vocab(with_added_tokens=True)

    def __iter__(self) -> Iterator[str]:
        return iter(self.get_vocab())

    def __contains__(self, token: str) -> bool:
        return self.tokenizer.token_id(token) is not None


# Arguments of Hugging Face's tokenizers that would change what comes back.
_REFUSED = ("padding", "truncation", "max_length", "return_tensors", "tokenizer_kwargs")


def _refuse(options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        if value not in (None, False):
            raise RequestError(f"{name} is not supported by this tokenizer: it gives lists of ids as they are")
