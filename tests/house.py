"""Counts what is agreed about the source: `make house` prints the counts, and every violation with its place.

`python tests/house.py [ROOT]`. The limits are in `test_house.py`. All of it is read from the syntax trees; nothing is
imported.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

SHARDING = re.compile(r"shard|fsdp|dtensor", re.IGNORECASE)
DEEPSPEED = re.compile(r"deepspeed|^_?(fake_?)?zero$", re.IGNORECASE)

SETTINGS = {
    "sys.stderr": "the command line's own stream",
    "sys.stdin": "the command line's own stream",
    "sys.stdout": "the command line's own stream",
    "torch.backends.cudnn.benchmark": "a documented switch, restored after use",
}
"""Assignments to a library's module that are not patches, but the way a setting of it is made."""

OF_LIBRARIES = {
    "argtypes": "ctypes: how a foreign function is declared",
    "restype": "ctypes: how a foreign function is declared",
    "CharacterDataHandler": "pyexpat: how a parser is given its handlers",
    "EndElementHandler": "pyexpat: how a parser is given its handlers",
    "StartDoctypeDeclHandler": "pyexpat: how a parser is given its handlers",
    "StartElementHandler": "pyexpat: how a parser is given its handlers",
    "__annotations__": "of every function",
    "__kwdefaults__": "of every function",
    "__signature__": "of every function; inspect reads it",
    "disabled": "logging.Logger",
    "file": "rich.Console",
    "bias": "torch.nn.Linear",
    "data": "torch.Tensor",
    "grad": "torch.Tensor",
    "weight": "torch.nn.Linear",
    "param_groups": "torch.optim.Optimizer",
    "state": "torch.optim.Optimizer",
    "SCB": "bitsandbytes.nn.Int8Params",
    "bnb_quantized": "bitsandbytes.nn.Params4bit",
    "quant_state": "bitsandbytes.nn.Params4bit and Linear4bit",
    "quant_storage": "bitsandbytes.nn.Params4bit",
    "quant_type": "bitsandbytes.nn.Params4bit",
    "base_model_prefix": "transformers: WeightConverter",
    "operations": "transformers: WeightConverter",
    "scope_prefix": "transformers: WeightConverter",
    "packing": "of ours, on packed parameters, as bitsandbytes keeps `quant_state`",
    "chat_template": "transformers: tokenizer",
    "encode_special_tokens": "tokenizers.Tokenizer",
    "pad_token": "transformers: tokenizer",
    "padding_side": "transformers: tokenizer",
    "architectures": "transformers: config",
    "dtype": "transformers: config",
    "eos_token_id": "transformers: generation config",
    "id2label": "transformers: config",
    "label2id": "transformers: config",
    "max_position_embeddings": "transformers: config",
    "num_hidden_layers": "transformers: config",
    "output_router_logits": "transformers: config",
    "pad_token_id": "transformers: config",
    "task_type": "peft: LoraConfig",
    "query_pre_attn_scalar": "transformers: config of Gemma",
    "rescale_every": "transformers: config of RWKV",
    "rope_parameters": "transformers: config",
    "tie_word_embeddings": "transformers: config",
    "use_cache": "transformers: config",
    "vocab_size": "transformers: config",
    "_weight_conversions": "transformers: model, as loading leaves it",
    "gradient_checkpointing": "transformers: layer",
    "hf_device_map": "transformers: model, as loading leaves it",
    "hf_quantizer": "transformers: model, as loading leaves it",
    "keys": "transformers: layer of a KV cache",
    "layer_idx": "transformers: attention module",
    "recurrent_states": "transformers: RecurrentGemma",
    "rope_deltas": "transformers: model of images",
    "rotary_emb": "transformers: model",
    "source_cls": "transformers: module that its quantizer reads",
    "values": "transformers: layer of a KV cache",
    "cast_input_dtype_enabled": "peft: layer of an adapter",
    "inference_mode": "peft.LoraConfig",
    "init_lora_weights": "peft.LoraConfig",
    "lora_alpha": "peft.LoraConfig",
    "lora_dropout": "peft.LoraConfig",
    "r": "peft.LoraConfig",
    "rank_pattern": "peft.LoraConfig",
    "target_modules": "peft.LoraConfig",
    "target_parameters": "peft.LoraConfig",
    "lora_adapters": "xllamacpp",
    "n_ctx": "xllamacpp",
    "n_parallel": "xllamacpp",
    "n_threads": "xllamacpp",
    "path": "xllamacpp",
    "port": "xllamacpp",
    "scale": "xllamacpp",
    "swa_full": "xllamacpp",
    "use_jinja": "xllamacpp",
    "verbosity": "xllamacpp",
    "warmup": "xllamacpp",
}
"""Attributes that are set on objects of libraries because the library declares them, and whose."""

