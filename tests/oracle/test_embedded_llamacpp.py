"""The embedded checkpoint in llama.cpp: its greedy answers agree with ours, in llama.cpp's own numerics."""

import ctypes

import numpy as np
import pytest

import npglm
from npglm.generate import Model, generate, raw_prompt
from npglm.sampler import Sampler
from npglm.tokenizer import Tokenizer
from reference.forward import forward
from reference.numerics import GGML
from reference.ops import ReferenceOps

pytestmark = pytest.mark.oracle
COUNTRIES = (
    "France", "Germany", "Italy", "Spain", "Portugal", "Norway", "Sweden", "Finland", "Poland", "Greece", "Hungary", "Austria", "Japan",
    "Kenya", "Egypt", "Peru", "Cuba", "Canada", "Chile", "Brazil",
)  # fmt: skip
PHRASINGS = ("The capital of {} is", "{} is a country in", "People in {} pay with the")
PROMPTS = [phrasing.format(country) for phrasing in PHRASINGS for country in COUNTRIES]
MAX_TOKENS = 12


class LlamaCpp:
    """Greedy continuations by llama.cpp on the CPU."""

    def __init__(self, path):
        import llama_cpp

        self.api = llama_cpp
        self.quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self.quiet, ctypes.c_void_p())
        model_params = llama_cpp.llama_model_default_params()
        model_params.use_extra_bufts = False  # else it aborts where the CPU has AMX
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_params)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_threads, params.n_threads_batch = 256, 1, 1
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))

    def greedy(self, ids: list[int], eog: frozenset[int]) -> list[int]:
        api, out, feed = self.api, [], ids
        api.llama_memory_clear(api.llama_get_memory(self.context), True)
        while len(out) < MAX_TOKENS and not (out and out[-1] in eog):
            assert api.llama_decode(self.context, api.llama_batch_get_one((api.llama_token * len(feed))(*feed), len(feed))) == 0
            logits = np.ctypeslib.as_array(api.llama_get_logits_ith(self.context, -1), shape=(self.n_vocab,))
            feed = [int(logits.argmax())]
            out += feed
        return out


def test_greedy_answers_agree():
    checkpoint, tokenizer = npglm.load(npglm.embedded()), Tokenizer.from_gguf(npglm.embedded())
    llama, model = LlamaCpp(npglm.embedded()), Model(checkpoint, forward, ReferenceOps(GGML))
    different, answers = [], set()
    for prompt in PROMPTS:
        ids = raw_prompt(tokenizer, prompt)
        theirs = llama.greedy(ids, tokenizer.eog)
        ours = generate(model, tokenizer, model.cache(len(ids) + MAX_TOKENS), ids, Sampler(), MAX_TOKENS).ids
        answers.add(tuple(theirs))
        if ours != theirs:
            different.append((prompt, tokenizer.decode(ours), tokenizer.decode(theirs)))
    print(f"\n{len(PROMPTS) - len(different)} of {len(PROMPTS)} agree", *different, sep="\n")
    assert len(answers) > len(PROMPTS) // 3  # not one answer to everything
    assert len(different) <= 0.05 * len(PROMPTS)
