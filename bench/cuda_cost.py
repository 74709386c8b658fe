#!/usr/bin/env python3
"""What a step of the tensor-core attention kernels costs, read off the machine code: no GPU is needed.

    bench/cuda_cost.py [--all] [--kernel NAME] [--arch ARCH] [--dump] [--nvcc PATH] [--cuobjdump PATH]

Compiles a few kernels of csrc/cuda/attention_tensor_kernel.h for sm_90 and sm_80 with nvcc, disassembles them, counts
the instructions of the main loop (64 tokens of one kv head a warp) by class, and prints how many times the speed of the
memory each resource of the chip allows: H200 for sm_90, A100 for sm_80. Everything is assumed to overlap perfectly;
latencies, the parts' beginnings and ends, and what the memory really reaches are not in it. Exits with 1 where a kernel
spills registers or exceeds a limit below.

The main loop is the smallest that holds the unpacking of codes. Not counted: what a branch in it skips unless it copies
or multiplies, which is the rescaling (rare) and the care for keys that not all rows see.
"""
import argparse
import collections
import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TOKENS = 64  # of an iteration of the loop, tensor::kChunk

# Format, tiles of 8 query rows, the most instructions a token (a few per cent above what the kernels take), and the
# least multiple of the H200 memory's speed that issue slots, integer units and shared memory must each allow.
KERNELS = [
    ("Plain<128, 2, 2>", 1, 9.8, 1.6),
    ("Plain<128, 4, 4>", 1, 10.7, 2.0),
    ("Plain<128, 2, 2>", 2, 13.4, 1.3),
    ("Plain<64, 2, 2>", 1, 6.5, 1.4),
    ("Balanced<128>", 1, 11.0, 1.35),
    ("Quality<128>", 1, 15.3, 1.05),
]
MORE_KERNELS = [
    ("Plain<128, 4, 2>", 1, 10.3, 1.9),
    ("Plain<128, 2, 4>", 1, 10.3, 1.9),
    ("Plain<128, 4, 4>", 2, 14.1, 1.9),
    ("Plain<64, 4, 4>", 1, 6.8, 1.8),
    ("Plain<64, 2, 2>", 2, 9.0, 1.05),
    ("Plain<128, 2, 2, 64>", 1, 9.8, 1.4),
    ("Plain<128, 2, 2, 128>", 1, 9.8, 1.3),
    ("Plain<96, 2, 2>", 1, 8.6, 1.3),
    ("Plain<256, 2, 2>", 1, 18.0, 1.6),
    ("Balanced<64>", 1, 7.0, 1.1),
    ("Quality<64>", 1, 9.9, 0.9),
    ("NearLossless<128>", 1, 10.7, 1.6),
]

# Device: multiprocessors, GHz, TB/s.
DEVICES = {"sm_90": ("H200", 132, 1.755, 4.8), "sm_80": ("A100", 108, 1.41, 2.04)}

# Cycles that a warp instruction holds a pipe of one of the four parts of a multiprocessor (throughput table of the CUDA
# programming guide; mma.sync reaches about 62 % of what wgmma does on Hopper).
PIPES = {"alu": 2.0, "fma": 1.0, "imad": 2.0, "half": 1.0, "xu": 8.0, "tensor": 6.4, "lsu": 1.0, "uniform": 1.0,
         "control": 1.0}
# The first match of the opcode's first word wins.
CLASSES = [
    ("HMMA", "HMMA", "tensor"), ("LDSM", "LDSM", "lsu"), ("LDGSTS", "LDGSTS", "lsu"),
    ("DEPBAR", "LDGDEPBAR|DEPBAR", "control"), ("LDS", "LDS", "lsu"), ("STS", "STS", "lsu"), ("LDG", "LDG|LD", "lsu"),
    ("STG", "STG|ST", "lsu"), ("SHFL", "SHFL", "lsu"), ("LDC", "LDC|ULDC", "lsu"), ("F2FP", "F2FP", "alu"),
    ("MUFU", "MUFU", "xu"), ("HMUL2", "HMUL2", "half"), ("HFMA2", "HFMA2|HADD2", "half"), ("FFMA", "FFMA", "fma"),
    ("FMUL", "FMUL", "fma"), ("FADD", "FADD", "fma"), ("FMNMX", "FMNMX", "alu"), ("FSETP", "FSETP|FSET", "alu"),
    ("LOP3", "LOP3|PLOP3", "alu"), ("SHF", "SHF|SHL|SHR", "alu"), ("PRMT", "PRMT", "alu"),
    ("IADD", "IADD3|IADD|VIADD", "alu"), ("LEA", "LEA", "alu"), ("IMAD", "IMAD", "imad"), ("ISETP", "ISETP", "alu"),
    ("SEL", "SEL|FSEL|IMNMX|VIMNMX", "alu"), ("VOTE", "VOTE", "alu"), ("MOV", "MOV|CS2R|S2R", "alu"),
    ("uniform", "U[A-Z].*|R2UR", "uniform"), ("sync", "WARPSYNC|BSSY|BSYNC|BREAK|BAR|NOP", "control"),
    ("BRA", "BRA|EXIT|JMP|CALL|RET", "control"),
]
UNPACK = re.compile(r"0x(30003|c000c|300030|c000c0|f000f|f000f0|40004|80008|100010|200020|400040|800080|1000100|"
                    r"2000200)\b")


