"""Kivi on a GPU beside torch's own attention: one decode step of one layer, what appending costs, and a whole model.

    build/release/python bench/cuda.py                        # all tables; --json FILE keeps the figures
    build/release/python bench/cuda.py --quick                # a minute: two shapes, short times

Attention: one query token, 8 kv heads of 128 channels, float16, random data. Every row is captured in a CUDA graph and
replayed; between two replays 256 MB are written, so that nothing of the cache is in L2. Times are CUDA events around
the replay alone, the least and the median of --repeats. GB/s counts the bytes of the quantised records and exact
tokens that a step must read; "of peak" is their share of the device's memory speed. Before a row is timed its output
is compared with attention in double over the dequantised cache; a row that is off by more than 2e-3 is not timed and
the exit code is 1.

torch: scaled_dot_product_attention over float16 keys and values of the same length, with each backend that takes it
(flash attention splits long sequences between blocks); the fastest one counts.

append: one token, mean over a whole group and so with its share of quantising, in a graph as above.
model: tokens per second of greedy decoding with the TorchScript model that `./run demo` makes, Kivi's cache beside the
exact one.
"""
import argparse
import json
import statistics
import sys
import time
from pathlib import Path

try:
    import torch
except ImportError:
    sys.exit("cuda.py: this Python has no torch; use the wrapper that the build makes, build/release/python")

ROOT = Path(__file__).resolve().parent.parent
KV_HEADS, CHANNELS, FLUSH_BYTES, LIMIT = 8, 128, 256 << 20, 2e-3
# Memory speed in bytes per second, from the makers' data sheets. Any other device is measured with a copy.
PEAKS = {"H200": 4.8e12, "H100": 3.35e12, "A100": 2.04e12, "L40": 0.864e12, "4090": 1.008e12, "B200": 8.0e12}
CACHES = {
    "K2V2": dict(k_bits=2, v_bits=2),
    "K4V4": dict(k_bits=4, v_bits=4),
    "balanced": dict(recipe="balanced"),
    "quality": dict(recipe="quality"),
}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Timer:
    """Replays of a captured call, each after the L2 cache was overwritten."""

    def __init__(self, repeats: int) -> None:
        self.repeats = repeats
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def capture(self, call):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = call()
        return graph, out

    def replay(self, graph, times=1):
        """Microseconds: least and median of a replay (the mean over `times` of them in a row)."""
        found = []
        for _ in range(self.repeats):
            self.flush.fill_(0)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(times):
                graph.replay()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) * 1e3 / times)
        return min(found), statistics.median(found)


def peak_of(name: str) -> float:
    for part, peak in PEAKS.items():
        if part in name:
            return peak
    x = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    best = 1e9
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        y.copy_(x)
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return 2 * x.numel() / best


def filled_cache(options, batch: int, tokens: int, k, v):
    cache = torch.classes.kivi.KVCache(KV_HEADS, CHANNELS, **options)
    for first in range(0, tokens, 8192):
        cache.append(k[:, :, first:first + 8192], v[:, :, first:first + 8192])
    return cache


def read_bytes(cache, batch: int, tokens: int) -> float:
    """What a step must read: records of the quantised tokens, float16 for the others."""
    quantised = cache.quantized_length()
    numbers = batch * KV_HEADS * 2 * CHANNELS
    return numbers * (quantised * cache.bits_per_element() / 8 + (tokens - quantised) * 2)


def reference(cache, q):
    """Attention in double over what the cache holds, one row of the batch at a time."""
    k, v = cache.dequantize()
    group = q.size(1) // KV_HEADS
    rows = []
    for b in range(q.size(0)):
        kb, vb = (t[b].double().repeat_interleave(group, 0) for t in (k, v))
        scores = q[b].double() @ kb.transpose(-1, -2) / CHANNELS**0.5
        rows.append(torch.softmax(scores, -1) @ vb)
    return torch.stack(rows)


