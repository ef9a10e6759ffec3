"""A tokenizer as llama.cpp describes one: the `tokenizer.*` keys of a GGUF file.

llama.cpp has tokenizers of its own and takes only tables from the file. Three of them cover the models known here:
`gpt2`, a byte-level BPE whose pre-tokenizer is one of a fixed list of names, `llama`, the BPE of SentencePiece, which
merges by the score of the merged token, and `gemma4`, a BPE of whole lines by a list of merges. Everything is read from
the rules of the fast tokenizer (its tokenizer.json), so a retrained tokenizer is exported as well as a known one. What
llama.cpp would tokenize differently is refused or reported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator
from typing import Any

from finetune.errors import ConfigError
from finetune.model.source import chat_template

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_QWEN35 = (
    rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_END = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}{_END}"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SHORT}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SHORT}?|"
    rf"\p{{N}}{{1,3}}{_END}"
)

# llama.cpp's name of a pre-tokenizer, by the expressions that split the text one after another (src/llama-vocab.cpp).
_PRE = {
    (_GPT2,): "gpt-2",
    (r"\p{N}", _GPT2): "smollm",
    (_WORDS + r"\p{N}" + _REST,): "qwen2",
    (_WORDS + r"\p{N}{1,3}" + _REST,): "dbrx",
    (_QWEN35,): "qwen35",
    (_TEKKEN,): "tekken",
    (_O200K,): "gpt-4o",
}
# Names of those that take whole words from the vocabulary before they merge.
_IGNORING_MERGES = {"dbrx": "llama-bpe", "tekken": "tekken"}
# Pre-tokenizers whose expressions llama.cpp writes without \p{M}.
_SPLITTING_MARKS = ("tekken", "gpt-4o")

SPACES_AFTER_SPECIAL = "llama.cpp puts a space before text after each special token; this tokenizer only at the start"
"""The difference that shows in every conversation."""

# Share of the possible merges that a SentencePiece vocabulary may lack: those of oddities, where one trained as another
# kind of BPE lacks most.
_MISSING_MERGES = 0.05


def add(writer: Any, tokenizer: Any, size: int, *, starts_with_bos: bool, end_of_turn: int | None) -> list[str]:
    """Add the vocabulary of `tokenizer`, padded to `size` tokens, its special tokens and its chat template.

    `starts_with_bos`: whether prompts began with the BOS token in training. Returns, as sentences, where llama.cpp
    tokenizes text differently. Raises ConfigError for a tokenizer that llama.cpp lacks.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError("this tokenizer has no tokenizer.json, from which a GGUF file's vocabulary is written")
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    if rules["model"]["type"] != "BPE":
        raise _unknown(f"is a {rules['model']['type']} model")
    if max(tokenizer.get_vocab().values()) >= size:
        raise ConfigError(f"the tokenizer has tokens beyond the {size:,} embeddings of the model; resize them first")
    splits = list(_flat(rules["pre_tokenizer"], "pretokenizers"))
    byte_level = any(one["type"] == "ByteLevel" for one in splits)
    differences = (_byte_level if byte_level else _sentencepiece)(writer, tokenizer, rules, size)

    named = {
        "bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id, "unk": tokenizer.unk_token_id,
        "pad": tokenizer.pad_token_id, "eot": end_of_turn,
    }  # fmt: skip
    for name, token in named.items():
        if token is not None:
            getattr(writer, f"add_{name}_token_id")(token)
    writer.add_add_bos_token(starts_with_bos)
    writer.add_add_eos_token(False)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(chat_template.without_generation_marks(tokenizer.chat_template))
    return differences


def _byte_level(writer: Any, tokenizer: Any, rules: dict[str, Any], size: int) -> list[str]:
    kinds = {one["type"] for one in _flat(rules["normalizer"], "normalizers")}
    if kinds - {"NFC"}:
        raise _unknown(f"normalizes text by {', '.join(sorted(kinds))}")
    writer.add_tokenizer_model("gpt2")
    pre = _pre_tokenizer(rules)
    writer.add_tokenizer_pre(pre)
    tokens, types = _tokens(tokenizer, size, lambda token: token)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(pair) for pair in _merges(rules)])
    composed = "llama.cpp does not compose characters (NFC) before it tokenizes them, as this tokenizer does"
    marks = "llama.cpp splits words at combining marks, which this tokenizer keeps in them"
    return [composed] * bool(kinds) + [marks] * (pre in _SPLITTING_MARKS)


def _pre_tokenizer(rules: dict[str, Any]) -> str:
    splits = tuple(_expressions(rules["pre_tokenizer"]))
    # A line break split off first changes nothing if no token holds one beside other characters.
    if splits[:1] == ("\n",) and not any("Ċ" in token and len(token) > 1 for token in rules["model"]["vocab"]):
        splits = splits[1:]
    if splits not in _PRE:
        raise _unknown("splits text into words in its own way")
    name, ignores = _PRE[splits], bool(rules["model"].get("ignore_merges"))
    name = _IGNORING_MERGES.get(name, name) if ignores else name
    if ignores != (name in _IGNORING_MERGES.values()):
        from tokenizers import models

        # Taking whole words first makes no difference where the merges build every token from its bytes.
        made = models.BPE(rules["model"]["vocab"], _merges(rules))
        added = {one["content"] for one in rules["added_tokens"]}
        if any(len(made.tokenize(token)) != 1 for token in rules["model"]["vocab"].keys() - added):
            raise _unknown(f"{'takes' if ignores else 'does not take'} whole words before it merges")
    return name


