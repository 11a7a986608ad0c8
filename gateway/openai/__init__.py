"""OpenAI's wire format: request schemas, response bodies. Nothing here knows about nodes or caches."""
