"""torch.classes.kivi.KVCache on a CUDA device: the same calls as on the CPU, streams, graphs, a second device.

    build/release/python tests/cuda/device/cache_test.py build/release/lib/libkivi.so

Exits with 77 (skipped) where torch finds no CUDA device. KIVI_TEST_DEVICE=cpu runs what needs no CUDA on the CPU, to
try this file itself.
"""
import os
import sys
import unittest

import torch

DEVICE = torch.device(os.environ.get("KIVI_TEST_DEVICE", "cuda:0"))
CUDA = DEVICE.type == "cuda"
needs_cuda = unittest.skipUnless(CUDA, "KIVI_TEST_DEVICE is no CUDA device")
HEADS, DIM, RECIPES = 2, 64, ("", "compact", "balanced", "quality", "near-lossless")


def tokens(count, seed, batch=2, heads=HEADS, dtype=torch.half):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, heads, count, DIM, generator=generator).to(dtype)


def cache(**options):
    return torch.classes.kivi.KVCache(HEADS, DIM, **options)


def state_of(c):
    """Everything that a cache holds: header, integers, tensors on the CPU."""
    state, _ = c.__getstate__()
    return state


class Cache(unittest.TestCase):
    def same_state(self, a, b):
        (_, ints_a, tensors_a), (_, ints_b, tensors_b) = state_of(a), state_of(b)
        # Not the precision, nor the checksum that follows from all the rest.
        self.assertEqual(ints_a[:1] + ints_a[2:4] + ints_a[5:], ints_b[:1] + ints_b[2:4] + ints_b[5:])
        for x, y in zip(tensors_a, tensors_b):
            self.assertTrue(torch.equal(x.view(torch.uint8) if x.numel() else x, y.view(torch.uint8) if y.numel() else y))

    def test_holds_the_same_bits_as_on_the_cpu(self):
        for dtype in (torch.half, torch.bfloat16, torch.float):
            for bits in (1, 2, 3, 4, 8):
                with self.subTest(dtype=dtype, bits=bits):
                    here, there = cache(k_bits=bits, v_bits=bits), cache(k_bits=bits, v_bits=bits)
                    for step, count in enumerate((200, 1, 33, 70)):
                        k, v = tokens(count, step, dtype=dtype), tokens(count, 50 + step, dtype=dtype)
                        here.append(k, v)
                        there.append(k.to(DEVICE), v.to(DEVICE))
                    self.same_state(here, there)

    def test_recipes_attend_as_on_the_cpu(self):
        for recipe in RECIPES:
            for count in (1, 5):
                with self.subTest(recipe=recipe, queries=count):
                    here, there = cache(recipe=recipe, precision="exact"), cache(recipe=recipe)
                    k, v, q = tokens(700, 1), tokens(700, 2), tokens(count, 3, heads=4 * HEADS)
                    here.append(k, v)
                    there.append(k.to(DEVICE), v.to(DEVICE))
                    difference = (here.attend(q).float() - there.attend(q.to(DEVICE)).cpu().float()).abs().max().item()
                    self.assertLess(difference, 2e-3)

    def test_forward_step_by_step(self):
        here, there = cache(precision="exact"), cache()
        for step in range(80):
            count = 150 if step == 0 else 1
            q, k, v = tokens(count, step, heads=4), tokens(count, 100 + step), tokens(count, 200 + step)
            a, b = here.forward(q, k, v), there.forward(q.to(DEVICE), k.to(DEVICE), v.to(DEVICE))
            self.assertLess((a.float() - b.cpu().float()).abs().max().item(), 2e-3)
        self.same_state(here, there)

    def test_rows_and_truncation(self):
        here, there = cache(), cache()
        k, v, lengths = tokens(300, 1), tokens(300, 2), torch.tensor([300, 211])
        here.append(k, v, lengths=lengths)
        there.append(k.to(DEVICE), v.to(DEVICE), lengths=lengths.to(DEVICE))
        for c in (here, there):
            c.select(torch.tensor([1, 0, 1]))
            c.truncate(250)
            c.repeat_interleave(2)
        for c, device in ((here, "cpu"), (there, DEVICE)):
            c.append(tokens(40, 3, batch=6).to(device), tokens(40, 4, batch=6).to(device))
        self.same_state(here, there)

    def test_moves_between_devices(self):
        for recipe in RECIPES:
            here = cache(recipe=recipe)
            here.append(tokens(500, 1), tokens(500, 2))
            there = here.to(DEVICE)
            self.same_state(here, there)
            self.same_state(here, there.to(torch.device("cpu")))
            there.append(tokens(64, 3).to(DEVICE), tokens(64, 4).to(DEVICE))
            here.append(tokens(64, 3), tokens(64, 4))
            self.same_state(here, there)

    def test_errors_name_the_devices(self):
        if not CUDA:
            return
        c = cache()
        c.append(tokens(10, 1).to(DEVICE), tokens(10, 2).to(DEVICE))
        with self.assertRaisesRegex(RuntimeError, "cpu.*cuda"):
            c.append(tokens(1, 1), tokens(1, 2))

    @needs_cuda
    def test_a_delayed_producer_on_a_side_stream(self):
        k, v = tokens(400, 1).to(DEVICE), tokens(400, 2).to(DEVICE)
        want = cache()
        want.append(k, v)
        side, c = torch.cuda.Stream(), cache()
        late_k, late_v = torch.zeros_like(k), torch.zeros_like(v)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(200_000_000)
            late_k.copy_(k)
            late_v.copy_(v)
            c.append(late_k, late_v)
        side.synchronize()
        self.same_state(c, want)

    @needs_cuda
    def test_a_graph_is_replayed_across_flushes(self):
        """One captured step of forward, replayed 100 times, does what 100 calls do."""
        for recipe in RECIPES:
            with self.subTest(recipe=recipe):
                eager, graphed = cache(recipe=recipe), cache(recipe=recipe)
                for c in (eager, graphed):
                    c.forward(tokens(300, 1, heads=4).to(DEVICE), tokens(300, 2).to(DEVICE), tokens(300, 3).to(DEVICE))
                graphed.reserve(600)
                q, k, v = (torch.zeros(2, h, 1, DIM, dtype=torch.half, device=DEVICE) for h in (4, HEADS, HEADS))
                warm = graphed.clone()  # what is captured must have run once: kernels are loaded then
                stream = torch.cuda.Stream()
                with torch.cuda.stream(stream):
                    warm.forward(q, k, v)
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    out = graphed.forward(q, k, v)
                for step in range(100):
                    q.copy_(tokens(1, 1000 + step, heads=4))
                    k.copy_(tokens(1, 2000 + step))
                    v.copy_(tokens(1, 3000 + step))
                    graph.replay()
                    self.assertTrue(torch.equal(out, eager.forward(q, k, v)), step)
                self.assertEqual(graphed.length(), 400)
                self.same_state(graphed, eager)

    @needs_cuda
    def test_a_second_device(self):
        if torch.cuda.device_count() < 2:
            self.skipTest("there is one CUDA device")
        c = cache()
        second = torch.device("cuda:1")
        c.append(tokens(300, 1).to(second), tokens(300, 2).to(second))
        self.assertEqual(c.attend(tokens(1, 3, heads=4).to(second)).device, second)
        self.same_state(c, c.to(DEVICE))


if __name__ == "__main__":
    if CUDA and not torch.cuda.is_available():
        print("skipped: torch finds no CUDA device")
        sys.exit(77)
    torch.ops.load_library(sys.argv.pop(1))
    unittest.main()
