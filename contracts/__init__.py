"""The vocabulary that every process shares: ids, KV geometry, requests, advisories, errors. Imports no other package."""
