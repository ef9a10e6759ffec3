"""Every attribute of a library that finetune replaces, with the reason: `docs/patches.md` is made from this table.

An attribute is replaced only through its entry: `with patches.IS_TRACING.by(function): ...` in a block, or
`undo = patches.MODULE_FORWARD.put(function, module)` for longer. `tests/runtime/test_patches.py` checks that each
target exists in the installed version and has the signature that its replacement was written for; `tests/test_house.py`
checks that nothing is replaced without an entry.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

_ABSENT = object()


@dataclass(frozen=True)
class Patch:
    """One replaced attribute.

    `target`: module, colon, attribute path. `read_at`: libraries and the versions they were read at. `signature`: as
    the test of the registry reads it, one for each form that the allowed versions have. `until`: what makes the patch
    unnecessary. `objects`: whose attribute is replaced, if it is that of objects or classes given at run time; `target`
    is then one example.
    """

    target: str
    read_at: str
    signature: str | tuple[str, ...]
    why: str
    until: str
    objects: str = ""

    @property
    def attribute(self) -> str:
        """The name of the replaced attribute."""
        return self.target.rpartition(":")[2].rpartition(".")[2]

    def owner(self) -> Any:
        """The module or class of `target`; imports it."""
        module, _, path = self.target.partition(":")
        owner = importlib.import_module(module)
        for name in path.split(".")[:-1]:
            owner = getattr(owner, name)
        return owner

    @property
    def value(self) -> Any:
        """The current value of `target`, replaced or not."""
        return getattr(self.owner(), self.attribute)

    @contextlib.contextmanager
    def by(self, value: Any, owner: Any = None) -> Iterator[None]:
        """In the block, replace the attribute by `value`; `owner` is one of `objects`."""
        undo = self.put(value, owner)
        try:
            yield
        finally:
            undo()

    def put(self, value: Any, owner: Any = None) -> Callable[[], None]:
        """Replace the attribute by `value`, and return a function that restores it.

        `owner` is one of `objects`, which a class for a value becomes its class.
        """
        assert (owner is not None) == bool(self.objects), self.target
        name = "__class__" if self.objects and inspect.isclass(value) else self.attribute
        owner = self.owner() if owner is None else owner
        before = vars(owner).get(name, _ABSENT)
        if name == "__class__" or isinstance(getattr(type(owner), name, None), property):
            before = getattr(owner, name)
        setattr(owner, name, value)

        def undo() -> None:
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

        return undo

    @contextlib.contextmanager
    def in_table(self, table: Any, key: str, value: Any) -> Iterator[None]:
        """In the block, put `value` before the functions that a library's table has for `key`."""
        table[key] = value
        try:
            yield
        finally:
            del table[key]

    def kernels(self, dispatch_key: str = "") -> Any:
        """A torch library in whose lifetime kernels of the target's operators are replaced."""
        import torch

        return torch.library.Library(self.target.split(":ops.")[1].split(".")[0], "IMPL", dispatch_key)


_FAKE_CUDA = "CUDA tensors can be fake on a machine without CUDA."
_FAKE_STATE = "a fake mode covers the generator's state."
_FAKE_4BIT = "bitsandbytes' parameters can be fake."
_SWITCH = "it can be switched off."


# -- torch -------------------------------------------------------------------------------------------------------------

