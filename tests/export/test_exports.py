"""Exports for other programs: what is written, what is refused before anything is, and what is never done unasked."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf_in_llama_cpp as bench
import jinja2
import pytest
import torch
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.utils import get_session
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from jobs import logits, sampled
from markdown_it import MarkdownIt
from messages import refusal
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import normalizers
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.cli.serve import Serve

from finetune.config import Config, dump
from finetune.errors import ArtifactError, ConfigError, MachineError
from finetune.export import adapter_export, card, export_formats, proof, publish, server_commands, upload
from finetune.export.conversion import ExportRequest
from finetune.export.finished_run import FinishedRun
from finetune.export.gguf import gguf_model, gguf_recipes, gguf_types, llama_cpp, ollama
from finetune.model import build
from finetune.model.source import chat_template, gguf_names
from finetune.report.terminal import Terminal
from finetune.storage.rundir import RunDirectory

CPU = torch.device("cpu")


@pytest.fixture
def no_llama_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_cpp, "installed", lambda: False)


def export(run: RunDirectory, format: str, **options: Any) -> dict[str, Any]:
    return publish.export_model(run, format, terminal=Terminal(quiet=True), **options)


# -- the adapter -----------------------------------------------------------------------------------------------------


def test_peft_computes_the_trained_model_from_the_plain_adapter(run: RunDirectory, tiny_base: Path, hub: Hub) -> None:
    result = export(run, "adapter")
    assert hub.calls == [], "uploaded only when asked to"
    folder = Path(result["path"])
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert settings["r"] == settings["lora_alpha"] == 16
    assert not settings["use_rslora"]
    assert not settings["rank_pattern"]
    own, plain = (
        logits(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_base, dtype=torch.float32), place))
        for place in (run.adapter, folder)
    )
    assert torch.allclose(own, plain, atol=1e-5)
    before = load_file(run.adapter / "adapter_model.safetensors")
    assert load_file(folder / "adapter_model.safetensors").keys() == before.keys()
    assert json.loads((folder / "export.json").read_text())["error"] == result["error"] <= result["bound"]
    assert any("vLLM and SGLang were not run" in said for said in result["not_proven"])
    assert "--max-lora-rank 16" in result["serve"]["vLLM"]
    assert f"run={folder}" in result["serve"]["vLLM"]


def test_an_export_of_a_base_that_was_replaced_while_it_was_read_is_not_published(
    run: RunDirectory, tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = Path(shutil.copytree(tiny_base, tmp_path / "base"))
    run.config_file.write_text(dump(run.config().changed({"model.name": str(base)})))
    load = build.load

    def replaced(*arguments: Any) -> Any:
        tensors = {name: tensor * 1.1 for name, tensor in load_file(base / "model.safetensors").items()}
        save_file(tensors, tmp_path / "other", {"format": "pt"})
        (tmp_path / "other").rename(base / "model.safetensors")
        return load(*arguments)

    monkeypatch.setattr(build, "load", replaced)
    with refusal(ArtifactError, "base were changed, replaced or removed"):
        export(run, "adapter")
    assert not (run.path / export_formats.FORMATS["adapter"].folder).exists()


def _patterned(base: Any) -> Any:
    """An adapter with all that other programs misread: rsLoRA, and ranks and scales by layer."""
    torch.manual_seed(0)
    config = LoraConfig(
        r=8, lora_alpha=12, use_rslora=True, target_modules=["q_proj", "k_proj", "down_proj"], task_type="CAUSAL_LM",
        rank_pattern={"k_proj": 4}, alpha_pattern={"down_proj": 30},
    )  # fmt: skip
    model = get_peft_model(base, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def test_an_adapter_with_patterns_is_rewritten_to_a_plain_one(tiny_base: Path, tmp_path: Path) -> None:
    adapted = _patterned(AutoModelForCausalLM.from_pretrained(tiny_base, dtype=torch.float32))
    expected = logits(adapted)
    pairs = adapter_export.plain(adapted)
    assert (
        adapter_export.write(pairs, {name: name for name in pairs}, adapted.peft_config["default"], "base", tmp_path)
        == 8
    )
    base = AutoModelForCausalLM.from_pretrained(tiny_base, dtype=torch.float32)
    assert torch.allclose(logits(PeftModel.from_pretrained(base, str(tmp_path))), expected, atol=1e-4)
    weights = load_file(tmp_path / "adapter_model.safetensors")
    assert {len(tensor) for name, tensor in weights.items() if "lora_A" in name} == {8}
    assert json.loads((tmp_path / "adapter_config.json").read_text())["rank_pattern"] == {}


def test_llama_cpp_runs_the_rewritten_adapter_as_peft_does(tiny_base: Path, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed")
    base = AutoModelForCausalLM.from_pretrained(tiny_base, dtype=torch.float32)
    config, ids = base.config, list(range(100, 140))
    with torch.inference_mode():
        plain = base(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        adapted = _patterned(base).eval()
        expected = adapted(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    pairs = adapter_export.plain(adapted)
    gguf_model.write_lora(config, pairs, 8, tmp_path / "adapter.gguf")
    tokenizer = AutoTokenizer.from_pretrained(tiny_base)
    gguf_model.write(tiny_base, config, tokenizer, tmp_path / "base.gguf", "f16", starts_with_bos=False)
    with llama_cpp.serving(tmp_path / "base.gguf", 128, lora=tmp_path / "adapter.gguf") as server:
        found = [server.log_probs(ids[: place + 1], config.vocab_size) for place in (5, 20, 39)]
    for place, log_probs in zip((5, 20, 39), found, strict=True):
        error = max(abs(value - float(expected[place, token])) for token, value in log_probs.items())
        effect = max(abs(value - float(plain[place, token])) for token, value in log_probs.items())
        assert error < 0.1 < 1 < effect


def job(run: RunDirectory, **changes: Any) -> ExportRequest:
    config = run.config()
    section = config.adapter.model_copy(update=changes)
    config = config.model_copy(update={"adapter": section})
    return ExportRequest(run, config, None, CPU, "f16")


def test_an_adapter_without_a_plain_form_is_refused(trained: RunDirectory) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"dora": True}, "`adapter.dora`"),
        ({"extra_modules": ["norm"]}, "`adapter.extra_modules` trained norm"),
        ({"init": "loftq"}, "LoftQ"),
        ({"rank": 600}, "its rank is 600, and vLLM takes at most 512"),
        ({"rank": 300, "init": "pissa"}, "its rank is 600"),
        ({"ranks": {"q_proj": 520}}, "its rank is 520"),
    ]
    for changes, why in refused:
        with refusal(ConfigError, why, "`merged`"):
            adapter_export.check(job(trained, **changes))


def test_targets_by_regular_expression_are_linear_layers(trained: RunDirectory) -> None:
    adapter_export.check(job(trained, targets=["q_proj", r".*layers\.0\.mlp.*"]))


def test_no_command_is_given_for_a_server_that_takes_no_such_rank() -> None:
    record = {"rank": 600, "gguf": None}
    assert server_commands.commands("adapter", Path("run/plain-adapter"), "base", record).keys() == {"SGLang"}


def test_the_server_of_transformers_takes_a_folder_as_the_command_gives_it() -> None:
    """Its packages need not be installed, nor are vLLM's and SGLang's."""
    assert (
        server_commands.commands("merged", Path("run/merged"), "base", {})["transformers"]
        == "transformers serve run/merged"
    )
    first = next(iter(inspect.signature(Serve).parameters.values()))
    assert "ArgumentInfo" in str(first.annotation), "the model is no option"


def test_a_command_takes_the_path_of_a_run_as_one_word(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "my run; $(touch x) 'y'")
    with pytest.raises(ArtifactError) as refused:
        FinishedRun(run, Config()).load_merged(CPU)
    told = str(refused.value).partition("`")[2].rpartition("`")[0]
    assert shlex.split(told) == ["finetune", "merge", str(run.path)]
    assert RunDirectory("-to/run").quoted == "./-to/run"


def test_ollama_gets_a_valid_model_name() -> None:
    for run, name in (("my run", "my-run"), ("läufe=1", "l-ufe-1"), ("-x.", "x"), ("ü", "finetuned")):
        made = server_commands.commands("ollama", Path(run, "ollama"), "base", {})["Ollama"]
        create, run_it = made.split(" && ")
        assert shlex.split(create) == ["ollama", "create", name, "-f", f"{run}/ollama/Modelfile"]
        assert shlex.split(run_it) == ["ollama", "run", name]


# -- GGUF, from a run ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(merged: RunDirectory, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """The merged run with a GGUF file in f16. Do not write to it."""
    run = RunDirectory(shutil.copytree(merged.path, tmp_path_factory.mktemp("made") / "run"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llama_cpp, "installed", lambda: False)
        export(run, "gguf")
    return run


@pytest.fixture
def exported(made: RunDirectory, tmp_path: Path, no_llama_cpp: None) -> RunDirectory:
    """A copy of it that a test may write to."""
    return RunDirectory(shutil.copytree(made.path, tmp_path / "run"))


@pytest.mark.slow
def test_a_run_becomes_a_gguf_file_and_keeps_its_merged_model(run: RunDirectory, no_llama_cpp: None) -> None:
    result = export(run, "gguf", type="q8_0")
    assert result["error"] <= result["bound"] < result["effect"]
    assert result["agreement"] > 0.95
    assert result["llama_cpp"] is None
    assert "llama.cpp was not run" in result["not_proven"][0]
    folder = run.path / "gguf"
    assert {file.name for file in folder.iterdir()} == {"model-q8_0.gguf", "export.json", "README.md"}
    assert "not run" in (folder / "README.md").read_text()
    assert str(run.path) not in (folder / "export.json").read_text(), "what may be uploaded names no local folder"
    [merged, exported] = [event for event in run.events() if event["event"] in ("merged", "exported")]
    assert (merged["format"], exported["format"]) == ("merged", "gguf")
    assert run.is_merged
    run.event("trained", step=30)
    assert not run.is_merged, "an adapter that was trained on since"


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "agreement"), sampled([("f16", 0.98), ("q4_k_m", 0.9)], ("q4_k_m", 0.9)))
def test_llama_cpp_checks_a_run(merged_run: RunDirectory, kind: str, agreement: float) -> None:
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed")
    result = export(merged_run, "ollama", type=kind)
    assert [event["event"] for event in merged_run.events()].count("merged") == 1
    assert result["error"] < result["bound"] <= 1
    assert result["kept"] > 0.8
    assert result["llama_cpp"]["agreement"] >= agreement
    assert result["llama_cpp"]["tokenized_alike"] == result["llama_cpp"]["texts"] > 0
    assert result["llama_cpp"]["prompt_alike"]
    modelfile = (merged_run.path / "ollama" / "Modelfile").read_text()
    assert modelfile.startswith(f'FROM ./model-{kind}.gguf\nTEMPLATE """{{{{ range $i, $m := .Messages }}}}')
    assert modelfile.endswith('PARAMETER stop "<|im_end|>"\n')


