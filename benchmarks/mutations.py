"""Do the tests notice? Faults are put, one at a time, into what reads rows, the search for what a template leaves out,
the masks, the loss normaliser and the checkpoint protocol.

Each mutant changes one place of a function: a comparison, a number by one, `and` for `or`, a condition negated, a
statement or the bound of a slice left out, a value not returned. It is killed when a test fails, or runs on without an
end. What survives is either a missing test or changes nothing that matters; those of the second kind stand in
`mutations_accepted.json`, each with its reason.

One process imports everything and forks: for each test file, to run it once and note which test executes which line;
and from there for each mutant, to run the tests that execute its line, the fastest first. Of the checkpoint tests only
those that run in this process count, not the campaign of real kills in tests/faults; property tests try few examples.
"""

from __future__ import annotations

import ast
import functools
import gc
import importlib
import inspect
import json
import os
import random
import resource
import select
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # their threads do not outlive a fork

import harness
import pytest
from hypothesis import Phase, settings

ACCEPTED = Path(__file__).with_name("mutations_accepted.json")

AREAS: dict[str, tuple[dict[str, str], list[str]]] = {
    "rows": (
        {
            "finetune.data.splits": "of_files names_one chosen holds_out kind_of _matching _by_names _saved "
            "_described",
            "finetune.data.columnar": "rows _holds_values as_written",
        },
        ["data/test_splits.py", "data/test_containers.py", "data/test_sources.py", "data/test_lost_rows.py"],
    ),
    "outlines": (
        {
            "finetune.data.outline": "check _Placeholders.message _Placeholders.value _Placeholders.schema "
            "_Placeholders._add _Placeholders._text _Placeholders._key _Placeholders._id _outline _lost_names "
            "_lost_constant _rendered _lost_of_tools _named _shown _refuse_lost refusal thought_remedy _places _after "
            "_forms _search",
        },
        ["data/test_outlines.py", "data/test_thoughts.py"],
    ),
    "masks": (
        {
            "finetune.data.tokenizing": "answered _tokenized _runs",
            "finetune.data.chat": "heads is_empty trained_turns _encoding _segment _with_end _end _tokens",
            "finetune.data.encoded": "Encoded.trained Segment.trained Segment.cut",
            "finetune.data.masks": "answer_turns mask marks_generation "
            "rendering _by_marks _by_prefixes _turn_end _closed _wordless _words",
            "finetune.data.lengths": "_error _truncate _in_pieces",
        },
        ["data/test_lengths.py", "data/test_marks.py", "data/test_chat_masks.py", "data/test_known_templates.py",
         "data/test_formats.py", "data/test_control_tokens.py", "data/test_row_limits.py", "data/test_prepare.py",
         "data/test_thoughts.py", "data/test_broken_corpus.py", "data/test_mask_properties.py"],
    ),
    "normaliser": (
        {
            "finetune.data.batching": "RowOrder.__iter__ MicroBatching.of MicroBatching.capacity micro_batches",
            "finetune.data.encoded": "lengths_of segments_of",
            "finetune.training.collator": "StepCollator.__call__ StepCollator.micro_batch halved first_row "
            "_sequences",
            "finetune.training.oom_retry": "Limit.parts Limit.lower Retry.fitting_forward_backward Retry.update "
            "StepStart.restore UpdateStart.undo",
            "finetune.training.eval_loss": "summed_loss _sums EvalLoss.value EvalLoss.sums",
            "finetune.model.distributed.engine": "OneProcess.backward OneProcess._clip OneProcess.update",
            "finetune.training.step": "Step.forward_backward Step.micro_step Step.clip Step.update Step.rescale",
            "finetune.training.loop": "Loop.run Loop._epoch Loop.take_step Loop._after Loop.stopped_early Loop.is_over "
            "Loop._signalled Loop._evaluate_or_postpone Loop._evaluate Loop._until_a_signal Loop.evaluate_if_owed _due",
            "finetune.training.progress": "Progress.gains",
            "finetune.training.recorder": "StepCounts.of StepCounts.of_all_ranks StepNumbers.read",
            "finetune.objectives": "supervised",
            "finetune.objectives.objective": "sums trained_tokens with_balancing",
        },
        ["training/test_recorder.py", "training/test_progress.py", "training/test_oom_retry.py",
         "training/test_loop.py", "data/test_batching.py", "training/test_collator.py",
         "faults/test_loss_scaling.py", "training/test_evaluation.py",
         "training/test_parity.py", "runtime/test_memory_monitor.py", "faults/test_numbers_not_finite.py",
         "training/test_objectives.py", "faults/test_out_of_memory_in_a_step.py",
         "faults/test_out_of_memory_in_evaluation_and_merge.py", "training/test_steps.py"],
    ),
    "checkpoints": (
        {
            "finetune.storage.checkpoint": "Contents.bytes write _write _json "
            "_sha256 problems_of manifest_of _problems_of_file newest_valid set_aside prune _is_whole "
            "read_tensors",
            "finetune.storage.records": "read_bytes read read_lines check _message",
            "finetune.storage.weight_files": "not_finite is_finite",
            "finetune.storage.rundir": "RunDirectory.finished RunDirectory.saved_steps "
            "RunDirectory.complete_checkpoints RunDirectory.remove_leftovers RunDirectory.forget_metrics_after "
            "checkpoint_step",
            "finetune.storage.files": "staged publish _put_back dispose remove_leftovers _remove write_bytes "
            "append_line _fsync",
        },
        ["storage/test_checkpoint.py", "storage/test_rundir.py", "storage/test_records.py",
         "faults/test_checkpoints.py", "security/test_damaged_checkpoints.py",
         "extras/doctor/test_doctor.py"],
    ),
}  # fmt: skip
"""By area: the functions of each module, and the test files, the fastest first."""

