"""Writes real queries, keys and values of SmolLM2-135M for exercise 3 of the notebook.

    python capture.py --kivi-library LIBKIVI.so --model smollm2.pt --output capture.pt

The model is the TorchScript file that examples/smollm2/export.py writes; it also carries the tokeniser and the text. Any other model
will do as well: the notebook reads a dict of tensors, saved with torch.save, with these keys for each captured layer i:

    l<i>.q [1, Hq, T, D]  l<i>.k, l<i>.v [1, Hkv, T, D]   float16, after RoPE: the prompt
    l<i>.q_step, l<i>.k_step, l<i>.v_step                 the same of the next token, T = 1
    l<i>.out_step [1, Hq, 1, D]                           float32: exact attention of q_step over the T + 1 tokens
"""
import argparse
import re
import struct

import torch
import torch.nn.functional as F


class Tokenizer:
    """Byte-level BPE from the tokenizer.bin of the exported model (its layout is described in examples/smollm2/tokenizer.h)."""

    def __init__(self, data):
        if data[:8] != b"KIVITOK1":
            raise SystemExit("capture.py: the model's tokenizer.bin is not of the kind that export.py writes")
        (count,), at = struct.unpack_from("<I", data, 8), 12
        self.byte_token = {}
        for number in range(count):
            special, size = struct.unpack_from("<BH", data, at)
            at += 3 + size
            if size == 1 and not special:
                self.byte_token[data[at - 1]] = number
        (count,) = struct.unpack_from("<I", data, at)
        self.merges = {}
        for rank, (left, right, result) in enumerate(struct.iter_unpack("<III", data[at + 4 : at + 4 + 12 * count])):
            self.merges[left, right] = rank, result

    def encode(self, text):
        """Tokens of ASCII text: single digits first, then the pattern of GPT-2 inside the pieces between them."""
        word = re.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+")
        pieces = re.findall(r"[0-9]|[^0-9]+", text)
        return [token for piece in pieces for w in word.findall(piece) for token in self.merge(w)]

    def merge(self, word):
        tokens = [self.byte_token[b] for b in word.encode("ascii")]
        while True:
            best = min((self.merges[p] + (i,) for i, p in enumerate(zip(tokens, tokens[1:])) if p in self.merges), default=None)
            if best is None:
                return tokens
            tokens[best[2] : best[2] + 2] = [best[1]]


def run_layer(layer, x, cos, sin, lanes):
    """One decoder layer: its output and the post-RoPE q, k, v of these tokens."""
    heads, kv_heads = layer.num_heads, layer.num_kv_heads
    y = F.linear(F.rms_norm(x, [x.size(2)], layer.attention_norm, layer.epsilon), layer.qkv)
    y = y.view(1, x.size(1), heads + 2 * kv_heads, layer.head_dim)
    first, second = y[:, :, : heads + kv_heads].chunk(2, -1)
    qk = y[:, :, : heads + kv_heads] * cos + torch.cat([-second, first], -1) * sin
    q, k = qk[:, :, :heads].transpose(1, 2), qk[:, :, heads:].transpose(1, 2)
    return layer(x, cos, sin, lanes, False), q, k, y[:, :, heads + kv_heads :].transpose(1, 2)


def capture(model, ids, chosen):
    """The dict described at the top, from all but the last of the ids as the prompt and the last as the step."""
    tensors, lanes = {}, [-1]  # lane -1 is the plain float32 cache
    model.clear_caches()
    for suffix, begin, end in (("", 0, len(ids) - 1), ("_step", len(ids) - 1, len(ids))):
        x = F.embedding(torch.tensor([ids[begin:end]]), model.embedding)
        for i, layer in enumerate(model.layers.children()):
            x, q, k, v = run_layer(layer, x, model.cos[begin:end], model.sin[begin:end], lanes)
            if i in chosen:
                for name, tensor in (("q", q), ("k", k), ("v", v)):
                    tensors[f"l{i}.{name}{suffix}"] = tensor.half().contiguous()
    for i in chosen:
        k, v = (torch.cat([tensors[f"l{i}.{n}"], tensors[f"l{i}.{n}_step"]], 2).float() for n in "kv")
        tensors[f"l{i}.out_step"] = F.scaled_dot_product_attention(tensors[f"l{i}.q_step"].float(), k, v, enable_gqa=True)
    return tensors


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kivi-library", required=True, help="path of libkivi.so; the model's layers hold kivi caches")
    parser.add_argument("--model", required=True, help="the file that examples/smollm2/export.py writes")
    parser.add_argument("--output", required=True, help="the capture to write")
    parser.add_argument("--tokens", type=int, default=640, help="length of the prompt (default %(default)s)")
    arguments = parser.parse_args()

    torch.ops.load_library(arguments.kivi_library)
    files = {"tokenizer.bin": "", "eval.txt": ""}
    model = torch.jit.load(arguments.model, _extra_files=files)
    text = files["eval.txt"] if isinstance(files["eval.txt"], bytes) else files["eval.txt"].encode()
    ids = Tokenizer(files["tokenizer.bin"]).encode(text[: 16 * arguments.tokens].decode("ascii", "ignore"))
    if len(ids) <= arguments.tokens:
        raise SystemExit(f"capture.py: the model's text has {len(ids)} tokens, {arguments.tokens + 1} are needed")
    count = len(list(model.layers.children()))
    with torch.no_grad():
        tensors = capture(model, ids[: arguments.tokens + 1], (0, (count - 1) // 2, count - 1))
    torch.save(tensors, arguments.output)
    print(f"wrote {arguments.output}: {len(tensors)} tensors of layers 0, {(count - 1) // 2} and {count - 1}")


if __name__ == "__main__":
    main()