@pytest.mark.slow
def test_a_file_with_a_wrong_tensor_is_not_published(
    merged_run: RunDirectory, no_llama_cpp: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = gguf_names.stored

    def doubled(name: str, *others: Any, **named: Any) -> dict[str, torch.Tensor]:
        parts = stored(name, *others, **named)
        return {part: tensor * (2 if "layers.1.mlp.up_proj" in name else 1) for part, tensor in parts.items()}

    monkeypatch.setattr(gguf_names, "stored", doubled)
    with refusal(ArtifactError, "is not the trained model"):
        export(merged_run, "gguf")
    assert not (merged_run.path / "gguf").exists()
    assert not list(merged_run.path.glob("*.incomplete"))


@pytest.mark.slow
def test_a_full_disk_leaves_the_earlier_export(exported: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (exported.path / "gguf" / "model-f16.gguf").read_bytes()
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=1000))
    with refusal(MachineError, "No space left on device"):
        export(exported, "gguf", type="bf16")
    assert (exported.path / "gguf" / "model-f16.gguf").read_bytes() == before
    assert not list(exported.path.glob("*.incomplete"))


@pytest.mark.parametrize("format", ["adapter", "gguf"])
def test_another_base_or_a_damaged_adapter_is_refused(run: RunDirectory, format: str) -> None:
    fingerprint = run.adapter / "fingerprint.json"
    kept = fingerprint.read_text()
    for name, why in (("base", "trained on another base"), ("tokenizer", "another tokenizer or chat template")):
        changed = json.loads(kept)
        changed[name] = "sha256:" * (name == "base") + "0" * 64
        fingerprint.write_text(json.dumps(changed))
        with pytest.raises(ArtifactError, match=why):
            export(run, format)
    fingerprint.write_text(kept)
    (run.adapter / "adapter_model.safetensors").write_bytes(b"\0" * 64)
    with refusal(ArtifactError, "adapter_model"):
        export(run, format)
    assert not (run.path / export_formats.FORMATS[format].folder).exists()
    assert not run.merged.exists()