ELSEWHERE = {"children", "job", "train_apart"}
"""Fixtures of tests whose subject runs in another process, where no mutant is."""
EXAMPLES = 8
"""Of a property test, for each mutant."""
CACHES: list[Any] = []
"""What of the data is kept in the process: emptied before each test, which else would not come to a mutant's line."""


# -- mutants -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mutant:
    """`function` with `code` for its own; `lines` are those of the statement that was changed."""

    function: FunctionType
    code: CodeType
    module: str
    name: str
    lines: range
    change: str


OTHERS: dict[type, list[type]] = {
    ast.Lt: [ast.LtE, ast.GtE], ast.LtE: [ast.Lt, ast.Gt], ast.Gt: [ast.GtE, ast.LtE], ast.GtE: [ast.Gt, ast.Lt],
    ast.Eq: [ast.NotEq], ast.NotEq: [ast.Eq], ast.In: [ast.NotIn], ast.NotIn: [ast.In], ast.Is: [ast.IsNot],
    ast.IsNot: [ast.Is], ast.And: [ast.Or], ast.Or: [ast.And], ast.Add: [ast.Sub], ast.Sub: [ast.Add],
    ast.Mult: [ast.FloorDiv], ast.FloorDiv: [ast.Mult], ast.Div: [ast.Mult], ast.BitAnd: [ast.BitOr],
    ast.BitOr: [ast.BitAnd],
}  # fmt: skip
CALLS = {"max": "min", "min": "max", "any": "all", "all": "any"}


def variants(node: ast.AST) -> Iterator[ast.AST]:
    """What may stand in the place of `node`."""
    match node:
        case ast.Compare(left, ops, comparators):
            for place, op in enumerate(ops):
                for other in OTHERS.get(type(op), []):
                    yield ast.Compare(left, [*ops[:place], other(), *ops[place + 1 :]], comparators)
        case ast.BoolOp(op, values):
            yield from (ast.BoolOp(other(), values) for other in OTHERS[type(op)])
        case ast.BinOp(left, op, right):
            yield from (ast.BinOp(left, other(), right) for other in OTHERS.get(type(op), []))
        case ast.UnaryOp(ast.Not(), operand):
            yield operand
        case ast.Constant(bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(int(value)):
            yield from (ast.Constant(value + 1), ast.Constant(value - 1))
        case ast.Call(ast.Name(name), arguments, keywords) if name in CALLS:
            yield ast.Call(ast.Name(CALLS[name], ast.Load()), arguments, keywords)
        case ast.Slice(lower, upper, step):
            if lower:
                yield ast.Slice(None, upper, step)
            if upper:
                yield ast.Slice(lower, None, step)
        case ast.If(test) | ast.While(test) | ast.IfExp(test) if not isinstance(test, ast.Compare):
            yield _with(node, test=ast.UnaryOp(ast.Not(), test))
        case ast.comprehension(ifs=[test]) if not isinstance(test, ast.Compare):
            yield _with(node, ifs=[ast.UnaryOp(ast.Not(), test)])
        case ast.Return(ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            yield ast.Return(ast.Constant(None))
        case ast.Expr(ast.Call()) | ast.AugAssign() | ast.Raise() | ast.Continue() | ast.Break():
            yield ast.Pass()
        case ast.Expr(ast.YieldFrom() | ast.Yield()):
            yield ast.Pass()


def _with(node: Any, **fields: Any) -> Any:
    return type(node)(**{**dict(ast.iter_fields(node)), **fields})


def changes(node: ast.AST, statement: ast.stmt) -> Iterator[tuple[ast.stmt, str]]:
    """Makes each change below `node` in turn and takes it back; the statement it is in, and what it is.

    Messages for people are not mutated.
    """
    for field, value in ast.iter_fields(node):
        for place, child in enumerate(value if isinstance(value, list) else [value]):
            if not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr) or field == "annotation":
                continue
            if isinstance(child, ast.keyword) and child.arg == "strict":  # which only asserts
                continue
            where = child if isinstance(child, ast.stmt) else statement

            def put(new: ast.AST, field: str = field, value: Any = value, place: int = place) -> None:
                if isinstance(value, list):
                    value[place] = new
                else:
                    setattr(node, field, new)

            for new in variants(child):
                put(new)
                yield where, f"{_text(child)} -> {_text(new)}"
            put(child)
            if not isinstance(child, ast.Raise):
                yield from changes(child, where)


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.Slice):
        node = ast.Subscript(ast.Name("…"), node)
    if isinstance(node, ast.If | ast.While):
        return f"{type(node).__name__.lower()} {ast.unparse(node.test)}"
    return " ".join(ast.unparse(node).split())


