"""One-operation kernels: what `ptxas` makes of one PTX instruction, and what numpy says it gives.

Each kernel has one block of 256 threads; thread i reads words a, b, c at i, i + 256, i + 512 of the
input and writes d and e at i and i + 256 of the output.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

__all__ = ["ONE_OPS", "THREADS", "OneOp", "inputs_of", "ptx_module"]

THREADS = 256
Words = NDArray[np.uint32]
Truth = Callable[[Any, Any, Any], Any]


class OneOp(msgspec.Struct, frozen=True):
    """One kernel.

    Attributes:
        name: of the kernel.
        body: PTX that sets %d (and %e) from %a, %b, %c; %p, %q are predicates, %x, %y, %z 64-bit,
            %f.. floats, %s the address of 1024 bytes of shared memory, %t the thread.
        kind: what the input words are: "bits", "floats" (float32), "bf16" or "f16" pairs with
            float32 c.
        truth: what d is; None where only the hardware can say.
    """

    name: str
    body: str
    kind: str = "bits"
    truth: Truth | None = None


def _s(x: Any) -> Any:
    return x.view(np.int32)


def _w(x: Any) -> Any:
    return x.astype(np.uint64)


def _f(x: Any) -> Any:
    return x.view(np.float32)


def _u(x: Any) -> Any:
    """Bits of float32; every NaN is the hardware's one."""
    x = x.astype(np.float32)
    return np.where(np.isnan(x), np.uint32(0x7FFFFFFF), x.view(np.uint32))


def _low(x: Any) -> Any:
    return (x & np.uint64(0xFFFFFFFF)).astype(np.uint32)


def _high(x: Any) -> Any:
    return (x >> np.uint64(32)).astype(np.uint32)


def _flag(x: Any) -> Any:
    return x.astype(np.uint32)


def _compare(relation: str, kind: str) -> str:
    return f"setp.{relation}.{kind} %p, %a, %b; selp.u32 %d, 1, 0, %p;"


def _mma(kind: str) -> str:
    return (
        "xor.b32 %e, %a, %b; mov.b32 %f0, %c; mov.b32 %f1, %c; mov.b32 %f2, 0; mov.b32 %f3, %c;"
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{%f0,%f1,%f2,%f3}}, "
        "{%a,%b,%a,%b}, {%b,%a}, {%f0,%f1,%f2,%f3};"
        "add.f32 %f0, %f0, %f1; mov.b32 %d, %f0; mov.b32 %e, %f3;"
    )


def _shuffled(mode: str) -> str:
    return (
        f"and.b32 %e, %b, 31; shfl.sync.{mode}.b32 %d|%p, %a, %e, 0x1f, -1; selp.u32 %e, 1, 0, %p;"
    )


def _funnel(a: Words, b: Words, c: Words) -> Words:
    return _high((_w(b) << np.uint64(32) | _w(a)) << _w(c & np.uint32(31)))


def _related(relation: Any, a: Any, b: Any, c: Any) -> Any:
    return _flag(relation(a, b))


def _related_signed(relation: Any, a: Any, b: Any, c: Any) -> Any:
    return _flag(relation(_s(a), _s(b)))


_REL = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "eq": np.equal, "ne": np.not_equal}