def _expressions(pre_tokenizer: dict[str, Any]) -> Iterator[str]:
    for one in _flat(pre_tokenizer, "pretokenizers"):
        match one:
            case {"type": "Split", "pattern": pattern, "behavior": behavior, "invert": invert}:
                if (behavior, invert) not in (("Isolated", False), ("Removed", True)):
                    raise _unknown("drops or joins what it splits")
                yield pattern.get("Regex", pattern.get("String"))
            case {"type": "Digits", "individual_digits": True}:
                yield r"\p{N}"
            case {"type": "ByteLevel", "add_prefix_space": False}:
                if one.get("use_regex", True):
                    yield _GPT2
            case _:
                raise _unknown(f"splits text by {one['type']}")


def _sentencepiece(writer: Any, tokenizer: Any, rules: dict[str, Any], size: int) -> list[str]:
    prefix, differences = _prefix(rules)
    if not rules["model"].get("byte_fallback"):
        raise _unknown("has no tokens for single bytes")
    merges = _merges(rules)
    vocabulary = rules["model"]["vocab"]
    merges_all = _merges_all(merges, vocabulary)
    breaks = any("\n" in token and token.strip("\n") for token in vocabulary)
    if not merges_all and (prefix or breaks):
        raise _unknown("merges only some of the pairs that make a token, where SentencePiece merges all")
    # The earlier a token is merged, the higher its score; all ways to merge it share the rank of the first.
    scores: dict[str, float] = {}
    for rank, pair in enumerate(merges):
        scores.setdefault("".join(pair), float(-rank))
    tokens, types = _tokens(tokenizer, size, lambda token: token.replace("▁", " "))
    for token, token_id in vocabulary.items():
        if types[token_id] == _NORMAL and re.fullmatch("<0x[0-9A-F]{2}>", token):
            types[token_id] = _BYTE
    if tokenizer.unk_token_id is not None:
        types[tokenizer.unk_token_id] = _UNKNOWN
    if merges_all:
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
    else:
        writer.add_tokenizer_model("gemma4")
        writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_token_list(tokens)
    writer.add_token_scores([scores.get(token, _NEVER) for token in tokens])
    writer.add_token_types(types)
    writer.add_add_space_prefix(prefix)
    return differences


def _merges_all(merges: list[tuple[str, str]], vocabulary: Collection[str]) -> bool:
    """Whether nearly all pairs of tokens that make a merged token are merges, as in a vocabulary of SentencePiece."""
    known = set(merges)
    possible = [
        (token[:cut], token[cut:])
        for token in {"".join(pair) for pair in merges}
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    return sum(pair not in known for pair in possible) <= _MISSING_MERGES * len(possible)


def _prefix(rules: dict[str, Any]) -> tuple[bool, list[str]]:
    """Whether a space is put before text, and the differences of llama.cpp in this."""
    prefix, first = False, False
    for one in _flat(rules["normalizer"], "normalizers"):
        match one:
            case {"type": "Prepend", "prepend": "▁"}:
                prefix = True
            case {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}:
                pass
            case _:
                raise _unknown(f"normalizes text by {one['type']}")
    for one in _flat(rules["pre_tokenizer"], "pretokenizers"):
        match one:
            case {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme}:
                prefix, first = scheme != "never", scheme == "first"
            case {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious"}:
                pass  # finds nothing: each space is a ▁ by now
            case _:
                raise _unknown(f"splits text by {one['type']}")
    return prefix, [SPACES_AFTER_SPECIAL] * first


# Types of a token (ggml-org/llama.cpp, include/llama.h, llama_token_type).
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_NEVER = -1e9


def _tokens(tokenizer: Any, size: int, user_defined: Callable[[str], str]) -> tuple[list[str], list[int]]:
    """The text and type of each id; `user_defined` turns an added token into raw text."""
    tokens, types = [f"[PAD{token_id}]" for token_id in range(size)], [_UNUSED] * size
    for token, token_id in tokenizer.get_vocab().items():
        tokens[token_id], types[token_id] = token, _NORMAL
    for token_id, added in tokenizer.added_tokens_decoder.items():
        types[token_id] = _CONTROL if added.special else _USER_DEFINED
        tokens[token_id] = added.content if added.special else user_defined(added.content)
    return tokens, types


def _merges(rules: dict[str, Any]) -> list[tuple[str, str]]:
    return [tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in rules["model"]["merges"]]


def _flat(part: dict[str, Any] | None, key: str) -> Iterator[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, sequences flattened."""
    if part and part["type"] == "Sequence":
        for one in part[key]:
            yield from _flat(one, key)
    elif part:
        yield part


def _unknown(why: str) -> ConfigError:
    return ConfigError(
        f"llama.cpp has no tokenizer like this model's, which {why}; export `merged` instead, for transformers, vLLM "
        "and SGLang"
    )