def find_tool(name, given):
    """The tool in PATH, else that of the triton package in a torch which this project has installed."""
    found = given or shutil.which(name)
    if not found:
        pattern = "~/.cache/kivi/torch-*/lib/python3.*/site-packages/triton/backends/nvidia/bin/" + name
        found = next(iter(sorted(glob.glob(os.path.expanduser(pattern)))), None)
    if not found:
        sys.exit(f"cuda_cost: {name} not found: in PATH, or beside torch's triton; name it with --{name}")
    return found


def compile_kernel(nvcc, folder, arch, kernel, tiles):
    """The cubin, and what ptxas says of registers and spills."""
    source = os.path.join(folder, "kernel.cu")
    with open(source, "w") as file:
        file.write('#include "cuda/attention_tensor_configs.h"\nnamespace kivi::cuda::tensor {\n'
                   f"template __global__ void tensor_parts_kernel<{kernel}, {tiles}, false>"
                   "(const KIVI_GRID_CONSTANT TensorArguments);\n"
                   f"__device__ int64_t kivi_cost[] = {{SharedSizes<{kernel}, {tiles}>::kBytes, "
                   f"{kernel}::kRecordBytes, {kernel}::kG, {kernel}::kStage}};\n}}\n")
    cubin = os.path.join(folder, "kernel.cubin")
    command = [nvcc, "-std=c++17", "-O3", "--expt-relaxed-constexpr", f"-I{ROOT}/csrc", f"-I{ROOT}/include",
               f"-arch={arch}", "-Xptxas", "-v", "-cubin", source, "-o", cubin]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(done.stderr)
    text = done.stderr + done.stdout
    registers = int(re.search(r"Used (\d+) registers", text).group(1))
    spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill", text))
    return cubin, registers, spills


def read_constants(cubin):
    """The four numbers that compile_kernel put into the cubin's data."""
    section = subprocess.run(["readelf", "-x", ".nv.global.init", cubin], capture_output=True, text=True,
                             check=True).stdout
    data = b"".join(bytes.fromhex("".join(line[13:48].split())) for line in section.splitlines()
                    if line.startswith("  0x"))
    return [int.from_bytes(data[8 * i:8 * i + 8], "little") for i in range(4)]


def disassemble(cuobjdump, cubin):
    """[(address, predicate, opcode, operands)]"""
    text = subprocess.run([cuobjdump, "-sass", cubin], capture_output=True, text=True, check=True).stdout
    code = []
    for line in text.splitlines():
        m = re.match(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)(.*?);", line)
        if m:
            code.append((int(m.group(1), 16), m.group(2) or "", m.group(3), m.group(4).strip()))
    return code


def classify(opcode):
    base = opcode.split(".")[0]
    for name, pattern, pipe in CLASSES:
        if re.fullmatch(pattern, base):
            return name, pipe
    return base, "alu"


def target(operands):
    m = re.search(r"0x([0-9a-f]+)\s*$", operands)
    return int(m.group(1), 16) if m else None


def main_loop(code):
    """The loop's instructions, and the addresses of those that are rarely reached."""
    unpacks = [x[0] for x in code if x[2].startswith("LOP3") and UNPACK.search(x[3])]
    loops = []
    for at, _, opcode, operands in code:
        to = target(operands) if opcode.split(".")[0] == "BRA" else None
        if to is not None and to < at:
            loops.append((to, at, sum(to <= u <= at for u in unpacks)))
    most = max(n for _, _, n in loops)
    begin, end, _ = min((x for x in loops if x[2] >= 0.9 * most), key=lambda x: x[1] - x[0])
    body = [x for x in code if begin <= x[0] <= end]
    rare = set()
    for at, predicate, opcode, operands in body:
        to = target(operands) if opcode.split(".")[0] == "BRA" else None
        if to is None or not at < to <= end or not (predicate or " P" in " " + operands):
            continue
        inside = [x for x in body if at < x[0] < to]
        if not any(x[2].startswith(("HMMA", "LDGSTS")) for x in inside):
            rare.update(x[0] for x in inside)
    return body, rare