COMPILE = Patch(
    "torch:compile",
    "torch 2.15",
    (
        "(model=..., *, fullgraph=..., dynamic=..., backend=..., mode=..., options=..., disable=...)",
        "(model=..., *, fullgraph=..., dynamic=..., backend=..., mode=..., options=..., name=..., disable=..., "
        "recompile_limit=...)",
        "(model=..., *, fullgraph=..., dynamic=..., backend=..., mode=..., options=..., name=..., disable=..., "
        "recompile_limit=..., isolate_recompiles=..., shapes_spec=...)",
        "(model=..., *, fullgraph=..., dynamic=..., backend=..., mode=..., options=..., name=..., disable=..., "
        "recompile_limit=..., isolate_recompiles=..., dynamic_shapes=...)",
    ),
    "On import bitsandbytes compiles kernels of its slowest backend, which loads inductor for a second.",
    "bitsandbytes compiles at the first call.",
)
GET_RNG_STATE = Patch(
    "torch:get_rng_state",
    "torch 2.15",
    "()",
    "A trace counts the generator states that recomputation saves for each layer.",
    _FAKE_STATE,
)
SET_RNG_STATE = Patch(
    "torch:set_rng_state",
    "torch 2.15",
    "(new_state)",
    "A trace would give it the fake tensors of `get_rng_state`.",
    _FAKE_STATE,
)
TENSOR = Patch(
    "torch:tensor",
    "torch 2.15",
    "built in",
    "A list with fake tensors of one element is made a tensor of the numbers that a trace knows of them.",
    "torch reads a fake tensor's number as `item` does.",
)
FAKE_LIST = Patch(
    "torch._subclasses.fake_tensor:FakeTensor.tolist",
    "torch 2.15",
    "(self)",
    "The values that a trace knows of a fake tensor are listed at once, not number by number.",
    "it lists known values.",
)
IS_AUTOCAST_ENABLED = Patch(
    "torch:is_autocast_enabled",
    "torch 2.15",
    "built in",
    "Without an argument it answers for CUDA; a trace of CUDA runs under the CPU's autocast.",
    _FAKE_CUDA,
)
FOREACH_CLIPPING = Patch(
    "torch.nn.utils.clip_grad:_has_foreach_support",
    "torch 2.15",
    "(tensors, device)",
    "On CUDA all gradients are clipped at once; a trace on CPU tensors must do so too.",
    _FAKE_CUDA,
)
STORAGE_RESIZE = Patch(
    "torch:UntypedStorage.resize_",
    "torch 2.15",
    ("built in", "(self, object, /)"),  # Python 3.13 reads the second
    "FSDP2 allocates gathered weights by resizing storages, which a dispatch mode does not see.",
    "resizing a storage is an operator.",
)
FUNCTIONAL_LINEAR = Patch(
    "torch.nn.functional:linear",
    "torch 2.15, deepspeed 0.19",
    "built in",
    "DeepSpeed replaces it for the whole process; it is restored at the end, and traced alike.",
    "DeepSpeed restores it.",
)
MODULE_FORWARD = Patch(
    "torch.nn:Module.forward",
    "torch 2.15",
    "(self, *input)",
    "Kernels, and comparisons of exports, compute a module in another way; for PEFT, hooks and checkpoints it stays.",
    "never: it is how kernels are attached.",
    objects="modules and layers that are fused, compiled, rounded or multiplied in parts",
)
LAYER_CLASS = Patch(
    "torch.nn:Linear.weight",
    "torch 2.15",
    "of instances",
    "`weight` becomes a property, to see whether code reads it without calling the layer.",
    "torch has hooks on reading a parameter.",
    objects="linear layers during a probe",
)
AUTOCAST_KERNELS = Patch(
    "torch:ops.aten.pow.Tensor_Scalar",
    "torch 2.15",
    "aten::pow.Tensor_Scalar(Tensor self, Scalar exponent) -> Tensor",
    "CUDA's autocast computes some operators in float32 that the CPU's leaves in 16 bit.",
    _FAKE_CUDA,
    objects="operators listed in `forecast/autocast.py`",
)

# -- transformers ------------------------------------------------------------------------------------------------------

