"""The operators and the class from Python: keyword arguments, torch.library.opcheck of every operator, torch.compile
with tokens of changing number, scripting, pickling. Run as: python python_test.py path/to/libkivi.so
"""

import contextlib
import copy
import io
import json
import os
import sys
import tempfile
import threading
import unittest

try:
    import torch
except ImportError:
    print("skipped: this Python has no torch")
    sys.exit(77)

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

ops = torch.ops.kivi


def randn(*sizes, seed=0, dtype=torch.float32):
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)).to(dtype)


def new_cache(**options):
    settings = dict(group_size=16, residual_length=8, sink_length=4)
    settings.update(options)
    return torch.classes.kivi.KVCache(2, 16, **settings)


FORMAT = None  # set when the library is loaded


def tensors(batch=2, pages=2):
    """A cache of the operators, empty: pool, block_table, lengths, quantized_lengths, sink_k, sink_v, window_k, window_v."""
    slots = ops.cache_window_capacity(FORMAT)
    return [
        torch.zeros(batch * pages, ops.cache_page_bytes(FORMAT), dtype=torch.uint8),
        torch.arange(batch * pages, dtype=torch.int32).view(batch, pages),
        torch.zeros(batch, dtype=torch.int64),
        torch.zeros(batch, dtype=torch.int64),
        torch.zeros(batch, 2, 4, 16),
        torch.zeros(batch, 2, 4, 16),
        torch.zeros(batch, 2, slots, 16),
        torch.zeros(batch, 2, slots, 16),
    ]


def filled():
    cache = tensors()
    ops.cache_append(*cache, randn(2, 2, 60, 16), randn(2, 2, 60, 16, seed=1), FORMAT)
    return cache