def test_a_type_that_is_not_written_is_refused_with_its_command_or_the_nearest() -> None:
    for kind in ("q3_K_M", "q8_1", "iq3_xs"):  # of llama-quantize
        with refusal(ConfigError, "model-f16.gguf", f"model-{kind}.gguf", kind):
            gguf_types.check(kind)
    for kind, nearest in (("f17", "f16"), ("Q4_K_M", "q4_k_m")):
        with refusal(ConfigError, f"`{kind}`", f"`{nearest}`"):
            gguf_types.check(kind)


def test_a_type_that_llama_cpp_quantizes_needs_its_wheel(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_recipes, "function", lambda: importlib.import_module("no_such_module"))
    with refusal(MachineError, "pip install xllamacpp`", "model-f16.gguf", "model-q5_k_m.gguf"):
        export(run, "gguf", type="q5_k_m")
    assert not run.merged.exists()


def test_no_export_has_the_folder_name_of_another_part_of_a_run(tmp_path: Path) -> None:
    folders = [form.folder for form in export_formats.FORMATS.values()]
    assert len(set(folders)) == len(folders) > 1
    run = RunDirectory(tmp_path)
    assert {tmp_path / folder for folder in folders} & set(vars(run).values()) == {run.merged}


# -- Ollama's template -----------------------------------------------------------------------------------------------


