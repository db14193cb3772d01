"""First weights that depend on the seed alone: not on the device, the number of ranks, or whether
the model was first built without memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
import xxhash
from torch import Tensor, nn

from rtx_distributed.errors import ConfigError
from rtx_distributed.model.decoder import Decoder
from rtx_distributed.model.presets import ModelSpec

_STD = 0.02
_WRAPPERS = frozenset({"module", "_orig_mod"})


def plain_name(name: str) -> str:
    """The parameter's name without what DDP (``module.``) and compile (``_orig_mod.``) add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def build_decoder(
    spec: ModelSpec,
    *,
    seed: int,
    device: torch.device | str = "cpu",
    activation_checkpointing: bool = False,
) -> Decoder:
    """A decoder with its first weights, float32, on ``device``."""
    with torch.device("meta"):
        model = Decoder(spec, activation_checkpointing=activation_checkpointing)
    materialise(model, device=device, seed=seed)
    return model


def initialise(model: nn.Module, *, seed: int) -> None:
    """Draws all weights anew, in place.

    For a ``Decoder``: normal(0, 0.02), the two matrices that write into the residual stream
    scaled by 1 / sqrt(2 layers) (Radford et al. 2019), norms one; each parameter has its own
    random numbers, made from the seed and its name. For any other module: its own
    ``reset_parameters`` in the order of construction after ``torch.manual_seed(seed)``; such a
    module must lie on the CPU, so that the numbers are the same for every device. The caller's
    random state is left as it was.

    Raises ``ConfigError`` naming the parameters that nothing initialises.
    """
    if isinstance(model, Decoder):
        _initialise_decoder(model, seed=seed)
        return
    away = [name for name, p in model.named_parameters() if p.device.type != "cpu"]
    if away:
        raise ConfigError(
            f"`{away[0]}` is on {model.get_parameter(away[0]).device}: draw the weights on the CPU "
            f"and move the model afterwards, so that they are the same on every device"
        )
    _draw(model, seed=seed, buffers=False)


def materialise(model: nn.Module, *, device: torch.device | str, seed: int) -> None:
    """Gives memory and first weights to a model built under ``torch.device("meta")``, in place.

    For modules whose constructors end in ``reset_parameters`` (all of ``torch.nn``) the weights
    are bit-equal to ``torch.manual_seed(seed); build()``; for a ``Decoder`` see ``initialise``.
    They are drawn on the CPU and then moved, so they are the same on every device. Tied
    parameters stay tied and hold what their first name drew. Buffers are rebuilt by
    ``reset_buffers`` (ours) or ``reset_parameters`` (as batch norm does). A model with nothing on
    meta keeps its weights and is moved.

    Raises ``ConfigError`` where only some parameters are on meta, or nothing initialises one.
    """
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    on_meta = [name for name, tensor in tensors if tensor.device.type == "meta"]
    if not on_meta:
        model.to(device)
        return
    if len(on_meta) < len(tensors):
        known = next(name for name, tensor in tensors if tensor.device.type != "meta")
        raise ConfigError(
            f"`{on_meta[0]}` was built without memory and `{known}` with; build the whole model "
            f'under `torch.device("meta")`, or none of it'
        )
    ties = _ties(model)
    model.to_empty(device="cpu")
    if isinstance(model, Decoder):
        for module in model.modules():
            _reset_buffers(module)
        _tie(model, ties)
        _initialise_decoder(model, seed=seed)
    else:
        # Tied afterwards: each of the modules draws its own numbers when the model is built too.
        _draw(model, seed=seed, buffers=True)
        _tie(model, ties)
    model.to(device)
    _tie(model, ties)


def _draw(model: nn.Module, *, seed: int, buffers: bool) -> None:
    """Marks, resets, and refuses what is still marked. ``buffers``: they hold nothing yet."""
    _poison([*model.parameters(), *(model.buffers() if buffers else ())])
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        _reset(model)
    _refuse_unset(model, buffers=buffers)


