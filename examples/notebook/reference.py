"""The KIVI notebook's own code, run in Python: the numbers that the C++ program must print too.

`quantize_grouped`, the seeds, the checks and the formulas are those of the notebook. The exercises 1 and 2, which the notebook
leaves to the reader, are answered with the same function. Writes `name value` lines:

    python reference.py [reference.txt]
"""
import math
import sys

import torch
import torch.nn.functional as F


def quantize_grouped(x, axis, bits=2, group=32):
    levels = (1 << bits) - 1
    x = x.float()
    dims = list(range(x.ndim))
    dims[0], dims[axis] = dims[axis], dims[0]
    xt = x.permute(*dims).contiguous()
    L = xt.shape[0]
    n_groups = (L + group - 1) // group
    pad = n_groups * group - L
    if pad:
        xt = torch.cat([xt, xt.new_zeros(pad, *xt.shape[1:])], dim=0)
    xt = xt.reshape(n_groups, group, *xt.shape[1:])
    x_min = xt.amin(dim=1, keepdim=True)
    x_max = xt.amax(dim=1, keepdim=True)
    scale = (x_max - x_min) / levels
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    q = torch.round((xt - x_min) / scale).clamp(0, levels)
    x_hat = x_min + q * scale
    x_hat = x_hat.reshape(n_groups * group, *x_hat.shape[2:])[:L]
    x_hat = x_hat.permute(*dims)
    return x_hat


def attn(Q, K, V):
    scores = (Q @ K.T) / math.sqrt(Q.shape[-1])
    return F.softmax(scores, dim=-1) @ V


def relative_error(reference, value):
    return ((reference - value).norm() / reference.norm()).item()


def fingerprint(x):
    """A sum over the bit patterns of a float32 tensor, weighted by position, modulo 2^64: equal tensors have equal ones."""
    bits = x.contiguous().view(-1).view(torch.int32).long()
    return (bits * (2 * torch.arange(bits.numel()) + 1)).sum().item()


def notebook():
    numbers = {}
    torch.manual_seed(0)
    T, D, GROUP = 1024, 128, 32
    K = torch.randn(T, D) * 0.5
    V = torch.randn(T, D) * 0.5
    for c in (3, 17, 40, 88):
        K[:, c] *= 5.0
    K_hat = {bits: quantize_grouped(K, axis=0, bits=bits, group=GROUP) for bits in (8, 4, 3, 2, 1)}
    V_hat = {bits: quantize_grouped(V, axis=1, bits=bits, group=GROUP) for bits in (8, 4, 3, 2, 1)}
    numbers["k_max"] = K.abs().max().item()
    numbers["v_max"] = V.abs().max().item()
    numbers["k_err_2bit"] = (K - K_hat[2]).abs().max().item()
    numbers["v_err_2bit"] = (V - V_hat[2]).abs().max().item()

    torch.manual_seed(1)
    Q = torch.randn(1, T, D)
    Y_ref = attn(Q, K, V)
    for bits in (8, 4, 3, 2, 1):
        numbers[f"attn_err_{bits}bit"] = relative_error(Y_ref, attn(Q, K_hat[bits], V_hat[bits]))
    bytes_fp16 = K.numel() * 2
    groups_per_k = (K.shape[0] + GROUP - 1) // GROUP
    bytes_2bit = int(K.numel() * 0.25) + 2 * 2 * groups_per_k * K.shape[1]
    numbers["compression_2bit"] = bytes_fp16 / bytes_2bit

    # Exercise 1: each side alone.
    for bits in (8, 4, 3, 2, 1):
        numbers[f"k_only_err_{bits}bit"] = relative_error(Y_ref, attn(Q, K_hat[bits], V))
        numbers[f"v_only_err_{bits}bit"] = relative_error(Y_ref, attn(Q, K, V_hat[bits]))

    # Exercise 2: the channels of K with the largest magnitude stay in fp16.
    order = K.abs().amax(dim=0).argsort(descending=True)
    for name, count in (("top1pct", math.ceil(0.01 * D)), ("top4", 4)):
        K_mixed = K_hat[2].clone()
        K_mixed[:, order[:count]] = K[:, order[:count]].half().float()
        numbers[f"{name}_channels"] = count
        numbers[f"{name}_k_only_err"] = relative_error(Y_ref, attn(Q, K_mixed, V))
        numbers[f"{name}_err"] = relative_error(Y_ref, attn(Q, K_mixed, V_hat[2]))

    prints = {"K": K, "V": V, "Q": Q}
    prints |= {f"K_hat_{bits}bit": x for bits, x in K_hat.items()} | {f"V_hat_{bits}bit": x for bits, x in V_hat.items()}
    return numbers, {f"fingerprint.{name}": fingerprint(x) for name, x in prints.items()}


def main():
    numbers, fingerprints = notebook()
    lines = [f"# The KIVI notebook's code in Python, torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}."]
    lines += [f"{name} {value:.9g}" for name, value in numbers.items()]
    lines += [f"{name} {value}" for name, value in fingerprints.items()]
    text = "\n".join(lines) + "\n"
    if len(sys.argv) > 1:
        with open(sys.argv[1], "w") as file:
            file.write(text)
    print(text, end="")


if __name__ == "__main__":
    main()