def mutants_of(module_name: str, names: list[str]) -> Iterator[Mutant]:
    """Every mutant of these functions; the functions keep their identity, so that no copy of a name escapes."""
    module = importlib.import_module(module_name)
    source = Path(str(module.__file__)).read_text(encoding="utf-8")
    tree = ast.parse(source)
    for name in names:
        node, function = _found(tree, name), _function(module, name)
        for body in node.body[1 if ast.get_docstring(node) is not None else 0 :]:
            holder = ast.Module([body], [])
            index = node.body.index(body)
            for statement, change in changes(holder, body):
                node.body[index] = holder.body[0]
                code = _code(compile(ast.fix_missing_locations(tree), str(module.__file__), "exec"), name)
                node.body[index] = body
                # `super()` may be gone with what was left out, and is then not looked for.
                code = code.replace(co_freevars=function.__code__.co_freevars)
                yield Mutant(function, code, module_name, name, _lines(statement), change)


def _found(tree: Any, name: str) -> Any:
    for part in name.split("."):
        tree = next(node for node in tree.body if getattr(node, "name", None) == part)
    return tree


def _function(module: Any, name: str) -> FunctionType:
    *holders, last = name.split(".")
    for part in holders:
        module = getattr(module, part)
    found = vars(module)[last]
    found = getattr(found, "fget", None) or getattr(found, "__func__", None) or found
    return inspect.unwrap(found)


