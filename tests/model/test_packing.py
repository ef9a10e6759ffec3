"""Packed rows: none sees another, whatever the architecture; and a model that lets them is refused."""

import itertools
from typing import Any

import every_architecture
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import refusal
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.data.batching import MicroBatching
from finetune.data.encoded import IGNORE, RowLayout
from finetune.errors import MachineError
from finetune.model.attention import backends, packing, windows
from finetune.model.probes import causality, packed_rows
from finetune.model.structure import sequence_head
from finetune.training.collator import StepCollator

SHARED: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 5},
    "qwen2": {},
    "gemma2": {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 8},
    "gemma3_text": {"head_dim": 8, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "phi3": {},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
}


def model_of(architecture: str, attention: str) -> Any:
    packing.register()
    torch.manual_seed(0)
    config = every_architecture.config(architecture)
    if architecture in ARCHITECTURES:  # with small windows
        config = AutoConfig.for_model(architecture, **SHARED, **ARCHITECTURES[architecture])
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)  # large, so that attention is anything but even
    return model.eval()


def reward_model() -> Any:
    """With a head of a single score, which is not zero."""
    language_model = model_of("llama", packing.EACH)
    config = sequence_head.want(language_model.config, ["reward"])
    model = sequence_head.loader(config)._from_config(config, attn_implementation=packing.EACH)
    model.base_model.load_state_dict(language_model.base_model.state_dict())
    sequence_head.start(model)
    return model.eval()


_OFTEN = {
    ("llama", packing.EACH), ("llama", packing.EAGER), ("mistral", packing.EACH), ("mistral", packing.EAGER),
    ("gemma2", packing.EAGER), ("gemma3_text", packing.EACH), ("qwen3_moe", packing.EACH),
    ("gpt2", packing.EACH),
}  # fmt: skip


@pytest.fixture(scope="module", params=[
    pytest.param(case, marks=() if case in _OFTEN else pytest.mark.long)
    for case in itertools.product(ARCHITECTURES, (packing.EACH, packing.EAGER))
    if case != ("gemma2", packing.EACH)
], ids="-".join)  # fmt: skip
def model(request: pytest.FixtureRequest) -> Any:
    return model_of(*request.param)


def packed(rows: list[list[int]]) -> dict[str, Any]:
    return StepCollator(MicroBatching(1, 1000, packed=True), 0).micro_batch(
        [{"input_ids": row, "labels": row} for row in rows]
    )


ROWS = st.lists(st.lists(st.integers(3, 63), min_size=1, max_size=12), min_size=1, max_size=5)


@pytest.mark.slow
@torch.no_grad()
@settings(max_examples=15)
@given(rows=ROWS)
def test_packed_logits_are_the_rows_own(model: Any, rows: list[list[int]]) -> None:
    inputs = packed(rows)
    del inputs["labels"]
    together = model(**inputs, use_cache=False).logits[0]
    start = 0
    for row in rows:
        alone = model(input_ids=torch.tensor([row]), attention_mask=torch.ones(1, len(row)), use_cache=False).logits[0]
        torch.testing.assert_close(together[start : start + len(row)], alone, rtol=1e-4, atol=1e-4)
        start += len(row)


def answers(prompt: list[int], *each: list[int]) -> dict[str, list[int]]:
    """A row whose segments are answers to one prompt, the answers trained."""
    segments = [[*prompt, *answer] for answer in each]
    labels = [[IGNORE] * len(prompt) + answer for answer in each]
    return {
        "input_ids": list(itertools.chain(*segments)), "labels": list(itertools.chain(*labels)),
        "segments": [*map(len, segments)], "shared": len(prompt) - 1,
    }  # fmt: skip


def sharing(rows: list[dict[str, list[int]]], *, shares: bool = True) -> dict[str, Any]:
    way = MicroBatching(1, 1000, packed=True, layout=RowLayout(("a", "b", "c")), shares=shares)
    inputs = StepCollator(way, 0).micro_batch(rows)
    del inputs["row"]
    return inputs


TOKENS = st.lists(st.integers(3, 63), min_size=1, max_size=9)


