"""Nothing of a library is replaced outside the registry of patches; `make house` counts what a reader goes through."""

from __future__ import annotations

import ast
import re
import statistics
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = {"sys.stderr", "sys.stdin", "sys.stdout", "torch.backends.cudnn.benchmark"}
"""Assignments to a module of a library that are no patches: the way in which a setting is made."""


def sources(root: Path = ROOT) -> dict[str, ast.Module]:
    """The syntax trees of the package by path."""
    files = sorted((root / "finetune").rglob("*.py"))
    return {str(file.relative_to(root)): ast.parse(file.read_text(encoding="utf-8")) for file in files}


def stored(node: ast.AST) -> Iterator[ast.Attribute]:
    """The attributes that a statement assigns or deletes."""
    if isinstance(node, ast.Assign | ast.Delete | ast.AugAssign | ast.AnnAssign):
        for each in ast.walk(node):
            if isinstance(each, ast.Attribute) and not isinstance(each.ctx, ast.Load):
                yield each


def unlisted_patches(tree: ast.Module) -> list[int]:
    """The lines that replace an attribute of a library's module or class, or do it in another way."""
    foreign = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            foreign |= {each.asname or each.name.partition(".")[0] for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith("finetune"):
            foreign |= {each.asname or each.name for each in node.names}

    def replaces(owner: ast.expr) -> bool:
        while isinstance(owner, ast.Attribute):
            owner = owner.value
        return isinstance(owner, ast.Name) and owner.id in foreign

    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            implements = any(isinstance(each, ast.Constant) and each.value == "IMPL" for each in node.args)
            patched = (
                (called in {"setattr", "delattr"} and replaces(node.args[0]))
                or (called.rpartition(".")[2] == "Library" and implements)  # a kernel of another library's operator
                or called.rpartition(".")[2] == "replaced"
                or called.startswith("mock.")
            )
        else:
            patched = any(
                target.attr in {"forward", "__class__"}
                or (isinstance(target.value, ast.Call) and ast.unparse(target.value.func) == "type")
                or (replaces(target.value) and ast.unparse(target) not in SETTINGS)
                for target in stored(node)
            )
        if patched:
            found.append(node.lineno)
    return found


@pytest.mark.slow
def test_no_attribute_of_a_library_is_replaced_outside_the_registry() -> None:
    found = {name: unlisted_patches(tree) for name, tree in sources().items() if name != "finetune/runtime/patches.py"}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "line",
    ["functional.linear = work", "torch.nn.Module.forward = work", "x.__class__ = Job", "x, type(x).y = 1, 2",
     'setattr(functional, "relu", work)', 'torch.library.Library("aten", "IMPL", "CPU")'],
)  # fmt: skip
def test_an_unlisted_patch_is_seen(line: str) -> None:
    imports = "import sys, torch\nfrom torch.nn import functional\nfrom finetune.runtime import patches\n"
    passed = "sys.stdout = x\npatches.USED.put(work)\npatches.y = 1\nx.data = torch.y\n"
    assert unlisted_patches(ast.parse(imports + passed + line)) == [8]


def test_every_file_with_tests_is_collected() -> None:
    files = {path for path in Path(__file__).parent.rglob("*.py") if re.search(r"(?m)^def test_", path.read_text())}
    assert {path.name for path in files if not path.name.startswith("test_")} == {"interpreted.py"}  # a process runs it


def counts() -> dict[str, object]:
    """What a new feature has to go through: files and concepts, not lines."""
    trees = sources()
    text = {name: (ROOT / name).read_text(encoding="utf-8") for name in trees}
    words = Counter(re.findall(r"\w+", "\n".join(text.values())))
    functions = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    lengths = [(node.end_lineno or 0) - node.lineno + 1 for node in functions]
    rooms = {name: name.split("/")[1].removesuffix(".py") for name in trees}
    ties = {
        frozenset((rooms[name], used))
        for name in trees
        for used in re.findall(r"^ *from finetune[. ](?:import )?(\w+)", text[name], re.M)
        if used in rooms.values() and used != rooms[name]
    }
    return {
        "files that derive a config from another": sum(".changed(" in each for each in text.values()),
        "functions that take the whole config": sum(
            any(each.annotation and ast.unparse(each.annotation) == "Config" for each in node.args.args)
            for node in functions
        ),
        "files that name nvfp4": sum("nvfp4" in each.lower() for each in text.values()),
        "files that name DeepSpeed": sum("deepspeed" in each.lower() for each in text.values()),
        "private functions of at most 8 lines called once": sum(
            node.name.startswith("_") and length <= 8 and words[node.name] == 2
            for node, length in zip(functions, lengths, strict=True)
        ),
        "functions, median and mean length": (statistics.median(lengths), round(statistics.mean(lengths), 1)),
        "patches of libraries": len(re.findall(r"^[A-Z_]+ = Patch\(", text["finetune/runtime/patches.py"], re.M)),
        "noqa: SLF": sum(each.count("noqa: SLF") for each in text.values()),
        "pairs of rooms tied": len(ties),
    }


if __name__ == "__main__":
    print(*(f"{number!s:>12}  {name}" for name, number in counts().items()), sep="\n")