def _code(code: CodeType, name: str) -> CodeType:
    """The code object of a function within that of its module."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    for constant in inner:
        if constant.co_qualname == name:
            return constant
    return _code(next(constant for constant in inner if name.startswith(constant.co_qualname + ".")), name)


def _lines(statement: Any) -> range:
    """Its lines, without those of a block below it."""
    below = [part.lineno for field in ("body", "handlers") for part in getattr(statement, field, [])]
    end = min(below, default=statement.end_lineno + 1)
    return range(statement.lineno, max(end, statement.lineno + 1))


# -- tests -------------------------------------------------------------------------------------------------------------


class Executed:
    """Which test executes which lines of the files; and how long it takes in seconds."""

    def __init__(self, files: set[str]) -> None:
        self.files = files
        self.lines: dict[Any, set[tuple[str, int]]] = defaultdict(set)
        self.seconds: dict[Any, float] = {}

    def run(self, item: Any) -> None:
        seen = self.lines[item]

        def line(frame: Any, event: str, _: Any) -> Any:
            seen.add((frame.f_code.co_filename, frame.f_lineno))
            return line

        def call(frame: Any, event: str, argument: Any) -> Any:
            return line(frame, event, argument) if frame.f_code.co_filename in self.files else None

        started = time.perf_counter()
        threading.settrace(call)
        sys.settrace(call)
        try:
            _run(item)
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]
        self.seconds[item] = time.perf_counter() - started

    def of(self, mutant: Mutant) -> list[Any]:
        """The tests of a mutant, the fastest first."""
        places = {(mutant.function.__code__.co_filename, line) for line in mutant.lines}
        return self.fastest_first(item for item in self.lines if self.lines[item] & places)

    def fastest_first(self, items: Iterable[Any]) -> list[Any]:
        return sorted(items, key=self.seconds.__getitem__)


def _run(item: Any) -> None:
    for cache in CACHES:
        cache.cache_clear()
    # The next one is always of this module: its fixtures, and those of the session, stay as they are.
    item.config.hook.pytest_runtest_protocol(item=item, nextitem=item.getparent(pytest.Module))


class Campaign:
    """A pytest plugin that runs the tests it finds once, and then those of each mutant in a fork of its own."""

    def __init__(self, mutants: dict[int, Mutant], outcomes: Path) -> None:
        self.mutants = mutants
        self.outcomes = outcomes
        self.failed: list[str] = []
        self.pipe: int | None = None

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(report.nodeid)
            if self.pipe is not None:  # in the fork of a mutant, which has no more to do
                print(report.longreprtext[-3000:], file=sys.stderr, flush=True)
                os.write(self.pipe, report.nodeid.encode())
                os._exit(1)

    def pytest_runtestloop(self, session: Any) -> bool:
        items = [item for item in session.items if not ELSEWHERE & set(item._fixtureinfo.argnames)]
        for item in items:
            if known := getattr(item.obj, "_hypothesis_internal_use_settings", None):
                item.obj._hypothesis_internal_use_settings = settings(
                    known, max_examples=min(EXAMPLES, known.max_examples)
                )
        executed = Executed({mutant.function.__code__.co_filename for mutant in self.mutants.values()})
        for item in items:
            executed.run(item)
        assert not self.failed, f"without a mutant: {self.failed}"
        # What does not pass a second time, in a fork and in the order of a mutant, though nothing was changed, proves
        # nothing.
        while (failed := self._forked(None, executed.fastest_first(executed.lines), executed))[0] != "survived":
            self._tell(left_out=failed[1])
            del executed.lines[next(item for item in executed.lines if item.nodeid == failed[1])]
        for number, mutant in self.mutants.items():
            if tests := executed.of(mutant):
                outcome, test = self._forked(mutant, tests, executed)
                self._tell(number=number, outcome=outcome, test=test)
        os._exit(0)

    def _tell(self, **line: Any) -> None:
        with open(self.outcomes, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _forked(self, mutant: Mutant | None, tests: list[Any], executed: Executed) -> tuple[str, str]:
        sink, source = os.pipe()[::-1]
        limit = 10 + round(sum(executed.seconds[test] for test in tests))
        if (pid := os.fork()) == 0:
            _own_threads()
            self.pipe = sink
            # What takes ever more memory fails.
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + 2**32, resource.getrlimit(resource.RLIMIT_AS)[1]))
            if mutant is not None:
                resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))
                mutant.function.__code__ = mutant.code
            for test in tests:
                _run(test)
            os._exit(0)
        os.close(sink)
        # What runs on is ended by the limit on its own seconds, which other processes do not use up. What waits without
        # an end is ended from here: the product has a use of its own for alarms.
        ended, _, _ = select.select([source], [], [], 5 * limit if mutant else None)
        if not ended:
            os.kill(pid, signal.SIGKILL)
        with open(source, "rb") as pipe:
            test = pipe.read().decode()
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if not ended or status == -signal.SIGXCPU:
            return "timed_out", ""
        return ("survived" if status == 0 else "killed"), test


def tried(mutants: dict[int, Mutant], test_file: str, folder: Path) -> list[dict[str, Any]]:
    """What becomes of the mutants in this file of tests; those that none of its tests executes are left out."""
    lines, log = folder / "outcomes.jsonl", folder / "pytest.log"
    lines.unlink(missing_ok=True)
    if (pid := os.fork()) == 0:
        try:
            _own_threads()
            with open(log, "wb") as output:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
            # What is collected late would fail whichever test runs then.
            ignored = ("pytest.PytestAssertRewriteWarning", "pytest.PytestUnraisableExceptionWarning")
            options = [f"-Wignore::{name}" for name in ignored]
            options += ["-m", "", "-p", "no:cacheprovider", f"--basetemp={folder / 'tests'}"]
            pytest.main([*options, str(harness.ROOT / "tests" / test_file)], plugins=[Campaign(mutants, lines)])
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(9)  # the campaign itself ends with 0
    if os.waitpid(pid, 0)[1]:
        sys.exit(f"{test_file} did not come through:\n{log.read_text(errors='replace')[-9000:]}")
    return harness.read_lines(lines)


# -- the campaign ------------------------------------------------------------------------------------------------------


def campaign(area: str, chosen: dict[int, Mutant], folder: Path) -> Iterator[dict[str, Any]]:
    """These mutants of an area against its test files; after each file, what has become of them so far."""
    left, test_files = dict(chosen), AREAS[area][1]
    began = time.perf_counter()
    executed: set[int] = set()
    left_out: list[str] = []
    ended = {"killed": 0, "timed_out": 0}
    for place, test_file in enumerate(test_files, start=1):
        for line in tried(left, test_file, folder) if left else []:
            if "left_out" in line:
                left_out.append(line["left_out"])
                continue
            executed.add(line["number"])
            if line["outcome"] != "survived":
                ended[line["outcome"]] += 1
                del left[line["number"]]
        seconds = round(time.perf_counter() - began)
        print(f"{area}: {test_file}: {len(left)} left after {seconds} s", flush=True)
        found = [shown(number, mutant, number in executed) for number, mutant in left.items()]
        yield {
            **ended,
            "accepted": [line for line in found if "reason" in line],
            "survivors": [line for line in found if "reason" not in line],
            "tests": test_files[:place],
            "tests_to_come": test_files[place:],
            "tests_left_out": left_out,
            "seconds": seconds,
        }


def shown(number: int, mutant: Mutant, executed: bool) -> dict[str, Any]:
    """A mutant that survived, with the reason if it was accepted; `executed`: whether any test came to its line."""
    found = {
        "number": number,
        "file": f"{mutant.module.replace('.', '/')}.py",
        "line": mutant.lines.start,
        "function": mutant.name,
        "change": mutant.change,
        "executed": executed,
    }
    reason = json.loads(ACCEPTED.read_text(encoding="utf-8")).get(mutant.name, {}).get(mutant.change)
    return {**found, "reason": reason} if reason else found


def _own_threads() -> None:
    # torch makes its pool anew at the first use in a fork, and fails where several threads come to that at once.
    import torch

    torch.set_num_threads(1)


def import_all(folder: Path) -> None:
    """Everything, once for all forks; what it reads of the environment when it is imported is set before."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "cache")}
    settings.register_profile("mutations", phases=[Phase.explicit, Phase.generate], database=None, deadline=None)
    settings.load_profile("mutations")
    import finetune.training.run  # noqa: F401

    CACHES[:] = [
        each
        for each in gc.get_objects()
        if isinstance(each, functools._lru_cache_wrapper)
        and each.__module__.startswith(("finetune.data.", "finetune.model.source.chat_template"))
    ]
    _own_threads()