@pytest.mark.slow
@settings(max_examples=8)
@given(rows=st.lists(st.tuples(TOKENS, TOKENS, TOKENS, TOKENS), min_size=1, max_size=3))
def test_answers_that_share_a_prompt_have_the_logits_and_gradients_of_whole_sequences(
    model: Any, rows: list[tuple[list[int], ...]]
) -> None:
    made = [answers(*row) for row in rows]
    whole, shared = (sharing(made, shares=shares) for shares in (False, True))
    assert whole["input_ids"].numel() - shared["input_ids"].numel() == sum(2 * row["shared"] for row in made)
    results = []
    for inputs in (whole, shared):
        labels = inputs.pop("labels")[0, 1:]
        logits = model(**inputs, use_cache=False).logits[0, :-1][labels != IGNORE]
        loss = -logits.log_softmax(-1).gather(1, labels[labels != IGNORE][:, None]).sum()
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        results.append([logits.detach(), *torch.autograd.grad(loss, weights)])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max().clamp(min=1e-3)))


def test_answers_longer_than_a_window_and_its_blocks_see_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the first blocks of queries among those of the prompt."""
    monkeypatch.setattr(windows, "BLOCK", 4)
    model = model_of("mistral", packing.EACH)
    row = answers(list(range(3, 17)), list(range(20, 33)), list(range(40, 49)), [50])
    logits = []
    for shares in (False, True):
        inputs = sharing([row], shares=shares)
        trained = inputs.pop("labels")[0] != IGNORE
        logits.append(model(**inputs, use_cache=False).logits[0, trained].detach())
    torch.testing.assert_close(*logits)


@torch.no_grad()
def test_rows_that_are_padded_are_attended_to_as_transformers_does(model: Any) -> None:
    ids = torch.randint(3, 64, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(9)[None] < torch.tensor([9, 4, 7])[:, None]
    plain = "eager" if model.config._attn_implementation == packing.EAGER else "sdpa"
    ours = model(input_ids=ids, attention_mask=mask.long()).logits
    unmasked = model(input_ids=ids).logits
    name = model.config._attn_implementation
    model.set_attn_implementation(plain)
    torch.testing.assert_close(ours[mask], model(input_ids=ids, attention_mask=mask.long()).logits[mask])
    torch.testing.assert_close(unmasked, model(input_ids=ids).logits)
    model.set_attn_implementation(name)


class Watch(torch.overrides.TorchFunctionMode):
    """The sizes of the last two dimensions of all tensors made."""

    def __init__(self) -> None:
        super().__init__()
        self.made: set[tuple[int, ...]] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.made.add(tuple(out.shape[-2:]))
        return out


@torch.no_grad()
def test_no_mask_of_the_whole_row_is_made() -> None:
    inputs = packed([[3] * 20, [4] * 20, [5] * 20])
    with Watch() as watch:
        model_of("mistral", packing.EACH)(**inputs, use_cache=False)
    assert (20, 20) in watch.made, "the window needs a mask for each row"
    assert (60, 60) not in watch.made


def test_generation_is_the_same_with_packed_attention(model: Any) -> None:
    plain = "eager" if model.config._attn_implementation == packing.EAGER else "sdpa"
    name = model.config._attn_implementation
    asked = {"input_ids": torch.tensor([[3, 9, 27, 17, 40, 11, 8]]), "attention_mask": torch.ones(1, 7).long()}
    ours = model.generate(**asked, max_new_tokens=8, do_sample=False)
    model.set_attn_implementation(plain)
    assert torch.equal(ours, model.generate(**asked, max_new_tokens=8, do_sample=False))
    model.set_attn_implementation(name)


def test_the_proof_passes_for_each_architecture(model: Any) -> None:
    was_training = model.training
    packed_rows.prove(model)
    assert packed_rows.prove_shared(model) is None
    assert model.training is was_training


def test_a_model_whose_rows_see_each_other_is_refused() -> None:
    model = model_of("llama", packing.EACH)
    for layer in model.model.layers:
        attend = layer.self_attn.forward
        layer.self_attn.forward = lambda *args, attend=attend, **kwargs: attend(
            *args, **{name: value for name, value in kwargs.items() if name != "cu_seq_lens_q"}
        )
    with refusal(MachineError, "packed rows influence each other"):
        packed_rows.prove(model)


def test_a_single_score_shows_what_rows_see() -> None:
    """Minus its mean over all scores it would be zero, whatever the model does."""
    model = reward_model()
    packed_rows.prove(model)
    causality.prove(model)
    assert packed_rows.prove_shared(model) is None
    forward = model.forward
    model.forward = lambda key_parts=None, **inputs: forward(**inputs)
    assert "its logits then differ by" in str(packed_rows.prove_shared(model))
    model.forward = lambda cu_seq_lens_q=None, **inputs: forward(**inputs)
    with refusal(MachineError, "packed rows influence each other"):
        packed_rows.prove(model)


def test_a_model_whose_answers_do_not_see_a_shared_prompt_is_found() -> None:
    model = model_of("llama", packing.EACH)
    plain = model.forward
    model.forward = lambda key_parts=None, **inputs: plain(**inputs)
    assert "its logits then differ by" in str(packed_rows.prove_shared(model))
    model.forward = lambda use_cache, input_ids, position_ids, cu_seq_lens_q, cu_seq_lens_k, **lengths: None
    assert "that fails (AttributeError" in str(packed_rows.prove_shared(model))


def test_a_model_that_takes_no_packed_rows_is_refused() -> None:
    model = model_of("llama", packing.EACH)
    forward = model.forward
    model.forward = lambda input_ids, position_ids, use_cache: forward(input_ids, position_ids=position_ids)
    with refusal(MachineError, "micro_batch_tokens"):
        packed_rows.prove(model)


def in_torch_2_11(
    query: Any, key: Any, value: Any, starts: Any, key_starts: Any, longest: int, longest_key: int, *,
    scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
) -> Any:  # fmt: skip
    """What `torch.nn.attention.varlen.varlen_attn` promises, row by row on a CPU. (tokens, heads, head size).

    The last query of a row is at its last key, as in FlashAttention-2 from 2.1 on.
    """
    assert window_size[1] == 0, "causal"
    assert (longest, longest_key) == (int(starts.diff().max()), int(key_starts.diff().max()))
    groups = query.shape[1] // key.shape[1]
    outputs = []
    lengths, key_lengths = starts.diff().tolist(), key_starts.diff().tolist()
    parts = zip(
        query.split(lengths), *(part.repeat_interleave(groups, 1).split(key_lengths) for part in (key, value)),
        strict=True,
    )  # fmt: skip
    for row in parts:
        row_query, row_key, row_value = (part.transpose(0, 1).float() for part in row)
        keys = torch.arange(row_key.shape[1])
        behind = keys[-row_query.shape[1] :, None] - keys[None, :]
        hidden = (behind < 0) | ((behind > window_size[0]) if window_size[0] >= 0 else False)
        scores = (row_query @ row_key.transpose(1, 2) * scale).masked_fill(hidden, -torch.inf)
        outputs.append((scores.softmax(-1) @ row_value).transpose(0, 1))
    return torch.cat(outputs).to(query.dtype)


def in_torch_2_13(*tensors: Any, enable_gqa: bool = False, **options: Any) -> Any:
    """The same, which takes heads that share keys only where it is asked to."""
    assert enable_gqa == (tensors[0].shape[1] != tensors[1].shape[1])
    return in_torch_2_11(*tensors, **options)


@torch.no_grad()
def test_the_variable_length_kernel_gets_the_arguments_of_each_torch_version(
    monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    for varlen_attn in [in_torch_2_11, in_torch_2_13]:
        for architecture in ["llama", "mistral", "phi3"]:
            with subtests.test(varlen_attn=varlen_attn, architecture=architecture):
                monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
                for inputs in (
                    packed([[3, 9, 27], [5, 17, 40, 11, 8, 6, 33], [12]]),
                    sharing([answers([3, 9, 27, 8], [5, 17, 40], [11], [8, 6, 33, 4])]),
                ):
                    del inputs["labels"]
                    # The kernel computes in 16 bit.
                    found = model_of(architecture, packing.VARLEN).bfloat16()(**inputs, use_cache=False).logits.float()
                    expected = model_of(architecture, packing.EACH).bfloat16()(**inputs, use_cache=False).logits.float()
                    assert float((found - expected).norm() / expected.norm()) < 4 * 2.0**-7


@torch.no_grad()
def test_flash_attention_gets_the_keys_of_a_shared_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers calls flash-attn: (1, tokens, heads, head size), with lengths of queries and of keys."""

    def flash(query: Any, key: Any, value: Any, mask: Any, *, softmax_scale: float, **options: Any) -> Any:
        assert (mask, options["is_causal"]) == (None, True)
        named = [options[f"{name}_{of}"] for name in ("cu_seq_lens", "max_length") for of in "qk"]
        return in_torch_2_11(query[0], key[0], value[0], *named, scale=softmax_scale, window_size=(-1, 0))[None]

    monkeypatch.setattr("transformers.integrations.flash_attention._flash_attention_forward", flash)
    model = model_of("llama", packing.EACH)
    inputs = sharing([answers([3, 9, 27, 8], [5, 17, 40], [11], [8, 6, 33, 4])])
    del inputs["labels"]
    expected = model(**inputs, use_cache=False).logits
    model.config._attn_implementation = "flash_attention_2"
    torch.testing.assert_close(model(**inputs, use_cache=False).logits, expected)