def go(template: str, messages: list[dict[str, str]]) -> str:
    """Go's text/template by Jinja, as far as the template goes: range, if, else, and, eq, fields and literal texts."""
    found, texts, opened = "", list[str](), list[str]()
    for place, part in enumerate(re.split(r"\{\{ (.*?) \}\}", template, flags=re.DOTALL)):
        if place % 2 == 0 or part.startswith('"'):
            found += f"{{{{ texts[{len(texts)}] }}}}"
            texts.append(json.loads(part) if place % 2 else part)
        elif part == ".Content":
            found += "{{ messages[i].content }}"
        elif part == "range $i, $m := .Messages":
            found += "{% for i in range(messages | length) %}"
            opened.append("for")
        elif part == "end":
            found += f"{{% end{opened.pop()} %}}"
        elif part == "else":
            found += "{% else %}"
        else:
            if part.startswith("if "):
                opened.append("if")
            condition = re.sub(r"and \$\.System \((.*)\)", r"system and \1", part.replace("else if ", "elif "))
            condition = re.sub(r'eq \.Role ("\w+")', r"messages[i].role == \1", condition)
            condition = re.sub(r"eq \$i (\d+)", r"i == \1", condition)
            found += f"{{% {condition} %}}"
    system = next((message["content"] for message in messages if message["role"] == "system"), "")
    return jinja2.Template(found, keep_trailing_newline=True).render(texts=texts, messages=messages, system=system)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(chat_template.TEMPLATES.keys() - {"auto"}))
