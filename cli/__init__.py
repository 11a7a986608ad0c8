"""`upbeat`: starts a stack of services as processes, queries a running one, and checks a machine. Imports no
service."""