ONE_OPS: tuple[OneOp, ...] = (
    OneOp("add_u32", "add.u32 %d, %a, %b;", truth=lambda a, b, c: a + b),
    OneOp("sub_u32", "sub.u32 %d, %a, %b;", truth=lambda a, b, c: a - b),
    OneOp(
        "add3",
        "add.u32 %d, %a, %b; add.u32 %d, %d, %c;",
        truth=lambda a, b, c: a + b + c,
    ),
    OneOp("mad_lo", "mad.lo.u32 %d, %a, %b, %c;", truth=lambda a, b, c: a * b + c),
    OneOp("mul_hi_u32", "mul.hi.u32 %d, %a, %b;", truth=lambda a, b, c: _high(_w(a) * _w(b))),
    OneOp(
        "mul_hi_s32",
        "mul.hi.s32 %d, %a, %b;",
        truth=lambda a, b, c: _high((_s(a).astype(np.int64) * _s(b)).view(np.uint64)),
    ),
    OneOp(
        "mad_wide_u32",
        "cvt.u64.u32 %x, %c; mad.wide.u32 %x, %a, %b, %x; mov.b64 {%e, %d}, %x;",
        truth=lambda a, b, c: _high(_w(a) * _w(b) + _w(c)),
    ),
    OneOp(
        "mul_wide_s32",
        "mul.wide.s32 %x, %a, %b; mov.b64 {%d, %e}, %x;",
        truth=lambda a, b, c: _low((_s(a).astype(np.int64) * _s(b)).view(np.uint64)),
    ),
    OneOp(
        "add_u64",
        "mov.b64 %x, {%a, %b}; mov.b64 %y, {%c, %a}; add.u64 %x, %x, %y; mov.b64 {%e, %d}, %x;",
        truth=lambda a, b, c: _high((_w(b) << 32 | _w(a)) + (_w(a) << 32 | _w(c))),
    ),
    OneOp(
        "sub_u64",
        "mov.b64 %x, {%a, %b}; mov.b64 %y, {%c, %a}; sub.u64 %x, %x, %y; mov.b64 {%e, %d}, %x;",
        truth=lambda a, b, c: _high((_w(b) << 32 | _w(a)) - (_w(a) << 32 | _w(c))),
    ),
    OneOp("and_b32", "and.b32 %d, %a, %b;", truth=lambda a, b, c: a & b),
    OneOp("lop3_e8", "lop3.b32 %d, %a, %b, %c, 0xe8;", truth=lambda a, b, c: a & b | a & c | b & c),
    OneOp(
        "lop3_1b",
        "lop3.b32 %d, %a, %b, %c, 0x1b;",
        truth=lambda a, b, c: _lut(a, b, c, 0x1B),
    ),
    OneOp("not_b32", "not.b32 %d, %a;", truth=lambda a, b, c: ~a),
    OneOp("shl", "and.b32 %e, %b, 31; shl.b32 %d, %a, %e;", truth=lambda a, b, c: a << (b & 31)),
    OneOp(
        "shr_u32", "and.b32 %e, %b, 31; shr.u32 %d, %a, %e;", truth=lambda a, b, c: a >> (b & 31)
    ),
    OneOp(
        "shr_s32",
        "and.b32 %e, %b, 31; shr.s32 %d, %a, %e;",
        truth=lambda a, b, c: (_s(a) >> _s(b & 31)).view(np.uint32),
    ),
    OneOp(
        "shl_far",
        "and.b32 %e, %b, 63; shl.b32 %d, %a, %e;",
        truth=lambda a, b, c: _low(_w(a) << _w(b & 63)) * _flag((b & 63) < 32),
    ),
    OneOp("shf_l_wrap", "shf.l.wrap.b32 %d, %a, %b, %c;", truth=_funnel),
    OneOp(
        "shf_r_wrap",
        "shf.r.wrap.b32 %d, %a, %b, %c;",
        truth=lambda a, b, c: _low((_w(b) << 32 | _w(a)) >> _w(c & 31)),
    ),
    OneOp(
        "shr_u64",
        "mov.b64 %x, {%a, %b}; and.b32 %e, %c, 63; shr.u64 %x, %x, %e; mov.b64 {%d, %e}, %x;",
        truth=lambda a, b, c: _low((_w(b) << 32 | _w(a)) >> _w(c & 63)),
    ),
    OneOp(
        "shl_u64",
        "mov.b64 %x, {%a, %b}; and.b32 %e, %c, 63; shl.b64 %x, %x, %e; mov.b64 {%e, %d}, %x;",
        truth=lambda a, b, c: _high((_w(b) << 32 | _w(a)) << _w(c & 63)),
    ),
    OneOp("prmt", "and.b32 %e, %c, 0xffff; prmt.b32 %d, %a, %b, %e;"),
    OneOp(
        "selp",
        "setp.lt.u32 %p, %a, %b; selp.b32 %d, %b, %c, %p;",
        truth=lambda a, b, c: np.where(a < b, b, c),
    ),
    *(
        OneOp(
            f"setp_{rel}_u32",
            _compare(rel, "u32"),
            truth=partial(_related, f),
        )
        for rel, f in _REL.items()
    ),
    *(
        OneOp(
            f"setp_{rel}_s32",
            _compare(rel, "s32"),
            truth=partial(_related_signed, f),
        )
        for rel, f in _REL.items()
        if rel in ("lt", "le", "gt")
    ),
    OneOp(
        "setp_lt_s64",
        "mov.b64 %x, {%a, %b}; mov.b64 %y, {%c, %b}; setp.lt.s64 %p, %x, %y; "
        "selp.u32 %d, 1, 0, %p;",
        truth=lambda a, b, c: _flag(a < c),
    ),
    OneOp(
        "setp_and",
        "setp.lt.u32 %p, %a, %b; setp.gt.and.s32 %p, %b, %c, %p; selp.u32 %d, 1, 0, %p;",
        truth=lambda a, b, c: _flag((a < b) & (_s(b) > _s(c))),
    ),
    OneOp(
        "min_s32",
        "min.s32 %d, %a, %b;",
        truth=lambda a, b, c: np.minimum(_s(a), _s(b)).view(np.uint32),
    ),
    OneOp("max_u32", "max.u32 %d, %a, %b;", truth=lambda a, b, c: np.maximum(a, b)),
    OneOp("abs_s32", "abs.s32 %d, %a;", truth=lambda a, b, c: np.abs(_s(a)).view(np.uint32)),
    OneOp("popc", "popc.b32 %d, %a;", truth=lambda a, b, c: np.bitwise_count(a).astype(np.uint32)),
    OneOp(
        "clz",
        "clz.b32 %d, %a;",
        truth=lambda a, b, c: np.array([32 - int(v).bit_length() for v in a], np.uint32),
    ),
    OneOp(
        "brev",
        "brev.b32 %d, %a;",
        truth=lambda a, b, c: np.array([int(f"{int(v):032b}"[::-1], 2) for v in a], np.uint32),
    ),
    OneOp(
        "lds_u8",
        "st.shared.u32 [%s], %a; bar.sync 0; ld.shared.u8 %d, [%s+1];",
        truth=lambda a, b, c: a >> 8 & 255,
    ),
    OneOp(
        "lds_s16",
        "st.shared.u32 [%s], %a; bar.sync 0; ld.shared.s16 %d, [%s+2];",
        truth=lambda a, b, c: (_s(a) >> 16).view(np.uint32),
    ),
    OneOp(
        "add_f32", "add.f32 %f0, %a, %b; mov.b32 %d, %f0;", truth=lambda a, b, c: _u(_f(a) + _f(b))
    ),
    OneOp(
        "sub_f32_near",
        "add.f32 %f0, %a, %b; mov.b32 %d, %f0;",
        "floats",
        lambda a, b, c: _u(_f(a) + _f(b)),
    ),
    OneOp(
        "mul_f32", "mul.f32 %f0, %a, %b; mov.b32 %d, %f0;", truth=lambda a, b, c: _u(_f(a) * _f(b))
    ),
    OneOp("fma_f32", "fma.rn.f32 %f0, %a, %b, %c; mov.b32 %d, %f0;"),
    OneOp("fma_f32_near", "fma.rn.f32 %f0, %a, %b, %c; mov.b32 %d, %f0;", "floats"),
    OneOp("add_ftz_f32", "add.ftz.f32 %f0, %a, %b; mov.b32 %d, %f0;"),
    OneOp("add_sat_f32", "add.sat.f32 %f0, %a, %b; mov.b32 %d, %f0;", "floats"),
    OneOp(
        "neg_abs_f32",
        "abs.f32 %f0, %a; neg.f32 %f1, %b; add.f32 %f0, %f0, %f1; mov.b32 %d, %f0;",
        truth=lambda a, b, c: _u(np.abs(_f(a)) - _f(b)),
    ),
    OneOp("min_f32", "min.f32 %f0, %a, %b; mov.b32 %d, %f0;"),
    OneOp("max_f32", "max.f32 %f0, %a, %b; mov.b32 %d, %f0;"),
    OneOp("setp_lt_f32", _compare("lt", "f32"), truth=lambda a, b, c: _flag(_f(a) < _f(b))),
    OneOp("setp_ltu_f32", _compare("ltu", "f32"), truth=lambda a, b, c: _flag(~(_f(a) >= _f(b)))),
    OneOp("setp_neu_f32", _compare("neu", "f32"), truth=lambda a, b, c: _flag(_f(a) != _f(b))),
    OneOp(
        "setp_nan_f32",
        _compare("nan", "f32"),
        truth=lambda a, b, c: _flag(np.isnan(_f(a)) | np.isnan(_f(b))),
    ),
    OneOp("cvt_bf16x2", "cvt.rn.bf16x2.f32 %d, %a, %b;", "floats"),
    OneOp("cvt_f16x2", "cvt.rn.f16x2.f32 %d, %a, %b;", "floats"),
    OneOp("fma_f16x2", "fma.rn.f16x2 %d, %a, %b, %c;"),
    OneOp(
        "cvt_f32_s32",
        "cvt.rn.f32.s32 %f0, %a; mov.b32 %d, %f0;",
        truth=lambda a, b, c: _u(_s(a).astype(np.float32)),
    ),
    OneOp(
        "cvt_f32_u32",
        "cvt.rn.f32.u32 %f0, %a; mov.b32 %d, %f0;",
        truth=lambda a, b, c: _u(a.astype(np.float32)),
    ),
    OneOp("shfl_idx", _shuffled("idx")),
    OneOp(
        "shfl_up",
        "and.b32 %e, %b, 31; shfl.sync.up.b32 %d|%p, %a, %e, 0, -1; selp.u32 %e, 1, 0, %p;",
    ),
    OneOp("shfl_down", _shuffled("down")),
    OneOp("shfl_bfly", _shuffled("bfly")),
    OneOp(
        "branches",
        "setp.lt.s32 %p, %a, %b; @%p bra L1; mad.lo.u32 %d, %a, 3, %c; bra L2; "
        "L1: xor.b32 %d, %a, %c; "
        "setp.gt.u32 %q, %b, %c; @%q bra L2; add.u32 %d, %d, 7; L2: add.u32 %d, %d, %b;",
        truth=lambda a, b, c: (
            np.where(
                _s(a) < _s(b), (a ^ c) + np.where(b > c, np.uint32(0), np.uint32(7)), a * 3 + c
            )
            + b
        ),
    ),
    OneOp("mma_bf16", _mma("bf16"), "bf16"),
    OneOp("mma_f16", _mma("f16"), "f16"),
)


