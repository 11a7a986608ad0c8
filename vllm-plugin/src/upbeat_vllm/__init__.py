"""Upbeat's KV connector for vLLM: a node's store keeps, moves and brings back the KV of sessions.

vLLM loads `UpbeatConnector` by `--kv-transfer-config` (`upbeat vllm-config` prints it). Its scheduler side asks the
store and decides (`core.py`); its rank side copies between the store's arena and vLLM's blocks (`rank_side.py`).
"""