def test_the_template_of_ollama_renders_what_the_chat_template_does(name: str) -> None:
    tokenizer = bench.llama3()
    tokenizer.chat_template = chat_template.named(name)

    def render(messages: list[dict[str, str]]) -> str:
        return chat_template.text(tokenizer, messages, prompt=True)[0]

    template = ollama.turns(render).go()
    rendered = 0
    for messages in bench.conversations():
        try:
            expected = render(messages)
        except Exception:  # no system message
            continue
        assert go(template, messages) == expected
        rendered += 1
    assert rendered >= 2


def test_a_template_that_depends_on_more_than_positions_of_messages_is_refused() -> None:
    def render(messages: list[dict[str, str]]) -> str:
        return "".join(f"{len(messages)}:{message['content']}" for message in messages)

    with refusal(ConfigError, "`gguf`"):
        ollama.turns(render)


@pytest.mark.parametrize(
    ("runtime", "why"),
    [("ollama", "no form in Ollama's language"), ("llama.cpp", "has no tokenizer like this model's")],
)
def test_what_an_export_would_refuse_of_a_tokenizer_is_refused_before_training(
    runtime: str, why: str, trained: RunDirectory
) -> None:
    config = trained.config().changed({"output.serve": "16bit", "output.runtime": runtime, "output.way": "rounded"})
    tokenizer = FinishedRun(trained, config).tokenizer()
    publish.check_served(trained, config, tokenizer, "chat")
    if runtime == "ollama":
        tokenizer.chat_template = "{{ messages | length }}" + tokenizer.chat_template
    else:
        tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    with refusal(ConfigError, "`output.serve`", why):
        publish.check_served(trained, config, tokenizer, "chat")
    publish.check_served(trained, config.changed({"output.runtime": "vllm"}), tokenizer, "chat")


def commands_of(text: str) -> list[tuple[str, str]]:
    """The commands that Ollama reads from a Modelfile: its parser (parser/parser.go, 2026) in Python."""
    found: list[tuple[str, str]] = []
    state, name, read = "nil", "", ""

    def unquoted() -> str | None:
        value = read.strip()
        for quotes in ('"""', '"'):
            if value.startswith(quotes):
                closed = len(value) >= 2 * len(quotes) and value.endswith(quotes)
                return value[len(quotes) : -len(quotes)] if closed else None
        return value

    for letter in text:
        is_space, is_end = letter in " \t", letter in "\r\n"
        after = state
        if state == "nil" and not (is_space or is_end):
            after = "name"
        elif state in ("name", "parameter") and is_space:
            after = "value"
        elif state == "value" and (is_space or is_end):
            after = "nil"
        else:
            assert state in ("nil", "value") or letter.isalpha(), f"no command: {read + letter!r}"
        if after != state:
            if state == "name":
                name = read.lower()
                assert name in ("from", "template", "parameter", "system", "adapter", "license", "message"), name
                after = "parameter" if name == "parameter" else after
            elif state == "parameter":
                name = f"parameter {read}"
            elif state == "value":
                value = unquoted()
                if value is None or is_space:
                    read += letter
                    continue
                found.append((name, value))
            read, state = "", after
            if state in ("value", "parameter", "nil"):
                continue
        read += letter if letter.isprintable() else ""
    assert state == "nil", "the last value has no end"
    return found


@settings(max_examples=200)
@given(st.lists(st.text(st.sampled_from('"\n\r\t #{}<a\u00a0') | st.characters(), max_size=12), max_size=3))
@example(['"'])
@example(['"\nSYSTEM obey'])
@example(['""\n"""\nADAPTER /etc/passwd'])
def test_ollama_reads_each_stop_token_as_it_is_and_nothing_else(stops: list[str]) -> None:
    template = ollama.Turns('"""\nSYSTEM obey\n', "\u00a0", "}}", '"').go()
    try:
        text = ollama.modelfile("model.gguf", template, stops)
    except ConfigError:
        assert any(not letter.isprintable() or letter in '"\r\n' for stop in stops for letter in stop)
        return
    expected = [("from", "./model.gguf"), ("template", template), *(("parameter stop", stop) for stop in stops)]
    assert commands_of(text) == expected


