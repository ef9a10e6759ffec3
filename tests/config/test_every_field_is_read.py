"""A key that nobody reads is a defect: each field of each section is used by code outside finetune/config/.

The source is followed by types: a name is a section when a parameter or attribute is annotated as one, or when it is
assigned from `config.<section>`. Only `<such a name>.<key>` counts as a use, not an attribute that happens to be
called the same. What merely shows a setting to a person (the report, the model card) does not count.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import finetune
from finetune.config import Config
from finetune.config.sections import RopeScaling, Section, Source

PACKAGE = Path(finetune.__file__).parent
SHOWS_ONLY = ("config", "report", "export/card.py")
SECTIONS: dict[str, type[Section]] = {name: field.annotation for name, field in Config.model_fields.items()}
TYPES: dict[str, type[Section]] = {"Config": Config, "Source": Source, "RopeScaling": RopeScaling} | {
    section.__name__: section for section in SECTIONS.values()
}


class Uses(ast.NodeVisitor):
    """Collects (section class, key) for each read of a section's field."""

    def __init__(self) -> None:
        self.found: set[tuple[str, str]] = set()
        self._scopes: list[dict[str, type[Section]]] = [{}]
        self._members: list[dict[str, type[Section]]] = [{}]

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        members = {
            item.target.id: kind
            for item in node.body
            if isinstance(item, ast.AnnAssign)
            and isinstance(item.target, ast.Name)
            and (kind := _annotated(item.annotation))
        }
        for method in node.body:
            if not isinstance(method, ast.FunctionDef):
                continue
            parameters = _parameters(method)
            for item in ast.walk(method):
                if isinstance(item, ast.Assign) and isinstance(item.value, ast.Name) and item.value.id in parameters:
                    members |= {
                        target.attr: parameters[item.value.id]
                        for target in item.targets
                        if isinstance(target, ast.Attribute) and _is_self(target.value)
                    }
        self._members.append(members)
        self.generic_visit(node)
        self._members.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._scopes.append(_parameters(node))
        self.generic_visit(node)
        self._scopes.pop()

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                for name, value in zip(target.elts, node.value.elts, strict=True):
                    self._bind(name, value)
            else:
                self._bind(target, node.value)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        section = self._kind(node.value)
        if section is not None and node.attr in section.model_fields and isinstance(node.ctx, ast.Load):
            self.found.add((section.__name__, node.attr))
        self.generic_visit(node)

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            kind = self._kind(value)
            if kind is None:
                self._scopes[-1].pop(target.id, None)
            else:
                self._scopes[-1][target.id] = kind

    def _kind(self, node: ast.expr) -> type[Section] | None:
        if isinstance(node, ast.Name):
            known = next((scope[node.id] for scope in reversed(self._scopes) if node.id in scope), None)
            return Source if known is None and node.id == "entry" else known  # one of `config.entries(sources)`
        if isinstance(node, ast.Attribute) and _is_self(node.value):
            return self._members[-1].get(node.attr)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("fitted", "job"):
            return Config if node.attr == "config" else None  # of forecast.fit.Fitted and training.job.TrainingJob
        if isinstance(node, ast.Attribute):
            return SECTIONS.get(node.attr) if self._kind(node.value) is Config else None
        if isinstance(node, ast.IfExp):
            return self._kind(node.body) or self._kind(node.orelse)
        return None


def _parameters(node: ast.FunctionDef) -> dict[str, type[Section]]:
    given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return {argument.arg: kind for argument in given if (kind := _annotated(argument.annotation))}


def _annotated(annotation: ast.expr | None) -> type[Section] | None:
    if isinstance(annotation, ast.BinOp):
        return _annotated(annotation.left) or _annotated(annotation.right)
    if isinstance(annotation, ast.Attribute):
        return TYPES.get(annotation.attr)
    return TYPES.get(annotation.id) if isinstance(annotation, ast.Name) else None


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def uses(sources: Iterator[str]) -> set[tuple[str, str]]:
    found: set[tuple[str, str]] = set()
    for source in sources:
        visitor = Uses()
        visitor.visit(ast.parse(source))
        found |= visitor.found
    return found


@pytest.fixture(scope="module")
def used() -> set[tuple[str, str]]:
    files = [path for path in PACKAGE.rglob("*.py") if not path.relative_to(PACKAGE).as_posix().startswith(SHOWS_ONLY)]
    assert len(files) > 10
    of_terminal = uses(iter([(PACKAGE / "report" / "terminal.py").read_text(encoding="utf-8")]))
    acted_on = {use for use in of_terminal if use[0] == "TrackingSection"}  # how often it prints a line
    return uses(path.read_text(encoding="utf-8") for path in files) | acted_on


@pytest.mark.slow
def test_each_section_and_key_is_read(used: set[tuple[str, str]]) -> None:
    keys = {(kind.__name__, key) for kind in (*SECTIONS.values(), Source, Config) for key in kind.model_fields}
    assert keys - used == set(), "no code acts on them"


def test_only_a_read_of_a_section_counts(subtests: pytest.Subtests) -> None:
    for source, found in [
        ("def f(config: Config):\n  t = config.training\n  return t.seed", {"Config.training", "TrainingSection.seed"}),
        ("class A:\n  def __init__(self, s: DataSection): self.s = s\n  def f(self): return self.s.eval",
         {"DataSection.eval"}),
        ("def f(section: ModelSection):\n  section = other()\n  return section.name", set()),
        ("def f(model, config: Config): return model.revision, config.modell.name, config.name", set()),
    ]:  # fmt: skip
        with subtests.test(source=source):
            assert {f"{section}.{key}" for section, key in uses(iter([source]))} == found
