"""The tokenizer against llama.cpp's ids (tokens.json, and live under the oracle mark) and on made-up vocabularies."""

import json
import random
import time
from functools import cache
from pathlib import Path

import pytest
from gguf import GGUFWriter, TokenType

from npglm.checkpoint import read_gguf
from npglm.errors import NpglmError
from npglm.tokenizer import BYTE_OF, Tokenizer

GOLDEN = Path(__file__).parent / "golden"
TOKENS = json.loads((GOLDEN / "tokens.json").read_text(encoding="utf-8"))
BYTES = list(BYTE_OF)  # the 256 symbols; in made-up vocabularies they are the ids 0 to 255


@cache
def glm() -> Tokenizer:
    return Tokenizer.from_gguf(GOLDEN / "vocab-151k.gguf")


def metadata(extra: dict[str, TokenType], merges=(), pre="glm4", **keys) -> dict:
    """A made-up vocabulary: the 256 bytes, then `extra` (text: type)."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": BYTES + list(extra),
        "tokenizer.ggml.token_type": [1] * len(BYTES) + [int(kind) for kind in extra.values()],
        "tokenizer.ggml.merges": list(merges),
    } | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def texts(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.token(id) for id in ids]


# "xyzz" holds two overlapping tokens, "a<b>" one of each kind; "abc" is a token that no merges lead to.
MADE_UP = {
    "ab": TokenType.NORMAL,
    "bc": TokenType.NORMAL,
    "abc": TokenType.NORMAL,
    "xy": TokenType.USER_DEFINED,
    "yzz": TokenType.USER_DEFINED,
    "<b>": TokenType.CONTROL,
    "<u>": TokenType.UNKNOWN,
    "<pad>": TokenType.UNUSED,
    "</s>": TokenType.NORMAL,
    "<|user|>": TokenType.CONTROL,
    "<|observation|>": TokenType.CONTROL,
    "<|endoftext|>": TokenType.CONTROL,
}
MADE_UP_TEXTS = ["abc", "xabc abc", "xyzz", "wxyzz xy", "<b><u><pad>xy</b>", "<|user|>abc<|endoftext|>", "ab bc cab abcabc", ""]


# --- llama.cpp's ids, recorded ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", TOKENS["cases"], ids=lambda case: case["text"].encode("unicode_escape").decode()[:24])
def test_ids_equal_llama_cpp(case):
    assert glm().encode(case["text"], parse_special=False) == case["ids"]
    assert glm().encode(case["text"], parse_special=True) == case["ids_special"]
    assert glm().encode(case["text"]) == case["ids_special"]
    for column in ("ids", "ids_special"):
        assert glm().decode(case[column]) == case["text"]


def test_the_golden_cases_tell_the_columns_apart():
    assert len(TOKENS["cases"]) == 30
    assert sum(case["ids"] != case["ids_special"] for case in TOKENS["cases"]) >= 2


def test_facts_of_the_golden_vocabulary():
    tokenizer = glm()
    assert tokenizer.vocab_size == 151675
    assert (tokenizer.pre, tokenizer.bos_id, tokenizer.add_bos) == ("glm4", 151645, False)
    assert texts(tokenizer, sorted(tokenizer.eog)) == ["<|endoftext|>", "<|user|>", "<|observation|>"]
    # llama.cpp adds one ordinary token by its text.
    assert [tokenizer.token(id) for id in set(TOKENS["eog"]) - tokenizer.eog] == ["</s>"]
    assert tokenizer.token(785) == "The"
    assert tokenizer.token(6722) == "Ġcapital"


def test_the_small_model_has_a_tokenizer():
    tokenizer = Tokenizer.from_gguf(GOLDEN / "small.Q2_K.gguf")
    ids = tokenizer.encode("the island of <|user|> 日本")
    assert tokenizer.decode(ids) == "the island of <|user|> 日本"
    assert tokenizer.token(278) in texts(tokenizer, ids)
    assert 278 in tokenizer.eog
    assert tokenizer.vocab_size == 288


def test_construction_is_quick():
    values = read_gguf(GOLDEN / "vocab-151k.gguf").metadata
    start = time.perf_counter()
    Tokenizer.from_metadata(values, "vocab-151k.gguf")
    assert time.perf_counter() - start < 3  # 0.5 s on two idle cores


# --- rules, each on a vocabulary that shows it ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pre", "expected"),
    [("glm4", ["abc"]), ("glm5", ["abc"]), ("chatglm-bpe", ["a", "bc"])],
    ids=["glm4", "glm5", "chatglm-bpe"],
)
def test_ignore_merges(pre, expected):
    tokenizer = Tokenizer.from_metadata(metadata(MADE_UP, ["b c", "a b"], pre), "made up")
    assert texts(tokenizer, tokenizer.encode("abc")) == expected
    assert texts(tokenizer, tokenizer.encode("abcc")) == ["a", "bc", "c"]  # only whole words are looked up


def test_the_first_of_a_repeated_merge_counts():
    tokenizer = Tokenizer.from_metadata(metadata(MADE_UP, ["a b", "b c", "a b"], "chatglm-bpe"), "made up")
    assert texts(tokenizer, tokenizer.encode("abc")) == ["ab", "c"]


def test_which_special_tokens_are_cut_out():
    tokenizer = Tokenizer.from_metadata(metadata(MADE_UP), "made up")
    text = "<b>xy<u><pad>"
    assert texts(tokenizer, tokenizer.encode(text, parse_special=True)) == ["<b>", "xy", "<u>", *"<pad>"]
    assert texts(tokenizer, tokenizer.encode(text, parse_special=False)) == [*"<b>", "xy", *"<u>", *"<pad>"]
    assert texts(tokenizer, tokenizer.encode("</s>")) == [*"</s>"]


def test_the_longest_special_token_is_cut_out_first():
    tokenizer = Tokenizer.from_metadata(metadata(MADE_UP), "made up")
    assert texts(tokenizer, tokenizer.encode("xyzz")) == ["x", "yzz"]
    assert texts(tokenizer, tokenizer.encode("xyz")) == ["xy", "z"]


def test_words_do_not_reach_across_a_special_token():
    tokenizer = Tokenizer.from_metadata(metadata(MADE_UP, ["b c", "a b"]), "made up")
    assert texts(tokenizer, tokenizer.encode("a<b>bc")) == ["a", "<b>", "bc"]


def test_numbers_are_split_after_three_digits():
    extra = dict.fromkeys(["12", "34", "123", "1234", "45"], TokenType.NORMAL)
    tokenizer = Tokenizer.from_metadata(metadata(extra, ["1 2", "3 4", "12 34", "12 3", "4 5"]), "made up")
    assert texts(tokenizer, tokenizer.encode("12345")) == ["123", "45"]
    assert texts(tokenizer, tokenizer.encode("a12 3")) == ["a", "12", "Ġ", "3"]


def test_end_of_generation_ids():
    keys = {"eos_token_id": 259, "eot_token_id": 260, "eom_token_id": 261, "padding_token_id": 263}
    tokenizer = Tokenizer.from_metadata(metadata(MADE_UP, **keys), "made up")
    assert texts(tokenizer, sorted(tokenizer.eog)) == ["xy", "yzz", "<b>", "<|user|>", "<|observation|>", "<|endoftext|>"]
    assert Tokenizer.from_metadata(metadata({}), "made up").eog == frozenset()


def test_bos():
    plain = Tokenizer.from_metadata(metadata(MADE_UP), "made up")
    assert plain.bos_id is None
    assert plain.add_bos is False
    tokenizer = Tokenizer.from_metadata(metadata(MADE_UP, bos_token_id=261, add_bos_token=True), "made up")
    assert tokenizer.bos_id == 261
    assert tokenizer.add_bos is True
    assert tokenizer.encode("abc") == plain.encode("abc")  # never added here


def test_an_empty_token_matches_nothing():
    tokenizer = Tokenizer.from_metadata(metadata({"": TokenType.CONTROL, "ab": TokenType.NORMAL}), "made up")
    assert texts(tokenizer, tokenizer.encode("ab[EMPTY_256]")) == ["ab", "[EMPTY_256]"]


def test_a_file_without_token_types_has_ordinary_tokens_only():
    values = metadata(MADE_UP)
    del values["tokenizer.ggml.token_type"]
    tokenizer = Tokenizer.from_metadata(values, "made up")
    assert texts(tokenizer, tokenizer.encode("<b>")) == [*"<b>"]


# --- decoding ---------------------------------------------------------------------------------------------------------------


def test_decode_of_special_and_padding_tokens():
    tokenizer = Tokenizer.from_metadata(metadata(MADE_UP | {"日本": TokenType.NORMAL}), "made up")
    ids = [256, 261, 259, 262, 263, 268]  # ab, <b> (control), xy (user defined), <u> (unknown), <pad> (unused), not byte-level
    assert tokenizer.decode(ids) == "ab<b>xy<u>日本"
    assert tokenizer.decode(ids, skip_special=True) == "abxy日本"
    stream = tokenizer.stream(skip_special=True)
    assert [stream.push(id) for id in ids] == ["ab", "", "xy", "", "", "日本"]


def byte_ids(data: bytes) -> list[int]:
    symbol_of = {byte: symbol for symbol, byte in BYTE_OF.items()}
    return [BYTES.index(symbol_of[byte]) for byte in data]


@pytest.mark.parametrize(
    ("data", "pushed", "flushed"),
    [
        ("aé日😀".encode(), ["a", "", "é", "", "", "日", "", "", "", "😀"], ""),
        (b"\xe6\x97", ["", ""], "\ufffd"),  # cut off
        (b"\xe6\x97A", ["", "", "\ufffdA"], ""),  # invalid as soon as the A is there
        (b"\xe6\xe6\x97\xa5", ["", "\ufffd", "", "日"], ""),
        (b"\xff\x80b", ["\ufffd", "\ufffd", "b"], ""),  # never valid
        (b"\xed\xa0\x80", ["", "", "\ufffd" * 3], ""),  # a surrogate; CPython decides at its last byte
    ],
    ids=["valid", "cut-off", "cut-by-ascii", "restart", "never-valid", "surrogate"],
)
def test_stream_never_emits_half_a_character(data, pushed, flushed):
    tokenizer = Tokenizer.from_metadata(metadata({}), "made up")
    stream = tokenizer.stream()
    assert [stream.push(id) for id in byte_ids(data)] == pushed
    assert stream.flush() == flushed
    assert "".join(pushed) + flushed == tokenizer.decode(byte_ids(data)) == data.decode("utf-8", "replace")


def test_a_special_token_ends_an_unfinished_character():
    tokenizer = Tokenizer.from_metadata(metadata(MADE_UP), "made up")
    stream = tokenizer.stream()
    assert [stream.push(id) for id in [*byte_ids(b"\xe6\x97"), 261]] == ["", "", "\ufffd<b>"]


def test_streams_are_independent():
    tokenizer = Tokenizer.from_metadata(metadata({}), "made up")
    one, other = tokenizer.stream(), tokenizer.stream()
    head, tail = byte_ids("é".encode())
    assert (one.push(head), other.push(BYTES.index("b")), one.push(tail)) == ("", "b", "é")


def test_stream_equals_decode_on_random_ids():
    tokenizer, rng = glm(), random.Random(3)
    for _ in range(50):
        ids = [rng.randrange(tokenizer.vocab_size if rng.random() < 0.5 else 256) for _ in range(41)]
        stream = tokenizer.stream()
        assert "".join(map(stream.push, ids)) + stream.flush() == tokenizer.decode(ids)


def random_text(rng: random.Random) -> str:
    """Characters of every plane, most of them from where the word split decides; no surrogates."""
    pools = [
        "aZ é'sStTmMdDlLrReEvV",
        " \t\r\n\x0b\x0c\x85\xa0\u2003\u3000\u200b\ufeff",
        "09٣五Ⅷ½",
        "!.<|>/_-€\u0301\u20dd😀",
        "日本ก한שע",
    ]
    specials = ["<|user|>", "/nothink", "<think>", "<|us", "</think>", "<|endoftext|>", "[gMASK]<sop>"]
    out = []
    for _ in range(rng.randrange(1, 40)):
        kind = rng.random()
        if kind < 0.75:
            out.append(rng.choice(rng.choice(pools)) * rng.choice([1, 1, 1, 2, 3, 5]))
        elif kind < 0.85:
            out.append(rng.choice(specials))
        else:
            code = rng.randrange(0x110000)
            out.append(chr(code) if not 0xD800 <= code < 0xE000 else "x")
    return "".join(out)


def test_random_text_survives_the_round_trip():
    rng = random.Random(7)
    for _ in range(300):
        text = random_text(rng)
        assert glm().decode(glm().encode(text)) == text
        assert glm().decode(glm().encode(text, parse_special=False)) == text


# --- bad input --------------------------------------------------------------------------------------------------------------


def without(key):
    return lambda values: values.pop(f"tokenizer.ggml.{key}")


def put(key, value):
    return lambda values: values.update({f"tokenizer.ggml.{key}": value})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without("model"), "bad.gguf: key tokenizer.ggml.model is missing"),
        (without("pre"), "bad.gguf: key tokenizer.ggml.pre is missing"),
        (without("tokens"), "bad.gguf: key tokenizer.ggml.tokens is missing"),
        (without("merges"), "bad.gguf: key tokenizer.ggml.merges is missing"),
        (put("model", "llama"), "bad.gguf: tokenizer.ggml.model is 'llama', expected 'gpt2'"),
        (put("model", 3), "bad.gguf: key tokenizer.ggml.model is of type int, expected str"),
        (put("pre", "gpt-2"), "bad.gguf: tokenizer.ggml.pre is 'gpt-2', expected one of glm4, glm5, chatglm-bpe"),
        (put("tokens", "abc"), "bad.gguf: key tokenizer.ggml.tokens is of type str, expected list"),
        (put("tokens", []), "bad.gguf: tokenizer.ggml.tokens is empty"),
        (put("tokens", ["a", 7]), "bad.gguf: tokenizer.ggml.tokens[1] is of type int, expected str"),
        (put("tokens", ["a", "b", "c", "b"]), "bad.gguf: tokenizer.ggml.tokens holds 'b' twice: 1, 3"),
        (put("token_type", [1] * 267), "bad.gguf: tokenizer.ggml.token_type has 267 entries, expected 268"),
        (put("token_type", [1] * 267 + [6]), "bad.gguf: tokenizer.ggml.token_type[267] is 6, expected 1 to 5"),
        (put("token_type", [1] * 267 + [True]), "bad.gguf: tokenizer.ggml.token_type[267] is True, expected 1 to 5"),
        (put("token_type", [1] * 267 + [1.0]), "bad.gguf: tokenizer.ggml.token_type[267] is 1.0, expected 1 to 5"),
        (put("token_type", 1), "bad.gguf: key tokenizer.ggml.token_type is of type int, expected list"),
        (put("merges", ["a b", "bc"]), "bad.gguf: tokenizer.ggml.merges[1] is 'bc', expected two tokens with one space"),
        (put("merges", ["a b "]), "bad.gguf: tokenizer.ggml.merges[0] is 'a b ', expected two tokens with one space"),
        (put("merges", [" ab"]), "bad.gguf: tokenizer.ggml.merges[0] is ' ab', expected two tokens with one space"),
        (put("merges", ["a  b"]), "bad.gguf: tokenizer.ggml.merges[0] is 'a  b', expected two tokens with one space"),
        (put("merges", ["a qq"]), "bad.gguf: tokenizer.ggml.merges[0] is 'a qq', but 'qq' is not in the vocabulary"),
        (put("merges", ["a b", "a c"]), "bad.gguf: tokenizer.ggml.merges[1] is 'a c', but 'ac' is not in the vocabulary"),
        (put("eos_token_id", 268), "bad.gguf: tokenizer.ggml.eos_token_id is 268, outside the vocabulary of 268 tokens"),
        (put("eot_token_id", -1), "bad.gguf: tokenizer.ggml.eot_token_id is -1, outside the vocabulary of 268 tokens"),
        (put("bos_token_id", "x"), "bad.gguf: key tokenizer.ggml.bos_token_id is of type str, expected int"),
        (put("bos_token_id", True), "bad.gguf: key tokenizer.ggml.bos_token_id is of type bool, expected int"),
        (put("add_bos_token", 1), "bad.gguf: key tokenizer.ggml.add_bos_token is of type int, expected bool"),
        (
            put("add_bos_token", True),
            "bad.gguf: tokenizer.ggml.add_bos_token is true, but tokenizer.ggml.bos_token_id is missing",
        ),
    ],
)
def test_damaged_metadata(damage, message):
    values = metadata(MADE_UP)
    damage(values)
    with pytest.raises(NpglmError) as error:
        Tokenizer.from_metadata(values, "bad.gguf")
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_errors_stay_short_whatever_the_file_holds():
    for damage in (put("pre", "x\n" * 100_000), put("merges", ["x\n" * 100_000]), put("token_type", [[1] * 100_000] * 268)):
        values = metadata(MADE_UP)
        damage(values)
        with pytest.raises(NpglmError) as error:
            Tokenizer.from_metadata(values, "bad.gguf")
        assert len(str(error.value)) < 300
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("id", [-1, 268, 2**40])
def test_ids_outside_the_vocabulary(id):
    tokenizer = Tokenizer.from_metadata(metadata(MADE_UP), "made up")
    for use in (lambda: tokenizer.decode([1, id]), lambda: tokenizer.stream().push(id), lambda: tokenizer.token(id)):
        with pytest.raises(NpglmError, match=f"token id {id} is outside the vocabulary of 268 tokens"):
            use()


def test_text_that_is_not_unicode():
    with pytest.raises(NpglmError, match=r"lone surrogate '\\udc80' at character 2"):
        glm().encode("ab\udc80")  # what sys.argv holds for a byte that is not UTF-8


def test_a_byte_without_a_symbol_is_an_error_and_not_dropped():
    values = metadata({})
    values["tokenizer.ggml.tokens"] = [symbol for symbol in BYTES if BYTE_OF[symbol] != 0xC3]
    del values["tokenizer.ggml.token_type"]
    tokenizer = Tokenizer.from_metadata(values, "made up")
    assert tokenizer.decode(tokenizer.encode("plain")) == "plain"
    with pytest.raises(NpglmError, match="no token for byte 0xc3 of the text 'é'"):
        tokenizer.encode("é")


# --- llama.cpp, live --------------------------------------------------------------------------------------------------------


def llama_ids(path: Path, batch: list[str], parse_special: bool) -> list[list[int]]:
    import llama_cpp  # an error, not a skip, where the oracle extra is missing

    model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    return [model.tokenize(text.encode(), add_bos=False, special=parse_special) for text in batch]


@pytest.mark.oracle
@pytest.mark.parametrize("parse_special", [False, True])
def test_random_text_against_llama_cpp(parse_special):
    rng = random.Random(11)
    # llama.cpp makes the ordinary token </s> special by its text.
    batch = [text for text in (random_text(rng) for _ in range(1000)) if "</s>" not in text]
    expected = llama_ids(GOLDEN / "vocab-151k.gguf", batch, parse_special)
    for text, ids in zip(batch, expected, strict=True):
        assert glm().encode(text, parse_special) == ids, repr(text)


@pytest.mark.oracle
@pytest.mark.parametrize("pre", ["glm4", "glm5", "chatglm-bpe"])
def test_made_up_vocabulary_against_llama_cpp(pre, tmp_path):
    values = metadata({text: kind for text, kind in MADE_UP.items() if text != "</s>"}, ["b c", "a b"], pre)
    writer = GGUFWriter(tmp_path / "made-up.gguf", "glm-dsa")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_vocab_size(len(values["tokenizer.ggml.tokens"]))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(values["tokenizer.ggml.tokens"])
    writer.add_token_types(values["tokenizer.ggml.token_type"])
    writer.add_token_merges(values["tokenizer.ggml.merges"])
    writer.add_eos_token_id(values["tokenizer.ggml.tokens"].index("<|endoftext|>"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tokenizer = Tokenizer.from_gguf(tmp_path / "made-up.gguf")
    for parse_special in (False, True):
        expected = llama_ids(tmp_path / "made-up.gguf", MADE_UP_TEXTS, parse_special)
        assert [tokenizer.encode(text, parse_special) for text in MADE_UP_TEXTS] == expected
