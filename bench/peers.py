"""Decode attention of Kivi beside torch, ONNX Runtime and OpenVINO: the same shapes, the same data, one run.

    build/release/python bench/peers.py --venv build/peers   # first makes an environment with the peers' wheels
    build/release/python bench/peers.py                      # Kivi, torch, and those peers that can be imported
    taskset -c 1 build/release/python bench/peers.py --venv build/peers --seconds 3 --json peers.json

Batch 1, one query token, 32 query and 8 kv heads of 128 channels, one layer, normal random data. Copies of the layer
are rotated past 300 MB, so that every cache comes from memory. A row is called for --seconds, Python included; the
least of its calls counts, the median stands beside it. Other programs interrupt a slow call more often than a fast
one: so with one thread a call takes its CPU time where that is below the wall time, and with more threads interrupted
calls are left out while others remain. Kivi K2V2 fast is timed first and last; the least is the base of all ratios.

Before a row is timed, every copy of its layer is checked. "Off codes" is |out - want| / |want| (2-norms over all
heads), where `want` is attention in double over the keys and values that the peer itself holds, dequantised: it shows
that the kernel is right. "Off data" is the same over the keys and values before quantisation; random data is the
hardest case there is. OpenVINO's paged cache cannot be read back: its limit is on "off data" and follows from its step
size. A row that is off by more than its limit is not timed, and the exit code is 1.

A call of ONNX Runtime or OpenVINO also stores the one new token (their operators know no other way); torch and Kivi's
`attend` do not; the row "forward" is Kivi with the append. ONNX Runtime has past and present bound to one buffer: it
copies nothing. OpenVINO's state grows by a token a call, as Kivi's cache does under `forward`. All get the same number
of threads; none are pinned.
"""
import argparse
import gc
import importlib
import json
import math
import os
import platform
import re
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Optional

try:
    import torch
except ImportError:
    sys.exit("peers.py: this Python has no torch; use the wrapper that the build makes, build/release/python")

FOLDER = Path(__file__).resolve().parent
REQUIREMENTS = FOLDER / "peers-requirements.txt"
COLD_BYTES = 3.2e8
CHANNELS = 128
BASE = "Kivi K2V2 fast"
MISSING: dict = {}
sdpa = torch.nn.functional.scaled_dot_product_attention