IS_TRACING = Patch(
    "transformers.masking_utils:is_tracing",
    "transformers 5.24",
    "(tensor=...)",
    "A probe needs masks that do not depend on data; a trace, which passes for a graph, those of a step.",
    "mask creation has an argument for it.",
)
PACKED_INDICES = Patch(
    "transformers.masking_utils:find_packed_sequence_indices",
    "transformers 5.24",
    "(position_ids)",
    "It compares positions on the device, which synchronises, and sees only the rank's part of a row.",
    "mask creation takes the row boundaries (`cu_seq_lens_q`).",
)
PACKED_SEQUENCE = Patch(
    "transformers.modeling_flash_attention_utils:_is_packed_sequence",
    "transformers 5.24",
    "(position_ids, batch_size)",
    "For one row it reads positions from the device in each layer; packed rows bring their boundaries.",
    "it is called once a pass.",
)
QUANTIZERS = Patch(
    "transformers.quantizers.auto:AUTO_QUANTIZER_MAPPING",
    "transformers 5.24",
    "dict",
    "Ours quantize experts, but no routers; `register_quantizer` refuses a name that exists.",
    "transformers quantizes experts to 4 bit, or allows a quantizer to be replaced.",
)
QUANTIZATION_CONFIGS = Patch(
    "transformers.quantizers.auto:AUTO_QUANTIZATION_CONFIG_MAPPING",
    "transformers 5.24",
    "dict",
    "The config of NVFP4 there says neither which modules files leave in 16 bit nor whether to dequantize.",
    "transformers loads files in NVFP4.",
)
CHECKPOINT_FILES = Patch(
    "transformers.modeling_utils:_get_resolved_checkpoint_files",
    "transformers 5.24",
    "(pretrained_model_name_or_path, variant, gguf_file, use_safetensors, user_agent, is_remote_code, "
    "transformers_explicit_filename=..., download_kwargs=..., tqdm_class=...)",
    "Located weight files are checked before they are read; an index may name pickles.",
    "there is a hook between, or `use_safetensors` covers an index's files.",
)
SET_PARAMETER = Patch(
    "transformers.core_model_loading:set_param_for_module",
    "transformers 5.24",
    "(model, target_name, param_value, loading_info, hf_quantizer)",
    "A rank keeps only its shard of each weight as it is loaded.",
    "there is a hook after a weight is loaded.",
)
LOADING_WARMUP = Patch(
    "transformers.modeling_utils:caching_allocator_warmup",
    "transformers 5.24",
    "(model, expanded_device_map, hf_quantizer)",
    "It would reserve memory for the whole model on each rank.",
    _SWITCH,
)
BALANCING_LOSS = Patch(
    "transformers.models.mixtral.modeling_mixtral:load_balancing_loss_func",
    "transformers 5.24",
    "(gate_logits, num_experts=..., top_k=..., attention_mask=...)",
    "With context parallelism the loss takes the tokens of all ranks.",
    "transformers computes it over several ranks.",
)
CAUSAL_MODEL_FORWARD = Patch(
    "transformers:LlamaForCausalLM.forward",
    "transformers 5.24",
    "(self, input_ids=..., attention_mask=..., position_ids=..., cache=..., inputs_embeds=..., labels=..., "
    "use_cache=..., logits_to_keep=..., **kwargs)",
    "The loss scores labels in tiles; context parallelism splits the inputs; the comparison of exports gives a head "
    "known states.",
    "never: it wraps a model of any architecture.",
    objects="a causal model, or the decoder in it",
)
KEY_VALUE_GROUPS = Patch(
    "transformers.models.llama.modeling_llama:LlamaAttention.num_key_value_groups",
    "transformers 5.24",
    "of instances",
    "With fewer key and value heads than ranks, heads are repeated before they are exchanged.",
    "attention functions take the ratio from the shapes.",
    objects="attention modules",
)
ATTENTION_TABLE = Patch(
    "transformers.modeling_utils:ALL_ATTENTION_FUNCTIONS.__setitem__",
    "transformers 5.24",
    "(key, value)",
    "Context parallelism exchanges tokens for heads around attention; masks get whole rows.",
    "transformers has hooks around attention functions.",
    objects="the tables of attention and mask functions",
)
ROTARY = Patch(
    "transformers.models.llama.modeling_llama:apply_rotary_pos_emb",
    "transformers 5.24",
    "(q, k, cos, sin, unsqueeze_dim=...)",
    "A fused rotary embedding: the forward pass runs with another global of this name.",
    "transformers calls it through a table of its own for each model.",
    objects="a copy of attention's forward pass",
)
EXPERTS_FORWARD = Patch(
    "transformers.models.mixtral.modeling_mixtral:MixtralExperts.forward",
    "transformers 5.24",
    "(self, hidden_states, top_k_index, top_k_weights)",
    "Routing cannot be computed on the meta device, where a probe runs.",
    "experts have a path for meta tensors.",
    objects="classes of fused experts during a probe",
)
CHECKPOINT_FUNCTION = Patch(
    "transformers.modeling_layers:GradientCheckpointingLayer._gradient_checkpointing_func",
    "transformers 5.24",
    "of instances",
    "Each layer is recomputed by its own level.",
    "`gradient_checkpointing_kwargs` can differ by layer.",
    objects="decoder layers",
)
SCIPY = Patch(
    "transformers.utils:is_scipy_available",
    "transformers 5.24",
    "()",
    "Every model imports the losses of object detection, and these import scipy.",
    "they import it when they are called.",
)
MODELS_LISTING = Patch(
    "transformers.utils.import_utils:create_import_structure_from_path",
    "transformers 5.24",
    "(module_path)",
    "The first model import lists 1,600 files twice: the cache is keyed by two spellings.",
    "it is keyed by the resolved path.",
)
GGUF_PROGRESS = Patch(
    "transformers.modeling_gguf_pytorch_utils:tqdm",
    "transformers 5.24",
    "(iterable=..., *args, **kwargs)",
    "Its progress bar ignores `disable_progress_bar`.",
    "it uses transformers' own `logging.tqdm`.",
)

# -- PEFT --------------------------------------------------------------------------------------------------------------