def shared_wavefronts(opcode, operands):
    """Shared memory returns one register a lane and clock. Free of bank conflicts."""
    base = opcode.split(".")[0]
    if base == "LDSM":
        return int(opcode.split(".")[-1]) if opcode.split(".")[-1] in "124" else 4
    if base in ("LDS", "STS", "LDGSTS") and not operands.startswith("RZ"):
        return 4 if ".128" in opcode else 2 if ".64" in opcode else 1
    return 0


def report(arch, kernel, tiles, limits, registers, spills, constants, code, dump):
    """Prints a kernel's figures. Whether it keeps within its limits."""
    shared, record_bytes, group, stage = constants
    device, sms, ghz, tbs = DEVICES[arch]
    bytes_per_token = record_bytes / group
    body, rare = main_loop(code)
    hot = [x for x in body if x[0] not in rare]
    if dump:
        for x in body:
            print(f"{x[0]:#06x} {'rare' if x[0] in rare else '    '} {x[1]:5} {x[2]} {x[3]}")
    count, pipes, waves = collections.Counter(), collections.Counter(), 0
    for _, _, opcode, operands in hot:
        name, pipe = classify(opcode)
        count[name] += 1
        pipes[pipe] += PIPES[pipe]
        waves += shared_wavefronts(opcode, operands)
    total = sum(count.values())
    memory = bytes_per_token * TOKENS / (tbs * 1e3)  # ns
    per_part = 4 * sms * ghz
    bounds = {
        "issue": total / per_part,
        "alu": pipes["alu"] / per_part,
        "fma": (pipes["fma"] + pipes["half"] + pipes["imad"]) / per_part,
        "tensor": pipes["tensor"] / per_part,
        "xu": pipes["xu"] / per_part,
        "shared": waves / (sms * ghz),
    }
    of_registers = 65536 // (128 * ((registers + 7) // 8 * 8))
    blocks = min(of_registers, (228 if arch == "sm_90" else 164) * 1024 // (shared + 1024))
    limit, least = limits
    slowest = min(memory / bounds[name] for name in ("issue", "alu", "shared"))
    faults = []
    if spills > 0:
        faults.append("spills")
    if total / TOKENS > limit:
        faults.append(f"more than {limit} instructions")
    if arch == "sm_90" and slowest < least:
        faults.append(f"allows less than {least} times the memory's speed")
    print(f"{kernel}, {8 * tiles} rows, {arch}: {total / TOKENS:.2f} instructions a token and kv head (limit {limit}), "
          f"{total} for {TOKENS} tokens and {len(body) - len(hot)} rare ones; {registers} registers, {spills} bytes "
          f"spilled, {shared} bytes of shared memory, {blocks} blocks, {blocks * 4 * stage / 1000:.0f} kB in flight"
          + "".join(f"  <-- {fault}" for fault in faults))
    print(f"  {bytes_per_token:g} bytes a token; times the memory's speed ({device}, {tbs} TB/s): " +
          ", ".join(f"{name} {memory / t:.2f}" for name, t in sorted(bounds.items(), key=lambda x: -x[1])))
    print("  " + ", ".join(f"{name} {n}" for name, n in count.most_common()))
    return not faults


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="more formats")
    parser.add_argument("--kernel", default="", help="only kernels whose name holds this")
    parser.add_argument("--arch", default="", help="only sm_90 or sm_80")
    parser.add_argument("--dump", action="store_true", help="also the loop's instructions")
    parser.add_argument("--nvcc")
    parser.add_argument("--cuobjdump")
    options = parser.parse_args()
    nvcc, cuobjdump = find_tool("nvcc", options.nvcc), find_tool("cuobjdump", options.cuobjdump)
    ok = True
    with tempfile.TemporaryDirectory() as folder:
        for kernel, tiles, limit, least in KERNELS + (MORE_KERNELS if options.all else []):
            for arch in DEVICES:
                if options.kernel not in kernel or options.arch not in arch:
                    continue
                cubin, registers, spills = compile_kernel(nvcc, folder, arch, kernel, tiles)
                ok &= report(arch, kernel, tiles, (limit, least), registers, spills, read_constants(cubin),
                             disassemble(cuobjdump, cubin), options.dump)
    sys.exit(0 if ok else 1)


main()
