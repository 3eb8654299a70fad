"""convert_model: the linear layers and experts of a model that exists, run in the formats of a recipe."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from torch import nn

from blockscale.nn.adapters import SCALINGS, Adapter, find_adapter
from blockscale.nn.delayed import ScaledLayer
from blockscale.nn.linear import Linear
from blockscale.recipes import Recipe, check_recipe

Filter = Callable[[str, nn.Module], "bool | Recipe"]
_ORIGINAL = "_blockscale_original"  # the class that a converted module had
#: what conversion adds to a module
_ADDED = ("recipe", "accumulate_into_main_grad", "wgrad_queue", "weight_cache", "_blockscale_adapter")


class _ConvertedExperts(ScaledLayer):
    """What a module that an adapter runs gets as an additional base class."""

    recipe: Recipe | None
    _blockscale_adapter: Adapter

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._blockscale_adapter.forward(self, self.recipe, *args, **kwargs)


@cache
def _converted_class(cls: type[nn.Module]) -> type[nn.Module]:
    """A subclass of ``cls`` with the adapter's forward: ``isinstance`` keeps its answer."""
    return type(f"Blockscale{cls.__name__}", (_ConvertedExperts, cls), {"__module__": __name__, "__doc__": cls.__doc__})


def convert_model(model: nn.Module, recipe: Recipe | None, filter: Filter | None = None) -> nn.Module:
    """Run a model's ``torch.nn.Linear`` layers and mixture-of-experts modules in the formats of a recipe, in place.

    A layer stays the object it is: parameters (tied ones too), hooks, names in the state dict, optimizers and references
    hold. Its class changes: a Linear becomes a :class:`~blockscale.nn.linear.Linear`, experts a subclass of their own
    class. Known experts: those of transformers' Qwen3-MoE and its relatives (fused or a list) and of gpt-oss, and what
    :func:`~blockscale.nn.adapters.register_adapter` was told. Their routers keep their precision, and probabilities are
    applied before the second linear, not behind it. Subclasses of Linear, which may compute something else, stay.

    Args:
        model: a module; may be such a layer itself.
        recipe: of the converted layers; None: each call uses the enclosing ``autocast``'s, else BF16.
        filter: called with the name and the module of each candidate; False leaves it, True converts it, a Recipe
            converts it with that one. Example: ``lambda name, m: name != "lm_head"``.

    Returns:
        ``model``. Converting again changes recipes; :func:`restore_model` undoes it.

    Raises:
        TypeError: model, recipe or what filter returns. ValueError: there was nothing to convert.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}; a torch.nn.Module is needed")
    if recipe is not None:
        check_recipe(recipe)
    count = 0
    for name, module, adapter in list(_candidates(model)):
        chosen = True if filter is None else filter(name, module)
        if not isinstance(chosen, (bool, Recipe)):
            raise TypeError(f"filter({name!r}, ...) is {type(chosen).__name__}; a bool or a Recipe is needed")
        if chosen is not False:
            _convert(module, adapter, recipe if chosen is True else chosen)
            count += 1
    if count == 0:
        raise ValueError(f"nothing to convert in {type(model).__name__}: no torch.nn.Linear and no known experts pass the filter")
    return model


def restore_model(model: nn.Module) -> nn.Module:
    """Undo :func:`convert_model`, in place; the parameters keep the values they have now. Returns ``model``."""
    for module in model.modules():
        original = module.__dict__.pop(_ORIGINAL, None)
        if original is not None:
            module.__class__ = original
            for name in _ADDED:
                module.__dict__.pop(name, None)
            for name in ("scaling", *SCALINGS):
                module._modules.pop(name, None)
    return model


def converted_modules(model: nn.Module) -> dict[str, Recipe | None]:
    """The names of the modules that :func:`convert_model` changed, with their recipes."""
    return {name: module.recipe for name, module in model.named_modules() if _ORIGINAL in module.__dict__}


def _candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module, Adapter | None]]:
    """Modules that can be converted, each once; an adapter's own children are left out."""
    owned: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module in owned:
            continue
        adapter = module.__dict__.get("_blockscale_adapter") or find_adapter(module)
        if adapter is not None:
            for child in adapter.own:
                owned |= set(getattr(module, child).modules())
            yield name, module, adapter
        elif type(module) is nn.Linear or _ORIGINAL in module.__dict__:
            yield name, module, None
        elif any(p.dim() == 3 for p in module.parameters(recurse=False)) and not type(module).__module__.startswith("blockscale"):
            warnings.warn(
                f"{name or 'model'}: {type(module).__name__} has 3-D parameters and no adapter knows it; it was not converted"
                " (blockscale.nn.register_adapter teaches convert_model a new kind of experts)",
                stacklevel=3,
            )


def _convert(module: nn.Module, adapter: Adapter | None, recipe: Recipe | None) -> None:
    original = module.__dict__.setdefault(_ORIGINAL, type(module))
    if adapter is None:
        module.__class__ = Linear
        assert isinstance(module, Linear)
        module.set_options(recipe)
    else:
        module.__class__ = _converted_class(original)
        module.__dict__ |= {"_blockscale_adapter": adapter, "recipe": recipe}