def main() -> None:
    parser = harness.parser(__doc__, "mutations.json")
    parser.add_argument("--areas", nargs="+", choices=AREAS, default=list(AREAS), help="others keep their results")
    parser.add_argument("--limit", type=int, help="mutants per area, drawn at random; by default all")
    parser.add_argument("--again", action="store_true", help="only what survived before: tests were added since")
    options = parser.parse_args()
    os.chdir(harness.ROOT)
    sys.path[:0] = [str(harness.ROOT), str(harness.ROOT / "tests")]
    areas: dict[str, Any] = {}
    if options.output.is_file():
        areas = json.loads(options.output.read_text(encoding="utf-8"))["areas"]
    with tempfile.TemporaryDirectory() as temporary:
        import_all(Path(temporary))
        made_with = {"command": harness.command_line(), "environment": harness.environment(threads=1)}
        for area in options.areas:
            functions = AREAS[area][0].items()
            found = [mutant for module, names in functions for mutant in mutants_of(module, names.split())]
            earlier = areas[area] if options.again else {"killed": 0, "timed_out": 0}
            if options.again:
                chosen = sorted(line["number"] for line in [*earlier["survivors"], *earlier["accepted"]])
            else:
                count = min(options.limit or len(found), len(found))
                chosen = sorted(random.Random(0).sample(range(len(found)), count))
            counted = {"mutants": earlier.get("mutants", len(chosen)), "of": len(found)}
            for result in campaign(area, {number: found[number] for number in chosen}, Path(temporary)):
                sums = {name: earlier[name] + result[name] for name in ("killed", "timed_out")}
                areas[area] = {**counted, **result, **sums, **made_with}
                harness.write_result(options.output, {"areas": areas})
    counts = ["mutants", "of", "killed", "timed_out"]
    rows = [
        [name, *(area[key] for key in counts), len(area["accepted"]), len(area["survivors"])]
        for name, area in areas.items()
    ]
    print(harness.table(["area", *counts, "accepted", "survivors"], rows))
    sys.exit(any(area["survivors"] for area in areas.values()))


if __name__ == "__main__":
    main()