def test_each_attention_has_a_variant_for_packed_rows(subtests: pytest.Subtests) -> None:
    config = AutoConfig.for_model("llama", **SHARED)
    for implementation, packed in [
        ("sdpa", packing.VARLEN), ("eager", packing.EAGER), ("flash_attention_2", "flash_attention_2"),
        ("flex_attention", "flex_attention"),
    ]:  # fmt: skip
        with subtests.test(implementation=implementation):
            assert packing.variant(implementation, config, varlen=True) == packed
    assert packing.variant("sdpa", config, varlen=False) == packing.EACH


def test_a_gpu_without_flash_kernel_takes_packed_and_windowed_rows_one_by_one(
    monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    """PyTorch's variable-length kernel is the flash kernel, which exists from compute capability 8 on."""
    mistral = AutoConfig.for_model("mistral", sliding_window=4, **SHARED)
    for capability, precision, varlen in [
        ((7, 5), "fp16", False), ((8, 0), "fp16", True), ((8, 0), "bf16", True), ((12, 0), "bf16", True),
        ((9, 0), "fp32", False),
    ]:  # fmt: skip
        with subtests.test(capability=capability, precision=precision):
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
            for rows in ({"packed": True}, {"longest": 100}):
                chosen, _ = backends.choose("sdpa", mistral, "cuda", precision, **rows)
                planned = backends.planned("sdpa", mistral, "cuda", precision, capability=capability, **rows)
                assert chosen == planned
                assert chosen.endswith("varlen") is varlen


# Models that have their attention in a table of their own, and one that has no implementation but its own.
SMALL = ("falcon", "gpt_neo", "bloom")


def test_a_model_with_a_table_of_its_own_is_refused_before_it_is_built(subtests: pytest.Subtests) -> None:
    for architecture in SMALL[:2]:
        with subtests.test(architecture=architecture):
            config = every_architecture.config(architecture)
            for decide in (backends.choose, backends.planned):
                with refusal(MachineError, "`data.packing`", architecture):
                    decide("auto", config, "cpu", "fp32", packed=True)


def test_the_attention_that_is_chosen_by_itself_is_one_that_the_model_has(subtests: pytest.Subtests) -> None:
    for architecture in SMALL:
        with subtests.test(architecture=architecture):
            config = every_architecture.config(architecture)
            implementation, reason = backends.choose("auto", config, "cpu", "fp32")
            model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
            assert model(torch.tensor([[1, 2, 3]])).logits.shape[:2] == (1, 3)
            assert ("this model has no SDPA" in reason) == (implementation == "eager")
            assert backends.planned("auto", config, "cpu", "fp32") == implementation


def test_a_model_that_fails_on_packed_rows_in_a_way_of_its_own_is_refused() -> None:
    class Own(torch.nn.Module):
        config = AutoConfig.for_model("llama", **SHARED)
        device = torch.device("cpu")

        def forward(self, **_: Any) -> None:
            raise KeyError("attention_mask")

    with refusal(MachineError, "`data.packing`", "attention_mask"):
        packed_rows.prove(Own())