CALLED_BY_LIBRARIES = {
    "_process_model_after_weight_loading": "transformers: HfQuantizer",
    "_process_model_before_weight_loading": "transformers: HfQuantizer",
    "_repr_html_": "IPython",
    "_repr_png_": "IPython",
    "call_binop": "jinja2: sandboxed environment",
    "get_load_operations": "transformers: HfQuantizer",
    "get_quantize_ops": "transformers: HfQuantizer",
    "is_serializable": "transformers: HfQuantizer",
    "on_finalized_text": "transformers: TextStreamer",
    "readinto": "io.RawIOBase",
    "validate_environment": "transformers: HfQuantizer",
}
"""Functions that the package defines for a library to call, and which."""

FOREIGN_NAMES = frozenset(
    {
        "base",
        "config",
        "error",
        "head",
        "layer",
        "model",
        "module",
        "optimizer",
        "output",
        "parameter",
        "tensor",
        "weight",
    }
)
"""Names of variables that stand for objects of libraries, whatever attributes classes of ours have."""


@dataclass(frozen=True)
class Source:
    """One file of the package."""

    path: Path
    name: str  # of the module, `finetune.data.rows`

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text(encoding="utf-8"))

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def lines(self) -> list[str]:
        return self.path.read_text(encoding="utf-8").splitlines()

    @cached_property
    def imports(self) -> dict[str, str]:
        """What each imported name stands for, wherever in the file it is imported."""
        names = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for one in node.names:
                    names[one.asname or one.name.partition(".")[0]] = one.name if one.asname else one.name.split(".")[0]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
        return names

    @cached_property
    def identifiers(self) -> set[str]:
        """Names of variables, attributes, functions, classes, arguments and imports, but no words in strings."""
        found = set()
        for node in self.nodes:
            for key in ("id", "attr", "name", "arg", "asname", "module"):
                if isinstance(value := getattr(node, key, None), str):
                    found |= set(value.split("."))
        return found


