"""Converts between text and tokens: chat templates, encoding, and decoding token by token.

Tokens are decoded to bytes and these to text, so decoding is exact and its cost per token constant. Supported:
byte-level BPE, and SentencePiece with byte fallback; other decoders are refused when the model is loaded.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from contracts.context import text_bytes
from contracts.errors import ConfigError, InvalidRequest
from runtime.model_config import read_json
from worker.core.token_bytes import most_bytes_of_a_token
from worker.core.tool_calls import Dialect
from worker.text.chat_template import ChatTemplate, load_template

_THOUGHT_BEGINS = b"<think>"
#: Number of final tokens of a prompt that contain the tag and the space after it.
_TAG_TOKENS = 16
_SPACE_MARK = "▁"
_BYTE_FALLBACK_LENGTH = len("<0x00>")


class TextCodec:
    """One model's tokenizer and chat template. Safe to use from several threads."""

    def __init__(
        self, tokenizer: Tokenizer, description: dict[str, Any], template: ChatTemplate, where: str = "tokenizer.json"
    ) -> None:
        """`description` is tokenizer.json's content; `where` names it in errors."""
        self._tokenizer = tokenizer
        self._template = template
        self._byte_level = _is_byte_level(description.get("decoder"), where)
        added = description.get("added_tokens") or []
        self._added = {int(t["id"]): str(t["content"]) for t in added}
        #: Ids of special tokens, which have no text.
        self.special_ids = frozenset(int(t["id"]) for t in added if t.get("special"))
        self._special_texts = sorted((self._added[i] for i in self.special_ids), key=len, reverse=True)
        self._bytes: dict[int, bytes] = {}
        longest = max((len(self.spelling(token)) for token in range(self.vocab_size)), default=0)
        #: Most bytes of a plain prompt, and of text in messages, that one token stands for; 0: unknown.
        self.longest_token_bytes = most_bytes_of_a_token(description, longest)
        self.message_token_bytes = self.longest_token_bytes if template.keeps_texts() else 0

    @classmethod
    def load(cls, directory: Path) -> TextCodec:
        """The codec of the model in `directory`. Raises ConfigError when its tokenizer or template cannot be used."""
        path = directory / "tokenizer.json"
        description = read_json(path)
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as e:  # the library raises bare Exception
            raise ConfigError(f"{path} is not a readable tokenizer: {e}; download it again") from e
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return cls(tokenizer, description, load_template(directory), str(path))

    def plain_tokens(self, text: str) -> list[int]:
        """The tokens of `text`, without special tokens around it."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    @property
    def vocab_size(self) -> int:
        """The tokenizer's number of ids, with special ones; the model's vocabulary may be larger."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def dialect(self) -> Dialect:
        """How tools are presented to this model, and how it spells a call."""
        return self._template.dialect

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        check: Callable[[int], None] = lambda _: None,
        variables: dict[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
    ) -> list[int]:
        """The tokens of a conversation's prompt.

        tools: callable functions in OpenAI's format. check: called with the bytes of the rendered text before it is
        tokenised. variables: the caller's, for the template (`contracts.template_kwargs`). add_generation_prompt,
        continue_final_message: see `ChatTemplate.render`. add_special_tokens: add the tokenizer's special tokens of a
        plain prompt; templates usually write their own. Raises InvalidRequest naming `messages`, and whatever `check`
        raises.

        A special token's spelling inside messages or variables is encoded as ordinary text. (transformers would make it
        a special token; everything else is encoded as there.)
        """
        rendered = self._template.render(
            messages,
            self._special_texts,
            tools,
            variables,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        check(sum(map(text_bytes, rendered)))
        tokens: list[int] = []
        for part in rendered:
            tokens += self._tokens(part, "messages", add_special_tokens=False)
        if not tokens:
            raise InvalidRequest("messages give an empty prompt", param="messages")
        if not add_special_tokens:
            return tokens
        before, after = self._around()
        return [*before, *tokens, *after]

    def _around(self) -> tuple[list[int], list[int]]:
        """The special tokens that the tokenizer puts before and after a text."""
        found = self._tokenizer.encode("a", add_special_tokens=True)
        inner = [i for i, special in enumerate(found.special_tokens_mask) if not special]
        return list(found.ids[: inner[0]]), list(found.ids[inner[-1] + 1 :])

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a plain prompt, with the tokenizer's special tokens around it. Special tokens spelled out in
        `text` are encoded as such, as the caller writes the whole prompt. Raises InvalidRequest."""
        return self._tokens(text, "prompt", add_special_tokens=add_special_tokens)

    def ends_thinking(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt ends with a reasoning tag; some templates begin every answer with it."""
        return b"".join(map(self.spelling, prompt[-_TAG_TOKENS:])).rstrip().endswith(_THOUGHT_BEGINS)

    def vocabulary_text(self, token: int) -> str:
        """The vocabulary's spelling of `token`, as transformers' `convert_ids_to_tokens`; empty for unknown ids."""
        return str(self._tokenizer.id_to_token(token) or "")

    def text_of(self, ids: Sequence[int]) -> str:
        """The text of a whole prompt, with special tokens spelled out: the inverse of `encode` without added special
        tokens, as far as the tokenizer has one."""
        # `decode` would hold the interpreter's lock.
        return str(self._tokenizer.decode_batch([list(ids)], skip_special_tokens=False)[0])

    def _tokens(self, text: str, param: str, add_special_tokens: bool) -> list[int]:
        try:
            # `encode` would hold the interpreter's lock (0.6 s for a megabyte) and block the engine's steps.
            return list(self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)
        except (UnicodeEncodeError, TypeError) as e:  # a lone surrogate
            raise InvalidRequest(f"{param} must be valid Unicode", param=param) from e

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids` within a longer text (a leading space stays), without special tokens. Invalid UTF-8,
        including an incomplete last character, becomes U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def detokenizer(self, skip_special: bool = True) -> Detokenizer:
        """A decoder for one request's tokens. Without `skip_special`, special tokens are spelled out."""
        return Detokenizer(self, skip_special)

    def spelling(self, token: int) -> bytes:
        """Like `token_bytes`, with special tokens spelled out."""
        return self._added[token].encode() if token in self.special_ids else self.token_bytes(token)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that `token` adds to the text; empty for special and unknown ids."""
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._spell(token)
        return known

    def _spell(self, token: int) -> bytes:
        if token in self.special_ids:
            return b""
        if token in self._added:
            return self._added[token].encode()
        spelled = self._tokenizer.id_to_token(token)
        if spelled is None:
            return b""
        if self._byte_level:
            if all(character in _BYTE_OF for character in spelled):
                return bytes(_BYTE_OF[character] for character in spelled)
            return str(spelled).encode()
        if len(spelled) == _BYTE_FALLBACK_LENGTH and spelled.startswith("<0x") and spelled.endswith(">"):
            return bytes([int(spelled[3:5], 16)])
        return spelled.replace(_SPACE_MARK, " ").encode()


class Detokenizer:
    """Decodes one request's tokens incrementally, in complete characters. The cost of a token depends on its bytes
    only."""

    def __init__(self, codec: TextCodec, skip_special: bool = True) -> None:
        self._bytes = codec.token_bytes if skip_special else codec.spelling
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def prime(self, ids: Sequence[int]) -> str:
        """Continues after `ids`, which another worker decoded. Returns their text, for stop strings."""
        return "".join(map(self.push, ids))

    def push(self, token: int) -> str:
        """The text that `token` completes; empty while a character is incomplete."""
        return self._decoder.decode(self._bytes(token))

    def flush(self) -> str:
        """Ends the text; an incomplete character is dropped."""
        self._decoder.reset()
        return ""


def _is_byte_level(decoder: Any, where: str) -> bool:
    """True for byte-level BPE, False for SentencePiece. Raises ConfigError for other decoders."""
    kind = decoder.get("type") if isinstance(decoder, dict) else None
    parts = [d.get("type") for d in decoder.get("decoders", [])] if kind == "Sequence" else [kind]
    if "ByteLevel" in parts:
        return True
    if kind is not None and set(parts) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return False
    raise ConfigError(
        f"{where}: decoder = {parts} is not supported; supported: ByteLevel, and Replace, ByteFallback, Fuse, "
        "Strip, Metaspace"
    )


def _byte_alphabet() -> dict[str, int]:
    """The characters by which byte-level BPE spells bytes: printable ones unchanged, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(rest)}


_BYTE_OF = _byte_alphabet()
