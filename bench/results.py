"""The JSON that the benchmark programs wrote, looked up by what a row is, not by its spelling."""

import json
import re
from pathlib import Path
from typing import Dict, List, Optional

PROGRAMS = ("kernel_bench", "encode_bench", "cache_bench")


class Results:
    """Rows of all programs of one run. A row that was not run, or a counter that a row lacks, is None."""

    def __init__(self, folder: Path) -> None:
        self.rows: Dict[str, Dict[str, dict]] = {}
        self.context: Dict[str, dict] = {}
        for program in PROGRAMS:
            path = folder / f"{program}.json"
            if not path.exists():
                continue
            data = json.loads(path.read_text())
            self.context[program] = data["context"]
            rows = self.rows.setdefault(program, {})
            for row in data["benchmarks"]:
                if row.get("run_type") == "aggregate":
                    continue
                rows[re.sub(r"/(manual_time|repeats:\d+)", "", row["run_name"])] = row

    def errors(self) -> List[str]:
        return [f"{name}: {row.get('error_message', '')}" for rows in self.rows.values()
                for name, row in rows.items() if row.get("error_occurred")]

    def count(self, program: str) -> int:
        return len(self.rows.get(program, {}))

    def get(self, program: str, name: str, counter: str) -> Optional[float]:
        row = self.rows.get(program, {}).get(name)
        return None if row is None or row.get("error_occurred") else row.get(counter)

    def machine(self, key: str) -> str:
        return next((c[key] for c in self.context.values() if key in c), "?")

    def isas(self) -> List[str]:
        names = (re.search(r"/isa:(\w+)/", name) for name in self.rows.get("kernel_bench", {}))
        return list(dict.fromkeys(m.group(1) for m in names if m))

    def kernel(self, isa: str, counter: str, shape: str = "K2V2/tokens:16384/heads:32x8", path: str = "fast",
               threads: int = 1) -> Optional[float]:
        return self.get("kernel_bench", f"decode/{shape}/isa:{isa}/path:{path}/threads:{threads}", counter)

    def decode(self, what: str, tokens: int, threads: int, counter: str) -> Optional[float]:
        """`what` is K2V2/fast, all_exact/fast, or a baseline: matmul_f32, sdpa_f32, sdpa_bf16."""
        kind, _, path = what.partition("/")
        path = f"/path:{path}" if path else ""
        return self.get("cache_bench", f"decode/{kind}/tokens:{tokens}/heads:32x8{path}/threads:{threads}", counter)

    def storage(self, what: str, threads: int, counter: str, dtype: str) -> Optional[float]:
        return self.get("cache_bench", f"{what}/tokens:4096/type:{dtype}/threads:{threads}", counter)


def ratio(a: Optional[float], b: Optional[float]) -> Optional[float]:
    return None if a is None or not b else a / b