class Class(unittest.TestCase):
    def test_keyword_arguments(self):
        c = torch.classes.kivi.KVCache(
            num_kv_heads=2, head_dim=16, value_head_dim=20, k_bits=4, v_bits=2, group_size=16, residual_length=8,
            sink_length=0, precision="exact", range_search=True, scale_dtype="float32")
        k, v, q = randn(2, 2, 50, 16), randn(2, 2, 50, 20), randn(2, 4, 50, 16)
        out = c.forward(q, k, v, attn_mask=None, is_causal=True, scale=None, softcap=0.0, window=0, sinks=None,
                        alibi_slopes=None, lengths=torch.tensor([50, 20]))
        self.assertEqual(out.shape, (2, 4, 50, 20))
        c.append(k=k, v=v)
        self.assertEqual(c.length(), 100)
        self.assertEqual(c.lengths().tolist(), [100, 70])
        self.assertEqual(c.quantized_length(), 80)
        self.assertEqual(c.attend(q=q[:, :, :1], window=3, scale=0.5).shape, (2, 4, 1, 20))
        out, lse = c.attend_with_lse(q[:, :, :1])
        self.assertEqual(lse.shape, (2, 4, 1))
        c.truncate(n=30)
        c.reorder(rows=torch.tensor([1, 0]))
        c.repeat_interleave(n=2)
        c.select(rows=torch.tensor([0]))
        keys, values = c.dequantize()
        self.assertEqual(keys.shape, (1, 2, 30, 16))
        d = c.clone()
        c.reset()
        self.assertEqual((c.length(), d.length()), (0, 30))

    def test_errors_are_python_errors_with_their_words(self):
        with self.assertRaisesRegex((RuntimeError, ValueError), "k_bits must be 1, 2, 3, 4 or 8, got 5"):
            torch.classes.kivi.KVCache(2, 16, k_bits=5)
        with self.assertRaisesRegex(ValueError, "bits must be 1, 2, 3, 4 or 8, got 7"):
            ops.quantize(randn(4, 32), 1, bits=7)
        with self.assertRaisesRegex(TypeError, "x must be float32, float16 or bfloat16"):
            ops.fake_quantize(torch.ones(4, 32, dtype=torch.int64), 1)

    def test_copies_and_files(self):
        c = new_cache()
        c.append(randn(2, 2, 70, 16), randn(2, 2, 70, 16, seed=1))
        file = io.BytesIO()
        torch.save(c, file)
        file.seek(0)
        for other in (copy.deepcopy(c), torch.load(file, weights_only=False)):
            self.assertEqual(other.length(), 70)
            for a, b in zip(other.dequantize(), c.dequantize()):
                self.assertTrue(torch.equal(a, b))
            other.truncate(10)
            self.assertEqual(c.length(), 70)
        file.seek(0)
        with torch.serialization.safe_globals([torch.ScriptObject]):
            self.assertEqual(torch.load(file).length(), 70)

    def test_what_is_no_tensor_with_values_is_named(self):
        c = new_cache()
        c.append(randn(1, 2, 30, 16), randn(1, 2, 30, 16, seed=1))
        k = randn(1, 2, 1, 16)
        for call in (lambda: c.append(None, k), lambda: c.forward(k, None, k), lambda: new_cache().append(None, k)):
            with self.assertRaisesRegex(TypeError, "k must be a tensor"):
                call()
        for call in (lambda: c.attend(None), lambda: c.forward(None, k, k), lambda: new_cache().attend(None)):
            with self.assertRaisesRegex(TypeError, "q must be a tensor"):
                call()
        with FakeTensorMode():
            fake = torch.randn(1, 2, 1, 16)
            for call in (lambda: c.append(fake, fake), lambda: new_cache().forward(fake, fake, fake), lambda: c.attend(fake)):
                with self.assertRaisesRegex(ValueError, "has no data of its own"):
                    call()
        with self.assertRaisesRegex(ValueError, "NUL"):
            ops.save_caches([c], tempfile.gettempdir() + "/caches\0more")
        self.assertEqual(c.length(), 30)

    def test_modes_of_torch_do_not_reach_into_a_cache(self):
        def under(mode):
            if mode == "grad":
                return lambda f: torch.func.grad(lambda x: (f(), x.sum())[1])(torch.zeros(3))
            if mode == "functionalize":
                return lambda f: torch.func.functionalize(lambda x: (f(), x + 1)[1])(torch.zeros(3))
            if mode == "vmap":
                return lambda f: torch.vmap(lambda x: (f(), x + 1)[1])(torch.zeros(3))

            def call(f):
                with mode() if mode else contextlib.nullcontext():
                    f()
            return call

        class Fails(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                if function.namespace == "kivi":  # save_caches, load_caches as such
                    return function(*args, **(kwargs or {}))
                raise RuntimeError(f"{function} is not to be seen")

        k, v = randn(2, 2, 300, 16), randn(2, 2, 300, 16, seed=1)
        q, rows = randn(2, 4, 1, 16, seed=2), torch.tensor([1, 0])
        short_k, short_v, one_k, one_v, large = k[:, :, :5].clone(), v[:, :, :5].clone(), k[:, :, :1].clone(), v[:, :, :1].clone(), k * 1e7

        def history(run, options):
            c, out = new_cache(**options), []
            for step in (lambda: c.append(short_k, short_v), lambda: c.reserve(1000), lambda: c.append(k, v),
                         lambda: out.append(c.forward(q, one_k, one_v)), lambda: out.append(c.attend(q)), lambda: c.reorder(rows),
                         lambda: c.append(large, v), lambda: c.truncate(150), lambda: out.extend(c.dequantize()),
                         lambda: out.append(c.lengths()), lambda: out.append(copy.deepcopy(c).attend(q)),
                         lambda: ops.save_caches([c], path), lambda: out.extend(ops.load_caches(path)[0].dequantize())):
                run(step)
            return [t.clone() for t in out + [c.attend(q), *c.dequantize()]]

        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "caches")
            for options in ({}, {"recipe": "balanced"}):
                want = history(under(None), options)
                for mode in ("grad", "functionalize", "vmap", FakeTensorMode, lambda: FakeTensorMode(allow_non_fake_inputs=True), Fails):
                    for got, expected in zip(history(under(mode), options), want):
                        self.assertTrue(torch.equal(got, expected), mode)

    def test_files_of_caches(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "caches.kivi")
            caches = [new_cache(), new_cache(k_bits=4)]
            caches[1].append(randn(2, 2, 70, 16), randn(2, 2, 70, 16, seed=1))
            ops.save_caches(caches, path)
            loaded = ops.load_caches(path)
            self.assertEqual([c.length() for c in loaded], [0, 70])
            for a, b in zip(loaded[1].dequantize(), caches[1].dequantize()):
                self.assertTrue(torch.equal(a, b))

            # Compiled code keeps the call although it has no result.
            @torch.jit.script
            def save_and_go_on(cache: torch.classes.kivi.KVCache, path: str) -> int:
                torch.ops.kivi.save_caches([cache], path)
                cache.truncate(5)
                torch.ops.kivi.load_caches(path)
                return torch.ops.kivi.load_caches(path)[0].length() + cache.length()

            for expected in (75, 10, 10, 10):
                self.assertEqual(save_and_go_on(caches[1], path), expected)
            with open(path, "r+b") as file:
                file.truncate(100)
            with self.assertRaisesRegex(ValueError, "damaged"):
                ops.load_caches(path)
            with self.assertRaisesRegex(RuntimeError, "No such file"):
                ops.load_caches(path + ".missing")

    def test_threads_share_a_cache(self):
        c = new_cache(residual_length=1000)
        x = randn(1, 2, 1, 16)

        def work():
            for _ in range(100):
                c.append(x, x)
                self.assertEqual(c.attend(randn(1, 2, 1, 16)).shape, (1, 2, 1, 16))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(c.length(), 400)

    def test_scripted_module(self):
        class Layer(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.cache = new_cache()

            def forward(self, q, k, v):
                out = self.cache.forward(q, k, v, window=20)
                return out, self.cache.length()

        eager, scripted = Layer(), torch.jit.script(Layer())
        for i, tokens in enumerate([30, 1, 1, 5, 1]):
            q, k, v = (randn(1, h, tokens, 16, seed=10 * i + h) for h in (4, 2, 2))
            want, n = eager(q, k, v)
            got, m = scripted(q, k, v)
            self.assertTrue(torch.equal(got, want))
            self.assertEqual(n, m)
            if i == 2:
                file = io.BytesIO()
                torch.jit.save(scripted, file)
                file.seek(0)
                scripted = torch.jit.load(file)

    def test_options_of_a_calibration(self):
        file = json.loads("""{"version": 1, "budget": 3.0, "mean_bits": 2.875, "layers": [
            {"layer": 0, "num_kv_heads": 2, "head_dim": 32, "options": {"value_head_dim": 32, "k_bits": 4, "group_size": 16,
             "residual_length": 8, "scale_dtype": "float8", "k_search": [0.98], "v_search": [], "v_group_size": 32,
             "v_symmetric": true, "k_classes": []}},
            {"layer": 1, "num_kv_heads": 2, "head_dim": 32, "options": {"group_size": 16, "residual_length": 8,
             "k_classes": [16, 8, 16, 2]}}]}""")

        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.caches = [torch.classes.kivi.KVCache(layer["num_kv_heads"], layer["head_dim"], **layer["options"])
                               for layer in file["layers"]]

            def forward(self, q, k, v):
                for cache in self.caches:
                    q = cache.forward(q, k, v)
                return q, [cache.bits_per_element() for cache in self.caches]

        q, k, v = (randn(1, h, 50, 32, seed=h) for h in (4, 2, 2))
        want, bits = Model()(q, k, v)
        got, scripted_bits = torch.jit.script(Model())(q, k, v)
        self.assertTrue(torch.equal(got, want))
        self.assertEqual(bits, scripted_bits)
        self.assertNotEqual(bits[0], bits[1])


class Operators(unittest.TestCase):
    def samples(self):
        x = randn(4, 50)
        codes, scale, zero = ops.quantize(x, 1, 3, 16)
        k, v, q = randn(2, 2, 30, 16), randn(2, 2, 30, 16, seed=1), randn(2, 4, 3, 16, seed=2)
        new = (randn(2, 2, 3, 16, seed=3), randn(2, 2, 3, 16, seed=4))
        return {
            "quantize": [((x, 1), {}), ((x.t(), 0, 3, 16), {}), ((randn(2, 3, 40, dtype=torch.bfloat16), -1, 8), {})],
            "dequantize": [((codes, scale, zero, 1, 3, 16, 50), {}),
                           ((codes, scale, zero, -1, 3, 16, 50), {"dtype": torch.float16})],
            "fake_quantize": [((x, 0), {}), ((x.t(), 1, 4, 7), {})],
            "cache_append": [((*tensors(), k, v, FORMAT), {}),
                             ((*filled(), k, v, FORMAT), {"new_lengths": torch.tensor([30, 11])}),
                             ((*filled(), k * 1e7, v, FORMAT), {"overflow": torch.zeros(1, dtype=torch.int32)})],
            "cache_attention": [((q, *filled(), FORMAT), {}),
                                ((q, *filled(), FORMAT, *new), {"attn_mask": randn(3, 63), "softcap": 5.0}),
                                ((q, *filled(), FORMAT, *new, torch.tensor([3, 1])), {
                                    "sinks": torch.zeros(4), "alibi_slopes": torch.ones(2, 4), "window": 9,
                                    "precision": "exact", "scale": 0.2, "is_causal": False})],
            "cache_dequantize": [((*filled(), FORMAT, 60), {})],
            "cache_truncate": [((*filled(), FORMAT, 30), {})],
            "cache_copy_pages": [((filled()[0], torch.tensor([0]), torch.tensor([2])), {})],
            "cache_widen": [((filled()[0], FORMAT), {})],
        }

    def test_opcheck_of_every_operator(self):
        samples = self.samples()
        registered = {s.name.split("::")[1] for s in torch._C._jit_get_all_schemas() if s.name.startswith("kivi::")}
        without_tensors = {"cache_format", "cache_page_bytes", "cache_window_capacity", "version", "cpu_capability", "save_caches",
                           "load_caches"}
        self.assertEqual(set(samples), registered - without_tensors)
        for name, calls in samples.items():
            for i, (args, kwargs) in enumerate(calls):
                with self.subTest(name=name, call=i):
                    torch.library.opcheck(getattr(ops, name).default, args, kwargs)

    def test_what_is_written_counts_as_changed(self):
        cache = filled()
        k = randn(2, 2, 20, 16, seed=3)
        weight = torch.ones_like(cache[6], requires_grad=True)
        loss = (cache[6] * weight).sum()  # needs the window of now for the gradient
        before = [t._version for t in cache]
        ops.cache_append(*cache, k, k, FORMAT)
        self.assertEqual([t._version > n for t, n in zip(cache, before)], [True, False] + [True] * 6)
        with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
            loss.backward()
        before = [t._version for t in cache]
        ops.cache_truncate(*cache, FORMAT, 30)
        self.assertEqual([t._version > n for t, n in zip(cache, before)], [False] * 2 + [True] * 2 + [False] * 2 + [True] * 2)
        before = cache[0]._version
        ops.cache_copy_pages(cache[0], torch.tensor([0]), torch.tensor([1]))
        self.assertGreater(cache[0]._version, before)

    def test_autocast(self):
        c, cache = new_cache(), filled()
        c.append(randn(2, 2, 60, 16), randn(2, 2, 60, 16, seed=1))
        q = randn(2, 4, 1, 16, seed=2)
        want = c.attend(q.bfloat16())
        with torch.autocast("cpu", torch.bfloat16):
            self.assertTrue(torch.equal(c.attend(q), want))
            self.assertTrue(torch.equal(c.attend_with_lse(q)[0], want))
            for dtype in (torch.complex64, torch.float64, torch.int64, torch.bool):
                x = torch.ones(2, 2, 3, 16, dtype=dtype)
                with self.assertRaisesRegex(TypeError, "k must be"):
                    ops.cache_append(*cache, x, x, FORMAT)
                with self.assertRaisesRegex(TypeError, "k must be"):
                    ops.cache_attention(randn(2, 4, 3, 16), *cache, FORMAT, x, x)
        self.assertEqual(cache[2].tolist(), [60, 60])

    def test_vmap(self):
        x = randn(3, 4, 40)
        for axis in (0, 1):
            codes, scale, zero = torch.vmap(lambda y: ops.quantize(y, axis, bits=3, group_size=16))(x)
            for mapped, whole in zip((codes, scale, zero), ops.quantize(x, axis + 1, bits=3, group_size=16)):
                self.assertTrue(torch.equal(mapped, whole))

    def test_compile_with_changing_lengths(self):
        compiles = []

        def backend(graph, inputs):
            compiles.append(graph)
            return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

        def attend(q, k, v):
            k = ops.fake_quantize(k, 2, bits=4, group_size=16)
            codes, scale, zero = ops.quantize(v, 3)
            v = ops.dequantize(codes, scale, zero, 3, 2, 32, v.size(3))
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)

        torch._dynamo.reset()
        compiled = torch.compile(attend, backend=backend, fullgraph=True, dynamic=None)
        for tokens in (33, 40, 64, 100, 7):
            q, k, v = (randn(1, 2, tokens, 32, seed=s) for s in (1, 2, 3))
            self.assertTrue(torch.equal(compiled(q, k, v), attend(q, k, v)))
        self.assertLessEqual(len(compiles), 2)
        turned = randn(1, 40, 2, 32, seed=4).transpose(1, 2)
        self.assertTrue(torch.equal(compiled(turned, turned, turned), attend(turned, turned, turned)))

    def test_compile_keeps_mutations(self):
        def step(k, v, q, *cache):
            ops.cache_append(*cache, k, v, FORMAT)
            ops.cache_append(*cache, k, v, FORMAT)
            out, _ = ops.cache_attention(q, *cache, FORMAT)
            return out * 2

        torch._dynamo.reset()
        compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=True)
        eager_cache, compiled_cache = tensors(pages=3), tensors(pages=3)
        for tokens in (5, 17, 30, 1, 8):
            k, v, q = (randn(2, h, tokens, 16, seed=tokens + h) for h in (2, 2, 4))
            want = step(k, v, q, *eager_cache)
            self.assertTrue(torch.equal(compiled(k, v, q, *compiled_cache), want))
            for a, b in zip(eager_cache, compiled_cache):
                self.assertTrue(torch.equal(a, b))
        self.assertEqual(compiled_cache[2].tolist(), [122, 122])


if __name__ == "__main__":
    torch.ops.load_library(sys.argv[1])
    FORMAT = list(ops.cache_format(2, 16, group_size=16, residual_length=8, sink_length=4))
    unittest.main(argv=[sys.argv[0]] + sys.argv[2:])
