"""Names, types and help texts of all metric families of the proxy."""

from __future__ import annotations

from typing import Final

#: Help text by name.
HELP: Final = {
    "hetlb_build_info": "Version, policy, whether the hot path is compiled.",
    "hetlb_class_requests_total": (
        "Requests of a service class that ended, by whether they met all its targets."
    ),
    "hetlb_config_reloads_total": "Times the fleet file was read again, by result.",
    "hetlb_decision_seconds": "Time of one call of the scheduler, by what happened.",
    "hetlb_decisions_total": "Dispatches decided.",
    "hetlb_e2e_request_latency_seconds": "From arrival to the end of a request that was answered.",
    "hetlb_forecast_bias": "Mean forecast over mean true time - 1 of the newest answers.",
    "hetlb_forecast_coverage": "Share of the newest answers within their 90 % bound.",
    "hetlb_instance_cached_prompt_tokens_total": (
        "Prompt tokens that the engine read from its prefix cache, where its usage says so."
    ),
    "hetlb_instance_ejections_total": "Times it was taken out as dead.",
    "hetlb_instance_engines": "Data-parallel engines behind its URL.",
    "hetlb_instance_expected_cached_prompt_tokens_total": (
        "Prompt tokens that were believed to be in the prefix cache when the request was sent."
    ),
    "hetlb_instance_health": "1 for the health in force.",
    "hetlb_instance_in_flight": "Requests dispatched and not ended.",
    "hetlb_instance_invalid_samples_total": "Scrapes with absurd values.",
    "hetlb_instance_kv_cache_tokens": "KV cache tokens there are.",
    "hetlb_instance_kv_reported_max_ratio": "KV cache use of the fullest data-parallel engine, 0 to 1.",
    "hetlb_instance_kv_reported_ratio": "KV cache use the engine reports, 0 to 1.",
    "hetlb_instance_kv_reserved_tokens": "KV cache tokens reserved to requests.",
    "hetlb_instance_model_expected_seconds_total": "Times that the profile as it is expects.",
    "hetlb_instance_model_seen_seconds_total": "The same times as they were seen.",
    "hetlb_instance_output_tokens_total": "Tokens generated.",
    "hetlb_instance_predicted_seconds_total": (
        "Predicted time of completed answers, from dispatch to the end."
    ),
    "hetlb_instance_prompt_tokens_total": "Prompt tokens of requests, each prompt once.",
    "hetlb_instance_reported_running": "Requests running, as the engine reports.",
    "hetlb_instance_reported_waiting": "Requests waiting, as the engine reports.",
    "hetlb_instance_requests_total": "Leases that ended, by instance and outcome.",
    "hetlb_instance_served_seconds_total": "Actual time of completed answers, from dispatch to the end.",
    "hetlb_instance_signal_age_seconds": "Age of the engine's last report.",
    "hetlb_instance_slots": "Sequences that it is believed to run at once.",
    "hetlb_instance_slots_assumed": "1 while that is vLLM's default: neither stated nor measured nor learnt.",
    "hetlb_instance_state": "1 for the administrative state in force.",
    "hetlb_instance_workload_seconds": "Work assigned and not completed.",
    "hetlb_inter_token_latency_seconds": "Between two reads of a stream that brought text.",
    "hetlb_kv_transfers_total": "Requests prefilled at one instance for another, by what came of it.",
    "hetlb_log_lost_lines_total": "Lines of logs that a slow reader made us drop.",
    "hetlb_loop_lag_seconds": "How late the event loop called a timer, sampled.",
    "hetlb_model_capacity_assumed": "1 while the slots of one of its instances are a guess.",
    "hetlb_model_free_places": "Sequences that could run at once besides those that do.",
    "hetlb_model_instances": "Instances of the model that take requests.",
    "hetlb_model_saturation_ratio": (
        "Sequences running and requests waiting, over the places there are; KV cache reserved, if more."
    ),
    "hetlb_predicted_output_ratio": "Predicted over actual output tokens.",
    "hetlb_predicted_time_ratio": "Predicted over actual time from dispatch to the end.",
    "hetlb_queue_bytes": "Bytes of the bodies waiting.",
    "hetlb_queue_oldest_seconds": "How long the request that waits longest has waited.",
    "hetlb_queue_requests": "Requests waiting for an instance, by model.",
    "hetlb_request_queue_time_seconds": (
        "From arrival to the last dispatch, or to the end of those never dispatched."
    ),
    "hetlb_requests_resumed_total": "Answers that went on at another instance, by why the first was lost.",
    "hetlb_requests_total": "Requests that ended, and whose doing it was.",
    "hetlb_retries_total": "Requests sent to another instance.",
    "hetlb_shared_connected": "1 while the server of the shared state is reached.",
    "hetlb_shared_delay_seconds": "Age of their news, by own messages coming back.",
    "hetlb_shared_leads": "1 while this process serves.",
    "hetlb_shared_messages_total": "Messages of the shared state.",
    "hetlb_shared_peer_leases": "Requests at the engines that are theirs.",
    "hetlb_shared_peers": "Other processes whose leases are known.",
    "hetlb_stage_in_flight": "Requests whose path crosses a stage.",
    "hetlb_stage_kv_reserved_token_layers": "KV cache booked on a stage.",
    "hetlb_stage_up": "1 while a stage is used.",
    "hetlb_tenant_output_tokens_total": "Tokens generated for it.",
    "hetlb_tenant_prompt_tokens_total": "Prompt tokens of its requests.",
    "hetlb_tenant_queue_seconds_total": "Time that its requests waited.",
    "hetlb_tenant_requests_total": "Requests of the tenant that ended.",
    "hetlb_time_to_first_token_seconds": "From arrival to the first byte of a streamed answer.",
    "hetlb_websocket_session_seconds": "From dispatch to the end of a WebSocket session.",
    "hetlb_worker_hangs_total": "Times it was killed because it no longer answered.",
    "hetlb_worker_restarts_total": "Times a process that serves was replaced.",
    "hetlb_worker_up": "1 for a process that serves requests.",
}
#: Families that are histograms. A name in `_total` is a counter, every other one a gauge.
HISTOGRAMS: Final = {
    "hetlb_decision_seconds",
    "hetlb_e2e_request_latency_seconds",
    "hetlb_inter_token_latency_seconds",
    "hetlb_loop_lag_seconds",
    "hetlb_predicted_output_ratio",
    "hetlb_predicted_time_ratio",
    "hetlb_request_queue_time_seconds",
    "hetlb_time_to_first_token_seconds",
    "hetlb_websocket_session_seconds",
}


def head(name: str) -> str:
    """Return the HELP and TYPE lines of a family."""
    kind = "histogram" if name in HISTOGRAMS else "counter" if name.endswith("_total") else "gauge"
    return f"# HELP {name} {HELP[name]}\n# TYPE {name} {kind}\n"