CONVERT_ADAPTER_CONFIG = Patch(
    "peft.utils.transformers_weight_conversion:convert_peft_config_for_transformers",
    "peft 0.21",
    "(peft_config, model, conversions)",
    "It takes shared experts' layers for fused experts, by their names.",
    "it looks at the modules.",
)
PARAM_WRAPPER = Patch(
    "peft.tuners.lora.layer:ParamWrapper",
    "peft 0.21",
    "(base_layer, adapter_name, parameter_name, config, r=..., lora_alpha=..., is_target_conv_1d_layer=..., **kwargs)",
    "It adds the update to the weights of all experts, another copy of them and of their gradient, and reads no 4 bit.",
    "it adds the low-rank terms to the products of experts.",
)
DISABLED_ADAPTER = Patch(
    "peft.tuners.tuners_utils:BaseTunerLayer._disable_adapters",
    "peft 0.21",
    "bool",
    "PEFT's `disable_adapter` also clears `requires_grad` of the weights, by which ranks register their gradients.",
    "`disable_adapter` leaves the weights alone.",
    objects="PEFT's layers",
)
DORA_UPDATE_LAYER = Patch(
    "peft.tuners.lora.dora:DoraLinearLayer.update_layer",
    "peft 0.21",
    "(self, *, base_layer, lora_A, lora_B, scaling, place_on_cpu=...)",
    "A trace has no weights whose norms could start the magnitudes.",
    "PEFT makes them on the meta device.",
)
DORA_DEQUANTIZE = Patch(
    "peft.tuners.lora.dora:dequantize_module_weight",
    "peft 0.21",
    "(module)",
    "It knows a quantized weight by its class; fake weights have another.",
    _FAKE_4BIT,
)

# -- bitsandbytes ------------------------------------------------------------------------------------------------------

SYNC_GPU = Patch(
    "bitsandbytes.optim.optimizer:sync_gpu",
    "bitsandbytes 0.50",
    "(t)",
    "An update would wait for the GPU after each weight; `training/state.py` and `training/warm_up.py` wait "
    "where they must.",
    "only paged states are synchronised.",
)
DEQUANTIZE_4BIT = Patch(
    "torch:ops.bitsandbytes.dequantize_4bit.default",
    "bitsandbytes 0.50",
    "bitsandbytes::dequantize_4bit(Tensor A, Tensor absmax, int blocksize, str quant_type, int[] shape, ScalarType "
    "dtype) -> Tensor",
    "Where blocks do not divide a row, AVX-512 takes other blocks' scales: 25% error, not 9%.",
    "the kernel is corrected.",
    objects="the CPU kernel of the operator",
)
LINEAR_8BIT = Patch(
    "bitsandbytes.nn:Linear8bitLt.forward",
    "bitsandbytes 0.50",
    "(self, x)",
    "The frozen weight is dequantized for each product; `MatMul8bitFp` also saves its input.",
    "`MatMul8bitFp` saves nothing for a frozen weight.",
    objects="8-bit layers",
)
CPU_LAYOUT = Patch(
    "bitsandbytes.nn:Linear4bit.support_avx512bf16_for_cpu",
    "bitsandbytes 0.50",
    "of instances",
    "In eval mode AVX512-BF16 repacks weights to a layout without a backward pass, for good.",
    "repacking is optional.",
    objects="4-bit layers",
)
RESTORE_4BIT_STATE = Patch(
    "bitsandbytes.nn.modules:fix_4bit_weight_quant_state_from_module",
    "bitsandbytes 0.50",
    "(module)",
    "It asserts the shape of a packed weight; fake weights get their state here.",
    _FAKE_4BIT,
)

# -- DeepSpeed ---------------------------------------------------------------------------------------------------------

ENGINE_AUTOCAST = Patch(
    "deepspeed.runtime.engine:autocast_if_enabled",
    "deepspeed 0.19",
    "(engine)",
    "It ends an autocast that the config does not ask for; asked for, it sends 16-bit gradients.",
    "the type of communication can be set beside autocast.",
)
SWAPPABLE = Patch(
    "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3._swappable_optimizer_subgroup",
    "deepspeed 0.19",
    "(self, sub_group_id)",
    "States on a disk are read once for a group of weights, not for each weight.",
    "DeepSpeed reads a group's states together.",
    objects="DeepSpeed's optimizer",
)
ENGINE_TO_UNWRAP = Patch(
    "accelerate.utils.other:is_deepspeed_available",
    "accelerate 1.15",
    "()",
    "To save a model, transformers asks whether DeepSpeed wraps it, and imports DeepSpeed, which prints a warning.",
    "accelerate asks only where DeepSpeed is imported.",
)
SHARED_MEMORY = Patch(
    "deepspeed.comm.torch:build_shm_op",
    "deepspeed 0.19",
    "()",
    "On a CPU it would compile its own collectives for minutes.",
    _SWITCH,
)

# -- other libraries ---------------------------------------------------------------------------------------------------

HUB_OFFLINE = Patch(
    "huggingface_hub.constants:HF_HUB_OFFLINE",
    "huggingface_hub 2.4",
    "bool",
    "Files in the cache are read without asking the hub whether they are current.",
    "the hub's client has a context for it.",
)


def entries() -> dict[str, Patch]:
    """All entries by name."""
    return {name: value for name, value in globals().items() if isinstance(value, Patch)}