def _lut(a: Words, b: Words, c: Words, table: int) -> Words:
    index = [(a >> i & 1) * 4 + (b >> i & 1) * 2 + (c >> i & 1) for i in map(np.uint32, range(32))]
    bits = [(np.uint32(table) >> one & 1) << np.uint32(i) for i, one in enumerate(index)]
    return np.bitwise_or.reduce(bits).astype(np.uint32)


def ptx_module(arch: str) -> str:
    """The PTX of all kernels for one architecture."""
    parts = [".version 8.8", f".target {arch}", ".address_size 64"]
    for op in ONE_OPS:
        label = f"{op.name}_"
        body = op.body.replace("L1", f"{label}1").replace("L2", f"{label}2")
        parts.append(
            f"""
.visible .entry {op.name}(.param .u64 out, .param .u64 in)
{{
  .reg .pred %p, %q; .reg .b32 %a, %b, %c, %d, %e, %s, %t; .reg .b64 %x, %y, %z, %i, %o;
  .reg .f32 %f<4>;
  .shared .align 16 .b8 memory_{op.name}[1024];
  ld.param.u64 %o, [out]; ld.param.u64 %i, [in];
  cvta.to.global.u64 %o, %o; cvta.to.global.u64 %i, %i;
  mov.u32 %t, %tid.x; mov.u32 %s, memory_{op.name};
  mad.wide.u32 %i, %t, 4, %i; mad.wide.u32 %o, %t, 4, %o; shl.b32 %d, %t, 2; add.u32 %s, %s, %d;
  ld.global.b32 %a, [%i]; ld.global.b32 %b, [%i+1024]; ld.global.b32 %c, [%i+2048];
  mov.u32 %d, 0; mov.u32 %e, 0;
  {body}
  st.global.b32 [%o], %d; st.global.b32 [%o+1024], %e;
  ret;
}}"""
        )
    return "\n".join(parts) + "\n"


def inputs_of(kind: str, seed: int) -> Words:
    """Random words [768] for a, b, c, with the numbers that are special among them."""
    chance = np.random.default_rng(seed)
    words = chance.integers(0, 1 << 32, 3 * THREADS, np.uint64).astype(np.uint32)
    if kind == "floats":
        return chance.standard_normal(3 * THREADS).astype(np.float32).view(np.uint32)
    if kind in ("bf16", "f16"):
        spread = chance.standard_normal(6 * THREADS) * np.exp2(chance.integers(-6, 7, 6 * THREADS))
        if kind == "f16":
            words = spread.astype(np.float16).view(np.uint32)
        else:
            halves = (spread.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
            words = halves.view(np.uint32)
        words = words.copy()
        last = chance.standard_normal(THREADS).astype(np.float32) * 8
        words[2 * THREADS :] = last.view(np.uint32)
        return words
    integers = [0, 1, 2, 31, 32, 33, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x80000001]
    floats = [0x3F800000, 0xBF800000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x00800000, 0x007FFFFF]
    special = np.array([*integers, *floats], np.uint32)
    at = chance.integers(0, 3 * THREADS, 200)
    words[at] = chance.choice(special, 200)
    return words
