"""The dashboard `slo`: how long answers take, and which keep to their targets."""

from __future__ import annotations

from deploy.monitoring.panels import OF_MODEL, OF_NODE, Board, panel, quantiles, rate

SLO = Board(
    "slo",
    "Upbeat: SLO",
    "How long answers take, where the time goes, and which keep to their model's targets (models.NAME.ttft_s, tpot_s).",
    (
        quantiles(
            "Time to first token", "From the request's arrival.", "upbeat_gateway_ttft_seconds", OF_MODEL, ", model"
        ),
        quantiles("Time per output token", "After the first.", "upbeat_gateway_tpot_seconds", OF_MODEL, ", model"),
        panel(
            "Attainment",
            "Answers that kept to their model's target; models without targets are not here.",
            "percentunit",
            (
                rate("upbeat_gateway_slo_attained_total", "model, target", OF_MODEL)
                + " / "
                + rate("upbeat_gateway_slo_turns_total", "model, target", OF_MODEL),
                "{{model}} {{target}}",
            ),
        ),
        panel(
            "Where the time of a turn goes",
            "Mean seconds a turn, by phase (docs/api.md); those before decode end with the first token.",
            "s",
            (
                f"{rate('upbeat_gateway_turn_seconds_sum', 'phase', OF_MODEL)} / on () group_left () "
                + rate("upbeat_gateway_turn_seconds_count", "", f'phase="decode", {OF_MODEL}'),
                "{{phase}}",
            ),
            stacked=True,
        ),
        panel(
            "Errors of the server",
            "Part of all answers, by status.",
            "percentunit",
            (
                '(sum(rate(upbeat_gateway_requests_total{status=~"5.."}[$__rate_interval])) or vector(0))'
                + f" / {rate('upbeat_gateway_requests_total')}",
                "5xx",
            ),
        ),
        panel(
            "Requests that failed in workers",
            "After they were accepted, by code.",
            "ops",
            (rate("upbeat_worker_failed_requests_total", "code", OF_NODE), "{{code}}"),
            (rate("upbeat_gateway_poisonous_total", "what"), "poisonous: {{what}}"),
        ),
        panel(
            "Goodput",
            "Answers a second that kept to their target.",
            "reqps",
            (rate("upbeat_gateway_slo_attained_total", "model, target", OF_MODEL), "{{model}} {{target}}"),
        ),
        panel(
            "Answers in progress",
            "Choices that are being generated, and request bodies that are held.",
            "short",
            ("sum(upbeat_gateway_active_generations)", "choices"),
            ("sum(upbeat_gateway_body_bytes) / 1e6", "bodies, MB"),
        ),
        panel(
            "Connections closed for slowness",
            "By what they were slow with.",
            "ops",
            (rate("upbeat_gateway_cut_total", "why"), "{{why}}"),
        ),
    ),
)
