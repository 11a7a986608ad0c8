"""A vLLM server as a node of the fleet: the worker of its device to scheduler and gateways, in front of its HTTP."""