def test_a_stop_token_that_a_modelfile_cannot_express_is_refused() -> None:
    assert commands_of(ollama.modelfile("f", "t", ['a"\nb']))[-1] == ("parameter stop", 'a"\nb')
    for stop in ('a"\n"""\nb', "a\u200bb"):
        with refusal(ConfigError, "`gguf`"):
            ollama.modelfile("f", "t", [stop])


def test_characters_that_ollama_would_drop_are_escaped() -> None:
    template = ollama.Turns("\u00a0User: ", "", "", "<｜Assistant｜>\n").go()
    text = ollama.modelfile("model.gguf", template, ["<｜end▁of▁sentence｜>"])
    assert all(line.isprintable() for line in text.splitlines())
    assert r'{{ "\U000000a0User: " }}' in text


# -- the card and the hub --------------------------------------------------------------------------------------------

PROOF = {
    "rows": 8, "tokens": 379, "rows_of": "the rows", "error": 0.008, "bound": 0.02, "effect": 0.4, "agreement": 0.98,
}  # fmt: skip
BASE_CARD = "---\nlicense: llama3.1\nlicense_name: llama3.1\nlicense_link: https://example.org/LICENSE\n---\n# Base\n"


def test_the_card_inherits_the_licence_and_has_what_was_measured(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "README.md").write_text(BASE_CARD)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_, **__: str(tmp_path / "README.md"))
    config = run.config().changed({"model.name": "meta-llama/Llama-3.1-8B", "data.train": "tatsu-lab/alpaca"})
    before = next(line["eval_loss"] for line in run.metrics() if "eval_loss" in line)
    record = {"format": "gguf", "type": "f16", "compared_with": "x", "not_proven": ["Ollama was not run"], **PROOF}
    config = config.changed({"adapter.targets": [".*[.](q|v)_proj"], "optimizer.lora_plus": 16.0})
    text = card.model_card(FinishedRun(run, config), record, "one GGUF file")
    for expected in (
        "base_model: meta-llama/Llama-3.1-8B", "license: llama3.1", "license_link: https://example.org/LICENSE",
        "- tatsu-lab/alpaca", "# Llama: meta-llama/Llama-3.1-8B, fine-tuned", "Built with Llama.", "0.003", "GiB",
        f"{before:.4f} before", "differ by 0.800%", "Ollama was not run",
        r"| adapter targets | `.*[.](q\|v)_proj` |", "| LoRA+ ratio | 16 |",
    ):  # fmt: skip
        assert expected in text, expected


def test_the_card_has_the_loss_of_the_weights_that_were_published(run: RunDirectory) -> None:
    def after() -> str:
        return card._measured(run, run.config().training.objective)["evaluation loss"].split(" before, ")[1].split()[0]

    first, *_, last = (line for line in run.metrics() if "eval_loss" in line)
    run.event("best_loaded", step=first["step"])
    assert after() == f"{first['eval_loss']:.4f}"
    run.event("resumed", step=first["step"])
    assert after() == f"{last['eval_loss']:.4f}"


def test_a_card_without_a_base_on_the_hub_asks_nothing_and_names_no_folder(
    run: RunDirectory, tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_, **__: pytest.fail("asked the hub"))
    config = run.config().changed({"model.name": str(tiny_base), "data.train": ["python:1f2e", "rows.jsonl"]})
    text = card.model_card(FinishedRun(run, config), {"format": "merged", **PROOF}, "safetensors")
    assert str(tiny_base) not in text
    assert "was trained on rows given from Python (hash 1f2e), `rows.jsonl`." in text
    assert "tiny-llama, fine-tuned" in text
    assert "base_model" not in text


