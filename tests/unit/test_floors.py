"""The house: a module imports only from lower floors, and inside a floor only what is listed."""

from __future__ import annotations

import ast
from pathlib import Path

import prfaas

ROOT = Path(prfaas.__file__).parent

FLOOR = {
    "errors": 0,
    "core": 0,
    "spec": 1,
    "hashing": 1,
    "seams": 1,
    "cache": 2,
    "capacity": 2,
    "transfer": 2,
    "wire": 2,
    "policy": 2,
    "workload": 3,
    "traces": 3,
    "simulator": 3,
    "paper": 3,
    "store": 4,
    "transport": 4,
    "kernels": 4,
    "testing": 4,
    "runtime": 5,
    "integrations": 6,
    "cli": 6,
    "__main__": 6,
    "__init__": 6,
}
WITHIN = {
    ("core", "errors"),
    ("seams", "spec"),
    ("traces", "workload"),
    ("simulator", "workload"),
    ("__main__", "cli"),
}
"""Edges allowed inside one floor: (importer, imported)."""

PURE_FLOOR = 3
IMPURE = {
    "asyncio",
    "socket",
    "selectors",
    "threading",
    "time",
    "os",
    "io",
    "pathlib",
    "subprocess",
    "multiprocessing",
    "logging",
    "secrets",
    "ctypes",
    "mmap",
    "torch",
    "numpy",
    "transformers",
}


def modules() -> list[tuple[str, Path]]:
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found.append((parts[0], path))
    return found


def imports(path: Path) -> list[tuple[str, int]]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, (
                f"{path}:{node.lineno}: relative import; name the module in full"
            )
            found.append((node.module or "", node.lineno))
    return found


def test_every_module_has_a_floor() -> None:
    unknown = {room for room, _ in modules()} - set(FLOOR)
    assert not unknown, f"rooms without a floor: {sorted(unknown)}; add them to the table"
    empty = set(FLOOR) - {room for room, _ in modules()}
    assert not empty, f"the table names rooms that do not exist: {sorted(empty)}"


def test_imports_go_down_the_floors() -> None:
    offending = []
    for room, path in modules():
        for name, line in imports(path):
            if name == "prfaas":
                offending.append(f"{path}:{line}: imports the package face from within")
            if not name.startswith("prfaas."):
                continue
            other = name.split(".")[1]
            lower = FLOOR[other] < FLOOR[room]
            if other != room and not lower and (room, other) not in WITHIN:
                offending.append(
                    f"{path}:{line}: {room} (floor {FLOOR[room]}) imports {other} "
                    f"(floor {FLOOR[other]})"
                )
    assert not offending, "\n".join(offending)


def test_floors_0_to_3_are_pure() -> None:
    offending = [
        f"{path}:{line}: imports {name}"
        for room, path in modules()
        if FLOOR[room] <= PURE_FLOOR
        for name, line in imports(path)
        if name.split(".")[0] in IMPURE
    ]
    assert not offending, "\n".join(offending)


def test_the_listed_edges_are_used() -> None:
    used = {
        (room, name.split(".")[1])
        for room, path in modules()
        for name, _ in imports(path)
        if name.startswith("prfaas.")
    }
    assert used >= WITHIN, f"edges that nobody uses: {sorted(WITHIN - used)}; remove them"