class House:
    """The package under `root`, and what is counted of it."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        self.sources = [
            Source(path, ".".join(path.relative_to(root).with_suffix("").parts))
            for path in sorted((root / "finetune").rglob("*.py"))
        ]
        self._modules = {source.name.removesuffix(".__init__"): source for source in self.sources}

    # -- names -----------------------------------------------------------------------------------------------------

    def types_twice(self) -> list[str]:
        """Names that several classes or aliases of types have, but for an underscore in front."""
        places = defaultdict(list)
        for source in self.sources:
            for node in source.nodes:
                if isinstance(node, ast.ClassDef):
                    places[node.name.lstrip("_")].append(self._place(source, node))
            for node in source.tree.body:
                for name in _names_bound(node):
                    if re.match("_?[A-Z]+[a-z]", name):
                        places[name.lstrip("_")].append(self._place(source, node))
        return [f"{name}: {', '.join(at)}" for name, at in sorted(places.items()) if len(at) > 1]

    def modules_twice(self) -> list[str]:
        """Names that several modules or packages have."""
        places = defaultdict(list)
        for name in self._modules:
            places[name.rpartition(".")[2].lstrip("_")].append(name)
        return [f"{name}: {', '.join(at)}" for name, at in sorted(places.items()) if len(at) > 1]

    def unused_functions(self) -> list[str]:
        """Functions and classes whose name occurs in their definition alone; decorated ones are used by decorators."""
        words = Counter(word for source in self.sources for line in source.lines for word in re.findall(r"\w+", line))
        return [
            f"{self._place(source, node)}: {node.name}"
            for source in self.sources
            for node in source.nodes
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
            and words[node.name] == 1
            and not node.decorator_list
            and not node.name.startswith("__")
            and node.name not in CALLED_BY_LIBRARIES
        ]

    # -- patches ---------------------------------------------------------------------------------------------------

    def unlisted_patches(self) -> list[str]:
        """Assignments to attributes of libraries, and other ways to replace something in them, outside the registry."""
        return [
            f"{self._place(source, node)}: {ast.unparse(node).splitlines()[0][:90]}"
            for source in self.sources
            if source.name != "finetune.runtime.patches"
            for node in source.nodes
            if self._replaces(source, node)
        ]

    def unused_patches(self) -> list[str]:
        """Entries of the registry that no code names."""
        used = {
            node.attr
            for source in self.sources
            for node in source.nodes
            if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("patches")
        }
        entries = [
            name
            for node in self._modules["finetune.runtime.patches"].tree.body
            if isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and ast.unparse(node.value.func) == "Patch"
            for name in _names_bound(node)
        ]
        return sorted(set(entries) - used)

    def _replaces(self, source: Source, node: ast.AST) -> bool:
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called.rpartition(".")[2] == "Library":  # kernels for operators of another library
                return any(isinstance(one, ast.Constant) and one.value == "IMPL" for one in node.args)
            if called in {"setattr", "delattr"}:
                return self._is_foreign(source, node.args[0])
            return called.rpartition(".")[2] == "replaced" or called.startswith("mock.")
        return any(
            target.attr in {"forward", "__class__"}
            or (isinstance(target.value, ast.Call) and ast.unparse(target.value.func) == "type")
            or (self._is_foreign(source, target.value) and ast.unparse(target) not in SETTINGS)
            for target in _stored(node)
        )

    def _is_foreign(self, source: Source, owner: ast.expr) -> bool:
        """Whether `owner` is a module or class that was imported from a library, or an attribute of one."""
        while isinstance(owner, ast.Attribute):
            owner = owner.value
        return isinstance(owner, ast.Name) and not source.imports.get(owner.id, "finetune.").startswith("finetune")

    # -- attributes ------------------------------------------------------------------------------------------------

    def hung_attributes(self) -> list[str]:
        """Attributes set on objects whose class does not declare them, as far as names tell.

        Declared is what a class of this file, or one of an imported module of the package, has in its body, its bases
        or its methods (`self.x = ...`), and what OF_LIBRARIES lists; of an object called by one of FOREIGN_NAMES, and
        where the type checker had to be silenced, only the latter. Not looked at: `self` and `cls` themselves, the
        `ctx` of an autograd function, what is assigned through the registry of patches, and computed names.
        """
        return [
            f"{self._place(source, node)}: {ast.unparse(owner)}.{name}"
            for source in self.sources
            for node in source.nodes
            for owner, name in _stores_on_others(node)
            if name not in OF_LIBRARIES
            and not self._is_foreign(source, owner)
            and (
                self._names_foreign(owner)
                or "attr-defined" in source.lines[node.lineno - 1]
                or name not in self._declared_near(source)
            )
        ]

    def _names_foreign(self, owner: ast.expr) -> bool:
        return ast.unparse(owner).rpartition(".")[2] in FOREIGN_NAMES

    @functools.cache  # noqa: B019 -- lives as long as the script
    def _declared_near(self, source: Source) -> set[str]:
        known = set(_declared(source.tree))
        for name in source.imports.values():
            module = name if name in self._modules else name.rpartition(".")[0]
            if module in self._modules:
                near = self._modules[module]
                known |= _declared(near.tree)
                for further in near.imports.values():  # for bases and for the classes of fields
                    if (owner := self._modules.get(further.rpartition(".")[0])) is not None:
                        known |= _declared(owner.tree, further.rpartition(".")[2])
        return known

    def unknown_in_table(self) -> list[str]:
        """Entries of OF_LIBRARIES, SETTINGS and CALLED_BY_LIBRARIES that nothing needs any more."""
        stored = {name for source in self.sources for node in source.nodes for owner, name in _stores_on_others(node)}
        settings = {ast.unparse(target) for source in self.sources for node in source.nodes for target in _stored(node)}
        defined = {node.name for source in self.sources for node in source.nodes if isinstance(node, ast.FunctionDef)}
        return sorted(
            (OF_LIBRARIES.keys() - stored) | (SETTINGS.keys() - settings) | (CALLED_BY_LIBRARIES.keys() - defined)
        )

    # -- who knows what --------------------------------------------------------------------------------------------

    def imported_by(self, module: str) -> list[str]:
        """The modules of the package that `module` imports."""
        source = self._modules[module]
        names = (name if name in self._modules else name.rpartition(".")[0] for name in source.imports.values())
        return sorted({name for name in names if name in self._modules})

    def files_that_know(self, words: re.Pattern[str]) -> list[str]:
        """Files with identifiers that have one of `words`; the config's tables and rules, which name all, left out."""
        return [
            source.name
            for source in self.sources
            if not source.name.startswith("finetune.config.") and any(map(words.search, source.identifiers))
        ]

    def sections_as_whole(self) -> list[str]:
        """Parameters that are the whole config where one section of it, or one property, is all that is read.

        Passing the config on, comparing it or calling one of its methods takes the whole.
        """
        return [
            f"{self._place(source, node)}: {node.name} reads {parameter.arg}.{''.join(read) or '-'}"
            for source in self.sources
            for node in source.nodes
            if isinstance(node, ast.FunctionDef)
            for parameter in (*node.args.args, *node.args.kwonlyargs)
            if parameter.annotation and ast.unparse(parameter.annotation).split(" | ")[0] == "Config"
            if (read := _attributes_read(node, parameter.arg)) is not None and len(read) <= 1
        ]

    def folders_without_contract(self) -> list[str]:
        """Packages of more than one module that are the container of no contract of import-linter."""
        settings = tomllib.loads((self.root / "pyproject.toml").read_text(encoding="utf-8"))
        contracts = settings["tool"]["importlinter"]["contracts"]
        contained = {container for contract in contracts for container in contract.get("containers", ())}
        modules = Counter(name.rpartition(".")[0] for name in self._modules if "." in name)
        return sorted(name for name, number in modules.items() if number > 1 and name not in contained)

    # -- all -------------------------------------------------------------------------------------------------------

    @cached_property
    def violations(self) -> dict[str, list[str]]:
        """Every list of which the length is counted."""
        return {
            "names of types that exist twice": self.types_twice(),
            "module names that exist twice": self.modules_twice(),
            "functions that nothing calls": self.unused_functions(),
            "unlisted patches": self.unlisted_patches(),
            "patches that nothing uses": self.unused_patches(),
            "attributes hung on foreign objects": self.hung_attributes(),
            "entries of the lists here that nothing needs": self.unknown_in_table(),
            "folders without a contract of imports": self.folders_without_contract(),
            "whole configs where a section would do": self.sections_as_whole(),
            "internal imports of training/run.py": self.imported_by("finetune.training.run"),
            "files that know sharding": self.files_that_know(SHARDING),
            "files that know DeepSpeed": self.files_that_know(DEEPSPEED),
        }

    @cached_property
    def counts(self) -> dict[str, int]:
        """The length of each list, and the sizes."""
        return {
            **{name: len(violations) for name, violations in self.violations.items()},
        }

    def _place(self, source: Source, node: ast.AST) -> str:
        return f"{source.path.relative_to(self.root)}:{getattr(node, 'lineno', 1)}"