def torch_time(timer, q, k, v):
    """The fastest backend of scaled_dot_product_attention: name, least and median."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    best = None
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH):
        def call():
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=q.size(1) != k.size(1))
        try:
            graph, _ = timer.capture(call)
        except RuntimeError:
            continue
        least, median = timer.replay(graph)
        if best is None or least < best[1]:
            best = (backend.name.lower(), least, median)
        del graph
    return best


def attention_table(timer, peak, quick, rows):
    failed = False
    print(f"\n{'B':>3} {'tokens':>7} {'GQA':>3} {'cache':>9} {'us':>8} {'median':>8} {'GB/s':>6} {'of peak':>7} {'torch us':>9} "
          f"{'backend':>16} {'faster':>6} {'max error':>9}")
    shapes = [(1, 16384), (16, 8192)] if quick else [(b, t) for b in (1, 4, 16, 64) for t in (1024, 4096, 16384, 32768, 65536, 131072)]
    for batch, tokens in shapes:
        needed = batch * tokens * KV_HEADS * CHANNELS * 2 * 2 * 1.6
        if needed > torch.cuda.mem_get_info()[0]:
            say(f"cuda.py: B {batch}, {tokens} tokens: not enough memory for float16 keys and values; left out")
            continue
        torch.manual_seed(tokens)
        k, v = (torch.randn(batch, KV_HEADS, tokens, CHANNELS, device="cuda", dtype=torch.half) for _ in range(2))
        for gqa in (4,) if quick else (1, 4, 8):
            q = torch.randn(batch, KV_HEADS * gqa, 1, CHANNELS, device="cuda", dtype=torch.half)
            backend, torch_least, _ = torch_time(timer, q, k, v)
            for name, options in CACHES.items():
                cache = filled_cache(options, batch, tokens, k, v)
                error = (cache.attend(q).double() - reference(cache, q)).abs().max().item()
                if not error <= LIMIT:
                    print(f"{batch:3} {tokens:7} {gqa:3} {name:>9}: off by {error:.2e}, more than {LIMIT}")
                    failed = True
                    continue
                graph, _ = timer.capture(lambda: cache.attend(q))
                least, median = timer.replay(graph)
                speed = read_bytes(cache, batch, tokens) / (least * 1e-6)
                print(f"{batch:3} {tokens:7} {gqa:3} {name:>9} {least:8.1f} {median:8.1f} {speed / 1e9:6.0f} {speed / peak:7.0%} "
                      f"{torch_least:9.1f} {backend:>16} {torch_least / least:6.2f} {error:9.1e}")
                rows.append(dict(table="attention", batch=batch, tokens=tokens, gqa=gqa, cache=name, us=least, median_us=median,
                                 bytes_per_second=speed, of_peak=speed / peak, torch_us=torch_least, backend=backend, error=error))
                del graph, cache
        del k, v
        torch.cuda.empty_cache()
    return failed


def append_table(timer, quick, rows):
    print(f"\n{'B':>3} {'tokens':>7} {'cache':>9} {'append us':>9} {'attention us':>12} {'share':>6}")
    for batch, tokens in ((1, 16384),) if quick else ((1, 16384), (16, 16384), (64, 4096)):
        k, v = (torch.randn(batch, KV_HEADS, tokens, CHANNELS, device="cuda", dtype=torch.half) for _ in range(2))
        k1, v1 = k[:, :, :1].contiguous(), v[:, :, :1].contiguous()
        q = torch.randn(batch, KV_HEADS * 4, 1, CHANNELS, device="cuda", dtype=torch.half)
        for name, options in CACHES.items():
            cache = filled_cache(options, batch, tokens, k, v)
            cache.reserve(tokens + 64 * (timer.repeats + 8))
            graph, _ = timer.capture(lambda: cache.append(k1, v1))
            append, _ = timer.replay(graph, times=32)
            graph, _ = timer.capture(lambda: cache.attend(q))
            attend, _ = timer.replay(graph)
            print(f"{batch:3} {tokens:7} {name:>9} {append:9.1f} {attend:12.1f} {append / attend:6.1%}")
            rows.append(dict(table="append", batch=batch, tokens=tokens, cache=name, append_us=append, attention_us=attend))
            del graph, cache


def model_table(path, quick, rows):
    """Decoding of SmolLM2-135M in float16 after a prompt of 7,000 tokens; every step is launched by itself."""
    module = torch.jit.load(str(path), map_location="cuda").half()
    prompt, steps = (1000, 16) if quick else (7000, 128)
    ids = torch.randint(0, 40000, (1, prompt), device="cuda", generator=torch.Generator("cuda").manual_seed(1))

    def decode(lane):
        module.use([lane], False)
        token = ids[:, -1:]
        for i in range(steps + 8):
            if i == 8:
                torch.cuda.synchronize()
                start = time.perf_counter()
            token = module(token, prompt + i)[:, -1].argmax(-1, keepdim=True)
        torch.cuda.synchronize()
        return steps / (time.perf_counter() - start)

    module.clear_caches()
    module(ids, 0)
    print(f"\n{'cache':>9} {'tokens/s':>9}   after {prompt} tokens")
    lanes = {}
    for name, options in CACHES.items():
        o = {**dict(k_bits=2, v_bits=2, recipe=""), **options}
        for layer in range(module.num_layers):
            lanes[name] = module.add_cache(layer, o["k_bits"], o["v_bits"], 32, 128, 4, "fast", False, "float16", o["recipe"], [], [],
                                           False, False, None, False, False, [])
        module.fill(lanes[name])
    for name, lane in {"exact": -1, **lanes}.items():
        speed = decode(lane)
        print(f"{name:>9} {speed:9.1f}")
        rows.append(dict(table="model", cache=name, prompt=prompt, tokens_per_second=speed))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=Path, default=ROOT / "build/release/lib/libkivi.so")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--model", type=Path, default=ROOT / "build/release/bin/smollm2.pt", help="left out if it is not there")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        say("cuda.py: torch finds no CUDA device here; nothing was measured")
        return 2
    torch.ops.load_library(str(arguments.library))
    device = torch.cuda.get_device_properties(0)
    peak = peak_of(device.name)
    print(f"{device.name}, {device.multi_processor_count} SMs, {peak / 1e12:.2f} TB/s; {torch.ops.kivi.version()}")
    timer = Timer(5 if arguments.quick else arguments.repeats)
    rows: list = []
    with torch.no_grad():
        failed = attention_table(timer, peak, arguments.quick, rows)
        append_table(timer, arguments.quick, rows)
        if arguments.model.exists():
            model_table(arguments.model, arguments.quick, rows)
        else:
            say(f"cuda.py: {arguments.model} is not there (./run demo makes it); the model was not measured")
    if arguments.json:
        arguments.json.write_text(json.dumps(dict(device=device.name, peak=peak, rows=rows), indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
