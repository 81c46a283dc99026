"""LiteLLM's config.yaml: `model_list` with an `api_base` each, aliases and fallbacks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from hetlb.tools.imported.draft import DraftInstance, FleetDraft

#: Providers whose servers speak OpenAI's API under an address of their own.
_PROVIDERS: Final = {
    *(
        "hosted_vllm",
        "vllm",
        "openai",
        "custom_openai",
        "openai_like",
        "text-completion-openai",
        "litellm_proxy",
    ),
    *("lm_studio", "llamafile", "nvidia_nim", "sglang"),
}
_TAKEN: Final = {"model", "api_base", "base_url", "api_key", "weight", "max_parallel_requests"}


def read_litellm(path: Path, document: Mapping[str, Any]) -> FleetDraft:
    """Read a LiteLLM file. Deployments of one name are instances of the model that they serve."""
    draft = FleetDraft(path, "LiteLLM")
    public: dict[str, str] = {}
    for number, entry in enumerate(document.get("model_list") or ()):
        _take_deployment(draft, f"model_list[{number}]", entry, public)
    for key, value in document.items():
        if key == "model_list":
            continue
        if not isinstance(value, dict):
            draft.leave(key, f"{key}: {value}")
            continue
        for name, setting in value.items():
            where = f"{key}.{name}"
            if name == "fallbacks" and isinstance(setting, list):
                _take_fallbacks(draft, where, setting, public)
            elif name == "model_group_alias" and isinstance(setting, dict):
                _take_aliases(draft, where, setting, public)
            else:
                why = "clients' keys: proxy.api_keys_file" if name == "master_key" else ""
                draft.leave(where, name if why else f"{name}: {setting}", why)
    return draft


def _take_deployment(draft: FleetDraft, where: str, entry: Any, public: dict[str, str]) -> None:
    given = entry.get("litellm_params") if isinstance(entry, dict) else None
    if not isinstance(given, dict):
        draft.leave(where, "expected model_name and litellm_params")
        return
    asked, full = str(entry.get("model_name") or ""), str(given.get("model") or "")
    base = str(given.get("api_base") or given.get("base_url") or "")
    provider, slash, served = full.partition("/")
    if stated := given.get("custom_llm_provider"):
        provider, slash, served = str(stated), "/", full.removeprefix(f"{stated}/")
    if not base or (slash and provider not in _PROVIDERS):
        why = "no api_base" if provider in _PROVIDERS or not slash else f"provider {provider}"
        draft.leave(where, f"{asked}: {full}", why)
        return
    served = served if slash else full
    if base.startswith("os.environ/"):
        draft.leave(where, f"{asked}: api_base {base}", "state the address itself")
        return
    if "*" in served or "*" in asked:
        if "*" in served:
            host = urlsplit(base).hostname or "server"
            model = draft.model(host, "a pattern in LiteLLM; the servers' own names are learnt")
        else:
            model = draft.model(served)
        draft.leave(where, f"model_name {asked}", "clients ask for the servers' own names, without a prefix")
    else:
        model = draft.model(served)
        if asked and asked != served:
            if public.setdefault(asked, served) == served:
                model.aliases += [] if asked in model.aliases else [asked]
            else:
                draft.leave(where, f"model_name {asked} for {served}", f"it is {public[asked]} already")
        else:
            public.setdefault(asked, served)
    instance = DraftInstance(base, api_key_env=draft.key_variable(given.get("api_key"), asked or served))
    weight, most = given.get("weight"), given.get("max_parallel_requests")
    if isinstance(weight, int | float) and weight > 0:
        instance.weight = weight
    if isinstance(most, int) and most > 0:
        instance.max_num_seqs = most
    if draft.add(model, instance, where):
        for name, value in given.items():
            if name not in _TAKEN:
                draft.leave(f"{where}.litellm_params", f"{name}: {value}")
    for name, value in entry.items():
        if name not in ("model_name", "litellm_params"):
            draft.leave(where, f"{name}: {value}")


def _take_fallbacks(draft: FleetDraft, where: str, setting: list[Any], public: dict[str, str]) -> None:
    for each in setting:
        for name, others in each.items() if isinstance(each, dict) else ():
            model = draft.models.get(public.get(str(name), str(name)))
            first = others[0] if isinstance(others, list) and others else others
            stand_in = public.get(str(first), str(first))
            stands = stand_in in draft.models and draft.models[stand_in].instances
            if model is None or not stands or model.fallback not in (None, stand_in):
                draft.leave(where, f"{name}: {others}")
            else:
                model.fallback = stand_in
                if isinstance(others, list) and len(others) > 1:
                    draft.leave(where, f"{name}: {others[1:]}", "one model stands in for another")


def _take_aliases(draft: FleetDraft, where: str, setting: Mapping[str, Any], public: dict[str, str]) -> None:
    for alias, name in setting.items():
        model = draft.models.get(public.get(str(name), str(name)))
        if model is None or not isinstance(name, str) or alias in public:
            draft.leave(where, f"{alias}: {name}")
        elif alias not in model.aliases:
            model.aliases.append(str(alias))
