"""GGUF files beside transformers: most likely tokens, greedy answers, tokenization and chat templates, in llama.cpp.

Small models of each family that is exported are made and trained here for a few seconds, with tokenizers trained here
on docstrings of Python's own library. Each is written as a GGUF file in each type, and read by transformers and by
llama.cpp (the server in the xllamacpp wheel). The bounds are for held-out text: the same most likely token at 99% of
positions in f16, and at 98% in q8_0; 1,000 strings split into the same tokens; prompts rendered alike.
"""

from __future__ import annotations

import copy
import functools
import json
import random
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import harness
import torch

sys.path.insert(0, str(harness.ROOT))

from finetune.errors import ArtifactError
from finetune.export.gguf import gguf_export, gguf_model, llama_cpp
from finetune.model.source import chat_template, gguf_families
from finetune.runtime import libraries

BOUNDS = {"f16": 0.99, "bf16": 0.98, "q8_0": 0.98}
ANSWER_TOKENS = 32
VOCABULARY = 600
CONTEXT = 128

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_END = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TEKKEN = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}{_END}"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SHORT}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SHORT}?|"
    rf"\p{{N}}{{1,3}}{_END}"
)
_QWEN35 = (
    rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
_CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_HEADERS = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
_GEMMA = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]


@functools.cache
def texts() -> list[str]:
    """100,000 characters of docstrings, what tokenizers and models are trained on, and as the last 10,000 held out."""
    documents = harness.documents()
    return ["\n\n".join(documents[split])[:size] for split, size in (("train", 100_000), ("eval", 10_000))]


# -- tokenizers -------------------------------------------------------------------------------------------------------


def byte_level(pattern: str, special: list[str], *, ignore_merges: bool = False, normalize: bool = False) -> Any:
    """A byte-level BPE as Llama 3 and Qwen 2.5 have it."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if normalize:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(texts()[:-1], trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    ))  # fmt: skip
    return backend


def sentencepiece(special: list[str], *, prefix: bool = False, every: bool = True) -> Any:
    """A BPE with bytes for what is unknown, as Gemma and (with `prefix`) Llama 2 have it.

    As in a conversion from SentencePiece, every pair that makes a token is a merge. Without `every` it is only the
    first, and no token holds a line break beside other characters, as Gemma 4 has it.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    if not every:
        lines = pre_tokenizers.Split(Regex(r"\n+"), "isolated")
        trained.pre_tokenizer = pre_tokenizers.Sequence([lines, trained.pre_tokenizer])
    trained.train_from_iterator(texts()[:-1], trainers.BpeTrainer(vocab_size=VOCABULARY - 256, show_progress=False))
    rules = json.loads(trained.to_str())["model"]
    merged = ["".join(pair) for pair in rules["merges"]]
    characters = [token for token in rules["vocab"] if len(token) == 1]
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *merged, *characters]
    known = {token: place for place, token in enumerate(tokens)}
    merges = [
        (token[:cut], token[cut:])
        for token in merged
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
    ]
    if not every:
        merges = [tuple(pair) for pair in rules["merges"]]
    backend = Tokenizer(models.BPE(known, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    space = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space]) if prefix else space
    if not prefix:
        backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return backend