def test_a_local_path_is_published_by_its_last_part() -> None:
    for source, shown in {
        "builtin:tiny-llama": "builtin:tiny-llama",
        "meta-llama/Llama-3.1-8B": "meta-llama/Llama-3.1-8B",
        "gpt2": "gpt2",
        "/home/me/acme/rows.jsonl": "rows.jsonl",
        "../acme/corpus": "corpus",
        "acme/rows.jsonl.gz": "rows.jsonl.gz",
        "acme/*": "*",
    }.items():
        assert card.public(source) == shown


HOSTILE = st.text(
    st.sampled_from("`*_[]<>()&|~$#-+=!\\\n\r\u2028 /:'\"{}ab") | st.characters(codec="utf-8"), max_size=24
)


def _shown(text: str) -> str:
    """What a card shows of a text of others."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)


def _unreachable(*_: object, **__: object) -> None:
    raise OSError


@pytest.mark.slow
@settings(max_examples=75, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(HOSTILE, HOSTILE, HOSTILE)
@example("<script>x</script>", "a`](javascript:x)", "q|v\n\n# Proof")
def test_untrusted_names_are_escaped_in_a_card(
    trained: RunDirectory, monkeypatch: pytest.MonkeyPatch, base: str, rows: str, target: str
) -> None:
    monkeypatch.setattr("huggingface_hub.hf_hub_download", _unreachable)
    base, rows = f"b{base.replace('/', '')}e", f"r{rows.replace('/', '')}s"  # each a name of a folder
    config = trained.config()
    config = config.model_copy(
        update={
            "model": config.model.model_copy(update={"name": f"/place/{base}"}),
            "data": config.data.model_copy(update={"train": f"/place/{rows}"}),
            "adapter": config.adapter.model_copy(update={"targets": [f"t{target}t"]}),
        }
    )
    text = card.model_card(FinishedRun(trained, config), {"format": "merged", **PROOF}, "safetensors")
    plain = config.changed({"adapter.targets": ["q_proj"]})
    plain = card.model_card(FinishedRun(trained, plain), {"format": "merged", **PROOF}, "safetensors")
    made, expected = (MarkdownIt("commonmark").enable("table").parse(ModelCard(one).text) for one in (text, plain))
    assert [token.type for token in made] == [token.type for token in expected], "the same structure"
    inline = [child for token in made if token.type == "inline" for child in token.children or []]
    assert {child.type for child in inline} <= {"text", "text_special", "code_inline", "softbreak"}
    title = next(token for token in made if token.type == "inline").children or []
    assert "".join(child.content for child in title) == f"{_shown(base)}, fine-tuned"
    spans = [child.content for child in inline if child.type == "code_inline"]
    assert _shown(rows) in spans
    assert _shown(f"t{target}t") in spans


@settings(max_examples=100)
# Without what PyYAML reads as line breaks, and the spaces that ModelCardData cuts off at the end.
@given(*[HOSTILE.map(lambda text: re.sub(r"[\x85\u2028\u2029]|[^\S\x00-\x7f]+$", "", text))] * 3)
@example("a\n---\nbase_model: evil\n---\n", "--- \n---", "\n...\n")
def test_the_front_matter_of_a_card_holds_what_is_in_it_and_nothing_else(name: str, rows: str, licence: str) -> None:
    # As in every card, tags come last: huggingface_hub strips blanks from the end of the YAML.
    values = {"base_model": name, "library_name": "peft", "datasets": [rows], "license": licence, "tags": ["finetune"]}
    header = f"---\n{ModelCardData(**values).to_yaml()}\n---\n\n# Body\n"
    assert ModelCard(header).data.to_dict() == values
    assert ModelCard(header).text.strip() == "# Body"


def test_a_licence_that_is_not_text_is_left_out(
    trained: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_, **__: str(tmp_path / "README.md"))
    config = trained.config().changed({"model.name": "someone/base"})
    for licence in ("&a [*a]", "{a: b}", "2026-01-01", "[1]"):
        (tmp_path / "README.md").write_text(f"---\nlicense: {licence}\nlicense_name: free\n---\n# Base\n")
        found = ModelCard(card.model_card(FinishedRun(trained, config), {"format": "merged"}, "safetensors")).data
        assert (found.get("license"), found.license_name) == (None, "free"), licence


class Hub:
    """huggingface_hub's API, at its boundary."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.there: set[str] = set()

    def create_repo(self, name: str, *, private: bool, exist_ok: bool) -> SimpleNamespace:
        self.calls.append(("create", name, private, exist_ok))
        return SimpleNamespace(repo_id=name if "/" in name else f"me/{name}")

    def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str) -> None:
        texts = {file.name: file.read_bytes() for file in Path(folder_path).iterdir()}
        self.calls.append(("upload", repo_id, texts))
        self.there |= texts.keys()

    def list_repo_files(self, name: str) -> list[str]:
        return [".gitattributes", *self.there]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    made = Hub()
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: made)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "token")
    return made


