"""Feed-forward parts: dense, and mixtures of experts with the rules for sparse layers."""

from __future__ import annotations

from hetlb.errors import ConfigError
from hetlb.tools.models.config_keys import ConfigKeys
from hetlb.tools.models.layer import Family, FeedForward, Weights, linear, plain


def dense(family: Family, keys: ConfigKeys, key: str = "intermediate_size", size: int = 0) -> FeedForward:
    """Return a dense feed-forward part of the size under `key`, or of `size`.

    Without both, one without a gate has `expansion_ratio` times the hidden size.
    """
    hidden, name, bias = keys.whole("hidden_size"), family.feed_name, family.bias(2, keys)
    if not family.gated and not size and keys.value(key) is None:
        size = int(keys.value("expansion_ratio", 4) * hidden)
    keys.note("expansion_ratio")
    size = size or keys.whole(key)
    weights = linear(f"{name}.up_proj", hidden, size, bias) + linear(f"{name}.down_proj", size, hidden, bias)
    if family.gated:
        weights += linear(f"{name}.gate_proj", hidden, size, bias)
    return FeedForward(weights, ((keys.name_of(key), size),))


def experts_of(keys: ConfigKeys, layer: int = 0) -> int:
    """Return the routed experts of a layer; 0 and 1 mean that the layers are dense."""
    value = keys.value("num_experts", 0)
    found = value if isinstance(value, list) else [value]
    if not found or not all(type(each) is int and each >= 0 for each in found):
        raise ConfigError(f"{keys.name_of('num_experts')}: expected a whole number from 0, got {value!r}")
    count = found[layer] if 1 < len(found) > layer else found[0]
    return count if count > 1 else 0


def is_sparse(keys: ConfigKeys, layer: int) -> bool:
    """Return True if a layer of a mixture has experts."""
    types, by_rules = keys.texts("mlp_layer_types"), _sparse_by_rules(keys, layer)
    listed = next((name for name in ("moe_layers", "moe_layers_enum") if keys.value(name) is not None), None)
    each = keys.value("moe_layer_freq", 1)
    if types is not None:
        if layer >= len(types) or types[layer] not in ("sparse", "dense", "moe", "hash_moe"):
            raise ConfigError(
                f"mlp_layer_types: expected sparse or dense per layer, got {types[layer : layer + 1]}"
            )
        return types[layer] != "dense"
    if listed is not None:
        return layer in (keys.wholes(listed) or ())
    return bool((keys.wholes("moe_layer_freq") or [])[layer]) if isinstance(each, list) else by_rules


def _sparse_by_rules(keys: ConfigKeys, layer: int) -> bool:
    first = max(
        keys.count("first_k_dense_replace"),
        keys.count("num_dense_layers"),
        keys.count("moe_layer_start_index"),
    )
    last = keys.value("moe_layer_end_index", -1)
    period, offset = keys.whole("expert_layer_period", 1), keys.count("expert_layer_offset")
    every = keys.value("moe_layer_freq", 1)
    rules = [
        layer >= first,
        last < 0 or layer <= last,
        layer not in (keys.wholes("mlp_only_layers") or ()),
        (layer + 1) % keys.whole("decoder_sparse_step", 1) == 0,
        (layer + 1) % keys.whole("interleave_moe_layer_step", 1) == 0,
        (layer + 1) % keys.whole("moe_layer_interval", 1) == 0,
        period == 1 or layer % period == offset,
        isinstance(every, list) or layer % keys.whole("moe_layer_freq", 1) == 0,
    ]
    return all(rules)


def feed_forward(family: Family, keys: ConfigKeys, layer: int) -> FeedForward:
    """Return the feed-forward part of a layer: dense, or experts if its model has them."""
    if experts_of(keys) and is_sparse(keys, layer):
        keys.note("dense_intermediate_size")  # of other layers
        return mixture(family, keys, layer)
    return dense(
        family,
        keys,
        "dense_intermediate_size" if keys.value("dense_intermediate_size") else "intermediate_size",
    )


def mixture(
    family: Family,
    keys: ConfigKeys,
    layer: int,
    *,
    size: int = 0,
    width: int = 0,
    shared: int | None = None,
    more: tuple[Weights, ...] = (),
    expert_bias: bool = False,
) -> FeedForward:
    """Return routed and shared experts of a layer.

    `size`: values of one expert, `width`: of its input (the hidden size), `shared`: of all shared experts.
    """
    hidden, name = keys.whole("hidden_size"), family.feed_name
    count, chosen = experts_of(keys, layer), float(keys.at("num_experts_per_tok", layer))
    width = width or hidden
    key = "moe_intermediate_size" if keys.value("moe_intermediate_size") else "intermediate_size"
    size = size or keys.at(key, layer)
    matrices = 3 if family.gated else 2
    weights: tuple[Weights, ...] = (
        Weights(f"{name}.experts", count * matrices * width * size, experts=count),
    )
    if expert_bias:
        weights += (Weights(f"{name}.experts.bias", count * ((matrices - 1) * size + width), False, count),)
    # Routers stay as they are under every quantisation.
    router = hidden * count + (count if family.has(family.router_bias, keys) else 0)
    weights += plain(f"{name}.gate", router)
    shared = _shared_size(keys, layer, size) if shared is None else shared
    if shared:
        weights += linear(f"{name}.shared_experts.up_proj", hidden, shared)
        weights += linear(f"{name}.shared_experts.down_proj", shared, hidden)
        if family.gated:
            weights += linear(f"{name}.shared_experts.gate_proj", hidden, shared)
        weights += plain(f"{name}.shared_expert_gate", hidden if family.shared_gate else 0)
    sizes = (("shared experts", shared),) if shared else ()
    return FeedForward(weights + more, sizes, (keys.name_of(key), size), count, chosen)


def _shared_size(keys: ConfigKeys, layer: int, size: int) -> int:
    """Return the values of all shared experts together."""
    stated = keys.value("shared_intermediate_size")
    number = keys.value("num_shared_experts")
    count = keys.at("num_shared_experts", layer) if number else None
    if stated:
        return keys.whole("shared_intermediate_size") * (count or 1)
    return size * count if count else 0
