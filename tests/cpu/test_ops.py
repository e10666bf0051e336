"""Every case of tests/ops on the cpu op set: the cases and the checking loop are theirs, the place is this one."""

import subprocess
import sys
import types

import check
import pytest
import test_attention
import test_coarse
import test_elementwise
import test_indexer
import test_matmul
import test_moe
import test_quant
from check import Guarded, Op, both_numerics, tensor
from gguf import GGMLQuantizationType as T
from test_matmul import experts_of, x_of

import npglm.cpu
from npglm.cpu.blocks import SUPPORTED
from npglm.cpu.host import Host
from npglm.cpu.ops import CpuOps
from npglm.errors import NpglmError
from npglm.trace.probes import Keep

NOT_HERE = {  # verbs and inner parts of the gpu op set alone
    "test_expert_tiles", "test_scale", "test_select_top_k_of_many", "test_indexer_score_of_one_token",
    "test_experts_are_read_early_only_where_they_are_settled", "test_experts_that_are_not_there_yet",
    "test_blocks_that_come_with_others",
}  # fmt: skip
made = {}


def _cpu(numerics):
    if numerics not in made:
        made[numerics] = CpuOps(numerics, 2, device=Guarded(Host()))
    return made[numerics]


check.PLACES["cpu"] = _cpu


def _here(case):
    """A copy of a test function of tests/ops, with the place filled in."""
    copy = types.FunctionType(case.__code__, case.__globals__, case.__name__, case.__defaults__, case.__closure__)
    marks = [m for m in case.pytestmark if m.name != "parametrize" or m.args[0] != "place"]
    copy.pytestmark = [*marks, pytest.mark.parametrize("place", ["cpu"]).mark]
    return copy


for _module in (test_attention, test_coarse, test_elementwise, test_indexer, test_matmul, test_moe, test_quant):
    for _name, _case in list(vars(_module).items()):
        if _name.startswith("test_") and _name not in NOT_HERE and hasattr(_case, "pytestmark"):
            globals()[_name] = _here(_case)


@both_numerics
@pytest.mark.parametrize("kind", sorted(SUPPORTED), ids=lambda kind: kind.name)
def test_every_type(kind, numerics):
    """One token, a few, one tile and more; rows that fill no group of 16; K-quant rows and rows of an odd number of 32s."""
    op = Op("cpu", numerics)
    n_in = 768 if kind in (T.F32, T.F16, T.BF16) or check_block(kind) == 256 else 1312
    w = tensor(op_rng(kind), kind, 131, n_in)
    for n_tokens in (1, 3, 5, 12, 13, 31):
        op.check("linear", x_of(n_tokens, n_tokens, n_in), w)
    op.check("embed", x_of(1, 3).astype("int32") % 7, tensor(op_rng(kind), kind, 11, 512), exact=True)


def check_block(kind):
    from gguf import GGML_QUANT_SIZES

    return GGML_QUANT_SIZES[kind][0]


def op_rng(kind):
    import numpy as np

    return np.random.default_rng(int(kind))


@pytest.mark.parametrize("n_tokens", [1, 2, 40])
def test_fused_is_composed_bit_for_bit(n_tokens):
    fused, composed = Op("cpu"), Op("cpu", traced=True)
    w, h = test_moe.ffn_weights(), x_of(6, n_tokens, 256)
    for verb, args in (
        ("moe_ffn", (h, w, test_moe.CONFIG)),
        ("dense_ffn", (h, w)),
        ("gate_up_swiglu", (h, w.ffn_gate, w.ffn_up)),
    ):
        assert (fused.run(verb, *args) == composed.run(verb, *args)).all(), verb


def test_a_type_without_a_kernel_is_named():
    with pytest.raises(NpglmError, match="no kernel for type TQ2_0"):
        Op("cpu").there(tensor(op_rng(T.TQ2_0), T.TQ2_0, 3, 256))


def test_numerics_without_a_kernel_are_named():
    with pytest.raises(NpglmError, match="bf16 does not run on the cpu backend"):
        npglm.cpu.op_set("bf16")


def test_experts_that_nobody_chose_are_not_read():
    op = Op("cpu")
    w = tensor(op_rng(T.Q8_0), T.Q8_0, 9, 70, 256)
    experts = experts_of(20, 5, 3)
    w.data[5 * 70 :] = 0xFF  # f16 NaN scales
    op.check("linear_experts", x_of(1, 20, 256), w, experts)


@pytest.mark.parametrize("n_tokens", [1, 3])
def test_no_expert_is_here_and_no_shared_one(n_tokens):
    op, w, h = Op("cpu"), test_moe.ffn_weights(), x_of(6, n_tokens, 256)
    routed = types.SimpleNamespace(**{name: t for name, t in vars(w).items() if "shexp" not in name})
    experts, weights = experts_of(n_tokens, 11, 3), abs(x_of(8, n_tokens, 3))
    assert not op.run("moe_experts", h, routed, experts * 0 - 1, weights).any()


AFTER_UNMAPPED_BYTES = """
import ctypes, mmap
from types import SimpleNamespace
import numpy as np
from gguf import GGMLQuantizationType as T
from npglm.cpu.ops import CpuOps
from npglm.cpu.weights import Matrix

size = 1 << 16
memory = np.frombuffer(mmap.mmap(-1, 4 * size), np.uint8)
assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(memory.ctypes.data), size, 0) == 0  # PROT_NONE
data = memory[size : size + 1024 * 84].reshape(1024, 84)
w = Matrix(SimpleNamespace(name="w", source="", shape=(2, 512, 256), type=T.Q2_K, data=data))
for n_tokens in (1, 3):
    x, experts = np.ones((n_tokens, 256), np.float32), np.full((n_tokens, 2), -1, np.int32)
    assert not CpuOps("ggml", 2).linear_experts(x, w, experts).any()
"""


def test_an_expert_of_another_rank_is_not_read():
    """Expert -1 would lie before the matrix, where here is no memory."""
    done = subprocess.run([sys.executable, "-c", AFTER_UNMAPPED_BYTES], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_route_is_the_same_with_probes():
    """Of 8 chosen experts the weights' sum has an order: the same, whether anybody looks or not."""
    op, w = Op("cpu"), test_moe.ffn_weights(experts=40)
    config = types.SimpleNamespace(**vars(test_moe.CONFIG) | {"n_chosen": 8})
    there, h = op.there(w), op.there(x_of(3, 50, 256))
    for mine, seen in zip(op.ops.route(h, there, config), op.ops.route(h, there, config, Keep()), strict=True):
        assert mine.tobytes() == seen.tobytes()
