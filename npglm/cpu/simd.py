"""Vector types and what is done to them, as Numba intrinsics that emit LLVM IR. The one place where tiers differ.

Types are Vec("i8", 64) and so on; values live in registers. `+ - * & | ^` work lane by lane on equal types, `v >> n` is a logical
shift. Memory is named by address (int64, bytes). 512-bit vectors are used on every tier: LLVM splits them where registers are
shorter, so that one source serves all tiers and sums are added up in one order everywhere.

A Tile is TOKENS vectors side by side, the accumulators of a matrix product: 16 rows x TOKENS tokens.
"""

import operator
import platform
from inspect import Parameter, Signature

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.core.imputils import lower_builtin
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, register_model

from npglm.cpu import tier

TIER = tier()
VNNI = TIER in ("avx512vnni", "avxvnni")
X86_SIMD = TIER != "plain"
NATIVE_F16 = X86_SIMD or platform.machine() in ("aarch64", "arm64")
TOKENS = 12 if TIER == "avx512vnni" else 3  # of a tile: 2 x TOKENS accumulators of 16 lanes, in 32 or 16 registers

I1, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
ELEMENTS = {"i8": I8, "i16": I16, "i32": I32, "f32": F32}


# --- types ------------------------------------------------------------------------------------------------------------------


class Vec(types.Type):
    """`lanes` numbers of one type, "i8", "i16", "i32" or "f32", in a register."""

    def __init__(self, element: str, lanes: int):
        super().__init__(f"{element}x{lanes}")
        self.lanes, self.is_float = lanes, element == "f32"
        self.ir = ir.VectorType(ELEMENTS[element], lanes)


class Tile(types.Type):
    """TOKENS vectors of one type."""

    def __init__(self, vec: Vec):
        super().__init__(f"tile_{vec.name}")
        self.vec, self.ir = vec, ir.ArrayType(vec.ir, TOKENS)


@register_model(Vec)
@register_model(Tile)
class _Model(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, fe_type.ir)


i8x16, i8x32, i8x64 = (Vec("i8", n) for n in (16, 32, 64))
i16x8, i16x16, i16x32 = (Vec("i16", n) for n in (8, 16, 32))
i32x8, i32x16 = Vec("i32", 8), Vec("i32", 16)
f32x8, f32x16 = Vec("f32", 8), Vec("f32", 16)
tile_i32, tile_f32 = Tile(i32x16), Tile(f32x16)
i8, i16, i32, i64, f32, none = types.int8, types.int16, types.int32, types.int64, types.float32, types.none


def define(result, *params):
    """Make an intrinsic of fixed types out of a function emit(builder, *values) -> value that writes its IR."""

    def make(emit):
        def typer(typingctx, *args):
            def codegen(context, builder, sig, values):
                out = emit(builder, *values)
                return context.get_dummy_value() if result is none else out

            return (result(*params), codegen) if len(args) == len(params) else None

        names = ["typingctx", *(f"arg{i}" for i in range(len(params)))]
        typer.__signature__ = Signature([Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names])
        typer.__name__ = emit.__name__
        typer.__doc__ = emit.__doc__
        return intrinsic(typer)

    return make


def _call(builder, name: str, result, *values):
    """Call the LLVM intrinsic `name`."""
    fn_type = ir.FunctionType(result, [v.type for v in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, fn_type, name), values)


def _splat(builder, value, lanes: int):
    vector = ir.VectorType(value.type, lanes)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), ir.Constant(ir.VectorType(I32, lanes), [0] * lanes))


def _constant(like, value):
    """`value` in every lane of the vector type `like`, or as a scalar of it."""
    return ir.Constant(like, [value] * like.count) if isinstance(like, ir.VectorType) else ir.Constant(like, value)


def _with_element(like, element):
    return ir.VectorType(element, like.count) if isinstance(like, ir.VectorType) else element


def _pick(builder, v, indices):
    """The lanes `indices` of v."""
    return builder.shuffle_vector(v, ir.Constant(v.type, ir.Undefined), ir.Constant(ir.VectorType(I32, len(indices)), indices))


def _join(builder, a, b):
    """The lanes of a, then those of b."""
    n = 2 * a.type.count
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, n), list(range(n))))


