"""kivi_calibrate on a random capture, its file in a scripted module, and what it must refuse.

    python calibrate_test.py path/to/kivi_calibrate path/to/libkivi.so
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

try:
    import torch
except ImportError:
    print("skipped: this Python has no torch")
    sys.exit(77)


def calibrate(*arguments):
    return subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


class Calibrate(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = Path(tempfile.mkdtemp())
        cls.capture = cls.folder / "capture.pt"
        torch.manual_seed(0)
        cls.tensors = {}
        for layer, width in ((0, 1), (2, 30), (10, 3)):  # wider keys of some channels: layers that differ
            k = torch.randn(1, 2, 256, 32)
            k[..., ::4] *= width
            cls.tensors |= {f"l{layer}.q": torch.randn(1, 4, 256, 32), f"l{layer}.k": k, f"l{layer}.v": torch.randn(1, 2, 256, 32)}
        torch.save(cls.tensors | {"l0.out_step": torch.ones(3)}, cls.capture)

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.folder)

    def test_choice_file_and_picture(self):
        out, png = self.folder / "calibrated.json", self.folder / "picture.png"
        plot = ["--plot", png] if shutil.which("gnuplot") else []
        done = calibrate("--capture", self.capture, "--candidates", "K8V8,K4V4,K2V2,balanced", "--budget", "3.75", "--out", out, *plot)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertTrue(not plot or png.read_bytes().startswith(b"\x89PNG"))
        file = json.loads(out.read_text())
        self.assertEqual([layer["layer"] for layer in file["layers"]], [0, 2, 10])
        self.assertEqual([f.name for f in self.folder.glob("*.partial*")], [])
        total = 0
        for layer in file["layers"]:
            cache = torch.classes.kivi.KVCache(layer["num_kv_heads"], layer["head_dim"], **layer["options"])
            self.assertEqual(cache.bits_per_element(), layer["chosen"]["bits"])
            self.assertIn(layer["chosen"], layer["candidates"])
            self.assertIn(f"{layer['layer']:<10}  {layer['chosen']['name']}", done.stdout)
            total += layer["chosen"]["bits"] / len(file["layers"])
        self.assertAlmostEqual(total, file["mean_bits"])
        self.assertLessEqual(total, 3.75)

    def test_refused_with_one_sentence(self):
        torch.save({"l0.q": torch.ones(1, 2, 8, 16)}, self.folder / "part.pt")
        torch.save([1], self.folder / "list.pt")
        torch.save({"x": torch.ones(1)}, self.folder / "other.pt")
        torch.save({k: v[:, :, :20] for k, v in self.tensors.items()}, self.folder / "short.pt")
        (self.folder / "bad.pt").write_bytes(b"no capture")
        good = ["--capture", self.capture]
        for arguments, words in (
            (["--bogus"], ["--bogus"]),
            (["--budget"], ["--budget needs a value"]),
            (["--budget", "two"], ["--budget", "'two'"]),
            (["--budget", "nan"], ["--budget", "'nan'"]),
            (["--budget", "-1"], ["--budget", "'-1'"]),
            (["--tokens=1"], ["--tokens", "'1'"]),
            (["--model", "/no/such.pt"], ["/no/such.pt"]),
            ([*good, "--model", "x.pt"], ["--capture", "--model"]),
            ([*good, "--candidates", "K5V2"], ["--candidates", "'K5V2'"]),
            ([*good, "--candidates", "K4V2+fast"], ["--candidates", "'+fast'"]),
            ([*good, "--candidates", "best"], ["recipe", '"best"', "balanced"]),
            ([*good, "--group-size", "48"], ["group_size", "48"]),
            ([*good, "--residual", "300"], ["256 tokens", "residual_length 300"]),
            ([*good, "--budget", "1", "--candidates", "K2V2,K4V4"], ["budget", "at least 3 bits", "got 1"]),
            ([*good, "--out", self.folder / "none" / "a.json"], ["--out", "no folder", "none"]),
            ([*good, "--plot", self.folder / "none" / "a.png"], ["--plot", "no folder", "none"]),
            ([*good, "--out", self.folder], ["cannot write", str(self.folder)]),
            (["--capture", self.folder / "none.pt"], ["--capture", "none.pt"]),
            (["--capture", self.folder], ["--capture", str(self.folder)]),
            (["--capture", self.folder / "bad.pt"], ["--capture", "bad.pt"]),
            (["--capture", self.folder / "list.pt"], ["--capture", "list.pt"]),
            (["--capture", self.folder / "other.pt"], ["--capture", "other.pt", "l0.q"]),
            (["--capture", self.folder / "part.pt"], ["--capture", "part.pt", "l0.k"]),
            (["--capture", self.folder / "short.pt"], ["20 tokens", "quantises none"]),
        ):
            with self.subTest(arguments=arguments):
                done = calibrate(*arguments)
                self.assertEqual(done.returncode, 2, done.stdout + done.stderr)
                # A slow machine tells its progress first.
                said = [line for line in done.stderr.splitlines() if not line.startswith("  ")]
                self.assertEqual(len(said), 1, done.stderr)
                self.assertTrue(said[0].startswith("kivi_calibrate: "), said)
                for word in words:
                    self.assertIn(word, said[0])

    def test_help(self):
        done = calibrate("--help")
        self.assertEqual(done.returncode, 0)
        self.assertIn("--budget BITS", done.stdout)


if __name__ == "__main__":
    PROGRAM = sys.argv[1]
    torch.ops.load_library(sys.argv[2])
    unittest.main(argv=[sys.argv[0]] + sys.argv[3:])
