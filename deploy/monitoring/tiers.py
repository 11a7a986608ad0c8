"""The dashboard `tiers`: where KV lies, how it moves, and what hints bring."""

from __future__ import annotations

from deploy.monitoring.panels import OF_MODEL, OF_NODE, Board, panel, rate

TIERS = Board(
    "tiers",
    "Upbeat: tiers and hints",
    "Where KV lies, how it moves, and what hints bring.",
    (
        panel(
            "Where requests found their KV",
            "Bytes a second by tier.",
            "Bps",
            (rate("upbeat_worker_hit_bytes_total", "tier", OF_NODE), "{{tier}}"),
            (rate("upbeat_kvstore_hit_bytes_total", "tier", OF_NODE), "{{tier}}"),
            stacked=True,
        ),
        panel(
            "Cached share of prompts",
            "Tokens whose KV was not computed.",
            "percentunit",
            (
                rate("upbeat_gateway_tokens_total", "model", f'kind="cached", {OF_MODEL}')
                + " / "
                + rate("upbeat_gateway_tokens_total", "model", f'kind="prompt", {OF_MODEL}'),
                "{{model}}",
            ),
        ),
        panel(
            "Held by tier",
            "HBM, DRAM and SSD of the nodes; blob once.",
            "bytes",
            (f"sum by (tier) (upbeat_worker_used_bytes{{{OF_NODE}}})", "{{tier}}"),
            (f'sum by (tier) (upbeat_kvstore_used_bytes{{tier!="blob", {OF_NODE}}})', "{{tier}}"),
            ('max(upbeat_kvstore_used_bytes{tier="blob"})', "blob"),
        ),
        panel(
            "Into the arena",
            "By source.",
            "Bps",
            (rate("upbeat_kvstore_read_bytes_total", "source", OF_NODE), "{{source}}"),
            stacked=True,
        ),
        panel(
            "Written behind",
            "HBM to DRAM, and to SSD and blob.",
            "Bps",
            (rate("upbeat_worker_saved_bytes_total", "", OF_NODE), "dram"),
            (rate("upbeat_kvstore_written_bytes_total", "tier", OF_NODE), "{{tier}}"),
        ),
        panel(
            "Into HBM",
            "For a request that waits (demand), or a hint.",
            "Bps",
            (rate("upbeat_worker_loaded_bytes_total", "for", OF_NODE), "{{for}}"),
            stacked=True,
        ),
        panel(
            "Evicted",
            "By tier, and why it ranked first.",
            "Bps",
            (rate("upbeat_worker_evicted_bytes_total", "tier, reason", OF_NODE), "{{tier}} {{reason}}"),
            (rate("upbeat_kvstore_evicted_bytes_total", "tier, reason", OF_NODE), "{{tier}} {{reason}}"),
        ),
        panel(
            "Not durable yet",
            "Bytes that wait for a slower tier.",
            "bytes",
            (f"sum by (node, tier) (upbeat_kvstore_write_back_waiting_bytes{{{OF_NODE}}})", "{{node}} {{tier}}"),
        ),
        panel(
            "Reads and loads",
            "Queued or running.",
            "short",
            (f"sum by (what) (upbeat_kvstore_queued{{{OF_NODE}}})", "{{what}}"),
        ),
        panel(
            "How hints ended",
            "used: the turn came; missed: a turn without a hint.",
            "ops",
            (rate("upbeat_scheduler_hint_outcomes_total", "outcome"), "{{outcome}}"),
            stacked=True,
        ),
        panel(
            "What hints brought",
            "Bytes into DRAM and HBM by what became of them.",
            "Bps",
            (rate("upbeat_kvstore_hint_bytes_total", "outcome", OF_NODE), "DRAM {{outcome}}"),
            (rate("upbeat_worker_hint_bytes_total", "outcome", OF_NODE), "HBM {{outcome}}"),
        ),
        panel(
            "Hints that wait",
            "Pending, and the requests expected of them.",
            "short",
            ("sum(upbeat_scheduler_hints_pending)", "pending"),
            ("sum(upbeat_scheduler_expected_arrivals)", "expected"),
        ),
        panel(
            "Hints received",
            "By the gateways, and what schedulers did about them.",
            "ops",
            (rate("upbeat_gateway_hints_total", "kind, outcome"), "{{kind}} {{outcome}}"),
            (rate("upbeat_scheduler_hints_total", "done"), "{{done}}"),
        ),
        panel(
            "Tiers in use",
            "0: a node leaves it alone.",
            "short",
            (f"min by (tier) (upbeat_kvstore_tier_up{{{OF_NODE}}})", "{{tier}}"),
        ),
        panel(
            "Damage and misses",
            "Damaged and missing pieces; chunks that were found nowhere.",
            "ops",
            (rate("upbeat_kvstore_checksum_failures_total", "source", OF_NODE), "damaged {{source}}"),
            (rate("upbeat_kvstore_missing_pieces_total", "source", OF_NODE), "missing {{source}}"),
            (
                rate(
                    "upbeat_kvstore_events_total",
                    "what",
                    f'what=~"chunks_missed|peer_failures|saves_over_limit", {OF_NODE}',
                ),
                "{{what}}",
            ),
        ),
    ),
)
