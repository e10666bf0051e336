"""Text to token ids and back, from the vocabulary inside a GGUF.

The algorithm is GPT-2's byte-level BPE, run by the `tokenizers` package; what GLM adds to it follows llama.cpp's
`src/llama-vocab.cpp` (the source vendored in llama-cpp-python 0.3.36), because its ids are what a GGUF is judged by:

- The split into words is `LLAMA_VOCAB_PRE_TYPE_CHATGLM4`'s expression, for all three pre-tokenizers below.
- `ignore_merges` (glm4, glm5): a word that is a token as a whole is that token, whether or not merges lead to it.
- Special tokens are cut out of the text first (`tokenizer_st_partition`): the longest token first, over the whole text. So of
  two that overlap the longer one wins, even where the shorter one starts earlier. USER_DEFINED tokens are always cut out,
  CONTROL and UNKNOWN ones only when special tokens are parsed, NORMAL and UNUSED ones never.

On purpose unlike llama.cpp: it makes ordinary tokens that look like some family's end mark (`</s>`) special and
end-of-generation by their text; here they stay what the file says they are.
"""

import codecs
from collections.abc import Iterable
from operator import index
from pathlib import Path

import tokenizers
from gguf import TokenType
from tokenizers import models, pre_tokenizers

from npglm.checkpoint import read_gguf, shard_paths
from npglm.errors import NpglmError

IGNORE_MERGES = {"glm4": True, "glm5": True, "chatglm-bpe": False}  # the known values of tokenizer.ggml.pre

# The contractions are spelled out, as llama.cpp has them: (?i:'s) would match U+017F, the long s, too.
SPLIT = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# GLM ends a turn by starting the next one. Files often declare one of these ids only, so the rest are found by their text.
EOG_TEXTS = ("<|endoftext|>", "<|user|>", "<|observation|>")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's names of the 256 bytes: printable Latin-1 stands for itself, the others are U+0100 onwards in their order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()