def _names_bound(node: ast.AST) -> list[str]:
    """The variables that an assignment binds."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _stored(node: ast.AST) -> Iterator[ast.Attribute]:
    """The attributes that a statement assigns to or deletes."""
    if isinstance(node, ast.Assign | ast.Delete):
        targets = list(node.targets)
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        targets = [node.target]
    else:
        return
    while targets:
        target = targets.pop()
        if isinstance(target, ast.Tuple | ast.List):
            targets += target.elts
        elif isinstance(target, ast.Attribute):
            yield target


def _stores_on_others(node: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """Owners other than `self`, `cls` and `ctx` that a statement or `setattr` gives an attribute, and its name."""
    stores = [(target.value, target.attr) for target in _stored(node)]
    if isinstance(node, ast.Call) and ast.unparse(node.func) in {"setattr", "object.__setattr__"}:
        owner, name = node.args[:2]
        if isinstance(name, ast.Constant):
            stores.append((owner, name.value))
    for owner, name in stores:
        if not (isinstance(owner, ast.Name) and owner.id in {"self", "cls", "ctx"}):
            yield owner, name


def _attributes_read(function: ast.FunctionDef, name: str) -> set[str] | None:
    """The attributes of the variable `name` that `function` reads; None if it uses the object itself."""
    nodes = [node for statement in function.body for node in ast.walk(statement)]
    called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    owners = {id(node.value): node.attr for node in nodes if isinstance(node, ast.Attribute) and id(node) not in called}
    uses = [id(node) for node in nodes if isinstance(node, ast.Name) and node.id == name]
    return {owners[use] for use in uses} if owners.keys() >= {*uses} else None


@functools.cache
def _declared(tree: ast.Module, only: str = "") -> set[str]:
    """The attributes that the classes of a module (or the one called `only`) declare."""
    names = set()
    for scope in ast.walk(tree):
        if not isinstance(scope, ast.ClassDef) or (only and scope.name != only):
            continue
        for node in ast.walk(scope):
            if isinstance(node, ast.AnnAssign):
                names |= set(_names_bound(node))
            elif isinstance(node, ast.FunctionDef):
                names.add(node.name)
            for target in _stored(node):
                if isinstance(target.value, ast.Name) and target.value.id == "self":
                    names.add(target.attr)
        for node in scope.body:
            names |= set(_names_bound(node))
    return names


def main() -> None:
    """Print the violations of each kind, then the counts as JSON."""
    house = House(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
    for name, violations in house.violations.items():
        print(f"\n{name}: {len(violations)}", *violations, sep="\n  ")
    print("\n" + json.dumps(house.counts, indent=2))


if __name__ == "__main__":
    main()
