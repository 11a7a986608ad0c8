"""The dashboard `models`: which models are where, and who has a device's memory."""

from __future__ import annotations

from deploy.monitoring.panels import OF_MODEL, OF_NODE, Board, panel, rate

MODELS = Board(
    "models",
    "Upbeat: models and memory",
    "Which models are where, and who has a device's memory.",
    (
        panel(
            "State of models",
            "1 cold, 2 loading, 3 active, 4 draining.",
            "short",
            (f"max by (node, model) (upbeat_worker_model_state{{{OF_MODEL}, {OF_NODE}}})", "{{node}} {{model}}"),
        ),
        panel(
            "Memory of devices",
            "By use: weights, kv, ...; no use: free.",
            "bytes",
            (f"sum by (use) (upbeat_worker_device_bytes{{{OF_NODE}}})", "{{use}}"),
            stacked=True,
        ),
        panel(
            "KV of models",
            "What it holds, in use or cached.",
            "bytes",
            (f"sum by (node, model) (upbeat_worker_model_kv_bytes{{{OF_MODEL}, {OF_NODE}}})", "{{node}} {{model}}"),
            stacked=True,
        ),
        panel(
            "KV over its limit",
            "Near 1, cached KV leaves for new.",
            "percentunit",
            (
                f"sum by (node, model) (upbeat_worker_model_kv_bytes{{{OF_MODEL}, {OF_NODE}}})"
                f" / sum by (node, model) (upbeat_worker_model_kv_limit_bytes{{{OF_MODEL}, {OF_NODE}}})",
                "{{node}} {{model}}",
            ),
        ),
        panel(
            "Weights that come and go",
            "Activations and evictions.",
            "ops",
            (rate("upbeat_worker_activations_total", "model", f"{OF_MODEL}, {OF_NODE}"), "{{model}} came"),
            (rate("upbeat_worker_evictions_total", "model", f"{OF_MODEL}, {OF_NODE}"), "{{model}} left"),
        ),
        panel(
            "Time of an activation",
            "Mean, since the workers' start.",
            "s",
            (
                f"sum by (model) (upbeat_worker_activation_seconds_total{{{OF_MODEL}, {OF_NODE}}})"
                f" / (sum by (model) (upbeat_worker_activations_total{{{OF_MODEL}, {OF_NODE}}}) > 0)",
                "{{model}}",
            ),
        ),
        panel(
            "KV pressure",
            "KVPR: demand for KV over the memory that weights leave.",
            "short",
            ("max by (node) (upbeat_scheduler_kv_pressure)", "{{node}}"),
        ),
        panel(
            "Models moved",
            "Between devices, by stage.",
            "ops",
            (rate("upbeat_scheduler_model_moves_total", "stage"), "{{stage}}"),
        ),
        panel(
            "Lent layers",
            "Layers whose memory KV has, and time that steps waited for their copies.",
            "short",
            (f"sum by (model) (upbeat_worker_layers_lent{{{OF_MODEL}, {OF_NODE}}})", "{{model}} layers"),
            (
                rate("upbeat_worker_layer_wait_seconds_total", "model", f"{OF_MODEL}, {OF_NODE}"),
                "{{model}} waited",
            ),
        ),
        panel(
            "Loaded or recomputed",
            "Cached tokens that were not in HBM.",
            "short",
            (rate("upbeat_worker_planned_tokens_total", "choice", OF_NODE), "{{choice}}"),
        ),
        panel(
            "Preemptions, tokens twice",
            "Requests that gave their place, and what they computed again.",
            "ops",
            (rate("upbeat_worker_preemptions_total", "", OF_NODE), "preemptions"),
            (rate("upbeat_worker_recomputed_tokens_total", "after", OF_NODE), "tokens: {{after}}"),
        ),
        panel(
            "Grammars",
            "Of response_format and tools.",
            "ops",
            (rate("upbeat_worker_grammars_total", "outcome", OF_NODE), "{{outcome}}"),
        ),
    ),
)
