"""The rows that a change of the kernels is judged by: what is measured, and the figure to reach where there is one.

A kernel row has a value for every instruction set, and one target for each or one for all; a cache row has one for 1
and one for 2 threads. `at_most` or `at_least` is the target: a number, or {column: number}. Without one a row is only
shown.
"""

from dataclasses import dataclass
from typing import Callable, Dict, List, Optional, Union

from results import Results, ratio

Limit = Union[None, float, Dict[str, float]]
Value = Callable[[Results, str], Optional[float]]  # of an instruction set, or of "1" or "2" threads

BASE = "K2V2/tokens:16384/heads:32x8"


@dataclass
class Row:
    text: str
    value: Value
    digits: int = 2  # after the point; negative: significant ones, with an exponent
    at_most: Limit = None
    at_least: Limit = None

    def target(self) -> str:
        sign, limit = ("<=", self.at_most) if self.at_most is not None else (">=", self.at_least)
        if limit is None:
            return ""
        if isinstance(limit, dict):
            return ", ".join(f"{column} {sign} {value:g}" for column, value in limit.items())
        return f"{sign} {limit:g}"

    def missed(self, column: str, value: float) -> bool:
        limit = self.at_most if self.at_most is not None else self.at_least
        if isinstance(limit, dict):
            limit = limit.get(column)
        if limit is None:
            return False
        return value > limit if self.at_most is not None else value < limit


# ---- kernels

def kernel(counter: str, shape: str = BASE, path: str = "fast", threads: int = 1) -> Value:
    return lambda r, isa: r.kernel(isa, counter, shape, path, threads)


def over_base(counter: str, shape: str, path: str = "fast") -> Value:
    return lambda r, isa: ratio(r.kernel(isa, counter, shape, path), r.kernel(isa, counter, BASE, path))


def records(what: str, counter: str, name: str) -> Value:
    return lambda r, isa: r.get("encode_bench", f"{what}/{name}/isa:{isa}", counter)


def kernel_rows() -> List[Row]:
    rows = [
        Row("K2V2 fast, 16k: cycles per token and head", kernel("cycles"), at_most={"avx2": 14, "avx512_vnni": 11}),
        Row("K2V2 exact, 16k: cycles per token and head", kernel("cycles", path="exact"),
            at_most={"avx2": 21, "avx512": 14, "avx512_vnni": 14}),
    ]
    for tokens in (4, 16, 32):
        for threads in (1, 2):
            rows.append(Row(f"K2V2 fast, {tokens}k, {threads} thread{'s' * (threads > 1)}: times the floor",
                            kernel("x_floor", f"K2V2/tokens:{1024 * tokens}/heads:32x8", threads=threads)))
    most = {"K1V1": 1.0, "K3V3": 1.44, "K4V4": 1.15, "K8V8": 1.6, "K4V2": 1.15}  # K3V3: 1.25 of K4V4
    for bits in ("K1V1", "K3V3", "K4V4", "K8V8", "K4V2"):
        for path in ("fast", "exact"):
            rows.append(Row(f"{bits} {path}, 16k: time over K2V2",
                            over_base("min_ms", f"{bits}/tokens:16384/heads:32x8", path),
                            at_most=most[bits] if path == "fast" else None))
    for threads in (1, 2):
        rows.append(Row(f"32 query and 32 kv heads, 16k, {threads} thread{'s' * (threads > 1)}: times the floor",
                        kernel("x_floor", "K2V2/tokens:16384/heads:32x32", threads=threads), at_most=1.35))
    rows.append(Row("K2V2 fast, 16k: 1 thread over 2 threads",
                    lambda r, isa: ratio(r.kernel(isa, "min_ms", BASE), r.kernel(isa, "min_ms", BASE, threads=2)),
                    at_least=1.85))
    shapes = [("32 query and 32 kv heads", "K2V2/tokens:16384/heads:32x32")]
    shapes += [(f"{g} query heads per kv head", f"K2V2/tokens:16384/heads:{8 * g}x8") for g in (1, 2, 3, 7, 8, 16)]
    shapes += [(f"head size {d}", f"{BASE}/dim:{d}") for d in (64, 80, 96, 192, 256)]
    shapes += [(f"groups of {g}", f"{BASE}/group:{g}") for g in (16, 64, 128)]
    for path in ("fast", "exact"):
        for text, shape in shapes:
            mha = "32 kv heads" in text or text.startswith("1 query")  # bound by memory: its target is the floor
            rows.append(Row(f"{text}, {path}: cycles per multiply-add over base", over_base("cycles_mac", shape, path),
                            at_most=1.3 if path == "fast" and not mha else None))
    rows += [
        Row("4 queries: time over 1 query", over_base("min_ms", f"{BASE}/q_len:4"), at_most=2.2),
        Row("8 rows of 100 to 16k tokens: time per token over 1 row of 16k",
            over_base("cycles", "K2V2/ragged:8/heads:32x8"), at_most=1.15),
        Row("4 + 156 tokens exact, in float16: time over none", over_base("min_ms", f"{BASE}/exact:132")),
        Row("8 threads: time over 2 threads",
            lambda r, isa: ratio(r.kernel(isa, "min_ms", threads=8), r.kernel(isa, "min_ms", threads=2)), at_most=1.1),
    ]
    for path in ("fast", "exact"):
        rows.append(Row(f"K2V2 {path}: largest error, scores to +-4", kernel("max_error", path=path), digits=-2))
        rows.append(Row(f"K2V2 {path}: largest error, scores to +-40", kernel("max_error_wide", path=path), digits=-2))
    for dtype in ("f32", "bf16"):
        rows.append(Row(f"encode K2V2 from {dtype}: time over copying K and V",
                        records("encode", "x_copy", f"K2V2/type:{dtype}"), at_most=1.1))
        rows.append(Row(f"decode K2V2 to {dtype}: % of fill speed",
                        records("decode", "percent_of_fill", f"K2V2/type:{dtype}"), digits=0, at_least=70))
    for what in ("quantize", "dequantize"):
        for axis in ("tokens", "channels"):
            rows.append(Row(f"{what} 2 bits along {axis}: GB/s",
                            records(what, "GB_s", f"bits:2/axis:{axis}/type:f32"), digits=1))
    return rows