class Tokenizer:
    """A GGUF's tokenizer. Token ids are Python ints, 0 <= id < vocab_size.

    pre: tokenizer.ggml.pre. bos_id, add_bos: the BOS token and whether a raw prompt begins with it; `encode` never adds it.
    eog: the ids that end a generation: the file's eos, eot and eom, and EOG_TEXTS.
    """

    def __init__(self, metadata: dict, source: str):
        model = _get(metadata, "tokenizer.ggml.model", str, source)
        if model != "gpt2":
            raise NpglmError(f"{source}: tokenizer.ggml.model is {model!r:.40}, expected 'gpt2'")
        self.pre: str = _get(metadata, "tokenizer.ggml.pre", str, source)
        if self.pre not in IGNORE_MERGES:
            raise NpglmError(f"{source}: tokenizer.ggml.pre is {self.pre!r:.40}, expected one of {', '.join(IGNORE_MERGES)}")

        # As llama.cpp: an empty token gets a name, so that it cannot match the empty string everywhere.
        tokens = [text or f"[EMPTY_{i}]" for i, text in enumerate(_strings(metadata, "tokenizer.ggml.tokens", source))]
        if not tokens:
            raise NpglmError(f"{source}: tokenizer.ggml.tokens is empty")
        vocabulary = {text: id for id, text in enumerate(tokens)}
        if len(vocabulary) < len(tokens):
            first = next(id for id, text in enumerate(tokens) if vocabulary[text] != id)
            raise NpglmError(
                f"{source}: tokenizer.ggml.tokens holds {tokens[first]!r:.40} twice: {first}, {vocabulary[tokens[first]]}"
            )
        self._tokens = tokens
        self._types = _token_types(metadata, tokens, source)

        model = models.BPE(
            vocab=vocabulary, merges=_merges(metadata, vocabulary, source), ignore_merges=IGNORE_MERGES[self.pre]
        )
        self._bpe = tokenizers.Tokenizer(model)
        self._bpe.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(tokenizers.Regex(SPLIT), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        # `tokenizers` silently drops what has no symbol; a text that holds such a byte is an error instead.
        self._missing_bytes = frozenset(byte for symbol, byte in BYTE_OF.items() if symbol not in vocabulary)

        cut_out = (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN)
        specials = [id for id, kind in enumerate(self._types) if kind in cut_out]
        self._specials = sorted(specials, key=lambda id: -len(tokens[id].encode()))  # stable: equal lengths in order of id

        self.bos_id: int | None = self._special_id(metadata, "bos", source)
        self.add_bos: bool = _get(metadata, "tokenizer.ggml.add_bos_token", bool, source, default=False)
        if self.add_bos and self.bos_id is None:
            raise NpglmError(f"{source}: tokenizer.ggml.add_bos_token is true, but tokenizer.ggml.bos_token_id is missing")
        declared = [self._special_id(metadata, name, source) for name in ("eos", "eot", "eom")]
        self.eog: frozenset[int] = frozenset(id for id in [*declared, *map(vocabulary.get, EOG_TEXTS)] if id is not None)

    @classmethod
    def from_gguf(cls, path: str | Path) -> "Tokenizer":
        """The tokenizer of a GGUF file, shard or folder. NpglmError if it cannot be read or has no tokenizer known here."""
        first = shard_paths(Path(path))[0]  # the only shard with metadata
        return cls.from_metadata(read_gguf(first).metadata, first.name)

    @classmethod
    def from_metadata(cls, metadata: dict, source: str) -> "Tokenizer":
        """metadata: a GGUF's keys with Python values, arrays as lists. source: what errors call the file."""
        return cls(metadata, source)

    @property
    def vocab_size(self) -> int:
        return len(self._tokens)

    def token(self, id: int) -> str:
        """The token as the vocabulary spells it: 'Ġthe' where the text is ' the'."""
        return self._tokens[self._checked(id)]

    def encode(self, text: str, parse_special: bool = True) -> list[int]:
        """Token ids of the text, without BOS. parse_special: `<|user|>` in the text becomes that token, not its letters.

        NpglmError for text that UTF-8 cannot hold (a lone surrogate) and for bytes that the vocabulary has no symbol for.
        """
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise NpglmError(
                f"the text is not valid Unicode: lone surrogate {text[e.start]!r} at character {e.start}"
            ) from None
        ids = []
        for part in self._partition(text, parse_special):
            if isinstance(part, int):
                ids.append(part)
                continue
            if missing := self._missing_bytes.intersection(part.encode()):
                raise NpglmError(f"the vocabulary has no token for byte 0x{min(missing):02x} of the text {part[:40]!r}")
            ids += self._bpe.encode(part, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """The text of the ids; bytes that are not UTF-8 become U+FFFD. skip_special: leave CONTROL and UNKNOWN tokens out."""
        return b"".join(self._piece(id, skip_special) for id in ids).decode("utf-8", "replace")

    def stream(self, skip_special: bool = False) -> "TextStream":
        """A decoder for ids that come one at a time."""
        return TextStream(self, skip_special)

    def _partition(self, text: str, parse_special: bool) -> list[str | int]:
        """The text with special tokens cut out: ids and the (not empty) strings between them."""
        parts: list[str | int] = [text] if text else []
        for id in self._specials:
            special = self._tokens[id]
            if special not in text or not (parse_special or self._types[id] == TokenType.USER_DEFINED):
                continue
            cut = []
            for part in parts:
                if isinstance(part, int):
                    cut.append(part)
                    continue
                for i, piece in enumerate(part.split(special)):
                    cut += [id] if i else []
                    cut += [piece] if piece else []
            parts = cut
        return parts

    def _piece(self, id: int, skip_special: bool) -> bytes:
        """The token's bytes, as llama.cpp's token_to_piece: special tokens are their text, UNUSED ones (padding) nothing."""
        id = self._checked(id)
        text, kind = self._tokens[id], self._types[id]
        if kind == TokenType.UNUSED or (skip_special and kind in (TokenType.CONTROL, TokenType.UNKNOWN)):
            return b""
        if kind != TokenType.NORMAL:
            return text.encode()
        try:
            return bytes([BYTE_OF[symbol] for symbol in text])
        except KeyError:  # not byte-level: its own text, as `tokenizers` decodes it
            return text.encode()

    def _checked(self, id: int) -> int:
        if not 0 <= index(id) < len(self._tokens):
            raise NpglmError(f"token id {id} is outside the vocabulary of {len(self._tokens)} tokens")
        return index(id)

    def _special_id(self, metadata: dict, name: str, source: str) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        id = _get(metadata, key, int, source, default=None)
        if id is not None and not 0 <= id < len(self._tokens):
            raise NpglmError(f"{source}: {key} is {id}, outside the vocabulary of {len(self._tokens)} tokens")
        return id


class TextStream:
    """Ids in, text out, never half a character: bytes of an unfinished one wait for the rest.

    Bytes that can no longer become a character are U+FFFD at once. All results joined equal `Tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = False):
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, id: int) -> str:
        """The text that this id completes; often empty."""
        return self._utf8.decode(self._tokenizer._piece(id, self._skip_special))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for an unfinished character, else nothing."""
        return self._utf8.decode(b"", final=True)


_REQUIRED = object()


def _get(metadata: dict, key: str, kind: type, source: str, default=_REQUIRED):
    """metadata[key], checked to be of that type (a bool is no int)."""
    if key not in metadata:
        if default is _REQUIRED:
            raise NpglmError(f"{source}: key {key} is missing")
        return default
    value = metadata[key]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise NpglmError(f"{source}: key {key} is of type {type(value).__name__}, expected {kind.__name__}")
    return value


def _strings(metadata: dict, key: str, source: str) -> list[str]:
    values = _get(metadata, key, list, source)
    for i, value in enumerate(values):
        if not isinstance(value, str):
            raise NpglmError(f"{source}: {key}[{i}] is of type {type(value).__name__}, expected str")
    return values


def _token_types(metadata: dict, tokens: list[str], source: str) -> list[int]:
    key = "tokenizer.ggml.token_type"
    types = _get(metadata, key, list, source, default=[int(TokenType.NORMAL)] * len(tokens))
    if len(types) != len(tokens):
        raise NpglmError(f"{source}: {key} has {len(types)} entries, expected {len(tokens)}, one for each token")
    # BYTE belongs to SentencePiece vocabularies; llama.cpp aborts when it decodes one here.
    known = (TokenType.NORMAL, TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNUSED)
    for id, kind in enumerate(types):
        if type(kind) is not int or kind not in known:
            raise NpglmError(f"{source}: {key}[{id}] is {kind!r:.40}, expected 1 to 5")
    return types


def _merges(metadata: dict, vocabulary: dict[str, int], source: str) -> list[tuple[str, str]]:
    """The merges by rank. Of a repeated one the first counts, as in llama.cpp (in `tokenizers` the last would)."""
    key = "tokenizer.ggml.merges"
    pairs = {}
    for i, merge in enumerate(_strings(metadata, key, source)):
        left, _, right = merge.partition(" ")
        if not left or not right or " " in right:
            raise NpglmError(f"{source}: {key}[{i}] is {merge!r:.40}, expected two tokens with one space between")
        for text in (left, right, left + right):
            if text not in vocabulary:
                raise NpglmError(f"{source}: {key}[{i}] is {merge!r:.40}, but {text!r:.40} is not in the vocabulary")
        pairs[left, right] = None
    return list(pairs)
