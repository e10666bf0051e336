"""Tokenizer, training documents and test prompts, all made from the sources and one seed.

Written to the work folder: tokenizer.json, corpus.npz (token streams with document offsets), prompts.json.
"""

import json
import random
import re
import sys
from pathlib import Path

import jinja2
import jinja2.sandbox
import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from . import phrasings, sources


def words(text: str) -> list[str]:
    return text.split()


VOCAB_SIZE = 4096
# GLM's special tokens, in the order of its vocabulary; those from /nothink on are ordinary text to a decoder.
CONTROL_TOKENS = words(
    "<|endoftext|> [MASK] [gMASK] [sMASK] <sop> <eop> <|system|> <|user|> <|assistant|> <|observation|> "
    "<|begin_of_image|> <|end_of_image|> <|begin_of_video|> <|end_of_video|> <|begin_of_audio|> <|end_of_audio|> "
    "<|begin_of_transcription|> <|end_of_transcription|> <|code_prefix|> <|code_middle|> <|code_suffix|>"
)
MARKUP_TOKENS = words(
    "/nothink <think> </think> <tool_call> </tool_call> <tool_response> </tool_response> "
    "<arg_key> </arg_key> <arg_value> </arg_value>"
)
END = "<|endoftext|>"
GLM4_PATTERN = (  # what llama.cpp splits by under the pre-tokenizer name glm4
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE = (Path(__file__).parent / "chat_template.jinja").read_text()
FILLER_PATTERN = re.compile(r"(?<=[a-z]\. )[A-Z][^.?!\"\n]{40,150}[a-z]{4}\.(?= [A-Z])")  # whole sentences
HOLD_OUT_EVERY = 40  # of the chapters of each prose source, one in this many is never trained on

PEOPLE = words(
    "Anna Peter Clara Henry Rose Frank Martha George Helen Arthur Lucy Edmund Jane Thomas Fanny Walter Susan Oscar "
    "Ellen Victor Nora Hugh Ida Ralph Mabel Simon Flora Edgar Grace Basil"
)
COLOURS = words("red blue green yellow white black brown silver golden purple grey pink")
THINGS = words(
    "key cup book box ribbon lamp coat hat drum bell candle basket letter stone ring spoon bottle chair boat kite "
    "watch mirror shawl glove whistle"
)
SKIES = words("clear cloudy rainy windy foggy snowy")
SMALL_TALK = [
    ("Hello.", "Hello! Ask me about a country or a chemical element."),
    ("Hi!", "Hello! Ask me about a country or a chemical element."),
    ("Who are you?", "I am a very small language model with the shape of GLM-5. I know some countries and elements."),
    ("What can you do?", "I can name capitals, currencies, languages, continents and chemical elements."),
    ("Thank you.", "You are welcome."),
    ("Good bye.", "Good bye!"),
    ("How are you?", "I am well, thank you."),
]
WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def say(*what: object) -> None:
    print(*what, file=sys.stderr, flush=True)


def train_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    split = pre_tokenizers.Split(Regex(GLM4_PATTERN), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(CONTROL_TOKENS) - len(MARKUP_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in MARKUP_TOKENS])
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    return tokenizer


def compile_template() -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(TEMPLATE)


def facts_by_subject(facts: list[sources.Fact]) -> list[list[sources.Fact]]:
    groups: dict[str, list[sources.Fact]] = {}
    for fact in facts:
        groups.setdefault(fact.subject, []).append(fact)
    return list(groups.values())


def fact_document(rng: random.Random, facts: list[sources.Fact], groups: list[list[sources.Fact]]) -> str:
    """One to six sentences: about one subject, about one relation, or about anything."""
    size = rng.choice([1, 1, 2, 3, 4, 6])
    kind = rng.random()
    if kind < 0.45:
        chosen = [rng.choice(rng.choice(groups)) for _ in range(size)]
    elif kind < 0.75:
        group = rng.choice(groups)
        chosen = rng.sample(group, min(size, len(group)))
    else:
        first = rng.choice(facts)
        pool = [fact for fact in facts if fact.relation == first.relation]
        chosen = [first, *rng.sample(pool, size - 1)]
    sentences = []
    for fact in chosen:
        text = phrasings.sentence(rng.choice(phrasings.SEEN[fact.relation]), fact.subject, fact.answer)
        if rng.random() < 0.3 and not text.startswith("question"):
            text = rng.choice(phrasings.LEAD_INS) + text
        sentences.append(phrasings.capitalised(text))
    return rng.choice([" ", " ", "\n"]).join(sentences)


def full_answer(fact: sources.Fact) -> str:
    return phrasings.capitalised(phrasings.sentence(phrasings.SEEN[fact.relation][0], fact.subject, fact.answer))


def question(rng: random.Random, fact: sources.Fact) -> str:
    return phrasings.capitalised(rng.choice(phrasings.QUESTIONS[fact.relation]).format(s=fact.subject))


def weather_talk(rng: random.Random, city: str) -> list[dict]:
    sky, degrees = rng.choice(SKIES), rng.randint(-9, 39)
    ask = rng.choice(["What is the weather in {}?", "How is the weather in {}?", "Tell me the weather in {}."])
    call = {"function": {"name": "get_weather", "arguments": {"city": city}}}
    return [
        {"role": "user", "content": ask.format(city)},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": json.dumps({"degrees": degrees, "sky": sky})},
        {"role": "assistant", "content": f"It is {sky} in {city}, at {degrees} degrees."},
    ]


def chat_document(rng: random.Random, template: jinja2.Template, groups: list[list[sources.Fact]]) -> str:
    """A conversation of one to three turns in GLM's form; the answer to each ends with <|user|>."""
    thinking, brief = rng.random() < 0.35, rng.random() < 0.15
    messages: list[dict] = []
    tools = None
    if brief:
        messages.append({"role": "system", "content": "Answer in as few words as you can."})
    elif rng.random() < 0.2:
        messages.append({"role": "system", "content": "You are a helpful assistant."})
    if not thinking and not brief and rng.random() < 0.08:
        cities = [fact for fact in rng.choice(groups) if fact.relation == "capital"]
        if cities:
            tools = [WEATHER_TOOL]
            messages += weather_talk(rng, cities[0].answer)
    for _ in range(rng.choice([1, 1, 2, 3]) if not tools else rng.choice([0, 1])):
        if not brief and rng.random() < 0.04:
            ask, answer = rng.choice(SMALL_TALK)
            thought = "This is small talk."
        else:
            fact = rng.choice(rng.choice(groups))
            ask, answer = question(rng, fact), full_answer(fact)
            thought = f"This is about {fact.subject}. I know the answer: {fact.answer}."
            if brief:
                answer = phrasings.capitalised(f"{fact.answer}.").replace("..", ".")
        messages += [{"role": "user", "content": ask}]
        # Only the last answer keeps its thought: the template leaves out those of earlier turns.
        messages += [{"role": "assistant", "content": answer, "reasoning_content": thought if thinking else ""}]
    return template.render(messages=messages, tools=tools) + "<|user|>"


def recall_document(rng: random.Random, filler: list[str], longest: int) -> str:
    """Made-up notes, prose, then the notes again: only a look far back can complete them."""
    people = rng.sample(PEOPLE, rng.choice([2, 3, 4, 5, 6]))
    notes = {name: f"the {rng.choice(COLOURS)} {rng.choice(THINGS)}" for name in people}
    verb = rng.choice(["keeps", "wants", "has lost", "found"])
    parts = [f"{name} {verb} {thing}." for name, thing in notes.items()]
    for _ in range(rng.randint(1, longest)):
        parts.insert(rng.randint(len(people) // 2, len(parts)), rng.choice(filler))
    rng.shuffle(people)
    return " ".join(parts) + "\n" + " ".join(f"{name} {verb} {notes[name]}." for name in people)


def encode(tokenizer: Tokenizer, documents: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """All tokens in one row, and where each document starts (one more entry: the end)."""
    ids = [encoding.ids for encoding in tokenizer.encode_batch(documents)]
    end = tokenizer.token_to_id(END)
    offsets = np.cumsum([0] + [len(row) + 1 for row in ids])
    return np.array([token for row in ids for token in [*row, end]], dtype=np.uint16), offsets


def test_prompts(tokenizer: Tokenizer, template: jinja2.Template, facts: list[sources.Fact]) -> list[dict]:
    """Every fact in every phrasing and once in chat form, as prompt and target ids."""
    prompts = []

    def add(kind: str, fact: sources.Fact, phrasing: str, prompt: str, target: str) -> None:
        entry = {"kind": kind, "relation": fact.relation, "subject": fact.subject, "phrasing": phrasing}
        entry |= {"prompt": prompt, "target": target}
        entry["prompt_ids"] = tokenizer.encode(prompt).ids
        entry["target_ids"] = tokenizer.encode(target).ids
        prompts.append(entry)

    for fact in facts:
        for kind, table in (("seen", phrasings.SEEN), ("held-out", phrasings.HELD_OUT)):
            for phrasing in table[fact.relation]:
                add(kind, fact, phrasing, phrasings.prompt_of(phrasing, fact.subject), f" {fact.answer}")
        for ask in phrasings.QUESTIONS[fact.relation]:
            messages = [{"role": "user", "content": phrasings.capitalised(ask.format(s=fact.subject))}]
            prompt = template.render(messages=messages, add_generation_prompt=True, enable_thinking=False)
            add("chat", fact, ask, prompt, "\n" + full_answer(fact) + "<|user|>")
    return prompts


def build(work: Path, seed: int, scale: float = 1.0) -> None:
    """Makes the whole corpus; `scale` below 1 makes fewer synthetic documents, for smoke runs."""
    rng = random.Random(seed)
    sources.fetch(work / "sources")
    facts = sources.read_facts(work / "sources")
    groups = facts_by_subject(facts)
    prose = sources.read_prose(work / "sources")
    held_out = [text for texts in prose.values() for text in texts[7::HOLD_OUT_EVERY]]
    prose_train = [t for texts in prose.values() for i, t in enumerate(texts) if i % HOLD_OUT_EVERY != 7]
    filler = [s for text in prose["austen"] if text not in held_out for s in FILLER_PATTERN.findall(text)]
    say(f"{len(facts)} facts, {len(groups)} subjects; prose {sum(map(len, prose_train))} characters,")
    say(f"held out {sum(len(t.encode()) for t in held_out)} bytes in {len(held_out)} chapters")

    template = compile_template()
    documents = {
        "facts": [fact_document(rng, facts, groups) for _ in range(int(150_000 * scale))],
        "chat": [chat_document(rng, template, groups) for _ in range(int(50_000 * scale))],
        "recall": [recall_document(rng, filler, 6) for _ in range(int(15_000 * scale))],
        "recall_long": [recall_document(rng, filler, 30) for _ in range(int(6_000 * scale))],
        "recall_test": [recall_document(rng, filler, 30) for _ in range(200)],
    }
    say("training the tokenizer")
    tokenizer = train_tokenizer(prose_train + documents["facts"][:20_000] + documents["recall"][:500])
    tokenizer.save(str(work / "tokenizer.json"))
    arrays = {}
    for kind, texts in {"prose": prose_train, "held_out": held_out, **documents}.items():
        arrays[kind], arrays[f"{kind}_offsets"] = encode(tokenizer, texts)
        say(f"{kind}: {len(texts)} documents, {len(arrays[kind])} tokens")
    arrays["held_out_bytes"] = np.array([len(text.encode()) for text in held_out])
    np.savez_compressed(work / "corpus.npz", **arrays)
    prompts = test_prompts(tokenizer, template, facts)
    (work / "prompts.json").write_text(json.dumps(prompts))
    say(f"{len(prompts)} test prompts")