# ---- KVCache and the operators

def decode(what: str, tokens: int, counter: str) -> Value:
    return lambda r, threads: r.decode(what, tokens, int(threads), counter)


def storage(what: str, counter: str, dtype: str = "f32") -> Value:
    return lambda r, threads: r.storage(what, int(threads), counter, dtype)


def eight_threads(r: Results, threads: str) -> Optional[float]:
    if threads != "2":
        return None
    return ratio(r.decode("K2V2/fast", 16384, 8, "min_ms"), r.decode("K2V2/fast", 16384, 2, "min_ms"))


def forward_overhead(r: Results, threads: str) -> Optional[float]:
    return r.get("cache_bench", f"forward/tokens:16/steps:32/heads:32x8/threads:{threads}", "overhead_us")


def cache_rows() -> List[Row]:
    rows = []
    for tokens in (4, 16, 32):
        for name, text in (("matmul_f32", "two fp32 matmuls"), ("sdpa_f32", "SDPA fp32"), ("sdpa_bf16", "SDPA bf16")):
            rows.append(Row(f"K2V2 fast, {tokens}k: times as fast as {text}",
                            decode("K2V2/fast", 1024 * tokens, f"x_{name}"), digits=1,
                            at_least=12 if name == "matmul_f32" and tokens == 16 else None))
    rows += [
        Row("K2V2 exact, 16k: times as fast as two fp32 matmuls", decode("K2V2/exact", 16384, "x_matmul_f32"),
            digits=1),
        Row("K2V2 fast, 16k: times the floor", decode("K2V2/fast", 16384, "x_floor")),
        Row("8 threads, 16k: time over 2 threads", eight_threads, at_most=1.1),
    ]
    for tokens in (64, 128, 256):
        rows.append(Row(f"{tokens} tokens, all exact: times as fast as SDPA fp32",
                        decode("all_exact/fast", tokens, "x_sdpa_f32"), at_least=1))
    rows.append(Row("KVCache.forward of one token beside its kernels: microseconds", forward_overhead, digits=1,
                    at_most=15))
    for dtype in ("f32", "bf16"):
        rows.append(Row(f"append of 4096 {dtype} tokens: time over copying K and V",
                        storage("append_prompt", "x_copy", dtype=dtype), at_most=1.1))
    rows.append(Row("append of one token at 4k, with its share of quantising: % of the attention",
                    storage("append_token", "percent_of_attention"), at_most=3))
    for dtype in ("f32", "bf16"):
        for counter, text in (("percent_of_fill", "new memory"), ("percent_of_fill_reused", "memory in use")):
            rows.append(Row(f"dequantize of 4096 {dtype} tokens: % of the speed of filling {text}",
                            storage("dequantize_cache", counter, dtype=dtype), digits=0, at_least=70))
    for what in ("quantize", "dequantize"):
        for axis in ("tokens", "channels"):
            rows.append(Row(f"{what} 2 bits along {axis}: GB/s",
                            storage(f"{what}/bits:2/axis:{axis}", "GB_s"), digits=1))
    return rows
