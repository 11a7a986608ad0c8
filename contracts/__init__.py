"""The vocabulary of all processes: ids, KV geometry, requests, advisories, errors. Imports no other package."""