def tokenizer(backend: Any, template: str, **special: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    made = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    made.chat_template = chat_template.named(template)
    return made


def llama3() -> Any:
    return tokenizer(
        byte_level(_LLAMA3, _HEADERS, ignore_merges=True), "llama3",
        bos_token="<|begin_of_text|>", eos_token="<|end_of_text|>",
    )  # fmt: skip


def qwen() -> Any:
    pattern = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
    return tokenizer(byte_level(pattern, _CHATML, normalize=True), "chatml", eos_token="<|im_end|>")


def tekken() -> Any:
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    return tokenizer(
        byte_level(_TEKKEN, special, ignore_merges=True), "chatml", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def qwen35() -> Any:
    return tokenizer(byte_level(_QWEN35, _CHATML, normalize=True), "chatml", eos_token="<|im_end|>")


def o200k() -> Any:
    return tokenizer(byte_level(_O200K, _CHATML, ignore_merges=True), "chatml", eos_token="<|im_end|>")


def gemma() -> Any:
    return tokenizer(
        sentencepiece(_GEMMA), "gemma", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>", pad_token="<pad>"
    )


def gemma4() -> Any:
    backend = sentencepiece(_GEMMA, every=False)
    return tokenizer(backend, "gemma", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>", pad_token="<pad>")


def llama2() -> Any:
    return tokenizer(
        sentencepiece(["<unk>", "<s>", "</s>"], prefix=True), "llama2",
        unk_token="<unk>", bos_token="<s>", eos_token="</s>",
    )  # fmt: skip


# -- models -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """A family: its tokenizer, and the fields of its configuration beside those of every model here."""

    tokenizer: Callable[[], Any]
    fields: dict[str, Any]


_LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip

_MINISTRAL_ROPE = {
    "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
_QWEN35_LAYERS = {
    "num_hidden_layers": 4, "head_dim": 32, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1],
    },
}  # fmt: skip
_SEEING_QWEN = {
    "hidden_size": 32, "intermediate_size": 64, "depth": 1, "num_heads": 2, "patch_size": 4, "out_hidden_size": 64,
    "num_position_embeddings": 16,
}  # fmt: skip
_GEMMA4 = {
    "head_dim": 32, "global_head_dim": 64, "sliding_window": 32, "num_hidden_layers": 4, "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": 32,
    "use_double_wide_mlp": True, "final_logit_softcapping": 30.0,
}  # fmt: skip
_SEEING_GEMMA3 = {
    "text_config": {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 32, "num_hidden_layers": 6},
    "vision_config": {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32,
        "patch_size": 8,
    },
    "mm_tokens_per_image": 4,
}  # fmt: skip

SHAPES = {
    "llama": Shape(llama3, {"model_type": "llama", "rope_parameters": _LLAMA3_ROPE}),
    "llama2": Shape(llama2, {"model_type": "llama", "tie_word_embeddings": True}),
    "mistral": Shape(llama2, {"model_type": "mistral", "sliding_window": None}),
    "qwen2.5": Shape(qwen, {"model_type": "qwen2", "tie_word_embeddings": True}),
    "qwen3": Shape(qwen, {"model_type": "qwen3", "head_dim": 32}),
    "gemma2": Shape(
        gemma, {"model_type": "gemma2", "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 32}
    ),
    "gemma3": Shape(
        gemma,
        {
            "model_type": "gemma3_text", "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 32,
            "num_hidden_layers": 6,
        },
    ),
    "gemma3 with another scale": Shape(
        gemma,
        {
            "model_type": "gemma3_text", "head_dim": 32, "query_pre_attn_scalar": 20, "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 5_000.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 100_000.0, "factor": 2.0},
            },
        },
    ),
    "gemma3, which also sees": Shape(gemma, {"model_type": "gemma3", **_SEEING_GEMMA3}),
    "qwen3 mixture": Shape(
        qwen,
        {
            "model_type": "qwen3_moe", "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 64, "norm_topk_prob": True,
        },
    ),
    "mixtral": Shape(llama2, {"model_type": "mixtral", "num_local_experts": 4, "sliding_window": None}),
    "smollm3": Shape(
        lambda: tokenizer(byte_level(_LLAMA3, _CHATML, ignore_merges=True), "chatml", eos_token="<|im_end|>"),
        {"model_type": "smollm3", "num_hidden_layers": 4, "pad_token_id": None, "tie_word_embeddings": True},
    ),
    "ministral3": Shape(
        tekken, {"model_type": "ministral3", "head_dim": 32, "rope_parameters": _MINISTRAL_ROPE, "pad_token_id": None}
    ),
    "qwen3.5": Shape(
        qwen35,
        {"model_type": "qwen3_5_text", **_QWEN35_LAYERS},
    ),
    "qwen3.5, which also sees": Shape(
        qwen35, {"model_type": "qwen3_5", "text_config": _QWEN35_LAYERS, "vision_config": _SEEING_QWEN}
    ),
    "qwen3.5 mixture": Shape(
        qwen35,
        {
            "model_type": "qwen3_5_moe_text", **_QWEN35_LAYERS, "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 64, "shared_expert_intermediate_size": 32, "intermediate_size": None,
        },
    ),
    "gpt-oss": Shape(
        o200k,
        {
            "model_type": "gpt_oss", "head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2,
            "sliding_window": 32, "pad_token_id": None,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
                "truncate": False, "original_max_position_embeddings": 64,
            },
        },
    ),
    "gemma4": Shape(gemma4, {"model_type": "gemma4_text", **_GEMMA4}),
    "gemma4 mixture": Shape(
        gemma,
        {
            "model_type": "gemma4_text", **_GEMMA4, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True, "num_global_key_value_heads": 1, "enable_moe_block": True, "num_experts": 4,
            "top_k_experts": 2, "moe_intermediate_size": 64,
        },
    ),
    "phi4": Shape(
        lambda: tokenizer(byte_level(_LLAMA3, _CHATML), "chatml", eos_token="<|im_end|>"),
        {"model_type": "phi3", "pad_token_id": None, "sliding_window": None},
    ),
}  # fmt: skip


def architecture(shape: Shape, vocabulary: int) -> Any:
    from transformers import AutoConfig

    fields = {
        "vocab_size": vocabulary, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2 * CONTEXT,
    }  # fmt: skip
    if shape.fields["model_type"] == "gemma4_text":
        fields["vocab_size_per_layer_input"] = vocabulary
    if "text_config" in shape.fields:
        return AutoConfig.for_model(**shape.fields | {"text_config": fields | shape.fields["text_config"]})
    return AutoConfig.for_model(**fields | shape.fields)


def train(config: Any, made: Any, steps: int) -> Any:
    """A model that has learnt enough for its most likely token to be more than a tie."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    ids = torch.tensor(made("\n".join(texts()[:-1]), add_special_tokens=False)["input_ids"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    for _ in range(steps):
        starts = torch.randint(0, len(ids) - 65, (8,))
        batch = torch.stack([ids[start : start + 64] for start in starts])
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return rounded(model).eval()


@torch.no_grad()
def rounded(model: Any) -> Any:
    """Weights as a merged model has them; buffers, such as rotary frequencies, stay in float32."""
    for weight in model.parameters():
        weight.copy_(weight.to(torch.bfloat16))
    return model


def write(model: Any, made: Any, folder: Path) -> None:
    """The folder of a merged model."""
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(str(folder))
    made.save_pretrained(str(folder))


def export(folder: Path, made: Any, file: Path, kind: str) -> list[str]:
    """The GGUF file of the model in `folder`, as `finetune export` writes it."""
    from transformers import AutoConfig

    prompt = chat_template.ids(made, [{"role": "user", "content": "Hi"}], prompt=True)
    return gguf_model.write(
        folder, AutoConfig.from_pretrained(folder), made, file, kind,
        starts_with_bos=prompt[0] == made.bos_token_id,
    )  # fmt: skip


# -- what is compared -------------------------------------------------------------------------------------------------


_SIGNS = (
    "'s", "'LL", "  ", "\r\n", "\n\n ", "...", "?!", "1234567", "3.14", "x=1", "东京", "ünï", "Ελλ", "привет", "🎉",
    "👩‍👩‍👧", "ﬁ", "é",
)  # fmt: skip


def strings(count: int) -> list[str]:
    """Strings of many kinds: words, numbers, white space, scripts, signs (in NFC); the same ones each time."""
    draw = random.Random(0)
    page = "\n".join(texts())
    signs = [*_SIGNS, *" \n\t\u00a0a._—"]
    found = []
    for _ in range(count):
        if draw.random() < 0.5:
            start = draw.randrange(len(page) - 100)
            found.append(page[start : start + draw.randrange(1, 100)])
        else:
            found.append("".join(draw.choices(signs, k=draw.randrange(1, 12))))
    return found


def conversations() -> list[list[dict[str, str]]]:
    ask = {"role": "user", "content": "What is\n\n  two and 2?"}
    reply = {"role": "assistant", "content": "Four — 'tis {{ so }}."}
    return [[ask], [ask, reply, ask], [{"role": "system", "content": "Be brief."}, ask]]


def compare(server: Any, model: Any, made: Any, positions: int, count: int) -> dict[str, Any]:
    """What llama.cpp and the transformers model say of the same held-out tokens, strings and conversations."""
    ids = made(texts()[-1], add_special_tokens=False)["input_ids"]
    rows = [ids[start : start + CONTEXT] for start in range(0, len(ids) - CONTEXT, CONTEXT)]
    places = [(row, length) for row in range(len(rows)) for length in range(1, CONTEXT)][:positions]
    with torch.inference_mode():
        logits = [model(input_ids=torch.tensor([row])).logits[0] for row in rows[: places[-1][0] + 1]]
    same = difference = 0.0
    for row, length in places:
        expected = logits[row][length - 1].log_softmax(-1)
        same += server.next_token(rows[row][:length]) == int(expected.argmax())
        for top, log_prob in server.log_probs(rows[row][:length]).items():
            difference = max(difference, abs(log_prob - float(expected[top])))
    prompt = rows[0][:16]
    # The most likely tokens, one after the other.
    made_of = server.post("/completion", prompt=prompt, n_predict=ANSWER_TOKENS, temperature=0.0, return_tokens=True)
    answer = made_of["tokens"]
    with torch.inference_mode():
        generated = model.generate(
            input_ids=torch.tensor([prompt]), attention_mask=torch.ones(1, 16, dtype=torch.long),
            max_new_tokens=ANSWER_TOKENS, do_sample=False, pad_token_id=made.eos_token_id,
            eos_token_id=chat_template.stop_ids(made),
        )[0, 16:].tolist()  # fmt: skip
    wanted = [token for token in generated if token not in chat_template.stop_ids(made)]
    sample = strings(count)
    tokenized = sum(server.tokens(text) == made(text, add_special_tokens=False)["input_ids"] for text in sample)
    rendered = [_prompts(server, made, messages) for messages in conversations()]
    return {
        "positions": len(places),
        "same_top": same / len(places),
        "largest_log_prob_difference": round(difference, 4),
        "answer_tokens": len(wanted),
        "answer_tokens_alike": next(
            (place for place, (a, b) in enumerate(zip(answer, wanted, strict=False)) if a != b), len(wanted)
        ),
        "strings": count,
        "strings_alike": tokenized,
        "conversations": len([pair for pair in rendered if pair]),
        "conversations_alike": sum(pair[0] == pair[1] for pair in rendered if pair),
    }


def _prompts(server: Any, made: Any, messages: list[dict[str, str]]) -> tuple[list[int], list[int]] | None:
    """The tokens of a prompt in llama.cpp and in transformers; None where the template refuses the conversation."""
    try:
        expected = chat_template.ids(made, messages, prompt=True)
    except Exception:  # a template may raise anything
        return None
    prompt = server.post("/apply-template", messages=messages)["prompt"]
    return server.tokens(prompt, opening=True), expected


def main() -> None:
    parser = harness.parser(__doc__, "gguf_in_llama_cpp.json")
    parser.add_argument("--steps", type=int, default=300, help="training steps of each model")
    parser.add_argument("--positions", type=int, default=500)
    parser.add_argument("--strings", type=int, default=1000)
    parser.add_argument("--only", nargs="+", choices=SHAPES, default=list(SHAPES), help="these, beside others' results")
    options = parser.parse_args()
    libraries.quiet()
    torch.set_num_threads(1)
    models: dict[str, Any] = harness.saved(options.output, "models") if len(options.only) < len(SHAPES) else {}
    for name in options.only:
        shape = SHAPES[name]
        made = shape.tokenizer()
        config = architecture(shape, len(made))
        model = train(config, made, options.steps)
        models[name] = {}
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            write(model, made, folder)
            # From here on the model computes what llama.cpp does.
            approximated = gguf_families.family(model.config).approximate(model)
            for kind, bound in BOUNDS.items():
                file = folder / gguf_export.file_name(kind)
                known = export(folder, made, file, kind)
                with llama_cpp.serving(file, 2 * CONTEXT) as server:
                    found = compare(server, model, made, options.positions, options.strings)
                    try:
                        read = gguf_export.load(file, config, torch.float32, torch.device("cpu"))
                    except ArtifactError as error:  # transformers reads GGUF files of fewer families
                        found["transformers_says"] = harness.without_paths(str(error))
                    else:
                        found["same_top_as_transformers_reads_it"] = compare(server, read, made, 100, 1)["same_top"]
                known += [approximated] if approximated else []
                found |= {"bytes": file.stat().st_size, "known_differences": known}
                found["passed"] = (
                    found["same_top"] >= bound
                    and found["strings_alike"] == found["strings"]
                    and found["conversations_alike"] == found["conversations"]
                )
                models[name][kind] = found
                print(name, kind, json.dumps(found), flush=True)
    passed = all(found["passed"] for kinds in models.values() for found in kinds.values())
    versions = {name: metadata.version(name) for name in ("gguf", "xllamacpp")}
    result = {"bounds": BOUNDS, "models": models, "passed": passed, "versions": versions}
    harness.save(options.output, result, threads=1)
    sys.exit(not passed)


if __name__ == "__main__":
    main()
