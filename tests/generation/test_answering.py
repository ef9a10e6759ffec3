"""Facts about answers: the batch, the padding and the KV cache change none, and people see each as it is made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import OLD_TORCH, lacks
from messages import refusal, reported
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3TextConfig, OPTConfig, RwkvConfig

import finetune
from finetune.errors import ConfigError, MachineError
from finetune.generation import answering
from finetune.generation.answering import PromptTooLong, answers, stream
from finetune.generation.settings import Settings

SETTINGS = Settings(max_new_tokens=12, batch_size=4)
QUESTION = "What does the function in this module return when its list is empty, and why is that so?"


@pytest.fixture(scope="module")
def tokenizer(shallow_base: Path) -> Any:
    return AutoTokenizer.from_pretrained(shallow_base)


@pytest.fixture(scope="module")
def model(shallow_base: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(shallow_base, dtype=torch.float32)


@pytest.fixture(scope="module")
def prompts(tokenizer: Any) -> list[list[int]]:
    """Ten prompts of other lengths, the longest in the middle."""
    return [tokenizer(QUESTION[at:]).input_ids for at in (47, 15, 63, 38, 5, 0, 27, 75, 10, 58)]


@pytest.fixture(scope="module")
def alone(model: Any, tokenizer: Any, prompts: list[list[int]]) -> list[answering.Answer]:
    return [next(answers(model, tokenizer, [prompt], SETTINGS)) for prompt in prompts]


def small(config: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


def test_a_batch_gives_each_prompt_the_answer_it_gets_alone_in_the_order_of_the_prompts(
    model: Any, tokenizer: Any, prompts: list[list[int]], alone: list[answering.Answer]
) -> None:
    assert len({one.text for one in alone}) > 5
    assert list(answers(model, tokenizer, prompts, SETTINGS)) == alone
    assert list(answers(model, tokenizer, prompts, replace(SETTINGS, batch_size=64))) == alone


def test_a_model_whose_rows_are_not_independent_gets_one_prompt_at_a_time(
    tokenizer: Any, prompts: list[list[int]]
) -> None:
    # RWKV reads padding into its state, and the rows of a batch into each other.
    model = small(RwkvConfig(vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, attention_hidden_size=32))
    few = prompts[:3] * 2
    settings = replace(SETTINGS, max_new_tokens=4, batch_size=8)
    assert list(answers(model, tokenizer, few, settings)) == [
        next(answers(model, tokenizer, [prompt], settings)) for prompt in few
    ]


def test_a_long_prompt_does_not_shorten_other_answers_at_the_end_of_a_position_table(
    tokenizer: Any, prompts: list[list[int]]
) -> None:
    longest = max(map(len, prompts))
    table = OPTConfig(
        vocab_size=len(tokenizer), hidden_size=32, word_embed_proj_dim=32, ffn_dim=32, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=longest + 3,
    )  # fmt: skip
    model = small(table)
    found = list(answers(model, tokenizer, prompts, SETTINGS))
    assert [len(prompt) + one.tokens for prompt, one in zip(prompts, found, strict=True) if not one.ended]
    assert found == [next(answers(model, tokenizer, [prompt], SETTINGS)) for prompt in prompts]
    with refusal(PromptTooLong, longest + 3):
        answers(model, tokenizer, [prompts[0], [5] * (longest + 3)], SETTINGS)


def test_a_prompt_with_a_token_that_has_no_embedding_is_refused(model: Any, tokenizer: Any, monkeypatch) -> None:
    size = model.config.vocab_size
    monkeypatch.setattr(tokenizer, "convert_ids_to_tokens", {size: "<image>"}.get)
    with refusal(ConfigError, size):
        answers(model, tokenizer, [[5], [5, size, 5]], SETTINGS)


def test_a_stop_text_ends_an_answer_and_is_removed(
    model: Any, tokenizer: Any, prompts: list[list[int]], alone: list[answering.Answer]
) -> None:
    words = alone[0].text.split()
    stop = " ".join(words[2:4])
    settings = replace(SETTINGS, stop=(stop, "never said"))
    found = list(answers(model, tokenizer, prompts, settings))
    assert found[0].text == alone[0].text[: alone[0].text.index(stop)].strip()
    assert found[0].ended
    assert 0 < found[0].tokens < alone[0].tokens
    assert found == [next(answers(model, tokenizer, [prompt], settings)) for prompt in prompts]


def test_streamed_pieces_make_the_answer(
    model: Any, tokenizer: Any, prompts: list[list[int]], alone: list[answering.Answer]
) -> None:
    for stop in ((), (alone[0].text.split()[-1],)):
        settings, pieces = replace(SETTINGS, stop=stop), []
        whole = stream(model, tokenizer, prompts[0], settings, pieces.append)
        assert whole == next(answers(model, tokenizer, prompts[:1], settings))
        assert "".join(pieces) == whole.text
        assert len(pieces) > 1


def test_sampled_answers_follow_their_seed_and_leave_the_random_numbers_of_the_process_alone(
    model: Any, tokenizer: Any, prompts: list[list[int]], alone: list[answering.Answer]
) -> None:
    warm = replace(SETTINGS, temperature=1.5, top_p=0.95, min_p=0.01)
    before = torch.get_rng_state()
    first, again, other = (list(answers(model, tokenizer, prompts[:3], replace(warm, seed=seed))) for seed in (1, 1, 2))
    assert first == again != other
    assert torch.equal(torch.get_rng_state(), before)
    # Of one candidate, the most likely is drawn.
    assert list(answers(model, tokenizer, prompts, replace(warm, top_k=1))) == alone


def test_settings_of_the_base_itself_do_not_apply(
    model: Any, tokenizer: Any, prompts: list[list[int]], alone: list[answering.Answer], monkeypatch: Any
) -> None:
    for key, value in {"repetition_penalty": 5.0, "do_sample": True, "top_k": 3, "temperature": 9.0}.items():
        monkeypatch.setattr(model.generation_config, key, value)
    assert list(answers(model, tokenizer, prompts, SETTINGS)) == alone


def test_a_batch_that_runs_out_of_memory_is_halved(
    model: Any, tokenizer: Any, prompts: list[list[int]], alone: list[answering.Answer], monkeypatch: Any
) -> None:
    generate, sizes = type(model).generate, []

    def small_memory(self: Any, input_ids: torch.Tensor, **rest: Any) -> Any:
        sizes.append(len(input_ids))
        if len(input_ids) > 3:
            raise torch.OutOfMemoryError("no memory left")
        return generate(self, input_ids=input_ids, **rest)

    monkeypatch.setattr(type(model), "generate", small_memory)
    assert list(answers(model, tokenizer, prompts, replace(SETTINGS, batch_size=8))) == alone
    assert max(sizes) == 8


def test_all_invalid_settings_are_reported_at_once() -> None:
    with refusal(ConfigError, "`temperature`", "`top_p`", "`stop`"):
        Settings(temperature=-1, top_p=0, stop=("",))


def test_answers_arrive_batch_by_batch(model: Any, tokenizer: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(answering, "_SORTED_TOGETHER", 1)
    made: list[int] = []
    found: Iterator[answering.Answer] = answers(
        model, tokenizer, [[5, 6]] * 4, replace(SETTINGS, batch_size=2, max_new_tokens=1), made.append
    )
    next(found)
    assert len(made) == 1


@pytest.mark.parametrize("cache", ["static", "offloaded"])
def test_another_kv_cache_gives_the_same_answers(
    cache: str, model: Any, tokenizer: Any, prompts: list[list[int]], alone: list[answering.Answer]
) -> None:
    assert list(answers(model, tokenizer, prompts, replace(SETTINGS, cache=cache))) == alone


@lacks(reason="8-bit floats of torch 2.11 have NaN for large numbers")
def test_a_quantized_kv_cache_is_smaller_and_its_answers_nearly_the_same(
    model: Any, tokenizer: Any, prompts: list[list[int]], alone: list[answering.Answer]
) -> None:
    sizes: dict[str, list[int]] = {"dynamic": [], "quantized": []}
    for cache, found in sizes.items():
        last = list(answers(model, tokenizer, prompts, replace(SETTINGS, cache=cache), found.append))
    assert all(small < 0.3 * whole for small, whole in zip(*reversed(sizes.values()), strict=True))
    assert sum(one.text[:10] == other.text[:10] for one, other in zip(last, alone, strict=True)) > 5


def test_layers_with_windows_keep_no_more_than_those_whatever_the_cache(tokenizer: Any) -> None:
    config = Gemma3TextConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, sliding_window=16, layer_types=["sliding_attention", "full_attention"] * 2,
    )  # fmt: skip
    model, sizes = small(config), []
    prompt = [[5 + at % 90 for at in range(60)]]
    found = [
        list(answers(model, tokenizer, prompt, replace(SETTINGS, cache=cache), sizes.append))
        for cache in ("dynamic", "static", "sliding")
    ]
    assert found[0] == found[1] == found[2]
    a_token = 2 * 16 * 4  # keys and values of one head
    assert all(2 * a_token * (71 + 15) <= size <= 2 * a_token * (72 + 16) + 99 for size in sizes)
    with refusal(MachineError if OLD_TORCH else ConfigError, "quantized KV cache"):
        answers(model, tokenizer, prompt, replace(SETTINGS, cache="quantized"))


@pytest.mark.slow
def test_a_model_that_trains_but_cannot_generate_is_trained_without_sample_answers(
    quick: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("no cache of this kind")

    monkeypatch.setattr(answering, "answers", broken)
    run = finetune.train(quick()).run
    assert run.finished
    assert not run.answers()
    reported(capsys.readouterr().out, "no sample answers", "LlamaForCausalLM")
