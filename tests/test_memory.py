"""A full-size MoE layer and a full-size head of GLM-5.2 in bounded memory, reading the chosen experts only."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from synth import GLM52, write_model

ROOT = Path(__file__).parents[1]
TOKENS = [154000, 7, 31337]
LIMIT_BYTES = 3 << 30

# Runs in a process of its own. RssAnon is what it holds beyond the page cache; the mapping's Rss are the pages that it touched.
MEASURE = """
import json, re, sys, threading
from pathlib import Path
import numpy as np
import npglm
from npglm.cache import Cache
from npglm.checkpoint import Tensor
from npglm.trace.probes import NoProbe
from reference.forward import forward
from reference.ops import ReferenceOps

def resident(file, pattern):
    return int(re.search(pattern + r".*?Rss\\w*:\\s+(\\d+) kB", Path("/proc/self", file).read_text(), re.DOTALL)[1]) << 10

peak, done = 0, threading.Event()
def watch():
    global peak
    while not done.wait(0.002):
        peak = max(peak, resident("status", "(?=RssAnon)"))

decoded = []
rows = Tensor.rows
def counted(self, start, stop):
    decoded.append((self.name, start, stop))
    return rows(self, start, stop)
Tensor.rows = counted

class Chosen(NoProbe):
    def layer(self, index):
        return self
    def __call__(self, name, array):
        if name == "ffn_moe_topk":
            chosen.append(array.tolist())

chosen = []
checkpoint = npglm.load(sys.argv[1])
tokens = np.array(json.loads(sys.argv[2]), np.int32)
ops = ReferenceOps()
watcher = threading.Thread(target=watch)
watcher.start()
cache = Cache(checkpoint.config, len(tokens), ops)
logits = forward(ops.load(checkpoint), checkpoint.config, cache, tokens, np.arange(len(tokens), dtype=np.int32), ops, Chosen())
done.set()
watcher.join()
print(json.dumps({
    "peak_anon": peak, "touched": resident("smaps", re.escape(sys.argv[1])), "chosen": chosen[0], "decoded": decoded,
    "finite": bool(np.isfinite(logits).all()), "shape": logits.shape,
}))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_full_size_layer_and_head(tmp_path):
    # The router's bias admits 24 experts. Only they have random blocks, so that writing takes seconds; the others are holes.
    admitted = np.random.default_rng(5).choice(GLM52.n_experts, 24, replace=False)
    bias = np.full(GLM52.n_experts, 5, np.float32)
    bias[admitted] = 7

    def rows_to_write(name):
        n_rows = {"ffn_gate_exps": GLM52.expert_ffn, "ffn_up_exps": GLM52.expert_ffn, "ffn_down_exps": GLM52.hidden}
        for part, n in n_rows.items():
            if part in name:
                return [(e * n, (e + 1) * n) for e in admitted]
        return [(i, i + 9) for i in range(0, GLM52.vocab - 9, 999)] + [(t, t + 1) for t in TOKENS] if "embd" in name else None

    path = write_model(
        tmp_path / "layer.gguf",
        seed=5,
        shape=GLM52,
        n_layers=1,
        n_dense=0,
        full=None,
        tied=True,
        tokenizer=False,
        context=4096,
        fill=rows_to_write,
        values={"blk.0.exp_probs_b.bias": bias},
    )
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, path, json.dumps(TOKENS)], check=True, capture_output=True, text=True, cwd=ROOT
    )
    path.unlink()  # pytest keeps the folders of its last three runs
    found = json.loads(done.stdout)
    print({key: found[key] for key in ("peak_anon", "touched", "chosen")})
    assert found["finite"]
    assert found["shape"] == [len(TOKENS), GLM52.vocab]
    assert found["peak_anon"] < LIMIT_BYTES

    experts = {expert for row in found["chosen"] for expert in row}
    assert 8 < len(experts) <= 8 * len(TOKENS)  # tokens differ in their choice
    assert experts <= set(admitted)
    for name, n_rows in (("gate", GLM52.expert_ffn), ("up", GLM52.expert_ffn), ("down", GLM52.hidden)):
        calls = [(start, stop) for tensor, start, stop in found["decoded"] if tensor == f"blk.0.ffn_{name}_exps.weight"]
        read = [row for start, stop in calls for row in range(start, stop)]
        assert sorted(read) == sorted(e * n_rows + i for e in experts for i in range(n_rows))  # each row once
    table = [(start, stop) for tensor, start, stop in found["decoded"] if tensor == "token_embd.weight"]
    assert [(t, t + 1) for t in TOKENS] == table[: len(TOKENS)]
    assert sum(stop - start for start, stop in table[len(TOKENS) :]) == GLM52.vocab  # as the head

    expert_bytes = 2 * GLM52.expert_ffn * (GLM52.hidden // 256 * 84) + GLM52.hidden * (GLM52.expert_ffn // 256 * 84)
    head_bytes = GLM52.vocab * (GLM52.hidden // 32 * 34)
    layer_bytes = 232e6  # attention, indexer, shared expert, router
    needed = len(experts) * expert_bytes + head_bytes + layer_bytes
    assert 0.5 * needed < found["touched"] < 1.05 * needed
