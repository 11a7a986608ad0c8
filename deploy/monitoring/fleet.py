"""The dashboard `fleet`: what is asked, where it runs, and which devices serve."""

from __future__ import annotations

from deploy.monitoring.panels import OF_MODEL, OF_NODE, Board, panel, quantiles, rate

FLEET = Board(
    "fleet",
    "Upbeat: fleet",
    "What is asked, where it runs, and which devices serve.",
    (
        panel(
            "Answers",
            "By HTTP status.",
            "reqps",
            (rate("upbeat_gateway_requests_total", "status"), "{{status}}"),
            stacked=True,
        ),
        panel(
            "Tokens",
            "Prompt, cached (a part of the prompt) and completion.",
            "short",
            (rate("upbeat_gateway_tokens_total", "kind", OF_MODEL), "{{kind}}"),
        ),
        panel(
            "Devices",
            "By state, as the scheduler sees them.",
            "short",
            ("max by (state) (upbeat_scheduler_nodes)", "{{state}}"),
            stacked=True,
        ),
        panel(
            "Nodes wanted",
            "What the policy of autoscale recommends, and the nodes that belong to the fleet.",
            "short",
            ("max(upbeat_scheduler_desired_nodes)", "wanted"),
            ("max by (state) (upbeat_scheduler_members)", "{{state}}"),
        ),
        panel(
            "Utilisation",
            "Demand a serving device, and the share of the fleet's memory for KV that is needed.",
            "percentunit",
            ("max(upbeat_scheduler_utilisation)", "demand"),
            ("max by (tier) (upbeat_scheduler_kv_needed)", "{{tier}}"),
        ),
        panel(
            "Outstanding work",
            "Seconds of a device, by node.",
            "s",
            (
                f"sum by (node) (max by (node, model) (upbeat_scheduler_work_seconds{{{OF_MODEL}, {OF_NODE}}}))",
                "{{node}}",
            ),
        ),
        panel(
            "Running requests",
            "In steps, by node.",
            "short",
            (f'sum by (node) (upbeat_worker_requests{{state="running", {OF_MODEL}, {OF_NODE}}})', "{{node}}"),
        ),
        panel(
            "Waiting requests",
            "For their turn, for memory, or for their KV, by node.",
            "short",
            (f'sum by (node) (upbeat_worker_requests{{state!="running", {OF_MODEL}, {OF_NODE}}})', "{{node}}"),
        ),
        panel(
            "Placement",
            "Who chose the node: a hint, the session's scheduler, another one, or the gateway itself.",
            "ops",
            (rate("upbeat_gateway_placed_total", "by"), "{{by}}"),
            stacked=True,
        ),
        quantiles("Time to place", "Of the scheduler's decisions.", "upbeat_scheduler_decision_seconds"),
        panel(
            "Turns without a node, retries",
            "A retry is an attempt after the first.",
            "ops",
            (rate("upbeat_scheduler_refused_total"), "no node"),
            (rate("upbeat_gateway_retries_total", "cause"), "{{cause}}"),
        ),
        panel(
            "Refused requests",
            "503: too much of something; 429: a tenant's limit.",
            "ops",
            (rate("upbeat_gateway_shed_total", "what"), "503 {{what}}"),
            (rate("upbeat_gateway_limited_total", "what"), "429 {{what}}"),
        ),
        panel(
            "Processor time",
            "Cores in use, by service.",
            "short",
            (
                'sum by (service, node) (rate(process_cpu_seconds_total{job=~"upbeat-.+"}[$__rate_interval]))',
                "{{service}} {{node}}",
            ),
        ),
        panel(
            "Memory",
            "Resident, by service; the arena counts where it is mapped.",
            "bytes",
            ('sum by (service, node) (process_resident_memory_bytes{job=~"upbeat-.+"})', "{{service}} {{node}}"),
        ),
        panel(
            "Sessions, streams",
            "Sessions that a node has reported; streams between gateways and workers.",
            "short",
            ("max(upbeat_scheduler_sessions)", "sessions"),
            ("sum(upbeat_gateway_worker_streams)", "streams"),
        ),
    ),
)