def _halves(builder, v):
    n = v.type.count
    return _pick(builder, v, list(range(n // 2))), _pick(builder, v, list(range(n // 2, n)))


# --- lane by lane -----------------------------------------------------------------------------------------------------------

_BINARY = {
    operator.add: ("add", "fadd"), operator.sub: ("sub", "fsub"), operator.mul: ("mul", "fmul"), operator.and_: ("and_", None),
    operator.or_: ("or_", None), operator.xor: ("xor", None),
}  # fmt: skip


def _register(op, int_name, float_name):
    @infer_global(op)
    class Same(AbstractTemplate):
        def generic(self, args, kws):
            if len(args) == 2 and isinstance(args[0], Vec) and args[0] == args[1]:
                return signature(args[0], *args)

    @lower_builtin(op, Vec, Vec)
    def lower(context, builder, sig, args):
        return getattr(builder, float_name if sig.return_type.is_float else int_name)(*args)


for _op, _names in _BINARY.items():
    _register(_op, *_names)


@infer_global(operator.rshift)
class _Shift(AbstractTemplate):
    def generic(self, args, kws):
        if len(args) == 2 and isinstance(args[0], Vec) and isinstance(args[1], types.Integer):
            return signature(args[0], args[0], i64)


@lower_builtin(operator.rshift, Vec, types.Integer)
def _lower_shift(context, builder, sig, args):
    vector, n = args
    amount = builder.trunc(n, vector.type.element) if vector.type.element != n.type else n
    return builder.lshr(vector, _splat(builder, amount, vector.type.count))


# --- memory -----------------------------------------------------------------------------------------------------------------


def _pointer(builder, address, to):
    return builder.inttoptr(address, to.as_pointer())


def _load(result, element=None):
    """address -> value; element: the IR type in memory where it is not the value's own (f16)."""
    like = result.ir if isinstance(result, Vec) else F32

    @define(result, i64)
    def load(builder, address):
        stored = like if element is None else _with_element(like, element)
        value = builder.load(_pointer(builder, address, stored), align=1)
        return value if element is None else _widen_f16(builder, value)

    return load


def _load_int(stored, extend=None):
    """address -> int64; extend: "sext" or "zext" of what is stored."""

    @define(i64, i64)
    def load(builder, address):
        value = builder.load(_pointer(builder, address, stored), align=1)
        return getattr(builder, extend)(value, I64) if extend else value

    return load


def _store(kind, element=None):
    """(address, value) -> nothing."""

    @define(none, i64, kind)
    def store(builder, address, value):
        value = value if element is None else _narrow_f16(builder, value)
        builder.store(value, _pointer(builder, address, value.type), align=1)

    return store


def _widen_f16(builder, bits):
    """i16 bits of f16 -> f32, exactly. Scalars and vectors."""
    f32_type = _with_element(bits.type, F32)
    if NATIVE_F16:
        return builder.fpext(builder.bitcast(bits, _with_element(bits.type, F16)), f32_type)
    i32_type = _with_element(bits.type, I32)
    wide = builder.zext(bits, i32_type)
    sign = builder.shl(builder.and_(wide, _constant(i32_type, 0x8000)), _constant(i32_type, 16))
    magnitude = builder.shl(builder.and_(wide, _constant(i32_type, 0x7FFF)), _constant(i32_type, 13))
    scaled = builder.fmul(builder.bitcast(magnitude, f32_type), _constant(f32_type, 2.0**112))  # the exponents' biases differ
    special = builder.icmp_unsigned(">=", magnitude, _constant(i32_type, 0x0F800000))  # inf and NaN
    scaled = builder.bitcast(scaled, i32_type)
    scaled = builder.select(special, builder.or_(scaled, _constant(i32_type, 0x7F800000)), scaled)
    return builder.bitcast(builder.or_(scaled, sign), f32_type)


def _narrow_f16(builder, value):
    """f32 -> i16 bits of the nearest f16, ties to even."""
    i16_type, i32_type = _with_element(value.type, I16), _with_element(value.type, I32)
    if NATIVE_F16:
        return builder.bitcast(builder.fptrunc(value, _with_element(value.type, F16)), i16_type)
    bits = builder.bitcast(value, i32_type)
    sign = builder.and_(bits, _constant(i32_type, 0x80000000))
    bits = builder.xor(bits, sign)

    def const(n):
        return _constant(i32_type, n)

    odd = builder.and_(builder.lshr(bits, const(13)), const(1))
    normal = builder.add(
        builder.add(bits, odd), const((15 - 127 << 23) + 0xFFF & 0xFFFFFFFF)
    )  # round: to 10 bits, ties to even
    normal = builder.lshr(normal, const(13))
    magic = const(126 << 23)  # 0.5: its last bit is worth 2^-24, as is that of a subnormal f16
    f32_type = value.type
    subnormal = builder.fadd(builder.bitcast(bits, f32_type), builder.bitcast(magic, f32_type))
    subnormal = builder.sub(builder.bitcast(subnormal, i32_type), magic)
    out = builder.select(builder.icmp_unsigned("<", bits, const(113 << 23)), subnormal, normal)
    large = builder.select(builder.icmp_unsigned(">", bits, const(255 << 23)), const(0x7E00), const(0x7C00))
    out = builder.select(builder.icmp_unsigned(">=", bits, const(143 << 23)), large, out)
    return builder.trunc(builder.or_(out, builder.lshr(sign, const(16))), i16_type)


load_i8, load_i16, load_i32 = (_load_int(t, "sext") for t in (I8, I16, I32))
load_u8, load_u16, load_u32 = (_load_int(t, "zext") for t in (I8, I16, I32))
load_i64, load_f32 = _load_int(I64), _load(f32)
load_i8x16, load_i8x32, load_i8x64, load_i16x8, load_i16x16, load_i16x32 = (
    _load(t) for t in (i8x16, i8x32, i8x64, i16x8, i16x16, i16x32)
)
load_i32x16, load_f32x8, load_f32x16 = (_load(t) for t in (i32x16, f32x8, f32x16))
load_f16, load_f16x16 = _load(f32, I16), _load(f32x16, I16)  # -> f32
store_i8, store_i16, store_i32, store_f32, store_i64 = (_store(t) for t in (i8, i16, i32, f32, i64))  # low bits
store_i8x16, store_i8x32, store_i8x64, store_i32x8, store_f32x8, store_f32x16 = (
    _store(t) for t in (i8x16, i8x32, i8x64, i32x8, f32x8, f32x16)
)
store_f16, store_f16x16 = _store(f32, I16), _store(f32x16, I16)  # round: f16


@define(i64, i64, i64)
def load_field(builder, address, index):
    """Of an array of int64."""
    return builder.load(builder.gep(_pointer(builder, address, I64), [index]), align=8)


@define(none, i64, i64, i64)
def store_field(builder, address, index, value):
    builder.store(value, builder.gep(_pointer(builder, address, I64), [index]), align=8)


@define(none, i64, i64)
def copy_fields(builder, to, source):
    """Eight int64."""
    fields = ir.VectorType(I64, 8)
    builder.store(builder.load(_pointer(builder, source, fields), align=8), _pointer(builder, to, fields), align=8)


@define(types.float64, i64)
def load_f64(builder, address):
    return builder.load(_pointer(builder, address, ir.DoubleType()), align=8)


@define(f32, i64)
def f16_to_f32(builder, bits):
    return _widen_f16(builder, builder.trunc(bits, I16))


@define(i64, f32)
def f16_bits(builder, value):
    """Of the nearest f16, ties to even."""
    return builder.zext(_narrow_f16(builder, value), I64)


@define(none, i64)
def prefetch(builder, address):
    """Ask for the cache line at address; it need not be mapped."""
    pointer = _pointer(builder, address, I8)
    one, three, zero = (ir.Constant(I32, n) for n in (1, 3, 0))
    fn_type = ir.FunctionType(ir.VoidType(), [pointer.type, I32, I32, I32])
    fn = cgutils.get_or_insert_function(builder.module, fn_type, "llvm.prefetch.p0")
    return builder.call(fn, [pointer, zero, three, one])


def _call_op(n_args):
    @define(none, *[i64] * (1 + n_args))
    def call(builder, function, *values):
        """Call the kernel (jit.py) at address `function`."""
        fn_type = ir.FunctionType(ir.VoidType(), [I64] * n_args)
        return builder.call(builder.inttoptr(function, fn_type.as_pointer()), values)

    return call


call_2, call_3, call_4, call_5, call_7 = (_call_op(n) for n in (2, 3, 4, 5, 7))


@define(i64, i64)
def fetch_add_one(builder, address):
    """Add 1 to the int64 at address, atomically; returns what was there."""
    return builder.atomic_rmw("add", _pointer(builder, address, I64), ir.Constant(I64, 1), "monotonic")


# --- making and converting --------------------------------------------------------------------------------------------------


def _splat_op(result, scalar):
    @define(result, scalar)
    def splat(builder, value):
        return _splat(builder, value, result.lanes)

    return splat


splat_i8x16, splat_i8x32, splat_i8x64 = (_splat_op(t, i8) for t in (i8x16, i8x32, i8x64))
splat_i32x8, splat_i32x16 = _splat_op(i32x8, i32), _splat_op(i32x16, i32)
splat_f32x8, splat_f32x16 = _splat_op(f32x8, f32), _splat_op(f32x16, f32)


def _to_f32(source, result):
    @define(result, source)
    def to_f32(builder, v):
        return builder.sitofp(v, result.ir)

    return to_f32


to_f32x8, to_f32x16 = _to_f32(i32x8, f32x8), _to_f32(i32x16, f32x16)


@define(i8x16, f32x16)
def to_i8x16(builder, v):
    """Whole numbers in -128..127."""
    return builder.trunc(builder.fptosi(v, i32x16.ir), i8x16.ir)


@define(f32x16, i8x16)
def i8_to_f32x16(builder, v):
    return builder.sitofp(v, f32x16.ir)


@define(f32x16, f32x16)
def round_even(builder, v):
    """To the nearest whole number, ties to even."""
    return _call(builder, "llvm.rint.v16f32", v.type, v)


@define(f32x16, f32x16)
def absolute(builder, v):
    return _call(builder, "llvm.fabs.v16f32", v.type, v)


def _extreme(name, operation):
    @define(f32x16, f32x16, f32x16)
    def extreme(builder, a, b):
        return builder.select(builder.fcmp_ordered(operation, a, b), a, b)

    return extreme


maximum, minimum = _extreme("maximum", ">"), _extreme("minimum", "<")  # b where one is NaN


@define(f32, i64)
def as_f32(builder, v):
    """The same bits, the low 32."""
    return builder.bitcast(builder.trunc(v, I32), F32)


@define(i64, f32)
def as_i32(builder, v):
    """The same bits, sign extended."""
    return builder.sext(builder.bitcast(v, I32), I64)


@define(i16x32, i32x16)
def as_i16x32(builder, v):
    """The same bits."""
    return builder.bitcast(v, i16x32.ir)


@define(i32x8)
def zero_i32x8(builder):
    return ir.Constant(i32x8.ir, [0] * 8)


@define(f32x16, i64)
def load_bf16x16(builder, address):
    bits = builder.load(_pointer(builder, address, ir.VectorType(I16, 16)), align=1)
    wide = builder.shl(builder.zext(bits, i32x16.ir), _constant(i32x16.ir, 16))
    return builder.bitcast(wide, f32x16.ir)


def _fma(builder, a, b, c):
    """a * b + c; one rounding where the tier has it."""
    if TIER == "plain":
        return builder.fadd(builder.fmul(a, b), c)
    suffix = f"v{a.type.count}f32" if isinstance(a.type, ir.VectorType) else "f32"
    return _call(builder, f"llvm.fma.{suffix}", a.type, a, b, c)


fma_f32x8, fma_f32x16, fma_f32 = (define(t, t, t, t)(_fma) for t in (f32x8, f32x16, f32))


def _exp(builder, x):
    """e^x to about 1 ulp; 0 below -87 (no denormals), e^88 above 88. Cephes' expf on lanes."""

    def const(value):
        return _constant(x.type, value)

    def clamp(operation, limit, v):
        return builder.select(builder.fcmp_ordered(operation, v, const(limit)), const(limit), v)

    r = clamp(">", 88.0, clamp("<", -87.0, x))
    n = _call(builder, f"llvm.rint.v{x.type.count}f32", x.type, builder.fmul(r, const(1.44269504088896341)))
    r = _fma(builder, n, const(-0.693359375), r)
    r = _fma(builder, n, const(2.12194440e-4), r)
    p = const(1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = _fma(builder, p, r, const(c))
    p = builder.fadd(_fma(builder, builder.fmul(p, r), r, r), const(1.0))
    i32_type = _with_element(x.type, I32)
    power = builder.shl(builder.add(builder.fptosi(n, i32_type), _constant(i32_type, 127)), _constant(i32_type, 23))
    y = builder.fmul(p, builder.bitcast(power, x.type))
    y = builder.select(builder.fcmp_ordered("<", x, const(-87.0)), const(0.0), y)
    return builder.select(builder.fcmp_unordered("uno", x, x), x, y)


exp_f32x16 = define(f32x16, f32x16)(_exp)


def _divide(builder, a, b):
    return builder.fdiv(a, b)


divide_f32x16 = define(f32x16, f32x16, f32x16)(_divide)


@define(f32, f32x16)
def first_lane(builder, v):
    return builder.extract_element(v, ir.Constant(I32, 0))


def _transpose(builder, rows):
    """16 vectors of 16 dwords -> the columns."""
    low = [lane for i in range(8) for lane in (i, 16 + i)]
    high = [lane for i in range(8, 16) for lane in (i, 16 + i)]
    masks = [ir.Constant(ir.VectorType(I32, 16), m) for m in (low, high)]
    for _ in range(4):  # interleaving rows i and i + 8, four times
        rows = [builder.shuffle_vector(rows[i], rows[i + 8], mask) for i in range(8) for mask in masks]
    return rows


def _transpose_op(change):
    @define(none, i64, i64, i64, i64, i64)
    def transpose(builder, source, source_stride, to, to_second, to_stride):
        """Dwords [16][16], rows source_stride bytes apart -> their transpose: 8 rows at `to`, 8 at `to_second`, in that order."""

        def at(base, i, stride):
            return builder.add(base, builder.mul(stride, ir.Constant(I64, i)))

        sources = [_pointer(builder, at(source, i, source_stride), i32x16.ir) for i in range(16)]
        rows = _transpose(builder, [change(builder, builder.load(p, align=1)) for p in sources])
        for i, row in enumerate(rows):
            address = at(to, i, to_stride) if i < 8 else at(to_second, i - 8, to_stride)
            builder.store(row, _pointer(builder, address, row.type), align=1)

    return transpose


transpose_16x16 = _transpose_op(lambda builder, row: row)
transpose_keep_16x16 = _transpose_op(  # of bytes, put into keep() form
    lambda builder, row: builder.bitcast(_keep(builder, builder.bitcast(row, i8x64.ir)), i32x16.ir)
)


def _horizontal(builder, v, combine):
    while v.type.count > 1:
        v = combine(*_halves(builder, v))
    return builder.extract_element(v, ir.Constant(I32, 0))


def _sum_op(result, source, add):
    @define(result, source)
    def lane_sum(builder, v):
        """All lanes added up, halves first."""
        return _horizontal(builder, v, getattr(builder, add))

    return lane_sum


sum_f32x8, sum_f32x16 = _sum_op(f32, f32x8, "fadd"), _sum_op(f32, f32x16, "fadd")
sum_i32x16 = _sum_op(i32, i32x16, "add")


@define(f32, f32x16)
def lane_max(builder, v):
    return _horizontal(builder, v, lambda a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))


@define(f32x8, f32, f32)
def low_high_f32x8(builder, low, high):
    """low in lanes 0..3, high in lanes 4..7."""
    return _join(builder, _splat(builder, low, 4), _splat(builder, high, 4))


# --- dot products -----------------------------------------------------------------------------------------------------------


def _pieces(emit, max_lanes):
    """emit on i32 accumulators of at most max_lanes lanes, joined again; args after acc have 4 (bytes) or 2 (i16) times the lanes."""

    def whole(builder, acc, a, b):
        if acc.type.count <= max_lanes:
            return emit(builder, acc, a, b)
        parts = zip(_halves(builder, acc), _halves(builder, a), _halves(builder, b), strict=True)
        return _join(builder, *(whole(builder, *p) for p in parts))

    return whole


MAX_LANES = {"avx512vnni": 16, "avxvnni": 8, "avx2": 8, "plain": 4}[TIER]


def _dot2(builder, acc, a, b):
    """acc i32xN + pairs of products of i16x2N."""
    n = acc.type.count
    if TIER in ("avx512vnni", "avxvnni"):
        a, b = builder.bitcast(a, acc.type), builder.bitcast(b, acc.type)
        return _call(builder, f"llvm.x86.avx512.vpdpwssd.{32 * n}", acc.type, acc, a, b)
    if X86_SIMD:
        return builder.add(acc, _call(builder, "llvm.x86.avx2.pmadd.wd", acc.type, a, b))
    wide = ir.VectorType(I32, 2 * n)
    product = builder.mul(builder.sext(a, wide), builder.sext(b, wide))
    pairs = (_pick(builder, product, list(range(start, 2 * n, 2))) for start in (0, 1))
    return builder.add(acc, builder.add(*pairs))


def _dot4_unsigned(builder, acc, u, s):
    """acc i32xN + fours of products of bytes, u in 0..127 (0..255 with VNNI), s signed."""
    n = acc.type.count
    if VNNI:
        u, s = builder.bitcast(u, acc.type), builder.bitcast(s, acc.type)
        return _call(builder, f"llvm.x86.avx512.vpdpbusd.{32 * n}", acc.type, acc, u, s)
    if X86_SIMD:
        pairs = _call(builder, "llvm.x86.avx2.pmadd.ub.sw", ir.VectorType(I16, 2 * n), u, s)
        return _dot2(builder, acc, pairs, ir.Constant(pairs.type, [1] * 2 * n))
    return _dot4_plain(builder, acc, builder.zext(u, ir.VectorType(I16, 4 * n)), s)


def _dot4_plain(builder, acc, a, s):
    n = acc.type.count
    product = builder.mul(a, builder.sext(s, a.type))  # fits: 127 * 128, or -128 * -128
    product = builder.sext(product, ir.VectorType(I32, 4 * n))
    for lanes in (4 * n, 2 * n):
        product = builder.add(*(_pick(builder, product, list(range(start, lanes, 2))) for start in (0, 1)))
    return builder.add(acc, product)


def _dot4_kept(builder, acc, w, s):
    """acc + fours of products of a signed weight in keep() form and a signed byte that is never -128."""
    if VNNI:
        return _dot4_unsigned(builder, acc, w, s)
    if X86_SIMD:
        sign = _call(builder, "llvm.x86.avx2.psign.b", s.type, s, w)
        magnitude = _call(builder, "llvm.x86.avx2.psign.b", s.type, w, w)
        return _dot4_unsigned(builder, acc, magnitude, sign)
    return _dot4_plain(builder, acc, builder.sext(w, ir.VectorType(I16, w.type.count)), s)


def _keep(builder, w):
    """A signed byte in the form that dot4_kept takes: VNNI multiplies unsigned bytes, so 128 is added there (start() takes it back)."""
    return builder.xor(w, _constant(w.type, -128)) if VNNI else w


dot2_i32x8 = define(i32x8, i32x8, i16x16, i16x16)(_pieces(_dot2, MAX_LANES))
dot2_i32x16 = define(i32x16, i32x16, i16x32, i16x32)(_pieces(_dot2, MAX_LANES))
dot4_i32x16 = define(i32x16, i32x16, i8x64, i8x64)(_pieces(_dot4_unsigned, MAX_LANES))
dot4_kept_i32x8 = define(i32x8, i32x8, i8x32, i8x32)(_pieces(_dot4_kept, MAX_LANES))
keep_i8x32 = define(i8x32, i8x32)(_keep)


@define(i32x8, i64)
def start_i32x8(builder, address):
    """What a sum of dot4_kept starts from: the lanes of -128 * (sum of four activations) at address, or zero."""
    if VNNI:
        return builder.load(_pointer(builder, address, i32x8.ir), align=1)
    return ir.Constant(i32x8.ir, [0] * 8)


@define(i8x64, i8x16)
def four_times_i8x16(builder, v):
    return _pick(builder, v, list(range(16)) * 4)


def _q2_k_lanes(j):
    """Q2_K's scales (four times over) where the sums of its bit pair j need them: [low i16: scale, high i16: 0] in each i32 lane."""
    groups = (2 * j, 2 * j + 1, 8 + 2 * j, 9 + 2 * j)
    bytes_ = [b for group in groups for b in (group, -1, -1, -1) * 4]  # -1: a zero byte

    def pick(builder, table, indices):
        lanes = {"avx512vnni": 64, "plain": 0}.get(TIER, 32)
        if not lanes:
            zero = ir.Constant(table.type, [0] * len(indices))
            mask = ir.Constant(ir.VectorType(I32, len(indices)), [i if i >= 0 else len(indices) for i in indices])
            return builder.shuffle_vector(table, zero, mask)
        if len(indices) > lanes:
            half = len(indices) // 2
            tables = _halves(builder, table)
            return _join(builder, pick(builder, tables[0], indices[:half]), pick(builder, tables[1], indices[half:]))
        name = "llvm.x86.avx512.pshuf.b.512" if lanes == 64 else "llvm.x86.avx2.pshuf.b"
        return _call(builder, name, table.type, table, ir.Constant(table.type, indices))

    @define(i16x32, i8x64)
    def spread(builder, table):
        return builder.bitcast(pick(builder, table, bytes_), i16x32.ir)

    return spread


q2_k_scales_0, q2_k_scales_1, q2_k_scales_2, q2_k_scales_3 = (_q2_k_lanes(j) for j in range(4))


@define(i32x8, i8x32)
def sum_fours(builder, v):
    """Sums of four signed bytes."""
    ones = ir.Constant(i8x32.ir, [1] * 32)
    return _pieces(_dot4_unsigned, MAX_LANES)(builder, ir.Constant(i32x8.ir, [0] * 8), ones, v)


@define(i64, i32x8)
def sum_low_high(builder, v):
    """The sum of lanes 0..3 in the low 32 bits, that of lanes 4..7 in the high ones."""
    low, high = _halves(builder, v)
    add = lambda a, b: builder.add(a, b)
    low, high = (_horizontal(builder, half, add) for half in (low, high))
    return builder.or_(builder.zext(low, I64), builder.shl(builder.zext(high, I64), ir.Constant(I64, 32)))


@define(i32x8, i16x16)
def sum_pairs(builder, v):
    ones = ir.Constant(i16x16.ir, [1] * 16)
    return _pieces(_dot2, MAX_LANES)(builder, ir.Constant(i32x8.ir, [0] * 8), v, ones)


@define(f32x8, f32x16)
def low_f32x8(builder, v):
    return _halves(builder, v)[0]


@define(f32x8, f32x16)
def high_f32x8(builder, v):
    return _halves(builder, v)[1]


@define(f32x16, f32, f32)
def low_high_f32x16(builder, low, high):
    return _join(builder, _splat(builder, low, 8), _splat(builder, high, 8))


@define(i8x16, i64, i64)
def bytes_i8x16(builder, low, high):
    """The bytes of two int64."""
    out = ir.Constant(ir.VectorType(I64, 2), ir.Undefined)
    for n, value in enumerate((low, high)):
        out = builder.insert_element(out, value, ir.Constant(I32, n))
    return builder.bitcast(out, i8x16.ir)


@define(i16x16, i8x16)
def widen_i8x16(builder, v):
    return builder.zext(v, i16x16.ir)


@define(i8x32, i64, i64, i64, i64)
def bytes_i8x32(builder, a, b, c, d):
    """The bytes of four int64."""
    out = ir.Constant(ir.VectorType(I64, 4), ir.Undefined)
    for n, value in enumerate((a, b, c, d)):
        out = builder.insert_element(out, value, ir.Constant(I32, n))
    return builder.bitcast(out, i8x32.ir)


@define(i8x32, i8x32, i64)
def negate_i8x32(builder, v, bits):
    """-v where bit i of `bits` is set."""
    mask = builder.bitcast(builder.trunc(bits, I32), ir.VectorType(I1, 32))
    return builder.select(mask, builder.sub(ir.Constant(v.type, [0] * 32), v), v)


@define(i8x16, i64, i64)
def zip_bytes(builder, a, b):
    """The bytes of two int64 by turns."""
    a, b = (builder.bitcast(v, ir.VectorType(I8, 8)) for v in (a, b))
    mask = ir.Constant(ir.VectorType(I32, 16), [lane for i in range(8) for lane in (i, 8 + i)])
    return builder.shuffle_vector(a, b, mask)


@define(i8x64, i8x64, i64)
def negate_i8x64(builder, v, bits):
    """-v where bit i of `bits` is set."""
    mask = builder.bitcast(bits, ir.VectorType(I1, 64))
    return builder.select(mask, builder.sub(ir.Constant(v.type, [0] * 64), v), v)


@define(i16x8, i16)
def splat_i16x8(builder, v):
    return _splat(builder, v, 8)


@define(i16x8, i64)
def widen_bytes(builder, v):
    """The 8 bytes of an int64."""
    return builder.zext(builder.bitcast(v, ir.VectorType(I8, 8)), i16x8.ir)


@define(i64, i16x8)
def low_bytes(builder, v):
    """The low byte of each lane, as an int64."""
    return builder.bitcast(builder.trunc(v, ir.VectorType(I8, 8)), I64)


@define(i16x8, i64)
def bit_pairs(builder, v):
    """The 8 pairs of the low 16 bits."""
    shifts = ir.Constant(i16x8.ir, [2 * i for i in range(8)])
    return builder.and_(builder.lshr(_splat(builder, builder.trunc(v, I16), 8), shifts), _constant(i16x8.ir, 3))


@define(i8x64, i64, i16x8)
def gather_i8x64(builder, table, indices):
    """Eight entries of 8 bytes of the table at an address."""
    wide = builder.zext(indices, ir.VectorType(I64, 8))
    addresses = builder.add(_splat(builder, table, 8), builder.mul(wide, _constant(wide.type, 8)))
    entries = ir.Constant(wide.type, ir.Undefined)
    if TIER == "avx512vnni":
        pointers = builder.inttoptr(addresses, ir.VectorType(I64.as_pointer(), 8))
        mask = ir.Constant(ir.VectorType(I1, 8), [1] * 8)
        fn_type = ir.FunctionType(wide.type, [pointers.type, I32, mask.type, wide.type])
        fn = cgutils.get_or_insert_function(builder.module, fn_type, "llvm.masked.gather.v8i64.v8p0")
        entries = builder.call(fn, [pointers, ir.Constant(I32, 8), mask, entries])
    else:
        for i in range(8):
            at = builder.extract_element(addresses, ir.Constant(I32, i))
            entry = builder.load(_pointer(builder, at, I64), align=8)
            entries = builder.insert_element(entries, entry, ir.Constant(I32, i))
    return builder.bitcast(entries, i8x64.ir)


@define(i8x32, i8x32, i64)
def add_16_i8x32(builder, v, bits):
    """v + 16 where bit i of `bits` is set."""
    mask = builder.bitcast(builder.trunc(bits, I32), ir.VectorType(I1, 32))
    return builder.select(mask, builder.add(v, ir.Constant(v.type, [16] * 32)), v)


@define(i8x32, i64, i64)
def bytes_i8x32_pair(builder, low, high):
    """low in bytes 0..15, high in bytes 16..31."""
    return _join(builder, *(_splat(builder, builder.trunc(v, I8), 16) for v in (low, high)))


@define(i8x32, i8x32, i8x32)
def multiply_small(builder, a, b):
    """a * b, where no product passes 127."""
    wide = ir.VectorType(I16, 32)
    return builder.trunc(builder.mul(builder.zext(a, wide), builder.zext(b, wide)), a.type)


IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@define(i8x32, i8x32)
def iq4_values(builder, indices):
    """IQ4_NL's value of each index 0..15."""
    if X86_SIMD:
        table = ir.Constant(i8x32.ir, IQ4_VALUES * 2)
        return _call(builder, "llvm.x86.avx2.pshuf.b", i8x32.ir, table, indices)
    out = ir.Constant(i8x32.ir, [0] * 32)
    for n, value in enumerate(IQ4_VALUES):
        same = builder.icmp_signed("==", indices, ir.Constant(i8x32.ir, [n] * 32))
        out = builder.select(same, ir.Constant(i8x32.ir, [value] * 32), out)
    return out


# --- tiles ------------------------------------------------------------------------------------------------------------------


def _tile(builder, tile, each):
    """each(t, vector) -> vector, for every token of the tile."""
    for t in range(TOKENS):
        tile = builder.insert_value(tile, each(t, builder.extract_value(tile, t)), t)
    return tile


def _broadcast(builder, address, t, element):
    """The 4-byte element t at address, in 16 lanes."""
    pointer = builder.gep(_pointer(builder, address, element), [ir.Constant(I64, t)])
    return _splat(builder, builder.load(pointer, align=4), 16)


@define(tile_f32)
def tile_zero(builder):
    return ir.Constant(tile_f32.ir, None)


@define(tile_i32)
def tile_zero_i32(builder):
    return ir.Constant(tile_i32.ir, None)


@define(tile_i32, i64)
def tile_start(builder, address):
    """i32 [TOKENS] at address, each in its own vector; zero where dot4_kept needs no start."""
    if not VNNI:
        return ir.Constant(tile_i32.ir, None)
    return _tile(builder, ir.Constant(tile_i32.ir, None), lambda t, v: _broadcast(builder, address, t, I32))


def _tile_dot(dot):
    def emit(builder, acc, w, address):
        def each(t, v):
            lanes = 4 * v.type.count if w.type.element == I8 else 2 * v.type.count
            a = builder.bitcast(_broadcast(builder, address, t, I32), ir.VectorType(w.type.element, lanes))
            return _pieces(dot, MAX_LANES)(builder, v, w, a)

        return _tile(builder, acc, each)

    return emit


# (accumulators, 16 rows' weights, address of [TOKENS] dwords of activations) -> accumulators
tile_dot4 = define(tile_i32, tile_i32, i8x64, i64)(_tile_dot(_dot4_unsigned))
tile_dot4_kept = define(tile_i32, tile_i32, i8x64, i64)(_tile_dot(_dot4_kept))
tile_dot2 = define(tile_i32, tile_i32, i16x32, i64)(_tile_dot(_dot2))


@define(tile_f32, tile_f32, f32x16, i64)
def tile_fma(builder, acc, w, address):
    """acc[t] += w * a[t], a f32 [TOKENS] at address."""
    return _tile(builder, acc, lambda t, v: _fma(builder, w, _broadcast(builder, address, t, F32), v))


@define(tile_f32, tile_f32, tile_f32)
def tile_add(builder, a, b):
    return _tile(builder, a, lambda t, v: builder.fadd(v, builder.extract_value(b, t)))


@define(tile_f32, tile_f32, tile_i32, f32x16, i64)
def tile_scale(builder, acc, dots, scale, address):
    """acc[t] += dots[t] * (scale * d[t]), d f32 [TOKENS] at address."""

    def each(t, v):
        s = builder.fmul(scale, _broadcast(builder, address, t, F32))
        return _fma(builder, builder.sitofp(builder.extract_value(dots, t), f32x16.ir), s, v)

    return _tile(builder, acc, each)


@define(f32x16, f32x16, tile_f32, i64)
def tile_relu_dot(builder, acc, tile, address):
    """acc + sum over t of max(tile[t], 0) * weights[t], weights f32 [TOKENS] at address."""
    zero = ir.Constant(f32x16.ir, [0.0] * 16)
    for t in range(TOKENS):
        v = builder.extract_value(tile, t)
        v = builder.select(builder.fcmp_ordered("<", v, zero), zero, v)  # NaN stays
        acc = _fma(builder, v, _broadcast(builder, address, t, F32), acc)
    return acc


@define(none, tile_f32, i64, i64, i64)
def tile_store(builder, tile, address, stride_bytes, n_tokens):
    """Vector t at address + t * stride_bytes, for the first n_tokens."""
    for t in range(TOKENS):
        with builder.if_then(builder.icmp_signed("<", ir.Constant(I64, t), n_tokens)):
            at = builder.add(address, builder.mul(stride_bytes, ir.Constant(I64, t)))
            builder.store(builder.extract_value(tile, t), _pointer(builder, at, f32x16.ir), align=1)
