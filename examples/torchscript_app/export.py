"""Writes a TorchScript module that holds a quantised KV cache.

    python export.py LIBKIVI.so OUT.pt

The module is an attention layer with its projections. It holds a torch.classes.kivi.KVCache and calls torch.ops.kivi; any program
that has loaded the library can run it. author.cpp writes the same module without Python.
"""
import sys

import torch

HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 4, 2, 32, 128


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    torch.ops.load_library(sys.argv[1])  # before the first mention of torch.classes.kivi

    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.weight = torch.nn.Parameter(torch.randn(HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM) / HIDDEN**0.5)
            # 2 bits in groups of 32; the first 4 tokens and the newest 32 to 63 stay exact.
            self.cache = torch.classes.kivi.KVCache(KV_HEADS, HEAD_DIM, residual_length=32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.matmul(x, self.weight).view(x.size(0), x.size(1), 8, 32).transpose(1, 2)
            o = self.cache.forward(y[:, 0:4], y[:, 4:6], y[:, 6:8])
            return o.transpose(1, 2).flatten(2)

        @torch.jit.export
        def length(self) -> int:
            return self.cache.length()

        @torch.jit.export
        def quantized_length(self) -> int:
            return self.cache.quantized_length()

        @torch.jit.export
        def key_error(self, x: torch.Tensor, bits: int) -> torch.Tensor:
            """The largest error of these tokens' keys at `bits` bits, per channel along groups of 32 tokens."""
            k = torch.matmul(x, self.weight).view(x.size(0), x.size(1), 8, 32).transpose(1, 2)[:, 4:6]
            return (k - torch.ops.kivi.fake_quantize(k, 2, bits, 32)).abs().max()

    with torch.no_grad():
        torch.jit.script(Attention().requires_grad_(False).eval()).save(sys.argv[2])
    print(f"wrote {sys.argv[2]}")


if __name__ == "__main__":
    main()