def _initialise_decoder(model: Decoder, *, seed: int) -> None:
    residual = _STD / math.sqrt(2 * model.spec.layers)
    for full_name, parameter in model.named_parameters():
        name = plain_name(full_name)
        if parameter.ndim == 1:
            drawn = torch.ones(parameter.shape, dtype=torch.float32)
        else:
            scaled = name.endswith(("attention.o.weight", "ffn.down.weight"))
            key = xxhash.xxh3_64_intdigest(f"{seed}/{name}".encode()) >> 1
            generator = torch.Generator(device="cpu").manual_seed(key)
            drawn = torch.empty(parameter.shape, dtype=torch.float32)
            drawn.normal_(0.0, residual if scaled else _STD, generator=generator)
        with torch.no_grad():
            parameter.copy_(drawn)


def _children_first(module: nn.Module, seen: set[int]) -> Iterator[nn.Module]:
    """Constructors build their children before they draw their own weights."""
    if id(module) in seen:
        return
    seen.add(id(module))
    for child in module.children():
        yield from _children_first(child, seen)
    yield module


def _reset(model: nn.Module) -> None:
    for module in _children_first(model, set()):
        # `torch.nn.MultiheadAttention` and `torch.nn.Transformer` have the underscored one.
        for name in ("reset_parameters", "_reset_parameters"):
            reset = getattr(module, name, None)
            if callable(reset):
                reset()
                break
        _reset_buffers(module)


def _reset_buffers(module: nn.Module) -> None:
    reset = getattr(module, "reset_buffers", None)
    if callable(reset):
        reset()


def _poison(tensors: Iterable[Tensor]) -> None:
    """Marks every floating tensor, so that one which nothing initialises is found."""
    with torch.no_grad():
        for tensor in tensors:
            if tensor.is_floating_point():
                tensor.fill_(math.nan)


def _refuse_unset(model: nn.Module, *, buffers: bool) -> None:
    named = [*model.named_parameters(), *(model.named_buffers() if buffers else ())]
    unset = [
        (name, tensor)
        for name, tensor in named
        if tensor.is_floating_point() and tensor.numel() and bool(tensor.isnan().any())
    ]
    # An integer buffer cannot be marked: it counts as set when its module has any reset at all.
    for prefix, module in model.named_modules() if buffers else ():
        if any(hasattr(module, n) for n in ("reset_parameters", "reset_buffers")):
            continue
        for name, buffer in module.named_buffers(recurse=False):
            if not buffer.is_floating_point():
                unset.append((f"{prefix}.{name}" if prefix else name, buffer))
    if not unset:
        return
    lines = []
    for name, tensor in unset[:10]:
        owner = model.get_submodule(name.rpartition(".")[0])
        lines.append(f"  {name} {tuple(tensor.shape)} of {type(owner).__name__}")
    raise ConfigError(
        f"{len(unset)} tensors of the model are set by no `reset_parameters()` (or "
        f"`reset_buffers()`), so a model built without memory cannot draw them:\n"
        + "\n".join(lines)
        + "\nGive their modules that method, or build the model with memory."
    )


def _ties(model: nn.Module) -> dict[str, str]:
    """Name of each further use of a parameter -> its first name."""
    first: dict[int, str] = {}
    ties: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(parameter), name)
        if known != name:
            ties[name] = known
    return ties


def _tie(model: nn.Module, ties: dict[str, str]) -> None:
    for name, canonical in ties.items():
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, model.get_parameter(canonical))


def parameter_aliases(model: nn.Module) -> dict[str, str]:
    """Tied parameters, plain names: each further name -> the name under which it is kept."""
    return {plain_name(name): plain_name(kept) for name, kept in _ties(model).items()}


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers under plain names, tied ones once. Raises ``ConfigError``
    where two plain names are equal, or a module has state that is no tensor."""
    ties = _ties(model)
    weights: dict[str, Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if name in ties:
            continue
        plain = plain_name(name)
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"`{name}` of the model's state is a {type(value).__name__}, not a tensor; only "
                f"tensors can be saved"
            )
        if plain in weights:
            raise ConfigError(
                f"two tensors of the model are both called `{plain}` once the wrappers' "
                f"`module.` and `_orig_mod.` are left out; rename one of them"
            )
        weights[plain] = value
    return weights
