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


def called(node: ast.AST) -> Iterator[str]:
    """The functions that are called in `node`, apart from those in the arguments of another call."""
    for each in ast.iter_child_nodes(node):
        if isinstance(each, ast.Call):
            yield ast.unparse(each.func)
        else:
            yield from called(each)


def stations(recipe: ast.Module, train: ast.FunctionDef) -> set[str]:
    """The functions of imported modules that `train` calls: neither classes, nor methods, nor builtins."""
    imports = [node for node in recipe.body if isinstance(node, ast.ImportFrom)]
    imported = {each.asname or each.name for node in imports for each in node.names}
    names = {name for statement in train.body for name in called(statement)}
    return {name for name in names if name.partition(".")[0] in imported and name.rpartition(".")[2].islower()}


def counts() -> list[tuple[object, object, str]]:
    """What a reader and a new feature go through, as the number now, its goal and what is counted."""
    trees = sources()
    text = {name: (ROOT / name).read_text(encoding="utf-8") for name in trees}
    words = Counter(re.findall(r"\w+", "\n".join(text.values())))
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    lengths = [(node.end_lineno or 0) - node.lineno + 1 for node in functions]
    chopped = [
        node
        for node, length in zip(functions, lengths, strict=True)
        if node.name.startswith("_") and length <= 8 and words[node.name] == 2
    ]
    with_config = [
        node
        for node in functions
        if any(each.annotation and ast.unparse(each.annotation) == "Config" for each in node.args.args)
    ]
    wide = [
        node
        for node in nodes
        if isinstance(node, ast.ClassDef)
        and any("dataclass" in ast.unparse(each) for each in node.decorator_list)
        and sum(isinstance(each, ast.AnnAssign) for each in node.body) > 10
    ]
    imports = re.compile(r"^ *from finetune[. ](?:import )?(\w+)", re.M)
    rooms = {name: name.split("/")[1].removesuffix(".py") for name in trees}
    ties = {frozenset((rooms[name], used)) for name in trees for used in imports.findall(text[name])}
    images = re.compile(r"^ *from finetune\b.*\b(images|image_memory|vision)\b", re.M)

    recipe = trees["finetune/recipe/__init__.py"]
    [train] = [node for node in recipe.body if isinstance(node, ast.FunctionDef) and node.name == "train"]

    def naming(pattern: str) -> int:
        return sum(bool(re.search(pattern, each, re.I)) for each in text.values())

    def lines(folder: str) -> int:
        return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in (ROOT / folder).rglob("*.py"))

    return [
        (naming(r"\.changed\("), 1, "files that derive a config from another"),
        (len(with_config), 60, "functions that take the whole config"),
        (naming("nvfp4"), 4, "files that name nvfp4"),
        (naming("deepspeed"), 4, "files that name DeepSpeed"),
        (sum(bool(images.search(each)) for each in text.values()), 15, "files that import what knows images"),
        (len(chopped), 120, "private functions of at most 8 lines called once"),
        (statistics.median(lengths), 9, "median length of functions"),
        (round(statistics.mean(lengths), 1), 13, "mean length of functions"),
        (len(wide), 0, "dataclasses of more than ten fields"),
        (
            len(re.findall(r"^[A-Z_0-9]+ = Patch\(", text["finetune/runtime/patches.py"], re.M)),
            45,
            "patches of libraries",
        ),
        (sum(each.count("noqa: SLF") for each in text.values()), 20, "noqa: SLF"),
        ((train.end_lineno or 0) - train.lineno + 1, 80, "lines of the recipe's train"),
        (len(stations(recipe, train)), 14, "stations of the recipe's train"),
        (sum(len(tie) == 2 and tie <= set(rooms.values()) for tie in ties), 110, "pairs of rooms tied"),
        (lines("finetune"), 50_000, "lines of the package"),
        (lines("tests"), 38_000, "lines of tests"),
        (lines("benchmarks"), 10_000, "lines of benchmarks"),
        (
            sum(len(page.read_text(encoding="utf-8").split()) for page in (ROOT / "docs").glob("*.md")),
            27_000,
            "words of docs",
        ),
    ]


if __name__ == "__main__":
    for number, goal, what in counts():
        print(f"{number!s:>8} {goal!s:>8}  {what}")