def optional(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        MISSING[name] = str(error)
        return None


numpy, onnx, onnxruntime, openvino = (optional(name) for name in ("numpy", "onnx", "onnxruntime", "openvino"))
opset = optional("openvino.opset13") if openvino else None


def say(text: str, end: str = "\n") -> None:
    print(text, file=sys.stderr, end=end, flush=True)


# ------------------------------------------------------------------------------------------------ problem and rows


class Problem:
    """One layer: q [1, Hq, 1, D], k and v [1, Hkv, T, D], float32; the newest token is the last."""

    def __init__(self, heads: int, kv_heads: int, tokens: int, threads: int) -> None:
        self.heads, self.kv_heads, self.tokens, self.threads = heads, kv_heads, tokens, threads
        torch.manual_seed(tokens)
        self.q = torch.randn(1, heads, 1, CHANNELS)
        self.k, self.v = self.kv = [torch.randn(1, kv_heads, tokens, CHANNELS) for _ in range(2)]

    def copies(self, layer_bytes: float) -> int:
        return int(COLD_BYTES / layer_bytes) + 1

    def attention(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Two matrix products per kv head, the fair baseline in torch."""
        grouped = self.q.view(1, self.kv_heads, -1, CHANNELS) / math.sqrt(CHANNELS)
        return ((grouped @ k.transpose(-1, -2)).softmax(-1) @ v).view(self.q.shape)

    def reference(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return sdpa(self.q.double(), k.double(), v.double(), enable_gqa=True).float()


@dataclass
class Row:
    """What a peer gives to be checked and timed."""

    layers: int
    layer_bytes: float
    call: Callable[[int], Any]  # attention of one layer
    limit: float  # of "off codes", or of "off data" where held() is None
    read: Callable[[Any], torch.Tensor] = lambda out: out  # what call() returned, as a tensor like q
    held: Callable[[], Optional[tuple]] = lambda: None  # keys and values as the peer holds them, after a first call


def time_call(threads: int, call: Callable, *values: Any) -> float:
    cpu, begin = time.process_time(), time.perf_counter()
    call(*values)
    took, cpu = time.perf_counter() - begin, time.process_time() - cpu
    return min(took, cpu) if threads == 1 else took


def kivi_row(problem: Problem, bits: int, precision: str, append: bool = False) -> Row:
    first = torch.classes.kivi.KVCache(problem.kv_heads, CHANNELS, k_bits=bits, v_bits=bits, precision=precision)
    count = problem.tokens - 1 if append else problem.tokens
    first.append(problem.k[:, :, :count], problem.v[:, :, :count])
    new = [x[:, :, -1:].contiguous() for x in problem.kv]
    held = [torch.cat([cached, x[:, :, count:]], 2) for cached, x in zip(first.dequantize(), problem.kv)]
    layers = [first.clone() for _ in range(problem.copies(first.nbytes()))]
    call = (lambda i: layers[i].forward(problem.q, *new)) if append else (lambda i: layers[i].attend(problem.q))
    return Row(len(layers), first.nbytes(), call, 2e-5 if precision == "exact" else 2e-3, held=lambda: held)


def torch_row(problem: Problem, dtype: torch.dtype, by_sdpa: bool) -> Row:
    layer_bytes = 2 * problem.k.numel() * dtype.itemsize
    pairs = [[x.to(dtype, copy=True) for x in problem.kv] for _ in range(problem.copies(layer_bytes))]
    q = problem.q.to(dtype)
    call = (lambda i: sdpa(q, *pairs[i], enable_gqa=True)) if by_sdpa else (lambda i: problem.attention(*pairs[i]))
    return Row(len(pairs), layer_bytes, call, 2e-5 if dtype == torch.float32 else 2e-2, read=lambda out: out.float(),
               held=lambda: [x.float() for x in pairs[0]])


# ---------------------------------------------------------------------------------------------------- ONNX Runtime


def onnx_session(problem: Problem, bits: int) -> Any:
    """A model of one com.microsoft.GroupQueryAttention node. Scales are inputs, one per kv head and channel."""
    helper, types = onnx.helper, onnx.TensorProto
    cache = {32: types.FLOAT, 8: types.INT8, 4: types.UINT8}[bits]
    width, kv_width = problem.heads * CHANNELS, problem.kv_heads * CHANNELS
    past = [1, problem.kv_heads, problem.tokens, CHANNELS // 2 if bits == 4 else CHANNELS]
    inputs = {"query": (types.FLOAT, [1, 1, width]), "key": (types.FLOAT, [1, 1, kv_width]),
              "value": (types.FLOAT, [1, 1, kv_width]), "past_key": (cache, past), "past_value": (cache, past),
              "seqlens_k": (types.INT32, [1]), "total_sequence_length": (types.INT32, [1])}
    outputs = {"output": (types.FLOAT, [1, 1, width]), "present_key": (cache, past), "present_value": (cache, past)}
    attributes = {"num_heads": problem.heads, "kv_num_heads": problem.kv_heads}
    order = list(inputs)
    if bits < 32:
        order += [""] * 5 + ["k_scale", "v_scale"]  # no rotary tables, positions, bias or sinks
        inputs["k_scale"] = inputs["v_scale"] = (types.FLOAT, [1, problem.kv_heads, 1, CHANNELS])
        attributes.update(k_quant_type="PER_CHANNEL", v_quant_type="PER_CHANNEL", kv_cache_bit_width=bits)
    node = helper.make_node("GroupQueryAttention", order, list(outputs), domain="com.microsoft", **attributes)
    infos = [[helper.make_tensor_value_info(name, *what) for name, what in side.items()] for side in (inputs, outputs)]
    model = helper.make_model(helper.make_graph([node], "decode", *infos), ir_version=10,
                              opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)])
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = problem.threads  # a number given here leaves the threads unpinned
    options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def onnx_quantise(x: torch.Tensor, bits: int) -> tuple:
    """Symmetric, one scale per kv head and channel. Returns the stored codes, the scales, the values that they mean."""
    top = 2 ** (bits - 1) - 1
    scale = x.abs().amax(2, keepdim=True) / top
    code = (x / scale).round().clamp(-top - 1, top)
    if bits == 8:
        return code.to(torch.int8), scale, code * scale
    unsigned = (code + 8).to(torch.uint8)  # two to a byte, the even channel in the low half
    return unsigned[..., 0::2] | unsigned[..., 1::2] << 4, scale, code * scale


def onnx_value(x: torch.Tensor) -> Any:
    """The memory of x itself as an OrtValue; x must stay alive."""
    value = onnxruntime.OrtValue.ortvalue_from_numpy(x.numpy())
    if value.data_ptr() != x.data_ptr():
        raise RuntimeError("ONNX Runtime made a copy of a buffer")
    return value


def onnx_row(problem: Problem, bits: int) -> Row:
    feeds = {"query": problem.q.view(1, 1, -1), "key": problem.k[:, :, -1].reshape(1, 1, -1),
             "value": problem.v[:, :, -1].reshape(1, 1, -1),
             "seqlens_k": torch.tensor([problem.tokens - 1], dtype=torch.int32),
             "total_sequence_length": torch.tensor([problem.tokens], dtype=torch.int32)}
    stored, held = [x.clone() for x in problem.kv], list(problem.kv)
    if bits < 32:
        stored[0], feeds["k_scale"], held[0] = onnx_quantise(problem.k, bits)
        stored[1], feeds["v_scale"], held[1] = onnx_quantise(problem.v, bits)
    for x in stored:
        x[:, :, -1] = 0  # the operator itself writes the newest token
    layer_bytes = sum(x.nbytes for x in stored)
    caches = [[x.clone() for x in stored] for _ in range(problem.copies(layer_bytes))]
    out = torch.empty_like(feeds["query"])

    def bind(session: Any, cache: list) -> Any:
        binding = session.io_binding()
        for name, x in feeds.items():
            binding.bind_ortvalue_input(name, onnx_value(x))
        binding.bind_ortvalue_output("output", onnx_value(out))
        for name, x in zip(("key", "value"), cache):
            shared = onnx_value(x)
            binding.bind_ortvalue_input("past_" + name, shared)
            binding.bind_ortvalue_output("present_" + name, shared)
        return binding

    def trial(session: Any) -> float:
        binding = bind(session, caches[0])
        return min(time_call(problem.threads, session.run_with_iobinding, binding) for _ in range(5))

    # One session in ten is slower than the others by 15 to 50 % as long as it lives, whatever it is fed.
    session = min((onnx_session(problem, bits) for _ in range(5)), key=trial)
    bindings = [bind(session, cache) for cache in caches]

    def call(i: int) -> tuple:
        session.run_with_iobinding(bindings[i])
        return out, feeds, caches  # named here to keep all bound memory alive

    def read(_: tuple) -> torch.Tensor:
        got = out.view(problem.q.shape).clone()
        out.fill_(math.nan)  # the next layer must write it anew
        return got

    return Row(len(bindings), layer_bytes, call, 2e-5, read=read, held=lambda: held)


# -------------------------------------------------------------------------------------------------------- OpenVINO


def openvino_row(problem: Problem, requests: list, layer_bytes: float, limit: float, **more: Any) -> Row:
    def call(i: int) -> Any:
        requests[i].infer(share_outputs=True)
        return requests[i]

    read = lambda request: torch.from_numpy(request.get_output_tensor(0).data.copy()).view(problem.q.shape)
    return Row(len(requests), layer_bytes, call, limit, read=read, **more)


def openvino_compile(problem: Problem, model: Any, **options: str) -> Any:
    return openvino.Core().compile_model(model, "CPU", {
        "INFERENCE_NUM_THREADS": problem.threads, "NUM_STREAMS": 1, "ENABLE_CPU_PINNING": False,
        "INFERENCE_PRECISION_HINT": "f32", **options})


def openvino_parameter(name: str, shape: list, dtype: type) -> Any:
    parameter = opset.parameter(shape, dtype, name=name)
    parameter.output(0).set_names({name})
    return parameter


def openvino_state_row(problem: Problem) -> Row:
    """scaled_dot_product_attention over a state: ReadValue, Gather by beam, Concat, Assign, kv heads broadcast to query
    heads. The plugin fuses all that into one node and keeps the state as u8, one scale and zero per token and head."""
    group = problem.heads // problem.kv_heads
    util = importlib.import_module("openvino.op.util")
    i64 = lambda *values: opset.constant(numpy.array(values, numpy.int64))
    f32, axis = numpy.float32, opset.constant(numpy.int64(0))
    q = openvino_parameter("q", [-1, problem.heads, -1, CHANNELS], f32)
    beam = openvino_parameter("beam", [-1], numpy.int32)
    parameters, assigns, operands = [q, beam], [], [q]
    for name in ("k", "v"):
        shape, info = [-1, problem.kv_heads, -1, CHANNELS], util.VariableInfo()
        info.data_shape, info.data_type, info.variable_id = openvino.PartialShape(shape), openvino.Type.f32, name
        variable = util.Variable(info)
        parameters.append(openvino_parameter(name, shape, f32))
        batch = opset.gather(opset.shape_of(q), i64(0), axis)
        empty = opset.broadcast(opset.constant(f32(0)), opset.concat([batch, i64(problem.kv_heads, 0, CHANNELS)], 0))
        whole = opset.concat([opset.gather(opset.read_value(empty, variable), beam, axis), parameters[-1]], 2)
        assigns.append(opset.assign(whole, variable))
        operands.append(whole)
        if group > 1:
            wide = opset.unsqueeze(whole, i64(2))
            wide = opset.broadcast(wide, i64(1, 1, group, 1, 1), broadcast_spec="BIDIRECTIONAL")
            operands[-1] = opset.reshape(wide, i64(0, problem.heads, -1, CHANNELS), True)
    model = openvino.Model([opset.scaled_dot_product_attention(*operands).output(0)], assigns, parameters, "decode")
    compiled = openvino_compile(problem, model, KV_CACHE_PRECISION="u8")
    past = {name: openvino.Tensor(x[:, :, :-1].contiguous().numpy()) for name, x in zip("kv", problem.kv)}
    inputs = {name: openvino.Tensor(x[:, :, -1:].contiguous().numpy()) for name, x in zip("kv", problem.kv)}
    inputs.update(q=openvino.Tensor(problem.q.numpy()), beam=openvino.Tensor(numpy.zeros(1, numpy.int32)))
    layer_bytes = 2 * problem.kv_heads * problem.tokens * (CHANNELS + 8)  # codes, float32 scale and zero
    requests = [compiled.create_infer_request() for _ in range(problem.copies(layer_bytes))]
    for request in requests:
        for state in request.query_state():
            state.state = past[state.name]
        for name, x in inputs.items():
            request.set_tensor(name, x)

    def held() -> tuple:
        states = {s.name: torch.from_numpy(s.state.data.copy()).float() for s in requests[0].query_state()}
        if torch.equal(states["k"], problem.k):
            raise RuntimeError("the plugin keeps this state in float32, not in u8")
        return states["k"], states["v"]

    return openvino_row(problem, requests, layer_bytes, 2e-5, held=held)


def openvino_paged_model(problem: Problem, bits: int) -> Any:
    """PagedAttention as the plugin takes it: u8 or u4 blocks of 32 tokens, one scale and zero per token and head."""
    i32, f32, u8 = numpy.int32, numpy.float32, numpy.uint8
    width, kv_width, cache = problem.heads * CHANNELS, problem.kv_heads * CHANNELS, [-1, problem.kv_heads, -1, CHANNELS]
    parameters = [openvino_parameter(*what) for what in (
        ("q", [-1, width], f32), ("k", [-1, kv_width], f32), ("v", [-1, kv_width], f32), ("key_cache.0", cache, f32),
        ("value_cache.0", cache, f32), ("past_lens", [-1], i32), ("subsequence_begins", [-1], i32),
        ("block_indices", [-1], i32), ("block_indices_begins", [-1], i32), ("max_context_len", [], i32))]
    number, none = lambda value: opset.constant(i32(value)), lambda dtype: opset.constant(numpy.zeros(0, dtype))
    operands = [*parameters[:-1], opset.constant(f32(CHANNELS**-0.5)), number(0), none(f32),  # scale, window, alibi
                parameters[-1], number(0), none(i32), none(i32), none(f32),  # aggregation of scores, rotation of keys
                none(f32), number(0), number(0), none(f32),  # sparse attention, sinks
                number(0), none(i32), none(i32), none(i32),  # eviction
                none(i32), none(u8), none(i32)]  # token types, bias among the queries
    node = importlib.import_module("openvino.op")._PagedAttentionExtension([x.output(0) for x in operands])
    for name, value in (("num_k_heads", problem.kv_heads), ("num_v_heads", problem.kv_heads),
                        ("k_head_size", CHANNELS), ("v_head_size", CHANNELS)):
        node.get_rt_info()[name] = value
    model = openvino.Model([node.output(0)], parameters, "decode")
    return openvino_compile(problem, model, KEY_CACHE_PRECISION=f"u{bits}", VALUE_CACHE_PRECISION=f"u{bits}",
                            KEY_CACHE_QUANT_MODE="BY_TOKEN")


def openvino_paged_row(problem: Problem, bits: int) -> Row:
    compiled, block, chunk, tokens = openvino_paged_model(problem, bits), 32, 256, problem.tokens

    def new_cache() -> dict:
        ports = [compiled.input(name) for name in ("key_cache.0", "value_cache.0")]
        inner = lambda port: [port.partial_shape[i].get_length() for i in (1, 2, 3)]
        return {port.any_name: openvino.Tensor(port.element_type, openvino.Shape([-(-tokens // block), *inner(port)]))
                for port in ports}

    def feed(request: Any, cache: dict, q: torch.Tensor, begin: int, end: int, first_block: int, past: int) -> None:
        k, v = (x[0, :, begin:end].transpose(0, 1).reshape(end - begin, -1) for x in problem.kv)
        for name, x in (("q", q), ("k", k), ("v", v)):
            request.set_tensor(name, openvino.Tensor(x.contiguous().numpy()))
        blocks = list(range(first_block, -(-end // block)))
        for name, values in (("past_lens", [past]), ("subsequence_begins", [0, end - begin]), ("block_indices", blocks),
                             ("block_indices_begins", [0, len(blocks)]), ("max_context_len", past + end - begin)):
            request.set_tensor(name, openvino.Tensor(numpy.array(values, numpy.int32)))
        for name, x in cache.items():
            request.set_tensor(name, x)

    # Filled as many short sequences, each in its own blocks: the stored tokens do not depend on that, and one prompt of
    # 32768 tokens would take minutes.
    filled, writer = new_cache(), compiled.create_infer_request()
    for begin in range(0, tokens - 1, chunk):
        end = min(begin + chunk, tokens - 1)
        feed(writer, filled, torch.zeros(end - begin, problem.heads * CHANNELS), begin, end, begin // block, 0)
        writer.infer()
    layer_bytes = sum(x.byte_size for x in filled.values())
    requests = [compiled.create_infer_request() for _ in range(problem.copies(layer_bytes))]
    for request in requests:
        cache = new_cache()
        for name, x in cache.items():
            filled[name].copy_to(x)
        feed(request, cache, problem.q.view(1, -1), tokens - 1, tokens, 0, tokens - 1)
    # 128 normal values span 5.3 on the mean; rounding to a step s costs s / sqrt(12), in K and in V. Half of it on top.
    return openvino_row(problem, requests, layer_bytes, 1.5 * math.sqrt(2) * 5.3 / (2**bits - 1) / math.sqrt(12))


# ------------------------------------------------------------------------------------------------------------- run


def all_rows(only: str) -> list:
    """Name, function, and what the function takes after the problem."""
    rows = [(BASE, kivi_row, 2, "fast"), ("Kivi K2V2 fast, forward", kivi_row, 2, "fast", True),
            ("Kivi K2V2 exact", kivi_row, 2, "exact"), ("Kivi K4V4 fast", kivi_row, 4, "fast"),
            ("Kivi K8V8 fast", kivi_row, 8, "fast"),
            ("torch, two matmuls per kv head, fp32", torch_row, torch.float32, False),
            ("torch SDPA fp32", torch_row, torch.float32, True), ("torch SDPA bf16", torch_row, torch.bfloat16, True)]
    if onnx and onnxruntime and numpy:
        rows += [("ONNX Runtime GQA fp32", onnx_row, 32), ("ONNX Runtime GQA int8 per channel", onnx_row, 8),
                 ("ONNX Runtime GQA int4 per channel", onnx_row, 4)]
    if openvino and opset and numpy:
        rows += [("OpenVINO SDPA u8", openvino_state_row), ("OpenVINO paged u8", openvino_paged_row, 8),
                 ("OpenVINO paged u4", openvino_paged_row, 4)]
    wanted = [part.strip().lower() for part in only.split(",")]
    return [row for row in rows if row[0] == BASE or any(part in row[0].lower() for part in wanted)]


def check(problem: Problem, row: Row) -> dict:
    """Runs every layer once, which also warms it, and returns the largest errors. Raises if one is over the limit."""
    outs = torch.cat([row.read(row.call(i)) for i in range(row.layers)]).flatten(1)
    outs = outs.nan_to_num(nan=math.inf)  # max() may lose a NaN
    off = lambda want: ((outs - want.flatten(1)).norm(dim=1) / want.norm()).max().item()
    held = row.held()
    errors = {"off_codes": None if held is None else off(problem.reference(*held)),
              "off_data": off(problem.reference(*problem.kv)), "limit": row.limit}
    error = errors["off_data" if held is None else "off_codes"]
    if not error <= row.limit:
        raise ValueError(f"wrong result, off by {error:.2g}, more than {row.limit:.2g}")
    return errors


def time_calls(row: Row, threads: int, seconds: float) -> dict:
    interruptions = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
    clean, all_calls, start = [], [], time.perf_counter()
    while len(all_calls) < 2 * row.layers or time.perf_counter() - start < seconds:
        before = interruptions()
        all_calls.append(time_call(threads, row.call, len(all_calls) % row.layers))
        if interruptions() == before:
            clean.append(all_calls[-1])
    times = sorted(clean if clean and threads > 1 else all_calls)
    return {"least_ms": times[0] * 1e3, "median_ms": times[len(times) // 2] * 1e3, "calls": len(all_calls),
            "interrupted": len(all_calls) - len(clean)}


def run_context(arguments: argparse.Namespace, threads: int, tokens: int, label: str) -> list:
    """All rows of one thread count and one context."""
    torch.set_num_threads(threads)
    problem = Problem(arguments.heads, arguments.kv_heads, tokens, threads)
    rows, results, base_row = all_rows(arguments.only), [], None
    for i, (name, make, *more) in enumerate(rows, 1):
        say(f"{label} {threads} thread(s), {tokens} tokens [{i}/{len(rows)}] {name}: ", end="")
        result = {"name": name, "threads": threads, "tokens": tokens}
        results.append(result)
        try:
            row = make(problem, *more)
            result.update(check(problem, row), layers=row.layers, layer_bytes=row.layer_bytes,
                          bytes_per_token=row.layer_bytes / tokens / problem.kv_heads)
            result.update(time_calls(row, threads, arguments.seconds))
            say("{least_ms:.3f} ms (median {median_ms:.3f}, {calls} calls, {interrupted} interrupted)".format(**result))
            base_row = base_row or (row if name == BASE else None)
        except Exception as error:  # whatever a peer raises must not end the others
            result["failed"] = f"{type(error).__name__}: {error}".split("\n")[0]
            say(f"FAILED: {type(error).__name__}: {error}")
        row = None
        gc.collect()
    if base_row is not None:
        first, again = results[0]["least_ms"], time_calls(base_row, threads, arguments.seconds)["least_ms"]
        results[0].update(least_ms=min(first, again), first_ms=first, last_ms=again)
        say(f"{label} {BASE}, again: {again:.3f} ms")
        for result in (r for r in results if "least_ms" in r):
            result["ratio"] = result["least_ms"] / results[0]["least_ms"]
    return results


def print_table(threads: int, results: list) -> None:
    contexts = sorted({r["tokens"] for r in results})
    print(f"\n{threads} thread(s); ms per call, least (median); x: times {BASE}\n")
    print("| | bytes | " + " | ".join(f"{n} tokens | x" for n in contexts) + " | off codes | off data |")
    print("|---|" + "---|" * (2 * len(contexts) + 3))
    for name in dict.fromkeys(r["name"] for r in results):
        rows = sorted((r for r in results if r["name"] == name), key=lambda r: r["tokens"])
        cells = [f"{rows[-1]['bytes_per_token']:.0f}" if "bytes_per_token" in rows[-1] else ""]
        for r in rows:
            cells.append(f"{r['least_ms']:.3g} ({r['median_ms']:.3g})" if "least_ms" in r else "failed")
            cells.append(f"{r['ratio']:.2f}" if "ratio" in r else "")
        for key in ("off_codes", "off_data"):
            worst = max((r[key] for r in rows if r.get(key) is not None), default=None)
            cells.append("" if worst is None else f"{worst:.1e}")
        print(f"| {name} | " + " | ".join(cells) + " |")


def enter_venv(folder: Path) -> None:
    """Installs the peers into `folder`, lets it see this Python's torch, and starts this script again in there."""
    python = folder.absolute() / "bin" / "python"
    say(f"{folder}: installing what {REQUIREMENTS.name} names, if it is not there")
    try:
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, stdout=sys.stderr)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", str(REQUIREMENTS)]
        subprocess.run(pip, check=True, stdout=sys.stderr)
    except (OSError, subprocess.CalledProcessError) as error:
        return say(f"that failed ({error}); going on with this Python")
    # A .pth file and not --system-site-packages: torch often stands in an environment of its own. What is installed in
    # the new environment comes first.
    site = next((folder / "lib").glob("python3*/site-packages"))
    (site / "torch_elsewhere.pth").write_text(f"{Path(torch.__file__).parent.parent}\n")
    os.execv(python, [str(python), str(Path(__file__).resolve()), *sys.argv[1:], "--venv", ""])  # the last one counts


def parse_arguments() -> argparse.Namespace:
    numbers = lambda text: [int(part) for part in text.split(",")]
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=numbers, default=[4096, 16384, 32768], help="contexts (4096,16384,32768)")
    parser.add_argument("--threads", type=numbers, default=[1], help="thread counts, for example 1,2 (1)")
    parser.add_argument("--heads", type=int, default=32, help="query heads (32)")
    parser.add_argument("--kv-heads", type=int, default=8, help="kv heads (8)")
    parser.add_argument("--seconds", type=float, default=2.0, help="time for the calls of one row (2)")
    parser.add_argument("--only", default="", help="rows whose name contains one of these, comma separated (all)")
    parser.add_argument("--library", type=Path, default=FOLDER.parent / "build/release/lib/libkivi.so")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    parser.add_argument("--venv", default="", help="run in this virtual environment; it is made on first use, with the "
                        "wheels of peers-requirements.txt and the torch of the Python that runs this")
    arguments = parser.parse_args()
    heads, kv_heads = arguments.heads, arguments.kv_heads
    if min(heads, kv_heads, *arguments.threads) < 1 or heads % kv_heads or min(arguments.tokens) < 256:
        parser.error("--threads must be 1 at least, --tokens 256, and --heads a multiple of --kv-heads")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    if not arguments.library.exists():
        sys.exit(f"peers.py: {arguments.library} is not there; build it first (./run bench), or name it with --library")
    if arguments.venv:
        enter_venv(Path(arguments.venv))
    torch.classes.load_library(str(arguments.library))
    versions = {"Kivi": f"{torch.ops.kivi.version()}, {torch.ops.kivi.cpu_capability()}", "torch": torch.__version__}
    versions.update({n: m.__version__ for n, m in (("onnxruntime", onnxruntime), ("openvino", openvino)) if m})
    if MISSING:
        say(f"left out: {'; '.join(MISSING.values())}. --venv build/peers installs them, as does\n"
            f"  pip install -r bench/{REQUIREMENTS.name}    in an environment that has torch")
    if max(arguments.threads) > len(os.sched_getaffinity(0)):
        say(f"warning: {max(arguments.threads)} threads on {len(os.sched_getaffinity(0))} core(s)")
    results = []
    runs = [(threads, tokens) for threads in arguments.threads for tokens in arguments.tokens]
    with torch.inference_mode():
        for i, (threads, tokens) in enumerate(runs, 1):
            results += run_context(arguments, threads, tokens, f"({i}/{len(runs)})")
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    versions = {"CPU": cpu[1] if cpu else platform.machine(), **versions}
    print("; ".join(f"{name} {version}" for name, version in versions.items()))
    print(f"{arguments.heads} query and {arguments.kv_heads} kv heads of {CHANNELS} channels, cold caches; bytes: held"
          " by the cache per token and kv head (K and V) at the longest context")
    for threads in arguments.threads:
        print_table(threads, [r for r in results if r["threads"] == threads])
    both = [f"{r['first_ms']:.3f} and {r['last_ms']:.3f} ms at {r['tokens']}" for r in results if "last_ms" in r]
    print(f"\n{BASE}, timed first and last: {', '.join(both) or 'failed'}")
    if MISSING:
        print(f"Not installed: {', '.join(MISSING)}")
    if arguments.json:
        record = {"versions": versions, "heads": arguments.heads, "kv_heads": arguments.kv_heads,
                  "channels": CHANNELS, "seconds": arguments.seconds, "missing": MISSING, "rows": results}
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    failed = [r for r in results if "failed" in r]
    for r in failed:
        print(f"FAILED: {r['name']}, {r['threads']} thread(s), {r['tokens']} tokens: {r['failed']}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