@pytest.mark.slow
def test_an_upload_is_private_and_names_no_folder(run: RunDirectory, tiny_base: Path, hub: Hub, tmp_path: Path) -> None:
    base = shutil.copytree(tiny_base, tmp_path / "base")
    run.config_file.write_text(run.config_file.read_text().replace("builtin:tiny-llama", str(base)))
    record = export(run, "adapter", push="tuned")
    assert (record["pushed"], record["also_there"]) == ("https://huggingface.co/me/tuned", [])
    [created, (uploaded, name, files)] = hub.calls
    assert created == ("create", "tuned", True, True), "private unless it is there"
    assert (uploaded, name) == ("upload", "me/tuned")
    assert {"adapter_model.safetensors", "README.md", "export.json", "adapter.gguf"} <= files.keys()
    assert [file for file, content in files.items() if bytes(tmp_path.parents[1]) in content] == [], "base and rows"


@pytest.mark.slow
def test_what_keeps_little_of_the_gain_is_uploaded_only_when_asked_twice(
    run: RunDirectory, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "LEAST_GAIN", 1.5)  # an adapter keeps all
    monkeypatch.setattr(proof, "_ERRORS", 0.5)  # 48 tokens tell little
    with refusal(ArtifactError, "`--anyway`"):
        export(run, "adapter", push="tuned")
    assert hub.calls == []
    kept = run.kept("plain-adapter")
    assert kept is not None
    assert kept["served"]["kl_max"] < 1e-4
    assert kept["losses"]["base"] > kept["losses"]["trained"]
    assert "of the gain is kept" in (run.path / "plain-adapter" / "README.md").read_text()
    assert "pushed" in export(run, "adapter", push="tuned", anyway=True)


@pytest.mark.slow
def test_a_second_upload_says_what_the_first_left(exported: RunDirectory, hub: Hub) -> None:
    upload.push(exported.path / "gguf", "tuned")
    assert export(exported, "gguf", type="q8_0", push="tuned")["also_there"] == ["model-f16.gguf"]


@pytest.mark.slow
def test_a_hub_that_refuses_leaves_the_export(run: RunDirectory, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    # Of the HTTP library, which differs between versions of huggingface_hub.
    unreachable = importlib.import_module(type(get_session()).__module__.partition(".")[0]).ConnectError
    error: type[Exception] = OSError

    def refuse(*_: Any, **__: Any) -> None:
        raise error("403 Forbidden")

    monkeypatch.setattr(hub, "create_repo", refuse)
    with refusal(MachineError, "me/tuned"):
        export(run, "adapter", push="me/tuned")
    assert (run.path / "plain-adapter" / "export.json").is_file()
    error = unreachable
    with refusal(MachineError, "me/tuned"):
        upload.push(run.path / "plain-adapter", "me/tuned")


def test_a_wrong_name_or_no_account_ends_before_any_work(
    run: RunDirectory, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    with refusal(ConfigError, "--push", "a/b/c"):
        export(run, "adapter", push="a/b/c")
    with refusal(ConfigError, "`--anyway`"):
        export(run, "adapter", anyway=True)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with refusal(MachineError, "hf auth login"):
        export(run, "adapter", push="me/tuned")
    assert not (run.path / "plain-adapter").exists()
